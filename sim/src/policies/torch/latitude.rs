//! What the decisions of a run hung on, and so which other settings would have decided everything alike: these need no run
//! of their own.
//!
//! Each number is the largest that was compared with a setting. A setting that is larger would have come out the same way
//! each time; then the run, its addresses and its counters are the same, too.

use super::{LARGE_SEGMENT, MADE_TO_MEASURE, Options, SMALL_REQUEST, Tie, Torch};

/// What a run hung on.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Hinges {
    /// Held together with what was asked for, where no limit stood in the way. Bytes.
    pub(super) within_limit: u64,
    /// Held when no free block fitted, which is when old segments are collected. Bytes.
    pub(super) at_a_miss: u64,
    /// Of a block that was found or could have been given back, or a request whose block was split.
    pub(super) block: u64,
    /// How often segments above `max_split_size` were looked for, to make room. Where there are none, addresses choose among them.
    pub(super) n_rooms: u64,
    /// A segment, or a page, whose size can be set was made.
    pub(super) was_of_set_size: bool,
}

/// Which settings a run answers for.
#[derive(Clone, Debug)]
pub struct Latitude {
    options: Options,
    /// As the allocator took it, bytes.
    limit: Option<u64>,
    names_limit: bool,
    has_ties: bool,
    hinges: Hinges,
}

impl Torch {
    pub(super) fn hinges_on_segment(&mut self, rounded: u64, expands: bool) {
        let is_set = rounded > SMALL_REQUEST && (rounded < MADE_TO_MEASURE || expands);
        self.hinges.was_of_set_size |= is_set;
    }

    pub(super) fn latitude_so_far(&self) -> Latitude {
        Latitude {
            options: self.options.clone(),
            limit: self.limit,
            names_limit: self.names_limit(),
            has_ties: self.profile.tie == Tie::Address,
            hinges: self.hinges,
        }
    }
}

impl Latitude {
    /// Whether these options would have made the same of it, under the same limit.
    pub fn covers(&self, other: &Options) -> bool {
        self.is_same_otherwise(other)
            && (self.options.gc_threshold == other.gc_threshold
                || self.is_without_collection(other, self.limit))
    }

    /// Whether these options would have made the same of it under a limit that is lower, on a device without an end.
    pub fn covers_below(&self, other: &Options, limit: u64) -> bool {
        self.is_same_otherwise(other)
            && self.limit.is_none_or(|own| limit <= own)
            && self.hinges.within_limit <= limit
            && other.memory_fraction >= 1.0
            && self.is_without_collection(other, Some(limit))
    }

    /// How often more addresses choose with these options, where they are covered.
    pub fn more_ties(&self, other: &Options) -> u64 {
        let is_more = looks_for_room(other) && !looks_for_room(&self.options);
        if self.has_ties && is_more { self.hinges.n_rooms } else { 0 }
    }

    /// The text of an error under a limit that is lower; none where it cannot be told from this run's.
    pub fn message_below(&self, message: &str, limit: u64) -> Option<String> {
        if !self.names_limit {
            return Some(message.to_owned());
        }
        let said = |limit: u64| format!("{} allowed; ", super::oom::iec(limit));
        let own = said(self.limit?);
        (message.matches(&own).count() == 1).then(|| message.replace(&own, &said(limit)))
    }

    /// Whether nothing but collection can make a difference.
    fn is_same_otherwise(&self, other: &Options) -> bool {
        let (own, hinges) = (&self.options, self.hinges);
        // Where no block is as large, room is looked for in vain.
        let is_split_alike = own.max_split == other.max_split
            || hinges.block < own.max_split.min(other.max_split)
                && (looks_for_room(other) || !looks_for_room(own));
        let is_sized_alike = own.large_segment == other.large_segment
            || own.large_segment == LARGE_SEGMENT && !hinges.was_of_set_size;
        let rest = Options {
            max_split: own.max_split,
            large_segment: own.large_segment,
            gc_threshold: own.gc_threshold,
            ..other.clone()
        };
        is_split_alike && is_sized_alike && rest == *own
    }

    /// Whether neither this run nor one with these options under `limit` collects anything.
    fn is_without_collection(&self, other: &Options, limit: Option<u64>) -> bool {
        let never = |gc_threshold: f64, limit: Option<u64>| {
            let threshold = |limit: u64| (gc_threshold * limit as f64) as u64;
            gc_threshold <= 0.0 || limit.is_none_or(|limit| self.hinges.at_a_miss <= threshold(limit))
        };
        never(self.options.gc_threshold, self.limit) && never(other.gc_threshold, limit)
    }
}

fn looks_for_room(options: &Options) -> bool {
    options.max_split != u64::MAX
}
