//! The program's environment as it was when the session began, and what the kernel told the program at its start.
//!
//! A program may change its environment at any moment, also while we read: the C library's array moves, its strings are
//! freed. So it is copied once, by reads that cannot fault, and what came out as no variable is left out.

use crate::arch;
use crate::{asked, kernel, sys};
use core::ffi::{CStr, c_char, c_int};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use gputrace_ring::clock::{self, ReadClock};
use gputrace_ring::variables;

/// Variables that would load us into the recorder.
const NOT_FOR_THE_RECORDER: [&[u8]; 3] = [b"LD_PRELOAD=", b"LD_AUDIT=", b"GPUTRACE="];
/// How often a copy is tried that the program's changes run away from.
const TRIES: u32 = 16;
const WORD: usize = size_of::<usize>();

/// All variables, then those for the recorder; each list ends with null.
static COPY: AtomicPtr<*const c_char> = AtomicPtr::new(null_mut());
static FOR_RECORDER: AtomicUsize = AtomicUsize::new(0);

/// Copies the environment; false if there is no memory for that.
///
/// While a variable is added, the C library's array may be freed already where its pointer still leads: it then seems to
/// end early. So a copy counts at once if a second look finds as much as it has; else the longest of several does.
pub(crate) fn copy() -> bool {
    let mut best = 0;
    COPY.store(null_mut(), Ordering::Relaxed);
    // A forked child was asked for nothing.
    OPTIONS.store(null_mut(), Ordering::Relaxed);
    BASE.store(0, Ordering::Relaxed);
    for _ in 0..TRIES {
        let (found, bytes) = walk(|_, _| true);
        // A little room, for a program that adds some meanwhile.
        let (n, room) = (found + 16, bytes + 4096);
        let lists = 2 * (n + 1) * WORD;
        let memory = sys::pages(lists + room);
        if memory.is_null() {
            return false;
        }
        let Some(copied) = fill(memory, n, lists, room, best) else {
            // SAFETY: nobody has seen this mapping.
            unsafe { kernel::unmap(memory, lists + room) };
            continue;
        };
        best = copied;
        if (found, bytes) == walk(|_, _| true) && copied == found {
            break;
        }
        kernel::sleep(50_000);
    }
    true
}

/// Copies to `memory`: room for twice `n` pointers and their ends, from `lists` on for the strings. How many it copied;
/// `None` if the room was too small, or they are no more than the copy before had.
fn fill(memory: *mut u8, n: usize, lists: usize, bytes: usize, before: usize) -> Option<usize> {
    let all = memory.cast::<*const c_char>();
    let ours = all.wrapping_add(n + 1);
    let (mut used, mut n_all, mut n_ours) = (0, 0, 0);
    let mut fits = true;
    walk(|texts, variable| {
        let to = memory.wrapping_add(lists + used);
        // SAFETY: the mapping is new, so nobody else has a reference to it; it ends `bytes` after the lists.
        let room = unsafe { core::slice::from_raw_parts_mut(to, bytes - used) };
        let length = read_text(texts, variable, |part, at| match room.get_mut(at..at + part.len()) {
            Some(room) => {
                room.copy_from_slice(part);
                true
            }
            None => false,
        });
        if n_all >= n || length + 1 >= room.len() {
            fits = false;
            return false;
        }
        if let Some(end) = room.get_mut(length) {
            *end = 0;
        }
        let text = room.get(..length).unwrap_or_default();
        if !text.contains(&b'=') {
            return true;
        }
        // SAFETY: fewer than `n`, so inside the first list.
        unsafe { all.wrapping_add(n_all).write(to.cast()) };
        n_all += 1;
        if !NOT_FOR_THE_RECORDER.iter().any(|name| text.starts_with(name)) {
            // SAFETY: no more than in the first list, so inside the second.
            unsafe { ours.wrapping_add(n_ours).write(to.cast()) };
            n_ours += 1;
        }
        used += length + 1;
        true
    });
    let is_better = fits && (n_all > before || COPY.load(Ordering::Relaxed).is_null());
    is_better.then(|| {
        FOR_RECORDER.store(ours as usize, Ordering::Relaxed);
        // SYNC: the copy is visible to whoever sees it.
        COPY.store(all, Ordering::Release);
        n_all
    })
}

/// Calls `each` for the addresses of the program's variables, until it says no; how many there were, and their bytes.
fn walk(mut each: impl FnMut(&mut Texts, usize) -> bool) -> (usize, usize) {
    unsafe extern "C" {
        static environ: *const *const c_char;
    }
    // SAFETY: the C library's own variable, which exists as long as the process. Another thread may be writing it.
    let mut at = unsafe { (&raw const environ).read_volatile() } as usize;
    let (mut n, mut bytes) = (0, 0);
    let (mut list, mut texts) = (Window::<256>::new(), Texts::new());
    // More than the kernel gives out to any program; where an array has been freed, its end may be gone.
    while at != 0 && n < 1 << 20 {
        let mut word = [0; WORD];
        if !at.is_multiple_of(WORD) || list.read(at, &mut word) != WORD {
            break;
        }
        let variable = usize::from_ne_bytes(word);
        if variable == 0 {
            break;
        }
        n += 1;
        bytes += read_text(&mut texts, variable, |_, _| true) + 1;
        if !each(&mut texts, variable) {
            break;
        }
        at += WORD;
    }
    (n, bytes)
}

/// What was read of the program's memory last. Variables mostly follow each other, and each read is two calls of the kernel.
struct Window<const N: usize> {
    at: usize,
    n: usize,
    bytes: [u8; N],
}

type Texts = Window<1024>;

impl<const N: usize> Window<N> {
    fn new() -> Window<N> {
        Window { at: 0, n: 0, bytes: [0; N] }
    }

    /// As [`asked::read_memory`] does; as long a part as the window has.
    fn read(&mut self, address: usize, into: &mut [u8]) -> usize {
        let within = address.wrapping_sub(self.at);
        if within >= self.n || (self.n - within < into.len() && within != 0) {
            (self.at, self.n) = (address, asked::read_memory(address, &mut self.bytes));
        }
        let known = self.bytes.get(address.wrapping_sub(self.at)..self.n).unwrap_or_default();
        let n = known.len().min(into.len());
        if let (Some(into), Some(known)) = (into.get_mut(..n), known.get(..n)) {
            into.copy_from_slice(known);
        }
        n
    }
}

/// Reads a C string, or as much of it as can be read, in parts with their places, until `take` says no; its bytes.
fn read_text(texts: &mut Texts, address: usize, mut take: impl FnMut(&[u8], usize) -> bool) -> usize {
    let (mut part, mut length) = ([0_u8; 64], 0);
    loop {
        let n = texts.read(address.wrapping_add(length), &mut part);
        let read = part.get(..n).unwrap_or_default();
        let text = read.iter().position(|byte| *byte == 0).and_then(|end| read.get(..end)).unwrap_or(read);
        if !text.is_empty() && !take(text, length) {
            return length + text.len();
        }
        length += text.len();
        if text.len() < n || n == 0 {
            return length;
        }
    }
}

/// Variables that came with a wish to wake, `NAME=value`, each ended by a zero: they stand before the program's own. False if there
/// is no memory for that. Called by the one thread that makes a session, before anybody reads.
pub(crate) fn put_before(options: &[u8]) -> bool {
    let n_old = count(FOR_RECORDER.load(Ordering::Relaxed));
    // The list that came with the last wish is the base of no other: options do not pile up.
    let base = match BASE.load(Ordering::Relaxed) {
        0 => {
            BASE.store(FOR_RECORDER.load(Ordering::Relaxed), Ordering::Relaxed);
            FOR_RECORDER.load(Ordering::Relaxed)
        }
        base => base,
    };
    let n = options.split(|byte| *byte == 0).filter(|text| is_ours(text)).count();
    let lists = (n + 1 + n + n_old + 1) * WORD;
    let bytes = lists + options.len() + 1;
    let memory = sys::pages(bytes);
    if memory.is_null() {
        return false;
    }
    WISHES.keep(memory, bytes);
    let (own, list) = (memory.cast::<*const c_char>(), memory.cast::<*const c_char>().wrapping_add(n + 1));
    let mut used = 0;
    for (index, text) in options.split(|byte| *byte == 0).filter(|text| is_ours(text)).enumerate() {
        let to = memory.wrapping_add(lists + used);
        // SAFETY: the mapping is new, and has room for every text with its end, which is there already.
        unsafe { to.copy_from_nonoverlapping(text.as_ptr(), text.len()) };
        // SAFETY: as many as were counted.
        unsafe { own.wrapping_add(index).write(to.cast()) };
        // SAFETY: as above.
        unsafe { list.wrapping_add(index).write(to.cast()) };
        used += text.len() + 1;
    }
    for index in 0..count(base) {
        // SAFETY: the base has so many, and there is room for those of the last list, which had more.
        let variable = unsafe { *(base as *const *const c_char).wrapping_add(index) };
        // SAFETY: as above.
        unsafe { list.wrapping_add(n + index).write(variable) };
    }
    FOR_RECORDER.store(list as usize, Ordering::Relaxed);
    OPTIONS.store(own, Ordering::Release);
    true
}

/// Memory of the last wishes. Who reads an option has one of these, and is done long before so many others have come and gone.
struct Wishes {
    next: AtomicUsize,
    slots: [(AtomicPtr<u8>, AtomicUsize); 16],
}

static WISHES: Wishes = Wishes {
    next: AtomicUsize::new(0),
    slots: [const { (AtomicPtr::new(null_mut()), AtomicUsize::new(0)) }; 16],
};

impl Wishes {
    /// Keeps the newest, and gives the oldest back. For one thread at a time.
    fn keep(&self, memory: *mut u8, bytes: usize) {
        let next = self.next.fetch_add(1, Ordering::Relaxed) % self.slots.len();
        let Some((at, length)) = self.slots.get(next) else { return };
        let (oldest, had) = (at.swap(memory, Ordering::Relaxed), length.swap(bytes, Ordering::Relaxed));
        if !oldest.is_null() {
            // SAFETY: the mapping is ours. Options are read while a session is made, by who calls this, and once at the process's end.
            unsafe { kernel::unmap(oldest, had) };
        }
    }
}

static OPTIONS: AtomicPtr<*const c_char> = AtomicPtr::new(null_mut());
/// The recorder's variables without those of a wish.
static BASE: AtomicUsize = AtomicUsize::new(0);

/// Only what steers this library and its recorder, and not whether it runs.
fn is_ours(text: &[u8]) -> bool {
    let after = text.strip_prefix(variables::SWITCH.to_bytes());
    after.is_some_and(|rest| rest.starts_with(b"_")) && text.contains(&b'=')
}

/// How many a list has before its null.
fn count(list: usize) -> usize {
    let mut n = 0;
    // SAFETY: lists end with null.
    while list != 0 && !unsafe { *(list as *const *const c_char).wrapping_add(n) }.is_null() {
        n += 1;
    }
    n
}

/// A variable's value: as a wish says, or in the copy.
pub(crate) fn value(name: &CStr) -> Option<&'static CStr> {
    value_in(OPTIONS.load(Ordering::Acquire).cast_const(), name)
        .or_else(|| value_in(COPY.load(Ordering::Acquire).cast_const(), name))
}

fn value_in(list: *const *const c_char, name: &CStr) -> Option<&'static CStr> {
    let mut at = list;
    while !at.is_null() {
        // SAFETY: the list ends with null, and is never unmapped.
        let variable = unsafe { *at };
        if variable.is_null() {
            break;
        }
        // SAFETY: the copy's strings end with a zero, and are never unmapped.
        let variable = unsafe { CStr::from_ptr(variable) };
        if let Some(rest) = variable.to_bytes().strip_prefix(name.to_bytes())
            && rest.starts_with(b"=")
        {
            return CStr::from_bytes_with_nul(variable.to_bytes_with_nul().get(name.count_bytes() + 1..)?)
                .ok();
        }
        at = at.wrapping_add(1);
    }
    None
}

/// The variables for the recorder, as `execve` wants them.
pub(crate) fn for_recorder() -> *const *const c_char {
    static NONE: AtomicPtr<c_char> = AtomicPtr::new(null_mut());
    match FOR_RECORDER.load(Ordering::Relaxed) {
        0 => (&raw const NONE).cast(),
        list => list as *const *const c_char,
    }
}

/// The program got rights that its user does not have (`AT_SECURE`): the user must not steer anything in it. What cannot be
/// found out is taken for that.
pub(crate) fn is_secure() -> bool {
    if IS_SECURE.load(Ordering::Relaxed) == UNKNOWN {
        ask_for_rights();
    }
    IS_SECURE.load(Ordering::Relaxed) != NO
}

static IS_SECURE: AtomicU32 = AtomicU32::new(UNKNOWN);
const UNKNOWN: u32 = 0;
const NO: u32 = 1;
const YES: u32 = 2;

/// Reads the vector from `/proc`, which has it as the kernel wrote it.
fn ask_for_rights() {
    let mut pairs = [0_u8; 128 * 2 * WORD];
    let n = sys::read_file(c"/proc/self/auxv", &mut pairs);
    for pair in pairs.get(..n).unwrap_or_default().chunks_exact(2 * WORD) {
        let (kind, value) = pair.split_at(WORD);
        if kind == libc::AT_SECURE.to_ne_bytes() {
            IS_SECURE.store(if value == [0; WORD] { NO } else { YES }, Ordering::Relaxed);
        }
    }
}

/// Reads what the kernel told the program (getauxval(3)). It stands behind the environment that the program was started
/// with, which stands behind the arguments: `argv` is what the loader gives to constructors.
///
/// # Safety
/// `argc` and `argv` are what a constructor was called with.
pub(crate) unsafe fn read_auxiliary(argc: c_int, argv: *const *const c_char) {
    // The C library passes them (glibc, elf/dl-init.c). Another may not: then nothing that follows is what it should be.
    let Ok(n) = usize::try_from(argc) else { return };
    if argv.is_null() || !argv.is_aligned() {
        return;
    }
    // SAFETY: the caller's promise: an array of `argc` arguments and null.
    if !unsafe { *argv.wrapping_add(n) }.is_null() {
        return;
    }
    let mut at = argv.wrapping_add(n + 1);
    // SAFETY: the kernel puts the environment there, an array that ends with null.
    while !unsafe { *at }.is_null() {
        at = at.wrapping_add(1);
    }
    // Who takes a variable out moves the others down, and so leaves one null more: the loader does so with `LD_LIBRARY_PATH`
    // and others where the program has rights of its own (glibc, elf/dl-environ.c). The vector does not begin with null.
    // SAFETY: the vector follows.
    while unsafe { *at }.is_null() {
        at = at.wrapping_add(1);
    }
    let mut pair = at.cast::<[usize; 2]>();
    // The vector has about 25 entries.
    for _ in 0..128 {
        // SAFETY: the kernel puts the vector behind the environment, and `AT_NULL` at its end.
        let [kind, value] = unsafe { *pair };
        match kind as u64 {
            libc::AT_NULL => return,
            libc::AT_SECURE => IS_SECURE.store(if value == 0 { NO } else { YES }, Ordering::Relaxed),
            libc::AT_SYSINFO_EHDR => VDSO.store(value, Ordering::Relaxed),
            libc::AT_PAGESZ => arch::note_page_bytes(value),
            libc::AT_HWCAP => arch::note_capabilities(value),
            _ => {}
        }
        pair = pair.wrapping_add(1);
    }
}

static VDSO: AtomicUsize = AtomicUsize::new(0);

/// Has clocks read by the vDSO's function, if there is one.
pub(crate) fn find_clock() {
    let base = VDSO.load(Ordering::Relaxed);
    if base == 0 {
        return;
    }
    arch::learn_signal_return(|name| find_in_vdso(base, name));
    if let Some(address) = find_in_vdso(base, arch::READ_CLOCK) {
        // SAFETY: the vDSO's function of this name has this prototype (vdso(7)).
        clock::read_clocks_with(unsafe { core::mem::transmute::<usize, ReadClock>(address) });
    }
}

/// The address of a function of the vDSO, an ELF file that the kernel maps whole and never takes away.
fn find_in_vdso(base: usize, name: &CStr) -> Option<usize> {
    // elf(5): where the fields of the structures lie, and the numbers of their kinds.
    const PT_LOAD: u32 = 1;
    const PT_DYNAMIC: u32 = 2;
    const DT_HASH: usize = 4;
    const DT_STRTAB: usize = 5;
    const DT_SYMTAB: usize = 6;
    // SAFETY: each read below is inside the image, which the kernel made well formed.
    let word = |at: usize| unsafe { ((base + at) as *const usize).read() };
    // SAFETY: as above.
    let half = |at: usize| unsafe { ((base + at) as *const u32).read() };
    // SAFETY: as above.
    let short = |at: usize| unsafe { ((base + at) as *const u16).read() };
    let (headers, size, n) = (word(32), usize::from(short(54)), usize::from(short(56)));
    let (mut dynamic, mut load) = (None, None);
    for header in (0..n).map(|index| headers + index * size) {
        match half(header) {
            PT_DYNAMIC => dynamic = Some(word(header + 16)),
            PT_LOAD => load = load.or(Some(word(header + 16))),
            _ => {}
        }
    }
    let (mut at, load) = (dynamic? - load?, load?);
    let (mut hash, mut strings, mut symbols) = (None, None, None);
    loop {
        let value = word(at + WORD).wrapping_sub(load);
        match word(at) {
            0 => break,
            DT_HASH => hash = Some(value),
            DT_STRTAB => strings = Some(value),
            DT_SYMTAB => symbols = Some(value),
            _ => {}
        }
        at += 2 * WORD;
    }
    let (strings, symbols) = (strings?, symbols?);
    // Newer kernels build it without the old hash table; then the symbols end where their names begin.
    let n = hash.map_or((strings - symbols) / 24, |hash| half(hash + 4) as usize);
    (0..n).map(|index| symbols + index * 24).find_map(|symbol| {
        let text = base + strings + half(symbol) as usize;
        // SAFETY: a string of the image's own table.
        let found = unsafe { CStr::from_ptr(text as *const c_char) } == name && short(symbol + 6) != 0;
        found.then(|| base + word(symbol + 8) - load)
    })
}
