//! Recordings that keep only their newest part, each from another moment on.

use expect_test::expect;

use super::{Ranks, check, participants, running, text};

/// A training loop, with what one rank's recording has kept beginning after some of its steps.
fn training(n_kept_from: Option<usize>, n_steps: usize, rest: &str) -> String {
    let step = "AR8@10 BC4@11 AG2@12 ";
    match n_kept_from {
        Some(n) => format!("init:w {}kept {}{rest}", step.repeat(n), step.repeat(n_steps - n)),
        None => format!("init:w {}{rest}", step.repeat(n_steps)),
    }
}

#[test]
fn windows_that_begin_at_different_calls_are_consistent() {
    check(
        &[
            &training(None, 40, "exit"),
            &training(Some(20), 40, "exit"),
            &training(Some(33), 40, "exit"),
            &training(Some(7), 40, "exit"),
        ],
        expect![[r#"
            consistent
            note: calls are compared since 00:00:01 UTC, when the trace of rank 2 begins (--keep, --max-size), on world from call 98
        "#]],
    );
    // Within a step, and with nothing since.
    let within = format!("init:w {}AR8@10 kept BC4@11 AG2@12 exit", "AR8@10 BC4@11 AG2@12 ".repeat(39));
    check(
        &[&training(Some(40), 40, "exit"), &within],
        expect![[r#"
        consistent
        note: calls are compared since 00:00:01 UTC, when the trace of rank 0 begins (--keep, --max-size), on world from call 119
    "#]],
    );
}

#[test]
fn windows_of_a_job_of_millions_of_calls() {
    // Memory that NCCL took in a communicator's first collective keeps that one in every segment.
    let steps = |n_before: usize| {
        let step = "AR8@10 BC4@11 ";
        format!("init:w skip{n_before} {step}kept {}exit", step.repeat((3_000_010 - n_before) / 2))
    };
    check(
        &[&steps(3_000_000), &steps(2_999_990), &steps(2_999_000)],
        expect![[r#"
        consistent
        note: calls are compared since 00:00:01 UTC, when the trace of rank 2 begins (--keep, --max-size), on world from call 3,000,001
    "#]],
    );
}

#[test]
fn a_rank_that_stays_away_is_named_however_little_the_others_keep() {
    check(
        &[
            &training(Some(39), 40, "wait AR8@10!"),
            &training(None, 40, "wait"),
            &training(Some(20), 40, "wait AR8@10!"),
        ],
        expect![[r#"
            RankStuck [1] of world in collective 120, lines 12 and 10, waiting [0, 2]
              ranks 0, 2 wait in call 120 on world, all_reduce(8 float32, sum) at step (train.py:10), for rank 1, which never made it: it is elsewhere; its last call was all_gather(2 float32) at step (train.py:12), 18.879 s before its end
            note: calls are compared since 00:00:01 UTC, when the trace of rank 0 begins (--keep, --max-size), on world from call 116
        "#]],
    );
    // The others have gone on for longer than they keep.
    check(
        &[&training(Some(60), 80, "wait"), &training(None, 40, "wait"), &training(Some(55), 80, "wait")],
        expect![[r#"
            RankStuck [1] of world in collective 120, lines 12 and 0, waiting [0, 2]
              ranks 0, 2 wait in call 120 on world for rank 1, which never made it: it is elsewhere; its last call was all_gather(2 float32) at step (train.py:12), 18.879 s before its end
            note: calls are compared since 00:00:01 UTC, when the trace of rank 0 begins (--keep, --max-size), on world from call 179
        "#]],
    );
    check(
        &[&training(Some(60), 80, "wait"), &training(None, 40, "wait"), &training(Some(10), 80, "wait")],
        expect![[r#"
            RankStuck [1] of world in collective 120, lines 12 and 10, waiting [0, 2]
              ranks 0, 2 wait in call 120 on world, all_reduce(8 float32, sum) at step (train.py:10), for rank 1, which never made it: it is elsewhere; its last call was all_gather(2 float32) at step (train.py:12), 18.879 s before its end
            note: calls are compared since 00:00:01 UTC, when the trace of rank 0 begins (--keep, --max-size), on world from call 179
        "#]],
    );
}

#[test]
fn a_mismatch_is_seen_where_all_know_what_they_called() {
    let other = |kept| training(Some(kept), 30, "AR8@10 BC4@11 AG2@12 AR8@10!");
    let wrong = |kept| training(Some(kept), 30, "AR8@10 AG2@12 AR8@10!");
    check(
        &[&other(5), &other(20), &wrong(13)],
        expect![[r#"
        MissingCall [2] of world in collective 91, lines 12 and 11, waiting []
          rank 2 did not call broadcast(4 float32, root 0) at step (train.py:11), as the others did, and continued with all_gather(2 float32) at step (train.py:12)
        note: calls are compared since 00:00:01 UTC, when the trace of rank 1 begins (--keep, --max-size), on world from call 59
    "#]],
    );
    // It was made before one of them begins: it is still one call behind.
    let (before, after) = ("AR8@10 BC4@11 AG2@12 ".repeat(10), "AR8@10 BC4@11 AG2@12 ".repeat(20));
    let skipped = format!("init:w {before} AR8@10 AG2@12 {after} exit");
    check(
        &[&training(Some(20), 31, "exit"), &training(None, 31, "exit"), &skipped],
        expect![[r#"
        MissingCall [2] of world in collective 59, lines 10 and 12, waiting []
          rank 2 did not call all_gather(2 float32) at step (train.py:12), as the others did, and continued with all_reduce(8 float32, sum) at step (train.py:10). Calls before 59 are not compared, because not all traces have them: the difference may be older
        note: calls are compared since 00:00:01 UTC, when the trace of rank 0 begins (--keep, --max-size), on world from call 59
    "#]],
    );
}

#[test]
fn sends_and_receives_are_compared_from_the_first_that_both_know() {
    let sends = |kept: usize, n: usize| {
        format!("init:w {}kept {}exit", "S1:64 S1:32 ".repeat(kept), "S1:64 S1:32 ".repeat(n - kept))
    };
    let receives = |kept: usize, n: usize| {
        format!("init:w {}kept {}exit", "R0:64 R0:32 ".repeat(kept), "R0:64 R0:32 ".repeat(n - kept))
    };
    check(
        &[&sends(3, 10), &receives(8, 10)],
        expect![[r#"
        consistent
        note: calls are compared since 00:00:01 UTC, when the trace of rank 1 begins (--keep, --max-size)
    "#]],
    );
    check(
        &[&sends(8, 10), &format!("{} wait", receives(3, 9).replace("exit", "wait"))],
        expect![[r#"
        UnmatchedSend [0] of world in send 18, lines 1 and 1, waiting [0]
          rank 0 called send(64 float32) at step (train.py:1) to rank 1 on world, number 18, and rank 1 never called the receive: it is elsewhere; its last call was recv(32 float32) at step (train.py:1), 18.980 s before its end
        note: calls are compared since 00:00:01 UTC, when the trace of rank 0 begins (--keep, --max-size)
    "#]],
    );
}

#[test]
fn an_order_of_two_communicators_is_compared_where_all_know_both() {
    let two = "init:w init:x ";
    let (ab, ba) = ("AR8@10 x.AR4@11 ", "x.AR4@11 AR8@10 ");
    // All in one order; one rank's window begins between the two.
    check(
        &[
            &format!("{two}{}kept {}exit", ab.repeat(9), ab.repeat(5)),
            &format!("{two}{}AR8@10 kept x.AR4@11 {}exit", ab.repeat(11), ab.repeat(2)),
            &format!("{two}{}exit", ab.repeat(14)),
        ],
        expect![[r#"
            consistent
            note: calls are compared since 00:00:01 UTC, when the trace of rank 1 begins (--keep, --max-size), on the first group of all 3 ranks from call 11
        "#]],
    );
    check(
        &[
            &format!("{two}{}kept {}{ab}exit", ab.repeat(9), ab.repeat(4)),
            &format!("{two}{}AR8@10 kept x.AR4@11 {ba}{ab}exit", ab.repeat(11)),
            &format!("{two}{}exit", ab.repeat(14)),
        ],
        expect![[r#"
            OrderInversion [0, 1] of the first group of all 3 ranks in collective 12, lines 10 and 11, waiting []
              rank 1 called collective 12 on the second group of all 3 ranks before collective 12 on the first group of all 3 ranks, rank 0 after it: NCCL requires one order on all ranks unless the GPU can run both at once
            note: calls are compared since 00:00:01 UTC, when the trace of rank 1 begins (--keep, --max-size), on the first group of all 3 ranks from call 11
        "#]],
    );
}

#[test]
fn a_communicator_that_one_closed_before_its_window_is_not_missed() {
    let use_it = "split:x=0 x.AR8@20 x.AR8@20 ";
    let step = "AR8@10 BC4@11 ".repeat(10);
    check(
        &[
            &format!("init:w {use_it}{step}x.destroy {step}exit"),
            &format!("init:w {use_it}x.destroy {step}kept {step}exit"),
        ],
        expect![[r#"
            consistent
            note: calls are compared since 00:00:01 UTC, when the trace of rank 1 begins (--keep, --max-size), on world from call 19
            note: rank 1 of the group of all 2 ranks may have closed it before their traces begin: its calls there are not compared
        "#]],
    );
}

#[test]
fn a_wait_is_held_against_what_the_window_has() {
    let step = "AR8@10 BC4@11 wait ".repeat(20);
    running::check(
        &[
            &format!("init:w {step}kept {step}AR8@10! idle6 runs"),
            &format!("init:w {step}kept {step}idle6 runs"),
            &format!("init:w {step}{step}kept AR8@10! idle6 runs"),
        ],
        expect![[r#"
            Hangs
            Error RankStuck [1]: ranks 0, 2 wait in call 80 on world, all_reduce(8 float32, sum) at step (train.py:10), for rank 1, which has not made it: it is elsewhere; its last call was broadcast(4 float32, root 0) at step (train.py:11), 62.001 s ago. It is 1 call behind, for 59.999 s so far; since 00:00:41 UTC it took at most 2.002 s from that call to the next. Rank 1 is idle: for 59.999 s no event, little processor time, and almost nothing read or written
            0: in all_reduce, 60 s ago, for [1]
            1: outside NCCL, 62 s ago, for []
            2: in all_reduce, 60 s ago, for [1]
        "#]],
    );
}

#[test]
fn the_report_says_since_when_it_compares() {
    let of = participants(&[&training(Some(20), 40, "exit"), &training(Some(30), 40, "exit")]);
    let ranks = Ranks::of(&of, &|_| None);
    let window = ranks.jobs[0].window.as_ref().expect("one begins late");
    assert_eq!((window.rank, window.first_calls[0].sequence), (1, 89));
    let mut shown = Vec::new();
    let style = text::Style { width: None, color: false, letters: text::Letters::Unicode };
    text::render(&ranks.report(), style, &mut shown).expect("text");
    let shown = String::from_utf8(shown).expect("text");
    expect![[r#"
        2 ranks

        Communication
          ok: consistent since 00:00:01 UTC: 62 calls of 2 ranks match
          calls are compared since 00:00:01 UTC, when the trace of rank 1 begins (--keep, --max-size), on world from call 89

        Where each rank was at the end
          rank  at the end  waits for  calls  last NCCL call  line            ago"#]].assert_eq(&shown.lines().take(8).collect::<Vec<_>>().join("\n"));
}
