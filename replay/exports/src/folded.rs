//! Folded stacks: `frame;frame;frame bytes`, one line per stack. For flamegraph.pl, inferno, speedscope.

use std::collections::BTreeMap;
use std::io::{self, Write};

use gputrace_schemas::printable::printable;

use super::{Export, Request, Takes};
use gputrace_analyse::live::{Line, Lines, owner, pictures};
use gputrace_trace::source::Source;

pub(super) const ENTRY: Export = Export {
    name: "folded",
    summary: "bytes at a moment by stack, for flamegraph.pl, inferno and speedscope",
    takes: Takes::ONE,
    is_binary: false,
    export,
};

fn export(request: &Request, out: &mut dyn Write) -> io::Result<()> {
    let stacks = stacks(request, request.source());
    stacks.iter().try_for_each(|(stack, bytes)| writeln!(out, "{stack} {bytes}"))
}

/// Bytes by stack, at the moment that was asked for.
pub(super) fn stacks(request: &Request, source: &Source) -> BTreeMap<String, u64> {
    let (story, pictures) = pictures(source, request.when);
    let mut lines = Lines::new(source.definitions(), request.native);
    let mut folded: BTreeMap<String, u64> = BTreeMap::new();
    for picture in pictures.iter().filter(|picture| request.wants(picture.device)) {
        for (holder, (bytes, _)) in &picture.held {
            let mut text = format!("cuda:{};{}", picture.device, clean(owner(&story.ledger, holder)));
            for line in lines.of_holder(holder) {
                text.push(';');
                text += &frame(&line);
            }
            *folded.entry(text).or_default() += bytes.0;
        }
    }
    folded
}

fn frame(line: &Line) -> String {
    clean(&line.to_string())
}

/// A semicolon separates frames, and a line break ends a stack. Control characters go too: SVG is made from this, and XML cannot
/// hold most of them.
fn clean(text: &str) -> String {
    printable(&text.replace(';', ":").replace(['\n', '\r'], " ")).into_owned()
}
