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

/// A workspace grows by as much as copies in it would, up to this factor: of the parts there may be fewer or more, and what grows by more has
/// other copies. Chosen: the largest seen in an H100's convolutions that such copies explain is 2.5.
const MOST_APART: f64 = 3.0;

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

/// Whether the copies can be in it, in every run, and it grows with them.
fn has(sizes: &[u64], copies: &[u64], base: usize) -> bool {
    let grown = |sizes: &[u64], run: usize| sizes[base].saturating_sub(sizes[run]) as f64;
    (0..sizes.len()).all(|run| {
        copies[run] > 0
            && copies[run] <= sizes[run]
            && (run == base || is_near(grown(sizes, run), grown(copies, run)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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
        check("=1:20,40 1:30,99", &[]);
        check("=1:20,40 1:80,90", &[(1, 0)]);
    }
}
