//! Where the threads of another process are, Python and native frames in one stack each, read from outside while it runs.
//!
//! A thread that waits is not stopped, one that runs stands still for some tenths of a millisecond (`thread_copy.rs`). Native frames are
//! unwound from the copies (`unwind.rs`), and the frames of the interpreter are replaced by the Python frames that they run.

use super::foreign::{Foreign, remedy};
use super::python_stacks::{Frame as RawFrame, Line, Python, Reader};
use super::thread_copy::{self, Copied, Status};
use super::unwind::Unwinder;
use crate::limits;
use crate::merge_stack::{INTERPRETER_FRAME, MergedFrame, merge_stack};
use crate::process::{self, AddressSpace, Target};
use crate::symbol_files::{Astray, SymbolFiles, Unmarked};
use crate::symbols::{self, CLibrary, Patience, Symbols};
use gputrace_schemas::event::{Frame, Module, ModuleId};
use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::time::{Duration, Instant};

pub use crate::thread_stack::{End, How, NoStacks, Stacks, ThreadStack};

/// Threads that are read at most.
const MOST_THREADS: usize = 1024;
/// Readings of a thread that cannot be copied at one moment, before it is marked.
const MOST_READINGS: u32 = 4;
/// How much of a processor names of functions may take, and how long.
const NAMES: (Duration, Duration) = (Duration::from_secs(3), Duration::from_secs(20));
/// How long the files of its code may take to respond.
const FILES: Duration = Duration::from_secs(3);
/// What names of the interpreter's own functions begin with: from 3.14 on some builds have a function for each instruction.
const INTERPRETER: [&str; 2] = ["_PyEval_EvalFrameDefault", "_TAIL_CALL_"];
/// The kernel's code in each process is smaller.
const MOST_VDSO: u64 = 64 << 10;

/// Reads the stacks of all threads of a process, by its number in the `/proc` that we see.
///
/// # Errors
/// The process is gone, or may not be read.
pub fn stacks(pid: u32) -> Result<Stacks, NoStacks> {
    let gone = || NoStacks::Gone(pid);
    fs::metadata(format!("/proc/{pid}")).map_err(|_| gone())?;
    let refused = |why: String| NoStacks::Refused { pid, why: format!("{why}; {}", remedy()) };
    let foreign = Foreign::open(pid).map_err(|error| refused(error.to_string()))?;
    let mut target = Target::new(pid, Some(pid), 0);
    let space = target.address_space(0).ok_or_else(|| refused("its mappings cannot be read".to_owned()))?;
    target.leave_out_silent(&space, FILES);
    let python = Python::find(&target, &space, &foreign);
    let process = Process { pid, foreign: &foreign, python: python.as_ref().ok() };
    // The kernel lets go what a thread has stopped when that thread ends, whatever it did.
    let taken = std::thread::scope(|scope| {
        let take = || {
            limits::come_first();
            process.take(&target, &space)
        };
        match std::thread::Builder::new().name("gputrace-stops".to_owned()).spawn_scoped(scope, take) {
            Ok(thread) => thread.join().unwrap_or_default(),
            Err(_) => process.take(&target, &space),
        }
    });
    let (names, too_large) = Names::of(&target, &space, &taken);
    let threads = names.stacks(taken);
    let silent = space.modules.iter().filter(|module| target.is_silent(module));
    let silent = silent.map(|module| format!("{}: the file does not respond", module.path));
    let left_out = silent.chain(too_large).collect();
    Ok(Stacks { threads, no_python: python.err(), left_out, modules: space.modules })
}

#[derive(Clone, Copy)]
struct Process<'a> {
    pid: u32,
    foreign: &'a Foreign,
    python: Option<&'a Python>,
}

/// A thread before anything has a name.
struct Taken {
    status: Status,
    native: Vec<u64>,
    end: End,
    how: How,
    python: Vec<Line>,
    is_entry: Vec<bool>,
    is_torn: bool,
}

impl Process<'_> {
    fn take(&self, target: &Target, space: &AddressSpace) -> Vec<Taken> {
        let mut unwinder = Unwinder::new(target, space, self.vdso());
        let states: HashMap<u32, u64> =
            self.python.map(|python| python.threads(self.foreign)).unwrap_or_default().into_iter().collect();
        let mut reader = self.python.map(|python| Reader::new(python, self.foreign));
        let folder = fs::read_dir(format!("/proc/{}/task", self.pid)).into_iter().flatten().flatten();
        let mut threads: Vec<u32> = folder.filter_map(|it| it.file_name().to_str()?.parse().ok()).collect();
        threads.sort_by_key(|thread| (*thread != self.pid, *thread));
        threads.truncate(MOST_THREADS);
        let taken = threads.into_iter().filter_map(|thread| {
            let status = Status::of(self.pid, thread)?;
            let state = states.get(&status.tid).copied();
            Some(self.thread(thread, status, state, &mut unwinder, reader.as_mut()))
        });
        taken.collect()
    }

    fn thread(
        &self,
        thread: u32,
        status: Status,
        state: Option<u64>,
        unwinder: &mut Unwinder<'_>,
        reader: Option<&mut Reader<'_>>,
    ) -> Taken {
        let python = |until| {
            self.python.zip(state).and_then(|(python, state)| python.frames(self.foreign, state, until))
        };
        let (copied, native, end, why) = self.copied(thread, unwinder, python);
        let (frames, how, is_torn) = match copied {
            Some(Copied { also, how, .. }) => (also, how, false),
            None => {
                let (frames, is_torn) = until_two_agree(python);
                (frames, How::None(why), is_torn)
            }
        };
        let frames = frames.unwrap_or_default();
        let (mut lines, mut is_entry) = (vec![], vec![]);
        if let Some(reader) = reader {
            for frame in frames {
                if let Some(line) = reader.line(frame) {
                    lines.push(line);
                    is_entry.push(frame.is_entry);
                }
            }
        }
        let is_torn = is_torn && !lines.is_empty();
        Taken { status, native, end, how, python: lines, is_entry, is_torn }
    }

    /// A thread at one moment, with its native frames; without one, why.
    fn copied<T>(
        &self,
        thread: u32,
        unwinder: &mut Unwinder<'_>,
        also: impl Fn(Instant) -> T + Copy,
    ) -> (Option<Copied<T>>, Vec<u64>, End, String) {
        let waiting = thread_copy::waiting(self.pid, thread, self.foreign, also).map(|copied| {
            let (native, end) = unwinder.frames(&copied.moment);
            (copied, native, end)
        });
        let waiting = match waiting {
            Some((copied, native, end)) if end != End::Unknown => {
                return (Some(copied), native, end, String::new());
            }
            other => other,
        };
        match (thread_copy::stopped(self.pid, thread, self.foreign, also), waiting) {
            (Ok(copied), _) => {
                let (native, end) = unwinder.frames(&copied.moment);
                (Some(copied), native, end, String::new())
            }
            (Err(_), Some((copied, native, end))) => (Some(copied), native, end, String::new()),
            (Err(why), None) => (None, vec![], End::Unknown, why),
        }
    }

    fn vdso(&self) -> Option<(Range<u64>, Vec<u8>)> {
        let maps = crate::opened::text_of_proc(format!("/proc/{}/maps", self.pid)).ok()?;
        let range = maps.lines().find(|line| line.ends_with("[vdso]"))?.split(' ').next()?;
        let (start, end) = range.split_once('-')?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        let bytes = self.foreign.up_to(start, end.checked_sub(start)?.min(MOST_VDSO) as usize);
        Some((start..end, bytes))
    }
}

/// Reads until two readings in a row are the same; `true` if no two were.
fn until_two_agree(read: impl Fn(Instant) -> Option<Vec<RawFrame>>) -> (Option<Vec<RawFrame>>, bool) {
    let again = || read(Instant::now() + Duration::from_secs(1));
    let mut frames = again();
    for _ in 1..MOST_READINGS {
        let next = again();
        if next == frames {
            return (frames, false);
        }
        frames = next;
    }
    (frames, true)
}

/// Functions of addresses, with what was inlined into them: innermost first.
struct Names(HashMap<u64, Vec<Frame>>);

impl Names {
    /// And what was left out.
    fn of(target: &Target, space: &AddressSpace, taken: &[Taken]) -> (Names, Vec<String>) {
        let mut addresses: Vec<u64> = taken.iter().flat_map(|it| &it.native).copied().collect();
        addresses.sort_unstable();
        addresses.dedup();
        let at = |modules: &[Module], address: u64| {
            modules.iter().rposition(|it| (it.start..it.end).contains(&address))
        };
        let mut modules = space.modules.clone();
        let mut astray = HashMap::new();
        let mut used: Vec<usize> =
            addresses.iter().filter_map(|it| at(&modules, it.saturating_sub(1))).collect();
        used.sort_unstable();
        used.dedup();
        for at in used {
            let Some(module) = modules.get_mut(at) else { continue };
            if target.is_silent(module) {
                // What is at its path must not be opened either.
                astray.insert(module.start, Astray::Gone);
            }
            let Some((file, reach)) = target.open(module, space.fate(module)) else { continue };
            process::read_module(module, &file);
            if reach == process::Reach::Astray {
                astray.insert(module.start, Astray::Held(file));
            }
        }
        let roots = target.root().into_iter().chain(["/".into()]).collect();
        let files = SymbolFiles { roots, astray: &astray, unmarked: Unmarked::ByPath };
        let mut symbols = Symbols::new(Patience::of_work(NAMES.0, NAMES.1), CLibrary::Functions, files);
        let module_at = |address| at(&modules, address).map(|at| ModuleId(at as u32));
        let mut names = HashMap::new();
        for resolved in symbols.resolve(&addresses, &modules, module_at) {
            let address = resolved.0;
            let Some((outermost, mut frames)) = symbols::frames(resolved) else { continue };
            frames.push(outermost);
            names.insert(address, frames);
        }
        for address in addresses {
            names
                .entry(address)
                .or_insert_with(|| vec![unnamed(address, module_at(address.saturating_sub(1)))]);
        }
        let too_large = symbols.too_large(&modules);
        (Names(names), too_large)
    }

    fn stacks(&self, taken: Vec<Taken>) -> Vec<ThreadStack> {
        taken.into_iter().map(|taken| self.stack(taken)).collect()
    }

    fn stack(&self, taken: Taken) -> ThreadStack {
        let word = |address: &u64| {
            let is_interpreter = self.0.get(address).into_iter().flatten().any(is_interpreter);
            if is_interpreter { address | INTERPRETER_FRAME } else { *address }
        };
        let words: Vec<u64> = taken.native.iter().map(word).collect();
        let python = |line: &Line| Frame::Python {
            function: line.function.clone(),
            file: line.file.clone(),
            line: line.line,
        };
        let frames = merge_stack(&words, &taken.is_entry).into_iter().flat_map(|frame| match frame {
            MergedFrame::Native(at) => {
                taken.native.get(at).and_then(|it| self.0.get(it)).cloned().unwrap_or_default()
            }
            MergedFrame::Python(at) => taken.python.get(at).map(python).into_iter().collect(),
        });
        let frames = frames.collect();
        let Status { tid, name, state, .. } = taken.status;
        ThreadStack { tid, name, state, frames, how: taken.how, end: taken.end, is_torn: taken.is_torn }
    }
}

fn unnamed(address: u64, module: Option<ModuleId>) -> Frame {
    let (function, file) = (String::new(), String::new());
    Frame::Native { address, module, function, file, line: 0, inlined: false }
}

fn is_interpreter(frame: &Frame) -> bool {
    match frame {
        Frame::Native { function, .. } => INTERPRETER.iter().any(|begin| function.starts_with(begin)),
        Frame::Python { .. } => false,
    }
}

#[cfg(test)]
mod tests;
