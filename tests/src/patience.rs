//! When a test that waits calls something a hang. Only what never ends may reach that: a test does not depend on how busy the machine is.

use std::fs;
use std::time::{Duration, Instant};

/// No wait of these tests takes a tenth of this, on a machine that does nothing else.
pub const LONG: Duration = Duration::from_secs(300);
/// A time limit for commands, in seconds, that only a hang reaches.
pub const SECONDS: &str = "1200";

/// Whether what began then should have ended: it took longer than `usual`, and as much longer again as there was more to do than there are
/// processors for it.
#[must_use]
pub fn is_hang(began: Instant, usual: Duration) -> bool {
    let elapsed = began.elapsed();
    elapsed > usual && {
        let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        // The mean of a quarter of an hour remembers what slowed the run down; that of a minute sees what does.
        let loads = text.split(' ').take(3).filter_map(|word| word.parse::<f64>().ok());
        let processors = std::thread::available_parallelism().map_or(1, usize::from) as f64;
        elapsed > usual.mul_f64(loads.fold(1.0, |most, load| most.max(load / processors)))
    }
}

/// Waits until it is so.
///
/// # Panics
/// If it never is, with this text.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(!is_hang(began, LONG), "waited too long: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
