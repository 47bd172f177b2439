//! Pools of PyTorch's caching allocator: which are open, made, released and emptied.
//!
//! Graphs, `MemPool` and `torch.compile` say so by virtual functions of the allocator (c10/cuda/CUDACachingAllocator.h), whose
//! places changed from release to release. The number of entries of its table says which release it is; where that is none
//! of ours, nothing is touched. Each of our entries tells the call and jumps on: no frame of ours is left, so exceptions and
//! what is passed by reference are none of our business.

use super::torch;
use crate::arch;
use crate::callsite;
use crate::early_pools;
use crate::elf::{self, Object};
use crate::lanes;
use crate::remembered;
use crate::session::{self, Start};
use crate::sys::KeepErrno;
use crate::tls;
use core::ffi::CStr;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use gputrace_ring::record::{Action, Call, Kind, UNKNOWN};
use gputrace_ring::ring::Producer;

/// The numbers of these functions in records: far above those of the rows and of NCCL's functions.
const FIRST_API: u16 = 2048;

/// Words of the table that are no functions: offset to top, and type information (Itanium C++ ABI 2.5.2).
const PREFIX: usize = 2;

/// Where a release has these functions: words from the beginning of the table, prefix included; 0 where it has no such one.
struct Layout {
    /// Words of the whole table.
    words: usize,
    /// In the order of [`FUNCTIONS`].
    places: [usize; FUNCTIONS.len()],
    /// Of `isHistoryEnabled`. `snapshot` stands right before `beginAllocateToPool`.
    history: usize,
    /// `emptyCache` takes a pool.
    empties_one: bool,
    /// `setUseOnOOM` takes a flag.
    may_unset: bool,
    /// It does so where the library exports this.
    may_unset_with: Option<&'static CStr>,
}

/// Held against the headers of each release's wheel: `g++ -fdump-lang-class`.
const LAYOUTS: [Layout; 9] = [
    // 2.3, 2.4
    layout(36, [22, 23, 24, 0, 0, 0, 14], 27, false, false),
    // 2.5
    layout(38, [22, 23, 24, 0, 0, 0, 14], 28, false, false),
    // 2.6, 2.7
    layout(43, [25, 26, 27, 29, 0, 0, 15], 33, false, false),
    // 2.8
    layout(46, [25, 26, 27, 29, 30, 0, 15], 34, true, false),
    // 2.9
    layout(47, [26, 27, 28, 30, 31, 0, 9], 35, true, false),
    // 2.10, and 2.11 with the flag
    Layout {
        may_unset_with: Some(c"_ZN3c104cuda6detail21init_p2p_access_cacheEl"),
        ..layout(52, [28, 29, 30, 32, 33, 34, 9], 38, true, false)
    },
    // 2.12
    layout(54, [28, 29, 30, 32, 33, 34, 9], 38, true, true),
    // 2.13
    layout(57, [28, 29, 32, 34, 35, 36, 9], 40, true, true),
    // 2.14, 2.15
    layout(59, [28, 29, 32, 34, 35, 36, 9], 40, true, true),
];

const fn layout(
    words: usize,
    places: [usize; FUNCTIONS.len()],
    history: usize,
    empties_one: bool,
    may_unset: bool,
) -> Layout {
    Layout { words, places, history, empties_one, may_unset, may_unset_with: None }
}

/// What is told, and by which name.
const FUNCTIONS: [(Action, &[u8]); 7] = [
    (Action::TorchPoolBegin, b"beginAllocateToPool"),
    (Action::TorchPoolEnd, b"endAllocateToPool"),
    (Action::TorchPoolRelease, b"releasePool"),
    (Action::TorchPoolCreate, b"createOrIncrefPool"),
    (Action::TorchPoolUseOnOom, b"setUseOnOOM"),
    (Action::TorchPoolNoSplit, b"setNoSplit"),
    (Action::TorchTrim, b"emptyCache"),
];

/// No allocator was seen.
const ABSENT: u32 = 0;
/// These calls pass by.
const SEEN: u32 = 1;
/// Its table is none of [`LAYOUTS`].
const UNKNOWN_RELEASE: u32 = 2;

static STATE: AtomicU32 = AtomicU32::new(ABSENT);
static EMPTIES_ONE: AtomicBool = AtomicBool::new(false);
static MAY_UNSET: AtomicBool = AtomicBool::new(false);
static LISTS: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
static REALS: [AtomicUsize; FUNCTIONS.len()] = [const { AtomicUsize::new(0) }; FUNCTIONS.len()];

/// Puts our entries into the copy of the allocator's table, which has `n_copied` words, if its release is known.
///
/// # Safety
/// The copy has these words and can be written to.
#[cold]
pub(crate) unsafe fn take_places(copy: *mut usize, n_copied: usize, library: &Object) {
    let word = |at: usize| {
        // SAFETY: the caller's promise.
        if at < n_copied { unsafe { *copy.wrapping_add(at) } } else { 0 }
    };
    // Behind the table comes data, or another one, which begins with a number.
    let words = (PREFIX..n_copied).take_while(|at| elf::is_code(word(*at))).count() + PREFIX;
    let Some(layout) = LAYOUTS.iter().find(|layout| layout.words == words && layout.words < n_copied) else {
        STATE.store(UNKNOWN_RELEASE, Ordering::Relaxed);
        return;
    };
    let lists = [layout.places.first().map_or(0, |begin| begin - 1), layout.history];
    if layout.places.iter().chain(&lists).any(|place| *place != 0 && !library.contains(word(*place))) {
        STATE.store(UNKNOWN_RELEASE, Ordering::Relaxed);
        return;
    }
    EMPTIES_ONE.store(layout.empties_one, Ordering::Relaxed);
    let may_unset = layout.may_unset_with.map_or(layout.may_unset, |name| library.symbol(name).is_some());
    MAY_UNSET.store(may_unset, Ordering::Relaxed);
    for (place, real) in lists.iter().zip(&LISTS) {
        real.store(word(*place), Ordering::Release);
    }
    for ((place, real), ours) in layout.places.iter().zip(&REALS).zip(entries()) {
        if *place != 0 {
            real.store(word(*place), Ordering::Release);
            // SAFETY: inside the table, which is shorter than the copy.
            unsafe { *copy.wrapping_add(*place) = ours };
        }
    }
    STATE.store(SEEN, Ordering::Relaxed);
}

/// Functions by which the allocator lists what it holds.
pub(super) struct Lists {
    /// `snapshot`.
    pub(super) snapshot: usize,
    /// `isHistoryEnabled`.
    pub(super) is_history_kept: usize,
}

/// Where they are, if its release is known.
pub(super) fn lists() -> Option<Lists> {
    let [snapshot, is_history_kept] = LISTS.each_ref().map(|function| function.load(Ordering::Acquire));
    (STATE.load(Ordering::Relaxed) == SEEN && snapshot != 0 && is_history_kept != 0)
        .then_some(Lists { snapshot, is_history_kept })
}

/// To be called after objects were unloaded: forgets the allocator's functions if they went.
#[cold]
pub(crate) fn note_unloaded() {
    if remembered::forget_if_gone(REALS.iter().chain(&LISTS)) {
        STATE.store(ABSENT, Ordering::Relaxed);
    }
}

/// Says in the trace what can be known of pools.
pub(crate) fn describe(producer: &mut Producer) {
    let at = producer.now();
    let fact: &[u8] = match STATE.load(Ordering::Relaxed) {
        ABSENT => return,
        SEEN => b"torch.pools=seen",
        _ => b"torch.pools=unseen: the allocator's table is none of PyTorch 2.3 to 2.15",
    };
    for (index, (_, name)) in FUNCTIONS.iter().enumerate() {
        let number = u64::from(FIRST_API) + index as u64;
        producer.push_raw(at, Kind::Api, &[&number.to_ne_bytes(), name, b"\0"]);
    }
    producer.push_raw(at, Kind::Note, &[fact]);
}

/// Tells the call, and says where the real function is. A `MempoolId_t` is two words: the first for graphs, the second for
/// users.
extern "C" fn enter(which: usize, device: usize, graph: u64, user: u64, fourth: usize) -> usize {
    if let Some((action, _)) = FUNCTIONS.get(which) {
        tell(which as u16, *action, device as i8, (graph, user), fourth);
    }
    REALS.get(which).map_or(0, |real| real.load(Ordering::Acquire))
}

#[cold]
fn tell(which: u16, action: Action, device: i8, (graph, user): (u64, u64), fourth: usize) {
    let _errno = KeepErrno::new();
    let mut lane = lanes::lane(Start::OnlyIfLive);
    if lane.is_none() && !session::may_come() {
        return;
    }
    let mut call = Call {
        api: FIRST_API + which,
        action: action as u8,
        device,
        handle: graph,
        extra: user,
        ..Call::default()
    };
    match action {
        Action::TorchTrim => {
            call.device = -1;
            if !EMPTIES_ONE.load(Ordering::Relaxed) {
                (call.handle, call.extra) = (0, 0);
            }
        }
        Action::TorchPoolBegin => {
            // Before there is a session PyTorch may not have asked CUDA for its streams yet, and would do so for us.
            let stream =
                lane.as_mut().map(|lane| torch::current_stream(&mut lane.state().torch_stream, device));
            call.stream = stream.filter(|stream| *stream != UNKNOWN).unwrap_or(0);
        }
        Action::TorchPoolUseOnOom => {
            call.bytes = u64::from(!MAY_UNSET.load(Ordering::Relaxed) || fourth & 0xff != 0);
        }
        _ => {}
    }
    let Some(mut lane) = lane else { return early_pools::wait(&call) };
    if tls::here().capturing.get() != 0 {
        call.flags |= Call::CAPTURED;
    }
    call.stack = callsite::capture(&mut lane, callsite::Of::Nccl);
    let at = session::now();
    lane.producer().push_call(at, &call);
}

macro_rules! entries {
    ($( $name:ident ($how:ident $number:literal) )*) => {
        fn entries() -> [usize; FUNCTIONS.len()] {
            [$( $name as *const () as usize ),*]
        }
        $(
            #[unsafe(naked)]
            unsafe extern "C" fn $name() {
                arch::jumps_after!($how $number enter)
            }
        )*
    };
}

entries! {
    begin_entry (numbered 0)
    end_entry (numbered 1)
    release_entry (numbered 2)
    create_entry (numbered 3)
    use_on_oom_entry (numbered 4)
    no_split_entry (numbered 5)
    empty_cache_entry (numbered_without_device 6)
}
