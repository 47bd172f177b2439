//! JSON lines, a change of memory each. For jq and scripts; [`super::csv`] has the same rows.

use std::io::{self, Write};

use gputrace_schemas::event::{Bytes, EventKind, Nanos};
use serde_json::{Map, Value};

use super::{Export, Request, each_event};
use crate::ledger::{Block, Ledger, MemoryKind, Object, SiteId, Step};
use crate::owners::TORCH;

pub(super) struct Jsonl;

impl Export for Jsonl {
    fn name(&self) -> &'static str {
        "jsonl"
    }

    fn extension(&self) -> &'static str {
        "jsonl"
    }

    fn summary(&self) -> &'static str {
        "every change of memory, a JSON object a line, for jq"
    }

    fn export(&self, request: &Request, out: &mut dyn Write) -> io::Result<()> {
        rows(request, |row| {
            let values = FIELDS.iter().map(|name| (*name).to_owned()).zip(row.values());
            let object: Map<String, Value> = values.filter(|(_, value)| !value.is_null()).collect();
            serde_json::to_writer(&mut *out, &object)?;
            writeln!(out)
        })
    }
}

/// The columns.
pub(super) const FIELDS: [&str; 14] = [
    "time_ns",
    "action",
    "device",
    "kind",
    "addr",
    "bytes",
    "requested_bytes",
    "stream",
    "owner",
    "call_site",
    "stack",
    "device_bytes",
    "torch_allocated_bytes",
    "torch_reserved_bytes",
];

/// One change.
pub(super) struct Row<'a> {
    time: Nanos,
    /// `alloc`, `free` and `free_completed` of memory; `oom`.
    action: &'static str,
    device: i16,
    kind: &'static str,
    addr: Option<u64>,
    bytes: Bytes,
    requested: Option<Bytes>,
    stream: Option<u64>,
    owner: &'a str,
    site: String,
    stack: u32,
    ledger: &'a Ledger,
}

impl Row<'_> {
    /// By [`FIELDS`]. The totals are those of the device just after.
    pub(super) fn values(&self) -> [Value; FIELDS.len()] {
        let number = |value: Option<u64>| value.map_or(Value::Null, Value::from);
        let text = |text: &str| if text.is_empty() { Value::Null } else { text.into() };
        let books = self.ledger.devices.get(&self.device);
        let torch = self.ledger.torch(self.device);
        [
            self.time.0.into(),
            self.action.into(),
            self.device.into(),
            text(self.kind),
            self.addr.filter(|addr| *addr > 0).map_or(Value::Null, |addr| format!("{addr:#x}").into()),
            self.bytes.0.into(),
            number(self.requested.map(|bytes| bytes.0)),
            number(self.stream),
            text(self.owner),
            text(&self.site),
            number(Some(u64::from(self.stack)).filter(|stack| *stack > 0)),
            number(books.map(|books| books.physical.now().bytes.0)),
            number(torch.map(|torch| torch.allocated.now.0)),
            number(torch.map(|torch| torch.reserved.now.0)),
        ]
    }
}

/// Every change of memory of the devices that are wanted.
pub(super) fn rows(request: &Request, mut put: impl FnMut(&Row) -> io::Result<()>) -> io::Result<()> {
    each_event(request.source, |ledger, event, time| {
        let site = |id: SiteId| ledger.sites.site(id).map(ToString::to_string).unwrap_or_default();
        let of_block = |action, addr: u64, block: &Block| Row {
            time,
            action,
            device: block.device,
            kind: "block",
            addr: Some(addr),
            bytes: block.bytes,
            requested: Some(block.requested),
            stream: block.stream,
            owner: TORCH,
            site: site(block.site),
            stack: block.stack.0,
            ledger,
        };
        let of_object = |action, object: &Object| Row {
            time,
            action,
            device: object.device,
            kind: kind(object.kind),
            addr: Some(object.addr),
            bytes: object.bytes,
            requested: None,
            stream: None,
            owner: ledger.sites.owner(object.owner),
            site: site(object.site),
            stack: object.stack.0,
            ledger,
        };
        for step in ledger.steps() {
            let row = match step {
                Step::Gained(object) => of_object("alloc", object),
                Step::Lost(object) => of_object("free", object),
                Step::Block(addr, block) => of_block("alloc", *addr, block),
                Step::BlockFreed(addr, block) => of_block("free", *addr, block),
                Step::BlockDone(addr, block) => of_block("free_completed", *addr, block),
                Step::Mapped(_) | Step::Unmapped(_) => continue,
            };
            if request.wants(row.device) {
                put(&row)?;
            }
        }
        if let EventKind::BlockOom(oom) = &event.kind
            && request.wants(oom.device)
        {
            put(&Row {
                time,
                action: "oom",
                device: oom.device,
                kind: "block",
                addr: None,
                bytes: oom.bytes,
                requested: oom.requested,
                stream: None,
                owner: TORCH,
                site: String::new(),
                stack: event.stack.0,
                ledger,
            })?;
        }
        Ok(())
    })
}

/// One word for a column.
fn kind(kind: MemoryKind) -> &'static str {
    match kind {
        MemoryKind::Linear => "linear",
        MemoryKind::Virtual => "virtual",
        MemoryKind::Async => "async",
        MemoryKind::Array => "array",
        MemoryKind::Managed => "managed",
        MemoryKind::Graph => "graph",
        MemoryKind::Pinned => "pinned",
        MemoryKind::Registered => "registered",
        MemoryKind::HostVirtual => "host_virtual",
        MemoryKind::Imported => "imported",
    }
}
