//! PyTorch's autograd: which line of the forward pass an allocation of the backward pass belongs to, and who called
//! `backward()`.
//!
//! The backward pass runs in threads without Python. But each of its operations, a `Node`, carries the number of the
//! forward operation that it undoes, and numbers are given out by an exported function of `libtorch_cpu.so`, one count
//! a thread. So where a number is given out, the stack is kept ([`Forward`]); where something happens in the backward
//! pass, the number is told ([`backward::tell_node`]); the recorder joins the two.

use crate::arch;
use crate::backward::{self, EXECUTE};
use crate::callsite;
use crate::config::Stacks;
use crate::elf;
use crate::kernel;
use crate::lanes::{self, Lane};
use crate::session::{self, Start};
use crate::sys::KeepErrno;
use core::ffi::{CStr, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};
use gputrace_ring::record::{Backward, Forward, Operation};

const NEXT_SEQUENCE: &CStr = c"_ZN2at15sequence_number17get_and_incrementEv";
#[unsafe(link_section = "gputrace_hot_data")]
static REAL_NEXT_SEQUENCE: AtomicUsize = AtomicUsize::new(0);
static REAL_EXECUTE: AtomicUsize = AtomicUsize::new(0);

type NextSequence = unsafe extern "C" fn() -> u64;

/// To be called after objects were unloaded: forgets PyTorch's library if it went.
#[cold]
pub(crate) fn note_unloaded() {
    backward::note_unloaded(&[&REAL_NEXT_SEQUENCE, &REAL_EXECUTE]);
}

/// `uint64_t at::sequence_number::get_and_increment()`: called when a forward operation makes the node that will undo
/// it.
///
/// # Safety
/// Called by PyTorch only.
#[unsafe(export_name = "_ZN2at15sequence_number17get_and_incrementEv")]
#[unsafe(link_section = "gputrace_hot")]
pub(crate) unsafe extern "C" fn next_sequence() -> u64 {
    let real = real(&REAL_NEXT_SEQUENCE, &[NEXT_SEQUENCE]);
    // SAFETY: found under the name of a function of this type.
    let real: NextSequence = unsafe { core::mem::transmute(real) };
    // SAFETY: PyTorch's own call.
    let sequence = unsafe { real() };
    if session::is_live() {
        tell_forward(sequence);
    }
    sequence
}

#[unsafe(link_section = "gputrace_hot")]
fn tell_forward(sequence: u64) {
    // Without stacks there is nothing to tell.
    if session::stacks() == Stacks::None {
        return;
    }
    if !backward::is_seen() {
        return;
    }
    let Some(mut lane) = lanes::lane(Start::OnlyIfLive) else { return };
    let stack = callsite::capture_program(&mut lane);
    let thread = backward::thread_number(&mut lane);
    let operation = Operation { thread, sequence: Some(sequence) }.encode();
    if let (Some(operation), true) = (operation, stack != 0) {
        let producer = lane.producer();
        let at = producer.now();
        producer.push_brief(at, 0, &Forward { operation, stack });
    }
}

/// `c10::intrusive_ptr<at::ivalue::Future> torch::autograd::Engine::execute_with_graph_task(const
/// std::shared_ptr<GraphTask>&, std::shared_ptr<Node>, InputBuffer&&)`, called by Python's `backward()`, which stays
/// inside until the backward pass is done. A `c10::intrusive_ptr<Node>` is passed as the other is: by its address.
/// Exceptions pass through this frame, so it is described to unwinders and holds nothing that would need cleaning up.
macro_rules! execute_with_graph_task {
    ($function:ident, $symbol:literal) => {
        /// See [`EXECUTE`].
        ///
        /// # Safety
        /// Called by PyTorch only.
        #[unsafe(naked)]
        #[unsafe(export_name = $symbol)]
        pub(crate) unsafe extern "C" fn $function(
            _result: *mut c_void,
            _engine: *mut c_void,
            _task: *const c_void,
            _root: *mut c_void,
            _inputs: *mut c_void,
        ) -> *mut c_void {
            arch::calls_around!(execute enter_backward leave_backward)
        }
    };
}

execute_with_graph_task!(
    execute_with_shared_nodes,
    "_ZN5torch8autograd6Engine23execute_with_graph_taskERKSt10shared_ptrINS0_9GraphTaskEES2_INS0_4NodeEEONS0_11InputBufferE"
);
execute_with_graph_task!(
    execute_with_intrusive_nodes,
    "_ZN5torch8autograd6Engine23execute_with_graph_taskERKSt10shared_ptrINS0_9GraphTaskEEN3c1013intrusive_ptrINS0_4NodeENS7_6detail34intrusive_target_default_null_typeIS9_EEEEONS0_11InputBufferE"
);

extern "C" fn enter_backward(frame: usize) -> usize {
    if let Some(mut lane) = backward_lane() {
        let stack = callsite::capture_program(&mut lane);
        backward::enter(&mut lane, frame);
        tell_backward(&mut lane, frame, stack, 1);
    }
    real(&REAL_EXECUTE, &EXECUTE.map(|(name, _)| name))
}

extern "C" fn leave_backward(frame: usize) {
    if let Some(mut lane) = backward_lane() {
        lane.state().backward.leave(frame);
        tell_backward(&mut lane, frame, 0, 0);
    }
}

fn backward_lane() -> Option<Lane> {
    let is_told = backward::is_seen() && session::is_live();
    if is_told { lanes::lane(Start::OnlyIfLive) } else { None }
}

fn tell_backward(lane: &mut Lane, frame: usize, stack: u64, begins: u64) {
    let thread = backward::thread_number(lane);
    let producer = lane.producer();
    let at = producer.now();
    producer.push(at, 0, &Backward { thread, stack, frame: frame as u64, begins });
}

/// Address of PyTorch's function that our export hides, under the name of these that its release has. Whoever calls us was
/// linked against it, so it is there.
#[inline]
pub(super) fn real(slot: &AtomicUsize, names: &[&CStr]) -> usize {
    match slot.load(Ordering::Relaxed) {
        0 => find_real(slot, names),
        address => address,
    }
}

#[cold]
fn find_real(slot: &AtomicUsize, names: &[&CStr]) -> usize {
    let _errno = KeepErrno::new();
    backward::look();
    let mut found = elf::by_soname(c"libtorch_cpu.so")
        .and_then(|library| names.iter().find_map(|name| library.symbol(name)));
    if found.is_none() {
        // A build that calls its library otherwise.
        elf::find(|object| {
            let symbol = || names.iter().find_map(|name| object.symbol(name));
            found = if object.is_ours() { None } else { symbol() };
            found.is_some()
        });
    }
    let address = found.unwrap_or(nowhere as *const () as usize);
    slot.store(address, Ordering::Relaxed);
    address
}

/// The dynamic linker bound a call to us that has no other target: it would have ended the process itself.
extern "C" fn nowhere() {
    session::say(b"a library of PyTorch's calls a function that no other has");
    kernel::abort()
}
