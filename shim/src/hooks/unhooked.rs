//! Functions of the driver that look as if they gave memory out or took it back, were looked up, and are no rows: a
//! newer CUDA than this library knows. They are named in the trace, so that what is missing from it has a name.

use crate::lanes;
use crate::session::Start;
use crate::sys::Text;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use gputrace_ring::record::Kind;
use gputrace_ring::ring::Producer;

/// More than a release adds.
const MOST_NAMES: usize = 16;
/// The longest name of the family in CUDA 13.5 has 48 bytes.
const NAME_BYTES: usize = 64;

/// Looked up by every CUDA runtime, known, and no rows: cuda_driver.rs says why.
const KNOWN: &[&[u8]] = &[b"cuMemMapArrayAsync", b"cuMemMapArrayAsync_ptsz"];

/// Nobody's.
const FREE: u32 = 0;
/// Its name is being written.
const CLAIMED: u32 = 1;
/// Its name can be read.
const NAMED: u32 = 2;

struct Seen {
    state: AtomicU32,
    version: AtomicU32,
    /// The name, padded with zeros.
    name: [AtomicU64; NAME_BYTES / 8],
}

static SEEN: [Seen; MOST_NAMES] = [const {
    Seen {
        state: AtomicU32::new(FREE),
        version: AtomicU32::new(0),
        name: [const { AtomicU64::new(0) }; NAME_BYTES / 8],
    }
}; MOST_NAMES];

/// Whether the name is one of `cuMem`'s that gives memory out, takes it back, or places it.
pub(crate) fn is_memory(name: &[u8]) -> bool {
    let Some(rest) = name.strip_prefix(b"cuMem") else { return false };
    let verbs: [&[u8]; 6] = [b"Alloc", b"Free", b"Create", b"Release", b"Map", b"Unmap"];
    let verb_first = |rest: &[u8]| verbs.iter().any(|verb| rest.starts_with(verb));
    let after = |prefix: &[u8]| rest.strip_prefix(prefix).is_some_and(verb_first);
    (verb_first(rest) || after(b"Host") || after(b"Pool")) && !KNOWN.contains(&name)
}

/// The driver gave out a function of this name that is no row; `version` is the one asked for, 0 with `dlsym`.
#[cold]
pub(crate) fn seen(name: &[u8], version: i32) {
    for slot in &SEEN {
        match slot.state.compare_exchange(FREE, CLAIMED, Ordering::Acquire, Ordering::Acquire) {
            Ok(_) => {
                for (word, bytes) in slot.name.iter().zip(name.chunks(8)) {
                    let mut padded = [0_u8; 8];
                    padded.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
                    word.store(u64::from_ne_bytes(padded), Ordering::Relaxed);
                }
                slot.version.store(version as u32, Ordering::Relaxed);
                // SYNC: the name is written.
                slot.state.store(NAMED, Ordering::Release);
                if let Some(mut lane) = lanes::lane(Start::OnlyIfLive) {
                    slot.describe(lane.producer());
                }
                return;
            }
            Err(NAMED) if slot.is(name) => return,
            Err(_) => {}
        }
    }
}

/// Names what was seen before the session began.
pub(crate) fn describe(producer: &mut Producer) {
    for slot in &SEEN {
        // SYNC: the name is written.
        if slot.state.load(Ordering::Acquire) == NAMED {
            slot.describe(producer);
        }
    }
}

impl Seen {
    fn is(&self, name: &[u8]) -> bool {
        let mut kept = self.name.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes());
        name.iter().take(NAME_BYTES).all(|byte| kept.next() == Some(*byte)) && kept.next().unwrap_or(0) == 0
    }

    /// `driver.unhooked=NAME VERSION: ...`
    fn describe(&self, producer: &mut Producer) {
        let mut text = Text::<192>::new().add(b"driver.unhooked=");
        for byte in self.name.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()) {
            if byte != 0 {
                text = text.add(&[byte]);
            }
        }
        let version = self.version.load(Ordering::Relaxed);
        if version != 0 {
            text = text.add(b" ").number(u64::from(version));
        }
        let text = text
            .add(b": looked up, but unknown to this gputrace: memory that it allocates is not in this trace");
        let at = producer.now();
        producer.push_raw(at, Kind::Note, &[text.as_bytes()]);
    }
}
