//! Amounts in words, as reports and messages have them.

use gputrace_schemas::event::{Bytes, Nanos};
pub use gputrace_sim::bytes::count;
use gputrace_sim::bytes::iec;

/// Bytes in IEC units.
#[must_use]
pub fn bytes(bytes: Bytes) -> String {
    iec(bytes.0)
}

/// The same with no zeros at the end of a fraction: `24 GiB`, `1.5 GiB`; and of nothing, `0`.
#[must_use]
pub fn short(bytes: Bytes) -> String {
    if bytes.0 == 0 {
        return "0".into();
    }
    let text = self::bytes(bytes);
    match text.split_once(' ') {
        Some((number, unit)) if number.contains('.') => {
            format!("{} {unit}", number.trim_end_matches('0').trim_end_matches('.'))
        }
        _ => text,
    }
}

/// A release of PyTorch.
#[must_use]
pub fn release((major, minor): (u8, u8)) -> String {
    format!("{major}.{minor}")
}

/// A duration, or a time since the start.
#[must_use]
pub fn time(time: Nanos) -> String {
    match time.0 {
        0..1_000 => format!("{} ns", time.0),
        1_000..1_000_000 => format!("{:.1} µs", time.0 as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", time.0 as f64 / 1e6),
        1_000_000_000..600_000_000_000 => format!("{:.3} s", time.0 as f64 / 1e9),
        _ => {
            let seconds = time.0 / 1_000_000_000;
            format!("{}:{:02}:{:02} h", seconds / 3600, seconds / 60 % 60, seconds % 60)
        }
    }
}

/// A name for a shell.
#[must_use]
pub fn quote(path: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,@%".contains(c);
    if !path.is_empty() && path.chars().all(plain) {
        path.into()
    } else {
        format!("'{}'", path.replace('\'', r"'\''"))
    }
}

/// Loops by their turns, `loops of 15 and of 150 turns were seen`, where any of several may be meant.
#[must_use]
pub fn loops(turns: &[u64]) -> Option<String> {
    const MOST: usize = 4;
    let (last, before) = turns.split_last()?;
    if turns.len() > MOST {
        return Some(format!(
            "{} loops of {} to {} iterations were seen",
            turns.len(),
            count(turns[0]),
            count(*last)
        ));
    }
    let before: Vec<String> = before.iter().map(|n| count(*n)).collect();
    Some(match before.is_empty() {
        true => format!("several loops of {} iterations were seen", count(*last)),
        false => format!("loops of {} and of {} iterations were seen", before.join(", of "), count(*last)),
    })
}

/// `rank 3`, `ranks 0, 1 and 2`, `ranks 0 to 7`.
#[must_use]
pub fn rank_names(ranks: &[u32]) -> String {
    match ranks {
        [] => "no rank".into(),
        [one] => format!("rank {one}"),
        _ => format!("ranks {}", rank_list(ranks)),
    }
}

/// `rank 3 waits`, `ranks 0, 1 wait`.
#[must_use]
pub fn ranks_wait(ranks: &[u32]) -> String {
    format!("{} {}", rank_names(ranks), if ranks.len() == 1 { "waits" } else { "wait" })
}

/// `0 to 3, 5`.
#[must_use]
pub fn rank_list(ranks: &[u32]) -> String {
    let mut ranks = ranks.to_vec();
    ranks.sort_unstable();
    ranks.dedup();
    let mut parts = vec![];
    let mut idx = 0;
    while idx < ranks.len() {
        let mut end = idx;
        while end + 1 < ranks.len() && ranks[end + 1] == ranks[end] + 1 {
            end += 1;
        }
        match end - idx {
            0 => parts.push(ranks[idx].to_string()),
            1 => parts.extend([ranks[idx].to_string(), ranks[end].to_string()]),
            _ => parts.push(format!("{} to {}", ranks[idx], ranks[end])),
        }
        idx = end + 1;
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_written_in_iec_units() {
        let shown: Vec<_> =
            [0, 1023, 1024, 20 << 20, (1 << 30) - 1, 1 << 30, u64::MAX].map(|n| bytes(Bytes(n))).into();
        assert_eq!(shown, ["0 B", "1023 B", "1.00 KiB", "20.00 MiB", "1.00 GiB", "1.00 GiB", "16.00 EiB"]);
    }

    #[test]
    fn loops_are_listed_if_there_are_few() {
        assert_eq!(loops(&[]), None);
        assert_eq!(loops(&[15, 1500]).unwrap(), "loops of 15 and of 1,500 iterations were seen");
        assert_eq!(loops(&[1, 2, 3, 4, 9]).unwrap(), "5 loops of 1 to 9 iterations were seen");
        assert_eq!(loops(&[7]).unwrap(), "several loops of 7 iterations were seen");
    }

    #[test]
    fn times_and_counts_read_well() {
        let shown = [0, 1_500, 2_500_000, 12_345_678_901, 3_725_000_000_000].map(|n| time(Nanos(n)));
        assert_eq!(shown, ["0 ns", "1.5 µs", "2.5 ms", "12.346 s", "1:02:05 h"]);
        assert_eq!([0, 999, 1000, 1234567].map(count), ["0", "999", "1,000", "1,234,567"]);
    }
}
