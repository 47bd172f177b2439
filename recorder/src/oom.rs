//! Out of memory: who wants to answer is told at once, on threads of their own, so that draining goes on.
//!
//! Beforehand the trace gets what only this moment knows, the processes that have memory on the device, and is written up
//! to the failure: whoever answers reads it as anybody reads a trace.

use crate::card::Holder;
use crate::guarded;
use crate::item::{Item, own_event};
use crate::nvml::Inquirer;
use crate::ticks;
use crate::write::Outlet;
use crossbeam_channel::{Receiver, Sender, unbounded};
use gputrace_schemas::event::{Bytes, Event, EventKind, Nanos, PjrtAction};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Failures that are answered in full.
const FULL: u64 = 3;
/// Between two answers after those.
const BETWEEN: Duration = Duration::from_secs(1);
/// How long NVML may take.
const PATIENCE: Duration = Duration::from_millis(300);
/// `CUDA_ERROR_OUT_OF_MEMORY`, cuda.h.
const OUT_OF_MEMORY: i32 = 2;

/// A request that failed.
#[derive(Clone, Debug)]
pub struct Oom {
    /// The trace, still being written.
    pub trace: PathBuf,
    /// Bytes of it that end with the failure.
    pub length: u64,
    /// When it happened.
    pub time: Nanos,
    /// On which device.
    pub device: i16,
    /// The requested amount.
    pub bytes: Bytes,
    /// Which of the process it is, from 1.
    pub nth: u64,
    /// To be answered in full; else in one line.
    pub full: bool,
}

/// Answers a failure. What takes longer is handed back, to be done when the answer is out.
pub type Answer = fn(&Oom) -> Option<FollowUp>;
/// What is done after the answer, if there is time.
pub type FollowUp = Box<dyn FnOnce() + Send>;

/// The request that an event says has failed for good.
pub(crate) fn failure(event: &Event) -> Option<Failure> {
    let (device, bytes) = match &event.kind {
        EventKind::BlockOom(oom) => (oom.device, oom.requested.unwrap_or(oom.bytes)),
        // PyTorch's allocator flushes its cache and asks again before it gives up.
        EventKind::Call(call)
            if call.result == Some(OUT_OF_MEMORY) && !call.in_allocate && call.device >= 0 =>
        {
            (call.device, call.bytes)
        }
        EventKind::Pjrt(pjrt) if pjrt.action == PjrtAction::Failed => (pjrt.device, pjrt.bytes),
        _ => return None,
    };
    Some(Failure { time: event.time, device, bytes })
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Failure {
    time: Nanos,
    device: i16,
    bytes: Bytes,
}

/// The answering thread.
pub(crate) struct Answers {
    to: Sender<Failure>,
    counts: Arc<Counts>,
    n_told: u64,
}

#[derive(Default)]
struct Counts {
    answered: AtomicU64,
    following: AtomicU64,
}

impl Answers {
    pub(crate) fn start(
        answer: Answer,
        trace: PathBuf,
        outlet: Outlet,
        inquirer: Inquirer,
    ) -> Option<Answers> {
        let (to, from) = unbounded();
        let counts = Arc::new(Counts::default());
        let answering = Answering {
            answer,
            trace,
            outlet,
            inquirer,
            counts: Arc::clone(&counts),
            nth: 0,
            quiet_until: None,
        };
        guarded::spawn("gputrace-oom", move || answering.run(&from)).ok()?;
        Some(Answers { to, counts, n_told: 0 })
    }

    pub(crate) fn tell(&mut self, failure: Failure) {
        self.n_told += u64::from(self.to.send(failure).is_ok());
    }

    /// Waits until all are answered, and for what follows, but no longer than so.
    pub(crate) fn wait(&self, answers: Duration, following: Duration) {
        let is_answered = || self.counts.answered.load(Ordering::Acquire) >= self.n_told;
        wait_for(is_answered, answers);
        wait_for(|| self.counts.following.load(Ordering::Acquire) == 0, following);
    }
}

fn wait_for(done: impl Fn() -> bool, patience: Duration) {
    let until = Instant::now() + patience;
    while !done() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

struct Answering {
    answer: Answer,
    trace: PathBuf,
    outlet: Outlet,
    inquirer: Inquirer,
    counts: Arc<Counts>,
    nth: u64,
    quiet_until: Option<Instant>,
}

impl Answering {
    fn run(mut self, from: &Receiver<Failure>) {
        while let Ok(failure) = from.recv() {
            self.nth += 1;
            if self.nth <= FULL {
                self.in_full(failure);
            } else if self.quiet_until.is_none_or(|until| Instant::now() >= until) {
                // A program that tries again and again is not told so as often.
                self.quiet_until = Some(Instant::now() + BETWEEN);
                (self.answer)(&self.oom(failure, 0));
            }
            self.counts.answered.fetch_add(1, Ordering::Release);
        }
    }

    fn in_full(&self, failure: Failure) {
        let holders = self.inquirer.holders(failure.device, PATIENCE);
        self.outlet.send(notes(failure.device, holders));
        let Some(length) = self.outlet.settle() else { return };
        if let Some(follow_up) = (self.answer)(&self.oom(failure, length)) {
            let counts = Arc::clone(&self.counts);
            counts.following.fetch_add(1, Ordering::Release);
            let run = move || {
                follow_up();
                counts.following.fetch_sub(1, Ordering::Release);
            };
            if guarded::spawn("gputrace-oom", run).is_err() {
                self.counts.following.fetch_sub(1, Ordering::Release);
            }
        }
    }

    fn oom(&self, failure: Failure, length: u64) -> Oom {
        let Failure { time, device, bytes } = failure;
        Oom { trace: self.trace.clone(), length, time, device, bytes, nth: self.nth, full: self.nth <= FULL }
    }
}

/// `gpu.process=DEVICE PID BYTES NAME` for each, with `?` for what NVML does not tell.
fn notes(device: i16, holders: Option<Vec<Holder>>) -> Vec<Item> {
    let texts = match holders {
        None => vec![format!("gpu.processes={device} unseen: NVML is missing or did not answer")],
        Some(holders) => std::iter::once(format!("gpu.processes={device} {}", holders.len()))
            .chain(holders.into_iter().map(|holder| {
                let bytes = holder.bytes.map_or_else(|| "?".to_owned(), |bytes| bytes.to_string());
                let name = holder.name.filter(|name| !name.is_empty()).unwrap_or_else(|| "?".to_owned());
                format!("gpu.process={device} {} {bytes} {name}", holder.pid)
            }))
            .collect(),
    };
    let time = Nanos(ticks::monotonic());
    texts.into_iter().map(|text| own_event(time, EventKind::Note(text))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nvml_does_not_tell_is_marked() {
        let holders = vec![
            Holder { pid: 7, bytes: Some(9), name: Some("python3".to_owned()), is_client: None },
            Holder { pid: 8, bytes: None, name: None, is_client: None },
        ];
        let texts = |holders| -> Vec<String> {
            let text = |item| match item {
                Item::Event(Event { kind: EventKind::Note(text), .. }) => text,
                other => panic!("{other:?}"),
            };
            notes(1, holders).into_iter().map(text).collect()
        };
        assert_eq!(
            texts(Some(holders)),
            ["gpu.processes=1 2", "gpu.process=1 7 9 python3", "gpu.process=1 8 ? ?"]
        );
        assert_eq!(texts(None), ["gpu.processes=1 unseen: NVML is missing or did not answer"]);
    }
}
