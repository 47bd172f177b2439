//! What a trace says, independent of how it is stored.
//!
//! A trace is one process's story: [`Process`] facts, definitions ([`Module`], [`Frame`], [`Stack`], [`Thread`],
//! [`Device`], [`Api`], [`Communicator`]), [`Event`]s in the order of their times, the process's [`Mappings`] where they matter, and
//! what was lost. Definitions come before the first event that names them.

// Before the modules that use it.
macro_rules! numbered {
    ($(#[$doc:meta])* $name:ident { $( $(#[$variant_doc:meta])* $variant:ident = $number:literal $text:literal, )* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[repr(u8)]
        pub enum $name { $( $(#[$variant_doc])* $variant = $number, )* }
        impl $name {
            /// Every value, in order.
            pub const ALL: &'static [$name] = &[ $( $name::$variant, )* ];
            /// The value with this number in a file.
            #[must_use]
            pub fn from_u8(raw: u8) -> Option<$name> {
                match raw { $( $number => Some($name::$variant), )* _ => None }
            }
            /// Its name in reports, exports and JSON.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $( $name::$variant => $text, )* }
            }
        }
        impl std::fmt::Display for $name {
            fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { to.pad(self.name()) }
        }
        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> { to.serialize_str(self.name()) }
        }
        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<$name, D::Error> {
                let name = <std::borrow::Cow<'de, str>>::deserialize(from)?;
                let known = $name::ALL.iter().find(|it| it.name() == name);
                known.copied().ok_or_else(|| serde::de::Error::custom(format!("`{name}` is not known")))
            }
        }
    };
}

mod alive;
mod call;
mod gpu_fault;
mod nccl;
mod pjrt;
mod process;
mod stack_read;
mod suspended;

use serde::{Deserialize, Serialize};

pub use alive::*;
pub use call::*;
pub use gpu_fault::*;
pub use nccl::*;
pub use pjrt::*;
pub use process::*;
pub use stack_read::*;
pub use suspended::*;

/// Bytes of memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub struct Bytes(pub u64);

/// Nanoseconds of the host's `CLOCK_MONOTONIC`: comparable between the processes of one host and one boot.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub struct Nanos(pub u64);

macro_rules! ids {
    ($( $(#[$doc:meta])* $name:ident, )*) => { $(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
        pub struct $name(pub u32);
    )* };
}

ids! {
    /// Index of a [`Stack`]. 0 is "no stack"; real ones start at 1.
    StackId,
    /// Index of a [`Frame`].
    FrameId,
    /// Index of a [`Module`].
    ModuleId,
    /// Index of a [`Thread`].
    ThreadId,
    /// Index of an [`Api`].
    ApiId,
    /// Index of a text. 0 is "no text"; real ones start at 1.
    TextId,
    /// Index of a [`Communicator`]. 0 is "none, or not known"; real ones start at 1.
    CommId,
}

/// A value that was not observed.
pub const UNKNOWN: u64 = u64::MAX;
/// [`Event`] concerns no device that is known.
pub const NO_DEVICE: i16 = -1;
/// [`Event`] concerns memory of the host.
pub const HOST: i16 = -2;

/// Something that happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Event {
    /// When: after the call for what gives memory out, before it for what takes memory back.
    pub time: Nanos,
    /// On which thread.
    pub thread: ThreadId,
    /// From where; `StackId(0)` if that was not recorded.
    pub stack: StackId,
    /// What.
    pub kind: EventKind,
}

/// The events.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum EventKind {
    /// A call into the driver.
    Call(Call),
    /// PyTorch's allocator handed out a block.
    BlockAlloc(BlockAlloc),
    /// PyTorch's allocator took a block back.
    BlockFree(BlockFree),
    /// PyTorch's allocator gave up on a request.
    BlockOom(BlockOom),
    /// PyTorch's allocator recorded or asked for a stream event.
    Wait(Wait),
    /// The program said where it is.
    Mark(Mark),
    /// The driver's own figures, sampled by the recorder.
    Sample(Sample),
    /// Events that were dropped before this moment.
    Lost(Lost),
    /// A fact in words, for `doctor` and the report.
    Note(String),
    /// A call into NCCL begins. Without an [`EventKind::NcclExit`] of the same number the process never came back.
    NcclEnter(NcclEnter),
    /// A call into NCCL has returned.
    NcclExit(NcclExit),
    /// What a call into NCCL launched has run on the GPU.
    NcclTiming(NcclTiming),
    /// A buffer of PJRT (JAX) came or went, or an executable ran.
    Pjrt(Pjrt),
    /// An executable of PJRT is there.
    PjrtExecutable(PjrtExecutable),
}

/// `CUDA_ERROR_OUT_OF_MEMORY`, cuda.h.
const OUT_OF_MEMORY: i32 = 2;

/// A request for memory that failed for good.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutOfMemory {
    /// Device ordinal, [`NO_DEVICE`] or [`HOST`].
    pub device: i16,
    /// The requested amount.
    pub bytes: Bytes,
}

impl Event {
    /// The request that failed for good with this event. What the driver refuses PyTorch's allocator is not one: it gives its
    /// cache back and asks again, and where that does not help it says so itself ([`BlockOom`]).
    #[must_use]
    pub fn out_of_memory(&self) -> Option<OutOfMemory> {
        match &self.kind {
            EventKind::BlockOom(oom) => {
                Some(OutOfMemory { device: oom.device, bytes: oom.requested.unwrap_or(oom.bytes) })
            }
            EventKind::Call(call)
                if call.result == Some(OUT_OF_MEMORY) && call.action.gives() && !call.in_allocate =>
            {
                Some(OutOfMemory { device: call.device, bytes: call.bytes })
            }
            EventKind::Pjrt(pjrt) if pjrt.action == PjrtAction::Failed => {
                Some(OutOfMemory { device: pjrt.device, bytes: pjrt.bytes })
            }
            _ => None,
        }
    }
}

/// A block allocated by PyTorch's caching allocator, with PyTorch's own totals just after.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockAlloc {
    /// Device ordinal.
    pub device: i16,
    /// First byte.
    pub addr: u64,
    /// Size of the block.
    pub bytes: Bytes,
    /// The amount that the program requested, where the request was seen.
    pub requested: Option<Bytes>,
    /// `CUstream` of the request, where it was seen.
    pub stream: Option<u64>,
    /// PyTorch's allocated bytes on the device.
    pub allocated: Bytes,
    /// PyTorch's reserved bytes on the device.
    pub reserved: Bytes,
}

/// A block taken back by PyTorch's caching allocator ("free requested"), with PyTorch's own totals just after.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockFree {
    /// Device ordinal.
    pub device: i16,
    /// First byte.
    pub addr: u64,
    /// Size of the block.
    pub bytes: Bytes,
    /// PyTorch's allocated bytes on the device.
    pub allocated: Bytes,
    /// PyTorch's reserved bytes on the device.
    pub reserved: Bytes,
    /// The Python interpreter of the thread was collecting reference cycles. Another of its threads can be the one
    /// that collects, where an object's end gives up the interpreter's lock.
    pub collecting: bool,
}

/// PyTorch raised `OutOfMemoryError`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockOom {
    /// Device ordinal.
    pub device: i16,
    /// Bytes PyTorch wanted from the driver (the rounded request).
    pub bytes: Bytes,
    /// The amount that the program requested, where the request was seen.
    pub requested: Option<Bytes>,
    /// The `cudaStream_t` that the block would have been of, where the request was seen.
    pub stream: Option<u64>,
    /// PyTorch's allocated bytes on the device.
    pub allocated: Bytes,
    /// PyTorch's reserved bytes on the device.
    pub reserved: Bytes,
}

/// A stream event of PyTorch's allocator. A block freed while other streams may still use it becomes reusable when
/// the events recorded just before its [`BlockFree`] on the same thread were seen done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wait {
    /// `CUevent`. The allocator's own are those it ever queries or synchronises inside `allocate` or a trim.
    pub event: u64,
    /// `CUstream` it was recorded on; 0 for others.
    pub stream: u64,
    /// What was done.
    pub action: WaitAction,
    /// `CUresult`: 0 done, 600 not ready.
    pub result: i32,
}

/// A mark or a range of NVTX: what the program says of itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mark {
    /// What begins, ends or happens.
    pub action: MarkAction,
    /// Its name.
    pub text: TextId,
    /// Name of its domain; `TextId(0)` is the default one.
    pub domain: TextId,
    /// Joins [`MarkAction::Start`] with [`MarkAction::End`]; the kernel's thread id for [`MarkAction::NameThread`].
    pub range: u64,
    /// The program's number for a group of marks; 0 none.
    pub category: u32,
}

/// The driver's own figures for one device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sample {
    /// Device ordinal in the traced process.
    pub device: i16,
    /// Bytes that NVML charges to the process, where it tells.
    pub process_used: Option<Bytes>,
    /// Bytes used on the device by everybody.
    pub device_used: Bytes,
    /// Bytes of the device.
    pub total: Bytes,
}

/// Events that were dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lost {
    /// Why.
    pub cause: LostCause,
    /// How many since the last such event.
    pub events: u64,
}

numbered! {
    /// Why events were dropped.
    LostCause {
        /// The ring was full: the recorder did not keep up.
        RingFull = 1 "ring full",
        /// More threads than the ring has lines.
        TooManyThreads = 2 "too many threads",
        /// A signal handler interrupted another event.
        Nested = 3 "in a signal handler",
        /// Another thread was starting the session.
        Starting = 4 "while starting",
        /// The trace could not be written (disk full).
        NotWritten = 5 "not written",
        /// A record was unreadable.
        Damaged = 6 "damaged",
    }
}

numbered! {
    /// What a [`Mark`] says.
    MarkAction {
        /// A range of the thread begins.
        Push = 1 "push",
        /// The range that the thread began last in the domain ends.
        Pop = 2 "pop",
        /// A range of the process begins: `range`.
        Start = 3 "start",
        /// `range` ends, on whatever thread.
        End = 4 "end",
        /// One moment.
        Mark = 5 "mark",
        /// A thread got a name.
        NameThread = 6 "name_thread",
    }
}

numbered! {
    /// What happened to a stream event.
    WaitAction {
        /// `cuEventRecord`.
        Record = 1 "record",
        /// `cuEventQuery`.
        Query = 2 "query",
        /// `cuEventSynchronize`.
        Synchronize = 3 "synchronize",
    }
}
