//! One temporary that is most of the peak: a one-hot tensor, a broadcast made dense, distances of all pairs.

use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_analyse::held::Sign;
use gputrace_trace::words::bytes;

pub(super) const CAUSE: Cause = Cause {
    name: "one temporary that is most of the peak",
    kind: Kind::Peak,
    needs: "at the peak, one block of a line of the program's own that is two thirds of all, and that is given back at once",
    against: "blocks that stay, and several of one kind",
    claims: None,
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    if facts.failure.is_some() || !facts.growing().is_empty() {
        return None;
    }
    let held = facts.held?;
    let most = facts.holders().next()?;
    let size = most.sizes.keys().max().copied()?;
    let is_temporary = matches!(facts.role(most), "temporaries" | "activations of inference")
        && most.signs.has(Sign::Own)
        && !most.signs.has(Sign::Backward)
        && !most.signs.has(Sign::Workspace);
    (is_temporary && size.0.saturating_mul(3) >= held.bytes.0.saturating_mul(2) && facts.is_much(size)).then(|| Case {
        what: format!("one block of {} is most of the peak of {}, and is given back at once: a temporary of this line", bytes(size), bytes(held.bytes)),
        site: facts.site(most.site),
        bytes: size,
        sure: "certain of the size and of its life; that it can be avoided is a guess".into(),
        fix: Fix::words(
            "work in pieces (`torch.chunk`), or keep it out of memory: indices instead of one-hot, `cdist` or a matrix product instead of a \
             broadcast difference, `expand` instead of `repeat`",
            format!("the peak is up to {} lower", bytes(size)),
        ),
        verb: "report --peak",
    })
}
