//! What a kernel or a library asks for while it works, and gives back before anything else is asked for.
//!
//! Such memory does not follow from the sides of tensors: a library chooses another algorithm, and a kernel uses no more parts
//! of the GPU than there are.

use rustc_hash::{FxHashMap, FxHashSet};

use super::align::greatest_common_divisor;
use super::gpus::Threads;
use crate::ops::{AllocId, Frame, Op, OpStream, StackId};

/// Bytes of what PyTorch's sums of 32 bits and fewer add up in: float.
const ACCUMULATED: u64 = 4;
/// Threads of one block, before each handles several outputs: MAX_NUM_THREADS in ATen/native/cuda/Reduce.cuh (PyTorch 2.0 to 2.11).
const THREADS_OF_A_BLOCK: u64 = 512;
/// A thread adds up so many times more values at most than at least (`max_values_per_thread` and `min_values_per_thread` there):
/// when the GPU is full and threads have that many, there are more parts again.
pub(super) const MOST_OF_LEAST: u64 = 256 / 16;
/// Threads side by side, each for one, two or four outputs (`output_vec_size` there): as many outputs are of one block.
const SIDE_BY_SIDE: u64 = 32;
const OUTPUTS_OF_A_THREAD: [u64; 3] = [4, 2, 1];
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

/// Those without which the program goes on: where there is no room for a convolution's workspace, PyTorch takes another algorithm
/// (`AlgoIterator::try_all` in ATen/native/cudnn/Conv_v7.cpp, PyTorch 2.0 to 2.11).
pub(super) fn optional(stream: &OpStream, scratch: &[Scratch]) -> FxHashSet<AllocId> {
    // Not what converts, as `convert_frame` of torch.compile.
    let of_conv = |frame: &Frame| frame.name.to_ascii_lowercase().replace("convert", "").contains("conv");
    let mut known: FxHashMap<StackId, bool> = FxHashMap::default();
    let mut is_of_conv =
        |stack: StackId| *known.entry(stack).or_insert_with(|| stream.stacks.frames_of(stack).any(of_conv));
    let all = (0..).map(AllocId).zip(&stream.allocations).zip(scratch);
    let workspaces = all.filter(|(_, scratch)| **scratch == Scratch::Workspace);
    workspaces.filter(|((_, allocation), _)| is_of_conv(allocation.stack)).map(|((id, _), _)| id).collect()
}

/// How large a sum's parts are together where they fill a GPU that runs so many threads at a time, but no smaller than they were: at
/// least, most likely, and at most. None where the sizes are not those of Reduce.cuh: `parts × outputs × outputs of a block × 4`,
/// with a counter for each block of outputs, of which the last may have fewer.
pub(super) fn full(scratch: Scratch, sizes: &[u64], threads: Threads) -> Option<(u64, u64, u64)> {
    let Scratch::Sum(counters) = scratch else { return None };
    let (n_blocks, most) = (counters / 4, sizes.iter().max().copied()?);
    let full = |n_outputs: u64, outputs: u64| {
        let of_a_part = ACCUMULATED * outputs * SIDE_BY_SIDE * n_outputs;
        let of_a_block = THREADS_OF_A_BLOCK / n_outputs;
        let full = |threads: u64| (of_a_part * (threads / of_a_block).div_ceil(n_blocks)).max(most);
        (full(threads.least), full(threads.likely), full(threads.most))
    };
    let whole = |n_outputs: u64| {
        let outputs = n_blocks * SIDE_BY_SIDE * n_outputs;
        let of_a_part = ACCUMULATED * outputs * SIDE_BY_SIDE * n_outputs;
        let is_so = n_blocks > 0 && sizes.iter().all(|size| size.is_multiple_of(of_a_part));
        is_so.then(|| full(n_outputs, outputs))
    };
    let with_fewer = |n_outputs: u64| {
        let of_a_block = SIDE_BY_SIDE * n_outputs;
        let of_an_output = ACCUMULATED * of_a_block;
        if n_blocks == 0 || !sizes.iter().all(|size| size.is_multiple_of(of_an_output)) {
            return None;
        }
        let all = sizes.iter().map(|size| size / of_an_output).fold(0, greatest_common_divisor);
        let outputs = (n_blocks - 1) * of_a_block + 1..n_blocks * of_a_block;
        let is_possible = |outputs: &u64| outputs.is_multiple_of(n_outputs) && all.is_multiple_of(*outputs);
        outputs.rev().find(is_possible).map(|outputs| full(n_outputs, outputs))
    };
    let whole = OUTPUTS_OF_A_THREAD.into_iter().find_map(whole);
    whole.or_else(|| OUTPUTS_OF_A_THREAD.into_iter().find_map(with_fewer))
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
        let likely =
            |counters, sizes: &[u64]| Some(full(Scratch::Sum(counters), sizes, Threads::default())?.1);
        assert_eq!(likely(64, &[67_108_864, 33_554_432]), Some(138_412_032));
        // Of 384 outputs, over 1568 and 3136 rows.
        assert_eq!(likely(12, &[9_633_792, 4_915_200]), Some(138_412_032));
        // Of 1344 outputs, which are ten blocks and a half: over 32768 and 64000 rows an H100 was asked for as many bytes.
        assert_eq!(likely(44, &[44_040_192, 22_020_096]), Some(132_120_576));
        // Of 864, over 2320 and 4640 rows: parts are whole.
        assert_eq!(likely(28, &[32_292_864, 16_367_616]), Some(133_595_136));
        assert_eq!(likely(64, &[1000]), None);
    }
}
