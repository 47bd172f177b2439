//! Which variables steer gputrace, what their values may be, and what a misspelt one was to be.
//!
//! Library and recorder take what they do not understand for what was not said: they are guests. Who started them hears of it.

use crate::segments::parse_time;
use gputrace_ring::variables;
use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;

/// What a value may be.
#[derive(Clone, Copy)]
enum Values {
    Any,
    /// On or off, in the words that the library knows.
    Switch,
    /// One of these.
    Words(&'static [&'static str]),
    /// Decimal digits.
    Number,
    /// A number and its unit.
    Time,
}

const OFF: &[&str] = &["0", "off", "false", "no"];
const ON: &[&str] = &["1", "on", "true", "yes"];

/// A variable's name, as the environment has it.
#[must_use]
pub fn variable(name: &'static CStr) -> &'static OsStr {
    OsStr::from_bytes(name.to_bytes())
}

/// Whether a switch with this value is off, as the library takes it (`shim/src/config.rs`).
#[must_use]
pub fn is_off(value: &str) -> bool {
    OFF.contains(&value)
}

/// Every variable of the table in `ring`.
const ALL: &[(&CStr, Values)] = &[
    (variables::SWITCH, Values::Any), // any other word leaves it on
    (variables::STACKS, Values::Words(&["none", "0", "python", "all"])),
    (variables::STACKS_MIN_SIZE, Values::Number),
    (variables::RING_BYTES, Values::Number),
    (variables::RECORDER, Values::Any),
    (variables::EXIT_WAIT, Values::Number),
    (variables::NCCL_TIMING, Values::Switch),
    (variables::OUTPUT, Values::Any),
    (variables::JOB_BEGAN, Values::Any),
    (variables::FORCE, Values::Any),
    (variables::KEEP, Values::Time),
    (variables::MAX_SIZE, Values::Number),
    (variables::OOM, Values::Switch),
    (variables::HANG_AFTER, Values::Number),
    (variables::LIBRARY, Values::Any),
];
/// The pytest plugin's own begin with this.
const PLUGIN: &str = "_PYTEST_";

/// What is wrong with the variables that are meant for us, a sentence each.
pub fn misspelt<Name: AsRef<OsStr>>(variables: impl IntoIterator<Item = (Name, Name)>) -> Vec<String> {
    let mut sentences: Vec<String> = variables
        .into_iter()
        .filter_map(|(name, value)| wrong(&name.as_ref().to_string_lossy(), value.as_ref()))
        .collect();
    sentences.sort();
    sentences
}

/// gputrace's variables that are ignored because their values are misspelt. Unknown `GPUTRACE_*` names may belong to another program.
pub(crate) fn ignored() -> Vec<String> {
    let is_ours = |name: &OsStr| ALL.iter().any(|(known, _)| name_of(known) == name.to_string_lossy());
    misspelt(std::env::vars_os().filter(|(name, _)| is_ours(name)))
}

fn wrong(name: &str, value: &OsStr) -> Option<String> {
    let prefix = name_of(variables::SWITCH);
    let known = ALL.iter().find(|(known, _)| name_of(known) == name);
    let Some((_, values)) = known else {
        let is_meant_for_us = plain(name).starts_with(prefix);
        let is_the_plugins = name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(PLUGIN));
        return (is_meant_for_us && !is_the_plugins).then(|| unknown(name)).flatten();
    };
    let text = value.to_string_lossy();
    let says = |what: String| Some(format!("{name}={text} {what}, and is ignored"));
    match values {
        Values::Any => None,
        _ if text.is_empty() => None,
        Values::Switch if [OFF, ON].iter().any(|words| words.contains(&&*text)) => None,
        Values::Switch => says("is neither 1 nor 0".to_owned()),
        Values::Words(words) if words.contains(&&*text) => None,
        Values::Words(words) => {
            let near = nearest(&text, words.iter().copied());
            let near = near.map(|word| format!(" (did you mean {word}?)")).unwrap_or_default();
            says(format!("is none of {}{near}", words.join(", ")))
        }
        Values::Number if text.bytes().all(|byte| byte.is_ascii_digit()) => None,
        Values::Number => says("is not a number in digits".to_owned()),
        Values::Time if parse_time(&text).is_ok() => None,
        Values::Time => says("is not a length of time such as 90s, 30m, 12h or 7d".to_owned()),
    }
}

/// Nothing of a name that is like none of ours: it may be another program's.
fn unknown(name: &str) -> Option<String> {
    let near = nearest(name, ALL.iter().map(|(name, _)| name_of(name)))?;
    Some(format!("{name} is not a variable of gputrace; did you mean {near}?"))
}

fn name_of(name: &'static CStr) -> &'static str {
    std::str::from_utf8(variable(name).as_bytes()).unwrap_or_default()
}

/// As names are compared: `Gpu_Trace_Output` is `GPUTRACEOUTPUT`.
fn plain(name: &str) -> String {
    name.chars().filter(|c| *c != '_').map(|c| c.to_ascii_uppercase()).collect()
}

/// The one that differs in the fewest letters, if they are few.
fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let prefix = name_of(variables::SWITCH);
    // What they all have in common says nothing.
    let own = |name: &str| plain(name).trim_start_matches(prefix).to_owned();
    let name = own(name);
    let near =
        known.map(|known| (distance(&name, &own(known)), known)).min_by_key(|(letters, _)| *letters)?;
    let most = (name.len() / 2).clamp(1, 4);
    (near.0 <= most).then_some(near.1)
}

/// How many letters must be added, removed or changed (Levenshtein).
fn distance(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.chars().count()).collect();
    for (n, a) in one.chars().enumerate() {
        let mut before = std::mem::replace(&mut row[0], n + 1);
        for (m, b) in other.chars().enumerate() {
            let changed = before + usize::from(a != b);
            before = row[m + 1];
            row[m + 1] = changed.min(row[m] + 1).min(before + 1);
        }
    }
    row.last().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variable_of_the_table_is_known() {
        let table = include_str!("../../ring/src/variables.rs");
        assert_eq!(
            table.matches(" = c\"GPUTRACE").count(),
            ALL.len(),
            "a row of ring/src/variables.rs is not in ALL"
        );
        assert!(ALL.iter().all(|(name, _)| table.contains(&format!("c\"{}\"", name_of(name)))));
    }

    #[test]
    fn what_is_misspelt_is_named_with_what_it_was_to_be() {
        let said = |name: &str, value: &str| misspelt([(name, value)]).join("");
        let is_heeded = [
            ("GPUTRACE", "off"),
            ("GPUTRACE_STACKS", "all"),
            ("GPUTRACE_STACKS", ""),
            ("GPUTRACE_RING_BYTES", "67108864"),
            ("GPUTRACE_OOM", "0"),
            ("GPUTRACE_PYTEST_CHILD", "x"),
            ("PATH", "x"),
        ];
        for (name, value) in is_heeded {
            assert_eq!(said(name, value), "", "{name}={value}");
        }
        let check = |name, value, expected: &str| assert_eq!(said(name, value), expected);
        check(
            "GPUTRACE_OUPUT",
            "x",
            "GPUTRACE_OUPUT is not a variable of gputrace; did you mean GPUTRACE_OUTPUT?",
        );
        check(
            "gputrace_output",
            "x",
            "gputrace_output is not a variable of gputrace; did you mean GPUTRACE_OUTPUT?",
        );
        check(
            "GPU_TRACE_STACK",
            "x",
            "GPU_TRACE_STACK is not a variable of gputrace; did you mean GPUTRACE_STACKS?",
        );
        check(
            "GPUTRACE_RING_SIZE",
            "x",
            "GPUTRACE_RING_SIZE is not a variable of gputrace; did you mean GPUTRACE_RING_BYTES?",
        );
        for name in ["GPUTRACE_SKIPS", "GPUTRACE_TEST_PYTHONS", "GPUTRACE_TORTURE"] {
            check(name, "x", "");
        }
        let stacks =
            "GPUTRACE_STACKS=pyton is none of none, 0, python, all (did you mean python?), and is ignored";
        check("GPUTRACE_STACKS", "pyton", stacks);
        let number = "GPUTRACE_RING_BYTES=64M is not a number in digits, and is ignored";
        check("GPUTRACE_RING_BYTES", "64M", number);
        check("GPUTRACE_OOM", "of", "GPUTRACE_OOM=of is neither 1 nor 0, and is ignored");
    }
}
