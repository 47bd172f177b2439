//! `gputrace record`: no run is lost without a word, and the program is as it is alone.

use std::path::Path;
use std::process::{Command, Output};

use gputrace_tests::recorded::{self, Folder};

/// `gputrace record` with these arguments in a folder, on the fake device.
fn record(folder: &Folder, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(recorded::built().join("gputrace"));
    command.arg("record").args(arguments).current_dir(folder.path());
    command.env("LD_LIBRARY_PATH", fake_cuda::library_dir()).env("PATH", path());
    command.envs(variables.iter().copied()).output().expect("gputrace runs")
}

/// With the program `fake-cuda` on it.
fn path() -> std::ffi::OsString {
    let usual = std::env::var_os("PATH").unwrap_or_default();
    let folders = [recorded::built()].into_iter().chain(std::env::split_paths(&usual).collect::<Vec<_>>());
    std::env::join_paths(folders).expect("folders without a colon")
}

/// The last line on standard error, numbers of processes and sizes as words.
fn last(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr);
    let line = said.lines().last().unwrap_or_default().to_owned();
    let is_size = |word: &str| word == "KiB,";
    let mut words: Vec<&str> = line.split(' ').collect();
    if let Some(at) = words.iter().position(|word| is_size(word)) {
        words.splice(at - 1..=at, ["SIZE,"]);
    }
    words.join(" ")
}

fn folder(name: &str) -> Folder {
    Folder::new(&std::env::temp_dir(), &format!("gputrace-record-{name}"))
}

#[test]
fn the_last_line_names_the_trace_and_the_next_command() {
    let folder = folder("line");
    let output = record(&folder, &["-o", "a b.gtr", "--", "fake-cuda", "demo"], &[]);
    let line = "gputrace: a b.gtr: SIZE, 67 events, none lost; next: gputrace report 'a b.gtr'";
    assert_eq!((output.status.code(), last(&output).as_str()), (Some(0), line));
    // It was complete when the line was said.
    let files = folder.files("gtr");
    assert_eq!(files.len(), 1);
    assert!(gputrace_schemas::reader::Trace::open(&files[0]).expect("a trace").is_complete());
    let quiet = record(&folder, &["-q", "-f", "-o", "a b.gtr", "--", "fake-cuda", "demo"], &[]);
    assert!(!String::from_utf8_lossy(&quiet.stderr).contains("next:"));
}

#[test]
fn processes_of_a_job_are_counted_and_a_folder_takes_them() {
    let folder = folder("job");
    let four = "for n in 1 2 3 4; do fake-cuda demo >&2; done";
    let output = record(&folder, &["-o", "job/", "--", "sh", "-c", four], &[]);
    let line = "gputrace: 4 traces in job: SIZE, 268 events, none lost; next: gputrace ranks job";
    assert_eq!(last(&output), line);
    assert_eq!(std::fs::read_dir(folder.path().join("job")).expect("a folder").count(), 4);
}

#[test]
fn a_run_without_a_trace_says_why() {
    let folder = folder("nothing");
    // The recorder may say its own a moment later.
    let said = |arguments: &[&str], variables: &[(&str, &str)]| {
        let said = String::from_utf8_lossy(&record(&folder, arguments, variables).stderr).into_owned();
        said.lines().find(|line| line.contains("nothing was recorded")).unwrap_or(&said).to_owned()
    };
    let begins = |line: String, with: &str| assert!(line.starts_with(with), "{line}");
    let nothing =
        "gputrace: nothing was recorded: neither true nor any program that it started created a CUDA context";
    begins(said(&["--", "true"], &[]), nothing);
    let off = "gputrace: nothing was recorded: GPUTRACE=0 disables the library";
    begins(said(&["--", "fake-cuda", "demo"], &[("GPUTRACE", "0")]), off);
    let unset = "gputrace: nothing was recorded: the output pattern \"%q{NOPE}.gtr\" cannot be used: the variable NOPE is not set";
    begins(said(&["-o", "%q{NOPE}.gtr", "--", "fake-cuda", "demo"], &[]), unset);
    assert_eq!(folder.files("gtr").len(), 0);
}

#[test]
fn what_could_not_be_recorded_is_not_started() {
    let folder = folder("refused");
    std::fs::write(folder.path().join("old.gtr"), b"an earlier run").expect("a file");
    for pattern in ["old.gtr", "%x.gtr", "old.gtr/a.gtr", "/proc/a.gtr"] {
        let output = record(&folder, &["-o", pattern, "--", "touch", "started"], &[]);
        assert_eq!(output.status.code(), Some(125), "{pattern}");
        assert!(!folder.path().join("started").exists(), "{pattern}");
    }
    assert_eq!(std::fs::read(folder.path().join("old.gtr")).expect("there"), b"an earlier run");
    let misspelt = record(&folder, &["--stack", "python", "--", "touch", "started"], &[]);
    assert!(String::from_utf8_lossy(&misspelt.stderr).contains("a similar argument exists: '--stacks'"));
    assert!(!folder.path().join("started").exists());
}

#[test]
fn a_name_that_is_taken_when_it_is_known_is_numbered_and_said() {
    let folder = folder("taken");
    std::fs::write(folder.path().join("demo.gtr"), b"an earlier run").expect("a file");
    // Of whom the run is, only the recorder knows.
    let set_back = "touch -d '1 hour ago' *.gtr; exec fake-cuda demo >&2";
    let output = record(&folder, &["-o", "%e.gtr", "--", "sh", "-c", set_back], &[]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let line = |n: usize| said.lines().rev().nth(n).unwrap_or_default().to_owned();
    let taken = "gputrace: demo.gtr existed before this run and is unchanged; this run is in demo.";
    assert!(line(1).starts_with(taken), "{said}");
    assert!(line(0).contains("next: gputrace report demo."), "{said}");
    assert_eq!(std::fs::read(folder.path().join("demo.gtr")).expect("there"), b"an earlier run");
}

#[test]
fn a_recorder_that_was_killed_is_said_with_the_ring_that_it_left() {
    let folder = folder("killed");
    let kill = r#"
import ctypes, glob, os
cuda, context, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
cuda.cuInit(0)
cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
cuda.cuCtxSetCurrent(context)
cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1 << 20))
ours = f"/gputrace.{os.getpid()}.".encode()
while True:
    for name in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            words = open(name, "rb").read().split(b"\0")
        except OSError:
            continue
        if words[1:2] == [b"recorder"] and any(ours in word for word in words):
            os.kill(int(name.split("/")[2]), 9)
            os._exit(0)
"#;
    let output = record(&folder, &["-o", "a.gtr", "--", "python3", "-c", kill], &[]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let ring =
        said.lines().find_map(|line| line.split_once("gputrace recover ")).map(|(_, ring)| ring.to_owned());
    let ring = ring.unwrap_or_else(|| panic!("{said}"));
    std::fs::remove_file(Path::new(&ring)).expect("the ring that was named");
}

#[test]
fn who_waits_for_the_end_keeps_no_file_of_the_programs() {
    let folder = folder("files");
    let look = r#"
import glob, os, time
ours, until = f"--pid={os.getpid()}".encode(), time.monotonic() + 1800
found, assured = None, {"7"} <= set(os.listdir("/proc/self/fd"))
while found != ["0", "1", "2"] and time.monotonic() < until:
    for name in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            words = open(name, "rb").read().split(b"\0")
            if words[1:2] == [b"witness"] and ours in words:
                found = sorted(os.listdir(name.replace("cmdline", "fd")))
        except OSError:
            continue
    time.sleep(0.01)
print(assured, found)
"#;
    let gputrace = recorded::built().join("gputrace");
    let output = Command::new("sh")
        .args(["-c", "exec 7>files.txt; exec \"$0\" record -- python3 -c \"$1\""])
        .arg(gputrace)
        .arg(look)
        .current_dir(folder.path())
        .output()
        .expect("sh");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "True ['0', '1', '2']\n");
}

#[test]
fn a_misspelt_variable_is_said_before_the_program_starts() {
    let folder = folder("variables");
    let variables = [("GPUTRACE_STACK", "all"), ("GPUTRACE_RING_BYTES", "64M")];
    let output = record(&folder, &["-q", "--", "sh", "-c", "echo started >&2"], &variables);
    let said = "\
gputrace: GPUTRACE_RING_BYTES=64M is not a number in digits, and is ignored
gputrace: GPUTRACE_STACK is not a variable of gputrace; did you mean GPUTRACE_STACKS?
started
";
    assert_eq!(String::from_utf8_lossy(&output.stderr), said);
}

#[test]
fn at_a_terminal_the_line_comes_before_the_prompt_and_every_signal_arrives_once() {
    let folder = folder("terminal");
    let output = Command::new("python3")
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/terminal.py"))
        .arg(recorded::built().join("gputrace"))
        .args(["fake-cuda", "demo"])
        .current_dir(folder.path())
        .env("LD_LIBRARY_PATH", fake_cuda::library_dir())
        .env("PATH", path())
        .output()
        .expect("Python");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let lines: Vec<&str> = said.lines().collect();
    let program = ["ready GPUTRACE", "^Cgot SIGINT", "got SIGTERM", "got SIGUSR1", "got SIGTERM", "leaves"];
    assert_eq!(lines.get(..6), Some(program.as_slice()), "{said}");
    assert!(lines[6].starts_with("gputrace: nothing was recorded: "), "{said}");
    assert_eq!(lines.get(7..10), Some(["exit 9", "signal 9", "gone with it: signal 9"].as_slice()), "{said}");
    assert!(lines[10].contains("67 events, none lost; next: gputrace report gputrace-"), "{said}");
    assert_eq!(lines.get(11..), Some(["exit 0"].as_slice()));
}
