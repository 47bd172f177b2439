"""prometheus.py PROMETHEUS GPUTRACE TRACE: Prometheus itself scrapes `gputrace metrics`, what it then answers is what `gputrace summary --json` says
of the trace, and it understands every query of the dashboard for Grafana. Exit status 77 where Prometheus is not there (tests/consumers/setup.sh)."""
import json, os, re, shutil, socket, subprocess, sys, tempfile, time, urllib.parse, urllib.request

prometheus, gputrace, trace = sys.argv[1:4]
if not os.path.exists(prometheus):
    prometheus = shutil.which("prometheus")
if not prometheus:
    print("no prometheus (Debian's package; tests/consumers/setup.sh)")
    sys.exit(77)
# For a machine that does nothing else for us.
PATIENCE = 300
wrong = []


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def same(what, found, expected):
    if found != expected:
        wrong.append(f"{what}: {found} instead of {expected}")


def query(words):
    address = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(words)}"
    with urllib.request.urlopen(address, timeout=PATIENCE) as answer:
        return json.load(answer)["data"]["result"]


def total(words):
    found = query(f"sum({words})")
    return int(float(found[0]["value"][1])) if found else None


def until_scraped():
    begun = time.monotonic()
    while time.monotonic() - begun < PATIENCE:
        try:
            if total("up") == 1 and total("gputrace_held_bytes") is not None:
                return
        except OSError:
            pass
        if server.poll() is not None:
            break
        time.sleep(0.2)
    said.flush()
    sys.exit("Prometheus has scraped nothing:\n" + open(said.name).read()[-2000:])


summary = json.loads(subprocess.run([gputrace, "summary", "--json", trace], check=True, capture_output=True).stdout)
devices = [device for process in summary["processes"] for device in process["devices"]]
torches = [device["torch"] for device in devices if device["torch"]]
folder = tempfile.mkdtemp()
said = open(os.path.join(folder, "said"), "w")
metrics = subprocess.Popen([gputrace, "metrics", "--listen", "127.0.0.1:0", trace], stdout=subprocess.PIPE, text=True)
server = None
try:
    address = re.fullmatch(r"http://(.*)/metrics\n", metrics.stdout.readline()).group(1)
    port = free_port()
    with open(os.path.join(folder, "prometheus.yml"), "w") as file:
        file.write(f"scrape_configs:\n- job_name: gputrace\n  scrape_interval: 1s\n  static_configs:\n  - targets: ['{address}']\n")
    options = {"config.file": file.name, "storage.tsdb.path": os.path.join(folder, "data"), "web.listen-address": f"127.0.0.1:{port}"}
    server = subprocess.Popen([prometheus, *(f"--{name}={value}" for name, value in options.items())], stdout=said, stderr=said)
    until_scraped()
    same("held", total("gputrace_held_bytes"), sum(device["driver"]["live_bytes"] for device in devices))
    same("owners", total("gputrace_owner_bytes"), sum(owner["live_bytes"] for device in devices for owner in device["owners"]))
    same("handed out", total("gputrace_driver_allocations_total"), sum(device["driver"]["allocs"] for device in devices))
    same("refused", total("gputrace_driver_refused_total"), sum(device["driver"]["failed"] for device in devices))
    same("PyTorch's errors", total("gputrace_torch_ooms_total"), sum(torch["ooms"] for torch in torches) if torches else None)
    for owner in {owner["owner"] for device in devices for owner in device["owners"]}:
        of = [it["live_bytes"] for device in devices for it in device["owners"] if it["owner"] == owner]
        same(owner, total(f'gputrace_owner_bytes{{owner="{owner}"}}') or 0, sum(of))
    with open(os.path.join(os.path.dirname(__file__), "../../packaging/grafana/gputrace.json")) as file:
        panels = json.load(file)["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    for words in queries:
        try:
            query(re.sub(r"\$__\w+", "1m", words))
        except OSError as error:
            wrong.append(f"{words}: {error}")
    print(f"{len(devices)} devices, {len(queries)} queries of the dashboard" if not wrong else "\n".join(wrong))
finally:
    for process in [server, metrics]:
        if process:
            process.kill()
            process.wait()
    said.close()
    shutil.rmtree(folder)
sys.exit(1 if wrong else 0)
