//! Writes Apache Parquet (github.com/apache/parquet-format, Parquet.thrift and Encodings.md): row groups with one page per column,
//! plain integers, texts by dictionary, zstd, no statistics. It needs memory for one row group.

use std::io::{self, Write};

use rustc_hash::FxHashMap;

use super::{
    BYTE_ARRAY, DATA_PAGE, DICTIONARY_PAGE, INT64, MAGIC, OPTIONAL, PLAIN, RLE, RLE_DICTIONARY, UINT_64,
    UTF8, ZSTD,
};
use crate::parts::changes::{Kind, Value};

/// The cells of a column in one row group.
#[derive(Default)]
pub struct Column {
    /// Whether each row has a value.
    present: Vec<bool>,
    numbers: Vec<i64>,
    /// Indices into `dictionary`.
    texts: Vec<u32>,
    dictionary: Vec<u8>,
    ids: FxHashMap<String, u32>,
    n_ids: u32,
}

impl Column {
    /// Rows so far.
    #[must_use]
    pub fn n_rows(&self) -> usize {
        self.present.len()
    }

    /// Adds a row.
    pub fn push(&mut self, value: Value) {
        match value {
            Value::None => self.present.push(false),
            Value::Number(number) => {
                self.present.push(true);
                self.numbers.push(number);
            }
            Value::Text(text) => {
                let idx = self.ids.get(text).copied();
                let idx = idx.unwrap_or_else(|| {
                    let idx = self.new_text(text);
                    self.ids.insert(text.to_owned(), idx);
                    idx
                });
                self.push_text(Some(idx));
            }
        }
    }

    pub(crate) fn push_text(&mut self, idx: Option<u32>) {
        self.present.push(idx.is_some());
        self.texts.extend(idx);
    }

    pub(crate) fn new_text(&mut self, text: &str) -> u32 {
        self.dictionary.extend_from_slice(&(text.len() as u32).to_le_bytes());
        self.dictionary.extend_from_slice(text.as_bytes());
        self.n_ids += 1;
        self.n_ids - 1
    }

    fn clear(&mut self) {
        *self = Column {
            present: std::mem::take(&mut self.present),
            numbers: std::mem::take(&mut self.numbers),
            texts: std::mem::take(&mut self.texts),
            dictionary: std::mem::take(&mut self.dictionary),
            ..Column::default()
        };
        self.present.clear();
        self.numbers.clear();
        self.texts.clear();
        self.dictionary.clear();
    }

    /// Which rows have a value, then the values.
    fn page(&self, kind: Kind) -> Vec<u8> {
        let mut levels = vec![];
        hybrid(&mut levels, self.present.iter().map(|present| u32::from(*present)), 1);
        let mut page = (levels.len() as u32).to_le_bytes().to_vec();
        page.extend_from_slice(&levels);
        match kind {
            Kind::Number | Kind::Address => {
                self.numbers.iter().for_each(|number| page.extend_from_slice(&number.to_le_bytes()));
            }
            Kind::Text => {
                let width = (u32::BITS - self.n_ids.leading_zeros()).max(1);
                page.push(width as u8);
                hybrid(&mut page, self.texts.iter().copied(), width);
            }
        }
        page
    }
}

/// The "RLE / bit-packing hybrid": one run where all values are the same, else one bit-packed run.
fn hybrid(out: &mut Vec<u8>, values: impl ExactSizeIterator<Item = u32> + Clone, width: u32) {
    let n_values = values.len() as u64;
    let Some(first) = values.clone().next() else { return };
    if values.clone().all(|value| value == first) {
        varint(out, n_values << 1);
        return out.extend_from_slice(&first.to_le_bytes()[..width.div_ceil(8) as usize]);
    }
    let n_groups = n_values.div_ceil(8);
    varint(out, n_groups << 1 | 1);
    let end = out.len() + n_groups as usize * width as usize;
    let (mut bits, mut n_bits) = (0u64, 0);
    for value in values {
        bits |= u64::from(value) << n_bits;
        n_bits += width;
        while n_bits >= 8 {
            out.push(bits as u8);
            bits >>= 8;
            n_bits -= 8;
        }
    }
    if n_bits > 0 {
        out.push(bits as u8);
    }
    out.resize(end, 0);
}

/// A file that is being written.
pub struct File<'a> {
    out: &'a mut dyn Write,
    columns: &'a [(&'static str, Kind)],
    level: i32,
    at: u64,
    n_rows: u64,
    /// `RowGroup`s.
    groups: Vec<Thrift>,
}

impl<'a> File<'a> {
    /// Begins a file of these columns; `level` is zstd's.
    pub fn new(
        out: &'a mut dyn Write,
        columns: &'a [(&'static str, Kind)],
        level: i32,
    ) -> io::Result<File<'a>> {
        out.write_all(MAGIC)?;
        Ok(File { out, columns, level, at: MAGIC.len() as u64, n_rows: 0, groups: vec![] })
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.at += bytes.len() as u64;
        self.out.write_all(bytes)
    }

    /// Writes what the columns hold, and empties them.
    pub fn row_group(&mut self, columns: &mut [Column]) -> io::Result<()> {
        let n_rows = columns.first().map_or(0, Column::n_rows) as u64;
        if n_rows == 0 {
            return Ok(());
        }
        let begin = self.at;
        let mut chunks = vec![];
        for ((name, kind), column) in self.columns.iter().zip(columns) {
            chunks.push(self.chunk(name, *kind, column)?);
            column.clear();
        }
        let mut group = Thrift::default();
        group.structs(1, &chunks);
        group.number(2, I64, (self.at - begin) as i64);
        group.number(3, I64, n_rows as i64);
        self.n_rows += n_rows;
        self.groups.push(group);
        Ok(())
    }

    /// Writes a column of a row group; its `ColumnChunk`.
    fn chunk(&mut self, name: &str, kind: Kind, column: &Column) -> io::Result<Thrift> {
        let begin = self.at;
        let mut unfolded = 0;
        let dictionary = (kind == Kind::Text).then_some(begin);
        if kind == Kind::Text {
            let mut header = Thrift::default();
            header.number(1, I32, i64::from(column.n_ids));
            header.number(2, I32, PLAIN);
            unfolded += self.page(DICTIONARY_PAGE, 7, &header, &column.dictionary)?;
        }
        let encoding = if kind == Kind::Text { RLE_DICTIONARY } else { PLAIN };
        let data = self.at;
        let mut header = Thrift::default();
        header.number(1, I32, column.n_rows() as i64);
        header.number(2, I32, encoding);
        header.number(3, I32, RLE);
        header.number(4, I32, RLE);
        unfolded += self.page(DATA_PAGE, 5, &header, &column.page(kind))?;
        let mut meta = Thrift::default();
        meta.number(1, I32, if kind == Kind::Text { BYTE_ARRAY } else { INT64 });
        meta.numbers(2, &[PLAIN, RLE, encoding]);
        meta.texts(3, &[name]);
        meta.number(4, I32, ZSTD);
        meta.number(5, I64, column.n_rows() as i64);
        meta.number(6, I64, unfolded as i64);
        meta.number(7, I64, (self.at - begin) as i64);
        meta.number(9, I64, data as i64);
        if let Some(dictionary) = dictionary {
            meta.number(11, I64, dictionary as i64);
        }
        let mut chunk = Thrift::default();
        chunk.number(2, I64, begin as i64);
        chunk.inside(3, &meta);
        Ok(chunk)
    }

    /// Writes a page; its bytes before compression, with its header.
    fn page(&mut self, kind: i64, field: u8, header: &Thrift, bytes: &[u8]) -> io::Result<u64> {
        let packed = zstd::bulk::compress(bytes, self.level)?;
        let mut page = Thrift::default();
        page.number(1, I32, kind);
        page.number(2, I32, bytes.len() as i64);
        page.number(3, I32, packed.len() as i64);
        page.inside(field, header);
        let page = page.end();
        self.write(&page)?;
        self.write(&packed)?;
        Ok((page.len() + bytes.len()) as u64)
    }

    /// Ends the file, with these words about it.
    pub fn finish(mut self, about: &[(&str, &str)]) -> io::Result<()> {
        let mut root = Thrift::default();
        root.text(4, "gputrace");
        root.number(5, I32, self.columns.len() as i64);
        let schema = std::iter::once(root).chain(self.columns.iter().map(|(name, kind)| {
            let mut element = Thrift::default();
            element.number(1, I32, if *kind == Kind::Text { BYTE_ARRAY } else { INT64 });
            element.number(3, I32, OPTIONAL);
            element.text(4, name);
            match kind {
                Kind::Number => {}
                Kind::Address => element.number(6, I32, UINT_64),
                Kind::Text => element.number(6, I32, UTF8),
            }
            element
        }));
        let pairs = about.iter().map(|(key, value)| {
            let mut pair = Thrift::default();
            pair.text(1, key);
            pair.text(2, value);
            pair
        });
        let mut meta = Thrift::default();
        meta.number(1, I32, 1);
        meta.structs(2, &schema.collect::<Vec<_>>());
        meta.number(3, I64, self.n_rows as i64);
        meta.structs(4, &self.groups);
        if !about.is_empty() {
            meta.structs(5, &pairs.collect::<Vec<_>>());
        }
        meta.text(6, concat!("gputrace ", env!("CARGO_PKG_VERSION")));
        let meta = meta.end();
        self.write(&meta)?;
        self.write(&(meta.len() as u32).to_le_bytes())?;
        self.write(MAGIC)
    }
}

/// A struct in Thrift's compact protocol (thrift-compact-protocol.md of apache/thrift). Fields come in ascending order.
#[derive(Clone, Default)]
struct Thrift {
    bytes: Vec<u8>,
    last: u8,
}

/// Types of fields.
const I32: u8 = 5;
const I64: u8 = 6;
const BINARY: u8 = 8;
const LIST: u8 = 9;
const STRUCT: u8 = 12;

impl Thrift {
    fn field(&mut self, id: u8, kind: u8) {
        self.bytes.push((id - self.last) << 4 | kind);
        self.last = id;
    }

    fn number(&mut self, id: u8, kind: u8, value: i64) {
        self.field(id, kind);
        varint(&mut self.bytes, zigzag(value));
    }

    fn text(&mut self, id: u8, text: &str) {
        self.field(id, BINARY);
        self.binary(text);
    }

    fn binary(&mut self, text: &str) {
        varint(&mut self.bytes, text.len() as u64);
        self.bytes.extend_from_slice(text.as_bytes());
    }

    fn inside(&mut self, id: u8, inside: &Thrift) {
        self.field(id, STRUCT);
        self.bytes.extend_from_slice(&inside.clone().end());
    }

    fn list(&mut self, id: u8, kind: u8, length: usize) {
        self.field(id, LIST);
        match u8::try_from(length) {
            Ok(short @ 0..=14) => self.bytes.push(short << 4 | kind),
            _ => {
                self.bytes.push(0xf0 | kind);
                varint(&mut self.bytes, length as u64);
            }
        }
    }

    fn numbers(&mut self, id: u8, values: &[i64]) {
        self.list(id, I32, values.len());
        values.iter().for_each(|value| varint(&mut self.bytes, zigzag(*value)));
    }

    fn texts(&mut self, id: u8, values: &[&str]) {
        self.list(id, BINARY, values.len());
        values.iter().for_each(|value| self.binary(value));
    }

    fn structs(&mut self, id: u8, values: &[Thrift]) {
        self.list(id, STRUCT, values.len());
        values.iter().for_each(|value| self.bytes.extend_from_slice(&value.clone().end()));
    }

    fn end(mut self) -> Vec<u8> {
        self.bytes.push(0);
        self.bytes
    }
}

fn zigzag(value: i64) -> u64 {
    (value << 1 ^ value >> 63) as u64
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}
