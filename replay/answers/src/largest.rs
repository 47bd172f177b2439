//! The largest value of a variable that fits: found by doubling and bisecting, and its neighbours looked at.

use std::collections::BTreeMap;

/// No value above this is tried.
const MOST: u64 = 1 << 20;
/// Values on each side of the largest that are looked at again.
const NEIGHBOURS: u64 = 3;
/// Values so far from the one that bisecting finds may be the clearer end. Chosen and not measured.
const AROUND: u64 = 12;
/// Values further away are looked at up to this part of the largest, on each side: what is cached is given back at another moment at each value,
/// and what is left of it is in other pieces then. Chosen: of 17 programs on an H100, run with values around the largest one by one, eleven
/// had such; the furthest was 16 % away.
const APART: f64 = 0.08;
/// At most so many on each side.
const MOST_FURTHER: u64 = 12;
/// Ends are first looked for so near: a sixteenth of the largest. Where libraries choose, they are mostly one or two of these away.
const FIRST_STEP: u64 = 16;

/// An end of what is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// With the largest sizes that are possible.
    AtLeast,
    /// With the smallest.
    AtMost,
}

/// The largest value that fits. None where not even 1 does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Largest {
    pub(super) best: Option<u64>,
    pub(super) at_least: Option<u64>,
    pub(super) at_most: Option<u64>,
    /// Larger values fit, too: the search ended.
    pub(super) has_no_end: bool,
    /// Values near the largest that do not fit below it, or fit above it.
    pub(super) holes: Vec<u64>,
    /// The same further away, where not every value is looked at.
    pub(super) further: Vec<u64>,
}

impl Largest {
    /// The runs decide it.
    pub(super) fn is_sure(&self) -> bool {
        self.at_least == self.at_most && self.holes.is_empty()
    }

    /// Values that do not fit below the largest, or fit above it, ascending.
    pub(super) fn out_of_order(&self) -> impl Iterator<Item = u64> {
        let mut all = [&self.holes[..], &self.further].concat();
        all.sort_unstable();
        all.into_iter()
    }

    /// The same in words.
    pub(super) fn disorder(&self) -> Option<String> {
        let largest = self.best.unwrap_or(0);
        let (below, above): (Vec<u64>, Vec<u64>) = self.out_of_order().partition(|value| *value <= largest);
        let list = |values: &[u64]| values.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let below_words = (!below.is_empty()).then(|| {
            format!(
                "below the largest, {} {} not fit",
                list(&below),
                if below.len() == 1 { "does" } else { "do" }
            )
        });
        let above_words = (!above.is_empty())
            .then(|| format!("above it, {} {}", list(&above), if above.len() == 1 { "fits" } else { "fit" }));
        let both: Vec<String> = below_words.into_iter().chain(above_words).collect();
        (!both.is_empty()).then(|| {
            format!(
                "not in order: {}; at each value, cached memory is split differently",
                both.join(", and ")
            )
        })
    }

    pub(super) fn words(&self) -> String {
        let value = |value: Option<u64>| value.map_or("none".to_owned(), |value| value.to_string());
        let more = if self.has_no_end { " or more" } else { "" };
        match self.at_least == self.at_most {
            true => format!("{}{more}", value(self.best)),
            false => {
                format!("{}{more} ({} to {})", value(self.best), value(self.at_least), value(self.at_most))
            }
        }
    }
}

/// Where the clearest end is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Around {
    /// Nowhere, as each value takes long.
    Nowhere,
    /// Above what bisecting finds, where sizes are known: the largest value is asked for.
    Above,
    /// On both sides of it.
    BothSides,
}

/// Finds it, from a value that was recorded. `around` says where else to look than at the neighbours of a value, `likely` whether a
/// value fits by the best guess. Its ends are the value itself: [`is_decided`] says whether they are, and [`ends`] finds them.
pub(super) fn largest<E>(
    start: u64,
    around: impl FnOnce(u64) -> Result<Around, E>,
    mut likely: impl FnMut(u64) -> Result<bool, E>,
) -> Result<Largest, E> {
    let mut known: BTreeMap<u64, bool> = BTreeMap::new();
    let mut likely = |value: u64| {
        if let Some(fits) = known.get(&value) {
            return Ok(*fits);
        }
        let found = likely(value)?;
        known.insert(value, found);
        Ok(found)
    };
    let mut best = bisect(start, &mut likely)?;
    let has_no_end = best == Some(MOST);
    let around = match best {
        Some(edge) if !has_no_end => around(edge)?,
        _ => Around::Nowhere,
    };
    if let Some(edge) = best.filter(|_| around != Around::Nowhere) {
        best = Some(clearest(edge, around, &mut likely)?);
    }
    let mut found =
        Largest { best, at_least: best, at_most: best, has_no_end, holes: vec![], further: vec![] };
    let largest = best.unwrap_or(0);
    for value in largest.saturating_sub(NEIGHBOURS).max(1)..=(largest + 1 + NEIGHBOURS).min(MOST) {
        if likely(value)? != (value <= largest) {
            found.holes.push(value);
        }
    }
    if around != Around::Nowhere {
        found.further = further(largest, &mut likely)?;
    }
    Ok(found)
}

/// Whether it fits at both ends, and the next at neither.
pub(super) fn is_decided<E>(
    found: &Largest,
    mut fits: impl FnMut(u64, End) -> Result<bool, E>,
) -> Result<bool, E> {
    let next = found.best.map_or(1, |best| best + 1);
    Ok(match found.best {
        Some(best) if !fits(best, End::AtLeast)? => false,
        _ => next > MOST || !fits(next, End::AtMost)?,
    })
}

/// Of the values near one that fits, of which the next does not: that with which most neighbours are in order, those below it that fit and
/// those above it that do not. What else there is hangs on a few MiB.
fn clearest<E>(edge: u64, around: Around, likely: &mut impl FnMut(u64) -> Result<bool, E>) -> Result<u64, E> {
    let mut best = (0_u32, edge);
    let below = if around == Around::BothSides { AROUND } else { 0 };
    for value in edge.saturating_sub(below).max(1)..=(edge + AROUND).min(MOST - 1 - NEIGHBOURS) {
        if !likely(value)? || likely(value + 1)? {
            continue;
        }
        let mut n_in_order = 0;
        for away in 1..=NEIGHBOURS {
            n_in_order += u32::from(value <= away || likely(value - away)?);
            n_in_order += u32::from(!likely(value + away)?);
        }
        // Of two as clear the larger.
        best = best.max((n_in_order, value));
    }
    Ok(best.1)
}

/// Values further away than the neighbours that do not fit below the largest, or fit above it.
fn further<E>(largest: u64, likely: &mut impl FnMut(u64) -> Result<bool, E>) -> Result<Vec<u64>, E> {
    let reach = (largest as f64 * APART) as u64;
    let step = reach.div_ceil(MOST_FURTHER).max(1);
    let mut further = vec![];
    let away = (1..).map(|number| NEIGHBOURS + number * step).take_while(|away| *away <= reach);
    for away in away {
        let (below, above) = (largest.saturating_sub(away), (largest + 1).saturating_add(away));
        if below > 0 && !likely(below)? {
            further.push(below);
        }
        if above <= MOST && likely(above)? {
            further.push(above);
        }
    }
    further.sort_unstable();
    Ok(further)
}

/// The same with the ends of its range, each looked for from it outwards.
pub(super) fn ends<E>(
    found: Largest,
    mut fits: impl FnMut(u64, End) -> Result<bool, E>,
) -> Result<Largest, E> {
    let from = found.best.unwrap_or(0);
    let at_least = edge(from, |value| fits(value, End::AtLeast))?.min(found.best);
    let at_most = edge(from, |value| fits(value, End::AtMost))?.max(found.best);
    Ok(Largest { at_least, at_most, ..found })
}

/// The largest that fits, by steps from a value that double, and bisecting what the last of them went over.
fn edge<E>(from: u64, mut fits: impl FnMut(u64) -> Result<bool, E>) -> Result<Option<u64>, E> {
    let mut step = (from / FIRST_STEP).max(1);
    let (mut low, mut high) = (from, from);
    if from == 0 || fits(from)? {
        loop {
            high = (low + step).min(MOST);
            if high == low {
                return Ok(Some(MOST));
            }
            if !fits(high)? {
                break;
            }
            (low, step) = (high, step * 2);
        }
    } else {
        loop {
            low = high.saturating_sub(step);
            if low == 0 || fits(low)? {
                break;
            }
            (high, step) = (low, step * 2);
        }
    }
    between(low, high, fits)
}

fn bisect<E>(start: u64, mut fits: impl FnMut(u64) -> Result<bool, E>) -> Result<Option<u64>, E> {
    let (mut low, mut high) = (0, start.clamp(1, MOST));
    while fits(high)? {
        low = high;
        if high == MOST {
            return Ok(Some(MOST));
        }
        high = (high * 2).min(MOST);
    }
    between(low, high, fits)
}

/// Of two values of which the first fits, or is none, and the second does not.
fn between<E>(
    mut low: u64,
    mut high: u64,
    mut fits: impl FnMut(u64) -> Result<bool, E>,
) -> Result<Option<u64>, E> {
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle)? {
            low = middle;
        } else {
            high = middle;
        }
    }
    Ok((low > 0).then_some(low))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(start: u64, fits: impl Fn(u64) -> bool + Copy) -> Largest {
        largest(start, |_| Ok(Around::BothSides), |value| Ok::<_, ()>(fits(value))).unwrap()
    }

    #[test]
    fn the_largest_is_found_from_above_and_from_below() {
        for largest in [1, 2, 7, 8, 9, 100, 1023] {
            for start in [1, 8, 5000] {
                let found = found(start, |value| value <= largest);
                assert_eq!((found.best, found.is_sure()), (Some(largest), true), "{start}");
            }
        }
        assert_eq!(found(8, |_| false).words(), "none");
        assert!(found(8, |_| true).has_no_end);
    }

    #[test]
    fn what_does_not_fit_in_order_is_told() {
        let found =
            found(8, |value| value <= 200 && ![193, 191].contains(&value) || [203, 212].contains(&value));
        assert_eq!((found.best, &found.holes[..]), (Some(200), &[203][..]));
        // 8 % are 16 values: two steps of 2 from the third neighbour on reach them, but not each.
        assert_eq!(found.further, [191, 193, 212]);
        assert_eq!(
            found.disorder().unwrap(),
            "not in order: below the largest, 191, 193 do not fit, and above it, 203, 212 fit; at each value, cached memory is split differently"
        );
    }

    #[test]
    fn the_clearest_of_several_ends_is_the_largest() {
        // Bisecting from 8 tries 128, 192, 160, 144, 136, 140, 138 and 137.
        let alone = |value| value <= 132 || value == 136;
        let by = |around| {
            let found = largest(8, |_| Ok(around), |value| Ok::<_, ()>(alone(value))).unwrap();
            (found.best, found.out_of_order().collect::<Vec<_>>())
        };
        assert_eq!(by(Around::BothSides), (Some(132), vec![136]));
        assert_eq!(by(Around::Above), (Some(136), vec![133, 134, 135]));
        assert_eq!(by(Around::Above), by(Around::Nowhere));
        // Two are as clear.
        assert_eq!(found(8, |value| value <= 132 || value == 134).best, Some(134));
    }

    /// Fits up to one value with the largest sizes, and up to another with the smallest.
    fn until(at_least: u64, at_most: u64) -> impl Fn(u64, End) -> Result<bool, ()> {
        move |value, end| Ok(value <= if end == End::AtLeast { at_least } else { at_most })
    }

    #[test]
    fn a_value_is_decided_where_it_is_both_ends() {
        let found = found(8, |value| value <= 10);
        let is_decided = |at_least, at_most| is_decided(&found, until(at_least, at_most)).unwrap();
        assert!(is_decided(10, 10));
        assert!(!is_decided(9, 10) && !is_decided(10, 11));
        let none = self::found(8, |_| false);
        assert_eq!(super::is_decided(&none, until(0, 0)), Ok(true));
        assert_eq!(super::is_decided(&none, until(0, 1)), Ok(false));
    }

    #[test]
    fn ends_are_found_from_the_largest_outwards() {
        for best in [1, 2, 10, 100, 5000] {
            let found = found(8, |value| value <= best);
            for away in [0, 1, 2, best / 3, best] {
                let (at_least, at_most) = (best - away.min(best), best + away);
                let found = ends(found.clone(), until(at_least, at_most)).unwrap();
                let at_least = Some(at_least).filter(|value| *value > 0);
                assert_eq!(
                    (found.at_least, found.best, found.at_most),
                    (at_least, Some(best), Some(at_most))
                );
            }
        }
        let none = ends(found(8, |_| false), until(0, 3)).unwrap();
        assert_eq!(none.words(), "none (none to 3)");
        let endless = ends(found(8, |_| true), until(70, u64::MAX)).unwrap();
        assert_eq!((endless.at_least, endless.at_most), (Some(70), Some(MOST)));
    }

    #[test]
    fn few_values_are_asked_for_an_end_that_is_near() {
        let n_asked = std::cell::Cell::new(0);
        let found = found(8, |value| value <= 400);
        let ends = ends(found, |value, end| {
            n_asked.set(n_asked.get() + 1);
            until(350, 440)(value, end)
        });
        assert_eq!(ends.unwrap().words(), "400 (350 to 440)");
        assert!(n_asked.get() <= 16, "{}", n_asked.get());
    }
}
