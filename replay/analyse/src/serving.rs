//! What PyTorch's blocks are for where nothing is trained: weights, key-value caches, and what a request needs, inferred from
//! when they were asked for, how long they lived, and what took their place.
//!
//! ```text
//!  load    weights      ├──────────────────────────────────────────
//!          temporaries  ├┤├┤├┤
//!  serve   activations            ├┤├┤├┤├┤      ├┤├┤├┤├┤
//!          KV cache               ├┤
//!          (grows by               ├─┤            ├┤
//!           replacement)            ├──┤           ├─┤
//!                                    ├───┤          ├──┤
//! ```
//! Serving is where the call stacks recur that are still at work at the end. What no rule decides is said to be unknown.

mod blocks;

use std::cmp::Reverse;
use std::ops::Range;

use gputrace_schemas::event::{Bytes, StackId};
use gputrace_sim::cores;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::lives::NEVER;
use crate::roles::{Hint, Role};
pub(crate) use blocks::Blocks;
use blocks::{Births, by_stack};

/// Births of a stack that make it a habit.
const RECURS: usize = 3;
/// Sizes that a chain of replacements must go through to be called growing.
const GENERATIONS: usize = 8;
/// Share of its blocks that must do what is said of a stack.
const MOSTLY: f64 = 0.8;
/// What is held over more than this share of the serving is held long.
const LONG: f64 = 0.25;
/// A request takes less than this share of the serving: what takes more is the program's life.
const REQUEST: f64 = 0.75;
/// What a place makes for one request, at most, to be told from a model that makes place for another.
const FEW: usize = 4;
/// Births while a block is held, below which it is not held but passes by.
const PASSING: usize = 8;
/// Births of its own stack while a block is held, from which on it is one of a collection.
const COLLECTION: usize = 8;
/// Fewer blocks of equal size are not one for each layer.
const LAYERS: usize = 4;
/// Births from one of them to the next, at most: keys and values may take turns.
const NEIGHBOURS: usize = 2;
/// Blocks of less than this part of the largest weight of each layer are adapters rather than caches.
const SMALLER: u64 = 8;
/// Parts in which stacks are handed to threads.
const GROUPS: usize = 64;
/// Share of the births at the end that show what the program did last.
const LAST: usize = 10;

/// The roles of the blocks of a device.
pub(super) fn roles(blocks: Blocks) -> Vec<Role> {
    let serving = Serving::of(blocks);
    let mut roles = vec![Role::Unknown; blocks.len()];
    cores::fill(&mut roles, |idx| serving.role(idx));
    serving.add_caches_by_layer(&mut roles);
    roles
}

/// All blocks of one call stack.
struct Stack {
    /// Where their indexes are in [`Serving::by_stack`].
    blocks: Range<usize>,
    /// How many are held to the end.
    n_held: usize,
    /// How often it held nothing, then something.
    n_episodes: usize,
    /// The longest time that it held something, in births of the device.
    longest: usize,
    /// How it grows.
    chain: Chain,
    /// Its largest block.
    largest: Bytes,
    /// Its entries outlive many of their like, so that there is always some: what a program keeps for later.
    is_collection: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Chain {
    /// It does not.
    None,
    /// By replacement, one block at a time.
    One,
    /// The same, several of one size side by side.
    Several,
}

struct Serving<'a> {
    blocks: Blocks<'a>,
    stacks: FxHashMap<StackId, Stack>,
    /// Indexes of the blocks of each stack, in the order of their births.
    by_stack: Vec<u32>,
    /// Held from its birth to the end of all work.
    is_held: Vec<bool>,
    /// How many are born while it lives.
    span: Vec<u32>,
    /// The first block of the serving, if there is any.
    start: Option<usize>,
    /// A module or a loader made some of what is held.
    has_named_weights: bool,
    /// Sizes of weights that a module made and that were given back, and when one was first.
    given_back: FxHashMap<Bytes, u32>,
    /// One that is larger than all others that are held: a pool or a table, which no rule can tell from each other.
    giant: Option<usize>,
    /// The largest block that code of a cache asked for.
    largest_cache: Bytes,
    /// How many stacks grow whose largest block has this size.
    growing: FxHashMap<Bytes, usize>,
}

impl<'a> Serving<'a> {
    fn of(blocks: Blocks<'a>) -> Serving<'a> {
        let n = blocks.len();
        let births = Births::of(blocks);
        let mut span = vec![0; n];
        cores::fill(&mut span, |idx| {
            let died = blocks.life(idx).died;
            let end = if died == NEVER { n } else { births.until(died) };
            (end - idx - 1) as u32
        });
        let caches = blocks.all().filter(|(_, facts)| facts.has(Hint::Cache));
        let (by_stack, ranges) = by_stack(blocks);
        let mut serving = Serving {
            blocks,
            stacks: FxHashMap::default(),
            by_stack,
            is_held: vec![false; n],
            span,
            start: None,
            has_named_weights: false,
            given_back: FxHashMap::default(),
            giant: None,
            largest_cache: caches.map(|(life, _)| life.bytes).max().unwrap_or_default(),
            growing: FxHashMap::default(),
        };
        let groups: Vec<_> = ranges.chunks(ranges.len().div_ceil(GROUPS).max(1)).collect();
        let judged = cores::on_all_cores(groups.len(), |group| {
            let stacks = groups[group].iter().map(|range| serving.stack(range.clone()));
            Some(stacks.collect::<Vec<_>>())
        });
        for (stack, held) in judged.into_iter().flatten() {
            if stack.chain != Chain::None {
                *serving.growing.entry(stack.largest).or_default() += 1;
            }
            for idx in held {
                serving.is_held[idx as usize] = true;
            }
            let id = blocks.life(serving.own(&stack)[0] as usize).stack;
            serving.stacks.insert(id, stack);
        }
        serving.start = serving.first_of_work();
        serving.giant = serving.giant();
        // Those too that a server gave back to sleep.
        let is_kept = |idx: usize| serving.is_held[idx] || serving.is_long(idx, n);
        let named: Vec<usize> =
            (0..n).filter(|idx| blocks.facts(*idx).has(Hint::Model) && is_kept(*idx)).collect();
        for idx in named.iter().filter(|idx| blocks.life(**idx).died != NEVER) {
            let life = blocks.life(*idx);
            let first = serving.given_back.entry(life.requested).or_insert(life.died);
            *first = life.died.min(*first);
        }
        serving.has_named_weights = !named.is_empty();
        serving
    }

    /// The blocks of a stack.
    fn own(&self, stack: &Stack) -> &[u32] {
        &self.by_stack[stack.blocks.clone()]
    }

    fn span(&self, idx: usize) -> usize {
        self.span[idx] as usize
    }

    fn reaches_end(&self, idx: usize) -> bool {
        idx + self.span(idx) + 1 == self.blocks.len()
    }

    /// A stack, and those of its blocks that are held.
    fn stack(&self, range: Range<usize>) -> (Stack, Vec<u32>) {
        let n = self.blocks.len();
        let own = &self.by_stack[range.clone()];
        let passed = own.iter().filter(|idx| !self.reaches_end(**idx as usize)).count();
        // What was made last of what otherwise passes is still to pass.
        let most_at_once = self.most_at_once(own);
        let is_last = |place: usize| own.len() - place <= most_at_once;
        let is_held = |(place, idx): &(usize, &u32)| {
            let idx = **idx as usize;
            let is_variable = passed * 2 > own.len() && is_last(*place);
            let dies = self.blocks.life(idx).died != NEVER;
            // What a program gives back as it ends was held, unless it had only just been made.
            let is_young = dies && (self.span(idx) < PASSING.min(n / 4).max(1) || self.span(idx) * 20 < n);
            self.reaches_end(idx) && !is_variable && !is_young
        };
        let held: Vec<u32> = own.iter().enumerate().filter(is_held).map(|(_, idx)| *idx).collect();
        let (n_episodes, longest) = self.episodes(own);
        let largest = own.iter().map(|idx| self.blocks.life(*idx as usize).bytes).max();
        let stack = Stack {
            n_held: held.len(),
            n_episodes,
            longest,
            chain: self.chain(own),
            largest: largest.unwrap_or_default(),
            is_collection: n_episodes < RECURS && self.is_collection(own),
            blocks: range,
        };
        (stack, held)
    }

    fn giant(&self) -> Option<usize> {
        let held = || (0..self.blocks.len()).filter(|idx| self.is_held[*idx]);
        let bytes = |idx: usize| self.blocks.life(idx).bytes.0;
        let all = held().map(bytes).fold(0, u64::saturating_add);
        held().find(|idx| bytes(*idx) > all / 2).filter(|_| held().count() > RECURS)
    }

    /// The most blocks of a stack that were held together and given back again.
    fn most_at_once(&self, own: &[u32]) -> usize {
        let dies = |idx: &u32| self.blocks.life(*idx as usize).died != NEVER;
        let mut ends: Vec<u32> = Vec::with_capacity(own.len());
        ends.extend(own.iter().filter(|idx| dies(idx)).map(|idx| idx + self.span[*idx as usize]));
        ends.sort_unstable();
        let (mut most, mut gone) = (1, 0);
        for (place, idx) in own.iter().enumerate().filter(|(_, idx)| dies(idx)) {
            while ends.get(gone).is_some_and(|end| end < idx) {
                gone += 1;
            }
            most = most.max((place + 1).saturating_sub(gone));
        }
        most
    }

    /// How often a stack held nothing before it held something, and for how many births at most.
    fn episodes(&self, own: &[u32]) -> (usize, usize) {
        let (mut n, mut longest, mut begin, mut end) = (0, 0, 0, 0);
        let mut died = 0;
        for idx in own.iter().map(|idx| *idx as usize) {
            let life = self.blocks.life(idx);
            if n == 0 || life.born > died {
                n += 1;
                (begin, died) = (idx, 0);
            }
            died = died.max(life.died);
            end = end.max(idx + self.span(idx) + 1);
            longest = longest.max(end - begin);
        }
        (n, longest)
    }

    /// Whether the blocks of a stack grow, each held until a larger one takes its place.
    fn chain(&self, own: &[u32]) -> Chain {
        let life = |idx: u32| self.blocks.life(idx as usize);
        let size = |idx: u32| life(idx).bytes;
        let (mut n_in_chains, mut n_generations, mut n_replaced) = (0, 0, 0);
        for run in own.chunk_by(|old, new| size(*new) >= size(*old)) {
            let generations: Vec<&[u32]> = run.chunk_by(|a, b| size(*a) == size(*b)).collect();
            if generations.len() < GENERATIONS {
                continue;
            }
            for (pair, after) in generations.windows(2).zip(2..) {
                let (next, later) = (pair[1], generations.get(after));
                let first = life(next[0]).born;
                let over = later.map_or(NEVER, |later| life(later[later.len() - 1]).born);
                let is_replaced = |idx: &&u32| {
                    let died = life(**idx).died;
                    died > first && died != NEVER && died < over
                };
                n_replaced += pair[0].iter().filter(is_replaced).count();
                n_in_chains += pair[0].len();
                n_generations += 1;
            }
        }
        if n_in_chains == 0 || (n_replaced as f64) < MOSTLY * n_in_chains as f64 {
            return Chain::None;
        }
        if n_in_chains >= 2 * n_generations { Chain::Several } else { Chain::One }
    }

    /// The first birth by a stack that is at work after all that is held was asked for, again and again.
    fn first_of_work(&self) -> Option<usize> {
        let n = self.blocks.len();
        let last_held = self.is_held.iter().rposition(|is_held| *is_held).map_or(0, |idx| idx + 1);
        let first = |from: usize| {
            let working: FxHashSet<StackId> = (from..n).map(|idx| self.blocks.life(idx).stack).collect();
            let working = working.iter().filter_map(|id| self.stacks.get(id));
            let recur = working.filter(|stack| stack.blocks.len() - stack.n_held >= RECURS);
            let firsts =
                recur.filter_map(|stack| self.own(stack).iter().find(|idx| !self.is_held[**idx as usize]));
            firsts.min().map(|idx| *idx as usize)
        };
        first(last_held).or_else(|| first(n - n / LAST))
    }

    fn role(&self, idx: usize) -> Role {
        let (life, facts) = (self.blocks.life(idx), self.blocks.facts(idx));
        let Some(stack) = self.stacks.get(&life.stack) else { return Role::Unknown };
        if life.stack == StackId(0) {
            let is_kept = self.is_held[idx] || self.is_long(idx, self.blocks.len());
            return if is_kept { Role::Unknown } else { Role::Temporaries };
        }
        let is_work = self.start.is_some_and(|start| idx >= start);
        if facts.has(Hint::Cache) {
            // The largest of them counts that was made last of all, too: the program ended, or its trace, when it had just started to serve.
            let is_last_and_largest = self.reaches_end(idx) && life.bytes >= self.largest_cache;
            if is_last_and_largest
                || self.is_held[idx]
                || self.span(idx) >= PASSING.min(self.blocks.len() / 4)
            {
                return Role::KvCache;
            }
        }
        // One is back that had been given back, as when a server wakes up.
        let is_of_size = self.given_back.get(&life.requested).is_some_and(|died| *died < life.born);
        if is_of_size && self.reaches_end(idx) {
            return Role::Weights;
        }
        if self.is_held[idx] {
            return match (facts.has(Hint::Model), is_work) {
                (true, _) => Role::Weights,
                _ if self.giant == Some(idx) => Role::Unknown,
                (false, false) if self.start.is_some() && !self.has_named_weights => Role::Weights,
                // It ended in the midst of its first pass.
                (false, false) if self.start.is_none() && facts.has(Hint::Forward) => Role::Activations,
                _ => Role::Unknown,
            };
        }
        if stack.chain != Chain::None && !facts.has(Hint::Model) {
            return if self.is_of_several_chains(stack) { Role::KvCache } else { Role::Unknown };
        }
        let Some(start) = self.start else {
            return if self.is_long(idx, self.blocks.len()) { Role::Unknown } else { Role::Temporaries };
        };
        let n_served = self.blocks.len() - start.min(self.blocks.len());
        if facts.has(Hint::Model) && self.is_long(idx, self.blocks.len()) {
            return Role::Weights;
        }
        if idx + self.span(idx) < start {
            return Role::Temporaries;
        }
        // Weights of a model that made place for another.
        if facts.has(Hint::Model) && self.is_long(idx, n_served) {
            return Role::Weights;
        }
        if stack.is_collection || (self.is_long(idx, n_served) && !is_for_a_request(stack, n_served)) {
            return Role::Unknown;
        }
        if is_work { Role::Serving } else { Role::Temporaries }
    }

    fn is_long(&self, idx: usize, of: usize) -> bool {
        self.span(idx) >= PASSING && self.span(idx) as f64 > LONG * of as f64
    }

    /// Whether most blocks of a stack outlive many of their like.
    fn is_collection(&self, own: &[u32]) -> bool {
        let is_entry = |(place, idx): (usize, &u32)| {
            own.get(place + COLLECTION).is_some_and(|later| *later <= idx + self.span[*idx as usize])
        };
        own.iter().enumerate().filter(|it| is_entry(*it)).count() * 2 > own.len()
    }

    /// Keys and values of a layer grow side by side; what grows alone may be any result.
    fn is_of_several_chains(&self, stack: &Stack) -> bool {
        let twins = self.growing.get(&stack.largest).copied().unwrap_or(0);
        stack.chain == Chain::Several || twins >= 2
    }

    /// Blocks of equal size, one or two for each layer of the weights and not much smaller, asked for at one place one after
    /// another when all weights were there, and held.
    fn add_caches_by_layer(&self, roles: &mut [Role]) {
        let mut pools: Vec<Vec<&[u32]>> = self.stacks.values().map(|stack| self.by_layer(stack)).collect();
        pools.sort_by_key(|pools| Reverse(pools.first().map(|pool| pool[0])));
        for pools in pools.iter().filter(|pools| !pools.is_empty()) {
            let (first, last) = (pools[0][0] as usize, pools[0][pools[0].len() - 1] as usize);
            let mut sizes: FxHashMap<u64, usize> = FxHashMap::default();
            for idx in (0..first).filter(|idx| roles[*idx] == Role::Weights) {
                *sizes.entry(self.blocks.life(idx).bytes.0).or_default() += 1;
            }
            let is_after_all = (last + 1..roles.len()).all(|idx| roles[idx] != Role::Weights);
            let size = self.blocks.life(first).bytes.0;
            if is_after_all && is_one_for_each_layer(&sizes, pools[0].len(), size) {
                pools.iter().flat_map(|pool| *pool).for_each(|idx| roles[*idx as usize] = Role::KvCache);
            }
        }
    }

    /// The blocks of a stack, if they are only such as these: so many of one size, one after another, and held.
    fn by_layer(&self, stack: &Stack) -> Vec<&[u32]> {
        let size = |idx: u32| self.blocks.life(idx as usize).bytes;
        let own = self.own(stack);
        let pools: Vec<&[u32]> = own.chunk_by(|old, new| (new - old) as usize <= NEIGHBOURS).collect();
        let n = pools[0].len();
        let is_kept = |idx: usize| self.is_held[idx] || self.span(idx) >= PASSING * n;
        let is_pool = |pool: &&[u32]| {
            pool.len() == n && pool.iter().all(|idx| is_kept(*idx as usize) && size(*idx) == size(pool[0]))
        };
        let is_named = self.blocks.facts(own[0] as usize).has(Hint::Model);
        if is_named || n < LAYERS || !pools.iter().all(is_pool) { vec![] } else { pools }
    }
}

/// Whether most of the weights, by bytes, come in multiples of `n`, or of half of it, and those that do are not much larger
/// than `bytes`: adapters are.
fn is_one_for_each_layer(sizes: &FxHashMap<u64, usize>, n: usize, bytes: u64) -> bool {
    let sum = |sizes: &[(u64, usize)]| {
        sizes.iter().map(|(bytes, n)| bytes.saturating_mul(*n as u64)).fold(0, u64::saturating_add)
    };
    let all: Vec<(u64, usize)> = sizes.iter().map(|(bytes, times)| (*bytes, *times)).collect();
    let fits = |layers: usize| {
        let repeated: Vec<_> =
            all.iter().copied().filter(|(_, times)| times.is_multiple_of(layers)).collect();
        let largest = repeated.iter().map(|(bytes, _)| *bytes).max().unwrap_or(u64::MAX);
        let fewest = repeated.iter().map(|(_, times)| *times).min().unwrap_or(0);
        largest / SMALLER <= bytes && fewest <= 2 * layers && sum(&repeated) >= sum(&all).div_ceil(2)
    };
    fits(n) || (n.is_multiple_of(2) && fits(n / 2))
}

/// A place that has a few things for a while, then nothing, again and again.
fn is_for_a_request(stack: &Stack, n_served: usize) -> bool {
    let has_few = stack.blocks.len() <= FEW * stack.n_episodes;
    has_few && stack.n_episodes >= RECURS && stack.longest as f64 <= REQUEST * n_served as f64
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::categories::Categories;
    use crate::lives::Lives;
    use crate::story::Story;
    use gputrace_trace::scene::recording;
    use gputrace_trace::source::Source;

    const MODULE: &str = "Module._apply@/v/torch/nn/modules/module.py:900,<module>@/job/serve.py:1";
    const LAYERS_OF_MODEL: u64 = 12;
    /// Programs of each kind.
    const SEEDS: u64 = 4;

    /// A program that writes its own scene; sizes are drawn from a seed.
    struct Program {
        text: String,
        seed: u64,
        n: u64,
        held: Vec<(u64, u64)>,
    }

    impl Program {
        fn new(seed: u64) -> Program {
            Program { text: String::new(), seed, n: 0, held: vec![] }
        }

        /// Both ends included.
        fn draw(&mut self, from: u64, to: u64) -> u64 {
            self.seed =
                self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            from + (self.seed >> 33) % (to - from + 1)
        }

        /// A block of so many units of 512 bytes, by a place.
        fn take(&mut self, units: u64, by: &str) -> (u64, u64) {
            self.n += 1;
            let bytes = units.max(1) * 512;
            let by = if by.contains('@') { by.to_owned() } else { format!("{by}@/job/serve.py:7") };
            self.text += &format!("block addr=a{} bytes={bytes} requested={bytes} by={by}\n", self.n);
            (self.n, bytes)
        }

        fn give(&mut self, (n, bytes): (u64, u64)) {
            self.text += &format!("free addr=a{n} bytes={bytes}\n");
        }

        /// A transformer's weights; `staged` through a buffer, each.
        fn load(&mut self, by: &str, is_staged: bool) {
            let width = self.draw(64, 512);
            for layer in 0..LAYERS_OF_MODEL {
                for units in [1, width, width, width, width, 1, width * 4, width * 4] {
                    let staged = is_staged.then(|| self.take(units * 2, "stage"));
                    let weight = self.take(units, by);
                    if layer > 0 {
                        self.held.push(weight);
                    }
                    staged.into_iter().for_each(|block| self.give(block));
                }
            }
            self.take(width * 8, by);
        }

        /// One forward pass: of each layer two values that follow each other, and one that is needed to the end of it.
        fn forward(&mut self, length: u64) {
            let mut x = self.take(length * 4, "embed");
            for _ in 0..LAYERS_OF_MODEL {
                let h = self.take(length * 8, "attention");
                let scores = self.take(length * length / 64, "scores");
                self.give(scores);
                let next = self.take(length * 4, "residual");
                self.give(x);
                self.give(h);
                x = next;
            }
            let out = self.take(length * 16, "head");
            self.give(x);
            self.give(out);
        }
    }

    /// What the bytes of every place are mostly called: place to role.
    fn roles_of(program: &Program) -> BTreeMap<String, &'static str> {
        let source = Source::of("serve.gtr", recording(&program.text));
        let mut lives = Lives::default();
        let story = Story::watched(&source, &mut lives);
        lives.finish();
        let sites = &story.ledger.sites;
        let roles = crate::roles::roles(&lives, source.definitions(), sites, &Categories::default());
        let mut bytes: BTreeMap<String, BTreeMap<u16, u64>> = BTreeMap::new();
        for (life, role) in lives.list.iter().zip(&roles.of_lives) {
            let place = sites.site(life.site).map(|site| site.function.clone()).unwrap_or_default();
            *bytes.entry(place).or_default().entry(*role).or_default() += life.bytes.0;
        }
        bytes
            .into_iter()
            .map(|(place, roles)| {
                let all: u64 = roles.values().sum();
                let (role, most) = roles.into_iter().max_by_key(|(_, bytes)| *bytes).unwrap();
                let is_clear = most as f64 >= 0.9 * all as f64;
                (place, if is_clear { Role::ALL[usize::from(role)].name() } else { "mixed" })
            })
            .collect()
    }

    /// Over many sizes and lengths, every place has its role.
    fn check(make: impl Fn(&mut Program), expected: &[(&str, Role)]) {
        for seed in 0..SEEDS {
            let mut program = Program::new(seed * 77 + 5);
            make(&mut program);
            let found = roles_of(&program);
            for (place, role) in expected {
                assert_eq!(found.get(*place), Some(&role.name()), "{place}, seed {seed}: {found:?}");
            }
        }
    }

    const FORWARD: [(&str, Role); 4] = [
        ("embed", Role::Serving),
        ("attention", Role::Serving),
        ("scores", Role::Serving),
        ("residual", Role::Serving),
    ];

    fn with(more: &[(&'static str, Role)]) -> Vec<(&'static str, Role)> {
        FORWARD.iter().chain(more).copied().collect()
    }

    /// Requests of so many tokens, with a cache that grows by concatenation: of all layers, keys and values.
    fn generate(p: &mut Program, n_requests: u64, by: [&str; 2], gives_at_once: bool) {
        for _ in 0..n_requests {
            let (prompt, tokens) = (p.draw(8, 40), p.draw(20, 40));
            p.forward(prompt);
            let mut cache: Vec<(u64, u64)> = vec![];
            for token in 0..tokens {
                let mut after = vec![];
                for layer in 0..LAYERS_OF_MODEL as usize {
                    let h = p.take(8, "attention");
                    for (kind, by) in by.iter().enumerate() {
                        after.push(p.take((prompt + token) * 4, by));
                        if gives_at_once && token > 0 {
                            p.give(cache[layer * 2 + kind]);
                        }
                    }
                    let scores = p.take(prompt + token, "scores");
                    p.give(scores);
                    p.give(h);
                }
                if !gives_at_once {
                    cache.drain(..).for_each(|block| p.give(block));
                }
                cache = after;
                let logits = p.take(64, "logits");
                p.give(logits);
            }
            cache.into_iter().for_each(|block| p.give(block));
        }
    }

    #[test]
    fn a_cache_that_grows_by_concatenation_is_one() {
        for at_once in [true, false] {
            for by in [["cat", "cat"], ["cat_k", "cat_v"]] {
                check(
                    |p| {
                        p.load("load", false);
                        generate(p, 4, by, at_once);
                    },
                    &with(&[("load", Role::Weights), (by[0], Role::KvCache), (by[1], Role::KvCache)]),
                );
            }
        }
    }

    #[test]
    fn one_request_is_enough_and_names_of_a_cache_too() {
        let named = "DynamicLayer.update@/v/transformers/cache_utils.py:120,generate@/job/serve.py:9";
        check(
            |p| {
                p.load(MODULE, false);
                generate(p, 1, [named, named], true);
            },
            &[("<module>", Role::Weights), ("DynamicLayer.update", Role::KvCache), ("scores", Role::Serving)],
        );
    }

    #[test]
    fn what_grows_alone_is_not_called_a_cache() {
        check(
            |p| {
                p.load("load", false);
                for _ in 0..5 {
                    let mut text = p.take(4, "all_logits");
                    for token in 1..40 {
                        p.forward(4);
                        let longer = p.take(4 + token * 4, "all_logits");
                        p.give(text);
                        text = longer;
                    }
                    p.give(text);
                }
            },
            &with(&[("load", Role::Weights), ("all_logits", Role::Unknown)]),
        );
    }

    #[test]
    fn a_pool_for_each_layer_after_the_weights_is_a_cache() {
        for (is_profiled, per_layer) in [(true, 1), (true, 2), (false, 1), (false, 2)] {
            check(
                |p| {
                    p.load("load", false);
                    if is_profiled {
                        p.forward(64);
                    }
                    let units = p.draw(4096, 8192);
                    (0..LAYERS_OF_MODEL * per_layer).for_each(|_| {
                        p.take(units, "make_pages");
                    });
                    for _ in 0..20 {
                        let length = p.draw(1, 64);
                        p.forward(length);
                    }
                },
                &with(&[("load", Role::Weights), ("make_pages", Role::KvCache)]),
            );
        }
    }

    #[test]
    fn a_cache_that_each_request_has_anew_is_one() {
        check(
            |p| {
                p.load("load", false);
                for _ in 0..5 {
                    let units = p.draw(1024, 2048);
                    let pool: Vec<_> =
                        (0..LAYERS_OF_MODEL * 2).map(|_| p.take(units, "make_cache")).collect();
                    (0..8).for_each(|_| p.forward(8));
                    pool.into_iter().for_each(|block| p.give(block));
                }
            },
            &with(&[("load", Role::Weights), ("make_cache", Role::KvCache)]),
        );
    }

    #[test]
    fn a_pool_that_does_not_fit_the_layers_is_not_called_a_cache() {
        check(
            |p| {
                p.load("load", false);
                p.forward(64);
                (0..7).for_each(|_| {
                    p.take(5000, "buffers");
                });
                for _ in 0..20 {
                    p.forward(32);
                }
            },
            &with(&[("load", Role::Weights), ("buffers", Role::Unknown)]),
        );
    }

    #[test]
    fn one_block_that_is_larger_than_all_weights_is_not_called_weights() {
        check(
            |p| {
                p.load("load", false);
                p.take(1 << 20, "pool");
                (0..9).for_each(|_| p.forward(16));
            },
            &with(&[("load", Role::Weights), ("pool", Role::Unknown)]),
        );
    }

    #[test]
    fn a_pool_by_name_is_a_cache_whatever_its_size() {
        let named = "GPUModelRunner._allocate_kv_cache_tensors@/v/vllm/v1/worker/gpu_model_runner.py:5000";
        check(
            |p| {
                p.load(MODULE, false);
                p.forward(64);
                (0..5).for_each(|n| {
                    p.take(100 + n, named);
                });
                (0..9).for_each(|_| p.forward(16));
            },
            &with(&[
                ("<module>", Role::Weights),
                ("GPUModelRunner._allocate_kv_cache_tensors", Role::KvCache),
            ]),
        );
    }

    #[test]
    fn an_encoder_in_a_loop_has_weights_and_activations() {
        check(
            |p| {
                let is_staged = p.draw(0, 1) == 1;
                p.load("load", is_staged);
                let n = p.draw(3, 60);
                for _ in 0..n {
                    let length = p.draw(8, 128);
                    let input = p.take(length, "request");
                    p.forward(length);
                    p.give(input);
                }
            },
            &with(&[("load", Role::Weights), ("request", Role::Serving)]),
        );
    }

    #[test]
    fn what_a_loader_stages_or_quantises_from_is_temporary() {
        check(
            |p| {
                p.load("load", true);
                for _ in 0..4 {
                    p.forward(16);
                }
            },
            &[("load", Role::Weights), ("stage", Role::Temporaries)],
        );
    }

    #[test]
    fn a_program_that_cleans_up_had_weights_too() {
        check(
            |p| {
                p.load("load", false);
                (0..10).for_each(|_| p.forward(32));
                std::mem::take(&mut p.held).into_iter().for_each(|block| p.give(block));
            },
            &with(&[("load", Role::Weights)]),
        );
    }

    #[test]
    fn pictures_are_made_in_many_passes_with_what_skips_them() {
        check(
            |p| {
                p.load(MODULE, false);
                let images = p.draw(3, 6);
                for _ in 0..images {
                    let prompt = p.take(64, "prompt");
                    let mut latents = p.take(128, "latents");
                    for _ in 0..p.draw(10, 30) {
                        let skips: Vec<_> = (0..6).map(|level| p.take(512 >> level, "down")).collect();
                        skips.into_iter().rev().for_each(|skip| {
                            let up = p.take(256, "up");
                            p.give(skip);
                            p.give(up);
                        });
                        let next = p.take(128, "latents");
                        p.give(latents);
                        latents = next;
                    }
                    p.give(prompt);
                    let image = p.take(4096, "decode");
                    p.give(latents);
                    p.give(image);
                }
            },
            &[
                ("<module>", Role::Weights),
                ("prompt", Role::Serving),
                ("latents", Role::Serving),
                ("down", Role::Serving),
                ("up", Role::Serving),
            ],
        );
    }

    #[test]
    fn two_models_are_weights_and_so_is_the_one_that_makes_place() {
        check(
            |p| {
                p.load(MODULE, false);
                (0..10).for_each(|_| p.forward(32));
                std::mem::take(&mut p.held).into_iter().for_each(|block| p.give(block));
                p.load(MODULE, true);
                (0..10).for_each(|_| p.forward(32));
            },
            &with(&[("<module>", Role::Weights)]),
        );
        check(
            |p| {
                p.load("first", false);
                p.load("second", false);
                (0..10).for_each(|_| p.forward(32));
            },
            &with(&[("first", Role::Weights), ("second", Role::Weights)]),
        );
    }

    #[test]
    fn adapters_that_come_later_are_weights_by_name_and_else_unknown() {
        for (by, place, role) in [(MODULE, "<module>", Role::Weights), ("adapter", "adapter", Role::Unknown)]
        {
            check(
                |p| {
                    p.load(MODULE, false);
                    (0..10).for_each(|_| p.forward(32));
                    (0..LAYERS_OF_MODEL * 2).for_each(|_| {
                        p.take(16, by);
                    });
                    (0..10).for_each(|_| p.forward(32));
                },
                &with(&[(place, role)]),
            );
        }
    }

    #[test]
    fn what_a_server_keeps_or_leaks_is_unknown() {
        check(
            |p| {
                p.load("load", false);
                let mut kept = std::collections::VecDeque::new();
                for _ in 0..120 {
                    p.forward(16);
                    p.take(3, "leak");
                    kept.push_back(p.take(8, "cache"));
                    if kept.len() > 20 {
                        let old = kept.pop_front().unwrap();
                        p.give(old);
                    }
                }
            },
            &with(&[("load", Role::Weights), ("leak", Role::Unknown), ("cache", Role::Unknown)]),
        );
    }
}
