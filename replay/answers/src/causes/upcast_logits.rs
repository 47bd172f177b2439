//! A copy in twice the width of what was just made: logits upcast to float32.

use gputrace_schemas::event::Bytes;

use super::activations_beyond_card::is_activation;
use super::{Case, Cause, Facts, Failure, Fix, Kind};
use gputrace_analyse::held::{Holder, Sign};
use gputrace_trace::ledger::SiteId;
use gputrace_trace::words::bytes;

/// PyTorch rounds large requests to so much.
const ROUNDED: u64 = 2 << 20;

pub(super) const CAUSE: Cause = Cause {
    name: "a large result upcast to float32 (logits)",
    kind: Kind::Peak,
    needs: "at the peak, two blocks of a model's code, together two fifths of the total, of which the later one is exactly twice as large; or a failed request of the same function that is exactly twice the newest such block",
    against: "smaller blocks, layers that have several of them, and a later block that a layer made",
    find: |facts| at_failure(facts).or_else(|| find(facts)),
};

/// Whether a model's code allocated it in this step.
fn is_of_step(facts: &Facts<'_>, holder: &Holder) -> bool {
    let is_step = is_activation(facts, holder)
        || matches!(facts.role(holder), "temporaries" | "activations of inference" | "activations");
    // Gradients of what is wide are wide, too.
    is_step && !holder.signs.has(Sign::Backward) && !holder.signs.has(Sign::Workspace)
}

/// Whether a line may have made a copy in another type: no layer made it. PyTorch's methods have no frame, and losses cast what they get.
fn may_cast(facts: &Facts<'_>, site: SiteId) -> bool {
    let Some(known) = facts.story.ledger.sites.site(site) else { return true };
    let inside = &known.inside;
    // Two tensors joined are twice as large, too.
    let text = facts.sources.text(&known.file, known.line);
    if text.is_some_and(|text| !CASTS.iter().any(|word| text.contains(word))) {
        return false;
    }
    let casts = |name: &str| ["float", "to", "type", "softmax", "log_softmax"].contains(&name);
    inside.is_empty()
        || inside.rsplit('.').next().is_some_and(casts)
        || inside.contains("loss")
        || inside.contains("cross_entropy")
}

/// One of these is in a statement that casts, or calls a loss that does.
const CASTS: [&str; 7] = ["float", "double", ".to(", ".type(", "softmax", "loss", "cross_entropy"];
const FIX: &str = "upcast only what you use (`logits[:, -1].float()`), compute only those logits, or use a loss that works in chunks";

/// The copy is the request that failed.
fn at_failure(facts: &Facts<'_>) -> Option<Case> {
    let Failure::Torch(_, error) = facts.failure? else { return None };
    let held = facts.held?;
    let asked = error.requested.unwrap_or(error.bytes);
    let file = |site| Some(facts.story.ledger.sites.site(site)?.file.clone());
    let is_large = |size: Bytes| size.0.saturating_mul(4) >= asked.0;
    let large = facts.holders().filter(|it| it.signs.has(Sign::Forward) && is_of_step(facts, it));
    let large = large.filter(|it| it.sizes.last_key_value().is_some_and(|(size, _)| is_large(*size)));
    let narrow = large.max_by_key(|it| it.since)?;
    let (size, n) = narrow.sizes.last_key_value().map(|(size, n)| (*size, *n))?;
    let both = Bytes(asked.0.saturating_add(size.0));
    // What a snapshot says of a request is rounded.
    let is_twice = asked.0.abs_diff(size.0.saturating_mul(2)) < ROUNDED && n == 1;
    let is_much = both.0.saturating_mul(5) >= held.bytes.0.saturating_add(asked.0).saturating_mul(2);
    let is_same_code = narrow.site != error.site && file(narrow.site) == file(error.site);
    let is_twice = is_twice && may_cast(facts, error.site);
    // A loss goes on with the copy: what fails may be what follows from it.
    let line = |site| facts.story.ledger.sites.site(site).map(|site| (&site.file, site.line));
    let is_copied = facts.holders().any(|holder| {
        let is_as_large = |size: &Bytes| size.0.abs_diff(asked.0) < ROUNDED;
        line(holder.site) == line(error.site)
            && holder.since >= narrow.since
            && holder.sizes.keys().any(is_as_large)
    });
    let copy = match is_copied {
        true => format!("the copy at twice the width, {}, is there, and this is as much again", bytes(asked)),
        false => "a copy at twice the width".to_owned(),
    };
    (is_twice && is_much && is_same_code).then(|| Case {
        what: format!(
            "the line below requests exactly twice the {} that {} has just allocated: {copy}",
            bytes(size),
            facts.site(narrow.site)
        ),
        site: facts.site(error.site),
        bytes: both,
        sure: "likely: the request is exactly twice as large, as with `.float()` of a 16-bit tensor".into(),
        fix: Fix::words(FIX, format!("the copy is {}", bytes(asked))),
        verb: "oom",
    })
}

fn find(facts: &Facts<'_>) -> Option<Case> {
    let held = facts.held?;
    let blocks = || {
        let step = facts.holders().filter(|holder| is_of_step(facts, holder));
        step.flat_map(|holder| holder.sizes.iter().map(move |(size, n)| (holder, *size, *n)))
    };
    let (wide, size, _) = blocks()
        .filter(|(_, size, n)| *n <= 2 && size.0.saturating_mul(4) >= held.bytes.0)
        .filter(|(holder, ..)| may_cast(facts, holder.site))
        .max_by_key(|(_, size, _)| *size)?;
    let (narrow, ..) = blocks().find(|(holder, half, n)| {
        half.0.checked_mul(2) == Some(size.0)
            && *n <= 2
            && holder.since <= wide.since
            && holder.site != wide.site
    })?;
    let both = Bytes(size.0 + size.0 / 2);
    (both.0.saturating_mul(5) >= held.bytes.0.saturating_mul(2)).then(|| Case {
        what: format!(
            "{} of the peak of {} are one result twice: {} from {}, and a copy at twice the width, {}, allocated here",
            bytes(both),
            bytes(held.bytes),
            bytes(Bytes(size.0 / 2)),
            facts.site(narrow.site),
            bytes(size)
        ),
        site: facts.site(wide.site),
        bytes: both,
        sure: "likely: the later block is exactly twice as large, as with `.float()` of a 16-bit tensor".into(),
        fix: Fix::words(
            FIX,
            format!("the copy is {}", bytes(size)),
        ),
        verb: "report --peak",
    })
}
