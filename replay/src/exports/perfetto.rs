//! Perfetto's protobuf trace: a counter track for every owner of every device, out-of-memory errors as instants. For
//! ui.perfetto.dev and its SQL, with nanoseconds and no limit of size.
//!
//! Messages and field numbers: `protos/perfetto/trace/` of github.com/google/perfetto (`TracePacket`, `TrackDescriptor`,
//! `CounterDescriptor`, `ProcessDescriptor`, `TrackEvent`).

use std::io::{self, Write};

use gputrace_schemas::event::{HOST, Nanos};
use rustc_hash::FxHashMap;

use super::{Export, Request, each_event, oom, parts_by_owner};
use crate::protobuf::Message;

pub(super) struct Perfetto;

/// `TrackEvent.Type`.
const INSTANT: u64 = 3;
const COUNTER: u64 = 4;
/// `CounterDescriptor.Unit.UNIT_SIZE_BYTES`.
const BYTES: u64 = 3;
/// The track of the process; counters are numbered from the next.
const PROCESS: u64 = 1;
/// `TracePacket.SEQ_INCREMENTAL_STATE_CLEARED`.
const FIRST: u64 = 1;

impl Export for Perfetto {
    fn name(&self) -> &'static str {
        "perfetto"
    }

    fn extension(&self) -> &'static str {
        "pftrace"
    }

    fn summary(&self) -> &'static str {
        "memory over time by owner, for ui.perfetto.dev and its SQL"
    }

    fn export(&self, request: &Request, out: &mut dyn Write) -> io::Result<()> {
        let process = request.source.definitions().process();
        let mut of_process = Message::default();
        of_process.number(1, u64::from(process.pid.max(1)));
        let rank = process.rank.map_or_else(String::new, |rank| format!("rank {rank} "));
        of_process.bytes(6, format!("{rank}{}", process.command.join(" ")).as_bytes());
        let mut track = Message::default();
        track.number(1, PROCESS);
        track.bytes(3, &of_process.0);
        packet(out, None, 60, &track, FIRST)?;
        let mut tracks: FxHashMap<(i16, String), (u64, u64)> = FxHashMap::default();
        each_event(request.source, |ledger, event, time| {
            let touched =
                ledger.devices.keys().copied().filter(|device| *device != HOST && request.wants(*device));
            for device in touched {
                let mut parts = parts_by_owner(ledger, device);
                // PyTorch's memory is split as soon as its blocks are seen; the whole of it is nothing then.
                let gone = tracks.iter().filter(|((of, name), (_, last))| {
                    *of == device && *last > 0 && parts.iter().all(|(known, _)| known != name)
                });
                let gone: Vec<String> = gone.map(|((_, name), _)| name.clone()).collect();
                parts.extend(gone.into_iter().map(|name| (name, 0)));
                for (name, bytes) in parts {
                    let n_tracks = tracks.len() as u64;
                    let (uuid, last) =
                        tracks.entry((device, name.clone())).or_insert((PROCESS + 1 + n_tracks, 0));
                    if tracks_new(*uuid, n_tracks) {
                        packet(out, None, 60, &counter_track(*uuid, device, &name), 0)?;
                    } else if *last == bytes {
                        continue;
                    }
                    *last = bytes;
                    let mut counter = Message::default();
                    counter.number(9, COUNTER);
                    counter.number(11, *uuid);
                    // 0 is a value of a counter, not a missing one.
                    counter.varint(30 << 3);
                    counter.varint(bytes);
                    packet(out, Some(time), 11, &counter, 0)?;
                }
            }
            if let Some((device, bytes)) = oom(&event.kind) {
                let mut instant = Message::default();
                instant.number(9, INSTANT);
                instant.number(11, PROCESS);
                instant.bytes(23, format!("out of memory on cuda:{device}: {bytes} bytes").as_bytes());
                packet(out, Some(time), 11, &instant, 0)?;
            }
            Ok(())
        })
    }
}

/// Whether the track with this number was made just now, when there were `n_before`.
fn tracks_new(uuid: u64, n_before: u64) -> bool {
    uuid == PROCESS + 1 + n_before
}

fn counter_track(uuid: u64, device: i16, name: &str) -> Message {
    let mut counter = Message::default();
    counter.number(3, BYTES);
    let mut track = Message::default();
    track.number(1, uuid);
    track.bytes(2, format!("cuda:{device} {name}").as_bytes());
    track.number(5, PROCESS);
    track.bytes(8, &counter.0);
    track
}

/// `Trace.packet`: a message at a time, on the only sequence.
fn packet(
    out: &mut dyn Write,
    time: Option<Nanos>,
    field: u64,
    inside: &Message,
    flags: u64,
) -> io::Result<()> {
    let mut packet = Message::default();
    packet.number(8, time.map_or(0, |time| time.0));
    packet.number(10, 1);
    packet.number(13, flags);
    packet.bytes(field, &inside.0);
    let mut outer = Message::default();
    outer.bytes(1, &packet.0);
    out.write_all(&outer.0)
}
