//! Allocators. A policy decides where each request lives; the simulator owns the trace, the streams and the books.
//!
//! A new policy is one file here, a `mod` line and a line in [`POLICIES`]: help, errors and the conformance tests
//! walk that slice.

use crate::device::{Device, Placement};
use crate::ops::{OpStream, PoolChange, PoolIdx, StreamIdx};
use crate::skip::State;

mod best_fit;
mod bfc;
mod buddy;
mod cuda_async;
mod cupy;
mod direct;
mod gmlake;
mod paged;
mod rmm_arena;
mod rmm_binning;
mod rmm_pool;
mod stalloc;
mod tlsf;
pub mod torch;

/// Why requests go to a pool other than the default one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capture {
    /// They do not.
    No,
    /// The stream is being captured into a CUDA graph.
    Graph,
    /// The program is inside `torch.cuda.use_mem_pool`.
    MemPool,
}

/// A request of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Bytes, before any rounding; never 0.
    pub bytes: u64,
    /// The stream that it may be used on at once.
    pub stream: StreamIdx,
    /// The pool that it is to come from.
    pub pool: PoolIdx,
    /// What that pool is for.
    pub capture: Capture,
    /// It restores what was there: a block of just these bytes at this address, if that is free.
    pub at: Option<u64>,
}

/// A request that could not be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// Bytes that the policy last asked the driver for.
    pub segment_bytes: u64,
    /// What the program would have been told.
    pub message: String,
}

impl OutOfMemory {
    /// An error without PyTorch's text.
    pub(crate) fn plain(segment_bytes: u64) -> OutOfMemory {
        OutOfMemory {
            segment_bytes,
            message: format!("out of memory: {} do not fit", crate::bytes::iec(segment_bytes)),
        }
    }
}

/// Decides where each request lives.
pub trait Policy {
    /// Serves `request` from cached memory or from new segments of `device`. The order of attempts, including what
    /// is flushed before giving up, is the policy. With default options it serves whatever `device` has room for.
    ///
    /// # Errors
    /// When nothing helped.
    fn alloc(&mut self, device: &mut Device, request: Request) -> Result<Placement, OutOfMemory>;

    /// The program gave memory back, but streams may still use it: it must not be reused yet.
    fn free_requested(&mut self, placement: Placement) {
        let _ = placement;
    }

    /// Takes back memory that no stream uses any more.
    fn free(&mut self, device: &mut Device, placement: Placement);

    /// The program asked to give cached memory back (`empty_cache`).
    fn trim(&mut self, device: &mut Device);

    /// Begins with a segment that this allocator had under the same settings, with blocks in use and free ones. The
    /// placements of those in use, with their place among the blocks; none where it cannot begin in the middle.
    fn adopt(&mut self, device: &mut Device, segment: &StandingSegment) -> Option<Vec<(usize, Placement)>> {
        let _ = (device, segment);
        None
    }

    /// What a request is rounded to before a block is sought, bytes; none where the policy does not say.
    fn rounded(&self, bytes: u64) -> Option<u64> {
        let _ = bytes;
        None
    }

    /// The program dropped a private pool.
    fn release_pool(&mut self, pool: PoolIdx) {
        let _ = pool;
    }

    /// The program changed how a private pool is used.
    fn change_pool(&mut self, device: &mut Device, pool: PoolIdx, change: PoolChange) {
        let _ = (device, pool, change);
    }

    /// Which other settings would have made the same of the run so far; none where the policy does not say.
    fn latitude(&self) -> Option<torch::Latitude> {
        None
    }

    /// Whether a request of so many bytes can come out otherwise where the process may reserve `limit` bytes, which is less than it may
    /// here. No earlier one can have.
    fn hangs_on_limit(&self, bytes: u64, limit: u64) -> bool {
        let _ = (bytes, limit);
        true
    }

    /// The same once more, for a run that may reserve less from here on; none where that cannot be.
    fn under_limit(&self, limit: u64) -> Option<Box<dyn Policy>> {
        let _ = limit;
        None
    }

    /// Writes all that later decisions depend on, and whether that was all: where it is the same again, and device and addresses with it, the same
    /// requests get the same answers, so that they need not be simulated ([`skip`](crate::skip)). `live` is where everything lies that is in
    /// use or pending, in an order that is the same then; the device has written which segments there are, by their order.
    fn write(&self, to: &mut State, live: &[Placement]) -> bool {
        let _ = (to, live);
        false
    }

    /// Shows each number that only counts, and so nothing that is decided depends on, in one order.
    fn tallies(&mut self, see: &mut dyn FnMut(&mut u64)) {
        let _ = see;
    }

    /// Numbers that only this policy has, in the order of its documentation.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// A segment that was there before the history began. The blocks tile it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StandingSegment {
    /// Start.
    pub address: u64,
    /// Length, bytes.
    pub bytes: u64,
    /// The stream that owns it.
    pub stream: StreamIdx,
    /// The pool that owns it.
    pub pool: PoolIdx,
    /// PyTorch's small or large half of the pool.
    pub small: bool,
    /// From low to high addresses: length, and what was requested where it is in use, bytes.
    pub blocks: Vec<(u64, Option<u64>)>,
}

/// Name of the counter of choices that only device addresses decided. A policy that has it depends on addresses.
pub const ADDRESS_TIES: &str = "address_ties";

/// How sure a policy's numbers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fidelity {
    /// The real allocator is public and deterministic; this does the same, byte for byte.
    Exact,
    /// The real allocator is closed or depends on timing; this shows what it cannot beat, or a plausible model.
    Model,
}

/// What a policy is built from.
#[derive(Clone, Copy, Debug)]
pub struct Build<'a> {
    /// The text after `NAME:`, or nothing.
    pub options: &'a str,
    /// The PyTorch release to imitate, where that matters.
    pub torch_version: (u8, u8),
    /// Number of streams of the trace.
    pub n_streams: usize,
    /// Number of pools of the trace.
    pub n_pools: usize,
    /// What a run of the same program that was profiled before would have shown: for allocators that plan, and nobody else.
    pub profile: Option<&'a OpStream>,
}

/// Options that a policy does not understand. The text says what it does understand.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct OptionError(pub String);

/// A policy that can be chosen by name.
pub struct PolicyEntry {
    /// What `--policy` takes.
    pub name: &'static str,
    /// One line of help.
    pub summary: &'static str,
    /// One line about its options.
    pub options: &'static str,
    /// How sure its numbers are.
    pub fidelity: Fidelity,
    /// Makes one.
    pub build: fn(Build) -> Result<Box<dyn Policy>, OptionError>,
}

/// Every policy. The first is the default.
pub const POLICIES: &[PolicyEntry] = &[
    torch::ENTRY,
    direct::ENTRY,
    cuda_async::ENTRY,
    bfc::ENTRY,
    cupy::ENTRY,
    rmm_pool::ENTRY,
    rmm_arena::ENTRY,
    rmm_binning::ENTRY,
    gmlake::ENTRY,
    stalloc::ENTRY,
    paged::ENTRY,
    best_fit::ENTRY,
    buddy::ENTRY,
    tlsf::ENTRY,
];

/// Finds a policy by name.
///
/// # Errors
/// When there is none of that name; the text lists those that there are.
pub fn by_name(name: &str) -> Result<&'static PolicyEntry, OptionError> {
    POLICIES.iter().find(|entry| entry.name == name).ok_or_else(|| {
        let known: Vec<&str> = POLICIES.iter().map(|entry| entry.name).collect();
        let meant = meant(name, &known);
        OptionError(format!("no policy is called `{name}`{meant}; policies are {}", known.join(", ")))
    })
}

/// `, did you mean x?` where a known name is like the one that was written: at most two of its letters are others, or a third.
pub(crate) fn meant(written: &str, known: &[&str]) -> String {
    let nearest = known.iter().map(|name| (distance(written, name), *name)).min();
    match nearest {
        Some((letters, name)) if letters * 2 < name.len() && letters <= (name.len() / 3).max(2) => {
            format!(", did you mean `{name}`?")
        }
        Some(_) | None => String::new(),
    }
}

/// Letters to insert, drop or change to make one of the other (Levenshtein).
fn distance(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (at, letter) in one.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], at + 1);
        for (column, its) in other.bytes().enumerate() {
            let changed = diagonal + usize::from(letter != its);
            diagonal = row[column + 1];
            row[column + 1] = changed.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[other.len()]
}

/// Reads `key=value` options separated by commas (or `key:value`): the grammar of every policy but `torch`.
///
/// # Errors
/// When a key is not among `known` or a pair has no value.
pub(crate) fn key_values<'a>(
    options: &'a str,
    known: &[&str],
) -> Result<Vec<(&'a str, &'a str)>, OptionError> {
    let mut pairs = Vec::new();
    for part in options.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let Some((key, value)) = part.split_once(['=', ':']) else {
            return Err(OptionError(format!("`{part}` has no value; write {part}=VALUE")));
        };
        if !known.contains(&key) {
            let said = if known.is_empty() {
                "this policy takes no options".into()
            } else {
                format!("known options: {}", known.join(", "))
            };
            return Err(OptionError(format!("no option is called `{key}`; {said}")));
        }
        pairs.push((key, value));
    }
    Ok(pairs)
}

/// The largest amount that an option takes: more than any processor addresses (57 bits at most, with five levels of
/// page tables), so that what a policy adds to it or rounds up fits in 64 bits.
const LARGEST_AMOUNT: u64 = 1 << 57;

/// Reads an amount of memory, naming the option in the error.
pub(crate) fn amount(key: &str, value: &str) -> Result<u64, OptionError> {
    let bytes = crate::bytes::parse(value).map_err(|error| OptionError(format!("{key}: {error}")))?;
    if bytes > LARGEST_AMOUNT {
        let largest = crate::bytes::iec(LARGEST_AMOUNT);
        return Err(OptionError(format!("{key}: {value} is more than any device has ({largest} at most)")));
    }
    Ok(bytes)
}
