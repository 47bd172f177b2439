//! All that may be a leak, by its names: before anybody says which are known, or too small.

use std::cmp::Reverse;

use gputrace_schemas::event::{Bytes, HOST, Nanos};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use super::{AbandonedPool, Named, Unfreed};
use crate::callers::callers;
use gputrace_analyse::growth::{Course, Growth, MIN_RISES, Place, Rising, Spread, Trend};
use gputrace_analyse::repetition::{By, Kept, REPEATED, Repeated, Rounds};
use gputrace_analyse::story::{End, Story};
use gputrace_report::sections::pools;
use gputrace_trace::Definitions;
use gputrace_trace::ledger::pools::why_abandoned;
use gputrace_trace::ledger::{
    Account, Books, SiteId, StepSource, is_arena, is_heap, is_in_module, is_pinned_cache,
};
use gputrace_trace::owners::TORCH;

/// Turns of a loop that show a program at work, where they call a model and nothing is given back: as many as must rise to be a trend, twice.
const LEAST_TURNS: u64 = 2 * MIN_RISES as u64;

/// The findings in a trace.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Found {
    /// Accounts that grow in many places.
    pub(super) spread: Vec<RisingSite>,
    /// Sites that rise.
    pub(super) rising: Vec<RisingSite>,
    /// What was never given back, and of which account.
    pub(super) not_freed: Vec<(Account, Unfreed)>,
    /// Pools that nobody can use.
    pub(super) abandoned: Vec<AbandonedPool>,
    /// Bytes that PyTorch's cache held at the end without anybody using them.
    pub cached: Bytes,
    /// How steps were counted, and how many there were.
    pub(super) counted: Option<StepSource>,
    pub(super) n_steps: Option<u64>,
    /// Turns of loops that were seen, where none of them is known to be the steps.
    pub(super) loops: Vec<u64>,
    pub(super) can_tell: bool,
    /// The trace has its end.
    pub(super) is_complete: bool,
    /// Why its numbers may be wrong.
    pub doubts: Option<String>,
    /// The process requested memory at all.
    pub asked_for_memory: bool,
}

/// A site that rises.
#[derive(Clone, PartialEq, Debug, Deserialize, Serialize)]
pub struct RisingSite {
    /// As it is shown.
    pub(super) named: Named,
    /// As rules know it: without its callers.
    pub(super) known_as: Named,
    pub(super) account: Account,
    pub(super) trend: Trend,
    pub(super) course: Course,
    pub(super) n_windows: usize,
    /// How often it left memory.
    #[serde(default)]
    pub(super) repeated: Option<Repeated>,
    /// Which line it is in the books, while these are there.
    #[serde(skip)]
    pub(super) place: Option<Place>,
}

impl RisingSite {
    /// By how much.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes(self.trend.growth)
    }
}

impl Found {
    /// In a story that `growth` has watched.
    #[must_use]
    pub fn of(story: &Story, definitions: &dyn Definitions, growth: &Growth) -> Found {
        let training = story.ledger.training();
        let mut found = Found {
            spread: vec![],
            rising: vec![],
            not_freed: vec![],
            abandoned: abandoned(story).collect(),
            cached: cached(story),
            counted: training.map(|training| training.source.clone()),
            n_steps: training.map(|training| training.n_steps),
            loops: story.ledger.loops().to_vec(),
            can_tell: growth.can_tell(),
            is_complete: story.complete && story.end() != Some(End::Detached),
            doubts: story.caveats(),
            asked_for_memory: asked_for_memory(story),
        };
        let rising = growth.rising();
        for spread in growth.spread(&rising) {
            let Some((_, most)) = spread.parts.first().copied() else { continue };
            let place = Place { device: spread.device, account: spread.account, site: most };
            if is_segment(story, place) {
                continue;
            }
            let known_as = named(story, place);
            let named = Named { site: together(story, &spread), ..known_as.clone() };
            let Spread { account, trend, n_windows, .. } = spread;
            let course = Course::GoesOn;
            let (repeated, place) = (None, Some(place));
            let site = RisingSite { named, known_as, account, trend, course, n_windows, repeated, place };
            found.spread.push(site);
        }
        let has_steps =
            training.is_some_and(|it| matches!(it.source, StepSource::Ranges(_) | StepSource::Optimizer));
        // Who calls a model turn by turn is at work too, there.
        let has_turns = training.is_some_and(|it| it.n_steps >= LEAST_TURNS);
        let computes =
            |site| story.ledger.sites.stacks_of(site).any(|stack| is_in_module(definitions, stack));
        let rounds = Rounds::of(&story.ledger, definitions, growth.repetition());
        let held = Holders::at_end(&rounds);
        let mut add = |place: Place, trend, course: Course, n_windows, repeated| {
            let (known_as, account) = (named(story, place), place.account);
            let mut named = known_as.clone();
            if course.goes_on() {
                named.site.push_str(&callers(story, definitions, place));
            }
            found.can_tell |= course.goes_on();
            let place = Some(place);
            let site = RisingSite { named, known_as, account, trend, course, n_windows, repeated, place };
            found.rising.push(site);
        };
        let mut known = vec![];
        for Rising { place, trend, course, n_windows } in rising {
            if is_segment(story, place) {
                continue;
            }
            // What trains is at work, whatever its functions are called and however little it gives back.
            let course = match course {
                Course::Preparing if has_steps => Course::GoesOn,
                Course::OnlyTakes if has_steps || has_turns && computes(place.site) => Course::GoesOn,
                course => course,
            };
            let (course, repeated) = held.judged(place, course);
            known.extend(course.goes_on().then_some(place));
            add(place, trend, course, n_windows, repeated);
        }
        // Up to a failure: what cleans up after it hides what had grown. And what few repetitions show.
        let failed = story.ledger.devices().keys().filter_map(|device| Holders::at_failure(&rounds, *device));
        let failed: Vec<Holders<'_>> = failed.collect();
        for holders in failed.iter().chain(std::iter::once(&held)) {
            for (place, repeated) in holders.repeatedly(story) {
                let is_over = growth.is_level(place, holders.until, repeated.each);
                if !known.contains(&place) && !is_over && !is_segment(story, place) {
                    known.push(place);
                    let (growth, confidence) = (repeated.bytes.0, repeated.confidence());
                    let trend = Trend { growth, per_window: 0.0, confidence };
                    add(place, trend, Course::GoesOn, 0, Some(repeated));
                }
            }
        }
        found.rising.sort_by_key(|site| Reverse(site.trend.growth));
        for (place, bytes, objects) in unfreed(story) {
            if !is_segment(story, place) {
                let row = Unfreed { named: named(story, place), bytes, objects };
                found.not_freed.push((place.account, row));
            }
        }
        found
    }
}

/// What is held at a moment, by line.
struct Holders<'a> {
    rounds: &'a Rounds<'a>,
    until: Nanos,
    by_place: FxHashMap<Place, Vec<Kept>>,
    bytes: u64,
}

impl<'a> Holders<'a> {
    /// Of what is held, this part at least makes growth worth a word that only few repetitions show: one in so many.
    const LEAST: u64 = 20;

    fn at_end(rounds: &'a Rounds<'a>) -> Holders<'a> {
        Holders::of(rounds, Nanos(u64::MAX), rounds.at_end())
    }

    fn at_failure(rounds: &'a Rounds<'a>, device: i16) -> Option<Holders<'a>> {
        let failure = rounds.failure(device)?;
        Some(Holders::of(rounds, failure.time, failure.kept.clone()))
    }

    fn of(rounds: &'a Rounds<'a>, until: Nanos, kept: Vec<Kept>) -> Holders<'a> {
        let (mut by_place, mut bytes): (FxHashMap<Place, Vec<Kept>>, u64) = (FxHashMap::default(), 0);
        for it in kept {
            bytes = bytes.saturating_add(it.bytes.0);
            by_place.entry(it.place).or_default().push(it);
        }
        Holders { rounds, until, by_place, bytes }
    }

    /// What a rise is in truth, by how often the line left memory.
    fn judged(&self, place: Place, course: Course) -> (Course, Option<Repeated>) {
        let Some(kept) = self.by_place.get(&place) else { return (course, None) };
        let Some(repeated) = self.rounds.judge(kept, self.until) else { return (course, None) };
        let by_rounds = self.rounds.by_rounds(kept, self.until);
        let is_once = match repeated.by {
            By::Call(_) | By::Round => repeated.left < REPEATED || kept[0].is_of_graph,
            By::Own => false,
        };
        let course = match course {
            Course::GoesOn if is_once => Course::Once(repeated.left.min(REPEATED - 1)),
            Course::GoesOn if self.rounds.is_of_one_step(kept) => Course::Once(1),
            // Work is done in between: it is not the program that gets ready, whatever its functions are called.
            Course::Preparing | Course::OnlyTakes if !kept[0].is_of_graph && by_rounds.left >= REPEATED => {
                Course::GoesOn
            }
            course => course,
        };
        // Rounds of work are what people count, where there are several objects in each.
        let is_by_rounds =
            by_rounds.left >= REPEATED && by_rounds.is_to_the_end && by_rounds.left < repeated.left;
        let repeated = match repeated.by {
            By::Call(_) => repeated,
            By::Round => by_rounds,
            By::Own if is_by_rounds => by_rounds,
            By::Own => repeated,
        };
        (course, Some(repeated))
    }

    /// Lines that left memory in most repetitions, however few these were, most first.
    fn repeatedly(&self, story: &Story) -> Vec<(Place, Repeated)> {
        let mut found: Vec<(Place, Repeated)> = self
            .by_place
            .iter()
            .filter(|(place, _)| matches!(place.account, Account::Blocks | Account::Buffers))
            .filter(|(_, kept)| !kept[0].is_of_graph && !self.rounds.is_of_one_step(kept))
            .filter_map(|(place, kept)| {
                let repeated = self.rounds.judge(kept, self.until)?;
                let repeated = match repeated.by {
                    By::Call(_) => repeated,
                    // Of what nothing was given back, so that it is no queue.
                    By::Own if is_mostly_kept(story, *place, kept.len()) => {
                        self.rounds.by_rounds(kept, self.until)
                    }
                    By::Round => self.rounds.by_rounds(kept, self.until),
                    By::Own => return None,
                };
                let is_much = repeated.bytes.0.saturating_mul(Holders::LEAST) >= self.bytes;
                (repeated.grows() && is_much).then_some((*place, repeated))
            })
            .collect();
        found.sort_by_key(|(place, repeated)| (Reverse(repeated.bytes), *place));
        found
    }
}

/// Whether a line gave next to nothing back of what it ever got.
fn is_mostly_kept(story: &Story, place: Place, n_kept: usize) -> bool {
    let Some(books) = story.ledger.devices().get(&place.device) else { return false };
    let books = match place.account {
        Account::Blocks => books.torch.as_ref().map(|torch| &torch.blocks),
        Account::Buffers => books.pjrt.as_ref().map(|pjrt| &pjrt.buffers),
        _ => None,
    };
    let gains =
        books.and_then(|books| books.sites().find(|part| part.id == place.site)).map(|part| part.gains);
    gains.is_some_and(|gains| n_kept as u64 * 3 >= gains * 2)
}

impl Found {
    /// Each with its name, device, owner, call site, bytes, objects, and a word more.
    pub fn each(&self, mut see: impl FnMut(&'static str, Option<i16>, &str, &str, Bytes, Option<u64>, &str)) {
        fn device(named: &Named) -> Option<i16> {
            if named.device == "host" { Some(HOST) } else { named.device.strip_prefix("cuda:")?.parse().ok() }
        }
        for site in self.spread.iter().chain(&self.rising) {
            let name = if site.course.goes_on() { "growth" } else { "rose" };
            let (named, why) = (&site.named, super::why(site.course));
            see(name, device(named), &named.owner, &named.site, site.bytes(), None, &why);
        }
        for (_, row) in &self.not_freed {
            let named = &row.named;
            see("not_freed", device(named), &named.owner, &named.site, row.bytes, Some(row.objects), "");
        }
        for pool in &self.abandoned {
            let named = &pool.named;
            see("abandoned_pool", device(named), &named.owner, &named.site, pool.bytes, None, &pool.why);
        }
    }
}

fn asked_for_memory(story: &Story) -> bool {
    story.ledger.devices().values().map(|books| books.allocs).sum::<u64>() > 0
        || story.ledger.counts.blocks().count() > 0
        || story.ledger.host().peak().0 > 0
}

/// The words for growth that is spread over many sites.
fn together(story: &Story, spread: &Spread) -> String {
    const MOST: usize = 3;
    let all = spread.parts.iter().fold(0u64, |sum, (growth, _)| sum.saturating_add(*growth));
    let name = |site: SiteId| story.ledger.sites.site(site).map(ToString::to_string).unwrap_or_default();
    let share = |growth: u64| percent(growth, all);
    let largest = spread.parts.iter().take(MOST);
    let largest: Vec<_> =
        largest.map(|(growth, site)| format!("{} {}", name(*site), share(*growth))).collect();
    format!("{} call sites, none of them large; largest: {}", spread.parts.len(), largest.join(", "))
}

fn percent(part: u64, of: u64) -> String {
    format!("{:.0} %", 100.0 * part as f64 / of.max(1) as f64)
}

fn named(story: &Story, place: Place) -> Named {
    let sites = &story.ledger.sites;
    let site = sites.site(place.site);
    let device = if place.device == HOST { "host".into() } else { format!("cuda:{}", place.device) };
    let owner = match place.account {
        Account::Blocks => "PyTorch block",
        Account::Buffers => "JAX buffer",
        Account::Heap if place.device == HOST => "PyTorch's pinned block",
        Account::Heap => "NVSHMEM block",
        Account::Imported => "another process",
        _ => site.map_or("", |site| sites.owner(site.owner)),
    };
    Named { device, owner: owner.to_owned(), site: site.map(ToString::to_string).unwrap_or_default() }
}

/// PyTorch's segments are shown by the blocks in them, where these were seen.
fn is_segment(story: &Story, place: Place) -> bool {
    let sites = &story.ledger.sites;
    let torch = story.ledger.devices().get(&place.device).and_then(|books| books.torch.as_ref());
    let has_blocks = torch.is_some_and(|torch| torch.blocks.peak().0 > 0);
    let is_torch = sites.site(place.site).is_some_and(|site| sites.owner(site.owner) == TORCH);
    let is_arena = is_arena(&story.ledger, place.device, place.site);
    let is_heap = is_heap(&story.ledger, place.device, place.site);
    let owner = sites.site(place.site).map(|site| site.owner);
    let is_pinned = owner.is_some_and(|owner| is_pinned_cache(&story.ledger, place.device, owner));
    place.account == Account::Driver && (is_arena || is_heap || is_pinned || has_blocks && is_torch)
}

fn unfreed(story: &Story) -> Vec<(Place, Bytes, u64)> {
    let mut found = vec![];
    let mut add = |device: i16, account: Account, books: &Books| {
        for part in books.sites().filter(|part| part.live.objects > 0) {
            let bytes = if account == Account::Imported { Bytes(0) } else { part.live.bytes };
            found.push((Place { device, account, site: part.id }, bytes, part.live.objects));
        }
    };
    for (device, books) in story.ledger.devices() {
        add(*device, Account::Driver, &books.physical);
        add(*device, Account::Managed, &books.managed);
        add(*device, Account::Graphs, &books.graphs);
        add(*device, Account::Imported, &books.imported);
        add(*device, Account::Heap, &books.heap.blocks);
        if let Some(torch) = &books.torch {
            add(*device, Account::Blocks, &torch.blocks);
        }
        if let Some(pjrt) = &books.pjrt {
            add(*device, Account::Buffers, &pjrt.buffers);
        }
    }
    add(HOST, Account::Driver, story.ledger.host());
    add(HOST, Account::Heap, story.ledger.host_blocks());
    found.sort_by_key(|(place, bytes, _)| (Reverse(*bytes), *place));
    found
}

/// Pools that keep memory for nobody, by the line of the last capture into each.
pub fn abandoned(story: &Story) -> impl Iterator<Item = AbandonedPool> {
    story.ledger.torch_pools.abandoned().map(|(device, id, pool)| AbandonedPool {
        named: Named {
            device: format!("cuda:{device}"),
            owner: "PyTorch pool".to_owned(),
            site: story.ledger.sites.site_name(pool.graphs.last().map_or(pool.site, |graph| graph.site)),
        },
        pool: pools::name(id),
        bytes: pool.reserved.now,
        why: why_abandoned(pool),
    })
}

/// What PyTorch had reserved at the end and nobody used.
fn cached(story: &Story) -> Bytes {
    let torch = story.ledger.devices().values().filter_map(|books| books.torch.as_ref());
    let cached = torch.map(|torch| torch.reserved.now.0.saturating_sub(torch.blocks.now().bytes.0));
    Bytes(cached.fold(0, u64::saturating_add))
}
