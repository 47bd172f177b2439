//! Threads that wait in the kernel while somebody attaches: no call ends early, with a part of its work or with an error, and none
//! takes longer, because a thread was stopped (signal(7) lists the calls that a stop ends).
#![cfg(target_arch = "x86_64")]

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use gputrace_skip::skip;
use gputrace_tests::recorded::{self, Folder};

/// Each in a process of its own, whose only thread waits for a second, six times.
const CALLS: [&str; 18] = [
    "recv",
    "read",
    "recvmsg",
    "recvmmsg",
    "io_uring_enter",
    "waitall",
    "write_slowly",
    "write_fast",
    "accept",
    "epoll_wait",
    "epoll_pwait",
    "io_getevents",
    "semtimedop",
    "sigtimedwait",
    "poll",
    "select",
    "nanosleep",
    "futex",
];
const TURNS: &str = "6";

struct Waiting {
    call: &'static str,
    child: Child,
    said: BufReader<ChildStdout>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start(folder: &Folder, program: &Path, call: &'static str) -> Waiting {
    let mut command = Command::new(program);
    command.args([call, "1000", TURNS]).current_dir(folder.path()).stdout(Stdio::piped());
    let mut child = command.env("LD_LIBRARY_PATH", fake_cuda::library_dir()).spawn().expect("it runs");
    let mut said = BufReader::new(child.stdout.take().expect("its output"));
    let mut line = String::new();
    said.read_line(&mut line).expect("a line");
    assert_eq!(line, "ready\n", "{call}");
    Waiting { call, child, said }
}

#[test]
fn no_call_that_waits_ends_otherwise_or_later_because_somebody_attached() {
    let folder = Folder::new(&std::env::temp_dir(), "gputrace-attach-waits");
    let program = folder.path().join("waits");
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-o"]).arg(&program);
    compiler.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("attach/waits.c"));
    compiler.arg(fake_cuda::library_dir().join("libcuda.so.1"));
    assert!(compiler.status().expect("a compiler").success());
    let programs: Vec<Waiting> = CALLS.iter().map(|call| start(&folder, &program, call)).collect();
    let attaching: Vec<Child> = programs
        .iter()
        .map(|program| {
            let trace = format!("{}.gtr", program.call);
            let mut command = Command::new(recorded::built().join("gputrace"));
            command.args(["attach", "--timeout", "4", "-o", &trace, &program.child.id().to_string()]);
            command.current_dir(folder.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().expect("gputrace runs")
        })
        .collect();
    let mut wrong = vec![];
    for (mut program, attaching) in programs.into_iter().zip(attaching) {
        let attached = attaching.wait_with_output().expect("its end");
        let mut said = String::new();
        program.said.read_to_string(&mut said).expect("text");
        if program.child.wait().expect("its end").code() == Some(77) {
            skip(&format!("waits in {}", program.call), "this machine does not have the call");
            continue;
        }
        if said != format!("{TURNS} of {TURNS}\n") {
            let how = String::from_utf8_lossy(&attached.stderr).into_owned();
            wrong.push(format!("{}: {said}attach: {how}", program.call));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
