//! Who is right where ranks differ: the many, and nobody knows where there are as many on both sides.

use super::*;
use crate::findings::{Finding, Kind};

fn first(ranks: &[&str]) -> Finding {
    let participants = participants(ranks);
    let (jobs, _) = jobs(&participants);
    let diagnosis = diagnose(&participants, &jobs[0]);
    diagnosis.findings.into_iter().next().unwrap_or_else(|| panic!("nothing is wrong: {ranks:?}"))
}

#[test]
fn of_two_to_eight_ranks_the_fewer_are_named_and_with_as_many_on_both_sides_nobody_is() {
    let steps = "AR8@10 BC4@11 AR8@10 BC4@11";
    let faults = [
        ("AR16@12", "AR8@12"),
        ("AR8:f16@12", "AR8@12"),
        ("AG8@12", "AR8@12"),
        ("", "AR8@12"),
        ("AG3@13 AR8@12", "AR8@12"),
        ("BC4@13 AR8@12", "AR8@12 BC4@13"),
    ];
    let mut wrong = vec![];
    for (own, others) in faults {
        for (after, what) in [("", "at work"), (" AR8@10 BC4@11 AR8@10 BC4@11", "going on"), ("!", "hangs")] {
            for n_ranks in 2..=8_usize {
                // Who only has not come yet is behind, and makes no other call.
                if own.is_empty() && after.is_empty() {
                    continue;
                }
                for n_wrong in 1..=n_ranks / 2 {
                    // Not always the last ones.
                    let is_wrong = |rank: usize| (rank * 3 + 1) % n_ranks.max(1) < n_wrong;
                    let is_wrong =
                        |rank: usize| if n_ranks % 3 == 0 { rank < n_wrong } else { is_wrong(rank) };
                    let text = |rank: usize| {
                        let calls = if is_wrong(rank) { own } else { others };
                        let calls = if after == "!" { calls.split(' ').next().unwrap() } else { calls };
                        let bang = if after == "!" && calls.is_empty() { " BC4@14" } else { "" };
                        format!("init:w {steps} {calls}{bang}{after}")
                    };
                    let texts: Vec<String> = (0..n_ranks).map(text).collect();
                    let finding = first(&texts.iter().map(String::as_str).collect::<Vec<_>>());
                    let expected: Vec<u32> =
                        (0..n_ranks).filter(|rank| is_wrong(*rank)).map(|rank| rank as u32).collect();
                    let is_tie = 2 * n_wrong == n_ranks;
                    if finding.undecided != is_tie || (!is_tie && finding.ranks != expected) {
                        wrong.push(format!(
                            "{own:?} for {others:?} {what}, {n_wrong} of {n_ranks} {expected:?}: {:?} {:?}{}",
                            finding.kind,
                            finding.ranks,
                            if finding.undecided { " undecided" } else { "" },
                        ));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn three_against_one_are_a_majority_also_where_the_one_differs_in_several_ways() {
    let others = "init:w AR8@10 BC4@11 AR8@10 BC4@11 AR8@10";
    let own = "init:w AR8@10 AG3@12 AG4@13 AG5@14 BC4@11 AR8@10 BC4@11 AR8@10";
    for who in 0..4 {
        let ranks: Vec<&str> = (0..4).map(|rank| if rank == who { own } else { others }).collect();
        let finding = first(&ranks);
        assert_eq!((finding.kind, finding.ranks, finding.undecided), (Kind::ExtraCall, vec![who], false));
    }
}

#[test]
fn two_that_agree_are_more_than_any_that_do_not() {
    let rank = |size: u32| format!("init:w AR8@10 AR{size}@11 AR8@10");
    let ranks = [rank(8), rank(4), rank(8), rank(2)];
    let finding = first(&ranks.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!((finding.kind, finding.undecided), (Kind::SizeMismatch, false));
    // Uneven on purpose, perhaps: all differ.
    let ranks = [rank(8), rank(4), rank(6), rank(2)];
    assert!(first(&ranks.iter().map(String::as_str).collect::<Vec<_>>()).undecided);
}
