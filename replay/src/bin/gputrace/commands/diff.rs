//! `gputrace diff`: what one run held more than another.

use std::path::Path;
use std::process::ExitCode;

use anyhow::bail;
use clap::{ArgMatches, Args};
use gputrace_replay::analyse::live::{When, pictures, span};
use gputrace_replay::answers::diff::{By, Side, peaks, peaks_section, section};
use gputrace_replay::answers::moment::in_words;
use gputrace_replay::reduce::{Summary, is_summary};
use gputrace_replay::report::model::{Mood, Part, Report, Section};
use gputrace_replay::trace::source::Source;
use gputrace_schemas::printable::Screen;

use super::Verb;
use crate::show::{self, FILES, Gate, Named, ShowArgs, WhenArgs};
use crate::working::Working;

pub(super) const VERB: Verb = Verb::new::<DiffArgs>("diff", run).of_summaries();

/// Show how the memory of two runs differs: peaks, owners, call sites, sizes
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace diff before.gtr after.gtr
  gputrace diff --by stack --end before.gtr after.gtr
  gputrace diff --from step:3 --to step:90 train.gtr
  gputrace diff --fail-on-increase 5% main.gtr branch.gtr

With one file, --from and --to compare two moments of it: `gputrace diff --from step:3 --to step:90 --by site --by size train.gtr`.")]
pub(super) struct DiffArgs {
    /// Trace or snapshot to compare with
    #[arg(value_name = "BEFORE", value_hint = FILES)]
    before: Named,

    /// Trace or snapshot that may have changed [default: BEFORE, at other moments (--from, --to)]
    #[arg(value_name = "AFTER", required_unless_present_any = ["from", "to"], value_hint = FILES)]
    after: Option<Named>,

    /// Moment of BEFORE, if not that of AFTER: peak, end, step:3, 10s..20s (its peak), or a time such as 12.5s
    #[arg(long, value_name = "MOMENT", value_parser = show::moment)]
    from: Option<When>,

    /// Moment of AFTER
    #[arg(long, value_name = "MOMENT", value_parser = show::moment)]
    to: Option<When>,

    /// What to compare (repeatable)
    #[arg(long, value_parser = show::one_of(By::ALL), value_name = "WHAT", default_values = ["owner", "site", "size"])]
    by: Vec<By>,

    /// Exit with status 1 if a peak rose by more than this, 2 if unknown: losses, damage, no memory to compare
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    fail_on_increase: Option<f64>,

    /// Rows per table
    #[arg(long, value_name = "N", default_value = "20")]
    rows: usize,

    #[command(flatten)]
    when: WhenArgs,

    #[command(flatten)]
    show: ShowArgs,
}

/// `5%` or `5`: a share.
fn percent(text: &str) -> Result<f64, String> {
    let number = text.trim_end_matches('%').trim();
    match number.parse::<f64>() {
        Ok(percent) if percent.is_finite() && percent >= 0.0 => Ok(percent / 100.0),
        _ => Err(format!("`{text}` is not a percentage; write 5% or 0.5%")),
    }
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: DiffArgs = super::parsed(matches)?;
    let before = show::only(&args.before)?;
    let after = args.after.as_deref().map(show::only).transpose()?;
    let after = after.as_ref().unwrap_or(&before);
    let moment = |own: Option<When>| own.unwrap_or_else(|| args.when.when());
    let (from, to) = (moment(args.from), moment(args.to));
    let named = |path: &Path, when: When| match when {
        When::Peak => path.display().to_string(),
        _ => format!("{} ({})", path.display(), in_words(when)),
    };
    let title = format!("{} -> {}", named(&before, from), named(after, to));
    let (before, after) = (side(&before, from)?, side(after, to)?);
    let changes = peaks(&before, &after);
    let doubts = before.doubts.clone().or_else(|| after.doubts.clone());
    let doubts_of_any = doubts.clone();
    // Of two moments of one run, the peaks are those of one run.
    let has_peaks = from == to || before.path != after.path || args.fail_on_increase.is_some();
    let mut sections: Vec<Section> = has_peaks.then(|| peaks_section(&changes, doubts)).into_iter().collect();
    sections.extend(args.by.iter().map(|by| section(&before, &after, *by, args.rows)));
    let allowed = args.fail_on_increase.unwrap_or(f64::INFINITY);
    let risen: Vec<_> = changes.iter().filter(|change| change.increase() > allowed).collect();
    if let Some(allowed) = args.fail_on_increase {
        let verdict = Section::new("verdict", "Verdict");
        let allowed = format!("{} %", allowed * 100.0);
        let lines = risen.iter().map(|change| {
            let percent = change.increase() * 100.0;
            let text =
                format!("{}: {} rose by {percent:.1} %, {allowed} is allowed", change.device, change.what);
            (Mood::Bad, text)
        });
        let none = (risen.is_empty() && doubts_of_any.is_none())
            .then(|| (Mood::Good, format!("no peak rose by more than {allowed}")));
        sections.insert(0, verdict.lines(lines.chain(none)));
    }
    let report = Report { verb: "diff", parts: vec![Part { title, sections, ..Part::default() }] };
    show::unless_closed(args.show.write(&report, out))?;
    let sides = [&before, &after];
    let in_doubt = sides.into_iter().find_map(|side| Some((&*side.path, side.doubts.as_deref()?)));
    let gate = match (args.fail_on_increase, in_doubt) {
        (None, _) => Gate::Passes,
        (Some(_), Some((path, doubts))) => Gate::cannot_know(path, doubts),
        (Some(_), None) if changes.iter().all(|change| change.bytes == (0, 0)) => {
            Gate::cannot_know(&report.parts[0].title, "neither file has any device memory")
        }
        (Some(_), None) if risen.is_empty() => Gate::Passes,
        (Some(_), None) => Gate::Refuses,
    };
    Ok(gate.exit_code(true))
}

fn side(path: &Path, when: When) -> anyhow::Result<Side> {
    let _working = Working::on(path);
    if is_summary(path) {
        let summary = Summary::open(path)?;
        return Ok(match when {
            When::Peak => summary.at_peak()?,
            When::End => summary.at_end()?,
            When::At(_) | When::Within(..) | When::Step(_) => bail!(summary.lacks("a moment")),
        });
    }
    let source = Source::open(path)?;
    let (story, pictures) = pictures(&source, when);
    if let Err(why) = span(&story, when) {
        bail!("{}: {why}", path.display());
    }
    Ok(Side::of(source.definitions(), &story, &pictures))
}
