//! A checker of the ledger so simple that it can be believed: it keeps everything alive in plain maps, adds it up anew,
//! and compares. It knows nothing of how the ledger counts.
//!
//! What it finds is a bug of the ledger, or events that were lost: on a trace without losses it finds nothing.

use std::collections::{BTreeMap, HashMap};

use gputrace_schemas::event::{Event, HOST};

use crate::ledger::{Ledger, MemoryKind, Object, Paging, Step, Watch};

/// Most findings kept in words; all are counted.
const MAX_WORDS: usize = 20;
/// Sums are compared after this many events, and at the end: they take time.
const COMPARE_EVERY: u64 = 4096;

/// Watches a ledger.
#[derive(Default)]
pub struct BooksAudit {
    objects: HashMap<u64, Object>,
    /// Linear memory, pinned memory and mappings: start to end, by space.
    ranges: BTreeMap<(Space, u64), u64>,
    blocks: BTreeMap<(i16, u64), u64>,
    /// PyTorch's memory of each device: linear segments, and mappings.
    torch: BTreeMap<(i16, u64), u64>,
    /// Signed, so that a total below zero shows.
    physical: BTreeMap<i16, i128>,
    n_events: u64,
    n_found: u64,
    found: Vec<String>,
}

/// What may not overlap with its like.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Space {
    Device,
    Host,
}

impl Watch for BooksAudit {
    fn begin(&mut self, ledger: &mut Ledger) {
        *self = BooksAudit::default();
        ledger.keep_steps();
    }

    fn event(&mut self, ledger: &mut Ledger, event: &Event) {
        self.n_events += 1;
        let time = event.time.0;
        for step in ledger.steps() {
            self.step(time, step);
        }
        if self.n_events.is_multiple_of(COMPARE_EVERY) {
            self.compare(ledger);
        }
    }
}

impl BooksAudit {
    /// How much does not add up, and the first of it in words. `ledger` is the one that was watched, at its end.
    #[must_use]
    pub fn finish(mut self, ledger: &Ledger) -> (u64, Vec<String>) {
        self.compare(ledger);
        (self.n_found, self.found)
    }

    /// Objects that were alive at the end.
    #[must_use]
    pub fn n_live(&self) -> usize {
        self.objects.len()
    }

    fn say(&mut self, text: impl FnOnce() -> String) {
        self.n_found += 1;
        if self.found.len() < MAX_WORDS {
            self.found.push(text());
        }
    }

    fn step(&mut self, time: u64, step: &Step) {
        match step {
            Step::Gained(object) => self.gained(time, object),
            Step::Lost(object) => self.lost(time, object),
            Step::Pages(Paging::Mapped, range) => {
                self.add(time, Space::Device, range.addr, range.bytes.0);
                if range.torch {
                    self.torch.insert((range.device, range.addr), range.addr + range.bytes.0);
                }
            }
            Step::Pages(Paging::Unmapped, range) => {
                self.remove(time, Space::Device, range.addr, range.bytes.0);
                if range.torch {
                    self.torch.remove(&(range.device, range.addr));
                    self.must_be_unused(time, range.device, range.addr, range.bytes.0);
                }
            }
            Step::Block(addr, block) => {
                let (start, end) = (*addr, addr + block.bytes.0);
                if overlaps(&self.blocks, block.device, start, end) {
                    self.say(|| format!("{time}: block {start:#x} overlaps another"));
                }
                self.blocks.insert((block.device, start), end);
            }
            Step::BlockFreed(addr, block) => {
                if self.blocks.remove(&(block.device, *addr)) != Some(addr + block.bytes.0) {
                    self.say(|| format!("{time}: block {addr:#x} freed that does not exist"));
                }
            }
            // No stream uses it any more; it is not handed out again before that.
            Step::BlockDone(..) | Step::Stranger(..) | Step::Heap(..) | Step::Pages(..) => {}
        }
    }

    fn gained(&mut self, time: u64, object: &Object) {
        if self.objects.insert(object.serial, *object).is_some() {
            self.say(|| format!("{time}: object {} allocated twice", object.serial));
        }
        if is_physical(object) {
            *self.physical.entry(object.device).or_default() += i128::from(object.bytes.0);
        }
        if let Some(space) = space(object) {
            self.add(time, space, object.addr, object.bytes.0);
        }
        if object.torch && object.kind == MemoryKind::Linear {
            self.torch.insert((object.device, object.addr), object.addr + object.bytes.0);
        }
    }

    fn lost(&mut self, time: u64, object: &Object) {
        if self.objects.remove(&object.serial).is_none() {
            self.say(|| format!("{time}: object {} freed that does not exist", object.serial));
        }
        if is_physical(object) {
            let sum = self.physical.entry(object.device).or_default();
            *sum -= i128::from(object.bytes.0);
            let sum = *sum;
            if sum < 0 {
                self.say(|| format!("{time}: device {} holds {sum} bytes", object.device));
            }
        }
        if let Some(space) = space(object) {
            self.remove(time, space, object.addr, object.bytes.0);
        }
        if object.torch && object.kind == MemoryKind::Linear {
            self.torch.remove(&(object.device, object.addr));
            self.must_be_unused(time, object.device, object.addr, object.bytes.0);
        }
    }

    fn add(&mut self, time: u64, space: Space, start: u64, bytes: u64) {
        if overlaps(&self.ranges, space, start, start.saturating_add(bytes)) {
            self.say(|| format!("{time}: {start:#x} of {bytes} bytes overlaps something else"));
        }
        self.ranges.insert((space, start), start.saturating_add(bytes));
    }

    fn remove(&mut self, time: u64, space: Space, start: u64, bytes: u64) {
        if self.ranges.remove(&(space, start)) != Some(start.saturating_add(bytes)) {
            self.say(|| format!("{time}: {start:#x} of {bytes} bytes removed that did not exist"));
        }
    }

    /// PyTorch gave memory back in which blocks still live. Memory that went away with its context does not count.
    fn must_be_unused(&mut self, time: u64, device: i16, start: u64, bytes: u64) {
        let still = self.torch.range(..=(device, start)).next_back();
        let is_backed = still.is_some_and(|((of, _), end)| *of == device && *end > start);
        if !is_backed && overlaps(&self.blocks, device, start, start.saturating_add(bytes)) {
            self.say(|| format!("{time}: {start:#x} was removed with blocks in it"));
        }
    }

    fn compare(&mut self, ledger: &Ledger) {
        for (device, books) in ledger.devices() {
            let ours = self.physical.get(device).copied().unwrap_or_default();
            let theirs = i128::from(books.physical.now().bytes.0);
            if ours != theirs {
                let n = self.n_events;
                self.say(|| {
                    format!("event {n}: device {device} holds {ours} bytes, its accounts show {theirs}")
                });
            }
        }
    }
}

fn is_physical(object: &Object) -> bool {
    let kinds = [MemoryKind::Linear, MemoryKind::Virtual, MemoryKind::Async, MemoryKind::Array];
    object.device != HOST && kinds.contains(&object.kind)
}

/// Where the object lies, if it is a range that nothing else may overlap. Memory registered by the program may overlap
/// with itself, and what is imported lies where its owner says.
fn space(object: &Object) -> Option<Space> {
    match object.kind {
        MemoryKind::Linear | MemoryKind::Async | MemoryKind::Managed | MemoryKind::Graph => {
            Some(Space::Device)
        }
        MemoryKind::Pinned => Some(Space::Host),
        MemoryKind::Virtual
        | MemoryKind::Array
        | MemoryKind::Registered
        | MemoryKind::HostVirtual
        | MemoryKind::Imported => None,
    }
}

fn overlaps<K: Copy + Ord>(ranges: &BTreeMap<(K, u64), u64>, key: K, start: u64, end: u64) -> bool {
    let before = ranges.range(..(key, end)).next_back();
    before.is_some_and(|((of, _), stop)| *of == key && *stop > start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scene::recording;
    use crate::source::Source;
    use gputrace_schemas::event::Nanos;

    fn audit(scene: &str) -> Vec<String> {
        let mut audit = BooksAudit::default();
        let source = Source::of("t.gtr", recording(scene));
        let ledger = source.books((Nanos(0), Nanos(u64::MAX)), &mut audit);
        audit.finish(&ledger).1
    }

    #[test]
    fn sleep_and_wake_at_the_same_address_adds_up() {
        let wake = "Create handle=h bytes=2M\nMap addr=0x10000000 bytes=2M handle=h\nSetAccess addr=0x10000000 bytes=2M\n";
        let sleep = "Unmap addr=0x10000000 bytes=2M\nRelease handle=h\n";
        let scene = format!("Reserve addr=0x10000000 bytes=64M\n{wake}{sleep}{wake}{sleep}{wake}");
        assert_eq!(audit(&scene), [""; 0]);
    }

    #[test]
    fn blocks_that_lie_over_each_other_or_outlive_their_segment_are_found() {
        let segment =
            "Alloc addr=0x10000000 bytes=2M by=libc10_cuda.so\nblock addr=0x10000000 bytes=1M allocated=1M\n";
        let over = audit(&format!("{segment}block addr=0x10080000 bytes=1M allocated=2M"));
        assert_eq!(over, ["3000: block 0x10080000 overlaps another"]);
        assert_eq!(
            audit(&format!("{segment}Free addr=0x10000000")),
            ["3000: 0x10000000 was removed with blocks in it"]
        );
    }

    #[test]
    fn memory_over_other_memory_is_found() {
        let found = audit("Alloc addr=0x10000000 bytes=2M\nAlloc addr=0x10100000 bytes=2M");
        assert_eq!(found, ["2000: 0x10100000 of 2097152 bytes overlaps something else"]);
    }
}
