//! Jobs as text, for tests: one line per rank, one word per call.
//!
//! ```text
//! AR1024@10      all-reduce of 1024 floats from train.py:10; BC, AG, RS, A2 likewise
//! AR8:max        with another reduction; BC8:r2 with root 2; AR8:f16 with another datatype
//! S1:64 R0:64    send 64 floats to rank 1, receive from rank 0
//! x.AR8          on communicator x instead of w
//! AR8!           never returns
//! init:w split:x=0 shrink:x=1   make communicators: unique id, color, ranks left out
//! dist:w called:x=tp            make it in PyTorch's `init_process_group`; it was given this name
//! alone          its environment says nothing of the job
//! ( )            a group
//! wait wait300   two seconds pass, 300 microseconds pass
//! refused        the driver has no memory for PyTorch's allocator, which asks again
//! oom            PyTorch raises OutOfMemoryError
//! idle3 busy3    three heartbeats, ten seconds apart, of a process that stands still or works
//! read60@12      its recorder reads the stack of its main thread after 60 s of silence, at train.py:12
//! runs           it has not ended: its trace goes on
//! exit killed    how it ends, before the end of the job
//! kept           what its recording has kept begins here (`gputrace record --keep`)
//! skip300@9      300 collectives, of which NCCL takes memory in the first; `kept` must follow
//! ```

use std::collections::HashMap;

use gputrace_schemas::event::*;
use gputrace_trace::Recording;
use gputrace_trace::source::Source;

const MILLISECOND: u64 = 1_000_000;
const END: u64 = 20_000 * MILLISECOND;
/// Stacks of PyTorch's own lines have their numbers from here on.
const IN_PYTORCH: u32 = 1_000_000;

/// The trace of one rank.
///
/// # Panics
/// The text is not one of a rank.
#[must_use]
pub fn rank(rank: u32, n_ranks: u32, text: &str) -> Source {
    let mut writer =
        Writer { rank, n_ranks, now: 1000 * MILLISECOND + u64::from(rank) * 1000, ..Writer::default() };
    writer.recording.process = Process {
        pid: 100 + rank,
        parent: 7,
        boot: "boot".into(),
        host: "host".into(),
        rank: Some(rank),
        environment: environment(rank, n_ranks),
        ..Process::default()
    };
    writer.recording.devices = vec![Device { uuid: format!("GPU-{rank}"), ..Device::default() }];
    for word in text.split_whitespace() {
        writer.word(word);
    }
    if !writer.is_over {
        writer.now = END;
        writer.event(0, EventKind::Note("process.end=killed".into()));
    }
    Source::of(&format!("rank{rank}.gtr"), writer.recording)
}

fn environment(rank: u32, n_ranks: u32) -> Vec<(String, String)> {
    let (rank, n_ranks) = (rank.to_string(), n_ranks.to_string());
    let variables = [("MASTER_PORT", "29500"), ("RANK", &rank), ("WORLD_SIZE", &n_ranks)];
    variables.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec()
}

#[derive(Default)]
struct Writer {
    recording: Recording,
    rank: u32,
    n_ranks: u32,
    now: u64,
    n_calls: u64,
    comms: HashMap<String, CommId>,
    sequences: HashMap<(CommId, Option<NcclSequence>), u64>,
    n_children: HashMap<CommId, u32>,
    depth: u32,
    group: u32,
    /// Calls in which memory was taken.
    taken: Vec<u64>,
    is_over: bool,
    is_in_pytorch: bool,
}

impl Writer {
    fn word(&mut self, word: &str) {
        if let Some(micros) = word.strip_prefix("wait").and_then(|micros| micros.parse::<u64>().ok()) {
            self.now += micros * 1000;
            return;
        }
        for (name, cpu, moved) in [("idle", 50 * MILLISECOND, 2000), ("busy", 9000 * MILLISECOND, 50 << 20)] {
            if let Some(n) = word.strip_prefix(name).and_then(|n| n.parse::<u64>().ok()) {
                for _ in 0..n {
                    self.now += Alive::EVERY.0;
                    let alive =
                        Alive { cpu: Some(Nanos(cpu)), moved: Some(Bytes(moved)), ..Alive::default() };
                    self.event(0, EventKind::Note(alive.to_string()));
                }
                return;
            }
        }
        if let Some((silent, line)) = word.strip_prefix("read").and_then(|rest| rest.split_once('@')) {
            let silent = Nanos(silent.parse::<u64>().unwrap() * 1000 * MILLISECOND);
            self.read(silent, line.parse().unwrap());
            return;
        }
        self.now += MILLISECOND;
        let (word, returns) = word.strip_suffix('!').map_or((word, true), |word| (word, false));
        let (word, line) = word.split_once('@').unwrap_or((word, "1"));
        let line = line.parse().unwrap();
        let (comm, word) = word.split_once('.').unwrap_or(("w", word));
        match word {
            "wait" => self.now += 2000 * MILLISECOND,
            "refused" => {
                let call = Call { bytes: Bytes(1 << 30), ..refused() };
                self.event(line, EventKind::Call(call));
            }
            "oom" => {
                let (bytes, held) = (Bytes(1 << 30), Bytes(0));
                let oom = BlockOom {
                    device: 0,
                    bytes,
                    requested: None,
                    stream: None,
                    allocated: held,
                    reserved: held,
                };
                self.event(line, EventKind::BlockOom(oom));
            }
            // The driver refuses NCCL what it needs inside a collective, which so fails.
            "short" => {
                let enter = NcclEnter {
                    count: 8,
                    datatype: 7,
                    redop: 0,
                    ..self.enter(NcclOp::AllReduce, self.comms[comm])
                };
                self.call(enter, line, false);
                let call = self.n_calls;
                let refused =
                    Call { bytes: Bytes(32 << 20), in_allocate: false, nccl_call: call, ..refused() };
                self.event(line, EventKind::Call(refused));
                self.now += 1000;
                let exit = NcclExit { call, result: 1, value: 0, duration: Nanos(1000), timed: None };
                self.event(line, EventKind::NcclExit(exit));
            }
            // The recorder sees it alive, and then not for some seconds.
            "seen" => {
                self.event(0, EventKind::Note(format!("process.alive_at={}", self.now)));
                self.now += 3000 * MILLISECOND;
            }
            "kept" => self.keep(),
            _ if word.starts_with("skip") => {
                self.communicate(comm, "AR8", line, true);
                self.taken.push(self.n_calls);
                let n_skipped: u64 = word["skip".len()..].parse().unwrap();
                let order = (self.comms[comm], NcclOp::AllReduce.sequence(-1));
                *self.sequences.get_mut(&order).unwrap() += n_skipped - 1;
            }
            "runs" => self.is_over = true,
            "alone" => self.recording.process.environment.clear(),
            "exit" | "killed" => {
                self.event(0, EventKind::Note(format!("process.end={word}")));
                self.is_over = true;
            }
            "(" => {
                self.depth += 1;
                self.group += 1;
                let enter =
                    NcclEnter { group_depth: self.depth - 1, ..self.enter(NcclOp::GroupStart, CommId(0)) };
                self.call(enter, line, returns);
            }
            ")" => {
                let enter = self.enter(NcclOp::GroupEnd, CommId(0));
                self.call(enter, line, returns);
                self.depth -= 1;
            }
            "abort" | "destroy" => {
                let op = if word == "abort" { NcclOp::CommAbort } else { NcclOp::CommDestroy };
                let enter = self.enter(op, self.comms[comm]);
                self.call(enter, line, returns);
            }
            _ if word.starts_with("called:") => {
                let (comm, name) = word["called:".len()..].split_once('=').unwrap();
                let facts = self.recording.communicators.get_mut(&self.comms[comm]).unwrap();
                name.clone_into(&mut facts.config.name);
            }
            _ if word.contains(':') && word.starts_with(|c: char| c.is_lowercase()) => {
                self.make(word, line, returns)
            }
            _ => self.communicate(comm, word, line, returns),
        }
    }

    fn enter(&self, op: NcclOp, comm: CommId) -> NcclEnter {
        NcclEnter {
            api: ApiId(0),
            op,
            call: 0,
            comm,
            sequence: UNKNOWN,
            group: if self.depth > 0 { self.group } else { 0 },
            group_depth: self.depth,
            count: 0,
            datatype: -1,
            redop: -1,
            redop_call: 0,
            peer: -1,
            send: 0,
            receive: 0,
            stream: 0,
            handle: 0,
            extra: 0,
            captured: false,
        }
    }

    fn make(&mut self, word: &str, line: u32, returns: bool) {
        let (how, name) = word.split_once(':').unwrap();
        self.is_in_pytorch = how == "dist";
        let how = if self.is_in_pytorch { "init" } else { how };
        let (name, value) = name.split_once('=').unwrap_or((name, "0"));
        // `init:x=1/4` is rank 1 of 4: a communicator of some ranks.
        let (value, n_of_them) = value.split_once('/').unwrap_or((value, "0"));
        let (value, n_of_them): (i32, u32) = (value.parse().unwrap(), n_of_them.parse().unwrap());
        let of_some = n_of_them > 0;
        let id = CommId(self.comms.len() as u32 + 1);
        let parent = if how == "init" { CommId(0) } else { self.comms["w"] };
        let op = match how {
            "init" => NcclOp::CommInit,
            "split" => NcclOp::CommSplit,
            "shrink" => NcclOp::CommShrink,
            _ => panic!("{how}"),
        };
        let ordinal = self.n_children.entry(parent).or_default();
        *ordinal += 1;
        let color = (op == NcclOp::CommSplit).then_some(value);
        let facts = Communicator {
            origin: Some(op),
            call: self.n_calls + 1,
            unique_id: if how == "init" {
                name.bytes().fold(7, |sum, byte| sum * 31 + u64::from(byte))
            } else {
                0
            },
            rank: Some(if of_some { value as u32 } else { self.rank }).filter(|_| how == "init"),
            n_ranks: Some(match how {
                "shrink" => self.n_ranks - value as u32,
                "init" if of_some => n_of_them,
                _ => self.n_ranks,
            }),
            device: 0,
            parent,
            ordinal: if how == "init" { 0 } else { *ordinal },
            color,
            key: color.map(|_| self.rank as i32),
            ..Communicator::default()
        };
        self.recording.communicators.insert(id, facts);
        self.comms.insert(name.to_owned(), id);
        let mut enter = self.enter(op, id);
        if how != "init" {
            enter.sequence = self.next(parent, op.sequence(-1));
            enter.extra = u64::from(parent.0);
            enter.count = value as u64;
        }
        self.call(enter, line, returns);
        self.is_in_pytorch = false;
    }

    fn next(&mut self, comm: CommId, sequence: Option<NcclSequence>) -> u64 {
        let next = self.sequences.entry((comm, sequence)).or_default();
        *next += 1;
        *next - 1
    }

    fn communicate(&mut self, comm: &str, word: &str, line: u32, returns: bool) {
        let comm = self.comms[comm];
        let (call, option) = word.split_once(':').unwrap_or((word, ""));
        let digits = call.rfind(|c: char| !c.is_ascii_digit()).unwrap() + 1;
        let (name, number) =
            call.strip_prefix("A2").map_or_else(|| call.split_at(digits), |rest| ("A2", rest));
        let number: u64 = number.parse().unwrap();
        let op = match name {
            "AR" => NcclOp::AllReduce,
            "BC" => NcclOp::Broadcast,
            "AG" => NcclOp::AllGather,
            "RS" => NcclOp::ReduceScatter,
            "A2" => NcclOp::AlltoAll,
            "S" => NcclOp::Send,
            "R" => NcclOp::Receive,
            _ => panic!("{word}"),
        };
        let mut enter = NcclEnter { count: number, datatype: 7, ..self.enter(op, comm) };
        if matches!(op, NcclOp::Send | NcclOp::Receive) {
            (enter.peer, enter.count) = (number as i32, option.parse().unwrap());
        }
        if matches!(op, NcclOp::AllReduce | NcclOp::ReduceScatter) {
            enter.redop = if option == "max" { 2 } else { 0 };
        }
        if op == NcclOp::Broadcast {
            enter.peer = option.strip_prefix('r').map_or(0, |root| root.parse().unwrap());
        }
        if option == "f16" {
            enter.datatype = 6;
        }
        enter.sequence = self.next(comm, op.sequence(enter.peer));
        self.call(enter, line, returns);
    }

    /// Of NCCL, a bounded recording begins with the calls that are open, those that made a communicator that is still there, those that
    /// took memory, and the newest of each order of calls (`recorder/src/held/nccl.rs`).
    fn keep(&mut self) {
        (self.recording.process.since, self.recording.process.segment) = (Nanos(self.now), 2);
        let (mut open, mut made, mut newest) = (HashMap::new(), vec![], HashMap::new());
        for event in std::mem::take(&mut self.recording.events) {
            match event.kind {
                EventKind::NcclEnter(enter) => {
                    open.insert(enter.call, (enter, vec![event]));
                }
                EventKind::NcclExit(exit) => {
                    let (enter, mut call) = open.remove(&exit.call).unwrap();
                    call.push(event);
                    match enter.op {
                        _ if self.taken.contains(&enter.call) => made.push((enter.comm, call)),
                        NcclOp::CommInit | NcclOp::CommSplit | NcclOp::CommShrink => {
                            made.push((enter.comm, call));
                        }
                        NcclOp::CommDestroy | NcclOp::CommAbort => {
                            made.retain(|(comm, _)| *comm != enter.comm);
                            newest.retain(|(comm, _), _| *comm != enter.comm);
                        }
                        _ => {
                            if let Some(sequence) = enter.op.sequence(enter.peer) {
                                newest.insert((enter.comm, sequence), call);
                            }
                        }
                    }
                }
                _ => {}
            }
        }
        let made = made.into_iter().map(|(_, call)| call);
        let open = open.into_values().map(|(_, call)| call);
        let left = made.chain(newest.into_values()).chain(open).flatten();
        self.recording.events = left.collect();
        self.recording.events.sort_by_key(|event| event.time);
    }

    fn call(&mut self, mut enter: NcclEnter, line: u32, returns: bool) {
        self.n_calls += 1;
        enter.call = self.n_calls;
        self.event(line, EventKind::NcclEnter(enter));
        if returns {
            let call = enter.call;
            let exit = NcclExit { call, result: 0, value: 0, duration: Nanos(1000), timed: None };
            self.now += 1000;
            self.event(line, EventKind::NcclExit(exit));
        }
    }

    /// Lines of a hundred each are a function.
    fn read(&mut self, silent: Nanos, line: u32) {
        let (thread, stack) = (ThreadId(1), StackId(line));
        let function = if line < 100 { "step".to_owned() } else { format!("spin{}", line / 100) };
        let frame = Frame::Python { function, file: "/job/train.py".into(), line };
        self.recording.frames.insert(FrameId(line), frame);
        self.recording.stacks.insert(stack, Stack { frames: vec![FrameId(line)], ..Stack::default() });
        let main = Thread { tid: self.recording.process.pid, name: "python3".into() };
        self.recording.threads.insert(thread, main);
        let read = StackRead { silent, state: 'R', is_torn: false, stopped: None };
        let kind = EventKind::Note(read.to_string());
        self.recording.events.push(Event { time: Nanos(self.now), thread, stack, kind });
    }

    fn event(&mut self, line: u32, kind: EventKind) {
        let file = "/job/train.py".into();
        self.recording.frames.insert(FrameId(line), Frame::Python { function: "step".into(), file, line });
        let (mut stack, mut frames) = (StackId(line), vec![FrameId(line)]);
        if self.is_in_pytorch {
            let file = "/lib/python3/site-packages/torch/distributed/distributed_c10d.py".into();
            let function = "init_process_group".into();
            stack = StackId(line + IN_PYTORCH);
            frames.insert(0, FrameId(stack.0));
            self.recording.frames.insert(frames[0], Frame::Python { function, file, line: 1 });
        }
        self.recording.stacks.insert(stack, Stack { frames, ..Stack::default() });
        let stack = if matches!(kind, EventKind::Note(_)) { StackId(0) } else { stack };
        self.recording.events.push(Event { time: Nanos(self.now), thread: ThreadId(0), stack, kind });
    }
}

/// `cuMemAlloc` inside PyTorch's `allocate` that found no memory.
fn refused() -> Call {
    Call {
        api: ApiId(0),
        action: Action::Alloc,
        device: 0,
        result: Some(2),
        addr: 0,
        bytes: Bytes(0),
        stream: 0,
        handle: 0,
        extra: 0,
        duration: Nanos(1000),
        captured: false,
        in_allocate: true,
        comm: CommId(0),
        nccl_call: 0,
        nccl_thread: false,
    }
}
