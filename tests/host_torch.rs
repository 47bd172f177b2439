//! What the library must not do to a program with PyTorch's allocator and backward pass, where these are left in the middle or
//! are not built as most are: the program ends as it does alone, and what comes afterwards is recorded as it is.
#![cfg(target_arch = "x86_64")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gputrace_schemas::event::EventKind;
use gputrace_schemas::reader::Trace;
use gputrace_skip::skip;
use gputrace_tests::recorded::{self, Folder};

fn scratch() -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("host_torch");
    fs::create_dir_all(&path).expect("a scratch directory");
    path
}

/// Compiles `host/torch_parts.cc`.
fn compile(name: &str, options: &[&str], libraries: &[&str]) -> Result<(), String> {
    let output = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into()))
        .args(["-std=gnu++20", "-O1", "-g", "-Wall", "-fvisibility=hidden", "-pthread", "-o"])
        .arg(scratch().join(name))
        .args(options)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("host/torch_parts.cc"))
        .args(libraries.iter().map(|library| scratch().join(library)))
        .arg(fake_cuda::torch_dir().join("libc10.so"))
        .arg(fake_cuda::library_dir().join("libcuda.so.1"))
        .output()
        .map_err(|error| error.to_string())?;
    if output.status.success() { Ok(()) } else { Err(text(&output.stderr)) }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn run(how: &str, folder: Option<&Folder>) -> Output {
    let mut command = Command::new(scratch().join("torch_parts"));
    let folders = [scratch(), fake_cuda::torch_dir(), fake_cuda::library_dir().to_owned()];
    let folders = folders.map(|folder| folder.display().to_string()).join(":");
    command.arg(how).env("LD_LIBRARY_PATH", folders);
    if let Some(folder) = folder {
        recorded::preload(&mut command, folder);
    }
    command.output().expect("a program")
}

/// Blocks and what was asked for, in bytes.
fn blocks(trace: &Trace) -> Vec<(u64, Option<u64>)> {
    let block = |kind: EventKind| match kind {
        EventKind::BlockAlloc(block) => Some((block.bytes.0, block.requested.map(|bytes| bytes.0))),
        _ => None,
    };
    trace.events().filter_map(|event| block(event.kind)).collect()
}

#[test]
fn pytorchs_parts_may_be_left_in_the_middle_and_built_otherwise() {
    let library = |name: &str, option: &str| {
        let soname = format!("-Wl,-soname,{name}");
        compile(name, &["-shared", "-fPIC", option, &soname], &[])
    };
    let built = library("libc10_cuda.so", "-DC10_CUDA")
        .and_then(|()| library("libtorch_cpu.so", "-DTORCH_CPU"))
        .and_then(|()| compile("torch_parts", &["-fPIC"], &["libc10_cuda.so", "libtorch_cpu.so"]));
    if let Err(why) = built {
        // The stand-in for PyTorch is built where there is a compiler.
        assert!(!fake_cuda::torch_dir().join("libc10.so").exists(), "{why}");
        return skip("PyTorch's allocator and backward pass, left in the middle", why);
    }
    for how in ["returns", "throws", "ends", "cancelled"] {
        let alone = run(how, None);
        assert!(alone.status.success(), "{how} alone: {alone:?}");
        let folder = Folder::new(&scratch(), how);
        let with = run(how, Some(&folder));
        let said = text(&with.stderr);
        assert_eq!((with.status, text(&with.stdout)), (alone.status, text(&alone.stdout)), "{how}: {said}");
        let trace = folder.traces(1).remove(0);
        // What was not asked of `allocate` has no request of its own.
        let mut expected = vec![(512, None)];
        expected.extend((20..26).map(|n| (n * 512, Some(n * 512))));
        for i in 0..if matches!(how, "returns" | "throws") { 20 } else { 0 } {
            expected.extend((how == "returns" && i % 2 == 0).then_some((1024, Some(1000))));
            expected.extend([(77 * 512, None), (6 * 512, Some(3000))]);
        }
        expected.extend([(78 * 512, None), (10 * 512, Some(5000))]);
        assert_eq!(blocks(&trace), expected, "{how}: {said}");
        // The one class that has a name.
        let names = trace.stacks().iter().filter_map(|stack| Some(stack.backward.as_ref()?.node.clone()));
        let names: Vec<String> = names.filter(|name| !name.is_empty()).collect();
        assert_eq!(names, ["torch::autograd::generated::GoodBackward"], "{how}");
    }
}

/// Compiles a part of `host/process_groups.cc`.
fn compile_groups(name: &str, options: &[&str]) {
    let output = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into()))
        .args(["-std=gnu++17", "-O1", "-g", "-Wall", "-fvisibility=hidden", "-o"])
        .arg(groups().join(name))
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("host/process_groups.cc"))
        .args(options)
        .args(["libnccl.so.2", "libcuda.so.1"].map(|file| fake_cuda::library_dir().join(file)))
        .output()
        .expect("a C++ compiler");
    assert!(output.status.success(), "{}", text(&output.stderr));
}

fn groups() -> PathBuf {
    let path = scratch().join("groups");
    fs::create_dir_all(&path).expect("a scratch directory");
    path
}

#[test]
fn communicators_are_called_as_pytorch_calls_their_groups() {
    let linked = |file: &str| groups().join(file).display().to_string();
    let library = ["-shared", "-fPIC"];
    compile_groups(
        "libtorch_cpu.so",
        &[&library[..], &["-DTORCH_CPU", "-Wl,-soname,libtorch_cpu.so"]].concat(),
    );
    let (cpu, cuda) = (linked("libtorch_cpu.so"), linked("libtorch_cuda.so"));
    compile_groups(
        "libtorch_cuda.so",
        &[&library[..], &["-DTORCH_CUDA", "-Wl,-soname,libtorch_cuda.so", &cpu]].concat(),
    );
    compile_groups("program", &[&cuda, &cpu]);
    let run = |folder: Option<&Folder>| {
        let folders = [groups(), fake_cuda::library_dir().to_owned()];
        let mut command = Command::new(groups().join("program"));
        command.env("LD_LIBRARY_PATH", folders.map(|folder| folder.display().to_string()).join(":"));
        if let Some(folder) = folder {
            recorded::preload(&mut command, folder);
        }
        command.output().expect("a program")
    };
    let alone = run(None);
    assert!(alone.status.success(), "{alone:?}");
    let folder = Folder::new(&scratch(), "groups");
    let with = run(Some(&folder));
    assert_eq!(
        (with.status, text(&with.stdout)),
        (alone.status, text(&alone.stdout)),
        "{}",
        text(&with.stderr)
    );
    let trace = folder.traces(1).remove(0);
    // The first stands for none.
    let names: Vec<String> =
        trace.communicators().iter().skip(1).map(|comm| comm.config.name.clone()).collect();
    let long = "tensor parallel, a description that is longer than a string holds in itself:1";
    // Others' communicators have no name, whoever was asked before; nor have those of groups that nobody named.
    let cut = format!("undefined:3{}", "x".repeat(119));
    assert_eq!(names, ["default_pg:0", long, "undefined:2", "", "", "", &cut, ""]);
}
