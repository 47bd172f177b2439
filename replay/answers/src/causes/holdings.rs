//! What was held, part by part, and what would make the peak lower: the answer wherever memory neither grows nor lies idle.
//!
//! A part is a holding (`analyse/src/holdings.rs`): a purpose and the program's line. Each purpose has one row here, with the remedy that
//! removes it. The peak without a holding is computed: the bytes of all other blocks, added up over the run. The next-highest moment bounds
//! what the remedy saves. What a program needs has no row: [`needed`] says what it is, and what makes it smaller.

use gputrace_schemas::event::Bytes;

use super::activations_beyond_card::is_activation;
use super::facts::called_at;
use super::{Case, Cause, Facts, Failure, Fix, Kind};
use gputrace_analyse::held::{HeldAt, Holder, Sign};
use gputrace_analyse::holdings::{Holding, Purpose};
use gputrace_analyse::piles::Course;
use gputrace_trace::ledger::SiteId;
use gputrace_trace::words::{bytes, count};

/// A remedy is worth a word if it lowers the peak by this part of it: one in so many.
const LEAST_SAVED: u64 = 20;
/// Data are worth a verdict from this part of what was held on: two fifths.
const MUCH: (u64, u64) = (2, 5);
/// Fewer results are a program's own few.
const LEAST_RESULTS: u64 = 8;
/// Layers have as many blocks of one line at least.
const LEAST_LAYERS: u64 = 4;
/// Larger numbers of tensors are no data set that is kept whole.
const MOST_TENSORS: u64 = 64;

/// What removes a holding.
struct Remedy {
    purpose: Purpose,
    cause: Cause,
    /// Where no request failed: whether something is wrong, or the peak could only be lower.
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

const fn cause(name: &'static str, needs: &'static str, against: &'static str) -> Cause {
    Cause { name, kind: Kind::Beyond, needs, against, find: |_| None }
}

/// What the rows of a loop's graph have in common: the backward passes tell them apart.
const GRAPH_NEEDS: &str =
    "blocks that a model made in each turn of a loop, several in each, and that go all together";

const REMEDIES: &[Remedy] = &[
    Remedy {
        purpose: Purpose::Loaded,
        cause: cause(
            "checkpoint loaded onto the GPU and kept",
            "blocks that `torch.load` made, held beside weights of the same sizes",
            "no weights of these sizes: the model uses what was loaded",
        ),
        at_peak: Kind::Kept,
        least: LEAST_SAVED,
        is: |_, _, _| true,
        what: |_| {
            "a checkpoint that was loaded onto the GPU, and is still there beside the model that was made from it".into()
        },
        sure: "likely: weights of the same sizes are held beside it",
        fix: "`torch.load(..., map_location=\"cpu\")` there, or `del` the checkpoint once it is loaded",
    },
    Remedy {
        purpose: Purpose::Copy,
        cause: cause(
            "a second copy of the weights",
            "blocks of the sizes of the weights, one by one, that have no gradients of their own",
            "a model that is trained beside the other",
        ),
        at_peak: Kind::Spare,
        least: LEAST_SAVED,
        is: |_, _, _| true,
        what: |it| format!("a second set of the weights ({} blocks)", count(it.blocks)),
        sure: "certain of the sizes; what the copy is for is not recorded",
        fix: "drop it, or keep it on the CPU, unless every step needs it",
    },
    Remedy {
        purpose: Purpose::OptimizerTemporaries,
        cause: cause(
            "`foreach` temporaries",
            "blocks of `_multi_tensor_*` at the moment",
            "the optimizer's state, which stays whatever the implementation",
        ),
        at_peak: Kind::Spare,
        least: LEAST_SAVED,
        is: |_, _, it| it.signs.has(Sign::Foreach),
        what: |_| "temporaries of the optimizer".into(),
        sure: "certain: the optimizer's own code asked for them",
        fix: "pass `foreach=False` to the optimizer (or `fused=True`, if it has that)",
    },
    Remedy {
        purpose: Purpose::Attention,
        cause: cause(
            "attention scores made whole",
            "in code of attention, blocks at least twice as large as what goes in, which dominate the moment",
            "scores that are no larger than queries and keys",
        ),
        at_peak: Kind::Peak,
        least: 4,
        is: |_, _, _| true,
        what: |it| {
            format!(
                "scores of attention: {} blocks of up to {}, which grow with the square of the sequence",
                count(it.blocks),
                bytes(it.largest)
            )
        },
        sure: "likely: larger than the queries, keys and values of that code",
        fix: "`F.scaled_dot_product_attention` (with `MultiheadAttention`: `need_weights=False`), which never makes them whole",
    },
    Remedy {
        purpose: Purpose::GraphRetained,
        cause: cause(
            "graphs kept after their backward passes",
            GRAPH_NEEDS,
            "backward passes that let them go",
        ),
        at_peak: Kind::Kept,
        least: 3,
        is: |facts, _, _| facts.growing().is_empty(),
        what: |it| {
            format!(
                "activations of the earlier turns of a loop ({} blocks), though their backward passes are over",
                count(it.blocks)
            )
        },
        sure: "certain that backward passes began and ended while they were held; what refers to the graph is not recorded",
        fix: "`detach()` the state that a turn hands to the next, without `retain_graph=True`; store `.item()` of each loss",
    },
    Remedy {
        purpose: Purpose::GraphUnused,
        cause: cause(
            "a loop's activations kept by its graph",
            GRAPH_NEEDS,
            "a backward pass that needs them",
        ),
        at_peak: Kind::Kept,
        least: 3,
        is: |facts, _, _| facts.growing().is_empty(),
        what: |it| {
            format!(
                "activations that the graph of a loop holds until it ends ({} blocks of several layers), and no backward pass needs them",
                count(it.blocks)
            )
        },
        sure: "likely: each turn left several blocks of the model, and no backward pass began before they went",
        fix: "run the loop under `torch.no_grad()` or `torch.inference_mode()`, or store `.item()` or `.detach().cpu()` of losses and outputs",
    },
    Remedy {
        purpose: Purpose::GraphOfCall,
        cause: cause(
            "activations kept for a backward pass that does not come",
            "three fifths of what the layers of a model made, eight blocks at least, held together before all go without a backward pass",
            "calls without gradients, where a layer's output goes when the next is there",
        ),
        at_peak: Kind::Spare,
        least: 3,
        is: |_, _, _| true,
        what: |it| {
            format!(
                "most of what the layers of a model made in one call ({} blocks), and no backward pass needs it",
                count(it.blocks)
            )
        },
        sure: "likely: without gradients, the output of a layer goes when the next is there",
        fix: "call the model under `torch.inference_mode()` or `torch.no_grad()`",
    },
    Remedy {
        purpose: Purpose::GraphOfLoop,
        cause: cause("one graph for a whole loop", GRAPH_NEEDS, "results alone, which are fewer"),
        at_peak: Kind::Spare,
        least: 3,
        is: |facts, _, _| facts.growing().is_empty(),
        what: |it| {
            format!("activations of all turns of a loop ({} blocks), for one backward pass", count(it.blocks))
        },
        sure: "likely: each turn left several blocks of the model",
        fix: "call `backward()` in each turn (losses add up in `.grad`), or `detach()` what is handed on",
    },
    Remedy {
        purpose: Purpose::Gradients,
        cause: cause(
            "gradients held while nothing is trained",
            "gradients at a peak that a model makes for no backward pass, as in an evaluation",
            "a peak in a backward pass, in the optimizer, or in a forward pass that waits for one",
        ),
        at_peak: Kind::Spare,
        least: LEAST_SAVED,
        is: |facts, held, _| {
            // A checkpointed function runs without a graph, and its backward pass runs it again.
            let is_checkpointed = facts.holders().any(|holder| holder.signs.has(Sign::Checkpointed));
            facts.failure.is_none()
                && !is_checkpointed
                && held.evaluated.0.saturating_mul(LEAST_SAVED) >= held.bytes.0
        },
        what: |_| {
            "gradients of the last step, and the peak is not in a step: no backward pass follows that needs what the model made (evaluation)".into()
        },
        sure: "certain that no backward pass used what the model had made by then; gradients that are added up over steps are needed",
        fix: "`optimizer.zero_grad(set_to_none=True)` after the step, before the evaluation: gradients that are set to zero keep their memory",
    },
    Remedy {
        purpose: Purpose::Buckets,
        cause: cause(
            "DDP's buckets beside the gradients",
            "blocks that `DistributedDataParallel` made itself, held beside gradients, a twelfth of all at least",
            "gradients that are views of the buckets",
        ),
        at_peak: Kind::Peak,
        least: 12,
        is: |facts, held, it| {
            let of_backward =
                |holder: &Holder| holder.signs.has(Sign::Backward) && facts.role(holder) == "gradients";
            held.sum(of_backward).0.saturating_mul(4) >= it.bytes.0
        },
        what: |_| "buckets in which DistributedDataParallel reduces gradients, beside these".into(),
        sure: "certain: DistributedDataParallel's own code made them, and the gradients are blocks of their own",
        fix: "`DistributedDataParallel(..., gradient_as_bucket_view=True)`",
    },
    Remedy {
        purpose: Purpose::Collected,
        cause: cause(
            "outputs collected on the GPU until the loop ends",
            "blocks of one stack that a loop outside of any model made one by one, and that went all together",
            "layers of a model, what the backward pass gives back, and a ring that lets its oldest go",
        ),
        // Some loops need what they collect: a caller decides.
        at_peak: Kind::Spare,
        least: 3,
        is: |facts, _, it| facts.growing().is_empty() && it.blocks >= LEAST_RESULTS,
        what: |it| {
            format!(
                "results that a loop collects: {} blocks, made one by one, that go together",
                count(it.blocks)
            )
        },
        sure: "likely: none went while the loop ran, and other work was done between any two",
        fix: "keep only what is needed of each: return the loss or a number (`.item()`), or move it at once (`.detach().cpu()`)",
    },
    Remedy {
        purpose: Purpose::Converted,
        cause: cause(
            "autocast's cache of converted weights",
            "no backward pass, and blocks of a model's code of half the sizes of the weights",
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
            "copies of the weights in half their width: `torch.autocast` caches them until its region ends"
                .into()
        },
        sure: "likely: their sizes are half of those of the weights, one by one",
        fix: "`torch.autocast(..., cache_enabled=False)`, shorter regions, or weights that are converted once (`model.bfloat16()`)",
    },
    Remedy {
        purpose: Purpose::State,
        cause: cause(
            "the optimizer's state, made at its first step",
            "a request that failed at a line of the optimizer, while its state was two fifths of what was held, or that went well before the state \
             was there, and nothing grows",
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
        what: |it| {
            match it.then {
            Some(then) if then.0.saturating_mul(4) <= it.bytes.0 => {
                "state of the optimizer, which its first step made: a step before that asked for as much and had room".into()
            }
            _ => "state of the optimizer, which its first step makes".into(),
        }
        },
        sure: "certain: the optimizer's own code asked for it",
        fix: "include an optimizer step when you choose the batch size, use less state (8-bit Adam, Adafactor, SGD), or shard it (FSDP)",
    },
    Remedy {
        purpose: Purpose::Activations,
        cause: cause(
            "activation checkpointing of only a part of the model",
            "functions that are computed again in the backward pass, and activations of several layers outside of these, half of all",
            "a model that is all covered, or not at all",
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
            "activations, most of layers that are not checkpointed, while others of the model are".into()
        },
        sure: "certain: most were made outside of `torch.utils.checkpoint` and wait for the backward pass",
        fix: "checkpoint these layers, too: `x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)`",
    },
    Remedy {
        purpose: Purpose::Data,
        cause: cause(
            "data kept on the GPU",
            "tensors that a line of the program made outside of any model, and that stay",
            "growth, weights, what was taken in one go, what a model makes, and what the call that failed was working on",
        ),
        at_peak: Kind::Spare,
        least: 5,
        is: is_data,
        what: |it| {
            format!(
                "tensors that this line of the program made outside of any model, and that stay ({} blocks)",
                count(it.blocks)
            )
        },
        sure: "certain that they are held; that each step needs only a part of them is a guess",
        fix: "keep them on the CPU and move what a step needs (`batch.to(\"cuda\", non_blocking=True)`), or use a smaller type",
    },
    Remedy {
        purpose: Purpose::Temporaries,
        cause: cause(
            "one temporary that is most of the peak",
            "at the peak, one block of a line of the program's own that is two thirds of all, and that is given back at once",
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
                "temporaries of this function, most of them one block of {}, given back at once",
                bytes(it.largest)
            )
        },
        sure: "certain of the size and of its life; that it can be avoided is a guess",
        fix: "work in pieces (`torch.chunk`), or keep it out of memory: indices instead of one-hot, `cdist` or a matrix product instead of a \
              broadcast difference, `expand` instead of `repeat`",
    },
    Remedy {
        purpose: Purpose::Temporaries,
        cause: cause(
            "temporaries of one function",
            "what one function of the program makes and gives back sets the peak: without it, that is half as high",
            "temporaries of many functions",
        ),
        at_peak: Kind::Spare,
        least: 2,
        is: |facts, _, it| facts.failure.is_none() && it.blocks > 1 && it.signs.has(Sign::Own),
        what: |it| {
            format!(
                "what this function makes and gives back ({} blocks of up to {})",
                count(it.blocks),
                bytes(it.largest)
            )
        },
        sure: "certain of sizes and lives; that they can be avoided is a guess",
        fix: "work in pieces there (`torch.chunk`), `del` what is not used again before the next line, or write in place",
    },
];

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
        let remedy = REMEDIES.iter().find(|remedy| {
            remedy.purpose == holding.purpose
                && saved(facts, held, holding).0.saturating_mul(remedy.least) >= held.bytes.0
                && facts.is_much(holding.bytes)
                && (remedy.is)(facts, held, holding)
        });
        if let Some(remedy) = remedy {
            let kind = if facts.failure.is_some() { Kind::Beyond } else { remedy.at_peak };
            found.push((&remedy.cause, kind, case(facts, held, holding, remedy)));
        }
    }
    found
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
    // Without `foreach`, temporaries are made for one parameter after the other.
    let is_made_anyway = holding.purpose == Purpose::OptimizerTemporaries;
    let stays = if is_made_anyway { holding.largest.0.min(holding.bytes.0) } else { 0 };
    Bytes(held.bytes.0.saturating_sub(without.0).min(holding.bytes.0 - stays))
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
            | Purpose::GraphRetained
            | Purpose::GraphOfCall
            | Purpose::Activations
            | Purpose::Temporaries
            | Purpose::Data
    );
    let (without, lower) = (bytes(Bytes(held.bytes.0.saturating_sub(saved.0))), bytes(saved));
    let worth = match (facts.failure, is_part) {
        (Some(_), _) => format!("needs up to {lower} less at that moment"),
        (None, true) => format!("the peak is up to {lower} lower: without any of them it is {without}"),
        (None, false) => {
            format!("the peak is about {lower} lower, at {without}")
        }
    };
    let holder = facts.holders().find(|holder| holder.site == holding.site);
    let site = match (holding.purpose, holding.called.split_once(", called from ")) {
        (Purpose::Collected, _) => format!("{}, collected by {}", facts.site(holding.site), holding.called),
        (Purpose::Gradients, _) if !holding.called.is_empty() => {
            format!("{}, by the backward pass of {}", facts.site(holding.site), holding.called)
        }
        (_, Some((_, callers))) => format!("{}, called from {callers}", facts.site(holding.site)),
        (_, None) => called_at(&facts.site(holding.site), holder),
    };
    Case {
        what: format!("{} of {of}{when} are {}", bytes(holding.bytes), (remedy.what)(holding)),
        site,
        bytes: saved,
        sure: remedy.sure.into(),
        fix: Fix::words(remedy.fix, worth),
        verb: if facts.failure.is_some() { "oom" } else { "report --peak" },
    }
}

/// Whether a cause is of what a graph keeps.
pub(super) fn is_of_graph(cause: &Cause) -> bool {
    cause.needs == GRAPH_NEEDS
}

/// Whether roles say of half of it that a backward pass needs it.
fn is_awaited(facts: &Facts<'_>, it: &Holding) -> bool {
    let awaited = facts.holders().filter(|holder| facts.role(holder) == "activations");
    awaited.map(|holder| holder.bytes.0).sum::<u64>().saturating_mul(2) >= it.bytes.0
}

/// What a program needs most of, and how people need less of it.
pub(crate) fn needed(facts: &Facts<'_>) -> Option<(String, &'static str)> {
    let held = facts.held.filter(|held| held.bytes.0 > 0)?;
    let most = held.holdings.first()?;
    let (name, less) = match most.purpose {
        Purpose::Weights if !most.signs.has(Sign::Model) => {
            ("tensors held from the start on", "fewer of these, or a smaller type")
        }
        Purpose::Weights => ("weights", "a smaller type, or sharding (FSDP, ZeRO)"),
        Purpose::Gradients => ("gradients", "a smaller type, or sharding (FSDP, ZeRO)"),
        Purpose::State => ("state of the optimizer", "an 8-bit or sharded optimizer (FSDP, ZeRO)"),
        Purpose::Activations if !is_awaited(facts, most) => {
            ("what a model made and the program keeps", "fewer of these on the GPU")
        }
        Purpose::Activations => {
            ("activations", "activation checkpointing (`torch.utils.checkpoint`), or a smaller batch")
        }
        Purpose::Temporaries => {
            ("temporaries of one function", "a smaller batch, or the same work in pieces")
        }
        Purpose::BackwardTemporaries => ("temporaries of the backward pass", "a smaller batch"),
        Purpose::Cache => ("a KV cache", "fewer or shorter sequences, or a lower `gpu_memory_utilization`"),
        Purpose::OptimizerTemporaries => ("temporaries of the optimizer", "`fused=True`"),
        Purpose::Copy | Purpose::Loaded => ("a copy of the weights", "the copy on the CPU"),
        Purpose::Data => ("tensors that the program keeps", "these on the CPU, or in a smaller type"),
        Purpose::Attention => ("scores of attention", "`scaled_dot_product_attention`"),
        Purpose::Converted
        | Purpose::Collected
        | Purpose::GraphOfLoop
        | Purpose::GraphUnused
        | Purpose::GraphRetained
        | Purpose::GraphOfCall
        | Purpose::Workspaces
        | Purpose::Buckets
        | Purpose::Before
        | Purpose::Other => return None,
    };
    Some((format!("{} of {} are {name}", bytes(most.bytes), bytes(held.bytes)), less))
}
