//! An earlier model that something still holds while a later one of the same sizes is made and used.

use super::{Case, Cause, Facts, Fix, Kind};
use crate::code::{How, KEPT_BY};
use gputrace_analyse::sets::Since;
use gputrace_schemas::event::Bytes;
use gputrace_trace::words::{bytes, count, time};

pub(super) const CAUSE: Cause = Cause {
    name: "an earlier model still held beside a new one",
    kind: Kind::Spare,
    needs: "two sets of weights of one line and the same sizes, with a model's work in between; what training the first created was not created again, no model has worked since, or none was trained since; where a request failed, the second may be as far as that",
    against: "several such sets without gradients or state beside them, as of an ensemble; models made one after the other without work in between; an earlier one that steps still use",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    if !facts.growing().is_empty() || facts.recovered.is_some() {
        return None;
    }
    let held = facts.held?;
    let earlier = facts.sets(held.device)?.earlier.as_ref()?;
    let sum = Bytes(earlier.weights.0.saturating_add(earlier.beside.0));
    let beside = match earlier.beside.0 {
        0 => String::new(),
        _ => format!(", with {} of gradients and optimizer state", bytes(earlier.beside)),
    };
    let since = time(facts.story.since_start(earlier.used_until));
    let [first, second] = &earlier.made_by;
    // Where the calls of both part, innermost.
    let same = first.iter().zip(second).take_while(|(a, b)| a == b).count();
    let parted = |lines: &[(String, String, u32)]| {
        lines.get(same).map_or_else(String::new, |(function, file, line)| {
            format!("{}{function} ({file}:{line})", super::CALLED_FROM)
        })
    };
    let (holder, drop) = held_by(facts, second, earlier.sets);
    facts.is_much(sum).then(|| Case {
        what: format!(
            "{} of weights of {} are still held{beside}: this line later made a model of the same sizes{}, and no step has used {} since {since}",
            bytes(earlier.weights),
            if earlier.sets == 1 { "an earlier model".to_owned() } else { format!("{} earlier models", count(earlier.sets)) },
            parted(second),
            if earlier.sets == 1 { "the earlier one" } else { "these" }
        ),
        site: format!("{}{}{holder}", facts.site(earlier.site), parted(first)),
        bytes: sum,
        sure: match earlier.since {
            Since::Trained => "likely: steps have made gradients since, and none in place of those of the earlier model",
            Since::Evaluated => "likely: the earlier model was trained, and no backward pass has begun since",
            Since::Nothing => "certain that both are held; what refers to the earlier one is not recorded",
        }
        .into(),
        fix: Fix::words(drop, format!("frees {}", bytes(sum))),
        verb: if facts.failure.is_some() { "oom" } else { "report --peak" },
    })
}

/// What the program's source shows of what refers to the earlier model, by the lines that made the later one; and what to do.
fn held_by(facts: &Facts<'_>, lines: &[(String, String, u32)], sets: u64) -> (String, String) {
    // A name refers to one at a time.
    if sets > 1 {
        if let Some(keeper) = facts.sources.keeper(lines).filter(|it| it.how != How::Attribute) {
            return (
                keeper.behind(),
                format!(
                    "at {}, keep only what you need of each: its scores, or its weights on the CPU",
                    keeper.place()
                ),
            );
        }
    } else if let Some((target, place)) = facts.sources.replaced(lines) {
        return (
            format!("{KEPT_BY}`{target}` until the later one is made ({place})"),
            format!(
                "before {place}, set `{target} = None`, and drop what else refers to the earlier model, such as its optimizer"
            ),
        );
    }
    if let Some((name, place)) = facts.sources.method_cached(lines) {
        return (
            format!(
                "; perhaps kept by `functools.lru_cache` on the method `{name}` ({place}), which keeps its `self`"
            ),
            format!(
                "call `{name}.cache_clear()` before the next model is made, or cache its result in an attribute, at {place}"
            ),
        );
    }
    (
        String::new(),
        "drop the earlier model, its optimizer and whatever refers to them before the next is made: a variable, an attribute, a closure, `functools.lru_cache` on a method (`gc.get_referrers` shows which)".into(),
    )
}
