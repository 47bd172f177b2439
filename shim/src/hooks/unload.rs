//! `dlclose`: another object may come to the addresses of one that goes, so that what was learnt of its code is wrong.
//!
//! Not seen: objects that the C library unloads for itself (name services, character sets). Rules of their code stay, which
//! matters only if another object's code comes to the same addresses; then a stack may be cut, or one frame of it wrong.

use crate::callsite;
use crate::closers::{Closer, Mark};
use crate::elf;
use crate::sys::KeepErrno;
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

static REAL: AtomicUsize = AtomicUsize::new(0);
static UNLOADED: AtomicU64 = AtomicU64::new(0);

type Dlclose = unsafe extern "C" fn(*mut c_void) -> c_int;

/// `int dlclose(void *handle)`, dlfcn.h.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dlclose(handle: *mut c_void) -> c_int {
    let Some(real) = real() else { return -1 };
    let mark = Mark::new();
    // What other threads read of objects, they have read before any can go.
    let closer = Closer::begin(&mark);
    // SAFETY: the program's own argument.
    let result = unsafe { real(handle) };
    let _errno = KeepErrno::new();
    // Most handles are closed while others keep the object.
    let unloaded = elf::n_unloaded();
    if UNLOADED.swap(unloaded, Ordering::Relaxed) != unloaded {
        // Each remembers addresses of libraries.
        callsite::note_unloaded();
        super::loader::note_unloaded();
        super::torch::note_unloaded();
        super::autograd::note_unloaded();
        super::process_groups::note_unloaded();
        super::nccl_loader::note_unloaded();
        crate::pjrt::note_unloaded();
        super::nvshmem::note_unloaded();
    }
    closer.end();
    result
}

/// The `dlclose` that the program would have without us. Whoever calls us was linked against one.
fn real() -> Option<Dlclose> {
    let mut address = REAL.load(Ordering::Relaxed);
    if address == 0 {
        let _errno = KeepErrno::new();
        address = elf::function_behind_us(c"dlclose");
        REAL.store(address, Ordering::Relaxed);
    }
    // SAFETY: a function of this name has this type.
    (address != 0).then(|| unsafe { core::mem::transmute::<usize, Dlclose>(address) })
}
