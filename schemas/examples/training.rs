//! Writes a long trace of a made-up training job: what reports and exports are measured with (`make bench`), and, with few
//! events, the trace of version 1 that every later version must read (tests/golden).
//!
//!     cargo run --release -p gputrace-schemas --example training -- FILE [EVENTS]
//!
//! A rank of a job whose layers keep activations in the forward pass and drop them in the backward pass, with sizes that
//! vary from step to step and temporary blocks in between; PyTorch's segments, NCCL's buffers, pinned memory, two streams,
//! samples of NVML, a request that fails. Everything follows from the number of events.
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

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().ok_or("which file to write is missing")?;
    let n_events = arguments.next().map_or(Ok(10_000_000), |number| number.parse())?;
    let mut job = Job::new(Writer::new(BufWriter::new(File::create(&file)?))?);
    job.definitions();
    job.train(n_events)?;
    let n_events = job.n_events;
    job.writer.finish()?;
    println!("{n_events} events, {} bytes: {file}", std::fs::metadata(&file)?.len());
    Ok(())
}

struct Job {
    writer: Writer<BufWriter<File>>,
    time: u64,
    random: u64,
    n_events: u64,
    allocated: u64,
    reserved: u64,
    /// Free ranges by size class of 2 MiB parts: PyTorch's cache, much simplified.
    free: Vec<(u64, u64)>,
}

impl Job {
    fn new(writer: Writer<BufWriter<File>>) -> Job {
        Job { writer, time: 1_000_000_000, random: 1, n_events: 0, allocated: 0, reserved: 0, free: vec![] }
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
            self.writer.stack(StackId(id), &Stack { frames, truncated: false });
        }
        for (id, frame) in [(TORCH, 1000), (NCCL, 1001)] {
            let frames = [frame, 5, 0].map(FrameId).to_vec();
            self.writer.stack(id, &Stack { frames, truncated: false });
        }
    }

    fn train(&mut self, n_events: u64) -> io::Result<()> {
        self.call(3, Action::Create, 0, 0, 256 << 20, 77, NCCL)?;
        self.call(4, Action::AllocHost, HOST, 0x7d00_0000_0000, 64 << 20, 0, StackId(9))?;
        while self.n_events < n_events {
            self.step()?;
        }
        self.event(
            StackId(17),
            EventKind::BlockOom(BlockOom {
                device: 0,
                bytes: Bytes(200 << 30),
                requested: Some(Bytes(200 << 30)),
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
                activations.push(self.alloc(bytes)?);
                let temporary = self.alloc(bytes / 2)?;
                self.free(temporary)?;
            }
        }
        self.sample()?;
        while let Some(activation) = activations.pop() {
            let gradient = self.alloc(activation.1)?;
            self.free(activation)?;
            self.free(gradient)?;
        }
        Ok(())
    }

    fn alloc(&mut self, requested: u64) -> io::Result<(u64, u64)> {
        let requested = requested - self.next() % 512;
        let bytes = requested.next_multiple_of(512);
        let known = self.free.iter().rposition(|(_, length)| *length >= bytes);
        let (addr, length) = match known {
            Some(known) => self.free.swap_remove(known),
            None => {
                let addr = BASE + self.reserved;
                self.call(1, Action::Alloc, 0, addr, SEGMENT, 0, TORCH)?;
                self.reserved += SEGMENT;
                (addr, SEGMENT)
            }
        };
        if length > bytes {
            self.free.push((addr + bytes, length - bytes));
        }
        self.allocated += bytes;
        let stack = StackId(1 + (self.next() % u64::from(N_STACKS)) as u32);
        self.event(
            stack,
            EventKind::BlockAlloc(BlockAlloc {
                device: 0,
                addr,
                bytes: Bytes(bytes),
                requested: Some(Bytes(requested)),
                stream: Some(if bytes.is_multiple_of(3) { 0x55 } else { 0 }),
                allocated: Bytes(self.allocated),
                reserved: Bytes(self.reserved),
            }),
        )?;
        Ok((addr, bytes))
    }

    fn free(&mut self, (addr, bytes): (u64, u64)) -> io::Result<()> {
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
            EventKind::BlockFree(BlockFree { device: 0, addr, bytes, allocated, reserved }),
        )
    }

    fn call(
        &mut self,
        api: u32,
        action: Action,
        device: i16,
        addr: u64,
        bytes: u64,
        handle: u64,
        stack: StackId,
    ) -> io::Result<()> {
        let call = Call {
            api: ApiId(api),
            action,
            device,
            result: Some(0),
            addr,
            bytes: Bytes(bytes),
            stream: 0,
            handle,
            extra: 0,
            duration: Nanos(90_000),
            captured: false,
            in_allocate: stack == TORCH,
        };
        self.event(stack, EventKind::Call(call))
    }

    fn sample(&mut self) -> io::Result<()> {
        let used = Bytes(self.reserved + (800 << 20));
        let total = Bytes(150_000_000_000);
        let sample = Sample { device: 0, process_used: Some(used), device_used: used, total };
        self.event(StackId(0), EventKind::Sample(sample))
    }

    fn event(&mut self, stack: StackId, kind: EventKind) -> io::Result<()> {
        self.time += 1000 + self.next() % 4000;
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
