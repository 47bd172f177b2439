//! Where the fake CUDA libraries are. They have no Rust interface: a program uses them because it finds them first.
//!
//! ```text
//! LD_LIBRARY_PATH=$(cargo run -q -p gputrace-fake-cuda -- --dir) FAKE_CUDA_MEMORY=8GiB ./program
//! ```
//!
//! What the environment can set is in README.md.

use std::path::{Path, PathBuf};

/// The directory that holds `libcuda.so.1` and its companions; for `LD_LIBRARY_PATH`.
pub fn library_dir() -> &'static Path {
    Path::new(env!("OUT_DIR"))
}

/// A little training loop that needs no GPU and no Python: `tests/programs/demo.c`, built.
pub fn demo() -> PathBuf {
    library_dir().join("demo")
}

/// The directory of what stands in for PyTorch's `libc10.so` and `libc10_cuda.so`; apart from the others, so that a real PyTorch
/// does not find it. Empty where there was no C++ compiler.
pub fn torch_dir() -> PathBuf {
    library_dir().join("torch")
}
