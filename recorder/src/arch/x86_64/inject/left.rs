//! Memory files that attachers left in the process because they were killed, and how the next one knows that nobody needs them.
//!
//! Three may need such a file. Each is asked for in this order, because the answer of one holds only once the one before needs it no more:
//!
//! - Its attacher. It holds a lock of the file (`flock(2)`) by an open file that no other process has, so the kernel gives the lock back however
//!   the attacher ends. Process numbers would mean nothing in another PID namespace, and the lock of `/proc/PID/mem` holds only among those
//!   who have the same mount of `/proc`. Who takes a file away holds its lock too, so that an attacher that has just made it finds out.
//! - A thread that was given a chain of calls and has not made them all, or was created by one and has not begun. It may map the file, make a
//!   thread that begins in it, or close its number, which may be another file's by then. A chain waits for a processor, or for a process that
//!   stands still, and that may take any time, so no age of the file shows that it is over. Such a thread shows it on its stack, or has
//!   not had a processor for as long as it takes ([`Settling`]).
//! - A thread that has begun in the file's code. It closes the file itself, and nobody else does that.

use super::chain::Step;
use super::maps::Map;
use super::threads::Settling;
use super::{LOOK_EVERY, Late, PAGE, number, numbers, state};
use crate::arch::x86_64::ptrace::given;
use crate::opened::{Access, Descriptors, Expected, Taken, users_of};
use gputrace_ring::late;
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

/// So many are closed at once: a chain of calls takes room on a stack.
const MOST: usize = 8;
/// How long is looked, at most, for threads that may still come to such a file.
const SETTLES: Duration = Duration::from_secs(2);

/// A memory file, as long as nobody else may use it or take it away.
pub(super) struct Owned {
    /// An open file of our own: the one that the process has would keep the lock after us.
    file: File,
}

impl Owned {
    /// `None` if another has it.
    pub(super) fn of(taken: &Taken, expected: &Expected) -> io::Result<Option<Owned>> {
        let file = taken.open(Access::Read, expected)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Owned { file })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// A file whose attacher is gone.
struct Left {
    descriptor: u32,
    /// What its link and its mappings say.
    path: String,
    owned: Owned,
    /// Where its code is mapped.
    pages: Range<u64>,
}

/// What has to be done with it.
enum Need {
    Close,
    UnmapAndClose(u64),
    /// A thread is in its code.
    Nothing,
}

impl Left {
    fn numbers_at(&self) -> u64 {
        self.owned.file.metadata().map_or(0, |data| data.len()).saturating_sub(PAGE)
    }

    fn need(&self, maps: &[Map]) -> Need {
        // Of a file that was not written whole, this is anything, and nothing is mapped of it.
        let base = number(&self.owned.file, self.numbers_at() + given::BASE as u64);
        let pages = base..base.saturating_add(2 * PAGE);
        let mut mapped = maps.iter().filter(|map| map.path == self.path).peekable();
        if mapped.peek().is_none() {
            return Need::Close;
        }
        let is_begun = state(&self.owned.file, self.numbers_at()) != 0;
        match !is_begun && mapped.all(|map| pages.start <= map.start && map.end <= pages.end) {
            true => Need::UnmapAndClose(pages.start),
            false => Need::Nothing,
        }
    }
}

impl Late {
    /// Closes the files of attachers that were killed, as far as it is certain that nobody needs them.
    pub(super) fn take_away_left(&self) {
        let until = Instant::now() + self.patience.min(SETTLES);
        loop {
            let left = self.left();
            // The next attacher finds what stays.
            if left.is_empty() || !self.is_settled(&left, until) || !self.close(&left) {
                return;
            }
        }
    }

    fn left(&self) -> Vec<Left> {
        let descriptors = Descriptors::of(self.pid);
        let expected = Expected::memory().of(&users_of(self.pid));
        let Ok(maps) = self.maps() else { return vec![] };
        let left = self.files().into_iter().filter_map(|descriptor| {
            let path = descriptors.path(descriptor)?;
            let owned = Owned::of(&descriptors.take(descriptor).ok()?, &expected).ok()??;
            let mut left = Left { descriptor, path, owned, pages: 0..0 };
            match left.need(&maps.0) {
                Need::Nothing => return None,
                Need::UnmapAndClose(base) => left.pages = base..base + 2 * PAGE,
                Need::Close => {}
            }
            Some(left)
        });
        left.take(MOST).collect()
    }

    /// Whether no thread can still come to these files.
    fn is_settled(&self, left: &[Left], until: Instant) -> bool {
        let pages: Vec<Range<u64>> = left.iter().map(|left| left.pages.clone()).collect();
        let mut settling = Settling::default();
        loop {
            let Ok(maps) = self.maps() else { return false };
            let ground = self.ground();
            if settling.look(&ground, &maps, &pages) {
                return true;
            }
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Whether any was closed.
    fn close(&self, left: &[Left]) -> bool {
        let Ok(maps) = self.maps() else { return false };
        let (mut steps, mut closed) = (Vec::new(), Vec::new());
        for left in left {
            // Since the look a thread may have begun in it.
            match left.need(&maps.0) {
                Need::Nothing => continue,
                Need::UnmapAndClose(base) => {
                    steps.push(Step::Kernel(libc::SYS_munmap, numbers([base, 2 * PAGE, 0, 0, 0, 0])));
                }
                Need::Close => {}
            }
            let descriptor = u64::from(left.descriptor);
            steps.push(Step::Kernel(libc::SYS_close, numbers([descriptor, 0, 0, 0, 0, 0])));
            closed.push(left.descriptor);
        }
        if closed.is_empty() || self.run(&steps, b"").is_err() {
            return false;
        }
        // Else a new file could have the number of an old one.
        let until = Instant::now() + self.patience;
        let is_there = || self.files().iter().any(|descriptor| closed.contains(descriptor));
        while is_there() && Instant::now() < until {
            std::thread::sleep(LOOK_EVERY);
        }
        !is_there()
    }

    /// Descriptors of the process that link to one of our memory files.
    fn files(&self) -> Vec<u32> {
        let begin = format!("/memfd:{}", late::NAME.to_string_lossy());
        Descriptors::of(self.pid).named(&begin).unwrap_or_default()
    }
}
