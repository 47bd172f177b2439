//! PJRT's tables of functions, as many as a process has plugins: what the real ones are, how they are called from here,
//! and what is remembered of what they handed out.
//!
//! A table (`PJRT_Api`, xla/pjrt/c/pjrt_c_api.h) begins with its size and its version, and grows at its end only: a
//! function has the same place in every release (held against five of them in `tests/pjrt.rs`). Each function has one
//! argument, a structure that begins with its own size, and answers an error that its caller must destroy.

use crate::elf::{self, Object};
use crate::sys;
use crate::{asked, kernel};
use core::ffi::{c_int, c_void};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Plugins of one process that are told apart.
pub(crate) const BANKS: usize = 4;
/// Words of a table that are copied: twice what any release has (0.116: 143).
const WORDS: usize = 256;
/// The copy that programs get, and behind it the table as it was.
const PAGE: usize = 2 * WORDS * WORD;
const WORD: usize = size_of::<usize>();
/// Where the version is, and of which the functions are known.
const MAJOR_MINOR: usize = 4;
const OLDEST_MINOR: u32 = 40;
/// Its table was arranged otherwise, which 0.57 took back (CHANGELOG.md beside the header).
const REARRANGED_MINOR: u32 = 56;

/// Places of functions in the table, in words.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Place {
    ErrorDestroy = 5,
    ErrorMessage = 6,
    ErrorGetCode = 7,
    ClientCreate = 15,
    ClientDestroy = 16,
    ClientPlatformName = 17,
    ClientCompile = 25,
    ClientBufferFromHostBuffer = 27,
    DeviceLocalHardwareId = 36,
    MemoryKind = 41,
    MemoryAddressableByDevices = 44,
    ExecutableDestroy = 45,
    ExecutableName = 46,
    ExecutableNumOutputs = 49,
    LoadedExecutableDestroy = 55,
    LoadedExecutableGetExecutable = 56,
    LoadedExecutableExecute = 60,
    ExecutableDeserializeAndLoad = 61,
    BufferDestroy = 63,
    BufferOnDeviceSizeInBytes = 69,
    BufferMemory = 71,
    BufferDelete = 72,
    BufferIsDeleted = 73,
    BufferCopyToDevice = 74,
    BufferCopyToMemory = 97,
    ClientCreateViewOfDeviceBuffer = 98,
    ExecutableGetCompiledMemoryStats = 101,
    TransferManagerRetrieveBuffer = 109,
    ClientCreateUninitializedBuffer = 117,
    BufferDonateWithControlDependency = 130,
}

/// Without these nothing can be said of buffers.
const NEEDED: usize = Place::BufferCopyToDevice as usize + 1;

/// A function of the table.
pub(crate) type Function = unsafe extern "C" fn(*mut usize) -> *mut c_void;
/// `GetPjrtApi`.
pub(crate) type GetApi = unsafe extern "C" fn() -> *const usize;

/// Nothing was copied yet; somebody is copying; done; it is not of a kind that is known.
const EMPTY: u32 = 0;
const COPYING: u32 = 1;
const READY: u32 = 2;
const FOREIGN: u32 = 3;

/// Why a table is handed on as it is.
#[derive(Clone, Copy)]
enum Why {
    Odd,
    Small,
    Large,
    Version,
    NoMemory,
}

const REASONS: [&[u8]; 5] = [
    b"the plugin's table is not aligned",
    b"the plugin's table is smaller than any known one",
    b"the plugin's table is larger than any known one",
    b"the plugin's version is not 0.40 or later (and 0.56 is not known)",
    b"there is no memory for a copy of the plugin's table",
];

/// One plugin.
struct Bank {
    get: AtomicUsize,
    start: AtomicUsize,
    state: AtomicU32,
    api: AtomicUsize,
    copy: AtomicPtr<usize>,
    n_words: AtomicUsize,
    minor: AtomicU32,
    /// Why it is [`FOREIGN`].
    why: AtomicU32,
    /// Its clients use GPUs.
    is_gpu: AtomicBool,
}

static ALL: [Bank; BANKS] = [const {
    Bank {
        get: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        state: AtomicU32::new(EMPTY),
        api: AtomicUsize::new(0),
        copy: AtomicPtr::new(null_mut()),
        n_words: AtomicUsize::new(0),
        minor: AtomicU32::new(0),
        why: AtomicU32::new(0),
        is_gpu: AtomicBool::new(false),
    }
}; BANKS];

/// The bank of a plugin, by its `GetPjrtApi`; `None` where there are more than [`BANKS`].
pub(crate) fn bank_of(get: usize, library: &Object) -> Option<usize> {
    let is_its = |bank: &Bank| {
        bank.get.load(Ordering::Acquire) == get
            || bank.get.compare_exchange(0, get, Ordering::AcqRel, Ordering::Acquire).is_ok()
    };
    let found = ALL.iter().position(|bank| bank.get.load(Ordering::Acquire) == get);
    let found = found.or_else(|| ALL.iter().position(is_its))?;
    ALL.get(found)?.start.store(library.start(), Ordering::Release);
    Some(found)
}

/// What `GetPjrtApi` of the bank's plugin answers, and what the program shall get for it.
pub(crate) enum Table {
    /// It was looked at just now: a copy in which functions are ours, or as it is.
    New(*const usize),
    /// What was handed out before.
    Known(*const usize),
}

/// Asks the plugin, and copies its table unless that was done; `ours` are the functions to put into it.
pub(crate) fn table(bank: usize, ours: &[(Place, Function)]) -> Option<Table> {
    let bank = ALL.get(bank)?;
    let get = bank.get.load(Ordering::Acquire);
    if get == 0 {
        return None;
    }
    // SAFETY: a plugin's `GetPjrtApi` has this type; the program is calling it.
    let get = unsafe { core::mem::transmute::<usize, GetApi>(get) };
    // SAFETY: as above.
    let api = unsafe { get() };
    if api.is_null() {
        return Some(Table::Known(api));
    }
    // Another thread needs microseconds.
    for _ in 0..1000 {
        match bank.state.load(Ordering::Acquire) {
            READY if bank.api.load(Ordering::Acquire) == api as usize => {
                return Some(Table::Known(bank.copy.load(Ordering::Acquire)));
            }
            // Of several tables of one plugin the first is seen.
            READY | FOREIGN => return Some(Table::Known(api)),
            EMPTY => {
                let claim = bank.state.compare_exchange(EMPTY, COPYING, Ordering::AcqRel, Ordering::Acquire);
                if claim.is_ok() {
                    break;
                }
            }
            _ => kernel::sleep(100_000),
        }
    }
    if bank.state.load(Ordering::Acquire) != COPYING {
        return Some(Table::Known(api));
    }
    Some(match copy(bank, api, ours) {
        Ok(copy) => {
            bank.state.store(READY, Ordering::Release);
            Table::New(copy)
        }
        Err(why) => {
            bank.why.store(why as u32, Ordering::Release);
            bank.state.store(FOREIGN, Ordering::Release);
            Table::New(api)
        }
    })
}

fn copy(bank: &Bank, api: *const usize, ours: &[(Place, Function)]) -> Result<*const usize, Why> {
    if !(api as usize).is_multiple_of(WORD) {
        return Err(Why::Odd);
    }
    let readable = words_there(api);
    // SAFETY: on a page that can be read.
    let bytes = if readable == 0 { 0 } else { unsafe { *api } };
    let n_words = bytes / WORD;
    if n_words > WORDS {
        return Err(Why::Large);
    }
    if n_words < NEEDED || readable < n_words {
        return Err(Why::Small);
    }
    // SAFETY: inside the table.
    let version = unsafe { *api.wrapping_add(MAJOR_MINOR) };
    let (major, minor) = (version as u32, (version as u64 >> 32) as u32);
    if major != 0 || minor < OLDEST_MINOR || minor == REARRANGED_MINOR {
        return Err(Why::Version);
    }
    let mut page = bank.copy.load(Ordering::Acquire);
    if page.is_null() {
        page = sys::pages(PAGE).cast();
        if page.is_null() {
            return Err(Why::NoMemory);
        }
    } else {
        protect(page, libc::PROT_READ | libc::PROT_WRITE);
    }
    // Releases before 0.57 say that their table is smaller than it is, and programs know that: what lies behind its end is
    // copied too, and never used for anything else.
    for at in 0..WORDS {
        // SAFETY: on pages that can be read.
        let word = if at < readable { unsafe { *api.wrapping_add(at) } } else { 0 };
        // SAFETY: inside the page.
        unsafe { *page.wrapping_add(at) = word };
        // SAFETY: inside the page.
        unsafe { *page.wrapping_add(WORDS + at) = word };
    }
    for (place, function) in ours {
        let at = *place as usize;
        // SAFETY: inside the page; places are less than `WORDS`.
        let slot = unsafe { &mut *page.wrapping_add(at) };
        if at < n_words && *slot != 0 {
            *slot = *function as usize;
        }
    }
    // A table of functions that can be written to is what attackers look for.
    protect(page, libc::PROT_READ);
    bank.n_words.store(n_words, Ordering::Release);
    bank.minor.store(minor, Ordering::Release);
    bank.api.store(api as usize, Ordering::Release);
    bank.copy.store(page, Ordering::Release);
    Ok(page)
}

/// Words from here on that can be read, at most [`WORDS`].
fn words_there(api: *const usize) -> usize {
    let start = api as usize;
    for at in 0..WORDS {
        let address = start + at * WORD;
        if (at == 0 || address.is_multiple_of(4096)) && !asked::can_read(address) {
            return at;
        }
    }
    WORDS
}

fn protect(page: *mut usize, how: c_int) {
    // SAFETY: the page is ours.
    let _ = unsafe { kernel::call(libc::SYS_mprotect, [page as usize, PAGE, how as usize, 0, 0, 0]) };
}

/// The plugin's own function.
pub(crate) fn real(bank: usize, place: Place) -> Option<Function> {
    let bank = ALL.get(bank)?;
    let (page, at) = (bank.copy.load(Ordering::Acquire), place as usize);
    // What follows a table that says that it ends here is a function of it all the same from 0.40 to 0.56.
    let known_behind = place == Place::ExecutableGetCompiledMemoryStats;
    if page.is_null() || (at >= bank.n_words.load(Ordering::Acquire) && !known_behind) {
        return None;
    }
    // SAFETY: inside the page.
    let address = unsafe { *page.wrapping_add(WORDS + at) };
    // SAFETY: every function of the table has this type.
    (address != 0).then(|| unsafe { core::mem::transmute::<usize, Function>(address) })
}

/// What we ask a plugin: as large as no release's structures are, so that none finds it too small.
pub(crate) struct Question([usize; 40]);

impl Question {
    /// About this object.
    pub(crate) fn about(object: usize) -> Question {
        let mut words = [0; 40];
        let [size, _, first, ..] = &mut words;
        (*size, *first) = (size_of::<Question>(), object);
        Question(words)
    }

    /// False where the plugin has no answer.
    pub(crate) fn ask(&mut self, bank: usize, place: Place) -> bool {
        let Some(function) = real(bank, place) else { return false };
        // SAFETY: a function of the table, whose argument is a structure of which ours begins with the fields that it reads,
        // and which is larger than any that it writes.
        let error = unsafe { function(self.0.as_mut_ptr()) };
        if error.is_null() {
            return true;
        }
        // Errors are their caller's.
        Question::about(error as usize).tell(bank, Place::ErrorDestroy);
        false
    }

    /// As [`Question::ask`], where the function answers no error.
    pub(crate) fn tell(&mut self, bank: usize, place: Place) -> bool {
        let Some(function) = real(bank, place) else { return false };
        // SAFETY: as in `ask`.
        unsafe { function(self.0.as_mut_ptr()) };
        true
    }

    pub(crate) fn answer(&self, at: usize) -> usize {
        self.0.get(at).copied().unwrap_or_default()
    }
}

/// A word of the structure that a program gave to a function, if it has so many.
pub(crate) fn field(arguments: *const usize, at: usize) -> Option<usize> {
    if arguments.is_null() {
        return None;
    }
    // SAFETY: every structure begins with its size.
    let bytes = unsafe { *arguments };
    // SAFETY: inside the structure.
    (bytes >= (at + 1) * WORD && bytes < 1 << 16).then(|| unsafe { *arguments.wrapping_add(at) })
}

/// Whether the plugin's clients use GPUs.
#[inline]
pub(crate) fn is_gpu(bank: usize) -> bool {
    ALL.get(bank).is_some_and(|bank| bank.is_gpu.load(Ordering::Relaxed))
}

/// A client was made: whether what the plugin does concerns GPUs.
pub(crate) fn note_client(bank: usize, client: usize) -> bool {
    let mut question = Question::about(client);
    if !question.ask(bank, Place::ClientPlatformName) {
        return false;
    }
    let (name, length) = (question.answer(3) as *const u8, question.answer(4));
    if name.is_null() || length > 64 {
        return false;
    }
    // SAFETY: the plugin says that its text is so long, and that it lives as long as the client.
    let name = unsafe { core::slice::from_raw_parts(name, length) };
    let is_gpu = [&b"cuda"[..], b"gpu", b"CUDA", b"GPU"].contains(&name);
    if let Some(bank) = ALL.get(bank) {
        bank.is_gpu.fetch_or(is_gpu, Ordering::Relaxed);
    }
    is_gpu
}

/// What is known of a plugin once its table was asked for: the minor number of its version, or why its table is its own.
pub(crate) fn known(bank: usize) -> Option<Result<u32, &'static [u8]>> {
    let bank = ALL.get(bank)?;
    match bank.state.load(Ordering::Acquire) {
        READY => Some(Ok(bank.minor.load(Ordering::Acquire))),
        FOREIGN => REASONS.get(bank.why.load(Ordering::Acquire) as usize).map(|why| Err(*why)),
        _ => None,
    }
}

/// To be called after objects were unloaded: forgets the plugins that went.
#[cold]
pub(crate) fn note_unloaded() {
    for bank in &ALL {
        let (get, start) = (bank.get.load(Ordering::Acquire), bank.start.load(Ordering::Acquire));
        let is_there = |object: &Object| object.start() == start && object.symbol(c"GetPjrtApi") == Some(get);
        if get == 0 || elf::find(is_there).is_some() {
            continue;
        }
        bank.n_words.store(0, Ordering::Release);
        bank.is_gpu.store(false, Ordering::Release);
        bank.state.store(EMPTY, Ordering::Release);
        bank.get.store(0, Ordering::Release);
        forget_all();
    }
}

/// What is remembered of an object by its address: a power of two of places, open addressing. What does not fit is asked for
/// anew each time.
struct Remembered<const N: usize> {
    keys: [AtomicUsize; N],
    values: [AtomicU64; N],
}

/// A key that was forgotten: another may take its place.
const FORGOTTEN: usize = 1;
/// How far from its first place a key may be.
const REACH: usize = 32;

impl<const N: usize> Remembered<N> {
    const fn new() -> Remembered<N> {
        Remembered { keys: [const { AtomicUsize::new(0) }; N], values: [const { AtomicU64::new(0) }; N] }
    }

    fn places(&self, key: usize) -> impl Iterator<Item = (&AtomicUsize, &AtomicU64)> {
        let hash = (key as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) as usize >> 40;
        (0..REACH).filter_map(move |step| {
            let at = (hash + step) % N;
            Some((self.keys.get(at)?, self.values.get(at)?))
        })
    }

    fn get(&self, key: usize) -> Option<u64> {
        for (place, value) in self.places(key) {
            match place.load(Ordering::Acquire) {
                0 => return None,
                there if there == key => {
                    return Some(value.load(Ordering::Acquire)).filter(|value| *value != 0);
                }
                _ => {}
            }
        }
        None
    }

    /// `value` is not 0.
    fn set(&self, key: usize, value: u64) {
        if let Some((_, slot)) = self.places(key).find(|(place, _)| place.load(Ordering::Acquire) == key) {
            return slot.store(value, Ordering::Release);
        }
        for (place, slot) in self.places(key) {
            let there = place.load(Ordering::Acquire);
            let is_free = there == 0 || there == FORGOTTEN;
            if is_free && place.compare_exchange(there, key, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                return slot.store(value, Ordering::Release);
            }
        }
    }

    fn forget(&self, key: usize) {
        if let Some((place, slot)) = self.places(key).find(|(place, _)| place.load(Ordering::Acquire) == key)
        {
            slot.store(0, Ordering::Release);
            place.store(FORGOTTEN, Ordering::Release);
        }
    }

    fn forget_all(&self) {
        self.values.iter().for_each(|value| value.store(0, Ordering::Release));
        self.keys.iter().for_each(|key| key.store(0, Ordering::Release));
    }
}

static EXECUTABLES: Remembered<4096> = Remembered::new();
static MEMORIES: Remembered<256> = Remembered::new();
static ERRORS: Remembered<64> = Remembered::new();

/// What an execution of an executable needs to know.
#[derive(Clone, Copy)]
pub(crate) struct Known {
    pub(crate) n_outputs: u32,
    /// Arguments may be donated.
    pub(crate) may_donate: bool,
}

pub(crate) fn executable(address: usize) -> Option<Known> {
    let word = EXECUTABLES.get(address)?;
    Some(Known { n_outputs: word as u32, may_donate: word & 1 << 32 != 0 })
}

pub(crate) fn remember_executable(address: usize, known: Known) {
    let word = u64::from(known.n_outputs) | u64::from(known.may_donate) << 32 | 1 << 63;
    EXECUTABLES.set(address, word);
}

pub(crate) fn forget_executable(address: usize) {
    EXECUTABLES.forget(address);
}

/// An error was told, by whoever was answered it: it is not told again when somebody asks what it says.
pub(crate) fn remember_error(error: usize) {
    ERRORS.set(error, 1);
}

pub(crate) fn is_known_error(error: usize) -> bool {
    ERRORS.get(error).is_some()
}

pub(crate) fn forget_error(error: usize) {
    ERRORS.forget(error);
}

/// A client is gone, and its memories with it.
pub(crate) fn forget_all() {
    EXECUTABLES.forget_all();
    MEMORIES.forget_all();
    ERRORS.forget_all();
}

/// `device` of memory that is not a device's.
pub(crate) const HOST: i8 = -2;
pub(crate) const UNKNOWN_DEVICE: i8 = -1;

/// The device whose memory a buffer lies in, [`HOST`] or [`UNKNOWN_DEVICE`].
pub(crate) fn device_of(bank: usize, buffer: usize) -> i8 {
    let mut question = Question::about(buffer);
    if !question.ask(bank, Place::BufferMemory) || question.answer(3) == 0 {
        return UNKNOWN_DEVICE;
    }
    let memory = question.answer(3);
    if let Some(known) = MEMORIES.get(memory) {
        return known as u8 as i8;
    }
    let device = device_of_memory(bank, memory);
    MEMORIES.set(memory, u64::from(device as u8) | 1 << 63);
    device
}

#[cold]
fn device_of_memory(bank: usize, memory: usize) -> i8 {
    let mut question = Question::about(memory);
    if question.ask(bank, Place::MemoryKind) {
        let (kind, length) = (question.answer(3) as *const u8, question.answer(4));
        if !kind.is_null() && length <= 64 {
            // SAFETY: the plugin says that its text is so long.
            let kind = unsafe { core::slice::from_raw_parts(kind, length) };
            // "pinned_host" and "unpinned_host" are the others.
            if !kind.starts_with(b"device") {
                return HOST;
            }
        }
    }
    let mut question = Question::about(memory);
    if !question.ask(bank, Place::MemoryAddressableByDevices) || question.answer(4) == 0 {
        return UNKNOWN_DEVICE;
    }
    let devices = question.answer(3) as *const usize;
    if devices.is_null() {
        return UNKNOWN_DEVICE;
    }
    // SAFETY: there is at least one device in the list.
    let mut question = Question::about(unsafe { *devices });
    if !question.ask(bank, Place::DeviceLocalHardwareId) {
        return UNKNOWN_DEVICE;
    }
    i8::try_from(question.answer(3) as i32).unwrap_or(UNKNOWN_DEVICE)
}

/// Bytes of a buffer on its device; 0 where it has none.
pub(crate) fn bytes_of(bank: usize, buffer: usize) -> u64 {
    let mut question = Question::about(buffer);
    if question.ask(bank, Place::BufferOnDeviceSizeInBytes) { question.answer(3) as u64 } else { 0 }
}

/// Whether a buffer's memory is gone, while the buffer is there.
pub(crate) fn is_deleted(bank: usize, buffer: usize) -> bool {
    let mut question = Question::about(buffer);
    question.ask(bank, Place::BufferIsDeleted) && question.answer(3) as u8 != 0
}
