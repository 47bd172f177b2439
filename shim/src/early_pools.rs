//! Calls about the pools of PyTorch's allocator that came before there was a session.
//!
//! `torch.cuda.MemPool()` and `use_mem_pool` come before a program's first memory, and a session begins with that memory. Without these calls
//! a trace would put all that the pool serves into the default pool. They wait here, and are sent when the session begins: what concerns
//! the whole process by the first thread that comes, and what a thread opened by that thread's first event.

use crate::thread_id;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use gputrace_ring::record::{Action, Call};
use gputrace_ring::ring::Producer;

/// Calls that are kept. More are forgotten: a program opens few pools before it asks for memory.
const MOST: usize = 64;

static WAITING: [Waiting; MOST] = [const { Waiting::new() }; MOST];
/// Slots that were given out, at most one more for each thread than there are.
static N_TAKEN: AtomicU32 = AtomicU32::new(0);
/// Calls that wait: mostly none.
static N_WAITING: AtomicU32 = AtomicU32::new(0);

/// Nobody's, or being written.
const EMPTY: u32 = 0;
/// To be sent.
const FULL: u32 = 1;
/// Sent. Slots are not used again, so that they stay in the order of the calls.
const SENT: u32 = 2;

struct Waiting {
    state: AtomicU32,
    thread: AtomicU32,
    api: AtomicU32,
    action: AtomicU32,
    device: AtomicU32,
    graph: AtomicU64,
    user: AtomicU64,
    stream: AtomicU64,
    bytes: AtomicU64,
}

impl Waiting {
    const fn new() -> Waiting {
        Waiting {
            state: AtomicU32::new(EMPTY),
            thread: AtomicU32::new(0),
            api: AtomicU32::new(0),
            action: AtomicU32::new(0),
            device: AtomicU32::new(0),
            graph: AtomicU64::new(0),
            user: AtomicU64::new(0),
            stream: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        }
    }

    /// Whether this thread sends it: a call of its own, or one that concerns all threads.
    fn is_due(&self, thread: u32) -> bool {
        const OF_ALL: [Action; 3] =
            [Action::TorchPoolCreate, Action::TorchPoolUseOnOom, Action::TorchPoolNoSplit];
        let action = self.action.load(Ordering::Relaxed);
        // SYNC: call waiting.
        self.state.load(Ordering::Acquire) == FULL
            && (self.thread.load(Ordering::Relaxed) == thread
                || OF_ALL.iter().any(|one| *one as u32 == action))
    }

    fn call(&self) -> Call {
        Call {
            api: self.api.load(Ordering::Relaxed) as u16,
            action: self.action.load(Ordering::Relaxed) as u8,
            device: self.device.load(Ordering::Relaxed) as u8 as i8,
            handle: self.graph.load(Ordering::Relaxed),
            extra: self.user.load(Ordering::Relaxed),
            stream: self.stream.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            ..Call::default()
        }
    }
}

/// Keeps a call for a session that may come.
#[cold]
pub(crate) fn wait(call: &Call) {
    if N_TAKEN.load(Ordering::Relaxed) as usize >= MOST {
        return;
    }
    let Some(slot) = WAITING.get(N_TAKEN.fetch_add(1, Ordering::Relaxed) as usize) else { return };
    slot.thread.store(thread_id::own(), Ordering::Relaxed);
    slot.api.store(u32::from(call.api), Ordering::Relaxed);
    slot.action.store(u32::from(call.action), Ordering::Relaxed);
    slot.device.store(u32::from(call.device as u8), Ordering::Relaxed);
    slot.graph.store(call.handle, Ordering::Relaxed);
    slot.user.store(call.extra, Ordering::Relaxed);
    slot.stream.store(call.stream, Ordering::Relaxed);
    slot.bytes.store(call.bytes, Ordering::Relaxed);
    N_WAITING.fetch_add(1, Ordering::Relaxed);
    // SYNC: call waiting.
    slot.state.store(FULL, Ordering::Release);
}

/// Sends the calls that waited for this thread.
#[cold]
pub(crate) fn catch_up(producer: &mut Producer) {
    if N_WAITING.load(Ordering::Relaxed) == 0 {
        return;
    }
    let thread = thread_id::own();
    for slot in WAITING.iter().filter(|slot| slot.is_due(thread)) {
        // Another thread may send it just now.
        if slot.state.compare_exchange(FULL, SENT, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            N_WAITING.fetch_sub(1, Ordering::Relaxed);
            let at = producer.now();
            producer.push_call(at, &slot.call());
        }
    }
}
