//! How many calls a rank made more or fewer than the others, and what went wrong on it before.

use expect_test::expect;

use super::check;

const SUMS: &str = "AR64@15 AR16@15 AR64@15 AR8@15 ";

#[test]
fn a_round_that_was_left_out_after_an_error_is_missing_and_the_error_is_named() {
    let whole = format!("init:w {}", SUMS.repeat(10));
    let skips = format!("init:w {} oom@12 {}", SUMS.repeat(4), SUMS.repeat(5));
    // All came to the line behind the loop.
    check(
        &[&format!("{whole} AR4@30"), &format!("{whole} AR4@30"), &format!("{skips} AR4@30")],
        expect![[r#"
            MissingCall [2] of world in collective 36, lines 30 and 15, waiting []
              rank 2 did not make 4 calls that the others made, 2 times all_reduce(64 float32, sum) at step (train.py:15); all_reduce(16 float32, sum) at step (train.py:15); all_reduce(8 float32, sum) at step (train.py:15), and continued with all_reduce(4 float32, sum) at step (train.py:30). Rank 2 ran out of memory: a request for 1.00 GiB was refused at step (train.py:12), 21.0 ms before, after 16 of its calls there, and continued. It probably skipped calls then; identical calls hid that until here
        "#]],
    );
    // The others stand in the sums of the last step.
    check(
        &[&whole, &whole, &format!("{skips} AR4@30")],
        expect![[r#"
            MissingCall [2] of world in collective 36, lines 30 and 15, waiting [0, 1]
              rank 2 continued with all_reduce(4 float32, sum) at step (train.py:30) where the others called all_reduce(64 float32, sum) at step (train.py:15), and made 4 fewer calls. Rank 2 ran out of memory: a request for 1.00 GiB was refused at step (train.py:12), 21.0 ms before, after 16 of its calls there, and continued. It probably skipped calls then; identical calls hid that until here
        "#]],
    );
    // They stand in the first of them, and the rank has not come anywhere else.
    check(
        &[&whole, &whole, &skips],
        expect![[r#"
            RankStuck [2] of world in collective 36, lines 15 and 15, waiting [0, 1]
              ranks 0, 1 wait in call 36 on world, all_reduce(64 float32, sum) at step (train.py:15), for rank 2, which never made it: it is elsewhere; its last call was all_reduce(8 float32, sum) at step (train.py:15), 18.962 s before its end. Before that it ran out of memory: a request for 1.00 GiB was refused at step (train.py:12) and continued: it may have skipped calls then, which identical calls hide
        "#]],
    );
}

#[test]
fn a_layer_that_is_frozen_on_one_rank_makes_fewer_calls() {
    let whole = format!("init:w {} AR4@30", "AR64@15 AR64@15 AR64@15 ".repeat(6));
    let fewer = format!("init:w {} AR4@30", "AR64@15 AR64@15 ".repeat(6));
    check(
        &[&whole, &fewer, &whole],
        expect![[r#"
        MissingCall [1] of world in collective 12, lines 30 and 15, waiting []
          rank 1 did not make 6 calls that the others made, 6 times all_reduce(64 float32, sum) at step (train.py:15), and continued with all_reduce(4 float32, sum) at step (train.py:30)
    "#]],
    );
}

#[test]
fn calls_of_a_validation_on_one_rank_are_extra_and_counted() {
    let step = "BC4@40 AR8@45 ";
    let longer = format!("init:w {} BC4@40 {} AR8@45", step.repeat(5), "BC4@60 ".repeat(9));
    let whole = format!("init:w {}", step.repeat(6));
    check(
        &[&longer, &whole, &whole],
        expect![[r#"
        ExtraCall [0] of world in collective 11, lines 60 and 45, waiting [1, 2]
          rank 0 made 9 calls that the others did not, 9 times broadcast(4 float32, root 0) at step (train.py:60); they called all_reduce(8 float32, sum) at step (train.py:45)
    "#]],
    );
    // It is still at it.
    let longer = format!("init:w {} BC4@40 {}", step.repeat(5), "BC4@60 ".repeat(9));
    check(
        &[&longer, &whole, &whole],
        expect![[r#"
            ExtraCall [0] of world in collective 11, lines 60 and 45, waiting [1, 2]
              rank 0 called broadcast(4 float32, root 0) at step (train.py:60) where the others called all_reduce(8 float32, sum) at step (train.py:45), and made at least 9 extra calls
        "#]],
    );
}

#[test]
fn two_against_two_are_either_side_with_their_counts() {
    let step = "BC4@40 AR8@45 ";
    let longer = format!("init:w {} BC4@40 BC4@60 BC4@60 AR8@45", step.repeat(5));
    let whole = format!("init:w {}", step.repeat(6));
    check(
        &[&longer, &whole, &longer, &whole],
        expect![[r#"
        MissingCall [1, 3] of world in collective 11, lines 45 and 60, waiting []
          ranks 1, 3 did not make 2 calls that ranks 0, 2 made, 2 times broadcast(4 float32, root 0) at step (train.py:60), and continued with all_reduce(8 float32, sum) at step (train.py:45); neither side has more ranks, so the wrong one cannot be determined
    "#]],
    );
}

#[test]
fn a_barrier_that_meets_the_barrier_of_another_line_is_one_too_many() {
    let loop_ = "AR8@10 AR8@10 AR8@10 ";
    let barriers = "AR1@21 AR1@22 AR1@23 AR1@24 ";
    check(
        &[
            &format!("init:w {loop_} AR1@20 {barriers}"),
            &format!("init:w {loop_} {barriers} exit"),
            &format!("init:w {loop_} {barriers} exit"),
        ],
        expect![[r#"
            ExtraCall [0] of world in collective 3, lines 20 and 21, waiting []
              rank 0 called all_reduce(1 float32, sum) at step (train.py:20), which the others did not; they called all_reduce(1 float32, sum) at step (train.py:21)
        "#]],
    );
    // Two ranks take turns: the same lines on all.
    let (a, b) = ("BC4@30 BC4@31 ".repeat(4), "BC4@31 BC4@30 ".repeat(4));
    check(
        &[&format!("init:w {a}"), &format!("init:w {b}"), &format!("init:w {a}")],
        expect![[r#"
            consistent
            note: all ranks made the same calls, and none did anything in the last 18.991 s: they may wait for the GPU, the network, or something outside NCCL. The traces do not show which
        "#]],
    );
}
