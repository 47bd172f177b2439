//! What does not add up in a trace: a bug of the program, or something that was not seen.

use std::collections::BTreeMap;

use gputrace_schemas::event::{Event, Nanos, StackId, ThreadId};

macro_rules! findings {
    ($( $(#[$doc:meta])* $name:ident $text:literal, )*) => {
        /// Something that does not add up, with the address or handle it is about.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum Finding { $( $(#[$doc])* $name(u64), )* }
        impl Finding {
            /// The fault, in words.
            #[must_use]
            pub fn text(self) -> &'static str {
                match self { $( Finding::$name(_) => $text, )* }
            }
            /// The address or handle.
            #[must_use]
            pub fn about(self) -> u64 {
                match self { $( Finding::$name(about) => about, )* }
            }
        }
    };
}

findings! {
    /// Given back a second time.
    DoubleFree "freed twice",
    /// Given back, but never seen handed out.
    UnknownFree "freed without a recorded allocation (allocated before the trace began, or events were lost)",
    /// Handed out while it was still handed out.
    GivenOutTwice "allocated again without a recorded free (events were lost)",
    /// Released, retained or mapped, but never seen created.
    UnknownHandle "handle used without a recorded creation (created before the trace began, or events were lost)",
    /// More releases than references.
    ReleasedTooOften "handle released more often than it was retained",
    /// Unmapped, but not mapped.
    NotMapped "unmapped without a recorded mapping",
    /// Mapped where something is mapped.
    MappedTwice "mapped over another mapping (an unmap was not seen)",
    /// Wraps around the address space.
    BadRange "address and length do not match (the trace is damaged)",
    /// The driver refused to take it back.
    FreeFailed "free refused by the driver",
    /// PyTorch took back a block that it was not seen to hand out.
    UnknownBlock "PyTorch block freed without a recorded allocation (allocated before the trace began, or events were lost)",
    /// PyTorch handed out a block twice.
    BlockTwice "PyTorch block allocated again without a recorded free (events were lost)",
}

/// All findings of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Found {
    /// The first of them.
    pub first: Finding,
    /// How many.
    pub count: u64,
    /// When the first was.
    pub time: Nanos,
    /// On which thread.
    pub thread: ThreadId,
    /// From where.
    pub stack: StackId,
}

/// The findings of a trace, by kind.
#[derive(Clone, Debug, Default)]
pub struct Findings(BTreeMap<&'static str, Found>);

impl Findings {
    /// Adds what an event showed.
    pub(super) fn event(&mut self, event: &Event, found: &mut Vec<Finding>) {
        for finding in found.drain(..) {
            let (time, thread, stack) = (event.time, event.thread, event.stack);
            let first = Found { first: finding, count: 0, time, thread, stack };
            self.0.entry(finding.text()).or_insert(first).count += 1;
        }
    }

    /// One row per kind.
    pub fn iter(&self) -> impl Iterator<Item = &Found> {
        self.0.values()
    }

    /// Everything adds up.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
