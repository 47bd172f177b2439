//! Jobs that run: what waits, what hangs, and what is only slow.

use expect_test::{Expect, expect};
use gputrace_schemas::event::Nanos;

use super::participants;
use crate::calls::Ending;
use crate::report::{Ranks, Verdict};

pub(super) fn check(ranks: &[&str], expected: Expect) {
    let mut participants = participants(ranks);
    for (participant, text) in participants.iter_mut().zip(ranks.iter().filter(|text| !text.is_empty())) {
        if text.ends_with("runs") {
            participant.ending = Ending::Unknown;
        }
    }
    let ranks = Ranks::of(&participants, &|_| None);
    let mut text = String::new();
    for job in &ranks.jobs {
        text += &format!("{:?}\n", job.verdict);
        for finding in &job.findings {
            text +=
                &format!("{:?} {:?} {:?}: {}\n", finding.severity, finding.kind, finding.ranks, finding.text);
        }
        for standing in &job.standings {
            let idle = standing.idle_ns.unwrap_or(0) / 1_000_000_000;
            text += &format!(
                "{}: {}, {idle} s ago, for {:?}\n",
                standing.rank, standing.state, standing.waits_for
            );
        }
    }
    expected.assert_eq(&text);
}

/// Two calls a step, half a second apart.
fn steps(n: usize) -> String {
    format!("init:w {}", "AR8@10 BC4@11 wait500000 ".repeat(n))
}

#[test]
fn a_rank_that_stands_still_hangs_after_half_a_minute_and_waits_before() {
    let steps = steps(8);
    let (waits, late) = (format!("{steps} AR8@10 BC4@11 AR8@10"), steps);
    check(
        &[&format!("{waits} idle1 runs"), &format!("{late} idle1 runs"), &format!("{waits} idle1 runs")],
        expect![[r#"
            Waits
            Warning RankStuck [1]: ranks 0, 2 wait in call 16 on world, all_reduce(8 float32, sum) at step (train.py:10), for rank 1, which has not made it: it is elsewhere; its last call was broadcast(4 float32, root 0) at step (train.py:11), 10.500 s ago. It is up to 3 calls behind, for 9.999 s so far; until now it took at most 501.0 ms from that call to the next. Rank 1 has shown no event for 9.999 s
            0: waits, calls given, 10 s ago, for [1]
            1: outside NCCL, 10 s ago, for []
            2: waits, calls given, 10 s ago, for [1]
        "#]],
    );
    check(
        &[&format!("{waits} idle4 runs"), &format!("{late} idle4 runs"), &format!("{waits} idle4 runs")],
        expect![[r#"
            Hangs
            Error RankStuck [1]: ranks 0, 2 wait in call 16 on world, all_reduce(8 float32, sum) at step (train.py:10), for rank 1, which has not made it: it is elsewhere; its last call was broadcast(4 float32, root 0) at step (train.py:11), 40.500 s ago. It is up to 3 calls behind, for 39.999 s so far; until now it took at most 501.0 ms from that call to the next. Rank 1 is idle: for 39.999 s no event, little processor time, and almost nothing read or written
            0: waits, calls given, 40 s ago, for [1]
            1: outside NCCL, 40 s ago, for []
            2: waits, calls given, 40 s ago, for [1]
        "#]],
    );
}

#[test]
fn a_rank_that_works_is_slow_and_does_not_hang() {
    let steps = steps(8);
    check(
        &[&format!("{steps} AR8@10! idle20 runs"), &format!("{steps} busy20 runs")],
        expect![[r#"
        Waits
        Warning RankStuck [1]: rank 0 waits in call 16 on world, all_reduce(8 float32, sum) at step (train.py:10), for rank 1, which has not made it: it is elsewhere; its last call was broadcast(4 float32, root 0) at step (train.py:11), 200.500 s ago. It is 1 call behind, for 199.999 s so far; until now it took at most 501.0 ms from that call to the next. Rank 1 is working: 90 % of a processor, 5.00 MiB per second read and written by its process and its child processes
        0: in all_reduce, 200 s ago, for [1]
        1: outside NCCL, 200 s ago, for []
    "#]],
    );
    // It has stopped to do so.
    check(
        &[&format!("{steps} AR8@10! idle8 runs"), &format!("{steps} busy3 idle5 runs")],
        expect![[r#"
        Hangs
        Error RankStuck [1]: rank 0 waits in call 16 on world, all_reduce(8 float32, sum) at step (train.py:10), for rank 1, which has not made it: it is elsewhere; its last call was broadcast(4 float32, root 0) at step (train.py:11), 80.500 s ago. It is 1 call behind, for 79.999 s so far; until now it took at most 501.0 ms from that call to the next. Rank 1 is idle: for 50.000 s no event, little processor time, and almost nothing read or written
        0: in all_reduce, 80 s ago, for [1]
        1: outside NCCL, 80 s ago, for []
    "#]],
    );
}

#[test]
fn what_took_as_long_before_is_no_wait() {
    let saves = |n: usize| "AR8@10 BC4@11 wait500000 AR8@10 BC4@11 wait40000000 ".repeat(n);
    let steps = format!("{} {}", steps(8), saves(3));
    check(
        &[&format!("{steps} AR8@10! idle5 runs"), &format!("{steps} idle5 runs")],
        expect![[r#"
            Consistent
            0: in all_reduce, 50 s ago, for [1]
            1: outside NCCL, 90 s ago, for []
        "#]],
    );
    check(
        &[&format!("{steps} AR8@10! idle9 runs"), &format!("{steps} idle9 runs")],
        expect![[r#"
            Hangs
            Error RankStuck [1]: rank 0 waits in call 28 on world, all_reduce(8 float32, sum) at step (train.py:10), for rank 1, which has not made it: it is elsewhere; its last call was broadcast(4 float32, root 0) at step (train.py:11), 130.000 s ago. It is 1 call behind, for 89.999 s so far; until now it took at most 40.001 s from that call to the next. Rank 1 is idle: for 89.999 s no event, little processor time, and almost nothing read or written
            0: in all_reduce, 90 s ago, for [1]
            1: outside NCCL, 130 s ago, for []
        "#]],
    );
}

#[test]
fn a_long_first_step_is_not_what_is_usual() {
    let steps = format!("init:w AR8@10 BC4@11 wait90000000 {}", steps(8).trim_start_matches("init:w"));
    check(
        &[&format!("{steps} AR8@10! idle5 runs"), &format!("{steps} idle5 runs")],
        expect![[r#"
        Hangs
        Error RankStuck [1]: rank 0 waits in call 18 on world, all_reduce(8 float32, sum) at step (train.py:10), for rank 1, which has not made it: it is elsewhere; its last call was broadcast(4 float32, root 0) at step (train.py:11), 50.500 s ago. It is 1 call behind, for 49.999 s so far; until now it took at most 501.0 ms from that call to the next. Rank 1 is idle: for 49.999 s no event, little processor time, and almost nothing read or written
        0: in all_reduce, 50 s ago, for [1]
        1: outside NCCL, 50 s ago, for []
    "#]],
    );
}

#[test]
fn a_rank_whose_recorder_is_gone_is_not_known() {
    let steps = steps(8);
    check(
        &[&format!("{steps} AR8@10 idle9 runs"), &format!("{steps} AR8@10 idle1 runs")],
        expect![[r#"
        Incomplete
        Warning TraceStops [1]: the trace of rank 1 stops 80.000 s before the others: its recorder or its machine ended. It is not known what the rank did since, or whether it still runs
        0: outside NCCL, 90 s ago, for []
        1: outside NCCL, 10 s ago, for []
    "#]],
    );
}

#[test]
fn a_recorder_that_gets_no_processor_makes_no_hang() {
    let steps = steps(8);
    let texts = [format!("{steps} AR8@10! idle9 runs"), format!("{steps} idle1 runs")];
    let mut participants = participants(&[&texts[0], &texts[1]]);
    for participant in &mut participants {
        participant.ending = Ending::Unknown;
    }
    let verdict = |participants: &[_]| Ranks::of(participants, &|_| None).jobs[0].verdict;
    let now = Nanos(participants[0].alive_at.0);
    participants.iter_mut().for_each(|participant| participant.is_written_until(now));
    assert_eq!(
        participants.iter().map(|participant| participant.recorder_is_late).collect::<Vec<_>>(),
        [false, true]
    );
    let said = verdict(&participants);
    assert!(!matches!(said, Verdict::Hangs | Verdict::Inconsistent), "{said:?}");
    // With its heartbeats it hangs.
    let texts = [texts[0].clone(), format!("{steps} idle9 runs")];
    let mut participants = super::participants(&[&texts[0], &texts[1]]);
    participants.iter_mut().for_each(|participant| participant.ending = Ending::Unknown);
    assert_eq!(verdict(&participants), Verdict::Hangs);
}

#[test]
fn ranks_at_the_same_call_are_consistent_while_they_run() {
    let steps = steps(8);
    check(
        &[&format!("{steps} AR8@10 idle1 runs"), &format!("{steps} AR8@10 idle1 runs")],
        expect![[r#"
        Consistent
        0: outside NCCL, 10 s ago, for []
        1: outside NCCL, 10 s ago, for []
    "#]],
    );
    check(
        &["init:w AR8@10! idle4 runs", "alone busy1 runs"],
        expect![[r#"
        Incomplete
        Warning NoTrace [1]: the calls of rank 0 match, and none of these ranks did anything in the last 40.000 s, after all_reduce(8 float32, sum) at step (train.py:10). Rank 1 has no trace, and the others may wait for that. It may also be the GPU, the network, or something outside NCCL. The trace of rank 1 would decide
        0: in all_reduce, 40 s ago, for []
    "#]],
    );
}

#[test]
fn a_rank_that_is_busy_in_one_function_for_long_hangs_and_one_that_moves_on_does_not() {
    let steps = steps(8);
    let waits = format!("{steps} AR8@10! idle70 runs");
    let verdict = |late: &str| {
        let mut participants = participants(&[&waits, &format!("{steps} {late} runs")]);
        participants.iter_mut().for_each(|one| one.ending = Ending::Unknown);
        let ranks = Ranks::of(&participants, &|_| None);
        let job = &ranks.jobs[0];
        let text = job.findings[0].text.rsplit(". ").next().unwrap_or_default().to_owned();
        (format!("{:?}", job.verdict), text)
    };
    let (stays, text) = verdict("busy6 read60@301 busy18 read240@302 busy36 read600@300 busy2");
    assert_eq!(stays, "Hangs", "{text}");
    assert!(
        text.starts_with("Rank 1 is busy without progress: 90 % of a processor, no event for "),
        "{text}"
    );
    assert!(text.ends_with("its main thread was in spin3 (train.py) at each of 3 readings"), "{text}");
    // Another function at one of the readings, too few of them, or events in between.
    for healthy in [
        "busy6 read60@301 busy18 read240@401 busy36 read600@300 busy2",
        "busy6 read60@301 busy18 read240@302 busy38",
        "busy6 read60@301 busy18 read240@302 busy30 refused read60@301 busy8",
        "busy62",
    ] {
        let (verdict, text) = verdict(healthy);
        assert_eq!(verdict, "Waits", "{healthy}: {text}");
        assert!(text.starts_with("Rank 1 is working: 90 % of a processor"), "{healthy}: {text}");
    }
    // Without any reading, in the end.
    let waits = format!("{steps} AR8@10! idle190 runs");
    let mut participants = participants(&[&waits, &format!("{steps} busy190 runs")]);
    participants.iter_mut().for_each(|one| one.ending = Ending::Unknown);
    assert_eq!(format!("{:?}", Ranks::of(&participants, &|_| None).jobs[0].verdict), "Hangs");
}
