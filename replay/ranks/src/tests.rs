//! Jobs written as text (`scene.rs`), and the report on each.

mod counts;
mod kept;
mod leaving;
mod majority;
mod names;
mod reading;
mod reproduce;
mod running;
mod shared;
mod stragglers;

use expect_test::{Expect, expect};

use super::calls::Participant;
use super::collect::collect;
use super::diagnose::diagnose;
use super::jobs::jobs;
use super::report::Ranks;
use super::scene;
use gputrace_report::render::text;

pub(super) fn participants(ranks: &[&str]) -> Vec<Participant> {
    let n_ranks = ranks.len() as u32;
    let texts = (0..).zip(ranks).filter(|(_, text)| !text.is_empty());
    texts.map(|(rank, text)| collect(&scene::rank(rank, n_ranks, text))).collect()
}

fn check(ranks: &[&str], expected: Expect) {
    let participants = participants(ranks);
    let (jobs, alone) = jobs(&participants);
    assert!(alone.is_empty(), "{alone:?}");
    let mut text = String::new();
    for job in &jobs {
        let diagnosis = diagnose(&participants, job);
        for finding in &diagnosis.findings {
            let place = |call: &Option<super::findings::CallText>| {
                call.as_ref().and_then(|call| call.place.as_ref()).map_or(0, |place| place.line)
            };
            text += &format!(
                "{:?} {:?} of {} in {} {}, lines {} and {}, waiting {:?}{}\n  {}\n",
                finding.kind,
                finding.ranks,
                finding.communicator.as_deref().unwrap_or("-"),
                finding.lane.unwrap_or("-"),
                finding.sequence.map_or("-".into(), |n| n.to_string()),
                place(&finding.own),
                place(&finding.others),
                finding.waiting,
                if finding.count > 1 { format!(" x{}", finding.count) } else { String::new() },
                finding.text
            );
        }
        if diagnosis.findings.is_empty() {
            text += "consistent\n";
        }
        for note in &diagnosis.notes {
            text += &format!("note: {note}\n");
        }
    }
    expected.assert_eq(&text);
}

#[test]
fn ranks_that_call_alike_are_consistent() {
    let rank = "init:w AR8@10 BC4@11 AR8@10 BC4@11 exit";
    check(
        &[rank, rank, rank],
        expect![[r#"
        consistent
    "#]],
    );
    // Stopped at any moment: what is in flight is no hang.
    let steps = "AR8@10 BC4@11 ".repeat(9480);
    check(
        &[&format!("init:w {steps}"), &format!("init:w {steps} AR8@10"), &format!("init:w {steps}")],
        expect![[r#"
        consistent
    "#]],
    );
}

#[test]
fn a_rank_that_skips_a_call_and_goes_on() {
    let step = "AR8@10 BC4@11 AG2@12 ";
    let (whole, hole) =
        (format!("init:w {}", step.repeat(4)), format!("init:w {step} AR8@10 AG2@12 {}", step.repeat(2)));
    check(
        &[&whole, &whole, &hole, &whole],
        expect![[r#"
            MissingCall [2] of world in collective 4, lines 12 and 11, waiting []
              rank 2 did not call broadcast(4 float32, root 0) at step (train.py:11), as the others did, and continued with all_gather(2 float32) at step (train.py:12)
        "#]],
    );
}

#[test]
fn calls_that_block_show_only_the_first_difference() {
    let step = "AR8@10 BC4@11 ";
    check(
        &[
            &format!("init:w {step} AR8@10!"),
            &format!("init:w {step} AR8@10!"),
            &format!("init:w {step} BC4@11!"),
        ],
        expect![[r#"
            MissingCall [2] of world in collective 2, lines 11 and 10, waiting [0, 1]
              rank 2 did not call all_reduce(8 float32, sum) at step (train.py:10), as the others did, and continued with broadcast(4 float32, root 0) at step (train.py:11)
        "#]],
    );
    check(
        &["init:w AR8@10 AR8@10!", "init:w AR8@10 AR4@10!", "init:w AR8@10 AR8@10!"],
        expect![[r#"
            SizeMismatch [1] of world in collective 1, lines 10 and 10, waiting [0, 2]
              rank 1 called all_reduce(4 float32, sum) at step (train.py:10) where the others called all_reduce(8 float32, sum) at step (train.py:10)
        "#]],
    );
    check(
        &["init:w AR8@10 AR8@10!", "init:w AR8@10 AG3@13!", "init:w AR8@10 AR8@10!"],
        expect![[r#"
            ExtraCall [1] of world in collective 1, lines 13 and 10, waiting [0, 2]
              rank 1 called all_gather(3 float32) at step (train.py:13), which the others did not; they called all_reduce(8 float32, sum) at step (train.py:10)
        "#]],
    );
}

#[test]
fn arguments_that_differ() {
    check(
        &["init:w AR8@10!", "init:w AR8:f16@10!", "init:w AR8@10!"],
        expect![[r#"
            DtypeMismatch [1] of world in collective 0, lines 10 and 10, waiting [0, 2]
              rank 1 called all_reduce(8 float16, sum) at step (train.py:10) where the others called all_reduce(8 float32, sum) at step (train.py:10)
        "#]],
    );
    check(
        &["init:w AR8@10!", "init:w AR8:max@10!", "init:w AR8@10!"],
        expect![[r#"
            RedopMismatch [1] of world in collective 0, lines 10 and 10, waiting [0, 2]
              rank 1 called all_reduce(8 float32, max) at step (train.py:10) where the others called all_reduce(8 float32, sum) at step (train.py:10)
        "#]],
    );
    check(
        &["init:w BC8@10!", "init:w BC8:r1@10!", "init:w BC8@10!"],
        expect![[r#"
            RootMismatch [1] of world in collective 0, lines 10 and 10, waiting [0, 2]
              rank 1 called broadcast(8 float32, root 1) at step (train.py:10) where the others called broadcast(8 float32, root 0) at step (train.py:10)
        "#]],
    );
    check(
        &["init:w AR8@10!", "init:w AG8@10!", "init:w AR8@10!"],
        expect![[r#"
            OpMismatch [1] of world in collective 0, lines 10 and 10, waiting [0, 2]
              rank 1 called all_gather(8 float32) at step (train.py:10) where the others called all_reduce(8 float32, sum) at step (train.py:10)
        "#]],
    );
}

#[test]
fn a_rank_that_is_elsewhere_is_waited_for() {
    check(
        &["init:w AR8@10 AR8@11!", "init:w AR8@10", "init:w AR8@10 AR8@11!"],
        expect![[r#"
            RankStuck [1] of world in collective 1, lines 10 and 11, waiting [0, 2]
              ranks 0, 2 wait in call 1 on world, all_reduce(8 float32, sum) at step (train.py:11), for rank 1, which never made it: it is elsewhere; its last call was all_reduce(8 float32, sum) at step (train.py:10), 18.998 s before its end
        "#]],
    );
    check(
        &["init:w AR8@10 AR8@11!", "init:w AR8@10 exit", "init:w AR8@10 AR8@11!"],
        expect![[r#"
            RankExited [1] of world in collective 1, lines 10 and 11, waiting [0, 2]
              ranks 0, 2 wait in call 1 on world, all_reduce(8 float32, sum) at step (train.py:11), for rank 1, which never made it: it exited by itself; its last call was all_reduce(8 float32, sum) at step (train.py:10), 1.0 ms before its end
        "#]],
    );
    check(
        &["init:w AR8@10 AR8@11!", "init:w AR8@10 killed", "init:w AR8@10 AR8@11!"],
        expect![[r#"
            RankKilled [1] of world in collective 1, lines 10 and 11, waiting [0, 2]
              ranks 0, 2 wait in call 1 on world, all_reduce(8 float32, sum) at step (train.py:11), for rank 1, which never made it: it was killed, crashed, or called `_exit`, 18.997 s before the last; its last call was all_reduce(8 float32, sum) at step (train.py:10), 1.0 ms before its end
        "#]],
    );
    check(
        &["init:w AR8@10 AR8@11!", "init:w AR8@10 abort@13", "init:w AR8@10 AR8@11!"],
        expect![[r#"
            Abort [1] of world in collective 1, lines 13 and 11, waiting [0, 2]
              ranks 0, 2 wait in call 1 on world, all_reduce(8 float32, sum) at step (train.py:11), for rank 1, which never made it: it aborted the communicator with comm_abort at step (train.py:13)
        "#]],
    );
    check(
        &["init:w AR8@10 AR8@11!", "", "init:w AR8@10 AR8@11!"],
        expect![[r#"
            NoTrace [1] of - in - -, lines 0 and 11, waiting [0, 2]
              the calls of ranks 0, 2 match, and none of these ranks did anything in the last 18.997 s, after all_reduce(8 float32, sum) at step (train.py:11). Rank 1 has no trace, and the others may wait for that. It may also be the GPU, the network, or something outside NCCL. The trace of rank 1 would decide
        "#]],
    );
}

#[test]
fn who_has_no_trace_may_be_the_one_that_all_wait_for() {
    // In the call, or behind it; in one that waits for all, or for the one.
    let (in_it, behind) = ("init:w AR8@10 AR8@11!", "init:w AR8@10 AR8@11");
    check(
        &[in_it, "", in_it, ""],
        expect![[r#"
            NoTrace [1, 3] of - in - -, lines 0 and 11, waiting [0, 2]
              the calls of ranks 0, 2 match, and none of these ranks did anything in the last 18.997 s, after all_reduce(8 float32, sum) at step (train.py:11). Ranks 1, 3 have no trace, and the others may wait for that. It may also be the GPU, the network, or something outside NCCL. The trace of ranks 1, 3 would decide
        "#]],
    );
    check(
        &["", behind, behind],
        expect![[r#"
            NoTrace [0] of - in - -, lines 0 and 11, waiting [1, 2]
              the calls of ranks 1, 2 match, and none of these ranks did anything in the last 18.997 s, after all_reduce(8 float32, sum) at step (train.py:11). Rank 0 has no trace, and the others may wait for that. It may also be the GPU, the network, or something outside NCCL. The trace of rank 0 would decide
        "#]],
    );
    check(
        &["init:w AR8@10 S1:64@20!", "", "init:w AR8@10"],
        expect![[r#"
            NoTrace [1] of - in - -, lines 0 and 20, waiting [0, 2]
              the calls of ranks 0, 2 match, and none of these ranks did anything in the last 18.997 s, after send(64 float32) at step (train.py:20). Rank 1 has no trace, and the others may wait for that. It may also be the GPU, the network, or something outside NCCL. The trace of rank 1 would decide
        "#]],
    );
    // It is known for whom the others wait, and that these were at work.
    check(
        &[in_it, "init:w AR8@10", ""],
        expect![[r#"
            RankStuck [1] of world in collective 1, lines 10 and 11, waiting [0]
              rank 0 waits in call 1 on world, all_reduce(8 float32, sum) at step (train.py:11), for rank 1, which never made it: it is elsewhere; its last call was all_reduce(8 float32, sum) at step (train.py:10), 18.998 s before its end
            NoTrace [2] of - in - -, lines 0 and 0, waiting []
              rank 2 of 3 has no trace: it is not known what it called, and who waits for it
        "#]],
    );
    check(
        &["init:w AR8@10 exit", "", "init:w AR8@10 exit"],
        expect![[r#"
        NoTrace [1] of - in - -, lines 0 and 0, waiting []
          rank 1 of 3 has no trace: it is not known what it called, and who waits for it
    "#]],
    );
}

#[test]
fn a_rank_that_never_comes_to_the_making_of_a_communicator() {
    check(
        &["init:w@5!", "init:w@5!", "wait"],
        expect![[r#"
            MissingAtInit [2] of world in - -, lines 0 and 5, waiting [0, 1]
              ranks 0, 1 wait in comm_init at step (train.py:5) of world for rank 2, which never joined: it is elsewhere; no NCCL call of it was seen
        "#]],
    );
    check(
        &["init:w@5!", "init:w@5!", ""],
        expect![[r#"
            MissingAtInit [2] of world in - -, lines 0 and 5, waiting [0, 1]
              ranks 0, 1 wait in comm_init at step (train.py:5) of world for rank 2, which never joined: it has no trace
        "#]],
    );
    check(
        &["init:w split:x=0@6!", "init:w", "init:w split:x=0@6!"],
        expect![[r#"
            MissingInSplit [1] of world in management 0, lines 1 and 6, waiting [0, 2]
              ranks 0, 2 wait in comm_split at step (train.py:6) on world for rank 1, which never made its call 0 there: it is elsewhere; its last call was comm_init at step (train.py:1), 18.999 s before its end
        "#]],
    );
    check(
        &["init:w shrink:x=1@6!", "init:w killed", "init:w shrink:x=1@6!", "init:w AR8@3!"],
        expect![[r#"
            MissingInShrink [3] of world in management 0, lines 3 and 6, waiting [0, 2, 3]
              rank 3 never came: rank 3 in all_reduce(8 float32, sum) at step (train.py:3) on world, call 0, for ranks 0, 2; ranks 0, 2 in comm_shrink at step (train.py:6) on world, call 0, for rank 3
            RankKilled [1] of world in collective 0, lines 1 and 3, waiting [3]
              rank 3 waits in call 0 on world, all_reduce(8 float32, sum) at step (train.py:3), for rank 1, which never made it: it was killed, crashed, or called `_exit`, 18.998 s before the last; its last call was comm_init at step (train.py:1), 1.0 ms before its end
        "#]],
    );
    check(
        &["init:w shrink:x=1@6 exit", "init:w killed", "init:w shrink:x=1@6 exit"],
        expect![[r#"
        consistent
    "#]],
    );
}

#[test]
fn the_rank_that_never_makes_a_communicator_of_some_ranks_is_named() {
    // Even and odd ranks make one each; rank 4 of eight sits elsewhere.
    check(
        &[
            "init:w init:e=0/4@6!",
            "init:w init:o=0/4 o.AR8@9",
            "init:w init:e=1/4@6!",
            "init:w init:o=1/4 o.AR8@9",
            "init:w wait",
            "init:w init:o=2/4 o.AR8@9",
            "init:w init:e=3/4@6!",
            "init:w init:o=3/4 o.AR8@9",
        ],
        expect![[r#"
            MissingAtInit [4] of the group of ranks 0, 2, 6 and one more (4 of 8) in - -, lines 1 and 6, waiting [0, 2, 6]
              ranks 0, 2, 6 wait in comm_init at step (train.py:6) of the group of ranks 0, 2, 6 and one more (4 of 8) for rank 4, which never joined: it is elsewhere; its last call was comm_init at step (train.py:1), 18.999 s before its end
        "#]],
    );
    // Nobody can say which of two it was.
    check(
        &["init:w init:e=0/3@6!", "init:w wait", "init:w wait", "init:w init:e=2/3@6!"],
        expect![[r#"
            MissingAtInit [] of the group of ranks 0, 3 and one more (3 of 4) in - -, lines 0 and 6, waiting [0, 3]
              ranks 0, 3 wait in comm_init at step (train.py:6) of the group of ranks 0, 3 and one more (3 of 4) for its rank 1, which never joined: it is one of ranks 1, 2, which did not call it
        "#]],
    );
}

#[test]
fn a_rank_ran_out_of_memory_where_pytorch_gave_up_and_not_where_it_asked_again() {
    check(
        &["init:w AR8@10 AR8@11!", "init:w AR8@10 refused@12 refused@12 oom@12 exit"],
        expect![[r#"
            OutOfMemory [1] of world in collective 1, lines 12 and 11, waiting [0]
              rank 0 waits in call 1 on world, all_reduce(8 float32, sum) at step (train.py:11), for rank 1, which never made it: it ran out of memory: a request for 1.00 GiB was refused at step (train.py:12)
        "#]],
    );
    check(
        &["init:w AR8@10 AR8@11!", "init:w AR8@10 refused@12 exit"],
        expect![[r#"
            RankExited [1] of world in collective 1, lines 10 and 11, waiting [0]
              rank 0 waits in call 1 on world, all_reduce(8 float32, sum) at step (train.py:11), for rank 1, which never made it: it exited by itself; its last call was all_reduce(8 float32, sum) at step (train.py:10), 2.0 ms before its end; or rank 0 made one call too many, which cannot be determined
        "#]],
    );
}

#[test]
fn nccl_that_was_refused_memory_ran_out_of_memory() {
    check(
        &["init:w AR8@10 AR8@11!", "init:w AR8@10 short@11 exit"],
        expect![[r#"
            OutOfMemory [1] of world in collective 1, lines 11 and 11, waiting [0]
              rank 0 waits in call 1 on world, all_reduce(8 float32, sum) at step (train.py:11), for rank 1, which never made it: it ran out of memory in all_reduce at step (train.py:11): NCCL was refused 32.00 MiB there, and returned 'unhandled CUDA error' (1)
        "#]],
    );
}

#[test]
fn everybody_who_is_awaited_is_named() {
    let on_world = "init:w init:x AR8@10!";
    let on_other = "init:w init:x x.AR4@20!";
    check(
        &[on_world, on_world, on_other, on_other],
        expect![[r#"
            SwappedCommunicators [0, 1, 2, 3] of the first group of all 4 ranks in collective 0, lines 10 and 20, waiting [0, 1, 2, 3]
              ranks 0 to 3 wait for each other: ranks 0, 1 in all_reduce(8 float32, sum) at step (train.py:10) on the first group of all 4 ranks, call 0, for ranks 2, 3; ranks 2, 3 in all_reduce(4 float32, sum) at step (train.py:20) on the second group of all 4 ranks, call 0, for ranks 0, 1
        "#]],
    );
}

#[test]
fn one_finding_is_one_finding() {
    let texts = ["init:w AR8@10 exit", "init:w AR16@10 exit", "init:w AR8@10 exit"];
    let participants: Vec<Participant> =
        (0..).zip(texts).map(|(rank, text)| collect(&scene::rank(rank, 3, text))).collect();
    let report = Ranks::of(&participants, &|_| None).report();
    let mut shown = Vec::new();
    text::render(
        &report,
        text::Style { width: None, color: false, letters: text::Letters::Unicode },
        &mut shown,
    )
    .unwrap();
    let shown = String::from_utf8(shown).unwrap();
    assert!(shown.contains("inconsistent: 1 finding\n"), "{shown}");
}

#[test]
fn one_rank_that_is_ahead_is_one_finding_about_that_rank() {
    let base = "init:w AR8@10 AR8@10 AR8@10";
    let (ended, ahead) = (format!("{base} exit"), format!("{base} AR8@12!"));
    let ranks: Vec<&str> = (0..16).map(|rank| if rank == 3 { &*ahead } else { &*ended }).collect();
    check(
        &ranks,
        expect![[r#"
            ExtraCall [3] of world in collective 3, lines 12 and 10, waiting []
              rank 3 waits in call 3 on world, all_reduce(8 float32, sum) at step (train.py:12), which ranks 0 to 2, 4 to 15 never made: they exited by themselves
        "#]],
    );
    // Half and half: nobody knows who is right.
    check(
        &[&ended, &ahead],
        expect![[r#"
            RankExited [0] of world in collective 3, lines 10 and 12, waiting [1]
              rank 1 waits in call 3 on world, all_reduce(8 float32, sum) at step (train.py:12), for rank 0, which never made it: it exited by itself; its last call was all_reduce(8 float32, sum) at step (train.py:10), 1.0 ms before its end; or rank 1 made one call too many, which cannot be determined
        "#]],
    );
    // Most wait for the one that ended early.
    check(
        &[&ahead, &ahead, &ended],
        expect![[r#"
            RankExited [2] of world in collective 3, lines 10 and 12, waiting [0, 1]
              ranks 0, 1 wait in call 3 on world, all_reduce(8 float32, sum) at step (train.py:12), for rank 2, which never made it: it exited by itself; its last call was all_reduce(8 float32, sum) at step (train.py:10), 1.0 ms before its end
        "#]],
    );
}

#[test]
fn thousands_of_findings_that_are_alike_are_counted_and_not_printed() {
    // Every call of rank 1 has another size, on another line.
    let calls = |own: u64| {
        let each: String = (0..3000).map(|n| format!("AR{}@{} ", 8 + own * (n + 1), 10 + n)).collect();
        format!("init:w {each}exit")
    };
    let participants: Vec<Participant> =
        [0, 1, 0].iter().zip(0..).map(|(own, rank)| collect(&scene::rank(rank, 3, &calls(*own)))).collect();
    let ranks = Ranks::of(&participants, &|_| None);
    let mut shown = Vec::new();
    text::render(
        &ranks.report(),
        text::Style { width: None, color: false, letters: text::Letters::Unicode },
        &mut shown,
    )
    .unwrap();
    let shown = String::from_utf8(shown).unwrap();
    assert_eq!(shown.matches(". Other size").count(), 3, "{shown}");
    assert!(shown.contains("2,997 more findings, listed by --json: 2,997 other size"), "{shown}");
    assert_eq!(serde_json::to_string(&ranks).unwrap().matches("size_mismatch").count(), 3000);
}

#[test]
fn sends_and_receives() {
    check(
        &["init:w S1:64@20 exit", "init:w R0:64@21 exit"],
        expect![[r#"
        consistent
    "#]],
    );
    check(
        &["init:w S1:64@20! ", "init:w R0:32@21! "],
        expect![[r#"
            PeerSizeMismatch [0, 1] of world in send 0, lines 20 and 21, waiting []
              rank 0 called send(64 float32) at step (train.py:20) to rank 1, which called recv(32 float32) at step (train.py:21)
        "#]],
    );
    check(
        &["init:w S1:64@20!", "init:w AR8@10!"],
        expect![[r#"
            UnmatchedSend [0] of world in send 0, lines 20 and 10, waiting [0, 1]
              rank 0 called send(64 float32) at step (train.py:20) on world and rank 1 never called the receive: it waits in all_reduce(8 float32, sum) at step (train.py:10) for the others
        "#]],
    );
    check(
        &["init:w AR8@10!", "init:w R0:64@20!"],
        expect![[r#"
            UnmatchedRecv [1] of world in recv 0, lines 20 and 10, waiting [0, 1]
              rank 1 called recv(64 float32) at step (train.py:20) on world and rank 0 never called the send: it waits in all_reduce(8 float32, sum) at step (train.py:10) for the others
        "#]],
    );
    check(
        &["init:w S1:64@20!", "init:w S2:64@20!", "init:w S0:64@20!"],
        expect![[r#"
            DeadlockCycle [0, 1, 2] of world in send 0, lines 20 and 20, waiting [0, 1, 2]
              ranks 0 to 2 wait for each other: rank 2 in send(64 float32) at step (train.py:20) on world, call 0, for rank 0; rank 0 in send(64 float32) at step (train.py:20) on world, call 0, for rank 1; rank 1 in send(64 float32) at step (train.py:20) on world, call 0, for rank 2
        "#]],
    );
    check(
        &["init:w S1:64@20!", "init:w exit"],
        expect![[r#"
            UnmatchedSend [0] of world in send 0, lines 20 and 20, waiting [0]
              rank 0 called send(64 float32) at step (train.py:20) to rank 1 on world, number 0, and rank 1 never called the receive: it exited by itself; its last call was comm_init at step (train.py:1), 1.0 ms before its end
        "#]],
    );
}

#[test]
fn two_communicators_in_different_orders() {
    check(
        &["init:w init:x AR8@10!", "init:w init:x AR8@10!", "init:w init:x x.AR8@11!"],
        expect![[r#"
            SwappedCommunicators [2] of the second group of all 3 ranks in collective 0, lines 11 and 10, waiting [0, 1, 2]
              ranks 0 to 2 wait for each other: ranks 0, 1 in all_reduce(8 float32, sum) at step (train.py:10) on the first group of all 3 ranks, call 0, for rank 2; rank 2 in all_reduce(8 float32, sum) at step (train.py:11) on the second group of all 3 ranks, call 0, for ranks 0, 1
        "#]],
    );
    check(
        &["init:w init:x AR8@10!", "init:w init:x AR8@10!", "init:w init:x x.AR8@10!"],
        expect![[r#"
            WrongCommunicator [2] of the second group of all 3 ranks in collective 0, lines 10 and 10, waiting [0, 1, 2]
              rank 2 made the call of the others on another communicator: ranks 0, 1 in all_reduce(8 float32, sum) at step (train.py:10) on the first group of all 3 ranks, call 0, for rank 2; rank 2 in all_reduce(8 float32, sum) at step (train.py:10) on the second group of all 3 ranks, call 0, for ranks 0, 1
        "#]],
    );
    // As on a GPU: every call returns, and all wait for ever.
    check(
        &["init:w init:x AR8@10 x.AR8@11", "init:w init:x AR8@10 x.AR8@11", "init:w init:x x.AR8@11 AR8@10"],
        expect![[r#"
            OrderInversion [0, 2] of the first group of all 3 ranks in collective 0, lines 10 and 11, waiting []
              rank 2 called collective 0 on the second group of all 3 ranks before collective 0 on the first group of all 3 ranks, rank 0 after it: NCCL requires one order on all ranks unless the GPU can run both at once; all ranks wait, and this is the likely reason
        "#]],
    );
}

#[test]
fn a_group_that_is_never_closed() {
    check(
        &["init:w AR8@10 ( AR8@11 )!", "init:w AR8@10 (@9 AR8@11", "init:w AR8@10 ( AR8@11 )!"],
        expect![[r#"
            GroupIncomplete [1] of world in collective 1, lines 9 and 11, waiting [0, 2]
              ranks 0, 2 wait in call 1 on world, all_reduce(8 float32, sum) at step (train.py:11), for rank 1, which never made it: it opened a group at step (train.py:9) and never closed it: the call in it never started
        "#]],
    );
}

#[test]
fn two_ranks_have_no_majority() {
    check(
        &["init:w AR8@10!", "init:w AR4@10!"],
        expect![[r#"
            SizeMismatch [1] of world in collective 0, lines 10 and 10, waiting [0]
              rank 1 called all_reduce(4 float32, sum) at step (train.py:10) where rank 0 called all_reduce(8 float32, sum) at step (train.py:10); neither side has more ranks, so the wrong one cannot be determined
        "#]],
    );
}

#[test]
fn a_job_that_is_stopped_at_work_waits_for_nobody() {
    let others = "init:w AR8@10 BC4@11 AR8@10! wait400000 killed";
    check(
        &[others, others, "init:w AR8@10 BC4@11 wait401000 killed"],
        expect![[r#"
        consistent
    "#]],
    );
    // A rank that is away for longer than a busy machine keeps one waiting.
    let others = "init:w AR8@10 BC4@11 AR8@10! wait900000 killed";
    check(
        &[others, others, "init:w AR8@10 BC4@11 wait901000 killed"],
        expect![[r#"
            RankStuck [2] of world in collective 2, lines 11 and 10, waiting [0, 1]
              ranks 0, 1 wait in call 2 on world, all_reduce(8 float32, sum) at step (train.py:10), for rank 2, which never made it: it is elsewhere; its last call was broadcast(4 float32, root 0) at step (train.py:11), 902.0 ms before its end
        "#]],
    );
}
