//! NVTX: what the program says of itself.
//!
//! Every library with NVTX in it (the header has the code) loads the library that `NVTX_INJECTION64_PATH` names, and
//! calls its `InitializeInjectionNvtx2`, which puts functions of its own into NVTX's tables (nvtxTypes.h of NVTX 3.1;
//! the numbers below are the same in all releases since 2). `gputrace record` names this library there, unless another
//! tool is named already.
//!
//! Marks come long before there is a session, which they do not begin: ranges that are open when it begins wait in
//! [`WAITING`], and each thread sends its own with its first event.

use crate::kernel;
use crate::session::{self, Lane, Start};
use crate::sys::{self, KeepErrno};
use crate::tls;
use core::ffi::{c_char, c_int, c_void};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use gputrace_ring::record::{Mark, MarkAction, TextDef};
use gputrace_ring::ring::Pushed;

/// `NVTX_ETID_CALLBACKS`, nvtxTypes.h.
const CALLBACKS: u32 = 1;
/// `NVTX_CB_MODULE_CORE` and `NVTX_CB_MODULE_CORE2`.
const CORE: c_int = 1;
const CORE2: c_int = 5;
/// `NVTX_NO_PUSH_POP_TRACKING`, nvToolsExt.h: what a push answers where nobody counts.
const NOT_COUNTED: c_int = -2;
/// More of a text is cut.
const MOST_TEXT: usize = 240;

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

/// What a mark says.
struct Said {
    bytes: [u8; MOST_TEXT],
    length: usize,
    category: u32,
}

/// Offsets and sizes in `nvtxEventAttributes_t`, nvToolsExt.h; the structure says itself how long it is.
const ATTRIBUTES_SIZE_AT: usize = 2;
const CATEGORY_AT: usize = 4;
const MESSAGE_TYPE_AT: usize = 32;
const MESSAGE_AT: usize = 40;

impl Said {
    const fn nothing() -> Said {
        Said { bytes: [0; MOST_TEXT], length: 0, category: 0 }
    }

    fn text(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }

    fn add(&mut self, byte: u8) -> bool {
        match self.bytes.get_mut(self.length) {
            Some(slot) => {
                *slot = byte;
                self.length += 1;
                true
            }
            None => false,
        }
    }

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

    fn registered(handle: *mut c_void) -> Said {
        let mut said = Said::nothing();
        for byte in kept(handle) {
            said.add(*byte);
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

/// Names of domains and registered strings, for as long as the process lives: NVTX never takes a string back.
/// A handle is the address of a text's length, which stands before its bytes.
static SHELVES: [AtomicPtr<u8>; N_SHELVES] = [const { AtomicPtr::new(null_mut()) }; N_SHELVES];
static SHELVED: AtomicUsize = AtomicUsize::new(0);
const N_SHELVES: usize = 32;
const SHELF_BYTES: usize = 64 << 10;
const LENGTH_BYTES: usize = size_of::<usize>();

/// Keeps a text; null if there is no more room.
#[cold]
fn keep(text: &[u8]) -> *mut c_void {
    let _errno = KeepErrno::new();
    let bytes = LENGTH_BYTES + text.len().next_multiple_of(LENGTH_BYTES);
    let mut at = SHELVED.load(Ordering::Relaxed);
    let place = loop {
        // A text lies on one shelf.
        let free = SHELF_BYTES - at % SHELF_BYTES;
        let place = if free < bytes { at + free } else { at };
        match SHELVED.compare_exchange_weak(at, place + bytes, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => break place,
            Err(now) => at = now,
        }
    };
    let Some(shelf) = SHELVES.get(place / SHELF_BYTES) else { return null_mut() };
    let mut start = shelf.load(Ordering::Acquire);
    if start.is_null() {
        let fresh = sys::pages(SHELF_BYTES);
        if fresh.is_null() {
            return null_mut();
        }
        start = match shelf.compare_exchange(null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => fresh,
            Err(theirs) => {
                // SAFETY: nobody has seen this mapping.
                unsafe { kernel::unmap(fresh, SHELF_BYTES) };
                theirs
            }
        };
    }
    let entry = start.wrapping_add(place % SHELF_BYTES);
    // SAFETY: the place was taken by us alone, and ends before its shelf does.
    unsafe { entry.cast::<usize>().write(text.len()) };
    // SAFETY: as above.
    unsafe { core::ptr::copy_nonoverlapping(text.as_ptr(), entry.wrapping_add(LENGTH_BYTES), text.len()) };
    entry.cast()
}

/// The text behind a handle; empty for what is none of ours.
fn kept(handle: *mut c_void) -> &'static [u8] {
    let address = handle as usize;
    for shelf in &SHELVES {
        let start = shelf.load(Ordering::Acquire) as usize;
        if start == 0 {
            return &[];
        }
        let offset = address.wrapping_sub(start);
        if offset >= SHELF_BYTES || !offset.is_multiple_of(LENGTH_BYTES) {
            continue;
        }
        // SAFETY: on the shelf, and aligned.
        let length = unsafe { *handle.cast::<usize>() };
        if length > MOST_TEXT || offset + LENGTH_BYTES + length > SHELF_BYTES {
            return &[];
        }
        let bytes = (address + LENGTH_BYTES) as *const u8;
        // SAFETY: on the shelf, which stays; a text is written before its handle is known.
        return unsafe { core::slice::from_raw_parts(bytes, length) };
    }
    &[]
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
    match session::lane(Start::OnlyIfLive) {
        Some(mut lane) => send(&mut lane, action, domain, &said, range),
        None if session::may_come() => wait(action, domain, &said, range),
        None => {}
    }
}

fn send(lane: &mut Lane, action: MarkAction, domain: *mut c_void, said: &Said, range: u64) {
    let (text, domain) = (text_id(lane, said.text()), text_id(lane, kept(domain)));
    let at = session::now();
    let mark = Mark { action: action as u32, category: said.category, text, domain, range };
    lane.producer().push(at, 0, &mark);
}

/// Sends the text, unless the thread has just done so; 0 for none.
fn text_id(lane: &mut Lane, text: &[u8]) -> u64 {
    if text.is_empty() {
        return 0;
    }
    // FNV-1a; 0 is "no text".
    let hash = text.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let id = hash.max(1);
    let (producer, rest) = lane.parts();
    if !rest.texts.has(id) {
        let at = producer.now();
        let definition = TextDef { id, length: text.len() as u64 };
        if producer.push_with(at, 0, &definition, &[text]) == Pushed::Yes {
            rest.texts.add(id);
        }
    }
    id
}

/// Ranges that were opened before there was a session. More than these are forgotten.
static WAITING: [Waiting; 64] = [const { Waiting::new() }; 64];
/// Numbers them in the order in which they were opened.
static N_WAITED: AtomicU64 = AtomicU64::new(0);
/// How many there are: mostly none.
static N_WAITING: AtomicU32 = AtomicU32::new(0);

/// Nobody's.
const FREE: u32 = 0;
/// Being written, or read for the last time.
const TAKEN: u32 = 1;
/// Open.
const OPEN: u32 = 2;

/// One of them; only its thread reads and ends a pushed one.
struct Waiting {
    state: AtomicU32,
    thread: AtomicU32,
    action: AtomicU32,
    category: AtomicU32,
    order: AtomicU64,
    range: AtomicU64,
    domain: AtomicPtr<c_void>,
    length: AtomicUsize,
    text: [AtomicU64; MOST_TEXT / 8],
}

impl Waiting {
    const fn new() -> Waiting {
        Waiting {
            state: AtomicU32::new(FREE),
            thread: AtomicU32::new(0),
            action: AtomicU32::new(0),
            category: AtomicU32::new(0),
            order: AtomicU64::new(0),
            range: AtomicU64::new(0),
            domain: AtomicPtr::new(null_mut()),
            length: AtomicUsize::new(0),
            text: [const { AtomicU64::new(0) }; MOST_TEXT / 8],
        }
    }

    fn is_open(&self) -> bool {
        self.state.load(Ordering::Acquire) == OPEN
    }

    /// Whether we may end it, once.
    fn take(&self) -> bool {
        self.state.compare_exchange(OPEN, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    fn free(&self) {
        N_WAITING.fetch_sub(1, Ordering::Relaxed);
        self.state.store(FREE, Ordering::Release);
    }

    fn is_push_of(&self, thread: u32) -> bool {
        self.is_open()
            && self.action.load(Ordering::Relaxed) == MarkAction::Push as u32
            && self.thread.load(Ordering::Relaxed) == thread
    }

    fn is_start(&self) -> bool {
        self.is_open() && self.action.load(Ordering::Relaxed) == MarkAction::Start as u32
    }

    fn said(&self) -> Said {
        let mut said = Said::nothing();
        said.category = self.category.load(Ordering::Relaxed);
        let bytes = self.text.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes());
        for byte in bytes.take(self.length.load(Ordering::Relaxed)) {
            said.add(byte);
        }
        said
    }
}

#[cold]
fn wait(action: MarkAction, domain: *mut c_void, said: &Said, range: u64) {
    let thread = kernel::thread_id();
    match action {
        MarkAction::Push | MarkAction::Start => open(action, domain, said, range, thread),
        MarkAction::Pop => {
            let is_of_domain = |slot: &&Waiting| slot.domain.load(Ordering::Relaxed) == domain;
            let mine = WAITING.iter().filter(|slot| slot.is_push_of(thread)).filter(is_of_domain);
            close(mine.max_by_key(|slot| slot.order.load(Ordering::Relaxed)));
        }
        MarkAction::End => {
            let is_it = |slot: &&Waiting| slot.is_start() && slot.range.load(Ordering::Relaxed) == range;
            close(WAITING.iter().find(is_it));
        }
        MarkAction::Mark | MarkAction::NameThread => {}
    }
}

fn open(action: MarkAction, domain: *mut c_void, said: &Said, range: u64, thread: u32) {
    let free = |slot: &&Waiting| {
        slot.state.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
    };
    let Some(slot) = WAITING.iter().find(free) else { return };
    N_WAITING.fetch_add(1, Ordering::Relaxed);
    slot.thread.store(thread, Ordering::Relaxed);
    slot.action.store(action as u32, Ordering::Relaxed);
    slot.category.store(said.category, Ordering::Relaxed);
    slot.order.store(N_WAITED.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
    slot.range.store(range, Ordering::Relaxed);
    slot.domain.store(domain, Ordering::Relaxed);
    slot.length.store(said.length, Ordering::Relaxed);
    for (word, bytes) in slot.text.iter().zip(said.bytes.chunks_exact(8)) {
        word.store(u64::from_ne_bytes(bytes.try_into().unwrap_or_default()), Ordering::Relaxed);
    }
    slot.state.store(OPEN, Ordering::Release);
}

fn close(slot: Option<&Waiting>) {
    if let Some(slot) = slot.filter(|slot| slot.take()) {
        slot.free();
    }
}

/// Sends the ranges that a thread opened before its first event, and those of the process.
#[cold]
pub(crate) fn catch_up(lane: &mut Lane) {
    if N_WAITING.load(Ordering::Relaxed) == 0 {
        return;
    }
    let thread = kernel::thread_id();
    let is_due = |slot: &&Waiting| slot.is_push_of(thread) || slot.is_start();
    while let Some(slot) = WAITING.iter().filter(is_due).min_by_key(|slot| slot.order.load(Ordering::Relaxed))
    {
        if !slot.take() {
            continue;
        }
        let is_push = slot.action.load(Ordering::Relaxed) == MarkAction::Push as u32;
        let action = if is_push { MarkAction::Push } else { MarkAction::Start };
        let (domain, range) = (slot.domain.load(Ordering::Relaxed), slot.range.load(Ordering::Relaxed));
        send(lane, action, domain, &slot.said(), range);
        slot.free();
    }
}
