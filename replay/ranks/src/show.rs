//! Numbers as words, for sentences.

use gputrace_schemas::event::Nanos;

use gputrace_trace::words;

/// `3.2 ms`, also before something.
pub(super) fn nanos(nanos: i64) -> String {
    let sign = if nanos < 0 { "-" } else { "" };
    format!("{sign}{}", words::time(Nanos(nanos.unsigned_abs())))
}

/// `sleep (train.py:17)` for `sleep (/job/train.py:17)`.
pub(super) fn frame(line: &str) -> String {
    match line.rsplit_once(" (") {
        Some((function, path)) => format!("{function} ({}", path.rsplit('/').next().unwrap_or(path)),
        None => line.to_owned(),
    }
}

/// `first` for 0.
pub(super) fn ordinal(n: usize) -> String {
    const NAMES: [&str; 9] =
        ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth"];
    NAMES.get(n).map_or_else(|| format!("{}.", n + 1), |name| (*name).to_owned())
}

/// `Rank 3` for `rank 3`.
pub(super) fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}
