//! SQLite's file format (<https://www.sqlite.org/fileformat2.html>), as far as it is needed for a file that is written once, one
//! table after the other or in turn, and read by others: table b-trees filled from left to right, no index, no free page.
//!
//! The first page says where each table has its root, which is written last. So everything is written twice: once to count
//! pages, once for real. Only one page per level of each tree has to be kept.

use std::io::{self, Write};

use super::changes::Value;

const PAGE: usize = 1 << 16;
/// Never used: where SQLite locks. `PENDING_BYTE` is at 2^30.
const LOCK_PAGE: u32 = (1 << 30) / PAGE as u32 + 1;
const FILE_HEADER: usize = 100;
/// Longest text: a row has to fit into a page.
const LONGEST: usize = 8 << 10;
/// Children of an interior page: 4 bytes, a row's number of at most 9, and 2 for the place of the cell.
const CHILDREN: usize = (PAGE - 12) / 15;

/// An entry of the schema.
pub(crate) enum Entry {
    /// A table: its name and columns with their types.
    Table(&'static str, String),
    /// A view: its name and query.
    View(&'static str, &'static str),
}

/// Writes a database. `fill` gives all rows, the same ones each time it is called.
pub(crate) fn write(
    out: &mut dyn Write,
    schema: &[Entry],
    fill: &mut dyn FnMut(&mut Tables) -> io::Result<()>,
) -> io::Result<()> {
    let mut counted = io::sink();
    let mut tables = Tables::new(&mut counted, schema.len());
    fill(&mut tables)?;
    let (roots, n_pages) = tables.finish()?;
    out.write_all(&first_page(schema, &roots, n_pages))?;
    let mut tables = Tables::new(out, schema.len());
    fill(&mut tables)?;
    let again = tables.finish()?;
    if again != (roots, n_pages) {
        return Err(io::Error::other("the trace changed while it was exported"));
    }
    Ok(())
}

/// The tables that are being filled.
pub(crate) struct Tables<'a> {
    pages: Pages<'a>,
    trees: Vec<Tree>,
}

impl Tables<'_> {
    fn new(out: &mut dyn Write, n_entries: usize) -> Tables<'_> {
        let trees = (0..n_entries).map(|_| Tree::default()).collect();
        Tables { pages: Pages { out, n: 1 }, trees }
    }

    /// Appends a row to the table of this place in the schema.
    pub(crate) fn row(&mut self, table: usize, values: &[Value]) -> io::Result<()> {
        self.trees[table].row(values, &mut self.pages)
    }

    /// The root of each tree, and the number of pages.
    fn finish(mut self) -> io::Result<(Vec<u32>, u32)> {
        let trees = std::mem::take(&mut self.trees);
        let roots = trees.into_iter().map(|tree| tree.finish(&mut self.pages)).collect::<Result<_, _>>()?;
        Ok((roots, self.pages.n))
    }
}

struct Pages<'a> {
    out: &'a mut dyn Write,
    n: u32,
}

impl Pages<'_> {
    fn put(&mut self, page: &[u8]) -> io::Result<u32> {
        if self.n + 1 == LOCK_PAGE {
            self.n += 1;
            self.out.write_all(&[0; PAGE])?;
        }
        self.n += 1;
        self.out.write_all(page)?;
        Ok(self.n)
    }
}

/// A child of an interior page, and the largest row number in it.
type Child = (u32, u64);

#[derive(Default)]
struct Tree {
    n_rows: u64,
    leaf: Node,
    record: Vec<u8>,
    /// Children that have no parent yet, by level above the leaves.
    levels: Vec<Vec<Child>>,
}

impl Tree {
    fn row(&mut self, values: &[Value], pages: &mut Pages) -> io::Result<()> {
        self.record.clear();
        record(values, &mut self.record);
        let mut cell = [0; 18];
        let mut n = varint(self.record.len() as u64, &mut cell);
        n += varint(self.n_rows + 1, &mut cell[n..]);
        if !self.leaf.fits(n + self.record.len()) {
            self.end_leaf(pages)?;
        }
        self.n_rows += 1;
        self.leaf.cell(&[&cell[..n], &self.record]);
        Ok(())
    }

    fn end_leaf(&mut self, pages: &mut Pages) -> io::Result<()> {
        let page = pages.put(&std::mem::take(&mut self.leaf).page(0, None))?;
        self.child(0, (page, self.n_rows), pages)
    }

    fn child(&mut self, level: usize, child: Child, pages: &mut Pages) -> io::Result<()> {
        if level == self.levels.len() {
            self.levels.push(vec![]);
        }
        self.levels[level].push(child);
        // Two stay, so that no page ends up with a single child.
        if self.levels[level].len() == CHILDREN + 2 {
            let children: Vec<Child> = self.levels[level].drain(..CHILDREN).collect();
            let parent = interior(&children, pages)?;
            self.child(level + 1, parent, pages)?;
        }
        Ok(())
    }

    fn finish(mut self, pages: &mut Pages) -> io::Result<u32> {
        self.end_leaf(pages)?;
        let mut level = 0;
        loop {
            let children = std::mem::take(&mut self.levels[level]);
            if let ([only], true) = (&children[..], level + 1 == self.levels.len()) {
                return Ok(only.0);
            }
            let half = if children.len() > CHILDREN { children.len().div_ceil(2) } else { children.len() };
            for part in children.chunks(half.max(2)) {
                let parent = interior(part, pages)?;
                self.child(level + 1, parent, pages)?;
            }
            level += 1;
        }
    }
}

/// An interior page; its last child is named in its header.
fn interior(children: &[Child], pages: &mut Pages) -> io::Result<Child> {
    let mut node = Node::default();
    let Some(((page, last), others)) = children.split_last() else {
        return Err(io::Error::other("a page without children"));
    };
    for (page, largest) in others {
        let mut key = [0; 9];
        let n = varint(*largest, &mut key);
        node.cell(&[&page.to_be_bytes(), &key[..n]]);
    }
    Ok((pages.put(&node.page(0, Some(*page)))?, *last))
}

/// The cells of a page of a b-tree.
#[derive(Default)]
struct Node {
    /// The last one first, as they stand in the page.
    cells: Vec<u8>,
    ends: Vec<usize>,
}

impl Node {
    fn fits(&self, bytes: usize) -> bool {
        FILE_HEADER + 12 + 2 * (self.ends.len() + 1) + self.cells.len() + bytes <= PAGE
    }

    fn cell(&mut self, parts: &[&[u8]]) {
        parts.iter().for_each(|part| self.cells.extend_from_slice(part));
        self.ends.push(self.cells.len());
    }

    /// The page; it begins after `header` bytes of something else.
    fn page(&self, header: usize, last_child: Option<u32>) -> Vec<u8> {
        let mut page = vec![0; PAGE];
        let begin = PAGE - self.cells.len();
        page[begin..].copy_from_slice(&self.cells);
        let kind = if last_child.is_some() { 0x05 } else { 0x0d };
        page[header] = kind;
        page[header + 3..header + 5].copy_from_slice(&(self.ends.len() as u16).to_be_bytes());
        // 65,536, where there is no cell, is written as 0.
        page[header + 5..header + 7].copy_from_slice(&(begin as u16).to_be_bytes());
        let mut at = header + 8;
        if let Some(child) = last_child {
            page[at..at + 4].copy_from_slice(&child.to_be_bytes());
            at += 4;
        }
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        for start in starts.take(self.ends.len()) {
            page[at..at + 2].copy_from_slice(&((begin + start) as u16).to_be_bytes());
            at += 2;
        }
        page
    }
}

fn first_page(schema: &[Entry], roots: &[u32], n_pages: u32) -> Vec<u8> {
    let mut node = Node::default();
    for (idx, (entry, root)) in (1..).zip(schema.iter().zip(roots)) {
        let (kind, name, root, sql) = match entry {
            Entry::Table(name, columns) => ("table", name, *root, format!("CREATE TABLE {name}({columns})")),
            Entry::View(name, query) => ("view", name, 0, format!("CREATE VIEW {name} AS {query}")),
        };
        let mut bytes = vec![];
        let root = Value::Number(i64::from(root));
        record(
            &[Value::Text(kind), Value::Text(name), Value::Text(name), root, Value::Text(&sql)],
            &mut bytes,
        );
        let mut cell = [0; 18];
        let mut n = varint(bytes.len() as u64, &mut cell);
        n += varint(idx, &mut cell[n..]);
        node.cell(&[&cell[..n], &bytes]);
    }
    let mut page = node.page(FILE_HEADER, None);
    page[..16].copy_from_slice(b"SQLite format 3\0");
    let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
    // Page size (65,536 is 1), versions for writing and reading, reserved bytes, fractions of a page.
    put(16, &[0, 1, 1, 1, 0, 64, 32, 32]);
    let number = |value: u32| value.to_be_bytes();
    put(24, &number(1)); // changes of the file
    put(28, &number(n_pages));
    put(40, &number(1)); // changes of the schema
    put(44, &number(4)); // format of the schema
    put(56, &number(1)); // UTF-8
    put(92, &number(1)); // the size above is right for this many changes
    put(96, &number(3_040_000)); // as SQLite 3.40
    page
}

/// A row: the types of its values, then the values.
fn record(values: &[Value], out: &mut Vec<u8>) {
    let mut types = [0; 9 * 64];
    let mut n = 0;
    for value in values {
        let kind = match value {
            Value::None => 0,
            Value::Number(number) => integer(*number).0,
            Value::Text(text) => 13 + 2 * cut(text).len() as u64,
        };
        n += varint(kind, &mut types[n..]);
    }
    // The header's length counts itself; it never comes near 127 bytes.
    out.push(n as u8 + 1);
    out.extend_from_slice(&types[..n]);
    for value in values {
        match value {
            Value::None => {}
            Value::Number(number) => out.extend_from_slice(&number.to_be_bytes()[8 - integer(*number).1..]),
            Value::Text(text) => out.extend_from_slice(cut(text).as_bytes()),
        }
    }
}

/// The type of an integer, and its bytes.
fn integer(number: i64) -> (u64, usize) {
    let bits = 65 - number.unsigned_abs().leading_zeros();
    match (number, bits) {
        (0, _) => (8, 0),
        (1, _) => (9, 0),
        (_, 0..=8) => (1, 1),
        (_, 9..=16) => (2, 2),
        (_, 17..=24) => (3, 3),
        (_, 25..=32) => (4, 4),
        (_, 33..=48) => (5, 6),
        _ => (6, 8),
    }
}

/// The text, or its beginning: docs/EXPORTS.md says so.
fn cut(text: &str) -> &str {
    let end = (0..=text.len().min(LONGEST)).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}

/// Big endian, seven bits per byte; the ninth byte has eight.
fn varint(value: u64, out: &mut [u8]) -> usize {
    if value >= 1 << 56 {
        let mut rest = value >> 8;
        for byte in out[..8].iter_mut().rev() {
            *byte = rest as u8 | 0x80;
            rest >>= 7;
        }
        out[8] = value as u8;
        return 9;
    }
    let n = (64 - value.max(1).leading_zeros()).div_ceil(7) as usize;
    for (idx, byte) in out[..n].iter_mut().enumerate() {
        let more = if idx + 1 < n { 0x80 } else { 0 };
        *byte = (value >> (7 * (n - 1 - idx))) as u8 & 0x7f | more;
    }
    n
}
