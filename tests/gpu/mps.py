#!/usr/bin/env python3
"""A client of MPS on one GPU: whether NVML says that it is one, what it is charged, and what its limit does.

usage: mps.py FOLDER [WORK]

FOLDER has `gputrace` and `libgputrace.so`; WORK keeps the trace and MPS's pipes (default: a temporary folder). Starts an MPS daemon of its own, for
the programs of this test only, and ends it. Checks: `top` lists the client, and charges it what it holds; the server is among the others;
`report` and `budget` say that the process runs under MPS, and its limit; what is above the limit is refused. One line a check, PASS, FAIL,
SKIP or NOTE; exit status 0 only without FAIL. Some 20 seconds. LAUNCHER=target/release/fake-cuda runs it without a GPU.
"""
import json, os, shlex, shutil, subprocess, sys, tempfile, time

FOLDER = os.path.abspath(sys.argv[1])
WORK = os.path.abspath(sys.argv[2]) if len(sys.argv) > 2 else tempfile.mkdtemp()
LAUNCHER = shlex.split(os.environ.get("LAUNCHER", ""))
if LAUNCHER: LAUNCHER[0] = os.path.abspath(LAUNCHER[0])
GPUTRACE = os.path.join(FOLDER, "gputrace")
HELD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "programs", "held.py")
GIB = 1 << 30
failed = []


def check(good, what, detail=""):
    print("PASS" if good else "FAIL", what, "" if good else f"({detail})", flush=True)
    if not good: failed.append(what)


def verb(*arguments):
    return subprocess.run(LAUNCHER + [GPUTRACE, *arguments], capture_output=True, text=True, env=environment).stdout


environment = dict(os.environ, CUDA_MPS_PIPE_DIRECTORY=f"{WORK}/pipe", CUDA_MPS_LOG_DIRECTORY=f"{WORK}/log")
control = shutil.which("nvidia-cuda-mps-control")
if LAUNCHER:
    environment |= {"FAKE_CUDA_MPS": "1", "FAKE_CUDA_STATE": f"{WORK}/state"}
elif not control:
    sys.exit(print("SKIP nvidia-cuda-mps-control is not installed"))
else:
    os.makedirs(f"{WORK}/pipe", exist_ok=True)
    os.makedirs(f"{WORK}/log", exist_ok=True)
    subprocess.run([control, "-d"], env=environment, check=True)

limited = dict(environment, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=4G")
record = LAUNCHER + [GPUTRACE, "record", "-q", "-f", "-o", f"{WORK}/mps.gtr", "--", sys.executable, HELD]
client = subprocess.Popen(record, env=limited, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
try:
    def tell(what):
        client.stdin.write(what + "\n")
        client.stdin.flush()
        return client.stdout.readline().strip() == "done"

    check(client.stdout.readline().strip() == "done", "a client starts")
    check(tell(f"alloc {GIB}"), "it gets 1 GiB of its 4")
    check(tell(f"refused {4 * GIB}"), "4 GiB more are refused")
    for asked in range(100):
        seen = json.loads(verb("top", "--once", "--json", f"{WORK}/mps.gtr"))
        device = next((it for process in seen["processes"] for it in process["devices"]), {})
        used, held = device.get("process_used_bytes"), device.get("driver_bytes")
        # Where numbers of processes differ, as in a container, changes say which figure is ours.
        if used and 0 <= used - held < GIB: break
        if asked % 20 == 19: tell("alloc 16777216")
        time.sleep(0.1)
    print("NOTE cards:", json.dumps(seen["cards"])[:600])
    check(any(card["mps_clients"] for card in seen["cards"]), "NVML lists a client of MPS", [card["mps_clients"] for card in seen["cards"]])
    check(bool(used) and 0 <= used - held < GIB, "what is charged is what it holds, and a context", f"{used} of {held}")
    tell("quit")
    client.wait()
finally:
    client.kill()
    if control and not LAUNCHER:
        subprocess.run([control], input="quit\n", text=True, env=environment)
report, budget = verb("report", f"{WORK}/mps.gtr"), json.loads(verb("budget", "--json", f"{WORK}/mps.gtr"))
print("NOTE", *[line.strip() for line in report.splitlines() if "MPS" in line], sep="\n     ")
check("the process runs under MPS" in report, "report says so")
check("may have 4.00 GiB" in report, "and the limit")
check('"mps_limit_bytes": 4294967296' in json.dumps(budget) and '"mps_client": true' in json.dumps(budget), "budget has both", json.dumps(budget)[:300])
sys.exit(bool(failed))
