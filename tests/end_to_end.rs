//! Every test program under gputrace: it ends as it does alone, and the traces say what the fake driver's call log says.

use std::io::{self, Write};
use std::path::Path;

use gputrace_tests::calls;
use gputrace_tests::programs::{self, Route};
use gputrace_tests::recorded::{self, Folder};
use gputrace_tests::wheels::Major;

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
        let truth = calls::census(&run.calls);
        let got_memory: std::collections::BTreeSet<_> =
            run.calls.iter().filter(|call| call.bytes() > 0).map(|call| call.pid).collect();
        let traces = folder.traces(got_memory.len());
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
