//! What a program would ask for at another size, from runs at some sizes.
//!
//! The run with the largest variables is the base: its requests are matched to those of every other run, each request's size
//! becomes the smallest law that gives what was recorded ([`law`]), and the base's ops with the sizes of another point are
//! a new [`OpStream`] to be simulated. Where the runs do not decide, there is a smallest and a largest stream beside the best
//! one, and the reason.
//!
//! ```text
//!   batch 4:  w 40M  x 10M  y 6M          w: 40 MiB             x: 2.5 MiB for each sample
//!   batch 8:  w 40M  x 20M  z 3M  y 12M   y: 1.5 MiB for each   z: one run only, 0 to 12 MiB at batch 32
//! ```

mod align;
mod answer;
mod common;
mod convolutions;
mod copies;
mod gpus;
pub mod law;
mod live;
mod others;
mod refusals;
mod scratch;
mod sums;

use std::cell::LazyCell;
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

pub(crate) use self::align::is_generated;
use self::align::{Interner, Steps, align, match_standing};
pub use self::answer::Forecast;
use self::common::NONE;
use self::convolutions::{Missing, Pass};
pub use self::gpus::Threads;
use self::law::{Basis, Fit, Law, Standing, Term};
use self::live::{Growth, is_growth, live_after, most_live, peak};
pub use self::live::{Share, SiteShare};
use self::others::{Others, Which};
pub use self::scratch::ran_out;
use self::scratch::{Scratch, scratch};
use self::sums::{Parts, Sum};
use crate::bytes::iec;
use crate::cores::on_all_cores;
use crate::ops::{AllocId, Frame, History, Op, OpStream, StackId, Surroundings};

/// More variables would need more runs than anybody makes, and their products more time.
const MOST_VARIABLES: usize = 6;
/// What somebody else held is the same in two runs, up to this part and these bytes: code is loaded when it is first used.
const SAME_SHARE: f64 = 0.02;
const SAME_BYTES: u64 = 4 << 20;
/// So many requests in a row that a run did not make are of a step that it did not make. Chosen and not measured.
const PART_OF_A_STEP: usize = 8;
/// One in so many of a loop's requests may have a size of its own. Chosen and not measured.
const OF_A_LOOP: usize = 10;
/// Sizes up to this factor are near: of two runs one is mostly as far from the other. Chosen and not measured.
const NEAR: f64 = 2.0;
/// A power with which a smaller part of what follows no law grows is by chance. Chosen and not measured.
const PART_OF_LAWLESS: u64 = 10;
/// Most bytes of one request: far more than any device has, and far less than would overflow.
const MOST_BYTES: u64 = 1 << 50;
/// Most requests of a predicted run.
const MOST_REQUESTS: usize = 1 << 25;

/// A recorded run.
#[derive(Clone, Debug)]
pub struct Run<'a> {
    /// The value of each variable.
    pub at: Vec<u64>,
    /// The requests to one device's allocator.
    pub stream: &'a OpStream,
}

/// Index of the run with the largest values: predictions continue that.
pub fn largest(runs: &[Run]) -> usize {
    let extent = |run: &Run| run.at.iter().map(|value| *value as f64).product::<f64>();
    let largest = (0..runs.len()).max_by(|one, other| {
        let [one, other] = [one, other].map(|index| (extent(&runs[*index]), &runs[*index].at));
        one.0.total_cmp(&other.0).then_with(|| one.1.cmp(other.1))
    });
    largest.unwrap_or(0)
}

/// Why runs predict nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unpredictable {
    /// There are no two different points.
    #[error(
        "at least two runs with different values are needed: one shows the requests, the other how they scale"
    )]
    OnePoint,
    /// A value that nothing can be in proportion to, or too many.
    #[error("values are whole numbers from 1 on, of at most {MOST_VARIABLES} variables")]
    NoPoint,
    /// The history of a run has holes; the text says why.
    #[error("a run cannot be replayed: {0}")]
    Broken(String),
    /// A single request would be for more than any device has.
    #[error("a single request would be {}: no device has that much", iec(*.0))]
    TooMuch(u64),
    /// A prediction would hold more requests than can be simulated.
    #[error("the program would make more than {MOST_REQUESTS} requests")]
    TooLarge,
}

/// Requests of a program, as laws in its variables.
pub struct Model<'a> {
    base: usize,
    runs: Vec<Run<'a>>,
    basis: Basis,
    /// Where the requests of each run came from.
    places: Vec<Vec<u32>>,
    /// For each run and allocation of the base, the allocation of that run; empty for the base itself.
    matched: Vec<Vec<u32>>,
    fits: Vec<Fit>,
    /// For each fit what is known of it where it is a sum's parts.
    parts: Vec<Option<Parts>>,
    /// Sums that are in one in the runs and may not be at another size, by what comes of them.
    sums_in_one: FxHashMap<AllocId, Sum>,
    /// How many threads the GPU runs at a time.
    threads: Threads,
    /// For each fit whether it is of a library's workspace.
    is_workspace: Vec<bool>,
    /// Allocations of the base that the program can do without.
    optional: FxHashSet<AllocId>,
    /// For which pass of a convolution a workspace is, where that is known.
    passes: FxHashMap<AllocId, Pass>,
    /// Workspaces that no run asked for, and that are likely far from them.
    missing: Vec<Missing>,
    /// For each allocation of the base the index of its fit.
    fit_of: Vec<u32>,
    /// What others hold, by the names of the base: none where it is constant.
    others: Vec<Option<Fit>>,
    /// How many requests of each place are live together at most, for each run.
    most_live: Vec<FxHashMap<u32, u64>>,
    /// By which factor the sizes of each fit scatter about it.
    scatter: Vec<f64>,
    /// Requests that another run made and the base did not.
    n_left_out: usize,
}

/// Requests with one law.
struct Alike {
    scratch: Scratch,
    /// For each run; 0 where it has no such request.
    sizes: Box<[u64]>,
}

/// The unknown parts of a prediction, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Open {
    /// Why.
    pub why: Why,
    /// How many requests it concerns.
    pub n_requests: usize,
    /// Their sizes together at least and at most, bytes.
    pub bytes: (u64, u64),
    /// The call site with most of them, by bytes that are not known.
    pub site: Option<Frame>,
}

impl Open {
    /// Whether it hangs on what a library or the program chooses, and not on one number that decides all.
    pub(crate) fn is_chosen(&self) -> bool {
        match self.why {
            Why::Size(standing, _) => is_chosen(standing),
            Why::Missing => true,
            Why::Full | Why::Number | Why::Others => false,
        }
    }
}

/// Whether what has this standing hangs on a choice, and not on which of several laws holds.
fn is_chosen(standing: Standing) -> bool {
    !matches!(standing, Standing::Checked | Standing::Ambiguous)
}

/// Why something is not known.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Why {
    /// The law of a size; the variables of which another value would tell more.
    Size(Standing, Vec<usize>),
    /// Parts of sums, which grow until they fill the GPU.
    Full,
    /// How many requests there are: their number was another in other runs.
    Number,
    /// What libraries and contexts hold differs between the runs.
    Others,
    /// Workspaces of convolutions that no run asked for.
    Missing,
}

/// The requests of a program at a point.
pub struct Prediction<'a> {
    /// The known facts, and the unknown ones.
    pub known: Arc<Known>,
    /// The best guess.
    pub best: OpStream,
    /// Requests that the program can do without, where there is no room for them.
    optional: FxHashMap<AllocId, Pass>,
    others: Option<Others<'a>>,
}

/// The facts known about what a program would ask for at a point, and what is not.
#[derive(Clone, Debug)]
pub struct Known {
    /// The value of each variable.
    pub at: Vec<u64>,
    /// The unknown parts.
    pub open: Vec<Open>,
    /// What is live when most is, by what it grows with, most first.
    pub shares: Vec<Share>,
    /// Convolutions with workspaces are made at a size that no run came near: libraries choose their algorithms by it.
    pub may_choose: bool,
    /// By which factor what is live then scatters about the laws, as a whole: 1 where all laws hold.
    pub scatter: f64,
}

impl<'a> Model<'a> {
    /// Understands some runs.
    ///
    /// # Errors
    /// Why they predict nothing.
    pub fn of(runs: Vec<Run<'a>>) -> Result<Model<'a>, Unpredictable> {
        Model::on(runs, Threads::default())
    }

    /// The same of runs on a GPU of which is known how many threads it runs at a time.
    ///
    /// # Errors
    /// As [`Model::of`].
    pub fn on(runs: Vec<Run<'a>>, threads: Threads) -> Result<Model<'a>, Unpredictable> {
        let n_variables = runs.first().map_or(0, |run| run.at.len());
        let is_point = |run: &Run| run.at.len() == n_variables && run.at.iter().all(|value| *value > 0);
        if !(1..=MOST_VARIABLES).contains(&n_variables) || !runs.iter().all(is_point) {
            return Err(Unpredictable::NoPoint);
        }
        if runs.iter().all(|run| run.at == runs[0].at) {
            return Err(Unpredictable::OnePoint);
        }
        if let Some(why) = runs.iter().find_map(|run| match &run.stream.history {
            History::Broken(why) => Some(why.clone()),
            History::Complete | History::StartsLate => None,
        }) {
            return Err(Unpredictable::Broken(why));
        }
        let base = largest(&runs);
        let (mut interner, basis) = (Interner::default(), Basis::new(n_variables));
        let steps: Vec<Steps> = runs.iter().map(|run| Steps::new(run.stream, &mut interner)).collect();
        let matched = (0..runs.len()).map(|index| {
            if index == base {
                return vec![];
            }
            let (one, other) = ((&steps[base], &*runs[base].at), (&steps[index], &*runs[index].at));
            let mut matched = align(one, other, &basis, &mut interner);
            match_standing(runs[base].stream, runs[index].stream, &mut matched);
            matched
        });
        let matched = matched.collect::<Vec<_>>();
        let places: Vec<Vec<u32>> = steps.into_iter().map(|steps| steps.place_of).collect();
        let most_live = on_all_cores(runs.len(), |run| Some(most_live(runs[run].stream, &places[run])));
        let mut model = Model {
            base,
            runs,
            basis,
            places,
            matched,
            fits: vec![],
            parts: vec![],
            sums_in_one: FxHashMap::default(),
            threads,
            is_workspace: vec![],
            optional: FxHashSet::default(),
            passes: FxHashMap::default(),
            missing: vec![],
            fit_of: vec![],
            others: vec![],
            most_live,
            scatter: vec![],
            n_left_out: 0,
        };
        model.fit();
        model.fit_others();
        model.n_left_out = model.left_out();
        Ok(model)
    }

    /// The run that predictions continue.
    pub fn base(&self) -> &Run<'a> {
        &self.runs[self.base]
    }

    /// Index of the run that predictions continue.
    pub fn base_index(&self) -> usize {
        self.base
    }

    /// The products that laws consist of.
    pub fn basis(&self) -> &Basis {
        &self.basis
    }

    /// Requests that another run made and the base did not: predictions leave them out.
    pub fn n_left_out(&self) -> usize {
        self.n_left_out
    }

    /// Whether code that was generated for one size requests memory: for another size it is other code.
    pub fn has_generated_code(&self) -> bool {
        self.base().stream.stacks.frames.iter().any(|frame| is_generated(&frame.file))
    }

    /// Which part of the base's requests nothing is known of but that they were made there.
    pub fn unknown_share(&self) -> f64 {
        let is_unknown = |fit: &&u32| self.fits[**fit as usize].standing == Standing::Unmatched;
        self.fit_of.iter().filter(is_unknown).count() as f64 / self.fit_of.len().max(1) as f64
    }

    /// Which part of the bytes that are live at the base's peak follows no law of the variables.
    pub fn lawless_share(&self) -> f64 {
        let size = |id: AllocId| self.base().stream.allocation(id).requested;
        let Some(peak) = peak(self.base().stream, size) else { return 0.0 };
        let live = live_after(self.base().stream, peak);
        let (all, lawless) = live.fold((0, 0), |(all, lawless), id| {
            let standing = self.fits[self.fit_of[id.0 as usize] as usize].standing;
            let has_none = matches!(standing, Standing::Lawless | Standing::Unmatched);
            (all + size(id), lawless + if has_none { size(id) } else { 0 })
        });
        lawless as f64 / all.max(1) as f64
    }

    /// Whether most requests of every run were recorded with their stacks: what is matched by them is of one program.
    pub fn has_stacks(&self) -> bool {
        self.runs.iter().all(|Run { stream, .. }| {
            let of = &stream.allocations;
            of.iter().filter(|it| it.stack != StackId::NONE).count() * 2 >= of.len()
        })
    }

    /// Requests of the base that every other run made, too, and all of them.
    pub fn n_matched(&self) -> (usize, usize) {
        let n = self.fit_of.len();
        ((0..n).filter(|id| self.n_runs(*id) + 1 == self.runs.len()).count(), n)
    }

    fn fit(&mut self) {
        let stream = self.runs[self.base].stream;
        let scratch = scratch(stream);
        let size_of = |id: usize, (run, matched): (&Run, &Vec<u32>)| match matched.get(id) {
            None => stream.allocations[id].requested,
            Some(&NONE) => 0,
            Some(other) => run.stream.allocation(AllocId(*other)).requested,
        };
        let mut known: FxHashMap<Scratch, FxHashMap<Box<[u64]>, u32>> = FxHashMap::default();
        let (mut all, mut sizes) = (vec![], vec![]);
        let index_of = |id: usize| {
            sizes.clear();
            sizes.extend(self.runs.iter().zip(&self.matched).map(|it| size_of(id, it)));
            let known = known.entry(scratch[id]).or_default();
            if let Some(index) = known.get(&sizes[..]) {
                return *index;
            }
            let (next, sizes): (u32, Box<[u64]>) = (all.len() as u32, sizes[..].into());
            known.insert(sizes.clone(), next);
            all.push(Alike { scratch: scratch[id], sizes });
            next
        };
        self.fit_of = (0..stream.allocations.len()).map(index_of).collect();
        let fits: Vec<(Fit, f64)> = all.iter().map(|alike| self.law(&alike.sizes)).collect();
        let is_tensors = |fit: &Fit| fit.standing == Standing::Checked && fit.laws[0].len() == 1;
        let products = fits.iter().filter(|(fit, _)| is_tensors(fit)).map(|(fit, _)| fit.laws[0][0].product);
        let products: FxHashSet<usize> = products.collect();
        // Where nothing that has a law grows with a variable, what has none shows how it grows, and how it scatters.
        let most = (0..self.basis.n_variables()).map(|variable| {
            let powers = products.iter().map(|product| self.basis.products()[*product][variable]);
            powers.max().filter(|most| *most > 0)
        });
        let most: Vec<Option<u8>> = most.collect();
        let lawless = most.contains(&None).then(|| self.lawless(&fits, &all));
        let (most, wider): (Vec<u8>, Option<f64>) = match lawless {
            None => (most.into_iter().flatten().collect(), None),
            Some((shown, scatter)) => {
                (most.iter().zip(shown).map(|(most, shown)| most.unwrap_or(shown)).collect(), scatter)
            }
        };
        let of_all = |((fit, scatter), Alike { scratch, sizes }): ((Fit, f64), &Alike)| {
            let fit = match (fit.standing, scratch) {
                (Standing::Lawless, Scratch::No) => self.basis.flattened(fit, &self.base().at, &most, wider),
                (Standing::Lawless | Standing::Unchecked, Scratch::Workspace | Scratch::Sum { .. }) => {
                    let (points, sizes) = self.points(sizes);
                    self.basis.workspace(&points, &sizes, |product| products.contains(&product))
                }
                _ => fit,
            };
            (fit, scatter)
        };
        (self.fits, self.scatter) = fits.into_iter().zip(&all).map(of_all).unzip();
        self.is_workspace = all.iter().map(|alike| alike.scratch == Scratch::Workspace).collect();
        self.optional = scratch::optional(stream, &scratch);
        self.find_copies(&all);
        self.find_convolutions(&all);
        self.inherit();
        self.parts = self.parts_of_sums(&all);
        self.sums_in_one = self.sums_in_one(&all);
    }

    /// Of tensors that follow no law: the largest power of each variable with which a tenth of their bytes grow, or any where
    /// they do not grow, and the factor by which they scatter about that.
    fn lawless(&self, fits: &[(Fit, f64)], all: &[Alike]) -> (Vec<u8>, Option<f64>) {
        let mut bytes = vec![0_u64; fits.len()];
        for (fit, allocation) in self.fit_of.iter().zip(&self.base().stream.allocations) {
            bytes[*fit as usize] = bytes[*fit as usize].saturating_add(allocation.requested);
        }
        let is_lawless = |index: &usize| {
            let (fit, alike) = (&fits[*index].0, &all[*index]);
            (fit.standing, alike.scratch, fit.laws[0].len()) == (Standing::Lawless, Scratch::No, 1)
        };
        let lawless: Vec<usize> = (0..fits.len()).filter(is_lawless).collect();
        let together = |power: u8, variable: usize| -> u64 {
            let has =
                |index: &&usize| self.basis.products()[fits[**index].0.laws[0][0].product][variable] == power;
            lawless.iter().filter(has).map(|index| bytes[*index]).sum()
        };
        let all_bytes: u64 = lawless.iter().map(|index| bytes[*index]).sum();
        let powers = (0..self.basis.n_variables()).map(|variable| {
            let mut seen = (1..=law::MOST_POWER)
                .rev()
                .filter(|power| together(*power, variable) > all_bytes / PART_OF_LAWLESS);
            seen.next().unwrap_or(u8::MAX)
        });
        let factor = lawless.iter().map(|index| {
            let (points, sizes) = self.points(&all[*index].sizes);
            self.basis.factor(&points, &sizes)
        });
        (powers.collect(), factor.reduce(f64::max).map(|factor| factor * factor))
    }

    /// Where a request was made, the base first, and its size there; 0 where a run has no such request.
    fn points(&self, sizes: &[u64]) -> (Vec<&[u64]>, Vec<u64>) {
        let base = std::iter::once(self.base);
        let order = base.chain((0..sizes.len()).filter(|index| *index != self.base && sizes[*index] > 0));
        order.map(|index| (&*self.runs[index].at, sizes[index])).unzip()
    }

    /// The law of sizes in all runs, and the factor by which they scatter; 0 where a run has no such request.
    fn law(&self, sizes: &[u64]) -> (Fit, f64) {
        let (points, sizes) = self.points(sizes);
        if points.iter().all(|point| *point == points[0]) {
            return (self.basis.unmatched(sizes[0], points[0]), 1.0);
        }
        let fit = self.basis.fit(&points, &sizes);
        let scatter = self.basis.scatter(&fit, &points, &sizes);
        (fit, scatter)
    }

    /// In how many other runs a request was made.
    fn n_runs(&self, id: usize) -> usize {
        let of_others = self.matched.iter().filter(|matched| !matched.is_empty());
        of_others.filter(|matched| matched[id] != NONE).count()
    }

    /// A request that fewer runs made than others of the same place and size, as in a further step of training, is like those
    /// that most runs made, if they are all alike. One alone may be something else that only happens to be as large.
    fn inherit(&mut self) {
        let is_missing: Vec<bool> =
            (0..self.fit_of.len()).map(|id| self.n_runs(id) + 1 < self.runs.len()).collect();
        let is_of_a_step = |together: &[bool]| together[0] && together.len() >= PART_OF_A_STEP;
        if !is_missing.chunk_by(PartialEq::eq).any(is_of_a_step) {
            return;
        }
        let stream = self.runs[self.base].stream;
        let places = &self.places[self.base];
        let mut alike: FxHashMap<(u32, u64), (usize, Option<u32>)> = FxHashMap::default();
        let key = |id: usize| (places[id], stream.allocations[id].requested);
        for (id, fit) in self.fit_of.iter().enumerate() {
            let n_runs = self.n_runs(id);
            let known = alike.entry(key(id)).or_insert((n_runs, Some(*fit)));
            if n_runs > known.0 {
                *known = (n_runs, Some(*fit));
            } else if n_runs == known.0 {
                known.1 = known.1.filter(|known| self.fits[*known as usize] == self.fits[*fit as usize]);
            }
        }
        let mut inherited = self.fit_of.clone();
        let mut first = 0;
        for together in is_missing.chunk_by(PartialEq::eq) {
            let all = first..first + together.len();
            first = all.end;
            if !is_of_a_step(together) {
                continue;
            }
            for id in all {
                match alike[&key(id)] {
                    (n_runs, Some(like)) if n_runs > self.n_runs(id) => inherited[id] = like,
                    _ => {}
                }
            }
        }
        self.fit_of = inherited;
    }

    /// What others held at most, as laws where it is not the same in all runs.
    fn fit_others(&mut self) {
        let Some(others) = &self.runs[self.base].stream.others else { return };
        let most = |run: &Run, name: &str| {
            let others = run.stream.others.as_ref()?;
            let index = others.names.iter().position(|known| known == name)? as u32;
            others.changes.iter().filter(|change| change.name == index).map(|change| change.bytes).max()
        };
        let fits = others.names.iter().map(|name| {
            let held: Vec<u64> = self.runs.iter().map(|run| most(run, name).unwrap_or(0)).collect();
            let (least, most) = (held.iter().min().copied()?, held.iter().max().copied()?);
            let difference = most - least;
            let is_same = difference <= SAME_BYTES || (difference as f64) <= most as f64 * SAME_SHARE;
            (!is_same && held[self.base] > 0).then(|| self.law(&held).0)
        });
        self.others = fits.collect();
    }

    fn left_out(&self) -> usize {
        let of = |(index, matched): (usize, &Vec<u32>)| {
            let n_matched = matched.iter().filter(|other| **other != NONE).count();
            if index == self.base { 0 } else { self.runs[index].stream.allocations.len() - n_matched }
        };
        self.matched.iter().enumerate().map(of).sum()
    }

    /// What the program would ask for at a point.
    ///
    /// # Errors
    /// When the point has no value for a variable, or more would be requested than can be simulated.
    pub fn predict(&self, at: &[u64]) -> Result<Prediction<'_>, Unpredictable> {
        if at.len() != self.base().at.len() || at.contains(&0) {
            return Err(Unpredictable::NoPoint);
        }
        let sizes: Vec<(u64, u64, u64)> = (0..self.fits.len()).map(|fit| self.size(fit, at)).collect();
        if let Some((_, most, _)) = sizes.iter().find(|(_, best, _)| *best > MOST_BYTES) {
            return Err(Unpredictable::TooMuch(*most));
        }
        let best_of = |id: AllocId| sizes[self.fit_of[id.0 as usize] as usize].1;
        let peak = peak(self.base().stream, best_of);
        let growth = self.growth(at);
        let mut open = self.open(&sizes, at);
        open.extend(growth.iter().map(|growth| self.open_number(growth, best_of)));
        open.extend(self.others.iter().flatten().map(|fit| {
            let (low, _, high) = self.basis.range(fit, at);
            Open { why: Why::Others, n_requests: 0, bytes: (low, high), site: None }
        }));
        open.extend(self.open_missing(at));
        let best = self.stream(Which::Best, &sizes, &growth, at)?;
        let (shares, scatter) = (self.shares(peak, &growth, at), self.scatter_at(peak, best_of));
        let others = Some(Others::new(self, &open, sizes, growth));
        let known = Known {
            at: at.to_vec(),
            may_choose: !self.optional.is_empty() && self.is_far(at),
            shares,
            scatter,
            open,
        };
        Ok(Prediction { known: Arc::new(known), best, optional: self.optional_at(), others })
    }

    fn is_far(&self, at: &[u64]) -> bool {
        let ratio = at.iter().zip(&self.base().at).map(|(at, base)| *at as f64 / *base as f64);
        ratio.product::<f64>() > NEAR
    }

    /// By which factor the bytes that are live at the peak scatter about their laws, all together.
    fn scatter_at(&self, peak: Option<usize>, size: impl Fn(AllocId) -> u64) -> f64 {
        let Some(peak) = peak else { return 1.0 };
        let live = live_after(self.base().stream, peak);
        let (all, scattered) = live.fold((0.0, 0.0), |(all, scattered), id| {
            let size = size(id) as f64;
            (all + size, scattered + size * self.scatter[self.fit_of[id.0 as usize] as usize])
        });
        if all > 0.0 { scattered / all } else { 1.0 }
    }

    fn open(&self, sizes: &[(u64, u64, u64)], at: &[u64]) -> Vec<Open> {
        let mut whys: FxHashMap<Why, (Open, FxHashMap<StackId, u64>)> = FxHashMap::default();
        let key = |((fit, parts), size): ((&Fit, &Option<Parts>), &(u64, u64, u64))| {
            let decisive = |variable: &usize| {
                let has_one = self.runs.iter().all(|run| run.at[*variable] == self.base().at[*variable]);
                !has_one || at[*variable] != self.base().at[*variable]
            };
            let undecided = || self.basis.undecided(fit).into_iter().filter(decisive).collect();
            (size.0 < size.2).then(|| match parts {
                None => Why::Size(fit.standing, undecided()),
                Some(_) => Why::Full,
            })
        };
        let keys: Vec<Option<Why>> = self.fits.iter().zip(&self.parts).zip(sizes).map(key).collect();
        for (id, fit) in self.fit_of.iter().enumerate() {
            let Some(why) = &keys[*fit as usize] else { continue };
            let (low, _, high) = sizes[*fit as usize];
            let (open, stacks) = whys.entry(why.clone()).or_insert_with(|| {
                let open = Open { why: why.clone(), n_requests: 0, bytes: (0, 0), site: None };
                (open, FxHashMap::default())
            });
            open.n_requests += 1;
            open.bytes = (open.bytes.0.saturating_add(low), open.bytes.1.saturating_add(high));
            let unknown = stacks.entry(self.base().stream.allocations[id].stack).or_default();
            *unknown = unknown.saturating_add(high - low);
        }
        let site = |stacks: FxHashMap<StackId, u64>| {
            let most = stacks.into_iter().max_by_key(|(stack, bytes)| (*bytes, std::cmp::Reverse(*stack)))?;
            self.base().stream.stacks.site(most.0).cloned()
        };
        let mut open: Vec<Open> =
            whys.into_values().map(|(open, stacks)| Open { site: site(stacks), ..open }).collect();
        open.sort_by(|one, other| {
            let unknown = |open: &Open| open.bytes.1 - open.bytes.0;
            unknown(other).cmp(&unknown(one)).then_with(|| one.why.cmp(&other.why))
        });
        open
    }

    fn open_number(&self, growth: &Growth, size: impl Fn(AllocId) -> u64) -> Open {
        let stream = self.base().stream;
        let (low, _, high) = growth.number;
        let first = growth.requests.first().copied().unwrap_or(AllocId(0));
        let n_requests = growth.requests.len();
        let mean = growth.requests.iter().map(|id| size(*id)).sum::<u64>() / n_requests.max(1) as u64;
        Open {
            why: Why::Number,
            n_requests,
            bytes: (low.saturating_mul(mean), high.saturating_mul(mean)),
            site: stream.stacks.site(stream.allocation(first).stack).cloned(),
        }
    }

    /// Places of which more requests are live together where a variable is larger.
    fn growth(&self, at: &[u64]) -> Vec<Growth> {
        let base = self.base();
        let mut growing: FxHashMap<u32, Growth> = FxHashMap::default();
        let of_place = LazyCell::new(|| {
            let mut of_place: FxHashMap<u32, Vec<usize>> = FxHashMap::default();
            for (id, place) in self.places[self.base].iter().enumerate() {
                of_place.entry(*place).or_default().push(id);
            }
            of_place
        });
        for (place, most) in &self.most_live[self.base] {
            let numbers: Vec<u64> =
                self.most_live.iter().map(|live| live.get(place).copied().unwrap_or(0)).collect();
            let grows = self.runs.iter().zip(&numbers).any(|(run, number)| {
                let ratio = base.at.iter().zip(&run.at).map(|(value, other)| *value as f64 / *other as f64);
                let (up, down) = ratio.fold((1.0, 1.0), |(up, down): (f64, f64), ratio| {
                    (up * ratio.max(1.0), down * (1.0 / ratio).max(1.0))
                });
                is_growth(*most, *number, up) || is_growth(*number, *most, down)
            });
            if grows && !self.is_another_way(&of_place[place]) {
                let fit = self.law(&numbers).0;
                let (_, best, high) = self.basis.range(&fit, at);
                // A loop in a loop would need three runs to be believed: with two, one step more is all that is seen.
                let is_seen = fit.standing == Standing::Checked && self.n_points() > 2;
                let ratio = base.at.iter().zip(at).map(|(then, at)| (*at as f64 / *then as f64).max(1.0));
                let most_believed = (*most as f64 * ratio.product::<f64>()).ceil() as u64;
                let most_believed = if is_seen { u64::MAX } else { most_believed };
                // That there are no more is never ruled out.
                let [best, high] = [best, high].map(|number| number.min(most_believed).max(*most));
                if high > *most {
                    growing.insert(
                        *place,
                        Growth { requests: vec![], most: *most, number: (*most, best, high) },
                    );
                }
            }
        }
        for (id, place) in (0..).zip(&self.places[self.base]) {
            if let Some(growth) = growing.get_mut(place) {
                growth.requests.push(AllocId(id));
            }
        }
        let mut growing: Vec<Growth> = growing.into_values().collect();
        growing.sort_by_key(|growth| growth.requests.first().copied());
        growing
    }

    /// A place where the base makes requests that another run does not, and of other sizes than those that both make: a loop
    /// repeats what it does, and what chooses another algorithm at another size does something else.
    fn is_another_way(&self, here: &[usize]) -> bool {
        let size = |id: usize| self.base().stream.allocations[id].requested;
        self.matched.iter().filter(|matched| !matched.is_empty()).any(|matched| {
            let (common, own): (Vec<usize>, Vec<usize>) = here.iter().partition(|id| matched[**id] != NONE);
            let sizes: FxHashSet<u64> = common.iter().map(|id| size(*id)).collect();
            own.iter().filter(|id| !sizes.contains(&size(**id))).count() > own.len() / OF_A_LOOP
        })
    }

    /// How many different points there are.
    fn n_points(&self) -> usize {
        self.runs.iter().map(|run| &run.at).collect::<FxHashSet<_>>().len()
    }

    /// The base's ops with other sizes. What does not exist at that size is left out, and what exists more often follows
    /// what it is like.
    fn stream(
        &self,
        which: Which,
        sizes: &[(u64, u64, u64)],
        growth: &[Growth],
        at: &[u64],
    ) -> Result<OpStream, Unpredictable> {
        let base = self.base().stream;
        // Not all of the base is taken over, as that would be copied first.
        let mut stream = OpStream {
            device: base.device,
            ops: Vec::with_capacity(base.ops.len()),
            allocations: base.allocations.clone(),
            restored: vec![],
            streams: base.streams.clone(),
            pools: base.pools.clone(),
            knows_pools: base.knows_pools,
            ooms: vec![],
            driver: vec![],
            surroundings: None::<Surroundings>,
            others: base.others.clone(),
            queries: base.queries.clone(),
            segments: vec![],
            segment_of: vec![],
            initial: vec![],
            initial_allocs: base.initial_allocs.clone(),
            final_layout: vec![],
            history: base.history.clone(),
            settings: base.settings.clone(),
            stacks: base.stacks.clone(),
        };
        for (allocation, fit) in stream.allocations.iter_mut().zip(&self.fit_of) {
            allocation.requested = which.of(*fit as usize, sizes[*fit as usize]);
            allocation.address = 0;
        }
        stream.initial_allocs.retain(|id| stream.allocations[id.0 as usize].requested > 0);
        let missing = self.add_missing(&mut stream, which, at);
        let copies = live::copies(growth, |growth| which.of(usize::MAX, growth.number));
        let n_copies: usize = copies.values().map(|n| *n as usize).sum();
        if stream.allocations.len().saturating_add(n_copies) > MOST_REQUESTS {
            return Err(Unpredictable::TooLarge);
        }
        let mut copied: FxHashMap<AllocId, std::ops::Range<u32>> = FxHashMap::default();
        let mut new_index = Vec::with_capacity(base.ops.len() + 1);
        for op in &base.ops {
            new_index.push(stream.ops.len() as u32);
            match *op {
                Op::Alloc(id) if stream.allocation(id).requested > 0 => {
                    stream.ops.push(*op);
                    if let Some(id) = missing.get(&id).copied() {
                        stream.ops.extend([Op::Alloc(id), Op::FreeRequested(id), Op::FreeCompleted(id)]);
                    }
                    let first = stream.allocations.len() as u32;
                    for copy in 0..copies.get(&id).copied().unwrap_or(0) {
                        stream.allocations.push(*stream.allocation(id));
                        stream.ops.push(Op::Alloc(AllocId(first + copy)));
                    }
                    if stream.allocations.len() as u32 > first {
                        copied.insert(id, first..stream.allocations.len() as u32);
                    }
                    if let Some(sum) = self.sums_in_one.get(&id) {
                        sums::make_parts(&mut stream, id, self.parts_at(sum, at));
                    }
                }
                Op::FreeRequested(id) | Op::FreeCompleted(id) if stream.allocation(id).requested > 0 => {
                    stream.ops.push(*op);
                    if matches!(op, Op::FreeRequested(_)) {
                        for copy in copied.remove(&id).into_iter().flatten() {
                            stream
                                .ops
                                .extend([Op::FreeRequested(AllocId(copy)), Op::FreeCompleted(AllocId(copy))]);
                        }
                    }
                }
                Op::Alloc(_) | Op::FreeRequested(_) | Op::FreeCompleted(_) | Op::Oom(_) => {}
                Op::Trim | Op::ReleasePool(_) | Op::ChangePool(..) => stream.ops.push(*op),
            }
        }
        new_index.push(stream.ops.len() as u32);
        let moved = |op: u32| new_index[(op as usize).min(new_index.len() - 1)];
        stream.driver = base.driver.clone();
        stream.driver.iter_mut().for_each(|event| event.before_op = moved(event.before_op));
        stream.surroundings = base.surroundings.clone();
        let seen = stream.surroundings.iter_mut().flat_map(|surroundings| &mut surroundings.events);
        seen.for_each(|event| event.before_op = moved(event.before_op));
        self.scale_others(&mut stream, which, &new_index, at);
        Ok(stream)
    }

    fn scale_others(&self, stream: &mut OpStream, which: Which, new_index: &[u32], at: &[u64]) {
        let Some(others) = &mut stream.others else { return };
        for change in &mut others.changes {
            change.before_op = new_index[(change.before_op as usize).min(new_index.len() - 1)];
            if let Some(fit) = &self.others[change.name as usize] {
                let then = self.basis.at(&fit.laws[0], &self.base().at).max(1);
                let bytes = which.of(usize::MAX, self.basis.range(fit, at));
                change.bytes = (change.bytes as f64 * bytes as f64 / then as f64).round() as u64;
            }
        }
    }

    fn shares(&self, peak: Option<usize>, growth: &[Growth], at: &[u64]) -> Vec<Share> {
        let Some(peak) = peak else { return vec![] };
        let copies = live::copies(growth, |growth| growth.number.1);
        let stream = self.base().stream;
        let mut shares = live::Shares::default();
        for id in live_after(stream, peak) {
            let fit = &self.fits[self.fit_of[id.0 as usize] as usize];
            let n = 1 + u64::from(copies.get(&id).copied().unwrap_or(0));
            let site = stream.stacks.site(stream.allocation(id).stack);
            let is_known =
                matches!(fit.standing, Standing::Checked | Standing::Unchecked | Standing::Ambiguous);
            let law: &Law = &fit.laws[0];
            for Term { product, bytes } in law {
                let product = is_known.then_some(*product);
                let at = self.basis.product_at(product.unwrap_or(0), at);
                let unit = if is_known { *bytes } else { self.basis.at(law, &self.base().at) as f64 };
                shares.add(product, site, unit * n as f64, unit * n as f64 * at, n);
            }
        }
        shares.finish()
    }
}
