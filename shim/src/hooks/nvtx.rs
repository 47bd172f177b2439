//! NVTX: what the program says of itself.
//!
//! Every library with NVTX in it (the header has the code) loads the library that `NVTX_INJECTION64_PATH` names, and
//! calls its `InitializeInjectionNvtx2`, which puts functions of its own into NVTX's tables (nvtxTypes.h of NVTX 3.1;
//! the numbers below are the same in all releases since 2). `gputrace record` names this library there, unless another
//! tool is named already.
//!
//! Marks come long before there is a session, which they do not begin: see [`crate::nvtx`].

use crate::lanes;
use crate::nvtx::{self, MOST_TEXT, Said, keep};
use crate::session::{self, Start};
use crate::tls;
use core::ffi::{c_char, c_int, c_void};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicU64, Ordering};
use gputrace_ring::record::MarkAction;

/// `NVTX_ETID_CALLBACKS`, nvtxTypes.h.
const CALLBACKS: u32 = 1;
/// `NVTX_CB_MODULE_CORE` and `NVTX_CB_MODULE_CORE2`.
const CORE: c_int = 1;
const CORE2: c_int = 5;
/// `NVTX_NO_PUSH_POP_TRACKING`, nvToolsExt.h: what a push answers where nobody counts.
const NOT_COUNTED: c_int = -2;

/// What [`InitializeInjectionNvtx2`] is given.
type GetExportTable = unsafe extern "C" fn(u32) -> *const c_void;
/// An array of pointers to variables that hold functions.
type FunctionTable = *const *mut *const c_void;

/// `NvtxExportTableCallbacks`.
#[repr(C)]
struct ExportTableCallbacks {
    struct_size: usize,
    get_module_function_table: Option<unsafe extern "C" fn(c_int, *mut FunctionTable, *mut u32) -> c_int>,
}

/// Which function of a module each of ours is: `NvtxCallbackIdCore` and `NvtxCallbackIdCore2`.
const CORE_FUNCTIONS: &[(usize, *const ())] = &[
    (1, mark_ex as *const ()),
    (2, mark_a as *const ()),
    (3, mark_w as *const ()),
    (4, range_start_ex as *const ()),
    (5, range_start_a as *const ()),
    (6, range_start_w as *const ()),
    (7, range_end as *const ()),
    (8, range_push_ex as *const ()),
    (9, range_push_a as *const ()),
    (10, range_push_w as *const ()),
    (11, range_pop as *const ()),
    (14, name_os_thread_a as *const ()),
    (15, name_os_thread_w as *const ()),
];
const CORE2_FUNCTIONS: &[(usize, *const ())] = &[
    (1, domain_mark_ex as *const ()),
    (2, domain_range_start_ex as *const ()),
    (3, domain_range_end as *const ()),
    (4, domain_range_push_ex as *const ()),
    (5, domain_range_pop as *const ()),
    (10, register_string_a as *const ()),
    (11, register_string_w as *const ()),
    (12, domain_create_a as *const ()),
    (13, domain_create_w as *const ()),
];

/// Called once by each library with NVTX in it. Answers whether we want to hear of marks.
///
/// # Safety
/// Called by NVTX only.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub(crate) unsafe extern "C" fn InitializeInjectionNvtx2(get_export_table: Option<GetExportTable>) -> c_int {
    let Some(get_export_table) = get_export_table else { return 0 };
    // SAFETY: NVTX's own function.
    let table = unsafe { get_export_table(CALLBACKS) }.cast::<ExportTableCallbacks>();
    if table.is_null() {
        return 0;
    }
    // SAFETY: NVTX's table begins with its size.
    if unsafe { (*table).struct_size } < size_of::<ExportTableCallbacks>() {
        return 0;
    }
    // SAFETY: the table is that large.
    let Some(get) = (unsafe { (*table).get_module_function_table }) else { return 0 };
    for (module, functions) in [(CORE, CORE_FUNCTIONS), (CORE2, CORE2_FUNCTIONS)] {
        let (mut slots, mut n_slots) = (core::ptr::null(), 0);
        // SAFETY: both out-parameters are ours.
        if unsafe { get(module, &raw mut slots, &raw mut n_slots) } == 0 || slots.is_null() {
            continue;
        }
        for (id, function) in functions.iter().filter(|(id, _)| *id < n_slots as usize) {
            // SAFETY: the array has `n_slots` entries.
            let slot = unsafe { *slots.add(*id) };
            if !slot.is_null() {
                // SAFETY: NVTX's variable for this function; it reads them only after we have returned.
                unsafe { *slot = function.cast() };
            }
        }
    }
    1
}

/// `nvtxEventAttributes_t`.
type Attributes = *const c_void;
/// `wchar_t` of Linux.
type Wide = u32;

unsafe extern "C" fn mark_ex(attributes: Attributes) {
    // SAFETY: NVTX's argument, for this and all functions below.
    happened(MarkAction::Mark, null_mut(), unsafe { Said::of(attributes) }, 0);
}
unsafe extern "C" fn mark_a(text: *const c_char) {
    // SAFETY: as above.
    happened(MarkAction::Mark, null_mut(), unsafe { Said::narrow(text) }, 0);
}
unsafe extern "C" fn mark_w(text: *const Wide) {
    // SAFETY: as above.
    happened(MarkAction::Mark, null_mut(), unsafe { Said::wide(text) }, 0);
}
unsafe extern "C" fn range_start_ex(attributes: Attributes) -> u64 {
    // SAFETY: as above.
    start(null_mut(), unsafe { Said::of(attributes) })
}
unsafe extern "C" fn range_start_a(text: *const c_char) -> u64 {
    // SAFETY: as above.
    start(null_mut(), unsafe { Said::narrow(text) })
}
unsafe extern "C" fn range_start_w(text: *const Wide) -> u64 {
    // SAFETY: as above.
    start(null_mut(), unsafe { Said::wide(text) })
}
extern "C" fn range_end(range: u64) {
    happened(MarkAction::End, null_mut(), Said::nothing(), range);
}
unsafe extern "C" fn range_push_ex(attributes: Attributes) -> c_int {
    // SAFETY: as above.
    push(null_mut(), unsafe { Said::of(attributes) })
}
unsafe extern "C" fn range_push_a(text: *const c_char) -> c_int {
    // SAFETY: as above.
    push(null_mut(), unsafe { Said::narrow(text) })
}
unsafe extern "C" fn range_push_w(text: *const Wide) -> c_int {
    // SAFETY: as above.
    push(null_mut(), unsafe { Said::wide(text) })
}
extern "C" fn range_pop() -> c_int {
    pop(null_mut())
}
unsafe extern "C" fn name_os_thread_a(thread: u32, text: *const c_char) {
    // SAFETY: as above.
    happened(MarkAction::NameThread, null_mut(), unsafe { Said::narrow(text) }, thread.into());
}
unsafe extern "C" fn name_os_thread_w(thread: u32, text: *const Wide) {
    // SAFETY: as above.
    happened(MarkAction::NameThread, null_mut(), unsafe { Said::wide(text) }, thread.into());
}
unsafe extern "C" fn domain_mark_ex(domain: *mut c_void, attributes: Attributes) {
    // SAFETY: as above.
    happened(MarkAction::Mark, domain, unsafe { Said::of(attributes) }, 0);
}
unsafe extern "C" fn domain_range_start_ex(domain: *mut c_void, attributes: Attributes) -> u64 {
    // SAFETY: as above.
    start(domain, unsafe { Said::of(attributes) })
}
extern "C" fn domain_range_end(domain: *mut c_void, range: u64) {
    happened(MarkAction::End, domain, Said::nothing(), range);
}
unsafe extern "C" fn domain_range_push_ex(domain: *mut c_void, attributes: Attributes) -> c_int {
    // SAFETY: as above.
    push(domain, unsafe { Said::of(attributes) })
}
extern "C" fn domain_range_pop(domain: *mut c_void) -> c_int {
    pop(domain)
}
unsafe extern "C" fn register_string_a(_domain: *mut c_void, text: *const c_char) -> *mut c_void {
    // SAFETY: as above.
    keep(unsafe { Said::narrow(text) }.text())
}
unsafe extern "C" fn register_string_w(_domain: *mut c_void, text: *const Wide) -> *mut c_void {
    // SAFETY: as above.
    keep(unsafe { Said::wide(text) }.text())
}
unsafe extern "C" fn domain_create_a(text: *const c_char) -> *mut c_void {
    // SAFETY: as above.
    keep(unsafe { Said::narrow(text) }.text())
}
unsafe extern "C" fn domain_create_w(text: *const Wide) -> *mut c_void {
    // SAFETY: as above.
    keep(unsafe { Said::wide(text) }.text())
}

/// Offsets and sizes in `nvtxEventAttributes_t`, nvToolsExt.h; the structure says itself how long it is.
const ATTRIBUTES_SIZE_AT: usize = 2;
const CATEGORY_AT: usize = 4;
const MESSAGE_TYPE_AT: usize = 32;
const MESSAGE_AT: usize = 40;

impl Said {
    /// # Safety
    /// Null, or a C string.
    unsafe fn narrow(text: *const c_char) -> Said {
        let mut said = Said::nothing();
        let mut at = text;
        while !at.is_null() {
            // SAFETY: not behind the end of the string.
            let byte = unsafe { *at } as u8;
            if byte == 0 || !said.add(byte) {
                break;
            }
            at = at.wrapping_add(1);
        }
        said
    }

    /// # Safety
    /// Null, or a string of wide characters.
    unsafe fn wide(text: *const Wide) -> Said {
        let mut said = Said::nothing();
        let mut at = text;
        while !at.is_null() {
            // SAFETY: not behind the end of the string; the program chose the alignment.
            let character = unsafe { at.read_unaligned() };
            let mut encoded = [0; 4];
            let character = char::from_u32(character).unwrap_or(char::REPLACEMENT_CHARACTER);
            let encoded = character.encode_utf8(&mut encoded).as_bytes();
            if character == '\0' || said.length + encoded.len() > MOST_TEXT {
                break;
            }
            encoded.iter().for_each(|byte| {
                said.add(*byte);
            });
            at = at.wrapping_add(1);
        }
        said
    }

    /// Reads no more than the structure says it has.
    ///
    /// # Safety
    /// Null, or an `nvtxEventAttributes_t`.
    unsafe fn of(attributes: Attributes) -> Said {
        if attributes.is_null() {
            return Said::nothing();
        }
        // SAFETY: version and size are always there.
        let size = usize::from(unsafe { read::<u16>(attributes, ATTRIBUTES_SIZE_AT) });
        let mut said = Said::nothing();
        if size >= MESSAGE_AT + size_of::<usize>() {
            // SAFETY: inside the structure.
            let kind = unsafe { read::<i32>(attributes, MESSAGE_TYPE_AT) };
            // SAFETY: inside the structure.
            let message = unsafe { read::<usize>(attributes, MESSAGE_AT) };
            // `nvtxMessageType_t`.
            said = match kind {
                // SAFETY: the type says what the message is.
                1 => unsafe { Said::narrow(message as *const c_char) },
                // SAFETY: as above.
                2 => unsafe { Said::wide(message as *const Wide) },
                3 => Said::registered(message as *mut c_void),
                _ => said,
            };
        }
        if size >= CATEGORY_AT + size_of::<u32>() {
            // SAFETY: inside the structure.
            said.category = unsafe { read(attributes, CATEGORY_AT) };
        }
        said
    }
}

/// # Safety
/// The structure has a field of this type there.
unsafe fn read<T: Copy>(structure: *const c_void, at: usize) -> T {
    // SAFETY: the caller's promise. The program chose the alignment.
    unsafe { structure.cast::<u8>().wrapping_add(at).cast::<T>().read_unaligned() }
}

static RANGES: AtomicU64 = AtomicU64::new(0);

fn start(domain: *mut c_void, said: Said) -> u64 {
    let range = RANGES.fetch_add(1, Ordering::Relaxed) + 1;
    happened(MarkAction::Start, domain, said, range);
    range
}

/// Answers the range's level, which we know of the default domain only.
fn push(domain: *mut c_void, said: Said) -> c_int {
    happened(MarkAction::Push, domain, said, 0);
    let levels = &tls::here().ranges;
    if !domain.is_null() {
        return NOT_COUNTED;
    }
    let level = levels.get();
    levels.set(level.saturating_add(1));
    c_int::try_from(level).unwrap_or(c_int::MAX)
}

fn pop(domain: *mut c_void) -> c_int {
    happened(MarkAction::Pop, domain, Said::nothing(), 0);
    let levels = &tls::here().ranges;
    if !domain.is_null() {
        return NOT_COUNTED;
    }
    let level = levels.get();
    levels.set(level.saturating_sub(1));
    // A negative number says that there was no range.
    c_int::try_from(level).unwrap_or(c_int::MAX) - 1
}

/// Records it, or keeps in mind which ranges are open for a session that may come.
fn happened(action: MarkAction, domain: *mut c_void, said: Said, range: u64) {
    match lanes::lane(Start::OnlyIfLive) {
        Some(mut lane) => {
            let (producer, rest) = lane.parts();
            nvtx::send(producer, &mut rest.texts, action, domain, &said, range);
        }
        None if session::may_come() => nvtx::wait(action, domain, &said, range),
        None => {}
    }
}
