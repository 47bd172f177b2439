//! Where the requests of a run repeat: stretches of an [`OpStream`] in which every op is the one a period before it.

use crate::ops::{AllocId, Op, OpStream};

/// A stretch of ops that are the same window again and again, proven op by op: kind, size, stream and pool are equal, and every allocation
/// that an op names is the one that the op of a period before names, plus [`Repeat::shift`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Repeat {
    /// First op of the first window: a request.
    pub(crate) start: usize,
    /// After the last op that repeats; the last window may be cut.
    pub(crate) end: usize,
    /// Ops of a window.
    pub(crate) period: usize,
    /// Requests of a window: by so much ids differ from one window to the next.
    pub(crate) shift: u32,
    /// The smallest id that the first window names. Older allocations are never named in the stretch, and newer windows name none below
    /// this and their shifts.
    oldest: u32,
}

impl Repeat {
    /// The smallest id that is named from the window on that begins at an op.
    pub(crate) fn oldest_at(&self, edge: usize) -> u32 {
        let n_windows = (edge - self.start) / self.period;
        self.oldest + self.shift * n_windows as u32
    }

    /// The first beginning of a window at an op or after it.
    pub(crate) fn edge_from(&self, op: usize) -> usize {
        self.start + op.saturating_sub(self.start).next_multiple_of(self.period)
    }
}

/// All stretches of a stream that repeat, by where they start. They may lie within one another: layers within steps.
#[derive(Clone, Debug, Default)]
pub(crate) struct Repeats(Vec<Repeat>);

/// Shorter stretches than this are simulated sooner than they are looked at.
const LEAST_OPS: usize = 256;
/// Places that are remembered by what was before them: a megabyte and a half.
const N_PLACES: usize = 1 << 16;
/// One op in so many is looked up and remembered.
const RARITY: u32 = 3;
/// Periods whose stretches are remembered, so that none is looked at twice.
const N_PERIODS: usize = 16;
/// How far a stretch is followed back from where it was noticed. What is noticed had 64 equal ops before it.
const MOST_BACK: usize = 4096;
/// So many times the ops of a stream are compared with others, and no more.
const MOST_COMPARED: usize = 8;

/// A place among the ops, with what was before it.
#[derive(Clone, Copy, Default)]
struct Place {
    /// Of the 64 ops up to here.
    hash: u64,
    op: u32,
    /// Requests before it.
    n_requests: u32,
}

impl Repeats {
    /// Finds the stretches of a stream. The hashes only propose: what is here was compared op by op.
    pub(crate) fn of(stream: &OpStream) -> Repeats {
        let mut found = Finder {
            stream,
            repeats: Vec::new(),
            looked_at: [(1, 0); N_PERIODS],
            budget: MOST_COMPARED * stream.ops.len(),
        };
        if stream.ops.len() < LEAST_OPS || u32::try_from(stream.ops.len()).is_err() {
            return Repeats::default();
        }
        let mut places = vec![Place::default(); N_PLACES];
        let (mut hash, mut n_requests) = (0u64, 0u32);
        for (index, op) in stream.ops.iter().enumerate() {
            // Each op moves those before it one bit up: after 64 it is forgotten.
            hash = (hash << 1).wrapping_add(word(stream, *op, n_requests));
            n_requests += u32::from(matches!(op, Op::Alloc(_)));
            if hash >> (64 - RARITY) != 0 {
                continue;
            }
            let slot = (hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48) as usize % N_PLACES;
            let now = Place { hash, op: index as u32, n_requests };
            let before = std::mem::replace(&mut places[slot], now);
            if before.hash == hash && before.n_requests < n_requests {
                found.look(index, index - before.op as usize, n_requests - before.n_requests);
            }
        }
        found.repeats.sort_by_key(|repeat| (repeat.start, std::cmp::Reverse(repeat.end)));
        Repeats(found.repeats)
    }

    /// By where they start.
    pub(crate) fn all(&self) -> &[Repeat] {
        &self.0
    }
}

struct Finder<'a> {
    stream: &'a OpStream,
    repeats: Vec<Repeat>,
    /// A period, and up to where it was looked at.
    looked_at: [(usize, usize); N_PERIODS],
    /// Ops that may still be compared.
    budget: usize,
}

impl Finder<'_> {
    /// Looks at how far the ops around one are those of a period before.
    fn look(&mut self, op: usize, period: usize, shift: u32) {
        // A window is also one of twice the length.
        let is_known = |(known, until): &(usize, usize)| op < *until && period.is_multiple_of(*known);
        if self.looked_at.iter().any(is_known) || self.budget == 0 {
            return;
        }
        let is_again = |index: &usize| is_again(self.stream, *index, period, shift);
        let n_ops = self.stream.ops.len();
        let end = (op..n_ops).find(|index| !is_again(index)).unwrap_or(n_ops);
        let back = (period.max(op.saturating_sub(MOST_BACK))..op).rev().take_while(is_again);
        let first = back.last().unwrap_or(op);
        self.budget = self.budget.saturating_sub(end - first);
        // What ends first is forgotten first.
        if let Some(oldest) = self.looked_at.iter_mut().min_by_key(|(_, until)| *until) {
            *oldest = (period, end);
        }
        let is_request = |index: &usize| matches!(self.stream.ops[*index], Op::Alloc(_));
        let Some(start) = (first - period..end).find(is_request) else { return };
        if end < start + (3 * period).max(LEAST_OPS) {
            return;
        }
        let within = |known: &&Repeat| {
            period.is_multiple_of(known.period) && known.start <= start + period && end <= known.end
        };
        if self.repeats.iter().rev().take(N_PERIODS).any(|known| within(&known)) {
            return;
        }
        let oldest = oldest(&self.stream.ops[start..start + period]);
        self.repeats.push(Repeat { start, end, period, shift, oldest });
    }
}

/// The smallest id that ops name.
fn oldest(ops: &[Op]) -> u32 {
    let ids = ops.iter().filter_map(|op| match op {
        Op::Alloc(id) | Op::FreeRequested(id) | Op::FreeCompleted(id) => Some(id.0),
        Op::Trim | Op::ReleasePool(_) | Op::ChangePool(..) | Op::Oom(_) => None,
    });
    ids.min().unwrap_or(u32::MAX)
}

/// What an op asks, in a number: a guess at equality.
fn word(stream: &OpStream, op: Op, n_requests: u32) -> u64 {
    let (kind, of) = match op {
        Op::Alloc(id) => {
            let it = stream.allocation(id);
            (1, it.requested ^ u64::from(it.stream.0) << 48 ^ u64::from(it.pool.0) << 32)
        }
        Op::FreeRequested(id) => (2, u64::from(n_requests.wrapping_sub(id.0))),
        Op::FreeCompleted(id) => (3, u64::from(n_requests.wrapping_sub(id.0))),
        Op::Trim => (4, 0),
        Op::ReleasePool(pool) => (5, u64::from(pool.0)),
        Op::ChangePool(pool, _) => (6, u64::from(pool.0)),
        Op::Oom(_) => (7, 0),
    };
    let mixed = (of.wrapping_mul(8).wrapping_add(kind)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    (mixed ^ (mixed >> 32)).wrapping_mul(0xc4ce_b9fe_1a85_ec53)
}

/// Whether an op is the one a period before it, with ids `shift` higher.
fn is_again(stream: &OpStream, index: usize, period: usize, shift: u32) -> bool {
    let follows = |before: AllocId, now: AllocId| before.0.checked_add(shift) == Some(now.0);
    match (stream.ops[index - period], stream.ops[index]) {
        (Op::Alloc(before), Op::Alloc(now)) => {
            let (one, other) = (stream.allocation(before), stream.allocation(now));
            follows(before, now)
                && (one.requested, one.stream, one.pool) == (other.requested, other.stream, other.pool)
                // Their addresses are asked for.
                && (stream.restored.is_empty() || stream.restored.binary_search(&now).is_err())
                && (stream.restored.is_empty() || stream.restored.binary_search(&before).is_err())
        }
        (Op::FreeRequested(before), Op::FreeRequested(now))
        | (Op::FreeCompleted(before), Op::FreeCompleted(now)) => follows(before, now),
        (Op::Trim, Op::Trim) => true,
        (Op::ReleasePool(before), Op::ReleasePool(now)) => before == now,
        (Op::ChangePool(before, how), Op::ChangePool(now, why)) => (before, how) == (now, why),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Allocation, Builder, PoolIdx, StackId, StreamIdx};

    /// Steps of requests that are given back in the next step, each of another size; `extra` asks for one more in a step.
    fn steps(n: usize, extra: Option<usize>) -> OpStream {
        let mut builder = Builder::new(0);
        let ask = |builder: &mut Builder, requested| {
            let (stack, stream, pool) = (StackId::NONE, StreamIdx(0), PoolIdx::DEFAULT);
            builder.alloc(Allocation { requested, address: 0, stack, stream, pool })
        };
        ask(&mut builder, 1 << 20);
        let mut live = vec![];
        for step in 0..n {
            let mut made = vec![];
            for size in 0..40 {
                made.push(ask(&mut builder, 1000 + 512 * size));
                if extra == Some(step) && size == 7 {
                    ask(&mut builder, 77);
                }
            }
            for id in live.drain(..) {
                builder.op(Op::FreeRequested(id));
                builder.op(Op::FreeCompleted(id));
            }
            live = made;
        }
        builder.finish()
    }

    #[test]
    fn equal_steps_are_one_stretch() {
        let stream = steps(20, None);
        let repeats = Repeats::of(&stream);
        let [repeat] = repeats.all() else { panic!("{repeats:?}") };
        assert_eq!((repeat.period, repeat.shift, repeat.end), (120, 40, stream.ops.len()));
        assert!(repeat.start <= 1 + 40 + 2 * 120, "{repeat:?}");
        for edge in (repeat.start..repeat.end - repeat.period).step_by(repeat.period) {
            assert_eq!(oldest(&stream.ops[edge..edge + repeat.period]), repeat.oldest_at(edge));
        }
    }

    #[test]
    fn layers_within_steps_do_not_hide_the_steps() {
        let mut builder = Builder::new(0);
        let mut live = vec![];
        for _ in 0..3000 {
            for _ in 0..30 {
                for (requested, stays) in [(5 << 20, true), (1 << 20, false)] {
                    let (stack, stream, pool) = (StackId::NONE, StreamIdx(0), PoolIdx::DEFAULT);
                    let id = builder.alloc(Allocation { requested, address: 0, stack, stream, pool });
                    live.push((id, stays));
                }
                live.retain(|(id, stays)| {
                    if !stays {
                        builder.op(Op::FreeRequested(*id));
                        builder.op(Op::FreeCompleted(*id));
                    }
                    *stays
                });
            }
            for (id, _) in live.drain(..).rev() {
                builder.op(Op::FreeRequested(id));
                builder.op(Op::FreeCompleted(id));
            }
        }
        let stream = builder.finish();
        let repeats = Repeats::of(&stream);
        let longest = repeats.all().iter().max_by_key(|repeat| repeat.end - repeat.start).unwrap();
        assert_eq!((longest.period, longest.end), (180, stream.ops.len()));
        assert!(repeats.all().len() < 4, "{repeats:?}");
    }

    #[test]
    fn a_request_more_ends_a_stretch() {
        let stream = steps(40, Some(20));
        let repeats = Repeats::of(&stream);
        let [before, after] = repeats.all() else { panic!("{repeats:?}") };
        // One more request is between the steps of which the next gives back what the last asked for.
        assert!(before.end <= 1 + 40 + 19 * 120 + 8 && after.start > before.end, "{repeats:?}");
    }

    #[test]
    fn nothing_repeats_where_sizes_never_do() {
        let mut builder = Builder::new(0);
        for size in 1..5000u64 {
            let (stack, stream, pool) = (StackId::NONE, StreamIdx(0), PoolIdx::DEFAULT);
            let id = builder.alloc(Allocation { requested: size * 512, address: 0, stack, stream, pool });
            builder.op(Op::FreeRequested(id));
            builder.op(Op::FreeCompleted(id));
        }
        assert!(Repeats::of(&builder.finish()).all().is_empty());
    }
}
