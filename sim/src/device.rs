//! The simulated GPU: physical memory, addresses, and the books of what is mapped and in use.
//!
//! A policy sees memory only through [`Device`]. The books are kept here, outside every policy, so that policies
//! can be compared; what decides the addresses is an [`AddressSpace`] (`addresses.rs`).

use std::collections::{BTreeMap, HashMap};

use crate::addresses::AddressSpace;
use crate::audit::Audit;
use crate::ops::{AllocId, OtherChange, Others};
pub use crate::placement::{PAGE, Placement, Segment, SegmentId};
use crate::skip::{self, State};

/// A quantity over time. Bytes or counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gauge {
    /// Now.
    pub current: u64,
    /// The most so far.
    pub peak: u64,
}

impl Gauge {
    fn add(&mut self, amount: u64) {
        self.current += amount;
        self.peak = self.peak.max(self.current);
    }

    fn sub(&mut self, amount: u64) {
        self.current -= amount;
    }
}

/// Memory in use, whatever the policy. All in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Books {
    /// Mapped from the driver.
    pub reserved: Gauge,
    /// Handed out and not yet freed, after rounding.
    pub allocated: Gauge,
    /// Handed out, or freed and still used by a stream, after rounding.
    pub active: Gauge,
    /// The same, as requested.
    pub requested: Gauge,
    /// Free but not returnable, because its segment holds something active. Expandable segments do not count.
    pub inactive_split: Gauge,
    /// Calls that obtained memory from the driver.
    pub n_device_alloc: u64,
    /// Calls that gave memory back to the driver.
    pub n_device_free: u64,
    /// Requests served.
    pub n_allocs: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct SegmentBook {
    address: u64,
    bytes: u64,
    active: u64,
    /// Bytes with memory behind them.
    mapped: u64,
    grows: bool,
}

impl SegmentBook {
    fn inactive_split(&self) -> u64 {
        if self.grows || self.active == 0 { 0 } else { self.bytes - self.active }
    }
}

/// When allocator and others together held most of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tightest {
    /// Index of the op.
    pub op: usize,
    /// Mapped by the simulated allocator, bytes.
    pub reserved: u64,
    /// Held by others, bytes.
    pub others: u64,
}

/// The simulated GPU.
pub struct Device<'a> {
    total: u64,
    limit: Option<u64>,
    /// All that the allocator and others may hold together, bytes.
    capacity: u64,
    used: u64,
    /// What others will hold.
    changes: &'a [OtherChange],
    /// What each of them holds now.
    others: Vec<u64>,
    others_total: u64,
    tightest: Tightest,
    space: Box<dyn AddressSpace + 'a>,
    segments: Vec<SegmentBook>,
    pending: BTreeMap<u64, (AllocId, Placement, u64)>,
    pending_since: HashMap<AllocId, u64>,
    n_pended: u64,
    audit: Option<Audit>,
    op: u32,
    /// Calls of what chooses addresses.
    n_calls: u64,
    simulates_all: bool,
    /// The books. Anyone may read them; only the simulator and this file write.
    pub books: Books,
}

impl<'a> Device<'a> {
    /// A device of `total` bytes, of which the process may use `limit`.
    pub fn new(total: u64, limit: Option<u64>, space: Box<dyn AddressSpace + 'a>) -> Device<'a> {
        Device {
            total,
            limit,
            capacity: total,
            used: 0,
            changes: &[],
            others: Vec::new(),
            others_total: 0,
            tightest: Tightest::default(),
            space,
            segments: Vec::new(),
            pending: BTreeMap::new(),
            pending_since: HashMap::new(),
            n_pended: 0,
            audit: None,
            op: 0,
            n_calls: 0,
            simulates_all: !skip::is_on(),
            books: Books::default(),
        }
    }

    /// Others share the device, and what the process may use.
    pub fn beside(mut self, others: &'a Others) -> Device<'a> {
        self.capacity = self.total.min(self.limit.unwrap_or(u64::MAX));
        self.changes = &others.changes;
        self.others = vec![0; others.names.len()];
        self
    }

    /// The same once more, for a run that goes another way from here on because it may use less; none where that cannot be.
    pub(crate) fn fork(&self, limit: u64) -> Option<Device<'a>> {
        if self.audit.is_some() {
            return None;
        }
        Some(Device {
            space: self.space.fork()?,
            limit: Some(limit),
            others: self.others.clone(),
            segments: self.segments.clone(),
            pending: self.pending.clone(),
            pending_since: self.pending_since.clone(),
            audit: None,
            ..*self
        })
    }

    /// Calls that were others than the recorded ones, as far as the addresses tell.
    pub(crate) fn n_strayed(&self) -> u64 {
        self.space.n_strayed()
    }

    /// Lets an independent checker watch everything. Slow.
    pub fn audited(mut self) -> Device<'a> {
        self.audit = Some(Audit::default());
        self
    }

    /// Has every op of a run simulated, those too that are known to come out as before.
    pub fn simulating_all(mut self) -> Device<'a> {
        self.simulates_all = true;
        self
    }

    /// Whether what is known to come out as before may be left out.
    pub(crate) fn skips(&self) -> bool {
        !self.simulates_all && self.audit.is_none()
    }

    /// Physical memory, bytes.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Physical memory that nobody uses, bytes.
    pub fn free(&self) -> u64 {
        self.capacity.saturating_sub(self.used).saturating_sub(self.others_total)
    }

    /// When allocator and others together held most.
    pub fn tightest(&self) -> Tightest {
        self.tightest
    }

    /// What the allocator and others hold now.
    pub(crate) fn now(&self) -> Tightest {
        Tightest { op: self.op as usize, reserved: self.books.reserved.current, others: self.others_total }
    }

    fn note_tightest(&mut self) {
        let now = self.now();
        if now.reserved + now.others > self.tightest.reserved + self.tightest.others {
            self.tightest = now;
        }
    }

    /// The most that the process may have mapped, bytes. Keeping to it is the policy's business, because
    /// policies differ in what they compare it with.
    pub fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// Whether `bytes` more stay within the limit.
    pub fn is_within_limit(&self, bytes: u64) -> bool {
        self.limit.is_none_or(|limit| self.books.reserved.current.saturating_add(bytes) <= limit)
    }

    /// A new segment (`cudaMalloc`), or none where the device is full.
    pub fn map(&mut self, bytes: u64) -> Option<Segment> {
        let physical = physical(bytes);
        if self.free() < physical {
            return None;
        }
        self.n_calls += 1;
        let address = self.space.map(bytes, self.op)?;
        self.used += physical;
        self.books.reserved.add(bytes);
        self.books.n_device_alloc += 1;
        self.note_tightest();
        if let Some(audit) = &mut self.audit {
            audit.mapped(address, bytes);
        }
        Some(self.segment(SegmentBook { address, bytes, active: 0, mapped: bytes, grows: false }))
    }

    /// A segment that was there before the history began, where it was.
    pub fn adopt(&mut self, address: u64, bytes: u64) -> Segment {
        self.used += physical(bytes);
        self.books.reserved.add(bytes);
        self.note_tightest();
        if let Some(audit) = &mut self.audit {
            audit.mapped(address, bytes);
        }
        self.segment(SegmentBook { address, bytes, active: 0, mapped: bytes, grows: false })
    }

    /// Which op is being simulated: the driver may know what else happened by then.
    pub(crate) fn at_op(&mut self, op: usize) {
        self.op = op as u32;
        if self.changes.first().is_some_and(|change| change.before_op as usize <= op) {
            self.others_change();
        }
    }

    fn others_change(&mut self) {
        let n_due = self.changes.partition_point(|change| change.before_op <= self.op);
        let (due, later) = self.changes.split_at(n_due);
        for change in due {
            let held = &mut self.others[change.name as usize];
            self.others_total = self.others_total.saturating_sub(*held).saturating_add(change.bytes);
            *held = change.bytes;
        }
        self.changes = later;
        self.note_tightest();
    }

    /// Until told otherwise, the next requests are ones that the driver refused when they were recorded.
    pub(crate) fn repeat_refusals(&mut self, repeat: bool) {
        self.space.repeat_refusals(repeat);
    }

    /// Gives a whole segment back (`cudaFree`).
    pub fn unmap(&mut self, segment: SegmentId) {
        let book = self.segments[segment.0 as usize];
        self.n_calls += 1;
        self.space.unmap(book.address, book.bytes);
        self.segments[segment.0 as usize].mapped = 0;
        self.used -= physical(book.bytes);
        self.books.reserved.sub(book.bytes);
        self.books.n_device_free += 1;
        if let Some(audit) = &mut self.audit {
            audit.unmapped(book.address, book.bytes);
        }
    }

    /// Reserves addresses without memory (`cuMemAddressReserve`).
    pub fn reserve(&mut self, bytes: u64) -> Segment {
        self.n_calls += 1;
        let address = self.space.reserve(bytes);
        self.segment(SegmentBook { address, bytes, active: 0, mapped: 0, grows: true })
    }

    /// Gives reserved addresses back. No page may be committed.
    pub fn unreserve(&mut self, segment: SegmentId) {
        let book = self.segments[segment.0 as usize];
        self.n_calls += 1;
        self.space.unreserve(book.address, book.bytes);
        // Nothing lies in it any more.
        self.segments[segment.0 as usize].bytes = 0;
    }

    /// Puts memory behind part of a reservation (`cuMemCreate` and `cuMemMap`), page by page. Counts as one call.
    /// Fails as a whole where the device is full.
    pub fn commit(&mut self, address: u64, bytes: u64) -> bool {
        if self.free() < bytes {
            return false;
        }
        self.n_calls += 1;
        if !self.space.commit(address, bytes) {
            return false;
        }
        self.used += bytes;
        if let Some(book) = self.growing(address) {
            book.mapped += bytes;
        }
        self.books.reserved.add(bytes);
        self.books.n_device_alloc += 1;
        self.note_tightest();
        if let Some(audit) = &mut self.audit {
            audit.mapped(address, bytes);
        }
        true
    }

    /// Takes memory away from part of a reservation. Counts as one call.
    pub fn decommit(&mut self, address: u64, bytes: u64) {
        self.n_calls += 1;
        self.space.decommit(address, bytes);
        if let Some(book) = self.growing(address) {
            book.mapped -= bytes;
        }
        self.used -= bytes;
        self.books.reserved.sub(bytes);
        self.books.n_device_free += 1;
        if let Some(audit) = &mut self.audit {
            audit.unmapped(address, bytes);
        }
    }

    /// The newest reservation that an address lies in.
    fn growing(&mut self, address: u64) -> Option<&mut SegmentBook> {
        let mut newest_first = self.segments.iter_mut().rev();
        newest_first.find(|it| it.grows && (it.address..it.address + it.bytes).contains(&address))
    }

    /// The segments that have memory behind them: bytes mapped, and bytes of blocks in use or waiting for a stream.
    pub(crate) fn segments(&self) -> impl Iterator<Item = (SegmentId, u64, u64)> {
        let all = (0u32..).zip(&self.segments).filter(|(_, book)| book.mapped > 0);
        all.map(|(index, book)| (SegmentId(index), book.mapped, book.active))
    }

    /// Whether streams still use a block that was given back.
    pub(crate) fn is_pending(&self, id: AllocId) -> bool {
        self.pending_since.contains_key(&id)
    }

    /// Waits for every stream: all frees that were still pending complete, oldest first.
    pub fn synchronize(&mut self) -> Vec<Placement> {
        let pending = std::mem::take(&mut self.pending);
        self.pending_since.clear();
        pending
            .into_values()
            .map(|(_, placement, requested)| {
                self.free_completed(placement, requested);
                placement
            })
            .collect()
    }

    /// Waits for those of the pending frees: they complete, oldest first.
    pub fn synchronize_those(&mut self, wanted: impl Fn(&Placement) -> bool) -> Vec<Placement> {
        let pending = self.pending.values().filter(|(_, placement, _)| wanted(placement));
        let those: Vec<(AllocId, Placement, u64)> = pending.copied().collect();
        let completed = those.into_iter().map(|(id, placement, requested)| {
            self.unpend(id);
            self.free_completed(placement, requested);
            placement
        });
        completed.collect()
    }

    /// Books of a request that was served.
    pub(crate) fn allocated(&mut self, placement: Placement, requested: u64) {
        self.books.n_allocs += 1;
        self.books.allocated.add(placement.bytes);
        self.books.active.add(placement.bytes);
        self.books.requested.add(requested);
        self.change_active(placement, i64::try_from(placement.bytes).unwrap_or(i64::MAX));
        if let Some(audit) = &mut self.audit {
            audit.placed(placement, requested);
        }
    }

    /// Books of a block that the program gave back.
    pub(crate) fn free_requested(&mut self, placement: Placement) {
        self.books.allocated.sub(placement.bytes);
    }

    /// Notes that streams still use a block that was given back.
    pub(crate) fn pend(&mut self, id: AllocId, placement: Placement, requested: u64) {
        self.pending.insert(self.n_pended, (id, placement, requested));
        self.pending_since.insert(id, self.n_pended);
        self.n_pended += 1;
    }

    /// Whether a free is still pending; if so it no longer is.
    pub(crate) fn unpend(&mut self, id: AllocId) -> bool {
        match self.pending_since.remove(&id) {
            Some(since) => self.pending.remove(&since).is_some(),
            None => false,
        }
    }

    /// Books of a block that no stream uses any more.
    pub(crate) fn free_completed(&mut self, placement: Placement, requested: u64) {
        self.books.active.sub(placement.bytes);
        self.books.requested.sub(requested);
        self.change_active(placement, -i64::try_from(placement.bytes).unwrap_or(i64::MAX));
        if let Some(audit) = &mut self.audit {
            audit.released(placement);
        }
    }

    // What a skip asks: see `skip/`.

    /// Calls of what chooses addresses, so far.
    pub(crate) fn n_calls(&self) -> u64 {
        self.n_calls
    }

    /// Some numbers of the state.
    pub(crate) fn glance(&self, n_live: usize, n_waiting: usize) -> [u64; 8] {
        let books = &self.books;
        let amounts = [books.reserved, books.allocated, books.active, books.requested, books.inactive_split];
        let [reserved, allocated, active, requested, inactive_split] = amounts.map(|gauge| gauge.current);
        let others = self.others_total.wrapping_add((self.changes.len() as u64) << 40);
        let names = (n_live as u64) << 32 | self.pending.len() as u64;
        [reserved, allocated, active, requested, inactive_split, others, names, n_waiting as u64]
    }

    /// Writes what later decisions read of it, but for what chooses addresses; `named` makes an id one that is the same in every window.
    pub(crate) fn write(&self, to: &mut State, named: &dyn Fn(u32) -> u64) {
        let Device { total, limit, capacity, used, others_total, .. } = self;
        to.put(*total);
        to.put_option(*limit);
        to.put_all([*capacity, *used, *others_total, self.changes.len() as u64]);
        to.put_all(self.others.iter().copied());
        let books = self.segments.iter().filter(|book| book.mapped > 0 || book.grows && book.bytes > 0);
        to.put_all(books.flat_map(|book| {
            [book.address, book.bytes, book.active, book.mapped << 1 | u64::from(book.grows)]
        }));
        let pending = self.pending.values();
        to.put_all(pending.flat_map(|(id, placement, requested)| {
            [named(id.0), placement.address, placement.bytes, *requested]
        }));
    }

    /// What later addresses depend on; none where it is not told.
    pub(crate) fn space_state(&self) -> Option<State> {
        let mut state = State::default();
        self.space.write(&mut state).then_some(state)
    }

    /// The op at which something changes that depends on nothing else; where the driver is called, also what is known of that.
    pub(crate) fn next_change(&self, is_called: bool) -> Option<usize> {
        let of_others = self.changes.first().map(|change| change.before_op);
        let of_space = if is_called { self.space.next_change() } else { None };
        of_others.into_iter().chain(of_space).min().map(|op| op as usize)
    }

    /// What only counts.
    pub(crate) fn tallies(&mut self, see: &mut dyn FnMut(&mut u64)) {
        let books = &mut self.books;
        let tallies = [&mut books.n_device_alloc, &mut books.n_device_free, &mut books.n_allocs];
        tallies.into_iter().for_each(see);
    }

    /// So many ops were skipped: frees that are pending and belong to them have other ids.
    pub(crate) fn skipped(&mut self, n_ops: usize, oldest: u32, shift: u32) {
        self.op += n_ops as u32;
        for (id, ..) in self.pending.values_mut() {
            if id.0 >= oldest {
                id.0 += shift;
            }
        }
        self.pending_since = self.pending.iter().map(|(since, (id, ..))| (*id, *since)).collect();
    }

    fn change_active(&mut self, placement: Placement, bytes: i64) {
        let Some(book) = self.segments.get_mut(placement.segment.0 as usize) else { return };
        let before = book.inactive_split();
        book.active = book.active.saturating_add_signed(bytes);
        let after = book.inactive_split();
        if after > before {
            self.books.inactive_split.add(after - before);
        } else {
            self.books.inactive_split.sub(before - after);
        }
    }

    fn segment(&mut self, book: SegmentBook) -> Segment {
        let id = SegmentId(self.segments.len() as u32);
        self.segments.push(book);
        Segment { id, address: book.address }
    }
}

/// What a driver allocation takes: whole pages, except that the driver packs small ones.
fn physical(bytes: u64) -> u64 {
    if bytes < PAGE / 2 { bytes.next_multiple_of(512) } else { bytes.next_multiple_of(PAGE) }
}
