//! NVTX marks: what programs say of themselves comes into the trace, with the thread and the domain, also what they
//! said before there was anything to record.

use gputrace_skip::skip;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use gputrace_schemas::event::{EventKind, MarkAction};
use gputrace_schemas::reader::Trace;
use gputrace_tests::recorded::{self, Folder};
use gputrace_tests::wheels;

fn scratch() -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("marks");
    std::fs::create_dir_all(&path).expect("a scratch directory");
    path
}

/// Compiled once: a program that is being written cannot be run by the test beside.
fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(build)
}

fn build() -> PathBuf {
    let target = scratch().join("nvtx");
    let output = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
        .args(["-std=gnu11", "-O1", "-g", "-Wall", "-pthread", "-o"])
        .arg(&target)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("guests/nvtx.c"))
        .arg(fake_cuda::library_dir().join("libcuda.so.1"))
        .arg("-ldl")
        .output()
        .expect("a C compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    target
}

/// `gputrace record` of a program on the fake driver: what it said, and its trace.
fn record(
    folder: &Folder,
    program: &Path,
    arguments: &[&str],
    variables: &[(&str, &str)],
) -> (String, Trace) {
    let output = Command::new(recorded::built().join("gputrace"))
        .args(["record", "-q", "-o"])
        .arg(folder.path().join("%p.gtr"))
        .arg("--")
        .arg(program)
        .args(arguments)
        .env("LD_LIBRARY_PATH", fake_cuda::library_dir())
        .env_remove("NVTX_INJECTION64_PATH")
        .envs(variables.iter().copied())
        .output()
        .expect("gputrace runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{:?} {said}", output.status);
    (said, folder.traces(1).remove(0))
}

/// `action [domain/]text thread`, threads numbered in the order of their first mark.
fn marks(trace: &Trace) -> Vec<String> {
    let mut threads = Vec::new();
    let mut lines = Vec::new();
    for event in trace.events() {
        let EventKind::Mark(mark) = event.kind else { continue };
        let thread = threads.iter().position(|thread| *thread == event.thread).unwrap_or_else(|| {
            threads.push(event.thread);
            threads.len() - 1
        });
        let domain = trace.text(mark.domain).map(|domain| format!("{domain}/")).unwrap_or_default();
        let text = trace.text(mark.text).unwrap_or("-");
        lines.push(format!("{} {domain}{text} {thread}", mark.action));
    }
    lines
}

#[test]
fn marks_come_with_their_domains_and_threads() {
    let folder = Folder::new(&scratch(), "c");
    let (said, trace) = record(&folder, built(), &[], &[]);
    assert_eq!(said, "attached 1\nlevels 0 1 1 0 -1, epoch 1\n");
    let mut found = marks(&trace);
    let long = found.iter_mut().find(|line| line.contains("xxx")).expect("a long text");
    assert_eq!(long.len(), "mark  0".len() + 240, "texts are cut");
    *long = "mark xxx 0".into();
    let expected = [
        // Opened before there was a session, and still open.
        "push whole program 0",
        "push loader/prefetch 0",
        "start epoch 0 0",
        "push step 1 0",
        "mark W\u{fc}rfel \u{1F3B2} 0",
        "mark narrow 0",
        "mark wide 0",
        "name_thread trainer 0",
        "push worker 1",
        "end - 1",
        "pop - 1",
        "pop - 0",
        "pop loader/- 0",
        "pop - 0",
        // What could not be read has no name.
        "mark - 0",
        "mark - 0",
        "mark - 0",
        "mark - 0",
        "mark - 0",
        "mark - 0",
        "mark step 1 0",
        "mark step 1 0",
        "mark xxx 0",
        "pop - 0",
    ];
    assert_eq!(found, expected);
    let names: Vec<_> = trace.threads().iter().map(|thread| thread.name.as_str()).collect();
    assert!(names.contains(&"trainer"), "{names:?}");
    let ranges: Vec<u64> = trace
        .events()
        .filter_map(|event| match event.kind {
            EventKind::Mark(mark) if matches!(mark.action, MarkAction::Start | MarkAction::End) => {
                Some(mark.range)
            }
            _ => None,
        })
        .collect();
    assert_eq!(ranges.len(), 2);
    assert_eq!(ranges[0], ranges[1], "start and end belong together");
}

#[test]
fn another_tool_that_hears_the_marks_keeps_them() {
    let folder = Folder::new(&scratch(), "other");
    let (said, trace) = record(&folder, built(), &[], &[("NVTX_INJECTION64_PATH", "/nonexistent/tool.so")]);
    assert!(said.starts_with("attached 0\n"), "{said}");
    assert_eq!(marks(&trace), [""; 0]);
    let kept = trace.process().environment.iter().any(|(name, _)| name == "NVTX_INJECTION64_PATH");
    assert!(kept, "the trace says who heard them");
}

/// NVIDIA's own header, as compiled into its Python package.
#[test]
fn python_ranges_are_marks() {
    let package = match wheels::nvtx() {
        Ok(package) => package,
        Err(reason) => return skip("NVIDIA's package of marks", reason),
    };
    let script = "\
import ctypes, nvtx, threading
cuda = ctypes.CDLL('libcuda.so.1')
context, memory = ctypes.c_void_p(), ctypes.c_uint64()
with nvtx.annotate('outer'):
    cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), cuda.cuCtxSetCurrent(context)
    cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(4096))
    with nvtx.annotate('inner', domain='data', category='io'):
        nvtx.mark('here')
    range = nvtx.start_range('across')
    def end():
        nvtx.push_range('thread')
        nvtx.end_range(range)
        nvtx.pop_range()
    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
";
    let folder = Folder::new(&scratch(), "python");
    let path = package.display().to_string();
    let (_, trace) = record(&folder, Path::new("python3"), &["-c", script], &[("PYTHONPATH", &path)]);
    let found: Vec<_> = marks(&trace).into_iter().map(|line| line.replace("NVTX/", "")).collect();
    let expected = [
        "push outer 0",
        "push data/inner 0",
        "mark here 0",
        "pop data/- 0",
        "start across 0",
        "push thread 1",
        "end - 1",
        "pop - 1",
        "pop - 0",
    ];
    assert_eq!(found, expected);
}
