//! speedscope: <https://www.speedscope.app/file-format-schema.json>, one sampled profile per device, weighed in bytes.

use std::io::{self, Write};

use serde_json::json;

use super::{Export, Request, Takes};
use gputrace_analyse::live::{Line, Lines, When, owner, pictures};
use gputrace_trace::interned::Interned;

pub(super) const ENTRY: Export = Export {
    name: "speedscope",
    summary: "bytes at a moment by stack, for speedscope.app",
    takes: Takes::ONE,
    is_binary: false,
    export,
};

fn export(request: &Request, out: &mut dyn Write) -> io::Result<()> {
    let (story, pictures) = pictures(request.source(), request.when);
    let mut lines = Lines::new(request.source().definitions(), request.native);
    let mut frames: Interned<Line> = Interned::default();
    let mut profiles = vec![];
    let when = match request.when {
        When::Peak => "peak".to_owned(),
        When::End => "end".to_owned(),
        When::At(time) => format!("{} ns", time.0),
        When::Within(from, to) => format!("peak of {} to {} ns", from.0, to.0),
        When::Step(number) => format!("peak of step {number}"),
    };
    for picture in pictures.iter().filter(|picture| request.wants(picture.device)) {
        let (mut samples, mut weights) = (vec![], vec![]);
        for (holder, (bytes, _)) in &picture.held {
            let owner = owner(&story.ledger, holder).to_owned();
            let root = Line { name: owner, ..Line::default() };
            let stack = std::iter::once(root).chain(lines.of_holder(holder));
            let sample: Vec<u32> = stack.map(|line| frames.id(line)).collect();
            samples.push(sample);
            weights.push(bytes.0);
        }
        profiles.push(json!({
            "type": "sampled",
            "name": format!("cuda:{} {when}", picture.device),
            "unit": "bytes",
            "startValue": 0,
            "endValue": picture.total().0,
            "samples": samples,
            "weights": weights,
        }));
    }
    let frames: Vec<_> = frames.values.iter().map(frame).collect();
    let file = json!({
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": story.path,
        "exporter": concat!("gputrace@", env!("CARGO_PKG_VERSION")),
        "shared": {"frames": frames},
        "profiles": profiles,
    });
    serde_json::to_writer(&mut *out, &file)?;
    writeln!(out)
}

fn frame(line: &Line) -> serde_json::Value {
    let mut frame = serde_json::Map::from_iter([("name".to_owned(), line.name.as_str().into())]);
    if !line.file.is_empty() {
        frame.insert("file".into(), line.file.as_str().into());
    }
    if line.line > 0 {
        frame.insert("line".into(), line.line.into());
    }
    frame.into()
}
