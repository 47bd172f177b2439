//! Which ranks are called late again and again: generated jobs, healthy and not, on clocks of their own.

use expect_test::expect;

use super::check;
use crate::lateness::{Habit, Times};

const MICROSECOND: f64 = 1e3;
const MILLISECOND: f64 = 1e6;
const SECOND: f64 = 1e9;

/// SplitMix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to 1.
    fn part(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn between(&mut self, least: f64, most: f64) -> f64 {
        least + (most - least) * self.part()
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn happens(&mut self, chance: f64) -> bool {
        self.part() < chance
    }

    /// Of a normal distribution, by Box and Muller.
    fn normal(&mut self) -> f64 {
        let (a, b) = (1.0 - self.part(), self.part());
        (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()
    }
}

/// When a host goes on after a call.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Waits {
    /// At once.
    Never,
    /// When all have come, after every call.
    EachCall,
    /// When all have come to the last call of a step.
    EachStep,
    /// When all have come to the call so many before.
    Behind(usize),
}

/// What is peculiar about a healthy job.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Oddity {
    None,
    /// Single calls take much longer, on any rank.
    Spikes,
    /// More ranks than processors: whoever goes on waits for those before it, in their order, and now and then for a time slice.
    Loaded,
    /// One rank starts later by so many seconds.
    Starts(f64),
    /// One rank is late once, by so much of a step, somewhere.
    LateOnce(f64),
    /// Rank 0 writes a file every so many steps.
    Saves(usize),
    /// Each rank's work is another each time.
    Uneven,
    /// The clocks of half of the ranks are off by this, and nobody knows more than that they may be.
    Clock(f64),
}

struct Shape {
    name: &'static str,
    waits: Waits,
    n_calls: usize,
    oddity: Oddity,
}

const fn shape(name: &'static str, waits: Waits, n_calls: usize, oddity: Oddity) -> Shape {
    Shape { name, waits, n_calls, oddity }
}

const SHAPES: [Shape; 18] = [
    shape("each call blocks", Waits::EachCall, 2, Oddity::None),
    shape("the loss is read each step", Waits::EachStep, 4, Oddity::None),
    shape("hosts run ahead", Waits::Never, 3, Oddity::None),
    shape("hosts run ahead of the GPU by some calls", Waits::Behind(4), 3, Oddity::None),
    shape("many buckets", Waits::EachStep, 24, Oddity::None),
    shape("spikes, waiting", Waits::EachStep, 2, Oddity::Spikes),
    shape("spikes, ahead", Waits::Never, 2, Oddity::Spikes),
    shape("a loaded machine, each call blocks", Waits::EachCall, 1, Oddity::Loaded),
    shape("a loaded machine, steps", Waits::EachStep, 3, Oddity::Loaded),
    shape("starts late, ahead", Waits::Never, 2, Oddity::Starts(20.0)),
    shape("starts late, waiting", Waits::EachStep, 2, Oddity::Starts(20.0)),
    shape("late once by less than a step, ahead", Waits::Never, 1, Oddity::LateOnce(0.6)),
    shape("late once by less than a step, two calls", Waits::Never, 2, Oddity::LateOnce(0.3)),
    shape("late once by three steps", Waits::Never, 2, Oddity::LateOnce(3.0)),
    shape("saves a checkpoint", Waits::EachStep, 2, Oddity::Saves(10)),
    shape("uneven work, waiting", Waits::EachStep, 2, Oddity::Uneven),
    shape("uneven work, ahead", Waits::Behind(6), 2, Oddity::Uneven),
    shape("two hosts", Waits::EachStep, 2, Oddity::Clock(8.0 * MILLISECOND)),
];

/// A rank that takes longer before one of the calls of each step.
#[derive(Clone, Copy)]
struct Straggler {
    rank: usize,
    call: usize,
    longer: f64,
}

struct Job<'a> {
    shape: &'a Shape,
    random: Random,
    n_ranks: usize,
    n_steps: usize,
    /// Work before each call, and how much it varies, in nanoseconds.
    work: Vec<f64>,
    noise: f64,
    who: usize,
    when: usize,
}

impl Job<'_> {
    fn new(shape: &Shape, seed: u64) -> Job<'_> {
        let mut random = Random(seed);
        let n_ranks = [2, 2, 3, 4, 4, 8, 16][random.below(7)];
        let n_steps = 25 + random.below(100);
        let step = MILLISECOND * 10_f64.powf(random.between(0.7, 2.5));
        // Most of the work is before the first call: data, forward.
        let share = |call: usize| if call == 0 { 1.0 } else { 0.5 / shape.n_calls as f64 };
        let work = (0..shape.n_calls).map(|call| step * share(call)).collect();
        let noise = step * random.between(0.005, 0.08);
        let (who, when) = (random.below(n_ranks), random.below(n_steps));
        Job { shape, random, n_ranks, n_steps, work, noise, who, when }
    }

    fn step(&self) -> f64 {
        self.work.iter().sum()
    }

    /// What a straggler must be late by so that it can be seen: above each part of the floor, and above what chance makes of the
    /// latest of the others.
    fn floor(&self) -> f64 {
        let noise = match self.shape.oddity {
            Oddity::Uneven => self.work[0] * 0.3,
            Oddity::Loaded => 12.0 * MILLISECOND,
            // Of so many others one is later than usual most of the time.
            Oddity::Spikes if self.n_ranks > 8 => self.work[0] * 3.0,
            _ => self.noise,
        };
        let clock = if let Oddity::Clock(off) = self.shape.oddity { 3.0 * off } else { 0.0 };
        let latest = noise * ((2.0 * (self.n_ranks as f64).ln()).sqrt() + 2.0);
        (5.0 * MILLISECOND + clock).max(self.step() / 15.0).max(latest)
    }

    /// The time before a call on a rank.
    fn work(&mut self, rank: usize, step: usize, call: usize) -> f64 {
        let (work, noise) = (self.work[call], self.noise);
        let random = &mut self.random;
        let mut took = work + noise * random.normal();
        match self.shape.oddity {
            Oddity::Spikes if random.happens(0.06) => took += work * random.between(0.5, 6.0),
            Oddity::Loaded => {
                took += rank as f64 * 0.6 * MILLISECOND;
                if random.happens(0.3) {
                    took += MILLISECOND * random.between(0.5, 4.0);
                }
                if random.happens(0.05) {
                    took += MILLISECOND * random.between(4.0, 60.0);
                }
            }
            Oddity::Starts(late) if (rank, step, call) == (self.who, 0, 0) => {
                took += late * SECOND * random.between(0.05, 1.0);
            }
            Oddity::LateOnce(steps) if (rank, step, call) == (self.who, self.when, 0) => {
                took += steps * self.work.iter().sum::<f64>();
            }
            Oddity::Saves(every) if rank == 0 && call == 0 && step % every == every - 1 => took += 3.0 * work,
            Oddity::Uneven => took *= (0.2 * random.normal()).exp(),
            Oddity::None
            | Oddity::Spikes
            | Oddity::Starts(_)
            | Oddity::LateOnce(_)
            | Oddity::Saves(_)
            | Oddity::Clock(_) => {}
        }
        took.max(10.0 * MICROSECOND)
    }

    fn run(&mut self, straggler: Option<Straggler>) -> Vec<Habit> {
        let (off, uncertainty) = match self.shape.oddity {
            Oddity::Clock(off) => (off, Some(off as u64)),
            _ => (0.0, Some(0)),
        };
        let mut times = Times::new(self.n_ranks);
        let mut ready = vec![SECOND; self.n_ranks];
        let mut last: Vec<f64> = vec![];
        let mut random = Random(self.random.next());
        for step in 0..self.n_steps {
            for call in 0..self.shape.n_calls {
                let mut enters = ready.clone();
                for (rank, enter) in enters.iter_mut().enumerate() {
                    *enter += self.work(rank, step, call);
                    if let Some(it) = straggler.filter(|it| (it.rank, it.call) == (rank, call)) {
                        *enter += it.longer * random.between(0.8, 1.2);
                    }
                }
                last.push(enters.iter().copied().fold(0.0, f64::max));
                let met = match self.shape.waits {
                    Waits::Never => 0.0,
                    Waits::EachCall => last[last.len() - 1],
                    Waits::EachStep if call + 1 == self.shape.n_calls => last[last.len() - 1],
                    Waits::EachStep => 0.0,
                    Waits::Behind(n) => last.len().checked_sub(n + 1).map_or(0.0, |idx| last[idx]),
                };
                for (ready, enter) in ready.iter_mut().zip(&enters) {
                    let woken = random.between(10.0, 80.0) * MICROSECOND;
                    *ready = (enter + 10.0 * MICROSECOND).max(met + woken);
                }
                let clock = |rank: usize| if rank >= self.n_ranks / 2 { off } else { 0.0 };
                let seen: Vec<i128> =
                    enters.iter().enumerate().map(|(rank, time)| (time + clock(rank)) as i128).collect();
                times.add(&seen, &vec![call as u32; self.n_ranks]);
            }
        }
        times.habits(uncertainty)
    }
}

#[test]
fn a_rank_that_comes_late_is_a_straggler() {
    let step = |late: &str| format!("init:w {}", format!("AR8@10 {late} BC4@11 ").repeat(20));
    check(
        &[&step(""), &step("wait"), &step("wait wait"), &step("")],
        expect![[r#"
            Straggler [2] of world in collective -, lines 11 and 0, waiting [] x20
              rank 2 is repeatedly late on world: 20 of 20 times it comes after every other rank, typically by 2.001 s, and not because it was late before, mostly before step (train.py:11); that is 50 % of the time of these calls. Weak evidence: these are host clocks, and a busy host looks the same; gputrace record --nccl-timing measures the GPUs
        "#]],
    );
}

#[test]
fn a_rank_that_was_late_once_is_no_straggler() {
    let steps = "AR8@10 BC4@11 ".repeat(22);
    let others = format!("init:w {steps} exit");
    // It loads data; the hosts run ahead, so that it stays late to the end.
    check(
        &[&others, &format!("init:w wait {steps} exit"), &others],
        expect![[r#"
            consistent
            note: rank 1 was late once: all others waited 2.001 s for it in call 0 on world, step (train.py:10)
        "#]],
    );
    // Later, and for less than a second.
    let late = format!("init:w {steps} wait900000 {steps} exit");
    let others = format!("init:w {steps} {steps} exit");
    check(
        &[&others, &late, &others],
        expect![[r#"
        consistent
    "#]],
    );
}

#[test]
fn whether_a_rank_is_late_each_time_or_was_once_is_not_known_where_nothing_varies() {
    // Half a step late, and each step as long as the other.
    let steps = |first: &str| format!("init:w {first} {} exit", "wait50000 AR8@10 ".repeat(24));
    check(
        &[&steps(""), &steps("wait25000")],
        expect![[r#"
        consistent
        note: rank 1 comes after every other rank, typically by 25.0 ms, 23 of 23 times on world (step (train.py:10)). It may be late each time, or it was late once and the others never waited for it. Host clocks cannot distinguish the two; gputrace record --nccl-timing measures the GPUs
    "#]],
    );
}

#[test]
fn a_rank_that_is_late_by_less_than_a_millisecond_or_only_at_times_is_none() {
    let steps = |late: [&str; 4]| {
        let steps: String = late.iter().cycle().take(20).map(|late| format!(" {late} AR8@10")).collect();
        format!("init:w{steps}")
    };
    let in_time = steps([""; 4]);
    // Nobody waits for it here, so it adds up, to 0.45 ms.
    check(
        &[&in_time, &steps(["wait90", "", "", ""]), &in_time],
        expect![[r#"
            consistent
            note: all ranks made the same calls, and none did anything in the last 18.979 s: they may wait for the GPU, the network, or something outside NCCL. The traces do not show which
        "#]],
    );
    // Now this one and now that one.
    let (first, second) = (steps(["wait9000", "", "", ""]), steps(["", "", "wait9000", ""]));
    check(
        &[&first, &second, &first],
        expect![[r#"
            consistent
            note: all ranks made the same calls, and none did anything in the last 18.934 s: they may wait for the GPU, the network, or something outside NCCL. The traces do not show which
        "#]],
    );
}

#[test]
fn healthy_jobs_have_no_straggler() {
    let (mut n_jobs, mut n_unclear, mut wrong) = (0, 0, vec![]);
    for (number, shape) in SHAPES.iter().enumerate() {
        for seed in 0..120 {
            let mut job = Job::new(shape, seed * 1000 + number as u64);
            n_jobs += 1;
            let habits = job.run(None);
            n_unclear += usize::from(habits.iter().any(|habit| !habit.is_clear));
            if let Some(habit) = habits.iter().find(|habit| habit.is_clear) {
                wrong.push(format!("{} {seed}, {} ranks: {habit:?}", shape.name, job.n_ranks));
            }
        }
    }
    assert!(
        n_jobs >= 2000 && wrong.len() * 200 < n_jobs,
        "{} of {n_jobs}:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert!(n_unclear * 100 < n_jobs, "a note about {n_unclear} of {n_jobs}");
}

#[test]
fn a_straggler_above_the_floor_is_found_and_nobody_else() {
    let (mut n_jobs, mut wrong) = (0, vec![]);
    let seen_as_they_are = |shape: &&Shape| !matches!(shape.waits, Waits::Behind(_));
    for (number, shape) in SHAPES.iter().filter(seen_as_they_are).enumerate() {
        for seed in 0..60 {
            let mut job = Job::new(shape, 500_000 + seed * 1000 + number as u64);
            let (rank, call) = (job.random.below(job.n_ranks), job.random.below(shape.n_calls));
            let straggler = Straggler { rank, call, longer: job.floor() * job.random.between(1.3, 5.0) };
            n_jobs += 1;
            let mut habits = job.run(Some(straggler));
            habits.retain(|habit| habit.is_clear);
            if habits.iter().map(|habit| habit.track).ne([rank]) {
                wrong.push(format!(
                    "{} {seed}: rank {rank} of {} by {:.1} ms before call {call} of {:.1} ms, {} steps: {habits:?}",
                    shape.name,
                    job.n_ranks,
                    straggler.longer / MILLISECOND,
                    job.step() / MILLISECOND,
                    job.n_steps,
                ));
            }
        }
    }
    assert!(n_jobs >= 900 && wrong.len() * 50 < n_jobs, "{} of {n_jobs}:\n{}", wrong.len(), wrong.join("\n"));
}
