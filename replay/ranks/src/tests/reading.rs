//! What a person reads, at 80 columns.

use super::*;

fn shown(ranks: &[&str]) -> String {
    let report = Ranks::of(&participants(ranks), &|_| None).report();
    let mut shown = Vec::new();
    text::render(
        &report,
        text::Style { width: Some(80), color: false, letters: text::Letters::Unicode },
        &mut shown,
    )
    .unwrap();
    String::from_utf8(shown).unwrap()
}

/// The lines of the verdict.
fn check(ranks: &[&str], expected: Expect) {
    let shown = shown(ranks);
    let verdict = shown.split("\n\n").nth(1).unwrap();
    expected.assert_eq(&format!("{verdict}\n"));
}

#[test]
fn the_first_lines_say_who_did_what_on_which_line_and_how_sure_that_is() {
    let others = "init:w AR8@10 AR8@11!";
    check(
        &[others, others, "init:w AR8@10 BC4@12!", others],
        expect![[r#"
            Communication
              rank 2 called a different operation on world: broadcast(4 float32, root 0)
                at step (train.py:12)
              certain: the recorded calls of the ranks contradict each other
              inconsistent: 1 finding
        "#]],
    );
    check(
        &[others, "init:w AR8@10 AR4@11!"],
        expect![[r#"
            Communication
              either side may be wrong: rank 1 called with a different size on world:
                all_reduce(4 float32, sum) at step (train.py:11)
              certain that the two do not match; which side is wrong cannot be determined
              inconsistent: 1 finding
        "#]],
    );
    check(
        &[others, others, "init:w AR8@10"],
        expect![[r#"
            Communication
              rank 2 does not reach a call on world: all_reduce(8 float32, sum) at step
                (train.py:11)
              certain that others wait for it there; its own state below may show why
              inconsistent: 1 finding
        "#]],
    );
    check(
        &[others, others, "init:w AR8@10", ""],
        expect![[r#"
            Communication
              rank 2 does not reach a call on world: all_reduce(8 float32, sum) at step
                (train.py:11)
              certain that others wait for it there; its own state below may show why;
                rank 3 has no trace and may be part of it
              inconsistent: 1 finding
        "#]],
    );
    check(
        &[others, others, ""],
        expect![[r#"
            Communication
              warning: all ranks wait, perhaps for rank 2, which has no trace:
                all_reduce(8 float32, sum) at step (train.py:11)
              not certain: its trace is missing
              warning: incomplete: 4 calls match, but rank 2 has no trace
        "#]],
    );
    check(
        &["init:w@5!", ""],
        expect![[r#"
        Communication
          rank 1 never joined the creation of world: comm_init at step (train.py:5)
          certain that others wait for it there; only its own trace would show why
          inconsistent: 1 finding
    "#]],
    );
    check(
        &["init:w S1:64@20!", "init:w S2:64@20!", "init:w S0:64@20!"],
        expect![[r#"
        Communication
          ranks 0 to 2 wait for each other on world: send(64 float32) at step
            (train.py:20)
          certain: the recorded calls of the ranks contradict each other
          inconsistent: 1 finding
    "#]],
    );
    check(
        &["init:w AR8@10 AR8@11!", "init:w AR8@10 refused@12 oom@12 exit"],
        expect![[r#"
            Communication
              rank 1 ran out of memory: a request for 1.00 GiB was refused at step
                (train.py:12)
              certain: it is in the trace
              inconsistent: 1 finding
        "#]],
    );
    check(
        &["init:w S1:64@20!", "init:w"],
        expect![[r#"
            Communication
              no rank receives what rank 0 sent on world: send(64 float32) at step
                (train.py:20)
              certain: the recorded calls of the ranks contradict each other
              inconsistent: 1 finding
        "#]],
    );
    check(
        &["init:w AR8@10 exit", "init:w AR8@10 exit"],
        expect![[r#"
        Communication
          ok: consistent: 2 calls of 2 ranks match
    "#]],
    );
    check(
        &["init:w AR8@10 AR8@11", "init:w AR8@10 exit"],
        expect![[r#"
            Communication
              either side may be wrong: rank 1 exited without reaching a call on world:
                all_reduce(8 float32, sum) at step (train.py:11)
              certain that the two do not match; which side is wrong cannot be determined
              inconsistent: 1 finding
        "#]],
    );
}

#[test]
fn a_hang_fits_on_a_terminal() {
    let others = "init:w AR8@10 AR8@11!";
    expect![[r#"
        4 ranks

        Communication
          rank 2 called a different operation on world: broadcast(4 float32, root 0)
            at step (train.py:12)
          certain: the recorded calls of the ranks contradict each other
          inconsistent: 1 finding

        1. Other operation
          rank 2 called broadcast(4 float32, root 0) at step (train.py:12) where the
            others called all_reduce(8 float32, sum) at step (train.py:11)
          waiting because of it: ranks 0, 1, 3

        Where each rank was at the end
          rank  at the end     waits for  calls  last NCCL call  line              ago
             0  in all_reduce  2              2  all_reduce      train.py:11  18.997 s
             1  in all_reduce  2              2  all_reduce      train.py:11  18.997 s
             2  in broadcast                  2  broadcast       train.py:12  18.997 s
             3  in all_reduce  2              2  all_reduce      train.py:11  18.997 s

        Communicators
          communicator  commId  ranks   collectives  sends, receives  created at
          world              -  0 to 3  2                          0  train.py:1

        Ranks
          rank  known from  host  pid  device  peak  trace
             0  NCCL        host  100  cuda:0     -  rank0.gtr
             1  NCCL        host  101  cuda:0     -  rank1.gtr
             2  NCCL        host  102  cuda:0     -  rank2.gtr
             3  NCCL        host  103  cuda:0     -  rank3.gtr

        Processes and their parents
          rank 0: (unknown command) (pid 100 on host) -> rank0.gtr
          rank 1: (unknown command) (pid 101 on host) -> rank1.gtr
          rank 2: (unknown command) (pid 102 on host) -> rank2.gtr
          rank 3: (unknown command) (pid 103 on host) -> rank3.gtr
    "#]]
    .assert_eq(&shown(&[others, others, "init:w AR8@10 BC4@12!", others]));
}
