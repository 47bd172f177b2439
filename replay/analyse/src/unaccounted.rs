//! How the unexplained part of the driver's figures changes over time.

use crate::growth;
use crate::story::Story;
use gputrace_trace::ledger::{DeviceBooks, Sampled, Samples};

/// Part of the samples that is warm-up.
const WARM_UP: f64 = 0.25;
/// Less than this below zero is the driver's rounding: one of its pages.
const PAGE: i64 = 2 << 20;
const HOUR: f64 = 3600e9;

/// Unaccounted bytes over time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Trend {
    /// After the first step, where steps are known.
    pub first_step: Option<i64>,
    /// When most was charged.
    pub peak: i64,
    /// In the last sample with anything charged.
    pub end: i64,
    /// Median of the slopes of all pairs of samples after the warm-up.
    pub bytes_per_hour: i64,
    /// It rises steadily, by [`growth::steadily`].
    pub is_growing: bool,
    /// At some sample less was charged than was allocated, by more than a page.
    pub is_negative: bool,
}

/// The trend of a device's samples; `None` where NVML reports no figures per process.
#[must_use]
pub fn trend(story: &Story, samples: &Samples) -> Option<Trend> {
    let known: Vec<(&Sampled, i64)> =
        charged(samples).filter_map(|sampled| Some((sampled, sampled.unaccounted()?))).collect();
    let (_, end) = *known.last()?;
    let first = known.first()?.0.time.0;
    let warm = known.len() - (known.len() as f64 * (1.0 - WARM_UP)) as usize;
    let after = &known[warm.min(known.len() - 1)..];
    let points: Vec<(f64, f64)> =
        after.iter().map(|(sampled, bytes)| ((sampled.time.0 - first) as f64, *bytes as f64)).collect();
    let least = known.iter().map(|(_, bytes)| *bytes).min()?;
    let series: Vec<u64> = after.iter().map(|(_, bytes)| bytes.abs_diff(least.min(0))).collect();
    Some(Trend {
        first_step: after_first_step(story, samples).and_then(|sampled| sampled.unaccounted()),
        peak: samples.largest?.unaccounted()?,
        end,
        bytes_per_hour: (slope(&points) * HOUR).round() as i64,
        is_growing: growth::steadily(&series),
        is_negative: least < -PAGE,
    })
}

/// The samples worth showing, with their names.
#[must_use]
pub fn moments<'a>(story: &Story, books: &'a DeviceBooks) -> Vec<(&'static str, &'a Sampled)> {
    let samples = &books.samples;
    let mut moments: Vec<(&'static str, &Sampled)> = vec![];
    moments.extend(samples.first.as_ref().map(|sampled| ("first sample", sampled)));
    moments.extend(after_first_step(story, samples).map(|sampled| ("after step 1", sampled)));
    moments.extend(samples.largest.as_ref().map(|sampled| ("most charged", sampled)));
    moments.extend(charged(samples).last().map(|sampled| ("last sample", sampled)));
    moments
}

fn after_first_step<'a>(story: &Story, samples: &'a Samples) -> Option<&'a Sampled> {
    let end = story.ledger.training()?.first_end()?;
    charged(samples).find(|sampled| sampled.time >= end)
}

/// Samples in which the process was charged anything: at its end it is no longer charged.
fn charged(samples: &Samples) -> impl Iterator<Item = &Sampled> {
    samples.kept.iter().filter(|sampled| sampled.process_used.is_some_and(|used| used.0 > 0))
}

/// Median of the slopes of all pairs (Theil and Sen), of at most a few hundred points.
fn slope(points: &[(f64, f64)]) -> f64 {
    const MOST: usize = 256;
    let step = points.len().div_ceil(MOST).max(1);
    let points: Vec<_> = points.iter().step_by(step).collect();
    let mut slopes = vec![];
    for (idx, (x, y)) in points.iter().enumerate() {
        let later = points[idx + 1..].iter().filter(|(other, _)| other > x);
        slopes.extend(later.map(|(other_x, other_y)| (other_y - y) / (other_x - x)));
    }
    slopes.sort_by(f64::total_cmp);
    slopes.get(slopes.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gputrace_trace::scene::recording;

    fn trend_of(scene: &str) -> Trend {
        let story = Story::of("t.gtr", &recording(scene));
        trend(&story, &story.ledger.devices()[&0].samples).unwrap()
    }

    #[test]
    fn growth_that_nobody_recorded_is_noticed() {
        let grows: String = (0..40).map(|n| format!("wait ms=100\nsample used={}\n", 500 + n * 10)).collect();
        let trend = trend_of(&format!("Alloc addr=a bytes=2M by=a\nsample used=4M\n{grows}"));
        assert!(trend.is_growing, "{trend:?}");
    }

    #[test]
    fn what_stays_is_no_growth_and_less_than_was_handed_out_is_a_finding() {
        let stays: String = (0..40).map(|_| "wait ms=100\nsample used=6M\n".to_owned()).collect();
        let steady = trend_of(&format!("Alloc addr=a bytes=2M by=a\nsample used=6M\n{stays}"));
        assert_eq!((steady.is_growing, steady.is_negative, steady.bytes_per_hour), (false, false, 0));
        assert_eq!((steady.peak, steady.end), (0, 0), "what is charged at first is the context");
        let lacks = trend_of(&format!(
            "Alloc addr=a bytes=2M by=a\nsample used=6M\nwait ms=100\nAlloc addr=b bytes=32M by=a\n{stays}"
        ));
        assert!(lacks.is_negative, "{lacks:?}");
    }
}
