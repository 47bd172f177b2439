//! From an instruction offset to a line number, with the table that a code object carries.
//!
//! Three formats: `co_lnotab` (3.9, `Objects/lnotab_notes.txt`), `co_linetable` of PEP 626 (3.10, the same file), and the
//! location table (3.11 and later, `Objects/locations.md`, from 3.13 `InternalDocs/code_objects.md`). Tables come from
//! other processes and may be cut short or damaged: a place beyond what can be read has no line.

/// The line of the instruction at `offset` bytes; `None` when the table has none for it.
///
/// `python` is `(major << 8) | minor` of the interpreter that made the table. An offset below 0 is a frame that has
/// not begun: it is at its first line.
#[must_use]
pub fn line_at(python: u16, table: &[u8], first_line: u32, offset: i32) -> Option<u32> {
    let Ok(offset) = u32::try_from(offset) else { return Some(first_line) };
    let line = match python {
        ..0x30a => lnotab(table, first_line, offset),
        0x30a => line_table(table, first_line, offset),
        _ => location_table(table, first_line, offset),
    }?;
    u32::try_from(line).ok()
}

/// Pairs of unsigned address increment and signed line increment. The last pair at or before `offset` wins; bytecode
/// after the last pair belongs to its line.
fn lnotab(table: &[u8], first_line: u32, offset: u32) -> Option<i64> {
    let mut address = 0;
    let mut line = i64::from(first_line);
    for [address_increment, line_increment] in table.as_chunks::<2>().0 {
        address += u32::from(*address_increment);
        if address > offset {
            break;
        }
        line += i64::from(*line_increment as i8);
    }
    Some(line)
}

/// Pairs of unsigned length and signed line increment; -128 says that the range has no line.
fn line_table(table: &[u8], first_line: u32, offset: u32) -> Option<i64> {
    let mut end = 0;
    let mut line = i64::from(first_line);
    for [length, line_increment] in table.as_chunks::<2>().0 {
        let has_line = *line_increment as i8 != i8::MIN;
        if has_line {
            line += i64::from(*line_increment as i8);
        }
        end += u32::from(*length);
        if offset < end {
            return has_line.then_some(line);
        }
    }
    None
}

/// Entries of a first byte `1kkkklll` (kind, length - 1 in two-byte instructions) and what the kind needs.
fn location_table(table: &[u8], first_line: u32, offset: u32) -> Option<i64> {
    let mut bytes = table.iter().copied();
    let mut end = 0;
    let mut line = i64::from(first_line);
    loop {
        let first = bytes.next()?;
        let kind = first >> 3 & 15;
        end += (u32::from(first & 7) + 1) * 2;
        match kind {
            15 => {}
            14 => {
                line += signed_varint(&mut bytes)?;
                for _end_line_and_columns in 0..3 {
                    varint(&mut bytes)?;
                }
            }
            13 => line += signed_varint(&mut bytes)?,
            10..=12 => {
                line += i64::from(kind) - 10;
                bytes.nth(1)?;
            }
            _ => drop(bytes.next()?),
        }
        if offset < end {
            return (kind != 15).then_some(line);
        }
    }
}

/// Six bits a byte, low ones first; bit 6 says that more follow.
fn varint(bytes: &mut impl Iterator<Item = u8>) -> Option<u32> {
    let mut value = 0u32;
    for shift in (0..32).step_by(6) {
        let byte = bytes.next()?;
        value |= u32::from(byte & 63) << shift;
        if byte & 64 == 0 {
            return Some(value);
        }
    }
    None
}

/// The sign is the lowest bit.
fn signed_varint(bytes: &mut impl Iterator<Item = u8>) -> Option<i64> {
    let value = i64::from(varint(bytes)?);
    Some(if value & 1 == 0 { value >> 1 } else { -(value >> 1) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(python: u16, table: &[u8], offsets: impl IntoIterator<Item = i32>) -> Vec<Option<u32>> {
        offsets.into_iter().map(|offset| line_at(python, table, 10, offset)).collect()
    }

    #[test]
    fn an_lnotab_moves_address_and_line_together() {
        //  offset 0..6: line 10 | 6..12: line 12 | 12..: line 11
        let table = [6, 2, 6, 0xff];
        let expected = [10, 10, 12, 12, 11, 11].map(Some);
        assert_eq!(lines(0x309, &table, [0, 4, 6, 10, 12, 300]), expected);
    }

    #[test]
    fn a_line_table_can_say_that_there_is_no_line() {
        //  offset 0..4: line 11 | 4..6: none | 6..10: line 13
        let table = [4, 1, 2, 0x80, 4, 2];
        assert_eq!(
            lines(0x30a, &table, [0, 2, 4, 6, 8, 10]),
            [Some(11), Some(11), None, Some(13), Some(13), None]
        );
    }

    #[test]
    fn a_location_table_has_five_kinds_of_entries() {
        let entry = |kind: u8, n_instructions: u8| 0x80 | kind << 3 | (n_instructions - 1);
        let table = [
            entry(0, 1),
            0x00, // short: the same line
            entry(11, 2),
            0x01,
            0x02, // one line further
            entry(13, 1),
            0x43,
            0x03, // without columns: varint 3 | 3 << 6 = 195, odd: -97
            entry(13, 1),
            0x42,
            0x03, // and 97 forward
            entry(14, 1),
            0x04,
            0x00,
            0x01,
            0x01,         // long: two lines further
            entry(15, 1), // none
        ];
        let expected = [Some(10), Some(11), Some(11), None, Some(11), Some(13), None, None];
        assert_eq!(lines(0x30c, &table, (0..16).step_by(2)), expected);
    }

    #[test]
    fn a_frame_that_has_not_begun_is_at_its_first_line() {
        assert_eq!([0x309, 0x30a, 0x30e].map(|python| line_at(python, &[], 10, -2)), [Some(10); 3]);
    }

    #[test]
    fn a_table_cut_anywhere_has_no_line_beyond_the_cut_and_does_no_harm() {
        let table = [0x80 | 14 << 3, 0x04, 0x00, 0x01, 0x01, 0x80, 0x00];
        let found: Vec<_> = (0..=table.len()).map(|n| line_at(0x30b, &table[..n], 10, 2)).collect();
        assert_eq!(found, [None, None, None, None, None, None, None, Some(12)]);
    }

    #[test]
    fn any_bytes_are_read_without_a_panic() {
        let mut state = 1u64;
        for _ in 0..20_000 {
            let mut bytes = [0u8; 24];
            for byte in &mut bytes {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                *byte = (state >> 56) as u8;
            }
            for python in [0x309, 0x30a, 0x30b, 0x30e] {
                let _ = line_at(python, &bytes, u32::MAX, (state >> 40) as i32 & 127);
            }
        }
    }
}
