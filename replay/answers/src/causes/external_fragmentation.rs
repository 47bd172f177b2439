//! External fragmentation: what is free is in pieces that fit no request, as where sizes keep changing.

use gputrace_schemas::event::Bytes;
use gputrace_sim::ops::OpStream;
use gputrace_sim::tune;
use gputrace_sim::whatif::{Confidence, Laboratory, Question};

use super::facts::device;
use super::{Case, Cause, Facts, Failure, Fix, Kind};
use gputrace_analyse::doubts;
use gputrace_report::model::Value;
use gputrace_report::sections::cache;
use gputrace_trace::ledger::TorchBooks;
use gputrace_trace::words::{bytes, count};

/// Another setting is worth its name from this part of what was reserved on: one in so many.
const WORTHWHILE: u64 = 20;
/// The last of the requests: one in so many.
const LATE: u64 = 5;
/// Unused memory matters on a card with room from this part of it on: one in so many.
const MUCH: u64 = 16;

pub(super) const CAUSE: Cause = Cause {
    name: "external fragmentation",
    kind: Kind::Wasted,
    needs: "segments that were allocated although as much memory was unused, to the end of the run or until a sixteenth of the card was unused",
    against: "free memory on streams that no later request uses; a reserve that stopped growing on a card with room",
    find: |facts| find(facts).filter(|(_, has_room)| !has_room).map(|(case, _)| case),
};

/// The same on a card with room for it: PyTorch gives wholly free segments back before it fails.
pub(super) const WITH_ROOM: Cause = Cause {
    name: "external fragmentation, with room on the card",
    kind: Kind::Spare,
    needs: "segments that were allocated although as much memory was unused, to the end of the run; the unused part is less than a sixteenth of the card, and less than was in use",
    against: "a reserve that stopped growing",
    find: |facts| find(facts).filter(|(_, has_room)| *has_room).map(|(case, _)| case),
};

/// With whether the card has room for what lies unused.
fn find(facts: &Facts<'_>) -> Option<(Case, bool)> {
    // What a failed request needs is found by replaying the run up to it.
    if matches!(facts.failure, Some(Failure::Torch(..))) {
        return None;
    }
    let devices = cache::torches(facts.story).filter_map(|(ordinal, torch)| {
        let (site, _) = cache::misfit_sites(torch).first().copied()?;
        Some((ordinal, torch, site))
    });
    let (ordinal, torch, site) =
        devices.max_by_key(|(_, torch, _)| torch.reserved.peak.0.saturating_sub(torch.allocated.peak.0))?;
    let unused = torch.reserved.peak.0.saturating_sub(torch.allocated.peak.0);
    if is_settled(facts, ordinal, torch) {
        return None;
    }
    // These are other causes.
    if super::record_stream::waiting(torch).is_some_and(|waiting| waiting.0 * 2 >= unused) {
        return None;
    }
    if super::streams_made_anew::stranded(facts, ordinal).is_some_and(|(bytes, _)| bytes.0 * 2 >= unused) {
        return None;
    }
    let stream = facts.stream_of(ordinal);
    let (fix, sure) = match stream.and_then(|stream| setting_that_saves(stream, torch.reserved.peak)) {
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
    let unused = reserved.saturating_sub(torch.allocated.peak.0);
    let late = torch.allocations - torch.allocations / LATE;
    let bought = torch.cache.misfits_over_time.iter().filter(|(at, _)| *at >= late).map(|(_, bytes)| bytes.0);
    let goes_on = bought.sum::<u64>().saturating_mul(WORTHWHILE) >= reserved;
    !goes_on && has_room(facts, ordinal, unused)
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

/// The setting that reserves least of those that people are advised to try, and how sure that is; none where it saves little, or
/// where the replay of the recorded one is not what was recorded. `gputrace tune` tries more.
fn setting_that_saves(stream: &OpStream, recorded_peak: Bytes) -> Option<(Fix, String)> {
    let laboratory = Laboratory::new(stream).ok()?;
    let check = laboratory.self_check(None);
    if doubts::doubt(stream, &check).is_some() {
        return None;
    }
    let recorded = stream.settings.options.clone().unwrap_or_default();
    let settings = tune::advised(check.torch_version, &recorded).ok()?;
    let others = settings.into_iter().filter(|options| *options != recorded);
    let questions: Vec<Question> =
        others.map(|options| Question::torch(check.torch_version, &options)).collect();
    let most = recorded_peak.0.checked_sub(recorded_peak.0.div_ceil(WORTHWHILE).max(1))?;
    let (chosen, best) = laboratory.least_reserving(&questions, most)?;
    let options = &questions[chosen].options;
    let (before, after) = (bytes(recorded_peak), bytes(Bytes(best.peak_reserved_range.1)));
    let fix = Fix {
        what: Value::Command(format!("export PYTORCH_CUDA_ALLOC_CONF={options}")),
        worth: format!("reserves {after} instead of {before}"),
    };
    let requests = count(stream.n_requests() as u64);
    Some((fix, format!("{}: the run's {requests} requests were replayed with it", in_words(best.confidence))))
}

pub(crate) fn in_words(confidence: Confidence) -> &'static str {
    match confidence {
        Confidence::Exact => "exact",
        Confidence::Interval => "likely (it depends on addresses that are not in the trace)",
        Confidence::Bound => "at best",
        Confidence::Guess => "a guess",
    }
}
