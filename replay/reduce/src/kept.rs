//! What a verb said, kept as it was: a [`Part`] as JSON and back, so that a renderer shows the same of a summary as of its trace.

use std::collections::BTreeSet;
use std::sync::Mutex;

use gputrace_schemas::event::{Bytes, Nanos};
use serde::{Deserialize, Serialize};

use gputrace_report::model::{Column, Item, Mood, Part, Section, Table, Value, Verdict};

/// Names of columns and facts that are believed: all reports of gputrace together have fewer.
const MOST_NAMES: usize = 20_000;
/// Longest of them.
const LONGEST_NAME: usize = 200;

/// A [`Part`].
#[derive(Deserialize, Serialize)]
pub(super) struct KeptPart {
    title: String,
    trace: Option<String>,
    pid: Option<u32>,
    rank: Option<u32>,
    command: Vec<String>,
    verdict: Option<KeptVerdict>,
    sections: Vec<KeptSection>,
}

#[derive(Deserialize, Serialize)]
struct KeptVerdict {
    kind: String,
    #[serde(default)]
    cause: String,
    also: Vec<String>,
    section: KeptSection,
}

#[derive(Deserialize, Serialize)]
struct KeptSection {
    name: String,
    title: String,
    items: Vec<KeptItem>,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
enum KeptItem {
    Fact {
        name: String,
        label: String,
        value: KeptValue,
        remark: String,
    },
    Table {
        name: String,
        columns: Vec<(String, String)>,
        rows: Vec<Vec<KeptValue>>,
        left_out: Option<String>,
    },
    Line(KeptMood, String),
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
enum KeptMood {
    Note,
    Good,
    Warning,
    Bad,
    Command,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
enum KeptValue {
    Missing,
    Bytes(u64),
    Difference(i64),
    Count(u64),
    Time(u64),
    /// Its bits: a share is shown as it was, to the last digit.
    Share(u64),
    Text(String),
    Command(String),
}

impl KeptPart {
    pub(super) fn of(part: &Part) -> KeptPart {
        KeptPart {
            title: part.title.clone(),
            trace: part.trace.clone(),
            pid: part.pid,
            rank: part.rank,
            command: part.command.clone(),
            verdict: part.verdict.as_ref().map(|verdict| KeptVerdict {
                kind: verdict.kind.to_owned(),
                cause: verdict.cause.clone(),
                also: verdict.also.iter().map(|it| (*it).to_owned()).collect(),
                section: kept_section(&verdict.section),
            }),
            sections: part.sections.iter().map(kept_section).collect(),
        }
    }

    /// The part again.
    ///
    /// # Errors
    /// It has names that no report has.
    pub(super) fn part(self) -> Result<Part, String> {
        let verdict = match self.verdict {
            None => None,
            Some(verdict) => Some(Verdict {
                kind: name(verdict.kind)?,
                cause: verdict.cause,
                also: verdict.also.into_iter().map(name).collect::<Result<_, _>>()?,
                section: section(verdict.section)?,
            }),
        };
        Ok(Part {
            title: self.title,
            trace: self.trace,
            pid: self.pid,
            rank: self.rank,
            command: self.command,
            verdict,
            sections: self.sections.into_iter().map(section).collect::<Result<_, _>>()?,
        })
    }
}

fn kept_section(section: &Section) -> KeptSection {
    let item = |item: &Item| match item {
        Item::Fact { name, label, value, remark } => Some(KeptItem::Fact {
            name: (*name).to_owned(),
            label: (*label).to_owned(),
            value: kept_value(value),
            remark: remark.clone(),
        }),
        Item::Table(table) => Some(KeptItem::Table {
            name: table.name.to_owned(),
            columns: table.columns.iter().map(|it| (it.name.to_owned(), it.title.to_owned())).collect(),
            rows: table.rows.iter().map(|row| row.iter().map(kept_value).collect()).collect(),
            left_out: table.left_out.clone(),
        }),
        // Nothing that is kept has one.
        Item::Chart(_) => None,
        Item::Line(mood, text) => {
            let mood = match mood {
                Mood::Note => KeptMood::Note,
                Mood::Good => KeptMood::Good,
                Mood::Warning => KeptMood::Warning,
                Mood::Bad => KeptMood::Bad,
                Mood::Command => KeptMood::Command,
            };
            Some(KeptItem::Line(mood, text.clone()))
        }
    };
    KeptSection {
        name: section.name.clone(),
        title: section.title.clone(),
        items: section.items.iter().filter_map(item).collect(),
    }
}

fn kept_value(value: &Value) -> KeptValue {
    match value {
        Value::Missing => KeptValue::Missing,
        Value::Bytes(bytes) => KeptValue::Bytes(bytes.0),
        Value::Difference(bytes) => KeptValue::Difference(*bytes),
        Value::Count(count) => KeptValue::Count(*count),
        Value::Time(time) => KeptValue::Time(time.0),
        Value::Share(share) => KeptValue::Share(share.to_bits()),
        Value::Text(text) => KeptValue::Text(text.clone()),
        Value::Command(text) => KeptValue::Command(text.clone()),
    }
}

fn section(kept: KeptSection) -> Result<Section, String> {
    let item = |item| {
        Ok::<_, String>(match item {
            KeptItem::Fact { name: key, label, value: of, remark } => {
                Item::Fact { name: name(key)?, label: name(label)?, value: value(of), remark }
            }
            KeptItem::Table { name: key, columns, rows, left_out } => {
                let column = |(key, title)| Ok::<_, String>(Column { name: name(key)?, title: name(title)? });
                let columns = columns.into_iter().map(column).collect::<Result<Vec<_>, _>>()?;
                if rows.iter().any(|row| row.len() != columns.len()) {
                    return Err("a table in it has rows of a different length than its columns".into());
                }
                let rows = rows.into_iter().map(|row| row.into_iter().map(value).collect()).collect();
                Item::Table(Table { name: name(key)?, columns, rows, left_out })
            }
            KeptItem::Line(mood, text) => Item::Line(
                match mood {
                    KeptMood::Note => Mood::Note,
                    KeptMood::Good => Mood::Good,
                    KeptMood::Warning => Mood::Warning,
                    KeptMood::Bad => Mood::Bad,
                    KeptMood::Command => Mood::Command,
                },
                text,
            ),
        })
    };
    let items = kept.items.into_iter().map(item).collect::<Result<_, _>>()?;
    Ok(Section { name: kept.name, title: kept.title, items })
}

fn value(kept: KeptValue) -> Value {
    match kept {
        KeptValue::Missing => Value::Missing,
        KeptValue::Bytes(bytes) => Value::Bytes(Bytes(bytes)),
        KeptValue::Difference(bytes) => Value::Difference(bytes),
        KeptValue::Count(count) => Value::Count(count),
        KeptValue::Time(time) => Value::Time(Nanos(time)),
        KeptValue::Share(bits) => Value::Share(f64::from_bits(bits)),
        KeptValue::Text(text) => Value::Text(text),
        KeptValue::Command(text) => Value::Command(text),
    }
}

/// A name as reports have it: one for ever, kept once however many summaries are read.
fn name(name: String) -> Result<&'static str, String> {
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let Ok(mut names) = NAMES.lock() else { return Err("its names cannot be kept".into()) };
    if let Some(known) = names.get(&*name) {
        return Ok(known);
    }
    if names.len() >= MOST_NAMES || name.len() > LONGEST_NAME {
        return Err("it has names that no report uses".into());
    }
    let kept: &'static str = Box::leak(name.into_boxed_str());
    names.insert(kept);
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn again(part: &Part) -> Result<Part, String> {
        let json = serde_json::to_string(&KeptPart::of(part)).unwrap();
        serde_json::from_str::<KeptPart>(&json).unwrap().part()
    }

    #[test]
    fn a_part_comes_back_as_it_was() {
        let mut table = Table::new("rows", &[("share", "share of it"), ("text", "words")]);
        table.rows.push(vec![Value::Share(0.1 + 0.2), Value::Command("gputrace".into())]);
        table.left_out = Some("more".into());
        let section = Section::new("one", "One")
            .fact("bytes", "bytes", Value::Bytes(Bytes(7)))
            .remark("n", "n", Value::Missing, "remark")
            .table(table)
            .line(Mood::Bad, "bad");
        let verdict =
            Verdict { kind: "leak", cause: "a cause".into(), also: vec!["hang"], section: section.clone() };
        let part =
            Part { title: "t".into(), verdict: Some(verdict), sections: vec![section], ..Part::default() };
        assert_eq!(format!("{:?}", again(&part)), format!("{:?}", Ok::<_, String>(part)));
    }

    #[test]
    fn rows_that_do_not_fit_are_refused() {
        let mut table = Table::new("rows", &[("a", "a")]);
        table.rows.push(vec![Value::Missing, Value::Missing]);
        let part = Part { sections: vec![Section::new("s", "S").table(table)], ..Part::default() };
        assert!(again(&part).unwrap_err().contains("a different length"));
        let part =
            Part { sections: vec![Section::new("s", "S").table(Table::new("x", &[]))], ..Part::default() };
        assert!(again(&part).is_ok());
    }
}
