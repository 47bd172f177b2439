//! Reading memory of this process: bounded regions, a cursor over tables, and where the thread's stack ends.
//!
//! The constructors are unsafe and carry the promise; after that every read is checked against the region.

use core::mem::size_of;

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
    /// The word at `index`; 0 beyond the end.
    #[inline(always)]
    #[must_use]
    pub(crate) fn word_at(&self, index: usize) -> u64 {
        if index >= self.words {
            return 0;
        }
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

/// Stacks that a thread was seen on: its own, a signal stack, a few coroutine stacks.
#[repr(C)]
pub(crate) struct Stacks {
    known: [(u64, u64); 4],
    next: u32,
    /// `/proc/self/maps` could not be opened: no use trying at every event.
    is_blind: u32,
}

impl Stacks {
    /// The stack from `sp` to its end; empty when it cannot be found out.
    #[inline]
    pub(crate) fn above(&mut self, sp: u64) -> Region {
        for (start, end) in self.known {
            if start <= sp && sp < end {
                // SAFETY: the mapping around the stack pointer of a running thread, or around the one that a signal
                // interrupted: both stay mapped while their frames exist.
                return unsafe { Region::new(sp, end) };
            }
        }
        self.look_up(sp)
    }

    fn remember(&mut self, start: u64, end: u64) {
        // A stack that grew downwards keeps its place.
        let grown = self.known.iter_mut().find(|(_, known_end)| *known_end == end);
        if let Some(range) = grown {
            range.0 = start;
            return;
        }
        if let Some(range) = self.known.get_mut(self.next as usize & 3) {
            *range = (start, end);
        }
        self.next = self.next.wrapping_add(1);
    }

    #[cold]
    #[inline(never)]
    fn look_up(&mut self, sp: u64) -> Region {
        if self.is_blind != 0 {
            return Region::EMPTY;
        }
        match mapping_around(sp) {
            Ok(Some((start, end))) => {
                self.remember(start, end);
                // SAFETY: the kernel has just said so; see `above`.
                unsafe { Region::new(sp, end) }
            }
            Ok(None) => Region::EMPTY,
            Err(NoMaps) => {
                self.is_blind = 1;
                Region::EMPTY
            }
        }
    }
}

/// `/proc/self/maps` is not to be had.
struct NoMaps;

/// The readable mapping that contains `addr`. About 0.1 ms in a process with a thousand mappings; neither locks nor
/// allocates, which is why it is not `pthread_getattr_np`.
fn mapping_around(addr: u64) -> Result<Option<(u64, u64)>, NoMaps> {
    // SAFETY: a constant path; the descriptor is ours.
    let file = unsafe {
        libc::syscall(
            libc::SYS_openat,
            libc::AT_FDCWD,
            c"/proc/self/maps".as_ptr(),
            libc::O_RDONLY | libc::O_CLOEXEC,
        )
    };
    if file < 0 {
        return Err(NoMaps);
    }
    let mut buffer = [0u8; 4096];
    let mut line = MapsLine::default();
    let mut found = None;
    'file: loop {
        // SAFETY: the kernel writes at most the buffer's length into the buffer.
        let n = unsafe { libc::syscall(libc::SYS_read, file, buffer.as_mut_ptr(), buffer.len()) };
        if n <= 0 {
            break;
        }
        for &byte in buffer.iter().take(n as usize) {
            if line.push(byte) && line.start <= addr && addr < line.end {
                found = line.is_readable.then_some((line.start, line.end));
                break 'file;
            }
        }
    }
    // SAFETY: `file` is the descriptor opened above.
    unsafe { libc::syscall(libc::SYS_close, file) };
    Ok(found)
}

/// A line of `/proc/self/maps`, read byte by byte: `start-end rwxp ...`.
#[derive(Default)]
struct MapsLine {
    field: u8,
    start: u64,
    end: u64,
    is_readable: bool,
}

impl MapsLine {
    /// Takes the next byte; true once the line has said all that matters.
    fn push(&mut self, byte: u8) -> bool {
        let digit = (byte as char).to_digit(16).map(u64::from);
        match (self.field, byte, digit) {
            (_, b'\n', _) => *self = MapsLine::default(),
            (0, b'-', _) | (1, b' ', _) => self.field += 1,
            (0, _, Some(digit)) => self.start = self.start << 4 | digit,
            (1, _, Some(digit)) => self.end = self.end << 4 | digit,
            (2, _, _) => {
                self.is_readable = byte == b'r';
                self.field = 3;
                return true;
            }
            (_, _, _) => {}
        }
        false
    }
}
