//! Runs that `gputrace predict` makes itself: of the command after `--`, with values in place of `{batch}`.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, bail};
use gputrace_recorder::WaitsUntil;
use gputrace_recorder::output_file::create_new;
use gputrace_replay::answers::predict::Values;
use gputrace_replay::import;
use gputrace_replay::story::Story;
use gputrace_sim::predict::ran_out;

use crate::show::{complain, paths, shown};

/// So many lines of what a program that failed said are shown.
const MOST_LINES: usize = 3;

/// Makes runs, and keeps their traces.
pub(super) struct Runs {
    command: Vec<OsString>,
    folder: PathBuf,
}

/// A run that was made.
pub(super) struct Made {
    /// Its trace, or a folder with a trace of each rank.
    pub(super) traces: PathBuf,
    /// It came to its end, and memory sufficed.
    pub(super) fits: bool,
}

impl Runs {
    /// Of a command that names each variable. The folder is made; nothing of others is overwritten in it.
    pub(super) fn new(command: Vec<OsString>, folder: PathBuf, names: &[String]) -> anyhow::Result<Runs> {
        for name in names {
            let place = format!("{{{name}}}");
            if !command.iter().any(|word| word.to_string_lossy().contains(&place)) {
                bail!("the command does not use the value of `{name}`; write {place} in it");
            }
        }
        let is_taken = fs::read_dir(&folder).is_ok_and(|mut entries| entries.next().is_some());
        if is_taken {
            bail!("{} is not empty; name a new folder for the traces (--traces)", shown(&folder));
        }
        fs::create_dir_all(&folder).with_context(|| format!("cannot make the folder {}", shown(&folder)))?;
        Ok(Runs { command, folder })
    }

    /// Runs the program with values, and records it.
    pub(super) fn make(&self, values: &Values) -> anyhow::Result<Made> {
        let words = words(values);
        let file = words.replace('/', "_");
        let (folder, log) = (self.folder.join(&file), self.folder.join(format!("{file}.log")));
        fs::create_dir(&folder).with_context(|| format!("cannot make the folder {}", shown(&folder)))?;
        complain!("predict: {words} runs; its output goes to {}", log.display());
        let status = self.record(values, &folder, &log)?;
        let traces = paths(std::slice::from_ref(&folder)).unwrap_or_default();
        if traces.is_empty() {
            say_last_words(&log);
            bail!("{words}: nothing was recorded: {status}; its output is in {}", shown(&log));
        }
        let mut wanted = false;
        let until = WaitsUntil::from_now();
        for trace in &traces {
            // A program that has ended does not wait for its recorder.
            if gputrace_recorder::wait_for_recorder(trace, until) {
                complain!(
                    "{} is still being written: this answer does not include later events",
                    trace.display()
                );
            }
            wanted |= wanted_memory(trace, status)?;
        }
        if !status.success() && !wanted {
            say_last_words(&log);
            bail!("{words} failed, but not for lack of memory: {status}; its output is in {}", shown(&log));
        }
        complain!("predict: {words} {}", if wanted { "ran out of memory" } else { "fits" });
        let traces = match <[PathBuf; 1]>::try_from(traces) {
            Ok([only]) => only,
            Err(_) => folder,
        };
        Ok(Made { traces, fits: !wanted })
    }

    fn record(&self, values: &Values, folder: &Path, log: &Path) -> anyhow::Result<ExitStatus> {
        let open = || -> std::io::Result<(File, File)> {
            let log = create_new(log, 0o666)?;
            Ok((log.try_clone()?, log))
        };
        let (out, error) = open().with_context(|| format!("cannot write {}", shown(log)))?;
        let program = std::env::current_exe().context("cannot find gputrace itself")?;
        let mut command = Command::new(program);
        command.arg("record").arg("-o").arg(folder).arg("--");
        command.args(self.command.iter().map(|word| with_values(word, values)));
        command.stdin(Stdio::null()).stdout(out).stderr(error);
        command.status().context("cannot start the program")
    }
}

/// `batch=4,seq=256`.
pub(super) fn words(values: &Values) -> String {
    values.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(",")
}

/// A word of the command, with values.
fn with_values(word: &OsString, values: &Values) -> OsString {
    let Some(text) = word.to_str() else { return word.clone() };
    let with = |text: String, (name, value): &(String, u64)| {
        text.replace(&format!("{{{name}}}"), &value.to_string())
    };
    values.iter().fold(text.to_owned(), with).into()
}

/// Whether a process ended for want of memory. One that failed after a request was refused did.
fn wanted_memory(trace: &Path, status: ExitStatus) -> anyhow::Result<bool> {
    let read = || format!("cannot read {}", shown(trace));
    let streams = import::load(trace).with_context(read)?.devices;
    if streams.iter().any(ran_out) {
        return Ok(true);
    }
    let is_refused = || -> anyhow::Result<bool> {
        let story = Story::read(trace).with_context(read)?;
        Ok(story.ledger.devices().values().any(|device| device.failed > 0))
    };
    Ok(!status.success() && is_refused()?)
}

/// Shows the end of what a program said.
fn say_last_words(log: &Path) {
    let said = fs::read(log).unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    let lines: Vec<&str> = said.lines().filter(|line| !line.trim().is_empty()).collect();
    for line in &lines[lines.len().saturating_sub(MOST_LINES)..] {
        complain!("predict: its output: {line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_go_where_the_command_names_them() {
        let values = vec![("batch".to_owned(), 4), ("seq".to_owned(), 256)];
        assert_eq!(with_values(&"--batch={batch}".into(), &values), "--batch=4");
        assert_eq!(with_values(&"{seq}x{batch}:{other}".into(), &values), "256x4:{other}");
    }

    #[test]
    fn a_command_that_names_no_value_is_refused_and_so_is_a_folder_with_files() {
        let folder = std::env::temp_dir().join(format!("gputrace-predict-{}", std::process::id()));
        let new = |command: &[&str], folder: &Path| {
            let command = command.iter().map(OsString::from).collect();
            Runs::new(command, folder.to_path_buf(), &["batch".to_owned()])
                .map(|_| ())
                .map_err(|why| why.to_string())
        };
        let inside = folder.join("new/er");
        assert!(new(&["train", "--batch"], &inside).unwrap_err().contains("write {batch} in it"));
        assert_eq!(new(&["train", "{batch}"], &inside), Ok(()));
        assert!(new(&["train", "{batch}"], &folder).unwrap_err().contains("--traces"));
        fs::remove_dir_all(&folder).unwrap();
    }
}
