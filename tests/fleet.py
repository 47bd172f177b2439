"""A job of many ranks: made rank by rank, reduced, joined from its summaries, and its planted faults named.

    python3 tests/fleet.py RELEASE RANKS EVENTS

RELEASE is the folder of `gputrace` and `examples/ranks`. Needs room for a few traces and all summaries, in a folder that goes away.
The middle rank skips a collective, the next one calls one with another count, the one after that keeps memory. Figures are printed; a fault that is not named, or a
join whose answer is not that of the traces (where these are few), is an error. Where this Python has `duckdb`, the queries of
docs/SQL.md are asked of the summaries; one that fails, or peaks that are not those of the traces, are an error too.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

BATCH = 16
# Ranks whose traces are kept, to compare the answers.
FEW = 64
# What reducing one trace may take, whatever its length.
MOST_KIB = 300 << 10


def run(*command):
    """What a program says, and what it alone took: seconds of a processor, seconds, its most memory in KiB."""
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        said = program.stdout.read()
        # The usage of this child: that of all children has the memory of the largest until now.
        _, status, usage = os.wait4(program.pid, 0)
        program.returncode = os.waitstatus_to_exitcode(status)
    if program.returncode:
        raise subprocess.CalledProcessError(program.returncode, command)
    return said, usage.ru_utime + usage.ru_stime, time.monotonic() - began, usage.ru_maxrss


def ask(gputrace, summaries, traces):
    """Every query of the documentation runs on `summaries`, and peaks are those that `gputrace summary` says of `traces`."""
    try:
        import duckdb
    except ImportError:
        print("SQL: not tried, this Python has no duckdb")
        return
    page = (pathlib.Path(__file__).parent.parent / "docs/SQL.md").read_text()
    blocks = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    queries = [query for block in blocks for query in block.split(";") if "'summaries/*.parquet'" in query]
    assert queries, "docs/SQL.md has no queries"
    files = f"{summaries}/*.parquet"
    database, began = duckdb.connect(), time.monotonic()
    for query in queries:
        database.sql(query.replace("summaries/*.parquet", files)).fetchall()
    print(f"SQL: {len(queries)} queries of docs/SQL.md in {time.monotonic() - began:.1f} s")
    for trace in traces:
        process, = json.loads(run(gputrace, "summary", "--json", trace)[0])["processes"]
        said = max(device["torch"]["peak_allocated_bytes"] for device in process["devices"] if device.get("torch"))
        rank = re.search(r"rank(\d+)", os.path.basename(trace))[1]
        (found,), = database.sql(
            f"select max(bytes) from '{files}' where kind = 'peak' and name = 'allocated' and rank = {rank}").fetchall()
        assert found == said > 0, f"rank {rank}: a peak of {found} in the summary, {said} in the trace"


def main():
    release, ranks, events = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    gputrace, generator = f"{release}/gputrace", f"{release}/examples/ranks"
    with tempfile.TemporaryDirectory() as folder:
        traces, summaries = f"{folder}/traces", f"{folder}/summaries"
        spent, most = 0, 0
        for first in range(0, ranks, BATCH):
            last = min(first + BATCH, ranks) - 1
            run(generator, traces, str(ranks), str(events), str(first), str(last))
            for rank in range(first, last + 1):
                trace = f"{traces}/rank{rank}.gtr"
                _, seconds, _, memory = run(gputrace, "reduce", "-o", summaries, trace)
                spent, most = spent + seconds, max(most, memory)
                if ranks > FEW:
                    os.remove(trace)
        sizes = [entry.stat().st_size for entry in os.scandir(summaries)]
        print(f"reduce: {ranks * events / spent / 1e6:.2f} M events/s of a processor, at most {most >> 10} MiB, "
              f"summaries of {sum(sizes) / len(sizes) / 1e3:.0f} kB")
        assert most < MOST_KIB, f"reduce took {most >> 10} MiB"
        said, seconds, passed, memory = run(gputrace, "ranks", "--json", summaries)
        print(f"join: {passed:.1f} s ({seconds:.1f} s of processors), at most {memory >> 10} MiB")
        if ranks <= FEW:
            assert run(gputrace, "ranks", "--json", traces)[0] == said, "the summaries say something else than the traces"
        ask(gputrace, summaries, [f"{traces}/rank{rank}.gtr" for rank in range(ranks)] if ranks <= FEW else [])
        job, = json.loads(said)["jobs"]
        blamed = {rank for finding in job["findings"] for rank in finding["ranks"]}
        planted = {ranks // 2, ranks // 2 + 1}
        print("named by ranks:", sorted(blamed), "of", sorted(planted))
        assert blamed == planted, job["findings"]
        leaks = json.loads(run(gputrace, "leaks", "--json", summaries)[0])
        grows = {process["rank"]: section["growth"][0]["call_site"]
                 for process in leaks["processes"] for section in process["sections"] if section.get("growth")}
        print("named by leaks:", grows)
        assert grows == {ranks // 2 + 2: "step (/job/train.py:11)"}, grows
        os.remove(min(entry.path for entry in os.scandir(summaries)))
        job, = json.loads(run(gputrace, "ranks", "--json", summaries)[0])["jobs"]
        assert job["missing"] == [0], job["missing"]
        print("a rank without a summary is named")


main()
