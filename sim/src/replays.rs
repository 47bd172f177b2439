//! Replays that were made, and the questions that they answer beside their own.
//!
//! A setting that would have decided nothing otherwise needs no run: `policies/torch/latitude.rs` knows which.

use std::sync::Mutex;

use crate::policies::ADDRESS_TIES;
use crate::policies::torch::{self, Latitude};
use crate::simulator::Outcome;
use crate::whatif::{Other, Question, SelfCheck};

/// Where the addresses of a replay come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Addresses {
    /// Those of the trace.
    Recorded,
    /// What the driver is thought to choose.
    Best,
    /// One of a family of guesses.
    Guess(usize),
}

/// What came of a replay.
#[derive(Clone, Debug)]
pub(crate) struct Replay {
    pub(crate) outcome: Outcome,
    /// Whether the driver was asked for something else than in the recorded run.
    pub(crate) has_parted: bool,
    /// Held against what was recorded.
    pub(crate) check: Option<SelfCheck>,
}

#[derive(Debug)]
struct Made {
    question: Question,
    addresses: Addresses,
    latitude: Option<Latitude>,
    replay: Replay,
}

/// All replays of a trace so far. Whether one of them answers a question never changes the answer.
#[derive(Debug, Default)]
pub(crate) struct Replays {
    made: Mutex<Vec<Made>>,
}

impl Replays {
    /// Keeps what came of a question.
    pub(crate) fn keep(
        &self,
        question: &Question,
        addresses: Addresses,
        latitude: Option<Latitude>,
        replay: &Replay,
    ) {
        if let Ok(mut made) = self.made.lock() {
            made.push(Made { question: question.clone(), addresses, latitude, replay: replay.clone() });
        }
    }

    #[cfg(test)]
    pub(crate) fn n(&self) -> usize {
        self.made.lock().map_or(0, |made| made.len())
    }

    /// What comes of a question, if a replay that was made tells.
    pub(crate) fn answering(&self, question: &Question, addresses: Addresses) -> Option<Replay> {
        let made = self.made.lock().ok()?;
        let mut alike = made.iter().filter(|made| made.addresses == addresses);
        alike.find_map(|made| made.answer(question))
    }
}

impl Made {
    fn answer(&self, asked: &Question) -> Option<Replay> {
        if self.question == *asked {
            return Some(self.replay.clone());
        }
        let alike =
            Question { options: self.question.options.clone(), limit: self.question.limit, ..asked.clone() };
        let latitude = self.latitude.as_ref().filter(|_| alike == self.question)?;
        let options = torch::parse(&asked.options, torch::profile(asked.torch_version)?).ok()?;
        let mut replay = self.replay.clone();
        let ties = replay.outcome.counters.iter_mut().filter(|(name, _)| *name == ADDRESS_TIES);
        ties.for_each(|(_, n)| *n += latitude.more_ties(&options));
        if self.question.limit == asked.limit {
            return latitude.covers(&options).then_some(replay);
        }
        // What others hold counts towards a limit, and on a device of known size a limit is a fraction of it.
        let limit = asked.limit.filter(|_| asked.other == Other::Ignored && asked.device_memory.is_none())?;
        if !latitude.covers_below(&options, limit) {
            return None;
        }
        if let Some(oom) = &mut replay.outcome.oom {
            oom.error.message = latitude.message_below(&oom.error.message, limit)?;
        }
        Some(replay)
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::{Allocation, Builder, Op, OpStream, PoolIdx, RecordedOom, StackId, StreamIdx};
    use crate::tune;
    use crate::whatif::{Laboratory, Question};

    const MIB: u64 = 1 << 20;

    struct Dice(u64);

    impl Dice {
        fn below(&mut self, n: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0 % n
        }
    }

    /// A program that asks for at most `largest` and gives half of it back, and fails at the end, sometimes.
    fn program(seed: u64, largest: u64) -> OpStream {
        let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let mut builder = Builder::new(0);
        let (mut live, mut n) = (vec![], 0);
        let (stack, pool) = (StackId::NONE, PoolIdx::DEFAULT);
        while n < 150 {
            let requested = 1 + dice.below(largest) / (1 << dice.below(6));
            let stream = StreamIdx(0);
            live.push(builder.alloc(Allocation { requested, address: 0, stack, stream, pool }));
            n += 1;
            while live.len() as u64 > 5 + dice.below(30) {
                let gone = live.swap_remove(dice.below(live.len() as u64) as usize);
                builder.op(Op::FreeRequested(gone));
                builder.op(Op::FreeCompleted(gone));
            }
        }
        if seed.is_multiple_of(2) {
            builder.oom(RecordedOom { rounded: 64 * largest, device_free: 0, stream: None, pool, stack });
        }
        builder.finish()
    }

    /// What is found on the way of another replay is what a replay of its own finds, wherever the limit is met.
    #[test]
    fn lower_limits_on_the_way_of_a_replay_change_no_answer() {
        let (mut n_met, mut n_found) = (0, 0);
        for seed in 0..40 {
            let stream = program(seed, (3 * MIB) << (seed % 4));
            let version = [(2, 4), (2, 11), (2, 12), (2, 15)][seed as usize % 4];
            let peak = Laboratory::new(&stream).unwrap().guess(&Question::torch(version, "")).unwrap();
            let limits = [35, 60, 80, 95, 99, 120].map(|percent| peak.books.reserved.peak * percent / 100);
            for options in
                ["", "expandable_segments:True", "garbage_collection_threshold:0.6", "max_split_size_mb:21"]
            {
                let question = Question::torch(version, options);
                let (together, alone) =
                    (Laboratory::new(&stream).unwrap(), Laboratory::new(&stream).unwrap());
                assert_eq!(
                    together.guess_with_limits(&question, &limits).ok(),
                    alone.guess(&question).ok(),
                    "seed {seed} {options}"
                );
                together.check_limits(&question, &limits).ok();
                n_found += together.n_replays();
                for limit in limits {
                    let below = Question { limit: Some(limit), ..question.clone() };
                    // A laboratory that knows nothing else.
                    let alone = Laboratory::new(&stream).unwrap();
                    let own = alone.guess(&below).ok();
                    n_met += usize::from(own.as_ref().is_some_and(|own| !own.fits()));
                    assert_eq!(together.guess(&below).ok(), own, "seed {seed} {options} {limit}");
                    assert_eq!(together.check_under(&below).ok(), alone.check_under(&below).ok());
                }
            }
        }
        assert!(n_met > 100 && n_found > 500, "{n_met} {n_found}");
    }

    fn questions(stream: &OpStream, version: (u8, u8)) -> Vec<Question> {
        let peak = Laboratory::new(stream)
            .unwrap()
            .guess(&Question::torch(version, ""))
            .unwrap()
            .books
            .reserved
            .peak;
        let limits = [None, Some(2 * peak), Some(peak * 9 / 10), Some(peak / 2)];
        let settings = tune::combinations(version, true).unwrap();
        let all = limits.iter().flat_map(|limit| settings.iter().map(move |options| (*limit, options)));
        all.map(|(limit, options)| Question { limit, ..Question::torch(version, options) }).collect()
    }

    #[test]
    fn what_a_replay_answers_beside_its_question_is_what_a_replay_of_its_own_says() {
        let mut n_answered = 0;
        for (seed, largest) in [(1, MIB), (2, 8 * MIB), (3, 60 * MIB), (4, 300 * MIB)] {
            let stream = program(seed, largest);
            for version in [(2, 3), (2, 11)] {
                let together = Laboratory::new(&stream).unwrap();
                for question in questions(&stream, version) {
                    let n_before = together.n_replays();
                    let outcome = together.guess(&question).unwrap();
                    n_answered += usize::from(together.n_replays() == n_before);
                    let alone = Laboratory::new(&stream).unwrap().guess(&question).unwrap();
                    assert_eq!(outcome, alone, "{question:?} of program {seed}");
                }
            }
        }
        assert!(n_answered > 1000, "only {n_answered} questions needed no replay");
    }

    #[test]
    fn a_search_that_gives_up_what_is_beaten_finds_what_one_that_replays_everything_finds() {
        for (seed, largest) in [(1, 30 * MIB), (2, 8 * MIB), (3, 60 * MIB), (7, 300 * MIB)] {
            let stream = program(seed, largest);
            for at in [0, 2, 3] {
                let version = (2, 11);
                let n_settings = tune::combinations(version, true).unwrap().len();
                let limit = questions(&stream, version)[at * n_settings].limit;
                let question = |options: &str| Question { limit, ..Question::torch(version, options) };
                let settings = tune::combinations(version, true).unwrap();
                let found =
                    tune::search(&Laboratory::new(&stream).unwrap(), &settings, question).unwrap().unwrap();
                let mut all: Vec<tune::Candidate> = settings
                    .iter()
                    .map(|options| {
                        let outcome = Laboratory::new(&stream).unwrap().guess(&question(options)).unwrap();
                        tune::Candidate { options: options.clone(), outcome }
                    })
                    .collect();
                all.sort_by_key(|it| it.options.clone());
                all.sort_by_key(tune::Candidate::rank);
                let best = all[0].outcome.books.reserved.peak;
                assert_eq!(
                    (found.n_tried, all[0].outcome.fits()),
                    (settings.len(), found.answer.outcome.fits())
                );
                assert!(found.answer.peak_reserved_range.1 >= best, "{seed}");
                let named =
                    |them: &[tune::Candidate]| them.iter().map(|it| it.options.clone()).collect::<Vec<_>>();
                assert_eq!(
                    named(&found.pareto),
                    named(&tune::pareto(all)),
                    "program {seed}, limit {limit:?}"
                );
            }
        }
    }
}
