//! Tasks, what became of them, and the folder that has it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use gputrace_recorder::output_file::put_in_place;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// A verb that writes files of its own name into a folder.
pub(super) const WRITES_FILES: &str = "reduce";

/// What is to be done.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Plan {
    /// This program.
    pub(super) program: PathBuf,
    /// The folder for what tasks say.
    pub(super) output: PathBuf,
    /// A folder in it for what is not done yet; it goes at the end.
    pub(super) work: PathBuf,
    /// How often a task is begun, at most.
    pub(super) tries: u32,
    /// Tasks at once.
    pub(super) jobs: Option<usize>,
    pub(super) tasks: Vec<Task>,
}

/// A verb on a trace.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Task {
    /// Of its file in the folder.
    pub(super) name: String,
    /// Where it must be run; anywhere if none.
    pub(super) host: Option<String>,
    /// The verb and its options.
    pub(super) arguments: Vec<String>,
    pub(super) trace: String,
}

/// What became of a task that was run to its end. One whose process was killed has none.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Outcome {
    /// Exit status.
    pub(super) status: i32,
    /// Files in the folder.
    pub(super) files: Vec<String>,
    /// What it said on the standard error.
    pub(super) error: String,
}

/// By number of the task.
pub(super) type Outcomes = BTreeMap<usize, Outcome>;

impl Task {
    pub(super) fn writes_files(&self) -> bool {
        self.arguments.first().is_some_and(|verb| verb == WRITES_FILES)
    }

    /// Runs it here once; none if its process was killed. The same in python/src/gputrace/executors.py.
    pub(super) fn run(&self, plan: &Plan) -> anyhow::Result<Option<Outcome>> {
        let mut command = Command::new(&plan.program);
        // What is said must not hang on who asks.
        command.args(&self.arguments).env_remove("COLUMNS").env_remove("LD_PRELOAD");
        let folder = self.writes_files().then(|| folder_in(&plan.work, "task")).transpose()?;
        if let Some(folder) = &folder {
            command.arg("-o").arg(folder);
        }
        let output = command
            .arg(&self.trace)
            .stdin(std::process::Stdio::null())
            .output()
            .with_context(|| format!("cannot run {}", plan.program.display()))?;
        let ended = match output.status.code() {
            Some(status) => {
                let error = String::from_utf8_lossy(&output.stderr).into_owned();
                let files = match &folder {
                    Some(folder) => moved(folder, &plan.output)?,
                    None => {
                        put(&plan.output.join(&self.name), &plan.work, &output.stdout)?;
                        vec![self.name.clone()]
                    }
                };
                Some(Outcome { status, files, error })
            }
            None => None,
        };
        if let Some(folder) = folder {
            let _ = std::fs::remove_dir_all(folder);
        }
        Ok(ended)
    }
}

impl Plan {
    /// Lists tasks, files and statuses in `map.json`: nothing of who ran them, or when.
    pub(super) fn finish(&self, outcomes: &Outcomes) -> anyhow::Result<()> {
        let tasks = self.tasks.iter().enumerate().map(|(idx, task)| {
            let outcome = outcomes.get(&idx);
            json!({
                "trace": task.trace,
                "host": task.host,
                "arguments": task.arguments,
                "status": outcome.map_or(Value::Null, |it| it.status.into()),
                "files": outcome.map_or(json!([]), |it| json!(it.files)),
            })
        });
        let all = json!({ "schema": "gputrace.map/1", "tasks": tasks.collect::<Vec<_>>() });
        put(&self.output.join("map.json"), &self.work, format!("{all:#}\n").as_bytes())
    }
}

/// Writes all of a file or nothing, by way of a folder of the same disk.
pub(super) fn put(to: &Path, via: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let part = via.join(format!("part.{}", unique()));
    std::fs::write(&part, bytes)
        .and_then(|()| put_in_place(&part, to).map_err(std::io::Error::other))
        .inspect_err(|_| {
            let _ = std::fs::remove_file(&part);
        })
        .with_context(|| format!("cannot write {}", to.display()))
}

/// A word that no other process of this host or another has.
fn unique() -> String {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}.{}.{}", host.trim(), std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A folder in another that nobody else has.
pub(super) fn folder_in(folder: &Path, name: &str) -> anyhow::Result<PathBuf> {
    let made = folder.join(format!("{name}.{}", unique()));
    std::fs::create_dir(&made).with_context(|| format!("cannot make {}", made.display()))?;
    Ok(made)
}

/// Moves a task's files to where all are, and gives their names.
fn moved(from: &Path, to: &Path) -> anyhow::Result<Vec<String>> {
    let mut files = vec![];
    for entry in std::fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        put_in_place(&entry.path(), &to.join(&name)).with_context(|| format!("cannot write {name}"))?;
        files.push(name);
    }
    files.sort();
    Ok(files)
}
