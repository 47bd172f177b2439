//! `gputrace who`: every owner that an address had.

use std::process::ExitCode;

use clap::{ArgMatches, Args};
use gputrace_replay::answers::who::Who;
use gputrace_replay::report;
use gputrace_schemas::printable::Screen;

use super::Verb;
use crate::show::{self, ShowArgs, TraceArgs};

pub(super) const VERB: Verb = Verb::new::<WhoArgs>("who", run);

/// Show every owner of an address: the block, who allocated and freed it, when, and its neighbours
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace who 0x7f5c40000200 train.gtr
  gputrace who 7f5c40000200 --json snapshot.pickle.gz

compute-sanitizer and cuda-gdb print the address of an illegal or misaligned access. Addresses differ from run to run, so use \
the trace of the failed run.")]
pub(super) struct WhoArgs {
    /// Device address in hexadecimal
    #[arg(value_name = "ADDRESS", value_parser = address)]
    address: u64,

    #[command(flatten)]
    traces: TraceArgs,

    #[command(flatten)]
    show: ShowArgs,
}

fn address(text: &str) -> Result<u64, String> {
    let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")).unwrap_or(text);
    u64::from_str_radix(digits, 16)
        .map_err(|_| format!("`{text}` is not an address; write hexadecimal digits, such as 0x7f5c40000200"))
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: WhoArgs = super::parsed(matches)?;
    show::each("who", &args.traces, &args.show, out, |source| {
        let who = Who::of(source, args.address);
        let section = who.section(source.definitions());
        Ok(report::part(&who.story, vec![section]))
    })
}
