//! AArch64: the procedure call standard (AAPCS64), and what Linux and the C libraries do on it.
//!
//! Four things differ from x86-64 in ways that shape this file:
//! - A call leaves its return address in the link register (x30), and the function saves it where it likes.
//! - Return addresses may be signed (`PAC`): the upper bits are then not part of the address.
//! - Large results are written where x8 points, so `this` is always the first argument.
//! - Jumps to another function go through x16, which code with landing pads (`BTI`) accepts at its entries.

use core::ffi::{CStr, c_void};
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};

use super::SignalFrame;

macro_rules! system_call {
    ($number:expr, $a:expr, $b:expr, $c:expr, $d:expr, $e:expr, $f:expr) => {{
        let answer: isize;
        core::arch::asm!(
            "svc 0",
            in("x8") $number,
            inlateout("x0") $a as isize => answer,
            in("x1") $b, in("x2") $c, in("x3") $d, in("x4") $e, in("x5") $f,
            options(nostack),
        );
        answer
    }};
}
pub(crate) use system_call;

/// By `ppoll(2)`, as there is no `poll` here.
#[inline(always)]
pub(crate) fn poll_now<T>(
    descriptors: &mut [libc::pollfd],
    call: impl FnOnce(libc::c_long, [usize; 6]) -> T,
) -> T {
    let no_time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let (at, n) = (descriptors.as_mut_ptr() as usize, descriptors.len());
    call(libc::SYS_ppoll, [at, n, (&raw const no_time) as usize, 0, 0, 0])
}

// See `kernel::spawn`. In assembly, because the child comes back from the same instruction on a stack that has nothing of the
// caller's.
core::arch::global_asm!(
    ".pushsection .text.gputrace_clone,\"ax\",@progbits",
    ".globl gputrace_clone",
    ".hidden gputrace_clone",
    ".type gputrace_clone, @function",
    "gputrace_clone:",
    ".cfi_startproc",
    "mov x9, x2", // the function
    "mov x10, x3", // its argument: the kernel keeps both
    "mov x2, xzr",
    "mov x3, xzr",
    "mov x4, xzr",
    "mov x8, #{clone}",
    "svc 0",
    "cbz x0, 1f",
    "ret",
    ".cfi_endproc",
    "1:",
    ".cfi_startproc",
    ".cfi_undefined x30", // nobody called us here
    "mov x29, xzr",
    "mov x0, x10",
    "blr x9",
    "mov x8, #{exit}",
    "svc 0",
    "brk #1",
    ".cfi_endproc",
    ".size gputrace_clone, . - gputrace_clone",
    ".popsection",
    clone = const libc::SYS_clone,
    exit = const libc::SYS_exit_group,
);

pub(crate) const READ_CLOCK: &CStr = c"__kernel_clock_gettime";

/// R_AARCH64_GLOB_DAT and R_AARCH64_JUMP_SLOT (ELF for AArch64, dynamic relocations).
pub(crate) const FUNCTION_SLOTS: [u32; 2] = [1025, 1026];

/// [`page_bytes`], until the kernel said otherwise the largest.
static PAGE_BYTES: AtomicUsize = AtomicUsize::new(64 << 10);

/// 4, 16 or 64 KiB, as the kernel was built. Only where whole pages are asked for: to read memory page by page, the smallest size is
/// right everywhere.
#[inline(always)]
pub(crate) fn page_bytes() -> usize {
    PAGE_BYTES.load(Ordering::Relaxed)
}

pub(crate) fn note_page_bytes(bytes: usize) {
    if bytes.is_power_of_two() {
        PAGE_BYTES.store(bytes, Ordering::Relaxed);
    }
}

/// It has no sign.
#[inline(always)]
pub(crate) fn char(byte: u8) -> i64 {
    i64::from(byte)
}

/// An exchange is not a full barrier here: a later read may pass its write (Arm ARM, B2.3.12).
#[inline(always)]
pub(crate) fn fence_after_exchange() {
    fence(Ordering::SeqCst);
}

#[inline(always)]
pub(crate) fn thread_words() -> *const () {
    let words: *const ();
    // SAFETY: the ABI keeps the thread pointer in tpidr_el0; the linker fills in the offset from it.
    unsafe {
        core::arch::asm!(
            "mrs {words}, tpidr_el0",
            "adrp {offset}, :gottprel:gputrace_thread_words",
            "ldr {offset}, [{offset}, :gottprel_lo12:gputrace_thread_words]",
            "add {words}, {words}, {offset}",
            words = out(reg) words,
            offset = out(reg) _,
            options(pure, readonly, nostack),
        );
    }
    words
}

#[inline(always)]
pub(crate) fn stack_pointer() -> usize {
    let here: usize;
    // SAFETY: reads a register.
    unsafe {
        core::arch::asm!("mov {}, sp", out(reg) here, options(nomem, nostack, preserves_flags));
    }
    here
}

#[inline(always)]
fn thread_pointer() -> u64 {
    let pointer: u64;
    // SAFETY: reads a register that programs may read, and that stays what it is while the thread runs.
    unsafe {
        core::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(pure, nomem, nostack, preserves_flags));
    }
    pointer
}

/// How far below the thread pointer the C library's descriptor of a thread begins: as long as the descriptor in glibc and musl, the
/// same for each thread. 0 until it is learnt.
#[unsafe(link_section = "gputrace_hot_data")]
static DESCRIPTOR_BELOW: AtomicU64 = AtomicU64::new(0);

/// It lies before the thread pointer (`THREAD_SELF`, `sysdeps/aarch64/nptl/tls.h`).
#[inline(always)]
pub(crate) fn this_thread() -> u64 {
    thread_pointer().wrapping_sub(DESCRIPTOR_BELOW.load(Ordering::Relaxed))
}

/// Bits of a return address that a signature may take, and that are none of the address. 0 until it is learnt, and on processors that
/// sign none.
#[unsafe(link_section = "gputrace_hot_data")]
static SIGNATURE: AtomicU64 = AtomicU64::new(0);

pub(crate) fn learn(pthread_self: impl FnOnce() -> *mut c_void) {
    let pthread_self = pthread_self();
    if !pthread_self.is_null() {
        // SAFETY: the C library's function of this name, which reads the thread pointer and nothing else.
        let this: extern "C" fn() -> u64 = unsafe { core::mem::transmute(pthread_self) };
        DESCRIPTOR_BELOW.store(thread_pointer().wrapping_sub(this()), Ordering::Relaxed);
    }
    // All bits but the 55th, which says of which half an address is: what is left of them is address.
    let every = !(1 << 55);
    let mut left: u64 = every;
    // SAFETY: `xpaclri`, by its number, takes a signature out of the link register, and does nothing on processors without signatures.
    unsafe {
        core::arch::asm!("hint #7", inout("x30") left, options(pure, nomem, nostack, preserves_flags));
    }
    SIGNATURE.store(if left == every { 0 } else { !left }, Ordering::Relaxed);
}

#[inline(always)]
pub(crate) unsafe fn valgrind_request(arguments: *const usize) -> usize {
    let mut answer: usize = 0;
    // SAFETY: four rotations by 128 bits in all leave the register as it was, and a register or itself does nothing.
    // Valgrind reads the arguments, and writes the answer's register.
    unsafe {
        core::arch::asm!(
            "ror x12, x12, #3",
            "ror x12, x12, #13",
            "ror x12, x12, #51",
            "ror x12, x12, #61",
            "orr x10, x10, x10",
            in("x4") arguments,
            inout("x3") answer,
            options(nostack),
        );
    }
    answer
}

// DWARF for AArch64, 4.1.
pub(crate) const FRAME_POINTER: u64 = 29;
pub(crate) const STACK_POINTER: u64 = 31;
pub(crate) const RETURN_ADDRESS: u64 = 30;

/// A function that has called nothing has its return address in a register.
pub(crate) const HAS_LINK_REGISTER: bool = true;

/// It lies below everything else of its frame, which may be large.
pub(crate) type FpOffset = i32;

pub(crate) const KNOWN_STACK_BYTES: usize = 896;

/// So many bytes from the frame address.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct ReturnAt(i32);

impl ReturnAt {
    pub(crate) const BELOW: ReturnAt = ReturnAt(-8);

    pub(crate) fn offset(offset: i64) -> Option<ReturnAt> {
        i32::try_from(offset).ok().map(ReturnAt)
    }

    #[inline(always)]
    pub(crate) fn slot(self, cfa: u64) -> u64 {
        cfa.wrapping_add(i64::from(self.0) as u64)
    }
}

/// The word, or of an interrupted frame, what was in its link register.
#[derive(Clone, Copy, Default)]
pub(crate) struct FoundAt(u64);

impl FoundAt {
    pub(crate) const NOWHERE: FoundAt = FoundAt(0);

    #[inline(always)]
    pub(crate) fn slot(slot: u64) -> FoundAt {
        FoundAt(slot)
    }

    #[inline(always)]
    pub(crate) fn address(self, _sp: u64) -> u64 {
        self.0
    }

    #[inline(always)]
    pub(crate) fn interrupted(link: u64) -> FoundAt {
        FoundAt(link)
    }

    #[inline(always)]
    pub(crate) fn link(self) -> u64 {
        self.0
    }
}

/// Without its signature.
#[inline(always)]
pub(crate) fn address(word: u64) -> u64 {
    word & address_bits()
}

/// All but a signature.
#[inline(always)]
pub(crate) fn address_bits() -> u64 {
    !SIGNATURE.load(Ordering::Relaxed)
}

/// That return addresses are signed from here on, or no more (`DW_CFA_AARCH64_negate_ra_state_with_pc` and
/// `DW_CFA_AARCH64_negate_ra_state`). Signatures are taken away wherever they are.
#[inline(always)]
pub(crate) fn is_idle_instruction(operation: u8) -> bool {
    matches!(operation, 0x2c | 0x2d)
}

/// Where signal handlers return to, a function of the vDSO; 0 unknown.
static SIGNAL_RETURN: AtomicU64 = AtomicU64::new(0);

/// The kernel's frame of a signal: `struct rt_sigframe` (arch/arm64/kernel/signal.c) has 128 bytes of `siginfo` and a `ucontext`, whose
/// registers begin at 184 (asm/ucontext.h, asm/sigcontext.h). x29, x30, the stack pointer and the instruction follow each other.
const SIGNAL_FRAME: SignalFrame = SignalFrame { fp: 128 + 184 + 29 * 8, sp: 128 + 184 + 31 * 8 };

/// The vDSO does not describe it to unwinders (arch/arm64/kernel/vdso/sigreturn.S says why).
#[inline(always)]
pub(crate) fn known_signal_frame(address: u64) -> Option<SignalFrame> {
    (address == SIGNAL_RETURN.load(Ordering::Relaxed)).then_some(SIGNAL_FRAME)
}

/// Only for where there is no vDSO (emulators), or not the kernel's.
pub(crate) fn signal_frame(address: u64, can_read: impl Fn(usize) -> bool) -> Option<SignalFrame> {
    /// `mov x8, #139; svc #0`: `rt_sigreturn`.
    const CODE: u64 = 0xd400_0001_d280_1168;
    let is_known = SIGNAL_RETURN.load(Ordering::Relaxed) != 0;
    if is_known || !address.is_multiple_of(4) || !can_read(address as usize) {
        return None;
    }
    // SAFETY: eight bytes could be read there just now, and the thread will come back to them.
    let code = unsafe { (address as *const u64).read_unaligned() };
    if code != CODE {
        return None;
    }
    // Known from here on, also where it may not be read.
    SIGNAL_RETURN.store(address, Ordering::Relaxed);
    Some(SIGNAL_FRAME)
}

/// Whether it has LSE.
pub(crate) fn note_capabilities(capabilities: usize) {
    unsafe extern "C" {
        #[link_name = "gputrace_has_lse"]
        static HAS_LSE: AtomicU32;
    }
    /// `HWCAP_ATOMICS` (asm/hwcap.h).
    const ATOMICS: usize = 1 << 8;
    // SAFETY: the library's own word. Both ways are atomic, also with each other.
    unsafe { &HAS_LSE }.store(u32::from(capabilities & ATOMICS != 0), Ordering::Relaxed);
}

pub(crate) fn learn_signal_return(find: impl Fn(&CStr) -> Option<usize>) {
    if let Some(address) = find(c"__kernel_rt_sigreturn") {
        SIGNAL_RETURN.store(address as u64, Ordering::Relaxed);
    }
}

#[cfg(not(test))]
macro_rules! trap {
    () => {
        "brk #1"
    };
}
#[cfg(not(test))]
pub(crate) use trap;

/// Up to 64 bytes are moved in pieces that overlap, all read before the first is written; more goes 32 bytes at a time, with the last 32
/// read before anything is written over them.
macro_rules! compiler_functions {
    () => {
        core::arch::global_asm!(
            ".pushsection .text.gputrace_hot_bytes,\"ax\",@progbits",
            // void *memcpy(void *to, const void *from, size_t bytes), and memmove.
            ".p2align 5",
            ".globl memcpy",
            ".hidden memcpy",
            ".type memcpy, @function",
            ".globl memmove",
            ".hidden memmove",
            ".type memmove, @function",
            "memcpy:",
            "memmove:",
            ".cfi_startproc",
            "add x3, x1, x2", // the ends of both
            "add x4, x0, x2",
            "cmp x2, #16",
            "b.lo 2f",
            "cmp x2, #32",
            "b.hi 1f",
            "ldr q0, [x1]",
            "ldur q1, [x3, #-16]",
            "str q0, [x0]",
            "stur q1, [x4, #-16]",
            "ret",
            "1: cmp x2, #64",
            "b.hi 5f",
            "ldp q0, q1, [x1]",
            "ldp q2, q3, [x3, #-32]",
            "stp q0, q1, [x0]",
            "stp q2, q3, [x4, #-32]",
            "ret",
            "2: tbz x2, #3, 3f",
            "ldr x5, [x1]",
            "ldur x6, [x3, #-8]",
            "str x5, [x0]",
            "stur x6, [x4, #-8]",
            "ret",
            "3: tbz x2, #2, 4f",
            "ldr w5, [x1]",
            "ldur w6, [x3, #-4]",
            "str w5, [x0]",
            "stur w6, [x4, #-4]",
            "ret",
            "4: cbz x2, 8f",
            // 1, 2 or 3 bytes: the first, the one in the middle of them, and the last, which may be one and the same.
            "lsr x7, x2, #1",
            "ldrb w5, [x1]",
            "ldrb w6, [x1, x7]",
            "ldurb w9, [x3, #-1]",
            "strb w5, [x0]",
            "strb w6, [x0, x7]",
            "sturb w9, [x4, #-1]",
            "8: ret",
            "5: sub x5, x0, x1",
            "cmp x5, x2", // `to` lies inside of `from`: from its end
            "b.lo 7f",
            "mov x5, x0",
            "ldp q6, q7, [x3, #-32]",
            "6: ldp q0, q1, [x1], #32",
            "stp q0, q1, [x5], #32",
            "sub x2, x2, #32",
            "cmp x2, #32",
            "b.hi 6b",
            "stp q6, q7, [x4, #-32]",
            "ret",
            "7: ldp q6, q7, [x1]",
            "9: ldp q0, q1, [x3, #-32]!",
            "stp q0, q1, [x4, #-32]!",
            "sub x2, x2, #32",
            "cmp x2, #32",
            "b.hi 9b",
            "stp q6, q7, [x0]",
            "ret",
            ".cfi_endproc",
            ".size memcpy, . - memcpy",
            // void *memset(void *to, int byte, size_t bytes)
            ".p2align 5",
            ".globl memset",
            ".hidden memset",
            ".type memset, @function",
            "memset:",
            ".cfi_startproc",
            "dup v0.16b, w1",
            "mov x3, x0",
            "add x4, x0, x2",
            "cmp x2, #16",
            "b.lo 1f",
            // Sixteen bytes at a time, the last sixteen of them for what is left.
            "0: str q0, [x3], #16",
            "sub x2, x2, #16",
            "cmp x2, #16",
            "b.hs 0b",
            "stur q0, [x4, #-16]",
            "ret",
            "1: cbz x2, 2f",
            "strb w1, [x3], #1",
            "sub x2, x2, #1",
            "b 1b",
            "2: ret",
            ".cfi_endproc",
            ".size memset, . - memset",
            // int memcmp(const void *one, const void *other, size_t bytes), and bcmp
            ".p2align 5",
            ".globl memcmp",
            ".hidden memcmp",
            ".type memcmp, @function",
            ".globl bcmp",
            ".hidden bcmp",
            ".type bcmp, @function",
            "memcmp:",
            "bcmp:",
            ".cfi_startproc",
            "mov x3, xzr",
            "0: add x4, x3, #8",
            "cmp x4, x2",
            "b.hi 1f",
            "ldr x5, [x0, x3]",
            "ldr x6, [x1, x3]",
            "cmp x5, x6",
            "b.ne 1f", // the bytes say which is less
            "mov x3, x4",
            "b 0b",
            "1: cmp x3, x2",
            "b.hs 2f",
            "ldrb w5, [x0, x3]",
            "ldrb w6, [x1, x3]",
            "add x3, x3, #1",
            "subs w5, w5, w6",
            "b.eq 1b",
            "mov w0, w5",
            "ret",
            "2: mov w0, wzr",
            "ret",
            ".cfi_endproc",
            ".size memcmp, . - memcmp",
            // size_t strlen(const char *text): 16 bytes at a time from an address that is a multiple of 16, so never into the next
            // page, nor into memory with another tag. Each byte becomes four bits of one register.
            ".p2align 5",
            ".globl strlen",
            ".hidden strlen",
            ".type strlen, @function",
            "strlen:",
            ".cfi_startproc",
            "and x1, x0, #-16",
            "ldr q0, [x1]",
            "cmeq v0.16b, v0.16b, #0",
            "shrn v0.8b, v0.8h, #4",
            "fmov x2, d0",
            "lsl x3, x0, #2", // the shift counts its lowest six bits: four for each byte before the text
            "lsr x2, x2, x3",
            "cbz x2, 0f",
            "rbit x2, x2",
            "clz x2, x2",
            "lsr x0, x2, #2",
            "ret",
            "0: ldr q0, [x1, #16]!",
            "cmeq v0.16b, v0.16b, #0",
            "shrn v0.8b, v0.8h, #4",
            "fmov x2, d0",
            "cbz x2, 0b",
            "rbit x2, x2",
            "clz x2, x2",
            "add x1, x1, x2, lsr #2",
            "sub x0, x1, x0",
            "ret",
            ".cfi_endproc",
            ".size strlen, . - strlen",
            // What the compiler calls for atomic operations (`-moutline-atomics`): by one instruction where the processor has it (`LSE`,
            // Armv8.1), else by a loop. The C library's compiler has the same functions, which ask `getauxval` when they are loaded,
            // by a name that others may have taken.
            ".pushsection .data.gputrace_has_lse,\"aw\",@progbits",
            ".globl gputrace_has_lse",
            ".hidden gputrace_has_lse",
            ".type gputrace_has_lse, @object",
            ".size gputrace_has_lse, 4",
            ".p2align 2",
            "gputrace_has_lse: .word 0",
            ".popsection",
            ".arch_extension lse",
            ".macro gputrace_begin name",
            ".p2align 4",
            ".globl \\name",
            ".hidden \\name",
            ".type \\name, @function",
            "\\name:",
            ".cfi_startproc",
            "adrp x16, gputrace_has_lse",
            "ldr w16, [x16, :lo12:gputrace_has_lse]",
            "cbz w16, 1f",
            ".endm",
            ".macro gputrace_end name",
            ".cfi_endproc",
            ".size \\name, . - \\name",
            ".endm",
            // The value in x0, the address in x1; what was there before comes back.
            ".macro gputrace_change operation, how, size, r, s, order, a, l",
            "gputrace_begin __aarch64_\\operation\\size\\()_\\order",
            "\\operation\\a\\l\\s \\r\\()0, \\r\\()0, [x1]",
            "ret",
            "1: mov \\r\\()16, \\r\\()0",
            "2: ld\\a\\()xr\\s \\r\\()0, [x1]",
            "\\how \\r\\()17, \\r\\()0, \\r\\()16",
            "st\\l\\()xr\\s w15, \\r\\()17, [x1]",
            "cbnz w15, 2b",
            "ret",
            "gputrace_end __aarch64_\\operation\\size\\()_\\order",
            ".endm",
            // `extend` of the expected value to a whole register. That is in x0, the new one in x1, the address in x2.
            ".macro gputrace_atomics size, r, s, extend, order, a, l",
            "gputrace_begin __aarch64_cas\\size\\()_\\order",
            "cas\\a\\l\\s \\r\\()0, \\r\\()1, [x2]",
            "ret",
            "1: \\extend \\r\\()16, \\r\\()0",
            "2: ld\\a\\()xr\\s \\r\\()0, [x2]",
            "cmp \\r\\()0, \\r\\()16",
            "b.ne 3f",
            "st\\l\\()xr\\s w17, \\r\\()1, [x2]",
            "cbnz w17, 2b",
            "3: ret",
            "gputrace_end __aarch64_cas\\size\\()_\\order",
            "gputrace_begin __aarch64_swp\\size\\()_\\order",
            "swp\\a\\l\\s \\r\\()0, \\r\\()0, [x1]",
            "ret",
            "1: mov \\r\\()16, \\r\\()0",
            "2: ld\\a\\()xr\\s \\r\\()0, [x1]",
            "st\\l\\()xr\\s w17, \\r\\()16, [x1]",
            "cbnz w17, 2b",
            "ret",
            "gputrace_end __aarch64_swp\\size\\()_\\order",
            "gputrace_change ldadd, add, \\size, \\r, \\s, \\order, \\a, \\l",
            "gputrace_change ldclr, bic, \\size, \\r, \\s, \\order, \\a, \\l",
            "gputrace_change ldeor, eor, \\size, \\r, \\s, \\order, \\a, \\l",
            "gputrace_change ldset, orr, \\size, \\r, \\s, \\order, \\a, \\l",
            ".endm",
            ".macro gputrace_sizes order, a, l",
            "gputrace_atomics 1, w, b, uxtb, \\order, \\a, \\l",
            "gputrace_atomics 2, w, h, uxth, \\order, \\a, \\l",
            "gputrace_atomics 4, w, , mov, \\order, \\a, \\l",
            "gputrace_atomics 8, x, , mov, \\order, \\a, \\l",
            ".endm",
            "gputrace_sizes relax, , ",
            "gputrace_sizes acq, a, ",
            "gputrace_sizes rel, , l",
            "gputrace_sizes acq_rel, a, l",
            ".arch_extension nolse",
            ".popsection",
        );
    };
}
pub(crate) use compiler_functions;

/// Instructions that begin a function with a frame of so many bytes, and that number less 8: it has the caller's frame pointer and the
/// return address at its lower end, as unwinders are told.
#[rustfmt::skip]
macro_rules! makes_frame {
    ($bytes:literal $less:literal) => {
        concat!(
            "stp x29, x30, [sp, #-", $bytes, "]!\n",
            ".cfi_def_cfa_offset ", $bytes, "\n",
            ".cfi_offset x29, -", $bytes, "\n",
            ".cfi_offset x30, -", $less, "\n",
            "mov x29, sp",
        )
    };
}
pub(crate) use makes_frame;

/// Those that remove such a frame.
#[rustfmt::skip]
macro_rules! removes_frame {
    ($bytes:literal) => {
        concat!(
            "ldp x29, x30, [sp], #", $bytes, "\n",
            ".cfi_def_cfa_offset 0\n",
            ".cfi_restore x29\n",
            ".cfi_restore x30",
        )
    };
}
pub(crate) use removes_frame;

/// Those that store ("st") a function's arguments above the lower end of its frame, and where its result goes; or load them ("ld").
#[rustfmt::skip]
macro_rules! keeps_arguments {
    ($moves:literal) => {
        concat!(
            $moves, "p x0, x1, [sp, #16]\n",
            $moves, "p x2, x3, [sp, #32]\n",
            $moves, "p x4, x5, [sp, #48]\n",
            $moves, "p x6, x7, [sp, #64]\n",
            $moves, "r x8, [sp, #80]",
        )
    };
}
pub(crate) use keeps_arguments;

macro_rules! captures_from {
    ($from:ident) => {
        core::arch::naked_asm!(
            "mov x2, x30",
            "mov x3, sp",
            "mov x4, x29",
            "b {from}",
            from = sym $from,
        )
    };
}
pub(crate) use captures_from;

macro_rules! looks_up {
    (2 $decide:ident $real:ident) => {
        $crate::arch::looks_up!(@write "mov x3, xzr", $decide $real)
    };
    (3 $decide:ident $real:ident) => {
        $crate::arch::looks_up!(@write "mov x3, x2", $decide $real)
    };
    (@write $third:literal, $decide:ident $real:ident) => {
        core::arch::naked_asm!(
            ".cfi_startproc",
            $crate::arch::makes_frame!(48 40),
            "stp x0, x1, [sp, #16]",
            "str x2, [sp, #32]",
            $third,
            "mov x2, x30",
            "bl {decide}",
            "mov x9, x0",
            "ldp x0, x1, [sp, #16]",
            "ldr x2, [sp, #32]",
            $crate::arch::removes_frame!(48),
            "cmp x9, #1",
            "b.hi 2f",
            "b.eq 3f",
            "adrp x16, {real}",
            "ldr x16, [x16, :lo12:{real}]",
            "br x16",
            "3: mov x9, xzr",
            "2: mov x0, x9",
            "ret",
            ".cfi_endproc",
            decide = sym $decide,
            real = sym $real,
        )
    };
}
pub(crate) use looks_up;

macro_rules! goes_on {
    ($settle:ident) => {
        core::arch::naked_asm!(
            ".cfi_startproc",
            $crate::arch::makes_frame!(16 8),
            "bl {settle}",
            "mov x16, x0",
            "mov x0, x1",
            $crate::arch::removes_frame!(16),
            "br x16",
            ".cfi_endproc",
            settle = sym $settle,
        )
    };
}
pub(crate) use goes_on;

macro_rules! calls_and_catches {
    ($personality:ident $landing:ident) => {
        core::arch::naked_asm!(
            ".cfi_startproc",
            ".cfi_personality 0x1b, {personality}", // DW_EH_PE_pcrel | DW_EH_PE_sdata4
            $crate::arch::makes_frame!(16 8),
            "adr x9, 2f",
            "adrp x10, {landing}",
            "str x9, [x10, :lo12:{landing}]",
            "mov x9, x2",
            "mov x8, x0",
            "mov x0, x1",
            "mov x1, xzr",
            "mov x2, xzr",
            "mov x3, xzr",
            "mov x4, xzr",
            "blr x9",
            "mov x0, #1",
            "b 1f",
            "2: mov x0, xzr",
            "1:",
            $crate::arch::removes_frame!(16),
            "ret",
            ".cfi_endproc",
            personality = sym $personality,
            landing = sym $landing,
        )
    };
}
pub(crate) use calls_and_catches;

/// The frame is the caller's stack pointer.
macro_rules! calls_around {
    (execute $enter:ident $leave:ident) => {
        $crate::arch::calls_around!(@write before ["add x0, sp, #96"] $enter, after ["add x0, sp, #96"] $leave)
    };
    (allocate $enter:ident $leave:ident, personality $personality:ident) => {
        $crate::arch::calls_around!(
            @write before ["mov x0, x1" "add x1, sp, #96"] $enter, after [] $leave, personality $personality
        )
    };
    (@write before [$($before:literal)*] $enter:ident, after [$($after:literal)*] $leave:ident
        $(, personality $personality:ident)?
    ) => {
        core::arch::naked_asm!(
            ".cfi_startproc",
            $( concat!(".cfi_personality 0x1b, {", stringify!($personality), "}"), )? // DW_EH_PE_pcrel | DW_EH_PE_sdata4
            $crate::arch::makes_frame!(96 88),
            $crate::arch::keeps_arguments!("st"),
            $( $before, )*
            "bl {enter}",
            "mov x16, x0",
            $crate::arch::keeps_arguments!("ld"),
            "blr x16",
            "stp x0, x1, [sp, #16]",
            $( $after, )*
            "bl {leave}",
            "ldp x0, x1, [sp, #16]",
            $crate::arch::removes_frame!(96),
            "ret",
            ".cfi_endproc",
            enter = sym $enter,
            leave = sym $leave,
            $( $personality = sym $personality, )?
        )
    };
}
pub(crate) use calls_around;

macro_rules! jumps_after {
    (arguments $enter:ident) => {
        $crate::arch::jumps_after!(@write [] $enter)
    };
    (arguments_of_result $enter:ident) => {
        $crate::arch::jumps_after!(@write [] $enter)
    };
    (numbered $number:literal $enter:ident) => {
        $crate::arch::jumps_after!(@write ["mov x0, #{number}"] $enter, number = const $number)
    };
    (numbered_without_device $number:literal $enter:ident) => {
        $crate::arch::jumps_after!(
            @write ["mov x3, x2" "mov x2, x1" "mov x1, xzr" "mov x0, #{number}"] $enter, number = const $number
        )
    };
    (@write [$($before:literal)*] $enter:ident $($operand:tt)*) => {
        core::arch::naked_asm!(
            ".cfi_startproc",
            $crate::arch::makes_frame!(224 216),
            $crate::arch::keeps_arguments!("st"),
            "stp q0, q1, [sp, #96]",
            "stp q2, q3, [sp, #128]",
            "stp q4, q5, [sp, #160]",
            "stp q6, q7, [sp, #192]",
            $( $before, )*
            "bl {enter}",
            "mov x16, x0",
            $crate::arch::keeps_arguments!("ld"),
            "ldp q0, q1, [sp, #96]",
            "ldp q2, q3, [sp, #128]",
            "ldp q4, q5, [sp, #160]",
            "ldp q6, q7, [sp, #192]",
            $crate::arch::removes_frame!(224),
            "br x16",
            ".cfi_endproc",
            enter = sym $enter
            $($operand)*
        )
    };
}
pub(crate) use jumps_after;
