//! Apache Parquet: the rows of [`super::parts::changes`], for DuckDB, pandas, Polars, Spark.

use std::io::{self, Write};

use gputrace_schemas::event::StackId;
use rustc_hash::FxHashMap;

use super::parts::changes::{COLUMNS, Kind, rows};
use super::parts::parquet::write::{Column, File};
use super::{Export, Request, Takes};
use gputrace_analyse::live::Lines;

pub(super) const ENTRY: Export = Export {
    name: "parquet",
    summary: "every change of memory with its stack, one row each, for DuckDB, pandas, Polars and Spark",
    takes: Takes { several: true, ..Takes::ONE },
    is_binary: true,
    export,
};

/// Rows of a group: a megabyte for a column of integers.
const ROWS: usize = 1 << 17;
/// The last column: the call stack as folded text, outermost frame first.
const FRAMES: (&str, Kind) = ("frames", Kind::Text);
/// zstd's level.
const LEVEL: i32 = 1;

fn export(request: &Request, out: &mut dyn Write) -> io::Result<()> {
    let names: Vec<(&'static str, Kind)> = COLUMNS.into_iter().chain([FRAMES]).collect();
    let mut file = File::new(out, &names, LEVEL)?;
    let mut columns: Vec<Column> = names.iter().map(|_| Column::default()).collect();
    let mut lines: Vec<Lines> =
        request.sources.iter().map(|source| Lines::new(source.definitions(), request.native)).collect();
    let mut stacks: FxHashMap<(usize, StackId), u32> = FxHashMap::default();
    rows(request, |row| {
        for (column, value) in columns.iter_mut().zip(row.values()) {
            column.push(value);
        }
        let frames = &mut columns[COLUMNS.len()];
        let key = (row.trace, row.stack);
        let known = stacks.get(&key).copied();
        let idx = known.unwrap_or_else(|| {
            let idx = frames.new_text(&folded(lines[row.trace].of(row.stack)));
            stacks.insert(key, idx);
            idx
        });
        frames.push_text((row.stack.0 > 0).then_some(idx));
        if frames.n_rows() == ROWS {
            stacks.clear();
            file.row_group(&mut columns)?;
        }
        Ok(())
    })?;
    file.row_group(&mut columns)?;
    file.finish(&[])
}

fn folded(lines: &[gputrace_analyse::live::Line]) -> String {
    let texts: Vec<String> = lines.iter().map(|line| line.to_string().replace(';', ":")).collect();
    texts.join(";")
}
