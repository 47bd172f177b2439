//! NVSHMEM's symmetric heap: what is handed out of it and taken back is recorded once, whether the program is linked against the
//! library or asks for its functions, and the program notices nothing.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gputrace_schemas::event::{Action, Call, EventKind};
use gputrace_schemas::reader::Trace;
use gputrace_tests::recorded::{self, Folder};

fn scratch() -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nvshmem");
    std::fs::create_dir_all(&path).expect("a scratch directory");
    path
}

fn compiled(source: &str, name: &str, options: &[&str]) -> PathBuf {
    let target = scratch().join(name);
    let output = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
        .args(["-std=gnu11", "-O1", "-g", "-Wall", "-Werror", "-o"])
        .arg(&target)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("nvshmem").join(source))
        .args(options)
        .arg(fake_cuda::library_dir().join("libcuda.so.1"))
        .arg("-ldl")
        .output()
        .expect("a C compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    target
}

fn library() -> PathBuf {
    // As NVSHMEM's own: its symbols have a version.
    let versions = scratch().join("versions");
    std::fs::write(&versions, "NVSHMEM { global: nvshmem_*; local: *; };").expect("a file");
    let script = format!("-Wl,--version-script={}", versions.display());
    let options = ["-shared", "-fPIC", "-Wl,-soname,libnvshmem_host.so.3", &script];
    compiled("library.c", "libnvshmem_host.so.3", &options)
}

fn run(program: &Path, library: &Path, folder: Option<&Folder>) -> Output {
    let mut command = Command::new(program);
    let both = format!("{}:{}", fake_cuda::library_dir().display(), scratch().display());
    command.arg(library).env("LD_LIBRARY_PATH", both);
    if let Some(folder) = folder {
        recorded::preload(&mut command, folder);
    }
    command.output().expect("a program")
}

/// Runs the program without and with the library, which must make no difference to it; what was recorded of the heap.
fn calls_of(name: &str, program: &Path) -> Vec<(Action, u64, Option<i32>, String)> {
    let library = library();
    let alone = run(program, &library, None);
    assert!(alone.status.success(), "{name} alone: {alone:?}");
    let folder = Folder::new(&scratch(), name);
    let with = run(program, &library, Some(&folder));
    let answer = |output: &Output| String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!((with.status, answer(&with)), (alone.status, answer(&alone)), "{name}");
    let trace: Trace = folder.traces(1).remove(0);
    let api = |call: &Call| trace.api(call.api).map(|api| api.name.clone()).unwrap_or_default();
    let of_heap = trace.events().filter_map(|event| match event.kind {
        EventKind::Call(call) if matches!(call.action, Action::HeapAlloc | Action::HeapFree) => Some(call),
        _ => None,
    });
    let calls: Vec<Call> = of_heap.collect();
    assert!(calls.iter().all(|call| call.device == 0), "{name}: {calls:?}");
    calls.iter().map(|call| (call.action, call.bytes.0, call.result, api(call))).collect()
}

#[test]
fn what_the_heap_gives_and_takes_is_recorded_once() {
    let library = library();
    let linked = compiled("program.c", "linked", &["-DLINKED", &library.display().to_string()]);
    let asked = compiled("program.c", "asked", &[]);
    let call = |action, bytes, result, name: &str| (action, bytes, Some(result), name.to_owned());
    let expected = [
        call(Action::HeapAlloc, 8 << 20, 0, "nvshmem_malloc"),
        call(Action::HeapAlloc, 2 << 20, 0, "nvshmem_calloc"),
        call(Action::HeapAlloc, 512, 0, "nvshmem_align"),
        call(Action::HeapFree, 0, 0, "nvshmem_free"),
        call(Action::HeapAlloc, 1 << 30, 2, "nvshmem_malloc"),
    ];
    for (name, program) in [("linked", linked), ("asked", asked)] {
        assert_eq!(calls_of(name, &program), expected, "{name}");
    }
}
