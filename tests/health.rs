//! Faults of GPUs that NVML reports, and processes that are suspended: in `top` while they last, and in the trace afterwards.

use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use gputrace_tests::patience::{LONG, is_hang};
use gputrace_tests::recorded::{self, Folder};
use serde_json::Value;

/// Holds 16 MiB, and answers `checkpoint PID` and `restore PID` with what the driver answers.
const PROGRAM: &str = r#"
import ctypes, os, sys
cuda, context, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
if sys.argv[1] == "holds":
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(16 << 20)) == 0
print("ready", flush=True)
for line in sys.stdin:
    verb, pid = line.split()
    pid = int(pid) or os.getpid()
    steps = {"checkpoint": ("Lock", "Checkpoint"), "restore": ("Restore", "Unlock")}[verb]
    print(*(getattr(cuda, f"cuCheckpointProcess{step}")(pid, None) for step in steps), flush=True)
"#;

struct Running {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    trace: PathBuf,
    folder: PathBuf,
}

impl Drop for Running {
    fn drop(&mut self) {
        let group = format!("-{}", self.child.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).stderr(Stdio::null()).status();
        let _ = self.child.wait();
    }
}

impl Running {
    fn start(folder: &Folder, what: &str) -> Running {
        let (trace, faults) = (folder.path().join(format!("{what}.gtr")), folder.path().join("faults"));
        fs::write(&faults, "").expect("a file");
        let mut command = Command::new(recorded::built().join("gputrace"));
        command.args(["record", "-q", "-o"]).arg(&trace).args(["--", "python3", "-c", PROGRAM, what]);
        command.env("LD_LIBRARY_PATH", fake_cuda::library_dir());
        command.env("FAKE_CUDA_STATE", folder.path().join("state")).env("FAKE_NVML_FAULTS", faults);
        command.env("FAKE_CUDA_CONTEXT", "64MiB");
        // Who waits for a program that is stopped stops its own group.
        command.process_group(0);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("gputrace runs");
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().expect("a pipe")));
        let folder = folder.path().to_owned();
        let mut running = Running { child, input, output, trace, folder };
        assert_eq!(running.line(), "ready");
        running
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("it speaks");
        line.trim().to_owned()
    }

    fn ask(&mut self, what: &str) -> String {
        writeln!(self.input.as_ref().expect("a pipe"), "{what}").expect("it listens");
        self.line()
    }

    /// As `top` shows it.
    fn figures(&self) -> Value {
        let mut command = Command::new(recorded::built().join("gputrace"));
        command.args(["top", "--once", "--json"]).arg(&self.folder);
        let output =
            command.env("LD_LIBRARY_PATH", fake_cuda::library_dir()).output().expect("gputrace runs");
        let said: Value = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        let trace = self.trace.file_name().and_then(|name| name.to_str()).expect("a name");
        let processes = said["processes"].as_array().cloned().unwrap_or_default();
        let ours =
            processes.into_iter().find(|it| it["trace"].as_str().is_some_and(|it| it.ends_with(trace)));
        ours.unwrap_or(Value::Null)
    }

    fn until(&self, mut is_there: impl FnMut(&Value) -> bool) -> Value {
        let began = Instant::now();
        loop {
            let figures = self.figures();
            if is_there(&figures) {
                return figures;
            }
            assert!(!is_hang(began, LONG), "{figures}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    fn pid(&self) -> u64 {
        self.until(|it| it["pid"].as_u64() > Some(0))["pid"].as_u64().expect("a number")
    }

    fn signal_group(&self, name: &str) {
        let group = format!("-{}", self.child.id());
        assert!(Command::new("kill").args([name, "--", &group]).status().expect("kill runs").success());
    }

    fn end(mut self) -> PathBuf {
        drop(self.input.take());
        self.child.wait().expect("it ends");
        self.trace.clone()
    }
}

fn said(verb: &[&str], trace: &Path) -> String {
    let output = Command::new(recorded::built().join("gputrace")).args(verb).arg(trace).output();
    String::from_utf8_lossy(&output.expect("gputrace runs").stdout).into_owned()
}

fn signal(name: &str, pid: u64) {
    assert!(Command::new("kill").args([name, &pid.to_string()]).status().expect("kill runs").success());
}

#[test]
fn a_fault_of_the_gpu_is_the_verdict_of_a_process_that_dies() {
    let folder = Folder::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "faults");
    let running = Running::start(&folder, "holds");
    let pid = running.pid();
    let fault = |line: &str| {
        let file = OpenOptions::new().append(true).open(folder.path().join("faults"));
        writeln!(file.expect("a file"), "{line}").expect("written");
    };
    let has = |text: &'static str| {
        move |it: &Value| {
            it["gpu_faults"]
                .as_array()
                .is_some_and(|it| it.iter().any(|it| it.as_str().is_some_and(|it| it.contains(text))))
        }
    };
    // What was there when NVML was first asked is not told, so it goes on until it is seen.
    let mut n = 0;
    running.until(|it| {
        n += 1;
        // Uncorrectable remapped rows (NVML_FI_DEV_REMAPPED_UNC).
        fault(&format!("field 0 143 {n}"));
        has(" of memory remapped at ")(it)
    });
    fault("xid 0 79");
    let figures = running.until(has("XID 79 (GPU has fallen off the bus) at "));
    assert!(has(" UTC on GPU 0 (GPU-")(&figures), "{figures}");
    signal("-KILL", pid);
    let trace = running.end();
    let verdict: Value = serde_json::from_str(&said(&["report", "--json"], &trace)).expect("JSON");
    assert_eq!(verdict["processes"][0]["verdict"]["kind"], "gpu_fault", "{verdict}");
    for verb in ["report", "oom"] {
        let text = said(&[verb], &trace);
        assert!(text.contains("XID 79 (GPU has fallen off the bus) at "), "{verb}: {text}");
    }
    assert!(said(&["report"], &trace).contains("the process was killed by signal 9"));
}

#[test]
fn a_suspended_process_is_said_to_be_and_since_when() {
    let folder = Folder::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "suspended");
    let (mut other, mut running) = (Running::start(&folder, "other"), Running::start(&folder, "holds"));
    let pid = running.pid();
    let is_running = |it: &Value| it["state"] == "running";
    let is_suspended = |by: &'static str| {
        move |it: &Value| {
            it["state"] == "suspended" && it["suspended"].as_str().is_some_and(|it| it.contains(by))
        }
    };
    running.until(is_running);
    signal("-STOP", pid);
    running.until(is_suspended("suspended by a signal (SIGSTOP), since "));
    running.signal_group("-CONT");
    running.until(is_running);
    // By another process, as `cuda-checkpoint` does: the driver lists no memory of it any more.
    assert_eq!(other.ask(&format!("checkpoint {pid}")), "0 0");
    running.until(is_suspended("suspended by a CUDA checkpoint: it holds no GPU memory, since "));
    assert_eq!(other.ask(&format!("restore {pid}")), "0 0");
    running.until(is_running);
    // By itself: its own calls say so at once.
    assert_eq!(running.ask("checkpoint 0"), "0 0");
    running.until(is_suspended("by a CUDA checkpoint"));
    assert_eq!(running.ask("restore 0"), "0 0");
    running.until(is_running);
    let text = said(&["report"], &running.end());
    let n = |what: &str| text.lines().filter(|line| line.contains(what) && line.contains(" UTC to ")).count();
    assert_eq!(
        (n("suspended by a signal (SIGSTOP), from "), n("suspended by a CUDA checkpoint")),
        (1, 2),
        "{text}"
    );
    // Who checkpointed another was not suspended.
    assert!(!said(&["report"], &other.end()).contains("suspended by"));
}
