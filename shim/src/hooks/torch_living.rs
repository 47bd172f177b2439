//! What PyTorch's allocator had handed out before this library came into the process, as the allocator itself lists it.
//!
//! `snapshot` of the allocator copies its list of segments and blocks under its own lock, as `torch.cuda.memory_snapshot()` does; no
//! Python runs, and nothing is asked of CUDA. It is called on the thread that brought us in, when the program's words are ours: what is given
//! and taken from then on is seen, and wins over the list ([`ledger::Merge`]). Where anything looks otherwise than in the releases that
//! we know, nothing is called, or nothing of the list is taken.

use super::cuda_driver::Row;
use super::torch::{self, TorchAllocator};
use super::torch_pools;
use crate::arch;
use crate::elf;
use crate::kernel;
use crate::ledger;
use crate::sys::Text;
use core::ffi::{CStr, c_int, c_void};
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use gputrace_ring::clock::Ticks;
use gputrace_ring::record::{Action, BlockAlloc, Call, Kind, pack_device};
use gputrace_ring::ring::Producer;

/// `std::vector` of GCC and of LLVM: first, behind the last, and behind what is reserved.
#[derive(Clone, Copy)]
#[repr(C)]
struct Vector {
    first: usize,
    end: usize,
    room: usize,
}

/// `SegmentInfo` (c10/cuda/CUDACachingAllocator.h, from 2.10 c10/core/CachingDeviceAllocator.h): the same in 2.3 to 2.15, held against
/// the headers of each release by `offsetof`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Segment {
    device: i8,
    address: u64,
    bytes: u64,
    requested: u64,
    allocated: u64,
    active: u64,
    stream: u64,
    is_large: u8,
    is_expandable: u8,
    pool: [u64; 2],
    blocks: Vector,
    context: [usize; 2],
}

/// `BlockInfo`, likewise.
#[derive(Clone, Copy)]
#[repr(C)]
struct Block {
    bytes: u64,
    requested: u64,
    age: i32,
    is_allocated: u8,
    is_active: u8,
    context: [usize; 2],
}

/// `SnapshotInfo`: the segments, then what each device's history has, then more (224 bytes in 2.15).
#[repr(C)]
struct Listed {
    segments: Vector,
    histories: Vector,
    more: [u64; 500],
}

/// More than a process has: a list that is longer is not one.
const MOST: usize = 1 << 20;
/// Pages of an expandable segment: of its large pool, else of its small one (kLargeBuffer, kSmallBuffer).
const LARGE_PAGE: u64 = 20 << 20;
const SMALL_PAGE: u64 = 2 << 20;
/// Marks a name for physical memory whose handle nobody knows but PyTorch: no handle of the driver's has this bit.
const NAMELESS: u64 = 1 << 55;

/// Nothing was looked at.
const NOT_ASKED: u32 = 0;
/// All of the list is in the ledger.
const KNOWN: u32 = 1;
/// It keeps a history, which may take a second to copy, under its lock.
const HAS_HISTORY: u32 = 2;
/// It is not the caching allocator of a release that we know.
const OTHER: u32 = 3;
/// The list is not as expected.
const UNLIKE: u32 = 4;
/// The allocator threw an exception.
const THREW: u32 = 5;

static OUTCOME: AtomicU32 = AtomicU32::new(NOT_ASKED);
static N_BLOCKS: AtomicU64 = AtomicU64::new(0);
static N_SEGMENTS: AtomicU64 = AtomicU64::new(0);

/// Has the ledger know what the allocator held, as of `before`: a time before the program's words became ours.
///
/// On a thread of our own, which may wait for the allocator's lock.
pub(crate) fn note(before: Ticks) {
    let outcome = match torch::allocator() {
        None => NOT_ASKED,
        Some(allocator) => ask(&allocator, before),
    };
    OUTCOME.store(outcome, Ordering::Relaxed);
}

/// Says in the trace what is known of it.
pub(crate) fn describe(producer: &mut Producer) {
    let text = Text::<160>::new().add(b"torch.before=");
    let text = match OUTCOME.load(Ordering::Relaxed) {
        NOT_ASKED => return,
        KNOWN => text
            .number(N_BLOCKS.load(Ordering::Relaxed))
            .add(b" blocks and ")
            .number(N_SEGMENTS.load(Ordering::Relaxed))
            .add(b" segments, as PyTorch's allocator lists them"),
        HAS_HISTORY => text.add(b"unseen: PyTorch records its own history, which takes long to copy"),
        UNLIKE => text.add(b"unseen: the allocator's list does not look like that of PyTorch 2.3 to 2.15"),
        THREW => text.add(b"unseen: the allocator could not list its blocks"),
        _ => text.add(b"unseen: the allocator is not the caching one of PyTorch 2.3 to 2.15"),
    };
    let at = producer.now();
    producer.push_raw(at, Kind::Note, &[text.as_bytes()]);
}

fn ask(allocator: &TorchAllocator, before: Ticks) -> u32 {
    let Some(lists) = torch_pools::lists().filter(|_| allocator.is_caching) else { return OTHER };
    if asks(lists.is_history_kept, allocator.object) {
        return HAS_HISTORY;
    }
    let Some(merge) = ledger::Merge::begin(before) else { return NOT_ASKED };
    let mut listed = MaybeUninit::<Listed>::zeroed();
    if !lists_into(&mut listed, allocator.object, lists.snapshot) {
        return THREW;
    }
    // SAFETY: all zeros are a value, and so is what the allocator wrote.
    let listed = unsafe { listed.assume_init_ref() };
    // Twice, so that all of it is known to be sound before any of it is taken.
    let Some((n_segments, n_blocks)) = each(listed, |_| ()) else { return UNLIKE };
    let mut merge = merge.of(n_segments + n_blocks);
    let _ = each(listed, |item| match item {
        Item::Segment(segment) => add_segment(&mut merge, segment),
        Item::Block(segment, addr, block) => add_block(&mut merge, segment, addr, block),
    });
    drop(merge);
    give_back(listed);
    N_SEGMENTS.store(n_segments, Ordering::Relaxed);
    N_BLOCKS.store(n_blocks, Ordering::Relaxed);
    KNOWN
}

/// `bool isHistoryEnabled()`.
fn asks(function: usize, object: usize) -> bool {
    type IsHistoryEnabled = unsafe extern "C" fn(usize) -> bool;
    // SAFETY: the entry of the allocator's own table that its release has for this function.
    let function: IsHistoryEnabled = unsafe { core::mem::transmute(function) };
    // SAFETY: the allocator's own object; the function reads a word of each device, and cannot throw.
    unsafe { function(object) }
}

/// What the list has.
enum Item<'a> {
    Segment(&'a Segment),
    /// That is handed out, at this address.
    Block(&'a Segment, u64, &'a Block),
}

/// Goes through the list: how many segments and handed out blocks it has. `None` if it is not one.
fn each(listed: &Listed, mut with: impl FnMut(Item<'_>)) -> Option<(u64, u64)> {
    let (mut n_segments, mut n_blocks) = (0, 0);
    for at in places::<Segment>(&listed.segments)? {
        let segment: Segment = read(at)?;
        let (mut addr, mut allocated) = (segment.address, 0_u64);
        if segment.address == 0 || segment.device < 0 || segment.is_expandable > 1 || segment.is_large > 1 {
            return None;
        }
        n_segments += 1;
        with(Item::Segment(&segment));
        for at in places::<Block>(&segment.blocks)? {
            let block: Block = read(at)?;
            if block.is_allocated > 1 || block.is_active > 1 {
                return None;
            }
            if block.is_allocated == 1 {
                n_blocks += 1;
                allocated = allocated.checked_add(block.bytes)?;
                with(Item::Block(&segment, addr, &block));
            }
            addr = addr.checked_add(block.bytes)?;
        }
        if addr.checked_sub(segment.address)? != segment.bytes || allocated != segment.allocated {
            return None;
        }
    }
    Some((n_segments, n_blocks))
}

/// Where a vector's elements lie.
fn places<T>(vector: &Vector) -> Option<impl Iterator<Item = usize>> {
    let bytes = vector.end.checked_sub(vector.first)?;
    let n = bytes / size_of::<T>();
    let first = vector.first;
    let is_one = bytes.is_multiple_of(size_of::<T>()) && n <= MOST && vector.room >= vector.end;
    is_one.then(|| (0..n).map(move |index| first + index * size_of::<T>()))
}

/// By the kernel, so that a list that is none cannot end the program.
fn read<T: Copy>(at: usize) -> Option<T> {
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: there is room for one.
    let n = unsafe { kernel::copy(at, value.as_mut_ptr().cast(), size_of::<T>()) }.ok()?;
    // SAFETY: numbers, of which any are a value.
    (n == size_of::<T>()).then(|| unsafe { value.assume_init() })
}

fn add_segment(merge: &mut ledger::Merge, segment: &Segment) {
    let call = |row: Row, action: Action| Call {
        api: row as u16,
        action: action as u8,
        device: segment.device,
        flags: Call::IN_ALLOCATE,
        ..Call::default()
    };
    if segment.is_expandable == 0 {
        let alloc = call(Row::cuMemAlloc_v2, Action::Alloc);
        return merge.call(&Call { addr: segment.address, bytes: segment.bytes, ..alloc });
    }
    let is_of_large = segment.is_large == 1 && segment.bytes.is_multiple_of(LARGE_PAGE);
    let page = if is_of_large { LARGE_PAGE } else { SMALL_PAGE };
    let mut at = segment.address;
    let end = segment.address.saturating_add(segment.bytes);
    while at < end {
        let (bytes, handle) = (page.min(end - at), NAMELESS | at);
        let create = Call { bytes, handle, ..call(Row::cuMemCreate, Action::Create) };
        let map = Call { addr: at, bytes, handle, ..call(Row::cuMemMap, Action::Map) };
        merge.mapped(&create, &map);
        at = at.saturating_add(bytes);
    }
}

fn add_block(merge: &mut ledger::Merge, segment: &Segment, addr: u64, block: &Block) {
    merge.block(&BlockAlloc {
        addr,
        device_bytes: pack_device(segment.device, block.bytes),
        requested: block.requested,
        stream: segment.stream,
        allocated: 0,
        reserved: 0,
        stack: 0,
    });
}

/// Gives back what the list took, but for what is of a few bytes: the text of PyTorch's own options.
fn give_back(listed: &Listed) {
    let Some(delete) = operator_delete() else { return };
    for at in places::<Segment>(&listed.segments).into_iter().flatten() {
        if let Some(segment) = read::<Segment>(at) {
            delete(segment.blocks.first);
        }
    }
    delete(listed.segments.first);
    // A history for each device: without entries, as none is kept.
    let histories = places::<Vector>(&listed.histories);
    let mut are_empty = true;
    for at in histories.into_iter().flatten() {
        are_empty &= read::<Vector>(at).is_some_and(|history| history.first == 0);
    }
    if are_empty {
        delete(listed.histories.first);
    }
}

/// The `operator delete` that the allocator's library uses: what it has taken by `new`, it is to get back.
fn operator_delete() -> Option<impl Fn(usize)> {
    type Sized = unsafe extern "C" fn(*mut c_void, usize);
    let mut found = 0;
    elf::by_soname(c"libc10_cuda.so")?.find_slot(|name, slot| {
        let is_it = name == c"_ZdlPv" || name == c"_ZdlPvm";
        if is_it {
            // SAFETY: an aligned word of the library's data.
            found = unsafe { &*(slot as *const AtomicUsize) }.load(Ordering::Relaxed);
        }
        is_it
    });
    if found == 0 {
        return None;
    }
    // SAFETY: either has the address first; the one without a size does not look at it.
    let delete: Sized = unsafe { core::mem::transmute(found) };
    // SAFETY: addresses that `new` gave out, or null, each once. Allocators check the size at most, as the standard lets them: none does
    // with what vectors hold, whose size libraries of other ages do not pass.
    Some(move |address: usize| unsafe { delete(address as *mut c_void, 0) })
}

/// Where an exception goes on, in the frame of [`call_list`].
static LANDING: AtomicUsize = AtomicUsize::new(0);
/// `_Unwind_SetIP` of the unwinder that C++ uses.
static SET_IP: AtomicUsize = AtomicUsize::new(0);

/// `SnapshotInfo snapshot(MempoolId_t, bool include_traces)`, of all pools; releases that take fewer arguments do not look at the rest. False
/// if it threw.
fn lists_into(listed: &mut MaybeUninit<Listed>, object: usize, snapshot: usize) -> bool {
    const SET: &CStr = c"_Unwind_SetIP";
    let Some(set_ip) = elf::by_soname(c"libgcc_s.so.1").and_then(|unwinder| unwinder.symbol(SET)) else {
        return false;
    };
    SET_IP.store(set_ip, Ordering::Relaxed);
    // SAFETY: the entry of the allocator's own table, which writes a `SnapshotInfo`, for which there is room.
    unsafe { call_list(listed.as_mut_ptr().cast(), object, snapshot) != 0 }
}

/// Calls the function with the first two arguments and four zeros; 0 if it threw. An exception ends here: on a thread of ours nobody else
/// would catch it, and the program would end. What it is made of is not given back.
#[unsafe(naked)]
unsafe extern "C" fn call_list(_result: *mut c_void, _this: usize, _function: usize) -> usize {
    arch::calls_and_catches!(catches LANDING)
}

/// What unwinders ask at that frame (Itanium C++ ABI, Exception Handling, 1.6 and 2.5).
extern "C" fn catches(
    _version: c_int,
    actions: c_int,
    _class: u64,
    _exception: *mut c_void,
    context: *mut c_void,
) -> c_int {
    const SEARCH_PHASE: c_int = 1;
    const HANDLER_FRAME: c_int = 4;
    const HANDLER_FOUND: c_int = 6;
    const INSTALL_CONTEXT: c_int = 7;
    const CONTINUE_UNWIND: c_int = 8;
    type SetIp = unsafe extern "C" fn(*mut c_void, usize);
    if actions & SEARCH_PHASE != 0 {
        return HANDLER_FOUND;
    }
    if actions & HANDLER_FRAME == 0 {
        return CONTINUE_UNWIND;
    }
    // SAFETY: stored before the frame was made.
    let set_ip: SetIp = unsafe { core::mem::transmute(SET_IP.load(Ordering::Relaxed)) };
    // SAFETY: the unwinder's own context, and a place in the frame that it describes.
    unsafe { set_ip(context, LANDING.load(Ordering::Relaxed)) };
    INSTALL_CONTEXT
}
