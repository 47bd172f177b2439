//! One trace that is being written, and the books of its process up to now.
//!
//! Events come block by block, and what the recorder adds by itself (samples of the driver's figures) may come seconds later
//! than what happened at that time. The books want the order of times, so what is not yet certain to be in order waits.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};

use gputrace_replay::ledger::{DeviceBooks, Ledger, TrainingStep};
use gputrace_schemas::event::{CommId, Event, EventKind, Nanos, NcclOp, StackId, ThreadId};
use gputrace_schemas::reader::{self, Follower, Trace};
use rustc_hash::FxHashMap;

/// The thread of what the recorder adds.
const RECORDER: ThreadId = ThreadId(0);
/// While there is more to read: how much earlier than others an event in it may have happened.
const LATE: u64 = 4_000_000_000;
/// Everything of the process that happened so long ago is in the file: it is written once a second, and held 50 ms before.
pub(crate) const WRITTEN: u64 = 2_000_000_000;
/// A sample that is later than this is compared with other books than those of its time.
const TOO_LATE: u64 = 200_000_000;
/// Most events that wait.
const MOST_WAITING: usize = 1 << 20;
/// How often all may be read again from the beginning.
const MOST_RESTARTS: u32 = 2;
/// Rates are those of the last so many slots.
const SLOT: u64 = 100_000_000;
const SLOTS: u64 = 20;

/// A process that is being recorded.
pub(crate) struct Live {
    path: PathBuf,
    follower: Follower,
    /// Its books.
    pub(crate) ledger: Ledger,
    /// Why it cannot be read any more.
    pub(crate) failed: Option<String>,
    /// There is more in the file.
    pub(crate) is_behind: bool,
    /// Calls into NCCL that have not returned.
    pub(crate) nccl: InFlight,
    /// What it asked for lately.
    pub(crate) requests: Requests,
    /// Where that was asked for.
    growth: Option<Growth>,
    /// Not booked yet, in the order of their times.
    waiting: Vec<Event>,
    /// Everything of the process up to then is booked.
    pub(crate) until: Nanos,
    last_of_process: Nanos,
    restarts: u32,
}

impl Live {
    /// Opens a trace; nothing is read yet.
    ///
    /// # Errors
    /// It is none, or not yet.
    pub(crate) fn open(path: &Path) -> Result<Live, reader::Error> {
        Ok(Live {
            path: path.to_owned(),
            follower: Follower::open(path)?,
            ledger: Ledger::default(),
            failed: None,
            is_behind: false,
            nccl: InFlight::default(),
            requests: Requests::default(),
            growth: None,
            waiting: vec![],
            until: Nanos(0),
            last_of_process: Nanos(0),
            restarts: 0,
        })
    }

    /// What its events name, and whether it has its end.
    pub(crate) fn trace(&self) -> &Trace {
        self.follower.definitions()
    }

    /// The process has ended: its trace says so.
    pub(crate) fn has_ended(&self) -> bool {
        self.trace().is_complete()
            && self.ledger.health.notes.iter().any(|(_, note)| note.starts_with("process.end="))
    }

    /// Gives its memory back.
    pub(crate) fn forget(&mut self) {
        self.ledger = Ledger::default();
        self.waiting = vec![];
    }

    /// From now on [`Live::growth`] is known. To be asked before anything is read.
    pub(crate) fn watch_growth(&mut self) {
        self.growth = Some(Growth::default());
    }

    /// By how many bytes a step the process has grown over its last steps; `None` where they are not known.
    pub(crate) fn growth(&self) -> Option<f64> {
        self.growth.as_ref()?.per_step(self.ledger.training_now()?.steps)
    }

    /// Reads at most so many blocks, and books what is certain to be in order; whether there is more.
    ///
    /// # Errors
    /// Those of the file.
    pub(crate) fn advance(&mut self, most: usize, now: Nanos) -> io::Result<bool> {
        // A large file is read in parts, so that little waits.
        let mut left = most;
        loop {
            let part = left.min(64);
            let grown = self.read(part)?;
            self.is_behind = grown;
            left -= part;
            if self.book(now).is_err() {
                self.restart()?;
                left = most;
                continue;
            }
            if !grown || left == 0 {
                return Ok(self.is_behind);
            }
        }
    }

    fn read(&mut self, most: usize) -> io::Result<bool> {
        let before = self.waiting.len();
        let grown = self.follower.read(most, &mut self.waiting)?;
        let new = &self.waiting[before..];
        let last = new.iter().filter(|event| event.thread != RECORDER).map(|event| event.time).max();
        self.last_of_process = self.last_of_process.max(last.unwrap_or_default());
        if !new.is_empty() && !self.waiting.is_sorted_by_key(|event| event.time) {
            // Stable: events of one time stay in the order in which they were written.
            self.waiting.sort_by_key(|event| event.time);
        }
        Ok(grown.is_behind)
    }

    /// Up to when nothing more will come that happened before.
    fn certain(&self, now: Nanos) -> Nanos {
        if self.trace().is_complete() {
            return Nanos(u64::MAX);
        }
        if self.is_behind {
            let is_full = self.waiting.len() > MOST_WAITING;
            return Nanos(self.last_of_process.0.saturating_sub(if is_full { 0 } else { LATE }));
        }
        // Of a trace from another machine, or another start of this one, nothing is known of its now.
        let is_past = self.last_of_process <= now;
        let written = if is_past { now.0.saturating_sub(WRITTEN) } else { 0 };
        Nanos(self.last_of_process.0.max(written))
    }

    /// An error is a sample that should have been booked long before.
    fn book(&mut self, now: Nanos) -> Result<(), TooLate> {
        let certain = self.certain(now);
        let end = self.waiting.partition_point(|event| event.time <= certain);
        let ready: Vec<Event> = self.waiting.drain(..end).collect();
        let may_restart = self.restarts < MOST_RESTARTS;
        for event in ready {
            let is_late = event.time.0.saturating_add(TOO_LATE) < self.until.0;
            if is_late && may_restart && matches!(event.kind, EventKind::Sample(_)) {
                return Err(TooLate);
            }
            if event.thread != RECORDER {
                self.until = self.until.max(event.time);
            }
            self.nccl.event(&event);
            self.requests.event(&event);
            self.ledger.event(self.follower.definitions(), &event);
            if let Some(growth) = &mut self.growth {
                growth.event(&self.ledger, &event);
            }
        }
        if self.ledger.is_mistaken() && may_restart && !self.is_behind {
            return Err(TooLate);
        }
        Ok(())
    }

    fn restart(&mut self) -> io::Result<()> {
        self.restarts += 1;
        let follower = Follower::open(&self.path).map_err(io::Error::other)?;
        self.follower = follower;
        self.ledger = std::mem::take(&mut self.ledger).known();
        self.nccl = InFlight::default();
        self.requests = Requests::default();
        self.growth = self.growth.is_some().then(Growth::default);
        self.waiting.clear();
        (self.until, self.last_of_process) = (Nanos(0), Nanos(0));
        Ok(())
    }

    /// How long ago the newest event of the process was; `None` where its clock is not ours.
    pub(crate) fn age(&self, now: Nanos) -> Option<Nanos> {
        Some(Nanos(now.0.checked_sub(self.until.0)?)).filter(|_| self.until.0 > 0)
    }
}

struct TooLate;

/// The least that a process held in each short while: what it holds at its lowest in a step is what it keeps.
#[derive(Default)]
struct Growth {
    /// Number of the while, and the least bytes in it; the newest last.
    lows: VecDeque<(u64, u64)>,
    /// What it holds now.
    held: u64,
}

impl Growth {
    /// A while is so long, and so many are remembered: 80 seconds.
    const WHILE: u64 = 10_000_000;
    const MOST: usize = 8000;
    /// Growth is that over so many steps, and not known before.
    const STEPS: usize = 8;

    fn event(&mut self, ledger: &Ledger, event: &Event) {
        let concerns = matches!(
            event.kind,
            EventKind::Call(_) | EventKind::BlockAlloc(_) | EventKind::BlockFree(_) | EventKind::Pjrt(_)
        );
        if !concerns {
            return;
        }
        let of = |(device, books): (&i16, &DeviceBooks)| match (ledger.torch(*device), &books.pjrt) {
            (Some(torch), _) => torch.allocated.now.0,
            (None, Some(pjrt)) => pjrt.buffers.now().bytes.0,
            (None, None) => books.physical.now().bytes.0,
        };
        let before = self.held;
        self.held = ledger.devices().iter().map(of).sum();
        let slot = event.time.0 / Growth::WHILE;
        match self.lows.back_mut() {
            Some(last) if last.0 >= slot => last.1 = last.1.min(self.held),
            _ => self.lows.push_back((slot, before.min(self.held))),
        }
        if self.lows.len() > Growth::MOST {
            self.lows.pop_front();
        }
    }

    fn per_step(&self, steps: Vec<TrainingStep>) -> Option<f64> {
        let whole: Vec<_> = steps.iter().filter_map(|step| Some((step.begin, step.end?))).collect();
        let last = whole.len().checked_sub(Growth::STEPS + 1).map(|first| &whole[first..])?;
        let (first, last) = (last.first()?, last.last()?);
        Some(self.low(*last)? as f64 - self.low(*first)? as f64).map(|growth| growth / Growth::STEPS as f64)
    }

    /// Where nothing happened in a while, what was held before it is held.
    fn low(&self, (begin, end): (Nanos, Nanos)) -> Option<u64> {
        let (from, to) = (begin.0 / Growth::WHILE, end.0 / Growth::WHILE);
        let oldest = self.lows.front()?.0;
        let within =
            self.lows.iter().filter(|(slot, _)| (from..=to).contains(slot)).map(|(_, low)| *low).min();
        let before = || self.lows.iter().rev().find(|(slot, _)| *slot < from).map(|(_, low)| *low);
        if oldest > from { None } else { within.or_else(before) }
    }
}

/// Calls into NCCL that have not returned.
#[derive(Default)]
pub(crate) struct InFlight {
    calls: FxHashMap<u64, Waiting>,
}

/// One of them.
#[derive(Clone, Copy)]
pub(crate) struct Waiting {
    pub(crate) op: NcclOp,
    pub(crate) comm: CommId,
    pub(crate) since: Nanos,
    pub(crate) stack: StackId,
}

impl InFlight {
    /// A program that never returns from calls is not helped by remembering more of them.
    const MOST: usize = 4096;

    fn event(&mut self, event: &Event) {
        match &event.kind {
            // An open group is no waiting; its end is.
            EventKind::NcclEnter(enter)
                if self.calls.len() < InFlight::MOST && enter.op != NcclOp::GroupStart =>
            {
                let (op, comm, stack) = (enter.op, enter.comm, event.stack);
                self.calls.insert(enter.call, Waiting { op, comm, since: event.time, stack });
            }
            EventKind::NcclExit(exit) => {
                self.calls.remove(&exit.call);
            }
            _ => {}
        }
    }

    /// The oldest first.
    pub(crate) fn oldest(&self) -> Vec<Waiting> {
        let mut calls: Vec<Waiting> = self.calls.values().copied().collect();
        calls.sort_by_key(|call| call.since);
        calls
    }
}

/// How much was asked for of late, of the driver and of PyTorch's allocator.
#[derive(Default)]
pub(crate) struct Requests {
    /// Number of the slot, requests and bytes; the newest last.
    slots: VecDeque<(u64, u64, u64)>,
}

impl Requests {
    fn event(&mut self, event: &Event) {
        let bytes = match &event.kind {
            EventKind::BlockAlloc(block) => block.bytes.0,
            EventKind::Call(call) if call.action.gives() && call.result == Some(0) => call.bytes.0,
            _ => return,
        };
        let slot = event.time.0 / SLOT;
        match self.slots.back_mut() {
            Some(last) if last.0 >= slot => {
                last.1 += 1;
                last.2 = last.2.saturating_add(bytes);
            }
            _ => self.slots.push_back((slot, 1, bytes)),
        }
        while self.slots.front().is_some_and(|first| first.0 + 2 * SLOTS < slot) {
            self.slots.pop_front();
        }
    }

    /// Requests and bytes a second, in the two seconds before this time.
    pub(crate) fn rates(&self, until: Nanos) -> (f64, f64) {
        let end = until.0 / SLOT;
        let recent = self.slots.iter().filter(|(slot, ..)| *slot <= end && slot + SLOTS > end);
        let (n, bytes) =
            recent.fold((0, 0_u64), |(n, sum), (_, requests, bytes)| (n + requests, sum + bytes));
        let seconds = (SLOTS * SLOT) as f64 / 1e9;
        (n as f64 / seconds, bytes as f64 / seconds)
    }
}
