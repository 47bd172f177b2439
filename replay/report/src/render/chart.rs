//! A chart drawn with letters, for a terminal: bytes upwards, the variable to the right.
//!
//! ```text
//! title
//!   32 GiB ┤                            ░░░░░
//!          │╌ the limit ╌╌╌╌╌╌╌╌╌╌╌╌░░░░░╭──○
//!   16 GiB ┤                ░░░░░░░╭─────╯░░░
//!          │    ●──○───────────────╯░░░░
//!        0 └──────┴────────────────────────┴
//! ```

use gputrace_schemas::event::Bytes;
use gputrace_schemas::printable::printable;

use super::text::Letters;
use crate::model::{Chart, Point};
use gputrace_trace::words;

/// What something is drawn in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ink {
    /// The axes.
    Plain,
    /// Titles and what the signs mean.
    Words,
    /// The range.
    Band,
    /// The best guess.
    Line,
    /// What was measured.
    Recorded,
    /// What the bytes must stay below.
    Ceiling,
}

/// A line of the picture: pieces of one ink each.
pub(super) type Line = Vec<(Ink, String)>;

/// Rows of the picture above the one of the axis. With this, the title, and what stands below it is twelve lines high.
const ROWS: usize = 8;
/// Numbers beside the picture: each at a row that has so many times as many rows below it.
const TICKS: usize = 4;
const ROWS_OF_A_TICK: usize = ROWS / TICKS;
/// A range that reaches further than so many times the best guess leaves the picture: the guess would be flat.
const MOST_RANGE: u64 = 3;
/// A ceiling that is further above all that is drawn is named and not drawn.
const MOST_CEILING: u64 = 2;
/// Where there are so many points, marks of them would hide the line: a mark has this many columns at least.
const LEAST_BETWEEN: usize = 3;
/// Blanks around a value below the axis, where there are few points and where there are many.
const LEAST_GAP: (usize, usize) = (1, 4);

/// The lines of a chart, each of `width` columns at most.
pub(super) fn lines(chart: &Chart, width: usize, letters: Letters) -> Vec<Line> {
    let signs = Signs::of(letters);
    let Some(mut picture) = Picture::of(chart, width, &signs) else { return vec![] };
    picture.axis();
    picture.band();
    picture.ceiling();
    picture.line();
    picture.marks();
    picture.cross();
    let is_named = picture.name();
    let cut = |text: &str| signs.cut(&printable(text), width.saturating_sub(2));
    let mut lines = vec![vec![(Ink::Words, format!("  {}", cut(&picture.title())))]];
    lines.extend((0..=ROWS).rev().map(|row| picture.row(row)));
    lines.push(vec![(Ink::Words, picture.values())]);
    lines.push(vec![(Ink::Words, format!("  {}", cut(&picture.legend(is_named))))]);
    lines
}

/// What it is drawn with.
struct Signs {
    /// Of the axes: beside a row, beside one with a number, the corner, below, and below a point.
    beside: char,
    tick: char,
    corner: char,
    below: char,
    below_point: char,
    band: char,
    ceiling: [char; 2],
    /// Of the line: flat; upwards it ends in `rises.0` and goes on from `rises.1`, and downwards; and between them.
    flat: char,
    rises: (char, char),
    falls: (char, char),
    between: char,
    predicted: char,
    recorded: char,
    crossing: char,
    ellipsis: &'static str,
}

impl Signs {
    fn of(letters: Letters) -> Signs {
        match letters {
            Letters::Unicode => Signs {
                beside: '│',
                tick: '┤',
                corner: '└',
                below: '─',
                below_point: '┴',
                band: '░',
                ceiling: ['╌', '╌'],
                flat: '─',
                rises: ('╯', '╭'),
                falls: ('╮', '╰'),
                between: '│',
                predicted: '○',
                recorded: '●',
                crossing: '×',
                ellipsis: "…",
            },
            Letters::Ascii => Signs {
                beside: '|',
                tick: '+',
                corner: '+',
                below: '-',
                below_point: '+',
                band: ':',
                ceiling: ['-', ' '],
                flat: '*',
                rises: ('*', '*'),
                falls: ('*', '*'),
                between: '*',
                predicted: 'o',
                recorded: '#',
                crossing: 'x',
                ellipsis: "...",
            },
        }
    }

    /// Keeps the beginning.
    fn cut(&self, text: &str, width: usize) -> String {
        if length(text) <= width {
            return text.to_owned();
        }
        let kept = width.saturating_sub(length(self.ellipsis));
        text.chars().take(kept).chain(self.ellipsis.chars()).collect()
    }
}

/// The picture while it is drawn: what is drawn later covers what was there.
struct Picture<'a> {
    chart: &'a Chart,
    signs: &'a Signs,
    /// From the axis upwards.
    cells: Vec<Vec<(Ink, char)>>,
    /// Columns before the picture: a number, a blank, and the axis.
    left: usize,
    /// The first and last value of the variable.
    from: u64,
    to: u64,
    /// Bytes from one number to the next.
    tick: u64,
    shows_ceiling: bool,
}

impl<'a> Picture<'a> {
    /// An empty one; none where nothing varies.
    fn of(chart: &'a Chart, width: usize, signs: &'a Signs) -> Option<Picture<'a>> {
        let at = || chart.points.iter().map(|it| it.at).chain(chart.recorded.iter().map(|(at, _)| *at));
        let (from, to) = (at().min()?, at().max()?);
        let recorded = chart.recorded.iter().map(|(_, bytes)| bytes.0);
        let best = chart.points.iter().map(|it| it.best.0).chain(recorded).max()?;
        let high = chart.points.iter().map(|it| it.high.0).max()?;
        let drawn = best.max(high.min(best.saturating_mul(MOST_RANGE)));
        let ceiling = chart.ceiling.iter().flat_map(|it| &it.room).map(|bytes| bytes.0).max();
        let ceiling = ceiling.filter(|room| *room <= drawn.saturating_mul(MOST_CEILING));
        let tick = tick(drawn.max(ceiling.unwrap_or(0)).div_ceil(TICKS as u64));
        let numbers =
            (0..=TICKS).map(|index| length(&words::short(Bytes(tick.saturating_mul(index as u64)))));
        let left = 2 + numbers.max().unwrap_or(0) + 2;
        let n_columns = width.saturating_sub(left);
        if from == to || n_columns < 2 {
            return None;
        }
        let cells = vec![vec![(Ink::Plain, ' '); n_columns]; ROWS + 1];
        Some(Picture { chart, signs, cells, left, from, to, tick, shows_ceiling: ceiling.is_some() })
    }

    fn n_columns(&self) -> usize {
        self.cells[0].len()
    }

    fn column(&self, at: u64) -> usize {
        let share = (at - self.from) as f64 / (self.to - self.from) as f64;
        (share * (self.n_columns() - 1) as f64).round() as usize
    }

    /// The row of an amount, which may be above the picture.
    fn height(&self, bytes: f64) -> usize {
        (bytes / self.tick as f64 * ROWS_OF_A_TICK as f64).round() as usize
    }

    fn put(&mut self, column: usize, row: usize, ink: Ink, sign: char) {
        if let Some(cell) = self.cells.get_mut(row).and_then(|row| row.get_mut(column)) {
            *cell = (ink, sign);
        }
    }

    /// What some figure of the points is at each column from the first point's to the last's, on straight lines between them.
    fn between(&self, figure: impl Fn(usize, &Point) -> u64) -> Vec<(usize, f64)> {
        let points = self.chart.points.iter().enumerate();
        let known = points.map(|(index, it)| (self.column(it.at), figure(index, it) as f64));
        let known: Vec<(usize, f64)> = known.collect();
        let mut values: Vec<(usize, f64)> = known.first().copied().into_iter().collect();
        for pair in known.windows(2) {
            let ((from, low), (to, high)) = (pair[0], pair[1]);
            let on_line = |column| (column, low + (high - low) * (column - from) as f64 / (to - from) as f64);
            values.extend((from + 1..=to).map(on_line));
        }
        values
    }

    fn axis(&mut self) {
        for column in 0..self.n_columns() {
            self.put(column, 0, Ink::Plain, self.signs.below);
        }
        for column in self.marked() {
            self.put(column, 0, Ink::Plain, self.signs.below_point);
        }
    }

    fn band(&mut self) {
        let low = self.between(|_, it| if it.is_certain { it.best.0 } else { it.low.0 });
        let high = self.between(|_, it| if it.is_certain { it.best.0 } else { it.high.0 });
        for ((column, low), (_, high)) in low.into_iter().zip(high) {
            let (from, to) = (self.height(low), self.height(high).min(ROWS));
            for row in (from..=to).filter(|_| from < to) {
                self.put(column, row, Ink::Band, self.signs.band);
            }
        }
    }

    /// From the axis to the last point.
    fn ceiling(&mut self) {
        let Some(ceiling) = self.chart.ceiling.as_ref().filter(|_| self.shows_ceiling) else { return };
        let rooms = self.between(|index, _| ceiling.room.get(index).map_or(0, |bytes| bytes.0));
        let Some((first, room)) = rooms.first().copied() else { return };
        let rooms = (0..first).map(|column| (column, room)).chain(rooms).collect::<Vec<_>>();
        for (column, room) in rooms {
            let sign = self.signs.ceiling[column % 2];
            if sign != ' ' {
                self.put(column, self.height(room), Ink::Ceiling, sign);
            }
        }
    }

    fn line(&mut self) {
        let best = self.between(|_, it| it.best.0);
        let Some((_, first)) = best.first().copied() else { return };
        let mut before = self.height(first);
        for (column, bytes) in best {
            let row = self.height(bytes);
            let (ends, begins) = if row > before { self.signs.rises } else { self.signs.falls };
            if row == before {
                self.put(column, row, Ink::Line, self.signs.flat);
            } else {
                for between in before.min(row)..=before.max(row) {
                    self.put(column, between, Ink::Line, self.signs.between);
                }
                self.put(column, before, Ink::Line, ends);
                self.put(column, row, Ink::Line, begins);
            }
            before = row;
        }
    }

    /// Columns of points, if their marks leave the line between them.
    fn marked(&self) -> Vec<usize> {
        let columns: Vec<usize> = self.chart.points.iter().map(|it| self.column(it.at)).collect();
        let is_dense = columns.len() * LEAST_BETWEEN > self.n_columns();
        if is_dense { vec![] } else { columns }
    }

    fn marks(&mut self) {
        if !self.marked().is_empty() {
            for point in &self.chart.points {
                let (column, row) = (self.column(point.at), self.height(point.best.0 as f64));
                self.put(column, row, Ink::Line, self.signs.predicted);
            }
        }
        for (at, bytes) in &self.chart.recorded {
            let (column, row) = (self.column(*at), self.height(bytes.0 as f64));
            self.put(column, row, Ink::Recorded, self.signs.recorded);
        }
    }

    /// The first two points between which the line comes from below the ceiling to above it.
    fn crossing(&self) -> Option<[(Point, u64); 2]> {
        let ceiling = self.chart.ceiling.as_ref()?;
        let rooms = ceiling.room.iter().map(|bytes| bytes.0);
        let all: Vec<(Point, u64)> = self.chart.points.iter().copied().zip(rooms).collect();
        let is_above = |(point, room): &(Point, u64)| point.best.0 > *room;
        all.windows(2).map(|pair| [pair[0], pair[1]]).find(|[one, other]| !is_above(one) && is_above(other))
    }

    /// Where the line crosses the ceiling, if both are straight between the points.
    fn cross(&mut self) {
        let Some([(one, room_of_one), (other, room_of_other)]) = self.crossing() else { return };
        let below = room_of_one.saturating_sub(one.best.0) as f64;
        let above = other.best.0.saturating_sub(room_of_other) as f64;
        let share = below / (below + above);
        let (from, to) = (self.column(one.at), self.column(other.at));
        let column = from + ((to - from) as f64 * share).round() as usize;
        let bytes = room_of_one as f64 + (room_of_other as f64 - room_of_one as f64) * share;
        self.put(column, self.height(bytes), Ink::Ceiling, self.signs.crossing);
    }

    /// Writes the ceiling's name into its line, or where that has no room for it the short one. Whether it is all there.
    fn name(&mut self) -> bool {
        let Some(ceiling) = self.chart.ceiling.as_ref().filter(|_| self.shows_ceiling) else { return true };
        let is_whole = self.write_into_ceiling(&ceiling.name);
        if !is_whole {
            self.write_into_ceiling(ceiling.short);
        }
        is_whole
    }

    /// Writes words where the ceiling's line is free for so long.
    fn write_into_ceiling(&mut self, words: &str) -> bool {
        let words = format!(" {} ", printable(words));
        let n = length(&words);
        // They stand in the line: there is some of it on both sides.
        let is_free = |row: &[(Ink, char)], from: usize| {
            let cells = row.get(from..from + n);
            let is_covered = |(ink, _): &(Ink, char)| matches!(ink, Ink::Line | Ink::Recorded | Ink::Band);
            let has_line = |from: usize| row.iter().skip(from).take(2).any(|(ink, _)| *ink == Ink::Ceiling);
            let is_in_line = has_line(from.saturating_sub(2)) && has_line(from + n);
            is_in_line && cells.is_some_and(|cells| !cells.iter().any(is_covered))
        };
        let n_columns = self.n_columns();
        let rows = self.cells.iter().enumerate().skip(1);
        let places = rows.flat_map(|(row, cells)| (2..n_columns).map(move |from| (row, from, cells)));
        let place = places.filter(|(_, from, cells)| is_free(cells, *from)).min_by_key(|(_, from, _)| *from);
        let Some((row, from)) = place.map(|(row, from, _)| (row, from)) else { return false };
        for (column, letter) in (from..).zip(words.chars()) {
            self.put(column, row, Ink::Ceiling, letter);
        }
        true
    }

    fn title(&self) -> String {
        let title = &self.chart.title;
        let Some([(one, _), (other, _)]) = self.crossing() else { return title.clone() };
        format!("{title}; {} crosses the limit between {} and {}", self.signs.crossing, one.at, other.at)
    }

    fn row(&self, row: usize) -> Line {
        let is_tick = row.is_multiple_of(ROWS_OF_A_TICK);
        let bytes = Bytes(self.tick.saturating_mul((row / ROWS_OF_A_TICK) as u64));
        let number = if is_tick { words::short(bytes) } else { String::new() };
        let axis = match row {
            0 => self.signs.corner,
            _ if is_tick => self.signs.tick,
            _ => self.signs.beside,
        };
        let mut line = vec![(Ink::Plain, format!("{number:>width$} {axis}", width = self.left - 2))];
        for (ink, sign) in &self.cells[row] {
            match line.last_mut().filter(|(last, _)| last == ink || *sign == ' ') {
                Some((_, text)) => text.push(*sign),
                None => line.push((*ink, sign.to_string())),
            }
        }
        if let Some((_, last)) = line.last_mut() {
            last.truncate(last.trim_end().len());
        }
        line
    }

    /// The values below the axis: the last, the first, and those between for which there is room.
    fn values(&self) -> String {
        let points = self.chart.points.iter().map(|it| it.at);
        let all: Vec<u64> = points.chain(self.chart.recorded.iter().map(|(at, _)| *at)).collect();
        let mut letters = vec![' '; self.n_columns()];
        let gap = if self.marked().is_empty() { LEAST_GAP.1 } else { LEAST_GAP.0 };
        let wanted = [self.to, self.from].into_iter().chain(all);
        for at in wanted {
            let text = at.to_string();
            let n = length(&text);
            let begin = (self.column(at) + 1).saturating_sub(n.div_ceil(2));
            let begin = begin.min(letters.len().saturating_sub(n));
            let around = &letters[begin.saturating_sub(gap)..(begin + n + gap).min(letters.len())];
            if n <= letters.len() && around.iter().all(|letter| *letter == ' ') {
                letters.splice(begin..begin + n, text.chars());
            }
        }
        let name = self.signs.cut(&printable(&self.chart.variable), self.left - 4);
        let line = format!("{name:>width$}  ", width = self.left - 2) + &letters.iter().collect::<String>();
        line.trim_end().to_owned()
    }

    /// What the signs mean, and what is above the picture.
    fn legend(&self, is_named: bool) -> String {
        let chart = self.chart;
        let mut words = vec![];
        if !self.marked().is_empty() {
            words.push(format!("{} predicted", self.signs.predicted));
        } else {
            words.push(format!("{0}{0} predicted", self.signs.flat));
        }
        if !chart.recorded.is_empty() {
            words.push(format!("{} recorded", self.signs.recorded));
        }
        if chart.points.iter().any(|it| !it.is_certain) {
            words.push(format!("{} range", self.signs.band));
        }
        let high = chart.points.iter().filter(|it| !it.is_certain).map(|it| it.high.0).max();
        if let Some(high) = high.filter(|high| *high > self.tick.saturating_mul(TICKS as u64)) {
            words.push(format!("(up to {}, above the chart)", words::bytes(Bytes(high))));
        }
        if let Some(ceiling) = chart.ceiling.as_ref().filter(|_| !self.shows_ceiling) {
            words.push(format!("({}: above the chart)", ceiling.name));
        }
        if let Some(ceiling) = chart.ceiling.as_ref().filter(|_| self.shows_ceiling && !is_named) {
            let sign: String = self.signs.ceiling.iter().chain(&self.signs.ceiling[..1]).collect();
            words.push(format!("{sign} {}", ceiling.name));
        }
        words.join("  ")
    }
}

/// The next amount that is written in few digits: 1, 1.25, 1.5, 1.75 or 2 times a power of two.
fn tick(least: u64) -> u64 {
    let power = 1u64 << least.max(1).ilog2();
    if power >= least {
        return power;
    }
    let quarters = [5, 6, 7].into_iter().map(|n| (power / 4).saturating_mul(n));
    quarters.filter(|_| power >= 4).find(|tick| *tick >= least).unwrap_or(power.saturating_mul(2))
}

fn length(text: &str) -> usize {
    text.chars().count()
}

#[cfg(test)]
mod tests;
