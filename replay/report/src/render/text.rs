//! As text for a terminal or a log.

use std::collections::BTreeSet;
use std::io::{self, Write};

use gputrace_schemas::event::Bytes;
use gputrace_schemas::printable::{Screen, printable};

use crate::model::{Chart, Item, Mood, Part, Report, Section, Table, Value};
use crate::render::chart::{self, Ink};
use crate::render::site;
use gputrace_trace::words;

/// How text may look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Style {
    /// Columns that a line may have; longer cells are cut, with an ellipsis.
    pub width: Option<usize>,
    /// Colours and bold are understood.
    pub color: bool,
    /// What pictures are drawn with.
    pub letters: Letters,
}

/// The letters that a terminal shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Letters {
    /// Those of Unicode.
    #[default]
    Unicode,
    /// Its locale is of another kind.
    Ascii,
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
        let title = printable(&part.title);
        style.paint_line(
            BOLD,
            &style.width.map_or(title.clone().into(), |width| site::cut_end(&title, width)),
            out,
        )?;
    }
    if let Some(verdict) = &part.verdict {
        self::titled(&verdict.section, color_of(verdict.kind), style, out)?;
    }
    for (idx, section) in part.sections.iter().enumerate() {
        if idx > 0 || !part.title.is_empty() || part.verdict.is_some() {
            writeln!(out)?;
        }
        self::section(section, style, out)?;
    }
    Ok(())
}

/// How bad a verdict is.
fn color_of(kind: &str) -> &'static str {
    match kind {
        "out_of_memory" | "killed" | "grew" => BOLD_RED,
        "nothing_wrong" => BOLD_GREEN,
        _ => BOLD_YELLOW,
    }
}

fn section(section: &Section, style: Style, out: &mut Screen) -> io::Result<()> {
    titled(section, BOLD, style, out)
}

fn titled(section: &Section, color: &str, style: Style, out: &mut Screen) -> io::Result<()> {
    for line in wrap(&section.title, style.width) {
        style.paint_line(color, line, out)?;
    }
    let labels = section.items.iter().filter_map(|item| match item {
        Item::Fact { label, .. } => Some(length(label)),
        Item::Table(_) | Item::Chart(_) | Item::Line(..) => None,
    });
    // A label that leaves no room for values has a line of its own.
    let most = style.width.map_or(usize::MAX, |width| width / 2);
    let label_width = labels.filter(|length| *length <= most).max().unwrap_or(0);
    for item in &section.items {
        match item {
            Item::Fact { label, value, remark, .. } => {
                fact_line((label, label_width), value, remark, style, out)?;
            }
            Item::Table(table) => self::table(table, style, out)?,
            Item::Chart(chart) => self::chart(chart, style, out)?,
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
    if length(label) > label_width {
        write!(out, "  {label}\n{:indent$}", "")?;
    } else {
        write!(out, "  {label:label_width$}  ")?;
    }
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

/// Sentences are read in lines of no more columns, however wide the terminal; tables use all of it.
const READABLE: usize = 120;

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
    let width = style.width.map(|width| width.min(READABLE).saturating_sub(4));
    let text = format!("{sign}{text}");
    let text = printable(&text);
    let Some(first) = wrap(&text, width).next() else { return Ok(()) };
    write!(out, "  ")?;
    style.paint_line(color, first, out)?;
    let (rest, mut below) = (text[first.len()..].trim_start(), below(&text));
    let room = |below: &str| width.map(|width| (width + 2).saturating_sub(below.chars().count()));
    let longest = rest.split(' ').map(|word| word.chars().count()).max().unwrap_or(0);
    if room(&below).is_some_and(|room| room < longest.max(LEAST_ROOM)) {
        below = "  ".into();
    }
    for line in wrap(rest, room(&below)) {
        write!(out, "  {below}")?;
        style.paint_line(color, line, out)?;
    }
    Ok(())
}

/// Words are not squeezed into fewer columns.
const LEAST_ROOM: usize = 20;

/// What a line that goes on begins with there: two blanks more than before, and in a tree the branches that go on too.
fn below(text: &str) -> String {
    let branch = text.rfind(['├', '└', '│']);
    let rest = text[branch.unwrap_or(0)..].trim_start_matches(['├', '└', '│']).trim_start();
    let lead = text[..text.len() - rest.len()].chars();
    lead.map(|c| if matches!(c, '├' | '│') { '│' } else { ' ' }).chain("  ".chars()).collect()
}

/// Charts are no wider: lines that rise slowly are hard to follow.
const WIDEST: usize = 100;
/// And so wide where nothing is known of the terminal.
const USUAL: usize = 80;

fn chart(chart: &Chart, style: Style, out: &mut Screen) -> io::Result<()> {
    let width = style.width.unwrap_or(USUAL).min(WIDEST);
    for line in chart::lines(chart, width, style.letters) {
        for (ink, text) in line {
            let color = match ink {
                Ink::Plain => "",
                Ink::Band | Ink::Words => DIM,
                Ink::Line => BOLD,
                Ink::Recorded => GREEN,
                Ink::Ceiling => RED,
            };
            style.paint(color, &text, out)?;
        }
        writeln!(out)?;
    }
    Ok(())
}

fn table(table: &Table, style: Style, out: &mut Screen) -> io::Result<()> {
    let grid = Grid::of(table, style.width);
    for line in grid.heads() {
        style.paint_line(DIM, &line, out)?;
    }
    for cells in &grid.cells {
        for line in grid.row(&cells.iter().map(String::as_str).collect::<Vec<_>>()) {
            writeln!(out, "{line}")?;
        }
    }
    let hidden = grid.hidden();
    if !hidden.is_empty() {
        let text = format!("(no room for: {})", hidden.join(", "));
        for line in wrap(&text, style.width.map(|width| width.saturating_sub(2))) {
            style.paint_line(DIM, &format!("  {line}"), out)?;
        }
    }
    if let Some(left_out) = &table.left_out {
        style.paint_line(DIM, &format!("  … {left_out}"), out)?;
    }
    Ok(())
}

/// A table's cells, and how wide each column is shown.
struct Grid<'a> {
    table: &'a Table,
    cells: Vec<Vec<String>>,
    /// Columns that have words.
    is_text: Vec<bool>,
    /// None for what is not shown, for want of room.
    widths: Vec<Option<usize>>,
    /// Titles are in two lines.
    is_split: bool,
    /// The last column has a line of its own below each row.
    is_below: bool,
    width: usize,
}

impl<'a> Grid<'a> {
    /// What does not fit is taken from titles, which then have two lines, and from columns of words, down to what names them (a
    /// call site's file and line), never from numbers. Then the last column of words goes to a line of its own, and at last the
    /// columns furthest right are left out.
    fn of(table: &'a Table, width: Option<usize>) -> Grid<'a> {
        let cells: Vec<Vec<String>> = table.rows.iter().map(|row| row.iter().map(show).collect()).collect();
        let has_text = |idx: usize| table.rows.iter().any(|row| matches!(row[idx], Value::Text(_)));
        let is_text = (0..table.columns.len()).map(has_text).collect();
        let width = width.unwrap_or(usize::MAX);
        let mut grid =
            Grid { table, cells, is_text, widths: vec![], is_split: false, is_below: false, width };
        grid.widths = grid.natural();
        if grid.over() == 0 {
            return grid;
        }
        grid.is_split = table.columns.iter().any(|column| column.title.contains(' '));
        grid.widths = grid.natural();
        if grid.over() == 0 {
            return grid;
        }
        let last = grid.widths.len() - 1;
        let least: Vec<usize> = (0..=last).map(|idx| grid.least(idx)).collect();
        let room = width.saturating_sub(grid.total(&least) - least[last]);
        let wanted = grid.widths[last].unwrap_or(0);
        let is_too_narrow = room < wanted.min(ROOM_FOR_WORDS).max(least[last]) || grid.is_blurred(last, room);
        grid.is_below = grid.is_text[last] && last > 0 && wanted > LITTLE_ROOM && is_too_narrow;
        grid.narrow(&least);
        while grid.over() > 0 {
            let shown = (FIRST..=last).rev().find(|idx| {
                grid.widths[*idx].is_some() && !(*idx == last && (grid.is_below || grid.is_text[last]))
            });
            let Some(idx) = shown else { break };
            grid.widths[idx] = None;
        }
        let least: Vec<usize> = least.iter().map(|least| (*least).min(FEW_WORDS)).collect();
        grid.narrow(&least);
        grid
    }

    /// How wide each column is where there is room.
    fn natural(&self) -> Vec<Option<usize>> {
        let columns = self.table.columns.iter().enumerate();
        let widths = columns.map(|(idx, column)| {
            let (top, bottom) = self.title(idx, column.title);
            Some(self.widest(idx).max(length(top)).max(length(bottom)))
        });
        widths.collect()
    }

    fn widest(&self, idx: usize) -> usize {
        self.cells.iter().map(|row| length(&row[idx])).max().unwrap_or(0)
    }

    /// A title's two lines; the first is empty where one is enough.
    fn title(&self, idx: usize, title: &'a str) -> (&'a str, &'a str) {
        let halves = title.match_indices(' ').map(|(at, _)| (&title[..at], &title[at + 1..]));
        let best = halves.min_by_key(|(top, bottom)| length(top).max(length(bottom)));
        best.filter(|_| self.is_split && length(title) > self.widest(idx)).unwrap_or(("", title))
    }

    /// The lines of the titles.
    fn heads(&self) -> Vec<String> {
        let columns = self.table.columns.iter().enumerate();
        let titles = columns.map(|(idx, column)| self.title(idx, column.title));
        let (top, bottom): (Vec<&str>, Vec<&str>) = titles.unzip();
        let mut lines = self.row(&bottom);
        let top = self.row(&top).swap_remove(0);
        if !top.is_empty() {
            lines.insert(0, top);
        }
        lines
    }

    /// Whether cells of a column that differ would look alike in so much room.
    fn is_blurred(&self, idx: usize, room: usize) -> bool {
        let different = |cells: BTreeSet<String>| cells.len();
        let cells = || self.cells.iter().map(|row| &row[idx]);
        let as_shown =
            cells().map(|cell| if site::is_one(cell) { site::fitted(cell, room) } else { cell.clone() });
        different(as_shown.collect()) < different(cells().cloned().collect())
    }

    /// Narrows columns of words, the widest first, a little at a time, so that the next widest gives its part.
    fn narrow(&mut self, least: &[usize]) {
        while self.over() > 0 {
            let columns = 0..least.len() - usize::from(self.is_below);
            let widest = columns
                .filter(|idx| self.widths[*idx].is_some_and(|width| width > least[*idx]))
                .max_by_key(|idx| self.widths[*idx]);
            let Some(idx) = widest else { return };
            let step = self.over().min(4);
            self.widths[idx] = self.widths[idx].map(|width| width.saturating_sub(step).max(least[idx]));
        }
    }

    /// The least that a column is narrowed to.
    fn least(&self, idx: usize) -> usize {
        let natural = self.widths[idx].unwrap_or(0);
        if !self.is_text[idx] {
            return natural;
        }
        let shortest = self.cells.iter().map(|row| length(site::shortest(&row[idx])).min(MOST_TEXT)).max();
        shortest.unwrap_or(0).max(MIN_TEXT).min(natural)
    }

    fn total(&self, widths: &[usize]) -> usize {
        widths.iter().map(|width| width + 2).sum()
    }

    /// Characters too many.
    fn over(&self) -> usize {
        let in_line = self.widths.len() - usize::from(self.is_below);
        let widths: Vec<usize> = self.widths[..in_line].iter().flatten().copied().collect();
        self.total(&widths).saturating_sub(self.width)
    }

    /// The lines of a row.
    fn row(&self, cells: &[&str]) -> Vec<String> {
        let in_line = cells.len() - usize::from(self.is_below);
        let mut text = String::new();
        let mut more = vec![];
        for (idx, cell) in cells[..in_line].iter().enumerate() {
            let Some(width) = self.widths[idx] else { continue };
            // Sentences in the last column go on below themselves.
            if idx + 1 == cells.len() && length(cell) > width && self.is_text[idx] && !site::is_one(cell) {
                let indent = length(&text) + 2;
                let mut lines = wrap(cell, Some(width));
                text += "  ";
                text += lines.next().unwrap_or_default();
                more.extend(lines.map(|line| format!("{:indent$}{line}", "")));
                continue;
            }
            let cell = site::fitted(cell, width);
            let space = " ".repeat(width.saturating_sub(length(&cell)));
            text += "  ";
            text += &if self.is_text[idx] { cell + &space } else { space + &cell };
        }
        let mut lines = vec![text.trim_end().to_owned()];
        lines.append(&mut more);
        if let Some(cell) = cells[in_line..].first().filter(|cell| !cell.is_empty()) {
            let room = self.width.saturating_sub(6);
            match site::is_one(cell) {
                true => lines.push(format!("      {}", site::fitted(cell, room))),
                false => lines.extend(wrap(cell, Some(room)).map(|line| format!("      {line}"))),
            }
        }
        lines
    }

    fn hidden(&self) -> Vec<&str> {
        let columns = self.table.columns.iter().zip(&self.widths);
        columns.filter(|(_, width)| width.is_none()).map(|(column, _)| column.title).collect()
    }
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

/// No column of words is made narrower.
const MIN_TEXT: usize = 6;
/// A column of words is made narrower than this, even where that cuts what names it.
const MOST_TEXT: usize = 40;
/// Where nothing else helps, columns of words are narrowed to this.
const FEW_WORDS: usize = 16;
/// The last column has its own line, rather than less than this of its words.
const ROOM_FOR_WORDS: usize = 28;
/// A last column that needs no more than this has no line of its own.
const LITTLE_ROOM: usize = 20;
/// So many columns from the left are never left out.
const FIRST: usize = 2;

const BOLD: &str = "1";
const DIM: &str = "2";
const RED: &str = "31";
const GREEN: &str = "32";
const YELLOW: &str = "33";
const BOLD_RED: &str = "1;31";
const BOLD_GREEN: &str = "1;32";
const BOLD_YELLOW: &str = "1;33";

impl Style {
    /// Writes text in a colour, and ends the line.
    fn paint_line(self, code: &str, text: &str, out: &mut Screen) -> io::Result<()> {
        self.paint(code, text, out)?;
        writeln!(out)
    }

    /// Writes text in a colour.
    fn paint(self, code: &str, text: &str, out: &mut Screen) -> io::Result<()> {
        let text = printable(text);
        if !self.color || code.is_empty() || text.is_empty() {
            return write!(out, "{text}");
        }
        write!(out.behind(), "\x1b[{code}m")?;
        write!(out, "{text}")?;
        write!(out.behind(), "\x1b[0m")
    }
}

fn length(text: &str) -> usize {
    text.chars().count()
}

/// Breaks a line between words, but not between a number and its unit. A word that is longer than a line, such as a path, stays
/// whole.
fn wrap(text: &str, width: Option<usize>) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let fits = width.map_or(rest.len(), |width| {
            rest.char_indices().nth(width.max(LEAST_ROOM)).map_or(rest.len(), |(at, _)| at)
        });
        let end = if fits == rest.len() { fits } else { last_break(rest, fits) };
        let (line, after) = rest.split_at(end);
        rest = after.trim_start();
        Some(line)
    })
}

/// The last place up to `fits` where a line may end, or the first after it.
fn last_break(text: &str, fits: usize) -> usize {
    let may_end = |at: &usize| {
        let unit = text[at + 1..].split(|c: char| !c.is_alphabetic() && c != '%').next().unwrap_or_default();
        let is_after_number = text[..*at].ends_with(|c: char| c.is_ascii_digit());
        *at > 0 && !(is_after_number && UNITS.contains(&unit))
    };
    // What ends at the edge ends there.
    let spaces = || text.match_indices(' ').map(|(at, _)| at);
    let before = spaces().take_while(|at| *at <= fits).filter(may_end).last();
    before.or_else(|| spaces().find(|at| *at > fits)).unwrap_or(text.len())
}

const UNITS: [&str; 12] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "%", "ns", "µs", "ms", "s"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_break_between_words_and_no_word_is_cut() {
        let lines: Vec<_> = wrap("one two three four five six seven", Some(20)).collect();
        assert_eq!(lines, ["one two three four", "five six seven"]);
        let lines: Vec<_> = wrap("the attempt still held 192.00 MiB of it", Some(29)).collect();
        assert_eq!(lines, ["the attempt still held", "192.00 MiB of it"]);
        let lines: Vec<_> = wrap("at /a/long/path/to/a/file.py:12 it ran out", Some(20)).collect();
        assert_eq!(lines, ["at", "/a/long/path/to/a/file.py:12", "it ran out"]);
    }

    #[test]
    fn a_terminal_does_not_obey_a_trace() {
        assert_eq!(show(&Value::text("a\x1b[2Jb\nc")), "a\\u{1b}[2Jb\\u{a}c");
    }
}
