//! PyTorch's process groups: seen where they are told their name and description, and where they are asked for what works on
//! GPUs. What for: [`crate::nccl::process_groups`].
//!
//! The functions are exported by `libtorch_cpu.so` and called through its tables for functions of others (releases 2.1 to
//! 2.15; `ProcessGroup.hpp` of each, relocations of 2.11). Each may throw, so nothing of ours is left on the stack when it
//! runs: we write down what we need, and jump.

use super::autograd::real;
use crate::arch;
use crate::nccl::process_groups;
use crate::remembered;
use crate::session;
use crate::sys::KeepErrno;
use core::ffi::c_void;
use core::sync::atomic::AtomicUsize;

/// `c10::DeviceType::CUDA` (c10/core/DeviceType.h).
const CUDA: u8 = 1;

static REAL_SET_NAME: AtomicUsize = AtomicUsize::new(0);
static REAL_SET_NAME_BEFORE_CXX11: AtomicUsize = AtomicUsize::new(0);
static REAL_SET_DESCRIPTION: AtomicUsize = AtomicUsize::new(0);
static REAL_SET_DESCRIPTION_BEFORE_CXX11: AtomicUsize = AtomicUsize::new(0);
static REAL_GET_BACKEND: AtomicUsize = AtomicUsize::new(0);

/// To be called after objects were unloaded: forgets PyTorch's library if it went.
#[cold]
pub(crate) fn note_unloaded() {
    let all = [
        &REAL_SET_NAME,
        &REAL_SET_NAME_BEFORE_CXX11,
        &REAL_SET_DESCRIPTION,
        &REAL_SET_DESCRIPTION_BEFORE_CXX11,
        &REAL_GET_BACKEND,
    ];
    remembered::forget_if_gone(all.into_iter());
}

/// Writes a function that hands two of its arguments to `enter` and goes on in the function that this says.
macro_rules! stands_before {
    ($(#[$doc:meta])* $name:ident as $symbol:literal, $how:ident $enter:ident) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// Called by PyTorch only.
        #[unsafe(naked)]
        #[unsafe(export_name = $symbol)]
        pub(crate) unsafe extern "C" fn $name() {
            arch::jumps_after!($how $enter)
        }
    };
}

stands_before!(
    /// `void c10d::ProcessGroup::setGroupName(const std::string& name)`
    set_name as "_ZN4c10d12ProcessGroup12setGroupNameERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
    arguments enter_set_name
);
stands_before!(
    /// The same where `std::string` is that from before C++11 (PyTorch's packages up to 2.5).
    set_name_before_cxx11 as "_ZN4c10d12ProcessGroup12setGroupNameERKSs", arguments enter_set_name_before_cxx11
);
stands_before!(
    /// `void c10d::ProcessGroup::setGroupDesc(const std::string& name)`
    set_description as "_ZN4c10d12ProcessGroup12setGroupDescERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
    arguments enter_set_description
);
stands_before!(
    /// The same where `std::string` is that from before C++11.
    set_description_before_cxx11 as "_ZN4c10d12ProcessGroup12setGroupDescERKSs",
    arguments enter_set_description_before_cxx11
);
stands_before!(
    /// `c10::intrusive_ptr<Backend> c10d::ProcessGroup::getBackend(c10::DeviceType deviceType)`: the result is written where the
    /// caller says (Itanium C++ ABI 3.1.3).
    get_backend as "_ZN4c10d12ProcessGroup10getBackendEN3c1010DeviceTypeE",
    arguments_of_result enter_get_backend
);

/// Text of a `std::string` of libstdc++ since C++11: its address and length come first (bits/basic_string.h, GCC 5 to 15).
///
/// # Safety
/// `string` is one, and lives as long as the result is used.
unsafe fn text<'a>(string: *const c_void) -> &'a [u8] {
    // SAFETY: the caller's promise.
    let [address, bytes] = unsafe { *string.cast::<[usize; 2]>() };
    // SAFETY: as above.
    unsafe { slice(address, bytes) }
}

/// Text of a `std::string` of libstdc++ before C++11: an address, the length lies 24 bytes before it (`_Rep`,
/// bits/basic_string.h with `_GLIBCXX_USE_CXX11_ABI=0`).
///
/// # Safety
/// As for [`text`].
unsafe fn text_before_cxx11<'a>(string: *const c_void) -> &'a [u8] {
    const LENGTH_BEFORE: usize = 24;
    // SAFETY: the caller's promise.
    let address = unsafe { *string.cast::<usize>() };
    // SAFETY: as above.
    let bytes = unsafe { *((address - LENGTH_BEFORE) as *const usize) };
    // SAFETY: as above.
    unsafe { slice(address, bytes) }
}

/// # Safety
/// So many bytes are there, as long as the result is used.
unsafe fn slice<'a>(address: usize, bytes: usize) -> &'a [u8] {
    // SAFETY: the caller's promise; a string's address is never null.
    unsafe { core::slice::from_raw_parts(address as *const u8, bytes) }
}

macro_rules! enters {
    ($name:ident, $symbol:literal in $slot:ident, $tell:ident($text:ident)) => {
        extern "C" fn $name(group: usize, string: *const c_void) -> usize {
            let _errno = KeepErrno::new();
            if !session::is_over() {
                // SAFETY: PyTorch's own argument.
                process_groups::$tell(group, unsafe { $text(string) });
            }
            real(&$slot, &[$symbol])
        }
    };
}

enters!(
    enter_set_name,
    c"_ZN4c10d12ProcessGroup12setGroupNameERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE" in REAL_SET_NAME,
    named(text)
);
enters!(
    enter_set_name_before_cxx11,
    c"_ZN4c10d12ProcessGroup12setGroupNameERKSs" in REAL_SET_NAME_BEFORE_CXX11,
    named(text_before_cxx11)
);
enters!(
    enter_set_description,
    c"_ZN4c10d12ProcessGroup12setGroupDescERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE" in REAL_SET_DESCRIPTION,
    described(text)
);
enters!(
    enter_set_description_before_cxx11,
    c"_ZN4c10d12ProcessGroup12setGroupDescERKSs" in REAL_SET_DESCRIPTION_BEFORE_CXX11,
    described(text_before_cxx11)
);

extern "C" fn enter_get_backend(group: usize, device_type: u8) -> usize {
    if device_type == CUDA {
        process_groups::asked(group);
    }
    real(&REAL_GET_BACKEND, &[c"_ZN4c10d12ProcessGroup10getBackendEN3c1010DeviceTypeE"])
}
