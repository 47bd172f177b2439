//! The largest value that fits, found by running: what is predicted says where to look, and two runs prove it.

use std::collections::BTreeMap;

/// The first step down from a value that was predicted to fit and did not, as a part of it; each next one is twice as long. Chosen: half of the
/// predictions that were not exact for programs on an H100 were less than this off, and a run there decides what the rest asks for.
const FIRST_STEP: f64 = 0.02;

/// After so many runs predictions have not helped: the rest is bisected. Chosen: of 28 programs on an H100 none needed more.
const MOST_GUIDED: usize = 8;

/// Values of one variable that were run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    tried: BTreeMap<u64, bool>,
    n_failed_in_a_row: u32,
    /// The value that runs next is larger than was predicted to fit.
    is_beyond: bool,
    /// So many in a row that were fit.
    n_beyond: u32,
    n_runs: usize,
}

impl Checked {
    /// What is known before: a value that was recorded, and runs.
    #[must_use]
    pub fn from(recorded: u64) -> Checked {
        Checked { tried: BTreeMap::from([(recorded, true)]), ..Checked::default() }
    }

    /// A value was run.
    pub fn add(&mut self, value: u64, fits: bool) {
        self.tried.insert(value, fits);
        self.n_runs += 1;
        self.n_failed_in_a_row = if fits { 0 } else { self.n_failed_in_a_row + 1 };
        self.n_beyond = if fits && self.is_beyond { self.n_beyond + 1 } else { 0 };
    }

    /// The smallest value that was run and did not fit.
    fn too_large(&self) -> Option<u64> {
        self.tried.iter().find(|(_, fits)| !**fits).map(|(value, _)| *value)
    }

    /// The largest value that was run and fits, of those below all that do not.
    #[must_use]
    pub fn largest(&self) -> Option<u64> {
        let below = self.too_large().unwrap_or(u64::MAX);
        self.tried.range(..below).next_back().map(|(value, _)| *value)
    }

    /// The largest was run, and so was the next, which does not fit.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        match (self.largest(), self.too_large()) {
            (Some(largest), Some(above)) => largest + 1 == above,
            (None, Some(above)) => above == 1,
            _ => false,
        }
    }

    /// How many values were run.
    #[must_use]
    pub fn n_runs(&self) -> usize {
        self.n_runs
    }

    /// The values that were run or recorded, ascending, and whether they fit.
    pub fn values(&self) -> impl Iterator<Item = (u64, bool)> + '_ {
        self.tried.iter().map(|(value, fits)| (*value, *fits))
    }

    /// The value to run next, where so much is predicted from all runs; none where nothing is left to know.
    pub fn next(&mut self, predicted: Option<u64>) -> Option<u64> {
        let fits = self.largest().unwrap_or(0);
        let double = |n: u32| 2_u64.saturating_pow(n);
        self.is_beyond = predicted.unwrap_or(0) <= fits;
        // The next one is run, too: only that proves it. Where it fits against what is predicted, further and further ones.
        let from_below = predicted.unwrap_or(0).max(fits.saturating_add(double(self.n_beyond)));
        let Some(above) = self.too_large() else { return Some(from_below) };
        if above <= fits + 1 {
            return None;
        }
        let (least, most) = (fits + 1, above - 1);
        let step = match self.n_failed_in_a_row {
            0 => 1,
            n => ((above as f64 * FIRST_STEP).ceil() as u64).saturating_mul(double(n - 1)),
        };
        // Never further than bisecting would go.
        let middle = least + (most - least) / 2;
        let from_above = above.saturating_sub(step).max(middle).min(most);
        Some(if self.n_runs < MOST_GUIDED { from_below.clamp(least, from_above) } else { middle })
    }

    /// The findings, in a sentence.
    #[must_use]
    pub fn words(&self, variable: &str) -> String {
        let runs = if self.n_runs == 1 { "1 run".to_owned() } else { format!("{} runs", self.n_runs) };
        match (self.largest(), self.too_large()) {
            (Some(largest), Some(above)) if self.is_exact() => {
                format!("{variable}={largest} ran, and {variable}={above} did not: found by {runs}")
            }
            (Some(largest), Some(above)) => format!(
                "{variable}={largest} ran, and {variable}={above} did not; values between were not tried in {runs} (--most-runs)"
            ),
            (Some(largest), None) => {
                format!("{variable}={largest} ran; no larger value was tried in {runs} (--most-runs)")
            }
            (None, Some(above)) => format!("not even {variable}={above} ran"),
            (None, None) => "nothing was run".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs until nothing is left to know: what was found, and how many runs it took.
    fn find(recorded: u64, truth: u64, predict: impl Fn(u64) -> u64) -> (Option<u64>, usize) {
        let mut checked = Checked::from(recorded);
        while let Some(value) = checked.next(Some(predict(checked.largest().unwrap()))) {
            assert!(checked.n_runs() < 60, "it does not end");
            assert_eq!(checked.values().filter(|(known, _)| *known == value).count(), 0, "{value} again");
            checked.add(value, value <= truth);
        }
        assert!(checked.is_exact());
        (checked.largest(), checked.n_runs())
    }

    #[test]
    fn a_prediction_that_is_right_takes_two_runs() {
        assert_eq!(find(16, 295, |_| 295), (Some(295), 2));
        // Nothing above what was recorded fits.
        assert_eq!(find(16, 16, |_| 16), (Some(16), 1));
    }

    #[test]
    fn a_prediction_that_is_wrong_is_put_right_by_a_run_near_it() {
        // Right from a run that is no further than 6 % away.
        let from_near =
            |truth: u64, wrong: u64| move |fits: u64| if fits * 106 > truth * 100 { truth } else { wrong };
        assert_eq!(find(16, 295, from_near(295, 297)), (Some(295), 4));
        assert_eq!(find(16, 282, from_near(282, 297)), (Some(282), 5));
        assert_eq!(find(16, 337, from_near(337, 330)), (Some(337), 3));
        assert_eq!(find(16, 144, from_near(144, 152)).0, Some(144));
    }

    #[test]
    fn whatever_is_predicted_it_is_found() {
        for truth in [9, 10, 31, 100, 1000] {
            for wrong in [1, 9, 64, 5000] {
                let (found, n_runs) = find(8, truth, |_| wrong);
                assert_eq!(found, Some(truth), "{wrong}");
                assert!(
                    n_runs <= MOST_GUIDED + 4 + truth.max(wrong).ilog2() as usize,
                    "{truth} {wrong} {n_runs}"
                );
            }
        }
    }

    #[test]
    fn what_was_not_tried_is_told() {
        let mut checked = Checked::from(8);
        assert_eq!(checked.words("batch"), "batch=8 ran; no larger value was tried in 0 runs (--most-runs)");
        checked.add(40, false);
        assert!(!checked.is_exact());
        assert!(checked.words("batch").contains("values between were not tried in 1 run"));
        checked.add(39, true);
        assert_eq!(checked.words("batch"), "batch=39 ran, and batch=40 did not: found by 2 runs");
    }
}
