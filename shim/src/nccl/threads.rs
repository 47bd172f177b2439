//! For which communicator, and because of which call, NCCL asks the driver for memory.
//!
//! Inside the program's call that is plain. But NCCL has threads of its own, and most of its memory is allocated there: a
//! caller asks its communicator's proxy thread for buffers and waits for them. Such a thread is known by its descent: it
//! was started inside a call into NCCL, or by a thread that was. The call it works for is the one that is open at that
//! moment; if several are, the one of its own communicator, else the one that started it.

use crate::arch;
use crate::sys::KeepErrno;
use crate::tls::{self, Tls};
use crate::{elf, lanes, mark, reserved};
use core::ffi::{c_int, c_void};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use gputrace_ring::owners::Claim;
use gputrace_ring::record::Call;

/// Calls that are inside of NCCL at one time.
const MOST_OPEN: usize = 64;
/// Threads of NCCL that have been started and do not run yet.
const MOST_STARTING: usize = 64;
/// `EAGAIN` (errno.h): what `pthread_create` says where it cannot make a thread.
const TRY_AGAIN: c_int = 11;

static OPEN: [Place; MOST_OPEN] =
    [const { Place { call: AtomicU64::new(0), comm: AtomicU32::new(0), thread: AtomicU64::new(0) } };
        MOST_OPEN];
static STARTING: [Birth; MOST_STARTING] = [const { Birth::new() }; MOST_STARTING];
static REAL_CREATE: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

/// Of a call that is open.
struct Place {
    /// 0 free.
    call: AtomicU64,
    comm: AtomicU32,
    /// Who is inside: a claim of a thread line, the word in the lower half; 0 not said yet, or not known.
    thread: AtomicU64,
}

impl Place {
    fn free(&self) {
        self.comm.store(0, Ordering::Relaxed);
        self.thread.store(0, Ordering::Relaxed);
        self.call.store(0, Ordering::Release);
    }

    /// Its call, if whoever is inside has not ended there, nor was left behind by a fork.
    fn open_call(&self) -> Option<u64> {
        let call = self.call.load(Ordering::Acquire);
        if call == 0 {
            return None;
        }
        let thread = self.thread.load(Ordering::Acquire);
        let claim = Claim { line: (thread >> 32) as u32, word: thread as u32 };
        if thread != 0 && lanes::is_gone(claim) {
            self.free();
            return None;
        }
        Some(call)
    }
}

/// A call that is open, until dropped.
pub(crate) struct Open(&'static Place);

impl Open {
    /// `None` if too many are open: then NCCL's threads are charged by their descent alone.
    pub(crate) fn new(comm: u32, call: u64) -> Option<Open> {
        let is_mine = |place: &&Place| {
            place.call.load(Ordering::Relaxed) == 0
                && place.call.compare_exchange(0, call, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let mut place = OPEN.iter().find(is_mine);
        if place.is_none() {
            place = OPEN.iter().find(|place| place.open_call().is_none() && is_mine(place));
        }
        let place = place?;
        let caller = lanes::caller().map_or(0, |claim| u64::from(claim.line) << 32 | u64::from(claim.word));
        place.thread.store(caller, Ordering::Relaxed);
        place.comm.store(comm, Ordering::Release);
        Some(Open(place))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.free();
    }
}

/// A call is over that nobody came back from.
fn close(call: u64) {
    if let Some(place) = OPEN.iter().find(|place| place.call.load(Ordering::Relaxed) == call) {
        place.free();
    }
}

/// No hook's frame has so many bytes beside its mark, nor one of `pthread_create` or of the driver down to its record.
const ROOM: usize = 3072;

/// The thread is inside of NCCL.
pub(crate) type Mark = mark::Mark<ROOM>;

/// The call into NCCL that whoever stands at `top` is inside of, see [`mark::Mark::top`]; 0 none. One that was left past its
/// hook is over.
#[inline]
pub(crate) fn inside(tls: &Tls, top: usize) -> u64 {
    let call = tls.nccl_call.get();
    if call == 0 || Mark::is_around(tls, tls.nccl_mark.get(), top) {
        return call;
    }
    tls.nccl_call.set(0);
    close(call);
    0
}

/// Says in a driver call whether it is NCCL's.
#[inline]
pub(crate) fn charge(call: &mut Call, tls: &Tls) {
    let own = inside(tls, tls.busy.get());
    if own != 0 {
        call.comm = tls.nccl_comm.get();
        call.nccl_call = own;
    } else if tls.lineage[1].get() != 0 {
        charge_thread(call, tls.lineage[0].get() as u32, tls.lineage[1].get());
    }
}

#[cold]
fn charge_thread(call: &mut Call, comm: u32, started_by: u64) {
    call.flags |= Call::NCCL_THREAD;
    let (mut only, mut own, mut n_open) = ((comm, started_by), None, 0);
    for place in &OPEN {
        if let Some(number) = place.open_call() {
            let of = place.comm.load(Ordering::Acquire);
            n_open += 1;
            only = (if of == 0 { comm } else { of }, number);
            own = own.or((comm != 0 && of == comm).then_some((of, number)));
        }
    }
    let (comm, by) = if n_open == 1 { only } else { own.unwrap_or((comm, started_by)) };
    call.comm = comm;
    call.nccl_call = by;
}

type Start = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
type Create = unsafe extern "C" fn(*mut c_void, *const c_void, Start, *mut c_void) -> c_int;

/// What a thread that NCCL starts finds when it runs.
struct Birth {
    /// 0 free, 1 taken.
    taken: AtomicU32,
    start: AtomicUsize,
    argument: AtomicUsize,
    comm: AtomicU32,
    call: AtomicU64,
}

impl Birth {
    const fn new() -> Birth {
        Birth {
            taken: AtomicU32::new(0),
            start: AtomicUsize::new(0),
            argument: AtomicUsize::new(0),
            comm: AtomicU32::new(0),
            call: AtomicU64::new(0),
        }
    }
}

/// The `pthread_create` that the program would have without us.
#[cold]
pub(crate) fn find_real_create() -> *mut c_void {
    let _errno = KeepErrno::new();
    let address = elf::function_behind_us(c"pthread_create");
    if address != 0 {
        REAL_CREATE.store(address as *mut c_void, Ordering::Release);
    }
    address as *mut c_void
}

/// Stands in for the C library's, to know the threads that NCCL starts; of all others only how many there are ([`reserved`]).
///
/// # Safety
/// As `pthread_create(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pthread_create(
    thread: *mut c_void,
    attributes: *const c_void,
    start: Start,
    argument: *mut c_void,
) -> c_int {
    let mut real = REAL_CREATE.load(Ordering::Acquire);
    if real.is_null() {
        real = find_real_create();
        if real.is_null() {
            return TRY_AGAIN;
        }
    }
    reserved::expect_thread();
    // SAFETY: found as the C library's function of this name.
    let real: Create = unsafe { core::mem::transmute(real) };
    let Some(birth) = birth(tls::here(), start, argument) else {
        // SAFETY: the program's own arguments.
        return unsafe { real(thread, attributes, start, argument) };
    };
    let place: *const Birth = birth;
    // SAFETY: the program's own arguments, but for the start, which goes on where it would have begun.
    let result = unsafe { real(thread, attributes, begin, place.cast_mut().cast()) };
    if result != 0 {
        birth.taken.store(0, Ordering::Release);
    }
    result
}

/// Starts a thread of our own.
pub(crate) fn create_own(attributes: *const c_void, start: Start) -> bool {
    let real = REAL_CREATE.load(Ordering::Acquire);
    if real.is_null() {
        return false;
    }
    // SAFETY: found as the C library's function of this name.
    let real: Create = unsafe { core::mem::transmute(real) };
    let mut thread: libc::pthread_t = 0;
    // SAFETY: the attributes are initialised, and the thread's number is ours.
    unsafe { real((&raw mut thread).cast(), attributes, start, null_mut()) == 0 }
}

/// `None` for threads that are not NCCL's, and where there is no room.
fn birth(tls: &Tls, start: Start, argument: *mut c_void) -> Option<&'static Birth> {
    let (comm, call) = match inside(tls, tls::stack_pointer()) {
        0 => (tls.lineage[0].get() as u32, tls.lineage[1].get()),
        call => (tls.nccl_comm.get(), call),
    };
    if call == 0 {
        return None;
    }
    let claim =
        |birth: &&Birth| birth.taken.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    let birth = STARTING.iter().find(claim)?;
    birth.start.store(start as *const () as usize, Ordering::Relaxed);
    birth.argument.store(argument as usize, Ordering::Relaxed);
    birth.comm.store(comm, Ordering::Relaxed);
    birth.call.store(call, Ordering::Release);
    Some(birth)
}

/// Where the thread goes on, in two registers.
#[repr(C)]
struct Onward {
    start: usize,
    argument: usize,
}

/// In the new thread.
unsafe extern "C" fn settle(birth: *const Birth) -> Onward {
    // SAFETY: `pthread_create` above gave us a place of a static table.
    let birth = unsafe { &*birth };
    let tls = tls::here();
    tls.lineage[1].set(birth.call.load(Ordering::Acquire));
    tls.lineage[0].set(birth.comm.load(Ordering::Relaxed).into());
    let onward = Onward {
        start: birth.start.load(Ordering::Relaxed),
        argument: birth.argument.load(Ordering::Relaxed),
    };
    birth.taken.store(0, Ordering::Release);
    onward
}

/// Begins a thread of NCCL, and leaves nothing on its stack: exceptions and `pthread_exit` pass as without us.
#[unsafe(naked)]
unsafe extern "C" fn begin(_birth: *mut c_void) -> *mut c_void {
    arch::goes_on!(settle)
}
