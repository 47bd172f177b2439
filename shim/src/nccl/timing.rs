//! When the GPU runs what NCCL launches: a pair of events around each launch (`GPUTRACE_NCCL_TIMING`), off otherwise.
//!
//! ```text
//! ncclAllReduce ──> cuEventRecord(start), real call, cuEventRecord(end)          the program's thread
//! every 10 ms    ──> cuEventQuery(end), cuEventElapsedTime ──> NcclTiming record  a thread of ours
//! ```
//!
//! Operations of a group are launched by its end: there the pairs stand, one for each communicator and stream. Nothing is
//! recorded on a stream that is being captured, where an event would become a part of the graph, and nothing is asked
//! while any capture is open. Our thread is in the relaxed mode besides, in which the driver's questions harm no capture
//! that we do not know of.
//!
//! Positions count from an event of the same context. The driver gives times as a `float` of milliseconds, which over an
//! hour resolves no better than a quarter of one: so the event that is counted from moves on, once a second.

use super::noted::{MOST_NOTED, Taken};
use super::threads;
use crate::auxiliary::AUXILIARY;
use crate::captures;
use crate::elf;
use crate::kernel;
use crate::lanes;
use crate::session::{self, Start};
use crate::sys::{self, KeepErrno, Text};
use core::ffi::{c_int, c_void};
use core::mem::MaybeUninit;
use core::num::NonZeroU32;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use gputrace_ring::record::{Kind, NcclEnter, NcclOp, NcclTimed, NcclTiming};

/// CUDA contexts whose events are told apart.
const MOST_CONTEXTS: usize = 16;
/// Pairs of events of a context: launches that wait for the GPU at one time.
const PAIRS: usize = 1024;
const WORDS: usize = PAIRS / 64;
/// How often results are looked for, nanoseconds.
const PAUSE: u32 = 10_000_000;
/// How long results are waited for when the process ends, and how long for the thread that looks, milliseconds.
const LAST_LOOK: u32 = 100;
const LAST_WAIT: u32 = 1_000;
/// How long a context that is destroyed waits until we no longer use it, in steps of 50 µs.
const GATE_PATIENCE: u32 = 20_000;
/// Nanoseconds after which positions count from a newer event.
const REBASE: i64 = 1_000_000_000;
/// Where time lines begin: an hour, for streams that began before the first event that we saw.
const BEGINNING: i64 = 3_600_000_000_000;
/// `ncclSuccess` and `ncclInProgress`, nccl.h.
const SUCCESS: i32 = 0;
const IN_PROGRESS: i32 = 7;
/// `CUDA_ERROR_NOT_READY` and `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`, cuda.h 13.0.
const NOT_READY: c_int = 600;
const CAPTURE_IMPLICIT: c_int = 906;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`, cuda.h 13.0.
const RELAXED: c_int = 2;

/// States of a [`Context`]: nobody's, being made, in use, refused an event, destroyed.
const FREE: u32 = 0;
const MAKING: u32 = 1;
const READY: u32 = 2;
const BAD: u32 = 3;
const GONE: u32 = 4;

/// The session that the tables belong to: a forked child has no thread that reads them.
static SESSION: AtomicU64 = AtomicU64::new(0);
/// 1: the process ends. 2: the last look is over.
static ENDING: AtomicU32 = AtomicU32::new(0);
/// Contexts that are being destroyed now, and whether our thread is inside the driver.
static CLOSED: AtomicU32 = AtomicU32::new(0);
static INSIDE: AtomicU32 = AtomicU32::new(0);
static CONTEXTS: [Context; MOST_CONTEXTS] = [const { Context::new() }; MOST_CONTEXTS];

/// A CUDA context and its events. Bits of `free` and `waiting` are pairs; one in neither is in a thread's hands.
struct Context {
    state: AtomicU32,
    handle: AtomicUsize,
    device: AtomicI32,
    pairs: AtomicPtr<Pair>,
    free: [AtomicU64; WORDS],
    waiting: [AtomicU64; WORDS],
    /// The event that positions count from, and its own position; our thread's.
    base: AtomicUsize,
    base_at: AtomicU64,
}

/// Two events, 0 while they do not exist, and what they stand around.
struct Pair {
    start: AtomicUsize,
    end: AtomicUsize,
    call: AtomicU64,
    stream: AtomicU64,
    comm: AtomicU32,
}

/// What is done about a call.
pub(crate) enum Timing {
    /// Nothing.
    None,
    /// Nothing, for this reason.
    Not(NcclTimed),
    /// Its start is recorded.
    One(Taken),
    /// The group that it is in will launch it, for this communicator on this stream.
    Grouped(u32, u64),
    /// The starts of the group that it ends are recorded.
    Group,
}

/// Before a call into NCCL.
#[inline]
pub(crate) fn begin(enter: &NcclEnter) -> Timing {
    if !session::wants_nccl_timing() { Timing::None } else { begin_wanted(enter) }
}

#[cold]
fn begin_wanted(enter: &NcclEnter) -> Timing {
    let Some(op) = NcclOp::from_raw(enter.op) else { return Timing::None };
    let _errno = KeepErrno::new();
    match op {
        NcclOp::GroupEnd if enter.group_depth <= 1 => begin_group(enter.call),
        NcclOp::GroupSimulateEnd if enter.group_depth <= 1 => {
            forget_noted();
            Timing::None
        }
        _ if !launches(op) => Timing::None,
        _ if enter.group_depth > 0 => Timing::Grouped(enter.comm, enter.stream),
        _ => match start(enter.call, enter.comm, enter.stream) {
            Ok(taken) => Timing::One(taken),
            Err(why) => Timing::Not(why),
        },
    }
}

/// After it.
#[inline]
pub(crate) fn end(timing: Timing, result: i32) -> NcclTimed {
    if matches!(timing, Timing::None) { NcclTimed::No } else { end_wanted(timing, result) }
}

#[cold]
fn end_wanted(timing: Timing, result: i32) -> NcclTimed {
    let _errno = KeepErrno::new();
    let is_launched = result == SUCCESS;
    let timed = match timing {
        Timing::None => NcclTimed::No,
        Timing::Not(why) => why,
        Timing::Grouped(comm, stream) => {
            if is_launched || result == IN_PROGRESS {
                note(comm, stream);
            }
            return NcclTimed::No;
        }
        Timing::One(taken) => finish(taken, is_launched),
        Timing::Group => end_group(is_launched),
    };
    match result {
        SUCCESS => timed,
        IN_PROGRESS => NcclTimed::InProgress,
        _ => NcclTimed::No,
    }
}

fn launches(op: NcclOp) -> bool {
    use NcclOp::*;
    matches!(
        op,
        AllReduce
            | Broadcast
            | Reduce
            | AllGather
            | ReduceScatter
            | AlltoAll
            | Gather
            | Scatter
            | Send
            | Receive
            | PutSignal
            | Signal
            | WaitSignal
    )
}

/// Remembers what the thread's group will launch.
fn note(comm: u32, stream: u64) {
    let Some(mut lane) = lanes::lane(Start::OnlyIfLive) else { return };
    let noted = &mut lane.state().noted;
    if noted.places.iter().take(noted.n).any(|place| *place == (comm, stream)) {
        return;
    }
    match noted.places.get_mut(noted.n) {
        Some(place) => {
            *place = (comm, stream);
            noted.n += 1;
        }
        None => noted.is_full = true,
    }
}

fn forget_noted() {
    if let Some(mut lane) = lanes::lane(Start::OnlyIfLive) {
        let noted = &mut lane.state().noted;
        (noted.n, noted.is_full) = (0, false);
    }
}

/// All of the group's starts, or none.
fn begin_group(call: u64) -> Timing {
    let Some(mut lane) = lanes::lane(Start::OnlyIfLive) else { return Timing::None };
    let noted = &mut lane.state().noted;
    let (n, places) = (core::mem::take(&mut noted.n), noted.places);
    let mut why = core::mem::take(&mut noted.is_full).then_some(NcclTimed::NoEvents);
    // What goes wrong has a record of its own.
    drop(lane);
    if n == 0 {
        return Timing::None;
    }
    let mut taken = [None; MOST_NOTED];
    for (place, taken) in places.iter().zip(&mut taken).take(n) {
        if why.is_none() {
            match start(call, place.0, place.1) {
                Ok(started) => *taken = Some(started),
                Err(other) => why = Some(other),
            }
        }
    }
    if why.is_none()
        && let Some(mut lane) = lanes::lane(Start::OnlyIfLive)
    {
        lane.state().noted.taken = taken;
        return Timing::Group;
    }
    taken.into_iter().flatten().for_each(Taken::give_back);
    Timing::Not(why.unwrap_or(NcclTimed::Refused))
}

fn end_group(is_launched: bool) -> NcclTimed {
    let Some(mut lane) = lanes::lane(Start::OnlyIfLive) else { return NcclTimed::Refused };
    let taken = core::mem::replace(&mut lane.state().noted.taken, [None; MOST_NOTED]);
    drop(lane);
    let mut timed = NcclTimed::Enqueued;
    for taken in taken.into_iter().flatten() {
        let one = finish(taken, is_launched);
        timed = if one == NcclTimed::Enqueued { timed } else { one };
    }
    timed
}

/// Takes a pair and records its start.
fn start(call: u64, comm: u32, stream: u64) -> Result<Taken, NcclTimed> {
    if ENDING.load(Ordering::Relaxed) != 0 {
        return Err(NcclTimed::No);
    }
    let context = context_of(stream)?;
    let place = CONTEXTS.get(context).ok_or(NcclTimed::Refused)?;
    let taken = Taken::new(context, take(&place.free).ok_or(NcclTimed::NoEvents)?)?;
    let pair = taken.pair().ok_or(NcclTimed::Refused)?;
    let recorded = pair.make_events(place).and_then(|()| place.record(&pair.start, stream));
    if let Err(why) = recorded {
        taken.give_back();
        return Err(why);
    }
    pair.call.store(call, Ordering::Relaxed);
    pair.comm.store(comm, Ordering::Relaxed);
    pair.stream.store(stream, Ordering::Relaxed);
    Ok(taken)
}

/// Records the end, and leaves the pair to our thread.
fn finish(taken: Taken, is_launched: bool) -> NcclTimed {
    let (Some(context), Some(pair)) = (taken.context(), taken.pair()) else {
        return NcclTimed::Refused;
    };
    if is_launched && context.record(&pair.end, pair.stream.load(Ordering::Relaxed)).is_ok() {
        put(&context.waiting, taken.index());
        return NcclTimed::Enqueued;
    }
    taken.give_back();
    NcclTimed::Refused
}

impl Taken {
    fn new(context: usize, pair: usize) -> Result<Taken, NcclTimed> {
        let number = NonZeroU32::new((context * PAIRS + pair) as u32 + 1);
        number.map(Taken).ok_or(NcclTimed::Refused)
    }

    fn context(self) -> Option<&'static Context> {
        CONTEXTS.get((self.0.get() - 1) as usize / PAIRS)
    }

    fn index(self) -> usize {
        (self.0.get() - 1) as usize % PAIRS
    }

    fn pair(self) -> Option<&'static Pair> {
        self.context()?.pair(self.index())
    }

    fn give_back(self) {
        if let Some(context) = self.context() {
            put(&context.free, self.index());
        }
    }
}

/// The lowest pair: so that few are ever made.
fn take(set: &[AtomicU64; WORDS]) -> Option<usize> {
    for (index, word) in set.iter().enumerate() {
        let mut bits = word.load(Ordering::Relaxed);
        while bits != 0 {
            // SYNC: whoever takes a pair sees what was written to it before it was put there.
            match word.compare_exchange(bits, bits & (bits - 1), Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Some(index * 64 + bits.trailing_zeros() as usize),
                Err(now) => bits = now,
            }
        }
    }
    None
}

fn put(set: &[AtomicU64; WORDS], pair: usize) {
    if let Some(word) = set.get(pair / 64) {
        // SYNC: see `take`.
        word.fetch_or(1 << (pair % 64), Ordering::Release);
    }
}

impl Context {
    const fn new() -> Context {
        Context {
            state: AtomicU32::new(FREE),
            handle: AtomicUsize::new(0),
            device: AtomicI32::new(-1),
            pairs: AtomicPtr::new(null_mut()),
            free: [const { AtomicU64::new(0) }; WORDS],
            waiting: [const { AtomicU64::new(0) }; WORDS],
            base: AtomicUsize::new(0),
            base_at: AtomicU64::new(0),
        }
    }

    fn is(&self, state: u32) -> bool {
        self.state.load(Ordering::Acquire) == state
    }

    fn pair(&self, index: usize) -> Option<&'static Pair> {
        let pairs = self.pairs.load(Ordering::Acquire);
        // SAFETY: the memory has `PAIRS` of them, all zeros is a value of each, and it is never given back.
        (!pairs.is_null() && index < PAIRS).then(|| unsafe { &*pairs.add(index) })
    }

    fn record(&self, event: &AtomicUsize, stream: u64) -> Result<(), NcclTimed> {
        type Record = unsafe extern "C" fn(usize, u64) -> c_int;
        if !self.is(READY) {
            return Err(NcclTimed::Refused);
        }
        // SAFETY: the type is that of cuda.h 13.0, unchanged since 2.0; handles are pointers, as large as numbers.
        let Some(record) = (unsafe { AUXILIARY.event_record.get::<Record>() }) else {
            return Err(NcclTimed::Refused);
        };
        // SAFETY: the event is ours, of the stream's context; the stream is the program's, which NCCL uses in this moment.
        match unsafe { record(event.load(Ordering::Relaxed), stream) } {
            0 => Ok(()),
            error => Err(self.refused(b"cuEventRecord", error)),
        }
    }

    /// No more events in this context: what is wrong with it is the program's to find out.
    #[cold]
    fn refused(&self, function: &[u8], error: c_int) -> NcclTimed {
        if self.state.compare_exchange(READY, BAD, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            say_stopped(function, error);
        }
        NcclTimed::Refused
    }
}

#[cold]
fn say_stopped(function: &[u8], error: c_int) {
    if let Some(mut lane) = lanes::lane(Start::OnlyIfLive) {
        let text = Text::<192>::new()
            .add(b"nccl.timing=stopped: ")
            .add(function)
            .add(b" answered ")
            .number(error.unsigned_abs().into())
            .add(b"; later calls into NCCL on this context are not timed");
        let at = session::now();
        lane.producer().push_raw(at, Kind::Note, &[text.as_bytes()]);
    }
}

impl Pair {
    /// Makes those of its events that do not exist.
    fn make_events(&self, context: &Context) -> Result<(), NcclTimed> {
        let missing =
            || [&self.start, &self.end].into_iter().filter(|event| event.load(Ordering::Relaxed) == 0);
        if missing().next().is_none() {
            return Ok(());
        }
        if captures::are_open() {
            return Err(NcclTimed::Capture);
        }
        let _current = Current::set(context)?;
        missing().try_for_each(|event| {
            event.store(make_event(context)?, Ordering::Relaxed);
            Ok(())
        })
    }
}

fn make_event(context: &Context) -> Result<usize, NcclTimed> {
    type Create = unsafe extern "C" fn(*mut usize, u32) -> c_int;
    // SAFETY: the type is that of cuda.h 13.0, unchanged since 2.0.
    let Some(create) = (unsafe { AUXILIARY.event_create.get::<Create>() }) else {
        return Err(NcclTimed::Refused);
    };
    let mut event = 0;
    // SAFETY: the out-parameter is ours; 0 is CU_EVENT_DEFAULT, which keeps times.
    match unsafe { create(&raw mut event, 0) } {
        0 => Ok(event),
        error => Err(context.refused(b"cuEventCreate", error)),
    }
}

/// A context is the thread's current one, until dropped.
struct Current;

impl Current {
    fn set(context: &Context) -> Result<Current, NcclTimed> {
        type Push = unsafe extern "C" fn(usize) -> c_int;
        // SAFETY: the type is that of cuda.h 13.0, unchanged since 4.0.
        let Some(push) = (unsafe { AUXILIARY.context_push.get::<Push>() }) else {
            return Err(NcclTimed::Refused);
        };
        // SAFETY: the driver named this context, and nobody has destroyed it since.
        match unsafe { push(context.handle.load(Ordering::Relaxed)) } {
            0 => Ok(Current),
            error => Err(context.refused(b"cuCtxPushCurrent", error)),
        }
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        type Pop = unsafe extern "C" fn(*mut usize) -> c_int;
        // SAFETY: the type is that of cuda.h 13.0, unchanged since 4.0.
        if let Some(pop) = unsafe { AUXILIARY.context_pop.get::<Pop>() } {
            let mut context = 0;
            // SAFETY: the out-parameter is ours.
            unsafe { pop(&raw mut context) };
        }
    }
}

/// The place of a stream's context, made if it is new.
fn context_of(stream: u64) -> Result<usize, NcclTimed> {
    type IsCapturing = unsafe extern "C" fn(u64, *mut c_int) -> c_int;
    type StreamContext = unsafe extern "C" fn(u64, *mut usize) -> c_int;
    // SAFETY: the type is that of cuda.h 13.0, unchanged since 10.0.
    let is_capturing = unsafe { AUXILIARY.stream_is_capturing.get::<IsCapturing>() };
    // SAFETY: as above, since 9.2.
    let stream_context = unsafe { AUXILIARY.stream_context.get::<StreamContext>() };
    let (Some(is_capturing), Some(stream_context)) = (is_capturing, stream_context) else {
        return Err(NcclTimed::Refused);
    };
    let (mut status, mut handle) = (0, 0);
    // Captures may begin in ways that we do not see, so the driver is always asked; the question is legal then.
    // SAFETY: the program's own stream, which it gives to NCCL in this moment; the out-parameter is ours.
    match unsafe { is_capturing(stream, &raw mut status) } {
        0 if status == 0 => {}
        0 | CAPTURE_IMPLICIT => return Err(NcclTimed::Capture),
        _ => return Err(NcclTimed::Refused),
    }
    // SAFETY: as above.
    if unsafe { stream_context(stream, &raw mut handle) } != 0 || handle == 0 {
        return Err(NcclTimed::Refused);
    }
    let known = CONTEXTS.iter().position(|context| {
        context.handle.load(Ordering::Relaxed) == handle && (context.is(READY) || context.is(BAD))
    });
    let is_ours = SESSION.load(Ordering::Acquire) == session::generation();
    match known.filter(|_| is_ours) {
        Some(place) if CONTEXTS.get(place).is_some_and(|context| context.is(READY)) => Ok(place),
        Some(_) => Err(NcclTimed::Refused),
        None => make_context(handle),
    }
}

#[cold]
fn make_context(handle: usize) -> Result<usize, NcclTimed> {
    if !has_reader() {
        return Err(NcclTimed::Refused);
    }
    let claim = |context: &Context| {
        context.state.compare_exchange(FREE, MAKING, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    };
    let place = CONTEXTS.iter().position(claim).ok_or(NcclTimed::Refused)?;
    let context = CONTEXTS.get(place).ok_or(NcclTimed::Refused)?;
    let pairs = sys::pages(PAIRS * size_of::<Pair>()).cast::<Pair>();
    context.handle.store(handle, Ordering::Relaxed);
    if pairs.is_null() {
        context.state.store(BAD, Ordering::Release);
        return Err(NcclTimed::Refused);
    }
    context.pairs.store(pairs, Ordering::Relaxed);
    context.free.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
    context.base_at.store(BEGINNING as u64, Ordering::Relaxed);
    // SYNC: whoever sees it ready sees the rest.
    context.state.store(READY, Ordering::Release);
    if let Ok(current) = Current::set(context) {
        context.device.store(crate::probe::current_device().into(), Ordering::Relaxed);
        drop(current);
    }
    Ok(place)
}

/// Whether this process has the thread that reads the events: the first to ask starts it.
fn has_reader() -> bool {
    let now = session::generation();
    match SESSION.compare_exchange(0, now, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => start_reader(),
        // In a forked child CUDA does not work anyway.
        Err(known) => known == now,
    }
}

/// Every signal but SIGSYS (there), and 32 and 33, by which the C library cancels threads and changes user ids: `setuid` waits until every
/// thread has answered.
const OF_PROGRAMS: kernel::SignalSet = kernel::MOST_SIGNALS & !(3 << 31);

#[cold]
fn start_reader() -> bool {
    type Init = unsafe extern "C" fn(*mut libc::pthread_attr_t) -> c_int;
    type SetDetached = unsafe extern "C" fn(*mut libc::pthread_attr_t, c_int) -> c_int;
    let names = [c"pthread_attr_init", c"pthread_attr_setdetachstate", c"pthread_attr_destroy"];
    let [Some(init), Some(set_detached), Some(destroy)] = names.map(elf::c_library) else { return false };
    // SAFETY: the C library's function of this name has this type.
    let init: Init = unsafe { core::mem::transmute(init) };
    // SAFETY: as above.
    let set_detached: SetDetached = unsafe { core::mem::transmute(set_detached) };
    // SAFETY: as above.
    let destroy: Init = unsafe { core::mem::transmute(destroy) };
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    // SAFETY: the attributes are ours.
    if unsafe { init(attributes.as_mut_ptr()) } != 0 {
        return false;
    }
    // SAFETY: initialised just now.
    unsafe { set_detached(attributes.as_mut_ptr(), libc::PTHREAD_CREATE_DETACHED) };
    // The thread inherits the mask: the program's signals are for its own threads.
    let before = kernel::block_signals(OF_PROGRAMS);
    let is_started = threads::create_own(attributes.as_ptr().cast(), read_events);
    kernel::block_signals(before);
    // SAFETY: initialised above.
    unsafe { destroy(attributes.as_mut_ptr()) };
    if is_started {
        // Registered after the driver's own, this runs before it: while the driver still works.
        if let Some(address) = elf::c_library(c"__cxa_atexit") {
            // SAFETY: the C library's function of this name has this type.
            let at_end: AtEnd = unsafe { core::mem::transmute(address) };
            // SAFETY: the function is never unloaded: a preloaded library stays.
            unsafe { at_end(at_exit, null_mut(), null_mut()) };
        }
    }
    is_started
}

/// `__cxa_atexit(function, argument, library)`, Itanium C++ ABI 3.3.6; `atexit` of a library is not in libc.so.6.
type AtEnd = unsafe extern "C" fn(extern "C" fn(*mut c_void), *mut c_void, *mut c_void) -> c_int;

/// Reads what is done already, and lets no more be recorded.
extern "C" fn at_exit(_: *mut c_void) {
    let _errno = KeepErrno::new();
    if SESSION.load(Ordering::Acquire) != session::generation() {
        return;
    }
    let _ = ENDING.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed);
    for _ in 0..LAST_WAIT {
        if ENDING.load(Ordering::Acquire) == 2 {
            return;
        }
        kernel::sleep(1_000_000);
    }
}

/// The thread.
unsafe extern "C" fn read_events(_: *mut c_void) -> *mut c_void {
    type Exchange = unsafe extern "C" fn(*mut c_int) -> c_int;
    let name = [libc::PR_SET_NAME as usize, c"gputrace-nccl".as_ptr() as usize, 0, 0, 0, 0];
    // SAFETY: the name ends with a zero and has fewer than 16 bytes.
    let _ = unsafe { kernel::call(libc::SYS_prctl, name) };
    let mut mode = RELAXED;
    // SAFETY: the type is that of cuda.h 13.0, unchanged since 10.1.
    let exchange = unsafe { AUXILIARY.exchange_capture_mode.get::<Exchange>() };
    // SAFETY: the parameter is ours. -1 where there is no such function.
    let result = exchange.map_or(-1, |exchange| unsafe { exchange(&raw mut mode) });
    if result != 0 {
        session::end_nccl_timing();
        ENDING.store(2, Ordering::Release);
        say_stopped(b"cuThreadExchangeStreamCaptureMode", result);
        return null_mut();
    }
    while session::generation() == SESSION.load(Ordering::Relaxed) {
        if ENDING.load(Ordering::Acquire) == 1 {
            last_look();
            ENDING.store(2, Ordering::Release);
            break;
        }
        look();
        kernel::sleep(PAUSE);
    }
    null_mut()
}

fn last_look() {
    for _ in 0..LAST_LOOK {
        if look() == 0 {
            return;
        }
        kernel::sleep(1_000_000);
    }
}

/// Reads what is done; how many are not.
fn look() -> u32 {
    INSIDE.store(1, Ordering::SeqCst);
    let mut left = 0;
    for (timeline, context) in CONTEXTS.iter().enumerate() {
        let is_safe = CLOSED.load(Ordering::SeqCst) == 0 && !captures::are_open();
        if is_safe && context.is(READY) {
            left += look_at(timeline as u32, context);
        }
    }
    INSIDE.store(0, Ordering::SeqCst);
    left
}

fn look_at(timeline: u32, context: &Context) -> u32 {
    type Query = unsafe extern "C" fn(usize) -> c_int;
    let mut left = 0;
    // SAFETY: the type is that of cuda.h 13.0, unchanged since 2.0.
    let Some(query) = (unsafe { AUXILIARY.event_query.get::<Query>() }) else { return 0 };
    if context.waiting.iter().all(|word| word.load(Ordering::Relaxed) == 0) {
        return 0;
    }
    let Ok(_current) = Current::set(context) else { return 0 };
    for (index, word) in context.waiting.iter().enumerate() {
        let mut bits = word.load(Ordering::Acquire);
        while bits != 0 {
            let bit = bits.trailing_zeros();
            bits &= bits - 1;
            let at = index * 64 + bit as usize;
            let Some(pair) = context.pair(at) else { return left };
            // SAFETY: the event is ours, and was recorded.
            match unsafe { query(pair.end.load(Ordering::Relaxed)) } {
                0 => {}
                NOT_READY => {
                    left += 1;
                    continue;
                }
                error => {
                    context.refused(b"cuEventQuery", error);
                    return left;
                }
            }
            word.fetch_and(!(1 << bit), Ordering::AcqRel);
            if let Some(timing) = measure(timeline, context, pair)
                && let Some(mut lane) = lanes::lane(Start::OnlyIfLive)
            {
                lane.producer().push(session::now(), 0, &timing);
            }
            put(&context.free, at);
        }
    }
    left
}

/// What the events of a pair say, both of which are done.
fn measure(timeline: u32, context: &Context, pair: &Pair) -> Option<NcclTiming> {
    let start = pair.start.load(Ordering::Relaxed);
    let duration = elapsed(start, pair.end.load(Ordering::Relaxed))?;
    let base = context.base.load(Ordering::Relaxed);
    let base_at = context.base_at.load(Ordering::Relaxed) as i64;
    let since = if base == 0 { 0 } else { elapsed(base, start)? };
    let at = base_at.saturating_add(since);
    if base == 0 || since > REBASE {
        // The pair gets the event that is no longer counted from, if there was one.
        context.base.store(start, Ordering::Relaxed);
        context.base_at.store(at as u64, Ordering::Relaxed);
        pair.start.store(base, Ordering::Relaxed);
    }
    Some(NcclTiming {
        call: pair.call.load(Ordering::Relaxed),
        comm: pair.comm.load(Ordering::Relaxed),
        timeline,
        stream: pair.stream.load(Ordering::Relaxed),
        start: at.max(0) as u64,
        duration: duration.max(0) as u64,
    })
}

/// Nanoseconds between two events that are done.
fn elapsed(from: usize, to: usize) -> Option<i64> {
    type Elapsed = unsafe extern "C" fn(*mut f32, usize, usize) -> c_int;
    let mut milliseconds = 0.0_f32;
    // SAFETY: the type is that of cuda.h 13.0; the second one came with 12.8.
    let new = unsafe { AUXILIARY.event_elapsed_v2.get::<Elapsed>() };
    // SAFETY: as above, unchanged since 2.0.
    let elapsed = new.or(unsafe { AUXILIARY.event_elapsed.get::<Elapsed>() })?;
    // SAFETY: both events are ours and done; the out-parameter is ours.
    let result = unsafe { elapsed(&raw mut milliseconds, from, to) };
    (result == 0).then_some((f64::from(milliseconds) * 1e6) as i64)
}

/// What is destroyed.
#[derive(Clone, Copy)]
pub(crate) enum Going {
    /// This context.
    Context(u64),
    /// The primary context of this device, whoever holds it.
    Reset(i32),
    /// The primary context of this device, if nobody else holds it.
    Released(i32),
}

/// Runs what may destroy contexts, while our thread is not in the driver, and forgets the events that went with them.
#[inline]
pub(crate) fn around_destruction(going: Going, run: impl FnOnce() -> i32) -> i32 {
    if !session::wants_nccl_timing() || SESSION.load(Ordering::Relaxed) != session::generation() {
        return run();
    }
    close();
    let result = run();
    if result == 0 {
        forget(going);
    }
    CLOSED.fetch_sub(1, Ordering::SeqCst);
    result
}

#[cold]
fn close() {
    let _errno = KeepErrno::new();
    CLOSED.fetch_add(1, Ordering::SeqCst);
    for _ in 0..GATE_PATIENCE {
        if INSIDE.load(Ordering::SeqCst) == 0 {
            return;
        }
        kernel::sleep(50_000);
    }
}

#[cold]
fn forget(going: Going) {
    let is_it = |context: &&Context| match going {
        Going::Context(handle) => context.handle.load(Ordering::Relaxed) as u64 == handle,
        Going::Reset(device) => context.device.load(Ordering::Relaxed) == device,
        Going::Released(device) => context.device.load(Ordering::Relaxed) == device && !is_alive(device),
    };
    for context in CONTEXTS.iter().filter(|context| !context.is(FREE)).filter(is_it) {
        context.state.store(GONE, Ordering::Release);
        context.handle.store(0, Ordering::Relaxed);
    }
}

/// Whether the device's primary context has outlived what was done to it.
fn is_alive(device: c_int) -> bool {
    type State = unsafe extern "C" fn(c_int, *mut u32, *mut c_int) -> c_int;
    let (mut flags, mut is_active) = (0, 0);
    // SAFETY: the type is that of cuda.h 13.0, unchanged since 7.0.
    let Some(state) = (unsafe { AUXILIARY.primary_state.get::<State>() }) else { return false };
    // SAFETY: the out-parameters are ours.
    unsafe { state(device, &raw mut flags, &raw mut is_active) == 0 && is_active != 0 }
}
