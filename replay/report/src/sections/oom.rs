//! Out of memory: what was asked for, and what was there.

use gputrace_schemas::event::{Bytes, HOST, Nanos};

use super::{SectionEntry, device_name};
use crate::model::{Mood, Section, Table, Value};
use crate::summary::used_devices;
use gputrace_analyse::story::Story;
use gputrace_trace::ledger::{DeviceBooks, Refusal, TorchOom, Wall};
use gputrace_trace::words::{bytes, time};

pub(super) const ENTRY: SectionEntry = SectionEntry { build };

/// An out-of-memory error that ends less than this before the trace does probably ended the program.
const SUDDEN: Nanos = Nanos(5_000_000_000);

/// One section for each device whose PyTorch ran out, and one for all others that the driver refused.
fn build(story: &Story) -> Vec<Section> {
    let torch = used_devices(story).filter_map(|(ordinal, books)| {
        let oom = books.torch.as_ref()?.ooms.last()?;
        Some(pytorch(story, Section::new("oom", "OUT OF MEMORY"), ordinal, books, oom))
    });
    torch.chain(refused(story)).map(|section| section.warn(story.caveats())).collect()
}

fn refused(story: &Story) -> Option<Section> {
    let refused = |refusal: &&Refusal| refusal.is_final;
    let sites = &story.ledger.sites;
    let bursts = bursts(story.ledger.refusals.iter().rev().filter(refused));
    let table = Table::of(
        "refused",
        &bursts,
        &[
            ("time_ns", "at", &|(it, _)| Value::Time(story.since_start(it.time))),
            ("device", "device", &|(it, _)| Value::text(device_name(story, it.device))),
            ("bytes", "requested", &|(it, _)| Value::Bytes(it.bytes)),
            ("n", "times", &|(_, n)| Value::Count(*n)),
            ("tracked_bytes", "held then", &|(it, _)| Value::Bytes(it.tracked)),
            ("owner", "by", &|(it, _)| Value::text(sites.owner(it.owner))),
            ("call", "call", &|(it, _)| Value::text(sites.name(it.name))),
            ("call_site", "from", &|(it, _)| Value::text(sites.site_name(it.site))),
        ],
    );
    let section = Section::new("refused", "OUT OF MEMORY")
        .line(Mood::Bad, "The driver was out of memory for these requests (newest first):");
    if table.rows.is_empty() {
        return None;
    }
    let section = section.table(table.keep(5, 2));
    let last = story.ledger.refusals.iter().rev().find(refused)?;
    let allocs = story.ledger.devices().get(&last.device).map_or(0, |books| books.allocs);
    let section = match allocs.saturating_sub(last.allocs_before) {
        0 if story.is_running => return Some(section),
        0 => section.line(Mood::Note, "nothing was allocated on the device after the last of them"),
        n => section.line(Mood::Note, format!("the program continued; later allocations on the device: {n}")),
    };
    Some(if last.device == HOST { section } else { section.line(Mood::Note, REPRODUCE_DRIVER) })
}

/// Nothing is computed for these two: the command says what comes of it.
const REPRODUCE: &str = "`gputrace reproduce` writes a program that fails the same way, without your code";
const REPRODUCE_DRIVER: &str =
    "`gputrace reproduce --cuda` writes a program that fails the same way, without your code";

/// Refusals, newest first, and how often each was repeated with nothing else changed: programs try again, some of them at once.
fn bursts<'a>(refusals: impl Iterator<Item = &'a Refusal>) -> Vec<(&'a Refusal, u64)> {
    let same = |it: &Refusal| (it.device, it.bytes, it.tracked, it.name, it.owner, it.site);
    let mut bursts: Vec<(&Refusal, u64)> = vec![];
    for refusal in refusals {
        match bursts.last_mut() {
            Some((newest, n)) if same(newest) == same(refusal) => *n += 1,
            _ => bursts.push((refusal, 1)),
        }
    }
    bursts
}

fn pytorch(story: &Story, section: Section, ordinal: i16, books: &DeviceBooks, oom: &TorchOom) -> Section {
    let asked = oom.requested.map_or_else(|| format!("{} (rounded by PyTorch)", bytes(oom.bytes)), bytes);
    let when = time(story.since_start(oom.time));
    let site = story.ledger.sites.site_name(oom.site);
    let cached = oom.reserved.0.saturating_sub(oom.allocated.0);
    let others = oom.tracked.0.saturating_sub(oom.reserved.0);
    let headline = format!("PyTorch could not get {asked} on {} at {when}", device_name(story, ordinal));
    let mut section = section
        .line(Mood::Bad, headline)
        .fact("device", "device", Value::text(device_name(story, ordinal)))
        .fact("time_ns", "at", Value::Time(story.since_start(oom.time)))
        .fact("asked_bytes", "PyTorch requested", Value::Bytes(oom.bytes))
        .fact("requested_bytes", "the program requested", Value::bytes(oom.requested.map(|bytes| bytes.0)))
        .fact("allocated_bytes", "allocated by PyTorch", Value::Bytes(oom.allocated))
        .remark(
            "reserved_bytes",
            "reserved by PyTorch",
            Value::Bytes(oom.reserved),
            cached_remark(cached, oom),
        )
        .fact("others_bytes", "held by other libraries in this process", Value::bytes(Some(others)));
    if let Some((free, total)) = oom.device {
        let segment = bytes(oom.segment());
        let why = match oom.wall() {
            Wall::Limit => {
                format!(
                    "enough for a segment of {segment}: a limit stopped PyTorch (set_per_process_memory_fraction)"
                )
            }
            Wall::Device if free >= oom.bytes => format!("PyTorch needed a segment of {segment}"),
            Wall::Device | Wall::Unknown => String::new(),
        };
        section = section.remark("free_bytes", "free on the device", Value::Bytes(free), why).fact(
            "total_bytes",
            "size of the device",
            Value::bytes(Some(total.0).filter(|total| *total > 0)),
        );
        let elsewhere = total.0.saturating_sub(free.0).saturating_sub(oom.tracked.0);
        let remark = "CUDA context, code, other processes (total - free - allocations of this process)";
        if total.0 > 0 {
            section =
                section.remark("elsewhere_bytes", "held elsewhere", Value::bytes(Some(elsewhere)), remark);
        }
    }
    if !site.is_empty() {
        section = section.fact("call_site", "from", Value::text(site));
    }
    if let Some(n) = books.torch.as_ref().map(|torch| torch.n_ooms).filter(|n| *n > 1) {
        let text = format!("{n} out-of-memory errors on this device; this is the last");
        section = section.line(Mood::Note, text);
    }
    let after = story.ledger.run.last.0.saturating_sub(oom.time.0);
    let went_on = books.torch.as_ref().map_or(0, |torch| torch.allocations - oom.allocations_before);
    let section = if story.is_running {
        return section;
    } else if went_on > 0 {
        let text = format!("the program continued: {went_on} more blocks were allocated after it");
        section.line(Mood::Note, text)
    } else if after < SUDDEN.0 {
        let text = format!(
            "nothing was allocated after it, and the trace ends {} later: it probably ended the program",
            time(Nanos(after))
        );
        section.line(Mood::Note, text)
    } else {
        section
    };
    section.line(Mood::Note, REPRODUCE)
}

fn cached_remark(cached: u64, oom: &TorchOom) -> String {
    let wanted = oom.requested.unwrap_or(oom.bytes);
    let cached_text = bytes(Bytes(cached));
    if cached >= wanted.0 {
        format!("{cached_text} of it unused, more than was requested: fragmentation")
    } else {
        format!("{cached_text} of it unused")
    }
}
