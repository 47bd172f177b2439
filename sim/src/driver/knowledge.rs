//! What the driver calls of a trace, and what was seen beside them, say about a process's address space.

use super::REGION;
use super::learn::{Fact, Known, surprise};
use super::rule::Driver;
use crate::effort;
use crate::ops::{DriverCall, DriverEvent, OpStream};

/// What the recorded addresses of a process, and what was seen beside them, tell about its address space.
#[derive(Clone, Debug)]
pub struct Knowledge {
    pub(super) script: Vec<DriverEvent>,
    /// Before the first call.
    pub(super) start: Driver,
    /// Ascending by call and by op.
    pub(super) facts: Vec<Known>,
    /// What else happened in the address space was recorded.
    ceiling: Option<u64>,
    /// Recorded segments that were not where the rule alone would have put them, as a fraction of all.
    pub surprises: f64,
}

/// What PyTorch's streams were seen to take under the context is 352 MiB.
const MOST_BELOW: u64 = 1 << 30;

impl Knowledge {
    /// The known facts.
    pub fn facts(&self) -> &[Known] {
        &self.facts
    }

    /// Everything in the address space was recorded, and the rule explains every recorded address: it can be trusted with
    /// others.
    pub fn is_sure(&self) -> bool {
        self.ceiling.is_some() && self.surprises == 0.0 && !self.script.is_empty()
    }

    /// Learns from the driver calls of a trace, and from what was seen beside them.
    pub fn of(stream: &OpStream) -> Knowledge {
        let own = stream.driver.iter().filter(|it| matches!(it.call, DriverCall::Alloc | DriverCall::Free));
        let script: Vec<DriverEvent> = own.copied().collect();
        let surroundings = stream.surroundings.as_ref();
        let ceiling = surroundings.map(|surroundings| surroundings.ceiling);
        let n_calls = script.len() + surroundings.map_or(0, |surroundings| surroundings.events.len());
        let n_affordable = (effort::SEEDING.most / n_calls.max(1)).max(1);
        let learned = |start| {
            let mut knowledge =
                Knowledge { script: script.clone(), start, facts: Vec::new(), ceiling, surprises: 0.0 };
            knowledge.learn(stream);
            knowledge
        };
        let mut seeds = seeds(script.first(), ceiling).into_iter().take(n_affordable);
        let mut best = learned(seeds.next().unwrap_or_else(|| Driver::new(1 << 47)));
        while best.surprises > 0.0
            && let Some(seed) = seeds.next()
        {
            let other = learned(seed);
            if other.surprises < best.surprises {
                best = other;
            }
        }
        if best.ceiling.is_none() {
            best.date_back();
        }
        best.date_holes();
        best
    }

    fn learn(&mut self, stream: &OpStream) {
        let seen = stream.surroundings.iter().flat_map(|surroundings| &surroundings.events);
        let mut seen = seen.peekable();
        let own = (0u32..).zip(&stream.driver);
        let own = own.filter(|(_, it)| matches!(it.call, DriverCall::Alloc | DriverCall::Free));
        let mut driver = self.start.clone();
        let (mut n_segments, mut n_surprises) = (0u64, 0u64);
        let mut facts = Vec::new();
        for (call, (index, event)) in (0u32..).zip(own) {
            while let Some(seen) = seen.next_if(|seen| seen.before_call <= index) {
                let mut learned = Vec::new();
                driver.saw(seen.what, |driver, address, bytes| {
                    learned = driver.learn_seen(address, bytes);
                    n_segments += 1;
                    n_surprises += u64::from(surprise(&learned));
                    Some(address)
                });
                learned.push(Fact::Seen(seen.what));
                facts.extend(learned.into_iter().map(|fact| Known { call, op: seen.before_op, fact }));
            }
            if event.call == DriverCall::Free {
                driver.free(event.address, event.bytes);
                continue;
            }
            let learned = match stream.surroundings {
                Some(_) => driver.learn_seen(event.address, event.bytes),
                None => driver.learn(event.address, event.bytes),
            };
            n_segments += 1;
            n_surprises += u64::from(surprise(&learned));
            facts.extend(learned.into_iter().map(|fact| Known { call, op: event.before_op, fact }));
        }
        let call = self.script.len() as u32;
        facts.extend(seen.map(|seen| Known { call, op: seen.before_op, fact: Fact::Seen(seen.what) }));
        self.facts = facts;
        self.surprises = n_surprises as f64 / n_segments.max(1) as f64;
    }

    /// Somebody's allocation went where the rule put it: that was at the latest when the rule last preferred its place.
    fn date_holes(&mut self) {
        let mut driver = self.start.clone();
        let mut last_preferred: Vec<Option<u32>> = vec![None; self.facts.len()];
        let mut next_fact = 0;
        let n_affordable = effort::DATING.most / self.script.len().max(1);
        for (call, event) in (0u32..).zip(&self.script) {
            while let Some(known) = self.facts.get(next_fact).filter(|known| known.call <= call) {
                driver.follow(known.fact);
                next_fact += 1;
            }
            for (index, known) in self.facts.iter().enumerate().skip(next_fact).take(n_affordable) {
                if let Fact::HoleTaken { start, bytes } = known.fact
                    && driver.place(bytes).is_some_and(|place| place.address() == start)
                {
                    last_preferred[index] = Some(call);
                }
            }
            if event.call == DriverCall::Alloc {
                driver.learn(event.address, event.bytes);
            } else {
                driver.free(event.address, event.bytes);
            }
        }
        for (known, call) in self.facts.iter_mut().zip(last_preferred) {
            if let Some(call) = call {
                known.call = call;
                known.op = self.script[call as usize].before_op;
            }
        }
        self.facts.sort_by_key(|known| known.call);
    }

    /// What is in the way was there from the start, unless a recorded address then contradicts it. Room that was
    /// found only came to be at some time; it counts from when it was seen.
    fn date_back(&mut self) {
        let mut accepted = self.n_contradictions(&self.facts);
        let effort = self.script.len().max(1);
        for index in 0..self.facts.len().min(effort::DATING.most / effort) {
            let Known { call, fact, .. } = self.facts[index];
            if call == 0 || !matches!(fact, Fact::Taken(..) | Fact::Foreign { .. }) {
                continue;
            }
            let mut earlier = self.facts.clone();
            earlier[index] = Known { call: 0, op: 0, fact };
            earlier.sort_by_key(|known| known.call);
            let contradictions = self.n_contradictions(&earlier);
            if contradictions <= accepted {
                accepted = contradictions;
                self.facts[index] = Known { call: 0, op: 0, fact };
            }
        }
        self.facts.sort_by_key(|known| known.call);
    }

    fn n_contradictions(&self, facts: &[Known]) -> usize {
        let mut driver = self.start.clone();
        let mut facts = facts.iter().peekable();
        let mut n = 0;
        for (index, event) in (0u32..).zip(&self.script) {
            while let Some(known) = facts.next_if(|known| known.call <= index) {
                driver.note(known.fact);
            }
            if event.call == DriverCall::Alloc {
                n += usize::from(!driver.learn(event.address, event.bytes).is_empty());
            } else {
                driver.free(event.address, event.bytes);
            }
        }
        n
    }
}

/// What may have been there before the first call, the most likely first.
fn seeds(first: Option<&DriverEvent>, ceiling: Option<u64>) -> Vec<Driver> {
    let Some(first) = first else { return vec![Driver::new(ceiling.unwrap_or(1 << 47))] };
    let below = (0..=MOST_BELOW).step_by(REGION as usize);
    let with_context =
        below.filter_map(|below| Driver::with_first_below(first.address, first.bytes, below, ceiling));
    match ceiling {
        Some(ceiling) => std::iter::once(Driver::new(ceiling)).chain(with_context).collect(),
        None => {
            let bare = Driver::new(first.address.saturating_add(first.bytes).next_multiple_of(REGION));
            with_context.chain([bare]).collect()
        }
    }
}
