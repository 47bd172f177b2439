//! What a kernel or a library asks for while it works, and gives back before anything else is asked for.
//!
//! Such memory does not follow from the sides of tensors: a library chooses another algorithm, and a kernel uses no more parts
//! of the GPU than there are.

use rustc_hash::FxHashSet;

use crate::ops::{AllocId, Frame, Op, OpStream};

/// What an allocation is for, as far as the requests and frees around it show.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Scratch {
    /// A tensor, for all that is known.
    No,
    /// Given back before anything else was asked for or given back.
    Workspace,
    /// The same, with counters of so many bytes asked for and given back in between: a sum in several parts (`sums`).
    Sum {
        /// Bytes.
        counters: u64,
        /// Bytes of what was asked for just before, which is what comes of the sum; 0 where nothing was.
        output: u64,
    },
}

/// For each allocation what it is for.
pub(super) fn scratch(stream: &OpStream) -> Vec<Scratch> {
    let mut found = vec![Scratch::No; stream.allocations.len()];
    let (mut last, mut known): ([Option<(AllocId, bool)>; 4], Option<AllocId>) = ([None; 4], None);
    for op in &stream.ops {
        let step = match op {
            Op::Alloc(id) => (*id, false),
            Op::FreeRequested(id) => (*id, true),
            Op::FreeCompleted(_) | Op::Trim | Op::ReleasePool(_) | Op::ChangePool(..) | Op::Oom(_) => {
                continue;
            }
        };
        if step.1 {
            let [first, before_that, before, just] = last;
            if just == Some((step.0, false)) {
                found[step.0.0 as usize] = Scratch::Workspace;
                known = Some(step.0);
            } else if let (Some((sum, false)), Some((counters, false)), Some((freed, true))) =
                (before_that, before, just)
                && (sum, counters, known) == (step.0, freed, Some(freed))
            {
                let requested = |id: AllocId| stream.allocation(id).requested;
                let output = first.filter(|(_, is_free)| !is_free).map_or(0, |(id, _)| requested(id));
                found[sum.0 as usize] = Scratch::Sum { counters: requested(counters), output };
            }
        }
        last = [last[1], last[2], last[3], Some(step)];
    }
    found
}

/// Whether a frame is of a convolution, and not of what converts, as `convert_frame` of torch.compile.
pub(super) fn is_of_convolution(frame: &Frame) -> bool {
    frame.name.to_ascii_lowercase().replace("convert", "").contains("conv")
}

/// Those without which the program goes on: where there is no room for a convolution's workspace, PyTorch takes another algorithm
/// (`AlgoIterator::try_all` in ATen/native/cudnn/Conv_v7.cpp, PyTorch 2.0 to 2.11).
pub(super) fn optional(stream: &OpStream, scratch: &[Scratch]) -> FxHashSet<AllocId> {
    let is_of_conv = stream.stacks.having(is_of_convolution);
    let is_optional = |(id, scratch): &(AllocId, &Scratch)| {
        let stack = stream.allocation(*id).stack;
        **scratch == Scratch::Workspace && is_of_conv.get(stack.0 as usize) == Some(&true)
    };
    (0..).map(AllocId).zip(scratch).filter(is_optional).map(|(id, _)| id).collect()
}

/// Whether a recorded run ended for lack of memory: a convolution that is refused its workspace takes another algorithm, and more is requested.
#[must_use]
pub fn ran_out(stream: &OpStream) -> bool {
    let of_conv = stream.stacks.having(is_of_convolution);
    let is_of_conv = |oom: u32| {
        let stack = stream.ooms[oom as usize].stack;
        of_conv.get(stack.0 as usize) == Some(&true)
    };
    let mut is_last = true;
    stream.ops.iter().rev().any(|op| match op {
        Op::Oom(oom) => is_last || !is_of_conv(*oom),
        Op::Alloc(_) => {
            is_last = false;
            false
        }
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Allocation, Builder, PoolIdx, StackId, StreamIdx};

    /// `a:100` asks for bytes, `a-` gives them back.
    fn of(text: &str) -> Vec<Scratch> {
        let (mut builder, mut ids) = (Builder::new(0), std::collections::HashMap::new());
        for word in text.split_whitespace() {
            match word.split_once(':') {
                Some((name, size)) => {
                    let (requested, pool) = (size.parse().unwrap(), PoolIdx::DEFAULT);
                    let allocation =
                        Allocation { requested, address: 0, stack: StackId(0), stream: StreamIdx(0), pool };
                    ids.insert(name, builder.alloc(allocation));
                }
                None => builder.op(Op::FreeRequested(ids[word.trim_end_matches('-')])),
            }
        }
        scratch(&builder.finish())
    }

    #[test]
    fn what_is_given_back_before_anything_else_happens_is_a_workspace() {
        assert_eq!(of("x:8 w:9 w- y:1 x-"), [Scratch::No, Scratch::Workspace, Scratch::No]);
        assert_eq!(of("x:8 y:9 x- y-"), [Scratch::No, Scratch::No]);
    }

    #[test]
    fn a_sum_in_parts_has_counters_inside() {
        let sum = |output| Scratch::Sum { counters: 64, output };
        assert_eq!(of("y:2 a:8 s:64 s- a-")[1..], [sum(2), Scratch::Workspace]);
        assert_eq!(of("y:2 x:9 x- a:8 s:64 s- a-")[2..], [sum(0), Scratch::Workspace]);
        assert_eq!(of("a:8 s:64 s- t:4 a- t-"), [Scratch::No, Scratch::Workspace, Scratch::No]);
    }
}
