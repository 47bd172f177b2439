//! Assembly of functions that stand between a caller and the real function, and leave arguments and result as they are.

/// The body of a naked function: calls `enter`, which says where the real function is, then that with the arguments as they
/// came, then `leave`. Unwinders are told at each instruction where the registers are: exceptions pass through the frame,
/// which holds nothing that would need cleaning up.
///
/// `saves` are the argument registers that the real function needs, an odd number of them, so that the stack is aligned for
/// both calls; `before` are the instructions that give `enter` its arguments, and `after` those that give `leave` its own.
/// With the caller's frame at `rsp + 16 + 8 * saves` before, and at `rsp + 8` after: there the return address lies.
/// `personality` is what unwinders call at the frame.
macro_rules! calls_around {
    (saves [$($saved:literal)*], $($rest:tt)*) => {
        $crate::trampoline::calls_around!(@reverse [$($saved)*] [] [$($saved)*] $($rest)*)
    };
    (@reverse [] $reversed:tt $saved:tt $($rest:tt)*) => {
        $crate::trampoline::calls_around!(@write $saved $reversed $($rest)*)
    };
    (@reverse [$first:literal $($more:literal)*] [$($reversed:literal)*] $saved:tt $($rest:tt)*) => {
        $crate::trampoline::calls_around!(@reverse [$($more)*] [$first $($reversed)*] $saved $($rest)*)
    };
    (@write [$($saved:literal)*] [$($reversed:literal)*]
        before [$($before:literal)*] $enter:ident, after [$($after:literal)*] $leave:ident
        $(, personality $personality:ident)?
    ) => {
        core::arch::naked_asm!(
            ".cfi_startproc",
            $( concat!(".cfi_personality 0x1b, {", stringify!($personality), "}"), )? // DW_EH_PE_pcrel | DW_EH_PE_sdata4
            "push rbx",
            ".cfi_adjust_cfa_offset 8",
            ".cfi_rel_offset rbx, 0",
            $( concat!("push ", $saved), ".cfi_adjust_cfa_offset 8", )*
            "sub rsp, 8",
            ".cfi_adjust_cfa_offset 8",
            $( $before, )*
            "call {enter}",
            "add rsp, 8",
            ".cfi_adjust_cfa_offset -8",
            $( concat!("pop ", $reversed), ".cfi_adjust_cfa_offset -8", )*
            "call rax",
            "mov rbx, rax",
            $( $after, )*
            "call {leave}",
            "mov rax, rbx",
            "pop rbx",
            ".cfi_adjust_cfa_offset -8",
            "ret",
            ".cfi_endproc",
            enter = sym $enter,
            leave = sym $leave,
            $( $personality = sym $personality, )?
        )
    };
}
pub(crate) use calls_around;

/// The body of a naked function that calls `enter`, which says where the real function is, and jumps there with everything as
/// it came: the caller's frame is the real function's. `before` are the instructions that give `enter` its arguments.
macro_rules! jumps_after {
    ([$($before:literal)*] $enter:ident) => {
        core::arch::naked_asm!(
            ".cfi_startproc",
            "push rdi", ".cfi_adjust_cfa_offset 8",
            "push rsi", ".cfi_adjust_cfa_offset 8",
            "push rdx", ".cfi_adjust_cfa_offset 8",
            "push rcx", ".cfi_adjust_cfa_offset 8",
            "push r8", ".cfi_adjust_cfa_offset 8",
            "push r9", ".cfi_adjust_cfa_offset 8",
            "sub rsp, 24", ".cfi_adjust_cfa_offset 24",
            "movups [rsp], xmm0",
            $( $before, )*
            "call {enter}",
            "movups xmm0, [rsp]",
            "add rsp, 24", ".cfi_adjust_cfa_offset -24",
            "pop r9", ".cfi_adjust_cfa_offset -8",
            "pop r8", ".cfi_adjust_cfa_offset -8",
            "pop rcx", ".cfi_adjust_cfa_offset -8",
            "pop rdx", ".cfi_adjust_cfa_offset -8",
            "pop rsi", ".cfi_adjust_cfa_offset -8",
            "pop rdi", ".cfi_adjust_cfa_offset -8",
            "jmp rax",
            ".cfi_endproc",
            enter = sym $enter,
        )
    };
}
pub(crate) use jumps_after;
