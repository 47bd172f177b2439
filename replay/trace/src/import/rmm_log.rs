//! Logs of RMM's `logging_resource_adaptor` (`RMM_LOG_FILE`), as an [`OpStream`].
//!
//! One line per event: `Thread,Time,Action,Pointer,Size,Stream`, where the action is `allocate`, `free` or
//! `allocate failure` (rmm, include/rmm/mr/logging_resource_adaptor.hpp; `deallocate` in its user guide). The log does not
//! say which memory resource served the requests, on which device, or what it asked of the driver.

use std::io::{BufRead, BufReader};
use std::path::Path;

use gputrace_sim::ops::{
    AllocId, Allocation, Builder, History, Op, PoolIdx, RecordedOom, RecordedSettings, StackId, TooMany,
};
use rustc_hash::FxHashMap;

use super::{ImportError, Trace};
use crate::files;

/// The first line.
const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream";

/// Whether a file begins as a log of RMM does.
pub(super) fn looks_like_a_log(first_bytes: &[u8]) -> bool {
    HEADER.as_bytes().starts_with(first_bytes)
}

/// Reads a log.
///
/// # Errors
/// When it cannot be read, a line is not an event, or it has too many streams.
pub(super) fn read(path: &Path) -> Result<Trace, ImportError> {
    let open = |cause| ImportError::Open { path: path.into(), cause };
    let mut log = Log { builder: Builder::new(0), live: FxHashMap::default(), n_unknown: 0, n_twice: 0 };
    let mut reader = BufReader::new(files::open(path).map_err(open)?);
    let mut line = String::new();
    let mut number = 0;
    while {
        line.clear();
        reader.read_line(&mut line).map_err(open)?
    } > 0
    {
        number += 1;
        let text = line.trim();
        // RMM writes the header again whenever a log is opened.
        if text.is_empty() || text == HEADER {
            continue;
        }
        let event = Line::parse(text).ok_or_else(|| ImportError::Line {
            path: path.into(),
            number,
            text: text.chars().take(80).collect(),
        })?;
        log.add(event).map_err(|source| ImportError::TooMany { path: path.into(), source })?;
    }
    Ok(log.finish())
}

struct Line<'a> {
    action: &'a str,
    pointer: u64,
    bytes: u64,
    stream: u64,
}

impl<'a> Line<'a> {
    fn parse(text: &'a str) -> Option<Line<'a>> {
        let mut fields = text.split(',').skip(2).map(str::trim);
        let (action, pointer, bytes) = (fields.next()?, fields.next()?, fields.next()?.parse().ok()?);
        let known = ["allocate", "free", "deallocate", "allocate failure"];
        let pointer = if pointer.starts_with("(nil") { 0 } else { hexadecimal(pointer)? };
        known.contains(&action).then_some(Line {
            action,
            pointer,
            bytes,
            stream: hexadecimal(fields.next()?)?,
        })
    }
}

fn hexadecimal(text: &str) -> Option<u64> {
    u64::from_str_radix(text.strip_prefix("0x").unwrap_or(text), 16).ok()
}

struct Log {
    builder: Builder,
    live: FxHashMap<u64, AllocId>,
    /// Frees of what was never allocated.
    n_unknown: u64,
    /// Addresses that were handed out while in use.
    n_twice: u64,
}

impl Log {
    fn add(&mut self, line: Line) -> Result<(), TooMany> {
        // For no bytes, nothing is asked of the driver.
        if line.bytes == 0 {
            return Ok(());
        }
        let stream = self.builder.stream(line.stream)?;
        match line.action {
            "allocate" => {
                let allocation = Allocation {
                    requested: line.bytes,
                    address: line.pointer,
                    stack: StackId::NONE,
                    stream,
                    pool: PoolIdx::DEFAULT,
                };
                let id = self.builder.alloc(allocation);
                self.n_twice += u64::from(self.live.insert(line.pointer, id).is_some());
            }
            "allocate failure" => {
                self.builder.oom(RecordedOom {
                    rounded: line.bytes,
                    device_free: 0,
                    stream: Some(stream),
                    pool: PoolIdx::DEFAULT,
                    stack: StackId::NONE,
                });
            }
            _ => match self.live.remove(&line.pointer) {
                // RMM frees in stream order: the thread that frees has made the stream wait for all users.
                Some(id) => {
                    self.builder.op(Op::FreeRequested(id));
                    self.builder.op(Op::FreeCompleted(id));
                }
                None => self.n_unknown += 1,
            },
        }
        Ok(())
    }

    fn finish(mut self) -> Trace {
        let mut notes = vec!["an RMM log does not name its memory resource; assuming rmm_pool".to_owned()];
        if self.n_unknown > 0 {
            notes.push(format!("{} frees of memory that was allocated before the log began", self.n_unknown));
        }
        let stream = self.builder.stream_mut();
        stream.settings = RecordedSettings { policy: "rmm_pool", ..RecordedSettings::default() };
        if self.n_twice > 0 {
            stream.history = History::Broken(format!(
                "{} addresses were allocated twice: lines are missing, or several devices write to one log",
                self.n_twice
            ));
        }
        let stream = self.builder.finish();
        let devices = if stream.ops.is_empty() { Vec::new() } else { vec![stream] };
        Trace { devices, notes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(name: &str, text: &str) -> Result<Trace, ImportError> {
        let path = std::env::temp_dir().join(format!("gputrace-{}-{name}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        let trace = crate::import::load(&path);
        std::fs::remove_file(&path).unwrap();
        trace
    }

    #[test]
    fn requests_frees_and_failures_are_read() {
        let trace = load(
            "good.csv",
            "Thread,Time,Action,Pointer,Size,Stream\n\
             7,15:47:02:841961,allocate,0x10012400000,1048576,0\n\
             7,15:47:02:841961,allocate failure,(nil),99,0x2\n\
             7,15:47:02:841977,free,0x10012400000,1048576,0x0\n\
             7,15:47:02:841977,free,0x1,512,0\n",
        )
        .unwrap();
        let stream = &trace.devices[0];
        let id = AllocId(0);
        assert_eq!(stream.ops, [Op::Alloc(id), Op::Oom(0), Op::FreeRequested(id), Op::FreeCompleted(id)]);
        assert_eq!((stream.allocation(id).requested, stream.ooms[0].rounded), (1 << 20, 99));
        assert_eq!(stream.streams, [0, 2]);
        assert!(trace.notes[1].starts_with("1 frees of memory"), "{:?}", trace.notes);
    }

    #[test]
    fn a_line_that_is_no_event_is_named() {
        let error = load("bad.csv", "Thread,Time,Action,Pointer,Size,Stream\n7,1,allocate,0x10,many,0\n")
            .unwrap_err();
        assert!(error.to_string().contains("line 2"), "{error}");
    }
}
