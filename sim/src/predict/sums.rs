//! What PyTorch's sums ask for: where each thread would have many values to add up, they are in parts, on blocks of threads of their own
//! (ATen/native/cuda/Reduce.cuh, PyTorch 2.0 to 2.11).
//!
//! How many parts there are follows from how many outputs there are, how many values each is the sum of, and how many threads the GPU
//! runs at a time. The output is asked for just before, and what is summed is a tensor that is live then: the one of which the rules
//! give what every run was asked for.
//!
//! ```text
//!   960 outputs, 145 rows a sample, 132 multiprocessors, of which 264 parts fill all
//!   batch 16    37 parts   17.3 MiB
//!   batch 32    73 parts   34.2 MiB
//!   batch 288  264 parts  123.8 MiB
//! ```

use rustc_hash::FxHashMap;

use super::align::greatest_common_divisor;
use super::gpus::Threads;
use super::law::Standing;
use super::live::when_first_asked;
use super::scratch::Scratch;
use super::{Alike, Model};
use crate::ops::{AllocId, Allocation, Frame, Op, OpStream};

/// Bytes of what sums of 32 bits and fewer add up in: float.
const ACCUMULATED: u64 = 4;
/// Threads of one block, before each handles several outputs: MAX_NUM_THREADS.
const THREADS_OF_A_BLOCK: u64 = 512;
/// A thread that has this many values to add up is enough: there are more parts only while it has more (`min_values_per_thread`).
const LEAST_VALUES: u64 = 16;
/// With so many values or more there are parts, even more than fill the GPU (`max_values_per_thread`).
const MOST_VALUES: u64 = 256;
/// Threads side by side (the warp's size), each for one, two or four outputs (`output_vec_size`).
const SIDE_BY_SIDE: u64 = 32;
const OUTPUTS_OF_A_THREAD: [u64; 3] = [4, 2, 1];
/// Bytes of the counter of a block.
const COUNTER: u64 = 4;
/// Bytes of one value: what is summed and what comes of it may differ.
const BYTES_OF_A_VALUE: [u64; 2] = [4, 2];

/// So many bytes each of what is summed and of what comes of it, and so many outputs a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Kind {
    of_an_output: u64,
    of_an_input: u64,
    outputs_of_a_thread: u64,
}

/// A sum whose parts follow from what it sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sum {
    kind: Kind,
    /// Whose law gives the bytes of what is summed, and of what comes of it.
    pub(super) input: u32,
    pub(super) output: u32,
}

/// What is known of a request for parts of a sum.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Parts {
    /// How many there are.
    Known(Sum),
    /// At which size they fill the GPU: at least, most likely, and at most.
    Full((u64, u64, u64)),
}

impl Model<'_> {
    /// For each law what is known of it where it is a sum's parts.
    pub(super) fn parts_of_sums(&self, all: &[Alike]) -> Vec<Option<Parts>> {
        let sizes = |fit: u32| &all[fit as usize].sizes[..];
        let mut parts = vec![None; all.len()];
        let is_sum = all.iter().map(|alike| counters(alike.scratch).is_some()).collect();
        when_first_asked(self.base().stream, &self.fit_of, is_sum, |fit, live| {
            let Some(counters) = counters(all[fit as usize].scratch) else { return };
            let output = live.first().copied().unwrap_or(fit);
            let asked = Asked { sizes: sizes(fit), output: sizes(output), counters, base: self.base };
            let sum = asked.sum(output, live.iter().map(|fit| (*fit, sizes(*fit))), self.threads);
            let full = || asked.full(self.threads).map(Parts::Full);
            parts[fit as usize] = sum.map(Parts::Known).or_else(full);
        });
        parts
    }

    /// Sums of which no run that was recorded makes parts, as they have few values there, by what comes of each: gradients of biases. The
    /// backward pass of `torch.nn.Linear` asks for the gradients of its input, its weights and its bias in a row, and that of its output
    /// is live then. What a compiler makes of it adds up in other ways.
    pub(super) fn sums_in_one(&self, all: &[Alike]) -> FxHashMap<AllocId, Sum> {
        let stream = self.base().stream;
        let is_linear =
            stream.stacks.having(|frame: &Frame| frame.name.to_ascii_lowercase().contains("linear"));
        let mut found = FxHashMap::default();
        let mut known: FxHashMap<[u32; 3], Option<Sum>> = FxHashMap::default();
        let mut is_live = vec![false; self.fit_of.len()];
        let mut row = [None; 4];
        for (index, op) in stream.ops.iter().enumerate() {
            match *op {
                Op::Alloc(id) => {
                    let id = id.0 as usize;
                    row = [row[1], row[2], row[3], Some(id)];
                    is_live[id] = true;
                    let [before, input, Some(weights), Some(bias)] = row else { continue };
                    let place = |id: usize| self.places[self.base][id];
                    let is_sum_next = matches!(stream.ops.get(index + 1), Some(Op::Alloc(next))
                        if counters(all[self.fit_of[next.0 as usize] as usize].scratch).is_some());
                    if place(weights) != place(bias)
                        || is_sum_next
                        || is_linear.get(stream.allocations[bias].stack.0 as usize) != Some(&true)
                    {
                        continue;
                    }
                    // The first product of a thread asks for cuBLAS's own memory after the gradient of the input.
                    let mut inputs =
                        [input, before].into_iter().flatten().take_while(|id| place(*id) == place(bias));
                    let sum = inputs.find_map(|input| {
                        let fits = [input, weights, bias].map(|id| self.fit_of[id]);
                        *known.entry(fits).or_insert_with(|| {
                            let live = (0..input).rev().filter(|id| is_live[*id]).map(|id| self.fit_of[id]);
                            self.sum_in_one(fits, live, all)
                        })
                    });
                    found.extend(sum.map(|sum| (AllocId(bias as u32), sum)));
                }
                Op::FreeRequested(id) => {
                    is_live[id.0 as usize] = false;
                    row = [None; 4];
                }
                Op::FreeCompleted(_) | Op::Trim | Op::ReleasePool(_) | Op::ChangePool(..) | Op::Oom(_) => {}
            }
        }
        found
    }

    /// Which of the tensors that are live is the gradient of the layer's output: as many rows in every run as that of its input.
    fn sum_in_one(&self, fits: [u32; 3], live: impl Iterator<Item = u32>, all: &[Alike]) -> Option<Sum> {
        let [input, weights, bias] = fits;
        let is_known = |fit: u32| self.fits[fit as usize].standing == Standing::Checked;
        let size = |fit: u32, run: usize| all[fit as usize].sizes[run];
        let runs = || 0..self.runs.len();
        let is_constant = |fit: u32| runs().all(|run| size(fit, run) == size(fit, self.base));
        let (of_weights, of_bias) = (size(weights, self.base), size(bias, self.base));
        if !fits.into_iter().all(is_known)
            || is_constant(input)
            || !is_constant(weights)
            || !is_constant(bias)
            || of_bias == 0
            || of_weights < of_bias
            || !of_weights.is_multiple_of(of_bias)
        {
            return None;
        }
        let of_output = |output: u32| {
            let bytes = BYTES_OF_A_VALUE.into_iter().find(|bytes| {
                runs().all(|run| {
                    let rows = size(output, run) / of_bias;
                    rows > 0
                        && size(output, run) == rows * of_bias
                        && size(input, run) == rows * (of_weights / of_bias) * bytes
                })
            })?;
            let outputs = of_bias / bytes;
            let outputs_of_a_thread =
                OUTPUTS_OF_A_THREAD.into_iter().find(|each| outputs.is_multiple_of(*each))?;
            let kind = Kind { of_an_output: bytes, of_an_input: bytes, outputs_of_a_thread };
            Some(Sum { kind, input: output, output: bias })
        };
        live.filter(|output| is_known(*output)).find_map(of_output)
    }

    /// Bytes of the parts, and of their counters, that a sum would have at a point; 0 where it is in one there, too.
    pub(super) fn parts_at(&self, sum: &Sum, at: &[u64]) -> (u64, u64) {
        let law = |fit: u32| self.basis.range(&self.fits[fit as usize], at).1;
        let Some((outputs, values)) = sum.kind.numbers(law(sum.input), law(sum.output)) else {
            return (0, 0);
        };
        let (parts, n_blocks) = sum.kind.parts(outputs, values, self.threads.likely);
        (parts, n_blocks * COUNTER)
    }

    /// What the laws of a fit give at a point, or the rules for sums: at least, most likely, and at most.
    pub(super) fn size(&self, fit: usize, at: &[u64]) -> (u64, u64, u64) {
        let law = |fit: usize| self.basis.range(&self.fits[fit], at);
        match &self.parts[fit] {
            None => law(fit),
            Some(Parts::Known(sum)) => {
                let (input, output) = (law(sum.input as usize), law(sum.output as usize));
                let at = |input, output| sum.at(input, output, self.threads);
                let (low, best, high) = (at(input.0, output.0), at(input.1, output.1), at(input.2, output.2));
                (best.0.min(low.0).min(high.0), best.1, best.2.max(low.2).max(high.2))
            }
            Some(Parts::Full(full)) => {
                let (low, best, high) = law(fit);
                (until_full(low, full.0), until_full(best, full.1), until_full(high, full.2))
            }
        }
    }
}

/// Sizes in all runs of a request and of what belongs to it; 0 where a run does not have it.
pub(super) struct Asked<'a> {
    pub(super) sizes: &'a [u64],
    pub(super) output: &'a [u64],
    /// Of the base's request.
    pub(super) counters: u64,
    pub(super) base: usize,
}

impl Asked<'_> {
    /// Which of the tensors that are live is summed, the latest first: each with its law and its sizes. Where several could be, the one
    /// that has as many values for each output as most of them.
    pub(super) fn sum<'a>(
        &self,
        output: u32,
        live: impl Iterator<Item = (u32, &'a [u64])>,
        threads: Threads,
    ) -> Option<Sum> {
        let mut possible: Vec<(Vec<u64>, usize, Sum)> = vec![];
        for (input, sizes) in live {
            let Some((kind, values)) =
                kinds().find_map(|kind| Some((kind, self.values(kind, sizes, threads)?)))
            else {
                continue;
            };
            let sum = Sum { kind, input, output };
            match possible.iter_mut().find(|(known, ..)| *known == values) {
                Some((_, number, _)) => *number += 1,
                None => possible.push((values, 1, sum)),
            }
        }
        possible.into_iter().rev().max_by_key(|(_, number, _)| *number).map(|(.., sum)| sum)
    }

    /// How many values each output is the sum of, in every run, where that gives what was asked for.
    fn values(&self, kind: Kind, input: &[u64], threads: Threads) -> Option<Vec<u64>> {
        let of_run = |run: usize| {
            let (size, input, output) = (self.sizes[run], input[run], self.output[run]);
            if size == 0 && run != self.base {
                return Some(0);
            }
            let (n_outputs, n_values) = kind.numbers(input, output)?;
            let is_so = threads.each().into_iter().any(|threads| {
                let (parts, n_blocks) = kind.parts(n_outputs, n_values, threads);
                parts == size && (run != self.base || n_blocks * COUNTER == self.counters)
            });
            is_so.then_some(n_values)
        };
        (0..self.sizes.len()).map(of_run).collect()
    }

    /// At which size the parts fill the GPU, but no smaller than they were. None where the sizes are not those of Reduce.cuh:
    /// `parts × outputs × outputs of a block × 4`, with a counter for each block of outputs, of which the last may have fewer.
    pub(super) fn full(&self, threads: Threads) -> Option<(u64, u64, u64)> {
        let (n_blocks, most) = (self.counters / COUNTER, self.sizes.iter().max().copied()?);
        let seen = || self.sizes.iter().filter(|size| **size > 0);
        let full = |of_a_thread: u64, outputs: u64| {
            let of_a_part = ACCUMULATED * outputs * SIDE_BY_SIDE * of_a_thread;
            let of_a_block = THREADS_OF_A_BLOCK / of_a_thread;
            threads.range(|threads| (of_a_part * (threads / of_a_block).div_ceil(n_blocks)).max(most))
        };
        let by_output = BYTES_OF_A_VALUE.into_iter().find_map(|bytes| {
            let outputs = self.output[self.base] / bytes;
            let of_a_thread = OUTPUTS_OF_A_THREAD.into_iter().find(|each| outputs.is_multiple_of(*each))?;
            let of_a_part = ACCUMULATED * outputs * SIDE_BY_SIDE * of_a_thread;
            let is_so = outputs > 0
                && (outputs / of_a_thread).div_ceil(SIDE_BY_SIDE) == n_blocks
                && seen().all(|size| size.is_multiple_of(of_a_part));
            is_so.then(|| full(of_a_thread, outputs))
        });
        let whole = |of_a_thread: u64| {
            let outputs = n_blocks * SIDE_BY_SIDE * of_a_thread;
            let of_a_part = ACCUMULATED * outputs * SIDE_BY_SIDE * of_a_thread;
            let is_so = n_blocks > 0 && self.sizes.iter().all(|size| size.is_multiple_of(of_a_part));
            is_so.then(|| full(of_a_thread, outputs))
        };
        let with_fewer = |of_a_thread: u64| {
            let of_a_block = SIDE_BY_SIDE * of_a_thread;
            let of_an_output = ACCUMULATED * of_a_block;
            if n_blocks == 0 || !self.sizes.iter().all(|size| size.is_multiple_of(of_an_output)) {
                return None;
            }
            let all = self.sizes.iter().map(|size| size / of_an_output).fold(0, greatest_common_divisor);
            let outputs = (n_blocks - 1) * of_a_block + 1..n_blocks * of_a_block;
            let is_possible =
                |outputs: &u64| outputs.is_multiple_of(of_a_thread) && all.is_multiple_of(*outputs);
            outputs.rev().find(is_possible).map(|outputs| full(of_a_thread, outputs))
        };
        by_output
            .or_else(|| OUTPUTS_OF_A_THREAD.into_iter().find_map(whole))
            .or_else(|| OUTPUTS_OF_A_THREAD.into_iter().find_map(with_fewer))
    }
}

/// Parts that fill the GPU at a size that is not known exactly: they follow their law up to there, and above it only where threads
/// have the most values that they may.
fn until_full(law: u64, full: u64) -> u64 {
    law.min(full).max(law / (MOST_VALUES / LEAST_VALUES))
}

/// Values of one size first, and as many outputs a thread as can be.
fn kinds() -> impl Iterator<Item = Kind> {
    let same = BYTES_OF_A_VALUE.map(|bytes| (bytes, bytes));
    let both = same.into_iter().chain([(4, 2), (2, 4)]);
    both.flat_map(|(of_an_output, of_an_input)| {
        OUTPUTS_OF_A_THREAD.map(|outputs_of_a_thread| Kind { of_an_output, of_an_input, outputs_of_a_thread })
    })
}

impl Sum {
    /// Bytes of its parts where so many are summed, and of what comes of it; 0 where it is in one.
    pub(super) fn at(&self, input: u64, output: u64, threads: Threads) -> (u64, u64, u64) {
        let numbers = self.kind.numbers(input, output);
        threads.range(|threads| {
            numbers.map_or(0, |(outputs, values)| self.kind.parts(outputs, values, threads).0)
        })
    }
}

impl Kind {
    /// How many outputs there are, and how many values each is the sum of; none where that is not whole.
    fn numbers(self, input: u64, output: u64) -> Option<(u64, u64)> {
        let outputs = output / self.of_an_output;
        let is_whole = outputs > 0
            && output.is_multiple_of(self.of_an_output)
            && outputs.is_multiple_of(self.outputs_of_a_thread)
            && input.is_multiple_of(outputs * self.of_an_input);
        is_whole.then(|| (outputs, input / (outputs * self.of_an_input)))
    }

    /// Bytes of the parts, and how many blocks of outputs there are: `setReduceConfig` where outputs lie side by side, as in the
    /// gradient of a bias.
    fn parts(self, outputs: u64, values: u64, threads: u64) -> (u64, u64) {
        let most = THREADS_OF_A_BLOCK / self.outputs_of_a_thread;
        let side = |number: u64| number.checked_ilog2().map_or(1, |log| 1 << log).min(most);
        let (wide, high) = (side(outputs / self.outputs_of_a_thread), side(values));
        let height = high.min(most / wide.min(SIDE_BY_SIDE));
        let width = wide.min(most / height);
        let of_a_thread = values.div_ceil(height);
        let n_blocks = (outputs / self.outputs_of_a_thread).div_ceil(width);
        let fill = threads / (width * height);
        if of_a_thread < MOST_VALUES || n_blocks > fill {
            return (0, n_blocks);
        }
        let parts = fill
            .div_ceil(n_blocks)
            .min(of_a_thread.div_ceil(LEAST_VALUES))
            .max(of_a_thread.div_ceil(MOST_VALUES));
        let is_split = parts > 1;
        (u64::from(is_split) * ACCUMULATED * outputs * parts * width * self.outputs_of_a_thread, n_blocks)
    }
}

/// Asks for the parts of a sum and their counters, and gives them back, after what comes of it was asked for.
pub(super) fn make_parts(stream: &mut OpStream, output: AllocId, (parts, counters): (u64, u64)) {
    if parts == 0 {
        return;
    }
    let like = *stream.allocation(output);
    let ids = [parts, counters].map(|requested| {
        stream.allocations.push(Allocation { requested, ..like });
        let id = AllocId(stream.allocations.len() as u32 - 1);
        stream.ops.push(Op::Alloc(id));
        id
    });
    for id in ids.into_iter().rev() {
        stream.ops.extend([Op::FreeRequested(id), Op::FreeCompleted(id)]);
    }
}

/// Whether the request is for parts of a sum, and with how many bytes of counters.
fn counters(scratch: Scratch) -> Option<u64> {
    match scratch {
        Scratch::Sum { counters, .. } => Some(counters),
        Scratch::No | Scratch::Workspace => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Builder, PoolIdx, StackId, Stacks, StreamIdx};
    use crate::predict::Run;

    const H100: &str = "NVIDIA H100 80GB HBM3";

    fn asked<'a>(counters: u64, sizes: &'a [u64], output: &'a [u64]) -> Asked<'a> {
        Asked { sizes, output, counters, base: 0 }
    }

    #[test]
    fn a_sum_grows_until_it_fills_the_gpu() {
        // Gradients of a bias of 2048 over 2048 and 4096 rows; over 16384 rows an H200 was asked for 138412032 bytes.
        let likely =
            |counters, sizes: &[u64]| Some(asked(counters, sizes, &[0, 0]).full(Threads::default())?.1);
        assert_eq!(likely(64, &[67_108_864, 33_554_432]), Some(138_412_032));
        // Of 384 outputs, over 1568 and 3136 rows.
        assert_eq!(likely(12, &[9_633_792, 4_915_200]), Some(138_412_032));
        // Of 1344 outputs, which are ten blocks and a half: over 32768 and 64000 rows an H100 was asked for as many bytes.
        assert_eq!(likely(44, &[44_040_192, 22_020_096]), Some(132_120_576));
        // Of 864, over 2320 and 4640 rows: parts are whole.
        assert_eq!(likely(28, &[32_292_864, 16_367_616]), Some(133_595_136));
        assert_eq!(likely(64, &[1000, 1000]), None);
    }

    /// The gradient of a bias of 960, in half precision, over 145 rows for each of 32 and 16 samples, as an H100 was asked for it.
    const SIZES: [u64; 2] = [35_880_960, 18_186_240];
    const OUTPUT: [u64; 2] = [1920, 1920];

    #[test]
    fn parts_follow_from_what_is_summed() {
        let rows = |rows: u64| rows * 960 * 2;
        let (grown, other) = ([rows(145 * 32), rows(145 * 16)], [rows(140 * 32), rows(140 * 16)]);
        let live = [(7, &grown[..]), (8, &other[..]), (9, &[480, 480][..])];
        let sum = asked(32, &SIZES, &OUTPUT).sum(3, live.into_iter(), Threads::of(H100)).unwrap();
        assert_eq!((sum.input, sum.output), (7, 3));
        let at = |n_rows: u64| sum.at(rows(n_rows), 1920, Threads::of(H100)).1;
        // What it was asked for at batch 288, and in one where a thread has fewer than 256 values.
        assert_eq!((at(145 * 288), at(1020)), (129_761_280, 0));
        assert_eq!(at(145 * 32), SIZES[0]);
        // More than 256 values each, and many more parts than fill the GPU.
        assert_eq!(at(1 << 20) / 491_520, 1 << 10);
    }

    #[test]
    fn where_nothing_can_be_what_is_summed_its_output_still_says_how_wide_it_is() {
        let live = [(7, &[1000, 500][..])].into_iter();
        let asked = asked(32, &SIZES, &OUTPUT);
        assert_eq!(asked.sum(3, live, Threads::of(H100)), None);
        assert_eq!(asked.full(Threads::of(H100)).unwrap().1, 129_761_280);
    }

    /// The backward pass of a linear layer of 100 inputs and 64 outputs over so many rows, with a function of this name in its stack.
    fn linear(rows: u64, name: &str) -> OpStream {
        let mut builder = Builder::new(0);
        let frames = vec![Frame { name: name.into(), file: "net.py".into(), line: 1 }];
        builder.stream_mut().stacks = std::sync::Arc::new(Stacks {
            frames,
            lists: vec![Box::default(), Box::new([0])],
            ..Stacks::default()
        });
        for (stack, requested) in [(0, rows * 64 * 4), (1, rows * 100 * 4), (1, 100 * 64 * 4), (1, 64 * 4)] {
            let (stack, stream, pool) = (StackId(stack), StreamIdx(0), PoolIdx::DEFAULT);
            builder.alloc(Allocation { requested, address: 0, stack, stream, pool });
        }
        builder.finish()
    }

    #[test]
    fn a_sum_that_is_in_one_in_all_runs_is_in_parts_where_each_thread_would_have_many_values() {
        let asked = |name: &str, rows: u64| {
            let (small, large) = (linear(100, name), linear(200, name));
            let runs = vec![Run { at: vec![100], stream: &small }, Run { at: vec![200], stream: &large }];
            let model = Model::on(runs, Threads::of(H100)).unwrap();
            let allocations = model.predict(&[rows]).unwrap().best.allocations;
            allocations[4..].iter().map(|it| it.requested).collect::<Vec<_>>()
        };
        // Of blocks of 16 by 8 threads each adds up 128 of 1024 rows, which is not enough for parts; of 4096 it is 512, and 32 parts have 16 each.
        assert_eq!(asked("Linear.forward", 1024), []);
        assert_eq!(asked("Linear.forward", 4096), [32 * 64 * 4 * 16 * 4, 4]);
        assert_eq!(asked("matmul", 4096), []);
    }
}
