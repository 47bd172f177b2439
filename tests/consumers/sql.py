"""sql.py FOLDER PAGE...: runs every query of pages in DuckDB, in a folder with summaries/, rows.parquet and summary.json (`gputrace summary --json`
of the same traces), and holds peaks, owners and what is live against it. Status 77: there is no DuckDB."""
import json
import os
import re
import sys

try:
    import duckdb
except ImportError as error:
    print(f"{error} (tests/consumers/setup.sh installs it)")
    sys.exit(77)

# The fewest queries of all pages: fewer, and a page was not read.
LEAST = 8


def same(what, found, expected):
    if found != expected:
        sys.exit(f"{what}: {found} in SQL, {expected} in the summary")


def main():
    pages = [open(page).read() for page in sys.argv[2:]]
    os.chdir(sys.argv[1])
    blocks = [block for page in pages for block in re.findall(r"```sql\n(.*?)```", page, re.DOTALL)]
    queries = [query.strip() for block in blocks for query in block.split(";") if query.strip()]
    if len(queries) < LEAST:
        sys.exit(f"only {len(queries)} queries were found")
    answers = {}
    for query in queries:
        try:
            answers[query] = duckdb.sql(query).fetchall()
        except duckdb.Error as error:
            sys.exit(f"{query}\n{error}")
    processes = json.load(open("summary.json"))["processes"]
    devices = [(process, device) for process in processes for device in process["devices"]]
    peaks = sorted((device["driver"]["peak_bytes"] for _, device in devices), reverse=True)
    first = queries[0]
    same("highest peaks", [row[4] for row in answers[first]], peaks[:5])
    _, device = max(devices, key=lambda pair: pair[1]["driver"]["peak_bytes"])
    owners = sorted(((row["owner"], row["bytes_at_peak"]) for row in device["owners"]), key=lambda row: -row[1])
    same("owners of the highest", [row[:2] for row in answers[queries[1]]], [owner for owner in owners if owner[1] > 0])
    run, = [process for process in processes if process["trace"].endswith("varying-lengths.gtr")]
    torch = [device["torch"] for device in run["devices"] if device.get("torch")][0]
    peak = "select max(torch_allocated_bytes) from 'rows.parquet'"
    total = "select sum(bytes) from 'summaries/*.parquet' where kind = 'peak' and name = 'device'"
    same("all peaks", int(duckdb.sql(total).fetchone()[0]), sum(peaks))
    same("PyTorch's peak", duckdb.sql(peak).fetchone()[0], torch["peak_allocated_bytes"])
    silent = [query for query in queries if not answers[query]]
    if silent:
        sys.exit("without an answer:\n" + "\n".join(silent))
    print(f"{len(queries)} queries")


main()
