//! What is live at a moment of a predicted run.

use rustc_hash::FxHashMap;

use crate::ops::{AllocId, Frame, Op, OpStream};

/// What is live together and grows with one product, or follows no law.
#[derive(Clone, Debug, PartialEq)]
pub struct Share {
    /// Index of the product; none where no law is known.
    pub product: Option<usize>,
    /// Bytes for each unit of the product; all bytes where no law is known.
    pub unit: f64,
    /// Bytes at the point.
    pub bytes: u64,
    /// By call site, most first.
    pub sites: Vec<SiteShare>,
}

/// One call site's part of a [`Share`].
#[derive(Clone, Debug, PartialEq)]
pub struct SiteShare {
    /// The line to show; none where no stack was recorded.
    pub site: Option<Frame>,
    /// As in [`Share::unit`].
    pub unit: f64,
    /// Bytes at the point.
    pub bytes: u64,
    /// How many allocations.
    pub number: u64,
}

/// At most so many requests of one place are live together in one run, and so many in another: a loop over the sequence.
pub(super) struct Growth {
    /// All requests of the base from there.
    pub(super) requests: Vec<AllocId>,
    /// How many are live together in the base.
    pub(super) most: u64,
    /// How many would be: at least, at best guess, at most.
    pub(super) number: (u64, u64, u64),
}

/// A number that grows by less than this power of the variables is that of something else.
const LEAST_POWER: f64 = 0.5;

/// Whether numbers of the base and of another run differ as if they grew with what changed by `ratio`.
pub(super) fn is_growth(number: u64, other: u64, ratio: f64) -> bool {
    let (number, other) = (number as f64, other as f64);
    other > 0.0 && ratio > 1.0 && (number / other).ln() >= LEAST_POWER * ratio.ln()
}

/// How many more there are of each allocation, so that there are as many as `number` says.
pub(super) fn copies(growth: &[Growth], number: impl Fn(&Growth) -> u64) -> FxHashMap<AllocId, u32> {
    let mut copies = FxHashMap::default();
    for growth in growth {
        let missing = u128::from(number(growth).saturating_sub(growth.most));
        // Spread evenly.
        let until = |index: u128| index * missing / u128::from(growth.most.max(1));
        for (index, id) in (0..).zip(&growth.requests) {
            let more = until(index + 1) - until(index);
            copies.insert(*id, u32::try_from(more).unwrap_or(u32::MAX));
        }
    }
    copies
}

/// How many requests of each place are live together at most.
pub(super) fn most_live(stream: &OpStream, places: &[u32]) -> FxHashMap<u32, u64> {
    let n_places = places.iter().max().map_or(0, |place| *place as usize + 1);
    let mut live = vec![(0_u64, 0_u64); n_places];
    let standing = stream.initial_allocs.iter().map(|id| Op::Alloc(*id));
    for op in standing.chain(stream.ops.iter().copied()) {
        match op {
            Op::Alloc(id) => {
                let (now, most) = &mut live[places[id.0 as usize] as usize];
                *now += 1;
                *most = (*most).max(*now);
            }
            Op::FreeRequested(id) => {
                let (now, _) = &mut live[places[id.0 as usize] as usize];
                *now = now.saturating_sub(1);
            }
            Op::FreeCompleted(_) | Op::Trim | Op::ReleasePool(_) | Op::ChangePool(..) | Op::Oom(_) => {}
        }
    }
    (0..).zip(live).filter(|(_, (_, most))| *most > 0).map(|(place, (_, most))| (place, most)).collect()
}

/// The op after which most bytes are live.
pub(super) fn peak(stream: &OpStream, size: impl Fn(AllocId) -> u64) -> Option<usize> {
    let mut live: u64 = stream.initial_allocs.iter().map(|id| size(*id)).sum();
    let (mut most, mut at) = (0, None);
    for (index, op) in stream.ops.iter().enumerate() {
        match op {
            Op::Alloc(id) => {
                live = live.saturating_add(size(*id));
                if live > most {
                    (most, at) = (live, Some(index));
                }
            }
            Op::FreeRequested(id) => live = live.saturating_sub(size(*id)),
            Op::FreeCompleted(_) | Op::Trim | Op::ReleasePool(_) | Op::ChangePool(..) | Op::Oom(_) => {}
        }
    }
    at
}

/// Goes through the requests until one of each kind that is wanted was made, and shows it with what is live then, the latest first.
pub(super) fn when_first_asked(
    stream: &OpStream,
    kind_of: &[u32],
    mut is_wanted: Vec<bool>,
    mut visit: impl FnMut(u32, &[u32]),
) {
    let mut left = is_wanted.iter().filter(|is_wanted| **is_wanted).count();
    let mut is_live = vec![false; stream.allocations.len()];
    stream.initial_allocs.iter().for_each(|id| is_live[id.0 as usize] = true);
    for op in &stream.ops {
        if left == 0 {
            return;
        }
        match *op {
            Op::Alloc(AllocId(id)) => {
                let kind = kind_of[id as usize];
                if std::mem::take(&mut is_wanted[kind as usize]) {
                    let live = (0..id as usize).rev().filter(|id| is_live[*id]).map(|id| kind_of[id]);
                    visit(kind, &live.collect::<Vec<_>>());
                    left -= 1;
                }
                is_live[id as usize] = true;
            }
            Op::FreeRequested(id) => is_live[id.0 as usize] = false,
            Op::FreeCompleted(_) | Op::Trim | Op::ReleasePool(_) | Op::ChangePool(..) | Op::Oom(_) => {}
        }
    }
}

/// What is live after an op, in the order of requests.
pub(super) fn live_after(stream: &OpStream, op: usize) -> impl Iterator<Item = AllocId> {
    let mut is_live = vec![false; stream.allocations.len()];
    stream.initial_allocs.iter().for_each(|id| is_live[id.0 as usize] = true);
    for op in &stream.ops[..=op] {
        match op {
            Op::Alloc(id) => is_live[id.0 as usize] = true,
            Op::FreeRequested(id) => is_live[id.0 as usize] = false,
            Op::FreeCompleted(_) | Op::Trim | Op::ReleasePool(_) | Op::ChangePool(..) | Op::Oom(_) => {}
        }
    }
    (0..).zip(is_live).filter(|(_, is_live)| *is_live).map(|(id, _)| AllocId(id))
}

/// What something grows with, and where it was asked for.
type Source<'a> = (Option<usize>, Option<&'a Frame>);

/// Collects [`Share`]s.
#[derive(Default)]
pub(super) struct Shares<'a> {
    sites: FxHashMap<Source<'a>, (f64, f64, u64)>,
}

impl<'a> Shares<'a> {
    pub(super) fn add(
        &mut self,
        product: Option<usize>,
        site: Option<&'a Frame>,
        unit: f64,
        bytes: f64,
        number: u64,
    ) {
        let sum = self.sites.entry((product, site)).or_default();
        *sum = (sum.0 + unit, sum.1 + bytes, sum.2 + number);
    }

    pub(super) fn finish(self) -> Vec<Share> {
        let mut shares: FxHashMap<Option<usize>, Vec<SiteShare>> = FxHashMap::default();
        for ((product, site), (unit, bytes, number)) in self.sites {
            let site = SiteShare { site: site.cloned(), unit, bytes: bytes.round() as u64, number };
            shares.entry(product).or_default().push(site);
        }
        let line =
            |site: &SiteShare| site.site.as_ref().map(|it| (it.file.clone(), it.line, it.name.clone()));
        let whole = |(product, mut sites): (Option<usize>, Vec<SiteShare>)| {
            sites.sort_by(|one, other| other.bytes.cmp(&one.bytes).then_with(|| line(one).cmp(&line(other))));
            let unit = sites.iter().map(|site| site.unit).sum();
            let bytes = sites.iter().fold(0, |sum: u64, site| sum.saturating_add(site.bytes));
            Share { product, unit, bytes, sites }
        };
        let mut shares: Vec<Share> = shares.into_iter().map(whole).collect();
        shares.sort_by_key(|share| (std::cmp::Reverse(share.bytes), share.product));
        shares
    }
}
