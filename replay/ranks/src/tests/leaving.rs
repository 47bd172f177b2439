//! A rank that gives its communicator up, or closes it, while others wait for it.

use expect_test::expect;

use super::check;

#[test]
fn a_rank_gave_up_because_it_ran_out_of_memory_and_not_because_of_what_it_caught() {
    check(
        &["init:w AR8@10 AR8@11!", "init:w AR8@10 refused@12 oom@12 abort@13!"],
        expect![[r#"
        OutOfMemory [1] of world in collective 1, lines 12 and 11, waiting [0]
          rank 0 waits in call 1 on world, all_reduce(8 float32, sum) at step (train.py:11), for rank 1, which never made it: it ran out of memory: a request for 1.00 GiB was refused at step (train.py:12)
    "#]],
    );
    // It went on after that, and then did something else.
    check(
        &["init:w AR8@10 AR8@11 AR8@12!", "init:w AR8@10 oom@9 AR8@11 abort@13!"],
        expect![[r#"
        Abort [1] of world in collective 2, lines 13 and 12, waiting [0]
          rank 0 waits in call 2 on world, all_reduce(8 float32, sum) at step (train.py:12), for rank 1, which never made it: it aborted the communicator with comm_abort at step (train.py:13)
    "#]],
    );
    check(
        &["init:w AR8@10 AR8@11 AR8@12!", "init:w AR8@10 oom@9 AR8@11"],
        expect![[r#"
        RankStuck [1] of world in collective 2, lines 11 and 12, waiting [0]
          rank 0 waits in call 2 on world, all_reduce(8 float32, sum) at step (train.py:12), for rank 1, which never made it: it is elsewhere; its last call was all_reduce(8 float32, sum) at step (train.py:11), 18.996 s before its end
    "#]],
    );
}

#[test]
fn a_rank_that_closes_its_communicator_made_a_call_less() {
    let waits = "init:w AR8@10 AR8@11!";
    check(
        &[waits, "init:w AR8@10 destroy@13!", waits],
        expect![[r#"
        MissingCall [1] of world in collective 1, lines 13 and 11, waiting [0, 2]
          ranks 0, 2 wait in call 1 on world, all_reduce(8 float32, sum) at step (train.py:11), for rank 1, which never made it: it closed the communicator without it, with comm_destroy at step (train.py:13)
    "#]],
    );
    // Most closed it: the one that waits made a call too many.
    check(
        &["init:w AR8@10 destroy@13!", "init:w AR8@10 destroy@13!", waits],
        expect![[r#"
        ExtraCall [2] of world in collective 1, lines 11 and 13, waiting []
          rank 2 waits in call 1 on world, all_reduce(8 float32, sum) at step (train.py:11), which ranks 0, 1 never made: they closed the communicator without it
    "#]],
    );
    check(
        &[waits, "init:w AR8@10 destroy@13!"],
        expect![[r#"
        MissingCall [1] of world in collective 1, lines 13 and 11, waiting [0]
          rank 0 waits in call 1 on world, all_reduce(8 float32, sum) at step (train.py:11), for rank 1, which never made it: it closed the communicator without it, with comm_destroy at step (train.py:13); or rank 0 made one call too many, which cannot be determined
    "#]],
    );
}

/// On a busy machine one recorder sees three seconds late that all were killed: nobody was killed before the others.
#[test]
fn an_end_that_was_seen_late_is_not_late() {
    let steps = "AR8@10 AR8@10 AR8@10 AR8@10";
    check(
        &[&format!("init:w {steps} AR8@10! seen killed"), &format!("init:w {steps} killed")],
        expect![[r#"
            consistent
        "#]],
    );
    check(
        &[&format!("init:w {steps} AR8@10! wait wait seen killed"), &format!("init:w {steps} killed")],
        expect![[r#"
            RankKilled [1] of world in collective 4, lines 10 and 10, waiting [0]
              rank 0 waits in call 4 on world, all_reduce(8 float32, sum) at step (train.py:10), for rank 1, which never made it: it was killed, crashed, or called `_exit`, 4.003 s before the last; its last call was all_reduce(8 float32, sum) at step (train.py:10), 1.0 ms before its end
        "#]],
    );
}
