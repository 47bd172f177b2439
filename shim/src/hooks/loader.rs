//! How programs reach the driver, and how our rows get in between: ELF binding (our exports come first), `dlsym`,
//! `dlvsym`, and `cuGetProcAddress`, from which the CUDA runtime takes everything, static copies of it too.
//!
//! A row stands in for an *address*, never for a name: whatever the driver answers is looked up, and what is not one
//! of its functions that we know is handed on untouched. So a version, a stream flavour or a future `_v3` is never
//! mistaken for another.

use super::cuda_driver::{HOOKS, ROWS, Row};
use super::{nccl_loader, nvshmem, pjrt, torch, unhooked};
use crate::arch;
use crate::auxiliary::AUXILIARY;
use crate::backward;
use crate::elf::{self, Object};
use crate::lanes;
use crate::nccl::banks;
use crate::session::{self, Start};
use crate::sys::{KeepErrno, Text};
use crate::words;
use core::ffi::{CStr, c_char, c_void};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU16, AtomicUsize, Ordering};
use gputrace_ring::record::Kind;
use gputrace_ring::ring::Producer;

/// `SONAME` of the driver.
const DRIVER: &CStr = c"libcuda.so.1";
/// Open-addressed tables: a power of two, more than twice the rows.
const SLOTS: usize = 512;
const _: () = assert!(ROWS * 2 < SLOTS);
/// Copies of the CUDA runtime in one process that are told apart.
const MOST_RUNTIMES: usize = 64;
/// `CUDA_ERROR_NOT_INITIALIZED` and `CUDA_ERROR_NO_DEVICE`, cuda.h 13.0.
const NOT_INITIALIZED: i32 = 3;
const NO_DEVICE: i32 = 100;

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;

// Not exported: the assembly below reads them at a fixed distance.
static REAL_DLSYM: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
static REAL_DLVSYM: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

/// The driver's own functions.
static REALS: [AtomicUsize; ROWS] = [const { AtomicUsize::new(0) }; ROWS];
/// Where a call of our exported functions goes on: the driver, or a library between us and it.
static NEXT: [AtomicUsize; ROWS] = [const { AtomicUsize::new(0) }; ROWS];
static INDEXED: AtomicBool = AtomicBool::new(false);
static DRIVER_RANGE: Range = Range::new();
/// Whether a library between us and the driver exports its functions, so that others may well be bound to that one.
static INTERPOSED: AtomicBool = AtomicBool::new(false);
/// Where the libraries begin that were named because their calls pass us by.
static BYPASSES: [AtomicUsize; 16] = [const { AtomicUsize::new(0) }; 16];
/// The library whose `dlsym` is the real one for us.
static DLSYM_OWNER: Range = Range::new();
/// Address of a real function, and its row beside it.
static ADDRESSES: [AtomicUsize; SLOTS] = [const { AtomicUsize::new(0) }; SLOTS];
static ADDRESS_ROWS: [AtomicU16; SLOTS] = [const { AtomicU16::new(0) }; SLOTS];
/// Row by name, plus one.
static NAMES: [AtomicU16; SLOTS] = [const { AtomicU16::new(0) }; SLOTS];
static NAMES_READY: AtomicBool = AtomicBool::new(false);
/// Who asked `dlsym` for `cuGetProcAddress` last.
static ASKED: AtomicUsize = AtomicUsize::new(0);
/// An address in each copy of the CUDA runtime.
static RUNTIMES: [AtomicUsize; MOST_RUNTIMES] = [const { AtomicUsize::new(0) }; MOST_RUNTIMES];

/// Where a library lies.
struct Range {
    start: AtomicUsize,
    end: AtomicUsize,
}

impl Range {
    const fn new() -> Range {
        Range { start: AtomicUsize::new(0), end: AtomicUsize::new(0) }
    }

    fn set(&self, object: &Object) {
        self.start.store(object.start(), Ordering::Relaxed);
        self.end.store(object.end(), Ordering::Relaxed);
    }

    fn clear(&self) {
        self.start.store(0, Ordering::Relaxed);
        self.end.store(0, Ordering::Relaxed);
    }

    fn contains(&self, address: usize) -> bool {
        (self.start.load(Ordering::Relaxed)..self.end.load(Ordering::Relaxed)).contains(&address)
    }
}

/// The `dlsym` and `dlvsym` that programs would have without us: the C library's own, or those of another preloaded
/// library behind us. Our exports hide them from the linker, so they are read from the symbol tables.
#[cold]
pub(crate) fn find_real_dlsym() {
    let (mut is_behind, mut n_objects) = (elf::is_late(), 0);
    let (mut dlsym, mut dlvsym) = (None, None);
    elf::find(|object| {
        n_objects += 1;
        if object.is_ours() {
            is_behind = true;
            return false;
        }
        if is_behind && dlsym.is_none() {
            dlsym = object.symbol(c"dlsym");
            DLSYM_OWNER.set(object);
        }
        if is_behind && dlvsym.is_none() {
            dlvsym = object.symbol(c"dlvsym");
        }
        false
    });
    // What comes later is loaded by the program itself, and is in nobody's way.
    if !elf::is_late() {
        elf::note_startup(n_objects);
    }
    if let Some(address) = dlvsym {
        REAL_DLVSYM.store(address as *mut c_void, Ordering::Release);
    }
    if let Some(address) = dlsym {
        REAL_DLSYM.store(address as *mut c_void, Ordering::Release);
    }
}

/// Where a call of a row's exported function goes on, finding the driver if need be.
///
/// # Safety
/// `F` is the type of a pointer to that function.
#[inline]
pub(crate) unsafe fn real<F: Copy>(row: u16) -> Option<F> {
    // SAFETY: the caller's promise.
    unsafe { function(&NEXT, row) }
}

/// The driver's own function of a row.
///
/// # Safety
/// As [`real`].
#[inline]
pub(crate) unsafe fn driver_real<F: Copy>(row: u16) -> Option<F> {
    // SAFETY: the caller's promise.
    unsafe { function(&REALS, row) }
}

/// # Safety
/// As [`real`].
#[inline]
unsafe fn function<F: Copy>(slots: &[AtomicUsize; ROWS], row: u16) -> Option<F> {
    let slot = slots.get(usize::from(row))?;
    let mut address = slot.load(Ordering::Acquire);
    if address == 0 {
        find_driver();
        address = slot.load(Ordering::Acquire);
    }
    // SAFETY: a function pointer is as large as an address; the caller knows its type.
    (address != 0).then(|| unsafe { core::mem::transmute_copy(&address) })
}

/// What a function answers where there is no driver.
#[cold]
pub(crate) fn without_driver(row: u16) -> i32 {
    if row == Row::cuInit as u16 { NO_DEVICE } else { NOT_INITIALIZED }
}

/// A program that is linked to the driver, or to stubs that would load it: our export came first.
#[cold]
fn find_driver() {
    if INDEXED.load(Ordering::Acquire) {
        return;
    }
    let _errno = KeepErrno::new();
    if let Some(driver) = elf::by_soname(DRIVER) {
        return index(&driver);
    }
    type Dlopen = unsafe extern "C" fn(*const c_char, i32) -> *mut c_void;
    if let Some(address) = elf::c_library(c"dlopen") {
        // SAFETY: this is the C library's dlopen.
        let dlopen: Dlopen = unsafe { core::mem::transmute(address) };
        // SAFETY: the name ends with a zero; the driver is what the program called.
        unsafe { dlopen(DRIVER.as_ptr(), libc::RTLD_NOW) };
    }
    if let Some(driver) = elf::by_soname(DRIVER) {
        index(&driver);
    }
}

/// Learns where the driver is that the process has; false if it has none.
#[cold]
pub(super) fn find_loaded_driver() -> bool {
    if !INDEXED.load(Ordering::Acquire)
        && let Some(driver) = elf::by_soname(DRIVER)
    {
        index(&driver);
    }
    INDEXED.load(Ordering::Acquire)
}

/// Whether the address lies in the driver.
pub(super) fn is_driver(address: usize) -> bool {
    DRIVER_RANGE.contains(address)
}

/// Ours for the loader's own function of this name, if that is the one.
pub(super) fn ours_of_loader(name: &CStr, target: usize) -> Option<usize> {
    let (real, ours) = match name.to_bytes() {
        b"dlsym" => (REAL_DLSYM.load(Ordering::Acquire) as usize, dlsym as *const () as usize),
        b"dlvsym" => (REAL_DLVSYM.load(Ordering::Acquire) as usize, dlvsym as *const () as usize),
        _ => return None,
    };
    (real == target && real != 0).then_some(ours)
}

/// To be called after objects were unloaded: forgets the driver if it was one of them. Programs load it to ask for devices,
/// unload it, and load it again to another place. What they were handed of ours stays, and leads to the new one.
#[cold]
pub(crate) fn note_unloaded() {
    if !INDEXED.load(Ordering::Acquire) {
        return;
    }
    let start = DRIVER_RANGE.start.load(Ordering::Relaxed);
    let first = REALS.iter().zip(HOOKS).find(|(real, _)| real.load(Ordering::Relaxed) != 0);
    let is_there = |object: &Object| {
        // Another driver may have come to the same place.
        let is_same = |(real, hook): (&AtomicUsize, &crate::hook::Hook)| {
            object.symbol(hook.name) == Some(real.load(Ordering::Relaxed))
        };
        object.start() == start && object.soname() == DRIVER && first.is_none_or(is_same)
    };
    if elf::find(is_there).is_some() {
        return;
    }
    // Whoever comes meanwhile finds nothing here, and so looks for the driver anew.
    for slot in REALS.iter().chain(&NEXT).chain(&ADDRESSES).chain(&BYPASSES) {
        slot.store(0, Ordering::Release);
    }
    for slot in AUXILIARY.slots() {
        slot.set(0);
    }
    DRIVER_RANGE.clear();
    INTERPOSED.store(false, Ordering::Relaxed);
    INDEXED.store(false, Ordering::Release);
    crate::device_code::forget();
    if let Some(mut lane) = lanes::lane(Start::OnlyIfLive) {
        let producer = lane.producer();
        let at = producer.now();
        let text = b"driver.unloaded=libcuda.so.1 was unloaded by the program: memory that was not freed by then was freed with it";
        producer.push_raw(at, Kind::Note, &[text]);
    }
}

/// Learns where the driver's functions are. Two threads may do it at once: they write the same.
#[cold]
fn index(driver: &Object) {
    for (row, hook) in HOOKS.iter().enumerate() {
        let Some(address) = driver.symbol(hook.name) else { continue };
        if let Some(real) = REALS.get(row) {
            real.store(address, Ordering::Release);
        }
        remember_address(address, row as u16);
    }
    index_interposers(driver);
    for (real, next) in REALS.iter().zip(&NEXT) {
        let driver = real.load(Ordering::Acquire);
        let _ = next.compare_exchange(0, driver, Ordering::AcqRel, Ordering::Acquire);
    }
    for slot in AUXILIARY.slots() {
        if let Some(address) = driver.symbol(slot.name) {
            slot.set(address);
        }
    }
    DRIVER_RANGE.set(driver);
    INDEXED.store(true, Ordering::Release);
}

/// Other libraries between us and the driver that export its functions too, preloaded to limit or to count: without us
/// the program's calls would end there, so ours go on there.
#[cold]
fn index_interposers(driver: &Object) {
    let n_startup = elf::n_startup();
    let (mut is_behind, mut n_objects) = (false, 0);
    elf::find(|object| {
        n_objects += 1;
        if n_objects > n_startup || object.start() == driver.start() {
            return true;
        }
        if is_behind {
            for (row, hook) in HOOKS.iter().enumerate() {
                if let Some(address) = object.symbol(hook.name) {
                    interpose(row as u16, address);
                }
            }
        }
        is_behind |= object.is_ours();
        false
    });
}

/// Calls of the row's exported function go on at this address, unless they already do at another's.
fn interpose(row: u16, address: usize) {
    remember_address(address, row);
    INTERPOSED.store(true, Ordering::Relaxed);
    if let (Some(real), Some(next)) = (REALS.get(usize::from(row)), NEXT.get(usize::from(row))) {
        // The first library behind us is the one that the program would have found.
        for now in [0, real.load(Ordering::Acquire)] {
            let _ = next.compare_exchange(now, address, Ordering::AcqRel, Ordering::Acquire);
        }
    }
}

fn remember_address(address: usize, row: u16) {
    for step in 0..SLOTS {
        let at = (address_hash(address) + step) % SLOTS;
        let (Some(key), Some(value)) = (ADDRESSES.get(at), ADDRESS_ROWS.get(at)) else { return };
        match key.compare_exchange(0, address, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return value.store(row, Ordering::Release),
            Err(there) if there == address => return value.store(row, Ordering::Release),
            Err(_) => {}
        }
    }
}

/// Our function for a real one; `None` for what is not a row.
pub(super) fn ours_for(address: usize) -> Option<*mut c_void> {
    if !INDEXED.load(Ordering::Acquire) {
        return None;
    }
    for step in 0..SLOTS {
        let at = (address_hash(address) + step) % SLOTS;
        match ADDRESSES.get(at)?.load(Ordering::Acquire) {
            0 => return None,
            there if there == address => {
                let row = ADDRESS_ROWS.get(at)?.load(Ordering::Acquire);
                let hook = HOOKS.get(usize::from(row))?;
                // Our exported function would lead to the library between us and the driver.
                let goes_elsewhere = NEXT.get(usize::from(row))?.load(Ordering::Acquire) != address;
                let ours = if goes_elsewhere { hook.to_driver } else { hook.ours };
                return Some(ours.cast_mut().cast());
            }
            _ => {}
        }
    }
    None
}

fn address_hash(address: usize) -> usize {
    (address as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) as usize >> 40
}

fn row_of(name: &[u8]) -> Option<u16> {
    if !NAMES_READY.load(Ordering::Acquire) {
        for (row, hook) in HOOKS.iter().enumerate() {
            let hash = name_hash(hook.name.to_bytes());
            for step in 0..SLOTS {
                let Some(slot) = NAMES.get((hash + step) % SLOTS) else { break };
                let number = row as u16 + 1;
                match slot.compare_exchange(0, number, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => break,
                    Err(there) if there == number => break,
                    Err(_) => {}
                }
            }
        }
        NAMES_READY.store(true, Ordering::Release);
    }
    let hash = name_hash(name);
    for step in 0..SLOTS {
        let row = NAMES.get((hash + step) % SLOTS)?.load(Ordering::Relaxed).checked_sub(1)?;
        if HOOKS.get(usize::from(row))?.name.to_bytes() == name {
            return Some(row);
        }
    }
    None
}

/// FNV-1a, 64 bits, folded.
fn name_hash(name: &[u8]) -> usize {
    let hash = name.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    (hash ^ (hash >> 32)) as usize % SLOTS
}

/// Answer of [`decide`]: leave it to the C library.
const PASS: *mut c_void = null_mut();
/// Answer of [`decide`]: the program gets null, and the `dlerror` of a lookup that just failed.
const ABSENT: *mut c_void = core::ptr::without_provenance_mut(1);

/// What `dlsym` shall answer: one of our functions, [`PASS`] or [`ABSENT`].
///
/// # Safety
/// The arguments are those of a `dlsym` or, with a version, `dlvsym` that the program called, and `caller` is where it
/// returns to.
unsafe extern "C" fn decide(
    handle: *mut c_void,
    name: *const c_char,
    caller: usize,
    version: *const c_char,
) -> *mut c_void {
    if REAL_DLSYM.load(Ordering::Acquire).is_null() {
        find_real_dlsym();
        if REAL_DLSYM.load(Ordering::Acquire).is_null() {
            return ABSENT;
        }
    }
    // Who loads a library mostly looks something up in it.
    crate::stack::objects::refresh();
    words::look_again();
    // SAFETY: dlsym's second argument is a C string.
    let text = unsafe { crate::sys::c_bytes(name) };
    crate::callsite::note_loaded(text);
    if text.starts_with(b"nccl") || text.starts_with(b"pnccl") {
        // SAFETY: as above.
        return unsafe { decide_nccl(handle, name, caller, version) };
    }
    if text == b"GetPjrtApi" {
        // SAFETY: as above.
        return unsafe { decide_pjrt(handle, name, caller, version) };
    }
    if text.starts_with(b"nvshmem_") {
        // SAFETY: as above.
        return unsafe { decide_nvshmem(handle, name, caller, version) };
    }
    if !text.starts_with(b"cu") {
        let asks_for_next = !version.is_null() && handle == libc::RTLD_NEXT;
        return if asks_for_next && text == b"dlsym" && is_next_after(caller) {
            dlsym as *mut c_void
        } else {
            PASS
        };
    }
    let row = row_of(text);
    if row.is_none()
        && (!unhooked::is_memory(text) || handle == libc::RTLD_NEXT || handle == libc::RTLD_DEFAULT)
    {
        return PASS;
    }
    // SAFETY: found in the C library; the C library checks the handle.
    let real: Dlsym = unsafe { core::mem::transmute(REAL_DLSYM.load(Ordering::Acquire)) };
    // RTLD_DEFAULT and RTLD_NEXT depend on who asks; the normal order of scopes finds our export if it should. Only
    // where there is no driver at all must our export not look like one: programs ask so whether there is a GPU.
    if handle == libc::RTLD_NEXT {
        return PASS;
    }
    if handle == libc::RTLD_DEFAULT && !elf::is_late() {
        let driver_is_loaded = INDEXED.load(Ordering::Acquire) || elf::by_soname(DRIVER).is_some();
        // SAFETY: the program's own name; asked from here, it means "after us".
        let is_elsewhere = driver_is_loaded || !unsafe { real(libc::RTLD_NEXT, name) }.is_null();
        return if is_elsewhere { PASS } else { ABSENT };
    }
    if DRIVER_RANGE.contains(caller) {
        return PASS;
    }
    let found = if version.is_null() {
        // SAFETY: the program's own arguments.
        unsafe { real(handle, name) as usize }
    } else {
        let real = REAL_DLVSYM.load(Ordering::Acquire);
        if real.is_null() {
            return PASS;
        }
        // SAFETY: found in the C library.
        let real: Dlvsym = unsafe { core::mem::transmute(real) };
        // SAFETY: the program's own arguments.
        unsafe { real(handle, name, version) as usize }
    };
    if found == 0 {
        return PASS;
    }
    if INDEXED.load(Ordering::Acquire) && !DRIVER_RANGE.contains(found) && ours_for(found).is_none() {
        // It may have been unloaded past our `dlclose`.
        let _errno = KeepErrno::new();
        note_unloaded();
    }
    if !INDEXED.load(Ordering::Acquire) {
        let _errno = KeepErrno::new();
        let Some(object) = elf::by_address(found) else { return PASS };
        if object.contains(caller) {
            return PASS;
        }
        if object.soname() == DRIVER {
            index(&object);
        } else if DLSYM_OWNER.contains(found)
            && let Some(driver) = elf::by_soname(DRIVER)
        {
            index(&driver);
        } else {
            return PASS;
        }
    }
    let Some(row) = row else {
        if DRIVER_RANGE.contains(found) {
            unhooked::seen(text, 0);
        }
        return PASS;
    };
    if text.starts_with(b"cuGetProcAddress") {
        ASKED.store(caller, Ordering::Relaxed);
        torch::look();
    }
    // Others export such names too: stubs, translators, tests. Those we leave alone, unless it is a `dlsym` behind us
    // that answers with a function of its own library.
    if ours_for(found).is_none() && DLSYM_OWNER.contains(found) {
        interpose(row, found);
    }
    ours_for(found).unwrap_or(PASS)
}

/// [`decide`] for a function of NCCL's: a library that has it is asked first, whatever we export.
///
/// # Safety
/// As [`decide`].
#[cold]
unsafe fn decide_nccl(
    handle: *mut c_void,
    name: *const c_char,
    caller: usize,
    version: *const c_char,
) -> *mut c_void {
    // SAFETY: dlsym's second argument is a C string.
    let Some(row) = nccl_loader::row_of(unsafe { crate::sys::c_bytes(name) }) else { return PASS };
    if handle == libc::RTLD_NEXT {
        return PASS;
    }
    // SAFETY: found in the C library; the C library checks the handle.
    let real: Dlsym = unsafe { core::mem::transmute(REAL_DLSYM.load(Ordering::Acquire)) };
    let found = if handle == libc::RTLD_DEFAULT && !elf::is_late() {
        decide_nccl as *const () as usize
    } else if version.is_null() {
        // SAFETY: the program's own arguments.
        unsafe { real(handle, name) as usize }
    } else {
        let real = REAL_DLVSYM.load(Ordering::Acquire);
        if real.is_null() {
            return PASS;
        }
        // SAFETY: found in the C library.
        let real: Dlvsym = unsafe { core::mem::transmute(real) };
        // SAFETY: the program's own arguments.
        unsafe { real(handle, name, version) as usize }
    };
    if found == 0 {
        return PASS;
    }
    if banks::is_our_address(found) {
        // Our own export was found, in the program's global scope: it counts only if a library has the real one.
        // SAFETY: a C string, as above.
        if banks::is_anywhere(unsafe { CStr::from_ptr(name) }) {
            return PASS;
        }
        // SAFETY: the program's own name; asked from here, it means "after us", and fails.
        unsafe { real(libc::RTLD_NEXT, name) };
        return ABSENT;
    }
    nccl_loader::ours_for(row, found, caller).map_or(PASS, |ours| ours.cast_mut().cast())
}

/// [`decide`] for the one function that a plugin of PJRT exports.
///
/// # Safety
/// As [`decide`].
#[cold]
unsafe fn decide_pjrt(
    handle: *mut c_void,
    name: *const c_char,
    caller: usize,
    version: *const c_char,
) -> *mut c_void {
    // What those find depends on who asks.
    if handle == libc::RTLD_NEXT || handle == libc::RTLD_DEFAULT || !version.is_null() {
        return PASS;
    }
    // SAFETY: found in the C library; the C library checks the handle.
    let real: Dlsym = unsafe { core::mem::transmute(REAL_DLSYM.load(Ordering::Acquire)) };
    // SAFETY: the program's own arguments.
    let found = unsafe { real(handle, name) as usize };
    if found == 0 {
        return PASS;
    }
    pjrt::ours_for(found, caller).map_or(PASS, |ours| ours.cast_mut().cast())
}

/// [`decide`] for a function of NVSHMEM's.
///
/// # Safety
/// As [`decide`].
#[cold]
unsafe fn decide_nvshmem(
    handle: *mut c_void,
    name: *const c_char,
    caller: usize,
    version: *const c_char,
) -> *mut c_void {
    // What this finds depends on who asks.
    if handle == libc::RTLD_NEXT || !version.is_null() {
        return PASS;
    }
    // SAFETY: found in the C library; the C library checks the handle.
    let real: Dlsym = unsafe { core::mem::transmute(REAL_DLSYM.load(Ordering::Acquire)) };
    // The default scope begins with the program's libraries, of which ours is the first.
    // SAFETY: the program's own arguments.
    let found = unsafe { real(handle, name) as usize };
    // SAFETY: dlsym's second argument is a C string.
    match nvshmem::ours_for(unsafe { crate::sys::c_bytes(name) }, found, caller) {
        None => PASS,
        Some(nvshmem::Answer::Ours(ours)) => ours.cast_mut().cast(),
        Some(nvshmem::Answer::Absent) => {
            // SAFETY: the program's own name; asked from here, it means "after us", and fails.
            unsafe { real(libc::RTLD_NEXT, name) };
            ABSENT
        }
    }
}

/// Whether our `dlsym` is the next one after the caller's library. Libraries that stand in for `dlsym` too ask for the
/// next one by version, since glibc had no other way for them; ours has none, so glibc would pass us over.
#[cold]
fn is_next_after(caller: usize) -> bool {
    let (mut is_behind, mut is_next) = (false, false);
    elf::find(|object| {
        if is_behind && object.symbol(c"dlsym").is_some() {
            is_next = object.is_ours();
            return true;
        }
        is_behind |= object.contains(caller);
        false
    });
    is_next
}

/// Stands in for the C library's `dlsym`, and jumps to it for all that is not a row: it must see the program's
/// return address, not ours, because `RTLD_NEXT` and `RTLD_DEFAULT` depend on who asks.
///
/// # Safety
/// As `dlsym(3)`.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn dlsym(_handle: *mut c_void, _name: *const c_char) -> *mut c_void {
    arch::looks_up!(2 decide REAL_DLSYM)
}

/// As [`dlsym`], with a version.
///
/// # Safety
/// As `dlvsym(3)`.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn dlvsym(
    _handle: *mut c_void,
    _name: *const c_char,
    _version: *const c_char,
) -> *mut c_void {
    arch::looks_up!(3 decide REAL_DLVSYM)
}

/// `cuGetProcAddress` and `cuGetProcAddress_v2`: the driver answers first, and only its successes are looked at.
pub(crate) fn substitute(
    run: impl FnOnce() -> i32,
    symbol: *const c_char,
    out: *mut *mut c_void,
    version: i32,
) -> i32 {
    let result = run();
    // SAFETY: the driver has just read the same string.
    let name = unsafe { crate::sys::c_bytes(symbol) };
    if name.is_empty() {
        runtime_began();
    }
    if result == 0 && !out.is_null() {
        // SAFETY: the driver wrote it, for it succeeded.
        let address = unsafe { *out } as usize;
        if let Some(ours) = ours_for(address) {
            // SAFETY: as above.
            unsafe { *out = ours };
        } else if DRIVER_RANGE.contains(address) && unhooked::is_memory(name) {
            unhooked::seen(name, version);
        }
    }
    result
}

/// Only the CUDA runtime asks for a function without a name, right after it got `cuGetProcAddress` (seen with 11.8,
/// 12.9 and 13.5): whoever asked `dlsym` for that has a runtime in it.
fn runtime_began() {
    let caller = ASKED.swap(0, Ordering::Relaxed);
    if caller == 0 {
        return;
    }
    for slot in &RUNTIMES {
        if slot.compare_exchange(0, caller, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            break;
        }
    }
    if let Some(mut lane) = lanes::lane(Start::OnlyIfLive) {
        let at = session::now();
        lane.producer().push_raw(at, Kind::Runtime, &[&(caller as u64).to_ne_bytes()]);
    }
}

/// `cuInit`: from here on the driver's functions may be called.
pub(crate) fn initialised(run: impl FnOnce() -> i32, _flags: u32) -> i32 {
    let result = run();
    if result == 0 {
        torch::look();
    }
    result
}

/// Names the libraries whose calls pass us by, each once: loaded with RTLD_DEEPBIND, or before we were.
pub(crate) fn describe_bypasses(producer: &mut Producer) {
    let real = REAL_DLSYM.load(Ordering::Acquire) as usize;
    elf::find(|object| {
        let is_ours = object.is_ours();
        if is_ours || DRIVER_RANGE.contains(object.start()) || DLSYM_OWNER.contains(object.start()) {
            return false;
        }
        let is_new = || BYPASSES.iter().all(|slot| slot.load(Ordering::Relaxed) != object.start());
        let goes_past = |address| address == real || ours_for(address).is_some();
        if !INTERPOSED.load(Ordering::Relaxed) && is_new() && object.calls(goes_past) {
            let free = |slot: &&AtomicUsize| {
                slot.compare_exchange(0, object.start(), Ordering::Relaxed, Ordering::Relaxed).is_ok()
            };
            if BYPASSES.iter().find(free).is_some() {
                let text = Text::<512>::new().add(b"loader.bypassed=").add(object.path()).add(
                    b": it bypasses this library (RTLD_DEEPBIND?): its calls to the driver are not in this trace",
                );
                let at = producer.now();
                producer.push_raw(at, Kind::Note, &[text.as_bytes()]);
            }
        }
        false
    });
}

/// Sends what was learnt before the session began.
pub(crate) fn describe(producer: &mut Producer) {
    let at = producer.now();
    for slot in &RUNTIMES {
        let caller = slot.load(Ordering::Acquire);
        if caller != 0 {
            producer.push_raw(at, Kind::Runtime, &[&(caller as u64).to_ne_bytes()]);
        }
    }
    torch::describe(producer);
    pjrt::describe(producer);
    nvshmem::describe(producer);
    backward::describe(producer);
    unhooked::describe(producer);
    describe_bypasses(producer);
}
