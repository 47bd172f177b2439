//! Reading memory of this process: bounded regions, a cursor over tables, and where the thread's stack ends.
//!
//! The constructors are unsafe and carry the promise; after that every read is checked against the region.

use crate::{arch, asked, kernel, own};
use core::mem::size_of;
use core::sync::atomic::{AtomicU64, Ordering};

/// Bytes that stay readable while the region is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Region {
    start: u64,
    end: u64,
}

impl Region {
    /// Nothing.
    pub(crate) const EMPTY: Region = Region { start: 0, end: 0 };

    /// Declares `start..end` readable.
    ///
    /// # Safety
    /// Every byte of `start..end` is mapped readable as long as the region or a copy of it is read from. Other threads
    /// may write there: words are read one by one and any value is accepted.
    #[must_use]
    pub(crate) const unsafe fn new(start: u64, end: u64) -> Region {
        Region { start, end: if end < start { start } else { end } }
    }

    /// First byte.
    #[must_use]
    pub(crate) const fn start(&self) -> u64 {
        self.start
    }

    /// Byte after the last.
    #[must_use]
    pub(crate) const fn end(&self) -> u64 {
        self.end
    }

    /// Whether the byte at `addr` belongs to the region.
    #[inline(always)]
    #[must_use]
    pub(crate) const fn contains(&self, addr: u64) -> bool {
        self.start <= addr && addr < self.end
    }

    /// The word at `addr`, aligned or not, when it lies inside.
    #[inline(always)]
    #[must_use]
    pub(crate) fn word(&self, addr: u64) -> Option<u64> {
        if addr.wrapping_sub(self.start) >= (self.end - self.start).saturating_sub(7) {
            return None;
        }
        // SAFETY: eight bytes inside a region that is readable by the promise of `new`.
        Some(unsafe { (addr as *const u64).read_unaligned() })
    }

    /// The `bytes` from `addr` on, when they lie inside.
    #[inline(always)]
    #[must_use]
    pub(crate) fn part(&self, addr: u64, bytes: u64) -> Option<Part> {
        let is_inside =
            addr >= self.start && addr <= self.end && self.end - addr >= bytes && addr.is_multiple_of(8);
        is_inside.then_some(Part { start: addr, words: (bytes / 8) as usize })
    }

    /// Reads from `addr` to the end of the region.
    #[must_use]
    pub(crate) const fn cursor(&self, addr: u64) -> Cursor {
        Cursor { region: *self, at: addr }
    }

    fn unaligned<T: Copy>(&self, addr: u64) -> Option<T> {
        let room = self.end.checked_sub(addr)?;
        if addr < self.start || room < size_of::<T>() as u64 {
            return None;
        }
        // SAFETY: the bytes lie inside a region that is readable by the promise of `new`; `T` is an integer.
        Some(unsafe { (addr as *const T).read_unaligned() })
    }
}

/// Words of a region, counted from an aligned address.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    start: u64,
    words: usize,
}

impl Part {
    /// The word at `index`.
    ///
    /// # Safety
    /// It is inside: `index` is below the bytes that were asked for, divided by 8.
    #[inline(always)]
    #[must_use]
    pub(crate) unsafe fn word_unchecked(&self, index: usize) -> u64 {
        debug_assert!(index < self.words, "a word beyond the part");
        // SAFETY: inside a region that is readable by the promise of [`Region::new`].
        unsafe { (self.start as *const u64).wrapping_add(index).read() }
    }
}

/// A position in a table of the DWARF family. `None` means that the table ends too early.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor {
    region: Region,
    /// Address of the next byte.
    pub(crate) at: u64,
}

impl Cursor {
    fn take<T: Copy>(&mut self) -> Option<T> {
        let value = self.region.unaligned(self.at)?;
        self.at = self.at.checked_add(size_of::<T>() as u64)?;
        Some(value)
    }

    /// Next byte.
    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.take()
    }

    /// Next two bytes.
    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.take()
    }

    /// Next four bytes.
    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.take()
    }

    /// Next eight bytes.
    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.take()
    }

    /// Next ULEB128 number, cut to 64 bits.
    pub(crate) fn uleb(&mut self) -> Option<u64> {
        let (mut value, mut shift) = (0u64, 0u32);
        loop {
            let byte = self.u8()?;
            value |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
            shift = shift.saturating_add(7);
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
    }

    /// Next SLEB128 number, cut to 64 bits.
    pub(crate) fn sleb(&mut self) -> Option<i64> {
        let (mut value, mut shift) = (0i64, 0u32);
        loop {
            let byte = self.u8()?;
            value |= i64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
            shift = shift.saturating_add(7);
            if byte & 0x80 == 0 {
                let negative = byte & 0x40 != 0 && shift < 64;
                return Some(if negative { value | (-1i64 << shift) } else { value });
            }
        }
    }

    /// Moves on by `bytes`.
    pub(crate) fn skip(&mut self, bytes: u64) -> Option<()> {
        self.at = self.at.checked_add(bytes)?;
        (self.at <= self.region.end).then_some(())
    }

    /// The same position with an earlier end.
    #[must_use]
    pub(crate) fn until(self, end: u64) -> Cursor {
        let end = end.min(self.region.end);
        Cursor { region: Region { end, ..self.region }, at: self.at }
    }

    /// Whether everything has been read.
    #[must_use]
    pub(crate) fn is_at_end(&self) -> bool {
        self.at >= self.region.end
    }
}

/// Bytes above the stack pointer that a walk of a foreign stack looks at: no frame of a coroutine is further out.
const FOREIGN_REACH: u64 = 16 << 20;
/// Words of [`Stacks::copied`].
const COPIED_WORDS: usize = 2048;
const PAGE: u64 = 4096;

/// The stack that a capture walks: what is read of it is mapped *now*, or read in a way that cannot fault.
///
/// Three cases, told apart by the stack pointer, without a look into `/proc`:
/// - The thread's own stack, of which the C library knows first and last byte, and the one that the kernel made for the
///   process: mapped as long as the thread runs, so all above the stack pointer is read plainly.
/// - Any other one (coroutines, signal stacks, threads that the C library did not make): the page of the stack pointer
///   is read plainly, because we run on it. All further pages are read only while the walk goes by tables: then each frame is the
///   thread's. The recorder names the mapping ([`own::end_of_mapping`]), in which they are read plainly. Where it cannot, the kernel copies
///   them, which answers with an error where nothing is mapped. The walk ends where it would have to guess: another thread may take what it wants away.
/// - No stack: nothing is read.
#[derive(Clone, Copy)]
pub(crate) struct Stack {
    plain: Region,
    /// Byte after the last that may be read by copying; the end of `plain` where nothing is.
    reach: u64,
    /// A frame was found by guessing.
    is_guessed: bool,
}

impl Stack {
    /// Whether there is none.
    #[inline(always)]
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.plain == Region::EMPTY
    }

    /// Whether it is mapped for good.
    #[inline(always)]
    #[must_use]
    pub(crate) fn is_own(&self) -> bool {
        self.reach == self.plain.end
    }

    /// Byte after the last of the thread's own stack; 0 for other ones.
    #[inline(always)]
    #[must_use]
    pub(crate) fn own_end(&self) -> u64 {
        if self.is_own() { self.plain.end } else { 0 }
    }

    /// From here on the walk may err.
    pub(crate) fn distrust(&mut self) {
        self.is_guessed = true;
    }

    /// Whether the walk follows tables so far.
    #[must_use]
    pub(crate) fn follows_tables(&self) -> bool {
        !self.is_guessed
    }

    /// Whether the walk follows tables, on memory that is certain: then each frame is one of the thread's, and what it has
    /// code in cannot be unloaded.
    #[must_use]
    pub(crate) fn is_certain(&self) -> bool {
        self.is_own() && !self.is_guessed
    }

    /// The stack at `sp`, on which a signal interrupted what ran there.
    pub(crate) fn interrupted(&self, sp: u64, stacks: &mut Stacks) -> Stack {
        let mut stack = stacks.above(sp);
        stack.is_guessed |= self.is_guessed;
        // Where the walk has guessed, `sp` may be anything.
        if stack.is_guessed && !stack.is_own() {
            stack = Stack { plain: Region::EMPTY, reach: 0, is_guessed: true };
        }
        stack
    }

    /// Whether an address may belong to it.
    #[must_use]
    pub(crate) fn contains(&self, addr: u64) -> bool {
        self.plain.start <= addr && addr < self.reach
    }

    /// The word at `addr`, if it is the stack's.
    #[inline(always)]
    #[must_use]
    pub(crate) fn word(&self, addr: u64, stacks: &mut Stacks) -> Option<u64> {
        match self.plain.word(addr) {
            Some(word) => Some(word),
            None if self.is_own() => None,
            None => self.copied_word(addr, stacks),
        }
    }

    #[cold]
    #[inline(never)]
    fn copied_word(&self, addr: u64, stacks: &mut Stacks) -> Option<u64> {
        let end = addr.checked_add(8)?;
        if addr < self.plain.start || end > self.reach {
            return None;
        }
        // A function may have gone over to another stack for those that it calls.
        if let Some(word) = stacks.own.word(addr) {
            return Some(word);
        }
        stacks.copied_region(self, addr, end)?.word(addr)
    }

    /// The `bytes` from `addr` on, when they are the stack's; valid until the next is asked for.
    #[inline(always)]
    #[must_use]
    pub(crate) fn part(&self, addr: u64, bytes: u64, stacks: &mut Stacks) -> Option<Part> {
        match self.plain.part(addr, bytes) {
            Some(part) => Some(part),
            None if self.is_own() => None,
            None => self.copied_part(addr, bytes, stacks),
        }
    }

    #[cold]
    #[inline(never)]
    fn copied_part(&self, addr: u64, bytes: u64, stacks: &mut Stacks) -> Option<Part> {
        let end = addr.checked_add(bytes)?;
        if addr < self.plain.start || end > self.reach || !addr.is_multiple_of(8) {
            return None;
        }
        let copied = stacks.copied_region(self, addr, end)?;
        let at = copied.shifted(addr)?;
        Some(Part { start: at, words: (bytes / 8) as usize })
    }
}

/// A copy of memory that lay elsewhere.
struct Copied {
    region: Region,
    /// Where `region` lay, less where it lies.
    distance: u64,
}

impl Copied {
    fn shifted(&self, addr: u64) -> Option<u64> {
        let at = addr.wrapping_sub(self.distance);
        (self.region.start <= at && at < self.region.end).then_some(at)
    }

    fn word(&self, addr: u64) -> Option<u64> {
        self.region.word(addr.wrapping_sub(self.distance))
    }
}

/// What a thread knows of its stacks. All zeros is the state before the first capture.
#[repr(C)]
pub(crate) struct Stacks {
    /// First byte of the thread's own stack, and the one after the last.
    own: Region,
    is_known: u32,
    /// The kernel does not copy here, so pages are asked for one by one.
    cannot_copy: u32,
    /// What `copied` is a copy of, in this capture.
    copied_from: u64,
    copied_until: u64,
    copied: [u64; COPIED_WORDS],
}

/// The stack that the kernel made for the process: an address near its end, above all frames. 0 unknown.
static INITIAL_STACK_END: AtomicU64 = AtomicU64::new(0);
/// The kernel keeps this much below the end of that stack free of everything else, whatever its limit (`mmap_base`,
/// arch/x86/mm/mmap.c, and mm/util.c for other processors: 128 MB).
const INITIAL_STACK: u64 = 120 << 20;

/// Called by the loader, with the arguments of the process (glibc passes them to libraries, too): they lie on that stack,
/// above all frames.
extern "C" fn note_arguments(_n: i32, arguments: *const *const u8) {
    let here = 0_u8;
    let (here, arguments) = (&raw const here as u64, arguments as u64);
    // A library that is loaded late may be loaded on any stack.
    if here < arguments && arguments - here < INITIAL_STACK {
        INITIAL_STACK_END.store(arguments, Ordering::Relaxed);
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static NOTE_ARGUMENTS: extern "C" fn(i32, *const *const u8) = note_arguments;

impl Stacks {
    /// Nothing is known.
    pub(super) fn forget(&mut self) {
        (self.own, self.is_known, self.cannot_copy, self.copied_until) = (Region::EMPTY, 0, 0, 0);
    }

    /// The stack from `sp` to its end; empty when it cannot be found out. To be called once a capture, and where the walk
    /// goes on on another stack.
    #[inline]
    pub(crate) fn above(&mut self, sp: u64) -> Stack {
        self.copied_until = 0;
        let own = self.own;
        if own.start <= sp && sp < own.end {
            return Stack::own(sp, own.end);
        }
        self.other(sp)
    }

    #[inline(never)]
    fn other(&mut self, sp: u64) -> Stack {
        if self.is_known == 0 {
            self.is_known = 1;
            self.own = own_stack();
            if self.own.contains(sp) {
                return Stack::own(sp, self.own.end);
            }
        }
        let end = INITIAL_STACK_END.load(Ordering::Relaxed);
        if sp < end && end - sp < INITIAL_STACK {
            return Stack::own(sp, end);
        }
        if sp < PAGE {
            return Stack { plain: Region::EMPTY, reach: 0, is_guessed: false };
        }
        let end = (sp | (PAGE - 1)).wrapping_add(1);
        // SAFETY: the page of a stack pointer at which a function of the thread runs, or was interrupted.
        let plain = unsafe { Region::new(sp, end) };
        Stack { plain, reach: sp.saturating_add(FOREIGN_REACH).max(end), is_guessed: false }
    }

    /// A copy that has all of `start..end`, a part of a foreign stack.
    fn copied_region(&mut self, stack: &Stack, start: u64, end: u64) -> Option<Copied> {
        if start < self.copied_from || end > self.copied_until {
            self.copied_until = 0;
            let room = (COPIED_WORDS * 8) as u64;
            let from = start & !7;
            // Frames follow each other: the rest of the page is mostly wanted next, and costs nothing more.
            let wanted = (end.saturating_sub(1) | (PAGE - 1)).saturating_add(1).min(from + room);
            let bytes = self.copy(stack, from, wanted.checked_sub(from)?)?;
            (self.copied_from, self.copied_until) = (from, from + bytes);
            if end > self.copied_until {
                return None;
            }
        }
        let at = self.copied.as_ptr() as u64;
        let bytes = self.copied_until - self.copied_from;
        // SAFETY: so many bytes of the copy were written, and it is the thread's own.
        let region = unsafe { Region::new(at, at + bytes) };
        Some(Copied { region, distance: self.copied_from.wrapping_sub(at) })
    }

    fn copy(&mut self, stack: &Stack, from: u64, bytes: u64) -> Option<u64> {
        // The frames that a walk finds by tables are the thread's own, whose memory nobody takes away while it runs. Where the walk goes by
        // guesses it ends here: what it wants may be gone when it is read, and asking the kernel each time takes too long.
        if stack.is_guessed {
            return None;
        }
        let sp = stack.plain.start;
        if let Some(end) = own::end_of_mapping(sp).or_else(|| own::find_end_of_mapping(sp)) {
            let n = bytes.min(end.checked_sub(from)?) & !7;
            let words = (n / 8) as usize;
            for (slot, index) in self.copied.iter_mut().zip(0..words) {
                // SAFETY: a word of the mapping in which the thread's stack is; see above.
                *slot = unsafe { (from as *const u64).wrapping_add(index).read_volatile() };
            }
            return (n > 0).then_some(n);
        }
        // The recorder may not see where memory is, but still what a thread may do.
        if !own::may_ask() {
            return None;
        }
        if self.cannot_copy == 0 && kernel::may_use_rare_calls() {
            // SAFETY: the copy has room for whatever `copied_region` wants.
            match unsafe { kernel::copy(from as usize, self.copied.as_mut_ptr().cast(), bytes as usize) } {
                Ok(bytes) => return Some(bytes as u64 & !7),
                Err(libc::EFAULT) => return None,
                Err(_) => self.cannot_copy = 1,
            }
        }
        let mut n = 0;
        for slot in &mut self.copied {
            let at = from + n;
            let is_new_page = n == 0 || at.is_multiple_of(PAGE);
            if n >= bytes || (is_new_page && !asked::can_read(at as usize)) {
                break;
            }
            // SAFETY: the page could be read just now; see above.
            *slot = unsafe { (at as *const u64).read_volatile() };
            n += 8;
        }
        (n > 0).then_some(n)
    }
}

impl Stack {
    #[inline(always)]
    fn own(sp: u64, end: u64) -> Stack {
        // SAFETY: the thread's own stack, or the process's first one: mapped above the stack pointer of whoever runs there,
        // for as long as the thread lives.
        let plain = unsafe { Region::new(sp, end) };
        Stack { plain, reach: end, is_guessed: false }
    }
}

/// Where in a thread's descriptor the size of its stack stands; 0 not found yet.
static SIZE_AT: AtomicU64 = AtomicU64::new(0);

/// Finds the place in the descriptor of the calling thread, by probes. The first thread's has `__libc_stack_end` there (csu/libc-tls.c,
/// nptl/nptl-stack.c: `stackblock_size`, glibc 2.3 to 2.42), and no other word has; any other's is found by [`own_stack`].
pub(super) fn learn() {
    let is_end_known = INITIAL_STACK_END.load(Ordering::Relaxed) != 0;
    if is_end_known && (SIZE_AT.load(Ordering::Relaxed) != 0 || own_stack() != Region::EMPTY) {
        return;
    }
    let name = c"__libc_stack_end";
    // SAFETY: the loader's own variable of this name is a pointer.
    let at = unsafe { crate::elf::lookup(name.as_ptr()) } as *const u64;
    if at.is_null() {
        return;
    }
    // SAFETY: as above.
    let end = unsafe { at.read() };
    // A library that came late was not told the arguments, which lie above this.
    let _ = INITIAL_STACK_END.compare_exchange(0, end, Ordering::Relaxed, Ordering::Relaxed);
    if SIZE_AT.load(Ordering::Relaxed) != 0 || own_stack() != Region::EMPTY {
        return;
    }
    let descriptor = arch::this_thread();
    let mut places = (16..DESCRIPTOR).step_by(8).take_while(|offset| {
        let at = descriptor + offset;
        at & !(PAGE - 1) == descriptor & !(PAGE - 1) || asked::can_read(at as usize)
    });
    // SAFETY: the thread's own descriptor, or memory behind it that could be read.
    let has_it = |offset: &u64| unsafe { ((descriptor + offset) as *const u64).read_volatile() } == end;
    if end != 0
        && let Some(offset) = places.find(has_it)
    {
        SIZE_AT.store(offset, Ordering::Relaxed);
    }
}

/// Bytes of the descriptor in which the words are looked for, and the most that lies between it and the stack's end.
const DESCRIPTOR: u64 = 4096;
const MOST_BEHIND: u64 = 64 << 10;

/// The calling thread's stack, which the C library noted in the thread's descriptor: its first byte, its size and that of
/// its guard follow each other there (`stackblock`, `stackblock_size`, `guardsize` in nptl/descr.h, glibc 2.3 to 2.42),
/// and the descriptor itself lies at the end of the stack. Where they stand differs from version to version, but no other
/// two words can be a start below the descriptor, and the size that ends right behind it. Empty for the first thread,
/// whose descriptor is elsewhere, and with other C libraries. Once the place is known, a thread of the C library asks nothing.
#[cold]
fn own_stack() -> Region {
    let descriptor = arch::this_thread();
    if !descriptor.is_multiple_of(8) {
        return Region::EMPTY;
    }
    let known = SIZE_AT.load(Ordering::Relaxed);
    if known != 0 {
        // SAFETY: inside of the descriptor: another thread's, or this one's at another time, has its size there.
        let [start, size, guard] = [known - 8, known, known + 8]
            .map(|offset| unsafe { ((descriptor + offset) as *const u64).read_volatile() });
        if let Some(stack) = stack_of(descriptor, known, start, size, guard) {
            return stack;
        }
    }
    let mut page = descriptor & !(PAGE - 1);
    let mut word = |at: u64| {
        // The descriptor may end where nothing more is mapped.
        if at & !(PAGE - 1) != page {
            page = Some(at & !(PAGE - 1)).filter(|_| asked::can_read(at as usize))?;
        }
        // SAFETY: the thread's own descriptor, or memory behind it that could be read and that the C library keeps.
        Some(unsafe { (at as *const u64).read_volatile() })
    };
    let mut before: Option<u64> = None;
    for offset in (16..DESCRIPTOR).step_by(8) {
        let Some(size) = word(descriptor + offset) else { break };
        if let Some(start) = before.replace(size)
            && let Some(guard) = word(descriptor + offset + 8)
            && let Some(stack) = stack_of(descriptor, offset, start, size, guard)
        {
            SIZE_AT.store(offset, Ordering::Relaxed);
            return stack;
        }
    }
    Region::EMPTY
}

/// The stack that three words of a descriptor describe, the second of which stands at `offset`, if they do.
fn stack_of(descriptor: u64, offset: u64, start: u64, size: u64, guard: u64) -> Option<Region> {
    let end = start.checked_add(size)?;
    let is_it = start >= PAGE
        && start < descriptor
        && end > descriptor + offset
        && end - descriptor <= MOST_BEHIND
        && guard < descriptor - start;
    // SAFETY: the C library's own record of the thread's stack, less its guard; it ends below the descriptor.
    is_it.then(|| unsafe { Region::new(start + guard, descriptor) })
}

/// Whether what lies at `address` is on the stack that the calling thread runs on at `sp`, above it: it can be read. No, where that is
/// not certain.
pub(crate) fn is_above_on_own_stack(sp: usize, address: usize) -> bool {
    let (sp, address) = (sp as u64, address as u64);
    let end = INITIAL_STACK_END.load(Ordering::Relaxed);
    if sp < end && end - sp < INITIAL_STACK {
        return (sp..end - 8).contains(&address);
    }
    let own = own_stack();
    let end = if own.contains(sp) { Some(own.end) } else { own::end_of_mapping(sp) };
    end.is_some_and(|end| (sp..end - 8).contains(&address))
}
