//! How long variables of the program hold what autograd no longer keeps.
//!
//! A tensor that autograd keeps shows nothing of the variables that hold it as well: its recorded end is in the backward pass. What the call
//! stacks show is who made it and who takes it. The caller of both holds it at least until the call that takes it has returned, and then
//! assigns the variable again (`x = layer(x)`) or holds it on until it returns itself (`edges = make(x)`).

use std::ops::Range;

use super::program::{Phase, Program, Tensor};
use super::{End, layers};

/// So many later requests are looked at.
const FAR: usize = 512;
/// What an operation makes beside its output, as statistics and masks, is less than so many parts of it.
const BESIDE: u64 = 4;

/// The requests of one forward pass.
pub(super) struct Holds {
    /// Indices of its tensors.
    own: Vec<usize>,
    /// Where the backward pass begins.
    start: u64,
}

impl Holds {
    pub(super) fn of(program: &Program<'_>, forward: Range<usize>, start: u64) -> Holds {
        let is_own = |index: &usize| program.tensors[*index].phase == Phase::Forward;
        Holds { own: forward.filter(is_own).collect(), start }
    }

    /// The request of the operation that takes a tensor: the next that is not one of the operation that made it. Its position in `own`.
    fn taken(&self, program: &Program<'_>, index: usize) -> Option<usize> {
        let made = &program.tensors[index];
        let first = self.own.partition_point(|own| *own <= index);
        let is_beside = |it: &Tensor| it.stack == made.stack && it.bytes < made.bytes / BESIDE;
        (first..self.own.len()).find(|at| !is_beside(&program.tensors[self.own[*at]]))
    }

    /// When the operation that takes it has what it asks for first.
    pub(super) fn taken_at(&self, program: &Program<'_>, index: usize) -> Option<u64> {
        self.taken(program, index).map(|at| program.tensors[self.own[at]].born)
    }

    /// Until when variables hold a tensor.
    pub(super) fn until(&self, program: &Program<'_>, index: usize, end: End) -> u64 {
        let made = &program.tensors[index];
        let Some(taken) = self.taken(program, index) else { return self.start - 1 };
        let born = |at: usize| self.own.get(at).map_or(self.start, |own| program.tensors[*own].born);
        if end == End::Least {
            return (born(taken + 1) - 1).max(made.born + 1);
        }
        let frames = |at: usize| layers::frames(program.stacks(), program.tensors[self.own[at]].stack);
        let maker: Vec<u32> = layers::frames(program.stacks(), made.stack).collect();
        let taker: Vec<u32> = frames(taken).collect();
        let depth = maker.iter().zip(&taker).take_while(|(one, other)| one == other).count();
        let place = |frame: u32| program.stacks().frames.get(frame as usize);
        let is_same = |one: u32, other: u32| {
            let names = |frame| place(frame).map(|frame| (&frame.name, &frame.file));
            names(one) == names(other)
        };
        let line = |frame: u32| place(frame).map_or(0, |frame| frame.line);
        // The same function a line further up, or at the same place: it is called again, as the next layer, and its caller holds the tensor.
        let is_next_call = match (maker.get(depth), taker.get(depth)) {
            (Some(one), Some(other)) => is_same(*one, *other) && line(*other) < line(*one),
            (one, other) => one.is_none() && other.is_none(),
        };
        let mut last = taker.get(depth).copied();
        let later = (taken + 1..self.own.len()).take(FAR).find(|at| {
            let mut all = frames(*at);
            if !taker[..depth].iter().all(|frame| all.next() == Some(*frame)) {
                return true;
            }
            let here = all.next();
            let stays = match (last, here) {
                (Some(before), Some(here)) if is_next_call || end == End::Most => {
                    is_same(before, here) && line(here) >= line(before)
                }
                (before, here) => before == here,
            };
            last = here;
            !stays
        });
        (later.map_or(born(taken + FAR), born) - 1).max(made.born + 1)
    }
}
