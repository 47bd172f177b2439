//! The part of a device's memory that the replayed allocator had nothing to do with, op by op: other libraries, contexts, code.

use std::collections::BTreeMap;

use gputrace_schemas::event::{Event, EventKind, Nanos};
use gputrace_sim::ops::{OtherChange, Others};
use rustc_hash::FxHashMap;

use crate::ledger::{Cause, Ledger, MemoryKind, OwnerId, Sampled, Step};

/// The unexplained part of the driver's figures.
pub const UNACCOUNTED: &str = "unaccounted";
/// What the driver's pages hold beyond what was asked for.
const ROUNDING: &str = "page rounding";

/// What everything but the replayed allocator holds.
#[derive(Default)]
pub(super) struct Bystanders {
    held: FxHashMap<(i16, Holder), u64>,
    changes: BTreeMap<i16, Vec<(u32, Holder, u64)>>,
    /// Device, time and number of ops of each sample of the driver's figures.
    samples: BTreeMap<(i16, Nanos), u32>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Holder {
    Owner(OwnerId),
    Rounding,
    Graphs,
    Cause(Cause),
    Unaccounted,
}

impl Bystanders {
    /// A call or a sample has been booked. `at` gives the number of ops of a device so far, and whether its requests are PyTorch's;
    /// where they are not, what the driver was asked is what is replayed.
    pub(super) fn event(&mut self, ledger: &Ledger, event: &Event, at: impl Fn(i16) -> (u32, bool)) {
        if let EventKind::Sample(sample) = &event.kind {
            self.samples.insert((sample.device, event.time), at(sample.device).0);
        }
        let mut concerned = Vec::new();
        for step in ledger.steps() {
            let (object, is_gain) = match step {
                Step::Gained(object) => (object, true),
                Step::Lost(object) => (object, false),
                _ => continue,
            };
            let (n_ops, has_torch) = at(object.device);
            let is_replayed = if has_torch { object.torch } else { object.kind != MemoryKind::Array };
            if !object.kind.is_physical() || is_replayed || object.device < 0 {
                continue;
            }
            let holder = Holder::Owner(object.owner);
            let held = self.held.entry((object.device, holder)).or_default();
            *held = match is_gain {
                true => held.saturating_add(object.bytes.0),
                false => held.saturating_sub(object.bytes.0),
            };
            self.changes.entry(object.device).or_default().push((n_ops, holder, *held));
            concerned.push(object.device);
        }
        if let EventKind::Call(call) = &event.kind {
            concerned.push(call.device);
        }
        concerned.dedup();
        for device in concerned.into_iter().filter(|device| *device >= 0) {
            let Some(books) = ledger.devices().get(&device) else { continue };
            let (n_ops, has_torch) = at(device);
            let rounding = if has_torch { books.pages.rounding().0 } else { 0 };
            for (holder, bytes) in [(Holder::Rounding, rounding), (Holder::Graphs, books.graphs_kept.now.0)] {
                let held = self.held.entry((device, holder)).or_default();
                if *held != bytes {
                    *held = bytes;
                    self.changes.entry(device).or_default().push((n_ops, holder, bytes));
                }
            }
        }
    }

    /// What was found of each device.
    pub(super) fn finish(mut self, ledger: &Ledger) -> BTreeMap<i16, Others> {
        let mut all = BTreeMap::new();
        for (device, books) in ledger.devices() {
            let mut changes = self.changes.remove(device).unwrap_or_default();
            let charged = |sampled: &&Sampled| sampled.process_used.is_some_and(|used| used.0 > 0);
            let is_charge_known = books.samples.kept.iter().any(|sampled| charged(&sampled));
            for sampled in books.samples.kept.iter().filter(charged) {
                let Some(n_ops) = self.samples.get(&(*device, sampled.time)).copied() else { continue };
                for cause in Cause::ALL {
                    changes.push((n_ops, Holder::Cause(cause), sampled.of(cause).0));
                }
                let unaccounted = u64::try_from(sampled.unaccounted().unwrap_or(0)).unwrap_or(0);
                changes.push((n_ops, Holder::Unaccounted, unaccounted));
            }
            changes.sort_by_key(|(before_op, ..)| *before_op);
            let mut others = Others { is_charge_known, ..Others::default() };
            let mut names: BTreeMap<Holder, u32> = BTreeMap::new();
            for (before_op, holder, bytes) in changes {
                let name = *names.entry(holder).or_insert_with(|| {
                    others.names.push(name(ledger, holder));
                    others.names.len() as u32 - 1
                });
                others.changes.push(OtherChange { before_op, name, bytes });
            }
            all.insert(*device, others);
        }
        all
    }
}

fn name(ledger: &Ledger, holder: Holder) -> String {
    match holder {
        Holder::Owner(owner) => ledger.sites.owner(owner).to_owned(),
        Holder::Rounding => ROUNDING.to_owned(),
        Holder::Graphs => "CUDA graphs".to_owned(),
        Holder::Cause(cause) => cause.name().to_owned(),
        Holder::Unaccounted => UNACCOUNTED.to_owned(),
    }
}
