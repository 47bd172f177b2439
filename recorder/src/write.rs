//! The writing thread: items to blocks of the trace. A disk that is full or gone stops the writing, not the draining.

use crate::output::TraceFile;
use crate::translate::{Item, RECORDER};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use gputrace_schemas::event::{Event, EventKind, Lost, LostCause, Nanos, StackId};
use gputrace_schemas::writer::Writer;
use std::io;
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Batches that may wait to be written: about a second of a busy process, some tens of MB.
const MOST_WAITING: usize = 256;
/// How long an event may stay out of the file.
const FLUSH_EVERY: Duration = Duration::from_secs(1);
/// A process that is silent for so long may hang, or be killed together with us: what it said is written at once.
const FLUSH_WHEN_SILENT: Duration = Duration::from_millis(100);
/// Bytes of definitions that are kept while nothing can be written.
const MOST_KEPT: usize = 256 << 20;

enum Message {
    Items(Vec<Item>),
    /// Writes everything, with an end if asked, and answers how long the file is.
    Settle(End, Sender<u64>),
    /// Nothing will come from the draining side any more.
    Stop,
}

/// Whether the file gets its index and footer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// What comes next follows.
    Open,
    /// Nothing is expected to come; if something does, the end is taken off again.
    Closed,
}

/// What became of the file.
#[derive(Default, Debug)]
pub(crate) struct Written {
    pub(crate) n_events: u64,
    pub(crate) n_dropped: u64,
    pub(crate) bytes: u64,
    pub(crate) error: Option<io::Error>,
}

/// The draining side's end of the writing thread.
pub(crate) struct WriterThread {
    to: Sender<Message>,
    thread: JoinHandle<Written>,
}

/// Hands items over from another thread.
#[derive(Clone)]
pub(crate) struct Outlet(Sender<Message>);

impl Outlet {
    /// Hands items over; `false` if nobody takes them any more.
    pub(crate) fn send(&self, items: Vec<Item>) -> bool {
        self.0.send(Message::Items(items)).is_ok()
    }

    /// Waits until everything sent before is in the file, and says how long that is.
    pub(crate) fn settle(&self) -> Option<u64> {
        let (answer, answered) = bounded(1);
        self.0.send(Message::Settle(End::Open, answer)).ok()?;
        answered.recv().ok()
    }
}

impl WriterThread {
    pub(crate) fn start(file: TraceFile, path: PathBuf) -> io::Result<WriterThread> {
        let (to, from) = bounded(MOST_WAITING);
        let mut state = State::new(file, path)?;
        let thread = std::thread::Builder::new().name("gputrace-write".to_owned()).spawn(move || {
            state.run(&from);
            state.written()
        })?;
        Ok(WriterThread { to, thread })
    }

    pub(crate) fn outlet(&self) -> Outlet {
        Outlet(self.to.clone())
    }

    pub(crate) fn send(&self, items: Vec<Item>) {
        if !items.is_empty() {
            // Fails only if the thread panicked; `finish` reports that.
            let _ = self.to.send(Message::Items(items));
        }
    }

    /// Waits until everything sent before is in the file.
    pub(crate) fn settle(&self, end: End) {
        let (answer, answered) = bounded(1);
        if self.to.send(Message::Settle(end, answer)).is_ok() {
            let _ = answered.recv();
        }
    }

    /// Ends the file. What outlets send afterwards is lost.
    pub(crate) fn finish(self) -> Written {
        self.settle(End::Closed);
        let _ = self.to.send(Message::Stop);
        self.thread.join().unwrap_or_default()
    }
}

struct State {
    writer: Writer<TraceFile>,
    path: PathBuf,
    /// Where the end begins that the file has for now.
    ended: bool,
    error: Option<io::Error>,
    /// Dropped events that the trace itself tells about.
    told: u64,
    last_time: Nanos,
}

impl State {
    fn new(file: TraceFile, path: PathBuf) -> io::Result<State> {
        let writer = Writer::new(file)?;
        Ok(State { writer, path, ended: false, error: None, told: 0, last_time: Nanos(0) })
    }

    fn run(&mut self, from: &Receiver<Message>) {
        let mut flush_at = Instant::now() + FLUSH_EVERY;
        let mut silent_at = flush_at;
        loop {
            match from.recv_deadline(flush_at.min(silent_at)) {
                Ok(Message::Items(items)) => {
                    self.write(&items);
                    silent_at = Instant::now() + FLUSH_WHEN_SILENT;
                }
                Ok(Message::Settle(end, answer)) => {
                    self.settle(end);
                    let _ = answer.send(self.writer.position());
                }
                Err(RecvTimeoutError::Timeout) => {}
                Ok(Message::Stop) | Err(RecvTimeoutError::Disconnected) => return,
            }
            if Instant::now() >= flush_at.min(silent_at) {
                flush_at = Instant::now() + FLUSH_EVERY;
                silent_at = flush_at;
                self.settle(End::Open);
            }
        }
    }

    fn write(&mut self, items: &[Item]) {
        self.reopen();
        for item in items {
            let result = self.put(item);
            self.check(result);
        }
    }

    fn put(&mut self, item: &Item) -> io::Result<()> {
        let writer = &mut self.writer;
        // A definition that finds no room for minutes must not fill the memory instead.
        let full = self.error.is_some() && writer.definitions_kept() > MOST_KEPT;
        match item {
            Item::Event(event) => {
                self.last_time = event.time;
                return writer.event(event);
            }
            Item::Mappings(mappings) => return writer.mappings(mappings),
            _ if full => {}
            Item::Process(process) => writer.process(process),
            Item::Module(id, module) => writer.module(*id, module),
            Item::Frame(id, frame) => writer.frame(*id, frame),
            Item::Stack(id, stack) => writer.stack(*id, stack),
            Item::Thread(id, thread) => writer.thread(*id, thread),
            Item::Device(device) => writer.device(device),
            Item::Api(id, api) => writer.api(*id, api),
            Item::Text(id, text) => writer.text(*id, text),
            Item::Communicator(id, communicator) => writer.communicator(*id, communicator),
        }
        Ok(())
    }

    /// After an error: cuts the file back to its last whole block, and says so once.
    fn check(&mut self, result: io::Result<()>) {
        let Err(error) = result else { return };
        let whole = self.writer.position();
        // If even this fails the reader skips the partial block.
        let _ = self.writer.sink().cut(whole);
        if self.error.is_none() {
            crate::say(&format!(
                "cannot write {}: {error}; the program goes on, events are dropped and counted, and what is written stays readable",
                self.path.display()
            ));
            self.error = Some(error);
        }
    }

    fn settle(&mut self, end: End) {
        let dropped = self.writer.events_dropped();
        if dropped > self.told {
            let lost = Lost { cause: LostCause::NotWritten, events: dropped - self.told };
            let event = Event {
                time: self.last_time,
                thread: RECORDER,
                stack: StackId(0),
                kind: EventKind::Lost(lost),
            };
            let result = self.writer.event(&event).and_then(|()| self.writer.flush());
            if result.is_ok() {
                self.told = dropped;
            }
            self.check(result);
        }
        let result = match end {
            End::Open => self.writer.flush(),
            End::Closed if self.ended => Ok(()),
            End::Closed => self.writer.try_finish(),
        };
        self.ended = self.ended || (end == End::Closed && result.is_ok());
        self.check(result);
    }

    /// Takes off the end that the file has, because something more has come.
    fn reopen(&mut self) {
        if std::mem::take(&mut self.ended) {
            self.writer.reopen();
            let whole = self.writer.position();
            let result = self.writer.sink().cut(whole);
            self.check(result);
        }
    }

    fn written(self) -> Written {
        Written {
            n_events: self.writer.events_written(),
            n_dropped: self.writer.events_dropped(),
            bytes: self.writer.position(),
            error: self.error,
        }
    }
}
