//! `libgputrace.so`: a guest in somebody else's process.
//!
//! It stands between the program and the CUDA driver, says what happened in records of the ring, and changes
//! nothing: no panic, no lock, no heap, no GIL, no changed result. Nothing is started before the process gets its
//! first device memory; if anything fails, it steps aside once and says so.
//!
//! ```text
//! program ── cuMemAlloc_v2 ──> row (hooks/) ──> probe: guard, real call, stamp, stack ──> ring
//!            dlsym, cuGetProcAddress ──> hooks/loader.rs: the row whose real function this is
//! program ── ncclAllReduce ──> row (hooks/nccl.rs) ──> nccl/: enter record, real call, exit record ──> ring
//! program ── GetPjrtApi()'s table ──> hooks/pjrt.rs: JAX's buffers and executions
//!            c10::reportMemoryUsageToProfiler ──> hooks/torch.rs
//!            at::sequence_number, Engine ──> hooks/autograd.rs: which forward line an allocation of backward undoes
//!            c10d::ProcessGroup ──> hooks/process_groups.rs: what a communicator is called
//! ```
//!
//! Whoever is named below knows only what stands below it, or beside it (and whose types a thread keeps):
//!
//! ```text
//! process.rs         start and end of a process
//! hooks/, hook.rs    every function we stand in for, and how programs reach them
//! probe.rs, nccl/    what a hook does: call the real function, and say what happened
//! callsite.rs        from where; backward.rs: in which operation of PyTorch's backward pass
//! lanes.rs           a thread's place in the ring, and its memory (thread_state.rs)
//! session.rs         the first event makes the ring (ring_file.rs) and starts the recorder (launch.rs); fork, exec
//! control.rs         a library that sleeps is woken; ledger.rs: what lives meanwhile; words.rs: who is attached to late
//! pjrt.rs            PJRT's tables, and what is remembered of them
//! nvtx.rs, early_pools.rs, devices.rs, device_code.rs, captures.rs, closers.rs, stack/: what a thread or a process does
//! valgrind.rs        being run by Valgrind
//! messages.rs        what the library says to the user
//! tls.rs, mark.rs, config.rs, environment.rs, ends.rs, own.rs, thread_id.rs, elf.rs, kernel.rs
//! arch/              what differs between processors: all assembly, registers, calling conventions, frames
//! ```
//!
//! What every event of PyTorch's needs lies together, code in the section `gputrace_hot` and variables in
//! `gputrace_hot_data`: between two events the program has used the caches for something else, so that each line and
//! each page that we touch costs more than what we do with it.
//!
//! `no_std` and without `alloc`: what must not happen cannot be written.
#![no_std]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod arch;
mod asked;
mod auxiliary;
mod backward;
mod bytes;
mod callsite;
mod captures;
mod closers;
mod config;
mod control;
mod device_code;
mod devices;
mod early_pools;
mod elf;
mod ends;
mod environment;
mod hook;
mod hooks;
mod kernel;
mod lanes;
mod launch;
mod ledger;
mod mark;
mod messages;
mod nccl;
mod nvtx;
mod own;
mod pjrt;
mod probe;
mod process;
mod remembered;
mod reserved;
mod ring_file;
mod rings;
mod room;
mod sent;
mod session;
mod stack;
mod sys;
mod thread_id;
mod thread_state;
mod tls;
mod valgrind;
mod words;

use gputrace_ring::record::Kind;
use gputrace_ring::ring::Producer;

/// Sends the names of the hooks when a session begins.
fn describe_names(producer: &mut Producer) {
    let at = producer.now();
    for (row, hook) in hooks::HOOKS.iter().enumerate() {
        let (name, runtime) = (hook.name.to_bytes(), hook.runtime.as_bytes());
        producer.push_raw(at, Kind::Api, &[&(row as u64).to_ne_bytes(), name, b"\0", runtime]);
    }
    for (row, hook) in hooks::nccl::HOOKS.iter().enumerate() {
        let number = u64::from(nccl::call::FIRST_API) + row as u64;
        producer.push_raw(at, Kind::Api, &[&number.to_ne_bytes(), hook.name.to_bytes(), b"\0"]);
    }
}

/// Sends facts of the process for `doctor` when its session begins. Every part has something to say, so it stands here, above them all;
/// [`lanes`] calls these two, and these are the only calls that go upwards.
fn describe_facts(producer: &mut Producer) {
    hooks::loader::describe(producer);
    hooks::loaded::describe(producer);
    callsite::describe(producer);
}

/// Never called: nothing here panics, and the linker keeps this only because the language asks for it.
#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    sys::die()
}

// Debug builds of `core` name the personality of Rust's unwinder; with `panic = "abort"` nobody calls it. In assembly,
// because whatever Rust calls `no_mangle` is exported, and programs written in Rust bring their own.
#[cfg(not(test))]
core::arch::global_asm!(
    ".pushsection .text.rust_eh_personality,\"ax\",@progbits",
    ".weak rust_eh_personality",
    ".hidden rust_eh_personality",
    "rust_eh_personality:",
    arch::trap!(),
    ".popsection",
);
