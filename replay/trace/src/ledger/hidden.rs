//! What the driver charges to the process beyond what it handed out, and what explains it.
//!
//! At every sample of the driver's own figures, and by construction:
//!
//! ```text
//!   used = handed out + page rounding + context + code + pools + peers + unaccounted
//! ```
//!
//! Handed out and rounding are known. The others are estimates: when the rest grows from one sample to the next, and the
//! process made a context or loaded code in between, that is what it grew for. `unaccounted` is what remains, with its
//! sign; where it grows, something takes memory that nobody saw.
//!
//! A sample is not taken at one instant, and neither is a call. Where memory came or went while a sample was taken, the
//! sample is compared with the total around it that lies nearest to what is expected, and it explains nothing.

use std::collections::VecDeque;

use gputrace_schemas::event::{Action, Bytes, Call, NO_DEVICE, Nanos, Sample};

use super::sites::{OwnerId, SiteId};

/// Most samples kept. When there are more, every second one goes.
const MAX_SAMPLES: usize = 4096;
/// Most steps of growth kept, largest first.
const MAX_STEPS: usize = 256;

/// A sample says what was charged at some instant of this long before its time: NVML answers within a millisecond.
const BLUR: u64 = 5_000_000;
/// Most changes around a sample that are looked at.
const MAX_CHANGES: usize = 64;

/// Why the driver takes memory that it does not hand out.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Cause {
    /// A context: page tables, stacks and heaps of kernels, the driver's own.
    Context,
    /// Code of kernels.
    Code,
    /// Executable graphs.
    Graph,
    /// What stream-ordered pools keep beyond what is in use.
    Pool,
    /// Memory of others made visible: page tables.
    Peer,
}

impl Cause {
    /// Every cause, in the order in which tables show them.
    pub const ALL: [Cause; 5] = [Cause::Context, Cause::Code, Cause::Graph, Cause::Pool, Cause::Peer];

    /// Name for people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Cause::Context => "CUDA context",
            Cause::Code => "kernel code",
            Cause::Graph => "executable graphs",
            Cause::Pool => "kept by stream-ordered pools",
            Cause::Peer => "peer and imported memory",
        }
    }

    /// What a call that succeeded may take memory for.
    fn of(action: Action) -> Option<Cause> {
        use Action::*;
        Some(match action {
            ContextCreate | ContextDestroy | PrimaryRetain | PrimaryRelease | PrimaryReset | LimitSet => {
                Cause::Context
            }
            CodeLoad | CodeUnload | FunctionLoad => Cause::Code,
            GraphInstantiate | GraphLaunch | GraphExecDestroy | GraphMemTrim => Cause::Graph,
            AllocAsync | FreeAsync | PoolTrim | PoolSet | PoolDestroy => Cause::Pool,
            PeerEnable | Import | IpcOpen | IpcClose | MulticastCreate => Cause::Peer,
            _ => return None,
        })
    }
}

/// A sample, and what explains it.
#[derive(Clone, Copy, Debug)]
pub struct Sampled {
    /// When.
    pub time: Nanos,
    /// Charged to the process.
    pub process_used: Option<Bytes>,
    /// Used by everybody.
    pub device_used: Bytes,
    /// Memory that the driver had allocated to the process.
    pub tracked: Bytes,
    /// Memory that its pages held beyond that.
    pub rounding: Bytes,
    /// By [`Cause`], estimated.
    pub hidden: [u64; Cause::ALL.len()],
}

impl Sampled {
    /// Memory that nothing explains; negative where less is charged than was allocated.
    #[must_use]
    pub fn unaccounted(&self) -> Option<i64> {
        let hidden = self.hidden.iter().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes));
        let known = self.tracked.0.saturating_add(self.rounding.0).saturating_add(hidden);
        Some((self.process_used?.0 as i64).saturating_sub(known as i64))
    }

    /// Bytes estimated for a cause.
    #[must_use]
    pub fn of(&self, cause: Cause) -> Bytes {
        Bytes(self.hidden[cause as usize])
    }
}

/// The rest grew from one sample to the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HiddenStep {
    /// Time of the sample before.
    pub from: Nanos,
    /// Time of the sample that showed it.
    pub to: Nanos,
    /// By how much.
    pub bytes: Bytes,
    /// What for; `None` where nothing was seen to happen.
    pub cause: Option<Cause>,
    /// The owner that did that.
    pub owner: Option<OwnerId>,
    /// The first place where that was done.
    pub site: Option<SiteId>,
    /// How often it was done in between.
    pub times: u64,
    /// Bytes of the images that were loaded, where they are known.
    pub image_bytes: Bytes,
}

/// What was done since the last sample.
#[derive(Clone, Copy, Debug)]
struct Doing {
    cause: Cause,
    owner: OwnerId,
    site: SiteId,
    times: u64,
    image_bytes: u64,
}

impl Doing {
    fn join(self, list: &mut Vec<Doing>) {
        match list.iter_mut().find(|other| (other.cause, other.owner) == (self.cause, self.owner)) {
            Some(other) => {
                other.times += self.times;
                other.image_bytes = other.image_bytes.saturating_add(self.image_bytes);
            }
            None => list.push(self),
        }
    }
}

/// A sample that waits for the calls that were going on when it was taken.
#[derive(Clone, Debug)]
struct Pending {
    sampled: Sampled,
    /// What may have been handed out at that instant, pages and all; the first is what the books say.
    totals: Vec<u64>,
    /// What was done since the sample before.
    doing: Vec<Doing>,
}

/// When a call began and ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) began: Nanos,
    pub(super) ended: Nanos,
}

impl Span {
    /// Events are stamped at the end of calls that give memory out, and at the beginning of those that take it back.
    pub(super) fn of(time: Nanos, call: &Call, gives: bool) -> Span {
        let duration = call.duration.0;
        if gives {
            Span { began: Nanos(time.0.saturating_sub(duration)), ended: time }
        } else {
            Span { began: time, ended: Nanos(time.0.saturating_add(duration)) }
        }
    }
}

/// The driver's own figures for one device against what was tracked.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    /// How many.
    pub count: u64,
    /// The first in which the process was charged anything.
    pub first: Option<Sampled>,
    /// The one with the most bytes used.
    pub largest: Option<Sampled>,
    /// The last.
    pub last: Option<Sampled>,
    /// Those that are kept, oldest first: evenly thinned out where there were too many.
    pub kept: Vec<Sampled>,
    /// Growth of what was not allocated, largest first.
    pub steps: Vec<HiddenStep>,
    /// One in this many is kept.
    thinned: u64,
    doing: Vec<Doing>,
    /// Totals before the newest changes, and until when a sample may still mean them.
    recent: VecDeque<(Nanos, u64)>,
    /// The newest sample, while it is not known what else was going on.
    pending: Option<Pending>,
    estimates: [u64; Cause::ALL.len()],
    /// Charged beyond what was handed out and its rounding, in the last sample.
    rest: i64,
}

impl Samples {
    /// About how much the CUDA contexts take.
    #[must_use]
    pub fn context(&self) -> Option<Bytes> {
        self.first?.process_used?;
        Some(self.largest?.of(Cause::Context))
    }

    /// Memory that nothing explains of the most that the driver charged to the process.
    #[must_use]
    pub fn unaccounted(&self) -> Option<i64> {
        self.largest?.unaccounted()
    }

    /// The newest sample, judged by what is known by now.
    #[must_use]
    pub fn newest(&self) -> Option<Sampled> {
        if self.pending.is_none() {
            return self.last;
        }
        let mut judged = Samples { kept: vec![], steps: vec![], ..self.clone() };
        judged.settle();
        judged.last
    }

    /// A call that may have taken memory.
    pub(super) fn call(&mut self, span: Span, call: &Call, owner: OwnerId, site: SiteId) {
        let Some(cause) = Cause::of(call.action) else { return };
        let image_bytes = if cause == Cause::Code { call.bytes.0 } else { 0 };
        let doing = Doing { cause, owner, site, times: 1, image_bytes };
        // One that was going on when a sample was taken may show in it already.
        if let Some(pending) = self.pending.as_mut().filter(|pending| span.began <= pending.sampled.time) {
            doing.join(&mut pending.doing);
        }
        doing.join(&mut self.doing);
    }

    /// What is handed out, pages and all, has changed from `before` to `after`.
    pub(super) fn changed(&mut self, span: Span, before: u64, after: u64) {
        if let Some(pending) = self.pending.as_mut().filter(|pending| span.began <= pending.sampled.time)
            && pending.totals.len() < MAX_CHANGES
        {
            pending.totals.push(after);
        }
        if self.recent.len() == MAX_CHANGES {
            self.recent.pop_front();
        }
        self.recent.push_back((Nanos(span.ended.0.saturating_add(BLUR)), before));
    }

    /// A sample, to be compared with the books as they are now.
    pub(super) fn sample(&mut self, time: Nanos, sample: &Sample, tracked: Bytes, rounding: Bytes) {
        self.settle();
        let sampled = Sampled {
            time,
            process_used: sample.process_used,
            device_used: sample.device_used,
            tracked,
            rounding,
            hidden: self.estimates,
        };
        self.recent.retain(|(until, _)| *until >= time);
        let around = self.recent.iter().map(|(_, total)| *total);
        let totals = std::iter::once(tracked.0.saturating_add(rounding.0)).chain(around).collect();
        self.pending = Some(Pending { sampled, totals, doing: std::mem::take(&mut self.doing) });
    }

    /// Judges the newest sample: nothing more will be known of its time.
    pub(super) fn settle(&mut self) {
        let Some(Pending { mut sampled, totals, doing }) = self.pending.take() else { return };
        let used = sampled.process_used.filter(|used| used.0 > 0);
        if let Some(used) = used {
            let rest = |total: u64| used.0 as i64 - total as i64;
            let is_quiet = totals.iter().all(|total| *total == totals[0]);
            let nearest =
                totals.iter().copied().min_by_key(|total| (rest(*total) - self.rest).unsigned_abs());
            let total = if self.first.is_none() { totals[0] } else { nearest.unwrap_or(totals[0]) };
            sampled.tracked = Bytes(total.saturating_sub(sampled.rounding.0));
            if is_quiet || self.first.is_none() {
                self.explain(sampled.time, rest(total), &doing);
            } else {
                // The next sample that explains anything is about this too.
                doing.into_iter().for_each(|doing| doing.join(&mut self.doing));
            }
        }
        sampled.hidden = self.estimates;
        self.count += 1;
        self.last = Some(sampled);
        if used.is_some() && self.first.is_none() {
            self.first = Some(sampled);
        }
        let key = |sampled: &Sampled| (sampled.process_used, sampled.device_used);
        if self.largest.is_none_or(|largest| key(&largest) < key(&sampled)) {
            self.largest = Some(sampled);
        }
        self.keep(sampled);
    }

    /// Finds out why the rest has changed.
    fn explain(&mut self, time: Nanos, rest: i64, doing: &[Doing]) {
        let change = match self.first {
            // Nobody is charged anything before there is a context.
            None => {
                self.estimates[Cause::Context as usize] = u64::try_from(rest).unwrap_or(0);
                self.rest = rest;
                return;
            }
            Some(_) => rest - self.rest,
        };
        self.rest = rest;
        let main = doing.iter().max_by_key(|doing| (weight(doing.cause), doing.times, doing.image_bytes));
        if let Some(doing) = main {
            let estimate = &mut self.estimates[doing.cause as usize];
            *estimate = u64::try_from((*estimate as i64).saturating_add(change)).unwrap_or(0);
        }
        if change > 0 {
            self.steps.push(HiddenStep {
                from: self.last.map_or(time, |last| last.time),
                to: time,
                bytes: Bytes(change as u64),
                cause: main.map(|doing| doing.cause),
                owner: main.map(|doing| doing.owner),
                site: main.map(|doing| doing.site),
                times: main.map_or(0, |doing| doing.times),
                image_bytes: Bytes(main.map_or(0, |doing| doing.image_bytes)),
            });
            self.steps.sort_by_key(|step| std::cmp::Reverse(step.bytes));
            self.steps.truncate(MAX_STEPS);
        }
    }

    fn keep(&mut self, sampled: Sampled) {
        self.thinned = self.thinned.max(1);
        if !(self.count - 1).is_multiple_of(self.thinned) {
            return;
        }
        self.kept.push(sampled);
        if self.kept.len() > MAX_SAMPLES {
            let mut n = 0;
            self.kept.retain(|_| {
                n += 1;
                n % 2 == 1
            });
            self.thinned *= 2;
        }
    }

    /// Bytes that the process's code takes, by who loaded it: the steps of growth that are kept.
    #[must_use]
    pub fn code_by_owner(&self) -> Vec<(OwnerId, Bytes)> {
        let mut owners: Vec<(OwnerId, Bytes)> = Vec::new();
        for step in self.steps.iter().filter(|step| step.cause == Some(Cause::Code)) {
            let Some(owner) = step.owner else { continue };
            match owners.iter_mut().find(|(known, _)| *known == owner) {
                Some((_, bytes)) => bytes.0 = bytes.0.saturating_add(step.bytes.0),
                None => owners.push((owner, step.bytes)),
            }
        }
        owners.sort_by_key(|(owner, bytes)| (std::cmp::Reverse(*bytes), *owner));
        owners
    }
}

/// Where several things were done at once: a context is larger than code, code than all others.
fn weight(cause: Cause) -> u8 {
    match cause {
        Cause::Context => 4,
        Cause::Code => 3,
        Cause::Pool => 2,
        Cause::Graph => 1,
        Cause::Peer => 0,
    }
}

/// The devices that a call may have taken memory of: its own, or any.
pub(super) fn concerns(call: &Call, device: i16) -> bool {
    call.device == device || call.device == NO_DEVICE
}

/// Pages of the driver that are not full.
///
/// The driver backs linear memory with pages of 2 MiB, and puts small requests into common ones (cuda.h: the
/// granularity of `cuMemGetAllocationGranularity` on all devices since Pascal; the tests with the driver's own figures).
#[derive(Clone, Debug, Default)]
pub struct Pages {
    /// Bytes in use of each page that one allocation does not fill.
    partial: rustc_hash::FxHashMap<u64, u64>,
    unused: u64,
}

const PAGE: u64 = 2 << 20;

impl Pages {
    /// Bytes that are charged but were not allocated.
    #[must_use]
    pub fn rounding(&self) -> Bytes {
        Bytes(self.unused)
    }

    pub(super) fn gain(&mut self, addr: u64, bytes: Bytes) {
        for (page, part) in edges(addr, bytes) {
            let used = self.partial.entry(page).or_insert_with(|| {
                self.unused += PAGE;
                0
            });
            *used += part;
            self.unused = self.unused.saturating_sub(part);
        }
    }

    pub(super) fn lose(&mut self, addr: u64, bytes: Bytes) {
        for (page, part) in edges(addr, bytes) {
            let Some(used) = self.partial.get_mut(&page) else { continue };
            *used = used.saturating_sub(part);
            self.unused += part;
            if *used == 0 {
                self.partial.remove(&page);
                self.unused = self.unused.saturating_sub(PAGE);
            }
        }
    }
}

/// The pages that a range fills only in part, at most two, and how much of them.
fn edges(addr: u64, bytes: Bytes) -> impl Iterator<Item = (u64, u64)> {
    let end = addr.saturating_add(bytes.0);
    let (first, last) = (addr / PAGE, end / PAGE);
    let head = (addr, end.min((first + 1).saturating_mul(PAGE)));
    let tail = (last.saturating_mul(PAGE), end);
    let head = (head.1 - head.0 < PAGE && head.1 > head.0).then_some((first, head.1 - head.0));
    let tail = (last != first && tail.1 > tail.0).then_some((last, tail.1 - tail.0));
    head.into_iter().chain(tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(used: u64) -> Sample {
        Sample { device: 0, process_used: Some(Bytes(used)), device_used: Bytes(used), total: Bytes(1 << 40) }
    }

    fn call(scene: &str) -> Call {
        match crate::scene::recording(scene).events[0].kind {
            gputrace_schemas::event::EventKind::Call(call) => call,
            _ => panic!("not a call: {scene}"),
        }
    }

    #[test]
    fn every_byte_of_a_sample_has_a_name_or_is_unaccounted() {
        let mut samples = Samples::default();
        let code = call("CodeLoad bytes=70 by=a");
        //  used      500   560   700   690   1690
        //  tracked     0     0   100   100   1000
        //  seen            code        -
        samples.sample(Nanos(1), &sample(500), Bytes(0), Bytes(0));
        let at = |ns| Span { began: Nanos(ns), ended: Nanos(ns) };
        samples.call(at(2), &code, OwnerId(3), SiteId(0));
        samples.sample(Nanos(2), &sample(560), Bytes(0), Bytes(0));
        samples.sample(Nanos(3), &sample(700), Bytes(100), Bytes(0));
        samples.sample(Nanos(4), &sample(690), Bytes(100), Bytes(0));
        samples.call(at(5), &call("ContextCreate handle=c"), OwnerId(4), SiteId(0));
        samples.sample(Nanos(5), &sample(1690), Bytes(1000), Bytes(0));
        samples.settle();
        let shown: Vec<_> = samples
            .kept
            .iter()
            .map(|s| (s.tracked.0, s.of(Cause::Context).0, s.of(Cause::Code).0, s.unaccounted().unwrap()))
            .collect();
        assert_eq!(
            shown,
            [(0, 500, 0, 0), (0, 500, 60, 0), (100, 500, 60, 40), (100, 500, 60, 30), (1000, 600, 60, 30)]
        );
        for s in &samples.kept {
            let explained = s.tracked.0 + s.rounding.0 + s.hidden.iter().sum::<u64>();
            assert_eq!(s.process_used.unwrap().0 as i64, explained as i64 + s.unaccounted().unwrap());
        }
        assert_eq!(samples.code_by_owner(), [(OwnerId(3), Bytes(60))]);
        let causes: Vec<_> = samples.steps.iter().map(|step| (step.bytes.0, step.cause)).collect();
        assert_eq!(causes, [(100, Some(Cause::Context)), (60, Some(Cause::Code)), (40, None)]);
    }

    #[test]
    fn memory_on_its_way_explains_nothing() {
        //  handed out   0 ──────┬── 1000, by a call that took from 40 ms to 60 ms
        //  used             500     1500
        let mut samples = Samples::default();
        let ms = |ms: u64| Nanos(ms * 1_000_000);
        samples.sample(ms(10), &sample(500), Bytes(0), Bytes(0));
        samples.sample(ms(50), &sample(1500), Bytes(0), Bytes(0));
        samples.changed(Span { began: ms(40), ended: ms(60) }, 0, 1000);
        samples.sample(ms(62), &sample(1500), Bytes(1000), Bytes(0));
        // And one that was asked for before memory came, and answered after it.
        samples.changed(Span { began: ms(80), ended: ms(80) }, 1000, 3000);
        samples.sample(ms(81), &sample(1500), Bytes(3000), Bytes(0));
        samples.sample(ms(99), &sample(3507), Bytes(3000), Bytes(0));
        samples.settle();
        let shown: Vec<_> = samples.kept.iter().map(|s| (s.tracked.0, s.unaccounted().unwrap())).collect();
        assert_eq!(shown, [(0, 0), (1000, 0), (1000, 0), (1000, 0), (3000, 7)]);
    }

    #[test]
    fn small_requests_share_pages() {
        let mut pages = Pages::default();
        let mut unused = |gain: bool, addr: u64, bytes: u64| {
            if gain {
                pages.gain(addr, Bytes(bytes))
            } else {
                pages.lose(addr, Bytes(bytes))
            }
            pages.rounding().0
        };
        assert_eq!(unused(true, 0, 512), PAGE - 512);
        assert_eq!(unused(true, 512, 512), PAGE - 1024);
        assert_eq!(unused(true, PAGE, PAGE), PAGE - 1024, "fills its page");
        assert_eq!(unused(true, 2 * PAGE, 2 * PAGE + 1), PAGE - 1024 + PAGE - 1);
        assert_eq!(unused(true, 8 * PAGE + 512, PAGE), PAGE - 1024 + PAGE - 1 + PAGE);
        assert_eq!(unused(false, 8 * PAGE + 512, PAGE), PAGE - 1024 + PAGE - 1);
        assert_eq!(unused(false, 2 * PAGE, 2 * PAGE + 1), PAGE - 1024);
        assert_eq!(unused(false, 0, 512), PAGE - 512);
        assert_eq!(unused(false, 512, 512), 0);
        assert_eq!(unused(false, PAGE, PAGE), 0);
    }
}
