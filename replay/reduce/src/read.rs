//! Summaries, read again.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use gputrace_schemas::event::{Bytes, Nanos};
use serde::de::DeserializeOwned;

use serde_json::Value as Json;

use super::Head;
use super::rows::{BEHIND, Row, Rows, SCHEMA, VERSION, Whose};
use super::write::{BUDGET_JSON, FIGURES_JSON, Index, KeptState, Piece};
use gputrace_answers::Reply;
use gputrace_answers::diff::Side;
use gputrace_answers::leaks::Found;
use gputrace_exports::parts::parquet::read::{Groups, Table};
use gputrace_ranks::calls::Participant;
use gputrace_ranks::memory::{Between, Holding, Moments};
use gputrace_report::model::Part;
use gputrace_report::summary::ProcessSummary;
use gputrace_trace::files;
use gputrace_trace::source::Source;

/// What is read of a file: facts for people and their SQL stay where they are.
const COLUMNS: [&str; 7] = ["kind", "host", "trace", "name", "number", "text", "pid"];
/// Larger files are no summaries.
const MOST_BYTES: u64 = 256 << 20;

/// Why a file cannot be read as a summary, or does not say what is requested.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It could not be read.
    #[error("{path}: {cause}")]
    Open {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        cause: std::io::Error,
    },
    /// It is damaged, or something else.
    #[error("{path} is not a readable summary: {what}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// It was written by another version.
    #[error("{path} is a summary of format {found}, and this gputrace reads {wanted}: reduce {trace} again", wanted = SCHEMA.1)]
    OtherVersion {
        /// The file.
        path: PathBuf,
        /// Its shape.
        found: String,
        /// Where its trace was.
        trace: String,
    },
    /// That is only in the trace.
    #[error("{path} is a summary: {what} needs the trace, {trace}")]
    NeedsTrace {
        /// The file.
        path: PathBuf,
        /// What was asked for.
        what: String,
        /// Host and path of the trace.
        trace: String,
    },
}

/// When something was held, and what.
pub type Then = (Nanos, BTreeMap<Holding, Bytes>);

/// A summary.
#[derive(Debug)]
pub struct Summary {
    path: PathBuf,
    table: Table,
    /// The whole file: what lies behind the table is read when it is asked for.
    file: Vec<u8>,
    trace: String,
}

impl Moments for Summary {
    fn most_between(&self, device: i16, between: &Between) -> Option<Then> {
        Summary::most_between(self, device, between.membership, between.n_before).ok().flatten()
    }
}

/// Opens the summary of a process again, or its trace where it was read from that.
#[must_use]
pub fn again(participant: &Participant) -> Option<Box<dyn Moments>> {
    Some(match &participant.summary {
        Some(path) => Box::new(Summary::open(Path::new(path)).ok()?),
        None => Box::new(Source::open(Path::new(&participant.path)).ok()?),
    })
}

impl Summary {
    /// Opens one.
    ///
    /// # Errors
    /// It cannot be read, is damaged, or is of another version.
    pub fn open(path: &Path) -> Result<Summary, Error> {
        let open = |cause| Error::Open { path: path.to_owned(), cause };
        let mut file = files::open(path).map_err(open)?;
        let size = file.metadata().map_err(open)?.len();
        if size > MOST_BYTES {
            let what = "it is larger than any summary".to_owned();
            return Err(Error::Damaged { path: path.to_owned(), what });
        }
        let mut bytes = vec![];
        file.read_to_end(&mut bytes).map_err(open)?;
        Summary::of(path, bytes)
    }

    /// The same, of the bytes of a file.
    ///
    /// # Errors
    /// It is damaged, or of another version.
    pub fn of(path: &Path, file: Vec<u8>) -> Result<Summary, Error> {
        let damaged = |what: String| Error::Damaged { path: path.to_owned(), what };
        let table = Table::read(&file, &COLUMNS, Groups::Only(0)).map_err(damaged)?;
        let said = |key: &str| table.about.iter().find(|(known, _)| known == key).map(|(_, value)| &**value);
        let Some(schema) = said(SCHEMA.0) else {
            return Err(damaged("it was not written by gputrace reduce".into()));
        };
        let host = (0..table.n_rows).find_map(|row| table.text(row, "host")).unwrap_or("an unknown host");
        let named = (0..table.n_rows).find_map(|row| table.text(row, "trace")).unwrap_or("its trace");
        let trace = format!("{host}:{named}");
        if schema != SCHEMA.1 {
            let version = said(VERSION).map_or_else(String::new, |version| format!(" (gputrace {version})"));
            return Err(Error::OtherVersion {
                path: path.to_owned(),
                found: format!("{schema}{version}"),
                trace,
            });
        }
        Ok(Summary { path: path.to_owned(), trace, table, file })
    }

    /// The texts of its states, one a line: their names, numbers and JSON. For fuzzing, with [`Summary::of_states`].
    #[must_use]
    pub fn states(&self) -> String {
        let table = Table::read(&self.file, &COLUMNS, Groups::All).unwrap_or_default();
        let rows = (0..table.n_rows).filter_map(|row| {
            let kind = table.text(row, "kind").filter(|kind| ["state", "answer"].contains(kind))?;
            let (name, number) = (table.text(row, "name")?, table.number(row, "number").unwrap_or(0));
            Some(format!("{kind}\t{name}\t{number}\t{}\n", table.text(row, "text")?))
        });
        rows.collect()
    }

    /// A summary of such texts.
    ///
    /// # Errors
    /// The file that it makes cannot be read.
    pub fn of_states(path: &Path, states: &str) -> Result<Summary, Error> {
        let whose = Whose { rank: None, host: String::new(), pid: 0, trace: String::new(), gpus: vec![] };
        let mut rows = Rows::of(whose);
        for line in states.lines() {
            let mut cells = line.splitn(4, '\t');
            let mut cell = || cells.next().unwrap_or_default();
            let (kind, name, number, text) = (cell(), cell(), cell().parse().ok(), cell());
            rows.add(kind, &Row { name, number, text, ..Row::default() });
        }
        let file = rows.file().map_err(|cause| Error::Open { path: path.to_owned(), cause })?;
        Summary::of(path, file)
    }

    /// Where its trace was: host and path.
    #[must_use]
    pub fn trace(&self) -> &str {
        &self.trace
    }

    /// The error that something is only in the trace.
    #[must_use]
    pub fn lacks(&self, what: &str) -> Error {
        Error::NeedsTrace { path: self.path.clone(), what: what.to_owned(), trace: self.trace.clone() }
    }

    /// The process, for [`gputrace_ranks`].
    ///
    /// # Errors
    /// That part is damaged.
    pub fn participant(&self) -> Result<Participant, Error> {
        let mut participant: Participant = self.state("participant", 0)?;
        participant.check().map_err(|what| self.damaged(what.to_owned()))?;
        participant.summary = Some(self.path.display().to_string());
        Ok(participant)
    }

    /// The answer about a process beside others.
    ///
    /// # Errors
    /// That part is damaged.
    pub fn head(&self) -> Result<Head, Error> {
        self.state("head", 0)
    }

    /// All that may be a leak.
    ///
    /// # Errors
    /// That part is damaged.
    pub fn leaks(&self) -> Result<Found, Error> {
        self.state("leaks", 0)
    }

    /// Memory held at the peaks of the devices, for a comparison.
    ///
    /// # Errors
    /// That part is damaged, or could not be followed.
    pub fn at_peak(&self) -> Result<Side, Error> {
        let index: Index = self.state("index", 0)?;
        match index.left_out.iter().find(|it| it.contains("at its peak")) {
            Some(left_out) => Err(self.lacks(left_out)),
            None => self.state("peak", 0),
        }
    }

    /// The same at the end.
    ///
    /// # Errors
    /// That part is damaged.
    pub fn at_end(&self) -> Result<Side, Error> {
        self.state("end", 0)
    }

    /// What a verb says of the trace.
    ///
    /// # Errors
    /// It is not in the summary, or damaged.
    pub fn answer(&self, verb: &str) -> Result<Part, Error> {
        let part: Part = self.json(self.answered(verb)?)?;
        part.checked().map_err(|what| self.damaged(what))
    }

    /// The output of `gputrace summary --json` for the process.
    ///
    /// # Errors
    /// It is not in the summary, or damaged.
    pub fn figures(&self) -> Result<ProcessSummary, Error> {
        self.json(self.answered(FIGURES_JSON)?)
    }

    /// The output of `gputrace budget` for the trace.
    ///
    /// # Errors
    /// It is not in the summary, or damaged.
    pub fn budget(&self) -> Result<Reply<Json>, Error> {
        Ok(Reply { part: self.answer("budget")?, answer: self.json(self.answered(BUDGET_JSON)?)? })
    }

    /// Its row.
    fn answered(&self, verb: &str) -> Result<usize, Error> {
        let found = (0..self.table.n_rows).find(|row| {
            self.table.text(*row, "kind") == Some("answer") && self.table.text(*row, "name") == Some(verb)
        });
        if let Some(row) = found {
            return Ok(row);
        }
        let index: Index = self.state("index", 0)?;
        let verb = verb.split(' ').next().unwrap_or_default();
        let why = index.left_out.iter().find(|it| it.starts_with(&format!("{verb}:")));
        Err(self.lacks(why.map_or(verb, String::as_str)))
    }

    /// What a device held at most between two collectives, and when; nothing where the summary has no such state.
    ///
    /// # Errors
    /// That part is damaged.
    pub fn most_between(&self, device: i16, membership: usize, n_before: u64) -> Result<Option<Then>, Error> {
        let index: Index = self.state("index", 0)?;
        let is_in =
            |(of, spans): &(i16, Vec<(usize, u64)>)| *of == device && spans.contains(&(membership, n_before));
        let Some(number) = index.pieces.iter().position(is_in) else { return Ok(None) };
        let piece: Piece = self.piece(number)?;
        let mut held: BTreeMap<u32, i64> = BTreeMap::new();
        for KeptState(of, n, time, changes) in piece.states {
            for (place, bytes) in changes {
                let sum = held.entry(place).or_default();
                *sum = sum.saturating_add(bytes);
            }
            if (of, n) != (membership, n_before) {
                continue;
            }
            let mut named: BTreeMap<Holding, Bytes> = BTreeMap::new();
            for (place, bytes) in held.into_iter().filter(|(_, bytes)| *bytes > 0) {
                let place = index.places.get(place as usize);
                let place = place.ok_or_else(|| self.damaged("a place in it has no name".into()))?;
                let sum = named.entry(place.clone()).or_default();
                sum.0 = sum.0.saturating_add(bytes.unsigned_abs());
            }
            return Ok(Some((Nanos(time), named)));
        }
        Ok(None)
    }

    /// One of those that lie behind all else.
    fn piece(&self, number: usize) -> Result<Piece, Error> {
        let read = |groups| Table::read(&self.file, &["kind", "name", "number", "text"], groups);
        let group = read(Groups::Only(1 + number / BEHIND)).map_err(|what| self.damaged(what))?;
        match row_of(&group, "between", number as u64) {
            Some(row) => self.json_of(&group, row),
            // As the first files had it.
            None => self.state("between", number as u64),
        }
    }

    fn state<T: DeserializeOwned>(&self, name: &str, number: u64) -> Result<T, Error> {
        let row = row_of(&self.table, name, number);
        self.json(row.ok_or_else(|| self.damaged(format!("it has no `{name}`")))?)
    }

    fn json<T: DeserializeOwned>(&self, row: usize) -> Result<T, Error> {
        self.json_of(&self.table, row)
    }

    fn json_of<T: DeserializeOwned>(&self, table: &Table, row: usize) -> Result<T, Error> {
        let text = table.text(row, "text").unwrap_or_default();
        serde_json::from_str(text).map_err(|error| {
            let name = table.text(row, "name").unwrap_or_default();
            self.damaged(format!("its `{name}`: {error}"))
        })
    }

    fn damaged(&self, what: String) -> Error {
        Error::Damaged { path: self.path.clone(), what }
    }
}

/// The row of a state.
fn row_of(table: &Table, name: &str, number: u64) -> Option<usize> {
    (0..table.n_rows).find(|row| {
        table.text(*row, "kind") == Some("state")
            && table.text(*row, "name") == Some(name)
            && table.number(*row, "number") == i64::try_from(number).ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each is found, wherever the group of rows begins that it lies in; in a file of one group, too.
    #[test]
    fn what_lies_behind_the_rest_is_found_by_its_number() {
        for is_behind in [true, false] {
            let whose = Whose { rank: None, host: String::new(), pid: 0, trace: String::new(), gpus: vec![] };
            let mut rows = Rows::of(whose);
            rows.add("process", &Row::default());
            let numbers = 0..2 * BEHIND + 3;
            for number in numbers.clone() {
                let piece = Piece { device: number as i16, states: vec![] };
                let text = serde_json::to_string(&piece).unwrap();
                let row = Row { name: "between", number: Some(number as u64), text: &text, ..Row::default() };
                match is_behind {
                    true => rows.add_behind("state", &row),
                    false => rows.add("state", &row),
                }
            }
            let summary = Summary::of(Path::new("x.summary.parquet"), rows.file().unwrap()).unwrap();
            assert_eq!(summary.table.n_rows, if is_behind { 1 } else { 1 + numbers.len() });
            for number in numbers.clone() {
                assert_eq!(summary.piece(number).unwrap().device, number as i16);
            }
            assert!(summary.piece(numbers.len()).is_err());
        }
    }
}
