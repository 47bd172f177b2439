//! What `torch.cuda.memory_stats()` of the simulated allocator would say.

/// One statistic: current, peak, allocated, freed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Now.
    pub current: i64,
    /// The most so far.
    pub peak: i64,
    /// Sum of all increases.
    pub allocated: i64,
    /// Sum of all decreases.
    pub freed: i64,
}

impl Stat {
    pub(super) fn increase(&mut self, amount: u64) {
        let amount = amount as i64;
        self.current += amount;
        self.peak = self.peak.max(self.current);
        self.allocated += amount;
    }

    pub(super) fn decrease(&mut self, amount: u64) {
        let amount = amount as i64;
        self.current -= amount;
        self.freed += amount;
    }
}

/// The statistics that exist for all, the small and the large pool: index into [`Stats::arrays`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are PyTorch's")]
pub enum Name {
    Allocation,
    Segment,
    Active,
    InactiveSplit,
    AllocatedBytes,
    ReservedBytes,
    ActiveBytes,
    InactiveSplitBytes,
    RequestedBytes,
}

/// PyTorch's names of [`Name`], in order.
pub const NAMES: [&str; 9] = [
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
];

/// PyTorch's statistics of one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// By [`Name`], then small, large: "all" is their sum except for peaks, so it is kept too (index 0).
    pub arrays: [[Stat; 3]; 9],
    /// Live blocks that are too large to be split.
    pub oversize_allocations: Stat,
    /// Segments that are too large to be split.
    pub oversize_segments: Stat,
    /// Attempts to obtain memory after a flush.
    pub num_alloc_retries: u64,
    /// Out-of-memory errors raised.
    pub num_ooms: u64,
    /// `cudaMalloc` and page-mapping calls.
    pub num_device_alloc: u64,
    /// `cudaFree` and page-unmapping calls.
    pub num_device_free: u64,
    /// Flushes of everything.
    pub num_sync_all_streams: u64,
    /// Requests refused by `throw_on_cudamalloc_oom`.
    pub num_oom_rejections: u64,
}

impl Stats {
    #[inline]
    pub(super) fn increase(&mut self, name: Name, small: bool, amount: u64) {
        let row = &mut self.arrays[name as usize];
        row[0].increase(amount);
        row[if small { 1 } else { 2 }].increase(amount);
    }

    #[inline]
    pub(super) fn decrease(&mut self, name: Name, small: bool, amount: u64) {
        let row = &mut self.arrays[name as usize];
        row[0].decrease(amount);
        row[if small { 1 } else { 2 }].decrease(amount);
    }

    /// The sum of both pools.
    pub fn all(&self, name: Name) -> Stat {
        self.arrays[name as usize][0]
    }

    /// Every number, in the order of PyTorch's names.
    #[cfg(test)]
    pub(super) fn numbers(&self) -> impl Iterator<Item = (&'static str, [i64; 4])> {
        let four = |stat: &Stat| [stat.current, stat.peak, stat.allocated, stat.freed];
        let arrays = NAMES.iter().zip(&self.arrays);
        let arrays = arrays.flat_map(move |(name, pools)| pools.iter().map(move |stat| (*name, four(stat))));
        arrays.chain([
            ("oversize_allocations", four(&self.oversize_allocations)),
            ("oversize_segments", four(&self.oversize_segments)),
        ])
    }

    pub(super) fn reset_peaks(&mut self) {
        let stats = self.arrays.iter_mut().flatten();
        for stat in stats.chain([&mut self.oversize_allocations, &mut self.oversize_segments]) {
            stat.peak = stat.current;
        }
    }
}
