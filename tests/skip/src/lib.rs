//! The one way in which a test says that it, or a part of it, did not run. Nothing is skipped without a word: it is printed
//! past the test runner, which would swallow the output of tests that pass, and listed where `GPUTRACE_SKIPS` says.
//! `tests/skips.sh` holds that list against those that are expected.

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::{self, Write};

/// `what` did not run, because of `why`. Words that are always the same for the same test: they are what is expected or not.
pub fn skip(what: &str, why: impl Display) {
    let why = why.to_string().replace('\n', " ");
    let _ = writeln!(io::stderr(), "skipped {what}: {why}");
    let Some(list) = std::env::var_os("GPUTRACE_SKIPS") else { return };
    // One write: tests of several processes and threads share the file.
    let line = format!("{what}\t{why}\n");
    let written = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&list)
        .and_then(|mut file| file.write_all(line.as_bytes()));
    if let Err(error) = written {
        panic!("GPUTRACE_SKIPS, {}: {error}", list.display());
    }
}
