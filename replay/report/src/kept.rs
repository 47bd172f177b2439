//! How a [`Part`](crate::model::Part) is kept in a summary, so that a renderer shows the same of a summary as of its trace: as JSON, with a
//! share to its last bit, and names that are read once.

use std::collections::BTreeSet;
use std::sync::Mutex;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serializer};

use crate::model::{Column, Item, Name};

/// Names of columns and facts that are believed: all reports of gputrace together have fewer.
const MOST_NAMES: usize = 20_000;
/// Longest of them.
const LONGEST_NAME: usize = 200;

/// A name as reports have it: one for ever, kept once however many summaries are read.
fn known(name: String) -> Result<Name, &'static str> {
    static NAMES: Mutex<BTreeSet<Name>> = Mutex::new(BTreeSet::new());
    let Ok(mut names) = NAMES.lock() else { return Err("its names cannot be kept") };
    if let Some(known) = names.get(&*name) {
        return Ok(known);
    }
    if names.len() >= MOST_NAMES || name.len() > LONGEST_NAME {
        return Err("it has names that no report uses");
    }
    let kept: Name = Box::leak(name.into_boxed_str());
    names.insert(kept);
    Ok(kept)
}

pub(crate) fn name<'de, D: Deserializer<'de>>(from: D) -> Result<Name, D::Error> {
    known(String::deserialize(from)?).map_err(D::Error::custom)
}

pub(crate) fn names<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Name>, D::Error> {
    let names = Vec::<String>::deserialize(from)?;
    names.into_iter().map(|name| known(name).map_err(D::Error::custom)).collect()
}

impl From<Column> for (Name, Name) {
    fn from(column: Column) -> (Name, Name) {
        (column.name, column.title)
    }
}

impl TryFrom<(String, String)> for Column {
    type Error = &'static str;

    fn try_from((name, title): (String, String)) -> Result<Column, &'static str> {
        Ok(Column { name: known(name)?, title: known(title)? })
    }
}

/// Nothing that is kept has a chart.
pub(crate) fn without_charts<S: Serializer>(items: &[Item], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(items.iter().filter(|item| !matches!(item, Item::Chart(_))))
}

/// A share as its bits.
pub(crate) mod bits {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(share: &f64, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(share.to_bits())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        u64::deserialize(from).map(f64::from_bits)
    }
}

#[cfg(test)]
mod tests {
    use gputrace_schemas::event::Bytes;

    use crate::model::{Mood, Part, Section, Table, Value, Verdict};

    fn again(part: &Part) -> Result<Part, String> {
        let part: Part = serde_json::from_str(&serde_json::to_string(part).unwrap()).unwrap();
        part.checked()
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
    fn a_part_is_kept_in_these_words() {
        let mut table = Table::new("rows", &[("share", "share of it")]);
        table.rows.push(vec![Value::Share(0.5)]);
        table.rows.push(vec![Value::Difference(-1)]);
        let section = Section::new("one", "One").table(table).line(Mood::Bad, "bad");
        let part = Part { title: "t".into(), sections: vec![section], ..Part::default() };
        let kept = concat!(
            r#"{"title":"t","trace":null,"pid":null,"rank":null,"command":[],"verdict":null,"sections":["#,
            r#"{"name":"one","title":"One","items":[{"table":{"name":"rows","columns":[["share","share of it"]],"#,
            r#""rows":[[{"share":4602678819172646912}],[{"difference":-1}]],"left_out":null}},{"line":["bad","bad"]}]}]}"#,
        );
        assert_eq!(serde_json::to_string(&part).unwrap(), kept);
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
