//! What a trace says: the books, what follows from them, reports, exports. The simulator is `gputrace_sim`.
//!
//! Each floor is a crate of its own; this one gives them one name, for the program and for other programs.
#![forbid(unsafe_code)]

pub use gputrace_analyse as analyse;
pub use gputrace_analyse::story;
pub use gputrace_answers as answers;
pub use gputrace_exports as exports;
pub use gputrace_page as page;
pub use gputrace_ranks as ranks;
pub use gputrace_reduce as reduce;
pub use gputrace_report as report;
pub use gputrace_trace as trace;
pub use gputrace_trace::{import, ledger};
