//! Lines of a program, with loops where they repeat.

use std::collections::HashMap;
use std::fmt::Write;

/// A line, and what its memory was for.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Line {
    /// Python; of a line that does the same for each of several sizes, `{}` stands for the size, and `{stream}` for a stream.
    pub text: String,
    /// That size.
    pub size: Option<String>,
    /// The number of that stream in the list `streams`.
    pub stream: Option<usize>,
    /// A comment behind it.
    pub role: Option<&'static str>,
}

impl Line {
    /// A line that names neither a size nor a stream.
    #[must_use]
    pub fn of(text: String) -> Line {
        Line { text, size: None, stream: None, role: None }
    }
}

/// Loops have at most so many lines.
const LONGEST: usize = 200;
/// Loops are in at most so many loops.
const DEEPEST: usize = 3;

/// So many lines that differ in a size become a loop over sizes.
const FEWEST: usize = 3;
/// Of a row of sizes, characters.
const WIDEST: usize = 110;

/// The lines as text, with loops.
#[must_use]
pub fn folded(lines: &[Line]) -> String {
    let mut numbers: HashMap<&Line, u32> = HashMap::new();
    let mut known: Vec<&Line> = vec![];
    let mut sequence: Vec<u32> = vec![];
    for line in lines {
        let number = *numbers.entry(line).or_insert_with(|| {
            known.push(line);
            known.len() as u32 - 1
        });
        sequence.push(number);
    }
    let mut text = String::new();
    write_lines(&mut text, &known, &sequence, 0);
    text
}

fn write_lines(text: &mut String, known: &[&Line], lines: &[u32], depth: usize) {
    let indent = "    ".repeat(depth);
    let mut at = 0;
    while at < lines.len() {
        let (period, times) = if depth < DEEPEST { repeats(&lines[at..]) } else { (1, 1) };
        if times > 1 {
            let _ = writeln!(text, "{indent}for _ in range({times}):");
            write_lines(text, known, &lines[at..at + period], depth + 1);
            at += period * times;
            continue;
        }
        let alike =
            lines[at..].iter().take_while(|it| is_alike(known[**it as usize], known[lines[at] as usize]));
        // Up to where a loop begins.
        let alike = alike.count();
        let alike = (1..alike).find(|n| depth < DEEPEST && repeats(&lines[at + n..]).1 > 1).unwrap_or(alike);
        let line = known[lines[at] as usize];
        let comment = line.role.map(|role| format!("  # {role}")).unwrap_or_default();
        let size = line.size.as_deref().unwrap_or("{}");
        let in_a_row = lines[at..].iter().zip(0..).take_while(|(it, nth)| {
            let next = known[**it as usize];
            let is_next = line.stream.is_some_and(|first| next.stream == Some(first + nth));
            is_next && (&next.text, &next.size, next.role) == (&line.text, &line.size, line.role)
        });
        let in_a_row = in_a_row.count();
        if in_a_row >= FEWEST && in_a_row >= alike {
            let first = line.stream.unwrap_or(0);
            let _ = writeln!(text, "{indent}for stream in streams[{first}:{}]:{comment}", first + in_a_row);
            let done = line.text.replace("{}", size).replace("{stream}", "stream");
            let _ = writeln!(text, "{indent}    {done}");
            at += in_a_row;
            continue;
        }
        let named = line.stream.map(|number| format!("streams[{number}]")).unwrap_or_default();
        if alike >= FEWEST {
            let sizes = lines[at..at + alike].iter().filter_map(|it| known[*it as usize].size.as_deref());
            for row in rows(sizes) {
                let _ = writeln!(text, "{indent}for n in ({row}):{comment}");
                let done = line.text.replace("{}", "n").replace("{stream}", &named);
                let _ = writeln!(text, "{indent}    {done}");
            }
            at += alike;
            continue;
        }
        let done = line.text.replace("{}", size).replace("{stream}", &named);
        let _ = writeln!(text, "{indent}{done}{comment}");
        at += 1;
    }
}

/// Whether two lines differ in nothing but a size.
fn is_alike(one: &Line, other: &Line) -> bool {
    let is_same = one.text == other.text && one.role == other.role && one.stream == other.stream;
    one.size.is_some() && other.size.is_some() && is_same
}

/// Sizes in rows that are not too long for a line. What they have in common stands before them.
fn rows<'a>(sizes: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut rows = vec![String::new()];
    for size in sizes {
        match rows.last_mut() {
            Some(row) if row.is_empty() => row.push_str(size),
            Some(row) if row.len() + size.len() < WIDEST => {
                let _ = write!(row, ", {size}");
            }
            _ => rows.push(size.to_owned()),
        }
    }
    // One size alone would be no tuple.
    rows.iter_mut().filter(|row| !row.contains(',')).for_each(|row| row.push(','));
    rows
}

/// The loop that saves most lines where it begins here: its lines, and how often they come.
fn repeats(lines: &[u32]) -> (usize, usize) {
    let mut best = (1, 1, 0);
    for period in 1..=LONGEST.min(lines.len() / 2) {
        // Nearly always the first line of a loop comes again, or there is none.
        if lines[period] != lines[0] {
            continue;
        }
        let pattern = &lines[..period];
        let times = lines.chunks_exact(period).take_while(|it| *it == pattern).count();
        let saved = period * (times - 1);
        if times > 1 && saved > 1 && saved > best.2 {
            best = (period, times, saved);
        }
    }
    (best.0, best.1)
}
