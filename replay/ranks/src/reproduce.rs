//! The collectives of a job as a program for `torchrun`, from shortly before the ranks' calls differ.
//!
//! ```text
//!  rank 0  a a a │ a b B      what all ranks called alike is left out but for the last
//!  rank 1  a a a │ a B        each rank then makes its own calls, in its own order
//! ```
//! If all calls of each communicator match, ranks may still use two of them in different orders, or all send before they receive.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use super::calls::{Lane, Participant, Reduction, Sequence, Signature};
use super::diagnose::{diagnose, n_before};
use super::findings::Kind;
use super::jobs::{Job, Joined, Member};
use gputrace_report::fold::{Line, folded};
use gputrace_report::model::{Mood, Section, Value};
use gputrace_schemas::event::{Nanos, NcclOp};
use gputrace_trace::words;
use serde_json::{Value as Json, json};

/// Of the calls that all ranks of a communicator make alike, so many of the last are kept: that it was used matters.
const KEPT: usize = 1;
/// Data types of NCCL that `torch` has, by `ncclDataType_t` (nccl.h 2.32).
const TYPES: [&str; 10] =
    ["int8", "uint8", "int32", "int32", "int64", "int64", "float16", "float32", "float64", "bfloat16"];
/// Reductions, by `ncclRedOp_t`.
const REDUCTIONS: [&str; 5] = ["SUM", "PRODUCT", "MAX", "MIN", "AVG"];

/// A program of a job's collectives.
pub struct Collectives {
    /// Python.
    pub text: String,
    /// Ranks.
    pub n_ranks: u32,
    /// Calls that all ranks made, and those that are left.
    pub n_calls: (usize, usize),
    /// Parts that the program cannot repeat.
    pub notes: Vec<String>,
}

/// Calls of one rank on one communicator.
type Calls = Vec<(Lane, usize, Signature, Nanos)>;

/// What was sent from one rank to another, or received: elements and types.
type Traffic = Vec<(u64, i32)>;

/// When a rank called its collectives on each of two communicators.
type Order<'a> = (&'a [Nanos], &'a [Nanos]);

/// A rank of a communicator.
struct Caller {
    /// In the communicator.
    rank: u32,
    /// In the job.
    job_rank: u32,
    calls: Calls,
}

/// Writes the program of a job.
///
/// # Errors
/// The ranks' calls do not differ, or too little is known of them.
pub fn collectives(participants: &[Participant], job: &Job) -> Result<Collectives, String> {
    let mut notes: BTreeSet<String> = BTreeSet::new();
    let mut groups: Vec<Vec<u32>> = vec![];
    let mut of_ranks: BTreeMap<u32, Vec<(Nanos, usize, Lane, Signature)>> = BTreeMap::new();
    let mut n_calls = 0;
    let mut missing: BTreeSet<u32> = BTreeSet::new();
    let mut all: Vec<Vec<Caller>> = vec![];
    for communicator in &job.communicators {
        let member = |(rank, member)| {
            let calls = calls(participants, communicator, (rank, member));
            Caller { rank, job_rank: job.rank(member), calls }
        };
        if communicator.all().any(|(_, member)| participants[member.participant].process.since > Nanos(0)) {
            notes.insert("calls from before the kept part of a trace are left out".to_owned());
        }
        let callers: Vec<Caller> = communicator.all().map(member).collect();
        n_calls += callers.iter().map(|caller| caller.calls.len()).sum::<usize>();
        missing.extend(communicator.missing());
        if !communicator.unplaced.is_empty() {
            notes.insert("calls of processes with an unknown rank are left out".to_owned());
        }
        all.push(callers);
    }
    if let Some(rank) = missing.first() {
        let what = match missing.len() {
            1 => format!("rank {rank} has no trace"),
            n => format!("{n} ranks have no trace, rank {rank} the first"),
        };
        return Err(format!("{what}: it is not known whether all calls match"));
    }
    let mut from: Vec<Option<usize>> = all.iter().map(|callers| first_difference(callers)).collect();
    if from.iter().all(Option::is_none) {
        from = first_inversions(&all);
    }
    if from.iter().all(Option::is_none) {
        let waits = |kind: Kind| kind == Kind::DeadlockCycle;
        if !diagnose(participants, job).findings.iter().any(|finding| waits(finding.kind)) {
            return Err(
                "all ranks make the same calls in the same order; `gputrace ranks` shows other mismatches"
                    .into(),
            );
        }
        from = all.iter().map(|callers| has_sends(callers).then(|| least_collectives(callers))).collect();
    }
    for (callers, from) in all.iter().zip(from) {
        let Some(from) = from else { continue };
        let group = groups.len();
        groups.push(callers.iter().map(|caller| caller.job_rank).collect());
        for caller in callers {
            let own = of_ranks.entry(caller.job_rank).or_default();
            let kept = caller.calls.iter().filter(|(lane, number, ..)| match lane {
                Lane::Collective => *number + KEPT >= from,
                Lane::Send(_) | Lane::Receive(_) => true,
                Lane::Management | Lane::OneSided => false,
            });
            own.extend(kept.map(|(lane, _, signature, time)| (*time, group, *lane, *signature)));
        }
    }
    let n_ranks = job.n_ranks.max(of_ranks.keys().last().map_or(0, |rank| rank + 1));
    let mut text = HEAD.replace("{ranks}", &n_ranks.to_string());
    let _ = writeln!(text, "WORLD = {n_ranks}");
    let _ = writeln!(text, "GROUPS = {groups:?}  # ranks of each communicator");
    text.push_str(HELPERS);
    let mut n_left = 0;
    for (rank, mut own) in of_ranks {
        own.sort_by_key(|(time, ..)| *time);
        n_left += own.len();
        let lines: Vec<Line> = own
            .iter()
            .filter_map(|(_, group, lane, signature)| {
                let text = call(*group, *lane, signature, &groups[*group], &mut notes)?;
                Some(Line::of(text))
            })
            .collect();
        let _ = writeln!(text, "\n\ndef rank_{rank}():");
        let body = folded(&lines);
        if body.is_empty() {
            text.push_str("    pass\n");
        }
        body.lines().for_each(|line| {
            let _ = writeln!(text, "    {line}");
        });
    }
    text.push_str(TAIL);
    Ok(Collectives { text, n_ranks, n_calls: (n_calls, n_left), notes: notes.into_iter().collect() })
}

/// The section about a job's collectives.
#[must_use]
pub fn section(of: &Collectives) -> Section {
    let (before, left) = of.n_calls;
    let n_lines = of.text.lines().count() as u64;
    Section::new("reproduction", "A program with the job's collectives")
        .fact("n_lines", "lines", Value::Count(n_lines))
        .remark("n_calls", "calls", Value::Count(left as u64), format!("of {}", words::count(before as u64)))
        .fact("n_ranks", "ranks", Value::Count(u64::from(of.n_ranks)))
        .line(Mood::Note, "each rank makes its own calls, starting shortly before they differ")
        .lines(of.notes.iter().map(|note| (Mood::Note, note.clone())))
}

/// The same for programs.
#[must_use]
pub fn json_of(of: &Collectives) -> Json {
    json!({
        "kind": "collectives",
        "n_lines": of.text.lines().count(),
        "n_ranks": of.n_ranks,
        "n_requests_before": of.n_calls.0,
        "n_requests": of.n_calls.1,
        "notes": of.notes,
    })
}

/// What a member called, in the order of its calls. They are counted from the first that all who take part in them know.
fn calls(participants: &[Participant], joined: &Joined, (rank, member): (u32, Member)) -> Calls {
    let membership = |member: Member| &participants[member.participant].memberships[member.membership];
    let start = |member: Member, lane: Lane| membership(member).lane(lane).map_or(0, Sequence::start);
    let of_peer = |peer: i32, lane: Lane| {
        let peer = u32::try_from(peer).ok().and_then(|peer| joined.members.get(&peer));
        peer.map_or(0, |peer| start(*peer, lane))
    };
    let mut all: Calls = vec![];
    for (lane, sequence) in &membership(member).lanes {
        let from = match *lane {
            Lane::Send(peer) => of_peer(peer, Lane::Receive(rank as i32)),
            Lane::Receive(peer) => of_peer(peer, Lane::Send(rank as i32)),
            lane => joined.all().map(|(_, member)| start(member, lane)).max().unwrap_or(0),
        };
        let from = from.max(sequence.start());
        for (number, kind, time) in sequence.calls().filter(|(number, ..)| *number >= from) {
            if let Some(kind) = membership(member).kinds.get(kind as usize) {
                all.push((*lane, number - from, kind.signature, time));
            }
        }
    }
    all.sort_by_key(|(.., time)| *time);
    all
}

/// The number of the first collective that not all members called alike; none where all are alike.
fn first_difference(callers: &[Caller]) -> Option<usize> {
    let collectives = |caller: &Caller| -> Vec<Signature> {
        let own = caller.calls.iter().filter(|(lane, ..)| *lane == Lane::Collective);
        own.map(|(_, _, signature, _)| signature.normal()).collect()
    };
    let all: Vec<Vec<Signature>> = callers.iter().map(collectives).collect();
    let shortest = all.iter().map(Vec::len).min().unwrap_or(0);
    let longest = all.iter().map(Vec::len).max().unwrap_or(0);
    let differs = (0..shortest).find(|at| all.iter().any(|calls| calls[*at] != all[0][*at]));
    let is_uneven = shortest < longest || !is_paired(callers);
    differs.or_else(|| is_uneven.then_some(shortest))
}

/// Whether all that is sent is received, in the same sizes.
fn is_paired(callers: &[Caller]) -> bool {
    let mut pairs: BTreeMap<(i64, i64), [Traffic; 2]> = BTreeMap::new();
    for caller in callers {
        let own = i64::from(caller.rank);
        for (lane, _, signature, _) in &caller.calls {
            let (pair, side) = match *lane {
                Lane::Send(peer) => ((own, i64::from(peer)), 0),
                Lane::Receive(peer) => ((i64::from(peer), own), 1),
                Lane::Collective | Lane::Management | Lane::OneSided => continue,
            };
            pairs.entry(pair).or_default()[side].push((signature.count, signature.datatype));
        }
    }
    pairs.values().all(|[sent, received]| sent == received)
}

fn has_sends(callers: &[Caller]) -> bool {
    let is_send = |(lane, ..): &(Lane, usize, Signature, Nanos)| matches!(lane, Lane::Send(_));
    callers.iter().any(|caller| caller.calls.iter().any(is_send))
}

/// Collectives of the member that made fewest.
fn least_collectives(callers: &[Caller]) -> usize {
    callers.iter().map(|caller| times(caller).len()).min().unwrap_or(0)
}

/// When a rank called its collectives.
fn times(caller: &Caller) -> Vec<Nanos> {
    let own = caller.calls.iter().filter(|(lane, ..)| *lane == Lane::Collective);
    own.map(|(.., time)| *time).collect()
}

/// By communicator the number of the first collective that two ranks made in another order than those of another communicator.
fn first_inversions(all: &[Vec<Caller>]) -> Vec<Option<usize>> {
    let mut of_ranks: BTreeMap<u32, Vec<(usize, Vec<Nanos>)>> = BTreeMap::new();
    for (communicator, callers) in all.iter().enumerate() {
        for caller in callers {
            of_ranks.entry(caller.job_rank).or_default().push((communicator, times(caller)));
        }
    }
    let mut pairs: BTreeMap<(usize, usize), Vec<Order<'_>>> = BTreeMap::new();
    for communicators in of_ranks.values() {
        for (n, (a, first)) in communicators.iter().enumerate() {
            for (b, second) in &communicators[n + 1..] {
                pairs.entry((*a, *b)).or_default().push((first, second));
            }
        }
    }
    let mut from: Vec<Option<usize>> = vec![None; all.len()];
    let mut at_most = |communicator: usize, number: usize| {
        let known = from[communicator].unwrap_or(number);
        from[communicator] = Some(known.min(number));
    };
    for ((a, b), orders) in pairs {
        let n_a = orders.iter().map(|(a, _)| a.len()).min().unwrap_or(0);
        let n_b = orders.iter().map(|(_, b)| b.len()).min().unwrap_or(0);
        let model = n_before(orders[0], n_a, n_b);
        for order in &orders[1..] {
            let other = n_before(*order, n_a, n_b);
            if let Some(at) = (0..n_a).find(|at| other[*at] != model[*at]) {
                at_most(a, at);
                at_most(b, other[at].min(model[at]));
            }
        }
    }
    from
}

/// One call as Python; none where PyTorch has no such call.
fn call(
    group: usize,
    lane: Lane,
    signature: &Signature,
    ranks: &[u32],
    notes: &mut BTreeSet<String>,
) -> Option<String> {
    let mut note = |text: &str| {
        notes.insert(text.to_owned());
    };
    let kind = usize::try_from(signature.datatype).ok().and_then(|it| TYPES.get(it).copied());
    if kind.is_none() {
        note("data types without a PyTorch collective are written as uint8");
    }
    let kind = kind.unwrap_or("uint8");
    let count = signature.count;
    let reduction = match signature.reduction {
        Reduction::Own(number) => usize::try_from(number).ok().and_then(|it| REDUCTIONS.get(it).copied()),
        Reduction::None | Reduction::PreMulSum(..) | Reduction::Unseen => None,
    };
    let reduction = reduction.unwrap_or("SUM");
    let job_rank = |member: i32| {
        let member = usize::try_from(member).ok()?;
        ranks.get(member).copied()
    };
    let root = job_rank(signature.root).unwrap_or(ranks.first().copied().unwrap_or(0));
    let text = match (signature.op, lane) {
        (_, Lane::Send(peer)) => format!("send({group}, {count}, \"{kind}\", {})", job_rank(peer)?),
        (_, Lane::Receive(peer)) => format!("receive({group}, {count}, \"{kind}\", {})", job_rank(peer)?),
        (NcclOp::AllReduce, _) => format!("all_reduce({group}, {count}, \"{kind}\", \"{reduction}\")"),
        (NcclOp::Reduce, _) => format!("reduce({group}, {count}, \"{kind}\", \"{reduction}\", {root})"),
        (NcclOp::Broadcast, _) => format!("broadcast({group}, {count}, \"{kind}\", {root})"),
        (NcclOp::AllGather, _) => format!("all_gather({group}, {count}, \"{kind}\")"),
        (NcclOp::ReduceScatter, _) => {
            format!("reduce_scatter({group}, {count}, \"{kind}\", \"{reduction}\")")
        }
        (NcclOp::AlltoAll, _) => format!("all_to_all({group}, {count}, \"{kind}\")"),
        _ => {
            note("gathers and scatters, which PyTorch implements with sends, are left out");
            return None;
        }
    };
    Some(text)
}

const HEAD: &str = "#!/usr/bin/env python3
# The collectives of a job of {ranks} ranks, from shortly before the ranks' calls differ; written by gputrace reproduce.
# Sizes, types, communicators and orders are recorded; no code, name or path of the recorded program is in this file.
#
#     torchrun --nproc-per-node {ranks} repro.py          (REPRO_BACKEND=gloo without GPUs)
#
# Exit status: 0 reproduced (a rank waits forever, or NCCL reports an error), 1 not reproduced, 2 it cannot be tried here.
import datetime
import os
import sys
import threading
import time

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    print(f\"cannot be tried here: {error}\")
    sys.exit(2)

SECONDS = float(os.environ.get(\"REPRO_SECONDS\", 60))  # a longer wait counts as a hang
BACKEND = os.environ.get(\"REPRO_BACKEND\", \"nccl\")
RANK = int(os.environ[\"RANK\"])
";

const HELPERS: &str = "
DEVICE = f\"cuda:{os.environ['LOCAL_RANK']}\" if BACKEND == \"nccl\" else \"cpu\"
now, ended = \"the start\", None


def buffer(group, name, count, kind, doing):
    global now
    now = doing
    return torch.zeros(count, dtype=getattr(torch, kind), device=DEVICE)


def all_reduce(group, count, kind, op):
    data = buffer(group, \"data\", count, kind, f\"all_reduce of {count} {kind} on communicator {group}\")
    dist.all_reduce(data, getattr(dist.ReduceOp, op), group=groups[group])


def reduce(group, count, kind, op, root):
    data = buffer(group, \"data\", count, kind, f\"reduce of {count} {kind} on communicator {group}\")
    dist.reduce(data, root, getattr(dist.ReduceOp, op), group=groups[group])


def broadcast(group, count, kind, root):
    data = buffer(group, \"data\", count, kind, f\"broadcast of {count} {kind} on communicator {group}\")
    dist.broadcast(data, root, group=groups[group])


def all_gather(group, count, kind):
    data = buffer(group, \"data\", count, kind, f\"all_gather of {count} {kind} on communicator {group}\")
    dist.all_gather([torch.empty_like(data) for _ in GROUPS[group]], data, group=groups[group])


def reduce_scatter(group, count, kind, op):
    data = buffer(group, \"data\", count, kind, f\"reduce_scatter of {count} {kind} on communicator {group}\")
    dist.reduce_scatter(data, [torch.zeros_like(data) for _ in GROUPS[group]], getattr(dist.ReduceOp, op), group=groups[group])


def all_to_all(group, count, kind):
    data = buffer(group, \"data\", count * len(GROUPS[group]), kind, f\"all_to_all of {count} {kind} on communicator {group}\")
    dist.all_to_all_single(torch.empty_like(data), data, group=groups[group])


def send(group, count, kind, peer):
    dist.send(buffer(group, \"data\", count, kind, f\"send of {count} {kind} to rank {peer}\"), peer, group=groups[group])


def receive(group, count, kind, peer):
    dist.recv(buffer(group, \"data\", count, kind, f\"receive of {count} {kind} from rank {peer}\"), peer, group=groups[group])
";

const TAIL: &str = "

def calls():
    global ended
    try:
        globals().get(f\"rank_{RANK}\", lambda: None)()
        if BACKEND == \"nccl\":
            torch.cuda.synchronize()
        ended = \"done\"
    except Exception as error:
        ended = f\"failed: {error}\"
    try:
        store.add(\"ended\", 1)
    except Exception:
        pass  # the other ranks have seen enough and are gone


if BACKEND == \"nccl\":
    torch.cuda.set_device(DEVICE)
dist.init_process_group(BACKEND, timeout=datetime.timedelta(seconds=100 * SECONDS))
# A connection of its own: a call that waits may keep that of the process group.
store = dist.TCPStore(os.environ[\"MASTER_ADDR\"], int(os.environ[\"MASTER_PORT\"]), wait_for_workers=False)
groups = [dist.new_group(ranks) for ranks in GROUPS]
dist.barrier()
threading.Thread(target=calls, daemon=True).start()
end = time.monotonic() + SECONDS
while time.monotonic() < end and store.add(\"ended\", 0) < WORLD:
    time.sleep(0.1)
store.set(f\"state of {RANK}\", ended or f\"waits in {now}\")
states = [store.get(f\"state of {rank}\").decode() for rank in range(WORLD)]
is_reproduced = any(state != \"done\" for state in states)
if RANK == 0:
    print(\"reproduced:\" if is_reproduced else \"not reproduced: all ranks came to the end\")
    for rank, state in enumerate(states):
        print(f\"  rank {rank}: {state}\")
    sys.stdout.flush()
    store.set(\"said\", \"\")
else:
    store.get(\"said\")
time.sleep(1)  # rank 0 has the store
os._exit(0 if is_reproduced else 1)
";
