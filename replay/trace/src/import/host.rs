//! What a PyTorch snapshot says of pinned memory of the host: `host_segments` and `host_traces`, which PyTorch has from 2.14 on
//! (`_record_memory_history(record_pinned_host_memory=True)`).
//!
//! The allocator behind them (`CachingHostAllocator.h`, 2.14 and 2.15) rounds requests up, to a power of two as a rule, and never
//! splits: a segment is one block, and has its address. Memory that `cudaHostRegister` pinned is listed in the same way. Entries are
//! those of devices, in one list, as there is one host.

use std::collections::HashSet;

use gputrace_sim::ops::StackId;

use super::pickle::{Heap, MISSING, RawEntry, Value};
use super::{HIGHEST, LARGEST, LARGEST_SUM};

/// What happened to pinned memory, in the order in which it did.
#[derive(Debug, Default)]
pub(super) struct Host {
    pub(super) events: Vec<HostEvent>,
    pub(super) notes: Vec<String>,
    /// Segments, and bytes of them, at the end.
    pub(super) at_end: (usize, u64),
}

impl Host {
    /// That it is not replayed: it is in no allocator of a device.
    pub(super) fn left_out(&self) -> Option<String> {
        let (n, bytes) = self.at_end;
        let text = || format!("pinned host memory is not replayed: {n} segments of {bytes} bytes at the end");
        (n > 0).then(text)
    }
}

/// One thing that happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct HostEvent {
    pub(super) what: HostAction,
    pub(super) address: u64,
    pub(super) bytes: u64,
    /// Microseconds since 1970; 0 where not recorded.
    pub(super) time_us: i64,
    pub(super) stack: StackId,
}

/// What happens to a segment, and to the block in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum HostAction {
    /// The driver pinned it.
    Pin,
    /// The driver let go of it.
    Unpin,
    /// A program was given it.
    Alloc,
    /// A program gave it back.
    Free,
}

/// A segment of the list.
#[derive(Clone, Copy)]
struct Segment {
    address: u64,
    bytes: u64,
    is_used: bool,
    stack: StackId,
}

/// The keys of the snapshot, while its entries are there still.
pub(super) struct Keys {
    segments: Vec<Segment>,
    n_impossible: usize,
    rows: Vec<u32>,
}

impl Keys {
    /// Both are missing before PyTorch 2.14, and empty where pinned memory was not recorded.
    ///
    /// # Errors
    /// What is wrong with them, in words.
    pub(super) fn read(
        heap: &Heap,
        root: Value,
        stack: &impl Fn(Value) -> StackId,
    ) -> Result<Keys, &'static str> {
        let list = |key, wrong| match heap.get(root, key) {
            None | Some(Value::None) => Ok(&[][..]),
            Some(list) => heap.elements(list).ok_or(wrong),
        };
        let listed = list("host_segments", "`host_segments` is not a list")?;
        let entries = list("host_traces", "`host_traces` is not a list")?;
        let rows: Vec<u32> = entries.iter().filter_map(|value| heap.entry_index(*value)).collect();
        if rows.len() < entries.len() {
            return Err("`host_traces` has an element that is not an event");
        }
        let segments: Vec<Segment> = listed.iter().filter_map(|it| segment(heap, *it, stack)).collect();
        Ok(Keys { n_impossible: listed.len() - segments.len(), segments, rows })
    }

    /// All of it as events: first what was there before the history began.
    pub(super) fn events(self, heap: &Heap, entries: &[RawEntry], stack: &impl Fn(Value) -> StackId) -> Host {
        let mut host = Host { at_end: (self.segments.len(), 0), ..Host::default() };
        let (mut n_impossible, mut sum) = (self.n_impossible, 0u64);
        let mut freed = HashSet::new();
        for segment in &self.segments {
            host.at_end.1 = host.at_end.1.saturating_add(segment.bytes);
        }
        for row in &self.rows {
            let Some(entry) = entries.get(*row as usize) else { continue };
            let Some(what) = heap.strings.get(entry.action as usize).and_then(|text| action(text)) else {
                continue;
            };
            let (address, bytes) = (entry.address, if entry.bytes == MISSING { -1 } else { entry.bytes });
            let (Ok(address), Ok(bytes)) = (u64::try_from(address), u64::try_from(bytes)) else {
                n_impossible += 1;
                continue;
            };
            sum = sum.saturating_add(bytes);
            if !is_possible(address, bytes) || sum > LARGEST_SUM {
                n_impossible += 1;
                continue;
            }
            // A request to free is followed by its completion, where streams are done.
            let is_repeated = match what {
                HostAction::Free => !freed.insert(address),
                HostAction::Pin | HostAction::Alloc | HostAction::Unpin => {
                    freed.remove(&address);
                    false
                }
            };
            if is_repeated {
                continue;
            }
            let time_us = if entry.time_us == MISSING { 0 } else { entry.time_us };
            host.events.push(HostEvent { what, address, bytes, time_us, stack: stack(entry.frames()) });
        }
        let before = at_start(&host.events, &self.segments);
        let n_before = before.iter().filter(|event| event.what == HostAction::Pin).count();
        if n_before > 0 {
            host.notes.push(match (host.events.is_empty(), n_before) {
                (true, _) => "pinned memory: its history was not recorded; it is shown as of the end".into(),
                (false, 1) => "pinned memory: the history does not show when 1 segment was pinned: assumed before it".into(),
                (false, n) => {
                    format!("pinned memory: the history does not show when {n} segments were pinned: assumed before it")
                }
            });
        }
        let began = host.events.first().map_or(0, |event| event.time_us);
        host.events.splice(0..0, before.into_iter().map(|event| HostEvent { time_us: began, ..event }));
        if n_impossible > 0 {
            let events = if n_impossible == 1 { "1 entry".into() } else { format!("{n_impossible} entries") };
            host.notes.push(format!(
                "pinned memory: left out {events} with an address or a size that no machine has: the snapshot is damaged"
            ));
        }
        host
    }
}

fn is_possible(address: u64, bytes: u64) -> bool {
    bytes <= LARGEST && address.checked_add(bytes).is_some_and(|end| end <= HIGHEST)
}

fn action(text: &str) -> Option<HostAction> {
    match text {
        "segment_alloc" => Some(HostAction::Pin),
        "segment_free" => Some(HostAction::Unpin),
        "alloc" => Some(HostAction::Alloc),
        "free_requested" => Some(HostAction::Free),
        // Where requests are skipped (skip_actions), their ends say it.
        "free_completed" => Some(HostAction::Free),
        _ => None,
    }
}

fn segment(heap: &Heap, value: Value, stack: &impl Fn(Value) -> StackId) -> Option<Segment> {
    let number = |value, key| u64::try_from(heap.int(heap.get(value, key)?)?).ok();
    let (address, bytes) = (number(value, "address")?, number(value, "total_size")?);
    let blocks = heap.get(value, "blocks").and_then(|blocks| heap.elements(blocks)).unwrap_or(&[]);
    let is_used = |block: &&Value| {
        let state = heap.get(**block, "state").and_then(|state| heap.text(state));
        state == Some("active_allocated")
    };
    let used = blocks.iter().find(is_used);
    let frames = used.and_then(|block| heap.get(*block, "frames")).or_else(|| heap.get(value, "frames"));
    let found =
        Segment { address, bytes, is_used: used.is_some(), stack: stack(frames.unwrap_or(Value::None)) };
    is_possible(address, bytes).then_some(found)
}

/// What was pinned and in use before the first event: what ends without having begun, and what is there at the end without it.
fn at_start(events: &[HostEvent], at_end: &[Segment]) -> Vec<HostEvent> {
    let (mut segments, mut blocks) = (vec![], vec![]);
    // Addresses that were met: later, they begin with an event.
    let (mut known_segments, mut known_blocks) = (HashSet::new(), HashSet::new());
    for event in events {
        let before = |what| HostEvent { what, stack: StackId::NONE, ..*event };
        if known_segments.insert(event.address) && event.what != HostAction::Pin {
            segments.push(before(HostAction::Pin));
        }
        match event.what {
            HostAction::Pin | HostAction::Unpin => {}
            HostAction::Alloc => _ = known_blocks.insert(event.address),
            HostAction::Free if known_blocks.insert(event.address) => blocks.push(before(HostAction::Alloc)),
            HostAction::Free => {}
        }
    }
    for it in at_end {
        let there =
            |what| HostEvent { what, address: it.address, bytes: it.bytes, time_us: 0, stack: it.stack };
        if known_segments.insert(it.address) {
            segments.push(there(HostAction::Pin));
        }
        if it.is_used && known_blocks.insert(it.address) {
            blocks.push(there(HostAction::Alloc));
        }
    }
    segments.append(&mut blocks);
    segments
}
