//! What was understood, as rows.

use std::collections::BTreeMap;
use std::io;

use gputrace_schemas::event::Nanos;
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::held::{Device, Place};
use super::rows::{Row, Rows, Whose};
use super::series::Amount;
use super::{ENDING, Head, Reduced, Understood};
use gputrace_answers::diff::Side;
use gputrace_ranks::calls::{CallKind, Lane, Membership};
use gputrace_ranks::memory::{self, Holding};
use gputrace_report::summary::{owners, used_devices};
use gputrace_trace::owners::TORCH;

/// Call sites whose amounts over time are kept of each device.
const MOST_SITES: usize = 32;
/// States in a piece: what must be read to know one of them.
const PIECE: usize = 64;

/// States of a device between collectives. The first has all that was held, each other what became more or less since.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(super) struct Piece {
    pub device: i16,
    pub states: Vec<KeptState>,
}

/// One of them: communicator, calls before, when, and places with bytes.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct KeptState(pub usize, pub u64, pub u64, pub Vec<(u32, i64)>);

/// Which pieces there are: of which device, and the states of which communicators between which calls.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(super) struct Index {
    /// The places that hold memory.
    pub places: Vec<Holding>,
    /// Of each piece: device; and communicator and calls before of each of its states.
    pub pieces: Vec<(i16, Vec<(usize, u64)>)>,
    /// What the summary does not say, and why.
    pub left_out: Vec<String>,
}

/// The answer that is this process's part of what `gputrace summary --json` writes.
pub(super) const FIGURES_JSON: &str = "summary --json";
/// The answer that is what `gputrace budget --json` writes.
pub(super) const BUDGET_JSON: &str = "budget --json";

pub(super) fn summary(of: &Understood<'_>) -> io::Result<Reduced> {
    let process = &of.story.process;
    let gpus = of.story.devices.iter().filter(|device| !device.uuid.is_empty());
    let mut rows = Rows::of(Whose {
        rank: process.rank,
        host: process.host.clone(),
        pid: process.pid,
        trace: of.source.path().to_owned(),
        gpus: gpus.map(|device| (device.ordinal, device.uuid.clone())).collect(),
    });
    about(of, &mut rows);
    devices(of, &mut rows);
    let (peak, end) = (of.side(&of.peaks), of.side(&of.ends));
    pictures(&mut rows, "peak", &peak);
    pictures(&mut rows, "end", &end);
    for (id, device) in &of.held.devices {
        series(of, &mut rows, *id, device);
    }
    roles(of, &mut rows);
    calls(of, &mut rows);
    of.leaks.each(|name, device, owner, call_site, bytes, objects, text| {
        let bytes = Some(bytes.0);
        rows.add("leak", &Row { device, name, owner, call_site, bytes, objects, text, ..Row::default() });
    });
    for (name, part) in &of.answers {
        let text = json_of(part)?;
        rows.add("answer", &Row { name, text: &text, ..Row::default() });
    }
    rows.add("answer", &Row { name: FIGURES_JSON, text: &json_of(&of.figures)?, ..Row::default() });
    if let Some(budget) = &of.budget {
        rows.add("answer", &Row { name: BUDGET_JSON, text: &json_of(budget)?, ..Row::default() });
    }
    state(&mut rows, "head", 0, &Head::of(&of.story))?;
    state(&mut rows, "participant", 0, &of.participant)?;
    state(&mut rows, "leaks", 0, &of.leaks)?;
    state(&mut rows, "peak", 0, &peak)?;
    state(&mut rows, "end", 0, &end)?;
    states(of, &mut rows)?;
    let bytes = rows.file()?;
    let rank = process.rank.map_or_else(String::new, |rank| format!("rank{rank}."));
    let host: String =
        process.host.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect();
    let name = format!("{rank}{host}.{}.{:016x}{ENDING}", process.pid, hash(&bytes));
    Ok(Reduced { bytes, name })
}

fn json_of(value: &impl Serialize) -> io::Result<String> {
    Ok(serde_json::to_string(value)?)
}

fn state(rows: &mut Rows, name: &str, number: u64, value: &impl Serialize) -> io::Result<()> {
    let text = json_of(value)?;
    rows.add("state", &Row { name, number: Some(number), text: &text, ..Row::default() });
    Ok(())
}

/// FNV-1a (draft-eastlake-fnv): a name needs no secrecy.
fn hash(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The process, its losses, and what does not add up.
fn about(of: &Understood<'_>, rows: &mut Rows) {
    let (story, participant) = (&of.story, &of.participant);
    let process = &story.process;
    let text = json!({
        "executable": process.executable,
        "gputrace": process.recorder,
        "torch": process.torch_version,
        "ended": participant.ended,
        "complete": story.complete,
        "doubts": story.caveats(),
        "boot": process.boot,
        "start_monotonic_ns": process.start.0,
        "start_realtime_ns": process.start_realtime,
        "steps": story.ledger.training().map(|training| training.n_steps),
        "left_out": of.left_out,
    })
    .to_string();
    let command = process.command.join(" ");
    let until = Some(story.since_start(story.ledger.run.last).0);
    let objects = Some(story.ledger.run.n_events);
    let row = Row { name: &command, time: Some(0), until, objects, text: &text, ..Row::default() };
    rows.add("process", &row);
    for (cause, n) in &story.ledger.health.lost {
        rows.add("lost", &Row { name: &cause.to_string(), objects: Some(*n), ..Row::default() });
    }
    for found in story.ledger.findings.iter() {
        let time = Some(story.since_start(found.time).0);
        let row = Row { name: found.first.text(), objects: Some(found.count), time, ..Row::default() };
        rows.add("finding", &row);
    }
}

/// Devices, their peaks, and who held what then.
fn devices(of: &Understood<'_>, rows: &mut Rows) {
    let story = &of.story;
    for device in &story.devices {
        let bytes = Some(device.total.0).filter(|total| *total > 0);
        rows.add(
            "device",
            &Row { device: Some(device.ordinal), name: &device.name, bytes, ..Row::default() },
        );
    }
    for (id, books) in used_devices(story) {
        let device = Some(id);
        let mut peak = |name, bytes, time| {
            rows.add("peak", &Row { device, name, bytes: Some(bytes), time, ..Row::default() });
        };
        let time = Some(story.since_start(books.physical.peak_time()).0);
        peak("device", books.physical.peak().0, time);
        if let Some(torch) = &books.torch {
            for (name, meter) in [
                ("reserved", &torch.reserved),
                ("allocated", &torch.allocated),
                ("requested", &torch.requested),
            ] {
                peak(name, meter.peak.0, Some(story.since_start(meter.peak_time).0));
            }
        }
        let ever: FxHashMap<&str, u64> =
            books.physical.owners().map(|it| (story.ledger.sites.owner(it.id), it.peak.0)).collect();
        for owner in owners(story, books) {
            let (bytes, most) = (Some(owner.bytes_at_peak), ever.get(&*owner.owner).copied());
            rows.add("owner", &Row { device, owner: &owner.owner, bytes, most, ..Row::default() });
        }
        let torch = books.torch.as_ref().map(|torch| &torch.blocks);
        for (name, books) in [("driver", Some(&books.physical)), ("block", torch)] {
            for part in books.into_iter().flat_map(|books| books.sites()) {
                let site = story.ledger.sites.site(part.id);
                // A block is PyTorch's, whoever asked for it.
                let owner = match name {
                    "block" => TORCH,
                    _ => site.map_or("", |site| story.ledger.sites.owner(site.owner)),
                };
                rows.add(
                    "call_site",
                    &Row {
                        device,
                        name,
                        owner,
                        call_site: &story.ledger.sites.site_name(part.id),
                        bytes: Some(part.at_peak.bytes.0),
                        most: Some(part.peak.0),
                        objects: Some(part.gains),
                        ..Row::default()
                    },
                );
            }
        }
    }
}

fn pictures(rows: &mut Rows, name: &str, side: &Side) {
    for it in side.held() {
        let site = it.site.as_ref().map_or_else(|| it.lines[0].clone(), ToString::to_string);
        let lines: Vec<String> = it.lines.iter().map(|line| line.replace(';', ":")).collect();
        rows.add(
            "held",
            &Row {
                device: Some(it.device),
                name,
                owner: &it.owner,
                call_site: &site,
                stack: &lines.join(";"),
                bytes: Some(it.bytes),
                objects: Some(it.objects),
                ..Row::default()
            },
        );
    }
    for (bytes, n) in side.sizes() {
        rows.add("size", &Row { name, bytes: Some(*bytes), objects: Some(*n), ..Row::default() });
    }
}

/// What a device held over time.
fn series(of: &Understood<'_>, rows: &mut Rows, id: i16, device: &Device) {
    let clock = &of.held.clock;
    let mut add = |row: Row<'_>, amount: &Amount| {
        for point in amount.whole(clock) {
            let (from, to) = clock.times[point.stretch as usize];
            rows.add(
                "series",
                &Row {
                    device: Some(id),
                    number: Some(u64::from(point.stretch)),
                    time: Some(of.story.since_start(from).0),
                    until: Some(of.story.since_start(to).0),
                    bytes: Some(point.last),
                    least: Some(point.least),
                    most: Some(point.most),
                    ..row
                },
            );
        }
    };
    add(Row { name: "total", ..Row::default() }, &device.total);
    for (owner, amount) in &device.owners {
        add(Row { name: "owner", owner, ..Row::default() }, amount);
    }
    for (phase, amount) in &device.phases {
        add(Row { name: "phase", phase: of.story.ledger.phases.path(*phase), ..Row::default() }, amount);
    }
    let mut places: Vec<&Place> =
        of.held.places.iter().filter(|place| place.device == id && !place.level.is_rest()).collect();
    places.sort_by_key(|place| (std::cmp::Reverse(place.amount.peak), place.site));
    for place in places.into_iter().take(MOST_SITES) {
        let Holding { owner, place: call_site } = of.holding(place);
        add(Row { name: "call_site", owner: &owner, call_site: &call_site, ..Row::default() }, &place.amount);
    }
}

/// What PyTorch's blocks were for.
fn roles(of: &Understood<'_>, rows: &mut Rows) {
    for (device, it) in of.roles.iter().flat_map(|device| device.roles.iter().map(|it| (device.device, it))) {
        let (device, role) = (Some(device), &*it.name);
        let (bytes, most) = (Some(it.at_peak.0), Some(it.peak.0));
        rows.add("role", &Row { device, role, bytes, most, objects: Some(it.blocks), ..Row::default() });
        for (number, stretch) in (0..).zip(&it.over_time) {
            rows.add(
                "series",
                &Row {
                    device,
                    name: "role",
                    role,
                    number: Some(number),
                    time: Some(of.story.since_start(stretch.since).0),
                    until: Some(of.story.since_start(stretch.until).0),
                    bytes: Some(stretch.last.0),
                    least: Some(stretch.least.0),
                    most: Some(stretch.most.0),
                    ..Row::default()
                },
            );
        }
    }
}

/// NCCL's communicators, and what was called on them.
fn calls(of: &Understood<'_>, rows: &mut Rows) {
    let since = |time: Nanos| Some(of.story.since_start(time).0);
    for membership in &of.participant.memberships {
        let facts = &membership.facts;
        let device = Some(facts.device);
        let name = &facts.config.name;
        let text = facts.comm_hash.map_or_else(String::new, |hash| format!("{hash:#x}"));
        rows.add(
            "communicator",
            &Row {
                device,
                name,
                number: facts.rank.map(u64::from),
                objects: facts.n_ranks.map(u64::from),
                call_site: &of.participant.place(membership.place),
                text: &text,
                ..Row::default()
            },
        );
        for ((kind, lane), (n, first, last)) in counted(membership) {
            let call = &membership.kinds[kind as usize];
            rows.add(
                "call",
                &Row {
                    device,
                    owner: name,
                    name: &call.signature.to_string(),
                    call_site: &of.participant.place(call.place),
                    objects: Some(n),
                    time: since(first),
                    until: since(last),
                    text: lane.name(),
                    ..Row::default()
                },
            );
        }
    }
}

/// Calls of each kind: how many, and when the first and the last began.
fn counted(membership: &Membership) -> BTreeMap<(u32, Lane), (u64, Nanos, Nanos)> {
    let mut counted = BTreeMap::new();
    for (lane, calls) in &membership.lanes {
        for (kind, enter) in calls.kinds.iter().zip(&calls.enters) {
            let known: Option<&CallKind> = membership.kinds.get(*kind as usize);
            if known.is_some() {
                let it = counted.entry((*kind, *lane)).or_insert((0, *enter, *enter));
                (it.0, it.2) = (it.0 + 1, *enter);
            }
        }
    }
    counted
}

/// What was held between collectives, in pieces.
fn states(of: &Understood<'_>, rows: &mut Rows) -> io::Result<()> {
    let places = of.held.places.iter().map(|place| of.holding(place)).collect();
    let mut index = Index { places, pieces: vec![], left_out: of.left_out.clone() };
    for (id, device) in &of.held.devices {
        let mut held: BTreeMap<u32, i64> = BTreeMap::new();
        for some in device.between.states.chunks(PIECE) {
            let mut piece = Piece { device: *id, states: vec![] };
            for state in some {
                for (place, bytes) in &state.changes {
                    *held.entry(*place).or_default() += bytes;
                }
                let is_first = piece.states.is_empty();
                let changes = match is_first {
                    true => held
                        .iter()
                        .filter(|(_, bytes)| **bytes != 0)
                        .map(|(place, bytes)| (*place, *bytes))
                        .collect(),
                    false => state.changes.clone(),
                };
                piece.states.push(KeptState(state.membership, state.n_before, state.time.0, changes));
            }
            let spans = some.iter().map(|state| (state.membership, state.n_before));
            let (number, text) = (Some(index.pieces.len() as u64), json_of(&piece)?);
            rows.add_behind("state", &Row { name: "between", number, text: &text, ..Row::default() });
            index.pieces.push((*id, spans.collect()));
        }
    }
    state(rows, "index", 0, &index)
}

impl Understood<'_> {
    /// A place by its names.
    fn holding(&self, place: &Place) -> Holding {
        memory::holding(&self.story.ledger, place.level, place.owner, place.site)
    }
}
