//! `gputrace library`: the path of `libgputrace.so`, for `LD_PRELOAD`.

use std::io::Write;
use std::process::ExitCode;

use clap::{ArgMatches, Args};
use gputrace_schemas::printable::Screen;

use super::Verb;
use super::record::{library, preload};

pub(super) const VERB: Verb = Verb::new::<LibraryArgs>("library", run);

/// Print the path of libgputrace.so, for LD_PRELOAD
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace library
  LD_PRELOAD=$(gputrace library) python train.py
  docker run -v $(gputrace library):/libgputrace.so -e LD_PRELOAD=/libgputrace.so ...

The library is beside the program or in ../lib, unless GPUTRACE_LIBRARY names another place.")]
pub(super) struct LibraryArgs {}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let LibraryArgs {} = super::parsed(matches)?;
    let library = library()?;
    // A path that the loader cannot read from the variable is an error here, and not when the program starts.
    preload(&library)?;
    writeln!(out, "{}", library.display())?;
    Ok(ExitCode::SUCCESS)
}
