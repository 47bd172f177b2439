//! What else a program may ask for at a point, beside the best guess.
//!
//! What data decide, or a law that two products allow, is for all requests alike: it is the least for all, or the most. Libraries choose each
//! workspace for itself, and where one is large, another is small: such are drawn, each its own, and the least or the most of all would be
//! further apart than anything is.

use std::borrow::Cow;
use std::hash::{Hash, Hasher};

use super::law::Fit;
use super::live::Growth;
use super::{Model, Open, Prediction, is_chosen};
use crate::effort;
use crate::ops::OpStream;
use crate::policies::OptionError;

/// So many are replayed where libraries choose, the least and the most of what is common among them: what is reserved hangs on which workspaces are
/// larger than which. Of 153 answers about programs on an H100 151 lay inside with four drawn, and all with sixteen, in ranges that were a
/// twentieth wider.
const MOST_OTHERS: usize = 6;
/// The same of long runs, each of which takes a second's part to replay: of 372 answers 371 lie inside with four.
const OTHERS_OF_LONG: usize = 4;

/// What else may be asked for, of which each is as large as the recorded run, and is therefore made when it is looked at.
pub(super) struct Others<'a> {
    model: &'a Model<'a>,
    which: Vec<Which>,
    /// What may be asked for: the least, the best guess, the most, for each fit.
    sizes: Vec<(u64, u64, u64)>,
    /// The same without what libraries choose.
    common: Vec<(u64, u64, u64)>,
    growth: Vec<Growth>,
}

impl<'a> Others<'a> {
    pub(super) fn new(
        model: &'a Model<'a>,
        open: &[Open],
        sizes: Vec<(u64, u64, u64)>,
        growth: Vec<Growth>,
    ) -> Others<'a> {
        // Where one law of several holds, it does for all workspaces, too.
        let of = |((size, is_workspace), fit): ((&(u64, u64, u64), &bool), &Fit)| {
            if *is_workspace && is_chosen(fit.standing) { (size.1, size.1, size.1) } else { *size }
        };
        let common: Vec<_> = sizes.iter().zip(&model.is_workspace).zip(&model.fits).map(of).collect();
        let is_common = common.iter().any(|(low, _, high)| low < high)
            || !growth.is_empty()
            || model.others.iter().any(Option::is_some);
        let ends: &[Which] = if is_common { &[Which::Low, Which::High] } else { &[] };
        let is_long = !effort::DRAWS.covers(model.base().stream.allocations.len());
        let most = if is_long { OTHERS_OF_LONG } else { MOST_OTHERS };
        let n_any = if open.iter().any(Open::is_chosen) { most - ends.len() } else { 0 };
        let any = (0..n_any as u64).map(Which::Any);
        let which = if open.is_empty() { vec![] } else { ends.iter().copied().chain(any).collect() };
        Others { model, which, sizes, common, growth }
    }
}

impl Prediction<'_> {
    /// Bytes that it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(&self.best.ops[..]) + size_of_val(&self.best.allocations[..])
    }

    pub(super) fn n_others(&self) -> usize {
        self.others.as_ref().map_or(0, |others| others.which.len())
    }

    /// One of what else may be asked for; the best guess where there is no such.
    pub(super) fn other(&self, index: usize) -> Result<Cow<'_, OpStream>, OptionError> {
        let one = self.others.as_ref().and_then(|others| Some((others, *others.which.get(index)?)));
        let Some((Others { model, sizes, common, growth, .. }, which)) = one else {
            return Ok(Cow::Borrowed(&self.best));
        };
        let sizes = if matches!(which, Which::Any(_)) { sizes } else { common };
        let stream = model.stream(which, sizes, growth, &self.known.at);
        stream.map(Cow::Owned).map_err(|why| OptionError(why.to_string()))
    }
}

/// Which of the sizes that the runs allow.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    Low,
    Best,
    High,
    /// Each request's its own, by a number that says which.
    Any(u64),
}

impl Which {
    /// Of what has this number.
    pub(super) fn of(self, number: usize, (low, best, high): (u64, u64, u64)) -> u64 {
        match self {
            Which::Low => low,
            Which::Best => best,
            Which::High => high,
            Which::Any(of_all) => {
                // As much lower as higher: sizes go over orders of magnitude.
                let least = low.max(1) as f64;
                (least * (high.max(1) as f64 / least).powf(by_chance(of_all, number))) as u64
            }
        }
    }

    /// Whether what has this number and was in no run is there.
    pub(super) fn has_missing(self, number: usize) -> bool {
        match self {
            Which::Low | Which::Best | Which::High => true,
            Which::Any(of_all) => by_chance(of_all, number) < 0.5,
        }
    }
}

/// From 0 to 1, always the same for the same numbers.
fn by_chance(of_all: u64, number: usize) -> f64 {
    let mut hasher = rustc_hash::FxHasher::default();
    (of_all, number, 0x9e37_79b9_7f4a_7c15_u64).hash(&mut hasher);
    (hasher.finish() >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::super::{Model, Run};
    use crate::ops::{Allocation, Builder, Op, OpStream, PoolIdx, StackId, StreamIdx};

    /// Asks for a tensor, and then for a workspace that is given back.
    fn run(tensor: u64, workspace: u64) -> OpStream {
        let mut builder = Builder::new(0);
        let mut ask = |requested| {
            let (stack, stream, pool) = (StackId(0), StreamIdx(0), PoolIdx::DEFAULT);
            let id = builder.alloc(Allocation { requested, address: 0, stack, stream, pool });
            (requested == workspace)
                .then(|| [Op::FreeRequested(id), Op::FreeCompleted(id)].map(|op| builder.op(op)));
        };
        ask(tensor);
        ask(workspace);
        builder.finish()
    }

    #[test]
    fn a_workspace_of_which_one_law_of_two_holds_is_replayed_at_both_ends() {
        // Both variables are doubled at once: what grew with one of them, or with which, is not known.
        let (small, large) = (run(4096, 1000), run(8192, 2000));
        let runs = vec![Run { at: vec![8, 8], stream: &small }, Run { at: vec![16, 16], stream: &large }];
        let model = Model::of(runs).unwrap();
        let prediction = model.predict(&[64, 16]).unwrap();
        let workspace = |index| {
            let stream = prediction.other(index).unwrap();
            stream.allocations.iter().map(|it| it.requested).nth(1).unwrap()
        };
        assert_eq!((prediction.n_others(), workspace(0), workspace(1)), (2, 2000, 8000));
    }
}
