//! Where a thread stands in PyTorch's backward pass: which operation it runs, a `Node`, and what its number is.
//!
//! Symbols and places are those of the releases 2.1 to 2.15; where they do not fit, nothing is told but that.

use crate::asked;
use crate::elf;
use crate::lanes::{self, Lane};
use crate::remembered;
use crate::session::Start;
use crate::sys::KeepErrno;
use core::ffi::CStr;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use gputrace_ring::record::{Kind, Node, Operation};
use gputrace_ring::ring::{Producer, Pushed};

const THREAD_NUMBER: &CStr = c"_ZN2at14RecordFunction15currentThreadIdEv";
const CURRENT_NODE: &CStr = c"_ZN5torch8autograd16get_current_nodeEv";
/// What Python's `backward()` calls. Its name says what holds a node, see [`Held`].
pub(crate) const EXECUTE: [(&CStr, Held); 2] = [
    (c"_ZN5torch8autograd6Engine23execute_with_graph_taskERKSt10shared_ptrINS0_9GraphTaskEES2_INS0_4NodeEEONS0_11InputBufferE", Held::Shared),
    (c"_ZN5torch8autograd6Engine23execute_with_graph_taskERKSt10shared_ptrINS0_9GraphTaskEEN3c1013intrusive_ptrINS0_4NodeENS7_6detail34intrusive_target_default_null_typeIS9_EEEEONS0_11InputBufferE", Held::Intrusive),
];

/// What holds a `torch::autograd::Node`, and so what stands in one before `sequence_nr_`, `topological_nr_`,
/// `has_parent_` and `thread_id_`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Held {
    /// `std::shared_ptr` of libstdc++: its functions, two words of `enable_shared_from_this`
    /// (torch/csrc/autograd/function.h, 2.1 to 2.12).
    Shared,
    /// `c10::intrusive_ptr`: its functions, `combined_refcount_` (torch/csrc/autograd/node.h, 2.13 to 2.15).
    Intrusive,
}

impl Held {
    const fn sequence_word(self) -> usize {
        match self {
            Held::Shared => 3,
            Held::Intrusive => 2,
        }
    }

    const fn thread_word(self) -> usize {
        self.sequence_word() + 3
    }
}

/// `sequence_nr_` of a node that undoes nothing (torch/csrc/autograd/functions/accumulate_grad.cpp).
const NO_SEQUENCE: u64 = u64::MAX;
/// Longest name of a class that is told.
const MOST_NAME: usize = 512;

/// Nobody has asked for a number yet.
const ABSENT: u32 = 0;
/// Operations are seen.
const SEEN: u32 = 1;
/// A function is missing: before 2.0, or not built as the wheels are.
const MISSING: u32 = 2;
/// What should be numbers are none.
const UNEXPECTED: u32 = 3;

#[unsafe(link_section = "gputrace_hot_data")]
static STATE: AtomicU32 = AtomicU32::new(ABSENT);
static GET_THREAD_NUMBER: AtomicUsize = AtomicUsize::new(0);
/// 0 unless the state is [`SEEN`].
#[unsafe(link_section = "gputrace_hot_data")]
static GET_CURRENT_NODE: AtomicUsize = AtomicUsize::new(0);
/// Whether nodes are [`Held::Intrusive`].
static IS_INTRUSIVE: AtomicBool = AtomicBool::new(false);

type ThreadNumber = unsafe extern "C" fn() -> u64;
type CurrentNode = unsafe extern "C" fn(*mut SharedPointer);

/// `std::shared_ptr` of libstdc++: the object, and what counts its owners. `c10::intrusive_ptr` is the object alone.
#[repr(C)]
struct SharedPointer {
    object: *const usize,
    counts: *const Counts,
}

/// `std::_Sp_counted_base` of libstdc++.
#[repr(C)]
struct Counts {
    functions: usize,
    owners: AtomicI32,
    observers: AtomicI32,
}

/// Looks for PyTorch's autograd, once.
#[cold]
pub(crate) fn look() {
    if STATE.load(Ordering::Relaxed) != ABSENT {
        return;
    }
    let _errno = KeepErrno::new();
    let Some(library) = elf::by_soname(c"libtorch_cpu.so") else { return };
    let held = EXECUTE.into_iter().find(|(name, _)| library.symbol(name).is_some());
    let found = (library.symbol(THREAD_NUMBER), library.symbol(CURRENT_NODE), held);
    let state = if let (Some(thread_number), Some(current_node), Some((_, held))) = found {
        GET_THREAD_NUMBER.store(thread_number, Ordering::Relaxed);
        IS_INTRUSIVE.store(held == Held::Intrusive, Ordering::Relaxed);
        // SYNC: what holds nodes is visible to whoever asks for one.
        GET_CURRENT_NODE.store(current_node, Ordering::Release);
        SEEN
    } else {
        MISSING
    };
    change(ABSENT, state);
}

fn change(from: u32, to: u32) {
    if STATE.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        && let Some(mut lane) = lanes::lane(Start::OnlyIfLive)
    {
        describe(lane.producer());
    }
}

/// Whether operations are seen.
#[inline]
pub(crate) fn is_seen() -> bool {
    GET_CURRENT_NODE.load(Ordering::Relaxed) != 0
}

/// The thread calls `backward()`, in this frame.
pub(crate) fn enter(lane: &mut Lane, frame: usize) {
    // SYNC: what holds nodes is visible to whoever asks for one.
    let get = GET_CURRENT_NODE.load(Ordering::Acquire);
    if get != 0 {
        // SAFETY: as in `tell_node`.
        let get: CurrentNode = unsafe { core::mem::transmute(get) };
        let (node, _) = current_node(get);
        lane.state().backward.enter(frame, node != Some(Node::default()));
    }
}

/// To be called after objects were unloaded: forgets PyTorch's library if it went, and with it these functions.
#[cold]
pub(crate) fn note_unloaded(reals: &[&AtomicUsize]) {
    let all = reals.iter().copied().chain([&GET_THREAD_NUMBER, &GET_CURRENT_NODE]);
    if remembered::forget_if_gone(all) {
        STATE.store(ABSENT, Ordering::Relaxed);
    }
}

/// Says in the trace what can be known of the backward pass.
pub(crate) fn describe(producer: &mut Producer) {
    let fact: &[u8] = match STATE.load(Ordering::Relaxed) {
        ABSENT => return,
        SEEN => b"torch.backward=seen",
        MISSING => b"torch.backward=unseen: libtorch_cpu.so lacks what PyTorch 2.1 to 2.15 have",
        _ => b"torch.backward=unseen: operations do not look like those of PyTorch 2.1 to 2.15",
    };
    let at = producer.now();
    producer.push_raw(at, Kind::Note, &[fact]);
}

/// Tells the recorder which operation of the backward pass the thread is in, if that is another than before. False if
/// it could not be told: then what follows would be taken for the one before.
#[inline]
#[unsafe(link_section = "gputrace_hot")]
pub(crate) fn tell_node(lane: &mut Lane) -> bool {
    // SYNC: what holds nodes is visible to whoever asks for one.
    let get = GET_CURRENT_NODE.load(Ordering::Acquire);
    if get == 0 {
        return true;
    }
    let (node, functions) = if lane.state().backward.is_outside() {
        (Some(Node::default()), core::ptr::null())
    } else {
        // SAFETY: found under the name of `torch::autograd::get_current_node()`, which takes nothing and gives a pointer to
        // a `Node` of the kind that `IS_INTRUSIVE` says.
        let get: CurrentNode = unsafe { core::mem::transmute(get) };
        current_node(get)
    };
    node == Some(lane.state().node) || send_node(lane, node, functions)
}

#[inline(never)]
#[unsafe(link_section = "gputrace_hot")]
fn send_node(lane: &mut Lane, node: Option<Node>, functions: *const usize) -> bool {
    let Some(node) = node else {
        GET_CURRENT_NODE.store(0, Ordering::Relaxed);
        STATE.store(UNEXPECTED, Ordering::Relaxed);
        describe(lane.producer());
        return true;
    };
    let (producer, rest) = lane.parts();
    let at = producer.now();
    if node.class != 0 && !rest.node_classes.has(node.class) {
        let name = class_name(functions);
        let name = name.bytes.get(..name.length).unwrap_or_default();
        if producer.push_raw(at, Kind::NodeClass, &[&node.class.to_ne_bytes(), name]) == Pushed::Yes {
            rest.node_classes.add(node.class);
        }
    }
    let is_told = producer.push(at, 0, &node) == Pushed::Yes;
    if is_told {
        rest.node = node;
    }
    is_told
}

/// The mangled name of the class with these functions; empty for one that was built without such names (`-fno-rtti`), where
/// the words before its functions may be anything.
fn class_name(functions: *const usize) -> Name {
    // Before its functions, a table has the address of the type's description (Itanium C++ ABI 2.5.2), whose second word is
    // that of the mangled name (`std::type_info`, libstdc++). All of it is read in a way that cannot fault.
    let word = |at: usize| -> Option<usize> {
        if at < 4096 || !at.is_multiple_of(size_of::<usize>()) || !asked::can_read(at) {
            return None;
        }
        // SAFETY: a word, aligned, on a page that can be read, of a library that stays: the thread is in its function.
        Some(unsafe { *(at as *const usize) })
    };
    let mut name = Name { bytes: [0; MOST_NAME], length: 0 };
    let description = word((functions as usize).wrapping_sub(size_of::<usize>()));
    let Some(text) = description.and_then(|at| word(at.wrapping_add(size_of::<usize>()))) else {
        return name;
    };
    for (at, byte) in name.bytes.iter_mut().enumerate() {
        let from = text.wrapping_add(at);
        if (at == 0 || from.is_multiple_of(4096)) && !asked::can_read(from & !7) {
            break;
        }
        // SAFETY: on a page that can be read.
        *byte = unsafe { *(from as *const u8) };
        // A mangled name has letters, digits and few signs; a local type's begins with a star.
        if !(byte.is_ascii_alphanumeric() || matches!(*byte, b'_' | b'.' | b'$' | b'*')) {
            // Anything else is no name, unless it ends here.
            name.length = if *byte == 0 { at } else { 0 };
            break;
        }
        name.length = at + 1;
    }
    name
}

/// A name of a class, cut to [`MOST_NAME`].
struct Name {
    bytes: [u8; MOST_NAME],
    length: usize,
}

/// What the calling thread runs of the backward pass, and the functions of its class. Reads PyTorch's own thread-local.
/// `None` if what should be numbers are none.
#[inline]
fn current_node(get: CurrentNode) -> (Option<Node>, *const usize) {
    let mut shared = SharedPointer { object: core::ptr::null(), counts: core::ptr::null() };
    // SAFETY: a class with a destructor comes back where the first argument points (Itanium C++ ABI 3.1.3).
    unsafe { get(&raw mut shared) };
    if shared.object.is_null() {
        return (Some(Node::default()), core::ptr::null());
    }
    // SAFETY: the thread's own pointer keeps the node, so all of it can be read.
    let word = |at: usize| unsafe { *shared.object.wrapping_add(at) };
    let functions = word(0) as *const usize;
    let held = if IS_INTRUSIVE.load(Ordering::Relaxed) { Held::Intrusive } else { Held::Shared };
    let sequence = Some(word(held.sequence_word()) as u64).filter(|number| *number != NO_SEQUENCE);
    let operation = Operation { thread: word(held.thread_word()) as u64, sequence };
    let class = (functions as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let node = operation.encode().map(|operation| Node { operation, class });
    give_back(&shared, held);
    (node, functions)
}

/// Gives up what [`current_node`] was given. It never is the last owner: the thread has its own pointer. Nor, for a node
/// that Python holds too, the last one but Python, at which the node would let go of its Python object: that makes three.
#[inline]
fn give_back(shared: &SharedPointer, held: Held) {
    match held {
        Held::Shared => {
            // SAFETY: a shared pointer that is not null has counts.
            if let Some(counts) = unsafe { shared.counts.as_ref() } {
                counts.owners.fetch_sub(1, Ordering::Release);
            }
        }
        Held::Intrusive => {
            let counts = shared.object.wrapping_add(1).cast::<AtomicU64>();
            // SAFETY: the node's second word is an atomic one, whose low half counts owners (c10/util/intrusive_ptr.h).
            unsafe { &*counts }.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// PyTorch's number of the calling thread, which it keeps; 0 unknown.
#[inline]
pub(crate) fn thread_number(lane: &mut Lane) -> u64 {
    let known = &mut lane.state().torch_thread;
    if *known == 0 {
        *known = find_thread_number();
    }
    *known
}

#[cold]
fn find_thread_number() -> u64 {
    let get = GET_THREAD_NUMBER.load(Ordering::Relaxed);
    if get == 0 {
        return 0;
    }
    // SAFETY: found under the name of `uint64_t at::RecordFunction::currentThreadId()`.
    let get: ThreadNumber = unsafe { core::mem::transmute(get) };
    // SAFETY: reads a thread-local of PyTorch's, which the caller of the hook reads too.
    unsafe { get() }
}
