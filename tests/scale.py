#!/usr/bin/env python3
"""scale.py FOLDER [EVENTS]: seconds and memory that the report and every export take of a long trace, on this machine.

FOLDER has `gputrace` and `examples/training`, which makes the trace (ten million events if nothing else is said). Nothing is asserted: the goals,
on 2 cores, are 5 s and 1 GiB for the report, and 60 s for each export. `x summary` is the processor time
against that of `gputrace summary`, which reads all events once and writes next to nothing.
"""
import os, re, subprocess, sys, tempfile, time


def main():
    folder = sys.argv[1]
    n_events = sys.argv[2] if len(sys.argv) > 2 else "10000000"
    gputrace = os.path.join(folder, "gputrace")
    with tempfile.TemporaryDirectory(dir=folder) as work:
        trace = os.path.join(work, "training.gtr")
        told = subprocess.run([os.path.join(folder, "examples/training"), trace, n_events], check=True, capture_output=True, text=True)
        print(told.stdout.split(":")[0])
        print(f"{'':24}{'seconds':>9}{'of processor':>14}{'x summary':>11}{'MiB':>8}{'bytes out':>15}")
        least = measure("summary", [gputrace, "summary", "--json", trace], os.path.join(work, "out"), None)
        measure("report", [gputrace, "report", trace], os.path.join(work, "out"), least)
        for name in formats(gputrace):
            command = [gputrace, "export", "--format", name, trace]
            measure(f"export {name}", command, os.path.join(work, "out"), least)


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
