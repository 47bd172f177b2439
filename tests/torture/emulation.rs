//! What an emulator does to a process that no library does: scenarios that cannot tell the two apart are not tried under one.

use gputrace_tests::recorded;
use std::fs;
use std::sync::LazyLock;

/// Scenarios that QEMU's user emulation cannot try, and why: the beginning of their names.
pub(crate) const NOT_EMULATED: &[(&str, &str)] = &[
    (
        "wait, ",
        "QEMU gives every child a signal at its end, so that the recorder is one of those that `wait` finds",
    ),
    (
        "PID 1",
        "QEMU has a thread of its own in each process, so that a program does not wait for its recorder, which ends with the namespace",
    ),
];

/// Whether the library is for another processor than this program, so that its programs run under an emulator.
pub(crate) fn is_emulated() -> bool {
    static IS_EMULATED: LazyLock<bool> = LazyLock::new(|| {
        // `e_machine` of an ELF file (elf(5)).
        let machine = |path| fs::read(path).ok().and_then(|data| data.get(18..20).map(<[u8]>::to_vec));
        let own = std::env::current_exe().ok().and_then(machine);
        machine(recorded::built().join("libgputrace.so")) != own
    });
    *IS_EMULATED
}

/// How traces are named. QEMU says of a process that became another program (`exec`) that it began then. What it recorded before is then
/// older than itself, so somebody else's, and must not have its name: two names of one process in one second differ by a number.
pub(crate) fn name_of_traces() -> &'static str {
    if is_emulated() { "%p.%t.%n.gtr" } else { "%p.%t.gtr" }
}

/// Why a scenario is not tried, if it is not.
pub(crate) fn not_emulated(name: &str) -> Option<&'static str> {
    NOT_EMULATED.iter().find(|(begin, _)| name.starts_with(begin)).map(|(_, why)| *why)
}
