//! Something that is made again and again, and to which something still refers: lists, dictionaries, caches by key.

use super::{Case, Cause, Facts, Kind};

pub(super) const CAUSE: Cause = Cause {
    name: "results kept",
    kind: Kind::Grew,
    needs: "what a line made is left in at least three repetitions, to the last",
    against: "what is made once, levels off, or is replaced",
    claims: None,
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    facts.growth_of(
        &CAUSE,
        "something refers to what each turn makes there: `del` it, move it to the CPU (`.detach().cpu()`), or keep a number (`.item()`)",
    )
}
