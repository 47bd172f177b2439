//! What is left out of long runs, so that an answer takes seconds: every such length is a row of [`ALL`], and of docs/EFFORT.md.
//!
//! The lengths were chosen by the time that a step takes on two cores. None changes what is true of a run; each leaves something out of
//! what is said, or makes it less sure.

use crate::bytes::count;

/// What the length of a run counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Length {
    /// Events of the trace.
    Events,
    /// Requests of one device.
    Requests,
    /// Requests and frees of one device, with what else the program asks of the allocator.
    Ops,
    /// The same, for all replays of one answer together.
    OpsInAll,
    /// Calls of the driver, times what is tried for each.
    CallsInAll,
}

impl Length {
    /// In a sentence.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Length::Events => "events",
            Length::Requests => "requests",
            Length::Ops => "requests and frees",
            Length::OpsInAll => "requests and frees in all replays",
            Length::CallsInAll => "driver calls times attempts",
        }
    }
}

/// Something that is not done for a run longer than this.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// The longest run for which it is done.
    pub most: usize,
    /// What that counts.
    pub of: Length,
    /// Which answers it concerns.
    pub answers: &'static str,
    /// What a longer run lacks.
    pub leaves_out: &'static str,
}

impl Effort {
    /// Whether it is done for a run of this length.
    #[must_use]
    pub const fn covers(self, length: usize) -> bool {
        length <= self.most
    }

    /// The omission, as a line of an answer.
    #[must_use]
    pub fn note(self) -> String {
        format!("more than {} {}: {}", count(self.most as u64), self.of.words(), self.leaves_out)
    }
}

/// Replays behind the verdict of a report, and behind what it says of fragmentation.
pub const VERDICT: Effort = Effort {
    most: 400_000,
    of: Length::Events,
    answers: "`report`, `html`",
    leaves_out: "nothing is replayed for the verdict; `gputrace oom` and `gputrace replay` do it",
};
/// The same in a summary, which is made once.
pub const SUMMARY: Effort = Effort {
    most: 1_000_000,
    of: Length::Events,
    answers: "`reduce`",
    leaves_out: "the summary lacks a verdict that needs a replay, and a server's budget, and reports that",
};
/// What-ifs of a page.
pub const PAGE: Effort = Effort {
    most: 400_000,
    of: Length::Requests,
    answers: "`html`, `serve`",
    leaves_out: "the page has no what-ifs of that device, and reports that",
};
/// Settings that are tried against an out-of-memory error.
pub const REMEDIES: Effort = Effort {
    most: 100_000,
    of: Length::Ops,
    answers: "`oom`",
    leaves_out: "2 limits are tried instead of 12, and 3 settings at other addresses",
};
/// Settings of two options or more.
pub const COMPOSED: Effort = Effort {
    most: 1_000_000,
    of: Length::Ops,
    answers: "`tune`",
    leaves_out: "settings with two options are tried only if one option alone leaves enough to gain; the answer reports that",
};
/// Packing with all lifetimes known.
pub const PACKING: Effort = Effort {
    most: 20_000,
    of: Length::Requests,
    answers: "`tune`, policy `stalloc`",
    leaves_out: "requests are not packed as if all lifetimes were known",
};
/// Neighbours of the largest value that fits.
pub const NEIGHBOURS: Effort = Effort {
    most: 200_000,
    of: Length::Ops,
    answers: "`predict --fit`",
    leaves_out: "only the largest value itself is tried, not its neighbours",
};
/// Runs that a prediction leaves possible.
pub const DRAWS: Effort = Effort {
    most: 500_000,
    of: Length::Requests,
    answers: "`predict`",
    leaves_out: "4 runs that the prediction leaves possible are replayed, instead of 6",
};
/// Settings of a server.
pub const SERVER: Effort = Effort {
    most: 2_000_000,
    of: Length::Requests,
    answers: "`budget`",
    leaves_out: "the largest cache is found only for the recorded setting",
};
/// Replays at other addresses.
pub const GUESSES: Effort = Effort {
    most: 40_000_000,
    of: Length::OpsInAll,
    answers: "`replay`, `tune`, `oom`, `budget`",
    leaves_out: "fewer addresses are tried, 8 instead of 64; the JSON has their number (`n_guesses`)",
};
/// The same of a prediction: what its sizes leave open is more than what addresses do.
pub const GUESSES_OF_PREDICTION: Effort = Effort {
    most: 10_000_000,
    of: Length::OpsInAll,
    answers: "`predict`",
    leaves_out: "fewer addresses are tried, 8 instead of 64",
};
/// Guesses of what the driver had when the history began.
pub const SEEDING: Effort = Effort {
    most: 100_000,
    of: Length::CallsInAll,
    answers: "all that replay",
    leaves_out: "fewer driver states are tried for the start of the history",
};
/// Facts about the driver that are dated back.
pub const DATING: Effort = Effort {
    most: 4_000_000,
    of: Length::CallsInAll,
    answers: "all that replay",
    leaves_out: "knowledge of the driver counts only from when it was seen",
};

/// All of them.
pub const ALL: [Effort; 13] = [
    PACKING,
    REMEDIES,
    NEIGHBOURS,
    VERDICT,
    PAGE,
    DRAWS,
    SUMMARY,
    COMPOSED,
    SERVER,
    GUESSES_OF_PREDICTION,
    GUESSES,
    SEEDING,
    DATING,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_a_row_for_each() {
        let page = include_str!("../../docs/EFFORT.md");
        let row = |it: &Effort| {
            format!("| {} {} | {} | {} |", count(it.most as u64), it.of.words(), it.answers, it.leaves_out)
        };
        let rows: Vec<String> = ALL.iter().map(row).collect();
        let shown: Vec<&str> =
            page.lines().filter(|line| line.starts_with("| ") && line.contains('0')).collect();
        assert_eq!(shown, rows);
    }

    #[test]
    fn a_length_is_covered_up_to_itself() {
        assert!(PACKING.covers(20_000) && !PACKING.covers(20_001));
        let note = "more than 20,000 requests: requests are not packed as if all lifetimes were known";
        assert_eq!(PACKING.note(), note);
    }
}
