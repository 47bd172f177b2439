//! JSON lines, one per change of memory. For jq and scripts; [`super::csv`] has the same rows.

use std::io::{self, Write};

use super::parts::changes::{COLUMNS, Kind, Value, rows};
use super::{Export, Request, Takes};

pub(super) const ENTRY: Export = Export {
    name: "jsonl",
    summary: "every change of memory, one JSON object per line, for jq",
    takes: Takes { several: true, ..Takes::ONE },
    is_binary: false,
    export,
};

fn export(request: &Request, out: &mut dyn Write) -> io::Result<()> {
    let mut line = Vec::new();
    rows(request, |row| {
        line.clear();
        for ((name, kind), value) in COLUMNS.iter().zip(row.values()) {
            // What is not known is left out. The time is always known.
            let comma = if line.is_empty() { '{' } else { ',' };
            match value {
                Value::None => continue,
                Value::Number(number) if *kind == Kind::Address => {
                    write!(line, "{comma}\"{name}\":\"{number:#x}\"")?;
                }
                Value::Number(number) => write!(line, "{comma}\"{name}\":{number}")?,
                Value::Text(text) => {
                    write!(line, "{comma}\"{name}\":")?;
                    serde_json::to_writer(&mut line, text)?;
                }
            }
        }
        line.extend_from_slice(b"}\n");
        out.write_all(&line)
    })
}
