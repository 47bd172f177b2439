//! Out-of-memory errors that were caught, and what the failed attempt still holds.
//!
//! An exception keeps its traceback, the traceback the frames, and the frames their tensors, for as long as the program is in
//! the `except` block or keeps the exception. Where the stack of the error and the next one of its thread part is where
//! it was caught:
//!
//! ```text
//!   main:26  train_step:18  forward:12     runs out of memory
//!   main:26  train_step:20  forward:10     the next stack: caught in train_step, which goes on in line 20
//!            ^ what was allocated below train_step since it was entered, and is still there, was the attempt's
//! ```

use std::cmp::Reverse;
use std::collections::BTreeMap;

use gputrace_schemas::event::{Bytes, Event, EventKind, Frame, Nanos, StackId, ThreadId};
use gputrace_sim::stacks::python_package;
use rustc_hash::FxHashMap;

use gputrace_analyse::story::Story;
use gputrace_report::model::{Mood, Section, Table, Value};
use gputrace_trace::Definitions;
use gputrace_trace::ledger::{Held, Ledger, SiteId, Watch};
use gputrace_trace::words::{bytes, time};

/// Most errors looked at; a program that runs out more often does so on purpose.
const MAX_CAUGHT: usize = 64;

/// An error after which the program continued.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CaughtOom {
    /// When memory ran out.
    pub time: Nanos,
    /// On which device.
    pub device: i16,
    /// The line that continued: in the function that caught it.
    pub went_on: String,
    /// That line is the program's: an `except` of its own. Libraries catch it, too: cuDNN's plans are tried until one fits.
    pub is_user_code: bool,
    /// When memory ran out again; `None`: it did not, and the trace ended.
    pub again: Option<Nanos>,
    /// What the attempt had allocated and was still there then, most first.
    pub kept: Vec<(SiteId, Held)>,
}

impl CaughtOom {
    /// All of it.
    pub fn kept_bytes(&self) -> Bytes {
        Bytes(self.kept.iter().map(|(_, held)| held.bytes.0).sum())
    }
}

/// Watches for errors that are caught.
pub struct Caught<'a> {
    definitions: &'a dyn Definitions,
    lines: FxHashMap<Line, u32>,
    paths: FxHashMap<StackId, Path>,
    threads: FxHashMap<ThreadId, Walk>,
    open: Vec<Open>,
    found: Vec<CaughtOom>,
}

/// Lines of Python, outermost first, each with the number of its function.
type Path = Vec<(u32, u32)>;

#[derive(Clone, PartialEq, Eq, Hash)]
struct Line {
    function: String,
    file: String,
    /// 0 for the function as a whole.
    line: u32,
}

/// The last stack of a thread, and since when each of its functions has been running without one of the lines above it changing.
#[derive(Clone, Default)]
struct Walk {
    path: Path,
    since: Vec<Nanos>,
}

/// An error, until it is known what became of it.
struct Open {
    time: Nanos,
    device: i16,
    thread: ThreadId,
    walk: Walk,
    caught: Option<CaughtIn>,
}

struct CaughtIn {
    depth: usize,
    went_on: String,
    is_user_code: bool,
}

impl Watch for Caught<'_> {
    fn begin(&mut self, _ledger: &mut Ledger) {
        *self = Caught::new(self.definitions);
    }

    fn event(&mut self, ledger: &mut Ledger, event: &Event) {
        let path = self.path(event.stack);
        if path.is_empty() {
            return;
        }
        // Frees happen while the error unwinds the stack; who asks again has caught it.
        if matches!(event.kind, EventKind::BlockAlloc(_) | EventKind::BlockOom(_)) {
            self.went_on(event.thread, &path);
        }
        self.threads.entry(event.thread).or_default().goes_to(path, event.time);
        if let EventKind::BlockOom(oom) = &event.kind {
            self.judge(ledger, Some((oom.device, event.time)));
            let walk = self.threads.get(&event.thread).cloned().unwrap_or_default();
            if self.found.len() + self.open.len() < MAX_CAUGHT {
                self.open.push(Open {
                    time: event.time,
                    device: oom.device,
                    thread: event.thread,
                    walk,
                    caught: None,
                });
            }
        }
    }
}

impl<'a> Caught<'a> {
    /// In a trace with these definitions.
    #[must_use]
    pub fn new(definitions: &'a dyn Definitions) -> Caught<'a> {
        Caught {
            definitions,
            lines: FxHashMap::default(),
            paths: FxHashMap::default(),
            threads: FxHashMap::default(),
            open: vec![],
            found: vec![],
        }
    }

    /// What was caught, oldest first, when `ledger` has seen the whole trace.
    #[must_use]
    pub fn finish(mut self, ledger: &Ledger) -> Vec<CaughtOom> {
        self.judge(ledger, None);
        self.found
    }

    /// The first request of a thread after its error shows where that was caught.
    fn went_on(&mut self, thread: ThreadId, path: &Path) {
        let waiting = |open: &&mut Open| open.thread == thread && open.caught.is_none();
        for open in self.open.iter_mut().filter(waiting) {
            let failed = &open.walk.path;
            let depth = common(failed, path).min(failed.len() - 1).min(path.len() - 1);
            let line = self.lines.iter().find(|(_, id)| **id == path[depth].0).map(|(line, _)| line);
            let went_on = line
                .map(|line| format!("{} ({}:{})", line.function, line.file, line.line))
                .unwrap_or_default();
            // A convolution tries one plan after the other, and catches what each needs too much.
            let innermost = failed.last().and_then(|last| self.lines.iter().find(|(_, id)| **id == last.0));
            let is_convolution = innermost.is_some_and(|(line, _)| line.function.contains("conv"));
            // The lines of both are the same but for the last, which the operation that failed is part of.
            let is_in_place = depth + 1 >= failed.len() && is_convolution;
            let is_user_code = line.is_some_and(|line| python_package(&line.file).is_none())
                && !is_in_place
                && failed[..=depth] != path[..=depth];
            open.caught = Some(CaughtIn { depth, went_on, is_user_code });
        }
    }

    /// Memory ran out again on a device, or the trace is over.
    fn judge(&mut self, ledger: &Ledger, again: Option<(i16, Nanos)>) {
        let is_due = |open: &Open| again.is_none_or(|(device, _)| open.device == device);
        let (due, open) = std::mem::take(&mut self.open).into_iter().partition(is_due);
        self.open = open;
        let due: Vec<Open> = due;
        for open in due {
            let Some(caught) = &open.caught else { continue };
            let kept = if caught.is_user_code { self.kept(ledger, &open, caught.depth) } else { vec![] };
            self.found.push(CaughtOom {
                time: open.time,
                device: open.device,
                went_on: caught.went_on.clone(),
                is_user_code: caught.is_user_code,
                again: again.map(|(_, time)| time),
                kept,
            });
        }
    }

    fn kept(&mut self, ledger: &Ledger, open: &Open, depth: usize) -> Vec<(SiteId, Held)> {
        let mut kept: BTreeMap<SiteId, Held> = BTreeMap::new();
        let attempt = open.walk.since[depth]..=open.time;
        let blocks = ledger.live_blocks().map(|(_, block)| block);
        for block in blocks.filter(|block| block.device == open.device && attempt.contains(&block.since)) {
            let path = self.path(block.stack);
            let failed = &open.walk.path;
            let is_below =
                path.len() > depth && path[..depth] == failed[..depth] && path[depth].1 == failed[depth].1;
            if is_below {
                let held = kept.entry(block.site).or_default();
                held.bytes.0 += block.bytes.0;
                held.objects += 1;
            }
        }
        let mut kept: Vec<_> = kept.into_iter().collect();
        kept.sort_by_key(|(site, held)| (Reverse(held.bytes), *site));
        kept
    }

    fn path(&mut self, stack: StackId) -> Path {
        if let Some(path) = self.paths.get(&stack) {
            return path.clone();
        }
        let frames = self.definitions.stack(stack).map_or(&[][..], |stack| &stack.frames);
        let frames = frames.iter().rev().filter_map(|id| self.definitions.frame(*id));
        let mut path = vec![];
        for frame in frames {
            let Frame::Python { function, file, line } = frame else { continue };
            let mut number = |line| {
                let next = self.lines.len() as u32;
                *self
                    .lines
                    .entry(Line { function: function.clone(), file: file.clone(), line })
                    .or_insert(next)
            };
            path.push((number(*line), number(0)));
        }
        self.paths.insert(stack, path.clone());
        path
    }
}

impl Walk {
    fn goes_to(&mut self, path: Path, time: Nanos) {
        let common = common(&self.path, &path);
        // The function in which the paths part has been running all along, unless it is another.
        let same_function =
            matches!((self.path.get(common), path.get(common)), (Some(a), Some(b)) if a.1 == b.1);
        self.since.truncate(common + usize::from(same_function));
        self.since.resize(path.len(), time);
        self.path = path;
    }
}

fn common(a: &Path, b: &Path) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// What caught errors still hold; `None` if that is nothing.
#[must_use]
pub fn section(story: &Story, caught: &[CaughtOom]) -> Option<Section> {
    let mut section = Section::new("caught", "Memory still held by a caught error");
    let (mut any, mut n_more) = (false, 0u64);
    for oom in caught.iter().filter(|oom| oom.kept_bytes().0 > 0) {
        if any {
            n_more += 1;
            continue;
        }
        any = true;
        section = described(section, story, oom);
    }
    if n_more > 0 {
        section = section.line(Mood::Note, format!("{n_more} more errors were caught that way"));
    }
    let advice = "an exception keeps its traceback, the traceback keeps the frames of the failed attempt, and the frames keep their tensors: leave the `except` block before you try again, and keep str(error) instead of the error";
    any.then(|| section.line(Mood::Note, advice).warn(story.caveats()))
}

fn described(section: Section, story: &Story, oom: &CaughtOom) -> Section {
    let (ran_out, kept) = (time(story.since_start(oom.time)), bytes(oom.kept_bytes()));
    let then = match oom.again {
        Some(again) => format!("When memory ran out again at {}", time(story.since_start(again))),
        None => "At the end of the trace".to_owned(),
    };
    let mut table =
        Table::new("kept", &[("bytes", "bytes"), ("objects", "number"), ("call_site", "allocated at")]);
    for (site, held) in &oom.kept {
        table.rows.push(vec![
            Value::Bytes(held.bytes),
            Value::Count(held.objects),
            Value::text(story.ledger.sites.site(*site).map(ToString::to_string).unwrap_or_default()),
        ]);
    }
    section
        .line(
            Mood::Bad,
            format!(
                "memory ran out on cuda:{} at {ran_out}; the error was caught, and the program continued at {}. {then} the failed attempt still held {kept}:",
                oom.device, oom.went_on
            ),
        )
        .table(table.keep(5, 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use gputrace_trace::scene::recording;
    use gputrace_trace::source::Source;

    fn caught(scene: &str) -> Vec<(String, bool, u64)> {
        let source = Source::of("train.gtr", recording(scene));
        let mut caught = Caught::new(source.definitions());
        let story = Story::watched(&source, &mut caught);
        let found = caught.finish(&story.ledger);
        found.iter().map(|oom| (oom.went_on.clone(), oom.again.is_some(), oom.kept_bytes().0)).collect()
    }

    #[test]
    fn what_the_failed_attempt_holds_in_the_except_block_is_found() {
        let scene = "block addr=w bytes=7M by=main@a.py:1
             block addr=o bytes=1M by=forward@a.py:12,step@a.py:18,main@a.py:20
             block addr=a bytes=64M by=forward@a.py:10,step@a.py:18,main@a.py:26
             block addr=b bytes=32M by=forward@a.py:12,step@a.py:18,main@a.py:26
             block addr=t bytes=9M by=forward@a.py:12,step@a.py:18,main@a.py:26
             free addr=t bytes=9M by=forward@a.py:12,step@a.py:18,main@a.py:26
             oom bytes=64M by=forward@a.py:12,step@a.py:18,main@a.py:26
             block addr=c bytes=16M by=forward@a.py:10,step@a.py:20,main@a.py:26
             oom bytes=32M by=forward@a.py:12,step@a.py:20,main@a.py:26";
        assert_eq!(caught(scene), [("step (a.py:20)".to_owned(), true, 96 << 20)]);
    }

    #[test]
    fn an_attempt_that_is_let_go_holds_nothing() {
        let scene = "block addr=a bytes=64M by=forward@a.py:10,main@a.py:5
             oom bytes=64M by=forward@a.py:12,main@a.py:5
             free addr=a bytes=64M by=main@a.py:7
             block addr=c bytes=16M by=forward@a.py:10,main@a.py:9";
        assert_eq!(caught(scene), [("main (a.py:9)".to_owned(), false, 0)]);
    }

    #[test]
    fn an_exception_that_is_kept_holds_until_the_end() {
        let scene = "block addr=z bytes=1M by=forward@a.py:10,main@a.py:5
             free addr=z bytes=1M by=main@a.py:6
             block addr=a bytes=64M by=forward@a.py:10,main@a.py:5
             oom bytes=64M by=forward@a.py:12,main@a.py:5
             block addr=c bytes=16M by=forward@a.py:10,main@a.py:9";
        assert_eq!(caught(scene), [("main (a.py:9)".to_owned(), false, 64 << 20)]);
    }
}
