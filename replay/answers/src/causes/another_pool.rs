//! A pool of another library in the same process: JAX's preallocation, CuPy's and RMM's pools.

use std::collections::BTreeMap;

use gputrace_schemas::event::{Bytes, Nanos};

use super::{Case, Cause, Facts, Failure, Fix, Kind};
use gputrace_trace::ledger::SiteId;
use gputrace_trace::words::{bytes, time};

pub(super) const CAUSE: Cause = Cause {
    name: "memory kept by another library's pool",
    kind: Kind::Elsewhere,
    needs: "a request that the device had no room for, while a library other than the one that requested it had a fifth of the device",
    against: "a library that requested little; whether a library needs all that it has is not recorded",
    find,
};

/// What gives memory back, by the owner that keeps it.
const RELEASES: &[(&str, &str)] = &[
    (
        "JAX",
        "set `XLA_PYTHON_CLIENT_PREALLOCATE=false`, or limit its share: `XLA_PYTHON_CLIENT_MEM_FRACTION=.3`",
    ),
    (
        "CuPy",
        "call `cupy.get_default_memory_pool().free_all_blocks()` before that line, or set a limit: `set_limit(fraction=0.3)`",
    ),
    (
        "RMM",
        "share one pool: `rmm.reinitialize(...)` with a `maximum_pool_size`, or PyTorch through `rmm.allocators.torch`",
    ),
    ("TensorFlow", "call `tf.config.experimental.set_memory_growth(gpu, True)`"),
    (
        "PyTorch",
        "call `torch.cuda.empty_cache()` before that line, or limit PyTorch: `set_per_process_memory_fraction`",
    ),
];

/// A pool beside PyTorch that asked for nothing more in the second half of the run, where no request failed.
pub(super) const IDLE: Cause = Cause {
    name: "another library's idle pool",
    kind: Kind::Spare,
    needs: "at least a fifth of the device's peak that another library requested early and kept, while PyTorch requested more until the end",
    against: "later requests of that library; memory that it freed",
    find: idle,
};

/// What shows how much of a pool is in use, and gives back the rest, where PyTorch is not at work.
const USES: &[(&str, &str)] = &[
    (
        "CuPy",
        "if `cupy.get_default_memory_pool().used_bytes()` is much smaller, call `free_all_blocks()` after the work that needed it",
    ),
    (
        "RMM",
        "if less is in use, set a `maximum_pool_size` or a smaller `initial_pool_size` of `PoolMemoryResource`",
    ),
    ("TensorFlow", "if less is in use, call `tf.config.experimental.set_memory_growth(gpu, True)`"),
    (
        "TensorRT",
        "set `builder_config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, bytes)`, or share `device_memory` between contexts",
    ),
];

/// A library's pool that asked for nothing more in the second half of the run.
struct Early<'a> {
    owner: &'a str,
    held: Bytes,
    asked: Nanos,
    site: SiteId,
}

/// Of those that `is_known` names, the one that holds most, if that is a fifth of what the device held.
fn early<'a>(facts: &Facts<'a>, is_known: impl Fn(&str) -> bool) -> Option<Early<'a>> {
    let ledger = &facts.story.ledger;
    let (first, last) = (ledger.run.first.unwrap_or_default(), ledger.run.last);
    let mut by_owner: BTreeMap<&str, (Early<'a>, Bytes)> = BTreeMap::new();
    for object in ledger.live().filter(|object| object.device >= 0) {
        let owner = ledger.sites.owner(object.owner);
        if !is_known(owner) {
            continue;
        }
        let new = || (Early { owner, held: Bytes(0), asked: object.since, site: object.site }, Bytes(0));
        let (early, most) = by_owner.entry(owner).or_insert_with(new);
        (early.held.0, early.asked) = (early.held.0 + object.bytes.0, early.asked.max(object.since));
        if object.bytes > *most {
            (early.site, *most) = (object.site, object.bytes);
        }
    }
    let (early, _) = by_owner.into_values().max_by_key(|(early, _)| early.held)?;
    let is_early = early.asked < Nanos(first.0 + (last.0 - first.0) / 2);
    (is_early && early.held.0.saturating_mul(5) >= facts.all.0).then_some(early)
}

/// The same in words, where PyTorch is not at work.
pub(crate) fn in_words(facts: &Facts<'_>) -> Option<(String, &'static str)> {
    let known = |owner: &str| USES.iter().find(|(name, _)| owner.starts_with(name));
    if facts.held.is_some_and(|held| held.bytes.0 > 0) {
        return None;
    }
    let Early { owner, held, asked, site } = early(facts, |owner| known(owner).is_some())?;
    let text = format!(
        "{owner} took {} until {} (peak {}) and kept it to the end without requesting more: how much of it is still used is not recorded",
        bytes(held),
        time(facts.story.since_start(asked)),
        facts.site(site)
    );
    Some((text, known(owner)?.1))
}

fn idle(facts: &Facts<'_>) -> Option<Case> {
    let known = |owner: &str| RELEASES.iter().find(|(name, _)| owner.starts_with(name) && *name != "PyTorch");
    if facts.failure.is_some() {
        return None;
    }
    let Early { owner, held, asked, site } = early(facts, |owner| known(owner).is_some())?;
    let ledger = &facts.story.ledger;
    let middle = Nanos(ledger.run.first.unwrap_or_default().0.midpoint(ledger.run.last.0));
    let works = facts.held.is_some_and(|it| it.bytes.0 > 0 && it.time > asked)
        && facts.lifetimes.is_some_and(|it| it.streams.iter().any(|used| used.until > middle));
    works.then(|| Case {
        what: format!(
            "{owner} had requested {} from the driver by {} and kept it, while only PyTorch requested more until the end",
            bytes(held),
            time(facts.story.since_start(asked))
        ),
        site: facts.site(site),
        bytes: held,
        sure: "certain that it was kept; whether arrays in it were still used is not recorded".into(),
        fix: Fix::words(
            known(owner).map_or("", |(_, release)| *release),
            format!("the device needs up to {} less, once its arrays are dropped", bytes(held)),
        ),
        verb: "report --all",
    })
}

fn find(facts: &Facts<'_>) -> Option<Case> {
    let failure = facts.failure?;
    let ordinal = failure.device();
    let ledger = &facts.story.ledger;
    let (asker, site) = match failure {
        Failure::Torch(_, error) => ("PyTorch", error.site),
        Failure::Jax(_, error) => ("JAX", facts.jax_line(error)),
        Failure::Refused(refused) => (ledger.sites.owner(refused.owner), refused.site),
    };
    let asked = failure.asked()?;
    let total = facts.story.device(ordinal).map(|device| device.total.0).filter(|total| *total > 0)?;
    let books = ledger.devices().get(&ordinal)?;
    let known = |owner: &str| RELEASES.iter().find(|(name, _)| owner.starts_with(name));
    // Programs give back at their end: the most that each had.
    let others = books.physical.owners().filter_map(|part| {
        let owner = ledger.sites.owner(part.id);
        let (name, release) = known(owner)?;
        (!asker.starts_with(name)).then_some((owner, *release, part.at_peak.bytes))
    });
    let (owner, release, held) = others.max_by_key(|(.., held)| *held)?;
    // Of a library beside PyTorch, what PyTorch has lying idle is another cause.
    let is_idle_torch =
        owner.starts_with("PyTorch") && !asker.starts_with("JAX") && !asker.starts_with("CuPy");
    (held.0.saturating_mul(5) >= total && held >= asked && !is_idle_torch).then(|| Case {
        what: format!(
            "{owner} in the same process had {} of the device's {} when {asker} requested {}",
            bytes(held),
            bytes(Bytes(total)),
            bytes(asked)
        ),
        site: facts.site(site),
        bytes: held,
        sure: "certain that it had this much at the peak; whether it needs all of it is not recorded".into(),
        fix: Fix::words(release, format!("frees up to {} for the others", bytes(held))),
        verb: "oom",
    })
}
