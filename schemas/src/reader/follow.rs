//! Reads a trace while it is written: each time what has come since, and nothing twice.

use super::scan::{Look, MIN_PATIENCE, find_magic, is_footer, look};
use super::segments::is_same;
use super::{Block, CUT, Damage, Error, Input, Prefix, Trace, check_magic, segment_name};
use crate::block::{FILE_MAGIC, Kind};
use crate::columns;
use crate::definitions::Definitions;
use crate::event::{Event, Process};
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Bytes of a segment in which it says whose it is.
const FIRST_BLOCK: u64 = 1 << 16;

/// A trace that may still grow, read from its beginning on. It keeps what events name by number, and no events.
///
/// ```no_run
/// use gputrace_schemas::reader::Follower;
///
/// let mut follower = Follower::open("train.gtr")?;
/// let mut events = vec![];
/// while follower.read(64, &mut events)?.is_behind {}
/// println!("{} events so far, by {:?}", events.len(), follower.definitions().process().command);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Follower {
    /// Its list of blocks stays empty: `blocks_end` is how far it was read.
    trace: Trace,
    path: PathBuf,
    /// Device and inode of the file that is read now.
    file: (u64, u64),
    /// It goes on in another file than the one it began with: what that says was held is known.
    has_moved: bool,
    /// Where no block was readable although more than a block's header was there. The recorder may be about to cut it off.
    suspect: Option<(u64, u64)>,
}

/// What one reading has come to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grown {
    /// Blocks that were read.
    pub blocks: usize,
    /// There are more of them.
    pub is_behind: bool,
}

impl Follower {
    /// Opens a file, and reads nothing of it yet but its first word.
    ///
    /// # Errors
    /// As [`Trace::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Follower, Error> {
        let path = path.as_ref();
        let name = path.display().to_string();
        let io = |source| Error::Io { file: name.clone(), source };
        let file = super::open_regular(path).map_err(io)?;
        let number = file.metadata().map(|data| (data.dev(), data.ino())).map_err(io)?;
        let mut input = Input::new(Box::new(file)).map_err(io)?;
        let length = input.source.seek(SeekFrom::End(0)).map_err(io)?;
        check_magic(&mut input.source, length, &name)?;
        let trace = Trace {
            input: Mutex::new(input),
            complete: false,
            blocks: vec![],
            blocks_end: FILE_MAGIC.len() as u64,
            definitions: Definitions::default(),
            process: Process::default(),
            events: vec![],
            mappings: vec![],
            damages: Mutex::default(),
            segments: vec![],
        };
        Ok(Follower { trace, path: path.to_owned(), file: number, has_moved: false, suspect: None })
    }

    /// Reads at most so many blocks that it has not read yet, and adds their events in the order of the file: blocks that
    /// overlap in time are not merged.
    ///
    /// # Errors
    /// Those of the file system. What cannot be read of a block is in [`Trace::damages`].
    pub fn read(&mut self, most: usize, events: &mut Vec<Event>) -> io::Result<Grown> {
        let mut grown = Grown { blocks: 0, is_behind: false };
        self.trace.complete = false;
        loop {
            let is_over =
                |next: &Option<(Block, u64)>| next.is_none_or(|(block, _)| block.kind == Kind::Index as u8);
            let mut next = self.next()?;
            if is_over(&next)
                && let Some(newer) = self.next_segment()?
            {
                // The last blocks may have come between the two looks.
                next = self.next()?;
                if is_over(&next) {
                    self.move_to(newer)?;
                    continue;
                }
            }
            let Some((block, end)) = next else { break };
            if block.kind == Kind::Index as u8 {
                // Of a recorder that expects nothing more; if more comes after all, it stands in the index's place.
                self.trace.complete = true;
                break;
            }
            if grown.blocks == most {
                grown.is_behind = true;
                break;
            }
            match Kind::from_u8(block.kind) {
                Some(Kind::Definitions) => {
                    let mut names = std::mem::take(&mut self.trace.definitions);
                    self.trace.payload(&block, |payload, _| names.read(payload));
                    if let Some(process) = names.process.take() {
                        self.began_segment(process);
                    }
                    self.trace.definitions = names;
                }
                Some(Kind::Held) if self.has_moved => {}
                Some(Kind::Events | Kind::Held) => {
                    let before = events.len();
                    let read = |payload: &[u8], scratch: &mut columns::Scratch| {
                        columns::decode(payload, block.count, scratch, events)
                    };
                    if self.trace.payload(&block, read).is_none() {
                        events.truncate(before);
                    }
                }
                Some(Kind::Mappings | Kind::Index) | None => {}
            }
            self.trace.blocks_end = end;
            grown.blocks += 1;
        }
        Ok(grown)
    }

    /// What its events name by number, as far as it was read, and whether it has its end. It has no events of its own.
    #[must_use]
    pub fn definitions(&self) -> &Trace {
        &self.trace
    }

    /// What the process is, as a segment says it; whether it is the one that follows.
    fn began_segment(&mut self, process: Process) {
        let known = &self.trace.process;
        let is_next = process.segment <= known.segment.saturating_add(1);
        let since = if self.has_moved { known.since } else { process.since };
        if self.has_moved && !is_next {
            let what = format!("segments {} to {}", known.segment + 1, process.segment - 1);
            let remedy = "the recorder removed them before they were read; later figures may be wrong";
            self.trace.lock_damages().push(Damage { offset: 0, bytes: 0, what, remedy });
        }
        self.trace.process = Process { since, ..process };
    }

    /// The next segment of a bounded recording, once there is one.
    fn next_segment(&self) -> io::Result<Option<File>> {
        let known = &self.trace.process;
        if known.segment == 0 {
            return Ok(None);
        }
        let Ok(named) = super::open_regular(&self.path) else { return Ok(None) };
        let newest = named.metadata().map(|data| (data.dev(), data.ino()))?;
        if newest == self.file {
            return Ok(None);
        }
        // Where it was replaced more than once meanwhile, the next one has its number behind its name by now.
        let numbered = super::open_regular(segment_name(&self.path, known.segment.saturating_add(1)));
        let file = numbered.unwrap_or(named);
        let length = file.metadata()?.len().min(FIRST_BLOCK);
        let begin = Trace::read(Prefix { file: file.try_clone()?, length, at: 0 }, "");
        Ok(begin.is_ok_and(|begin| is_same(&begin.process, known)).then_some(file))
    }

    fn move_to(&mut self, file: File) -> io::Result<()> {
        self.file = file.metadata().map(|data| (data.dev(), data.ino()))?;
        let input = self.trace.input.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        input.source = Box::new(file);
        self.trace.blocks_end = FILE_MAGIC.len() as u64;
        self.trace.complete = false;
        self.has_moved = true;
        self.suspect = None;
        Ok(())
    }

    /// The next block that is whole in the file, and where it ends.
    fn next(&mut self) -> io::Result<Option<(Block, u64)>> {
        let at = self.trace.blocks_end;
        let input = self.trace.input.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        let source = &mut *input.source;
        let length = source.seek(SeekFrom::End(0))?;
        if length <= at {
            return Ok(None);
        }
        let (what, remedy) = match look(source, at, length) {
            Ok(Look::Block(block, end)) => return Ok(Some((block, end))),
            // The file became shorter meanwhile.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
            // The rest of it comes later, or never.
            Ok(Look::Damaged { remedy, .. }) if remedy == CUT => return Ok(None),
            Ok(Look::Damaged { what, remedy, .. }) => (what, remedy),
        };
        // What is behind an index that the recorder is taking off, or has just replaced, is readable at the next look.
        let before = self.suspect.replace((at, length));
        if before.is_none_or(|(place, seen)| place != at || length <= seen) {
            return Ok(None);
        }
        let mut from = at + 1;
        let mut patience = MIN_PATIENCE;
        while let Some(candidate) = find_magic(source, from, length, &mut patience)? {
            match look(source, candidate, length)? {
                Look::Block(block, end) => {
                    if !is_footer(source, at, length)? {
                        let damage = Damage { offset: at, bytes: candidate - at, what, remedy };
                        self.trace.lock_damages().push(damage);
                    }
                    return Ok(Some((block, end)));
                }
                Look::Damaged { checked, .. } if checked < patience => {
                    patience -= checked;
                    from = candidate + 1;
                }
                Look::Damaged { .. } => break,
            }
        }
        Ok(None)
    }
}
