//! The largest value that fits, proved: what is predicted from all runs is run, and the next value, until one fits and the next does not.

use std::path::PathBuf;

use anyhow::{Context, bail};
use gputrace_replay::answers::checked::Checked;
use gputrace_replay::answers::predict::{Asked, Fit, Values};

use super::reply;
use super::runs::Runs;

/// Looks for the largest value of `--fit` by running.
pub(super) struct Search<'a> {
    pub(super) maker: Runs,
    pub(super) asked: &'a mut Asked,
    pub(super) runs: &'a mut Vec<(Values, PathBuf)>,
    pub(super) most_runs: usize,
}

impl Search<'_> {
    /// Runs values, adds those that fit to the runs, and says in what is asked what was found.
    pub(super) fn check(&mut self) -> anyhow::Result<()> {
        if !self.asked.policies.is_empty() {
            bail!("a command runs with its own setting: leave out --policy, or set PYTORCH_CUDA_ALLOC_CONF");
        }
        let variable = self.asked.fit.clone().context("there is nothing to search")?;
        let [point] = &self.points(&variable)?[..] else {
            bail!("--fit with a command finds the largest value at one point: give --at at most once");
        };
        let set = |value: u64| -> Values {
            let of = |(name, other): &(String, u64)| {
                (name.clone(), if *name == variable { value } else { *other })
            };
            point.iter().map(of).collect()
        };
        let is_at_point = |values: &Values| {
            let is_same =
                |(name, value): &(String, u64)| *name == variable || values.contains(&(name.clone(), *value));
            point.iter().all(is_same)
        };
        let value_of =
            |values: &Values| values.iter().find(|(name, _)| *name == variable).map(|(_, value)| *value);
        let mut found = self.ask()?;
        let recorded = self
            .runs
            .iter()
            .filter(|(values, _)| is_at_point(values))
            .filter_map(|(values, _)| value_of(values));
        let mut checked = match recorded.max().filter(|recorded| fits(&found, *recorded)) {
            Some(recorded) => Checked::from(recorded),
            None => Checked::default(),
        };
        // Without a limit that was asked for, a program that ran is proof enough.
        let machine = self.asked.machine;
        let is_asked = machine.limit.is_some() || machine.device_memory.is_some();
        while checked.n_runs() < self.most_runs
            && let Some(value) = checked.next(largest(&found))
        {
            let made = self.maker.make(&set(value))?;
            if !made.fits {
                checked.add(value, false);
                continue;
            }
            self.runs.push((set(value), made.traces));
            let then = self.ask()?;
            let is_within = !is_asked || fits(&then, value);
            checked.add(value, is_within);
            if is_within {
                found = then;
            } else {
                // The run that fits best shows what is predicted next.
                self.runs.pop();
            }
        }
        self.asked.checked = Some(checked);
        Ok(())
    }

    /// Where the value is looked for: what `--at` says of the other variables, or as in the largest run.
    fn points(&self, variable: &str) -> anyhow::Result<Vec<Values>> {
        let size = |(values, _): &&(Values, PathBuf)| {
            values.iter().map(|(_, value)| u128::from(*value)).product::<u128>()
        };
        let (base, _) = self.runs.iter().max_by_key(size).context("there are no runs")?;
        if !base.iter().any(|(name, _)| name == variable) {
            bail!("no run has a value of `{variable}`");
        }
        let with = |at: &Values| {
            let of = |(name, value): &(String, u64)| {
                let given = at.iter().find(|(given, _)| given == name);
                (name.clone(), given.map_or(*value, |(_, given)| *given))
            };
            base.iter().map(of).collect::<Values>()
        };
        let points = if self.asked.at.is_empty() {
            vec![base.clone()]
        } else {
            self.asked.at.iter().map(with).collect()
        };
        Ok(points)
    }

    /// What is predicted of the recorded setting, on every device or rank.
    fn ask(&self) -> anyhow::Result<Vec<Fit>> {
        let Asked { at, fit, machine, .. } = &*self.asked;
        let asked = Asked {
            at: at.clone(),
            fit: fit.clone(),
            machine: *machine,
            is_as_recorded: true,
            ..Asked::default()
        };
        match reply(self.runs, &asked)?.answer.process.fits {
            fits if !fits.is_empty() => Ok(fits),
            _ => bail!("the runs do not predict that value"),
        }
    }
}

/// The largest value that fits on all devices.
fn largest(found: &[Fit]) -> Option<u64> {
    found.iter().map(|fit| fit.largest).min().flatten()
}

/// Whether a value fits on all devices, as predicted.
fn fits(found: &[Fit], value: u64) -> bool {
    found.iter().all(|fit| fit.covers(value))
}
