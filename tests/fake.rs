//! The fake driver under NVIDIA's own runtimes, without gputrace: is the truth that other tests rely on true?

use std::io::{self, Write};
use std::path::Path;

use gputrace_tests::programs::{self, Route};
use gputrace_tests::wheels::Major;

fn every_program_keeps_its_contract_on(route: Route) {
    let mut tried = 0;
    for program in programs::all().into_iter().filter(|program| program.routes.contains(&route)) {
        tried += 1;
        match program.run(route, Path::new(env!("CARGO_TARGET_TMPDIR")), |_| ()) {
            Ok(run) => program.check(&run, route),
            // Not by a macro: a skipped test should say so even where the output of good tests is hidden.
            Err(reason) => {
                let _ = writeln!(io::stderr(), "skipped {} on {route:?}: {reason}", program.name);
            }
        }
    }
    assert!(tried > 0, "no program takes the route {route:?}");
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
