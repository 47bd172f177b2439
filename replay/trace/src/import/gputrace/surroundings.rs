//! The process's address space around what is replayed: the driver's addresses depend on it.

use gputrace_schemas::event::Mapping;
use gputrace_sim::ops::Nearby;

use super::Importer;

/// The gap below everything that the kernel maps from the top down is wider than this.
const WIDE: u64 = 1 << 40;
/// Nothing of the process's own is above this (x86-64).
const KERNEL: u64 = 1 << 63;

impl Importer<'_> {
    /// The process's address space as it was read now.
    pub(super) fn mappings(&mut self, mut mapped: Vec<Mapping>) {
        // The kernel's page for old system calls.
        mapped.retain(|mapping| mapping.start < KERNEL);
        let mapped = without(&mapped, &self.survey.reserved);
        let is_first = self.mapped.is_empty();
        let gone = without(&self.mapped, &mapped);
        let new = without(&mapped, &self.mapped);
        let widest = mapped.windows(2).rev().find(|pair| pair[1].start - pair[0].end >= WIDE);
        let ceiling = widest.map(|pair| pair[1].start);
        for device in self.devices.values_mut() {
            if is_first {
                let Some(ceiling) = ceiling else { continue };
                device.builder.stream_mut().surroundings.get_or_insert_default().ceiling = ceiling;
            }
            if device.builder.stream_mut().surroundings.is_none() {
                continue;
            }
            for Mapping { start, end } in &gone {
                device.builder.nearby(Nearby::Unmapped { start: *start, end: *end });
            }
            for Mapping { start, end } in &new {
                device.builder.nearby(Nearby::Mapped { start: *start, end: *end });
            }
        }
        self.mapped = mapped;
    }

    /// Memory that PyTorch's allocator on `device` has no part in.
    pub(super) fn nearby(&mut self, device: i16, what: Nearby) {
        if let Some(device) = self.devices.get_mut(&device)
            && device.builder.stream_mut().surroundings.is_some()
        {
            device.builder.nearby(what);
        }
    }
}

/// The parts of `these` that no part of `others` covers, joined and ascending. Both may overlap and be in any order.
pub(super) fn without(these: &[Mapping], others: &[Mapping]) -> Vec<Mapping> {
    let mut edges: Vec<(u64, i32, i32)> = Vec::with_capacity(2 * (these.len() + others.len()));
    edges.extend(these.iter().flat_map(|it| [(it.start, 1, 0), (it.end, -1, 0)]));
    edges.extend(others.iter().flat_map(|it| [(it.start, 0, 1), (it.end, 0, -1)]));
    edges.sort_unstable_by_key(|(at, ..)| *at);
    let (mut n_these, mut n_others) = (0, 0);
    let mut left: Vec<Mapping> = Vec::new();
    let mut since = None;
    for (index, (at, of_these, of_others)) in edges.iter().enumerate() {
        n_these += of_these;
        n_others += of_others;
        if edges.get(index + 1).is_some_and(|(next, ..)| next == at) {
            continue;
        }
        match (since, n_these > 0 && n_others == 0) {
            (None, true) => since = Some(*at),
            (Some(start), false) => {
                left.push(Mapping { start, end: *at });
                since = None;
            }
            (None, false) | (Some(_), true) => {}
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_mapped_without_others_is_what_is_left_of_it() {
        let map = |ranges: &[(u64, u64)]| -> Vec<Mapping> {
            ranges.iter().map(|(start, end)| Mapping { start: *start, end: *end }).collect()
        };
        assert_eq!(
            without(&map(&[(0, 10), (20, 30)]), &map(&[(5, 22), (25, 26)])),
            map(&[(0, 5), (22, 25), (26, 30)])
        );
        assert_eq!(without(&map(&[(0, 10), (10, 12)]), &[]), map(&[(0, 12)]));
        assert_eq!(without(&[], &map(&[(1, 2)])), []);
    }
}
