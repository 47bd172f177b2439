//! NVIDIA's CUDA runtimes, as their Python wheels carry them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The release of the CUDA runtime: 11 is 11.8, 12 is 12.9, 13 is the newest 13.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Major {
    /// 11.8.89, whose wheel has no static library.
    Cuda11,
    /// 12.9.79
    Cuda12,
    /// The newest.
    Cuda13,
}

impl Major {
    /// All releases, oldest first.
    pub const ALL: [Major; 3] = [Major::Cuda11, Major::Cuda12, Major::Cuda13];

    fn library_dir(self) -> PathBuf {
        let inside = match self {
            Major::Cuda11 => "cudart-11/nvidia/cuda_runtime/lib",
            Major::Cuda12 => "cudart-12/nvidia/cuda_runtime/lib",
            Major::Cuda13 => "cudart-13/nvidia/cu13/lib",
        };
        root().join(inside)
    }

    fn soname(self) -> &'static str {
        match self {
            Major::Cuda11 => "libcudart.so.11.0",
            Major::Cuda12 => "libcudart.so.12",
            Major::Cuda13 => "libcudart.so.13",
        }
    }
}

/// The shared runtime.
///
/// # Errors
/// Why it is not there, in words for the one who reads that a test was skipped.
pub fn shared(major: Major) -> Result<PathBuf, String> {
    find(major, major.soname())
}

/// The folder of `cuda.h`.
///
/// # Errors
/// As [`shared`].
pub fn headers(major: Major) -> Result<PathBuf, String> {
    find(major, "../include/cuda.h").map(|path| path.with_file_name(""))
}

/// The static runtime.
///
/// # Errors
/// As [`shared`]; also that the wheel of 11.8 has none.
pub fn fixed(major: Major) -> Result<PathBuf, String> {
    if major == Major::Cuda11 {
        return Err("the wheel of CUDA 11.8 has no libcudart_static.a".into());
    }
    find(major, "libcudart_static.a")
}

/// The folder to import NVIDIA's Python package `nvtx` from.
///
/// # Errors
/// As [`shared`].
pub fn nvtx() -> Result<PathBuf, String> {
    present(root().join("nvtx/nvtx")).map(|path| path.with_file_name(""))
}

fn find(major: Major, file: &str) -> Result<PathBuf, String> {
    present(major.library_dir().join(file))
}

fn present(path: PathBuf) -> Result<PathBuf, String> {
    static FETCHED: OnceLock<Result<(), String>> = OnceLock::new();
    if !path.exists() {
        FETCHED.get_or_init(fetch).clone()?;
    }
    if path.exists() { Ok(path) } else { Err(format!("the wheel has no {}", path.display())) }
}

fn fetch() -> Result<(), String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("fetch-wheels.sh");
    let output =
        Command::new(&script).arg(root()).output().map_err(|e| format!("{}: {e}", script.display()))?;
    let reasons = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        Ok(())
    } else {
        Err(reasons.lines().next().unwrap_or("fetch-wheels gave no reason").to_owned())
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/wheels")
}
