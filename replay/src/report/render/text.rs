//! As text for a terminal or a log.

use std::io::{self, Write};

use gputrace_schemas::event::Bytes;
use gputrace_schemas::printable::{Screen, printable};

use crate::report::model::{Item, Mood, Part, Report, Section, Table, Value};
use crate::report::words;

/// How text may look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Style {
    /// Columns that a line may have; longer cells are cut, with an ellipsis.
    pub width: Option<usize>,
    /// Colours and bold are understood.
    pub color: bool,
}

/// Writes the report. A terminal obeys nothing of what it says but the colours of `style`.
///
/// # Errors
/// Those of `out`.
pub fn render(report: &Report, style: Style, out: &mut dyn Write) -> io::Result<()> {
    let out = &mut Screen::new(out);
    for (idx, part) in report.parts.iter().enumerate() {
        if idx > 0 {
            writeln!(out)?;
        }
        self::part(part, style, out)?;
    }
    Ok(())
}

fn part(part: &Part, style: Style, out: &mut Screen) -> io::Result<()> {
    if !part.title.is_empty() {
        style.paint_line(BOLD, &cut(&printable(&part.title), style.width), out)?;
    }
    if let Some(verdict) = &part.verdict {
        section(&verdict.section, style, out)?;
    }
    for (idx, section) in part.sections.iter().enumerate() {
        if idx > 0 || !part.title.is_empty() || part.verdict.is_some() {
            writeln!(out)?;
        }
        self::section(section, style, out)?;
    }
    Ok(())
}

fn section(section: &Section, style: Style, out: &mut Screen) -> io::Result<()> {
    style.paint_line(BOLD, &section.title, out)?;
    let labels = section.items.iter().filter_map(|item| match item {
        Item::Fact { label, .. } => Some(length(label)),
        Item::Table(_) | Item::Line(..) => None,
    });
    let label_width = labels.max().unwrap_or(0);
    for item in &section.items {
        match item {
            Item::Fact { label, value, remark, .. } => {
                fact_line((label, label_width), value, remark, style, out)?;
            }
            Item::Table(table) => self::table(table, style, out)?,
            Item::Line(mood, text) => line(*mood, text, style, out)?,
        }
    }
    Ok(())
}

/// A fact with its remark behind it, or below where there is no room. Words go on below themselves.
fn fact_line(
    (label, label_width): (&str, usize),
    value: &Value,
    remark: &str,
    style: Style,
    out: &mut Screen,
) -> io::Result<()> {
    let (shown, indent) = (show(value), label_width + 4);
    let room = style.width.map(|width| width.saturating_sub(indent));
    let room_for_value = if matches!(value, Value::Text(_)) { room } else { None };
    write!(out, "  {label:label_width$}  ")?;
    let mut last = 0;
    for (idx, line) in wrap(&shown, room_for_value).enumerate() {
        if idx > 0 {
            write!(out, "\n{:indent$}", "")?;
        }
        write!(out, "{line}")?;
        last = length(line);
    }
    if remark.is_empty() {
        return writeln!(out);
    }
    if room.is_none_or(|room| last + 2 + length(remark) <= room) {
        write!(out, "  ")?;
        return style.paint_line(DIM, remark, out);
    }
    writeln!(out)?;
    for line in wrap(&printable(remark), room) {
        write!(out, "{:indent$}", "")?;
        style.paint_line(DIM, line, out)?;
    }
    Ok(())
}

fn line(mood: Mood, text: &str, style: Style, out: &mut Screen) -> io::Result<()> {
    let (sign, color) = match mood {
        Mood::Note => ("", ""),
        Mood::Good => ("ok: ", GREEN),
        Mood::Warning => ("warning: ", YELLOW),
        Mood::Bad => ("", RED),
        // Never cut or wrapped: to be copied.
        Mood::Command => {
            write!(out, "  ")?;
            return style.paint_line(BOLD, text, out);
        }
    };
    for (idx, line) in
        wrap(&printable(&format!("{sign}{text}")), style.width.map(|width| width.saturating_sub(4)))
            .enumerate()
    {
        write!(out, "  {}", if idx > 0 { "  " } else { "" })?;
        style.paint_line(color, line, out)?;
    }
    Ok(())
}

fn table(table: &Table, style: Style, out: &mut Screen) -> io::Result<()> {
    let cells: Vec<Vec<String>> = table.rows.iter().map(|row| row.iter().map(show).collect()).collect();
    let is_text = |idx: usize| table.rows.iter().any(|row| matches!(row[idx], Value::Text(_)));
    let mut widths: Vec<usize> = (0..table.columns.len())
        .map(|idx| {
            cells
                .iter()
                .map(|row| length(&row[idx]))
                .chain([length(table.columns[idx].title)])
                .max()
                .unwrap_or(0)
        })
        .collect();
    // What does not fit is taken from the widest columns of text, never from numbers.
    let total = |widths: &[usize]| widths.iter().map(|width| width + 2).sum::<usize>();
    while let Some(over) =
        style.width.and_then(|width| total(&widths).checked_sub(width)).filter(|over| *over > 0)
    {
        let widest = (0..widths.len()).filter(|idx| is_text(*idx)).max_by_key(|idx| widths[*idx]);
        let Some(widest) = widest.filter(|idx| widths[*idx] > MIN_TEXT) else { break };
        // A little at a time, so that the next widest gives its part.
        widths[widest] -= over.min(widths[widest] - MIN_TEXT).min(8);
    }
    let row = |cells: &mut dyn Iterator<Item = &str>| {
        let mut text = String::new();
        for (idx, cell) in cells.enumerate() {
            let cell = cut(cell, Some(widths[idx]));
            let space = " ".repeat(widths[idx].saturating_sub(length(&cell)));
            text += "  ";
            text += &if is_text(idx) { cell + &space } else { space + &cell };
        }
        text.trim_end().to_owned()
    };
    style.paint_line(DIM, &row(&mut table.columns.iter().map(|column| column.title)), out)?;
    for cells in &cells {
        writeln!(out, "{}", row(&mut cells.iter().map(String::as_str)))?;
    }
    if let Some(left_out) = &table.left_out {
        style.paint_line(DIM, &format!("  … {left_out}"), out)?;
    }
    Ok(())
}

fn show(value: &Value) -> String {
    match value {
        Value::Missing => "-".into(),
        Value::Bytes(bytes) => words::bytes(*bytes),
        Value::Difference(difference) => {
            let sign = if *difference < 0 { "-" } else { "" };
            format!("{sign}{}", words::bytes(Bytes(difference.unsigned_abs())))
        }
        Value::Count(count) => words::count(*count),
        Value::Time(time) => words::time(*time),
        Value::Share(share) => format!("{:.1} %", share * 100.0),
        Value::Text(text) | Value::Command(text) => printable(text).into_owned(),
    }
}

/// No column of text is made narrower.
const MIN_TEXT: usize = 6;

const BOLD: &str = "1";
const DIM: &str = "2";
const RED: &str = "31";
const GREEN: &str = "32";
const YELLOW: &str = "33";

impl Style {
    /// Writes text in a colour, and ends the line.
    fn paint_line(self, code: &str, text: &str, out: &mut Screen) -> io::Result<()> {
        let text = printable(text);
        if !self.color || code.is_empty() || text.is_empty() {
            return writeln!(out, "{text}");
        }
        write!(out.behind(), "\x1b[{code}m")?;
        write!(out, "{text}")?;
        writeln!(out.behind(), "\x1b[0m")
    }
}

fn length(text: &str) -> usize {
    text.chars().count()
}

/// Keeps the beginning; of a call site the end, with file and line, says more.
fn cut(text: &str, width: Option<usize>) -> String {
    let Some(width) = width.filter(|width| length(text) > *width) else { return text.to_owned() };
    let keep = width.saturating_sub(1);
    let head = keep / 3;
    let tail = keep - head;
    let first: String = text.chars().take(head).collect();
    let last: String = text.chars().skip(length(text) - tail).collect();
    format!("{first}…{last}")
}

/// Breaks a line between words.
fn wrap(text: &str, width: Option<usize>) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let fits = width.map_or(rest.len(), |width| {
            rest.char_indices().nth(width.max(20)).map_or(rest.len(), |(at, _)| at)
        });
        let end = if fits == rest.len() { fits } else { rest[..fits].rfind(' ').unwrap_or(fits) };
        let (line, after) = rest.split_at(end);
        rest = after.trim_start();
        Some(line)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_break_between_words_and_long_cells_are_cut_in_the_middle() {
        let lines: Vec<_> = wrap("one two three four five six seven", Some(20)).collect();
        assert_eq!(lines, ["one two three four", "five six seven"]);
        assert_eq!(cut("forward (/job/model.py:12)", Some(13)), "forw…l.py:12)");
    }

    #[test]
    fn a_terminal_does_not_obey_a_trace() {
        assert_eq!(show(&Value::text("a\x1b[2Jb\nc")), "a\\u{1b}[2Jb\\u{a}c");
    }
}
