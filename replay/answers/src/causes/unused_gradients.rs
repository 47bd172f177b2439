//! Layers that are frozen in the program's mind only: autograd keeps their activations and makes gradients that no optimizer uses.

use super::facts::called_at;
use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_schemas::event::Bytes;
use gputrace_trace::words::{bytes, count};

pub(super) const CAUSE: Cause = Cause {
    name: "gradients that no optimizer uses",
    kind: Kind::Spare,
    needs: "half of the parameters' gradients have sizes for which an optimizer made no state, while it did for all other sizes, and later steps make them, too",
    against: "optimizers without state, or with state of other sizes (8-bit, factored); parameters that are frozen; gradients of gradients",
    find: |facts| find(facts, false),
};

/// The same where nothing frees them, either.
pub(super) const KEPT: Cause = Cause {
    name: "gradients that no optimizer uses or frees",
    kind: Kind::Peak,
    needs: "gradients that no optimizer uses, made once in several backward passes, while those with state are freed and created again",
    against: "`zero_grad` of the model, which frees all",
    find: |facts| find(facts, true),
};

fn find(facts: &Facts<'_>, is_kept: bool) -> Option<Case> {
    if !facts.growing().is_empty() || facts.recovered.is_some() {
        return None;
    }
    let held = facts.held?;
    let found = facts.sets(held.device)?.unused_gradients.as_ref().filter(|it| it.is_kept == is_kept)?;
    let sum = Bytes(found.gradients.0.saturating_add(found.activations.0).min(held.bytes.0));
    let activations = match found.activations.0 {
        0 => String::new(),
        _ => format!(", and their layers keep {} of activations for that", bytes(found.activations)),
    };
    let gradients = format!("gradients of {} ({} blocks)", bytes(found.gradients), count(found.blocks));
    let made = match is_kept {
        true => format!("{gradients} were created once and held through all later backward passes,"),
        false => format!("each step makes {gradients}"),
    };
    let holder = facts.holders().find(|holder| holder.site == found.site);
    facts.is_much(sum).then(|| Case {
        what: format!(
            "{made} for parameters of which no optimizer has state{activations}: they look frozen, and still require gradients"
        ),
        site: called_at(&facts.site(found.site), holder),
        bytes: sum,
        sure: match is_kept {
            true => "likely: the optimizer keeps state for parameters of all other sizes, and only their gradients are freed and created again".into(),
            false => "likely: the optimizer keeps state for parameters of all other sizes".into(),
        },
        fix: Fix::words(
            "call `requires_grad_(False)` on the layers that are not trained, or run them under `torch.no_grad()`: `eval()` does not stop autograd",
            format!("the peak is up to {} lower", bytes(sum)),
        ),
        verb: "report --peak",
    })
}
