//! x86-64: the System V ABI (psABI AMD64), and what Linux and the C libraries do on it.

macro_rules! system_call {
    ($number:expr, $a:expr, $b:expr, $c:expr, $d:expr, $e:expr, $f:expr) => {{
        let answer: isize;
        core::arch::asm!(
            "syscall",
            inlateout("rax") $number as isize => answer,
            in("rdi") $a, in("rsi") $b, in("rdx") $c, in("r10") $d, in("r8") $e, in("r9") $f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
        answer
    }};
}
pub(crate) use system_call;

/// By `poll(2)`.
#[inline(always)]
pub(crate) fn poll_now<T>(
    descriptors: &mut [libc::pollfd],
    call: impl FnOnce(libc::c_long, [usize; 6]) -> T,
) -> T {
    call(libc::SYS_poll, [descriptors.as_mut_ptr() as usize, descriptors.len(), 0, 0, 0, 0])
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
    "mov r8, rdx", // the function
    "mov r9, rcx", // its argument: the kernel keeps both
    "xor edx, edx",
    "xor r10d, r10d",
    "mov eax, {clone}",
    // The two that were used are numbers of the kernel's too: no thread pointer is set without its flag.
    "syscall",
    "test rax, rax",
    "jz 1f",
    "ret",
    ".cfi_endproc",
    "1:",
    ".cfi_startproc",
    ".cfi_undefined rip", // nobody called us here
    "xor ebp, ebp",
    "mov rdi, r9",
    "call r8",
    "mov edi, eax",
    "mov eax, {exit}",
    "syscall",
    "ud2",
    ".cfi_endproc",
    ".size gputrace_clone, . - gputrace_clone",
    ".popsection",
    clone = const libc::SYS_clone,
    exit = const libc::SYS_exit_group,
);

pub(crate) const READ_CLOCK: &core::ffi::CStr = c"__vdso_clock_gettime";

/// R_X86_64_GLOB_DAT and R_X86_64_JUMP_SLOT (psABI AMD64, table 4.9).
pub(crate) const FUNCTION_SLOTS: [u32; 2] = [6, 7];

#[inline(always)]
pub(crate) fn page_bytes() -> usize {
    4096
}

/// There is one size.
#[inline(always)]
pub(crate) fn note_page_bytes(_bytes: usize) {}

/// It has a sign.
#[inline(always)]
pub(crate) fn char(byte: u8) -> i64 {
    i64::from(byte as i8)
}

#[inline(always)]
pub(crate) fn fence_after_exchange() {
    // An exchange is a full barrier here, and a fence costs more than all else around it (Intel SDM vol. 3A, 10.2.3.9; AMD APM vol. 2, 7.2).
    core::sync::atomic::compiler_fence(core::sync::atomic::Ordering::SeqCst);
}

#[inline(always)]
pub(crate) fn thread_words() -> *const () {
    let words: *const ();
    // SAFETY: the ABI keeps the thread pointer at fs:0; the linker fills in the offset from it.
    unsafe {
        core::arch::asm!(
            "mov {words}, qword ptr fs:[0]",
            "add {words}, qword ptr [rip + gputrace_thread_words@gottpoff]",
            words = out(reg) words,
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
        core::arch::asm!("mov {}, rsp", out(reg) here, options(nomem, nostack, preserves_flags));
    }
    here
}

/// The thread pointer in glibc (`THREAD_SELF`, `sysdeps/x86_64/nptl/tls.h`).
#[inline(always)]
pub(crate) fn this_thread() -> u64 {
    let pointer: u64;
    // SAFETY: the ABI keeps the thread pointer at fs:0.
    unsafe {
        core::arch::asm!("mov {}, qword ptr fs:[0]", out(reg) pointer, options(pure, readonly, nostack));
    }
    pointer
}

/// Nothing here.
#[inline(always)]
pub(crate) fn learn(_pthread_self: impl FnOnce() -> *mut core::ffi::c_void) {}

#[inline(always)]
pub(crate) unsafe fn valgrind_request(arguments: *const usize) -> usize {
    let mut answer: usize = 0;
    // SAFETY: four rotations by 128 bits in all leave the register as it was, and an exchange of a register with itself does nothing.
    // Valgrind reads the arguments, and writes the answer's register.
    unsafe {
        core::arch::asm!(
            "rol rdi, 3",
            "rol rdi, 13",
            "rol rdi, 61",
            "rol rdi, 51",
            "xchg rbx, rbx",
            in("rax") arguments,
            inout("rdx") answer,
            options(nostack),
        );
    }
    answer
}

// psABI AMD64, figure 3.36.
pub(crate) const FRAME_POINTER: u64 = 6;
pub(crate) const STACK_POINTER: u64 = 7;
pub(crate) const RETURN_ADDRESS: u64 = 16;

/// A call leaves its return address on the stack, never in a register.
pub(crate) const HAS_LINK_REGISTER: bool = false;

pub(crate) type FpOffset = i16;

pub(crate) const KNOWN_STACK_BYTES: usize = 832;

/// Always in the word below.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct ReturnAt;

impl ReturnAt {
    pub(crate) const BELOW: ReturnAt = ReturnAt;

    pub(crate) fn offset(offset: i64) -> Option<ReturnAt> {
        (offset == -8).then_some(ReturnAt)
    }

    #[inline(always)]
    pub(crate) fn slot(self, cfa: u64) -> u64 {
        cfa.wrapping_sub(8)
    }
}

/// Always in the word below the stack pointer.
#[derive(Clone, Copy, Default)]
pub(crate) struct FoundAt;

impl FoundAt {
    pub(crate) const NOWHERE: FoundAt = FoundAt;

    #[inline(always)]
    pub(crate) fn slot(_slot: u64) -> FoundAt {
        FoundAt
    }

    #[inline(always)]
    pub(crate) fn address(self, sp: u64) -> u64 {
        sp.wrapping_sub(8)
    }

    #[inline(always)]
    pub(crate) fn interrupted(_link: u64) -> FoundAt {
        FoundAt
    }

    #[inline(always)]
    pub(crate) fn link(self) -> u64 {
        0
    }
}

#[inline(always)]
pub(crate) fn address(word: u64) -> u64 {
    word
}

/// All.
#[inline(always)]
pub(crate) fn address_bits() -> u64 {
    u64::MAX
}

/// There are none.
#[inline(always)]
pub(crate) fn is_idle_instruction(_operation: u8) -> bool {
    false
}

/// Tables say it here.
#[inline(always)]
pub(crate) fn known_signal_frame(_address: u64) -> Option<super::SignalFrame> {
    None
}

#[inline(always)]
pub(crate) fn signal_frame(_address: u64, _can_read: impl Fn(usize) -> bool) -> Option<super::SignalFrame> {
    None
}

/// Nothing is asked of it.
#[inline(always)]
pub(crate) fn note_capabilities(_capabilities: usize) {}

#[inline(always)]
pub(crate) fn learn_signal_return(_find: impl Fn(&core::ffi::CStr) -> Option<usize>) {}

#[cfg(not(test))]
macro_rules! trap {
    () => {
        "ud2"
    };
}
#[cfg(not(test))]
pub(crate) use trap;

/// Up to 128 bytes are moved in pieces that overlap, all read before the first is written; the rest is left to the processor's own
/// instruction.
macro_rules! compiler_functions {
    () => {
        core::arch::global_asm!(
            ".pushsection .text.gputrace_hot_bytes,\"ax\",@progbits",
            // void *memcpy(void *to, const void *from, size_t bytes), and memmove: registers as psABI AMD64 3.2.3 has them.
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
            "mov rax, rdi",
            "cmp rdx, 16",
            "jb 2f",
            "cmp rdx, 32",
            "ja 1f",
            "movups xmm0, [rsi]",
            "movups xmm1, [rsi + rdx - 16]",
            "movups [rdi], xmm0",
            "movups [rdi + rdx - 16], xmm1",
            "ret",
            "1: cmp rdx, 64",
            "ja 5f",
            "movups xmm0, [rsi]",
            "movups xmm1, [rsi + 16]",
            "movups xmm2, [rsi + rdx - 32]",
            "movups xmm3, [rsi + rdx - 16]",
            "movups [rdi], xmm0",
            "movups [rdi + 16], xmm1",
            "movups [rdi + rdx - 32], xmm2",
            "movups [rdi + rdx - 16], xmm3",
            "ret",
            "2: cmp edx, 8",
            "jb 3f",
            "mov rcx, [rsi]",
            "mov r8, [rsi + rdx - 8]",
            "mov [rdi], rcx",
            "mov [rdi + rdx - 8], r8",
            "ret",
            "3: cmp edx, 4",
            "jb 4f",
            "mov ecx, [rsi]",
            "mov r8d, [rsi + rdx - 4]",
            "mov [rdi], ecx",
            "mov [rdi + rdx - 4], r8d",
            "ret",
            "4: test edx, edx",
            "jz 8f",
            // 1, 2 or 3 bytes: the first, the one in the middle of them, and the last, which may be one and the same.
            "mov r9, rdx",
            "shr r9, 1",
            "movzx ecx, byte ptr [rsi]",
            "movzx r8d, byte ptr [rsi + r9]",
            "movzx r10d, byte ptr [rsi + rdx - 1]",
            "mov [rdi], cl",
            "mov [rdi + r9], r8b",
            "mov [rdi + rdx - 1], r10b",
            "8: ret",
            "5: cmp rdx, 128",
            "ja 6f",
            "movups xmm0, [rsi]",
            "movups xmm1, [rsi + 16]",
            "movups xmm2, [rsi + 32]",
            "movups xmm3, [rsi + 48]",
            "movups xmm4, [rsi + rdx - 64]",
            "movups xmm5, [rsi + rdx - 48]",
            "movups xmm6, [rsi + rdx - 32]",
            "movups xmm7, [rsi + rdx - 16]",
            "movups [rdi], xmm0",
            "movups [rdi + 16], xmm1",
            "movups [rdi + 32], xmm2",
            "movups [rdi + 48], xmm3",
            "movups [rdi + rdx - 64], xmm4",
            "movups [rdi + rdx - 48], xmm5",
            "movups [rdi + rdx - 32], xmm6",
            "movups [rdi + rdx - 16], xmm7",
            "ret",
            "6: mov rcx, rdi",
            "sub rcx, rsi",
            "cmp rcx, rdx", // `to` lies inside of `from`: from its end
            "jb 7f",
            "mov rcx, rdx",
            "rep movsb",
            "ret",
            "7: mov rcx, rdx",
            "lea rdi, [rdi + rdx - 1]",
            "lea rsi, [rsi + rdx - 1]",
            "std",
            "rep movsb",
            "cld",
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
            "mov r8, rdi",
            "cmp rdx, 64",
            "ja 2f",
            "movzx eax, sil",
            "mov rcx, 0x0101010101010101",
            "imul rax, rcx",
            "cmp rdx, 8",
            "jb 1f",
            // Eight bytes at a time, the last eight of them for what is left.
            "mov [rdi + rdx - 8], rax",
            "0: mov [rdi], rax",
            "add rdi, 8",
            "sub rdx, 8",
            "cmp rdx, 8",
            "jae 0b",
            "mov rax, r8",
            "ret",
            "1: test rdx, rdx",
            "jz 3f",
            "mov [rdi], al",
            "inc rdi",
            "dec rdx",
            "jmp 1b",
            "2: mov eax, esi",
            "mov rcx, rdx",
            "rep stosb",
            "3: mov rax, r8",
            "ret",
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
            "xor ecx, ecx",
            "0: lea rax, [rcx + 8]",
            "cmp rax, rdx",
            "ja 1f",
            "mov r8, [rdi + rcx]",
            "cmp r8, [rsi + rcx]",
            "jne 1f", // the bytes say which is less
            "mov rcx, rax",
            "jmp 0b",
            "1: cmp rcx, rdx",
            "jae 2f",
            "movzx eax, byte ptr [rdi + rcx]",
            "movzx r8d, byte ptr [rsi + rcx]",
            "inc rcx",
            "sub eax, r8d",
            "je 1b",
            "ret",
            "2: xor eax, eax",
            "ret",
            ".cfi_endproc",
            ".size memcmp, . - memcmp",
            // size_t strlen(const char *text): 16 bytes at a time from an address that is a multiple of 16, so never into the next
            // page.
            ".p2align 5",
            ".globl strlen",
            ".hidden strlen",
            ".type strlen, @function",
            "strlen:",
            ".cfi_startproc",
            "pxor xmm0, xmm0",
            "mov rax, rdi",
            "and rax, -16",
            "mov ecx, edi",
            "and ecx, 15",
            "movdqa xmm1, [rax]",
            "pcmpeqb xmm1, xmm0",
            "pmovmskb edx, xmm1",
            "shr edx, cl", // what lies before the text
            "test edx, edx",
            "jz 0f",
            "bsf eax, edx",
            "ret",
            "0: add rax, 16",
            "movdqa xmm1, [rax]",
            "pcmpeqb xmm1, xmm0",
            "pmovmskb edx, xmm1",
            "test edx, edx",
            "jz 0b",
            "bsf edx, edx",
            "add rax, rdx",
            "sub rax, rdi",
            "ret",
            ".cfi_endproc",
            ".size strlen, . - strlen",
            ".popsection",
        );
    };
}
pub(crate) use compiler_functions;

macro_rules! captures_from {
    ($from:ident) => {
        core::arch::naked_asm!(
            "mov rdx, [rsp]",
            "lea rcx, [rsp + 8]",
            "mov r8, rbp",
            "jmp {from}",
            from = sym $from,
        )
    };
}
pub(crate) use captures_from;

macro_rules! looks_up {
    (2 $decide:ident $real:ident) => {
        core::arch::naked_asm!(
            ".cfi_startproc",
            "push rdi",
            ".cfi_adjust_cfa_offset 8",
            "push rsi",
            ".cfi_adjust_cfa_offset 8",
            "mov rdx, [rsp + 16]",
            "xor ecx, ecx",
            "sub rsp, 8",
            ".cfi_adjust_cfa_offset 8",
            "call {decide}",
            "add rsp, 8",
            ".cfi_adjust_cfa_offset -8",
            "pop rsi",
            ".cfi_adjust_cfa_offset -8",
            "pop rdi",
            ".cfi_adjust_cfa_offset -8",
            "cmp rax, 1",
            "ja 2f",
            "je 3f",
            "mov rax, [rip + {real}]",
            "jmp rax",
            "3: xor eax, eax",
            "2: ret",
            ".cfi_endproc",
            decide = sym $decide,
            real = sym $real,
        )
    };
    (3 $decide:ident $real:ident) => {
        core::arch::naked_asm!(
            ".cfi_startproc",
            "push rdi",
            ".cfi_adjust_cfa_offset 8",
            "push rsi",
            ".cfi_adjust_cfa_offset 8",
            "push rdx",
            ".cfi_adjust_cfa_offset 8",
            "mov rcx, rdx",
            "mov rdx, [rsp + 24]",
            "call {decide}",
            "pop rdx",
            ".cfi_adjust_cfa_offset -8",
            "pop rsi",
            ".cfi_adjust_cfa_offset -8",
            "pop rdi",
            ".cfi_adjust_cfa_offset -8",
            "cmp rax, 1",
            "ja 2f",
            "je 3f",
            "mov rax, [rip + {real}]",
            "jmp rax",
            "3: xor eax, eax",
            "2: ret",
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
            "sub rsp, 8",
            ".cfi_adjust_cfa_offset 8",
            "call {settle}",
            "add rsp, 8",
            ".cfi_adjust_cfa_offset -8",
            "mov rdi, rdx",
            "jmp rax",
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
            "sub rsp, 8",
            ".cfi_adjust_cfa_offset 8",
            "lea rax, [rip + 2f]",
            "mov [rip + {landing}], rax",
            "mov rax, rdx",
            "xor edx, edx",
            "xor ecx, ecx",
            "xor r8d, r8d",
            "xor r9d, r9d",
            "call rax",
            "mov eax, 1",
            "add rsp, 8",
            ".cfi_adjust_cfa_offset -8",
            "ret",
            ".cfi_adjust_cfa_offset 8",
            "2:",
            "xor eax, eax",
            "add rsp, 8",
            ".cfi_adjust_cfa_offset -8",
            "ret",
            ".cfi_endproc",
            personality = sym $personality,
            landing = sym $landing,
        )
    };
}
pub(crate) use calls_and_catches;

/// The frame is where the return address lies.
macro_rules! calls_around {
    (execute $enter:ident $leave:ident) => {
        $crate::arch::calls_around!(@saves ["rdi" "rsi" "rdx" "rcx" "r8"],
            before ["lea rdi, [rsp + 56]"] $enter, after ["lea rdi, [rsp + 8]"] $leave)
    };
    (allocate $enter:ident $leave:ident, personality $personality:ident) => {
        $crate::arch::calls_around!(@saves ["rdi" "rsi" "rdx"],
            before ["mov rdi, rdx" "lea rsi, [rsp + 40]"] $enter, after [] $leave, personality $personality)
    };
    // `saves` are the argument registers that the real function needs, an odd number of them, so that the stack is aligned for
    // both calls; `before` are the instructions that give `enter` its arguments, and `after` those that give `leave` its own.
    // With the return address at `rsp + 16 + 8 * saves` before, and at `rsp + 8` after.
    (@saves [$($saved:literal)*], $($rest:tt)*) => {
        $crate::arch::calls_around!(@reverse [$($saved)*] [] [$($saved)*] $($rest)*)
    };
    (@reverse [] $reversed:tt $saved:tt $($rest:tt)*) => {
        $crate::arch::calls_around!(@write $saved $reversed $($rest)*)
    };
    (@reverse [$first:literal $($more:literal)*] [$($reversed:literal)*] $saved:tt $($rest:tt)*) => {
        $crate::arch::calls_around!(@reverse [$($more)*] [$first $($reversed)*] $saved $($rest)*)
    };
    (@write [$($saved:literal)*] [$($reversed:literal)*]
        before [$($before:literal)*] $enter:ident, after [$($after:literal)*] $leave:ident
        $(, personality $personality:ident)?
    ) => {
        core::arch::naked_asm!(
            ".cfi_startproc",
            $( concat!(".cfi_personality 0x1b, {", stringify!($personality), "}"), )? // DW_EH_PE_pcrel | DW_EH_PE_sdata4
            "push rbx",
            ".cfi_adjust_cfa_offset 8",
            ".cfi_rel_offset rbx, 0",
            $( concat!("push ", $saved), ".cfi_adjust_cfa_offset 8", )*
            "sub rsp, 8",
            ".cfi_adjust_cfa_offset 8",
            $( $before, )*
            "call {enter}",
            "add rsp, 8",
            ".cfi_adjust_cfa_offset -8",
            $( concat!("pop ", $reversed), ".cfi_adjust_cfa_offset -8", )*
            "call rax",
            "mov rbx, rax",
            $( $after, )*
            "call {leave}",
            "mov rax, rbx",
            "pop rbx",
            ".cfi_adjust_cfa_offset -8",
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
        $crate::arch::jumps_after!(@write ["mov rdi, rsi" "mov rsi, rdx"] $enter)
    };
    // `this` is in rdi, the device in esi, the pool in rdx and rcx; `emptyCache` has the pool in rsi and rdx.
    (numbered $number:literal $enter:ident) => {
        $crate::arch::jumps_after!(@write ["mov edi, {number}"] $enter, number = const $number)
    };
    (numbered_without_device $number:literal $enter:ident) => {
        $crate::arch::jumps_after!(
            @write ["mov rcx, rdx" "mov rdx, rsi" "xor esi, esi" "mov edi, {number}"] $enter, number = const $number
        )
    };
    (@write [$($before:literal)*] $enter:ident $($operand:tt)*) => {
        core::arch::naked_asm!(
            ".cfi_startproc",
            "push rdi", ".cfi_adjust_cfa_offset 8",
            "push rsi", ".cfi_adjust_cfa_offset 8",
            "push rdx", ".cfi_adjust_cfa_offset 8",
            "push rcx", ".cfi_adjust_cfa_offset 8",
            "push r8", ".cfi_adjust_cfa_offset 8",
            "push r9", ".cfi_adjust_cfa_offset 8",
            "sub rsp, 24", ".cfi_adjust_cfa_offset 24",
            "movups [rsp], xmm0",
            $( $before, )*
            "call {enter}",
            "movups xmm0, [rsp]",
            "add rsp, 24", ".cfi_adjust_cfa_offset -24",
            "pop r9", ".cfi_adjust_cfa_offset -8",
            "pop r8", ".cfi_adjust_cfa_offset -8",
            "pop rcx", ".cfi_adjust_cfa_offset -8",
            "pop rdx", ".cfi_adjust_cfa_offset -8",
            "pop rsi", ".cfi_adjust_cfa_offset -8",
            "pop rdi", ".cfi_adjust_cfa_offset -8",
            "jmp rax",
            ".cfi_endproc",
            enter = sym $enter
            $($operand)*
        )
    };
}
pub(crate) use jumps_after;
