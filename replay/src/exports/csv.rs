//! Comma-separated values (RFC 4180), a row a change of memory. For spreadsheets, pandas, DuckDB.

use std::io::{self, Write};

use super::jsonl::{FIELDS, Row, rows};
use super::{Export, Request};

pub(super) struct Csv;

impl Export for Csv {
    fn name(&self) -> &'static str {
        "csv"
    }

    fn extension(&self) -> &'static str {
        "csv"
    }

    fn summary(&self) -> &'static str {
        "every change of memory, a row each, for spreadsheets, pandas and DuckDB"
    }

    fn export(&self, request: &Request, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{}", FIELDS.join(","))?;
        rows(request, |row: &Row| {
            for (idx, value) in row.values().iter().enumerate() {
                let comma = if idx > 0 { "," } else { "" };
                match value {
                    serde_json::Value::Null => write!(out, "{comma}")?,
                    serde_json::Value::String(text) => write!(out, "{comma}{}", quoted(text))?,
                    other => write!(out, "{comma}{other}")?,
                }
            }
            writeln!(out)
        })
    }
}

fn quoted(text: &str) -> String {
    let needs = text.contains([',', '"', '\n', '\r']);
    if needs { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.to_owned() }
}
