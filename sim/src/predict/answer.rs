//! What becomes of a prediction under an allocator, and how sure that is.

use super::{Open, Prediction, Why};
use crate::cores::on_all_cores;
use crate::ops::{AllocId, Op, OpStream};
use crate::policies::OptionError;
use crate::simulator::Outcome;
use crate::whatif::{Answer, Laboratory, Question};

/// What is reserved does not always rise with what is asked for: a range reaches so much further than its ends.
const NOT_MONOTONOUS: f64 = 0.02;
/// The same where libraries choose workspaces: which hole one leaves hangs on all before it, and at another size they choose
/// others. The largest that any of 35 programs on an H200 needed is 10.6 % (`tests/gpu/predict.py --again`); chosen without one
/// program and held against it, it holds for 34 of them.
const CHOSEN_WORKSPACES: f64 = 0.11;
/// An answer whose range is no wider is sure.
const SURE: f64 = 0.01;

/// So often the largest workspaces are left out, and what is left is tried again. Chosen and not measured.
const MOST_WITHOUT: usize = 6;

/// What becomes of a prediction under an allocator.
#[derive(Clone, Debug)]
pub struct Forecast {
    /// Of the best guess.
    pub answer: Answer,
    /// The peak of reserved bytes, at least and at most.
    pub reserved: (u64, u64),
    /// The peak of allocated bytes, at least and at most.
    pub allocated: (u64, u64),
    /// The smallest and the largest peak of reserved bytes that a replay had: the range without what it is wider for.
    pub replayed: (u64, u64),
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
        for outcome in on_all_cores(self.others.len(), |index| Some(guess(&self.others[index], question))) {
            let outcome = outcome?;
            let (most, in_use) = peaks(&outcome);
            reserved = (reserved.0.min(most), reserved.1.max(most));
            allocated = (allocated.0.min(in_use), allocated.1.max(in_use));
            fits = (fits.0 || outcome.fits(), fits.1 && outcome.fits());
        }
        let replayed = reserved;
        let is_narrow = reserved.1 as f64 <= reserved.0 as f64 * (1.0 + SURE);
        let is_sure = is_narrow && self.is_lawful();
        if !is_sure {
            let further =
                if self.open.iter().any(Open::is_chosen) { CHOSEN_WORKSPACES } else { NOT_MONOTONOUS };
            let factor = self.scatter * (1.0 + further);
            let wider =
                |(low, high): (u64, u64)| ((low as f64 / factor) as u64, (high as f64 * factor) as u64);
            (reserved, allocated) = (wider(reserved), wider(allocated));
        }
        Ok(Forecast { answer, reserved, allocated, replayed, fits, is_sure })
    }

    /// No number of requests had to be extrapolated, and what is live at the peak follows laws.
    pub fn is_lawful(&self) -> bool {
        !self.open.iter().any(|open| open.why == Why::Number) && self.scatter <= 1.0 + SURE
    }

    /// Whether the best guess fits, any that the runs allow, and all of them. For searches.
    ///
    /// # Errors
    /// As [`Prediction::forecast`].
    pub fn fits(&self, question: &Question) -> Result<(bool, bool, bool), OptionError> {
        let fits = |stream: &OpStream| Ok(guess(stream, question)?.fits());
        let best = self.goes_on(&self.best, question)?;
        let (mut least, mut most) = (best, fits(&self.best)?);
        for stream in &self.others {
            least = least || self.goes_on(stream, question)?;
            most = most && fits(stream)?;
        }
        Ok((best, least, most))
    }

    /// Whether it fits, without the workspaces for which there is no room if need be.
    fn goes_on(&self, stream: &OpStream, question: &Question) -> Result<bool, OptionError> {
        let mut without = None;
        for _ in 0..MOST_WITHOUT {
            let stream = without.as_ref().unwrap_or(stream);
            let Some(oom) = guess(stream, question)?.oom else { return Ok(true) };
            let refused = match stream.ops[oom.op] {
                Op::Alloc(id) if self.optional.contains(&id) => stream.allocation(id).requested,
                _ => return Ok(false),
            };
            let is_left =
                |id: AllocId| stream.allocation(id).requested < refused || !self.optional.contains(&id);
            let mut less = stream.clone();
            less.ops.retain(|op| match *op {
                Op::Alloc(id) | Op::FreeRequested(id) | Op::FreeCompleted(id) => is_left(id),
                Op::Trim | Op::ReleasePool(_) | Op::ChangePool(..) | Op::Oom(_) => true,
            });
            without = Some(less);
        }
        Ok(false)
    }
}

fn guess(stream: &OpStream, question: &Question) -> Result<Outcome, OptionError> {
    Laboratory::of_prediction(stream).guess(question)
}
