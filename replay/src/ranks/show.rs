//! Numbers as words, for sentences.

use gputrace_schemas::event::Nanos;

use crate::report::words;

/// `3.2 ms`, also before something.
pub(super) fn nanos(nanos: i64) -> String {
    let sign = if nanos < 0 { "-" } else { "" };
    format!("{sign}{}", words::time(Nanos(nanos.unsigned_abs())))
}
