//! What was held, part by part, and what would make the peak lower: the answer wherever memory neither grows nor lies idle.
//!
//! A part is a holding (`analyse/src/holdings.rs`): a purpose and the program's line. Each purpose has one row here, with the remedy that
//! removes it. The peak without a holding is computed: the bytes of all other blocks, added up over the run. The next-highest moment bounds
//! what the remedy saves. What a program needs has no row: `mostly.rs` says what it is, and what makes it smaller.

use gputrace_schemas::event::Bytes;

use super::activations_beyond_card::is_activation;
use super::facts::called_at;
use super::one_request::moves_data;
use super::{Case, Cause, Facts, Failure, Fix, Kind, earlier_model, growth};
use crate::code::{How, Keeper};
use gputrace_analyse::held::{HeldAt, Holder, Sign};
use gputrace_analyse::holdings::{Holding, Purpose};
use gputrace_analyse::libraries::When;
use gputrace_analyse::piles::Course;
use gputrace_trace::ledger::SiteId;
use gputrace_trace::words::{bytes, count};

/// A remedy is worth a word if it lowers the peak by this part of it: one in so many.
pub(super) const LEAST_SAVED: u64 = 20;
/// Data are worth a verdict from this part of what was held on: two fifths.
const MUCH: (u64, u64) = (2, 5);
/// Fewer results are a program's own few.
const LEAST_RESULTS: u64 = 8;
/// So many outputs, and so many requests of models after them, are a cache that was filled before the work.
const MANY_RESULTS: u64 = 16;
/// Layers have as many blocks of one line at least.
const LEAST_LAYERS: u64 = 4;
/// Larger numbers of tensors are no data set that is kept whole.
const MOST_TENSORS: u64 = 64;

/// Its name where others are weighed against it.
pub(super) const CONVERTED: &str = "autocast's cache of converted weights";

/// What removes a holding.
struct Remedy {
    purpose: Purpose,
    cause: Cause,
    /// Whether something is wrong, or the peak could only be lower.
    at_peak: Kind,
    /// The part of the peak that it must lower it by: one in so many.
    least: u64,
    /// Whether it is of this kind.
    is: fn(&Facts<'_>, &HeldAt, &Holding) -> bool,
    /// What it is, behind `... of the peak of ... are`.
    what: fn(&Holding) -> String,
    sure: &'static str,
    fix: &'static str,
}

pub(super) const fn cause(name: &'static str, needs: &'static str, against: &'static str) -> Cause {
    Cause { name, kind: Kind::Beyond, needs, against, find: |_| None }
}

/// The name of what no loop collects.
const GARBAGE: &str = "tensors that wait for Python's garbage collector (reference cycle)";
/// What the rows of a loop's graph have in common: the backward passes tell them apart.
const GRAPH_NEEDS: &str = "blocks that a model allocates in each iteration of a loop, several in each, and that are all freed together";

const REMEDIES: &[Remedy] = &[
    Remedy {
        purpose: Purpose::Loaded,
        cause: cause(
            "checkpoint loaded onto the GPU and kept",
            "blocks that `torch.load` allocated, held beside weights of the same sizes",
            "no weights of these sizes: the model uses what was loaded",
        ),
        at_peak: Kind::Kept,
        least: LEAST_SAVED,
        is: |_, _, _| true,
        what: |_| {
            "a checkpoint that was loaded onto the GPU, held beside a model with weights of its sizes".into()
        },
        sure: "likely: weights of the same sizes are held beside it",
        fix: "`torch.load(..., map_location=\"cpu\")` there, or `del` the checkpoint after loading it",
    },
    Remedy {
        purpose: Purpose::Copy,
        cause: cause(
            "a second copy of the weights",
            "blocks that match the sizes of the weights one by one, and that have no gradients",
            "a model that is trained beside the other, and one that is only still there",
        ),
        at_peak: Kind::Spare,
        least: LEAST_SAVED,
        is: |facts, _, _| (earlier_model::CAUSE.find)(facts).is_none(),
        what: |it| format!("a second set of the weights ({} blocks)", count(it.blocks)),
        sure: "certain that the sizes match; the purpose of the copy is not recorded",
        fix: "drop it, or keep it on the CPU, unless every step needs it",
    },
    Remedy {
        purpose: Purpose::OptimizerTemporaries,
        cause: cause(
            "`foreach` temporaries",
            "blocks of `_multi_tensor_*` at that moment",
            "the optimizer's state, which stays whatever the implementation",
        ),
        at_peak: Kind::Spare,
        least: LEAST_SAVED,
        is: |_, _, it| it.signs.has(Sign::Foreach),
        what: |_| "temporaries of the optimizer".into(),
        sure: "certain: the optimizer's own code allocated them",
        fix: "pass `foreach=False` to the optimizer (or `fused=True`, if it supports that)",
    },
    Remedy {
        purpose: Purpose::Attention,
        cause: cause(
            "attention scores fully materialized",
            "in attention code, blocks at least twice as large as its inputs, which dominate that moment",
            "scores that are no larger than queries and keys",
        ),
        at_peak: Kind::Peak,
        least: 4,
        is: |_, _, _| true,
        what: |it| {
            format!(
                "attention scores: {} blocks of up to {}, which grow with the square of the sequence length",
                count(it.blocks),
                bytes(it.largest)
            )
        },
        sure: "likely: they are larger than the queries, keys and values of that code",
        fix: "use `F.scaled_dot_product_attention` (for `MultiheadAttention`: `need_weights=False`), which never materializes the scores",
    },
    Remedy {
        purpose: Purpose::GraphRetained,
        cause: cause(
            "graphs kept after their backward passes",
            GRAPH_NEEDS,
            "backward passes that free the graph",
        ),
        at_peak: Kind::Kept,
        least: 3,
        // Gradients of gradients keep the graph of the steps before on purpose.
        is: |facts, _, it| {
            let own = || facts.holders().filter(|holder| holder.site == it.site);
            let is_meant = |holder: &Holder| {
                facts.sources.mentions(&holder.own, &["autograd.grad(", "create_graph=True"])
            };
            facts.growing().is_empty() && !own().any(is_meant)
        },
        what: |it| {
            format!(
                "activations of earlier loop iterations ({} blocks), although their backward passes have ended",
                count(it.blocks)
            )
        },
        sure: "certain that backward passes began and ended while they were held; what refers to the graph is not recorded",
        fix: "`detach()` the state that you pass to the next iteration, without `retain_graph=True`; store `.item()` of each loss",
    },
    Remedy {
        purpose: Purpose::GraphUnused,
        cause: cause(
            "activations of a loop kept by its graph",
            GRAPH_NEEDS,
            "a backward pass that needs them",
        ),
        at_peak: Kind::Kept,
        least: 3,
        is: |facts, _, it| facts.growing().is_empty() && !it.signs.has(Sign::NoGrad),
        what: |it| {
            format!(
                "activations and inputs that a loop's graph holds ({} blocks), though no backward pass needs them",
                count(it.blocks)
            )
        },
        sure: "likely: each iteration left several blocks of the model, and no backward pass used or freed any of them",
        fix: "run the loop under `torch.no_grad()` or `torch.inference_mode()`, or store `.item()` or `.detach().cpu()` of losses and outputs",
    },
    Remedy {
        purpose: Purpose::GraphOfCall,
        cause: cause(
            "activations kept for a backward pass that never comes",
            "three fifths of what the layers of a model allocated, at least eight blocks, held together and then all freed without a backward pass",
            "calls without gradients, which free a layer's output once the next layer has run",
        ),
        at_peak: Kind::Spare,
        least: 3,
        is: |_, _, it| !it.signs.has(Sign::NoGrad),
        what: |it| {
            format!(
                "most of what the model's layers allocated in one call ({} blocks), though no backward pass needs it",
                count(it.blocks)
            )
        },
        sure: "likely: without gradients, a layer's output is freed once the next layer has run",
        fix: "call the model under `torch.inference_mode()` or `torch.no_grad()`",
    },
    Remedy {
        purpose: Purpose::GraphOfLoop,
        cause: cause("one graph for a whole loop", GRAPH_NEEDS, "results alone, which are fewer"),
        at_peak: Kind::Spare,
        least: 3,
        is: |facts, _, _| facts.growing().is_empty(),
        what: |it| {
            format!(
                "activations of all iterations of a loop ({} blocks), for one backward pass",
                count(it.blocks)
            )
        },
        sure: "likely: each iteration left several blocks of the model",
        fix: "call `backward()` in each iteration (gradients add up in `.grad`), or `detach()` what you pass on",
    },
    Remedy {
        purpose: Purpose::Gradients,
        cause: cause(
            "gradients held while nothing is trained",
            "gradients at a peak that a model reaches without a backward pass, as in an evaluation",
            "a peak in a backward pass, in the optimizer, or in a forward pass before one",
        ),
        at_peak: Kind::Spare,
        least: LEAST_SAVED,
        is: |facts, held, _| {
            // A checkpointed function runs without a graph, and its backward pass runs it again.
            let is_checkpointed = facts.holders().any(|holder| holder.signs.has(Sign::Checkpointed));
            facts.failure.is_none()
                && !is_checkpointed
                // These are results of the program's own, and not `.grad`.
                && !facts.holders().any(|holder| holder.signs.has(Sign::Grad))
                && held.evaluated.0.saturating_mul(LEAST_SAVED) >= held.bytes.0
        },
        what: |_| {
            "gradients of the last step, although the peak is not in a training step: no backward pass follows (evaluation)".into()
        },
        sure: "certain that no backward pass used the model's activations; gradients that accumulate over steps are still needed",
        fix: "call `optimizer.zero_grad(set_to_none=True)` before the evaluation: gradients set to zero keep their memory",
    },
    Remedy {
        purpose: Purpose::Buckets,
        cause: cause(
            "DDP's buckets beside the gradients",
            "blocks that `DistributedDataParallel` allocated itself, held beside gradients, at least a twelfth of the total",
            "gradients that are views of the buckets",
        ),
        at_peak: Kind::Peak,
        least: 12,
        is: |facts, held, it| {
            let of_backward =
                |holder: &Holder| holder.signs.has(Sign::Backward) && facts.role(holder) == "gradients";
            held.sum(of_backward).0.saturating_mul(4) >= it.bytes.0
        },
        what: |_| {
            "buckets in which DistributedDataParallel reduces gradients, separate from the gradients".into()
        },
        sure: "certain: DistributedDataParallel's own code allocated them, and the gradients are separate blocks",
        fix: "use `DistributedDataParallel(..., gradient_as_bucket_view=True)`",
    },
    Remedy {
        purpose: Purpose::Collected,
        cause: cause(
            "outputs of a model kept on the GPU after their loop",
            "as outputs collected by a loop, of a model, half of the total in sixteen blocks or more: none is freed while models work on, until the last request",
            "outputs that are freed or joined after the loop, a ring, a program that ends with the loop, and tensors that no model makes",
        ),
        at_peak: Kind::Kept,
        least: 2,
        is: |facts, held, it| {
            facts.growing().is_empty()
                && it.blocks >= MANY_RESULTS
                && it.signs.has(Sign::Forward)
                && it.bytes.0.saturating_mul(2) >= held.bytes.0
                && it.work_after.is_some_and(|work| work >= MANY_RESULTS)
        },
        what: |it| {
            format!(
                "outputs of a model that a loop collected ({} blocks) and that stay to the end, while the program works on",
                count(it.blocks)
            )
        },
        sure: "certain that all were held until the last request; that each step needs only some of them is a guess",
        fix: "keep them on the CPU (`.detach().cpu()`) or on disk, and move what a step needs to the GPU",
    },
    Remedy {
        purpose: Purpose::Collected,
        cause: cause(
            GARBAGE,
            "blocks of one call stack that were allocated one by one and held together, and by the program's source an inner function that calls itself uses them",
            "functions outside others, and methods",
        ),
        at_peak: Kind::Kept,
        least: 3,
        is: |facts, _, it| {
            let mut own = facts.holders().filter(|holder| holder.site == it.site);
            own.any(|holder| facts.keeper(holder).is_some_and(|it| it.how == How::Closure))
        },
        what: |it| {
            format!(
                "tensors that nothing uses any more ({} blocks): they wait for Python's garbage collector",
                count(it.blocks)
            )
        },
        sure: "likely: by the source, the inner function and its own name refer to each other",
        fix: growth::OF_CLOSURE,
    },
    Remedy {
        purpose: Purpose::Collected,
        cause: cause(
            "outputs collected on the GPU until the loop ends",
            "blocks of one call stack that a loop outside any model allocated one by one, and that were all freed together, or none of them",
            "layers of a model, memory that the backward pass frees, and a ring that drops its oldest entry",
        ),
        // Some loops need what they collect: a caller decides.
        at_peak: Kind::Spare,
        least: 3,
        is: |facts, _, it| {
            facts.growing().is_empty() && it.blocks >= LEAST_RESULTS && !is_of_joined_list(facts, it)
        },
        what: |it| {
            format!(
                "results that a loop collects: {} blocks, allocated one by one and held together",
                count(it.blocks)
            )
        },
        sure: "likely: none was freed while the loop ran, and other work ran between any two",
        fix: "keep only what you need of each: return the loss or a number (`.item()`), or move it at once (`.detach().cpu()`)",
    },
    Remedy {
        purpose: Purpose::Converted,
        cause: cause(
            CONVERTED,
            "no backward pass, and blocks of a model's code with half the sizes of the weights",
            "a backward pass, which needs the copies",
        ),
        at_peak: Kind::Peak,
        least: LEAST_SAVED,
        is: |_, held, it| {
            let weights = held.holdings.iter().find(|it| it.purpose == Purpose::Weights);
            it.blocks >= LEAST_RESULTS
                && weights.is_some_and(|weights| it.bytes.0.saturating_mul(4) >= weights.bytes.0)
        },
        what: |_| {
            "half-width copies of the weights: `torch.autocast` caches them until its region ends".into()
        },
        sure: "likely: their sizes are half those of the weights, one by one",
        fix: "use `torch.autocast(..., cache_enabled=False)`, shorter regions, or convert the weights once (`model.bfloat16()`)",
    },
    Remedy {
        purpose: Purpose::State,
        cause: cause(
            "the optimizer's state, created at its first step",
            "a request that failed at a line of the optimizer while its state was two fifths of the memory in use, or one that succeeded before the state existed; nothing grows",
            "temporaries of the step, and growth",
        ),
        at_peak: Kind::Beyond,
        least: LEAST_SAVED,
        is: |facts, held, it| match facts.failure {
            Some(Failure::Torch(_, error)) => {
                let is_much = it.bytes.0.saturating_mul(MUCH.1) >= held.bytes.0.saturating_mul(MUCH.0);
                // The same request went well before, without it.
                let asked = error.requested.unwrap_or(error.bytes);
                let is_new = it.then.is_some_and(|then| {
                    then.0.saturating_mul(4) <= it.bytes.0 && it.bytes.0.saturating_sub(then.0) >= asked.0
                });
                facts.growing().is_empty()
                    && (is_much || is_new || it.site == error.site)
                    && !facts.fits_with_setting()
            }
            Some(Failure::Refused(_) | Failure::Jax(..)) | None => false,
        },
        what: |it| match it.then {
            Some(then) if then.0.saturating_mul(4) <= it.bytes.0 => {
                "optimizer state, created at the first step: an earlier step requested as much and had room"
                    .into()
            }
            _ => "optimizer state, which is created at the first step".into(),
        },
        sure: "certain: the optimizer's own code allocated it",
        fix: "run an optimizer step when you choose the batch size; use less state (8-bit Adam, Adafactor, SGD), or shard it (FSDP)",
    },
    Remedy {
        purpose: Purpose::BackwardTemporaries,
        cause: cause(
            "one activation checkpoint around many layers",
            "half of the peak was recomputed in the backward pass, in at least eight blocks that were held together",
            "a checkpoint around each layer, which holds one layer's activations at a time",
        ),
        at_peak: Kind::Peak,
        least: 3,
        is: |facts, held, _| {
            let recomputed = facts.with(|holder| {
                holder.signs.has(Sign::Checkpointed)
                    && holder.signs.has(Sign::Forward)
                    && holder.signs.has(Sign::Backward)
            });
            recomputed.is_some_and(|(all, most)| {
                all.0.saturating_mul(2) >= held.bytes.0 && most.blocks >= LEAST_RESULTS
            })
        },
        what: |it| {
            format!(
                "temporaries of the backward pass, mostly activations that one checkpoint recomputed together ({} blocks)",
                count(it.blocks)
            )
        },
        sure: "likely: they were requested under `torch.utils.checkpoint` in the backward pass, and none was freed before the last",
        fix: "checkpoint each layer by itself instead of all at once: `for layer in layers: x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)`",
    },
    Remedy {
        purpose: Purpose::Activations,
        cause: cause(
            "activation checkpointing of only part of the model",
            "functions that are recomputed in the backward pass, and activations of several layers outside them, which are half of the total",
            "a model that is checkpointed completely, or not at all",
        ),
        at_peak: Kind::Peak,
        least: 4,
        is: |facts, held, it| {
            let outside = facts.with(|holder| {
                is_activation(facts, holder)
                    && !holder.signs.has(Sign::Checkpointed)
                    && holder.blocks >= LEAST_LAYERS
            });
            facts.lifetimes.is_some_and(|lifetimes| lifetimes.has_checkpointing)
                && !it.signs.has(Sign::Checkpointed)
                && outside.is_some_and(|(all, _)| all.0.saturating_mul(2) >= held.bytes.0)
        },
        what: |_| {
            "activations, mostly of layers that are not checkpointed, while other layers of the model are"
                .into()
        },
        sure: "certain: most were allocated outside `torch.utils.checkpoint` and are kept for the backward pass",
        fix: "checkpoint these layers as well: `x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)`",
    },
    Remedy {
        purpose: Purpose::Data,
        cause: cause(
            "data kept on the GPU",
            "tensors that a line of the program allocated outside any model, and that stay",
            "growth, weights, memory allocated in one go, activations, and memory that the failed call was working on",
        ),
        at_peak: Kind::Spare,
        least: 5,
        is: is_data,
        what: |it| {
            format!(
                "tensors that this line allocated outside any model and that stay allocated ({})",
                n_blocks(it.blocks)
            )
        },
        sure: "certain that they are held; that each step needs only some of them is a guess",
        fix: "keep them on the CPU and move what a step needs (`batch.to(\"cuda\", non_blocking=True)`), or use a smaller dtype",
    },
    Remedy {
        purpose: Purpose::Temporaries,
        cause: cause(
            "data copied to the GPU all at once",
            "at the peak, half of the total in blocks of a line that by the program's source moves data to the device, and that are freed again",
            "batches, which are small beside what a model makes of them",
        ),
        at_peak: Kind::Spare,
        least: 2,
        is: |facts, held, it| {
            let is_most = it.bytes.0.saturating_mul(2) >= held.bytes.0;
            facts.failure.is_none() && is_most && moves_data(facts, it.site)
        },
        what: |it| {
            format!(
                "tensors that this line copies from the host to the device, all at once ({} of up to {})",
                n_blocks(it.blocks),
                bytes(it.largest)
            )
        },
        sure: "certain of sizes and lifetimes; that a part at a time suffices is a guess",
        fix: "keep the data on the CPU, and move each part in the loop that works on it: `part.to(device, non_blocking=True)`",
    },
    Remedy {
        purpose: Purpose::Temporaries,
        cause: cause(
            "one temporary that dominates the peak",
            "at the peak, one block of a line of the program's own that is two thirds of the total, and that is freed at once",
            "blocks that stay, and several of one kind",
        ),
        at_peak: Kind::Peak,
        least: 3,
        is: |facts, held, it| {
            let is_most = it.largest.0.saturating_mul(3) >= held.bytes.0.saturating_mul(2);
            facts.failure.is_none() && facts.growing().is_empty() && is_most && it.signs.has(Sign::Own)
        },
        what: |it| {
            format!(
                "temporaries of this function, mostly one block of {} that is freed at once",
                bytes(it.largest)
            )
        },
        sure: "certain of its size and lifetime; that it can be avoided is a guess",
        fix: "work in chunks (`torch.chunk`), or avoid it: indices instead of one-hot, `cdist` instead of a broadcast, `expand` for `repeat`",
    },
    Remedy {
        purpose: Purpose::Temporaries,
        cause: cause(
            "temporaries of one function",
            "memory that one function of the program allocates and frees sets the peak: without it, the peak is half as high",
            "temporaries of many functions",
        ),
        at_peak: Kind::Spare,
        least: 2,
        is: |facts, _, it| facts.failure.is_none() && it.blocks > 1 && it.signs.has(Sign::Own),
        what: |it| {
            format!(
                "temporaries of this function ({} blocks of up to {})",
                count(it.blocks),
                bytes(it.largest)
            )
        },
        sure: "certain of sizes and lifetimes; that they can be avoided is a guess",
        fix: "work in chunks there (`torch.chunk`), `del` what the next line does not use, or write in place",
    },
];

/// Whether its line works on a list that another function fills: that one collects.
fn is_of_joined_list(facts: &Facts<'_>, it: &Holding) -> bool {
    let mut own = facts.holders().filter(|holder| holder.site == it.site);
    own.any(|holder| facts.sources.joined_list(&holder.own).is_some())
}

/// What would need less than what a function makes at once, where its source shows why that is so much.
fn of_temporaries(facts: &Facts<'_>, it: &Holding) -> Option<String> {
    let all: Vec<&Holder> = facts.holders().filter(|holder| holder.site == it.site).collect();
    let all = || all.iter().filter(|_| it.purpose == Purpose::Temporaries);
    let repeated = all().find_map(|holder| facts.sources.repeated(&holder.own)).map(|at| {
        format!(
            "{at} writes out a copy for each item: use `expand` there, or let the operation broadcast, and convert the small tensor before that"
        )
    });
    repeated.or_else(|| {
        let (list, at) = all().find_map(|holder| facts.sources.joined_list(&holder.own))?;
        Some(format!(
            "this works at once on all that `{list}` has collected ({at}): work on each batch there and keep its sums, or keep the list on the CPU"
        ))
    })
}

/// `1 block`, `24 blocks`
fn n_blocks(n: u64) -> String {
    format!("{} block{}", count(n), if n == 1 { "" } else { "s" })
}

fn is_data(facts: &Facts<'_>, held: &HeldAt, it: &Holding) -> bool {
    // What was taken in one go has a cause of its own, and a failed call's own tensors are no data.
    let is_pile = held.piles.iter().any(|pile| pile.site == it.site && pile.course == Course::AtOnce);
    let of_call = |site: SiteId| {
        facts.story.ledger.sites.site(site).map(|site| (site.function.clone(), site.file.clone()))
    };
    let is_of_failed_call = match facts.failure {
        Some(Failure::Torch(_, error)) => {
            of_call(error.site).is_some_and(|call| of_call(it.site) == Some(call))
        }
        Some(Failure::Refused(_) | Failure::Jax(..)) | None => false,
    };
    let is_copy = it.signs.has(Sign::Copy) || it.signs.has(Sign::Load);
    let is_much = it.bytes.0.saturating_mul(MUCH.1) >= held.bytes.0.saturating_mul(MUCH.0);
    let total = facts.story.device(held.device).map_or(0, |device| device.total.0);
    let fills = facts.failure.is_none() || it.bytes.0.saturating_mul(5) >= total;
    // If the program holds nothing else, moving the data would make room for nothing.
    let is_all = facts.failure.is_none() && held.holdings.len() < 2;
    // A cache or a ring fills while models work, up to its bound.
    let fills_up = it.blocks >= LEAST_LAYERS && it.work_between >= it.blocks;
    is_much
        && !fills_up
        && !is_all
        && fills
        && !is_pile
        && !is_of_failed_call
        && !is_copy
        && it.blocks <= MOST_TENSORS
        && facts.growing().is_empty()
}

/// The cases of all holdings that have a remedy which is worth it.
pub(super) fn cases(facts: &Facts<'_>) -> Vec<(&'static Cause, Kind, Case)> {
    let Some(held) = facts.held else { return vec![] };
    let mut found: Vec<(&'static Cause, Kind, Case)> = vec![];
    for holding in &held.holdings {
        let purpose = purpose(facts, holding);
        let remedy = REMEDIES.iter().find(|remedy| {
            remedy.purpose == purpose
                && saved(facts, held, holding).0.saturating_mul(remedy.least) >= held.bytes.0
                && facts.is_much(holding.bytes)
                && (remedy.is)(facts, held, holding)
        });
        if let Some(remedy) = remedy {
            found.push((&remedy.cause, remedy.at_peak, case(facts, held, holding, remedy)));
        }
    }
    found
}

/// Its purpose. A graph that no backward pass has used may still be meant for the first one, where the program's source has one.
fn purpose(facts: &Facts<'_>, holding: &Holding) -> Purpose {
    let own = || facts.holders().filter(|holder| holder.site == holding.site);
    let is_first = holding.purpose == Purpose::GraphUnused && facts.failure.is_some() && !facts.has_stepped();
    match is_first && own().any(|holder| facts.sources.differentiates(&holder.own)) {
        true => Purpose::GraphOfLoop,
        false => holding.purpose,
    }
}

/// The peak without it. With gradients that are views of the buckets, it is the gradients that are not there.
fn without(held: &HeldAt, holding: &Holding) -> Bytes {
    let goes = match holding.purpose {
        Purpose::Buckets => held.holdings.iter().find(|it| it.purpose == Purpose::Gradients),
        _ => Some(holding),
    };
    goes.and_then(|it| it.without).unwrap_or(held.bytes).min(held.bytes)
}

/// What the peak would be lower by; when a request failed, all of it would have been free.
fn saved(facts: &Facts<'_>, held: &HeldAt, holding: &Holding) -> Bytes {
    if facts.failure.is_some() {
        return holding.bytes;
    }
    let without = without(held, holding);
    let stays = made_anyway(facts, holding).0.min(holding.bytes.0);
    Bytes(held.bytes.0.saturating_sub(without.0).min(holding.bytes.0 - stays))
}

/// What the remedied program still makes at a time.
fn made_anyway(facts: &Facts<'_>, holding: &Holding) -> Bytes {
    let n = match holding.purpose {
        // For one parameter after the other: a root and a quotient, or the root alone (`_single_tensor_*`, torch/optim, 2.0 to 2.11).
        Purpose::OptimizerTemporaries => {
            let site = facts.site(holding.site);
            let has_one = ["_sgd", "_adagrad", "_rmsprop", "_adamax"].iter().any(|name| site.contains(name));
            if has_one { 1 } else { 2 }
        }
        // The copy that the layer that runs needs.
        Purpose::Converted => 1,
        _ => 0,
    };
    Bytes(holding.largest.0.saturating_mul(n))
}

fn case(facts: &Facts<'_>, held: &HeldAt, holding: &Holding, remedy: &Remedy) -> Case {
    let (of, when) = match facts.failure {
        Some(_) => (bytes(held.bytes), " in use then"),
        None => (format!("the peak of {}", bytes(held.bytes)), ""),
    };
    let saved = saved(facts, held, holding);
    // Of these, a part is still made: one at a time, or in pieces.
    let is_part = matches!(
        holding.purpose,
        Purpose::Collected
            | Purpose::GraphOfLoop
            | Purpose::GraphUnused
            | Purpose::GraphOfCall
            | Purpose::Activations
            | Purpose::BackwardTemporaries
            | Purpose::Temporaries
            | Purpose::Data
    );
    let (without, lower) = (bytes(Bytes(held.bytes.0.saturating_sub(saved.0))), bytes(saved));
    let worth = match (facts.failure, is_part) {
        (Some(_), _) => format!("needs up to {lower} less at that moment"),
        // Each of these passes reaches back through all of it, and needs temporaries for that.
        (None, _) if holding.purpose == Purpose::GraphRetained => {
            "the backward passes become shorter, too".to_owned()
        }
        (None, true) => format!("the peak is up to {lower} lower: without any of it, it is {without}"),
        (None, false) => {
            format!("the peak is about {lower} lower, at {without}")
        }
    };
    let holder = facts.holders().find(|holder| holder.site == holding.site);
    // No loop collects what waits for the collector.
    let is_garbage = remedy.cause.name == GARBAGE;
    let site = match (holding.purpose, holding.called.split_once(", called from ")) {
        (Purpose::Collected, _) if !is_garbage => {
            format!("{}, collected by {}", facts.site(holding.site), holding.called)
        }
        (Purpose::BackwardTemporaries, _) if !holding.called.is_empty() => holding.called.clone(),
        (Purpose::Gradients, _) if !holding.called.is_empty() => {
            format!("{}, by the backward pass of {}", facts.site(holding.site), holding.called)
        }
        (_, Some((_, callers))) => format!("{}, called from {callers}", facts.site(holding.site)),
        (_, None) => called_at(&facts.site(holding.site), holder),
    };
    // What a loop or the program keeps, the source shows; what the model needs is kept by autograd.
    let is_kept = matches!(
        holding.purpose,
        Purpose::Collected
            | Purpose::Data
            | Purpose::GraphRetained
            | Purpose::GraphUnused
            | Purpose::GraphOfLoop
            | Purpose::Loaded
    );
    let source = holder.filter(|_| is_kept).and_then(|holder| facts.keeper(holder));
    let site = match &source {
        Some(source) => format!("{site}{}", source.behind()),
        None => site,
    };
    let purpose = purpose(facts, holding);
    let has_graph = matches!(purpose, Purpose::GraphUnused | Purpose::GraphRetained);
    let is_collected = has_graph || purpose == Purpose::Collected;
    // What does not grow needs no bound.
    let written = source
        .filter(|it| is_collected && it.how != How::Attribute)
        .map(|it| Keeper { is_cache: false, ..it }.instead(has_graph));
    Case {
        what: format!("{} of {of}{when} are {}", bytes(holding.bytes), (remedy.what)(holding)),
        site,
        bytes: saved,
        sure: remedy.sure.into(),
        fix: Fix::words(
            written
                .or_else(|| of_temporaries(facts, holding))
                .unwrap_or_else(|| offered(facts, holding).unwrap_or(remedy.fix).to_owned()),
            worth,
        ),
        verb: if facts.failure.is_some() { "oom" } else { "report --peak" },
    }
}

/// What the library whose code requested most of it offers against it.
pub(super) fn offered(facts: &Facts<'_>, holding: &Holding) -> Option<&'static str> {
    let when = match holding.purpose {
        Purpose::Activations if is_awaited(facts, holding) => When::ForBackward,
        Purpose::Activations | Purpose::Temporaries | Purpose::GraphOfCall | Purpose::GraphUnused => {
            When::AtPeak
        }
        _ => return None,
    };
    let holder = facts.holders().find(|holder| holder.site == holding.site)?;
    holder.offer(When::AtPeak).or_else(|| holder.offer(when))
}

/// Whether a cause is of what a graph keeps.
pub(super) fn is_of_graph(cause: &Cause) -> bool {
    cause.needs == GRAPH_NEEDS
}

/// Whether roles say of half of it that a backward pass needs it.
pub(super) fn is_awaited(facts: &Facts<'_>, it: &Holding) -> bool {
    let awaited = facts.holders().filter(|holder| facts.role(holder) == "activations");
    awaited.map(|holder| holder.bytes.0).sum::<u64>().saturating_mul(2) >= it.bytes.0
}
