//! Reads a trace while it is written: each time what has come since, and nothing twice.

use super::scan::{Look, MIN_PATIENCE, find_magic, is_footer, look};
use super::{CUT, Damage, Error, Input, Trace, check_magic};
use crate::block::{FILE_MAGIC, Kind};
use crate::columns;
use crate::definitions::Definitions;
use crate::event::{Event, Process};
use std::io::{self, Seek, SeekFrom};
use std::path::Path;
use std::sync::Mutex;

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
        let mut input = Input::new(Box::new(super::open_regular(path).map_err(io)?)).map_err(io)?;
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
        };
        Ok(Follower { trace, suspect: None })
    }

    /// Reads at most so many blocks that it has not read yet, and adds their events in the order of the file: blocks that
    /// overlap in time are not merged.
    ///
    /// # Errors
    /// Those of the file system. What cannot be read of a block is in [`Trace::damages`].
    pub fn read(&mut self, most: usize, events: &mut Vec<Event>) -> io::Result<Grown> {
        let mut grown = Grown { blocks: 0, is_behind: false };
        self.trace.complete = false;
        while let Some((block, end)) = self.next()? {
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
                        self.trace.process = process;
                    }
                    self.trace.definitions = names;
                }
                Some(Kind::Events) => {
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

    /// The next block that is whole in the file, and where it ends.
    fn next(&mut self) -> io::Result<Option<(super::Block, u64)>> {
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
