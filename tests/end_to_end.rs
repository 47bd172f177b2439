//! Every test program under gputrace: it ends as it does alone, and the traces say what the fake driver's call log says.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::Path;

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
                let _ = writeln!(io::stderr(), "skipped {} on {route:?}: {reason}", program.name);
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
    }
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
