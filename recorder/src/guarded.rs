//! Threads that a seccomp filter may end without notice.
//!
//! A recorder inherits its program's filters. A filter can end the thread that makes a call instead of the process
//! (`SECCOMP_RET_KILL_THREAD`). The other threads then wait forever for what it was to send, and the recorder keeps the program's standard
//! error open. So under a filter each thread runs below a guard, which only waits for it to end. If it ended without a result, the recorder
//! ends too, and its ring stays for `gputrace recover`.

use crate::process;
use std::cell::Cell;
use std::io;
use std::sync::OnceLock;
use std::thread::{Builder, JoinHandle, Scope};

/// The name of guards in lists of threads.
const GUARD: &str = "gputrace-guard";
/// Bytes: the usual stack of a first thread.
const STACK: usize = 8 << 20;

/// Whether this process is under a filter.
fn is_filtered() -> bool {
    static IS_FILTERED: OnceLock<bool> = OnceLock::new();
    *IS_FILTERED.get_or_init(process::is_filtered)
}

thread_local! {
    static IS_GUARD: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is a guard. It panics (`join` does) only if the thread that it guards was killed.
pub(crate) fn is_guard() -> bool {
    IS_GUARD.get()
}

/// Runs this. Under a filter it runs in a thread of its own, and the calling thread is the guard. If no thread can be started, the calling
/// thread runs it.
pub(crate) fn run<T: Send>(name: &str, run: impl FnOnce() -> T + Send) -> T {
    if !is_filtered() {
        return run();
    }
    let mut run = Some(run);
    let done = std::thread::scope(|scope| {
        let work = || run.take().map(|run| run());
        let thread = Builder::new().name(name.to_owned()).stack_size(STACK).spawn_scoped(scope, work).ok()?;
        IS_GUARD.set(true);
        thread.join().unwrap_or_else(|_| std::process::abort())
    });
    IS_GUARD.set(false);
    match (done, run) {
        (Some(done), _) => done,
        (None, Some(run)) => run(),
        (None, None) => std::process::abort(),
    }
}

/// Starts a thread, below a guard where there is a filter.
///
/// # Errors
/// When no thread can be started.
pub(crate) fn spawn<T: Send + 'static>(
    name: &'static str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    Builder::new().name(outer(name).to_owned()).spawn(move || run(name, work))
}

/// As [`spawn`], for a thread that ends with the scope.
///
/// # Errors
/// When no thread can be started.
pub(crate) fn spawn_scoped<'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &'static str,
    work: impl FnOnce() + Send + 'scope,
) -> io::Result<()> {
    Builder::new().name(outer(name).to_owned()).spawn_scoped(scope, move || run(name, work)).map(drop)
}

/// The name of the thread that calls [`run`].
fn outer(name: &'static str) -> &'static str {
    if is_filtered() { GUARD } else { name }
}
