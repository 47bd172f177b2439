//! The addresses of a run that makes other driver calls than the recorded one.

use super::knowledge::Knowledge;
use super::learn::{Fact, Known};
use super::rule::Driver;
use crate::addresses::AddressSpace;
use crate::ops::DriverCall;
use crate::skip::State;

/// What-if addresses of a process of which only the recorded addresses are known.
///
/// As long as the simulated allocator makes the recorded calls, it gets the recorded addresses. From the first other
/// call on, the rule chooses, in an address space in which everything is taken that the recorded addresses show to be
/// taken at that time.
#[derive(Clone)]
pub struct Continued<'a> {
    knowledge: &'a Knowledge,
    driver: Driver,
    next_call: usize,
    next_fact: usize,
    /// Recorded frees of the burst at `next_call` that were made.
    n_freed: usize,
    has_parted: bool,
    disturbance: Option<Disturbance>,
}

/// A reproducible choice of moments at which something unknown is put in the rule's way.
#[derive(Clone, Copy, Debug)]
pub struct Disturbance {
    state: u64,
    rate: f64,
}

impl Disturbance {
    /// A fraction `rate` of the new segments; which ones depends on `seed`.
    pub fn new(seed: u64, rate: f64) -> Disturbance {
        Disturbance { state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, rate }
    }

    fn strikes(&mut self) -> bool {
        // Marsaglia's xorshift64: enough for choosing moments.
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        ((self.state >> 11) as f64) < self.rate * (1u64 << 53) as f64
    }
}

impl<'a> Continued<'a> {
    /// Continues a recorded process.
    pub fn new(knowledge: &'a Knowledge, disturbance: Option<Disturbance>) -> Continued<'a> {
        let driver = knowledge.start.clone();
        Continued {
            knowledge,
            driver,
            next_call: 0,
            next_fact: 0,
            n_freed: 0,
            has_parted: false,
            disturbance,
        }
    }

    /// Takes note of what is true from a recorded call on. Every address is a recorded one so far.
    fn follow_until(&mut self, call: usize) {
        while let Some(known) = self.upcoming().filter(|known| known.call as usize <= call) {
            self.driver.follow(known.fact);
            self.next_fact += 1;
        }
    }

    /// Takes note of what is true by an op.
    fn note_until(&mut self, op: u32) {
        while let Some(known) = self.upcoming().filter(|known| known.op <= op) {
            match known.fact {
                // What others allocate goes where the rule puts it here.
                Fact::HoleTaken { bytes, .. } => {
                    self.driver.alloc(bytes);
                }
                fact => self.driver.note(fact),
            }
            self.next_fact += 1;
        }
    }

    fn upcoming(&self) -> Option<Known> {
        self.knowledge.facts.get(self.next_fact).copied()
    }
}

impl AddressSpace for Continued<'_> {
    fn map(&mut self, bytes: u64, op: u32) -> Option<u64> {
        let script = &self.knowledge.script;
        if !self.has_parted {
            // Frees since the last call must be exactly the recorded burst.
            let burst =
                script[self.next_call..].iter().take_while(|event| event.call == DriverCall::Free).count();
            if burst == self.n_freed {
                self.next_call += burst;
            }
            self.n_freed = 0;
            let next = script.get(self.next_call);
            if next.is_some_and(|event| event.call == DriverCall::Alloc && event.bytes == bytes) {
                self.follow_until(self.next_call);
                self.driver.learn(script[self.next_call].address, bytes);
                self.next_call += 1;
                return Some(script[self.next_call - 1].address);
            }
            self.has_parted = true;
        }
        self.note_until(op);
        if self.disturbance.as_mut().is_some_and(Disturbance::strikes) {
            self.driver.disturb(bytes);
        }
        self.driver.alloc(bytes)
    }

    fn unmap(&mut self, address: u64, bytes: u64) {
        if !self.has_parted {
            // The order inside a flush may differ, so a free parts the ways only when it is not in the burst at all.
            let burst = self.knowledge.script[self.next_call.min(self.knowledge.script.len())..].iter();
            let mut burst = burst.take_while(|event| event.call == DriverCall::Free);
            if burst.any(|event| event.address == address) {
                self.n_freed += 1;
            } else {
                self.has_parted = true;
            }
        }
        self.driver.free(address, bytes);
    }

    fn reserve(&mut self, bytes: u64) -> u64 {
        self.has_parted = true;
        AddressSpace::reserve(&mut self.driver, bytes)
    }

    fn unreserve(&mut self, address: u64, bytes: u64) {
        self.driver.unreserve(address, bytes);
    }

    /// 1 from where the ways part. Until then every address is a recorded one.
    fn n_strayed(&self) -> u64 {
        u64::from(self.has_parted)
    }

    fn fork<'b>(&self) -> Option<Box<dyn AddressSpace + 'b>>
    where
        Self: 'b,
    {
        Some(Box::new(self.clone()))
    }

    fn write(&self, to: &mut State) -> bool {
        to.put_all(
            [self.next_call, self.next_fact, self.n_freed, usize::from(self.has_parted)].map(|it| it as u64),
        );
        to.put_option(self.disturbance.map(|disturbance| disturbance.state));
        self.driver.write(to)
    }

    fn next_change(&self) -> Option<u32> {
        self.upcoming().map(|known| known.op)
    }
}
