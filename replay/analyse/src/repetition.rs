//! How often memory was left behind: growth is repetition, and what was made once is none.
//!
//! A forward pass keeps the outputs of its layers, an optimizer makes its state at the first step, and a loader takes one
//! tensor after the other: all of it rises, and none of it is a leak. What tells a leak from these is that something *recurs*,
//! and leaves more each time: a training step, the call of a model, or the line itself.
//!
//! ```text
//!   model(x)   model(x)   model(x)        turns of the line that calls the model
//!   ├─ k ──────────────────────────       left in turn 1
//!              ├─ k ───────────────       left in turn 2       three of three turns left more
//!                         ├─ k ────       left in turn 3
//! ```
//! # The rule
//! - A line that calls a model (the outermost one on the stack) has as many turns as the program comes to the first or to the last line of
//!   that model, whichever is less. Layers that are called in a loop recur within one turn; what comes before and behind them does not.
//! - What was asked for inside of a model counts by the turns of that line.
//! - What is made once in a correct program (gradients, optimizer state, parameters, workspaces) counts by how often it was left with a
//!   step or a call of a model in between. A loader that takes a thousand tensors in a row left memory once.
//! - Anything else counts by its own line, and by the steps where all of it lies in one.
//!
//! Memory is looked at where it last failed, else at the last allocation: programs give back at their end, and clean up after an error.

use std::collections::BTreeMap;

use gputrace_schemas::event::{Bytes, Event, EventKind, HOST, Nanos, PjrtAction, StackId};
use rustc_hash::FxHashSet;
use serde::{Deserialize, Serialize};

use crate::growth::Place;
use crate::roles;
use gputrace_trace::Definitions;
use gputrace_trace::ledger::{Account, Block, Ledger, Line, ModelCall, Step, Watch};
use gputrace_trace::newest::Newest;

/// Most beginnings of turns that are kept of one line.
const MOST_TURNS: usize = 1 << 16;
/// Failures at which memory is looked at; a program that runs out more often does so on purpose.
const MOST_FAILURES: usize = 64;
/// So many repetitions that each leave more are growth. Two can be a coincidence: the old state and the new one.
pub const REPEATED: u64 = 3;

/// Something that is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kept {
    /// Which line, in which books.
    pub place: Place,
    /// From where, in full.
    pub stack: StackId,
    /// Since when.
    pub since: Nanos,
    /// How large.
    pub bytes: Bytes,
    /// The requested amount.
    pub requested: Bytes,
    /// The stream of the request, where it was seen.
    pub stream: Option<u64>,
    /// It lies in a pool of CUDA graphs, which keep it for as long as they live.
    pub is_of_graph: bool,
}

impl Kept {
    fn block(ledger: &Ledger, addr: u64, block: &Block) -> Kept {
        let pool = ledger.torch_pools.at(block.device, addr);
        Kept {
            is_of_graph: pool.is_some_and(|pool| pool != (0, 0)),
            place: Place { device: block.device, account: Account::Blocks, site: block.site },
            stack: block.stack,
            since: block.since,
            bytes: block.bytes,
            requested: block.requested,
            stream: block.stream,
        }
    }
}

/// When a device ran out of memory, and what PyTorch held then.
#[derive(Clone, Debug)]
pub struct Failure {
    /// When.
    pub time: Nanos,
    /// All blocks of the device.
    pub kept: Vec<Kept>,
}

/// Watches what recurs, and what is held.
#[derive(Clone, Debug, Default)]
pub struct Repetition {
    /// By the number of the line that calls a model.
    turns: Newest<u32, Turns>,
    /// Blocks taken back since the last allocation.
    freed: Vec<Kept>,
    failures: BTreeMap<i16, Failure>,
    n_failures: usize,
    /// The line whose model asked last for a block.
    newest: Option<u32>,
}

/// The turns of a line that calls a model.
#[derive(Clone, Debug, Default)]
struct Turns {
    /// The lines of the model that asked for memory.
    seen: FxHashSet<u32>,
    newest: u32,
    first: Marker,
    last: Marker,
    /// Where the model calls no other: when a stack of it came again.
    stack: StackId,
    again: Vec<Nanos>,
    is_leaf: bool,
}

/// A line of a model, and when the program came to it: from another line, or from outside.
#[derive(Clone, Debug, Default)]
struct Marker {
    line: u32,
    times: Vec<Nanos>,
}

impl Turns {
    fn asked(&mut self, call: ModelCall, stack: StackId, time: Nanos, is_from_outside: bool) {
        let comes = is_from_outside || self.newest != call.inside || self.seen.is_empty();
        self.newest = call.inside;
        // It was seen if the program has not left it.
        if comes && self.seen.insert(call.inside) {
            self.last = Marker { line: call.inside, times: vec![time] };
            if self.seen.len() == 1 {
                self.first = self.last.clone();
                (self.stack, self.is_leaf, self.again) = (stack, call.is_leaf, vec![time]);
            }
            return;
        }
        self.is_leaf &= call.is_leaf;
        let is_room = |times: &Vec<Nanos>| times.len() < MOST_TURNS;
        for marker in [&mut self.first, &mut self.last] {
            if comes && marker.line == call.inside && is_room(&marker.times) {
                marker.times.push(time);
            }
        }
        if self.stack == stack && is_room(&self.again) {
            self.again.push(time);
        }
    }

    /// When each turn began, or ended.
    fn times(&self) -> Times<'_> {
        let (first, last) = (&self.first.times[..], &self.last.times[..]);
        match self.seen.len() {
            1 if self.is_leaf => Times::Begins(&self.again),
            // A loop inside of the model comes to its lines more often than those before and behind it.
            _ if last.len() < first.len() => Times::Ends(last),
            _ => Times::Begins(first),
        }
    }
}

/// When turns began, or when they ended.
#[derive(Clone, Copy)]
enum Times<'a> {
    Begins(&'a [Nanos]),
    Ends(&'a [Nanos]),
}

impl<'a> Times<'a> {
    fn list(self) -> &'a [Nanos] {
        let (Times::Begins(times) | Times::Ends(times)) = self;
        times
    }

    fn until(self, until: Nanos) -> Self {
        let n = self.list().partition_point(|time| *time <= until);
        match self {
            Times::Begins(times) => Times::Begins(&times[..n]),
            Times::Ends(times) => Times::Ends(&times[..n]),
        }
    }

    /// In which turn something was asked for.
    fn turn(self, since: Nanos) -> usize {
        match self {
            Times::Begins(times) => times.partition_point(|time| *time <= since),
            Times::Ends(times) => times.partition_point(|time| *time < since),
        }
    }
}

impl Watch for Repetition {
    fn begin(&mut self, ledger: &mut Ledger) {
        *self = Repetition::default();
        ledger.keep_steps();
    }

    fn event(&mut self, ledger: &mut Ledger, event: &Event) {
        let is_block = matches!(event.kind, EventKind::BlockAlloc(_));
        if is_block || is_allocation(event) {
            self.freed.clear();
        }
        if is_block {
            let call = ledger.sites.model_call(event.stack);
            if let Some(call) = call {
                let is_from_outside = self.newest != Some(call.caller);
                let turns = self.turns.of(call.caller);
                turns.asked(call, event.stack, event.time, is_from_outside);
            }
            self.newest = call.map(|call| call.caller);
        }
        for step in ledger.steps() {
            if let Step::BlockFreed(addr, block) = step {
                self.freed.push(Kept::block(ledger, *addr, block));
            }
        }
        if let Some(oom) = ledger.ran_out()
            && self.n_failures < MOST_FAILURES
        {
            self.n_failures += 1;
            let blocks = ledger.live_blocks().filter(|(_, block)| block.device == oom.device);
            let kept = blocks.map(|(addr, block)| Kept::block(ledger, addr, block)).collect();
            self.failures.insert(oom.device, Failure { time: event.time, kept });
        }
    }
}

fn is_allocation(event: &Event) -> bool {
    match &event.kind {
        EventKind::Pjrt(pjrt) => pjrt.action == PjrtAction::Made,
        EventKind::Call(call) => call.action.gives() && call.result == Some(0),
        _ => false,
    }
}

/// What recurs.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
pub enum By {
    /// Calls of this line, which calls a model.
    Call(Line),
    /// Times with a step or a call of a model in between.
    Round,
    /// Objects of the line itself.
    Own,
}

/// How often memory was left by a line.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
pub struct Repeated {
    /// What recurs.
    pub by: By,
    /// How often it did, as far as that is known.
    pub turns: Option<u64>,
    /// In how many of these memory was left.
    pub left: u64,
    /// All of that, bytes.
    pub bytes: Bytes,
    /// What a turn left, bytes: the median of those that left any.
    pub each: Bytes,
    /// No longer ago than usual.
    pub is_to_the_end: bool,
}

impl Repeated {
    /// Whether it is growth: several turns left more, most of those that there were, to the last.
    #[must_use]
    pub fn grows(&self) -> bool {
        self.left >= REPEATED
            && self.is_to_the_end
            && self.turns.is_none_or(|turns| self.left * 3 >= turns * 2)
    }

    /// Probability that turns which leave different amounts without any order would by chance be in the order of growth, from 1: that of
    /// Mann and Kendall's test for `left` values that all rise.
    #[must_use]
    pub fn confidence(&self) -> f64 {
        let orders: f64 = (1..=self.left.min(20)).map(|n| n as f64).product();
        1.0 - 1.0 / orders
    }
}

/// What recurred in a whole trace, to judge what is held by.
pub struct Rounds<'a> {
    ledger: &'a Ledger,
    definitions: &'a dyn Definitions,
    repetition: &'a Repetition,
    /// Begins of steps and of calls of models, in order.
    rounds: Vec<Nanos>,
}

impl<'a> Rounds<'a> {
    /// Of a trace that `repetition` watched.
    #[must_use]
    pub fn of(
        ledger: &'a Ledger,
        definitions: &'a dyn Definitions,
        repetition: &'a Repetition,
    ) -> Rounds<'a> {
        let steps = ledger.training().into_iter().filter(|training| training.n_steps > 1);
        let steps = steps.flat_map(|training| training.steps.iter().map(|step| step.begin));
        // Of several models that one step calls, one is enough.
        let lines = repetition.turns.iter().map(|(line, turns)| (turns.times().list(), line));
        let most =
            lines.filter(|(times, _)| times.len() > 1).max_by_key(|(times, line)| (times.len(), *line));
        let calls = most.into_iter().flat_map(|(times, _)| times.to_vec());
        let mut rounds: Vec<Nanos> = steps.chain(calls).collect();
        rounds.sort_unstable();
        rounds.dedup();
        Rounds { ledger, definitions, repetition, rounds }
    }

    /// The last failure of a device.
    #[must_use]
    pub fn failure(&self, device: i16) -> Option<&'a Failure> {
        self.repetition.failures.get(&device)
    }

    /// Memory held at the last allocation: not what the program freed after it.
    #[must_use]
    pub fn at_end(&self) -> Vec<Kept> {
        let ledger = self.ledger;
        let mut kept: Vec<Kept> =
            ledger.live_blocks().map(|(addr, block)| Kept::block(ledger, addr, block)).collect();
        kept.extend(&self.repetition.freed);
        kept.extend(ledger.live_buffers().map(|(_, buffer)| Kept {
            place: Place { device: buffer.device, account: Account::Buffers, site: buffer.site },
            stack: buffer.stack,
            since: buffer.since,
            bytes: buffer.bytes,
            requested: buffer.bytes,
            stream: None,
            is_of_graph: false,
        }));
        kept.extend(ledger.live().map(|object| {
            let account = if object.device == HOST { Account::Driver } else { account_of(object.kind) };
            Kept {
                place: Place { device: object.device, account, site: object.site },
                stack: object.stack,
                since: object.since,
                bytes: object.bytes,
                requested: object.bytes,
                stream: None,
                is_of_graph: false,
            }
        }));
        kept
    }

    /// How often a line left memory, by what of it is held: until `until`.
    #[must_use]
    pub fn judge(&self, kept: &[Kept], until: Nanos) -> Option<Repeated> {
        let most = kept.iter().max_by_key(|it| it.bytes)?;
        let bytes = sum(kept);
        if let Some(call) = self.ledger.sites.model_call(most.stack) {
            let line = self.ledger.sites.line(call.caller)?.clone();
            let times = self.repetition.turns.get(call.caller).map_or(Times::Begins(&[]), Turns::times);
            return Some(in_turns(By::Call(line), times.until(until), kept, bytes));
        }
        if self.is_made_once(most) {
            let rounds = Times::Begins(&self.rounds).until(until);
            // Rounds are of several lines: how many of them could have left something is not known.
            let found = in_turns(By::Round, rounds, kept, bytes);
            return Some(Repeated { turns: None, ..found });
        }
        let left = kept.len() as u64;
        let mut sizes: Vec<u64> = kept.iter().map(|it| it.bytes.0).collect();
        let each = Bytes(median(&mut sizes));
        Some(Repeated { by: By::Own, turns: None, left, bytes, each, is_to_the_end: true })
    }

    /// In which turn each of these times is: of the line that calls the model of a stack, else of rounds of work. None where nothing recurs.
    #[must_use]
    pub fn turns_of(&self, stack: StackId, times: &[Nanos]) -> Option<Vec<usize>> {
        let turns = match self.ledger.sites.model_call(stack) {
            Some(call) => self.repetition.turns.get(call.caller)?.times(),
            None => Times::Begins(&self.rounds),
        };
        (!turns.list().is_empty()).then(|| times.iter().map(|time| turns.turn(*time)).collect())
    }

    /// In how many rounds of work, which are steps and calls of a model, a line left memory, of those since it first did.
    #[must_use]
    pub fn by_rounds(&self, kept: &[Kept], until: Nanos) -> Repeated {
        let bytes = sum(kept);
        let rounds = Times::Begins(&self.rounds).until(until);
        let first = kept.iter().map(|it| rounds.turn(it.since)).min().unwrap_or(0);
        let found = in_turns(By::Round, rounds, kept, bytes);
        let since = (rounds.list().len() + 1).saturating_sub(first.max(1)) as u64;
        Repeated { turns: Some(since), ..found }
    }

    /// Whether a correct program makes it once.
    #[must_use]
    pub fn is_made_once(&self, kept: &Kept) -> bool {
        kept.is_of_graph || roles::is_made_once(self.definitions, kept.stack) || self.is_workspace(kept)
    }

    /// Whether PyTorch requested it for cuBLAS.
    #[must_use]
    pub fn is_workspace(&self, kept: &Kept) -> bool {
        kept.place.account == Account::Blocks
            && roles::is_workspace(self.definitions, kept.stack, kept.requested)
    }

    /// Whether all of it was requested within one step of training.
    #[must_use]
    pub fn is_of_one_step(&self, kept: &[Kept]) -> bool {
        let Some(training) = self.ledger.training().filter(|training| training.n_steps > 1) else {
            return false;
        };
        let mut steps = kept.iter().map(|it| training.at(it.since).map(|step| step.number));
        let Some(Some(first)) = steps.next() else { return false };
        steps.all(|step| step == Some(first))
    }
}

fn median(values: &mut [u64]) -> u64 {
    let middle = values.len() / 2;
    if values.is_empty() { 0 } else { *values.select_nth_unstable(middle).1 }
}

fn sum(kept: &[Kept]) -> Bytes {
    Bytes(kept.iter().fold(0, |sum: u64, it| sum.saturating_add(it.bytes.0)))
}

fn account_of(kind: gputrace_trace::ledger::MemoryKind) -> Account {
    use gputrace_trace::ledger::MemoryKind;
    match kind {
        MemoryKind::Managed => Account::Managed,
        MemoryKind::Imported => Account::Imported,
        MemoryKind::Graph => Account::Graphs,
        _ => Account::Driver,
    }
}

/// In how many turns the memory was made.
fn in_turns(by: By, times: Times<'_>, kept: &[Kept], bytes: Bytes) -> Repeated {
    let n_turns = times.list().len().max(1);
    let mut by_turn: BTreeMap<usize, u64> = BTreeMap::new();
    for it in kept {
        let left = by_turn.entry(times.turn(it.since)).or_default();
        *left = left.saturating_add(it.bytes.0);
    }
    let turns: Vec<usize> = by_turn.keys().copied().collect();
    let mut amounts: Vec<u64> = by_turn.into_values().collect();
    let each = Bytes(median(&mut amounts));
    // As long as between two of them before, and the one that may be going on.
    let pause = turns.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(1);
    let is_to_the_end = turns.last().is_some_and(|last| last + pause + 1 >= n_turns);
    let left = match by {
        By::Call(_) => turns.len().min(n_turns),
        By::Round | By::Own => turns.len(),
    };
    Repeated { by, turns: Some(n_turns as u64), left: left as u64, bytes, each, is_to_the_end }
}
