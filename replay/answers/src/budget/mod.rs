//! `gputrace budget`: what a server's memory goes to, in rows that add up to the driver's figure.

use std::collections::BTreeMap;

use gputrace_schemas::event::{Bytes, Nanos};
use rustc_hash::FxHashMap;
use serde::Serialize;

use super::Reply;
use super::whatif::Machine;
use gputrace_analyse::budget::{Bill, Budget, Budgets, Column, Figure, Item, Row, Thing};
use gputrace_report::model::{Mood, Part, Section, Table, Value};
use gputrace_report::sharing::Sharing;
use gputrace_report::{part, sections::device_name};
use gputrace_trace::import::Trace;
use gputrace_trace::ledger::SiteId;
use gputrace_trace::ledger::pools::{Pool, PoolId};
use gputrace_trace::words::{bytes, time};

mod settings;

use settings::{Course, Settings};

/// Lines that keep memory, at most.
const KEEPERS: usize = 10;
/// Graphs, at most.
const GRAPHS: usize = 30;

/// What a server's memory goes to: in each column the rows add up to `total_bytes`, the driver's figure.
#[derive(Serialize)]
#[serde(tag = "schema", rename = "gputrace.budget/1")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Answer {
    trace: Option<String>,
    pid: Option<u32>,
    rank: Option<u32>,
    doubts: Option<String>,
    devices: Vec<OfDevice>,
}

/// The budget of a device.
#[derive(Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct OfDevice {
    device: i16,
    name: Option<String>,
    card_bytes: Option<u64>,
    /// The UUID of the MIG instance that the device is.
    mig_instance: Option<String>,
    /// Whether the process ran under MPS there; null if it may have.
    mps_client: Option<bool>,
    mps_limit_bytes: Option<u64>,
    columns: Vec<OfMoment>,
    meanings: BTreeMap<&'static str, &'static str>,
    graphs: Vec<Graph>,
    between: Option<Between>,
    settings: Settings,
}

/// The rows at one moment.
#[derive(Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct OfMoment {
    name: String,
    why: String,
    time_ns: u64,
    rows: BTreeMap<&'static str, i64>,
    total_bytes: i64,
    #[cfg_attr(feature = "schemas", schemars(extend("enum" = ["nvml_process", "nvml_card", "handed_out"])))]
    figure: &'static str,
    sampled_ns: Option<u64>,
    is_sampled_then: bool,
    others_bytes: Option<i64>,
    free_bytes: Option<i64>,
}

/// What was held at both of two moments.
#[derive(Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct Between {
    before: OfMoment,
    after: OfMoment,
    kept: BTreeMap<&'static str, i64>,
    keepers: Vec<Keeper>,
}

/// A CUDA graph.
#[derive(Clone, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct Graph {
    graph: u64,
    pool: String,
    reserved_bytes: u64,
    /// What only it holds.
    own_bytes: Option<u64>,
    /// Other graphs of its pool.
    shared_with: usize,
    captured_at: String,
}

/// The answer about all devices of a trace. `trace` is the same as requests, or why it cannot be had.
#[must_use]
pub fn reply(
    budgets: &Budgets,
    trace: &Result<&Trace, String>,
    machine: Machine,
    utilizations: &[f64],
) -> Reply<Answer> {
    let (mut sections, mut devices) = (vec![], vec![]);
    for budget in &budgets.devices {
        let course = Course { budgets, budget, machine, utilizations };
        let settings = Settings::of(&course, trace);
        let graphs = graphs(budgets, budget);
        sections.push(table(budgets, budget));
        sections.extend(graphs_section(budgets, budget, &graphs));
        sections.extend(between(budgets, budget));
        sections.extend(settings.sections());
        devices.push(of_device(budgets, budget, graphs, settings));
    }
    if sections.is_empty() {
        let nothing = Section::new("budget", "Budget").line(Mood::Note, "no device memory was held");
        sections.push(nothing);
    }
    // What the file does not hold comes first.
    let Part { title, trace, pid, rank, sections, .. } = part(&budgets.story, sections);
    let answer = Answer { trace: trace.clone(), pid, rank, doubts: budgets.story.caveats(), devices };
    Reply { part: Part { title, trace, pid, rank, sections, ..Part::default() }, answer }
}

/// Keys of the columns; no more moments than these are shown.
const COLUMNS: [&str; 3] = ["first_bytes", "second_bytes", "third_bytes"];

fn table(budgets: &Budgets, budget: &Budget) -> Section {
    let story = &budgets.story;
    let mut names: Vec<(&'static str, &'static str)> = vec![("row", "what")];
    for (key, column) in COLUMNS.iter().zip(&budget.columns) {
        let title = ["ready", "peak", "end", "now"].into_iter().find(|name| *name == column.name);
        names.push((key, title.unwrap_or("then")));
    }
    let mut table = Table::new("rows", &names);
    let mut row = |name: &str, value: &dyn Fn(&Bill) -> Value| {
        let mut row = vec![Value::text(name)];
        row.extend(budget.columns.iter().map(|column| value(&column.bill)));
        table.rows.push(row);
    };
    for kind in shown(&budget.columns) {
        row(kind.name(), &|bill| amount(bill, kind));
    }
    row("= the process", &|bill| signed(bill.total));
    if budget.columns.iter().any(|column| column.bill.others.is_some_and(|others| others != 0)) {
        row("others, reserved", &|bill| bill.others.map_or(Value::Missing, signed));
    }
    row("free on the card", &|bill| bill.free.map_or(Value::Missing, signed));
    let title = format!("Budget of {}", device_name(story, budget.device));
    let mut section = Section::new("budget", title).table(table);
    for column in &budget.columns {
        let at = time(story.since_start(column.bill.time));
        section = section.line(Mood::Note, format!("{}, at {at}: {}", column.name, column.why));
    }
    section = section.lines(budget.columns.last().map(|column| figure(&column.bill)));
    let shared = Sharing::of(story, budget.device).sentences(&device_name(story, budget.device));
    section = section.lines(shared.into_iter().map(|text| (Mood::Note, text)));
    let carried: Vec<String> = budget.columns.iter().filter_map(|column| carried(budgets, column)).collect();
    if !carried.is_empty() {
        let text = format!(
            "NVML was not queried at these instants; the figure beyond allocated memory is from {}",
            carried.join(", ")
        );
        section = section.line(Mood::Note, text);
    }
    section.warn(story.caveats())
}

/// Rows that any of the columns has.
fn shown(columns: &[Column]) -> Vec<Row> {
    let is_shown = |row: &Row| {
        columns.iter().any(|column| column.bill.of(*row) != 0)
            || matches!(row, Row::Weights | Row::KvCache | Row::Activations | Row::Unaccounted)
    };
    Row::ALL.iter().copied().filter(is_shown).collect()
}

fn amount(bill: &Bill, row: Row) -> Value {
    let is_of_driver = matches!(row, Row::Context | Row::Code | Row::Unaccounted | Row::Driver);
    if is_of_driver && bill.figure == Figure::HandedOut {
        return Value::Missing;
    }
    signed(bill.of(row))
}

fn signed(bytes: i64) -> Value {
    match u64::try_from(bytes) {
        Ok(bytes) => Value::Bytes(Bytes(bytes)),
        Err(_) => Value::Difference(bytes),
    }
}

fn figure(bill: &Bill) -> (Mood, String) {
    match bill.figure {
        Figure::Process => (
            Mood::Note,
            "the rows add up to the memory that NVML charged to the process; context, code and driver reserves are estimates, and unaccounted is the signed remainder"
                .to_owned(),
        ),
        Figure::Card => (
            Mood::Warning,
            "NVML does not know the process: the rows add up to the memory in use on the whole card, and unaccounted includes the context, code and all other processes"
                .to_owned(),
        ),
        Figure::HandedOut => (
            Mood::Warning,
            "the trace has no figure from the driver: the rows add up to allocated memory; context and code are not known"
                .to_owned(),
        ),
    }
}

/// Where the driver's figure is of another instant than the column.
fn carried(budgets: &Budgets, column: &Column) -> Option<String> {
    let sampled = column.bill.sampled.filter(|_| !column.bill.is_sampled_then)?;
    Some(format!("{} ({})", time(budgets.story.since_start(sampled)), column.name))
}

/// What each graph holds, and shares.
fn graphs(budgets: &Budgets, budget: &Budget) -> Vec<Graph> {
    let ledger = &budgets.story.ledger;
    let column = budget.columns.first();
    let of_pool = |((_, (graph, user)), pool): (&(i16, PoolId), &Pool)| {
        let of = |it: &gputrace_trace::ledger::pools::Graph| Graph {
            graph: it.number,
            pool: format!("({graph}, {user})"),
            reserved_bytes: it.reserved.0,
            own_bytes: column.map(|column| own_bytes(budgets, column, it.since)),
            shared_with: pool.graphs.len() - 1,
            captured_at: ledger.sites.site_name(it.site),
        };
        pool.graphs.iter().map(of).collect::<Vec<_>>()
    };
    let pools = ledger.torch_pools.pools.iter().filter(|((device, _), _)| *device == budget.device);
    pools.flat_map(of_pool).collect()
}

fn graphs_section(budgets: &Budgets, budget: &Budget, graphs: &[Graph]) -> Option<Section> {
    let story = &budgets.story;
    let column = budget.columns.first()?;
    let mut graphs = graphs.to_vec();
    graphs.sort_by_key(|graph| graph.graph);
    let table = Table::of(
        "graphs",
        &graphs,
        &[
            ("graph", "graph", &|it| Value::Count(it.graph)),
            ("pool", "pool", &|it| Value::text(&*it.pool)),
            ("reserved_bytes", "pool grew", &|it| Value::Bytes(Bytes(it.reserved_bytes))),
            ("own_bytes", "only it holds", &|it| Value::bytes(it.own_bytes)),
            ("shared_with", "share pool", &|it| Value::Count(it.shared_with as u64)),
            ("captured_at", "captured at", &|it| Value::text(&*it.captured_at)),
        ],
    );
    if table.rows.is_empty() {
        return None;
    }
    let section = Section::new("graphs", format!("CUDA graphs of {}", device_name(story, budget.device)));
    let held: u64 = graphs.iter().filter_map(|it| it.own_bytes).sum();
    let reserved: u64 = story
        .ledger
        .torch_pools
        .pools
        .iter()
        .filter(|((device, _), pool)| *device == budget.device && !pool.graphs.is_empty())
        .map(|(_, pool): (_, &Pool)| pool.reserved.peak.0)
        .sum();
    let shared = reserved.saturating_sub(held);
    let text = format!(
        "at `{}`, blocks of single graphs are {}; at most {} more of their pools is shared: any graph of a pool may write there",
        column.name,
        bytes(Bytes(held)),
        bytes(Bytes(shared))
    );
    Some(section.table(table.keep(GRAPHS, 2)).line(Mood::Note, text))
}

/// Blocks held at a moment that were asked for while a graph was captured.
fn own_bytes(budgets: &Budgets, column: &Column, since: Nanos) -> u64 {
    let capture = budgets.course.captures.iter().find(|(begin, _)| *begin == since);
    let is_own = |item: &&Item| {
        item.pool.is_some() && capture.is_some_and(|(begin, end)| item.since >= *begin && item.since <= *end)
    };
    column.items.values().filter(is_own).map(|item| item.bytes).sum()
}

/// What is there at both of two moments, by row.
fn kept(before: &Column, after: &Column) -> FxHashMap<Row, u64> {
    let mut kept: FxHashMap<Row, u64> = FxHashMap::default();
    let both = before.items.iter().filter(|(thing, _)| after.items.contains_key(*thing));
    both.for_each(|(_, item)| *kept.entry(item.row).or_default() += item.bytes);
    kept
}

/// What of a row is there at both moments. Of what has no parts, that is the smaller of the two.
fn kept_of(row: Row, (before, after): (&Column, &Column), kept: &FxHashMap<Row, u64>) -> i64 {
    let least = before.bill.of(row).min(after.bill.of(row));
    match row {
        Row::Context
        | Row::Code
        | Row::Driver
        | Row::GraphExecs
        | Row::Stranded
        | Row::Cached
        | Row::Rounding
        | Row::Graphs
        | Row::Unaccounted => least,
        _ => kept.get(&row).map_or(0, |bytes| i64::try_from(*bytes).unwrap_or(i64::MAX)).min(least),
    }
}

/// A line whose memory was there at both moments.
#[derive(Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct Keeper {
    row: &'static str,
    #[serde(skip)]
    name: &'static str,
    kept_bytes: u64,
    objects: u64,
    /// The most free memory in one segment that a block of the line keeps from `empty_cache`.
    pinned_bytes: u64,
    call_site: String,
}

fn keepers(budgets: &Budgets, before: &Column, after: &Column) -> Vec<Keeper> {
    let mut lines: FxHashMap<(Row, SiteId), Keeper> = FxHashMap::default();
    let both = |(thing, _): &(&Thing, &Item)| before.items.contains_key(*thing);
    for (_, item) in after.items.iter().filter(both) {
        let keeper = lines.entry((item.row, item.site)).or_insert_with(|| Keeper {
            row: item.row.key(),
            name: item.row.name(),
            kept_bytes: 0,
            objects: 0,
            pinned_bytes: 0,
            call_site: budgets.story.ledger.sites.site_name(item.site),
        });
        keeper.kept_bytes = keeper.kept_bytes.saturating_add(item.bytes);
        keeper.objects += 1;
        keeper.pinned_bytes = keeper.pinned_bytes.max(item.pins);
    }
    let mut lines: Vec<_> = lines.into_iter().collect();
    lines.sort_by_key(|(place, it)| (std::cmp::Reverse(it.kept_bytes.max(it.pinned_bytes)), *place));
    lines.into_iter().map(|(_, keeper)| keeper).collect()
}

fn between(budgets: &Budgets, budget: &Budget) -> Option<Section> {
    let story = &budgets.story;
    let (before, after) = budget.between.as_ref()?;
    let held = kept(before, after);
    let columns = [before.clone(), after.clone()];
    let mut table = Table::new(
        "between",
        &[
            ("row", "what"),
            ("before_bytes", "before"),
            ("after_bytes", "after"),
            ("given_back_bytes", "freed"),
            ("kept_bytes", "kept"),
        ],
    );
    for row in shown(&columns) {
        let (old, new) = (before.bill.of(row), after.bill.of(row));
        let kept = kept_of(row, (before, after), &held);
        let missing = amount(&before.bill, row) == Value::Missing;
        let value = |bytes: i64| if missing { Value::Missing } else { signed(bytes) };
        table.rows.push(vec![
            Value::text(row.name()),
            value(old),
            value(new),
            value((old - kept).max(0)),
            value(kept),
        ]);
    }
    let total = |column: &Column| signed(column.bill.total);
    table.rows.push(vec![
        Value::text("= the process"),
        total(before),
        total(after),
        signed(before.bill.total - after.bill.total),
        Value::Missing,
    ]);
    let title = format!("Memory freed between {} and {}", before.name, after.name);
    let lines = Table::of(
        "keepers",
        &keepers(budgets, before, after),
        &[
            ("row", "what", &|it| Value::text(it.name)),
            ("kept_bytes", "kept", &|it| Value::Bytes(Bytes(it.kept_bytes))),
            ("objects", "objects", &|it| Value::Count(it.objects)),
            ("pinned_bytes", "pins free", &|it| Value::Bytes(Bytes(it.pinned_bytes))),
            ("call_site", "line", &|it| Value::text(&*it.call_site)),
        ],
    );
    let when = |column: &Column| time(story.since_start(column.bill.time));
    let text = format!(
        "from {} to {}. `kept` is memory held at both instants. `pins free` is the most free memory in one segment that a block of the line keeps from empty_cache",
        when(before),
        when(after)
    );
    Some(Section::new("between", title).table(table).table(lines.keep(KEEPERS, 1)).line(Mood::Note, text))
}

fn of_moment(budgets: &Budgets, column: &Column) -> OfMoment {
    let bill = &column.bill;
    let known = |row: &&Row| amount(bill, **row) != Value::Missing;
    let since = |time: Nanos| budgets.story.since_start(time).0;
    OfMoment {
        name: column.name.clone(),
        why: column.why.clone(),
        time_ns: since(bill.time),
        rows: Row::ALL.iter().filter(known).map(|row| (row.key(), bill.of(*row))).collect(),
        total_bytes: bill.total,
        figure: bill.figure.name(),
        sampled_ns: bill.sampled.map(since),
        is_sampled_then: bill.is_sampled_then,
        others_bytes: bill.others,
        free_bytes: bill.free,
    }
}

fn of_between(budgets: &Budgets, before: &Column, after: &Column) -> Between {
    let held = kept(before, after);
    let kept = Row::ALL.iter().map(|row| (row.key(), kept_of(*row, (before, after), &held)));
    Between {
        before: of_moment(budgets, before),
        after: of_moment(budgets, after),
        kept: kept.collect(),
        keepers: keepers(budgets, before, after),
    }
}

fn of_device(budgets: &Budgets, budget: &Budget, graphs: Vec<Graph>, settings: Settings) -> OfDevice {
    let story = &budgets.story;
    let sharing = Sharing::of(story, budget.device);
    OfDevice {
        device: budget.device,
        name: story.device(budget.device).map(|device| device.name.clone()),
        card_bytes: story.device(budget.device).map(|device| device.total.0),
        mig_instance: sharing.instance,
        mps_client: sharing.is_client,
        mps_limit_bytes: sharing.limit.map(|limit| limit.0),
        columns: budget.columns.iter().map(|it| of_moment(budgets, it)).collect(),
        meanings: Row::ALL.iter().map(|row| (row.key(), row.meaning())).collect(),
        graphs,
        between: budget.between.as_ref().map(|(before, after)| of_between(budgets, before, after)),
        settings,
    }
}
