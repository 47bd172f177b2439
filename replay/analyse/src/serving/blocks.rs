//! The blocks of a device as tables: by birth, by moment and by call stack.

use std::ops::Range;

use crate::lives::Life;
use crate::roles::Facts;
use gputrace_trace::by_stack::ByStack;

/// The blocks of a device, in the order of their births.
#[derive(Clone, Copy)]
pub(crate) struct Blocks<'a> {
    /// Those of all devices, and what their stacks show.
    pub lives: &'a [Life],
    pub facts: &'a [Facts],
    /// Which of them.
    pub own: &'a [u32],
}

impl<'a> Blocks<'a> {
    pub(super) fn len(self) -> usize {
        self.own.len()
    }

    pub(super) fn life(self, idx: usize) -> &'a Life {
        &self.lives[self.own[idx] as usize]
    }

    pub(super) fn facts(self, idx: usize) -> Facts {
        self.facts[self.own[idx] as usize]
    }

    pub(super) fn all(self) -> impl Iterator<Item = (&'a Life, Facts)> {
        self.own.iter().map(move |idx| (&self.lives[*idx as usize], self.facts[*idx as usize]))
    }
}

/// How many blocks were born until some moment. One search in a large table costs a cache miss for each of its steps; here it is one.
pub(super) struct Births<'a> {
    blocks: Blocks<'a>,
    /// How many were born before each multiple of [`Births::MOMENTS`].
    before: Vec<usize>,
}

impl<'a> Births<'a> {
    const MOMENTS: u32 = 64;

    pub(super) fn of(blocks: Blocks<'a>) -> Births<'a> {
        let last = blocks.own.last().map_or(0, |_| blocks.life(blocks.len() - 1).born / Births::MOMENTS);
        let mut before = Vec::with_capacity(last as usize + 1);
        for (idx, (life, _)) in blocks.all().enumerate() {
            let slot = (life.born / Births::MOMENTS) as usize;
            while before.len() <= slot {
                before.push(idx);
            }
        }
        Births { blocks, before }
    }

    pub(super) fn until(&self, moment: u32) -> usize {
        let Blocks { lives, own, .. } = self.blocks;
        let slot = (moment / Births::MOMENTS) as usize;
        let from = self.before.get(slot).copied().unwrap_or(own.len());
        let to = self.before.get(slot + 1).copied().unwrap_or(own.len());
        from + own[from..to].partition_point(|idx| lives[*idx as usize].born <= moment)
    }
}

/// The indexes of all blocks, those of each stack together, and where those of each stack are.
pub(super) fn by_stack(blocks: Blocks) -> (Vec<u32>, Vec<Range<usize>>) {
    let mut numbers: ByStack<u32> = ByStack::default();
    let mut ends: Vec<usize> = vec![];
    for (life, _) in blocks.all() {
        let number = numbers.get_or(life.stack, || {
            ends.push(0);
            ends.len() as u32 - 1
        });
        ends[number as usize] += 1;
    }
    let mut begin = 0;
    for n in &mut ends {
        begin += std::mem::replace(n, begin);
    }
    // Each is where the next block goes, and at last the end.
    let mut order = vec![0; blocks.len()];
    for (idx, (life, _)) in (0..).zip(blocks.all()) {
        let at = numbers.get(life.stack).and_then(|number| ends.get_mut(*number as usize));
        if let Some(at) = at {
            order[*at] = idx;
            *at += 1;
        }
    }
    let begins = std::iter::once(0).chain(ends.iter().copied());
    let ranges = begins.zip(&ends).map(|(begin, end)| begin..*end).collect();
    (order, ranges)
}
