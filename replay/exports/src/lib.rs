//! Traces for other tools. A format is one file here and one line in [`EXPORTS`].
//!
//! Formats of one moment (flame graphs, profiles) show who held what, and add up to what `gputrace summary` says; formats
//! of the whole history are written event by event, so that a trace of any size needs no more memory than its live blocks.
#![forbid(unsafe_code)]

use std::io::{self, Write};

mod csv;
mod firefox;
mod folded;
mod jsonl;
mod nccl;
mod parquet;
pub mod parts;
mod perfetto;
mod pprof;
mod speedscope;
mod svg;
mod torch_pickle;

pub use parts::events::Request;
pub use pprof::live_profile;

/// What a format can do beyond showing one trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Takes {
    /// Several traces in one file: ranks of a job.
    pub several: bool,
    /// The difference to another trace.
    pub before: bool,
    /// It shows PyTorch's memory, and other memory on request.
    pub non_torch: bool,
}

impl Takes {
    /// One trace and nothing else.
    const ONE: Takes = Takes { several: false, before: false, non_torch: false };
}

/// A format.
pub struct Export {
    /// What `--format` calls it.
    pub name: &'static str,
    /// What it shows and who opens it.
    pub summary: &'static str,
    /// What it can do beyond showing one trace.
    pub takes: Takes,
    /// It is nothing to look at in a terminal.
    pub is_binary: bool,
    /// Writes it. Errors are those of what is written to.
    pub export: fn(&Request, &mut dyn Write) -> io::Result<()>,
}

/// Every format.
pub const EXPORTS: &[Export] = &[
    folded::ENTRY,
    svg::ENTRY,
    speedscope::ENTRY,
    pprof::ENTRY,
    firefox::ENTRY,
    perfetto::ENTRY,
    csv::ENTRY,
    jsonl::ENTRY,
    parquet::ENTRY,
    nccl::ENTRY,
    torch_pickle::ENTRY,
];

/// Formats that there were, and what has taken their place.
pub const GONE: [(&str, &str); 2] = [
    ("chrome", "`--format perfetto` has the same curves, for ui.perfetto.dev"),
    (
        "sqlite",
        "`--format parquet` has the same rows with their stacks, for SQL in DuckDB and for pandas (docs/SQL.md)",
    ),
];

#[cfg(test)]
mod tests;
