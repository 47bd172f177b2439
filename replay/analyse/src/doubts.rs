//! Whether a replay is what was recorded, and why that is not known.

use gputrace_sim::ops::OpStream;
use gputrace_sim::whatif::SelfCheck;

/// Why the replay of the recorded setting is not known to be what was recorded.
#[must_use]
pub fn doubt(stream: &OpStream, check: &SelfCheck) -> Option<String> {
    strayed(check).or_else(|| guessed_pools(stream))
}

/// The replay is not the recorded run.
#[must_use]
pub fn strayed(check: &SelfCheck) -> Option<String> {
    let SelfCheck { n_matching, n_requests, .. } = check;
    (n_matching < n_requests).then(|| {
        format!(
            "the replay of the recorded setting places {} of {n_requests} requests elsewhere than the program (the trace does not have private pools)",
            n_requests - n_matching
        )
    })
}

/// The replay is the recorded run, but only by pools that were made up to fit it.
#[must_use]
pub fn guessed_pools(stream: &OpStream) -> Option<String> {
    let is_guessed = stream.pools.iter().any(|pool| pool.is_guessed());
    is_guessed.then(|| {
        "the trace does not show which requests used private pools; they were inferred from addresses".into()
    })
}
