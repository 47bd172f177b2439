//! The files of a bounded recording: when the next one begins, how it takes the place of the one before, and which are removed.
//!
//! ```text
//!  1. train.gtr.next            the whole state, written and synchronised
//!  2. train.gtr.0004            a second name of train.gtr, which goes on being written
//!  3. train.gtr.next -> train.gtr    one rename: from here on it is the trace
//!  4. train.gtr.0004            gets its end
//!  5. train.gtr.0001            is removed, where the bounds ask for it
//! ```
//!
//! Whoever stops us between two steps leaves a trace that is whole. Before 3, `train.gtr` is the old segment, and nothing refers to
//! `.next`; the second name of 2 is not looked for, as the trace says itself which number it has. After 3, the new segment has all that
//! is held, and the old one all of its events. A segment is removed last, when one that explains the same is on the disk: also where
//! the machine ends.

use crate::map_file::mark_as_written;
use crate::output::{self, Overwrite, TraceFile};
use gputrace_schemas::event::Nanos;
use gputrace_schemas::reader::{Trace, older_segments, open_regular, segment_name};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Parts of a bound that one segment has.
const PARTS: u64 = 8;
/// Parts of `max_size` that are kept free of old segments: the newest, the state that the next begins with, and what a block adds to either.
const RESERVED: u64 = 3;
/// The least that may be requested.
pub const LEAST_SIZE: u64 = 1 << 20;
/// Room for the state of a small program: its modules, calls and stacks.
const LEAST_SPARE: u64 = 256 << 10;
/// Of a block that is held, with its stack: about twice what was seen in traces of PyTorch.
const BLOCK_BYTES: u64 = 48;
/// Between two tries to begin a segment, where there was no room.
const AGAIN_AFTER: Duration = Duration::from_secs(5);

/// How much of a recording is kept; without either it is kept whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Bounds {
    /// At least the last so long.
    pub keep: Option<Duration>,
    /// At most so many bytes of all files.
    pub max_size: Option<u64>,
}

impl Bounds {
    /// There are any.
    #[must_use]
    pub fn are_set(self) -> bool {
        self.keep.is_some() || self.max_size.is_some()
    }
}

/// A length of time as users write it: `30m`, `12h`, `7d`, `90s`, `500ms`.
///
/// # Errors
/// What it should look like.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a length of time; write 90s, 30m, 12h or 7d");
    let digits = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let milliseconds = match unit.trim() {
        "ms" => 1,
        "s" => 1000,
        "m" | "min" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(wrong()),
    };
    let time = number.checked_mul(milliseconds).filter(|time| *time > 0).ok_or_else(wrong)?;
    Ok(Duration::from_millis(time))
}

/// An older segment.
#[derive(Debug)]
struct Old {
    number: u32,
    bytes: u64,
    /// From when on the one after it has every event: those of this one are older.
    ended: Nanos,
}

/// The files of one recording.
pub(crate) struct Segments {
    bounds: Bounds,
    base: PathBuf,
    /// Oldest first.
    old: Vec<Old>,
    number: u32,
    began: Instant,
    /// Bytes that the newest began with.
    state: u64,
    not_before: Instant,
}

impl Segments {
    pub(crate) fn new(bounds: Bounds, base: PathBuf) -> Segments {
        let now = Instant::now();
        let number = first_free(&base);
        Segments { bounds, base, old: vec![], number, began: now, state: 0, not_before: now }
    }

    /// The name of the newest, and of them all.
    pub(crate) fn base(&self) -> &Path {
        &self.base
    }

    /// The number of the newest.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// The number of the oldest that is left.
    pub(crate) fn oldest(&self) -> u32 {
        self.old.first().map_or(self.number, |old| old.number)
    }

    /// Bytes of all older segments.
    pub(crate) fn old_bytes(&self) -> u64 {
        self.old.iter().map(|old| old.bytes).sum()
    }

    /// Whether a segment of so many bytes is to be followed by another.
    pub(crate) fn is_due(&self, bytes: u64) -> bool {
        // A process that is silent needs no other segment.
        let has_own = bytes > self.state;
        let is_old =
            self.bounds.keep.is_some_and(|keep| self.began.elapsed() >= keep / PARTS as u32) && has_own;
        let is_large = self.bounds.max_size.is_some_and(|most| bytes >= self.largest(most));
        (is_old || is_large) && self.may_try()
    }

    /// It is not too early for another try.
    pub(crate) fn may_try(&self) -> bool {
        Instant::now() >= self.not_before
    }

    /// Removes the oldest because the disk is full; whether there was one.
    pub(crate) fn make_room(&mut self) -> bool {
        let is_there = !self.old.is_empty();
        if is_there {
            let oldest = self.old.remove(0);
            let _ = fs::remove_file(segment_name(&self.base, oldest.number));
        }
        is_there
    }

    /// What the next segment may begin with, where `held` blocks are held: room that the newest leaves on the disk.
    pub(crate) fn spare(&self, held: usize) -> u64 {
        let needed = LEAST_SPARE.max(self.state.saturating_mul(2)).max(held as u64 * BLOCK_BYTES);
        self.bounds.max_size.map_or(needed, |most| needed.min(most / PARTS))
    }

    /// A segment has at least as much of its own as of the state that it began with.
    fn largest(&self, most: u64) -> u64 {
        (most / PARTS).max(self.state.saturating_mul(2))
    }

    /// The file of the next segment, under a name that nobody reads.
    pub(crate) fn make(&mut self) -> io::Result<TraceFile> {
        // Where it fails, it is tried again later.
        self.not_before = Instant::now() + AGAIN_AFTER;
        let file = output::open(&self.next(), Overwrite::Replace)?;
        mark_as_written(&file);
        Ok(TraceFile::new(file))
    }

    /// It is written: it takes the place of the newest.
    pub(crate) fn switch(&mut self, bytes: u64, state: u64, since: Nanos) -> io::Result<()> {
        let (next, old) = (self.next(), segment_name(&self.base, self.number));
        match fs::hard_link(&self.base, &old) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(error),
            // Not every file system has second names; who stops us here leaves the trace under its numbers alone.
            Err(_) => fs::rename(&self.base, &old)?,
        }
        if let Err(error) = fs::rename(&next, &self.base) {
            // As before; where it was a second name, that goes.
            if self.base.exists() {
                let _ = fs::remove_file(&old);
            } else {
                let _ = fs::rename(&old, &self.base);
            }
            return Err(error);
        }
        let now = Instant::now();
        self.old.push(Old { number: self.number, bytes, ended: since });
        self.number += 1;
        (self.began, self.not_before, self.state) = (now, now, state);
        Ok(())
    }

    /// Takes back what [`Segments::make`] made.
    pub(crate) fn unmake(&self) {
        let _ = fs::remove_file(self.next());
    }

    /// The segment before the newest has its end.
    pub(crate) fn ended(&mut self, bytes: u64) {
        if let Some(old) = self.old.last_mut() {
            old.bytes = bytes;
        }
    }

    /// Removes what is beyond the bounds, where the newest may still grow.
    pub(crate) fn remove_oldest(&mut self, newest: Nanos) {
        let room = self.bounds.max_size.map(|most| {
            most.saturating_sub(self.largest(most).saturating_mul(RESERVED).max(most / PARTS * RESERVED))
        });
        self.remove_beyond(room, newest);
    }

    /// The same at the end, when the newest has `bytes`.
    pub(crate) fn remove_at_end(&mut self, bytes: u64) {
        self.remove_beyond(self.bounds.max_size.map(|most| most.saturating_sub(bytes)), Nanos(0));
    }

    fn remove_beyond(&mut self, room: Option<u64>, newest: Nanos) {
        while let Some(oldest) = self.old.first() {
            let age = Duration::from_nanos(newest.0.saturating_sub(oldest.ended.0));
            let is_old = self.bounds.keep.is_some_and(|keep| age >= keep);
            let is_much = room.is_some_and(|room| self.old_bytes() > room);
            if !is_old && !is_much {
                return;
            }
            // What cannot be removed is no longer ours: it would be tried for ever.
            let _ = fs::remove_file(segment_name(&self.base, oldest.number));
            self.old.remove(0);
        }
    }

    fn next(&self) -> PathBuf {
        let mut name = self.base.as_os_str().to_owned();
        name.push(".next");
        PathBuf::from(name)
    }
}

/// The first number behind those that segments of other recordings left beside this one.
fn first_free(base: &Path) -> u32 {
    older_segments(base).last().map_or(0, |(number, _)| *number).saturating_add(1)
}

/// Removes what an earlier bounded recording left under a name that is used anew. What is not a segment of one stays.
pub(crate) fn remove_left(base: &Path) {
    for (number, path) in older_segments(base) {
        let Ok(file) = open_regular(&path) else { continue };
        let is_segment = Trace::read(file, "").is_ok_and(|trace| trace.process().segment == number);
        if is_segment {
            let _ = fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_of_time_are_read_as_users_write_them() {
        for (text, milliseconds) in
            [("500ms", 500), ("90s", 90_000), ("30m", 1_800_000), ("12h", 43_200_000), ("7d", 604_800_000)]
        {
            assert_eq!(parse_time(text), Ok(Duration::from_millis(milliseconds)), "{text}");
        }
        for text in ["", "30", "m", "0s", "-1s", "1y", "99999999999999999d"] {
            assert!(parse_time(text).is_err(), "{text}");
        }
    }
}
