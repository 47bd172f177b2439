//! The shared file: where everything lies, and the header both sides read.
//!
//! A reader trusts nothing but the length of its own mapping: sizes are checked once in [`Map::open`], and every
//! number that is read later is clamped.

use crate::clock::{Calibration, Clock};
use crate::notices::Notices;
use crate::record::ABI;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use core::mem::size_of;

/// First word of the file. Written last, so a half-made ring is not taken for one.
pub const MAGIC: u64 = u64::from_le_bytes(*b"GPUTRING");
/// Bytes of a chunk, its header included.
#[cfg(not(loom))]
pub const CHUNK_BYTES: usize = 16 << 10;
/// Room for two records: a model must fill a chunk in a few steps.
#[cfg(loom)]
pub const CHUNK_BYTES: usize = size_of::<ChunkHeader>() + 48;
/// Threads that can write at the same time.
#[cfg(not(loom))]
pub const MAX_THREADS: usize = 1024;
/// As few as a hand-over needs.
#[cfg(loom)]
pub const MAX_THREADS: usize = 3;
/// Bytes before the thread lines.
const HEADER_BYTES: usize = size_of::<Header>().next_multiple_of(4096);
/// Bytes before the words about who holds each line, and before those of the chunks' states.
const TENURES_AT: usize = HEADER_BYTES + MAX_THREADS * size_of::<ThreadLine>();
const STATES_AT: usize = TENURES_AT + MAX_THREADS * size_of::<Tenure>();

/// The process is running.
pub const RUNNING: u32 = 0;
/// The process is at its end and waits for the trace to be complete.
pub const EXITING: u32 = 1;
/// The shim stepped aside; nothing more will come.
pub const OFF: u32 = 2;

/// The process holds a read lock of the whole file that belongs to its open file description (`F_OFD_SETLK`), and so to its
/// mapping: once nobody has that lock, nobody maps the ring. Without this word, no lock says nothing.
pub const LOCKED: u32 = 1;

/// The recorder has not answered an exiting process yet.
pub const UNDECIDED: u32 = 0;
/// The exiting thread is the program's last, and may make the calls that it could make when the session began.
pub const ALONE: u32 = 1;
/// It may make those calls, but other threads of the program run.
pub const ACCOMPANIED: u32 = 2;
/// It may be under a sandbox that came later, or nothing is known about it: it must not wait by any call.
pub const LEAVE: u32 = 3;
/// It is no thread of the recorded process, which continues.
pub const STRANGER: u32 = 4;

/// `FUTEX_OWNER_DIED` (linux/futex.h).
pub const DIED: u32 = 0x4000_0000;

/// No thread was seen under a sandbox that came after the session began.
pub const AS_BEFORE: u32 = 0;
/// One was.
pub const SANDBOXED: u32 = 1;

/// No recorder has opened the ring.
pub const NO_RECORDER: u32 = 0;
/// A recorder drains the ring.
pub const RECORDING: u32 = 1;
/// The trace is complete as far as the process wrote before [`EXITING`].
pub const COMPLETE: u32 = 2;
/// The recorder gave up; its reason is in its own output.
pub const FAILED: u32 = 3;

/// What stands before the thread lines.
#[cfg_attr(loom, derive(Default))]
#[repr(C)]
pub struct Header {
    /// [`MAGIC`], once everything else is in place.
    pub magic: AtomicU64,
    /// [`ABI`].
    pub abi: AtomicU32,
    /// Chunks after the tables.
    pub n_chunks: AtomicU32,
    /// The process that writes.
    pub pid: AtomicU32,
    /// [`Clock`].
    pub clock: AtomicU32,
    /// Field 22 of `/proc/PID/stat`: tells a reused pid from the process itself; 0 unknown.
    pub start_time: AtomicU64,
    /// Inode of the writer's PID namespace (`/proc/self/ns/pid`): in another one its pid is somebody else's; 0 unknown.
    pub pid_namespace: AtomicU64,
    /// Clocks when the ring was made: ticks, monotonic, realtime.
    pub calibration: [AtomicU64; 3],
    /// What frames and tables the shim was requested ([`crate::record::Kind::Note`] has the words).
    pub stack_mode: AtomicU32,
    /// [`LOCKED`], or 0.
    pub lock: AtomicU32,
    /// [`RUNNING`], [`EXITING`] or [`OFF`]; written by the process.
    pub process: Line,
    /// [`NO_RECORDER`], [`RECORDING`], [`COMPLETE`] or [`FAILED`]; written by the recorder.
    pub recorder: Line,
    /// Grows when the process got new memory from the driver: its mappings are worth reading again.
    pub mappings: Line,
    /// Grows when definitions (stacks, code objects) must be sent again, because the recorder lost them.
    pub definitions: Line,
    /// Chunks that are free, so a full ring costs one load.
    pub free_chunks: Line,
    /// Where the search for a free chunk starts; a hint, which a freed chunk before it lowers.
    pub next_chunk: Line,
    /// Events dropped because no chunk was free, and their bytes.
    pub lost_full: LostLine,
    /// Events dropped because more than [`MAX_THREADS`] threads wrote.
    pub lost_threads: LostLine,
    /// Events dropped because a signal handler interrupted another event of its thread.
    pub lost_nested: LostLine,
    /// Events dropped while another thread was starting the session.
    pub lost_starting: LostLine,
    /// Chunks that threads hold; the process's own, for [`crate::ring::Producer::wish`].
    pub held_chunks: Line,
    /// Chunks whose memory the file has, from the first on: threads write to no others. It only grows; anyone who made the ring
    /// writes it, then the recorder ([`crate::ring::Reader::grow`]).
    pub usable_chunks: Line,
    /// How an exiting process learns whether it may wait for its trace.
    pub exit: ExitLine,
    /// What the process may ask the kernel.
    pub sandbox: SandboxLine,
    /// Id of a thread of the recorder, in its robust list: when it is gone, whatever ended it, the kernel adds [`DIED`]. 0 where there is
    /// none, or it ended in order.
    pub recorder_thread: Line,
    /// Messages of the library that standard error did not take.
    pub notices: Notices,
    /// Where stacks are that are not the threads' own.
    pub extents: Extents,
}

/// How a thread learns what the kernel would tell it, without a system call: a sandbox that the program put on itself after the session
/// began may kill the thread that makes one. The recorder is outside the sandbox and looks on request:
///
/// 1. The thread stores a number that nobody has used in [`SandboxLine::question`], with its own id in the upper half.
/// 2. The recorder reads the filters of that thread, and stores the question in [`SandboxLine::allowed`] if there is no new one, else
///    [`SANDBOXED`] in [`SandboxLine::state`].
/// 3. The thread, which has been inside one event all the time and so has put on no filter meanwhile, may make calls until the event
///    is over. Without an answer it makes none.
///
/// A thread on a stack that is not its own asks in the same way where that stack is, and then needs no call: it leaves an address in
/// [`SandboxLine::stack_at`], and finds the mapping in [`Header::extents`].
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(128))]
pub struct SandboxLine {
    /// [`AS_BEFORE`] or, forever, [`SANDBOXED`]; written by the recorder.
    pub state: AtomicU32,
    /// How often the recorder has looked for questions, modulo 2^32; 0 if it never has. Written by the recorder.
    pub looks: AtomicU32,
    /// Who asks: thread id in its own PID namespace in the upper half, a number that tells questions apart in the lower; 0 nobody yet.
    /// Written by the process.
    pub question: AtomicU64,
    /// The question that was answered with yes last; written by the recorder.
    pub allowed: AtomicU64,
    /// The question that was answered with no last, of another process: a forked child. Written by the recorder.
    pub forbidden: AtomicU64,
    /// The question to which the recorder found no answer last: it cannot see the thread. Written by the recorder.
    pub unknown: AtomicU64,
    /// An address of a stack, whose mapping a thread wants to know; 0 none. Written by the process, made 0 by the recorder.
    pub stack_at: AtomicU64,
    /// How many of these the recorder has looked for, modulo 2^32. Written by the recorder, before it makes `stack_at` 0.
    pub stacks_sought: AtomicU32,
}

/// Mappings that the recorder names to the process. Thousands of coroutines have a stack each.
#[cfg(not(loom))]
pub const N_EXTENTS: usize = 8192;
/// As few as a search needs.
#[cfg(loom)]
pub const N_EXTENTS: usize = 3;

/// The process's memory that can be read and written, as the recorder saw it last: ranges in the order of their addresses, which do not
/// touch. Empty unless threads run on stacks that are not their own.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(128))]
pub struct Extents {
    /// Odd while the recorder writes.
    version: AtomicU32,
    /// Ranges that are there.
    n: AtomicU32,
    /// Not 0 once a thread has used a range; the recorder makes it 0.
    is_used: AtomicU32,
    ranges: [Extent; N_EXTENTS],
}

#[cfg_attr(loom, derive(Default))]
#[repr(C)]
struct Extent {
    /// First byte.
    start: AtomicU64,
    /// Byte after the last.
    end: AtomicU64,
}

/// The recorder is writing the ranges, or was ended while it did: nothing is known of any address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Changing;

impl Extents {
    /// First byte of the range that holds `address`, and the one after the last; `None` if there is none.
    ///
    /// # Errors
    /// [`Changing`], which says nothing about the address.
    pub fn find(&self, address: u64) -> Result<Option<(u64, u64)>, Changing> {
        // SYNC: nothing below is of an earlier version.
        let before = self.version.load(Ordering::Acquire);
        let n = (self.n.load(Ordering::Acquire) as usize).min(N_EXTENTS);
        let ranges = self.ranges.get(..n).unwrap_or_default();
        // SYNC: whatever was read of a later version, its odd number is seen below.
        let after = ranges.partition_point(|range| range.start.load(Ordering::Acquire) <= address);
        let range = after.checked_sub(1).and_then(|index| ranges.get(index));
        let range =
            range.map(|range| (range.start.load(Ordering::Acquire), range.end.load(Ordering::Acquire)));
        if !before.is_multiple_of(2) || self.version.load(Ordering::Relaxed) != before {
            return Err(Changing);
        }
        let Some((start, end)) = range.filter(|(start, end)| (*start..*end).contains(&address)) else {
            return Ok(None);
        };
        if self.is_used.load(Ordering::Relaxed) == 0 {
            self.is_used.store(1, Ordering::Relaxed);
        }
        Ok(Some((start, end)))
    }

    /// Whether a thread has used a range since this was asked last.
    #[must_use]
    pub fn take_use(&self) -> bool {
        self.is_used.swap(0, Ordering::Relaxed) != 0
    }

    /// Changes all ranges to these, in the order of their addresses; what there is no room for is left out. For one writer.
    pub fn set(&self, ranges: &[(u64, u64)]) {
        let n = ranges.len().min(N_EXTENTS);
        let is_same = |(range, (start, end)): (&Extent, &(u64, u64))| {
            range.start.load(Ordering::Relaxed) == *start && range.end.load(Ordering::Relaxed) == *end
        };
        let version = self.version.load(Ordering::Relaxed);
        let is_unchanged = version.is_multiple_of(2) && self.n.load(Ordering::Relaxed) as usize == n;
        if is_unchanged && self.ranges.iter().zip(ranges).all(is_same) {
            return;
        }
        // It is odd already where an earlier recorder was ended while it wrote.
        let odd = version | 1;
        self.version.store(odd, Ordering::Relaxed);
        for (range, (start, end)) in self.ranges.iter().zip(ranges) {
            // SYNC: whoever sees one of these sees the odd version too.
            range.start.store(*start, Ordering::Release);
            range.end.store(*end, Ordering::Release);
        }
        self.n.store(n as u32, Ordering::Release);
        self.version.store(odd.wrapping_add(1), Ordering::Release);
    }
}

/// The exit protocol's words, alone in their pair of cache lines.
///
/// A process at its end cannot find out for itself whether other threads run: under a sandbox that was put on after the session
/// began, the question (`/proc/self/task`) may kill it. So it asks the recorder, which is outside the sandbox:
///
/// 1. The process stores the exiting thread's id in `tid`, [`UNDECIDED`] in `verdict`, and [`EXITING`] in [`Header::process`].
/// 2. The recorder looks at the process and stores [`ALONE`], [`ACCOMPANIED`], [`LEAVE`] or [`STRANGER`].
/// 3. The process reads `verdict` in a loop, without a system call, for some milliseconds at most. Only after [`ALONE`] (the
///    first process of a PID namespace: after [`ACCOMPANIED`], too) does it sleep, by a futex on [`Header::recorder`], until that
///    says [`COMPLETE`] or [`FAILED`]. After anything else it ends at once, and the trace is complete a little later.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(128))]
pub struct ExitLine {
    /// Thread that exits, in its own PID namespace; 0 unknown. Written by the process.
    pub tid: AtomicU32,
    /// [`UNDECIDED`] or the answer; reset by the process, written by the recorder.
    pub verdict: AtomicU32,
}

/// A word alone in its pair of cache lines.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(128))]
pub struct Line {
    /// The word.
    pub value: AtomicU32,
}

/// A loss counter alone in its pair of cache lines.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(128))]
pub struct LostLine {
    /// Events.
    pub events: AtomicU64,
    /// Bytes they would have taken, at most.
    pub bytes: AtomicU64,
}

impl LostLine {
    /// Counts one event.
    pub fn add(&self, bytes: usize) {
        self.events.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// One writing thread, for the recorder to read. Who owns it: [`crate::owners`].
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(128))]
pub struct ThreadLine {
    /// Kernel thread id of its last owner; 0 none yet.
    pub tid: AtomicU32,
    /// How often the line was claimed, so chunks of an earlier owner are not taken for this one's.
    pub generation: AtomicU32,
    /// Events written.
    pub events: AtomicU64,
    /// Events lost since the last one that got through.
    pub lost: AtomicU64,
}

/// The holder of a thread line, for the recorder to look after; see [`crate::owners`]. Apart from the line itself, whose cache lines belong to
/// its thread.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(16))]
pub struct Tenure {
    /// Word of the newest claim, or the even one after it when the line was freed. Written by the process.
    pub word: AtomicU32,
    /// Kernel thread id of anyone who claimed it, written before the word; 0 unknown, which is never taken for gone.
    pub tid: AtomicU32,
    /// Word of the newest claim whose thread is known to be gone. Written by the recorder.
    pub gone: AtomicU32,
    /// Not used.
    pub reserved: AtomicU32,
}

impl Tenure {
    /// The owner of a claim says so.
    pub fn publish(&self, word: u32, tid: u32) {
        self.tid.store(tid, Ordering::Relaxed);
        // SYNC: the thread of the claim.
        self.word.store(word, Ordering::Release);
    }

    /// The owner of a claim is about to give its line back.
    pub fn end(&self, word: u32) {
        self.word.store(word.wrapping_add(1), Ordering::Relaxed);
    }

    /// Whether the recorder knows that the thread of this claim is gone.
    #[must_use]
    pub fn is_gone(&self, word: u32) -> bool {
        // SYNC: a thread that is gone has written everything.
        self.gone.load(Ordering::Acquire) == word
    }

    /// The claim that should be looked after: its word and its thread. `None` where the line is free, its thread is unknown, or known to
    /// be gone.
    #[must_use]
    pub fn claim(&self) -> Option<(u32, u32)> {
        // SYNC: the thread of the claim.
        let word = self.word.load(Ordering::Acquire);
        let tid = self.tid.load(Ordering::Relaxed);
        let is_open = !word.is_multiple_of(2) && tid != 0 && self.gone.load(Ordering::Relaxed) != word;
        is_open.then_some((word, tid))
    }

    /// No thread has this claim's number any more. A newer claim may stand here by now, of which this says nothing.
    pub fn note_gone(&self, word: u32) {
        // SYNC: a thread that is gone has written everything.
        self.gone.store(word, Ordering::Release);
    }
}

/// First bytes of a chunk. Only the owner writes, but for what [`crate::ring::Reader`] keeps beside it.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(64))]
pub struct ChunkHeader {
    /// Index of the owner's [`ThreadLine`].
    pub thread: AtomicU32,
    /// Its kernel thread id, for a reader that comes after the line was reused.
    pub tid: AtomicU32,
    /// How many chunks the owner had before.
    pub sequence: AtomicU64,
    /// Bytes of whole records after this header.
    pub committed: AtomicU32,
    /// Free.
    pub reserved: AtomicU32,
    /// Ticks from which the first records count.
    pub base: AtomicU64,
}

/// Bytes of records a chunk can hold.
pub const CHUNK_PAYLOAD: usize = CHUNK_BYTES - size_of::<ChunkHeader>();

#[cfg(not(loom))]
const _: () = assert!(size_of::<ChunkHeader>() == 64);

/// Why a file is no ring this build can read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotARing {
    /// Shorter than its own header says, or than any ring.
    TooShort {
        /// Bytes the header promises, or the least a ring has.
        expected: usize,
    },
    /// Does not start with the magic: not a ring, or its process died while making it.
    NoMagic,
    /// Written by a build with other record layouts.
    OtherAbi {
        /// The writer's [`ABI`].
        found: u32,
    },
}

/// Who writes a ring: the header's words of the same names.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Writer {
    /// Its process id, in its own namespace.
    pub pid: u32,
    /// When it began, in clock ticks since boot; 0 unknown.
    pub start_time: u64,
    /// Inode of its PID namespace; 0 unknown.
    pub pid_namespace: u64,
}

/// A mapped ring. Copies refer to the same memory.
#[derive(Clone, Copy)]
pub struct Map {
    base: *mut u8,
    n_chunks: u32,
}

// SAFETY: everything behind `base` is reached through atomics, but for chunk bodies, which have one owner.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    /// Bytes of a ring with this many chunks.
    #[must_use]
    pub const fn bytes_for(n_chunks: u32) -> usize {
        Self::chunks_at(n_chunks) + n_chunks as usize * CHUNK_BYTES
    }

    /// Bytes of a ring before this chunk: what must have memory for all chunks before it to be used.
    #[must_use]
    pub const fn bytes_before(n_chunks: u32, chunk: u32) -> usize {
        Self::chunks_at(n_chunks) + chunk as usize * CHUNK_BYTES
    }

    /// How many chunks fit into this many bytes.
    #[must_use]
    pub const fn chunks_in(bytes: usize) -> u32 {
        let tables = STATES_AT + CHUNK_BYTES;
        (bytes.saturating_sub(tables) / (CHUNK_BYTES + 4)) as u32
    }

    const fn chunks_at(n_chunks: u32) -> usize {
        let tables = STATES_AT + n_chunks as usize * 4;
        tables.next_multiple_of(4096)
    }

    /// Makes a ring in zeroed memory.
    ///
    /// # Safety
    /// `base` is page aligned and [`Map::bytes_for`]`(n_chunks)` zeroed, writable bytes that stay mapped as long as
    /// any copy of the result is used.
    #[must_use]
    pub unsafe fn create(base: *mut u8, n_chunks: u32, writer: Writer, clock: Clock) -> Map {
        // SAFETY: the caller's promise, which covers all chunks.
        unsafe { Map::create_in_part(base, n_chunks, n_chunks, writer, clock) }
    }

    /// As [`Map::create`], where only the first `n_usable` chunks have memory yet.
    ///
    /// # Safety
    /// As for [`Map::create`], but that no more than [`Map::bytes_before`]`(n_chunks, n_usable)` bytes need be zeroed and
    /// writable.
    #[must_use]
    pub unsafe fn create_in_part(
        base: *mut u8,
        n_chunks: u32,
        n_usable: u32,
        writer: Writer,
        clock: Clock,
    ) -> Map {
        let map = Map { base, n_chunks };
        let n_usable = n_usable.min(n_chunks);
        let header = map.header();
        let calibration = Calibration::take(clock);
        header.abi.store(ABI, Ordering::Relaxed);
        header.n_chunks.store(n_chunks, Ordering::Relaxed);
        header.pid.store(writer.pid, Ordering::Relaxed);
        header.clock.store(clock as u32, Ordering::Relaxed);
        header.start_time.store(writer.start_time, Ordering::Relaxed);
        header.pid_namespace.store(writer.pid_namespace, Ordering::Relaxed);
        header.calibration[0].store(calibration.ticks.0, Ordering::Relaxed);
        header.calibration[1].store(calibration.monotonic, Ordering::Relaxed);
        header.calibration[2].store(calibration.realtime, Ordering::Relaxed);
        header.free_chunks.value.store(n_usable, Ordering::Relaxed);
        header.usable_chunks.value.store(n_usable, Ordering::Relaxed);
        // SYNC: the whole header is visible to whoever sees the magic.
        header.magic.store(MAGIC, Ordering::Release);
        map
    }

    /// Looks at a mapped file.
    ///
    /// # Safety
    /// `base` is page aligned and `bytes` mapped, writable bytes that stay mapped as long as any copy of the result
    /// is used. Their content may be anything.
    ///
    /// # Errors
    /// [`NotARing`], when it is not one this build reads.
    pub unsafe fn open(base: *mut u8, bytes: usize) -> Result<Map, NotARing> {
        let least = Self::bytes_for(1);
        if bytes < least {
            return Err(NotARing::TooShort { expected: least });
        }
        let map = Map { base, n_chunks: 1 };
        let header = map.header();
        // SYNC: the whole header is visible to whoever sees the magic.
        if header.magic.load(Ordering::Acquire) != MAGIC {
            return Err(NotARing::NoMagic);
        }
        let found = header.abi.load(Ordering::Relaxed);
        if found != ABI {
            return Err(NotARing::OtherAbi { found });
        }
        // Read once: a hostile writer may change it afterwards.
        let n_chunks = header.n_chunks.load(Ordering::Relaxed);
        let expected = Self::bytes_for(n_chunks.min(1 << 24));
        if n_chunks == 0 || bytes < expected || n_chunks > 1 << 24 {
            return Err(NotARing::TooShort { expected });
        }
        Ok(Map { base, n_chunks })
    }

    /// Its start, and how many bytes it has.
    #[must_use]
    pub fn extent(&self) -> (*mut u8, usize) {
        (self.base, Map::bytes_for(self.n_chunks))
    }

    /// The first page.
    #[cfg(not(loom))]
    #[must_use]
    pub fn header(&self) -> &Header {
        // SAFETY: `create` and `open` made sure of page alignment and length; all fields are atomics.
        unsafe { &*self.base.cast::<Header>() }
    }

    /// Clocks when the ring was made.
    #[must_use]
    pub fn calibration(&self) -> Calibration {
        let [ticks, monotonic, realtime] = [0, 1, 2].map(|i| {
            self.header().calibration.get(i).map_or(0, |word: &AtomicU64| word.load(Ordering::Relaxed))
        });
        Calibration { ticks: crate::clock::Ticks(ticks), monotonic, realtime }
    }

    /// The ring's clock.
    #[must_use]
    pub fn clock(&self) -> Clock {
        Clock::from_u32(self.header().clock.load(Ordering::Relaxed))
    }

    /// Chunks that may be used now.
    #[must_use]
    #[inline]
    pub fn n_usable(&self) -> u32 {
        // SYNC: the memory of usable chunks.
        self.header().usable_chunks.value.load(Ordering::Acquire).min(self.n_chunks)
    }

    #[cfg(loom)]
    pub(crate) fn base(&self) -> *mut u8 {
        self.base
    }

    /// Chunks of this ring.
    #[must_use]
    pub fn n_chunks(&self) -> u32 {
        self.n_chunks
    }

    /// A thread's line; the index is taken modulo [`MAX_THREADS`].
    #[cfg(not(loom))]
    #[must_use]
    pub fn thread(&self, index: u32) -> &ThreadLine {
        let at = HEADER_BYTES + (index as usize % MAX_THREADS) * size_of::<ThreadLine>();
        // SAFETY: `at` is inside the tables, whose length was checked.
        let line = unsafe { self.base.add(at) };
        // SAFETY: aligned by construction (a page plus multiples of 128), and made of atomics.
        unsafe { &*line.cast::<ThreadLine>() }
    }

    /// The holder of a thread line; the index is taken modulo [`MAX_THREADS`].
    #[cfg(not(loom))]
    #[must_use]
    pub fn tenure(&self, line: u32) -> &Tenure {
        let at = TENURES_AT + (line as usize % MAX_THREADS) * size_of::<Tenure>();
        // SAFETY: `at` is inside the tables, whose length was checked.
        let tenure = unsafe { self.base.add(at) };
        // SAFETY: aligned by construction (a page plus multiples of 16), and made of atomics.
        unsafe { &*tenure.cast::<Tenure>() }
    }

    /// A chunk's state word; the index is taken modulo the number of chunks.
    #[cfg(not(loom))]
    #[must_use]
    pub fn state(&self, chunk: u32) -> &AtomicU32 {
        let at = STATES_AT + (chunk % self.n_chunks) as usize * 4;
        // SAFETY: `at` is inside the tables, whose length was checked.
        let word = unsafe { self.base.add(at) };
        // SAFETY: four-byte aligned by construction.
        unsafe { &*word.cast::<AtomicU32>() }
    }

    /// A chunk; the index is taken modulo the number of chunks.
    #[cfg(not(loom))]
    #[must_use]
    pub fn chunk(&self, chunk: u32) -> *mut u8 {
        let at = Self::chunks_at(self.n_chunks) + (chunk % self.n_chunks) as usize * CHUNK_BYTES;
        // SAFETY: inside the mapping, whose length was checked.
        unsafe { self.base.add(at) }
    }

    /// A chunk's header.
    #[must_use]
    pub fn chunk_header(&self, chunk: u32) -> &ChunkHeader {
        // SAFETY: chunks are page aligned and longer than their header; all fields are atomics.
        unsafe { &*self.chunk(chunk).cast::<ChunkHeader>() }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    extern crate std;

    use super::*;
    use std::boxed::Box;
    use std::vec;
    use std::vec::Vec;

    fn extents() -> Box<Extents> {
        let range = || Extent { start: AtomicU64::new(0), end: AtomicU64::new(0) };
        Box::new(Extents {
            version: AtomicU32::new(0),
            n: AtomicU32::new(0),
            is_used: AtomicU32::new(0),
            ranges: core::array::from_fn(|_| range()),
        })
    }

    #[test]
    fn a_range_is_found_by_each_address_in_it() {
        let extents = extents();
        assert_eq!(extents.find(0x1000), Ok(None));
        let ranges: Vec<(u64, u64)> = (1..=3000).map(|n| (n * 0x2000, n * 0x2000 + 0x1000)).collect();
        extents.set(&ranges);
        assert!(!extents.take_use());
        for (start, end) in &ranges {
            assert_eq!(extents.find(start - 1), Ok(None));
            assert_eq!(extents.find(*start), Ok(Some((*start, *end))));
            assert_eq!(extents.find(end - 1), Ok(Some((*start, *end))));
            assert_eq!(extents.find(*end), Ok(None));
        }
        assert!(extents.take_use() && !extents.take_use());
        extents.set(&[(0x2000, 0x3000)]);
        assert_eq!((extents.find(0x2fff), extents.find(0x4000)), (Ok(Some((0x2000, 0x3000))), Ok(None)));
        extents.set(&[]);
        assert_eq!(extents.find(0x2fff), Ok(None));
    }

    #[test]
    fn an_address_that_is_not_found_while_ranges_change_may_be_there() {
        let extents = extents();
        extents.set(&[(0x2000, 0x3000)]);
        extents.version.store(extents.version.load(Ordering::Relaxed) | 1, Ordering::Relaxed);
        assert_eq!((extents.find(0x2000), extents.find(0x9000)), (Err(Changing), Err(Changing)));
        extents.set(&[(0x2000, 0x3000)]);
        assert_eq!((extents.find(0x2000), extents.find(0x9000)), (Ok(Some((0x2000, 0x3000))), Ok(None)));
    }

    #[test]
    fn what_there_is_no_room_for_is_left_out() {
        let extents = extents();
        let range = |n: usize| ((n as u64) << 16, ((n as u64) << 16) + 4096);
        extents.set(&(1..=N_EXTENTS + 1).map(range).collect::<Vec<_>>());
        assert_eq!(extents.find(range(N_EXTENTS).0), Ok(Some(range(N_EXTENTS))));
        assert_eq!(extents.find(range(N_EXTENTS + 1).0), Ok(None));
    }

    #[test]
    fn a_reader_never_sees_half_a_change() {
        let extents = extents();
        let is_over = core::sync::atomic::AtomicBool::new(false);
        let [low, high] = [vec![(0x1000, 0x8000), (0x9000, 0xa000)], vec![(0x3000, 0x4000)]];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 0..20_000 {
                    extents.set(if n % 2 == 0 { &low } else { &high });
                }
                is_over.store(true, Ordering::Relaxed);
            });
            while !is_over.load(Ordering::Relaxed) {
                let found = extents.find(0x3800);
                let possible = [Err(Changing), Ok(None), Ok(Some(low[0])), Ok(Some(high[0]))];
                assert!(possible.contains(&found), "{found:x?}");
            }
        });
    }
}
