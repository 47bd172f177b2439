#!/usr/bin/env python3
"""soak.py RELEASE [MINUTES]: a week of recording in an hour, within `--keep` and `--max-size` (`make soak`).

RELEASE is the folder of `gputrace`, `libgputrace.so` and `fake-cuda`, whose device the programs use. Each of them runs for MINUTES (30; two of
them are an hour). No clock is changed: a server of 10,000 events a second makes 6 billion of them in a week, so ours makes them as fast as the
ring takes them, and what is kept is as much smaller.

  server    eight workers that allocate and free at random; each ends after 20,000 requests, and another takes its place. --max-size 16M
  training  steps of PyTorch's allocator and the driver: weights that stay, activations that come and go, ranges of NVTX. --keep 10s

Every second it reads from /proc what the recorder and the program have: memory, descriptors and threads, the shared memory of the ring, and the
bytes of the trace's files. Nothing may grow: the most of the last third is held against the most of the second; of threads and
descriptors what they had most often, since a new segment is open for a moment beside the last. It ends with status 1 where
something did, where events were lost other than by a full ring, or where `report` cannot read what is left. Last comes a table of all pieces.

It needs python3 and cc. Where nothing was built, the fake device lies elsewhere (`fake-cuda --dir` says where): copy it to RELEASE/driver, or
name it. An hour can be had in pieces, whose results one file adds up:

    cp -r "$(target/release/fake-cuda --dir)" DIR/driver && cp target/release/{gputrace,libgputrace.so,fake-cuda} DIR/
    python3 tests/soak.py DIR 4 --results DIR/soak.json        # again and again: the table is of all pieces
"""
import argparse, concurrent.futures, glob, json, os, re, signal, statistics, subprocess, sys, tempfile, time

SERVER = r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>
typedef unsigned long long P;
int cuInit(unsigned); int cuDevicePrimaryCtxRetain(void **, int); int cuCtxSetCurrent(void *); int cuMemAlloc_v2(P *, unsigned long); int cuMemFree_v2(P);
enum { WORKERS = 8, SLOTS = 256, REQUESTS = 20000 };
static void *context;
static long pause_every, asked;
static void *work(void *number)
{
    unsigned long long seed = (unsigned long)number * 977 + 1;
    P live[SLOTS] = {0};
    cuCtxSetCurrent(context);
    for (int i = 0; i < REQUESTS; i++) {
        seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        unsigned at = (seed >> 33) % SLOTS;
        if (live[at]) { cuMemFree_v2(live[at]); live[at] = 0; }
        else if (cuMemAlloc_v2(&live[at], 512 * (1 + (seed >> 45) % 64))) exit(1);
        if (i % 256 == 0 && pause_every) usleep(pause_every);
    }
    for (int i = 0; i < SLOTS; i++) if (live[i]) cuMemFree_v2(live[i]);
    __atomic_add_fetch(&asked, REQUESTS, __ATOMIC_RELAXED);
    return 0;
}
int main(int n, char **words)
{
    pthread_t workers[WORKERS];
    long number = 0;
    pause_every = n > 1 ? atol(words[1]) : 0;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0)) return 1;
    for (int i = 0; i < WORKERS; i++) pthread_create(&workers[i], 0, work, (void *)number++);
    for (;; number++) {
        pthread_join(workers[number % WORKERS], 0);
        if (pwrite(1, &asked, sizeof asked, 0) != sizeof asked) return 1;
        pthread_create(&workers[number % WORKERS], 0, work, (void *)number);
    }
}
"""
TRAINING = r"""
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>
void *fake_torch_empty(size_t); void fake_torch_delete(void *);
typedef unsigned long long P;
int cuMemAlloc_v2(P *, unsigned long); int cuMemFree_v2(P);
enum { WEIGHTS = 200, LAYERS = 60 };
int main(int n, char **words)
{
    void *activations[LAYERS];
    long pause_every = n > 1 ? atol(words[1]) : 0;
    for (int i = 0; i < WEIGHTS; i++) if (!fake_torch_empty(65536 * (1 + i % 16))) return 1;
    for (long step = 0;; step++) {
        P workspace;
        long asked = step * (2 * LAYERS + 2);
        if (step % 1024 == 0 && pwrite(1, &asked, sizeof asked, 0) != sizeof asked) return 1;
        for (int i = 0; i < LAYERS; i++) if (!(activations[i] = fake_torch_empty(4096 * (1 + (i * 7 + step) % 32)))) return 1;
        if (cuMemAlloc_v2(&workspace, 1 << 20)) return 1;
        for (int i = LAYERS; i--;) fake_torch_delete(activations[i]);
        cuMemFree_v2(workspace);
        if (pause_every) usleep(pause_every);
    }
}
"""
# Of memory, what a steady process may differ by from one third of its time to the next: pages that its allocator keeps or returns.
SLACK = 8 << 20


def fields(path, names):
    text = open(path).read()
    return [int(re.search(rf"^{name}:\s+(\d+)", text, re.M).group(1)) for name in names]


def look(process):
    resident, threads = fields(f"/proc/{process}/status", ["VmRSS", "Threads"])
    return resident << 10, threads, len(os.listdir(f"/proc/{process}/fd"))


def recorder_of(output):
    for entry in os.listdir("/proc"):
        try:
            words = open(f"/proc/{entry}/cmdline", "rb").read().split(b"\0")
            environment = open(f"/proc/{entry}/environ", "rb").read().split(b"\0")
        except OSError:
            continue
        if words[1:2] == [b"recorder"] and f"GPUTRACE_OUTPUT={output}".encode() in environment:
            return int(entry), words[words.index(b"--ring") + 1].decode() if b"--ring" in words else None
    return None, None


def ring_bytes(recorder):
    for entry in os.listdir(f"/proc/{recorder}/map_files") if os.path.isdir(f"/proc/{recorder}/map_files") else []:
        try:
            path = f"/proc/{recorder}/map_files/{entry}"
            if "gputrace" in os.readlink(path) and "/dev/shm" in os.readlink(path):
                return os.stat(path).st_blocks * 512
        except OSError:
            pass
    return 0


def driver_of(release, named):
    beside = os.path.join(release, "driver")
    if named or os.path.isdir(beside):
        return os.path.abspath(named or beside)
    return subprocess.run([os.path.join(release, "fake-cuda"), "--dir"], check=True, capture_output=True, text=True).stdout.strip()


def soak(name, source, link, bounds, seconds, pause, release, driver):
    """Whether nothing grew, and what the table says of it."""
    with tempfile.TemporaryDirectory() as work:
        return soak_in(work, name, source, link, bounds, seconds, pause, release, driver)


def soak_in(work, name, source, link, bounds, seconds, pause, release, driver):
    file = lambda name: os.path.join(release, name)
    program, trace = os.path.join(work, name), os.path.join(work, name + ".gtr")
    with open(program + ".c", "w") as to:
        to.write(source)
    libraries = [f"-L{driver}", "-l:libcuda.so.1"] + [word.format(driver=driver) for word in link]
    subprocess.run(["cc", "-O1", "-g", "-o", program, program + ".c", "-pthread"] + libraries, check=True)
    environment = dict(
        os.environ, LD_LIBRARY_PATH=f"{driver}:{driver}/torch", LD_PRELOAD=file("libgputrace.so"), GPUTRACE_RECORDER=file("gputrace"), GPUTRACE_OUTPUT=trace, **bounds
    )
    asked = os.path.join(work, name + ".asked")
    with open(asked, "wb") as to:
        process = subprocess.Popen([program, str(pause)], env=environment, stdout=to)
    rows, recorder = [], None
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        time.sleep(1)
        if process.poll() is not None:
            sys.exit(f"{name} ended by itself: {process.returncode}")
        if recorder is None:
            recorder, _ = recorder_of(trace)
            continue
        files = sum(os.stat(path).st_size for path in glob.glob(trace + "*") if os.path.exists(path))
        rows.append((*look(recorder), *look(process.pid), ring_bytes(recorder), files))
    process.send_signal(signal.SIGTERM)
    process.wait()
    while recorder_of(trace)[0]:
        time.sleep(0.1)
    columns = ["recorder's memory", "its threads", "its descriptors", "program's memory", "its threads", "its descriptors", "the ring", "files"]
    third = len(rows) // 3
    second, last = rows[third : 2 * third], rows[2 * third :]
    is_flat, lines = True, []
    with open(asked, "rb") as of:
        n_asked = int.from_bytes(of.read(8), "little")
    say = lines.append
    say(f"\n{name}: {seconds} s, {n_asked:,} events, {' '.join(f'{key}={value}' for key, value in bounds.items())}")
    say(f"{'':22}{'at 10 s':>12}{'second third':>14}{'last third':>12}")
    for number, column in enumerate(columns):
        is_count = "threads" in column or "descriptors" in column
        of = statistics.mode if is_count else max
        most = [of([row[number] for row in part]) for part in ([rows[min(9, len(rows) - 1)]], second, last)]
        allowed = 0 if is_count else SLACK
        grew = most[2] > most[1] + allowed and column != "files"
        is_flat &= not grew
        shown = [str(value) if is_count else f"{value / 2**20:.1f} MiB" for value in most]
        say(f"{column:22}{shown[0]:>12}{shown[1]:>14}{shown[2]:>12}{'   GREW' if grew else ''}")
    bound = int(bounds.get("GPUTRACE_MAX_SIZE", 0))
    if bound and max(row[-1] for row in rows) > bound:
        is_flat = False
        say(f"the files had {max(row[-1] for row in rows)} bytes, more than {bound}")
    report = subprocess.run([file("gputrace"), "report", "--all", "--json", trace], capture_output=True, text=True, env=dict(os.environ))
    sections = {section["name"]: section for section in json.loads(report.stdout)["processes"][0]["sections"]}
    trust = sections.get("trust", {}).get("warnings", [])
    left = sections.get("recording", {})
    is_flat &= bool(left)
    most = lambda part: [(statistics.mode if number in (1, 2, 4, 5) else max)([row[number] for row in part]) for number in range(len(columns))]
    piece = {"name": name, "seconds": seconds, "second": most(second), "last": most(last), "files": max(row[-1] for row in rows), "asked": n_asked}
    left = {key: left.get(key) for key in ("segment", "since_ns")}
    say(f"what is left: {left} {sections['ending']['events']} events; {trust or 'nothing to warn of'}")
    print("\n".join(lines), flush=True)
    return is_flat, piece


PROGRAMS = {
    "server": ("server, `--max-size 16M`", SERVER, [], {"GPUTRACE_MAX_SIZE": str(16 << 20)}),
    "training": ("training, `--keep 10s`", TRAINING, ["{driver}/torch/libc10_cuda.so", "{driver}/torch/libc10.so", "-Wl,-rpath-link,{driver}"], {"GPUTRACE_KEEP": "10s"}),
}


def table(pieces):
    """Of all pieces: the most of each."""
    size = lambda value: f"{value / 2**20:.1f} MiB" if value < 100 << 20 else f"{value / 2**20:.0f} MiB"
    def both(of, column, shown=size, throughout=False):
        second, last = (max(piece[third][column] for piece in of) for third in ("second", "last"))
        return f"{shown(last)} throughout" if throughout and second == last else f"{shown(second)}, {shown(last)}"
    def counts(of):
        ranges = [sorted({piece[third][column] for piece in of for third in ("second", "last")}) for column in (1, 2)]
        shown = [f"{found[0]} to {found[-1]}" if len(found) > 1 else str(found[0]) for found in ranges]
        return ", ".join(shown) + (" throughout" if all(len(found) == 1 for found in ranges) else "")
    rows = [
        ("recorder's memory, second and last third", lambda of: both(of, 0)),
        ("recorder's threads, descriptors", counts),
        ("program's memory", lambda of: both(of, 3)),
        ("shared memory", lambda of: both(of, 6, throughout=True)),
        ("files, at most", lambda of: size(max(piece["files"] for piece in of))),
        ("events", lambda of: f"{sum(piece['asked'] for piece in of) / 1e6:,.0f} million"),
    ]
    there = {name: [piece for piece in pieces if piece["name"] == name] for name in PROGRAMS}
    there = {name: of for name, of in there.items() if of}
    time = {name: f"{sum(piece['seconds'] for piece in of) / 60:g} min in {len(of)}" for name, of in there.items()}
    print("\n| |", " | ".join(PROGRAMS[name][0] for name in there), "|")
    print("|---" * (len(there) + 1) + "|")
    for row, cell in rows:
        print(f"| {row} |", " | ".join(cell(of) for of in there.values()), "|")
    print(f"\n{'; '.join(f'{name}: {it}' for name, it in time.items())}; {os.cpu_count()} processors", flush=True)


def main():
    words = argparse.ArgumentParser(usage=__doc__)
    words.add_argument("release")
    words.add_argument("minutes", nargs="?", type=float, default=30)
    words.add_argument("--pause", type=int, default=200, help="microseconds that a program sleeps now and then")
    words.add_argument("--driver", help="the fake device's folder")
    words.add_argument("--only", choices=PROGRAMS)
    words.add_argument("--copies", type=int, default=1, help="processes that run each program at once")
    words.add_argument("--results", help="a file to which this run's are added")
    of = words.parse_args()
    release = os.path.abspath(of.release)
    pieces, is_flat = [], True
    if of.results and os.path.exists(of.results):
        pieces = json.load(open(of.results))
    for name, (_, source, link, bounds) in PROGRAMS.items():
        if of.only not in (None, name):
            continue
        words = name, source, link, bounds, int(of.minutes * 60), of.pause, release, driver_of(release, of.driver)
        with concurrent.futures.ThreadPoolExecutor(of.copies) as at_once:
            found = [future.result() for future in [at_once.submit(soak, *words) for _ in range(of.copies)]]
        is_flat &= all(flat for flat, _ in found)
        pieces += [piece for _, piece in found]
        if of.results:
            with open(of.results + ".new", "w") as to:
                json.dump(pieces, to)
            os.replace(of.results + ".new", of.results)
    table(pieces)
    sys.exit(0 if is_flat else 1)


if __name__ == "__main__":
    main()
