//! What the loops of a program keep: the graph of each turn, or results that are collected.

use std::collections::BTreeMap;

use gputrace_schemas::event::StackId;
use rustc_hash::{FxHashMap, FxHashSet};

use super::lines::model_line;
use super::{LEAST_WEIGHT, Maker, Purpose};
use crate::held::{HeldAt, Sign};
use crate::lives::{Life, NEVER};
use crate::piles::{Course, Pile};
use crate::roles::Role;
use crate::sets::Lines;
use gputrace_trace::by_stack::ByStack;
use gputrace_trace::interned::Interned;
use gputrace_trace::ledger::SiteId;

/// Lines inside of a model that a loop keeps blocks of: then it is the graph that keeps them, not a list of results.
const LINES_OF_GRAPH: usize = 3;
/// Blocks that layers of one call left, at least, and the part of all that they made which is still there: one in so many. Of `relu(linear(x))`, a
/// graph keeps the second.
const LEAST_OF_CALL: usize = 8;
const MOST_OF_CALL: usize = 2;
/// Blocks that outlive the call are no more of it than one byte in so many.
const MOST_AWAITED: u64 = 8;
/// Of the blocks of a loop's graph, at most one in so many is older than the loop.
const MOST_OLDER: usize = 8;
/// Turns of a loop of which blocks are held together.
const LEAST_TURNS: u64 = 4;

impl Maker<'_> {
    /// Stacks of a model that a loop calls again and again, and of which every line keeps a block for each call: what autograd saved. So it is
    /// where lines of several layers do, or where at least half of what the calls made is kept, or a backward pass frees it, at least two
    /// blocks of each.
    pub(super) fn graphs_of_loops(&self, is_held: &impl Fn(&Life) -> bool) -> FxHashSet<StackId> {
        let is_role = |idx: usize| {
            matches!(
                self.role(idx),
                Some(Role::Activations | Role::Serving | Role::Unknown | Role::Kept | Role::Temporaries)
            )
        };
        let is_made = |idx: usize| {
            let signs = self.signs[idx];
            let is_other = [Sign::Backward, Sign::Workspace, Sign::Model, Sign::NoGrad];
            let is_of_layer = signs.has(Sign::Forward) && !is_of_operation(&self.lives.list[idx]);
            is_of_layer && !is_other.into_iter().any(|sign| signs.has(sign))
        };
        // By the line that calls the outermost model: the lines of that model, and how often each stack is held.
        let mut lines: ByStack<Option<(u32, u32)>> = ByStack::default();
        let (mut callers, mut of_models): (Interned<String>, Interned<String>) = Default::default();
        let mut loops: BTreeMap<u32, Looped> = BTreeMap::new();
        let mut last = None;
        for (idx, life) in self.own() {
            let called = lines.get_or(life.stack, || {
                let (caller, line) = model_line(self.known.definitions, life.stack)?;
                Some((callers.id(caller), of_models.id(line)))
            });
            let is_again = called.map(|(caller, _)| caller) != last;
            last = called.map(|(caller, _)| caller);
            let Some((caller, line)) = called.filter(|_| is_made(idx)) else { continue };
            let of = loops.entry(caller).or_default();
            of.is_new |= is_again;
            if is_held(life) && is_role(idx) {
                of.turns += u64::from(of.is_new);
                of.is_new = false;
                of.made += std::mem::take(&mut of.made_since);
                of.held += 1;
                of.awaited += u64::from(self.role(idx) == Some(Role::Activations));
                of.lines.insert(line);
                *of.stacks.entry(life.stack).or_default() += 1;
            }
            of.made_since += u64::from(of.held > 0);
        }
        loops.into_values().filter_map(Looped::graph).flatten().collect()
    }

    /// Stacks outside of models that a graph of a loop keeps blocks of, for each turn: its inputs. They come with it and go with it.
    pub(super) fn inputs_of_graphs(
        &self,
        by_stack: &FxHashMap<StackId, Purpose>,
        is_held: &impl Fn(&Life) -> bool,
    ) -> Vec<(StackId, Purpose)> {
        let is_graph = |purpose: &Purpose| {
            matches!(purpose, Purpose::GraphUnused | Purpose::GraphRetained | Purpose::GraphOfLoop)
        };
        let (mut graph, mut others): (Vec<&Life>, BTreeMap<StackId, Vec<&Life>>) = Default::default();
        let mut found = None;
        for (idx, life) in self.own().filter(|(_, life)| is_held(life)) {
            let signs = self.signs[idx];
            let is_lasting =
                [Sign::Backward, Sign::Optimizer, Sign::Model, Sign::Load, Sign::Copy, Sign::Forward];
            match by_stack.get(&life.stack).filter(|purpose| is_graph(purpose)) {
                Some(purpose) => {
                    found = Some(*purpose);
                    graph.push(life);
                }
                None if is_lasting.into_iter().any(|sign| signs.has(sign)) => {}
                None => others.entry(life.stack).or_default().push(life),
            }
        }
        let (Some(purpose), Some(first), Some(last)) = (found, graph.first(), graph.last()) else {
            return vec![];
        };
        let (born, died) = (last.born - first.born, graph.iter().map(|life| life.died));
        let (gone, all_gone) = (died.clone().min().unwrap_or(NEVER), died.max().unwrap_or(NEVER));
        let is_input = |held: &Vec<&Life>| {
            let turns = held.len() as u64;
            // The first comes before the first of the graph.
            let since = first.born.saturating_sub(born / held.len() as u32);
            let goes = |life: &&&Life| {
                (gone..=all_gone).contains(&life.died) && (since..=last.born).contains(&life.born)
            };
            turns >= LEAST_TURNS && held.iter().filter(goes).count() as u64 * 4 >= turns * 3
        };
        others.into_iter().filter(|(_, held)| is_input(held)).map(|(stack, _)| (stack, purpose)).collect()
    }

    /// Blocks that are as large as all that a loop collected, requested when it was over and while that was held: what it is joined into.
    pub(super) fn joined(&self, held: &HeldAt, by_stack: &FxHashMap<StackId, Purpose>) -> FxHashSet<usize> {
        let mut found = FxHashSet::default();
        let piles = held.piles.iter().filter(|pile| by_stack.get(&pile.stack) == Some(&Purpose::Collected));
        for pile in piles {
            let (mut now, mut sum) = (0_u64, 0_u64);
            for (moment, idx) in (0_u32..).zip(self.lives.moments()) {
                let Some(life) = self.lives.list.get(*idx as usize).filter(|it| it.device == self.device)
                else {
                    continue;
                };
                let is_born = life.born == moment;
                if life.stack == pile.stack {
                    (now, sum) = match is_born {
                        true => (now + 1, sum + life.bytes.0),
                        false => (now.saturating_sub(1), sum.saturating_sub(life.bytes.0)),
                    };
                } else if is_born
                    && now >= LEAST_TURNS
                    && life.bytes.0 <= sum
                    && life.bytes.0.saturating_mul(8) >= sum.saturating_mul(7)
                {
                    found.insert(*idx as usize);
                }
            }
        }
        found
    }

    /// Stacks of the blocks that the layers of a model made last, as far back as most of these are still there. Without gradients, a layer's
    /// output goes when the next is there; nothing is found where a backward pass follows that needs them.
    pub(super) fn graph_of_call(&self, moment: u32, is_held: &impl Fn(&Life) -> bool) -> FxHashSet<StackId> {
        let passes = self.roles.passes.get(&self.device).map_or(&[][..], Vec::as_slice);
        let next = passes.iter().find(|(_, end)| *end >= moment).map_or(NEVER, |(start, _)| *start);
        let is_made = |(idx, life): &(usize, &Life)| {
            let signs = self.signs[*idx];
            let is_lasting =
                matches!(self.role(*idx), Some(Role::KvCache | Role::Parameters | Role::Weights));
            let is_other = [Sign::Backward, Sign::Optimizer, Sign::Model, Sign::Workspace];
            signs.has(Sign::Forward)
                && !is_other.into_iter().any(|sign| signs.has(sign))
                && !is_lasting
                && life.born <= moment
                && !is_of_operation(life)
                && life.requested.0 >= LEAST_WEIGHT
        };
        let made: Vec<&Life> = self.own().filter(is_made).map(|(_, life)| life).collect();
        let (mut held, mut most) = (vec![], 0);
        let (mut n_awaited, mut bytes, mut awaited) = (0, 0_u64, 0_u64);
        for (n, life) in (1..).zip(made.iter().rev()) {
            if is_held(life) {
                bytes += life.bytes.0;
                // A library's workspace stays, too.
                if life.died == NEVER || life.died > next {
                    (n_awaited, awaited) = (n_awaited + 1, awaited + life.bytes.0);
                    continue;
                }
                held.push(life.stack);
                let n = n - n_awaited;
                if held.len() * MOST_OF_CALL >= n {
                    most = held.len();
                }
            }
        }
        let is_awaited = awaited.saturating_mul(MOST_AWAITED) > bytes;
        held.truncate(if most >= LEAST_OF_CALL && !is_awaited { most } else { 0 });
        held.into_iter().collect()
    }

    /// What the backward passes show of the graphs that loops keep.
    pub(super) fn uses_of_graphs(
        &self,
        mut by_stack: FxHashMap<StackId, Purpose>,
        moment: u32,
        is_held: &impl Fn(&Life) -> bool,
    ) -> FxHashMap<StackId, Purpose> {
        let passes = self.roles.passes.get(&self.device).map_or(&[][..], Vec::as_slice);
        // Layers of one loop go the same way. What its lines left of an earlier loop is no part of this one: the oldest few are not counted.
        let is_of_graph = |life: &Life| by_stack.get(&life.stack) == Some(&Purpose::GraphOfLoop);
        let graph = self.own().map(|(_, life)| life).filter(|life| is_held(life) && is_of_graph(life));
        let (mut born, mut died): (Vec<u32>, Vec<u32>) = graph.map(|life| (life.born, life.died)).unzip();
        born.sort_unstable();
        died.sort_unstable();
        let Some(born) = born.get(born.len() / MOST_OLDER).copied() else { return by_stack };
        let gone = died[died.len() / 2];
        let n_over = passes.iter().filter(|(start, end)| born < *start && *end <= moment).count() as u64;
        let is_used = passes.iter().any(|(start, end)| *end >= moment && *start < gone);
        // A pass frees what it needs, or is of these lines. What goes between two passes counts for the first.
        let first_gone = died[died.len() / 8];
        let later: Vec<&(u32, u32)> = passes.iter().filter(|(start, _)| *start > moment).collect();
        let is_idle = |pair: &&[&(u32, u32)]| pair[1].0 < first_gone;
        let is_passed_by = later.windows(2).filter(is_idle).count() as u64 >= LEAST_TURNS
            && !self.has_pass_of(&by_stack, moment);
        let purpose = match (n_over, is_used) {
            (LEAST_TURNS.., _) => Purpose::GraphRetained,
            _ if is_passed_by => Purpose::GraphUnused,
            (_, false) if gone != NEVER || passes.is_empty() => Purpose::GraphUnused,
            _ => Purpose::GraphOfLoop,
        };
        let of_graphs = by_stack.values_mut().filter(|it| **it == Purpose::GraphOfLoop);
        of_graphs.for_each(|it| *it = purpose);
        by_stack
    }
}

impl Maker<'_> {
    /// Whether a backward pass after a moment undoes an operation of a loop's graph, or the trace has no stack of any that it undoes.
    fn has_pass_of(&self, by_stack: &FxHashMap<StackId, Purpose>, moment: u32) -> bool {
        let definitions = self.known.definitions;
        let mut lines = Lines::of(definitions);
        let graph = by_stack.iter().filter(|(_, purpose)| **purpose == Purpose::GraphOfLoop);
        let graph: FxHashSet<u64> = graph.filter_map(|(stack, _)| lines.hash(*stack)).collect();
        let is_of_backward =
            |(idx, life): &(usize, &Life)| life.born > moment && self.signs[*idx].has(Sign::Backward);
        let undone = self.own().filter(is_of_backward).filter_map(|(_, life)| {
            let backward = definitions.stack(life.stack).and_then(|stack| stack.backward.as_ref())?;
            lines.hash(backward.forward)
        });
        let undone: FxHashSet<u64> = undone.collect();
        undone.is_empty() || !undone.is_disjoint(&graph)
    }
}

/// Freed before anything else happened: what an operation works in.
fn is_of_operation(life: &Life) -> bool {
    life.died == life.born + 1
}

/// What calls of a model by one line left.
#[derive(Default)]
struct Looped {
    /// Calls that left something.
    turns: u64,
    /// Blocks that they left.
    held: u64,
    /// Of these, how many a backward pass frees.
    awaited: u64,
    /// Blocks that they made, from the first of these to the last.
    made: u64,
    /// Since the last of these.
    made_since: u64,
    /// The next block is another call's.
    is_new: bool,
    lines: FxHashSet<u32>,
    stacks: BTreeMap<StackId, u64>,
}

impl Looped {
    /// The stacks of what autograd saved.
    fn graph(self) -> Option<Vec<StackId>> {
        let is_of_lines = self.lines.len() >= LINES_OF_GRAPH;
        // Where nothing else is requested between two calls, the number of each line's blocks shows that there were several.
        let is_each = is_of_lines && self.stacks.values().all(|n| *n >= LEAST_TURNS);
        // The backward pass may have given some of them back already, and the last call may not be over.
        let saved = self.stacks.into_iter().filter(|(_, n)| *n >= LEAST_TURNS);
        let (saved, n): (Vec<StackId>, Vec<u64>) = saved.unzip();
        let n_saved: u64 = n.iter().sum();
        let is_of_graph = self.held * 2 >= self.made || self.awaited * 4 >= self.held * 3;
        let is_most = is_of_lines || is_of_graph && self.held >= self.turns * 2;
        let is_turned = self.turns >= LEAST_TURNS && is_most && n_saved * 4 >= self.held * 3;
        (is_each || is_turned).then_some(saved)
    }
}

/// What loops of the program keep, by stack.
pub(super) struct Loops {
    pub(super) by_stack: FxHashMap<StackId, Purpose>,
    /// Where the loop is that collects most.
    pub(super) looped_at: String,
}

impl Loops {
    pub(super) fn of(held: &HeldAt, graphs: FxHashSet<StackId>, is_lasting: impl Fn(u16) -> bool) -> Loops {
        let mut lines: FxHashMap<&str, (FxHashSet<SiteId>, u64)> = FxHashMap::default();
        let is_result = |pile: &&Pile| pile.course == Course::Collected && !is_lasting(pile.role);
        let piles = || held.piles.iter().filter(is_result);
        for pile in piles().filter(|pile| pile.is_in_model) {
            let (sites, each) = lines.entry(&pile.looped_at).or_default();
            *each += pile.blocks / pile.turns;
            sites.insert(pile.site);
        }
        // Several lines, or several blocks in each turn.
        let purpose = |looped_at: &str| match lines.get(looped_at) {
            Some((sites, each)) if sites.len() >= LINES_OF_GRAPH || *each > LINES_OF_GRAPH as u64 => {
                Purpose::GraphOfLoop
            }
            Some(_) | None => Purpose::Collected,
        };
        let graphs = graphs.into_iter().map(|stack| (stack, Purpose::GraphOfLoop));
        let looped_at = piles().next().map_or_else(String::new, |pile| pile.looped_at.clone());
        let by_stack = piles().map(|pile| (pile.stack, purpose(&pile.looped_at))).chain(graphs);
        Loops { by_stack: by_stack.collect(), looped_at }
    }
}
