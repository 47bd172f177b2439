#!/usr/bin/env python3
"""page_speed.py RELEASE [EVENTS [RANKS]]: what `gputrace html`, its page and `gputrace serve` take of long traces, on this machine (`make bench-page`).

RELEASE is the folder of `gputrace` and of `examples/training` and `examples/ranks`, which make the traces: one of ten million events and a job of
8 x 1 million, if nothing else is said. Nothing is asserted. The goals, on 2 processors: a page of at most 20 MB, made in less than 20 s and 1.5 GiB, which
opens in less than 2 s with less than 300 MB of heap, and moves and zooms in less than 33 ms for 95 of 100 frames, drawn without a graphics card.
Programs are kept to two processors where there are more. Where Chromium or Node.js is missing, pages are made and not opened. PAGES=FOLDER keeps the pages.
"""
import json, os, random, re, shutil, subprocess, sys, tempfile, time, urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def main():
    release = os.path.abspath(sys.argv[1])
    events = int(sys.argv[2]) if len(sys.argv) > 2 else 10_000_000
    ranks = int(sys.argv[3]) if len(sys.argv) > 3 else 8
    example = lambda name: os.path.join(release, "examples", name)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    with tempfile.TemporaryDirectory(dir=release) as work:
        pages = os.environ.get("PAGES") or work
        one, job = os.path.join(work, "one.gtr"), os.path.join(work, "job")
        subprocess.run([example("training"), one, str(events), "whole"], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([example("ranks"), job, str(ranks), str(events // 10)], check=True, stdout=subprocess.DEVNULL)
        print(f"load of the machine before: {os.getloadavg()[0]:.1f}")
        print(f"{'':28}{'seconds':>9}{'of processor':>14}{'MiB':>8}{'page, MB':>10}")
        made = [made_of(release, os.path.join(pages, name), trace, words) for name, trace, words in [
            ("one.html", one, f"{events:,} events"), ("job.html", job, f"{ranks} x {events // 10:,} events")]]
        opened(made)
        served(release, one, f"{events:,} events")
        print(f"load of the machine after: {os.getloadavg()[0]:.1f}")


def made_of(release, page, trace, words):
    began = time.monotonic()
    process = subprocess.Popen([os.path.join(release, "gputrace"), "html", "-F", "-o", page, trace], stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"gputrace html {trace}: exit status {process.returncode}")
    took, of_processor = time.monotonic() - began, usage.ru_utime + usage.ru_stime
    print(f"{words:28}{took:9.1f}{of_processor:14.1f}{usage.ru_maxrss / 1024:8.0f}{os.path.getsize(page) / 1e6:10.2f}", flush=True)
    return page, words


def opened(pages):
    script, node = os.path.join(ROOT, "page/test/speed.mjs"), shutil.which("node")
    if not node or not os.path.isdir(os.path.join(ROOT, "page/node_modules")):
        return print("SKIPPED: pages are not opened: Node.js or page/node_modules (npm ci in page/) is missing")
    told = subprocess.run([node, script, "--json", *(page for page, _ in pages)], stdout=subprocess.PIPE, text=True)
    if told.returncode == 77:
        return print(told.stdout.strip())
    if told.returncode:
        sys.exit(told.returncode)
    for (_, words), it in zip(pages, json.loads(told.stdout)):
        print(f"\n{words}: opened in {it['opened_ms']} ms, {it['heap_mib']} MiB of heap, {it['heap_end_mib']} MiB after all views")
        print(f"{'milliseconds':28}{'half':>9}{'95 of 100':>14}{'main thread':>14}{'frames':>8}")
        for what, row in it["moves"].items():
            print(f"{what:28}{row['half']:9.1f}{row['most']:14.1f}{row['thread']:14.1f}{row['frames']:8}")


def served(release, trace, words):
    """Parts of a hundredth of the time, of which a page has room for every change, wherever they lie."""
    gputrace = os.path.join(release, "gputrace")
    told = subprocess.run([gputrace, "report", "--all", "--json", trace], stdout=subprocess.PIPE, check=True).stdout
    ending = next(it for it in json.loads(told)["processes"][0]["sections"] if it["name"] == "ending")
    duration, began = ending["duration_ns"], time.monotonic()
    server = subprocess.Popen([gputrace, "serve", trace], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        address = server.stdout.readline().strip()
        ready, took, chance = time.monotonic() - began, [], random.Random(1)
        for _ in range(30):
            begin, began = chance.randrange(duration - duration // 100), time.monotonic()
            urllib.request.urlopen(f"{address}details?trace=0&from={begin}&to={begin + duration // 100}").read()
            took.append(time.monotonic() - began)
        status = open(f"/proc/{server.pid}/status").read()
        most, now = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) // 1024 for name in ("VmHWM", "VmRSS"))
        files = [os.stat(f"/proc/{server.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{server.pid}/fd")]
        kept = max((it.st_size for it in files if it.st_nlink == 0), default=0)
        print(f"\n{words}, served: ready after {ready:.1f} s; details first {took[0]:.3f} s, half {sorted(took)[len(took) // 2]:.3f} s, "
              f"most {max(took):.3f} s; {most} MiB at most, {now} MiB now, {kept / 1e6:.0f} MB on disk")
    finally:
        server.kill()


if __name__ == "__main__":
    main()
