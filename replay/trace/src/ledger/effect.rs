//! What an event did to the books: what those who write it down see ([`Step`]), and what one part of the books finds out for the next.

use gputrace_schemas::event::{Bytes, OutOfMemory};

use super::driver::{Change, Mapped, Object};
use super::findings::Finding;
use super::heaps::HeapBlock;
use super::sites::SiteId;
use super::torch::Block;

/// A block that was taken back without having been seen allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stranger {
    /// On which device.
    pub device: i16,
    /// Its first byte.
    pub addr: u64,
    /// How large.
    pub bytes: Bytes,
    /// Its number, as [`Block::serial`].
    pub serial: u64,
}

/// One thing that an event did to the books, for those who write it down: see [`super::Ledger::keep_steps`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// The driver handed this out.
    Gained(Object),
    /// The program gave this back, or it went away with its context.
    Lost(Object),
    /// Pages became visible, or are not visible any more.
    Pages(Paging, Mapped),
    /// PyTorch handed out the block at this address.
    Block(u64, Block),
    /// PyTorch took back the block at this address. Streams may still use it.
    BlockFreed(u64, Block),
    /// No stream uses that block any more.
    BlockDone(u64, Block),
    /// PyTorch took back a block that was not seen handed out.
    Stranger(Fate, Stranger),
    /// A library handed out the block at this address of memory that it has, or took it back.
    Heap(Fate, u64, HeapBlock),
}

/// What became of pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Paging {
    /// Memory became visible.
    Mapped,
    /// Memory is not visible any more.
    Unmapped,
    /// PyTorch may use these pages of an expandable segment from now on: all since it last might, as one call.
    Grown,
    /// PyTorch unmapped a page of an expandable segment, and whether that goes on where the one before ended.
    Shrunk(bool),
}

/// What became of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// It was handed out.
    Allocated,
    /// It was taken back. Streams may still use it.
    Freed,
    /// No stream uses it any more.
    Done,
}

/// What the newest event did, where that was asked for.
#[derive(Default)]
pub(super) struct Steps {
    pub(super) wanted: bool,
    pub(super) list: Vec<Step>,
}

impl Steps {
    pub(super) fn push(&mut self, step: Step) {
        if self.wanted {
            self.list.push(step);
        }
    }
}

/// What the newest event did. Each part of the books adds what those after it need, so that no event comes back to one.
#[derive(Default)]
pub(super) struct Effect {
    /// From where it was, if it was a call.
    pub(super) site: SiteId,
    /// PyTorch's caching allocator made the call that was booked last.
    pub(super) is_by_torch: bool,
    /// What it did to what the driver handed out.
    pub(super) changes: Vec<Change>,
    pub(super) steps: Steps,
    /// The device that holds more than ever by it.
    pub(super) peaked: Option<i16>,
    /// What did not add up.
    pub(super) found: Vec<Finding>,
    /// The request for memory that it says has failed for good.
    pub(super) ran_out: Option<OutOfMemory>,
}

impl Effect {
    /// Another event comes.
    pub(super) fn begin(&mut self) {
        self.changes.clear();
        self.steps.list.clear();
        (self.peaked, self.ran_out) = (None, None);
    }

    /// Something that the driver handed out has changed.
    pub(super) fn changed(&mut self, change: Change) {
        match change {
            Change::Gained(object) => self.steps.push(Step::Gained(object)),
            Change::Freed(object) | Change::Dropped(object) => self.steps.push(Step::Lost(object)),
            Change::Mapped(range) => self.steps.push(Step::Pages(Paging::Mapped, range)),
            Change::Unmapped(range) => self.steps.push(Step::Pages(Paging::Unmapped, range)),
            Change::Reserved(..) | Change::Unreserved(..) | Change::GraphsKeep(..) => {}
        }
        self.changes.push(change);
    }
}
