//! Where memory lies: pages, segments, and the place of a request in one.

/// 2 MiB: what the driver allocates physical memory in, since Pascal (measured, and pytorch#17120).
pub const PAGE: u64 = 2 << 20;

/// A contiguous range of addresses from the driver, in order of creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SegmentId(pub u32);

/// A new segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its number.
    pub id: SegmentId,
    /// Its start.
    pub address: u64,
}

/// The place of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// First byte.
    pub address: u64,
    /// Bytes including rounding and surplus: what `allocated_bytes` counts.
    pub bytes: u64,
    /// The segment that it lies in.
    pub segment: SegmentId,
    /// The policy's own number for it.
    pub handle: u32,
}
