//! Marks on the stack: whether a thread is still inside of what a hook called, or has left it past the hook.
//!
//! A signal handler, or whoever is called back, may leave the real function by `longjmp` or by an exception, and the hook with
//! it, which then never says that it is over. So the thread's words say where the hook's mark lies, and a mark counts for
//! whoever is called by its hook: who stands below all of it on the stack, and finds it as it was. A word on a stack that was
//! left may stay as it was until something else is written there, so a call from deeper than the one that was left may be
//! taken for one of its own, until one comes that is not.
//! (A coroutine that is left in the middle of a call, and others that call meanwhile, are not told apart.)

use crate::tls::{self, Tls};
use crate::{asked, stack};
use core::cell::Cell;
use core::mem::MaybeUninit;
use core::sync::atomic::{Ordering, compiler_fence};

/// On the stack of a hook. `ROOM` bytes are more than what hooks have on theirs beside it, down to where they ask.
#[repr(C)]
pub(crate) struct Mark<const ROOM: usize> {
    /// Whoever the hook calls stands below this. Another hook that was called from where this one was has its own mark
    /// higher: its frame is the same but for its other variables, which are fewer than this.
    room: MaybeUninit<[u8; ROOM]>,
    word: Cell<u64>,
}

impl<const ROOM: usize> Mark<ROOM> {
    #[inline]
    pub(crate) fn new() -> Self {
        Mark { room: MaybeUninit::uninit(), word: Cell::new(0) }
    }

    /// The address of the whole keeps the compiler from leaving out the room.
    #[inline]
    fn place(&self) -> usize {
        core::ptr::from_ref(self) as usize
    }

    /// Where a hook stands that has this mark: below whoever called it, by less than a room.
    #[inline]
    pub(crate) fn top(&self) -> usize {
        self.place().saturating_add(ROOM)
    }

    /// The hook is about to call the real function: what to remember.
    #[inline]
    pub(crate) fn put(&self, tls: &Tls) -> usize {
        self.word.set(word(tls, self.place()));
        compiler_fence(Ordering::SeqCst);
        self.place()
    }

    /// It has come back. To be called after the mark was forgotten.
    #[inline]
    pub(crate) fn take_away(&self) {
        compiler_fence(Ordering::SeqCst);
        self.word.set(0);
    }

    /// Whether a hook at `top` was called by the one that put this thread's mark at `place`.
    #[cold]
    #[inline(never)]
    pub(crate) fn is_around(tls: &Tls, place: usize, top: usize) -> bool {
        if top > place && !asked::is_on_signal_stack() {
            return false;
        }
        let at = place + core::mem::offset_of!(Self, word);
        if stack::is_above_on_own_stack(tls::stack_pointer(), at) && at.is_multiple_of(size_of::<u64>()) {
            // SAFETY: an aligned word of the calling thread's own stack, above whatever it has there now.
            return unsafe { (at as *const u64).read_volatile() } == word(tls, place);
        }
        // The stack it lies on may be gone.
        let mut found = [0; 8];
        asked::read_memory(at, &mut found) == found.len() && u64::from_ne_bytes(found) == word(tls, place)
    }
}

/// What the mark at this place says.
fn word(tls: &Tls, place: usize) -> u64 {
    (core::ptr::from_ref(tls) as u64).rotate_left(32) ^ place as u64 ^ 0x6770_7574_7261_6365
}
