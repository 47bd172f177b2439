//! `posix_memalign` and `malloc` as stand-ins for CUDA calls.

use crate::{IS_BUSY, compare};
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use gputrace_ring::clock::Clock;

unsafe extern "C" {
    fn __libc_memalign(alignment: usize, size: usize) -> *mut c_void;
    fn __libc_malloc(size: usize) -> *mut c_void;
}

/// Nothing.
const OFF: u32 = 0;
/// Compare every capture with libgcc's.
const COMPARE: u32 = 1;
/// Time every capture.
const TIME: u32 = 2;
/// Flag: `malloc` too.
const MALLOC: u32 = 16;

static MODE: AtomicU32 = AtomicU32::new(OFF);
static WANT: AtomicU32 = AtomicU32::new(0);
/// `malloc` is sampled: one of so many calls.
static EVERY: AtomicU64 = AtomicU64::new(1);
static CALLS: AtomicU64 = AtomicU64::new(0);

/// Room for the durations of a timed run, in ticks.
const ROOM: usize = 1 << 20;
static TIMES: [AtomicU32; ROOM] = [const { AtomicU32::new(0) }; ROOM];
static N_TIMES: AtomicU64 = AtomicU64::new(0);
static FRAMES: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// Switches the hooks: 0 off, 1 compare, 2 time; +16 for `malloc` too, one of `every` calls.
#[unsafe(no_mangle)]
pub extern "C" fn harness_mode(mode: u32, want: u32, every: u64) {
    crate::harness_init();
    WANT.store(want, Ordering::Relaxed);
    EVERY.store(every.max(1), Ordering::Relaxed);
    MODE.store(mode, Ordering::Release);
}

/// Prints and forgets the durations: median, 99th percentile, mean, in nanoseconds.
#[unsafe(no_mangle)]
pub extern "C" fn harness_times() -> f64 {
    let ghz = ticks_per_nanosecond();
    let n = (N_TIMES.swap(0, Ordering::Relaxed) as usize).min(ROOM);
    let mut times: Vec<u32> = TIMES.iter().take(n).map(|time| time.load(Ordering::Relaxed)).collect();
    times.sort_unstable();
    let at = |share: f64| times.get((n as f64 * share) as usize).map_or(0.0, |time| f64::from(*time) / ghz);
    let mean = times.iter().map(|time| f64::from(*time)).sum::<f64>() / ghz / n.max(1) as f64;
    let [native, python] =
        FRAMES.each_ref().map(|sum| sum.swap(0, Ordering::Relaxed) as f64 / n.max(1) as f64);
    eprintln!(
        "{n} events, {native:.1} native and {python:.1} Python frames each: median {:.0} ns, p90 {:.0}, p99 {:.0}, p99.9 {:.0}, mean {mean:.0}",
        at(0.5),
        at(0.9),
        at(0.99),
        at(0.999)
    );
    at(0.5)
}

/// The processor's counter.
#[inline(always)]
fn ticks() -> u64 {
    Clock::Tsc.about_now().0
}

fn ticks_per_nanosecond() -> f64 {
    let clock = std::time::Instant::now();
    let start = ticks();
    std::thread::sleep(std::time::Duration::from_millis(50));
    let end = ticks();
    (end - start) as f64 / clock.elapsed().as_nanos() as f64
}

#[inline(always)]
fn event() {
    let mode = MODE.load(Ordering::Relaxed) & 15;
    if IS_BUSY.with(|busy| busy.replace(true)) {
        return;
    }
    match mode {
        COMPARE => compare::compare(),
        TIME => time(),
        _ => {}
    }
    IS_BUSY.with(|busy| busy.set(false));
}

#[inline(never)]
fn time() {
    let state = crate::harness_state();
    let before = ticks();
    // SAFETY: the calling thread's own state.
    let captured = unsafe { crate::stack::capture(state, WANT.load(Ordering::Relaxed)) };
    let after = ticks();
    let index = N_TIMES.fetch_add(1, Ordering::Relaxed) as usize;
    if let Some(slot) = TIMES.get(index) {
        slot.store((after - before) as u32, Ordering::Relaxed);
        FRAMES[0].fetch_add(u64::from(captured.n_native), Ordering::Relaxed);
        FRAMES[1].fetch_add(u64::from(captured.n_python), Ordering::Relaxed);
    }
}

/// The real function, with a capture.
///
/// # Safety
/// `posix_memalign(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(out: *mut *mut c_void, alignment: usize, size: usize) -> c_int {
    // SAFETY: any sizes.
    let block = unsafe { __libc_memalign(alignment, size) };
    if block.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: the caller's out pointer.
    unsafe { out.write(block) };
    if MODE.load(Ordering::Relaxed) != OFF {
        event();
    }
    0
}

/// The real function, with a capture now and then.
///
/// # Safety
/// `malloc(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc(size: usize) -> *mut c_void {
    let sampled = MODE.load(Ordering::Relaxed) & MALLOC != 0
        && CALLS.fetch_add(1, Ordering::Relaxed).is_multiple_of(EVERY.load(Ordering::Relaxed));
    if sampled {
        event();
    }
    // SAFETY: any size.
    unsafe { __libc_malloc(size) }
}
