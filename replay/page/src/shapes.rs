//! What pictures are made of: changes of who holds how much, and what lay where.

use gputrace_schemas::event::{Bytes, Nanos};

/// What became of a holder from one state to the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Row {
    /// Which.
    pub holder: u32,
    /// Bytes more, or less.
    pub bytes: i64,
    /// Objects more, or fewer.
    pub objects: i32,
}

/// Something at an address for some time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Rectangle {
    pub addr: u64,
    pub bytes: Bytes,
    /// How many of its bytes the program did not ask for; [`u32::MAX`] stands for more.
    pub spare: u32,
    pub from: Nanos,
    /// None if it is there to the end.
    pub to: Option<Nanos>,
    /// Whose; for segments a [`Ground`](super::map::Ground), and four times the private pool that they are of, from 1.
    pub what: u32,
    /// Its number, where all are written down.
    pub number: u64,
}

impl Rectangle {
    /// Makes it a segment of this pool; its bytes, if it was not.
    pub(super) fn joins(&mut self, pool: u16) -> u64 {
        let what = self.what & 3 | u32::from(pool) << 2;
        if std::mem::replace(&mut self.what, what) == what { 0 } else { self.bytes.0 }
    }

    /// Its bytes for as long as it is there.
    pub(super) fn area(&self, end: Nanos) -> u128 {
        let time = self.to.unwrap_or(end).0.saturating_sub(self.from.0).max(1);
        u128::from(self.bytes.0) * u128::from(time)
    }
}
