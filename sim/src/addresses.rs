//! Which addresses the driver hands out.
//!
//! Up to PyTorch 2.11 an address decides which of two equally large free blocks is taken, so a replay is only as
//! exact as its addresses. [`Recorded`] repeats those of a trace, [`Bump`] never uses one twice,
//! and `driver/` chooses as the real driver does.

use crate::ops::{DriverCall, DriverEvent};
use crate::placement::PAGE;
use crate::skip::State;

/// Chooses addresses. It may also refuse, as a full device does.
pub trait AddressSpace {
    /// A place for a new segment that is needed at an op, or none where the driver refused.
    fn map(&mut self, bytes: u64, op: u32) -> Option<u64>;
    /// The segment is gone.
    fn unmap(&mut self, address: u64, bytes: u64);
    /// A place for a reservation.
    fn reserve(&mut self, bytes: u64) -> u64;
    /// The reservation is gone.
    fn unreserve(&mut self, address: u64, bytes: u64) {
        let _ = (address, bytes);
    }
    /// Whether the driver put pages behind part of a reservation.
    fn commit(&mut self, address: u64, bytes: u64) -> bool {
        let _ = (address, bytes);
        true
    }
    /// Whether to refuse everything, as the driver did when a recorded request failed.
    fn repeat_refusals(&mut self, repeat: bool) {
        let _ = repeat;
    }
    /// Pages were taken away again.
    fn decommit(&mut self, address: u64, bytes: u64) {
        let _ = (address, bytes);
    }
    /// How many calls were others than the recorded ones, where that is known.
    fn n_strayed(&self) -> u64 {
        0
    }
    /// The same once more, for a run that goes another way from here on; none where that cannot be.
    fn fork<'b>(&self) -> Option<Box<dyn AddressSpace + 'b>>
    where
        Self: 'b,
    {
        None
    }
    /// Writes all that later addresses depend on, and whether that was all: where it is the same again, the same calls get the same addresses.
    fn write(&self, to: &mut State) -> bool {
        let _ = to;
        false
    }
    /// The op from which on a call may have another answer, whatever was called before.
    fn next_change(&self) -> Option<u32> {
        None
    }
}

/// In which direction [`Bump`] goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Every address is above all earlier ones.
    Ascending,
    /// Every address is below all earlier ones.
    Descending,
}

/// Addresses that are never used twice.
#[derive(Clone, Copy, Debug)]
pub struct Bump {
    next: u64,
    direction: Direction,
}

impl Bump {
    /// Starts in the middle of the address space.
    pub fn new(direction: Direction) -> Bump {
        Bump { next: 0x7f00_0000_0000, direction }
    }
}

impl AddressSpace for Bump {
    fn map(&mut self, bytes: u64, _op: u32) -> Option<u64> {
        Some(self.reserve(bytes))
    }

    fn unmap(&mut self, _address: u64, _bytes: u64) {}

    fn reserve(&mut self, bytes: u64) -> u64 {
        let bytes = bytes.next_multiple_of(PAGE);
        match self.direction {
            Direction::Ascending => {
                self.next += bytes;
                self.next - bytes
            }
            Direction::Descending => {
                self.next -= bytes;
                self.next
            }
        }
    }

    fn fork<'b>(&self) -> Option<Box<dyn AddressSpace + 'b>>
    where
        Self: 'b,
    {
        Some(Box::new(*self))
    }

    fn write(&self, to: &mut State) -> bool {
        to.put(self.next);
        true
    }
}

/// Addresses in an order that depends only on a seed: what is known of them is nothing.
#[derive(Clone, Copy, Debug)]
pub struct Shuffled {
    seed: u64,
    n_mapped: u64,
}

impl Shuffled {
    /// One order of many.
    pub fn new(seed: u64) -> Shuffled {
        Shuffled { seed, n_mapped: 0 }
    }
}

impl AddressSpace for Shuffled {
    fn map(&mut self, bytes: u64, _op: u32) -> Option<u64> {
        Some(self.reserve(bytes))
    }

    fn unmap(&mut self, _address: u64, _bytes: u64) {}

    fn reserve(&mut self, _bytes: u64) -> u64 {
        self.n_mapped += 1;
        // SplitMix64's finaliser. Slots of 16 TiB that no two segments share: 16 bits chosen, 23 counted.
        let mut mixed = self.seed.wrapping_add(self.n_mapped.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed = (mixed >> 48) & 0xffff;
        (mixed << 47) | ((self.n_mapped & 0x7f_ffff) << 24)
    }

    fn fork<'b>(&self) -> Option<Box<dyn AddressSpace + 'b>>
    where
        Self: 'b,
    {
        Some(Box::new(*self))
    }

    fn write(&self, to: &mut State) -> bool {
        to.put(self.n_mapped);
        true
    }
}

/// Repeats the driver calls of a trace: same addresses, same refusals. What does not follow the trace gets
/// addresses far away from it and is counted.
#[derive(Clone, Debug)]
pub struct Recorded {
    script: Vec<DriverEvent>,
    next: usize,
    fallback: Bump,
    refuses: bool,
    /// Calls that the trace does not have.
    n_strayed: u64,
}

impl Recorded {
    /// Follows `script`.
    pub fn new(script: &[DriverEvent]) -> Recorded {
        let fallback = Bump { next: 0x10_0000_0000_0000, direction: Direction::Ascending };
        Recorded { script: script.to_vec(), next: 0, fallback, refuses: false, n_strayed: 0 }
    }

    fn upcoming(&self) -> Option<DriverEvent> {
        self.script.get(self.next).copied()
    }

    fn stray(&mut self) {
        self.n_strayed += 1;
    }

    /// The order inside a flush may differ from the trace's.
    fn give_back(&mut self, call: DriverCall, address: u64) {
        let burst = self.script[self.next..].iter().take_while(|event| event.call == call);
        match burst.enumerate().find(|(_, event)| event.address == address).map(|(index, _)| index) {
            Some(index) => {
                self.script.swap(self.next, self.next + index);
                self.next += 1;
            }
            None => self.stray(),
        }
    }
}

impl AddressSpace for Recorded {
    fn map(&mut self, bytes: u64, _op: u32) -> Option<u64> {
        match self.upcoming() {
            _ if self.refuses => None,
            Some(event) if event.call == DriverCall::Alloc && event.bytes == bytes => {
                self.next += 1;
                Some(event.address)
            }
            // The driver had refused: the trace goes on with giving memory back.
            Some(event) if matches!(event.call, DriverCall::Free | DriverCall::Unmap) => None,
            _ => {
                self.stray();
                Some(self.fallback.reserve(bytes))
            }
        }
    }

    fn unmap(&mut self, address: u64, _bytes: u64) {
        self.give_back(DriverCall::Free, address);
    }

    fn reserve(&mut self, bytes: u64) -> u64 {
        match self.upcoming() {
            // The first pages of a reservation are at its start.
            Some(event) if event.call == DriverCall::Map => event.address,
            _ => self.fallback.reserve(bytes),
        }
    }

    fn commit(&mut self, address: u64, bytes: u64) -> bool {
        match self.upcoming() {
            _ if self.refuses => false,
            Some(event)
                if event.call == DriverCall::Map && (event.address, event.bytes) == (address, bytes) =>
            {
                self.next += 1;
                true
            }
            Some(event) if matches!(event.call, DriverCall::Free | DriverCall::Unmap) => false,
            _ => {
                self.stray();
                true
            }
        }
    }

    fn repeat_refusals(&mut self, repeat: bool) {
        self.refuses = repeat;
    }

    fn n_strayed(&self) -> u64 {
        self.n_strayed
    }

    fn fork<'b>(&self) -> Option<Box<dyn AddressSpace + 'b>>
    where
        Self: 'b,
    {
        Some(Box::new(self.clone()))
    }

    fn decommit(&mut self, address: u64, _bytes: u64) {
        self.give_back(DriverCall::Unmap, address);
    }

    /// The script is only reordered where it is followed, and so at no later place.
    fn write(&self, to: &mut State) -> bool {
        to.put_all([self.next as u64, self.fallback.next, u64::from(self.refuses), self.n_strayed]);
        true
    }
}
