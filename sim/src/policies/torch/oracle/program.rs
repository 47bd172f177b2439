//! Random programs of the harness: what they may do, and which sequences of commands make sense.

use std::collections::{HashMap, HashSet};

/// A command of the harness.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    Alloc(u32, u64, u16),
    Free(u32),
    Record(u32, u16),
    Done(bool),
    Finish(u16),
    Trim,
    Fraction(f64),
    Reset,
    Begin(u16),
    End(u16),
    Release(u16),
    Overflow(u16),
    Whole(u16),
}

impl Step {
    pub(super) fn text(self) -> String {
        match self {
            Step::Alloc(id, bytes, stream) => format!("alloc {id} {bytes} {stream}"),
            Step::Free(id) => format!("free {id}"),
            Step::Record(id, stream) => format!("record {id} {stream}"),
            Step::Done(done) => format!("done {}", u8::from(done)),
            Step::Finish(stream) => format!("finish {stream}"),
            Step::Trim => "trim".into(),
            Step::Fraction(fraction) => format!("fraction {fraction}"),
            Step::Reset => "reset".into(),
            Step::Begin(pool) => format!("begin {pool}"),
            Step::End(pool) => format!("end {pool}"),
            Step::Release(pool) => format!("release {pool}"),
            Step::Overflow(pool) => format!("overflow {pool}"),
            Step::Whole(pool) => format!("whole {pool}"),
        }
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

pub(super) const MIB: u64 = 1 << 20;

fn bytes(random: &mut Random) -> u64 {
    match random.below(8) {
        0 => random.between(1, 4000),
        1 => random.between(1, MIB),
        2 => random.between(MIB, 10 * MIB),
        3 => random.between(10 * MIB, 200 * MIB),
        4 => MIB + random.below(2),
        5 => 10 * MIB - random.below(2),
        6 => random.between(1, 64 * MIB),
        _ => random.between(1, 300) * 512,
    }
}

/// What a program does beside allocating and freeing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Flavour {
    Plain,
    Streams,
    Pools,
    Limited,
    Everything,
}

pub(super) const FLAVOURS: [Flavour; 5] =
    [Flavour::Plain, Flavour::Streams, Flavour::Pools, Flavour::Limited, Flavour::Everything];

impl Flavour {
    pub(super) fn has_streams(self) -> bool {
        matches!(self, Flavour::Streams | Flavour::Everything)
    }

    pub(super) fn has_pools(self, version: (u8, u8)) -> bool {
        // 2.0 has no calls for private pools.
        version >= (2, 1) && matches!(self, Flavour::Pools | Flavour::Everything)
    }

    pub(super) fn has_limit(self) -> bool {
        matches!(self, Flavour::Limited | Flavour::Everything)
    }
}

/// A private pool of a program: begun so often, and not released.
struct Opened {
    pool: u16,
    uses: u32,
}

/// Writes a random program.
struct Author {
    random: Random,
    version: (u8, u8),
    steps: Vec<Step>,
    live: Vec<u32>,
    n_allocs: u32,
    inside: Option<u16>,
    opened: Vec<Opened>,
    n_pools: u16,
    /// Blocks that other streams use.
    recorded: HashSet<u32>,
    /// One of these was freed in a capture, and no request since made PyTorch look at it.
    has_deferred: bool,
}

/// A random program. Sizes repeat, so that equal blocks compete.
pub(super) fn program(seed: u64, n_steps: usize, flavour: Flavour, version: (u8, u8)) -> Vec<Step> {
    let mut random = Random(seed);
    let sizes: Vec<u64> = (0..24).map(|_| bytes(&mut random)).collect();
    let n_streams = if flavour.has_streams() { 3 } else { 1 };
    let mut author = Author {
        random,
        version,
        steps: Vec::new(),
        live: Vec::new(),
        n_allocs: 0,
        inside: None,
        opened: Vec::new(),
        n_pools: 0,
        recorded: HashSet::new(),
        has_deferred: false,
    };
    if flavour.has_limit() {
        author.fraction();
    }
    while author.steps.len() < n_steps {
        match author.random.below(100) {
            roll if roll < 54 || author.live.is_empty() => author.alloc(&sizes, n_streams),
            0..=91 => author.free(),
            92 if flavour.has_limit() && author.random.chance(30) => author.fraction(),
            93 if author.random.chance(30) => author.steps.push(Step::Reset),
            94 if author.inside.is_none() => author.trim(),
            95 | 96 if flavour.has_streams() => author.record(),
            97 if flavour.has_streams() => author.complete(),
            94..=98 if flavour.has_pools(version) => author.enter_or_leave(),
            99 if flavour.has_pools(version) && author.inside.is_none() => author.release(),
            _ => {}
        }
    }
    author.steps
}

impl Author {
    fn alloc(&mut self, sizes: &[u64], n_streams: u64) {
        let random = &mut self.random;
        let size = if random.chance(75) { sizes[random.below(24) as usize] } else { bytes(random) };
        self.steps.push(Step::Alloc(self.n_allocs, size, random.below(n_streams) as u16));
        self.live.push(self.n_allocs);
        self.n_allocs += 1;
        self.has_deferred &= self.inside.is_some();
    }

    fn trim(&mut self) {
        self.steps.push(Step::Trim);
        self.has_deferred = false;
    }

    fn any(&mut self) -> usize {
        self.random.below(self.live.len() as u64) as usize
    }

    fn free(&mut self) {
        let index = self.any();
        if self.inside.is_some() && self.recorded.contains(&self.live[index]) {
            // 2.9 to 2.12 keep what is freed in a capture in a hash table of pointers (deferred_blocks): two of them come
            // back in an order, and so with a peak of inactive_split_bytes, that differs from process to process.
            if self.has_deferred && ((2, 9)..=(2, 12)).contains(&self.version) {
                return;
            }
            self.has_deferred = true;
        }
        self.steps.push(Step::Free(self.live.swap_remove(index)));
    }

    fn record(&mut self) {
        let index = self.any();
        self.recorded.insert(self.live[index]);
        self.steps.push(Step::Record(self.live[index], self.random.below(3) as u16));
    }

    fn complete(&mut self) {
        let step = match self.random.below(4) {
            0 => Step::Done(true),
            1 => Step::Done(false),
            _ => Step::Finish(self.random.below(3) as u16),
        };
        self.steps.push(step);
    }

    fn fraction(&mut self) {
        self.steps.push(Step::Fraction([0.3, 0.5, 0.8, 1.0][self.random.below(4) as usize]));
    }

    fn enter_or_leave(&mut self) {
        if let Some(pool) = self.inside.take() {
            self.steps.push(Step::End(pool));
            return;
        }
        let again = !self.opened.is_empty() && self.random.chance(50);
        let index = if again {
            self.random.below(self.opened.len() as u64) as usize
        } else {
            self.n_pools += 1;
            self.opened.push(Opened { pool: self.n_pools, uses: 0 });
            self.opened.len() - 1
        };
        self.opened[index].uses += 1;
        let pool = self.opened[index].pool;
        self.inside = Some(pool);
        self.steps.push(Step::Begin(pool));
        if !again && self.version >= (2, 10) && self.random.chance(20) {
            self.steps.push(Step::Whole(pool));
        }
        // One a program: PyTorch tries several in the order of a hash table. It is never released, because PyTorch then
        // looks at it again and fails an assertion.
        let has_overflow = self.steps.iter().any(|step| matches!(step, Step::Overflow(_)));
        if !again && !has_overflow && self.version >= (2, 8) && self.random.chance(40) {
            self.steps.push(Step::Overflow(pool));
            self.opened[index].uses += 1;
            self.steps.extend([Step::End(pool), Step::Begin(pool)]);
        }
    }

    fn release(&mut self) {
        if self.opened.is_empty() {
            return;
        }
        let index = self.random.below(self.opened.len() as u64) as usize;
        if self
            .steps
            .iter()
            .any(|step| matches!(step, Step::Overflow(pool) if *pool == self.opened[index].pool))
        {
            return;
        }
        let Opened { pool, uses } = self.opened.swap_remove(index);
        self.steps.extend((0..uses).map(|_| Step::Release(pool)));
    }
}

/// Whether pools are begun before they are ended, and released as often as they were begun, as [`Author`] does it.
pub(super) fn makes_sense(steps: &[Step]) -> bool {
    let (mut inside, mut uses) = (None, HashMap::<u16, u32>::new());
    let stays = |pool: u16| steps.iter().any(|step| matches!(step, Step::Overflow(it) if *it == pool));
    steps.iter().all(|step| match *step {
        Step::Begin(pool) => {
            *uses.entry(pool).or_default() += 1;
            inside.replace(pool).is_none()
        }
        Step::End(pool) => inside.take() == Some(pool),
        Step::Release(pool) => {
            let left = uses.get(&pool).copied().unwrap_or(0);
            uses.insert(pool, left.saturating_sub(1));
            left > 0 && !stays(pool)
        }
        Step::Overflow(pool) | Step::Whole(pool) => inside == Some(pool),
        Step::Trim => inside.is_none(),
        _ => true,
    })
}
