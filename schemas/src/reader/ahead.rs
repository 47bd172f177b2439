//! Decodes the blocks of events that come next on other processors.
//!
//! Whoever reads the events reads the file, too, and hands a few blocks on as they are stored. Threads check, decompress and decode them. Each
//! block is taken in its turn, and what was wrong with it is reported then: the order of events and of damage does not depend on how many
//! threads there are, nor on which of them is faster.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use super::input::{Unfolder, shrink};
use super::{Block, Trace};
use crate::block::Header;
use crate::event::Event;

/// More threads than this wait for the one that looks at the events: to look at them takes it about as long as one thread needs to decode them.
const MOST_THREADS: usize = 3;
/// Blocks of a trace for which it is worth starting threads.
const LEAST_BLOCKS: usize = 8;

/// The threads, and what they have to do.
pub(super) struct Ahead {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// For blocks that no thread has begun when they are needed.
    own: Unfolder,
    /// The next block of [`Trace`]'s events to hand on.
    next: usize,
}

#[derive(Default)]
struct Shared {
    work: Mutex<Work>,
    has_jobs: Condvar,
    has_results: Condvar,
}

#[derive(Default)]
struct Work {
    /// In the order in which they are needed.
    jobs: VecDeque<Job>,
    done: BTreeMap<usize, Decoded>,
    /// Memory of blocks that are done, for the next ones.
    spare_stored: Vec<Vec<u8>>,
    spare_events: Vec<Vec<Event>>,
    is_over: bool,
}

/// A block as it is stored.
struct Job {
    block: usize,
    header: Header,
    stored: Vec<u8>,
    /// Memory: the events of a block that is done.
    events: Vec<Event>,
}

/// The events of a block in the order of their times; or what is wrong with it, and an empty list.
type Decoded = (Vec<Event>, Result<(), String>);

impl Ahead {
    /// Starts threads for a trace from a block on; none where they are of no use or cannot be had.
    pub(super) fn of(trace: &Trace, next: usize) -> Option<Ahead> {
        if trace.events.len() < LEAST_BLOCKS {
            return None;
        }
        let n_others = thread::available_parallelism().map_or(0, |n| usize::from(n) - 1);
        let shared = Arc::new(Shared::default());
        let mut threads = Vec::new();
        for _ in 0..n_others.min(MOST_THREADS) {
            let (Ok(unfolder), shared) = (Unfolder::new(), Arc::clone(&shared)) else { break };
            let started = thread::Builder::new().spawn(move || work(&shared, unfolder));
            match started {
                Ok(thread) => threads.push(thread),
                Err(_) => break,
            }
        }
        if threads.is_empty() {
            return None;
        }
        let own = Unfolder::new().ok()?;
        Some(Ahead { shared, threads, own, next })
    }

    /// The events of a block, as [`Trace::decode`] has them. Blocks are asked for one after the other. `spare` is memory that is needed no more.
    pub(super) fn take(&mut self, trace: &Trace, block: usize, spare: Vec<Vec<Event>>) -> Decoded {
        self.hand_on(trace, block, spare);
        let mut work = self.shared.lock();
        loop {
            if let Some(decoded) = work.done.remove(&block) {
                return decoded;
            }
            match work.jobs.pop_front() {
                Some(job) => {
                    drop(work);
                    let (of, decoded, stored) = job.decoded(&mut self.own);
                    work = self.shared.lock();
                    work.spare_stored.push(stored);
                    work.done.insert(of, decoded);
                }
                None => work = self.shared.has_results.wait(work).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Reads as many blocks as the threads may need while the next one is looked at.
    fn hand_on(&mut self, trace: &Trace, block: usize, spare: Vec<Vec<Event>>) {
        let mut work = self.shared.lock();
        work.spare_events.extend(spare);
        while self.next <= block + self.threads.len() + 1 {
            let Some(found) = trace.events.get(self.next) else { return };
            let mut stored = work.spare_stored.pop().unwrap_or_default();
            let events = work.spare_events.pop().unwrap_or_default();
            drop(work);
            let fetched = fetch(trace, found, &mut stored);
            work = self.shared.lock();
            match fetched {
                Ok(header) => {
                    work.jobs.push_back(Job { block: self.next, header, stored, events });
                    self.shared.has_jobs.notify_one();
                }
                Err(what) => _ = work.done.insert(self.next, (vec![], Err(what))),
            }
            self.next += 1;
        }
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.shared.lock().is_over = true;
        self.shared.has_jobs.notify_all();
        for thread in self.threads.drain(..) {
            // It ends after the block that it is at; what that came to is of no interest.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Job {
    fn decoded(self, unfolder: &mut Unfolder) -> (usize, Decoded, Vec<u8>) {
        let Job { block, header, mut stored, mut events } = self;
        events.clear();
        let result = unfolder.events(&header, &stored, &mut events);
        shrink(&mut stored);
        (block, (events, result), stored)
    }
}

fn fetch(trace: &Trace, block: &Block, stored: &mut Vec<u8>) -> Result<Header, String> {
    trace.input.lock().unwrap_or_else(PoisonError::into_inner).fetch(block, stored)
}

/// What a thread does.
fn work(shared: &Shared, mut unfolder: Unfolder) {
    let mut work = shared.lock();
    while !work.is_over {
        match work.jobs.pop_front() {
            Some(job) => {
                drop(work);
                let (block, decoded, stored) = job.decoded(&mut unfolder);
                work = shared.lock();
                work.spare_stored.push(stored);
                work.done.insert(block, decoded);
                shared.has_results.notify_one();
            }
            None => work = shared.has_jobs.wait(work).unwrap_or_else(PoisonError::into_inner),
        }
    }
}
