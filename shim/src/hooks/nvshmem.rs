//! NVSHMEM's symmetric heap: what a program gets of it and gives back. What the heap itself takes of the device passes by the
//! driver's rows.
//!
//! Exported C functions of `libnvshmem_host.so` (host/nvshmem_api.h; the same in releases 2.0 to 3.8). One row a function; all
//! processing elements call them together, so they are rare and slow.

use crate::callsite;
use crate::elf;
use crate::lanes;
use crate::probe;
use crate::remembered;
use crate::session::{self, Start};
use crate::sys::KeepErrno;
use crate::tls;
use core::ffi::{CStr, c_void};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicUsize, Ordering};
use gputrace_ring::record::{Action, Call, Kind};
use gputrace_ring::ring::Producer;

/// The numbers of these functions in records: far above those of the other tables.
const FIRST_API: u16 = 3072;
/// `CUDA_ERROR_OUT_OF_MEMORY`: NVSHMEM says no more than that it has none.
const OUT_OF_MEMORY: i32 = 2;

/// Writes the exported functions and their table. `gives BYTES` are those whose result is memory, `takes ADDRESS` the others.
macro_rules! rows {
    ($( $(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*) $(-> $out:ty)? = $shape:ident ($($value:expr),*); )*) => {
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy)]
        enum Row { $( $name, )* }

        const NAMES: &[&CStr] = &[ $(
            // SAFETY: the literal ends with its only zero.
            unsafe { CStr::from_bytes_with_nul_unchecked(concat!(stringify!($name), "\0").as_bytes()) },
        )* ];

        static REALS: [AtomicUsize; NAMES.len()] = [const { AtomicUsize::new(0) }; NAMES.len()];

        fn ours() -> [*const (); NAMES.len()] {
            [ $( $name as *const () ),* ]
        }

        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// As NVSHMEM's.
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name($($arg: $type),*) $(-> $out)? {
                type Real = unsafe extern "C" fn($($type),*) $(-> $out)?;
                // SAFETY: the row gives the function's own prototype.
                let real = unsafe { real::<Real>(Row::$name) };
                // SAFETY: the program's own arguments.
                $shape(Row::$name, $($value,)* || real.map(|real| unsafe { real($($arg),*) }))
            }
        )*
    };
}

rows! {
    /// `void *nvshmem_malloc(size_t size)`
    fn nvshmem_malloc(size: usize) -> *mut c_void = gives(size);
    /// `void *nvshmem_calloc(size_t count, size_t size)`
    fn nvshmem_calloc(count: usize, size: usize) -> *mut c_void = gives(count.saturating_mul(size));
    /// `void *nvshmem_align(size_t alignment, size_t size)`
    fn nvshmem_align(alignment: usize, size: usize) -> *mut c_void = gives(size);
    /// `void nvshmem_free(void *ptr)`
    fn nvshmem_free(ptr: *mut c_void) = takes(ptr as u64);
}

fn gives(row: Row, bytes: usize, run: impl FnOnce() -> Option<*mut c_void>) -> *mut c_void {
    let begin = session::now();
    let address = run().unwrap_or(null_mut());
    // Nothing was asked for, and nothing was given.
    if bytes != 0 {
        let _errno = KeepErrno::new();
        let result = if address.is_null() { OUT_OF_MEMORY } else { 0 };
        let call = Call { action: Action::HeapAlloc as u8, bytes: bytes as u64, result, ..Call::default() };
        tell(row, Call { addr: address as u64, ..call }, Some(begin.0));
    }
    address
}

/// Recorded before: another thread may be given the same address at once.
fn takes(row: Row, address: u64, run: impl FnOnce() -> Option<()>) {
    if address != 0 {
        let _errno = KeepErrno::new();
        tell(row, Call { action: Action::HeapFree as u8, addr: address, ..Call::default() }, None);
    }
    let _ = run();
}

#[cold]
fn tell(row: Row, mut call: Call, begin: Option<u64>) {
    let Some(mut lane) = lanes::lane(Start::OnlyIfLive) else { return };
    call.api = FIRST_API + row as u16;
    call.device = probe::current_device();
    if tls::here().capturing.get() != 0 {
        call.flags |= Call::CAPTURED;
    }
    call.stack = callsite::capture(&mut lane, callsite::Of::DriverCall);
    let at = session::now();
    call.duration = begin.map_or(0, |begin| u32::try_from(at.0.saturating_sub(begin)).unwrap_or(u32::MAX));
    lane.producer().push_call(at, &call);
}

/// NVSHMEM's own function of a row.
///
/// # Safety
/// `F` is the type of a pointer to that function.
unsafe fn real<F: Copy>(row: Row) -> Option<F> {
    let slot = REALS.get(row as usize)?;
    let mut address = slot.load(Ordering::Acquire);
    if address == 0 {
        let _errno = KeepErrno::new();
        address = elf::function_behind_us(NAMES.get(row as usize)?);
        slot.store(address, Ordering::Release);
    }
    // SAFETY: a function pointer is as large as an address; the caller knows its type.
    (address != 0).then(|| unsafe { core::mem::transmute_copy(&address) })
}

/// What a program gets instead of what `dlsym` would answer.
pub(crate) enum Answer {
    /// Our function.
    Ours(*const ()),
    /// Nothing: only we have a function of that name.
    Absent,
}

/// What `dlsym` shall answer for one of these names, where it would answer `found`; `None` leaves it as it is.
#[cold]
pub(crate) fn ours_for(name: &[u8], found: usize, caller: usize) -> Option<Answer> {
    let _errno = KeepErrno::new();
    let row = NAMES.iter().position(|known| known.to_bytes() == name)?;
    let library = elf::by_address(found)?;
    let behind = elf::function_behind_us(NAMES.get(row)?);
    if library.is_ours() {
        // Our export was found in the program's global scope: it counts only if a library has the real one.
        return (behind == 0).then_some(Answer::Absent);
    }
    // NVSHMEM's own look-ups are its own business, and of two copies of it the second is left alone: ours leads to the first.
    if library.contains(caller) || behind != found {
        return None;
    }
    ours().get(row).map(|ours| Answer::Ours(*ours))
}

/// To be called after objects were unloaded: forgets NVSHMEM if it went.
#[cold]
pub(crate) fn note_unloaded() {
    remembered::forget_if_gone(REALS.iter());
}

/// Says in the trace which function has which number.
pub(crate) fn describe(producer: &mut Producer) {
    let at = producer.now();
    for (name, number) in NAMES.iter().zip(u64::from(FIRST_API)..) {
        producer.push_raw(at, Kind::Api, &[&number.to_ne_bytes(), name.to_bytes(), b"\0"]);
    }
}
