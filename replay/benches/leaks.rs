//! How often `gputrace leaks` is wrong: `make bench-leaks`. Programs of known truth, of the shapes below, with fresh seeds.
//!
//! `LEAKS_PROGRAMS=N` makes N of them (2,400), `LEAKS_SEED=N` repeats those of a run, `LEAKS_SHAPE=WORD` takes only shapes with that word in
//! their names. A leak of these programs adds to what is kept at least 32 times, spread over the run, and more than four times
//! what goes up and down at its line: below that a leak cannot be told from a program's stages, or from chance.

#[path = "../tests/programs/mod.rs"]
mod programs;

use std::collections::HashMap;
use std::io::{self, Write};
use std::ops::{Deref, DerefMut};

use gputrace_replay::analyse::growth::Growth;
use gputrace_replay::answers::leaks::{Leaks, Suppressions, Wanted};
use gputrace_replay::story::Story;
use gputrace_replay::trace::source::Source;
use gputrace_schemas::event::Action;

use programs::{Block, Job, Language, Random};

/// A kind of program.
struct Shape {
    name: &'static str,
    /// Something is never given back, more of it with every turn.
    leaks: bool,
    run: fn(&mut Program),
}

#[rustfmt::skip] // A table.
const SHAPES: &[Shape] = &[
    Shape { name: "plain training", leaks: false, run: |p| p.train(|_, _| {}) },
    Shape { name: "a cache that is full at some time", leaks: false, run: |p| {
        let (full, bytes) = (p.one_of(&[0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98]), p.size());
        p.steps = p.steps.max(100);
        p.train(|p, step| if (step as f64) < p.steps as f64 * full { p.take("cache", bytes); });
    } },
    Shape { name: "a cache of random keys", leaks: false, run: |p| {
        let (keys, bytes) = (p.steps / p.between(4, 12), p.size());
        let mut seen = std::collections::HashSet::new();
        p.train(|p, _| if seen.insert(p.below(keys.max(2))) { p.take("cache", bytes); });
    } },
    Shape { name: "stages with larger buffers", leaks: false, run: |p| {
        let (stages, bytes) = (p.between(2, 6), p.size());
        let mut held = vec![];
        p.train(|p, step| if step % (p.steps / stages + 1) == 0 {
            for block in held.drain(..) { p.give(block); }
            let larger = bytes * (1 + step * stages / p.steps);
            for _ in 0..4 { held.push(p.take("buffers", larger)); }
        });
    } },
    Shape { name: "stages that add objects", leaks: false, run: |p| {
        let (stages, bytes) = (p.between(2, 5), p.size());
        p.train(|p, step| if step % (p.steps / stages + 1) == 0 { for _ in 0..20 { p.take("expert", bytes); } });
    } },
    Shape { name: "loads through staging, then serves for a short time", leaks: false, run: |p| {
        let (layers, serve) = (p.between(60, 400), p.one_of(&[0.03, 0.05, 0.1, 0.2, 0.4]));
        p.load(layers);
        let events = (layers as f64 * 4.0 * serve / (1.0 - serve)) as u64;
        for _ in 0..(events / 6).max(12) { p.step(); }
    } },
    Shape { name: "loads, and ends", leaks: false, run: |p| { let layers = p.between(20, 300); for _ in 0..layers { let bytes = p.size(); p.take("load", bytes); } } },
    Shape { name: "garbage that is collected at times", leaks: false, run: |p| {
        let (every, bytes) = ((p.steps / p.between(4, 30)).max(2), p.size());
        let mut garbage = vec![];
        p.train(|p, step| { garbage.push(p.take("garbage", bytes)); if step % every == every - 1 { for block in garbage.drain(..) { p.give(block); } } });
    } },
    Shape { name: "random lifetimes", leaks: false, run: |p| p.random_lifetimes(0.0) },
    Shape { name: "steps of uneven size", leaks: false, run: |p| { p.uneven = true; p.train(|_, _| {}); } },
    Shape { name: "requests with caches of their own", leaks: false, run: |p| { p.steps = p.steps.max(300); p.serve(|_, _| {}) } },
    Shape { name: "a replay buffer that fills", leaks: false, run: |p| {
        let (full, bytes) = (p.between(20, 90), p.size());
        let mut buffer = std::collections::VecDeque::new();
        p.train(|p, step| {
            buffer.push_back(p.take("replay buffer", bytes));
            if step * 100 > p.steps * full && let Some(oldest) = buffer.pop_front() { p.give(oldest); }
        });
    } },
    Shape { name: "evaluations between", leaks: false, run: |p| {
        let every = (p.steps / p.between(3, 20)).max(2);
        p.train(|p, step| if step % every == 0 { for _ in 0..10 { let bytes = p.size(); let block = p.take("evaluate", bytes * 4); p.step(); p.give(block); } });
    } },
    Shape { name: "copies at checkpoints", leaks: false, run: |p| {
        let (every, bytes) = ((p.steps / p.between(3, 20)).max(2), p.size());
        p.train(|p, step| if step % every == 0 { let copies: Vec<_> = (0..20).map(|_| p.take("checkpoint", bytes)).collect(); for copy in copies { p.give(copy); } });
    } },
    Shape { name: "a cache that throws out the oldest at random", leaks: false, run: |p| {
        let (most, bytes) = (p.between(4, 30) as usize, p.size());
        p.steps = p.steps.max(most as u64 * 10);
        let mut cache = std::collections::VecDeque::new();
        p.train(|p, _| {
            cache.push_back(p.take("cache", bytes));
            while cache.len() > most || (cache.len() > most / 2 && p.below(3) == 0) { if let Some(oldest) = cache.pop_front() { p.give(oldest); } }
        });
    } },
    Shape { name: "gradients that add up", leaks: false, run: |p| {
        let (micro, bytes) = (p.between(2, 32), p.size());
        let mut grads = vec![];
        p.train(|p, step| { grads.push(p.take("accumulate", bytes)); if step % micro == micro - 1 { for grad in grads.drain(..) { p.give(grad); } } });
    } },
    Shape { name: "two buffers in turn", leaks: false, run: |p| {
        let bytes = p.size();
        let mut held = None;
        p.train(|p, _| { let next = p.take("prefetch", bytes); if let Some(before) = held.replace(next) { p.give(before); } });
    } },
    Shape { name: "goes up and down at random, between bounds", leaks: false, run: |p| {
        let (most, bytes) = (p.between(4, 16) as usize, p.size());
        p.steps = p.steps.max(200);
        let mut held = vec![];
        p.train(|p, _| if p.below(2) == 0 && held.len() < most { held.push(p.take("pool", bytes)); } else if let Some(block) = held.pop() { p.give(block); });
    } },
    Shape { name: "ends in the middle of a step", leaks: false, run: |p| { p.train(|_, _| {}); for site in 0..8 { let bytes = p.size(); p.take(format!("layer {site}"), bytes); } } },
    Shape { name: "lists that are cleared with every epoch", leaks: false, run: |p| {
        let (epochs, bytes) = (p.between(3, 20), p.size());
        let mut losses = vec![];
        p.train(|p, step| { losses.push(p.take("losses", bytes)); if step % (p.steps / epochs + 1) == p.steps / epochs { for loss in losses.drain(..) { p.give(loss); } } });
    } },
    Shape { name: "one model after the other", leaks: false, run: |p| {
        for _ in 0..p.between(2, 4) {
            let layers = p.between(20, 80);
            let model = p.load(layers);
            for _ in 0..p.between(20, 200) { p.step(); }
            for block in model { p.give(block); }
        }
    } },
    Shape { name: "warms up for several batch sizes", leaks: false, run: |p| {
        let sizes = p.between(3, 7);
        for size in 0..sizes { for _ in 0..3 { p.step(); } for _ in 0..size + 2 { let bytes = p.size(); p.take("capture", bytes); } }
        for _ in 0..p.steps { p.step(); }
    } },
    Shape { name: "a pinned pool that is full at some time", leaks: false, run: |p| {
        let (full, bytes) = (p.between(10, 90), p.size());
        p.train(|p, step| if step * 100 < p.steps * full { p.call(Action::AllocHost, "pin", bytes); });
    } },
    Shape { name: "a dictionary that holds the newest of each kind", leaks: false, run: |p| {
        let (kinds, bytes) = (p.between(3, 20), p.size());
        let mut held = HashMap::new();
        p.train(|p, _| { let (kind, block) = (p.below(kinds), p.take("newest", bytes)); if let Some(before) = held.insert(kind, block) { p.give(before); } });
    } },
    Shape { name: "optimizer state that comes late", leaks: false, run: |p| {
        let (at, bytes) = (p.between(1, 95), p.size());
        p.train(|p, step| if step == p.steps * at / 100 { for _ in 0..40 { p.take("state", bytes); } });
    } },
    Shape { name: "threads with buffers of their own, that come late", leaks: false, run: |p| {
        let (threads, bytes) = (p.between(2, 7), p.size());
        p.train(|p, step| if step % (p.steps / threads + 1) == 1 { for _ in 0..3 { p.take("workspace", bytes); } });
    } },

    Shape { name: "a list that is appended to", leaks: true, run: |p| { let bytes = p.size(); p.train(|p, _| { p.take("append", bytes); }); } },
    Shape { name: "every few steps", leaks: true, run: |p| {
        p.steps = p.steps.max(128);
        let (every, bytes) = (p.between(1, p.steps / 40), p.size());
        p.train(|p, step| if step % every == 0 { p.take("append", bytes); });
    } },
    Shape { name: "at random steps", leaks: true, run: |p| {
        p.steps = p.steps.max(400);
        let (often, bytes) = (p.between(20, 100), p.size());
        p.train(|p, _| if p.below(100) < often { p.take("append", bytes); });
    } },
    Shape { name: "of random size", leaks: true, run: |p| p.train(|p, _| { let bytes = p.size(); p.take("append", bytes); }) },
    Shape { name: "in steps of uneven size", leaks: true, run: |p| { p.uneven = true; let bytes = p.size(); p.train(|p, _| { p.take("append", bytes); }); } },
    Shape { name: "beside garbage of the same line", leaks: true, run: |p| {
        p.steps = p.steps.max(300);
        let (every, bytes) = (p.between(2, p.steps / 40), p.size());
        let mut garbage = vec![];
        p.train(|p, step| {
            p.take("garbage", bytes);
            for _ in 0..3 { garbage.push(p.take("garbage", bytes)); }
            if step % every == every - 1 { for block in garbage.drain(..) { p.give(block); } }
        });
    } },
    Shape { name: "over two hundred lines", leaks: true, run: |p| {
        p.steps = p.steps.max(300);
        let bytes = p.size();
        p.train(|p, _| { let line = p.below(200); p.take(format!("line {line}"), bytes); });
    } },
    Shape { name: "over twenty lines", leaks: true, run: |p| { p.steps = p.steps.max(300); let bytes = p.size(); p.train(|p, _| { let line = p.below(20); p.take(format!("line {line}"), bytes); }); } },
    Shape { name: "of managed memory", leaks: true, run: |p| { let bytes = p.size(); p.train(|p, _| { p.call(Action::AllocManaged, "managed", bytes); }); } },
    Shape { name: "of pinned memory", leaks: true, run: |p| { let bytes = p.size(); p.train(|p, _| { p.call(Action::AllocHost, "pin", bytes); }); } },
    Shape { name: "of mappings of another process", leaks: true, run: |p| p.train(|p, _| { p.call(Action::IpcOpen, "open", 0); }) },
    Shape { name: "of memory of the driver", leaks: true, run: |p| {
        let bytes = p.size();
        for _ in 0..p.steps { let work = p.call(Action::Alloc, "work", bytes * 8); p.call(Action::Alloc, "keep", bytes); p.give(work); }
    } },
    Shape { name: "that begins late", leaks: true, run: |p| {
        p.steps = p.steps.max(150);
        let (from, bytes) = (p.between(26, 50), p.size());
        p.train(|p, step| if step * 100 > p.steps * from { p.take("append", bytes); });
    } },
    Shape { name: "of requests", leaks: true, run: |p| { let bytes = p.size(); p.serve(|p, n| if n % 3 == 0 { p.take("session", bytes); }) } },
    Shape { name: "in evaluations", leaks: true, run: |p| {
        p.steps = p.steps.max(400);
        let (every, bytes) = ((p.steps / p.between(50, 90)).max(1), p.size());
        p.train(|p, step| if step % every == 0 { for _ in 0..4 { p.take("metrics", bytes); } });
    } },
    Shape { name: "of one in twenty with random lifetimes", leaks: true, run: |p| { p.steps = p.steps.max(400); p.random_lifetimes(0.05) } },
    Shape { name: "on two lines", leaks: true, run: |p| { let bytes = p.size(); p.train(|p, step| { p.take(if step % 2 == 0 { "a" } else { "b" }, bytes); }); } },
    Shape { name: "beside a cache that is full at some time", leaks: true, run: |p| {
        let (full, bytes) = (p.between(30, 95), p.size());
        p.train(|p, step| { p.take("append", bytes); if step * 100 < p.steps * full { p.take("cache", bytes * 4); } });
    } },

    Shape { name: "has only loaded its weights, through staging", leaks: false, run: |p| { let shards = p.between(40, 400); p.load_shards(shards); } },
    Shape { name: "has only started: loads, tries itself, makes caches, warms up", leaks: false, run: |p| {
        let (shards, runs, caches, bytes) = (p.between(40, 400), p.between(1, 12), p.between(1, 80), p.size());
        p.load_shards(shards);
        for _ in 0..runs { let block = p.take("profile_run", bytes); p.give(block); }
        for _ in 0..caches { let fill = p.take("initialize_kv_cache", bytes); p.take("initialize_kv_cache", bytes); p.give(fill); }
        for _ in 0..runs { let block = p.take("warm_up", bytes); p.give(block); }
    } },
];

/// A program that is being made up.
struct Program {
    job: Job,
    random: Random,
    steps: u64,
    layers: u64,
    uneven: bool,
}

impl Deref for Program {
    type Target = Job;
    fn deref(&self) -> &Job {
        &self.job
    }
}

impl DerefMut for Program {
    fn deref_mut(&mut self) -> &mut Job {
        &mut self.job
    }
}

impl Program {
    fn new(seed: u64) -> Program {
        let mut random = Random(seed);
        let (steps, layers) = (random.range(64, 800), random.range(2, 12));
        let uneven = random.range(0, 2) == 0;
        Program { job: Job::new(Language::Python), random, steps, layers, uneven }
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.random.next() % bound.max(1)
    }

    fn between(&mut self, least: u64, most: u64) -> u64 {
        self.random.range(least, most.max(least))
    }

    fn one_of(&mut self, values: &[f64]) -> f64 {
        values[self.below(values.len() as u64) as usize]
    }

    /// 512 B to 32 MiB.
    fn size(&mut self) -> u64 {
        512 << self.below(17)
    }

    /// Forward and backward: one block per layer, given back in the other order.
    fn step(&mut self) {
        let scale = if self.uneven { self.between(1, 6) } else { 2 };
        let layers = if self.uneven { self.between(1, self.layers) } else { self.layers };
        let blocks: Vec<_> = (0..layers)
            .map(|layer| self.take(format!("layer {layer}"), (1 << 16) * scale * (layer + 1)))
            .collect();
        for block in blocks.into_iter().rev() {
            self.give(block);
        }
    }

    /// Parameters, then steps, each with something that `also` does in it.
    fn train(&mut self, mut also: impl FnMut(&mut Program, u64)) {
        for layer in 0..self.layers {
            self.take(format!("parameter {layer}"), 1 << 20);
        }
        for step in 0..self.steps {
            self.step();
            also(self, step);
            self.step();
        }
    }

    /// Layers that come through a buffer.
    fn load(&mut self, layers: u64) -> Vec<Block> {
        let layer = |program: &mut Program| {
            let bytes = 1 << 20;
            let staging = program.take("staging", bytes);
            let layer = program.take("load", bytes);
            program.give(staging);
            layer
        };
        (0..layers).map(|_| layer(self)).collect()
    }

    /// The same in functions that are called as what loads is, with shards of all sizes.
    fn load_shards(&mut self, shards: u64) {
        for _ in 0..shards {
            let bytes = self.size();
            let staging = self.take("load_shard", bytes);
            self.take("load_weights", bytes);
            self.give(staging);
        }
    }

    /// Requests that begin and end at random, each with memory that grows while it lasts.
    fn serve(&mut self, mut also: impl FnMut(&mut Program, u64)) {
        let mut open: Vec<Vec<Block>> = vec![];
        let most = self.between(2, 24) as usize;
        for n in 0..self.steps * 2 {
            if open.len() < most && self.below(2) == 0 {
                open.push(vec![]);
            }
            for _ in 0..open.len().min(3) {
                let (which, bytes) = (self.below(open.len() as u64) as usize, 1 << 16);
                let block = self.take("kv cache", bytes);
                open[which].push(block);
            }
            if !open.is_empty() && self.below(3) == 0 {
                let which = self.below(open.len() as u64) as usize;
                for block in open.swap_remove(which) {
                    self.give(block);
                }
            }
            also(self, n);
        }
    }

    /// Blocks that live for a random time, a share of them for ever.
    fn random_lifetimes(&mut self, kept: f64) {
        let mean = if kept > 0.0 { self.between(5, 12) } else { self.between(5, 60) };
        let mut ends: std::collections::BTreeMap<(u64, u64), Block> = std::collections::BTreeMap::new();
        for now in 0..self.steps * 6 {
            let (site, bytes) = (self.below(8), self.size());
            let block = self.take(format!("site {site}"), bytes.min(1 << 20));
            if self.below(1000) as f64 >= kept * 1000.0 {
                let life = (-(mean as f64) * (self.between(1, 9999) as f64 / 10_000.0).ln()) as u64;
                ends.insert((now + life + 1, now), block);
            }
            while let Some(entry) = ends.first_entry().filter(|entry| entry.key().0 <= now) {
                self.give(entry.remove());
            }
        }
    }
}

fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

fn main() -> io::Result<()> {
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let seed = number("LEAKS_SEED", clock.map_or(1, |time| time.as_nanos() as u64));
    let word = std::env::var("LEAKS_SHAPE").unwrap_or_default();
    let shapes: Vec<_> = SHAPES.iter().filter(|shape| shape.name.contains(&word)).collect();
    let each = number("LEAKS_PROGRAMS", 2_400).div_ceil(shapes.len().max(1) as u64);
    let mut out = io::stdout();
    writeln!(out, "seed {seed}, {} shapes, {each} programs of each", shapes.len())?;
    let mut wrong = [(0, 0); 2];
    for (at, shape) in shapes.iter().enumerate() {
        let (mut n, mut unsure, mut first) = (0, 0, None);
        for idx in 0..each {
            let seed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)
                ^ ((at as u64) << 32 | idx).wrapping_mul(0xd6e8_feb8_6659_fd93);
            let mut program = Program::new(seed);
            (shape.run)(&mut program);
            let source = Source::of("program", program.job.recording);
            let mut growth = Growth::default();
            let story = Story::watched(&source, &mut growth);
            let wanted = Wanted { n_rows: 10, ..Wanted::default() };
            let leaks =
                Leaks::find(&story, source.definitions(), &growth, &wanted, &mut Suppressions::default());
            unsure += usize::from(leaks.growing.is_empty() && !leaks.rose.is_empty());
            if leaks.growing.is_empty() == shape.leaks {
                n += 1;
                first.get_or_insert_with(|| match leaks.growing.first() {
                    Some(growing) => format!("{} of {}", growing.named.site, growing.growth.0),
                    None => format!("{:?}", leaks.rose.first().map(|rose| (&rose.named.site, rose.course))),
                });
            }
        }
        let (all, bad) = &mut wrong[usize::from(shape.leaks)];
        (*all, *bad) = (*all + each, *bad + n);
        let what = if shape.leaks { "missed" } else { "false alarms" };
        let first = first.map_or_else(String::new, |first| format!("  e.g. {first}"));
        writeln!(out, "  {:55} {n:4} {what:12} {unsure:4} unsure{first}", shape.name)?;
    }
    for ((all, bad), what) in wrong.into_iter().zip(["false alarms", "misses"]) {
        writeln!(out, "{what}: {bad} of {all}, {:.2} %", 100.0 * bad as f64 / all.max(1) as f64)?;
    }
    Ok(())
}
