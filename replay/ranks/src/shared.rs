//! Memory that processes share: who made it, who maps it. Its bytes are those of who made it, so that each is counted once on its
//! GPU.
//!
//! Both ends see the 64 bytes of a `CUipcMemHandle` or of a fabric handle, and traces have their hash. A file descriptor has another
//! number in each process, and all of NVIDIA's are the same device file: what came by one has no name that both ends see. Where
//! only one process of the host gave any away, it is likely that one's.

use std::collections::{BTreeMap, BTreeSet};

use rustc_hash::FxHashMap;
use serde::Serialize;

use super::calls::Participant;
use super::places::PlaceId;
use super::shares::Token;

/// Memory that one process made and others map.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Shared {
    /// Its creator: rank or trace; left out where no trace has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exporter: Option<String>,
    /// The processes that map it.
    pub importers: Vec<String>,
    /// UUID of its GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// Pieces of memory.
    pub pieces: u64,
    /// Their bytes, once; left out where nobody says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// How the two ends are known to belong together.
    pub known: Known,
    /// Where most of it was shared first.
    pub call_site: String,
}

/// How it is known who made what a process maps.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub enum Known {
    /// Both ends have the same handle.
    ByHandle,
    /// No other process of the host gave memory away by file descriptor.
    OnlyOne,
    /// It is not.
    No,
}

/// What the processes share, most first. `name` says what a process is called.
pub(super) fn shared(participants: &[Participant], name: impl Fn(usize) -> String) -> Vec<Shared> {
    let mut makers: FxHashMap<u64, usize> = FxHashMap::default();
    for (idx, participant) in participants.iter().enumerate() {
        for given in &participant.shares.given {
            if let Token::Hash(hash) = given.token {
                makers.entry(hash).or_insert(idx);
            }
        }
    }
    // Who maps which object of whom; 0 is nobody that is known.
    let mut importers: BTreeMap<(usize, u64), BTreeSet<usize>> = BTreeMap::new();
    let mut by_descriptor: BTreeMap<Option<usize>, (BTreeSet<usize>, u64, u64)> = BTreeMap::new();
    let mut unknown: BTreeMap<usize, u64> = BTreeMap::new();
    for (idx, participant) in participants.iter().enumerate() {
        for taken in &participant.shares.taken {
            match taken.token {
                Token::Hash(hash) => match makers.get(&hash) {
                    Some(maker) => {
                        let given = &participants[*maker].shares.given;
                        let serials = given.iter().filter(|it| it.token == taken.token).map(|it| it.serial);
                        for serial in serials.take(1) {
                            importers.entry((*maker, serial)).or_default().insert(idx);
                        }
                    }
                    None => *unknown.entry(idx).or_default() += 1,
                },
                Token::Descriptor => {
                    let (who, n, bytes) = by_descriptor.entry(only_giver(participants, idx)).or_default();
                    who.insert(idx);
                    *n += 1;
                    *bytes = bytes.saturating_add(taken.mapped.0);
                }
            }
        }
    }
    let mut all = by_handle(participants, &importers, &name);
    all.extend(by_descriptor.into_iter().map(|(maker, (who, pieces, bytes))| Shared {
        exporter: maker.map(&name),
        importers: who.into_iter().map(&name).collect(),
        gpu: None,
        pieces,
        bytes: Some(bytes).filter(|bytes| *bytes > 0),
        known: if maker.is_some() { Known::OnlyOne } else { Known::No },
        call_site: String::new(),
    }));
    all.extend(unknown.into_iter().map(|(idx, pieces)| Shared {
        exporter: None,
        importers: vec![name(idx)],
        gpu: None,
        pieces,
        bytes: None,
        known: Known::No,
        call_site: String::new(),
    }));
    all.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.exporter.cmp(&b.exporter)));
    all
}

/// The process that gave memory away by file descriptor, where only one other of the host did.
fn only_giver(participants: &[Participant], to: usize) -> Option<usize> {
    let host = &participants[to].process.host;
    let gives = |it: &Participant| it.shares.given.iter().any(|given| given.token == Token::Descriptor);
    let mut givers =
        (0..participants.len()).filter(|idx| *idx != to && participants[*idx].process.host == *host);
    let mut givers = givers.by_ref().filter(|idx| gives(&participants[*idx]));
    let only = givers.next()?;
    givers.next().is_none().then_some(only)
}

/// What has a name at both ends, by who made it, who maps it and on which GPU.
fn by_handle(
    participants: &[Participant],
    importers: &BTreeMap<(usize, u64), BTreeSet<usize>>,
    name: &impl Fn(usize) -> String,
) -> Vec<Shared> {
    type Key<'a> = (usize, &'a BTreeSet<usize>, i16);
    let mut groups: BTreeMap<Key<'_>, (u64, u64, BTreeMap<PlaceId, u64>)> = BTreeMap::new();
    for ((maker, serial), who) in importers {
        let given = participants[*maker].shares.given.iter().find(|given| given.serial == *serial);
        let Some(given) = given else { continue };
        let (pieces, bytes, places) = groups.entry((*maker, who, given.device)).or_default();
        *pieces += 1;
        *bytes = bytes.saturating_add(given.bytes.0);
        let place = places.entry(given.place).or_default();
        *place = place.saturating_add(given.bytes.0);
    }
    let group =
        |((maker, who, device), (pieces, bytes, places)): (Key<'_>, (u64, u64, BTreeMap<PlaceId, u64>))| {
            let most = places.iter().max_by_key(|(_, bytes)| **bytes).map_or(0, |(place, _)| *place);
            Shared {
                exporter: Some(name(maker)),
                importers: who.iter().copied().map(name).collect(),
                gpu: participants[maker].uuid(device).map(str::to_owned),
                pieces,
                bytes: Some(bytes),
                known: Known::ByHandle,
                call_site: participants[maker].place(most),
            }
        };
    groups.into_iter().map(group).collect()
}
