//! Who owns which thread line: a table in the process's own memory.
//!
//! Whether a line is free must never hang on what another process wrote, or could not read: two threads with one line
//! would tear each other's memory. So the shared file has no say here, and a thread counts as gone only if the kernel
//! says so. A forked child finds a copy whose owners are of its parent's session, which are nobody to it.
//!
//! | slot | means | who may change it |
//! |---|---|---|
//! | 0, or of another session | free | any thread, to its own number |
//! | of a thread that lives | that thread's | that thread, to 0 |
//! | of a thread that is gone | left behind | any thread, to its own number; it finishes what was left, then 0 |

use crate::map::MAX_THREADS;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// A thread of a session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner {
    /// Tells the sessions of a process and of those it was forked from apart; not 0.
    pub session: u32,
    /// Its kernel thread id.
    pub tid: u32,
}

impl Owner {
    fn encode(self) -> u64 {
        u64::from(self.session) << 32 | u64::from(self.tid)
    }

    fn decode(slot: u64) -> Owner {
        Owner { session: (slot >> 32) as u32, tid: slot as u32 }
    }
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

    /// Makes the lowest free line that `suits` the caller's, so that a process uses no more lines than it has threads.
    pub fn take(&self, me: Owner, suits: impl Fn(u32) -> bool) -> Option<u32> {
        for (line, slot) in (0..).zip(&self.slots) {
            let now = slot.load(Ordering::Relaxed);
            if (now == 0 || Owner::decode(now).session != me.session)
                && suits(line)
                // SYNC: what the last owner left is finished.
                && slot.compare_exchange(now, me.encode(), Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                self.used.fetch_max(line + 1, Ordering::Relaxed);
                return Some(line);
            }
        }
        None
    }

    /// Looks at the next `most` lines that ever had an owner, has `finish` complete what threads left there that are
    /// gone, and makes these lines free. `current` is the caller's own line: any other of its number was left by a
    /// thread that had the number before. How many became free.
    pub fn reclaim(
        &self,
        me: Owner,
        current: Option<u32>,
        most: u32,
        is_gone: impl Fn(u32) -> bool,
        mut finish: impl FnMut(u32),
    ) -> u32 {
        let used = self.used.load(Ordering::Relaxed).min(MAX_THREADS as u32);
        let mut n_free = 0;
        for _ in 0..most.min(used) {
            let line = self.next.fetch_add(1, Ordering::Relaxed) % used;
            let Some(slot) = self.slots.get(line as usize) else { continue };
            let now = slot.load(Ordering::Relaxed);
            let owner = Owner::decode(now);
            if now == 0 || owner.session != me.session || current == Some(line) {
                continue;
            }
            if owner.tid != me.tid {
                // One thread wins the right to finish; its own number keeps the others away meanwhile.
                if !is_gone(owner.tid)
                    || slot.compare_exchange(now, me.encode(), Ordering::Acquire, Ordering::Relaxed).is_err()
                {
                    continue;
                }
                // A new thread may have got the number, and this line, since we asked. Nothing was touched yet.
                if !is_gone(owner.tid) {
                    let _ = slot.compare_exchange(me.encode(), now, Ordering::Release, Ordering::Relaxed);
                    continue;
                }
            }
            finish(line);
            self.give_back(line);
            n_free += 1;
        }
        n_free
    }

    /// Whether the line is this thread's.
    #[must_use]
    pub fn is_of(&self, line: u32, owner: Owner) -> bool {
        self.slots.get(line as usize).is_some_and(|slot| slot.load(Ordering::Relaxed) == owner.encode())
    }

    /// Whose the line is; a session of 0 is nobody's.
    #[must_use]
    pub fn owner(&self, line: u32) -> Owner {
        Owner::decode(self.slots.get(line as usize).map_or(0, |slot| slot.load(Ordering::Acquire)))
    }

    /// Makes a line free. Only for its owner.
    pub fn give_back(&self, line: u32) {
        if let Some(slot) = self.slots.get(line as usize) {
            // SYNC: what the last owner left is finished.
            // An exchange like every other write to a slot: their order is then one for loom too.
            slot.swap(0, Ordering::Release);
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

    const A: Owner = Owner { session: 1, tid: 10 };
    const B: Owner = Owner { session: 1, tid: 11 };

    fn any(_: u32) -> bool {
        true
    }

    #[test]
    fn a_line_has_one_owner_and_is_free_after_it() {
        let owners = Owners::new();
        assert_eq!((owners.take(A, any), owners.take(B, any)), (Some(0), Some(1)));
        assert!(owners.is_of(0, A) && !owners.is_of(0, B));
        owners.give_back(0);
        assert_eq!(owners.take(B, any), Some(0));
    }

    #[test]
    fn a_line_of_a_thread_that_may_live_is_never_taken() {
        let owners = Owners::new();
        for tid in 0..MAX_THREADS as u32 {
            assert_eq!(owners.take(Owner { session: 1, tid: tid + 100 }, any), Some(tid));
        }
        assert_eq!(owners.take(A, any), None);
        let finished = |line| panic!("line {line} has an owner");
        assert_eq!(owners.reclaim(A, None, MAX_THREADS as u32, |_| false, finished), 0);
        assert_eq!(owners.take(A, any), None);
    }

    #[test]
    fn what_a_thread_left_is_finished_once_before_its_line_is_free() {
        let owners = Owners::new();
        owners.take(A, any);
        owners.take(B, any);
        let mut finished = Vec::new();
        let n = owners.reclaim(B, Some(1), 8, |tid| tid == A.tid, |line| finished.push(line));
        assert_eq!((n, &*finished), (1, &[0][..]));
        assert_eq!(owners.reclaim(B, Some(1), 8, any, |line| panic!("line {line} is free or mine")), 0);
    }

    #[test]
    fn a_number_that_the_kernel_gave_again_does_not_keep_the_dead_threads_line() {
        let owners = Owners::new();
        owners.take(A, any);
        let line = owners.take(A, any);
        let mut finished = Vec::new();
        owners.reclaim(A, line, 8, |_| false, |line| finished.push(line));
        assert_eq!((line, &*finished), (Some(1), &[0][..]));
        assert!(owners.is_of(1, A));
    }

    #[test]
    fn a_forked_child_finds_all_lines_free_and_finishes_nothing() {
        let owners = Owners::new();
        owners.take(A, any);
        let child = Owner { session: 2, tid: 10 };
        assert_eq!(owners.reclaim(child, None, 8, any, |line| panic!("line {line} is the parent's")), 0);
        assert_eq!(owners.take(child, any), Some(0));
    }

    #[test]
    fn threads_that_come_one_after_another_need_two_lines_and_a_few_questions_each() {
        let owners = Owners::new();
        owners.take(A, any);
        let asked = Mutex::new(0_u32);
        let n_threads = if cfg!(miri) { 100 } else { 100_000 };
        for tid in 1000..1000 + n_threads {
            let me = Owner { session: 1, tid };
            let is_gone = |other| {
                *asked.lock().unwrap() += 1;
                other != A.tid
            };
            owners.reclaim(me, None, 4, is_gone, |_| ());
            assert!(owners.take(me, any).is_some_and(|line| line < 4));
        }
        assert!(*asked.lock().unwrap() <= 8 * n_threads);
    }

    #[test]
    fn threads_that_race_for_lines_never_share_one() {
        let owners = Owners::new();
        let held: Mutex<HashSet<u32>> = Mutex::default();
        let lives = [const { AtomicU32::new(0) }; 8];
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (owners, held, lives) = (&owners, &held, &lives);
                scope.spawn(move || {
                    for life in 0..if cfg!(miri) { 20 } else { 2_000 } {
                        let me = Owner { session: 1, tid: thread << 16 | (life + 1) };
                        // A life is over when the thread's next one begins.
                        lives[thread as usize].store(me.tid, Ordering::SeqCst);
                        let is_gone = |tid: u32| lives[(tid >> 16) as usize].load(Ordering::SeqCst) != tid;
                        owners.reclaim(me, None, 4, is_gone, |line| {
                            assert!(held.lock().unwrap().remove(&line), "finished twice");
                        });
                        let line = owners.take(me, any).expect("few threads");
                        assert!(held.lock().unwrap().insert(line), "two owners of line {line}");
                    }
                });
            }
        });
    }
}
