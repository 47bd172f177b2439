//! `gputrace report`: where the memory went.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow};
use clap::{ArgMatches, Args};
use gputrace_replay::analyse::categories::Categories;
use gputrace_replay::analyse::growth::Growth;
use gputrace_replay::analyse::live::{Lines, Native, Parts, When};
use gputrace_replay::answers::model_copies::{self, Model};
use gputrace_replay::answers::moment;
use gputrace_replay::answers::postmortem::Postmortem;
use gputrace_replay::answers::verdict::verdict_beside;
use gputrace_replay::ledger::{Unwatched, Watch};
use gputrace_replay::reduce::{Head, Summary, is_summary};
use gputrace_replay::report;
use gputrace_replay::report::history;
use gputrace_replay::report::model::{Item, Mood, Part, Report, Section, Table, Value, Verdict};
use gputrace_replay::report::sections::{Shown, of_report};
use gputrace_replay::story::Story;
use gputrace_replay::trace::source::Source;
use gputrace_replay::trace::words::quote;
use gputrace_schemas::printable::Screen;
use gputrace_schemas::reader::Trace;

use super::Verb;
use crate::show::{self, ShowArgs, TraceArgs, WhenArgs};

/// Traces of a folder among which those of children are looked for.
const MOST_BESIDE: usize = 256;
/// Traces of child processes that are looked at for a verdict.
const MOST_CHILDREN: usize = 64;
/// Larger ones are left out, bytes.
const MOST_OF_CHILD: u64 = 4 << 20;

pub(super) const VERB: Verb = Verb::new::<ReportArgs>("report", run).of_summaries().of_replays();

/// Explain what happened, which line did it and what to do, and show where the memory went
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace report train.gtr
  gputrace report --all train.gtr
  gputrace report --step 3 train.gtr
  gputrace report --rules roles.txt --json snapshot.pickle.gz
  gputrace report --native train.gtr

On a terminal without room for its sections, `report` shows the verdict and five lines.

With a moment (--peak, --at, --range, --step, --end), `report` shows only what was held then, by owner, role and call site.

A rules file has one rule per line. The first match counts, before gputrace's own roles:
  embeddings: site=*embedding.py* min=1MiB
  paged KV cache: stack=*PagedAttention*
  scratch: role=temporaries max=512KiB")]
pub(super) struct ReportArgs {
    #[command(flatten)]
    traces: TraceArgs,

    /// Your own names for memory: NAME: FIELD=PATTERN ..., with fields site, stack, role, min, max
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,

    /// Show every section, as --json always does
    #[arg(long)]
    all: bool,

    #[command(flatten)]
    when: WhenArgs,

    /// Add the stacks that held most, with native frames if recorded (--stacks all)
    #[arg(long)]
    native: bool,

    #[command(flatten)]
    show: ShowArgs,
}

impl ReportArgs {
    /// What is asked for that no summary has.
    fn beyond_summaries(&self) -> Option<&'static str> {
        match (self.rules.is_some(), self.native, self.when.asked()) {
            (true, ..) => Some("naming memory by --rules"),
            (false, true, _) => Some("--native"),
            (false, false, Some(_)) => Some("a moment"),
            (false, false, None) => None,
        }
    }
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: ReportArgs = super::parsed(matches)?;
    let categories = args.rules.as_deref().map(categories).transpose()?.unwrap_or_default();
    let when = args.when.asked();
    let wanted = if args.all || args.show.json { Shown::OnDemand } else { Shown::Always };
    let paths = args.traces.paths()?;
    if let Some(what) = args.beyond_summaries() {
        show::needs_traces(&paths, what)?;
    }
    if args.native {
        let part = |source: &Source| with_stacks(source, when, &categories, wanted);
        return show::each("report", &args.traces, &args.show, out, part);
    }
    if let Some(when) = when {
        return show::moment_of("report", &args.traces, when, (Parts::Roles, &categories), &args.show, out);
    }
    let (read, all) = show::read_all(&paths, |path| {
        if is_summary(path) {
            let summary = Summary::open(path)?;
            let verb = if wanted == Shown::OnDemand { "report --all" } else { "report" };
            return Ok(((summary.head()?, summary.answer(verb)?), vec![]));
        }
        let (story, verdict) = understood(&Source::open(path)?, &categories, wanted);
        Ok(((Head::of(&story), part(&story, &verdict, wanted)), Model::all_of(&story)))
    });
    let (read, models): (Vec<(Head, Part)>, Vec<Vec<Model>>) = read.into_iter().unzip();
    let copies = model_copies::in_words(&models.concat());
    let job = if args.show.json { None } else { job(&read, &paths, &args.traces, copies) };
    let mut each: Vec<Part> = read.into_iter().map(|(_, part)| part).collect();
    // A person looks for what failed; a program, for the order of its arguments.
    if !args.show.json {
        each.sort_by_key(gravity);
    }
    let parts: Vec<Part> = job.into_iter().chain(each).collect();
    if !parts.is_empty() || args.show.json {
        let report = Report { verb: "report", parts };
        let is_brief = wanted == Shown::Always && args.show.is_too_high(&report);
        let report = if is_brief { brief(report, &args.traces) } else { report };
        args.show.write(&report, out)?;
    }
    Ok(show::exit_code(all))
}

/// How soon a person is to see it: what failed, what is wrong, and all else.
fn gravity(part: &Part) -> u8 {
    match part.verdict.as_ref().map_or("", |verdict| verdict.kind) {
        "out_of_memory" | "killed" | "gpu_fault" | "left" => 0,
        "nothing_wrong" | "running" | "cannot_tell" | "" => 2,
        _ => 1,
    }
}

/// The same in as few lines as a terminal has: of one process its verdict and five lines, of a job what is said of all.
fn brief(report: Report, traces: &TraceArgs) -> Report {
    let named: Vec<String> = traces.named().map(|path| quote(&path.to_string_lossy())).collect();
    let more = format!("gputrace report --all {}", named.join(" "));
    let mut parts = report.parts;
    match &mut *parts {
        [only] => *only = report::brief::brief(only, &more),
        several => {
            if let Some(section) = several[0].sections.last_mut() {
                section.items.push(Item::Line(Mood::Command, more));
            }
            parts.truncate(1);
        }
    }
    Report { parts, ..report }
}

/// What was held where a trace ends, as `report --end` shows it.
pub(super) fn of_the_end(trace: &Path, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let (traces, categories) = (TraceArgs::one(trace), Categories::default());
    show::moment_of("report", &traces, When::End, (Parts::Roles, &categories), &ShowArgs::default(), out)
}

/// A trace with its verdict, and with all that the sections to be shown need.
pub(super) fn understood(source: &Source, categories: &Categories, wanted: Shown) -> (Story, Verdict) {
    understood_and(source, categories, wanted, &mut Unwatched)
}

/// The verdict above what a verb says that shows its evidence.
pub(super) fn below_verdict(part: Part, source: &Source) -> Part {
    let (story, verdict) = understood(source, &Categories::default(), Shown::Always);
    let part = headed(part, &story, verdict);
    Part { verdict: part.verdict.map(as_of_evidence), ..part }
}

/// A verdict above its evidence: there is nothing to type next for that.
pub(super) fn as_of_evidence(mut verdict: Verdict) -> Verdict {
    verdict.section.items.retain(|item| !matches!(item, Item::Fact { name: "next", .. }));
    verdict
}

/// The same, with somebody else who watches in the same pass.
pub(super) fn understood_and(
    source: &Source,
    categories: &Categories,
    wanted: Shown,
    watch: &mut dyn Watch,
) -> (Story, Verdict) {
    let mut both = (Growth::default(), watch);
    let story = Story::with_lifetimes_and(source, categories, &mut both);
    let (growth, _) = both;
    let found = Postmortem::of_story(story, source, &growth);
    let verdict = verdict_beside(&found, source, &beside(&found.story));
    let story = if wanted == Shown::OnDemand { found.story.with_gaps(source) } else { found.story };
    (story, verdict)
}

/// Traces in its folder of the processes that this process started. Large ones are not read, nor is a folder of very many.
fn beside(of: &Story) -> Vec<Story> {
    let path = Path::new(&of.path);
    let Some(folder) = path.parent() else { return vec![] };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let is_small_trace = |path: &PathBuf| {
        path.extension().is_some_and(|ending| ending == "gtr")
            && path.metadata().is_ok_and(|file| file.is_file() && file.len() <= MOST_OF_CHILD)
    };
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut others: Vec<PathBuf> = entries.filter(is_small_trace).take(MOST_BESIDE + 1).collect();
    if others.len() > MOST_BESIDE {
        return vec![];
    }
    others.sort();
    // Whose a trace is stands at its beginning.
    let is_child = |path: &PathBuf| Trace::open(path).is_ok_and(|it| it.process().descends_from(&of.process));
    let children = others.into_iter().filter(is_child).take(MOST_CHILDREN);
    children.filter_map(|path| Story::read(&path).ok()).collect()
}

/// What is said of one process.
pub(super) fn part(story: &Story, verdict: &Verdict, wanted: Shown) -> Part {
    headed(report::part(story, of_report(story, wanted)), story, verdict.clone())
}

fn headed(mut part: Part, story: &Story, verdict: Verdict) -> Part {
    // The verdict says it first.
    if story.since().is_none() {
        part.sections.retain(|section| section.name != history::NAME);
    }
    Part { verdict: Some(verdict), ..part }
}

/// What is to be known of several processes before each is looked at: who started whom, and how each fared.
fn job(read: &[(Head, Part)], paths: &[PathBuf], traces: &TraceArgs, copies: Option<String>) -> Option<Part> {
    let traced: Vec<_> = read.iter().map(|(head, _)| head.traced()).collect();
    let family = show::family(&traced);
    if read.len() < 2 {
        return None;
    }
    let title = |part: &Part| {
        let title = part.verdict.as_ref().map_or("", |verdict| &*verdict.section.title);
        title.replacen("Verdict: ", "", 1)
    };
    let table = Table::of(
        "verdicts",
        read,
        &[
            ("verdict", "verdict", &|(_, part)| Value::text(title(part))),
            ("rank", "rank", &|(head, _)| {
                head.process.rank.map_or(Value::Missing, |rank| Value::Count(rank.into()))
            }),
            ("trace", "trace", &|(head, _)| Value::text(&*head.path)),
        ],
    );
    let section = Section::new("verdicts", "Verdicts").table(table);
    let section = copies.into_iter().fold(section, |section, copies| section.line(Mood::Warning, copies));
    let is_job = read.iter().any(|(head, _)| head.is_of_job);
    let n_mapping = read.iter().filter(|(head, _)| head.maps_others).count();
    let named: Vec<String> = traces.named().map(|path| quote(&path.to_string_lossy())).collect();
    let ranks = format!("gputrace ranks {}", named.join(" "));
    let section = match n_mapping {
        0 => section,
        n => section.line(Mood::Note, format!(
            "memory of other processes is mapped by {n} of these processes: each byte counts once, for the process that created it; `gputrace ranks` names both sides"
        )),
    };
    let section = if is_job || n_mapping > 0 { section.line(Mood::Command, ranks) } else { section };
    let family = family.unwrap_or_default();
    let communication = if is_job { super::ranks::verdicts(paths) } else { vec![] };
    let sections = communication.into_iter().chain(std::iter::once(section)).chain(family.sections).collect();
    Some(Part { sections, ..Part::default() })
}

/// The report with a section more, behind that of the call sites.
fn with_stacks(
    source: &Source,
    when: Option<When>,
    categories: &Categories,
    wanted: Shown,
) -> anyhow::Result<Part> {
    let view = show::view_of(source, when.unwrap_or(When::Peak), Parts::Roles, categories)?;
    let mut part = match when {
        Some(when) => report::part(&view.story, moment::sections(&view, when, Parts::Roles)),
        None => {
            let (story, verdict) = understood(source, categories, wanted);
            part(&story, &verdict, wanted)
        }
    };
    let stacks = moment::stacks(&view, &mut Lines::new(source.definitions(), Native::Shown));
    let sites = part.sections.iter().position(|section| section.name == "call_sites");
    part.sections.insert(sites.map_or(part.sections.len(), |at| at + 1), stacks);
    Ok(part)
}

fn categories(path: &Path) -> anyhow::Result<Categories> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    Categories::parse(&text).map_err(|what| anyhow!("{}: {what}", path.display()))
}
