//! Scenarios in which profilers of Python are attached to processes, as the tests of memray (`tests/integration/test_attach.py`) and py-spy
//! (`tests/integration_test.rs`) have them, as far as they fit: each is a program, what is asked, and what must come of it. In each the
//! program goes on and ends as alone.
//!
//! Left out: what is about sampling and values of variables (py-spy: local variables, asyncio's tasks), and recordings that were aggregated when
//! they were made (memray).
#![cfg(target_arch = "x86_64")]

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::{fs, thread, time::Duration};

use gputrace_schemas::event::{Action, EventKind, Frame};
use gputrace_schemas::reader::Trace;
use gputrace_tests::patience::SECONDS;
use gputrace_tests::recorded::{self, Folder};

/// What every program begins with: `work` gives out and takes back memory of the device.
const BEGIN: &str = "
import ctypes, os, sys, threading, time
library = ctypes.CDLL(sys.argv[1])
def work(): library.turn(1)
work()
def ready():
    print('ready', flush=True)
def until_the_end(each=lambda: None):
    for line in sys.stdin:
        each()
        print('done', flush=True)
";

/// What must come of an attach.
enum Comes {
    /// It is recorded, and a call that is made then has these functions among its frames, the innermost first.
    Frames(&'static [&'static str]),
    /// It is not, which is said with these words, and nothing was done.
    Refused(&'static str),
}
use Comes::{Frames, Refused};

/// Name, which preload, program, and what comes of it.
type Case = (&'static str, Library, &'static str, Comes);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Library {
    ComesLate,
    Sleeps,
}
use Library::{ComesLate, Sleeps};

const CASES: &[Case] = &[
    (
        "a loop in the background, and a call that is asked for (memray: basic attach)",
        ComesLate,
        "
stop = threading.Event()
def background():
    while not stop.is_set():
        work(); time.sleep(0.001)
def foo(): bar()
def bar(): baz()
def baz(): work()
thread = threading.Thread(target=background)
thread.start(); ready()
until_the_end(foo)
stop.set(); thread.join()
",
        Frames(&["work", "baz", "bar", "foo", "until_the_end"]),
    ),
    (
        "the same, asleep before",
        Sleeps,
        "
def foo(): bar()
def bar(): work()
def background():
    while True: work(); time.sleep(0.001)
threading.Thread(target=background, daemon=True).start()
ready(); until_the_end(foo); sys.stdout.flush(); os._exit(0)
",
        Frames(&["work", "bar", "foo", "until_the_end"]),
    ),
    (
        "nothing but a busy loop of Python, which calls neither the kernel nor the driver (py-spy: busy loop)",
        ComesLate,
        "
def busy():
    ready()
    end = time.monotonic() + 3
    while time.monotonic() < end: sum(range(1000))
busy()
until_the_end()
",
        Refused("no thread reached a point where gputrace could use it"),
    ),
    (
        "a busy loop that writes now and then",
        ComesLate,
        "
def busy():
    with open('/dev/null', 'w', buffering=1) as nowhere:
        while running:
            sum(range(1000)); print(1, file=nowhere)
running = True
thread = threading.Thread(target=busy)
thread.start(); ready(); until_the_end(work); running = False; thread.join()
",
        Frames(&["work", "until_the_end"]),
    ),
    (
        "a long sleep, beside what is read (py-spy: long sleep)",
        ComesLate,
        "
threading.Thread(target=lambda: time.sleep(1000), daemon=True).start()
ready(); until_the_end(work); sys.stdout.flush(); os._exit(0)
",
        Frames(&["work", "until_the_end"]),
    ),
    (
        "threads that come and go (py-spy: thread reuse)",
        ComesLate,
        "
def comes_and_goes():
    while running:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        time.sleep(0.001)
running = True
thread = threading.Thread(target=comes_and_goes)
thread.start(); ready(); until_the_end(work); running = False; thread.join()
",
        Frames(&["work"]),
    ),
    (
        "threads that wait for a lock (py-spy: thread names)",
        ComesLate,
        "
lock = threading.Lock(); lock.acquire()
threads = [threading.Thread(target=lock.acquire, name=f'waiter-{n}', daemon=True) for n in range(10)]
for thread in threads: thread.start()
ready(); until_the_end(work); sys.stdout.flush(); os._exit(0)
",
        Frames(&["work", "until_the_end"]),
    ),
    (
        "a deep recursion (py-spy: recursive)",
        ComesLate,
        "
def down(n): return down(n - 1) if n else until_the_end(work)
sys.setrecursionlimit(5000); ready(); down(300)
",
        Frames(&["work", "until_the_end", "down", "down", "down"]),
    ),
    (
        "names that are not ASCII (py-spy: unicode, cyrillic)",
        ComesLate,
        "
def кириллица(): work()
def 函数(): кириллица()
ready(); until_the_end(函数)
",
        Frames(&["work", "кириллица", "函数", "until_the_end"]),
    ),
    (
        "a child that is dead and not waited for (py-spy: subprocesses)",
        ComesLate,
        "
dead = os.fork()
if dead == 0: os._exit(0)
os.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT)
ready(); until_the_end(work); os.waitpid(dead, 0)
",
        Frames(&["work", "until_the_end"]),
    ),
    (
        "modules that are imported all the while",
        ComesLate,
        "
import importlib
def imports():
    while running:
        for name in ('json', 'decimal', 'email', 'csv'):
            sys.modules.pop(name, None); importlib.import_module(name)
        time.sleep(0.0005)
running = True
thread = threading.Thread(target=imports)
thread.start(); ready(); until_the_end(work); running = False; thread.join()
",
        Frames(&["work", "until_the_end"]),
    ),
    (
        "children that come and go by fork",
        ComesLate,
        "
def forks():
    while running:
        child = os.fork()
        if child == 0: os._exit(0)
        os.waitpid(child, 0); time.sleep(0.001)
running = True
thread = threading.Thread(target=forks)
thread.start(); ready(); until_the_end(work); running = False; thread.join()
",
        Frames(&["work", "until_the_end"]),
    ),
];

struct Running(Child, BufReader<ChildStdout>);

impl Running {
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.1.read_line(&mut line).expect("a line");
        line.trim().to_owned()
    }

    fn ask(&mut self) {
        writeln!(self.0.stdin.as_mut().expect("its input")).expect("it reads");
        assert_eq!(self.line(), "done");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn folder(name: &str) -> Folder {
    Folder::new(&std::env::temp_dir(), &format!("gputrace-attach-cases-{name}"))
}

/// `attach/turns.c` as a library.
fn library(folder: &Folder) -> PathBuf {
    let library = folder.path().join("libturns.so");
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-DLIBRARY", "-shared", "-fPIC", "-pthread", "-o"]).arg(&library);
    compiler.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("attach/turns.c"));
    compiler.arg(fake_cuda::library_dir().join("libcuda.so.1"));
    assert!(compiler.status().expect("a compiler").success());
    library
}

/// How it ended, and what it said.
fn gputrace(folder: &Folder, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(recorded::built().join("gputrace"));
    let output = command.args(arguments).current_dir(folder.path()).output().expect("gputrace runs");
    let said = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&said).into_owned())
}

fn start(folder: &Folder, program: &str, how: Library) -> Running {
    let mut command = Command::new("python3");
    command.args(["-c", &format!("{BEGIN}{program}")]).arg(library(folder));
    command.env("LD_LIBRARY_PATH", fake_cuda::library_dir()).current_dir(folder.path());
    if how == Sleeps {
        command.env("LD_PRELOAD", recorded::built().join("libgputrace.so")).env("GPUTRACE", "dormant");
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("it runs");
    let output = BufReader::new(child.stdout.take().expect("its output"));
    let mut running = Running(child, output);
    assert_eq!(running.line(), "ready");
    running
}

/// Names of the Python functions of each driver call that gave something out, the innermost first.
fn stacks(trace: &Trace) -> Vec<Vec<String>> {
    let given = trace
        .events()
        .filter(|event| matches!(&event.kind, EventKind::Call(call) if call.action == Action::Alloc));
    let names = given.map(|event| {
        let python = trace.stack_frames(event.stack).filter_map(|frame| match frame {
            Frame::Python { function, .. } => Some(function.clone()),
            Frame::Native { .. } => None,
        });
        python.collect()
    });
    names.collect()
}

fn check(case: &Case) {
    let (name, how, program, comes) = case;
    let folder = folder("one");
    let mut running = start(&folder, program, *how);
    let pid = running.0.id().to_string();
    let patience = if matches!(comes, Refused(_)) { "1" } else { SECONDS };
    let (status, said) = gputrace(&folder, &["attach", "--timeout", patience, "-o", "case.gtr", &pid]);
    match comes {
        Refused(why) => {
            assert_eq!(status, Some(2), "{name}: {said}");
            assert!(said.contains(why), "{name}: {said}");
            assert_eq!(folder.files("gtr"), Vec::<PathBuf>::new(), "{name}");
        }
        Frames(wanted) => {
            assert_eq!(status, Some(0), "{name}: {said}");
            running.ask();
            // The second time it is so already.
            let (status, said) =
                gputrace(&folder, &["attach", "--timeout", SECONDS, "-o", "twice.gtr", &pid]);
            assert_eq!(status, Some(2), "{name}: {said}");
            assert!(said.contains("is already being recorded"), "{name}: {said}");
            let (status, said) = gputrace(&folder, &["detach", "--timeout", SECONDS, &pid]);
            assert_eq!(status, Some(0), "{name}: {said}");
            let trace = Trace::open(folder.path().join("case.gtr")).expect("a trace");
            assert!(trace.is_complete(), "{name}");
            let stacks = stacks(&trace);
            let is_there = stacks
                .iter()
                .any(|stack| stack.iter().map(String::as_str).take(wanted.len()).eq(wanted.iter().copied()));
            assert!(is_there, "{name}: {stacks:?}");
            // memray: detach without attach.
            let (status, said) = gputrace(&folder, &["detach", &pid]);
            assert_eq!(status, Some(2), "{name}: {said}");
            assert!(said.contains("is not being recorded"), "{name}: {said}");
        }
    }
    running.ask();
    drop(running.0.stdin.take());
    let mut left = String::new();
    running.1.read_to_string(&mut left).expect("text");
    assert!(running.0.wait().expect("its end").success(), "{name}: {left}");
    assert_eq!(left, "", "{name}");
}

#[test]
fn scenarios_of_memrays_and_py_spys_tests() {
    let only = std::env::var("CASE").unwrap_or_default();
    for case in CASES.iter().filter(|case| case.0.contains(&only)) {
        check(case);
    }
}

#[test]
fn numbers_that_lead_to_no_process_of_ours_are_refused_with_the_reason() {
    let folder = folder("numbers");
    let dead = Command::new("true").spawn().expect("it runs");
    while !fs::read_to_string(format!("/proc/{}/stat", dead.id()))
        .expect("it is not waited for")
        .contains(") Z ")
    {
        thread::sleep(Duration::from_millis(1));
    }
    let mut plain = Command::new("sleep").arg("1000").spawn().expect("it runs");
    let (zombie, other) = (dead.id().to_string(), plain.id().to_string());
    let table = [
        ("attach", "4194305", "does not exist"),
        ("detach", "4194305", "does not exist"),
        ("attach", &zombie, "does not exist"),
        ("detach", &zombie, "does not exist"),
        // py-spy: a program that is not Python.
        ("attach", &other, "has not loaded the CUDA driver"),
        // memray: detach without attach.
        ("detach", &other, "has not loaded libgputrace.so"),
    ];
    for (verb, pid, why) in table {
        let (status, said) = gputrace(&folder, &[verb, "--timeout", "1", pid]);
        assert_eq!(status, Some(2), "{verb} {pid}: {said}");
        assert!(said.contains(why), "{verb} {pid}: {said}");
    }
    for mut child in [dead, plain.kill().map(|()| plain).expect("it lives")] {
        let _ = child.wait();
    }
}
