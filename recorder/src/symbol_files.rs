//! Which file has the names of a module: its own, or the one that its names were split off into, below some root.
//!
//! A path is only a hint. Files are told by their build ids, because what is at a path may be another build; only a
//! module of a process that is there, and that has no build id, is taken for what is at its path.

use crate::opened::{self, Access, Expected, Links};
use crate::pages::Headers;
use crate::process::{build_id, hex};
use gputrace_schemas::event::Module;
use object::{Object, ObjectSection};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A module's file that its path does not lead to, or not for long: it was deleted, or is in another root.
#[derive(Debug)]
pub(crate) enum Astray {
    /// It is held open.
    Held(File),
    /// Nobody may open it any more. What is at its path is another file.
    Gone,
}

/// What a module without a build id is taken for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Unmarked {
    /// The file at its path.
    ByPath,
    /// Nothing.
    Refused,
}

/// Where files are looked for.
pub(crate) struct SymbolFiles<'a> {
    /// Folders that are taken for `/`.
    pub(crate) roots: Vec<PathBuf>,
    /// By the start of the module.
    pub(crate) astray: &'a HashMap<u64, Astray>,
    pub(crate) unmarked: Unmarked,
}

/// A file with names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct SymbolFile {
    pub(crate) path: PathBuf,
    /// What several debug files share (`.gnu_debugaltlink`, which dwz makes).
    pub(crate) supplement: Option<PathBuf>,
}

impl SymbolFiles<'_> {
    /// The file that says most about the module: lines, else local functions, else what it exports.
    ///
    /// # Errors
    /// There is none. Files that were found but are of another build are named.
    pub(crate) fn find(&self, module: &Module) -> Result<SymbolFile, Vec<OtherBuild>> {
        let mut others = Vec::new();
        let mut best: Option<(Says, PathBuf)> = None;
        let mut seen = HashSet::new();
        for path in self.candidates(module) {
            // Roots are mostly different names of the same one.
            if identity(&path).is_none_or(|identity| !seen.insert(identity)) {
                continue;
            }
            let Some(facts) = Facts::read(&path) else { continue };
            let is_right = match module.build_id.as_str() {
                "" => self.unmarked == Unmarked::ByPath,
                id => facts.build_id == id,
            };
            if !is_right {
                others.push(OtherBuild { path, build_id: facts.build_id });
            } else if best.as_ref().is_none_or(|(says, _)| *says < facts.says) {
                best = Some((facts.says, path));
                if facts.says == Says::Lines {
                    break;
                }
            }
        }
        let (_, path) = best.ok_or(others)?;
        let supplement = self.supplement(&path);
        Ok(SymbolFile { path, supplement })
    }

    fn candidates(&self, module: &Module) -> Vec<PathBuf> {
        let below = module.path.trim_start_matches('/');
        let mut files = Vec::new();
        for root in &self.roots {
            files.extend(by_build_id(root, &module.build_id));
            files.push(root.join(format!("usr/lib/debug/{below}.debug")));
        }
        match self.astray.get(&module.start) {
            // Names in /proc are links to the file itself, wherever it is.
            Some(Astray::Held(file)) => files.push(format!("/proc/self/fd/{}", file.as_raw_fd()).into()),
            Some(Astray::Gone) => {}
            None => files.extend(self.roots.iter().map(|root| root.join(below))),
        }
        files
    }

    fn supplement(&self, file: &Path) -> Option<PathBuf> {
        let opened = open(file)?;
        let headers = Headers::of(&opened);
        let elf = object::File::parse(&headers).ok()?;
        let (link, build_id) = elf.gnu_debugaltlink().ok()??;
        let (link, build_id) = (String::from_utf8_lossy(link), hex(build_id));
        let beside = file.parent().map(|folder| folder.join(&*link));
        let below = |root: &PathBuf| {
            by_build_id(root, &build_id).into_iter().chain([root.join(link.trim_start_matches('/'))])
        };
        let mut candidates = self.roots.iter().flat_map(below).chain(beside);
        candidates.find(|path| {
            identity(path).is_some() && Facts::read(path).is_some_and(|facts| facts.build_id == build_id)
        })
    }
}

/// A file at a place where the module's was looked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OtherBuild {
    /// The file.
    pub path: PathBuf,
    /// Its build id in hexadecimal; empty if it has none.
    pub build_id: String,
}

/// As distributions lay them out below `/usr/lib/debug`, as such a folder of its own, and as debuginfod's client keeps
/// what it fetched (debuginfod_find_debuginfo(3): `$DEBUGINFOD_CACHE_PATH/BUILDID/debuginfo`).
fn by_build_id(root: &Path, build_id: &str) -> Vec<PathBuf> {
    let Some((first, rest)) = build_id.split_at_checked(2).filter(|(_, rest)| !rest.is_empty()) else {
        return Vec::new();
    };
    let places = [
        format!("usr/lib/debug/.build-id/{first}/{rest}.debug"),
        format!(".build-id/{first}/{rest}.debug"),
        format!(".build-id/{first}/{rest}"),
        format!("{build_id}/debuginfo"),
        format!("{build_id}/executable"),
        build_id.to_owned(),
        format!("{build_id}.debug"),
    ];
    places.into_iter().map(|place| root.join(place)).collect()
}

/// What is at such a path may be anything, and anybody's: a FIFO would be waited for. Distributions make links of these names.
fn open(path: &Path) -> Option<File> {
    opened::opened(path, Links::Followed, Access::Read, &Expected::regular()).ok()
}

/// Which regular file is at a path.
fn identity(path: &Path) -> Option<(u64, u64)> {
    let facts = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    Some((facts.dev(), facts.ino()))
}

/// How much a file says, more being more.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Says {
    Exports,
    Functions,
    Lines,
}

struct Facts {
    build_id: String,
    says: Says,
}

impl Facts {
    /// Of a regular file; `None` for what is not there or no ELF file.
    fn read(path: &Path) -> Option<Facts> {
        let file = open(path)?;
        let headers = Headers::of(&file);
        let elf = object::File::parse(&headers).ok()?;
        // What a section was split off from keeps its header, but no bytes.
        let has = |name| elf.section_by_name(name).is_some_and(|section| section.file_range().is_some());
        let says = match (has(".debug_info"), has(".symtab")) {
            (true, _) => Says::Lines,
            (false, true) => Says::Functions,
            (false, false) => Says::Exports,
        };
        Some(Facts { build_id: build_id(&elf), says })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef01234567";

    /// An ELF file with nothing but a build id.
    fn elf(build_id: &str) -> Vec<u8> {
        let id = (0..build_id.len()).step_by(2);
        let id: Vec<u8> = id.map(|at| u8::from_str_radix(&build_id[at..at + 2], 16).expect("hex")).collect();
        // A name of 4 bytes, the id's 20, NT_GNU_BUILD_ID.
        let note = [&[4, 0, 0, 0, 20, 0, 0, 0, 3, 0, 0, 0][..], b"GNU\0", &id].concat();
        // 64 bits, little-endian; ET_DYN, EM_X86_64; one program header, right behind this.
        let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0\x3e\0\x01\0\0\0".to_vec();
        file.extend([0, 64, 0].iter().flat_map(|word: &u64| word.to_le_bytes()));
        file.extend([0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        // PT_NOTE, readable; offset, two addresses, two sizes, alignment.
        file.extend([4, 0, 0, 0, 4, 0, 0, 0]);
        let length = note.len() as u64;
        file.extend([120, 120, 120, length, length, 4].iter().flat_map(|word: &u64| word.to_le_bytes()));
        file.extend(note);
        file
    }

    /// What is found below a root with these files of these build ids, for `/lib/a.so`.
    fn found(files: &[(&str, &str)], unmarked: Unmarked, build_id: &str) -> Result<String, Vec<String>> {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let n = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let root = std::env::temp_dir().join(format!("gputrace-symbol-files-{}-{n}", std::process::id()));
        for (path, id) in files {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("writable");
            std::fs::write(path, elf(id)).expect("writable");
        }
        let module =
            Module { path: "/lib/a.so".to_owned(), build_id: build_id.to_owned(), ..Module::default() };
        let astray = HashMap::new();
        let search = SymbolFiles { roots: vec![root.clone()], astray: &astray, unmarked };
        let name = |path: &Path| path.strip_prefix(&root).expect("below").display().to_string();
        let found = search.find(&module).map(|file| name(&file.path));
        let found = found.map_err(|others| {
            others.iter().map(|other| format!("{} {}", name(&other.path), other.build_id)).collect()
        });
        let _ = std::fs::remove_dir_all(&root);
        found
    }

    #[test]
    fn files_are_found_where_distributions_and_debuginfod_put_them() {
        let (first, rest) = ID.split_at(2);
        for place in [
            &*format!("usr/lib/debug/.build-id/{first}/{rest}.debug"),
            &format!(".build-id/{first}/{rest}.debug"),
            &format!("{ID}/debuginfo"),
            &format!("{ID}/executable"),
            ID,
            "usr/lib/debug/lib/a.so.debug",
            "lib/a.so",
        ] {
            assert_eq!(found(&[(place, ID)], Unmarked::Refused, ID), Ok(place.to_owned()));
        }
        assert_eq!(found(&[("lib/b.so", ID)], Unmarked::Refused, ID), Err(vec![]));
    }

    #[test]
    fn another_build_is_no_answer_wherever_it_is() {
        let other = "ff".repeat(20);
        let files = [("lib/a.so", &*other)];
        let refused = Err(vec![format!("lib/a.so {other}")]);
        assert_eq!(found(&files, Unmarked::Refused, ID), refused);
        assert_eq!(found(&files, Unmarked::ByPath, ID), refused);
        assert_eq!(found(&files, Unmarked::Refused, ""), refused, "a path alone says nothing");
        assert_eq!(found(&files, Unmarked::ByPath, ""), Ok("lib/a.so".to_owned()));
        let both = [("lib/a.so", &*other), (ID, ID)];
        assert_eq!(found(&both, Unmarked::Refused, ID), Ok(ID.to_owned()));
    }
}
