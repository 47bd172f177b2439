//! Reads a trace, whole, cut short or damaged.
//!
//! ```no_run
//! use gputrace_schemas::reader::Trace;
//!
//! let trace = Trace::open("train.gtr")?;
//! for event in trace.events() {
//!     println!("{} {:?}", event.time.0, event.kind);
//! }
//! for damage in trace.damages() {
//!     eprintln!("{damage}");
//! }
//! # Ok::<(), gputrace_schemas::reader::Error>(())
//! ```
//!
//! Damage is normal input: a killed process leaves a trace without an end. What can be read is read, and
//! [`Trace::damages`] says what could not. Only a file that is no trace at all, or of another version, is an [`Error`].

use crate::block::{FILE_MAGIC, FOOTER_BYTES, Footer, Header, Kind};
use crate::columns;
use crate::definitions::{Definitions, read_mappings};
use crate::event::{
    Api, ApiId, CommId, Communicator, Device, Event, Frame, FrameId, Mappings, Module, ModuleId, Nanos,
    Process, Stack, StackId, TextId, Thread, ThreadId,
};
use crate::tables::{self, Root, rows};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

mod ahead;
mod follow;
mod input;
mod open;
pub mod progress;
mod scan;
mod segments;

use ahead::Ahead;
pub use follow::{Follower, Grown};
use input::{Input, in_order};
pub use open::{confine_to, open_regular};
use scan::{patience, scan};
use segments::Segment;
pub use segments::{base_of, older_segments, segment_name};

/// Why a file cannot be read as a trace.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file system's answer.
    #[error("cannot read {file}")]
    Io {
        /// The file.
        file: String,
        /// What it said.
        #[source]
        source: io::Error,
    },
    /// Other bytes than a trace's.
    #[error("{file} is not a gputrace trace: it begins with {found}; `gputrace record` makes traces")]
    NotATrace {
        /// The file.
        file: String,
        /// Its first bytes.
        found: String,
    },
    /// Nothing, or a part of a trace's first word: somebody began to write one.
    #[error(
        "{file} has no trace yet: the recorder was killed, or the disk was full; `gputrace recover` makes a trace of what a killed one left"
    )]
    NotBegun {
        /// The file.
        file: String,
    },
    /// A trace of another version of the format.
    #[error("{file} has format version {found}, and this gputrace reads version {supported}: {remedy}")]
    Version {
        /// The file.
        file: String,
        /// Its version.
        found: u8,
        /// Ours.
        supported: u8,
        /// What to do.
        remedy: &'static str,
    },
    /// A trace of which no event can be read: nothing can be concluded from it.
    #[error(
        "{file}: none of its events can be read: {} bytes at offset {}: {}; if it is a copy, copy it again",
        damage.bytes, damage.offset, damage.what
    )]
    NoEvents {
        /// The file.
        file: String,
        /// The first part that cannot be read.
        damage: Damage,
    },
}

/// A part of a trace that could not be read. Everything outside it was.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Damage {
    /// Its start in the file.
    pub offset: u64,
    /// Bytes that were skipped.
    pub bytes: u64,
    /// The fault there.
    pub what: String,
    /// What it means or what to do.
    pub remedy: &'static str,
}

impl fmt::Display for Damage {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{} bytes at offset {} skipped: {}: {}", self.bytes, self.offset, self.what, self.remedy)
    }
}

const CUT: &str =
    "the recorder was killed, the disk was full, or a copy of the file broke off; everything before is shown";
const CORRUPT: &str = "the file was changed after it was written; the events of this part are missing";
const NEWER: &str = "it was probably written by a newer gputrace; upgrade to see it";

/// Whether a file that begins so is a trace, of whatever version; [`Trace::open`] says whether it can be read.
#[must_use]
pub fn looks_like_a_trace(first_bytes: &[u8]) -> bool {
    first_bytes.starts_with(&FILE_MAGIC[..FILE_MAGIC.len() - 1])
}

/// The block at which other processors begin to help: who wants the first events alone needs none.
const STARTS_THREADS: usize = 2;
/// Blocks whose times overlap and that are decoded at the same time: about 100 MB.
const MAX_OPEN: usize = 64;
trait Source: Read + Seek + Send {}
impl<R: Read + Seek + Send> Source for R {}

/// A trace, open for reading: definitions are in memory, events stay in the file.
pub struct Trace {
    input: Mutex<Input>,
    complete: bool,
    /// In the order of the file.
    blocks: Vec<Block>,
    blocks_end: u64,
    definitions: Definitions,
    process: Process,
    /// In the order of their first times.
    events: Vec<Block>,
    mappings: Vec<Block>,
    damages: Mutex<Vec<Damage>>,
    /// The files that it was joined of, oldest first; none for a trace in one file.
    segments: Vec<Segment>,
}

impl fmt::Debug for Trace {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.debug_struct("Trace")
            .field("process", &self.process)
            .field("complete", &self.complete)
            .field("n_events", &self.n_events())
            .finish_non_exhaustive()
    }
}

/// The beginning of a file.
struct Prefix {
    file: File,
    length: u64,
    at: u64,
}

impl Read for Prefix {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.length.saturating_sub(self.at)).unwrap_or(usize::MAX);
        let room = to.len().min(left);
        let n = self.file.read(to.get_mut(..room).unwrap_or_default())?;
        self.at += n as u64;
        Ok(n)
    }
}

impl Seek for Prefix {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let to = match to {
            // It may have grown.
            SeekFrom::End(offset) => SeekFrom::Start(self.length.saturating_add_signed(offset)),
            to => to,
        };
        self.at = self.file.seek(to)?;
        Ok(self.at)
    }
}

/// A block as the index or its header describes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) offset: u64,
    /// Header and payload.
    pub(crate) bytes: u64,
    pub(crate) kind: u8,
    pub(crate) count: u32,
    pub(crate) first: u64,
    pub(crate) last: u64,
}

impl Block {
    pub(crate) fn new(offset: u64, header: &Header) -> Block {
        Block {
            offset,
            bytes: header.block_bytes(),
            kind: header.kind,
            count: header.count,
            first: header.first,
            last: header.last,
        }
    }
}

impl Trace {
    /// Opens a file; of a bounded recording, all segments that are left, whichever of them is named.
    ///
    /// # Errors
    /// It cannot be read, is no trace, or one of another version. Damage is no error.
    pub fn open(path: impl AsRef<Path>) -> Result<Trace, Error> {
        Trace::open_by(path.as_ref(), &|path: &Path| open_regular(path))
    }

    /// Opens the first `length` bytes of a file that may still be growing, and the segments before it.
    ///
    /// # Errors
    /// As [`Trace::open`].
    pub fn open_prefix(path: impl AsRef<Path>, length: u64) -> Result<Trace, Error> {
        let path = path.as_ref();
        let name = path.display().to_string();
        let io = |source| Error::Io { file: name.clone(), source };
        let file = open_regular(path).map_err(io)?;
        // A segment that has just begun in its place may be shorter.
        let length = file.metadata().map_err(io)?.len().min(length);
        let newest = Trace::read(Prefix { file, length, at: 0 }, &name)?;
        Ok(newest.with_older(path, &|path: &Path| open_regular(path)))
    }

    /// Opens anything that can be read, as one file; `name` is what errors call it.
    ///
    /// # Errors
    /// As [`Trace::open`].
    pub fn read(source: impl Read + Seek + Send + 'static, name: &str) -> Result<Trace, Error> {
        let io = |source| Error::Io { file: name.to_owned(), source };
        let mut input = Input::new(Box::new(source)).map_err(io)?;
        let length = input.source.seek(SeekFrom::End(0)).map_err(io)?;
        check_magic(&mut input.source, length, name)?;
        let mut damages = Vec::new();
        let index = read_index(&mut input, length);
        let complete = index.is_some();
        let (blocks, blocks_end) = match index {
            Some(index) => index,
            None => {
                let found = scan(&mut input.source, length, patience(length), &mut damages);
                (found.map_err(io)?, length)
            }
        };
        let mut definitions = Definitions::default();
        let mut trace = Trace {
            input: Mutex::new(input),
            complete,
            blocks: Vec::new(),
            blocks_end,
            definitions: Definitions::default(),
            process: Process::default(),
            events: Vec::new(),
            mappings: Vec::new(),
            damages: Mutex::new(damages),
            segments: Vec::new(),
        };
        for block in &blocks {
            match Kind::from_u8(block.kind) {
                Some(Kind::Definitions) => {
                    trace.payload(block, |payload, _| definitions.read(payload));
                }
                Some(Kind::Events | Kind::Held) => trace.events.push(*block),
                Some(Kind::Mappings) => trace.mappings.push(*block),
                Some(Kind::Index) => {}
                None => trace.damage(block, 0, format!("a block of unknown kind {}", block.kind), NEWER),
            }
        }
        trace.blocks = blocks;
        trace.sort_events();
        trace.process = definitions.process.clone().unwrap_or_default();
        trace.definitions = definitions;
        Ok(trace)
    }

    fn sort_events(&mut self) {
        self.events.sort_by_key(|block| (block.first, block.offset));
    }

    /// The trace has its end: the recorder finished it.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// Bytes of the file up to the end of its blocks: all but the index and the footer of a trace that has its end.
    #[must_use]
    pub fn blocks_end(&self) -> u64 {
        self.blocks_end
    }

    pub(crate) fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Facts about the process; empty ones if they were lost.
    #[must_use]
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Modules, by [`ModuleId`].
    #[must_use]
    pub fn modules(&self) -> &[Module] {
        &self.definitions.modules
    }

    /// Frames, by [`FrameId`].
    #[must_use]
    pub fn frames(&self) -> &[Frame] {
        &self.definitions.frames
    }

    /// Stacks, by [`StackId`]; the first is "no stack".
    #[must_use]
    pub fn stacks(&self) -> &[Stack] {
        &self.definitions.stacks
    }

    /// Threads, by [`ThreadId`].
    #[must_use]
    pub fn threads(&self) -> &[Thread] {
        &self.definitions.threads
    }

    /// Devices, ascending by ordinal.
    #[must_use]
    pub fn devices(&self) -> &[Device] {
        &self.definitions.devices
    }

    /// Functions, by [`ApiId`].
    #[must_use]
    pub fn apis(&self) -> &[Api] {
        &self.definitions.apis
    }

    /// Communicators of NCCL, by [`CommId`]; the first is none.
    #[must_use]
    pub fn communicators(&self) -> &[Communicator] {
        &self.definitions.communicators
    }

    /// A communicator; `None` for "none" and if its definition is missing.
    #[must_use]
    pub fn communicator(&self, id: CommId) -> Option<&Communicator> {
        if id == CommId(0) { None } else { self.communicators().get(id.0 as usize) }
    }

    /// A module; `None` if its definition is missing.
    #[must_use]
    pub fn module(&self, id: ModuleId) -> Option<&Module> {
        self.modules().get(id.0 as usize)
    }

    /// A frame; `None` if its definition is missing.
    #[must_use]
    pub fn frame(&self, id: FrameId) -> Option<&Frame> {
        self.frames().get(id.0 as usize)
    }

    /// A stack; `None` for "no stack" and if its definition is missing.
    #[must_use]
    pub fn stack(&self, id: StackId) -> Option<&Stack> {
        if id == StackId(0) { None } else { self.stacks().get(id.0 as usize) }
    }

    /// The frames of a stack, innermost first; none for "no stack".
    pub fn stack_frames(&self, id: StackId) -> impl Iterator<Item = &Frame> {
        self.stack(id).into_iter().flat_map(|stack| &stack.frames).filter_map(|frame| self.frame(*frame))
    }

    /// A thread; `None` if its definition is missing.
    #[must_use]
    pub fn thread(&self, id: ThreadId) -> Option<&Thread> {
        self.threads().get(id.0 as usize)
    }

    /// The device with this ordinal.
    #[must_use]
    pub fn device(&self, ordinal: i16) -> Option<&Device> {
        self.devices().iter().find(|device| device.ordinal == ordinal)
    }

    /// A function; `None` if its definition is missing.
    #[must_use]
    pub fn api(&self, id: ApiId) -> Option<&Api> {
        self.apis().get(id.0 as usize)
    }

    /// Texts that marks name, by [`TextId`].
    #[must_use]
    pub fn texts(&self) -> &[String] {
        &self.definitions.texts
    }

    /// A text; `None` for "no text" and if its definition is missing.
    #[must_use]
    pub fn text(&self, id: TextId) -> Option<&str> {
        if id == TextId(0) { None } else { self.texts().get(id.0 as usize).map(String::as_str) }
    }

    /// How many events the trace has, if none of its blocks turns out to be damaged.
    #[must_use]
    pub fn n_events(&self) -> u64 {
        self.events.iter().map(|block| u64::from(block.count)).sum()
    }

    /// Times of the first and the last event.
    #[must_use]
    pub fn span(&self) -> Option<(Nanos, Nanos)> {
        let first = self.events.first()?.first;
        let last = self.events.iter().map(|block| block.last).max()?;
        Some((Nanos(first), Nanos(last)))
    }

    /// The events in the order of their times; equal times in the order they were written. May be called several
    /// times. Needs memory for the blocks that overlap at one moment, not for the trace.
    #[must_use]
    pub fn events(&self) -> Events<'_> {
        Events {
            trace: self,
            next: 0,
            open: BinaryHeap::new(),
            current: None,
            n_lent: 0,
            spare: Vec::new(),
            ahead: None,
            told: false,
        }
    }

    /// The address space at the moments it was read, in the order of the file.
    pub fn mappings(&self) -> impl Iterator<Item = Mappings> {
        self.mappings
            .iter()
            .flat_map(|block| self.payload(block, |payload, _| read_mappings(payload)).unwrap_or_default())
    }

    /// Parts that could not be read so far. Damage inside a block of events shows when [`Trace::events`] has come to it.
    #[must_use]
    pub fn damages(&self) -> Vec<Damage> {
        self.lock_damages().clone()
    }

    fn lock_damages(&self) -> MutexGuard<'_, Vec<Damage>> {
        self.damages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn damage(&self, block: &Block, bytes: u64, what: String, remedy: &'static str) {
        let damage = self.in_its_file(Damage { offset: block.offset, bytes, what, remedy });
        let mut damages = self.lock_damages();
        if !damages.contains(&damage) {
            damages.push(damage);
        }
    }

    /// Reads and checks a block; what is wrong with it becomes damage.
    fn payload<T>(
        &self,
        block: &Block,
        read: impl FnOnce(&[u8], &mut columns::Scratch) -> Result<T, String>,
    ) -> Option<T> {
        let mut input = self.input.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = input.load(block);
        let unfolder = &mut input.unfolder;
        let result = loaded.and_then(|_| read(&unfolder.payload, &mut unfolder.scratch));
        input.shrink();
        drop(input);
        result.map_err(|what| self.damage(block, block.bytes, what, CORRUPT)).ok()
    }

    /// The events of a block in the order of their times, in the memory of a list that is not needed any more.
    fn decode(&self, block: &Block, mut events: Vec<Event>) -> Vec<Event> {
        events.clear();
        let read = |payload: &[u8], scratch: &mut columns::Scratch| {
            let decoded = columns::decode(payload, block.count, scratch, &mut events);
            in_order(&mut events, decoded)
        };
        if self.payload(block, read).is_none() {
            events.clear();
        }
        events
    }
}

/// The events of a trace in the order of their times; see [`Trace::events`].
///
/// Blocks are opened in the order of their first times, and merged while they overlap: a late event costs one more
/// open block, never a wait for the end of the file.
pub struct Events<'a> {
    trace: &'a Trace,
    /// Next block of `trace.events` to open.
    next: usize,
    open: BinaryHeap<Reverse<Cursor>>,
    current: Option<Run>,
    /// The first events of `current`, this many, were lent and are done with.
    n_lent: usize,
    /// Lists of blocks that are done, as memory for the next ones. Whoever decodes those empties them.
    spare: Vec<Vec<Event>>,
    /// Threads that decode what comes next, once it is clear that more than the first events are wanted.
    ahead: Option<Ahead>,
    told: bool,
}

/// A block from which events can be taken up to `limit`.
struct Run {
    cursor: Cursor,
    limit: Place,
}

/// A time, and the offset of the block for events of one time.
type Place = (Nanos, u64);

struct Cursor {
    place: Place,
    events: VecDeque<Event>,
}

impl Cursor {
    /// The list itself where there is no event in it.
    fn new(events: VecDeque<Event>, offset: u64) -> Result<Cursor, Vec<Event>> {
        match events.front() {
            Some(first) => Ok(Cursor { place: (first.time, offset), events }),
            None => Err(events.into()),
        }
    }
}

impl PartialEq for Cursor {
    fn eq(&self, other: &Cursor) -> bool {
        self.place == other.place
    }
}
impl Eq for Cursor {}
impl PartialOrd for Cursor {
    fn partial_cmp(&self, other: &Cursor) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Cursor {
    fn cmp(&self, other: &Cursor) -> std::cmp::Ordering {
        self.place.cmp(&other.place)
    }
}

impl Iterator for Events<'_> {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        self.run()?.pop_front()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, usize::try_from(self.trace.n_events()).ok())
    }
}

impl Events<'_> {
    /// Lends the next events, at least one, to a caller that looks at each event once and needs no copy. None is left at the end.
    pub fn lend(&mut self) -> Option<&[Event]> {
        self.run()?;
        let Run { cursor, limit } = self.current.as_mut()?;
        let events: &[Event] = cursor.events.make_contiguous();
        let is_next = |event: &Event| (event.time, cursor.place.1) <= *limit;
        self.n_lent = match events.last() {
            Some(last) if is_next(last) => events.len(),
            _ => events.partition_point(is_next),
        };
        events.get(..self.n_lent)
    }

    /// The block that has the next event, as its first one.
    fn run(&mut self) -> Option<&mut VecDeque<Event>> {
        let n_lent = std::mem::take(&mut self.n_lent);
        if let Some(run) = self.current.take_if(|run| n_lent > 0 && run.cursor.events.len() == n_lent) {
            self.spare.push(run.cursor.events.into());
        } else if let Some(run) = self.current.as_mut().filter(|_| n_lent > 0) {
            run.cursor.events.drain(..n_lent);
        }
        loop {
            let is_next = |run: &Run| {
                let (limit, offset) = (run.limit, run.cursor.place.1);
                run.cursor.events.front().is_some_and(|event| (event.time, offset) <= limit)
            };
            if self.current.as_ref().is_some_and(is_next) {
                break;
            }
            if let Some(Run { cursor: Cursor { events, place }, .. }) = self.current.take() {
                match Cursor::new(events, place.1) {
                    Ok(cursor) => self.open.push(Reverse(cursor)),
                    Err(empty) => self.spare.push(empty),
                }
            }
            self.open_blocks();
            let Reverse(cursor) = self.open.pop()?;
            let limit = self.open.peek().map(|Reverse(other)| other.place);
            let limit = [limit, self.next_place()].into_iter().flatten().min();
            // A limit before the cursor's own place would not get on: it comes from a block that lied about its times,
            // or that was not opened because there are too many.
            let limit = limit.unwrap_or((Nanos(u64::MAX), u64::MAX)).max(cursor.place);
            self.current = Some(Run { cursor, limit });
        }
        Some(&mut self.current.as_mut()?.cursor.events)
    }

    fn next_place(&self) -> Option<Place> {
        self.trace.events.get(self.next).map(|block| (Nanos(block.first), block.offset))
    }

    /// Opens the blocks that may hold the next event.
    fn open_blocks(&mut self) {
        while let Some(block) = self.trace.events.get(self.next) {
            let place = (Nanos(block.first), block.offset);
            if self.open.peek().is_some_and(|Reverse(first)| first.place < place) {
                return;
            }
            if self.open.len() >= MAX_OPEN {
                self.tell_unsorted(block);
                return;
            }
            self.next += 1;
            progress::is_at(self.next, self.trace.events.len());
            let events = self.decode(self.next - 1, block);
            match Cursor::new(events.into(), block.offset) {
                Ok(cursor) => self.open.push(Reverse(cursor)),
                Err(empty) => self.spare.push(empty),
            }
        }
    }

    /// The events of a block, in the order of their times.
    fn decode(&mut self, index: usize, block: &Block) -> Vec<Event> {
        if index == STARTS_THREADS {
            self.ahead = Ahead::of(self.trace, index);
        }
        let Some(ahead) = &mut self.ahead else {
            return self.trace.decode(block, self.spare.pop().unwrap_or_default());
        };
        let (events, result) = ahead.take(self.trace, index, std::mem::take(&mut self.spare));
        if let Err(what) = result {
            self.trace.damage(block, block.bytes, what, CORRUPT);
        }
        events
    }

    fn tell_unsorted(&mut self, block: &Block) {
        if !self.told {
            self.told = true;
            let what = format!("more than {MAX_OPEN} blocks of events overlap in time");
            self.trace.damage(block, 0, what, "nothing is missing, but events are not in time order");
        }
    }
}

fn check_magic(source: &mut dyn Source, length: u64, name: &str) -> Result<(), Error> {
    let mut magic = [0; FILE_MAGIC.len()];
    let found = &mut magic[..length.min(FILE_MAGIC.len() as u64) as usize];
    let io = |source| Error::Io { file: name.to_owned(), source };
    source.seek(SeekFrom::Start(0)).map_err(io)?;
    source.read_exact(found).map_err(io)?;
    let supported = FILE_MAGIC[7];
    if found.len() < FILE_MAGIC.len() && FILE_MAGIC.starts_with(found) {
        return Err(Error::NotBegun { file: name.to_owned() });
    }
    if found.len() < FILE_MAGIC.len() || found[..7] != FILE_MAGIC[..7] {
        let found = format!("\"{}\"", found.escape_ascii());
        return Err(Error::NotATrace { file: name.to_owned(), found });
    }
    let found = found[7];
    if found != supported {
        let remedy = if found > supported {
            "upgrade gputrace"
        } else {
            "use the gputrace that made it, or record again"
        };
        return Err(Error::Version { file: name.to_owned(), found, supported, remedy });
    }
    Ok(())
}

/// The blocks of a finished trace and where they end; `None` if its end is missing or unreadable, and everything must be looked at.
fn read_index(input: &mut Input, length: u64) -> Option<(Vec<Block>, u64)> {
    let mut footer = [0; FOOTER_BYTES];
    let at = length.checked_sub(FOOTER_BYTES as u64)?;
    input.source.seek(SeekFrom::Start(at)).ok()?;
    input.source.read_exact(&mut footer).ok()?;
    let footer = Footer::decode(&footer)?;
    let index =
        Block { offset: footer.index, bytes: 0, kind: Kind::Index as u8, count: 0, first: 0, last: 0 };
    let header = input.load(&index).ok()?;
    // Anything between index and footer would be hidden by this index.
    if header.kind != Kind::Index as u8 || footer.index.checked_add(header.block_bytes())? != at {
        return None;
    }
    let table = tables::Index::parse(&input.unfolder.payload).ok()?;
    let (mut kinds, mut counts) = (rows(table.kinds()), rows(table.counts()));
    let (mut firsts, mut lasts) = (rows(table.first_times()), rows(table.last_times()));
    let mut lengths = rows(table.lengths());
    let mut expected = FILE_MAGIC.len() as u64;
    let mut blocks = Vec::new();
    for offset in table.offsets().into_iter().flatten() {
        // Neighbours in ascending order, but for the gaps that failed writes leave.
        if offset < expected || offset >= footer.index {
            return None;
        }
        let bytes = lengths.next();
        expected = offset.checked_add(bytes)?;
        blocks.push(Block {
            offset,
            bytes,
            kind: kinds.next(),
            count: counts.next(),
            first: firsts.next(),
            last: lasts.next(),
        });
    }
    let n_events: u64 =
        blocks.iter().filter(|b| b.kind == Kind::Events as u8).map(|b| u64::from(b.count)).sum();
    (n_events == footer.events).then_some((blocks, footer.index))
}
