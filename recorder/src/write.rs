//! The writing thread: items to blocks of the trace. A disk that is full or gone stops the writing, not the draining.

mod bounded;

use self::bounded::Bounded;
use crate::guarded;
use crate::item::{FreeThreads, Item, RECORDER};
use crate::output::TraceFile;
use crate::segments::Bounds;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use gputrace_schemas::event::{Event, EventKind, Lost, LostCause, Nanos, StackId};
use gputrace_schemas::writer::Writer;
use std::cell::RefCell;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Batches that may wait to be written: a quarter of a second of a very busy process, some tens of MB. The ring holds as much again.
const MOST_WAITING: usize = 64;
/// How long an event may stay out of the file.
const FLUSH_EVERY: Duration = Duration::from_secs(1);
/// A process that is silent for so long may hang, or be killed together with us: what it said is written at once.
const FLUSH_WHEN_SILENT: Duration = Duration::from_millis(100);
/// Bytes of definitions that are kept while nothing can be written.
const MOST_KEPT: usize = 256 << 20;
/// Items that are kept while the file has an end.
const MOST_HELD: usize = 1 << 14;
/// Items that are written before it is looked whether another segment is due.
const MOST_AT_ONCE: usize = 256;

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
    /// Nothing is expected to come; if something does, the file gets a new end with it.
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
    free_threads: FreeThreads,
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
    pub(crate) fn start(file: TraceFile, path: PathBuf, bounds: Bounds) -> io::Result<WriterThread> {
        let (to, from) = bounded(MOST_WAITING);
        let state = State::new(file, path, bounds)?;
        let free_threads = state.free_threads();
        let state = Arc::new(Mutex::new(Some(state)));
        let of_thread = (Arc::clone(&state), from.clone());
        let run = move || {
            let (state, from) = of_thread;
            let taken = state.lock().ok().and_then(|mut state| state.take());
            let Some(mut state) = taken else { return Written::default() };
            state.run(&from);
            state.written()
        };
        match guarded::spawn("gputrace-write", run) {
            Ok(thread) => Ok(WriterThread { to, free_threads, hand: Hand::Thread(thread) }),
            Err(error) => {
                let state = state.lock().ok().and_then(|mut state| state.take()).ok_or(error)?;
                let hand = Hand::Own(Box::new(RefCell::new(state)), from);
                Ok(WriterThread { to, free_threads, hand })
            }
        }
    }

    /// Numbers of threads that may be used again.
    pub(crate) fn free_threads(&self) -> FreeThreads {
        Arc::clone(&self.free_threads)
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
    /// Where the recording is kept in several files: what the next one begins with.
    bounded: Option<Box<Bounded>>,
    /// Of the files before this one: events, dropped ones, and dropped ones that no file tells about.
    before: Before,
    /// Whether the file has its end, for now.
    ended: bool,
    /// What came since then. It is written together with a new end: who ends us between two writes (a PID namespace that ends
    /// takes its recorder along) shall not find a file that had an end and has lost it.
    held: Vec<Item>,
    /// Events that came after the end and are not in the file: another end could not be written.
    n_after_end: Option<u64>,
    /// Events in the file when it last got an end.
    n_at_end: u64,
    error: Option<io::Error>,
    /// Dropped events that this file itself tells about.
    told: u64,
    last_time: Nanos,
    flush_at: Instant,
    silent_at: Instant,
}

/// When the next file begins.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    /// Where the bounds ask for it.
    Due,
    Now,
}

/// Counts of the files before this one.
#[derive(Clone, Copy, Default)]
struct Before {
    n_events: u64,
    n_dropped: u64,
    untold: u64,
}

impl State {
    fn new(mut file: TraceFile, path: PathBuf, bounds: Bounds) -> io::Result<State> {
        let bounded = bounds.are_set().then(|| Box::new(Bounded::new(bounds, path.clone(), &mut file)));
        let writer = Writer::new(file)?;
        let flush_at = Instant::now() + FLUSH_EVERY;
        let (last_time, silent_at) = (Nanos(0), flush_at);
        let (ended, held, n_after_end, n_at_end, error) = (false, Vec::new(), None, 0, None);
        Ok(State {
            writer,
            path,
            bounded,
            before: Before::default(),
            ended,
            held,
            n_after_end,
            n_at_end,
            error,
            told: 0,
            last_time,
            flush_at,
            silent_at,
        })
    }

    fn free_threads(&self) -> FreeThreads {
        self.bounded.as_ref().map(|bounded| bounded.free_threads()).unwrap_or_default()
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
                if self.ended {
                    self.held.extend(items);
                    if self.held.len() > MOST_HELD {
                        self.settle(End::Closed);
                    }
                } else {
                    if let Some(bounded) = &self.bounded {
                        bounded.keep_spare(self.writer.sink());
                    }
                    // A recorder that fell behind sends much at once: no segment may outgrow its part of the bound for that.
                    for items in items.chunks(MOST_AT_ONCE) {
                        self.write(items);
                        self.begin_segment_if_due();
                    }
                }
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
            self.begin_segment_if_due();
        }
    }

    fn write(&mut self, items: &[Item]) {
        for item in items {
            let result = self.put(item);
            self.check(result);
        }
    }

    fn put(&mut self, item: &Item) -> io::Result<()> {
        let writer = &mut self.writer;
        // A definition that finds no room for minutes must not fill the memory instead.
        let full = self.error.is_some() && writer.definitions_kept() > MOST_KEPT;
        if let Some(bounded) = &mut self.bounded {
            if let Item::Event(event) = item {
                self.last_time = event.time;
            }
            return bounded.put(item, writer, full);
        }
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
            Item::ThreadEnded(_) => {}
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
        if let Some(bounded) = &mut self.bounded {
            bounded.block();
        }
        let whole = self.writer.position();
        // If even this fails the reader skips the partial block.
        let _ = self.writer.sink().cut(whole);
        self.complain(error);
    }

    fn complain(&mut self, error: io::Error) {
        if self.error.is_none() {
            crate::say(&format!(
                "cannot write {}: {error}; the program continues, events are dropped and counted, and the written part stays readable",
                self.path.display()
            ));
            self.error = Some(error);
        }
    }

    fn settle(&mut self, end: End) {
        if self.ended {
            return self.renew_end();
        }
        if self.is_blocked() {
            // Nothing may follow what is missing but another segment.
            self.begin_segment(if end == End::Closed { When::Now } else { When::Due });
            if self.is_blocked() {
                return;
            }
        }
        self.tell_dropped();
        let result = match end {
            End::Open => self.writer.flush(),
            End::Closed => self.finish(),
        };
        self.ended = end == End::Closed && result.is_ok();
        self.check(result);
        if self.ended
            && let Some(bounded) = &mut self.bounded
        {
            bounded.ended(self.writer.position());
        }
    }

    /// The file's end may take the room that was left for another file.
    fn finish(&mut self) -> io::Result<()> {
        self.writer.flush()?;
        self.writer.sink().give_spare()?;
        self.writer.try_finish()
    }

    /// Events that belong into this file could not be written.
    fn is_blocked(&self) -> bool {
        self.bounded.as_ref().is_some_and(|bounded| bounded.is_blocked())
    }

    fn begin_segment_if_due(&mut self) {
        self.begin_segment(When::Due);
    }

    /// Goes on in another file, where the bounds ask for it, or at once.
    fn begin_segment(&mut self, when: When) {
        let is_due = |bounded: &Bounded| when == When::Now || bounded.is_due(self.writer.position());
        if self.ended || !self.bounded.as_deref().is_some_and(is_due) {
            return;
        }
        // All that was said so far is in the file before.
        if !self.is_blocked() {
            self.settle(End::Open);
        }
        let Some(bounded) = &mut self.bounded else { return };
        let n_blocked = bounded.take_blocked();
        self.before.n_dropped += n_blocked;
        self.before.untold += n_blocked;
        let Some(next) = bounded.next(&mut self.writer) else { return };
        let mut old = std::mem::replace(&mut self.writer, next);
        self.before.n_events += old.events_written();
        self.before.n_dropped += old.events_dropped();
        self.before.untold = (old.events_dropped() + self.before.untold).saturating_sub(self.told);
        self.told = 0;
        let ended = old.sink().give_spare().and_then(|()| old.try_finish());
        if ended.is_err() {
            // It is read without an end.
            let whole = old.position();
            let _ = old.sink().cut(whole);
        }
        bounded.has_moved(old.position());
    }

    /// Events that could not be written are told about by one that can.
    fn tell_dropped(&mut self) {
        let dropped = self.writer.events_dropped() + self.before.untold;
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
    }

    /// Writes what has come since the file got its end, and another end, in the place of the first.
    fn renew_end(&mut self) {
        let held = std::mem::take(&mut self.held);
        if held.is_empty() {
            return;
        }
        let events = held.iter().filter(|item| matches!(item, Item::Event(_))).count() as u64;
        if self.n_after_end.is_some() {
            self.n_after_end = self.n_after_end.map(|lost| lost + events);
            return;
        }
        self.n_at_end = self.writer.events_written();
        self.writer.reopen();
        let end_was_at = self.writer.position();
        let kept = self.writer.sink().keep(end_was_at);
        self.write(&held);
        self.tell_dropped();
        let result = kept.and_then(|()| self.writer.try_finish()).and_then(|()| self.writer.sink().release());
        if let Err(error) = result {
            // What the writer takes for written is not: nothing more can follow it.
            self.n_after_end = Some(events);
            self.complain(error);
            let _ = self.writer.sink().cut(end_was_at);
        }
    }

    fn written(mut self) -> Written {
        if let Some(bounded) = &mut self.bounded {
            self.before.n_dropped += bounded.take_blocked();
        }
        let n_written = self.writer.events_written();
        Written {
            n_events: self.before.n_events
                + if self.n_after_end.is_some() { self.n_at_end } else { n_written },
            n_dropped: self.before.n_dropped + self.writer.events_dropped() + self.n_after_end.unwrap_or(0),
            bytes: self.writer.position() + self.bounded.as_ref().map_or(0, |bounded| bounded.old_bytes()),
            error: self.error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gputrace_schemas::reader::Trace;

    /// Whoever reads the file, or finds it after we were killed, finds an end at each moment.
    #[test]
    fn what_comes_after_the_end_is_written_with_a_new_one() {
        let path = std::env::temp_dir().join(format!("gputrace-after-end-{}.gtr", std::process::id()));
        let file = crate::output::open(&path, crate::Overwrite::Replace).expect("a file");
        let mut state = State::new(TraceFile::new(file), path.clone(), Bounds::default()).expect("a trace");
        let note = |n: usize| {
            let kind = EventKind::Note(n.to_string());
            Item::Event(Event { time: Nanos(n as u64), thread: RECORDER, stack: StackId(0), kind })
        };
        let look = || {
            let trace = Trace::open(&path).expect("a trace");
            (trace.is_complete(), trace.events().count())
        };
        state.obey(Message::Items(vec![note(0)]));
        state.settle(End::Open);
        assert_eq!(look(), (false, 1));
        state.settle(End::Closed);
        assert_eq!(look(), (true, 1));
        for n in 1..=2 * MOST_HELD {
            state.obey(Message::Items(vec![note(n)]));
            let (complete, events) = if n % 4096 == 0 { look() } else { (true, 1) };
            assert!(complete && events >= 1, "{n}: {events}");
        }
        // As when nothing else comes for a while.
        state.settle(End::Open);
        assert_eq!(look(), (true, 2 * MOST_HELD + 1));
        std::fs::remove_file(path).expect("ours");
    }

    #[test]
    fn without_a_thread_the_draining_side_writes_itself() {
        let path = std::env::temp_dir().join(format!("gputrace-own-hand-{}.gtr", std::process::id()));
        let file = crate::output::open(&path, crate::Overwrite::Replace).expect("a file");
        let (to, from) = bounded(MOST_WAITING);
        let state = State::new(TraceFile::new(file), path.clone(), Bounds::default()).expect("a trace");
        let free_threads = FreeThreads::default();
        let writer = WriterThread { to, free_threads, hand: Hand::Own(Box::new(RefCell::new(state)), from) };
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
