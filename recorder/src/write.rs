//! The writing thread: items to blocks of the trace. A disk that is full or gone stops the writing, not the draining.

use crate::output::TraceFile;
use crate::translate::{Item, RECORDER};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use gputrace_schemas::event::{Event, EventKind, Lost, LostCause, Nanos, StackId};
use gputrace_schemas::writer::Writer;
use std::cell::RefCell;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
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
    hand: Hand,
}

/// Who writes.
enum Hand {
    Thread(JoinHandle<Written>),
    /// The draining side itself, because no thread could be had (RLIMIT_NPROC): what is said now must not be lost for that.
    Own(Box<RefCell<State>>, Receiver<Message>),
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
        let state = Arc::new(Mutex::new(Some(State::new(file, path)?)));
        let of_thread = (Arc::clone(&state), from.clone());
        let run = move || {
            let (state, from) = of_thread;
            let taken = state.lock().ok().and_then(|mut state| state.take());
            let Some(mut state) = taken else { return Written::default() };
            state.run(&from);
            state.written()
        };
        match std::thread::Builder::new().name("gputrace-write".to_owned()).spawn(run) {
            Ok(thread) => Ok(WriterThread { to, hand: Hand::Thread(thread) }),
            Err(error) => {
                let state = state.lock().ok().and_then(|mut state| state.take()).ok_or(error)?;
                Ok(WriterThread { to, hand: Hand::Own(Box::new(RefCell::new(state)), from) })
            }
        }
    }

    pub(crate) fn outlet(&self) -> Outlet {
        Outlet(self.to.clone())
    }

    pub(crate) fn send(&self, items: Vec<Item>) {
        if !items.is_empty() {
            // Fails only if the thread panicked; `finish` reports that.
            let _ = self.to.send(Message::Items(items));
        }
        self.work();
    }

    /// Waits until everything sent before is in the file.
    pub(crate) fn settle(&self, end: End) {
        let (answer, answered) = bounded(1);
        if self.to.send(Message::Settle(end, answer)).is_ok() {
            self.work();
            let _ = answered.recv();
        }
    }

    /// Ends the file. What outlets send afterwards is lost.
    pub(crate) fn finish(self) -> Written {
        self.settle(End::Closed);
        let _ = self.to.send(Message::Stop);
        match self.hand {
            Hand::Thread(thread) => thread.join().unwrap_or_default(),
            Hand::Own(state, _) => state.into_inner().written(),
        }
    }

    /// Writes what is there, if that is for us to do.
    fn work(&self) {
        if let Hand::Own(state, from) = &self.hand {
            let mut state = state.borrow_mut();
            while let Ok(message) = from.try_recv() {
                state.obey(message);
            }
            state.flush_if_due();
        }
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
    flush_at: Instant,
    silent_at: Instant,
}

impl State {
    fn new(file: TraceFile, path: PathBuf) -> io::Result<State> {
        let writer = Writer::new(file)?;
        let flush_at = Instant::now() + FLUSH_EVERY;
        let (last_time, silent_at) = (Nanos(0), flush_at);
        Ok(State { writer, path, ended: false, error: None, told: 0, last_time, flush_at, silent_at })
    }

    fn run(&mut self, from: &Receiver<Message>) {
        loop {
            match from.recv_deadline(self.flush_at.min(self.silent_at)) {
                Ok(Message::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                Ok(message) => self.obey(message),
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.flush_if_due();
        }
    }

    fn obey(&mut self, message: Message) {
        match message {
            Message::Items(items) => {
                self.write(&items);
                self.silent_at = Instant::now() + FLUSH_WHEN_SILENT;
            }
            Message::Settle(end, answer) => {
                self.settle(end);
                let _ = answer.send(self.writer.position());
            }
            Message::Stop => {}
        }
    }

    fn flush_if_due(&mut self) {
        if Instant::now() >= self.flush_at.min(self.silent_at) {
            self.flush_at = Instant::now() + FLUSH_EVERY;
            self.silent_at = self.flush_at;
            self.settle(End::Open);
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

#[cfg(test)]
mod tests {
    use super::*;
    use gputrace_schemas::reader::Trace;

    #[test]
    fn without_a_thread_the_draining_side_writes_itself() {
        let path = std::env::temp_dir().join(format!("gputrace-own-hand-{}.gtr", std::process::id()));
        let file = crate::output::open(&path, crate::Overwrite::Replace).expect("a file");
        let (to, from) = bounded(MOST_WAITING);
        let state = State::new(TraceFile(file), path.clone()).expect("a trace");
        let writer = WriterThread { to, hand: Hand::Own(Box::new(RefCell::new(state)), from) };
        let note = |n: usize| Event {
            time: Nanos(n as u64),
            thread: RECORDER,
            stack: StackId(0),
            kind: EventKind::Note(n.to_string()),
        };
        // More than may wait for a thread.
        for n in 0..2 * MOST_WAITING {
            writer.send(vec![Item::Event(note(n))]);
        }
        assert!(writer.outlet().send(vec![Item::Event(note(2 * MOST_WAITING))]));
        let written = writer.finish();
        assert_eq!(written.n_events as usize, 2 * MOST_WAITING + 1);
        let trace = Trace::open(&path).expect("a trace");
        assert_eq!(trace.events().count(), 2 * MOST_WAITING + 1);
        std::fs::remove_file(path).expect("ours");
    }
}
