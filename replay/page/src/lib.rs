//! A trace as one file for any browser: `gputrace html`.
//!
//! ```text
//! trace -> Story, Verdict, sections (pass 1) ──> tables ─────┐
//!       -> Collector: states, rectangles, marks (pass 2) ────┴─> Page -> HTML with its data inside
//! ```
//! Every number of a table is one of the report's or the summary's own ([`gputrace_report`], [`gputrace_report::summary`]). The
//! pictures are made of states that add up to the ledger's books. The file is never larger than [`MOST_BYTES`]: detail is
//! taken out until it is not, and the page says what was.
#![forbid(unsafe_code)]

mod columns;
mod history;
mod html;
mod inside;
mod map;
mod settings;
mod shapes;
mod tables;
mod tape;
mod watch;

use std::io::{self, Write};
use std::sync::Arc;

use rustc_hash::FxHashMap;
use serde::Serialize;
use serde_json::{Value as Json, json};

use columns::{ColumnId, Columns};
use gputrace_analyse::lifetimes::Lifetimes;
use gputrace_analyse::live::{Level, Line, Lines, Native};
use gputrace_analyse::story::Story;
use gputrace_answers::layers::{OfBlocks, of_blocks};
use gputrace_report::model::{Part, Section};
use gputrace_report::summary::Summary;
use gputrace_schemas::event::{Nanos, StackId};
use gputrace_trace::clocks;
use gputrace_trace::import::Requests;
use gputrace_trace::owners::TORCH;
use gputrace_trace::source::Source;
use history::{History, Room};
use html::Reader;
use map::RectangleColumns;
use settings::Settings;
pub use tables::section;
pub use tape::Store;
use tape::Tape;
use watch::{Collector, Detail, Device, Holder, Known, MOST_REQUESTS, Mark, MarkKind, Marks};

/// The largest file, as a rule of ours: browsers open it at once, mail and trackers take it.
pub const MOST_BYTES: usize = 20 << 20;
/// States and rows of all traces together.
const MOST: Detail =
    Detail { history: Room { states: 120_000, rows: 900_000 }, rectangles: 240_000, focus: None };
/// A longer name is cut.
const LONGEST_NAME: usize = 400;
/// Times that detail is halved before a page is as large as it is.
const MOST_SHRINKS: usize = 12;

/// What one file shows.
pub struct Page {
    summary: Option<Summary>,
    chapters: Vec<Chapter>,
    /// What is said of all traces together.
    job: Vec<Section>,
}

/// One trace.
pub struct Chapter {
    start: u64,
    /// When it began, counted from the first trace of the page.
    origin: u64,
    duration: u64,
    report: Option<Part>,
    holders: Vec<(i16, Holder)>,
    owners: Vec<String>,
    sites: Vec<String>,
    /// Names, and the rules that gave them.
    roles: Vec<(String, String)>,
    stacks: Vec<Vec<Line>>,
    stack_of: FxHashMap<u32, u32>,
    /// PyTorch's private pools, by number.
    pools: Vec<inside::Described>,
    /// The model's layers, by number.
    layers: Vec<String>,
    devices: Vec<(i16, String, Device)>,
    marks: Vec<(MarkKind, Marks)>,
    settings: Vec<Settings>,
    /// What is wrong with the job, at the calls of this trace that show it: when, and in words.
    findings: Vec<(Nanos, String)>,
    tape: Option<Arc<Tape>>,
}

/// Something that is wrong with a job, at a call of one of its traces.
pub struct Placed {
    /// Which of the page's traces.
    pub trace: usize,
    /// When, on the clock of its host.
    pub time: Nanos,
    /// In words.
    pub text: String,
}

impl Page {
    /// Of these traces, of what is said of all of them, and where that shows.
    #[must_use]
    pub fn of(read: Vec<(Story, Chapter)>, job: &[Section], findings: Vec<Placed>) -> Page {
        let (stories, mut chapters): (Vec<Story>, Vec<Chapter>) = read.into_iter().unzip();
        let processes: Vec<_> = stories.iter().map(|story| &story.process).collect();
        for (chapter, origin) in chapters.iter_mut().zip(clocks::origins(&processes)) {
            chapter.origin = origin.0;
        }
        for Placed { trace, time, text } in findings {
            if let Some(chapter) = chapters.get_mut(trace) {
                chapter.findings.push((time, text));
            }
        }
        Page { summary: Some(Summary::of(&stories)), chapters, job: job.to_vec() }
    }

    /// The page for who is served it: it can ask for details ([`Chapter::detail`]).
    ///
    /// # Errors
    /// It is larger than a page can be.
    pub fn served(&mut self) -> io::Result<Vec<u8>> {
        let mut page = vec![];
        self.write_for(&mut page, Reader::Served)?;
        Ok(page)
    }

    /// The traces of the page, which can still be requested a part ([`Chapter::part`]).
    #[must_use]
    pub fn into_chapters(self) -> Vec<Chapter> {
        self.chapters
    }

    /// Writes the file; says how large it is.
    ///
    /// # Errors
    /// Those of what is written to.
    pub fn write(&mut self, out: &mut dyn Write) -> io::Result<usize> {
        self.write_for(out, Reader::File)
    }

    fn write_for(&mut self, out: &mut dyn Write, reader: Reader) -> io::Result<usize> {
        let mut page = html::page(&self.data()?, reader);
        for _ in 0..MOST_SHRINKS {
            if page.len() <= MOST_BYTES {
                break;
            }
            self.chapters.iter_mut().for_each(Chapter::shrink);
            page = html::page(&self.data()?, reader);
        }
        out.write_all(page.as_bytes())?;
        Ok(page.len())
    }

    /// What the page reads: the length of a text in JSON, 4 bytes, lowest first; that text; the columns.
    fn data(&self) -> io::Result<Vec<u8>> {
        let mut columns = Columns::default();
        let chapters: Vec<Json> = self.chapters.iter().map(|it| it.write(&mut columns)).collect();
        let job = self.job.iter().map(tables::section).collect();
        written(Some(OfAll { summary: self.summary.as_ref(), job }), &chapters, &columns)
    }
}

/// What a page shows of all its traces.
#[derive(Serialize)]
struct OfAll<'a> {
    summary: Option<&'a Summary>,
    job: Vec<Json>,
}

/// A head and its columns, as a page reads them.
fn written(all: Option<OfAll>, chapters: &[Json], columns: &Columns) -> io::Result<Vec<u8>> {
    #[derive(Serialize)]
    struct Head<'a> {
        format: &'static str,
        version: &'static str,
        columns: &'a [(usize, usize)],
        chapters: &'a [Json],
        #[serde(flatten)]
        all: Option<OfAll<'a>>,
    }
    let (columns, bytes) = columns.parts();
    let (format, version) = ("gputrace.page/1", env!("CARGO_PKG_VERSION"));
    let head = serde_json::to_value(Head { format, version, columns, chapters, all })?;
    let head = serde_json::to_vec(&head)?;
    let length = u32::try_from(head.len()).map_err(io::Error::other)?;
    Ok([&length.to_le_bytes()[..], &head, bytes].concat())
}

/// What is shown of a device.
struct Pictures<'a> {
    history: &'a History,
    blocks: &'a map::Rectangles,
    grounds: &'a map::Rectangles,
    n_unplaced: u64,
}

impl Chapter {
    /// Of a trace that was understood, with its verdict and every section of its report; one of `n_traces` in the file. With a store,
    /// all that is shown is written down there too, so a part of it can be had.
    #[must_use]
    pub fn of(
        story: &Story,
        part: &Part,
        source: &Source,
        n_traces: usize,
        store: Option<Box<dyn Store>>,
    ) -> Chapter {
        let n = n_traces.max(1);
        let detail = Detail {
            history: Room { states: MOST.history.states / n, rows: MOST.history.rows / n },
            rectangles: MOST.rectangles / n,
            focus: None,
        };
        let mut chapter = Chapter::collected(story, source, detail, store);
        chapter.report = Some(part.clone());
        let devices = chapter.devices.iter().map(|(ordinal, _, device)| (*ordinal, device)).collect();
        chapter.settings = settings::of(source, &devices);
        chapter
    }

    /// What a page requests while one looks closer at a part of it, in nanoseconds since the trace began: that part whole, as far
    /// as there is room, and the rest as before. Without what is said of the trace, which the page has.
    ///
    /// # Errors
    /// The answer is larger than a page can read.
    pub fn detail(story: &Story, source: &Source, (from, to): (u64, u64)) -> io::Result<Vec<u8>> {
        let at = |since: u64| Nanos(story.start().0.saturating_add(since));
        let detail = Detail { focus: Some((at(from), at(to))), ..MOST };
        let chapter = Chapter::collected(story, source, detail, None);
        Page { summary: None, chapters: vec![chapter], job: vec![] }.data()
    }

    /// A trace that was understood, without what is said of it, for its parts: all is written down in the store.
    ///
    /// # Errors
    /// It cannot be written down.
    pub fn indexed(story: &Story, source: &Source, store: Box<dyn Store>) -> io::Result<Chapter> {
        let chapter = Chapter::collected(story, source, MOST, Some(store));
        chapter.is_indexed().map(|_| chapter)
    }

    /// Whether all of it is written down.
    ///
    /// # Errors
    /// It could not be.
    pub fn is_indexed(&self) -> io::Result<bool> {
        match self.tape.as_ref().map(|tape| tape.failed()) {
            Some(Some(error)) => Err(error),
            Some(None) => Ok(true),
            None => Ok(false),
        }
    }

    /// The same as [`Chapter::detail`] of what is written down, without reading the trace.
    ///
    /// # Errors
    /// It is not written down, or cannot be read again; or the answer is larger than a page can read.
    pub fn part(&self, (from, to): (u64, u64)) -> io::Result<Vec<u8>> {
        let at = |since: u64| Nanos(self.start.saturating_add(since));
        let part = (at(from), at(to));
        let missing = || io::Error::other("the trace is not indexed");
        let mut columns = Columns::default();
        let mut devices = vec![];
        for (ordinal, name, device) in &self.devices {
            let history = device.history.part(part, MOST.history)?.ok_or_else(missing)?;
            let blocks = device.blocks.part(part, MOST.rectangles)?.ok_or_else(missing)?;
            let grounds = device.grounds.part(part, MOST.rectangles / 4)?.ok_or_else(missing)?;
            let pictures = Pictures {
                history: &history,
                blocks: &blocks,
                grounds: &grounds,
                n_unplaced: device.n_unplaced,
            };
            devices.push(self.device(*ordinal, name, &pictures, &mut columns));
        }
        // What is said of the trace the page has.
        let chapter = self.write_with(devices, (None, &[]), &mut columns);
        written(None, &[chapter], &columns)
    }

    fn collected(story: &Story, source: &Source, detail: Detail, store: Option<Box<dyn Store>>) -> Chapter {
        let lifetimes = story.lifetimes.as_ref();
        let layers = layers(story, source);
        let known = Known { roles: lifetimes.map_or(&[], |it| &it.roles_of_blocks), layers: &layers.of };
        let tape = store.map(Tape::new);
        let mut collector = Collector::new(source.definitions(), story, known, detail).on(tape.as_ref());
        let ledger = Story::watched(source, &mut collector).ledger;
        collector.finish(&ledger);
        let Collector { holders, devices, mut marks, pools, .. } = collector;
        if let Some(training) = ledger.training() {
            let steps = marks.entry(MarkKind::Step).or_default();
            for step in &training.steps {
                let text = format!("step {}", step.number);
                let (from, to) = (step.begin, step.end);
                let stack = StackId(0);
                steps.add(Mark { kind: MarkKind::Step, from, to, text, device: -1, bytes: 0, stack });
            }
            steps.thin();
        }
        let n_sites = holders.iter().map(|(_, it)| it.site.0).filter(|site| *site != u32::MAX).max();
        let sites = (0..n_sites.map_or(0, |site| site + 1)).map(gputrace_trace::ledger::SiteId);
        let n_owners = holders.iter().map(|(_, it)| it.owner.0).filter(|owner| *owner != u32::MAX).max();
        let owners = (0..n_owners.map_or(0, |owner| owner + 1)).map(gputrace_trace::ledger::OwnerId);
        let mut chapter = Chapter {
            start: story.start().0,
            origin: 0,
            duration: story.since_start(ledger.run.last).0,
            report: None,
            owners: owners.map(|owner| ledger.sites.owner(owner).to_owned()).collect(),
            sites: sites.map(|site| cut(&ledger.sites.site_name(site))).collect(),
            roles: lifetimes.map_or_else(Vec::new, |it| {
                it.role_names.iter().map(|(name, rule)| (cut(name), cut(rule))).collect()
            }),
            stacks: vec![],
            stack_of: FxHashMap::default(),
            pools: pools.described(&ledger),
            layers: layers.names.iter().map(|name| cut(name)).collect(),
            devices: devices
                .into_iter()
                .map(|(ordinal, device)| {
                    (ordinal, gputrace_report::sections::device_name(story, ordinal), device)
                })
                .collect(),
            marks: marks.into_iter().collect(),
            settings: vec![],
            findings: vec![],
            holders,
            tape,
        };
        // What is no device comes last.
        chapter.devices.sort_by_key(|(ordinal, ..)| (*ordinal < 0, ordinal.unsigned_abs()));
        chapter.read_stacks(source);
        chapter
    }

    fn read_stacks(&mut self, source: &Source) {
        let mut lines = Lines::new(source.definitions(), Native::Hidden);
        let mut known: FxHashMap<Vec<Line>, u32> = FxHashMap::default();
        let marks = self.marks.iter().flat_map(|(_, marks)| &marks.list).map(|mark| mark.stack);
        for stack in self.holders.iter().map(|(_, holder)| holder.stack).chain(marks) {
            if self.stack_of.contains_key(&stack.0) {
                continue;
            }
            let words = lines.of(stack).to_vec();
            let next = known.len() as u32;
            let number = *known.entry(words).or_insert_with_key(|words| {
                self.stacks.push(words.clone());
                next
            });
            self.stack_of.insert(stack.0, number);
        }
    }

    /// Keeps about half of the detail.
    fn shrink(&mut self) {
        for (_, _, device) in &mut self.devices {
            device.history.shrink();
            device.blocks.shrink();
            device.grounds.shrink();
        }
        for (_, marks) in &mut self.marks {
            marks.list.truncate(marks.list.len().div_ceil(2));
        }
    }

    fn write(&self, columns: &mut Columns) -> Json {
        let devices = self.devices.iter().map(|(ordinal, name, device)| {
            let Device { history, blocks, grounds, n_unplaced, .. } = device;
            self.device(
                *ordinal,
                name,
                &Pictures { history, blocks, grounds, n_unplaced: *n_unplaced },
                columns,
            )
        });
        let devices = devices.collect();
        self.write_with(devices, (self.report.as_ref(), &self.settings), columns)
    }

    fn write_with(
        &self,
        devices: Vec<DeviceJson>,
        (report, settings): (Option<&Part>, &[Settings]),
        columns: &mut Columns,
    ) -> Json {
        let mut frames: Vec<&Line> = vec![];
        let mut numbers: FxHashMap<&Line, u64> = FxHashMap::default();
        let mut lines: Vec<u64> = vec![];
        let mut lengths: Vec<u64> = vec![];
        for stack in &self.stacks {
            lengths.push(stack.len() as u64);
            for line in stack {
                let next = frames.len() as u64;
                let number = *numbers.entry(line).or_insert(next);
                if number == next {
                    frames.push(line);
                }
                lines.push(number);
            }
        }
        let frames: Vec<Json> =
            frames.iter().map(|line| json!([cut(&line.name), cut(&line.file), line.line])).collect();
        json!({
            "origin_ns": self.origin,
            "duration_ns": self.duration,
            "report": report.map(tables::part),
            "owners": self.owners,
            "sites": self.sites,
            "roles": self.roles,
            "frames": frames,
            "stack_lengths": columns.add(lengths.into_iter()),
            "stack_lines": columns.add(lines.into_iter()),
            "pools": self.pools,
            "layers": self.layers,
            "holders": self.holders(columns),
            "devices": devices,
            "findings": self.findings.iter().map(|(time, text)| json!([time.0.saturating_sub(self.start), cut(text)])).collect::<Vec<_>>(),
            "marks": self.marks.iter().map(|it| self.marks(it, columns)).collect::<Vec<_>>(),
            "settings": settings.iter().map(|it| it.write(self.start, columns)).collect::<Vec<_>>(),
        })
    }

    fn holders(&self, columns: &mut Columns) -> Json {
        let mut kinds: Vec<&str> = vec![];
        let mut kind_of = |kind: &'static str| {
            let at = kinds.iter().position(|known| *known == kind);
            at.unwrap_or_else(|| {
                kinds.push(kind);
                kinds.len() - 1
            }) as u64
        };
        let each = || self.holders.iter().map(|(_, holder)| holder);
        let kind = columns.add(each().map(|it| kind_of(it.kind)).collect::<Vec<_>>().into_iter());
        let or_zero = |number: u32| if number == u32::MAX { 0 } else { u64::from(number) + 1 };
        let mut streams: Vec<u64> = each().filter_map(|it| it.stream).collect();
        streams.sort_unstable();
        streams.dedup();
        let stream = |it: &Holder| it.stream.and_then(|stream| streams.binary_search(&stream).ok());
        let level = |it: &Holder| match it.level {
            Level::Driver => 0,
            Level::Block => 1,
            Level::Cached => 2,
            Level::Buffer => 3,
            Level::Arena => 4,
        };
        json!({
            "level": columns.add(each().map(level)),
            "owner": columns.add(each().map(|it| or_zero(it.owner.0))),
            "site": columns.add(each().map(|it| or_zero(it.site.0))),
            "stack": columns.add(each().map(|it| u64::from(self.stack_of.get(&it.stack.0).copied().unwrap_or(0)))),
            "stream": columns.add(each().map(|it| stream(it).map_or(0, |stream| stream as u64 + 1))),
            "role": columns.add(each().map(|it| u64::from(it.role))),
            "private": columns.add(each().map(|it| u64::from(it.pool))),
            "layer": columns.add(each().map(|it| u64::from(it.layer))),
            "kind": kind,
            "kinds": kinds,
            "streams": streams.iter().map(|stream| format!("{stream:#x}")).collect::<Vec<_>>(),
            "torch": TORCH,
        })
    }

    fn device(&self, ordinal: i16, name: &str, device: &Pictures<'_>, columns: &mut Columns) -> DeviceJson {
        let History { stretch, n_changes, kept, .. } = device.history;
        let (states, rows) = (&kept.states, &kept.rows);
        let since = |time: Nanos| time.0.saturating_sub(self.start);
        let lowest = [device.blocks.lowest(), device.grounds.lowest()];
        let base = lowest.into_iter().flatten().min().unwrap_or(0);
        DeviceJson {
            device: ordinal,
            name: cut(name),
            n_changes: *n_changes,
            whole: device.history.focus().map(|(from, to)| [since(from), since(to)]),
            stretch: *stretch,
            state_time: columns.add(states.iter().map(|state| since(state.time))),
            state_change: columns.add(states.iter().map(|state| state.change)),
            state_rows: columns.add((0..states.len()).map(|idx| kept.rows_of(idx).len() as u64)),
            row_holder: columns.add(rows.iter().map(|row| u64::from(row.holder))),
            row_bytes: columns.add_signed(rows.iter().map(|row| row.bytes)),
            row_objects: columns.add_signed(rows.iter().map(|row| i64::from(row.objects))),
            base: format!("{base:#x}"),
            blocks: device.blocks.write(base, Nanos(self.start), columns),
            grounds: device.grounds.write(base, Nanos(self.start), columns),
            n_unplaced: device.n_unplaced,
        }
    }

    fn marks(&self, (kind, marks): &(MarkKind, Marks), columns: &mut Columns) -> Json {
        let mut texts: Vec<String> = vec![];
        let mut numbers: FxHashMap<String, u64> = FxHashMap::default();
        let mut text = |mark: &Mark| {
            let words = cut(&mark.text);
            let next = texts.len() as u64;
            *numbers.entry(words).or_insert_with_key(|words| {
                texts.push(words.clone());
                next
            })
        };
        let list = &marks.list;
        let text = columns.add(list.iter().map(&mut text).collect::<Vec<_>>().into_iter());
        json!({
            "kind": kind.name(),
            "n": marks.n,
            "from": columns.add(list.iter().map(|mark| mark.from.0.saturating_sub(self.start))),
            // 0: it never ended.
            "time": columns.add(list.iter().map(|mark| mark.to.map_or(0, |to| to.0.saturating_sub(mark.from.0) + 1))),
            "device": columns.add_signed(list.iter().map(|mark| i64::from(mark.device))),
            "bytes": columns.add(list.iter().map(|mark| mark.bytes)),
            // 0: none.
            "stack": columns.add(list.iter().map(|mark| match mark.stack {
                StackId(0) => 0,
                stack => self.stack_of.get(&stack.0).map_or(0, |number| u64::from(*number) + 1),
            })),
            "text": text,
            "texts": texts,
        })
    }
}

/// The layers of a training run, unless it is too long to be looked at twice.
fn layers(story: &Story, source: &Source) -> OfBlocks {
    let is_short = |it: &Lifetimes| it.roles_of_blocks.len() <= MOST_REQUESTS;
    if story.ledger.training().is_none() || !story.lifetimes.as_ref().is_some_and(is_short) {
        return OfBlocks::default();
    }
    source.requests().map(|trace| of_blocks(source, trace)).unwrap_or_default()
}

/// A device, as the page reads it.
#[derive(Serialize)]
struct DeviceJson {
    device: i16,
    name: String,
    n_changes: u64,
    /// From when to when all states are there, where that was asked for.
    whole: Option<[u64; 2]>,
    stretch: u64,
    state_time: ColumnId,
    state_change: ColumnId,
    state_rows: ColumnId,
    row_holder: ColumnId,
    row_bytes: ColumnId,
    row_objects: ColumnId,
    base: String,
    blocks: RectangleColumns,
    grounds: RectangleColumns,
    n_unplaced: u64,
}

/// Names can be of any length; what is shown of them cannot.
fn cut(name: &str) -> String {
    match name.char_indices().nth(LONGEST_NAME) {
        Some((at, _)) => format!("{}…", &name[..at]),
        None => name.to_owned(),
    }
}

#[cfg(test)]
mod tests;
