//! The session: made by a process's first device memory, ended by its exit ([`crate::process`]).
//!
//! One word tells every thread where it stands: the generation, on a page that the kernel empties in forked
//! children (`MADV_WIPEONFORK`, Linux 4.14). A thread whose own copy agrees may write; all others come by
//! [`crate::lanes`], once. A forked child finds zero and starts a session of its own at its first success.
//!
//! A session begins with signals blocked and by calls of the kernel alone: nothing can end the thread that makes it, by
//! `pthread_cancel`, `longjmp` or otherwise, while the others wait for it.

use crate::config::{self, Stacks};
use crate::launch::{self, Outcome};
use crate::messages::{self, Moment};
use crate::ring_file::{Identity, Ring};
use crate::sys::{self, Text};
use crate::valgrind::Unwatched;
use crate::{control, elf, environment, kernel, ledger, own, ring_file, rings, stack, thread_id, words};
use core::cell::UnsafeCell;
use core::ffi::{CStr, c_int};
use core::mem::MaybeUninit;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use gputrace_ring::clock::{Clock, Ticks};
use gputrace_ring::control::{self as wish, Control};
use gputrace_ring::map::Map;

/// How often a thread looks whether another is done making the session, every 100 µs.
const START_PATIENCE: u32 = 5_000;

/// How long a session that begins waits for its recorder, in milliseconds.
const RECORDER_PATIENCE: u32 = 100;
/// Milliseconds between two looks whether it still lives.
const RECORDER_LOOK: u32 = 10;

/// How often the thread that ends a session tries to unmap its ring, every 50 µs and more.
const GIVING_BACK: u32 = 8;

/// No session yet.
const NONE: u32 = 0;
/// A thread is making it.
const STARTING: u32 = 1;
/// Threads may write.
const LIVE: u32 = 2;
/// Never again in this process.
const STEPPED_ASIDE: u32 = 3;
/// Until somebody attaches ([`control`]).
const ASLEEP: u32 = 4;
/// Generation of a process that stepped aside: one comparison on the fast path.
pub(crate) const OFF: u64 = u64::MAX;

/// What the kernel empties in a forked child.
struct Page {
    generation: AtomicU64,
    state: AtomicU32,
    /// A thread waited in vain for the one that makes the session (a debugger may have stopped it): no other waits.
    patience_is_over: AtomicU32,
    /// Events that were lost while the session was made.
    lost: AtomicU64,
    /// Where a library that sleeps is asked to wake; null elsewhere.
    control: AtomicPtr<Control>,
    /// Tells this process from those that it was forked from; 0 before its first session.
    tag: AtomicU32,
    /// Threads between their first look at the session and the mark of their own line ([`rings`]).
    coming: AtomicU32,
    /// This process has made a ring: the last of [`SESSIONS`] is its own, and not that of a process that it was forked from.
    has_ring: AtomicU32,
    helper: Help,
    own: own::Own,
}

/// The child that makes a session while the program's threads go on ([`launch::Helper`]).
struct Help {
    /// 0 none.
    pid: AtomicU32,
    scratch: AtomicPtr<u8>,
    /// It has done what it was for.
    is_done: AtomicU32,
    /// It cannot: the next thread does it by itself.
    cannot: AtomicU32,
    /// A thread looks how it stands.
    is_looked_at: AtomicU32,
    /// The session it made was told nothing yet of what only a thread of the program can find out.
    owes_facts: AtomicU32,
}

#[unsafe(link_section = "gputrace_hot_data")]
static PAGE: AtomicPtr<Page> = AtomicPtr::new(null_mut());
#[unsafe(link_section = "gputrace_hot_data")]
static CLOCK: AtomicU32 = AtomicU32::new(Clock::Monotonic as u32);
#[unsafe(link_section = "gputrace_hot_data")]
static STACKS: AtomicU32 = AtomicU32::new(Stacks::Python as u32);
#[unsafe(link_section = "gputrace_hot_data")]
static STACKS_MIN_SIZE: AtomicU64 = AtomicU64::new(0);
static NCCL_TIMING: AtomicBool = AtomicBool::new(false);
/// The last sessions of the process, in a circle: a thread that reads of one may be interrupted while others come and go.
static SESSIONS: [Shared<MaybeUninit<Facts>>; 32] =
    [const { Shared(UnsafeCell::new(MaybeUninit::uninit())) }; 32];
/// How many there were.
static BEGUN: AtomicU32 = AtomicU32::new(0);

/// A session's ring, and where it is, for the end.
struct Facts {
    map: Map,
    path: Text<128>,
    identity: Identity,
}

/// Written by the one thread that won the race to start, before it publishes the generation.
struct Shared<T>(UnsafeCell<T>);
// SAFETY: see above: one writer, published by a release store.
unsafe impl<T> Sync for Shared<T> {}

/// May this event make the session?
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    /// Yes: the process has memory of a device, or was refused some.
    IfNeeded,
    /// No: it matters only where there is a session.
    OnlyIfLive,
}

/// Now.
#[inline]
pub(crate) fn now() -> Ticks {
    Clock::from_u32(CLOCK.load(Ordering::Relaxed)).now()
}

/// Now, or a little before, for half the price.
#[inline]
pub(crate) fn about_now() -> Ticks {
    Clock::from_u32(CLOCK.load(Ordering::Relaxed)).about_now()
}

/// Which frames the user wants.
#[inline]
pub(crate) fn stacks() -> Stacks {
    match STACKS.load(Ordering::Relaxed) {
        0 => Stacks::None,
        1 => Stacks::Python,
        _ => Stacks::All,
    }
}

/// Blocks with fewer bytes have no stack.
#[inline]
pub(crate) fn stacks_min_size() -> u64 {
    STACKS_MIN_SIZE.load(Ordering::Relaxed)
}

/// Whether the user wants to know how long the GPU works for NCCL.
#[inline]
pub(crate) fn wants_nccl_timing() -> bool {
    NCCL_TIMING.load(Ordering::Relaxed)
}

/// From here on nobody does.
pub(crate) fn end_nccl_timing() {
    NCCL_TIMING.store(false, Ordering::Relaxed);
}

/// Whether this process has no session yet, and may get one.
pub(crate) fn may_come() -> bool {
    generation() == 0
}

/// Whether this process will never have a session again.
#[inline]
pub(crate) fn is_off() -> bool {
    generation() == OFF
}

/// Whether this process has a session.
#[inline]
pub(crate) fn is_live() -> bool {
    !matches!(generation(), 0 | OFF)
}

/// The session; 0 none yet, all ones never again.
#[inline]
pub(crate) fn generation() -> u64 {
    let page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        return 0;
    }
    // SAFETY: a page once published stays mapped.
    unsafe { &*page }.generation.load(Ordering::Acquire)
}

/// The session's clock.
pub(crate) fn clock() -> Clock {
    Clock::from_u32(CLOCK.load(Ordering::Relaxed))
}

/// Tells this process's threads from those of one that it was forked from, not 0; the same in all sessions of the process: a
/// thread that was interrupted in the last keeps its line and its memory in the next.
pub(crate) fn tag() -> u32 {
    let page = PAGE.load(Ordering::Acquire);
    // SAFETY: a page once published stays mapped.
    if page.is_null() { 0 } else { unsafe { &*page }.tag.load(Ordering::Relaxed) }
}

/// Whether this process will never have a session again, not even if somebody attaches.
pub(crate) fn is_over() -> bool {
    is_off() && control().is_none()
}

/// Whether calls pass on until somebody attaches, and nobody does just now.
#[inline]
pub(crate) fn is_asleep() -> bool {
    is_off() && !is_asked()
}

/// Whether somebody who attaches, or detaches, waits for the next event.
#[inline]
pub(crate) fn is_asked() -> bool {
    control().is_some_and(|control| control.asked.load(Ordering::Relaxed) != wish::NOTHING)
}

#[inline]
fn control() -> Option<&'static Control> {
    let page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        return None;
    }
    // SAFETY: a page once published stays mapped.
    let control = unsafe { &*page }.control.load(Ordering::Relaxed);
    // SAFETY: as above; null is none.
    unsafe { control.cast_const().as_ref() }
}

/// Whether this process can be attached to.
pub(crate) fn has_control() -> bool {
    control().is_some()
}

/// Says how many words of the program's lead to us, in a process that was attached to late.
pub(crate) fn tell_words(n: usize) {
    if let Some(control) = control() {
        control.words.store(n as u32, Ordering::Relaxed);
        // SYNC: the number is there for whoever sees that it came late.
        control.is_late.store(1, Ordering::Release);
    }
}

fn facts() -> *const Facts {
    let last = BEGUN.load(Ordering::Acquire).wrapping_sub(1) as usize % SESSIONS.len();
    SESSIONS.get(last).map_or(core::ptr::null(), |session| session.0.get().cast_const().cast())
}

/// The ring of the session that is on. It stays mapped for as long as the caller has a mark ([`rings`]).
pub(crate) fn map() -> Option<Map> {
    current().map(|(map, _)| map)
}

/// The session that is on: its ring, and its generation.
pub(crate) fn current() -> Option<(Map, u64)> {
    let before = generation();
    if matches!(before, 0 | OFF) {
        return None;
    }
    // SAFETY: written before the generation was published, and not again for many sessions.
    let map = unsafe { (*facts()).map };
    // Else that may be the ring of a session that has begun since.
    (generation() == before).then_some((map, before))
}

/// The caller is on its way to the ring, which stays mapped meanwhile. A signal handler that leaves by a jump just here leaves the
/// ring mapped for ever; blocking signals takes a call, which a sandbox may forbid.
pub(crate) struct Coming {
    page: &'static Page,
    /// Blocked before; `None` where none were blocked.
    signals: Option<kernel::SignalSet>,
}

impl Coming {
    /// `None` where there will be no session.
    pub(crate) fn new() -> Option<Coming> {
        page().map(|page| Coming::on(page, None))
    }

    /// To begin or end a session, for somebody who has asked for that.
    fn uninterrupted(page: &'static Page) -> Coming {
        Coming::on(page, Some(kernel::block_signals(kernel::MOST_SIGNALS)))
    }

    fn on(page: &'static Page, signals: Option<kernel::SignalSet>) -> Coming {
        page.coming.fetch_add(1, Ordering::SeqCst);
        Coming { page, signals }
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        self.page.coming.fetch_sub(1, Ordering::SeqCst);
        if let Some(signals) = self.signals {
            kernel::block_signals(signals);
        }
    }
}

/// Looks at the ring of the session that is on, for a thread without a mark; `None` if there is none.
pub(crate) fn look<T>(at: impl FnOnce(Map) -> T) -> Option<T> {
    let page = known_page()?;
    page.coming.fetch_add(1, Ordering::SeqCst);
    let seen = map().map(at);
    page.coming.fetch_sub(1, Ordering::SeqCst);
    seen
}

/// The process is at its end: from here on its ring stays mapped.
pub(crate) fn keep_ring() {
    if let Some(page) = known_page() {
        page.coming.fetch_add(1, Ordering::SeqCst);
    }
}

/// Where the ring is, and which file it is; once there was a session.
pub(crate) fn ring() -> (&'static CStr, Identity) {
    // SAFETY: written before the generation that let the caller come here.
    let facts = unsafe { &*facts() };
    (facts.path.as_c_str(), facts.identity)
}

/// Remembers by which clock this machine's events are stamped.
pub(crate) fn choose_clock(clock: Clock) {
    CLOCK.store(clock as u32, Ordering::Relaxed);
}

/// What the thread that makes a session has written that knows lines of the ring.
#[derive(Clone, Copy)]
pub(crate) struct Describe {
    /// Gets what threads need later and may not ask for then; in a thread of the program.
    pub(crate) prepare: fn(),
    /// What holds for the whole process, before there is a session of this generation.
    pub(crate) process: fn(Map, u64),
    /// As much of that as needs no thread of the program.
    pub(crate) names: fn(Map, u64),
    /// What was given out while the library slept, once there is.
    pub(crate) living: fn(Map, u64),
    /// Whether a thread is in the middle of an event of this session, which is over.
    pub(crate) is_writing: fn(u64) -> bool,
}

/// Makes the session, or waits for the thread that is making it. False if there will be none, or not soon.
pub(crate) fn begin(describe: Describe) -> bool {
    let Some(page) = page().filter(|_| own::may_begin()) else { return false };
    if page.state.compare_exchange(NONE, STARTING, Ordering::Acquire, Ordering::Acquire).is_err() {
        return wait_for_another(page);
    }
    // No handler of the program runs in here, which could leave it for ever; nor the C library's, by which it cancels
    // threads at any instruction.
    let before = kernel::block_signals(kernel::MOST_SIGNALS);
    let has_begun = begin_unless_off(page, describe);
    kernel::block_signals(before);
    has_begun
}

/// Whoever switched the library off shall not meet what it does before a session.
fn begin_unless_off(page: &Page, describe: Describe) -> bool {
    if !environment::copy() {
        step_aside(page, b"there is no memory for a session");
        return false;
    }
    if config::is_off() {
        step_aside(page, b"");
        return false;
    }
    kernel::look_for_filter();
    learn(describe);
    if config::is_dormant() {
        fall_asleep(page);
        return false;
    }
    make(page, describe)
}

/// Finds out by system calls what must be known without them later: the program may put itself under a sandbox at any time.
fn learn(describe: Describe) {
    // The processor's counter stamps events, but times are waited for by the kernel's clock, which is read in the vDSO.
    environment::find_clock();
    thread_id::learn(|| elf::c_library(c"pthread_mutex_lock"));
    {
        let _unwatched = Unwatched::new();
        stack::learn();
    }
    (describe.prepare)();
}

/// Where a session would begin: from here on the process can be attached to. A library that cannot sleep steps aside.
fn fall_asleep(page: &Page) {
    let Some(control) = control::make().filter(|_| ledger::keep()) else {
        return step_aside(
            page,
            b"GPUTRACE=dormant: there is no page for waking it (memfd_create, or memory, is refused)",
        );
    };
    page.tag.store(now().0 as u32 | 1, Ordering::Relaxed);
    page.control.store(core::ptr::from_ref(control).cast_mut(), Ordering::Release);
    page.generation.store(OFF, Ordering::Release);
    page.state.store(ASLEEP, Ordering::Release);
}

/// Does what somebody asks who attaches or detaches. One thread does it; the others go on as it was.
#[cold]
#[inline(never)]
pub(crate) fn obey(describe: Describe) {
    let (Some(page), Some(control)) = (known_page(), control()) else { return };
    // Under a sandbox nothing can be begun or ended: whoever asks hears nothing, and says so.
    if !own::may_obey() {
        return;
    }
    let _errno = sys::KeepErrno::new();
    let _coming = Coming::uninterrupted(page);
    if !is_helped(page, control) {
        follow(page, control, describe);
    }
}

/// One thread follows the wish.
fn follow(page: &Page, control: &Control, describe: Describe) {
    let (from, to) = match control.asked.load(Ordering::Acquire) {
        wish::WAKE => (ASLEEP, LIVE),
        wish::SLEEP => (LIVE, ASLEEP),
        _ => return control.asked.store(wish::NOTHING, Ordering::Relaxed),
    };
    if page.state.compare_exchange(from, STARTING, Ordering::AcqRel, Ordering::Acquire).is_err() {
        if page.state.load(Ordering::Acquire) == to {
            // It is so already.
            if to == ASLEEP {
                give_rings_back(1, describe.is_writing);
            }
            control.asked.store(wish::NOTHING, Ordering::Relaxed);
            control.answers.fetch_add(1, Ordering::Release);
        }
        return;
    }
    if to == LIVE {
        control.state.store(wish::CHANGING, Ordering::Relaxed);
        kernel::look_for_filter();
        unmap_rings(page, 1, describe.is_writing);
        learn(describe);
        let options = control::options(control);
        if !environment::put_before(&options) {
            control.asked.store(wish::NOTHING, Ordering::Relaxed);
            return step_aside(page, b"there is no memory for a session");
        }
        if page.helper.cannot.swap(0, Ordering::Relaxed) != 0 || !wake(page, describe) {
            control.asked.store(wish::NOTHING, Ordering::Relaxed);
            make(page, describe);
        }
    } else {
        control.asked.store(wish::NOTHING, Ordering::Relaxed);
        let generation = page.generation.swap(OFF, Ordering::AcqRel);
        own::end();
        // SAFETY: written when the session was made, by a thread that let this one come here.
        let map = unsafe { (*facts()).map };
        map.header().process.value.store(gputrace_ring::map::OFF, Ordering::Release);
        if words::are_in_place() {
            words::restore();
            tell_words(0);
        }
        rings::leave(map, generation);
        // Events take microseconds. A thread that waits for a processor in the middle of one is not waited for.
        for _ in 0..GIVING_BACK {
            if unmap_rings(page, 1, describe.is_writing) {
                break;
            }
            kernel::sleep(50_000);
        }
        page.state.store(ASLEEP, Ordering::Release);
        control::answer(control, wish::ASLEEP, RECORDER.load(Ordering::Relaxed), b"");
    }
}

/// Tries once more to unmap the rings of sessions that are over; false if one stays. `counted` is how often the caller counts as
/// [`Coming`].
pub(crate) fn give_rings_back(counted: u32, is_writing: fn(u64) -> bool) -> bool {
    let Some(page) = known_page() else { return true };
    if page.state.compare_exchange(ASLEEP, STARTING, Ordering::AcqRel, Ordering::Acquire).is_err() {
        return false;
    }
    let is_done = unmap_rings(page, counted, is_writing);
    page.state.store(ASLEEP, Ordering::Release);
    is_done
}

/// The same for who holds the state word.
fn unmap_rings(page: &Page, counted: u32, is_writing: fn(u64) -> bool) -> bool {
    let left =
        rings::give_back(|| page.coming.load(Ordering::SeqCst) == counted && !own::is_read(), is_writing);
    if let Some(control) = control() {
        control.left.store(left as u64, Ordering::Relaxed);
    }
    left == 0
}

/// What a helper is told; written by the thread that starts it, which the state word lets do so alone.
struct Waking {
    writer: gputrace_ring::map::Writer,
    describe: Describe,
}
static WAKING: Shared<MaybeUninit<Waking>> = Shared(UnsafeCell::new(MaybeUninit::uninit()));

/// Has a child make the session: a thread of the program that did so would stand still for as long, a quarter of a second where the
/// processors are busy. What needs a thread of the program, the loader's lock above all, is done here. False if there can be no
/// such child.
fn wake(page: &Page, describe: Describe) -> bool {
    if config::is_off() || !kernel::may_use_rare_calls() {
        return false;
    }
    read_config();
    // SAFETY: `lookup` finds exported functions and data of these names, or null.
    unsafe { stack::init(elf::lookup) };
    // SAFETY: the state word lets one thread come here, and no helper is at work.
    unsafe { (*WAKING.0.get()).write(Waking { writer: ring_file::writer(), describe }) };
    page.helper.is_done.store(0, Ordering::Relaxed);
    // Nobody looks before all of it is known.
    page.helper.is_looked_at.store(1, Ordering::Relaxed);
    let helper = launch::Helper::start(make_beside, is_made).ok();
    if let Some(helper) = &helper {
        page.helper.scratch.store(helper.scratch, Ordering::Relaxed);
        page.helper.pid.store(helper.pid, Ordering::Release);
    }
    page.helper.is_looked_at.store(0, Ordering::Release);
    helper.is_some()
}

/// The helper's part: the ring, and all that can be said of the process without one of its threads. From its generation on, threads write.
fn make_beside() -> Option<(&'static CStr, kernel::File)> {
    let (page, control) = (known_page()?, control()?);
    page.helper.pid.store(kernel::process_id(), Ordering::Release);
    // SAFETY: written before we were started.
    let Waking { writer, describe } = unsafe { (*WAKING.0.get()).assume_init_ref() };
    let Ok(Ring { map, path, file: Some(file), identity, .. }) =
        Ring::make(clock(), *writer, ring_file::Places::Shared)
    else {
        // The wish still stands: a thread of the program finds another place, or says why there is none.
        page.helper.cannot.store(1, Ordering::Relaxed);
        page.helper.is_done.store(1, Ordering::Release);
        page.state.store(ASLEEP, Ordering::Release);
        return None;
    };
    rings::prepare();
    let path = remember(map, path, identity)?;
    let generation = next_generation();
    (describe.names)(map, generation);
    page.helper.owes_facts.store(1, Ordering::Relaxed);
    publish(page, generation);
    (describe.living)(map, generation);
    control.state.store(wish::CHANGING, Ordering::Relaxed);
    Some((path, file))
}

/// The helper's last word.
fn is_made(outcome: &Outcome) {
    let (Some(page), Some(control)) = (known_page(), control()) else { return };
    // SAFETY: the helper wrote it.
    let path = unsafe { &(*facts()).path };
    tell_awake(control, outcome, path);
    page.helper.is_done.store(1, Ordering::Release);
}

/// How the session stands, for whoever asked for it.
fn tell_awake(control: &Control, outcome: &Outcome, path: &Text<128>) {
    note_recorder(outcome, path);
    // Another wish may stand there by now.
    let _ = control.asked.compare_exchange(wish::WAKE, wish::NOTHING, Ordering::Relaxed, Ordering::Relaxed);
    control::answer(control, wish::AWAKE, RECORDER.load(Ordering::Relaxed), path.as_bytes());
}

/// Remembers the recorder, or says why there is none.
fn note_recorder(outcome: &Outcome, path: &Text<128>) {
    RECORDER.store(0, Ordering::Relaxed);
    match outcome {
        Outcome::Started(recorder) => RECORDER.store(*recorder, Ordering::Relaxed),
        Outcome::Failed(why, error) => say_unrecorded(why, *error, path.as_bytes()),
    }
}

/// Whether a helper is at work, or was just now: everything else is for later. Looks, and waits for nothing.
fn is_helped(page: &Page, control: &Control) -> bool {
    let help = &page.helper;
    if help.pid.load(Ordering::Acquire) == 0 {
        return false;
    }
    if help.is_looked_at.swap(1, Ordering::Acquire) != 0 {
        return true;
    }
    let helper = launch::Helper {
        pid: help.pid.load(Ordering::Acquire),
        scratch: help.scratch.load(Ordering::Relaxed),
    };
    // One that stays has done what it was for long before it is gone.
    let stays_on = helper.scratch.is_null() && help.is_done.load(Ordering::Acquire) != 0;
    let is_over = helper.pid != 0 && (stays_on || helper.is_gone());
    if is_over {
        help.pid.store(0, Ordering::Release);
        if help.is_done.load(Ordering::Acquire) == 0 {
            was_ended(page, control);
        }
    }
    help.is_looked_at.store(0, Ordering::Release);
    !is_over && helper.pid != 0
}

/// Somebody has killed the helper in the middle of its work.
fn was_ended(page: &Page, control: &Control) {
    let outcome = Outcome::Failed(b"the process that should start the recorder was killed", 0);
    if page.state.load(Ordering::Acquire) == LIVE {
        // SAFETY: written before the session was.
        tell_awake(control, &outcome, unsafe { &(*facts()).path });
    } else {
        control.asked.store(wish::NOTHING, Ordering::Relaxed);
        step_aside(page, b"the process that should begin the recording was killed");
    }
}

/// Whether the caller is to tell the session what the helper that made it could not find out: one thread is.
pub(crate) fn takes_facts() -> bool {
    known_page().is_some_and(|page| {
        page.helper.owes_facts.load(Ordering::Relaxed) != 0
            && page.helper.owes_facts.swap(0, Ordering::Relaxed) != 0
    })
}

/// The page, if there is one, whatever stands there.
fn known_page() -> Option<&'static Page> {
    let page = PAGE.load(Ordering::Acquire);
    // SAFETY: a page once published stays mapped.
    unsafe { page.cast_const().as_ref() }
}

/// Waits once: a thread that waited in vain has shown that waiting does not help.
fn wait_for_another(page: &Page) -> bool {
    for _ in 0..START_PATIENCE {
        match page.state.load(Ordering::Acquire) {
            LIVE => return true,
            STARTING if page.patience_is_over.load(Ordering::Relaxed) == 0 => kernel::sleep(100_000),
            STARTING => break,
            _ => return false,
        }
    }
    page.patience_is_over.store(1, Ordering::Relaxed);
    page.lost.fetch_add(1, Ordering::AcqRel);
    // It may have begun meanwhile, and told its losses before this one.
    tell_losses(page);
    false
}

/// Losses of the time before the session, once there is one.
fn tell_losses(page: &Page) {
    if page.state.load(Ordering::Acquire) == LIVE
        && let Some(map) = map()
    {
        let lost = page.lost.swap(0, Ordering::AcqRel);
        map.header().lost_starting.events.fetch_add(lost, Ordering::Relaxed);
    }
}

/// The session itself; signals are blocked.
fn make(page: &Page, describe: Describe) -> bool {
    read_config();
    let ring = match Ring::make(clock(), ring_file::writer(), ring_file::Places::All) {
        Ok(ring) => ring,
        Err(why) => {
            step_aside(page, why);
            return false;
        }
    };
    // SAFETY: `lookup` finds exported functions and data of these names, or null.
    unsafe { stack::init(elf::lookup) };
    // Only a session that somebody may end needs it, and it takes milliseconds.
    if control().is_some() {
        rings::prepare();
    }
    // As late as possible: what has a name stays where the program ends before there is a recorder.
    let Ring { map, path, file, is_memory, identity, .. } = ring.named();
    let Some(path) = remember(map, path, identity) else { return false };
    let generation = next_generation();
    if page.tag.load(Ordering::Relaxed) == 0 {
        page.tag.store(generation as u32, Ordering::Relaxed);
    }
    (describe.process)(map, generation);
    publish(page, generation);
    if let Some(control) = control() {
        // The recorder comes later, so that it finds all of this together with what other threads say meanwhile.
        (describe.living)(map, generation);
        control.state.store(wish::CHANGING, Ordering::Relaxed);
    }
    let mut outcome = launch::start_recorder(path, file.as_ref());
    if let Outcome::Started(recorder) = outcome
        && !await_recorder(&map, recorder)
    {
        outcome = Outcome::Failed(b"the recorder ended before it had read anything", 0);
    }
    if let (Outcome::Failed(..), Some(file)) = (&outcome, &file) {
        ring_file::allocate_rest(file, &map);
    }
    // SAFETY: written just now, and not again for many sessions.
    let path = unsafe { &(*facts()).path };
    match control() {
        Some(control) => tell_awake(control, &outcome, path),
        None => note_recorder(&outcome, path),
    }
    // A memory file that no recorder has is found by its descriptor alone.
    if let Some(file) = file
        && is_memory
    {
        file.keep();
    }
    true
}

/// Sleeps until the recorder has opened the ring, for a moment at most; false if it has ended instead. Later the process may be under a
/// sandbox: at its end it would have to keep a processor busy, and could not find out.
fn await_recorder(map: &Map, recorder: u32) -> bool {
    let state = &map.header().recorder.value;
    let has_come = || state.load(Ordering::Acquire) != gputrace_ring::map::NO_RECORDER;
    for _ in 0..RECORDER_PATIENCE / RECORDER_LOOK {
        if has_come() {
            return true;
        }
        kernel::wait_while(state, gputrace_ring::map::NO_RECORDER, RECORDER_LOOK);
        if !has_come() && sys::is_process_over(recorder) {
            // It may have come and gone between the two looks.
            return has_come();
        }
    }
    true
}

/// What the user wants of the session that begins.
fn read_config() {
    STACKS.store(config::stacks() as u32, Ordering::Relaxed);
    STACKS_MIN_SIZE.store(config::STACKS_MIN_SIZE.number().unwrap_or(0), Ordering::Relaxed);
    NCCL_TIMING.store(config::is_nccl_timing_on(), Ordering::Relaxed);
}

/// Keeps what must be known of a new session's ring; its path.
fn remember(map: Map, path: Text<128>, identity: Identity) -> Option<&'static CStr> {
    let next = BEGUN.load(Ordering::Relaxed);
    let slot = SESSIONS.get(next as usize % SESSIONS.len())?;
    // SAFETY: the ring stays mapped for as long as a session has it.
    own::begin(unsafe { &*core::ptr::from_ref(map.header()) });
    // SAFETY: the state word lets one come here; readers wait for the generation.
    unsafe { (*slot.0.get()).write(Facts { map, path, identity }) };
    BEGUN.store(next.wrapping_add(1), Ordering::Release);
    map.header().stack_mode.store(STACKS.load(Ordering::Relaxed), Ordering::Relaxed);
    // SAFETY: written just now, and not again for many sessions.
    Some(unsafe { (*facts()).path.as_c_str() })
}

/// From here on threads write.
fn publish(page: &Page, generation: u64) {
    page.has_ring.store(1, Ordering::Release);
    // SYNC: map and clock are visible to whoever sees the generation.
    page.generation.store(generation, Ordering::Release);
    page.state.store(LIVE, Ordering::Release);
    tell_losses(page);
}

/// Why nothing records this session, with the kernel's error if there is one, and where its events are.
pub(crate) fn say_unrecorded(why: &[u8], error: c_int, path: &[u8]) {
    own::note_unrecorded();
    let mut message = Text::<480>::new().add(why);
    if error != 0 {
        message = message.add(b" (error ").number(error as u64).add(b")");
    }
    let message =
        message.add(b"; the events stay in ").add(path).add(b": `gputrace recover` makes a trace of them");
    messages::say(message.as_bytes(), own_ring(), Moment::Start);
}

/// Says one line to the user, after the session began.
pub(crate) fn say(message: &[u8]) {
    messages::say(message, own_ring(), Moment::Later);
}

/// The ring of this process's last session, over or not.
fn own_ring() -> Option<Map> {
    let has_ring = known_page().is_some_and(|page| page.has_ring.load(Ordering::Acquire) != 0);
    // SAFETY: written before the word was, and not again for many sessions.
    has_ring.then(|| unsafe { (*facts()).map })
}

/// The recorder that was started for this session; 0 if none was.
static RECORDER: AtomicU32 = AtomicU32::new(0);

/// Whether a recorder was started for this session.
pub(crate) fn has_recorder() -> bool {
    RECORDER.load(Ordering::Relaxed) != 0
}

/// No other session of this process, or of one that it was forked from, has these lower 32 bits, which are not 0.
fn next_generation() -> u64 {
    /// A forked child knows its parent's.
    static LAST: AtomicU32 = AtomicU32::new(0);
    let mut generation = now().0 | 1;
    if generation as u32 == LAST.load(Ordering::Relaxed) {
        generation = generation.wrapping_add(2);
    }
    LAST.store(generation as u32, Ordering::Relaxed);
    generation
}

/// The page that forked children find empty.
fn page() -> Option<&'static Page> {
    let mut page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        let fresh = sys::pages(4096).cast::<Page>();
        if fresh.is_null() {
            return None;
        }
        // SAFETY: the page was just made.
        let is_wiped = unsafe { kernel::advise(fresh.cast(), 4096, libc::MADV_WIPEONFORK) }.is_ok();
        if !is_wiped {
            let why = b"this kernel cannot distinguish forked processes (MADV_WIPEONFORK, Linux 4.14); not recording";
            messages::say(why, None, Moment::Start);
            // SAFETY: as above.
            unsafe { &*fresh }.generation.store(OFF, Ordering::Relaxed);
        }
        let published = PAGE.compare_exchange(null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire);
        page = published.map_or_else(|theirs| theirs, |_| fresh);
        if is_wiped {
            // SAFETY: a page once published stays mapped.
            own::remember(&unsafe { &*page }.own);
        }
    }
    // SAFETY: a page once published stays mapped.
    let page = unsafe { &*page };
    (page.generation.load(Ordering::Acquire) != OFF).then_some(page)
}

/// Once: from here on every hook passes through.
fn step_aside(page: &Page, why: &[u8]) {
    page.generation.store(OFF, Ordering::Release);
    if let Some(control) = control() {
        // Whoever attaches hears why, and may try again.
        page.state.store(ASLEEP, Ordering::Release);
        return control::answer(control, wish::REFUSED, 0, why);
    }
    page.state.store(STEPPED_ASIDE, Ordering::Release);
    if !why.is_empty() {
        let message = Text::<480>::new().add(why).add(b"; not recording this process");
        messages::say(message.as_bytes(), own_ring(), Moment::Start);
    }
}

/// What libraries give back after us, at the very end, would only open the finished trace again.
pub(crate) fn end() {
    if let Some(control) = control() {
        control.state.store(wish::ENDING, Ordering::Relaxed);
        control.answers.fetch_add(1, Ordering::Release);
    }
    if let Some(page) = page() {
        page.control.store(null_mut(), Ordering::Relaxed);
        page.generation.store(OFF, Ordering::Release);
        page.state.store(STEPPED_ASIDE, Ordering::Release);
    }
}
