//! What can be wrong with a program's memory: one file and one line in [`CAUSES`] for each cause.
//!
//! A cause has a name in the field's words, the facts it needs and those that speak against it, and finds its [`Case`]: the bytes it
//! explains at the moment that matters (the request that failed, else the peak; for what grows, the end), the line of the program, how sure
//! that is, and what to do. The verdict shows the case that explains most, and the next two. No cause knows of another, and none of how it
//! is shown.

use std::cmp::Reverse;

use gputrace_schemas::event::Bytes;

use gputrace_report::model::Value;

use crate::code::KEPT_BY;

mod abandoned_pools;
mod activations_beyond_card;
pub(crate) mod another_pool;
mod caught_errors;
mod child_contexts;
mod copied_weights;
mod dense_embedding;
mod double_width;
mod earlier_model;
pub(crate) mod emptied_cache;
mod evaluation_with_gradients;
pub(crate) mod external_fragmentation;
pub mod facts;
mod graph_per_shape;
pub(crate) mod growth;
pub(crate) mod holdings;
mod idle_context;
mod idle_memory;
mod idle_weights;
mod joined_anew;
mod left_over;
mod limit;
mod managed_beyond_card;
pub(crate) mod mostly;
mod neighbours;
mod not_donated;
mod odd_batch;
mod one_request;
mod own_setting;
mod pinned_rounded;
pub(crate) mod record_stream;
mod reference_cycles;
mod square;
mod starved_library;
mod stray_device;
pub(crate) mod streams_made_anew;
mod taken_in_advance;
mod uneven_devices;
mod untaken_checkpointing;
mod unused_gradients;
mod unused_graph;
mod upcast_logits;
mod weights_beyond_card;
mod whole_result;
mod workspaces;

pub use facts::{Facts, Failure};

/// All causes.
pub const CAUSES: &[Cause] = &[
    abandoned_pools::CAUSE,
    activations_beyond_card::CAUSE,
    another_pool::CAUSE,
    another_pool::IDLE,
    caught_errors::CAUSE,
    child_contexts::CAUSE,
    copied_weights::CAUSE,
    dense_embedding::CAUSE,
    double_width::CAUSE,
    earlier_model::CAUSE,
    emptied_cache::CAUSE,
    emptied_cache::CHEAP,
    evaluation_with_gradients::CAUSE,
    external_fragmentation::CAUSE,
    external_fragmentation::WITH_ROOM,
    graph_per_shape::ALIKE,
    graph_per_shape::CAUSE,
    idle_context::CAUSE,
    idle_memory::CAUSE,
    idle_weights::CAUSE,
    joined_anew::CAUSE,
    joined_anew::RESULTS,
    left_over::CAUSE,
    limit::CAUSE,
    managed_beyond_card::CAUSE,
    neighbours::CAUSE,
    not_donated::CAUSE,
    odd_batch::CAUSE,
    one_request::CAUSE,
    one_request::FEW,
    one_request::OF_LIMIT,
    one_request::PREVIOUS,
    one_request::TWICE,
    own_setting::CAUSE,
    own_setting::WITH_ROOM,
    pinned_rounded::CAUSE,
    record_stream::CAUSE,
    reference_cycles::CAUSE,
    square::CAUSE,
    starved_library::CAUSE,
    stray_device::CAUSE,
    streams_made_anew::CAUSE,
    streams_made_anew::IDLE,
    taken_in_advance::CAUSE,
    taken_in_advance::FILLED,
    uneven_devices::CAUSE,
    untaken_checkpointing::CAUSE,
    unused_gradients::CAUSE,
    unused_gradients::KEPT,
    unused_graph::CAUSE,
    upcast_logits::CAUSE,
    weights_beyond_card::CAUSE,
    whole_result::CAUSE,
    workspaces::CAUSE,
];

/// What of a process's memory goes wrong, for programs and in the title.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Kind {
    /// It grows to the end.
    Grew,
    /// It was kept longer than it was used.
    Kept,
    /// A pool of PyTorch's keeps memory that no graph can use.
    Abandoned,
    /// PyTorch reserved much more than was in use.
    Wasted,
    /// One device held more than another.
    Uneven,
    /// More was asked for than there is.
    Beyond,
    /// Others hold it.
    Elsewhere,
    /// Nothing fails, and the peak is higher than it needs to be.
    Peak,
    /// Nothing is wrong, and the peak could be lower.
    Spare,
    /// Memory was given back only to be bought again: it costs time.
    Churned,
}

impl Kind {
    /// For programs, and for people.
    #[must_use]
    pub fn names(self) -> (&'static str, &'static str) {
        match self {
            Kind::Grew => ("grew", "memory grows"),
            Kind::Kept => ("kept", "memory was kept"),
            Kind::Abandoned => ("abandoned", "a pool was left behind"),
            Kind::Wasted => ("wasted", "memory was reserved and not used"),
            Kind::Uneven => ("uneven", "uneven devices"),
            Kind::Beyond => ("beyond", "more memory than there is"),
            Kind::Elsewhere => ("elsewhere", "other processes hold the memory"),
            Kind::Peak => ("peak", "the peak can be lower"),
            Kind::Spare => ("nothing_wrong", "nothing is wrong; the peak could be lower"),
            Kind::Churned => ("churned", "memory was released and reserved again"),
        }
    }
}

/// Something that can be wrong.
pub struct Cause {
    /// Its common name.
    pub name: &'static str,
    /// What of the memory it is that goes wrong.
    pub kind: Kind,
    /// The facts that it needs.
    pub needs: &'static str,
    /// The facts that speak against it.
    pub against: &'static str,
    /// The case that a process is of it.
    pub find: fn(&Facts<'_>) -> Option<Case>,
}

/// A cause, found in a process.
#[derive(Clone)]
pub struct Case {
    /// In a sentence.
    pub what: String,
    /// The line of the program; empty where none is known.
    pub site: String,
    /// What it explains of the memory at the moment that matters.
    pub bytes: Bytes,
    /// How it is known.
    pub sure: String,
    /// What to do.
    pub fix: Option<Fix>,
    /// What to type next.
    pub verb: &'static str,
}

/// What to do.
#[derive(Clone)]
pub struct Fix {
    /// A command, or words.
    pub what: Value,
    /// What it saves, and how that is known.
    pub worth: String,
}

impl Fix {
    /// What to do, in words.
    pub fn words(what: impl Into<String>, worth: impl Into<String>) -> Option<Fix> {
        Some(Fix { what: Value::text(what), worth: worth.into() })
    }
}

/// What is wrong with a process. Where a request failed, first what alone would have made room for it and can be avoided, then what holds
/// most. Else what grows comes before what was there once, as it has no peak, and what only costs time comes last.
#[must_use]
pub fn ranked(facts: &Facts<'_>) -> Vec<Found> {
    let of_causes = CAUSES.iter().filter_map(|cause| Some((cause, cause.kind, (cause.find)(facts)?)));
    let (growth, is_shown) = growth::case(facts).unzip();
    let mut all: Vec<Found> = of_causes.chain(growth).chain(holdings::cases(facts)).collect();
    // A cache that is joined anew outlives each turn without any graph.
    if let Some(site) = all.iter().find(|it| it.0.name == joined_anew::CAUSE.name).map(|it| it.2.site.clone())
    {
        all.retain(|(cause, _, case)| {
            let is_of_turn = holdings::is_of_graph(cause) || cause.name == taken_in_advance::CAUSE.name;
            !(is_of_turn && (case.site.starts_with(&site) || is_of(&case.site, &site)))
        });
    }
    // Autocast's copies of the weights are bounded by the weights.
    if let Some(copies) = all.iter().find(|it| it.0.name == holdings::CONVERTED).map(|it| it.2.bytes.0) {
        all.retain(|(_, kind, case)| *kind != Kind::Grew || case.bytes.0 > copies.saturating_mul(2));
    }
    // What attempts still held is no growth, nor is what the last one holds: it may be an attempt, too.
    if let Some(held) =
        all.iter().find(|(cause, ..)| cause.name == caught_errors::CAUSE.name).map(|it| it.2.bytes.0)
    {
        let most = held.saturating_add(caught_errors::largest(facts).0.max(held / LITTLE));
        all.retain(|(_, kind, case)| *kind != Kind::Grew || case.bytes.0 > most);
    }
    // One result that is held while the next is made has accumulated nothing.
    if let Some(held) = all.iter().find(|it| it.0.name == one_request::PREVIOUS.name).map(|it| it.2.bytes.0) {
        let most = held.saturating_add(held / LITTLE);
        all.retain(|(_, kind, case)| *kind != Kind::Grew || case.bytes.0 > most);
    }
    // Where a request fails, nothing is spare.
    let (is_failed, missing) = (facts.failure.is_some(), facts.missing().unwrap_or_default());
    for (_, kind, _) in all.iter_mut().filter(|it| is_failed && it.1 == Kind::Spare) {
        *kind = Kind::Peak;
    }
    // A few repetitions may be a chance, where what was asked for is too large for the card anyway.
    let is_beyond = all.iter().any(|(_, kind, case)| *kind == Kind::Beyond && case.bytes >= missing);
    let is_doubtful =
        is_beyond && facts.grown().is_some_and(|grown| grown.site.confidence < LEAST_CONFIDENCE);
    // Little of what is reserved lies unused: a setting that makes room for this request makes little for the next.
    let is_less_than = |part: u64, kind: Kind, case: &Case| {
        kind == Kind::Wasted && is_failed && case.bytes.0.saturating_mul(part) < facts.all.0
    };
    let is_little = |kind: Kind, case: &Case| is_less_than(LITTLE_UNUSED, kind, case);
    if is_failed
        && all.iter().all(|(cause, kind, case)| {
            cause.name == limit::CAUSE.name || is_less_than(LEAST_UNUSED, *kind, case)
        })
    {
        all.extend(mostly::most(facts));
    }
    let rank = |kind: Kind, case: &Case| match kind {
        Kind::Churned => 2,
        _ if is_little(kind, case) => 2,
        Kind::Spare => 3,
        Kind::Grew if is_failed && is_doubtful => 2,
        _ if is_failed => u8::from(kind == Kind::Beyond || case.bytes < missing),
        Kind::Grew => 0,
        _ => 1,
    };
    // Of two that cost nothing, memory in use comes before unused memory that the card has room for.
    let is_unused = |cause: &Cause| cause.name == external_fragmentation::WITH_ROOM.name;
    all.sort_by_key(|(cause, kind, case)| (rank(*kind, case), is_unused(cause), Reverse(case.bytes), *kind));
    // What the request that failed is itself for comes before what else is held, and might be needed.
    let own = facts
        .refused_line()
        .and_then(|line| all.iter().position(|it| it.2.bytes >= missing && is_own_request(it, &line)));
    if let Some(at) = own {
        let is_weaker = |(_, kind, _): &Found| matches!(kind, Kind::Kept | Kind::Peak);
        if let Some(before) = all[..at].iter().position(is_weaker) {
            all[before..=at].rotate_right(1);
        }
    }
    // What fills a limit says more than the limit.
    if all.len() > 1 {
        all.retain(|(cause, ..)| cause.name != limit::CAUSE.name);
    }
    // What grows to the end comes first, unless something else holds several times as much.
    let is_more = |(_, kind, case): &Found, grown: u64| {
        !matches!(kind, Kind::Grew | Kind::Churned | Kind::Spare | Kind::Wasted)
            && case.bytes.0 > grown.saturating_mul(SEVERAL)
    };
    let first = all.first().filter(|(_, kind, _)| !is_failed && *kind == Kind::Grew);
    let grown = first.map(|(.., case)| case.bytes.0);
    if let Some(at) = grown.and_then(|grown| all.iter().position(|case| is_more(case, grown))) {
        all[..=at].rotate_right(1);
    }
    // Of growth that nothing is known to keep, a graph that an evaluation does not need says more.
    let is_open = |(_, kind, _): &Found| *kind == Kind::Grew && is_shown == Some(false);
    if let Some((.., growth)) = all.first().filter(|first| is_open(first)) {
        let (name, half) = (evaluation_with_gradients::CAUSE.name, growth.bytes.0 / 2);
        if let Some(at) = all.iter().position(|(cause, _, case)| cause.name == name && case.bytes.0 >= half) {
            all[..=at].rotate_right(1);
        }
    }
    put_fragmentation_later(&mut all, is_failed);
    // More than all cannot be saved: what comes later is counted already.
    let (mut sum, held) = (0_u64, facts.held.map_or(0, |held| held.bytes.0));
    all.retain(|(_, kind, case)| {
        let is_of_peak = matches!(kind, Kind::Kept | Kind::Peak | Kind::Spare);
        let is_new = *kind != Kind::Spare || sum == 0 || sum.saturating_add(case.bytes.0) <= held;
        sum = sum.saturating_add(if is_of_peak && is_new { case.bytes.0 } else { 0 });
        is_new
    });
    if let Some((_, kind, case)) = all.first_mut().filter(|_| is_failed)
        && !matches!(kind, Kind::Grew | Kind::Churned)
    {
        case.site = with_callers(facts, &case.site);
    }
    all
}

/// Puts fragmentation behind what it follows from: a cause of the same function, or a function's own results, if they are more than twice as much.
fn put_fragmentation_later(all: &mut [Found], is_failed: bool) {
    let is_it = |(cause, ..): &Found| cause.name == external_fragmentation::CAUSE.name;
    let Some(at) = all.iter().position(is_it) else { return };
    let explains = |(_, kind, case): &Found| {
        matches!(kind, Kind::Kept | Kind::Peak) && is_of(&all[at].2.site, &case.site)
    };
    if let Some(later) = all.iter().skip(at + 1).rposition(explains) {
        all[at..=at + 1 + later].rotate_left(1);
    }
    let Some(first) = all.first().filter(|first| is_failed && is_it(first)) else { return };
    let least = first.2.bytes.0.saturating_mul(2);
    let is_plain = |(cause, _, case): &Found| cause.name == one_request::FEW.name && case.bytes.0 >= least;
    if let Some(at) = all.iter().position(is_plain) {
        all[..=at].rotate_right(1);
    }
}

/// Callers of a line that are named.
const MOST_CALLERS: usize = 2;

/// A line of the program with those that called it: one line may serve training, validation and more.
fn with_callers(facts: &Facts<'_>, site: &str) -> String {
    let is_it = |other: &str| line_of(other) == line_of(site);
    // What made a tensor may be named already, by who called it or by what keeps it.
    if [" called ", KEPT_BY].iter().any(|words| site.contains(words)) {
        return site.to_owned();
    }
    let failed = facts.refused_line().filter(|line| is_it(line)).and(facts.held).map(|held| &held.failed_own);
    let holder = || facts.holders().find(|holder| is_it(&facts.site(holder.site)));
    let Some(own) = failed.or_else(|| holder().map(|holder| &holder.own)) else { return site.to_owned() };
    let callers = own.iter().skip(1).take(MOST_CALLERS);
    // A call at the module's own level says no more than the function that it calls.
    let callers = callers.filter(|(function, ..)| function != "<module>").map(|(function, file, line)| {
        let file = file.rsplit('/').next().unwrap_or_default();
        format!("{CALLED_FROM}{function} ({file}:{line})")
    });
    site.to_owned() + &callers.collect::<String>()
}

/// A case, its cause, and what of the memory it is that goes wrong.
pub type Found = (&'static Cause, Kind, Case);

/// Of growth that comes before what else explains a failure.
const LEAST_CONFIDENCE: f64 = 0.95;
/// One in so many is little.
const LITTLE: u64 = 20;
/// So is less than this part of what is reserved: one in so many. Where pieces are the cause, as much lies unused as is used.
const LITTLE_UNUSED: u64 = 4;
/// Where no other cause is known, less than this part says less than what fills the memory.
const LEAST_UNUSED: u64 = 8;
/// What is held is several times as much as what grew.
const SEVERAL: u64 = 4;

/// Of the program's lines of a stack, innermost first, those that called the first; empty where it has none.
fn callers(path: &str) -> &str {
    path.split_once(CALLED_FROM).map_or("", |(_, callers)| callers)
}

/// The innermost of these lines.
fn innermost(path: &str) -> &str {
    path.split(CALLED_FROM).next().unwrap_or(path)
}

/// The outermost of these lines.
fn outermost(path: &str) -> &str {
    path.rsplit(CALLED_FROM).next().unwrap_or(path)
}

/// Between two lines of a stack.
const CALLED_FROM: &str = ", called from ";

/// Whether a case is of memory that is kept, at this line of the program's.
fn is_own_request((_, kind, case): &Found, line: &str) -> bool {
    *kind == Kind::Kept && line_of(&case.site) == line_of(line)
}

/// A call site without what it calls and who called it.
fn line_of(site: &str) -> &str {
    site.split_once(')').map_or(site, |(line, _)| line)
}

/// The function that a comprehension in it is part of.
fn function_around(function: &str) -> &str {
    function.split(".<locals>.<").next().unwrap_or(function)
}

/// Whether two call sites are of one function of the program's.
fn is_of(a: &str, b: &str) -> bool {
    let function = |site: &str| {
        let (function, place) = site.split_once(" (")?;
        Some((function_around(function).to_owned(), place.rsplit_once(':')?.0.to_owned()))
    };
    function(a).is_some_and(|a| function(b) == Some(a))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::CAUSES;

    #[test]
    fn every_file_of_this_folder_is_a_line_of_the_table() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/causes");
        let files = std::fs::read_dir(&folder).expect("the folder of causes").map(|entry| {
            let name = entry.expect("a file").file_name().to_string_lossy().into_owned();
            name.trim_end_matches(".rs").to_owned()
        });
        let files: BTreeSet<String> = files
            .filter(|name| !matches!(name.as_str(), "mod" | "facts" | "growth" | "holdings" | "mostly"))
            .collect();
        let table = std::fs::read_to_string(folder.join("mod.rs")).expect("the table");
        let lines = table.lines().filter_map(|line| line.trim().strip_suffix("::CAUSE,")).map(str::to_owned);
        let lines: BTreeSet<String> = lines.collect();
        for name in &files {
            assert!(
                lines.contains(name),
                "causes/{name}.rs: add `mod {name};` and `{name}::CAUSE,` in CAUSES to mod.rs"
            );
        }
        assert_eq!(lines, files);
    }

    #[test]
    fn every_cause_has_a_name_of_its_own_and_says_what_it_needs() {
        let names: BTreeSet<&str> = CAUSES.iter().map(|cause| cause.name).collect();
        assert_eq!(names.len(), CAUSES.len());
        for cause in CAUSES {
            assert!(!cause.needs.is_empty() && !cause.against.is_empty(), "{}", cause.name);
        }
    }
}
