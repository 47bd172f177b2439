//! What each process held on each device, and what all held at the same point of the program.

use std::collections::BTreeMap;

use gputrace_schemas::event::{Bytes, Nanos, StackId};
use serde::{Deserialize, Serialize};

use super::calls::{DeviceUse, Lane, Membership, Participant};
use super::jobs::{Actor, Job, Joined, Member};
use gputrace_analyse::live::{self, Level};
use gputrace_analyse::story::Story;
use gputrace_report::summary;
use gputrace_trace::ledger::{Ledger, OwnerId, Site, SiteId};
use gputrace_trace::source::Source;

/// Watches a trace for the peaks of its devices.
#[derive(Default)]
pub struct Peaks {
    devices: BTreeMap<i16, Peak>,
    contexts: BTreeMap<i16, StackId>,
}

#[derive(Clone, Copy, Default)]
struct Peak {
    bytes: Bytes,
    mark: Option<(usize, u64)>,
}

impl Peaks {
    /// Somebody uses a device.
    pub fn context(&mut self, device: i16, stack: StackId) {
        self.contexts.entry(device).or_insert(stack);
    }

    /// An event was booked.
    pub fn watch(&mut self, ledger: &Ledger, memberships: &[Membership]) {
        for (device, books) in ledger.devices() {
            let now = books.physical.now().bytes;
            let peak = self.devices.entry(*device).or_default();
            if now > peak.bytes {
                *peak = Peak { bytes: now, mark: mark(memberships) };
            }
        }
    }
}

/// How many collectives were called on the largest communicator so far.
fn mark(memberships: &[Membership]) -> Option<(usize, u64)> {
    let size = |idx: &usize| memberships[*idx].facts.n_ranks.unwrap_or(0);
    let largest = (0..memberships.len()).rev().max_by_key(size)?;
    let n_calls = memberships[largest].lane(Lane::Collective).map_or(0, super::calls::Sequence::len);
    Some((largest, n_calls as u64))
}

/// What a process did with each device that it used.
pub fn device_uses(
    story: &Story,
    peaks: &Peaks,
    place: impl Fn(StackId) -> (Site, Vec<String>),
) -> Vec<DeviceUse> {
    let mut uses: BTreeMap<i16, DeviceUse> = BTreeMap::new();
    for (ordinal, stack) in &peaks.contexts {
        let first_use = Some(place(*stack));
        uses.insert(*ordinal, DeviceUse { ordinal: *ordinal, first_use, ..DeviceUse::default() });
    }
    for (ordinal, books) in story.ledger.devices().iter().filter(|(ordinal, _)| **ordinal >= 0) {
        let used =
            uses.entry(*ordinal).or_insert_with(|| DeviceUse { ordinal: *ordinal, ..DeviceUse::default() });
        used.peak = books.physical.peak();
        used.owners_at_peak = summary::owners(story, books)
            .into_iter()
            .map(|owner| (owner.owner, Bytes(owner.bytes_at_peak)))
            .collect();
        used.context = books.samples.context();
        used.device_used = books.samples.largest.map(|sampled| sampled.device_used);
        used.mark = peaks.devices.get(ordinal).and_then(|peak| peak.mark);
    }
    uses.into_values().collect()
}

/// Memory held in one way from one place.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Deserialize, Serialize)]
pub struct Holding {
    /// Its owner.
    pub owner: String,
    /// From where.
    pub place: String,
}

/// Memory that a rank held at the chosen point.
#[derive(Clone, Debug)]
pub struct RankMemory {
    /// Rank in the job.
    pub rank: u32,
    /// When, on its own clock.
    pub time: Nanos,
    /// By owner and place.
    pub held: BTreeMap<Holding, Bytes>,
}

impl RankMemory {
    /// All of it.
    #[must_use]
    pub fn total(&self) -> Bytes {
        Bytes(self.held.values().fold(0, |sum, bytes| sum.saturating_add(bytes.0)))
    }

    /// By owner, most first.
    #[must_use]
    pub fn owners(&self) -> Vec<(String, Bytes)> {
        let mut owners: BTreeMap<&str, u64> = BTreeMap::new();
        for (holding, bytes) in &self.held {
            *owners.entry(&holding.owner).or_default() += bytes.0;
        }
        let mut owners: Vec<_> =
            owners.into_iter().map(|(owner, bytes)| (owner.to_owned(), Bytes(bytes))).collect();
        owners.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        owners
    }
}

/// A place that holds another amount on one rank than on most.
#[derive(Clone, Debug)]
pub struct Uneven {
    /// The rank.
    pub rank: u32,
    /// What and where.
    pub holding: Holding,
    /// Memory that it holds there.
    pub bytes: Bytes,
    /// Memory that the median of the ranks holds there.
    pub median: Bytes,
}

/// All ranks at the same point of the program: between two collectives, each at its most.
#[derive(Clone, Debug, Default)]
pub struct LogicalTime {
    /// The communicator that counts.
    pub communicator: String,
    /// Collectives called on it before that point.
    pub n_before: u64,
    /// By rank.
    pub ranks: Vec<RankMemory>,
    /// Ranks of which it is not known: their summaries lack that point, or their traces are gone.
    pub unknown: Vec<u32>,
}

/// A rank is out of line if it differs by more than this part of the median.
const UNEVEN_PART: u64 = 100;
/// And by more than this: NCCL and the driver hand out pages of 2 MiB.
const UNEVEN_LEAST: u64 = 4 << 20;

impl LogicalTime {
    /// The median of the ranks' totals.
    #[must_use]
    pub fn median(&self) -> Bytes {
        median(self.ranks.iter().map(|rank| rank.total()).collect())
    }

    /// Where the ranks that are out of line differ from the median, most first for each.
    #[must_use]
    pub fn uneven(&self, most: usize) -> Vec<Uneven> {
        let middle = self.median();
        let mut uneven = vec![];
        for rank in &self.ranks {
            let total = rank.total();
            let difference = total.0.abs_diff(middle.0);
            if difference <= UNEVEN_LEAST || difference <= middle.0 / UNEVEN_PART {
                continue;
            }
            let holdings = self.ranks.iter().flat_map(|rank| rank.held.keys());
            let holdings: std::collections::BTreeSet<&Holding> = holdings.collect();
            let row = |holding: &Holding| {
                let of = |rank: &RankMemory| rank.held.get(holding).copied().unwrap_or_default();
                let median = median(self.ranks.iter().map(of).collect());
                Uneven { rank: rank.rank, holding: holding.clone(), bytes: of(rank), median }
            };
            let explains =
                |row: &Uneven| if total > middle { row.bytes > row.median } else { row.bytes < row.median };
            let mut rows: Vec<Uneven> = holdings.into_iter().map(row).filter(explains).collect();
            rows.sort_by_key(|row| std::cmp::Reverse(row.bytes.0.abs_diff(row.median.0)));
            uneven.extend(rows.into_iter().take(most));
        }
        uneven
    }
}

fn median(mut amounts: Vec<Bytes>) -> Bytes {
    amounts.sort_unstable();
    amounts.get(amounts.len().saturating_sub(1) / 2).copied().unwrap_or_default()
}

/// What shows what a process held: its trace, or what was made of it.
pub trait Moments {
    /// What was held of a device at most between two collectives of one of the process's communicators, and when.
    fn most_between(&self, device: i16, between: &Between) -> Option<(Nanos, BTreeMap<Holding, Bytes>)>;
}

/// Between which two collectives.
#[derive(Clone, Copy, Debug)]
pub struct Between {
    /// Of the process's communicators.
    pub membership: usize,
    /// Collectives called on it before.
    pub n_before: u64,
    /// When the first of the two was called, and the other.
    pub times: (Nanos, Nanos),
}

impl Moments for Source {
    fn most_between(&self, device: i16, between: &Between) -> Option<(Nanos, BTreeMap<Holding, Bytes>)> {
        Some(most_between(self, device, between.times.0, between.times.1))
    }
}

/// Opens what shows it.
pub type Open<'a> = dyn Fn(&Participant) -> Option<Box<dyn Moments>> + Sync + 'a;

/// The point at which the rank that held most held most, and what the others held at most between the same two collectives.
///
/// `open` opens the trace or summary of a participant again.
pub fn at_equal_logical_time(
    participants: &[Participant],
    job: &Job,
    open: &Open<'_>,
) -> Option<LogicalTime> {
    let of = |actor: &Actor| {
        let used =
            participants[actor.participant].memory.iter().find(|used| Some(used.ordinal) == actor.device)?;
        Some((used.peak, actor.participant, used.mark))
    };
    let (_, participant, mark) = job.actors.iter().filter_map(of).max_by_key(|(peak, ..)| *peak)?;
    let in_world = |joined: &Joined| joined.all().find(|(_, member)| member.participant == participant);
    let (joined, n_before) = match mark {
        Some((membership, n_before)) => {
            let member = Member { participant, membership };
            let joined =
                job.communicators.iter().find(|joined| joined.all().any(|(_, other)| other == member))?;
            (joined, n_before)
        }
        None => (job.communicators.iter().find(|joined| in_world(joined).is_some())?, 0),
    };
    let wanted: Vec<(u32, Member, i16)> = joined
        .all()
        .filter_map(|(_, member)| {
            let actor = job.actors.get(job.actor(member)?)?;
            Some((actor.rank, member, actor.device?))
        })
        .collect();
    let look = |(rank, member, device): &(u32, Member, i16)| {
        let participant = &participants[member.participant];
        let sequence = participant.memberships[member.membership].lane(Lane::Collective);
        let enter = |n: u64| sequence?.enter(usize::try_from(n).ok()?);
        // What was held before the time that its trace has is not known.
        let begins = participant.process.since;
        let from = n_before.checked_sub(1).map_or(Some(Nanos(0)), enter).filter(|from| *from >= begins)?;
        let until = enter(n_before).unwrap_or(Nanos(u64::MAX));
        let between = Between { membership: member.membership, n_before, times: (from, until) };
        let used = participant.memory.iter().find(|used| used.ordinal == *device);
        if used.is_none_or(|used| used.peak == Bytes(0)) {
            return Some(RankMemory { rank: *rank, time: from, held: BTreeMap::new() });
        }
        let (time, held) = open(participant)?.most_between(*device, &between)?;
        Some(RankMemory { rank: *rank, time, held })
    };
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    let mut ranks: Vec<RankMemory> = vec![];
    for some in wanted.chunks(n_threads) {
        std::thread::scope(|scope| {
            let threads: Vec<_> = some.iter().map(|one| scope.spawn(|| look(one))).collect();
            ranks.extend(threads.into_iter().filter_map(|thread| thread.join().ok().flatten()));
        });
    }
    ranks.sort_by_key(|rank| rank.rank);
    let communicator = joined.label.clone();
    let is_there = |rank: u32| ranks.iter().any(|it| it.rank == rank);
    let unknown = wanted.iter().map(|(rank, ..)| *rank).filter(|rank| !is_there(*rank)).collect();
    (ranks.len() > 1).then_some(LogicalTime { communicator, n_before, ranks, unknown })
}

/// Memory of a device when it held most in a span of time.
pub fn most_between(
    source: &Source,
    device: i16,
    from: Nanos,
    until: Nanos,
) -> (Nanos, BTreeMap<Holding, Bytes>) {
    let definitions = source.definitions();
    let mut ledger = Ledger::default();
    let (mut best, mut place) = ((Bytes(0), Bytes(0)), 0);
    for (event, n) in source.events().zip(1u64..) {
        if event.time >= until {
            break;
        }
        ledger.event(definitions, &event);
        let physical = ledger.devices().get(&device).map_or(Bytes(0), |books| books.physical.now().bytes);
        let allocated = ledger.torch(device).map_or(Bytes(0), |torch| torch.blocks.now().bytes);
        // Until the span begins, the newest moment is the one that reaches into it.
        if event.time <= from || (physical, allocated) > best {
            (best, place) = ((physical, allocated), n);
        }
    }
    let (mut time, mut held) = (from, BTreeMap::new());
    live::visit(source, &BTreeMap::from([(device, place)]), |ledger, device, at| {
        time = at;
        for (holder, (bytes, _)) in live::picture(ledger, device, at).held {
            let named = holding(ledger, holder.level, holder.owner, holder.site);
            let sum: &mut Bytes = held.entry(named).or_default();
            sum.0 = sum.0.saturating_add(bytes.0);
        }
    });
    (time, held)
}

/// Memory held in one way from one place, by its names.
pub fn holding(ledger: &Ledger, level: Level, owner: OwnerId, site: SiteId) -> Holding {
    let owner = match level {
        Level::Driver => ledger.sites.owner(owner).to_owned(),
        Level::Block => "PyTorch tensors".to_owned(),
        Level::Cached => "PyTorch cache".to_owned(),
        Level::Buffer => "JAX buffers".to_owned(),
        Level::Arena => "JAX allocator".to_owned(),
    };
    let place = match level {
        Level::Cached => "reserved but unused".to_owned(),
        Level::Arena => "in no buffer: temporaries, free".to_owned(),
        Level::Driver | Level::Block | Level::Buffer => ledger.sites.site_name(site),
    };
    Holding { owner, place }
}
