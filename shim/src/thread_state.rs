//! What a thread's memory is made of: a part for each feature that keeps something of a thread. The parts know no hook.

use crate::nccl::grouped::Grouped;
use crate::nccl::noted::Noted;
use crate::sent::Sent;
use crate::stack::{self, ThreadStackState};
use gputrace_ring::record::{Node, Wait};

/// Stream events a thread can record between two events of PyTorch's allocator: one for every stream a block was
/// used on.
pub(crate) const WAIT_SLOTS: usize = 32;
/// Classes whose names a thread remembers to have sent: a training step has ten or twenty.
const SENT_CLASSES: usize = 64;
/// How many texts a thread remembers to have sent; what falls out is sent again.
pub(crate) const SENT_TEXTS: usize = 256;
/// Words of frames that a definition can have: a record must fit into a chunk.
const FRAME_WORDS: usize = stack::native::MAX_FRAMES + 2 * stack::python::MAX_FRAMES;
const _: () = assert!(FRAME_WORDS * 8 + 64 < gputrace_ring::ring::MAX_RECORD);
/// Bytes of a code object's texts.
pub(crate) const CODE_BYTES: usize = 8 << 10;

/// What a thread keeps beside its end of the ring. All zeros are a value of it.
pub(crate) struct Rest {
    /// Stream events recorded since the last PyTorch event; `Tls::waits` says how many.
    pub(crate) waits: [Wait; WAIT_SLOTS],
    /// `c10::StreamId` seen last, and its `cudaStream_t`.
    pub(crate) torch_stream: (i64, u64),
    /// What the recorder knows of the thread's place in PyTorch's backward pass.
    pub(crate) node: Node,
    /// Where the thread stands if it calls `backward()`.
    pub(crate) backward: BackwardCall,
    /// Classes of operations of the backward pass whose names were sent.
    pub(crate) node_classes: Sent<SENT_CLASSES>,
    /// PyTorch's number of the thread; 0 not asked yet.
    pub(crate) torch_thread: u64,
    /// What NCCL's open group will launch.
    pub(crate) noted: Noted,
    /// What the calls of NCCL's open group have counted.
    pub(crate) grouped: Grouped,
    /// What the unwinders keep.
    pub(crate) stack: ThreadStackState,
    /// Names of marks that were sent.
    pub(crate) texts: Sent<SENT_TEXTS>,
    /// Room for a definition that is being sent.
    pub(crate) scratch: Scratch,
    /// Changes when stacks and code objects must be sent again.
    pub(crate) definitions: u32,
}

impl Rest {
    /// Makes it that of the line's next owner, in the same session: what holds for every thread of it stays, so that a
    /// thread that comes touches no page that the one before it had not touched. To discard all would cost some fifty
    /// page faults a thread.
    pub(crate) fn hand_on(&mut self) {
        // Every part is here: a new one must be decided on. Those of `waits` count that `Tls::waits` says.
        let Rest {
            waits: _,
            torch_stream,
            node,
            backward,
            node_classes: _,
            torch_thread,
            noted,
            grouped,
            stack,
            texts: _,
            scratch: _,
            definitions: _,
        } = self;
        *torch_stream = (0, 0);
        *node = Node::default();
        *backward = BackwardCall::default();
        *torch_thread = 0;
        noted.clear();
        grouped.close(false);
        stack.hand_on();
    }
}

/// Where a thread that calls `backward()` stands. Only inside that call can it run operations of the backward pass; the
/// engine's own threads run them at any time, so a thread that runs one when it calls `backward()` is not known as a
/// caller.
#[derive(Clone, Copy, Default)]
pub(crate) struct BackwardCall {
    /// Called `backward()` before, from outside the backward pass.
    is_caller: bool,
    /// Frame of the outermost call; 0 none. An exception leaves it behind: only deeper frames are inside.
    frame: usize,
}

impl BackwardCall {
    /// Whether the thread cannot be inside an operation of the backward pass.
    #[inline]
    pub(crate) fn is_outside(&self) -> bool {
        self.is_caller && !self.is_inside()
    }

    #[inline]
    fn is_inside(&self) -> bool {
        let here = 0_u8;
        (&raw const here as usize) < self.frame
    }

    /// It calls `backward()` in this frame.
    pub(crate) fn enter(&mut self, frame: usize, runs_operation: bool) {
        if !self.is_inside() {
            *self = BackwardCall { is_caller: self.is_caller || !runs_operation, frame };
        }
    }

    /// That call is over.
    pub(crate) fn leave(&mut self, frame: usize) {
        if self.frame == frame {
            self.frame = 0;
        }
    }
}

/// Room for what is being sent.
pub(crate) struct Scratch {
    pub(crate) frames: [u64; FRAME_WORDS],
    pub(crate) code: [u8; CODE_BYTES],
}
