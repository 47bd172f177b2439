//! The simulated side: a program's commands, done as the harness does them.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::super::*;
use super::program::*;
use crate::ops::AllocId;

/// A block that the program has.
pub(super) struct Held {
    pub(super) placement: Placement,
    pub(super) requested: u64,
    /// Streams that use it beside its own.
    pub(super) uses: Vec<u16>,
    /// Those that began to during a capture: a capture's end waits for them, so that no event is needed.
    pub(super) captured: Vec<u16>,
}

/// A freed block that streams still use.
pub(super) struct Waiting {
    pub(super) placement: Placement,
    pub(super) requested: u64,
    pub(super) n_events: usize,
}

/// The simulated side of the harness.
pub(super) struct Simulated {
    pub(super) torch: Torch,
    pub(super) device: Device<'static>,
    pub(super) live: HashMap<u32, Held>,
    pub(super) waiting: HashMap<u32, Waiting>,
    /// Freed during a capture: events come after it.
    pub(super) deferred: Vec<(u32, Vec<u16>)>,
    /// By stream: (number of the event, block).
    pub(super) events: BTreeMap<u16, VecDeque<(u64, u32)>>,
    pub(super) n_events: u64,
    pub(super) finished: [u64; 3],
    pub(super) all_done: bool,
    pub(super) inside: Option<u16>,
    pub(super) uses: HashMap<u16, i64>,
    pub(super) version: (u8, u8),
    /// PyTorch keeps the streams of events in a hash table: in which order it walks them.
    pub(super) stream_order: [u16; 3],
    pub(super) out: Vec<String>,
    pub(super) has_ended: bool,
}

/// What is said where PyTorch's own assertion fails.
pub(super) const ASSERTED: &str = "error block->pool->owner_PrivatePool->cudaMalloc_count > 0";
/// What is said where PyTorch reads what it has deleted.
pub(super) const FREED: &str = "freed";

impl Simulated {
    pub(super) fn step(&mut self, step: Step) {
        if self.has_ended {
            return;
        }
        match step {
            Step::Alloc(id, bytes, stream) => {
                self.alloc(id, bytes, stream);
                if self.torch.n_assertions > 0 {
                    self.out.pop();
                    return self.end(ASSERTED);
                }
            }
            Step::Free(id) => {
                if self.live.get(&id).is_some_and(|held| self.is_lost(held.placement)) {
                    return self.end(FREED);
                }
                self.free(id);
            }
            Step::Record(id, stream) => {
                let captures = self.version >= (2, 4) && self.captures();
                let Some(held) = self.live.get_mut(&id) else { return self.hash() };
                let own = self.torch.block(held.placement.handle).stream;
                if own.0 != stream && !held.uses.contains(&stream) {
                    held.uses.push(stream);
                }
                if own.0 != stream && captures {
                    held.captured.push(stream);
                }
            }
            Step::Done(done) => {
                if self.all_done {
                    self.finished = [self.n_events; 3];
                }
                self.all_done = done;
            }
            Step::Finish(stream) => self.finished[usize::from(stream)] = self.n_events,
            Step::Trim => {
                self.record_deferred();
                self.order_pending();
                self.torch.trim(&mut self.device);
                self.forget_events();
                if self.torch.n_assertions > 0 {
                    return self.end(ASSERTED);
                }
            }
            Step::Fraction(fraction) => self.torch.set_memory_fraction(fraction, self.device.total()),
            Step::Reset => self.torch.reset_peaks(),
            Step::Begin(pool) => {
                *self.uses.entry(pool).or_default() += 1;
                self.inside = Some(pool);
            }
            Step::End(_) => self.inside = None,
            Step::Release(pool) => {
                let uses = self.uses.entry(pool).or_default();
                *uses -= 1;
                if *uses == 0 {
                    self.torch.release_pool(PoolIdx(pool));
                }
            }
            Step::Overflow(pool) => self.torch.use_on_oom(PoolIdx(pool)),
            Step::Whole(pool) => self.torch.never_split(PoolIdx(pool)),
        }
        self.hash();
    }

    fn end(&mut self, said: &str) {
        self.out.push(said.into());
        self.has_ended = true;
    }

    /// Whether PyTorch has deleted the pool of this block.
    fn is_lost(&self, placement: Placement) -> bool {
        self.torch.owners[self.torch.block(placement.handle).pool as usize / 2].is_gone
    }

    /// Whether PyTorch takes it that a stream may be captured.
    fn captures(&self) -> bool {
        self.inside.is_some() && self.torch.profile.mem_pool_is_capture()
    }

    fn alloc(&mut self, id: u32, bytes: u64, stream: u16) {
        if !self.captures() {
            self.record_deferred();
            self.process_events();
        }
        self.order_pending();
        // Up to 2.2 a pool is entered by one stream.
        let inside = self.inside.filter(|_| self.version >= (2, 3) || stream == 0);
        // What a capture forbids, it forbids to all.
        let capture = if self.inside.is_some() { Capture::MemPool } else { Capture::No };
        let pool = PoolIdx(inside.unwrap_or(0));
        let request = Request { bytes, stream: StreamIdx(stream), pool, capture, at: None };
        let syncs = self.torch.stats.num_sync_all_streams;
        match self.torch.alloc(&mut self.device, request) {
            Ok(placement) => {
                self.device.allocated(placement, bytes);
                self.live
                    .insert(id, Held { placement, requested: bytes, uses: Vec::new(), captured: Vec::new() });
                self.out.push(format!("at {id} {:x}", placement.address));
            }
            Err(error) => self.out.push(format!("oom {id} {}", error.message)),
        }
        if self.torch.stats.num_sync_all_streams != syncs {
            self.forget_events();
        }
    }

    fn free(&mut self, id: u32) {
        let Some(Held { placement, requested, mut uses, captured }) = self.live.remove(&id) else { return };
        self.device.free_requested(placement);
        self.torch.free_requested(placement);
        if uses.is_empty() {
            self.complete(placement, requested);
            return;
        }
        let is_deferred = self.captures();
        if is_deferred {
            uses.retain(|stream| !captured.contains(stream));
        }
        self.waiting.insert(id, Waiting { placement, requested, n_events: uses.len() });
        self.device.pend(AllocId(id), placement, requested);
        if is_deferred {
            self.deferred.push((id, uses));
        } else {
            self.record_events(id, uses);
        }
    }

    fn record_events(&mut self, id: u32, uses: Vec<u16>) {
        for stream in uses {
            self.n_events += 1;
            self.events.entry(stream).or_default().push_back((self.n_events, id));
        }
    }

    fn record_deferred(&mut self) {
        for (id, uses) in std::mem::take(&mut self.deferred) {
            if uses.is_empty()
                && let Some(waiting) = self.waiting.remove(&id)
            {
                self.device.unpend(AllocId(id));
                self.complete(waiting.placement, waiting.requested);
            }
            self.record_events(id, uses);
        }
    }

    fn process_events(&mut self) {
        for stream in self.stream_order {
            let limit = if self.all_done { u64::MAX } else { self.finished[usize::from(stream)] };
            while let Some(queue) = self.events.get_mut(&stream)
                && let Some((_, id)) = queue.pop_front_if(|(number, _)| *number <= limit)
            {
                let Some(waiting) = self.waiting.get_mut(&id) else { continue };
                waiting.n_events -= 1;
                if waiting.n_events == 0 {
                    let Waiting { placement, requested, .. } = *waiting;
                    self.waiting.remove(&id);
                    self.device.unpend(AllocId(id));
                    self.complete(placement, requested);
                }
            }
        }
    }

    /// A flush waits for one stream after the other; the device is to hand the blocks back in that order.
    fn order_pending(&mut self) {
        let mut left: HashMap<u32, usize> =
            self.waiting.iter().map(|(id, waiting)| (*id, waiting.n_events)).collect();
        for stream in self.stream_order {
            for (_, id) in self.events.get(&stream).into_iter().flatten() {
                let Some(n_events) = left.get_mut(id) else { continue };
                *n_events -= 1;
                if *n_events == 0 {
                    let waiting = &self.waiting[id];
                    self.device.unpend(AllocId(*id));
                    self.device.pend(AllocId(*id), waiting.placement, waiting.requested);
                }
            }
        }
    }

    fn complete(&mut self, placement: Placement, requested: u64) {
        self.device.free_completed(placement, requested);
        self.torch.free(&mut self.device, placement);
    }

    /// A flush has waited for all of them.
    fn forget_events(&mut self) {
        self.events.clear();
        self.waiting.clear();
    }

    /// Every number, by name.
    pub(super) fn numbers(&self) -> Vec<(&'static str, i64)> {
        let stats = &self.torch.stats;
        let mut numbers: Vec<(&'static str, i64)> =
            stats.numbers().flat_map(|(name, four)| four.map(|value| (name, value))).collect();
        let mut scalar = |name, value: u64| numbers.push((name, value as i64));
        scalar("num_alloc_retries", stats.num_alloc_retries);
        scalar("num_ooms", stats.num_ooms);
        if self.version >= (2, 3) {
            scalar("num_device_alloc", stats.num_device_alloc);
            scalar("num_device_free", stats.num_device_free);
            scalar("num_sync_all_streams", stats.num_sync_all_streams);
        }
        if self.version >= (2, 12) {
            scalar("num_oom_rejections", stats.num_oom_rejections);
        }
        scalar("stub_used", self.device.total() - self.device.free());
        numbers
    }

    pub(super) fn hash(&mut self) {
        // FNV-1a over words, as in the harness.
        let mix = |hash: u64, value: i64| (hash ^ value as u64).wrapping_mul(0x100_0000_01b3);
        let hash =
            self.numbers().into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, (_, value)| mix(hash, value));
        self.out.push(format!("= {hash:x}"));
    }

    /// The books outside must say the same as PyTorch's own, except for peaks that the program has reset.
    pub(super) fn check_books(&self) {
        let books = &self.device.books;
        for (name, gauge) in [
            (Name::AllocatedBytes, books.allocated),
            (Name::ReservedBytes, books.reserved),
            (Name::ActiveBytes, books.active),
            (Name::RequestedBytes, books.requested),
            (Name::InactiveSplitBytes, books.inactive_split),
        ] {
            let own = self.torch.stats.all(name);
            assert_eq!(own.current as u64, gauge.current, "books of {name:?}");
            assert!(own.peak as u64 <= gauge.peak, "peak of {name:?}");
        }
    }
}
