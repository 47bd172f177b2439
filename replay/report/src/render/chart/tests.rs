use expect_test::{Expect, expect};

use super::*;
use crate::model::Ceiling;

const GIB: u64 = 1 << 30;

/// A line from a batch of 8 to one of 128, known to within a third, and two runs before it.
fn chart() -> Chart {
    let point = |at: u64| Point {
        at,
        low: Bytes(at * GIB / 5),
        best: Bytes(at * GIB / 4),
        high: Bytes(at * GIB / 3),
        is_certain: at <= 16,
    };
    Chart {
        title: "Peak reserved by batch".into(),
        variable: "batch".into(),
        points: [8, 16, 32, 64, 128].map(point).to_vec(),
        recorded: vec![(4, Bytes(GIB)), (8, Bytes(2 * GIB))],
        ceiling: None,
    }
}

fn limited(room: u64) -> Chart {
    let ceiling = Ceiling { name: "--limit 24 GiB".into(), short: "--limit", room: vec![Bytes(room); 5] };
    Chart { ceiling: Some(ceiling), ..chart() }
}

fn drawn(chart: &Chart, width: usize, letters: Letters) -> String {
    let lines = lines(chart, width, letters);
    let text = lines.iter().map(|line| line.iter().map(|(_, text)| text.as_str()).collect::<String>() + "\n");
    text.collect()
}

/// What is expected has no indentation of its own.
fn unindented(drawn: &str) -> String {
    drawn.lines().map(|line| line.strip_prefix("  ").expect("two blanks").to_owned() + "\n").collect()
}

fn check(chart: &Chart, expected: &Expect) {
    let drawn = drawn(chart, 72, Letters::Unicode);
    assert!(drawn.lines().count() <= 12, "{drawn}");
    expected.assert_eq(&unindented(&drawn));
}

#[test]
fn a_chart_has_the_line_its_range_and_what_was_recorded() {
    check(
        &chart(),
        &expect![[r#"
              Peak reserved by batch
              48 GiB ┤
                     │                                                        ░░░░░░
              36 GiB ┤                                               ░░░░░░░░░░░░░░░
                     │                                       ░░░░░░░░░░░░░╭────────○
              24 GiB ┤                              ░░░░░░░░░░╭───────────╯░░░░░░░░░
                     │                     ░░░░░░░╭─○─────────╯░░░░░░░░░
              12 GiB ┤             ░░░╭───────────╯░░░░░░░
                     │    ╭─○───────○─╯░░░░
                   0 └●─●─╯─┴───────┴───────────────┴──────────────────────────────┴
               batch  4 8   16      32              64                           128
              ○ predicted  ● recorded  ░ range
        "#]],
    );
}

#[test]
fn the_line_crosses_its_limit_which_is_named() {
    check(
        &limited(24 * GIB),
        &expect![[r#"
              Peak reserved by batch; × crosses the limit between 64 and 128
              48 GiB ┤
                     │                                                        ░░░░░░
              36 GiB ┤                                               ░░░░░░░░░░░░░░░
                     │                                       ░░░░░░░░░░░░░╭────────○
              24 GiB ┤╌╌ --limit 24 GiB ╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╭─────×─────╯╌╌╌╌╌╌╌╌╌
                     │                     ░░░░░░░╭─○─────────╯░░░░░░░░░
              12 GiB ┤             ░░░╭───────────╯░░░░░░░
                     │    ╭─○───────○─╯░░░░
                   0 └●─●─╯─┴───────┴───────────────┴──────────────────────────────┴
               batch  4 8   16      32              64                           128
              ○ predicted  ● recorded  ░ range
        "#]],
    );
}

#[test]
fn a_limit_far_above_is_named_and_leaves_the_picture_its_height() {
    check(
        &limited(100 * GIB),
        &expect![[r#"
            Peak reserved by batch
            48 GiB ┤
                   │                                                        ░░░░░░
            36 GiB ┤                                               ░░░░░░░░░░░░░░░
                   │                                       ░░░░░░░░░░░░░╭────────○
            24 GiB ┤                              ░░░░░░░░░░╭───────────╯░░░░░░░░░
                   │                     ░░░░░░░╭─○─────────╯░░░░░░░░░
            12 GiB ┤             ░░░╭───────────╯░░░░░░░
                   │    ╭─○───────○─╯░░░░
                 0 └●─●─╯─┴───────┴───────────────┴──────────────────────────────┴
             batch  4 8   16      32              64                           128
            ○ predicted  ● recorded  ░ range  (--limit 24 GiB: above the chart)
        "#]],
    );
}

#[test]
fn a_range_that_is_many_times_the_guess_leaves_the_picture() {
    let mut chart = chart();
    chart.points.iter_mut().for_each(|point| point.high = Bytes(point.best.0 * 20));
    check(
        &chart,
        &expect![[r#"
            Peak reserved by batch
            96 GiB ┤           ░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░
                   │          ░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░
            72 GiB ┤          ░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░
                   │         ░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░
            48 GiB ┤        ░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░
                   │        ░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░╭──○
            24 GiB ┤       ░░░░░░░░░░░░░░░░░░░░░░░░░░░╭───────────────────────╯░░░
                   │       ░░░╭───○───────────────○───╯░░░░░░░░
                 0 └●─●───○───╯░░─┴───────────────┴──────────────────────────────┴
             batch  4 8   16      32              64                           128
            ○ predicted  ● recorded  ░ range  (up to 640.00 GiB, above the chart)
        "#]],
    );
}

#[test]
fn what_is_certain_has_no_range_and_many_points_have_no_marks() {
    let point = |at: u64| Point {
        at,
        low: Bytes((64 - at) * 990),
        best: Bytes((64 - at) * 1000),
        high: Bytes((64 - at) * 1010),
        is_certain: true,
    };
    let points = (1..=64).map(point).collect();
    check(
        &Chart { points, recorded: vec![], ..chart() },
        &expect![[r#"
              Peak reserved by batch
              64 KiB ┤──╮
                     │  ╰───────╮
              48 KiB ┤          ╰──────╮
                     │                 ╰────────╮
              32 KiB ┤                          ╰───────╮
                     │                                  ╰───────╮
              16 KiB ┤                                          ╰──────╮
                     │                                                 ╰───────╮
                   0 └─────────────────────────────────────────────────────────╰────
               batch  1    6    11    18    24    30    36    42    48    55      64
              ── predicted
        "#]],
    );
}

#[test]
fn without_unicode_it_is_drawn_in_ascii() {
    let drawn = drawn(&limited(24 * GIB), 72, Letters::Ascii);
    assert!(drawn.is_ascii(), "{drawn}");
    expect![[r#"
          Peak reserved by batch; x crosses the limit between 64 and 128
          48 GiB +
                 |                                                        ::::::
          36 GiB +                                               :::::::::::::::
                 |                                       :::::::::::::*********o
          24 GiB +-  --limit 24 GiB - - - - - - -:-:-:-:-:******x******:-:-:-:-:
                 |                     :::::::**o**********:::::::::
          12 GiB +             :::*************:::::::
                 |    **o*******o**::::
               0 +#-#**-+-------+---------------+------------------------------+
           batch  4 8   16      32              64                           128
          o predicted  # recorded  : range
    "#]]
    .assert_eq(&unindented(&drawn));
}

#[test]
fn no_line_is_wider_than_the_terminal() {
    let long =
        "--limit 24 GiB less what others hold of it, whoever they may be, which is not little".to_owned();
    for width in 40..=100 {
        let mut chart = limited(24 * GIB);
        if let Some(ceiling) = &mut chart.ceiling {
            ceiling.name.clone_from(&long);
        }
        chart.variable = "a_variable_with_a_long_name".into();
        for letters in [Letters::Unicode, Letters::Ascii] {
            let drawn = drawn(&chart, width, letters);
            assert!(drawn.lines().all(|line| length(line) <= width), "{width}:\n{drawn}");
            assert_eq!(drawn.lines().count(), 12);
        }
    }
}

#[test]
fn numbers_beside_it_are_short() {
    let ticks =
        [1, 3, 5, 1000, 5 * GIB, 6 * GIB + 1, u64::MAX / 4].map(|least| words::short(Bytes(tick(least))));
    assert_eq!(ticks, ["1 B", "4 B", "5 B", "1 KiB", "5 GiB", "7 GiB", "4 EiB"]);
}

#[test]
fn the_line_goes_through_its_points() {
    let (chart, signs) = (chart(), Signs::of(Letters::Unicode));
    let mut picture = Picture::of(&chart, 100, &signs).expect("something varies");
    picture.line();
    for point in &chart.points {
        let cell = picture.cells[picture.height(point.best.0 as f64)][picture.column(point.at)];
        assert_eq!(cell.0, Ink::Line, "{point:?}");
    }
}

#[test]
fn no_amount_is_too_much_to_be_drawn_and_none_is_too_little() {
    for best in [0, 1, u64::MAX / 3, u64::MAX] {
        let mut chart = limited(u64::MAX);
        chart.variable = "a\u{1b}[2J".into();
        for point in &mut chart.points {
            (point.at, point.best, point.high) = (point.at << 33, Bytes(best), Bytes(u64::MAX));
        }
        let drawn = drawn(&chart, 40, Letters::Unicode);
        assert_eq!(drawn.lines().count(), 12, "{drawn}");
        assert!(!drawn.contains('\u{1b}'), "no terminal obeys a name");
    }
}
