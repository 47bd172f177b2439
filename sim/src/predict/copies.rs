//! What grows of a convolution's workspace, where sizes of two runs alone do not show it.
//!
//! Kernels that want another order of an image's sides work on copies (cuDNN's for channels last, on tensors that are not): these grow
//! with the tensors. Beside them are parts of the gradient of weights, as many as fill the GPU, which do not. The workspace for the
//! gradient of the same convolution's input is copies alone, and made just before.
//!
//! ```text
//!   batch 4    copies 20.3 MiB    copies 20.3 MiB, parts 23.7 MiB
//!   batch 8    copies 40.6 MiB    copies 40.6 MiB, parts 52.5 MiB
//!   batch 120  copies 607.6 MiB   copies 607.6 MiB, parts 44.9 MiB
//! ```

use rustc_hash::FxHashMap;

use super::law::{Law, Standing};
use super::live::when_first_asked;
use super::scratch::Scratch;
use super::{Alike, Model};
use crate::ops::AllocId;

/// A workspace grows by as much as copies in it would, up to this factor: of the parts there may be fewer or more, and what grows by more has
/// other copies. Chosen: the largest seen in an H100's convolutions that such copies explain is 2.5.
const MOST_APART: f64 = 3.0;

/// A workspace that is copies of tensors has beside them a copy of weights, or no more than this part of it. Chosen and not measured.
const SMALL_PART: f64 = 0.02;
/// Beside copies there are parts of sums, as many as fill the GPU, of at most so many bytes: what has more is of another algorithm. Chosen:
/// the most seen on an H100 is 52 MiB.
pub(super) const MOST_BESIDE: u64 = 64 << 20;
/// Copies of weights may be longer by so many bytes. Chosen and not measured.
const PADDED: u64 = 1024;

impl Model<'_> {
    /// What grows of workspaces of convolutions that follow no law.
    pub(super) fn find_copies(&mut self, all: &[Alike]) {
        let stream = self.runs[self.base].stream;
        let is_of_conv = |id: &u32| self.optional.contains(&AllocId(*id));
        let of_conv: Vec<u32> = (0..stream.allocations.len() as u32).filter(is_of_conv).collect();
        let both = self.copies_of_both(&of_conv, all);
        let mut copies: Vec<Option<Law>> = self
            .fits
            .iter()
            .zip(all)
            .map(|(fit, Alike { scratch, sizes })| {
                let least = sizes.iter().min().copied()?;
                (*scratch == Scratch::Workspace).then(|| self.basis.copies(fit, least)).flatten()
            })
            .collect();
        // Copies as they would be in every run, also where a run took another algorithm.
        let mut sizes: Vec<Box<[u64]>> = all.iter().map(|alike| alike.sizes.clone()).collect();
        for (fit, law) in &both {
            copies[*fit as usize] = Some(law.clone());
            sizes[*fit as usize] = self.runs.iter().map(|run| self.basis.at(law, &run.at)).collect();
        }
        let workspaces = of_conv.iter().map(|id| {
            let (place, fit) = (self.places[self.base][*id as usize], self.fit_of[*id as usize]);
            Workspace { place, fit, sizes: &sizes[fit as usize], is_copies: copies[fit as usize].is_some() }
        });
        for (fit, of) in copies_in(&workspaces.collect::<Vec<_>>(), self.base) {
            let (Some(copies), index) = (&copies[of as usize], fit as usize) else { continue };
            let (points, sizes) = self.points(&all[index].sizes);
            let is_open = matches!(self.fits[index].standing, Standing::Lawless | Standing::Unchecked);
            let beside = sizes[0].saturating_sub(self.basis.at(copies, points[0]));
            if is_open && beside <= MOST_BESIDE {
                self.fits[index] = self.basis.with_copies(self.fits[index].clone(), copies, &points, &sizes);
            }
        }
        for (fit, law) in both {
            self.fits[fit as usize].laws.insert(0, law);
        }
    }

    /// Workspaces that are a copy of what a convolution is made of and one of what comes of it, for each law its copies. What comes of it
    /// was asked for just before.
    fn copies_of_both(&self, of_conv: &[u32], all: &[Alike]) -> Vec<(u32, Law)> {
        let size = |fit: u32| all[fit as usize].sizes[self.base];
        let standing = |fit: u32| self.fits[fit as usize].standing;
        let mut is_wanted = vec![false; all.len()];
        for fit in of_conv.iter().map(|id| self.fit_of[*id as usize]) {
            is_wanted[fit as usize] =
                matches!(standing(fit), Standing::Lawless | Standing::Unchecked | Standing::Unmatched);
        }
        let mut found = vec![];
        when_first_asked(self.base().stream, &self.fit_of, is_wanted, |fit, live| {
            let grows = |fit: &u32| {
                standing(*fit) == Standing::Checked && grows(&all[*fit as usize].sizes, self.base)
            };
            let Some((output, live)) = live.split_first().filter(|(output, _)| grows(output)) else { return };
            let beside = size(fit).saturating_sub(size(*output));
            let inputs = live.iter().filter(|input| grows(input) && size(**input) <= beside);
            let rest = |input: &u32| beside - size(*input);
            let constant = |fit: &&u32| standing(**fit) == Standing::Checked && !grows(fit);
            let mut weights: Vec<u64> = live.iter().filter(constant).map(|fit| size(*fit)).collect();
            weights.sort_unstable();
            // What is not nearly as large as the nearest of them is not nearly as large as any.
            let with_weights = |input: &&u32| {
                let (smaller, larger) = weights.split_at(weights.partition_point(|it| *it < rest(input)));
                let nearest = smaller.last().into_iter().chain(larger.first());
                nearest.into_iter().any(|weights| is_nearly(rest(input), *weights))
            };
            // The latest of those with which all of it is copies; else the largest, where there is next to nothing beside.
            let largest = || inputs.clone().max_by_key(|input| size(**input));
            let is_small = |input: &&u32| rest(input) as f64 <= size(fit) as f64 * SMALL_PART;
            let input = inputs.clone().find(with_weights).or_else(|| largest().filter(is_small));
            let Some(input) = input else { return };
            let tensors = [output, input].map(|fit| &self.fits[*fit as usize].laws[0]);
            found.push((fit, self.basis.together(&tensors, rest(input))));
        });
        found
    }
}

/// Both are in bytes, and one is the other but for what is padded.
fn is_nearly(one: u64, other: u64) -> bool {
    one.abs_diff(other) <= (other / 100).max(PADDED)
}

/// A request that is a workspace of a convolution.
pub(super) struct Workspace<'a> {
    /// Where it comes from.
    pub(super) place: u32,
    /// Which law it has.
    pub(super) fit: u32,
    /// For each run; 0 where it has no such request.
    pub(super) sizes: &'a [u64],
    /// Nothing but copies, for all that is known.
    pub(super) is_copies: bool,
}

/// For each law without copies alone that may have some in it: the law of the nearest workspace of the same place that has nothing else.
/// Workspaces are in the order of requests; `base` is the run that predictions continue.
pub(super) fn copies_in(workspaces: &[Workspace], base: usize) -> FxHashMap<u32, u32> {
    let mut of_place: FxHashMap<u32, Vec<usize>> = FxHashMap::default();
    for (index, workspace) in workspaces.iter().enumerate().filter(|(_, it)| it.is_copies) {
        of_place.entry(workspace.place).or_default().push(index);
    }
    let mut found = FxHashMap::default();
    for (index, workspace) in workspaces.iter().enumerate().filter(|(_, it)| !it.is_copies) {
        if found.contains_key(&workspace.fit) || !grows(workspace.sizes, base) {
            continue;
        }
        let near = of_place.get(&workspace.place).map_or(&[][..], Vec::as_slice);
        let fits = |copies: &&usize| has(workspace.sizes, workspaces[**copies].sizes, base);
        // Both sides, from the nearest on; of two as near, the one before.
        let (before, after) = near.split_at(near.partition_point(|copies| *copies < index));
        let (before, after) = (before.iter().rev().find(fits), after.iter().find(fits));
        let nearest = before.into_iter().chain(after).min_by_key(|copies| copies.abs_diff(index));
        if let Some(nearest) = nearest {
            found.insert(workspace.fit, workspaces[*nearest].fit);
        }
    }
    found
}

/// All runs have it, and the base more than any.
fn grows(sizes: &[u64], base: usize) -> bool {
    let others = sizes.iter().enumerate().filter(|(run, _)| *run != base);
    others.clone().count() > 0 && others.into_iter().all(|(_, size)| *size > 0 && *size < sizes[base])
}

fn is_near(one: f64, other: f64) -> bool {
    one <= other * MOST_APART && other <= one * MOST_APART
}

/// Whether the copies can be in it, in every run, and it grows with them. What grows faster than they do is of another algorithm in the other
/// run, which does not show how it grows.
fn has(sizes: &[u64], copies: &[u64], base: usize) -> bool {
    let grown = |sizes: &[u64], run: usize| sizes[base].saturating_sub(sizes[run]) as f64;
    let times = |sizes: &[u64], run: usize| sizes[base] as f64 / sizes[run] as f64;
    (0..sizes.len()).all(|run| {
        copies[run] > 0
            && copies[run] <= sizes[run]
            && (run == base
                || times(sizes, run) > times(copies, run)
                || is_near(grown(sizes, run), grown(copies, run)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Allocation, Builder, Frame, Op, PoolIdx, StackId, Stacks, StreamIdx};
    use crate::predict::Run;

    /// Workspaces `place:other,base`, `=` before one that is copies alone; for each law the law of its copies.
    fn check(text: &str, expected: &[(u32, u32)]) {
        let parsed: Vec<(u32, Vec<u64>, bool)> = text
            .split_whitespace()
            .map(|word| {
                let (place, sizes) = word.trim_start_matches('=').split_once(':').unwrap();
                let sizes = sizes.split(',').map(|it| it.parse().unwrap()).collect();
                (place.parse().unwrap(), sizes, word.starts_with('='))
            })
            .collect();
        let workspaces = (0..).zip(&parsed).map(|(fit, (place, sizes, is_copies))| Workspace {
            place: *place,
            fit,
            sizes,
            is_copies: *is_copies,
        });
        let mut found: Vec<(u32, u32)> = copies_in(&workspaces.collect::<Vec<_>>(), 1).into_iter().collect();
        found.sort_unstable();
        assert_eq!(found, expected, "{text}");
    }

    #[test]
    fn copies_are_those_of_the_nearest_workspace_of_the_place_that_is_nothing_else() {
        check("=1:20,40 1:44,93", &[(1, 0)]);
        check("=1:10,20 =1:20,40 1:44,93 =1:5,10", &[(2, 1)]);
        check("=2:20,40 1:44,93", &[]);
    }

    #[test]
    fn what_is_smaller_than_copies_or_does_not_grow_with_them_has_none() {
        check("=1:20,40 1:30,39", &[]);
        check("=1:20,40 1:80,81 1:80,80 1:80,70 1:0,90", &[]);
        check("=1:20,40 1:80,90", &[(1, 0)]);
    }

    #[test]
    fn what_grows_faster_than_copies_is_of_another_algorithm_in_the_other_run_and_may_have_some() {
        check("=1:20,40 1:30,99 1:22,90 1:19,99", &[(1, 0), (2, 0)]);
    }

    /// What a convolution's workspace is at 32 samples, by runs at 8 and 16: `a:8,16` asks for so many bytes in each, `a-` gives them back.
    fn workspace_at_32(text: &str) -> u64 {
        let run = |index: usize| {
            let stacks = Stacks {
                frames: vec![Frame { name: "conv2d".into(), file: "net.py".into(), line: 1 }],
                lists: vec![Box::default(), Box::new([0])],
                ..Stacks::default()
            };
            let (mut builder, mut ids) = (Builder::new(0), std::collections::HashMap::new());
            builder.stream_mut().stacks = std::sync::Arc::new(stacks);
            for word in text.split_whitespace() {
                let Some((name, sizes)) = word.split_once(':') else {
                    builder.op(Op::FreeRequested(ids[word.trim_end_matches('-')]));
                    continue;
                };
                let requested = sizes.split(',').nth(index).unwrap().parse().unwrap();
                if requested > 0 {
                    let (stack, stream, pool) = (StackId(1), StreamIdx(0), PoolIdx::DEFAULT);
                    ids.insert(
                        name,
                        builder.alloc(Allocation { requested, address: 0, stack, stream, pool }),
                    );
                }
            }
            builder.finish()
        };
        let (small, large) = (run(0), run(1));
        let runs = vec![Run { at: vec![8], stream: &small }, Run { at: vec![16], stream: &large }];
        let model = Model::of(runs).unwrap();
        let workspace = large.allocations.len() - 1;
        model.size(model.fit_of[workspace] as usize, &[32]).1
    }

    #[test]
    fn a_workspace_that_is_copies_of_both_tensors_grows_with_them_though_another_run_took_another_algorithm()
    {
        let tensors = "weights:70000,70000 input:800000,1600000 output:400000,800000";
        // Copies of both, and of the weights; at 8 there was another algorithm.
        assert_eq!(workspace_at_32(&format!("{tensors} w:5000,2470000 w-")), 4_870_000);
        // Beside them is more than copies.
        assert_ne!(workspace_at_32(&format!("{tensors} w:5000,2900000 w-")), 5_300_000);
    }
}
