//! Brief forms of records: what the records before them in the same chunk have said is left out.
//!
//! PyTorch's totals change by the block that is handed out or taken back, its stream seldom, and its operations are
//! numbered one after the other: in a training step nearly all of these records have a brief form, half as long.
//!
//! ```text
//!  chunk | BlockAlloc 512 B, allocated 9,728, reserved 2 MiB, stream 0 | BriefFree 512 B | BriefAlloc 1,024 B | ...
//!                                                            allocated 9,216 ──┘     10,240 ──┘
//! ```
//!
//! The writer and every reader keep the same [`Said`]. Both start with nothing at the beginning of a chunk, so that a
//! chunk explains itself, whatever became of those before it; and what was lost for want of a chunk has said nothing.

use crate::record::{
    BlockAlloc, BlockFree, BriefAlloc, BriefForward, BriefFree, Call, Forward, Kind, Payload, UNKNOWN,
    pack_device, unpack_device,
};

/// Bits of [`BriefAlloc::bytes_slack`] that are the bytes of the block: a tebibyte.
const BYTES_BITS: u32 = 40;
/// The slack of a block whose request did not pass by; smaller ones are bytes.
const NO_REQUEST: u64 = (1 << (64 - BYTES_BITS)) - 1;
/// In [`Said::device`], beside the ordinal: a device was named.
const NAMED: u16 = 1 << 8;

/// What the records of a chunk have said so far. The default is nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Said {
    /// PyTorch's totals after the last block.
    allocated: u64,
    reserved: u64,
    /// The last block that was handed out was for this one.
    stream: u64,
    /// The last forward operation; 0 none.
    operation: u64,
    /// The last block's ordinal and [`NAMED`]; 0 none.
    device: u16,
}

/// A record that has a brief form.
pub trait Brief: Payload {
    /// The brief form.
    type Form: Payload;

    /// The brief form, if it stands for all of the record; then it is said.
    fn shorten(&self, said: &mut Said) -> Option<Self::Form>;

    /// The record is said as it is.
    fn say(&self, said: &mut Said);

    /// What a brief form stands for, which is said now. `None` where it lacks what it refers to: no writer does that.
    fn restore(form: &Self::Form, said: &mut Said) -> Option<Self>;
}

impl Brief for BlockAlloc {
    type Form = BriefAlloc;

    #[inline]
    fn shorten(&self, said: &mut Said) -> Option<BriefAlloc> {
        let (device, bytes) = unpack_device(self.device_bytes);
        let is_next = said.device == named(device)
            && self.allocated == said.allocated.wrapping_add(bytes)
            && self.reserved == said.reserved
            && self.stream == said.stream;
        let slack = bytes.wrapping_sub(self.requested);
        let has_request = self.requested != UNKNOWN;
        if !is_next || bytes >> BYTES_BITS != 0 || (has_request && slack >= NO_REQUEST) {
            return None;
        }
        said.allocated = self.allocated;
        let slack = if has_request { slack } else { NO_REQUEST };
        Some(BriefAlloc { addr: self.addr, bytes_slack: slack << BYTES_BITS | bytes, stack: self.stack })
    }

    #[inline]
    fn say(&self, said: &mut Said) {
        let (device, _) = unpack_device(self.device_bytes);
        (said.device, said.allocated, said.reserved) = (named(device), self.allocated, self.reserved);
        said.stream = self.stream;
    }

    fn restore(form: &BriefAlloc, said: &mut Said) -> Option<BlockAlloc> {
        let device = said.block_device()?;
        let (slack, bytes) = (form.bytes_slack >> BYTES_BITS, form.bytes_slack & ((1 << BYTES_BITS) - 1));
        said.allocated = said.allocated.wrapping_add(bytes);
        Some(BlockAlloc {
            addr: form.addr,
            device_bytes: pack_device(device, bytes),
            requested: if slack == NO_REQUEST { UNKNOWN } else { bytes.wrapping_sub(slack) },
            stream: said.stream,
            allocated: said.allocated,
            reserved: said.reserved,
            stack: form.stack,
        })
    }
}

impl Brief for BlockFree {
    type Form = BriefFree;

    #[inline]
    fn shorten(&self, said: &mut Said) -> Option<BriefFree> {
        let (device, bytes) = unpack_device(self.device_bytes);
        let is_next = said.device == named(device)
            && self.allocated == said.allocated.wrapping_sub(bytes)
            && self.reserved == said.reserved;
        if !is_next {
            return None;
        }
        said.allocated = self.allocated;
        Some(BriefFree { addr: self.addr, bytes, stack: self.stack })
    }

    #[inline]
    fn say(&self, said: &mut Said) {
        let (device, _) = unpack_device(self.device_bytes);
        (said.device, said.allocated, said.reserved) = (named(device), self.allocated, self.reserved);
    }

    fn restore(form: &BriefFree, said: &mut Said) -> Option<BlockFree> {
        let device = said.block_device()?;
        said.allocated = said.allocated.wrapping_sub(form.bytes);
        Some(BlockFree {
            addr: form.addr,
            device_bytes: pack_device(device, form.bytes),
            allocated: said.allocated,
            reserved: said.reserved,
            stack: form.stack,
        })
    }
}

impl Brief for Forward {
    type Form = BriefForward;

    #[inline]
    fn shorten(&self, said: &mut Said) -> Option<BriefForward> {
        if said.operation == 0 || self.operation != said.operation.wrapping_add(1) {
            return None;
        }
        said.operation = self.operation;
        Some(BriefForward { stack: self.stack })
    }

    #[inline]
    fn say(&self, said: &mut Said) {
        said.operation = self.operation;
    }

    fn restore(form: &BriefForward, said: &mut Said) -> Option<Forward> {
        if said.operation == 0 {
            return None;
        }
        said.operation = said.operation.wrapping_add(1);
        Some(Forward { operation: said.operation, stack: form.stack })
    }
}

impl Said {
    fn block_device(&self) -> Option<i8> {
        (self.device != 0).then_some(self.device as i8)
    }
}

#[inline]
fn named(device: i8) -> u16 {
    NAMED | u16::from(device as u8)
}

/// Whether what records of this kind say counts: only [`crate::ring::Producer::push_brief`] may write them.
pub(crate) const fn says(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::BlockAlloc
            | Kind::BlockFree
            | Kind::Forward
            | Kind::BriefAlloc
            | Kind::BriefFree
            | Kind::BriefForward
    )
}

/// Words of a [`Call`].
pub const CALL_WORDS: usize = size_of::<Call>() / 8;
/// Those of them that may be left out where they are 0, one bit each in the header's flags: all but the first, which
/// says what was called, and that of the duration.
const CALL_OPTIONAL: [usize; 8] = [1, 2, 3, 4, 5, 6, 8, 9];

/// Moves the words of a call that are to be written to the front. How many these are, and the header's flags.
pub(crate) fn shorten_call(words: &mut [u64; CALL_WORDS]) -> (usize, u8) {
    let (mut n, mut flags) = (0, 0);
    for at in 0..CALL_WORDS {
        let word = words.get(at).copied().unwrap_or_default();
        let optional = CALL_OPTIONAL.iter().position(|optional| *optional == at);
        match optional.filter(|_| word == 0) {
            Some(bit) => flags |= 1 << bit,
            None => {
                if let Some(slot) = words.get_mut(n) {
                    *slot = word;
                }
                n += 1;
            }
        }
    }
    (n, flags)
}

/// All words of a call, from those in the ring and the header's flags. `None` where there are too few.
#[must_use]
pub fn restore_call(words: &[u64], flags: u8) -> Option<[u64; CALL_WORDS]> {
    let mut whole = [0; CALL_WORDS];
    let mut words = words.iter();
    for (at, slot) in whole.iter_mut().enumerate() {
        let optional = CALL_OPTIONAL.iter().position(|optional| *optional == at);
        if optional.is_none_or(|bit| flags & 1 << bit == 0) {
            *slot = *words.next()?;
        }
    }
    Some(whole)
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use crate::clock::Clock;
    use crate::map::{CHUNK_BYTES, Map};
    use crate::record::{BlockOom, Header};
    use crate::ring::{Producer, Pushed, Reader};
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::vec;
    use std::vec::Vec;

    /// A record as it was pushed.
    #[derive(Clone, Copy, PartialEq, Debug)]
    enum Record {
        Alloc(BlockAlloc),
        Free(BlockFree, u8),
        Forward(Forward),
        Call(Call),
        Oom(BlockOom),
    }
    use Record::{Alloc, Free, Oom};

    impl Record {
        fn push(&self, to: &mut Producer) -> Pushed {
            let at = to.now();
            match self {
                Alloc(alloc) => to.push_brief(at, 0, alloc),
                Free(free, flags) => to.push_brief(at, *flags, free),
                Record::Forward(forward) => to.push_brief(at, 0, forward),
                Record::Call(call) => to.push_call(at, call),
                Oom(oom) => to.push(at, 0, oom),
            }
        }

        fn read(kind: Kind, flags: u8, words: &[u64], said: &mut Said) -> Option<Record> {
            fn said_whole<P: Brief>(payload: P, said: &mut Said) -> P {
                payload.say(said);
                payload
            }
            fn of<P: Payload>(words: &[u64]) -> P {
                let (payload, rest) = P::from_words(words).expect("as many words");
                assert!(rest.is_empty());
                payload
            }
            Some(match kind {
                Kind::BlockAlloc => Alloc(said_whole(of(words), said)),
                Kind::BriefAlloc => Alloc(Brief::restore(&of(words), said)?),
                Kind::BlockFree => Free(said_whole(of(words), said), flags),
                Kind::BriefFree => Free(Brief::restore(&of(words), said)?, flags),
                Kind::Forward => Record::Forward(said_whole(of(words), said)),
                Kind::BriefForward => Record::Forward(Brief::restore(&of(words), said)?),
                Kind::Call => Record::Call(of(&restore_call(words, flags)?)),
                Kind::BlockOom => Oom(of(words)),
                other => panic!("{other:?} was not pushed"),
            })
        }
    }

    /// A ring in memory, whose reader takes whole chunks.
    struct Ring {
        memory: *mut u8,
        layout: Layout,
        map: Map,
    }

    impl Ring {
        fn new(n_chunks: u32) -> Ring {
            let layout = Layout::from_size_align(Map::bytes_for(n_chunks), 4096).expect("a size");
            // SAFETY: the size is not zero.
            let memory = unsafe { alloc_zeroed(layout) };
            assert!(!memory.is_null());
            // SAFETY: aligned, zeroed, long enough, and freed with the ring.
            let map =
                unsafe { Map::create(memory, n_chunks, crate::map::Writer::default(), Clock::Monotonic) };
            Ring { memory, layout, map }
        }

        fn producer(&self, tid: u32) -> Producer {
            Producer::new(self.map, tid, tid)
        }

        /// Frees the complete chunks, and gives what each thread's had, in order, to `to`.
        fn drain(&self, mut to: impl FnMut(u32, Vec<(Kind, Record)>)) {
            let reader = Reader::new(self.map);
            let mut views: Vec<_> = (0..self.map.n_chunks()).filter_map(|chunk| reader.look(chunk)).collect();
            views.retain(|view| view.complete);
            views.sort_unstable_by_key(|view| (view.tid, view.sequence));
            for view in views {
                let (mut at, mut said, mut records) = (0, Said::default(), Vec::new());
                while at < view.committed {
                    let header = Header::decode(reader.word(view.chunk, at));
                    let words: Vec<u64> = (1..header.words)
                        .map(|word| reader.word(view.chunk, at + 8 * usize::from(word)))
                        .collect();
                    at += 8 * usize::from(header.words);
                    let kind = Kind::from_raw(header.kind).expect("a kind");
                    let record = Record::read(kind, header.flags, &words, &mut said);
                    records.push((kind, record.expect("can be read without the chunks before")));
                }
                to(view.tid, records);
                reader.free(view.chunk);
            }
        }
    }

    impl Drop for Ring {
        fn drop(&mut self) {
            // SAFETY: allocated with this layout, and nobody has a producer or a reader any more.
            unsafe { dealloc(self.memory, self.layout) };
        }
    }

    fn alloc(device: i8, bytes: u64, allocated: u64, reserved: u64) -> Record {
        let (device_bytes, requested) = (pack_device(device, bytes), bytes - 12);
        let (addr, stream, stack) = (0x7f00_0000_0000 + allocated, 0, 1);
        Alloc(BlockAlloc { addr, device_bytes, requested, stream, allocated, reserved, stack })
    }

    fn free(device: i8, bytes: u64, allocated: u64, reserved: u64) -> Record {
        let device_bytes = pack_device(device, bytes);
        Free(BlockFree { addr: 0x7f00_0000_0000, device_bytes, allocated, reserved, stack: 1 }, 0)
    }

    fn oom(bytes: u64, allocated: u64, reserved: u64) -> Record {
        Oom(BlockOom {
            device_bytes: pack_device(0, bytes),
            requested: bytes,
            stream: 0,
            allocated,
            reserved,
            stack: 1,
        })
    }

    fn forward(operation: u64) -> Record {
        Record::Forward(Forward { operation, stack: 1 })
    }

    /// Pushes records by thread, and compares what comes back and how: `B` briefly, `W` as a whole.
    fn check(steps: &[(u32, Record)], forms: &[&str]) {
        let ring = Ring::new(4);
        let mut producers: Vec<Producer> =
            (0..forms.len()).map(|thread| ring.producer(thread as u32 + 1)).collect();
        for (thread, record) in steps {
            assert_eq!(record.push(&mut producers[*thread as usize]), Pushed::Yes);
        }
        producers.iter_mut().for_each(Producer::complete);
        let mut found = vec![std::string::String::new(); forms.len()];
        ring.drain(|tid, records| {
            let expected = steps.iter().filter(|(thread, _)| thread + 1 == tid).map(|(_, record)| *record);
            assert!(records.iter().map(|(_, record)| *record).eq(expected), "thread {tid}: {records:?}");
            found[tid as usize - 1] =
                records.iter().map(|(kind, _)| if is_brief(*kind) { 'B' } else { 'W' }).collect();
        });
        assert_eq!(found, forms);
    }

    fn is_brief(kind: Kind) -> bool {
        matches!(kind, Kind::BriefAlloc | Kind::BriefFree | Kind::BriefForward)
    }

    #[test]
    fn what_follows_from_the_record_before_is_left_out() {
        let steps = [alloc(0, 512, 512, 4096), alloc(0, 1024, 1536, 4096), free(0, 512, 1024, 4096)];
        check(&steps.map(|record| (0, record)), &["WBB"]);
    }

    #[test]
    fn totals_are_said_again_when_another_thread_changed_them() {
        let steps = [
            (0, alloc(0, 512, 512, 4096)),
            (1, alloc(0, 512, 1024, 4096)),
            (0, alloc(0, 512, 1536, 4096)),
            (1, free(0, 512, 1024, 4096)),
            (1, free(0, 512, 512, 4096)),
            (0, free(0, 512, 0, 4096)),
        ];
        check(&steps, &["WWW", "WWB"]);
    }

    #[test]
    fn totals_are_said_again_for_another_device() {
        let steps = [
            alloc(0, 512, 512, 4096),
            alloc(1, 512, 1024, 4096), // Would follow, but for the device.
            alloc(0, 512, 1024, 4096),
            free(0, 512, 512, 4096),
            free(-1, 512, 0, 4096),
            alloc(-1, 512, 512, 4096),
        ];
        check(&steps.map(|record| (0, record)), &["WWWBWB"]);
    }

    #[test]
    fn totals_are_said_again_when_a_segment_came_or_went() {
        let steps = [
            alloc(0, 512, 512, 4096),
            alloc(0, 512, 1024, 8192),
            oom(1 << 40, 1024, 8192), // The cache is given back.
            alloc(0, 512, 1536, 4096),
            oom(1 << 40, 1536, 4096),
            alloc(0, 512, 2048, 4096),
        ];
        check(&steps.map(|record| (0, record)), &["WWWWWB"]);
    }

    #[test]
    fn requests_and_streams_come_back() {
        let of = |bytes, requested, stream, allocated| {
            let (device_bytes, addr, reserved, stack) = (pack_device(0, bytes), 512, 1 << 50, 1);
            Alloc(BlockAlloc { addr, device_bytes, requested, stream, allocated, reserved, stack })
        };
        let mib = 1 << 20;
        let steps = [
            of(512, 512, 0, 512), // Stream 0 need not be said, but this is the first of its device.
            of(512, 1, 7, 1024),
            of(512, 512, 7, 1536),
            of(512, UNKNOWN, 7, 2048),
            of(512, UNKNOWN, UNKNOWN, 2560),
            of(512, 512, UNKNOWN, 3072),
            of(16 * mib, 2, UNKNOWN, 3072 + 16 * mib),
            of(16 * mib, 1, UNKNOWN, 3072 + 32 * mib), // Would look as if it were unknown.
            of(16 * mib, 16 * mib + 1, UNKNOWN, 3072 + 48 * mib),
            of(0, 0, UNKNOWN, 3072 + 48 * mib),
            of((1 << 40) - 1, 1 << 39, UNKNOWN, 3071 + 48 * mib + (1 << 40)),
            of((1 << 40) - 1, (1 << 40) - 512, UNKNOWN, 3070 + 48 * mib + (1 << 41)),
            of(1 << 40, 1 << 40, UNKNOWN, 3070 + 48 * mib + (1 << 41) + (1 << 40)),
        ];
        check(&steps.map(|record| (0, record)), &["WWBBWBBWWBWBW"]);
    }

    #[test]
    fn operations_are_numbered_one_after_the_other() {
        let thread = |thread: u64| thread << 40;
        let numbers = [thread(1), thread(1) + 1, thread(1) + 2, thread(1) + 4, thread(2) + 5, thread(2) + 6];
        check(&numbers.map(|number| (0, forward(number))), &["WBBWWB"]);
        // As if nothing had been said before it.
        check(&[(0, forward(1)), (0, forward(u64::MAX)), (0, forward(0)), (0, forward(1))], &["WWBW"]);
    }

    #[test]
    fn every_chunk_begins_with_a_record_that_says_all() {
        let ring = Ring::new(8);
        let mut producer = ring.producer(1);
        let steps: Vec<Record> = (1..3000).map(|n| alloc(0, 512, 512 * n, 1 << 40)).collect();
        for step in &steps {
            assert_eq!(step.push(&mut producer), Pushed::Yes);
        }
        producer.complete();
        let (mut found, mut n_whole, mut n_chunks) = (Vec::new(), 0, 0);
        ring.drain(|_, records| {
            assert_eq!(records[0].0, Kind::BlockAlloc);
            n_whole += records.iter().filter(|(kind, _)| *kind == Kind::BlockAlloc).count();
            n_chunks += 1;
            found.extend(records.into_iter().map(|(_, record)| record));
        });
        assert_eq!(found, steps);
        assert_eq!(n_whole, n_chunks, "and the others follow from it");
        assert!(n_chunks >= 3000 * 32 / CHUNK_BYTES, "{n_chunks}");
    }

    #[test]
    fn a_record_that_was_lost_has_said_nothing() {
        let ring = Ring::new(1);
        let mut producer = ring.producer(1);
        let mut n = 0;
        let mut next = || {
            n += 1;
            alloc(0, 512, 512 * n, 1 << 40)
        };
        let mut kept = Vec::new();
        let mut n_lost = 0;
        let mut found = Vec::new();
        for _ in 0..3 {
            while n_lost % 7 != 6 {
                let record = next();
                match record.push(&mut producer) {
                    Pushed::Yes => kept.push(record),
                    _ => n_lost += 1,
                }
            }
            n_lost += 1;
            producer.complete();
            ring.drain(|_, records| found.extend(records.into_iter().map(|(_, record)| record)));
        }
        assert_eq!(found, kept);
        assert!(kept.len() > 1000, "{}", kept.len());
    }

    #[test]
    fn a_brief_form_alone_says_nothing() {
        let said = || Said::default();
        assert_eq!(
            BlockAlloc::restore(&BriefAlloc { bytes_slack: 512, ..Default::default() }, &mut said()),
            None
        );
        assert_eq!(BlockFree::restore(&BriefFree { bytes: 512, ..Default::default() }, &mut said()), None);
        assert_eq!(Forward::restore(&BriefForward { stack: 1 }, &mut said()), None);
    }

    #[test]
    fn words_of_a_call_that_are_zero_are_left_out() {
        for written in 0..1 << CALL_WORDS {
            let mut words: [u64; CALL_WORDS] =
                core::array::from_fn(|at| if written & 1 << at == 0 { 0 } else { at as u64 + 1 });
            let whole = words;
            let (n, flags) = shorten_call(&mut words);
            assert_eq!(restore_call(&words[..n], flags), Some(whole));
            assert_eq!(restore_call(&words[..n - 1], flags), None);
            let n_optional = CALL_OPTIONAL.iter().filter(|at| whole[**at] != 0).count();
            assert_eq!(n, n_optional + 2, "{whole:?}");
        }
    }

    /// What PyTorch's allocator would say of random requests by several threads on several devices.
    struct World {
        random: u64,
        totals: [(u64, u64); 3],
        blocks: Vec<(i8, u64)>,
        operations: [u64; 4],
    }

    impl World {
        /// Less than `end`. Xorshift.
        fn below(&mut self, end: u64) -> u64 {
            for shift in [13, -7, 17] {
                self.random ^= if shift > 0 { self.random << shift } else { self.random >> -shift };
            }
            (self.random >> 11) % end
        }

        fn one_in(&mut self, n: u64) -> bool {
            self.below(n) == 0
        }

        fn record(&mut self, thread: usize, n_devices: u64) -> Record {
            let stack = self.below(3);
            match self.below(20) {
                0 => {
                    let device_bytes = pack_device(0, 1 << 40);
                    let (allocated, reserved) = self.totals[0];
                    Oom(BlockOom {
                        device_bytes,
                        requested: UNKNOWN,
                        stream: UNKNOWN,
                        allocated,
                        reserved,
                        stack,
                    })
                }
                1 => {
                    let mut call =
                        Call { api: 3, action: 1, result: self.below(2) as i32, ..Call::default() };
                    call.addr = self.below(2) * 512;
                    call.handle = self.below(2) << 63;
                    call.nccl_call = self.below(2);
                    Record::Call(call)
                }
                2..5 => {
                    let operation = &mut self.operations[thread];
                    *operation += 1;
                    let operation = *operation;
                    if self.one_in(10) {
                        self.operations[thread] += 5;
                    }
                    Record::Forward(Forward { operation: (thread as u64 + 1) << 40 | operation, stack })
                }
                5..13 => {
                    let device = self.below(n_devices);
                    let bytes =
                        512 * (1 + if self.one_in(50) { self.below(1 << 33) } else { self.below(1 << 16) });
                    let requested = match self.below(20) {
                        0 => UNKNOWN,
                        1 => self.below(bytes + 600),
                        _ => bytes - self.below(512),
                    };
                    let stream = if self.one_in(20) { [UNKNOWN, 7, 9][self.below(3) as usize] } else { 0 };
                    let grows = if self.one_in(30) { bytes } else { 0 };
                    let (allocated, reserved) = &mut self.totals[device as usize];
                    *allocated += bytes;
                    *reserved += grows;
                    let (allocated, reserved) = (*allocated, *reserved);
                    self.blocks.push((device as i8, bytes));
                    let device_bytes = pack_device(device as i8, bytes);
                    let addr = self.below(1 << 47);
                    Alloc(BlockAlloc { addr, device_bytes, requested, stream, allocated, reserved, stack })
                }
                _ => {
                    if self.blocks.is_empty() {
                        return oom(1, 0, 0);
                    }
                    let at = self.below(self.blocks.len() as u64) as usize;
                    let (device, bytes) = self.blocks.swap_remove(at);
                    let (allocated, reserved) = &mut self.totals[device as usize];
                    *allocated -= bytes;
                    let device_bytes = pack_device(device, bytes);
                    let (allocated, reserved) = (*allocated, *reserved);
                    let free = BlockFree { addr: 512, device_bytes, allocated, reserved, stack };
                    Free(free, self.below(2) as u8)
                }
            }
        }
    }

    /// Several threads on several devices; the ring is now full, now drained, and some chunks nobody reads.
    #[test]
    fn random_records_come_back_as_they_were() {
        let (mut n_kept, mut n_lost, mut n_unread, mut n_brief) = (0, 0, 0, 0);
        for seed in 1..=60 {
            let totals = [(0, 1 << 40); 3];
            let random = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed);
            let mut world = World { random, totals, blocks: Vec::new(), operations: [0; 4] };
            let (n_threads, n_devices) = (1 + world.below(4), 1 + world.below(3));
            let ring = Ring::new(1 + world.below(6) as u32);
            let mut producers: Vec<Producer> =
                (0..n_threads).map(|thread| ring.producer(thread as u32 + 1)).collect();
            let mut kept: Vec<Vec<Record>> = vec![Vec::new(); n_threads as usize];
            let mut thread = 0;
            for step in 1..=8_000 {
                if world.one_in(40) {
                    thread = world.below(n_threads) as usize;
                }
                let record = world.record(thread, n_devices);
                match record.push(&mut producers[thread]) {
                    Pushed::Yes => kept[thread].push(record),
                    _ => n_lost += 1,
                }
                let is_last = step == 8_000;
                if is_last {
                    producers.iter_mut().for_each(Producer::complete);
                }
                if is_last || world.one_in(900) {
                    let is_unread = world.one_in(5);
                    ring.drain(|tid, records| {
                        let kept = &mut kept[tid as usize - 1];
                        let expected: Vec<Record> = kept.drain(..records.len()).collect();
                        if is_unread {
                            n_unread += records.len();
                            return;
                        }
                        n_kept += records.len();
                        n_brief += records.iter().filter(|(kind, _)| is_brief(*kind)).count();
                        for (at, ((_, found), expected)) in records.iter().zip(&expected).enumerate() {
                            assert_eq!(found, expected, "seed {seed}, thread {tid}, record {at}");
                        }
                    });
                }
            }
            assert!(kept.iter().all(Vec::is_empty), "seed {seed}");
        }
        std::println!(
            "{n_kept} came back, {n_brief} of them from brief forms; {n_lost} lost, {n_unread} unread"
        );
        assert!(n_brief > 10_000 && n_kept - n_brief > 10_000 && n_lost > 10_000 && n_unread > 1_000);
    }
}
