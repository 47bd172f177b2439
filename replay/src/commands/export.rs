//! `gputrace export`: traces for other tools.

use std::fs::OpenOptions;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::{ArgMatches, Args};
use gputrace_replay::exports::{EXPORTS, Request};
use gputrace_replay::source::Source;

use super::Verb;
use crate::show::{NativeArgs, WhenArgs};

pub(super) const VERB: Verb = Verb::new::<ExportArgs>("export", run);

/// Writes a trace for other tools
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace export --format folded train.gtr | flamegraph.pl > peak.svg
  gputrace export --format speedscope -o peak.speedscope.json train.gtr
  gputrace export --format torch-pickle -o train.pickle train.gtr     # for pytorch.org/memory_viz
  gputrace export --format csv --device 0 snapshot.pickle.gz | head")]
pub(super) struct ExportArgs {
    /// A gputrace trace or a PyTorch snapshot (plain or .gz)
    #[arg(value_name = "TRACE")]
    trace: PathBuf,

    /// What to write
    #[arg(short, long, value_name = "FORMAT", value_parser = formats())]
    format: String,

    /// Where to [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Overwrite a file that exists
    #[arg(short = 'F', long)]
    force: bool,

    /// Only this device
    #[arg(long, value_name = "ORDINAL")]
    device: Option<i16>,

    #[command(flatten)]
    when: WhenArgs,

    #[command(flatten)]
    native: NativeArgs,
}

fn formats() -> PossibleValuesParser {
    PossibleValuesParser::new(EXPORTS.iter().map(|it| PossibleValue::new(it.name()).help(it.summary())))
}

fn run(matches: &ArgMatches, out: &mut dyn Write) -> anyhow::Result<ExitCode> {
    let args: ExportArgs = super::parsed(matches)?;
    let Some(export) = EXPORTS.iter().find(|export| export.name() == args.format) else {
        bail!("no format {}", args.format);
    };
    let source = Source::open(&args.trace)?;
    let request = Request {
        source: &source,
        when: args.when.when(),
        device: args.device,
        native: args.native.native(),
    };
    match args.output.filter(|path| path.as_os_str() != "-") {
        None => export.export(&request, out)?,
        Some(path) => {
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(true).create_new(!args.force);
            let file = options.open(&path).with_context(|| match path.exists() && !args.force {
                true => format!("{} exists; -F overwrites it", path.display()),
                false => format!("cannot write {}", path.display()),
            })?;
            let mut file = BufWriter::new(file);
            let written = export.export(&request, &mut file).and_then(|()| file.flush());
            written.with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    for damage in source.damages() {
        eprintln!("gputrace: {}: {damage}", source.path());
    }
    Ok(ExitCode::SUCCESS)
}
