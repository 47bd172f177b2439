//! Sets of weights that hold memory for nothing: an earlier model beside a later one of the same sizes, weights that a training run does not
//! use, and layers whose gradients no optimizer uses.
//!
//! ```text
//!   weights of line 10   ├────────────────────────────────
//!   its gradients            ├────────────────────────────   not made anew since
//!   weights of line 10                   ├────────────────   the same sizes, made after work with the first
//!   its gradients                            ├───┤  ├───┤
//! ```

use std::collections::{BTreeMap, BTreeSet};

use gputrace_schemas::event::{Bytes, Nanos, StackId};
use gputrace_sim::stacks::python_package;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::held::{Known, Sign, Signs, caller_of_model};
use crate::holdings::LEAST_WEIGHT;
use crate::lives::{Life, NEVER};
use crate::roles::Role;
use gputrace_trace::Definitions;
use gputrace_trace::backward::python_lines;
use gputrace_trace::ledger::{SiteId, TorchOom};

/// A set of weights has so many blocks at least.
const LEAST_BLOCKS: usize = 2;
/// A later set counts from this part of the earlier one on: one in so many. The request that failed may have been for it.
const LEAST_PART: u64 = 4;
/// Weights are not trained if gradients have the sizes of less than this part of them: one in so many.
const UNTRAINED: u64 = 5;
/// Backward passes that show how a training run uses its weights.
const LEAST_PASSES: usize = 2;
/// Gradients without state are worth a word from so many on.
const LEAST_GRADIENTS: u64 = 8;
/// Smaller state than this is a number: the step.
const LEAST_STATE: u64 = 512;
/// As many tensors of state has a parameter at most: AMSGrad's.
const MOST_STATE: u64 = 3;

/// What of a device's weights is held for nothing.
#[derive(Clone, Debug, Default)]
pub struct Sets {
    /// On which device.
    pub device: i16,
    /// When the request that failed last failed, else at the peak: an earlier model.
    pub earlier: Option<Earlier>,
    /// In the last backward pass: weights that the training run does not use.
    pub idle: Option<IdleSets>,
    /// Layers whose gradients no optimizer uses.
    pub unused_gradients: Option<UnusedGradients>,
}

/// A set of weights that is still held beside a later one of the same sizes from the same line.
#[derive(Clone, Debug)]
pub struct Earlier {
    /// The line that made both.
    pub site: SiteId,
    /// The program's own lines that made the earlier one, innermost first, and the later one: function, file, line.
    pub made_by: [Vec<(String, String, u32)>; 2],
    /// How many earlier ones.
    pub sets: u64,
    /// Weights of the earlier ones.
    pub weights: Bytes,
    /// Gradients and the optimizer's state from its time that are still held.
    pub beside: Bytes,
    /// When a model last worked before the later set was made.
    pub used_until: Nanos,
    /// What shows that it is not used.
    pub since: Since,
}

/// What happened since the later one of two models was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Since {
    /// No model has worked.
    Nothing,
    /// Steps have made gradients or state, and none in place of the earlier one's.
    Trained,
    /// Models have worked, and no backward pass has begun: the earlier one was trained.
    Evaluated,
}

/// Weights without gradients, of models that ran only before the first training step.
#[derive(Clone, Debug)]
pub struct IdleSets {
    /// Each set's lines of the program, innermost first, with its bytes; most first.
    pub sets: Vec<(String, Bytes)>,
    /// The line that made most of them.
    pub site: SiteId,
    /// The functions that ran before, and not again: `CLIPTextModel.forward`.
    pub functions: Vec<String>,
    /// When the last of these ran.
    pub used_until: Nanos,
}

/// Gradients of sizes for which the optimizer keeps no state, while it does for all others.
#[derive(Clone, Debug)]
pub struct UnusedGradients {
    /// Of one backward pass.
    pub gradients: Bytes,
    /// How many.
    pub blocks: u64,
    /// They were made once, while those with state are freed and made anew.
    pub is_kept: bool,
    /// What the layers that they belong to hold for a backward pass, at the peak of the device.
    pub activations: Bytes,
    /// The line that requested most of these, else the gradients.
    pub site: SiteId,
    /// The program's line that called the model.
    pub caller: String,
}

impl Sets {
    /// Of a device whose moment that matters is after `moment` births and deaths.
    /// `failed`: when a request failed last on the device, whoever requested it.
    pub(crate) fn of(known: Known<'_>, device: i16, moment: u32, failed: Option<Nanos>) -> Sets {
        let passes = known.roles.passes.get(&device).map_or(&[][..], Vec::as_slice);
        let books = known.ledger.devices().iter().find(|(of, _)| **of == device);
        let errors = books.and_then(|(_, books)| books.torch.as_ref()).map_or(&[][..], |torch| &torch.ooms);
        let failed = errors.last().filter(|error| failed == Some(error.time));
        let maker = Maker { known, device, passes, failed };
        Sets {
            device,
            earlier: maker.earlier(moment),
            idle: maker.idle(),
            unused_gradients: maker.unused_gradients(moment),
        }
    }
}

struct Maker<'a> {
    known: Known<'a>,
    device: i16,
    /// The first and the last birth of each backward pass.
    passes: &'a [(u32, u32)],
    /// The request that failed last.
    failed: Option<&'a TorchOom>,
}

/// Weights of one line that were made without other work in between.
#[derive(Default)]
struct Generation {
    lives: Vec<usize>,
    /// When a model last worked before it.
    worked: Option<(u32, Nanos)>,
    /// The request that failed was for more of it.
    is_unfinished: bool,
}

impl<'a> Maker<'a> {
    fn own(&self) -> impl Iterator<Item = (usize, &'a Life)> + use<'a> {
        let device = self.device;
        self.known.lives.list.iter().enumerate().filter(move |(_, life)| life.device == device)
    }

    fn role(&self, idx: usize) -> Option<Role> {
        let first = self.known.roles.names.len() - Role::ALL.len();
        let number = usize::from(self.known.roles.of_lives[idx]).checked_sub(first)?;
        Role::ALL.get(number).copied()
    }

    fn is_weight(&self, idx: usize) -> bool {
        let signs = self.known.signs[idx];
        let is_made = signs.has(Sign::Model) && !self.known.lives.list[idx].is_from_before;
        let is_other =
            [Sign::Backward, Sign::Optimizer, Sign::Forward, Sign::Functional, Sign::Copy, Sign::Load];
        is_made && !is_other.into_iter().any(|sign| signs.has(sign))
    }

    /// Something that a model requested as it ran, forward or backward.
    fn is_work(&self, idx: usize) -> bool {
        let signs = self.known.signs[idx];
        !signs.has(Sign::Model) && (signs.has(Sign::Forward) || signs.has(Sign::Backward))
    }

    fn bytes(&self, lives: &[usize]) -> u64 {
        lives.iter().map(|idx| self.known.lives.list[*idx].bytes.0).sum()
    }

    fn sizes(&self, lives: &[usize]) -> BTreeMap<u64, u64> {
        let mut sizes = BTreeMap::new();
        let large = lives.iter().map(|idx| self.known.lives.list[*idx].requested.0);
        large.filter(|size| *size >= LEAST_WEIGHT).for_each(|size| *sizes.entry(size).or_default() += 1);
        sizes
    }

    fn generations(&self) -> BTreeMap<SiteId, Vec<Generation>> {
        let mut all: BTreeMap<SiteId, Vec<Generation>> = BTreeMap::new();
        let mut worked = None;
        for (idx, life) in self.own() {
            if self.is_work(idx) {
                worked = Some((life.born, life.since));
            }
            if self.is_weight(idx) {
                generation(all.entry(life.site).or_default(), worked).lives.push(idx);
            }
        }
        // The request that failed was one for weights if other requests of its stack were.
        if let Some(error) = self.failed {
            let is_for_weights =
                self.own().any(|(idx, life)| life.stack == error.stack && self.is_weight(idx));
            if is_for_weights {
                generation(all.entry(error.site).or_default(), worked).is_unfinished = true;
            }
        }
        all
    }

    fn earlier(&self, moment: u32) -> Option<Earlier> {
        let list = &self.known.lives.list;
        let mut found: Vec<Earlier> = vec![];
        for (site, mut generations) in self.generations() {
            for generation in &mut generations {
                generation.lives.retain(|idx| list[*idx].is_held_at(moment));
            }
            generations.retain(|it| it.lives.len() >= LEAST_BLOCKS || it.is_unfinished);
            let [earlier @ .., later] = &*generations else { continue };
            found.extend(self.beside(site, earlier, later, moment));
        }
        found.into_iter().max_by_key(|it| it.weights.0 + it.beside.0)
    }

    /// The earlier sets of a line, if they have the sizes of the later and nothing shows that they are used.
    fn beside(&self, site: SiteId, all: &[Generation], later: &Generation, moment: u32) -> Option<Earlier> {
        let list = &self.known.lives.list;
        let (first, earlier) = (all.first()?, all.last()?);
        if all.iter().any(|it| self.sizes(&it.lives) != self.sizes(&earlier.lives)) {
            return None;
        }
        let (worked, used_until) = later.worked?;
        let (sizes, of_later) = (self.sizes(&earlier.lives), self.sizes(&later.lives));
        let is_of_sizes = of_later.iter().all(|(size, n)| sizes.get(size).is_some_and(|had| had >= n));
        let is_enough = self.bytes(&later.lives).saturating_mul(LEAST_PART) >= self.bytes(&earlier.lives)
            && !of_later.is_empty();
        let has_worked = earlier.worked.is_none_or(|(last, _)| last < worked);
        if !is_of_sizes || !(is_enough || self.repeats(earlier, later)) || !has_worked {
            return None;
        }
        let made = later.lives.first().map_or(moment.saturating_add(1), |idx| list[*idx].born);
        let since_earlier = list[*first.lives.first()?].born;
        let is_of_earlier = |life: &Life| life.born < made && life.born > since_earlier;
        let is_of_size = |life: &Life| sizes.contains_key(&life.requested.0);
        // What training the earlier one made and is still there, and what was made of that kind since.
        let of_training =
            |idx: usize| self.role(idx).filter(|role| matches!(role, Role::Gradients | Role::Optimizer));
        let mut old: BTreeMap<Role, u64> = BTreeMap::new();
        let mut new: BTreeSet<Role> = BTreeSet::new();
        // Gradients of a pass that failed have no later course by which they are known. Temporaries of such sizes are few at a time.
        let mut in_pass = 0_u64;
        for (idx, life) in self.own().filter(|(_, life)| is_of_size(life) && life.born <= moment) {
            if life.born > made && self.known.signs[idx].has(Sign::Backward) && life.is_held_at(moment) {
                in_pass += life.bytes.0;
            }
            match of_training(idx) {
                Some(role) if is_of_earlier(life) && life.is_held_at(moment) => {
                    *old.entry(role).or_default() += life.bytes.0;
                }
                Some(role) if life.born > made => _ = new.insert(role),
                Some(_) | None => {}
            }
        }
        if in_pass.saturating_mul(LEAST_PART) >= self.bytes(&later.lives) {
            new.insert(Role::Gradients);
        }
        let has_worked_since =
            self.own().any(|(idx, life)| life.born > made && life.born <= moment && self.is_work(idx));
        let is_trained =
            || self.own().any(|(idx, life)| life.born > made && self.known.signs[idx].has(Sign::Backward));
        let since = match has_worked_since {
            false => Since::Nothing,
            // A step with the earlier one would have replaced its gradients, or made none, and would have used its state.
            true if old.keys().any(|role| new.contains(role)) => Since::Trained,
            true if !old.is_empty() && !is_trained() => Since::Evaluated,
            true => return None,
        };
        // Several that are kept on purpose, as members of an ensemble, keep nothing of their training.
        if all.len() > 1 && old.is_empty() {
            return None;
        }
        let stacks = [earlier, later].map(|it| it.lives.first().map(|idx| list[*idx].stack));
        let failed = self.failed.map(|error| error.stack);
        Some(Earlier {
            site,
            made_by: stacks
                .map(|stack| own_lines(self.known.definitions, stack.or(failed).unwrap_or_default())),
            sets: all.len() as u64,
            weights: Bytes(all.iter().map(|it| self.bytes(&it.lives)).sum()),
            beside: Bytes(old.values().sum()),
            used_until,
            since,
        })
    }

    /// Whether a model whose next weight was refused has had the sizes of the earlier one, in its order, and the refused one is the next.
    fn repeats(&self, earlier: &Generation, later: &Generation) -> bool {
        let sizes = |lives: &[usize]| lives.iter().map(|idx| self.known.lives.list[*idx].requested).collect();
        let (first, mut second): (Vec<Bytes>, Vec<Bytes>) = (sizes(&earlier.lives), sizes(&later.lives));
        let Some(error) = self.failed.filter(|_| later.is_unfinished) else { return false };
        second.push(error.requested.unwrap_or(error.bytes));
        second.last().is_some_and(|size| size.0 >= LEAST_WEIGHT) && first.starts_with(&second)
    }

    /// How many gradients of each size each backward pass makes that makes any, by its number.
    fn gradients_of_passes(&self) -> BTreeMap<usize, BTreeMap<u64, u64>> {
        let mut made: BTreeMap<usize, BTreeMap<u64, u64>> = BTreeMap::new();
        for (_, life) in self.own().filter(|(idx, _)| self.role(*idx) == Some(Role::Gradients)) {
            let pass = self.passes.partition_point(|(start, _)| *start <= life.born);
            *made.entry(pass).or_default().entry(life.requested.0).or_default() += 1;
        }
        made
    }

    /// How many of each size a backward pass makes at most.
    fn gradients(&self) -> BTreeMap<u64, u64> {
        let mut most: BTreeMap<u64, u64> = BTreeMap::new();
        for (size, n) in self.gradients_of_passes().into_values().flatten() {
            let most = most.entry(size).or_default();
            *most = (*most).max(n);
        }
        most
    }

    fn idle(&self) -> Option<IdleSets> {
        let (first, last) = match self.passes {
            [first, .., last] if self.passes.len() >= LEAST_PASSES => (first.0, last.0),
            // It fails in the first step: models whose activations the pass used go on.
            [only] if self.failed.is_some() => (only.0, only.0),
            _ => return None,
        };
        let gradients = self.gradients();
        let mut units: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        let mut paths: FxHashMap<StackId, String> = FxHashMap::default();
        for (idx, life) in self
            .own()
            .filter(|(idx, life)| life.born < first && life.is_held_at(last) && self.is_weight(*idx))
        {
            let path =
                paths.entry(life.stack).or_insert_with(|| own_path(self.known.definitions, life.stack));
            units.entry(path.clone()).or_default().push(idx);
        }
        // Gradients are of the set that has their sizes, each as often: then others of such sizes have none.
        let is_of_some = |size: u64| units.values().any(|lives| self.sizes(lives).contains_key(&size));
        let large = gradients.iter().filter(|(size, _)| **size >= LEAST_WEIGHT && is_of_some(**size));
        let large: BTreeMap<u64, u64> = large.map(|(size, n)| (*size, *n)).collect();
        let is_own = |lives: &Vec<usize>| !large.is_empty() && self.sizes(lives) == large;
        let has_own = units.values().any(is_own);
        let is_idle = |lives: &Vec<usize>| {
            let sizes = self.sizes(lives);
            let sum = |is: &dyn Fn(u64) -> bool| -> u64 {
                sizes.iter().filter(|(size, _)| is(**size)).map(|(size, n)| size * n).sum()
            };
            let is_trained =
                |size: u64| gradients.contains_key(&size) && !(has_own && large.contains_key(&size));
            !is_own(lives) && sum(&is_trained).saturating_mul(UNTRAINED) < sum(&|_| true)
        };
        let (idle, trained): (Vec<_>, Vec<_>) = units.into_iter().partition(|(_, lives)| is_idle(lives));
        let calls = Calls::of(self, Some(first).filter(|_| self.passes.len() < LEAST_PASSES));
        let ended: Vec<(&Function, Nanos)> = calls.ended(first);
        // Each model that still runs is a trained one, and each that does not has run before.
        if idle.is_empty() || calls.n_going_on(first) > trained.len() || idle.len() > ended.len() {
            return None;
        }
        let mut sets: Vec<(String, Bytes, SiteId)> = idle
            .into_iter()
            .map(|(path, lives)| (path, Bytes(self.bytes(&lives)), self.known.lives.list[lives[0]].site))
            .collect();
        sets.sort_by(|a, b| (b.1, &a.0).cmp(&(a.1, &b.0)));
        Some(IdleSets {
            site: sets.first()?.2,
            sets: sets.into_iter().map(|(path, bytes, _)| (path, bytes)).collect(),
            functions: ended.iter().map(|((function, _), _)| function.clone()).collect(),
            used_until: ended.iter().map(|(_, time)| *time).max()?,
        })
    }

    /// State of the optimizer: the large tensors. Where all are small, as those of adapters are, a factored optimizer's might be alike: then each
    /// gradient of some pass has the same number of them.
    fn state(&self) -> Vec<&'a Life> {
        let of_state = self.own().filter(|(idx, _)| self.role(*idx) == Some(Role::Optimizer));
        let all: Vec<&Life> =
            of_state.map(|(_, life)| life).filter(|life| life.requested.0 >= LEAST_STATE).collect();
        let large: Vec<&Life> = all.iter().copied().filter(|life| life.requested.0 >= LEAST_WEIGHT).collect();
        if !large.is_empty() {
            return large;
        }
        let mut made: BTreeMap<u64, u64> = BTreeMap::new();
        all.iter().for_each(|life| *made.entry(life.requested.0).or_default() += 1);
        let is_each = |pass: &BTreeMap<u64, u64>, each: u64| {
            made.iter().all(|(size, n)| pass.get(size).is_some_and(|own| own.saturating_mul(each) == *n))
        };
        let mut passes = self.gradients_of_passes().into_values();
        let is_known = passes.any(|pass| (1..=MOST_STATE).any(|each| is_each(&pass, each)));
        if is_known { all } else { vec![] }
    }

    fn unused_gradients(&self, moment: u32) -> Option<UnusedGradients> {
        let gradients = self.gradients();
        let state = self.state();
        let (with_state, made) =
            (state.iter().map(|life| life.requested.0).collect::<FxHashSet<u64>>(), state.first()?.born);
        // A pass began with the state; state in other widths or shapes says nothing about whose it is.
        let is_known = with_state.iter().all(|size| gradients.contains_key(size))
            && self.passes.iter().any(|(start, _)| *start > made);
        // A graph of gradients (`create_graph=True`) is held after its pass, too, and has no parameters.
        let parameters: FxHashSet<u64> = self
            .own()
            .filter(|(idx, _)| self.role(*idx) == Some(Role::Parameters))
            .map(|(_, life)| life.requested.0)
            .collect();
        let is_of_parameter = |size: u64| size >= LEAST_WEIGHT && parameters.contains(&size);
        let large = || gradients.iter().filter(|(size, _)| is_of_parameter(**size));
        let unused = || large().filter(|(size, _)| !with_state.contains(*size));
        let (all, sum): (u64, u64) =
            (large().map(|(size, n)| size * n).sum(), unused().map(|(size, n)| size * n).sum());
        let blocks: u64 = unused().map(|(_, n)| n).sum();
        if !is_known || sum.saturating_mul(2) < all || blocks < LEAST_GRADIENTS {
            return None;
        }
        // The forward operations of these layers, by their lines.
        let sizes: FxHashSet<u64> = unused().map(|(size, _)| *size).collect();
        // An optimizer without state works on its gradients, too.
        let is_of_optimizer = |(idx, life): (usize, &Life)| {
            sizes.contains(&life.requested.0) && self.known.signs[idx].has(Sign::Optimizer)
        };
        if self.own().any(is_of_optimizer) {
            return None;
        }
        let n_made = |is: &dyn Fn(u64) -> bool| {
            let own = self.own().filter(|(idx, _)| self.role(*idx) == Some(Role::Gradients));
            own.filter(|(_, life)| is(life.requested.0)).count() as u64
        };
        let with_state_once: u64 = with_state.iter().filter_map(|size| gradients.get(size)).sum();
        let is_kept = n_made(&|size| sizes.contains(&size)) == blocks
            && n_made(&|size| with_state.contains(&size)) >= with_state_once.saturating_mul(2)
            && self.own().all(|(idx, life)| {
                let is_unused = self.role(idx) == Some(Role::Gradients) && sizes.contains(&life.requested.0);
                !is_unused || self.passes.last().is_some_and(|(start, _)| life.died > *start)
            });
        let definitions = self.known.definitions;
        let mut lines = Lines::of(definitions);
        let mut forward: FxHashSet<u64> = FxHashSet::default();
        let mut largest: Option<&Life> = None;
        for (_, life) in self.own().filter(|(idx, life)| {
            self.role(*idx) == Some(Role::Gradients) && sizes.contains(&life.requested.0)
        }) {
            let backward = definitions.stack(life.stack).and_then(|stack| stack.backward.as_ref());
            forward.extend(backward.and_then(|it| lines.hash(it.forward)));
            largest = largest.filter(|it| it.bytes >= life.bytes).or(Some(life));
        }
        let mut by_site: BTreeMap<SiteId, (u64, StackId)> = BTreeMap::new();
        for (idx, life) in self.own().filter(|(_, life)| life.is_held_at(moment)) {
            let is_kept = self.role(idx) == Some(Role::Activations);
            if is_kept && lines.hash(life.stack).is_some_and(|line| forward.contains(&line)) {
                by_site.entry(life.site).or_insert((0, life.stack)).0 += life.bytes.0;
            }
        }
        let activations = by_site.values().map(|(bytes, _)| bytes).sum();
        let most = by_site.iter().max_by_key(|(site, (bytes, _))| (*bytes, **site));
        let (site, stack) =
            most.map(|(site, (_, stack))| (*site, *stack)).or(largest.map(|it| (it.site, it.stack)))?;
        Some(UnusedGradients {
            gradients: Bytes(sum),
            blocks,
            is_kept,
            activations: Bytes(activations),
            site,
            caller: caller_of_model(definitions, stack).unwrap_or_default(),
        })
    }
}

/// The generation that what is requested now belongs to: another one where models have worked since the last.
fn generation(of_site: &mut Vec<Generation>, worked: Option<(u32, Nanos)>) -> &mut Generation {
    if of_site.last().is_none_or(|last| last.worked != worked) {
        of_site.push(Generation { worked, ..Generation::default() });
    }
    of_site.last_mut().expect("just made")
}

/// Stacks by their lines of Python, whatever their native frames.
pub(crate) struct Lines<'a> {
    definitions: &'a dyn Definitions,
    of_stacks: FxHashMap<StackId, Option<u64>>,
}

impl<'a> Lines<'a> {
    pub(crate) fn of(definitions: &'a dyn Definitions) -> Lines<'a> {
        Lines { definitions, of_stacks: FxHashMap::default() }
    }

    /// None of a stack of the backward pass, and without Python.
    pub(crate) fn hash(&mut self, id: StackId) -> Option<u64> {
        use std::hash::{BuildHasher, BuildHasherDefault};
        let definitions = self.definitions;
        *self.of_stacks.entry(id).or_insert_with(|| {
            let stack = definitions.stack(id).filter(|stack| stack.backward.is_none())?;
            let lines: Vec<(&str, &str, u32)> = python_lines(definitions, stack).collect();
            let hasher = BuildHasherDefault::<rustc_hash::FxHasher>::default();
            (!lines.is_empty()).then(|| hasher.hash_one(&lines))
        })
    }
}

/// The functions of models, each with when it last ran: as the outermost of a call, and at all.
struct Calls {
    outermost: BTreeMap<Function, (u32, Nanos)>,
    any: FxHashMap<Function, u32>,
}

/// Its name, and its file.
type Function = (String, String);

impl Calls {
    /// Models whose memory is held when the only pass begins have not ended.
    fn of(maker: &Maker<'_>, first: Option<u32>) -> Calls {
        let mut last: FxHashMap<StackId, (u32, Nanos)> = FxHashMap::default();
        let is_call = |signs: Signs| {
            let is_other =
                [Sign::Backward, Sign::Model, Sign::Workspace].into_iter().any(|sign| signs.has(sign));
            signs.has(Sign::Forward) && !is_other
        };
        for (_, life) in maker.own().filter(|(idx, _)| is_call(maker.known.signs[*idx])) {
            // The pass gives activations back, and not a library's workspace.
            let is_awaited = |first: &u32| life.is_held_at(*first) && life.died != NEVER;
            let at = (life.born.max(first.filter(is_awaited).unwrap_or_default()), life.since);
            let known = last.entry(life.stack).or_insert(at);
            *known = at.max(*known);
        }
        let mut calls = Calls { outermost: BTreeMap::new(), any: FxHashMap::default() };
        for (stack, at) in last {
            let functions = functions(maker.known.definitions, stack);
            for (n, function) in functions.into_iter().enumerate() {
                if n == 0 {
                    let known = calls.outermost.entry(function.clone()).or_insert(at);
                    *known = at.max(*known);
                }
                let known = calls.any.entry(function).or_insert(at.0);
                *known = at.0.max(*known);
            }
        }
        calls
    }

    /// Those that were called by the program and never ran again from a moment on.
    fn ended(&self, moment: u32) -> Vec<(&Function, Nanos)> {
        let is_over = |function: &Function| self.any.get(function).is_some_and(|last| *last < moment);
        self.outermost.iter().filter(|(it, _)| is_over(it)).map(|(it, (_, time))| (it, *time)).collect()
    }

    fn n_going_on(&self, moment: u32) -> usize {
        self.outermost.values().filter(|(last, _)| *last >= moment).count()
    }
}

/// The functions that `Module.__call__` called on a stack, outermost first.
fn functions(definitions: &dyn Definitions, id: StackId) -> Vec<Function> {
    let Some(stack) = definitions.stack(id) else { return vec![] };
    let mut lines: Vec<(&str, &str, u32)> = python_lines(definitions, stack).collect();
    lines.reverse();
    let is_call = |(function, file, _): &(&str, &str, u32)| {
        file.ends_with("/torch/nn/modules/module.py") && function.ends_with("_call_impl")
    };
    let called = lines.windows(2).filter(|pair| is_call(&pair[0]) && !is_call(&pair[1]));
    called.map(|pair| (pair[1].0.to_owned(), pair[1].1.to_owned())).collect()
}

/// The program's own lines of a stack, innermost first.
fn own_lines(definitions: &dyn Definitions, id: StackId) -> Vec<(String, String, u32)> {
    let Some(stack) = definitions.stack(id) else { return vec![] };
    let own = python_lines(definitions, stack).filter(|(_, file, _)| python_package(file).is_none());
    own.map(|(function, file, line)| (function.to_owned(), file.to_owned(), line)).collect()
}

/// The same in words.
fn own_path(definitions: &dyn Definitions, id: StackId) -> String {
    let own = own_lines(definitions, id);
    let own: Vec<String> =
        own.iter().map(|(function, file, line)| format!("{function} ({file}:{line})")).collect();
    own.join(", called from ")
}

/// The moment after the last birth up to a time.
pub(crate) fn moment_at(known: Known<'_>, device: i16, time: Nanos) -> u32 {
    let own = known.lives.list.iter().filter(|life| life.device == device && life.since <= time);
    own.map(|life| life.born).max().unwrap_or(NEVER)
}
