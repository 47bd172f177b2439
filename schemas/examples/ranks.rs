//! Writes the traces of a job of many ranks, to measure `gputrace ranks` with: each step allocates and frees blocks and
//! makes collectives; the middle rank skips one of them, the one after calls one with another count (`make fleet` looks for both), and
//! rank 0 keeps a block more every hundred steps.
//!
//!     cargo run --release -p gputrace-schemas --example ranks -- FOLDER RANKS EVENTS [FIRST LAST]

use std::fs::File;
use std::io::{self, BufWriter};

use gputrace_schemas::event::*;
use gputrace_schemas::writer::Writer;

/// Calls into NCCL in a step.
const CALLS: u64 = 10;
/// Blocks that a step allocates and frees.
const BLOCKS: u64 = 40;

fn main() -> io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, ranks, events, some @ ..] = arguments.as_slice() else {
        return Err(io::Error::other("usage: FOLDER RANKS EVENTS [FIRST LAST]"));
    };
    let number = |text: &str| text.parse::<u64>().map_err(io::Error::other);
    let (ranks, events) = (number(ranks)?, number(events)?);
    std::fs::create_dir_all(folder)?;
    let wanted = match some {
        [first, last] => number(first)?..number(last)? + 1,
        _ => 0..ranks,
    };
    for rank in wanted {
        rank_trace(folder, rank as u32, ranks as u32, events)?;
    }
    Ok(())
}

fn rank_trace(folder: &str, rank: u32, ranks: u32, n_events: u64) -> io::Result<()> {
    let mut writer = Writer::new(BufWriter::new(File::create(format!("{folder}/rank{rank}.gtr"))?))?;
    writer.process(&Process {
        pid: 1000 + rank,
        host: "host".into(),
        boot: "boot".into(),
        rank: Some(rank),
        start: Nanos(1),
        ..Process::default()
    });
    writer.device(&Device { uuid: format!("GPU-{rank}"), total: Bytes(80 << 30), ..Device::default() });
    for line in 1..=CALLS as u32 + 1 {
        let file = "/job/train.py".to_owned();
        writer.frame(FrameId(line), &Frame::Python { function: "step".into(), file, line });
        writer.stack(StackId(line), &Stack { frames: vec![FrameId(line)], ..Stack::default() });
    }
    writer.communicator(
        CommId(1),
        &Communicator {
            origin: Some(NcclOp::CommInit),
            call: 1,
            unique_id: 7,
            rank: Some(rank),
            n_ranks: Some(ranks),
            ..Communicator::default()
        },
    );
    let mut job =
        Job { writer, rank, now: 1_000_000 + u64::from(rank), n_calls: 0, n_collectives: 0, allocated: 0 };
    job.call(NcclOp::CommInit, UNKNOWN, 1, 1)?;
    let n_steps = n_events / (2 * CALLS + 2 * BLOCKS);
    for step in 0..n_steps {
        let is_middle = step == n_steps / 2;
        job.step(step, is_middle && rank == ranks / 2, is_middle && rank == ranks / 2 + 1)?;
    }
    job.writer.finish()?;
    Ok(())
}

struct Job {
    writer: Writer<BufWriter<File>>,
    rank: u32,
    now: u64,
    n_calls: u64,
    n_collectives: u64,
    allocated: u64,
}

impl Job {
    fn step(&mut self, step: u64, skips: bool, differs: bool) -> io::Result<()> {
        const BLOCK: u64 = 1 << 20;
        for block in 0..BLOCKS {
            self.allocated += BLOCK;
            self.block(true, block, BLOCK)?;
        }
        for call in 0..CALLS {
            if !(skips && call == CALLS / 2) {
                let sequence = self.n_collectives;
                self.n_collectives += 1;
                let n_times = if differs && call == CALLS - 2 { 2 } else { 1 };
                self.call(NcclOp::AllReduce, sequence, call as u32 + 1, n_times)?;
            }
        }
        for block in 0..BLOCKS {
            self.allocated -= BLOCK;
            self.block(false, block, BLOCK)?;
        }
        if self.rank == 0 && step.is_multiple_of(100) {
            self.allocated += BLOCK;
            self.block(true, 1000 + step, BLOCK)?;
        }
        Ok(())
    }

    fn event(&mut self, stack: u32, kind: EventKind) -> io::Result<()> {
        self.now += 1000;
        self.writer.event(&Event { time: Nanos(self.now), thread: ThreadId(0), stack: StackId(stack), kind })
    }

    fn block(&mut self, is_alloc: bool, block: u64, bytes: u64) -> io::Result<()> {
        let (addr, bytes) = (0x7000_0000_0000 + block * bytes, Bytes(bytes));
        let (allocated, reserved) = (Bytes(self.allocated), Bytes(64 << 30));
        let kind = if is_alloc {
            EventKind::BlockAlloc(BlockAlloc {
                device: 0,
                addr,
                bytes,
                requested: Some(bytes),
                stream: Some(0),
                allocated,
                reserved,
            })
        } else {
            let collecting = false;
            EventKind::BlockFree(BlockFree { device: 0, addr, bytes, allocated, reserved, collecting })
        };
        self.event(CALLS as u32 + 1, kind)
    }

    fn call(&mut self, op: NcclOp, sequence: u64, line: u32, n_times: u64) -> io::Result<()> {
        self.n_calls += 1;
        let call = self.n_calls;
        let enter = NcclEnter {
            api: ApiId(0),
            op,
            call,
            comm: CommId(1),
            sequence,
            group: 0,
            group_depth: 0,
            count: 1024 * u64::from(line) * n_times,
            datatype: 7,
            redop: 0,
            redop_call: 0,
            peer: -1,
            send: 0x1000,
            receive: 0x2000,
            stream: 0,
            handle: 0,
            extra: 0,
            captured: false,
        };
        self.event(line, EventKind::NcclEnter(enter))?;
        let exit = NcclExit { call, result: 0, value: 0, duration: Nanos(500), timed: None };
        self.event(line, EventKind::NcclExit(exit))
    }
}
