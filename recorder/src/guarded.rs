//! Threads that a seccomp filter may end without a word.
//!
//! A recorder is under its program's filters. One of those may end the thread that makes a call, and not the process
//! (`SECCOMP_RET_KILL_THREAD`): what the thread was to send never comes, the others wait for ever, and the program's standard error stays
//! open. So under a filter every thread has a guard, which only waits for its end: a call that whoever uses threads must have. If that came
//! without a result, the recorder ends, and its ring stays for `gputrace recover`.

use crate::process;
use std::cell::Cell;
use std::io;
use std::sync::OnceLock;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

/// The guards, in lists of threads.
const GUARD: &str = "gputrace-guard";
/// Bytes: a guard waits, and may say one word.
const STACK: usize = 256 << 10;
/// What a first thread has by default.
const STACK_OF_MAIN: usize = 8 << 20;

/// Whether this process is under a filter.
pub(crate) fn is_filtered() -> bool {
    static IS_FILTERED: OnceLock<bool> = OnceLock::new();
    *IS_FILTERED.get_or_init(process::is_filtered)
}

thread_local! {
    static IS_GUARD: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is a guard. It panics (`join` does) if what it guards was ended by force, and for no other reason.
pub(crate) fn is_guard() -> bool {
    IS_GUARD.get()
}

/// Something that can be waited for.
trait Join<T> {
    fn wait(self) -> std::thread::Result<T>;
}

impl<T> Join<T> for JoinHandle<T> {
    fn wait(self) -> std::thread::Result<T> {
        self.join()
    }
}

impl<T> Join<T> for ScopedJoinHandle<'_, T> {
    fn wait(self) -> std::thread::Result<T> {
        self.join()
    }
}

fn guard<T>(thread: impl Join<T>) -> T {
    IS_GUARD.set(true);
    thread.wait().unwrap_or_else(|_| std::process::abort())
}

/// Does it under a filter in a thread of its own, whose guard is the calling one.
pub(crate) fn run<T: Send>(name: &str, run: impl FnOnce() -> T + Send) -> T {
    if !is_filtered() {
        return run();
    }
    let mut run = Some(run);
    let done = std::thread::scope(|scope| {
        let work = || run.take().map(|run| run());
        let thread = Builder::new().name(name.to_owned()).stack_size(STACK_OF_MAIN).spawn_scoped(scope, work);
        thread.map(guard)
    });
    IS_GUARD.set(false);
    match (done, run) {
        (Ok(Some(done)), _) => done,
        // There is no thread for it.
        (_, Some(run)) => run(),
        (_, None) => std::process::abort(),
    }
}

/// Starts a thread, and its guard under a filter.
///
/// # Errors
/// When there is no thread for it.
pub(crate) fn spawn<T: Send + 'static>(
    name: &str,
    run: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let thread = Builder::new().name(name.to_owned()).spawn(run)?;
    if !is_filtered() {
        return Ok(thread);
    }
    Builder::new().name(GUARD.to_owned()).stack_size(STACK).spawn(move || guard(thread))
}

/// As [`spawn`], for a thread that ends with the scope.
///
/// # Errors
/// When there is no thread for it.
pub(crate) fn spawn_scoped<'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    run: impl FnOnce() + Send + 'scope,
) -> io::Result<()> {
    let thread = Builder::new().name(name.to_owned()).spawn_scoped(scope, run)?;
    if is_filtered() {
        Builder::new().name(GUARD.to_owned()).stack_size(STACK).spawn_scoped(scope, move || guard(thread))?;
    }
    Ok(())
}
