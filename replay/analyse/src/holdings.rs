//! What was held at a moment, taken apart: every block belongs to one holding, and what the peak would be without it.
//!
//! A holding is a purpose (weights, a copy of them, activations, what one function makes and gives back, ...), and the program's own line.
//! The purpose follows from the role of a block, from what its stack shows, and from the sizes of others. The peak without a holding is that
//! of the same requests but those of the holding: the next-highest moment bounds what any remedy can save.

mod lines;
mod loops;

use std::cmp::Reverse;
use std::collections::BTreeMap;

use gputrace_schemas::event::{Bytes, Nanos, StackId};
use rustc_hash::{FxHashMap, FxHashSet};

pub(crate) use lines::own_lines;
use lines::{checkpointed_at, own_path, under};
use loops::Loops;

use crate::held::{HeldAt, Known, Sign, Signs};
use crate::lives::{Life, Lives, NEVER};
use crate::roles::{Role, Roles};
use gputrace_trace::Definitions;
use gputrace_trace::by_stack::ByStack;
use gputrace_trace::interned::Interned;
use gputrace_trace::ledger::{Ledger, SiteId, TorchOom};

/// Lines of a stack that are shown.
pub(crate) const MOST_LINES: usize = 3;
/// Holdings of which it is computed what the peak would be without them.
const MOST_TRIED: usize = 24;
/// Smaller blocks may have the size of a weight by chance.
pub(crate) const LEAST_WEIGHT: u64 = 1 << 16;
/// Different sizes that a copy of weights has in common with them.
const LEAST_SIZES: usize = 2;
/// As many sets of the weights may one line have made.
const MOST_SETS: u64 = 4;

/// What memory is for, as far as remedies differ.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Purpose {
    /// Weights that are trained, or that a model runs with.
    Weights,
    /// A second set of the weights.
    Copy,
    /// What a checkpoint was loaded into, beside the weights.
    Loaded,
    /// Weights that autocast converted.
    Converted,
    /// Gradients.
    Gradients,
    /// State of the optimizer.
    State,
    /// What an optimizer's step makes and gives back.
    OptimizerTemporaries,
    /// Made in the forward pass, and held for the backward pass.
    Activations,
    /// Scores of attention, of quadratic size.
    Attention,
    /// What one function makes and gives back.
    Temporaries,
    /// What the backward pass makes and gives back.
    BackwardTemporaries,
    /// What the program made outside of any model, and kept: inputs, data sets, buffers.
    Data,
    /// Results that a loop collects.
    Collected,
    /// What the steps of a loop keep for one backward pass.
    GraphOfLoop,
    /// What the steps of a loop keep although no backward pass follows that needs it.
    GraphUnused,
    /// What the steps of a loop keep although their backward passes are over.
    GraphRetained,
    /// Most of what the layers of a model made in one call, held together although no backward pass follows.
    GraphOfCall,
    /// Keys and values.
    Cache,
    /// Workspaces of libraries.
    Workspaces,
    /// Buckets of `DistributedDataParallel`.
    Buckets,
    /// From before the recording.
    Before,
    /// None of these.
    Other,
}

/// A part of what was held.
#[derive(Clone, Debug)]
pub struct Holding {
    /// Its purpose.
    pub purpose: Purpose,
    /// The line that holds most of it.
    pub site: SiteId,
    /// The program's own lines outside that one, innermost first, where others have the same line.
    pub called: String,
    /// The innermost lines of the program under which three quarters of it were requested; empty where none is.
    pub under: String,
    /// How much.
    pub bytes: Bytes,
    /// In how many blocks.
    pub blocks: u64,
    /// The largest.
    pub largest: Bytes,
    /// Signs of its largest line's stacks.
    pub signs: Signs,
    /// When the first of it was requested.
    pub since: Nanos,
    /// What models requested, in blocks, between the first of it and the last.
    pub work_between: u64,
    /// Blocks that models requested after the last of it, if its lines freed no block as large up to the last request of the device.
    pub work_after: Option<u64>,
    /// Memory that it held in an earlier step when the request that failed now went well, of these the time when most was held.
    pub then: Option<Bytes>,
    /// The most that PyTorch's blocks held at any time without all that is like it; none where that was not computed.
    pub without: Option<Bytes>,
}

/// To which holding a block belongs.
type Key = (Purpose, u32);

/// The blocks of a device, each with its holding.
pub(crate) struct Partition<'a> {
    lives: &'a Lives,
    device: i16,
    /// All holdings.
    keys: Vec<Key>,
    /// The number of each life's holding among these; [`NOBODYS`] for those of other devices.
    of_lives: Vec<u32>,
    called: FxHashMap<Key, String>,
    signs: &'a [Signs],
    /// After how many births and deaths.
    moment: u32,
}

const NOBODYS: u32 = u32::MAX;

impl<'a> Partition<'a> {
    pub(crate) fn of(known: Known<'a>, held: &HeldAt, is_held: impl Fn(&Life) -> bool) -> Partition<'a> {
        let device = held.device;
        let (lives, signs) = (known.lives, known.signs);
        let own = || lives.list.iter().zip(signs).filter(|(life, _)| life.device == device);
        let moment = own().filter(|(life, _)| is_held(life)).map(|(life, _)| life.born).max();
        let moment = moment.unwrap_or_default();
        let is_work = |(life, signs): &(&Life, &Signs)| {
            life.born <= moment && signs.has(Sign::Forward) && !signs.has(Sign::Backward)
        };
        let worked = own().filter(is_work).map(|(life, _)| life.born).max().unwrap_or_default();
        let maker = Maker { known, worked, lives, roles: known.roles, device, signs };
        let (keys, of_lives, called) = maker.keys(held, moment, &is_held);
        Partition { lives: known.lives, device, keys, of_lives, called, signs: known.signs, moment }
    }

    /// What models had made by then and gave back before a backward pass began, if that is more than what one waited for.
    pub(crate) fn evaluated(&self, known: Known<'_>, is_held: impl Fn(&Life) -> bool) -> Bytes {
        let passes = known.roles.passes.get(&self.device).map_or(&[][..], Vec::as_slice);
        let next = passes.iter().find(|(_, end)| *end >= self.moment).map_or(NEVER, |(start, _)| *start);
        let is_of_step = |signs: Signs| signs.has(Sign::Backward) || signs.has(Sign::Optimizer);
        let (mut evaluated, mut awaited) = (0_u64, 0_u64);
        for (life, signs) in self.lives.list.iter().zip(self.signs) {
            if life.device != self.device || !is_held(life) {
                continue;
            }
            if life.born == self.moment && is_of_step(*signs) || next <= self.moment {
                return Bytes(0);
            }
            let is_made = signs.has(Sign::Forward) || signs.has(Sign::Functional);
            if is_made && !is_of_step(*signs) && !signs.has(Sign::Model) {
                let of = if life.died > next || life.died == NEVER { &mut awaited } else { &mut evaluated };
                *of += life.bytes.0;
            }
        }
        Bytes(if awaited.saturating_mul(4) <= evaluated { evaluated } else { 0 })
    }

    /// What each key held in an earlier step when the request that failed now went well: of several times, when most was held.
    fn then(&self, known: Known<'_>, at: &HeldAt) -> Option<Vec<u64>> {
        let error = failed_at(known.ledger, self.device, at.time)?;
        let passes = known.roles.passes.get(&self.device)?;
        let (step, _) = passes.iter().rfind(|(start, _)| *start <= self.moment)?;
        let went_well = |life: &Life| {
            life.site == error.site && Some(life.requested) == error.requested && life.born < *step
        };
        let (mut held, mut most, mut best) = (0_u64, 0_u64, None);
        let (mut now, mut then) = (vec![0_u64; self.keys.len()], vec![]);
        for (moment, idx) in (0_u32..).zip(self.lives.moments()).take_while(|(moment, _)| moment < step) {
            let life = self.lives.list.get(*idx as usize).filter(|life| life.device == self.device);
            let Some((life, key)) = life.zip(now.get_mut(self.of_lives[*idx as usize] as usize)) else {
                continue;
            };
            if life.born != moment {
                (held, *key) = (held.saturating_sub(life.bytes.0), key.saturating_sub(life.bytes.0));
                continue;
            }
            (held, *key) = (held + life.bytes.0, *key + life.bytes.0);
            if went_well(life) && held > most {
                (most, best) = (held, Some(moment));
                then.clone_from(&now);
            }
        }
        best.map(|_| then)
    }

    /// All holdings of what `is_held` names, most first.
    pub(crate) fn holdings(
        &self,
        known: Known<'_>,
        at: &HeldAt,
        is_held: impl Fn(&Life) -> bool,
    ) -> Vec<Holding> {
        let then = self.then(known, at);
        let mut n_worked = 0;
        let mut found: BTreeMap<Key, (Holding, u64, FxHashMap<SiteId, u64>)> = BTreeMap::new();
        let mut stacks: FxHashMap<Key, FxHashMap<StackId, u64>> = FxHashMap::default();
        for (idx, life) in self.lives.list.iter().enumerate() {
            if life.device == self.device && self.signs[idx].has(Sign::Forward) {
                n_worked += 1;
            }
            if life.device != self.device || !is_held(life) {
                continue;
            }
            let Some(key) = self.keys.get(self.of_lives[idx] as usize).copied() else { continue };
            let (holding, before, sites) = found.entry(key).or_insert_with(|| {
                let called = self.called.get(&key).cloned().unwrap_or_default();
                let then = then.as_ref().map(|then| Bytes(then[self.of_lives[idx] as usize]));
                let new = Holding::new(key.0, life, self.signs[idx], called);
                (Holding { then, ..new }, n_worked, FxHashMap::default())
            });
            *stacks.entry(key).or_default().entry(life.stack).or_default() += life.bytes.0;
            holding.work_between = n_worked - *before;
            holding.bytes.0 += life.bytes.0;
            holding.blocks += 1;
            holding.largest = holding.largest.max(life.requested);
            let of_site = sites.entry(life.site).or_default();
            *of_site += life.bytes.0;
            if *of_site >= sites.get(&holding.site).copied().unwrap_or(0) {
                (holding.site, holding.signs) = (life.site, self.signs[idx]);
            }
        }
        let mut all: Vec<(Key, Holding)> = found.into_iter().map(|(key, (it, ..))| (key, it)).collect();
        all.sort_by_key(|(key, holding)| (Reverse(holding.bytes), *key));
        let tried: Vec<Key> = all.iter().take(MOST_TRIED).map(|(key, _)| *key).collect();
        for ((key, holding), without) in all.iter_mut().zip(self.without(&tried)) {
            holding.without = Some(without);
            holding.under = stacks
                .get(key)
                .map_or_else(String::new, |stacks| under(known.definitions, stacks, MOST_LINES));
        }
        // Asked of nothing else, and each answer goes through all lives.
        for (key, holding) in all.iter_mut().filter(|(_, it)| it.purpose == Purpose::Collected) {
            holding.work_after = self.work_after(*key, &is_held);
        }
        let mut all: Vec<Holding> = all.into_iter().map(|(_, holding)| holding).collect();
        let recomputed = all.iter_mut().find(|it| it.purpose == Purpose::BackwardTemporaries);
        if let Some(recomputed) = recomputed {
            recomputed.called = self.checkpointed_at(known.definitions).unwrap_or_default();
        }
        all
    }

    /// Blocks that models requested after the last one of a holding that only accumulates, until the device's last request.
    fn work_after(&self, key: Key, is_held: &impl Fn(&Life) -> bool) -> Option<u64> {
        let own = || self.lives.list.iter().enumerate().filter(|(_, life)| life.device == self.device);
        let last = own().map(|(_, life)| life.born).max()?;
        let of_key = || own().filter(|(idx, _)| self.keys.get(self.of_lives[*idx] as usize) == Some(&key));
        let until = of_key().map(|(_, life)| life.born).max()?;
        // What an operation works in has the same stack.
        let least = of_key().map(|(_, life)| life).filter(|life| is_held(life)).map(|life| life.requested);
        let least = least.min()?;
        let mut large = of_key().map(|(_, life)| life).filter(|life| life.requested >= least);
        let stays = large.all(|life| is_held(life) && life.died > last);
        let work = own().filter(|(idx, life)| life.born > until && self.signs[*idx].has(Sign::Forward));
        stays.then(|| work.count() as u64)
    }

    /// The program's line that calls `torch.utils.checkpoint` around most.
    fn checkpointed_at(&self, definitions: &dyn Definitions) -> Option<String> {
        let mut by_stack: BTreeMap<StackId, u64> = BTreeMap::new();
        for (life, signs) in self.lives.list.iter().zip(self.signs) {
            let is_forward = signs.has(Sign::Checkpointed) && !signs.has(Sign::Backward);
            if life.device == self.device && is_forward {
                *by_stack.entry(life.stack).or_default() += life.bytes.0;
            }
        }
        let mut lines: BTreeMap<String, u64> = BTreeMap::new();
        for (stack, bytes) in by_stack {
            if let Some(line) = checkpointed_at(definitions, stack) {
                *lines.entry(line).or_default() += bytes;
            }
        }
        lines.into_iter().max_by_key(|(_, bytes)| *bytes).map(|(line, _)| line)
    }

    /// The most that the device's blocks held without those of each key: exact, for the same requests.
    fn without(&self, tried: &[Key]) -> Vec<Bytes> {
        let number: FxHashMap<Key, usize> = tried.iter().copied().zip(0..).collect();
        let number: Vec<Option<usize>> = self.keys.iter().map(|key| number.get(key).copied()).collect();
        let (mut held, mut own, mut most) = (0_u64, vec![0_u64; tried.len()], vec![0_u64; tried.len()]);
        for (moment, idx) in (0_u32..).zip(self.lives.moments()) {
            let Some(life) = self.lives.list.get(*idx as usize).filter(|life| life.device == self.device)
            else {
                continue;
            };
            let is_born = life.born == moment;
            let change =
                |now: u64| if is_born { now + life.bytes.0 } else { now.saturating_sub(life.bytes.0) };
            held = change(held);
            if let Some(at) = number.get(self.of_lives[*idx as usize] as usize).copied().flatten() {
                own[at] = change(own[at]);
            }
            if is_born {
                most.iter_mut()
                    .zip(&own)
                    .for_each(|(most, own)| *most = (*most).max(held.saturating_sub(*own)));
            }
        }
        most.into_iter().map(Bytes).collect()
    }
}

impl Holding {
    fn new(purpose: Purpose, life: &Life, signs: Signs, called: String) -> Holding {
        Holding {
            purpose,
            site: life.site,
            called,
            under: String::new(),
            bytes: Bytes(0),
            blocks: 0,
            largest: Bytes(0),
            signs,
            since: life.since,
            work_between: 0,
            work_after: None,
            then: None,
            without: None,
        }
    }
}

struct Maker<'a> {
    known: Known<'a>,
    /// When a model last asked for something, up to the moment.
    worked: u32,
    lives: &'a Lives,
    roles: &'a Roles,
    device: i16,
    signs: &'a [Signs],
}

/// Weights that were made by one line, by way of the same lines of the program.
#[derive(Default)]
struct Unit {
    sizes: BTreeMap<u64, u64>,
    born: u32,
    signs: Signs,
    is_held: bool,
    /// Only its sizes could show that it is weights.
    is_of_program: bool,
}

impl Maker<'_> {
    fn role(&self, idx: usize) -> Option<Role> {
        self.numbered(self.roles.of_lives[idx])
    }

    /// The role with this number; `None` for a name that the program gave.
    fn numbered(&self, number: u16) -> Option<Role> {
        let first = self.roles.names.len() - Role::ALL.len();
        usize::from(number).checked_sub(first).and_then(|number| Role::ALL.get(number)).copied()
    }

    fn keys(
        &self,
        held: &HeldAt,
        moment: u32,
        is_held: &impl Fn(&Life) -> bool,
    ) -> (Vec<Key>, Vec<u32>, FxHashMap<Key, String>) {
        let mut paths: Interned<String> = Interned::default();
        let mut numbers: ByStack<u32> = ByStack::default();
        let mut units: BTreeMap<u32, Unit> = BTreeMap::new();
        let mut keys: Interned<Key> = Interned::default();
        let mut of_lives = vec![NOBODYS; self.lives.list.len()];
        let mut is_weight = vec![false; of_lives.len()];
        for (idx, life) in self.own() {
            let number =
                numbers.get_or(life.stack, || paths.id(own_path(self.known.definitions, life.stack)));
            let is_of_program = self.is_of_program(idx);
            if self.is_like_weights(idx) || is_of_program {
                is_weight[idx] = !is_of_program;
                let unit = units.entry(number).or_insert_with(|| Unit {
                    born: life.born,
                    signs: self.signs[idx],
                    is_of_program,
                    ..Unit::default()
                });
                if is_held(life) {
                    unit.is_held = true;
                    *unit.sizes.entry(life.requested.0).or_default() += 1;
                }
            }
        }
        let copies = self.copies(&units);
        let attention = self.attention();
        let converted = self.converted(&units, is_held);
        // The copies go together. A workspace of their size stays.
        let is_copy =
            |life: &&Life| converted.contains(&life.requested.0) && is_held(life) && life.died != NEVER;
        let gone: FxHashSet<u64> =
            self.own().map(|(_, life)| life).filter(is_copy).map(|life| life.requested.0).collect();
        let is_lasting = |role: u16| {
            matches!(
                self.numbered(role),
                Some(
                    Role::Parameters
                        | Role::Weights
                        | Role::Gradients
                        | Role::Optimizer
                        | Role::Activations
                        | Role::Workspaces
                )
            )
        };
        let mut loops = Loops::of(held, self.graphs_of_loops(is_held), is_lasting);
        // Of a request that failed, it is not known what would have come next; without any backward pass, it is.
        let is_failed = self.known.ledger.refusals.iter().any(|it| it.is_final && it.time == held.time)
            || failed_at(self.known.ledger, self.device, held.time).is_some();
        let trains = self.roles.passes.get(&self.device).is_some_and(|passes| !passes.is_empty());
        if !(is_failed && trains) {
            loops.by_stack = self.uses_of_graphs(loops.by_stack, moment, is_held);
        }
        for (stack, purpose) in self.inputs_of_graphs(&loops.by_stack, is_held) {
            loops.by_stack.insert(stack, purpose);
        }
        if !is_failed {
            for stack in self.graph_of_call(moment, is_held) {
                loops.by_stack.entry(stack).or_insert(Purpose::GraphOfCall);
            }
        }
        let joined = self.joined(held, &loops.by_stack);
        let mut functions: Interned<(String, String)> = Interned::default();
        let mut of_sites: FxHashMap<SiteId, u32> = FxHashMap::default();
        for (idx, life) in self.own() {
            let path = numbers.get(life.stack).copied().unwrap_or_default();
            let mut function = || {
                *of_sites.entry(life.site).or_insert_with(|| {
                    let site = self.known.ledger.sites.site(life.site);
                    functions.id(site.map(|it| (it.function.clone(), it.file.clone())).unwrap_or_default())
                })
            };
            let signs = self.signs[idx];
            let is_in_attention = attention.contains(&life.requested.0)
                && (signs.has(Sign::Attention) || signs.has(Sign::Backward));
            let copy = copies.get(&path).filter(|_| is_weight[idx] || self.is_of_program(idx));
            let key = if is_weight[idx] || copy.is_some() {
                copy.map_or((Purpose::Weights, 0), |purpose| (*purpose, path))
            } else if converted.contains(&life.requested.0)
                && signs.has(Sign::Forward)
                && !signs.has(Sign::Workspace)
                && !(life.died == NEVER && gone.contains(&life.requested.0))
            {
                (Purpose::Converted, 0)
            } else if let Some(purpose) = loops.by_stack.get(&life.stack) {
                (*purpose, 0)
            } else if joined.contains(&idx) {
                (Purpose::Collected, 0)
            } else if is_in_attention && !matches!(self.role(idx), Some(Role::Gradients)) {
                (Purpose::Attention, 0)
            } else {
                match self.purpose(idx) {
                    purpose @ Purpose::Temporaries => (purpose, function()),
                    purpose @ Purpose::Data => (purpose, life.site.0),
                    purpose => (purpose, 0),
                }
            };
            of_lives[idx] = keys.id(key);
        }
        let called = |(path, purpose): (&u32, &Purpose)| {
            Some(((*purpose, *path), paths.values.get(*path as usize)?.clone()))
        };
        let collected = ((Purpose::Collected, 0), loops.looped_at.clone());
        let gradients =
            self.own().find(|(idx, life)| is_held(life) && self.role(*idx) == Some(Role::Gradients));
        let backward =
            gradients.and_then(|(_, life)| self.known.definitions.stack(life.stack)?.backward.as_ref());
        let backward =
            backward.map(|it| ((Purpose::Gradients, 0), own_path(self.known.definitions, it.caller)));
        let called = copies.iter().filter_map(called).chain([collected]).chain(backward).collect();
        (keys.values, of_lives, called)
    }

    fn own(&self) -> impl Iterator<Item = (usize, &Life)> {
        self.lives.list.iter().enumerate().filter(|(_, life)| life.device == self.device)
    }

    /// Made where weights are made, or of their kind.
    fn is_like_weights(&self, idx: usize) -> bool {
        let signs = self.signs[idx];
        let is_other = [
            Sign::Backward,
            Sign::Optimizer,
            Sign::Forward,
            Sign::Functional,
            Sign::Workspace,
            Sign::Buckets,
        ]
        .into_iter()
        .any(|sign| signs.has(sign));
        let is_made = [Sign::Model, Sign::Load, Sign::Copy].into_iter().any(|sign| signs.has(sign));
        let role = self.role(idx);
        let is_brief = matches!(role, Some(Role::Temporaries | Role::Serving));
        let is_kept = !is_brief && !matches!(role, Some(Role::Before | Role::KvCache));
        // Weights that come and go with each phase, and what a failed program still had, do not outlive a step.
        let is_moved = is_brief && is_made && !signs.has(Sign::Copy);
        !is_other
            && (is_kept || is_moved)
            && (is_made || matches!(role, Some(Role::Parameters | Role::Weights)))
    }

    /// Made by a line of the program outside of any model, and kept: only its sizes can show that it is a copy.
    fn is_of_program(&self, idx: usize) -> bool {
        let signs = self.signs[idx];
        let is_kept = matches!(self.role(idx), Some(Role::Kept | Role::Unknown | Role::Activations));
        let is_in_model = [Sign::Forward, Sign::Functional, Sign::Backward, Sign::Optimizer, Sign::Workspace]
            .into_iter()
            .any(|sign| signs.has(sign));
        is_kept && !is_in_model && !self.is_like_weights(idx)
    }

    /// Units that have the sizes of weights that others hold, and no gradients of their own.
    fn copies(&self, units: &BTreeMap<u32, Unit>) -> BTreeMap<u32, Purpose> {
        let trained = self.trained();
        let mut order: Vec<(&u32, &Unit)> = units.iter().filter(|(_, unit)| unit.is_held).collect();
        // Gradients are of the set that has their sizes, each as often.
        let is_own = |unit: &Unit| {
            let large = || unit.sizes.iter().filter(|(size, _)| **size >= LEAST_WEIGHT);
            let n_trained = trained.keys().filter(|size| **size >= LEAST_WEIGHT).count();
            n_trained > 0
                && large().count() == n_trained
                && large().all(|(size, n)| trained.get(size) == Some(n))
        };
        order.sort_by_key(|(_, unit)| {
            (
                unit.is_of_program,
                !is_own(unit),
                unit.signs.has(Sign::Copy),
                unit.signs.has(Sign::Load),
                !unit.signs.has(Sign::Model),
                unit.born,
            )
        });
        let (mut seen, mut copies): (BTreeMap<u64, u64>, BTreeMap<u32, Purpose>) = Default::default();
        for (path, unit) in order {
            let large = || unit.sizes.iter().filter(|(size, _)| **size >= LEAST_WEIGHT);
            let all: u64 = large().map(|(size, n)| size * n).sum();
            let there = |size: &u64| seen.get(size).copied().unwrap_or(0);
            // A backup that is made anew is there twice for a while.
            // Another model has some layers of the same sizes, and not as many of each.
            let is_known = unit.signs.has(Sign::Copy) || unit.signs.has(Sign::Load) || unit.is_of_program;
            let has_as_many =
                |size: &u64, n: u64| is_known || there(size) > 0 && n.is_multiple_of(there(size));
            let matched = large().filter(|(size, n)| has_as_many(size, **n));
            let matched: u64 = matched.map(|(size, n)| size * n.min(&(there(size) * MOST_SETS))).sum();
            let n_sizes = large().filter(|(size, _)| there(size) > 0).count();
            let is_trained =
                large().all(|(size, n)| trained.get(size).is_some_and(|trained| *trained >= there(size) + n));
            let is_much = match unit.signs.has(Sign::Load) {
                // A checkpoint has the state of the optimizer, too.
                true => matched.saturating_mul(4) >= all,
                false => matched.saturating_mul(5) >= all.saturating_mul(4),
            };
            let is_known = unit.signs.has(Sign::Copy) || unit.signs.has(Sign::Load);
            let is_copy =
                all > 0 && is_much && !is_trained && (n_sizes >= LEAST_SIZES || is_known && n_sizes > 0);
            match (is_copy, unit.signs.has(Sign::Load)) {
                (true, true) => _ = copies.insert(*path, Purpose::Loaded),
                (true, false) => _ = copies.insert(*path, Purpose::Copy),
                (false, _) if unit.is_of_program => {}
                (false, _) => unit.sizes.iter().for_each(|(size, n)| *seen.entry(*size).or_default() += n),
            }
        }
        copies
    }

    /// How many tensors of each size are trained: as many as have had gradients at one time, times the optimizers that made state for them, one
    /// after the other.
    fn trained(&self) -> BTreeMap<u64, u64> {
        let mut now: FxHashMap<u64, u64> = FxHashMap::default();
        let mut most: BTreeMap<u64, u64> = BTreeMap::new();
        let mut made: FxHashMap<u64, (u64, u32)> = FxHashMap::default();
        if !(0..self.lives.list.len()).any(|idx| self.role(idx) == Some(Role::Gradients)) {
            return most;
        }
        let mut n_passes = 1_u32;
        let mut in_backward = false;
        for (moment, idx) in (0_u32..).zip(self.lives.moments()) {
            let Some(life) = self.lives.list.get(*idx as usize).filter(|life| life.device == self.device)
            else {
                continue;
            };
            let (is_born, is_backward) = (life.born == moment, self.signs[*idx as usize].has(Sign::Backward));
            if is_born {
                n_passes += u32::from(is_backward && !in_backward);
                in_backward = is_backward;
            }
            match self.role(*idx as usize) {
                Some(Role::Gradients) => {
                    let now = now.entry(life.requested.0).or_default();
                    *now = if is_born { *now + 1 } else { now.saturating_sub(1) };
                    let most = most.entry(life.requested.0).or_default();
                    *most = (*most).max(*now);
                }
                Some(Role::Optimizer) if is_born => {
                    let (n, last) = made.entry(life.requested.0).or_default();
                    (*n, *last) = (*n + u64::from(*last != n_passes), n_passes);
                }
                _ => {}
            }
        }
        for (size, most) in &mut most {
            *most *= made.get(size).map_or(1, |(n, _)| *n).max(1);
        }
        most
    }

    /// Sizes of the scores of attention: twice as large at least as what goes in, which there are three of.
    fn attention(&self) -> FxHashSet<u64> {
        let mut sizes: BTreeMap<u64, (u64, u32)> = BTreeMap::new();
        for (idx, life) in self.own() {
            let signs = self.signs[idx];
            if signs.has(Sign::Attention) && !signs.has(Sign::Backward) && !self.is_like_weights(idx) {
                sizes.entry(life.requested.0).or_insert((0, life.born)).0 += 1;
            }
        }
        let Some((&most, &(n_most, first))) = sizes.last_key_value() else { return FxHashSet::default() };
        // What goes in comes before, and is at least as often.
        let is_input = |size: u64, n: u64, born: u32| {
            size >= LEAST_WEIGHT && size * 2 <= most && n >= n_most.max(3) && born < first
        };
        let inputs = sizes.iter().filter(|(size, (n, born))| is_input(**size, *n, *born));
        let Some(input) = inputs.map(|(size, _)| *size).next_back() else { return FxHashSet::default() };
        // In half the width, and as a mask.
        [most, most / 2, most / 4]
            .into_iter()
            .filter(|size| *size > input && sizes.contains_key(size))
            .collect()
    }

    /// Half the sizes of weights, where the model makes blocks of most of them as it runs and no backward pass needs them.
    fn converted(&self, units: &BTreeMap<u32, Unit>, is_held: &impl Fn(&Life) -> bool) -> FxHashSet<u64> {
        if self.roles.n_passes.get(&self.device).copied().unwrap_or(0) > 0 {
            return FxHashSet::default();
        }
        let mut made: BTreeMap<u64, u64> = BTreeMap::new();
        let in_model = |idx: usize| {
            let signs = self.signs[idx];
            signs.has(Sign::Forward) && !signs.has(Sign::Model) && !signs.has(Sign::Workspace)
        };
        for (_, life) in self.own().filter(|(idx, life)| in_model(*idx) && is_held(life)) {
            *made.entry(life.requested.0).or_default() += 1;
        }
        let mut weights: BTreeMap<u64, u64> = BTreeMap::new();
        for (size, n) in units.values().filter(|unit| !unit.is_of_program).flat_map(|unit| &unit.sizes) {
            *weights.entry(*size).or_default() += n;
        }
        // About as many copies as there are weights of the size.
        let is_copied = |(size, n): &(&u64, &u64)| {
            **size >= LEAST_WEIGHT && made.get(&(**size / 2)).is_some_and(|made| made * 4 <= *n * 5 + 8)
        };
        weights.iter().filter(is_copied).map(|(size, _)| size / 2).collect()
    }

    fn purpose(&self, idx: usize) -> Purpose {
        let (signs, role) = (self.signs[idx], self.role(idx));
        // A gradient may be of that size.
        if role == Some(Role::Workspaces) || signs.has(Sign::Workspace) && !signs.has(Sign::Backward) {
            return Purpose::Workspaces;
        }
        if signs.has(Sign::Buckets) {
            return Purpose::Buckets;
        }
        if signs.has(Sign::Optimizer) {
            // What is still there when a model works again is none of the step's temporaries.
            let life = &self.lives.list[idx];
            let is_kept = life.born < self.worked && self.worked < life.died;
            let is_made = role == Some(Role::Optimizer) || is_kept || signs.has(Sign::State);
            let is_state = is_kept || is_made && !signs.has(Sign::Foreach);
            return if is_state { Purpose::State } else { Purpose::OptimizerTemporaries };
        }
        if signs.has(Sign::Backward) {
            let is_gradient = role == Some(Role::Gradients);
            return if is_gradient { Purpose::Gradients } else { Purpose::BackwardTemporaries };
        }
        let is_in_model = signs.has(Sign::Forward) || signs.has(Sign::Functional);
        match role {
            Some(Role::Gradients) => Purpose::Gradients,
            Some(Role::Optimizer) => Purpose::State,
            Some(Role::Parameters | Role::Weights) => Purpose::Weights,
            Some(Role::KvCache) => Purpose::Cache,
            Some(Role::Before) => Purpose::Before,
            Some(Role::Activations) => Purpose::Activations,
            Some(Role::Temporaries | Role::Serving) => Purpose::Temporaries,
            Some(Role::Workspaces) => Purpose::Workspaces,
            Some(Role::Kept | Role::Unknown) | None if is_in_model => Purpose::Activations,
            Some(Role::Kept | Role::Unknown) | None if signs.has(Sign::Own) => Purpose::Data,
            Some(Role::Kept | Role::Unknown) | None => Purpose::Other,
        }
    }
}

/// The request of PyTorch's that failed at that time.
pub(crate) fn failed_at(ledger: &Ledger, device: i16, time: Nanos) -> Option<&TorchOom> {
    ledger.devices().get(&device)?.torch.as_ref()?.ooms.last().filter(|error| error.time == time)
}
