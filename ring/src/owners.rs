//! Who owns which thread line: a table in the process's own memory.
//!
//! Two threads with one line would tear each other's memory, so a line is taken from its owner only if that thread is known to be
//! gone. A thread cannot ask the kernel about another: under a sandbox the question may kill the process, and a process that shares
//! our memory without being a thread of ours (`CLONE_VM` without `CLONE_THREAD`) looks gone to `tgkill`. So the recorder asks, for each
//! claim by itself:
//!
//! 1. Each claim of a line has a word that no other claim of this line has. Its owner publishes the word, and its thread id, in the
//!    line's [`Tenure`].
//! 2. The recorder reads the word, looks for the thread, and if there is none, stores *that word* in [`Tenure::gone`].
//! 3. A thread takes the line over if `gone` is the word of the claim in this table, by exchanging this word for its own.
//!
//! An answer that comes late names a claim that is over, and frees nothing. A forked child finds a copy whose owners are of its
//! parent's session, which are nobody to it. A thread that ends gives its line back by itself; where it cannot, and there is no
//! recorder, its line stays taken.
//!
//! | slot | means | who may change it |
//! |---|---|---|
//! | even word, or of another session | free | any thread, to a claim of its own |
//! | odd word, its thread lives | a claim | that thread, to the next even word |
//! | odd word, which the recorder says is gone | left behind | any thread, to a claim of its own; it finishes what was left, and gives the line back |

use crate::map::MAX_THREADS;
#[cfg(doc)]
use crate::map::Tenure;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// A claim of a line: the right to write to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Claim {
    /// Index of the line.
    pub line: u32,
    /// Tells the claims of a line apart: odd, and different from all others of the line but for one in 2^31.
    pub word: u32,
}

fn encode(session: u32, word: u32) -> u64 {
    u64::from(session) << 32 | u64::from(word)
}

/// Session and word of a slot.
fn decode(slot: u64) -> (u32, u32) {
    ((slot >> 32) as u32, slot as u32)
}

fn is_taken(word: u32) -> bool {
    !word.is_multiple_of(2)
}

/// The word of the next claim.
fn next(word: u32) -> u32 {
    (word | 1).wrapping_add(if is_taken(word) { 2 } else { 0 })
}

/// The table.
#[derive(Debug)]
pub struct Owners {
    slots: [AtomicU64; MAX_THREADS],
    /// Lines that ever had an owner lie below this one.
    used: AtomicU32,
    /// Where the next look for threads that are gone begins.
    next: AtomicU32,
}

impl Owners {
    /// All lines are free.
    #[cfg(loom)]
    #[must_use]
    pub fn new() -> Owners {
        let slots = core::array::from_fn(|_| AtomicU64::new(0));
        Owners { slots, used: AtomicU32::new(0), next: AtomicU32::new(0) }
    }

    /// All lines are free.
    #[cfg(not(loom))]
    #[must_use]
    #[expect(clippy::new_without_default, reason = "for a static; nothing else has one")]
    pub const fn new() -> Owners {
        let slots = [const { AtomicU64::new(0) }; MAX_THREADS];
        Owners { slots, used: AtomicU32::new(0), next: AtomicU32::new(0) }
    }

    /// Claims the lowest free line that `suits`, so a process uses no more lines than it has threads. `session` tells the sessions of
    /// a process and of those it was forked from apart; not 0.
    pub fn take(&self, session: u32, suits: impl Fn(u32) -> bool) -> Option<Claim> {
        for (line, slot) in (0..).zip(&self.slots) {
            let now = slot.load(Ordering::Relaxed);
            let (theirs, word) = decode(now);
            if theirs == session && is_taken(word) || !suits(line) {
                continue;
            }
            let claim = Claim { line, word: next(word) };
            // SYNC: what the last owner left is finished.
            if slot
                .compare_exchange(now, encode(session, claim.word), Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
            {
                self.used.fetch_max(line + 1, Ordering::Relaxed);
                return Some(claim);
            }
        }
        None
    }

    /// Looks at the next `most` lines that ever had an owner, has `finish` complete what threads left there whose claims are gone, and
    /// makes these lines free. `finish` is given a claim of the caller's own. `current` is the caller's line. How many became free.
    pub fn reclaim(
        &self,
        session: u32,
        current: Option<u32>,
        most: u32,
        is_gone: impl Fn(Claim) -> bool,
        mut finish: impl FnMut(Claim),
    ) -> u32 {
        let used = self.used.load(Ordering::Relaxed).min(MAX_THREADS as u32);
        let mut n_free = 0;
        for _ in 0..most.min(used) {
            let line = self.next.fetch_add(1, Ordering::Relaxed) % used;
            let Some(slot) = self.slots.get(line as usize) else { continue };
            let now = slot.load(Ordering::Relaxed);
            let (theirs, word) = decode(now);
            if theirs != session || !is_taken(word) || current == Some(line) || !is_gone(Claim { line, word })
            {
                continue;
            }
            // One thread wins the right to finish. Whoever has claimed the line since has another word, so that this fails.
            let mine = Claim { line, word: next(word) };
            if slot
                .compare_exchange(now, encode(session, mine.word), Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
            {
                finish(mine);
                self.give_back(session, mine);
                n_free += 1;
            }
        }
        n_free
    }

    /// Whether the line is still held by this claim.
    #[must_use]
    pub fn is_held(&self, session: u32, claim: Claim) -> bool {
        let slot = self.slots.get(claim.line as usize).map(|slot| slot.load(Ordering::Relaxed));
        slot == Some(encode(session, claim.word))
    }

    /// The word by which a line is held in this session; `None` if it is free.
    #[must_use]
    pub fn word(&self, session: u32, line: u32) -> Option<u32> {
        let (theirs, word) = decode(self.slots.get(line as usize)?.load(Ordering::Relaxed));
        (theirs == session && is_taken(word)).then_some(word)
    }

    /// Makes a line free. Only for the owner of this claim.
    pub fn give_back(&self, session: u32, claim: Claim) {
        if let Some(slot) = self.slots.get(claim.line as usize) {
            // SYNC: what the last owner left is finished.
            // An exchange like every other write to a slot: their order is then one for loom too.
            slot.swap(encode(session, claim.word.wrapping_add(1)), Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::collections::HashSet;
    use std::sync::Mutex;
    use std::vec::Vec;

    fn any(_: u32) -> bool {
        true
    }

    #[test]
    fn a_line_has_one_owner_and_is_free_after_it() {
        let owners = Owners::new();
        let first = owners.take(1, any).expect("a line");
        assert_eq!((first.line, owners.take(1, any).map(|claim| claim.line)), (0, Some(1)));
        assert!(owners.is_held(1, first));
        owners.give_back(1, first);
        assert!(!owners.is_held(1, first));
        let again = owners.take(1, any).expect("a line");
        assert!(again.line == 0 && again.word != first.word && !owners.is_held(1, first));
    }

    #[test]
    fn a_line_of_a_thread_that_may_live_is_never_taken() {
        let owners = Owners::new();
        for line in 0..MAX_THREADS as u32 {
            assert_eq!(owners.take(1, any).map(|claim| claim.line), Some(line));
        }
        assert_eq!(owners.take(1, any), None);
        let finished = |claim| panic!("{claim:?} has an owner");
        assert_eq!(owners.reclaim(1, None, MAX_THREADS as u32, |_| false, finished), 0);
        assert_eq!(owners.take(1, any), None);
    }

    #[test]
    fn what_a_thread_left_is_finished_once_before_its_line_is_free() {
        let owners = Owners::new();
        let (left, mine) = (owners.take(1, any).expect("a line"), owners.take(1, any).expect("a line"));
        let mut finished = Vec::new();
        let n =
            owners.reclaim(1, Some(mine.line), 8, |claim| claim == left, |claim| finished.push(claim.line));
        assert_eq!((n, &*finished), (1, &[left.line][..]));
        let none = |claim: Claim| panic!("{claim:?} is free or mine");
        assert_eq!(owners.reclaim(1, Some(mine.line), 8, |_| true, none), 0);
    }

    #[test]
    fn an_answer_about_an_earlier_claim_frees_nothing() {
        let owners = Owners::new();
        let first = owners.take(1, any).expect("a line");
        owners.give_back(1, first);
        let second = owners.take(1, any).expect("a line");
        assert_eq!(second.line, first.line);
        assert_eq!(owners.reclaim(1, None, 8, |claim| claim.word == first.word, |_| panic!("it lives")), 0);
        assert!(owners.is_held(1, second));
    }

    #[test]
    fn a_forked_child_finds_all_lines_free_and_finishes_nothing() {
        let owners = Owners::new();
        let parents = owners.take(1, any).expect("a line");
        assert_eq!(owners.reclaim(2, None, 8, |_| true, |claim| panic!("{claim:?} is the parent's")), 0);
        let child = owners.take(2, any).expect("a line");
        assert!(child.line == parents.line && child.word != parents.word);
    }

    #[test]
    fn threads_that_come_one_after_another_need_few_lines_and_a_few_questions_each() {
        let owners = Owners::new();
        let lives = owners.take(1, any);
        let asked = Mutex::new(0_u32);
        let n_threads = if cfg!(miri) { 100 } else { 100_000 };
        for _ in 0..n_threads {
            let is_gone = |other| {
                *asked.lock().unwrap() += 1;
                Some(other) != lives
            };
            owners.reclaim(1, None, 4, is_gone, |_| ());
            assert!(owners.take(1, any).is_some_and(|claim| claim.line < 4));
        }
        assert!(*asked.lock().unwrap() <= 8 * n_threads);
    }

    #[test]
    fn threads_that_race_for_lines_never_share_one() {
        let owners = Owners::new();
        let held: Mutex<HashSet<u32>> = Mutex::default();
        let gone: [AtomicU32; MAX_THREADS] = [const { AtomicU32::new(0) }; MAX_THREADS];
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (owners, held, gone) = (&owners, &held, &gone);
                scope.spawn(move || {
                    for life in 0..if cfg!(miri) { 20 } else { 2_000 } {
                        let is_gone =
                            |claim: Claim| gone[claim.line as usize].load(Ordering::SeqCst) == claim.word;
                        owners.reclaim(1, None, 4, is_gone, |claim| {
                            assert!(held.lock().unwrap().remove(&claim.line), "finished twice");
                        });
                        let claim = owners.take(1, any).expect("few threads");
                        assert!(held.lock().unwrap().insert(claim.line), "two owners of {claim:?}");
                        if (life + thread) % 3 == 0 {
                            held.lock().unwrap().remove(&claim.line);
                            owners.give_back(1, claim);
                        } else {
                            // It ends without a word, and the recorder finds out.
                            gone[claim.line as usize].store(claim.word, Ordering::SeqCst);
                        }
                    }
                });
            }
        });
    }
}
