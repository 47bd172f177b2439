//! The largest value of a variable that fits: found by doubling and bisecting, and its neighbours looked at.

use std::collections::BTreeMap;

/// No value above this is tried.
const MOST: u64 = 1 << 20;
/// Values on each side of the largest that are looked at again.
const NEIGHBOURS: u64 = 3;
/// Values further away are looked at up to this part of the largest, on each side: what is cached is given back at another moment at each value,
/// and what is left of it is in other pieces then. Chosen: of eleven programs on an H100, at values around the largest one by one, seven had
/// such; the furthest was 16 % away.
const APART: f64 = 0.08;
/// At most so many on each side.
const MOST_FURTHER: u64 = 12;

/// Whether a value fits: by the best guess, by the smallest, and by the largest sizes that are possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fits {
    pub(super) best: bool,
    /// With the largest sizes.
    pub(super) at_least: bool,
    /// With the smallest.
    pub(super) at_most: bool,
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
            format!("not in order: {}; what is cached is in other pieces at each value", both.join(", and "))
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

/// Finds it, from a value that was recorded. Values further away are not looked at here.
pub(super) fn largest<E>(start: u64, mut fits: impl FnMut(u64) -> Result<Fits, E>) -> Result<Largest, E> {
    let mut known: BTreeMap<u64, Fits> = BTreeMap::new();
    let mut fits = |value: u64| {
        if let Some(fits) = known.get(&value) {
            return Ok(*fits);
        }
        let found = fits(value)?;
        known.insert(value, found);
        Ok(found)
    };
    let best = bisect(start, |value| Ok(fits(value)?.best))?;
    // What fits does not always fit below: each search may end at another of several edges.
    let at_least = bisect(start, |value| Ok(fits(value)?.at_least))?.min(best);
    let at_most = bisect(start, |value| Ok(fits(value)?.at_most))?.max(best);
    let mut holes = vec![];
    let largest = best.unwrap_or(0);
    for value in largest.saturating_sub(NEIGHBOURS).max(1)..=(largest + 1 + NEIGHBOURS).min(MOST) {
        if fits(value)?.best != (value <= largest) {
            holes.push(value);
        }
    }
    Ok(Largest { best, at_least, at_most, has_no_end: largest >= MOST, holes, further: vec![] })
}

/// The same with what is further away than its neighbours, by the best guess.
pub(super) fn further<E>(found: Largest, mut fits: impl FnMut(u64) -> Result<bool, E>) -> Result<Largest, E> {
    let Some(largest) = found.best.filter(|_| !found.has_no_end) else { return Ok(found) };
    let reach = (largest as f64 * APART) as u64;
    let step = reach.div_ceil(MOST_FURTHER).max(1);
    let mut further = vec![];
    let away = (1..).map(|number| NEIGHBOURS + number * step).take_while(|away| *away <= reach);
    for away in away {
        let (below, above) = (largest.saturating_sub(away), (largest + 1).saturating_add(away));
        if below > 0 && !fits(below)? {
            further.push(below);
        }
        if above <= MOST && fits(above)? {
            further.push(above);
        }
    }
    further.sort_unstable();
    Ok(Largest { further, ..found })
}

/// The same with ends of its range that are looked for anew.
pub(super) fn ends<E>(
    start: u64,
    found: Largest,
    mut fits: impl FnMut(u64) -> Result<Fits, E>,
) -> Result<Largest, E> {
    let at_least = bisect(start, |value| Ok(fits(value)?.at_least))?.min(found.at_least);
    let at_most = bisect(start, |value| Ok(fits(value)?.at_most))?.max(found.at_most);
    Ok(Largest { at_least, at_most, ..found })
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

    fn found(start: u64, fits: impl Fn(u64) -> bool) -> Largest {
        let all = |value| {
            let is = fits(value);
            Ok::<_, ()>(Fits { best: is, at_least: is, at_most: is })
        };
        largest(start, all).unwrap()
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
        assert_eq!(found(8, |value| value <= 20 && value != 19 || value == 23).holes, [19, 23]);
    }

    #[test]
    fn what_does_not_fit_in_order_further_away_is_looked_for_within_bounds() {
        let found = found(8, |value| value <= 200 && value != 190 || value == 210);
        let mut asked = vec![];
        let found = further(found, |value| {
            asked.push(value);
            Ok::<_, ()>(value <= 200 && value != 193 || value >= 214)
        });
        let found = found.unwrap();
        // 8 % are 16 values: two steps of 2 from the third neighbour on reach them.
        assert_eq!(found.further, [193, 214, 216]);
        assert!(
            asked.len() as u64 <= 2 * MOST_FURTHER && asked.iter().all(|value| (184..=217).contains(value)),
            "{asked:?}"
        );
        let open = Largest { has_no_end: true, further: vec![], ..found };
        let asks = further(open, |value| Err(value));
        assert_eq!(
            asks.map(|found| found.further),
            Ok(vec![]),
            "nothing is looked at where the search ended"
        );
    }

    #[test]
    fn ends_that_are_looked_for_anew_only_widen_a_range() {
        let of = |most: u64| move |value| Ok::<_, ()>(value <= most);
        let all =
            |value| Ok::<_, ()>(Fits { best: value <= 10, at_least: of(9)(value)?, at_most: of(11)(value)? });
        let wide =
            |value| Ok::<_, ()>(Fits { best: value <= 14, at_least: value <= 7, at_most: value <= 14 });
        let narrow =
            |value| Ok::<_, ()>(Fits { best: value <= 10, at_least: value <= 10, at_most: value <= 10 });
        let found =
            |fits: fn(u64) -> Result<Fits, ()>| ends(4, largest(4, all).unwrap(), fits).unwrap().words();
        assert_eq!((found(wide), found(narrow)), ("10 (7 to 14)".into(), "10 (9 to 11)".into()));
    }

    #[test]
    fn sizes_that_are_not_known_leave_a_range() {
        let all = |value| Ok::<_, ()>(Fits { best: value <= 10, at_least: value <= 7, at_most: value <= 12 });
        let found = largest(4, all).unwrap();
        assert_eq!((found.words().as_str(), found.is_sure()), ("10 (7 to 12)", false));
    }
}
