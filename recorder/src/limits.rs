//! Limits that we inherited from the program. What may be raised, the library has raised when it started us.

use crate::opened::text_of_proc;
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

/// Where memory runs out, this process goes before the program that it records: a trace may be lost, the work may not. The kernel lets
/// everybody raise the number, up to 1000 (proc(5)); children of the recorder do not exist.
pub(crate) fn goes_first() {
    // Not everywhere is /proc writable.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
}

/// Bytes of address space without which a recorder would run out of them in the middle of its work: the ring (32 MiB), our
/// own code and that of libraries, stacks of three threads, symbols (59 MB at most in a recording of 80,000 calls).
const LEAST_ADDRESS_SPACE: u64 = 96 << 20;

/// The limit of address space (`ulimit -v`) where it leaves no room for us.
pub(crate) fn too_little_address_space() -> Option<u64> {
    // Asked of a file, because some filters refuse the call.
    let limits = text_of_proc("/proc/self/limits").unwrap_or_default();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    let limit = line.split_ascii_whitespace().next()?.parse().ok()?;
    (limit < LEAST_ADDRESS_SPACE).then_some(limit)
}

/// The process that was recorded runs on, and nobody waits for us but the one who detaches: whatever is left to do comes after what else the
/// processors have to do. The kernel keeps a priority for each thread.
pub(crate) fn stand_back() {
    /// Of nice(1): the last.
    const LAST: i32 = 19;
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let numbers = threads.filter_map(|it| it.file_name().to_str()?.parse().ok());
    for thread in numbers.filter_map(rustix::process::Pid::from_raw) {
        // Refused at most where somebody has given us a policy of its own.
        let _ = rustix::process::setpriority_process(Some(thread), LAST);
    }
}

/// Raises the calling thread's priority as far as the kernel allows (`CAP_SYS_NICE`, `ulimit -e`): while it holds a thread of the program
/// stopped, nothing else should run in its place. For a thread that ends soon.
pub(crate) fn come_first() {
    /// Of nice(1): the first.
    const FIRST: i32 = -20;
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), FIRST);
}
