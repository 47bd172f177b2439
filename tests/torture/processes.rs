//! Processes of a run and the rings they leave: whether one hangs, what it waits for, when the last has ended.

use crate::traces::*;
use crate::workshop::*;
use gputrace_tests::patience;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

/// No scenario takes a tenth of this, on a machine that does nothing else.
const HANG: Duration = Duration::from_secs(120);

/// [`HANG`] on a machine that does something else.
pub(crate) fn is_hang(began: Instant) -> bool {
    patience::is_hang(began, HANG)
}

/// Rings that a run left: those it named, and those of its processes.
pub(crate) fn rings(run: &Run) -> Vec<PathBuf> {
    let mut rings: BTreeSet<PathBuf> = BTreeSet::new();
    for folder in ["/dev/shm", "/tmp"] {
        let names = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
        for path in names {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            // Numbers of processes come again.
            let is_older =
                fs::metadata(&path).and_then(|data| data.modified()).is_ok_and(|time| time < run.began);
            if is_older {
                continue;
            }
            let of = |line: &Line| name.starts_with(&format!("gputrace.{}.", line.process & !ASIDE));
            let is_named = run.said.contains(&name);
            if name.ends_with(".ring")
                && (is_named || run.lines.iter().any(|line| line.process & !ASIDE > 99 && of(line)))
            {
                rings.insert(path);
            }
        }
    }
    rings.into_iter().collect()
}

/// Removes the rings that nobody can give back, because whoever ended took its recorder along (PID 1), or came no further
/// than making the file. Each of them is memory.
pub(crate) fn remove_rings_of_nobody(since: SystemTime) {
    let maps: String = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|process| fs::read_to_string(process.path().join("maps")).ok())
        .collect();
    for entry in fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = name.strip_prefix("gputrace.").and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
        let Ok(data) = entry.metadata() else { continue };
        let is_nobodys = pid.is_some_and(|pid| pid < 100) || data.len() == 0;
        let is_ours = data.modified().is_ok_and(|time| time >= since) && name.ends_with(".ring");
        if is_ours && pid.is_some() && is_nobodys && !maps.contains(&name) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Processes of a run: all have the name of its file in their environment. One that is becoming another program at this moment
/// has no environment and no words, and might be of the run; on a busy machine that moment is long.
pub(crate) fn processes(usage: &Path) -> Vec<(u32, String)> {
    let wanted = format!("TORTURE_USAGE={}\0", usage.display()).into_bytes();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        let words = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let is_between = || environment.is_empty() && words.is_empty() && entry.path().join("exe").exists();
        if environment.windows(wanted.len()).any(|part| part == wanted) || is_between() {
            found.push((pid, String::from_utf8_lossy(&words).replace('\0', " ")));
        }
    }
    found
}

/// Waits until the last process of a run has ended, recorders among them; says who does not.
pub(crate) fn wait_for_the_end(usage: &Path) -> Option<String> {
    let began = Instant::now();
    let mut was_empty = false;
    loop {
        let left = processes(usage);
        // One that was forked between two looks at a folder of processes may have been seen in neither.
        if left.is_empty() && was_empty {
            return None;
        }
        was_empty = left.is_empty();
        if is_hang(began) {
            for (pid, _) in &left {
                kill(&pid.to_string());
            }
            return Some(format!("{left:?}"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What the threads of a run's processes wait for.
pub(crate) fn where_it_stands(usage: &Path) -> String {
    let mut text = String::new();
    for (pid, command) in processes(usage) {
        let calls = fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap_or_default();
        let _ = write!(text, "{pid} {command}: {}; ", calls.trim());
    }
    text
}

pub(crate) fn kill(whom: &str) {
    let _ = Command::new("kill").args(["-KILL", "--", whom]).stderr(Stdio::null()).status();
}

pub(crate) fn kill_group(leader: u32) {
    kill(&format!("-{leader}"));
}
