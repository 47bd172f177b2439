//! Which processes belong together, which of their communicators are one, and which rank each is.
//!
//! NCCL's own records decide: processes that joined one communicator are one job, and the communicator with most ranks
//! numbers them. The environment is a hint where NCCL was not reached: `RANK` is often not set, and may be wrong.

use std::collections::BTreeMap;

use gputrace_schemas::event::{Nanos, NcclOp};

use super::calls::{Lane, Participant};
use super::names;

/// A process's communicator: index of the participant, and of its membership.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Member {
    /// Index of the participant.
    pub participant: usize,
    /// Index of its membership.
    pub membership: usize,
}

/// What is equal for all members of a communicator and different for any two communicators.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
enum Key {
    /// Made from a unique id: its hash, and how many a rank had made with it before.
    Root(u64, u32),
    /// Made from another one: that, which of its calls made it, and the color.
    Child(Box<Key>, u32, Option<i32>),
    /// Met in use: who else is in it is not known.
    Unknown(Member),
}

/// A communicator with all of its members that have a trace.
#[derive(Clone, Debug)]
pub struct Joined {
    /// For people.
    pub label: String,
    /// NCCL's own hash, as in its log.
    pub hash: Option<u64>,
    /// Ranks in it, as its members say.
    pub n_ranks: u32,
    /// The member of each rank.
    pub members: BTreeMap<u32, Member>,
    /// Members of which it is not known which rank they are.
    pub unplaced: Vec<Member>,
    /// Two processes that claim one rank: the rank and who came second.
    pub doubles: Vec<(u32, Member)>,
    /// Members that were told another number of ranks: how many, and who.
    pub other_sizes: Vec<(u32, Member)>,
    /// It was made from this one.
    pub parent: Option<usize>,
    /// When the first of its members began to make it.
    pub since: Nanos,
}

impl Joined {
    /// All members with their ranks.
    pub fn all(&self) -> impl Iterator<Item = (u32, Member)> {
        self.members.iter().map(|(rank, member)| (*rank, *member))
    }

    /// Collectives of the rank that made most on it, and of the one that made fewest.
    #[must_use]
    pub fn collectives(&self, participants: &[Participant]) -> (u64, u64) {
        let of = |(_, member): (u32, Member)| {
            let membership = &participants[member.participant].memberships[member.membership];
            membership.lane(Lane::Collective).map_or(0, |lane| lane.len() as u64)
        };
        (self.all().map(of).max().unwrap_or(0), self.all().map(of).min().unwrap_or(0))
    }

    /// Ranks without a member.
    #[must_use]
    pub fn missing(&self) -> Vec<u32> {
        // An absurd number of a damaged trace is not counted through.
        let n_ranks = self.n_ranks.min(1 << 20);
        (0..n_ranks).filter(|rank| !self.members.contains_key(rank)).collect()
    }
}

/// How it is known which rank a process is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub enum RankSource {
    /// A call into NCCL says so.
    Nccl,
    /// The environment says so.
    Environment,
    /// Counted in the order of hosts and process ids.
    Guessed,
}

/// A rank of a job: a process, or one device of a process that has several ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Actor {
    /// Rank in the job.
    pub rank: u32,
    /// The process.
    pub participant: usize,
    /// Its device ordinal, where a call into NCCL says it.
    pub device: Option<i16>,
    /// How the rank is known.
    pub source: RankSource,
}

/// Processes that work together.
#[derive(Clone, Debug, Default)]
pub struct Job {
    /// By rank.
    pub actors: Vec<Actor>,
    /// Largest first.
    pub communicators: Vec<Joined>,
    /// The communicator that numbers the ranks.
    pub world: Option<usize>,
    /// Ranks that there should be.
    pub n_ranks: u32,
    by_member: BTreeMap<Member, usize>,
}

impl Job {
    /// The actor behind a member of a communicator.
    #[must_use]
    pub fn actor(&self, member: Member) -> Option<usize> {
        self.by_member.get(&member).copied()
    }

    /// The rank of a member in the job.
    #[must_use]
    pub fn rank(&self, member: Member) -> u32 {
        self.actor(member).map_or(0, |actor| self.actors[actor].rank)
    }

    /// Ranks of the job that have no trace.
    #[must_use]
    pub fn missing(&self) -> Vec<u32> {
        let n_ranks = self.n_ranks.min(1 << 20);
        (0..n_ranks).filter(|rank| self.actors.iter().all(|actor| actor.rank != *rank)).collect()
    }
}

/// Sorts participants into jobs, and says who belongs to none.
#[must_use]
pub fn jobs(participants: &[Participant]) -> (Vec<Job>, Vec<usize>) {
    let communicators = join(participants);
    let mut groups = Groups::new(participants.len());
    for communicator in &communicators {
        let mut members =
            communicator.all().map(|(_, member)| member).chain(communicator.unplaced.iter().copied());
        let doubles = communicator.doubles.iter().map(|(_, member)| *member);
        if let Some(first) = members.next() {
            members.chain(doubles).for_each(|member| groups.unite(first.participant, member.participant));
        }
    }
    let uses_nccl = |idx: &usize| !participants[*idx].memberships.is_empty();
    let with = (0..participants.len()).filter(uses_nccl).collect::<Vec<_>>();
    let without: Vec<usize> = (0..participants.len()).filter(|idx| !uses_nccl(idx)).collect();
    let (adopted, alone): (Vec<usize>, Vec<usize>) =
        without.into_iter().partition(|idx| adopt(participants, &mut groups, *idx, &with));
    let (named, alone): (Vec<usize>, Vec<usize>) =
        alone.into_iter().partition(|idx| hint(&participants[*idx]).is_some());
    for (n, idx) in named.iter().enumerate() {
        if let Some(other) =
            named[..n].iter().find(|other| hint(&participants[**other]) == hint(&participants[*idx]))
        {
            groups.unite(*other, *idx);
        }
    }
    unite_parts(participants, &mut groups, &with);
    let mut by_group: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for idx in with.into_iter().chain(adopted).chain(named) {
        by_group.entry(groups.find(idx)).or_default().push(idx);
    }
    let mut jobs: Vec<Job> = vec![];
    for group in by_group.into_values() {
        jobs.push(job(participants, &communicators, &group, &mut groups));
    }
    jobs.sort_by_key(|job| job.actors.iter().map(|actor| participants[actor.participant].first).min());
    (jobs, alone)
}

/// Processes that share no communicator yet may be one job all the same: PyTorch makes its default group when it is first used.
/// They are if their launcher says so, and nothing says that one of them came after the other.
fn unite_parts(participants: &[Participant], groups: &mut Groups, with: &[usize]) {
    for (n, idx) in with.iter().copied().enumerate() {
        for other in with[..n].iter().copied() {
            let (own_part, other_part) = (groups.find(idx), groups.find(other));
            if own_part == other_part || !is_one_launch(&participants[idx], &participants[other]) {
                continue;
            }
            let all: Vec<usize> = with
                .iter()
                .copied()
                .filter(|it| [own_part, other_part].contains(&groups.find(*it)))
                .collect();
            let size = said_size(participants, &all);
            let fits = |idx: &usize| participants[*idx].process.rank < size;
            if are_distinct(participants, &all) && all.iter().all(fits) {
                groups.unite(idx, other);
            }
        }
    }
}

/// The same launch of the same job, as far as environment and clocks say.
fn is_one_launch(a: &Participant, b: &Participant) -> bool {
    let same_boot = a.process.boot == b.process.boot;
    let address = a.variable("MASTER_ADDR").unwrap_or_default();
    let is_local = ["", "localhost", "127.0.0.1", "::1"].contains(&address);
    let together = same_boot && a.first <= b.end && b.first <= a.end;
    hint(a).is_some()
        && hint(a) == hint(b)
        && a.world_size().is_some()
        && a.world_size() == b.world_size()
        && (together || (!same_boot && !is_local))
}

/// Finds a job for a process that never reached NCCL: one whose environment says the same, or the only one that ran at
/// the same time from the same parent.
fn adopt(participants: &[Participant], groups: &mut Groups, idx: usize, with: &[usize]) -> bool {
    let own = &participants[idx];
    let same_hint = |other: &&usize| hint(own).is_some() && hint(own) == hint(&participants[**other]);
    let same_parent = |other: &&usize| {
        let other = &participants[**other];
        let together = own.process.boot == other.process.boot && own.process.parent == other.process.parent;
        together
            && own.first <= other.end
            && other.first <= own.end
            && hint(own).is_none() == hint(other).is_none()
    };
    let found = with.iter().find(same_hint).or_else(|| with.iter().find(same_parent));
    let Some(found) = found else { return false };
    groups.unite(*found, idx);
    true
}

/// What the environment says about which job it is.
fn hint(participant: &Participant) -> Option<Vec<Option<&str>>> {
    const NAMES: [&str; 6] = [
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "MASTER_ADDR",
        "MASTER_PORT",
    ];
    participant.process.rank?;
    let values: Vec<Option<&str>> = NAMES.iter().map(|name| participant.variable(name)).collect();
    values.iter().any(Option::is_some).then_some(values)
}

fn join(participants: &[Participant]) -> Vec<Joined> {
    let mut by_key: BTreeMap<Key, Vec<Member>> = BTreeMap::new();
    for (participant, known) in participants.iter().enumerate() {
        for membership in 0..known.memberships.len() {
            let facts = &known.memberships[membership].facts;
            // NCCL_SPLIT_NOCOLOR: the rank is in none of the new ones.
            if facts.origin == Some(NcclOp::CommSplit) && facts.color == Some(-1) {
                continue;
            }
            let member = Member { participant, membership };
            by_key.entry(key(known, member, 0)).or_default().push(member);
        }
    }
    let mut keys: Vec<(Key, Joined)> =
        by_key.into_iter().map(|(key, members)| (key, joined(participants, &members))).collect();
    // Of several with all ranks the first that was made is the world; what was made from another follows by its color.
    keys.sort_by_key(|(key, joined)| match key {
        Key::Root(..) | Key::Unknown(_) => (std::cmp::Reverse(joined.n_ranks), false, joined.since),
        Key::Child(..) => (std::cmp::Reverse(joined.n_ranks), true, Nanos(0)),
    });
    let parents: Vec<Option<usize>> = keys
        .iter()
        .map(|(key, _)| match key {
            Key::Child(parent, ..) => keys.iter().position(|(other, _)| other == &**parent),
            Key::Root(..) | Key::Unknown(_) => None,
        })
        .collect();
    let mut joined: Vec<Joined> = keys.into_iter().map(|(_, joined)| joined).collect();
    for (idx, parent) in parents.into_iter().enumerate() {
        joined[idx].parent = parent;
        place(participants, &mut joined[idx]);
    }
    joined
}

fn key(participant: &Participant, member: Member, depth: u32) -> Key {
    let membership = &participant.memberships[member.membership];
    let facts = &membership.facts;
    match membership.parent {
        // Parents come before their children; a damaged trace may say otherwise.
        Some(parent) if depth < 64 => {
            let parent = key(participant, Member { membership: parent, ..member }, depth + 1);
            Key::Child(Box::new(parent), facts.ordinal, facts.color)
        }
        None if facts.unique_id != 0 => Key::Root(facts.unique_id, facts.ordinal),
        Some(_) | None => Key::Unknown(member),
    }
}

fn joined(participants: &[Participant], members: &[Member]) -> Joined {
    let facts = |member: &Member| &participants[member.participant].memberships[member.membership].facts;
    let mut sizes: BTreeMap<u32, usize> = BTreeMap::new();
    members.iter().filter_map(|member| facts(member).n_ranks).for_each(|n| *sizes.entry(n).or_default() += 1);
    let n_ranks = sizes.iter().max_by_key(|(_, votes)| **votes).map_or(members.len() as u32, |(n, _)| *n);
    let mut joined = Joined {
        label: String::new(),
        hash: members.iter().find_map(|member| facts(member).comm_hash),
        n_ranks,
        members: BTreeMap::new(),
        unplaced: vec![],
        doubles: vec![],
        other_sizes: vec![],
        parent: None,
        since: Nanos(u64::MAX),
    };
    for member in members {
        let membership = &participants[member.participant].memberships[member.membership];
        joined.since = joined.since.min(membership.created.0.unwrap_or(Nanos(u64::MAX)));
        match facts(member).rank {
            None => joined.unplaced.push(*member),
            Some(rank) if joined.members.contains_key(&rank) => joined.doubles.push((rank, *member)),
            Some(rank) => {
                joined.members.insert(rank, *member);
            }
        }
        if let Some(n) = facts(member).n_ranks.filter(|n| *n != n_ranks) {
            joined.other_sizes.push((n, *member));
        }
    }
    let name = members.iter().map(|member| &facts(member).config.name).find(|name| !name.is_empty());
    joined.label = name.cloned().unwrap_or_default();
    joined
}

/// Ranks of what was split off follow from the keys, if all that are in it have a trace.
fn place(participants: &[Participant], joined: &mut Joined) {
    if joined.unplaced.is_empty() {
        return;
    }
    let known = joined.n_ranks as usize == joined.unplaced.len() + joined.members.len();
    if !joined.members.is_empty() || !known {
        // What is not known is put behind what is, so that no member is forgotten.
        let next = joined.members.keys().max().map_or(0, |last| last + 1);
        joined.members.extend((next..).zip(std::mem::take(&mut joined.unplaced)));
        return;
    }
    let order = |member: &Member| {
        let participant = &participants[member.participant];
        let membership = &participant.memberships[member.membership];
        let parent = membership.parent.and_then(|parent| participant.memberships[parent].facts.rank);
        (membership.facts.key, parent)
    };
    let mut members = std::mem::take(&mut joined.unplaced);
    members.sort_by_key(order);
    joined.members = (0..).zip(members).collect();
}

fn job(participants: &[Participant], all: &[Joined], group: &[usize], groups: &mut Groups) -> Job {
    let root = groups.find(group[0]);
    let mut belongs = |joined: &Joined| {
        let mut members =
            joined.all().map(|(_, member)| member).chain(joined.doubles.iter().map(|(_, member)| *member));
        members.next().is_some_and(|member| groups.find(member.participant) == root)
    };
    let places: Vec<usize> = (0..all.len()).filter(|idx| belongs(&all[*idx])).collect();
    let mut communicators: Vec<Joined> = places.iter().map(|idx| all[*idx].clone()).collect();
    for communicator in &mut communicators {
        communicator.parent =
            communicator.parent.and_then(|parent| places.iter().position(|place| *place == parent));
    }
    let world = (!communicators.is_empty()).then_some(0);
    let mut job = Job { communicators, world, ..Job::default() };
    number(participants, group, &mut job);
    names::name(participants, &mut job);
    job
}

/// Gives every process its rank.
fn number(participants: &[Participant], group: &[usize], job: &mut Job) {
    let world_members: Vec<(u32, Member)> = match job.world {
        None => vec![],
        Some(world) => {
            let world = &job.communicators[world];
            world.all().chain(world.doubles.iter().copied()).collect()
        }
    };
    let outside: Vec<usize> = group
        .iter()
        .copied()
        .filter(|idx| world_members.iter().all(|(_, member)| member.participant != *idx))
        .collect();
    let n_world = job.world.map_or(0, |world| job.communicators[world].n_ranks);
    let n_said = said_size(participants, group);
    // More processes than ranks, or a launcher that says more: the largest communicator is only a part of the job.
    let n_seen = (world_members.len() + outside.len()) as u32;
    let is_part = n_said.is_some_and(|n_said| n_said > n_world) || (!outside.is_empty() && n_seen > n_world);
    if is_part && are_distinct(participants, group) {
        job.world = None;
        for idx in group.iter().copied() {
            let rank = participants[idx].process.rank.unwrap_or(0);
            let (device, source) = (own_device(participants, idx), RankSource::Environment);
            job.actors.push(Actor { rank, participant: idx, device, source });
        }
    } else {
        number_by_nccl(participants, &world_members, outside, job);
    }
    job.actors.sort_by_key(|actor| (actor.rank, actor.participant));
    let highest = job.actors.iter().map(|actor| actor.rank + 1).max().unwrap_or(0);
    job.n_ranks = n_world.max(highest).max(n_said.filter(|_| job.world.is_none()).unwrap_or(0));
    for (idx, communicator) in job.communicators.iter().enumerate() {
        let doubles = communicator.doubles.iter().copied();
        for (rank, member) in communicator.all().chain(doubles) {
            let same = |actor: &&Actor| actor.participant == member.participant;
            let mut candidates = job.actors.iter().filter(same);
            let is_this = |actor: &Actor| {
                if Some(idx) == job.world {
                    actor.rank == rank
                } else {
                    actor.device == device(participants, member)
                }
            };
            let found = candidates.clone().find(|actor| is_this(actor)).or_else(|| candidates.next());
            if let Some(at) = found.and_then(|found| job.actors.iter().position(|actor| actor == found)) {
                job.by_member.insert(member, at);
            }
        }
    }
}

/// The largest communicator numbers the ranks; a process that is not in it gets a rank that is left.
fn number_by_nccl(participants: &[Participant], world: &[(u32, Member)], outside: Vec<usize>, job: &mut Job) {
    for (rank, member) in world {
        let (participant, device) = (member.participant, device(participants, *member));
        job.actors.push(Actor { rank: *rank, participant, device, source: RankSource::Nccl });
    }
    for idx in outside {
        let free = |rank: &u32, job: &Job| job.actors.iter().all(|actor| actor.rank != *rank);
        let named = participants[idx].process.rank.filter(|rank| free(rank, job));
        let source = if named.is_some() { RankSource::Environment } else { RankSource::Guessed };
        let rank = named.or_else(|| (0..).find(|rank| free(rank, job))).unwrap_or(0);
        job.actors.push(Actor { rank, participant: idx, device: own_device(participants, idx), source });
    }
}

/// Ranks of the job, as the launchers of its processes say.
fn said_size(participants: &[Participant], group: &[usize]) -> Option<u32> {
    group.iter().filter_map(|idx| participants[*idx].world_size()).max()
}

/// Every process has a rank from its launcher, and no two have the same.
fn are_distinct(participants: &[Participant], group: &[usize]) -> bool {
    let mut ranks: Vec<Option<u32>> = group.iter().map(|idx| participants[*idx].process.rank).collect();
    ranks.sort_unstable();
    ranks.iter().all(Option::is_some) && ranks.windows(2).all(|pair| pair[0] != pair[1])
}

fn device(participants: &[Participant], member: Member) -> Option<i16> {
    let device = participants[member.participant].memberships[member.membership].facts.device;
    Some(device).filter(|device| *device >= 0)
}

/// The device of a process that is not in the world's communicator: that of its communicators, or the one that it used most.
fn own_device(participants: &[Participant], idx: usize) -> Option<i16> {
    let participant = &participants[idx];
    let of_nccl =
        participant.memberships.iter().map(|membership| membership.facts.device).find(|device| *device >= 0);
    let most = participant.memory.iter().filter(|used| used.ordinal >= 0).max_by_key(|used| used.peak);
    of_nccl.or_else(|| most.map(|used| used.ordinal))
}

/// Which of some things belong together.
struct Groups(Vec<usize>);

impl Groups {
    fn new(n: usize) -> Groups {
        Groups((0..n).collect())
    }

    fn find(&mut self, idx: usize) -> usize {
        let mut root = idx;
        while self.0[root] != root {
            root = self.0[root];
        }
        self.0[idx] = root;
        root
    }

    fn unite(&mut self, a: usize, b: usize) {
        let (a, b) = (self.find(a), self.find(b));
        self.0[a.max(b)] = a.min(b);
    }
}
