//! A process that runs already: asleep it starts nothing, attached to it is recorded with what it held before, detached it is as
//! it was; any number of times, at any moment.
//!
//! `GPUTRACE_ATTACH_ROUNDS` asks for more rounds than the few of CI.

use std::collections::HashSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use gputrace_schemas::event::{Action, EventKind, LostCause};
use gputrace_schemas::reader::Trace;
use gputrace_tests::patience::SECONDS;
use gputrace_tests::recorded::{self, Folder};

/// `tests/attach/churn.c`, running: it holds 50 allocations of 1 MiB, and its threads give and take others.
struct Churn(Child, BufReader<ChildStdout>);

impl Churn {
    fn start(folder: &Folder, switch: &str) -> Churn {
        Churn::with_threads(folder, switch, 6)
    }

    fn with_threads(folder: &Folder, switch: &str, n_threads: usize) -> Churn {
        let program = folder.path().join("churn");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("attach/churn.c");
        let driver = fake_cuda::library_dir().join("libcuda.so.1");
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-pthread", "-o"]).arg(&program).arg(source).arg(driver);
        assert!(compiler.status().expect("a compiler").success());
        let mut command = Command::new(program);
        command.arg(n_threads.to_string());
        command.env("LD_LIBRARY_PATH", fake_cuda::library_dir()).env("GPUTRACE", switch);
        command.env("LD_PRELOAD", recorded::built().join("libgputrace.so")).current_dir(folder.path());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("it runs");
        let output = BufReader::new(child.stdout.take().expect("its output"));
        let mut churn = Churn(child, output);
        assert_eq!(churn.line(), "ready\n");
        churn
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.1.read_line(&mut line).expect("a line of its output");
        line
    }

    /// The longest round of a thread since this was last asked.
    fn longest(&mut self) -> Duration {
        self.0.stdin.as_mut().and_then(|input| input.write_all(b"?").ok()).expect("it listens");
        Duration::from_micros(self.line().trim().parse().expect("a number"))
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }

    /// Ends it; what it said then.
    fn end(mut self) -> String {
        drop(self.0.stdin.take());
        let mut said = String::new();
        self.1.read_to_string(&mut said).expect("text");
        assert!(self.0.wait().expect("its end").success(), "{said}");
        said
    }

    fn threads(&self) -> usize {
        fs::read_dir(format!("/proc/{}/task", self.pid())).expect("its threads").count()
    }

    /// Where its descriptors lead, those of the test apart.
    fn files(&self) -> HashSet<String> {
        let open = fs::read_dir(format!("/proc/{}/fd", self.pid())).expect("its descriptors");
        let targets = open.flatten().filter_map(|it| fs::read_link(it.path()).ok());
        let targets = targets.map(|it| it.to_string_lossy().into_owned());
        targets.filter(|it| it.contains("gputrace")).collect()
    }
}

fn gputrace(folder: &Folder, arguments: &[&str]) -> Output {
    let mut command = Command::new(recorded::built().join("gputrace"));
    command.args(arguments).current_dir(folder.path()).output().expect("gputrace runs")
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn succeeds(folder: &Folder, arguments: &[&str]) -> String {
    let output = gputrace(folder, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", said(&output));
    said(&output)
}

fn refused(folder: &Folder, arguments: &[&str]) -> String {
    let output = gputrace(folder, arguments);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", said(&output));
    said(&output)
}

fn rounds(usual: u64) -> u64 {
    let asked = std::env::var("GPUTRACE_ATTACH_ROUNDS").ok().and_then(|rounds| rounds.parse().ok());
    asked.unwrap_or(usual)
}

fn folder(name: &str) -> Folder {
    Folder::new(&std::env::temp_dir(), &format!("gputrace-attach-{name}"))
}

/// How `ps` says that a process stands.
fn state(folder: &Folder, pid: &str) -> Option<String> {
    let listed = succeeds(folder, &["ps"]);
    let line = listed.lines().find(|line| line.split_whitespace().next() == Some(pid))?;
    line.split_whitespace().nth(2).map(str::to_owned)
}

/// Children of the process, by `/proc`.
fn children(pid: &str) -> usize {
    let own = |entry: fs::DirEntry| fs::read_to_string(entry.path().join("stat")).ok();
    let is_child = |stat: &String| {
        stat.rsplit(')').next().is_some_and(|rest| rest.split_whitespace().nth(1) == Some(pid))
    };
    fs::read_dir("/proc").expect("/proc").flatten().filter_map(own).filter(is_child).count()
}

/// What a trace says of memory that lives from before to its end, and whether its books agree with the program's.
/// False if the trace says that it has no books.
fn check(path: &Path) -> bool {
    let trace = Trace::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(trace.is_complete(), "{}", path.display());
    // A recorder that gets no processor cannot keep up with six threads that do nothing else: the trace says so, and has no books.
    let is_lost =
        |kind: &EventKind| matches!(kind, EventKind::Lost(lost) if lost.cause == LostCause::RingFull);
    if trace.events().any(|event| is_lost(&event.kind)) {
        return false;
    }
    let (mut live, mut kept) = (HashSet::new(), HashSet::new());
    // What the trace says of an address, for whoever has to find out why.
    let history = |addr: u64| {
        let of_it =
            trace.events().filter(|event| matches!(&event.kind, EventKind::Call(call) if call.addr == addr));
        of_it.map(|event| format!("\n{event:?}")).collect::<String>()
    };
    for event in trace.events() {
        let EventKind::Call(call) = event.kind else { continue };
        match call.action {
            Action::Alloc if call.result == Some(0) => {
                assert!(
                    live.insert(call.addr),
                    "{:#x} is given out twice in {}:{}",
                    call.addr,
                    path.display(),
                    history(call.addr)
                );
                if call.bytes.0 == 1 << 20 {
                    kept.insert(call.addr);
                }
            }
            Action::Free => {
                assert!(
                    live.remove(&call.addr),
                    "{:#x} is taken back unseen in {}:{}",
                    call.addr,
                    path.display(),
                    history(call.addr)
                );
                kept.remove(&call.addr);
            }
            _ => {}
        }
    }
    assert_eq!(kept.len(), 50, "allocations from before in {}", path.display());
    true
}

#[test]
fn a_library_that_sleeps_starts_nothing_and_leaves_no_file() {
    let folder = folder("asleep");
    let program = Churn::start(&folder, "dormant");
    let alone = Churn::start(&folder, "off");
    assert_eq!(program.threads(), alone.threads());
    assert_eq!(children(&program.pid()), 0);
    assert_eq!(program.files(), HashSet::from(["/memfd:gputrace-control (deleted)".to_owned()]));
    assert_eq!(alone.files(), HashSet::new());
    let state = |program: &Churn| state(&folder, &program.pid());
    assert_eq!((state(&program).as_deref(), state(&alone).as_deref()), (Some("dormant"), Some("loaded")));
    let why = refused(&folder, &["attach", &alone.pid()]);
    assert!(why.contains("its library is not dormant"), "{why}");
    program.end();
    alone.end();
    assert_eq!(folder.files("gtr"), Vec::<PathBuf>::new());
}

#[test]
fn attached_and_detached_at_any_moment_the_books_are_complete_and_the_program_is_as_it_was() {
    let rounds = rounds(12);
    let folder = folder("rounds");
    let program = Churn::start(&folder, "dormant");
    let pid = program.pid();
    for round in 0..rounds {
        succeeds(&folder, &["attach", "--timeout", SECONDS, "-o", &format!("round{round}.gtr"), &pid]);
        // Moments that repeat with no period of the program's.
        std::thread::sleep(Duration::from_micros(round * 7919 % 20_000));
        if round == 0 {
            let why = refused(&folder, &["attach", &pid]);
            assert!(why.contains("is already being recorded"), "{why}");
        }
        succeeds(&folder, &["detach", "--timeout", SECONDS, &pid]);
        let trace = folder.path().join(format!("round{round}.gtr"));
        if !check(&trace) {
            println!("round {round}: events were lost, and the trace says so");
        }
        fs::remove_file(trace).expect("it can be removed");
    }
    let why = refused(&folder, &["detach", &pid]);
    assert!(why.contains("is not being recorded"), "{why}");
    assert_eq!(children(&pid), 0);
    println!("{rounds} rounds: {}", program.end());
}

/// What a thread of the program stands still for at most: without anybody, while somebody attaches, and while somebody detaches. Figures
/// and no verdict: on a busy machine, threads wait for a processor.
#[test]
fn how_long_a_thread_stands_still() {
    let folder = folder("pauses");
    for n_threads in [1, 6] {
        let mut program = Churn::with_threads(&folder, "dormant", n_threads);
        let pid = program.pid();
        let mut longest = [const { Vec::new() }; 3];
        for round in 0..rounds(3) {
            program.longest();
            let began = Instant::now();
            succeeds(&folder, &["attach", "--timeout", SECONDS, "-o", "pause.gtr", &pid]);
            let took = began.elapsed();
            longest[1].push(program.longest());
            std::thread::sleep(Duration::from_micros(round * 7919 % 20_000));
            program.longest();
            succeeds(&folder, &["detach", "--timeout", SECONDS, &pid]);
            longest[2].push(program.longest());
            // As much of the machine is taken as by attaching.
            let mut other = Command::new(recorded::built().join("gputrace")).arg("ps").output();
            while began.elapsed() < took * 2 && other.is_ok() {
                other = Command::new(recorded::built().join("gputrace")).arg("ps").output();
            }
            longest[0].push(program.longest());
            fs::remove_file(folder.path().join("pause.gtr")).expect("it can be removed");
        }
        for (what, mut times) in ["nobody", "attach", "detach"].into_iter().zip(longest) {
            times.sort_unstable();
            let at = |part: usize| times[(times.len() * part / 100).min(times.len() - 1)];
            println!("{n_threads} threads, {what}: p50 {:?}, p99 {:?}, max {:?}", at(50), at(99), at(100));
        }
        program.end();
    }
}

#[test]
fn a_program_that_ends_while_it_is_attached_to_has_a_whole_trace() {
    let folder = folder("ends");
    let program = Churn::start(&folder, "dormant");
    succeeds(&folder, &["attach", "--timeout", SECONDS, "-o", "ends.gtr", &program.pid()]);
    program.end();
    let traces = folder.traces(1);
    assert!(traces[0].is_complete());
}

/// A process that is ended with the test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill().and_then(|()| self.0.wait());
    }
}

#[test]
fn who_cannot_be_attached_to_is_told_why() {
    let folder = folder("refused");
    let mut other = Ended(Command::new("sleep").arg("100").spawn().expect("it runs"));
    let pid = other.0.id().to_string();
    let why = refused(&folder, &["attach", &pid]);
    assert!(why.contains("was started without libgputrace.so"), "{why}");
    let why = refused(&folder, &["detach", &pid]);
    assert!(why.contains("has not loaded libgputrace.so"), "{why}");
    // Dead, and not waited for.
    other.0.kill().expect("it ends");
    while !fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z ")) {
        std::thread::yield_now();
    }
    let why = refused(&folder, &["attach", &pid]);
    assert!(why.contains("does not exist"), "{why}");
    drop(other);
    let why = refused(&folder, &["attach", &pid]);
    assert!(why.contains("does not exist"), "{why}");
}

#[test]
fn a_process_that_is_recorded_since_its_start_is_listed_so() {
    let folder = folder("since");
    let program = Churn::start(&folder, "");
    // Its ring had no name yet when it was mapped, and the kernel shows it without one for good.
    let maps = fs::read_to_string(format!("/proc/{}/maps", program.pid())).expect("it lives");
    assert!(!maps.contains(".ring"), "{maps}");
    let listed = succeeds(&folder, &["ps"]);
    let row = listed.lines().find(|line| line.split_whitespace().next() == Some(&program.pid()));
    assert!(row.is_some_and(|row| row.contains("it has been recorded since its start")), "{listed}");
    let why = refused(&folder, &["attach", &program.pid()]);
    assert!(why.contains("it has been recorded since its start"), "{why}");
    program.end();
}

#[test]
fn a_picture_of_who_holds_what_leaves_nothing_running() {
    let folder = folder("snapshot");
    let program = Churn::start(&folder, "dormant");
    let before = (program.threads(), program.files());
    let text =
        succeeds(&folder, &["attach", "--snapshot", "--timeout", SECONDS, "-o", "now.gtr", &program.pid()]);
    assert!(text.contains("Memory held") && text.contains("cuda:0"), "{text}");
    assert!(text.contains("of memory allocated before, only what was still held is known"), "{text}");
    assert_eq!((program.threads(), program.files(), children(&program.pid())), (before.0, before.1, 0));
    let why = refused(&folder, &["detach", &program.pid()]);
    assert!(why.contains("is not being recorded"), "{why}");
    let trace = Trace::open(folder.path().join("now.gtr")).expect("a trace");
    assert!(trace.is_complete());
    program.end();
}

#[test]
fn where_no_trace_can_be_written_the_process_sleeps_on() {
    let folder = folder("nowhere");
    let program = Churn::start(&folder, "dormant");
    fs::write(folder.path().join("file"), "no folder").expect("a file");
    let why = refused(&folder, &["attach", "--timeout", SECONDS, "-o", "file/train.gtr", &program.pid()]);
    assert!(why.contains("it is not recorded"), "{why}");
    let why = refused(&folder, &["detach", &program.pid()]);
    assert!(why.contains("is not being recorded"), "{why}");
    // A file that is there already is not written over: the trace has another name.
    fs::write(folder.path().join("there.gtr"), "mine").expect("a file");
    succeeds(&folder, &["attach", "--timeout", SECONDS, "-o", "there.gtr", &program.pid()]);
    succeeds(&folder, &["detach", "--timeout", SECONDS, &program.pid()]);
    assert_eq!(fs::read_to_string(folder.path().join("there.gtr")).expect("it is there"), "mine");
    assert_eq!(folder.files("gtr").len(), 2);
    program.end();
}

#[test]
fn traces_of_attached_processes_have_the_names_that_record_gives() {
    let folder = folder("names");
    let program = Churn::start(&folder, "dormant");
    let pid = program.pid();
    let why = refused(&folder, &["attach", "-o", "%x.gtr", &pid]);
    assert!(why.contains("%x is not known; placeholders are %e"), "{why}");
    // The name of the folder is not a pattern.
    let own = Folder::new(folder.path(), "100%x");
    for _ in 0..3 {
        succeeds(&own, &["attach", "--timeout", "120", "-o", "new/%n.%p.%%.gtr", &pid]);
        succeeds(&own, &["detach", "--timeout", "120", &pid]);
    }
    let names = fs::read_dir(own.path().join("new")).expect("it was made").flatten();
    let mut names: Vec<_> = names.map(|it| it.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    assert_eq!(names, [0, 1, 2].map(|n| format!("{n}.{pid}.%.gtr")));
    program.end();
}

#[test]
fn a_process_that_stands_still_is_asked_and_not_waited_for() {
    let folder = folder("stopped");
    let program = Churn::start(&folder, "dormant");
    let pid = program.pid();
    let signal =
        |name: &str| assert!(Command::new("kill").args([name, &pid]).status().expect("kill").success());
    signal("-STOP");
    let why = refused(&folder, &["attach", "--timeout", "1", "-o", "stopped.gtr", &pid]);
    assert!(why.contains("has made no visible call since"), "{why}");
    // The wish is taken back.
    let why = refused(&folder, &["detach", &pid]);
    assert!(why.contains("is not being recorded"), "{why}");
    signal("-CONT");
    succeeds(&folder, &["attach", "--timeout", SECONDS, "-o", "goes.gtr", &pid]);
    // Stopped while it is recorded, it is let go once it goes on.
    signal("-STOP");
    let why = refused(&folder, &["detach", "--timeout", "1", &pid]);
    assert!(why.contains("has made no visible call since"), "{why}");
    signal("-CONT");
    while state(&folder, &pid).as_deref() != Some("dormant") {
        std::thread::yield_now();
    }
    succeeds(&folder, &["attach", "--timeout", SECONDS, "-o", "again.gtr", &pid]);
    succeeds(&folder, &["detach", "--timeout", SECONDS, &pid]);
    program.end();
}

/// The process that has a trace open.
fn recorder_of(trace: &Path) -> String {
    let trace = trace.canonicalize().expect("a trace");
    let writes = |entry: &fs::DirEntry| {
        let open = fs::read_dir(entry.path().join("fd")).into_iter().flatten().flatten();
        open.filter_map(|file| fs::read_link(file.path()).ok()).any(|to| to == trace)
    };
    let recorder = fs::read_dir("/proc").expect("/proc").flatten().find(writes).expect("a recorder");
    recorder.file_name().into_string().expect("a number")
}

fn signal(name: &str, pid: &str) {
    assert!(Command::new("kill").args([name, pid]).status().expect("kill").success());
}

/// What a recorder left is for `recover`; here it is only in the way of the machine's memory.
fn remove_ring(why: &str) {
    assert!(why.contains("gputrace recover"), "{why}");
    let ring =
        why.split_whitespace().find(|word| word.contains(".ring")).expect("its ring").trim_matches('`');
    fs::remove_file(ring).expect("it is there");
}

#[test]
fn a_recorder_that_is_killed_leaves_the_program_alone_and_what_it_left_is_named() {
    let folder = folder("killed");
    let program = Churn::start(&folder, "dormant");
    let pid = program.pid();
    succeeds(&folder, &["attach", "--timeout", SECONDS, "-o", "killed.gtr", &pid]);
    signal("-9", &recorder_of(&folder.path().join("killed.gtr")));
    remove_ring(&refused(&folder, &["detach", "--timeout", SECONDS, &pid]));
    succeeds(&folder, &["attach", "--timeout", SECONDS, "-o", "next.gtr", &pid]);
    succeeds(&folder, &["detach", "--timeout", SECONDS, &pid]);
    program.end();
}

#[test]
fn a_recorder_that_is_killed_while_its_trace_is_waited_for_is_not_called_complete() {
    let folder = folder("waited");
    let program = Churn::start(&folder, "dormant");
    let pid = program.pid();
    succeeds(&folder, &["attach", "--timeout", SECONDS, "-o", "killed.gtr", &pid]);
    let recorder = recorder_of(&folder.path().join("killed.gtr"));
    signal("-STOP", &recorder);
    let mut detach = Command::new(recorded::built().join("gputrace"));
    detach.args(["detach", "--timeout", SECONDS, &pid]).current_dir(folder.path());
    let detach = detach.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gputrace runs");
    // It has seen that the recorder lives before it asks the process to sleep.
    while state(&folder, &pid).as_deref() != Some("dormant") {
        std::thread::sleep(Duration::from_millis(5));
    }
    signal("-9", &recorder);
    let output = detach.wait_with_output().expect("gputrace runs");
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    remove_ring(&said(&output));
    program.end();
}

/// Holds 50 allocations, and goes on taking and giving one; says what it held when it is told to end. Forks when it is told to: the child holds
/// 20 of its own.
const PYTHON: &str = r#"
import ctypes, os, select, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
def ok(code):
    assert code == 0, code
def begin(n):
    ok(cuda.cuInit(0))
    context = ctypes.c_void_p()
    ok(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    ok(cuda.cuCtxSetCurrent(context))
    return [give(1 << 20) for _ in range(n)]
def give(size):
    at = ctypes.c_uint64()
    ok(cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(size)))
    return at
def work(kept):
    print("ready", os.getpid(), flush=True)
    while not select.select([sys.stdin], [], [], 0.0005)[0]:
        ok(cuda.cuMemFree_v2(give(4096)))
    for at in kept:
        ok(cuda.cuMemFree_v2(at))
work(begin(50))
print("done", flush=True)
"#;

/// `python3`, and those that `GPUTRACE_TEST_PYTHONS` lists.
fn pythons() -> Vec<PathBuf> {
    let listed = std::env::var_os("GPUTRACE_TEST_PYTHONS").unwrap_or_default();
    let listed = std::env::split_paths(&listed).filter(|path| !path.as_os_str().is_empty());
    std::iter::once("python3".into()).chain(listed).collect()
}

#[test]
fn a_python_program_is_attached_to_with_its_lines() {
    let folder = folder("python");
    let script = folder.path().join("holds.py");
    fs::write(&script, PYTHON).expect("a script");
    for python in pythons() {
        let mut command = Command::new(&python);
        command.arg(&script).env("LD_LIBRARY_PATH", fake_cuda::library_dir()).env("GPUTRACE", "dormant");
        command.env("LD_PRELOAD", recorded::built().join("libgputrace.so")).current_dir(folder.path());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it runs");
        let output = BufReader::new(child.stdout.take().expect("its output"));
        let mut program = Churn(child, output);
        let ready = program.line();
        assert!(ready.starts_with("ready"), "{}: {ready}", python.display());
        let pid = program.pid();
        for round in 0..rounds(3).min(50) {
            let name = format!("{round}.gtr");
            succeeds(&folder, &["attach", "--timeout", SECONDS, "-o", &name, &pid]);
            // As long as it takes to see a call.
            std::thread::sleep(Duration::from_millis(30));
            succeeds(&folder, &["detach", "--timeout", SECONDS, &pid]);
            let trace = folder.path().join(name);
            assert!(check(&trace), "{}: events were lost", python.display());
            fs::remove_file(trace).expect("it can be removed");
        }
        assert_eq!(program.end(), "done\n", "{}", python.display());
    }
}
