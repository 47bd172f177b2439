//! Numbers as words, for sentences.

use gputrace_schemas::event::Nanos;

use crate::report::render::text;

/// `3.2 ms`, also before something.
pub(super) fn nanos(nanos: i64) -> String {
    let sign = if nanos < 0 { "-" } else { "" };
    format!("{sign}{}", text::time(Nanos(nanos.unsigned_abs())))
}
