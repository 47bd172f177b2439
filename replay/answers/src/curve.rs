//! What `gputrace predict` says of a range of values, as charts: of one variable, where all others are the same, under one allocator.
//!
//! What it is drawn with is not known here.

use std::collections::BTreeMap;

use gputrace_schemas::event::Bytes;
use gputrace_sim::ops::OpStream;
use gputrace_sim::predict::Forecast;
use gputrace_sim::whatif::{Other, Question};
use serde::Serialize;

use super::tune::recorded_peak;
use super::whatif::{Machine, Shares};
use gputrace_report::model::{Ceiling, Chart, Mood, Point, Section};
use gputrace_trace::words::short;

/// Fewer values are no curve.
const LEAST_POINTS: usize = 3;
/// Charts of one device; what more there are is in the table.
const MOST_CHARTS: usize = 4;

/// What is predicted at a point under an allocator.
#[derive(Clone, Debug)]
pub(super) struct Predicted {
    /// The value of each variable.
    pub(super) at: Vec<u64>,
    /// The allocator, as it is named to people.
    pub(super) policy: String,
    pub(super) needed: Needed,
    pub(super) is_certain: bool,
}

/// The peak of reserved bytes, whether there is room for it or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub(super) struct Needed {
    /// What it reserves if it fits, and if it does not, what it would reserve if it did: the curve.
    #[serde(rename = "needed_reserved_bytes")]
    pub(super) best: u64,
    /// Of the same, at least and at most.
    #[serde(rename = "needed_reserved_range")]
    pub(super) range: (u64, u64),
    /// The limit, or the device's memory, less what others hold of it; of the recorded card all; null if neither is known.
    #[serde(rename = "room_bytes")]
    pub(super) room: Option<Room>,
}

/// Memory that an allocator may have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(into = "u64")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub(super) struct Room {
    /// What ends it, for people, and the same in a word.
    pub(super) name: String,
    pub(super) short: &'static str,
    /// All of it, less what others hold.
    pub(super) bytes: u64,
    /// It was asked about, and is not merely that of the recorded card.
    pub(super) is_asked: bool,
}

impl Needed {
    /// What fits needs what it has; of what does not, that is known from a replay without a limit.
    pub(super) fn of(found: &Forecast, unlimited: Option<&Forecast>, room: Option<Room>) -> Needed {
        let peak = |forecast: &Forecast| forecast.answer.outcome.books.reserved.peak;
        let whole = unlimited.unwrap_or(found);
        let best = if found.answer.outcome.fits() { peak(found) } else { peak(whole) };
        let (low, high) = whole.reserved;
        Needed { best, range: (low.min(best), high.max(best)), room }
    }
}

impl From<Room> for u64 {
    fn from(room: Room) -> u64 {
        room.bytes
    }
}

/// The same question where nothing ends the memory.
pub(super) fn unlimited(question: &Question) -> Question {
    Question { limit: None, device_memory: None, other: Other::Ignored, ..question.clone() }
}

impl Room {
    /// What is left of the machine that was asked about.
    pub(super) fn of(machine: Machine, shares: &Shares) -> Room {
        let all = shares.limit_bytes;
        let is = |asked: Option<Bytes>| asked.is_some_and(|bytes| bytes.0 == all);
        let (name, word) = match () {
            () if is(machine.limit) => (format!("--limit {}", short(Bytes(all))), "--limit"),
            () if is(machine.device_memory) => {
                (format!("--device-memory {}", short(Bytes(all))), "--device-memory")
            }
            () => (card(all), CARD),
        };
        let held = shares.others.iter().flatten().fold(0, |sum: u64, held| sum.saturating_add(held.bytes));
        let less = match machine.other {
            _ if held == 0 => String::new(),
            Some(other) => format!(" less --other {}", short(other)),
            None => " less others".into(),
        };
        Room { name: name + &less, short: word, bytes: all.saturating_sub(held), is_asked: true }
    }

    /// The card of the recorded run, of which nothing was asked.
    pub(super) fn recorded(memory: u64) -> Room {
        Room { name: card(memory), short: CARD, bytes: memory, is_asked: false }
    }
}

const CARD: &str = "the recorded card";

fn card(memory: u64) -> String {
    format!("{} of the recorded card", short(Bytes(memory)))
}

/// What a recorded run reserved at most.
pub(super) struct Measured {
    /// The value of each variable.
    pub(super) at: Vec<u64>,
    /// The allocator.
    pub(super) policy: String,
    pub(super) reserved: Bytes,
}

impl Measured {
    /// Of a run of one device.
    pub(super) fn of(at: &[u64], stream: &OpStream) -> Measured {
        let settings = &stream.settings;
        let policy = match settings.options.as_deref().unwrap_or_default() {
            "" => settings.policy.to_owned(),
            options => format!("{}:{options}", settings.policy),
        };
        Measured { at: at.to_vec(), policy, reserved: recorded_peak(stream) }
    }
}

/// What a device of a run reserved at most.
#[derive(Clone, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub(super) struct OfDevice {
    device: u32,
    peak_reserved_bytes: u64,
}

impl OfDevice {
    pub(super) fn of(stream: &OpStream) -> OfDevice {
        OfDevice { device: stream.device, peak_reserved_bytes: recorded_peak(stream).0 }
    }
}

/// Adds a chart for each range of one variable.
pub(super) fn drawn(section: Section, names: &[String], all: &[Predicted], recorded: &[Measured]) -> Section {
    let curves = curves(names, all);
    let n_more = curves.len().saturating_sub(MOST_CHARTS);
    let is_cut = curves
        .iter()
        .take(MOST_CHARTS)
        .flat_map(|curve| &curve.points)
        .any(|it| it.is_asked() && it.is_beyond());
    let charts = curves.iter().take(MOST_CHARTS).map(|curve| curve.chart(names, recorded));
    let more =
        (n_more > 0).then(|| format!("{n_more} more curves are not drawn: the table has their values"));
    let cut = is_cut.then(|| "if a value does not fit, the chart shows how much it would reserve".to_owned());
    section
        .charts(charts.collect::<Vec<_>>())
        .lines(cut.into_iter().chain(more).map(|text| (Mood::Note, text)))
}

impl Predicted {
    fn is_beyond(&self) -> bool {
        self.needed.room.as_ref().is_some_and(|room| self.needed.best > room.bytes)
    }

    /// Whether another differs in this variable alone.
    fn is_along(&self, variable: usize, at: &[u64], policy: &str) -> bool {
        let mut values = self.at.iter().zip(at).enumerate();
        self.policy == policy && values.all(|(index, (one, other))| index == variable || one == other)
    }

    fn is_asked(&self) -> bool {
        self.needed.room.as_ref().is_some_and(|room| room.is_asked)
    }
}

/// Points that differ in one variable.
struct Curve<'a> {
    variable: usize,
    /// Other variables, or other allocators, have curves of their own.
    has_others: (bool, bool),
    points: Vec<&'a Predicted>,
}

/// Of the variable with the most values; in the order in which they were asked for.
fn curves<'a>(names: &[String], all: &'a [Predicted]) -> Vec<Curve<'a>> {
    let of_variable = (0..names.len()).map(|variable| along(variable, all));
    let longest = |curves: &Vec<Curve>| curves.iter().map(|curve| curve.points.len()).max();
    // Of several the first.
    of_variable.rev().max_by_key(longest).unwrap_or_default()
}

fn along(variable: usize, all: &[Predicted]) -> Vec<Curve<'_>> {
    let mut groups: Vec<BTreeMap<u64, &Predicted>> = vec![];
    let is_of = |points: &BTreeMap<u64, &Predicted>, it: &Predicted| {
        points.values().next().is_some_and(|first| first.is_along(variable, &it.at, &it.policy))
    };
    for it in all {
        let value = it.at[variable];
        match groups.iter_mut().find(|points| is_of(points, it)) {
            Some(points) => drop(points.insert(value, it)),
            None => groups.push(BTreeMap::from([(value, it)])),
        }
    }
    let differs = |is_other: &dyn Fn(&Predicted, &Predicted) -> bool| {
        all.first().is_some_and(|first| all.iter().any(|it| is_other(first, it)))
    };
    let has_others = (
        all.first().is_some_and(|first| first.at.len() > 1),
        differs(&|first, it| first.policy != it.policy),
    );
    let long = groups.into_iter().filter(|points| points.len() >= LEAST_POINTS);
    long.map(|points| Curve { variable, has_others, points: points.into_values().collect() }).collect()
}

impl Curve<'_> {
    fn chart(&self, names: &[String], recorded: &[Measured]) -> Chart {
        let first = self.points[0];
        let point = |it: &&Predicted| Point {
            at: it.at[self.variable],
            low: Bytes(it.needed.range.0),
            best: Bytes(it.needed.best),
            high: Bytes(it.needed.range.1),
            is_certain: it.is_certain,
        };
        let recorded = recorded.iter().filter(|run| first.is_along(self.variable, &run.at, &run.policy));
        let room = self.points.iter().map(|it| it.needed.room.as_ref()).collect::<Option<Vec<_>>>();
        // Nobody asked about the recorded card: it matters where it is too small.
        let room = room.filter(|_| self.points.iter().any(|it| it.is_asked() || it.is_beyond()));
        let ceiling = room.and_then(|room| {
            let first = room.first()?;
            let (name, short) = (first.name.clone(), first.short);
            Some(Ceiling { name, short, room: room.iter().map(|room| Bytes(room.bytes)).collect() })
        });
        Chart {
            title: self.title(names, first),
            variable: names[self.variable].clone(),
            points: self.points.iter().map(point).collect(),
            recorded: recorded.map(|run| (run.at[self.variable], run.reserved)).collect(),
            ceiling,
        }
    }

    /// `Peak reserved by batch, seq=1024, torch`.
    fn title(&self, names: &[String], first: &Predicted) -> String {
        let mut title = format!("Peak reserved by {}", names[self.variable]);
        let others = names.iter().zip(&first.at).enumerate().filter(|(index, _)| *index != self.variable);
        for (_, (name, value)) in others.filter(|_| self.has_others.0) {
            title += &format!(", {name}={value}");
        }
        if self.has_others.1 {
            title += &format!(", {}", first.policy);
        }
        title
    }
}

#[cfg(test)]
mod tests;
