//! Which part of the program something belongs to: the NVTX ranges that are open when it happens.
//!
//! A range of the whole process encloses those of a thread. Threads that never opened a range (those of PyTorch's backward
//! pass) belong to the phase of the thread that spoke last.

use gputrace_schemas::event::{Event, Mark, MarkAction, TextId, ThreadId};
use rustc_hash::FxHashMap;

use crate::Definitions;

/// Index of a phase. 0 is "outside any range".
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct PhaseId(pub u32);

/// Most phases kept apart; what is deeper belongs to the phase around it.
const MAX_PHASES: usize = 4096;
/// Deepest nesting that is kept.
const MAX_DEPTH: usize = 256;

/// The phases of a process.
#[derive(Debug)]
pub struct Phases {
    /// Path of each: names of ranges from the outermost in.
    paths: Vec<String>,
    ids: FxHashMap<(PhaseId, String), PhaseId>,
    children: FxHashMap<(PhaseId, TextId, TextId), PhaseId>,
    threads: FxHashMap<ThreadId, Vec<Open>>,
    /// Ranges of the process, in the order in which they began.
    process: Vec<(u64, Open)>,
    /// The thread that spoke last.
    speaker: Option<ThreadId>,
}

impl Default for Phases {
    fn default() -> Phases {
        Phases {
            paths: vec![String::new()],
            ids: FxHashMap::default(),
            children: FxHashMap::default(),
            threads: FxHashMap::default(),
            process: vec![],
            speaker: None,
        }
    }
}

/// A range that is open.
#[derive(Clone, Copy, Debug)]
struct Open {
    domain: TextId,
    text: TextId,
    /// The phase inside of it.
    phase: PhaseId,
}

impl Phases {
    /// The names of the ranges, outermost first, with ` > ` between; empty outside any.
    #[must_use]
    pub fn path(&self, id: PhaseId) -> &str {
        self.paths.get(id.0 as usize).map_or("", |path| path)
    }

    /// The phase that a thread is in.
    #[inline]
    #[must_use]
    pub fn now(&self, thread: ThreadId) -> PhaseId {
        if self.is_empty() { PhaseId::default() } else { self.in_ranges(thread) }
    }

    fn in_ranges(&self, thread: ThreadId) -> PhaseId {
        let own = self.threads.get(&thread);
        let stack = own.or_else(|| self.threads.get(&self.speaker?));
        match stack.and_then(|stack| stack.last()) {
            Some(open) => open.phase,
            None => self.of_process(),
        }
    }

    /// Phases kept apart, the outside included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.paths.len()
    }

    /// No range was ever opened.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.paths.len() == 1
    }

    pub(super) fn mark(&mut self, definitions: &dyn Definitions, event: &Event, mark: &Mark) {
        match mark.action {
            MarkAction::Push => {
                self.speaker = Some(event.thread);
                let around = self.now(event.thread);
                let phase = self.inside(definitions, around, mark);
                let stack = self.threads.entry(event.thread).or_default();
                if stack.len() < MAX_DEPTH {
                    stack.push(Open { domain: mark.domain, text: mark.text, phase });
                }
            }
            MarkAction::Pop => {
                let Some(stack) = self.threads.get_mut(&event.thread) else { return };
                // Each domain nests by itself.
                if let Some(at) = stack.iter().rposition(|open| open.domain == mark.domain) {
                    stack.remove(at);
                    self.rebuild(definitions, event.thread);
                }
            }
            MarkAction::Start => {
                let around = self.of_process();
                let phase = self.inside(definitions, around, mark);
                if self.process.len() < MAX_DEPTH {
                    self.process.push((mark.range, Open { domain: mark.domain, text: mark.text, phase }));
                }
                self.rebuild_all(definitions);
            }
            MarkAction::End => {
                let before = self.process.len();
                self.process.retain(|(range, _)| *range != mark.range);
                if self.process.len() != before {
                    self.rebuild_process(definitions);
                    self.rebuild_all(definitions);
                }
            }
            MarkAction::Mark | MarkAction::NameThread => {}
        }
    }

    fn of_process(&self) -> PhaseId {
        self.process.last().map_or(PhaseId::default(), |(_, open)| open.phase)
    }

    /// What a range is when it is opened inside `around`.
    fn inside(&mut self, definitions: &dyn Definitions, around: PhaseId, mark: &Mark) -> PhaseId {
        self.child(definitions, around, mark.domain, mark.text)
    }

    fn child(
        &mut self,
        definitions: &dyn Definitions,
        around: PhaseId,
        domain: TextId,
        text: TextId,
    ) -> PhaseId {
        if let Some(known) = self.children.get(&(around, domain, text)) {
            return *known;
        }
        let text_of = |id| definitions.text(id).unwrap_or("(unnamed)");
        let name = general_name(text_of(text)).to_owned();
        let name = match domain {
            // The domain of NVIDIA's Python package where the program names none.
            TextId(0) => name,
            domain if definitions.text(domain) == Some("NVTX") => name,
            domain => format!("{}: {name}", text_of(domain)),
        };
        let id = match self.ids.get(&(around, name.clone())) {
            Some(known) => *known,
            None if self.paths.len() >= MAX_PHASES => around,
            None => {
                let id = PhaseId(self.paths.len() as u32);
                let outer = self.path(around);
                let path = if outer.is_empty() { name.clone() } else { format!("{outer} > {name}") };
                self.paths.push(path);
                self.ids.insert((around, name), id);
                id
            }
        };
        self.children.insert((around, domain, text), id);
        id
    }

    fn rebuild_all(&mut self, definitions: &dyn Definitions) {
        let threads: Vec<ThreadId> = self.threads.keys().copied().collect();
        threads.into_iter().for_each(|thread| self.rebuild(definitions, thread));
    }

    /// Something below the top of a thread's ranges has changed.
    fn rebuild(&mut self, definitions: &dyn Definitions, thread: ThreadId) {
        let Some(mut stack) = self.threads.remove(&thread) else { return };
        let mut around = self.of_process();
        for open in &mut stack {
            open.phase = self.child(definitions, around, open.domain, open.text);
            around = open.phase;
        }
        self.threads.insert(thread, stack);
    }

    fn rebuild_process(&mut self, definitions: &dyn Definitions) {
        let mut process = std::mem::take(&mut self.process);
        let mut around = PhaseId::default();
        for (_, open) in &mut process {
            open.phase = self.child(definitions, around, open.domain, open.text);
            around = open.phase;
        }
        self.process = process;
    }
}

/// The name that all turns of a loop share: `step` of `step 12`; without what `emit_nvtx` counts
/// (torch/autograd/profiler.py: `aten::add, seq = 5, op_id = 9`).
pub(super) fn general_name(name: &str) -> &str {
    if let Some((label, _)) = step_of(name) {
        return label;
    }
    let counted = [", seq = ", ", op_id = "].iter().filter_map(|mark| name.find(mark)).min();
    counted.map_or(name, |at| &name[..at])
}

/// Words that name one turn of a training loop; the first ones say more.
const STEP_WORDS: &[&str] = &["step", "iteration", "iter", "batch"];

/// Name and number of a range that is one turn of a training loop: `step 12`, `ProfilerStep#3`, `train_iter_7`, `iteration`.
pub(super) fn step_of(name: &str) -> Option<(&str, Option<u64>)> {
    let label = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let number = name[label.len()..].parse().ok();
    let label =
        if number.is_some() { label.trim_end_matches([' ', '_', '#', ':', '=', '-', '/']) } else { name };
    // Nothing but a word of the list, perhaps after others: `optimizer.step` is a part of a step.
    let lower = label.to_ascii_lowercase();
    let is_step = STEP_WORDS.iter().any(|word| {
        let Some(before) = lower.strip_suffix(word) else { return false };
        let is_whole = matches!(before, "" | "profiler" | "train" | "training" | "global" | "mini");
        is_whole
            || (before.ends_with(['_', ' ', '-'])
                && !before.contains(['.', '('])
                && !before.contains("optim"))
    });
    is_step.then_some((label, number))
}

/// How much a label says: the word of a step that comes first in the list is the best.
pub(super) fn step_rank(label: &str) -> usize {
    let lower = label.to_ascii_lowercase();
    STEP_WORDS.iter().position(|word| lower.ends_with(word)).unwrap_or(STEP_WORDS.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_of_a_loop_share_a_name() {
        let check = |name, label: Option<(&str, Option<u64>)>| assert_eq!(step_of(name), label, "{name}");
        check("step 12", Some(("step", Some(12))));
        check("ProfilerStep#3", Some(("ProfilerStep", Some(3))));
        check("train_iter_7", Some(("train_iter", Some(7))));
        check("Iteration", Some(("Iteration", None)));
        check("iteration=4", Some(("iteration", Some(4))));
        check("batch: 9", Some(("batch", Some(9))));
        check("optimizer.step", None);
        check("optim_step", None);
        check("Optimizer.step#AdamW.step", None);
        check("layer 3", None);
        check("forward", None);
        assert_eq!(general_name("aten::add, seq = 5, op_id = 9"), "aten::add");
        assert_eq!(general_name("AddBackward0, op_id = 9"), "AddBackward0");
        assert_eq!(general_name("layer 3"), "layer 3");
    }

    fn check(scene: &str, expected: &[(&str, u64, u64)]) {
        let ledger = crate::scene::ledger(scene);
        let phases = &ledger.devices()[&0].phases;
        let path = |id: crate::ledger::OwnerId| ledger.phases.path(PhaseId(id.0)).to_owned();
        let found: Vec<_> =
            phases.owners().map(|part| (path(part.id), part.peak.0, part.live.bytes.0)).collect();
        let found: Vec<_> = found.iter().map(|(path, peak, live)| (path.as_str(), *peak, *live)).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn memory_belongs_to_the_ranges_that_were_open_when_it_was_asked_for() {
        check(
            "Alloc addr=a bytes=1
             push text=step_1
             Alloc addr=b bytes=2
             push text=forward domain=model
             Alloc addr=c bytes=4
             pop domain=model
             Free addr=c
             pop
             push text=step_2
             Alloc addr=d bytes=8
             pop
             Alloc addr=e bytes=16",
            &[("", 17, 17), ("step", 10, 10), ("step > model: forward", 4, 0)],
        );
    }

    #[test]
    fn silent_threads_belong_to_the_one_that_speaks_and_ranges_of_the_process_to_all() {
        check(
            "start text=warm_up range=1
             Alloc addr=a bytes=1 thread=2
             push text=backward
             Alloc addr=b bytes=2 thread=2
             end range=1
             Alloc addr=c bytes=4 thread=2
             pop
             pop
             Alloc addr=d bytes=8",
            &[("", 8, 8), ("warm up", 1, 1), ("warm up > backward", 2, 2), ("backward", 4, 4)],
        );
    }

    #[test]
    fn domains_nest_each_for_itself() {
        check(
            "push text=a
             push text=b domain=d
             pop
             Alloc addr=a bytes=1
             pop domain=d
             Alloc addr=b bytes=2",
            &[("", 2, 2), ("d: b", 1, 1)],
        );
    }
}
