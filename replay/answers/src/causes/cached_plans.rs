//! A cache of FFT plans, each with its work area.

use super::{Case, Cause, Facts, Kind};
use crate::causes::facts::Grown;
use gputrace_analyse::held::Sign;

pub(super) const CAUSE: Cause = Cause {
    name: "work areas of FFT plans kept in the plan cache",
    kind: Kind::Grew,
    needs: "memory that cuFFT asked for, or a line that calls an FFT asked for outside of any model, is left each time",
    against: "arrays that the program keeps",
    claims: Some(claims),
    find,
};

fn claims(grown: &Grown<'_>) -> bool {
    let named = &grown.site.named;
    let is_fft = ["_exec_fft", "get_fft_plan", "_fft_c2c", "in fft", "in rfft", "in irfft", "in stft"];
    !grown.has(Sign::Backward)
        && (named.owner == "cuFFT"
            || named.owner != "PyTorch block" && is_fft.iter().any(|name| named.site.contains(name)))
}

fn find(facts: &Facts<'_>) -> Option<Case> {
    facts.growth_of(
        &CAUSE,
        "each new length makes a plan, and the cache keeps its work area: `cupy.fft.config.get_plan_cache().set_size(0)` (or `set_memsize`), \
         `torch.backends.cuda.cufft_plan_cache.max_size = 1`, or pad to a few lengths",
    )
}
