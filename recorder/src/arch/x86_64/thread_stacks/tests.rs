//! Stacks of processes that are started for it.

use super::super::ptrace::Held;
#[cfg(test)] // `tests/tidy.rs` looks for it: variables of tests alone are in no table.
use super::*;
use std::collections::HashSet;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};

const PROGRAM: &str = "
import sys, threading, time, queue
def worker(lock):
    lock.acquire()
def in_a_queue(items):
    items.get()
class Late:
    def sleep_näher(self):
        print('ready', flush=True)
        time.sleep(1000)
lock = threading.Lock()
lock.acquire()
threading.Thread(target=worker, args=(lock,), daemon=True).start()
threading.Thread(target=in_a_queue, args=(queue.Queue(),), daemon=True).start()
time.sleep(0.2)
Late().sleep_näher()
";

struct Running {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Running {
    /// A program that says when it is ready.
    fn of(interpreter: &str, program: &str) -> Running {
        let mut command = Command::new(interpreter);
        let mut child = command.args(["-c", program]).stdout(Stdio::piped()).spawn().expect("python runs");
        let out = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut running = Running { child, out };
        assert_eq!(running.line(), "ready");
        running
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.read_line(&mut line).expect("it speaks");
        line.trim().to_owned()
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.pid().to_string()]).status();
        assert!(status.expect("kill runs").success());
    }

    fn state(&self) -> char {
        Status::of(self.pid(), self.pid()).expect("it lives").state
    }

    /// Threads get to where they are meant to be when they get to a processor.
    fn until(&self, is_there: impl Fn(&Stacks) -> bool) -> Stacks {
        loop {
            let stacks = stacks(self.pid()).expect("we may read our own child");
            if is_there(&stacks) {
                return stacks;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn has_function(stacks: &Stacks, end: &str) -> bool {
    stacks.threads.iter().flat_map(ThreadStack::python).any(|(function, ..)| function.ends_with(end))
}

fn native(thread: &ThreadStack) -> Vec<&str> {
    let native = thread.frames.iter().filter_map(|frame| match frame {
        Frame::Native { function, .. } => Some(function.as_str()),
        Frame::Python { .. } => None,
    });
    native.collect()
}

/// `python3`, and those that `GPUTRACE_TEST_PYTHONS` lists, each with its minor version.
fn interpreters() -> Vec<(String, u32)> {
    let listed = std::env::var_os("GPUTRACE_TEST_PYTHONS").unwrap_or_default();
    let listed = std::env::split_paths(&listed).filter(|path| path.exists());
    let found = std::iter::once("python3".into()).chain(listed).filter_map(|path| {
        let script = "import sys; print(sys.executable); print(sys.version_info[1]); \
                      print(getattr(sys, '_is_gil_enabled', lambda: True)())";
        let output = Command::new(path).args(["-c", script]).output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut lines = text.lines();
        let (path, minor) = (lines.next()?.to_owned(), lines.next()?.parse().ok()?);
        (lines.next() == Some("True")).then_some((path, minor))
    });
    found.collect()
}

#[test]
fn every_thread_of_every_interpreter_is_read_from_outside() {
    let interpreters = interpreters();
    assert!(!interpreters.is_empty(), "python3 is there");
    for (path, minor) in interpreters {
        let child = Running::of(&path, PROGRAM);
        let names = ["worker", "get", "sleep_näher"];
        let stacks = child.until(|stacks| names.iter().all(|name| has_function(stacks, name)));
        assert_eq!(stacks.threads.len(), 3, "3.{minor}: {stacks:?}");
        let main = &stacks.threads[0];
        assert_eq!(main.tid, child.pid(), "3.{minor}");
        let lines = main
            .python()
            .map(|(function, file, line)| (function.rsplit('.').next().unwrap_or_default(), file, line));
        assert_eq!(
            lines.collect::<Vec<_>>(),
            [("sleep_näher", "<string>", 10), ("<module>", "<string>", 16)],
            "3.{minor}"
        );
        let worker = stacks.threads.iter().find(|it| it.python().any(|(function, ..)| function == "worker"));
        let worker = worker.expect("a worker");
        assert_eq!(worker.python().next().map(|(.., line)| line), Some(4), "3.{minor}");
        assert!(worker.tid != main.tid && !worker.is_torn, "3.{minor}: {worker:?}");
        assert!(fs::metadata(format!("/proc/{}/task/{}", main.tid, worker.tid)).is_ok(), "3.{minor}");
        // What waits was not stopped, and is there with its native frames, which the Python frames stand in the middle of.
        for thread in &stacks.threads {
            assert_eq!((&thread.how, thread.end), (&How::Waiting, End::Whole), "3.{minor}: {thread:?}");
            assert!(matches!(thread.frames[0], Frame::Native { .. }), "3.{minor}: {thread:?}");
            assert!(matches!(thread.frames.last(), Some(Frame::Native { .. })), "3.{minor}: {thread:?}");
            assert!(!thread.frames.iter().any(is_interpreter), "3.{minor}: {thread:?}");
        }
        assert!(
            native(main).iter().any(|name| name.contains("nanosleep") || name.contains("select")),
            "{main:?}"
        );
    }
}

#[test]
fn what_is_not_python_has_native_stacks_and_what_is_gone_is_said() {
    let child = Running::of("sh", "echo ready; exec sleep 1000");
    let stacks =
        child.until(|stacks| native(&stacks.threads[0]).iter().any(|name| name.contains("nanosleep")));
    assert_eq!(stacks.no_python.as_deref(), Some("it does not run CPython 3"));
    assert_eq!(stacks.threads[0].end, End::Whole);
    assert!(matches!(super::stacks(u32::MAX >> 2), Err(NoStacks::Gone(_))));
}

const BUSY: &str = "
import threading
def busy():
    n = 0
    while True:
        n += 1
def wait():
    threading.Lock().acquire() and threading.Event().wait()
threading.Thread(target=wait, daemon=True).start()
print('ready', flush=True)
busy()
";

#[test]
fn a_thread_that_runs_is_stopped_for_a_moment_and_runs_on() {
    let child = Running::of("python3", BUSY);
    let stacks = child
        .until(|stacks| matches!(stacks.threads[0].how, How::Stopped(_)) && has_function(stacks, "busy"));
    let main = &stacks.threads[0];
    let functions: Vec<&str> = main.python().map(|(function, ..)| function).collect();
    assert_eq!((functions, main.is_torn, main.end), (vec!["busy", "<module>"], false, End::Whole));
    // The kernel sees no tracer any more, and the thread uses the processor.
    let status = fs::read_to_string(format!("/proc/{}/status", child.pid())).expect("it lives");
    assert!(status.contains("TracerPid:\t0\n"), "{status}");
    let used = || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", child.pid())).expect("it lives");
        process::cpu_ticks(&stat).expect("ticks")
    };
    let before = used();
    while used() < before + 3 {
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_stopped_process_stays_stopped_and_is_read_all_the_same() {
    let child = Running::of("python3", PROGRAM);
    child.until(|stacks| has_function(stacks, "get"));
    child.signal("-STOP");
    while child.state() != 'T' {
        std::thread::sleep(Duration::from_millis(5));
    }
    let stacks = stacks(child.pid()).expect("we may");
    assert!(has_function(&stacks, "sleep_näher") && has_function(&stacks, "get"), "{stacks:?}");
    assert!(stacks.threads.iter().all(|thread| thread.how == How::Waiting), "{stacks:?}");
    assert_eq!(child.state(), 'T');
    child.signal("-CONT");
    while child.state() == 'T' {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_thread_that_a_debugger_has_is_left_to_it() {
    let child = Running::of("python3", BUSY);
    child.until(|stacks| has_function(stacks, "busy"));
    let held = Held::seize(child.pid()).expect("we may trace our own child");
    let stacks = child.until(|stacks| matches!(stacks.threads[0].how, How::None(_)));
    let How::None(why) = &stacks.threads[0].how else { unreachable!() };
    // The kernel names the thread of this process that does.
    assert!(why.starts_with("process ") && why.ends_with(" traces it (a debugger?)"), "{why}");
    // Its Python frames are read until two readings agree.
    assert!(has_function(&stacks, "busy"));
    drop(held);
}

/// A call that ends with `EINTR` after a stop must not: the program would see that.
const EPOLL: &str = "
import ctypes, threading
libc = ctypes.CDLL(None, use_errno=True)
libc.epoll_create.restype = ctypes.c_int
ends = []
def poll(timeout):
    descriptor, event = libc.epoll_create(1), ctypes.create_string_buffer(64)
    while libc.epoll_wait(descriptor, event, 1, timeout) == 0:
        pass
    ends.append(ctypes.get_errno())
for timeout in (0, 0, 1, 2, 1000000):
    threading.Thread(target=poll, args=(timeout,), daemon=True).start()
print('ready', flush=True)
input()
print(ends, flush=True)
";

#[test]
fn calls_of_the_program_do_not_end_because_it_was_looked_at() {
    let mut command = Command::new("python3");
    let command = command.args(["-c", EPOLL]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("python runs");
    let input = child.stdin.take();
    let out = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut running = Running { child, out };
    assert_eq!(running.line(), "ready");
    let foreign = Foreign::open(running.pid()).expect("we may");
    let threads = || {
        let folder = fs::read_dir(format!("/proc/{}/task", running.pid())).expect("it lives").flatten();
        folder.filter_map(|it| it.file_name().to_str()?.parse::<u32>().ok()).collect::<Vec<_>>()
    };
    let (mut n_stopped, mut stopped) = (0, HashSet::new());
    while n_stopped < 1000 || stopped.len() < 2 {
        for thread in threads() {
            if thread_copy::stopped(running.pid(), thread, &foreign, |_| ()).is_ok() {
                n_stopped += 1;
                stopped.insert(thread);
            }
        }
    }
    std::io::Write::write_all(&mut input.expect("a pipe"), b"\n").expect("it reads");
    assert_eq!(running.line(), "[]");
}

/// One of its libraries lies in a file system (FUSE) whose server stops when the library is loaded.
const ON_A_SILENT_FILE_SYSTEM: &str = r#"
import ctypes, os, signal, struct, subprocess, sys, tempfile, time
libc = ctypes.CDLL(None, use_errno=True)
with tempfile.TemporaryDirectory() as folder:
    path = folder + '/libsilent.so'
    source = b'void through(void (*of)(void)) { of(); __asm__(""); }'
    subprocess.run(['cc', '-xc', '-shared', '-fPIC', '-o', path, '-'], input=source, check=True)
    content = open(path, 'rb').read()
def attributes(node):
    is_file = node == 2
    mode, size = (0o100755, len(content)) if is_file else (0o40755, 0)
    return struct.pack('<6Q10I', node, size, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)
def serve(device):
    while True:
        request = os.read(device, 1 << 20)
        _, what, unique, node = struct.unpack_from('<IIQQ', request)
        error, answer = 0, b''
        if what == 26:    # INIT
            answer = struct.pack('<4I2H2I2H8I', 7, 31, 65536, 0, 1, 1, 65536, 1, 16, 0, *[0] * 8)
        elif what == 1:   # LOOKUP
            answer = struct.pack('<4Q2I', 2, 0, 0, 0, 0, 0) + attributes(2)
        elif what == 3:   # GETATTR
            answer = struct.pack('<QII', 0, 0, 0) + attributes(node)
        elif what == 14:  # OPEN
            answer = struct.pack('<QII', 0, 0, 0)
        elif what == 15:  # READ
            at, n = struct.unpack_from('<QI', request, 48)
            answer = content[at:at + n]
        elif what in (2, 42):
            continue
        elif what not in (18, 25):
            error = -38
        os.write(device, struct.pack('<IiQ', 16 + len(answer), error, unique) + answer)
try:
    device = os.open('/dev/fuse', os.O_RDWR)
    options = f'fd={device},rootmode=40000,user_id=0,group_id=0'.encode()
    assert libc.mount(b'silent', b'/mnt', b'fuse', 0, options) == 0
except (OSError, AssertionError):
    print('no', flush=True)
    sys.exit()
server = os.fork()
if server == 0:
    libc.prctl(1, signal.SIGKILL)
    serve(device)
os.close(device)
silent = ctypes.CDLL('/mnt/libsilent.so')
os.kill(server, signal.SIGSTOP)
def waits_here():
    print('ready', flush=True)
    time.sleep(1000)
silent.through(ctypes.CFUNCTYPE(None)(waits_here))
"#;

#[test]
fn a_library_whose_file_does_not_respond_is_left_out_and_named() {
    let what = "stacks of a process with a library on a silent file system";
    let mut command = Command::new("unshare");
    let command =
        command.args(["--mount", "--propagation", "private", "python3", "-c", ON_A_SILENT_FILE_SYSTEM]);
    let Ok(mut child) = command.stdout(Stdio::piped()).spawn() else {
        return gputrace_skip::skip(what, "there is no unshare");
    };
    let out = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut running = Running { child, out };
    if running.line() != "ready" {
        return gputrace_skip::skip(what, "FUSE cannot be mounted");
    }
    let (tells, told) = std::sync::mpsc::channel();
    let pid = running.pid();
    std::thread::spawn(move || tells.send(stacks(pid)));
    let read = told.recv_timeout(Duration::from_secs(120)).expect("nobody is waited for").expect("readable");
    assert_eq!(read.left_out, ["/mnt/libsilent.so: the file does not respond"]);
    let python = |thread: &ThreadStack| thread.python().any(|(function, ..)| function == "waits_here");
    assert!(read.threads.iter().any(python), "{read:?}");
}
