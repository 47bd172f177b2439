//! A program as a list of steps: what the simulator judges and what Python says.
//!
//! ```text
//!  Alloc 0   Alloc 1   Free 0   Alloc 2   Refused 3
//! ```
//! A step names a tensor. A tensor has a size, a stream and a pool, and nothing of the recorded program.

use std::cell::RefCell;
use std::ops::ControlFlow;

use gputrace_sim::addresses::{AddressSpace, Bump, Direction};
use gputrace_sim::device::{Device, Placement};
use gputrace_sim::ops::{
    AllocId, Allocation, Builder, Op, OpStream, PoolChange, PoolIdx, RecordedOom, StackId, StreamIdx,
};
use gputrace_sim::policies::torch::{Options, Profile, Torch};
use gputrace_sim::policies::{ADDRESS_TIES, Policy};
use gputrace_sim::simulator::{Observer, Outcome, Unobserved, run};

/// A tensor that the program requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tensor {
    /// Bytes requested.
    pub bytes: u64,
    /// Number of the stream; 0 is the default one.
    pub stream: u16,
    /// Number of the pool; 0 is the default one.
    pub pool: u16,
    /// What the memory was for, where the trace shows it.
    pub role: Option<&'static str>,
}

/// What the program does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// It asks for a tensor and gets it.
    Alloc(u32),
    /// It drops a tensor, which nobody else uses.
    Free(u32),
    /// It drops a tensor that another stream still uses.
    Drop(u32),
    /// That stream is done with it.
    Done(u32),
    /// `torch.cuda.empty_cache()`.
    Trim,
    /// It drops a pool.
    Release(u16),
    /// It asks for a tensor and is refused.
    Refused(u32),
}

impl Step {
    /// The tensor that the step is about.
    pub fn tensor(self) -> Option<u32> {
        match self {
            Step::Alloc(it) | Step::Free(it) | Step::Drop(it) | Step::Done(it) | Step::Refused(it) => {
                Some(it)
            }
            Step::Trim | Step::Release(_) => None,
        }
    }
}

/// A memory pool of the program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PoolKind {
    /// Of CUDA graphs.
    Graph,
    /// `torch.cuda.MemPool`, and how it is made.
    MemPool {
        /// `use_on_oom=True`.
        serves_others: bool,
        /// `no_split=True`.
        is_whole: bool,
    },
}

/// A whole program.
#[derive(Clone, PartialEq, Debug)]
pub struct Program {
    /// By number.
    pub tensors: Vec<Tensor>,
    /// In order.
    pub steps: Vec<Step>,
    /// Streams; the default one is the first.
    pub n_streams: u16,
    /// Pools; the default one, which has no kind of its own, is the first.
    pub pools: Vec<PoolKind>,
    /// The PyTorch release.
    pub profile: Profile,
    /// The allocator's settings.
    pub options: Options,
    /// The most that the allocator may reserve, bytes.
    pub limit: Option<u64>,
}

/// The figures of a program in the simulator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Figures {
    /// Requests that were refused.
    pub n_refused: u64,
    /// Reserved and allocated when the last one was, after all that was cached had been freed, bytes.
    pub at_refusal: Option<(u64, u64)>,
    /// Most reserved, bytes.
    pub peak_reserved: u64,
    /// Most allocated, bytes.
    pub peak_allocated: u64,
    /// Choices that only addresses decided.
    pub n_ties: u64,
    /// PyTorch itself would do something undefined.
    pub is_undefined: bool,
    /// A request was refused that should have been served: all after it was not tried.
    pub is_cut_short: bool,
}

impl Figures {
    fn of(outcome: &Outcome) -> Figures {
        let refusal = outcome.oom.as_ref();
        Figures {
            n_refused: outcome.counter("num_ooms") + outcome.counter("num_oom_rejections"),
            at_refusal: refusal.map(|it| (it.reserved, it.allocated)),
            peak_reserved: outcome.books.reserved.peak,
            peak_allocated: outcome.books.allocated.peak,
            n_ties: outcome.counter(ADDRESS_TIES),
            is_undefined: outcome.counter("pools_lost") + outcome.counter("failed_assertions") > 0,
            is_cut_short: outcome.is_cut_short,
        }
    }
}

/// Addresses that are never used twice, and where segments began.
struct Noted<'a> {
    bump: Bump,
    begun: &'a RefCell<Vec<u64>>,
}

impl AddressSpace for Noted<'_> {
    fn map(&mut self, bytes: u64, op: u32) -> Option<u64> {
        let address = self.bump.map(bytes, op);
        self.begun.borrow_mut().extend(address);
        address
    }

    fn unmap(&mut self, _address: u64, _bytes: u64) {}

    fn reserve(&mut self, bytes: u64) -> u64 {
        let address = self.bump.reserve(bytes);
        self.begun.borrow_mut().push(address);
        address
    }
}

/// Notes where tensors lie.
struct Places(Vec<u64>);

impl Observer for Places {
    fn placed(&mut self, _op: usize, id: AllocId, at: Placement, _device: &Device) -> ControlFlow<()> {
        self.0[id.0 as usize] = at.address;
        ControlFlow::Continue(())
    }
}

impl Program {
    /// Its requests for the simulator.
    pub fn requests(&self) -> OpStream {
        let mut builder = Builder::new(0);
        // Handles ascend, so that a stream keeps its number. There are never more than the recording had.
        for stream in 0..self.n_streams {
            _ = builder.stream(u64::from(stream));
        }
        // What the program enters is a pool and not a capture: between those two the releases from 2.13 on differ.
        for number in 1..self.pools.len() as u64 {
            _ = builder.pool((0, number));
        }
        for tensor in &self.tensors {
            builder.allocation(Allocation {
                requested: tensor.bytes,
                address: 0,
                stack: StackId::NONE,
                stream: StreamIdx(tensor.stream),
                pool: PoolIdx(tensor.pool),
            });
        }
        for step in &self.steps {
            match *step {
                Step::Alloc(tensor) => builder.op(Op::Alloc(AllocId(tensor))),
                Step::Free(tensor) => {
                    builder.op(Op::FreeRequested(AllocId(tensor)));
                    builder.op(Op::FreeCompleted(AllocId(tensor)));
                }
                Step::Drop(tensor) => builder.op(Op::FreeRequested(AllocId(tensor))),
                Step::Done(tensor) => builder.op(Op::FreeCompleted(AllocId(tensor))),
                Step::Trim => builder.op(Op::Trim),
                Step::Release(pool) => {
                    builder.op(Op::ReleasePool(PoolIdx(pool)));
                    // `~MemPool` gives its segments back at once; a graph's stay until the next `empty_cache`.
                    if matches!(self.pools[usize::from(pool)], PoolKind::MemPool { .. }) {
                        builder.op(Op::ChangePool(PoolIdx(pool), PoolChange::Trim));
                    }
                }
                Step::Refused(tensor) => {
                    let Tensor { bytes, stream, pool, .. } = self.tensors[tensor as usize];
                    builder.oom(RecordedOom {
                        rounded: bytes,
                        device_free: 0,
                        stream: Some(StreamIdx(stream)),
                        pool: PoolIdx(pool),
                        stack: StackId::NONE,
                    });
                }
            }
        }
        builder.finish()
    }

    /// Its figures if addresses go this way.
    pub fn simulated(&self, direction: Direction) -> Figures {
        self.simulated_in(Box::new(Bump::new(direction)), &mut Unobserved)
    }

    /// Where tensors lie in their segments: for each that was served its distance from where the segment begins, bytes.
    pub fn offsets(&self, direction: Direction) -> Vec<Option<u64>> {
        let begun = RefCell::new(Vec::new());
        let mut places = Places(vec![u64::MAX; self.tensors.len()]);
        self.simulated_in(Box::new(Noted { bump: Bump::new(direction), begun: &begun }), &mut places);
        let mut begun = begun.into_inner();
        begun.sort_unstable();
        let offset = |address: u64| {
            let below = begun.partition_point(|start| *start <= address).checked_sub(1)?;
            (address != u64::MAX).then(|| address - begun[below])
        };
        places.0.into_iter().map(offset).collect()
    }

    fn simulated_in<'a>(&self, space: Box<dyn AddressSpace + 'a>, observer: &mut impl Observer) -> Figures {
        let requests = self.requests();
        let (n_streams, n_pools) = (usize::from(self.n_streams), self.pools.len());
        let mut policy = Torch::new(self.options.clone(), self.profile, n_streams, n_pools);
        let mut device = Device::new(u64::MAX, self.limit, space);
        for (number, kind) in (0u16..).zip(&self.pools) {
            if let PoolKind::MemPool { serves_others, is_whole } = *kind {
                let changes = [(serves_others, PoolChange::ServeOthers), (is_whole, PoolChange::KeepWhole)];
                for (_, change) in changes.into_iter().filter(|(is_set, _)| *is_set) {
                    policy.change_pool(&mut device, PoolIdx(number), change);
                }
            }
        }
        Figures::of(&run(&requests, &mut policy, &mut device, observer))
    }

    /// The number of requests.
    pub fn n_requests(&self) -> usize {
        self.steps.iter().filter(|step| matches!(step, Step::Alloc(_) | Step::Refused(_))).count()
    }
}
