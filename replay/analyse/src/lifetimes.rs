//! What lifetimes show: which roles memory had, what set the peak, what was held longer than needed, and what waited for
//! Python's collector of reference cycles.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use gputrace_schemas::event::{Bytes, Nanos};
use rustc_hash::FxHashMap;

use crate::categories::Categories;
use crate::cycles::Cycles;
use crate::held::{HeldAt, Known, Sign, is_held_at, signs_of};
use crate::idle::{self, Idle};
use crate::lives::{Life, Lives, NEVER};
use crate::roles::{Role, Roles, roles};
use crate::sets::{self, Sets};
use gputrace_sim::cores::{Task, at_once, both};
use gputrace_trace::Definitions;
use gputrace_trace::ledger::{Ledger, SiteId};

/// Call sites of the peak whose removal is tried.
const MOST_TRIED: usize = 16;
/// Blocks of a call site that took the place of one another, before it is called a habit.
const LEAST_REPLACED: usize = 4;
/// Share of them that did.
const MOSTLY: f64 = 0.8;
/// Births and deaths between the birth of a successor and the death of its predecessor, at most.
const AT_ONCE: u32 = 2;

/// What the lifetimes of one process show.
#[derive(Clone, Debug, Default)]
pub struct Lifetimes {
    /// By device, ascending.
    pub devices: Vec<DeviceLifetimes>,
    /// What waited for Python's collector.
    pub cycles: Cycles,
    /// Blocks without a stack were taken for those of the backward pass.
    pub is_guessed: bool,
    /// Memory held when a request last failed, by device.
    pub at_failure: Vec<HeldAt>,
    /// Memory held at the peak of each device.
    pub at_peak: Vec<HeldAt>,
    /// Memory held at the end, of each device.
    pub at_end: Vec<HeldAt>,
    /// Memory held at the peak of a device although the work that it was made for was over.
    pub idle: Vec<Idle>,
    /// Sets of weights that are held for nothing, by device.
    pub sets: Vec<Sets>,
    /// Some of the model is computed again in the backward pass.
    pub has_checkpointing: bool,
    /// Streams and what was requested on each, by device and stream.
    pub streams: Vec<StreamUse>,
    /// All of the blocks that were held when the history began.
    pub from_before: Bytes,
    /// Some block has a stack: without any, there are no roles.
    pub has_stacks: bool,
    /// The role of each block, in the order of their births: index of [`Lifetimes::role_names`].
    pub roles_of_blocks: Vec<u16>,
    /// Names of roles and their rules.
    pub role_names: Vec<(String, String)>,
}

/// Requests on one stream.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StreamUse {
    /// On which device.
    pub device: i16,
    /// Which.
    pub stream: u64,
    /// Blocks.
    pub blocks: u64,
    /// The most that was held together of these: as much at least was reserved for the stream.
    pub peak: Bytes,
    /// Held at the end.
    pub at_end: Bytes,
    /// When it was first asked.
    pub since: Nanos,
    /// When it was last asked.
    pub until: Nanos,
    /// Blocks that were requested on the device's other streams after that.
    pub after: u64,
    /// The line that requested most.
    pub site: SiteId,
}

/// One device's.
#[derive(Clone, Debug)]
pub struct DeviceLifetimes {
    /// Ordinal.
    pub device: i16,
    /// The most that PyTorch's blocks held together.
    pub peak: Bytes,
    /// When.
    pub peak_time: Nanos,
    /// After how many births and deaths.
    pub peak_moment: u32,
    /// Backward passes that were seen.
    pub n_passes: usize,
    /// By bytes at the peak.
    pub roles: Vec<RoleBytes>,
    /// The call sites that the peak would be lower without, most first.
    pub makers: Vec<Maker>,
    /// Memory held until the next of its kind took its place, most at the peak first.
    pub replaced: Vec<Replaced>,
}

/// Memory held in a stretch of time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stretch {
    /// From its first change.
    pub since: Nanos,
    /// To its last.
    pub until: Nanos,
    /// At its end.
    pub last: Bytes,
    /// At least.
    pub least: Bytes,
    /// At most.
    pub most: Bytes,
}

/// Stretches of time that a role's memory is told in.
const MOST_STRETCHES: usize = 256;

/// The memory of a role.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RoleBytes {
    /// Its name: a user's category, or a [`Role`].
    pub name: String,
    /// How its blocks are recognised.
    pub rule: String,
    /// Held at the peak of the device.
    pub at_peak: Bytes,
    /// The most it held.
    pub peak: Bytes,
    /// The most that the program requested at one time.
    pub peak_requested: Bytes,
    /// Held at the end.
    pub at_end: Bytes,
    /// Blocks.
    pub blocks: u64,
    /// Over time: at most 256 of equally many births and deaths of the device's blocks, the same for all roles.
    pub over_time: Vec<Stretch>,
}

/// A call site of the peak.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Maker {
    /// Which.
    pub site: SiteId,
    /// Held at the peak.
    pub at_peak: Bytes,
    /// Of that, what was freed before the next backward pass, or in the one that asked; or within a request.
    pub temporary: Bytes,
    /// The peak if the call site requested nothing.
    pub without: Bytes,
    /// Median time that its blocks at the peak were held.
    pub held_for: Nanos,
}

/// A call site whose blocks are held until the next one is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Replaced {
    /// Which.
    pub site: SiteId,
    /// Blocks that were replaced in this way.
    pub times: u64,
    /// The largest predecessor.
    pub bytes: Bytes,
    /// The peak if each had been freed just before its successor was requested.
    pub without: Bytes,
}

impl Lifetimes {
    /// Backward passes, of the device that saw most.
    #[must_use]
    pub fn n_passes(&self) -> usize {
        self.devices.iter().map(|device| device.n_passes).max().unwrap_or(0)
    }

    /// Of all lives.
    #[must_use]
    pub fn of(
        mut lives: Lives,
        definitions: &dyn Definitions,
        ledger: &Ledger,
        categories: &Categories,
    ) -> Lifetimes {
        lives.finish();
        let (lives, sites) = (&lives, &ledger.sites);
        let ((streams, cycles, signs), roles) = both(
            || (streams(lives), Cycles::of(lives, definitions), signs_of(lives, definitions)),
            || roles(lives, definitions, sites, categories),
        );
        let known = Known { lives, roles: &roles, signs: &signs, ledger, definitions };
        let found = Found::of(known);
        Lifetimes {
            at_failure: found.at_failure,
            at_peak: found.at_peak,
            idle: found.idle.into_iter().flatten().collect(),
            sets: found.sets,
            has_checkpointing: signs.iter().any(|signs| signs.has(Sign::Checkpointed)),
            at_end: found.at_end,
            streams,
            devices: found.devices,
            cycles,
            is_guessed: roles.is_guessed,
            from_before: Bytes(
                lives.list.iter().filter(|life| life.is_from_before).map(|life| life.bytes.0).sum(),
            ),
            has_stacks: lives.list.iter().any(|life| definitions.stack(life.stack).is_some()),
            roles_of_blocks: roles.of_lives,
            role_names: roles.names,
        }
    }
}

/// What was held by each device, over time and at the moments that matter.
#[derive(Default)]
struct Found {
    devices: Vec<DeviceLifetimes>,
    at_failure: Vec<HeldAt>,
    at_peak: Vec<HeldAt>,
    at_end: Vec<HeldAt>,
    idle: Vec<Option<Idle>>,
    sets: Vec<Sets>,
}

impl Found {
    fn of(known: Known<'_>) -> Found {
        let sweeps: Vec<(Sweep, Top)> = known
            .lives
            .devices()
            .into_iter()
            .map(|device| Sweep { lives: known.lives, roles: known.roles, device })
            .map(|sweep| (sweep, sweep.top()))
            .collect();
        let failures: Vec<(i16, Nanos)> = failures(known.ledger).into_iter().collect();
        let mut found = Found {
            devices: sweeps.iter().map(|(sweep, top)| sweep.device(*top)).collect(),
            at_failure: vec![HeldAt::default(); failures.len()],
            at_peak: vec![HeldAt::default(); sweeps.len()],
            at_end: vec![HeldAt::default(); sweeps.len()],
            idle: vec![None; sweeps.len()],
            sets: vec![Sets::default(); sweeps.len()],
        };
        // Those that take longest first.
        let mut tasks: Vec<Task<'_>> = vec![];
        for (sets, (sweep, top)) in found.sets.iter_mut().zip(&sweeps) {
            let failed = failures.iter().find(|(device, _)| *device == sweep.device);
            let moment = failed.map_or(top.moment, |(device, time)| sets::moment_at(known, *device, *time));
            let time = failed.map(|(_, time)| *time);
            tasks.push(Box::new(move || *sets = Sets::of(known, sweep.device, moment, time)));
        }
        for (found, at) in found.at_failure.iter_mut().zip(failures) {
            tasks.push(Box::new(move || {
                let is_held = |life: &Life| is_held_at(life, at.1);
                *found = HeldAt::of(known, at, is_held).taken_apart(known, is_held);
            }));
        }
        for ((found, idle), (sweep, top)) in found.at_peak.iter_mut().zip(&mut found.idle).zip(&sweeps) {
            tasks.push(Box::new(move || {
                let is_held = |life: &Life| life.is_held_at(top.moment);
                let at = (sweep.device, sweep.time(*top));
                *found = HeldAt::of(known, at, is_held).taken_apart(known, is_held);
                *idle = idle::of(known.lives, known.definitions, sweep.device, found.bytes, is_held);
            }));
        }
        for (device, (sweep, top)) in found.devices.iter_mut().zip(&sweeps) {
            let DeviceLifetimes { roles, makers, replaced, .. } = device;
            tasks.push(Box::new(|| *replaced = sweep.replaced(*top)));
            tasks.push(Box::new(|| *makers = sweep.makers(*top)));
            tasks.push(Box::new(|| *roles = sweep.role_bytes(*top)));
        }
        for (found, (sweep, _)) in found.at_end.iter_mut().zip(&sweeps) {
            let at = (sweep.device, known.ledger.run.last);
            tasks.push(Box::new(move || *found = HeldAt::of(known, at, |life| life.died == NEVER)));
        }
        at_once(tasks);
        found
    }
}

/// When a request last failed for good, by device.
fn failures(ledger: &Ledger) -> BTreeMap<i16, Nanos> {
    let mut last: BTreeMap<i16, Nanos> = BTreeMap::new();
    let torch = ledger.devices().iter().filter_map(|(device, books)| {
        let error = books.torch.as_ref()?.ooms.last()?;
        Some((*device, error.time))
    });
    let refused = ledger.refusals.iter().filter(|refusal| refusal.is_final);
    for (device, time) in torch.chain(refused.map(|refusal| (refusal.device, refusal.time))) {
        let known = last.entry(device).or_default();
        *known = time.max(*known);
    }
    last
}

fn streams(lives: &Lives) -> Vec<StreamUse> {
    #[derive(Default)]
    struct Use {
        blocks: u64,
        now: u64,
        peak: u64,
        since: Nanos,
        until: Nanos,
        last: u64,
        sites: FxHashMap<SiteId, u64>,
    }
    let mut n_asked: FxHashMap<i16, u64> = FxHashMap::default();
    let mut all: BTreeMap<(i16, u64), Use> = BTreeMap::new();
    for (moment, idx) in (0..).zip(lives.moments()) {
        let Some(life) = lives.list.get(*idx as usize) else { continue };
        let Some(stream) = lives.stream(life) else { continue };
        let of = all.entry((life.device, stream)).or_default();
        let is_born = life.born == moment;
        of.now = change(of.now, life.bytes, is_born);
        of.peak = of.peak.max(of.now);
        if is_born {
            of.since = if of.blocks == 0 { life.since } else { of.since };
            (of.blocks, of.until) = (of.blocks + 1, life.since);
            let n_asked = n_asked.entry(life.device).or_default();
            *n_asked += 1;
            of.last = *n_asked;
            *of.sites.entry(life.site).or_default() += life.bytes.0;
        }
    }
    let used = |((device, stream), of): ((i16, u64), Use)| {
        let (site, _) = of.sites.into_iter().max_by_key(|(site, bytes)| (*bytes, Reverse(*site)))?;
        let (peak, at_end) = (Bytes(of.peak), Bytes(of.now));
        Some(StreamUse {
            device,
            stream,
            blocks: of.blocks,
            peak,
            at_end,
            since: of.since,
            until: of.until,
            after: n_asked.get(&device).map_or(0, |n| n - of.last),
            site,
        })
    };
    all.into_iter().filter_map(used).collect()
}

#[derive(Clone, Copy)]
struct Sweep<'a> {
    lives: &'a Lives,
    roles: &'a Roles,
    device: i16,
}

/// After how many births and deaths most was held, and how much.
#[derive(Clone, Copy, Default)]
struct Top {
    bytes: u64,
    moment: u32,
}

impl<'a> Sweep<'a> {
    fn time(&self, top: Top) -> Nanos {
        let life =
            self.lives.moments().get(top.moment as usize).and_then(|idx| self.lives.list.get(*idx as usize));
        life.map_or(Nanos(0), |life| life.since)
    }

    /// What is quickly found.
    fn device(&self, top: Top) -> DeviceLifetimes {
        DeviceLifetimes {
            device: self.device,
            peak: Bytes(top.bytes),
            peak_time: self.time(top),
            peak_moment: top.moment,
            n_passes: self.roles.n_passes.get(&self.device).copied().unwrap_or(0),
            roles: vec![],
            makers: vec![],
            replaced: vec![],
        }
    }

    /// The lives of the device, each at its birth and its death: moment, index, life, whether it is born.
    fn steps(&self) -> impl Iterator<Item = (u32, usize, &'a Life, bool)> + 'a {
        let (lives, device) = (self.lives, self.device);
        (0u32..).zip(lives.moments()).filter_map(move |(moment, idx)| {
            let life = lives.list.get(*idx as usize).filter(|life| life.device == device)?;
            Some((moment, *idx as usize, life, life.born == moment))
        })
    }

    fn own(&self) -> impl Iterator<Item = (usize, &'a Life)> + 'a {
        let device = self.device;
        self.lives.list.iter().enumerate().filter(move |(_, life)| life.device == device)
    }

    fn top(&self) -> Top {
        let (mut held, mut top) = (0u64, Top::default());
        for (moment, _, life, is_born) in self.steps() {
            held = change(held, life.bytes, is_born);
            if held > top.bytes {
                top = Top { bytes: held, moment };
            }
        }
        top
    }

    fn role_bytes(&self, top: Top) -> Vec<RoleBytes> {
        let names = &self.roles.names;
        let mut rows: Vec<RoleBytes> = names
            .iter()
            .map(|(name, rule)| RoleBytes {
                name: name.clone(),
                rule: rule.clone(),
                at_peak: Bytes(0),
                peak: Bytes(0),
                peak_requested: Bytes(0),
                at_end: Bytes(0),
                blocks: 0,
                over_time: vec![],
            })
            .collect();
        let mut held = vec![(0u64, 0u64); names.len()];
        let length = self.steps().count().div_ceil(MOST_STRETCHES).max(1);
        let mut now = Nanos(0);
        let end = |rows: &mut [RoleBytes], now: Nanos| {
            rows.iter_mut().filter_map(|row| row.over_time.last_mut()).for_each(|it| it.until = now);
        };
        for (n, (_, idx, life, is_born)) in self.steps().enumerate() {
            let role = usize::from(self.roles.of_lives[idx]);
            if n % length == 0 {
                end(&mut rows, now);
            }
            now = if is_born { life.since } else { life.until };
            if n % length == 0 {
                for (row, (held, _)) in rows.iter_mut().zip(&held) {
                    let held = Bytes(*held);
                    row.over_time.push(Stretch {
                        since: now,
                        until: now,
                        last: held,
                        least: held,
                        most: held,
                    });
                }
            }
            let (bytes, requested) = &mut held[role];
            *bytes = change(*bytes, life.bytes, is_born);
            *requested = change(*requested, life.requested, is_born);
            if let Some(stretch) = rows[role].over_time.last_mut() {
                stretch.last = Bytes(*bytes);
                (stretch.least, stretch.most) =
                    (stretch.least.min(stretch.last), stretch.most.max(stretch.last));
            }
            rows[role].peak.0 = rows[role].peak.0.max(*bytes);
            rows[role].peak_requested.0 = rows[role].peak_requested.0.max(*requested);
        }
        end(&mut rows, now);
        for (idx, life) in self.own() {
            let row = &mut rows[usize::from(self.roles.of_lives[idx])];
            row.blocks += 1;
            if life.is_held_at(top.moment) {
                row.at_peak.0 += life.bytes.0;
            }
            if life.died == NEVER {
                row.at_end.0 += life.bytes.0;
            }
        }
        rows.retain(|row| row.blocks > 0);
        rows.sort_by_key(|row| Reverse((row.at_peak, row.peak)));
        rows
    }

    /// What the peak would be without each of the call sites that hold most of it: exact, for the same requests.
    fn makers(&self, top: Top) -> Vec<Maker> {
        let temporary = [Role::Temporaries, Role::Serving].map(|role| self.number_of(role));
        let mut sites: FxHashMap<SiteId, (u64, u64, Vec<u64>)> = FxHashMap::default();
        for (idx, life) in self.own().filter(|(_, life)| life.is_held_at(top.moment)) {
            let (bytes, short, times) = sites.entry(life.site).or_default();
            *bytes += life.bytes.0;
            *short += if temporary.contains(&self.roles.of_lives[idx]) { life.bytes.0 } else { 0 };
            times.push(life.duration().0);
        }
        let mut sites: Vec<_> = sites.into_iter().collect();
        sites.sort_by_key(|(site, (bytes, ..))| (Reverse(*bytes), *site));
        sites.truncate(MOST_TRIED);
        let number: FxHashMap<SiteId, usize> =
            sites.iter().zip(0..).map(|((site, _), n)| (*site, n)).collect();
        let mut own = [0u64; MOST_TRIED];
        let mut without = [0u64; MOST_TRIED];
        let mut held = 0u64;
        for (_, _, life, is_born) in self.steps() {
            held = change(held, life.bytes, is_born);
            if let Some(number) = number.get(&life.site) {
                own[*number] = change(own[*number], life.bytes, is_born);
            }
            if is_born {
                for (without, own) in without.iter_mut().zip(&own) {
                    *without = (*without).max(held.saturating_sub(*own));
                }
            }
        }
        let mut makers: Vec<Maker> = sites
            .into_iter()
            .zip(without)
            .map(|((site, (bytes, short, mut times)), without)| Maker {
                site,
                at_peak: Bytes(bytes),
                temporary: Bytes(short),
                without: Bytes(without),
                held_for: Nanos(median(&mut times)),
            })
            .collect();
        makers.sort_by_key(|maker| (maker.without, Reverse(maker.at_peak), maker.site));
        makers
    }

    fn number_of(&self, role: Role) -> u16 {
        let first = self.roles.names.len() - Role::ALL.len();
        (first + role as usize) as u16
    }

    /// `x = f(x)`: the old value is held until the new one is there. Of each call site that mostly does so, what the peak
    /// would be if the old ones went first.
    fn replaced(&self, top: Top) -> Vec<Replaced> {
        let mut by_site: FxHashMap<SiteId, Vec<u32>> = FxHashMap::default();
        for (idx, life) in self.own() {
            by_site.entry(life.site).or_default().push(idx as u32);
        }
        let life = |idx: u32| &self.lives.list[idx as usize];
        let is_pair = |pair: &&[u32]| {
            let (old, new) = (life(pair[0]), life(pair[1]));
            old.died > new.born && old.died != NEVER && old.died - new.born <= AT_ONCE
        };
        let mut found = vec![];
        for (site, lives) in by_site {
            let pairs = || lives.windows(2).filter(is_pair);
            let n = pairs().count();
            let is_habit = n >= LEAST_REPLACED && n as f64 >= MOSTLY * (lives.len() - 1) as f64;
            let Some(bytes) = pairs().map(|pair| life(pair[0]).bytes).max().filter(|_| is_habit) else {
                continue;
            };
            found.push((site, n as u64, bytes, lives));
        }
        found.sort_by_key(|(site, _, bytes, _)| (Reverse(*bytes), *site));
        found.truncate(MOST_TRIED);
        let mut rows: Vec<Replaced> = found
            .into_iter()
            .map(|(site, times, bytes, lives)| {
                let pairs = lives.windows(2).filter(is_pair).map(|pair| (life(pair[0]), life(pair[1])));
                let without = Bytes(self.if_earlier(&pairs.collect::<Vec<_>>()));
                Replaced { site, times, bytes, without }
            })
            .filter(|row| row.without.0 < top.bytes)
            .collect();
        rows.sort_by_key(|row| (row.without, row.site));
        rows
    }

    /// The peak if each first of a pair had died just before the second was born.
    fn if_earlier(&self, pairs: &[(&Life, &Life)]) -> u64 {
        let early: FxHashMap<u32, u64> = pairs.iter().map(|(old, new)| (new.born, old.bytes.0)).collect();
        let late: FxHashMap<u32, u64> = pairs.iter().map(|(old, _)| (old.died, old.bytes.0)).collect();
        let (mut held, mut top) = (0u64, 0u64);
        for (moment, _, life, is_born) in self.steps() {
            held = held.saturating_sub(early.get(&moment).copied().unwrap_or(0));
            held = change(held, life.bytes, is_born) + late.get(&moment).copied().unwrap_or(0);
            top = top.max(held);
        }
        top
    }
}

fn change(held: u64, bytes: Bytes, is_born: bool) -> u64 {
    if is_born { held.saturating_add(bytes.0) } else { held.saturating_sub(bytes.0) }
}

fn median(values: &mut [u64]) -> u64 {
    let middle = values.len() / 2;
    if values.is_empty() { 0 } else { *values.select_nth_unstable(middle).1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::story::Story;
    use gputrace_trace::scene::recording;
    use gputrace_trace::source::Source;

    fn story(scene: &str) -> Story {
        Story::with_lifetimes(&Source::of("train.gtr", recording(scene)), &Categories::default())
    }

    fn site(story: &Story, id: SiteId) -> String {
        story.ledger.sites.site(id).map(|site| site.function.clone()).unwrap_or_default()
    }

    #[test]
    fn the_peak_without_a_call_site_is_that_of_the_other_requests() {
        //  40 |      | b    |       | d
        //  30 | a    |      | c     |
        //  20 |      | a    |       | c
        let story = story(
            "block addr=a bytes=20M by=f@/job/a.py:1
             block addr=b bytes=40M by=g@/job/a.py:2
             free addr=a bytes=20M
             free addr=b bytes=40M
             block addr=c bytes=30M by=f@/job/a.py:1
             block addr=d bytes=25M by=h@/job/a.py:3",
        );
        let device = &story.lifetimes.as_ref().unwrap().devices[0];
        assert_eq!(device.peak, Bytes(60 << 20));
        let without: Vec<_> = device
            .makers
            .iter()
            .map(|it| (site(&story, it.site), it.at_peak.0 >> 20, it.without.0 >> 20))
            .collect();
        // Without f, b alone is the peak; without g, c and d are.
        assert_eq!(without, [("f".into(), 20, 40), ("g".into(), 40, 55)]);
    }

    #[test]
    fn a_value_that_waits_for_its_successor_is_told() {
        let step = |old: &str, new: &str| {
            format!("block addr={new} bytes=10M by=f@/job/a.py:1\nfree addr={old} bytes=10M\n")
        };
        let mut scene = "block addr=p bytes=10M by=f@/job/a.py:1\n".to_owned();
        for _ in 0..4 {
            scene += &step("p", "q");
            scene += &step("q", "p");
        }
        let found = story(&scene);
        let device = &found.lifetimes.as_ref().unwrap().devices[0];
        let shown: Vec<_> =
            device.replaced.iter().map(|it| (site(&found, it.site), it.times, it.without.0 >> 20)).collect();
        assert_eq!((device.peak.0 >> 20, shown), (20, vec![("f".into(), 8, 10)]));
        // One that happens to be freed after another was made is not a habit.
        let found = story(&("block addr=p bytes=10M by=f@/job/a.py:1\n".to_owned() + &step("p", "q")));
        assert!(found.lifetimes.unwrap().devices[0].replaced.is_empty());
    }

    #[test]
    fn what_the_collector_gave_back_is_told_by_call_site() {
        let found = story(
            "block addr=a bytes=20M by=f@/job/a.py:1
             block addr=b bytes=10M by=g@/job/a.py:2
             block addr=c bytes=5M by=g@/job/a.py:2
             free addr=c bytes=5M
             free addr=a bytes=20M collecting=1 by=THPVariable_clear@libtorch_python.so,subtype_clear@python3,gc_collect_main@python3
             free addr=b bytes=10M collecting=1",
        );
        let cycles = &found.lifetimes.as_ref().unwrap().cycles;
        assert_eq!(
            (cycles.bytes.0 >> 20, cycles.blocks, cycles.collections, cycles.peak.0 >> 20),
            (30, 2, 1, 30)
        );
        let rows: Vec<_> =
            cycles.sites.iter().map(|it| (site(&found, it.site), it.held_for, it.kind)).collect();
        assert_eq!(
            rows,
            [("f".into(), Nanos(4000), Some("instance of a Python class")), ("g".into(), Nanos(4000), None)]
        );
    }
}
