//! A process of a job of several ranks that has been silent for long: the stacks of its threads go into the trace, so that a job that is
//! killed while it hangs says what each of its ranks did.
//!
//! Silence is no hang: a server that nobody asks is silent, too. So a stack costs little (milliseconds of the recorder, nothing of
//! the process, some kilobytes), and the pauses grow: at 1, 4, 10, 22, ... minutes of silence where `--hang-after` is a minute.

use crate::drain::{Happened, Stamped};
use crate::guarded;
use crate::process::Target;
use crate::thread_stacks::{End, How, NoStacks, Stacks, stacks};
use crate::translate::Translator;
use crossbeam_channel::{Receiver, bounded};
use gputrace_schemas::event::{Event, EventKind, Frame, FrameId, Nanos, Stack, StackRead};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// What `--hang-after` is by default.
pub(crate) const HANG_AFTER: Duration = Duration::from_secs(60);
/// From the first stacks of a silence to the next, as a multiple of `--hang-after`; twice as long after each.
const AGAIN: u32 = 3;
/// The longest of these pauses.
const LONGEST: Duration = Duration::from_secs(3600);

/// What was read, and for how long the process had been silent then.
pub(crate) type Read = (Result<Stacks, NoStacks>, Duration);

/// Watches for silence.
pub(crate) struct Standstill {
    /// `None`: it is not watched.
    after: Option<Duration>,
    /// It uses NCCL, or its environment names its rank: others may wait for it.
    is_of_job: bool,
    silent_since: Instant,
    due: Instant,
    pause: Duration,
    asked: Option<Receiver<Read>>,
    /// Frames that the trace has.
    frames: HashMap<Frame, FrameId>,
}

impl Standstill {
    pub(crate) fn new(after: Option<Duration>, is_of_job: bool) -> Standstill {
        let now = Instant::now();
        let due = now + after.unwrap_or_default();
        Standstill {
            after,
            is_of_job,
            silent_since: now,
            due,
            pause: after.unwrap_or_default() * AGAIN,
            asked: None,
            frames: HashMap::new(),
        }
    }

    /// Something happened in the process.
    pub(crate) fn event(&mut self, stamped: &Stamped) {
        self.is_of_job |= matches!(stamped.what, Happened::NcclEnter(..));
    }

    /// It is not silent.
    pub(crate) fn busy(&mut self) {
        self.silent_since = Instant::now();
        self.due = self.silent_since + self.after.unwrap_or_default();
        self.pause = self.after.unwrap_or_default() * AGAIN;
    }

    /// Begins to read stacks, if it is time, and gives what has been read.
    pub(crate) fn look(&mut self, target: &Target) -> Option<Read> {
        self.after?;
        if let Some(read) = self.asked.as_ref().and_then(|asked| asked.try_recv().ok()) {
            self.asked = None;
            return Some(read);
        }
        let now = Instant::now();
        let pid = target.in_proc().filter(|_| self.is_of_job && self.asked.is_none() && now >= self.due)?;
        self.due = now + self.pause;
        self.pause = (self.pause * 2).min(LONGEST);
        let silent = now - self.silent_since;
        let (answer, asked) = bounded(1);
        let read = move || {
            let _ = answer.send((stacks(pid), silent));
        };
        // Where there is no thread for it, the ring must not wait.
        if guarded::spawn("gputrace-stacks", read).is_ok() {
            self.asked = Some(asked);
        }
        None
    }

    /// Puts into the trace what was read.
    pub(crate) fn write(&mut self, to: &mut Translator, time: Nanos, (read, silent): Read) {
        let silent = nanos(silent);
        let read = match read {
            Ok(read) => read,
            Err(why) => return to.note(time, format!("stacks.read=refused: {why}")),
        };
        for left_out in &read.left_out {
            to.note(time, format!("stacks.left_out={left_out}"));
        }
        if let Some(why) = &read.no_python {
            to.note(time, format!("stacks.python=none: {why}"));
        }
        for read in read.threads.iter().filter(|read| !read.frames.is_empty()) {
            let frames = read.frames.iter().map(|frame| self.frame(to, frame)).collect();
            let truncated = !matches!(read.how, How::None(_)) && read.end != End::Whole;
            let stack = to.stack(Stack { frames, truncated, ..Stack::default() });
            let thread = to.thread_of(read.tid, &read.name);
            let stopped = match &read.how {
                How::Stopped(time) => Some(nanos(*time)),
                How::Waiting | How::None(_) => None,
            };
            let note = StackRead { silent, state: read.state, is_torn: read.is_torn, stopped };
            to.push(Event { time, thread, stack, kind: EventKind::Note(note.to_string()) });
        }
    }

    fn frame(&mut self, to: &mut Translator, frame: &Frame) -> FrameId {
        let frame = match frame {
            // Modules have other numbers in the trace.
            Frame::Native { address, function, file, line, inlined, .. } => Frame::Native {
                address: *address,
                module: to.module_at(address.saturating_sub(1)),
                function: function.clone(),
                file: file.clone(),
                line: *line,
                inlined: *inlined,
            },
            Frame::Python { .. } => frame.clone(),
        };
        *self.frames.entry(frame.clone()).or_insert_with(|| to.frame(frame))
    }
}

fn nanos(time: Duration) -> Nanos {
    Nanos(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}
