//! Lines of a program, with loops where they repeat.

use std::collections::HashMap;
use std::fmt::Write;

/// A line, and what its memory was for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Line {
    /// Python.
    pub text: String,
    /// A comment behind it.
    pub role: Option<&'static str>,
}

/// Loops have at most so many lines.
const LONGEST: usize = 200;
/// Loops are in at most so many loops.
const DEEPEST: usize = 3;

/// The lines as text, with loops.
pub(super) fn folded(lines: &[Line]) -> String {
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

impl std::hash::Hash for Line {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.text.hash(state);
        self.role.hash(state);
    }
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
        let line = known[lines[at] as usize];
        let comment = line.role.map(|role| format!("  # {role}")).unwrap_or_default();
        let _ = writeln!(text, "{indent}{}{comment}", line.text);
        at += 1;
    }
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
