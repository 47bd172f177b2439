//! `gputrace report`: where the memory went.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow};
use clap::{ArgMatches, Args};
use gputrace_replay::analyse::categories::Categories;
use gputrace_replay::analyse::live::{Lines, Native, Parts, When};
use gputrace_replay::answers::moment;
use gputrace_replay::import;
use gputrace_replay::report;
use gputrace_replay::report::model::Part;
use gputrace_replay::report::sections::SECTIONS;
use gputrace_replay::story::Story;
use gputrace_replay::trace::source::Source;
use gputrace_schemas::printable::Screen;

use super::Verb;
use crate::show::{self, ShowArgs, Stories, TraceArgs, WhenArgs};

pub(super) const VERB: Verb = Verb::new::<ReportArgs>("report", run);

/// Shows where the memory went: the peak, its owners, roles and call sites, what would lower it, and what ran out
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace report train.gtr
  gputrace report --step 3 train.gtr
  gputrace report --rules roles.txt --json snapshot.pickle.gz
  gputrace report --native train.gtr

With a moment (--peak, --at, --range, --step, --end), only what was held then is shown: owners, roles and call sites.

A rules file names memory in your own words, one rule per line; the first that fits counts, before gputrace's own roles:
  embeddings: site=*embedding.py* min=1MiB
  paged KV cache: stack=*PagedAttention*
  scratch: role=temporaries max=512KiB")]
pub(super) struct ReportArgs {
    #[command(flatten)]
    traces: TraceArgs,

    /// Your own names for memory: NAME: FIELD=PATTERN ..., with the fields site, stack, role, min and max
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,

    #[command(flatten)]
    when: WhenArgs,

    /// Add the stacks that held most, native frames beside those of Python where they were recorded (--stacks all)
    #[arg(long)]
    native: bool,

    #[command(flatten)]
    show: ShowArgs,
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: ReportArgs = super::parsed(matches)?;
    let categories = args.rules.as_deref().map(categories).transpose()?.unwrap_or_default();
    let when = args.when.asked();
    if args.native {
        let part = |source: &Source| with_stacks(source, when, &categories);
        return show::each("report", &args.traces, &args.show, out, part);
    }
    if let Some(when) = when {
        return show::moment_of("report", &args.traces, when, (Parts::Roles, &categories), &args.show, out);
    }
    let read = |path: &Path| Ok(understood(&Source::open(path)?, &categories));
    show::sections("report", SECTIONS, &Stories::read_by(&args.traces, read)?, &args.show, out)
}

fn understood(source: &Source, categories: &Categories) -> Story {
    Story::with_lifetimes(source, categories).with_gaps(|| import::load(Path::new(source.path())))
}

/// The report with a section more, behind that of the call sites.
fn with_stacks(source: &Source, when: Option<When>, categories: &Categories) -> anyhow::Result<Part> {
    let view = show::view_of(source, when.unwrap_or(When::Peak), Parts::Roles, categories)?;
    let mut part = match when {
        Some(when) => report::part(&view.story, moment::sections(&view, when, Parts::Roles)),
        None => {
            let story = understood(source, categories);
            let sections = SECTIONS.iter().flat_map(|entry| entry.of(&story)).collect();
            report::part(&story, sections)
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
