//! Private pools of PyTorch's allocator: what each holds, and the graphs that were captured into it.

use gputrace_schemas::event::Bytes;

use super::SectionEntry;
use crate::model::{Mood, Section, Table, Value};
use gputrace_analyse::story::Story;
use gputrace_trace::ledger::pools::{Pool, PoolId, why_abandoned};
use gputrace_trace::words::bytes;

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

fn build(story: &Story) -> Option<Section> {
    let pools = &story.ledger.torch_pools.pools;
    if pools.is_empty() {
        return None;
    }
    let mut section = Section::new("pools", "PyTorch's pools").table(table(story));
    let graphs = graphs(story);
    if !graphs.rows.is_empty() {
        section = section.table(graphs);
    }
    for (device, id, pool) in story.ledger.torch_pools.abandoned() {
        let why = why_abandoned(pool);
        let text = format!(
            "cuda:{device}: pool {} keeps {} that nothing can use: {why}, and it was not released",
            name(id),
            bytes(pool.reserved.now)
        );
        section = section.line(Mood::Warning, text);
    }
    Some(section.warn(story.caveats()))
}

/// `segment_pool_id`, as PyTorch writes it.
pub fn name((graph, user): PoolId) -> String {
    format!("({graph}, {user})")
}

/// Who uses a pool.
fn users(pool: &Pool) -> String {
    let graphs = match (pool.graphs.len(), pool.n_living()) {
        (0, _) => String::new(),
        (1, 1) => "1 graph".to_owned(),
        (made, living) if made == living => format!("{made} graphs"),
        (made, living) => format!("{living} of {made} graphs"),
    };
    let made = match pool.n_made {
        0 => "",
        _ => "MemPool",
    };
    match (graphs.is_empty(), made.is_empty(), pool.uses) {
        (_, _, 0) => "released".to_owned(),
        (true, true, _) => "in use".to_owned(),
        (true, false, _) => made.to_owned(),
        (false, true, _) => graphs,
        (false, false, _) => format!("{made}, {graphs}"),
    }
}

fn table(story: &Story) -> Table {
    let mut table = Table::new(
        "pools",
        &[
            ("device", "device"),
            ("pool", "pool"),
            ("users", "used by"),
            ("reserved_bytes", "reserved"),
            ("allocated_bytes", "allocated"),
            ("active_bytes", "active"),
            ("segments", "segments"),
            ("peak_reserved_bytes", "most reserved"),
            ("peak_allocated_bytes", "most allocated"),
            ("made_at", "first opened at"),
        ],
    );
    let pools = &story.ledger.torch_pools;
    let mut devices: Vec<i16> = pools.pools.keys().map(|(device, _)| *device).collect();
    devices.dedup();
    for device in devices {
        let of_device = || pools.pools.range((device, (0, 0))..=(device, (u64::MAX, u64::MAX)));
        let sum = |of: &dyn Fn(&Pool) -> Bytes| {
            of_device().fold(0_u64, |sum, (_, pool)| sum.saturating_add(of(pool).0))
        };
        if let Some(torch) = story.ledger.torch(device) {
            let rest = |all: Bytes, private: u64| Value::Bytes(Bytes(all.0.saturating_sub(private)));
            // What was given back since the last block is not in PyTorch's total.
            let reserved = torch.reserved.now;
            let active = Bytes(torch.allocated.now.0.saturating_add(torch.pending.0));
            table.rows.push(vec![
                Value::text(format!("cuda:{device}")),
                Value::text(name((0, 0))),
                Value::text("everything else"),
                rest(reserved, sum(&|pool| pool.reserved.now)),
                rest(torch.allocated.now, sum(&|pool| pool.allocated.now)),
                rest(active, sum(&|pool| pool.active.now)),
                Value::Missing,
                Value::Missing,
                Value::Missing,
                Value::Missing,
            ]);
        }
        for ((_, id), pool) in of_device() {
            table.rows.push(vec![
                Value::text(format!("cuda:{device}")),
                Value::text(name(*id)),
                Value::text(users(pool)),
                Value::Bytes(pool.reserved.now),
                Value::Bytes(pool.allocated.now),
                Value::Bytes(pool.active.now),
                Value::Count(pool.n_segments),
                Value::Bytes(pool.reserved.peak),
                Value::Bytes(pool.allocated.peak),
                Value::text(story.ledger.sites.site_name(pool.site)),
            ]);
        }
    }
    table
}

fn graphs(story: &Story) -> Table {
    let mut table = Table::new(
        "pool_graphs",
        &[
            ("graph", "graph"),
            ("device", "device"),
            ("pool", "pool"),
            ("state", "now"),
            ("reserved_bytes", "reserved for it"),
            ("shared_with", "shared in its pool"),
            ("captured_ns", "captured"),
            ("captured_at", "captured at"),
        ],
    );
    let pools = story.ledger.torch_pools.pools.iter();
    let mut graphs: Vec<_> =
        pools.flat_map(|(key, pool)| pool.graphs.iter().map(move |it| (it, key, pool))).collect();
    graphs.sort_by_key(|(graph, ..)| graph.number);
    for (graph, (device, id), pool) in graphs {
        table.rows.push(vec![
            Value::Count(graph.number),
            Value::text(format!("cuda:{device}")),
            Value::text(name(*id)),
            Value::text(graph.state.name()),
            Value::Bytes(graph.reserved),
            Value::Count(pool.graphs.len() as u64 - 1),
            Value::Time(story.since_start(graph.since)),
            Value::text(story.ledger.sites.site_name(graph.site)),
        ]);
    }
    table
}
