//! Programs of jobs whose ranks differ.

use super::participants;
use crate::jobs::jobs;
use crate::reproduce::collectives;

/// The calls of each rank, or why there is no program.
fn calls(ranks: &[&str]) -> String {
    let participants = participants(ranks);
    let (jobs, _) = jobs(&participants);
    match collectives(&participants, &jobs[0]) {
        Ok(found) => {
            let from = found.text.find("def rank_0").expect("rank 0 is there");
            let rest = &found.text[from..];
            let until = rest.find("def calls").expect("the end is there");
            assert!(!found.text.contains("train.py"), "{}", found.text);
            rest[..until].split_whitespace().collect::<Vec<_>>().join(" ")
        }
        Err(why) => why,
    }
}

#[test]
fn a_rank_that_made_a_call_fewer_is_waited_for() {
    let found = calls(&["init:w AR8 AR8 AR8 AR8! ", "init:w AR8 AR8 AR8"]);
    let healthy = "all_reduce(0, 8, \"float32\", \"SUM\")";
    assert_eq!(found, format!("def rank_0(): {healthy} {healthy} def rank_1(): {healthy}"));
}

#[test]
fn ranks_that_ask_for_different_sizes_do_so_in_the_program() {
    let found = calls(&["init:w AR8 AR1024!", "init:w AR8 AR512!"]);
    assert!(found.contains("1024, \"float32\"") && found.contains("512, \"float32\""), "{found}");
}

#[test]
fn ranks_that_use_communicators_in_another_order_do_so_in_the_program() {
    let found = calls(&["init:w init:x AR8 x.AR8 AR8 x.AR8!", "init:w init:x AR8 x.AR8 x.AR8 AR8!"]);
    let [first, second] = [0, 1].map(|group| format!("all_reduce({group}, 8, \"float32\", \"SUM\")"));
    let loops = format!("for _ in range(2): {first} {second}");
    assert_eq!(found, format!("def rank_0(): {loops} def rank_1(): {first} {second} {second} {first}"));
    let found = calls(&["init:w init:x AR8 x.AR8 AR16!", "init:w init:x AR8 x.AR8 x.AR16!"]);
    assert!(found.contains("all_reduce(0, 16") && found.contains("all_reduce(1, 16"), "{found}");
}

#[test]
fn sends_of_another_size_than_received_are_in_the_program() {
    let found = calls(&["init:w AR8 S1:64!", "init:w AR8 R0:32!"]);
    assert!(found.contains("send(0, 64, ") && found.contains("receive(0, 32, "), "{found}");
}

#[test]
fn a_receive_without_a_send_is_in_the_program() {
    let found = calls(&["init:w AR8 R1:64!", "init:w AR8"]);
    assert!(found.contains("receive(0, 64, \"float32\", 1)"), "{found}");
}

#[test]
fn a_healthy_job_has_no_program() {
    assert!(calls(&["init:w AR8 AR8", "init:w AR8 AR8"]).contains("the same calls in the same order"));
}

#[test]
fn a_rank_without_a_trace_is_not_taken_for_one_that_called_nothing() {
    let others = "init:w AR8 AR8!";
    assert_eq!(calls(&[others, others, ""]), "rank 2 has no trace: it is not known whether all calls match");
    assert_eq!(
        calls(&[others, "", "init:w AR8", ""]),
        "2 ranks have no trace, rank 1 the first: it is not known whether all calls match"
    );
}

#[test]
fn recordings_that_keep_different_parts_give_the_same_program() {
    let step = "AR8 AG2 ";
    let steps = |kept: usize, rest: &str| {
        format!("init:w {}kept {}{rest}", step.repeat(kept), step.repeat(20 - kept))
    };
    let found = calls(&[&steps(5, "AR8!"), &steps(15, "")]);
    let gather = "all_gather(0, 2, \"float32\")";
    let reduce = "all_reduce(0, 8, \"float32\", \"SUM\")";
    assert_eq!(found, format!("def rank_0(): {gather} {reduce} def rank_1(): {gather}"));
    assert!(calls(&[&steps(5, ""), &steps(15, "")]).contains("the same calls in the same order"));
}
