//! A process that runs already: asleep it starts nothing, attached to it is recorded with what it held before, detached it is as
//! it was; any number of times, at any moment.
//!
//! `GPUTRACE_ATTACH_ROUNDS` asks for more rounds than the few of CI.

use std::collections::HashSet;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use gputrace_schemas::event::{Action, EventKind, LostCause};
use gputrace_schemas::reader::Trace;
use gputrace_tests::recorded::{self, Folder};

/// `tests/attach/churn.c`, running: it holds 50 allocations of 1 MiB, and its threads give and take others.
struct Churn(Child);

impl Churn {
    fn start(folder: &Folder, switch: &str) -> Churn {
        let program = folder.path().join("churn");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("attach/churn.c");
        let driver = fake_cuda::library_dir().join("libcuda.so.1");
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-pthread", "-o"]).arg(&program).arg(source).arg(driver);
        assert!(compiler.status().expect("a compiler").success());
        let mut command = Command::new(program);
        command.env("LD_LIBRARY_PATH", fake_cuda::library_dir()).env("GPUTRACE", switch);
        command.env("LD_PRELOAD", recorded::built().join("libgputrace.so")).current_dir(folder.path());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("it runs");
        let mut line = String::new();
        let output = child.stdout.as_mut().expect("its output");
        BufReader::with_capacity(1, output).read_line(&mut line).expect("its first line");
        assert_eq!(line, "ready\n");
        Churn(child)
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }

    /// Ends it; what it said then.
    fn end(mut self) -> String {
        drop(self.0.stdin.take());
        let mut said = String::new();
        self.0.stdout.take().expect("its output").read_to_string(&mut said).expect("text");
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

fn folder(name: &str) -> Folder {
    Folder::new(&std::env::temp_dir(), &format!("gputrace-attach-{name}"))
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
    for event in trace.events() {
        let EventKind::Call(call) = event.kind else { continue };
        match call.action {
            Action::Alloc if call.result == Some(0) => {
                assert!(live.insert(call.addr), "{:#x} is given out twice in {}", call.addr, path.display());
                if call.bytes.0 == 1 << 20 {
                    kept.insert(call.addr);
                }
            }
            Action::Free => {
                assert!(
                    live.remove(&call.addr),
                    "{:#x} is taken back unseen in {}",
                    call.addr,
                    path.display()
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
    let listed = succeeds(&folder, &["ps"]);
    let state = |program: &Churn| {
        let line = listed.lines().find(|line| line.split_whitespace().next() == Some(&program.pid()));
        line.and_then(|line| line.split_whitespace().nth(2)).map(str::to_owned)
    };
    assert_eq!((state(&program).as_deref(), state(&alone).as_deref()), (Some("dormant"), Some("loaded")));
    let why = refused(&folder, &["attach", &alone.pid()]);
    assert!(why.contains("its library does not sleep"), "{why}");
    program.end();
    alone.end();
    assert_eq!(folder.files("gtr"), Vec::<PathBuf>::new());
}

#[test]
fn attached_and_detached_at_any_moment_the_books_are_complete_and_the_program_is_as_it_was() {
    let asked = std::env::var("GPUTRACE_ATTACH_ROUNDS").ok().and_then(|rounds| rounds.parse().ok());
    let rounds: u64 = asked.unwrap_or(12);
    let folder = folder("rounds");
    let program = Churn::start(&folder, "dormant");
    let pid = program.pid();
    for round in 0..rounds {
        succeeds(&folder, &["attach", "--timeout", "120", "-o", &format!("round{round}.gtr"), &pid]);
        // Moments that repeat with no period of the program's.
        std::thread::sleep(Duration::from_micros(round * 7919 % 20_000));
        if round == 0 {
            let why = refused(&folder, &["attach", &pid]);
            assert!(why.contains("is being recorded already"), "{why}");
        }
        succeeds(&folder, &["detach", "--timeout", "120", &pid]);
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

#[test]
fn a_program_that_ends_while_it_is_attached_to_has_a_whole_trace() {
    let folder = folder("ends");
    let program = Churn::start(&folder, "dormant");
    succeeds(&folder, &["attach", "--timeout", "120", "-o", "ends.gtr", &program.pid()]);
    program.end();
    let traces = folder.traces(1);
    assert!(traces[0].is_complete());
}

#[test]
fn who_cannot_be_attached_to_is_told_why() {
    let folder = folder("refused");
    let mut other = Command::new("sleep").arg("100").spawn().expect("it runs");
    let why = refused(&folder, &["attach", &other.id().to_string()]);
    assert!(why.contains("was started without libgputrace.so"), "{why}");
    other.kill().and_then(|()| other.wait()).expect("its end");
    let why = refused(&folder, &["attach", &other.id().to_string()]);
    assert!(why.contains("does not exist"), "{why}");
}
