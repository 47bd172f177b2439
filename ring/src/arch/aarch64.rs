//! AArch64.

#[inline]
pub(crate) fn counter() -> u64 {
    let ticks: u64;
    // SAFETY: Linux gives user space the virtual counter; isb orders the read as lfence does on x86.
    unsafe { core::arch::asm!("isb", "mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack)) };
    ticks
}

/// As [`counter`].
#[inline]
pub(crate) fn early_counter() -> u64 {
    counter()
}

pub(crate) fn counter_is_invariant() -> bool {
    true // The generic timer's frequency is fixed (Arm ARM, D12).
}

#[cfg(not(miri))]
pub(crate) fn ask_kernel(clock: libc::clockid_t, now: &mut libc::timespec) {
    // SAFETY: the kernel's own convention (syscall(2)); the call writes the timespec and nothing else.
    unsafe {
        core::arch::asm!(
            "svc 0",
            in("x8") libc::SYS_clock_gettime,
            inlateout("x0") clock as isize => _, in("x1") now,
            options(nostack),
        );
    }
}
