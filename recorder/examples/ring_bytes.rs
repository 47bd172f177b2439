//! What fills a ring: records and bytes of each kind. Of two rings, what the second has more of: the same program with
//! more steps shows what a step costs once it runs steadily.
//!
//!     cargo run --release -p gputrace-recorder --example ring_bytes -- RING [RING]
//!
//! A program that finds no recorder leaves its ring: `LD_PRELOAD=/elsewhere/libgputrace.so PATH=/nowhere program`.
#![allow(clippy::print_stdout)]

use gputrace_ring::map::Map;
use gputrace_ring::record::{Header, Kind};
use gputrace_ring::ring::Reader;
use memmap2::MmapRaw;
use std::collections::BTreeMap;
use std::error::Error;
use std::fs::OpenOptions;

/// Records and bytes, by the number of the kind.
type Bytes = BTreeMap<u8, (i64, i64)>;

fn main() -> Result<(), Box<dyn Error>> {
    let mut more = Bytes::new();
    for ring in std::env::args().skip(1) {
        let found = count(&ring)?;
        let before = std::mem::replace(&mut more, found);
        for (kind, (n, bytes)) in before {
            let now = more.entry(kind).or_default();
            *now = (now.0 - n, now.1 - bytes);
        }
    }
    let n_blocks: i64 = more.iter().filter(|(kind, _)| is_block(**kind)).map(|(_, (n, _))| n).sum();
    let per_block = |bytes: i64| bytes as f64 / n_blocks.max(1) as f64;
    println!("{:14} {:>9} {:>11} {:>9} {:>14}", "kind", "records", "bytes", "B/record", "B/block event");
    for (kind, (n, bytes)) in &more {
        let name = Kind::from_raw(*kind).map_or("?".to_owned(), |kind| format!("{kind:?}"));
        let each = *bytes as f64 / (*n).max(1) as f64;
        println!("{name:14} {n:9} {bytes:11} {each:9.1} {:14.2}", per_block(*bytes));
    }
    let (n, bytes) = more.values().fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
    println!("{:14} {n:9} {bytes:11} {:>9} {:14.2}", "all", "", per_block(bytes));
    Ok(())
}

/// Whether PyTorch's allocator handed out or took back a block.
fn is_block(kind: u8) -> bool {
    matches!(
        Kind::from_raw(kind),
        Some(Kind::BlockAlloc | Kind::BlockFree | Kind::BriefAlloc | Kind::BriefFree)
    )
}

fn count(ring: &str) -> Result<Bytes, Box<dyn Error>> {
    let file = OpenOptions::new().read(true).write(true).open(ring)?;
    let memory = MmapRaw::map_raw(&file)?;
    // SAFETY: page aligned and writable, and mapped until the end of this function.
    let map = unsafe { Map::open(memory.as_mut_ptr(), memory.len()) };
    let reader = Reader::new(map.map_err(|why| format!("{ring}: {why:?}"))?);
    let mut found = Bytes::new();
    for view in (0..reader.map().n_chunks()).filter_map(|chunk| reader.look(chunk)) {
        let mut at = 0;
        while at < view.committed {
            let header = Header::decode(reader.word(view.chunk, at));
            let bytes = usize::from(header.words).max(1) * 8;
            let kind = found.entry(header.kind).or_default();
            *kind = (kind.0 + 1, kind.1 + bytes as i64);
            at += bytes;
        }
    }
    Ok(found)
}
