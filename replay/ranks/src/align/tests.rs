//! Tracks as text, and how they differ.

use std::fmt::Write;

use expect_test::{Expect, expect};

use super::*;

/// A letter is an operation; a digit behind it its size; `@x` its place. `*` is a lost call.
/// `-` is a call from before the trace.
struct Text(Vec<Token>, usize);

impl Track for Text {
    fn n_calls(&self) -> usize {
        self.0.len()
    }
    fn start(&self) -> usize {
        self.1
    }
    fn token(&self, position: usize) -> Token {
        assert!(position >= self.1);
        self.0[position]
    }
    fn knows(&self, token: Token) -> bool {
        self.0.contains(&token)
    }
}

fn parse(text: &str) -> Text {
    let call = |word: &str| {
        let (call, place) = word.split_once('@').unwrap_or((word, ""));
        let mut number = call.bytes().fold(0, |sum, byte| sum * 256 + u32::from(byte));
        if call.len() == 1 {
            number = number * 256 + 32;
        }
        let place = place.bytes().fold(0, |sum, byte| sum * 256 + u32::from(byte));
        Token { call: if call == "*" { LOST } else { number }, place }
    };
    let n_before = text.split_whitespace().filter(|word| *word == "-").count();
    Text(text.split_whitespace().map(call).collect(), n_before)
}

fn name(token: Token) -> String {
    let bytes =
        [token.place].into_iter().filter(|place| *place > 0).map(|place| format!("@{}", place as u8 as char));
    let call = format!("{}{}", (token.call >> 8) as u8 as char, token.call as u8 as char);
    call.trim().to_owned() + &bytes.collect::<String>()
}

fn check(tracks: &[&str], expected: Expect) {
    let tracks: Vec<Text> = tracks.iter().map(|text| parse(text)).collect();
    let mut n_seen = tracks.iter().map(Track::start).max().unwrap_or(0) as u64;
    let alignment = align(&tracks, &|a, b| a >> 8 == b >> 8, &mut |column, _| {
        assert_eq!(column, n_seen);
        n_seen += 1;
    });
    assert_eq!(n_seen, alignment.n_columns);
    let mut text = String::new();
    for difference in &alignment.differences {
        let spot = |spot: Option<Spot>| {
            spot.map_or("-".into(), |spot| {
                format!("{} #{}", name(tracks[spot.track].0[spot.position]), spot.position)
            })
        };
        let Difference { kind, track, column, majority, own, n_agree, n_differ } = difference;
        let (majority, own) = (spot(*majority), spot(*own));
        writeln!(text, "{track}: {kind:?} in {column}: {majority} is {own} ({n_agree}:{n_differ})").unwrap();
    }
    writeln!(text, "{} columns, reached {:?}", alignment.n_columns, alignment.reached).unwrap();
    expected.assert_eq(&text);
}

#[test]
fn calls_from_before_a_trace_are_not_compared() {
    check(
        &["A B C D E", "- - C D E", "- D C D"],
        expect![[r#"
        5 columns, reached [5, 5, 4]
    "#]],
    );
    check(
        &["A B C D E", "- - C D D", "- B C D E"],
        expect![[r#"
        1: Changed in 4: E #4 is D #4 (2:1)
        5 columns, reached [5, 5, 5]
    "#]],
    );
    check(
        &["A B", "- - - - E", "- - C D E"],
        expect![[r#"
        5 columns, reached [2, 5, 5]
    "#]],
    );
}

#[test]
fn ranks_that_agree_differ_in_nothing_but_how_far_they_came() {
    check(
        &["A B C", "A B C", "A B"],
        expect![[r#"
        3 columns, reached [3, 3, 2]
    "#]],
    );
    check(
        &["", "", ""],
        expect![[r#"
        0 columns, reached [0, 0, 0]
    "#]],
    );
    check(
        &["A", "", "A B"],
        expect![[r#"
        2 columns, reached [1, 0, 2]
    "#]],
    );
}

#[test]
fn a_missing_call_shifts_the_rest() {
    check(
        &["A B C D E", "A B C D E", "A C D E"],
        expect![[r#"
        2: Missing in 1: B #1 is C #1 (2:1)
        5 columns, reached [5, 5, 5]
    "#]],
    );
}

#[test]
fn an_extra_call_shifts_the_rest() {
    check(
        &["A B C D", "A X B C D", "A B C D"],
        expect![[r#"
            1: Extra in 1: B #1 is X #1 (2:1)
            4 columns, reached [4, 4, 4]
        "#]],
    );
}

#[test]
fn two_calls_in_the_other_order_are_swapped() {
    check(
        &["A B C D", "A B C D", "A C B D"],
        expect![[r#"
        2: Swapped in 1: B #1 is C #1 (2:1)
        4 columns, reached [4, 4, 4]
    "#]],
    );
}

#[test]
fn a_changed_call_is_changed_in_its_place() {
    check(
        &["A1 B1 C1", "A1 B2 C1", "A1 B1 C1"],
        expect![[r#"
        1: Changed in 1: B1 #1 is B2 #1 (2:1)
        3 columns, reached [3, 3, 3]
    "#]],
    );
    // The others wait in B; what comes after it is not known.
    check(
        &["A B", "A B", "A X"],
        expect![[r#"
        2: Changed in 1: B #1 is X #1 (2:1)
        2 columns, reached [2, 2, 2]
    "#]],
    );
}

#[test]
fn the_call_after_a_missing_one_tells_that_it_is_missing() {
    check(
        &["A B C", "A B C", "A C"],
        expect![[r#"
        2: Missing in 1: B #1 is C #1 (2:1)
        3 columns, reached [3, 3, 3]
    "#]],
    );
    check(
        &["A1@x A2@y A4@z", "A1@x A2@y A4@z", "A1@x A4@z"],
        expect![[r#"
        2: Missing in 1: A2@y #1 is A4@z #1 (2:1)
        3 columns, reached [3, 3, 3]
    "#]],
    );
}

#[test]
fn places_tell_which_of_many_equal_calls_is_missing() {
    let step = "A@x A@y A@z ";
    let (whole, hole) = (step.repeat(5), format!("{step}A@x A@z {}", step.repeat(3)));
    check(
        &[&whole, &whole, &hole],
        expect![[r#"
        2: Missing in 4: A@y #4 is A@z #4 (2:1)
        15 columns, reached [15, 15, 15]
    "#]],
    );
}

#[test]
fn other_places_alone_are_no_difference() {
    let (a, b) = ("A@x B@y ".repeat(1000), "A@p B@q ".repeat(1000));
    check(
        &[&a, &b, &a],
        expect![[r#"
        2000 columns, reached [2000, 2000, 2000]
    "#]],
    );
}

#[test]
fn ranks_are_together_again_after_a_difference_and_apart_at_the_next() {
    let steps = |n: usize| "A1 B1 C1 ".repeat(n);
    let (whole, other) = (steps(700), format!("{}A1 C1 {}A1 B2 C1 {}", steps(100), steps(500), steps(98)));
    check(
        &[&whole, &whole, &other],
        expect![[r#"
        2: Missing in 301: B1 #301 is C1 #301 (2:1)
        2: Changed in 1804: B1 #1804 is B2 #1803 (2:1)
        2100 columns, reached [2100, 2100, 2100]
    "#]],
    );
}

#[test]
fn two_ranks_cannot_outvote_each_other() {
    check(
        &["A B C D", "A C D"],
        expect![[r#"
        1: Missing in 1: B #1 is C #1 (1:1)
        4 columns, reached [4, 4]
    "#]],
    );
}

#[test]
fn the_majority_may_be_behind() {
    // Rank 0 skipped two calls and ran on alone; the others wait in the first of them.
    check(
        &["A D E F G", "A B", "A B"],
        expect![[r#"
        0: Changed in 1: B #1 is D #1 (2:1)
        5 columns, reached [5, 2, 2]
    "#]],
    );
}

#[test]
fn calls_that_only_one_rank_made_are_extra_where_its_next_is_what_the_others_wait_in() {
    // Three batches of a validation on rank 0; all stand in the sum of the next step.
    let steps = "B@f A@s ".repeat(5);
    let (whole, longer) = (steps.clone(), format!("{}B@f B@v B@v B@v A@s", "B@f A@s ".repeat(4)));
    check(
        &[&longer, &whole, &whole],
        expect![[r#"
            0: Extra in 9: A@s #9 is B@v #9 (2:1)
            0: Extra in 9: A@s #9 is B@v #10 (2:1)
            0: Extra in 9: A@s #9 is B@v #11 (2:1)
            10 columns, reached [10, 10, 10]
        "#]],
    );
    // The broadcasts of the validation are made at the line of those of training.
    let longer = format!("{}B@f B@f B@f B@f A@s", "B@f A@s ".repeat(4));
    check(
        &[&longer, &whole, &whole],
        expect![[r#"
            0: Extra in 9: A@s #9 is B@f #9 (2:1)
            0: Extra in 9: A@s #9 is B@f #10 (2:1)
            0: Extra in 9: A@s #9 is B@f #11 (2:1)
            10 columns, reached [10, 10, 10]
        "#]],
    );
    // Three for each batch.
    let step = "B1@f B2@f B3@f A@s ";
    let whole = step.repeat(5);
    let longer = format!("{}{}A@s", step.repeat(4), "B1@f B2@f B3@f ".repeat(4));
    check(
        &[&longer, &whole, &whole],
        expect![[r#"
        0: Extra in 19: A@s #19 is B1@f #19 (2:1)
        0: Extra in 19: A@s #19 is B2@f #20 (2:1)
        0: Extra in 19: A@s #19 is B3@f #21 (2:1)
        0: Extra in 19: A@s #19 is B1@f #22 (2:1)
        0: Extra in 19: A@s #19 is B2@f #23 (2:1)
        0: Extra in 19: A@s #19 is B3@f #24 (2:1)
        0: Extra in 19: A@s #19 is B1@f #25 (2:1)
        0: Extra in 19: A@s #19 is B2@f #26 (2:1)
        0: Extra in 19: A@s #19 is B3@f #27 (2:1)
        20 columns, reached [20, 20, 20]
    "#]],
    );
}

#[test]
fn calls_that_are_alike_hide_which_are_missing_but_not_how_many() {
    let (whole, fewer) = ("A1@s A2@s A1@s A2@s ".repeat(10), "A1@s A2@s A1@s A2@s ".repeat(9));
    check(
        &[&format!("{whole} A8@e"), &format!("{whole} A8@e"), &format!("{fewer} A8@e")],
        expect![[r#"
            2: Missing in 36: A1@s #36 is A8@e #36 (2:1)
            2: Missing in 37: A2@s #37 is A8@e #36 (2:1)
            2: Missing in 38: A1@s #38 is A8@e #36 (2:1)
            2: Missing in 39: A2@s #39 is A8@e #36 (2:1)
            41 columns, reached [41, 41, 41]
        "#]],
    );
}

#[test]
fn a_rank_that_skipped_a_call_and_ran_on_alone_is_not_one_with_calls_too_many() {
    let step = "A B C D ";
    check(
        &[&format!("{}C D {}", "A B C D A ", step.repeat(3)), &format!("{step}A B"), &format!("{step}A B")],
        expect![[r#"
            0: Changed in 5: B #5 is C #5 (2:1)
            19 columns, reached [19, 6, 6]
        "#]],
    );
}

#[test]
fn lost_calls_fit_everything() {
    check(
        &["A B C", "A * C", "A B C"],
        expect![[r#"
        3 columns, reached [3, 3, 3]
    "#]],
    );
}

#[test]
fn a_rank_that_is_different_all_the_time_does_not_take_forever() {
    let (a, b) = ("A1 ".repeat(20_000), "A2 ".repeat(20_000));
    let tracks: Vec<Text> = [&a, &a, &b].iter().map(|text| parse(text)).collect();
    let alignment = align(&tracks, &|a, b| a >> 8 == b >> 8, &mut |_, _| {});
    assert_eq!(alignment.differences.len() as u64 + alignment.n_more, 20_000);
    assert_eq!(alignment.reached, [20_000, 20_000, 20_000]);
}
