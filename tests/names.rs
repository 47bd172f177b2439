//! `make names` finds what is new in a CUDA or an NCCL, and nothing in those that were looked at.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use gputrace_skip::skip;
use gputrace_tests::wheels::{self, Major};

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("names.py")
}

/// A folder with headers: of a CUDA and of an NCCL.
fn folder(name: &str, cuda: &str, nccl: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("names").join(name);
    fs::create_dir_all(&folder).expect("a folder");
    fs::write(folder.join("cudaTypedefs.h"), cuda).expect("a header");
    fs::write(folder.join("nccl.h"), nccl).expect("a header");
    folder
}

/// What it says of headers, and its exit status.
fn says(cuda: &Path, nccl: &Path) -> (String, Option<i32>) {
    let output = Command::new("python3")
        .arg(script())
        .args([Path::new("--cuda"), cuda, Path::new("--nccl"), nccl])
        .output()
        .expect("python3");
    (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.code())
}

const KNOWN: &str = "typedef CUresult (CUDAAPI *PFN_cuMemAlloc_v3020)(CUdeviceptr_v2 *dptr, size_t bytesize);\n\
    typedef CUresult (CUDAAPI *PFN_cuMemHostGetDevicePointer_v3020)(CUdeviceptr_v2 *pdptr, void *p, unsigned int Flags);\n\
    typedef CUresult (CUDAAPI *PFN_cuMemGetInfo_v3020)(size_t *free, size_t *total);\n";
const NCCL: &str = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 32\n#define NCCL_PATCH 3\n\
    ncclResult_t  ncclMemAlloc(void** ptr, size_t size);\nncclResult_t  ncclGetVersion(int *version);\n";

#[test]
fn what_is_known_or_excused_is_not_new() {
    let known = folder("known", KNOWN, NCCL);
    let (said, status) = says(&known, &known);
    assert_eq!((status, said.lines().last()), (Some(0), Some("nothing new")), "{said}");
}

#[test]
fn a_new_function_is_named_whether_it_is_the_drivers_or_nccls() {
    let cuda =
        format!("{KNOWN}typedef CUresult (CUDAAPI *PFN_cuMemAllocTiered_v13070)(CUdeviceptr *dptr);\n");
    let nccl = format!("{NCCL}ncclResult_t  ncclAllScatter(const void* sendbuff);\n");
    let new = folder("new", &cuda, &nccl);
    let (said, status) = says(&new, &new);
    let found: Vec<&str> = said.lines().skip(2).collect();
    let expected = [
        "cuMemAllocTiered is about memory, and neither a row nor excused",
        "cuMemAllocTiered of CUDA 13.7 is newer than exports.def",
        "ncclAllScatter is neither a row nor excused",
    ];
    assert_eq!((status, &found[..]), (Some(1), &expected[..]), "{said}");
}

#[test]
fn what_cannot_be_looked_at_is_said_and_is_no_verdict() {
    let empty = Path::new(env!("CARGO_TARGET_TMPDIR")).join("names/empty");
    fs::create_dir_all(&empty).expect("a folder");
    let (said, status) = says(&empty, &empty);
    assert_eq!((status, said.matches("SKIPPED").count()), (Some(3), 2), "{said}");
}

#[test]
fn the_newest_cuda_that_was_looked_at_has_nothing_new() {
    let headers = match wheels::headers(Major::Cuda13) {
        Ok(headers) => headers,
        Err(why) => return skip("the headers of CUDA 13", why),
    };
    let (said, status) = says(&headers, &folder("known", KNOWN, NCCL));
    assert_eq!(status, Some(0), "{said}");
}
