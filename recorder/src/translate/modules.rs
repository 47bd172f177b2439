//! Files that lie in the process's memory.

use crate::item::Item;
use gputrace_schemas::event::{Module, ModuleId};
use std::collections::HashSet;
use std::ops::Range;

/// They never go: addresses of stacks may lie in what was unmapped since.
#[derive(Default)]
pub(super) struct Modules {
    known: Vec<Module>,
    /// Where libgputrace.so lies.
    ours: Range<u64>,
    /// Addresses in CUDA runtimes, some of them of modules that are not known yet.
    runtimes: Vec<u64>,
}

impl Modules {
    /// Those that are not known yet.
    pub(super) fn unknown(&self, found: &[Module]) -> Vec<Module> {
        let known: HashSet<_> =
            self.known.iter().map(|module| (module.start, module.end, &module.path)).collect();
        let is_new = |module: &&Module| !known.contains(&(module.start, module.end, &module.path));
        found.iter().filter(is_new).cloned().collect()
    }

    pub(super) fn add(&mut self, found: Vec<Module>, items: &mut Vec<Item>) {
        for mut module in found {
            module.has_runtime = self.runtimes.iter().any(|address| contains(&module, *address));
            if module.path.ends_with("/libgputrace.so") {
                self.ours = module.start..module.end;
            }
            let id = ModuleId(self.known.len() as u32);
            items.push(Item::Module(id, module.clone()));
            self.known.push(module);
        }
    }

    /// The module at this address has a CUDA runtime.
    pub(super) fn runtime(&mut self, address: u64, items: &mut Vec<Item>) {
        self.runtimes.push(address);
        if let Some(id) = self.at(address)
            && let Some(module) = self.known.get_mut(id.0 as usize)
            && !module.has_runtime
        {
            module.has_runtime = true;
            items.push(Item::Module(id, module.clone()));
        }
    }

    /// All of them, by number.
    pub(super) fn all(&self) -> &[Module] {
        &self.known
    }

    /// The newest module with this address: what was unmapped before it does not count.
    pub(super) fn at(&self, address: u64) -> Option<ModuleId> {
        let at = self.known.iter().rposition(|module| contains(module, address))?;
        Some(ModuleId(at as u32))
    }

    /// Whether an address lies in our own library.
    pub(super) fn is_ours(&self, address: u64) -> bool {
        self.ours.contains(&address)
    }
}

fn contains(module: &Module, address: u64) -> bool {
    (module.start..module.end).contains(&address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(start: u64, path: &str) -> Module {
        Module { start, end: start + 0x1000, path: path.to_owned(), ..Module::default() }
    }

    #[test]
    fn of_two_modules_at_an_address_the_newer_counts() {
        let (mut modules, mut items) = (Modules::default(), Vec::new());
        modules.add(vec![module(0x1000, "/old.so"), module(0x1800, "/new.so")], &mut items);
        let at = [0x1400, 0x1900, 0x2900].map(|address| modules.at(address));
        assert_eq!(at, [Some(ModuleId(0)), Some(ModuleId(1)), None]);
        assert_eq!(modules.unknown(&[module(0x1000, "/old.so"), module(0x1000, "/other.so")]).len(), 1);
    }

    #[test]
    fn a_runtime_may_be_seen_before_its_module_and_after() {
        let (mut modules, mut items) = (Modules::default(), Vec::new());
        modules.runtime(0x1010, &mut items);
        modules.add(vec![module(0x1000, "/a.so"), module(0x4000, "/b.so")], &mut items);
        modules.runtime(0x4010, &mut items);
        modules.runtime(0x4020, &mut items);
        let written = items.iter().filter_map(|item| match item {
            Item::Module(id, module) => Some((id.0, module.has_runtime)),
            _ => None,
        });
        assert_eq!(written.collect::<Vec<_>>(), [(0, true), (1, false), (1, true)]);
    }
}
