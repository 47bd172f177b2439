"""check.py CONSUMER FILE SUMMARY FOLDER: opens an export with a program that people open it with, and holds its numbers against
`gputrace summary --json`. FOLDER is where setup.sh put things. Exit status 77: the consumer is not here, and the reason is printed.

Every figure is counted anew from what the consumer read; nothing of gputrace is used.
"""
import json, os, pickle, pickletools, re, shutil, subprocess, sys, xml.etree.ElementTree

CONSUMERS = {}


def consumer(function):
    CONSUMERS[function.__name__] = function
    return function


def main():
    name, file, summary, folder = sys.argv[1:]
    with open(summary) as text:
        process = json.load(text)["processes"][0]
    try:
        CONSUMERS[name](file, process, process["devices"][0], folder)
    except ImportError as error:
        print(f"{error.name} is not installed (tests/consumers/setup.sh)")
        sys.exit(77)


def same(what, found, expected):
    if found != expected:
        sys.exit(f"{what}: {found} in the export, {expected} in the summary")


def rows_agree(one, device):
    """`one` answers a query with one number: for every program that knows SQL."""
    torch, driver = device["torch"], device["driver"]
    same("peak of the device", one("SELECT max(device_bytes) FROM rows WHERE device = 0"), driver["peak_bytes"])
    same("peak allocated", one("SELECT max(torch_allocated_bytes) FROM rows"), torch["peak_allocated_bytes"])
    same("peak reserved", one("SELECT max(torch_reserved_bytes) FROM rows"), torch["peak_reserved_bytes"])
    same("blocks", one("SELECT count(*) FROM rows WHERE kind = 'block' AND action = 'alloc'"), torch["allocations"])
    same("blocks freed", one("SELECT count(*) FROM rows WHERE kind = 'block' AND action = 'free'"), torch["frees"])
    same("errors", one("SELECT count(*) FROM rows WHERE action = 'oom'"), torch["ooms"])
    held = "sum(CASE action WHEN 'alloc' THEN bytes WHEN 'free' THEN -bytes ELSE 0 END)"
    physical = "kind IN ('linear', 'virtual', 'async', 'array') AND device = 0"
    same("live at the end", one(f"SELECT {held} FROM rows WHERE {physical}"), driver["live_bytes"])
    for owner in device["owners"]:
        found = one(f"SELECT {held} FROM rows WHERE {physical} AND owner = '{owner['owner']}'")
        same(f"live of {owner['owner']}", found, owner["live_bytes"])


@consumer
def duckdb_parquet(file, process, device, folder):
    import duckdb
    database = duckdb.connect()
    database.execute(f"CREATE VIEW rows AS SELECT * FROM read_parquet('{file}')")
    rows_agree(lambda query: number(database.execute(query).fetchone()[0]), device)
    [(least, most)] = database.execute("SELECT min(rank), max(pid) FROM rows").fetchall()
    same("rank and process", (least, most), (process["rank"], process["pid"]))


@consumer
def duckdb_csv(file, process, device, folder):
    import duckdb
    database = duckdb.connect()
    database.execute(f"CREATE VIEW rows AS SELECT * FROM read_csv('{file}', sample_size = -1)")
    rows_agree(lambda query: number(database.execute(query).fetchone()[0]), device)


@consumer
def duckdb_jsonl(file, process, device, folder):
    import duckdb
    database = duckdb.connect()
    database.execute(f"CREATE VIEW rows AS SELECT * FROM read_json('{file}', format = 'newline_delimited', sample_size = -1)")
    rows_agree(lambda query: number(database.execute(query).fetchone()[0]), device)


@consumer
def duckdb_nccl(file, process, device, folder):
    import duckdb
    database = duckdb.connect()
    database.execute(f"CREATE VIEW lines AS SELECT * FROM read_json('{file}', format = 'newline_delimited', sample_size = -1)")
    one = lambda query: number(database.execute(query).fetchone()[0])
    held = "sum(CASE action WHEN 'alloc' THEN bytes ELSE -bytes END)"
    owner = next(owner for owner in device["owners"] if owner["owner"] == "NCCL")
    same("live of NCCL", one(f"SELECT {held} FROM lines WHERE record = 'memory' AND device = 0"), owner["live_bytes"])
    same("process", one("SELECT pid FROM lines WHERE record = 'process'"), process["pid"])
    if not one("SELECT count(*) FROM lines WHERE record = 'call' AND api = 'ncclAllReduce'"):
        sys.exit("no call of NCCL")


def number(value):
    """DuckDB's sums are of 128 bits."""
    return int(value)


@consumer
def pandas_parquet(file, process, device, folder):
    import pandas
    rows = pandas.read_parquet(file)
    torch = device["torch"]
    same("peak of the device", rows[rows.device == 0].device_bytes.max(), device["driver"]["peak_bytes"])
    blocks = rows[(rows.kind == "block") & (rows.action == "alloc")]
    same("blocks", len(blocks), torch["allocations"])
    same("peak requested", peak_requested(rows), torch["peak_requested_bytes"])
    if not blocks.frames.str.contains(";").any():
        sys.exit("blocks have no stacks")


def peak_requested(rows):
    """A request counts until no stream uses its block any more."""
    rows = rows[(rows.kind == "block") & rows.action.isin(["alloc", "free_completed"])]
    signs = rows.action.map({"alloc": 1, "free_completed": -1})
    return (signs * rows.requested_bytes).cumsum().max()


@consumer
def perfetto(file, process, device, folder):
    """Perfetto's own messages; its trace processor is no package."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent
    trace = Trace()
    with open(file, "rb") as data:
        trace.ParseFromString(data.read())
    tracks, values, peak, ooms, slices, weights, interned, stacks = {}, {}, 0, 0, [], 0, {}, set()
    depth, time = 0, 0
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            descriptor = packet.track_descriptor
            tracks[descriptor.uuid] = descriptor
            if descriptor.HasField("counter") and descriptor.counter.unit != descriptor.counter.UNIT_SIZE_BYTES:
                sys.exit("a counter has another unit")
        if packet.HasField("track_event"):
            event = packet.track_event
            if event.track_uuid not in tracks:
                sys.exit("an event of an unknown track")
            if event.type == TrackEvent.TYPE_COUNTER:
                # Counters of one instant are one change.
                if packet.timestamp != time:
                    peak, time = max(peak, sum(values.values())), packet.timestamp
                values[event.track_uuid] = event.counter_value
            ooms += event.type == TrackEvent.TYPE_INSTANT
            if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                slices.append(event.name)
                depth += 1
            depth -= event.type == TrackEvent.TYPE_SLICE_END
        for callstack in packet.interned_data.callstacks:
            interned[callstack.iid] = callstack
        if packet.HasField("stack_sample"):
            weights += packet.stack_sample.primary_weight
            stacks.add(packet.stack_sample.callstack_iid)
    peak = max(peak, sum(values.values()))
    same("peak of the counters", peak, device["driver"]["peak_bytes"])
    same("live at the end", sum(values.values()), device["driver"]["live_bytes"])
    same("errors", ooms, device["torch"]["ooms"])
    names = {track.name for track in tracks.values() if track.HasField("counter")}
    for owner in device["owners"]:
        if not any(owner["owner"] in name for name in names):
            sys.exit(f"no counter of {owner['owner']}: {names}")
    if not stacks or not stacks <= set(interned) or not weights:
        sys.exit("stack samples name unknown stacks")
    if depth or "ncclAllReduce" not in slices:
        sys.exit(f"slices of NCCL: {slices[:3]}, {depth} open")
    process_track = next(track.process for track in tracks.values() if track.HasField("process"))
    same("process", process_track.pid, process["pid"])


@consumer
def speedscope_schema(file, process, device, folder):
    """The schema that speedscope's package has in it."""
    import jsonschema
    schema = f"{folder}/node_modules/speedscope/dist/release/file-format-schema.json"
    if not os.path.exists(schema):
        print("speedscope is not installed (tests/consumers/setup.sh)")
        sys.exit(77)
    with open(file) as data, open(schema) as text:
        profile = json.load(data)
        jsonschema.validate(profile, json.load(text))
    same("peak", sum(profile["profiles"][0]["weights"]), device["driver"]["peak_bytes"])


@consumer
def folded(file, process, device, folder):
    with open(file) as lines:
        stacks = [line.rstrip("\n").rsplit(" ", 1) for line in lines]
    same("peak", sum(int(count) for _, count in stacks), device["driver"]["peak_bytes"])
    for owner in device["owners"]:
        held = sum(int(count) for stack, count in stacks if stack.split(";")[1] == owner["owner"])
        same(f"{owner['owner']} at the peak", held, owner["bytes_at_peak"])


@consumer
def svg(file, process, device, folder):
    root = xml.etree.ElementTree.parse(file).getroot()
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    whole = next(title for title in titles if title.startswith("all ("))
    # As people read it, with two digits.
    number, unit = re.match(r"all \(([\d.]+) ([KMGT]?i?B)", whole).groups()
    size = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    same("peak", number, f"{device['driver']['peak_bytes'] / size:.2f}")


@consumer
def firefox_schema(file, process, device, folder):
    """What the processed profile format asks for: columns of one length, and indices into each other. check.mjs has the profiler itself."""
    with open(file) as data:
        profile = json.load(data)
    same("version", profile["meta"]["preprocessedProfileVersion"], 55)
    for thread in profile["threads"]:
        tables = [thread[name] for name in ("frameTable", "funcTable", "stackTable", "markers", "samples", "nativeAllocations", "resourceTable", "nativeSymbols")]
        for table in tables:
            wrong = [name for name, column in table.items() if isinstance(column, list) and len(column) != table["length"]]
            if wrong:
                sys.exit(f"columns of another length: {wrong}")
        for column, table in [(thread["stackTable"]["frame"], "frameTable"), (thread["frameTable"]["func"], "funcTable"),
                              (thread["nativeAllocations"]["stack"], "stackTable"), (thread["stackTable"]["prefix"], "stackTable")]:
            if any(index is not None and not 0 <= index < thread[table]["length"] for index in column):
                sys.exit(f"an index beyond the {table}")
        if any(prefix is not None and prefix >= stack for stack, prefix in enumerate(thread["stackTable"]["prefix"])):
            sys.exit("a stack comes before its prefix")
        names = thread["funcTable"]["name"] + [file for file in thread["funcTable"]["fileName"] if file is not None]
        if max(names) >= len(thread["stringArray"]):
            sys.exit("an index beyond the strings")
    main = profile["threads"][0]
    level, peak = 0, 0
    for count in profile["counters"][0]["samples"]["count"]:
        level += count
        peak = max(peak, level)
    same("peak of the memory track", peak, device["driver"]["peak_bytes"])
    same("end of the memory track", level, device["driver"]["live_bytes"])
    retained = {}
    allocations = main["nativeAllocations"]
    for address, weight in zip(allocations["memoryAddress"], allocations["weight"]):
        retained[address] = retained.get(address, 0) + weight
    if any(bytes < 0 for bytes in retained.values()):
        sys.exit("something is freed that was not allocated")
    same("blocks", sum(weight > 0 for weight in allocations["weight"]) - not_torch(device), device["torch"]["allocations"])
    same("errors", main["markers"]["length"], device["torch"]["ooms"])


def not_torch(device):
    """Objects of others than PyTorch: those of the driver without PyTorch's segments."""
    return device["driver"]["allocs"] - device["torch"]["device_allocs"]


# Opcodes that PyTorch's viewer reads (`unpickle` in torch/utils/viz/MemoryViz.js, 2.9).
READ_BY_THE_VIEWER = set("""APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE DICT EMPTY_DICT EMPTY_LIST EMPTY_TUPLE FRAME
    LIST LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE NONE PROTO SETITEM SETITEMS SHORT_BINUNICODE STOP TUPLE TUPLE1 TUPLE2 TUPLE3""".split())


@consumer
def go_pprof(file, process, device, folder):
    """`go tool pprof`: the sum of all lines, and names as they are in the program."""
    command = ["go", "tool", "pprof"] if shutil.which("go") else [f"{folder}/pprof"]
    if len(command) == 1 and not os.path.exists(command[0]):
        print("no go tool pprof (tests/consumers/setup.sh)")
        sys.exit(77)
    options = ["-top", "-sample_index=inuse_space", "-unit=B", "-nodecount=1000000", "-nodefraction=0", "-edgefraction=0"]
    environment = dict(os.environ, PPROF_TMPDIR=os.path.dirname(file), HOME=os.path.dirname(file))
    told = subprocess.run([*command, *options, file], capture_output=True, text=True, check=True, env=environment)
    rows = told.stdout.split("flat  flat%", 1)[1].splitlines()[1:]
    rows = [row.split(None, 5) for row in rows]
    same("peak", sum(int(row[0].removesuffix("B")) for row in rows), device["driver"]["peak_bytes"])
    names = {row[5] for row in rows}
    same("lines of no function", "<module>" in names, True)
    same("names that were lost", [name for name in names if "<unknown>" in name], [])


@consumer
def torch_memory_viz(file, process, device, folder):
    """PyTorch's own torch/cuda/_memory_viz.py."""
    if not os.path.exists(f"{folder}/_memory_viz.py"):
        print("torch/cuda/_memory_viz.py could not be fetched (tests/consumers/setup.sh)")
        sys.exit(77)
    sys.path.insert(0, folder)
    import _memory_viz
    with open(file, "rb") as data:
        snapshot = pickle.load(data)
    entries = [entry for entry in snapshot["device_traces"][0]]
    count = lambda action: sum(entry["action"] == action for entry in entries)
    torch = device["torch"]
    same("blocks", count("alloc"), torch["allocations"])
    same("blocks freed", count("free_requested"), torch["frees"])
    same("segments", count("segment_alloc"), torch["device_allocs"])
    same("errors", count("oom"), torch["ooms"])
    reserved, peak = 0, 0
    for entry in entries:
        reserved += {"segment_alloc": entry["size"], "segment_free": -entry["size"]}.get(entry["action"], 0)
        peak = max(peak, reserved)
    same("peak reserved", peak, torch["peak_reserved_bytes"])
    told = _memory_viz.segsum(snapshot)
    same("segments at the end, as PyTorch sums them", sum(segment["total_size"] for segment in snapshot["segments"]), reserved)
    if "segments:" not in told or "alloc" not in _memory_viz.trace(snapshot):
        sys.exit(f"PyTorch says: {told[:300]}")
    folded = _memory_viz.memory(snapshot, format_flamegraph=lambda lines: lines)
    sizes = sum(int(line.rsplit(" ", 1)[1]) for line in folded.splitlines())
    same("bytes of the flame graph that PyTorch makes", sizes, reserved)
    if not any("train_lm.py" in frame["filename"] for entry in entries for frame in entry["frames"]):
        sys.exit("no stacks")
    with open(file, "rb") as data:
        unknown = {opcode.name for opcode, _, _ in pickletools.genops(data.read())} - READ_BY_THE_VIEWER
    if unknown:
        sys.exit(f"opcodes that PyTorch's viewer does not read: {unknown}")


main()
