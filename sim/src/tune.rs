//! Settings of PyTorch's allocator: those that are worth a try, and the search for the one that reserves least.

use crate::cores::on_all_cores;
use crate::policies::OptionError;
use crate::policies::torch::{parse, profile};
use crate::simulator::Outcome;
use crate::whatif::{Answer, Laboratory, Question};

/// Options to try, each with each of the other rows.
const AXES: [&[&str]; 4] = [
    &["", "expandable_segments:True"],
    &[
        "",
        "max_split_size_mb:32",
        "max_split_size_mb:64",
        "max_split_size_mb:128",
        "max_split_size_mb:256",
        "max_split_size_mb:512",
    ],
    &["", "roundup_power2_divisions:4", "roundup_power2_divisions:8", "roundup_power2_divisions:16"],
    &[
        "",
        "garbage_collection_threshold:0.6",
        "garbage_collection_threshold:0.8",
        "large_segment_size_mb:12",
        "large_segment_size_mb:64",
    ],
];

/// What people are advised to set, one at a time, so that each answers for itself.
const ADVISED: [&str; 9] = [
    "expandable_segments:True",
    "max_split_size_mb:64",
    "max_split_size_mb:128",
    "max_split_size_mb:256",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:8",
    "garbage_collection_threshold:0.8",
    "expandable_segments:True,roundup_power2_divisions:8",
];

/// Most settings that are looked at again at other addresses.
const MOST_ANSWERED: usize = 12;

/// Every combination of options that a release accepts. Collection does nothing without a limit, and is left out there.
///
/// # Errors
/// When the release was not measured.
pub fn combinations(version: (u8, u8), has_limit: bool) -> Result<Vec<String>, OptionError> {
    let mut all = vec![String::new()];
    for axis in AXES {
        let with = |start: &String| axis.iter().map(|option| joined(start, option)).collect::<Vec<_>>();
        all = all.iter().flat_map(with).collect();
    }
    all.retain(|options| has_limit || !options.contains("garbage_collection"));
    accepted(version, all)
}

/// What was set, and then what people are advised to set, as far as a release accepts it.
///
/// # Errors
/// When the release was not measured.
pub fn advised(version: (u8, u8), recorded: &str) -> Result<Vec<String>, OptionError> {
    let others = ADVISED.into_iter().filter(|options| *options != recorded);
    accepted(version, std::iter::once(recorded).chain(others).map(str::to_owned).collect())
}

fn joined(start: &str, option: &str) -> String {
    match (start, option) {
        (one, "") | ("", one) => one.to_owned(),
        (start, option) => format!("{start},{option}"),
    }
}

fn accepted(version: (u8, u8), mut settings: Vec<String>) -> Result<Vec<String>, OptionError> {
    let profile = profile(version).ok_or_else(|| {
        let (major, minor) = version;
        OptionError(format!("PyTorch {major}.{minor} was not measured; name another --torch-version"))
    })?;
    settings.retain(|options| parse(options, profile).is_ok());
    Ok(settings)
}

/// A setting that was simulated, at one guess of the addresses.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The options.
    pub options: String,
    /// What came of them.
    pub outcome: Outcome,
}

impl Candidate {
    /// Smaller is better: finish at all, reserve little, call the driver rarely, set few options.
    fn rank(&self) -> (bool, u64, u64, usize) {
        let books = self.outcome.books;
        let n_options = self.options.split(',').filter(|option| !option.is_empty()).count();
        (!self.outcome.fits(), books.reserved.peak, books.n_device_alloc, n_options)
    }

    fn n_calls(&self) -> u64 {
        self.outcome.books.n_device_alloc + self.outcome.books.n_device_free
    }
}

/// What a search found.
#[derive(Clone, Debug)]
pub struct Found {
    /// The setting with the smallest peak that is sure.
    pub options: String,
    /// What comes of it.
    pub answer: Answer,
    /// Settings that no other beats in both peak and driver calls, smallest peak first.
    pub pareto: Vec<Candidate>,
    /// Settings that were simulated.
    pub n_tried: usize,
}

/// Simulates all settings on all cores, and the best of them at other addresses too. None where none could be simulated.
///
/// # Errors
/// When the policy does not understand a setting.
pub fn search(
    laboratory: &Laboratory,
    settings: &[String],
    question: impl Fn(&str) -> Question + Sync,
) -> Result<Option<Found>, OptionError> {
    let mut candidates = on_all_cores(settings.len(), |index| {
        let options = settings.get(index)?;
        let outcome = laboratory.guess(&question(options)).ok()?;
        Some(Candidate { options: options.clone(), outcome })
    });
    candidates.sort_by(|one, other| one.options.cmp(&other.options));
    candidates.sort_by_key(Candidate::rank);
    let best = best(laboratory, &candidates, question)?;
    let n_tried = candidates.len();
    Ok(best.map(|(options, answer)| Found { options, answer, pareto: pareto(candidates), n_tried }))
}

fn best(
    laboratory: &Laboratory,
    candidates: &[Candidate],
    question: impl Fn(&str) -> Question,
) -> Result<Option<(String, Answer)>, OptionError> {
    let at_worst =
        |answer: &Answer| (answer.n_oom.0 > 0 || !answer.outcome.fits(), answer.peak_reserved_range.1);
    let mut best: Option<(String, Answer)> = None;
    for Candidate { options, outcome } in candidates.iter().take(MOST_ANSWERED) {
        let known = best.as_ref().map(|(_, answer)| at_worst(answer));
        if known.is_some_and(|known| known <= (!outcome.fits(), outcome.books.reserved.peak)) {
            break;
        }
        let answer = laboratory.answer(&question(options))?;
        if known.is_none_or(|known| at_worst(&answer) < known) {
            best = Some((options.clone(), answer));
        }
    }
    Ok(best)
}

/// Of candidates that rise in peak, those that call the driver less than all before.
fn pareto(candidates: Vec<Candidate>) -> Vec<Candidate> {
    let mut fewest = u64::MAX;
    let mut kept = Vec::new();
    for candidate in candidates.into_iter().filter(|candidate| candidate.outcome.fits()) {
        if candidate.n_calls() < fewest {
            fewest = candidate.n_calls();
            kept.push(candidate);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policies::torch::NEWEST;

    #[test]
    fn what_is_advised_is_among_what_is_searched() {
        let searched = combinations(NEWEST, true).unwrap();
        for options in advised(NEWEST, "").unwrap() {
            assert!(searched.contains(&options), "{options}");
        }
    }

    #[test]
    fn what_was_set_comes_first_and_once_and_what_a_release_does_not_know_is_left_out() {
        let settings = advised(NEWEST, "max_split_size_mb:64").unwrap();
        assert_eq!(settings.len(), ADVISED.len());
        assert_eq!(settings[..2], ["max_split_size_mb:64", "expandable_segments:True"]);
        assert_eq!(advised(NEWEST, "no_such:1").unwrap(), ADVISED);
    }

    #[test]
    fn a_release_that_was_not_measured_is_said_to_be() {
        let wrong = combinations((1, 0), true).unwrap_err();
        assert_eq!(wrong.0, "PyTorch 1.0 was not measured; name another --torch-version");
    }
}
