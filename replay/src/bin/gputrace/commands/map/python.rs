//! Tasks on Ray and Dask, which speak Python: `python -m gputrace.executors` hands them to workers, writes what they give back, and
//! says of each in a line of JSON what became of it.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use serde::Deserialize;

use super::plan::{Outcome, Outcomes, Plan};

/// A line.
#[derive(Deserialize)]
struct Told {
    task: usize,
    #[serde(flatten)]
    outcome: Outcome,
}

pub(super) fn run(
    python: &Path,
    engine: &str,
    address: Option<&str>,
    plan: &Plan,
) -> anyhow::Result<Outcomes> {
    let shown = python.display();
    let mut child = Command::new(python)
        .args(["-m", "gputrace.executors", engine])
        .args(address)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {shown}: --python names another"))?;
    let mut outcomes = Outcomes::new();
    let input = child.stdin.take().context("no pipe to the Python process")?;
    // Where Python ended at once, its status says so.
    let _ = { input }.write_all(serde_json::to_string(plan)?.as_bytes());
    let output = child.stdout.take().context("no pipe from the Python process")?;
    for line in BufReader::new(output).lines() {
        let line = line.context("cannot read from the Python process")?;
        // Engines have words of their own for the standard output.
        if let Ok(Told { task, outcome }) = serde_json::from_str(&line) {
            outcomes.insert(task, outcome);
        }
    }
    let status = child.wait().context("the Python process")?;
    if !status.success() {
        bail!(
            "{shown} -m gputrace.executors {engine}: {status} (pip install 'gputrace[{engine}]' installs its requirements)"
        );
    }
    Ok(outcomes)
}
