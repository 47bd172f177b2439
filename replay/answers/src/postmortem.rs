//! `gputrace oom`: why a program ran out of memory, and what would have made it fit.

use std::collections::{BTreeMap, BTreeSet};

use gputrace_schemas::event::{Bytes, Event, Nanos};
use gputrace_sim::ops::{Op, OpStream};
use gputrace_sim::policies::torch;
use rustc_hash::FxHashMap;

use crate::caught::{self, Caught, CaughtOom};
use crate::leaks::{GrowingSite, Leaks, Suppressions, Wanted};
use crate::remedies::{Capacity, Remedy, Trial, Verdict, remedies, remedies_section};
use crate::whatif::Machine;
use gputrace_analyse::fragmentation::Fragmentation;
use gputrace_analyse::growth::Growth;
use gputrace_analyse::held::{HeldAt, Sign};
use gputrace_analyse::live;
use gputrace_analyse::repetition::{Repeated, Rounds};
use gputrace_analyse::story::Story;
use gputrace_report::model::{Item, Mood, Section, Table, Value};
use gputrace_report::sections::POSTMORTEM;
use gputrace_trace::import::Requests;
use gputrace_trace::ledger::{Ledger, PjrtOom, SiteId, TorchOom, Wall, Watch};
use gputrace_trace::source::Source;
use gputrace_trace::words::{bytes, quote};

/// The findings at the last out-of-memory error of every device.
pub struct Postmortem {
    /// The story.
    pub story: Story,
    /// How PyTorch's memory was cut up then, by device.
    pub fragmentation: BTreeMap<i16, Fragmentation>,
    /// Errors that were caught.
    pub caught: Vec<CaughtOom>,
    /// Memory that kept growing up to the end.
    pub leaks: Leaks,
    /// What the line whose request failed requested in earlier turns, by device.
    pub usual: BTreeMap<i16, Usual>,
}

/// What a line requested in earlier turns of the work.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Usual {
    /// The largest request of a turn: the median.
    pub median: Bytes,
    /// The largest of all.
    pub largest: Bytes,
    /// Turns in which it requested something.
    pub turns: u64,
    /// What the turn of the request that failed had requested and still held.
    pub held: Bytes,
    /// Whether the request that failed grew with the square of what its turn works on.
    pub square: Option<Square>,
}

/// A request that is larger than in an earlier turn by the square of what other lines' requests are.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Square {
    /// So many times what other lines requested then.
    pub times: f64,
    /// How many lines.
    pub lines: u64,
}

/// What each line requested at most in one turn.
type ByLine = FxHashMap<SiteId, Bytes>;

impl Square {
    /// Less is no different input.
    const LEAST_TIMES: f64 = 1.5;
    /// So many lines show how much larger the input is.
    const LEAST_LINES: usize = 3;
    /// Shapes are rounded a little, as by a stride.
    const ROUNDED: f64 = 0.03;

    /// Of the request of a line that failed, and what it requested in another turn. Most of the other lines whose requests differ show how much
    /// larger the input is.
    fn of((failed, asked): (SiteId, Bytes), now: &ByLine, then: &ByLine) -> Option<Square> {
        let ratio = |now: Bytes, then: Bytes| now.0 as f64 / then.0.max(1) as f64;
        let is_about = |a: f64, b: f64| (a / b - 1.0).abs() <= Square::ROUNDED;
        let times = ratio(asked, *then.get(&failed)?).sqrt();
        let others = now.iter().filter(|(site, _)| **site != failed);
        let ratios = others.filter_map(|(site, now)| Some(ratio(*now, *then.get(site)?)));
        let other: Vec<f64> = ratios.filter(|ratio| !is_about(*ratio, 1.0)).collect();
        let lines = other.iter().filter(|ratio| is_about(**ratio, times)).count();
        let is_known = lines >= Square::LEAST_LINES && lines * 2 > other.len();
        (is_known && times >= Square::LEAST_TIMES).then_some(Square { times, lines: lines as u64 })
    }
}

impl Usual {
    /// Of the lines whose requests failed.
    fn of(story: &Story, rounds: &Rounds<'_>) -> BTreeMap<i16, Usual> {
        let failures = story.lifetimes.iter().flat_map(|lifetimes| &lifetimes.at_failure);
        failures.filter_map(|held| Some((held.device, Usual::of_line(story, held, rounds)?))).collect()
    }

    fn of_line(story: &Story, held: &HeldAt, rounds: &Rounds<'_>) -> Option<Usual> {
        let error = story.ledger.devices().get(&held.device)?.torch.as_ref()?.ooms.last()?;
        let times: Vec<Nanos> =
            held.requested_before.iter().map(|(time, _)| *time).chain([error.time]).collect();
        let turns = rounds.turns_of(error.stack, &times)?;
        let (now, before) = turns.split_last()?;
        let mut by_turn: BTreeMap<usize, Bytes> = BTreeMap::new();
        // What this turn requested there before it failed is of the same input.
        for (turn, (_, size)) in before.iter().zip(&held.requested_before).filter(|(turn, _)| *turn != now) {
            let largest = by_turn.entry(*turn).or_default();
            *largest = (*largest).max(*size);
        }
        let mut sizes: Vec<Bytes> = by_turn.values().copied().collect();
        sizes.sort_unstable();
        let (median, largest) = (*sizes.get(sizes.len() / 2)?, *sizes.last()?);
        let then = by_turn.iter().rfind(|(_, size)| **size == median).map(|(turn, _)| *turn)?;
        let times: Vec<Nanos> = held.asked_before.iter().map(|asked| asked.since).collect();
        let turns = rounds.turns_of(error.stack, &times)?;
        let all = || held.asked_before.iter().zip(&turns);
        let of_turn = |turn: usize| {
            let mut lines = ByLine::default();
            for (asked, _) in all().filter(|(_, of)| **of == turn) {
                let largest = lines.entry(asked.site).or_default();
                *largest = (*largest).max(asked.requested);
            }
            lines
        };
        let asked = error.requested.unwrap_or(error.bytes);
        let own = all().filter(|(asked, of)| *of == now && asked.is_held);
        Some(Usual {
            median,
            largest,
            turns: by_turn.len() as u64,
            held: Bytes(own.map(|(asked, _)| asked.requested.0).sum()),
            square: Square::of((error.site, asked), &of_turn(*now), &of_turn(then)),
        })
    }
}

/// The part of a device's peak that must have grown for an error to be called the end of a leak: one in so many.
const MUCH: u64 = 10;

/// What one pass over a trace looks for.
struct Signs<'a> {
    last: LastOom,
    caught: Caught<'a>,
    growth: Growth,
}

impl Watch for Signs<'_> {
    fn begin(&mut self, ledger: &mut Ledger) {
        self.last.begin(ledger);
        self.caught.begin(ledger);
        self.growth.begin(ledger);
    }

    fn event(&mut self, ledger: &mut Ledger, event: &Event) {
        self.last.event(ledger, event);
        self.caught.event(ledger, event);
        self.growth.event(ledger, event);
    }
}

/// Errors of a program at which its memory is looked at in passing. Where there are more, the last ones are found in another pass.
const MOST_LOOKED_AT: usize = 64;

/// After how many events each device last ran out, and how its memory was cut up at the last error that was looked at.
#[derive(Default)]
struct LastOom {
    n_events: u64,
    places: BTreeMap<i16, u64>,
    n_looked_at: usize,
    cut_up: BTreeMap<i16, (u64, Fragmentation)>,
}

impl LastOom {
    /// How each device's memory was cut up when it last ran out.
    fn fragmentation(self, source: &Source) -> BTreeMap<i16, Fragmentation> {
        let LastOom { places, mut cut_up, .. } = self;
        cut_up.retain(|device, (place, _)| places.get(device) == Some(place));
        if cut_up.len() < places.len() {
            live::visit(source, &places, |ledger, device, _| {
                cut_up.insert(device, (places[&device], Fragmentation::of(ledger, device)));
            });
        }
        let found = cut_up.into_iter().map(|(device, (_, found))| (device, found));
        found.filter(|(_, found)| *found != Fragmentation::default()).collect()
    }
}

impl Watch for LastOom {
    fn begin(&mut self, _ledger: &mut Ledger) {
        *self = LastOom::default();
    }

    fn event(&mut self, ledger: &mut Ledger, _event: &Event) {
        self.n_events += 1;
        if let Some(oom) = ledger.ran_out() {
            let device = oom.device;
            self.places.insert(device, self.n_events);
            if self.n_looked_at < MOST_LOOKED_AT {
                self.n_looked_at += 1;
                self.cut_up.insert(device, (self.n_events, Fragmentation::of(ledger, device)));
            }
        }
    }
}

impl Postmortem {
    /// Of a trace.
    #[must_use]
    pub fn of(source: &Source) -> Postmortem {
        let caught = Caught::new(source.definitions());
        let mut signs = Signs { last: LastOom::default(), caught, growth: Growth::default() };
        // What would have made it fit is asked next, where anything ran out.
        let story = Story::with_books(source, source.books_and_requests(&mut signs));
        let Signs { last, caught, growth } = signs;
        let leaks = Leaks::find(
            &story,
            source.definitions(),
            &growth,
            &Wanted::default(),
            &mut Suppressions::default(),
        );
        let caught = caught.finish(&story.ledger);
        let usual = Usual::of(&story, &Rounds::of(&story.ledger, source.definitions(), growth.repetition()));
        Postmortem { story, fragmentation: last.fragmentation(source), caught, leaks, usual }
    }

    /// Of a story whose growth was watched. What was caught is looked for where a program continued after an error, and how memory was cut up where
    /// the driver refused a library: each takes another pass.
    #[must_use]
    pub fn of_story(story: Story, source: &Source, growth: &Growth) -> Postmortem {
        let leaks = Leaks::find(
            &story,
            source.definitions(),
            growth,
            &Wanted::default(),
            &mut Suppressions::default(),
        );
        let usual = Usual::of(&story, &Rounds::of(&story.ledger, source.definitions(), growth.repetition()));
        let mut found = Postmortem { story, fragmentation: BTreeMap::new(), caught: vec![], leaks, usual };
        if found.torch_devices().any(|device| found.went_on_after(device, <[TorchOom]>::first) > 0) {
            let mut caught = Caught::new(source.definitions());
            let again = Story::watched(source, &mut caught);
            found.caught = caught.finish(&again.ledger);
        }
        if found.story.ledger.refusals.iter().any(|refusal| refusal.is_final) {
            let mut last = LastOom::default();
            Story::watched(source, &mut last);
            found.fragmentation = last.fragmentation(source);
        }
        found
    }

    /// Blocks that PyTorch handed out on a device after one of its errors.
    pub(super) fn went_on_after(&self, device: i16, which: fn(&[TorchOom]) -> Option<&TorchOom>) -> u64 {
        let torch = self.story.ledger.devices().get(&device).and_then(|books| books.torch.as_ref());
        let error = torch.and_then(|torch| Some((torch, which(&torch.ooms)?)));
        error.map_or(0, |(torch, error)| torch.allocations.saturating_sub(error.allocations_before))
    }

    /// What other settings would have made of the requests up to the last error of a device.
    ///
    /// # Errors
    /// Why that cannot be told.
    pub(super) fn trial(&self, device: i16, stream: &OpStream) -> Result<Trial, String> {
        let capacity = self.capacity(device).ok_or("PyTorch's limit is not known")?;
        remedies(stream, capacity, None)
    }

    /// The last error of a device that PyTorch raised.
    pub(super) fn torch_oom(&self, device: i16) -> Option<&TorchOom> {
        self.story.ledger.devices().get(&device)?.torch.as_ref()?.ooms.last()
    }

    /// Devices whose PyTorch ran out.
    pub fn torch_devices(&self) -> impl Iterator<Item = i16> {
        self.story.ledger.devices().keys().copied().filter(|device| self.torch_oom(*device).is_some())
    }

    /// Devices on which JAX ran out, and its last error there.
    pub(super) fn jax_ooms(&self) -> impl Iterator<Item = (i16, &PjrtOom)> {
        let devices = self.story.ledger.devices().iter();
        devices.filter_map(|(device, books)| Some((*device, books.pjrt.as_ref()?.ooms.last()?)))
    }

    /// No request failed for good, neither of PyTorch nor of JAX nor of others.
    #[must_use]
    pub fn is_uneventful(&self) -> bool {
        let refused = self.story.ledger.refusals.iter().any(|it| it.is_final);
        !refused && self.torch_devices().next().is_none() && self.jax_ooms().next().is_none()
    }

    /// Everything that is known without replaying anything.
    #[must_use]
    pub fn sections(&self) -> Vec<Section> {
        if self.is_uneventful() {
            let section = Section::new("oom", "Out of memory");
            let section = match self.story.is_unreadable() {
                true => section.line(Mood::Warning, "cannot tell: no event of this trace can be read"),
                false => section.line(Mood::Good, "nothing ran out of memory"),
            };
            return vec![section.warn(self.story.caveats())];
        }
        let mut sections: Vec<Section> = self.leak_section().into_iter().collect();
        sections.extend(POSTMORTEM.iter().flat_map(|entry| entry.of(&self.story)));
        sections.extend(caught::section(&self.story, &self.caught));
        sections.extend(self.fragmentation_section());
        sections
    }

    /// What grows on a device where memory ran out, largest first, where it is much of what was held: then the error is the
    /// end of a leak, and no setting mends that.
    pub(super) fn leaks_of(&self, device: i16) -> Vec<&GrowingSite> {
        let name = format!("cuda:{device}");
        let is_growth = |site: &&GrowingSite| site.named.device == name && !self.is_first_pass(device, site);
        let growing: Vec<_> = self.leaks.growing.iter().filter(is_growth).collect();
        let grown = growing.iter().fold(0u64, |sum, site| sum.saturating_add(site.growth.0));
        let held = self.story.ledger.devices().get(&device).map_or(0, |books| books.physical.peak().0);
        if grown.saturating_mul(MUCH) >= held { growing } else { vec![] }
    }

    /// Whether what a line left was made once, a block for each layer or each parameter: a model's first pass, as no backward pass has begun,
    /// runs a line no more often than it has weights of one size, and an optimizer's first step makes its state.
    fn is_first_pass(&self, device: i16, site: &GrowingSite) -> bool {
        let Some(lifetimes) = self.story.lifetimes.as_ref() else { return false };
        let Some(held) = lifetimes.at_failure.iter().find(|it| it.device == device) else { return false };
        let of_line = |site| held.holders.iter().find(|it| it.site == site);
        let Some(holder) = site.place.and_then(|place| of_line(place.site)) else { return false };
        let turns = |it: &Repeated| it.turns.unwrap_or(it.left).max(it.left);
        let turns = site.repeated.as_ref().map_or(u64::MAX, turns);
        let n_passes = lifetimes.n_passes();
        // Models that are made again and again are no pass through one.
        let is_of_layers = n_passes == 0 && held.is_one_pass(holder, turns) && !holder.signs.has(Sign::Model);
        is_of_layers || n_passes <= 1 && holder.signs.has(Sign::Optimizer)
    }

    /// Says that memory was used up by what grows.
    fn leak_section(&self) -> Option<Section> {
        let refused = self.story.ledger.refusals.iter().filter(|it| it.is_final).map(|it| it.device);
        let jax = self.jax_ooms().map(|(device, _)| device);
        let devices: BTreeSet<i16> = self.torch_devices().chain(jax).chain(refused).collect();
        let mut lines = vec![];
        for device in devices {
            let growing = self.leaks_of(device);
            let Some(largest) = growing.first() else { continue };
            let grown = growing.iter().fold(0u64, |sum, site| sum.saturating_add(site.growth.0));
            let each =
                largest.per_step.map_or_else(String::new, |each| format!(", {} per step", bytes(each)));
            let of_many =
                if growing.len() > 1 { format!(" ({} call sites)", growing.len()) } else { String::new() };
            let text = format!(
                "cuda:{device}: a leak: {} kept growing up to the error{of_many}, most of it {} from {}{each}",
                bytes(Bytes(grown)),
                bytes(largest.growth),
                largest.named.site
            );
            lines.push((Mood::Bad, text));
        }
        let section = Section::new("leak", "Growing memory used up the device");
        let path = self.story.path.clone();
        (!lines.is_empty())
            .then(|| section.lines(lines).line(Mood::Command, format!("gputrace leaks {path}")))
    }

    /// How memory was cut up, and whether `empty_cache` would have helped.
    fn fragmentation_section(&self) -> Option<Section> {
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
            Section::new("fragmentation", "Fragmentation of PyTorch's memory at the error").table(table).line(
                Mood::Note,
                "measured when memory ran out. `stranded` is free memory beside a block in use, so it cannot be released to the driver; `wholly free` are segments without a block in use. `gputrace replay` breaks the gap down further, simulated when most was reserved; it calls memory in segments of other streams or pools than the last request's `isolated`, whether stranded or not",
            );
        Some(section.lines(lines).warn(self.story.caveats()))
    }

    /// Whether `torch.cuda.empty_cache()` just before would have helped.
    fn empty_cache(&self, device: i16, found: &Fragmentation) -> Vec<(Mood, String)> {
        let wholly_free = found.wholly_free();
        let mut lines = vec![];
        if let Some(oom) = self.torch_oom(device) {
            let text = if wholly_free.0 == 0 {
                "empty_cache() would not have helped: PyTorch had released every segment without a live block before the error"
                    .to_owned()
            } else {
                // What PyTorch could not flush: private pools, and blocks that streams still use.
                format!(
                    "empty_cache() alone would not have helped: PyTorch calls it before it fails; {} without live blocks remained, held by streams, CUDA graphs or private pools",
                    bytes(wholly_free)
                )
            };
            lines.push((Mood::Note, format!("cuda:{device}: {text}")));
            let wanted = oom.requested.unwrap_or(oom.bytes);
            let is_small = wanted.0 <= torch::SMALL_REQUEST;
            let (name, pool) = if is_small { ("small", found.small) } else { ("large", found.large) };
            let (stranded, largest) = (pool.stranded(), pool.largest_free);
            if stranded >= wanted {
                let why = match largest < wanted {
                    true => format!("but the largest free block had {}", bytes(largest)),
                    false => format!(
                        "and a free block of {} was large enough: it belongs to another stream or a private pool, or streams still used it",
                        bytes(largest)
                    ),
                };
                let (stranded, wanted) = (bytes(stranded), bytes(wanted));
                let text = format!(
                    "cuda:{device}: {stranded} of the pool of {name} blocks were stranded, enough for the request of {wanted}, {why}"
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
            let why = match wholly_free.0 {
                0 => format!("PyTorch had no unused segment, and {owner} requested {asked}"),
                _ => format!("PyTorch kept {kept} unused, and {owner} requested {asked}"),
            };
            lines.push((mood, format!("cuda:{device}: {verdict}: {why}")));
        }
        lines
    }

    /// Whether as much lay unused as was requested, and more than what grows: without the pieces, the request would have fit.
    fn is_of_pieces(&self, device: i16) -> bool {
        let grown = self.leaks_of(device).iter().fold(0_u64, |sum, site| sum.saturating_add(site.growth.0));
        self.torch_oom(device).is_some_and(|oom| {
            let unused = oom.reserved.0.saturating_sub(oom.allocated.0);
            unused >= oom.bytes.0 && unused > grown
        })
    }

    /// How much PyTorch could have had.
    #[must_use]
    pub fn capacity(&self, device: i16) -> Option<Capacity> {
        let oom = self.torch_oom(device)?;
        let (reserved, beyond) = (oom.reserved.0, oom.segment().0.saturating_sub(1));
        Some(match (oom.wall(), oom.device) {
            // What the driver refused it did not have then, whatever was free when PyTorch asked afterwards.
            (Wall::Device, Some((free, _))) => {
                Capacity::Device(Bytes(reserved.saturating_add(free.0.min(beyond))))
            }
            _ => Capacity::Limit(Bytes(reserved), Bytes(reserved.saturating_add(beyond))),
        })
    }
}

/// What would have made it fit, on each device whose PyTorch ran out.
pub fn remedies_sections(postmortem: &Postmortem, machine: Machine, trace: &dyn Requests) -> Vec<Section> {
    let card = machine.limit.or(machine.device_memory);
    if postmortem.torch_devices().next().is_none() {
        return card.map(|card| would_it_fit(&postmortem.story, card)).into_iter().collect();
    }
    let trace = trace.requests().map_err(ToString::to_string);
    let of_device = |device: i16| {
        let stream = trace.as_ref().map_err(Clone::clone).and_then(|trace| {
            let stream = trace.devices.iter().find(|stream| i64::from(stream.device) == i64::from(device));
            stream.ok_or_else(|| "it has no requests of this device".to_owned())
        });
        let others = card.map(|_| others_then(stream.clone().ok(), machine)).unwrap_or_default();
        let of_others = others.iter().fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
        let left = card.map(|limit| Bytes(limit.0.saturating_sub(of_others)));
        let capacity =
            left.map(|left| Capacity::Limit(left, left)).or_else(|| postmortem.capacity(device))?;
        let found = stream.clone().and_then(|stream| remedies(stream, capacity, machine.torch_version));
        // The allocator has a part in it, and the replay is the run.
        let is_worth_it = found.as_ref().is_ok_and(|trial| {
            let fits = |best: &Remedy| best.verdict == Verdict::Fits;
            trial.best().is_ok_and(|(_, best)| best.is_some_and(fits))
        }) && postmortem.is_of_pieces(device);
        let report = is_worth_it.then(|| {
            let command = format!("gputrace reproduce -o repro.py {}", quote(postmortem.story.named()));
            let text = "this error is worth a bug report: the allocator contributed to it";
            [(Mood::Note, text.to_owned()), (Mood::Command, command)]
        });
        let named = others.iter().map(|(name, held)| format!("{name} {}", bytes(Bytes(*held))));
        let named = named.collect::<Vec<_>>().join(", ");
        let note = format!("others used part of the limit then: {named}");
        let note = (!named.is_empty()).then_some((Mood::Note, note));
        let per_step = postmortem.leaks_of(device).first().map(|largest| largest.per_step);
        let section = remedies_section(device, capacity, found, stream.ok(), per_step);
        Some(section.lines(note).lines(report.into_iter().flatten()))
    };
    postmortem.torch_devices().filter_map(of_device).collect()
}

/// The answer of [`remedies_sections`] alone, without its figures: whether a setting would have made it fit, and which.
pub fn would_have_fit(postmortem: &Postmortem, machine: Machine, trace: &dyn Requests) -> Vec<Section> {
    let mut sections = remedies_sections(postmortem, machine, trace);
    for section in &mut sections {
        section.items.retain(|item| matches!(item, Item::Line(..)));
        let has_command = matches!(section.items.get(1), Some(Item::Line(Mood::Command, _)));
        section.items.truncate(1 + usize::from(has_command));
    }
    sections
}

/// What another card would have made of a run that did not run out: a question for `replay`.
fn would_it_fit(story: &Story, card: Bytes) -> Section {
    let limit =
        if card.0.is_multiple_of(1 << 20) { format!("{}MiB", card.0 >> 20) } else { card.0.to_string() };
    let command = format!("gputrace replay --limit {limit} {}", quote(story.named()));
    Section::new("limit", "Would it fit in less memory?")
        .line(Mood::Note, format!("to see whether it fits in {}, and what would make it fit:", bytes(card)))
        .line(Mood::Command, command)
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

#[cfg(test)]
mod tests {
    use super::*;
    use gputrace_trace::scene::recording;

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
            found.contains("enough for the request of 14.00 MiB, but the largest free block had 11.00 MiB"),
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
        assert_eq!(capacity("3M"), Capacity::Device(Bytes(23 << 20)));
        // A request of 4 MiB needs a segment of 20 MiB.
        assert_eq!(capacity("9M"), Capacity::Device(Bytes(29 << 20)));
        assert_eq!(capacity("20M"), Capacity::Limit(Bytes(20 << 20), Bytes((40 << 20) - 1)));
    }

    #[test]
    fn a_trace_without_an_error_has_nothing_to_say() {
        let postmortem = Postmortem::of(&Source::of("train.gtr", recording("Alloc addr=a bytes=1M")));
        assert!(postmortem.is_uneventful() && postmortem.fragmentation_section().is_none());
    }

    fn whole(scene: &str) -> Vec<String> {
        let postmortem = Postmortem::of(&Source::of("train.gtr", recording(scene)));
        postmortem.sections().iter().map(|section| format!("{}: {:?}", section.name, section)).collect()
    }

    #[test]
    fn an_error_at_the_end_of_a_leak_is_called_so_first() {
        let mut scene = "Alloc addr=0x10000000 bytes=500M by=libc10_cuda.so\n".to_owned();
        let mut held = 0;
        for step in 0..100 {
            held += 4;
            scene += &format!(
                "block addr=a{step} bytes=8M requested=8M allocated={}M reserved=500M by=fwd@/job/a.py:2\n",
                held + 4
            );
            scene += &format!(
                "block addr=k{step} bytes=4M requested=4M allocated={}M reserved=500M by=keep@/job/a.py:9\n",
                held + 8
            );
            scene += &format!("free addr=a{step} bytes=8M allocated={held}M reserved=500M\n");
        }
        let ends = "MemInfo bytes=3M extra=1G\noom bytes=40M requested=40M allocated=400M reserved=500M";
        let found = whole(&(scene.clone() + ends));
        assert!(found[0].starts_with("leak: ") && found[0].contains("keep (/job/a.py:9)"), "{}", found[0]);
        assert!(found[0].contains("gputrace leaks train.gtr"), "{}", found[0]);
        // The same without what is kept.
        let healthy: String =
            scene.lines().filter(|line| !line.contains("addr=k")).map(|line| format!("{line}\n")).collect();
        let found = whole(&(healthy + ends));
        assert!(found.iter().all(|section| !section.starts_with("leak: ")), "{found:?}");
    }

    #[test]
    fn small_and_large_pieces_are_not_taken_for_each_other() {
        // 16 MiB are free in the large pool; the request is for the small one.
        let found = text(
            "Alloc addr=0x10000000 bytes=20M by=libc10_cuda.so
             block addr=0x10000000 bytes=4M requested=4M allocated=4M reserved=20M
             MemInfo bytes=1M extra=24M
             oom bytes=512 requested=4 allocated=4M reserved=20M",
        );
        assert!(!found.contains("were stranded, enough"), "{found}");
    }

    #[test]
    fn what_the_replay_does_not_reproduce_is_no_verdict() {
        let first = "Alloc addr=0x10000000 bytes=16M by=libcudart.so,libc10_cuda.so in_allocate=1
             block addr=0x10000000 bytes=15M requested=15M allocated=15M reserved=16M\n";
        let emptied = "free addr=0x10000000 bytes=15M allocated=0 reserved=16M
             Free addr=0x10000000 by=libcudart.so,libc10_cuda.so\n";
        let last = |reserved: u64| {
            format!(
                "Alloc bytes=40M result=2 by=libcudart.so,libc10_cuda.so in_allocate=1
                 MemInfo bytes=10M extra=140M
                 oom bytes=40M requested=40M allocated=0 reserved={reserved}M"
            )
        };
        let remedies = |scene: &str| {
            let source = Source::of("train.gtr", recording(scene));
            let sections = remedies_sections(&Postmortem::of(&source), Machine::default(), &source);
            format!("{sections:?}")
        };
        let found = remedies(&(first.to_owned() + &last(16)));
        assert!(!found.contains("cannot tell") && !found.contains("guess"), "{found}");
        // Others took what it had given back: what was there at the end was not all that there had been.
        let found = remedies(&(first.to_owned() + emptied + &last(0)));
        assert!(
            found.contains(
                "cannot tell what would have helped: the replay with the recorded setting runs out earlier"
            ),
            "{found}"
        );
        assert!(found.contains("guess") && !found.contains("export PYTORCH_CUDA_ALLOC_CONF"), "{found}");
    }

    #[test]
    fn what_jax_was_refused_has_a_section() {
        let scene = "Alloc addr=a bytes=64M by=libfoo.so,xla_cuda_plugin.so
             compiled handle=f bytes=10M text=jit_step
             buffer addr=p bytes=8M by=init@/job/a.py:2
             launched handle=f by=step@/job/a.py:4
             jax_oom dev=-1 bytes=1G handle=f text=no_memory by=step@/job/a.py:4";
        let sections = Postmortem::of(&Source::of("jax.gtr", recording(scene))).sections();
        assert!(sections.iter().any(|section| section.name == "jax_oom"), "{sections:?}");
    }
}
