//! A verb's own answer to one call, from a process of its own.
//!
//! The server could call the verb's function instead. A child is better here: a verb may end the process (a panic aborts, and so
//! does memory that runs out), may take long, and may not be interrupted; the kernel can end a child at any moment and bound
//! what it uses. Each child reads what the server may read, writes nothing, and has the answer that the command line has. It costs
//! a few milliseconds for each call.

use std::ffi::OsString;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use gputrace_schemas::printable::Screen;
use gputrace_schemas::reader::confine_to;
use rustix::process::{Resource, Rlimit, setrlimit};

use super::allowed::Allowed;
use super::tools::TOOLS;

/// Memory of one child: what the largest traces of docs/EFFORT.md need, several times.
const MEMORY: u64 = 16 << 30;
/// An answer that is longer is of no use to an agent, even in parts.
const MOST_ANSWERED: u64 = 64 << 20;
/// What a child says on its standard error, at most.
const MOST_SAID: u64 = 4 << 10;
const STEP: Duration = Duration::from_millis(5);

/// How calls are answered.
pub(super) struct Asking {
    pub(super) allowed: Allowed,
    time_limit: Duration,
}

/// What a verb wrote.
#[derive(Debug)]
pub(super) struct Answer {
    /// JSON, or nothing.
    pub(super) json: String,
    /// What it said on its standard error.
    pub(super) said: String,
}

impl Asking {
    pub(super) fn new(allowed: Allowed, time_limit: Duration) -> Asking {
        Asking { allowed, time_limit }
    }

    /// Runs a verb with these words until it ends, its time is over, or it is called off.
    ///
    /// # Errors
    /// Why there is no answer, for the client.
    pub(super) fn ask(&self, words: &[OsString], is_cancelled: &AtomicBool) -> Result<Answer, String> {
        let mut child = self.start(words).map_err(|error| format!("cannot start gputrace: {error}"))?;
        // Each pipe is emptied by a thread of its own: a child that waits for one would never end.
        let answer = child.stdout.take().map(|pipe| thread::spawn(move || text(pipe, MOST_ANSWERED)));
        let said = child.stderr.take().map(|pipe| thread::spawn(move || text(pipe, MOST_SAID)));
        let ended = self.wait(&mut child, is_cancelled);
        if ended.is_err() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let text = |thread: Option<thread::JoinHandle<String>>| {
            thread.and_then(|it| it.join().ok()).unwrap_or_default()
        };
        let (json, said) = (text(answer), text(said));
        let status = ended?;
        if json.len() as u64 > MOST_ANSWERED {
            return Err(format!(
                "the answer is longer than {} MiB: name one trace, not a folder",
                MOST_ANSWERED >> 20
            ));
        }
        match status.code() {
            Some(_) => Ok(Answer { json, said: without_name(&said) }),
            // By a signal: it was killed, or aborted.
            None => Err(format!("gputrace ended before it answered ({status}). {said}")),
        }
    }

    fn start(&self, words: &[OsString]) -> io::Result<Child> {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("gputrace").arg("mcp");
        for folder in self.allowed.folders() {
            // One word: the name of a folder is never an option.
            let mut option = OsString::from("--allow=");
            option.push(folder);
            command.arg(option);
        }
        command.arg("--").args(words);
        gputrace_recorder::end_with_us(&mut command);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
    }

    fn wait(&self, child: &mut Child, is_cancelled: &AtomicBool) -> Result<std::process::ExitStatus, String> {
        let began = Instant::now();
        loop {
            match child.try_wait() {
                Ok(Some(status)) => return Ok(status),
                Ok(None) => {}
                Err(error) => return Err(format!("cannot wait for gputrace: {error}")),
            }
            if is_cancelled.load(Ordering::Relaxed) {
                return Err("the call was cancelled".to_owned());
            }
            if began.elapsed() > self.time_limit {
                return Err(format!(
                    "no answer within {} s: name one trace instead of a folder, or start the server with a larger --time-limit",
                    self.time_limit.as_secs()
                ));
            }
            thread::sleep(STEP);
        }
    }
}

/// What the program says begins with its name, for people who run several.
fn without_name(said: &str) -> String {
    let lines = said.trim_end().lines().map(|line| line.strip_prefix("gputrace: ").unwrap_or(line));
    lines.collect::<Vec<_>>().join("\n")
}

/// What comes through a pipe, one byte more than `most` at most. The rest is read and dropped, so that nobody waits.
fn text(mut pipe: impl Read, most: u64) -> String {
    let mut bytes = vec![];
    let _ = pipe.by_ref().take(most + 1).read_to_end(&mut bytes);
    let _ = io::copy(&mut pipe, &mut io::sink());
    String::from_utf8_lossy(&bytes).into_owned()
}

/// In the child: gives up what a verb that answers does not need, and runs the verb.
///
/// # Errors
/// The verb's, or it is none of the tools'.
pub(super) fn answer(allowed: Allowed, words: &[OsString], out: &mut Screen) -> anyhow::Result<ExitCode> {
    let verb = words.first().map(|word| word.to_string_lossy()).unwrap_or_default();
    if !TOOLS.iter().any(|tool| tool.verb == verb) {
        bail!("this server does not run the verb `{verb}`");
    }
    narrow().context("cannot limit the resources of the answer")?;
    confine_to(allowed.folders().to_vec());
    let mut all = vec![OsString::from("gputrace")];
    all.extend(words.iter().cloned());
    super::super::run_words(&all, out)
}

/// Writes no file, and has bounded memory.
fn narrow() -> io::Result<()> {
    for (resource, most) in [(Resource::Fsize, 0), (Resource::Core, 0), (Resource::Data, MEMORY)] {
        let maximum = rustix::process::getrlimit(resource).maximum.map_or(most, |maximum| maximum.min(most));
        setrlimit(resource, Rlimit { current: Some(maximum), maximum: Some(maximum) })?;
    }
    Ok(())
}
