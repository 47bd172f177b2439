//! The program to run, a small trace to give it, and a folder for both.

use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gputrace_schemas::event::*;
use gputrace_schemas::writer::Writer;

/// A trace of `n` events: a small program that allocates and frees.
pub(crate) fn trace(n: u64) -> Vec<u8> {
    let mut writer = Writer::new(Cursor::new(Vec::new())).unwrap();
    writer.process(&Process { pid: 42, command: vec!["train".into()], ..Process::default() });
    writer.device(&Device {
        ordinal: 0,
        name: "NVIDIA H200".into(),
        uuid: "GPU-0".into(),
        total: Bytes(1 << 37),
    });
    writer.thread(ThreadId(0), &Thread { tid: 42, name: "train".into() });
    writer.api(ApiId(0), &Api { name: "cuMemAlloc_v2".into(), runtime_name: "cudaMalloc".into() });
    for idx in 0..n {
        let action = if idx % 3 == 2 { Action::Free } else { Action::Alloc };
        let call = Call {
            api: ApiId(0),
            action,
            device: 0,
            result: Some(0),
            addr: 0x1000 * (idx - u64::from(action == Action::Free)),
            bytes: Bytes(1 << 20),
            stream: 0,
            handle: 0,
            extra: 0,
            duration: Nanos(10),
            captured: false,
            in_allocate: false,
            comm: CommId(0),
            nccl_call: 0,
            nccl_thread: false,
        };
        let kind = EventKind::Call(call);
        writer
            .event(&Event { time: Nanos(1000 * idx), thread: ThreadId(0), stack: StackId(0), kind })
            .unwrap();
        if idx % 10 == 9 {
            writer.flush().unwrap();
        }
    }
    writer.finish().unwrap().into_inner()
}

pub(crate) fn gputrace() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gputrace"));
    for name in ["NO_COLOR", "CLICOLOR_FORCE", "LD_PRELOAD", "GPUTRACE_LIBRARY"] {
        command.env_remove(name);
    }
    command.env("COLUMNS", "100").env("TERM", "xterm");
    command
}

pub(crate) fn run(arguments: &[&str]) -> Output {
    gputrace().args(arguments).output().unwrap()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A trace that was recorded on a GPU.
pub(crate) fn golden(name: &str) -> String {
    format!("{}/../tests/golden/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// A library that may be preloaded into anything.
pub(crate) fn libc() -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let path =
        maps.lines().filter_map(|line| line.split_whitespace().nth(5)).find(|path| path.contains("/libc.so"));
    PathBuf::from(path.expect("the test is linked to a C library"))
}

/// A folder that is gone after the test.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Folder {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> String {
        let path = self.0.join(name);
        fs::write(&path, bytes).unwrap();
        path.display().to_string()
    }

    pub(crate) fn executable(&self, name: &str, bytes: &[u8]) -> String {
        use std::os::unix::fs::PermissionsExt;
        let path = self.write(name, bytes);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
