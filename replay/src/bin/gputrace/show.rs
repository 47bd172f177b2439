//! What the verbs that show something have in common.

use std::fs::{File, OpenOptions};
use std::io::{IsTerminal, Write};
use std::ops::Deref;
use std::os::fd::{AsFd, IntoRawFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use anyhow::{Context, anyhow, bail};
use clap::builder::{
    MapValueParser, PathBufValueParser, PossibleValue, PossibleValuesParser, TypedValueParser,
    ValueParserFactory,
};
use clap::{Args, ValueEnum, ValueHint};
use gputrace_replay::analyse::categories::Categories;
use gputrace_replay::analyse::live::{Native, Parts, View, When, span, view};
use gputrace_replay::reduce::{ENDING, Summary, is_summary};
use gputrace_replay::report::model::{Part, Report};
use gputrace_replay::report::processes::{self, Traced};
use gputrace_replay::report::render::{json, text};
use gputrace_replay::trace::source::Source;
use gputrace_schemas::event::Nanos;
use gputrace_schemas::printable::{Screen, printable};
use serde::Serialize;

use crate::objects;
use crate::working::{self, Working};

/// Says on the standard error, in a line, what went wrong: `eprintln!` for text with names in it.
macro_rules! complain {
    ($($words:tt)*) => {
        $crate::show::say(&format!("gputrace: {}\n", gputrace_schemas::printable::printable(&format!($($words)*))))
    };
}
pub(crate) use complain;

/// A file's name in a line.
pub(crate) fn shown(path: &Path) -> String {
    printable(&path.to_string_lossy()).into_owned()
}

/// A trace, a snapshot or a summary to read, or a folder of them, as the command line names it.
///
/// Every argument that names one has this type: before a verb runs, the program waits for the recorders of all of them, and
/// refuses summaries where the verb needs every event.
#[derive(Clone, Debug)]
pub(crate) struct Named(PathBuf);

impl ValueParserFactory for Named {
    type Parser = MapValueParser<PathBufValueParser, fn(PathBuf) -> Named>;

    fn value_parser() -> Self::Parser {
        PathBufValueParser::new().map(Named)
    }
}

impl Deref for Named {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl AsRef<Path> for Named {
    fn as_ref(&self) -> &Path {
        &self.0
    }
}

/// What shells complete a [`Named`] with.
pub(crate) const FILES: ValueHint = ValueHint::AnyPath;

/// Help of an argument that takes any traces.
pub(crate) const TRACES: &str = "Traces, PyTorch snapshots (plain or .gz), or folders of them; - for stdin";

const NEWEST: &str = "Traces, PyTorch snapshots (plain or .gz), or folders of them; - for stdin [default: the newest trace here]";

/// Which traces to read.
#[derive(Args)]
pub(crate) struct TraceArgs {
    #[arg(value_name = "TRACE|DIR", value_hint = FILES, help = NEWEST)]
    traces: Vec<Named>,
}

impl TraceArgs {
    /// One trace, as if it had been named.
    pub(crate) fn one(trace: &Path) -> TraceArgs {
        TraceArgs { traces: vec![Named(trace.to_owned())] }
    }

    /// The traces that were named, and those in the folders that were named; the newest trace of the current folder where none was.
    pub(crate) fn paths(&self) -> anyhow::Result<Vec<PathBuf>> {
        if self.traces.is_empty() { Ok(vec![newest()?]) } else { paths(&self.traces) }
    }

    /// As they were named.
    pub(crate) fn named(&self) -> impl Iterator<Item = &Path> {
        self.traces.iter().map(|trace| &**trace)
    }
}

/// The trace of the current folder that was written last, which is named on the standard error.
fn newest() -> anyhow::Result<PathBuf> {
    static SAYS: Once = Once::new();
    let entries = std::fs::read_dir(".").context("cannot read the current folder")?;
    let entries = entries.filter_map(|entry| Some(entry.ok()?.file_name().into()));
    let traces = entries.filter(|path: &PathBuf| path.extension().is_some_and(|ending| ending == "gtr"));
    let written = |path: &PathBuf| std::fs::metadata(path).and_then(|file| file.modified()).ok();
    let newest = traces.max_by_key(written);
    let newest = newest.context("no trace was named, and there is none (*.gtr) in the current folder")?;
    SAYS.call_once(|| complain!("reading {}, the newest trace here", shown(&newest)));
    Ok(newest)
}

/// The traces that were named, and those in the folders that were named.
pub(crate) fn paths<P: AsRef<Path>>(named: &[P]) -> anyhow::Result<Vec<PathBuf>> {
    let mut paths = vec![];
    for path in named.iter().map(AsRef::as_ref) {
        if path.as_os_str() == "-" {
            paths.push(spooled().context("cannot keep a copy of standard input")?);
            continue;
        }
        if objects::is_url(path) {
            paths.extend(objects::named(path, is_trace)?);
            continue;
        }
        if !path.is_dir() {
            paths.push(path.to_owned());
            continue;
        }
        let entries = std::fs::read_dir(path).with_context(|| format!("cannot read {}", path.display()))?;
        let entries: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        let mut found: Vec<PathBuf> = entries.iter().filter(|path| is_trace(path)).cloned().collect();
        if found.is_empty() {
            // Beside their traces, summaries say nothing more.
            found.extend(entries.into_iter().filter(|path| is_summary(path)));
        }
        if found.is_empty() {
            bail!("no traces (*.gtr), snapshots (*.pickle) or summaries (*{ENDING}) in {}", path.display());
        }
        found.sort();
        paths.extend(found);
    }
    Ok(paths)
}

/// Whether a name is a folder's, here or in object storage.
pub(crate) fn is_folder(name: &Path) -> bool {
    name.is_dir() || (objects::is_url(name) && !objects::is_object(name, is_trace))
}

/// Whether a file of a folder is a trace or a snapshot, by its name.
fn is_trace(path: &Path) -> bool {
    const ENDINGS: [&str; 5] = [".gtr", ".pickle", ".pickle.gz", ".pkl", ".pkl.gz"];
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    ENDINGS.iter().any(|ending| name.ends_with(ending))
}

/// The one trace that was named, or that is in the folder that was named.
pub(crate) fn only(named: &Path) -> anyhow::Result<PathBuf> {
    match &mut *paths(&[named])? {
        [only] => Ok(std::mem::take(only)),
        many => bail!("{} has {} traces: name one of them", named.display(), many.len()),
    }
}

/// `-` is what is on the standard input, kept in a file without a name: traces are read more than once.
fn spooled() -> anyhow::Result<PathBuf> {
    let mut file = unnamed()?;
    std::io::copy(&mut std::io::stdin().lock(), &mut file)?;
    Ok(kept(file))
}

/// A file without a name: nothing is left of it, however the process ends.
pub(crate) fn unnamed() -> std::io::Result<File> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name = format!("gputrace.{}.{}.part", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let path = std::env::temp_dir().join(name);
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

/// What opens a file without a name, until the process ends.
pub(crate) fn kept(file: File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.into_raw_fd()))
}

/// Which moment to look at.
#[derive(Args)]
pub(crate) struct WhenArgs {
    /// At the device's peak, the default for a single moment
    #[arg(long, conflicts_with_all = ["at", "end"])]
    peak: bool,
    /// At this time after the start: 1.5s, 200ms, 2m, 1:30, or nanoseconds
    #[arg(long, value_name = "TIME", value_parser = time, conflicts_with = "end")]
    at: Option<u64>,
    /// At the peak between two times: 10s..20s, 10s.. or ..20s
    #[arg(long, value_name = "A..B", value_parser = range, conflicts_with_all = ["peak", "at", "end"])]
    range: Option<When>,
    /// At the peak of a training step, as numbered by `report`
    #[arg(long, value_name = "N", conflicts_with_all = ["peak", "at", "end", "range"])]
    step: Option<u64>,
    /// At the end of the trace
    #[arg(long)]
    end: bool,
}

impl WhenArgs {
    /// The moment that was asked for, or the peak.
    pub(crate) fn when(&self) -> When {
        self.asked().unwrap_or(When::Peak)
    }

    /// The moment that was asked for.
    pub(crate) fn asked(&self) -> Option<When> {
        let step = self.step.map(When::Step);
        let at = self.at.map(|time| When::At(Nanos(time)));
        let end = self.end.then_some(When::End);
        self.range.or(step).or(at).or(end).or(self.peak.then_some(When::Peak))
    }
}

/// What was held at a moment, or why the trace has no such moment or parts.
pub(crate) fn view_of(
    source: &Source,
    when: When,
    parts: Parts,
    categories: &Categories,
) -> anyhow::Result<View> {
    let view = view(source, when, parts, categories);
    let path = source.path();
    span(&view.story, when).map_err(|why| anyhow!("{path}: {why}"))?;
    if parts == Parts::Phases && view.story.ledger.phases.is_empty() {
        bail!("{path}: no phases, because the program opened no NVTX range; --group-by category needs none");
    }
    Ok(view)
}

/// A moment in one word: `peak`, `end`, `step:3`, `10s..20s` or a time.
pub(crate) fn moment(text: &str) -> Result<When, String> {
    match text.strip_prefix("step:").map(str::parse) {
        Some(Ok(number)) => return Ok(When::Step(number)),
        Some(Err(_)) => return Err(format!("`{text}` is not a step; write step:3")),
        None => {}
    }
    match text {
        "peak" => Ok(When::Peak),
        "end" => Ok(When::End),
        _ if text.contains("..") => range(text),
        _ => time(text).map(|time| When::At(Nanos(time))),
    }
}

fn range(text: &str) -> Result<When, String> {
    let (from, to) =
        text.split_once("..").ok_or_else(|| format!("`{text}` is not a range; write 10s..20s"))?;
    let end = |text: &str, open: u64| if text.is_empty() { Ok(open) } else { time(text) };
    let (from, to) = (end(from, 0)?, end(to, u64::MAX)?);
    if from > to {
        return Err(format!("`{text}` ends before it begins"));
    }
    Ok(When::Within(Nanos(from), Nanos(to)))
}

/// Nanoseconds of `1.5s`, `200ms`, `2m`, `1m30s`, `1:30` or `1:02:03.5`; a number alone is nanoseconds.
pub(crate) fn time(text: &str) -> Result<u64, String> {
    let units = [
        ("ns", 1.0),
        ("us", 1e3),
        ("µs", 1e3),
        ("ms", 1e6),
        ("s", 1e9),
        ("min", 6e10),
        ("m", 6e10),
        ("h", 36e11),
    ];
    let wrong = || format!("`{text}` is not a time; write 1.5s, 200ms, 2m, 1m30s, 1:30 or nanoseconds");
    let number = |digits: &str| {
        let is_number = digits.chars().all(|c| c.is_ascii_digit() || c == '.');
        digits.parse::<f64>().ok().filter(|_| is_number)
    };
    if text.contains(':') {
        let parts = text.split(':').map(number).collect::<Option<Vec<_>>>().filter(|parts| parts.len() <= 3);
        let seconds = parts.ok_or_else(wrong)?.into_iter().fold(0.0, |sum, part| sum * 60.0 + part);
        return Ok((seconds * 1e9) as u64);
    }
    if let Some(nanoseconds) = number(text) {
        return Ok(nanoseconds as u64);
    }
    let (mut rest, mut sum) = (text, 0.0);
    while !rest.is_empty() {
        let unit_at = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
        let (digits, more) = rest.split_at(unit_at);
        let end = more.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(more.len());
        let (unit, more) = more.split_at(end);
        let scale = units.iter().find(|(name, _)| *name == unit).map(|(_, scale)| scale);
        sum += number(digits).ok_or_else(wrong)? * scale.ok_or_else(wrong)?;
        rest = more;
    }
    Ok(sum as u64)
}

/// Parses what is one of the library's choices: their names, and what each means.
pub(crate) fn one_of<T: Copy + Send + Sync + 'static>(
    choices: &'static [(&'static str, T, &'static str)],
) -> impl TypedValueParser<Value = T> {
    let names = choices.iter().map(|(name, _, meaning)| PossibleValue::new(name).help(meaning));
    PossibleValuesParser::new(names).try_map(|wanted| {
        choices.iter().find(|(name, ..)| *name == wanted).map(|(_, choice, _)| *choice).ok_or("not a choice")
    })
}

/// Which frames to show.
#[derive(Args)]
pub(crate) struct NativeArgs {
    /// Show native frames beside Python frames
    #[arg(long)]
    native: bool,
}

impl NativeArgs {
    pub(crate) fn native(&self) -> Native {
        if self.native { Native::Shown } else { Native::Hidden }
    }
}

/// How to show it.
#[derive(Args, Default)]
pub(crate) struct ShowArgs {
    /// Write JSON, with integer bytes and nanoseconds
    #[arg(long)]
    pub(crate) json: bool,
    /// Use colours; `auto` follows the terminal, NO_COLOR, CLICOLOR and CLICOLOR_FORCE
    #[arg(long, value_enum, value_name = "WHEN", default_value = "auto")]
    color: Color,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum Color {
    #[default]
    Auto,
    Always,
    Never,
}

impl ShowArgs {
    /// Writes the report the way the user wants it.
    pub(crate) fn write(&self, report: &Report, out: &mut Screen) -> anyhow::Result<()> {
        self.write_as(report, &json::render(report), out)
    }

    /// The same, where programs get JSON of another shape.
    pub(crate) fn write_as(
        &self,
        report: &Report,
        json: &impl Serialize,
        out: &mut Screen,
    ) -> anyhow::Result<()> {
        if !self.json {
            text::render(report, self.style(), out.behind())?;
            return Ok(());
        }
        let mut out = out.json();
        serde_json::to_writer_pretty(&mut out, json)?;
        writeln!(out)?;
        Ok(())
    }

    /// The same of an answer, with its keys in the order of the alphabet.
    pub(crate) fn write_answer(
        &self,
        report: &Report,
        answer: &impl Serialize,
        out: &mut Screen,
    ) -> anyhow::Result<()> {
        let json = if self.json { serde_json::to_value(answer)? } else { serde_json::Value::Null };
        self.write_as(report, &json, out)
    }

    /// Whether a report has more lines than the terminal that it would be shown on. Files and pipes have room for all.
    pub(crate) fn is_too_high(&self, report: &Report) -> bool {
        let stdout = std::io::stdout();
        let size = terminal_size::terminal_size_of(&stdout);
        let Some((_, height)) = size.filter(|_| !self.json && stdout.is_terminal()) else { return false };
        let mut shown = vec![];
        // Writing to memory does not fail. A line is left for the prompt.
        let _ = text::render(report, self.style(), &mut shown);
        shown.iter().filter(|byte| **byte == b'\n').count() >= usize::from(height.0)
    }

    fn style(&self) -> text::Style {
        style(self.color, &std::io::stdout())
    }
}

/// Shows a picture at once: whoever made it has made what is in it printable, and moved no cursor but ours.
pub(crate) fn paint(out: &mut Screen, picture: &str) -> std::io::Result<()> {
    out.behind().write_all(picture.as_bytes())?;
    out.behind().flush()
}

/// How text may look on the standard error.
pub(crate) fn stderr_style() -> text::Style {
    style(Color::Auto, &std::io::stderr())
}

fn style(color: Color, stream: &(impl IsTerminal + AsFd)) -> text::Style {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let is_terminal = stream.is_terminal();
    let color = match color {
        Color::Always => true,
        Color::Never => false,
        Color::Auto if set("NO_COLOR").is_some() => false,
        Color::Auto if set("CLICOLOR_FORCE").is_some_and(|value| value != "0") => true,
        Color::Auto if set("CLICOLOR").is_some_and(|value| value == "0") => false,
        Color::Auto => is_terminal && set("TERM").is_none_or(|term| term != "dumb"),
    };
    let columns = set("COLUMNS").and_then(|columns| columns.to_str()?.parse().ok());
    let terminal = || terminal_size::terminal_size_of(stream).map(|(width, _)| usize::from(width.0));
    // What goes into a file or a pipe is not cut.
    let width = columns.or_else(|| is_terminal.then(terminal).flatten());
    text::Style {
        width: width.map(|width| width.max(40)),
        color,
        letters: letters(|name| std::env::var(name).ok()),
    }
}

/// What the locale's letters are, as `setlocale` finds it: the first of these that says something.
fn letters(variable: impl Fn(&str) -> Option<String>) -> text::Letters {
    let said =
        ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().filter_map(variable).find(|value| !value.is_empty());
    let said = said.unwrap_or_default().to_ascii_lowercase();
    match said.contains("utf-8") || said.contains("utf8") {
        true => text::Letters::Unicode,
        false => text::Letters::Ascii,
    }
}

/// Says words on the standard error, in one piece, so that a program's own lines do not come between.
pub(crate) fn say(words: &str) {
    let mut shown = vec![];
    // Writing to memory does not fail.
    let _ = Screen::new(&mut shown).write_all(words.as_bytes());
    working::erase();
    say_shown(&shown);
}

/// The same, of what went through a screen already.
pub(crate) fn say_shown(words: &[u8]) {
    // Nobody may be listening any more.
    let _ = std::io::stderr().write_all(words);
}

/// What could not be read, or not be judged: docs/EXIT-CODES.md.
pub(crate) const CANNOT_KNOW: u8 = 2;
/// What a gate that was asked for refuses.
const REFUSED: u8 = 1;

/// What a gate says: a verb that was asked to fail where something is so. The worst of several traces counts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Gate {
    /// It is well, as far as it was asked for.
    Passes,
    /// It cannot be known.
    CannotKnow,
    /// It is not well.
    Refuses,
}

impl Gate {
    /// The exit status of a verb that has shown what it could read.
    pub(crate) fn exit_code(self, all_read: bool) -> ExitCode {
        match self {
            Gate::Passes => exit_code(all_read),
            Gate::CannotKnow => ExitCode::from(CANNOT_KNOW),
            Gate::Refuses => ExitCode::from(REFUSED),
        }
    }

    /// That it cannot be known, said on stderr with the reason.
    pub(crate) fn cannot_know(subject: &str, why: &str) -> Gate {
        complain!("{subject}: cannot tell: {why}");
        Gate::CannotKnow
    }
}

/// Whether the reader of our output went away (`gputrace … | head`): nothing that we should complain about.
pub(crate) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|io| io.kind() == std::io::ErrorKind::BrokenPipe)
}

/// For what has a verdict to give, whether somebody reads on or not.
pub(crate) fn unless_closed(written: anyhow::Result<()>) -> anyhow::Result<()> {
    written.or_else(|error| if is_closed_pipe(&error) { Ok(()) } else { Err(error) })
}

/// The exit status of a verb that has shown what it could read.
pub(crate) fn exit_code(all_read: bool) -> ExitCode {
    if all_read { ExitCode::SUCCESS } else { ExitCode::from(CANNOT_KNOW) }
}

/// Reads traces, two at a time: those that can be read, and whether all can. What cannot is said on stderr.
pub(crate) fn read_all<T: Send>(
    paths: &[PathBuf],
    read: impl Fn(&Path) -> anyhow::Result<T> + Sync,
) -> (Vec<T>, bool) {
    let next = AtomicUsize::new(0);
    let work = |is_first: bool| {
        let mut results = vec![];
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(path) = paths.get(at) else { return results };
            let _working = is_first.then(|| Working::on(path));
            results.push((at, read(path)));
        }
    };
    let mut results: Vec<_> = std::thread::scope(|scope| {
        let threads = [true, false].map(|is_first| {
            let work = &work;
            scope.spawn(move || work(is_first))
        });
        let joined = threads.map(std::thread::ScopedJoinHandle::join);
        joined
            .into_iter()
            .flat_map(|it| it.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    results.sort_unstable_by_key(|(at, _)| *at);
    let (mut all, mut done) = (true, vec![]);
    for (_, result) in results {
        match result {
            Ok(read) => done.push(read),
            Err(error) => {
                all = false;
                complain!("{error:#}");
            }
        }
    }
    (done, all)
}

/// Who started whom, where there are several. In JSON, `summary` and `ranks` say it.
pub(crate) fn family(traced: &[Traced<'_>]) -> Option<Part> {
    if traced.len() < 2 {
        return None;
    }
    let section = processes::section(&processes::tree(traced))?;
    Some(Part { sections: vec![section], ..Part::default() })
}

/// Shows what was held at a moment, in each trace. What cannot be read is said on stderr.
pub(crate) fn moment_of(
    verb: &'static str,
    traces: &TraceArgs,
    when: When,
    (parts, categories): (Parts, &Categories),
    show: &ShowArgs,
    out: &mut Screen,
) -> anyhow::Result<ExitCode> {
    each(verb, traces, show, out, |source| {
        let view = view_of(source, when, parts, categories)?;
        let sections = gputrace_replay::answers::moment::sections(&view, when, parts);
        Ok(gputrace_replay::report::part(&view.story, sections))
    })
}

/// Shows a part about each trace. What cannot be read is said on stderr and makes the exit status a failure.
pub(crate) fn each(
    verb: &'static str,
    traces: &TraceArgs,
    show: &ShowArgs,
    out: &mut Screen,
    mut part: impl FnMut(&Source) -> anyhow::Result<Part>,
) -> anyhow::Result<ExitCode> {
    let part = |path: &Path| Source::open(path).map_err(Into::into).and_then(|source| part(&source));
    let (report, all_read) = parts(verb, &traces.paths()?, part);
    if !report.parts.is_empty() || show.json {
        show.write(&report, out)?;
    }
    Ok(exit_code(all_read))
}

/// Says of the first summary among these that the trace is needed for what was asked.
pub(crate) fn needs_traces(paths: &[PathBuf], what: &str) -> anyhow::Result<()> {
    match paths.iter().find(|path| is_summary(path)) {
        Some(path) => Err(Summary::open(path)?.lacks(what).into()),
        None => Ok(()),
    }
}

/// A part about each trace, and whether all could be read. What could not is said on stderr.
pub(crate) fn parts(
    verb: &'static str,
    paths: &[PathBuf],
    mut part: impl FnMut(&Path) -> anyhow::Result<Part>,
) -> (Report, bool) {
    let (mut report, mut all_read) = (Report { verb, parts: vec![] }, true);
    for path in paths {
        let working = Working::on(path);
        let done = part(path);
        drop(working);
        match done {
            Ok(part) => report.parts.push(part),
            Err(error) => {
                all_read = false;
                complain!("{error:#}");
            }
        }
    }
    (report, all_read)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_variable_of_the_locale_that_says_something_decides_about_letters() {
        let of = |set: &[(&str, &str)]| {
            letters(|name| set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
        };
        assert_eq!(of(&[]), text::Letters::Ascii);
        assert_eq!(of(&[("LANG", "de_DE.UTF-8")]), text::Letters::Unicode);
        assert_eq!(of(&[("LANG", "C.utf8"), ("LC_CTYPE", ""), ("LC_ALL", "")]), text::Letters::Unicode);
        assert_eq!(of(&[("LANG", "C.UTF-8"), ("LC_CTYPE", "POSIX")]), text::Letters::Ascii);
        assert_eq!(of(&[("LANG", "de_DE.ISO-8859-1"), ("LC_ALL", "en_US.UTF-8")]), text::Letters::Unicode);
        assert_eq!(of(&[("LC_ALL", "C"), ("LANG", "C.UTF-8")]), text::Letters::Ascii);
    }
}
