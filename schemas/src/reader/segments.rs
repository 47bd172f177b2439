//! Several files as one trace: the segments that are left of a bounded recording.
//!
//! ```text
//!   train.gtr.0003    train.gtr.0004    train.gtr         segments 3, 4 and 5; 1 and 2 were removed
//!   held | events     held | events     held | events
//!   ^^^^   ^^^^^^            ^^^^^^            ^^^^^^     what is read
//! ```
//!
//! The newest segment has the trace's own name, and each older one has its number behind that name. A segment says its number and
//! whose recording it is, so that a file that is there by chance is left alone. Opening begins at the newest and goes down until one
//! is missing: what a recorder removes or begins meanwhile makes the trace shorter, and never leaves a gap in it.

use super::{Block, Damage, Error, Input, Source, Trace};
use crate::block::Kind;
use crate::definitions::Definitions;
use crate::event::{Nanos, Process};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Digits of a segment's number: more where it has more.
const DIGITS: usize = 4;
/// Most segments of one trace: recorders keep some dozens.
const MOST: usize = 4096;

/// Opens a file by its name.
type Open<'a> = &'a dyn Fn(&Path) -> io::Result<File>;

/// One file of a trace that was joined.
#[derive(Clone, Debug)]
pub(super) struct Segment {
    /// Where it begins among the bytes of all.
    begins: u64,
    name: String,
}

/// The name of an older segment: `train.gtr.0003`.
#[must_use]
pub fn segment_name(base: &Path, number: u32) -> PathBuf {
    let mut name = base.as_os_str().to_owned();
    name.push(format!(".{number:0DIGITS$}"));
    PathBuf::from(name)
}

/// What [`segment_name`] made a name of; `None` where it is no such name.
#[must_use]
pub fn base_of(path: &Path) -> Option<(PathBuf, u32)> {
    let name = path.to_str()?;
    let (base, number) = name.rsplit_once('.')?;
    let is_number = number.len() >= DIGITS && number.bytes().all(|byte| byte.is_ascii_digit());
    let number = number.parse().ok().filter(|_| is_number && !base.is_empty())?;
    let base = PathBuf::from(base);
    (segment_name(&base, number) == path).then_some((base, number))
}

/// Files beside `base` that are named as its older segments, oldest first. Another recording may have left them.
#[must_use]
pub fn older_segments(base: &Path) -> Vec<(u32, PathBuf)> {
    let folder = base.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let Some(name) = base.file_name() else { return vec![] };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| {
        let (of, number) = base_of(Path::new(&entry.file_name()))?;
        (of.as_os_str() == name).then_some(number)
    });
    let mut found: Vec<_> = numbers.map(|number| (number, segment_name(base, number))).collect();
    found.sort_unstable();
    found
}

/// The newest segment where `base` itself is not there: a recorder was stopped between two names.
fn newest(base: &Path) -> Option<PathBuf> {
    older_segments(base).pop().map(|(_, path)| path)
}

/// Both are of one recording.
pub(super) fn is_same(one: &Process, other: &Process) -> bool {
    (one.pid, one.began, one.start, &one.boot, &one.host)
        == (other.pid, other.began, other.start, &other.boot, &other.host)
}

impl Trace {
    /// As [`Trace::open`], by somebody who knows how files are opened.
    ///
    /// # Errors
    /// As there.
    pub fn open_by(path: &Path, open: Open<'_>) -> Result<Trace, Error> {
        let read = |path: &Path| {
            let name = path.display().to_string();
            let file = open(path).map_err(|source| Error::Io { file: name.clone(), source })?;
            Trace::read(file, &name)
        };
        let named = match (read(path), newest_of(path)) {
            (Err(Error::Io { .. } | Error::NotBegun { .. }), Some(newest)) => {
                let base = path.to_owned();
                return Ok(read(&newest)?.with_older(&base, open));
            }
            (named, _) => named?,
        };
        // An older segment was named: the newest has the others.
        if named.process.segment > 0
            && let Some((base, number)) = base_of(path)
            && named.process.segment == number
        {
            let newer = read(&base).ok().or_else(|| read(&newest(&base)?).ok());
            let newer = newer.filter(|newer| is_same(&newer.process, &named.process));
            return match newer {
                Some(newer) if newer.process.segment > number => {
                    let joined = newer.with_older(&base, open);
                    // Where a segment between the two is missing, what was named is shown alone.
                    Ok(if joined.process.segment <= number { joined } else { named.with_older(&base, open) })
                }
                _ => Ok(named.with_older(&base, open)),
            };
        }
        Ok(named.with_older(path, open))
    }

    /// From when on every event is there; `None` for a trace from the beginning.
    #[must_use]
    pub fn since(&self) -> Option<Nanos> {
        Some(self.process.since).filter(|since| since.0 > 0)
    }

    /// It is in several files, which were read as one.
    #[must_use]
    pub fn is_joined(&self) -> bool {
        !self.segments.is_empty()
    }

    /// With the older segments of the recording that are beside it.
    pub(super) fn with_older(self, base: &Path, open: Open<'_>) -> Trace {
        let mut number = self.process.segment;
        let mut begins = self.process.after_gap;
        let mut older = vec![];
        while number > 1 && !begins && older.len() < MOST {
            number -= 1;
            let path = segment_name(base, number);
            let name = path.display().to_string();
            let Some(trace) = open(&path).ok().and_then(|file| Trace::read(file, &name).ok()) else { break };
            if trace.process.segment != number || !is_same(&trace.process, &self.process) {
                break;
            }
            begins = trace.process.after_gap;
            older.push((name, trace));
        }
        older.reverse();
        if older.is_empty() { self } else { self.behind(older, base.display().to_string()) }
    }

    /// One trace of several, the oldest first and this one last.
    fn behind(self, older: Vec<(String, Trace)>, name: String) -> Trace {
        let oldest = older.first().map_or(&self.process, |(_, trace)| &trace.process);
        let Process { segment, since, after_gap, .. } = *oldest;
        let process = Process { segment, since, after_gap, ..self.process.clone() };
        let complete = self.complete;
        let mut all = Joined::default();
        let mut spare = None;
        for (name, trace) in older.into_iter().chain([(name, self)]) {
            spare = Some(all.add(name, trace));
        }
        let Joined { chain, blocks, blocks_end, events, mappings, damages, segments } = all;
        let source: Box<dyn Source> = Box::new(chain);
        let mut joined = Trace {
            input: Mutex::new(Input { source, ..spare.unwrap_or_else(|| unreachable!("it has files")) }),
            complete,
            blocks,
            blocks_end,
            definitions: Definitions::default(),
            process,
            events,
            mappings,
            damages: Mutex::new(damages),
            segments,
        };
        let mut definitions = Definitions::default();
        for block in joined.blocks.iter().filter(|block| block.kind == Kind::Definitions as u8) {
            joined.payload(block, |payload, _| definitions.read(payload));
        }
        joined.definitions = definitions;
        joined.sort_events();
        joined
    }

    /// Damage as people find it: in which file, and where in that.
    pub(super) fn in_its_file(&self, damage: Damage) -> Damage {
        match self.segments.iter().rev().find(|segment| segment.begins <= damage.offset) {
            Some(segment) => Damage {
                offset: damage.offset - segment.begins,
                what: format!("in {}: {}", segment.name, damage.what),
                ..damage
            },
            None => damage,
        }
    }
}

fn newest_of(path: &Path) -> Option<PathBuf> {
    if path.exists() { None } else { newest(path) }
}

/// What is known of several files together.
#[derive(Default)]
struct Joined {
    chain: Chain,
    blocks: Vec<Block>,
    blocks_end: u64,
    events: Vec<Block>,
    mappings: Vec<Block>,
    damages: Vec<Damage>,
    segments: Vec<Segment>,
}

impl Joined {
    /// Adds a file, and gives back the memory that reading it needed.
    fn add(&mut self, name: String, trace: Trace) -> Input {
        let begins = self.chain.length();
        let moved = |block: &Block| Block { offset: begins + block.offset, ..*block };
        let is_first = self.segments.is_empty();
        self.blocks.extend(trace.blocks.iter().map(moved));
        // The files before have what was held when this one began.
        let is_own = |block: &&Block| is_first || block.kind != Kind::Held as u8;
        self.events.extend(trace.events.iter().filter(is_own).map(moved));
        self.mappings.extend(trace.mappings.iter().map(moved));
        self.blocks_end = begins + trace.blocks_end;
        let damages = trace.damages.into_inner().unwrap_or_else(PoisonError::into_inner);
        let named = |damage: Damage| Damage { what: format!("in {name}: {}", damage.what), ..damage };
        self.damages.extend(damages.into_iter().map(named));
        self.segments.push(Segment { begins, name });
        let mut input = trace.input.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.chain.push(std::mem::replace(&mut input.source, Box::new(io::empty())));
        input
    }
}

/// Files one after the other.
#[derive(Default)]
struct Chain {
    /// Where each begins, and its length as it was when it was opened.
    parts: Vec<(u64, u64, Box<dyn Source>)>,
    at: u64,
}

impl Chain {
    fn push(&mut self, mut source: Box<dyn Source>) {
        let length = source.seek(SeekFrom::End(0)).unwrap_or(0);
        self.parts.push((self.length(), length, source));
    }

    fn length(&self) -> u64 {
        self.parts.last().map_or(0, |(begins, length, _)| begins + length)
    }
}

impl Read for Chain {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let at = self.at;
        let part = self.parts.iter_mut().rev().find(|(begins, ..)| *begins <= at);
        let Some((begins, length, source)) = part else { return Ok(0) };
        let within = at - *begins;
        let left = usize::try_from(length.saturating_sub(within)).unwrap_or(usize::MAX);
        let room = to.len().min(left);
        source.seek(SeekFrom::Start(within))?;
        let n = source.read(to.get_mut(..room).unwrap_or_default())?;
        self.at += n as u64;
        Ok(n)
    }
}

impl Seek for Chain {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.at = match to {
            SeekFrom::Start(at) => at,
            SeekFrom::End(offset) => self.length().saturating_add_signed(offset),
            SeekFrom::Current(offset) => self.at.saturating_add_signed(offset),
        };
        Ok(self.at)
    }
}
