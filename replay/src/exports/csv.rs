//! Comma-separated values (RFC 4180), a row a change of memory. For spreadsheets, pandas, DuckDB.

use std::io::{self, Write};

use super::parts::changes::{COLUMNS, Kind, Value, rows};
use super::{Export, Request, Takes};

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

    fn takes(&self) -> Takes {
        Takes { several: true, ..Takes::default() }
    }

    fn export(&self, request: &Request, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{}", COLUMNS.map(|(name, _)| name).join(","))?;
        let mut line = Vec::new();
        rows(request, |row| {
            line.clear();
            for ((_, kind), value) in COLUMNS.iter().zip(row.values()) {
                match value {
                    Value::None => {}
                    Value::Number(number) if *kind == Kind::Address => write!(line, "{number:#x}")?,
                    Value::Number(number) => write!(line, "{number}")?,
                    Value::Text(text) => quoted(text, &mut line),
                }
                line.push(b',');
            }
            line.pop();
            line.push(b'\n');
            out.write_all(&line)
        })
    }
}

fn quoted(text: &str, line: &mut Vec<u8>) {
    if !text.bytes().any(|byte| matches!(byte, b',' | b'"' | b'\n' | b'\r')) {
        return line.extend_from_slice(text.as_bytes());
    }
    line.push(b'"');
    for byte in text.bytes() {
        if byte == b'"' {
            line.push(b'"');
        }
        line.push(byte);
    }
    line.push(b'"');
}
