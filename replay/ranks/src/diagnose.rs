//! What is wrong with the communication of a job.
//!
//! The calls of all ranks are aligned to the majority, communicator by communicator; what does not fit is a finding. What is left is
//! who waits for whom ([`super::waits`]), and who comes late ([`super::arrivals`], and [`super::gpu`] where that was measured).

use std::collections::BTreeMap;

use gputrace_schemas::event::Nanos;
use rustc_hash::{FxHashMap, FxHashSet};

use super::align::{self, Alignment, Difference, Spot, Token, Track};
use super::arrivals::{Arrivals, Naming, Tally};
use super::calls::{CallKind, Ending, Lane, LastSeen, Membership, Participant, Sequence, Signature};
use super::clocks::Clocks;
use super::findings::{CallText, Finding, Kind, Place, Severity, rank_names};
use super::gpu::{self, GpuArrivals, GpuRank, GpuReport, Unfinished};
use super::jobs::{Job, Member};
use super::kinds::{changed, unpaired};
use super::live;
use super::runs::{Run, runs};
use super::tracks::Calls;
use super::waits::Waits;
use super::window::{self, Window};
use gputrace_trace::interned::Interned;
use gputrace_trace::ledger::{GpuTimed, Site};

/// Kinds of calls of a difference that are listed.
const LISTED: usize = 3;
/// A job in which nothing happens for so long at its end waits for something: a second.
const LEAST_IDLE: u64 = 1_000_000_000;

/// The result.
#[derive(Clone, Debug, Default)]
pub struct Diagnosis {
    /// The faults, worst first.
    pub findings: Vec<Finding>,
    /// The position of each rank at the end.
    pub standings: Vec<super::waits::Standing>,
    /// Late arrivals.
    pub arrivals: Vec<Arrivals>,
    /// Measurements of the GPUs; `None` where none was measured.
    pub gpu: Option<GpuReport>,
    /// Notes about things that are not faults.
    pub notes: Vec<String>,
    /// Calls that were compared.
    pub n_calls: u64,
    /// From when on calls were compared, where a trace does not have them from the beginning.
    pub window: Option<Window>,
}

/// Diagnoses a job.
#[must_use]
pub fn diagnose(participants: &[Participant], job: &Job) -> Diagnosis {
    let clocks = Clocks::of(participants, job);
    let mut doctor = Doctor {
        participants,
        job,
        clocks: &clocks,
        names: Names::default(),
        waits: Waits::new(participants, job, &clocks),
        done: Diagnosis { window: Window::of(participants, job, &clocks), ..Diagnosis::default() },
    };
    for idx in 0..job.communicators.len() {
        doctor.making(idx);
        doctor.lane(idx, Lane::Collective);
        doctor.lane(idx, Lane::Management);
        doctor.peers(idx);
    }
    doctor.inversions();
    doctor.measured();
    doctor.finish()
}

/// Numbers for signatures and places, equal on all ranks.
#[derive(Default)]
struct Names {
    signatures: Interned<Signature>,
    places: Interned<Site>,
}

impl Names {
    fn signature(&mut self, signature: &Signature) -> u32 {
        self.signatures.id(signature.normal())
    }

    fn place(&mut self, participant: &Participant, id: u32) -> u32 {
        let Some(site) = participant.places.get(id as usize).filter(|_| id != 0) else { return 0 };
        // Who asked is another question than where.
        let site = Site { owner: gputrace_trace::ledger::OwnerId::default(), ..site.clone() };
        self.places.id(site) + 1
    }
}

/// A rank came last so many times, most of all to this call; `text` says it with the place.
fn straggler(
    rank: u32,
    (communicator, sequence): (&str, Option<u64>),
    (count, place): (u64, &Option<Place>),
    text: impl FnOnce(&str) -> String,
) -> Finding {
    let finding = Finding::new(Kind::Straggler, Severity::Warning, vec![rank]);
    let before = place.as_ref().map(|place| format!(", mostly before {}", place.text));
    Finding {
        count,
        text: text(&before.unwrap_or_default()),
        own: place.clone().map(|place| CallText {
            rank,
            call: String::new(),
            place: Some(place),
            time_ns: 0,
        }),
        sequence,
        ..finding.on(communicator, Lane::Collective, 0)
    }
}

fn straggler_on_gpu(row: &GpuArrivals) -> Finding {
    let words = |ns: u64| super::show::nanos(i64::try_from(ns).unwrap_or(i64::MAX));
    straggler(row.rank, (&row.communicator, Some(row.most_sequence)), (row.last, &row.place), |place| {
        format!(
            "rank {} comes last on the GPU to {} of {} collectives on {}, and all others wait {} for it alone, at most {} at once{place}; measured inside the collectives, which are shortest on the rank that came last",
            row.rank,
            row.last,
            row.collectives,
            row.communicator,
            words(row.cost_ns),
            words(row.most_ns),
        )
    })
}

struct Doctor<'a> {
    participants: &'a [Participant],
    job: &'a Job,
    clocks: &'a Clocks,
    names: Names,
    waits: Waits<'a>,
    done: Diagnosis,
}

impl<'a> Doctor<'a> {
    fn tracks(&mut self, idx: usize, lane: Lane) -> Vec<Calls<'a>> {
        let participants = self.participants;
        let members: Vec<Member> = self.job.communicators[idx].all().map(|(_, member)| member).collect();
        let memberships =
            members.iter().map(|member| &participants[member.participant].memberships[member.membership]);
        let starts = memberships.filter_map(|membership| Some(membership.lane(lane)?.start()));
        let from = starts.max().unwrap_or(0);
        let track = |member: Member| {
            let participant = &participants[member.participant];
            let membership = &participant.memberships[member.membership];
            let token = |kind: &CallKind| Token {
                call: self.names.signature(&kind.signature),
                place: self.names.place(participant, kind.place),
            };
            let tokens = membership.kinds.iter().map(token).collect();
            Calls::new(member, membership, (lane, from), tokens)
        };
        members.into_iter().map(track).collect()
    }

    fn call_text(&self, calls: &Calls<'_>, position: usize) -> Option<CallText> {
        let participant = &self.participants[calls.member.participant];
        let kind = calls.kind(position)?;
        Some(CallText::of(self.job.rank(calls.member), participant, kind, calls.time(position)))
    }

    /// Were all ranks there when the communicator was made, and did all say the same?
    fn making(&mut self, idx: usize) {
        let joined = &self.job.communicators[idx];
        for (rank, member) in &joined.doubles {
            let participant = &self.participants[member.participant];
            let membership = &participant.memberships[member.membership];
            let first =
                joined.members.get(rank).map(|first| self.participants[first.participant].process.pid);
            let mut finding = Finding::new(Kind::InitConflict, Severity::Error, vec![*rank]);
            finding.communicator = Some(joined.label.clone());
            finding.own = made_by(*rank, participant, membership);
            finding.text = format!(
                "two processes claim to be rank {rank} of {}: pid {} and pid {}",
                joined.label,
                first.unwrap_or_default(),
                participant.process.pid
            );
            self.done.findings.push(finding);
        }
        for (n, member) in &joined.other_sizes {
            let participant = &self.participants[member.participant];
            let rank = self.job.rank(*member);
            let mut finding = Finding::new(Kind::InitConflict, Severity::Error, vec![rank]);
            finding.communicator = Some(joined.label.clone());
            finding.own = made_by(rank, participant, &participant.memberships[member.membership]);
            finding.text = format!(
                "rank {rank} expects {} to have {n} ranks, the others {}",
                joined.label, joined.n_ranks
            );
            self.done.findings.push(finding);
        }
        if joined.parent.is_none() {
            self.waits.making(idx);
        }
    }

    /// One kind of order on one communicator.
    fn lane(&mut self, idx: usize, lane: Lane) {
        let tracks = self.tracks(idx, lane);
        if tracks.iter().all(|track| track.n_calls() == 0) {
            return;
        }
        let uncertainties = tracks.iter().map(|track| self.clocks.get(track.member.participant).uncertainty);
        let mut tally = Tally::new(uncertainties);
        let n_members = self.job.communicators[idx].n_ranks as usize;
        let whole = tracks.len() == n_members && n_members > 1 && lane == Lane::Collective;
        let (mut times, mut kinds, mut durations) = (vec![], vec![], vec![]);
        let mut on_gpu = gpu::Tally::new(tracks.len());
        let mut last_full = None;
        let clocks = self.clocks;
        let offsets: Vec<i128> =
            tracks.iter().map(|track| clocks.get(track.member.participant).offset.into()).collect();
        let mut see = |column: u64, positions: &[Option<usize>]| {
            if !positions.iter().all(Option::is_some) {
                return;
            }
            last_full = Some(column);
            if whole {
                times.clear();
                kinds.clear();
                durations.clear();
                for ((track, offset), position) in tracks.iter().zip(&offsets).zip(positions.iter().flatten())
                {
                    times.push(i128::from(track.time(*position).0) + offset);
                    kinds.push(track.kind_id(*position));
                    // They count where all have one.
                    if durations.len() + 1 == times.len() {
                        durations.extend(track.on_gpu(*position));
                    }
                }
                tally.add(column, &times, &kinds);
                let op = tracks[0].kind(positions[0].unwrap_or_default()).map(|kind| kind.signature.op);
                if let Some(op) = op.filter(|_| durations.len() == tracks.len()) {
                    on_gpu.add(column, &durations, &kinds, gpu::Tally::compares(op));
                }
            }
        };
        let signatures = std::mem::take(&mut self.names.signatures);
        let op = |call: u32| signatures.values.get(call as usize).map(|signature| signature.op);
        let alignment = align::align(&tracks, &|a, b| op(a) == op(b), &mut see);
        self.names.signatures = signatures;
        let n_compared = |track: &Calls<'_>| track.n_calls().saturating_sub(track.from) as u64;
        self.done.n_calls += tracks.iter().map(n_compared).sum::<u64>();
        if let Some(window) = &mut self.done.window {
            window.lane(&self.job.communicators[idx].label, lane, alignment.start);
        }
        self.differences(idx, lane, &tracks, &alignment, last_full);
        self.waits.lane(idx, lane, &tracks, &alignment);
        if whole {
            self.arrivals(idx, &tracks, &tally, &on_gpu);
        }
    }

    /// What the GPUs say of the collectives of a communicator.
    fn arrivals_on_gpu(&mut self, idx: usize, tracks: &[Calls<'_>], tally: &gpu::Tally) {
        let ranks: Vec<u32> = tracks.iter().map(|track| self.job.rank(track.member)).collect();
        let kind = |track: usize, kind: u32| {
            let track = &tracks[track];
            let participant = &self.participants[track.member.participant];
            let kind = track.membership.kinds.get(kind as usize);
            kind.map_or_else(Default::default, |kind| {
                (kind.signature.to_string(), Place::of(participant, kind.place))
            })
        };
        let communicator = &self.job.communicators[idx].label;
        let mut report = self.done.gpu.take().unwrap_or_default();
        let rows = tally.report(&gpu::Naming { communicator, ranks: &ranks, kind: &kind }, &mut report);
        self.done.gpu = Some(report);
        for row in rows.iter().filter(|row| row.is_straggler) {
            self.done.findings.push(straggler_on_gpu(row));
        }
    }

    /// What was to be measured, and what was not.
    fn measured(&mut self) {
        let mut seen = FxHashSet::default();
        let mut ranks = vec![];
        for actor in &self.job.actors {
            let participant = &self.participants[actor.participant];
            if participant.gpu_timed == GpuTimed::default() || !seen.insert(actor.participant) {
                continue;
            }
            let first_unfinished = participant.unfinished.as_ref().map(|call| {
                let label = |idx: usize| {
                    let is_it =
                        |member: Member| (member.participant, member.membership) == (actor.participant, idx);
                    let mut joined = self.job.communicators.iter();
                    let found = joined.find(|joined| joined.all().any(|(_, member)| is_it(member)));
                    found.map_or_else(String::new, |joined| joined.label.clone())
                };
                Unfinished {
                    communicator: call.spot.map_or_else(String::new, |(idx, ..)| label(idx)),
                    sequence: call.spot.map(|(.., sequence)| sequence),
                    order: call.spot.map(|(_, lane, _)| lane.name()),
                    operation: call.op.name(),
                    place: Place::of(participant, call.place),
                }
            });
            ranks.push(GpuRank { rank: actor.rank, timed: participant.gpu_timed, first_unfinished });
        }
        match &mut self.done.gpu {
            _ if ranks.is_empty() => self.done.gpu = None,
            Some(report) => report.ranks = ranks,
            None => self.done.gpu = Some(GpuReport { ranks, ..GpuReport::default() }),
        }
    }

    fn arrivals(&mut self, idx: usize, tracks: &[Calls<'_>], tally: &Tally, on_gpu: &gpu::Tally) {
        self.arrivals_on_gpu(idx, tracks, on_gpu);
        let ranks: Vec<u32> = tracks.iter().map(|track| self.job.rank(track.member)).collect();
        let place = |track: usize, kind: u32| {
            let track = &tracks[track];
            let kind = track.membership.kinds.get(kind as usize)?;
            Place::of(&self.participants[track.member.participant], kind.place)
        };
        let communicator = &self.job.communicators[idx].label;
        let rows = tally.rows(&Naming { communicator, ranks: &ranks, place: &place });
        let habits = tally.habits();
        // What the GPUs say is better evidence than what the hosts do.
        for habit in habits.iter().filter(|_| !on_gpu.is_enough()) {
            let rank = ranks[habit.track];
            if !habit.is_clear {
                let place =
                    place(habit.track, habit.kind).map_or_else(String::new, |at| format!(" ({})", at.text));
                self.done.notes.push(format!(
                    "rank {rank} comes after every other rank, typically by {}, {} of {} times on {communicator}{place}. It may be late each time, or it was late once and the others never waited for it. Host clocks cannot distinguish the two; gputrace record --nccl-timing measures the GPUs",
                    super::show::nanos(habit.typical),
                    habit.late,
                    habit.occurrences,
                ));
                continue;
            }
            let finding = straggler(
                rank,
                (communicator, None),
                (habit.late, &place(habit.track, habit.kind)),
                |place| {
                    format!(
                        "rank {rank} is repeatedly late on {communicator}: {} of {} times it comes after every other rank, typically by {}, and not because it was late before{place}; that is {:.0} % of the time of these calls. Weak evidence: these are host clocks, and a busy host looks the same; gputrace record --nccl-timing measures the GPUs",
                        habit.late,
                        habit.occurrences,
                        super::show::nanos(habit.typical),
                        habit.share * 100.0,
                    )
                },
            );
            self.done.findings.push(finding);
        }
        for (track, late, sequence, kind) in tally.late_once() {
            if habits.iter().all(|habit| habit.track != track || !habit.is_clear) {
                let place = place(track, kind).map_or_else(String::new, |place| format!(", {}", place.text));
                self.done.notes.push(format!(
                    "rank {} was late once: all others waited {} for it in call {sequence} on {communicator}{place}",
                    ranks[track],
                    super::show::nanos(late),
                ));
            }
        }
        self.done.arrivals.extend(rows);
    }

    /// Turns differences into findings: those of one column that are alike into one, and those that repeat into one.
    fn differences(
        &mut self,
        idx: usize,
        lane: Lane,
        tracks: &[Calls<'_>],
        alignment: &Alignment,
        last_full: Option<u64>,
    ) {
        let runs = runs(&alignment.differences, tracks);
        let token = |spot: Option<Spot>| spot.map(|spot| tracks[spot.track].token(spot.position));
        // Who differs in each column, and the most that do so alike.
        let mut sides: BTreeMap<u64, (Vec<usize>, usize)> = BTreeMap::new();
        for run in &runs {
            let (differ, most) = sides.entry(run.column).or_default();
            differ.extend(&run.tracks);
            *most = run.tracks.len().max(*most);
        }
        type Repeated<'r> = (align::Kind, &'r [Token], Option<Token>, &'r [usize]);
        let mut known: FxHashMap<Repeated<'_>, usize> = FxHashMap::default();
        for run in &runs {
            let first = &run.differences[0];
            let repeated = (run.kind, run.tokens.as_slice(), token(first.majority), run.tracks.as_slice());
            if let Some(finding) = known.get(&repeated) {
                self.done.findings[*finding].count += 1;
                continue;
            }
            known.insert(repeated, self.done.findings.len());
            let (differ, most) = &sides[&run.column];
            let agrees = |track: &usize| alignment.reached[*track] > run.column && !differ.contains(track);
            // As many do something else alike, or more: which side is right is not known.
            let tie: Option<Vec<usize>> =
                (first.n_agree <= *most).then(|| (0..tracks.len()).filter(agrees).collect());
            let finding = self.difference(idx, lane, tracks, run, tie);
            self.done.findings.push(finding);
            // After this column there is none in which all made a call.
            if last_full.is_none_or(|last| last <= run.column) {
                self.waits.mismatch(idx, lane, tracks, run.column, &run.tracks, first.majority);
            }
        }
        if alignment.n_more > 0 {
            self.done.notes.push(format!(
                "{} more differences on {} are not shown",
                alignment.n_more, self.job.communicators[idx].label
            ));
        }
    }

    fn difference(
        &mut self,
        idx: usize,
        lane: Lane,
        tracks: &[Calls<'_>],
        run: &Run,
        tie: Option<Vec<usize>>,
    ) -> Finding {
        let (difference, who) = (&run.differences[0], &run.tracks);
        let label = &self.job.communicators[idx].label;
        let kind_at = |spot: Option<Spot>| spot.and_then(|spot| tracks[spot.track].kind(spot.position));
        let text_at =
            |spot: Option<Spot>| spot.and_then(|spot| self.call_text(&tracks[spot.track], spot.position));
        let (own, others) = (text_at(difference.own), text_at(difference.majority));
        let kind = match difference.kind {
            align::Kind::Missing => Kind::MissingCall,
            align::Kind::Extra => Kind::ExtraCall,
            align::Kind::Swapped => Kind::SwappedCalls,
            align::Kind::Changed => match (kind_at(difference.own), kind_at(difference.majority)) {
                (Some(own), Some(model)) => changed(tracks, difference, own, model),
                _ => Kind::OpMismatch,
            },
        };
        // One call that stands for several: how many others did not make, where nothing that came later tells.
        let error = self.caught(tracks, run).or_else(|| window::may_be_older(tracks, difference));
        let (kind, mut n_calls) = match difference.kind {
            align::Kind::Changed => unpaired(tracks, difference, kind, error.is_some()),
            align::Kind::Missing | align::Kind::Extra | align::Kind::Swapped => {
                (kind, run.tokens.len() as u64)
            }
        };
        let mut ranks: Vec<u32> = who.iter().map(|track| self.job.rank(tracks[*track].member)).collect();
        let own_text = own.as_ref().map_or_else(String::new, CallText::text);
        let others_text = others.as_ref().map_or_else(String::new, CallText::text);
        let sequence = difference.majority.map_or(difference.column, |spot| spot.position as u64);
        let names = rank_names(&ranks);
        let on = if label == "world" { String::new() } else { format!(" on {label}") };
        let the_others = match &tie {
            None => "the others".to_owned(),
            Some(agree) => {
                let mut others: Vec<u32> =
                    agree.iter().map(|track| self.job.rank(tracks[*track].member)).collect();
                others.sort_unstable();
                rank_names(&others)
            }
        };
        let text = match kind {
            Kind::MissingCall if n_calls > 1 && run.tokens.len() > 1 => format!(
                "{names} did not make {n_calls} calls{on} that {the_others} made, {}{}",
                self.listed(tracks, run),
                own.as_ref().map_or_else(String::new, |_| format!(", and continued with {own_text}"))
            ),
            Kind::MissingCall if n_calls > 1 => format!(
                "{names} continued with {own_text}{on} where {the_others} called {others_text}, and made {n_calls} fewer calls"
            ),
            Kind::ExtraCall if n_calls > 1 && run.tokens.len() == 1 => format!(
                "{names} called {own_text}{on} where {the_others} called {others_text}, and made at least {n_calls} extra calls"
            ),
            Kind::ExtraCall if n_calls > 1 => format!(
                "{names} made {n_calls} calls{on} that {the_others} did not, {}; they called {others_text}",
                self.listed(tracks, run)
            ),
            Kind::MissingCall if own.is_some() => {
                format!(
                    "{names} did not call {others_text}{on}, as {the_others} did, and continued with {own_text}"
                )
            }
            Kind::MissingCall => format!("{names} did not call {others_text}{on}, as {the_others} did"),
            Kind::ExtraCall => {
                format!(
                    "{names} called {own_text}{on}, which {the_others} did not; they called {others_text}"
                )
            }
            Kind::SwappedCalls => format!(
                "{names} called {own_text}{on} before {others_text}, which {the_others} called first: two calls in the opposite order"
            ),
            _ => format!("{names} called {own_text}{on} where {the_others} called {others_text}"),
        };
        let undecided = tie.is_some();
        let text = match undecided {
            true => {
                format!("{text}; neither side has more ranks, so the wrong one cannot be determined")
            }
            false => text,
        };
        let text = error.map_or_else(|| text.clone(), |error| format!("{text}. {error}"));
        ranks.sort_unstable();
        n_calls = n_calls.max(1);
        let mut finding = Finding::new(kind, Severity::Error, ranks).on(label, lane, sequence);
        finding.calls = n_calls;
        (finding.own, finding.others, finding.undecided, finding.text) = (own, others, undecided, text);
        finding
    }

    /// The calls of a run, those that are alike together: `3 times broadcast(16 float32, root 0) at step (train.py:60)`.
    fn listed(&self, tracks: &[Calls<'_>], run: &Run) -> String {
        let spot = |difference: &Difference| match difference.kind {
            align::Kind::Missing => difference.majority,
            align::Kind::Changed | align::Kind::Extra | align::Kind::Swapped => difference.own,
        };
        let spots = run.differences.iter().filter_map(spot);
        let texts = spots.filter_map(|spot| Some(self.call_text(&tracks[spot.track], spot.position)?.text()));
        let mut kinds: Vec<(String, u64)> = vec![];
        for text in texts {
            match kinds.iter_mut().find(|(known, _)| *known == text) {
                Some((_, n)) => *n += 1,
                None => kinds.push((text, 1)),
            }
        }
        let n_more = kinds.len().saturating_sub(LISTED);
        let listed = kinds.into_iter().take(LISTED);
        let listed = listed.map(|(text, n)| if n > 1 { format!("{n} times {text}") } else { text });
        let more = (n_more > 0).then(|| format!("{n_more} more kinds of calls"));
        listed.chain(more).collect::<Vec<_>>().join("; ")
    }

    /// What went wrong on the one rank of a difference before it, and was caught there: the newest of its errors, in a sentence.
    fn caught(&self, tracks: &[Calls<'_>], run: &Run) -> Option<String> {
        let [track] = run.tracks[..] else { return None };
        let calls = &tracks[track];
        let participant = &self.participants[calls.member.participant];
        let until = run.differences[0].own.map_or(participant.end, |own| calls.time(own.position));
        let is_before = |seen: &&LastSeen| seen.time < until;
        let oom = participant.ooms.iter().rev().find(is_before);
        let failed = participant.failed_calls.iter().rev().find(|failed| failed.time < until);
        let rank = self.job.rank(calls.member);
        let (time, what, place) = match (oom, failed) {
            (Some(oom), failed) if failed.is_none_or(|failed| failed.time < oom.time) => {
                (oom.time, format!("ran {}", oom.what), oom.place)
            }
            (_, Some(failed)) => (failed.time, format!("caught a failure of {}", failed.op), failed.place),
            (_, None) => return None,
        };
        let n_known = |sequence: &Sequence| sequence.enters.partition_point(|enter| *enter < time);
        let n_before = calls.sequence.map_or(0, |sequence| sequence.start() + n_known(sequence));
        let at =
            Place::of(participant, place).map_or_else(String::new, |place| format!(" at {}", place.text));
        Some(format!(
            "Rank {rank} {what}{at}, {} before, after {n_before} of its calls there, and continued. It probably skipped calls then; identical calls hid that until here",
            super::show::nanos(i64::try_from(until.0 - time.0).unwrap_or(i64::MAX)),
        ))
    }

    /// Sends and receives between each two ranks of a communicator.
    fn peers(&mut self, idx: usize) {
        let joined = &self.job.communicators[idx];
        let mut pairs: FxHashSet<(u32, u32)> = FxHashSet::default();
        for (rank, member) in joined.all() {
            let membership = &self.participants[member.participant].memberships[member.membership];
            for lane in membership.lanes.keys() {
                match lane {
                    Lane::Send(peer) => pairs.extend(u32::try_from(*peer).ok().map(|peer| (rank, peer))),
                    Lane::Receive(peer) => pairs.extend(u32::try_from(*peer).ok().map(|peer| (peer, rank))),
                    Lane::Collective | Lane::Management | Lane::OneSided => {}
                }
            }
        }
        let mut pairs: Vec<_> = pairs.into_iter().collect();
        pairs.sort_unstable();
        for (from, to) in pairs {
            self.pair(idx, from, to);
        }
    }

    fn pair(&mut self, idx: usize, from: u32, to: u32) {
        let joined = &self.job.communicators[idx];
        let (Some(sender), Some(receiver)) = (joined.members.get(&from), joined.members.get(&to)) else {
            return;
        };
        let side = |member: &Member, lane: Lane| {
            let membership = &self.participants[member.participant].memberships[member.membership];
            (membership, membership.lane(lane))
        };
        let (send_side, sends) = side(sender, Lane::Send(to as i32));
        let (receive_side, receives) = side(receiver, Lane::Receive(from as i32));
        let n = |sequence: Option<&Sequence>| sequence.map_or(0, Sequence::len);
        let start = |sequence: Option<&Sequence>| sequence.map_or(0, Sequence::start);
        let from_call = start(sends).max(start(receives));
        let n_compared = n(sends).saturating_sub(from_call) + n(receives).saturating_sub(from_call);
        self.done.n_calls += n_compared as u64;
        let common = n(sends).min(n(receives));
        let bytes = |membership: &Membership, sequence: Option<&Sequence>, position: usize| {
            membership.kinds.get(sequence?.kind(position)? as usize)?.signature.bytes()
        };
        let differs = |position: &usize| {
            let (sent, wanted) =
                (bytes(send_side, sends, *position), bytes(receive_side, receives, *position));
            sent.is_some() && wanted.is_some() && sent != wanted
        };
        let mut different = (from_call..common).filter(differs);
        if let Some(first) = different.next() {
            let count = 1 + different.count() as u64;
            let (from, to) = (self.job.rank(*sender), self.job.rank(*receiver));
            let call = |member: &Member, lane: Lane| {
                let participant = &self.participants[member.participant];
                let (kind, time) = participant.memberships[member.membership].call(lane, first)?;
                Some(CallText::of(self.job.rank(*member), participant, &kind, time))
            };
            let (lane, other) =
                (Lane::Send(receiver_rank(joined, *receiver)), Lane::Receive(receiver_rank(joined, *sender)));
            let (own, others) = (call(sender, lane), call(receiver, other));
            let mut finding = Finding::new(Kind::PeerSizeMismatch, Severity::Error, vec![from, to]).on(
                &joined.label,
                lane,
                first as u64,
            );
            finding.count = count;
            let text = |call: &Option<CallText>| call.as_ref().map_or_else(String::new, CallText::text);
            finding.text =
                format!("rank {from} called {} to rank {to}, which called {}", text(&own), text(&others));
            (finding.own, finding.others) = (own, others);
            self.done.findings.push(finding);
        }
        match n(sends).cmp(&n(receives)) {
            std::cmp::Ordering::Equal => {}
            std::cmp::Ordering::Greater => {
                self.waits.peer(idx, *sender, Lane::Send(to as i32), common, *receiver)
            }
            std::cmp::Ordering::Less => {
                self.waits.peer(idx, *receiver, Lane::Receive(from as i32), common, *sender)
            }
        }
    }

    /// Pairs of communicators whose calls two ranks made in different orders. NCCL needs one order: on the GPU one may keep the other
    /// from ever starting.
    fn inversions(&mut self) {
        let mut by_actor: FxHashMap<usize, Vec<(usize, Member)>> = FxHashMap::default();
        for (idx, joined) in self.job.communicators.iter().enumerate() {
            for (_, member) in joined.all() {
                if let Some(actor) = self.job.actor(member) {
                    by_actor.entry(actor).or_default().push((idx, member));
                }
            }
        }
        let mut pairs: BTreeMap<(usize, usize), Vec<(Member, Member)>> = BTreeMap::new();
        let mut actors: Vec<_> = by_actor.into_iter().collect();
        actors.sort_by_key(|(actor, _)| *actor);
        for (_, communicators) in actors {
            for (n, (a, first)) in communicators.iter().enumerate() {
                for (b, second) in &communicators[n + 1..] {
                    pairs.entry((*a, *b)).or_default().push((*first, *second));
                }
            }
        }
        for ((a, b), members) in pairs {
            if members.len() > 1 {
                self.inversion(a, b, &members);
            }
        }
    }

    fn inversion(&mut self, a: usize, b: usize, members: &[(Member, Member)]) {
        let sequence = |member: Member| {
            let membership = &self.participants[member.participant].memberships[member.membership];
            membership.lane(Lane::Collective)
        };
        // Only calls that all of them know are counted.
        let start = |member: Member| sequence(member).map_or(0, Sequence::start);
        let from_a = members.iter().map(|(a, _)| start(*a)).max().unwrap_or(0);
        let from_b = members.iter().map(|(_, b)| start(*b)).max().unwrap_or(0);
        let enters = |member: Member, from: usize| {
            sequence(member).map_or(&[][..], |sequence| {
                sequence.enters.get(from - sequence.start()..).unwrap_or_default()
            })
        };
        let orders: Vec<(&[Nanos], &[Nanos])> =
            members.iter().map(|(a, b)| (enters(*a, from_a), enters(*b, from_b))).collect();
        let n_a = orders.iter().map(|(a, _)| a.len()).min().unwrap_or(0);
        let n_b = orders.iter().map(|(_, b)| b.len()).min().unwrap_or(0);
        let model = n_before(orders[0], n_a, n_b);
        for (who, order) in orders.iter().enumerate().skip(1) {
            let other = n_before(*order, n_a, n_b);
            let mut different = other.iter().copied().enumerate().filter(|(k, n)| model[*k] != *n);
            let Some((k, n)) = different.next() else { continue };
            let count = 1 + different.count() as u64;
            let (early, j) = (n > model[k], from_b + n.min(model[k]));
            let k = from_a + k;
            let (first, second) = (self.job.rank(members[0].0), self.job.rank(members[who].0));
            let (a, b) = (&self.job.communicators[a].label, &self.job.communicators[b].label);
            let mut finding = Finding::new(Kind::OrderInversion, Severity::Warning, vec![first, second]).on(
                a,
                Lane::Collective,
                k as u64,
            );
            finding.count = count;
            let (early, late) = if early { (second, first) } else { (first, second) };
            let call = |member: Member, position: usize| {
                let participant = &self.participants[member.participant];
                let (kind, time) =
                    participant.memberships[member.membership].call(Lane::Collective, position)?;
                Some(CallText::of(self.job.rank(member), participant, &kind, time))
            };
            finding.own = call(members[who].0, k);
            finding.others = call(members[who].1, j);
            finding.text = format!(
                "rank {early} called collective {j} on {b} before collective {k} on {a}, rank {late} after it: NCCL requires one order on all ranks unless the GPU can run both at once"
            );
            self.done.findings.push(finding);
            return;
        }
    }

    fn finish(self) -> Diagnosis {
        let Doctor { waits, mut done, participants, job, .. } = self;
        let (findings, standings) = waits.resolve(&mut done.findings);
        done.findings.extend(findings);
        done.standings = standings;
        done.findings.extend(stopped(participants, job));
        done.notes.extend(window::notes(participants, job, done.window.as_ref()));
        all_wait(participants, job, &mut done);
        done.findings.sort_by_key(|finding| (finding.severity, is_consequence(finding.kind)));
        done
    }
}

/// Ranks whose recorders, or machines, ended while others went on.
fn stopped(participants: &[Participant], job: &Job) -> Vec<Finding> {
    let mut findings = vec![];
    for actor in &job.actors {
        let Some(silent) = live::stopped_before(&participants[actor.participant], participants) else {
            continue;
        };
        let mut finding = Finding::new(Kind::TraceStops, Severity::Warning, vec![actor.rank]);
        let why = match participants[actor.participant].recorder_is_late {
            true => {
                "its recorder has written nothing since, so the machine is overloaded or the recorder is stopped"
            }
            false => "its recorder or its machine ended",
        };
        finding.text = format!(
            "the trace of rank {} stops {} before the others: {why}. It is not known what the rank did since, or whether it still runs",
            actor.rank,
            super::show::nanos(i64::try_from(silent).unwrap_or(i64::MAX)),
        );
        findings.push(finding);
    }
    findings
}

/// Nothing is wrong with who called what, and yet nothing happened for long: the wait is for a rank without a trace, on the GPU, or
/// outside of NCCL. Orders that differ are then the likely reason.
fn all_wait(participants: &[Participant], job: &Job, done: &mut Diagnosis) {
    let is_wrong = done.findings.iter().any(|finding| {
        finding.severity == Severity::Error || (finding.kind.is_wait() && !finding.waiting.is_empty())
    });
    let idle = idle(participants, job).filter(|least| !is_wrong && *least >= LEAST_IDLE);
    let missing = job.missing();
    let is_named = |rank: &u32| done.findings.iter().any(|finding| finding.ranks.contains(rank));
    if !missing.iter().all(is_named) {
        done.findings.push(no_trace(participants, job, &missing, idle));
    }
    let Some(least) = idle else { return };
    let mut likely = false;
    for finding in done.findings.iter_mut().filter(|finding| finding.kind == Kind::OrderInversion) {
        finding.severity = Severity::Error;
        finding.text += "; all ranks wait, and this is the likely reason";
        likely = true;
    }
    // The finding about those without a trace says it.
    if missing.is_empty() && !likely {
        let ago = super::show::nanos(least as i64);
        let mut counts = job.communicators.iter().map(|joined| (joined, joined.collectives(participants)));
        let uneven = counts.find(|(_, (most, fewest))| most != fewest);
        done.notes.push(match uneven {
            Some((joined, (most, fewest))) => format!(
                "no rank did anything in the last {ago}. On {}, a rank has made {fewest} calls and another {most}: a rank may be late",
                joined.label
            ),
            None => format!(
                "all ranks made the same calls, and none did anything in the last {ago}: they may wait for the GPU, the network, or something outside NCCL. The traces do not show which"
            ),
        });
    }
}

/// For how long no rank has done anything, if all of them are still there.
fn idle(participants: &[Participant], job: &Job) -> Option<u64> {
    let idle = job.actors.iter().map(|actor| {
        let participant = &participants[actor.participant];
        let last = participant.last_event.as_ref().or(participant.last_call.as_ref())?;
        let waits = participant.ending != Ending::Exit && !participant.memberships.is_empty();
        waits.then(|| participant.end.0.saturating_sub(last.time.0))
    });
    idle.collect::<Option<Vec<u64>>>().and_then(|idle| idle.into_iter().min())
}

/// Ranks without a trace. If all others wait and nothing else explains it, it may be for these.
fn no_trace(participants: &[Participant], job: &Job, missing: &[u32], idle: Option<u64>) -> Finding {
    let mut finding = Finding::new(Kind::NoTrace, Severity::Warning, missing.to_vec());
    let names = rank_names(missing);
    let (have, they, them) = if missing.len() == 1 { ("has", "it", "it") } else { ("have", "they", "them") };
    let Some(idle) = idle else {
        finding.text = format!(
            "{names} of {} {have} no trace: it is not known what {they} called, and who waits for {them}",
            job.n_ranks
        );
        return finding;
    };
    let others: Vec<u32> = job.actors.iter().map(|actor| actor.rank).collect();
    let last = job.actors.iter().filter_map(|actor| {
        let participant = &participants[actor.participant];
        let last = participant.last_call.as_ref()?;
        let place = Place::of(participant, last.place);
        Some(CallText { rank: actor.rank, call: last.what.clone(), place, time_ns: last.time.0 })
    });
    finding.others = last.max_by_key(|call| call.time_ns);
    finding.waiting = others;
    finding.text = format!(
        "the calls of {} match, and none of these ranks did anything in the last {}{}. {} {have} no trace, and the others may wait for that. It may also be the GPU, the network, or something outside NCCL. The trace of {names} would decide",
        rank_names(&finding.waiting),
        super::show::nanos(idle as i64),
        finding.others.as_ref().map_or_else(String::new, |call| format!(", after {}", call.text())),
        super::show::capital(&names),
    );
    finding
}

/// For each of the first `n_a` calls, how many of the first `n_b` of the other communicator came before it.
pub(super) fn n_before((a, b): (&[Nanos], &[Nanos]), n_a: usize, n_b: usize) -> Vec<usize> {
    let mut n = 0;
    let count = |k: usize| {
        while n < n_b && b[n] < a[k] {
            n += 1;
        }
        n
    };
    (0..n_a).map(count).collect()
}

/// Shown behind what may have caused it.
fn is_consequence(kind: Kind) -> bool {
    matches!(kind, Kind::AsyncError | Kind::FailedCall | Kind::Abort)
}

fn receiver_rank(joined: &super::jobs::Joined, member: Member) -> i32 {
    joined.all().find(|(_, other)| *other == member).map_or(-1, |(rank, _)| rank as i32)
}

fn made_by(rank: u32, participant: &Participant, membership: &Membership) -> Option<CallText> {
    let call = membership.facts.origin?.to_string();
    let place = Place::of(participant, membership.place);
    Some(CallText { rank, call, place, time_ns: membership.created.0.unwrap_or_default().0 })
}
