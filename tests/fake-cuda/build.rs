//! Compiles the fake libraries with the system's C compiler, under the names that programs look for.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// One shared library: its SONAME, the language it is written in, its sources and what it links to.
struct Library {
    /// Below the directory that `--dir` prints. What stands in for PyTorch lies apart, where a real PyTorch does not find it.
    directory: &'static str,
    soname: &'static str,
    compiler: Compiler,
    sources: &'static [&'static str],
    /// Passed after the sources.
    links: &'static [&'static str],
}

#[derive(Clone, Copy, PartialEq)]
enum Compiler {
    C,
    Cxx,
}

const LIBRARIES: &[Library] = &[
    Library {
        directory: "",
        soname: "libcuda.so.1",
        compiler: Compiler::C,
        sources: &[
            "driver/array.c",
            "driver/book.c",
            "driver/call.c",
            "driver/checkpoint.c",
            "driver/context.c",
            "driver/graph.c",
            "driver/memory.c",
            "driver/module.c",
            "driver/pool.c",
            "driver/resolve.c",
            "driver/space.c",
            "driver/span.c",
            "driver/stream.c",
            "driver/stubs.c",
            "driver/usage.c",
            "driver/validity.c",
            "driver/vmm.c",
        ],
        links: &["-pthread"],
    },
    Library {
        directory: "",
        soname: "libnvidia-ml.so.1",
        compiler: Compiler::C,
        sources: &["nvml.c"],
        links: &[],
    },
    Library {
        directory: "",
        soname: "libnccl.so.2",
        compiler: Compiler::C,
        sources: &["nccl.c"],
        links: &["-pthread", "-ldl"],
    },
    Library {
        directory: "torch",
        soname: "libc10.so",
        compiler: Compiler::Cxx,
        sources: &["torch/c10.cpp"],
        links: &[],
    },
    Library {
        directory: "torch",
        soname: "libc10_cuda.so",
        compiler: Compiler::Cxx,
        sources: &["torch/c10_cuda.cpp"],
        links: &["-l:libc10.so", "-l:libcuda.so.1", "-Wl,-rpath,$ORIGIN"],
    },
];

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    for directory in ["driver", "torch", "nccl.c", "nccl_meet.h", "nvml.c", "build.rs"] {
        println!("cargo:rerun-if-changed={directory}");
    }
    println!("cargo:rerun-if-env-changed=CC");
    println!("cargo:rerun-if-env-changed=CXX");
    for library in LIBRARIES {
        if let Err(problem) = compile(library, &out) {
            // Without a C++ compiler everything but the stand-in for PyTorch works.
            assert!(library.compiler == Compiler::Cxx, "{problem}");
            println!("cargo:warning={problem}; tests that need it will be skipped");
        }
    }
    build_demo(&out);
}

/// The program that `fake-cuda demo` runs.
fn build_demo(out: &Path) {
    let source = "../programs/demo.c";
    println!("cargo:rerun-if-changed={source}");
    println!("cargo:rerun-if-changed=../programs/api.h");
    let program = env::var("CC").unwrap_or_else(|_| "cc".into());
    let status = Command::new(&program)
        .args(["-O1", "-g", "-o"])
        .arg(out.join("demo"))
        .args([source, "-ldl"])
        .status();
    assert!(status.is_ok_and(|status| status.success()), "`{program}` could not build the demo, {source}");
}

fn compile(library: &Library, out: &Path) -> Result<(), String> {
    let (program, standard) = match library.compiler {
        Compiler::C => (env::var("CC").unwrap_or_else(|_| "cc".into()), "-std=gnu11"),
        Compiler::Cxx => (env::var("CXX").unwrap_or_else(|_| "c++".into()), "-std=c++17"),
    };
    let directory = out.join(library.directory);
    fs::create_dir_all(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    let target = directory.join(library.soname);
    let status = Command::new(&program)
        .args([standard, "-O2", "-g", "-Wall", "-Wextra", "-shared", "-fPIC", "-fvisibility=hidden"])
        // As NVIDIA's libraries, they mean their own functions, whatever else is preloaded.
        // NCCL calls its own public functions through their exports; nobody else here does.
        .args((library.soname != "libnccl.so.2").then_some("-Wl,-Bsymbolic-functions"))
        // Entry points with equal bodies must keep addresses of their own.
        .args(["-fno-ipa-icf", "-Wl,-z,defs", &format!("-Wl,-soname,{}", library.soname)])
        .arg("-o")
        .arg(&target)
        .args(library.sources)
        .arg(format!("-L{}", out.display()))
        .arg(format!("-L{}", directory.display()))
        .args(library.links)
        .status()
        .map_err(|error| format!("cannot run `{program}` to build the fake {}: {error}", library.soname))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("`{program}` could not build the fake {}", library.soname))
    }
}
