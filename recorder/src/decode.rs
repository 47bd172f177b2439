//! Bytes of a chunk to records. The process that wrote them may have been hit by anything, so nothing is believed:
//! lengths are clamped to what is committed, and what makes no sense is counted.

use gputrace_ring::brief::{Brief, CALL_WORDS, Said, restore_call};
use gputrace_ring::record::{
    Action, Backward, BlockAlloc, BlockFree, BlockOom, BriefAlloc, BriefForward, BriefFree, Call, CallEnd,
    CodeDef, Communicator, Device, Forward, Header, Kind, Mark, MarkAction, NcclEnter, NcclExit, NcclOp,
    NcclTimed, NcclTiming, Node, StackDef, Wait, WaitAction,
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
        let kind = Kind::from_u8(header.kind);
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
    let word = |at: usize| words.get(at).copied();
    Some(match kind {
        Kind::TimeBase => return None,
        Kind::Call => call(&restore_call(words, flags)?)?,
        Kind::CallEnd => {
            let first = word(0)?;
            Record::CallEnd(CallEnd {
                api: first as u16,
                reserved: 0,
                result: (first >> 32) as i32,
                addr: word(1)?,
                duration: word(2)?,
            })
        }
        Kind::BlockAlloc => {
            let alloc = BlockAlloc {
                addr: word(0)?,
                device_bytes: word(1)?,
                requested: word(2)?,
                stream: word(3)?,
                allocated: word(4)?,
                reserved: word(5)?,
                stack: word(6)?,
            };
            alloc.say(said);
            Record::BlockAlloc(alloc)
        }
        Kind::BriefAlloc => {
            let brief = BriefAlloc { addr: word(0)?, bytes_slack: word(1)?, stack: word(2)? };
            Record::BlockAlloc(BlockAlloc::restore(&brief, said)?)
        }
        Kind::BlockFree => {
            let free = BlockFree {
                addr: word(0)?,
                device_bytes: word(1)?,
                allocated: word(2)?,
                reserved: word(3)?,
                stack: word(4)?,
            };
            free.say(said);
            Record::BlockFree(free, flags)
        }
        Kind::BriefFree => {
            let brief = BriefFree { addr: word(0)?, bytes: word(1)?, stack: word(2)? };
            Record::BlockFree(BlockFree::restore(&brief, said)?, flags)
        }
        Kind::BlockOom => Record::BlockOom(BlockOom {
            device_bytes: word(0)?,
            requested: word(1)?,
            allocated: word(2)?,
            reserved: word(3)?,
            stack: word(4)?,
        }),
        Kind::Wait => {
            let last = word(2)?;
            let wait =
                Wait { event: word(0)?, stream: word(1)?, action: last as u32, result: (last >> 32) as i32 };
            Record::Wait(wait, WaitAction::from_raw(wait.action)?)
        }
        Kind::Stack => {
            let second = word(1)?;
            let (native, python) = (usize::from(second as u16), usize::from((second >> 16) as u16));
            let marks = (second >> 32) as u32;
            let native_words = words.get(2..2 + native)?;
            let python_words = words.get(2 + native..2 + native + 2 * python)?;
            Record::Stack {
                id: word(0)?,
                native: native_words.to_vec(),
                python: python_words.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect(),
                truncated: marks & (StackDef::TRUNCATED | StackDef::BROKEN) != 0,
            }
        }
        Kind::Code => {
            let (lengths, last) = (word(1)?, word(2)?);
            let definition = CodeDef {
                id: word(0)?,
                name: lengths as u16,
                file: (lengths >> 16) as u16,
                lines: (lengths >> 32) as u32,
                first_line: last as u32,
                python: (last >> 32) as u16,
                marks: (last >> 48) as u16,
            };
            let mut texts = words.get(3..)?;
            let name = take_bytes(&mut texts, usize::from(definition.name))?;
            let file = take_bytes(&mut texts, usize::from(definition.file))?;
            let lines = take_bytes(&mut texts, definition.lines as usize)?;
            Record::Code(Code {
                id: definition.id,
                name: text(&name),
                file: text(&file),
                lines,
                first_line: definition.first_line,
                python: definition.python,
            })
        }
        Kind::Api => {
            let bytes = bytes_of(words.get(1..)?);
            let mut names = bytes.split(|byte| *byte == 0).filter(|name| !name.is_empty());
            let name = text(names.next()?);
            Record::Api { number: word(0)?, name, runtime_name: names.next().map(text).unwrap_or_default() }
        }
        Kind::Device => {
            let first = word(0)?;
            let definition = Device {
                ordinal: first as u32,
                name: (first >> 32) as u32,
                uuid_low: word(1)?,
                uuid_high: word(2)?,
                total: word(3)?,
            };
            let mut uuid = [0; 16];
            uuid[..8].copy_from_slice(&definition.uuid_low.to_ne_bytes());
            uuid[8..].copy_from_slice(&definition.uuid_high.to_ne_bytes());
            let mut texts = words.get(4..)?;
            let name = text(&take_bytes(&mut texts, definition.name as usize)?);
            Record::Device { ordinal: definition.ordinal, name, uuid, total: definition.total }
        }
        Kind::Text => {
            let mut texts = words.get(2..)?;
            let length = usize::try_from(word(1)?).ok()?;
            Record::Text { id: word(0)?, text: text(&take_bytes(&mut texts, length)?) }
        }
        Kind::Mark => {
            let first = word(0)?;
            let mark = Mark {
                action: first as u32,
                category: (first >> 32) as u32,
                text: word(1)?,
                domain: word(2)?,
                range: word(3)?,
            };
            Record::Mark(mark, MarkAction::from_raw(mark.action)?)
        }
        Kind::NcclEnter => {
            let (first, third) = (word(0)?, word(2)?);
            let (kinds, last) = (word(10)?, word(12)?);
            let enter = NcclEnter {
                api: first as u16,
                op: (first >> 16) as u8,
                marks: (first >> 24) as u8,
                group_depth: (first >> 32) as u32,
                call: word(1)?,
                comm: third as u32,
                group: (third >> 32) as u32,
                sequence: word(3)?,
                count: word(4)?,
                send: word(5)?,
                receive: word(6)?,
                stream: word(7)?,
                handle: word(8)?,
                extra: word(9)?,
                datatype: kinds as i32,
                redop: (kinds >> 32) as i32,
                redop_call: word(11)?,
                peer: last as i32,
                reserved: 0,
                stack: word(13)?,
            };
            Record::NcclEnter(enter, NcclOp::from_raw(enter.op)?)
        }
        Kind::NcclExit => {
            let timed = (word(3)? >> 32) as u32;
            let exit = NcclExit {
                call: word(0)?,
                value: word(1)?,
                duration: word(2)?,
                result: word(3)? as i32,
                timed,
            };
            Record::NcclExit(exit, NcclTimed::from_raw(timed)?)
        }
        Kind::NcclTiming => Record::NcclTiming(NcclTiming {
            call: word(0)?,
            comm: word(1)? as u32,
            timeline: (word(1)? >> 32) as u32,
            stream: word(2)?,
            start: word(3)?,
            duration: word(4)?,
        }),
        Kind::Communicator => communicator(words)?,
        Kind::Runtime => Record::Runtime(word(0)?),
        Kind::Node => Record::Node(Node { operation: word(0)?, class: word(1)? }),
        Kind::NodeClass => {
            let bytes = bytes_of(words.get(1..)?);
            let name = text(bytes.split(|byte| *byte == 0).next().unwrap_or_default());
            Record::NodeClass { number: word(0)?, name }
        }
        Kind::Forward => {
            let forward = Forward { operation: word(0)?, stack: word(1)? };
            forward.say(said);
            Record::Forward(forward)
        }
        Kind::BriefForward => Record::Forward(Forward::restore(&BriefForward { stack: word(0)? }, said)?),
        Kind::Backward => Record::Backward(Backward {
            thread: word(0)?,
            stack: word(1)?,
            frame: word(2)?,
            begins: word(3)?,
        }),
        Kind::Note => {
            let bytes = bytes_of(words);
            Record::Note(text(bytes.trim_ascii_end().split(|byte| *byte == 0).next().unwrap_or_default()))
        }
    })
}

fn call(words: &[u64; CALL_WORDS]) -> Option<Record> {
    let [first, addr, bytes, stream, handle, extra, stack, times, comm, nccl_call] = *words;
    let call = Call {
        api: first as u16,
        action: (first >> 16) as u8,
        device: (first >> 24) as i8,
        result: (first >> 32) as i32,
        addr,
        bytes,
        stream,
        handle,
        extra,
        stack,
        duration: times as u32,
        flags: (times >> 32) as u32,
        comm: comm as u32,
        reserved: 0,
        nccl_call,
    };
    Some(Record::Call(call, Action::from_raw(call.action)?))
}

fn communicator(words: &[u64]) -> Option<Record> {
    let word = |at: usize| words.get(at).copied();
    let halves = |at: usize| word(at).map(|word| (word as u32, (word >> 32) as u32));
    let (id, parent) = halves(0)?;
    let ((rank, n_ranks), (ordinal, version), (color, key)) = (halves(5)?, halves(6)?, halves(7)?);
    let (kinds, marks) = halves(8)?;
    let mut config = [0; 8];
    for (pair, at) in config.chunks_exact_mut(2).zip(9..) {
        let (first, second) = halves(at)?;
        pair.copy_from_slice(&[first as i32, second as i32]);
    }
    let (n_name, n_net_name) = halves(13)?;
    let definition = Communicator {
        id,
        parent,
        call: word(1)?,
        handle: word(2)?,
        unique_id: word(3)?,
        comm_hash: word(4)?,
        rank: rank as i32,
        n_ranks: n_ranks as i32,
        ordinal,
        version,
        color: color as i32,
        key: key as i32,
        origin: kinds as u16,
        device: (kinds >> 16) as i16,
        marks,
        config,
        name: n_name,
        net_name: n_net_name,
    };
    let mut texts = words.get(14..)?;
    let name = text(&take_bytes(&mut texts, n_name as usize)?);
    let net_name = text(&take_bytes(&mut texts, n_net_name as usize)?);
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
