//! Out-of-memory errors that were caught, and what the failed attempt still holds.
//!
//! An exception keeps its traceback, the traceback the frames, and the frames their tensors, for as long as the program is in
//! the `except` block or keeps the exception. Where the stack of the error and the next one of its thread part is where
//! it was caught:
//!
//! ```text
//!   main:26  train_step:18  forward:12     runs out of memory
//!   main:26  train_step:20  forward:10     the next stack: caught in train_step, which goes on in line 20
//!            ^ what the call in line 18 allocated, and is still there, was the attempt's
//! ```
//! What `train_step` had allocated before belongs to it: it runs on. An `except` block comes after its `try`. Where the next stack has an
//! earlier line, the program has left the block, and something else keeps the error. If that is the line with which the function had
//! begun, it was called anew, and the whole call was the attempt. The backward pass runs in threads of its own: its errors are raised where `backward()` was called.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use gputrace_schemas::event::{Bytes, Event, EventKind, Frame, Nanos, StackId, ThreadId};
use gputrace_sim::stacks::python_package;
use rustc_hash::FxHashMap;

use gputrace_analyse::story::Story;
use gputrace_report::model::{Mood, Section, Table, Value};
use gputrace_trace::Definitions;
use gputrace_trace::ledger::{Block, Held, Ledger, SiteId, Watch};
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
    /// What was still there when memory last ran out, else at the end, and belongs to no earlier attempt.
    pub still: Held,
    /// The line that had called what failed and called it anew, if the program had left the `except` block by then.
    pub tried_again_at: Option<String>,
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
    /// The serial numbers of the blocks that each of these kept.
    serials: Vec<Vec<u64>>,
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
    /// The first line of each that was seen, by its number.
    first: Vec<u32>,
    /// Since when each line has been running without one of those above it changing.
    at: Vec<Nanos>,
    /// The stack and the time of the last block.
    latest: Option<(StackId, Nanos)>,
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
    tried_again_at: Option<String>,
    /// The function at this depth was called anew: the error was caught outside of it.
    is_called_anew: bool,
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
        let thread = self.caller_of(event).unwrap_or(event.thread);
        // Frees happen while the error unwinds the stack; who asks again has caught it.
        if matches!(event.kind, EventKind::BlockAlloc(_) | EventKind::BlockOom(_)) {
            self.went_on(ledger, thread, &path);
        }
        let walk = self.threads.entry(thread).or_default();
        walk.goes_to(path, event.time);
        if matches!(event.kind, EventKind::BlockAlloc(_)) {
            walk.latest = Some((event.stack, event.time));
        }
        if let EventKind::BlockOom(oom) = &event.kind {
            self.judge(ledger, Some((oom.device, event.time)));
            self.look_again(ledger, oom.device);
            let walk = self.threads.get(&thread).cloned().unwrap_or_default();
            if self.found.len() + self.open.len() < MAX_CAUGHT {
                self.open.push(Open { time: event.time, device: oom.device, thread, walk, caught: None });
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
            serials: vec![],
        }
    }

    /// What was caught, oldest first, when `ledger` has seen the whole trace.
    #[must_use]
    pub fn finish(mut self, ledger: &Ledger) -> Vec<CaughtOom> {
        self.judge(ledger, None);
        self.found
    }

    /// Of an event in the backward pass, the thread that called `backward()`: the one that was last seen there.
    fn caller_of(&self, event: &Event) -> Option<ThreadId> {
        let backward = self.definitions.stack(event.stack)?.backward.as_ref()?;
        let caller = self.paths.get(&event.stack).filter(|_| backward.caller.0 != 0)?;
        let seen = self.threads.iter().filter(|(_, walk)| !walk.path.is_empty());
        let seen =
            seen.map(|(thread, walk)| (common_functions(&walk.path, caller), Reverse(thread.0), *thread));
        seen.max().filter(|(n, ..)| *n > 0).map(|(.., thread)| thread)
    }

    /// The first request of a thread after its error shows where that was caught.
    fn went_on(&mut self, ledger: &Ledger, thread: ThreadId, path: &Path) {
        let waiting = |open: &&mut Open| open.thread == thread && open.caught.is_none();
        for open in self.open.iter_mut().filter(waiting) {
            let failed = &open.walk.path;
            let depth = common(failed, path).min(failed.len() - 1).min(path.len() - 1);
            let find = |number: u32| self.lines.iter().find(|(_, id)| **id == number).map(|(line, _)| line);
            let line = find(path[depth].0);
            let went_on = line.map(Line::in_words).unwrap_or_default();
            let is_up_to = |number: u32, is_same: bool| {
                line.zip(find(number)).is_some_and(|(line, other)| {
                    (&line.function, &line.file) == (&other.function, &other.file)
                        && (line.line < other.line || is_same && line.line == other.line)
                })
            };
            let is_before = is_up_to(failed[depth].0, false);
            let is_called_anew = is_before && depth > 0 && is_up_to(open.walk.first[depth], true);
            let tried_again_at = match is_before {
                true => Some(find(path[depth.saturating_sub(1)].0).map(Line::in_words).unwrap_or_default()),
                false => None,
            };
            // A convolution tries one plan after the other, and catches what each needs too much.
            let innermost = failed.last().and_then(|last| find(last.0));
            let is_convolution = innermost.is_some_and(|line| line.function.contains("conv"));
            // The lines of both are the same but for the last, which the operation that failed is part of.
            let is_in_place = depth + 1 >= failed.len() && is_convolution;
            // One that fails frees its own result: where that is still there, it found another plan.
            let is_there = |(stack, time): (StackId, Nanos)| {
                self.paths.get(&stack) == Some(failed)
                    && ledger.live_blocks().any(|(_, block)| block.stack == stack && block.since == time)
            };
            let has_returned = is_convolution && open.walk.latest.is_some_and(is_there);
            let is_user_code = line.is_some_and(|line| python_package(&line.file).is_none())
                && !is_in_place
                && !has_returned
                && failed[..=depth] != path[..=depth];
            open.caught = Some(CaughtIn { depth, went_on, is_user_code, tried_again_at, is_called_anew });
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
            let (kept, serials) = match caught.is_user_code {
                true => self.kept(ledger, &open, caught.depth - usize::from(caught.is_called_anew)),
                false => Default::default(),
            };
            self.serials.push(serials);
            self.found.push(CaughtOom {
                time: open.time,
                device: open.device,
                went_on: caught.went_on.clone(),
                is_user_code: caught.is_user_code,
                again: again.map(|(_, time)| time),
                kept,
                still: Held::default(),
                tried_again_at: caught.tried_again_at.clone(),
            });
        }
        if again.is_none() {
            let mut devices: Vec<i16> =
                self.found.iter().filter(|it| it.again.is_none()).map(|it| it.device).collect();
            devices.dedup();
            devices.into_iter().for_each(|device| self.look_again(ledger, device));
        }
    }

    /// What attempts still hold, each block counted once.
    fn look_again(&mut self, ledger: &Ledger, device: i16) {
        let blocks = ledger.live_blocks().map(|(_, block)| block).filter(|block| block.device == device);
        let mut live: FxHashMap<u64, Bytes> = FxHashMap::default();
        if self.found.iter().any(|it| it.device == device && !it.kept.is_empty()) {
            live = blocks.map(|block| (block.serial, block.bytes)).collect();
        }
        for (it, serials) in self.found.iter_mut().zip(&self.serials).filter(|(it, _)| it.device == device) {
            let still = serials.iter().filter_map(|serial| live.remove(serial));
            it.still = still.fold(Held::default(), |held, bytes| Held {
                bytes: Bytes(held.bytes.0 + bytes.0),
                objects: held.objects + 1,
            });
        }
    }

    /// What the call that failed had made: that in the line at a depth, which was there all along.
    fn kept(&mut self, ledger: &Ledger, open: &Open, depth: usize) -> (Vec<(SiteId, Held)>, Vec<u64>) {
        let mut kept: BTreeMap<SiteId, Held> = BTreeMap::new();
        let mut serials = vec![];
        let attempt = open.walk.at[depth]..=open.time;
        let blocks = ledger.live_blocks().map(|(_, block)| block);
        // Gradients are their parameters', whatever becomes of the error.
        let is_of_backward =
            |block: &Block| self.definitions.stack(block.stack).is_some_and(|stack| stack.backward.is_some());
        let blocks: Vec<&Block> = blocks
            .filter(|block| block.device == open.device && attempt.contains(&block.since))
            .filter(|block| !is_of_backward(block))
            .collect();
        for block in blocks {
            if self.path(block.stack).starts_with(&open.walk.path[..=depth]) {
                let held = kept.entry(block.site).or_default();
                held.bytes.0 += block.bytes.0;
                held.objects += 1;
                serials.push(block.serial);
            }
        }
        let mut kept: Vec<_> = kept.into_iter().collect();
        kept.sort_by_key(|(site, held)| (Reverse(held.bytes), *site));
        (kept, serials)
    }

    fn path(&mut self, stack: StackId) -> Path {
        if let Some(path) = self.paths.get(&stack) {
            return path.clone();
        }
        let known = self.definitions.stack(stack);
        let caller = known.and_then(|it| self.definitions.stack(it.backward.as_ref()?.caller));
        let frames = caller.or(known).map_or(&[][..], |stack| &stack.frames);
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

impl Line {
    fn in_words(&self) -> String {
        format!("{} ({}:{})", self.function, self.file, self.line)
    }
}

impl Walk {
    fn goes_to(&mut self, path: Path, time: Nanos) {
        let common = common(&self.path, &path);
        // The function in which the paths part has been running all along, unless it is another.
        let same_function =
            matches!((self.path.get(common), path.get(common)), (Some(a), Some(b)) if a.1 == b.1);
        self.since.truncate(common + usize::from(same_function));
        self.first.truncate(self.since.len());
        self.since.resize(path.len(), time);
        self.first.extend(path.iter().skip(self.first.len()).map(|(line, _)| *line));
        self.at.truncate(common);
        self.at.resize(path.len(), time);
        self.path = path;
    }
}

fn common(a: &Path, b: &Path) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

fn common_functions(a: &Path, b: &Path) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a.1 == b.1).count()
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
    fn a_convolution_that_returned_with_another_plan_was_no_caught_exception() {
        let conv = "_conv_forward@/lib/torch/nn/modules/conv.py:5,forward@a.py:17,main@a.py:26";
        let scene = format!(
            "block addr=a bytes=8M by=silu@/lib/torch/nn/functional.py:3,forward@a.py:17,main@a.py:26
             block addr=o bytes=32M by={conv}
             oom bytes=64M by={conv}
             block addr=c bytes=16M by=forward@a.py:18,main@a.py:26
             oom bytes=64M by=forward@a.py:19,main@a.py:26"
        );
        assert_eq!(caught(&scene), [("forward (a.py:18)".into(), true, 0)]);
        // One that failed has freed its result.
        let raised = scene.replace(
            &format!("oom bytes=64M by={conv}"),
            &format!("free addr=o bytes=32M by={conv}\noom bytes=64M by={conv}"),
        );
        assert_eq!(caught(&raised), [("forward (a.py:18)".into(), true, 8 << 20)]);
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
    fn each_block_of_several_attempts_counts_once_and_those_of_the_backward_pass_are_raised_at_its_call() {
        let attempt = |n: u32, bytes: u32| {
            format!(
                "block addr=x{n} bytes={bytes}M by=step@a.py:21,main@a.py:38
                 block addr=a{n} bytes={bytes}M by=forward@a.py:10,step@a.py:22,main@a.py:38\n"
            )
        };
        let scene = format!(
            "block addr=w bytes=7M by=main@a.py:1\n{}{}{}",
            attempt(1, 64),
            "block addr=g bytes=5M by=^AddmmBackward0^forward@a.py:10^step@a.py:24,main@a.py:38
             oom bytes=64M by=^AddmmBackward0^forward@a.py:10^step@a.py:24,main@a.py:38\n",
            attempt(2, 32) + "oom bytes=32M by=forward@a.py:10,step@a.py:22,main@a.py:38\n" + &attempt(3, 1)
        );
        let source = Source::of("train.gtr", recording(&scene));
        let mut caught = Caught::new(source.definitions());
        let story = Story::watched(&source, &mut caught);
        let found: Vec<_> = caught
            .finish(&story.ledger)
            .into_iter()
            .map(|it| (it.tried_again_at.unwrap_or_default(), it.still.bytes.0 >> 20))
            .collect();
        let line = "main (a.py:38)".to_owned();
        assert_eq!(found, [(line.clone(), 128), (line, 64)]);
    }

    #[test]
    fn what_the_function_that_caught_it_had_before_is_not_of_the_attempt() {
        let scene = |next: u32| {
            format!(
                "block addr=w bytes=32M by=main@a.py:3
                 block addr=x bytes=8M by=main@a.py:37
                 block addr=a bytes=64M by=forward@a.py:10,main@a.py:38
                 oom bytes=64M by=forward@a.py:12,main@a.py:38
                 block addr=y bytes=4M by=main@a.py:{next}"
            )
        };
        for next in [37, 42] {
            assert_eq!(caught(&scene(next)), [(format!("main (a.py:{next})"), false, 64 << 20)]);
        }
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
