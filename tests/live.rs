//! `gputrace top`, `metrics` and alerts beside programs that run: what they show is what the programs hold, and the programs do not
//! notice.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Once;
use std::time::{Duration, Instant};

use gputrace_tests::patience::{LONG, is_hang};
use gputrace_tests::recorded::{self, Folder};
use serde_json::Value;

/// What a process's context takes on its device.
const CONTEXT: u64 = 64 << 20;

/// A program that holds what it is told to.
struct Holder {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Holder {
    /// Recorded into the folder, if one is given, on the device of that state.
    fn start(folder: Option<&Folder>, state: &Path, variables: &[(&str, &str)], options: &[&str]) -> Holder {
        Holder::called(None, folder, state, variables, options)
    }

    /// The same under another name than its program's.
    fn called(
        name: Option<&str>,
        folder: Option<&Folder>,
        state: &Path,
        variables: &[(&str, &str)],
        options: &[&str],
    ) -> Holder {
        let mut command = match folder {
            Some(folder) => {
                let mut command = Command::new(recorded::built().join("gputrace"));
                command.args(["record", "-q", "-o", "%p.gtr"]).args(options).args(["--", "python3"]);
                command.current_dir(folder.path());
                command
            }
            None => Command::new(python()),
        };
        name.map(|name| command.arg0(name));
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/programs/held.py")).envs(variables.iter().copied());
        on_fake(&mut command, state).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("python3 runs");
        let input = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut holder = Holder { child, input, output };
        holder.hear();
        holder
    }

    fn hear(&mut self) {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        assert_eq!(line, "done\n");
    }

    fn tell(&mut self, what: &str) {
        writeln!(self.input, "{what}").expect("it listens");
        self.hear();
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn end(mut self) {
        writeln!(self.input, "quit").expect("it listens");
        assert!(self.child.wait().expect("it ends").success());
    }
}

/// Python itself: what is called so may be a script that starts it under its own name.
fn python() -> String {
    let asked = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output();
    String::from_utf8(asked.expect("python3 runs").stdout).expect("text").trim().to_owned()
}

/// With the fake driver, its NVML, and a device that processes with the same state share.
fn on_fake<'a>(command: &'a mut Command, state: &Path) -> &'a mut Command {
    let context = CONTEXT.to_string();
    command.env("LD_LIBRARY_PATH", fake_cuda::library_dir()).env("FAKE_CUDA_STATE", state);
    command.env("FAKE_CUDA_MEMORY", "8GiB").env("FAKE_CUDA_CONTEXT", context)
}

fn gputrace(arguments: &[&str], state: &Path) -> String {
    gputrace_with(&[], arguments, state)
}

fn gputrace_with(variables: &[(&str, &str)], arguments: &[&str], state: &Path) -> String {
    let mut command = Command::new(recorded::built().join("gputrace"));
    command.args(arguments).envs(variables.iter().copied());
    let output = on_fake(&mut command, state).output().expect("gputrace runs");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

fn top(which: &str, state: &Path) -> Value {
    serde_json::from_str(&gputrace(&["top", "--once", "--json", which], state)).expect("JSON")
}

/// Asks until it is so; what was said last otherwise.
fn eventually(mut ask: impl FnMut() -> Result<(), String>) {
    let began = Instant::now();
    while let Err(said) = ask() {
        assert!(!is_hang(began, LONG), "{said}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn folder(name: &str) -> Folder {
    Folder::new(&std::env::temp_dir(), &format!("gputrace-live-{name}"))
}

fn driver_bytes(top: &Value) -> Option<u64> {
    top["processes"][0]["devices"][0]["driver_bytes"].as_u64()
}

#[test]
fn top_shows_what_a_running_program_holds_and_who_else_has_memory() {
    let folder = folder("top");
    let state = folder.path().join("state");
    let mut recorded =
        Holder::start(Some(&folder), &state, &[("SLURM_JOB_ID", "4711"), ("POD_NAME", "train-0")], &[]);
    let mut stranger = Holder::start(None, &state, &[], &[]);
    recorded.tell("alloc 5000000");
    recorded.tell("alloc 300");
    stranger.tell("alloc 7340032");
    let pid = recorded.pid().to_string();
    let holds = |bytes: u64| {
        eventually(|| {
            let top = top(&pid, &state);
            if driver_bytes(&top) == Some(bytes) { Ok(()) } else { Err(format!("not {bytes}: {top:#}")) }
        });
    };
    holds(5_000_300);
    recorded.tell("free");
    holds(5_000_000);
    recorded.tell("free");
    holds(0);
    recorded.tell("alloc 12345678");
    holds(12_345_678);

    let seen = top(&folder.path().display().to_string(), &state);
    let process = &seen["processes"][0];
    assert_eq!(
        (process["pid"].as_u64(), &process["state"]),
        (Some(recorded.pid().into()), &"running".into())
    );
    let place = &process["surroundings"];
    assert_eq!((place["slurm_job"].as_str(), place["pod"].as_str()), (Some("4711"), Some("train-0")));
    assert_eq!(seen["cards"].as_array().map(Vec::len), Some(1), "{seen:#}");
    let card = &seen["cards"][0];
    let others: Vec<u64> =
        card["unrecorded"].as_array().expect("a list").iter().filter_map(|it| it["pid"].as_u64()).collect();
    assert_eq!(others, [u64::from(stranger.pid())], "{card:#}");
    assert_eq!(card["uuid"], process["devices"][0]["uuid"]);
    // The same as text, without a terminal.
    let text = gputrace(&["top", "--once", &pid], &state);
    assert!(text.contains("11.77 MiB") && text.contains("not recorded:"), "{text}");
    // Somebody else's process is not ours to follow.
    let none = top(&stranger.pid().to_string(), &state);
    assert_eq!(none["processes"].as_array().map(Vec::len), Some(0));
    assert!(
        none["notes"][0].as_str().is_some_and(|note| note.contains("are not being recorded")),
        "{none:#}"
    );
    recorded.end();
    stranger.end();
    folder.traces(1);
    // The recorder lets go of it a moment later.
    eventually(|| {
        let over = top(&folder.path().display().to_string(), &state);
        if over["processes"].as_array().is_some_and(Vec::is_empty) {
            Ok(())
        } else {
            Err(format!("{over:#}"))
        }
    });
}

#[test]
fn top_gives_the_terminal_back_whenever_it_stands_still_or_ends() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("top_terminal.py");
    let told = Command::new("python3")
        .arg(script)
        .arg(recorded::built().join("gputrace"))
        .arg(golden("dataparallel"))
        .output()
        .expect("python3 runs");
    let said = String::from_utf8_lossy(&told.stdout).into_owned();
    assert!(told.status.success(), "{said}{}", String::from_utf8_lossy(&told.stderr));
}

#[test]
fn top_of_a_finished_trace_has_the_figures_of_its_summary() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    for name in ["caught-oom", "varying-lengths", "kept-losses", "running-total"] {
        let trace = golden.join(format!("{name}.gtr")).display().to_string();
        let seen = top(&trace, Path::new("/nonexistent"));
        let summary: Value =
            serde_json::from_str(&gputrace(&["summary", "--json", &trace], Path::new("/nonexistent")))
                .expect("JSON");
        let (seen, summary) = (&seen["processes"][0], &summary["processes"][0]);
        assert_eq!((&seen["pid"], &seen["events"]), (&summary["pid"], &summary["events"]), "{name}");
        let (seen, summary) = (&seen["devices"][0], &summary["devices"][0]);
        assert_eq!(seen["driver_peak_bytes"], summary["driver"]["peak_bytes"], "{name}");
        for peak in ["peak_allocated_bytes", "peak_reserved_bytes"] {
            assert_eq!(seen["torch"][peak], summary["torch"][peak], "{name}: {peak}");
        }
        let owners = seen["owners"].as_array().expect("a list");
        let sum: u64 = owners.iter().filter_map(|owner| owner["bytes"].as_u64()).sum();
        assert_eq!(Some(sum), seen["driver_bytes"].as_u64(), "{name}: owners are all of it");
        let pieces = seen["torch"]["reserved_bytes"].as_u64() >= seen["torch"]["allocated_bytes"].as_u64();
        assert!(pieces, "{name}");
    }
}

/// The UUID of a MIG instance of the fake driver's.
fn instance(number: u8) -> String {
    format!("MIG-67707574-7261-6365-2d66-616b65004d{number:02x}")
}

/// Lets a program take 16 MiB and more until the driver's figure of the process is known; the device of it then.
fn charged(holder: &mut Holder, state: &Path, variables: &[(&str, &str)]) -> Value {
    let pid = holder.pid().to_string();
    let mut known = Value::Null;
    let (mut n_asked, mut held, mut is_known) = (0, 0, false);
    eventually(|| {
        // What changes as the driver handed it out is known to be ours: more than once, as a sample may be of the time between.
        if n_asked % 20 == 0 && !is_known {
            holder.tell("alloc 16777216");
            held += 16_777_216;
        }
        n_asked += 1;
        let seen = gputrace_with(variables, &["top", "--once", "--json", &pid], state);
        let seen: Value = serde_json::from_str(&seen).expect("JSON");
        let device = &seen["processes"][0]["devices"][0];
        let figures = ["driver_bytes", "process_used_bytes"].map(|name| device[name].as_u64());
        is_known = figures[1].is_some();
        if figures != [Some(held), Some(held + CONTEXT)] {
            return Err(format!("{seen:#}"));
        }
        known = device.clone();
        Ok(())
    });
    known
}

#[test]
fn a_process_on_a_mig_instance_is_charged_there_and_its_card_is_the_instance() {
    let folder = folder("mig");
    let state = folder.path().join("state");
    // Two cards with two instances each; a process sees one.
    let mig = [("FAKE_CUDA_MIG", "2"), ("FAKE_CUDA_DEVICES", "4")];
    let second = instance(1);
    let on_second = [mig[0], mig[1], ("CUDA_VISIBLE_DEVICES", second.as_str())];
    let mut first = Holder::start(Some(&folder), &state, &mig, &[]);
    let mut other = Holder::start(Some(&folder), &state, &on_second, &[]);
    let of_first = charged(&mut first, &state, &mig);
    let of_second = charged(&mut other, &state, &mig);
    assert_eq!([&of_first["uuid"], &of_second["uuid"]], [&instance(0), &second]);
    assert_eq!(of_first["device_used_bytes"], of_first["process_used_bytes"], "the neighbour is elsewhere");
    let mut stranger = Holder::start(None, &state, &on_second, &[]);
    stranger.tell("alloc 7340032");

    let all = folder.path().display().to_string();
    let seen = gputrace_with(&mig, &["top", "--once", "--json", &all], &state);
    let seen: Value = serde_json::from_str(&seen).expect("JSON");
    let cards = seen["cards"].as_array().expect("a list");
    let names: Vec<_> =
        cards.iter().map(|card| (card["index"].as_u64(), card["instance"].as_u64())).collect();
    let expected = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(card, part)| (Some(card), Some(part)));
    assert_eq!(names, expected, "each instance once, and no card beside them");
    let used = |card: &Value| card["used_bytes"].as_u64().expect("a figure");
    let held = |device: &Value| device["process_used_bytes"].as_u64().expect("a figure");
    assert_eq!(used(&cards[0]), held(&of_first));
    assert_eq!(used(&cards[1]), held(&of_second) + CONTEXT + 7_340_032 / (2 << 20) * (2 << 20) + (2 << 20));
    assert_eq!([used(&cards[2]), used(&cards[3])], [0, 0]);
    assert_eq!(cards[1]["unrecorded"][0]["pid"].as_u64(), Some(stranger.pid().into()));
    let text = gputrace_with(&mig, &["top", "--once", &all], &state);
    assert!(text.contains("GPU 0 MIG 1") && text.contains("GPU 1 MIG 0"), "{text}");
    let report = gputrace(&["report", &trace_of(&folder, &other)], &state);
    let said = format!("is the MIG instance {second} of the card GPU-67707574-7261-6365-2d66-616b65000000");
    assert!(report.contains(&said), "{report}");
    for holder in [first, other, stranger] {
        holder.end();
    }
}

#[test]
fn an_instance_that_nvml_does_not_find_is_said_to_have_no_figures() {
    let folder = folder("mig-unknown");
    let state = folder.path().join("state");
    let mut recorded =
        Holder::start(Some(&folder), &state, &[("FAKE_CUDA_MIG", "1"), ("FAKE_NVML_MIG", "unknown")], &[]);
    recorded.tell("alloc 16777216");
    recorded.end();
    folder.traces(1);
    let trace = folder.files("gtr")[0].display().to_string();
    let report = gputrace(&["report", &trace], &state);
    let said = format!("are not known: NVML does not know {}", instance(0));
    assert!(report.contains(&said), "{report}");
}

#[test]
fn a_client_of_mps_is_told_apart_from_its_server_and_knows_its_limit() {
    let folder = folder("mps");
    let state = folder.path().join("state");
    let variables = [("FAKE_CUDA_MPS", "1"), ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=1G")];
    let server = Holder::called(Some("nvidia-cuda-mps-server"), None, &state, &[], &[]);
    let mut client = Holder::start(Some(&folder), &state, &variables, &[]);
    let device = charged(&mut client, &state, &[]);
    client.tell("refused 1073741824");

    let seen = top(&folder.path().display().to_string(), &state);
    let card = &seen["cards"][0];
    assert_eq!(card["mps_clients"], serde_json::json!([client.pid()]));
    assert_eq!(card["unrecorded"][0]["name"], "nvidia-cuda-mps-server");
    let (used, own) = (card["used_bytes"].as_u64(), device["process_used_bytes"].as_u64());
    assert_eq!(used, own.map(|own| own + CONTEXT), "the server's context is not the client's");
    let trace = trace_of(&folder, &client);
    let report = gputrace(&["report", &trace], &state);
    let said = format!("its server (process {}) holds 64.00 MiB for all clients", server.pid());
    assert!(report.contains("the process runs under MPS") && report.contains(&said), "{report}");
    assert!(report.contains("under MPS the process may use 1.00 GiB"), "{report}");
    let budget = gputrace(&["budget", "--json", &trace], &state);
    let budget: Value = serde_json::from_str(&budget).expect("JSON");
    let device = &budget["processes"][0]["devices"][0];
    let device = if device.is_null() { &budget["devices"][0] } else { device };
    assert_eq!((&device["mps_client"], &device["mps_limit_bytes"]), (&true.into(), &(1_u64 << 30).into()));
    client.end();
    server.end();
}

/// The trace of a program that is being recorded.
fn trace_of(folder: &Folder, holder: &Holder) -> String {
    folder.path().join(format!("{}.gtr", holder.pid())).display().to_string()
}

/// A golden trace, and folder and state that nothing is in.
fn golden(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("golden/{name}.gtr")).display().to_string()
}

#[test]
fn the_reference_parser_reads_the_metrics_and_their_sums_are_those_of_top() {
    let folder = folder("metrics");
    let state = folder.path().join("state");
    let mut recorded = Holder::start(Some(&folder), &state, &[], &[]);
    recorded.tell("alloc 5000000");
    let pid = recorded.pid().to_string();
    eventually(|| match driver_bytes(&top(&pid, &state)) {
        Some(5_000_000) => Ok(()),
        other => Err(format!("{other:?}")),
    });
    for which in [pid, golden("varying-lengths"), golden("dataparallel"), golden("version1")] {
        let (exposition, picture) = (folder.path().join("exposition"), folder.path().join("top.json"));
        std::fs::write(&exposition, gputrace(&["metrics", "--once", &which], &state))
            .expect("a file of ours");
        std::fs::write(&picture, top(&which, &state).to_string()).expect("a file of ours");
        consumed("metrics by their reference parser", "metrics.py", &[&exposition, &picture]);
    }
    recorded.end();
}

/// Where consumers are installed: once, by whoever comes first.
fn installed() -> PathBuf {
    static SET_UP: Once = Once::new();
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let installed = tests.join("../target/consumers");
    SET_UP.call_once(|| {
        let setup = tests.join("consumers/setup.sh");
        let _ = Command::new(setup).arg(&installed).output().expect("sh runs");
    });
    installed
}

/// Has a consumer look at these.
fn consumed(what: &str, script: &str, arguments: &[&Path]) {
    let own = installed().join("bin/python");
    let python = if own.exists() { own } else { "python3".into() };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("consumers").join(script);
    let told = Command::new(&python).arg(&script).args(arguments).output().expect("Python runs");
    let said = String::from_utf8_lossy(&told.stdout).into_owned();
    match told.status.code() {
        Some(77) => gputrace_skip::skip(what, said.trim().to_owned()),
        code => assert_eq!(code, Some(0), "{arguments:?}: {said}{}", String::from_utf8_lossy(&told.stderr)),
    }
}

#[test]
fn prometheus_itself_scrapes_the_figures_of_the_summary_and_understands_the_dashboard() {
    let (program, gputrace) = (installed().join("prometheus"), recorded::built().join("gputrace"));
    for trace in ["varying-lengths", "dataparallel", "caught-oom"].map(golden) {
        consumed("metrics by Prometheus", "prometheus.py", &[&program, &gputrace, Path::new(&trace)]);
    }
}

#[test]
fn opentelemetrys_own_messages_read_what_is_pushed_and_their_sums_are_those_of_the_summary() {
    let folder = folder("otlp");
    for trace in ["varying-lengths", "dataparallel", "caught-oom"].map(golden) {
        let (body, summary) = (folder.path().join("body"), folder.path().join("summary.json"));
        std::fs::write(&body, pushed("otlp", "http://HOST", &trace).2).expect("a file of ours");
        let told = gputrace(&["summary", "--json", &trace], Path::new("/nonexistent"));
        std::fs::write(&summary, told).expect("a file of ours");
        consumed("metrics by OpenTelemetry's messages", "otlp.py", &[&body, &summary]);
    }
}

/// What a request is answered with: the first line, and the body.
fn ask(address: &str, request: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).expect("it listens");
    write!(stream, "{request}\r\n\r\n").expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    (head.lines().next().unwrap_or_default().to_owned(), body.to_owned())
}

#[test]
fn metrics_are_served_to_who_asks_and_to_nobody_else() {
    let (trace, state) = (golden("varying-lengths"), Path::new("/nonexistent"));
    let mut command = Command::new(recorded::built().join("gputrace"));
    command.args(["metrics", "--listen", "127.0.0.1:0", &trace]).stdout(Stdio::piped());
    let mut server = Server(on_fake(&mut command, state).spawn().expect("gputrace runs"));
    let mut line = String::new();
    BufReader::new(server.0.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    let address = line.trim().strip_prefix("http://").and_then(|it| it.strip_suffix("/metrics"));
    let address = address.expect("an address");
    // One that hangs up without a word is no error.
    drop(TcpStream::connect(address).expect("it listens"));
    let (status, body) = ask(address, "GET /metrics HTTP/1.1\r\nHost: localhost");
    assert_eq!(status, "HTTP/1.1 200 OK");
    assert_eq!(body, gputrace(&["metrics", "--once", &trace], state));
    assert_eq!(ask(address, "GET /other HTTP/1.1\r\nHost: localhost").0, "HTTP/1.1 404 Not Found");
    assert_eq!(
        ask(address, "POST /metrics HTTP/1.1\r\nHost: localhost").0,
        "HTTP/1.1 405 Method Not Allowed"
    );
}

/// Ended with its test, however that ends.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Takes one request, answers it, and returns its first line, head and body. Nobody may ask any more when `is_over`.
fn receive(listener: &TcpListener, status: &str, is_over: impl Fn() -> bool) -> (String, String, Vec<u8>) {
    listener.set_nonblocking(true).expect("a listener that does not wait");
    let mut stream = loop {
        let was_over = is_over();
        match listener.accept() {
            Ok((stream, _)) => break stream,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                assert!(!was_over, "it ended without a request");
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => panic!("no request: {error}"),
        }
    };
    stream.set_nonblocking(false).expect("a stream that waits");
    let mut bytes = vec![];
    let mut part = [0; 4096];
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, _)) = text.split_once("\r\n\r\n") {
            let length =
                head.lines().find_map(|line| line.strip_prefix("Content-Length: ")).expect("a length");
            let begin = head.len() + 4;
            if bytes.len() >= begin + length.parse::<usize>().expect("a number") {
                write!(stream, "HTTP/1.1 {status}\r\nContent-Length: 3\r\n\r\nno!").expect("it reads");
                let first = head.lines().next().unwrap_or_default().to_owned();
                return (first, head.to_owned(), bytes[begin..].to_vec());
            }
        }
        let n = stream.read(&mut part).expect("more");
        bytes.extend_from_slice(&part[..n]);
    }
}

/// Pushes once, as these words say with the listener's address in the place of HOST.
fn pushed(kind: &str, url: &str, trace: &str) -> (String, String, Vec<u8>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let url = url.replace("HOST", &address);
    let (kind, trace) = (kind.to_owned(), trace.to_owned());
    let pushing = std::thread::spawn(move || {
        gputrace(&["metrics", "--once", "--push", &kind, &url, &trace], Path::new("/nonexistent"))
    });
    let received = receive(&listener, "200 OK", || pushing.is_finished());
    pushing.join().expect("it was taken");
    received
}

fn unpacked(profile: &[u8]) -> Vec<u8> {
    let mut bytes = vec![];
    flate2::read::GzDecoder::new(profile).read_to_end(&mut bytes).expect("gzip");
    bytes
}

#[test]
fn profiles_that_are_pushed_are_those_of_the_export() {
    let trace = golden("varying-lengths");
    let folder = folder("push");
    let file = folder.path().join("end.pprof").display().to_string();
    gputrace(&["export", "--format", "pprof", "--end", "-o", &file, &trace], Path::new("/nonexistent"));
    let exported = unpacked(&std::fs::read(&file).expect("a profile"));
    let (first, head, body) = pushed("pprof", "http://HOST/", &trace);
    let name = "POST /ingest?name=gputrace%7Bhost%3Dgpu%2Cpid%3D2556%2Cprogram%3Dpython3%7D&from=";
    assert!(first.starts_with(name) && first.contains("&format=pprof"), "{first}");
    assert!(head.contains("Content-Type: application/octet-stream"), "{head}");
    assert!(unpacked(&body) == exported, "not the profile of `export`");
    let (first, _, body) = pushed("pprof", "http://HOST/api/profiles/writeraw", &trace);
    assert_eq!(first, "POST /api/profiles/writeraw HTTP/1.1");
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    let labels = body["series"][0]["labels"]["labels"].as_array().expect("labels");
    assert!(labels.contains(&serde_json::json!({"name": "pid", "value": "2556"})), "{labels:?}");
    let profile = body["series"][0]["samples"][0]["rawProfile"].as_str().expect("a profile");
    assert!(profile.starts_with("H4sI") && profile.len().is_multiple_of(4), "gzip in base64");
}

#[test]
fn metrics_that_are_pushed_by_otlp_are_those_of_top() {
    let trace = golden("dataparallel");
    let (first, head, body) = pushed("otlp", "http://HOST", &trace);
    assert_eq!(first, "POST /v1/metrics HTTP/1.1");
    assert!(head.contains("Content-Type: application/json"), "{head}");
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    let metrics = body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"].as_array().expect("metrics");
    let sum = |name: &str| -> u64 {
        let metric =
            metrics.iter().find(|metric| metric["name"] == name).unwrap_or_else(|| panic!("no {name}"));
        let points = metric["gauge"]["dataPoints"].as_array().or(metric["sum"]["dataPoints"].as_array());
        let values = points.expect("points").iter().map(|point| point["asInt"].as_str().expect("a number"));
        values.map(|value| value.parse::<u64>().expect("a number")).sum()
    };
    let seen = top(&trace, Path::new("/nonexistent"));
    let devices = seen["processes"][0]["devices"].as_array().expect("devices");
    let total = |of: &dyn Fn(&Value) -> Option<u64>| -> u64 { devices.iter().filter_map(of).sum() };
    assert_eq!(sum("gputrace.held"), total(&|device| device["driver_bytes"].as_u64()));
    assert_eq!(sum("gputrace.owner"), total(&|device| device["driver_bytes"].as_u64()));
    assert_eq!(sum("gputrace.torch.reserved"), total(&|device| device["torch"]["reserved_bytes"].as_u64()));
    assert_eq!(sum("gputrace.torch.allocations"), total(&|device| device["torch"]["allocations"].as_u64()));
}

#[test]
fn what_is_refused_is_said_and_is_an_error() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let trace = golden("varying-lengths");
    let mut command = Command::new(recorded::built().join("gputrace"));
    command.args(["metrics", "--once", "--push", "otlp", &url, &trace]);
    let pushing = std::thread::spawn(move || command.output().expect("gputrace runs"));
    receive(&listener, "403 Forbidden", || pushing.is_finished());
    let output = pushing.join().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2));
    assert!(said.contains("refused the push (403): no!"), "{said}");
}

#[test]
fn every_metric_of_the_dashboard_is_one_of_ours() {
    let folder = folder("dashboard");
    let state = folder.path().join("state");
    let mut recorded = Holder::start(Some(&folder), &state, &[], &[]);
    let mut stranger = Holder::start(None, &state, &[], &[]);
    recorded.tell("alloc 5000000");
    stranger.tell("alloc 5000000");
    let (pid, torch) = (recorded.pid().to_string(), golden("varying-lengths"));
    let said = || {
        let both = [&pid, &torch].map(|which| gputrace(&["metrics", "--once", which], &state));
        both.concat()
    };
    // What the stranger holds, and what only a process has that runs and was read.
    let wanted = ["gputrace_unrecorded_bytes{", "gputrace_owner_bytes{", "gputrace_last_event_age_seconds{"];
    let mut said_all = String::new();
    eventually(|| {
        said_all = said();
        if wanted.iter().all(|metric| said_all.contains(metric)) { Ok(()) } else { Err(said_all.clone()) }
    });
    let said = said_all;
    let known: BTreeSet<&str> = said
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split(['{', ' ']).next())
        .collect();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/grafana/gputrace.json");
    let dashboard: Value =
        serde_json::from_str(&std::fs::read_to_string(path).expect("a dashboard")).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let queries: Vec<&str> = panels
        .iter()
        .flat_map(|panel| panel["targets"].as_array().into_iter().flatten())
        .map(|target| target["expr"].as_str().expect("a query"))
        .collect();
    assert!(queries.len() >= 8, "{queries:?}");
    for query in queries {
        let words = query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let metrics: Vec<&str> = words
            .filter(|word| ["gputrace_", "DCGM_", "hw_gpu_"].iter().any(|it| word.starts_with(it)))
            .collect();
        assert!(!metrics.is_empty(), "{query}");
        for metric in metrics {
            assert!(known.contains(metric), "{query}: {metric} is none of {known:?}");
        }
    }
    recorded.end();
    stranger.end();
}

/// What the command of an alert wrote: a line each time.
fn alerts(file: &Path) -> Vec<String> {
    std::fs::read_to_string(file).unwrap_or_default().lines().map(str::to_owned).collect()
}

#[test]
fn a_command_is_run_once_when_a_bound_is_crossed() {
    let folder = folder("alert");
    let (state, file) = (folder.path().join("state"), folder.path().join("alerts"));
    let command =
        r#"echo "$ALERT; $ALERT_VALUE; $ALERT_PID; $ALERT_TRACE; $ALERT_DEVICE; ${LD_PRELOAD:-}" >> alerts"#;
    let options = ["--alert", "held>10MB", "--alert", "allocated>1MB", "--on-alert", command];
    let mut recorded = Holder::start(Some(&folder), &state, &[], &options);
    recorded.tell("alloc 5000000");
    recorded.tell("alloc 20000000");
    eventually(|| if alerts(&file).is_empty() { Err("no alert".to_owned()) } else { Ok(()) });
    recorded.tell("alloc 30000000");
    let pid = recorded.pid();
    eventually(|| match driver_bytes(&top(&pid.to_string(), &state)) {
        Some(55_000_000) => Ok(()),
        other => Err(format!("{other:?}")),
    });
    recorded.end();
    folder.traces(1);
    let lines = alerts(&file);
    let trace = folder.path().join(format!("{pid}.gtr"));
    let trace = std::fs::canonicalize(trace).expect("a trace");
    // It looks some times a second: the second allocation may have been there by then, or the third.
    let values = ["23.84 MiB", "52.45 MiB"];
    let expected = values.map(|value| format!("held>10MB; {value}; {pid}; {}; 0; ", trace.display()));
    assert!(lines.len() == 1 && expected.contains(&lines[0]), "{lines:?} is none of {expected:?}");
}

#[test]
fn a_trace_that_gets_another_name_or_is_removed_is_not_told_of_again() {
    let folder = folder("renamed");
    let (state, file) = (folder.path().join("state"), folder.path().join("alerts"));
    let command = r#"echo "$ALERT; $(basename "$ALERT_TRACE")" >> alerts"#;
    let bounds = ["held>10MB", "held>50MB", "held>90MB"];
    let options: Vec<&str> = bounds.iter().flat_map(|bound| ["--alert", bound]).collect();
    let mut recorded =
        Holder::start(Some(&folder), &state, &[], &[&options[..], &["--on-alert", command]].concat());
    let trace = folder.path().join(format!("{}.gtr", recorded.pid()));
    let until = |n: usize| {
        eventually(|| match alerts(&file) {
            lines if lines.len() >= n => Ok(()),
            lines => Err(format!("{lines:?}")),
        });
    };
    recorded.tell("alloc 20000000");
    until(1);
    std::fs::rename(&trace, folder.path().join("other.gtr")).expect("it is there");
    recorded.tell("alloc 40000000");
    until(2);
    std::fs::remove_file(folder.path().join("other.gtr")).expect("it is there");
    recorded.tell("alloc 40000000");
    until(3);
    let pid = recorded.pid();
    recorded.end();
    let expected = [
        format!("held>10MB; {pid}.gtr"),
        "held>50MB; other.gtr".to_owned(),
        "held>90MB; other.gtr (deleted)".to_owned(),
    ];
    assert_eq!(alerts(&file), expected);
}

#[test]
fn growth_is_that_of_the_steps() {
    let folder = folder("growth");
    let (state, file) = (folder.path().join("state"), folder.path().join("alerts"));
    let python = concat!(env!("CARGO_MANIFEST_DIR"), "/../python/src");
    let command = r#"echo "$ALERT; $ALERT_VALUE" >> alerts"#;
    let options = ["--alert", "growth>90MB/step", "--alert", "growth>2MB/step", "--on-alert", command];
    let mut recorded = Holder::start(Some(&folder), &state, &[("PYTHONPATH", python)], &options);
    for step in 0..12 {
        recorded.tell(&format!("step {step} 3145728"));
        // Longer than what is looked at as one moment.
        std::thread::sleep(Duration::from_millis(30));
    }
    eventually(|| if alerts(&file).is_empty() { Err("no alert".to_owned()) } else { Ok(()) });
    recorded.end();
    assert_eq!(alerts(&file), ["growth>2MB/step; 3.00 MiB a step"]);
}

#[test]
fn a_condition_that_is_none_is_refused_before_the_program_starts() {
    let folder = folder("condition");
    for condition in ["used<90%", "growth>1MiB", "free>1GiB", "used>120%"] {
        let mut command = Command::new(recorded::built().join("gputrace"));
        command.args(["record", "--alert", condition, "--", "touch", "started"]).current_dir(folder.path());
        let output = command.output().expect("gputrace runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(125), "{condition}: {said}");
        assert!(said.contains(condition) && said.contains("growth>10MiB/step"), "{said}");
        assert!(!folder.path().join("started").exists(), "{condition}");
    }
}
