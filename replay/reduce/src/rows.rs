//! The table of a summary: rows of facts, and how they are written.

use std::io;

use gputrace_exports::parts::changes::{Kind, Value};
use gputrace_exports::parts::parquet::write::{Column, File};

/// The columns; docs/SQL.md says what each means.
#[rustfmt::skip]
pub(super) const COLUMNS: [(&str, Kind); 21] = [
    ("kind", Kind::Text),
    ("rank", Kind::Number),
    ("host", Kind::Text),
    ("pid", Kind::Number),
    ("trace", Kind::Text),
    ("device", Kind::Number),
    ("gpu", Kind::Text),
    ("name", Kind::Text),
    ("number", Kind::Number),
    ("time_ns", Kind::Number),
    ("until_ns", Kind::Number),
    ("owner", Kind::Text),
    ("call_site", Kind::Text),
    ("phase", Kind::Text),
    ("role", Kind::Text),
    ("stack", Kind::Text),
    ("bytes", Kind::Number),
    ("least_bytes", Kind::Number),
    ("most_bytes", Kind::Number),
    ("objects", Kind::Number),
    ("text", Kind::Text),
];
/// The key of the format's name in the file's metadata, and that name. The number changes where what is there changes its meaning.
pub(super) const SCHEMA: (&str, &str) = ("gputrace.schema", "gputrace.summary/1");
/// The key of the version of `gputrace` that wrote it.
pub(super) const VERSION: &str = "gputrace.version";
/// zstd's level: a summary is written once, and copied.
const LEVEL: i32 = 6;

/// Rows in each group of those that lie behind the others.
pub(super) const BEHIND: usize = 64;

/// One fact; what is not set is NULL.
#[derive(Clone, Copy, Default)]
pub(super) struct Row<'a> {
    pub device: Option<i16>,
    pub name: &'a str,
    pub number: Option<u64>,
    pub time: Option<u64>,
    pub until: Option<u64>,
    pub owner: &'a str,
    pub call_site: &'a str,
    pub phase: &'a str,
    pub role: &'a str,
    pub stack: &'a str,
    pub bytes: Option<u64>,
    pub least: Option<u64>,
    pub most: Option<u64>,
    pub objects: Option<u64>,
    pub text: &'a str,
}

/// Whose rows they are.
pub(super) struct Whose {
    pub rank: Option<u32>,
    pub host: String,
    pub pid: u32,
    pub trace: String,
    /// UUIDs of the devices.
    pub gpus: Vec<(i16, String)>,
}

/// The rows of one process.
pub(super) struct Rows {
    whose: Whose,
    columns: Vec<Column>,
    /// What is asked for one by one, and is most of a summary: it lies behind the rest, in groups of [`BEHIND`] rows.
    behind: Vec<Vec<Column>>,
}

impl Rows {
    pub(super) fn of(whose: Whose) -> Rows {
        Rows { whose, columns: empty(), behind: vec![] }
    }

    pub(super) fn add(&mut self, kind: &str, row: &Row<'_>) {
        let values = self.whose.values(kind, row);
        self.columns.iter_mut().zip(values).for_each(|(column, value)| column.push(value));
    }

    /// The same, behind all others: the rows that are added so lie in groups, [`BEHIND`] in each, from the file's second on.
    pub(super) fn add_behind(&mut self, kind: &str, row: &Row<'_>) {
        let n_last = self.behind.last().and_then(|group| group.first()).map_or(BEHIND, Column::n_rows);
        if n_last == BEHIND {
            self.behind.push(empty());
        }
        let values = self.whose.values(kind, row);
        let last = self.behind.iter_mut().next_back().into_iter().flatten();
        last.zip(values).for_each(|(column, value)| column.push(value));
    }

    /// The file.
    pub(super) fn file(mut self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![];
        let mut file = File::new(&mut bytes, &COLUMNS, LEVEL)?;
        file.row_group(&mut self.columns)?;
        for group in &mut self.behind {
            file.row_group(group)?;
        }
        file.finish(&[SCHEMA, (VERSION, env!("CARGO_PKG_VERSION"))])?;
        Ok(bytes)
    }
}

/// The columns, without rows.
fn empty() -> Vec<Column> {
    COLUMNS.iter().map(|_| Column::default()).collect()
}

impl Whose {
    /// What a row has in each column.
    fn values<'a>(&'a self, kind: &'a str, row: &Row<'a>) -> [Value<'a>; COLUMNS.len()] {
        let number = |value: Option<u64>| value.map_or(Value::None, |value| Value::Number(value as i64));
        fn text(text: &str) -> Value<'_> {
            if text.is_empty() { Value::None } else { Value::Text(text) }
        }
        let gpu = self.gpus.iter().find(|(device, _)| Some(*device) == row.device);
        [
            text(kind),
            number(self.rank.map(u64::from)),
            text(&self.host),
            number(Some(u64::from(self.pid))),
            text(&self.trace),
            row.device.map_or(Value::None, |device| Value::Number(i64::from(device))),
            text(gpu.map_or("", |(_, uuid)| uuid)),
            text(row.name),
            number(row.number),
            number(row.time),
            number(row.until),
            text(row.owner),
            text(row.call_site),
            text(row.phase),
            text(row.role),
            text(row.stack),
            number(row.bytes),
            number(row.least),
            number(row.most),
            number(row.objects),
            text(row.text),
        ]
    }
}
