//! Results that a loop collects until it is over: outputs of a validation, logits joined at the end.

use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_analyse::piles::{Course, Pile};
use gputrace_schemas::event::Bytes;
use gputrace_trace::words::{bytes, count};

/// Fewer are a program's own few.
const LEAST_BLOCKS: u64 = 8;

pub(super) const CAUSE: Cause = Cause {
    name: "outputs collected on the GPU until the loop ends",
    kind: Kind::Kept,
    needs: "at the peak, blocks of one stack that a loop outside of any model made one by one, and that went all together",
    against: "layers of a model, what the backward pass gives back, and a ring that lets its oldest go",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    // What grows to the end is another cause.
    if !facts.growing().is_empty() {
        return None;
    }
    let held = facts.held?;
    let lasting = |pile: &Pile| {
        let names = facts.lifetimes.map_or(&[][..], |lifetimes| &lifetimes.role_names);
        names.get(usize::from(pile.role)).is_some_and(|(name, _)| {
            matches!(
                name.as_str(),
                "parameters" | "weights" | "gradients" | "optimizer state" | "activations" | "workspaces"
            )
        })
    };
    let collected = || {
        held.piles
            .iter()
            .filter(|pile| pile.course == Course::Collected && pile.blocks >= LEAST_BLOCKS && !lasting(pile))
    };
    let most = collected().next()?;
    let all = Bytes(collected().map(|pile| pile.bytes.0).sum());
    (all.0.saturating_mul(3) >= held.bytes.0 && facts.is_much(all)).then(|| Case {
        what: format!(
            "{} of the peak of {} are results that a loop collects: {} of them were made here one by one ({} each), and all go together at its end",
            bytes(all),
            bytes(held.bytes),
            count(most.blocks),
            bytes(Bytes(most.bytes.0 / most.blocks.max(1)))
        ),
        site: format!("{}, collected by {}", facts.site(most.site), most.looped_at),
        bytes: all,
        sure: "likely: none went while the loop ran, and other work was done between any two".into(),
        fix: Fix::words(
            "keep only what is needed of each: return the loss or a number (`.item()`), or move it at once (`.detach().cpu()`)",
            format!("the peak is about {} lower", bytes(all)),
        ),
        verb: "report --peak",
    })
}
