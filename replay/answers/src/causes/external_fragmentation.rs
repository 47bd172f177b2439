//! External fragmentation: what is free is in pieces that fit no request, as where sizes keep changing.

use gputrace_schemas::event::Bytes;
use gputrace_sim::ops::OpStream;
use gputrace_sim::policies::OptionError;
use gputrace_sim::policies::torch::{VARIABLES, variable_to_set};
use gputrace_sim::tune;
use gputrace_sim::whatif::{Confidence, Laboratory, Question};

use super::facts::device;
use super::{Case, Cause, Facts, Failure, Fix, Kind};
use crate::remedies::{AS_FAR_AS_RECORDED, Remedy, Verdict};
use gputrace_analyse::doubts;
use gputrace_report::model::Value;
use gputrace_report::sections::cache;
use gputrace_report::summary::used_devices;
use gputrace_trace::ledger::{SiteId, TorchBooks, Wall};
use gputrace_trace::words::{bytes, count};

/// Another setting is worth its name from this part of what was reserved on: one in so many.
const WORTHWHILE: u64 = 20;
/// The last of the requests: one in so many.
const LATE: u64 = 5;
/// Unused memory matters on a card with room from this part of it on: one in so many.
const MUCH: u64 = 16;
/// Unused memory is a fault beside growth from this part of what is reserved on: one in so many.
const BESIDE_GROWTH: u64 = 4;
/// A card has room for a reserve that stopped growing while at most this part of it was used at once: three quarters.
const ROOM: (u64, u64) = (3, 4);

pub(super) const CAUSE: Cause = Cause {
    name: "external fragmentation",
    kind: Kind::Wasted,
    needs: "segments that were allocated although as much memory was unused, to the end of the run, or until three quarters of the card were used or a request was refused; or a failed request that is served, with all before it, by the same memory under another setting",
    against: "free memory on streams that no later request uses; a reserve that stopped growing on a card with room; an option of the program's own setting without which it fits",
    find: |facts| {
        at_failure(facts)
            .or_else(|| in_pieces(facts))
            .or_else(|| Some(found(facts).filter(|(_, has_room)| !has_room)?.0.clone()))
    },
};

/// The same on a card with room for it: PyTorch gives wholly free segments back before it fails.
pub(super) const WITH_ROOM: Cause = Cause {
    name: "external fragmentation, with room on the card",
    kind: Kind::Spare,
    needs: "segments that were allocated although as much memory was unused, to the end of the run; the unused part is less than a sixteenth of the card, and less than was in use",
    against: "a reserve that stopped growing",
    find: |facts| found(facts).filter(|(_, has_room)| *has_room).map(|(case, _)| case.clone()),
};

/// A request that failed although the same memory serves it, and all before it, under another setting.
fn at_failure(facts: &Facts<'_>) -> Option<Case> {
    let Failure::Torch(_, error) = facts.failure? else { return None };
    let (recorded, best) = facts.remedy().filter(|(_, best)| best.verdict == Verdict::Fits)?;
    let unused = Bytes(error.reserved.0.saturating_sub(error.allocated.0));
    // A setting only postpones what grows, and what needs nearly the whole card.
    let grown = facts.growing().iter().fold(0_u64, |sum, site| sum.saturating_add(site.growth.0));
    if grown >= unused.0 && !is_fault(facts)
        || !facts.fits_with_setting()
        || !facts.is_much(unused)
        || super::own_setting::at_failure(facts).is_some()
    {
        return None;
    }
    let (fix, sure) = setting(facts, Some(recorded), best);
    // Under a limit, what is free on the device does not matter.
    let free = error.device.filter(|_| error.wall() == Wall::Device);
    let free = free.map_or_else(String::new, |(free, _)| format!("; {} free on the device", bytes(free)));
    Some(Case {
        what: format!(
            "{} in use, {} more reserved in pieces that did not fit{free}",
            bytes(error.allocated),
            bytes(unused),
        ),
        site: facts.site(error.site),
        bytes: unused,
        sure,
        fix: Some(fix),
        verb: "oom",
    })
}

/// Whether as much lies unused as a failed request was for, and a good part of what is reserved: a fault of its own beside what grows.
fn is_fault(facts: &Facts<'_>) -> bool {
    let Some(Failure::Torch(_, error)) = facts.failure else { return false };
    let unused = error.reserved.0.saturating_sub(error.allocated.0);
    let asked = error.requested.unwrap_or(error.bytes);
    unused >= asked.0 && unused.saturating_mul(BESIDE_GROWTH) >= error.reserved.0
}

/// A request that failed with little in use, where most of what was reserved lay in pieces, and no setting is known to serve it: a replay also
/// has requests that failed before, and that the program could do without.
fn in_pieces(facts: &Facts<'_>) -> Option<Case> {
    let Failure::Torch(_, error) = facts.failure? else { return None };
    let unused = Bytes(error.reserved.0.saturating_sub(error.allocated.0));
    let asked = error.requested.unwrap_or(error.bytes);
    let needed = Bytes(error.allocated.0.saturating_add(asked.0));
    let is_most = is_fault(facts) && unused.0.saturating_mul(2) >= error.reserved.0;
    if !is_most || facts.remedy().is_some() || !facts.growing().is_empty() {
        return None;
    }
    Some(Case {
        what: format!(
            "only {} in use; {} more are reserved in pieces that did not fit: in one piece, {} would have been enough",
            bytes(error.allocated),
            bytes(unused),
            bytes(needed)
        ),
        site: facts.site(error.site),
        bytes: unused,
        sure: "certain of the pieces; a replay could not show whether a setting helps".into(),
        fix: Fix::words(
            "try `PYTORCH_ALLOC_CONF=expandable_segments:True`; `del` large tensors as early as possible, and pad batches to a few sizes",
            "",
        ),
        verb: "oom",
    })
}

/// A setting of the allocator that serves a request that failed, and how sure that is.
pub(crate) fn setting(facts: &Facts<'_>, recorded: Option<&Remedy>, best: &Remedy) -> (Fix, String) {
    let before = recorded
        .map_or_else(String::new, |recorded| format!(", and {} as recorded", bytes(recorded.peak_reserved)));
    // The step that failed has no end in the trace.
    let so_far = match best.verdict {
        Verdict::Fits => "fits so far",
        Verdict::Perhaps | Verdict::RunsOut => best.verdict.name(),
    };
    let how = match (best.verdict, best.confidence) {
        (Verdict::Fits, Confidence::Exact) => AS_FAR_AS_RECORDED,
        (_, confidence) => in_words(confidence),
    };
    let stream = facts.failure.and_then(|it| facts.stream_of(it.device()));
    let fix = Fix {
        what: command(stream, &best.options),
        worth: format!("{so_far}: needs {}{before}", bytes(best.peak_reserved)),
    };
    let n_requests = stream.map_or(0, OpStream::n_requests);
    (fix, format!("{how}: {} requests up to the error were replayed", count(n_requests as u64)))
}

/// The device of which most lies unused, its books, and the line that mostly requested what did not fit there.
pub(super) type Wasted<'a> = (i16, &'a TorchBooks, SiteId);

/// Where that grew to the end, or there is no room for it.
pub(super) fn wasted<'a>(facts: &Facts<'a>) -> Option<Wasted<'a>> {
    most_unused(facts).filter(|(ordinal, torch, _)| !is_settled(facts, *ordinal, torch))
}

/// Where there is room for it, and more lies unused than was in use.
pub(super) fn wasted_with_room<'a>(facts: &Facts<'a>) -> Option<Wasted<'a>> {
    most_unused(facts).filter(|(ordinal, torch, _)| {
        torch.reserved.peak.0 / 2 > torch.allocated.peak.0 && is_settled(facts, *ordinal, torch)
    })
}

fn most_unused<'a>(facts: &Facts<'a>) -> Option<Wasted<'a>> {
    // What a failed request needs is found by replaying the run up to it.
    if matches!(facts.failure, Some(Failure::Torch(..))) {
        return None;
    }
    let devices = cache::torches(facts.story).filter_map(|(ordinal, torch)| {
        let (site, _) = cache::misfit_sites(torch).first().copied()?;
        Some((ordinal, torch, site))
    });
    let unused = |torch: &TorchBooks| torch.reserved.peak.0.saturating_sub(torch.allocated.peak.0);
    let (ordinal, torch, site) = devices.max_by_key(|(_, torch, _)| unused(torch))?;
    let unused = unused(torch);
    // These are other causes.
    if super::record_stream::waiting(torch).is_some_and(|waiting| waiting.0 * 2 >= unused) {
        return None;
    }
    if super::streams_made_anew::stranded(facts, ordinal).is_some_and(|(bytes, _)| bytes.0 * 2 >= unused) {
        return None;
    }
    Some((ordinal, torch, site))
}

/// With whether the card has room for what lies unused.
fn found<'a>(facts: &'a Facts<'_>) -> Option<&'a (Case, bool)> {
    facts.fragmentation.get_or_init(|| find(facts)).as_ref()
}

fn find(facts: &Facts<'_>) -> Option<(Case, bool)> {
    let (ordinal, torch, site) = wasted(facts)?;
    let unused = torch.reserved.peak.0.saturating_sub(torch.allocated.peak.0);
    if super::own_setting::without_failure(facts).is_some() {
        return None;
    }
    let stream = facts.stream_of(ordinal);
    let advised = stream.and_then(|stream| setting_that_saves(stream, torch.reserved.peak));
    let (fix, sure) = match advised {
        Some((fix, sure)) => (Some(fix), sure),
        None => (None, "certain: PyTorch's own totals".to_owned()),
    };
    // As much again as is in use is a fault, whatever the card.
    let has_room = has_room(facts, ordinal, unused) && unused <= torch.allocated.peak.0;
    let case = Case {
        what: format!(
            "{}: PyTorch reserved up to {} for at most {} in use",
            device(ordinal),
            bytes(torch.reserved.peak),
            bytes(torch.allocated.peak)
        ),
        site: facts.site(site),
        bytes: Bytes(unused),
        sure,
        fix,
        verb: "tune",
    };
    Some((case, has_room))
}

fn has_room(facts: &Facts<'_>, ordinal: i16, unused: u64) -> bool {
    let total = facts.story.device(ordinal).map_or(0, |device| device.total.0);
    facts.failure.is_none() && unused.saturating_mul(MUCH) < total
}

/// What was reserved no longer grew, and the card has room for it: it costs nobody anything.
fn is_settled(facts: &Facts<'_>, ordinal: i16, torch: &TorchBooks) -> bool {
    let reserved = torch.reserved.peak.0;
    let late = torch.allocations - torch.allocations / LATE;
    let bought = torch.cache.misfits_over_time.iter().filter(|(at, _)| *at >= late).map(|(_, bytes)| bytes.0);
    let goes_on = bought.sum::<u64>().saturating_mul(WORTHWHILE) >= reserved;
    !goes_on && facts.failure.is_none() && was_never_full(facts, ordinal)
}

/// No request was refused, and a quarter of the device was free at any time.
fn was_never_full(facts: &Facts<'_>, ordinal: i16) -> bool {
    let total = facts.story.device(ordinal).map_or(0, |device| device.total.0);
    let mut books = used_devices(facts.story).filter(|(device, _)| *device == ordinal);
    let used = books.next().map_or(u64::MAX, |(_, books)| books.physical.peak().0);
    let is_refused = facts.story.ledger.refusals.iter().any(|refusal| refusal.device == ordinal);
    !is_refused && used.saturating_mul(ROOM.1) <= total.saturating_mul(ROOM.0)
}

/// The same in words, where it is so.
pub(crate) fn settled_in_words(facts: &Facts<'_>) -> Option<String> {
    let is_it = |(ordinal, torch): &(i16, &TorchBooks)| {
        !cache::misfit_sites(torch).is_empty() && is_settled(facts, *ordinal, torch)
    };
    let (_, torch) = cache::torches(facts.story).find(is_it)?;
    Some(format!(
        "PyTorch reserved up to {} for at most {} in use, and has stopped reserving more",
        bytes(torch.reserved.peak),
        bytes(torch.allocated.peak)
    ))
}

/// The setting that reserves least of those that people are advised to try, and how sure that is; none where it saves little.
/// `gputrace tune` tries more.
fn setting_that_saves(stream: &OpStream, recorded_peak: Bytes) -> Option<(Fix, String)> {
    let most = Bytes(recorded_peak.0.checked_sub(recorded_peak.0.div_ceil(WORTHWHILE).max(1))?);
    let found = best_setting(stream, most, tune::advised)?;
    let (before, after) = (bytes(recorded_peak), bytes(found.reserved));
    let worth = format!("reserves {after} instead of {before}");
    Some((Fix { what: command(Some(stream), &found.options), worth }, found.sure))
}

/// A setting that reserves less.
pub(super) struct Better {
    pub(super) options: String,
    /// At most.
    pub(super) reserved: Bytes,
    pub(super) sure: String,
}

/// The setting to try that reserves least, if that is at most so much; none where the replay of the recorded one is not what was recorded.
pub(super) fn best_setting(
    stream: &OpStream,
    most: Bytes,
    to_try: impl FnOnce((u8, u8), &str) -> Result<Vec<String>, OptionError>,
) -> Option<Better> {
    let laboratory = Laboratory::new(stream).ok()?;
    let check = laboratory.self_check(None);
    if doubts::doubt(stream, &check).is_some() {
        return None;
    }
    let recorded = stream.settings.options.clone().unwrap_or_default();
    let settings = to_try(check.torch_version, &recorded).ok()?;
    let others = settings.into_iter().filter(|options| *options != recorded);
    let questions: Vec<Question> =
        others.map(|options| Question::torch(check.torch_version, &options)).collect();
    let (chosen, best) = laboratory.least_reserving(&questions, most.0)?;
    let requests = count(stream.n_requests() as u64);
    Some(Better {
        options: questions[chosen].options.clone(),
        reserved: Bytes(best.peak_reserved_range.1),
        sure: format!("{}: the run's {requests} requests were replayed with it", in_words(best.confidence)),
    })
}

/// What sets the allocator so in another run of the same program.
pub(super) fn command(stream: Option<&OpStream>, options: &str) -> Value {
    let variable = stream.map_or(VARIABLES[0], |stream| variable_to_set(&stream.settings));
    Value::Command(match options {
        "" => format!("unset {variable}"),
        options => format!("export {variable}={options}"),
    })
}

pub(crate) fn in_words(confidence: Confidence) -> &'static str {
    match confidence {
        Confidence::Exact => "exact",
        Confidence::Interval => "likely (it depends on addresses that are not in the trace)",
        Confidence::Bound => "at best",
        Confidence::Guess => "a guess",
    }
}
