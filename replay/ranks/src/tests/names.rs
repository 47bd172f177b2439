//! What communicators are called.

use super::*;

/// The ranks of each job, and what its communicators are called.
fn check(ranks: &[&str], expected: Expect) {
    let participants = participants(ranks);
    let (jobs, alone) = jobs(&participants);
    let mut text = String::new();
    for job in &jobs {
        let traced: Vec<u32> = job.actors.iter().map(|actor| actor.rank).collect();
        text += &format!("ranks {traced:?} of {}\n", job.n_ranks);
        for joined in &job.communicators {
            text += &format!("  {}\n", joined.label);
        }
    }
    text += &alone.iter().map(|idx| format!("alone: {idx}\n")).collect::<String>();
    expected.assert_eq(&text);
}

#[test]
fn the_only_communicator_of_all_ranks_is_the_world() {
    let rank = "init:w AR8@10 split:x=0";
    check(
        &[rank, rank],
        expect![[r#"
        ranks [0, 1] of 2
          world
          the group of all 2 ranks
    "#]],
    );
    // One has no trace, but the environment of the others says how many there are.
    check(
        &[rank, "", rank],
        expect![[r#"
        ranks [0, 2] of 3
          world
          the group of all 3 ranks
    "#]],
    );
}

#[test]
fn a_group_is_not_the_world_while_it_is_not_known_that_there_are_no_others() {
    let (even, odd) = (|n| format!("init:e={n}/4@6 e.AR8@9!"), |n| format!("init:o={n}/4@6 o.AR8@9!"));
    let all = [even(0), odd(0), even(1), odd(1), even(2), odd(2), even(3), odd(3)];
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    // PyTorch makes the default group when it is first used, which it is not here.
    check(
        &all,
        expect![[r#"
        ranks [0, 1, 2, 3, 4, 5, 6, 7] of 8
          the group of ranks 0, 2, 4, 6 (4 of 8)
          the group of ranks 1, 3, 5, 7 (4 of 8)
    "#]],
    );
    let half: Vec<&str> =
        all.iter().enumerate().map(|(n, rank)| if n % 2 == 0 { *rank } else { "" }).collect();
    check(
        &half,
        expect![[r#"
        ranks [0, 2, 4, 6] of 8
          the group of ranks 0, 2, 4, 6 (4 of 8)
    "#]],
    );
    // Nobody says how many ranks there should be, and one has no trace.
    let rank = |n| format!("alone init:w={n}/3@6");
    check(
        &[&rank(0), &rank(1), ""],
        expect![[r#"
            ranks [0, 1] of 3
              the group of ranks 0, 1 and one more (3 in total)
        "#]],
    );
    check(
        &[&rank(0), &rank(1), &rank(2)],
        expect![[r#"
        ranks [0, 1, 2] of 3
          world
    "#]],
    );
}

#[test]
fn jobs_that_only_have_their_port_in_common_stay_two() {
    // The second began after the first had ended.
    let first = "init:a=0/1@6 exit";
    let second = "wait wait init:b=0/1@6";
    check(
        &[first, second],
        expect![[r#"
        ranks [0] of 2
          the group of rank 0 (1 of 2)
        ranks [1] of 2
          the group of rank 1 (1 of 2)
    "#]],
    );
}

#[test]
fn groups_of_the_same_ranks_are_told_apart_by_their_lines_or_their_order() {
    let rank = "init:w@5 init:x@6 AR8@10";
    check(
        &[rank, rank],
        expect![[r#"
        ranks [0, 1] of 2
          the group of all 2 ranks created at train.py:5
          the group of all 2 ranks created at train.py:6
    "#]],
    );
    let rank = "init:w@5 init:x@5 AR8@10";
    check(
        &[rank, rank],
        expect![[r#"
        ranks [0, 1] of 2
          the first group of all 2 ranks
          the second group of all 2 ranks
    "#]],
    );
    let rank = "init:x@6 dist:w@5 AR8@10";
    check(
        &[rank, rank],
        expect![[r#"
        ranks [0, 1] of 2
          the group of all 2 ranks
          world
    "#]],
    );
}

#[test]
fn a_name_that_the_program_gave_is_the_name() {
    // PyTorch's form: description and name.
    let rank = "init:w called:w=default_pg:0 init:x called:x=undefined:1 init:y called:y=dp:2";
    check(
        &[rank, rank],
        expect![[r#"
        ranks [0, 1] of 2
          default_pg:0
          process group 1
          dp:2
    "#]],
    );
    // The groups of a mesh are called alike.
    let rank = |n: u32| format!("init:w init:{}={}/2 called:{0}=mesh_tp", ["a", "b"][n as usize / 2], n % 2);
    check(
        &[&rank(0), &rank(1), &rank(2), &rank(3)],
        expect![[r#"
        ranks [0, 1, 2, 3] of 4
          world
          mesh_tp of ranks 0, 1 (2 of 4)
          mesh_tp of ranks 2, 3 (2 of 4)
    "#]],
    );
    let rank = "init:w called:w=dp init:x called:x=dp";
    check(
        &[rank, rank],
        expect![[r#"
        ranks [0, 1] of 2
          the first dp
          the second dp
    "#]],
    );
}

#[test]
fn of_many_ranks_the_first_and_the_last_are_named() {
    let rank = |n: u32| match n % 2 {
        0 => format!("init:w init:e={}/8", n / 2),
        _ => "init:w".to_owned(),
    };
    let ranks: Vec<String> = (0..16).map(rank).collect();
    check(
        &ranks.iter().map(String::as_str).collect::<Vec<_>>(),
        expect![[r#"
        ranks [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15] of 16
          world
          the group of ranks 0, 2 ... 14 (8 of 16)
    "#]],
    );
}
