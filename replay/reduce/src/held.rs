//! What devices held, followed change by change in one pass: by stack at their peaks, by call site at the most between two
//! collectives, and over time.
//!
//! Each amount remembers what it was at chosen moments, as in the books ([`gputrace_trace::ledger::Books`]): a new highest moment has a number,
//! and an amount that changes after it notes what it was before.

use std::collections::BTreeMap;

use gputrace_schemas::event::{Bytes, Event, HOST, Nanos, StackId};
use rustc_hash::FxHashMap;

use super::between::{Between, Span};
use super::series::{Amount, Clock};
use gputrace_analyse::live::{self, Holder, Level, Picture};
use gputrace_trace::ledger::{Block, Ledger, Object, OwnerId, PhaseId, SiteId, Step};

/// The device's peak, as [`gputrace_analyse::live::When::Peak`] has it.
const PEAK: usize = 0;
/// The most since the trace began.
pub(super) const SINCE_START: usize = 1;
/// The most since the newest collective.
pub(super) const SINCE_CALL: usize = 2;
/// The books are compared with what was followed after so many events, and so often again.
const FIRST_CHECK: u64 = 64;

/// Follows what is held.
#[derive(Default)]
pub(super) struct Held {
    pub clock: Clock,
    holders: Vec<Followed>,
    numbers: FxHashMap<Holder, u32>,
    pub places: Vec<Place>,
    place_numbers: FxHashMap<(i16, Level, OwnerId, SiteId), u32>,
    sizes: FxHashMap<(i16, u64), Remembered>,
    pub devices: BTreeMap<i16, Device>,
    /// When the newest collective of a device was called, and whether that is known.
    since: BTreeMap<i16, (Nanos, bool)>,
    /// Devices that the newest event concerned.
    touched: Vec<i16>,
    n_events: u64,
    next_check: u64,
}

/// A number that remembers what it was at a moment.
#[derive(Clone, Copy, Default)]
struct Remembered {
    now: u64,
    then: u64,
    stamp: u32,
}

impl Remembered {
    fn change(&mut self, moment: u32, by: i64) {
        if self.stamp != moment {
            (self.then, self.stamp) = (self.now, moment);
        }
        self.now = self.now.saturating_add_signed(by);
    }

    fn at(&self, moment: u32) -> u64 {
        if self.stamp == moment { self.then } else { self.now }
    }
}

struct Followed {
    holder: Holder,
    place: u32,
    /// Index of its owner on its device.
    owner: u32,
    bytes: Remembered,
    objects: Remembered,
}

/// A call site of an owner on a device.
pub(super) struct Place {
    pub device: i16,
    pub level: Level,
    pub owner: OwnerId,
    pub site: SiteId,
    pub amount: Amount,
    /// At [`SINCE_START`] and [`SINCE_CALL`].
    moments: [Remembered; 2],
    /// What the newest state that was kept says.
    pub kept: u64,
    pub is_changed: bool,
}

impl Place {
    /// What it held at [`SINCE_START`] or [`SINCE_CALL`].
    pub(super) fn at(&self, which: usize, device: &Device) -> u64 {
        self.moments[which - 1].at(device.best[which].moment)
    }

    pub(super) fn now(&self) -> u64 {
        self.amount.now
    }
}

/// The highest moment of some time.
#[derive(Clone, Copy, Default)]
pub(super) struct Best {
    pub height: (Bytes, Bytes),
    pub time: Nanos,
    moment: u32,
}

impl Best {
    fn is_now(&mut self, height: (Bytes, Bytes), time: Nanos) {
        (self.height, self.time) = (height, time);
        self.moment += 1;
    }
}

/// A device.
#[derive(Default)]
pub(super) struct Device {
    pub best: [Best; 3],
    segments: u64,
    in_blocks: u64,
    has_blocks: bool,
    /// PyTorch's segments that came before its first block: holder and bytes by the object's number.
    early: FxHashMap<u64, (u32, u64)>,
    cached: Option<u32>,
    pub total: Amount,
    pub owners: Vec<(String, Amount)>,
    pub phases: BTreeMap<PhaseId, Amount>,
    pub between: Between,
    /// Places that changed since a state was kept.
    pub changed: Vec<u32>,
    /// What was followed is what the books say, as far as was looked.
    pub is_sure: bool,
    /// Objects went away with their context, and the books still show them.
    pub has_dropped: bool,
    n_dropped: u64,
    touched: bool,
}

impl Held {
    /// An event was booked; steps are kept.
    pub(super) fn event(&mut self, ledger: &Ledger, event: &Event) {
        self.n_events += 1;
        if self.clock.event(event.time) {
            self.halve();
        }
        for step in ledger.steps() {
            match step {
                Step::Block(_, block) => self.block(ledger, block, 1),
                Step::BlockFreed(_, block) => self.block(ledger, block, -1),
                Step::Gained(object) => self.object(ledger, object, 1),
                Step::Lost(object) => self.object(ledger, object, -1),
                Step::BlockDone(..) | Step::Stranger(..) | Step::Heap(..) | Step::Pages(..) => {}
            }
        }
        if !ledger.steps().is_empty() {
            self.judge(ledger, event.time);
        }
        if self.n_events == self.next_check.max(FIRST_CHECK) {
            self.next_check = self.n_events * 2;
            self.check(ledger);
        }
    }

    /// The devices that changed: whether they are higher than ever.
    fn judge(&mut self, ledger: &Ledger, time: Nanos) {
        for id in std::mem::take(&mut self.touched) {
            self.cache(ledger, id);
            let books = ledger.devices().get(&id);
            let physical = books.map_or(Bytes(0), |books| books.physical.now().bytes);
            let n_dropped = books.map_or(0, |books| books.dropped.objects);
            let blocks = ledger.torch(id).map_or(Bytes(0), |torch| torch.blocks.now().bytes);
            let Some(device) = self.devices.get_mut(&id) else { continue };
            device.touched = false;
            if n_dropped != device.n_dropped {
                (device.n_dropped, device.has_dropped) = (n_dropped, true);
            }
            device.is_sure &= books.is_none_or(|books| books.pjrt.is_none());
            device.total.set(&self.clock, physical.0);
            let height = (physical, blocks);
            if physical.0 > 0 && height > device.best[PEAK].height {
                device.best[PEAK].is_now(height, time);
            }
            if height > device.best[SINCE_START].height {
                device.best[SINCE_START].is_now(height, time);
            }
            // Until the span begins, the newest moment is the one that reaches into it.
            if height > device.best[SINCE_CALL].height || time <= device.between.since {
                device.best[SINCE_CALL].is_now(height, time);
            }
        }
    }

    /// A collective was called for a device, or the trace ends: what was held at most until then is kept.
    pub(super) fn close(&mut self, id: i16, span: Span) {
        if let Some(device) = self.devices.get_mut(&id) {
            device.keep(id, span, &mut self.places);
        }
    }

    /// From now on, what is held at most until the next collective is looked for.
    pub(super) fn begin(&mut self, id: i16, time: Nanos) {
        self.since.insert(id, (time, true));
        let Some(device) = self.devices.get_mut(&id) else { return };
        let height = (Bytes(device.total.now), Bytes(device.in_blocks));
        device.best[SINCE_CALL].is_now(height, time);
        (device.between.since, device.between.is_whole) = (time, !device.has_dropped);
    }

    /// Calls on a communicator were taken back from this one on.
    pub(super) fn forget(&mut self, id: i16, membership: usize, from: u64) {
        if let Some(device) = self.devices.get_mut(&id) {
            device.between.forget(membership, from);
        }
        self.lose_track(id);
    }

    /// It is not known when the newest collective was called.
    pub(super) fn lose_track(&mut self, id: i16) {
        self.since.entry(id).or_default().1 = false;
        if let Some(device) = self.devices.get_mut(&id) {
            device.between.is_whole = false;
        }
    }

    fn block(&mut self, ledger: &Ledger, block: &Block, n: i64) {
        let id = block.device;
        self.first_block(ledger, id);
        let (site, stack, stream) = (block.site, block.stack, block.stream);
        let owner = OwnerId(u32::MAX);
        let holder = Holder { device: id, level: Level::Block, owner, site, stack, stream, part: 0 };
        let number = self.number(ledger, holder);
        self.change(number, n * block.bytes.0 as i64, n, block.phase);
        self.size(id, block.bytes.0, n);
        let device = self.device(id);
        device.in_blocks = device.in_blocks.saturating_add_signed(n * block.bytes.0 as i64);
    }

    fn object(&mut self, ledger: &Ledger, object: &Object, n: i64) {
        if !object.kind.is_physical() || object.device == HOST {
            return;
        }
        let (id, bytes) = (object.device, object.bytes.0);
        let device = self.device(id);
        device.has_dropped &= n < 0;
        if object.torch && device.has_blocks {
            device.segments = device.segments.saturating_add_signed(n * bytes as i64);
            return;
        }
        let (owner, site, stack) = (object.owner, object.site, object.stack);
        let holder = Holder { device: id, level: Level::Driver, owner, site, stack, stream: None, part: 0 };
        let number = self.number(ledger, holder);
        if object.torch {
            let early = &mut self.device(id).early;
            match n {
                1.. => _ = early.insert(object.serial, (number, bytes)),
                _ => _ = early.remove(&object.serial),
            }
        }
        self.change(number, n * bytes as i64, n, object.phase);
        self.size(id, bytes, n);
    }

    /// PyTorch's segments are shown by what is in them, once its first block is seen.
    fn first_block(&mut self, ledger: &Ledger, id: i16) {
        let has_blocks = ledger.torch(id).is_some_and(|torch| torch.blocks.peak().0 > 0);
        let device = self.device(id);
        if device.has_blocks || !has_blocks {
            return;
        }
        device.has_blocks = true;
        let mut early: Vec<(u64, (u32, u64))> = std::mem::take(&mut device.early).into_iter().collect();
        early.sort_unstable();
        for (_, (number, bytes)) in early {
            self.change(number, -(bytes as i64), -1, PhaseId::default());
            self.size(id, bytes, -1);
            self.device(id).segments += bytes;
        }
    }

    /// What of PyTorch's segments nobody uses.
    fn cache(&mut self, ledger: &Ledger, id: i16) {
        let device = self.device(id);
        let cached = device.segments.saturating_sub(device.in_blocks);
        if cached == 0 && device.cached.is_none() {
            return;
        }
        let (owner, site) = (OwnerId(u32::MAX), SiteId(u32::MAX));
        let (level, stack) = (Level::Cached, StackId(0));
        let number = match device.cached {
            Some(number) => number,
            None => {
                let holder = Holder { device: id, level, owner, site, stack, stream: None, part: 0 };
                self.number(ledger, holder)
            }
        };
        self.device(id).cached = Some(number);
        let before = self.holders[number as usize].bytes.now;
        if before != cached {
            let objects = i64::from(cached > 0) - i64::from(before > 0);
            self.amounts(number, cached as i64 - before as i64, objects);
        }
    }

    fn device(&mut self, id: i16) -> &mut Device {
        let since = &self.since;
        let device = self.devices.entry(id).or_insert_with(|| {
            let (since, is_whole) = since.get(&id).copied().unwrap_or_default();
            let mut device = Device { is_sure: true, ..Device::default() };
            (device.between.since, device.between.is_whole) = (since, is_whole);
            device.best[SINCE_CALL].time = since;
            device
        });
        if !std::mem::replace(&mut device.touched, true) {
            self.touched.push(id);
        }
        device
    }

    fn number(&mut self, ledger: &Ledger, holder: Holder) -> u32 {
        if let Some(number) = self.numbers.get(&holder) {
            return *number;
        }
        let Holder { device, level, owner, site, .. } = holder;
        let place = *self.place_numbers.entry((device, level, owner, site)).or_insert_with(|| {
            let moments = [Remembered::default(); 2];
            let amount = Amount::default();
            self.places.push(Place {
                device,
                level,
                owner,
                site,
                amount,
                moments,
                kept: 0,
                is_changed: false,
            });
            self.places.len() as u32 - 1
        });
        let (bytes, objects) = (Remembered::default(), Remembered::default());
        let name = live::owner(ledger, &holder);
        let owners = &mut self.device(device).owners;
        let owner = owners.iter().position(|(known, _)| known == name).unwrap_or(owners.len());
        if owner == owners.len() {
            owners.push((name.to_owned(), Amount::default()));
        }
        self.holders.push(Followed { holder, place, owner: owner as u32, bytes, objects });
        let number = self.holders.len() as u32 - 1;
        self.numbers.insert(holder, number);
        number
    }

    fn change(&mut self, number: u32, bytes: i64, objects: i64, phase: PhaseId) {
        self.amounts(number, bytes, objects);
        let Holder { device: id, .. } = self.holders[number as usize].holder;
        if phase != PhaseId::default()
            && let Some(device) = self.devices.get_mut(&id)
        {
            device.phases.entry(phase).or_default().add(&self.clock, bytes);
        }
    }

    fn amounts(&mut self, number: u32, bytes: i64, objects: i64) {
        let followed = &mut self.holders[number as usize];
        let Some(device) = self.devices.get_mut(&followed.holder.device) else { return };
        followed.bytes.change(device.best[PEAK].moment, bytes);
        followed.objects.change(device.best[PEAK].moment, objects);
        let place = &mut self.places[followed.place as usize];
        for (remembered, which) in place.moments.iter_mut().zip([SINCE_START, SINCE_CALL]) {
            remembered.change(device.best[which].moment, bytes);
        }
        place.amount.add(&self.clock, bytes);
        if let Some((_, owner)) = device.owners.get_mut(followed.owner as usize) {
            owner.add(&self.clock, bytes);
        }
        if !std::mem::replace(&mut place.is_changed, true) {
            device.changed.push(followed.place);
        }
    }

    fn size(&mut self, id: i16, bytes: u64, n: i64) {
        let moment = self.devices.get(&id).map_or(0, |device| device.best[PEAK].moment);
        self.sizes.entry((id, bytes)).or_default().change(moment, n);
    }

    fn halve(&mut self) {
        self.places.iter_mut().for_each(|place| place.amount.halve());
        for device in self.devices.values_mut() {
            device.total.halve();
            device.owners.iter_mut().for_each(|(_, amount)| amount.halve());
            device.phases.values_mut().for_each(Amount::halve);
        }
    }

    /// Compares what was followed with what the books show.
    pub(super) fn check(&mut self, ledger: &Ledger) {
        let ids: Vec<i16> = self.devices.keys().copied().collect();
        for id in ids {
            let shown = live::picture(ledger, id, ledger.run.last);
            let books = ledger.devices().get(&id).map_or(0, |books| books.physical.now().bytes.0);
            // What went away with its context is shown, and no longer in the books.
            if shown.total().0 != books {
                continue;
            }
            let mut expected: BTreeMap<Holder, (u64, u64)> = BTreeMap::new();
            for (holder, (bytes, objects)) in &shown.held {
                let is_driver = holder.level == Level::Driver;
                let owner = if is_driver { holder.owner } else { OwnerId(u32::MAX) };
                expected.insert(Holder { owner, ..*holder }, (bytes.0, *objects));
            }
            let followed = self.holders.iter().filter(|it| it.holder.device == id && it.objects.now > 0);
            let followed: BTreeMap<Holder, (u64, u64)> =
                followed.map(|it| (it.holder, (it.bytes.now, it.objects.now))).collect();
            if let Some(device) = self.devices.get_mut(&id) {
                device.is_sure &= followed == expected;
            }
        }
    }

    /// What each device held at its peak; of devices where that was followed without doubt.
    pub(super) fn peaks(&self) -> Vec<Picture> {
        let mut pictures = vec![];
        for (id, device) in self.devices.iter().filter(|(_, device)| device.is_sure) {
            let moment = device.best[PEAK].moment;
            let held = self.holders.iter().filter(|it| it.holder.device == *id);
            let held = held.map(|it| (it.holder, (Bytes(it.bytes.at(moment)), it.objects.at(moment))));
            let held: BTreeMap<_, _> = held.filter(|(_, (_, objects))| *objects > 0).collect();
            let sizes = self.sizes.iter().filter(|((device, _), _)| device == id);
            let sizes = sizes.map(|((_, bytes), n)| (Bytes(*bytes), n.at(moment)));
            let sizes = sizes.filter(|(_, n)| *n > 0).collect();
            if !held.is_empty() {
                pictures.push(Picture { device: *id, time: device.best[PEAK].time, held, sizes });
            }
        }
        pictures
    }
}
