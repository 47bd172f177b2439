//! The address map: every block from when it was handed out to when it was taken back, and the segments that they lie in. Of
//! very many blocks those of most bytes times time are kept; the others are counted, in tiles of address and time.

use std::io;

use gputrace_schemas::event::{Bytes, Nanos};
use rustc_hash::{FxHashMap, FxHashSet};
use serde::Serialize;

use super::columns::{ColumnId, Columns};
use super::shapes::Rectangle;
use super::tape::Lives;

/// Columns of tiles in time.
const TILE_COLUMNS: u64 = 512;
/// Most tiles; more are joined in address.
const MOST_TILES: usize = 60_000;

/// What blocks lie in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum Ground {
    /// A segment of PyTorch.
    Segment = 0,
    /// Mapped pages of an expandable segment.
    Pages = 1,
    /// What the driver handed out to others.
    Other = 2,
    /// Mapped memory of others.
    OtherPages = 3,
}

/// An instant, and whether all that was there then is kept.
#[derive(Clone, Copy, Debug)]
struct Instant {
    time: Nanos,
    is_whole: bool,
}

impl Instant {
    fn has(self, it: &Rectangle) -> bool {
        it.from <= self.time && it.to.is_none_or(|to| to > self.time)
    }
}

/// Rectangles of one device.
pub(super) struct Rectangles {
    room: usize,
    /// What is there in this time is kept before all other.
    focus: Option<(Nanos, Nanos)>,
    /// What is there at these instants is kept before all other: at the highest so far, and at the end. Whether all of it is.
    highest: Option<Instant>,
    end: Instant,
    /// From when to when the trace is.
    span: (Nanos, Nanos),
    open: FxHashMap<u64, Rectangle>,
    done: Vec<Rectangle>,
    /// Blocks that are not kept, by address and the column of their beginning.
    tiles: FxHashMap<(u64, u16), u64>,
    /// Bits of address in a tile.
    tile_bits: u32,
    /// Rectangles that are in tiles.
    n_tiled: u64,
    /// All of them, where they are written down.
    lives: Option<Box<Lives>>,
}

impl Rectangles {
    pub(super) fn new(room: usize, span: (Nanos, Nanos)) -> Rectangles {
        let (open, tiles) = (FxHashMap::default(), FxHashMap::default());
        let end = Instant { time: span.1, is_whole: true };
        let (focus, highest, done, lives) = (None, None, vec![], None);
        Rectangles { room, focus, highest, end, span, open, done, tiles, tile_bits: 21, n_tiled: 0, lives }
    }

    /// The same, with all of them written down there.
    pub(super) fn on(self, lives: Lives) -> Rectangles {
        Rectangles { lives: Some(Box::new(lives)), ..self }
    }

    /// The same, where what is there between two times is kept before all other, in this room; `None` where they were not written down.
    ///
    /// # Errors
    /// They cannot be read again.
    pub(super) fn part(&self, (from, to): (Nanos, Nanos), room: usize) -> io::Result<Option<Rectangles>> {
        let Some(lives) = &self.lives else { return Ok(None) };
        let known: FxHashSet<u64> = self.done.iter().map(|it| it.number).collect();
        let end = self.span.1;
        let mut all = Rectangles {
            highest: self.highest,
            end: self.end,
            done: self.done.clone(),
            tiles: self.tiles.clone(),
            tile_bits: self.tile_bits,
            n_tiled: self.n_tiled,
            ..Rectangles::focused(room, self.span, Some((from, to)))
        };
        let mut found: Vec<Rectangle> = vec![];
        lives.between(from, to, |it| {
            if !known.contains(&it.number) {
                found.push(it);
            }
            if found.len() > 2 * room {
                found.select_nth_unstable_by_key(room, |it| std::cmp::Reverse(it.area(end)));
                found.truncate(room);
            }
        })?;
        found.iter().for_each(|it| all.untile(it));
        all.done.append(&mut found);
        all.prune();
        all.done.sort_unstable_by_key(|it| (it.from, it.addr));
        Ok(Some(all))
    }

    /// The same, where what is there between two times is kept before all other.
    pub(super) fn focused(room: usize, span: (Nanos, Nanos), focus: Option<(Nanos, Nanos)>) -> Rectangles {
        Rectangles { focus, ..Rectangles::new(room, span) }
    }

    /// The device never held more than now. What is there now has not ended, so all of it can be kept.
    pub(super) fn is_highest(&mut self, time: Nanos) {
        self.highest = Some(Instant { time, is_whole: true });
    }

    pub(super) fn begins(&mut self, addr: u64, bytes: Bytes, from: Nanos, what: u32) {
        self.begins_with(addr, (bytes, bytes), from, what);
    }

    /// The same, of a block that has a size and a size that the program asked for.
    pub(super) fn begins_with(
        &mut self,
        addr: u64,
        (bytes, requested): (Bytes, Bytes),
        from: Nanos,
        what: u32,
    ) {
        self.ends(addr, from);
        let spare = u32::try_from(bytes.0.saturating_sub(requested.0)).unwrap_or(u32::MAX);
        let mut it = Rectangle { addr, bytes, spare, from, to: None, what, number: 0 };
        if let Some(lives) = &mut self.lives {
            if lives.is_due(self.open.len()) {
                lives.stand(from, self.open.values().map(|it| it.number).collect());
            }
            it.number = lives.begins(&it);
        }
        self.open.insert(addr, it);
    }

    pub(super) fn ends(&mut self, addr: u64, to: Nanos) -> Option<Rectangle> {
        let ended = self.open.remove(&addr)?;
        let whole = Rectangle { to: Some(to), ..ended };
        self.lives.iter_mut().for_each(|lives| lives.ends(&whole));
        self.done.push(whole);
        if self.done.len() >= self.room.saturating_mul(2).max(64) {
            self.prune();
        }
        Some(ended)
    }

    /// Segments of a range are known to be of a private pool; bytes of those that were not.
    pub(super) fn of_pool(&mut self, (from, to): (u64, u64), pool: u16) -> u64 {
        let inside = self.open.values_mut().filter(|it| (from..to).contains(&it.addr));
        inside.fold(0, |bytes, it| bytes + it.joins(pool))
    }

    /// The same of the one that begins there.
    pub(super) fn one_of_pool(&mut self, addr: u64, pool: u16) -> u64 {
        self.open.get_mut(&addr).map_or(0, |it| it.joins(pool))
    }

    /// What is there is there to the end.
    pub(super) fn finish(&mut self) {
        let open = std::mem::take(&mut self.open);
        if let Some(lives) = &mut self.lives {
            open.values().for_each(|it| lives.ends(it));
            lives.finish();
        }
        self.done.extend(open.into_values());
        self.prune();
        self.done.sort_unstable_by_key(|it| (it.from, it.addr));
    }

    /// Keeps half of it.
    pub(super) fn shrink(&mut self) {
        self.room = self.room.min(self.done.len()) / 2;
        self.prune();
        self.done.sort_unstable_by_key(|it| (it.from, it.addr));
    }

    fn prune(&mut self) {
        if self.done.len() <= self.room {
            return;
        }
        let (end, focus, instants) = (self.span.1, self.focus, [self.highest, Some(self.end)]);
        let is_asked = |it: &Rectangle| {
            let is_focused =
                focus.is_some_and(|(from, to)| it.from <= to && it.to.is_none_or(|until| until >= from));
            is_focused || instants.into_iter().flatten().any(|instant| instant.has(it))
        };
        if self.room > 0 {
            let worth = |it: &Rectangle| std::cmp::Reverse((is_asked(it), it.area(end)));
            self.done.select_nth_unstable_by_key(self.room - 1, worth);
        }
        for small in self.done.split_off(self.room) {
            self.tile(&small);
        }
    }

    fn tile(&mut self, it: &Rectangle) {
        for instant in self.highest.iter_mut().chain([&mut self.end]) {
            instant.is_whole &= !instant.has(it);
        }
        *self.tiles.entry(self.tile_of(it)).or_default() += 1;
        self.n_tiled += 1;
        while self.tiles.len() > MOST_TILES && self.tile_bits < 63 {
            self.tile_bits += 1;
            for ((addr, column), blocks) in std::mem::take(&mut self.tiles) {
                *self.tiles.entry((addr >> 1, column)).or_default() += blocks;
            }
        }
    }

    /// In which tile it is counted.
    fn tile_of(&self, it: &Rectangle) -> (u64, u16) {
        let column = (u128::from(it.from.0.saturating_sub(self.span.0.0)) * u128::from(TILE_COLUMNS)
            / u128::from(self.span.1.0.saturating_sub(self.span.0.0).max(1)))
        .min(u128::from(TILE_COLUMNS - 1)) as u16;
        (it.addr >> self.tile_bits, column)
    }

    /// It is shown by itself, and counted no more.
    fn untile(&mut self, it: &Rectangle) {
        let tile = self.tile_of(it);
        if let Some(blocks) = self.tiles.get_mut(&tile) {
            *blocks -= 1;
            if *blocks == 0 {
                self.tiles.remove(&tile);
            }
            self.n_tiled -= 1;
        }
    }

    /// Those that are kept.
    #[cfg(test)]
    pub(super) fn shown(&self) -> &[Rectangle] {
        &self.done
    }

    /// How many are only counted.
    #[cfg(test)]
    pub(super) fn n_tiled(&self) -> u64 {
        self.n_tiled
    }

    /// Of what is kept, the lowest address.
    pub(super) fn lowest(&self) -> Option<u64> {
        let tiles = self.tiles.keys().map(|(addr, _)| addr << self.tile_bits);
        self.done.iter().map(|it| it.addr).chain(tiles).min()
    }

    /// For the page: addresses count from `base`, times from `start`.
    pub(super) fn write(&self, base: u64, start: Nanos, columns: &mut Columns) -> RectangleColumns {
        let since = |time: Nanos| time.0.saturating_sub(start.0);
        let instants = self.highest.iter().chain([&self.end]).filter(|instant| instant.is_whole);
        let mut tiles: Vec<_> = self.tiles.iter().collect();
        tiles.sort_unstable_by_key(|(key, _)| **key);
        RectangleColumns {
            addr: columns.add(self.done.iter().map(|it| it.addr - base)),
            bytes: columns.add(self.done.iter().map(|it| it.bytes.0)),
            spare: columns.add(self.done.iter().map(|it| u64::from(it.spare))),
            from: columns.add(self.done.iter().map(|it| since(it.from))),
            // 0: to the end.
            time: columns
                .add(self.done.iter().map(|it| it.to.map_or(0, |to| to.0.saturating_sub(it.from.0) + 1))),
            what: columns.add(self.done.iter().map(|it| u64::from(it.what))),
            whole_at: instants.map(|instant| since(instant.time)).collect(),
            n_tiled: self.n_tiled,
            tile_bytes: 1 << self.tile_bits,
            tile_columns: TILE_COLUMNS,
            tile_addr: columns
                .add(tiles.iter().map(|((addr, _), _)| (addr << self.tile_bits).saturating_sub(base))),
            tile_column: columns.add(tiles.iter().map(|((_, column), _)| u64::from(*column))),
            tile_blocks: columns.add(tiles.iter().map(|(_, blocks)| **blocks)),
        }
    }
}

/// Rectangles, as the page reads them.
#[derive(Serialize, Debug)]
pub(super) struct RectangleColumns {
    addr: ColumnId,
    bytes: ColumnId,
    /// Bytes that the program did not ask for.
    spare: ColumnId,
    from: ColumnId,
    time: ColumnId,
    what: ColumnId,
    /// All that was there then is kept.
    whole_at: Vec<u64>,
    n_tiled: u64,
    tile_bytes: u64,
    tile_columns: u64,
    tile_addr: ColumnId,
    tile_column: ColumnId,
    tile_blocks: ColumnId,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_stay_and_the_others_are_counted() {
        let mut all = Rectangles::new(10, (Nanos(0), Nanos(1000)));
        for idx in 0..500u64 {
            all.begins(idx << 20, Bytes(idx + 1), Nanos(idx), 0);
            all.ends(idx << 20, Nanos(idx + 1));
        }
        all.begins(7, Bytes(1 << 40), Nanos(0), 1);
        all.finish();
        let sizes: Vec<u64> = all.done.iter().map(|it| it.bytes.0).collect();
        assert_eq!(sizes, [1 << 40, 492, 493, 494, 495, 496, 497, 498, 499, 500]);
        assert_eq!(all.n_tiled, 491);
        assert_eq!(all.tiles.values().sum::<u64>(), 491);
    }
    #[test]
    fn all_that_was_there_at_the_highest_and_at_the_end_is_kept_before_what_is_larger() {
        let mut all = Rectangles::new(20, (Nanos(0), Nanos(1000)));
        for idx in 0..500u64 {
            all.begins(idx << 20, Bytes(1000), Nanos(idx), 0);
            all.ends(idx << 20, Nanos(idx + 10));
        }
        for idx in 0..8u64 {
            all.begins(1 << 40 | idx, Bytes(1), Nanos(600), 0);
        }
        all.is_highest(Nanos(600));
        for idx in 0..8u64 {
            all.ends(1 << 40 | idx, Nanos(601));
        }
        for idx in 0..500u64 {
            all.begins(idx << 20, Bytes(1000), Nanos(700), 0);
            all.ends(idx << 20, Nanos(800));
        }
        all.begins(7, Bytes(1), Nanos(999), 0);
        all.finish();
        let tiny: Vec<u64> = all.done.iter().filter(|it| it.bytes == Bytes(1)).map(|it| it.from.0).collect();
        assert_eq!(tiny, [600, 600, 600, 600, 600, 600, 600, 600, 999]);
        let whole = |all: &Rectangles| all.write(0, Nanos(0), &mut Columns::default()).whole_at;
        assert_eq!((all.done.len(), whole(&all)), (20, vec![600, 1000]));
        // Where there is no room for all of them, it is said.
        all.shrink();
        assert_eq!(whole(&all), [600, 1000]);
        all.shrink();
        assert!(whole(&all).len() < 2, "{:?}", whole(&all));
    }
}
