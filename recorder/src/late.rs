//! Attaching to a process that was started without the library: it is brought in, where that can be on this processor, and sleeps there
//! until it is woken as one that was there from the start.

use crate::arch;
use crate::attach::{Page, Refusal};
use std::path::Path;
use std::time::Duration;

pub use crate::arch::late::{possible, sleep, stood_still};

/// The control page of the process, into which the library is brought if it is not there, or not heard.
///
/// # Errors
/// It cannot be: why, and what to do.
pub fn find(pid: u32, library: &Path, patience: Duration) -> Result<Page, Refusal> {
    match Page::find(pid) {
        Ok(page) if !page.is_unheard() => Ok(page),
        Ok(_) | Err(Refusal::NotLoaded(_)) => arch::late::bring(pid, library, patience),
        Err(refusal) => Err(refusal),
    }
}
