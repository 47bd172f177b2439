//! Reads the Parquet files that [`super::write`] writes, and says of others that they are not such. Nothing in a file is believed:
//! damage and malice give an error, and room is bounded.

use std::ops::Range;

use zstd::bulk::Decompressor;

use super::{BYTE_ARRAY, DICTIONARY_PAGE, INT64, MAGIC};

/// Bytes of all columns that are read of a file, unpacked.
const MOST_BYTES: u64 = 512 << 20;
/// Rows of a file.
const MOST_ROWS: u64 = 1 << 24;
/// Structures in one another.
const DEEPEST: u32 = 12;

/// Some columns of a file.
#[derive(Debug, Default)]
pub struct Table {
    /// Words about it: its key-value metadata.
    pub about: Vec<(String, String)>,
    /// Rows.
    pub n_rows: usize,
    columns: Vec<(String, Cells)>,
}

/// What a column holds, row by row.
#[derive(Debug)]
enum Cells {
    Numbers(Vec<Option<i64>>),
    /// Which text of all.
    Texts(Vec<Option<u32>>, Texts),
}

/// The texts of a column, as they lie in its pages: most are never asked for.
#[derive(Debug, Default)]
struct Texts {
    bytes: Vec<u8>,
    each: Vec<Range<usize>>,
}

impl Texts {
    /// Adds those of a dictionary.
    fn add(&mut self, page: &[u8]) -> Result<(), String> {
        let begin = self.bytes.len();
        let mut reader = Reader { bytes: page, at: 0 };
        while reader.at < page.len() {
            let length = reader.u32()? as usize;
            let from = begin + reader.at;
            reader.take(length)?;
            self.each.push(from..from + length);
        }
        self.bytes.extend_from_slice(page);
        Ok(())
    }

    /// None where it is no UTF-8, which no file of ours holds.
    fn get(&self, idx: u32) -> Option<&str> {
        std::str::from_utf8(self.bytes.get(self.each.get(idx as usize)?.clone())?).ok()
    }
}

/// Which groups of a file's rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Groups {
    /// The one in this place, from 0; no rows where there are fewer.
    Only(usize),
    /// All rows.
    All,
}

impl Table {
    /// Reads the columns of these names.
    ///
    /// # Errors
    /// What is wrong with the file, in words.
    pub fn read(file: &[u8], wanted: &[&str], groups: Groups) -> Result<Table, String> {
        let footer = footer(file)?;
        let meta = Reader { bytes: footer, at: 0 }.structure(0)?;
        let about = meta.list(5).iter().map(|pair| (pair.text(1), pair.text(2))).collect();
        let schema = meta.list(2);
        let names: Vec<String> = schema.iter().skip(1).map(|element| element.text(4)).collect();
        let mut table = Table { about, n_rows: 0, columns: vec![] };
        let mut unpack = Unpack::new()?;
        let all = meta.list(4);
        let read = match groups {
            Groups::Only(place) => all.get(place).map_or(&all[..0], std::slice::from_ref),
            Groups::All => all,
        };
        for (idx, name) in names.iter().enumerate().filter(|(_, name)| wanted.contains(&&***name)) {
            let is_text = match schema[idx + 1].number(1) {
                Some(INT64) => false,
                Some(BYTE_ARRAY) => true,
                _ => return Err(format!("column `{name}` has a type that gputrace does not write")),
            };
            let mut cells =
                if is_text { Cells::Texts(vec![], Texts::default()) } else { Cells::Numbers(vec![]) };
            for group in read {
                let chunks = group.list(1);
                let chunk = chunks.get(idx).ok_or("a group of rows lacks a column")?;
                cells.read(file, chunk.inside(3).ok_or("a column has no description")?, &mut unpack)?;
            }
            if !table.columns.is_empty() && cells.len() != table.n_rows {
                return Err("its columns are not equally long".into());
            }
            table.n_rows = cells.len();
            table.columns.push((name.clone(), cells));
        }
        Ok(table)
    }

    /// A number, where the column has one there.
    pub fn number(&self, row: usize, column: &str) -> Option<i64> {
        match self.column(column)? {
            Cells::Numbers(numbers) => numbers.get(row).copied().flatten(),
            Cells::Texts(..) => None,
        }
    }

    /// A text, where the column has one there.
    pub fn text(&self, row: usize, column: &str) -> Option<&str> {
        match self.column(column)? {
            Cells::Texts(rows, texts) => texts.get(rows.get(row).copied().flatten()?),
            Cells::Numbers(_) => None,
        }
    }

    fn column(&self, name: &str) -> Option<&Cells> {
        self.columns.iter().find(|(known, _)| known == name).map(|(_, cells)| cells)
    }
}

/// The bytes that describe the file.
fn footer(file: &[u8]) -> Result<&[u8], String> {
    let ends = file.len() >= 12 && file.starts_with(MAGIC) && file.ends_with(MAGIC);
    if !ends {
        return Err(match file.starts_with(MAGIC) {
            true => "it ends early: it was not fully written or copied".into(),
            false => "it is not a Parquet file".into(),
        });
    }
    let body = &file[..file.len() - 8];
    let length = file[file.len() - 8..file.len() - 4].try_into().map_or(0, u32::from_le_bytes) as usize;
    body.len()
        .checked_sub(length)
        .filter(|begin| *begin >= MAGIC.len())
        .map(|begin| &body[begin..])
        .ok_or_else(|| "its footer is longer than the file".into())
}

impl Cells {
    fn len(&self) -> usize {
        match self {
            Cells::Numbers(rows) => rows.len(),
            Cells::Texts(rows, _) => rows.len(),
        }
    }

    /// Adds one group of rows.
    fn read(&mut self, file: &[u8], meta: &Fields<'_>, unpack: &mut Unpack) -> Result<(), String> {
        let n_rows = meta.number(5).and_then(|n| u64::try_from(n).ok()).unwrap_or(0);
        if n_rows + self.len() as u64 > MOST_ROWS {
            return Err("it has more rows than any summary".into());
        }
        let begin = meta.number(11).or(meta.number(9)).and_then(|at| usize::try_from(at).ok());
        let rest = begin.and_then(|begin| file.get(begin..)).ok_or("a column is outside the file")?;
        let mut pages = Reader { bytes: rest, at: 0 };
        let mut first_text = 0;
        if let Cells::Texts(_, texts) = self {
            first_text = u32::try_from(texts.each.len()).map_err(|_| "it has too many texts")?;
            let (header, page) = pages.page(unpack)?;
            if header.number(1) != Some(DICTIONARY_PAGE) {
                return Err("a column of texts has no dictionary".into());
            }
            texts.add(&page)?;
        }
        let (header, page) = pages.page(unpack)?;
        let n_values = header.inside(5).and_then(|data| data.number(1)).and_then(|n| u64::try_from(n).ok());
        if n_values != Some(n_rows) {
            return Err(
                "a column has more than one page, or a different number of rows than it states".into()
            );
        }
        let mut page = Reader { bytes: &page, at: 0 };
        let length = page.u32()? as usize;
        let mut present = vec![];
        Reader { bytes: page.take(length)?, at: 0 }.hybrid(1, n_rows as usize, &mut present)?;
        match self {
            Cells::Numbers(rows) => {
                for is_there in present {
                    rows.push(if is_there == 1 { Some(page.u64()? as i64) } else { None });
                }
            }
            Cells::Texts(rows, _) => {
                let n_there = present.iter().filter(|it| **it == 1).count();
                let width = u32::from(page.take(1)?[0]);
                let mut which = vec![];
                page.hybrid(width, n_there, &mut which)?;
                let mut which = which.into_iter();
                rows.extend(present.iter().map(|is_there| match is_there {
                    1 => which.next().and_then(|idx| idx.checked_add(first_text)),
                    _ => None,
                }));
            }
        }
        Ok(())
    }
}

/// Fields of a structure in Thrift's compact protocol, by their numbers.
#[derive(Debug, Default)]
struct Fields<'a>(Vec<(i16, Field<'a>)>);

#[derive(Debug)]
enum Field<'a> {
    Number(i64),
    Bytes(&'a [u8]),
    Structure(Fields<'a>),
    Structures(Vec<Fields<'a>>),
    /// What no file of ours says.
    Other,
}

impl<'a> Fields<'a> {
    fn get(&self, id: i16) -> Option<&Field<'a>> {
        self.0.iter().find(|(known, _)| *known == id).map(|(_, field)| field)
    }

    fn number(&self, id: i16) -> Option<i64> {
        match self.get(id)? {
            Field::Number(number) => Some(*number),
            _ => None,
        }
    }

    fn text(&self, id: i16) -> String {
        match self.get(id) {
            Some(Field::Bytes(bytes)) => String::from_utf8_lossy(bytes).into_owned(),
            _ => String::new(),
        }
    }

    fn inside(&self, id: i16) -> Option<&Fields<'a>> {
        match self.get(id)? {
            Field::Structure(fields) => Some(fields),
            _ => None,
        }
    }

    fn list(&self, id: i16) -> &[Fields<'a>] {
        match self.get(id) {
            Some(Field::Structures(list)) => list,
            _ => &[],
        }
    }
}

/// Unpacks the pages of a file, and keeps count.
struct Unpack {
    zstd: Decompressor<'static>,
    /// Bytes that may still come.
    room: u64,
}

impl Unpack {
    fn new() -> Result<Unpack, String> {
        let zstd = Decompressor::new().map_err(|error| error.to_string())?;
        Ok(Unpack { zstd, room: MOST_BYTES })
    }

    fn page(&mut self, packed: &[u8], unpacked: u64) -> Result<Vec<u8>, String> {
        self.room = self.room.checked_sub(unpacked).ok_or("it is larger than any summary")?;
        // Room that is not written to takes no memory.
        let page = self.zstd.decompress(packed, usize::try_from(unpacked).unwrap_or(usize::MAX));
        page.ok()
            .filter(|page| page.len() as u64 == unpacked)
            .ok_or_else(|| "a page of it cannot be unpacked".into())
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(n).filter(|end| *end <= self.bytes.len());
        let end = end.ok_or("it ends unexpectedly")?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(self.take(4)?.try_into().map_or(0, u32::from_le_bytes))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(self.take(8)?.try_into().map_or(0, u64::from_le_bytes))
    }

    fn varint(&mut self) -> Result<u64, String> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.take(1)?[0];
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err("a number in it has no end".into())
    }

    fn zigzag(&mut self) -> Result<i64, String> {
        let value = self.varint()?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    fn structure(&mut self, depth: u32) -> Result<Fields<'a>, String> {
        if depth > DEEPEST {
            return Err("its description is too deep".into());
        }
        let (mut fields, mut last) = (Fields::default(), 0_i16);
        loop {
            let byte = self.take(1)?[0];
            if byte == 0 {
                return Ok(fields);
            }
            last = match byte >> 4 {
                0 => i16::try_from(self.zigzag()?).map_err(|_| "a field of it has no number")?,
                step => last.checked_add(i16::from(step)).ok_or("a field of it has no number")?,
            };
            fields.0.push((last, self.field(byte & 15, depth)?));
        }
    }

    fn field(&mut self, kind: u8, depth: u32) -> Result<Field<'a>, String> {
        Ok(match kind {
            1 | 2 => Field::Other,
            3 => {
                self.take(1)?;
                Field::Other
            }
            4..=6 => Field::Number(self.zigzag()?),
            7 => {
                self.take(8)?;
                Field::Other
            }
            8 => {
                let length = self.varint()? as usize;
                Field::Bytes(self.take(length)?)
            }
            9 | 10 => self.list(depth)?,
            12 => Field::Structure(self.structure(depth + 1)?),
            _ => return Err("its description has a field of no known type".into()),
        })
    }

    fn list(&mut self, depth: u32) -> Result<Field<'a>, String> {
        let head = self.take(1)?[0];
        let length = match head >> 4 {
            15 => self.varint()?,
            short => u64::from(short),
        };
        let (mut list, is_structures) = (vec![], head & 15 == 12);
        for _ in 0..length {
            match is_structures {
                true => list.push(self.structure(depth + 1)?),
                // Each takes a byte at least, so that no list is longer than the file.
                false => drop(self.field(if head & 15 < 3 { 3 } else { head & 15 }, depth + 1)?),
            }
        }
        Ok(if is_structures { Field::Structures(list) } else { Field::Other })
    }

    /// A page's header, and what is in it.
    fn page(&mut self, unpack: &mut Unpack) -> Result<(Fields<'a>, Vec<u8>), String> {
        let header = self.structure(0)?;
        let size = |id| header.number(id).and_then(|n| u64::try_from(n).ok()).ok_or("a page has no size");
        let (unpacked, packed) = (size(2)?, size(3)?);
        let page = unpack.page(self.take(packed as usize)?, unpacked)?;
        Ok((header, page))
    }

    /// The "RLE / bit-packing hybrid".
    fn hybrid(&mut self, width: u32, n_values: usize, to: &mut Vec<u32>) -> Result<(), String> {
        if width == 0 || width > 32 {
            return Err("numbers in it have no width".into());
        }
        while to.len() < n_values {
            let run = self.varint()?;
            let length = run >> 1;
            let left = n_values - to.len();
            if length == 0 {
                return Err("a run in it is empty".into());
            }
            if run & 1 == 0 {
                let mut value = [0; 4];
                let bytes = self.take(width.div_ceil(8) as usize)?;
                value[..bytes.len()].copy_from_slice(bytes);
                let n = usize::try_from(length).unwrap_or(usize::MAX).min(left);
                to.resize(to.len() + n, u32::from_le_bytes(value));
                continue;
            }
            let n_bytes = length.checked_mul(u64::from(width)).and_then(|n| usize::try_from(n).ok());
            let packed = self.take(n_bytes.ok_or("a run in it is too long")?)?;
            let mask = if width == 32 { u64::from(u32::MAX) } else { (1 << width) - 1 };
            let (mut bits, mut n_bits, mut bytes) = (0u64, 0, packed.iter());
            for _ in 0..left.min(usize::try_from(length.saturating_mul(8)).unwrap_or(usize::MAX)) {
                while n_bits < width {
                    bits |= u64::from(*bytes.next().ok_or("a run in it is too short")?) << n_bits;
                    n_bits += 8;
                }
                to.push((bits & mask) as u32);
                bits >>= width;
                n_bits -= width;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::write::{Column, File};
    use super::*;
    use crate::parts::changes::{Kind, Value};

    const COLUMNS: [(&str, Kind); 3] =
        [("number", Kind::Number), ("word", Kind::Text), ("address", Kind::Address)];

    fn file(n_rows: u32) -> Vec<u8> {
        let mut bytes = vec![];
        let mut file = File::new(&mut bytes, &COLUMNS, 1).unwrap();
        let mut columns = [Column::default(), Column::default(), Column::default()];
        for n in 0..n_rows {
            let word = format!("word {}", n % 7);
            columns[0].push(if n % 3 == 0 { Value::None } else { Value::Number(-i64::from(n)) });
            columns[1].push(if n % 5 == 0 { Value::None } else { Value::Text(&word) });
            columns[2].push(Value::Number(i64::from(n)));
            if n % 1000 == 999 {
                file.row_group(&mut columns).unwrap();
            }
        }
        file.row_group(&mut columns).unwrap();
        file.finish(&[("what", "a test")]).unwrap();
        bytes
    }

    #[test]
    fn what_was_written_is_read() {
        for n_rows in [0, 1, 8, 2500] {
            let table = Table::read(&file(n_rows), &["number", "word"], Groups::All).unwrap();
            assert_eq!(table.about, [("what".to_owned(), "a test".to_owned())]);
            assert_eq!(table.n_rows, n_rows as usize);
            for n in 0..n_rows {
                let number = (n % 3 != 0).then_some(-i64::from(n));
                let word = (n % 5 != 0).then(|| format!("word {}", n % 7));
                let row = n as usize;
                assert_eq!((table.number(row, "number"), table.text(row, "word")), (number, word.as_deref()));
                assert_eq!((table.number(row, "address"), table.text(row, "number")), (None, None));
            }
        }
    }

    #[test]
    fn damage_is_an_error_and_never_a_panic() {
        let whole = file(300);
        for length in 0..whole.len() {
            assert!(Table::read(&whole[..length], &["number"], Groups::All).is_err(), "{length}");
        }
        for at in 0..whole.len() {
            for bit in [1, 0x80] {
                let mut damaged = whole.clone();
                damaged[at] ^= bit;
                // Some bytes are of other columns or of no meaning.
                let _ = Table::read(&damaged, &["number", "word", "address"], Groups::All);
            }
        }
    }
}
