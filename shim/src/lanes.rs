//! Lanes: a thread's right to write, the thread line that it owns, and what it keeps beyond its own words.
//!
//! Whose a line is, is written in this process's own memory ([`OWNERS`]). A thread that ends gives its line back; one that cannot is
//! found to be gone by the recorder, claim by claim ([`gputrace_ring::owners`]), and who comes next finishes what it left. No thread makes
//! a system call for any of that: the program may be under a sandbox by now.

use crate::session::{self, Describe, Start};
use crate::sys::{self, KeepErrno, Text};
use crate::thread_state::Rest;
use crate::tls::{self, Tls};
use crate::{
    asked, closers, devices, early_pools, ends, kernel, ledger, nvtx, own, reserved, thread_id, words,
};
use core::ffi::c_void;
use core::mem::MaybeUninit;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, compiler_fence};
use gputrace_ring::map::{self, Map};
use gputrace_ring::owners::{Claim, Owners};
use gputrace_ring::record::Kind;
use gputrace_ring::ring::{Producer, Wish};

/// Lines that a thread looks at when it comes, for what others left that are gone.
const LOOKED_AT: u32 = 8;
/// Nanoseconds between two searches, for chunks or for lines of threads that are gone, where the last found none.
const SEARCH_EVERY: u64 = 50_000_000;
/// The kernel puts at least so much on a stack before it runs a signal handler: the red zone, the registers and what the
/// handler is told (x86-64: 128 + 512 + 424 bytes and more; aarch64: over 4 KiB).
const SIGNAL_FRAME: usize = 1024;

static OWNERS: Owners = Owners::new();
/// One block a thread line: a line's next owner finds the memory of the last, so that threads that come and go
/// leave nothing behind.
static STATES: [AtomicPtr<ThreadState>; map::MAX_THREADS] =
    [const { AtomicPtr::new(null_mut()) }; map::MAX_THREADS];

/// Bytes of a line's memory: whole pages.
const STATE_BYTES: usize = size_of::<ThreadState>().next_multiple_of(4096);
/// Threads of the claims, for a session that begins while they are held.
static THREADS: [AtomicU32; map::MAX_THREADS] = [const { AtomicU32::new(0) }; map::MAX_THREADS];

/// What a thread keeps beyond its own words.
pub(crate) struct ThreadState {
    /// Session of the producer; 0 none. Another one's is never touched: a forked child has a copy of its parent's.
    generation: AtomicU64,
    line: u32,
    /// An event is being recorded. An owner that is gone and left it so may have left anything half done.
    is_recording: AtomicU32,
    producer: MaybeUninit<Producer>,
    rest: Rest,
}

/// The right to write records for the calling thread, until dropped.
pub(crate) struct Lane {
    tls: &'static Tls,
}

impl Lane {
    /// The thread begins to record an event; its state is there. `None` if its session has ended just now.
    #[inline(always)]
    fn open(tls: &'static Tls) -> Option<Lane> {
        // SAFETY: only this thread reaches its state but for the atomics, and `busy` lets it have one lane at a time.
        let state = unsafe { &*tls.state.get().cast::<ThreadState>() };
        state.is_recording.store(1, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        // Who ends a session looks for the mark after that (`rings`): one of us sees the other.
        if session::generation() != tls.generation.get() {
            state.is_recording.store(0, Ordering::Relaxed);
            tls.busy.set(0);
            return None;
        }
        Some(Lane { tls })
    }

    /// The calling thread's end of the ring.
    pub(crate) fn producer(&mut self) -> &mut Producer {
        // SAFETY: `attach` filled it before it let anyone have a lane.
        unsafe { self.all().producer.assume_init_mut() }
    }

    /// Which session it writes to; another may have begun since.
    pub(crate) fn session(&self) -> u64 {
        self.tls.generation.get()
    }

    /// The thread's other memory.
    pub(crate) fn state(&mut self) -> &mut Rest {
        &mut self.all().rest
    }

    fn all(&mut self) -> &mut ThreadState {
        // SAFETY: only this thread reaches its state, and `busy` lets it have one lane at a time.
        unsafe { &mut *self.tls.state.get().cast::<ThreadState>() }
    }

    /// The thread's end of the ring, and the rest of its state.
    pub(crate) fn parts(&mut self) -> (&mut Producer, &mut Rest) {
        let state = self.all();
        // SAFETY: `attach` filled it before it let anyone have a lane.
        (unsafe { state.producer.assume_init_mut() }, &mut state.rest)
    }

    #[cold]
    #[inline(never)]
    fn follow(&mut self, wish: Wish) {
        match wish {
            Wish::Complete => self.producer().complete(),
            Wish::FindChunks => {
                self.producer().heard();
                let (map, line) = (*self.producer().map(), self.all().line);
                find_chunks(map, line);
            }
        }
    }

    /// While a thread seems to be inside of `dlclose`: asks whether it is.
    pub(crate) fn look_for_left_closers(&self) {
        closers::look_for_left(self.tls, self.tls.busy.get());
    }

    /// The process got new memory from the driver.
    pub(crate) fn mappings_changed(&mut self) {
        self.producer().map().header().mappings.value.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if let Some(wish) = self.producer().wish() {
            self.follow(wish);
        }
        compiler_fence(Ordering::SeqCst);
        self.all().is_recording.store(0, Ordering::Release);
        self.tls.busy.set(0);
    }
}

/// The calling thread's lane. `None` if there is no session (see [`Start`]), if we stepped aside, or in a signal
/// handler that interrupted another event of this thread, which is counted as a loss.
#[inline(always)]
#[unsafe(link_section = "gputrace_hot")]
pub(crate) fn lane(start: Start) -> Option<Lane> {
    let tls = tls::here();
    if session::is_asked() && tls.busy.get() == 0 && !words::has_servant() {
        session::obey(DESCRIBE);
    }
    let generation = session::generation();
    if generation == session::OFF || (generation == 0 && start == Start::OnlyIfLive) {
        return None;
    }
    let sp = tls::stack_pointer();
    if tls.busy.get() != 0 && !was_torn_away(tls, sp) {
        return None;
    }
    tls.busy.set(sp);
    compiler_fence(Ordering::SeqCst);
    if generation != 0 && tls.generation.get() == generation {
        return Lane::open(tls);
    }
    attach(tls, start)
}

/// Whether the event that this thread was recording will never end, because a signal handler left it by `longjmp` or by an
/// exception. Where that is not certain the event still goes on, we are in the handler, and lose what we were called for.
///
/// A handler that was called inside the event stands below it on its stack, by at least [`SIGNAL_FRAME`], or on the stack
/// set aside for signals. Whoever calls from elsewhere cannot have been called by the event. (A handler that switches to
/// another coroutine in the middle of our code is not told apart from that; handlers may not do that anywhere.)
#[cold]
#[inline(never)]
fn was_torn_away(tls: &Tls, sp: usize) -> bool {
    own::take_leave();
    let was_torn = sp > tls.busy.get().saturating_sub(SIGNAL_FRAME) && !asked::is_on_signal_stack();
    if was_torn {
        // What it left may be half done: all of it is made anew.
        tls.generation.set(0);
    } else {
        count_nested(tls);
    }
    was_torn
}

/// Counts an event of a signal handler that is lost.
fn count_nested(tls: &Tls) {
    let state: *const ThreadState = tls.state.get().cast();
    if state.is_null() {
        return;
    }
    // SAFETY: blocks stay mapped, and this word is an atomic.
    let mark = unsafe { &(*state).is_recording };
    // What was interrupted may not have set it yet, or no more.
    let before = mark.swap(1, Ordering::Relaxed);
    compiler_fence(Ordering::SeqCst);
    if let Some((map, generation)) = session::current()
        && tls.generation.get() == generation
    {
        map.header().lost_nested.add(0);
    }
    mark.store(before, Ordering::Release);
}

/// Gives a thread its line, and the process its session if `start` allows.
#[cold]
#[inline(never)]
fn attach(tls: &'static Tls, start: Start) -> Option<Lane> {
    let _errno = KeepErrno::new();
    let is_first = !session::is_live();
    let lane = come(tls, start, is_first);
    let Some(mut lane) = lane else {
        tls.busy.set(0);
        return None;
    };
    if is_first {
        devices::describe(lane.producer());
    }
    if session::takes_facts() {
        crate::describe_facts(lane.producer());
        devices::describe(lane.producer());
    }
    let (producer, rest) = lane.parts();
    early_pools::catch_up(producer);
    nvtx::catch_up(producer, &mut rest.texts);
    Some(lane)
}

/// The part of [`attach`] in which no mark of the thread's own says that it is in the ring.
fn come(tls: &'static Tls, start: Start, is_first: bool) -> Option<Lane> {
    let _coming = session::Coming::new()?;
    if is_first && !(start == Start::IfNeeded && session::begin(DESCRIBE)) {
        return None;
    }
    let (map, generation) = session::current()?;
    if !attach_thread(tls, map, generation) {
        map.header().lost_threads.add(0);
        return None;
    }
    Lane::open(tls)
}

/// Whether a thread is in the middle of an event of this session, which is over. Threads that are gone are not.
fn is_writing(generation: u64) -> bool {
    let own = session::tag();
    (0..).zip(&STATES).zip(&THREADS).any(|((line, slot), thread)| {
        let state: *const ThreadState = slot.load(Ordering::Acquire);
        if state.is_null() {
            return false;
        }
        // SAFETY: blocks stay mapped, and these words are atomics.
        let (mark, session) = unsafe { (&(*state).is_recording, &(*state).generation) };
        mark.load(Ordering::Acquire) != 0
            && session.load(Ordering::Acquire) == generation
            && OWNERS.word(own, line).is_some()
            && !kernel::is_task_gone(thread.load(Ordering::Relaxed))
    })
}

/// A library that came late sleeps from the start.
pub(crate) fn fall_asleep() {
    if !session::has_control() {
        session::begin(DESCRIBE);
    }
}

/// Tries to unmap the rings of sessions that are over, for a thread that is not on its way to a line; false if one stays.
pub(crate) fn give_rings_back() -> bool {
    session::give_rings_back(0, is_writing)
}

/// Does what somebody asks who attaches or detaches.
pub(crate) fn obey() {
    if session::is_asked() {
        session::obey(DESCRIBE);
    }
}

const DESCRIBE: Describe = Describe {
    prepare,
    process: describe_process,
    names: describe_names,
    living: describe_living,
    is_writing,
};

/// Tells a session of what was given out while the library slept, on a line of its own.
fn describe_living(map: Map, generation: u64) {
    on_own_line(map, |producer| {
        let at = session::now();
        let told = ledger::tell(producer, generation as u32);
        let (_, unknown) = ledger::counts();
        let note = Text::<160>::new().add(b"attach.before=").number(told).add(b" known, ");
        let note = note.number(unknown).add(b" not remembered");
        producer.push_raw(at, Kind::Note, &[note.as_bytes()]);
        if let Some(age) = age(map) {
            let note = Text::<64>::new().add(b"attach.after_ns=").number(age);
            producer.push_raw(at, Kind::Note, &[note.as_bytes()]);
        }
    });
}

/// How long the process ran before, in nanoseconds; `None` where its start is not known.
fn age(map: Map) -> Option<u64> {
    /// Of the clock ticks in which `/proc` says when a process began: `USER_HZ` is 100 on these processors.
    const TICK: u64 = 10_000_000;
    let started = map.header().start_time.load(Ordering::Relaxed);
    let now = gputrace_ring::clock::nanos(libc::CLOCK_BOOTTIME);
    if started == 0 { None } else { now.checked_sub(started.saturating_mul(TICK)) }
}

/// Describes the process on a line of its own before there is a session of this generation: the starting thread's own line
/// comes with its first event.
fn describe_process(map: Map, _generation: u64) {
    on_own_line(map, |producer| {
        crate::describe_names(producer);
        crate::describe_facts(producer);
    });
}

/// As [`describe_process`], by a child that shares our memory: it has no thread-local words, and must not take the loader's lock.
fn describe_names(map: Map, _generation: u64) {
    on_own_line(map, crate::describe_names);
}

/// Gets what threads need later: memory of their lines, and a way to know that they end.
fn prepare() {
    ends::learn(end_thread);
    reserved::prepare(STATE_BYTES);
}

/// Has something written on a line that is nobody's before and after. While a session begins: the kernel may be asked.
fn on_own_line(map: Map, write: impl FnOnce(&mut Producer)) {
    let session = session::tag();
    // What others hold since an earlier session is looked after in this one.
    for (line, tid) in (0..).zip(&THREADS) {
        if let Some(word) = OWNERS.word(session, line) {
            map.tenure(line).publish(word, tid.load(Ordering::Relaxed));
        }
    }
    // Nobody's thread in the ring: whoever writes here is never taken for gone.
    let Some(claim) = OWNERS.take(session, |_| true) else { return };
    let mut producer = Producer::new(map, claim.line, kernel::thread_id());
    write(&mut producer);
    producer.complete();
    OWNERS.give_back(session, claim);
}

fn attach_thread(tls: &Tls, map: Map, generation: u64) -> bool {
    if let Some(left) = held(tls) {
        finish(left.line);
        give_back(map, left);
    }
    reclaim(map, None, LOOKED_AT);
    let Some((claim, state)) = take_line(map, generation) else { return false };
    let tid = thread_id::own();
    if let Some(thread) = THREADS.get(claim.line as usize) {
        thread.store(tid, Ordering::Relaxed);
    }
    map.tenure(claim.line).publish(claim.word, tid);
    // SAFETY: the line is ours alone, so the block is, which is all zeros, a value of everything in it, or whole as an
    // earlier owner left it.
    let state_ref = unsafe { &mut *state };
    state_ref.producer.write(Producer::new(map, claim.line, tid));
    state_ref.line = claim.line;
    // Another session has another recorder, which knows nothing yet.
    state_ref.rest.definitions = definitions(generation);
    // SYNC: the producer is whole for whoever finishes what we leave.
    state_ref.generation.store(generation, Ordering::Release);
    tls.state.set(state.cast());
    tls.claim.set(claim.word);
    tls.waits.set(0);
    if tls.generation.get() != 0 {
        // What NCCL's groups did while nobody recorded is not known.
        tls.group_depth.set(0);
        tls.group.set(0);
    }
    tls.generation.set(generation);
    ends::note();
    true
}

/// The calling thread ends: its line goes to the next one that comes. Events that follow, of other destructors, claim one again.
extern "C" fn end_thread(_: *mut c_void) {
    let tls = tls::here();
    // It ends in the middle of an event: what it leaves may be half done.
    if tls.busy.get() != 0 {
        return;
    }
    tls.busy.set(tls::stack_pointer());
    compiler_fence(Ordering::SeqCst);
    session::look(|map| {
        if let Some(claim) = held(tls) {
            tls.generation.set(0);
            tls.state.set(null_mut());
            finish(claim.line);
            give_back(map, claim);
        }
    });
    compiler_fence(Ordering::SeqCst);
    tls.busy.set(0);
}

/// The claim by which a thread holds its line; `None` if it has none, or it was taken for gone.
fn held(tls: &Tls) -> Option<Claim> {
    let state: *const ThreadState = tls.state.get().cast();
    if state.is_null() {
        return None;
    }
    // SAFETY: blocks stay mapped, and whoever owns the line keeps its number there.
    let claim = Claim { line: unsafe { (*state).line }, word: tls.claim.get() };
    OWNERS.is_held(session::tag(), claim).then_some(claim)
}

/// The calling thread, for whoever must know later whether it still lives; `None` if it has no line.
pub(crate) fn caller() -> Option<Claim> {
    held(tls::here())
}

/// Whether a thread is known to be gone that had this claim. One that gave its line back counts as gone.
pub(crate) fn is_gone(claim: Claim) -> bool {
    let is_told = || session::look(|map| map.tenure(claim.line).is_gone(claim.word)).unwrap_or(false);
    !OWNERS.is_held(session::tag(), claim) || is_told()
}

fn give_back(map: Map, claim: Claim) {
    map.tenure(claim.line).end(claim.word);
    OWNERS.give_back(session::tag(), claim);
}

/// What [`Rest::definitions`] is in this session.
fn definitions(generation: u64) -> u32 {
    generation as u32 | 1
}

/// A line of one's own with its memory, empty. Where there is no memory for another, the line is given back: a limit that
/// is lifted later leaves no harm behind.
fn take_line(map: Map, generation: u64) -> Option<(Claim, *mut ThreadState)> {
    let session = session::tag();
    let memory_of =
        |line: u32| STATES.get(line as usize).map_or(null_mut(), |slot| slot.load(Ordering::Acquire));
    let has_memory = |line| !memory_of(line).is_null();
    // Lines that have memory first, then new ones; those of threads that are gone last.
    for round in 0..2 {
        if let Some(claim) = OWNERS.take(session, has_memory) {
            let state = memory_of(claim.line);
            // SAFETY: the line is ours alone, so the block is, which is all zeros or what its last owner left.
            let left = unsafe { &mut *state };
            if left.is_recording.load(Ordering::Relaxed) == 0
                && left.rest.definitions == definitions(generation)
            {
                left.rest.hand_on();
            } else {
                // SAFETY: the line is ours alone, and all zeros are a value of its block.
                unsafe { state.cast::<u8>().write_bytes(0, STATE_BYTES) };
            }
            return Some((claim, state));
        }
        if let Some(claim) = OWNERS.take(session, |_| true) {
            let state: *mut ThreadState = new_memory(claim.line).cast();
            match STATES.get(claim.line as usize).filter(|_| !state.is_null()) {
                Some(slot) => {
                    slot.store(state, Ordering::Release);
                    return Some((claim, state));
                }
                None => OWNERS.give_back(session, claim),
            }
        }
        if round == 0 && !find_lines(map) {
            break;
        }
    }
    None
}

/// Zeroed memory for a line that has none; null if there is none.
fn new_memory(line: u32) -> *mut u8 {
    let reserved = reserved::of(line);
    if !reserved.is_null() {
        return reserved;
    }
    if own::may_ask() { sys::pages(STATE_BYTES) } else { null_mut() }
}

/// Frees lines of threads that are gone, among the next `most`, and completes their chunks.
fn reclaim(map: Map, current: Option<u32>, most: u32) -> u32 {
    let is_gone = |claim: Claim| map.tenure(claim.line).is_gone(claim.word);
    // Whoever ends in the middle leaves a claim that nobody is looked for by: the line stays taken.
    OWNERS.reclaim(session::tag(), current, most, is_gone, |claim| finish(claim.line))
}

/// Completes the chunk that a line's owner left, who is gone.
fn finish(line: u32) {
    let Some(slot) = STATES.get(line as usize) else { return };
    let state = slot.load(Ordering::Acquire);
    if state.is_null() {
        return;
    }
    // SAFETY: the line is the caller's now, and nobody else's.
    let state = unsafe { &mut *state };
    // SYNC: the producer is whole for whoever finishes what we leave.
    if state.generation.swap(0, Ordering::Acquire) == session::generation() {
        // SAFETY: written before the generation.
        unsafe { state.producer.assume_init_mut() }.complete();
    }
}

/// Whether a search that found nothing last time may be made again, and by the caller: a flood of events that find no room
/// must not turn into a search of all thread lines per event. `next` is when.
fn is_time_to_search(next: &AtomicU64) -> bool {
    let now = gputrace_ring::clock::nanos(libc::CLOCK_MONOTONIC_COARSE);
    let at = next.load(Ordering::Relaxed);
    let mine = || next.compare_exchange(at, now + SEARCH_EVERY, Ordering::Relaxed, Ordering::Relaxed);
    now >= at && mine().is_ok()
}

/// No line was free: frees those of threads that are gone; whether there were any.
fn find_lines(map: Map) -> bool {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    if !is_time_to_search(&NEXT) {
        return false;
    }
    let has_found = reclaim(map, None, map::MAX_THREADS as u32) != 0;
    if has_found {
        NEXT.store(0, Ordering::Relaxed);
    }
    has_found
}

/// No chunk was free: has those of threads that are gone completed, so that the recorder can free them.
fn find_chunks(map: Map, line: u32) {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    if is_time_to_search(&NEXT) {
        reclaim(map, Some(line), map::MAX_THREADS as u32);
    }
}
