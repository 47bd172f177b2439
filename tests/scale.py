#!/usr/bin/env python3
"""scale.py FOLDER [EVENTS [WHAT]]: seconds and memory that the report, replays and every export take of a long trace, on this machine.

FOLDER has `gputrace` and `examples/training`, which makes the trace (ten million events if nothing else is said). Nothing is asserted: the goals,
on 2 cores, are 5 s and 1 GiB for the report, 1 GiB for the replay of a trace and of a PyTorch snapshot with as many events, and 60 s
for each export. `x summary` is the processor time against that of `gputrace summary`, which reads all events once and writes next
to nothing. `predict` is of two runs of a million requests each, of which the larger asks for workspaces that the other does not; its
goal is 2 s. Rows named after `steady`, `changing` and `random` steps are of 1, 3 and 10 million events; their
`x summary` is against a summary of the same trace. The last rows are the verbs that read a trace once and replay nothing: seconds on one
processor, on all of them, and how many times as fast that is, each the best of three runs in turn; the goal is 1.7 on 2 cores.
WHAT is `replay` for the replays alone, `predict` for predictions, and `reading` for those last rows.
"""
import heapq, os, re, struct, subprocess, sys, tempfile, time


def main():
    folder = sys.argv[1]
    n_events = sys.argv[2] if len(sys.argv) > 2 else "10000000"
    gputrace = os.path.join(folder, "gputrace")
    with tempfile.TemporaryDirectory(dir=folder) as work:
        trace = os.path.join(work, "training.gtr")
        told = subprocess.run([os.path.join(folder, "examples/training"), trace, n_events], check=True, capture_output=True, text=True)
        print(told.stdout.split(":")[0])
        if sys.argv[3:] == ["reading"]:
            return reading(folder, work, gputrace, n_events)
        print(f"{'':24}{'seconds':>9}{'of processor':>14}{'x summary':>11}{'MiB':>8}{'bytes out':>15}")
        least = measure("summary", [gputrace, "summary", "--json", trace], os.path.join(work, "out"), None)
        if sys.argv[3:] != ["replay"]:
            runs = [(batch, os.path.join(work, f"batch{batch}.gtr")) for batch in (4, 8)]
            for batch, path in runs:
                subprocess.run([os.path.join(folder, "examples/training"), path, "2050000", "whole", str(batch)], check=True, stdout=subprocess.DEVNULL)
            measure("predict", [gputrace, "predict", *(f"batch={batch}:{path}" for batch, path in runs), "--at", "batch=32"], os.path.join(work, "out"), least)
            if sys.argv[3:] == ["predict"]:
                return
        steps(folder, work, gputrace)
        whole = os.path.join(work, "whole.gtr")
        subprocess.run([os.path.join(folder, "examples/training"), whole, n_events, "whole"], check=True, stdout=subprocess.DEVNULL)
        measure("replay", [gputrace, "replay", whole], os.path.join(work, "out"), least)
        pickle = os.path.join(work, "snapshot.pickle")
        n_rows = snapshot(pickle, int(n_events))
        measure(f"replay {n_rows:,} rows", [gputrace, "replay", "--torch-version", "2.11", pickle], os.path.join(work, "out"), least)
        os.unlink(pickle)
        if sys.argv[3:] == ["replay"]:
            return
        measure("report", [gputrace, "report", trace], os.path.join(work, "out"), least)
        for name in formats(gputrace):
            command = [gputrace, "export", "--format", name, trace]
            measure(f"export {name}", command, os.path.join(work, "out"), least)
        reading(folder, work, gputrace, n_events)


def reading(folder, work, gputrace, n_events):
    """Verbs that read a trace once: on one processor, and on all that there are."""
    steady = os.path.join(work, "steady.gtr")
    subprocess.run([os.path.join(folder, "examples/training"), steady, n_events, "whole", "1", "steady"], check=True, stdout=subprocess.DEVNULL)
    processors = os.sched_getaffinity(0)
    print(f"{'':24}{'one core':>9}{f'{len(processors)} cores':>14}{'faster':>11}{'MiB':>8}")
    for verb in ("summary", "report", "leaks", "stats", "tree"):
        runs = {}
        for _ in range(3):
            for some in ({min(processors)}, processors):
                runs.setdefault(len(some), []).append(seconds_on(some, [gputrace, verb, steady]))
        one, all_of_them = min(runs[1]), min(runs[len(processors)])
        print(f"{verb:24}{one[0]:9.2f}{all_of_them[0]:14.2f}{one[0] / all_of_them[0]:11.2f}{all_of_them[1] / 1024:8.0f}", flush=True)
    os.unlink(steady)


def seconds_on(processors, command):
    """Seconds that a command takes on these processors, and the most KiB that it holds."""
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.sched_setaffinity(0, processors))
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{command}: exit {process.returncode}")
    return time.monotonic() - begin, used.ru_maxrss


def steps(folder, work, gputrace):
    """Replays of runs whose steps are alike, change slowly, or never repeat: processor time against that of reading each trace once."""
    for kind in ("steady", "changing", "random"):
        for millions in (1, 3, 10):
            path = os.path.join(work, f"{kind}.gtr")
            made = [os.path.join(folder, "examples/training"), path, str(millions * 1_000_000), "whole", "1", kind]
            subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
            least = measure(f"{kind} {millions}M summary", [gputrace, "summary", path], os.path.join(work, "out"), None)
            for verb in ("replay", "oom", "tune"):
                measure(f"{kind} {millions}M {verb}", [gputrace, verb, path], os.path.join(work, "out"), least)
            os.unlink(path)


def snapshot(path, n_events):
    """Writes what torch.cuda.memory._dump_snapshot would of a training loop: each layer allocates an activation and, in the
    small pool, something temporary; the backward pass frees them. As CPython pickles it, but without all of it in memory."""
    with open(path, "wb") as file:
        pickler = Pickler(file)
        pickler.raw(b"\x80\x04}")
        pickler.remember()
        pickler.raw(b"(")
        pickler.text("device_traces")
        for _ in range(2):
            pickler.raw(b"]")
            pickler.remember()
            pickler.raw(b"(")
        n_rows, segments = training(pickler, n_events)
        pickler.raw(b"ee")
        pickler.text("segments")
        pickler.raw(b"]")
        pickler.remember()
        pickler.raw(b"(")
        for address, size, kind in segments:
            block = {"size": size, "requested_size": size, "address": address, "state": "inactive"}
            segment = {"device": 0, "address": address, "total_size": size, "stream": 0, "segment_type": kind, "is_expandable": False}
            pickler.dict(segment, {"blocks": [block]})
        pickler.raw(b"eu.")
    return n_rows


def training(pickler, n_events, n_layers=64, small=1 << 19):
    """The rows, a thousand to a batch as CPython writes them. Returns how many, and the segments at the end."""
    stacks = [[("forward", "model.py", 10 + layer), ("step", "train.py", 40), ("<module>", "train.py", 90)] for layer in range(n_layers)]
    sizes = [(10 + 2 * (layer * 7 % 11)) << 20 for layer in range(n_layers)]
    top, segments, free, n_rows = 0x7F0000000000, [], {}, 0

    def row(action, address, size, layer):
        nonlocal n_rows
        pickler.entry(action, address, size, 1_790_000_000_000_000 + n_rows * 31, layer, stacks[layer])
        n_rows += 1
        if n_rows % 1000 == 0:
            pickler.raw(b"e(")

    def bought(size, layer, kind):
        nonlocal top
        top -= 64 << 20
        segments.append((top, size, kind))
        row("segment_alloc", top, size, layer)
        return top

    temporary = None
    while n_rows < n_events:
        live = []
        for layer, size in enumerate(sizes):
            cached = free.setdefault(size, [])
            address = heapq.heappop(cached) if cached else bought(size, layer, "large")
            row("alloc", address, size, layer)
            live.append((address, size, layer))
            temporary = temporary or bought(2 << 20, layer, "small")
            for action in ("alloc", "free_requested", "free_completed"):
                row(action, temporary, small, layer)
        for address, size, layer in reversed(live):
            row("free_requested", address, size, layer)
            row("free_completed", address, size, layer)
            heapq.heappush(free[size], address)
    return n_rows, segments


class Pickler:
    """Protocol 4, value by value."""

    def __init__(self, file):
        self.file, self.n_known, self.known, self.parts = file, 0, {}, {}

    def raw(self, what):
        self.file.write(what)

    def remember(self):
        self.file.write(b"\x94")
        self.n_known += 1

    def recalled(self, number):
        return b"h%c" % number if number < 256 else b"j" + struct.pack("<I", number)

    def text(self, text):
        if text in self.known:
            return self.raw(self.recalled(self.known[text]))
        self.raw(b"\x8c%c" % len(text) + text.encode())
        self.known[text] = self.n_known
        self.remember()

    def value(self, value):
        if isinstance(value, str):
            self.text(value)
        elif isinstance(value, bool):
            self.raw(b"\x88" if value else b"\x89")
        elif isinstance(value, int):
            self.raw(b"\x8a\x08" + struct.pack("<q", value) if value >> 31 else b"J" + struct.pack("<i", value))
        else:
            self.raw(b"]")
            self.remember()
            self.raw(b"(")
            for item in value:
                self.dict(item, {})
            self.raw(b"e")

    def dict(self, *parts):
        self.raw(b"}")
        self.remember()
        self.raw(b"(")
        for part in parts:
            for key, value in part.items():
                self.text(key)
                self.value(value)
        self.raw(b"u")

    def entry(self, action, address, size, time, stack, frames):
        """What a trace of one device is a list of; rows alike but for the time are put together from the same bytes."""
        parts = self.parts.get((action, address, size, stack))
        if not parts:
            # Everything that a row names is known from here on.
            for text in ("action", action, "addr", "size", "stream", "frames", "time_us", "compile_context", "N/A"):
                if text not in self.known:
                    self.text(text)
                    self.raw(b"0")
            if stack not in self.known:
                self.known[stack] = self.n_known
                self.value([{"name": name, "filename": file, "line": line} for name, file, line in frames])
                self.raw(b"0")
            name = lambda what: self.recalled(self.known[what])
            number = lambda value: b"\x8a\x08" + struct.pack("<q", value)
            fields = [("action", name(action)), ("addr", number(address)), ("size", number(size)), ("stream", b"K\0")]
            fields += [("compile_context", name("N/A")), ("frames", name(stack))]
            parts = b"}\x94(" + b"".join(name(key) + value for key, value in fields) + name("time_us") + b"\x8a\x08"
            self.parts[(action, address, size, stack)] = parts
        self.n_known += 1
        self.file.write(parts + struct.pack("<q", time) + b"u")


def formats(gputrace):
    told = subprocess.run([gputrace, "export", "--format", "?", "x"], capture_output=True, text=True).stderr
    return re.search(r"possible values: ([^\]]+)", told)[1].split(", ")


def measure(what, command, output, least):
    with open(output, "wb") as out:
        begin = time.monotonic()
        process = subprocess.Popen(command, stdout=out)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.monotonic() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{command}: exit {process.returncode}")
    processor = used.ru_utime + used.ru_stime
    ratio = f"{processor / least:.1f}" if least else ""
    print(f"{what:24}{seconds:9.1f}{processor:14.1f}{ratio:>11}{used.ru_maxrss / 1024:8.0f}{os.path.getsize(output):15,}", flush=True)
    os.unlink(output)
    return processor


main()
