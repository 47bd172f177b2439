//! Addresses to functions and lines, after the fact and from the files.
//!
//! `addr2line`'s loader was chosen over `symbolic` and over our own reading with `object`: it maps a file instead of
//! reading it, sorts a symbol table only when asked for the first address in it, parses only those DWARF units that
//! an address lies in, and finds separate debug files by build id. What PyTorch ships has symbol tables and no DWARF.

use gputrace_schemas::event::{Module, ModuleId};
use std::collections::BTreeMap;
use std::path::PathBuf;
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
    /// `/proc/PID/root` while the process lives.
    root: Option<PathBuf>,
}

impl Symbols {
    pub(crate) fn new(deadline: Instant, root: Option<PathBuf>) -> Symbols {
        Symbols { deadline, root }
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

    fn load(&self, module: &Module) -> Option<addr2line::Loader> {
        let inside = self.root.as_ref().map(|root| root.join(module.path.trim_start_matches('/')));
        inside
            .and_then(|path| addr2line::Loader::new(path).ok())
            .or_else(|| addr2line::Loader::new(&module.path).ok())
    }
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
}
