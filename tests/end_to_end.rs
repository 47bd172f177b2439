//! Every test program under gputrace: it ends as it does alone, and the traces say what the fake driver's call log says.

use gputrace_skip::skip;
use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::Path;
use std::process::Command;

use gputrace_schemas::event::{Action, EventKind, Frame};
use gputrace_schemas::reader::Trace;
use gputrace_tests::calls::{self, Call};
use gputrace_tests::programs::{self, Route};
use gputrace_tests::recorded::{self, Folder};
use gputrace_tests::wheels::Major;

/// The calls of each process from its first context or memory on: what fails before that is not recorded.
fn since_cuda_worked(calls: &[Call]) -> Vec<Call> {
    let mut works = BTreeSet::new();
    let starts = |call: &Call| {
        let gives =
            call.bytes() > 0 || call.function.contains("CtxRetain") || call.function.contains("CtxCreate");
        gives && (call.result == 0 || call.result == 2)
    };
    let mut kept = Vec::new();
    for call in calls {
        if starts(call) {
            works.insert(call.pid);
        }
        if works.contains(&call.pid) {
            kept.push(call.clone());
        }
    }
    kept
}

fn every_program_is_recorded_on(route: Route) {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    for program in programs::all().into_iter().filter(|program| program.routes.contains(&route)) {
        let folder = Folder::new(target, &format!("{}.{route:?}", program.name).replace(['(', ')'], "."));
        let run = match program.run(route, target, |command| recorded::preload(command, &folder)) {
            Ok(run) => run,
            Err(reason) => {
                skip(&format!("{} on {route:?}", program.name), reason);
                continue;
            }
        };
        program.check(&run, route);
        let said = String::from_utf8_lossy(&run.output.stderr);
        assert!(!said.contains("gputrace:"), "{} on {route:?} said: {said}", program.name);
        let calls = since_cuda_worked(&run.calls);
        let truth = calls::census(&calls);
        let processes: BTreeSet<_> = calls.iter().map(|call| call.pid).collect();
        let execs = if program.name == "execs" { 1 } else { 0 };
        let traces = folder.traces(processes.len() + execs);
        assert_eq!(recorded::census(&traces), truth, "{} on {route:?}: {said}", program.name);
        let is_explained = |trace: &Trace| !trace.modules().is_empty() || says_mappings_are_unread(trace);
        assert!(traces.iter().all(is_explained), "{} on {route:?}: addresses without a reason", program.name);
    }
}

/// Whether a trace says why its addresses have no names.
fn says_mappings_are_unread(trace: &Trace) -> bool {
    trace
        .events()
        .any(|event| matches!(event.kind, EventKind::Note(text) if text.starts_with("mappings=unread")))
}

#[test]
fn without_a_recorder_the_ring_stays_and_becomes_a_trace() {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = Folder::new(target, "no-recorder");
    // Beside a copy of the library there is no program.
    let library = folder.path().join("libgputrace.so");
    std::fs::copy(recorded::built().join("libgputrace.so"), &library).expect("a copy of the library");
    let program = programs::named("driver_families");
    let run = program.run(Route::Driver, target, |command| {
        command.env("LD_PRELOAD", &library).env("GPUTRACE_RING_BYTES", "2097152").env("PATH", "/nowhere");
    });
    let run = run.expect("no wheel is needed");
    program.check(&run, Route::Driver);
    let said = String::from_utf8_lossy(&run.output.stderr).into_owned();
    assert_eq!(said.matches("gputrace:").count(), 1, "says it once: {said}");
    let ring = said.split("stay in ").nth(1).and_then(|rest| rest.split(": `gputrace recover`").next());
    let ring = ring.unwrap_or_else(|| panic!("names the ring and the remedy: {said}"));
    let recovered = std::process::Command::new(recorded::built().join("gputrace"))
        .args(["recover", ring, "-o"])
        .arg(folder.path().join("recovered.gtr"))
        .output()
        .expect("gputrace runs");
    assert!(recovered.status.success(), "{}", String::from_utf8_lossy(&recovered.stderr));
    let truth = calls::census(&since_cuda_worked(&run.calls));
    let traces = folder.traces(1);
    assert_eq!(recorded::census(&traces), truth);
    assert!(says_mappings_are_unread(&traces[0]), "nobody could read what was mapped");
    assert!(!Path::new(ring).exists(), "the ring is given back");
}

/// Bytes of records in a ring that nobody reads: `gputrace_ring::map` has the layout.
fn bytes_in(ring: &Path) -> u64 {
    let data = std::fs::read(ring).expect("a ring");
    let number = |at: usize| u32::from_le_bytes(data[at..at + 4].try_into().expect("four bytes"));
    let n_chunks = number(12) as usize;
    let first = (4096 + 1024 * 128 + 4 * n_chunks).next_multiple_of(4096);
    (0..n_chunks).map(|chunk| u64::from(number(first + chunk * 16_384 + 16))).sum()
}

#[test]
fn an_event_of_a_training_step_takes_few_bytes_of_the_ring() {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = Folder::new(target, "ring-bytes");
    // Beside a copy of the library there is no recorder that would empty the ring.
    let library = folder.path().join("libgputrace.so");
    std::fs::copy(recorded::built().join("libgputrace.so"), &library).expect("a copy of the library");
    let program = programs::named("torch_steps");
    let executable = match program.build(Route::Torch, target) {
        Ok(executable) => executable,
        Err(reason) => return skip("bytes of the ring", reason),
    };
    let run = |n_steps: u32| {
        let mut command = Command::new(&executable);
        command.arg(n_steps.to_string()).env("LD_LIBRARY_PATH", fake_cuda::library_dir());
        command.env("LD_PRELOAD", &library).env("PATH", "/nowhere").env("GPUTRACE_RING_BYTES", "16777216");
        let output = command.output().expect("it runs");
        assert!(output.status.success(), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let ring = said.split("stay in ").nth(1).and_then(|rest| rest.split(": `gputrace recover`").next());
        let ring = Path::new(ring.unwrap_or_else(|| panic!("names the ring: {said}")));
        let bytes = bytes_in(ring);
        std::fs::remove_file(ring).expect("ours");
        (String::from_utf8_lossy(&output.stdout).trim().parse::<u64>().expect("a number"), bytes)
    };
    // What comes once is in both.
    let ((few, before), (many, after)) = (run(20), run(220));
    std::fs::remove_file(&executable).expect("ours");
    let each = (after - before) as f64 / (many - few) as f64;
    let _ = writeln!(io::stderr(), "{each:.2} bytes an event");
    // Half a cache line, but where a chunk begins, another thread goes on or the stream changes.
    assert!((32.0..36.0).contains(&each), "{each:.2} bytes an event");
}

#[test]
fn a_function_is_told_when_its_code_comes_and_not_at_every_launch() {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = Folder::new(target, "code-loads");
    let program = programs::named("code_loads");
    let run = program.run(Route::Driver, target, |command| recorded::preload(command, &folder));
    program.check(&run.expect("no wheel is needed"), Route::Driver);
    let mut told = Vec::new();
    for event in folder.traces(1)[0].events() {
        let EventKind::Call(call) = event.kind else { continue };
        match call.action {
            Action::FunctionLoad => told.push(call.result),
            Action::CodeUnload => told.push(None),
            _ => {}
        }
    }
    // Three functions, an error, code goes, two functions again, code goes.
    let (ok, unload) = (Some(0), None);
    assert_eq!(told, [ok, ok, ok, Some(1), unload, ok, ok, unload]);
}

#[test]
fn small_blocks_have_no_stacks_where_that_was_asked_for() {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = Folder::new(target, "min-size");
    let program = programs::named("torch_blocks");
    let executable = match program.build(Route::Torch, target) {
        Ok(executable) => executable,
        Err(reason) => return skip("small blocks without stacks", reason),
    };
    let trace = folder.path().join("train.gtr");
    let gputrace = || Command::new(recorded::built().join("gputrace"));
    let plain = program.command(&executable, &folder.path().join("calls")).expect("no runtime is named");
    let mut command = gputrace();
    command.args(["record", "--min-size", "5MiB", "-o"]).arg(&trace).arg("--").arg(&executable);
    command.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = command.output().expect("gputrace runs");
    std::fs::remove_file(&executable).expect("ours");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let traces = folder.traces(1);
    // By default, native functions where no Python runs.
    let has_native = |stack| traces[0].stack_frames(stack).any(|frame| matches!(frame, Frame::Native { .. }));
    let blocks: Vec<(u64, bool)> = traces[0]
        .events()
        .filter_map(|event| match event.kind {
            EventKind::BlockAlloc(block) => Some((block.bytes.0, has_native(event.stack))),
            _ => None,
        })
        .collect();
    let mib = 1 << 20;
    assert!(blocks.iter().all(|(bytes, has_stack)| *has_stack == (*bytes >= 5 * mib)), "{blocks:?}");
    let sizes: BTreeSet<u64> = blocks.iter().map(|(bytes, _)| bytes / mib).collect();
    assert!(sizes.contains(&0) && sizes.contains(&5) && sizes.contains(&100), "of both kinds: {blocks:?}");
    let report = gputrace().arg("report").arg(&trace).output().expect("gputrace runs");
    let said = String::from_utf8_lossy(&report.stdout);
    let note = "PyTorch blocks of less than 5242880 bytes were recorded without stacks (--min-size)";
    assert!(said.contains(note), "{said}");
}

#[test]
fn programs_on_the_shared_runtime_11_are_recorded() {
    every_program_is_recorded_on(Route::Shared(Major::Cuda11));
}

#[test]
fn programs_on_the_shared_runtime_12_are_recorded() {
    every_program_is_recorded_on(Route::Shared(Major::Cuda12));
}

#[test]
fn programs_on_the_shared_runtime_13_are_recorded() {
    every_program_is_recorded_on(Route::Shared(Major::Cuda13));
}

#[test]
fn programs_on_the_static_runtime_12_are_recorded() {
    every_program_is_recorded_on(Route::Static(Major::Cuda12));
}

#[test]
fn programs_on_the_static_runtime_13_are_recorded() {
    every_program_is_recorded_on(Route::Static(Major::Cuda13));
}

#[test]
fn programs_linked_to_the_driver_are_recorded() {
    every_program_is_recorded_on(Route::Driver);
}

#[test]
fn programs_that_load_the_driver_themselves_are_recorded() {
    every_program_is_recorded_on(Route::Loader);
}

#[test]
fn programs_with_the_stand_in_for_nccl_are_recorded() {
    every_program_is_recorded_on(Route::Nccl);
}

#[test]
fn programs_with_the_stand_in_for_pytorch_are_recorded() {
    every_program_is_recorded_on(Route::Torch);
}
