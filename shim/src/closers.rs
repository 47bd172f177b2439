//! Threads that are inside of `dlclose`, and those that have left it past our hook.

use crate::stack::objects::Closing;
use crate::tls::{self, Tls};
use crate::{mark, own, sys, thread_id};
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use gputrace_ring::clock;

/// A thread is inside of `dlclose`. No frame has so many bytes between a program and its event's record.
const ROOM: usize = 3072;
pub(crate) type Mark = mark::Mark<ROOM>;

/// Who is inside of `dlclose`. Functions that the loader calls there may leave it by `longjmp`, end the thread or fork; what
/// would stay counted would keep everybody from reading for ever.
pub(crate) struct Closer(Option<(&'static Slot, u64)>);

struct Slot {
    /// Process and thread; 0 free.
    owner: AtomicU64,
    /// Where the thread's words are, and its mark.
    words: AtomicUsize,
    place: AtomicUsize,
}

static SLOTS: [Slot; 64] =
    [const { Slot { owner: AtomicU64::new(0), words: AtomicUsize::new(0), place: AtomicUsize::new(0) } }; 64];

impl Closer {
    /// From here on what other threads read of objects, they have read.
    pub(crate) fn begin(mark: &Mark) -> Closer {
        let tls = tls::here();
        let owner = u64::from(own::process()) << 32 | u64::from(thread_id::own());
        let mut closer = Closer(None);
        // A signal handler that leaves by a jump in the middle of these lines leaves it counted, and stacks are cut from there on. Blocking
        // signals takes a call, which a sandbox may forbid.
        let closing = Closing::begin();
        let is_mine =
            |slot: &&Slot| slot.owner.compare_exchange(0, owner, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        // Where there is no room it counts too, though nobody could find out that it was left.
        closer.0 = SLOTS.iter().find(is_mine).map(|slot| (slot, owner));
        if let Some((slot, _)) = closer.0 {
            slot.words.store(core::ptr::from_ref(tls) as usize, Ordering::Relaxed);
            slot.place.store(mark.put(tls), Ordering::Relaxed);
        }
        closing.wait();
        closer
    }

    /// The objects have gone, and what was learnt of them.
    pub(crate) fn end(self) {
        match self.0 {
            Some((slot, owner)) => slot.end(owner),
            None => Closing::left().end(),
        }
    }
}

impl Slot {
    /// Once, whoever comes first.
    fn end(&self, owner: u64) {
        if self.owner.compare_exchange(owner, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            Closing::left().end();
        }
    }

    /// Whether this owner is not inside of `dlclose` any more, as far as a thread can know whose event began at `top`. One that
    /// lives and has left by a jump finds out by itself, at its next event: until then it holds the loader's lock too.
    fn is_left(&self, owner: u64, tls: &Tls, top: usize) -> bool {
        let (process, thread) = ((owner >> 32) as u32, owner as u32);
        if process != own::process() {
            return true;
        }
        if thread != thread_id::own() {
            return is_time_to_look() && own::may_ask() && sys::is_thread_over(thread);
        }
        let words = core::ptr::from_ref(tls) as usize;
        self.words.load(Ordering::Relaxed) != words
            || !Mark::is_around(tls, self.place.load(Ordering::Relaxed), top)
    }
}

/// To be called in an event that began at this place of the stack, while a thread seems to be inside of `dlclose`.
#[cold]
#[inline(never)]
pub(crate) fn look_for_left(tls: &Tls, top: usize) {
    for slot in &SLOTS {
        let owner = slot.owner.load(Ordering::Acquire);
        if owner != 0 && slot.is_left(owner, tls, top) {
            slot.end(owner);
        }
    }
}

/// Whether it is time to ask what became of another thread: it takes the recorder's answer, and each event comes here meanwhile.
fn is_time_to_look() -> bool {
    const EVERY: u64 = 100_000_000;
    static NOT_BEFORE: AtomicU64 = AtomicU64::new(0);
    let now = clock::nanos(libc::CLOCK_MONOTONIC_COARSE);
    let due = NOT_BEFORE.load(Ordering::Relaxed);
    now >= due && NOT_BEFORE.compare_exchange(due, now + EVERY, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}
