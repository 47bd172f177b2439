//! Every change of memory as a row: what tables are made of (CSV, JSON lines, Parquet).

use std::io;

use gputrace_schemas::event::{Bytes, EventKind, Nanos, StackId};

use super::events::{Request, each_event, origins};
use gputrace_trace::ledger::{Block, Ledger, MemoryKind, Object, SiteId, Step};
use gputrace_trace::owners::TORCH;

/// What a column holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// An integer.
    Number,
    /// An address, as an integer.
    Address,
    /// Words, few different ones.
    Text,
}

/// The columns; docs/EXPORTS.md says what each means.
#[rustfmt::skip]
pub const COLUMNS: [(&str, Kind); 17] = [
    ("time_ns", Kind::Number),
    ("rank", Kind::Number),
    ("pid", Kind::Number),
    ("tid", Kind::Number),
    ("action", Kind::Text),
    ("device", Kind::Number),
    ("kind", Kind::Text),
    ("addr", Kind::Address),
    ("bytes", Kind::Number),
    ("requested_bytes", Kind::Number),
    ("stream", Kind::Address),
    ("owner", Kind::Text),
    ("call_site", Kind::Text),
    ("stack", Kind::Number),
    ("device_bytes", Kind::Number),
    ("torch_allocated_bytes", Kind::Number),
    ("torch_reserved_bytes", Kind::Number),
];

/// A cell.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Value<'a> {
    /// Not known, or not applicable.
    None,
    /// An integer. Addresses from 2^63 on keep their bits: tables have no unsigned integers.
    Number(i64),
    /// Words.
    Text(&'a str),
}

/// One change.
#[derive(Clone, Copy)]
pub struct Row<'a> {
    time: Nanos,
    rank: Option<u32>,
    pid: u32,
    tid: u32,
    /// `alloc`, `free` and `free_completed` of memory; `oom`.
    action: &'static str,
    device: i16,
    kind: &'static str,
    addr: u64,
    bytes: Bytes,
    requested: Option<Bytes>,
    stream: Option<u64>,
    owner: &'a str,
    site: &'a str,
    /// Of which of the traces.
    pub trace: usize,
    /// From where.
    pub stack: StackId,
    ledger: &'a Ledger,
}

impl Row<'_> {
    /// By [`COLUMNS`]. The totals are those of the device just after.
    pub fn values(&self) -> [Value<'_>; COLUMNS.len()] {
        let number = |value: u64| Value::Number(value as i64);
        let maybe = |value: Option<u64>| value.map_or(Value::None, number);
        let text = |text| if str::is_empty(text) { Value::None } else { Value::Text(text) };
        let known = |value: u64| if value == 0 { Value::None } else { number(value) };
        let books = self.ledger.devices().get(&self.device);
        let torch = self.ledger.torch(self.device);
        [
            number(self.time.0),
            maybe(self.rank.map(u64::from)),
            number(u64::from(self.pid)),
            known(u64::from(self.tid)),
            text(self.action),
            Value::Number(i64::from(self.device)),
            text(self.kind),
            known(self.addr),
            number(self.bytes.0),
            maybe(self.requested.map(|bytes| bytes.0)),
            maybe(self.stream),
            text(self.owner),
            text(self.site),
            known(u64::from(self.stack.0)),
            maybe(books.map(|books| books.physical.now().bytes.0)),
            maybe(torch.map(|torch| torch.allocated.now.0)),
            maybe(torch.map(|torch| torch.reserved.now.0)),
        ]
    }
}

/// Every change of memory of the devices that are wanted, one trace after the other.
pub fn rows(request: &Request, mut put: impl FnMut(&Row) -> io::Result<()>) -> io::Result<()> {
    for (trace, (source, origin)) in request.sources.iter().zip(origins(request.sources)).enumerate() {
        let definitions = source.definitions();
        let (rank, pid) = (definitions.process().rank, definitions.process().pid);
        let mut sites = SiteNames::default();
        each_event(source, origin, |ledger, event, time| {
            let tid = definitions.thread(event.thread).map_or(0, |thread| thread.tid);
            let none = Row {
                time,
                rank,
                pid,
                tid,
                action: "oom",
                device: 0,
                kind: "block",
                addr: 0,
                bytes: Bytes(0),
                requested: None,
                stream: None,
                owner: TORCH,
                site: "",
                trace,
                stack: event.stack,
                ledger,
            };
            for step in ledger.steps() {
                let row = match step {
                    Step::Gained(object) => of_object("alloc", object, &mut sites, none),
                    Step::Lost(object) => of_object("free", object, &mut sites, none),
                    Step::Block(addr, block) => of_block("alloc", *addr, block, &mut sites, none),
                    Step::BlockFreed(addr, block) => of_block("free", *addr, block, &mut sites, none),
                    Step::BlockDone(addr, block) => {
                        of_block("free_completed", *addr, block, &mut sites, none)
                    }
                    Step::Stranger(..) | Step::Heap(..) | Step::Pages(..) => continue,
                };
                if request.wants(row.device) {
                    put(&row)?;
                }
            }
            match &event.kind {
                EventKind::BlockOom(oom) if request.wants(oom.device) => {
                    put(&Row { device: oom.device, bytes: oom.bytes, requested: oom.requested, ..none })
                }
                _ => Ok(()),
            }
        })?;
    }
    Ok(())
}

fn of_block<'a>(
    action: &'static str,
    addr: u64,
    block: &Block,
    sites: &'a mut SiteNames,
    row: Row<'a>,
) -> Row<'a> {
    Row {
        action,
        device: block.device,
        addr,
        bytes: block.bytes,
        requested: Some(block.requested),
        stream: block.stream,
        site: sites.name(row.ledger, block.site),
        stack: block.stack,
        ..row
    }
}

fn of_object<'a>(action: &'static str, object: &Object, sites: &'a mut SiteNames, row: Row<'a>) -> Row<'a> {
    Row {
        action,
        device: object.device,
        kind: kind(object.kind),
        addr: object.addr,
        bytes: object.bytes,
        owner: row.ledger.sites.owner(object.owner),
        site: sites.name(row.ledger, object.site),
        stack: object.stack,
        ..row
    }
}

/// Call sites in words, each made once.
#[derive(Default)]
struct SiteNames(Vec<Option<String>>);

impl SiteNames {
    fn name(&mut self, ledger: &Ledger, id: SiteId) -> &str {
        let Some(site) = ledger.sites.site(id) else { return "" };
        let idx = id.0 as usize;
        if idx >= self.0.len() {
            self.0.resize(idx + 1, None);
        }
        self.0[idx].get_or_insert_with(|| site.to_string())
    }
}

/// One word for a column.
pub fn kind(kind: MemoryKind) -> &'static str {
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
