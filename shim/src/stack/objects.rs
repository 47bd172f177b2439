//! Stands in for `_dl_find_object` where the C library has none (glibc before 2.35): a table of the loaded objects.
//!
//! The table is filled where taking the loader's lock does no harm, at the start of a session and inside of `dlsym` and
//! `dlclose`, which take it themselves; it is read without any. What was loaded since is not in it, and a stack through
//! such code is cut there.
//!
//! A slot is written once and never changes; an object that goes is only marked, and marked again when it comes back to
//! the same place. So a reader that comes at any moment sees a whole object or none.

use super::cfi::DlFindObject;
use crate::{elf, kernel};
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Objects of one process, those included that it has unloaded. Later ones are not found.
const MOST_OBJECTS: usize = 8192;
const PT_GNU_EH_FRAME: u32 = 0x6474_e550;

struct Slot {
    start: AtomicU64,
    end: AtomicU64,
    eh_frame_hdr: AtomicU64,
    /// [`N_PASSES`] when it was last seen; 0 while it is not loaded.
    seen: AtomicU32,
}

static SLOTS: [Slot; MOST_OBJECTS] = [const {
    Slot {
        start: AtomicU64::new(0),
        end: AtomicU64::new(0),
        eh_frame_hdr: AtomicU64::new(0),
        seen: AtomicU32::new(0),
    }
}; MOST_OBJECTS];
static N_SLOTS: AtomicUsize = AtomicUsize::new(0);
static N_PASSES: AtomicU32 = AtomicU32::new(0);
/// Objects loaded and unloaded so far, when the table was last filled.
static LOADED: AtomicU64 = AtomicU64::new(0);
static UNLOADED: AtomicU64 = AtomicU64::new(0);
/// Somebody fills the table. Nobody waits: whoever comes second leaves it to the first.
static IS_FILLING: AtomicBool = AtomicBool::new(false);
static IS_IN_USE: AtomicBool = AtomicBool::new(false);

/// Whether the table is what finds objects here.
pub(super) fn is_in_use() -> bool {
    IS_IN_USE.load(Ordering::Relaxed)
}

/// From now on, it is.
pub(super) fn start() {
    IS_IN_USE.store(true, Ordering::Relaxed);
    refresh();
}

/// Brings the table up to date, if it is in use. Takes the loader's lock.
pub(crate) fn refresh() {
    if !is_in_use() || IS_FILLING.swap(true, Ordering::Acquire) {
        return;
    }
    let number = N_PASSES.load(Ordering::Relaxed).wrapping_add(1).max(1);
    let mut pass = Pass { number, next: 0, is_begun: false };
    // SAFETY: `visit` gets the pass and nothing else.
    let stopped = unsafe { elf::iterate(visit, (&raw mut pass).cast()) };
    if stopped == 0 {
        for slot in SLOTS.iter().take(N_SLOTS.load(Ordering::Relaxed)) {
            if slot.seen.load(Ordering::Relaxed) != pass.number {
                slot.seen.store(0, Ordering::Release);
            }
        }
        N_PASSES.store(pass.number, Ordering::Relaxed);
    }
    IS_FILLING.store(false, Ordering::Release);
}

struct Pass {
    number: u32,
    /// Where the next object is expected: the loader keeps their order.
    next: usize,
    is_begun: bool,
}

/// Stops at the first object if nothing has changed.
unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, pass: *mut c_void) -> c_int {
    // SAFETY: dl_iterate_phdr passes back what `refresh` gave it.
    let pass = unsafe { &mut *pass.cast::<Pass>() };
    // SAFETY: the loader describes the object for the length of this call.
    let info = unsafe { &*info };
    if !core::mem::replace(&mut pass.is_begun, true) {
        let (loaded, unloaded) = (info.dlpi_adds, info.dlpi_subs);
        let is_same = LOADED.swap(loaded, Ordering::Relaxed) == loaded;
        if UNLOADED.swap(unloaded, Ordering::Relaxed) == unloaded && is_same {
            return 1;
        }
    }
    let base = info.dlpi_addr;
    let (mut start, mut end, mut eh_frame_hdr) = (u64::MAX, 0, 0);
    for i in 0..usize::from(info.dlpi_phnum) {
        // SAFETY: the loader's array has `dlpi_phnum` entries.
        let header = unsafe { &*info.dlpi_phdr.wrapping_add(i) };
        let at = base.wrapping_add(header.p_vaddr);
        match header.p_type {
            libc::PT_LOAD => {
                start = start.min(at);
                end = end.max(at.wrapping_add(header.p_memsz));
            }
            PT_GNU_EH_FRAME => eh_frame_hdr = at,
            _ => {}
        }
    }
    if start < end {
        pass.see(start, end, eh_frame_hdr);
    }
    0
}

impl Pass {
    fn see(&mut self, start: u64, end: u64, eh_frame_hdr: u64) {
        let n = N_SLOTS.load(Ordering::Relaxed);
        let is_it = |slot: &Slot| {
            slot.start.load(Ordering::Relaxed) == start
                && slot.end.load(Ordering::Relaxed) == end
                && slot.eh_frame_hdr.load(Ordering::Relaxed) == eh_frame_hdr
        };
        let known = || SLOTS.iter().take(n).position(is_it);
        let at = if SLOTS.get(self.next).is_some_and(is_it) { Some(self.next) } else { known() };
        let at = at.unwrap_or(n);
        let Some(slot) = SLOTS.get(at) else { return };
        if at == n {
            slot.start.store(start, Ordering::Relaxed);
            slot.end.store(end, Ordering::Relaxed);
            slot.eh_frame_hdr.store(eh_frame_hdr, Ordering::Relaxed);
        }
        // SYNC: object of the slot.
        slot.seen.store(self.number, Ordering::Release);
        if at == n {
            N_SLOTS.store(n + 1, Ordering::Relaxed);
        }
        self.next = at + 1;
    }
}

/// Somebody reads what lies in objects that another thread could unload, which waits until it is dropped. See [`Closing`].
pub(crate) struct Reading(&'static AtomicU32);

/// Readers, each in a line of the caches with few others.
static READERS: [Readers; 16] = [const { Readers(AtomicU32::new(0)) }; 16];
/// Threads that are inside of `dlclose`.
static N_CLOSING: AtomicU32 = AtomicU32::new(0);

#[repr(align(64))]
struct Readers(AtomicU32);

impl Reading {
    /// `None` while a thread is inside of `dlclose`: what it unloads may go at any moment.
    #[inline]
    pub(crate) fn begin() -> Option<Reading> {
        let here = 0_u8;
        // Threads have their stacks far from each other.
        let readers = &READERS.get((&raw const here as usize >> 16) % READERS.len())?.0;
        // SYNC: reader or closer: each says that it comes before it looks for the other, so one of them sees the other.
        readers.fetch_add(1, Ordering::SeqCst);
        let reading = Reading(readers);
        (N_CLOSING.load(Ordering::SeqCst) == 0).then_some(reading)
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// A `dlclose` is under way, until dropped.
pub(crate) struct Closing(());

/// Steps of 10 µs that a closer waits for readers, which need a few of them. Those whom a fork left behind, or whom the
/// closer itself interrupted, never end.
const PATIENCE: u32 = 20_000;

impl Closing {
    /// Waits until nobody reads.
    pub(crate) fn begin() -> Closing {
        static IS_STUCK: AtomicBool = AtomicBool::new(false);
        // SYNC: reader or closer.
        N_CLOSING.fetch_add(1, Ordering::SeqCst);
        let is_read = || READERS.iter().any(|readers| readers.0.load(Ordering::SeqCst) != 0);
        let mut patience = if IS_STUCK.load(Ordering::Relaxed) { 0 } else { PATIENCE };
        while is_read() && patience > 0 {
            kernel::sleep(10_000);
            patience -= 1;
            if patience == 0 {
                IS_STUCK.store(true, Ordering::Relaxed);
            }
        }
        Closing(())
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        N_CLOSING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// As `_dl_find_object(3)`, for objects in the table.
///
/// # Safety
/// `result` can be written to.
pub(super) unsafe extern "C" fn find(pc: *mut c_void, result: *mut DlFindObject) -> c_int {
    let pc = pc as u64;
    let n = N_SLOTS.load(Ordering::Relaxed);
    for slot in SLOTS.iter().take(n) {
        // SYNC: object of the slot.
        if slot.seen.load(Ordering::Acquire) == 0 {
            continue;
        }
        let (start, end) = (slot.start.load(Ordering::Relaxed), slot.end.load(Ordering::Relaxed));
        if (start..end).contains(&pc) {
            let found = DlFindObject::of(start, end, slot.eh_frame_hdr.load(Ordering::Relaxed));
            // SAFETY: the caller's promise.
            unsafe { result.write(found) };
            return 0;
        }
    }
    -1
}
