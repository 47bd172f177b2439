//! `gputrace recorder --ring PATH [--ring-fd N] [--process-fd N]`: what the shim starts. Not meant to be called by people.

use crate::Error;
use crate::job;
use crate::oom::Answer;
use crate::record::{Inherited, Options, record};
use crate::segments::{Bounds, parse_time};
use crate::standstill::HANG_AFTER;
use crate::steering::variable;
use crate::{Overwrite, guarded, is_off, left, limits, memory, messages, say};
use gputrace_ring::variables;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Records the ring that `arguments` (those after the verb) name, until its process is gone. `on_oom` answers requests
/// that fail for lack of memory, unless the user wants to hear nothing of them.
#[must_use]
pub fn daemon_main(arguments: impl IntoIterator<Item = OsString>, on_oom: Answer) -> ExitCode {
    let Some((ring, inherited)) = orders_of(arguments) else {
        say(
            "libgputrace.so starts the recorder as `gputrace recorder --ring PATH`; use `gputrace record -- PROGRAM`",
        );
        return ExitCode::from(2);
    };
    memory::is_the_recorders();
    limits::goes_first();
    let kept = format!("the events stay in {}: `gputrace recover` makes a trace of them", ring.display());
    let ended = format!("the program's seccomp filter ended a thread of the recorder; {kept}");
    std::panic::set_hook(Box::new(move |panic| match guarded::is_guard() {
        true => say(&ended),
        false => say(&format!("the recorder failed, which is a bug: {panic}")),
    }));
    keep_running();
    if let Some(limit) = limits::too_little_address_space() {
        say(&format!(
            "the limit of address space ({limit} bytes, ulimit -v) leaves no room for the recorder; {kept}"
        ));
        messages::keep_in_file(&ring);
        return ExitCode::FAILURE;
    }
    if let Some(text) = left::shortage(&ring) {
        say(&text);
    }
    let set = |name| std::env::var(variable(name)).ok().filter(|value| !value.is_empty());
    let job_began = set(variables::JOB_BEGAN).and_then(|began| job::began_at(&began));
    let overwrite = if set(variables::FORCE).is_some_and(|value| value != "0") {
        Overwrite::Replace
    } else if job_began.is_some() {
        // The program has begun, and a trace under another name is better than none.
        Overwrite::Number
    } else {
        Overwrite::Refuse
    };
    let is_silent = set(variables::OOM).is_some_and(|value| is_off(&value));
    let on_oom = (!is_silent).then_some(on_oom);
    let options = Options {
        output: set(variables::OUTPUT),
        overwrite,
        job_began,
        is_its_child: true,
        inherited,
        on_oom,
        hang_after: match set(variables::HANG_AFTER).map(|value| value.parse().ok()) {
            Some(Some(0)) => None,
            Some(Some(seconds)) => Some(Duration::from_secs(seconds)),
            Some(None) | None => Some(HANG_AFTER),
        },
        bounds: Bounds {
            keep: set(variables::KEEP).and_then(|value| parse_time(&value).ok()),
            max_size: set(variables::MAX_SIZE).and_then(|value| value.parse().ok()),
        },
        ..Options::default()
    };
    let code = match guarded::run("gputrace", || record(&ring, options)) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            // Without a pattern nobody chose the name, and it is in the folder that the program happened to be in.
            let advice = match error {
                Error::Output { .. } if set(variables::OUTPUT).is_none() => {
                    "; choose another place with GPUTRACE_OUTPUT"
                }
                _ => "",
            };
            say(&format!("not recording: {}{advice}", error.with_cause()));
            ExitCode::FAILURE
        }
    };
    messages::keep_in_file(&ring);
    code
}

/// What the arguments say: the ring's name, and what was left open for us.
fn orders_of(arguments: impl IntoIterator<Item = OsString>) -> Option<(PathBuf, Inherited)> {
    let (mut ring, mut inherited) = (None, Inherited::default());
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        let (name, value) = match argument.to_str().and_then(|argument| argument.split_once('=')) {
            Some((name, value)) => (name.to_owned(), OsString::from(value)),
            None => (argument.to_string_lossy().into_owned(), arguments.next()?),
        };
        let number = || value.to_str()?.parse().ok();
        match name.as_str() {
            "--ring" => ring = Some(PathBuf::from(value)),
            "--ring-fd" => inherited.ring = Some(number()?),
            "--process-fd" => inherited.process = Some(number()?),
            // What a newer library says besides is no reason to record nothing.
            _ => {}
        }
    }
    Some((ring?, inherited))
}

/// What stops the program (a job's end, a closed terminal) must not stop us before we have written how it ended.
fn keep_running() {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
    let seen = std::sync::Arc::default();
    for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
        // A failure leaves the signal as it was.
        let _ = signal_hook::flag::register(signal, std::sync::Arc::clone(&seen));
    }
}
