//! `gputrace symbolise`: functions and lines for a trace that was made elsewhere.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{ArgMatches, Args};
use gputrace_recorder::Overwrite;
use gputrace_recorder::symbolise::{Symbolised, Unresolved, symbolise};
use gputrace_replay::trace::files;
use gputrace_schemas::printable::{Screen, printable};

use super::Verb;
use crate::objects;
use crate::show::{self, FILES, Named};
use crate::working::Working;

pub(super) const VERB: Verb = Verb::new::<SymboliseArgs>("symbolise", run).also_spelt("symbolize");

/// Name the native frames of a trace from another machine's files, a debug package or debuginfod's cache
///
/// When a program ends, the recorder names frames from the files that it ran. If those were stripped or gone, `symbolise` adds
/// the names later, on any machine. It searches --sysroot by build ID and recorded path, and uses only files with the recorded
/// build ID. The result is the same trace with more names.
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace symbolise --sysroot /mnt/node7 -o named.gtr train.gtr
  gputrace symbolise --sysroot ~/.cache/debuginfod_client -o named.gtr train.gtr

Files below DIR, in this order; the most detailed one is used:
  usr/lib/debug/.build-id/xx/yyyy.debug, .build-id/xx/yyyy.debug, .build-id/xx/yyyy
  BUILDID/debuginfo, BUILDID/executable, BUILDID, BUILDID.debug
  usr/lib/debug/PATH.debug, PATH")]
pub(super) struct SymboliseArgs {
    /// Trace made by `gputrace record`
    #[arg(required = true, value_name = "TRACE", value_hint = FILES)]
    trace: Named,
    /// Folder that stands for / of the traced machine (repeatable, searched in order) [default: /]
    #[arg(long, value_name = "DIR")]
    sysroot: Vec<PathBuf>,
    /// Trace to write
    #[arg(short, long, required = true, value_name = "FILE")]
    output: PathBuf,
    /// Overwrite existing files
    #[arg(short = 'F', long, short_alias = 'f')]
    force: bool,
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: SymboliseArgs = super::parsed(matches)?;
    let roots = if args.sysroot.is_empty() { vec!["/".into()] } else { args.sysroot };
    let overwrite = if args.force { Overwrite::Replace } else { Overwrite::Refuse };
    let trace = files::here(&args.trace).with_context(|| format!("cannot read {}", args.trace.display()))?;
    let working = Working::on(&trace);
    let found = match objects::is_written(&args.output)? {
        true => objects::write_by(&args.output, args.force, |to| {
            Ok(symbolise(&trace, roots, to, Overwrite::Replace)?)
        })?,
        false => symbolise(&trace, roots, &args.output, overwrite)?,
    };
    drop(working);
    let Symbolised { n_frames, n_functions, n_lines, unresolved, too_large } = found;
    let to = show::shown(&args.output);
    writeln!(
        out,
        "{to}: of {n_frames} native frames without a line, {n_lines} now have one, and {n_functions} that had no function"
    )?;
    for line in too_large {
        writeln!(out, "{}", printable(&line))?;
    }
    for Unresolved { module, n_frames, others } in &unresolved {
        let path = printable(&module.path);
        if module.build_id.is_empty() {
            writeln!(
                out,
                "{path}: recorded without a build id, so no file can be verified ({n_frames} frames)"
            )?;
            continue;
        }
        writeln!(out, "{path}: no file with build id {} ({n_frames} frames)", printable(&module.build_id))?;
        for other in others {
            let its = if other.build_id.is_empty() { "none" } else { &other.build_id };
            writeln!(out, "  {} is another build: its build id is {its}", show::shown(&other.path))?;
        }
    }
    writeln!(out, "next: gputrace report {to}")?;
    Ok(ExitCode::SUCCESS)
}
