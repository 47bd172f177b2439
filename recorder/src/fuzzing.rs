//! What fuzzing calls of this crate's inside: the recorder's reading of a ring, of files with symbols and of libraries in another
//! process's memory, without a process.

use crate::drain::{Drain, Found};
use crate::map_file::MapFile;
use crate::process::read_module;
use crate::symbol_files::{SymbolFiles, Unmarked};
use crate::symbols::{CLibrary, Patience, Symbols};
use crate::ticks::Timeline;
use crate::translate::Translator;
use gputrace_schemas::event::{Module, ModuleId};
use object::{Object, ObjectSymbol};
use std::collections::HashMap;
use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

/// A recorder's end of a ring, created again for each history.
pub struct Ring {
    drain: Drain,
    translator: Translator,
    timeline: Timeline,
    found: Found,
    // Dropped last: the others read its memory.
    _file: MapFile,
}

impl Ring {
    /// Opens a ring, which may be anything; `None` for what is refused.
    #[must_use]
    pub fn open(path: &Path) -> Option<Ring> {
        let file = MapFile::open(path).ok()?;
        let map = file.map();
        Some(Ring {
            drain: Drain::new(map),
            translator: Translator::new(),
            timeline: Timeline::new(map.clock(), map.calibration(), false),
            found: Found::default(),
            _file: file,
        })
    }

    /// One look at the ring.
    pub fn pass(&mut self) {
        self.drain.pass(&mut self.found);
    }

    /// One look at the lines' owners.
    pub fn look_at_lines(&mut self) {
        self.drain.look_at_lines();
    }

    /// The look after which there is none: the process is gone.
    pub fn last_pass(&mut self) {
        self.drain.last_pass(&mut self.found);
    }

    /// Translates what was found so far; how many items of a trace it became.
    pub fn translate(&mut self) -> usize {
        let mut found = std::mem::take(&mut self.found);
        for (lane, tid) in found.lanes {
            self.translator.lane(lane, tid, String::new());
        }
        for definition in found.definitions {
            self.translator.define(definition);
        }
        found.events.sort_by_key(|stamped| stamped.ticks);
        for stamped in found.events {
            self.translator.event(stamped, &self.timeline);
        }
        self.translator.take().len()
    }
}

/// Looks for functions and lines in a file, which may be anything; how many were found.
#[must_use]
pub fn symbols(path: &Path) -> usize {
    let bytes = fs::read(path).unwrap_or_default();
    let elf = object::File::parse(&*bytes).ok();
    let symbols = elf.iter().flat_map(|elf| elf.symbols().map(|symbol| symbol.address().wrapping_add(2)));
    let addresses: Vec<u64> = symbols.take(16).chain((0x1000..0x1200).step_by(24)).collect();
    let mut module = Module { path: path.display().to_string(), end: u64::MAX, ..Module::default() };
    if let Ok(file) = File::open(path) {
        read_module(&mut module, &file);
    }
    // An address that a file claims is the address that is asked for.
    module.bias = 0;
    let astray = HashMap::new();
    let files = SymbolFiles { roots: vec!["/".into()], astray: &astray, unmarked: Unmarked::ByPath };
    let mut symbols = Symbols::new(Patience::of(Duration::from_secs(3600)), CLibrary::Lines, files);
    let resolved = symbols.resolve(&addresses, &[module], |_| Some(ModuleId(0)));
    resolved.iter().flat_map(|(_, _, lines)| lines).filter(|line| !line.function.is_empty()).count()
}

/// Looks for functions and code in a file, which stands for the memory of another process and may be anything; how many functions it
/// has.
#[must_use]
pub fn foreign_image(path: &Path) -> usize {
    let Ok(memory) = File::open(path) else { return 0 };
    crate::arch::look_at_image(&memory)
}
