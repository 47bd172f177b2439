//! Everything that a page's pictures are made of, written down once, so that any part of the time can be had without reading the
//! trace again: the changes of a device with their times, and what lay at which addresses from when to when.
//!
//! ```text
//! changes     | 0 .. 8191 | 8192 .. 16383 | ...      each as long as it needs: time, holders, bytes
//! rectangles  | 0 .. 8191 | 8192 .. 16383 | ...      40 bytes each, in the order in which they begin
//! standing    at 0, at 8192 or later, ...            the rectangles that were there when that one began
//! ```
//! It lies in a [`Store`], which whoever serves a page provides. What is kept in memory does not grow with the trace, but for
//! where its pieces are: some tens of bytes for thousands of events.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use gputrace_schemas::event::{Bytes, Nanos};

use super::shapes::{Rectangle, Row};

/// Bytes that can be written and read at any place, and grow: a file that nobody else sees.
pub trait Store: Send + Sync {
    /// Writes all of it there.
    ///
    /// # Errors
    /// Those of what it is kept in.
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()>;

    /// Reads all of it from there.
    ///
    /// # Errors
    /// Those of what it is kept in.
    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()>;
}

/// Changes, or rectangles, that are written at once.
const PIECE: usize = 8192;
/// Bytes of a rectangle.
const WIDTH: usize = 40;
/// Pieces of rectangles that stay in memory: most have ended before they leave it.
const RECENT: usize = 8;

/// Where all of a trace is written down.
pub(super) struct Tape {
    store: Box<dyn Store>,
    end: AtomicU64,
    /// It cannot be written: what is there is not whole.
    failed: Mutex<Option<io::Error>>,
}

impl Tape {
    pub(super) fn new(store: Box<dyn Store>) -> Arc<Tape> {
        Arc::new(Tape { store, end: AtomicU64::new(0), failed: Mutex::new(None) })
    }

    /// Why it is not whole.
    pub(super) fn failed(&self) -> Option<io::Error> {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.as_ref().map(|error| io::Error::new(error.kind(), error.to_string()))
    }

    /// All of it is to be written again.
    pub(super) fn clear(&self) {
        self.end.store(0, Ordering::Relaxed);
    }

    fn append(&self, bytes: &[u8]) -> u64 {
        let at = self.end.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.write(bytes, at);
        at
    }

    fn write(&self, bytes: &[u8], at: u64) {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        if failed.is_none()
            && let Err(error) = self.store.write_at(bytes, at)
        {
            *failed = Some(error);
        }
    }
}

/// All changes of a device.
pub(super) struct Changes {
    tape: Arc<Tape>,
    bytes: Vec<u8>,
    n: u64,
    last: Nanos,
    pieces: Vec<Piece>,
}

#[derive(Clone, Copy)]
struct Piece {
    at: u64,
    length: usize,
    /// When the change before the first of these was.
    after: Nanos,
}

impl Changes {
    pub(super) fn new(tape: &Arc<Tape>) -> Changes {
        Changes { tape: tape.clone(), bytes: vec![], n: 0, last: Nanos(0), pieces: vec![] }
    }

    pub(super) fn add(&mut self, time: Nanos, rows: &[Row]) {
        if self.n.is_multiple_of(PIECE as u64) {
            self.keep();
            self.pieces.push(Piece { at: 0, length: 0, after: self.last });
        }
        put(&mut self.bytes, time.0.saturating_sub(self.last.0));
        put(&mut self.bytes, rows.len() as u64);
        for row in rows {
            put(&mut self.bytes, u64::from(row.holder));
            put(&mut self.bytes, zigzag(row.bytes));
            put(&mut self.bytes, zigzag(i64::from(row.objects)));
        }
        self.last = self.last.max(time);
        self.n += 1;
    }

    /// No change follows.
    pub(super) fn finish(&mut self) {
        self.keep();
        self.bytes = vec![];
    }

    fn keep(&mut self) {
        if let Some(piece) = self.pieces.last_mut()
            && !self.bytes.is_empty()
        {
            (piece.at, piece.length) = (self.tape.append(&self.bytes), self.bytes.len());
            self.bytes.clear();
        }
    }

    /// Shows changes from this one on, with their times, until `see` has seen enough.
    pub(super) fn from(&self, first: u64, mut see: impl FnMut(u64, Nanos, &[Row]) -> bool) -> io::Result<()> {
        let (mut bytes, mut rows) = (vec![], vec![]);
        let (idx, mut change) = ((first / PIECE as u64) as usize, first - first % PIECE as u64);
        for piece in self.pieces.iter().skip(idx) {
            bytes.resize(piece.length, 0);
            self.tape.store.read_at(&mut bytes, piece.at)?;
            let (mut rest, mut time) = (&bytes[..], piece.after);
            while !rest.is_empty() {
                time.0 = time.0.saturating_add(take(&mut rest)?);
                rows.clear();
                for _ in 0..take(&mut rest)? {
                    let holder = take(&mut rest)? as u32;
                    let (bytes, objects) = (unzigzag(take(&mut rest)?), unzigzag(take(&mut rest)?) as i32);
                    rows.push(Row { holder, bytes, objects });
                }
                if change >= first && !see(change, time, &rows) {
                    return Ok(());
                }
                change += 1;
            }
        }
        Ok(())
    }
}

/// All rectangles of a map.
pub(super) struct Lives {
    tape: Arc<Tape>,
    /// Where each piece that has left memory lies.
    pieces: Vec<u64>,
    recent: VecDeque<Vec<u8>>,
    n: u64,
    standing: Vec<Standing>,
}

/// What was there when a rectangle began.
#[derive(Clone, Copy)]
struct Standing {
    first: u64,
    time: Nanos,
    at: u64,
    length: usize,
}

impl Lives {
    pub(super) fn new(tape: &Arc<Tape>) -> Lives {
        let (pieces, recent, standing) = (vec![], VecDeque::new(), vec![]);
        Lives { tape: tape.clone(), pieces, recent, n: 0, standing }
    }

    /// Whether it is time to write down which of `n_open` rectangles are there: as often as that costs as much as their beginnings.
    pub(super) fn is_due(&self, n_open: usize) -> bool {
        let least = (PIECE as u64).max(n_open as u64);
        self.standing.last().is_none_or(|last| self.n - last.first >= least)
    }

    /// These are there, when the next begins.
    pub(super) fn stand(&mut self, time: Nanos, mut open: Vec<u64>) {
        open.sort_unstable();
        let (mut bytes, mut before) = (vec![], 0);
        for number in open {
            put(&mut bytes, number - before);
            before = number;
        }
        let at = self.tape.append(&bytes);
        self.standing.push(Standing { first: self.n, time, at, length: bytes.len() });
    }

    /// Its number.
    pub(super) fn begins(&mut self, it: &Rectangle) -> u64 {
        if self.n.is_multiple_of(PIECE as u64) {
            if self.recent.len() == RECENT {
                self.leave();
            }
            self.recent.push_back(Vec::with_capacity(PIECE * WIDTH));
        }
        if let Some(piece) = self.recent.back_mut() {
            piece.extend_from_slice(&packed(it));
        }
        self.n += 1;
        self.n - 1
    }

    /// How long it was there, and what it was in the end.
    pub(super) fn ends(&mut self, it: &Rectangle) {
        let (piece, within) =
            ((it.number / PIECE as u64) as usize, (it.number % PIECE as u64) as usize * WIDTH);
        let packed = packed(it);
        match piece.checked_sub(self.pieces.len()) {
            Some(recent) => {
                if let Some(place) =
                    self.recent.get_mut(recent).and_then(|it| it.get_mut(within..within + WIDTH))
                {
                    place.copy_from_slice(&packed);
                }
            }
            None => self.tape.write(&packed, self.pieces[piece] + within as u64),
        }
    }

    /// Nothing begins or ends any more.
    pub(super) fn finish(&mut self) {
        while !self.recent.is_empty() {
            self.leave();
        }
    }

    fn leave(&mut self) {
        if let Some(piece) = self.recent.pop_front() {
            self.pieces.push(self.tape.append(&piece));
        }
    }

    /// All that were there between two times.
    pub(super) fn between(&self, from: Nanos, to: Nanos, mut see: impl FnMut(Rectangle)) -> io::Result<()> {
        let idx = self.standing.partition_point(|it| it.time <= from);
        let Some(standing) = idx.checked_sub(1).or(Some(0)).and_then(|idx| self.standing.get(idx)) else {
            return Ok(());
        };
        let is_there = |it: &Rectangle| it.from <= to && it.to.is_none_or(|until| until >= from);
        let mut bytes = vec![0; standing.length];
        self.tape.store.read_at(&mut bytes, standing.at)?;
        let (mut rest, mut number) = (&bytes[..], 0);
        let mut one = [0; WIDTH];
        while !rest.is_empty() {
            number += take(&mut rest)?;
            let (piece, within) = ((number / PIECE as u64) as usize, number % PIECE as u64 * WIDTH as u64);
            let at = self.pieces.get(piece).ok_or_else(damaged)? + within;
            self.tape.store.read_at(&mut one, at)?;
            let it = unpacked(number, &one);
            if is_there(&it) {
                see(it);
            }
        }
        let mut piece = vec![];
        for (idx, at) in self.pieces.iter().enumerate().skip((standing.first / PIECE as u64) as usize) {
            let first = idx as u64 * PIECE as u64;
            piece.resize((self.n - first).min(PIECE as u64) as usize * WIDTH, 0);
            self.tape.store.read_at(&mut piece, *at)?;
            for (number, one) in (first..).zip(piece.chunks_exact(WIDTH)) {
                let it = unpacked(number, one);
                if it.from > to {
                    return Ok(());
                }
                if number >= standing.first && is_there(&it) {
                    see(it);
                }
            }
        }
        Ok(())
    }
}

fn packed(it: &Rectangle) -> [u8; WIDTH] {
    let mut packed = [0; WIDTH];
    let words = [it.addr, it.bytes.0, it.from.0, it.to.map_or(u64::MAX, |to| to.0)];
    for (place, word) in packed.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    packed[32..36].copy_from_slice(&it.what.to_le_bytes());
    packed[36..].copy_from_slice(&it.spare.to_le_bytes());
    packed
}

fn unpacked(number: u64, packed: &[u8]) -> Rectangle {
    let word = |idx: usize| u64::from_le_bytes(packed[8 * idx..8 * idx + 8].try_into().unwrap_or_default());
    let half = |at: usize| u32::from_le_bytes(packed[at..at + 4].try_into().unwrap_or_default());
    Rectangle {
        addr: word(0),
        bytes: Bytes(word(1)),
        from: Nanos(word(2)),
        to: Some(word(3)).filter(|to| *to != u64::MAX).map(Nanos),
        what: half(32),
        spare: half(36),
        number,
    }
}

fn damaged() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the index is damaged")
}

fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)) as u64
}

fn unzigzag(value: u64) -> i64 {
    (value >> 1) as i64 ^ -((value & 1) as i64)
}

fn put(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

fn take(bytes: &mut &[u8]) -> io::Result<u64> {
    let (mut value, mut shift) = (0, 0);
    loop {
        let (byte, rest) = bytes.split_first().ok_or_else(damaged)?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if *byte < 0x80 {
            return Ok(value);
        }
        shift += 7;
        if shift > 63 {
            return Err(damaged());
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::atomic::AtomicBool;

    use super::super::history::{History, Room};
    use super::super::map::Rectangles;
    use super::*;

    /// In memory; it can be full.
    #[derive(Default)]
    pub(crate) struct Memory {
        bytes: Mutex<Vec<u8>>,
        is_full: AtomicBool,
    }

    impl Store for Arc<Memory> {
        fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
            if self.is_full.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let (mut all, at) = (self.bytes.lock().unwrap(), at as usize);
            if all.len() < at + bytes.len() {
                all.resize(at + bytes.len(), 0);
            }
            all[at..at + bytes.len()].copy_from_slice(bytes);
            Ok(())
        }

        fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
            let (all, at) = (self.bytes.lock().unwrap(), at as usize);
            bytes.copy_from_slice(all.get(at..at + bytes.len()).ok_or(io::ErrorKind::UnexpectedEof)?);
            Ok(())
        }
    }

    fn tape() -> Arc<Tape> {
        Tape::new(Box::new(Arc::new(Memory::default())))
    }

    fn random(seed: &mut u64, below: u64) -> u64 {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*seed >> 33) % below
    }

    const N: u64 = 50_000;
    const WINDOWS: [(u64, u64); 8] = [
        (0, 100),
        (0, 0),
        (7000, 7100),
        (16_380, 16_390),
        (24_000, 24_299),
        (49_900, 60_000),
        (49_999, 49_999),
        (70_000, 80_000),
    ];

    #[test]
    fn a_part_has_every_change_of_it_and_the_rest_as_it_was() {
        let room = Room { states: 300, rows: 2000 };
        let changes = || {
            let (mut seed, mut held) = (1, [0i64; 5]);
            (0..N).map(move |time| {
                let holder = random(&mut seed, 5) as usize;
                let wanted = random(&mut seed, 1000) as i64;
                let bytes = wanted - std::mem::replace(&mut held[holder], wanted);
                (Nanos(time), Row { holder: holder as u32, bytes, objects: 1 }, held)
            })
        };
        let mut base = History::new(room).on(Changes::new(&tape()));
        for (time, row, held) in changes() {
            base.change(time, &[row], (Bytes(held.iter().sum::<i64>() as u64), Bytes(0)));
        }
        base.finish();
        let truth: Vec<[i64; 5]> = changes().map(|(_, _, held)| held).collect();
        for (from, to) in WINDOWS {
            let part = base.part((Nanos(from), Nanos(to)), room).unwrap().unwrap();
            let mut held = [0; 5];
            for (idx, state) in part.kept.states.iter().enumerate() {
                part.kept.rows_of(idx).iter().for_each(|row| held[row.holder as usize] += row.bytes);
                assert_eq!(held, truth[state.change as usize], "{from}..{to}: after change {}", state.change);
            }
            let shown: Vec<u64> = part.kept.states.iter().map(|state| state.change).collect();
            let outside = |change: &u64| !(from..=to).contains(change);
            let mut wanted: Vec<u64> =
                base.kept.states.iter().map(|state| state.change).filter(outside).collect();
            wanted.extend(from..(to + 1).min(N));
            wanted.sort_unstable();
            assert_eq!(shown, wanted, "{from}..{to}");
            assert_eq!(part.focus(), Some((Nanos(from), Nanos(to))));
        }
        // Without room for all of it, it is as it was.
        let part = base.part((Nanos(1000), Nanos(2000)), room).unwrap().unwrap();
        assert_eq!((part.focus(), part.kept.states.len()), (None, base.kept.states.len()));
    }

    #[test]
    fn a_part_has_every_rectangle_of_it_and_all_are_counted() {
        let (room, span) = (200, (Nanos(0), Nanos(N)));
        let mut base = Rectangles::new(room, span).on(Lives::new(&tape()));
        let (mut seed, mut all) = (7, vec![]);
        // Most end soon; some stay for very long.
        let mut open: VecDeque<(u64, usize)> = VecDeque::new();
        for time in 0..N {
            let (addr, bytes) = (time << 12, 1 + random(&mut seed, 1000));
            base.begins(addr, Bytes(bytes), Nanos(time), time as u32);
            all.push((addr, bytes, time, u64::MAX));
            let long = random(&mut seed, 50) == 0;
            if !long {
                open.push_back((addr, all.len() - 1));
            }
            if open.len() > 30 {
                let (addr, idx) = open.pop_front().unwrap();
                base.ends(addr, Nanos(time));
                all[idx].3 = time;
            }
            if time == N / 2 {
                base.is_highest(Nanos(time));
            }
        }
        base.finish();
        for (from, to) in WINDOWS {
            let part = base.part((Nanos(from), Nanos(to)), 5000).unwrap().unwrap();
            let shown: std::collections::BTreeSet<_> = part
                .shown()
                .iter()
                .map(|it| (it.addr, it.bytes.0, it.from.0, it.to.map_or(u64::MAX, |to| to.0)))
                .collect();
            let inside = all.iter().filter(|it| it.2 <= to && it.3 >= from);
            let missing = inside.filter(|it| !shown.contains(it)).count();
            assert_eq!(missing, 0, "{from}..{to}");
            assert!(shown.iter().all(|it| all.contains(it)), "{from}..{to}");
            assert_eq!(shown.len() as u64 + part.n_tiled(), N, "{from}..{to}: all are shown or counted");
            assert_eq!(shown.len(), part.shown().len(), "{from}..{to}: none is there twice");
        }
        // In less room the largest of the part stay.
        let part = base.part((Nanos(0), Nanos(N)), 100).unwrap().unwrap();
        assert_eq!((part.shown().len(), part.n_tiled()), (100, N - 100));
    }

    #[test]
    fn a_store_that_is_full_is_said() {
        let memory = Arc::new(Memory::default());
        let tape = Tape::new(Box::new(memory.clone()));
        let mut changes = Changes::new(&tape);
        memory.is_full.store(true, Ordering::Relaxed);
        for time in 0..=PIECE as u64 {
            changes.add(Nanos(time), &[]);
        }
        let failed = || tape.failed().map(|error| error.kind());
        assert_eq!(
            (failed(), failed()),
            (Some(io::ErrorKind::StorageFull), Some(io::ErrorKind::StorageFull))
        );
        changes.finish();
        // What is not there is an error, and no wrong answer.
        assert!(changes.from(0, |_, _, _| true).is_err());
    }
}
