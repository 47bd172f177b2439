//! `gputrace html`: traces as one file for any browser.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{ArgMatches, Args};
use gputrace_replay::analyse::categories::Categories;
use gputrace_replay::page::{Chapter, Page, Placed, Store};
use gputrace_replay::ranks::calls::Participant;
use gputrace_replay::ranks::collect::Collector;
use gputrace_replay::ranks::report::Ranks;
use gputrace_replay::reduce::again;
use gputrace_replay::report::model::Section;
use gputrace_replay::report::sections::Shown;
use gputrace_replay::story::Story;
use gputrace_replay::trace::source::Source;
use gputrace_schemas::event::Nanos;
use gputrace_schemas::printable::Screen;
use gputrace_sim::bytes::iec;

use super::Verb;
use super::export::{check_place, write_whole};
use crate::show::{self, TraceArgs, complain};

pub(super) const VERB: Verb = Verb::new::<HtmlArgs>("html", run).of_replays();

/// Write a page for any browser: verdict, memory over time, address map, what-ifs, ranks, tables
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace html train.gtr                   # writes train.html
  gputrace html job/ -o job.html            # all ranks of a job
  gputrace html --redact -o shown.html snapshot.pickle.gz

The page needs no network or server. It is at most 20 MB, and lists what was left out for that.")]
pub(super) struct HtmlArgs {
    #[command(flatten)]
    traces: TraceArgs,

    /// File to write [default: the first trace's name with .html, in the current folder]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Overwrite existing files
    #[arg(short = 'F', long)]
    force: bool,

    /// Hide paths, arguments, host names and machine identifiers
    #[arg(long)]
    redact: bool,
}

fn run(matches: &ArgMatches, _out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: HtmlArgs = super::parsed(matches)?;
    let paths = args.traces.paths()?;
    let output = args.output.unwrap_or_else(|| named_after(&paths[0]));
    check_place(&output, args.force)?;
    let n_traces = paths.len();
    let (read, all) = show::read_all(&paths, |path| chapter(path, args.redact, n_traces, None));
    if read.is_empty() {
        return Ok(show::exit_code(all));
    }
    write(page(read, args.redact), &output, args.force)?;
    Ok(show::exit_code(all))
}

fn write(mut page: Page, output: &Path, is_forced: bool) -> anyhow::Result<()> {
    let mut bytes = 0;
    write_whole(output, is_forced, |file| {
        bytes = page.write(file)?;
        Ok(())
    })?;
    complain!("wrote {} ({}): open it in a browser", output.display(), iec(bytes as u64));
    Ok(())
}

/// Writes the page of one trace, with what else is to be said of it before what its report says.
pub(super) fn write_with(
    sections: &[Section],
    path: &Path,
    output: &Path,
    is_forced: bool,
) -> anyhow::Result<()> {
    let source = open(path, false)?;
    let (story, verdict) = super::report::understood(&source, &Categories::default(), Shown::OnDemand);
    let mut part = super::report::part(&story, &verdict, Shown::OnDemand);
    part.sections.splice(0..0, sections.iter().cloned());
    let chapter = Chapter::of(&story, &part, &source, 1, None);
    write(Page::of(vec![(story, chapter)], &[], vec![]), output, is_forced)
}

/// A trace, understood.
pub(super) struct Understood {
    story: Story,
    chapter: Chapter,
    /// What is to be known of it where there are others.
    participant: Option<Participant>,
}

/// A trace, understood, as one of so many of a page; with a store, its parts can be had afterwards.
pub(super) fn chapter(
    path: &Path,
    is_redacted: bool,
    n_traces: usize,
    store: Option<Box<dyn Store>>,
) -> anyhow::Result<Understood> {
    let source = open(path, is_redacted)?;
    let (categories, all) = (Categories::default(), Shown::OnDemand);
    let ((story, verdict), participant) = match n_traces {
        0 | 1 => (super::report::understood(&source, &categories, all), None),
        _ => {
            let mut collector = Collector::new(&source);
            let understood = super::report::understood_and(&source, &categories, all, &mut collector);
            let participant = collector.finish(&understood.0);
            (understood, Some(participant))
        }
    };
    let part = super::report::part(&story, &verdict, all);
    let chapter = Chapter::of(&story, &part, &source, n_traces, store);
    Ok(Understood { story, chapter, participant })
}

/// A page of these.
pub(super) fn page(read: Vec<Understood>, is_redacted: bool) -> Page {
    let (mut chapters, mut participants) = (vec![], vec![]);
    for Understood { story, chapter, participant } in read {
        chapters.push((story, chapter));
        participants.extend(participant);
    }
    let (job, findings) = job(&participants, is_redacted);
    Page::of(chapters, &job, findings)
}

pub(super) fn open(path: &Path, is_redacted: bool) -> anyhow::Result<Source> {
    let source = Source::open(path)?;
    Ok(if is_redacted { source.redacted() } else { source })
}

/// `train.html` for `job/train.gtr`.
fn named_after(trace: &Path) -> PathBuf {
    if trace.starts_with("/proc/self/fd") {
        return PathBuf::from("page.html");
    }
    let name = trace.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let known = [".gtr", ".pickle.gz", ".pickle", ".pkl.gz", ".pkl"];
    let stem = known.iter().find_map(|ending| name.strip_suffix(ending)).unwrap_or(&name);
    PathBuf::from(format!("{stem}.html"))
}

/// What is said of the ranks of a job, and at which calls of which traces that shows.
fn job(participants: &[Participant], is_redacted: bool) -> (Vec<Section>, Vec<Placed>) {
    if participants.is_empty() {
        return (vec![], vec![]);
    }
    let again = |it: &_| again(it).filter(|_| !is_redacted);
    let ranks = Ranks::of(participants, &again);
    let mut placed = vec![];
    for job in &ranks.jobs {
        let trace = |rank: u32| {
            let path = &job.ranks.iter().find(|it| it.rank == rank)?.trace;
            participants.iter().position(|it| it.path == *path)
        };
        for finding in &job.findings {
            for call in finding.own.iter().chain(&finding.others) {
                if let Some(trace) = trace(call.rank).filter(|_| call.time_ns > 0) {
                    let text = finding.text.clone();
                    placed.push(Placed { trace, time: Nanos(call.time_ns), text });
                }
            }
        }
    }
    let report = ranks.report();
    (report.parts.into_iter().flat_map(|part| part.sections).collect(), placed)
}
