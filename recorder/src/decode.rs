//! Bytes of a chunk to records. The process that wrote them may have been hit by anything, so nothing is believed:
//! lengths are clamped to what is committed, and what makes no sense is counted.

use gputrace_ring::brief::{Brief, Said, restore_call};
use gputrace_ring::record::{
    Action, Backward, BlockAlloc, BlockFree, BlockOom, Call, CallEnd, CodeDef, Communicator, Device, Forward,
    Header, Kind, Mark, MarkAction, NcclEnter, NcclExit, NcclOp, NcclTimed, NcclTiming, Node, Payload, Pjrt,
    PjrtAction, PjrtExecutable, PjrtOrigin, StackDef, TextDef, Wait, WaitAction,
};
use gputrace_ring::ring::Reader;

/// One record of the ring with its time.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Record {
    Call(Call, Action),
    CallEnd(CallEnd),
    BlockAlloc(BlockAlloc),
    /// With the header's flags.
    BlockFree(BlockFree, u8),
    BlockOom(BlockOom),
    Wait(Wait, WaitAction),
    Mark(Mark, MarkAction),
    Text {
        id: u64,
        text: String,
    },
    Stack {
        id: u64,
        native: Vec<u64>,
        python: Vec<(u64, u64)>,
        truncated: bool,
    },
    Code(Code),
    Api {
        number: u64,
        name: String,
        runtime_name: String,
    },
    Device {
        ordinal: u32,
        name: String,
        uuid: [u8; 16],
        total: u64,
    },
    Runtime(u64),
    Note(String),
    Node(Node),
    NodeClass {
        number: u64,
        name: String,
    },
    Forward(Forward),
    Backward(Backward),
    NcclEnter(NcclEnter, NcclOp),
    NcclExit(NcclExit, NcclTimed),
    NcclTiming(NcclTiming),
    Pjrt(Pjrt, PjrtAction, PjrtOrigin),
    PjrtExecutable(PjrtExecutable),
    Communicator {
        definition: Communicator,
        name: String,
        net_name: String,
    },
}

/// A Python code object.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Code {
    pub(crate) id: u64,
    pub(crate) name: String,
    pub(crate) file: String,
    pub(crate) lines: Vec<u8>,
    pub(crate) first_line: u32,
    /// `(major << 8) | minor` of the interpreter.
    pub(crate) python: u16,
}

/// Where a chunk has been read up to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Progress {
    /// Tells this use of the chunk from an earlier one.
    pub(crate) sequence: u64,
    /// Bytes read.
    pub(crate) at: usize,
    /// Ticks from which the next records count.
    base: u64,
    /// What the next records follow from.
    said: Said,
}

impl Progress {
    pub(crate) fn new(sequence: u64, base: u64) -> Progress {
        Progress { sequence, at: 0, base, said: Said::default() }
    }
}

/// Reads the records of a chunk from where the last reading ended up to `committed`, and says how many were unreadable.
pub(crate) fn read_chunk(
    reader: &Reader,
    chunk: u32,
    committed: usize,
    progress: &mut Progress,
    mut to: impl FnMut(u64, Record),
) -> u64 {
    let mut damaged = 0;
    let mut words = Vec::new();
    while progress.at < committed {
        let header = Header::decode(reader.word(chunk, progress.at));
        let bytes = usize::from(header.words) * 8;
        if bytes == 0 || bytes > committed - progress.at {
            // The lengths are lost, and with them everything up to the end of what is committed now.
            (progress.at, progress.said) = (committed, Said::default());
            return damaged + 1;
        }
        words.clear();
        words.extend((8..bytes).step_by(8).map(|word| reader.word(chunk, progress.at + word)));
        progress.at += bytes;
        let ticks = progress.base.saturating_add(u64::from(header.delta));
        let kind = Kind::from_raw(header.kind);
        if let (Some(Kind::TimeBase), Some(base)) = (kind, words.first())
            // Time does not run backwards, whatever the bytes say.
            && *base >= progress.base
        {
            progress.base = *base;
        } else if let Some(record) =
            kind.and_then(|kind| decode(kind, header.flags, &words, &mut progress.said))
        {
            to(ticks, record);
        } else {
            // Nobody knows what it said.
            progress.said = Said::default();
            damaged += 1;
        }
    }
    damaged
}

fn decode(kind: Kind, flags: u8, words: &[u64], said: &mut Said) -> Option<Record> {
    Some(match kind {
        Kind::TimeBase => return None,
        Kind::Call => {
            let call: Call = payload(&restore_call(words, flags)?)?;
            Record::Call(call, Action::from_raw(call.action)?)
        }
        Kind::CallEnd => Record::CallEnd(payload(words)?),
        Kind::BlockAlloc => Record::BlockAlloc(whole(words, said)?),
        Kind::BriefAlloc => Record::BlockAlloc(restored(words, said)?),
        Kind::BlockFree => Record::BlockFree(whole(words, said)?, flags),
        Kind::BriefFree => Record::BlockFree(restored(words, said)?, flags),
        Kind::BlockOom => Record::BlockOom(payload(words)?),
        Kind::Wait => {
            let wait: Wait = payload(words)?;
            Record::Wait(wait, WaitAction::from_raw(wait.action)?)
        }
        Kind::Stack => stack(words)?,
        Kind::Code => code(words)?,
        Kind::Api => {
            let bytes = bytes_of(words.get(1..)?);
            let mut names = bytes.split(|byte| *byte == 0).filter(|name| !name.is_empty());
            let name = text(names.next()?);
            let runtime_name = names.next().map(text).unwrap_or_default();
            Record::Api { number: *words.first()?, name, runtime_name }
        }
        Kind::Device => device(words)?,
        Kind::Text => {
            let (definition, mut texts) = TextDef::from_words(words)?;
            let length = usize::try_from(definition.length).ok()?;
            Record::Text { id: definition.id, text: text(&take_bytes(&mut texts, length)?) }
        }
        Kind::Mark => {
            let mark: Mark = payload(words)?;
            Record::Mark(mark, MarkAction::from_raw(mark.action)?)
        }
        Kind::NcclEnter => {
            let enter: NcclEnter = payload(words)?;
            Record::NcclEnter(enter, NcclOp::from_raw(enter.op)?)
        }
        Kind::NcclExit => {
            let exit: NcclExit = payload(words)?;
            Record::NcclExit(exit, NcclTimed::from_raw(exit.timed)?)
        }
        Kind::NcclTiming => Record::NcclTiming(payload(words)?),
        Kind::Pjrt => {
            let pjrt: Pjrt = payload(words)?;
            Record::Pjrt(pjrt, PjrtAction::from_raw(pjrt.action)?, PjrtOrigin::from_raw(pjrt.origin)?)
        }
        Kind::PjrtExecutable => Record::PjrtExecutable(payload(words)?),
        Kind::Communicator => communicator(words)?,
        Kind::Runtime => Record::Runtime(*words.first()?),
        Kind::Node => Record::Node(payload(words)?),
        Kind::NodeClass => {
            let bytes = bytes_of(words.get(1..)?);
            let name = text(bytes.split(|byte| *byte == 0).next().unwrap_or_default());
            Record::NodeClass { number: *words.first()?, name }
        }
        Kind::Forward => Record::Forward(whole(words, said)?),
        Kind::BriefForward => Record::Forward(restored(words, said)?),
        Kind::Backward => Record::Backward(payload(words)?),
        Kind::Note => {
            let bytes = bytes_of(words);
            Record::Note(text(bytes.trim_ascii_end().split(|byte| *byte == 0).next().unwrap_or_default()))
        }
    })
}

fn payload<P: Payload>(words: &[u64]) -> Option<P> {
    P::from_words(words).map(|(payload, _)| payload)
}

/// A record from which others follow.
fn whole<P: Brief>(words: &[u64], said: &mut Said) -> Option<P> {
    let payload: P = payload(words)?;
    payload.say(said);
    Some(payload)
}

/// A record that follows from others.
fn restored<P: Brief>(words: &[u64], said: &mut Said) -> Option<P> {
    P::restore(&payload(words)?, said)
}

fn stack(words: &[u64]) -> Option<Record> {
    let (definition, frames) = StackDef::from_words(words)?;
    let (native, python) = frames.split_at_checked(usize::from(definition.native))?;
    let python = python.get(..2 * usize::from(definition.python))?;
    Some(Record::Stack {
        id: definition.id,
        native: native.to_vec(),
        python: python.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect(),
        truncated: definition.marks & (StackDef::TRUNCATED | StackDef::BROKEN) != 0,
    })
}

fn code(words: &[u64]) -> Option<Record> {
    let (definition, mut texts) = CodeDef::from_words(words)?;
    let name = take_bytes(&mut texts, usize::from(definition.name))?;
    let file = take_bytes(&mut texts, usize::from(definition.file))?;
    let lines = take_bytes(&mut texts, definition.lines as usize)?;
    Some(Record::Code(Code {
        id: definition.id,
        name: text(&name),
        file: text(&file),
        lines,
        first_line: definition.first_line,
        python: definition.python,
    }))
}

fn device(words: &[u64]) -> Option<Record> {
    let (definition, mut texts) = Device::from_words(words)?;
    let mut uuid = [0; 16];
    uuid[..8].copy_from_slice(&definition.uuid_low.to_ne_bytes());
    uuid[8..].copy_from_slice(&definition.uuid_high.to_ne_bytes());
    let name = text(&take_bytes(&mut texts, definition.name as usize)?);
    Some(Record::Device { ordinal: definition.ordinal, name, uuid, total: definition.total })
}

fn communicator(words: &[u64]) -> Option<Record> {
    let (definition, mut texts) = Communicator::from_words(words)?;
    let name = text(&take_bytes(&mut texts, definition.name as usize)?);
    let net_name = text(&take_bytes(&mut texts, definition.net_name as usize)?);
    Some(Record::Communicator { definition, name, net_name })
}

/// The next byte string of a record: padded to whole words.
fn take_bytes(words: &mut &[u64], length: usize) -> Option<Vec<u8>> {
    let n_words = length.div_ceil(8);
    let mut bytes = bytes_of(words.get(..n_words)?);
    *words = words.get(n_words..)?;
    bytes.truncate(length);
    Some(bytes)
}

fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
