//! Who called a line that several use: of a helper that allocates for many, the one that leaks through it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use gputrace_schemas::event::{Bytes, Frame, Nanos, StackId};
use rustc_hash::FxHashMap;

use gputrace_analyse::growth::Place;
use gputrace_analyse::story::Story;
use gputrace_trace::Definitions;
use gputrace_trace::backward::{place, python_lines};
use gputrace_trace::ledger::{Account, Site};

/// Callers that are named together.
const MOST: usize = 3;
/// Callers of callers that are named, and lines that are gone through.
const DEPTH: (usize, usize) = (3, 16);
/// From this share on, a caller is the one.
const MOSTLY: f64 = 0.8;
/// Parts of the run: what was asked for before is warm-up, what was asked for after may go yet.
const COUNTED: (f64, f64) = (0.25, 0.85);

/// Function, file and line.
type Line = (String, String, u32);

/// Words for the callers of a line, by what of it was asked for after the warm-up and is held at the end: `, called from f (a.py:3) 80 %, g
/// (a.py:9) 20 %`. Nothing where it has one caller.
pub(super) fn callers(story: &Story, definitions: &dyn Definitions, of: Place) -> String {
    let Some(site) = story.ledger.sites.site(of.site) else { return String::new() };
    let mut all: Vec<Vec<Line>> =
        story.ledger.sites.stacks_of(of.site).filter_map(|stack| outward(definitions, site, stack)).collect();
    let held = held(story, of);
    let held =
        held.into_iter().filter_map(|(stack, bytes)| Some((outward(definitions, site, stack)?, bytes)));
    let mut held: Vec<(Vec<Line>, u64)> = held.collect();
    let (mut text, mut n_named) = (String::new(), 0);
    for depth in 0..DEPTH.1 {
        let known: BTreeSet<&Line> = all
            .iter()
            .chain(held.iter().map(|(lines, _)| lines))
            .filter_map(|lines| lines.get(depth))
            .collect();
        if known.is_empty() || n_named == DEPTH.0 {
            break;
        }
        if known.len() == 1 {
            continue;
        }
        let mut by_caller: BTreeMap<&Line, u64> = BTreeMap::new();
        for (lines, bytes) in &held {
            if let Some(line) = lines.get(depth) {
                let held = by_caller.entry(line).or_default();
                *held = held.saturating_add(*bytes);
            }
        }
        let mut largest: Vec<(Line, u64)> =
            by_caller.into_iter().map(|(line, n)| (line.clone(), n)).collect();
        largest.sort_by_key(|(_, bytes)| Reverse(*bytes));
        let sum = largest.iter().fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
        let Some((first, most)) = largest.first().cloned() else { break };
        text.push_str(if n_named == 0 { ", called from " } else { ", that from " });
        text.push_str(&words(&largest, sum));
        n_named += 1;
        if (most as f64) < MOSTLY * sum as f64 {
            break;
        }
        all.retain(|lines| lines.get(depth) == Some(&first));
        held.retain(|(lines, _)| lines.get(depth) == Some(&first));
    }
    text
}

fn words(largest: &[(Line, u64)], sum: u64) -> String {
    let share = |bytes: u64| 100.0 * bytes as f64 / sum.max(1) as f64;
    let named = largest.iter().take(MOST).map(|((function, file, line), bytes)| {
        let at = if *line > 0 { format!(" ({file}:{line})") } else { String::new() };
        format!("{function}{at} {:.0} %", share(*bytes))
    });
    let more = if largest.len() > MOST { ", others" } else { "" };
    named.collect::<Vec<_>>().join(", ") + more
}

/// What of a place is held at the end, by stack: of what was asked for when it counts, if there is such.
fn held(story: &Story, of: Place) -> Vec<(StackId, u64)> {
    let (begin, end) = (story.start().0, story.ledger.run.last.0);
    let at = |share: f64| begin + (end.saturating_sub(begin) as f64 * share) as u64;
    let (from, to) = (at(COUNTED.0), at(COUNTED.1));
    let (mut counted, mut all): (FxHashMap<StackId, u64>, FxHashMap<StackId, u64>) = Default::default();
    let mut add = |device, site, stack: StackId, since: Nanos, bytes: Bytes| {
        if (device, site) != (of.device, of.site) {
            return;
        }
        // Mappings of other processes' memory have no bytes of their own.
        let bytes = if of.account == Account::Imported { 1 } else { bytes.0 };
        let into = |held: &mut FxHashMap<StackId, u64>| {
            let held = held.entry(stack).or_default();
            *held = held.saturating_add(bytes);
        };
        into(&mut all);
        if (from..=to).contains(&since.0) {
            into(&mut counted);
        }
    };
    match of.account {
        Account::Blocks => {
            let blocks = story.ledger.live_blocks();
            blocks
                .for_each(|(_, block)| add(block.device, block.site, block.stack, block.since, block.bytes));
        }
        Account::Buffers => story.ledger.live_buffers().for_each(|(_, buffer)| {
            add(buffer.device, buffer.site, buffer.stack, buffer.since, buffer.bytes);
        }),
        Account::Heap => story.ledger.live_heap_blocks().for_each(|(_, block)| {
            add(block.device, block.site, block.stack, block.since, block.bytes);
        }),
        _ => story
            .ledger
            .live()
            .for_each(|object| add(object.device, object.site, object.stack, object.since, object.bytes)),
    }
    let held = if counted.is_empty() { all } else { counted };
    let mut held: Vec<_> = held.into_iter().collect();
    held.sort_unstable_by_key(|(stack, _)| *stack);
    held
}

/// The lines of a stack outside of the site's own, innermost first: Python's, or where there are none native functions.
fn outward(definitions: &dyn Definitions, site: &Site, stack: StackId) -> Option<Vec<Line>> {
    let stack = place(definitions, definitions.stack(stack)?).stack;
    let python =
        python_lines(definitions, stack).map(|(function, file, line)| (function.into(), file.into(), line));
    let mut lines: Vec<Line> = python.collect();
    if lines.is_empty() {
        let native = stack.frames.iter().filter_map(|id| match definitions.frame(*id)? {
            Frame::Native { function, file, line, .. } if !function.is_empty() => {
                Some((function.clone(), file.clone(), *line))
            }
            Frame::Native { .. } | Frame::Python { .. } => None,
        });
        lines = native.collect();
    }
    let is_site = |(function, file, line): &Line| {
        *function == site.function && *line == site.line && (*line == 0 || file.ends_with(&site.file))
    };
    let here = lines.iter().position(is_site)?;
    Some(lines.split_off(here + 1))
}
