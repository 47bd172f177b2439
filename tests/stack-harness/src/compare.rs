//! Frame by frame against libgcc's `_Unwind_Backtrace`, and against the crate `backtrace`, which asks an unwinder in its own way.

use crate::stack::{self, Captured};
use core::ffi::{c_int, c_void};
use gputrace_ring::record::StackDef;
use std::collections::HashSet;
use std::sync::Mutex;

unsafe extern "C" {
    fn _Unwind_Backtrace(
        callback: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int,
        data: *mut c_void,
    ) -> c_int;
    fn _Unwind_GetIP(context: *mut c_void) -> u64;
}

/// Totals over all threads.
#[derive(Default)]
pub struct Comparison {
    stacks: HashSet<u64>,
    n_compared: u64,
    n_frames: u64,
    n_different: u64,
    n_disagreements: u64,
    n_truncated: u64,
    n_marked: u64,
    first_difference: Option<String>,
    first_marked: Option<String>,
}

static TOTAL: Mutex<Option<Comparison>> = Mutex::new(None);

unsafe extern "C" fn push(context: *mut c_void, frames: *mut c_void) -> c_int {
    // SAFETY: the address of a live context.
    let ip = unsafe { _Unwind_GetIP(context) };
    // SAFETY: `frames` is the vector that `reference` passed, used by this thread only.
    unsafe { &mut *frames.cast::<Vec<u64>>() }.push(ip);
    0
}

fn reference() -> Vec<u64> {
    let mut frames: Vec<u64> = Vec::with_capacity(4096);
    // SAFETY: the callback gets the vector back.
    unsafe { _Unwind_Backtrace(push, (&raw mut frames).cast()) };
    // libgcc reports the end of the stack as a frame at address 0.
    while frames.last() == Some(&0) {
        frames.pop();
    }
    frames
}

/// What the crate `backtrace` finds, outermost first. It looks for the call, so what returns there is a byte later, but for the
/// frames that a signal interrupted.
fn second_reference() -> Vec<u64> {
    let mut frames = Vec::with_capacity(4096);
    let push = |frame: &backtrace::Frame| {
        frames.push(frame.ip() as u64);
        true
    };
    // SAFETY: nothing is resolved, which is what needs one thread at a time.
    unsafe { backtrace::trace_unsynchronized(push) };
    while frames.last() == Some(&0) {
        frames.pop();
    }
    frames.reverse();
    frames
}

/// Whether both references found the same callers of this library.
fn agree(first: &[u64], outermost_first: &[u64]) -> bool {
    let mut pairs = first.iter().rev().zip(outermost_first);
    first.len() <= outermost_first.len() && pairs.all(|(a, b)| a == b || *a == b + 1)
}

/// Captures in all ways and adds to the totals.
#[inline(never)]
pub fn compare() {
    let state = crate::harness_state();
    // SAFETY: the calling thread's own state, and the hooks' guard keeps handlers out.
    let captured = unsafe { stack::capture(state, stack::NATIVE) };
    // SAFETY: as above.
    assert!(unsafe { &mut *state }.complete(), "a stack was taken for another one");
    let (reference, second) = (reference(), second_reference());
    // SAFETY: as above.
    let ours: Vec<u64> =
        unsafe { &*state }.native_addresses().map(|word| word & !StackDef::INTERPRETER).collect();
    // The reference starts inside this library; its first frames are ours too.
    let own = reference.len().saturating_sub(ours.len());
    let is_truncated = captured.marks & Captured::TRUNCATED != 0;
    let end = if is_truncated { reference.len().min(own + ours.len()) } else { reference.len() };
    let skip = reference.iter().take(12).position(|ip| Some(ip) == ours.first());
    let theirs = match skip {
        Some(skip) if is_truncated => reference.get(skip..skip + ours.len()).unwrap_or_default(),
        Some(skip) => &reference[skip..end],
        None => &[],
    };
    let mut total = TOTAL.lock().unwrap();
    let total = total.get_or_insert_with(Comparison::default);
    total.n_compared += 1;
    total.n_frames += ours.len() as u64;
    total.stacks.insert(captured.id);
    total.n_truncated += u64::from(is_truncated);
    total.n_marked += u64::from(captured.marks & !Captured::TRUNCATED != 0);
    let list = |frames: &[u64]| frames.iter().map(|ip| name(*ip)).collect::<Vec<_>>().join("\n    ");
    if captured.marks & !Captured::TRUNCATED != 0 {
        total
            .first_marked
            .get_or_insert_with(|| format!("first marked: {:#x}\n    {}", captured.marks, list(&ours)));
    }
    if !is_truncated && !agree(theirs, &second) {
        total.n_disagreements += 1;
        total.first_difference.get_or_insert_with(|| {
            format!("libgcc:\n    {}\n  backtrace, from the other end:\n    {}", list(theirs), list(&second))
        });
    }
    if ours != theirs {
        total.n_different += 1;
        total.first_difference.get_or_insert_with(|| {
            let differs = ours.iter().zip(theirs).position(|(a, b)| a != b);
            format!(
                "marks {:#x}, first difference at {differs:?}\n  ours:\n    {}\n  libgcc:\n    {}",
                captured.marks,
                list(&ours),
                list(&reference)
            )
        });
    }
}

fn name(ip: u64) -> String {
    let mut info = libc::Dl_info {
        dli_fname: core::ptr::null(),
        dli_fbase: core::ptr::null_mut(),
        dli_sname: core::ptr::null(),
        dli_saddr: core::ptr::null_mut(),
    };
    // SAFETY: any address may be asked for.
    let found = unsafe { libc::dladdr(ip as *const c_void, &raw mut info) };
    let text = |name: *const core::ffi::c_char| {
        if found == 0 || name.is_null() {
            return String::from("?");
        }
        // SAFETY: dladdr gives C strings of loaded objects.
        unsafe { core::ffi::CStr::from_ptr(name) }.to_string_lossy().into_owned()
    };
    format!("{ip:#x} {} {}+{:#x}", text(info.dli_sname), text(info.dli_fname), ip - info.dli_fbase as u64)
}

/// [`compare`] for one stack, without allocation, for signal handlers: 1 the same, 0 different, 2 the same as far as ours
/// goes and marked, -1 when the signal interrupted a capture of this thread.
#[unsafe(no_mangle)]
pub extern "C" fn harness_compare() -> c_int {
    if crate::IS_BUSY.with(|busy| busy.replace(true)) {
        return -1;
    }
    let result = compare_once();
    crate::IS_BUSY.with(|busy| busy.set(false));
    result
}

fn compare_once() -> c_int {
    let state = crate::harness_state();
    // SAFETY: the calling thread's own state; the guard keeps its signal handlers out.
    let captured = unsafe { stack::capture(state, stack::NATIVE) };
    // SAFETY: as above.
    if !unsafe { &mut *state }.complete() {
        return 0;
    }
    let mut reference = Room { n: 0, frames: [0; 8192] };
    // SAFETY: the callback gets the array back.
    unsafe { _Unwind_Backtrace(push_in_room, (&raw mut reference).cast()) };
    // SAFETY: as above.
    let mut ours = unsafe { &*state }.native_addresses().map(|word| word & !StackDef::INTERPRETER).peekable();
    let mut theirs = reference.frames[..reference.n].iter().copied().filter(|ip| *ip != 0).peekable();
    while theirs.next_if(|ip| Some(ip) != ours.peek()).is_some() {}
    loop {
        match (ours.next(), theirs.next()) {
            (None, None) => return 1,
            (Some(a), Some(b)) if a == b => {}
            (None, Some(_)) if captured.marks & (Captured::TRUNCATED | Captured::BROKEN) != 0 => return 2,
            (Some(_), None) if captured.marks & Captured::GUESSED != 0 => return 2,
            _ => return 0,
        }
    }
}

struct Room {
    n: usize,
    frames: [u64; 8192],
}

unsafe extern "C" fn push_in_room(context: *mut c_void, room: *mut c_void) -> c_int {
    // SAFETY: the room that `compare_once` passed, used by this thread only.
    let room = unsafe { &mut *room.cast::<Room>() };
    let Some(slot) = room.frames.get_mut(room.n) else { return 5 };
    // SAFETY: the address of a live context.
    *slot = unsafe { _Unwind_GetIP(context) };
    room.n += 1;
    0
}

/// Prints the totals to stderr; returns the number of stacks that differed.
#[unsafe(no_mangle)]
pub extern "C" fn harness_comparison() -> u64 {
    let total = TOTAL.lock().unwrap().take().unwrap_or_default();
    eprintln!(
        "compared {} captures, {} distinct stacks, {} frames: {} different from libgcc, {} where the crate `backtrace` is, {} truncated, {} with other marks",
        total.n_compared,
        total.stacks.len(),
        total.n_frames,
        total.n_different,
        total.n_disagreements,
        total.n_truncated,
        total.n_marked,
    );
    for text in [total.first_marked, total.first_difference].into_iter().flatten() {
        eprintln!("{text}");
    }
    total.n_different + total.n_disagreements
}
