//! What PJRT's errors say.

/// What an error of XLA's allocators says that was asked for: `Out of memory while trying to allocate 1024 bytes`, `Failed to
/// allocate request for 1.0GiB (1073741824B)`, or `... to allocate 1.00GiB` (xla/tsl/framework/bfc_allocator.cc,
/// xla/stream_executor).
pub(crate) fn asked_for(said: &str) -> Option<u64> {
    let words =
        || said.split(|c: char| c.is_whitespace() || "(),:;".contains(c)).filter(|word| !word.is_empty());
    let exact = words().zip(words().skip(1)).find_map(|(number, unit)| {
        (unit.trim_end_matches('.') == "bytes").then(|| number.parse().ok()).flatten()
    });
    let exact = exact.or_else(|| words().find_map(|word| word.strip_suffix('B')?.parse().ok()));
    let rounded = |word: &str| {
        let word = word.trim_end_matches('.');
        let units = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)];
        let (number, shift) =
            units.iter().find_map(|(unit, shift)| Some((word.strip_suffix(unit)?, shift)))?;
        let number: f64 = number.parse().ok()?;
        Some((number * (1u64 << shift) as f64) as u64)
    };
    exact.or_else(|| words().find_map(rounded))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_was_asked_for() {
        let said = [
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes.",
            "Failed to allocate request for 64.0GiB (68719476736B) on device ordinal 0",
            "Out of memory while trying to allocate 64.00GiB.",
            "Out of memory",
        ];
        let asked = said.map(asked_for);
        assert_eq!(asked, [Some(64 << 30), Some(64 << 30), Some(64 << 30), None]);
    }
}
