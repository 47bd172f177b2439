//! Requests that a program survives when they fail: the workspaces of convolutions.
//!
//! PyTorch returns what it has cached, requests again, fails, and takes another algorithm for that convolution. It remembers what worked, and
//! takes that whenever the convolution is made again (`run_single_conv` and `try_configs` in ATen/native/cudnn/Conv_v8.cpp, `AlgoIterator::try_all`
//! in Conv_v7.cpp, PyTorch 2.0 to 2.11).

use std::ops::ControlFlow;

use rustc_hash::{FxHashMap, FxHashSet};

use super::convolutions::Pass;
use super::scratch::{is_of_convolution, optional, scratch};
use crate::ops::{AllocId, Op, OpStream};
use crate::simulator::{Observer, Outcome};
use crate::whatif::{Laboratory, Question};

/// A convolution is known by its workspace's size and by its pass; that the other algorithm needs none is the best case.
pub(super) struct Without<'a> {
    stream: &'a OpStream,
    optional: &'a FxHashMap<AllocId, Pass>,
    /// Sizes that were, each in one pass.
    refused: FxHashSet<(u64, Pass)>,
    /// Requests that are not served.
    n_missing: u64,
}

impl<'a> Without<'a> {
    /// Nothing has failed yet.
    pub(super) fn new(stream: &'a OpStream, optional: &'a FxHashMap<AllocId, Pass>) -> Without<'a> {
        Without { stream, optional, refused: FxHashSet::default(), n_missing: 0 }
    }
}

impl Observer for Without<'_> {
    fn asks(&mut self, id: AllocId) -> bool {
        let is_refused = |pass: &Pass| self.refused.contains(&(self.stream.allocation(id).requested, *pass));
        let asks = self.refused.is_empty() || !self.optional.get(&id).is_some_and(is_refused);
        self.n_missing += u64::from(!asks);
        asks
    }

    fn refused(&mut self, id: AllocId) -> ControlFlow<()> {
        let Some(pass) = self.optional.get(&id) else { return ControlFlow::Break(()) };
        self.refused.insert((self.stream.allocation(id).requested, *pass));
        self.n_missing += 1;
        ControlFlow::Continue(())
    }
}

impl Laboratory<'_> {
    /// Of a question whose best guess ran out of memory: how many workspaces of convolutions would be missing if everything else is served
    /// without them. None if it is not, or if the request that failed first was for something else.
    pub fn workspaces_missing(&self, question: &Question, outcome: &Outcome) -> Option<u64> {
        let stream = self.stream();
        let failed = outcome.oom.as_ref().filter(|_| outcome.is_cut_short)?;
        let Some(Op::Alloc(failed)) = stream.ops.get(failed.op) else { return None };
        // Most requests that fail are for something else, which their stack shows at once.
        if stream.stacks.having(is_of_convolution).get(stream.allocation(*failed).stack.0 as usize)
            != Some(&true)
        {
            return None;
        }
        let optional: FxHashMap<AllocId, Pass> =
            optional(stream, &scratch(stream)).into_iter().map(|id| (id, Pass::Any)).collect();
        optional.get(failed)?;
        let mut without = Without::new(stream, &optional);
        let outcome = self.guess_watched(question, &mut without).ok()?;
        outcome.fits().then_some(without.n_missing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Allocation, Builder, PoolIdx, StackId, StreamIdx};
    use crate::stacks::{Frame, Stacks};

    const MIB: u64 = 1 << 20;

    /// Two steps of 60 MiB, a workspace of 300 for a function of that name, and 30 more.
    fn of(function: &str) -> OpStream {
        let frame = |name: &str| Frame { name: name.into(), file: "train.py".into(), line: 1 };
        let (frames, lists) = (vec![frame("step"), frame(function)], vec![[0].into(), [1, 0].into()]);
        let mut builder = Builder::new(0);
        let alloc = |builder: &mut Builder, mib: u64, stack| {
            let (stack, stream, pool) = (StackId(stack), StreamIdx(0), PoolIdx::DEFAULT);
            builder.alloc(Allocation { requested: mib * MIB, address: 0, stack, stream, pool })
        };
        for _ in 0..2 {
            let tensor = alloc(&mut builder, 60, 0);
            let workspace = alloc(&mut builder, 300, 1);
            let free = |builder: &mut Builder, id| {
                builder.op(Op::FreeRequested(id));
                builder.op(Op::FreeCompleted(id));
            };
            free(&mut builder, workspace);
            let output = alloc(&mut builder, 30, 0);
            free(&mut builder, tensor);
            free(&mut builder, output);
        }
        let mut stream = builder.finish();
        stream.stacks = Stacks { frames, lists, ..Stacks::default() }.into();
        stream
    }

    /// Whether it fits, and how many workspaces would be missing if not.
    fn fits(function: &str, limit_mib: u64) -> (bool, Option<u64>) {
        let stream = of(function);
        let question = Question { limit: Some(limit_mib * MIB), ..Question::torch((2, 11), "") };
        let laboratory = Laboratory::new(&stream).unwrap();
        let outcome = laboratory.guess(&question).unwrap();
        (outcome.fits(), laboratory.workspaces_missing(&question, &outcome))
    }

    #[test]
    fn a_program_goes_on_without_the_workspaces_of_its_convolutions() {
        assert_eq!(fits("Conv2d._conv_forward", 400), (true, None));
        assert_eq!(fits("Conv2d._conv_forward", 200), (false, Some(2)));
        assert_eq!(fits("Linear.forward", 200), (false, None));
    }

    #[test]
    fn it_does_not_where_something_else_has_no_room() {
        assert_eq!(fits("Conv2d._conv_forward", 70), (false, None));
        assert_eq!(fits("Conv2d._conv_forward", 50), (false, None));
    }
}
