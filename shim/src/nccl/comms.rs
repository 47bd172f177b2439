//! The process's communicators: their numbers, their counters, and how they come and go.
//!
//! NCCL uses addresses again, so each communicator gets a number when it is made. What is split off in a group, or off a
//! communicator that does not block, has no address when the call returns: it is found when the group ends, or when an
//! address is met that nobody knows.

use super::call::{self, Draft, IN_PROGRESS, Place, is_done};
use super::threads::{Mark, inside};
use super::{Comm, Config, UniqueId, banks, hash, process_groups};
use crate::lanes::{self, Lane};
use crate::probe::current_device;
use crate::session::{self, Start};
use crate::{devices, sys, tls};
use core::ffi::c_void;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use gputrace_ring::record::{Communicator, NcclOp};

/// Addresses of communicators that are told apart in one process.
const MOST_COMMS: usize = 1024;
/// Peers counted apart where the number of ranks is not known.
const MANY_PEERS: usize = 1 << 16;
/// The program's own reduction operations at one time.
const MOST_REDOPS: usize = 64;
/// Communicators that wait for their address.
const MOST_PENDING: usize = 64;
/// First `ncclRedOp_t` of the program's own (ncclNumOps, nccl.h).
const FIRST_OWN_REDOP: i32 = 5;
/// `ncclSuccess`.
const SUCCESS: i32 = 0;

static COMMS: AtomicU32 = AtomicU32::new(0);
static SLOTS: [Slot; MOST_COMMS] = [const { Slot::new() }; MOST_COMMS];
static PENDING: [Pending; MOST_PENDING] = [const { Pending::new() }; MOST_PENDING];
/// Communicator and `ncclRedOp_t`, and the call that made it.
static REDOPS: [(AtomicU64, AtomicU64); MOST_REDOPS] =
    [const { (AtomicU64::new(0), AtomicU64::new(0)) }; MOST_REDOPS];
/// Hash of each unique id and rank that were used, to tell those apart that are the same.
static ROOTS: [AtomicU64; MOST_COMMS] = [const { AtomicU64::new(0) }; MOST_COMMS];

/// One address, and the communicator that has it now.
pub(crate) struct Slot {
    handle: AtomicUsize,
    id: AtomicU32,
    rank: AtomicI32,
    n_ranks: AtomicI32,
    version: AtomicU32,
    device: AtomicI32,
    hash: AtomicU64,
    hash_known: AtomicU32,
    blocking: AtomicI32,
    children: AtomicU32,
    splits: AtomicU32,
    async_error: AtomicI32,
    collectives: AtomicU64,
    management: AtomicU64,
    one_sided: AtomicU64,
    peers: AtomicPtr<AtomicU64>,
    n_peers: AtomicUsize,
}

impl Slot {
    const fn new() -> Slot {
        Slot {
            handle: AtomicUsize::new(0),
            id: AtomicU32::new(0),
            rank: AtomicI32::new(-1),
            n_ranks: AtomicI32::new(-1),
            version: AtomicU32::new(0),
            device: AtomicI32::new(-1),
            hash: AtomicU64::new(0),
            hash_known: AtomicU32::new(0),
            blocking: AtomicI32::new(1),
            children: AtomicU32::new(0),
            splits: AtomicU32::new(0),
            async_error: AtomicI32::new(0),
            collectives: AtomicU64::new(0),
            management: AtomicU64::new(0),
            one_sided: AtomicU64::new(0),
            peers: AtomicPtr::new(null_mut()),
            n_peers: AtomicUsize::new(0),
        }
    }

    /// Number of the communicator.
    pub(crate) fn id(&self) -> u32 {
        self.id.load(Ordering::Relaxed)
    }

    /// What counts such calls; `None` for those without order.
    pub(crate) fn counter(&'static self, op: NcclOp, peer: i32) -> Option<&'static AtomicU64> {
        use NcclOp::*;
        match op {
            AllReduce | Broadcast | Reduce | AllGather | ReduceScatter | AlltoAll | Gather | Scatter => {
                Some(&self.collectives)
            }
            Send => self.peer(peer, 0),
            Receive => self.peer(peer, 1),
            PutSignal | Signal | WaitSignal => Some(&self.one_sided),
            CommSplit | CommShrink | CommGrow | CommFinalize | CommSuspend | CommResume | WindowRegister
            | WindowDeregister | DevCommCreate | DevCommDestroy => Some(&self.management),
            GroupStart | GroupEnd | GroupSimulateEnd | UniqueId | CommInit | CommInitAll | CommDestroy
            | CommAbort | CommRevoke | AsyncError | MemAlloc | MemFree | Register | Deregister
            | RedOpCreate | RedOpDestroy => None,
        }
    }

    /// Two counters a peer, in memory that is there once it is touched.
    fn peer(&'static self, peer: i32, direction: usize) -> Option<&'static AtomicU64> {
        let peer = usize::try_from(peer).ok()?;
        let mut peers = self.peers.load(Ordering::Acquire);
        if peers.is_null() {
            let n_ranks = usize::try_from(self.n_ranks.load(Ordering::Relaxed)).unwrap_or(MANY_PEERS);
            let fresh = sys::pages(n_ranks.max(1) * 2 * size_of::<AtomicU64>()).cast::<AtomicU64>();
            if fresh.is_null() {
                return None;
            }
            // NCCL wants the calls of one communicator one after the other, so nobody races; if somebody does, some
            // pages are lost.
            self.n_peers.store(n_ranks, Ordering::Relaxed);
            self.peers.store(fresh, Ordering::Release);
            peers = fresh;
        }
        if peer >= self.n_peers.load(Ordering::Relaxed) {
            return None;
        }
        // SAFETY: the memory has two counters for each peer, is zero at first, and is never given back.
        Some(unsafe { &*peers.add(2 * peer + direction) })
    }

    /// Another communicator has this address now. `answered` is what the call that made it said: a communicator that
    /// does not block begins in progress, and that it is done is news however late somebody asks first.
    fn begin(&self, definition: &Communicator, answered: i32) {
        self.rank.store(definition.rank, Ordering::Relaxed);
        self.n_ranks.store(definition.n_ranks, Ordering::Relaxed);
        self.version.store(definition.version, Ordering::Relaxed);
        self.device.store(definition.device.into(), Ordering::Relaxed);
        self.hash.store(definition.comm_hash, Ordering::Relaxed);
        self.hash_known.store(definition.marks & Communicator::HAS_HASH, Ordering::Relaxed);
        let [blocking, ..] = definition.config;
        self.blocking.store(i32::from(blocking != 0), Ordering::Relaxed);
        for number in [&self.children, &self.splits] {
            number.store(0, Ordering::Relaxed);
        }
        for counter in [&self.collectives, &self.management, &self.one_sided] {
            counter.store(0, Ordering::Relaxed);
        }
        self.async_error.store(answered, Ordering::Relaxed);
        self.peers.store(null_mut(), Ordering::Relaxed);
        self.id.store(definition.id, Ordering::Release);
    }

    fn hash(&self) -> Option<u64> {
        (self.hash_known.load(Ordering::Relaxed) != 0).then(|| self.hash.load(Ordering::Relaxed))
    }
}

/// The communicator of an address: also one that nobody saw being made.
pub(crate) fn of(handle: Comm) -> Option<&'static Slot> {
    if handle.is_null() {
        return None;
    }
    let slot = slot_of(handle)?;
    if slot.id() == 0 {
        match take_pending(handle) {
            // A call that was done would have given out the address.
            Some(definition) => bind(handle, definition, IN_PROGRESS),
            None => meet(slot, handle),
        }
    }
    Some(slot)
}

fn slot_of(handle: Comm) -> Option<&'static Slot> {
    let address = handle as usize;
    let first = (address as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) as usize >> 40;
    for step in 0..MOST_COMMS {
        let slot = SLOTS.get((first + step) % MOST_COMMS)?;
        match slot.handle.compare_exchange(0, address, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return Some(slot),
            Err(there) if there == address => return Some(slot),
            Err(_) => {}
        }
    }
    None
}

/// A communicator that was made before we could see it, or by a library that we do not see.
#[cold]
fn meet(slot: &Slot, handle: Comm) {
    let definition = Communicator { handle: handle as u64, ..fresh(0) };
    slot.begin(&definition, SUCCESS);
    define(&definition, &Config::NONE, Start::OnlyIfLive);
}

/// A communicator without anything known but its number.
fn fresh(origin: u16) -> Communicator {
    Communicator {
        id: COMMS.fetch_add(1, Ordering::Relaxed) + 1,
        rank: -1,
        n_ranks: -1,
        origin,
        device: -1,
        config: Config::NONE.numbers,
        ..Communicator::default()
    }
}

/// Sends a definition.
fn define(definition: &Communicator, config: &Config, start: Start) {
    if let Some(mut lane) = lanes::lane(start) {
        send(&mut lane, definition, config);
    }
}

fn send(lane: &mut Lane, definition: &Communicator, config: &Config) {
    let definition = Communicator {
        config: config.numbers,
        name: config.name.len() as u32,
        net_name: config.net_name.len() as u32,
        ..*definition
    };
    let at = session::now();
    lane.producer().push_with(at, 0, &definition, &[config.name, config.net_name]);
}

/// The definition's address is known.
fn bind(handle: Comm, mut definition: Communicator, answered: i32) {
    let Some(slot) = slot_of(handle) else { return };
    definition.handle = handle as u64;
    slot.begin(&definition, answered);
}

/// What makes communicators: the call, and what the new one shall be.
struct Creation {
    place: Place,
    op: NcclOp,
    definition: Communicator,
    config: *const c_void,
    parent: Option<&'static Slot>,
}

impl Creation {
    fn root(place: Place, op: NcclOp, config: *const c_void) -> Creation {
        let version = banks::version(place.bank);
        let device = current_device().into();
        let definition = Communicator { version, device, ..fresh(op as u16) };
        Creation { place, op, definition, config, parent: None }
    }

    fn child(place: Place, op: NcclOp, parent: Comm, config: *const c_void) -> Creation {
        let parent = of(parent);
        let mut definition = Communicator { version: banks::version(place.bank), ..fresh(op as u16) };
        if let Some(parent) = parent {
            definition.parent = parent.id();
            definition.ordinal = parent.children.fetch_add(1, Ordering::Relaxed) + 1;
            definition.device = i16::try_from(parent.device.load(Ordering::Relaxed)).unwrap_or(-1);
        }
        Creation { place, op, definition, config, parent }
    }

    fn with_id(mut self, hashes: [u64; 2]) -> Creation {
        let [unique_id, _] = hashes;
        self.definition.unique_id = unique_id;
        let version = self.definition.version;
        self.with_hash(hash::of_root(hashes, version))
    }

    fn with_hash(mut self, hash: u64) -> Creation {
        // Without the version nobody knows how NCCL computes it.
        if self.definition.version != 0 {
            self.definition.comm_hash = hash;
            self.definition.marks |= Communicator::HAS_HASH;
        }
        self
    }

    /// Calls NCCL.
    fn run(
        mut self,
        mark: &Mark,
        run: impl FnOnce() -> i32,
        out: *mut Comm,
        fill: impl FnOnce(&mut Draft),
    ) -> i32 {
        let tls = tls::here();
        let mut draft = Draft::new(self.place.row, self.op, tls);
        self.definition.call = draft.enter.call;
        draft.enter.comm = self.definition.id;
        draft.charge(self.definition.id);
        if let Some(parent) = self.parent {
            draft.enter.extra = u64::from(parent.id());
            draft.count_on(parent.counter(self.op, -1));
        }
        fill(&mut draft);
        // SAFETY: the program's own configuration, which NCCL reads too.
        let mut config = unsafe { Config::read(self.config) };
        let group = process_groups::name_for(tls, &config);
        if let Some(name) = &group {
            config.name = name.as_bytes();
        }
        let blocks = match self.parent {
            Some(parent) if self.config.is_null() => parent.blocking.load(Ordering::Relaxed) != 0,
            _ => !config.returns_early(),
        };
        self.definition.config = config.numbers;
        define(&self.definition, &config, Start::IfNeeded);
        let in_group = tls.group.get() != 0;
        let running = draft.begin(Start::IfNeeded, tls, mark);
        let result = run();
        let is_ready = result == SUCCESS && blocks && !in_group;
        let (bank, definition) = (self.place.bank, &mut self.definition);
        running.end(tls, result, || {
            if !is_done(result) || out.is_null() {
                return 0;
            }
            // SAFETY: NCCL wrote it, or left the program's own value, which is looked at only if it is new.
            let handle = unsafe { *out };
            if handle.is_null() {
                return 0;
            }
            if is_ready && definition.parent != 0 {
                let number = |getter| banks::number_of(bank, getter, handle).unwrap_or(-1);
                definition.rank = number(c"ncclCommUserRank");
                definition.n_ranks = number(c"ncclCommCount");
            }
            definition.handle = handle as u64;
            handle as u64
        });
        describe_devices();
        self.settle(result, out, &config, in_group);
        result
    }

    /// The address is known, or will be later, or there is none.
    fn settle(self, result: i32, out: *mut Comm, config: &Config, in_group: bool) {
        if !is_done(result) {
            return;
        }
        // NCCL_SPLIT_NOCOLOR: it took part, and has no communicator.
        let is_none = self.op == NcclOp::CommSplit && self.definition.color < 0;
        if self.definition.handle != 0 {
            define(&self.definition, config, Start::OnlyIfLive);
            bind(self.definition.handle as usize as Comm, self.definition, result);
        } else if !is_none {
            remember_pending(self.definition, if in_group { out } else { null_mut() });
        }
    }
}

/// `ncclCommInitRank`, `ncclCommInitRankConfig`, `ncclCommInitRankScalable`.
#[allow(clippy::too_many_arguments)]
pub(crate) fn init_rank(
    run: impl FnOnce() -> i32,
    place: Place,
    out: *mut Comm,
    n_ranks: i32,
    id: *const UniqueId,
    rank: i32,
    config: *const c_void,
) -> i32 {
    let mark = Mark::new();
    if is_inside(&mark) {
        return run();
    }
    // SAFETY: null, or the program's own id, or the first of several.
    let hashes = if id.is_null() { [0; 2] } else { hash::of_unique_id(unsafe { &*id }) };
    let mut creation = Creation::root(place, NcclOp::CommInit, config).with_id(hashes);
    creation.definition.rank = rank;
    creation.definition.n_ranks = n_ranks;
    creation.definition.ordinal = times_used(creation.definition.unique_id, rank);
    let unique_id = creation.definition.unique_id;
    creation.run(&mark, run, out, |draft| {
        draft.count(n_ranks);
        draft.peer(rank);
        draft.extra(unique_id);
    })
}

/// Sends the devices if the session began before the driver was ready: NCCL makes it so while it makes a communicator.
fn describe_devices() {
    if !devices::are_known()
        && let Some(mut lane) = lanes::lane(Start::OnlyIfLive)
    {
        devices::describe(lane.producer());
    }
}

/// Whether the call comes from inside of NCCL, or nobody wants to know.
fn is_inside(mark: &Mark) -> bool {
    inside(tls::here(), mark.top()) != 0 || session::is_off()
}

/// How often the process has used this id for this rank before. With NCCL_COMM_ID all ids are the same.
fn times_used(unique_id: u64, rank: i32) -> u32 {
    // Never 0, which is a free place.
    let key = (unique_id.rotate_left(17) ^ u64::from(rank as u32) << 1) | 1;
    let mut times = 0;
    for slot in &ROOTS {
        match slot.compare_exchange(0, key, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => break,
            Err(there) => times += u32::from(there == key),
        }
    }
    times
}

/// `ncclCommInitAll`: one communicator for each device of this process.
pub(crate) fn init_all(
    run: impl FnOnce() -> i32,
    place: Place,
    out: *mut Comm,
    n_devices: i32,
    devices: *const i32,
) -> i32 {
    let mark = Mark::new();
    if is_inside(&mark) {
        return run();
    }
    let tls = tls::here();
    let mut draft = Draft::new(place.row, NcclOp::CommInitAll, tls);
    draft.count(n_devices);
    let (call, n) = (draft.enter.call, n_devices.clamp(0, 64));
    let version = banks::version(place.bank);
    let first = COMMS.fetch_add(n as u32, Ordering::Relaxed) + 1;
    draft.enter.comm = first;
    let each = |rank: i32| {
        // SAFETY: null, or the program's list of `n_devices`.
        let device = if devices.is_null() { rank } else { unsafe { *devices.wrapping_add(rank as usize) } };
        Communicator {
            id: first + rank as u32,
            call,
            rank,
            n_ranks: n_devices,
            version,
            origin: NcclOp::CommInitAll as u16,
            device: i16::try_from(device).unwrap_or(-1),
            config: Config::NONE.numbers,
            ..Communicator::default()
        }
    };
    for rank in 0..n {
        define(&each(rank), &Config::NONE, Start::IfNeeded);
    }
    let running = draft.begin(Start::IfNeeded, tls, &mark);
    let result = run();
    running.end(tls, result, || 0);
    describe_devices();
    // NCCL has made the id itself, by the public function.
    let hashes = [tls.nested_id[0].get(), tls.nested_id[1].get()];
    for rank in 0..if result == SUCCESS && !out.is_null() { n } else { 0 } {
        // SAFETY: NCCL has filled as many.
        let handle = unsafe { *out.wrapping_add(rank as usize) };
        let mut definition = each(rank);
        definition.handle = handle as u64;
        definition.unique_id = hashes[0];
        if hashes[0] != 0 && version != 0 {
            definition.comm_hash = hash::of_root(hashes, version);
            definition.marks |= Communicator::HAS_HASH;
        }
        define(&definition, &Config::NONE, Start::OnlyIfLive);
        bind(handle, definition, result);
    }
    result
}

/// `ncclCommSplit`.
#[allow(clippy::too_many_arguments)]
pub(crate) fn split(
    run: impl FnOnce() -> i32,
    place: Place,
    parent: Comm,
    color: i32,
    key: i32,
    out: *mut Comm,
    config: *const c_void,
) -> i32 {
    let mark = Mark::new();
    if is_inside(&mark) {
        return run();
    }
    let mut creation = Creation::child(place, NcclOp::CommSplit, parent, config);
    creation.definition.color = color;
    creation.definition.key = key;
    creation.definition.marks |= Communicator::HAS_COLOR;
    if let Some(slot) = creation.parent {
        let count = slot.splits.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(parent) = slot.hash() {
            let version = creation.definition.version;
            creation = creation.with_hash(hash::of_child(parent, count, color, version));
        }
    }
    creation.run(&mark, run, out, |_| {})
}

/// `ncclCommShrink`. The number of a shrink is 0 and its color too in NCCL's hash (src/init.cc, v2.27.5).
#[allow(clippy::too_many_arguments)]
pub(crate) fn shrink(
    run: impl FnOnce() -> i32,
    place: Place,
    parent: Comm,
    excluded: *const i32,
    n_excluded: i32,
    out: *mut Comm,
    config: *const c_void,
    flags: i32,
) -> i32 {
    let mark = Mark::new();
    if is_inside(&mark) {
        return run();
    }
    let mut creation = Creation::child(place, NcclOp::CommShrink, parent, config);
    if let Some(slot) = creation.parent {
        let (rank, n_ranks) = (slot.rank.load(Ordering::Relaxed), slot.n_ranks.load(Ordering::Relaxed));
        let n = usize::try_from(n_excluded).unwrap_or(0);
        if rank >= 0 && n_ranks >= n_excluded && !excluded.is_null() {
            // SAFETY: the program's list of `n_excluded`.
            let before = (0..n).filter(|index| unsafe { *excluded.wrapping_add(*index) } < rank).count();
            creation.definition.rank = rank - before as i32;
            creation.definition.n_ranks = n_ranks - n_excluded;
        }
        if let Some(parent) = slot.hash() {
            let version = creation.definition.version;
            creation = creation.with_hash(hash::of_child(parent, 0, 0, version));
        }
    }
    creation.run(&mark, run, out, |draft| {
        draft.count(n_excluded);
        draft.handle(flags);
    })
}

/// `ncclCommGrow`. A new rank has no parent, and an old one may have no id.
#[allow(clippy::too_many_arguments)]
pub(crate) fn grow(
    run: impl FnOnce() -> i32,
    place: Place,
    parent: Comm,
    n_ranks: i32,
    id: *const UniqueId,
    rank: i32,
    out: *mut Comm,
    config: *const c_void,
) -> i32 {
    let mark = Mark::new();
    if is_inside(&mark) {
        return run();
    }
    let mut creation = Creation::child(place, NcclOp::CommGrow, parent, config);
    if !id.is_null() {
        // SAFETY: the program's own id.
        [creation.definition.unique_id, _] = hash::of_unique_id(unsafe { &*id });
    }
    if let Some(slot) = creation.parent {
        // NCCL counts it with the splits (src/init.cc, v2.30).
        slot.splits.fetch_add(1, Ordering::Relaxed);
    } else {
        creation.definition.device = current_device().into();
    }
    let old_rank = creation.parent.map_or(-1, |slot| slot.rank.load(Ordering::Relaxed));
    creation.definition.rank = if rank >= 0 { rank } else { old_rank };
    creation.definition.n_ranks = n_ranks;
    creation.run(&mark, run, out, |draft| {
        draft.count(n_ranks);
        draft.peer(rank);
    })
}

/// Communicators whose address was not known when their call returned.
struct Pending {
    /// 0 free, 1 being filled or taken, 2 filled.
    state: AtomicU32,
    out: AtomicUsize,
    thread: AtomicUsize,
    definition: core::cell::UnsafeCell<core::mem::MaybeUninit<Communicator>>,
}

// SAFETY: only the thread that moved `state` to 1 touches the definition.
unsafe impl Sync for Pending {}

impl Pending {
    const fn new() -> Pending {
        Pending {
            state: AtomicU32::new(0),
            out: AtomicUsize::new(0),
            thread: AtomicUsize::new(0),
            definition: core::cell::UnsafeCell::new(core::mem::MaybeUninit::uninit()),
        }
    }

    fn claim(&self, state: u32) -> bool {
        self.state.compare_exchange(state, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// After [`Pending::claim`] of a filled one.
    fn definition(&self) -> Communicator {
        // SAFETY: `state` was 2, so it was filled; now it is ours.
        unsafe { (*self.definition.get()).assume_init() }
    }
}

fn this_thread() -> usize {
    tls::here() as *const tls::Tls as usize
}

fn remember_pending(definition: Communicator, out: *mut Comm) {
    let Some(slot) = PENDING.iter().find(|slot| slot.claim(0)) else { return };
    // SAFETY: claimed.
    unsafe { (*slot.definition.get()).write(definition) };
    slot.out.store(out as usize, Ordering::Relaxed);
    slot.thread.store(this_thread(), Ordering::Relaxed);
    slot.state.store(2, Ordering::Release);
}

/// The group has ended: NCCL has written what the calls in it were to give out.
pub(crate) fn resolve_grouped(result: i32) {
    for slot in &PENDING {
        let is_mine = slot.state.load(Ordering::Acquire) == 2
            && slot.out.load(Ordering::Relaxed) != 0
            && slot.thread.load(Ordering::Relaxed) == this_thread();
        if !is_mine || !slot.claim(2) {
            continue;
        }
        let out = slot.out.swap(0, Ordering::Relaxed) as *const Comm;
        // SAFETY: NCCL itself has written there during the call that has just returned.
        let handle = if result == SUCCESS { unsafe { *out } } else { null_mut() };
        if handle.is_null() {
            // In progress: the address will be met.
            slot.state.store(if is_done(result) { 2 } else { 0 }, Ordering::Release);
            continue;
        }
        let mut definition = slot.definition();
        slot.state.store(0, Ordering::Release);
        definition.handle = handle as u64;
        bind(handle, definition, result);
        define(&definition, &config_of(&definition), Start::OnlyIfLive);
    }
}

/// The oldest communicator that has no address yet: this must be it. With several of them it is a guess, for NCCL makes
/// them in the order of the calls.
fn take_pending(handle: Comm) -> Option<Communicator> {
    let filled = |slot: &&Pending| slot.state.load(Ordering::Acquire) == 2;
    // SAFETY: a race with another thread can only give a number of another communicator, and the claim below decides.
    let id = |slot: &&Pending| unsafe { (*slot.definition.get()).assume_init_ref().id };
    let oldest = PENDING.iter().filter(filled).min_by_key(id)?;
    if !oldest.claim(2) {
        return None;
    }
    let mut definition = oldest.definition();
    oldest.state.store(0, Ordering::Release);
    definition.handle = handle as u64;
    define(&definition, &config_of(&definition), Start::OnlyIfLive);
    Some(definition)
}

/// The names are gone with the program's structure; the numbers are kept.
fn config_of(definition: &Communicator) -> Config<'static> {
    Config { numbers: definition.config, ..Config::NONE }
}

/// `ncclGetUniqueId` and `ncclCommGetUniqueId`. Inside of NCCL it is `ncclCommInitAll` that wants one.
pub(crate) fn unique_id(run: impl FnOnce() -> i32, place: Place, parent: Comm, id: *const UniqueId) -> i32 {
    let hashes = || {
        // SAFETY: null, or what NCCL has filled.
        if id.is_null() { [0; 2] } else { hash::of_unique_id(unsafe { &*id }) }
    };
    let (tls, mark) = (tls::here(), Mark::new());
    if inside(tls, mark.top()) == 0 {
        let fill = |draft: &mut Draft| draft.comm(parent);
        return call::around(Start::OnlyIfLive, place.row, NcclOp::UniqueId, run, fill, || hashes()[0]);
    }
    let result = run();
    if result == SUCCESS {
        let [new, old] = hashes();
        tls.nested_id[0].set(new);
        tls.nested_id[1].set(old);
    }
    result
}

/// `ncclRedOpCreatePreMulSum`.
#[allow(clippy::too_many_arguments)]
pub(crate) fn redop_create(
    run: impl FnOnce() -> i32,
    place: Place,
    out: *const i32,
    datatype: i32,
    residence: i32,
    comm: Comm,
) -> i32 {
    let fill = |draft: &mut Draft| {
        draft.comm(comm);
        draft.datatype(datatype);
        draft.extra(residence);
    };
    call::around(Start::OnlyIfLive, place.row, NcclOp::RedOpCreate, run, fill, || {
        // SAFETY: NCCL has written it, for it succeeded.
        let redop = unsafe { *out };
        made_redop(of(comm).map_or(0, Slot::id), redop, tls::here().nccl_call.get());
        u64::from(redop as u32)
    })
}

/// `ncclRedOpDestroy`.
pub(crate) fn redop_destroy(run: impl FnOnce() -> i32, place: Place, redop: i32, comm: Comm) -> i32 {
    let fill = |draft: &mut Draft| {
        draft.comm(comm);
        draft.redop(redop);
    };
    call::around(Start::OnlyIfLive, place.row, NcclOp::RedOpDestroy, run, fill, || {
        forget_redop(of(comm).map_or(0, Slot::id), redop);
        0
    })
}

/// `ncclCommGetAsyncError`: watchdogs ask all the time, and only another answer than the last is news.
pub(crate) fn async_error(run: impl FnOnce() -> i32, place: Place, comm: Comm, out: *const i32) -> i32 {
    let mark = Mark::new();
    if is_inside(&mark) || !session::is_live() {
        return run();
    }
    let result = run();
    let Some(slot) = of(comm) else { return result };
    if result != SUCCESS || out.is_null() {
        return result;
    }
    // SAFETY: NCCL has written it, for it succeeded.
    let error = unsafe { *out };
    if slot.async_error.swap(error, Ordering::Relaxed) != error {
        let tls = tls::here();
        let mut draft = Draft::new(place.row, NcclOp::AsyncError, tls);
        draft.comm(comm);
        draft.begin(Start::OnlyIfLive, tls, &mark).end(tls, result, || error as u32 as u64);
    }
    result
}

/// Remembers which call made a reduction operation.
fn made_redop(comm: u32, redop: i32, call: u64) {
    let key = redop_key(comm, redop);
    for (slot, by) in &REDOPS {
        let claimed = slot.compare_exchange(0, key, Ordering::AcqRel, Ordering::Acquire);
        if claimed.is_ok() || claimed == Err(key) {
            return by.store(call, Ordering::Release);
        }
    }
}

/// The operation is gone; NCCL uses its number again.
fn forget_redop(comm: u32, redop: i32) {
    let key = redop_key(comm, redop);
    for (slot, _) in &REDOPS {
        let _ = slot.compare_exchange(key, 0, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// The call that made a reduction operation; 0 for NCCL's own.
pub(crate) fn redop_call(comm: u32, redop: i32) -> u64 {
    if (0..FIRST_OWN_REDOP).contains(&redop) {
        return 0;
    }
    let key = redop_key(comm, redop);
    let found = REDOPS.iter().find(|(slot, _)| slot.load(Ordering::Acquire) == key);
    found.map_or(0, |(_, by)| by.load(Ordering::Acquire))
}

/// Never 0: the communicators' numbers begin at 1.
fn redop_key(comm: u32, redop: i32) -> u64 {
    u64::from(comm) << 32 | u64::from(redop as u32)
}
