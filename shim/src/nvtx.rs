//! What the program says of itself by NVTX: texts that are kept, ranges that are open before there is a session, and how both
//! are sent. Where a session begins they wait in [`WAITING`], and each thread sends its own with its first event.

use crate::sent::Sent;
use crate::sys::{self, KeepErrno};
use crate::thread_state::SENT_TEXTS;
use crate::{kernel, session, thread_id};
use core::ffi::c_void;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use gputrace_ring::record::{Mark, MarkAction, TextDef};
use gputrace_ring::ring::{Producer, Pushed};

/// More of a text is cut.
pub(crate) const MOST_TEXT: usize = 240;

/// What a mark says.
pub(crate) struct Said {
    pub(crate) bytes: [u8; MOST_TEXT],
    pub(crate) length: usize,
    pub(crate) category: u32,
}

impl Said {
    #[inline]
    pub(crate) const fn nothing() -> Said {
        Said { bytes: [0; MOST_TEXT], length: 0, category: 0 }
    }

    #[inline]
    pub(crate) fn text(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }

    /// False if there is no more room.
    #[inline]
    pub(crate) fn add(&mut self, byte: u8) -> bool {
        match self.bytes.get_mut(self.length) {
            Some(slot) => {
                *slot = byte;
                self.length += 1;
                true
            }
            None => false,
        }
    }

    /// What was registered under this handle.
    pub(crate) fn registered(handle: *mut c_void) -> Said {
        let mut said = Said::nothing();
        for byte in kept(handle) {
            said.add(*byte);
        }
        said
    }
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
pub(crate) fn keep(text: &[u8]) -> *mut c_void {
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

/// Sends a mark, and its texts unless the thread has just done so.
pub(crate) fn send(
    producer: &mut Producer,
    sent: &mut Sent<SENT_TEXTS>,
    action: MarkAction,
    domain: *mut c_void,
    said: &Said,
    range: u64,
) {
    let (text, domain) = (text_id(producer, sent, said.text()), text_id(producer, sent, kept(domain)));
    let at = session::now();
    let mark = Mark { action: action as u32, category: said.category, text, domain, range };
    producer.push(at, 0, &mark);
}

/// Sends the text, unless the thread has just done so; 0 for none.
pub(crate) fn text_id(producer: &mut Producer, sent: &mut Sent<SENT_TEXTS>, text: &[u8]) -> u64 {
    if text.is_empty() {
        return 0;
    }
    // FNV-1a; 0 is "no text".
    let hash = text.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let id = hash.max(1);
    if !sent.has(id) {
        let at = producer.now();
        let definition = TextDef { id, length: text.len() as u64 };
        if producer.push_with(at, 0, &definition, &[text]) == Pushed::Yes {
            sent.add(id);
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

/// Keeps in mind which ranges are open.
#[cold]
pub(crate) fn wait(action: MarkAction, domain: *mut c_void, said: &Said, range: u64) {
    let thread = thread_id::own();
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
pub(crate) fn catch_up(producer: &mut Producer, sent: &mut Sent<SENT_TEXTS>) {
    if N_WAITING.load(Ordering::Relaxed) == 0 {
        return;
    }
    let thread = thread_id::own();
    let is_due = |slot: &&Waiting| slot.is_push_of(thread) || slot.is_start();
    while let Some(slot) = WAITING.iter().filter(is_due).min_by_key(|slot| slot.order.load(Ordering::Relaxed))
    {
        if !slot.take() {
            continue;
        }
        let is_push = slot.action.load(Ordering::Relaxed) == MarkAction::Push as u32;
        let action = if is_push { MarkAction::Push } else { MarkAction::Start };
        let (domain, range) = (slot.domain.load(Ordering::Relaxed), slot.range.load(Ordering::Relaxed));
        send(producer, sent, action, domain, &slot.said(), range);
        slot.free();
    }
}
