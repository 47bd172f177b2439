//! Weights that stay on the GPU for a training run that does not use them: encoders whose outputs were computed before.

use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_schemas::event::Bytes;
use gputrace_trace::words::{bytes, time};

pub(super) const CAUSE: Cause = Cause {
    name: "weights that the training does not use",
    kind: Kind::Spare,
    needs: "sets of weights of which hardly any size has gradients, no more of them than models that ran before the first backward pass and never again; every model that still runs is matched by a set that is trained",
    against: "models without a class of their own, whose calls look alike; frozen models that each step runs",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    if !facts.growing().is_empty() || facts.recovered.is_some() {
        return None;
    }
    let idle = facts.sets(facts.held?.device)?.idle.as_ref()?;
    let sum = Bytes(idle.sets.iter().fold(0, |sum: u64, (_, bytes)| sum.saturating_add(bytes.0)));
    // One caller says nothing of which is which.
    let is_one =
        idle.sets.windows(2).all(|pair| super::outermost(&pair[0].0) == super::outermost(&pair[1].0));
    let line =
        |path: &'_ str| if is_one { super::innermost(path) } else { super::outermost(path) }.to_owned();
    let parts: Vec<String> =
        idle.sets.iter().map(|(path, part)| format!("{} at {}", bytes(*part), line(path))).collect();
    let parts = if parts.len() > 1 { format!(" ({})", parts.join(", ")) } else { String::new() };
    let functions: Vec<String> = idle.functions.iter().map(|it| format!("`{it}`")).collect();
    let (path, _) = idle.sets.first()?;
    facts.is_much(sum).then(|| Case {
        what: format!(
            "{} of weights{parts} lie idle since {}: the training makes no gradients for them, and {} never ran again",
            bytes(sum),
            time(facts.story.since_start(idle.used_until)),
            functions.join(", ")
        ),
        site: match super::callers(path) {
            "" => facts.site(idle.site),
            callers => format!("{}, called from {callers}", facts.site(idle.site)),
        },
        bytes: sum,
        sure: "likely: every model that still runs has a set of weights with gradients".into(),
        fix: Fix::words(
            "move them to the CPU (`.to(\"cpu\")`) or `del` them once their outputs are computed, and call `torch.cuda.empty_cache()` once if others need the memory",
            format!("the training needs {} less; an earlier peak stays", bytes(sum)),
        ),
        verb: "report --all",
    })
}
