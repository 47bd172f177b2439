//! PyTorch's backward pass: which forward operation an operation undoes, and which thread called `backward()`.
//!
//! ```text
//!  thread 1   Forward{1, 7, stack of model.py:12}      Backward begins{stack of train.py:88} ──────── ends
//!  autograd's                                                Node{1, 7, AddmmBackward0}  alloc
//! ```
//!
//! says that the allocation is the backward pass's of `model.py:12`, and that `train.py:88` called it.

use crate::drain::Lane;
use gputrace_ring::record::{Backward, Forward, Node, Operation};
use std::collections::{HashMap, VecDeque};

/// Forward operations that are remembered of a thread, 8 bytes each: a graph with more is rarer than the memory.
const MOST_OPERATIONS: usize = 1 << 20;
/// Threads whose operations are remembered.
const MOST_THREADS: usize = 64;
/// Calls of `backward()` that may be inside of each other, over all threads.
const MOST_OPEN: usize = 256;
/// The releases whose operations the shim reads where they are: `(major, minor)`.
pub(crate) const RELEASES: std::ops::RangeInclusive<(u32, u32)> = (2, 1)..=(2, 15);

/// What an event has to do with the backward pass. Stacks by the ids of the ring, 0 unknown.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct Context {
    /// [`Node::class`]; 0 none.
    pub(crate) class: u64,
    pub(crate) forward: u64,
    pub(crate) caller: u64,
    pub(crate) is_caller_inferred: bool,
}

/// What is known of the process's autograd.
#[derive(Default)]
pub(crate) struct Autograd {
    threads: Vec<Operations>,
    classes: HashMap<u64, String>,
    open: Vec<Open>,
    is_other_release: bool,
}

/// The stacks of a thread's forward operations, by their numbers.
struct Operations {
    thread: u64,
    first: u64,
    stacks: VecDeque<u64>,
}

/// A thread inside of `backward()`.
#[derive(Clone, Copy)]
struct Open {
    lane: Lane,
    backward: Backward,
}

impl Autograd {
    /// The release of PyTorch, as soon as it is known: of others, the operations' places are not.
    pub(crate) fn release(&mut self, version: &str) {
        let mut numbers = version.split(['.', '+', 'a']).map_while(|part| part.parse::<u32>().ok());
        if let (Some(major), Some(minor)) = (numbers.next(), numbers.next()) {
            self.is_other_release = !RELEASES.contains(&(major, minor));
        }
    }

    /// Whether the shim's words cannot be relied on.
    pub(crate) fn is_other_release(&self) -> bool {
        self.is_other_release
    }

    pub(crate) fn class(&mut self, number: u64, name: String) {
        self.classes.insert(number, name);
    }

    /// The mangled name of a class.
    pub(crate) fn class_name(&self, number: u64) -> &str {
        self.classes.get(&number).map_or("", |name| name)
    }

    pub(crate) fn forward(&mut self, forward: &Forward) {
        let Some(Operation { thread, sequence: Some(sequence) }) = Operation::decode(forward.operation)
        else {
            return;
        };
        let at = match self.threads.iter().position(|known| known.thread == thread) {
            Some(at) => at,
            None => {
                if self.threads.len() == MOST_THREADS {
                    self.threads.remove(0);
                }
                self.threads.push(Operations { thread, first: sequence, stacks: VecDeque::new() });
                self.threads.len() - 1
            }
        };
        if let Some(operations) = self.threads.get_mut(at) {
            operations.add(sequence, forward.stack);
        }
    }

    /// A thread enters or leaves `backward()`.
    pub(crate) fn backward(&mut self, lane: Lane, backward: Backward) {
        // What lies deeper on the same stack has ended, perhaps by an exception that nobody told about.
        self.open.retain(|open| open.lane != lane || open.backward.frame > backward.frame);
        if backward.begins != 0 && self.open.len() < MOST_OPEN {
            self.open.push(Open { lane, backward });
        }
    }

    /// Nothing more will come of a thread.
    pub(crate) fn end_lane(&mut self, lane: Lane) {
        self.open.retain(|open| open.lane != lane);
    }

    /// What an event on `lane` has to do with the backward pass. `is_engine`: the thread is one of autograd's own.
    pub(crate) fn context(&self, lane: Lane, node: &Node, is_engine: bool) -> Context {
        let operation = Operation::decode(node.operation);
        if self.is_other_release || (operation.is_none() && !is_engine) {
            return Context::default();
        }
        let (caller, is_caller_inferred) = self.caller(lane, operation.map(|operation| operation.thread));
        let forward = operation.and_then(|operation| self.stack_of(operation)).unwrap_or_default();
        Context { class: node.class, forward, caller, is_caller_inferred }
    }

    fn stack_of(&self, operation: Operation) -> Option<u64> {
        self.threads.iter().find(|known| known.thread == operation.thread)?.stack(operation.sequence?)
    }

    /// Where another thread called `backward()`, and whether there is doubt. `forward` is the thread of the forward
    /// operation.
    fn caller(&self, lane: Lane, forward: Option<u64>) -> (u64, bool) {
        if self.open.iter().any(|open| open.lane == lane) {
            return (0, false); // This thread did: its own stack says where.
        }
        match self.open.as_slice() {
            [] => (0, false),
            [only] => (only.backward.stack, false),
            several => {
                let mut of_forward =
                    several.iter().rev().filter(|open| Some(open.backward.thread) == forward);
                of_forward.next().map_or((0, false), |open| (open.backward.stack, true))
            }
        }
    }
}

impl Operations {
    fn add(&mut self, sequence: u64, stack: u64) {
        let end = self.first.saturating_add(self.stacks.len() as u64);
        if sequence < self.first || sequence.saturating_sub(end) >= MOST_OPERATIONS as u64 {
            // Numbers do not go back, and a gap this wide leaves nothing worth keeping.
            self.stacks.clear();
            self.first = sequence;
        } else if sequence < end {
            if let Some(known) = self.stacks.get_mut((sequence - self.first) as usize) {
                *known = stack;
            }
            return;
        } else {
            // Numbers that were lost on their way.
            self.stacks.extend(std::iter::repeat_n(0, (sequence - end) as usize));
        }
        self.stacks.push_back(stack);
        while self.stacks.len() > MOST_OPERATIONS {
            self.stacks.pop_front();
            self.first += 1;
        }
    }

    fn stack(&self, sequence: u64) -> Option<u64> {
        self.stacks.get(usize::try_from(sequence.checked_sub(self.first)?).ok()?).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENGINE: Lane = Lane(9);

    fn operation(thread: u64, sequence: u64) -> u64 {
        let sequence = Some(sequence).filter(|number| *number != NONE);
        Operation { thread, sequence }.encode().expect("small numbers")
    }

    /// An operation that undoes none.
    const NONE: u64 = u64::MAX;

    fn autograd() -> Autograd {
        let mut autograd = Autograd::default();
        for (thread, sequence, stack) in [(1, 5, 500), (1, 6, 600), (2, 5, 501), (1, 9, 900)] {
            autograd.forward(&Forward { operation: operation(thread, sequence), stack });
        }
        autograd
    }

    fn begin(autograd: &mut Autograd, lane: u32, thread: u64, stack: u64, frame: u64) {
        autograd.backward(Lane(lane), Backward { thread, stack, frame, begins: 1 });
    }

    fn node(thread: u64, sequence: u64) -> Node {
        Node { operation: operation(thread, sequence), class: 7 }
    }

    #[test]
    fn an_operation_is_found_by_its_number_and_thread() {
        let autograd = autograd();
        let forward = |thread, sequence| autograd.context(ENGINE, &node(thread, sequence), true).forward;
        assert_eq!([forward(1, 5), forward(1, 6), forward(2, 5), forward(1, 9)], [500, 600, 501, 900]);
        // Lost, before the first, after the last, of another thread, and one that undoes nothing.
        let unknown = [forward(1, 7), forward(1, 4), forward(1, 10), forward(3, 5), forward(1, NONE)];
        assert_eq!(unknown, [0; 5]);
    }

    #[test]
    fn the_oldest_operations_are_forgotten_first() {
        let mut autograd = Autograd::default();
        for sequence in 0..MOST_OPERATIONS as u64 + 10 {
            autograd.forward(&Forward { operation: operation(1, sequence), stack: sequence + 1 });
        }
        let forward = |sequence| autograd.context(ENGINE, &node(1, sequence), true).forward;
        assert_eq!([forward(9), forward(10)], [0, 11]);
        assert_eq!(autograd.threads[0].stacks.len(), MOST_OPERATIONS);
    }

    #[test]
    fn the_only_caller_of_backward_is_the_caller() {
        let mut autograd = autograd();
        begin(&mut autograd, 1, 1, 88, 4096);
        let context = autograd.context(ENGINE, &node(1, 5), false);
        assert_eq!(context, Context { class: 7, forward: 500, caller: 88, is_caller_inferred: false });
        assert_eq!(autograd.context(Lane(1), &node(1, 5), false).caller, 0, "its own stack says it");
        autograd.backward(Lane(1), Backward { frame: 4096, ..Backward::default() });
        assert_eq!(autograd.context(ENGINE, &node(1, 5), false).caller, 0);
    }

    #[test]
    fn of_several_callers_the_one_that_made_the_forward_operation_is_guessed() {
        let mut autograd = autograd();
        begin(&mut autograd, 1, 1, 88, 4096);
        begin(&mut autograd, 2, 2, 99, 4096);
        let context = autograd.context(ENGINE, &node(2, 5), false);
        assert_eq!((context.caller, context.is_caller_inferred), (99, true));
        assert_eq!(autograd.context(ENGINE, &node(3, 5), false).caller, 0, "nobody's guess");
    }

    #[test]
    fn a_backward_that_an_exception_ended_is_over_when_the_thread_calls_again() {
        let mut autograd = autograd();
        begin(&mut autograd, 1, 1, 88, 4096);
        begin(&mut autograd, 1, 1, 89, 8192);
        assert_eq!(autograd.context(ENGINE, &node(1, 5), false).caller, 89);
        begin(&mut autograd, 1, 1, 90, 4096);
        assert_eq!(autograd.open.len(), 2, "one inside of the other");
    }

    #[test]
    fn other_releases_are_not_believed() {
        let mut autograd = autograd();
        for (version, is_known) in
            [("2.0.1", false), ("2.1.2", true), ("2.15.0+cu132", true), ("2.16.0a0", false), ("odd", false)]
        {
            autograd.release(version);
            let is_believed = autograd.context(ENGINE, &node(1, 5), false).forward != 0;
            assert_eq!(is_believed, is_known, "{version}");
        }
    }
}
