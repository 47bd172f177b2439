//! `gputrace reproduce --cuda`: its programs, compiled and run on devices of other sizes than the one that refused.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gputrace_skip::skip;
use gputrace_tests::recorded::{self, Folder};
use gputrace_tests::wheels::{self, Major};

/// What NVIDIA's header of the runtime wants of the compiler's, which is another package.
const HOST_DEFINES: &str = "#define __host__\n#define __device__\n#define __cudart_builtin__\n#define __device_builtin__\n\
     #define __builtin_align__(n) __attribute__((aligned(n)))\n#define __align__(n) __attribute__((aligned(n)))\n#define CUDARTAPI\n\
     #define CUDARTAPI_CDECL\n#define CUDART_CB\n#define __device_builtin_texture_type__\n#define __device_builtin_surface_type__\n\
     #define __specialization_static static\n";

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The trace of `refused.c`.
fn recorded_refusal(mode: &str, folder: &Folder) -> PathBuf {
    let program = folder.path().join("refused");
    let output = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
        .args(["-std=gnu11", "-O1", "-Wall", "-o"])
        .arg(&program)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("reproduce/refused.c"))
        .arg(fake_cuda::library_dir().join("libcuda.so.1"))
        .output()
        .expect("a C compiler");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let mut command = Command::new(&program);
    command.arg(mode).env("LD_LIBRARY_PATH", fake_cuda::library_dir()).env("FAKE_CUDA_MEMORY", "1GiB");
    recorded::preload(&mut command, folder);
    let output = command.output().expect("a program");
    assert!(output.status.success(), "{mode}: {:?} {}", output.status, text(&output.stderr));
    folder.traces(1);
    folder.files("gtr").remove(0)
}

fn reproduce(trace: &Path, to: &Path, more: &[&str]) -> Output {
    Command::new(recorded::built().join("gputrace"))
        .args(["reproduce", "--cuda", "-F", "-o"])
        .arg(to)
        .args(more)
        .arg(trace)
        .output()
        .expect("gputrace")
}

/// Compiles what was written; `Err` says why that cannot be done here.
fn compile(source: &Path, to: &Path) -> Result<(), String> {
    let (headers, runtime) = (wheels::headers(Major::Cuda13)?, wheels::shared(Major::Cuda13)?);
    let stand_in = to.with_extension("include");
    fs::create_dir_all(stand_in.join("crt")).expect("a folder");
    fs::write(stand_in.join("crt/host_defines.h"), HOST_DEFINES).expect("a file");
    let output = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into()))
        .args(["-std=c++17", "-O1", "-o"])
        .arg(to)
        .args([Path::new("-isystem"), &stand_in, Path::new("-isystem"), &headers])
        .arg(source)
        .arg(&runtime)
        .arg(fake_cuda::library_dir().join("libcuda.so.1"))
        .arg(format!("-Wl,-rpath,{}", runtime.parent().unwrap_or(Path::new("/")).display()))
        .output()
        .map_err(|error| format!("no C++ compiler: {error}"))?;
    assert!(output.status.success(), "{}", text(&output.stderr));
    Ok(())
}

fn run(program: &Path, memory: &str) -> (Option<i32>, String) {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", fake_cuda::library_dir()).env("FAKE_CUDA_MEMORY", memory);
    let output = command.output().expect("a program");
    (output.status.code(), text(&output.stdout))
}

#[test]
fn a_refusal_of_the_driver_is_the_same_on_every_device_that_is_large_enough() {
    let all = Folder::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "reproduce-cuda");
    for mode in ["linear", "unseen", "ordered", "physical", "managed"] {
        let folder = Folder::new(all.path(), mode);
        let trace = recorded_refusal(mode, &folder);
        for (name, more) in [("shrunk", &[][..]), ("whole", &["--whole"][..])] {
            let (source, program) = (folder.path().join("repro.cpp"), folder.path().join(name));
            let output = reproduce(&trace, &source, more);
            assert!(output.status.success(), "{mode}: {}", text(&output.stderr));
            let written = fs::read_to_string(&source).expect("a program");
            if let Err(why) = compile(&source, &program) {
                return skip("the headers of CUDA 13", why);
            }
            for memory in ["1GiB", "3GiB", "80GiB"] {
                let (status, said) = run(&program, memory);
                assert_eq!(status, Some(0), "{mode}, {name}, {memory}: {said}\n{written}");
            }
            let (status, said) = run(&program, "256MiB");
            assert_eq!(status, Some(2), "{mode}, {name}: {said}");
            // What it says is what it found.
            fs::write(&source, written.replace("kept, 800 * MIB", "kept, 2 * MIB")).expect("a file");
            compile(&source, &program).expect("it compiled before");
            let (status, said) = run(&program, "3GiB");
            assert_eq!(status, Some(1), "{mode}, {name}: {said}");
            // 64 blocks, of which 8 were kept, one or two more, and the refused one.
            let n_lines = written.lines().count();
            assert!(written.lines().all(|line| line.len() < 150) && n_lines < 220, "{written}");
            assert!(name == "whole" || n_lines < 100, "{n_lines} lines\n{written}");
        }
    }
}

#[test]
fn what_no_program_can_repeat_is_said() {
    let all = Folder::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "reproduce-cuda-host");
    let trace = recorded_refusal("host", &all);
    let to = all.path().join("repro.cpp");
    let output = reproduce(&trace, &to, &[]);
    assert!(!output.status.success() && !to.exists());
    let said = text(&output.stderr);
    assert!(said.contains("host memory was refused; the trace does not show"), "{said}");
}
