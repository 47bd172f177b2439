//! A process that was started without the library: it is brought in while the process runs, sees every call from then on, and leaves
//! every word as it was. Nothing that the program can see of itself changes, whenever that happens and whoever is killed meanwhile.
//!
//! `GPUTRACE_ATTACH_ROUNDS` asks for more rounds than the few of CI.
#![cfg(target_arch = "x86_64")]

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::Duration;

use gputrace_schemas::event::{Action, EventKind};
use gputrace_schemas::reader::Trace;
use gputrace_skip::skip;
use gputrace_tests::patience::{SECONDS, until};
use gputrace_tests::recorded::{self, Folder};
use gputrace_tests::wheels::{self, Major};

/// Of the words of `words.c`: there is no row for `cuCtxSetCurrent`.
const OURS: &str = "5";

/// A program that follows its standard input and answers by lines.
struct Program {
    child: Child,
    said: BufReader<ChildStdout>,
}

impl Program {
    fn start(folder: &Folder, command: &mut Command) -> Program {
        command.env("LD_LIBRARY_PATH", fake_cuda::library_dir()).current_dir(folder.path());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("it runs");
        let said = BufReader::new(child.stdout.take().expect("its output"));
        let mut program = Program { child, said };
        assert_eq!(program.line(), "ready");
        program
    }

    fn pid(&self) -> String {
        self.child.id().to_string()
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.said.read_line(&mut line).expect("a line");
        line.trim().to_owned()
    }

    fn ask(&mut self, what: &str) -> String {
        writeln!(self.child.stdin.as_mut().expect("its input"), "{what}").expect("it reads");
        self.line()
    }

    /// Ends it; what it said then.
    fn end(mut self) -> String {
        drop(self.child.stdin.take());
        let mut said = String::new();
        self.said.read_to_string(&mut said).expect("text");
        assert!(self.child.wait().expect("its end").success(), "{said}");
        said
    }

    /// What is left of us in it, the page and the library apart: descriptors, threads, pages of code.
    fn left(&self) -> Vec<String> {
        let folder = |name: &str| fs::read_dir(format!("/proc/{}/{name}", self.pid())).expect("it lives");
        let files = folder("fd").flatten().filter_map(|it| fs::read_link(it.path()).ok());
        let files = files.map(|it| it.to_string_lossy().into_owned());
        let files = files.filter(|it| it.contains("gputrace") && !it.contains("gputrace-control"));
        let threads = folder("task").flatten();
        let threads = threads.filter_map(|it| fs::read_to_string(it.path().join("comm")).ok());
        files.chain(threads.filter(|it| it.starts_with("gputrace"))).collect()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn compile(folder: &Folder, source: &str, name: &str, options: &[&str]) -> PathBuf {
    let program = folder.path().join(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("attach").join(source);
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-pthread", "-o"]).arg(&program).arg(source).args(options);
    assert!(compiler.status().expect("a compiler").success());
    program
}

fn words(folder: &Folder) -> Program {
    Program::start(folder, &mut Command::new(compile(folder, "words.c", "words", &["-ldl"])))
}

/// Threads that are linked to the driver: its functions are in slots that the loader filled in.
fn churn(folder: &Folder, binding: &str) -> Program {
    let driver = fake_cuda::library_dir().join("libcuda.so.1");
    let program = compile(folder, "churn.c", "churn", &[driver.to_str().expect("text"), binding]);
    Program::start(folder, &mut Command::new(program))
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

fn refused(folder: &Folder, pid: &str) -> String {
    let output = gputrace(folder, &["attach", pid]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    said(&output)
}

fn attach(folder: &Folder, pid: &str) {
    succeeds(folder, &["attach", "--timeout", SECONDS, "-o", "late.gtr", pid]);
}

/// Ends the recording; how often the trace has memory given out and taken back.
fn detach(folder: &Folder, pid: &str) -> (usize, usize) {
    succeeds(folder, &["detach", "--timeout", SECONDS, pid]);
    let path = folder.path().join("late.gtr");
    let trace = Trace::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(trace.is_complete());
    let count = |action: Action| {
        let is_it = |kind: &EventKind| matches!(kind, EventKind::Call(call) if call.action == action);
        trace.events().filter(|event| is_it(&event.kind)).count()
    };
    let counts = (count(Action::Alloc), count(Action::Free));
    drop(trace);
    fs::remove_file(path).expect("it can be removed");
    counts
}

fn folder(name: &str) -> Folder {
    Folder::new(&std::env::temp_dir(), &format!("gputrace-late-{name}"))
}

fn rounds(few: u64) -> u64 {
    let asked = std::env::var("GPUTRACE_ATTACH_ROUNDS").ok().and_then(|rounds| rounds.parse().ok());
    asked.unwrap_or(few)
}

#[test]
fn words_of_the_programs_data_lead_to_us_from_attach_to_detach_and_every_call_between_is_seen() {
    let folder = folder("words");
    let mut program = words(&folder);
    assert_eq!(program.ask("hold 3"), "0");
    for round in 1..=rounds(25) {
        attach(&folder, &program.pid());
        assert_eq!(program.ask("go 20"), OURS, "words are ours in round {round}");
        assert_eq!(detach(&folder, &program.pid()), (20, 20), "round {round}");
        assert_eq!(program.ask("go 20"), "0", "words are the program's after round {round}");
        assert_eq!(program.left(), Vec::<String>::new(), "round {round}");
    }
    assert_eq!(program.end(), "as it was\n");
}

#[test]
fn threads_that_are_linked_to_the_driver_are_recorded_from_attach_on() {
    for binding in ["-Wl,-z,now", "-Wl,-z,lazy"] {
        let folder = folder(&format!("slots{binding}"));
        let program = churn(&folder, binding);
        for round in 1..=rounds(13) {
            attach(&folder, &program.pid());
            std::thread::sleep(Duration::from_micros(round * 7919 % 20_000));
            let (given, taken) = detach(&folder, &program.pid());
            assert!(given > 0 && taken > 0, "{given} and {taken} in round {round}, {binding}");
            assert_eq!(program.left(), Vec::<String>::new(), "round {round}");
        }
        assert!(program.end().contains("rounds"));
    }
}

#[test]
fn every_release_of_the_runtime_is_recorded_linked_to_it_or_with_a_copy_in_the_program() {
    let mut links = Vec::new();
    let releases = [("cudart11", Major::Cuda11), ("cudart12", Major::Cuda12), ("cudart13", Major::Cuda13)];
    for (name, major) in releases {
        match wheels::shared(major) {
            Ok(path) => {
                let search = format!("-Wl,-rpath,{}", path.parent().expect("a folder").display());
                links.push(vec![path.display().to_string(), search]);
            }
            Err(reason) => skip(name, reason),
        }
        match wheels::fixed(major) {
            Ok(path) => links.push([&path.display().to_string(), "-lrt", "-lm"].map(str::to_owned).into()),
            Err(reason) => skip(&format!("static {name}"), reason),
        }
    }
    for link in links {
        let folder = folder("runtime");
        let options: Vec<&str> = ["-DRUNTIME"].into_iter().chain(link.iter().map(String::as_str)).collect();
        let program = compile(&folder, "words.c", "runtime", &[&options[..], &["-ldl"]].concat());
        let mut program = Program::start(&folder, &mut Command::new(program));
        for round in 1..=rounds(3) {
            attach(&folder, &program.pid());
            program.ask("go 20");
            assert_eq!(detach(&folder, &program.pid()), (20, 20), "round {round}, {link:?}");
            program.ask("go 20");
        }
        assert_eq!(program.end(), "as it was\n");
    }
}

#[test]
fn blocks_of_pytorchs_allocator_are_recorded_from_attach_on() {
    let torch = fake_cuda::torch_dir();
    if !torch.join("libc10_cuda.so").exists() {
        return skip("the stand-in for PyTorch", "no C++ compiler was there to build it");
    }
    let folder = folder("torch");
    let path = |file: &str| torch.join(file).display().to_string();
    let search = [
        format!("-Wl,-rpath-link,{}", fake_cuda::library_dir().display()),
        format!("-Wl,-rpath,{}", torch.display()),
    ];
    let options = ["-DTORCH", &path("libc10_cuda.so"), &path("libc10.so"), &search[0], &search[1], "-ldl"];
    let program = compile(&folder, "words.c", "torch", &options);
    let mut program = Program::start(&folder, &mut Command::new(program));
    for round in 1..=rounds(3) {
        attach(&folder, &program.pid());
        program.ask("go 20");
        let (mut given, mut taken, mut requested) = (0, 0, 0);
        succeeds(&folder, &["detach", "--timeout", SECONDS, &program.pid()]);
        let trace = Trace::open(folder.path().join("late.gtr")).expect("a trace");
        for event in trace.events() {
            match event.kind {
                EventKind::BlockAlloc(block) => {
                    given += 1;
                    requested += usize::from(block.requested.is_some());
                }
                EventKind::BlockFree(_) => taken += 1,
                _ => {}
            }
        }
        assert_eq!((given, taken, requested), (20, 20, 20), "round {round}");
        fs::remove_file(folder.path().join("late.gtr")).expect("it can be removed");
    }
    assert_eq!(program.end(), "as it was\n");
}

#[test]
fn a_program_that_ends_while_it_is_attached_to_has_a_whole_trace() {
    let folder = folder("ends");
    let program = words(&folder);
    attach(&folder, &program.pid());
    assert_eq!(program.end(), "as it was\n");
    assert!(folder.traces(1)[0].is_complete());
}

#[test]
fn a_library_of_pythons_is_recorded_from_attach_on() {
    const SCRIPT: &str = "
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.go(1)
print('ready', flush=True)
while line := sys.stdin.readline():
    if line.startswith('/'):
        library = ctypes.CDLL(line.strip())
    else:
        library.go(int(line))
    print(library.words_changed(), flush=True)
";
    let folder = folder("python");
    let library = compile(&folder, "words.c", "libwords.so", &["-DLIBRARY", "-shared", "-fPIC", "-ldl"]);
    let mut python = Command::new("python3");
    let mut program = Program::start(&folder, python.args(["-c", SCRIPT]).arg(&library));
    for round in 1..=rounds(5) {
        attach(&folder, &program.pid());
        assert_eq!(program.ask("7"), OURS, "words are ours in round {round}");
        assert_eq!(detach(&folder, &program.pid()), (7, 7), "round {round}");
        assert_eq!(program.ask("7"), "0", "words are the program's after round {round}");
    }
    // A library that is loaded later looks up the driver's functions before anybody can look at it.
    attach(&folder, &program.pid());
    let later = folder.path().join("liblater.so");
    fs::copy(&library, &later).expect("a copy");
    assert_eq!(program.ask(later.to_str().expect("text")), OURS);
    program.ask("9");
    let (given, taken) = detach(&folder, &program.pid());
    assert_eq!((given, taken), (9, 9));
    assert_eq!(program.ask("7"), "0");
    program.end();
}

#[test]
fn of_two_that_attach_at_once_one_does_and_the_other_is_told() {
    let folder = folder("two");
    let mut program = words(&folder);
    for round in 0..rounds(5) {
        let start = |name: &str| {
            let mut command = Command::new(recorded::built().join("gputrace"));
            command
                .args(["attach", "--timeout", SECONDS, "-o", name, &program.pid()])
                .current_dir(folder.path());
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gputrace runs")
        };
        let both = [start("late.gtr"), start("late2.gtr")].map(|it| it.wait_with_output().expect("its end"));
        let refusals: Vec<String> = both.iter().filter(|it| !it.status.success()).map(said).collect();
        assert_eq!(refusals.len(), 1, "round {round}: {both:?}");
        let is_told = refusals[0].contains("another gputrace is attaching")
            || refusals[0].contains("is already being recorded");
        assert!(is_told, "{}", refusals[0]);
        assert_eq!(program.ask("go 5"), OURS);
        succeeds(&folder, &["detach", "--timeout", SECONDS, &program.pid()]);
        assert_eq!(program.ask("go 5"), "0");
        for trace in folder.files("gtr") {
            fs::remove_file(trace).expect("it can be removed");
        }
    }
    assert_eq!(program.end(), "as it was\n");
}

#[test]
fn a_child_of_a_process_that_is_attached_to_runs_as_any_and_its_calls_are_not_the_parents() {
    let folder = folder("fork");
    let mut program = words(&folder);
    for round in 0..rounds(3) {
        attach(&folder, &program.pid());
        assert_eq!(program.ask("fork 4"), OURS);
        program.ask("go 6");
        assert_eq!(detach(&folder, &program.pid()), (6, 6), "round {round}");
        assert_eq!(program.ask("fork 4"), "0");
    }
    assert_eq!(program.end(), "as it was\n");
    assert_eq!(folder.files("gtr"), Vec::<PathBuf>::new());
}

#[test]
fn an_attacher_that_is_killed_at_any_moment_hurts_nobody_and_the_next_one_attaches() {
    let folder = folder("killed");
    let mut program = words(&folder);
    for round in 0..rounds(12) {
        let mut attacher = Command::new(recorded::built().join("gputrace"));
        attacher.args(["attach", "-o", "late.gtr", &program.pid()]).current_dir(folder.path());
        let mut attacher =
            attacher.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("gputrace runs");
        std::thread::sleep(Duration::from_micros(round * 7919 % 120_000));
        attacher.kill().and_then(|()| attacher.wait()).expect("its end");
        program.ask("go 3");
    }
    // What was begun is over, one way or the other, and can be begun again.
    let _ = gputrace(&folder, &["detach", "--timeout", SECONDS, &program.pid()]);
    let _ = fs::remove_file(folder.path().join("late.gtr"));
    attach(&folder, &program.pid());
    assert_eq!(program.ask("go 20"), OURS);
    assert_eq!(detach(&folder, &program.pid()), (20, 20));
    assert_eq!(program.ask("go 20"), "0");
    // A thread that had begun ends by itself; what nobody needs, the next attacher has taken away.
    until("what killed attachers left is still there", || program.left().is_empty());
    assert_eq!(program.end(), "as it was\n");
}

/// Names of our memory files that are mapped in it.
fn mapped(program: &Program) -> BTreeSet<String> {
    let maps = fs::read_to_string(format!("/proc/{}/maps", program.pid())).expect("it lives");
    let ours =
        |line: &str| line.find("/memfd:gputrace-library").and_then(|at| Some(line.get(at..)?.to_owned()));
    maps.lines().filter_map(ours).collect()
}

#[test]
fn what_an_attacher_leaves_that_is_killed_while_it_writes_the_next_one_takes_away() {
    let folder = folder("writes");
    let preload = compile(&folder, "dies.c", "dies.so", &["-shared", "-fPIC"]);
    // The calls that make the file, its three parts, the calls that map it, and those that begin a thread in it.
    for at in 0..6 {
        let mut program = words(&folder);
        let mut attacher = Command::new(recorded::built().join("gputrace"));
        attacher.args(["attach", "--timeout", SECONDS, "-o", "late.gtr", &program.pid()]);
        attacher.env("LD_PRELOAD", &preload).env("DIES_AT", at.to_string()).current_dir(folder.path());
        let output = attacher.output().expect("gputrace runs");
        assert_eq!(output.status.code(), Some(2), "{at}: {}", said(&output));
        assert_eq!((program.left().len(), mapped(&program).len()), (at.min(1), at / 5), "{at}");
        attach(&folder, &program.pid());
        assert_eq!(program.ask("go 20"), OURS, "{at}");
        assert_eq!(detach(&folder, &program.pid()), (20, 20), "{at}");
        until("what a killed attacher left is still there", || program.left().is_empty());
        // The library, from the other file.
        assert_eq!(mapped(&program).len(), 1, "{at}");
        assert_eq!(program.end(), "as it was\n", "{at}");
    }
}

/// Addresses in KiB, descriptors, threads and mapped rings of a process.
fn taken(pid: &str) -> (u64, usize, usize, usize) {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:")).expect("a size");
    let listed = |name: &str| fs::read_dir(format!("/proc/{pid}/{name}")).expect("it lives").count();
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("it lives");
    let rings = maps.lines().filter(|line| line.contains(".ring")).count();
    let size = line.split_whitespace().next().and_then(|size| size.parse().ok()).expect("a number");
    (size, listed("fd"), listed("task"), rings)
}

#[test]
fn rounds_of_attach_and_detach_leave_no_more_behind_than_the_first() {
    let folder = folder("left");
    let mut program = words(&folder);
    let mut first = None;
    for round in 0..rounds(6) {
        attach(&folder, &program.pid());
        assert_eq!(program.ask("go 5"), OURS);
        detach(&folder, &program.pid());
        // The thread that served us ends by itself.
        while !program.left().is_empty() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let now = taken(&program.pid());
        assert_eq!(now.3, 0, "round {round}: a ring is mapped");
        let first = *first.get_or_insert(now);
        assert!(now.0 <= first.0 + 1024, "round {round}: {first:?} {now:?}");
        assert_eq!((now.1, now.2), (first.1, first.2), "round {round}");
    }
    assert_eq!(program.end(), "as it was\n");
}

#[test]
fn of_a_process_without_addresses_to_spare_nothing_is_asked() {
    let folder = folder("limit");
    let mut program = words(&folder);
    let before = taken(&program.pid());
    let limit = (before.0 + (100 << 10)) << 10;
    let limited =
        Command::new("prlimit").args([format!("--as={limit}"), "--pid".into(), program.pid()]).status();
    assert!(limited.expect("prlimit").success());
    let why = refused(&folder, &program.pid());
    assert!(why.contains("MiB of addresses (ulimit -v) left, and needs 256 MiB"), "{why}");
    assert_eq!(taken(&program.pid()), before);
    assert_eq!(program.ask("go 3"), "0");
    assert_eq!(program.end(), "as it was\n");
}

#[test]
fn who_cannot_be_given_the_library_is_told_why_and_is_left_alone() {
    let folder = folder("refused");
    let mut other = Command::new("sleep").arg("100").spawn().expect("it runs");
    let why = refused(&folder, &other.id().to_string());
    assert!(why.contains("has not loaded the CUDA driver"), "{why}");
    other.kill().and_then(|()| other.wait()).expect("its end");

    let program = words(&folder);
    let signal = |name: &str| {
        let sent = Command::new("kill").args([name, &program.pid()]).status();
        assert!(sent.expect("kill runs").success());
    };
    signal("-STOP");
    let state = || fs::read_to_string(format!("/proc/{}/stat", program.pid())).expect("it lives");
    while !state().contains(") T ") {
        std::thread::sleep(Duration::from_millis(1));
    }
    let why = refused(&folder, &program.pid());
    assert!(why.contains("it is stopped"), "{why}");
    signal("-CONT");
    let mut filtered = words(&folder);
    filtered.ask("filter");
    let why = refused(&folder, &filtered.pid());
    assert!(why.contains("it is under a seccomp filter"), "{why}");
    assert_eq!(filtered.ask("go 3"), "0");
    assert_eq!(filtered.end(), "as it was\n");
    let listed = succeeds(&folder, &["ps"]);
    let line = listed.lines().find(|line| line.split_whitespace().next() == Some(&program.pid()));
    assert!(line.is_some_and(|line| line.contains(" late ")), "{listed}");
    assert_eq!(program.end(), "as it was\n");
}

/// A program of `attach/` that is linked to the driver if it calls it.
fn linked(folder: &Folder, name: &str, word: &str) -> Program {
    let driver = fake_cuda::library_dir().join("libcuda.so.1");
    let options = ["-D_GNU_SOURCE", "-Wl,--as-needed", driver.to_str().expect("text"), "-ldl"];
    let program = compile(folder, &format!("{name}.c"), name, &options);
    Program::start(folder, Command::new(program).arg(word))
}

/// Attaches to a process of which no thread can be borrowed, and sends it SIGUSR1 meanwhile; what the attacher says of it.
fn moved_meanwhile(folder: &Folder, program: &Program) -> Output {
    let mut attacher = Command::new(recorded::built().join("gputrace"));
    attacher
        .args(["attach", "--timeout", SECONDS, "-o", "late.gtr", &program.pid()])
        .current_dir(folder.path());
    let attacher = attacher.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gputrace runs");
    // If it has not looked by then, it finds all as it will be: that too must harm nobody.
    std::thread::sleep(Duration::from_secs(1));
    let sent = Command::new("kill").args(["-USR1", &program.pid()]).status();
    assert!(sent.expect("kill runs").success());
    attacher.wait_with_output().expect("its end")
}

#[test]
fn a_thread_under_a_filter_of_its_own_is_not_borrowed() {
    let folder = folder("filtered");
    let program = linked(&folder, "filtered", "early");
    let why = refused(&folder, &program.pid());
    assert!(why.contains("under a seccomp filter"), "{why}");
    assert_eq!(program.end(), "as it was\n");
    let program = linked(&folder, "filtered", "late");
    let output = moved_meanwhile(&folder, &program);
    assert!(said(&output).contains("under a seccomp filter"), "{}", said(&output));
    assert_eq!(program.end(), "as it was\n");
}

#[test]
fn a_process_that_becomes_another_program_meanwhile_is_given_nothing_for_the_one_that_it_was() {
    let folder = folder("execs");
    let program = linked(&folder, "execs", "begin");
    let output = moved_meanwhile(&folder, &program);
    let is_refused = ["has executed another program", "has not loaded the CUDA driver"];
    assert!(is_refused.iter().any(|why| said(&output).contains(why)), "{}", said(&output));
    assert_eq!((output.status.code(), program.left()), (Some(2), vec![]));
    assert_eq!(program.end(), "as it was\n");
}

#[test]
fn a_child_that_still_has_its_parents_memory_is_left_alone() {
    let folder = folder("between");
    let mut program = linked(&folder, "between", "");
    let child = program.line();
    let why = refused(&folder, &child);
    assert!(why.contains("it is between vfork and exec"), "{why}");
    assert_eq!(program.left(), Vec::<String>::new());
    assert_eq!(program.end(), "as it was\n");
}

#[test]
fn a_library_that_is_not_whole_is_not_brought_in() {
    let folder = folder("cut");
    let whole = fs::read(recorded::built().join("libgputrace.so")).expect("it was built");
    let cut = folder.path().join("libgputrace.so");
    for n in [20, 64, 1000, 4096, whole.len() / 3, whole.len() / 2, whole.len() - 5000, whole.len() - 1] {
        let program = words(&folder);
        fs::write(&cut, &whole[..n]).expect("writable");
        let mut attacher = Command::new(recorded::built().join("gputrace"));
        attacher.args(["attach", &program.pid()]).env("GPUTRACE_LIBRARY", &cut).current_dir(folder.path());
        let output = attacher.output().expect("gputrace runs");
        assert!(said(&output).contains("is not a whole library"), "{n} bytes: {}", said(&output));
        assert_eq!(output.status.code(), Some(2));
        assert_eq!(program.left(), Vec::<String>::new());
        assert_eq!(program.end(), "as it was\n");
    }
}
