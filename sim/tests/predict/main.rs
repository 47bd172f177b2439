//! Predictions against what the programs would really have asked for.

mod programs;

use std::collections::BTreeMap;

use gputrace_sim::ops::OpStream;
use gputrace_sim::policies::torch::NEWEST;
use gputrace_sim::predict::{Model, Run};
use gputrace_sim::whatif::{Laboratory, Question};

use self::programs::{KINDS, Kind, Program, Random};

/// Programs of each kind.
const N_EACH: u64 = 42;

fn reserved(stream: &OpStream) -> u64 {
    let question = Question::torch(NEWEST, "");
    Laboratory::new(stream).unwrap().guess(&question).unwrap().books.reserved.peak
}

/// Runs of a program at some points, and where to go.
struct Case {
    runs: Vec<Vec<u64>>,
    steps: Vec<u64>,
    target: Vec<u64>,
}

/// Two to four runs, in one variable or two, and a target of four to sixteen times the largest.
fn case(kind: Kind, random: &mut Random) -> Case {
    let has_length = random.is(40) && kind != Kind::GrowingCache;
    let batch = random.of(&[2, 3, 4, 6]);
    let length = random.of(&[32, 64, 96]);
    let factor = random.of(&[4, 5, 8, 16]);
    let mut runs = vec![vec![batch, length], vec![2 * batch, length]];
    let mut target = vec![2 * batch * factor, length];
    if has_length {
        runs.push(vec![batch, 2 * length]);
        target = vec![2 * batch * random.of(&[2, 4]), 2 * length * random.of(&[1, 2, 4])];
    }
    if random.is(30) {
        runs.push(if has_length { vec![2 * batch, 2 * length] } else { vec![3 * batch, length] });
    }
    if !has_length && random.is(15) {
        runs = vec![vec![batch, length], vec![batch + 1, length]];
        target = vec![(batch + 1) * factor, length];
    }
    let steps = 2 + random.below(2);
    let has_extra = random.is(25);
    let steps = runs.iter().map(|_| if has_extra { steps + random.below(2) } else { steps }).collect();
    Case { runs, steps, target }
}

#[derive(Debug, Default, PartialEq)]
struct Tally {
    n: u64,
    sure: u64,
    sure_equal: u64,
    sure_close: u64,
    open: u64,
    open_inside: u64,
    open_best_close: u64,
    unforeseeable: u64,
}

/// Truth and prediction of one program; adds to the tally and says what is wrong.
fn judge(kind: Kind, seed: u64, tally: &mut Tally) -> Option<String> {
    let mut random = Random::new(seed ^ 0xabcd);
    let (program, case) = (Program::new(kind, seed), case(kind, &mut random));
    let streams: Vec<OpStream> = case
        .runs
        .iter()
        .zip(&case.steps)
        .enumerate()
        .map(|(data, (at, steps))| program.run(at[0], at[1], *steps, data as u64))
        .collect();
    let runs = case.runs.iter().zip(&streams).map(|(at, stream)| Run { at: at.clone(), stream });
    let model = Model::of(runs.collect()).unwrap();
    let prediction = model.predict(&case.target).unwrap();
    let truth = program.run(case.target[0], case.target[1], case.steps[model.base_index()], 0);
    let truth = reserved(&truth);
    let forecast = prediction.forecast(&Question::torch(NEWEST, "")).unwrap();
    let (best, (low, high)) = (forecast.answer.outcome.books.reserved.peak, forecast.reserved);
    let is_close = (best as f64 / truth as f64 - 1.0).abs() <= 0.01;
    tally.n += 1;
    if !program.is_foreseeable(case.runs.iter().map(|at| at[0]).max().unwrap(), case.target[0]) {
        tally.unforeseeable += 1;
        return None;
    }
    let what = || {
        format!(
            "{kind:?} {seed}: {:?} to {:?}: {low} {best} {high}, is {truth} {:?}",
            case.runs,
            case.target,
            prediction.known.open.iter().map(|it| (&it.why, it.n_requests, it.bytes)).collect::<Vec<_>>()
        )
    };
    if forecast.is_sure {
        tally.sure += 1;
        tally.sure_equal += u64::from(best == truth);
        tally.sure_close += u64::from(is_close);
        return (!is_close).then(what);
    }
    tally.open += 1;
    let is_inside = (low..=high).contains(&truth);
    tally.open_inside += u64::from(is_inside);
    tally.open_best_close += u64::from(is_close);
    (!is_inside).then(what)
}

#[test]
fn what_is_sure_is_so_and_what_is_not_is_in_the_range() {
    let mut tallies: BTreeMap<Kind, Tally> = BTreeMap::new();
    let mut wrong = vec![];
    for kind in KINDS {
        let tally = tallies.entry(kind).or_default();
        let seeds = (0..N_EACH).map(|index| 1 + index * 37 + kind as u64 * 7919);
        wrong.extend(seeds.filter_map(|seed| judge(kind, seed, tally)));
    }
    let lines = tallies.iter().map(|(kind, it)| {
        format!(
            "{kind:?}: of {} sure {}, equal {}, close {}; open {}, inside {}, best close {}; unforeseeable {}\n",
            it.n, it.sure, it.sure_equal, it.sure_close, it.open, it.open_inside, it.open_best_close, it.unforeseeable
        )
    });
    let lines = lines.collect::<String>() + &wrong.join("\n");
    let sum = |of: fn(&Tally) -> u64| tallies.values().map(of).sum::<u64>();
    let (sure, close, equal) = (sum(|it| it.sure), sum(|it| it.sure_close), sum(|it| it.sure_equal));
    let (open, inside) = (sum(|it| it.open), sum(|it| it.open_inside));
    assert_eq!(sure, close, "what is called sure is right to within 1 %:\n{lines}");
    assert!(equal * 100 >= sure * 98, "{equal} of {sure} are right to the byte:\n{lines}");
    assert!(inside * 100 >= open * 95, "{inside} of {open} are in their range:\n{lines}");
    // Otherwise nothing is said, or nothing was tried.
    let n_lawful = N_EACH * (KINDS.len() as u64 - 4);
    assert!(sure * 100 >= n_lawful * 90, "{sure} are called sure, of {n_lawful} that follow laws:\n{lines}");
    println!("{lines}");
}
