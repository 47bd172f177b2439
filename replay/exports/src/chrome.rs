//! Chrome's trace event format: counters over time, out-of-memory errors as instants. For chrome://tracing, Perfetto, and to be
//! merged with traces of the PyTorch profiler.

use std::collections::BTreeMap;
use std::io::{self, Write};

use gputrace_schemas::event::{HOST, Nanos};
use serde_json::{Map, Value, json};

use super::parts::events::{each_event, parts_by_owner, process_name};
use super::{Export, Request, Takes};
use gputrace_trace::ledger::Ledger;

/// Most times at which a device's counters are written; the largest value of every interval between is kept.
const MOST_POINTS: u64 = 200_000;

pub(super) const ENTRY: Export = Export {
    name: "chrome",
    summary: "memory over time by owner, for chrome://tracing and ui.perfetto.dev",
    takes: Takes::ONE,
    is_binary: false,
    export,
};

fn export(request: &Request, out: &mut dyn Write) -> io::Result<()> {
    let source = request.source();
    let process = source.definitions().process();
    let n_events = source.events().count() as u64;
    // Points cost a hundred bytes each: a long trace keeps the highest of every few.
    let stride = n_events.div_ceil(MOST_POINTS).max(1);
    writeln!(out, "{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
    let name = process_name(process);
    write!(
        out,
        "{}",
        json!({"ph": "M", "name": "process_name", "pid": process.pid, "args": {"name": name}})
    )?;
    let mut put = |event: Value| write!(out, ",\n{event}");
    let mut counters: BTreeMap<i16, Counter> = BTreeMap::new();
    let mut n = 0;
    each_event(source, Nanos(0), |ledger, event, time| {
        n += 1;
        for (device, books) in &ledger.devices {
            if !request.wants(*device) || *device == HOST {
                continue;
            }
            let counter = counters.entry(*device).or_default();
            let used = books.physical.now().bytes.0;
            let torch = ledger.torch(*device);
            let level = (used, torch.map_or((0, 0), |torch| (torch.allocated.now.0, torch.reserved.now.0)));
            if level == counter.written {
                continue;
            }
            if level > counter.highest {
                counter.highest = level;
                counter.pending = Some(point(ledger, *device, process.pid, time));
            }
            if n % stride == 0 || stride == 1 {
                if let Some(pending) = counter.pending.take() {
                    put(pending)?;
                }
                if stride == 1 || level != counter.highest {
                    put(point(ledger, *device, process.pid, time))?;
                }
                counter.written = level;
                counter.highest = (0, (0, 0));
            }
        }
        if let Some(oom) = ledger.ran_out() {
            let args = json!({"asked_bytes": oom.bytes.0, "device": oom.device});
            put(
                json!({"ph": "i", "s": "p", "name": "out of memory", "pid": process.pid, "tid": event.thread.0,
                "ts": micros(time), "args": args}),
            )?;
        }
        Ok(())
    })?;
    for pending in counters.into_values().filter_map(|counter| counter.pending) {
        put(pending)?;
    }
    writeln!(out, "\n]}}")
}

#[derive(Default)]
struct Counter {
    written: (u64, (u64, u64)),
    highest: (u64, (u64, u64)),
    pending: Option<Value>,
}

fn point(ledger: &Ledger, device: i16, pid: u32, time: Nanos) -> Value {
    let parts = parts_by_owner(ledger, device).into_iter();
    let args: Map<String, Value> =
        parts.map(|(part, bytes)| (part.name(ledger).to_owned(), bytes.into())).collect();
    json!({"ph": "C", "name": format!("cuda:{device} bytes"), "pid": pid, "ts": micros(time), "args": args})
}

/// The format's time: microseconds, with a fraction.
fn micros(time: Nanos) -> f64 {
    time.0 as f64 / 1000.0
}
