//! Functions and lines for a trace that was made elsewhere, from files that belong to it by build id.
//!
//! The new trace is the old one, byte for byte, with definitions behind it that replace earlier ones: nothing of what
//! was recorded, and nothing of what was damaged, gets lost on the way. Segments of a bounded recording become one file.

use crate::opened::{Access, Expected, Links, opened};
use crate::output::{self, Overwrite};
use crate::symbol_files::{SymbolFiles, Unmarked};
use crate::symbols::{self, CLibrary, Patience, Resolved, Symbols};
use crate::{Error, OtherBuild};
use gputrace_schemas::event::{Frame, FrameId, Module, ModuleId, Stack, StackId};
use gputrace_schemas::reader::Trace;
use gputrace_schemas::writer::Writer;
use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longer than anybody waits.
const NO_DEADLINE: Duration = Duration::from_secs(1 << 30);

/// The findings.
#[derive(Debug, Default)]
pub struct Symbolised {
    /// Native frames of the trace that had no source line, or not even a function.
    pub n_frames: usize,
    /// Those of them that have a function now, and had none.
    pub n_functions: usize,
    /// Those of them that have a source line now.
    pub n_lines: usize,
    /// Modules of these frames for which there is no file, most frames first.
    pub unresolved: Vec<Unresolved>,
    /// Files that were too large for some of their frames, each in a sentence.
    pub too_large: Vec<String>,
}

/// A module without a file.
#[derive(Debug)]
pub struct Unresolved {
    /// The module.
    pub module: Module,
    /// Its frames that stay as they were.
    pub n_frames: usize,
    /// Files that are where it should be, and are of another build.
    pub others: Vec<OtherBuild>,
}

/// Writes a trace again, with the functions and lines that files below the roots know. A root is taken for `/` of the
/// machine of the trace, or is a folder of files by build id.
///
/// # Errors
/// The trace cannot be read, or the new one not written. That names are missing is no error.
pub fn symbolise(
    from: &Path,
    roots: Vec<PathBuf>,
    to: &Path,
    overwrite: Overwrite,
) -> Result<Symbolised, Error> {
    let trace = Trace::open(from)?;
    let failed = |source| Error::Output { file: to.to_owned(), source };
    if let (Ok(from), Ok(to)) = (from.canonicalize(), to.canonicalize())
        && from == to
    {
        return Err(Error::InPlace { file: to });
    }
    let source = opened(from, Links::Followed, Access::Read, &Expected::regular());
    let source = source.map_err(|why| failed(why.into()))?;
    output::place(to)?;
    let mut file = output::open(to, overwrite).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => Error::Exists { file: to.to_owned() },
        _ => failed(error),
    })?;
    let mut writer = if trace.is_joined() {
        Writer::copy(&trace, file)
    } else {
        io::copy(&mut source.take(trace.blocks_end()), &mut file).map_err(failed)?;
        Writer::append(&trace, file)
    }
    .map_err(failed)?;
    let mut names = Names::new(&trace);
    let unresolved = names.find(roots);
    for (id, frame) in &names.frames {
        writer.frame(*id, frame);
    }
    for (id, stack) in names.stacks() {
        writer.stack(id, &stack);
    }
    // A trace without its end stays without one: what it lacks is still missing.
    if trace.is_complete() { writer.try_finish() } else { writer.flush() }.map_err(failed)?;
    Ok(Symbolised { unresolved, ..names.counted })
}

/// Definitions that replace those of the trace.
struct Names<'a> {
    trace: &'a Trace,
    frames: Vec<(FrameId, Frame)>,
    inlined: HashMap<FrameId, Vec<FrameId>>,
    /// The first number that is free.
    next: u32,
    counted: Symbolised,
}

impl Names<'_> {
    fn new(trace: &Trace) -> Names<'_> {
        let next = trace.frames().len() as u32;
        Names { trace, frames: vec![], inlined: HashMap::new(), next, counted: Symbolised::default() }
    }

    /// Names what has no line; what has no file.
    fn find(&mut self, roots: Vec<PathBuf>) -> Vec<Unresolved> {
        let trace = self.trace;
        let wanted = without_line(trace);
        self.counted.n_frames = wanted.len();
        let astray = HashMap::new();
        let files = SymbolFiles { roots, astray: &astray, unmarked: Unmarked::Refused };
        let mut symbols = Symbols::new(Patience::of(NO_DEADLINE), CLibrary::Lines, files);
        let addresses: Vec<u64> = wanted.keys().copied().collect();
        let module_at = |address| module_at(trace.modules(), address);
        let mut n_frames: HashMap<ModuleId, usize> = HashMap::new();
        for resolved in symbols.resolve(&addresses, trace.modules(), module_at) {
            if let Some(module) = resolved.1 {
                *n_frames.entry(module).or_default() += 1;
            }
            if let Some(id) = wanted.get(&resolved.0) {
                self.name(*id, resolved);
            }
        }
        self.counted.too_large = symbols.too_large(trace.modules());
        unresolved(trace, symbols.missing, &n_frames)
    }

    fn name(&mut self, id: FrameId, resolved: Resolved) {
        let Some((outermost, inner)) = symbols::frames(resolved) else { return };
        if function(&outermost).is_empty() {
            return;
        }
        let had_none = self.trace.frame(id).is_none_or(|frame| function(frame).is_empty());
        self.counted.n_functions += usize::from(had_none);
        self.counted.n_lines += usize::from(has_line(&outermost));
        self.frames.push((id, outermost));
        let inner: Vec<_> = (self.next..).map(FrameId).zip(inner).collect();
        self.next += inner.len() as u32;
        if !inner.is_empty() {
            self.inlined.insert(id, inner.iter().map(|(id, _)| *id).collect());
        }
        self.frames.extend(inner);
    }

    /// Stacks that have more frames now.
    fn stacks(&self) -> impl Iterator<Item = (StackId, Stack)> {
        let all = (0..).map(StackId).zip(self.trace.stacks());
        all.filter(|(_, stack)| stack.frames.iter().any(|frame| self.inlined.contains_key(frame))).map(
            |(id, stack)| {
                let frames = symbols::unfold(&stack.frames, &self.inlined);
                (id, Stack { frames, ..stack.clone() })
            },
        )
    }
}

fn without_line(trace: &Trace) -> BTreeMap<u64, FrameId> {
    let frames = (0..).map(FrameId).zip(trace.frames());
    let wanted = frames.filter_map(|(id, frame)| match frame {
        Frame::Native { address, file, inlined: false, .. } if *address != 0 && file.is_empty() => {
            Some((*address, id))
        }
        Frame::Native { .. } | Frame::Python { .. } => None,
    });
    wanted.collect()
}

fn function(frame: &Frame) -> &str {
    let (Frame::Native { function, .. } | Frame::Python { function, .. }) = frame;
    function
}

fn has_line(frame: &Frame) -> bool {
    let (Frame::Native { line, .. } | Frame::Python { line, .. }) = frame;
    *line != 0
}

/// As the recorder decides it: the newest module with this address.
fn module_at(modules: &[Module], address: u64) -> Option<ModuleId> {
    let at = modules.iter().rposition(|module| (module.start..module.end).contains(&address))?;
    Some(ModuleId(at as u32))
}

fn unresolved(
    trace: &Trace,
    missing: Vec<(ModuleId, Vec<OtherBuild>)>,
    n_frames: &HashMap<ModuleId, usize>,
) -> Vec<Unresolved> {
    let of = |(id, others): (ModuleId, _)| {
        let n_frames = n_frames.get(&id).copied().unwrap_or_default();
        Some(Unresolved { module: trace.module(id)?.clone(), n_frames, others })
    };
    let mut unresolved: Vec<_> = missing.into_iter().filter_map(of).collect();
    unresolved.sort_by(|a, b| b.n_frames.cmp(&a.n_frames).then_with(|| a.module.path.cmp(&b.module.path)));
    unresolved
}
