use super::*;
use gputrace_report::model::Item;

const GIB: u64 = 1 << 30;

fn point(at: &[u64], policy: &str) -> Predicted {
    let best = at.iter().product::<u64>() * GIB;
    let needed = Needed { best, range: (best / 2, best * 2), room: None };
    Predicted { at: at.to_vec(), policy: policy.into(), needed, is_certain: false }
}

fn charts(names: &[&str], all: &[Predicted], recorded: &[Measured]) -> (Vec<Chart>, Vec<String>) {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let (mut charts, mut lines) = (vec![], vec![]);
    for item in drawn(Section::new("", ""), &names, all, recorded).items {
        match item {
            Item::Chart(chart) => charts.push(chart),
            Item::Line(_, text) => lines.push(text),
            other => panic!("{other:?}"),
        }
    }
    (charts, lines)
}

fn titles(names: &[&str], all: &[Predicted]) -> Vec<String> {
    charts(names, all, &[]).0.into_iter().map(|chart| chart.title).collect()
}

#[test]
fn three_values_of_a_variable_are_a_curve_and_fewer_are_none() {
    let points = |n: u64| (1..=n).map(|at| point(&[at], "torch")).collect::<Vec<_>>();
    assert!(titles(&["batch"], &[]).is_empty());
    assert!(titles(&["batch"], &points(1)).is_empty());
    assert!(titles(&["batch"], &points(2)).is_empty());
    assert_eq!(titles(&["batch"], &points(3)), ["Peak reserved by batch"]);
    let same = [1, 1, 2, 2].map(|at| point(&[at], "torch"));
    assert!(titles(&["batch"], &same).is_empty());
}

#[test]
fn each_allocator_and_each_choice_of_the_others_has_its_own_curve_over_the_longest_range() {
    let two = [1, 2, 4].map(|at| ["torch", "buddy"].map(|policy| point(&[at], policy)));
    assert_eq!(
        titles(&["batch"], &two.concat()),
        ["Peak reserved by batch, torch", "Peak reserved by batch, buddy"]
    );
    let grid = [1, 2, 4].map(|batch| [3, 5, 7, 9].map(|seq| point(&[batch, seq], "torch")));
    assert_eq!(
        titles(&["batch", "seq"], &grid.concat()),
        ["Peak reserved by seq, batch=1", "Peak reserved by seq, batch=2", "Peak reserved by seq, batch=4"]
    );
    let wide = [1, 2, 3, 4, 5, 6].map(|batch| [1, 2, 3, 4, 5, 6, 7].map(|seq| point(&[batch, seq], "torch")));
    let (charts, lines) = charts(&["batch", "seq"], &wide.concat(), &[]);
    assert_eq!(
        (charts.len(), lines),
        (4, vec!["2 more curves are not drawn: the table has their values".into()])
    );
}

#[test]
fn points_are_in_order_and_recorded_runs_are_those_of_the_same_kind() {
    let run = |at: &[u64], policy: &str, gib: u64| Measured {
        at: at.to_vec(),
        policy: policy.into(),
        reserved: Bytes(gib * GIB),
    };
    let recorded = [
        run(&[1, 8], "torch", 3),
        run(&[1, 9], "torch", 4),
        run(&[2, 8], "torch:a", 5),
        run(&[2, 8], "torch", 6),
    ];
    let all = [8, 2, 4].map(|batch| point(&[batch, 8], "torch"));
    let (charts, _) = charts(&["batch", "seq"], &all, &recorded);
    assert_eq!(charts[0].points.iter().map(|it| it.at).collect::<Vec<_>>(), [2, 4, 8]);
    assert_eq!(charts[0].recorded, [(1, Bytes(3 * GIB)), (2, Bytes(6 * GIB))]);
    assert_eq!(charts[0].ceiling, None);
}

#[test]
fn what_is_asked_for_is_named_and_the_recorded_card_only_where_it_is_too_small() {
    let with = |room: fn(u64) -> Room| {
        let all = [1, 2, 4].map(|at| {
            let mut it = point(&[at], "torch");
            it.needed.room = Some(room(at));
            it
        });
        let (charts, lines) = charts(&["batch"], &all, &[]);
        (charts[0].ceiling.clone().map(|ceiling| (ceiling.name, ceiling.room[2].0 / GIB)), lines)
    };
    let cut = "if a value does not fit, the chart shows how much it would reserve".to_owned();
    let asked = with(|at| {
        let others = Some(vec![("CUDA context".into(), at * GIB / 4)]);
        let shares = gputrace_sim::whatif::Shares {
            limit: 3 * GIB,
            fits: at < 3,
            reserved: at * GIB,
            others,
            is_charge_known: true,
            refused: None,
        };
        Room::of(Machine { limit: Some(Bytes(3 * GIB)), ..Machine::default() }, &Shares::of(shares))
    });
    assert_eq!(asked, (Some(("--limit 3 GiB less others".into(), 2)), vec![cut]));
    assert_eq!(with(|_| Room::recorded(80 * GIB)), (None, vec![]));
    assert_eq!(with(|_| Room::recorded(3 * GIB)), (Some(("3 GiB of the recorded card".into(), 3)), vec![]));
}

#[test]
fn the_name_of_a_limit_is_the_option_that_set_it() {
    let name = |machine: Machine, others: Option<u64>| {
        let others = others.map(|bytes| vec![("others".to_owned(), bytes)]);
        let shares = gputrace_sim::whatif::Shares {
            limit: 8 * GIB,
            fits: true,
            reserved: GIB,
            others,
            is_charge_known: true,
            refused: None,
        };
        let room = Room::of(machine, &Shares::of(shares));
        (room.name, room.bytes / GIB)
    };
    let (of, none) = (|gib: u64| Some(Bytes(gib * GIB)), Machine::default());
    let limit = Machine { limit: of(8), device_memory: of(24), ..none };
    assert_eq!(name(limit, None), ("--limit 8 GiB".into(), 8));
    let told = Machine { other: of(2), ..limit };
    assert_eq!(name(told, Some(2 * GIB)), ("--limit 8 GiB less --other 2 GiB".into(), 6));
    let card = Machine { device_memory: of(8), ..none };
    assert_eq!(name(card, Some(GIB)), ("--device-memory 8 GiB less others".into(), 7));
    let above = Machine { limit: of(80), ..none };
    assert_eq!(name(above, None), ("8 GiB of the recorded card".into(), 8));
}
