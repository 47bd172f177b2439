//! What a program needs most of, part by part, and how people need less of it: the answer where no cause is known.

use std::cmp::Reverse;

use gputrace_schemas::event::Bytes;

use super::holdings::{LEAST_SAVED, cause, is_awaited, offered};
use super::{Case, Cause, Facts, Failure, Fix, Kind, limit};
use gputrace_analyse::held::{HeldAt, Sign};
use gputrace_analyse::holdings::{Holding, Purpose};
use gputrace_trace::ledger::SiteId;
use gputrace_trace::words::{bytes, count};

/// Less memory than this needs no line.
const LEAST_SHOWN: u64 = 1 << 20;
/// Lines that are named of what a program needs most of.
const MOST_LINES: usize = 2;
/// What a program needs most of is this part at least of what was held: one in so many.
const MOSTLY_LEAST: u64 = 4;
/// Parts beside what fills most of the memory are named from this part of it on: one in so many.
const LEAST_BESIDE: u64 = 10;
/// So many of them at most.
const MOST_BESIDE: usize = 3;

/// What a program needs most of, and how people need less of it.
pub(crate) fn needed(facts: &Facts<'_>) -> Option<(String, &'static str)> {
    let (mostly, most) = needed_most(facts)?;
    Some((
        format!("{}{}", share_of(facts, mostly.name, most), lines_of(facts, most)),
        offered(facts, most).unwrap_or(mostly.less),
    ))
}

/// What a program needs most of: its name, how people need less of it, and the cause of a failure, on a card and under a limit.
struct Mostly {
    name: &'static str,
    less: &'static str,
    on_card: Cause,
    under_limit: Cause,
}

macro_rules! mostly {
    ($name:literal, $less:literal) => {
        Mostly {
            name: $name,
            less: $less,
            on_card: cause(concat!("mostly ", $name), MOSTLY_NEEDS, "any other cause"),
            under_limit: cause(
                concat!("a limit that the program set, filled mostly by ", $name),
                MOSTLY_NEEDS,
                "any other cause",
            ),
        }
    };
}

const MOSTLY_NEEDS: &str = "a failed request, and of all that was held most of this kind; no other cause explains it, or fragmentation by less than an eighth of what is reserved";

static FROM_THE_START: Mostly = mostly!(
    "tensors held from the start",
    "keep data on the CPU, and move each batch to the GPU; or use a smaller dtype"
);
static WEIGHTS: Mostly = mostly!(
    "weights",
    "move what this phase does not use to the CPU; use a smaller dtype, or sharding (FSDP, ZeRO)"
);
static MOVED: Mostly = mostly!(
    "weights, with more being moved to the device",
    "convert the model before you move it (`model.to(torch.bfloat16).to(\"cuda\")`), load it in a smaller dtype, or shard it"
);
static GRADIENTS: Mostly = mostly!("gradients", "use a smaller dtype, or sharding (FSDP, ZeRO)");
static STATE: Mostly = mostly!("optimizer state", "use an 8-bit or sharded optimizer (FSDP, ZeRO)");
static OUTPUTS: Mostly =
    mostly!("outputs of a model that the program keeps", "keep fewer of these on the GPU");
static ACTIVATIONS: Mostly =
    mostly!("activations", "use activation checkpointing (`torch.utils.checkpoint`), or a smaller batch");
static TEMPORARIES: Mostly =
    mostly!("temporaries of one function", "use a smaller batch, or do the same work in chunks");
static OF_BACKWARD: Mostly = mostly!("temporaries of the backward pass", "use a smaller batch");
static CACHE: Mostly =
    mostly!("a KV cache", "run fewer or shorter sequences, or lower `gpu_memory_utilization`");
static OF_OPTIMIZER: Mostly = mostly!("temporaries of the optimizer", "use `fused=True`");
static COPY: Mostly = mostly!("a copy of the weights", "keep the copy on the CPU");
static DATA: Mostly =
    mostly!("tensors that the program keeps", "keep these on the CPU, or use a smaller dtype");
static SCORES: Mostly = mostly!("attention scores", "use `scaled_dot_product_attention`");

/// What a failed program needs most of, where no cause is known.
pub(super) fn most(facts: &Facts<'_>) -> Option<(&'static Cause, Kind, Case)> {
    // What could not be replayed is told with its doubts.
    if !matches!(facts.failure, Some(Failure::Torch(..))) || !facts.has_tried_settings() {
        return None;
    }
    let held = facts.held?;
    let (mostly, most) = needed_most(facts)?;
    let text = share_of(facts, mostly.name, most);
    if most.bytes.0.saturating_mul(MOSTLY_LEAST) < held.bytes.0 {
        return None;
    }
    let limit = limit::under(facts);
    let (under, raise) = match &limit {
        Some(limit) => {
            (format!("{limit}; "), "; or raise the limit (`torch.cuda.set_per_process_memory_fraction`)")
        }
        None => (String::new(), ""),
    };
    let blocks = if most.blocks == 1 { "block" } else { "blocks" };
    let beside = beside(facts, held, most);
    let case = Case {
        what: format!(
            "{under}{text} ({} {blocks} of up to {}){beside}",
            count(most.blocks),
            bytes(most.largest)
        ),
        site: if most.under.is_empty() { facts.site(most.site) } else { most.under.clone() },
        bytes: most.bytes,
        sure:
            "certain of the bytes; their purpose is inferred, and whether the program needs them is not known"
                .into(),
        fix: Fix::words(
            format!("{}{}{raise}", offered(facts, most).unwrap_or(mostly.less), idle_state(held, most)),
            if facts.remedy().is_none() { "no allocator setting makes it fit" } else { "" },
        ),
        verb: "oom",
    };
    let cause = if limit.is_some() { &mostly.under_limit } else { &mostly.on_card };
    Some((cause, Kind::Beyond, case))
}

/// What else was held that matters, each part with its line.
fn beside(facts: &Facts<'_>, held: &HeldAt, most: &Holding) -> String {
    let is_part = |it: &&Holding| {
        let is_it = it.purpose == most.purpose && it.site == most.site && it.bytes == most.bytes;
        !is_it && it.bytes.0.saturating_mul(LEAST_BESIDE) >= held.bytes.0
    };
    let parts = held.holdings.iter().filter(is_part).take(MOST_BESIDE);
    let parts: Vec<String> = parts
        .map(|it| {
            let line = if it.under.is_empty() { facts.site(it.site) } else { it.under.clone() };
            format!("{} {} ({line})", bytes(it.bytes), name_of(it))
        })
        .collect();
    if parts.is_empty() { String::new() } else { format!("; beside them {}", parts.join(", ")) }
}

/// What helps if weights are moved in beside an optimizer's state, which only its step needs.
fn idle_state(held: &HeldAt, most: &Holding) -> &'static str {
    let is_much = |it: &&Holding| {
        it.purpose == Purpose::State && it.bytes.0.saturating_mul(LEAST_BESIDE) >= held.bytes.0
    };
    match most.purpose == Purpose::Weights && held.holdings.iter().any(|it| is_much(&it)) {
        true => "; or move the optimizer's state to the CPU until its next step, or use one with less state",
        false => "",
    }
}

/// What a part is, in words.
fn name_of(holding: &Holding) -> &'static str {
    match holding.purpose {
        Purpose::Weights if holding.signs.has(Sign::Model) => "of weights",
        Purpose::Weights | Purpose::Data => "of tensors that the program keeps",
        Purpose::Copy => "of a copy of the weights",
        Purpose::Loaded => "of what `torch.load` loaded",
        Purpose::Converted => "of converted weights",
        Purpose::Gradients => "of gradients",
        Purpose::State => "of optimizer state",
        Purpose::OptimizerTemporaries => "of temporaries of the optimizer",
        Purpose::Activations | Purpose::Attention => "of activations",
        Purpose::Temporaries => "of temporaries",
        Purpose::BackwardTemporaries => "of temporaries of the backward pass",
        Purpose::Collected => "of results that a loop collects",
        Purpose::GraphOfLoop | Purpose::GraphUnused | Purpose::GraphRetained | Purpose::GraphOfCall => {
            "of what a graph keeps"
        }
        Purpose::Cache => "of a KV cache",
        Purpose::Workspaces => "of workspaces",
        Purpose::Buckets => "of DDP's buckets",
        Purpose::Before => "from before the recording",
        Purpose::Other => "of other tensors",
    }
}

/// Whether the request that failed was one for weights, where `Module.to` moves them.
fn is_moving(facts: &Facts<'_>) -> bool {
    let Some(Failure::Torch(_, error)) = facts.failure else { return false };
    let inside = facts.story.ledger.sites.site(error.site).map_or("", |site| &site.inside);
    ["Module.to", "Module.cuda", "Module._apply"].iter().any(|name| inside.starts_with(name))
}

/// How much of the weights ever had gradients, where that is little of a training run's.
fn trained(facts: &Facts<'_>, most: &Holding) -> String {
    let held = facts.held.map_or(0, |held| held.device);
    let devices = facts.lifetimes.map_or(&[][..], |lifetimes| &lifetimes.devices);
    let device = devices.iter().find(|device| device.device == held && device.n_passes > 0);
    let gradients = device.and_then(|device| device.roles.iter().find(|role| role.name == "gradients"));
    match gradients {
        Some(gradients) if gradients.peak.0.saturating_mul(2) < most.bytes.0 => {
            format!("; at most {} of them had gradients at a time", bytes(gradients.peak))
        }
        _ => String::new(),
    }
}

/// The lines that hold most of the weights, where there are several.
fn lines_of(facts: &Facts<'_>, most: &Holding) -> String {
    if most.purpose != Purpose::Weights {
        let under = if most.under.is_empty() { facts.site(most.site) } else { most.under.clone() };
        let is_known = !under.is_empty() && facts.is_own(most.site) && most.bytes.0 >= LEAST_SHOWN;
        return if is_known { format!(", mostly requested under {under}") } else { String::new() };
    }
    let mut lines: Vec<(SiteId, u64)> = vec![];
    for it in facts.holders().filter(|it| matches!(facts.role(it), "parameters" | "weights")) {
        match lines.iter_mut().find(|(site, _)| *site == it.site) {
            Some((_, sum)) => *sum = sum.saturating_add(it.bytes.0),
            None => lines.push((it.site, it.bytes.0)),
        }
    }
    lines.sort_by_key(|(site, sum)| (Reverse(*sum), *site));
    let is_much = |(_, sum): &&(SiteId, u64)| sum.saturating_mul(LEAST_SAVED) >= most.bytes.0;
    let lines: Vec<String> = lines
        .iter()
        .filter(is_much)
        .take(MOST_LINES)
        .map(|(site, sum)| format!("{} at {}", bytes(Bytes(*sum)), facts.site(*site)))
        .collect();
    let trained = trained(facts, most);
    if lines.len() < 2 { trained } else { format!(" ({}){trained}", lines.join(", ")) }
}

/// `1.2 GiB of 1.9 GiB are activations`
fn share_of(facts: &Facts<'_>, name: &str, most: &Holding) -> String {
    let held = facts.held.map_or(Bytes(0), |held| held.bytes);
    format!("{} of {} are {name}", bytes(most.bytes), bytes(held))
}

/// Whether the function that made it had returned when a request failed: what it made is no temporary of it.
fn has_returned(facts: &Facts<'_>, held: &HeldAt, most: &Holding) -> bool {
    let holder = facts.holders().find(|holder| holder.site == most.site);
    holder.and_then(|holder| holder.own.first()).is_some_and(|(function, file, _)| {
        !held.failed_own.is_empty()
            && !held.failed_own.iter().any(|(other, of, _)| (other, of) == (function, file))
    })
}

/// What most of the memory is, and how people need less of it.
fn needed_most<'a>(facts: &'a Facts<'_>) -> Option<(&'static Mostly, &'a Holding)> {
    let held = facts.held.filter(|held| held.bytes.0 > 0)?;
    let most = held.holdings.first()?;
    let mostly = match most.purpose {
        Purpose::Weights if !most.signs.has(Sign::Model) => &FROM_THE_START,
        Purpose::Weights if is_moving(facts) => &MOVED,
        Purpose::Weights => &WEIGHTS,
        Purpose::Gradients => &GRADIENTS,
        Purpose::State => &STATE,
        // What the first forward pass holds when it fails, a backward pass would need.
        Purpose::Activations
            if !is_awaited(facts, most) && (facts.failure.is_none() || facts.has_stepped()) =>
        {
            &OUTPUTS
        }
        Purpose::Activations => &ACTIVATIONS,
        Purpose::Temporaries if has_returned(facts, held, most) => &DATA,
        Purpose::Temporaries => &TEMPORARIES,
        Purpose::BackwardTemporaries => &OF_BACKWARD,
        Purpose::Cache => &CACHE,
        Purpose::OptimizerTemporaries => &OF_OPTIMIZER,
        Purpose::Copy | Purpose::Loaded => &COPY,
        Purpose::Data => &DATA,
        Purpose::Attention => &SCORES,
        Purpose::GraphOfLoop | Purpose::GraphUnused | Purpose::GraphRetained => return None,
        Purpose::GraphOfCall | Purpose::Converted | Purpose::Collected | Purpose::Workspaces => return None,
        Purpose::Buckets | Purpose::Before | Purpose::Other => return None,
    };
    Some((mostly, most))
}
