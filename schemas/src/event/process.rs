//! The process that was traced, and what its events name: modules, stacks, threads, devices, functions.

use serde::{Deserialize, Serialize};

use super::{Bytes, FrameId, ModuleId, Nanos, StackId};

/// The process that was traced, as known when the trace began.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Process {
    /// Process id.
    pub pid: u32,
    /// Parent's process id.
    pub parent: u32,
    /// Host name.
    pub host: String,
    /// `boot_id` of the host: times of two traces compare only within one boot.
    pub boot: String,
    /// Path of the executable.
    pub executable: String,
    /// The command line, argument by argument.
    pub command: Vec<String>,
    /// Environment variables that change what allocators or NCCL do, or that name the rank; nothing else is kept.
    pub environment: Vec<(String, String)>,
    /// Rank in the job, from the environment, where it can be known.
    pub rank: Option<u32>,
    /// `CLOCK_MONOTONIC` at the beginning.
    pub start: Nanos,
    /// `CLOCK_REALTIME` at the same moment, nanoseconds since 1970.
    pub start_realtime: u64,
    /// gputrace's version that recorded.
    pub recorder: String,
    /// PyTorch's version, where the process loaded PyTorch and its `version.py` could be read.
    pub torch_version: Option<String>,
    /// When the process began, in ticks of 10 ms since boot: with `pid` and `boot` it names the process, as numbers are
    /// used again. 0 unknown.
    pub began: u64,
    /// Those of its ancestors that were recorded too or could have been, its parent first. Fewer where one had ended.
    pub ancestors: Vec<Ancestor>,
    /// Number of the first segment that is left of a bounded recording, from 1; 0 for a recording in one file.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub segment: u32,
    /// `CLOCK_MONOTONIC` from which on the trace has every event: older segments of a bounded recording were removed. Of the time
    /// before, it has the events that explain what was held at this moment. 0: nothing was removed.
    #[serde(default, skip_serializing_if = "is_never")]
    pub since: Nanos,
    /// Events between the segment before and this one could not be written: what is older is no part of the trace. In a recording in one
    /// file, a recorder before had what is older, and was killed: nothing of what was held is here.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub after_gap: bool,
}

impl Process {
    /// Whether the trace is what a recorder that was killed had not read: it begins within the process, without what was held.
    #[must_use]
    pub fn is_rest(&self) -> bool {
        self.segment == 0 && self.after_gap && self.since.0 > 0
    }

    /// Whether the other process started this one, itself or through others. False where it is not known.
    #[must_use]
    pub fn descends_from(&self, other: &Process) -> bool {
        let is_it = |it: &Ancestor| it.pid == other.pid && it.began == other.began && other.began != 0;
        !self.boot.is_empty() && self.boot == other.boot && self.ancestors.iter().any(is_it)
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_never(time: &Nanos) -> bool {
    time.0 == 0
}

/// A process that the traced one descends from. It may have no trace of its own: launchers use no GPU.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Ancestor {
    /// Process id.
    pub pid: u32,
    /// As [`Process::began`].
    pub began: u64,
    /// The command line, argument by argument.
    pub command: Vec<String>,
}

/// Something the process had mapped that holds code.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Module {
    /// Path as the process saw it.
    pub path: String,
    /// GNU build id in lower-case hex; empty if it has none.
    pub build_id: String,
    /// First mapped byte.
    pub start: u64,
    /// Byte after the last mapped one.
    pub end: u64,
    /// What to subtract from an address to get the file's own.
    pub bias: u64,
    /// The module has a CUDA runtime in it (libcudart itself, or linked statically).
    pub has_runtime: bool,
}

/// One line of a stack.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Frame {
    /// An address.
    Native {
        /// Where the call returns to.
        address: u64,
        /// The module it lies in.
        module: Option<ModuleId>,
        /// Demangled function, empty if unknown.
        function: String,
        /// Source file, empty if unknown.
        file: String,
        /// Line in it, 0 if unknown.
        line: u32,
        /// The function was inlined into the next frame's.
        inlined: bool,
    },
    /// A line of Python.
    Python {
        /// Qualified name.
        function: String,
        /// File name as the interpreter has it.
        file: String,
        /// Line that was executing.
        line: u32,
    },
}

/// A call stack, innermost frame first.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Stack {
    /// The frames.
    pub frames: Vec<FrameId>,
    /// Outer frames are missing.
    pub truncated: bool,
    /// What of PyTorch's backward pass ran, if any did.
    pub backward: Option<Box<Backward>>,
}

/// An operation of PyTorch's backward pass.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Backward {
    /// Its class: `torch::autograd::generated::AddmmBackward0`.
    pub node: String,
    /// The forward operation that it undoes was called there; 0 unknown, or there is none.
    pub forward: StackId,
    /// `backward()` was called there, by another thread; 0 unknown, or this thread called it.
    pub caller: StackId,
    /// Several threads were inside `backward()`; the one is taken that made the forward operation.
    pub is_caller_inferred: bool,
}

impl Backward {
    /// The operation as users know it: `AddmmBackward0`.
    #[must_use]
    pub fn short_node(&self) -> &str {
        self.node.rsplit("::").next().unwrap_or_default()
    }
}

/// A thread that made events.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Thread {
    /// Kernel thread id.
    pub tid: u32,
    /// Its name, as last seen.
    pub name: String,
}

/// A device of the process.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Device {
    /// Ordinal in the process, after `CUDA_VISIBLE_DEVICES`.
    pub ordinal: i16,
    /// Marketing name.
    pub name: String,
    /// `GPU-xxxxxxxx-xxxx-...`.
    pub uuid: String,
    /// Total memory.
    pub total: Bytes,
}

/// A function that was hooked.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Api {
    /// The exported symbol: `cuMemAlloc_v2`.
    pub name: String,
    /// What a program that goes through the CUDA runtime called: `cudaMalloc`; empty if there is no such function.
    pub runtime_name: String,
}

/// A mapping of the process: `/proc/PID/maps` without what does not matter for the driver's address choice.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Mapping {
    /// First byte.
    pub start: u64,
    /// Byte after the last.
    pub end: u64,
}

/// The process's address space at one moment; neighbouring mappings are joined.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Mappings {
    /// When they were read.
    pub time: Nanos,
    /// Ascending, not overlapping.
    pub mapped: Vec<Mapping>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_was_used_again_is_another_process() {
        let process =
            |pid, began, boot: &str| Process { pid, began, boot: boot.into(), ..Process::default() };
        let launcher = process(10, 500, "a");
        let of = |pid, began| Ancestor { pid, began, command: vec![] };
        let worker = Process { ancestors: vec![of(11, 600), of(10, 500)], ..process(12, 700, "a") };
        assert!(worker.descends_from(&launcher));
        assert!(!launcher.descends_from(&worker));
        assert!(!worker.descends_from(&process(10, 501, "a")));
        assert!(!worker.descends_from(&process(10, 500, "b")));
        assert!(!worker.descends_from(&process(13, 500, "a")));
    }
}
