//! `gputrace export`: traces for other tools.

use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::{ArgMatches, Args};
use gputrace_recorder::output_file::{self, Existing, Place, WholeFile};
use gputrace_replay::exports::{EXPORTS, GONE, Request, Takes};
use gputrace_replay::trace::source::Source;
use gputrace_schemas::printable::Screen;

use super::Verb;
use crate::objects;
use crate::show::{self, FILES, Named, NativeArgs, TRACES, WhenArgs, complain};
use crate::working::Working;

pub(super) const VERB: Verb = Verb::new::<ExportArgs>("export", run);

/// Write a trace for other tools
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace export --format folded train.gtr | flamegraph.pl > peak.svg
  gputrace export --format speedscope -o peak.speedscope.json train.gtr
  gputrace export --format torch-pickle -o train.pickle train.gtr     # for pytorch.org/memory_viz
  gputrace export --format csv --device 0 snapshot.pickle.gz | head")]
pub(super) struct ExportArgs {
    #[arg(required = true, value_name = "TRACE|DIR", value_hint = FILES, help = TRACES)]
    traces: Vec<Named>,

    /// Output format
    #[arg(short, long, value_name = "FORMAT", value_parser = formats())]
    format: String,

    /// File to write [default: stdout]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Overwrite existing files
    #[arg(short = 'F', long)]
    force: bool,

    /// Only this device
    #[arg(long, value_name = "ORDINAL")]
    device: Option<i16>,

    /// Show the difference from this trace (svg)
    #[arg(long, value_name = "OTHER", value_hint = FILES)]
    diff: Option<Named>,

    /// Include memory outside PyTorch, as separate segments (torch-pickle)
    #[arg(long)]
    non_torch: bool,

    /// Hide paths, arguments, host names and machine identifiers
    #[arg(long)]
    redact: bool,

    #[command(flatten)]
    when: WhenArgs,

    #[command(flatten)]
    native: NativeArgs,
}

fn formats() -> PossibleValuesParser {
    let formats = EXPORTS.iter().map(|it| PossibleValue::new(it.name).help(it.summary));
    let gone = GONE.iter().map(|(name, _)| PossibleValue::new(*name).hide(true));
    PossibleValuesParser::new(formats.chain(gone))
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: ExportArgs = super::parsed(matches)?;
    if let Some((_, instead)) = GONE.iter().find(|(name, _)| *name == args.format) {
        bail!("format {} no longer exists: {instead}", args.format);
    }
    let traces = show::paths(&args.traces)?;
    let Some(export) = EXPORTS.iter().find(|export| export.name == args.format) else {
        bail!("unknown format {}", args.format);
    };
    can(&args, traces.len(), export.takes)?;
    let is_for_terminal = args.output.as_ref().is_none_or(|path| path.as_os_str() == "-");
    if is_for_terminal && export.is_binary && std::io::stdout().is_terminal() {
        bail!("{} is binary: write it to a file (-o FILE) or into a pipe", args.format);
    }
    if let Some(path) = args.output.as_ref().filter(|_| !is_for_terminal) {
        check_place(path, args.force)?;
    }
    // What is shown on the terminal shows that something is done.
    let is_shown = is_for_terminal && std::io::stdout().is_terminal();
    let working = traces.first().filter(|_| !is_shown).map(|path| Working::on(path));
    let open = |path: &PathBuf| -> anyhow::Result<Source> {
        let source = Source::open(path)?;
        Ok(if args.redact { source.redacted() } else { source })
    };
    let sources = traces.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let before = args.diff.as_deref().map(show::only).transpose()?.as_ref().map(open).transpose()?;
    let request = Request {
        sources: &sources,
        when: args.when.when(),
        device: args.device,
        before: before.as_ref(),
        non_torch: args.non_torch,
        native: args.native.native(),
    };
    match args.output.filter(|path| path.as_os_str() != "-") {
        // What somebody looks at is shown; what a program reads has the bytes of its format.
        None if std::io::stdout().is_terminal() => (export.export)(&request, out)?,
        None => (export.export)(&request, out.behind())?,
        Some(path) => {
            write_whole(&path, args.force, |file| (export.export)(&request, file))?;
        }
    }
    drop(working);
    for source in sources.iter().chain(&before) {
        for damage in source.damages() {
            complain!("{}: {damage}", source.path());
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes a file that has its name when it is complete, and not before.
pub(super) fn write_whole(
    path: &Path,
    force: bool,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> anyhow::Result<()> {
    let cannot = || format!("cannot write {}", path.display());
    check_place(path, force)?;
    if objects::is_url(path) {
        return objects::write(path, force, write);
    }
    let existing = if force { Existing::IsReplaced } else { Existing::Stays };
    let whole = WholeFile::begin(path, existing).map_err(|unfit| anyhow!("{unfit}"))?;
    let mut file = BufWriter::new(whole.file());
    let written = write(&mut file).and_then(|()| file.flush());
    drop(file);
    // What failed leaves nothing.
    written.and_then(|()| whole.finish()).with_context(cannot)
}

/// Refuses a name under which no file may be written. For verbs that read for long before they write.
pub(super) fn check_place(path: &Path, force: bool) -> anyhow::Result<()> {
    let is_url = objects::is_written(path)?;
    let place = if is_url { Place::Free } else { output_file::look(path)? };
    match place {
        Place::Free if is_url && !force && objects::exists(path)? => {
            bail!("{} exists; -F overwrites it", path.display())
        }
        Place::File(_) if !force => bail!("{} exists; -F overwrites it", path.display()),
        Place::Free | Place::File(_) => Ok(()),
    }
}

/// What was asked for can be done in this format.
fn can(args: &ExportArgs, n_traces: usize, takes: Takes) -> anyhow::Result<()> {
    let able = |able: fn(Takes) -> bool| {
        let names: Vec<_> = EXPORTS.iter().filter(|it| able(it.takes)).map(|it| it.name).collect();
        names.join(", ")
    };
    let format = &args.format;
    if n_traces > 1 && !takes.several {
        bail!("{format} shows one trace; formats for several are {}", able(|it| it.several));
    }
    if args.diff.is_some() && !takes.before {
        bail!("{format} shows no difference; --diff works with {}", able(|it| it.before));
    }
    if args.non_torch && !takes.non_torch {
        bail!("{format} always shows all memory; --non-torch works with {}", able(|it| it.non_torch));
    }
    Ok(())
}
