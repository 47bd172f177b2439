//! pprof: a gzipped `perftools.profiles.Profile` (profile.proto of github.com/google/pprof), as Go's heap profiles are. For
//! `go tool pprof`, Pyroscope, Parca, Grafana, Perfetto.

use std::io::{self, Write};

use flate2::Compression;
use flate2::write::GzEncoder;
use rustc_hash::FxHashMap;

use super::parts::protobuf::Message;
use super::{Export, Request, Takes};
use gputrace_analyse::live::{Line, Lines, Native, Picture, owner, picture, pictures};
use gputrace_trace::Definitions;
use gputrace_trace::interned::Interned;
use gputrace_trace::ledger::Ledger;

pub(super) const ENTRY: Export = Export {
    name: "pprof",
    summary: "objects and bytes at a moment by stack, for go tool pprof, Pyroscope, Parca and Grafana",
    takes: Takes::ONE,
    is_binary: true,
    export,
};

fn export(request: &Request, out: &mut dyn Write) -> io::Result<()> {
    let (story, pictures) = pictures(request.source(), request.when);
    let wanted: Vec<Picture> = pictures.into_iter().filter(|picture| request.wants(picture.device)).collect();
    let definitions = request.source().definitions();
    out.write_all(&compressed(profile(&story.ledger, definitions, request.native, &wanted)))
}

/// Memory held so far, while events are still being booked.
#[must_use]
pub fn live_profile(ledger: &Ledger, definitions: &dyn Definitions) -> Vec<u8> {
    let pictures = ledger.devices().keys().map(|device| picture(ledger, *device, ledger.run.last));
    let pictures: Vec<Picture> = pictures.filter(|picture| !picture.held.is_empty()).collect();
    compressed(profile(ledger, definitions, Native::Hidden, &pictures))
}

fn compressed(profile: Vec<u8>) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    // Writing to memory does not fail.
    let _ = encoder.write_all(&profile);
    encoder.finish().unwrap_or_default()
}

fn profile(ledger: &Ledger, definitions: &dyn Definitions, native: Native, pictures: &[Picture]) -> Vec<u8> {
    let mut lines = Lines::new(definitions, native);
    let mut profile = Profile::default();
    let (device, label_owner) = (profile.text("device"), profile.text("owner"));
    profile.value_type(1, "inuse_objects", "count");
    profile.value_type(1, "inuse_space", "bytes");
    for picture in pictures {
        for (holder, (bytes, n)) in &picture.held {
            let mut stack: Vec<u64> = lines.of_holder(holder).iter().map(|it| profile.location(it)).collect();
            stack.reverse(); // pprof wants the innermost first.
            let labels = [
                (device, profile.text(&format!("cuda:{}", picture.device))),
                (label_owner, profile.text(owner(ledger, holder))),
            ];
            profile.sample(&stack, &[*n, bytes.0], &labels);
        }
    }
    let kind = profile.text("inuse_space");
    if let Some(picture) = pictures.first() {
        let process = definitions.process();
        let since = picture.time.0.saturating_sub(process.start.0);
        profile.body.number(9, process.start_realtime.saturating_add(since));
    }
    profile.body.number(14, kind);
    profile.finish()
}

#[derive(Default)]
struct Profile {
    body: Message,
    texts: Interned<String>,
    functions: FxHashMap<(u64, u64), u64>,
    locations: FxHashMap<Line, u64>,
}

impl Profile {
    /// Index of a text; 0 is the empty one.
    fn text(&mut self, text: &str) -> u64 {
        if text.is_empty() {
            return 0;
        }
        u64::from(self.texts.id(text.to_owned())) + 1
    }

    fn value_type(&mut self, field: u64, kind: &str, unit: &str) {
        let (kind, unit) = (self.text(kind), self.text(unit));
        let mut value_type = Message::default();
        value_type.number(1, kind);
        value_type.number(2, unit);
        self.body.bytes(field, &value_type.0);
    }

    fn location(&mut self, line: &Line) -> u64 {
        if let Some(id) = self.locations.get(line) {
            return *id;
        }
        let (name, file) = (self.text(&line.name), self.text(&line.file));
        let n_functions = self.functions.len() as u64;
        let function = *self.functions.entry((name, file)).or_insert(n_functions + 1);
        if function > n_functions {
            let mut message = Message::default();
            message.number(1, function);
            message.number(2, name);
            // No system name: where it equals the name, `go tool pprof` takes that for C++ to be demangled, and cuts what stands in
            // `<>` and `()`: `<module>` would be nothing (internal/symbolizer/symbolizer.go).
            message.number(4, file);
            self.body.bytes(5, &message.0);
        }
        let id = self.locations.len() as u64 + 1;
        let mut place = Message::default();
        place.number(1, function);
        place.number(2, u64::from(line.line));
        let mut location = Message::default();
        location.number(1, id);
        location.bytes(4, &place.0);
        self.body.bytes(4, &location.0);
        self.locations.insert(line.clone(), id);
        id
    }

    fn sample(&mut self, stack: &[u64], values: &[u64], labels: &[(u64, u64)]) {
        let mut sample = Message::default();
        sample.packed(1, stack);
        sample.packed(2, values);
        for (key, value) in labels {
            let mut label = Message::default();
            label.number(1, *key);
            label.number(2, *value);
            sample.bytes(3, &label.0);
        }
        self.body.bytes(2, &sample.0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.body.bytes(6, b"");
        for text in &self.texts.values {
            self.body.bytes(6, text.as_bytes());
        }
        self.body.0
    }
}
