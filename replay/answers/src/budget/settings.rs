//! What a setting would free, and the largest cache that would still fit: by replaying the run.
//!
//! The cache's blocks get another size and all other requests stay as they were, so activation peaks, graphs and fragmentation
//! are counted as they would be. Contexts, code and libraries are there all the time with the most that they had at once.

use std::collections::BTreeSet;

use gputrace_schemas::event::{Bytes, Nanos};
use gputrace_sim::effort;
use gputrace_sim::ops::{AllocId, Op, OpStream, Others};
use gputrace_sim::policies::torch;
use gputrace_sim::whatif::{Laboratory, Other, Question};
use serde::Serialize;

use crate::whatif::{Bench, Machine};
use gputrace_analyse::budget::{Budget, Budgets};
use gputrace_report::model::{Mood, Section, Table, Value};
use gputrace_report::sharing::Sharing;
use gputrace_trace::import::{Trace, UNACCOUNTED};
use gputrace_trace::words::bytes;

/// The search ends when it is as exact as this.
const EXACT: u64 = 1 << 20;
/// The first step of the search.
const STEP: u64 = 32 << 20;
/// Sizes are multiples of this: PyTorch rounds to it.
const UNIT: u64 = 512;
/// What takes less than this part of the largest block of a cache is beside it.
const SMALL: u64 = 1000;

/// What the replays need.
pub(super) struct Course<'a> {
    pub(super) budgets: &'a Budgets,
    pub(super) budget: &'a Budget,
    pub(super) machine: Machine,
    pub(super) utilizations: &'a [f64],
}

/// What was found for a device, or why nothing could be.
#[derive(Serialize)]
#[serde(untagged)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub(super) enum Settings {
    Found(Found),
    Nothing { why_not: String },
}

#[derive(Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub(super) struct Found {
    limit_bytes: Option<u64>,
    limit_is: Option<String>,
    /// The most that was held of it.
    cache_bytes: Option<u64>,
    cache_blocks: Option<usize>,
    #[serde(skip)]
    cache_block: Option<u64>,
    no_cache: Option<String>,
    largest_cache_bytes: Option<u64>,
    is_charge_known: bool,
    doubt: Option<String>,
    rows: Vec<Row>,
}

/// The cache as it was recorded.
struct Cache {
    /// Its requests.
    ids: Vec<AllocId>,
    /// The most that was held of it.
    bytes: u64,
    /// In how many blocks; their size, where it is one.
    n_blocks: usize,
    block: Option<u64>,
}

/// A setting.
#[derive(Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct Row {
    setting: String,
    /// The most that PyTorch reserves.
    peak_reserved_bytes: u64,
    /// What it reserves when the server is ready.
    ready_reserved_bytes: Option<u64>,
    fits: bool,
    /// The largest cache that fits.
    largest_cache_bytes: Option<u64>,
}

impl Settings {
    pub(super) fn of(course: &Course, trace: &Result<&Trace, String>) -> Settings {
        let found = trace.as_ref().map_err(Clone::clone).and_then(|trace| course.found(trace));
        found.map_or_else(|why_not| Settings::Nothing { why_not }, Settings::Found)
    }
}

impl Course<'_> {
    fn found(&self, trace: &Trace) -> Result<Found, String> {
        let device = u32::try_from(self.budget.device).map_err(|_| "the device is not known")?;
        let stream = trace.devices.iter().find(|stream| stream.device == device);
        let stream = stream.ok_or("it holds no memory that could be replayed")?;
        if !stream.settings.is_torch() {
            return Err("its memory is not PyTorch's: it cannot be replayed with other settings".into());
        }
        let limit = self.limit();
        let machine = Machine { limit: limit.as_ref().map(|(limit, _)| Bytes(*limit)), ..self.machine };
        let bench = Bench::new(stream, machine)?;
        let ids = self.ids(stream);
        let cache = ids.as_ref().map_err(|why| why.clone()).and_then(|ids| self.cache(ids));
        let ready = self.budget.columns.iter().find(|column| column.name == "ready");
        let runs = Runs { cache: cache.as_ref().ok(), ready: self.n_requests(ready.map(|it| it.bill.time)) };
        let mut rows = vec![];
        let recorded = stream.settings.options.clone().unwrap_or_default();
        let held = stream.others.as_ref().filter(|_| self.machine.other.is_none()).map(most);
        // When a sample shows a context or code, that has been there for a while; and it must fit whenever it comes.
        let at_most =
            |question: Question| Question { other: held.map_or(question.other, Other::Bytes), ..question };
        let question = at_most(bench.question(torch::NAME, &recorded));
        rows.push(runs.row("as recorded", stream, &question, 0)?);
        if !recorded.contains("expandable_segments:True") && effort::SERVER.covers(stream.n_requests()) {
            let options = match recorded.is_empty() {
                true => "expandable_segments:True".to_owned(),
                false => format!("{recorded},expandable_segments:True"),
            };
            rows.push(runs.row(
                "expandable_segments:True",
                stream,
                &at_most(bench.question(torch::NAME, &options)),
                0,
            )?);
        }
        if let Ok(ids) = &ids
            && effort::SERVER.covers(stream.n_requests())
        {
            rows.extend(self.without_graphs(&runs, stream, &question, ids)?);
        }
        let card = self.card();
        for share in self.utilizations.iter().filter(|_| runs.cache.is_some()) {
            let Some(card) = card else { break };
            let limit = Some((card as f64 * share) as u64);
            let name = format!("utilization {share:.2}");
            rows.push(runs.row(&name, stream, &Question { limit, ..question.clone() }, 0)?);
        }
        let is_charge_known = self.machine.other.is_some()
            || stream.others.as_ref().is_some_and(|others| others.is_charge_known);
        let (limit_bytes, limit_is) = limit.unzip();
        Ok(Found {
            limit_bytes,
            limit_is,
            cache_bytes: cache.as_ref().ok().map(|cache| cache.bytes),
            cache_blocks: cache.as_ref().ok().map(|cache| cache.n_blocks),
            cache_block: cache.as_ref().ok().and_then(|cache| cache.block),
            no_cache: cache.err(),
            largest_cache_bytes: rows.first().and_then(|row| row.largest_cache_bytes),
            is_charge_known,
            doubt: bench.doubt(),
            rows,
        })
    }

    fn card(&self) -> Option<u64> {
        let card = self
            .machine
            .device_memory
            .or_else(|| self.budgets.story.device(self.budget.device).map(|device| device.total));
        card.map(|card| card.0).filter(|card| *card > 0)
    }

    /// What the process may use, and why.
    fn limit(&self) -> Option<(u64, String)> {
        if let Some(limit) = self.machine.limit {
            return Some((limit.0, "as requested".into()));
        }
        if let Some(card) = self.machine.device_memory {
            return Some((card.0, "the given card".into()));
        }
        let (card, peak) = (self.card()?, self.budget.columns.iter().find(|column| column.name == "peak"));
        let others = peak.and_then(|peak| peak.bill.others).and_then(|others| u64::try_from(others).ok());
        let others = others.unwrap_or(0);
        let why = format!(
            "the card's {} without {} of others and the driver",
            bytes(Bytes(card)),
            bytes(Bytes(others))
        );
        let left = card.saturating_sub(others);
        match self.mps_limit().filter(|limit| *limit < left) {
            Some(limit) => Some((limit, "the memory that MPS allows the process".into())),
            None => Some((left, why)),
        }
    }

    /// What MPS lets the process have of the device, unless it is known to be no client.
    fn mps_limit(&self) -> Option<u64> {
        let sharing = Sharing::of(&self.budgets.story, self.budget.device);
        sharing.limit.filter(|_| sharing.is_client != Some(false)).map(|limit| limit.0)
    }

    /// The request of each life of the device: lives and requests come in the same order.
    fn ids(&self, stream: &OpStream) -> Result<Vec<(usize, AllocId)>, String> {
        let course = &self.budgets.course;
        let lives = course.lives.list.iter().zip(&course.addrs).enumerate();
        let lives: Vec<(usize, u64)> = lives
            .filter(|(_, (life, _))| life.device == self.budget.device)
            .map(|(idx, (_, addr))| (idx, *addr))
            .collect();
        let requests = stream.ops.iter().filter_map(|op| match op {
            Op::Alloc(id) => Some(*id),
            _ => None,
        });
        let requests: Vec<AllocId> = stream.initial_allocs.iter().copied().chain(requests).collect();
        let is_one = |((_, addr), id): (&(usize, u64), &AllocId)| stream.allocation(*id).address == *addr;
        if requests.len() != lives.len() || !lives.iter().zip(&requests).all(is_one) {
            return Err("it is not known which requests belong to the cache: some are missing".into());
        }
        Ok(lives.iter().map(|(idx, _)| *idx).zip(requests).collect())
    }

    fn cache(&self, ids: &[(usize, AllocId)]) -> Result<Cache, String> {
        let lives = &self.budgets.course.lives.list;
        let is_of_cache = |idx: usize| self.budget.cache.binary_search(&idx).is_ok();
        let largest =
            ids.iter().filter(|(idx, _)| is_of_cache(*idx)).map(|(idx, _)| lives[*idx].requested.0).max();
        // Counters and the like that are kept beside the cache do not grow with it.
        let is_large = |idx: usize| lives[idx].requested.0 >= largest.unwrap_or(0) / SMALL;
        let of_cache: Vec<(usize, AllocId)> =
            ids.iter().filter(|(idx, _)| is_of_cache(*idx) && is_large(*idx)).copied().collect();
        if of_cache.is_empty() {
            return Err(
                "no permanent KV cache was recognised (docs/ROLES.md explains how; --rules names one)".into(),
            );
        }
        let mut moments: Vec<(u32, bool, usize)> = vec![];
        for (idx, _) in &of_cache {
            moments.push((lives[*idx].born, true, *idx));
            moments.push((lives[*idx].died, false, *idx));
        }
        moments.sort_unstable();
        let (mut held, mut most, mut now) = (0_u64, 0_u64, BTreeSet::new());
        let mut at_most = BTreeSet::new();
        for (_, is_birth, idx) in moments {
            if is_birth {
                held = held.saturating_add(lives[idx].requested.0);
                now.insert(idx);
            } else {
                held = held.saturating_sub(lives[idx].requested.0);
                now.remove(&idx);
            }
            if held > most {
                (most, at_most) = (held, now.clone());
            }
        }
        let sizes: BTreeSet<u64> = at_most.iter().map(|idx| lives[*idx].requested.0).collect();
        let block = sizes.first().copied().filter(|_| sizes.len() == 1);
        let ids = of_cache.iter().map(|(_, id)| *id).collect();
        Ok(Cache { ids, bytes: most, n_blocks: at_most.len(), block })
    }

    /// Requests of the device that were made until a time.
    fn n_requests(&self, time: Option<Nanos>) -> Option<usize> {
        let lives = &self.budgets.course.lives.list;
        let own = lives.iter().filter(|life| life.device == self.budget.device);
        time.map(|time| own.filter(|life| life.since <= time).count())
    }

    /// The run without the largest graphs: one, some, all of them.
    fn without_graphs(
        &self,
        runs: &Runs,
        stream: &OpStream,
        question: &Question,
        ids: &[(usize, AllocId)],
    ) -> Result<Vec<Row>, String> {
        let mut graphs = self.captured(stream, ids);
        graphs.sort_by_key(|(bytes, own)| (std::cmp::Reverse(*bytes), own.first().copied()));
        let n = graphs.len();
        let mut rows = vec![];
        for n_dropped in BTreeSet::from([1, n / 4, n / 2, n]).into_iter().filter(|k| *k > 0 && *k <= n) {
            let dropped: BTreeSet<AllocId> =
                graphs[..n_dropped].iter().flat_map(|(_, own)| own.iter().copied()).collect();
            let mut without = stream.clone();
            for op in &mut without.ops {
                // What was never handed out is not taken back: this does nothing.
                if let Op::Alloc(id) = *op
                    && dropped.contains(&id)
                {
                    *op = Op::FreeCompleted(id);
                }
            }
            let name = match n_dropped {
                1 => "without the largest graph".to_owned(),
                n_dropped if n_dropped == n => "without any graph".to_owned(),
                n_dropped => format!("without the {n_dropped} largest graphs"),
            };
            let ready = self.budget.columns.iter().find(|column| column.name == "ready");
            let lives = &self.budgets.course.lives.list;
            let is_before = |idx: usize| ready.is_some_and(|ready| lives[idx].since <= ready.bill.time);
            let n_before = ids.iter().filter(|(idx, id)| dropped.contains(id) && is_before(*idx)).count();
            rows.push(runs.row(&name, &without, question, n_before)?);
        }
        Ok(rows)
    }

    /// What each capture asked for in a pool: the most that it held at once, and its requests.
    fn captured(&self, stream: &OpStream, ids: &[(usize, AllocId)]) -> Vec<(u64, Vec<AllocId>)> {
        let lives = &self.budgets.course.lives.list;
        let mut all = vec![];
        for (begin, end) in &self.budgets.course.captures {
            let is_in = |time: Nanos| time >= *begin && time <= *end;
            let own = ids.iter().filter(|(idx, id)| {
                is_in(lives[*idx].since) && stream.pool(stream.allocation(*id).pool).id != (0, 0)
            });
            let own: Vec<(usize, AllocId)> = own.copied().collect();
            let mut changes: Vec<(u32, i64)> = vec![];
            for (idx, _) in &own {
                let bytes = i64::try_from(lives[*idx].bytes.0).unwrap_or(i64::MAX);
                changes.push((lives[*idx].born, bytes));
                changes.push((lives[*idx].died, -bytes));
            }
            changes.sort_unstable();
            let mut held = 0;
            let most = changes.iter().map(|(_, change)| {
                held += change;
                held
            });
            let most = most.max().and_then(|most| u64::try_from(most).ok()).unwrap_or(0);
            if !own.is_empty() {
                all.push((most, own.into_iter().map(|(_, id)| id).collect()));
            }
        }
        all
    }
}

/// The most that others held at once. What nothing explains is mostly explained later, so the last of it counts.
fn most(others: &Others) -> u64 {
    let mut held = vec![0_u64; others.names.len()];
    let (mut most, mut unaccounted) = (0_u64, 0);
    for changes in others.changes.chunk_by(|old, new| old.before_op == new.before_op) {
        for change in changes {
            match others.names[change.name as usize] == UNACCOUNTED {
                true => unaccounted = change.bytes,
                false => held[change.name as usize] = change.bytes,
            }
        }
        most = most.max(held.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes)));
    }
    most.saturating_add(unaccounted)
}

/// Replays.
struct Runs<'a> {
    cache: Option<&'a Cache>,
    /// Requests until the server is ready.
    ready: Option<usize>,
}

impl Runs<'_> {
    /// `n_before` requests fewer than recorded are made until the server is ready.
    fn row(
        &self,
        name: &str,
        stream: &OpStream,
        question: &Question,
        n_before: usize,
    ) -> Result<Row, String> {
        let laboratory = Laboratory::new(stream)?;
        // What is reserved is wanted as if there were room, so that a limit does not hide it.
        let free = Question { limit: None, device_memory: None, ..question.clone() };
        let replayed = laboratory.reserved_over_time(&free).map_err(|error| error.to_string())?;
        let (outcome, reserved) = replayed;
        let ready = self.ready.map(|n| n.saturating_sub(n_before)).filter(|n| *n > 0);
        let ready = ready.and_then(|n| reserved.get(n - 1)).copied();
        let fits = laboratory.guess(question).map_err(|error| error.to_string())?.fits();
        let largest_cache_bytes = match self.cache {
            Some(cache) if question.limit.is_some() => largest(stream, cache, question)?,
            _ => None,
        };
        Ok(Row {
            setting: name.to_owned(),
            peak_reserved_bytes: outcome.books.reserved.peak,
            ready_reserved_bytes: ready,
            fits,
            largest_cache_bytes,
        })
    }
}

/// The largest cache that fits, all its blocks together: those that were recorded, scaled.
fn largest(stream: &OpStream, cache: &Cache, question: &Question) -> Result<Option<u64>, String> {
    let fits = |total: u64| -> Result<bool, String> {
        let mut scaled = stream.clone();
        for id in &cache.ids {
            let requested = &mut scaled.allocations[id.0 as usize].requested;
            *requested = scale(*requested, total, cache.bytes);
        }
        let outcome = Laboratory::new(&scaled)?.guess(question).map_err(|error| error.to_string())?;
        Ok(outcome.fits())
    };
    // What is free at the tightest moment is a good guess, and steps from there double.
    let recorded = Laboratory::new(stream)?.guess(question).map_err(|error| error.to_string())?;
    let limit = question.limit.unwrap_or(u64::MAX >> 1);
    let held = recorded.tightest.reserved.saturating_add(recorded.tightest.others);
    let guess = match recorded.fits() {
        true => cache.bytes.saturating_add(limit.saturating_sub(held)),
        false => cache.bytes / 2,
    };
    let (mut low, mut high, mut step) = (0, None, STEP);
    let mut at = guess.max(UNIT);
    loop {
        match fits(at)? {
            true => low = at,
            false => high = Some(at),
        }
        match (low, high) {
            (0, Some(_)) if at <= UNIT => return Ok(None),
            (0, Some(high)) => at = high.saturating_sub(step).max(UNIT),
            (low, None) if low >= limit => return Ok(Some(low)),
            (low, None) => at = low.saturating_add(step),
            (low, Some(high)) if high - low <= EXACT => return Ok(Some(low)),
            (low, Some(high)) => at = low + (high - low) / 2,
        }
        step = step.saturating_mul(2);
    }
}

fn scale(requested: u64, total: u64, recorded: u64) -> u64 {
    let scaled = u128::from(requested) * u128::from(total) / u128::from(recorded.max(1));
    (u64::try_from(scaled).unwrap_or(u64::MAX >> 1) / UNIT * UNIT).max(UNIT)
}

impl Settings {
    pub(super) fn sections(&self) -> Vec<Section> {
        let title = "What a setting would free, and the largest KV cache that fits";
        let section = Section::new("settings", title);
        let found = match self {
            Settings::Found(found) => found,
            Settings::Nothing { why_not } => {
                return vec![section.line(Mood::Note, format!("cannot tell: {why_not}"))];
            }
        };
        let recorded = found.rows.first().map(|row| (row.peak_reserved_bytes, row.ready_reserved_bytes));
        let less = |old: Option<u64>, new: Option<u64>| match (old, new) {
            (Some(old), Some(new)) => Value::Difference(old as i64 - new as i64),
            _ => Value::Missing,
        };
        let table = Table::of(
            "settings",
            &found.rows,
            &[
                ("setting", "setting", &|row| Value::text(&row.setting)),
                ("peak_reserved_bytes", "reserved", &|row| Value::Bytes(Bytes(row.peak_reserved_bytes))),
                ("freed_at_peak_bytes", "frees at peak", &|row| {
                    less(recorded.map(|it| it.0), Some(row.peak_reserved_bytes))
                }),
                ("freed_at_ready_bytes", "when ready", &|row| {
                    less(recorded.and_then(|it| it.1), row.ready_reserved_bytes)
                }),
                ("largest_cache_bytes", "largest cache", &|row| Value::bytes(row.largest_cache_bytes)),
            ],
        );
        let mut section = section.table(table);
        let cache = found.cache_bytes.zip(found.cache_blocks);
        let limit = found.limit_bytes.zip(found.limit_is.as_ref());
        match (cache, found.largest_cache_bytes, limit) {
            (Some((recorded, n_blocks)), Some(largest), Some((limit, why))) => {
                let blocks = match (found.cache_block, n_blocks) {
                    (_, 1) => "in one block".to_owned(),
                    (Some(block), n) => format!(
                        "in {n} blocks of {} each (recorded: {})",
                        bytes(Bytes(scale(block, largest, recorded))),
                        bytes(Bytes(block))
                    ),
                    (None, n) => format!("in {n} blocks, all scaled alike"),
                };
                let text = format!(
                    "largest KV cache that fits in {} ({why}): {}, {blocks}; recorded: {}",
                    bytes(Bytes(limit)),
                    bytes(Bytes(largest)),
                    bytes(Bytes(recorded))
                );
                section = section.line(Mood::Good, text);
            }
            (Some(_), None, Some((limit, why))) => {
                let text = format!(
                    "no KV cache fits in {} ({why}): the rest alone does not fit",
                    bytes(Bytes(limit))
                );
                section = section.line(Mood::Bad, text);
            }
            (Some(_), _, None) => {
                section = section
                    .line(Mood::Note, "the size of the card is not known: give --limit or --device-memory");
            }
            (None, ..) => {
                section = section.lines(found.no_cache.clone().map(|why| (Mood::Note, why)));
            }
        }
        let note = "the run was replayed with each setting. Requests stay as recorded; contexts, code and libraries count with their maximum. A dropped graph frees only the memory that its capture requested; eager requests that would replace it are not counted";
        section = section.line(Mood::Note, note);
        let charge =
            "the CUDA context and code also need memory, which this trace does not show (--other BYTES)";
        vec![section.warn(found.doubt.clone()).warn((!found.is_charge_known).then(|| charge.to_owned()))]
    }
}
