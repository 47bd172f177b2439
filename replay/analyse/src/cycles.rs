//! Memory that waited for Python's collector of reference cycles.
//!
//! Measured: that the collector ran when a block was taken back, how long the block had been held, and when its thread was
//! next seen outside of the call that asked for the block. Guessed: that nobody used it from then on.

use std::cmp::Reverse;

use gputrace_schemas::event::{Bytes, Frame, Nanos, StackId};
use rustc_hash::FxHashMap;

use crate::lives::{Life, Lives};
use gputrace_trace::Definitions;
use gputrace_trace::ledger::SiteId;

/// C functions that end an object of a type when the collector breaks a cycle (`tp_clear`; CPython 3.9 to 3.14).
#[rustfmt::skip]
const CLEARED: &[(&str, &str)] = &[
    ("subtype_clear", "instance of a Python class"), ("dict_tp_clear", "dict"), ("PyDict_Clear", "dict"), ("list_clear", "list"), ("_list_clear", "list"), ("list_tp_clear", "list"),
    ("set_clear_internal", "set"), ("cell_clear", "cell of a closure"), ("func_clear", "function"), ("frame_tp_clear", "frame"), ("frame_clear", "frame"),
    ("tb_clear", "traceback"), ("BaseException_clear", "exception"), ("method_clear", "method"), ("gen_clear", "generator"), ("partial_clear", "functools.partial"),
    ("deque_clear", "deque"), ("THPVariable_clear", "torch.Tensor"), ("THPVariable_subclass_clear", "torch.Tensor"), ("THPFunction_clear", "torch.autograd.Function"), ("module_clear", "module"),
];
/// C functions that are the collector (Modules/gcmodule.c, Python/gc.c).
const COLLECTOR: &[&str] = &[
    "delete_garbage",
    "gc_collect_main",
    "gc_collect_generations",
    "gc_collect_region",
    "gc_collect_full",
    "_PyGC_Collect",
    "gc_collect_young",
    "gc_collect_increment",
];

/// All of it.
#[derive(Clone, Debug, Default)]
pub struct Cycles {
    /// All bytes that the collector freed.
    pub bytes: Bytes,
    /// In how many blocks.
    pub blocks: u64,
    /// The most that was held at one moment by blocks that were left to the collector.
    pub peak: Bytes,
    /// Collections that freed any.
    pub collections: u64,
    /// The largest blocks that it freed.
    spans: Vec<Span>,
    /// Threads that freed memory meanwhile: more than one means that some of it was not a collector's.
    pub n_threads: usize,
    /// By call site, most first.
    pub sites: Vec<CycleSite>,
}

/// Blocks that are kept to say what was held at a moment.
const MOST_SPANS: usize = 1 << 16;

/// When a block was held that the collector freed.
#[derive(Clone, Copy, Debug)]
struct Span {
    device: i16,
    since: Nanos,
    until: Nanos,
    bytes: Bytes,
}

/// What one call site left to the collector.
#[derive(Clone, Debug)]
pub struct CycleSite {
    /// Which, by device.
    pub device: i16,
    /// The call site of the request.
    pub site: SiteId,
    /// All of it.
    pub bytes: Bytes,
    /// Blocks.
    pub blocks: u64,
    /// Longest time that one was held.
    pub held_for: Nanos,
    /// What the collector was ending, where the native frames say so: the one that held most.
    pub kind: Option<&'static str>,
}

/// Bytes by what was being collected.
type KindBytes = FxHashMap<&'static str, u64>;

impl Cycles {
    /// What the collector ended, by call site.
    #[must_use]
    pub fn of(lives: &Lives, definitions: &dyn Definitions) -> Cycles {
        let mut cycles = Cycles::default();
        let mut threads = vec![];
        let mut sites: FxHashMap<(i16, SiteId), (CycleSite, KindBytes)> = FxHashMap::default();
        let mut kinds: FxHashMap<StackId, Option<&'static str>> = FxHashMap::default();
        let mut last: Option<&Life> = None;
        for collected in &lives.collected {
            let Some(life) = lives.list.get(collected.life as usize) else { continue };
            cycles.bytes.0 += life.bytes.0;
            cycles.blocks += 1;
            // Between two collections the program asks for memory, or time passes.
            let is_same = last.is_some_and(|last| is_one_collection(last, life));
            cycles.collections += u64::from(!is_same);
            last = Some(life);
            if !threads.contains(&collected.thread) {
                threads.push(collected.thread);
            }
            let (row, by_kind) = sites.entry((life.device, life.site)).or_insert_with(|| {
                let (device, site) = (life.device, life.site);
                let row =
                    CycleSite { device, site, bytes: Bytes(0), blocks: 0, held_for: Nanos(0), kind: None };
                (row, FxHashMap::default())
            });
            row.bytes.0 += life.bytes.0;
            row.blocks += 1;
            row.held_for = row.held_for.max(life.duration());
            let kind = *kinds.entry(collected.stack).or_insert_with(|| kind(definitions, collected.stack));
            if let Some(kind) = kind {
                *by_kind.entry(kind).or_default() += life.bytes.0;
            }
        }
        cycles.n_threads = threads.len();
        cycles.peak = peak(lives);
        let own = lives.collected.iter().filter_map(|it| lives.list.get(it.life as usize));
        cycles.spans = own
            .map(|life| Span { device: life.device, since: life.since, until: life.until, bytes: life.bytes })
            .collect();
        cycles.spans.sort_by_key(|span| Reverse(span.bytes));
        cycles.spans.truncate(MOST_SPANS);
        cycles.sites = sites
            .into_values()
            .map(|(row, by_kind)| CycleSite {
                kind: by_kind.into_iter().max_by_key(|(kind, bytes)| (*bytes, Reverse(*kind))).map(|it| it.0),
                ..row
            })
            .collect();
        cycles.sites.sort_by_key(|row| (Reverse(row.bytes), row.device, row.site));
        cycles
    }
}

impl Cycles {
    /// What a device held at a moment and the collector freed later.
    #[must_use]
    pub fn held_at(&self, device: i16, time: Nanos) -> Bytes {
        let held = |span: &&Span| span.device == device && span.since <= time && time < span.until;
        Bytes(self.spans.iter().filter(held).map(|span| span.bytes.0).sum())
    }
}

/// Collections end blocks one after the other, within moments.
fn is_one_collection(before: &Life, after: &Life) -> bool {
    /// Longer than the end of a block, shorter than the time between collections.
    const MOMENT: u64 = 5_000_000;
    after.died == before.died + 1 || after.until.0.saturating_sub(before.until.0) < MOMENT
}

/// The most that blocks held together which the collector gave back.
fn peak(lives: &Lives) -> Bytes {
    let own = lives.collected.iter().filter_map(|it| lives.list.get(it.life as usize));
    let mut changes: Vec<(u32, i64)> = own
        .flat_map(|life| [(life.born, life.bytes.0 as i64), (life.died, -(life.bytes.0 as i64))])
        .collect();
    changes.sort_unstable();
    let (mut held, mut most) = (0i64, 0i64);
    for (_, change) in changes {
        held += change;
        most = most.max(held);
    }
    Bytes(most as u64)
}

/// What the collector was ending: the C function nearest to it on the inside.
fn kind(definitions: &dyn Definitions, stack: StackId) -> Option<&'static str> {
    let mut inside = None;
    for id in &definitions.stack(stack)?.frames {
        let Some(Frame::Native { function, .. }) = definitions.frame(*id) else { continue };
        let name =
            function.split(".constprop").next().unwrap_or(function).split(".part").next().unwrap_or(function);
        if COLLECTOR.contains(&name) {
            return inside;
        }
        if let Some((_, kind)) = CLEARED.iter().find(|(cleared, _)| *cleared == name) {
            inside = Some(*kind);
        }
    }
    None
}
