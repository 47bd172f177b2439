//! A library that came into a process that ran already: nobody was bound to our exports, so our functions go to where the program keeps
//! the addresses of the driver's. Those are aligned words in the data of libraries: slots for functions of others, filled in by
//! the loader, and the words to which each copy of the CUDA runtime has resolved the driver's functions. Nothing else is written
//! to: no code, no heap, no stack, nothing of the driver's own or the loader's.
//!
//! Not found: an address that code has copied to its heap or its stack, or has compiled into an instruction.

use super::{loader, nccl_loader, torch, torch_living, unload};
use crate::elf::{self, Object};
use crate::session;
use crate::{kernel, lanes, ledger, words};
use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use gputrace_ring::late;
use gputrace_ring::record::Kind;
use gputrace_ring::ring::Producer;

/// How often all is looked at again because the program loads or unloads libraries meanwhile.
const TRIES: u32 = 16;
/// Data beyond so many bytes is not looked at: those of PyTorch's libraries have some tens of MiB, code models of JAX's hundreds.
const MOST_DATA: usize = 256 << 20;
const PAGE: usize = 4096;
/// How long another thread may take to put words back, in milliseconds.
const PATIENCE: u32 = 2_000;
/// More objects than programs have; those beyond are looked at each time.
const MOST_OBJECTS: usize = 2048;

/// Where the objects begin whose data was looked at: the runtime in them asks `dlsym` from now on, which is ours.
static LOOKED_AT: [AtomicUsize; MOST_OBJECTS] = [const { AtomicUsize::new(0) }; MOST_OBJECTS];
/// Loads and unloads, as of the last look.
static LOADED: AtomicU64 = AtomicU64::new(0);
static UNLOADED: AtomicU64 = AtomicU64::new(0);
/// Objects whose data has more than [`MOST_DATA`] bytes.
static TOO_LARGE: AtomicUsize = AtomicUsize::new(0);

/// Called on a thread of its own, after `dlopen` has brought this library into a running process, and again whenever somebody attaches
/// after a detach. Puts our functions into the program's words, and serves the one who attaches for `patience` milliseconds. Answers one of
/// [`late`]'s numbers. If nobody asks for a recording meanwhile, the words are put back.
///
/// # Safety
/// On a thread that nobody else uses.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gputrace_attach_loaded(patience: u64) -> u64 {
    let name = c"gputrace-attach";
    // SAFETY: the name ends with a zero and has fewer than 16 bytes.
    let _ = unsafe {
        kernel::call(libc::SYS_prctl, [libc::PR_SET_NAME as usize, name.as_ptr() as usize, 0, 0, 0, 0])
    };
    kernel::block_signals(kernel::MOST_SIGNALS);
    if session::is_live() {
        // Somebody detaches, and the program makes no call that could hear it.
        lanes::obey();
        give_rings_back();
        return late::AWAKE;
    }
    let is_first = !elf::is_late();
    if !is_first && patience == 0 {
        // As above, and the program's own call was faster: what it could not unmap is left to do.
        give_rings_back();
        return late::UNUSED;
    }
    if is_first && session::generation() != 0 {
        // It was preloaded, and is asleep or switched off.
        return late::PRELOADED;
    }
    elf::note_late();
    loader::find_real_dlsym();
    crate::nccl::threads::find_real_create();
    if !loader::find_loaded_driver() {
        return late::NO_DRIVER;
    }
    // What was given out and taken back since the last detach is not known.
    ledger::empty();
    lanes::fall_asleep();
    if !session::has_control() {
        return late::REFUSED;
    }
    torch::look();
    words::set_servant(true);
    let before = session::now();
    place();
    torch_living::note(before);
    let n = words::counts().0;
    session::tell_words(n);
    let answer = if n == 0 { late::NO_WORDS } else { serve(patience) };
    words::set_servant(false);
    answer
}

/// Unmaps the rings of sessions that are over. This thread is nobody's: it can wait for those that are in the middle of an event.
fn give_rings_back() {
    for _ in 0..PATIENCE {
        if lanes::give_rings_back() {
            break;
        }
        kernel::sleep(1_000_000);
    }
}

/// Does what is asked, so that no thread of the program's stands still for it.
fn serve(patience: u64) -> u64 {
    for _ in 0..patience {
        lanes::obey();
        if session::is_live() {
            return late::DONE;
        }
        kernel::sleep(1_000_000);
    }
    words::restore();
    session::tell_words(0);
    late::UNUSED
}

/// Puts our functions into all words there are.
fn place() {
    for _ in 0..PATIENCE {
        if let Some(turn) = words::Turn::take() {
            words::set_look(look_again);
            turn.begin();
            LOOKED_AT.iter().for_each(|start| start.store(0, Ordering::Relaxed));
            return look(&turn);
        }
        // A thread of the program's puts them back still.
        kernel::sleep(1_000_000);
    }
}

/// To be called where a program may just have loaded a library: its words are made ours too.
#[cold]
fn look_again() {
    let seen = (LOADED.load(Ordering::Relaxed), UNLOADED.load(Ordering::Relaxed));
    if elf::n_changes() == seen {
        return;
    }
    if let Some(turn) = words::Turn::take() {
        look(&turn);
    }
}

/// Object by object, so that the loader's lock is never held for long.
fn look(turn: &words::Turn) {
    for _ in 0..TRIES {
        let changes = elf::n_changes();
        settle();
        // Who is listed now, and was before, is complete: the loader fills in the slots of an object before it lets go of its lock.
        if elf::n_changes() == changes && look_at_all(turn, changes) {
            LOADED.store(changes.0, Ordering::Relaxed);
            UNLOADED.store(changes.1, Ordering::Relaxed);
            return;
        }
    }
}

/// False if objects came or went meanwhile.
fn look_at_all(turn: &words::Turn, changes: (u64, u64)) -> bool {
    for index in 0.. {
        let (mut n, mut is_same) = (0, true);
        let found = elf::find(|object| {
            let is_it = n == index;
            n += 1;
            if is_it {
                is_same = elf::n_changes() == changes;
                if is_same && !is_left_alone(object) {
                    look_at(turn, object);
                }
            }
            is_it
        });
        if !is_same {
            return false;
        }
        if found.is_none() {
            break;
        }
    }
    true
}

/// Waits until no other thread is loading a library: it holds the loader's lock until that is complete.
fn settle() {
    type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;
    type Dlclose = unsafe extern "C" fn(*mut c_void) -> c_int;
    let (Some(open), Some(close)) = (elf::c_library(c"dlopen"), elf::c_library(c"dlclose")) else { return };
    // SAFETY: this is the C library's dlopen.
    let open: Dlopen = unsafe { core::mem::transmute(open) };
    // SAFETY: this is the C library's dlclose.
    let close: Dlclose = unsafe { core::mem::transmute(close) };
    // SAFETY: null is the program itself, which is there.
    let program = unsafe { open(core::ptr::null(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    if !program.is_null() {
        // SAFETY: the handle was just given out.
        unsafe { close(program) };
    }
}

/// The driver and its helpers, the loader, the C library and ourselves.
fn is_left_alone(object: &Object) -> bool {
    let name = object.soname().to_bytes();
    let kept: [&[u8]; 6] =
        [b"libcuda.so", b"libnvidia-", b"libcudadebugger", b"ld-linux", b"linux-vdso", b"libc.so."];
    object.is_ours() || loader::is_driver(object.start()) || kept.iter().any(|kept| name.starts_with(kept))
}

/// Its slots for functions of others, and, where it may have looked up functions of the driver's, its data.
fn look_at(turn: &words::Turn, object: &Object) {
    let mut may_hold_words = false;
    object.find_slot(|name, slot| {
        let bytes = name.to_bytes();
        may_hold_words |= asks_for_functions(bytes);
        if is_of_interest(bytes)
            && slot.is_multiple_of(size_of::<usize>())
            && object.has_data(slot)
            && let Some((theirs, ours)) = replacement(object, name, slot)
        {
            turn.swap(object, slot, theirs, ours);
        }
        false
    });
    if may_hold_words && is_new(object.start()) {
        let bytes: usize = object.data().map(|(start, end)| end - start).sum();
        if bytes > MOST_DATA {
            TOO_LARGE.fetch_add(1, Ordering::Relaxed);
            return;
        }
        for (start, end) in object.data() {
            look_through(turn, object, start, end);
        }
    }
}

/// Whether who calls a function of this name may keep addresses of the driver's functions.
fn asks_for_functions(name: &[u8]) -> bool {
    matches!(name, b"dlsym" | b"dlvsym") || name.starts_with(b"cu")
}

/// Whether a function of this name may be one of ours: few are, and slots are many.
fn is_of_interest(name: &[u8]) -> bool {
    let ours: [&[u8]; 5] = [b"cu", b"dl", b"nccl", b"pnccl", b"_ZN3c10"];
    ours.iter().any(|prefix| name.starts_with(prefix))
}

/// What a slot has, and what of ours shall stand there.
fn replacement(object: &Object, name: &CStr, slot: usize) -> Option<(usize, usize)> {
    // SAFETY: an aligned word of the object's data.
    let has = unsafe { &*(slot as *const AtomicUsize) }.load(Ordering::Relaxed);
    if has == 0 {
        return None;
    }
    // A function that was never called leads to the loader, by way of the object's own code.
    let is_unresolved = object.has_code(has) && object.symbol(name).is_none();
    let target = if is_unresolved { elf::function_behind_us(name) } else { has };
    let ours = match name.to_bytes() {
        b"dlsym" | b"dlvsym" => loader::ours_of_loader(name, target)?,
        b"dlclose" if target == elf::function_behind_us(name) => unload::dlclose as *const () as usize,
        bytes if bytes.starts_with(b"cu") => loader::ours_for(target)? as usize,
        bytes if bytes.starts_with(b"_Z") => torch::ours_for(name, target)?,
        bytes => nccl_loader::ours_for(nccl_loader::row_of(bytes)?, target, slot)? as usize,
    };
    Some((has, ours))
}

fn is_new(start: usize) -> bool {
    for slot in &LOOKED_AT {
        match slot.compare_exchange(0, start, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return true,
            Err(there) if there == start => return false,
            Err(_) => {}
        }
    }
    true
}

/// Makes ours whatever word holds the address of one of the driver's functions.
fn look_through(turn: &words::Turn, object: &Object, start: usize, end: usize) {
    let mut page = [0_usize; PAGE / size_of::<usize>()];
    let mut at = start.next_multiple_of(size_of::<usize>());
    while at + size_of::<usize>() <= end {
        let bytes = (PAGE - at % PAGE).min(end - at);
        // By the kernel: a program may have locked pages of its data.
        // SAFETY: the buffer is a page, and no more is asked for.
        let n = unsafe { kernel::copy(at, page.as_mut_ptr().cast(), bytes) }.unwrap_or(0);
        for (index, value) in page.iter().take(n / size_of::<usize>()).enumerate() {
            if loader::is_driver(*value)
                && let Some(ours) = loader::ours_for(*value)
            {
                turn.swap(object, at + index * size_of::<usize>(), *value, ours as usize);
            }
        }
        at = (at & !(PAGE - 1)) + PAGE;
    }
}

/// Says in the trace that the process was attached to late, and what cannot be seen.
pub(crate) fn describe(producer: &mut Producer) {
    if !elf::is_late() {
        return;
    }
    let (n, left) = words::counts();
    let at = producer.now();
    let text = crate::sys::Text::<320>::new()
        .add(b"attach.late=")
        .number(n as u64)
        .add(b" words: this process was already running; earlier allocations are not in this trace except PyTorch's blocks, nor are calls by addresses that it has copied to its heap");
    producer.push_raw(at, Kind::Note, &[text.as_bytes()]);
    torch_living::describe(producer);
    let unseen = left + TOO_LARGE.load(Ordering::Relaxed);
    if unseen != 0 {
        let text = crate::sys::Text::<160>::new()
            .add(b"attach.unseen=")
            .number(unseen as u64)
            .add(b" words or libraries: more than this library has room for");
        producer.push_raw(at, Kind::Note, &[text.as_bytes()]);
    }
}
