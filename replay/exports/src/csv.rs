//! Comma-separated values (RFC 4180), one row per change of memory. For spreadsheets, pandas, DuckDB.
//!
//! Spreadsheets read a cell that begins with a sign as a formula, quoted or not, and formulas can start programs and send data
//! away (CWE-1236). Names come from the traced program, so one that begins with a sign gets an apostrophe in front, as OWASP
//! advises: "this is text". One that begins with an apostrophe gets another, so that removing one restores every name. Numbers
//! stay numbers.

use std::io::{self, Write};

use gputrace_schemas::printable::is_obeyed;

use super::parts::changes::{COLUMNS, Kind, Value, rows};
use super::{Export, Request, Takes};

pub(super) const ENTRY: Export = Export {
    name: "csv",
    summary: "every change of memory, one row each, for spreadsheets, pandas and DuckDB",
    takes: Takes { several: true, ..Takes::ONE },
    is_binary: false,
    export,
};

fn export(request: &Request, out: &mut dyn Write) -> io::Result<()> {
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

fn quoted(text: &str, line: &mut Vec<u8>) {
    let needs_apostrophe = is_formula(text) || text.starts_with('\'');
    // Semicolons and tabs separate cells where a spreadsheet is set so, or where its country writes numbers with commas.
    let parts_cells = |byte| matches!(byte, b',' | b';' | b'\t' | b'"' | b'\n' | b'\r');
    if !needs_apostrophe && !text.bytes().any(parts_cells) {
        return line.extend_from_slice(text.as_bytes());
    }
    line.push(b'"');
    if needs_apostrophe {
        line.push(b'\'');
    }
    for byte in text.bytes() {
        if byte == b'"' {
            line.push(b'"');
        }
        line.push(byte);
    }
    line.push(b'"');
}

/// Whether a spreadsheet may read it as a formula: by the first character that is not skipped on import. Full-width signs
/// count where the spreadsheet's language has them.
fn is_formula(text: &str) -> bool {
    let is_skipped = |c: char| c.is_whitespace() || c.is_control() || is_obeyed(c) || matches!(c, '"' | '\'');
    let first = text.trim_start_matches(is_skipped).chars().next();
    let is_sign = |c| {
        matches!(c, '=' | '+' | '-' | '@' | '\u{ff1d}' | '\u{ff0b}' | '\u{ff0d}' | '\u{ff20}' | '\u{2212}')
    };
    first.is_some_and(is_sign) || text.starts_with(['\t', '\r', '\n'])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(text: &str) -> String {
        let mut line = vec![];
        quoted(text, &mut line);
        String::from_utf8(line).unwrap()
    }

    #[test]
    fn ordinary_names_are_as_they_are() {
        for name in ["forward (model.py:12)", "operator-=(T&)", "a=b", "PyTorch", "<lambda> (x.py:1)", "日本"]
        {
            assert_eq!(cell(name), name);
        }
        assert_eq!(cell("f(int, \"x\")"), r#""f(int, ""x"")""#);
    }

    #[test]
    fn no_name_begins_a_formula() {
        for name in
            ["=1+1", "+1", "-1", "@SUM(A1)", "\u{ff1d}1", "\u{ff0b}1", "\u{ff0d}1", "\u{ff20}x", "\u{2212}1"]
        {
            assert_eq!(cell(name), format!("\"'{name}\""));
        }
        for name in ["\tx", "\rx", "\nx", " =1", "\u{a0}@x", "'=1", "\u{0}=1", "\u{feff}=1"] {
            assert_eq!(cell(name), format!("\"'{name}\""));
        }
        assert_eq!(cell("\"=1"), r#""'""=1""#);
    }

    #[test]
    fn taking_one_apostrophe_away_gives_every_name_back() {
        let names = ["=1", "'=1", "'x", "''", "x'", "x"];
        let read = |name: &str| {
            let cell = cell(name);
            let text = cell.trim_matches('"');
            text.strip_prefix('\'').unwrap_or(text).to_owned()
        };
        assert_eq!(names.map(read), names.map(str::to_owned));
    }
}
