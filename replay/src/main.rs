//! The `gputrace` program.
fn main() {}
