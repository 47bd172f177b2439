//! What differs between PyTorch releases: data, not code.
//!
//! Every row was measured by running the `libc10_cuda.so` of that release on a stub driver (`tests/oracle/`).

use crate::ops::RecordedSettings;

/// Which of several free blocks of equal size is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tie {
    /// The one at the lowest device address.
    Address,
    /// The one whose object was made first.
    BlockNumber,
    /// The one in the oldest segment; inside it the lowest address.
    SegmentOrder,
}

/// The shape of the out-of-memory text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OomText {
    /// 2.0: one parenthesis.
    Parenthesis,
    /// 2.1: sentences, with "capacty" and the advice of 2.0.
    Capacty,
    /// 2.2: advises expandable segments.
    Expandable,
    /// 2.3: the device ordinal is written as a raw character.
    RawOrdinal,
    /// From 2.4: private pools are named.
    PrivatePools,
}

/// One release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Profile {
    /// (major, minor).
    pub version: (u8, u8),
    /// The last number of the release that was measured.
    pub patch: u8,
    /// See [`Tie`].
    pub tie: Tie,
    /// See [`OomText`].
    pub oom_text: OomText,
}

impl Profile {
    /// `set_per_process_memory_fraction(1.0)` sets a limit up to 2.9; from 2.10 it removes it.
    pub fn full_fraction_is_a_limit(&self) -> bool {
        self.version < (2, 10)
    }

    /// Up to 2.9 the `>` of a roundup list overwrites the last explicit key.
    pub fn rest_overwrites_last_roundup(&self) -> bool {
        self.version < (2, 10)
    }

    /// Expandable segments serve private pools from 2.5.
    pub fn expands_private_pools(&self) -> bool {
        self.version >= (2, 5)
    }

    /// Up to 2.12 being inside `use_mem_pool` counts as a capture: no event is processed and nothing is flushed.
    pub fn mem_pool_is_capture(&self) -> bool {
        self.version < (2, 13)
    }

    /// From 2.11 pools with `use_on_oom` are tried before anything is flushed; up to 2.10, after all else has failed.
    pub fn overflows_before_flush(&self) -> bool {
        self.version >= (2, 11)
    }

    /// Up to 2.9 expandable blocks of pools with `use_on_oom` serve requests of others; later they are passed over.
    pub fn overflow_may_be_expandable(&self) -> bool {
        self.version < (2, 10)
    }

    /// Up to 2.3 a roundup division of 1 means that a request is not rounded at all; later, that it is rounded to 512.
    pub fn one_division_keeps_size(&self) -> bool {
        self.version < (2, 4)
    }
}

/// `2.minor`, as 2.minor.patch does it: `make oracle` takes the numbers of the wheels from these lines.
const fn row(minor: u8, patch: u8, tie: Tie, oom_text: OomText) -> Profile {
    Profile { version: (2, minor), patch, tie, oom_text }
}

/// Every release that was measured, oldest first.
pub const PROFILES: &[Profile] = &[
    row(0, 1, Tie::Address, OomText::Parenthesis),
    row(1, 2, Tie::Address, OomText::Capacty),
    row(2, 2, Tie::Address, OomText::Expandable),
    row(3, 1, Tie::Address, OomText::RawOrdinal),
    row(4, 1, Tie::Address, OomText::PrivatePools),
    row(5, 1, Tie::Address, OomText::PrivatePools),
    row(6, 0, Tie::Address, OomText::PrivatePools),
    row(7, 1, Tie::Address, OomText::PrivatePools),
    row(8, 0, Tie::Address, OomText::PrivatePools),
    row(9, 1, Tie::Address, OomText::PrivatePools),
    row(10, 0, Tie::Address, OomText::PrivatePools),
    row(11, 0, Tie::Address, OomText::PrivatePools),
    row(12, 1, Tie::BlockNumber, OomText::PrivatePools),
    row(13, 0, Tie::SegmentOrder, OomText::PrivatePools),
    row(14, 0, Tie::SegmentOrder, OomText::PrivatePools),
    row(15, 0, Tie::SegmentOrder, OomText::PrivatePools),
];

/// The release that is imitated where neither the user nor the trace names one.
pub const NEWEST: (u8, u8) = PROFILES[PROFILES.len() - 1].version;

/// Finds a release.
pub fn profile(version: (u8, u8)) -> Option<&'static Profile> {
    PROFILES.iter().find(|profile| profile.version == version)
}

/// The environment variables that set options, the one that wins first.
pub const VARIABLES: [&str; 2] = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"];

/// The variable to set for a run: the one that set its options, since the other one may lose against it; otherwise the one that its
/// release recommends. Releases from 2.9 on call the first deprecated, but 2.9 still ignores the second
/// (github.com/pytorch/pytorch/issues/183387).
pub fn variable_to_set(settings: &RecordedSettings) -> &'static str {
    let is_set = settings.options.as_ref().is_some_and(|options| !options.is_empty());
    match (settings.variable, settings.torch_version.or(settings.torch_at_least)) {
        (Some(variable), _) => variable,
        (None, Some(version)) if version >= (2, 10) && !is_set => VARIABLES[1],
        (None, _) => VARIABLES[0],
    }
}

/// Those that a release reads; all of them where it is not known.
pub fn variables(version: Option<(u8, u8)>) -> &'static [&'static str] {
    let knows_both = version.is_none_or(|version| version >= (2, 10));
    if knows_both { &VARIABLES } else { &VARIABLES[..1] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_that_a_run_had_comes_before_the_recommended_one() {
        let of = |options: Option<&str>, variable, torch_version| {
            let options = options.map(str::to_owned);
            variable_to_set(&RecordedSettings {
                options,
                variable,
                torch_version,
                ..RecordedSettings::default()
            })
        };
        let [old, new] = VARIABLES;
        assert_eq!([of(None, None, Some((2, 9))), of(None, None, Some((2, 10)))], [old, new]);
        assert_eq!(of(None, None, None), old);
        assert_eq!(of(Some(""), None, Some((2, 11))), new);
        assert_eq!(of(Some("a:b"), Some(old), Some((2, 11))), old);
        assert_eq!(of(Some("a:b"), Some(new), Some((2, 11))), new);
        // Of a snapshot nobody knows which one it was; the first works everywhere.
        assert_eq!(of(Some("a:b"), None, Some((2, 11))), old);
    }
}
