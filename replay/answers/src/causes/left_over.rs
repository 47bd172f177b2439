//! What an earlier part of a function left in its variables, while a later part runs out of memory.

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Failure, Fix, Kind};
use crate::code::Line;
use gputrace_analyse::held::{Holder, Sign};
use gputrace_trace::words::bytes;

/// It is worth a word from this part of what was held on: one in so many.
const LEAST: u64 = 5;
/// Lines that are named.
const MOST_LINES: usize = 3;

pub(super) const CAUSE: Cause = Cause {
    name: "tensors of an earlier part of the function still held",
    kind: Kind::Kept,
    needs: "a failed request, and a fifth of the memory in what earlier statements of a function that still runs requested and assigned to names that, by the source, it does not use from there on",
    against: "names that are deleted, or used again before they are assigned; weights, gradients and state",
    find,
};

/// The function of the program that both stacks are in, where they part: the line of the first, and that of the second.
fn parting<'a>(first: &'a [Line], second: &'a [Line]) -> Option<(&'a Line, &'a Line)> {
    let mut pairs = first.iter().rev().zip(second.iter().rev());
    let (a, b) = pairs.find(|(a, b)| a != b)?;
    (a.0 == b.0 && a.1 == b.1).then_some((a, b))
}

fn find(facts: &Facts<'_>) -> Option<Case> {
    let Failure::Torch(..) = facts.failure? else { return None };
    let held = facts.held?;
    if !facts.growing().is_empty() {
        return None;
    }
    let is_other = |holder: &Holder| {
        let signs = [Sign::Backward, Sign::Optimizer, Sign::Model, Sign::Load, Sign::Workspace];
        signs.into_iter().any(|sign| holder.signs.has(sign))
            || matches!(facts.role(holder), "parameters" | "gradients" | "optimizer state" | "weights")
    };
    let (mut sum, mut names, mut lines) = (0_u64, Vec::<String>::new(), Vec::<u32>::new());
    let mut most: Option<(&Holder, &Line, &Line)> = None;
    for holder in facts.holders().filter(|holder| !is_other(holder)) {
        let Some((then, now)) = parting(&holder.own, &held.failed_own) else { continue };
        let Some(unused) = facts.sources.unused_from(then, now.2) else { continue };
        let (_, then_most, now_most) = most.get_or_insert((holder, then, now));
        // Of one function at a time.
        if (&then.0, &then.1, now.2) != (&then_most.0, &then_most.1, now_most.2) {
            continue;
        }
        sum = sum.saturating_add(holder.bytes.0);
        if !lines.contains(&then.2) {
            lines.push(then.2);
        }
        unused.into_iter().for_each(|name| {
            if !names.contains(&name) {
                names.push(name);
            }
        });
    }
    let (holder, then, now) = most?;
    let sum = Bytes(sum);
    if sum.0.saturating_mul(LEAST) < held.bytes.0 {
        return None;
    }
    let function = then.0.rsplit('.').next().unwrap_or_default();
    let file = then.1.rsplit('/').next().unwrap_or_default();
    lines.sort_unstable();
    lines.truncate(MOST_LINES);
    let lines: Vec<String> = lines.iter().map(u32::to_string).collect();
    let made = format!("{} ({}:{})", then.0, then.1, then.2);
    let site = facts.site(holder.site);
    Some(Case {
        what: format!(
            "{} of {} in use are tensors that `{function}` made at {file}:{} and does not use from line {} on, where this request failed: its variables still refer to them",
            bytes(sum),
            bytes(held.bytes),
            lines.join(", "),
            now.2
        ),
        site: if site.contains(&made) { site } else { format!("{made}, which called {site}") },
        bytes: sum,
        sure: "likely: by the source, no later line uses these names; that nothing else refers to the tensors is not recorded".into(),
        fix: Fix::words(
            format!(
                "`del {}` before {file}:{}, or give each part a function of its own: a variable keeps its tensor until the function ends",
                names.join(", "),
                now.2
            ),
            format!("needs up to {} less at that moment", bytes(sum)),
        ),
        verb: "oom",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_stacks_part_in_the_function_that_both_are_in() {
        let line = |function: &str, line| (function.to_owned(), "/a.py".to_owned(), line);
        let first = [line("forward", 3), line("train", 10), line("main", 20)];
        let second = [line("forward", 3), line("train", 15), line("main", 20)];
        assert_eq!(parting(&first, &second), Some((&first[1], &second[1])));
        let other = [line("check", 30), line("main", 20)];
        assert_eq!(parting(&first, &other), None);
        assert_eq!(parting(&first, &first), None);
    }
}
