//! A small HTTP/1.1 server, for `gputrace serve` and `gputrace metrics`: GET and HEAD, one request per connection.
//!
//! ```text
//! bytes ── request ──> Request ── guard ──> the command ──> Answer ── server ──> bytes
//! ```
//! One thread runs it, in a loop over `poll`. Every connection has a deadline, and there is a limit on their number: a client that is
//! slow, silent or gone delays no other. The commands decide what exists under which path.

mod guard;
mod request;
mod server;

pub(crate) use guard::Guard;
#[cfg(test)]
pub(crate) use request::parse;
pub(crate) use request::{Host, Refusal, Request, host};
pub(crate) use server::{Answer, Server, Ticket, Waker};
