//! PyTorch's caching allocator, seen from the program's side, without a change to the program.
//!
//! `libc10_cuda.so` tells the profiler of every block it hands out and takes back, by two exported functions of
//! `libc10.so` (c10/core/Allocator.h; the same in releases 1.11 to 2.15). They carry the block and PyTorch's own
//! totals, but not what was asked for: that passes through the third slot of the allocator's vtable, `allocate`, just
//! before, on the same thread. The vtable is not changed: the object gets a copy of it in which that slot is ours.

use super::torch_pools;
use crate::arch;
use crate::backward;
use crate::callsite;
use crate::elf;
use crate::lanes;
use crate::ledger;
use crate::remembered::{self, NONE_FOUND};
use crate::session::{self, Start};
use crate::sys::{self, KeepErrno};
use crate::thread_state::WAIT_SLOTS;
use crate::tls;
use crate::{asked, kernel};
use core::ffi::{CStr, c_int, c_void};
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use gputrace_ring::record::{BlockAlloc, BlockFree, BlockOom, Kind, UNKNOWN, pack_device};
use gputrace_ring::ring::Producer;

/// `c10::DeviceType::CUDA` (c10/core/DeviceType.h).
const CUDA: u16 = 1;
/// Slot of `allocate` after the two destructors (Itanium C++ ABI 2.9; c10/core/Allocator.h, 1.11 to 2.15).
const ALLOCATE_SLOT: usize = 2;
/// Words before the first slot: offset to top, and type information (Itanium C++ ABI 2.5.2).
const VTABLE_PREFIX: usize = 2;
/// More slots than any release has (2.15: 57); what lies behind the real ones is copied and never used.
const VTABLE_WORDS: usize = 128;
/// How often a block without a request makes us look for the allocator again.
const MOST_LOOKS: u32 = 64;

const ALLOCATOR: &CStr = c"_ZN3c104cuda20CUDACachingAllocator9allocatorE";
/// How C++ calls the type of the allocator with a cache (1.12 to 2.15); the other one is that of `backend:cudaMallocAsync`.
const CACHING: &CStr = c"N3c104cuda20CUDACachingAllocator6Native22NativeCachingAllocatorE";
const CURRENT_STREAM: &CStr = c"_ZN3c104cuda20getCurrentCUDAStreamEa";
const STREAM_HANDLE: &CStr = c"_ZNK3c104cuda10CUDAStream6streamEv";
const REPORT_USAGE: &CStr = c"_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE";
const REPORT_OOM: &CStr = c"_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE";

/// Nothing of PyTorch's was seen.
const ABSENT: u32 = 0;
/// PyTorch's allocator reports, but requests do not pass by.
const REPORTS: u32 = 1;
/// Requests pass by.
const REQUESTS: u32 = 2;
/// The allocator does not look as expected: requests will never pass by.
const UNEXPECTED: u32 = 3;

#[unsafe(link_section = "gputrace_hot_data")]
static STATE: AtomicU32 = AtomicU32::new(ABSENT);
#[unsafe(link_section = "gputrace_hot_data")]
static LOOKS: AtomicU32 = AtomicU32::new(0);
#[unsafe(link_section = "gputrace_hot_data")]
static REAL_ALLOCATE: AtomicUsize = AtomicUsize::new(0);
#[unsafe(link_section = "gputrace_hot_data")]
static GET_STREAM: AtomicUsize = AtomicUsize::new(0);
#[unsafe(link_section = "gputrace_hot_data")]
static GET_STREAM_HANDLE: AtomicUsize = AtomicUsize::new(0);
#[unsafe(link_section = "gputrace_hot_data")]
static REAL_REPORT_USAGE: AtomicUsize = AtomicUsize::new(0);
static REAL_REPORT_OOM: AtomicUsize = AtomicUsize::new(0);

/// `c10::Stream`, sixteen bytes returned in registers.
#[derive(Clone, Copy)]
#[repr(C)]
struct Stream {
    device: u64,
    id: i64,
}

type GetStream = unsafe extern "C" fn(i8) -> Stream;
type GetStreamHandle = unsafe extern "C" fn(*const Stream) -> *mut c_void;
type ReportUsage = unsafe extern "C" fn(*mut c_void, i64, usize, usize, u16);
type ReportOom = unsafe extern "C" fn(i64, usize, usize, u16);

/// Whether PyTorch's allocator is in this process.
#[inline]
pub(crate) fn is_here() -> bool {
    STATE.load(Ordering::Relaxed) != ABSENT
}

/// PyTorch's allocator: its object, and whether it is the caching one.
pub(super) struct TorchAllocator {
    pub(super) object: usize,
    pub(super) is_caching: bool,
}

/// The allocator, where its requests pass by.
pub(super) fn allocator() -> Option<TorchAllocator> {
    if STATE.load(Ordering::Relaxed) != REQUESTS {
        return None;
    }
    let variable = elf::by_soname(c"libc10_cuda.so")?.symbol(ALLOCATOR)?;
    // SAFETY: the symbol's own memory, aligned as a pointer.
    let object = unsafe { &*(variable as *const AtomicUsize) }.load(Ordering::Acquire);
    if object == 0 {
        return None;
    }
    // SAFETY: an object with virtual functions begins with the address of its table, before which lies that of its type.
    let (table, word) = (unsafe { *(object as *const usize) }, size_of::<usize>());
    // SAFETY: as above.
    let kind = unsafe { *((table - word) as *const usize) };
    // SAFETY: `std::type_info`: its own table, then its name (Itanium C++ ABI 2.9.4).
    let name = unsafe { *((kind + word) as *const *const core::ffi::c_char) };
    // SAFETY: the name ends with a zero.
    let is_caching = kind != 0 && !name.is_null() && unsafe { CStr::from_ptr(name) } == CACHING;
    Some(TorchAllocator { object, is_caching })
}

/// Puts our `allocate` into the allocator, if it is there and looks as expected.
#[cold]
pub(crate) fn look() {
    if matches!(STATE.load(Ordering::Relaxed), REQUESTS | UNEXPECTED) {
        return;
    }
    let _errno = KeepErrno::new();
    backward::look();
    let Some(library) = elf::by_soname(c"libc10_cuda.so") else { return };
    STATE.fetch_max(REPORTS, Ordering::Relaxed);
    if let Some(address) = library.symbol(CURRENT_STREAM) {
        GET_STREAM.store(address, Ordering::Relaxed);
    }
    if let Some(address) = library.symbol(STREAM_HANDLE) {
        GET_STREAM_HANDLE.store(address, Ordering::Relaxed);
    }
    let Some(variable) = library.symbol(ALLOCATOR) else {
        STATE.store(UNEXPECTED, Ordering::Relaxed);
        return;
    };
    // `allocator` is a `std::atomic<CUDAAllocator*>`, and was a plain pointer before.
    // SAFETY: the symbol's own memory, aligned as a pointer.
    let object = unsafe { &*(variable as *const AtomicUsize) }.load(Ordering::Acquire);
    if object == 0 {
        return; // Not made yet.
    }
    // SAFETY: an object with virtual functions begins with the address of its vtable.
    let vtable_word = unsafe { &*(object as *const AtomicUsize) };
    let vtable = vtable_word.load(Ordering::Acquire);
    if !library.contains(vtable) {
        // Another allocator was plugged in (torch.cuda.memory.change_current_allocator): it reports nothing.
        STATE.store(UNEXPECTED, Ordering::Relaxed);
        return;
    }
    let first = vtable - VTABLE_PREFIX * size_of::<usize>();
    // SAFETY: the vtable lies in the library; its slots are words.
    let allocate = unsafe { *(vtable as *const usize).wrapping_add(ALLOCATE_SLOT) };
    if !library.contains(allocate) {
        STATE.store(UNEXPECTED, Ordering::Relaxed);
        return;
    }
    let copy = sys::pages(4096).cast::<usize>();
    if copy.is_null() {
        return;
    }
    let mut n_copied = 0;
    for at in 0..VTABLE_WORDS {
        let from = first + at * size_of::<usize>();
        // A library may have holes that cannot be read behind its constants.
        if from >= library.end() || ((at == 0 || from.is_multiple_of(4096)) && !asked::can_read(from)) {
            break;
        }
        // SAFETY: a word of the library, which stays, on a page that can be read; the copy is a page.
        unsafe { *copy.wrapping_add(at) = *(from as *const usize) };
        n_copied = at + 1;
    }
    // SAFETY: so many words were just written.
    unsafe { torch_pools::take_places(copy, n_copied, &library) };
    // SAFETY: inside the page.
    unsafe { *copy.wrapping_add(VTABLE_PREFIX + ALLOCATE_SLOT) = allocate_entry as *const () as usize };
    // A table of functions that can be written to is what attackers look for.
    // SAFETY: the page is ours.
    let _ =
        unsafe { kernel::call(libc::SYS_mprotect, [copy as usize, 4096, libc::PROT_READ as usize, 0, 0, 0]) };
    REAL_ALLOCATE.store(allocate, Ordering::Release);
    // SAFETY: inside the page.
    let ours = unsafe { copy.add(VTABLE_PREFIX) } as usize;
    if vtable_word.compare_exchange(vtable, ours, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
        STATE.store(REQUESTS, Ordering::Relaxed);
        if let Some(mut lane) = lanes::lane(Start::OnlyIfLive) {
            describe(lane.producer());
        }
    }
}

/// To be called after objects were unloaded: forgets PyTorch's libraries if they went.
#[cold]
pub(crate) fn note_unloaded() {
    torch_pools::note_unloaded();
    let all = [&REAL_ALLOCATE, &GET_STREAM, &GET_STREAM_HANDLE, &REAL_REPORT_USAGE, &REAL_REPORT_OOM];
    if remembered::forget_if_gone(all.into_iter()) {
        LOOKS.store(0, Ordering::Relaxed);
        STATE.store(ABSENT, Ordering::Relaxed);
    }
}

/// Says in the trace what can be known of requests.
pub(crate) fn describe(producer: &mut Producer) {
    let fact: &[u8] = match STATE.load(Ordering::Relaxed) {
        ABSENT => return,
        REQUESTS => b"torch.requests=seen",
        UNEXPECTED => b"torch.requests=unseen: the allocator does not look like that of PyTorch 1.11 to 2.15",
        _ => b"torch.requests=unseen: the allocator did not exist yet",
    };
    let at = producer.now();
    producer.push_raw(at, Kind::Note, &[fact]);
    torch_pools::describe(producer);
}

/// Slot of the copied vtable: `DataPtr CUDAAllocator::allocate(size_t)`. The result is written where the caller says
/// (Itanium C++ ABI 3.1.3): the arguments named here are those of x86-64. PyTorch throws through this frame when it is out of memory, so it is
/// described to unwinders, who call [`unwound`] and pass on.
#[unsafe(naked)]
#[unsafe(link_section = "gputrace_hot")]
unsafe extern "C" fn allocate_entry(_result: *mut c_void, _this: *mut c_void, _bytes: usize) -> *mut c_void {
    arch::calls_around!(allocate enter_allocate leave_allocate, personality unwound)
}

/// What unwinders ask at the frame of [`allocate_entry`], for exceptions and for threads that end (Itanium C++ ABI, Exception
/// Handling, 1.6): nobody is caught here, but once they unwind, the thread is not inside any more.
extern "C" fn unwound(
    _version: c_int,
    actions: c_int,
    _class: u64,
    _exception: *mut c_void,
    _context: *mut c_void,
) -> c_int {
    const CLEANUP_PHASE: c_int = 2;
    const CONTINUE_UNWIND: c_int = 8;
    if actions & CLEANUP_PHASE != 0 {
        tls::here().allocate_frame.set(0);
    }
    CONTINUE_UNWIND
}

#[unsafe(link_section = "gputrace_hot")]
extern "C" fn enter_allocate(bytes: usize, frame: usize) -> usize {
    let tls = tls::here();
    tls.requested.set(bytes as u64);
    tls.allocate_frame.set(frame);
    REAL_ALLOCATE.load(Ordering::Relaxed)
}

#[unsafe(link_section = "gputrace_hot")]
extern "C" fn leave_allocate() {
    tls::here().allocate_frame.set(0);
}

/// `void c10::reportMemoryUsageToProfiler(void* ptr, int64_t alloc_size, size_t total_allocated, size_t
/// total_reserved, Device device)`: called under the allocator's lock, `alloc_size` negative for a block taken back.
///
/// # Safety
/// Called by PyTorch only.
#[unsafe(export_name = "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE")]
#[unsafe(link_section = "gputrace_hot")]
pub(crate) unsafe extern "C" fn report_memory_usage(
    block: *mut c_void,
    bytes: i64,
    allocated: usize,
    reserved: usize,
    device: u16,
) {
    if device & 0xff == CUDA {
        let device = (device >> 8) as i8;
        if bytes < 0 {
            block_freed(block as u64, bytes.unsigned_abs(), allocated as u64, reserved as u64, device);
        } else {
            block_allocated(block as u64, bytes as u64, allocated as u64, reserved as u64, device);
        }
    }
    // SAFETY: the symbol's own prototype.
    if let Some(real) = unsafe { real::<ReportUsage>(&REAL_REPORT_USAGE, REPORT_USAGE) } {
        // SAFETY: PyTorch's own arguments.
        unsafe { real(block, bytes, allocated, reserved, device) };
    }
}

/// `void c10::reportOutOfMemoryToProfiler(int64_t alloc_size, size_t total_allocated, size_t total_reserved, Device
/// device)`: called before PyTorch throws.
///
/// # Safety
/// Called by PyTorch only.
#[unsafe(export_name = "_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE")]
pub(crate) unsafe extern "C" fn report_out_of_memory(
    bytes: i64,
    allocated: usize,
    reserved: usize,
    device: u16,
) {
    if device & 0xff == CUDA {
        out_of_memory(bytes.unsigned_abs(), allocated as u64, reserved as u64, (device >> 8) as i8);
    }
    // SAFETY: the symbol's own prototype.
    if let Some(real) = unsafe { real::<ReportOom>(&REAL_REPORT_OOM, REPORT_OOM) } {
        // SAFETY: PyTorch's own arguments.
        unsafe { real(bytes, allocated, reserved, device) };
    }
}

#[inline]
fn block_allocated(addr: u64, bytes: u64, allocated: u64, reserved: u64, device: i8) {
    if STATE.load(Ordering::Relaxed) != REQUESTS && LOOKS.fetch_add(1, Ordering::Relaxed) < MOST_LOOKS {
        STATE.fetch_max(REPORTS, Ordering::Relaxed);
        look();
    }
    let Some(mut lane) = lanes::lane(Start::OnlyIfLive) else {
        if ledger::is_kept() {
            remember(addr, bytes, device);
        }
        return;
    };
    let tls = tls::here();
    tls.waits.set(0);
    let (mut requested, mut stream) = (UNKNOWN, UNKNOWN);
    if tls.is_in_allocate() {
        requested = tls.requested.get();
        stream = current_stream(&mut lane.state().torch_stream, device);
    }
    let stack = callsite::capture(&mut lane, callsite::Of::Block(bytes));
    let at = session::now();
    let record = BlockAlloc {
        addr,
        device_bytes: pack_device(device, bytes),
        requested,
        stream,
        allocated,
        reserved,
        stack,
    };
    if ledger::is_kept() {
        let _ = ledger::block_given(&record, at, lane.session() as u32);
    }
    lane.producer().push_brief(at, 0, &record);
}

/// While nobody records: for who attaches later.
#[cold]
fn remember(addr: u64, bytes: u64, device: i8) {
    let tls = tls::here();
    let requested = if tls.is_in_allocate() { tls.requested.get() } else { UNKNOWN };
    let record = BlockAlloc {
        addr,
        device_bytes: pack_device(device, bytes),
        requested,
        stream: UNKNOWN,
        allocated: 0,
        reserved: 0,
        stack: 0,
    };
    let noted = ledger::block_given(&record, session::now(), 0);
    if let Some(noted) = noted
        && let Some(mut lane) = lanes::lane(Start::OnlyIfLive)
        && noted.is_mine_to_tell(lane.session() as u32)
    {
        let at = session::now();
        lane.producer().push_brief(at, 0, &record);
    }
}

#[inline]
fn block_freed(addr: u64, bytes: u64, allocated: u64, reserved: u64, device: i8) {
    let told = if ledger::is_kept() { ledger::block_taken(addr) } else { None };
    let Some(mut lane) = lanes::lane(Start::OnlyIfLive) else { return };
    // A session that was never told of it needs no word of its end.
    if told.is_some_and(|told| told != lane.session() as u32) {
        return;
    }
    let tls = tls::here();
    let waits = tls.waits.replace(0) as usize;
    if waits != 0 {
        let at = session::now();
        // Slots are reused in a circle: at most all of them, the oldest first.
        for i in waits.saturating_sub(WAIT_SLOTS)..waits {
            let wait = lane.state().waits.get(i % WAIT_SLOTS).copied().unwrap_or_default();
            lane.producer().push(at, 0, &wait);
        }
    }
    let stack = callsite::capture(&mut lane, callsite::Of::Block(bytes));
    let at = session::now();
    let record = BlockFree { addr, device_bytes: pack_device(device, bytes), allocated, reserved, stack };
    let is_captured = stack != 0;
    let is_collecting = lane.state().stack.is_collecting(is_captured);
    let flags = if is_collecting { BlockFree::COLLECTING } else { 0 };
    lane.producer().push_brief(at, flags, &record);
}

#[cold]
fn out_of_memory(bytes: u64, allocated: u64, reserved: u64, device: i8) {
    let tls = tls::here();
    let is_in_allocate = tls.is_in_allocate();
    let requested = if is_in_allocate { tls.requested.get() } else { UNKNOWN };
    // The exception that follows skips `leave_allocate`.
    tls.allocate_frame.set(0);
    let Some(mut lane) = lanes::lane(Start::IfNeeded) else { return };
    let stream =
        if is_in_allocate { current_stream(&mut lane.state().torch_stream, device) } else { UNKNOWN };
    let stack = callsite::capture(&mut lane, callsite::Of::Block(bytes));
    let at = session::now();
    let device_bytes = pack_device(device, bytes);
    let record = BlockOom { device_bytes, requested, stream, allocated, reserved, stack };
    lane.producer().push(at, 0, &record);
}

/// The stream that `allocate` uses. Reads PyTorch's own thread-local; the handle of a stream seen twice in a row is
/// remembered.
#[inline]
pub(super) fn current_stream(last: &mut (i64, u64), device: i8) -> u64 {
    let get = GET_STREAM.load(Ordering::Relaxed);
    if get == 0 {
        return UNKNOWN;
    }
    // SAFETY: `CUDAStream getCurrentCUDAStream(DeviceIndex)`: a trivially copyable class of sixteen bytes comes back
    // in two registers.
    let get: GetStream = unsafe { core::mem::transmute(get) };
    // SAFETY: the allocator has just asked the same.
    let stream = unsafe { get(device) };
    if stream.id == 0 {
        return 0; // The legacy default stream (c10/cuda/CUDAStream.cpp, StreamIdType).
    }
    if stream.id == last.0 {
        return last.1;
    }
    let handle = GET_STREAM_HANDLE.load(Ordering::Relaxed);
    if handle == 0 {
        return UNKNOWN;
    }
    // SAFETY: `cudaStream_t CUDAStream::stream() const`.
    let handle: GetStreamHandle = unsafe { core::mem::transmute(handle) };
    // SAFETY: `this` is the stream that we were just given.
    let handle = unsafe { handle(&raw const stream) } as u64;
    *last = (stream.id, handle);
    handle
}

/// The function of `libc10.so` that our export hides.
///
/// # Safety
/// `F` is the type of a pointer to it.
#[inline]
unsafe fn real<F: Copy>(slot: &AtomicUsize, name: &CStr) -> Option<F> {
    let mut address = slot.load(Ordering::Relaxed);
    if address == 0 {
        address = find_real(name);
        slot.store(address, Ordering::Relaxed);
    }
    // SAFETY: a function pointer is as large as an address; the caller knows its type.
    (address > NONE_FOUND).then(|| unsafe { core::mem::transmute_copy(&address) })
}

/// Ours for the function of `libc10.so` that has this name, if that is the one.
pub(super) fn ours_for(name: &CStr, target: usize) -> Option<usize> {
    let ours = match name {
        _ if name == REPORT_USAGE => report_memory_usage as *const () as usize,
        _ if name == REPORT_OOM => report_out_of_memory as *const () as usize,
        _ => return None,
    };
    (find_real(name) == target).then_some(ours)
}

/// Address of a function of `libc10.so`; [`NONE_FOUND`] if there is none, so that it is looked for once.
#[cold]
fn find_real(name: &CStr) -> usize {
    let _errno = KeepErrno::new();
    elf::by_soname(c"libc10.so").and_then(|library| library.symbol(name)).unwrap_or(NONE_FOUND)
}
