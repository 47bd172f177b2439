//! AArch64: threads of other processes are left alone (docs/ARM.md).

pub(crate) mod late;
pub mod thread_stacks;

#[cfg(fuzzing)]
pub(crate) fn look_at_image(_: &std::fs::File) -> usize {
    0
}

/// In words for users.
pub const MISSING_HERE: Option<&str> = Some(
    "on this processor, gputrace cannot attach to a process that was started without libgputrace.so (start it with LD_PRELOAD=$(gputrace library) GPUTRACE=dormant), and cannot read the stacks of running processes (`gputrace stacks`, `--hang-after`)",
);

/// What the rest of the recorder has for x86-64 alone.
const _: () = {
    let _: fn() = crate::limits::come_first;
    let _ = crate::merge_stack::INTERPRETER_FRAME;
    let _ = crate::opened::Taken::shared;
    let _ = crate::process::is_going;
    let _ = crate::room::for_library;
};
