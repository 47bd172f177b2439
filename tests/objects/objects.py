#!/usr/bin/env python3
"""Traces in an S3 server that runs here: read, written, listed and sent in parts, and what a broken way leaves.

    objects.py RELEASE GARAGE FOLDER

RELEASE is the folder of `gputrace`, `libgputrace.so`, `fake-cuda` and `examples/training`; GARAGE the server's program (setup.sh); FOLDER is made anew.
PASS and FAIL lines; exit status 0 only without FAIL.
"""
import glob, json, os, shutil, signal, socket, subprocess, sys, threading, time

RELEASE, GARAGE, FOLDER = (os.path.abspath(path) for path in sys.argv[1:4])
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


def server(port):
    """Garage, as its documentation starts it for one machine."""
    with open(f"{FOLDER}/garage.toml", "w") as it:
        it.write(f"""metadata_dir = "{FOLDER}/meta"
data_dir = "{FOLDER}/data"
db_engine = "sqlite"
replication_factor = 1
rpc_bind_addr = "127.0.0.1:{free_port()}"
rpc_secret = "{'0123456789abcdef' * 4}"
[s3_api]
s3_region = "garage"
api_bind_addr = "127.0.0.1:{port}"
""")
    key, secret = "GK" + "0123456789abcdef" + "01234567", "0123456789abcdef" * 4
    own = dict(os.environ, GARAGE_DEFAULT_ACCESS_KEY=key, GARAGE_DEFAULT_SECRET_KEY=secret, GARAGE_DEFAULT_BUCKET="job")
    os.environ.update(AWS_ACCESS_KEY_ID=key, AWS_SECRET_ACCESS_KEY=secret, AWS_REGION="garage", AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}")
    started = subprocess.Popen([GARAGE, "-c", f"{FOLDER}/garage.toml", "server", "--single-node", "--default-bucket"], env=own,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(300):
        with socket.socket() as it:
            if it.connect_ex(("127.0.0.1", port)) == 0:
                return started
        time.sleep(0.1)
    sys.exit("FAIL  garage does not listen")


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


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    os.makedirs(FOLDER)
    port = free_port()
    started = server(port)
    try:
        reads_and_writes()
        breaks(port)
        records()
    finally:
        started.send_signal(signal.SIGTERM)
        started.wait()
    sys.exit(bool(failed))


def reads_and_writes():
    two = [f"{GOLDEN}/kept-losses.gtr", f"{GOLDEN}/caught-oom.gtr"]
    sent = run("upload", "-o", "s3://job/a/", *two)
    say(sent.returncode == 0, f"two traces sent {sent.stderr}")
    for verb in (["report", "--all"], ["summary", "--json"], ["leaks", "--json"], ["oom"], ["tune"], ["replay", "--policy", "torch"], ["stats"], ["doctor"],
                 ["tree"], ["export", "-f", "jsonl"]):
        same_answer(" ".join(verb), "s3://job/a/caught-oom.gtr", two[1], *verb)
    again = run("upload", "-o", "s3://job/a/", two[0])
    say(again.returncode == 2 and "exists; -F" in again.stderr, "an object that exists is kept")
    reduced = run("reduce", "-o", "s3://job/s/", "s3://job/a/")
    joined, whole = run("ranks", "--json", "s3://job/s/"), run("ranks", "--json", "s3://job/a/")
    say(reduced.returncode == 0 and joined.stdout == whole.stdout != "", "ranks of summaries there = ranks of traces there")
    page = run("html", "-o", "s3://job/page.html", "s3://job/a/kept-losses.gtr")
    say(page.returncode == 0 and "wrote s3://" in page.stderr, "a page is written there")
    mapped = run("map", "-o", "s3://job/m/", "leaks", "--json", "--", "s3://job/a/")
    say(mapped.returncode == 0, f"map from there to there {mapped.stderr}")
    missing = run("report", "s3://job/a/no.gtr")
    say(missing.returncode == 2 and "there is no such object" in missing.stderr, "an object that is not there is named")
    refused = run("report", "s3://job/a/kept-losses.gtr", env=dict(os.environ, AWS_SECRET_ACCESS_KEY="wrong"))
    say(refused.returncode == 2 and "AWS_SECRET_ACCESS_KEY" in refused.stderr, "a refusal says what to set")


def breaks(port):
    """A trace of several parts over a line that breaks: what was sent is not sent again."""
    subprocess.run([f"{RELEASE}/examples/training", BIG, "6000000", "whole"], check=True, stdout=subprocess.DEVNULL)
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


main()
