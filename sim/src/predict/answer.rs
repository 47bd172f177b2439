//! What becomes of a prediction under an allocator, and how sure that is.

use super::{Prediction, Why};
use crate::ops::OpStream;
use crate::policies::OptionError;
use crate::simulator::Outcome;
use crate::whatif::{Answer, Laboratory, Question};

/// What is reserved does not always rise with what is asked for: a range reaches so much further than its ends.
const NOT_MONOTONOUS: f64 = 0.02;
/// An answer whose range is no wider is sure.
const SURE: f64 = 0.01;

/// What becomes of a prediction under an allocator.
#[derive(Clone, Debug)]
pub struct Forecast {
    /// Of the best guess.
    pub answer: Answer,
    /// The peak of reserved bytes, at least and at most.
    pub reserved: (u64, u64),
    /// The peak of allocated bytes, at least and at most.
    pub allocated: (u64, u64),
    /// Whether it fits at best and at worst.
    pub fits: (bool, bool),
    /// The runs decide it, to within 1 %.
    pub is_sure: bool,
}

impl Prediction {
    /// What becomes of it under an allocator.
    ///
    /// # Errors
    /// When there is no such policy or it does not understand its options.
    pub fn forecast(&self, question: &Question) -> Result<Forecast, OptionError> {
        let answer = Laboratory::of_prediction(&self.best).answer(question)?;
        let peaks = |outcome: &Outcome| (outcome.books.reserved.peak, outcome.books.allocated.peak);
        let (_, allocated) = peaks(&answer.outcome);
        let (mut reserved, mut allocated) = (answer.peak_reserved_range, (allocated, allocated));
        let mut fits = (answer.n_oom.0 < answer.n_oom.1, answer.n_oom.0 == 0);
        for stream in self.extremes.iter().flat_map(|it| [&it.0, &it.1]) {
            let outcome = guess(stream, question)?;
            let (most, in_use) = peaks(&outcome);
            reserved = (reserved.0.min(most), reserved.1.max(most));
            allocated = (allocated.0.min(in_use), allocated.1.max(in_use));
            fits = (fits.0 || outcome.fits(), fits.1 && outcome.fits());
        }
        let is_narrow = reserved.1 as f64 <= reserved.0 as f64 * (1.0 + SURE);
        let is_sure = is_narrow && self.is_lawful();
        if !is_sure {
            let factor = self.scatter * (1.0 + NOT_MONOTONOUS);
            let wider =
                |(low, high): (u64, u64)| ((low as f64 / factor) as u64, (high as f64 * factor) as u64);
            (reserved, allocated) = (wider(reserved), wider(allocated));
        }
        Ok(Forecast { answer, reserved, allocated, fits, is_sure })
    }

    /// No number of requests had to be extrapolated, and what is live at the peak follows laws.
    pub fn is_lawful(&self) -> bool {
        !self.open.iter().any(|open| open.why == Why::Number) && self.scatter <= 1.0 + SURE
    }

    /// Whether the best guess, the least and the most fit. For searches.
    ///
    /// # Errors
    /// As [`Prediction::forecast`].
    pub fn fits(&self, question: &Question) -> Result<(bool, bool, bool), OptionError> {
        let fits = |stream: &OpStream| Ok(guess(stream, question)?.fits());
        let best = fits(&self.best)?;
        match &self.extremes {
            None => Ok((best, best, best)),
            Some(extremes) => Ok((best, fits(&extremes.0)?, fits(&extremes.1)?)),
        }
    }
}

fn guess(stream: &OpStream, question: &Question) -> Result<Outcome, OptionError> {
    Laboratory::of_prediction(stream).guess(question)
}
