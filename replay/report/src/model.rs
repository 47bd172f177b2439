//! What a report consists of, whatever it will look like.

use gputrace_schemas::event::{Bytes, Nanos};

use gputrace_trace::words;
use serde::{Deserialize, Serialize};

use crate::kept;

/// A name that the program has: of a key, a column, a kind.
pub type Name = &'static str;

/// Everything that a verb has to say.
#[derive(Clone, Debug)]
pub struct Report {
    /// The verb; names the JSON's shape.
    pub verb: &'static str,
    /// One for each process.
    pub parts: Vec<Part>,
}

/// The answer about a process. A summary keeps it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Part {
    /// For people.
    pub title: String,
    /// The file it is about.
    pub trace: Option<String>,
    /// The process's id.
    pub pid: Option<u32>,
    /// Its rank in the job.
    pub rank: Option<u32>,
    /// Its command line.
    pub command: Vec<String>,
    /// The answer, before all that it rests on.
    pub verdict: Option<Verdict>,
    /// In the order to be shown.
    pub sections: Vec<Section>,
}

impl Part {
    /// A part that was read, if its tables are whole.
    ///
    /// # Errors
    /// A row has more or fewer values than there are columns.
    pub fn checked(self) -> Result<Part, String> {
        let sections = self.sections.iter().chain(self.verdict.as_ref().map(|verdict| &verdict.section));
        let is_whole = |item: &Item| match item {
            Item::Table(table) => table.rows.iter().all(|row| row.len() == table.columns.len()),
            Item::Fact { .. } | Item::Chart(_) | Item::Line(..) => true,
        };
        match sections.flat_map(|section| &section.items).all(is_whole) {
            true => Ok(self),
            false => Err("a table in it has rows of a different length than its columns".into()),
        }
    }
}

/// Events of a process, in a few lines.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Verdict {
    /// For programs: one of few words, snake_case.
    #[serde(deserialize_with = "kept::name")]
    pub kind: Name,
    /// The common name of its cause; empty where none is known.
    #[serde(default)]
    pub cause: String,
    /// Of the words of `kind`, what else is wrong.
    #[serde(deserialize_with = "kept::names")]
    pub also: Vec<Name>,
    /// The lines.
    pub section: Section,
}

/// A subject.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Section {
    /// Key in JSON, snake_case.
    pub name: String,
    /// Heading for people.
    pub title: String,
    /// The items, in order.
    #[serde(serialize_with = "kept::without_charts")]
    pub items: Vec<Item>,
}

impl Section {
    /// An empty section.
    #[must_use]
    pub fn new(name: impl Into<String>, title: impl Into<String>) -> Section {
        Section { name: name.into(), title: title.into(), items: vec![] }
    }

    /// Adds a named value.
    #[must_use]
    pub fn fact(self, name: &'static str, label: &'static str, value: Value) -> Section {
        self.remark(name, label, value, "")
    }

    /// Adds a named value with a remark behind it; none if it is empty.
    #[must_use]
    pub fn remark(
        mut self,
        name: &'static str,
        label: &'static str,
        value: Value,
        remark: impl Into<String>,
    ) -> Section {
        self.items.push(Item::Fact { name, label, value, remark: remark.into() });
        self
    }

    /// Adds a table, unless it is empty.
    #[must_use]
    pub fn table(mut self, table: Table) -> Section {
        if !table.rows.is_empty() {
            self.items.push(Item::Table(table));
        }
        self
    }

    /// Adds charts.
    #[must_use]
    pub fn charts(mut self, charts: impl IntoIterator<Item = Chart>) -> Section {
        self.items.extend(charts.into_iter().map(Item::Chart));
        self
    }

    /// Adds a line.
    #[must_use]
    pub fn line(mut self, mood: Mood, text: impl Into<String>) -> Section {
        self.items.push(Item::Line(mood, text.into()));
        self
    }

    /// Adds a line for each of these.
    #[must_use]
    pub fn lines(mut self, lines: impl IntoIterator<Item = (Mood, String)>) -> Section {
        self.items.extend(lines.into_iter().map(|(mood, text)| Item::Line(mood, text)));
        self
    }

    /// Adds warnings, or one if there is one.
    #[must_use]
    pub fn warn(self, texts: impl IntoIterator<Item = String>) -> Section {
        self.lines(texts.into_iter().map(|text| (Mood::Warning, text)))
    }
}

/// Something in a section.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Item {
    /// A named value.
    Fact {
        /// Key in JSON, snake_case with its unit: `peak_bytes`.
        #[serde(deserialize_with = "kept::name")]
        name: Name,
        /// For people.
        #[serde(deserialize_with = "kept::name")]
        label: Name,
        /// The value.
        value: Value,
        /// What to know about it; may be empty.
        remark: String,
    },
    /// Rows.
    Table(Table),
    /// A picture of values that a table has, too: programs have no use for it.
    #[serde(skip)]
    Chart(Chart),
    /// A line of text.
    Line(Mood, String),
}

/// How a line is meant.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mood {
    /// Plain.
    Note,
    /// All is well.
    Good,
    /// Take care.
    Warning,
    /// This is the trouble.
    Bad,
    /// A command to type.
    Command,
}

/// Rows of values.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Table {
    /// Key in JSON, snake_case.
    #[serde(deserialize_with = "kept::name")]
    pub name: Name,
    /// Columns.
    pub columns: Vec<Column>,
    /// Rows, as long as `columns`.
    pub rows: Vec<Vec<Value>>,
    /// Rows that were left out: how many, and what they add up to.
    pub left_out: Option<String>,
}

/// A column.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(into = "(Name, Name)", try_from = "(String, String)")]
pub struct Column {
    /// Key in JSON, snake_case with its unit.
    pub name: Name,
    /// For people.
    pub title: Name,
}

/// A column of things: key, title, and what it shows of one.
pub type Shown<'a, T> = (&'static str, &'static str, &'a dyn Fn(&T) -> Value);

impl Table {
    /// An empty table; columns are keys with titles.
    #[must_use]
    pub fn new(name: &'static str, columns: &[(&'static str, &'static str)]) -> Table {
        let columns = columns.iter().map(|(name, title)| Column { name, title }).collect();
        Table { name, columns, ..Table::default() }
    }

    /// What each column shows of each thing.
    pub fn of<'a, T: 'a>(
        name: &'static str,
        things: impl IntoIterator<Item = &'a T>,
        columns: &[Shown<'_, T>],
    ) -> Table {
        let row = |thing| columns.iter().map(|(.., value)| value(thing)).collect();
        let rows = things.into_iter().map(row).collect();
        let columns = columns.iter().map(|(name, title, _)| Column { name, title }).collect();
        Table { name, columns, rows, left_out: None }
    }

    /// Keeps the first `n` rows, and says what of column `sum` was left out.
    #[must_use]
    pub fn keep(mut self, n: usize, sum: usize) -> Table {
        if self.rows.len() > n {
            let bytes = self.rows[n..].iter().map(|row| match row[sum] {
                Value::Bytes(bytes) => bytes.0,
                _ => 0,
            });
            let bytes = Bytes(bytes.fold(0, u64::saturating_add));
            let n_rows = words::count((self.rows.len() - n) as u64);
            self.left_out = Some(format!("{n_rows} more with {} in total", words::bytes(bytes)));
            self.rows.truncate(n);
        }
        self
    }
}

/// Bytes over the values of a variable, known to within a range.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chart {
    /// Heading for people.
    pub title: String,
    /// What the horizontal axis is.
    pub variable: String,
    /// At least two, ascending by where they are.
    pub points: Vec<Point>,
    /// What was measured: where, and how much.
    pub recorded: Vec<(u64, Bytes)>,
    /// What the bytes must stay below.
    pub ceiling: Option<Ceiling>,
}

/// What is said of one value of the variable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Point {
    /// The value of the variable.
    pub at: u64,
    /// At least.
    pub low: Bytes,
    /// The best guess.
    pub best: Bytes,
    /// At most.
    pub high: Bytes,
    /// The best guess is certain: the range is not worth drawing.
    pub is_certain: bool,
}

/// What a chart's bytes must stay below.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ceiling {
    /// For people.
    pub name: String,
    /// The same where there is little room.
    pub short: &'static str,
    /// How much it is at each of the points.
    pub room: Vec<Bytes>,
}

/// A value, with its unit.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Value {
    /// Not known.
    Missing,
    /// Bytes.
    Bytes(Bytes),
    /// Bytes, more or less.
    Difference(i64),
    /// A number of things.
    Count(u64),
    /// Nanoseconds: a duration, or the time since the start of the trace.
    Time(Nanos),
    /// Part of a whole, 0 to 1.
    Share(#[serde(with = "kept::bits")] f64),
    /// Words.
    Text(String),
    /// A command to type: never cut or broken.
    Command(String),
}

impl Value {
    /// Bytes, where they are known.
    #[must_use]
    pub fn bytes(bytes: Option<u64>) -> Value {
        bytes.map_or(Value::Missing, |bytes| Value::Bytes(Bytes(bytes)))
    }

    /// Words.
    #[must_use]
    pub fn text(text: impl Into<String>) -> Value {
        Value::Text(text.into())
    }

    /// `part` of `whole`; missing where there is no whole.
    #[must_use]
    pub fn share(part: u64, whole: u64) -> Value {
        if whole == 0 { Value::Missing } else { Value::Share(part as f64 / whole as f64) }
    }
}
