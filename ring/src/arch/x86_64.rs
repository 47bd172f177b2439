//! x86-64.

use core::arch::x86_64::{__cpuid, _mm_lfence, _rdtsc};

#[inline]
pub(crate) fn counter() -> u64 {
    // The fence keeps the read from moving before the lock that the allocator above us has just taken: two
    // threads' stamps then have the order of their critical sections.
    // SAFETY: every x86-64 processor has SSE2's lfence.
    unsafe { _mm_lfence() };
    early_counter()
}

#[inline]
pub(crate) fn early_counter() -> u64 {
    // SAFETY: rdtsc is not privileged on Linux unless a process asked for PR_TSC_SIGSEGV itself.
    unsafe { _rdtsc() }
}

pub(crate) fn counter_is_invariant() -> bool {
    // Intel SDM vol. 2A, CPUID: leaf 8000_0007H, EDX bit 8 is "Invariant TSC"; AMD APM vol. 3 agrees.
    __cpuid(0x8000_0000).eax >= 0x8000_0007 && __cpuid(0x8000_0007).edx & (1 << 8) != 0
}

#[cfg(not(miri))]
pub(crate) fn ask_kernel(clock: libc::clockid_t, now: &mut libc::timespec) {
    // SAFETY: the kernel's own convention (psABI AMD64, A.2.1); the call writes the timespec and nothing else.
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") libc::SYS_clock_gettime => _,
            in("rdi") clock as isize, in("rsi") now,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
}
