//! A SQLite database: the rows of [`super::parts::changes`] with their stacks, and views for people and for scripts that read what
//! Nsight Systems exports. docs/EXPORTS.md describes the tables.

use std::io::{self, Write};

use gputrace_schemas::event::{Frame, FrameId, StackId};
use rustc_hash::{FxHashMap, FxHashSet};

use super::parts::changes::{COLUMNS, Kind, Value, rows};
use super::parts::events::origins;
use super::parts::sqlite_file::{Entry, Tables, write};
use super::{Export, Request, Takes};
use gputrace_analyse::live::line;

pub(super) const ENTRY: Export = Export {
    name: "sqlite",
    summary: "every change of memory with its stack in a database, for sqlite3 and scripts that read Nsight Systems' exports",
    takes: Takes { several: true, ..Takes::ONE },
    is_binary: true,
    export,
};

/// Places in [`schema`].
const STRINGS: usize = 0;
const PROCESSES: usize = 1;
const DEVICES: usize = 2;
const CHANGES: usize = 3;
const STACKS: usize = 4;
const FRAMES: usize = 5;
const KINDS: usize = 6;
const OPERATIONS: usize = 7;

/// Nsight Systems' numbers of kinds of memory (`ENUM_CUDA_MEM_KIND` of its exports), by our names.
const MEMORY_KINDS: [(i64, &str, &str); 4] =
    [(1, "Pinned", "pinned"), (2, "Device", "linear"), (3, "Array", "array"), (4, "Managed", "managed")];

fn schema() -> Vec<Entry> {
    let columns = COLUMNS.iter().map(|(name, kind)| match kind {
        Kind::Text => format!("{name}_id INTEGER REFERENCES StringIds(id)"),
        Kind::Number | Kind::Address => format!("{name} INTEGER"),
    });
    let changes = columns.chain(["trace INTEGER".to_owned()]).collect::<Vec<_>>().join(", ");
    vec![
        Entry::Table("StringIds", "id INTEGER PRIMARY KEY, value TEXT".into()),
        Entry::Table(
            "process",
            "trace INTEGER PRIMARY KEY, file TEXT, rank INTEGER, pid INTEGER, host TEXT, command TEXT, executable TEXT, \
             start_ns INTEGER, start_unix_ns INTEGER, torch_version TEXT, recorder TEXT"
                .into(),
        ),
        Entry::Table(
            "device",
            "trace INTEGER, device INTEGER, name TEXT, uuid TEXT, total_bytes INTEGER".into(),
        ),
        Entry::Table("change", changes),
        Entry::Table("stack_frame", "trace INTEGER, stack INTEGER, depth INTEGER, frame INTEGER".into()),
        Entry::Table(
            "frame",
            "trace INTEGER, frame INTEGER, function TEXT, file TEXT, line INTEGER, is_python INTEGER".into(),
        ),
        Entry::Table("ENUM_CUDA_MEM_KIND", "id INTEGER, name TEXT, label TEXT".into()),
        Entry::Table("ENUM_CUDA_DEV_MEM_EVENT_OPER", "id INTEGER, name TEXT, label TEXT".into()),
        Entry::View(
            "changes",
            "SELECT c.time_ns, c.rank, c.pid, c.tid, a.value AS action, c.device, k.value AS kind, c.addr, c.bytes, \
             c.requested_bytes, c.stream, o.value AS owner, s.value AS call_site, c.stack, c.device_bytes, \
             c.torch_allocated_bytes, c.torch_reserved_bytes, c.trace FROM change c \
             LEFT JOIN StringIds a ON a.id = c.action_id LEFT JOIN StringIds k ON k.id = c.kind_id \
             LEFT JOIN StringIds o ON o.id = c.owner_id LEFT JOIN StringIds s ON s.id = c.call_site_id",
        ),
        Entry::View(
            "stacks",
            "SELECT s.trace, s.stack, s.depth, f.function, f.file, f.line, f.is_python FROM stack_frame s \
             JOIN frame f ON f.trace = s.trace AND f.frame = s.frame",
        ),
        // What the driver handed out, as Nsight Systems shows it. A process is in bits 24 to 47 of globalPid.
        Entry::View(
            "CUDA_GPU_MEMORY_USAGE_EVENTS",
            "SELECT c.time_ns AS start, c.pid * 16777216 AS globalPid, c.device AS deviceId, NULL AS contextId, \
             c.addr AS address, NULL AS pc, c.bytes AS bytes, \
             CASE k.value WHEN 'pinned' THEN 1 WHEN 'array' THEN 3 WHEN 'managed' THEN 4 ELSE 2 END AS memKind, \
             CASE a.value WHEN 'alloc' THEN 0 ELSE 1 END AS memoryOperationType, c.call_site_id AS name, \
             NULL AS correlationId, c.stream AS streamId, NULL AS localMemoryPoolAddress, \
             NULL AS localMemoryPoolReleaseThreshold, NULL AS localMemoryPoolSize, NULL AS localMemoryPoolUtilizedSize, \
             NULL AS importedMemoryPoolAddress, NULL AS importedMemoryPoolProcessId FROM change c \
             JOIN StringIds k ON k.id = c.kind_id JOIN StringIds a ON a.id = c.action_id \
             WHERE k.value IN ('linear', 'virtual', 'async', 'array', 'managed', 'pinned')",
        ),
    ]
}

fn export(request: &Request, out: &mut dyn Write) -> io::Result<()> {
    write(out, &schema(), &mut |tables| fill(request, tables))
}

fn fill(request: &Request, tables: &mut Tables) -> io::Result<()> {
    processes(request, tables)?;
    let text = |text| Value::Text(text);
    for (id, label, name) in MEMORY_KINDS {
        tables.row(KINDS, &[Value::Number(id), text(name), text(label)])?;
    }
    for (id, label) in [(0, "Allocation"), (1, "Deallocation")] {
        tables.row(OPERATIONS, &[Value::Number(id), text(label), text(label)])?;
    }
    let mut strings: FxHashMap<String, i64> = FxHashMap::default();
    let mut stacks: FxHashSet<(usize, StackId)> = FxHashSet::default();
    let mut frames: FxHashSet<(usize, FrameId)> = FxHashSet::default();
    let mut cells: Vec<Value> = vec![];
    rows(request, |row| {
        let values = row.values();
        cells.clear();
        for value in values {
            cells.push(match value {
                Value::None => Value::None,
                Value::Number(number) => Value::Number(number),
                Value::Text(text) => Value::Number(string(text, &mut strings, tables)?),
            });
        }
        cells.push(Value::Number(row.trace as i64 + 1));
        tables.row(CHANGES, &cells)?;
        if row.stack.0 > 0 && stacks.insert((row.trace, row.stack)) {
            stack(request, row.trace, row.stack, &mut frames, tables)?;
        }
        Ok(())
    })
}

fn processes(request: &Request, tables: &mut Tables) -> io::Result<()> {
    for (trace, (source, origin)) in request.sources.iter().zip(origins(request.sources)).enumerate() {
        let process = source.definitions().process();
        let command = process.command.join(" ");
        let number = |value: u64| Value::Number(value as i64);
        tables.row(
            PROCESSES,
            &[
                Value::None, // the number of the row, from 1
                Value::Text(source.path()),
                process.rank.map_or(Value::None, |rank| number(u64::from(rank))),
                number(u64::from(process.pid)),
                Value::Text(&process.host),
                Value::Text(&command),
                Value::Text(&process.executable),
                number(origin.0),
                number(process.start_realtime),
                process.torch_version.as_deref().map_or(Value::None, Value::Text),
                Value::Text(&process.recorder),
            ],
        )?;
        for device in source.devices() {
            let (ordinal, total) = (Value::Number(i64::from(device.ordinal)), number(device.total.0));
            let (name, uuid) = (Value::Text(&device.name), Value::Text(&device.uuid));
            tables.row(DEVICES, &[number(trace as u64 + 1), ordinal, name, uuid, total])?;
        }
    }
    Ok(())
}

/// The number of a text.
fn string(text: &str, strings: &mut FxHashMap<String, i64>, tables: &mut Tables) -> io::Result<i64> {
    if let Some(id) = strings.get(text) {
        return Ok(*id);
    }
    let id = strings.len() as i64 + 1;
    strings.insert(text.to_owned(), id);
    tables.row(STRINGS, &[Value::None, Value::Text(text)])?;
    Ok(id)
}

/// The frames of a stack, innermost first, and their definitions where they were not written before.
fn stack(
    request: &Request,
    trace: usize,
    id: StackId,
    known: &mut FxHashSet<(usize, FrameId)>,
    tables: &mut Tables,
) -> io::Result<()> {
    let definitions = request.sources[trace].definitions();
    let number = |value: u64| Value::Number(value as i64);
    let of_trace = number(trace as u64 + 1);
    for (depth, frame_id) in definitions.stack(id).into_iter().flat_map(|stack| &stack.frames).enumerate() {
        let frame_number = number(u64::from(frame_id.0));
        tables.row(STACKS, &[of_trace, number(u64::from(id.0)), number(depth as u64), frame_number])?;
        let Some(frame) = definitions.frame(*frame_id).filter(|_| known.insert((trace, *frame_id))) else {
            continue;
        };
        let is_python = matches!(frame, Frame::Python { .. });
        let line = line(definitions, frame);
        let (name, file) = (Value::Text(&line.name), Value::Text(&line.file));
        let row = number(u64::from(line.line));
        tables.row(FRAMES, &[of_trace, frame_number, name, file, row, number(u64::from(is_python))])?;
    }
    Ok(())
}
