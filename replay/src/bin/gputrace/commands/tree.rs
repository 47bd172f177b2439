//! `gputrace tree`: who held the memory, as a tree of calls.

use std::process::ExitCode;

use clap::{ArgMatches, Args};
use gputrace_replay::analyse::categories::Categories;
use gputrace_replay::analyse::live::Lines;
use gputrace_replay::answers::Reply;
use gputrace_replay::answers::tree::{GroupBy, Node, reply};
use gputrace_replay::report::model::Report;
use gputrace_replay::trace::source::Source;
use gputrace_schemas::event::Bytes;
use gputrace_schemas::printable::Screen;
use gputrace_sim::bytes;

use super::Verb;
use crate::show::{self, NativeArgs, ShowArgs, TraceArgs, WhenArgs};
use crate::working::Working;

pub(super) const VERB: Verb = Verb::new::<TreeArgs>("tree", run);

/// Show the memory held at a moment, as a tree of calls
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace tree train.gtr
  gputrace tree --at 12.5s --group-by owner train.gtr
  gputrace tree --step 3 --group-by category train.gtr
  gputrace tree --group-by rank job/*.gtr
  gputrace tree --end --min-bytes 100MiB --json snapshot.pickle.gz")]
pub(super) struct TreeArgs {
    #[command(flatten)]
    traces: TraceArgs,

    #[command(flatten)]
    when: WhenArgs,

    /// First level of the tree
    #[arg(long, value_parser = show::one_of(GroupBy::ALL), value_name = "WHAT", default_value = "stack")]
    group_by: GroupBy,

    /// Only this device
    #[arg(long, value_name = "ORDINAL")]
    device: Option<i16>,

    #[command(flatten)]
    native: NativeArgs,

    /// Omit smaller nodes [default: 1/200 of the total]
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse)]
    min_bytes: Option<u64>,

    #[command(flatten)]
    show: ShowArgs,
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: TreeArgs = super::parsed(matches)?;
    let (mut root, mut views) = (Node::default(), vec![]);
    for path in &args.traces.paths()? {
        let _working = Working::on(path);
        let source = Source::open(path)?;
        let mut view =
            show::view_of(&source, args.when.when(), args.group_by.parts(), &Categories::default())?;
        view.pictures.retain(|picture| args.device.is_none_or(|device| device == picture.device));
        root.grow(&view, &mut Lines::new(source.definitions(), args.native.native()), args.group_by);
        views.push(view);
    }
    let least = Bytes(args.min_bytes.unwrap_or(root.bytes.0 / 200));
    let Reply { part, answer } = reply(&views, args.when.when(), &root, least);
    args.show.write_answer(&Report { verb: "tree", parts: vec![part] }, &answer, out)?;
    Ok(ExitCode::SUCCESS)
}
