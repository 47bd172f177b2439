//! Sections of the report, as the page reads them: values with their units, titles for people.

use serde_json::{Value as Json, json};

use gputrace_report::model::{Chart, Item, Mood, Part, Point, Section, Value};

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

/// One section, as the page reads it.
#[must_use]
pub fn section(section: &Section) -> Json {
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
        Item::Chart(chart) => self::chart(chart),
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

/// Numbers to draw: bytes, and what they are at.
fn chart(chart: &Chart) -> Json {
    let point = |(index, it): (usize, &Point)| {
        let room = chart.ceiling.as_ref().and_then(|ceiling| ceiling.room.get(index));
        json!({
            "at": it.at, "low": it.low.0, "best": it.best.0, "high": it.high.0, "is_certain": it.is_certain,
            "room": room.map(|bytes| bytes.0),
        })
    };
    json!({
        "chart": chart.title,
        "variable": chart.variable,
        "points": chart.points.iter().enumerate().map(point).collect::<Vec<_>>(),
        "recorded": chart.recorded.iter().map(|(at, bytes)| [*at, bytes.0]).collect::<Vec<_>>(),
        "ceiling": chart.ceiling.as_ref().map(|ceiling| &ceiling.name),
    })
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
