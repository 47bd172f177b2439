//! Addresses to functions and lines, after the fact and from the files.
//!
//! `lines.rs` reads the part of a file that says something about an address, with `addr2line`. Where that is not enough,
//! `whole.rs` reads all of it. Which file that is, `symbol_files.rs` finds. What PyTorch ships has symbol tables and no DWARF.

pub(crate) use crate::line::Line;
use crate::line::demangle;
use crate::lines::{self, Answer};
use crate::map_file::Mapped;
use crate::symbol_files::{OtherBuild, SymbolFile, SymbolFiles};
use crate::whole::{Sources, Whole};
use gputrace_schemas::event::{Frame, FrameId, Module, ModuleId};
use rustix::time::{ClockId, DynamicClockId, clock_gettime_dynamic};
use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

/// How often all of a file may be read anew, because what was made of it took as much memory as it may.
const MOST_READINGS: usize = 16;

/// An address, the module it lies in, and its functions, innermost first: all but the last were inlined.
pub(crate) type Resolved = (u64, Option<ModuleId>, Vec<Line>);

/// How long names are looked for.
#[derive(Clone, Copy)]
pub(crate) struct Patience {
    until: Instant,
    /// What this thread may have used of a processor by then.
    work: Option<Duration>,
}

impl Patience {
    pub(crate) fn of(time: Duration) -> Patience {
        Patience { until: Instant::now() + time, work: None }
    }

    /// Until this thread has used so much of a processor, which a busy machine gives it late, and for so long at most.
    pub(crate) fn of_work(work: Duration, most: Duration) -> Patience {
        Patience { work: Some(worked() + work), ..Patience::of(most) }
    }

    fn is_over(&self) -> bool {
        Instant::now() >= self.until || self.work.is_some_and(|work| worked() >= work)
    }
}

/// What this thread has used of a processor.
fn worked() -> Duration {
    let clock = DynamicClockId::Known(ClockId::ThreadCPUTime);
    // Refused, the other end holds.
    clock_gettime_dynamic(clock).ok().and_then(|used| Duration::try_from(used).ok()).unwrap_or_default()
}

/// What is looked up of the C library's own frames, at the bottom of every stack (`start_thread`, `__libc_start_main`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CLibrary {
    /// The function, as its symbol table has it. Its debug file is megabytes, compressed: its lines, which tell nobody
    /// anything about a program's memory, took 10 ms of a processor, a third of what recording a short program costs.
    Functions,
    /// The lines, too.
    Lines,
}

impl CLibrary {
    /// Whether debug information is read for a module at this path: glibc's files (its Makeconfig and `shlib-versions`).
    fn wants_lines(self, module: &str) -> bool {
        let name = module.rsplit('/').next().unwrap_or_default();
        let is_its_own = ["libc.so.", "libc-2.", "ld-linux", "ld-2.", "libpthread.so.", "libpthread-2."]
            .iter()
            .any(|start| name.starts_with(start));
        self == CLibrary::Lines || !is_its_own
    }
}

/// Finds functions in files.
pub(crate) struct Symbols<'a> {
    patience: Patience,
    c_library: CLibrary,
    files: SymbolFiles<'a>,
    /// Modules that were asked for and have no file, with files of other builds that were found.
    pub(crate) missing: Vec<(ModuleId, Vec<OtherBuild>)>,
    /// Modules of whose addresses some have no lines, because to read them takes too much memory, and how many.
    too_large: Vec<(ModuleId, usize)>,
}

impl<'a> Symbols<'a> {
    pub(crate) fn new(patience: Patience, c_library: CLibrary, files: SymbolFiles<'a>) -> Symbols<'a> {
        Symbols { patience, c_library, files, missing: Vec::new(), too_large: Vec::new() }
    }

    /// What was left out because reading it takes too much memory, a line for each file.
    pub(crate) fn too_large(&self, modules: &[Module]) -> Vec<String> {
        let line = |(id, n): &(ModuleId, usize)| {
            let path = &modules.get(id.0 as usize)?.path;
            Some(format!(
                "{path}: {n} addresses have no line: its debug information takes too much memory to read"
            ))
        };
        self.too_large.iter().filter_map(line).collect()
    }

    /// The functions at the addresses where calls return to. Addresses that are not reached in time are left out.
    pub(crate) fn resolve(
        &mut self,
        addresses: &[u64],
        modules: &[Module],
        module_at: impl Fn(u64) -> Option<ModuleId>,
    ) -> Vec<Resolved> {
        let mut by_module: BTreeMap<Option<ModuleId>, Vec<u64>> = BTreeMap::new();
        for address in addresses {
            // The call is before the address that it returns to, perhaps in another function or line.
            by_module.entry(module_at(address.saturating_sub(1))).or_default().push(*address);
        }
        let mut resolved = Vec::new();
        for (id, addresses) in by_module {
            if self.patience.is_over() {
                break;
            }
            let module = id.and_then(|id| modules.get(id.0 as usize));
            let file = match (id, module.map(|module| self.files.find(module))) {
                (_, Some(Ok(file))) => Some(file),
                (Some(id), Some(Err(others))) => {
                    self.missing.push((id, others));
                    None
                }
                _ => None,
            };
            let (Some(file), Some(module)) = (file, module) else {
                resolved.extend(addresses.iter().map(|address| (*address, id, vec![Line::default()])));
                continue;
            };
            let probe = |address: &u64| address.wrapping_sub(1).wrapping_sub(module.bias);
            let probes: Vec<u64> = addresses.iter().map(probe).collect();
            let (found, n_left) = self.lines(&file, &probes, self.c_library.wants_lines(&module.path));
            self.too_large.extend(id.filter(|_| n_left > 0).map(|id| (id, n_left)));
            let found = addresses.into_iter().zip(found);
            resolved.extend(found.map_while(|(address, lines)| Some((address, id, lines?))));
        }
        resolved
    }

    /// The functions at addresses of a file, never without any; `None` from where time is over. And how many lack lines that it may have.
    fn lines(&self, file: &SymbolFile, probes: &[u64], wants_lines: bool) -> (Vec<Option<Vec<Line>>>, usize) {
        let mapped = Mapped::open(&file.path).ok();
        let object = mapped.as_ref().and_then(|mapped| object::File::parse(mapped.bytes()).ok());
        let Some(object) = object else { return (vec![Some(vec![Line::default()]); probes.len()], 0) };
        let answers = match file.supplement {
            _ if !wants_lines => vec![Answer::Lines(Vec::new()); probes.len()],
            None => lines::lines(&object, probes),
            Some(_) => vec![Answer::Unsure; probes.len()],
        };
        let mut whole = WholeFile { file, left: MOST_READINGS, n_left: 0 };
        let mut found: Vec<Option<Vec<Line>>> = Vec::new();
        let mut rest = answers.into_iter().zip(probes.iter().copied()).peekable();
        while let Some((answer, probe)) = rest.next() {
            match answer {
                _ if self.patience.is_over() => found.push(None),
                Answer::Lines(lines) => found.push(Some(lines)),
                Answer::Unsure => {
                    let more = std::iter::from_fn(|| {
                        rest.next_if(|(answer, _)| *answer == Answer::Unsure).map(|(_, probe)| probe)
                    });
                    let probes: Vec<u64> = std::iter::once(probe).chain(more).collect();
                    found.extend(whole.lines(&probes, &self.patience));
                }
            }
        }
        name_outermost(&object, probes, &mut found);
        (found, whole.n_left)
    }
}

/// All of a file, read anew where what was made of it has taken as much memory as it may.
struct WholeFile<'f> {
    file: &'f SymbolFile,
    /// Readings that may still be made.
    left: usize,
    /// Addresses without an answer, because it takes more than one reading has.
    n_left: usize,
}

impl WholeFile<'_> {
    /// What is at each address; `None` from where time is over.
    fn lines(&mut self, probes: &[u64], patience: &Patience) -> Vec<Option<Vec<Line>>> {
        let mut found = Vec::new();
        while found.len() < probes.len() && self.left > 0 && !patience.is_over() {
            self.left -= 1;
            let sources = Sources::default();
            let whole = Whole::of(self.file, &sources);
            if sources.are_used_up() {
                self.left = 0;
                break;
            }
            let before = found.len();
            for probe in probes.iter().skip(before) {
                if patience.is_over() {
                    break;
                }
                let lines = whole.as_ref().map(|whole| whole.lines(*probe)).unwrap_or_default();
                if sources.are_used_up() {
                    // What the addresses before it needed may be missing now.
                    if found.len() == before {
                        self.n_left += 1;
                        found.push(Some(Vec::new()));
                    }
                    break;
                }
                found.push(Some(lines));
            }
        }
        let rest = probes.len() - found.len();
        match patience.is_over() {
            true => found.extend(vec![None; rest]),
            false => {
                self.n_left += rest;
                found.extend(vec![Some(Vec::new()); rest]);
            }
        }
        found
    }
}

/// Gives functions that debug information does not name the name of their symbol.
fn name_outermost(object: &object::File<'_>, probes: &[u64], found: &mut [Option<Vec<Line>>]) {
    let mut unnamed = Vec::new();
    for (probe, lines) in probes.iter().zip(found) {
        let Some(lines) = lines else { continue };
        if lines.is_empty() {
            lines.push(Line::default());
        }
        unnamed.extend(lines.last_mut().filter(|last| last.function.is_empty()).map(|last| (*probe, last)));
    }
    if unnamed.is_empty() {
        return;
    }
    let probes: Vec<u64> = unnamed.iter().map(|(probe, _)| *probe).collect();
    for ((_, last), symbol) in unnamed.into_iter().zip(lines::symbols(object, &probes)) {
        last.function = symbol.map(demangle).unwrap_or_default();
    }
}

/// What the frame of an address becomes, and the frames of the functions that were inlined into it, innermost first.
pub(crate) fn frames((address, module, lines): Resolved) -> Option<(Frame, Vec<Frame>)> {
    let n_inlined = lines.len().checked_sub(1)?;
    let frame = |(at, line): (usize, Line)| Frame::Native {
        address,
        module,
        function: line.function,
        file: line.file,
        line: line.line,
        inlined: at < n_inlined,
    };
    let mut frames: Vec<Frame> = lines.into_iter().enumerate().map(frame).collect();
    Some((frames.pop()?, frames))
}

/// The frames of a stack with those that were inlined into them.
pub(crate) fn unfold(frames: &[FrameId], inlined: &HashMap<FrameId, Vec<FrameId>>) -> Vec<FrameId> {
    let of = |id: &FrameId| inlined.get(id).into_iter().flatten().copied().chain([*id]).collect::<Vec<_>>();
    frames.iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::{Fate, Target, read_module};
    use crate::symbol_files::{Astray, Unmarked};
    use object::{Object, ObjectSymbol};
    use std::fs::File;
    use std::time::Duration;

    #[inline(never)]
    fn a_function_of_ours() -> u64 {
        std::hint::black_box(1)
    }

    /// This process's modules.
    fn modules() -> Vec<Module> {
        let target = Target::new(std::process::id(), Some(std::process::id()), 0);
        let mut modules = target.address_space(0).expect("maps").modules;
        for module in &mut modules {
            if let Some((file, _)) = target.open(module, Fate::There) {
                read_module(module, &file);
            }
        }
        modules
    }

    fn files(astray: &HashMap<u64, Astray>) -> SymbolFiles<'_> {
        SymbolFiles { roots: vec!["/".into()], astray, unmarked: Unmarked::ByPath }
    }

    #[test]
    fn an_address_of_ours_is_found_with_its_file() {
        let modules = modules();
        // As if a call in the first instructions returned there.
        let address = a_function_of_ours as *const () as u64 + 2;
        let module_at = |address| {
            let at = modules.iter().position(|module| (module.start..module.end).contains(&address))?;
            Some(ModuleId(at as u32))
        };
        let astray = HashMap::new();
        let mut symbols =
            Symbols::new(Patience::of(Duration::from_secs(60)), CLibrary::Lines, files(&astray));
        let found = symbols.resolve(&[address, 16], &modules, module_at);
        assert_eq!(found[0], (16, None, vec![Line::default()]));
        let (_, _, lines) = &found[1];
        let last = lines.last().expect("one");
        assert!(last.function.ends_with("a_function_of_ours"), "{last:?}");
        assert!(last.file.ends_with("symbols.rs"), "{last:?}");
        let hour = Duration::from_secs(3600);
        for none in [Patience::of(Duration::ZERO), Patience::of_work(Duration::ZERO, hour)] {
            let mut none = Symbols::new(none, CLibrary::Lines, files(&astray));
            assert_eq!(none.resolve(&[address], &modules, module_at), [], "no time, no answer");
        }
        assert!(
            !Patience::of_work(hour, hour).is_over() && Patience::of_work(hour, Duration::ZERO).is_over()
        );
        a_function_of_ours();
    }

    /// A library whose functions have a unit each, with so many rows in its line table, which is compressed; with `.debug_aranges`, or without.
    fn with_rows(folder: &std::path::Path, rows: &[usize], has_aranges: bool) -> SymbolFile {
        let mut source =
            String::from(".section .debug_abbrev\n.byte 1,0x11,0, 0x11,1, 0x12,7, 0x10,0x17, 0,0, 0\n");
        for (n, rows) in rows.iter().enumerate() {
            source += &format!(
                "
.text
.globl f{n}
f{n}: .skip 64
.section .debug_info
i{n}: .long 2f-1f
1: .short 4
.long 0
.byte 8, 1
.quad f{n}, 64
.long l{n}-.Llines
2:
.section .debug_line
{first}
l{n}: .long 6f-3f
3: .short 4
.long 5f-4f
4: .byte 1,1,1,-5,14,13, 0,1,1,1,1,0,0,0,1,0,0,1, 0
.asciz \"rows.c\"
.byte 0,0,0, 0
5: .byte 0,9,2
.quad f{n}
.fill {rows}, 1, 32
.byte 0,1,1
6:",
                first = if n == 0 { ".Llines:" } else { "" },
            );
            if has_aranges {
                source += &format!(
                    "
.section .debug_aranges
.long 8f-7f
7: .short 2
.long i{n}-i0
.byte 8,0, 0,0,0,0
.quad f{n}, 64, 0, 0
8:"
                );
            }
        }
        let (from, path) = (folder.join("rows.s"), folder.join("rows.so"));
        std::fs::write(&from, source + "\n").expect("writable");
        let mut compiler = std::process::Command::new("cc");
        compiler.args(["-shared", "-nostdlib", "-Wl,--compress-debug-sections=zlib", "-o"]).arg(&path);
        assert!(compiler.arg(&from).status().expect("a compiler").success());
        SymbolFile { path, supplement: None }
    }

    #[test]
    fn what_becomes_far_more_than_its_file_is_left_out_and_counted() {
        let folder = std::env::temp_dir().join(format!("gputrace-rows-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let astray = HashMap::new();
        let hour = Patience::of(Duration::from_secs(3600));
        let symbols = Symbols::new(hour, CLibrary::Lines, files(&astray));
        // In each function, how many rows its line table has; how many have a line, and how many were left out.
        let check = |rows: &[usize], expected: (usize, usize)| {
            for has_aranges in [false, true] {
                let file = with_rows(&folder, rows, has_aranges);
                let bytes = std::fs::read(&file.path).expect("readable");
                assert!(bytes.len() < 1 << 20, "{} bytes", bytes.len());
                let object = object::File::parse(&*bytes).expect("an object");
                let at = |n| object.dynamic_symbols().find(|it| it.name() == Ok(&*format!("f{n}")));
                let probes = (0..rows.len()).filter_map(|n| Some(at(n)?.address() + 8));
                let probes: Vec<u64> = probes.collect();
                let (found, n_left) = symbols.lines(&file, &probes, true);
                let found: Vec<Line> = found.into_iter().flatten().flatten().collect();
                assert_eq!(found.len(), rows.len(), "each has its symbol");
                assert!(found.iter().enumerate().all(|(n, line)| line.function == format!("f{n}")));
                let n_lines = found.iter().filter(|line| line.line == 1).count();
                assert_eq!((n_lines, n_left), expected, "{rows:?}, {has_aranges}");
            }
        };
        check(&[1000, 1000], (2, 0));
        check(&[1000, 8 << 20, 1000], (2, 1));
        // Together they are more than one reading has.
        check(&[2 << 20, 2 << 20], (2, 0));
        std::fs::remove_dir_all(folder).expect("ours");
    }

    #[test]
    fn the_c_library_s_lines_are_left_to_whoever_asks_for_them() {
        let own = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib/libc-2.31.so", "/lib64/ld-linux-x86-64.so.2"];
        for module in own {
            assert!(
                !CLibrary::Functions.wants_lines(module) && CLibrary::Lines.wants_lines(module),
                "{module}"
            );
        }
        for module in ["/opt/libc10.so", "/usr/bin/python3.12", "/a/libcuda.so.1", ""] {
            assert!(CLibrary::Functions.wants_lines(module), "{module}");
        }
        let modules = modules();
        let at = modules.iter().position(|it| it.path.contains("/libc.so")).expect("the C library");
        let address = libc::getenv as *const () as u64 + 2;
        let astray = HashMap::new();
        let hour = Patience::of(Duration::from_secs(3600));
        let mut symbols = Symbols::new(hour, CLibrary::Functions, files(&astray));
        let found = symbols.resolve(&[address], &modules, |_| Some(ModuleId(at as u32)));
        let [(_, _, lines)] = &found[..] else { panic!("one address: {found:?}") };
        let [line] = &lines[..] else { panic!("one function: {lines:?}") };
        assert!(line.function.contains("getenv") && line.file.is_empty(), "{line:?}");
    }

    #[test]
    fn what_came_to_a_path_later_is_not_asked_and_what_is_held_open_is() {
        let mut libc = modules().into_iter().find(|it| it.path.contains("/libc.so")).expect("the C library");
        assert!(!libc.build_id.is_empty());
        // Debug files are found by build id, where they are installed.
        let has_debug_file = files(&HashMap::from([(libc.start, Astray::Gone)])).find(&libc).is_ok();
        let find = |libc: &Module, astray| files(&HashMap::from([(libc.start, astray)])).find(libc).is_ok();
        assert!(files(&HashMap::new()).find(&libc).is_ok());
        assert_eq!(find(&libc, Astray::Held(File::open("/proc/self/exe").expect("ours"))), has_debug_file);
        assert!(find(&libc, Astray::Held(File::open(&libc.path).expect("there"))));
        libc.build_id.clear();
        assert!(files(&HashMap::new()).find(&libc).is_ok(), "mapped from there");
        assert!(!find(&libc, Astray::Gone), "mapped from a file that is gone");
    }
}
