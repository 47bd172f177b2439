//! Whether `gputrace leaks` tells leaks from everything else that makes memory go up: generated programs, half of them leaky.
//!
//! A program is a list of parts that take turns in every step. Sizes, counts and moments are drawn at random for each of
//! its variants, half of which allocate PyTorch blocks from Python and half from the driver, from C++. The truth is what the leaking
//! parts did. `cargo test -p gputrace --test leak_detection -- --nocapture` prints the table.

mod programs;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;

use gputrace_replay::trace::Recording;
use gputrace_schemas::writer::Writer;
use gputrace_sim::cores::on_all_cores;

use programs::{Block, Job, Language, Random};

/// Variants of each program; `LEAK_VARIANTS` says otherwise.
const VARIANTS: u64 = 12;
/// Leaks of less, in bytes for each step, need not be found: 1 MiB in 100 steps.
const LEAST: f64 = (1 << 20) as f64 / 100.0;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

type Make = fn(&mut Random, usize) -> Part;

/// What leaks, and what only looks like it.
const PROGRAMS: &[(&str, &[Make])] = &[
    ("plain training", &[model, optimizer, activations]),
    ("warm-up of a few steps", &[model, warm_up, activations]),
    ("long warm-up", &[model, long_warm_up, activations]),
    ("oscillation", &[model, optimizer, oscillation]),
    ("random lengths", &[model, random_lengths]),
    ("ever longer sequences", &[model, longer, optimizer]),
    ("longer, then shorter sequences", &[model, longer_then_shorter]),
    ("a cache that fills up", &[model, activations, filling_cache]),
    ("a cache that evicts", &[model, activations, evicting_cache]),
    ("a window of the last losses", &[model, activations, window]),
    ("double buffering", &[model, double_buffer, activations]),
    ("double buffering of random lengths", &[model, double_buffer, random_lengths]),
    ("epochs with validation", &[model, optimizer, activations, validation]),
    ("checkpoints", &[model, activations, checkpoints]),
    ("cycles that are collected", &[model, activations, cycles]),
    ("a cache cleared after each epoch", &[model, activations, cleared_cache]),
    ("one more object half-way", &[model, activations, one_more]),
    ("layers added in stages", &[model, activations, stages]),
    ("requests that come and go", &[model, churn]),
    ("a KV cache", &[model, kv_cache]),
    ("gradient accumulation", &[model, activations, accumulation]),
    ("memory that shrinks slowly", &[model, activations, shrinking]),
    (
        "everything harmless at once",
        &[model, optimizer, warm_up, random_lengths, window, validation, checkpoints, cycles],
    ),
    ("a leak in every step", &[model, activations, leak]),
    ("a leak after a warm-up", &[model, optimizer, long_warm_up, activations, leak]),
    ("a leak under oscillation", &[model, oscillation, leak]),
    ("a leak under random lengths", &[model, random_lengths, leak]),
    ("a leak beside a full cache", &[model, activations, filling_cache, leak]),
    ("a leak beside cycles", &[model, activations, cycles, leak]),
    ("a leak in the line of a cleared cache", &[model, activations, cleared_cache_that_leaks]),
    ("a leak beside churn", &[model, churn, leak]),
    ("1 MiB in 100 steps", &[model, optimizer, activations, slow_leak]),
    ("1 MiB in 100 steps under random lengths", &[model, random_lengths, validation, slow_leak]),
    ("a leak in every 10th step", &[model, activations, leak_in_every_10th_step]),
    ("a leak in every 50th step", &[model, activations, leak_in_every_50th_step]),
    ("a leak that starts late", &[model, activations, late_leak]),
    ("a leak in validation", &[model, activations, leak_in_validation]),
    ("a leak by chance", &[model, activations, leak_by_chance]),
    ("three taken, two given back", &[model, activations, net_leak]),
    ("a leak that gets faster", &[model, activations, accelerating_leak]),
    ("two leaks", &[model, activations, leak, leak_in_every_10th_step]),
    (
        "a leak with everything at once",
        &[model, optimizer, warm_up, random_lengths, window, validation, checkpoints, cycles, leak],
    ),
];

/// Something that takes and gives back memory: called at the beginning and at the end of each step.
struct Part {
    /// Line that leaks and, for each step of the run, how much.
    leaks: Option<(u32, f64)>,
    act: Act,
}

type Act = Box<dyn FnMut(&mut Job, usize, When)>;

#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    Begin,
    End,
}

fn part(act: impl FnMut(&mut Job, usize, When) + 'static) -> Part {
    Part { leaks: None, act: Box::new(act) }
}

fn leaking(line: u32, per_step: f64, act: impl FnMut(&mut Job, usize, When) + 'static) -> Part {
    Part { leaks: Some((line, per_step)), act: Box::new(act) }
}

fn model(random: &mut Random, _: usize) -> Part {
    let sizes: Vec<u64> = (0..random.range(5, 40)).map(|_| random.range(4, 4096) * KIB).collect();
    part(move |job, step, when| {
        if (step, when) == (0, When::Begin) {
            sizes.iter().for_each(|bytes| {
                job.take(1, *bytes);
            });
        }
    })
}

/// State is made in the first step, and stays.
fn optimizer(random: &mut Random, _: usize) -> Part {
    let sizes: Vec<u64> = (0..random.range(5, 40)).map(|_| random.range(4, 4096) * KIB).collect();
    part(move |job, step, when| {
        if (step, when) == (0, When::End) {
            sizes.iter().for_each(|bytes| {
                job.take(2, *bytes);
            });
        }
    })
}

fn warm_up(random: &mut Random, n_steps: usize) -> Part {
    kept_until(3, random, n_steps, 1, 8)
}

fn long_warm_up(random: &mut Random, n_steps: usize) -> Part {
    kept_until(4, random, n_steps, 10, 22)
}

/// Takes something in each step up to a moment between two hundredths of the run.
fn kept_until(line: u32, random: &mut Random, n_steps: usize, from: u64, to: u64) -> Part {
    let until = n_steps * random.range(from, to) as usize / 100;
    let bytes = random.range(16, 2048) * KIB;
    part(move |job, step, when| {
        if when == When::Begin && step < until {
            job.take(line, bytes);
        }
    })
}

/// What a step takes and gives back; `length` scales it.
fn steps(random: &mut Random, mut length: impl FnMut(usize) -> f64 + 'static) -> Part {
    let sizes: Vec<u64> = (0..random.range(2, 6)).map(|_| random.range(64, 8192) * KIB).collect();
    let mut held = vec![];
    part(move |job, step, when| match when {
        When::Begin => {
            let length = length(step);
            let scaled = sizes.iter().map(|bytes| (*bytes as f64 * length) as u64 / 512 * 512 + 512);
            held.extend(scaled.zip(10..).map(|(bytes, line)| job.take(line, bytes)));
        }
        When::End => held.drain(..).rev().for_each(|block| job.give(block)),
    })
}

fn activations(random: &mut Random, _: usize) -> Part {
    steps(random, |_| 1.0)
}

fn oscillation(random: &mut Random, _: usize) -> Part {
    let period = random.range(3, 60) as f64;
    steps(random, move |step| 1.5 + (step as f64 / period * std::f64::consts::TAU).sin())
}

fn random_lengths(random: &mut Random, _: usize) -> Part {
    let mut lengths = random.child();
    steps(random, move |_| 0.1 + lengths.share() * lengths.share() * 4.0)
}

fn longer(random: &mut Random, n_steps: usize) -> Part {
    steps(random, move |step| 0.2 + 3.0 * step as f64 / n_steps as f64)
}

fn longer_then_shorter(random: &mut Random, n_steps: usize) -> Part {
    let top = n_steps as f64 * (0.4 + 0.4 * random.share());
    steps(random, move |step| 3.2 - 3.0 * (step as f64 / top - 1.0).abs().min(1.0))
}

/// Grows up to a capacity that is reached somewhere between a tenth and six tenths of the run.
fn filling_cache(random: &mut Random, n_steps: usize) -> Part {
    let full = n_steps * random.range(10, 60) as usize / 100;
    let bytes = random.range(8, 512) * KIB;
    let mut chance = random.child();
    part(move |job, step, when| {
        if when == When::End && step < full && chance.share() < 0.7 {
            job.take(20, bytes);
        }
    })
}

/// The same, and then each new entry takes the place of a random one, of another size.
fn evicting_cache(random: &mut Random, n_steps: usize) -> Part {
    let capacity = n_steps * random.range(5, 40) as usize / 100;
    let bytes = random.range(8, 512) * KIB;
    let mut chance = random.child();
    let mut entries = vec![];
    part(move |job, _, when| {
        if when == When::Begin {
            return;
        }
        if entries.len() > capacity {
            let victim = chance.range(0, entries.len() as u64 - 1) as usize;
            job.give(entries.swap_remove(victim));
        }
        let bytes = (bytes as f64 * (0.5 + chance.share())) as u64;
        entries.push(job.take(21, bytes));
    })
}

/// `deque(maxlen=...)`.
fn window(random: &mut Random, n_steps: usize) -> Part {
    let most = random.range(2, n_steps as u64 / 5) as usize;
    let bytes = random.range(1, 256) * KIB;
    let mut entries = std::collections::VecDeque::new();
    part(move |job, _, when| {
        if when == When::End {
            entries.push_back(job.take(22, bytes));
            if entries.len() > most {
                job.give(entries.pop_front().unwrap());
            }
        }
    })
}

/// The next batch is there before the last is gone.
fn double_buffer(random: &mut Random, _: usize) -> Part {
    let bytes = random.range(64, 4096) * KIB;
    let mut sizes = random.child();
    let mut before = None;
    part(move |job, _, when| {
        if when == When::Begin {
            let next = job.take(23, (bytes as f64 * (0.5 + sizes.share())) as u64);
            if let Some(before) = before.replace(next) {
                job.give(before);
            }
        }
    })
}

/// After each epoch, predictions are collected, and given back when the epoch's score is known.
fn validation(random: &mut Random, n_steps: usize) -> Part {
    let epoch = random.range(10, n_steps as u64 / 4) as usize;
    let (batches, bytes) = (random.range(3, 20), random.range(16, 1024) * KIB);
    part(move |job, step, when| {
        if when == When::End && step % epoch == epoch - 1 {
            let predictions: Vec<_> = (0..batches).map(|_| job.take(24, bytes)).collect();
            predictions.into_iter().for_each(|block| job.give(block));
        }
    })
}

/// A copy of the weights, given back in the next step.
fn checkpoints(random: &mut Random, n_steps: usize) -> Part {
    let every = random.range(7, n_steps as u64 / 5) as usize;
    let bytes = random.range(1, 64) * MIB;
    let mut copy = None;
    part(move |job, step, when| {
        if when == When::Begin && step % every == every - 1 {
            copy = Some(job.take(25, bytes));
        } else if let Some(copy) = copy.take_if(|_| when == When::Begin) {
            job.give(copy);
        }
    })
}

/// Each step leaves garbage in cycles; when there is enough of it, all is collected.
fn cycles(random: &mut Random, n_steps: usize) -> Part {
    let enough = random.range(5, n_steps as u64 / 8) as usize;
    let bytes = random.range(16, 1024) * KIB;
    let mut garbage = vec![];
    part(move |job, _, when| {
        if when == When::End {
            garbage.push(job.take(26, bytes));
            if garbage.len() >= enough {
                garbage.drain(..).for_each(|block| job.give(block));
            }
        }
    })
}

/// The run ends anywhere between two of them.
fn cleared_cache(random: &mut Random, n_steps: usize) -> Part {
    let epoch = random.range(n_steps as u64 / 10, n_steps as u64 / 2) as usize;
    let bytes = random.range(16, 1024) * KIB;
    let mut entries = vec![];
    part(move |job, step, when| {
        if when == When::End {
            entries.push(job.take(33, bytes));
            if step % epoch == epoch - 1 {
                entries.drain(..).for_each(|block| job.give(block));
            }
        }
    })
}

fn one_more(random: &mut Random, n_steps: usize) -> Part {
    let at = n_steps * random.range(30, 90) as usize / 100;
    let bytes = random.range(1, 64) * MIB;
    part(move |job, step, when| {
        if (step, when) == (at, When::Begin) {
            job.take(27, bytes);
        }
    })
}

/// Progressive growing: layers are added at two or three moments.
fn stages(random: &mut Random, n_steps: usize) -> Part {
    let moments: Vec<_> =
        (0..random.range(2, 3)).map(|_| n_steps * random.range(20, 90) as usize / 100).collect();
    let (layers, bytes) = (random.range(1, 10), random.range(64, 4096) * KIB);
    part(move |job, step, when| {
        if when == When::Begin && moments.contains(&step) {
            (0..layers).for_each(|_| {
                job.take(28, bytes);
            });
        }
    })
}

/// A server: about as many requests come as go.
fn churn(random: &mut Random, _: usize) -> Part {
    let (at_once, bytes) = (random.range(2, 20), random.range(64, 2048) * KIB);
    let mut chance = random.child();
    let mut requests = vec![];
    part(move |job, step, when| {
        if when == When::Begin {
            while step == 0 && requests.len() < at_once as usize {
                requests.push(job.take(29, bytes));
            }
            let bytes = (bytes as f64 * (0.2 + 1.6 * chance.share())) as u64;
            requests.push(job.take(29, bytes));
        } else {
            while requests.len() > at_once as usize || (!requests.is_empty() && chance.share() < 0.1) {
                let done = chance.range(0, requests.len() as u64 - 1) as usize;
                job.give(requests.swap_remove(done));
            }
        }
    })
}

/// Each request takes a block every few tokens, and gives all back at its end.
fn kv_cache(random: &mut Random, _: usize) -> Part {
    let (at_once, bytes) = (random.range(2, 12) as usize, random.range(16, 512) * KIB);
    let mut chance = random.child();
    let mut requests: Vec<(u64, Vec<Block>)> = vec![];
    part(move |job, _, when| {
        if when == When::Begin {
            if requests.len() < at_once {
                requests.push((chance.range(3, 40), vec![]));
            }
            requests.iter_mut().for_each(|(_, blocks)| blocks.push(job.take(30, bytes)));
        } else {
            requests.iter_mut().for_each(|(left, _)| *left -= 1);
            for (_, blocks) in requests.extract_if(.., |(left, _)| *left == 0) {
                blocks.into_iter().for_each(|block| job.give(block));
            }
        }
    })
}

/// Gradients stay for a few steps.
fn accumulation(random: &mut Random, _: usize) -> Part {
    let (every, bytes) = (random.range(2, 16) as usize, random.range(1, 64) * MIB);
    let mut gradients = None;
    part(move |job, step, when| match when {
        When::Begin if step % every == 0 => gradients = Some(job.take(31, bytes)),
        When::End if step % every == every - 1 => {
            gradients.take().into_iter().for_each(|block| job.give(block))
        }
        When::Begin | When::End => {}
    })
}

/// What the beginning took is given back piece by piece.
fn shrinking(random: &mut Random, n_steps: usize) -> Part {
    let bytes = random.range(16, 512) * KIB;
    let mut pieces = vec![];
    part(move |job, step, when| {
        if (step, when) == (0, When::Begin) {
            pieces.extend((0..n_steps / 2).map(|_| job.take(32, bytes)));
        } else if when == When::End && step % 2 == 0 {
            pieces.pop().into_iter().for_each(|block| job.give(block));
        }
    })
}

/// Keeps `bytes` in each step that `leaks`.
fn keeps(line: u32, per_step: f64, bytes: u64, mut leaks: impl FnMut(usize) -> bool + 'static) -> Part {
    leaking(line, per_step, move |job, step, when| {
        if when == When::End && leaks(step) {
            job.take(line, bytes);
        }
    })
}

fn leak(random: &mut Random, _: usize) -> Part {
    let bytes = random.range(11, 1024) * KIB;
    keeps(50, bytes as f64, bytes, |_| true)
}

fn slow_leak(_: &mut Random, _: usize) -> Part {
    let bytes = LEAST as u64 / 512 * 512 + 512;
    keeps(51, bytes as f64, bytes, |_| true)
}

fn leak_in_every_10th_step(random: &mut Random, _: usize) -> Part {
    let bytes = random.range(110, 4096) * KIB;
    let phase = random.range(0, 9) as usize;
    keeps(52, bytes as f64 / 10.0, bytes, move |step| step % 10 == phase)
}

fn leak_in_every_50th_step(random: &mut Random, _: usize) -> Part {
    let bytes = random.range(520, 4096) * KIB;
    let phase = random.range(0, 49) as usize;
    keeps(53, bytes as f64 / 50.0, bytes, move |step| step % 50 == phase)
}

/// The cache is cleared, but for one entry of each few.
fn cleared_cache_that_leaks(random: &mut Random, n_steps: usize) -> Part {
    let epoch = random.range(5, n_steps as u64 / 20) as usize;
    let (every, bytes) = (random.range(2, 8), random.range(128, 1024) * KIB);
    let mut entries = vec![];
    leaking(59, bytes as f64 / every as f64, move |job, step, when| {
        if when == When::End {
            let entry = job.take(59, bytes);
            if !(step as u64).is_multiple_of(every) {
                entries.push(entry);
            }
            if step % epoch == epoch - 1 {
                entries.drain(..).for_each(|block| job.give(block));
            }
        }
    })
}

/// Begins somewhere between two and six tenths of the run. The truth is the pace from then on.
fn late_leak(random: &mut Random, n_steps: usize) -> Part {
    let begin = n_steps * random.range(20, 60) as usize / 100;
    let bytes = random.range(11, 1024) * KIB;
    keeps(54, bytes as f64, bytes, move |step| step >= begin)
}

/// Every epoch's predictions stay.
fn leak_in_validation(random: &mut Random, n_steps: usize) -> Part {
    let epoch = random.range(10, n_steps as u64 / 8) as usize;
    let (batches, bytes) = (random.range(3, 20), random.range(64, 1024) * KIB);
    leaking(55, (batches * bytes) as f64 / epoch as f64, move |job, step, when| {
        if when == When::End && step % epoch == epoch - 1 {
            (0..batches).for_each(|_| {
                job.take(55, bytes);
            });
        }
    })
}

fn leak_by_chance(random: &mut Random, _: usize) -> Part {
    let (share, bytes) = (0.1 + 0.8 * random.share(), random.range(110, 1024) * KIB);
    let mut chance = random.child();
    keeps(56, bytes as f64 * share, bytes, move |_| chance.share() < share)
}

fn net_leak(random: &mut Random, _: usize) -> Part {
    let bytes = random.range(11, 1024) * KIB;
    let mut held = vec![];
    leaking(57, bytes as f64, move |job, _, when| match when {
        When::Begin => held.extend((0..3).map(|_| job.take(57, bytes))),
        When::End => {
            held.drain(..2).for_each(|block| job.give(block));
            held.clear();
        }
    })
}

/// Each step keeps a little more than the one before. The truth is the mean.
fn accelerating_leak(random: &mut Random, n_steps: usize) -> Part {
    let least = random.range(11, 256) * KIB;
    leaking(58, least as f64 * 2.5, move |job, step, when| {
        if when == When::End {
            job.take(58, least + least * 3 * step as u64 / n_steps as u64);
        }
    })
}

impl Random {
    /// 0 to 1.
    fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn child(&mut self) -> Random {
        Random(self.next())
    }
}

/// What is true of one variant, and what gputrace said.
struct Verdict {
    truth: Vec<(u32, f64)>,
    said: Vec<Said>,
    in_stages: Vec<u32>,
}

struct Said {
    line: u32,
    per_step: f64,
    confidence: f64,
}

fn run(program: &[Make], seed: u64, folder: &Path) -> Verdict {
    let mut random = Random(seed);
    let n_steps = random.range(300, 900) as usize;
    let language = if seed.is_multiple_of(2) { Language::Python } else { Language::Cpp };
    let mut job = Job::new(language);
    let mut parts: Vec<Part> = program.iter().map(|make| make(&mut random, n_steps)).collect();
    for step in 0..n_steps {
        parts.iter_mut().for_each(|part| (part.act)(&mut job, step, When::Begin));
        parts.iter_mut().rev().for_each(|part| (part.act)(&mut job, step, When::End));
    }
    let path = folder.join(format!("leak_detection.{}.{seed:x}.gtr", std::process::id()));
    std::fs::write(&path, trace(&job.recording)).unwrap();
    let (said, in_stages) = ask(&path, n_steps);
    let _ = std::fs::remove_file(path);
    Verdict { truth: parts.iter().filter_map(|part| part.leaks).collect(), said, in_stages }
}

fn trace(recording: &Recording) -> Vec<u8> {
    /// Definitions in the order of their numbers.
    fn ordered<Id: Ord + Copy, T>(of: &HashMap<Id, T>) -> BTreeMap<Id, &T> {
        of.iter().map(|(id, it)| (*id, it)).collect()
    }
    let mut writer = Writer::new(Vec::new()).unwrap();
    writer.process(&recording.process);
    recording.devices.iter().for_each(|device| writer.device(device));
    ordered(&recording.apis).into_iter().for_each(|(id, api)| writer.api(id, api));
    ordered(&recording.threads).into_iter().for_each(|(id, thread)| writer.thread(id, thread));
    ordered(&recording.modules).into_iter().for_each(|(id, module)| writer.module(id, module));
    ordered(&recording.frames).into_iter().for_each(|(id, frame)| writer.frame(id, frame));
    ordered(&recording.stacks).into_iter().for_each(|(id, stack)| writer.stack(id, stack));
    recording.events.iter().for_each(|event| writer.event(event).unwrap());
    writer.finish().unwrap()
}

/// What grows, and the lines that rose too rarely to be told from stages of the program.
fn ask(path: &PathBuf, n_steps: usize) -> (Vec<Said>, Vec<u32>) {
    let output = Command::new(env!("CARGO_BIN_EXE_gputrace"))
        .args(["leaks", "--json", "--rows", "1000", "--steps", &n_steps.to_string()])
        .arg(path)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let sections = report["processes"][0]["sections"].as_array().unwrap();
    let growth = sections.iter().find(|section| section["name"] == "growth").unwrap();
    let rows = growth["growth"].as_array().map_or(&[][..], Vec::as_slice);
    let rose = sections.iter().find(|section| section["name"] == "rose");
    let rose = rose.and_then(|section| section["rose"].as_array()).map_or(&[][..], Vec::as_slice);
    let line = |row: &serde_json::Value| row["call_site"].as_str()?.split(' ').next()?.parse().ok();
    let said = rows.iter().map(|row| Said {
        line: line(row).unwrap_or_else(|| panic!("{row}")),
        per_step: row["bytes_per_step"].as_f64().unwrap(),
        confidence: row["confidence"].as_f64().unwrap(),
    });
    let in_stages = rose.iter().filter(|row| row["why"].as_str().is_some_and(|why| why.contains("stages")));
    (said.collect(), in_stages.filter_map(line).collect())
}

#[test]
fn leaks_are_told_from_everything_else_that_makes_memory_go_up() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let variants = std::env::var("LEAK_VARIANTS").ok().and_then(|n| n.parse().ok()).unwrap_or(VARIANTS);
    let mut problems = vec![];
    println!(
        "{:42} {:>14} {:>10} {:>16} {:>10}",
        "program", "truth", "verdict", "estimate/truth", "confidence"
    );
    let verdicts = on_all_cores(PROGRAMS.len(), |idx| {
        let seeds = (0..variants).map(|variant| 1000 * idx as u64 + variant);
        Some(seeds.map(|seed| (seed, run(PROGRAMS[idx].1, seed, folder))).collect::<Vec<_>>())
    });
    for ((name, _), verdicts) in PROGRAMS.iter().zip(verdicts) {
        let (mut n_found, mut ratios, mut confidence) = (0, vec![], 1.0f64);
        let mut is_leaky = false;
        for (seed, verdict) in verdicts {
            is_leaky |= !verdict.truth.is_empty();
            n_found += usize::from(!verdict.said.is_empty());
            for said in &verdict.said {
                confidence = confidence.min(said.confidence);
                match verdict.truth.iter().find(|(line, _)| *line == said.line) {
                    Some((_, truth)) => ratios.push(said.per_step / truth),
                    None => {
                        problems.push(format!("{name}, variant {seed}: false alarm about line {}", said.line))
                    }
                }
            }
            for (line, per_step) in verdict.truth.iter().filter(|(_, per_step)| *per_step >= LEAST) {
                let is_said = verdict.said.iter().any(|said| said.line == *line);
                if !is_said && !verdict.in_stages.contains(line) {
                    problems.push(format!(
                        "{name}, variant {seed}: missed {per_step:.0} bytes a step of line {line}"
                    ));
                }
            }
        }
        ratios.sort_by(f64::total_cmp);
        let range = match (ratios.first(), ratios.last()) {
            (Some(least), Some(most)) => format!("{least:.2} to {most:.2}"),
            _ => "-".into(),
        };
        let truth = if is_leaky { "leaks" } else { "does not leak" };
        let confidence = if n_found > 0 { format!("{:.1} %", confidence * 100.0) } else { "-".into() };
        println!(
            "{name:42} {truth:>14} {:>10} {range:>16} {confidence:>10}",
            format!("{n_found} of {variants}")
        );
    }
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
}
