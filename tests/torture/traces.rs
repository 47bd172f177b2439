//! Reads what the traces of a run hold, and what its programs counted themselves.

use crate::workshop::*;
use gputrace_schemas::event::{Action, EventKind, LostCause};
use gputrace_schemas::reader::Trace;
use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::Path;

/// What the traces of a run hold.
#[derive(Default)]
pub(crate) struct Found {
    pub(crate) traces: usize,
    /// Line, request, and whether it is its end.
    pub(crate) events: HashSet<(u64, u64, bool)>,
    pub(crate) by_line: BTreeMap<u64, u64>,
    pub(crate) unfinished: u64,
    pub(crate) lost: BTreeMap<&'static str, u64>,
    pub(crate) torn: Vec<String>,
    pub(crate) recovered: u32,
}

impl Found {
    pub(crate) fn recorded(&self) -> u64 {
        self.events.len() as u64 + self.unfinished
    }
    pub(crate) fn lost(&self) -> u64 {
        self.lost.values().sum()
    }
}

impl Found {
    pub(crate) fn read(&mut self, trace: &Trace, lines: &[Line]) {
        let mut last: BTreeMap<u64, u64> = BTreeMap::new();
        let mut here = HashSet::new();
        self.traces += 1;
        for event in trace.events() {
            match event.kind {
                EventKind::Lost(lost) => {
                    *self.lost.entry(lost.cause.name()).or_default() += lost.events;
                    if lost.cause == LostCause::Damaged {
                        self.torn.push(format!("{} damaged", lost.events));
                    }
                }
                EventKind::Call(call) if matches!(call.action, Action::Alloc | Action::Free) => {
                    let is_free = call.action == Action::Free;
                    if call.result.is_none() {
                        self.unfinished += 1;
                        continue;
                    }
                    // What a limiter refused has no address.
                    let is_refused = call.result == Some(2) && !is_free;
                    let place = if is_refused { MARK | call.bytes.0 } else { call.addr };
                    let (number, n) = ((place & !MARK) >> 32, place & 0xffff_ffff);
                    let made = usize::try_from(number).ok().and_then(|at| lines.get(at.checked_sub(1)?));
                    let is_known = made.is_some_and(|line| (1..=line.requests).contains(&n));
                    let is_whole = place & MARK != 0 && (is_free || call.bytes.0 == place & !MARK);
                    if !is_known || !is_whole || (call.result != Some(0) && !is_refused) {
                        self.torn.push(format!("{call:?}"));
                        continue;
                    }
                    let before = if is_free { 0 } else { last.insert(number, n).unwrap_or(0) };
                    if before >= n || !here.insert((number, n, is_free)) {
                        self.torn.push(format!("line {number}: {n} again, or after {before}: {call:?}"));
                    }
                }
                _ => {}
            }
        }
        for event in here {
            // A recorder that was killed may have written what `recover` found again.
            if self.events.insert(event) {
                *self.by_line.entry(event.0).or_default() += 1;
            } else if self.recovered == 0 {
                self.torn.push(format!("in two traces: {event:?}"));
            }
        }
        let damages = trace.damages().into_iter().map(|damage| damage.to_string());
        self.torn.extend(damages.filter(|damage| !damage.contains("killed")));
    }
}

/// A bit that every address of `torture/driver.c` has.
pub(crate) const MARK: u64 = 1 << 62;
/// What torture.h sets for the lines of signal handlers.
pub(crate) const ASIDE: u64 = 1 << 63;
/// `struct page` of `torture/torture.h`.
pub(crate) const PAGE_BYTES: u64 = 64 + 32 * (1 << 18);

pub(crate) fn read_page(path: &Path) -> Vec<Line> {
    let bytes = fs::read(path).unwrap_or_default();
    let number =
        |at: usize| bytes.get(at..at + 8).map_or(0, |it| u64::from_le_bytes(it.try_into().expect("eight")));
    let count = usize::try_from(number(0)).unwrap_or(0);
    let line = |at: usize| {
        let at = 64 + 32 * at;
        Line {
            requests: number(at),
            asked: number(at + 8),
            completed: number(at + 16),
            process: number(at + 24),
        }
    };
    (0..count).map(line).collect()
}
