//! Limits that we inherited from the program. What may be raised, the library has raised when it started us.

use std::sync::{Arc, Once};

/// Makes limits of the disk errors of writing, which say what is lost. By default, a file that becomes too long for
/// `ulimit -f` ends its process by a signal, and a reader of our output that has gone away does so too (Rust's runtime
/// sees to that one).
pub(crate) fn prepare() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // A handler is enough for the kernel to answer EFBIG. A failure leaves the signal as it was.
        let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    });
}
