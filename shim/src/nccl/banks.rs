//! Banks: NCCL's libraries in this process, each with its place among the copies of the rows.
//!
//! Several can be mapped at once under one name, and a program that asks `dlsym` for a function of one of them must
//! reach that one. So each row exists in several copies, *banks*: the first two are what the linker binds (`ncclX` and
//! `pncclX`), the others belong to one library each.

use crate::elf::{self, Object};
use crate::sys::KeepErrno;
use core::ffi::{CStr, c_int};
use core::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

/// What the linker binds as `ncclX`.
pub(crate) const LINKED: usize = 0;
/// What the linker binds as `pncclX`.
pub(crate) const LINKED_PROFILED: usize = 1;
/// Banks of one library each come from here on.
pub(crate) const FIRST_LIBRARY: usize = 2;
/// All of them: more libraries than four in one process would go unseen through `dlsym`.
pub(crate) const BANKS: usize = 6;

/// First byte of each bank's library.
static STARTS: [AtomicUsize; BANKS] = [const { AtomicUsize::new(0) }; BANKS];
static VERSIONS: [AtomicI32; BANKS] = [const { AtomicI32::new(0) }; BANKS];

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

/// The bank of the library that begins there; `None` if there are too many.
pub(crate) fn of_library(start: usize) -> Option<usize> {
    for (bank, slot) in STARTS.iter().enumerate().skip(FIRST_LIBRARY) {
        match slot.compare_exchange(0, start, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return Some(bank),
            Err(there) if there == start => return Some(bank),
            Err(_) => {}
        }
    }
    None
}

/// First byte of the bank's library; 0 not known yet.
pub(crate) fn start(bank: usize) -> usize {
    STARTS.get(bank).map_or(0, |start| start.load(Ordering::Acquire))
}

/// The bank's library was found.
pub(crate) fn note_found(bank: usize, library: &Object) {
    if let Some(start) = STARTS.get(bank) {
        let _ = start.compare_exchange(0, library.start(), Ordering::AcqRel, Ordering::Acquire);
    }
}

/// The bank's library is gone.
pub(crate) fn forget(bank: usize) {
    if let (Some(start), Some(version)) = (STARTS.get(bank), VERSIONS.get(bank)) {
        version.store(0, Ordering::Relaxed);
        start.store(0, Ordering::Release);
    }
}

/// Whether an object other than this library has the function.
pub(crate) fn is_anywhere(name: &CStr) -> bool {
    let _errno = KeepErrno::new();
    elf::find(|object| !object.is_ours() && object.symbol(name).is_some()).is_some()
}

/// Whether an address lies in this library.
pub(crate) fn is_our_address(address: usize) -> bool {
    let _errno = KeepErrno::new();
    elf::by_address(address).is_some_and(|object| object.is_ours())
}
