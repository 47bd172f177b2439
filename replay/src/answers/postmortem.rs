//! `gputrace oom`: why a program ran out of memory, and what would have made it fit.

use std::collections::BTreeMap;

use gputrace_schemas::event::{Bytes, Event};
use gputrace_sim::bounds::Bounds;
use gputrace_sim::ops::{Op, OpStream};
use gputrace_sim::tune;
use gputrace_sim::whatif::{Confidence, Laboratory, Question};

use crate::analyse::fragmentation::Fragmentation;
use crate::analyse::live;
use crate::answers::caught::{self, Caught, CaughtOom};
use crate::answers::whatif::Machine;
use crate::import::{ImportError, Trace};
use crate::ledger::{Ledger, TorchOom, Watch};
use crate::report::model::{Mood, Section, Table, Value};
use crate::report::sections::POSTMORTEM;
use crate::report::words::bytes;
use crate::story::Story;
use crate::trace::source::Source;

/// What was found at the last out-of-memory error of every device.
pub struct Postmortem {
    /// The story.
    pub story: Story,
    /// How PyTorch's memory was cut up then, by device.
    pub fragmentation: BTreeMap<i16, Fragmentation>,
    /// Errors that were caught.
    pub caught: Vec<CaughtOom>,
}

/// What one pass over a trace looks for.
struct Signs<'a> {
    last: LastOom,
    caught: Caught<'a>,
}

impl Watch for Signs<'_> {
    fn begin(&mut self, ledger: &mut Ledger) {
        self.last.begin(ledger);
        self.caught.begin(ledger);
    }

    fn event(&mut self, ledger: &mut Ledger, event: &Event) {
        self.last.event(ledger, event);
        self.caught.event(ledger, event);
    }
}

/// After how many events each device last ran out.
#[derive(Default)]
struct LastOom {
    n_events: u64,
    places: BTreeMap<i16, u64>,
}

impl Watch for LastOom {
    fn begin(&mut self, _ledger: &mut Ledger) {
        *self = LastOom::default();
    }

    fn event(&mut self, ledger: &mut Ledger, _event: &Event) {
        self.n_events += 1;
        if let Some(oom) = ledger.ran_out() {
            self.places.insert(oom.device, self.n_events);
        }
    }
}

impl Postmortem {
    /// Of a trace.
    #[must_use]
    pub fn of(source: &Source) -> Postmortem {
        let mut signs = Signs { last: LastOom::default(), caught: Caught::new(source.definitions()) };
        let story = Story::watched(source, &mut signs);
        let Signs { last, caught } = signs;
        let caught = caught.finish(&story.ledger);
        let mut fragmentation = BTreeMap::new();
        live::visit(source, &last.places, |ledger, device, _| {
            let found = Fragmentation::of(ledger, device);
            if found != Fragmentation::default() {
                fragmentation.insert(device, found);
            }
        });
        Postmortem { story, fragmentation, caught }
    }

    /// The last error of a device that PyTorch raised.
    #[must_use]
    pub fn torch_oom(&self, device: i16) -> Option<&TorchOom> {
        self.story.ledger.devices.get(&device)?.torch.as_ref()?.ooms.last()
    }

    /// Devices whose PyTorch ran out.
    pub fn torch_devices(&self) -> impl Iterator<Item = i16> {
        self.story.ledger.devices.keys().copied().filter(|device| self.torch_oom(*device).is_some())
    }

    /// No request failed for good, neither of PyTorch nor of others.
    #[must_use]
    pub fn is_uneventful(&self) -> bool {
        let refused = self.story.ledger.refusals.iter().any(|it| it.is_final);
        !refused && self.torch_devices().next().is_none()
    }

    /// Everything that is known without replaying anything.
    #[must_use]
    pub fn sections(&self) -> Vec<Section> {
        if self.is_uneventful() {
            let section = Section::new("oom", "Out of memory");
            return vec![section.line(Mood::Good, "nothing ran out of memory").warn(self.story.doubts())];
        }
        let mut sections: Vec<Section> = POSTMORTEM.iter().flat_map(|entry| entry.of(&self.story)).collect();
        sections.extend(caught::section(&self.story, &self.caught));
        sections.extend(self.fragmentation_section());
        sections
    }

    /// How memory was cut up, and whether `empty_cache` would have helped.
    #[must_use]
    pub fn fragmentation_section(&self) -> Option<Section> {
        let (mut pools, mut lines) = (vec![], vec![]);
        for (device, found) in &self.fragmentation {
            let used = found.pools().into_iter().filter(|(_, pool)| pool.n_segments > 0);
            pools.extend(used.map(|(name, pool)| (*device, name, pool)));
            lines.extend(self.empty_cache(*device, found));
        }
        if pools.is_empty() {
            return None;
        }
        let table = Table::of(
            "pools",
            &pools,
            &[
                ("device", "device", &|(device, ..)| Value::text(format!("cuda:{device}"))),
                ("pool", "pool", &|(_, name, _)| Value::text(*name)),
                ("segments", "segments", &|(.., pool)| Value::Count(pool.n_segments)),
                ("reserved_bytes", "reserved", &|(.., pool)| Value::Bytes(pool.reserved)),
                ("allocated_bytes", "allocated", &|(.., pool)| Value::Bytes(pool.allocated)),
                ("free_bytes", "free", &|(.., pool)| Value::Bytes(pool.free())),
                ("free_blocks", "pieces", &|(.., pool)| Value::Count(pool.n_free)),
                ("largest_free_bytes", "largest", &|(.., pool)| Value::Bytes(pool.largest_free)),
                ("stranded_bytes", "stranded", &|(.., pool)| Value::Bytes(pool.stranded())),
                ("wholly_free_bytes", "wholly free", &|(.., pool)| Value::Bytes(pool.wholly_free)),
            ],
        );
        let section =
            Section::new("fragmentation", "How PyTorch's memory was cut up then").table(table).line(
                Mood::Note,
                "measured, when memory ran out. stranded: free beside something in use, so it cannot go back to the \
                 driver; wholly free: segments without anything in use. `gputrace replay` takes the gap apart further, \
                 simulated and when most was reserved; there, what is free in segments of other streams or pools than the \
                 last request's is `isolated`, stranded or not",
            );
        Some(section.lines(lines).warn(self.story.doubts()))
    }

    /// Whether `torch.cuda.empty_cache()` just before would have helped.
    fn empty_cache(&self, device: i16, found: &Fragmentation) -> Vec<(Mood, String)> {
        let wholly_free = found.wholly_free();
        let mut lines = vec![];
        if let Some(oom) = self.torch_oom(device) {
            let text = if wholly_free.0 == 0 {
                "empty_cache() would not have helped: PyTorch had given back every segment without a live block before it \
                 gave up"
                    .to_owned()
            } else {
                // What PyTorch could not flush: private pools, and blocks that streams still use.
                format!(
                    "empty_cache() would not have helped by itself: PyTorch calls it before it gives up; {} without live \
                     blocks were left, held by streams, CUDA graphs or private pools",
                    bytes(wholly_free)
                )
            };
            lines.push((Mood::Note, format!("cuda:{device}: {text}")));
            let wanted = oom.requested.unwrap_or(oom.bytes);
            let stranded = Bytes(found.small.stranded().0.saturating_add(found.large.stranded().0));
            if stranded >= wanted {
                let text = format!(
                    "cuda:{device}: {} were stranded, enough for the request of {}, but the largest piece had {}",
                    bytes(stranded),
                    bytes(wanted),
                    bytes(found.large.largest_free.max(found.small.largest_free))
                );
                lines.push((Mood::Warning, text));
            }
        }
        let mut refusals = self.story.ledger.refusals.iter();
        let refused = refusals.rfind(|it| it.device == device && it.is_final);
        if let Some(refusal) = refused.filter(|_| self.torch_oom(device).is_none()) {
            let owner = self.story.ledger.sites.owner(refusal.owner);
            let (mood, verdict) = match wholly_free >= refusal.bytes {
                true => (Mood::Warning, "torch.cuda.empty_cache() before it would have helped"),
                false => (Mood::Note, "empty_cache() would not have helped"),
            };
            let (kept, asked) = (bytes(wholly_free), bytes(refusal.bytes));
            let why = format!("PyTorch kept {kept} that nobody used, and {owner} asked for {asked}");
            lines.push((mood, format!("cuda:{device}: {verdict}: {why}")));
        }
        lines
    }

    /// How much PyTorch could have had: what it surely could, and what it perhaps could. Where a limit of its own stopped it,
    /// the trace does not say how high that was, only that the request did not fit under it.
    #[must_use]
    pub fn capacity(&self, device: i16) -> Option<(Bytes, Bytes)> {
        let oom = self.torch_oom(device)?;
        let (reserved, asked) = (oom.reserved.0, oom.bytes.0);
        Some(match oom.device {
            Some((free, _)) if free.0 < asked => {
                let full = Bytes(reserved.saturating_add(free.0));
                (full, full)
            }
            _ => (Bytes(reserved), Bytes(reserved.saturating_add(asked.saturating_sub(1)))),
        })
    }
}

/// What would have made it fit, on each device whose PyTorch ran out. `load` reads the same trace as requests.
pub fn remedies_sections(
    postmortem: &Postmortem,
    machine: Machine,
    load: impl FnOnce() -> Result<Trace, ImportError>,
) -> Vec<Section> {
    if postmortem.torch_devices().next().is_none() {
        return vec![];
    }
    let trace = load().map_err(|error| error.to_string());
    let of_device = |device: i16| {
        let stream = trace.as_ref().map_err(Clone::clone).and_then(|trace| {
            let stream = trace.devices.iter().find(|stream| i64::from(stream.device) == i64::from(device));
            stream.ok_or_else(|| "it has no requests of this device".to_owned())
        });
        let others = machine.limit.map(|_| others_then(stream.clone().ok(), machine)).unwrap_or_default();
        let of_others = others.iter().fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
        let left = machine.limit.map(|limit| Bytes(limit.0.saturating_sub(of_others)));
        let capacity = left.map(|left| (left, left)).or_else(|| postmortem.capacity(device))?;
        let found = stream.clone().and_then(|stream| remedies(stream, capacity, machine.torch_version));
        let named = others.iter().map(|(name, held)| format!("{name} {}", bytes(Bytes(*held))));
        let named = named.collect::<Vec<_>>().join(", ");
        let note = format!("others had their part of the limit then: {named}");
        let note = (!named.is_empty()).then_some((Mood::Note, note));
        Some(remedies_section(device, capacity, found, stream.ok()).lines(note))
    };
    postmortem.torch_devices().filter_map(of_device).collect()
}

/// Who else held how much when memory ran out.
fn others_then(stream: Option<&OpStream>, machine: Machine) -> Vec<(String, u64)> {
    if let Some(bytes) = machine.other {
        return vec![("others".to_owned(), bytes.0)];
    }
    let Some((stream, others)) = stream.and_then(|stream| Some((stream, stream.others.as_ref()?))) else {
        return vec![];
    };
    let at = stream.ops.iter().rposition(|op| matches!(op, Op::Oom(_))).unwrap_or(stream.ops.len());
    let held = others.names.iter().cloned().zip(others.at(at));
    held.filter(|(_, bytes)| *bytes > 0).collect()
}

/// What another setting would have made of the same requests.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Remedy {
    /// `PYTORCH_CUDA_ALLOC_CONF`; empty for none.
    pub options: String,
    /// Whether it fits.
    pub verdict: Verdict,
    /// Most reserved, in a world without limit.
    pub peak_reserved: Bytes,
    /// How sure that is.
    pub confidence: Confidence,
}

/// Whether a setting fits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Verdict {
    /// It fits.
    Fits,
    /// It fits if the limit was as high as it can have been.
    Perhaps,
    /// It runs out, too.
    RunsOut,
}

impl Verdict {
    /// For people and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Fits => "fits",
            Verdict::Perhaps => "perhaps",
            Verdict::RunsOut => "runs out",
        }
    }
}

/// Replays the requests up to the error with other settings, where at least `capacity.0` and at most `capacity.1` may be
/// reserved.
///
/// # Errors
/// Why the history cannot be replayed.
fn remedies(
    stream: &OpStream,
    capacity: (Bytes, Bytes),
    torch_version: Option<(u8, u8)>,
) -> Result<Vec<Remedy>, String> {
    let laboratory = Laboratory::new(stream)?;
    let version = laboratory.self_check(torch_version).torch_version;
    let recorded = stream.settings.options.clone().unwrap_or_default();
    let mut remedies = vec![];
    for options in tune::advised(version, &recorded).map_err(|error| error.0)? {
        // The capacity is what was left for PyTorch: others have had their part of it.
        let question = |limit: Option<Bytes>| Question {
            limit: limit.map(|limit| limit.0),
            ..Question::torch(version, &options)
        };
        let fits = |limit| laboratory.guess(&question(Some(limit))).is_ok_and(|outcome| outcome.fits());
        let verdict = match () {
            () if fits(capacity.0) => Verdict::Fits,
            () if capacity.1 > capacity.0 && fits(capacity.1) => Verdict::Perhaps,
            () => Verdict::RunsOut,
        };
        let Ok(answer) = laboratory.answer(&question(None)) else { continue };
        remedies.push(Remedy {
            options,
            verdict,
            peak_reserved: Bytes(answer.outcome.books.reserved.peak),
            confidence: answer.confidence,
        });
    }
    remedies[1..].sort_by_key(|remedy| (remedy.verdict, remedy.peak_reserved));
    Ok(remedies)
}

/// What would have made it fit. The first of `remedies` is the recorded setting.
fn remedies_section(
    device: i16,
    capacity: (Bytes, Bytes),
    remedies: Result<Vec<Remedy>, String>,
    stream: Option<&OpStream>,
) -> Section {
    let section = Section::new("remedies", format!("What would have made it fit on cuda:{device}"));
    let remedies = match remedies {
        Ok(remedies) => remedies,
        Err(why) => return section.line(Mood::Note, format!("this cannot be replayed: {why}")),
    };
    let options = |it: &Remedy| if it.options.is_empty() { "(none)".to_owned() } else { it.options.clone() };
    let table = Table::of(
        "settings",
        &remedies,
        &[
            ("peak_reserved_bytes", "reserved", &|it| Value::Bytes(it.peak_reserved)),
            ("verdict", "verdict", &|it| Value::text(it.verdict.name())),
            ("confidence", "sure", &|it| Value::text(it.confidence.name())),
            ("options", "PYTORCH_CUDA_ALLOC_CONF", &|it| Value::text(options(it))),
        ],
    );
    let section = section.fact("capacity_bytes", "PyTorch could have", Value::Bytes(capacity.0)).fact(
        "capacity_at_most_bytes",
        "at most",
        Value::Bytes(capacity.1),
    );
    let best = remedies[1..].iter().find(|remedy| remedy.verdict != Verdict::RunsOut);
    let section = match (remedies.first().map(|recorded| recorded.verdict), best) {
        (_, Some(best)) => {
            let perhaps = match best.verdict {
                Verdict::Perhaps => "perhaps, if its limit was high enough (--limit says how high)",
                Verdict::Fits | Verdict::RunsOut => "this setting would have",
            };
            section.line(Mood::Good, format!("{perhaps}:")).line(
                Mood::Command,
                format!("export PYTORCH_CUDA_ALLOC_CONF={}", best.options),
            )
        }
        (Some(Verdict::Fits), None) => section.line(
            Mood::Note,
            "with the recorded setting the same requests fit in the replay: other memory of the device came or went",
        ),
        _ => section.line(Mood::Bad, "no setting of the allocator: the program needs less memory, or more of it"),
    };
    let section = match stream.map(Bounds::of) {
        Some(bounds) if best.is_none() => section.remark(
            "needed_bytes",
            "in use at once",
            Value::Bytes(Bytes(bounds.requested)),
            "the most that was requested at one time, without the request that failed",
        ),
        _ => section,
    };
    section.table(table).line(
        Mood::Note,
        "replayed up to the end of the trace: what a program that went on would have asked for is not known",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scene::recording;

    fn text(scene: &str) -> String {
        let postmortem = Postmortem::of(&Source::of("train.gtr", recording(scene)));
        format!("{:?}", postmortem.fragmentation_section())
    }

    #[test]
    fn empty_cache_helps_others_than_pytorch() {
        let scene = |bytes: &str| {
            format!(
                "Alloc addr=a bytes=20M by=libc10_cuda.so
                 block addr=a bytes=4M requested=4M allocated=4M reserved=20M
                 free addr=a bytes=4M allocated=0 reserved=20M
                 Create bytes={bytes} result=2 by=libnccl.so.2"
            )
        };
        assert!(text(&scene("16M")).contains("before it would have helped"), "{}", text(&scene("16M")));
        assert!(
            text(&scene("21M")).contains("would not have helped: PyTorch kept 20.0"),
            "{}",
            text(&scene("21M"))
        );
    }

    #[test]
    fn stranded_memory_is_told_when_it_would_have_been_enough() {
        let found = text(
            "Alloc addr=0x10000000 bytes=20M by=libc10_cuda.so
             block addr=0x10000000 bytes=8M requested=8M allocated=8M reserved=20M
             block addr=0x10800000 bytes=1M requested=1M allocated=9M reserved=20M
             free addr=0x10000000 bytes=8M allocated=1M reserved=20M
             MemInfo bytes=3M extra=24M
             oom bytes=14M requested=14M allocated=1M reserved=20M",
        );
        assert!(
            found.contains("enough for the request of 14.00 MiB, but the largest piece had 11.00 MiB"),
            "{found}"
        );
        assert!(found.contains("empty_cache() would not have helped"), "{found}");
    }

    #[test]
    fn the_capacity_is_known_where_the_device_was_full_and_bounded_where_a_limit_was() {
        let capacity = |free: &str| {
            let scene = format!("MemInfo bytes={free} extra=24M\noom bytes=4M allocated=1M reserved=20M");
            Postmortem::of(&Source::of("train.gtr", recording(&scene))).capacity(0).unwrap()
        };
        assert_eq!(capacity("3M"), (Bytes(23 << 20), Bytes(23 << 20)));
        assert_eq!(capacity("9M"), (Bytes(20 << 20), Bytes((24 << 20) - 1)));
    }

    #[test]
    fn a_trace_without_an_error_has_nothing_to_say() {
        let postmortem = Postmortem::of(&Source::of("train.gtr", recording("Alloc addr=a bytes=1M")));
        assert!(postmortem.is_uneventful() && postmortem.fragmentation_section().is_none());
    }
}
