//! An embedding whose gradient and state are dense.

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_analyse::held::{Holder, Sign};
use gputrace_trace::words::{bytes, count};

pub(super) const CAUSE: Cause = Cause {
    name: "the dense gradient and state of an embedding",
    kind: Kind::Peak,
    needs: "at the peak, the gradient of an embedding and blocks of its size, together at least four fifths of the total",
    against: "an embedding that is a smaller part of the model",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let held = facts.held?;
    let gradient = facts
        .holders()
        .find(|holder| holder.signs.has(Sign::Embedding) && holder.signs.has(Sign::Backward))?;
    let size = *gradient.sizes.keys().max()?;
    let is_table = |holder: &&Holder| facts.role(holder) == "parameters" && holder.sizes.contains_key(&size);
    let table = facts.holders().find(is_table).unwrap_or(gradient);
    let n: u64 = facts
        .holders()
        .filter(|holder| !holder.signs.has(Sign::Copy))
        .filter_map(|holder| holder.sizes.get(&size))
        .sum();
    let all = Bytes(size.0.saturating_mul(n));
    (n >= 3 && all.0.saturating_mul(5) >= held.bytes.0.saturating_mul(4)).then(|| Case {
        what: format!(
            "{} of {} belong to one embedding, used at {}: {} blocks of {} (table, dense gradient, optimizer state, temporaries), all as large as the table however few rows are used",
            bytes(all),
            bytes(held.bytes),
            facts.site(gradient.site),
            count(n),
            bytes(size)
        ),
        site: facts.site(table.site),
        bytes: all,
        sure: "certain: the embedding's backward pass allocated the gradient, and the other blocks have exactly its size".into(),
        fix: Fix::words(
            "keep only the rows in use (smaller `num_embeddings`, hashed ids), or use `sparse=True` with `SparseAdam`",
            format!("all of it scales with the rows: {} per table", bytes(size)),
        ),
        verb: "report --peak",
    })
}
