//! NCCL's libraries: where a call goes on, and what `dlsym` answers.
//!
//! Several can be mapped at once under one name, and a program that asks `dlsym` for a function of one of them must
//! reach that one. So each row exists in several copies, *banks*: the first two are what the linker binds (`ncclX` and
//! `pncclX`), the others belong to one library each.

use crate::elf::{self, Object};
use crate::hooks::nccl::{HOOKS, ROWS};
use crate::sys::{KeepErrno, Text, say};
use core::ffi::{CStr, c_int};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

/// What the linker binds as `ncclX`.
pub(crate) const LINKED: usize = 0;
/// What the linker binds as `pncclX`.
pub(crate) const LINKED_PROFILED: usize = 1;
/// Banks of one library each come from here on.
const FIRST_LIBRARY: usize = 2;
/// All of them: more libraries than four in one process would go unseen through `dlsym`.
pub(crate) const BANKS: usize = 6;
/// `ncclInvalidUsage`, nccl.h: what a function answers that no library has.
const INVALID_USAGE: i32 = 5;

static REALS: [[AtomicUsize; ROWS]; BANKS] = [const { [const { AtomicUsize::new(0) }; ROWS] }; BANKS];
/// First byte of each bank's library.
static STARTS: [AtomicUsize; BANKS] = [const { AtomicUsize::new(0) }; BANKS];
static VERSIONS: [AtomicI32; BANKS] = [const { AtomicI32::new(0) }; BANKS];
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
    let start = STARTS.get(bank).map_or(0, |start| start.load(Ordering::Acquire));
    let object = elf_find_behind_us(|object| {
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
        if let Some(start) = STARTS.get(bank) {
            let _ = start.compare_exchange(0, object.start(), Ordering::AcqRel, Ordering::Acquire);
        }
    }
    address
}

/// The first object behind this library that `wanted` says yes to: what the linker would have found without us.
fn elf_find_behind_us(mut wanted: impl FnMut(&Object) -> bool) -> Option<Object> {
    let mut is_behind = false;
    elf::find(|object| {
        if is_ours(object) {
            is_behind = true;
            return false;
        }
        is_behind && wanted(object)
    })
}

fn is_ours(object: &Object) -> bool {
    object.contains(is_ours as *const () as usize)
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
            .add(b" was called, but this NCCL does not have it: answering ncclInvalidUsage");
        say(text.as_bytes());
    }
    INVALID_USAGE
}

/// `NCCL_VERSION_CODE` of a bank's library; 0 unknown.
pub(crate) fn version(bank: usize) -> u32 {
    let Some(slot) = VERSIONS.get(bank) else { return 0 };
    let known = slot.load(Ordering::Relaxed);
    if known != 0 {
        return known as u32;
    }
    type GetVersion = unsafe extern "C" fn(*mut c_int) -> i32;
    let mut version = 0;
    let Some(address) = auxiliary(bank, c"ncclGetVersion") else { return 0 };
    // SAFETY: the prototype is that of nccl.h, unchanged since 2.0.
    let get: GetVersion = unsafe { core::mem::transmute(address) };
    // SAFETY: the out-parameter is ours.
    if unsafe { get(&raw mut version) } != 0 {
        return 0;
    }
    slot.store(version, Ordering::Relaxed);
    version as u32
}

/// A number that a getter (`ncclCommUserRank`, `ncclCommCount`) says of a communicator.
pub(crate) fn number_of(bank: usize, getter: &CStr, comm: super::Comm) -> Option<i32> {
    type Getter = unsafe extern "C" fn(super::Comm, *mut c_int) -> i32;
    let address = auxiliary(bank, getter)?;
    // SAFETY: the getters have one prototype (nccl.h, since 2.0).
    let get: Getter = unsafe { core::mem::transmute(address) };
    let mut number = 0;
    // SAFETY: NCCL has just made this communicator and it is ready; the out-parameter is ours.
    (unsafe { get(comm, &raw mut number) } == 0).then_some(number)
}

/// A function of a bank's library that is no row.
fn auxiliary(bank: usize, name: &CStr) -> Option<usize> {
    let _errno = KeepErrno::new();
    let start = STARTS.get(bank)?.load(Ordering::Acquire);
    elf::find(|object| object.start() == start)?.symbol(name)
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
    let bank = bank_of(object.start())?;
    REALS.get(bank)?.get(usize::from(row))?.store(found, Ordering::Release);
    HOOKS.get(usize::from(row))?.banks.get(bank).copied()
}

/// To be called after objects were unloaded: forgets the libraries that went.
#[cold]
pub(crate) fn note_unloaded() {
    for ((start, reals), version) in STARTS.iter().zip(&REALS).zip(&VERSIONS) {
        let known = start.load(Ordering::Acquire);
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
            version.store(0, Ordering::Relaxed);
            start.store(0, Ordering::Release);
        }
    }
}

fn bank_of(start: usize) -> Option<usize> {
    for (bank, slot) in STARTS.iter().enumerate().skip(FIRST_LIBRARY) {
        match slot.compare_exchange(0, start, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return Some(bank),
            Err(there) if there == start => return Some(bank),
            Err(_) => {}
        }
    }
    None
}

/// Whether an object other than this library has the function.
pub(crate) fn is_anywhere(name: &CStr) -> bool {
    let _errno = KeepErrno::new();
    elf::find(|object| !is_ours(object) && object.symbol(name).is_some()).is_some()
}

/// Whether an address lies in this library.
pub(crate) fn is_our_address(address: usize) -> bool {
    let _errno = KeepErrno::new();
    elf::by_address(address).is_some_and(|object| is_ours(&object))
}
