//! Sums of gradients that a backward pass ends with.

use super::program::{LATE, Phase, Program, Purpose};

impl Program<'_> {
    /// The gradient of a parameter that is used first and last, as a tied embedding, is a sum, and the last request of its backward pass. The
    /// parts of that sum are freed after it, as gradients are that the program clears at once: only their order shows that they are none.
    pub(super) fn mark_parts_of_last_sums(&mut self, passes: &[(u64, u64)]) {
        for (start, last) in passes {
            let own = self.born_within(*start, last + 1);
            let Some(sum) = own.clone().next_back() else { continue };
            let (bytes, stack) = (self.tensors[sum].bytes, self.tensors[sum].stack);
            let freed_soon = |index: &usize| {
                let it = &self.tensors[*index];
                it.phase == Phase::Backward && *last < it.freed && it.freed <= last + LATE
            };
            let freed = own.filter(freed_soon);
            let parts: Vec<usize> =
                freed.clone().filter(|index| *index != sum && self.tensors[*index].bytes == bytes).collect();
            // The last part is of the operation that the sum follows, the other of one long before it.
            let &[first, second] = &parts[..] else { continue };
            let (first, second) = (self.tensors[first], self.tensors[second]);
            let over = first.freed.max(second.freed);
            let is_sum = second.stack == stack && first.stack != stack && self.tensors[sum].freed > over;
            // Cleared gradients have others between them.
            let n_between = freed.filter(|index| {
                let it = &self.tensors[*index];
                it.purpose == Purpose::Gradient && it.freed < over
            });
            if is_sum && n_between.count() <= 1 {
                for index in parts {
                    self.tensors[index].purpose = Purpose::Temporary;
                }
            }
        }
    }
}
