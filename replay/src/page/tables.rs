//! Sections of the report, as the page reads them: values with their units, titles for people.

use serde_json::{Value as Json, json};

use crate::report::model::{Item, Mood, Part, Section, Value};

/// What is said of one process.
pub(super) fn part(part: &Part) -> Json {
    let verdict = part.verdict.as_ref().map(
        |verdict| json!({"kind": verdict.kind, "also": verdict.also, "section": section(&verdict.section)}),
    );
    json!({
        "title": part.title,
        "trace": part.trace,
        "pid": part.pid,
        "rank": part.rank,
        "command": part.command,
        "verdict": verdict,
        "sections": part.sections.iter().map(section).collect::<Vec<_>>(),
    })
}

/// One section.
pub(super) fn section(section: &Section) -> Json {
    let items: Vec<Json> = section.items.iter().map(item).collect();
    json!({"name": section.name, "title": section.title, "items": items})
}

fn item(item: &Item) -> Json {
    match item {
        Item::Fact { name, label, value: fact, remark } => {
            json!({"fact": name, "label": label, "value": value(fact), "remark": remark})
        }
        Item::Table(table) => json!({
            "table": table.name,
            "columns": table.columns.iter().map(|column| [column.name, column.title]).collect::<Vec<_>>(),
            "rows": table.rows.iter().map(|row| row.iter().map(value).collect::<Vec<_>>()).collect::<Vec<_>>(),
            "left_out": table.left_out,
        }),
        Item::Line(mood, text) => {
            let mood = match mood {
                Mood::Note => "note",
                Mood::Good => "good",
                Mood::Warning => "warning",
                Mood::Bad => "bad",
                Mood::Command => "command",
            };
            json!({"mood": mood, "text": text})
        }
    }
}

/// A value under the letter of its unit; words as they are.
fn value(value: &Value) -> Json {
    match value {
        Value::Missing => Json::Null,
        Value::Bytes(bytes) => json!({"b": bytes.0}),
        Value::Difference(bytes) => json!({"d": bytes}),
        Value::Count(count) => json!({"n": count}),
        Value::Time(time) => json!({"t": time.0}),
        Value::Share(share) => json!({"s": share}),
        Value::Text(text) => json!(text),
        Value::Command(text) => json!({"c": text}),
    }
}
