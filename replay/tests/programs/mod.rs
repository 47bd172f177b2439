//! A program that is being made up, and what is recorded of it: what `leak_detection` and `make bench-leaks` write theirs with.
//!
//! Nothing here knows what a leak is: the two say what their programs keep.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Display;

use gputrace_replay::trace::Recording;
use gputrace_schemas::event::*;

/// Where a program gets its memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Language {
    /// PyTorch's blocks, from lines of Python.
    Python,
    /// The driver's memory, from functions of C++.
    #[allow(dead_code)] // The bench has programs in Python only.
    Cpp,
}

/// A program that runs.
pub(crate) struct Job {
    pub(crate) recording: Recording,
    language: Language,
    sites: HashMap<String, StackId>,
    /// Addresses below were handed out.
    next: u64,
    /// By size: addresses that were given back.
    free: BTreeMap<u64, Vec<u64>>,
    allocated: u64,
}

/// Memory that is held.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    addr: u64,
    bytes: u64,
    stack: StackId,
    is_torch: bool,
}

impl Job {
    pub(crate) fn new(language: Language) -> Job {
        let mut recording = Recording {
            process: Process { pid: 1, executable: "/job/train".into(), ..Process::default() },
            devices: vec![Device { ordinal: 0, total: Bytes(1 << 40), ..Device::default() }],
            ..Recording::default()
        };
        let malloc = Api { name: "cuMemAlloc_v2".into(), runtime_name: "cudaMalloc".into() };
        let free = Api { name: "cuMemFree_v2".into(), runtime_name: "cudaFree".into() };
        recording.apis.extend([(ApiId(0), malloc), (ApiId(1), free)]);
        recording.threads.insert(ThreadId(0), Thread { tid: 1, name: "train".into() });
        let module = Module { path: "/job/train".into(), end: 1 << 20, ..Module::default() };
        recording.modules.insert(ModuleId(0), module);
        let (sites, free) = (HashMap::new(), BTreeMap::new());
        Job { recording, language, sites, next: 1 << 30, free, allocated: 0 }
    }

    /// Takes memory as programs in its language do.
    pub(crate) fn take(&mut self, site: impl Display, bytes: u64) -> Block {
        if self.language == Language::Cpp {
            return self.call(Action::Alloc, site, bytes);
        }
        let block = self.block(&site.to_string(), bytes, true);
        self.allocated += block.bytes;
        let alloc = BlockAlloc {
            device: 0,
            addr: block.addr,
            bytes: Bytes(block.bytes),
            requested: Some(Bytes(block.bytes)),
            stream: Some(0),
            allocated: Bytes(self.allocated),
            reserved: Bytes(self.allocated),
        };
        self.event(block.stack, EventKind::BlockAlloc(alloc));
        block
    }

    /// Takes memory from the driver.
    pub(crate) fn call(&mut self, action: Action, site: impl Display, bytes: u64) -> Block {
        let block = self.block(&site.to_string(), bytes, false);
        self.driver(action, block);
        block
    }

    pub(crate) fn give(&mut self, block: Block) {
        self.free.entry(block.bytes).or_default().push(block.addr);
        if !block.is_torch {
            return self.driver(Action::Free, block);
        }
        self.allocated -= block.bytes;
        let free = BlockFree {
            device: 0,
            addr: block.addr,
            bytes: Bytes(block.bytes),
            allocated: Bytes(self.allocated),
            reserved: Bytes(self.allocated),
            collecting: false,
        };
        self.event(block.stack, EventKind::BlockFree(free));
    }

    fn block(&mut self, site: &str, bytes: u64, is_torch: bool) -> Block {
        let bytes = bytes.next_multiple_of(512);
        let addr = self.free.get_mut(&bytes).and_then(Vec::pop).unwrap_or_else(|| {
            self.next += bytes.max(1).next_multiple_of(2 << 20);
            self.next
        });
        Block { addr, bytes, stack: self.site(site), is_torch }
    }

    fn site(&mut self, name: &str) -> StackId {
        if let Some(known) = self.sites.get(name) {
            return *known;
        }
        let line = self.sites.len() as u32 + 1;
        let function = name.to_owned();
        let frame = match self.language {
            Language::Python => Frame::Python { function, file: "/job/train.py".into(), line },
            Language::Cpp => Frame::Native {
                address: u64::from(line),
                module: Some(ModuleId(0)),
                function,
                file: "train.cu".into(),
                line,
                inlined: false,
            },
        };
        self.recording.frames.insert(FrameId(line), frame);
        let stack = Stack { frames: vec![FrameId(line)], ..Stack::default() };
        self.recording.stacks.insert(StackId(line), stack);
        self.sites.insert(name.to_owned(), StackId(line));
        StackId(line)
    }

    fn driver(&mut self, action: Action, block: Block) {
        let call = Call {
            api: ApiId(u32::from(action == Action::Free)),
            action,
            device: if action == Action::AllocHost { HOST } else { 0 },
            result: Some(0),
            addr: block.addr,
            bytes: Bytes(if action == Action::Free { 0 } else { block.bytes }),
            stream: 0,
            handle: 0,
            extra: 0,
            duration: Nanos(100),
            captured: false,
            in_allocate: false,
            comm: CommId(0),
            nccl_call: 0,
            nccl_thread: false,
        };
        self.event(block.stack, EventKind::Call(call));
    }

    fn event(&mut self, stack: StackId, kind: EventKind) {
        let time = Nanos(1000 * (self.recording.events.len() as u64 + 1));
        self.recording.events.push(Event { time, thread: ThreadId(0), stack, kind });
    }
}

/// SplitMix64 (Steele, Lea and Flood, 2014): the same numbers everywhere.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Both ends included.
    pub(crate) fn range(&mut self, from: u64, to: u64) -> u64 {
        from + self.next() % (to - from + 1)
    }
}
