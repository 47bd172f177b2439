//! A verb that looks at processes of other users does so in a process of its own.
//!
//! Memory of a hostile process can lie in a file system that never answers (FUSE). A thread that reads it blocks in the kernel and cannot
//! be interrupted or killed until that file system goes away. So a child process does the reading, and this process exits when the child
//! has finished or has taken too long, even if the child itself cannot exit.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use gputrace_schemas::printable::Screen;

use crate::show::{CANNOT_KNOW, complain};

/// What the child says once it looks at no process any more; other bytes are its exit status.
const LOOKED: u8 = 0xff;
/// How long the child may take to end after it has said how.
const ENDING: Duration = Duration::from_secs(1);

/// The child's way to say how far it is: its standard input is a socket, whose other end the parent has.
pub(crate) struct Progress {
    has_parent: bool,
}

impl Progress {
    /// From here on, nothing is read of another process.
    pub(crate) fn has_looked(&self) {
        self.say(LOOKED);
    }

    fn say(&self, word: u8) {
        if self.has_parent {
            // Without a parent nobody waits for it.
            let _ = rustix::io::write(rustix::stdio::stdin(), &[word]);
        }
    }
}

/// Does this in a child, or, with `is_child`, in this process, which is that child. If the child looks for longer than `patience`, this ends with
/// the words `stuck`.
///
/// # Errors
/// What the work could not do.
pub(crate) fn run(
    is_child: bool,
    patience: Option<Duration>,
    stuck: &str,
    out: &mut Screen,
    work: impl FnOnce(&mut Screen, &Progress) -> anyhow::Result<ExitCode>,
) -> anyhow::Result<ExitCode> {
    if is_child {
        let progress = Progress { has_parent: true };
        // Ends with the process.
        let _ = std::thread::Builder::new().name("parent".to_owned()).spawn(let_go_with_parent);
        let status = work(out, &progress)?;
        out.flush()?;
        let_go_of_output();
        progress.say(as_byte(status));
        return Ok(status);
    }
    let mut words = std::env::args_os().skip(1);
    let verb = words.next().unwrap_or_default();
    let words: Vec<OsString> = [verb, "--in-child".into()].into_iter().chain(words).collect();
    match ended(&words, patience, stuck) {
        Some(status) => Ok(status),
        // No process to be had: then without a bound.
        None => work(out, &Progress { has_parent: false }),
    }
}

/// How a child with these words ended, which say that it is one; `None` where it could not be started.
pub(crate) fn ended(words: &[OsString], patience: Option<Duration>, stuck: &str) -> Option<ExitCode> {
    start(words).map(|(child, from)| wait(child, from, patience, stuck))
}

fn start(words: &[OsString]) -> Option<(Child, UnixStream)> {
    let (ours, its) = UnixStream::pair().ok()?;
    let mut command = Command::new(std::env::current_exe().ok()?);
    command.args(words);
    command.stdin(Stdio::from(std::os::fd::OwnedFd::from(its)));
    gputrace_recorder::end_with_us(&mut command);
    Some((command.spawn().ok()?, ours))
}

fn wait(mut child: Child, mut from: UnixStream, patience: Option<Duration>, stuck: &str) -> ExitCode {
    let mut word = [0];
    let _ = from.set_read_timeout(patience);
    loop {
        match from.read(&mut word) {
            Ok(1) if word[0] == LOOKED => {
                let _ = from.set_read_timeout(None);
            }
            Ok(1) => {
                // Its locks are gone when it is; one that cannot end is left.
                let until = Instant::now() + ENDING;
                while matches!(child.try_wait(), Ok(None)) && Instant::now() < until {
                    std::thread::sleep(Duration::from_millis(1));
                }
                return ExitCode::from(word[0]);
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => {
                // Its answer is the end of the socket, once it has let go of what it writes to.
                let _ = from.shutdown(Shutdown::Write);
                let _ = from.set_read_timeout(Some(ENDING));
                while matches!(from.read(&mut word), Ok(1)) {}
                let _ = child.kill();
                complain!("{stuck}");
                return ExitCode::from(CANNOT_KNOW);
            }
            // It ended without a word: it has said why.
            Ok(_) => {
                let code = child.wait().ok().and_then(|status| u8::try_from(status.code()?).ok());
                return ExitCode::from(code.unwrap_or(CANNOT_KNOW));
            }
        }
    }
}

/// In the child: whoever reads our output waits for its end, and shall not wait for a thread that does not end. All threads have one table
/// of descriptors.
fn let_go_of_output() -> Option<File> {
    let null = File::options().read(true).write(true).open("/dev/null").ok()?;
    let _ = rustix::stdio::dup2_stdout(&null);
    let _ = rustix::stdio::dup2_stderr(&null);
    Some(null)
}

/// In the child: waits until the parent has given up, or is gone.
fn let_go_with_parent() {
    let mut word = [0];
    while rustix::io::read(rustix::stdio::stdin(), &mut word).is_ok_and(|n| n > 0) {}
    if let Some(null) = let_go_of_output() {
        let _ = rustix::stdio::dup2_stdin(&null);
    }
}

fn as_byte(status: ExitCode) -> u8 {
    (0..CANNOT_KNOW).find(|byte| ExitCode::from(*byte) == status).unwrap_or(CANNOT_KNOW)
}
