//! Who owns memory: a table of rules from the file that asked the driver to a name.
//!
//! The file is that of the innermost native frame that is not plumbing: a library that carries its own CUDA runtime
//! (NCCL, cuBLAS) calls from inside itself, and one that uses the shared runtime is the next one out.

use gputrace_schemas::event::{Frame, Module, Process, Stack};
use gputrace_sim::stacks::python_package;

use crate::Definitions;

/// How a rule recognises a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Test {
    /// The file's name begins so.
    Name(&'static str),
    /// Its path has this in it.
    Path(&'static str),
}
use Test::{Name, Path};

/// A rule: what is asked for from a file that one of the tests fits belongs to `owner`.
struct Rule {
    owner: &'static str,
    tests: &'static [Test],
}

/// Memory of PyTorch's allocator.
pub const TORCH: &str = "PyTorch";
/// What PyTorch requests elsewhere than in that allocator.
pub const TORCH_ELSEWHERE: &str = "PyTorch, not its allocator";
/// Memory of the host that PyTorch pinned, and keeps for the next who asks.
pub const TORCH_PINNED: &str = "PyTorch, pinned memory";
/// Memory of NCCL.
pub const NCCL: &str = "NCCL";
/// Memory of JAX, and of what else uses XLA by PJRT.
pub const JAX: &str = "JAX/XLA";
/// Memory of NVSHMEM.
pub const NVSHMEM: &str = "NVSHMEM";
/// The program itself.
pub const APPLICATION: &str = "application";
/// Not known.
pub const UNKNOWN: &str = "unknown";

/// Frames that only pass a request on: the driver, the shared runtime, ourselves, and what Python calls C through.
#[rustfmt::skip]
const PLUMBING: &[Test] = &[
    Name("libcuda.so"), Name("libcuda-"), Name("libcudart.so"), Name("libcudart-"), Name("libgputrace"), Name("libcudadebugger.so"),
    Name("libnvidia-"), Name("libffi.so"), Name("libffi-"), Name("_ctypes."), Name("_cffi_backend."),
    Name("libc.so"), Name("libpthread.so"), Name("libstdc++.so"), Name("ld-linux"), Name("[vdso]"),
];

/// The interpreter: when it is the caller, a line of Python is.
const PYTHON: &[Test] = &[Name("libpython"), Name("python")];

/// First match counts.
#[rustfmt::skip]
const RULES: &[Rule] = &[
    Rule { owner: TORCH, tests: &[Name("libc10_cuda.so")] },
    Rule { owner: NCCL, tests: &[Name("libnccl"), Path("/nccl/lib/")] },
    Rule { owner: "vLLM cumem", tests: &[Name("cumem_allocator")] },
    Rule { owner: "vLLM", tests: &[Path("/vllm/"), Path("/vllm_flash_attn/")] },
    Rule { owner: NVSHMEM, tests: &[Name("libnvshmem"), Name("nvshmem_")] },
    Rule { owner: "cuBLAS", tests: &[Name("libcublas.so"), Name("libcublas-"), Name("libnvblas")] },
    Rule { owner: "cuBLASLt", tests: &[Name("libcublasLt")] },
    Rule { owner: "cuDNN", tests: &[Name("libcudnn")] },
    Rule { owner: "cuFFT", tests: &[Name("libcufft")] },
    Rule { owner: "cuSPARSE", tests: &[Name("libcusparse")] },
    Rule { owner: "cuSOLVER", tests: &[Name("libcusolver")] },
    Rule { owner: "cuRAND", tests: &[Name("libcurand")] },
    Rule { owner: "cuTENSOR", tests: &[Name("libcutensor")] },
    Rule { owner: "NVRTC", tests: &[Name("libnvrtc"), Name("libnvJitLink")] },
    Rule { owner: "TensorRT", tests: &[Name("libnvinfer")] },
    Rule { owner: "DALI", tests: &[Name("libdali")] },
    Rule { owner: "RMM", tests: &[Name("librmm"), Path("/rmm/")] },
    Rule { owner: "CuPy", tests: &[Path("/cupy/"), Path("/cupy_backends/")] },
    Rule { owner: JAX, tests: &[Path("/jaxlib/"), Path("/jax_plugins/"), Name("xla_cuda_plugin"), Name("xla_extension"), Name("libpjrt_c_api"), Name("pjrt_c_api")] },
    Rule { owner: "TensorFlow", tests: &[Path("/tensorflow/"), Name("libtensorflow")] },
    Rule { owner: "ONNX Runtime", tests: &[Name("libonnxruntime"), Name("onnxruntime_")] },
    Rule { owner: "Triton", tests: &[Path("/triton/"), Path("/.triton/"), Name("__triton_launcher")] },
    Rule { owner: "CUDA Python", tests: &[Path("/cuda/bindings/"), Path("/cuda/core/")] },
    Rule { owner: "UCX", tests: &[Name("libuct"), Name("libucm"), Name("libucs"), Name("libucp")] },
    Rule { owner: "MPI", tests: &[Name("libmpi"), Name("libopen-pal"), Name("libopen-rte")] },
    // Its own calls, outside of its caching allocator: symmetric memory, graphs, collectives.
    Rule { owner: TORCH_ELSEWHERE, tests: &[Name("libtorch"), Name("libc10"), Path("/torch/")] },
];

/// An owner, and how it was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Owner {
    /// Name for people.
    pub name: String,
    /// Which frame of the stack decided, where one did.
    pub frame: Option<usize>,
    /// The call passed through a CUDA runtime.
    pub through_runtime: bool,
}

/// Who owns what `stack` requested. `thread` is the thread's name: NCCL's own threads show no other frame of NCCL
/// where its library was built without frame pointers or is linked statically.
pub fn owner(definitions: &dyn Definitions, stack: Option<&Stack>, thread: &str) -> Owner {
    let found = stack.and_then(|stack| by_frames(definitions, stack));
    let by_thread = is_nccl_thread(thread).then_some(NCCL);
    match (found, by_thread) {
        (Some(found), Some(nccl)) => Owner { name: nccl.into(), ..found },
        (Some(found), None) => found,
        (None, name) => Owner { name: name.unwrap_or(UNKNOWN).into(), frame: None, through_runtime: false },
    }
}

/// NCCL names its threads `NCCL Service  0`, `NCCL UDS Service 0`, `NCCL Progress 0` and so on (NCCL 2.18 to 2.32,
/// `ncclSetThreadName`).
#[must_use]
pub fn is_nccl_thread(name: &str) -> bool {
    name.starts_with("NCCL ")
}

/// The file is the driver, the shared CUDA runtime, ourselves, or the way from Python to C.
#[must_use]
pub fn is_plumbing(module: &Module) -> bool {
    fits(PLUMBING, &module.path)
}

/// The last part of a path.
#[must_use]
pub fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// A name for a loaded file that says as much about its owner as its path does, and nothing that is private: the
/// beginning of the name of a library that a rule names, or the folder that does. `None` if no rule does.
#[must_use]
pub fn public_library(path: &str) -> Option<String> {
    let rules = RULES.iter().flat_map(|rule| rule.tests);
    // In the order in which an owner is sought.
    let test = PLUMBING.iter().chain(rules).chain(PYTHON).find(|test| fits(&[**test], path))?;
    Some(match test {
        Name(start) if path.contains(".so") && !start.contains(".so") => format!("{start}.so"),
        Name(start) => (*start).to_owned(),
        Path(part) => format!("{part}library.so"),
    })
}

/// The public part of a Python file's path: in a package that a rule names, or in Python itself.
#[must_use]
pub fn public_python(file: &str) -> Option<String> {
    let is_public = |package: &str| {
        let folder = format!("/{package}/");
        RULES.iter().flat_map(|rule| rule.tests).any(|test| matches!(test, Path(part) if *part == folder))
    };
    for folder in ["/site-packages/", "/dist-packages/"] {
        if let Some((_, inside)) = file.rsplit_once(folder) {
            let package = inside.split('/').next().unwrap_or_default();
            return is_public(package).then(|| format!("{folder}{inside}"));
        }
    }
    if file.starts_with("<frozen ") || file == "<string>" || file == "<stdin>" {
        return Some(file.to_owned());
    }
    file.rsplit_once("/lib/python3.").map(|(_, inside)| format!("/lib/python3.{inside}"))
}

fn by_frames(definitions: &dyn Definitions, stack: &Stack) -> Option<Owner> {
    let mut through_runtime = false;
    for (idx, id) in stack.frames.iter().enumerate() {
        let Some(Frame::Native { module: Some(module), .. }) = definitions.frame(*id) else { continue };
        let Some(module) = definitions.module(*module) else { continue };
        if fits(PLUMBING, &module.path) {
            through_runtime |= module.has_runtime;
            continue;
        }
        through_runtime |= module.has_runtime;
        let name = by_file(definitions, stack, &module.path);
        return Some(Owner { name, frame: Some(idx), through_runtime });
    }
    let name = by_python(definitions, stack)?;
    Some(Owner { name, frame: None, through_runtime })
}

fn by_file(definitions: &dyn Definitions, stack: &Stack, path: &str) -> String {
    if let Some(rule) = RULES.iter().find(|rule| fits(rule.tests, path)) {
        return rule.owner.into();
    }
    if fits(PYTHON, path) {
        return by_python(definitions, stack).unwrap_or_else(|| APPLICATION.into());
    }
    if is_executable(definitions.process(), path) {
        return APPLICATION.into();
    }
    let name = file_name(path);
    name.split(".so").next().filter(|stem| !stem.is_empty()).unwrap_or(name).to_owned()
}

fn is_executable(process: &Process, path: &str) -> bool {
    path == process.executable || process.command.first().is_some_and(|command| path == command)
}

/// The package of the innermost line of Python that is not the interpreter's own.
fn by_python(definitions: &dyn Definitions, stack: &Stack) -> Option<String> {
    let files = stack.frames.iter().filter_map(|id| match definitions.frame(*id) {
        Some(Frame::Python { file, .. }) => Some(file.as_str()),
        Some(Frame::Native { .. }) | None => None,
    });
    let mut any = false;
    for file in files {
        any = true;
        match python_package(file) {
            Some("Python") => {}
            Some(package) => {
                let rule = RULES.iter().find(|rule| fits(rule.tests, file));
                return Some(rule.map_or(package, |rule| rule.owner).to_owned());
            }
            None => break,
        }
    }
    any.then(|| APPLICATION.into())
}

fn fits(tests: &[Test], path: &str) -> bool {
    let name = file_name(path);
    tests.iter().any(|test| match test {
        Name(start) => name.starts_with(start),
        Path(part) => path.contains(part),
    })
}

#[cfg(test)]
mod tests {
    use expect_test::expect;
    use gputrace_schemas::event::{FrameId, ModuleId};

    use super::*;
    use crate::Recording;

    /// `stack` has one word per frame, innermost first: a path (with `!` behind it: has a CUDA runtime), or
    /// `py:FILE` for a line of Python.
    fn check(stacks: &[(&str, &str)], expected: expect_test::Expect) {
        let mut answers = String::new();
        for (thread, stack) in stacks {
            let mut trace = Recording::default();
            trace.process.executable = "/job/train".into();
            let mut frames = vec![];
            for (idx, word) in (1..).zip(stack.split_whitespace()) {
                let path = word.trim_end_matches('!').to_owned();
                let frame = match word.strip_prefix("py:") {
                    Some(file) => Frame::Python { function: "f".into(), file: file.into(), line: 1 },
                    None => Frame::Native {
                        address: 0,
                        module: Some(ModuleId(idx)),
                        function: String::new(),
                        file: String::new(),
                        line: 0,
                        inlined: false,
                    },
                };
                let module = Module { path, has_runtime: word.ends_with('!'), ..Module::default() };
                trace.modules.insert(ModuleId(idx), module);
                trace.frames.insert(FrameId(idx), frame);
                frames.push(FrameId(idx));
            }
            let stack = Stack { frames, ..Stack::default() };
            let owner = owner(&trace, (!stack.frames.is_empty()).then_some(&stack), thread);
            let runtime = if owner.through_runtime { " (runtime)" } else { "" };
            answers += &format!("{}{runtime}\n", owner.name);
        }
        expected.assert_eq(&answers);
    }

    #[test]
    fn the_first_file_outside_the_driver_and_the_runtime_owns() {
        check(
            &[
                (
                    "",
                    "/usr/lib/libcuda.so.1 /x/libcudart.so.13! /x/torch/lib/libc10_cuda.so /x/torch/lib/libtorch_cuda.so",
                ),
                ("", "/x/torch/lib/libtorch_cuda.so"),
                ("", "/x/nvidia/nccl/lib/libnccl.so.2! /x/torch/lib/libtorch_cuda.so"),
                ("", "/x/libcublasLt.so.13! /x/libcublas.so.13!"),
                ("", "/x/libcublas.so.13! /x/libcublasLt.so.13!"),
                ("", "/x/jaxlib/xla_extension.so"),
                ("", "/x/site-packages/cupy_backends/cuda/api/runtime.cpython-312-x86_64-linux-gnu.so!"),
                ("", "/job/train!"),
                ("", "/opt/acme/libsolver.so.4"),
            ],
            expect![[r#"
                PyTorch (runtime)
                PyTorch, not its allocator
                NCCL (runtime)
                cuBLASLt (runtime)
                cuBLAS (runtime)
                JAX/XLA
                CuPy (runtime)
                application (runtime)
                libsolver
            "#]],
        );
    }

    #[test]
    fn a_thread_of_nccl_makes_its_memory_nccls() {
        check(
            &[("NCCL Service  0", ""), ("NCCL Progress 1", "/job/train!"), ("pt_nccl_watchdg", "")],
            expect![[r#"
            NCCL
            NCCL (runtime)
            unknown
        "#]],
        );
    }

    #[test]
    fn calls_from_python_belong_to_the_package_or_the_script() {
        let ctypes =
            "/usr/lib/libffi.so.8 /usr/lib/python3.12/lib-dynload/_ctypes.cpython-312.so /usr/bin/python3.12";
        check(
            &[
                (
                    "",
                    &format!(
                        "{ctypes} py:/usr/lib/python3.12/ctypes/__init__.py py:/v/site-packages/numba/cuda/driver.py"
                    ),
                ),
                ("", &format!("{ctypes} py:/job/train.py")),
                ("", ctypes),
                ("", "py:/job/train.py"),
            ],
            expect![[r#"
                numba
                application
                application
                application
            "#]],
        );
    }
}
