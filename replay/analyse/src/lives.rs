//! The life of every block of PyTorch: asked for where, how large, from when to when.
//!
//! Moments are counted in births and deaths of blocks, not in time: two of them never coincide, so what overlapped is exact.

use std::sync::OnceLock;

use gputrace_schemas::event::{Bytes, Event, EventKind, Nanos, StackId, ThreadId};
use rustc_hash::FxHashMap;

use gputrace_trace::Before;
use gputrace_trace::ledger::{Block, Ledger, SiteId, Step, Watch};
use gputrace_trace::newest::Newest;

/// A block is not freed.
pub const NEVER: u32 = u32::MAX;

/// Number of a stream among those of all lives; none where the request was not seen. Much smaller than a handle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StreamNumber(u32);

impl StreamNumber {
    const NONE: StreamNumber = StreamNumber(u32::MAX);
}

impl Default for StreamNumber {
    fn default() -> StreamNumber {
        StreamNumber::NONE
    }
}

/// From the moment a block was allocated to the one it was taken back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Life {
    /// The block's size.
    pub bytes: Bytes,
    /// The amount that the program requested; the size where that was not seen.
    pub requested: Bytes,
    /// When it was allocated.
    pub since: Nanos,
    /// When it was taken back; the last moment of the trace if it was not.
    pub until: Nanos,
    /// Which birth or death its birth is, from 0.
    pub born: u32,
    /// Which its death is, or [`NEVER`].
    pub died: u32,
    /// From where.
    pub site: SiteId,
    /// From where, in full.
    pub stack: StackId,
    /// On which device.
    pub device: i16,
    /// The stream of the request: [`Lives::stream`].
    pub stream: StreamNumber,
    /// It was held when the history began: where and when it was requested is not known.
    pub is_from_before: bool,
}

impl Life {
    /// Whether it is held after `moment` births and deaths.
    #[must_use]
    pub fn is_held_at(&self, moment: u32) -> bool {
        self.born <= moment && moment < self.died
    }

    /// How long it was held.
    #[must_use]
    pub fn duration(&self) -> Nanos {
        Nanos(self.until.0.saturating_sub(self.since.0))
    }
}

// Ten million events have five million lives.
const _: () = assert!(size_of::<Life>() <= 56);

/// A block that was taken back while Python's collector of reference cycles ran.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Collected {
    /// Index of its life.
    pub life: u32,
    /// On which thread.
    pub thread: ThreadId,
    /// The stack of the one who gave it back.
    pub stack: StackId,
    /// The thread that had requested it.
    pub owner: ThreadId,
}

/// All of them, in the order of their births.
#[derive(Clone, Debug, Default)]
pub struct Lives {
    /// The lives.
    pub list: Vec<Life>,
    /// What the collector of reference cycles freed, in the order of the deaths.
    pub collected: Vec<Collected>,
    /// Births and deaths.
    pub n_moments: u32,
    open: FxHashMap<u64, (u32, ThreadId)>,
    last: Nanos,
    /// Blocks of each device that are still to come of those which its history does not begin with; none until the first block.
    before: Option<FxHashMap<i16, u64>>,
    streams: Newest<u64, StreamNumber>,
    /// Their handles.
    handles: Vec<u64>,
    moments: OnceLock<Vec<u32>>,
}

impl Watch for Lives {
    fn begin(&mut self, ledger: &mut Ledger) {
        *self = Lives::default();
        ledger.keep_steps();
    }

    fn event(&mut self, ledger: &mut Ledger, event: &Event) {
        self.last = self.last.max(event.time);
        for step in ledger.steps() {
            match step {
                Step::Block(addr, block) => {
                    let is_from_before = self.is_from_before(ledger, block.device);
                    self.born(*addr, block, event, is_from_before);
                }
                Step::BlockFreed(addr, _) => self.died(*addr, event),
                Step::Gained(_) | Step::Lost(_) => {}
                Step::BlockDone(..) | Step::Stranger(..) | Step::Heap(..) | Step::Pages(..) => {}
            }
        }
    }
}

impl Lives {
    fn is_from_before(&mut self, ledger: &Ledger, device: i16) -> bool {
        let before = self.before.get_or_insert_with(|| {
            let notes = ledger.health.notes.iter().filter_map(|(_, note)| Before::of_note(note));
            notes.map(|before| (before.device, before.n_blocks)).collect()
        });
        let left = before.get_mut(&device).filter(|left| **left > 0);
        left.is_some_and(|left| {
            *left -= 1;
            true
        })
    }

    fn born(&mut self, addr: u64, block: &Block, event: &Event, is_from_before: bool) {
        let Ok(idx) = u32::try_from(self.list.len()) else { return };
        self.open.insert(addr, (idx, event.thread));
        let stream = block.stream.map_or(StreamNumber::NONE, |stream| self.number_of(stream));
        self.list.push(Life {
            bytes: block.bytes,
            requested: block.requested,
            since: event.time,
            until: event.time,
            born: self.n_moments,
            died: NEVER,
            site: block.site,
            stack: block.stack,
            device: block.device,
            stream,
            is_from_before,
        });
        self.n_moments += 1;
    }

    fn number_of(&mut self, stream: u64) -> StreamNumber {
        let number = self.streams.of(stream);
        if *number == StreamNumber::NONE {
            *number = StreamNumber(self.handles.len() as u32);
            self.handles.push(stream);
        }
        *number
    }

    /// The stream of a life's request, where that was seen.
    #[must_use]
    pub fn stream(&self, life: &Life) -> Option<u64> {
        self.handles.get(life.stream.0 as usize).copied()
    }

    fn died(&mut self, addr: u64, event: &Event) {
        let Some((idx, owner)) = self.open.remove(&addr) else { return };
        let Some(life) = self.list.get_mut(idx as usize) else { return };
        (life.died, life.until) = (self.n_moments, event.time);
        self.n_moments += 1;
        if matches!(&event.kind, EventKind::BlockFree(free) if free.collecting) {
            self.collected.push(Collected { life: idx, thread: event.thread, stack: event.stack, owner });
        }
    }

    /// Addresses of the blocks that are held now, with the indexes of their lives.
    pub fn open_lives(&self) -> FxHashMap<u64, u32> {
        self.open.iter().map(|(addr, (idx, _))| (*addr, *idx)).collect()
    }

    /// Those that were never taken back last to the end.
    pub fn finish(&mut self) {
        for (idx, _) in std::mem::take(&mut self.open).into_values() {
            if let Some(life) = self.list.get_mut(idx as usize) {
                life.until = self.last;
            }
        }
    }

    /// Devices that have any.
    #[must_use]
    pub fn devices(&self) -> Vec<i16> {
        let mut devices: Vec<i16> = vec![];
        for life in &self.list {
            if !devices.contains(&life.device) {
                devices.push(life.device);
            }
        }
        devices.sort_unstable();
        devices
    }

    /// For each moment the index of the life that begins or ends then. Asked for once they are finished.
    pub fn moments(&self) -> &[u32] {
        self.moments.get_or_init(|| {
            let mut moments = vec![NEVER; self.n_moments as usize];
            for (idx, life) in (0..).zip(&self.list) {
                for moment in [life.born, life.died] {
                    if let Some(slot) = moments.get_mut(moment as usize) {
                        *slot = idx;
                    }
                }
            }
            moments
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::story::Story;
    use gputrace_trace::scene::recording;
    use gputrace_trace::source::Source;

    #[test]
    fn a_life_knows_its_stream_and_each_moment_its_life() {
        let scene = "block addr=a bytes=2M stream=7
            block addr=b bytes=1M
            free addr=a bytes=2M
            block addr=c bytes=1M stream=9
            block addr=d bytes=1M stream=7
            free addr=b bytes=1M";
        let mut lives = Lives::default();
        Story::watched(&Source::of("train.gtr", recording(scene)), &mut lives);
        lives.finish();
        let streams: Vec<_> = lives.list.iter().map(|life| lives.stream(life)).collect();
        assert_eq!(streams, [Some(7), Some(0), Some(9), Some(7)]);
        assert_eq!(lives.moments(), [0, 1, 0, 2, 3, 1]);
    }
}
