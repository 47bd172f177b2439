//! Writes a long trace of a made-up training job with every kind of event: what reports and exports are measured with (`make bench`), and, with few
//! events, the trace of version 1 that every later version must read (tests/golden).
//!
//!     cargo run --release -p gputrace-schemas --example training -- FILE [EVENTS [whole [BATCH [KIND]]]]
//!
//! `whole` leaves out that events were lost: a trace of which some were cannot be replayed. With BATCH, activations are so many times as
//! large, and gradients with them, and above 4 there are workspaces: two such traces are what `predict` is measured with.
//!
//! A rank of a job whose layers keep activations in the forward pass and drop them in the backward pass, with sizes that
//! vary from step to step and temporary blocks in between; PyTorch's segments, NCCL's buffers, pinned memory, two streams,
//! samples of NVML, NCCL's calls, marks, a request that fails. Everything follows from the number of events.
#![allow(clippy::print_stdout, reason = "an example prints its result")]

use std::fs::File;
use std::io::{self, BufWriter};

use gputrace_schemas::event::*;
use gputrace_schemas::writer::Writer;

const N_LAYERS: u64 = 64;
const N_STACKS: u32 = 4000;
const SEGMENT: u64 = 20 << 20;
const BASE: u64 = 0x7f00_0000_0000;
const TORCH: StackId = StackId(N_STACKS + 1);
const NCCL: StackId = StackId(N_STACKS + 2);
const BACKWARD: StackId = StackId(N_STACKS + 3);
const COMMUNICATOR: CommId = CommId(1);
const STEP: TextId = TextId(1);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().ok_or("which file to write is missing")?;
    let n_events = arguments.next().map_or(Ok(10_000_000), |number| number.parse())?;
    let is_whole = arguments.next().is_some_and(|argument| argument == "whole");
    let batch = arguments.next().map_or(Ok(1), |number| number.parse())?;
    let steps = match arguments.next().as_deref() {
        None | Some("random") => Steps::Random,
        Some("steady") => Steps::Steady,
        Some("changing") => Steps::Changing,
        Some(other) => return Err(format!("steps are random, steady or changing, not {other}").into()),
    };
    let writer = Writer::new(BufWriter::new(File::create(&file)?))?;
    let mut job = Job { steps, ..Job::new(writer, is_whole, batch) };
    job.definitions();
    job.train(n_events)?;
    let n_events = job.n_events;
    job.writer.finish()?;
    println!("{n_events} events, {} bytes: {file}", std::fs::metadata(&file)?.len());
    Ok(())
}

/// Address and bytes.
type Block = (u64, u64);

/// How steps differ.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Steps {
    Random,
    Steady,
    Changing,
}

struct Job {
    steps: Steps,
    writer: Writer<BufWriter<File>>,
    is_whole: bool,
    batch: u64,
    time: u64,
    random: u64,
    n_events: u64,
    allocated: u64,
    reserved: u64,
    /// Free ranges by size class of 2 MiB parts: PyTorch's cache, much simplified.
    free: Vec<(u64, u64)>,
}

impl Job {
    fn new(writer: Writer<BufWriter<File>>, is_whole: bool, batch: u64) -> Job {
        Job {
            steps: Steps::Random,
            writer,
            is_whole,
            batch,
            time: 1_000_000_000,
            random: 1,
            n_events: 0,
            allocated: 0,
            reserved: 0,
            free: vec![],
        }
    }

    fn definitions(&mut self) {
        let strings = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        self.writer.process(&Process {
            pid: 4242,
            parent: 4200,
            host: "node7.cluster.example".into(),
            boot: "00000000-0000-4000-8000-000000000000".into(),
            executable: "/opt/python/bin/python3.12".into(),
            command: strings(&["python", "/data/jobs/train_lm.py", "--token", "not-for-everybody"]),
            environment: vec![("RANK".into(), "3".into()), ("PYTORCH_CUDA_ALLOC_CONF".into(), String::new())],
            rank: Some(3),
            start: Nanos(1_000_000_000),
            start_realtime: 1_790_000_000_000_000_000,
            recorder: "0.1.0".into(),
            torch_version: Some("2.11.0+cu130".into()),
            began: 100,
            ancestors: vec![Ancestor {
                pid: 4200,
                began: 90,
                command: strings(&["torchrun", "train_lm.py"]),
            }],
            ..Process::default()
        });
        self.writer.device(&Device {
            ordinal: 0,
            name: "NVIDIA H200".into(),
            uuid: "GPU-00000000-0000-4000-8000-000000000001".into(),
            total: Bytes(150_000_000_000),
        });
        for (id, name, runtime) in [
            (1, "cuMemAlloc_v2", "cudaMalloc"),
            (2, "cuMemFree_v2", "cudaFree"),
            (3, "cuMemCreate", ""),
            (4, "cuMemHostAlloc", "cudaHostAlloc"),
            (5, "ncclCommInitRank", ""),
            (6, "ncclAllReduce", ""),
        ] {
            self.writer.api(ApiId(id), &Api { name: name.into(), runtime_name: runtime.into() });
        }
        let packages = "/opt/python/lib/python3.12/site-packages";
        for (id, path) in [
            (1, format!("{packages}/torch/lib/libc10_cuda.so")),
            (2, format!("{packages}/nvidia/nccl/lib/libnccl.so.2")),
        ] {
            let start = 0x5000_0000_0000 + u64::from(id) * 0x1_0000_0000;
            let (end, bias) = (start + 0x1000_0000, start);
            let module = Module { path, build_id: String::new(), start, end, bias, has_runtime: false };
            self.writer.module(ModuleId(id), &module);
        }
        for (id, name) in [(1, "python"), (2, "pt_autograd_0")] {
            self.writer.thread(ThreadId(id), &Thread { tid: 4241 + id, name: name.into() });
        }
        self.writer.text(STEP, "step");
        self.writer.communicator(
            COMMUNICATOR,
            &Communicator {
                origin: Some(NcclOp::CommInit),
                call: 1,
                handle: 0x5500_0000_1000,
                unique_id: 0x1234_5678_9abc_def0,
                rank: Some(3),
                n_ranks: Some(8),
                device: 0,
                version: 22809,
                config: CommConfig { name: "default_pg".into(), ..CommConfig::default() },
                ..Communicator::default()
            },
        );
        self.frames(packages);
    }

    /// Ten Python frames a stack: the loop, the model, one of 200 layers, operations.
    fn frames(&mut self, packages: &str) {
        let mut python = |id: u32, function: String, file: String, line: u32| {
            self.writer.frame(FrameId(id), &Frame::Python { function, file, line });
        };
        python(0, "<module>".into(), "/data/jobs/train_lm.py".into(), 120);
        for line in 1..=20 {
            python(line, "train_step".into(), "/data/jobs/train_lm.py".into(), 30 + line);
        }
        for layer in 0..200 {
            let file = format!("/data/jobs/model/block{}.py", layer % 8);
            python(100 + layer, format!("Block{layer}.forward"), file, 10 + layer);
            let file = format!("{packages}/torch/nn/modules/module.py");
            python(400 + layer, "Module._call_impl".into(), file, 1700 + layer);
            python(700 + layer, "linear".into(), format!("{packages}/torch/nn/functional.py"), 100 + layer);
        }
        for (id, module, function) in
            [(1000, 1, "c10::cuda::CUDACachingAllocator::Native::malloc"), (1001, 2, "ncclCommInitRank")]
        {
            self.writer.frame(
                FrameId(id),
                &Frame::Native {
                    address: 0x5000_0000_0000 + u64::from(module) * 0x1_0000_0000 + 0x1000,
                    module: Some(ModuleId(module)),
                    function: function.into(),
                    file: String::new(),
                    line: 0,
                    inlined: false,
                },
            );
        }
        for id in 1..=N_STACKS {
            let layer = |n: u32| (id * 7 + n * 31) % 200;
            let middle = (0..3).flat_map(|n| [700 + layer(n), 400 + layer(n), 100 + layer(n)]);
            let frames = middle.chain([1 + id % 20, 0]).map(FrameId).collect();
            self.writer.stack(StackId(id), &Stack { frames, ..Stack::default() });
        }
        for (id, frame) in [(TORCH, 1000), (NCCL, 1001)] {
            let frames = [frame, 5, 0].map(FrameId).to_vec();
            self.writer.stack(id, &Stack { frames, ..Stack::default() });
        }
        let (forward, caller) = (StackId(7), StackId(8));
        let node = "torch::autograd::generated::AddmmBackward0".to_owned();
        let backward = Backward { node, forward, caller, is_caller_inferred: false };
        let frames = vec![FrameId(1000)];
        self.writer.stack(BACKWARD, &Stack { frames, truncated: true, backward: Some(Box::new(backward)) });
    }

    fn train(&mut self, n_events: u64) -> io::Result<()> {
        self.event(StackId(0), EventKind::Note("a made-up job".into()))?;
        if !self.is_whole {
            self.event(StackId(0), EventKind::Lost(Lost { cause: LostCause::Starting, events: 2 }))?;
        }
        for action in [WaitAction::Record, WaitAction::Query] {
            self.event(StackId(0), EventKind::Wait(Wait { event: 0xe0, stream: 0x55, action, result: 0 }))?;
        }
        self.nccl(1, NcclOp::CommInit, 5, 0)?;
        self.call(3, Action::Create, 0, 256 << 20, NCCL)?;
        self.call(4, Action::AllocHost, 0x7d00_0000_0000, 64 << 20, StackId(9))?;
        for n in 0.. {
            if self.n_events >= n_events {
                break;
            }
            self.mark(MarkAction::Push)?;
            match self.steps {
                Steps::Random => {}
                Steps::Steady => self.random = 1,
                Steps::Changing => self.random = [1, 0x1234_5678, 0x9abc_def1][(n / 20 % 3) as usize],
            }
            self.step()?;
            self.nccl(2 + n, NcclOp::AllReduce, 6, n)?;
            self.mark(MarkAction::Pop)?;
        }
        self.event(
            StackId(17),
            EventKind::BlockOom(BlockOom {
                device: 0,
                bytes: Bytes(200 << 30),
                requested: Some(Bytes(200 << 30)),
                stream: Some(0),
                allocated: Bytes(self.allocated),
                reserved: Bytes(self.reserved),
            }),
        )
    }

    fn step(&mut self) -> io::Result<()> {
        let scale = 1 + self.next() % 4;
        let mut activations = vec![];
        for layer in 0..N_LAYERS {
            for n in 0..4 {
                let bytes = (64 << 10) * scale * (1 + (layer + n) % 3);
                activations.push(self.alloc(bytes, self.batch)?);
                let (temporary, _) = self.alloc(bytes / 2, 1)?;
                self.free(temporary)?;
            }
            self.workspace(layer)?;
        }
        self.sample()?;
        while let Some(activation) = activations.pop() {
            let (block, one) = activation;
            let (gradient, _) = self.alloc(one.next_multiple_of(512), self.batch)?;
            self.free(block)?;
            self.free(gradient)?;
        }
        Ok(())
    }

    /// What libraries ask for at larger batches only, and without which all else is the same.
    fn workspace(&mut self, layer: u64) -> io::Result<()> {
        if self.batch > 4 && layer.is_multiple_of(8) {
            let random = self.random;
            let (workspace, _) = self.alloc(1 << 20, self.batch)?;
            self.free(workspace)?;
            self.random = random;
        }
        Ok(())
    }

    /// So many bytes, or a few less, for each of a batch: the block, and how many.
    fn alloc(&mut self, bytes: u64, batch: u64) -> io::Result<(Block, u64)> {
        let one = bytes - self.next() % 512;
        let requested = one * batch;
        let bytes = requested.next_multiple_of(512);
        let known = self.free.iter().rposition(|(_, length)| *length >= bytes);
        let (addr, length) = match known {
            Some(known) => self.free.swap_remove(known),
            None => {
                let addr = BASE + self.reserved;
                self.call(1, Action::Alloc, addr, SEGMENT, TORCH)?;
                self.reserved += SEGMENT;
                (addr, SEGMENT)
            }
        };
        if length > bytes {
            self.free.push((addr + bytes, length - bytes));
        }
        self.allocated += bytes;
        let stack = match self.next() % u64::from(N_STACKS) {
            0 => BACKWARD,
            n => StackId(n as u32),
        };
        self.event(
            stack,
            EventKind::BlockAlloc(BlockAlloc {
                device: 0,
                addr,
                bytes: Bytes(bytes),
                requested: Some(Bytes(requested)),
                stream: Some(if one.is_multiple_of(3) { 0x55 } else { 0 }),
                allocated: Bytes(self.allocated),
                reserved: Bytes(self.reserved),
            }),
        )?;
        Ok(((addr, bytes), one))
    }

    fn free(&mut self, (addr, bytes): Block) -> io::Result<()> {
        self.allocated -= bytes;
        // Joined with what was split off it, if that is the newest free range: as a stack grows and shrinks.
        match self.free.iter_mut().rfind(|(start, _)| *start == addr + bytes) {
            Some((start, length)) => (*start, *length) = (addr, *length + bytes),
            None => self.free.push((addr, bytes)),
        }
        let (allocated, reserved) = (Bytes(self.allocated), Bytes(self.reserved));
        let bytes = Bytes(bytes);
        self.event(
            StackId(0),
            EventKind::BlockFree(BlockFree {
                device: 0,
                addr,
                bytes,
                allocated,
                reserved,
                collecting: false,
            }),
        )
    }

    fn call(&mut self, api: u32, action: Action, addr: u64, bytes: u64, stack: StackId) -> io::Result<()> {
        let call = Call {
            api: ApiId(api),
            action,
            device: if action == Action::AllocHost { HOST } else { 0 },
            result: Some(0),
            addr,
            bytes: Bytes(bytes),
            stream: 0,
            handle: if action == Action::Create { 77 } else { 0 },
            extra: 0,
            duration: Nanos(90_000),
            captured: false,
            in_allocate: stack == TORCH,
            comm: if stack == NCCL { COMMUNICATOR } else { CommId(0) },
            nccl_call: u64::from(stack == NCCL),
            nccl_thread: false,
        };
        self.event(stack, EventKind::Call(call))
    }

    fn mark(&mut self, action: MarkAction) -> io::Result<()> {
        let mark = Mark { action, text: STEP, domain: TextId(0), range: 0, category: 0 };
        self.event(StackId(0), EventKind::Mark(mark))
    }

    fn nccl(&mut self, call: u64, op: NcclOp, api: u32, sequence: u64) -> io::Result<()> {
        let enter = NcclEnter {
            api: ApiId(api),
            op,
            call,
            comm: COMMUNICATOR,
            sequence,
            group: 0,
            group_depth: 0,
            count: 1 << 20,
            datatype: 7,
            redop: 0,
            redop_call: 0,
            peer: -1,
            send: BASE,
            receive: BASE,
            stream: 0x55,
            handle: 0,
            extra: 0,
            captured: false,
        };
        self.event(NCCL, EventKind::NcclEnter(enter))?;
        let exit = NcclExit { call, result: 0, value: 0, duration: Nanos(20_000), timed: None };
        self.event(StackId(0), EventKind::NcclExit(exit))
    }

    fn sample(&mut self) -> io::Result<()> {
        let used = Bytes(self.reserved + (800 << 20));
        let total = Bytes(150_000_000_000);
        let sample = Sample { device: 0, process_used: Some(used), device_used: used, total };
        self.event(StackId(0), EventKind::Sample(sample))
    }

    fn event(&mut self, stack: StackId, kind: EventKind) -> io::Result<()> {
        // Not of `next`: what is asked for must not hang on how many segments that took.
        self.time += 1000 + (self.n_events.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % 4000;
        self.n_events += 1;
        let thread = ThreadId(1 + u32::from(matches!(kind, EventKind::BlockFree(_))));
        self.writer.event(&Event { time: Nanos(self.time), thread, stack, kind })
    }

    fn next(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }
}
