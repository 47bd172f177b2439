//! Bringing the library into a running process: that needs registers and instructions of the processor, which are written for x86-64 only
//! (docs/ARM.md).

use crate::attach::{Answered, Page, Refusal};
use std::path::Path;
use std::time::Duration;

/// Has the session end, as [`Page::sleep`].
///
/// # Errors
/// As there.
pub fn sleep(page: &Page, _: u32, _: &Path, patience: Duration) -> Result<Answered, Refusal> {
    page.sleep(patience)
}

/// How often a thread of another process stood still because of this one, and for how many microseconds at most: never.
#[must_use]
pub fn stood_still() -> (u32, u32) {
    (0, 0)
}

/// Whether the library could be brought in.
///
/// # Errors
/// Always: it can be on x86-64 only.
pub fn possible(pid: u32) -> Result<(), Refusal> {
    Err(not_here(pid))
}

/// Brings the library in.
///
/// # Errors
/// Always, as [`possible`].
pub(crate) fn bring(pid: u32, _: &Path, _: Duration) -> Result<Page, Refusal> {
    Err(not_here(pid))
}

fn not_here(pid: u32) -> Refusal {
    let why = format!(
        "libgputrace.so can be loaded into a running process only on x86-64, not on {}; to attach later, start the process with LD_PRELOAD=$(gputrace library) and GPUTRACE=dormant",
        std::env::consts::ARCH
    );
    Refusal::NotLate { pid, why }
}
