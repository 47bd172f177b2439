//! What lies inside of what the driver handed out, beside PyTorch's blocks: PyTorch's private pools, and buffers of JAX.

use std::collections::BTreeMap;

use gputrace_schemas::event::{Bytes, Pjrt, PjrtAction, PjrtOrigin};
use rustc_hash::{FxHashMap, FxHashSet};
use serde::Serialize;

use super::cut;
use super::shapes::Rectangle;
use super::watch::Holder;
use gputrace_analyse::live::Level;
use gputrace_trace::ledger::pools::{Pool, PoolId};
use gputrace_trace::ledger::{Buffer, Ledger, Object, OwnerId};
use gputrace_trace::owners::JAX;

/// What a place is called that is not known.
const NOWHERE: &str = "(no stack recorded)";
/// Most places of captures that a pool is described with.
const MOST_PLACES: usize = 3;

/// Private pools, and what of each is in segments and in blocks.
#[derive(Debug, Default)]
pub(super) struct Pools {
    known: Vec<(i16, PoolId)>,
    numbers: FxHashMap<(i16, PoolId), u16>,
    /// Segments whose pool is known, by where they begin.
    segments: FxHashMap<(i16, u64), u16>,
    amounts: BTreeMap<(i16, u16), Amounts>,
}

/// A pool in words, and the lines at which graphs were captured into it.
#[derive(Serialize)]
pub(super) struct Described {
    device: i16,
    id: String,
    what: String,
    places: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Amounts {
    reserved: u64,
    in_blocks: u64,
}

impl Pools {
    pub(super) fn clear(&mut self) {
        *self = Pools::default();
    }

    /// From 1. Pools beyond 65,535 are not told apart from the default one.
    pub(super) fn number(&mut self, device: i16, id: PoolId) -> u16 {
        if let Some(known) = self.numbers.get(&(device, id)) {
            return *known;
        }
        let Ok(number) = u16::try_from(self.known.len() + 1) else { return 0 };
        self.known.push((device, id));
        self.numbers.insert((device, id), number);
        number
    }

    /// Whether it was not known yet that the segment which begins there is of this pool.
    pub(super) fn is_new(&mut self, device: i16, start: u64, pool: u16) -> bool {
        self.segments.insert((device, start), pool) != Some(pool)
    }

    pub(super) fn reserves(&mut self, device: i16, pool: u16, bytes: u64) {
        if pool > 0 && bytes > 0 {
            self.amounts.entry((device, pool)).or_default().reserved += bytes;
        }
    }

    pub(super) fn gains(&mut self, device: i16, pool: u16, bytes: Bytes) {
        if pool > 0 {
            self.amounts.entry((device, pool)).or_default().in_blocks += bytes.0;
        }
    }

    pub(super) fn loses(&mut self, device: i16, pool: u16, bytes: Bytes) {
        if let Some(amounts) = self.amounts.get_mut(&(device, pool)) {
            amounts.in_blocks = amounts.in_blocks.saturating_sub(bytes.0);
        }
    }

    /// A segment, or pages of one, are gone.
    pub(super) fn gives_back(&mut self, device: i16, ended: &Rectangle) {
        self.segments.remove(&(device, ended.addr));
        let Ok(pool) = u16::try_from(ended.what >> 2) else { return };
        let Some(amounts) = self.amounts.get_mut(&(device, pool)) else { return };
        amounts.reserved = amounts.reserved.saturating_sub(ended.bytes.0);
        if amounts.reserved == 0 {
            self.amounts.remove(&(device, pool));
        }
    }

    /// Whether some memory of a device is in a private pool.
    pub(super) fn has_any(&self, device: i16) -> bool {
        self.amounts.range((device, 0)..=(device, u16::MAX)).next().is_some()
    }

    /// All that is unused of a device, by pool.
    pub(super) fn unused(&self, device: i16, all: u64) -> BTreeMap<u16, u64> {
        let (mut parts, mut left) = (BTreeMap::new(), all);
        for ((_, pool), amounts) in self.amounts.range((device, 0)..=(device, u16::MAX)) {
            // At its end, a process loses segments before blocks.
            let unused = amounts.reserved.saturating_sub(amounts.in_blocks).min(left);
            left -= unused;
            parts.insert(*pool, unused);
        }
        parts.insert(0, left);
        parts.retain(|_, unused| *unused > 0);
        parts
    }

    /// Each in words, and the lines at which graphs were captured into it.
    pub(super) fn described(&self, ledger: &Ledger) -> Vec<Described> {
        let one = |key: &(i16, PoolId)| {
            let pool = ledger.torch_pools.pools.get(key);
            let (graph, user) = key.1;
            let (what, places) = pool.map_or_else(Default::default, |pool| words(ledger, pool, graph > 0));
            Described { device: key.0, id: format!("({graph}, {user})"), what, places }
        };
        self.known.iter().map(one).collect()
    }
}

/// What a pool is for, and the places where that is known from.
fn words(ledger: &Ledger, pool: &Pool, is_of_graphs: bool) -> (String, Vec<String>) {
    let mut sites = vec![];
    for graph in &pool.graphs {
        if !sites.contains(&graph.site) {
            sites.push(graph.site);
        }
    }
    let mut name = match pool.graphs.len() {
        // Snapshots do not say more.
        0 if is_of_graphs => "CUDA graphs".to_owned(),
        0 => "MemPool".to_owned(),
        1 => "1 graph".to_owned(),
        n => format!("{n} graphs"),
    };
    if pool.is_abandoned() {
        name.push_str(", abandoned");
    }
    if sites.is_empty() {
        sites.push(pool.site);
    }
    let place = |site: &_| cut(&ledger.sites.site_name(*site));
    let mut places: Vec<String> = sites.iter().take(MOST_PLACES).map(place).collect();
    places.retain(|place| !place.is_empty() && place != NOWHERE);
    if sites.len() > MOST_PLACES {
        places.push(format!("{} more lines", sites.len() - MOST_PLACES));
    }
    (name, places)
}

/// Buffers of JAX, and what its allocator took from the driver.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    /// Devices on which both were seen, and who JAX is there.
    owners: BTreeMap<i16, OwnerId>,
    live: FxHashMap<u64, (i16, Holder, Bytes)>,
    devices: BTreeMap<i16, Arena>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Arena {
    taken: i64,
    in_buffers: i64,
    /// What was last said to be in no buffer.
    said: i64,
}

impl Buffers {
    /// Of a trace whose books are these at its end.
    pub(super) fn of(ledger: &Ledger) -> Buffers {
        let owner = |(device, books): (&i16, &gputrace_trace::ledger::DeviceBooks)| {
            books.pjrt.as_ref()?;
            let jax = books.physical.owners().find(|part| ledger.sites.owner(part.id) == JAX)?;
            Some((*device, jax.id))
        };
        Buffers { owners: ledger.devices().iter().filter_map(owner).collect(), ..Buffers::default() }
    }

    pub(super) fn clear(&mut self) {
        self.live.clear();
        self.devices.clear();
    }

    /// Whether the driver handed this out to JAX's allocator.
    pub(super) fn is_arena(&self, object: &Object) -> bool {
        self.owners.get(&object.device) == Some(&object.owner)
    }

    pub(super) fn arena(&mut self, device: i16, bytes: i64) {
        self.devices.entry(device).or_default().taken += bytes;
    }

    /// Bytes in buffers.
    pub(super) fn held(&self, device: i16) -> u64 {
        self.devices.get(&device).map_or(0, |arena| arena.in_buffers.max(0) as u64)
    }

    /// What an event made of the buffers: whose, and how much more.
    pub(super) fn event(&mut self, ledger: &Ledger, pjrt: &Pjrt) -> Vec<(i16, Holder, i64)> {
        let mut changes = vec![];
        let gone: FxHashSet<u64> = match pjrt.action {
            PjrtAction::Made | PjrtAction::Destroyed | PjrtAction::Deleted | PjrtAction::Donated => {
                [pjrt.buffer].into_iter().collect()
            }
            // All of a client, or the results that an execution did not make.
            PjrtAction::ClientGone | PjrtAction::Failed => {
                self.live.keys().copied().filter(|address| ledger.buffer(*address).is_none()).collect()
            }
            PjrtAction::Executed | PjrtAction::Unloaded => return changes,
        };
        for (device, holder, bytes) in gone.iter().filter_map(|address| self.live.remove(address)) {
            self.devices.entry(device).or_default().in_buffers -= bytes.0 as i64;
            changes.push((device, holder, -(bytes.0 as i64)));
        }
        let made = ledger.buffer(pjrt.buffer).filter(|_| pjrt.action == PjrtAction::Made);
        if let Some((buffer, owner)) = made.and_then(|it| Some((it, *self.owners.get(&it.device)?))) {
            let holder = held_by(buffer, owner);
            self.live.insert(pjrt.buffer, (buffer.device, holder, buffer.bytes));
            self.devices.entry(buffer.device).or_default().in_buffers += buffer.bytes.0 as i64;
            changes.push((buffer.device, holder, buffer.bytes.0 as i64));
        }
        changes
    }

    /// What is in no buffer, where that has changed: how much more it is, and how many more objects. It is below zero while
    /// results are there whose execution has no memory.
    pub(super) fn changed(&mut self) -> Vec<(i16, OwnerId, i64, i32)> {
        let mut changed = vec![];
        for (device, arena) in &mut self.devices {
            let now = arena.taken - arena.in_buffers;
            let before = std::mem::replace(&mut arena.said, now);
            if let Some(owner) = self.owners.get(device).filter(|_| now != before) {
                changed.push((*device, *owner, now - before, i32::from(now != 0) - i32::from(before != 0)));
            }
        }
        changed
    }
}

fn held_by(buffer: &Buffer, owner: OwnerId) -> Holder {
    let kind = match buffer.origin {
        PjrtOrigin::FromHost | PjrtOrigin::Transfer => "JAX's buffers from the host",
        PjrtOrigin::Execute => "JAX's results of executions",
        PjrtOrigin::Copy => "JAX's copies",
        PjrtOrigin::Uninitialized => "JAX's buffers, uninitialized",
        PjrtOrigin::View | PjrtOrigin::Dependency | PjrtOrigin::Compile | PjrtOrigin::Unknown => {
            "JAX's buffers, otherwise"
        }
    };
    let (site, stack) = (buffer.site, buffer.stack);
    Holder { level: Level::Buffer, owner, site, stack, stream: None, role: 0, pool: 0, layer: 0, kind }
}
