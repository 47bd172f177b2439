//! Convolutions among the parameters: what Adafactor keeps of their weights depends on their kernels, which no request shows.
//!
//! Adafactor keeps a row and a column of the last two dimensions. These are the kernel's, where there are two, or the input channels and the
//! kernel: of a kernel of one element, the row is as large as the weight. The channels are the lengths of norms and biases of the model.

use rustc_hash::FxHashSet;

use crate::stacks::{StackId, Stacks};

/// The kernel of a convolution.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Kernel {
    /// Its dimensions.
    dimensions: u32,
    /// Its length in each.
    length: u64,
}

impl Kernel {
    /// Bytes of the row and the column of a weight, and of the mean of the row.
    pub(super) fn factors(self, bytes: u64) -> [u64; 3] {
        let row = bytes / self.length;
        match self.dimensions {
            1 => [row, (bytes / row.max(1) * 4).max(4), 4],
            _ => [row, row, row / self.length],
        }
    }
}

/// The kernel of each of these gradients, by their stacks and bytes, where it is a convolution's weight.
pub(super) fn kernels(stacks: &Stacks, gradients: &[(StackId, u64)]) -> Vec<Option<Kernel>> {
    let dimensions: Vec<Option<u32>> = stacks.lists.iter().map(|list| dimensions(stacks, list)).collect();
    // Under autocast, a cast makes the gradient, at the place of the convolution. What is shorter is a bias, or too small to matter.
    let short = gradients.iter().filter(|(_, bytes)| *bytes <= LONGEST);
    let channels: FxHashSet<u64> = short.map(|(_, bytes)| bytes / 4).collect();
    let kernel = |(stack, bytes): &(StackId, u64)| {
        let dimensions = dimensions.get(stack.0 as usize).copied().flatten()?;
        (*bytes > LONGEST).then(|| kernel_of(bytes / 4, dimensions, &channels)).flatten()
    };
    gradients.iter().map(kernel).collect()
}

/// Bytes of the longest vector that is taken for a norm's or a bias.
const LONGEST: u64 = 4 << 13;

/// The shortest kernel with which the weight has a known number of channels on both sides, twice one as a gate needs it, or one group for each.
fn kernel_of(elements: u64, dimensions: u32, channels: &FxHashSet<u64>) -> Option<Kernel> {
    const LONGEST_KERNEL: u64 = 63;
    let is_known =
        |it: u64| it == 1 || channels.contains(&it) || it.is_multiple_of(2) && channels.contains(&(it / 2));
    let has_sides = |product: u64| {
        channels.iter().any(|side| *side > 0 && product.is_multiple_of(*side) && is_known(product / side))
    };
    (1..=LONGEST_KERNEL).find_map(|length| {
        let area = length.pow(dimensions);
        let fits = elements.is_multiple_of(area) && has_sides(elements / area);
        fits.then_some(Kernel { dimensions, length })
    })
}

/// Of a convolution, by the name of its module.
fn dimensions(stacks: &Stacks, list: &[u32]) -> Option<u32> {
    let frames = list.iter().filter_map(|frame| stacks.frames.get(*frame as usize));
    frames.filter(|frame| frame.file.ends_with("/torch/nn/modules/conv.py")).find_map(|frame| {
        let class = frame.name.split('.').next()?;
        [("1d", 1), ("2d", 2), ("3d", 3)].iter().find(|(end, _)| class.ends_with(end)).map(|(_, n)| *n)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_the_shortest_with_which_both_sides_are_known() {
        let channels: FxHashSet<u64> = [64, 640].into_iter().collect();
        let length = |elements, dimensions| kernel_of(elements, dimensions, &channels).map(|it| it.length);
        assert_eq!(length(640 * 640, 1), Some(1));
        // Twice as wide, for a gate.
        assert_eq!(length(1280 * 640, 1), Some(1));
        // Each channel on its own.
        assert_eq!(length(640 * 31, 1), Some(31));
        assert_eq!(length(64 * 64 * 9, 2), Some(3));
        assert_eq!(length(77 * 13, 1), None);
    }

    #[test]
    fn the_row_of_a_kernel_of_one_element_is_as_large_as_its_weight() {
        assert_eq!(Kernel { dimensions: 1, length: 1 }.factors(4096)[0], 4096);
        assert_eq!(Kernel { dimensions: 2, length: 3 }.factors(9 * 4096), [3 * 4096, 3 * 4096, 4096]);
    }
}
