//! Addresses to functions and lines, after the fact and from the files.
//!
//! `addr2line`'s loader was chosen over `symbolic` and over our own reading with `object`: it maps a file instead of
//! reading it, sorts a symbol table only when asked for the first address in it, parses only those DWARF units that
//! an address lies in, and finds separate debug files by build id. What PyTorch ships has symbol tables and no DWARF.

use gputrace_schemas::event::{Module, ModuleId};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Longest name that is kept: C++ templates of CUDA kernels can be megabytes long.
const MOST_NAME: usize = 2048;

/// A function at an address.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Line {
    pub(crate) function: String,
    pub(crate) file: String,
    pub(crate) line: u32,
}

/// An address, the module it lies in, and its functions, innermost first: all but the last were inlined.
pub(crate) type Resolved = (u64, Option<ModuleId>, Vec<Line>);

/// Where files are looked for, and for how long.
pub(crate) struct Symbols {
    deadline: Instant,
    /// `/proc/PID` while the process lives.
    process: Option<PathBuf>,
}

impl Symbols {
    pub(crate) fn new(deadline: Instant, process: Option<PathBuf>) -> Symbols {
        Symbols { deadline, process }
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
            if Instant::now() >= self.deadline {
                break;
            }
            let module = id.and_then(|id| modules.get(id.0 as usize));
            let loader = module.and_then(|module| self.load(module));
            for address in addresses {
                if Instant::now() >= self.deadline {
                    break;
                }
                let lines = match (&loader, module) {
                    (Some(loader), Some(module)) => {
                        let base = loader.relative_address_base();
                        let probe = address.wrapping_sub(1).wrapping_sub(module.bias).wrapping_add(base);
                        lines_at(loader, probe)
                    }
                    _ => vec![Line::default()],
                };
                resolved.push((address, id, lines));
            }
        }
        resolved
    }

    /// The module's own file: as the process sees it, which may live in another root; as it is mapped, which a deleted
    /// file still is; or as we see it. What has another build id came to its path later.
    fn load(&self, module: &Module) -> Option<addr2line::Loader> {
        let inside =
            self.process.as_ref().map(|it| it.join("root").join(module.path.trim_start_matches('/')));
        let mapped = self.process.as_ref().and_then(|process| mapped_file(process, module.start));
        let files = [inside, mapped, Some(PathBuf::from(&module.path))];
        files.into_iter().flatten().find_map(|file| {
            let is_same = module.build_id.is_empty() || build_id(&file).as_ref() == Some(&module.build_id);
            if is_same { addr2line::Loader::new(file).ok() } else { None }
        })
    }
}

/// The link to the file whose mapping begins at `start` (proc(5), `map_files`; for the privileged).
pub(crate) fn mapped_file(process: &Path, start: u64) -> Option<PathBuf> {
    let begin = format!("{start:x}-");
    let mut links = std::fs::read_dir(process.join("map_files")).ok()?.flatten();
    Some(links.find(|link| link.file_name().to_string_lossy().starts_with(&begin))?.path())
}

fn build_id(file: &Path) -> Option<String> {
    let mut module = Module::default();
    crate::process::read_module(&mut module, std::fs::File::open(file).ok()?);
    Some(module.build_id).filter(|id| !id.is_empty())
}

/// Never empty.
fn lines_at(loader: &addr2line::Loader, probe: u64) -> Vec<Line> {
    let mut lines = Vec::new();
    if let Ok(mut frames) = loader.find_frames(probe) {
        while let Ok(Some(frame)) = frames.next() {
            let function = frame.function.as_ref().and_then(|function| function.raw_name().ok());
            let location = frame.location.as_ref();
            lines.push(Line {
                function: function.map(|name| demangle(&name)).unwrap_or_default(),
                file: location.and_then(|location| location.file).unwrap_or_default().to_owned(),
                line: location.and_then(|location| location.line).unwrap_or_default(),
            });
        }
    }
    if lines.is_empty() {
        lines.push(Line::default());
    }
    if let Some(last) = lines.last_mut()
        && last.function.is_empty()
    {
        last.function = loader.find_symbol(probe).map(demangle).unwrap_or_default();
    }
    lines
}

/// A C++ or Rust name as its source has it; any other as it is.
pub(crate) fn demangle(name: &str) -> String {
    let name = name.split('@').next().unwrap_or(name);
    let mut readable = if let Ok(rust) = rustc_demangle::try_demangle(name) {
        format!("{rust:#}")
    } else if name.starts_with("_Z") && name.len() <= MOST_NAME {
        cpp_demangle::Symbol::new(name)
            .ok()
            .and_then(|symbol| symbol.demangle().ok())
            .unwrap_or_else(|| name.to_owned())
    } else {
        name.to_owned()
    };
    if readable.len() > MOST_NAME {
        let end = (0..=MOST_NAME).rev().find(|at| readable.is_char_boundary(*at)).unwrap_or(0);
        readable.truncate(end);
        readable.push('…');
    }
    readable
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::{Target, read_module};
    use std::time::Duration;

    #[test]
    fn names_are_readable() {
        assert_eq!(
            demangle("_ZN3c104cuda20CUDACachingAllocator3getEv"),
            "c10::cuda::CUDACachingAllocator::get()"
        );
        assert_eq!(demangle("_ZN4core3fmt5write17h0123456789abcdefE"), "core::fmt::write");
        assert_eq!(demangle("cuMemAlloc_v2"), "cuMemAlloc_v2");
        assert_eq!(demangle("malloc@@GLIBC_2.2.5"), "malloc");
    }

    #[inline(never)]
    fn a_function_of_ours() -> u64 {
        std::hint::black_box(1)
    }

    #[test]
    fn an_address_of_ours_is_found_with_its_file() {
        let target = Target::new(std::process::id(), 0);
        let mut modules = target.address_space(0).expect("maps").modules;
        for module in &mut modules {
            if let Some(file) = target.open(module) {
                read_module(module, file);
            }
        }
        // As if a call in the first instructions returned there.
        let address = a_function_of_ours as *const () as u64 + 2;
        let module_at = |address| {
            let at = modules.iter().position(|module| (module.start..module.end).contains(&address))?;
            Some(ModuleId(at as u32))
        };
        let mut symbols = Symbols::new(Instant::now() + Duration::from_secs(60), None);
        let found = symbols.resolve(&[address, 16], &modules, module_at);
        assert_eq!(found[0], (16, None, vec![Line::default()]));
        let (_, _, lines) = &found[1];
        let last = lines.last().expect("one");
        assert!(last.function.ends_with("a_function_of_ours"), "{last:?}");
        assert!(last.file.ends_with("symbols.rs"), "{last:?}");
        let mut none = Symbols::new(Instant::now(), None);
        assert_eq!(none.resolve(&[address], &modules, module_at), [], "no time, no answer");
        a_function_of_ours();
    }

    #[test]
    fn what_came_to_a_path_later_and_has_another_build_id_is_not_asked() {
        let target = Target::new(std::process::id(), 0);
        let modules = target.address_space(0).expect("maps").modules;
        let libc = modules.iter().find(|module| module.path.contains("/libc.so")).expect("the C library");
        let mut libc = libc.clone();
        let file = target.open(&libc).expect("its file");
        read_module(&mut libc, file);
        assert!(!libc.build_id.is_empty());
        let symbols = Symbols::new(Instant::now(), None);
        assert!(symbols.load(&libc).is_some());
        libc.build_id = "00".repeat(20);
        assert!(symbols.load(&libc).is_none());
    }

    #[test]
    fn a_deleted_file_is_read_where_it_is_mapped() {
        let process = PathBuf::from(format!("/proc/{}", std::process::id()));
        if std::fs::read_dir(process.join("map_files")).is_err() {
            return; // Only the privileged may look.
        }
        let target = Target::new(std::process::id(), 0);
        let mut modules = target.address_space(0).expect("maps").modules;
        let libc = modules.iter_mut().find(|module| module.path.contains("/libc.so")).expect("the C library");
        let file = target.open(libc).expect("its file");
        read_module(libc, file);
        libc.path = "/deleted/libc.so.6".to_owned();
        assert!(Symbols::new(Instant::now(), None).load(libc).is_none(), "there is no such path");
        assert!(Symbols::new(Instant::now(), Some(process)).load(libc).is_some());
    }
}
