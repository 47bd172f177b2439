//! Numbers in little room: a column is written as the differences between neighbours, each as a varint of 7 bits a byte, the
//! lowest first, with the sign in the lowest bit. gzip then finds what repeats.

use serde::Serialize;

/// Number of a column.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(super) struct ColumnId(usize);

/// Columns, one behind the other.
#[derive(Debug, Default)]
pub(super) struct Columns {
    bytes: Vec<u8>,
    /// Values and bytes of each.
    index: Vec<(usize, usize)>,
}

impl Columns {
    /// Adds a column. Values of more than a pebibyte (of bytes), or 13 days (of nanoseconds), are cut to that.
    pub(super) fn add(&mut self, values: impl Iterator<Item = u64>) -> ColumnId {
        self.add_signed(values.map(|value| i64::try_from(value).unwrap_or(LARGEST)))
    }

    /// The same, of values that may be below zero.
    pub(super) fn add_signed(&mut self, values: impl Iterator<Item = i64>) -> ColumnId {
        let (start, mut before, mut n) = (self.bytes.len(), 0, 0);
        for value in values {
            let value = value.clamp(-LARGEST, LARGEST);
            self.varint(zigzag(value.wrapping_sub(before)));
            before = value;
            n += 1;
        }
        self.index.push((n, self.bytes.len() - start));
        ColumnId(self.index.len() - 1)
    }

    /// Values and bytes of each column, and all of their bytes.
    pub(super) fn parts(&self) -> (&[(usize, usize)], &[u8]) {
        (&self.index, &self.bytes)
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.push(value as u8);
    }
}

/// Twice the difference of two of them, and its sign, are exact in a double of JavaScript.
const LARGEST: i64 = 1 << 50;

fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_is_the_varints_of_its_differences() {
        let mut columns = Columns::default();
        columns.add([1, 1, 300, 0].into_iter());
        columns.add_signed([-1].into_iter());
        let (index, bytes) = columns.parts();
        // 1, 0, 299, -300 as 2, 0, 598, 599.
        assert_eq!((index, bytes), (&[(4, 6), (1, 1)][..], &[2, 0, 0xd6, 4, 0xd7, 4, 1][..]));
    }
}
