//! JSON lines of what NCCL did: its communicators, the program's calls, and the memory they took. For scripts that
//! compare a trace with NCCL's own log.

use std::collections::{BTreeSet, HashMap};
use std::io::{self, Write};

use gputrace_schemas::event::{CommId, EventKind, Nanos, NcclEnter, NcclExit, NcclTiming, UNKNOWN};
use serde_json::{Value, json};

use super::parts::events::each_event;
use super::{Export, Request, Takes};
use gputrace_trace::ledger::{Ledger, Object, Step};
use gputrace_trace::owners::NCCL;
use gputrace_trace::source::Source;

pub(super) const ENTRY: Export = Export {
    name: "nccl",
    summary: "NCCL's communicators, calls and memory, one JSON object per line",
    takes: Takes::ONE,
    is_binary: false,
    export,
};

fn export(request: &Request, out: &mut dyn Write) -> io::Result<()> {
    // A trace without NCCL has this line too: it shows that the trace was read.
    let process = request.source().definitions().process();
    line(out, &json!({"record": "process", "pid": process.pid, "host": process.host}))?;
    let mut known = BTreeSet::new();
    let mut open: HashMap<u64, Value> = HashMap::new();
    each_event(request.source(), Nanos(0), |ledger, event, time| match &event.kind {
        EventKind::NcclEnter(enter) => {
            introduce(request.source(), enter.comm, &mut known, out)?;
            let mut call = call(request.source(), enter);
            call["time_ns"] = time.0.into();
            call["thread"] = event.thread.0.into();
            call["stack"] = event.stack.0.into();
            open.insert(enter.call, call);
            Ok(())
        }
        EventKind::NcclExit(exit) => match open.remove(&exit.call) {
            Some(call) => line(out, &ended(call, exit)),
            None => Ok(()),
        },
        EventKind::NcclTiming(timing) => line(out, &self::timing(timing)),
        EventKind::Call(call) => {
            introduce(request.source(), call.comm, &mut known, out)?;
            for (action, object) in changes(ledger) {
                let owner = ledger.sites.owner(object.owner);
                if (owner == NCCL || call.nccl_call != 0) && request.wants(object.device) {
                    line(
                        out,
                        &json!({
                            "record": "memory",
                            "time_ns": time.0,
                            "action": action,
                            "device": object.device,
                            "bytes": object.bytes.0,
                            "owner": owner,
                            "comm": call.comm.0,
                            "call": call.nccl_call,
                            "on_nccl_thread": call.nccl_thread,
                        }),
                    )?;
                }
            }
            Ok(())
        }
        _ => Ok(()),
    })?;
    let mut left: Vec<_> = open.into_iter().collect();
    left.sort_unstable_by_key(|(number, _)| *number);
    left.iter().try_for_each(|(_, call)| line(out, call))
}

fn changes(ledger: &Ledger) -> impl Iterator<Item = (&'static str, &Object)> {
    ledger.steps().iter().filter_map(|step| match step {
        Step::Gained(object) => Some(("alloc", object)),
        Step::Lost(object) => Some(("free", object)),
        Step::Block(..) | Step::BlockFreed(..) | Step::BlockDone(..) => None,
        Step::Stranger(..) | Step::Heap(..) | Step::Pages(..) => None,
    })
}

fn line(out: &mut dyn Write, object: &Value) -> io::Result<()> {
    writeln!(out, "{object}")
}

/// Writes a communicator the first time that it is named.
fn introduce(
    source: &Source,
    id: CommId,
    known: &mut BTreeSet<CommId>,
    out: &mut dyn Write,
) -> io::Result<()> {
    let Some(comm) = source.definitions().communicator(id) else { return Ok(()) };
    if !known.insert(id) {
        return Ok(());
    }
    let hex = |number: u64| format!("{number:#x}");
    line(
        out,
        &json!({
            "record": "communicator",
            "comm": id.0,
            "origin": comm.origin.map(|origin| origin.name()),
            "call": comm.call,
            "handle": hex(comm.handle),
            "unique_id": hex(comm.unique_id),
            "comm_hash": comm.comm_hash.map(hex),
            "rank": comm.rank,
            "n_ranks": comm.n_ranks,
            "device": comm.device,
            "parent": comm.parent.0,
            "ordinal": comm.ordinal,
            "color": comm.color,
            "key": comm.key,
            "version": comm.version,
            "name": comm.config.name,
        }),
    )
}

/// A call without its end: `result` is null.
fn call(source: &Source, enter: &NcclEnter) -> Value {
    let api = source.definitions().api(enter.api).map_or("", |api| api.name.as_str());
    let number = |number: i32| (number != -1).then_some(number);
    json!({
        "record": "call",
        "call": enter.call,
        "api": api,
        "op": enter.op.name(),
        "comm": enter.comm.0,
        "sequence": (enter.sequence != UNKNOWN).then_some(enter.sequence),
        "group": enter.group,
        "group_depth": enter.group_depth,
        "count": enter.count,
        "datatype": number(enter.datatype),
        "redop": number(enter.redop),
        "redop_call": enter.redop_call,
        "peer": number(enter.peer),
        "send": format!("{:#x}", enter.send),
        "receive": format!("{:#x}", enter.receive),
        "stream": format!("{:#x}", enter.stream),
        "captured": enter.captured,
        "result": null,
    })
}

fn ended(mut call: Value, exit: &NcclExit) -> Value {
    call["result"] = exit.result.into();
    call["value"] = exit.value.into();
    call["duration_ns"] = exit.duration.0.into();
    if let Some(timed) = exit.timed {
        call["gpu"] = timed.name().into();
    }
    call
}

/// What the GPU did because of the call; of a group, for one communicator and stream. `gpu_start_ns` counts on a time line of
/// its own.
fn timing(timing: &NcclTiming) -> Value {
    json!({
        "record": "gpu",
        "call": timing.call,
        "comm": timing.comm.0,
        "stream": format!("{:#x}", timing.stream),
        "timeline": timing.timeline,
        "gpu_start_ns": timing.start.0,
        "gpu_duration_ns": timing.duration.0,
    })
}
