//! Words of other libraries that hold our function's address in place of the driver's, in a process that was attached to late:
//! which they are, so that each gets back what it had.
//!
//! A word is an aligned pointer, written by one instruction: a thread that reads it meanwhile finds the old function or the
//! new one. No code is changed. What has changed a word since is left alone, and so is a word of a library that is gone.

use crate::elf::{self, Object};
use crate::sys::KeepErrno;
use crate::{arch, kernel, own};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};

/// More than the libraries of PyTorch have in all (some 1,500: about 100 functions in 15 copies of the runtime).
const MOST: usize = 8192;

/// All three are 0 where there is none. `slot` is written last, and taken away first.
struct Word {
    slot: AtomicUsize,
    theirs: AtomicUsize,
    ours: AtomicUsize,
}

static WORDS: [Word; MOST] =
    [const { Word { slot: AtomicUsize::new(0), theirs: AtomicUsize::new(0), ours: AtomicUsize::new(0) } };
        MOST];
static N_WORDS: AtomicUsize = AtomicUsize::new(0);
/// Words are ours, or are becoming so.
static IN_PLACE: AtomicBool = AtomicBool::new(false);
/// A thread looks for words, or puts them back.
/// The process whose thread it is; 0 none. A forked child finds its parent's, which is nobody's there.
static BUSY: AtomicU32 = AtomicU32::new(0);
/// The process that has a thread of ours which does what somebody asks who attaches; 0 none.
static SERVANT: AtomicU32 = AtomicU32::new(0);
/// Words for which there was no place in the table, so that they were left as they are.
static LEFT: AtomicUsize = AtomicUsize::new(0);

/// The one thread that looks for words.
pub(crate) struct Turn(());

impl Turn {
    /// `None` while another thread looks, which is never waited for.
    pub(crate) fn take() -> Option<Turn> {
        let (own, there) = (own::process(), BUSY.load(Ordering::Relaxed));
        let is_ours =
            there != own && BUSY.compare_exchange(there, own, Ordering::Acquire, Ordering::Relaxed).is_ok();
        is_ours.then_some(Turn(()))
    }

    /// From here on words are ours.
    pub(crate) fn begin(&self) {
        IN_PLACE.store(true, Ordering::Release);
    }

    /// Puts our function into the word, if it still has `theirs`. The word lies in the data of `object`, which stays for as long as this
    /// runs.
    pub(crate) fn swap(&self, object: &Object, slot: usize, theirs: usize, ours: usize) {
        if !slot.is_multiple_of(size_of::<usize>()) || theirs == ours {
            return;
        }
        let n = N_WORDS.load(Ordering::Relaxed);
        let Some(word) = WORDS.get(n) else {
            LEFT.fetch_add(1, Ordering::Relaxed);
            return;
        };
        word.theirs.store(theirs, Ordering::Relaxed);
        word.ours.store(ours, Ordering::Relaxed);
        word.slot.store(slot, Ordering::Release);
        // It is written down before it is done: whoever puts words back finds all of them.
        N_WORDS.store(n + 1, Ordering::Release);
        if !exchange(object, slot, theirs, ours) {
            word.slot.store(0, Ordering::Release);
            N_WORDS.store(n, Ordering::Release);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        BUSY.store(0, Ordering::Release);
        // Somebody may have wanted them back meanwhile, and did not wait.
        if !IN_PLACE.load(Ordering::Acquire) && N_WORDS.load(Ordering::Relaxed) != 0 {
            restore();
        }
    }
}

/// Whether a thread of ours does what is asked, so that no thread of the program's has to.
#[cold]
pub(crate) fn has_servant() -> bool {
    let servant = SERVANT.load(Ordering::Relaxed);
    servant != 0 && servant == own::process()
}

/// A thread of ours begins to do what is asked, or ends.
pub(crate) fn set_servant(is_there: bool) {
    SERVANT.store(if is_there { own::process() } else { 0 }, Ordering::Relaxed);
}

/// What makes the words of libraries ours that were loaded since; null before there are any.
static LOOK: AtomicPtr<()> = AtomicPtr::new(core::ptr::null_mut());

/// Says what looks again.
pub(crate) fn set_look(look: fn()) {
    LOOK.store(look as *mut (), Ordering::Release);
}

/// To be called where the program may just have loaded a library.
#[inline]
pub(crate) fn look_again() {
    if are_in_place() {
        look_now();
    }
}

#[cold]
fn look_now() {
    let look = LOOK.load(Ordering::Acquire);
    if !look.is_null() {
        let _errno = KeepErrno::new();
        // SAFETY: `set_look` wrote a function of this type.
        let look: fn() = unsafe { core::mem::transmute(look) };
        look();
    }
}

/// Whether words are ours.
#[inline]
pub(crate) fn are_in_place() -> bool {
    IN_PLACE.load(Ordering::Relaxed)
}

/// How many words are ours, and how many there was no room for.
pub(crate) fn counts() -> (usize, usize) {
    (N_WORDS.load(Ordering::Relaxed), LEFT.load(Ordering::Relaxed))
}

/// Gives each word back what it had, if it still has ours. Takes the loader's lock: for cold moments only.
#[cold]
pub(crate) fn restore() {
    IN_PLACE.store(false, Ordering::Release);
    let Some(turn) = Turn::take() else { return };
    let n = N_WORDS.load(Ordering::Acquire);
    // The loader lets none of its objects go while it lists them.
    elf::find(|object| {
        for word in WORDS.iter().take(n) {
            let slot = word.slot.load(Ordering::Acquire);
            if object.contains(slot) && object.has_data(slot) {
                let (theirs, ours) = (word.theirs.load(Ordering::Relaxed), word.ours.load(Ordering::Relaxed));
                exchange(object, slot, ours, theirs);
                word.slot.store(0, Ordering::Release);
            }
        }
        false
    });
    for word in WORDS.iter().take(n) {
        // Of a library that was unloaded.
        word.slot.store(0, Ordering::Release);
    }
    LEFT.store(0, Ordering::Relaxed);
    N_WORDS.store(0, Ordering::Release);
    drop(turn);
}

/// Writes a word of the object's data, if it has `from`.
fn exchange(object: &Object, slot: usize, from: usize, to: usize) -> bool {
    let page_bytes = arch::page_bytes();
    let page = slot & !(page_bytes - 1);
    let protect = |rights: i32| {
        let arguments = [page, page_bytes, rights as usize, 0, 0, 0];
        // SAFETY: a page of the object's data: it could be read before, and can be after.
        unsafe { kernel::call(libc::SYS_mprotect, arguments) }.is_ok()
    };
    // What the loader has filled in and then locked.
    let is_locked = object.is_locked(slot);
    if is_locked && !protect(libc::PROT_READ | libc::PROT_WRITE) {
        return false;
    }
    // SAFETY: an aligned word of the object's data, which others may read and write at any time.
    let word = unsafe { &*(slot as *const AtomicUsize) };
    let is_done = word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    if is_locked {
        protect(libc::PROT_READ);
    }
    is_done
}
