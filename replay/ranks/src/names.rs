//! What a communicator is called.
//!
//! A trace knows these, best first:
//!
//! 1. `ncclConfig_t::commName` (NCCL 2.27, `ncclCommInitRankConfig`, `ncclCommSplit` and others). A program may set it through
//!    `ProcessGroupNCCL.Options.config.comm_name`. PyTorch itself fills it with `<group_desc>:<group_name>` where it has the change of
//!    August 2026 (pull request 192487 of pytorch/pytorch); for other releases the library takes the same text from PyTorch's groups
//!    (`shim/src/nccl/process_groups.rs`). A group without a description has `undefined`.
//! 2. The lines of Python that made it: `init_process_group` is the default group. PyTorch makes most communicators only when they
//!    are first used, and then that line is the first collective's and says nothing about the group.
//! 3. Its ranks.
//!
//! NVTX ranges do not help: PyTorch's say the operation (`nccl:all_reduce`), and nothing of the group.

use super::calls::{Membership, Participant};
use super::findings::{rank_list, rank_names, short_path};
use super::jobs::{Job, Joined};
use super::show;

/// PyTorch's description of a group that was given none (`torch/distributed/distributed_c10d.py` 2.11).
const NO_DESCRIPTION: &str = "undefined:";
/// PyTorch's description of its default group (likewise).
const DEFAULT_GROUP: &str = "default_pg";
/// The function of PyTorch that makes the default group.
pub(super) const MAKES_DEFAULT_GROUP: &str = "init_process_group";
/// Parts of a list of ranks that are written out.
const MAX_PARTS: usize = 6;

/// Names all communicators of a job, each differently.
pub(super) fn name(participants: &[Participant], job: &mut Job) {
    let ranks: Vec<String> = job.communicators.iter().map(|joined| ranks(job, joined)).collect();
    let kinds: Vec<Label> = (0..ranks.len()).map(|idx| label(participants, job, idx, &ranks[idx])).collect();
    let mut order: Vec<usize> = (0..kinds.len()).collect();
    order.sort_by_key(|idx| (job.communicators[*idx].since, *idx));
    for idx in 0..kinds.len() {
        let alike: Vec<usize> = order.iter().copied().filter(|other| kinds[*other] == kinds[idx]).collect();
        let text = match &kinds[idx] {
            Label::World if alike.len() == 1 => "world".to_owned(),
            Label::World => told_apart(participants, job, &alike, idx, &everyone(job)),
            Label::Ranks(ranks) => told_apart(participants, job, &alike, idx, ranks),
            Label::Named(name) if alike.len() == 1 => name.clone(),
            Label::Named(name) => named_alike(participants, job, &alike, idx, (name, &ranks)),
        };
        job.communicators[idx].label = text;
    }
    // Whatever is still alike: a name that a program gave, and ranks that are not known.
    let labels: Vec<String> = job.communicators.iter().map(|joined| joined.label.clone()).collect();
    for (idx, joined) in job.communicators.iter_mut().enumerate() {
        let before = labels[..idx].iter().filter(|label| **label == labels[idx]).count();
        if before > 0 {
            joined.label = format!("{} ({})", labels[idx], before + 1);
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Label {
    /// The program's name.
    Named(String),
    /// It has no name, and all ranks of the job are known to be in it.
    World,
    /// It has no name: its ranks, in words.
    Ranks(String),
}

fn label(participants: &[Participant], job: &Job, idx: usize, ranks: &str) -> Label {
    let joined = &job.communicators[idx];
    if !joined.label.is_empty() {
        return match joined.label.strip_prefix(NO_DESCRIPTION) {
            Some(name) if !name.is_empty() => Label::Named(format!("process group {name}")),
            _ => Label::Named(joined.label.clone()),
        };
    }
    let has_all = has_all_ranks(participants, job, joined);
    let mut default_groups =
        (0..job.communicators.len()).filter(|idx| is_default_group(participants, &job.communicators[*idx]));
    let default_group = default_groups.next();
    match has_all {
        true if default_group == Some(idx) => Label::World,
        true if default_group.is_some() => Label::Ranks(everyone(job)),
        // What is made from another communicator is a group of its own, if of all ranks.
        true if joined.parent.is_none() => Label::World,
        true => Label::Ranks(everyone(job)),
        false => Label::Ranks(ranks.to_owned()),
    }
}

/// All ranks of the job are in it, and it is known that there are no others.
fn has_all_ranks(participants: &[Participant], job: &Job, joined: &Joined) -> bool {
    let all_seen = joined.missing().is_empty();
    let is_said = job.communicators.iter().flat_map(Joined::all).any(|(_, member)| {
        participants[member.participant].world_size().is_some_and(|n_ranks| n_ranks == joined.n_ranks)
    });
    joined.n_ranks == job.n_ranks && (all_seen || is_said)
}

fn memberships<'a>(
    participants: &'a [Participant],
    joined: &'a Joined,
) -> impl Iterator<Item = (&'a Participant, &'a Membership)> {
    joined.all().map(|(_, member)| {
        let participant = &participants[member.participant];
        (participant, &participant.memberships[member.membership])
    })
}

/// PyTorch made it as its default group, as its lines of Python or its name say.
fn is_default_group(participants: &[Participant], joined: &Joined) -> bool {
    memberships(participants, joined).any(|(_, membership)| {
        membership.is_default_group || membership.facts.config.name.starts_with(DEFAULT_GROUP)
    })
}

/// `ranks 0, 2, 4, 6 (4 of 8)`.
fn ranks(job: &Job, joined: &Joined) -> String {
    let mut known: Vec<u32> = joined.all().map(|(_, member)| job.rank(member)).collect();
    known.sort_unstable();
    known.dedup();
    let n_others = (joined.n_ranks as usize).saturating_sub(known.len());
    let others = match n_others {
        0 => String::new(),
        1 => " and one more".to_owned(),
        n => format!(" and {n} more"),
    };
    let of =
        if joined.n_ranks == job.n_ranks { "in total".to_owned() } else { format!("of {}", job.n_ranks) };
    format!("{}{others} ({} {of})", short(&known), joined.n_ranks)
}

fn everyone(job: &Job) -> String {
    format!("all {} ranks", job.n_ranks)
}

/// Ranks in words, of many the first and the last.
fn short(ranks: &[u32]) -> String {
    let list = rank_list(ranks);
    let parts: Vec<&str> = list.split(", ").collect();
    match parts.as_slice() {
        _ if ranks.len() == 1 => rank_names(ranks),
        [first, second, .., last] if parts.len() > MAX_PARTS => format!("ranks {first}, {second} ... {last}"),
        _ => format!("ranks {list}"),
    }
}

/// `the group of all 8 ranks made at train.py:12`, or `the second group of all 8 ranks` where one line made several.
fn told_apart(participants: &[Participant], job: &Job, alike: &[usize], idx: usize, ranks: &str) -> String {
    if alike.len() == 1 {
        return format!("the group of {ranks}");
    }
    match which(participants, job, alike, idx) {
        Which::MadeAt(place) => format!("the group of {ranks} created at {place}"),
        Which::Number(n) => format!("the {} group of {ranks}", show::ordinal(n)),
    }
}

/// Groups of one name, as those of a mesh: by their ranks, or by where or when they were made if they have the same.
fn named_alike(
    participants: &[Participant],
    job: &Job,
    alike: &[usize],
    idx: usize,
    (name, ranks): (&str, &[String]),
) -> String {
    let same: Vec<usize> = alike.iter().copied().filter(|other| ranks[*other] == ranks[idx]).collect();
    if same.len() == 1 {
        return format!("{name} of {}", ranks[idx]);
    }
    match which(participants, job, &same, idx) {
        Which::MadeAt(place) => format!("{name} created at {place}"),
        Which::Number(n) => format!("the {} {name}", show::ordinal(n)),
    }
}

/// What tells communicators apart that are alike.
enum Which {
    /// The line of Python that made it, which made no other of them.
    MadeAt(String),
    /// How many were made before.
    Number(usize),
}

fn which(participants: &[Participant], job: &Job, alike: &[usize], idx: usize) -> Which {
    let place = |idx: usize| made_at(participants, &job.communicators[idx]);
    let n = alike.iter().position(|other| *other == idx).unwrap_or(0);
    let mut places: Vec<Option<String>> = alike.iter().map(|idx| place(*idx)).collect();
    places.sort_unstable();
    let is_unique = places.iter().all(Option::is_some) && places.windows(2).all(|pair| pair[0] != pair[1]);
    place(idx).filter(|_| is_unique).map_or(Which::Number(n), Which::MadeAt)
}

/// `train.py:12`.
fn made_at(participants: &[Participant], joined: &Joined) -> Option<String> {
    let place = memberships(participants, joined)
        .filter_map(|(participant, membership)| participant.places.get(membership.place as usize))
        .find(|place| place.line > 0)?;
    Some(format!("{}:{}", short_path(&place.file), place.line))
}
