//! Traces for other tools. A format is one file here and one line in [`EXPORTS`].
//!
//! Formats of one moment (flame graphs, profiles) show who held what, and add up to what `gputrace summary` says; formats
//! of the whole history are written event by event, so that a trace of any size needs no more memory than its live blocks.

use std::io::{self, Write};

mod chrome;
mod csv;
mod firefox;
mod folded;
mod jsonl;
mod nccl;
mod parquet;
mod parts;
mod perfetto;
mod pprof;
mod speedscope;
mod sqlite;
mod svg;
mod torch_pickle;

pub use parts::events::Request;

/// What a format can do beyond showing one trace.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Takes {
    /// Several traces in one file: ranks of a job.
    pub several: bool,
    /// The difference to another trace.
    pub before: bool,
    /// It shows PyTorch's memory, and other memory on request.
    pub non_torch: bool,
}

/// A format.
pub trait Export: Sync {
    /// What `--format` calls it.
    fn name(&self) -> &'static str;
    /// What files of it end with, without the dot.
    fn extension(&self) -> &'static str;
    /// What it shows and who opens it.
    fn summary(&self) -> &'static str;
    /// What it can do beyond showing one trace.
    fn takes(&self) -> Takes {
        Takes::default()
    }
    /// Writes it.
    ///
    /// # Errors
    /// Those of `out`.
    fn export(&self, request: &Request, out: &mut dyn Write) -> io::Result<()>;
}

/// Every format.
pub const EXPORTS: &[&dyn Export] = &[
    &folded::Folded,
    &svg::Svg,
    &speedscope::Speedscope,
    &pprof::Pprof,
    &firefox::Firefox,
    &chrome::Chrome,
    &perfetto::Perfetto,
    &csv::Csv,
    &jsonl::Jsonl,
    &parquet::Parquet,
    &sqlite::Sqlite,
    &nccl::Nccl,
    &torch_pickle::TorchPickle,
];

#[cfg(test)]
mod tests;
