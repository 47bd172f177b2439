//! One request that alone is more than the card holds, or most of it.

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Failure, Fix, Kind};
use crate::code;
use gputrace_analyse::held::{Holder, Sign};
use gputrace_trace::ledger::{SiteId, Wall};
use gputrace_trace::words::{bytes, count};

/// A tensor is repeated at most so many times: larger multiples are by chance.
const MOST_TIMES: u64 = 256;

/// The same of a limit.
pub(super) const OF_LIMIT: Cause = Cause {
    name: "one request for more than half of a limit that the program set",
    kind: Kind::Beyond,
    needs: "a request that failed although the device had room, for more than all that was reserved then",
    against: "more in use than was requested",
    find: of_limit,
};

pub(super) const CAUSE: Cause = Cause {
    name: "one request larger than the card",
    kind: Kind::Beyond,
    needs: "a failed request for more than half of the device, which exceeds the device together with the memory in use",
    against: "more in use than was requested, or enough on the device for both",
    find,
};

/// As much again of what the same function had just made.
pub(super) const TWICE: Cause = Cause {
    name: "a large intermediate result, needed twice",
    kind: Kind::Beyond,
    needs: "a failed request for a quarter of the device, while one block of that size, or half or twice as large, was two thirds of the memory in use, from the same file; outside a model's `forward`, both half of what was needed, and the request a quarter",
    against: "several layers, or several blocks of that size",
    find: twice,
};

/// Several of that size in one function.
pub(super) const FEW: Cause = Cause {
    name: "large intermediate results of one function",
    kind: Kind::Beyond,
    needs: "a failed request of a function of the program's own, of which two to six blocks, each an eighth of that size or more, were half of the memory in use",
    against: "layers of a model, and more blocks",
    find: few,
};

/// As many results of one function are held for one expression, or for its backward pass.
const MOST_RESULTS: u64 = 6;
/// Each is this part at least of the request: one in so many.
const LEAST_RESULT: u64 = 8;
/// The request is this part at least of what was in use: one in so many.
const LEAST_REQUEST: u64 = 6;

fn few(facts: &Facts<'_>) -> Option<Case> {
    let Failure::Torch(_, error) = facts.failure? else { return None };
    let asked = error.requested.unwrap_or(error.bytes);
    let here = facts.site(error.site);
    let is_of_size = |size: u64| size.saturating_mul(LEAST_RESULT) >= asked.0;
    // What an earlier call of the function left is nothing that this one works with.
    let function = facts.story.ledger.sites.site(error.site).map_or("", |site| &site.function);
    let is_outside = |line: &&code::Line| super::function_around(&line.0) != super::function_around(function);
    let caller = |lines: &[code::Line]| lines.iter().find(is_outside).cloned();
    let called = facts.held.map(|held| caller(&held.failed_own));
    let is_of_call = |it: &Holder| called.as_ref().is_none_or(|called| caller(&it.own) == *called);
    let is_near = |it: &&Holder| super::is_of(&facts.site(it.site), &here) && is_of_call(it);
    let near: Vec<&Holder> = facts.holders().filter(is_near).collect();
    let (mut n, mut sum) = (0_u64, 0_u64);
    for holder in &near {
        for (size, blocks) in holder.sizes.iter().filter(|(size, _)| is_of_size(size.0)) {
            n = n.saturating_add(*blocks);
            sum = sum.saturating_add(size.0.saturating_mul(*blocks));
        }
    }
    let is_most = sum.saturating_mul(2) >= error.allocated.0 && facts.growing().is_empty();
    let is_large = asked.0.saturating_mul(LEAST_REQUEST) >= error.allocated.0;
    // What a model makes is as large as what it is called with.
    let of_model = near.iter().copied().find(|it| it.signs.has(Sign::Forward));
    let fix = match of_model {
        _ if makes_logits(facts, error.site) => OF_LOGITS,
        None if makes_pairs(facts, error.site) => OF_PAIRS,
        Some(_) => OF_MODEL,
        None => {
            "work in chunks (`torch.chunk`), or avoid what a broadcast makes: `torch.cdist` or a matrix product for distances, indices for one-hot"
        }
    };
    (facts.is_own(error.site) && is_most && is_large && (2..=MOST_RESULTS).contains(&n)).then(|| Case {
        what: format!(
            "this function requests {} more, and {} of {} in use are {} of its results",
            bytes(asked),
            bytes(Bytes(sum)),
            bytes(error.allocated),
            count(n)
        ),
        site: super::facts::called_at(&here, of_model),
        bytes: Bytes(sum),
        sure: "certain of the sizes; that they can be avoided is a guess".into(),
        fix: Fix::words(fix, ""),
        verb: "oom",
    })
}

pub(super) fn twice(facts: &Facts<'_>) -> Option<Case> {
    let Failure::Torch(ordinal, error) = facts.failure? else { return None };
    let asked = error.requested.unwrap_or(error.bytes);
    let total = error.device.map(|(_, total)| total).or_else(|| Some(facts.story.device(ordinal)?.total))?;
    let file = |site: SiteId| Some(facts.story.ledger.sites.site(site)?.file.clone());
    let is_before = facts.holders().any(|holder| is_before(facts, holder));
    let is_twin = |holder: &&Holder| {
        let (size, n) = holder.sizes.last_key_value().map_or((0, 0), |(size, n)| (size.0, *n));
        let is_of_size =
            [size, size.saturating_mul(2), size / 2].iter().any(|it| it.abs_diff(asked.0) <= asked.0 / 50);
        n == 1 && is_of_size && file(holder.site).is_some_and(|of| file(error.site) == Some(of))
    };
    let twin = facts.holders().find(is_twin)?;
    let size = twin.sizes.last_key_value().map_or(0, |(size, _)| size.0);
    let is_most = size.saturating_mul(3) >= error.allocated.0.saturating_mul(2);
    let is_beyond =
        asked.0.saturating_mul(4) >= total.0 && asked.0.saturating_add(error.allocated.0) > total.0;
    // A model's layers are as large as what it is called with; a loss makes such a tensor once.
    let needed = asked.0.saturating_add(error.allocated.0);
    let own = facts.story.ledger.sites.site(error.site).filter(|_| facts.is_own(error.site));
    let is_of_loss = own.is_some_and(|own| !own.function.ends_with("forward"))
        && size.saturating_add(asked.0).saturating_mul(2) >= needed
        && asked.0.saturating_mul(4) >= needed
        && facts.has_tried_settings()
        && facts.remedy().is_none()
        // The line's own earlier result is no second one of the same expression.
        && twin.site != error.site;
    let fix = match makes_logits(facts, error.site) {
        true => OF_LOGITS,
        false if makes_pairs(facts, error.site) => OF_PAIRS,
        false => {
            "work in chunks (`torch.chunk`), or never build it: `torch.cdist`, `torch.sparse.mm`, indices, or `expand` instead of `repeat`"
        }
    };
    let beyond = match is_of_loss {
        true => format!("{} would be needed", bytes(Bytes(needed))),
        false => format!("that exceeds the card's {}", bytes(total)),
    };
    (is_of_loss || is_most && is_beyond && total.0 > 0).then_some(()).filter(|()| !is_before).map(|()| Case {
        what: format!(
            "{} of {} in use are one tensor, allocated at {}. Working on it needs {} more: together {beyond}",
            bytes(Bytes(size)),
            bytes(error.allocated),
            facts.site(twin.site),
            bytes(asked),
        ),
        site: facts.site(error.site),
        bytes: Bytes(size.saturating_add(asked.0)),
        sure: "certain of the sizes; how the tensor came to be so large is not recorded".into(),
        fix: Fix::words(fix, ""),
        verb: "oom",
    })
}

/// Whether the program's line, or what it calls, makes as much of logits as they are.
fn makes_logits(facts: &Facts<'_>, site: SiteId) -> bool {
    let Some(own) = facts.story.ledger.sites.site(site) else { return false };
    let text = facts.sources.text(&own.file, own.line).unwrap_or_default();
    LOGITS.iter().any(|word| text.contains(word) || own.inside.contains(word.trim_end_matches('(')))
}

/// Whether the program's line makes a result for each pair of rows itself, by a product of matrices or their distances.
fn makes_pairs(facts: &Facts<'_>, site: SiteId) -> bool {
    let Some(own) = facts.story.ledger.sites.site(site) else { return false };
    let text = facts.sources.text(&own.file, own.line).unwrap_or_default();
    PAIRS.iter().any(|word| text.contains(word) || own.inside == word.trim_end_matches('('))
}

const OF_PAIRS: &str = "work on a part of the rows at a time, and reduce each part before the next (its minimum, sum or top k; under `torch.utils.checkpoint` where a backward pass needs it)";

/// Makes a result for each pair of rows.
const PAIRS: [&str; 7] = ["cdist(", " @ ", "matmul(", "mm(", "einsum(", "outer(", "pdist("];

const OF_LOGITS: &str = "these are logits: compute the loss in chunks of the sequence (a fused or chunked cross-entropy), take what you need before the softmax (`logits.gather(...) - logits.logsumexp(-1)`), or use a smaller batch";

/// Makes as much of logits as they are.
const LOGITS: [&str; 3] = ["softmax(", "cross_entropy(", "nll_loss("];

/// The result of the same line's last run, while it makes the next.
pub(super) const PREVIOUS: Cause = Cause {
    name: "the previous result is held while the next is made",
    kind: Kind::Kept,
    needs: "a request that failed while one block of that size, from the same line of the program, was a quarter of what was in use",
    against: "several blocks of that size there: layers, or a list of results",
    find: previous,
};

/// Whether this is the last result of the line whose request failed.
fn is_before(facts: &Facts<'_>, holder: &Holder) -> bool {
    let Some(Failure::Torch(_, error)) = facts.failure else { return false };
    let asked = error.requested.unwrap_or(error.bytes).0;
    let is_one = holder.blocks == 1 && holder.bytes.0.abs_diff(asked) <= asked / 50;
    // What one expression makes twice has nothing between the two.
    let is_later = |it: &Holder| it.site != holder.site && it.since > holder.since;
    is_one
        && holder.site == error.site
        && holder.bytes.0.saturating_mul(4) >= error.allocated.0
        && facts.holders().any(is_later)
}

fn previous(facts: &Facts<'_>) -> Option<Case> {
    let Failure::Torch(_, error) = facts.failure? else { return None };
    let held = facts.holders().find(|holder| is_before(facts, holder))?;
    // In the first pass through a model, that is the result of another layer, which the backward pass needs.
    let is_of_a_layer = held.signs.has(Sign::Forward) || held.signs.has(Sign::Functional);
    // With the one that failed, the line would have two.
    let is_one_pass = facts.held.is_some_and(|all| all.is_one_pass(held, 2));
    if is_of_a_layer && is_one_pass && !facts.has_stepped() {
        return None;
    }
    Some(Case {
        what: format!(
            "this line requests {} while its earlier result of {} is still held ({} in use)",
            bytes(error.requested.unwrap_or(error.bytes)),
            bytes(held.bytes),
            bytes(error.allocated)
        ),
        site: facts.site(error.site),
        bytes: held.bytes,
        sure: "certain of the line and the sizes; what refers to the earlier result is not recorded".into(),
        fix: Fix::words(
            "`del` the earlier result before this line runs again: a variable keeps it until it is assigned again",
            format!("needs up to {} less at that moment", bytes(held.bytes)),
        ),
        verb: "oom",
    })
}

fn of_limit(facts: &Facts<'_>) -> Option<Case> {
    let Failure::Torch(_, error) = facts.failure? else { return None };
    let asked = error.requested.unwrap_or(error.bytes);
    let is_most = error.wall() == Wall::Limit && asked >= error.reserved;
    let (times, fix) = what_of(facts, asked);
    is_most.then(|| Case {
        what: format!(
            "with {} in use, this one request exceeds the limit that the program set{times}",
            bytes(error.allocated)
        ),
        site: facts.site(error.site),
        bytes: asked,
        sure: "certain: the device had room, and the request is more than all that PyTorch had reserved"
            .into(),
        fix: Fix::words(fix, ""),
        verb: "oom",
    })
}

const OF_ATTENTION: &str = "if these are attention scores, use `F.scaled_dot_product_attention`, which never materializes them; else work in chunks, or on fewer items at a time";

/// What the size of a request says, and what to do against it.
fn what_of(facts: &Facts<'_>, asked: Bytes) -> (String, &'static str) {
    let place = facts.refused_line().unwrap_or_default();
    let Some((times, holder)) = multiple(facts, asked) else {
        let is_of_attention = ["ttention", "attn"].iter().any(|word| place.contains(word));
        if is_of_attention {
            return (String::new(), OF_ATTENTION);
        }
        if let Some(Failure::Torch(_, error)) = facts.failure {
            if moves_data(facts, error.site) {
                return ("; the line copies data of the host to the device, all at once".into(), OF_DATA);
            }
            if makes_pairs(facts, error.site) {
                return (String::new(), OF_PAIRS);
            }
        }
        let is_in_model = facts.held.is_some_and(|held| {
            held.failed_own.first().is_some_and(|(function, ..)| function.ends_with(".forward"))
        });
        let other = if is_in_model { OF_MODEL } else { OF_ANY };
        return (String::new(), lever(facts).unwrap_or(other));
    };
    (
        format!(
            "; it is exactly {} times the {} that {} allocated: perhaps a `repeat`, or an `expand` made contiguous",
            count(times),
            bytes(Bytes(asked.0 / times)),
            facts.site(holder.site)
        ),
        "work in chunks, or broadcast the smaller tensor (`expand` instead of `repeat`, without `.contiguous()` or `reshape`)",
    )
}

const OF_MODEL: &str = "call the model with fewer items at a time (a smaller batch, parts of the input), or work in chunks inside it";

const OF_ANY: &str = "build it in chunks, or avoid the dense tensor (`torch.cdist` or a matrix product for distances, `scatter_reduce`, `index_add`), or reduce its size";

/// What makes a large tensor, by a word of the statement, and what people write instead.
const LEVERS: &[(&str, &str)] = &[
    (
        "vectorize=True",
        "pass `vectorize=False`: one row at a time instead of all at once (`torch.func.jacrev` has `chunk_size`)",
    ),
    ("vmap(", "pass `chunk_size=...` to `vmap`: the number of items that it works on at a time"),
    ("jacrev(", "pass `chunk_size=...` to `jacrev`: the number of rows that it computes at a time"),
    (
        "interpolate(",
        "resize fewer items at a time and reduce each part before the next, or work at the smaller size",
    ),
    (
        "one_hot(",
        "use the indices: `weight[indices]` or `F.embedding` instead of a product with one-hot rows",
    ),
    ("eye(", "use the indices: `weight[indices]` or `F.embedding` instead of a product with one-hot rows"),
];

/// What people write in place of the statement whose request failed.
fn lever(facts: &Facts<'_>) -> Option<&'static str> {
    let Some(Failure::Torch(_, error)) = facts.failure else { return None };
    let own = facts.story.ledger.sites.site(error.site)?;
    let text = facts.sources.text(&own.file, own.line)?;
    LEVERS.iter().find(|(word, _)| text.contains(word)).map(|(_, fix)| *fix)
}

/// Whether the statement moves what it has computed to the device: `torch.rand(n).to(device)`, and not a model.
pub(super) fn moves_data(facts: &Facts<'_>, site: SiteId) -> bool {
    let Some(own) = facts.story.ledger.sites.site(site).filter(|own| own.inside.is_empty()) else {
        return false;
    };
    facts.sources.text(&own.file, own.line).is_some_and(|text| code::moves_to_device(&text))
}

const OF_DATA: &str = "keep the data on the CPU, and move each batch in the loop: `batch.to(device, non_blocking=True)`, from pinned memory (`DataLoader(..., pin_memory=True)`)";

/// What JAX asks for at once is mostly the memory that an executable works in.
const OF_JAX: &str = "use a smaller batch or `jax.lax.map(..., batch_size=n)`; for gradients of `lax.scan`, use `jax.checkpoint` on its body";

fn find(facts: &Facts<'_>) -> Option<Case> {
    let failure = facts.failure?;
    let asked = failure.asked()?;
    let known = facts.story.device(failure.device()).map(|device| device.total).filter(|total| total.0 > 0);
    let (site, total, used) = match failure {
        Failure::Torch(_, error) => {
            (error.site, error.device.map(|(_, total)| total).or(known), error.allocated)
        }
        Failure::Jax(_, error) => (facts.jax_line(error), known, Bytes(0)),
        Failure::Refused(refused) => (refused.site, known, refused.tracked),
    };
    // A snapshot does not say how large the card is.
    let total = total.filter(|total| total.0 > 0)?;
    // What JAX held is not in its error.
    let is_beyond = asked.0.saturating_add(used.0) > total.0;
    if asked.0.saturating_mul(2) <= total.0 || used >= asked || !(is_beyond || used == Bytes(0)) {
        return None;
    }
    let sure = match is_beyond {
        true => "certain: the request and the memory in use exceed the device",
        false => "likely: the request is most of the device; how much of the rest was in use is not known",
    };
    let than = if asked >= total {
        format!("the card has only {}, and no setting makes it fit", bytes(total))
    } else {
        format!("{} of the card's {} were in use", bytes(used), bytes(total))
    };
    let (times, fix) = match failure {
        Failure::Jax(..) => (String::new(), OF_JAX),
        Failure::Torch(..) | Failure::Refused(_) => what_of(facts, asked),
    };
    Some(Case {
        what: format!("this one request is too large: {than}{times}"),
        site: facts.site(site),
        // Nothing else of the process matters.
        bytes: asked,
        sure: sure.into(),
        fix: Fix::words(fix, ""),
        verb: "oom",
    })
}

/// A block of the same function that the request is a whole number of times of: the largest. Of other functions' it would be so by chance.
fn multiple<'a>(facts: &Facts<'a>, asked: Bytes) -> Option<(u64, &'a Holder)> {
    let Failure::Torch(_, error) = facts.failure? else { return None };
    let here = facts.site(error.site);
    let sizes = |holder: &'a Holder| holder.sizes.keys().map(move |size| (*size, holder));
    let is_tensor = |holder: &&Holder| !holder.signs.has(Sign::Model) && !holder.signs.has(Sign::Load);
    let near = facts.holders().filter(is_tensor).filter(|it| super::is_of(&facts.site(it.site), &here));
    let blocks = near.flat_map(sizes).filter(|(size, _)| size.0 > 0);
    let whole = blocks
        .filter(|(size, _)| asked.0.is_multiple_of(size.0) && (2..=MOST_TIMES).contains(&(asked.0 / size.0)));
    let (size, holder) = whole.max_by_key(|(size, holder)| (*size, holder.since))?;
    // Most sizes are powers of two: such a multiple shows nothing, unless the line repeats by its name.
    let own = facts.story.ledger.sites.site(error.site);
    let text = own.and_then(|own| facts.sources.text(&own.file, own.line));
    let repeats = |text: &str| ["repeat", "expand", "tile"].iter().any(|name| text.contains(name));
    let is_named = repeats(&here) || text.as_deref().is_some_and(repeats);
    // Where the source shows the statement, it says whether it repeats something.
    if !is_named && ((asked.0 / size.0).is_power_of_two() || text.is_some()) {
        return None;
    }
    Some((asked.0 / size.0, holder))
}
