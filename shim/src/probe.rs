//! What a hook may do: call the real function, and say what happened.
//!
//! Memory given out is stamped after the real call, memory taken back before it: another thread may be handed the
//! same address before this one has returned.

use crate::auxiliary::AUXILIARY;
use crate::callsite;
use crate::captures;
use crate::device_code::{self, Told};
use crate::devices;
use crate::lanes::{self, Lane};
use crate::ledger::{self, Noted};
use crate::mark;
use crate::session::{self, Start};
use crate::tls;
use core::ffi::c_int;
use gputrace_ring::clock::Ticks;
use gputrace_ring::record::{Action, Call, CallEnd};
use gputrace_ring::ring::Pushed;

/// `Call::device` of what is not on any device.
const UNKNOWN_DEVICE: i8 = -1;
const HOST: i8 = -2;
/// `CUmemLocationType`, cuda.h 13.0.
const LOCATION_DEVICE: i32 = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN`, cuda.h 13.5: a part of a device, whose ordinal is the first byte of the id.
const LOCATION_PART_OF_DEVICE: i32 = 6;
const LOCATION_HOSTS: core::ops::RangeInclusive<i32> = 2..=4;
/// `CU_STREAM_PER_THREAD`, cuda.h 13.0.
const PER_THREAD_STREAM: u64 = 2;
/// `CUDA_ERROR_OUT_OF_MEMORY`, cuda.h 13.0.
const OUT_OF_MEMORY: i32 = 2;

/// Calls a function that gives something out, and records it.
#[inline]
pub(crate) fn acquire(
    start: Start,
    row: u16,
    action: Action,
    run: impl FnOnce() -> i32,
    fill: impl FnOnce(&mut Draft, bool),
) -> i32 {
    if session::is_asleep() {
        return if ledger::given(action).is_none() || !ledger::is_kept() {
            run()
        } else {
            acquire_asleep(start, row, action, run, fill)
        };
    }
    let mark = Mark::new();
    let Some(inside) = enter(&mark) else { return run() };
    device_code::note(action);
    let begin = session::now();
    let result = run();
    drop(inside);
    device_code::note(action);
    // What fails before there is a session (no device, not initialised) is no business of ours.
    let start = if result == 0 || result == OUT_OF_MEMORY { start } else { Start::OnlyIfLive };
    let mut draft = Draft::new(row, action);
    fill(&mut draft, result == 0);
    let code = (result == 0 && action == Action::FunctionLoad).then(|| Told::of(row, draft.call.handle));
    if code.is_some_and(Told::is_known) {
        return result;
    }
    let end = session::now();
    draft.call.result = result;
    let lane = lanes::lane(start);
    let mut noted = None;
    if ledger::is_kept() && ledger::given(action).is_some() {
        let session = lane.as_ref().map_or(0, |lane| lane.session() as u32);
        noted = draft.note(end, session);
    }
    // Where a session has begun meanwhile, one of us tells it.
    let begun = |noted: Noted| {
        let lane = lanes::lane(Start::OnlyIfLive)?;
        noted.is_mine_to_tell(lane.session() as u32).then_some(lane)
    };
    let lane = lane.or_else(|| noted.and_then(begun));
    let Some(mut lane) = lane else { return result };
    draft.call.duration = u32::try_from(end.0.saturating_sub(begin.0)).unwrap_or(u32::MAX);
    if result == 0 && makes_mappings(action) {
        lane.mappings_changed();
    }
    let sent = draft.send(&mut lane);
    if let (Some(code), Pushed::Yes) = (code, sent) {
        code.remember();
    }
    result
}

/// As [`acquire`] while nobody records: what was given out is remembered, and recorded only if a session has begun meanwhile.
#[inline]
fn acquire_asleep(
    start: Start,
    row: u16,
    action: Action,
    run: impl FnOnce() -> i32,
    fill: impl FnOnce(&mut Draft, bool),
) -> i32 {
    let mark = Mark::new();
    let Some(inside) = enter(&mark) else { return run() };
    let result = run();
    drop(inside);
    if result != 0 && session::is_asleep() {
        return result;
    }
    let mut draft = Draft::new(row, action);
    fill(&mut draft, result == 0);
    draft.call.result = result;
    let noted = draft.note(session::about_now(), 0);
    if session::is_asleep() {
        return result;
    }
    woken(start, draft, noted);
    result
}

/// A call that began asleep ends awake: where a session has begun meanwhile, either it has been told what was noted, or we tell it.
#[cold]
#[inline(never)]
fn woken(start: Start, draft: Draft, noted: Option<Noted>) {
    let Some(mut lane) = lanes::lane(start) else { return };
    let is_ours = noted.is_none_or(|noted| noted.is_mine_to_tell(lane.session() as u32));
    if !is_ours {
        return;
    }
    if draft.call.result == 0 && Action::from_raw(draft.call.action).is_some_and(makes_mappings) {
        lane.mappings_changed();
    }
    draft.send(&mut lane);
}

/// Records that a function takes something back, and calls it.
#[inline]
pub(crate) fn release(
    row: u16,
    action: Action,
    run: impl FnOnce() -> i32,
    fill: impl FnOnce(&mut Draft, bool),
) -> i32 {
    let is_kept = ledger::taken(action).is_some() && ledger::is_kept();
    if session::is_asleep() && !is_kept {
        return run();
    }
    let mark = Mark::new();
    let Some(inside) = enter(&mark) else { return run() };
    let mut draft = Draft::new(row, action);
    let early = if is_kept { None } else { lanes::lane(Start::OnlyIfLive) };
    if early.is_none() && !is_kept {
        return run();
    }
    fill(&mut draft, true);
    let told = if is_kept { ledger::forget(&draft.call, session::about_now) } else { None };
    // After that: a session that begins from here on is told nothing of it.
    if session::is_asleep() {
        return run();
    }
    let Some(mut lane) = early.or_else(|| lanes::lane(Start::OnlyIfLive)) else { return run() };
    // A session that was never told of it needs no word of its end.
    if told.is_some_and(|told| told != lane.session() as u32) {
        drop(lane);
        return run();
    }
    // Freeing null is legal, and a common way to make a context.
    if draft.call.addr == 0 && draft.call.handle == 0 && draft.call.extra == 0 {
        drop(lane);
        return run();
    }
    draft.call.flags |= Call::OPEN;
    let key = if draft.call.addr == 0 { draft.call.handle } else { draft.call.addr };
    let begin = session::now();
    draft.send(&mut lane);
    // The program may free from a signal handler while the driver works.
    drop(lane);
    device_code::note(action);
    let result = run();
    drop(inside);
    device_code::note(action);
    if let Some(mut lane) = lanes::lane(Start::OnlyIfLive) {
        let end = session::now();
        let duration = end.0.saturating_sub(begin.0);
        lane.producer().push(end, 0, &CallEnd { api: row, reserved: 0, result, addr: key, duration });
    }
    result
}

/// No hook's frame has so many bytes beside its mark.
const ROOM: usize = 1024;

/// The thread is inside a real function, and what the driver calls of itself there is not the program's doing.
type Mark = mark::Mark<ROOM>;

struct Inside<'a>(&'a Mark);

/// `None` if the driver called the hook.
#[inline]
fn enter(mark: &Mark) -> Option<Inside<'_>> {
    let tls = tls::here();
    if tls.inside.get() != 0 && Mark::is_around(tls, tls.inside.get(), mark.top()) {
        return None;
    }
    tls.inside.set(mark.put(tls));
    Some(Inside(mark))
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        tls::here().inside.set(0);
        self.0.take_away();
    }
}

/// Whether success may have changed the process's address space.
fn makes_mappings(action: Action) -> bool {
    matches!(
        action,
        Action::Alloc
            | Action::AllocManaged
            | Action::AllocHost
            | Action::Reserve
            | Action::PrimaryRetain
            | Action::ContextCreate
    )
}

/// A call record in the making. Each method fills one field; later ones win.
pub(crate) struct Draft {
    call: Call,
    device_known: bool,
}

/// What fits into a field.
pub(crate) trait Word {
    /// As the eight bytes of the record.
    fn word(self) -> u64;
}

macro_rules! words {
    ($($type:ty),*) => { $( impl Word for $type { fn word(self) -> u64 { self as u64 } } )* };
}
words!(u64, usize, u32, i32);

impl<T> Word for *const T {
    fn word(self) -> u64 {
        self as u64
    }
}

impl<T> Word for *mut T {
    fn word(self) -> u64 {
        self as u64
    }
}

impl Draft {
    fn new(row: u16, action: Action) -> Draft {
        let call = Call { api: row, action: action as u8, device: UNKNOWN_DEVICE, ..Call::default() };
        Draft { call, device_known: false }
    }

    /// Device or host address.
    pub(crate) fn addr(&mut self, value: impl Word) {
        self.call.addr = value.word();
    }

    /// Bytes asked for.
    pub(crate) fn bytes(&mut self, value: impl Word) {
        self.call.bytes = value.word();
    }

    /// Multiplies the bytes: the pitch of as many rows as were given as bytes.
    pub(crate) fn times(&mut self, value: impl Word) {
        self.call.bytes = self.call.bytes.saturating_mul(value.word());
    }

    /// The stream as given.
    pub(crate) fn stream(&mut self, value: impl Word) {
        self.call.stream = value.word();
    }

    /// The stream of a function whose null stream is the thread's own.
    pub(crate) fn thread_stream(&mut self, value: impl Word) {
        let stream = value.word();
        self.call.stream = if stream == 0 { PER_THREAD_STREAM } else { stream };
    }

    /// A handle.
    pub(crate) fn handle(&mut self, value: impl Word) {
        self.call.handle = value.word();
    }

    /// The second number.
    pub(crate) fn extra(&mut self, value: impl Word) {
        self.call.extra = value.word();
    }

    /// A device ordinal, where the function names one.
    pub(crate) fn device(&mut self, value: i32) {
        self.call.device = i8::try_from(value).unwrap_or(UNKNOWN_DEVICE);
        self.device_known = true;
    }

    /// Memory of the host.
    pub(crate) fn host(&mut self, (): ()) {
        self.call.device = HOST;
        self.call.flags |= Call::HOST;
        self.device_known = true;
    }

    /// A `CUmemLocation`: type and id. What is not a device is the host, or unknown.
    pub(crate) fn location(&mut self, (kind, id): (i32, i32)) {
        match kind {
            LOCATION_DEVICE => self.device(id),
            LOCATION_PART_OF_DEVICE => self.device(id & 0xff),
            kind if LOCATION_HOSTS.contains(&kind) => self.host(()),
            _ => self.device_known = true,
        }
    }

    /// Has the call remembered for who attaches later.
    fn note(&mut self, at: Ticks, session: u32) -> Option<Noted> {
        if !self.device_known && self.call.result == 0 {
            self.device(devices::only().unwrap_or_else(|| current_device().into()));
        }
        let tls = tls::here();
        if tls.capturing.get() != 0 {
            self.call.flags |= Call::CAPTURED;
        }
        if tls.is_in_allocate() {
            self.call.flags |= Call::IN_ALLOCATE;
        }
        ledger::note(&self.call, at, session)
    }

    fn gives_graph_memory(&self) -> bool {
        let is_captured = self.call.flags & Call::CAPTURED != 0;
        let (succeeded, action) = (self.call.result == 0, self.call.action);
        let gives = action == Action::GraphAlloc as u8 || (is_captured && action == Action::AllocAsync as u8);
        succeeded && gives
    }

    fn send(mut self, lane: &mut Lane) -> Pushed {
        if !self.device_known {
            self.call.device = current_device();
        }
        let tls = tls::here();
        if tls.capturing.get() != 0 {
            self.call.flags |= Call::CAPTURED;
        }
        if self.gives_graph_memory() {
            captures::note_graph_memory();
        }
        if tls.is_in_allocate() {
            self.call.flags |= Call::IN_ALLOCATE;
        }
        crate::nccl::threads::charge(&mut self.call, tls);
        // Whose memory it is shows in the frames: driver calls have some even where nobody asked for stacks.
        self.call.stack = callsite::capture(lane, callsite::Of::DriverCall);
        let at = session::now();
        lane.producer().push_call(at, &self.call)
    }
}

/// Ordinal of the thread's current device. `cuCtxGetDevice` reads thread-local state and is legal during capture.
pub(crate) fn current_device() -> i8 {
    type ContextDevice = unsafe extern "C" fn(*mut c_int) -> c_int;
    let mut device = -1;
    // SAFETY: the type is that of cuda.h 13.0, unchanged since 2.0.
    let Some(context_device) = (unsafe { AUXILIARY.context_device.get::<ContextDevice>() }) else {
        return UNKNOWN_DEVICE;
    };
    // SAFETY: the out-parameter is ours; it is read only after success.
    if unsafe { context_device(&raw mut device) } != 0 {
        return UNKNOWN_DEVICE;
    }
    i8::try_from(device).unwrap_or(UNKNOWN_DEVICE)
}
