//! Blocks that outlive the work they were made for: a function made them, ran a model, returned for good, and they stayed.
//!
//! ```text
//!   main ── generate ── cache          ├──────────────────────────────
//!                    └─ forward        xxxxxxxx
//!        ── embed ──── forward                 xxxxxxxxxxxxxxxxxxxxxxx
//! ```

use std::collections::BTreeMap;

use gputrace_schemas::event::{Bytes, Nanos, StackId};
use gputrace_sim::stacks::python_package;
use rustc_hash::FxHashMap;

use crate::lives::{Life, Lives, NEVER};
use gputrace_trace::Definitions;
use gputrace_trace::backward::python_lines;
use gputrace_trace::ledger::SiteId;

/// It has this part of what was held at least: one in so many.
const LEAST_PART: u64 = 5;
/// Requests inside of a model that show that the function worked, and that others did after it.
const LEAST_WORK: usize = 16;
/// The part of all requests that came after the function's last.
const LEAST_AFTER: f64 = 0.2;
/// Longer histories are not looked at.
const MOST_LIVES: usize = 2_000_000;

/// A line's blocks that stayed after the function that made and used them had returned for the last time.
#[derive(Clone, Debug)]
pub struct Idle {
    /// On which device.
    pub device: i16,
    /// The line.
    pub site: SiteId,
    /// How much.
    pub bytes: Bytes,
    /// In how many blocks.
    pub blocks: u64,
    /// The function: `Model.generate`.
    pub function: String,
    /// When it requested memory last.
    pub over: Nanos,
    /// The most that the device's blocks would have held, had these gone then.
    pub peak_without: Bytes,
}

/// What one line of the program holds: of each stack its bytes.
#[derive(Default)]
struct Held {
    bytes: u64,
    blocks: u64,
    stacks: Vec<(u64, StackId, SiteId)>,
}

/// Of what `is_held` names on a device, what had been idle for long.
pub(crate) fn of(
    lives: &Lives,
    definitions: &dyn Definitions,
    device: i16,
    all: Bytes,
    is_held: impl Fn(&Life) -> bool,
) -> Option<Idle> {
    if lives.list.len() > MOST_LIVES {
        return None;
    }
    let mut by_stack: FxHashMap<StackId, (u64, u64, SiteId)> = FxHashMap::default();
    for life in
        lives.list.iter().filter(|life| life.device == device && !life.is_from_before && is_held(life))
    {
        let held = by_stack.entry(life.stack).or_insert((0, 0, life.site));
        (held.0, held.1) = (held.0 + life.bytes.0, held.1 + 1);
    }
    // What a library's lines request for one line of the program is one holding, as the keys and the values of a cache.
    let mut by_lines: BTreeMap<Vec<(&str, &str, u32)>, Held> = BTreeMap::new();
    for (stack, (bytes, blocks, site)) in by_stack {
        let Some(known) = definitions.stack(stack) else { continue };
        let lines = python_lines(definitions, known).filter(|(_, file, _)| python_package(file).is_none());
        let held = by_lines.entry(lines.collect()).or_default();
        (held.bytes, held.blocks) = (held.bytes + bytes, held.blocks + blocks);
        held.stacks.push((bytes, stack, site));
    }
    let Held { bytes, blocks, stacks } =
        by_lines.into_values().max_by_key(|held| (held.bytes, held.stacks.iter().max().copied()))?;
    let (_, stack, site) = stacks.iter().max().copied()?;
    if bytes.saturating_mul(LEAST_PART) < all.0 || bytes == 0 {
        return None;
    }
    let stays = |life: &&Life| {
        life.device == device && stacks.iter().any(|(_, stack, _)| *stack == life.stack) && is_held(life)
    };
    let gone = lives
        .list
        .iter()
        .filter(stays)
        .map(|life| if life.died == NEVER { lives.n_moments } else { life.died });
    let gone = gone.min()?;
    let known = definitions.stack(stack)?;
    let lines: Vec<(&str, &str, u32)> = python_lines(definitions, known).collect();
    if known.backward.is_some() || lines.iter().any(|(_, file, _)| file.contains("/torch/nn/modules/")) {
        return None;
    }
    // Each function of the program's on the way, outermost first; the program itself is none.
    let own: Vec<(&str, &str)> = lines
        .iter()
        .rev()
        .filter(|(_, file, _)| python_package(file).is_none())
        .map(|(function, file, _)| (*function, *file))
        .collect();
    let mut seen: FxHashMap<StackId, (Vec<(String, String)>, bool)> = FxHashMap::default();
    let mut facts = |id: StackId| -> (Vec<(String, String)>, bool) {
        seen.entry(id)
            .or_insert_with(|| {
                let Some(stack) = definitions.stack(id) else { return (vec![], false) };
                let lines = python_lines(definitions, stack)
                    .map(|(function, file, _)| (function.to_owned(), file.to_owned()));
                let lines: Vec<(String, String)> = lines.collect();
                let is_work = lines.iter().any(|(function, file)| {
                    file.ends_with("/torch/nn/modules/module.py") && function.ends_with("_call_impl")
                });
                (lines, is_work)
            })
            .clone()
    };
    let n_all = lives.list.iter().filter(|life| life.device == device).count();
    for (function, file) in own.iter().skip(1) {
        let is_inside =
            |lines: &[(String, String)]| lines.iter().any(|(name, of)| name == function && of == file);
        let (mut inside, mut after, mut n_after, mut over, mut last) = (0, 0, 0, Nanos(0), 0);
        for life in lives.list.iter().filter(|life| life.device == device && life.born < gone) {
            let (lines, is_work) = facts(life.stack);
            if is_inside(&lines) {
                (inside, over, last) = (inside + usize::from(is_work), life.since, life.born);
                (after, n_after) = (0, 0);
            } else {
                (after, n_after) = (after + usize::from(is_work), n_after + 1);
            }
        }
        if inside >= LEAST_WORK && after >= LEAST_WORK && f64::from(n_after) >= LEAST_AFTER * n_all as f64 {
            let function = (*function).to_owned();
            let peak_without = peak_without(lives, device, last, stays);
            return Some(Idle { device, site, bytes: Bytes(bytes), blocks, function, over, peak_without });
        }
    }
    None
}

/// The most that a device's blocks held, but from a moment on without these.
fn peak_without(lives: &Lives, device: i16, from: u32, is_idle: impl Fn(&&Life) -> bool) -> Bytes {
    let (mut held, mut idle, mut most) = (0_u64, 0_u64, 0_u64);
    for (moment, idx) in (0_u32..).zip(lives.moments()) {
        let Some(life) = lives.list.get(*idx as usize).filter(|life| life.device == device) else { continue };
        let is_born = life.born == moment;
        let change = |now: u64| if is_born { now + life.bytes.0 } else { now.saturating_sub(life.bytes.0) };
        held = change(held);
        idle = if is_idle(&life) { change(idle) } else { idle };
        most = most.max(held.saturating_sub(if moment > from { idle } else { 0 }));
    }
    Bytes(most)
}
