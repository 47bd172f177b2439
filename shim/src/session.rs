//! The session: made by a process's first device memory, ended by its exit.
//!
//! One word tells every thread where it stands: the generation, on a page that the kernel empties in forked
//! children (`MADV_WIPEONFORK`, Linux 4.14). A thread whose own copy agrees may write; all others come by
//! [`attach`], once. A forked child finds zero and starts a session of its own at its first success.

use crate::config::{self, Stacks};
use crate::hook::{AUXILIARY, HOOKS};
use crate::sent::Sent;
use crate::stack::ThreadStackState;
use crate::sys::{self, KeepErrno, Text, say};
use crate::tls::{self, Tls};
use crate::{callsite, elf, kernel};
use core::cell::UnsafeCell;
use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::MaybeUninit;
use core::ptr::{null, null_mut};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, compiler_fence};
use gputrace_ring::clock::{Clock, Ticks};
use gputrace_ring::map::{self, Map};
use gputrace_ring::record::{Device, Kind, Node, Wait};
use gputrace_ring::ring::Producer;

/// Bytes of the ring where nobody says otherwise: eight seconds of 100,000 events a second, should the recorder be
/// kept from running.
const RING_BYTES: u64 = 32 << 20;
/// The least a ring is worth making for.
const LEAST_RING_BYTES: u64 = 1 << 20;
/// How long a thread waits for another that is just making the session, in steps of 100 µs.
const START_PATIENCE: u32 = 5_000;
/// How long a process waits at its end for its trace, in milliseconds.
const EXIT_PATIENCE: u64 = 5_000;
/// Stream events a thread can record between two events of PyTorch's allocator: one for every stream a block was
/// used on.
pub(crate) const WAIT_SLOTS: usize = 32;

/// No session yet.
const NONE: u32 = 0;
/// A thread is making it.
const STARTING: u32 = 1;
/// Threads may write.
const LIVE: u32 = 2;
/// Never again in this process.
const STEPPED_ASIDE: u32 = 3;
/// Generation of a process that stepped aside: one comparison on the fast path.
const OFF: u64 = u64::MAX;

/// What the kernel empties in a forked child.
struct Page {
    generation: AtomicU64,
    state: AtomicU32,
}

#[unsafe(link_section = "gputrace_hot_data")]
static PAGE: AtomicPtr<Page> = AtomicPtr::new(null_mut());
/// Whether the devices were sent.
static DEVICES_KNOWN: AtomicU32 = AtomicU32::new(0);
#[unsafe(link_section = "gputrace_hot_data")]
static CLOCK: AtomicU32 = AtomicU32::new(Clock::Monotonic as u32);
#[unsafe(link_section = "gputrace_hot_data")]
static STACKS: AtomicU32 = AtomicU32::new(Stacks::Python as u32);
#[unsafe(link_section = "gputrace_hot_data")]
static STACKS_MIN_SIZE: AtomicU64 = AtomicU64::new(0);
static MAP: Shared<MaybeUninit<Map>> = Shared(UnsafeCell::new(MaybeUninit::uninit()));
/// Where the ring is, for the end.
static RING: Shared<Text<128>> = Shared(UnsafeCell::new(Text::new()));
/// One block a thread line: a line's next owner finds the memory of the last, so that threads that come and go
/// leave nothing behind.
static STATES: [AtomicPtr<ThreadState>; map::MAX_THREADS] =
    [const { AtomicPtr::new(null_mut()) }; map::MAX_THREADS];

/// Written by the one thread that won the race to start, before it publishes the generation.
struct Shared<T>(UnsafeCell<T>);
// SAFETY: see above: one writer, published by a release store.
unsafe impl<T> Sync for Shared<T> {}

/// What a thread keeps beyond its own words.
pub(crate) struct ThreadState {
    producer: MaybeUninit<Producer>,
    rest: Rest,
}

/// What [`ThreadState`] has beside the producer.
pub(crate) struct Rest {
    /// Stream events recorded since the last PyTorch event; `Tls::waits` says how many.
    pub(crate) waits: [Wait; WAIT_SLOTS],
    /// `c10::StreamId` seen last, and its `cudaStream_t`.
    pub(crate) torch_stream: (i64, u64),
    /// What the recorder knows of the thread's place in PyTorch's backward pass.
    pub(crate) node: Node,
    /// Where the thread stands if it calls `backward()`.
    pub(crate) backward: crate::hooks::autograd::BackwardCall,
    /// Classes of operations of the backward pass whose names were sent.
    pub(crate) node_classes: Sent<{ crate::hooks::autograd::SENT_CLASSES }>,
    /// PyTorch's number of the thread; 0 not asked yet.
    pub(crate) torch_thread: u64,
    /// What NCCL's open group will launch.
    pub(crate) noted: crate::nccl::timing::Noted,
    /// What the calls of NCCL's open group have counted.
    pub(crate) grouped: crate::nccl::call::Grouped,
    /// What the unwinders keep.
    pub(crate) stack: ThreadStackState,
    /// Names of marks that were sent.
    pub(crate) texts: Sent<{ crate::hooks::nvtx::SENT_SLOTS }>,
    /// Room for a definition that is being sent.
    pub(crate) scratch: callsite::Scratch,
    /// Changes when stacks and code objects must be sent again.
    pub(crate) definitions: u32,
}

/// The right to write records for the calling thread, until dropped.
pub(crate) struct Lane {
    tls: &'static Tls,
}

/// May this event make the session?
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    /// Yes: the process has memory of a device, or was refused some.
    IfNeeded,
    /// No: it matters only where there is a session.
    OnlyIfLive,
}

impl Lane {
    /// The calling thread's end of the ring.
    pub(crate) fn producer(&mut self) -> &mut Producer {
        // SAFETY: `attach` filled it before it let anyone have a lane.
        unsafe { self.all().producer.assume_init_mut() }
    }

    /// The thread's other memory.
    pub(crate) fn state(&mut self) -> &mut Rest {
        &mut self.all().rest
    }

    fn all(&mut self) -> &mut ThreadState {
        // SAFETY: only this thread reaches its state, and `busy` lets it have one lane at a time.
        unsafe { &mut *self.tls.state.get() }
    }

    /// The thread's end of the ring, and the rest of its state.
    pub(crate) fn parts(&mut self) -> (&mut Producer, &mut Rest) {
        let state = self.all();
        // SAFETY: `attach` filled it before it let anyone have a lane.
        (unsafe { state.producer.assume_init_mut() }, &mut state.rest)
    }

    /// The process got new memory from the driver.
    pub(crate) fn mappings_changed(&mut self) {
        self.producer().map().header().mappings.value.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        compiler_fence(Ordering::SeqCst);
        self.tls.busy.set(0);
    }
}

/// Now.
#[inline]
pub(crate) fn now() -> Ticks {
    Clock::from_u32(CLOCK.load(Ordering::Relaxed)).now()
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

/// The calling thread's lane. `None` if there is no session (see [`Start`]), if we stepped aside, or in a signal
/// handler that interrupted another event of this thread, which is counted as a loss.
#[inline]
#[unsafe(link_section = "gputrace_hot")]
pub(crate) fn lane(start: Start) -> Option<Lane> {
    let tls = tls::here();
    let generation = generation();
    if generation == OFF || (generation == 0 && start == Start::OnlyIfLive) {
        return None;
    }
    if tls.busy.get() != 0 {
        if generation != 0 && tls.generation.get() == generation {
            nested_loss();
        }
        return None;
    }
    tls.busy.set(1);
    compiler_fence(Ordering::SeqCst);
    let mut lane = Lane { tls };
    if generation != 0 && tls.generation.get() == generation {
        return Some(lane);
    }
    if !attach(tls, start) {
        return None;
    }
    crate::hooks::nvtx::catch_up(&mut lane);
    Some(lane)
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

#[cold]
fn nested_loss() {
    if let Some(map) = map() {
        map.header().lost_nested.add(0);
    }
}

fn map() -> Option<Map> {
    let map: *const Map = MAP.0.get().cast();
    // SAFETY: written before the generation that `is_live` saw was published.
    is_live().then(|| unsafe { *map })
}

/// Gives a thread its line, and the process its session if `start` allows.
#[cold]
#[inline(never)]
fn attach(tls: &Tls, start: Start) -> bool {
    let _errno = KeepErrno::new();
    if !is_live() && (start == Start::OnlyIfLive || !begin()) {
        return false;
    }
    let Some(map) = map() else { return false };
    if !attach_thread(tls, map) {
        map.header().lost_threads.add(0);
        return false;
    }
    true
}

fn attach_thread(tls: &Tls, map: Map) -> bool {
    let Some(producer) = Producer::new(map, kernel::thread_id()) else { return false };
    let Some(slot) = STATES.get(producer.thread_line() as usize) else { return false };
    let mut state = slot.load(Ordering::Acquire);
    if state.is_null() {
        state = sys::pages(size_of::<ThreadState>()).cast();
        if state.is_null() {
            return false;
        }
        slot.store(state, Ordering::Release);
    } else {
        // What an earlier owner knew of its own stack is wrong for ours.
        // SAFETY: whole pages of a private mapping, which are zero when they are touched next; the line is ours alone.
        unsafe { libc::madvise(state.cast(), size_of::<ThreadState>(), libc::MADV_DONTNEED) };
    }
    // SAFETY: the line is ours alone, so the block is; all zeros are a value of everything in it.
    let state_ref = unsafe { &mut *state };
    state_ref.producer.write(producer);
    // Another session has another recorder, which knows nothing yet.
    state_ref.rest.definitions = generation() as u32 | 1;
    tls.state.set(state);
    tls.waits.set(0);
    tls.generation.set(generation());
    true
}

/// Makes the session, or waits for the thread that is making it. False if there will be none.
fn begin() -> bool {
    let Some(page) = page() else {
        return false;
    };
    if page.state.compare_exchange(NONE, STARTING, Ordering::Acquire, Ordering::Acquire).is_err() {
        for _ in 0..START_PATIENCE {
            match page.state.load(Ordering::Acquire) {
                LIVE => return true,
                STARTING => kernel::sleep(100_000),
                _ => return false,
            }
        }
        return false;
    }
    if config::is_off() {
        step_aside(page, b"");
        return false;
    }
    STACKS.store(config::stacks() as u32, Ordering::Relaxed);
    STACKS_MIN_SIZE.store(config::STACKS_MIN_SIZE.number().unwrap_or(0), Ordering::Relaxed);
    crate::nccl::timing::configure();
    let ring = match Ring::make() {
        Ok(ring) => ring,
        Err(why) => {
            step_aside(page, why);
            return false;
        }
    };
    // SAFETY: the state word lets one thread come here; readers wait for the generation.
    unsafe { (*MAP.0.get()).write(ring.map) };
    // SAFETY: as above.
    unsafe { RING.0.get().write(ring.path) };
    // SAFETY: written just now, and not again before the process is another one.
    let path = unsafe { &*RING.0.get() };
    ring.map.header().stack_mode.store(STACKS.load(Ordering::Relaxed), Ordering::Relaxed);
    callsite::begin();
    describe_process(ring.map);
    // SYNC: map and clock are visible to whoever sees the generation.
    page.generation.store(now().0 | 1, Ordering::Release);
    page.state.store(LIVE, Ordering::Release);
    if let Err(why) = start_recorder(path.as_c_str()) {
        let message = Text::<480>::new()
            .add(why)
            .add(b"; the events stay in ")
            .add(path.as_bytes())
            .add(b": `gputrace recover` makes a trace of them");
        say(message.as_bytes());
    }
    true
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
        if unsafe { libc::madvise(fresh.cast(), 4096, libc::MADV_WIPEONFORK) } != 0 {
            say(b"this kernel cannot tell forked processes apart (MADV_WIPEONFORK, Linux 4.14); not recording");
            // SAFETY: as above.
            unsafe { &*fresh }.generation.store(OFF, Ordering::Relaxed);
        }
        page = match PAGE.compare_exchange(null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => fresh,
            Err(theirs) => theirs,
        };
    }
    // SAFETY: a page once published stays mapped.
    let page = unsafe { &*page };
    (page.generation.load(Ordering::Acquire) != OFF).then_some(page)
}

/// Once: from here on every hook passes through.
fn step_aside(page: &Page, why: &[u8]) {
    page.generation.store(OFF, Ordering::Release);
    page.state.store(STEPPED_ASIDE, Ordering::Release);
    if !why.is_empty() {
        say(Text::<480>::new().add(why).add(b"; not recording this process").as_bytes());
    }
}

/// The shared file.
struct Ring {
    map: Map,
    path: Text<128>,
}

impl Ring {
    fn make() -> Result<Ring, &'static [u8]> {
        let wanted = config::RING_BYTES.number().unwrap_or(RING_BYTES).max(LEAST_RING_BYTES);
        let pid = std_pid();
        let name =
            Text::<128>::new().add(b"gputrace.").number(pid.into()).add(b".").number(now().0).add(b".ring");
        for folder in [b"/dev/shm/".as_slice(), b"", b"/tmp/"] {
            let (file, path) = if folder.is_empty() {
                // SAFETY: the name ends with a zero. glibc has a wrapper only since 2.27.
                let file =
                    unsafe { libc::syscall(libc::SYS_memfd_create, c"gputrace".as_ptr(), libc::MFD_CLOEXEC) };
                let path = Text::new().add(b"/proc/").number(pid.into()).add(b"/fd/").number(file as u64);
                (file as c_int, path)
            } else {
                let path = Text::<128>::new().add(folder).add(name.as_bytes());
                let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_CLOEXEC | libc::O_NOFOLLOW;
                // SAFETY: the path ends with a zero.
                (unsafe { libc::open(path.as_c_str().as_ptr(), flags, 0o600) }, path)
            };
            if file < 0 || path.is_full() {
                continue;
            }
            if let Some(map) = Ring::fill(file, wanted, pid) {
                // A memory file lives only as long as its descriptor does for the recorder to open.
                if !folder.is_empty() {
                    // SAFETY: the descriptor is ours.
                    unsafe { libc::close(file) };
                }
                return Ok(Ring { map, path });
            }
            // SAFETY: the descriptor is ours.
            unsafe { libc::close(file) };
            if !folder.is_empty() {
                // SAFETY: the path ends with a zero, and we made the file.
                unsafe { libc::unlink(path.as_c_str().as_ptr()) };
            }
        }
        Err(b"no room for the ring in /dev/shm, in memory or in /tmp (1 MiB is enough)")
    }

    fn fill(file: c_int, wanted: u64, pid: u32) -> Option<Map> {
        // SAFETY: an all-zero statfs is a value; the kernel fills it.
        let mut space: libc::statfs = unsafe { core::mem::zeroed() };
        // SAFETY: the descriptor is ours and the buffer is a statfs.
        let known = unsafe { libc::fstatfs(file, &raw mut space) } == 0;
        let free = (space.f_bavail as u64).saturating_mul(space.f_bsize as u64);
        // A memory file says that it has no blocks at all.
        let bytes = if known && space.f_blocks > 0 { wanted.min(free / 4) } else { wanted };
        if bytes < LEAST_RING_BYTES {
            return None;
        }
        let n_chunks = Map::chunks_in(usize::try_from(bytes).ok()?);
        let bytes = Map::bytes_for(n_chunks);
        // Without this a full file system would be a SIGBUS in the middle of somebody's training.
        // SAFETY: the descriptor is ours.
        if unsafe { libc::posix_fallocate(file, 0, bytes as i64) } != 0 {
            return None;
        }
        // SAFETY: a new mapping touches nothing that exists.
        let base = unsafe {
            libc::mmap(null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, file, 0)
        };
        if base == libc::MAP_FAILED {
            return None;
        }
        let clock = Clock::from_u32(CLOCK.load(Ordering::Relaxed));
        let writer = map::Writer { pid, start_time: start_time(), pid_namespace: 0 };
        // SAFETY: the file is new, so the mapping is zero, as long as asked, and never unmapped.
        Some(unsafe { Map::create(base.cast(), n_chunks, writer, clock) })
    }
}

fn std_pid() -> u32 {
    // SAFETY: getpid takes nothing.
    unsafe { libc::getpid() as u32 }
}

/// Field 22 of `/proc/self/stat` (proc(5)): when the process started, in clock ticks since boot; 0 if unreadable.
fn start_time() -> u64 {
    let mut buffer = [0_u8; 1024];
    let n = sys::read_file(c"/proc/self/stat", &mut buffer);
    let text = buffer.get(..n).unwrap_or_default();
    // The second field is the name in parentheses, which may hold spaces and parentheses itself.
    let after_name = text.iter().rposition(|byte| *byte == b')').map_or(0, |at| at + 2);
    let field = text.get(after_name..).unwrap_or_default().split(|byte| *byte == b' ').nth(22 - 3);
    field
        .unwrap_or_default()
        .iter()
        .fold(0_u64, |sum, digit| sum.wrapping_mul(10).wrapping_add(u64::from(digit.wrapping_sub(b'0'))))
}

/// Sends what holds for the whole process: names of the hooks, devices, facts for `doctor`.
fn describe_process(map: Map) {
    // A line of its own, given back at once: the starting thread's own line comes with its first event.
    let Some(mut producer) = Producer::new(map, kernel::thread_id()) else { return };
    let at = producer.now();
    for (row, hook) in HOOKS.iter().enumerate() {
        let (name, runtime) = (hook.name.to_bytes(), hook.runtime.as_bytes());
        producer.push_raw(at, Kind::Api, &[&(row as u64).to_ne_bytes(), name, b"\0", runtime]);
    }
    for (row, hook) in crate::hooks::nccl::HOOKS.iter().enumerate() {
        let number = u64::from(crate::nccl::call::FIRST_API) + row as u64;
        producer.push_raw(at, Kind::Api, &[&number.to_ne_bytes(), hook.name.to_bytes(), b"\0"]);
    }
    crate::hooks::loader::describe(&mut producer);
    callsite::describe(&mut producer);
    DEVICES_KNOWN.store(u32::from(describe_devices(&mut producer)), Ordering::Relaxed);
    producer.complete();
    map.thread(producer.thread_line()).tid.store(0, Ordering::Release);
}

/// Sends the devices, if the session began before the driver was ready: NCCL makes it so while it makes a communicator.
pub(crate) fn describe_devices_late() {
    if DEVICES_KNOWN.load(Ordering::Relaxed) == 0
        && let Some(mut lane) = lane(Start::OnlyIfLive)
    {
        DEVICES_KNOWN.store(u32::from(describe_devices(lane.producer())), Ordering::Relaxed);
    }
}

/// The devices of this process; false if they cannot be asked for yet. None of these calls needs or makes a context.
fn describe_devices(producer: &mut Producer) -> bool {
    type Count = unsafe extern "C" fn(*mut c_int) -> c_int;
    type Get = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
    type Name = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
    type Uuid = unsafe extern "C" fn(*mut [u8; 16], c_int) -> c_int;
    type Total = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
    // SAFETY: the type is that of cuda.h 13.0 for this name, unchanged since 2.0.
    let Some(count) = (unsafe { AUXILIARY.device_count.get::<Count>() }) else { return false };
    // SAFETY: as above.
    let Some(get) = (unsafe { AUXILIARY.device_get.get::<Get>() }) else { return false };
    // SAFETY: as above.
    let Some(name) = (unsafe { AUXILIARY.device_name.get::<Name>() }) else { return false };
    // SAFETY: as above, since 3.2.
    let Some(total) = (unsafe { AUXILIARY.device_total.get::<Total>() }) else { return false };
    // SAFETY: as above, since 11.4.
    let uuid_v2 = unsafe { AUXILIARY.device_uuid_v2.get::<Uuid>() };
    // SAFETY: as above, since 9.2.
    let uuid = uuid_v2.or(unsafe { AUXILIARY.device_uuid.get::<Uuid>() });
    let mut devices = 0;
    // SAFETY: the out-parameter is ours.
    if unsafe { count(&raw mut devices) } != 0 {
        return false;
    }
    for ordinal in 0..devices.clamp(0, 64) {
        let (mut device, mut bytes, mut text, mut id) = (0, 0_usize, [0_u8; 128], [0_u8; 16]);
        // SAFETY: the out-parameter is ours.
        if unsafe { get(&raw mut device, ordinal) } != 0 {
            continue;
        }
        // SAFETY: the buffer is as long as we say; one byte stays zero.
        unsafe { name(text.as_mut_ptr().cast(), 127, device) };
        // SAFETY: the out-parameter is ours.
        unsafe { total(&raw mut bytes, device) };
        if let Some(uuid) = uuid {
            // SAFETY: the out-parameter is ours.
            unsafe { uuid(&raw mut id, device) };
        }
        let text = CStr::from_bytes_until_nul(&text).unwrap_or_default().to_bytes();
        let (low, high) = id.split_at(8);
        let half = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap_or_default());
        let record = Device {
            ordinal: ordinal as u32,
            name: text.len() as u32,
            uuid_low: half(low),
            uuid_high: half(high),
            total: bytes as u64,
        };
        let at = producer.now();
        producer.push_with(at, 0, &record, &[text]);
    }
    true
}

/// What the two children of [`start_recorder`] share with us: they run in our memory while we stand still.
struct Launch {
    arguments: [*const c_char; 5],
    environment: *const *const c_char,
    programs: [Text<1024>; 3],
    search_path: *const c_char,
    inner_stack: *mut u8,
    failed: c_int,
}

const CHILD_STACK: usize = 64 << 10;
const MOST_VARIABLES: usize = 16 << 10;

/// Starts `gputrace recorder --ring PATH`, detached.
///
/// The host must not see a child: one that `wait` could return, or a SIGCHLD. So the recorder is a grandchild, and
/// the child between us is a `clone` without exit signal that never execs (exec would give it one), which only
/// `__WCLONE` can wait for. Both share our memory and we stand still until the recorder has its own, as with
/// `posix_spawn`: a `fork` would copy the page tables of a process that may be hundreds of gigabytes large.
fn start_recorder(ring: &CStr) -> Result<(), &'static [u8]> {
    let scratch = sys::pages(2 * CHILD_STACK + MOST_VARIABLES * size_of::<*const c_char>());
    if scratch.is_null() {
        return Err(b"no memory to start the recorder");
    }
    let (outer_stack, inner_stack) =
        (scratch.wrapping_add(CHILD_STACK), scratch.wrapping_add(2 * CHILD_STACK));
    let mut launch = Launch {
        arguments: [c"gputrace".as_ptr(), c"recorder".as_ptr(), c"--ring".as_ptr(), ring.as_ptr(), null()],
        environment: environment_without_preload(inner_stack.cast()),
        programs: recorder_candidates(),
        search_path: sys::variable(c"PATH").map_or(null(), CStr::as_ptr),
        inner_stack,
        failed: 0,
    };
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the set is ours.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // No handler of the program may run in a child that shares our memory. On Linux this is the thread's own mask, and
    // an older symbol than pthread_sigmask.
    // SAFETY: both sets are ours; the first was filled.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
    let flags = libc::CLONE_VM | libc::CLONE_VFORK;
    // SAFETY: the child runs on its own stack, touches only `launch`, and we do not go on before it is gone.
    let child = unsafe { libc::clone(detach, outer_stack.cast(), flags, (&raw mut launch).cast()) };
    if child > 0 {
        // SAFETY: the child is ours; nobody else can wait for it.
        unsafe { libc::waitpid(child, null_mut(), libc::__WCLONE) };
    }
    // SAFETY: the set was filled by the call above.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, before.as_ptr(), null_mut()) };
    // SAFETY: both children are gone or have their own memory.
    unsafe { libc::munmap(scratch.cast(), 2 * CHILD_STACK + MOST_VARIABLES * size_of::<*const c_char>()) };
    // SAFETY: `launch` is ours again; the children wrote through the pointer they were given.
    let failed = unsafe { (&raw const launch.failed).read_volatile() };
    if child < 0 {
        Err(b"the recorder could not be started (clone failed)")
    } else if failed != 0 {
        Err(b"the program `gputrace` was found neither beside libgputrace.so nor on PATH (GPUTRACE_RECORDER names it)")
    } else {
        Ok(())
    }
}

extern "C" fn detach(launch: *mut c_void) -> c_int {
    // SAFETY: `start_recorder` passes its `launch`, which outlives us.
    let stack = unsafe { (*launch.cast::<Launch>()).inner_stack };
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: as in `start_recorder`.
    let child = unsafe { libc::clone(become_recorder, stack.cast(), flags, launch) };
    if child < 0 {
        // SAFETY: as above.
        unsafe { (*launch.cast::<Launch>()).failed = 1 };
    }
    0
}

extern "C" fn become_recorder(launch: *mut c_void) -> c_int {
    // SAFETY: `start_recorder` passes its `launch`, which outlives us.
    let launch = unsafe { &mut *launch.cast::<Launch>() };
    // SAFETY: takes nothing.
    unsafe { libc::setsid() };
    for signal in 1..=64 {
        // SAFETY: our table of handlers is a copy. Two signals refuse, two belong to the C library; none matters.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    let mut none = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the set is ours.
    unsafe { libc::sigemptyset(none.as_mut_ptr()) };
    // SAFETY: the set was just emptied.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), null_mut()) };
    // The program's pipes must close when it closes them; stderr stays, for what must be said.
    // SAFETY: the path ends with a zero.
    let nowhere = unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR) };
    if nowhere >= 0 {
        for stream in [0, 1] {
            // SAFETY: our table of descriptors is a copy.
            unsafe { libc::dup2(nowhere, stream) };
        }
    }
    // SAFETY: as above. Before Linux 5.9 there is no such call, and we close what a process usually has.
    if unsafe { libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, 0_u32) } != 0 {
        for file in 3..1024 {
            // SAFETY: as above.
            unsafe { libc::close(file) };
        }
    }
    for program in &launch.programs {
        execute(program, launch.arguments.as_ptr(), launch.environment);
    }
    // SAFETY: a variable of the environment, or null.
    for folder in unsafe { sys::c_bytes(launch.search_path) }.split(|byte| *byte == b':') {
        let program = Text::<1024>::new().add(folder).add(b"/gputrace");
        execute(&program, launch.arguments.as_ptr(), launch.environment);
    }
    launch.failed = 1;
    // SAFETY: `_exit` runs nothing of the program's.
    unsafe { libc::_exit(127) }
}

fn execute(program: &Text<1024>, arguments: *const *const c_char, environment: *const *const c_char) {
    if !program.as_bytes().is_empty() && !program.is_full() {
        // SAFETY: all three end as execve wants; if it fails, the next candidate is tried.
        unsafe { libc::execve(program.as_c_str().as_ptr(), arguments, environment) };
    }
}

/// The program's environment as it is now, less what would load us into the recorder.
fn environment_without_preload(into: *mut *const c_char) -> *const *const c_char {
    unsafe extern "C" {
        static environ: *const *const c_char;
    }
    let mut kept = 0;
    // SAFETY: the C library keeps `environ`.
    let mut at = unsafe { environ };
    while !at.is_null() && kept + 1 < MOST_VARIABLES {
        // SAFETY: the array ends with null.
        let variable = unsafe { *at };
        if variable.is_null() {
            break;
        }
        // SAFETY: its entries are C strings.
        let text = unsafe { sys::c_bytes(variable) };
        if ![b"LD_PRELOAD=".as_slice(), b"LD_AUDIT=", b"GPUTRACE="].iter().any(|name| text.starts_with(name))
        {
            // SAFETY: the array has room for `MOST_VARIABLES`.
            unsafe { *into.wrapping_add(kept) = variable };
            kept += 1;
        }
        // SAFETY: this was not the last entry.
        at = unsafe { at.add(1) };
    }
    // SAFETY: `kept` is below `MOST_VARIABLES`; the array ends with null.
    unsafe { *into.wrapping_add(kept) = null() };
    into
}

fn recorder_candidates() -> [Text<1024>; 3] {
    let mut candidates = [const { Text::new() }; 3];
    let [named, beside, installed] = &mut candidates;
    if let Some(path) = config::RECORDER.value() {
        *named = Text::new().add(path.to_bytes());
    }
    if let Some(library) = elf::by_address(recorder_candidates as *const () as usize) {
        let path = library.path();
        let folder = path
            .iter()
            .rposition(|byte| *byte == b'/')
            .map_or(b".".as_slice(), |at| path.get(..at).unwrap_or_default());
        *beside = Text::new().add(folder).add(b"/gputrace");
        *installed = Text::new().add(folder).add(b"/../bin/gputrace");
    }
    candidates
}

/// Before `main`: only what needs no memory, no file and no thread.
extern "C" fn construct() {
    CLOCK.store(Clock::of_this_machine() as u32, Ordering::Relaxed);
    crate::hooks::loader::find_real_dlsym();
    crate::nccl::threads::find_real_create();
}

/// After `main`: tells the recorder, and waits for the trace so that the next command of a script finds it.
extern "C" fn destruct() {
    let _errno = KeepErrno::new();
    let Some(map) = map() else { return };
    if let Some(mut lane) = lane(Start::OnlyIfLive) {
        crate::hooks::loader::describe_bypasses(lane.producer());
    }
    let header = map.header();
    header.process.value.store(map::EXITING, Ordering::Release);
    let patience = config::EXIT_WAIT.number().unwrap_or(EXIT_PATIENCE).min(600_000);
    for waited in 0..patience {
        match header.recorder.value.load(Ordering::Acquire) {
            map::COMPLETE | map::FAILED => return end(),
            // A recorder that never came is no reason to wait for long.
            map::NO_RECORDER if waited > 1_000 => return end(),
            map::RECORDING if waited % 50 == 49 && recorder_is_gone() => {
                end();
                return say_recorder_is_gone();
            }
            _ => kernel::sleep(1_000_000),
        }
    }
    end();
    say(b"the recorder is still busy; the trace will be complete a little later");
}

/// A recorder holds the lock of the ring's file for as long as it lives.
fn recorder_is_gone() -> bool {
    // SAFETY: written before the generation that let us come here.
    let path = unsafe { &*RING.0.get() };
    // SAFETY: the path ends with a zero.
    let file = unsafe { libc::open(path.as_c_str().as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
    if file < 0 {
        return false;
    }
    // SAFETY: the descriptor is ours.
    let free = unsafe { libc::flock(file, libc::LOCK_SH | libc::LOCK_NB) } == 0;
    // SAFETY: as above; this gives the lock back, if we have it.
    unsafe { libc::close(file) };
    free
}

fn say_recorder_is_gone() {
    // SAFETY: as in `recorder_is_gone`.
    let path = unsafe { &*RING.0.get() };
    let message = Text::<480>::new()
        .add(b"the recorder was killed; its trace ends there, and the events since then are in ")
        .add(path.as_bytes())
        .add(b": `gputrace recover` makes a trace of them");
    say(message.as_bytes());
}

/// What libraries give back after us, at the very end, would only open the finished trace again.
fn end() {
    if let Some(page) = page() {
        page.generation.store(OFF, Ordering::Release);
        page.state.store(STEPPED_ASIDE, Ordering::Release);
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCT: extern "C" fn() = construct;

#[used]
#[unsafe(link_section = ".fini_array")]
static DESTRUCT: extern "C" fn() = destruct;
