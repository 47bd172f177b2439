//! Amounts of memory and numbers, as people write and read them.

/// Reads `40GiB`, `512MiB` or plain bytes; fractions are allowed before a unit. `40GB` and `40G` are the same as `40GiB`: what is
/// sold as a card of 80 GB has 80 GiB of memory, less what its driver keeps.
///
/// # Errors
/// When the text is no amount; the message shows how to write one.
pub fn parse(text: &str) -> Result<u64, String> {
    let wrong =
        || format!("`{text}` is not an amount of memory; write bytes or a unit, such as 40GiB, 512MiB, 80GB");
    let trimmed = text.trim();
    let digits =
        trimmed.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(digits);
    let scale: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "ki" | "kib" | "kb" => 1 << 10,
        "m" | "mi" | "mib" | "mb" => 1 << 20,
        "g" | "gi" | "gib" | "gb" => 1 << 30,
        "t" | "ti" | "tib" | "tb" => 1 << 40,
        _ => return Err(wrong()),
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(scale).ok_or_else(wrong);
    }
    let value: f64 = number.parse().map_err(|_| wrong())?;
    let bytes = value * scale as f64;
    if scale > 1 && bytes.is_finite() && bytes < u64::MAX as f64 { Ok(bytes as u64) } else { Err(wrong()) }
}

/// A number with a comma between thousands.
#[must_use]
pub fn count(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (idx, digit) in digits.chars().enumerate() {
        if idx > 0 && (digits.len() - idx).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Writes an amount with two decimals and an IEC unit.
pub fn iec(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut unit = "B";
    for next in ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"] {
        // What would be written as 1024.00 is written in the next unit.
        if value < 1023.995 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.2} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_with_and_without_units() {
        for (text, bytes) in [
            ("0", 0),
            ("1024", 1024),
            ("40GiB", 40 << 30),
            ("40g", 40 << 30),
            ("64m", 64 << 20),
            ("1.5 MiB", 3 << 19),
            ("1.5G", 3 << 29),
            ("80GB", 80 << 30),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for text in ["", "GiB", "-1", "1.5", "4 zb", "99999999999999999999", "99999999T", "1e3"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn amounts_are_written_in_iec_units() {
        let written: Vec<String> = [0, 1023, 1024, (1 << 20) - 1, 3 << 29, 5 << 50].map(iec).into();
        assert_eq!(written, ["0 B", "1023 B", "1.00 KiB", "1.00 MiB", "1.50 GiB", "5.00 PiB"]);
    }
}
