//! Stands in for `_dl_find_object` where the C library has none (glibc before 2.35): a table of the loaded objects.
//!
//! The table is filled where taking the loader's lock does no harm, at the start of a session and inside of `dlsym` and
//! `dlclose`, which take it themselves; it is read without any. What was loaded since is not in it, and a stack through
//! such code is cut there.
//!
//! A slot is written once and never changes; an object that goes is only marked, and marked again when it comes back to
//! the same place. So a reader that comes at any moment sees a whole object or none.

use super::cfi::DlFindObject;
use crate::{elf, own};
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use gputrace_ring::clock;

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

static READERS: [Readers; 16] = [const { Readers { n: AtomicU32::new(0), n_left: AtomicU32::new(0) } }; 16];
/// Threads that are inside of `dlclose`.
static N_CLOSING: AtomicU32 = AtomicU32::new(0);
/// The process that the readers were counted in.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// In a line of the caches with few others.
#[repr(align(64))]
struct Readers {
    n: AtomicU32,
    /// Of these, so many will never end: a fork left them in the other process, a signal handler left them by `longjmp`, or
    /// the thread ended there.
    n_left: AtomicU32,
}

impl Readers {
    fn is_reading(&self) -> bool {
        // SYNC: reader or closer.
        let n = self.n.load(Ordering::SeqCst);
        // One that was taken for left has ended after all.
        self.n_left.fetch_min(n, Ordering::Relaxed).min(n) < n
    }

    fn take_for_left(&self) {
        self.n_left.store(self.n.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

impl Reading {
    /// `None` while a thread is inside of `dlclose`: what it unloads may go at any moment.
    #[inline]
    pub(crate) fn begin() -> Option<Reading> {
        let here = 0_u8;
        // Threads have their stacks far from each other.
        let readers = &READERS.get((&raw const here as usize >> 16) % READERS.len())?.n;
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

/// A `dlclose` is under way, until it is ended: not by being dropped, because it may be left in other ways, and then is ended
/// by whoever finds that out.
pub(crate) struct Closing(());

/// Nanoseconds that a closer waits for readers, which need some microseconds unless they lose their processor.
const PATIENCE: u64 = 200_000_000;

impl Closing {
    /// From here on nobody begins to read.
    pub(crate) fn begin() -> Closing {
        // SYNC: reader or closer.
        N_CLOSING.fetch_add(1, Ordering::SeqCst);
        Closing(())
    }

    /// Waits until nobody reads.
    pub(crate) fn wait(&self) {
        let process = own::process();
        // The threads that a forked child's readers were are not in it.
        if !matches!(PROCESS.swap(process, Ordering::Relaxed), before if before == 0 || before == process) {
            READERS.iter().for_each(Readers::take_for_left);
        }
        let began = clock::nanos(libc::CLOCK_MONOTONIC_COARSE);
        loop {
            // Without a system call: the program may be under a sandbox.
            for _ in 0..1000 {
                if !READERS.iter().any(Readers::is_reading) {
                    return;
                }
                core::hint::spin_loop();
            }
            if clock::nanos(libc::CLOCK_MONOTONIC_COARSE).saturating_sub(began) > PATIENCE {
                break;
            }
        }
        READERS.iter().for_each(Readers::take_for_left);
    }

    /// The `dlclose` is over.
    pub(crate) fn end(self) {
        N_CLOSING.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether a thread is inside of `dlclose`, or was when it was last heard of.
    #[inline]
    pub(crate) fn is_any() -> bool {
        N_CLOSING.load(Ordering::Relaxed) != 0
    }

    /// One that was begun and left.
    pub(crate) fn left() -> Closing {
        Closing(())
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
