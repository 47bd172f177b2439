//! As JSON: `{"schema": "gputrace.VERB/1", "processes": [...]}`, bytes and nanoseconds as integers.

use serde_json::{Map, Value as Json, json};

use crate::model::{Item, Mood, Part, Report, Section, Value};

/// The report as JSON.
#[must_use]
pub fn render(report: &Report) -> Json {
    json!({
        "schema": format!("gputrace.{}/1", report.verb),
        "processes": report.parts.iter().map(part).collect::<Vec<_>>(),
    })
}

fn part(part: &Part) -> Json {
    let mut json = Map::new();
    if let Some(trace) = &part.trace {
        json.insert("trace".into(), trace.as_str().into());
        json.insert("pid".into(), part.pid.into());
        json.insert("rank".into(), part.rank.into());
        json.insert("command".into(), part.command.clone().into());
    }
    if let Some(verdict) = &part.verdict {
        let mut section = section(&verdict.section);
        let title = &verdict.section.title;
        section["title"] = title.strip_prefix("Verdict: ").unwrap_or(title).into();
        section["kind"] = verdict.kind.into();
        section["cause"] = Some(verdict.cause.as_str()).filter(|cause| !cause.is_empty()).into();
        section["also"] = verdict.also.clone().into();
        json.insert("verdict".into(), section);
    }
    let sections = part.sections.iter().map(section).collect::<Vec<_>>();
    json.insert("sections".into(), sections.into());
    Json::Object(json)
}

/// Facts and tables by their names; lines by their mood.
fn section(section: &Section) -> Json {
    let mut json = Map::new();
    json.insert("name".into(), section.name.as_str().into());
    let mut lines: [(&str, Vec<Json>); 3] = [("notes", vec![]), ("warnings", vec![]), ("commands", vec![])];
    for item in &section.items {
        match item {
            Item::Fact { name, value: fact, remark, .. } => {
                json.insert((*name).into(), value(fact));
                if !remark.is_empty() {
                    json.insert(format!("{name}_remark"), remark.as_str().into());
                }
            }
            Item::Table(table) => {
                let row = |row: &Vec<Value>| {
                    let cells = table.columns.iter().zip(row);
                    Json::Object(cells.map(|(column, cell)| (column.name.to_owned(), value(cell))).collect())
                };
                let rows = json.entry(table.name).or_insert_with(|| Json::Array(vec![]));
                // A section with a table for each device: their rows are one list.
                if let Json::Array(rows) = rows {
                    rows.extend(table.rows.iter().map(row));
                }
                if let Some(left_out) = &table.left_out {
                    json.insert(format!("{}_left_out", table.name), left_out.as_str().into());
                }
            }
            // A table has its values.
            Item::Chart(_) => {}
            Item::Line(Mood::Note | Mood::Good, text) => lines[0].1.push(text.as_str().into()),
            Item::Line(Mood::Warning | Mood::Bad, text) => lines[1].1.push(text.as_str().into()),
            Item::Line(Mood::Command, text) => lines[2].1.push(text.as_str().into()),
        }
    }
    for (name, lines) in lines {
        if !lines.is_empty() {
            json.insert(name.into(), lines.into());
        }
    }
    Json::Object(json)
}

fn value(value: &Value) -> Json {
    match value {
        Value::Missing => Json::Null,
        Value::Bytes(bytes) => bytes.0.into(),
        Value::Difference(bytes) => (*bytes).into(),
        Value::Count(count) => (*count).into(),
        Value::Time(time) => time.0.into(),
        Value::Share(share) => (*share).into(),
        Value::Text(text) | Value::Command(text) => text.as_str().into(),
    }
}
