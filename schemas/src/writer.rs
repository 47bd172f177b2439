//! Writes a trace, block by block: whatever has been written is readable, whenever the writing stops.
//!
//! ```
//! use gputrace_schemas::event::{Event, EventKind, Nanos, Process, StackId, ThreadId};
//! use gputrace_schemas::writer::Writer;
//!
//! let mut writer = Writer::new(Vec::new())?;
//! writer.process(&Process { pid: 42, ..Process::default() });
//! let kind = EventKind::Note("hello".to_owned());
//! writer.event(&Event { time: Nanos(1), thread: ThreadId(0), stack: StackId(0), kind })?;
//! let bytes = writer.finish()?;
//! # assert_eq!(&bytes[..6], b"GPUTRC");
//! # Ok::<(), std::io::Error>(())
//! ```

use crate::block::{CODEC_ZSTD, FILE_MAGIC, FOOTER_BYTES, Footer, HEADER_BYTES, Header, Kind, MAX_RAW};
use crate::codec::{Compressor, compress_bound};
use crate::columns::EventRows;
use crate::definitions::{Pending, PendingMappings};
use crate::event::{
    Api, ApiId, CommId, Communicator, Device, Event, Frame, FrameId, Mappings, Module, ModuleId, Process,
    Stack, StackId, TextId, Thread, ThreadId,
};
use crate::reader::{Block, Trace};
use crate::tables::{IndexFields, column, keys};
use flatbuffers::FlatBufferBuilder;
use std::collections::VecDeque;
use std::io::{self, Write};

/// Events in a full block: enough for the compressor to see repetition, little enough to lose.
pub const EVENTS_PER_BLOCK: usize = 1 << 14;
/// Bytes of texts in events (notes), definitions or mappings after which a block is made of them.
const BYTES_PER_BLOCK: usize = 4 << 20;
/// zstd's level: 3 saves under 1 % more on columns and takes a third longer (FORMAT.md, Size).
const LEVEL: i32 = 1;

/// Writes one trace.
///
/// Definitions and mappings are kept until the next block of events or [`Writer::flush`], and then written before it.
/// Defining an id again replaces what it meant, for the whole trace: that is how symbols are filled in at the end.
///
/// After an error the sink may end in a part of a block. Truncating it to [`Writer::position`] (through
/// [`Writer::sink`]) makes it whole again, and writing can go on: the events of the failed block are gone and counted
/// in [`Writer::events_dropped`], definitions are kept for the next try.
pub struct Writer<W: Write> {
    sink: W,
    position: u64,
    blocks: Vec<Block>,
    definitions: VecDeque<Pending>,
    mappings: PendingMappings,
    events: EventRows,
    note_bytes: usize,
    builder: FlatBufferBuilder<'static>,
    compressor: Compressor,
    compressed: Vec<u8>,
    n_events: u64,
    n_dropped: u64,
}

impl<W: Write> Writer<W> {
    /// Begins a trace at the sink's beginning.
    ///
    /// # Errors
    /// The sink's.
    pub fn new(mut sink: W) -> io::Result<Writer<W>> {
        sink.write_all(&FILE_MAGIC)?;
        Writer::behind(sink, FILE_MAGIC.len() as u64, Vec::new(), 0)
    }

    /// Goes on behind the last block of a trace: `sink` has the first [`Trace::blocks_end`] bytes of it, and nothing
    /// behind them. What is defined anew replaces what the trace defines.
    ///
    /// # Errors
    /// The compressor's.
    pub fn append(trace: &Trace, sink: W) -> io::Result<Writer<W>> {
        // Without what was held before: the file's end counts what happened since.
        let events = trace.blocks().iter().filter(|block| block.kind == Kind::Events as u8);
        let n_events = events.map(|block| u64::from(block.count)).sum();
        Writer::behind(sink, trace.blocks_end(), trace.blocks().to_vec(), n_events)
    }

    /// Writes what is left of a bounded recording as one file, which may go on.
    ///
    /// # Errors
    /// The sink's.
    pub fn copy(trace: &Trace, sink: W) -> io::Result<Writer<W>> {
        let mut writer = Writer::new(sink)?;
        let of = trace.process();
        // One file: segments and the gap before the first are no more.
        let after_gap = of.is_rest();
        writer.process(&Process { segment: 0, after_gap, ..of.clone() });
        (0..).map(ModuleId).zip(trace.modules()).for_each(|(id, module)| writer.module(id, module));
        (0..).map(FrameId).zip(trace.frames()).for_each(|(id, frame)| writer.frame(id, frame));
        let stacks = (0..).map(StackId).zip(trace.stacks()).skip(1);
        stacks.for_each(|(id, stack)| writer.stack(id, stack));
        (0..).map(ThreadId).zip(trace.threads()).for_each(|(id, thread)| writer.thread(id, thread));
        trace.devices().iter().for_each(|device| writer.device(device));
        (0..).map(ApiId).zip(trace.apis()).for_each(|(id, api)| writer.api(id, api));
        (0..).map(TextId).zip(trace.texts()).skip(1).for_each(|(id, text)| writer.text(id, text));
        let communicators = (0..).map(CommId).zip(trace.communicators()).skip(1);
        communicators.for_each(|(id, communicator)| writer.communicator(id, communicator));
        for mappings in trace.mappings() {
            writer.mappings(&mappings)?;
        }
        let mut events = trace.events();
        while let Some(events) = events.lend() {
            events.iter().try_for_each(|event| writer.event(event))?;
        }
        Ok(writer)
    }

    fn behind(sink: W, position: u64, blocks: Vec<Block>, n_events: u64) -> io::Result<Writer<W>> {
        Ok(Writer {
            sink,
            position,
            blocks,
            definitions: VecDeque::new(),
            mappings: PendingMappings::default(),
            events: EventRows::default(),
            note_bytes: 0,
            builder: FlatBufferBuilder::new(),
            compressor: Compressor::new(LEVEL)?,
            compressed: Vec::new(),
            n_events,
            n_dropped: 0,
        })
    }

    /// Facts about the process; replaces earlier ones.
    pub fn process(&mut self, process: &Process) {
        self.batch().process(process);
    }

    /// Defines a module.
    pub fn module(&mut self, id: ModuleId, module: &Module) {
        self.batch().module(id, module);
    }

    /// Defines a frame.
    pub fn frame(&mut self, id: FrameId, frame: &Frame) {
        self.batch().frame(id, frame);
    }

    /// Defines a stack; `id` is not 0.
    pub fn stack(&mut self, id: StackId, stack: &Stack) {
        debug_assert_ne!(id, StackId(0), "0 is \"no stack\"");
        self.batch().stack(id, stack);
    }

    /// Defines a thread.
    pub fn thread(&mut self, id: ThreadId, thread: &Thread) {
        self.batch().thread(id, thread);
    }

    /// Defines the device of its ordinal.
    pub fn device(&mut self, device: &Device) {
        self.batch().device(device);
    }

    /// Defines a function.
    pub fn api(&mut self, id: ApiId, api: &Api) {
        self.batch().api(id, api);
    }

    /// Defines a communicator; `id` is not 0.
    pub fn communicator(&mut self, id: CommId, communicator: &Communicator) {
        debug_assert_ne!(id, CommId(0), "0 is \"none\"");
        self.batch().communicator(id, communicator);
    }

    /// Defines a text; `id` is not 0.
    pub fn text(&mut self, id: TextId, text: &str) {
        debug_assert_ne!(id, TextId(0), "0 is \"no text\"");
        self.batch().text(id, text);
    }

    /// The address space at a moment.
    ///
    /// # Errors
    /// The sink's, when this fills a block.
    pub fn mappings(&mut self, mappings: &Mappings) -> io::Result<()> {
        self.mappings.push(mappings);
        if self.mappings.bytes() >= BYTES_PER_BLOCK { self.write_mappings() } else { Ok(()) }
    }

    /// An event. Times may go back a little; the reader sorts.
    ///
    /// # Errors
    /// The sink's, when this fills a block.
    pub fn event(&mut self, event: &Event) -> io::Result<()> {
        self.events.push(event);
        if let crate::event::EventKind::Note(text) = &event.kind {
            self.note_bytes += text.len();
        }
        if self.events.len() >= EVENTS_PER_BLOCK || self.note_bytes >= BYTES_PER_BLOCK {
            return self.flush();
        }
        Ok(())
    }

    /// Memory held when a segment begins: events of the time before it, in the order of their times. A reader of several segments
    /// skips them in all but the first. Definitions that they need are written before them.
    ///
    /// # Errors
    /// The sink's. Nothing is counted as dropped then: a segment that cannot be begun is not begun.
    pub fn held<'a>(&mut self, events: impl IntoIterator<Item = &'a Event>) -> io::Result<()> {
        self.write_definitions()?;
        let mut rows = EventRows::default();
        for event in events {
            rows.push(event);
            if rows.len() >= EVENTS_PER_BLOCK {
                self.write_held(&mut rows)?;
            }
        }
        if rows.len() > 0 { self.write_held(&mut rows) } else { Ok(()) }
    }

    fn write_held(&mut self, rows: &mut EventRows) -> io::Result<()> {
        self.builder.reset();
        rows.build(&mut self.builder);
        self.write_block(Kind::Held, rows.len(), rows.span())?;
        rows.clear();
        Ok(())
    }

    /// Writes what is kept, so it survives this process.
    ///
    /// # Errors
    /// The sink's.
    pub fn flush(&mut self) -> io::Result<()> {
        let definitions = self.write_definitions();
        let mappings = if definitions.is_ok() { self.write_mappings() } else { Ok(()) };
        if let Err(error) = definitions.and(mappings) {
            self.drop_events();
            return Err(error);
        }
        self.write_events()?;
        self.sink.flush()
    }

    /// Writes what is kept, the index and the footer.
    ///
    /// # Errors
    /// The sink's.
    pub fn finish(mut self) -> io::Result<W> {
        self.try_finish()?;
        Ok(self.sink)
    }

    /// As [`Writer::finish`], for a writer that is needed afterwards: after an error, or because more may come after all
    /// ([`Writer::reopen`]).
    ///
    /// # Errors
    /// The sink's.
    pub fn try_finish(&mut self) -> io::Result<()> {
        self.flush()?;
        let index = self.position;
        self.write_index()?;
        let footer = Footer { index, events: self.n_events }.encode();
        if let Err(error) = self.sink.write_all(&footer) {
            self.reopen();
            return Err(error);
        }
        self.position += FOOTER_BYTES as u64;
        self.sink.flush()
    }

    /// Takes back a successful [`Writer::try_finish`], so writing can go on. The sink must then be truncated to
    /// [`Writer::position`].
    pub fn reopen(&mut self) {
        if let Some(index) = self.blocks.pop_if(|block| block.kind == Kind::Index as u8) {
            self.position = index.offset;
        }
    }

    /// Bytes of the sink up to the end of the last whole block.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.position
    }

    /// The sink.
    pub fn sink(&mut self) -> &mut W {
        &mut self.sink
    }

    /// Events in whole blocks.
    #[must_use]
    pub fn events_written(&self) -> u64 {
        self.n_events
    }

    /// Events that failed blocks took with them.
    #[must_use]
    pub fn events_dropped(&self) -> u64 {
        self.n_dropped
    }

    /// Bytes of definitions that are kept for the next block, about.
    #[must_use]
    pub fn definitions_kept(&self) -> usize {
        self.definitions.iter().map(Pending::bytes).sum()
    }

    /// Where the next definition goes: blocks stay small, so that a reader needs little memory at once.
    fn batch(&mut self) -> &mut Pending {
        if self.definitions.back().is_none_or(|batch| batch.bytes() >= BYTES_PER_BLOCK) {
            self.definitions.push_back(Pending::default());
        }
        let last = self.definitions.len() - 1;
        &mut self.definitions[last]
    }

    fn write_definitions(&mut self) -> io::Result<()> {
        while let Some(batch) = self.definitions.front() {
            let count = batch.len();
            self.builder.reset();
            batch.build(&mut self.builder);
            match self.write_block(Kind::Definitions, count, (0, 0)) {
                // Too long for a block, which no later try would change.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
                result => result?,
            }
            self.definitions.pop_front();
        }
        Ok(())
    }

    fn write_mappings(&mut self) -> io::Result<()> {
        if self.mappings.len() == 0 {
            return Ok(());
        }
        self.builder.reset();
        self.mappings.build(&mut self.builder);
        let result = self.write_block(Kind::Mappings, self.mappings.len(), self.mappings.span());
        self.mappings.clear();
        result
    }

    fn write_events(&mut self) -> io::Result<()> {
        let count = self.events.len();
        if count == 0 {
            return Ok(());
        }
        self.builder.reset();
        self.events.build(&mut self.builder);
        let result = self.write_block(Kind::Events, count, self.events.span());
        if result.is_err() {
            self.drop_events();
        } else {
            self.n_events += count as u64;
            self.clear_events();
        }
        result
    }

    fn drop_events(&mut self) {
        self.n_dropped += self.events.len() as u64;
        self.clear_events();
    }

    fn clear_events(&mut self) {
        self.events.clear();
        self.note_bytes = 0;
    }

    fn write_index(&mut self) -> io::Result<()> {
        let each = |number: fn(&Block) -> u64| self.blocks.iter().map(number).collect::<Vec<u64>>();
        let kinds: Vec<u8> = self.blocks.iter().map(|block| block.kind).collect();
        let counts: Vec<u32> = self.blocks.iter().map(|block| block.count).collect();
        self.builder.reset();
        let to = &mut self.builder;
        let fields = IndexFields {
            offsets: keys(to, &each(|block| block.offset)),
            lengths: column(to, &each(|block| block.bytes)),
            kinds: column(to, &kinds),
            counts: column(to, &counts),
            first_times: column(to, &each(|block| block.first)),
            last_times: column(to, &each(|block| block.last)),
        };
        let root = fields.build(to);
        to.finish_minimal(root);
        self.write_block(Kind::Index, kinds.len(), (0, 0))
    }

    /// Writes what the builder holds.
    fn write_block(&mut self, kind: Kind, count: usize, span: (u64, u64)) -> io::Result<()> {
        let raw = self.builder.finished_data();
        let raw_bytes = u32::try_from(raw.len()).unwrap_or(u32::MAX);
        if raw_bytes > MAX_RAW {
            let what =
                format!("a block of {} MiB, more than the format's {}", raw.len() >> 20, MAX_RAW >> 20);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        self.compressed.clear();
        self.compressed.resize(HEADER_BYTES + compress_bound(raw.len()), 0);
        let stored = self.compressor.compress_to_buffer(raw, &mut self.compressed[HEADER_BYTES..])?;
        self.compressed.truncate(HEADER_BYTES + stored);
        let header = Header {
            kind: kind as u8,
            codec: CODEC_ZSTD,
            count: count as u32,
            raw: raw_bytes,
            stored: stored as u32,
            crc: crc32fast::hash(&self.compressed[HEADER_BYTES..]),
            sequence: self.blocks.len() as u64,
            first: span.0,
            last: span.1,
        };
        self.compressed[..HEADER_BYTES].copy_from_slice(&header.encode());
        // One write: a sink that is a file then has either the whole block or, when it fills up, a part of one.
        self.sink.write_all(&self.compressed)?;
        self.blocks.push(Block::new(self.position, &header));
        self.position += self.compressed.len() as u64;
        Ok(())
    }
}
