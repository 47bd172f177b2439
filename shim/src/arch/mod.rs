//! What differs between processors, one file for each: assembly, registers, the calling convention, the frames of stacks, and the few
//! names and numbers that Linux gives differently. Both files have the items of the list below, and say beside each only what is so on
//! their processor. Nothing else of the library asks which processor it is for (`tests/tidy.rs`).

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "aarch64")]
use aarch64 as processor;
/// Parts of its assembly.
#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::{keeps_arguments, makes_frame, removes_frame};

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
use x86_64 as processor;

// The kernel.

/// The instruction that calls the kernel: the number of a call and its six arguments, all of them words; what it answers.
pub(crate) use processor::system_call;

/// Asks which of the descriptors are ready, and does not wait, by `call`, which calls the kernel.
pub(crate) use processor::poll_now;

/// The vDSO's function that reads a clock (vdso(7)).
pub(crate) use processor::READ_CLOCK;

/// Bytes of a page.
pub(crate) use processor::page_bytes;

/// Notes the bytes of a page, as the kernel says (`AT_PAGESZ`).
pub(crate) use processor::note_page_bytes;

/// Notes what the processor can do, as the kernel says (`AT_HWCAP`, getauxval(3)).
pub(crate) use processor::note_capabilities;

/// An instruction that ends the process.
#[cfg(not(test))]
pub(crate) use processor::trap;

// The compiler and the C library.

/// The functions of [`crate::bytes`]. What we copy is short.
pub(crate) use processor::compiler_functions;

/// The two kinds of slot that hold the address of a function.
pub(crate) use processor::FUNCTION_SLOTS;

/// What a `char` of C is worth.
pub(crate) use processor::char;

/// As a fence between what was exchanged before and what is read after.
pub(crate) use processor::fence_after_exchange;

/// The thread's own words, `gputrace_thread_words`.
pub(crate) use processor::thread_words;

/// `pthread_self()`, the C library's descriptor of the calling thread.
pub(crate) use processor::this_thread;

/// Learns what [`this_thread`] and [`address`] need. `pthread_self` finds the C library's function of this name, or null.
pub(crate) use processor::learn;

/// A client request of Valgrind (valgrind.h); 0 without it.
///
/// # Safety
/// `arguments` leads to six words.
pub(crate) use processor::valgrind_request;

// Stacks.

/// Where the calling function's stack is.
pub(crate) use processor::stack_pointer;

/// DWARF numbers of the frame pointer, the stack pointer and the return address.
pub(crate) use processor::{FRAME_POINTER, RETURN_ADDRESS, STACK_POINTER};

/// Whether a function that has called nothing has its return address in a register.
pub(crate) use processor::HAS_LINK_REGISTER;

/// How far from where a frame pointer can be saved, in bytes.
pub(crate) use processor::FpOffset;

/// Size of a part of a stack that is recognised, in `stack/native.rs`.
pub(crate) use processor::KNOWN_STACK_BYTES;

/// Where a function keeps its return address, from its frame address: in the word below (`BELOW`), or at an `offset`, if a rule can say
/// that. `slot` is the address of the word.
pub(crate) use processor::ReturnAt;

/// Where the address of a frame was found: in another way (`NOWHERE`), in a `slot`, or in the link register that an `interrupted` frame
/// had, and which `link` gives back. `address` is that of the word, for a frame with this stack pointer.
pub(crate) use processor::FoundAt;

/// A return address as the processor goes there.
pub(crate) use processor::address;

/// What of a word counts in comparisons of return addresses.
pub(crate) use processor::address_bits;

/// Whether an instruction of `.eh_frame` that DWARF leaves to the processor says nothing that we need.
pub(crate) use processor::is_idle_instruction;

/// Where the kernel's frame of a signal has the interrupted registers, in bytes from its stack pointer.
#[derive(Clone, Copy)]
pub(crate) struct SignalFrame {
    /// Frame pointer.
    pub(crate) fp: FpOffset,
    /// Stack pointer: the word before it has the link register, if there is one, and the word after it the instruction.
    pub(crate) sp: i32,
}

/// Learns where signal handlers return to, from what finds functions of the vDSO.
pub(crate) use processor::learn_signal_return;

/// The kernel's frame of a signal, if the handler returns to this address, and tables do not say it.
pub(crate) use processor::known_signal_frame;

/// As [`known_signal_frame`], by the code at the address, which no table describes.
pub(crate) use processor::signal_frame;

// Bodies of naked functions.

/// The body of the naked function [`crate::stack::capture`]: goes on in another with the caller's registers as they are after this
/// call, as third to fifth argument: instruction, stack and frame pointer.
pub(crate) use processor::captures_from;

/// Hands its arguments and its return address to `decide`, and gives back what that says; null for 1. For 0 it jumps to the function
/// whose address `real` has, with everything as it came. It has two arguments, or three; `decide` has them, with the return address in
/// the place of the third, which comes after it, or null.
pub(crate) use processor::looks_up;

/// Hands its argument to `settle`, and jumps to the first of the two words that this gives back, with the second as argument.
pub(crate) use processor::goes_on;

/// `(result, this, function)`: calls the C++ function, whose result is written to `result`, with `this` and zeros; 1 if it came back.
/// What unwinders ask at this frame is `personality`, which may have them go on at the address in `landing`; then 0.
pub(crate) use processor::calls_and_catches;

/// Stands between a caller and the real one: calls `enter`, which says where that is, then that with the arguments as they came, then
/// `leave`. Unwinders are told at each instruction where the registers are: exceptions pass through the frame, which holds nothing that
/// would need cleaning up.
///
/// `execute`: a method with three arguments; `enter` and `leave` get the frame. `allocate`: a method with one; `enter` gets that and
/// the frame, `leave` nothing. The results of both are written where the caller says (Itanium C++ ABI 3.1.3). `personality` is what
/// unwinders call at the frame.
pub(crate) use processor::calls_around;

/// Calls `enter`, which says where the real function is, and jumps there with everything as it came: the caller's frame is the real
/// function's.
///
/// `arguments`: `enter` gets the function's own arguments; `arguments_of_result`: those of one whose result is written where the caller
/// says; `numbered N`: a number, and the arguments but for `this`; `numbered_without_device N`: a number, 0, and the arguments but for
/// `this`.
pub(crate) use processor::jumps_after;
