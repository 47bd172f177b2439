//! All of a file's debug information, for addresses that `lines.rs` cannot answer from a part of it.
//!
//! A file of symbols names other files: what several share (dwz), a package or an object that its units were split off into. Whoever made
//! the file chose these names. So each is opened as every file of symbols is: a regular file, without waiting, and what it unfolds to
//! is bounded. The loader that `addr2line` brings opens whatever the names lead to.

use crate::line::{Line, MOST_INLINED};
use crate::map_file::Mapped;
use crate::metered::{Meter, Metered};
use crate::opened::{self, Expected, Links};
use crate::symbol_files::SymbolFile;
use addr2line::gimli::{
    AbbreviationsCacheStrategy, Dwarf, DwarfPackage, Error, Reader, RunTimeEndian, SectionId,
};
use addr2line::{Context, LookupContinuation, LookupResult, SplitDwarfLoad};
use object::{CompressionFormat, File, Object, ObjectSection};
use std::borrow::Cow;
use std::cell::{Cell, OnceCell};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

/// Bytes that are read or decompressed for one file, at most: of libraries of a gigabyte, `.debug_info` has less.
const MOST_BYTES: u64 = 1 << 30;
/// Of one object that a unit was split off into: compilers make one for each source file.
const MOST_OBJECT: u64 = 64 << 20;

/// What debug information borrows from, for as long as this lives.
pub(crate) struct Sources {
    mapped: Chain<Mapped>,
    bytes: Chain<Vec<u8>>,
    left: Cell<u64>,
    meter: Meter,
}

impl Default for Sources {
    fn default() -> Sources {
        Sources {
            mapped: Chain::default(),
            bytes: Chain::default(),
            left: Cell::new(MOST_BYTES),
            meter: Meter::default(),
        }
    }
}

impl Sources {
    /// Whether more was wanted than one reading may have: an answer may be incomplete.
    pub(crate) fn are_used_up(&self) -> bool {
        self.meter.is_over()
    }

    fn map(&self, path: &std::path::Path) -> Option<File<'_>> {
        File::parse(self.mapped.add(Mapped::open(path).ok()?).bytes()).ok()
    }

    /// Reads a file whole, as many of them may be needed.
    fn read(&self, path: &std::path::Path) -> Option<File<'_>> {
        let expected = Expected::regular().with_bytes(0..=MOST_OBJECT.min(self.left.get()));
        let bytes = opened::read(path, Links::Followed, &expected).ok()?;
        self.take(bytes.len() as u64)?;
        File::parse(&**self.bytes.add(bytes)).ok()
    }

    /// `None` where there is not so much left.
    fn take(&self, bytes: u64) -> Option<()> {
        self.left.set(self.left.get().checked_sub(bytes)?);
        Some(())
    }

    /// A section, decompressed; empty where it is not there.
    fn section<'a>(&'a self, object: &File<'a>, id: SectionId, name: Option<&str>) -> Option<Metered<'a>> {
        let endian = if object.is_little_endian() { RunTimeEndian::Little } else { RunTimeEndian::Big };
        let Some(section) = name.and_then(|name| object.section_by_name(name)) else {
            return Some(self.meter.read(id, &[], endian));
        };
        let packed = section.compressed_data().ok()?;
        if packed.format != CompressionFormat::None {
            self.take(packed.uncompressed_size)?;
        }
        let bytes = match packed.decompress().ok()? {
            Cow::Borrowed(bytes) => bytes,
            Cow::Owned(bytes) => self.bytes.add(bytes),
        };
        Some(self.meter.read(id, bytes, endian))
    }
}

/// Debug information of a file, and of those that it names.
pub(crate) struct Whole<'a> {
    sources: &'a Sources,
    context: Context<Metered<'a>>,
    package: Option<DwarfPackage<Metered<'a>>>,
}

impl<'a> Whole<'a> {
    /// `None` for what cannot be read.
    pub(crate) fn of(file: &SymbolFile, sources: &'a Sources) -> Option<Whole<'a>> {
        let object = sources.map(&file.path)?;
        let load = |object: &File<'a>, id: SectionId| sources.section(object, id, Some(id.name())).ok_or(());
        let mut dwarf = Dwarf::load(|id| load(&object, id)).ok()?;
        if let Some(path) = &file.supplement {
            let supplement = sources.map(path)?;
            dwarf.load_sup(|id| load(&supplement, id)).ok()?;
        }
        dwarf.populate_abbreviations_cache(AbbreviationsCacheStrategy::Duplicates);
        let context = Context::from_dwarf(dwarf).ok()?;
        Some(Whole { sources, context, package: package(file, sources) })
    }

    /// The functions at an address of the file, innermost first.
    pub(crate) fn lines(&self, probe: u64) -> Vec<Line> {
        let mut lines = Vec::new();
        // Of a hostile file: the last address has none after it, which addr2line asks for.
        if probe == u64::MAX {
            return lines;
        }
        let mut frames = self.context.find_frames(probe);
        let found = loop {
            match frames {
                LookupResult::Output(found) => break found,
                LookupResult::Load { load, continuation } => {
                    frames = continuation.resume(self.split_off(&load).map(Arc::new));
                }
            }
        };
        let Ok(mut found) = found else { return lines };
        while lines.len() < MOST_INLINED
            && let Ok(Some(frame)) = found.next()
        {
            lines.push(Line::of(frame.function.as_ref(), frame.location.as_ref()));
        }
        lines
    }

    /// The half of a unit that is in another file.
    fn split_off(&self, load: &SplitDwarfLoad<Metered<'a>>) -> Option<Dwarf<Metered<'a>>> {
        let packed = self.package.as_ref().and_then(|it| it.find_cu(load.dwo_id, &load.parent).ok()?);
        if packed.is_some() {
            return packed;
        }
        let text = |name: &Metered<'a>| Some(PathBuf::from(OsStr::from_bytes(&name.to_slice().ok()?)));
        let folder = load.comp_dir.as_ref().and_then(text).unwrap_or_default();
        let object = self.sources.read(&folder.join(load.path.as_ref().and_then(text)?))?;
        let section = |id: SectionId| self.sources.section(&object, id, id.dwo_name()).ok_or(());
        let mut dwarf = Dwarf::load(section).ok()?;
        let header = dwarf.units().next().ok()??;
        if dwarf.unit(header).ok()?.dwo_id != Some(load.dwo_id) {
            return None;
        }
        dwarf.make_dwo(&load.parent);
        Some(dwarf)
    }
}

/// What a linker put all split-off units into, beside the file (`FILE.dwp`).
fn package<'a>(file: &SymbolFile, sources: &'a Sources) -> Option<DwarfPackage<Metered<'a>>> {
    let mut name = file.path.clone().into_os_string();
    name.push(".dwp");
    let object = sources.map(&PathBuf::from(name))?;
    let empty = sources.section(&object, SectionId::DebugInfo, None)?;
    DwarfPackage::load(|id| sources.section(&object, id, id.dwo_name()).ok_or(Error::Io), empty).ok()
}

/// Values that stay where they are.
struct Chain<T> {
    first: OnceCell<Box<Link<T>>>,
}

struct Link<T> {
    value: T,
    next: OnceCell<Box<Link<T>>>,
}

impl<T> Default for Chain<T> {
    fn default() -> Chain<T> {
        Chain { first: OnceCell::new() }
    }
}

impl<T> Chain<T> {
    fn add(&self, value: T) -> &T {
        let mut place = &self.first;
        while let Some(link) = place.get() {
            place = &link.next;
        }
        &place.get_or_init(|| Box::new(Link { value, next: OnceCell::new() })).value
    }
}

impl<T> Drop for Chain<T> {
    /// One after another: each within the one before would take room on the stack.
    fn drop(&mut self) {
        let mut next = self.first.take();
        while let Some(mut link) = next {
            next = link.next.take();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use object::{ObjectSymbol, SymbolKind};
    use std::path::Path;
    use std::process::Command;
    use std::sync::mpsc;
    use std::time::Duration;

    fn file(path: &Path) -> SymbolFile {
        SymbolFile { path: path.to_owned(), supplement: None }
    }

    /// What is at each function of a file. A reader that waits for somebody fails the test.
    fn named(path: &Path) -> Vec<(String, Vec<Line>)> {
        let (tells, told) = mpsc::channel();
        let path = path.to_owned();
        std::thread::spawn(move || {
            let bytes = std::fs::read(&path).expect("readable");
            let object = File::parse(&*bytes).expect("an object");
            let functions =
                object.symbols().filter(|it| it.kind() == SymbolKind::Text && it.size() > 0).take(300);
            let sources = Sources::default();
            let whole = Whole::of(&file(&path), &sources).expect("readable");
            let lines = |address| whole.lines(address);
            let all = functions
                .map(|it| (it.name().unwrap_or_default().to_owned(), lines(it.address() + it.size() / 2)));
            let _ = tells.send(all.collect());
        });
        told.recv_timeout(Duration::from_secs(120)).expect("nobody is waited for")
    }

    #[test]
    fn all_of_a_file_says_what_the_loader_of_addr2line_says() {
        let path = std::env::current_exe().expect("ours");
        let bytes = std::fs::read(&path).expect("readable");
        let object = File::parse(&*bytes).expect("an object");
        let loader = addr2line::Loader::new(&path).expect("readable");
        let sources = Sources::default();
        let whole = Whole::of(&file(&path), &sources).expect("readable");
        let functions = object.symbols().filter(|it| it.kind() == SymbolKind::Text && it.size() > 0);
        for symbol in functions.step_by(101).take(100) {
            let (probe, mut lines) = (symbol.address() + symbol.size() / 2, vec![]);
            let mut frames = loader.find_frames(probe).expect("frames");
            while let Some(frame) = frames.next().expect("a frame") {
                lines.push(Line::of(frame.function.as_ref(), frame.location.as_ref()));
            }
            assert_eq!(whole.lines(probe), lines, "{probe:#x}");
        }
    }

    #[test]
    fn files_that_a_file_names_are_read_only_if_they_are_regular() {
        let folder = std::env::temp_dir().join(format!("gputrace-whole-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).expect("a folder");
        std::fs::write(folder.join("split.c"), "int split_off(int n) { return n * 7; }\n").expect("writable");
        let mut compiler = Command::new("cc");
        compiler.args(["-g", "-gsplit-dwarf", "-fPIC", "-shared", "-o", "split.so", "split.c"]);
        assert!(compiler.current_dir(&folder).status().expect("a compiler").success());
        let library = folder.join("split.so");
        let line = |found: &[(String, Vec<Line>)]| {
            let lines = &found.iter().find(|(name, _)| name == "split_off").expect("it is there").1;
            lines.iter().map(|line| line.function.clone()).collect::<Vec<_>>()
        };
        assert_eq!(line(&named(&library)), ["split_off"]);
        // Whoever made the library, or may write to that folder, puts something else there.
        let objects = std::fs::read_dir(&folder).expect("ours").flatten().map(|it| it.path());
        let object = objects.filter(|it| it.extension().is_some_and(|it| it == "dwo")).last().expect("split");
        std::fs::remove_file(&object).expect("ours");
        for name in [object, folder.join("split.so.dwp")] {
            assert!(Command::new("mkfifo").arg(&name).status().expect("mkfifo").success());
            assert_eq!(line(&named(&library)).concat(), "", "{}", name.display());
            std::fs::remove_file(&name).expect("ours");
            std::os::unix::fs::symlink("/dev/zero", &name).expect("writable");
            assert_eq!(line(&named(&library)).concat(), "", "{}", name.display());
        }
        std::fs::remove_dir_all(folder).expect("ours");
    }
}
