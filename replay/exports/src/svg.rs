//! A flame graph as an SVG that zooms and searches in any browser, drawn by inferno; with `--diff`, what grew since
//! another trace is red and what shrank is blue.

use std::collections::BTreeMap;
use std::io::{self, Write};

use gputrace_schemas::printable::printable;
use inferno::flamegraph::{self, Options};

use super::folded::stacks;
use super::{Export, Request, Takes};
use gputrace_analyse::live::When;

pub(super) const ENTRY: Export = Export {
    name: "svg",
    summary: "bytes at a moment by stack as a flame graph, for browsers",
    takes: Takes { before: true, ..Takes::ONE },
    is_binary: false,
    export,
};

fn export(request: &Request, out: &mut dyn Write) -> io::Result<()> {
    let after = stacks(request, request.source());
    let before = request.before.map(|before| stacks(request, before));
    let when = match request.when {
        When::Peak => "at its peak".to_owned(),
        When::End => "at the end".to_owned(),
        When::At(time) => format!("after {} ns", time.0),
        When::Within(from, to) => format!("at its peak between {} and {} ns", from.0, to.0),
        When::Step(number) => format!("at its peak in step {number}"),
    };
    let lines: Vec<String> = match &before {
        None => after.iter().map(|(stack, bytes)| format!("{stack} {bytes}")).collect(),
        Some(before) => difference(before, &after),
    };
    if lines.is_empty() {
        return empty(out, &when);
    }
    let mut options = Options::default();
    options.title = match request.before {
        None => format!("GPU memory {when}"),
        Some(before) => format!("GPU memory {when}, red: more than in {}", printable(before.path())),
    };
    options.subtitle = Some(printable(request.source().path()).into_owned());
    "bytes".clone_into(&mut options.count_name);
    // The same picture for the same trace.
    options.hash = true;
    flamegraph::from_lines(&mut options, lines.iter().map(String::as_str), out).map_err(io::Error::other)
}

/// What inferno draws in two colours: bytes before and bytes after.
fn difference(before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>) -> Vec<String> {
    let gone = before.keys().filter(|stack| !after.contains_key(*stack));
    let stacks = after.keys().chain(gone);
    let of = |side: &BTreeMap<String, u64>, stack| side.get(stack).copied().unwrap_or(0);
    stacks.map(|stack| format!("{stack} {} {}", of(before, stack), of(after, stack))).collect()
}

/// Nothing was held; a flame graph of nothing is an error to inferno.
fn empty(out: &mut dyn Write, when: &str) -> io::Result<()> {
    writeln!(
        out,
        r#"<svg xmlns="http://www.w3.org/2000/svg" width="600" height="40"><text x="10" y="25">No GPU memory was held {when}.</text></svg>"#
    )
}
