//! How a size follows from the variables: the smallest polynomial that gives all recorded sizes.
//!
//! A tensor's size is a product of the lengths of its sides, so that one monomial is what nearly every request follows. A
//! law with as many terms as there are points always fits; it is *unchecked*, and what it may be instead is said.

/// The highest power of one variable.
pub(super) const MOST_POWER: u8 = 2;
/// The highest degree of a product: batch times sequence times sequence. Products of each variable once have no limit.
const MOST_DEGREE: u8 = 3;
/// A size that follows a law up to this part of it does so but for rounding: libraries pad rows to 8 or 128 elements. Chosen
/// and not measured; a tenth of what an answer may be wrong by and still be called sure.
const ROUNDING: f64 = 0.001;
/// Copies of tensors have no more than this part of the smallest workspace beside them: rows that are padded, weights that are copied
/// as well. Of an H100's convolutions it is up to a twelfth.
const MOST_BESIDE_COPIES: f64 = 0.1;
/// Sizes that were recorded after PyTorch's rounding are multiples of this (kMinBlockSize, CUDACachingAllocator).
const BLOCK: u64 = 512;
/// A size that is within this factor of a law scatters about it: it hangs on the data.
const SCATTER: f64 = 1.25;
/// What follows no law may scatter by this factor: lengths of other data, say.
const MOST_SCATTER: f64 = 1.6;
/// A variable that changes by less than this factor says little about powers where sizes scatter.
const SMALL_STEP: f64 = 1.5;
/// Bytes are whole, and products of doubles nearly so.
const EXACT: f64 = 0.5;

/// The powers of the variables in a product, in their order.
pub type Powers = Box<[u8]>;

/// All products that a law may have, the constant first, then by degree.
#[derive(Clone, Debug)]
pub struct Basis {
    n_variables: usize,
    products: Vec<Powers>,
    /// Only the first so many are looked for; the others bound what is not known.
    n_plausible: usize,
}

/// One term: index into [`Basis::products`], and how many bytes for each unit of the product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Term {
    /// Index into [`Basis::products`].
    pub product: usize,
    /// Bytes for each unit.
    pub bytes: f64,
}

/// A sum of terms.
pub type Law = Vec<Term>;

/// The facts known about a law.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Standing {
    /// More points than terms, and all are met.
    Checked,
    /// As many points as terms.
    Unchecked,
    /// Several laws of the same number of terms meet all points.
    Ambiguous,
    /// No law meets all points.
    Lawless,
    /// Only one run made such a request.
    Unmatched,
}

/// The laws that the points allow.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// The best first. The range of a prediction is that of all of them.
    pub laws: Vec<Law>,
    /// The facts known about the best.
    pub standing: Standing,
}

impl Basis {
    /// All products of so many variables.
    pub fn new(n_variables: usize) -> Basis {
        let mut products = vec![vec![]];
        for _ in 0..n_variables {
            let longer = |powers: &Vec<u8>| {
                let start = powers.clone();
                (0..=MOST_POWER).map(move |power| [&start[..], &[power]].concat())
            };
            products = products.iter().flat_map(longer).collect();
        }
        let is_plausible =
            |powers: &[u8]| degree(powers) <= MOST_DEGREE || powers.iter().all(|power| *power < 2);
        products
            .sort_by_key(|powers| (!is_plausible(powers), degree(powers), std::cmp::Reverse(powers.clone())));
        let n_plausible = products.iter().filter(|powers| is_plausible(powers)).count();
        let products = products.into_iter().map(Vec::into_boxed_slice).collect();
        Basis { n_variables, products, n_plausible }
    }

    /// How many variables there are.
    pub fn n_variables(&self) -> usize {
        self.n_variables
    }

    /// The products, the constant first.
    pub fn products(&self) -> &[Powers] {
        &self.products
    }

    /// A product at a point.
    pub fn product_at(&self, product: usize, at: &[u64]) -> f64 {
        let powers = self.products[product].iter().zip(at);
        powers.map(|(power, value)| (*value as f64).powi(i32::from(*power))).product()
    }

    /// A law at a point, whole bytes.
    pub fn at(&self, law: &Law, at: &[u64]) -> u64 {
        let sum: f64 = law.iter().map(|term| term.bytes * self.product_at(term.product, at)).sum();
        sum.round().max(0.0) as u64
    }

    /// The smallest and the largest of what the laws give at a point, the best in the middle.
    pub fn range(&self, fit: &Fit, at: &[u64]) -> (u64, u64, u64) {
        let mut sizes = fit.laws.iter().map(|law| self.at(law, at));
        let best = sizes.next().unwrap_or(0);
        let (low, high) = sizes.fold((best, best), |(low, high), size| (low.min(size), high.max(size)));
        (low, best, high)
    }

    /// What a request may be that was made in one run only: not made at all, constant (the best guess), or in proportion
    /// to all variables.
    pub fn unmatched(&self, size: u64, at: &[u64]) -> Fit {
        let all = vec![1; self.n_variables];
        let laws = vec![vec![constant(size as f64)], vec![], self.through(size as f64, at, &all)];
        Fit { laws, standing: Standing::Unmatched }
    }

    /// The law of one product that has a size at a point.
    fn through(&self, size: f64, at: &[u64], powers: &[u8]) -> Law {
        let product = self.products.iter().position(|known| **known == *powers).unwrap_or(0);
        vec![Term { product, bytes: size / self.product_at(product, at) }]
    }

    /// The laws that give each size at its point. The first point is the one to go on from.
    pub fn fit(&self, points: &[&[u64]], sizes: &[u64]) -> Fit {
        let fitting = Fitting { basis: self, points, sizes };
        fitting.exact_single().or_else(|| fitting.checked()).unwrap_or_else(|| fitting.doubtful())
    }

    /// What a library's workspace may be whose sizes follow no law for sure: between the smallest seen and in proportion to a
    /// tensor, of which the products are known. Where sizes grow faster, another algorithm was chosen.
    pub fn workspace(&self, points: &[&[u64]], sizes: &[u64], is_tensors: impl Fn(usize) -> bool) -> Fit {
        let fitting = Fitting { basis: self, points, sizes };
        let is_tensors = |product: usize| product == 0 || is_tensors(product);
        let line = fitting.line().filter(|line| line.iter().all(|term| is_tensors(term.product)));
        let (standing, best) = match line {
            Some(line) => (Standing::Unchecked, line),
            None => (Standing::Lawless, fitting.nearest_of(is_tensors).0),
        };
        let least = vec![constant(sizes.iter().min().copied().unwrap_or(0) as f64)];
        let products = (0..self.products.len()).filter(|product| is_tensors(*product));
        let through = products.flat_map(|product| {
            let points = points.iter().zip(sizes);
            points.map(move |(at, size)| self.through(*size as f64, at, &self.products[product]))
        });
        Fit { laws: [best, least].into_iter().chain(through).collect(), standing }
    }

    /// Copies of tensors, where a workspace is nothing else but for a small part: the line, whose constant part is small.
    pub fn copies(&self, fit: &Fit, least: u64) -> Option<Law> {
        let grows = |term: &Term| term.product > 0;
        match &fit.laws[0][..] {
            [only] if fit.standing == Standing::Checked && grows(only) => Some(vec![*only]),
            [constant, product] if fit.standing == Standing::Unchecked && constant.product == 0 => {
                let is_small = constant.bytes <= least as f64 * MOST_BESIDE_COPIES && grows(product);
                is_small.then(|| vec![*product])
            }
            _ => None,
        }
    }

    /// Laws together, and bytes that do not grow.
    pub fn together(&self, laws: &[&Law], rest: u64) -> Law {
        let mut bytes = vec![0.0; self.products.len()];
        laws.iter().copied().flatten().for_each(|term| bytes[term.product] += term.bytes);
        bytes[0] += rest as f64;
        let terms = (0..).zip(bytes).filter(|(_, bytes)| *bytes != 0.0);
        terms.map(|(product, bytes)| Term { product, bytes }).collect()
    }

    /// The same workspace with copies of tensors in it that grow by this law, and the rest constant, as the best guess: what it was
    /// taken for before is not ruled out. The sizes are those at the points, the first that to go on from.
    pub fn with_copies(&self, fit: Fit, copies: &Law, points: &[&[u64]], sizes: &[u64]) -> Fit {
        let rest = sizes[0].saturating_sub(self.at(copies, points[0]));
        let best = [&[constant(rest as f64)][..], copies].concat();
        Fit { laws: [vec![best], fit.laws].concat(), ..fit }
    }

    /// The same with no power above `most`, through the same sizes at a point: what depends on the data as well has no sides that
    /// nothing else of the program has. And by `scatter` more and less than the best.
    pub fn flattened(&self, fit: Fit, at: &[u64], most: &[u8], scatter: Option<f64>) -> Fit {
        let flattened = |law: Law| match law[..] {
            [term] => {
                let powers =
                    self.products[term.product].iter().zip(most).map(|(power, most)| *power.min(most));
                self.through(term.bytes * self.product_at(term.product, at), at, &powers.collect::<Vec<_>>())
            }
            _ => law,
        };
        let mut laws: Vec<Law> = fit.laws.into_iter().map(flattened).collect();
        let scaled = |by: f64| laws[0].iter().map(|term| Term { bytes: term.bytes * by, ..*term }).collect();
        let around = scatter.map_or(vec![], |scatter| vec![scaled(scatter), scaled(1.0 / scatter)]);
        laws.extend(around);
        Fit { laws, ..fit }
    }

    fn is_straight(&self, product: usize) -> bool {
        self.products[product].iter().all(|power| *power < 2)
    }

    /// By which factor sizes scatter about the best law: 1 where it is known. What two runs do not show by how much it
    /// scatters is taken to do so by the most that still is one law.
    pub fn scatter(&self, fit: &Fit, points: &[&[u64]], sizes: &[u64]) -> f64 {
        let (_, factor) = Fitting { basis: self, points, sizes }.nearest();
        match fit.standing {
            Standing::Lawless => (factor * factor).min(SCATTER),
            Standing::Unchecked if factor <= SCATTER => factor,
            Standing::Unchecked | Standing::Checked | Standing::Ambiguous | Standing::Unmatched => 1.0,
        }
    }

    /// By which factor sizes differ from the single product that is least wrong, as far as that may be by chance.
    pub fn factor(&self, points: &[&[u64]], sizes: &[u64]) -> f64 {
        Fitting { basis: self, points, sizes }.nearest().1.min(MOST_SCATTER)
    }

    /// The variables in which laws differ: another value of one of them would tell them apart.
    pub fn undecided(&self, fit: &Fit) -> Vec<usize> {
        let powers = |index: usize, law: &Law| {
            law.iter().map(|term| self.products[term.product][index]).max().unwrap_or(0)
        };
        let differs = |index: &usize| {
            let mut all = fit.laws.iter().map(|law| powers(*index, law));
            let first = all.next();
            all.any(|power| Some(power) != first)
        };
        (0..self.n_variables).filter(differs).collect()
    }
}

fn degree(powers: &[u8]) -> u8 {
    powers.iter().sum()
}

fn constant(bytes: f64) -> Term {
    Term { product: 0, bytes }
}

struct Fitting<'a> {
    basis: &'a Basis,
    points: &'a [&'a [u64]],
    sizes: &'a [u64],
}

impl Fitting<'_> {
    /// The law of one product through the first point.
    fn single(&self, product: usize) -> Law {
        let at_first = self.basis.product_at(product, self.points[0]);
        vec![Term { product, bytes: self.sizes[0] as f64 / at_first }]
    }

    fn misses(&self, law: &Law) -> impl Iterator<Item = (f64, f64)> {
        let at = |point: &[u64]| {
            law.iter().map(|term| term.bytes * self.basis.product_at(term.product, point)).sum::<f64>()
        };
        let missed = move |(point, size): (&&[u64], &u64)| ((at(point) - *size as f64).abs(), *size as f64);
        self.points.iter().zip(self.sizes).map(missed).collect::<Vec<_>>().into_iter()
    }

    fn is_exact(&self, law: &Law) -> bool {
        self.misses(law).all(|(miss, size)| miss <= EXACT + size * 1e-12)
    }

    fn is_met(&self, law: &Law) -> bool {
        let is_rounded = self.sizes.iter().all(|size| size.is_multiple_of(BLOCK));
        let least = if is_rounded { BLOCK as f64 } else { 0.0 };
        self.misses(law).all(|(miss, size)| miss < least.max(size * ROUNDING))
    }

    /// A line needs three values of what it runs along: other points say nothing new about it.
    fn can_check(&self, products: &[usize]) -> bool {
        (0..self.basis.n_variables).all(|index| {
            let powers = |product: &usize| self.basis.products[*product][index];
            let mut values: Vec<u64> = self.points.iter().map(|at| at[index]).collect();
            values.sort_unstable();
            values.dedup();
            values.len() > products.len()
                || products.iter().all(|product| powers(product) == powers(&products[0]))
        })
    }

    fn n_distinct(&self) -> usize {
        let mut points: Vec<&[u64]> = self.points.to_vec();
        points.sort_unstable();
        points.dedup();
        points.len()
    }

    fn exact_single(&self) -> Option<Fit> {
        let all = (0..self.basis.n_plausible).map(|product| self.single(product));
        known(all.filter(|law| self.is_exact(law)).collect())
    }

    /// Two terms where three points are known, three where four are; and one term but for rounding before the last.
    fn checked(&self) -> Option<Fit> {
        let n_distinct = self.n_distinct();
        let all = 0..self.basis.n_plausible;
        // A constant and one product first: a side of a tensor may have a part that does not grow.
        let affine = |_: ()| all.clone().skip(1).map(|product| vec![0, product]);
        let pairs = all.clone().flat_map(|one| all.clone().skip(one + 1).map(move |other| vec![one, other]));
        let exact = |products: Vec<usize>| {
            let solved = self.can_check(&products).then(|| self.solved(&products)).flatten();
            solved.filter(|law| self.is_exact(law))
        };
        if n_distinct > 2 {
            let found = known(affine(()).filter_map(exact).collect());
            if let Some(found) = found.or_else(|| known(pairs.clone().filter_map(exact).collect())) {
                return Some(found);
            }
        }
        let rounded = all.clone().map(|product| self.single(product)).filter(|law| self.is_met(law));
        let rounded: Vec<Law> = rounded.collect();
        if !rounded.is_empty() {
            // What looks rounded may as well be on a line.
            let line = self.line().filter(|_| n_distinct == 2);
            return known(rounded.into_iter().chain(line).collect());
        }
        if n_distinct > 3 {
            let triples = pairs.flat_map(|pair| {
                let last = pair[1];
                all.clone().skip(last + 1).map(move |third| [&pair[..], &[third]].concat())
            });
            return known(triples.filter_map(exact).collect());
        }
        None
    }

    /// The coefficients with which products meet the first points that tell them apart; none if one is negative.
    fn solved(&self, products: &[usize]) -> Option<Law> {
        let n = products.len();
        let mut rows: Vec<Vec<f64>> = vec![];
        for (point, size) in self.points.iter().zip(self.sizes) {
            let mut row: Vec<f64> = products.iter().map(|it| self.basis.product_at(*it, point)).collect();
            row.push(*size as f64);
            let scale = row[..n].iter().fold(0.0, |most: f64, value| most.max(*value));
            for (pivot, known) in rows.iter().enumerate() {
                let factor = row[pivot] / known[pivot];
                row.iter_mut().zip(known).for_each(|(value, known)| *value -= factor * known);
            }
            // What is left of a point that says nothing new is rounding.
            if row[rows.len()].abs() > scale * 1e-9 {
                rows.push(row);
            }
            if rows.len() == n {
                break;
            }
        }
        if rows.len() < n {
            return None;
        }
        let mut bytes = vec![0.0; n];
        for pivot in (0..n).rev() {
            let known: f64 = (pivot + 1..n).map(|index| rows[pivot][index] * bytes[index]).sum();
            bytes[pivot] = (rows[pivot][n] - known) / rows[pivot][pivot];
        }
        let terms =
            products.iter().zip(&bytes).map(|(product, bytes)| Term { product: *product, bytes: *bytes });
        bytes.iter().all(|bytes| *bytes > 0.0).then(|| terms.collect())
    }

    /// No law is known to hold. Two points may lie on a line that does not go through nothing; whether they do, or scatter
    /// about a simpler law, or only happen to be so, cannot be known.
    fn doubtful(&self) -> Fit {
        let (nearest, factor) = self.nearest();
        let scaled = |by: f64| vec![Term { bytes: nearest[0].bytes * by, ..nearest[0] }];
        let is_near = factor <= SCATTER;
        let around =
            if is_near { vec![scaled(1.0 / factor / factor), scaled(factor * factor)] } else { vec![] };
        // What bends upwards is likelier to scatter than to lie on a line with a square.
        if let Some(line) =
            self.line().filter(|law| law[1..].iter().all(|term| self.basis.is_straight(term.product)))
        {
            let base = self.sizes[0] as f64;
            let enclosing =
                self.powers_seen().map(|powers| self.basis.through(base, self.points[0], &powers));
            let laws = [vec![line], enclosing.into(), around].concat();
            return Fit { laws, standing: Standing::Unchecked };
        }
        let far = if factor <= MOST_SCATTER { vec![scaled(1.0 / factor / factor)] } else { vec![] };
        let laws = [vec![nearest], self.enclosing(), around, far].concat();
        Fit { laws, standing: Standing::Lawless }
    }

    /// A constant and what grows with the first product, or the first two, for which that gives all sizes.
    fn line(&self) -> Option<Law> {
        let all = 1..self.basis.n_plausible;
        let pairs =
            all.clone().flat_map(|one| (one + 1..self.basis.n_plausible).map(move |other| [0, one, other]));
        let line = all.filter_map(|product| self.solved(&[0, product])).find(|law| self.is_exact(law));
        line.or_else(|| pairs.filter_map(|products| self.solved(&products)).find(|law| self.is_exact(law)))
    }

    /// The single product that is least wrong, and by which factor at most. Squares are rare, and must be better by far.
    fn nearest(&self) -> (Law, f64) {
        self.nearest_of(|_| true)
    }

    fn nearest_of(&self, is_possible: impl Fn(usize) -> bool) -> (Law, f64) {
        let wrong = |law: &Law| {
            let misses = self.points.iter().zip(self.sizes).map(|(point, size)| {
                let at = self.basis.product_at(law[0].product, point) * law[0].bytes;
                (at.max(1.0) / (*size as f64).max(1.0)).ln().abs()
            });
            misses.fold(0.0, f64::max)
        };
        let mut best = (self.single(0), f64::INFINITY, f64::INFINITY);
        for product in (0..self.basis.n_plausible).filter(|product| is_possible(*product)) {
            let law = self.single(product);
            let factor = wrong(&law);
            let handicap = if self.basis.is_straight(product) { 0.0 } else { SCATTER.ln() };
            if factor + handicap < best.2 - 1e-9 {
                best = (law, factor, factor + handicap);
            }
        }
        (best.0, best.1.exp())
    }

    /// The flattest law that what was seen allows, through the point where it is least, and the steepest through the point
    /// where it is most.
    fn enclosing(&self) -> Vec<Law> {
        let [low, high] = self.powers_seen().map(|powers| {
            let points = self.points.iter().zip(self.sizes);
            points.map(|(at, size)| self.basis.through(*size as f64, at, &powers)).collect::<Vec<_>>()
        });
        let bytes = |law: &Law| law[0].bytes;
        let least = low.into_iter().min_by(|one, other| bytes(one).total_cmp(&bytes(other)));
        let most = high.into_iter().max_by(|one, other| bytes(one).total_cmp(&bytes(other)));
        least.into_iter().chain(most).collect()
    }

    /// Between which powers of each variable sizes lie.
    fn powers_seen(&self) -> [Vec<u8>; 2] {
        let (low, high) = (0..self.basis.n_variables).map(|index| self.powers_of(index)).unzip();
        [low, high]
    }

    /// Between which powers of a variable sizes lie where nothing else changed. Where there is nothing to see, it may have no
    /// part, or be a side of the tensor.
    fn powers_of(&self, index: usize) -> (u8, u8) {
        let mut seen: Option<(u8, u8)> = None;
        let all: Vec<_> = self.points.iter().zip(self.sizes).collect();
        for (one, size) in &all {
            for (other, other_size) in &all {
                let alone = (0..one.len()).all(|it| (one[it] == other[it]) == (it != index));
                if !alone || one[index] < other[index] {
                    continue;
                }
                let ratio = one[index] as f64 / other[index] as f64;
                let power = (**size as f64 / (**other_size as f64).max(1.0)).ln() / ratio.ln();
                // A small step says little about a power where sizes scatter.
                let (low, high) = match power {
                    _ if ratio < SMALL_STEP => (0, MOST_POWER),
                    power if (power - power.round()).abs() < 1e-3 => {
                        (power.round() as u8, power.round() as u8)
                    }
                    power => (power.floor() as u8, power.ceil().max(1.0) as u8),
                };
                let (low, high) = (low.min(MOST_POWER - 1).min(high), high.min(MOST_POWER));
                seen = Some(seen.map_or((low, high), |(least, most)| (least.min(low), most.max(high))));
            }
        }
        seen.unwrap_or((0, 1))
    }
}

/// Laws that meet all points with one more than they have terms.
fn known(laws: Vec<Law>) -> Option<Fit> {
    let standing = if laws.len() > 1 { Standing::Ambiguous } else { Standing::Checked };
    (!laws.is_empty()).then_some(Fit { laws, standing })
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;

    /// Points `b,s=size`, the first being the one to go on from, and where to go: best, range and standing.
    fn check(points: &str, at: &str, expected: Expect) {
        let numbers = |text: &str| -> Vec<u64> { text.split(',').map(|it| it.parse().unwrap()).collect() };
        let points: Vec<(Vec<u64>, u64)> = points
            .split(' ')
            .filter_map(|point| point.split_once('='))
            .map(|(at, size)| (numbers(at), size.parse().unwrap()))
            .collect();
        let basis = Basis::new(points[0].0.len());
        let at_points: Vec<&[u64]> = points.iter().map(|(at, _)| &at[..]).collect();
        let fit = basis.fit(&at_points, &points.iter().map(|(_, size)| *size).collect::<Vec<_>>());
        let (low, best, high) = basis.range(&fit, &numbers(at));
        let law = fit.laws[0].iter().map(|it| format!("{:.6}*{:?}", it.bytes, basis.products[it.product]));
        let law = law.collect::<Vec<_>>().join(" + ");
        expected.assert_eq(&format!("{low} {best} {high} {:?} {law}", fit.standing));
    }

    #[test]
    fn one_product_that_gives_both_sizes_is_the_law() {
        check("8=4096 4=4096", "32", expect!["4096 4096 4096 Checked 4096.000000*[0]"]);
        check("8=4096 4=2048", "32", expect!["16384 16384 16384 Checked 512.000000*[1]"]);
        check("8=4096 4=1024", "32", expect!["65536 65536 65536 Checked 64.000000*[2]"]);
        check("9=36 7=28", "33", expect!["132 132 132 Checked 4.000000*[1]"]);
    }

    #[test]
    fn a_size_that_is_padded_follows_its_law_but_for_rounding() {
        check("8=1048832 4=524544", "32", expect!["4194560 4195328 4195328 Ambiguous 131104.000000*[1]"]);
        check("8=8 4=7", "32", expect!["6 14 32 Unchecked 6.000000*[0] + 0.250000*[1]"]);
    }

    #[test]
    fn a_line_with_a_part_that_does_not_grow_needs_a_third_point_to_be_sure() {
        check(
            "8=900000 4=500000",
            "32",
            expect!["900000 3300000 4444444 Unchecked 100000.000000*[0] + 100000.000000*[1]"],
        );
        check(
            "8=900000 4=500000 2=300000",
            "32",
            expect!["3300000 3300000 3300000 Checked 100000.000000*[0] + 100000.000000*[1]"],
        );
    }

    #[test]
    fn two_variables_that_changed_together_leave_open_which_it_was() {
        check("8,256=8192 4,128=4096", "32,256", expect!["8192 32768 32768 Ambiguous 1024.000000*[1, 0]"]);
        check(
            "8,256=8192 4,128=4096 4,256=4096",
            "32,256",
            expect!["32768 32768 32768 Checked 1024.000000*[1, 0]"],
        );
        // Attention: batch times sequence times sequence.
        check(
            "8,256=524288 4,256=262144 8,128=131072",
            "32,512",
            expect!["8388608 8388608 8388608 Checked 1.000000*[1, 2]"],
        );
    }

    #[test]
    fn what_never_changed_is_not_known() {
        check("8,256=8192 4,256=4096", "32,256", expect!["32768 32768 32768 Ambiguous 1024.000000*[1, 0]"]);
        check("8,256=8192 4,256=4096", "32,512", expect!["32768 32768 131072 Ambiguous 1024.000000*[1, 0]"]);
    }

    #[test]
    fn what_follows_no_law_is_a_range() {
        check(
            "8=7900000 4=4100000",
            "32",
            expect!["7900000 30700000 34045570 Unchecked 300000.000000*[0] + 950000.000000*[1]"],
        );
        check("8=1000000 4=9000000", "32", expect!["1000000 1000000 72000000 Lawless 1000000.000000*[0]"]);
        check("8=1000000 4=1050000", "32", expect!["907029 1000000 8400000 Lawless 1000000.000000*[0]"]);
    }

    #[test]
    fn three_terms_need_four_points() {
        // Sides of an image after a convolution that does not divide it: (r/2 + 1)^2 of 4 bytes each, for r = 8, 6, 4, 2.
        check(
            "8=100 6=64 4=36 2=16",
            "16",
            expect!["324 324 324 Checked 4.000000*[0] + 4.000000*[1] + 1.000000*[2]"],
        );
    }
}
