//! The only clock: the processor's time-stamp counter where it is invariant, `CLOCK_MONOTONIC` elsewhere.
//!
//! A counter read costs 10 ns, `clock_gettime` 22 ns (measured, EPYC Zen 4 in a VM). The recorder turns ticks into
//! nanoseconds with the [`Calibration`] pairs it takes itself; counter and clock are the same on every core of a host.

use core::ffi::c_int;
use core::sync::atomic::{AtomicPtr, Ordering};

/// A moment in ticks of the ring's clock. Only ticks of one ring compare.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
#[repr(transparent)]
pub struct Ticks(pub u64);

/// What one tick is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Clock {
    /// Nanoseconds of `CLOCK_MONOTONIC`.
    Monotonic = 0,
    /// Cycles of an invariant time-stamp counter.
    Tsc = 1,
}

impl Clock {
    /// The best clock of this machine.
    #[must_use]
    pub fn of_this_machine() -> Clock {
        if tsc_is_invariant() { Clock::Tsc } else { Clock::Monotonic }
    }

    /// The clock with this number in a ring header; unknown numbers are read as [`Clock::Monotonic`].
    #[must_use]
    pub fn from_u32(raw: u32) -> Clock {
        if raw == Clock::Tsc as u32 { Clock::Tsc } else { Clock::Monotonic }
    }

    /// Now. Later than everything the calling thread did before.
    #[inline]
    #[must_use]
    pub fn now(self) -> Ticks {
        match self {
            Clock::Tsc => Ticks(tsc()),
            Clock::Monotonic => Ticks(nanos(libc::CLOCK_MONOTONIC)),
        }
    }
}

impl Clock {
    /// Now, or a little before: by a read that the processor may make earlier than what the calling thread did before. Costs half.
    #[inline]
    #[must_use]
    pub fn about_now(self) -> Ticks {
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: rdtsc is not privileged on Linux unless a process asked for PR_TSC_SIGSEGV itself.
            Clock::Tsc => Ticks(unsafe { core::arch::x86_64::_rdtsc() }),
            #[cfg(not(target_arch = "x86_64"))]
            Clock::Tsc => self.now(),
            Clock::Monotonic => self.now(),
        }
    }
}

/// The three clocks read together, to translate one into another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct Calibration {
    /// The ring's clock.
    pub ticks: Ticks,
    /// `CLOCK_MONOTONIC`, nanoseconds since boot without sleep.
    pub monotonic: u64,
    /// `CLOCK_REALTIME`, nanoseconds since 1970.
    pub realtime: u64,
}

impl Calibration {
    /// Reads the clocks, ticks in the middle: the closest of three readings, as the kernel may run something else in one.
    #[must_use]
    pub fn take(clock: Clock) -> Calibration {
        let mut best = Calibration::read(clock);
        for _ in 0..2 {
            let next = Calibration::read(clock);
            if next.0 < best.0 {
                best = next;
            }
        }
        best.1
    }

    /// One reading, and how many nanoseconds it took.
    fn read(clock: Clock) -> (u64, Calibration) {
        let before = nanos(libc::CLOCK_MONOTONIC);
        let ticks = clock.now();
        let realtime = nanos(libc::CLOCK_REALTIME);
        let width = nanos(libc::CLOCK_MONOTONIC).saturating_sub(before);
        (width, Calibration { ticks, monotonic: before + width / 3, realtime })
    }
}

/// What reads a POSIX clock: the prototype of `clock_gettime`.
pub type ReadClock = unsafe extern "C" fn(libc::clockid_t, *mut libc::timespec) -> c_int;

/// The kernel's own function for it, once somebody found it; null without one.
static READ_CLOCK: AtomicPtr<()> = AtomicPtr::new(core::ptr::null_mut());

/// From here on clocks are read by this function, which is quicker than a call of the kernel: that of the vDSO. The C
/// library's own is not asked, because programs have others stand in for it: libraries that fake the time, sanitizers.
pub fn read_clocks_with(function: ReadClock) {
    READ_CLOCK.store(function as *mut (), Ordering::Release);
}

/// Nanoseconds of a POSIX clock; 0 where the kernel refuses.
#[must_use]
pub fn nanos(clock: libc::clockid_t) -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let function = READ_CLOCK.load(Ordering::Acquire);
    if function.is_null() {
        ask_kernel(clock, &mut now);
    } else {
        // SAFETY: `read_clocks_with` stored a function of this type, which is of the vDSO and so never goes away.
        let function = unsafe { core::mem::transmute::<*mut (), ReadClock>(function) };
        // SAFETY: `now` is a timespec of ours; the function writes nothing else.
        unsafe { function(clock, &raw mut now) };
    }
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
fn ask_kernel(clock: libc::clockid_t, now: &mut libc::timespec) {
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

#[cfg(all(target_arch = "aarch64", not(miri)))]
fn ask_kernel(clock: libc::clockid_t, now: &mut libc::timespec) {
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

#[cfg(miri)]
fn ask_kernel(clock: libc::clockid_t, now: &mut libc::timespec) {
    // SAFETY: as above; Miri runs no instructions of a processor.
    unsafe { libc::clock_gettime(clock, now) };
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn tsc() -> u64 {
    // The fence keeps the read from moving before the lock that the allocator above us has just taken: two
    // threads' stamps then have the order of their critical sections.
    // SAFETY: every x86-64 processor has SSE2's lfence.
    unsafe { core::arch::x86_64::_mm_lfence() };
    // SAFETY: rdtsc is not privileged on Linux unless a process asked for PR_TSC_SIGSEGV itself.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(target_arch = "x86_64")]
fn tsc_is_invariant() -> bool {
    use core::arch::x86_64::__cpuid;
    // Intel SDM vol. 2A, CPUID: leaf 8000_0007H, EDX bit 8 is "Invariant TSC"; AMD APM vol. 3 agrees.
    __cpuid(0x8000_0000).eax >= 0x8000_0007 && __cpuid(0x8000_0007).edx & (1 << 8) != 0
}

#[cfg(target_arch = "aarch64")]
#[inline]
fn tsc() -> u64 {
    let ticks: u64;
    // SAFETY: Linux gives user space the virtual counter; isb orders the read as lfence does on x86.
    unsafe { core::arch::asm!("isb", "mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack)) };
    ticks
}

#[cfg(target_arch = "aarch64")]
fn tsc_is_invariant() -> bool {
    true // The generic timer's frequency is fixed (Arm ARM, D12).
}
