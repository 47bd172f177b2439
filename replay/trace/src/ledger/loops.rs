//! How many turns a program's loop made, by the places that asked for memory: the count that they share, if they share one.
//!
//! ```text
//!  a b c  a b c  a b c          once a turn, in turn: three turns
//!  a b b  a b b  a b b          b is a loop of its own: of three turns or of six, cannot tell
//!  a b c  a b c  a b c L        L at every third turn: of nine turns or of three, cannot tell
//! ```
//! What repeats inside a model's call, and what a turn holds until its end, is a part of a turn. What comes at the first turn
//! and then at every tenth, with some to spare, is a condition in it. Otherwise two counts are two loops, one in the other or
//! one after the other, and which of them a user would call steps does not show.

use gputrace_schemas::event::Nanos;

/// Fewer turns than this prove no loop.
const MIN_TURNS: usize = 4;
/// Places that must agree.
const AGREE: usize = 3;
/// Share of the turns that must be as is said of them.
const MOSTLY: f64 = 0.9;
/// Places with less than this share of all requests are none.
const LEAST: f64 = 0.005;
/// Turns of a warm-up before a loop, or of what comes after it, at most, and its share of all requests.
const FEW: usize = 10;
const LITTLE: f64 = 0.05;

/// A place that asks for memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Place {
    /// When it did.
    pub times: Vec<Nanos>,
    /// What it requested and did not free yet.
    pub n_held: u32,
    /// The most that it held.
    pub most_held: u32,
    /// It is reached through the call of a model.
    pub is_in_module: bool,
}

impl Place {
    /// It requested memory.
    pub(super) fn asked(&mut self, time: Nanos, is_in_module: bool) {
        self.times.push(time);
        self.n_held += 1;
        self.most_held = self.most_held.max(self.n_held);
        self.is_in_module |= is_in_module;
    }

    /// Memory that it requested was freed.
    pub(super) fn given_back(&mut self) {
        self.n_held = self.n_held.saturating_sub(1);
    }
}

/// What the places show.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Turns<'a> {
    /// Nothing recurs.
    None,
    /// So often, as so many of so many places say; and when each turn began.
    Told { begins: &'a [Nanos], agree: usize, of: usize },
    /// Loops of so many turns, fewest first.
    Perhaps(Vec<u64>),
}

pub(super) fn turns<'a>(places: &[&'a Place]) -> Turns<'a> {
    let mut often: Vec<&Place> = places.iter().copied().filter(|it| it.times.len() >= 2).collect();
    often.sort_by_key(|it| it.times[0]);
    let n_all: usize = often.iter().map(|it| it.times.len()).sum();
    let mut levels: Vec<Level> = vec![];
    let mut counts: Vec<usize> = often.iter().map(|it| it.times.len()).collect();
    counts.sort_unstable();
    counts.dedup();
    // Most first: where the end cuts a turn, some asked once less.
    for n in counts.into_iter().rev() {
        add_levels(&mut levels, &often, n);
    }
    levels.reverse();
    let mut levels: Vec<Level> = levels.iter().filter(|level| !is_load(level, &levels)).cloned().collect();
    if levels.iter().any(Level::is_outside) {
        levels.retain(Level::is_outside);
    } else {
        only_calls(&mut levels);
    }
    let is_worth = |level: &Level| level.n_requests() as f64 >= LEAST * n_all as f64;
    if levels.iter().any(is_worth) {
        levels.retain(is_worth);
    }
    let candidates: Vec<&Level> = levels.iter().filter(|level| is_candidate(level, &levels, n_all)).collect();
    match &candidates[..] {
        [] => Turns::None,
        [only] if only.places.len() >= AGREE && only.n() >= MIN_TURNS => {
            Turns::Told { begins: &only.places[0].times, agree: only.places.len(), of: often.len() }
        }
        [_] => Turns::None,
        more => {
            let mut turns: Vec<u64> = more.iter().map(|level| level.n() as u64).collect();
            turns.dedup();
            Turns::Perhaps(turns)
        }
    }
}

/// Places that take turns.
#[derive(Clone, Debug)]
struct Level<'a> {
    /// The first of a turn comes first.
    places: Vec<&'a Place>,
}

impl Level<'_> {
    fn n(&self) -> usize {
        self.places[0].times.len()
    }

    fn n_requests(&self) -> usize {
        self.n() * self.places.len()
    }

    fn is_outside(&self) -> bool {
        self.places.iter().any(|place| !place.is_in_module)
    }

    fn begin(&self) -> Nanos {
        self.places[0].times[0]
    }

    fn end(&self) -> Nanos {
        self.places.iter().filter_map(|place| place.times.last()).max().copied().unwrap_or_default()
    }

    /// In which turn of this level something happened; 0 is before the first.
    fn turn_of(&self, time: Nanos) -> usize {
        self.places[0].times.partition_point(|begin| *begin <= time)
    }
}

/// Adds the places that asked `n` times, by the loop that they are in.
fn add_levels<'a>(levels: &mut Vec<Level<'a>>, often: &[&'a Place], n: usize) {
    for place in often.iter().copied().filter(|place| place.times.len() == n) {
        let is_same = |level: &Level| level.n() - n <= 1 && take_turns(level.places[0], place);
        match levels.iter_mut().find(|level| is_same(level)) {
            Some(level) => level.places.push(place),
            None => levels.push(Level { places: vec![place] }),
        }
    }
}

/// Whether the second asks once in each turn of the first.
fn take_turns(first: &Place, second: &Place) -> bool {
    let next = first.times.iter().skip(1).map(Some).chain([None]);
    let pairs = first.times.iter().zip(next).zip(&second.times);
    let n = pairs.filter(|((begin, end), time)| *begin <= time && end.is_none_or(|end| *time < end)).count();
    n as f64 >= MOSTLY * first.times.len() as f64
}

/// A loop that takes and keeps, before others: it loads or prepares.
fn is_load(level: &Level, all: &[Level]) -> bool {
    let keeps = |place: &&Place| place.most_held as usize * 10 >= place.times.len() * 9;
    let is_before = |other: &Level| other.places.len() >= AGREE && level.end() < other.begin();
    level.places.iter().any(keeps) && all.iter().any(is_before)
}

/// Inside a model's call: the calls themselves, of which everything else is a part.
fn only_calls(levels: &mut Vec<Level>) {
    let counts: Vec<usize> = levels.iter().map(Level::n).collect();
    let is_part = |n: usize, of: usize| n.is_multiple_of(of);
    let calls = counts.iter().copied().find(|n| {
        let parts = counts.iter().filter(|other| is_part(**other, *n)).count();
        parts as f64 >= MOSTLY * counts.len() as f64
    });
    if let Some(calls) = calls {
        levels.retain(|level| level.n() == calls);
    }
}

/// Whether users may call the turns of this level steps.
fn is_candidate(level: &Level, all: &[Level], n_all: usize) -> bool {
    let others = || all.iter().filter(|other| !std::ptr::eq(*other, level));
    let is_aside = level.n() <= FEW
        && (level.n_requests() as f64) < LITTLE * n_all as f64
        && others().any(|other| level.end() < other.begin() || other.end() < level.begin());
    let is_condition = others().any(|other| other.places.len() >= AGREE && is_condition(level, other));
    let is_part = others().any(|other| is_held_together(level, other));
    !is_aside && !is_condition && !is_part
}

/// Whether the rare one comes at every so many turns of the often one, out of step with a loop around it: the first time after
/// another number of turns, and with turns to spare at the end.
fn is_condition(rare: &Level, often: &Level) -> bool {
    if rare.n() >= often.n() {
        return false;
    }
    let turns: Vec<usize> = rare.places[0].times.iter().map(|time| often.turn_of(*time)).collect();
    let mut between: Vec<usize> = turns.windows(2).map(|pair| pair[1] - pair[0]).collect();
    between.sort_unstable();
    let usual = between[between.len() / 2];
    let is_regular = between.iter().filter(|n| **n == usual).count() as f64 >= MOSTLY * between.len() as f64;
    let after = often.n() - turns[turns.len() - 1];
    is_regular && usual > 1 && turns[0] > 0 && turns[0] != usual && after > 0
}

/// Whether the often one's memory is held until a turn of the rare one is over: layers of a step.
fn is_held_together(often: &Level, rare: &Level) -> bool {
    if often.n() <= rare.n() {
        return false;
    }
    let each = often.n() as f64 / rare.n() as f64;
    let is_held = |place: &&&Place| {
        let most = f64::from(place.most_held);
        most >= 1.5 && most >= 0.75 * each && most <= 1.5 * each + 2.0
    };
    let n = often.places.iter().filter(is_held).count();
    n * 2 > often.places.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that keeps the books of its places itself.
    struct Program {
        seed: u64,
        now: u64,
        places: Vec<(String, Place)>,
        left: u64,
    }

    /// Programs of each shape.
    const SEEDS: u64 = 60;

    type Shape = (&'static str, fn(&mut Program) -> u64);

    impl Program {
        fn draw(&mut self, from: u64, to: u64) -> u64 {
            self.seed ^= self.seed << 13;
            self.seed ^= self.seed >> 7;
            self.seed ^= self.seed << 17;
            from + (self.seed >> 11) % (to - from + 1)
        }

        fn take(&mut self, name: &str, is_in_module: bool) -> usize {
            self.now += 1;
            let found = self.places.iter().position(|(known, _)| known == name);
            let idx = found.unwrap_or_else(|| {
                self.places.push((name.to_owned(), Place { is_in_module, ..Place::default() }));
                self.places.len() - 1
            });
            if self.now > self.left {
                return idx;
            }
            let place = &mut self.places[idx].1;
            place.times.push(Nanos(self.now));
            place.n_held += 1;
            place.most_held = place.most_held.max(place.n_held);
            idx
        }

        fn give(&mut self, idx: usize) {
            let place = &mut self.places[idx].1;
            place.n_held = place.n_held.saturating_sub(1);
        }

        /// Takes and gives back at so many places.
        fn pass(&mut self, name: &str, n: u64) {
            self.pass_in(name, n, false);
        }

        fn pass_in(&mut self, name: &str, n: u64, is_in_module: bool) {
            for place in 0..n {
                let block = self.take(&format!("{name}{place}"), is_in_module);
                self.give(block);
            }
        }

        fn load(&mut self) {
            let (layers, is_staged) = (self.draw(2, 40), self.draw(0, 1) == 1);
            for _ in 0..layers {
                let staged = self.take("stage", false);
                (0..3).for_each(|n| {
                    self.take(&format!("weight{n}"), false);
                });
                if is_staged {
                    self.give(staged);
                }
            }
        }

        /// Layers, each of which gives back at once or holds until the end.
        fn layers(&mut self, layers: u64, places: u64, is_held: bool, is_in_module: bool) {
            let mut held = vec![];
            for _ in 0..layers {
                for place in 0..places {
                    let block = self.take(&format!("layer{place}"), is_in_module);
                    if is_held { held.push(block) } else { self.give(block) }
                }
            }
            held.into_iter().for_each(|block| self.give(block));
        }
    }

    /// Programs, and how many steps they made.
    #[rustfmt::skip] // A table.
    const SHAPES: &[Shape] = &[
        ("plain", |p| { let (n, k) = (p.draw(1, 300), p.draw(1, 8)); for _ in 0..n { p.pass("step", k); } n }),
        ("after loading", |p| { p.load(); let (n, k) = (p.draw(5, 300), p.draw(3, 8)); for _ in 0..n { p.pass("step", k); } n }),
        ("layers that hold", |p| { let (n, l, k, j) = (p.draw(5, 200), p.draw(2, 32), p.draw(1, 4), p.draw(3, 6)); for _ in 0..n { p.pass("step", j); p.layers(l, k, true, false); } n }),
        ("layers that give back", |p| { let (n, l, k, j) = (p.draw(5, 200), p.draw(2, 32), p.draw(1, 4), p.draw(1, 6)); for _ in 0..n { p.pass("step", j); p.layers(l, k, false, false); } n }),
        ("layers of a module", |p| { let (n, l, k, j) = (p.draw(2, 200), p.draw(2, 32), p.draw(1, 4), p.draw(1, 6)); for _ in 0..n { p.pass("step", j); p.layers(l, k, false, true); } n }),
        ("nothing but a module", |p| { let (n, l, k, j) = (p.draw(2, 200), p.draw(2, 32), p.draw(1, 4), p.draw(1, 6)); for _ in 0..n { p.pass_in("embed", j, true); p.layers(l, k, false, true); } n }),
        ("gradient accumulation", |p| { let (n, m, k, j) = (p.draw(5, 100), p.draw(2, 16), p.draw(1, 6), p.draw(1, 5)); for _ in 0..n { for _ in 0..m { p.pass("micro", k); } p.pass("update", j); } n }),
        ("gradient accumulation of a module", |p| { let (n, m, k, j) = (p.draw(5, 100), p.draw(2, 16), p.draw(1, 6), p.draw(1, 5)); for _ in 0..n { for _ in 0..m { p.pass("loss", 3); p.pass_in("micro", k, true); } p.pass("update", j); } n }),
        ("a log every few steps", |p| { let (n, r, k, j) = (p.draw(40, 400), p.draw(2, 20), p.draw(1, 6), p.draw(1, 5)); let phase = p.draw(0, 1) * (r - 1); for step in 0..n { p.pass("step", k); if step % r == phase { p.pass("log", j); } } n }),
        ("an evaluation every few steps", |p| { let (n, r, e, k, j) = (p.draw(40, 300), p.draw(5, 40), p.draw(2, 20), p.draw(3, 6), p.draw(1, 5)); for step in 0..n { p.pass("forward", k); p.pass("backward", j); if step % r == r - 1 { for _ in 0..e { p.pass("forward", k); p.pass("metric", 1); } } } n }),
        ("an evaluation of its own", |p| { let (n, r, e, k, j) = (p.draw(40, 300), p.draw(5, 40), p.draw(2, 20), p.draw(3, 6), p.draw(1, 5)); for step in 0..n { p.pass("step", k); if step % r == r - 1 { for _ in 0..e { p.pass("evaluate", j); } } } n }),
        ("a warm-up", |p| { let (n, w, k, j) = (p.draw(100, 300), p.draw(3, 5), p.draw(3, 6), p.draw(3, 6)); for _ in 0..w { p.pass("warm_up", j); } for _ in 0..n { p.pass("step", k); } n }),
        ("requests of many tokens", |p| { let (n, k, j) = (p.draw(2, 60), p.draw(1, 6), p.draw(1, 5)); for _ in 0..n { p.pass("prefill", j); for _ in 0..p.draw(2, 40) { p.pass("token", k); } } n }),
        ("two phases", |p| { let (a, b, k, j) = (p.draw(11, 200), p.draw(11, 200), p.draw(3, 6), p.draw(3, 6)); for _ in 0..a { p.pass("one", k); } for _ in 0..b { p.pass("two", j); } a + b }),
        ("epochs", |p| { let (e, s, k, j) = (p.draw(4, 20), p.draw(4, 40), p.draw(1, 6), p.draw(1, 5)); for _ in 0..e { for _ in 0..s { p.pass("step", k); } p.pass("validate", j); } e * s }),
        ("conditions by chance", |p| { let (n, k, often) = (p.draw(20, 300), p.draw(3, 6), p.draw(5, 90)); for _ in 0..n { p.pass("step", k); if p.draw(0, 99) < often { p.pass("sometimes", 1); } } n }),
        ("a list that is kept", |p| { let (n, r, k) = (p.draw(40, 300), p.draw(1, 10), p.draw(3, 6)); for step in 0..n { p.pass("step", k); if step % r == 0 { p.take("keep", false); } } n }),
        ("a few requests of a module", |p| { let n = p.draw(2, 5); for _ in 0..n { p.pass("input", 2); p.layers(24, 4, false, true); } n }),
        ("a loop in a loop in a loop", |p| { let (n, m, l) = (p.draw(5, 30), p.draw(2, 8), p.draw(2, 8)); for _ in 0..n { p.pass("outer", 3); for _ in 0..m { p.pass("middle", 3); for _ in 0..l { p.pass("inner", 3); } } } n }),
        ("killed at any moment", |p| { let (n, k) = (p.draw(50, 300), p.draw(3, 6)); p.left = p.draw(20, n) * k + 1; for _ in 0..n { p.pass("step", k); } (p.left - 1) / k }),
        ("a log, and killed", |p| { let (n, r) = (p.draw(100, 300), p.draw(2, 20)); p.left = p.draw(60, n) * 3; let mut made = 0; for step in 0..n { if p.now < p.left { made += 1; } p.pass("step", 3); if step % r == 0 { p.pass("log", 3); } } made }),
    ];

    #[test]
    fn steps_are_right_or_cannot_be_told() {
        let (mut n_right, mut wrong, mut n_open) = (0, vec![], 0);
        for (shape, (name, run)) in SHAPES.iter().enumerate() {
            let mut counts = [0; 4];
            for seed in 0..SEEDS {
                let mut program = Program {
                    seed: (shape as u64 * 1000 + seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
                    now: 0,
                    places: vec![],
                    left: u64::MAX,
                };
                let truth = run(&mut program);
                let places: Vec<&Place> =
                    program.places.iter().map(|(_, place)| place).filter(|it| !it.times.is_empty()).collect();
                let is_near = |n: u64| n.abs_diff(truth) <= 1 + truth / 50;
                match turns(&places) {
                    Turns::Told { begins, .. } if is_near(begins.len() as u64) => {
                        n_right += 1;
                        counts[0] += 1;
                    }
                    Turns::Told { begins, .. } => {
                        counts[1] += 1;
                        wrong.push(format!("{name}, seed {seed}: {} for {truth}", begins.len()));
                    }
                    Turns::Perhaps(_) => {
                        n_open += 1;
                        counts[2] += 1;
                    }
                    Turns::None => {
                        n_open += 1;
                        counts[3] += 1;
                    }
                }
            }
            println!(
                "{name:40} right {:3} wrong {:3} perhaps {:3} none {:3}",
                counts[0], counts[1], counts[2], counts[3]
            );
        }
        println!("right {n_right}, wrong {}, open {n_open}", wrong.len());
        assert!(wrong.is_empty(), "{wrong:#?}");
    }
}
