//! What the first screen promises of a remedy, and the lines that it names beside the first.

mod told;

use told::{LINEAR, MODULE, block, free, told};

const MOVED: &str = "Module.to.<locals>.convert@/v/site-packages/torch/nn/modules/module.py:1370,Module._apply@/v/site-packages/torch/nn/modules/module.py:965";
const ENGINE: &str = "_engine_run_backward@/v/site-packages/torch/autograd/graph.py:823,backward@/v/site-packages/torch/_tensor.py:600";

/// A layer's line of a model that is called at a line of the program.
fn layer(line: u32, at: &str) -> String {
    format!("{LINEAR},{MODULE},Net.forward@/job/net.py:{line},{MODULE},{at}")
}

/// A call of a model that leaves nothing.
fn infer(at: &str) -> String {
    let blocks = (0..6).map(|n| block(&format!("i{n}"), 2, &layer(20 + n, at)));
    blocks.chain((0..6).map(|n| free(&format!("i{n}"), 2))).collect()
}

#[test]
fn a_line_that_grows_beside_the_first_is_named_with_its_callers() {
    let of_cache = layer(17, "anchors@/job/net.py:30,serve@/job/serve.py:33");
    let round = |n: usize| {
        block(&format!("k{n}"), 8, "keep@/job/serve.py:12,serve@/job/serve.py:34")
            + &block(&format!("c{n}"), 1, &of_cache)
            + &infer("serve@/job/serve.py:35")
    };
    let told = told(&(0..20).map(round).collect::<String>());
    assert!(told.starts_with("Verdict: memory grows"), "{told}");
    assert!(
        told.contains("another line also grows") && told.contains("net.py:17") && told.contains("net.py:30"),
        "{told}"
    );
}

#[test]
fn weights_that_fill_the_card_as_they_are_moved_are_told_from_a_program_that_needs_more() {
    let by = format!("{MOVED},main@/job/run.py:12");
    let weights: String = (0..12).map(|n| block(&format!("w{n}"), 64, &by)).collect();
    let failed = format!(
        "Alloc addr=s bytes=780M by=libcudart.so,libc10_cuda.so in_allocate=1
         MemInfo bytes=10M extra=800M
         oom bytes=64M requested=64M allocated=768M reserved=780M by={by}\n"
    );
    let only = told(&(weights.clone() + &failed));
    assert!(
        only.starts_with("Verdict: out of memory: weights that alone are larger than the card")
            && only.contains("run.py:12"),
        "{only}"
    );
    let kept = block("a", 100, &layer(20, "main@/job/run.py:20"));
    let worked = told(&(weights + &kept + &failed));
    assert!(!worked.contains("weights that alone"), "{worked}");
}

#[test]
fn adam_without_foreach_still_needs_a_root_and_a_quotient_of_one_parameter() {
    let by = "_multi_tensor_adam@/v/site-packages/torch/optim/adam.py:700,Adam.step@/v/site-packages/torch/optim/adam.py:250,main@/job/train.py:22";
    let moved = format!("{MOVED},main@/job/train.py:4");
    let weights: String = (0..8).map(|n| block(&format!("w{n}"), 40, &moved)).collect();
    let steps = |step: usize| {
        let made = (0..8).map(|n| block(&format!("f{step}_{n}"), 40, by));
        let gone = (0..8).map(|n| free(&format!("f{step}_{n}"), 40));
        infer("main@/job/train.py:20") + &made.chain(gone).collect::<String>()
    };
    let told = told(&(weights + &(0..6).map(steps).collect::<String>()));
    // Of 320 MiB, two of 40 MiB are still made at a time.
    assert!(told.contains("`foreach` temporaries"), "{told}");
    assert!(told.contains("240.00 MiB lower, at 400.00 MiB"), "{told}");
}

#[test]
fn a_buffer_that_lies_idle_lowers_the_peak_only_to_the_moment_when_it_was_used() {
    let calibrate = |line: u32| format!("Tuner.calibrate@/job/tune.py:{line},main@/job/tune.py:30");
    let moved = format!("{MOVED},main@/job/tune.py:5");
    let mut scene = block("w", 100, &moved) + &block("samples", 600, &calibrate(10));
    // Without what it ran: 100, 600 and 150 MiB.
    for n in 0..20 {
        scene += &(block(&format!("c{n}"), 150, &layer(20, &calibrate(13))) + &free(&format!("c{n}"), 150));
    }
    for n in 0..60 {
        scene +=
            &(block(&format!("t{n}"), 250, &layer(20, "Tuner.train@/job/tune.py:21,main@/job/tune.py:31"))
                + &free(&format!("t{n}"), 250));
    }
    let told = told(&scene);
    assert!(told.contains("left idle after its work"), "{told}");
    assert!(told.contains("100.00 MiB lower, at 850.00 MiB"), "{told}");
}

#[test]
fn one_result_that_is_held_while_the_next_is_made_is_no_growth() {
    let by = layer(9, "main@/job/run.py:9");
    let mut scene = block("w", 128, &format!("{MOVED},main@/job/run.py:4"));
    for n in 0..3 {
        scene += &block(&format!("x{n}"), 4, "main@/job/run.py:8");
    }
    scene += &(block("y", 700, &by) + &block("best", 1, "main@/job/run.py:10"));
    scene += &format!(
        "Alloc addr=s bytes=850M by=libcudart.so,libc10_cuda.so in_allocate=1
         MemInfo bytes=10M extra=900M
         oom bytes=700M requested=700M allocated=841M reserved=850M by={by}\n"
    );
    let told = told(&scene);
    assert!(
        told.starts_with("Verdict: out of memory: the previous result is held while the next is made"),
        "{told}"
    );
    assert!(!told.contains("accumulated"), "{told}");
}

#[test]
fn what_a_loop_collected_and_the_tensor_that_it_is_joined_into_go_together() {
    let mut scene = block("w", 40, &format!("{MOVED},main@/job/run.py:4"));
    for n in 0..12 {
        scene += &block(&format!("x{n}"), 4, "predict@/job/run.py:10,main@/job/run.py:20");
        scene += &block(&format!("h{n}"), 8, &layer(20, "predict@/job/run.py:11,main@/job/run.py:20"));
        scene += &block(&format!("o{n}"), 50, &layer(21, "predict@/job/run.py:11,main@/job/run.py:20"));
        scene += &(free(&format!("h{n}"), 8) + &free(&format!("x{n}"), 4));
    }
    scene += &block("all", 600, "predict@/job/run.py:13,main@/job/run.py:20");
    scene += &(0..12).map(|n| free(&format!("o{n}"), 50)).collect::<String>();
    scene += &free("all", 600);
    scene += &(0..8).map(|_| infer("main@/job/run.py:30")).collect::<String>();
    let told = told(&scene);
    assert!(told.contains("outputs collected on the GPU until the loop ends"), "{told}");
    assert!(told.contains("without any of it, it is 52.00 MiB"), "{told}");
}

#[test]
fn one_checkpoint_around_all_layers_is_told_from_one_around_each() {
    const CHECKPOINT: &str = "checkpoint@/v/site-packages/torch/utils/checkpoint.py:490";
    const AGAIN: &str = "recompute_fn@/v/site-packages/torch/utils/checkpoint.py:1450,unpack_hook@/v/site-packages/torch/utils/checkpoint.py:1100";
    let trained = |held_at_once: usize| {
        let mut scene: String =
            (0..12).map(|n| block(&format!("w{n}"), 4, &format!("{MOVED},main@/job/train.py:4"))).collect();
        for step in 0..4 {
            for n in 0..12 {
                let by = layer(
                    20,
                    &format!("{CHECKPOINT},Encoder.forward@/job/net.py:29,{MODULE},main@/job/train.py:20"),
                );
                scene += &(block(&format!("f{step}_{n}"), 40, &by) + &free(&format!("f{step}_{n}"), 40));
            }
            for first in (0..12).step_by(held_at_once) {
                let again = first..first + held_at_once;
                let by = layer(20, &format!("{AGAIN},{ENGINE},main@/job/train.py:21"));
                scene += &again.clone().map(|n| block(&format!("a{step}_{n}"), 40, &by)).collect::<String>();
                for n in again {
                    if step == 0 {
                        scene += &block(&format!("g{n}"), 4, &format!("{ENGINE},main@/job/train.py:21"));
                    }
                    scene += &free(&format!("a{step}_{n}"), 40);
                }
            }
        }
        told(&scene)
    };
    let all = trained(12);
    assert!(
        all.contains("one activation checkpoint around many layers") && all.contains("net.py:29"),
        "{all}"
    );
    let each = trained(1);
    assert!(!each.contains("one activation checkpoint"), "{each}");
}
