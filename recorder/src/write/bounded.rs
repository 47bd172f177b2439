//! What the writing thread remembers of a bounded recording, so that each of its files can be read without those before it.

use crate::book::Book;
use crate::held::Held;
use crate::item::{FreeThreads, Item};
use crate::output::{Room, TraceFile};
use crate::segments::{Bounds, Segments};
use crate::ticks::monotonic;
use gputrace_schemas::event::{Mappings, Nanos, ThreadId};
use gputrace_schemas::writer::Writer;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The files, which the newest of them asks for room, too.
#[derive(Clone)]
struct Shared(Arc<Mutex<Segments>>);

impl Shared {
    fn get(&self) -> MutexGuard<'_, Segments> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the disk is full, the oldest makes room for the newest.
    fn room(&self) -> Room {
        let segments = self.clone();
        Box::new(move || segments.get().make_room())
    }
}

pub(super) struct Bounded {
    segments: Shared,
    book: Book,
    held: Held,
    /// The address space when it was last read.
    mappings: Option<Mappings>,
    free_threads: FreeThreads,
    since: Nanos,
    /// Events could not be written, and how many since then were not.
    is_blocked: bool,
    n_blocked: u64,
    /// It was said that a file could not be begun.
    has_complained: bool,
}

impl Bounded {
    /// For a recording that begins in `file`.
    pub(super) fn new(bounds: Bounds, path: PathBuf, file: &mut TraceFile) -> Bounded {
        let segments = Segments::new(bounds, path);
        let book = Book::new(segments.number());
        let segments = Shared(Arc::new(Mutex::new(segments)));
        file.make_room_by(segments.room());
        Bounded {
            segments,
            book,
            held: Held::default(),
            mappings: None,
            free_threads: FreeThreads::default(),
            since: Nanos(0),
            is_blocked: false,
            n_blocked: 0,
            has_complained: false,
        }
    }

    /// Writes an item, and remembers what the next file needs of it. Where no more definitions may wait, they are only remembered.
    pub(super) fn put(&mut self, item: &Item, writer: &mut Writer<TraceFile>, full: bool) -> io::Result<()> {
        if self.is_blocked {
            match item {
                Item::Event(event) => {
                    self.held.event(event);
                    self.n_blocked += 1;
                }
                Item::Mappings(mappings) => self.mappings = Some(mappings.clone()),
                Item::ThreadEnded(id) => self.thread_ended(*id),
                definition => self.book.define(definition, None),
            }
            return Ok(());
        }
        match item {
            Item::Event(event) => {
                self.held.event(event);
                if !full {
                    self.book.need(event, writer);
                }
                writer.event(event)
            }
            Item::Mappings(mappings) => {
                self.mappings = Some(mappings.clone());
                writer.mappings(mappings)
            }
            Item::ThreadEnded(id) => {
                self.thread_ended(*id);
                Ok(())
            }
            definition => {
                self.book.define(definition, (!full).then_some(writer));
                Ok(())
            }
        }
    }

    fn thread_ended(&mut self, id: ThreadId) {
        self.held.thread_ended(id, self.book.thread(id).map_or(0, |thread| thread.tid));
        self.book.thread_ended(id);
    }

    /// Leaves room on the disk for the segment after the newest.
    pub(super) fn keep_spare(&self, newest: &mut TraceFile) {
        newest.keep_spare(self.segments.get().spare(self.held.n_blocks()));
    }

    /// Numbers of threads that no file has any more.
    pub(super) fn free_threads(&self) -> FreeThreads {
        FreeThreads::clone(&self.free_threads)
    }

    pub(super) fn is_due(&self, bytes: u64) -> bool {
        if self.is_blocked { self.segments.get().may_try() } else { self.segments.get().is_due(bytes) }
    }

    /// Events could not be written. What follows would be read as if they had not happened: nothing more is written to this file.
    pub(super) fn block(&mut self) {
        self.is_blocked = true;
    }

    /// Events that were not written for that.
    pub(super) fn take_blocked(&mut self) -> u64 {
        std::mem::take(&mut self.n_blocked)
    }

    pub(super) fn is_blocked(&self) -> bool {
        self.is_blocked
    }

    /// The next file, in the place of the one before; `None` where there is no room for it.
    pub(super) fn next(&mut self, old: &mut Writer<TraceFile>) -> Option<Writer<TraceFile>> {
        match self.begin(old.position()) {
            Ok(writer) => {
                self.is_blocked = false;
                Some(writer)
            }
            Err(error) => {
                self.segments.get().unmake();
                let number = self.segments.get().number();
                self.book.take_back(number, self.since);
                if !self.has_complained {
                    self.has_complained = true;
                    crate::say(&format!(
                        "cannot begin the next segment of {}: {error}; the recording continues in this one, and gputrace tries again",
                        self.segments.get().base().display(),
                    ));
                }
                None
            }
        }
    }

    fn begin(&mut self, old_bytes: u64) -> io::Result<Writer<TraceFile>> {
        // What a damaged ring says of the future is not the present.
        let since = self.held.newest().min(Nanos(monotonic()));
        let mut file = self.segments.get().make()?;
        file.make_room_by(self.segments.room());
        let mut writer = Writer::new(file)?;
        let number = self.segments.get().number() + 1;
        self.book.begin(number, since, self.is_blocked, &mut writer)?;
        if let Some(mappings) = &self.mappings {
            writer.mappings(mappings)?;
        }
        let events = self.held.events();
        for event in &events {
            self.book.need(event, &mut writer);
        }
        writer.held(&events)?;
        writer.flush()?;
        writer.sink().synchronise()?;
        self.segments.get().switch(old_bytes, writer.position(), since)?;
        self.since = since;
        Ok(writer)
    }

    /// The file before has its end, and so many bytes.
    pub(super) fn has_moved(&mut self, bytes: u64) {
        self.segments.get().ended(bytes);
        self.segments.get().remove_oldest(self.held.newest().min(Nanos(monotonic())));
        let oldest = self.segments.get().oldest();
        self.book.left(oldest);
        let free = self.book.take_free_threads();
        if let Ok(mut known) = self.free_threads.lock() {
            known.extend(free);
        }
    }

    /// The newest file has its end, and so many bytes.
    pub(super) fn ended(&mut self, bytes: u64) {
        self.segments.get().remove_at_end(bytes);
    }

    /// Bytes of the files before the newest.
    pub(super) fn old_bytes(&self) -> u64 {
        self.segments.get().old_bytes()
    }
}
