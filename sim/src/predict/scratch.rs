//! What a kernel or a library asks for while it works, and gives back before anything else is asked for.
//!
//! Such memory does not follow from the sides of tensors: a library chooses another algorithm, and a kernel uses no more parts
//! of the GPU than there are.

use crate::ops::{AllocId, Frame, Op, OpStream};

/// Bytes of what PyTorch's sums of 32 bits and fewer add up in: float.
const ACCUMULATED: u64 = 4;
/// Threads that a multiprocessor runs at a time, and of one block, before each handles several outputs: CUDA's compute
/// capabilities 8.0, 9.0 and 10.0, and MAX_NUM_THREADS in ATen/native/cuda/Reduce.cuh (PyTorch 2.0 to 2.11).
const THREADS_AT_A_TIME: u64 = 2048;
const THREADS_OF_A_BLOCK: u64 = 512;
/// Threads side by side, each for one, two or four outputs (`output_vec_size` there): as many outputs are of one block.
const SIDE_BY_SIDE: u64 = 32;
const OUTPUTS_OF_A_THREAD: [u64; 3] = [4, 2, 1];
/// Multiprocessors of a GPU: few, those of an H100 or H200, and more than any has so far. Traces do not say how many there are.
const MULTIPROCESSORS: (u64, u64, u64) = (40, 132, 192);

/// What an allocation is for, as far as the requests and frees around it show.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Scratch {
    /// A tensor, for all that is known.
    No,
    /// Given back before anything else was asked for or given back.
    Workspace,
    /// The same, with counters of so many bytes asked for and given back in between: a sum in several parts (Reduce.cuh).
    Sum(u64),
}

/// For each allocation what it is for.
pub(super) fn scratch(stream: &OpStream) -> Vec<Scratch> {
    let mut found = vec![Scratch::No; stream.allocations.len()];
    let (mut last, mut known): ([Option<(AllocId, bool)>; 3], Option<AllocId>) = ([None; 3], None);
    for op in &stream.ops {
        let step = match op {
            Op::Alloc(id) => (*id, false),
            Op::FreeRequested(id) => (*id, true),
            Op::FreeCompleted(_) | Op::Trim | Op::ReleasePool(_) | Op::ChangePool(..) | Op::Oom(_) => {
                continue;
            }
        };
        if step.1 {
            let [before_that, before, just] = last;
            if just == Some((step.0, false)) {
                found[step.0.0 as usize] = Scratch::Workspace;
                known = Some(step.0);
            } else if let (Some((sum, false)), Some((counters, false)), Some((freed, true))) =
                (before_that, before, just)
                && (sum, counters, known) == (step.0, freed, Some(freed))
            {
                found[sum.0 as usize] = Scratch::Sum(stream.allocation(counters).requested);
            }
        }
        last = [last[1], last[2], Some(step)];
    }
    found
}

/// Whether the program goes on without it: where there is no room for a convolution's workspace, PyTorch takes another algorithm
/// (`AlgoIterator::try_all` in ATen/native/cudnn/Conv_v7.cpp, PyTorch 2.0 to 2.11).
pub(super) fn is_optional(stream: &OpStream, id: AllocId, scratch: Scratch) -> bool {
    let of_conv = |frame: &Frame| frame.name.to_ascii_lowercase().contains("conv");
    scratch == Scratch::Workspace && stream.stacks.frames_of(stream.allocation(id).stack).any(of_conv)
}

/// How large a sum's parts are together where they fill the GPU, but no smaller than they were: at least, most likely, and at
/// most. None where the sizes are not those of Reduce.cuh: `parts × outputs × outputs of a block × 4`, with a counter for each
/// block of outputs.
pub(super) fn full(scratch: Scratch, sizes: &[u64]) -> Option<(u64, u64, u64)> {
    let Scratch::Sum(counters) = scratch else { return None };
    let (n_blocks, most) = (counters / 4, sizes.iter().max().copied()?);
    OUTPUTS_OF_A_THREAD.into_iter().find_map(|n_outputs| {
        let of_a_block = SIDE_BY_SIDE * n_outputs;
        let of_a_part = ACCUMULATED * n_blocks * of_a_block * of_a_block;
        let at_a_time = THREADS_AT_A_TIME / (THREADS_OF_A_BLOCK / n_outputs);
        let is_so = n_blocks > 0 && sizes.iter().all(|size| size.is_multiple_of(of_a_part));
        let full = |n: u64| (of_a_part * (n * at_a_time).div_ceil(n_blocks)).max(most);
        let (few, likely, many) = MULTIPROCESSORS;
        is_so.then(|| (full(few), full(likely), full(many)))
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
        assert_eq!(of("y:2 a:8 s:64 s- a-")[1..], [Scratch::Sum(64), Scratch::Workspace]);
        assert_eq!(of("a:8 s:64 s- t:4 a- t-"), [Scratch::No, Scratch::Workspace, Scratch::No]);
    }

    #[test]
    fn a_sum_grows_until_it_fills_the_gpu() {
        // Gradients of a bias of 2048 over 2048 and 4096 rows; over 16384 rows an H200 was asked for 138412032 bytes.
        let likely = |counters, sizes: &[u64]| Some(full(Scratch::Sum(counters), sizes)?.1);
        assert_eq!(likely(64, &[67_108_864, 33_554_432]), Some(138_412_032));
        // Of 384 outputs, over 1568 and 3136 rows.
        assert_eq!(likely(12, &[9_633_792, 4_915_200]), Some(138_412_032));
        assert_eq!(likely(64, &[1000]), None);
    }
}
