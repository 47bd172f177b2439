//! The rows of NCCL in NCCL's libraries: where a call goes on, and what `dlsym` answers.

use super::nccl::{HOOKS, ROWS};
use crate::elf::{self, Object};
use crate::nccl::banks::{self, BANKS, FIRST_LIBRARY, LINKED_PROFILED};
use crate::session::say;
use crate::sys::{KeepErrno, Text};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// `ncclInvalidUsage`, nccl.h: what a function answers that no library has.
const INVALID_USAGE: i32 = 5;

static REALS: [[AtomicUsize; ROWS]; BANKS] = [const { [const { AtomicUsize::new(0) }; ROWS] }; BANKS];
static ABSENCE_SAID: AtomicBool = AtomicBool::new(false);

/// The real function of a row, in the library that the bank stands for.
///
/// # Safety
/// `F` is the type of a pointer to that function.
#[inline]
pub(crate) unsafe fn real<F: Copy>(bank: usize, row: u16) -> Option<F> {
    let slot = REALS.get(bank)?.get(usize::from(row))?;
    let mut address = slot.load(Ordering::Acquire);
    if address == 0 {
        address = find(bank, row);
    }
    // SAFETY: a function pointer is as large as an address; the caller knows its type.
    (address != 0).then(|| unsafe { core::mem::transmute_copy(&address) })
}

#[cold]
fn find(bank: usize, row: u16) -> usize {
    let _errno = KeepErrno::new();
    let Some(hook) = HOOKS.get(usize::from(row)) else { return 0 };
    let name = if bank == LINKED_PROFILED { hook.profiled } else { hook.name };
    let mut address = 0;
    let start = banks::start(bank);
    let object = elf::find_behind_us(|object| {
        if bank >= FIRST_LIBRARY && object.start() != start {
            return false;
        }
        address = object.symbol(name).unwrap_or(0);
        address != 0
    });
    if let (Some(slot), Some(object)) =
        (REALS.get(bank).and_then(|reals| reals.get(usize::from(row))), object)
    {
        slot.store(address, Ordering::Release);
        banks::note_found(bank, &object);
    }
    address
}

/// What a function answers that is in no library: the program took our export for the real one, because it asked for its
/// address by a weak symbol.
#[cold]
pub(crate) fn absent(row: u16) -> i32 {
    if !ABSENCE_SAID.swap(true, Ordering::Relaxed)
        && let Some(hook) = HOOKS.get(usize::from(row))
    {
        let text = Text::<256>::new()
            .add(hook.name.to_bytes())
            .add(b" was called, but this NCCL does not have it: returning ncclInvalidUsage");
        say(text.as_bytes());
    }
    INVALID_USAGE
}

/// Row of a function of NCCL's, by either of its names.
pub(crate) fn row_of(name: &[u8]) -> Option<u16> {
    let plain = name.strip_prefix(b"p").unwrap_or(name);
    HOOKS.iter().position(|hook| hook.name.to_bytes() == plain).map(|row| row as u16)
}

/// Our function for the one that `dlsym` found, if that is NCCL's.
pub(crate) fn ours_for(row: u16, found: usize, caller: usize) -> Option<*const ()> {
    let _errno = KeepErrno::new();
    let object = elf::by_address(found)?;
    // NCCL's own look-ups are its own business.
    if object.contains(caller) {
        return None;
    }
    let bank = banks::of_library(object.start())?;
    REALS.get(bank)?.get(usize::from(row))?.store(found, Ordering::Release);
    HOOKS.get(usize::from(row))?.banks.get(bank).copied()
}

/// To be called after objects were unloaded: forgets the libraries that went.
#[cold]
pub(crate) fn note_unloaded() {
    for (bank, reals) in REALS.iter().enumerate() {
        let known = banks::start(bank);
        let is_there = |object: &Object| {
            // Another library may have come to the same place.
            let is_same = |slot: &AtomicUsize| {
                let address = slot.load(Ordering::Relaxed);
                address == 0 || object.contains(address)
            };
            object.start() == known && object.symbol(c"ncclGetVersion").is_some() && reals.iter().all(is_same)
        };
        if known != 0 && elf::find(is_there).is_none() {
            reals.iter().for_each(|slot| slot.store(0, Ordering::Release));
            banks::forget(bank);
        }
    }
}
