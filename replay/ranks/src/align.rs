//! What the ranks of a communicator called, laid side by side: where one has a call more, fewer or another than the others.
//!
//! ```text
//!  rank 0   A B C D E          column 2 is missing on rank 2; the rest of its calls still fit the others'
//!  rank 1   A B C D E
//!  rank 2   A B . D E
//! ```
//! As long as all agree, a column costs one comparison. Where they do not, a window of each is held against the windows
//! of the others by edit distance; the one that is nearest to all others is the majority's, and the others are
//! described by how they differ from it. Nothing here knows what a call is: calls and places are numbers.

use rustc_hash::{FxHashMap, FxHashSet};

/// A call as far as it matters: what, and from which place of the program. Equal numbers are equal on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Token {
    /// What was called with which arguments.
    pub call: u32,
    /// Where; 0 is not known. Ranks may call from different places: that alone is not a difference.
    pub place: u32,
}

/// A call that was lost: it fits every other.
pub const LOST: u32 = u32::MAX;

/// The calls of one rank.
pub trait Track {
    /// How many.
    fn n_calls(&self) -> usize;
    /// The first that is known.
    fn start(&self) -> usize;
    /// One of them.
    fn token(&self, position: usize) -> Token;
    /// Whether it ever made this call from this place.
    fn knows(&self, token: Token) -> bool;
}

/// How a rank differs from the majority.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Kind {
    /// It made another call.
    Changed,
    /// It did not make this call.
    Missing,
    /// It made a call that the majority did not make.
    Extra,
    /// It made this call and the next in the other order.
    Swapped,
}

/// A call: whose, and which of its calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Spot {
    /// Index of the track.
    pub track: usize,
    /// Index of the call in it.
    pub position: usize,
}

/// One place where one rank differs from the majority.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Difference {
    /// How.
    pub kind: Kind,
    /// Which track differs.
    pub track: usize,
    /// In which column; an extra call stands before it.
    pub column: u64,
    /// The majority's call there, as one of them made it.
    pub majority: Option<Spot>,
    /// The call of the track that differs; of a missing one the next that it made.
    pub own: Option<Spot>,
    /// Tracks that are as the majority there.
    pub n_agree: usize,
    /// Tracks that differ there.
    pub n_differ: usize,
}

/// The result of laying the tracks side by side.
#[derive(Clone, Debug, Default)]
pub struct Alignment {
    /// The first column: from there on the calls of all tracks are known.
    pub start: u64,
    /// In the order of columns.
    pub differences: Vec<Difference>,
    /// Differences that were not kept.
    pub n_more: u64,
    /// Columns: calls that the majority made, or those who came furthest.
    pub n_columns: u64,
    /// Columns that each track came to.
    pub reached: Vec<u64>,
    /// The last columns with a call of the majority in each, newest last.
    pub tail: Vec<Spot>,
}

impl Alignment {
    /// A call of the majority in this column, if it is one of the last.
    #[must_use]
    pub fn spot(&self, column: u64) -> Option<Spot> {
        let first = self.n_columns - self.tail.len() as u64;
        self.tail.get(usize::try_from(column.checked_sub(first)?).ok()?).copied()
    }
}

/// Calls looked at together where ranks differ.
const WINDOW: usize = 512;
/// How many calls a rank may be ahead of another in a window and still be recognised.
const BAND: usize = 64;
/// Columns without a difference after which the ranks are together again.
const CLEAN: usize = 16;
/// Windows tried for the majority.
const CANDIDATES: usize = 8;
/// Differences that are kept.
const MAX_DIFFERENCES: usize = 10_000;
/// Columns of [`Alignment::tail`].
const TAIL: usize = 4096;
/// Calls before a difference from which it is known what follows what.
const HISTORY: usize = 1 << 16;

// What each edit costs. Only their order matters: a call skipped is cheaper than two calls changed; the same operation with
// other arguments from the same line is a change, not one call missing and another extra; and calls from other lines
// are the same calls unless skipping one makes many lines fit.
const GAP: u32 = 8;
const SWAP: u32 = 7;
const CHANGED_ARGUMENTS: u32 = 5;
const CHANGED: u32 = 9;
const MOVED: u32 = 1;
/// The same call from two lines, of which one rank has both and the other one: it may be another call, and one of the two too many.
const KNOWN_MOVED: u32 = 8;
/// That a track ran on alone after a difference: less than that a call of the others comes three later.
const RAN_ON: u32 = 3 * GAP;
const IMPOSSIBLE: u32 = u32::MAX / 4;

/// Lays the tracks side by side. `is_alike` says of two calls whether they are the same operation with other arguments;
/// `see` is shown every column: its number and each track's call in it.
pub fn align<T: Track>(
    tracks: &[T],
    is_alike: &dyn Fn(u32, u32) -> bool,
    see: &mut dyn FnMut(u64, &[Option<usize>]),
) -> Alignment {
    // Column and position are the same number until the tracks differ: calls are counted from the beginning of the communicator.
    let start = tracks.iter().map(Track::start).max().unwrap_or(0);
    let reached = tracks.iter().map(|track| track.n_calls().min(start) as u64).collect();
    let mut aligner = Aligner {
        tracks,
        is_alike,
        start,
        cursors: vec![start; tracks.len()],
        moved: FxHashSet::default(),
        follows: FxHashSet::default(),
        done: Alignment { start: start as u64, n_columns: start as u64, reached, ..Alignment::default() },
    };
    let mut positions = vec![None; tracks.len()];
    while let Some(agreed) = aligner.do_all_agree() {
        if agreed {
            aligner.advance(&mut positions, see);
        } else {
            aligner.window(see);
        }
    }
    aligner.done
}

struct Aligner<'a, T> {
    tracks: &'a [T],
    is_alike: &'a dyn Fn(u32, u32) -> bool,
    /// Where all begin.
    start: usize,
    cursors: Vec<usize>,
    /// Pairs of places from which ranks made the same call.
    moved: FxHashSet<(u32, u32)>,
    /// Pairs of calls that followed each other before the ranks were apart.
    follows: FxHashSet<(Token, Token)>,
    done: Alignment,
}

impl<T: Track> Aligner<'_, T> {
    fn is_live(&self, track: usize) -> bool {
        self.cursors[track] < self.tracks[track].n_calls()
    }

    /// Whether the next call of all that have one is the same; `None` when no track has one.
    fn do_all_agree(&self) -> Option<bool> {
        let mut live = (0..self.tracks.len()).filter(|track| self.is_live(*track));
        let next = |track: usize| self.tracks[track].token(self.cursors[track]);
        let first = next(live.next()?);
        Some(live.all(|track| {
            let token = next(track);
            first.call == token.call && self.is_same_place(first.place, token.place)
        }))
    }

    fn is_same_place(&self, a: u32, b: u32) -> bool {
        a == b || a == 0 || b == 0 || self.moved.contains(&(a.min(b), a.max(b)))
    }

    /// One column in which all agree.
    fn advance(&mut self, positions: &mut [Option<usize>], see: &mut dyn FnMut(u64, &[Option<usize>])) {
        let column = self.done.n_columns;
        for (track, position) in positions.iter_mut().enumerate() {
            *position = self.is_live(track).then_some(self.cursors[track]);
            if position.is_some() {
                self.cursors[track] += 1;
                self.done.reached[track] = column + 1;
            }
        }
        see(column, positions);
        let spot = positions
            .iter()
            .enumerate()
            .find_map(|(track, position)| Some(Spot { track, position: (*position)? }));
        self.push(spot);
    }

    fn push(&mut self, spot: Option<Spot>) {
        self.done.n_columns += 1;
        if self.done.tail.len() >= 2 * TAIL {
            self.done.tail.drain(..TAIL);
        }
        self.done.tail.extend(spot);
    }

    /// Some columns, of which at least one is not the same for all.
    fn window(&mut self, see: &mut dyn FnMut(u64, &[Option<usize>])) {
        let classes = self.classes();
        self.remember(&classes);
        let majority = self.majority(&classes);
        let model = &classes[majority].tokens;
        let model_track = classes[majority].tracks[0];
        let script = |class: &Class| self.script((model_track, model), (class.tracks[0], &class.tokens));
        let scripts: Vec<Script> = classes.iter().map(script).collect();
        let n_columns = commit(&scripts, model.len());

        let base = self.done.n_columns;
        let source = classes[majority].tracks[0];
        let from = self.cursors[source];
        let spot = |column: usize| Spot { track: source, position: from + column };
        let mut places: Vec<Vec<Option<usize>>> = vec![vec![None; self.tracks.len()]; n_columns];
        let mut found = vec![];
        for (class, script) in classes.iter().zip(&scripts) {
            for track in class.tracks.iter().copied() {
                let start = self.cursors[track];
                let mut used = 0;
                for edit in script.edits.iter().filter(|edit| edit.column < n_columns) {
                    used = edit.position + edit.kind.own_calls();
                    let own = (start + edit.position < self.tracks[track].n_calls())
                        .then_some(Spot { track, position: start + edit.position });
                    match edit.kind {
                        Step::Same | Step::Changed => {
                            places[edit.column][track] = Some(start + edit.position)
                        }
                        Step::Swapped => {
                            places[edit.column][track] = Some(start + edit.position + 1);
                            places[edit.column + 1][track] = Some(start + edit.position);
                        }
                        Step::Missing | Step::Extra => {}
                    }
                    if let Some(kind) = edit.kind.difference() {
                        let majority = Some(spot(edit.column));
                        let column = base + edit.column as u64;
                        let difference =
                            Difference { kind, track, column, majority, own, n_agree: 0, n_differ: 0 };
                        found.push(difference);
                    }
                }
                self.cursors[track] += used;
                self.done.reached[track] = base + script.columns_until(n_columns) as u64;
            }
            self.learn(model, &class.tokens, script, n_columns);
        }
        self.keep(found, &places, base);
        for (column, positions) in places.iter().enumerate() {
            see(base + column as u64, positions);
            self.push(Some(spot(column)));
        }
    }

    fn keep(&mut self, mut found: Vec<Difference>, places: &[Vec<Option<usize>>], base: u64) {
        // A track may differ in several ways before one column.
        let mut differ: FxHashMap<u64, FxHashSet<usize>> = FxHashMap::default();
        for difference in &found {
            differ.entry(difference.column).or_default().insert(difference.track);
        }
        for difference in &mut found {
            let differ = &differ[&difference.column];
            let there = places[(difference.column - base) as usize].iter().enumerate();
            difference.n_differ = differ.len();
            difference.n_agree =
                there.filter(|(track, place)| place.is_some() && !differ.contains(track)).count();
        }
        found.sort_by_key(|difference| (difference.column, difference.track));
        let room = MAX_DIFFERENCES - self.done.differences.len();
        self.done.n_more += found.len().saturating_sub(room) as u64;
        self.done.differences.extend(found.into_iter().take(room));
    }

    /// The next calls of all tracks, those that go on alike together.
    fn classes(&self) -> Vec<Class> {
        let mut classes: Vec<Class> = vec![];
        let mut known: FxHashMap<Vec<Token>, usize> = FxHashMap::default();
        for track in (0..self.tracks.len()).filter(|track| self.is_live(*track)) {
            let calls = &self.tracks[track];
            let range = self.cursors[track]..calls.n_calls().min(self.cursors[track] + WINDOW);
            let tokens: Vec<Token> = range.map(|position| calls.token(position)).collect();
            let class = *known.entry(tokens).or_insert_with_key(|tokens| {
                classes.push(Class { tokens: tokens.clone(), tracks: vec![] });
                classes.len() - 1
            });
            classes[class].tracks.push(track);
        }
        classes.sort_by_key(|class| std::cmp::Reverse((class.tracks.len(), class.tokens.len())));
        classes
    }

    /// Which calls followed which, of one track of each class.
    fn remember(&mut self, classes: &[Class]) {
        self.follows.clear();
        for track in classes.iter().map(|class| class.tracks[0]) {
            let calls = &self.tracks[track];
            let to = self.cursors[track];
            let from = to.saturating_sub(HISTORY).max(self.start);
            let before = (from..to).map(|position| calls.token(position));
            let mut last = None;
            for token in before {
                self.follows.extend(last.map(|last| (last, token)));
                last = Some(token);
            }
        }
    }

    /// What it costs that only one of two tracks made these calls, the last, after a difference. Where each follows the one before it as
    /// it has before, that track just ran on alone, and what the other would have made is not known. Else they are calls too many.
    fn alone(&self, last: Option<Token>, calls: &[Token]) -> u32 {
        let mut last = last;
        let runs_on = calls.iter().all(|call| {
            let is_known = last.is_some_and(|last| self.follows.contains(&(last, *call)));
            last = Some(*call);
            is_known
        });
        // One call of another kind and calls that go on from it are rather that than so many too many.
        let too_many = (GAP * calls.len() as u32).saturating_sub(1);
        if runs_on { too_many.min(RAN_ON) } else { too_many }
    }

    /// The class to which all are nearest.
    fn majority(&self, classes: &[Class]) -> usize {
        let cost = |candidate: &Class, class: &Class| {
            let (model, other) =
                ((candidate.tracks[0], &*candidate.tokens), (class.tracks[0], &*class.tokens));
            u64::from(self.script(model, other).cost) * class.tracks.len() as u64
        };
        let candidates = classes.iter().take(CANDIDATES).enumerate();
        let best = candidates.min_by_key(|(_, candidate)| {
            let distance: u64 = classes.iter().map(|class| cost(candidate, class)).sum();
            (distance, std::cmp::Reverse(candidate.tokens.len()))
        });
        best.map_or(0, |(idx, _)| idx)
    }

    /// From now on these places are the same where the same call was made from both.
    fn learn(&mut self, model: &[Token], tokens: &[Token], script: &Script, n_columns: usize) {
        for edit in script.edits.iter().filter(|edit| edit.kind == Step::Same && edit.column < n_columns) {
            let (a, b) = (model[edit.column].place, tokens[edit.position].place);
            if a != b {
                self.moved.insert((a.min(b), a.max(b)));
            }
        }
    }

    fn cost(&self, (of_a, a): (usize, Token), (of_b, b): (usize, Token)) -> u32 {
        let same_place = self.is_same_place(a.place, b.place);
        let is_known = || self.tracks[of_b].knows(a) != self.tracks[of_a].knows(b);
        match (is_same_call(a, b), same_place) {
            (true, true) => 0,
            (true, false) if is_known() => KNOWN_MOVED,
            (true, false) => MOVED,
            (false, true) if (self.is_alike)(a.call, b.call) => CHANGED_ARGUMENTS,
            (false, true) => CHANGED,
            (false, false) => CHANGED + MOVED,
        }
    }

    /// How `tokens` differ from `model`. Where one of them ends, after calls that fit, the rest of the other is not a difference:
    /// some ranks are ahead of others.
    fn script(&self, (model_track, model): (usize, &[Token]), (track, tokens): (usize, &[Token])) -> Script {
        if model == tokens {
            let same = |idx| Edit { kind: Step::Same, column: idx, position: idx };
            return Script { cost: 0, edits: (0..model.len()).map(same).collect() };
        }
        let mut table = Table::new(model.len(), tokens.len());
        for i in 0..=model.len() {
            for j in table.columns(i) {
                if (i, j) == (0, 0) {
                    table.set(i, j, Cell { cost: 0, paired: IMPOSSIBLE, step: Step::Same, pair: Step::Same });
                    continue;
                }
                let mut cell =
                    Cell { cost: IMPOSSIBLE, paired: IMPOSSIBLE, step: Step::Same, pair: Step::Same };
                if i > 0 && j > 0 {
                    let (a, b) = (model[i - 1], tokens[j - 1]);
                    let cost = self.cost((model_track, a), (track, b));
                    let pair = if is_same_call(a, b) { Step::Same } else { Step::Changed };
                    cell.pair(table.cost(i - 1, j - 1) + cost, pair);
                    if i > 1 && j > 1 && a.call != b.call && is_swap(&model[i - 2..i], &tokens[j - 2..j]) {
                        cell.pair(table.cost(i - 2, j - 2) + SWAP, Step::Swapped);
                    }
                }
                if i > 0 {
                    cell.gap(table.cost(i - 1, j) + GAP, Step::Missing);
                }
                if j > 0 {
                    cell.gap(table.cost(i, j - 1) + GAP, Step::Extra);
                }
                table.set(i, j, cell);
            }
        }
        table.script(&|last, own| self.alone(last, own), model, tokens)
    }
}

fn is_same_call(a: Token, b: Token) -> bool {
    a.call == b.call || a.call == LOST || b.call == LOST
}

fn is_swap(model: &[Token], tokens: &[Token]) -> bool {
    model[0].call == tokens[1].call && model[1].call == tokens[0].call
}

/// Tracks whose next calls are the same.
struct Class {
    tokens: Vec<Token>,
    tracks: Vec<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Same,
    Changed,
    Missing,
    Extra,
    Swapped,
}

impl Step {
    fn difference(self) -> Option<Kind> {
        match self {
            Step::Same => None,
            Step::Changed => Some(Kind::Changed),
            Step::Missing => Some(Kind::Missing),
            Step::Extra => Some(Kind::Extra),
            Step::Swapped => Some(Kind::Swapped),
        }
    }

    /// Calls of the model and of the other that it is about.
    fn calls(self) -> (usize, usize) {
        match self {
            Step::Same | Step::Changed => (1, 1),
            Step::Missing => (1, 0),
            Step::Extra => (0, 1),
            Step::Swapped => (2, 2),
        }
    }

    fn own_calls(self) -> usize {
        self.calls().1
    }
}

#[derive(Clone, Copy, Debug)]
struct Edit {
    kind: Step,
    /// In the model.
    column: usize,
    /// In the other.
    position: usize,
}

#[derive(Clone, Debug)]
struct Script {
    cost: u32,
    edits: Vec<Edit>,
}

impl Script {
    /// Columns before `n_columns` that the other has come to.
    fn columns_until(&self, n_columns: usize) -> usize {
        self.edits.last().map_or(0, |edit| edit.column + edit.kind.calls().0).min(n_columns)
    }
}

/// How many columns can be written down: up to where all are together again after the first difference, or all that the window shows
/// with certainty.
fn commit(scripts: &[Script], n_model: usize) -> usize {
    let mut differs = vec![false; n_model];
    let edits = scripts.iter().flat_map(|script| &script.edits).filter(|edit| edit.kind != Step::Same);
    for edit in edits {
        let end = (edit.column + edit.kind.calls().0.max(1)).min(n_model);
        differs[edit.column.min(end)..end].fill(true);
    }
    let mut last = None;
    for (column, differs) in differs.iter().enumerate() {
        match (differs, last) {
            (true, _) => last = Some(column),
            (false, Some(last)) if column - last > CLEAN => return column,
            (false, _) => {}
        }
    }
    if n_model < WINDOW {
        return n_model;
    }
    let crosses = |column: usize| {
        scripts
            .iter()
            .flat_map(|script| &script.edits)
            .any(|edit| edit.kind == Step::Swapped && edit.column + 1 == column)
    };
    let n_sure = n_model - BAND;
    if crosses(n_sure) { n_sure + 1 } else { n_sure }
}

#[derive(Clone, Copy)]
struct Cell {
    cost: u32,
    /// Cost of what ends here with two calls side by side.
    paired: u32,
    step: Step,
    pair: Step,
}

impl Cell {
    fn pair(&mut self, cost: u32, step: Step) {
        if cost < self.paired {
            (self.paired, self.pair) = (cost, step);
        }
        self.gap(cost, step);
    }

    fn gap(&mut self, cost: u32, step: Step) {
        if cost < self.cost {
            (self.cost, self.step) = (cost, step);
        }
    }
}

/// The edit distances of all beginnings that differ in length by no more than the band.
struct Table {
    n_model: usize,
    n_tokens: usize,
    cells: Vec<Cell>,
}

const WIDTH: usize = 2 * BAND + 1;
const NOWHERE: Cell = Cell { cost: IMPOSSIBLE, paired: IMPOSSIBLE, step: Step::Same, pair: Step::Same };

impl Table {
    fn new(n_model: usize, n_tokens: usize) -> Table {
        Table { n_model, n_tokens, cells: vec![NOWHERE; (n_model + 1) * WIDTH] }
    }

    fn columns(&self, i: usize) -> std::ops::RangeInclusive<usize> {
        i.saturating_sub(BAND)..=(i + BAND).min(self.n_tokens)
    }

    fn get(&self, i: usize, j: usize) -> Cell {
        if i.abs_diff(j) > BAND { NOWHERE } else { self.cells[i * WIDTH + (j + BAND - i)] }
    }

    fn cost(&self, i: usize, j: usize) -> u32 {
        self.get(i, j).cost
    }

    fn set(&mut self, i: usize, j: usize, cell: Cell) {
        self.cells[i * WIDTH + (j + BAND - i)] = cell;
    }

    /// The cheapest way to where one of the two ends. What the other made beyond that costs what `alone` says, if they were apart
    /// just before: it is given the call before, and these calls.
    fn script(
        &self,
        alone: &dyn Fn(Option<Token>, &[Token]) -> u32,
        model: &[Token],
        tokens: &[Token],
    ) -> Script {
        let (n, m) = (self.n_model, self.n_tokens);
        let ends = self.columns(n).map(|j| (n, j)).chain((0..n).map(|i| (i, m)));
        let cost = |(i, j): (usize, usize)| {
            if (i, j) == (n, m) {
                return self.get(i, j).cost;
            }
            let paired = self.get(i, j).paired;
            if paired >= IMPOSSIBLE || !self.was_apart(i, j) {
                return paired;
            }
            // Who ran on did so from its own call at the end of the way; or, if that differs in its arguments alone, from the other's.
            let (mine, rest) = if i == n { (&tokens[..j], &tokens[j..]) } else { (&model[..i], &model[i..]) };
            let other = if i == n { &model[..i] } else { &tokens[..j] };
            let (mine, other) = (mine.last().copied(), other.last().copied());
            let is_at_one_place = mine.zip(other).is_some_and(|(mine, other)| mine.place == other.place);
            let from_other = if is_at_one_place { alone(other, rest) } else { u32::MAX };
            paired.saturating_add(alone(mine, rest).min(from_other))
        };
        let ends: Vec<((usize, usize), u32)> = ends.map(|end| (end, cost(end))).collect();
        let least = ends.iter().map(|(_, cost)| *cost).min().unwrap_or(0);
        let ends = ends.iter().filter(|(_, cost)| *cost == least).map(|(end, _)| *end);
        // Of equal ones that with the fewest differences, and of these the furthest.
        let end = ends.min_by_key(|end| (self.n_differences(*end), std::cmp::Reverse(end.0 + end.1)));
        let (mut i, mut j) = end.unwrap_or((0, 0));
        let total = cost((i, j));
        let mut step = if (i, j) == (n, m) { self.get(i, j).step } else { self.get(i, j).pair };
        let mut edits = vec![];
        while (i, j) != (0, 0) {
            let (calls, own) = step.calls();
            (i, j) = (i - calls, j - own);
            edits.push(Edit { kind: step, column: i, position: j });
            step = self.get(i, j).step;
        }
        edits.reverse();
        Script { cost: total, edits }
    }
}

impl Table {
    /// Differences on the way to here.
    fn n_differences(&self, (mut i, mut j): (usize, usize)) -> usize {
        let last = self.get(i, j);
        let mut step = if (i, j) == (self.n_model, self.n_tokens) { last.step } else { last.pair };
        let mut n = 0;
        while (i, j) != (0, 0) {
            n += usize::from(step != Step::Same);
            let (calls, own) = step.calls();
            (i, j) = (i - calls, j - own);
            step = self.get(i, j).step;
        }
        n
    }

    /// Whether one of the last pairs on the way to here is a difference.
    fn was_apart(&self, mut i: usize, mut j: usize) -> bool {
        let mut step = self.get(i, j).pair;
        for _ in 0..CLEAN {
            if (i, j) == (0, 0) {
                return false;
            }
            if step != Step::Same {
                return true;
            }
            let (calls, own) = step.calls();
            (i, j) = (i - calls, j - own);
            step = self.get(i, j).step;
        }
        false
    }
}

#[cfg(test)]
mod tests;
