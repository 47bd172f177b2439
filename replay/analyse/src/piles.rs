//! Blocks of one stack that are held together, and what happened between their requests: taken in one go, or collected by a loop.
//!
//! ```text
//!   taken in one go     A A A A A                         nothing else is asked for in between
//!   collected           A x y A x y A x y                 the stacks of A, x and y part in the function that loops
//! ```
//! Where that function is a model's, the blocks are those of its layers; where it is a library's (an optimizer's), those of its lists.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use gputrace_schemas::event::{Bytes, StackId};
use gputrace_sim::stacks::python_package;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::lives::{Life, Lives};
use crate::roles::Roles;
use gputrace_trace::Definitions;
use gputrace_trace::backward::python_lines;
use gputrace_trace::ledger::SiteId;

/// Blocks of a stack are a pile from this number on.
const LEAST_BLOCKS: usize = 4;
/// And from this part of what was held on: one in so many.
const LEAST_PART: u64 = 20;
/// Requests that are looked at between the first block of a pile and its last.
const MOST_BETWEEN: usize = 50_000;

/// How a pile came about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Course {
    /// In one go: nothing else was asked for in between.
    AtOnce,
    /// A loop of the program made one each time, and all went together, or none.
    Collected,
}

/// Blocks of one stack, held together.
#[derive(Clone, Debug)]
pub struct Pile {
    /// The line that requested them.
    pub site: SiteId,
    /// The stack.
    pub stack: StackId,
    /// A model's code requested them.
    pub is_in_model: bool,
    /// Its purpose: an index of [`crate::lifetimes::Lifetimes::role_names`].
    pub role: u16,
    /// How much.
    pub bytes: Bytes,
    /// In how many blocks.
    pub blocks: u64,
    /// All are of one size.
    pub is_equal: bool,
    /// How it came about.
    pub course: Course,
    /// In how many turns of the loop: between two of them, the loop itself requested something.
    pub turns: u64,
    /// The program's line in the function that loops; empty where none is known.
    pub looped_at: String,
}

/// A line of Python: function, file, line.
type Line<'a> = (&'a str, &'a str, u32);

/// The piles of a device among what `is_held` names, most first.
pub(crate) fn of(
    lives: &Lives,
    roles: &Roles,
    definitions: &dyn Definitions,
    device: i16,
    all: Bytes,
    is_held: &impl Fn(&Life) -> bool,
) -> Vec<Pile> {
    let mut by_stack: BTreeMap<StackId, Vec<usize>> = BTreeMap::new();
    for (idx, life) in lives.list.iter().enumerate() {
        if life.device == device && !life.is_from_before && is_held(life) {
            by_stack.entry(life.stack).or_default().push(idx);
        }
    }
    let mut paths: FxHashMap<StackId, Vec<Line<'_>>> = FxHashMap::default();
    let mut piles: Vec<Pile> = by_stack
        .into_iter()
        .filter(|(_, held)| held.len() >= LEAST_BLOCKS)
        .filter_map(|(stack, held)| {
            let bytes: u64 = held.iter().map(|idx| lives.list[*idx].bytes.0).sum();
            let (first, last) = (*held.first()?, *held.last()?);
            let life = &lives.list[first];
            let is_much = bytes.saturating_mul(LEAST_PART) >= all.0 && bytes > 0;
            let (course, looped_at, turns) = is_much
                .then(|| course(lives, definitions, (device, stack), &held, (first, last), &mut paths))??;
            Some(Pile {
                site: life.site,
                stack,
                is_in_model: paths.get(&stack).is_some_and(|path| path.iter().any(is_model)),
                role: roles.of_lives.get(first).copied()?,
                bytes: Bytes(bytes),
                blocks: held.len() as u64,
                is_equal: held.iter().all(|idx| lives.list[*idx].requested == life.requested),
                course,
                turns,
                looped_at,
            })
        })
        .collect();
    piles.sort_by_key(|pile| (Reverse(pile.bytes), pile.site));
    piles
}

/// Where a model is called.
fn is_model((function, file, _): &Line<'_>) -> bool {
    file.ends_with("/torch/nn/modules/module.py") && function.ends_with("_call_impl")
}

/// A function that only calls another: what `torch.no_grad` makes of one, or `functools` and `contextlib`.
fn is_wrapper((function, file, _): &Line<'_>) -> bool {
    *function == "decorate_context" || file.ends_with("/functools.py") || file.ends_with("/contextlib.py")
}

/// The lines of a stack, outermost first; those of the call of `backward` for what the backward pass asked for.
fn path<'a>(definitions: &'a dyn Definitions, id: StackId) -> Vec<Line<'a>> {
    let Some(stack) = definitions.stack(id) else { return vec![] };
    let mut lines: Vec<Line<'_>> = python_lines(definitions, stack).collect();
    if let Some(caller) = stack.backward.as_ref().filter(|_| lines.is_empty())
        && let Some(stack) = definitions.stack(caller.caller)
    {
        lines = python_lines(definitions, stack).collect();
    }
    lines.reverse();
    lines
}

fn course<'a>(
    lives: &Lives,
    definitions: &'a dyn Definitions,
    (device, stack): (i16, StackId),
    held: &[usize],
    (first, last): (usize, usize),
    paths: &mut FxHashMap<StackId, Vec<Line<'a>>>,
) -> Option<(Course, String, u64)> {
    let between = lives.list.get(first..=last)?;
    if between.len() > MOST_BETWEEN {
        return None;
    }
    let others = || between.iter().filter(|life| life.device == device && life.stack != stack);
    let own = paths.entry(stack).or_insert_with(|| path(definitions, stack)).clone();
    let named = |line: Option<&Line<'_>>| {
        line.map(|(function, file, line)| format!("{function} ({file}:{line})")).unwrap_or_default()
    };
    if others().next().is_none() {
        let own_line = own.iter().rfind(|(_, file, _)| python_package(file).is_none());
        return Some((Course::AtOnce, named(own_line), 1));
    }
    if others().count() < held.len() - 1 {
        return None;
    }
    // Where the stacks part.
    let (mut common, mut n_work) = (own.len(), 0);
    for life in between.iter().filter(|life| life.device == device) {
        let path = paths.entry(life.stack).or_insert_with(|| path(definitions, life.stack));
        if path.is_empty() {
            continue;
        }
        n_work += usize::from(path.iter().any(is_model));
        if life.stack == stack {
            continue;
        }
        common = own.iter().zip(path.iter()).take(common).take_while(|(a, b)| a == b).count();
    }
    // What a decorator calls is called by the line before it.
    let common = common + own.get(common..)?.iter().take_while(|line| is_wrapper(line)).count();
    // Where one line calls all of them, as `net(tokenize(x))` does, its function loops.
    let is_of_program = |at: usize| own.get(at).is_some_and(|(_, file, _)| python_package(file).is_none());
    let at = if is_of_program(common) { common } else { common.checked_sub(1)? };
    let loops = own.get(at).filter(|_| is_of_program(at))?;
    // Shards of a checkpoint are loaded in a loop, too, and no model runs in between.
    if n_work < held.len() || own[..common].iter().any(is_model) {
        return None;
    }
    // A ring lets its oldest go as it takes the next. Temporaries of the last turn may be of the same stack.
    let mut deaths: Vec<u32> = held.iter().map(|idx| lives.list[*idx].died).collect();
    deaths.sort_unstable();
    let few = (deaths.len() / 8).max(LEAST_BLOCKS).min(deaths.len() / 4);
    let (begin, end) = (deaths[few], deaths[deaths.len() * 3 / 4]);
    let later = lives.list.get(first..).unwrap_or_default().iter().filter(|life| life.stack == stack);
    let is_ring = later.into_iter().any(|life| begin < life.born && life.born < end);
    // One that is full has let others go since it took the first of these.
    let (begin, end) = (lives.list.get(first)?.born, lives.list.get(last)?.born);
    let earlier = lives.list.get(..first).unwrap_or_default().iter();
    let gone = earlier.filter(|life| life.stack == stack && life.device == device);
    let n_gone = gone.filter(|life| begin < life.died && life.died < end).count();
    if is_ring || n_gone >= LEAST_BLOCKS {
        return None;
    }
    // Other lines of the function that loops, and what it calls beside that line, part one turn from the next.
    let is_of_loop = |life: &Life| {
        let path = paths.get(&life.stack).map_or(&[][..], Vec::as_slice);
        !path.is_empty() && path.iter().zip(&own).take_while(|(a, b)| a == b).count() <= common
    };
    let held: FxHashSet<u32> = held.iter().map(|idx| lives.list[*idx].born).collect();
    let (mut turns, mut is_next) = (0_u64, true);
    for life in between.iter().filter(|life| life.device == device) {
        if life.stack == stack {
            turns += u64::from(is_next && held.contains(&life.born));
            is_next &= !held.contains(&life.born);
        } else {
            is_next |= is_of_loop(life);
        }
    }
    Some((Course::Collected, named(Some(loops)), turns.max(1)))
}
