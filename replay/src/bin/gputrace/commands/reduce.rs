//! `gputrace reduce`: a trace as a small table, from which jobs of many processes are judged.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{ArgMatches, Args};
use gputrace_replay::reduce::{is_summary, reduce};
use gputrace_replay::trace::source::Source;
use gputrace_replay::trace::words;
use gputrace_schemas::event::Bytes;
use gputrace_schemas::printable::Screen;

use super::Verb;
use super::export::{check_place, write_whole};
use crate::objects;
use crate::show::{self, FILES, Named};

pub(super) const VERB: Verb = Verb::new::<ReduceArgs>("reduce", run).of_replays();

/// Reduce traces to summaries that `ranks`, `report`, `diff`, `leaks` and `stats` read instead
///
/// Reduce traces on the hosts of a job, and collect only the summaries, a few hundred kilobytes each. They are Parquet
/// files, which DuckDB, pandas and Polars read too.
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace reduce -o summaries/ job/*.gtr
  gputrace reduce -o rank0.summary.parquet train.gtr
  gputrace ranks summaries/

Single events and addresses (replay, tune, html, a moment) need the trace. The summary names its host and path.")]
pub(super) struct ReduceArgs {
    /// Traces, or folders of them
    #[arg(required = true, value_name = "TRACE|DIR", value_hint = FILES)]
    traces: Vec<Named>,

    /// File (*.summary.parquet) for one trace, or folder, with names made from the contents
    #[arg(short, long, value_name = "FILE|DIR")]
    output: PathBuf,
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: ReduceArgs = super::parsed(matches)?;
    let paths = show::paths(&args.traces)?;
    let is_folder = !is_summary(&args.output);
    match (is_folder, &paths[..]) {
        _ if objects::is_written(&args.output)? && is_folder => {}
        (true, _) => std::fs::create_dir_all(&args.output)
            .with_context(|| format!("cannot make the folder {}", args.output.display()))?,
        (false, [_]) => check_place(&args.output, true)?,
        (false, many) => bail!("{} traces need a folder, not one file: -o summaries/", many.len()),
    }
    let (done, all_read) = show::read_all(&paths, |path| {
        if is_summary(path) {
            bail!("{} is a summary already", path.display());
        }
        let reduced = reduce(&Source::open(path)?)?;
        let to = if is_folder { args.output.join(&reduced.name) } else { args.output.clone() };
        write_whole(&to, true, |file| file.write_all(&reduced.bytes))?;
        Ok((path.to_owned(), to, reduced.bytes.len() as u64))
    });
    for (path, to, size) in done {
        writeln!(out, "{} -> {}, {}", show::shown(&path), show::shown(&to), words::bytes(Bytes(size)))?;
    }
    Ok(show::exit_code(all_read))
}
