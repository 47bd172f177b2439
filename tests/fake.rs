//! The fake driver under NVIDIA's own runtimes, without gputrace: is the truth that other tests rely on true?

use gputrace_skip::skip;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::Command;

use flate2::read::GzDecoder;
use gputrace_tests::calls::{self, Fate};
use gputrace_tests::programs::{self, Route};
use gputrace_tests::wheels::Major;

fn every_program_keeps_its_contract_on(route: Route) {
    let mut tried = 0;
    let mut skipped = None;
    for program in programs::all().into_iter().filter(|program| program.routes.contains(&route)) {
        tried += 1;
        match program.run(route, Path::new(env!("CARGO_TARGET_TMPDIR")), |_| ()) {
            Ok(run) => program.check(&run, route),
            Err(reason) => skipped = Some((program.name, reason)),
        }
    }
    assert!(tried > 0, "no program takes the route {route:?}");
    if let Some((name, reason)) = skipped {
        skip(&format!("programs on {route:?}"), format!("{name}: {reason}"));
    }
}

#[test]
fn programs_keep_their_contract_on_the_shared_runtime_11() {
    every_program_keeps_its_contract_on(Route::Shared(Major::Cuda11));
}

#[test]
fn programs_keep_their_contract_on_the_shared_runtime_12() {
    every_program_keeps_its_contract_on(Route::Shared(Major::Cuda12));
}

#[test]
fn programs_keep_their_contract_on_the_shared_runtime_13() {
    every_program_keeps_its_contract_on(Route::Shared(Major::Cuda13));
}

#[test]
fn programs_keep_their_contract_on_the_static_runtime_12() {
    every_program_keeps_its_contract_on(Route::Static(Major::Cuda12));
}

#[test]
fn programs_keep_their_contract_on_the_static_runtime_13() {
    every_program_keeps_its_contract_on(Route::Static(Major::Cuda13));
}

#[test]
fn programs_keep_their_contract_when_linked_to_the_driver() {
    every_program_keeps_its_contract_on(Route::Driver);
}

#[test]
fn programs_keep_their_contract_when_they_load_the_driver_themselves() {
    every_program_keeps_its_contract_on(Route::Loader);
}

#[test]
fn programs_keep_their_contract_with_the_stand_in_for_nccl() {
    every_program_keeps_its_contract_on(Route::Nccl);
}

#[test]
fn programs_keep_their_contract_with_the_stand_in_for_pytorch() {
    every_program_keeps_its_contract_on(Route::Torch);
}

#[test]
fn addresses_lie_in_their_regions_as_a_real_driver_placed_them() {
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let recordings = Path::new(env!("CARGO_MANIFEST_DIR")).join("groundtruth/addresses");
    let files = fs::read_dir(&recordings).expect("recordings of a real driver");
    let program = programs::named("address_rules");
    let executable = program.build(Route::Driver, scratch).expect("the fake driver is there");
    let mut compared = 0;
    for file in files.map(|file| file.expect("a directory that can be read").path()) {
        let mut text = String::new();
        let packed = fs::File::open(&file).expect("a recording that can be read");
        GzDecoder::new(packed).read_to_string(&mut text).expect("a gzip file");
        let unpacked = scratch.join(file.file_stem().expect("a name"));
        fs::write(&unpacked, text).expect("a scratch directory that can be written");
        let mut command = program.command(&executable, Path::new("")).expect("no runtime is needed");
        let output = command.arg(&unpacked).output().expect("the program starts");
        let answer = String::from_utf8_lossy(&output.stdout);
        let (equal, total) =
            answer.trim().split_once(" of ").unwrap_or_else(|| panic!("{file:?}: {output:?}"));
        let (equal, total): (u32, u32) = (equal.parse().expect("a number"), total.parse().expect("a number"));
        // What a real context has already taken of the first regions differs a little from process to process.
        assert!(total > 0 && equal * 100 >= total * 98, "{}: {answer}", file.display());
        compared += 1;
    }
    assert!(compared > 0, "no recordings in {}", recordings.display());
    let _ = fs::remove_file(executable);
}

#[test]
fn real_pytorch_and_the_call_log_agree_about_segments() {
    let Some(python) = std::env::var_os("GPUTRACE_PYTHON") else {
        return skip(
            "segments of real PyTorch",
            "GPUTRACE_PYTHON does not name a Python that has it, for CUDA",
        );
    };
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let call_log = scratch.join(format!("torch.{}.calls", std::process::id()));
    let _ = fs::remove_file(&call_log);
    let output = Command::new(python)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/torch_step.py"))
        .env("LD_LIBRARY_PATH", fake_cuda::library_dir())
        .env("FAKE_CUDA_LOG", &call_log)
        .env("FAKE_CUDA_MEMORY", "16GiB")
        .output()
        .expect("GPUTRACE_PYTHON can be run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");

    let text = fs::read_to_string(&call_log).expect("PyTorch called the driver");
    let (mut allocs, mut frees, mut failures, mut reserved) = (0, 0, 0, 0);
    for ((function, bytes, fate), n) in calls::census(&calls::parse_log(&text).expect("a good log")) {
        if function != "cuMemAlloc_v2" {
            continue;
        }
        match fate {
            Fate::Freed => (allocs, frees) = (allocs + n, frees + n),
            Fate::Leaked => (allocs, reserved) = (allocs + n, reserved + n as u64 * bytes),
            Fate::Failed(_) => failures += n,
        }
    }
    assert_eq!(said["num_device_alloc"], allocs, "{said}");
    assert_eq!(said["num_device_free"], frees, "{said}");
    assert_eq!(said["reserved_bytes"], reserved, "{said}");
    assert_eq!(said["num_ooms"], 1, "{said}");
    assert_eq!(failures, 2, "the request and its retry: {said}");
}
