//! `gputrace tree`: who held the memory, as a tree of calls.

use std::io::Write;
use std::process::ExitCode;

use clap::{ArgMatches, Args};
use gputrace_replay::analyse::categories::Categories;
use gputrace_replay::analyse::live::{Line, Lines, View};
use gputrace_replay::answers::tree::{GroupBy, Node};
use gputrace_replay::report::words;
use gputrace_replay::trace::source::Source;
use gputrace_schemas::event::Bytes;
use gputrace_schemas::printable::{Screen, printable};
use gputrace_sim::bytes;
use serde_json::{Value, json};

use super::Verb;
use crate::show::{self, NativeArgs, TraceArgs, WhenArgs, write_json};

pub(super) const VERB: Verb = Verb::new::<TreeArgs>("tree", run);

/// Shows who held the memory at a moment, as a tree of calls
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

    /// What the first level is
    #[arg(long, value_parser = show::one_of(GroupBy::ALL), value_name = "WHAT", default_value = "stack")]
    group_by: GroupBy,

    /// Only this device
    #[arg(long, value_name = "ORDINAL")]
    device: Option<i16>,

    #[command(flatten)]
    native: NativeArgs,

    /// Leave out nodes with less [default: one in 200 of everything]
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse)]
    min_bytes: Option<u64>,

    /// Write JSON: bytes and nanoseconds as integers
    #[arg(long)]
    json: bool,
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: TreeArgs = super::parsed(matches)?;
    let group_by = args.group_by;
    let (mut root, mut views) = (Node::default(), vec![]);
    for path in &args.traces.paths()? {
        let source = Source::open(path)?;
        let mut view = show::view_of(&source, args.when.when(), group_by.parts(), &Categories::default())?;
        view.pictures.retain(|picture| args.device.is_none_or(|device| device == picture.device));
        root.grow(&view, &mut Lines::new(source.definitions(), args.native.native()), group_by);
        views.push(view);
    }
    let least = Bytes(args.min_bytes.unwrap_or(root.bytes.0 / 200));
    if args.json {
        write_json(&json(&views, &root, least), out)?;
    } else {
        views.iter().try_for_each(|view| heading(view, out))?;
        branches(&root, root.bytes, least, "", out)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn heading(View { story, pictures, .. }: &View, out: &mut dyn Write) -> anyhow::Result<()> {
    let path = printable(&story.path);
    for picture in pictures {
        let time = words::time(story.since_start(picture.time));
        let held = words::bytes(picture.total());
        writeln!(out, "{path}: cuda:{} held {held} at {time}", picture.device)?;
    }
    if pictures.is_empty() {
        writeln!(out, "{path}: nothing was held then")?;
    }
    if let Some(doubts) = story.doubts() {
        writeln!(out, "warning: {}", printable(&doubts))?;
    }
    Ok(())
}

/// A chain of calls without a branch stays at one depth: stacks are deep, and what matters is where they part.
fn branches(
    node: &Node,
    total: Bytes,
    least: Bytes,
    indent: &str,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let shown: Vec<_> = node.sorted().into_iter().filter(|(_, child)| child.bytes >= least).collect();
    for (idx, (line, child)) in shown.iter().enumerate() {
        let is_last = idx + 1 == shown.len();
        let share = child.bytes.0 as f64 / total.0.max(1) as f64 * 100.0;
        let corner = if is_last { "└ " } else { "├ " };
        writeln!(out, "{:>11} {share:>5.1} %  {indent}{corner}{}", words::bytes(child.bytes), name(line))?;
        let below = if is_last { "  " } else { "│ " };
        let mut tail = *child;
        while let Some((only, next)) = only_child(tail) {
            writeln!(out, "{:>20} {indent}{below}{}", "", name(only))?;
            tail = next;
        }
        branches(tail, total, least, &format!("{indent}{below}"), out)?;
    }
    let hidden: Vec<_> = node.children.values().filter(|child| child.bytes < least).collect();
    let bytes = hidden.iter().fold(0u64, |sum, child| sum.saturating_add(child.bytes.0));
    if bytes > 0 {
        writeln!(out, "{:>11} {:>7}  {indent}  ({} smaller)", words::bytes(Bytes(bytes)), "", hidden.len())?;
    }
    Ok(())
}

fn name(line: &Line) -> String {
    printable(&line.to_string()).into_owned()
}

fn only_child(node: &Node) -> Option<(&Line, &Node)> {
    let mut children = node.children.iter();
    let first = children.next()?;
    (children.next().is_none() && first.1.bytes == node.bytes).then_some(first)
}

fn json(views: &[View], root: &Node, least: Bytes) -> Value {
    let all = views.iter().flat_map(|view| view.pictures.iter().map(move |picture| (&view.story, picture)));
    let devices = all.map(|(story, picture)| {
        json!({
            "trace": story.path,
            "rank": story.process.rank,
            "device": picture.device,
            "time_ns": story.since_start(picture.time).0,
            "bytes": picture.total().0,
        })
    });
    // Deep stacks do not make deep JSON: nodes by number, parents first.
    let mut nodes = vec![];
    let mut open = vec![(None::<usize>, root)];
    while let Some((parent, node)) = open.pop() {
        for (line, child) in node.sorted().into_iter().filter(|(_, child)| child.bytes >= least) {
            nodes.push(json!({
                "parent": parent,
                "name": line.name,
                "file": line.file,
                "line": line.line,
                "bytes": child.bytes.0,
                "objects": child.objects,
            }));
            open.push((Some(nodes.len() - 1), child));
        }
    }
    json!({
        "schema": "gputrace.tree/1",
        "trace": views.first().map(|view| &*view.story.path),
        "devices": devices.collect::<Vec<_>>(),
        "bytes": root.bytes.0,
        "min_bytes": least.0,
        "nodes": nodes,
    })
}
