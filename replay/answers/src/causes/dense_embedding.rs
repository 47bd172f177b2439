//! An embedding whose gradient and state are dense.

use std::collections::BTreeSet;

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_analyse::held::{Holder, Sign};
use gputrace_trace::words::{bytes, count};

/// Smaller tables need no word.
const LEAST_TABLE: u64 = 1 << 20;
/// A table, its gradient, up to three states (`AMSGrad`), and as many temporaries of a step: more is something else of that size.
const MOST_OF_TABLE: u64 = 8;

pub(super) const CAUSE: Cause = Cause {
    name: "the dense gradient and state of an embedding",
    kind: Kind::Peak,
    needs: "at the peak, gradients of embeddings and blocks of their sizes, together at least four fifths of the total",
    against: "an embedding that is a smaller part of the model",
    find,
};

/// Tables of these sizes.
fn n_tables(facts: &Facts<'_>, sizes: &BTreeSet<Bytes>) -> u64 {
    let tables = facts.holders().filter(|holder| facts.role(holder) == "parameters");
    let n: u64 =
        tables.flat_map(|it| &it.sizes).filter(|(size, _)| sizes.contains(size)).map(|(_, n)| n).sum();
    n.max(sizes.len() as u64)
}

fn find(facts: &Facts<'_>) -> Option<Case> {
    let held = facts.held?;
    let gradient = facts
        .holders()
        .find(|holder| holder.signs.has(Sign::Embedding) && holder.signs.has(Sign::Backward))?;
    let of_embedding =
        facts.holders().filter(|it| it.signs.has(Sign::Embedding) && it.signs.has(Sign::Backward));
    let sizes: BTreeSet<Bytes> =
        of_embedding.flat_map(|it| it.sizes.keys().copied()).filter(|size| size.0 >= LEAST_TABLE).collect();
    let size = *sizes.last()?;
    let is_table = |holder: &&Holder| facts.role(holder) == "parameters" && holder.sizes.contains_key(&size);
    let table = facts.holders().find(is_table).unwrap_or(gradient);
    let growing = facts.growing();
    // Of what grows, only its size is a table's.
    let grows =
        |holder: &Holder| growing.iter().any(|it| it.place.is_some_and(|place| place.site == holder.site));
    let is_made_for = |holder: &Holder| {
        let is_other = [Sign::Copy, Sign::Forward, Sign::Functional, Sign::Hook, Sign::Load];
        let is_gradient = holder.signs.has(Sign::Backward);
        (is_gradient || !is_other.into_iter().any(|sign| holder.signs.has(sign))) && !grows(holder)
    };
    let mut all = Bytes(0);
    let mut n: u64 = 0;
    for holder in facts.holders().filter(|holder| is_made_for(holder)) {
        for (size, blocks) in holder.sizes.iter().filter(|(size, _)| sizes.contains(size)) {
            all.0 = all.0.saturating_add(size.0.saturating_mul(*blocks));
            n = n.saturating_add(*blocks);
        }
    }
    // The table, its gradient and its state; of the first step, part of that.
    let is_each = n >= 3 * sizes.len() as u64 - u64::from(facts.failure.is_some());
    let is_no_more = n <= MOST_OF_TABLE * n_tables(facts, &sizes);
    (n >= 3 && is_each && is_no_more && all.0.saturating_mul(5) >= held.bytes.0.saturating_mul(4)).then(|| Case {
        what: format!(
            "{} of {} belong to {}, used at {}: {} blocks of {}{} (table, dense gradient, optimizer state, temporaries), all as large as the table however few rows are used",
            bytes(all),
            bytes(held.bytes),
            if sizes.len() == 1 { "one embedding".to_owned() } else { format!("{} embeddings", count(sizes.len() as u64)) },
            facts.site(gradient.site),
            count(n),
            if sizes.len() == 1 { "" } else { "up to " },
            bytes(size)
        ),
        site: facts.site(table.site),
        bytes: all,
        sure: "certain: the embedding's backward pass allocated the gradient, and the other blocks have exactly such a size".into(),
        fix: Fix::words(
            "keep only the rows in use (smaller `num_embeddings`, hashed ids), or use `sparse=True` with `SparseAdam` for the embeddings and another optimizer for all other parameters",
            format!("all of it scales with the rows: {} per table", bytes(size)),
        ),
        verb: "report --peak",
    })
}
