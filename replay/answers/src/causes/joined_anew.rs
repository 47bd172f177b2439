//! A cache of keys and values that is joined anew at each step: old and new are held together, and no size is used twice.

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Failure, Fix, Kind};
use gputrace_analyse::held::{Holder, OTHER_TENSOR, Sign};
use gputrace_report::sections::cache;
use gputrace_trace::words::{bytes, count};

/// Sizes of a line that each were larger than all before.
const LEAST_SIZES: u64 = 5;
/// Of parts of equal sizes, the joined one grows from the n-th to the next size by one part in n: so many percent more at most.
const SLACK: u64 = 5;

pub(super) const CAUSE: Cause = Cause {
    name: "a cache concatenated at each step (`torch.cat`)",
    kind: Kind::Peak,
    needs: "a line whose sizes only rise, and of which two successive sizes are held together at the peak, or for which segments were allocated although as much was free",
    against: "sizes that also fall, and a cache that is written in place",
    find: |facts| find(facts, true),
};

/// The same of what the program collects, outside a model.
pub(super) const RESULTS: Cause = Cause {
    name: "results concatenated at each step (`torch.cat`)",
    kind: Kind::Peak,
    needs: "a line outside a model whose sizes only rise, and of which two successive sizes are held together at the peak, or for which segments were allocated although as much was free",
    against: "sizes that also fall, and a cache of keys and values",
    find: |facts| find(facts, false),
};

/// What the line holds of the size before, while the new one is there.
fn old(holder: &Holder, is_cache: bool, asked: Option<Bytes>) -> Bytes {
    let largest = holder.sizes.last_key_value().map_or(0, |(size, _)| size.0);
    let mut sizes = holder.sizes.iter().filter(|(size, _)| size.0.saturating_mul(OTHER_TENSOR) >= largest);
    let next = 100 + SLACK + 100 / holder.rising_sizes.max(1);
    match (sizes.next(), sizes.next(), sizes.next()) {
        (Some((old, n)), Some((new, of_new)), None)
            // Several results are joined one after the other before the old ones go; of a cache, each layer's goes at once.
            if (n.abs_diff(*of_new) <= 1 || !is_cache && of_new < n)
                && new.0.saturating_mul(100) <= old.0.saturating_mul(next) =>
        {
            Bytes(old.0.saturating_mul(*n))
        }
        // The new one is the request that failed.
        (Some((old, n)), None, None)
            if asked.is_some_and(|new| {
                new > *old && new.0.saturating_mul(100) <= old.0.saturating_mul(next)
            }) =>
        {
            Bytes(old.0.saturating_mul(*n))
        }
        _ => Bytes(0),
    }
}

fn find(facts: &Facts<'_>, is_cache: bool) -> Option<Case> {
    let asked = |holder: &Holder| match facts.failure {
        Some(Failure::Torch(_, error)) if error.site == holder.site => {
            Some(error.requested.unwrap_or(error.bytes))
        }
        _ => None,
    };
    let old = |holder: &Holder| old(holder, is_cache, asked(holder));
    let is_joined = |holder: &&Holder| {
        holder.rising_sizes >= LEAST_SIZES && (old(holder).0 > 0 || facts.role(holder) == "KV cache")
    };
    let joined = || facts.holders().filter(is_joined);
    let most = joined().next()?;
    let is_of_model = most.signs.has(Sign::Forward) || facts.role(most) == "KV cache";
    if is_of_model != is_cache {
        return None;
    }
    let (name, fix) = match is_cache {
        true => (
            "a cache",
            "allocate the cache once for the longest length and write into it (`cache[:, :, position] = k`), instead of `torch.cat` each step; if nothing bounds its length, drop the oldest part",
        ),
        false => (
            "what was collected with more",
            "move each part to the CPU, and concatenate once after the loop; collect only what you use later",
        ),
    };
    let all = Bytes(joined().map(|holder| holder.bytes.0).sum());
    let held = facts.held?;
    let twice = Bytes(joined().map(|holder| old(holder).0).sum());
    let misfit = cache::torches(facts.story)
        .filter(|(ordinal, _)| *ordinal == held.device)
        .flat_map(|(_, torch)| cache::misfit_sites(torch))
        .filter(|(site, _)| joined().any(|holder| holder.site == *site))
        .map(|(_, misfits)| misfits.bought.bytes.0)
        .sum::<u64>();
    let is_twice = twice.0.saturating_mul(4) >= all.0 && facts.is_much(twice);
    let site = super::facts::called_at(&facts.site(most.site), Some(most));
    let site = match facts.keeper(most).filter(|_| !is_cache) {
        Some(keeper) => format!("{site}{}", keeper.behind()),
        None => site,
    };
    (all.0.saturating_mul(4) >= held.bytes.0 && (is_twice || facts.is_much(Bytes(misfit)))).then(|| {
        let copies = match is_twice {
            true => format!(
                "at the peak {} of them are the old copies, held until the new ones are complete",
                bytes(twice)
            ),
            false => format!("{} were reserved for sizes that no free block could fit", bytes(Bytes(misfit))),
        };
        Case {
            what: format!(
                "this line concatenates {name}, larger each time ({} sizes): {} in use there; {copies}",
                count(most.rising_sizes),
                bytes(all)
            ),
            site,
            // Without results on the GPU, none of it is there.
            bytes: if is_cache { twice.max(Bytes(misfit)) } else { all },
            sure: "certain: each size was larger than all before, and the blocks overlap".into(),
            fix: Fix::words(fix, ""),
            verb: "report --peak",
        }
    })
}
