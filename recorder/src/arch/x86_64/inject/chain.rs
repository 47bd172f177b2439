//! Calls that a stopped thread makes before it goes on as if nothing had been: a chain of frames on its own stack, below what it uses, of
//! the kind that the kernel itself puts there for a signal handler. Each gives the thread all its registers for one call, which returns
//! into the next; the last gives it back those that it had, with its signal mask and its vector registers, at the call that was
//! interrupted. So one change of registers is all that we do to the thread: from there on it needs nobody, and comes back
//! whatever becomes of us.

use super::super::ptrace::Registers;

/// Bytes of a frame: `struct ucontext` of the kernel (arch/x86/include/uapi/asm/{ucontext,sigcontext}.h).
const FRAME: usize = 304;
/// From one frame to the next: before each lies the address that its predecessor's call returns to.
const STRIDE: usize = FRAME + 16;
/// Where things lie in a frame.
const FLAGS: usize = 0;
const SIGNAL_STACK_FLAGS: usize = 24;
const GENERAL: usize = 40;
const SEGMENTS: usize = 184;
const EXTENDED: usize = 224;
const MASK: usize = 296;
/// `UC_FP_XSTATE`, `UC_SIGCONTEXT_SS` and `UC_STRICT_RESTORE_SS`.
const FRAME_FLAGS: u64 = 7;
/// No such mode: the kernel leaves the thread's signal stack as it is (kernel/signal.c, `restore_altstack` ignores the refusal).
const NO_SIGNAL_STACK: u32 = 0x7f;
/// `struct _fpx_sw_bytes`: where it lies in the area of `xsave`, and its two magic numbers.
const SOFTWARE: usize = 464;
const MAGIC1: u32 = 0x4650_5853;
const MAGIC2: u32 = 0x4650_5845;
/// The area's header: which parts are not in their initial state.
const HEADER: usize = 512;
/// AMX's tiles, which a thread has only if it asked for them (Intel SDM 1, 13.5.10).
const TILES: u64 = 1 << 18;
/// What a function of another library must not touch below a thread's stack (psABI AMD64, 3.2.2).
const RED_ZONE: u64 = 128;

/// A call that the thread makes.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Into the kernel.
    Kernel(i64, [Argument; 6]),
    /// Of a function.
    Function(u64, [Argument; 4]),
}

/// What a call is given.
#[derive(Clone, Copy, Debug)]
pub(super) enum Argument {
    Number(u64),
    /// Where the chain's text lies, which stays until its last step is done.
    Text,
}

/// Code of the C library that a chain is made of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pieces {
    /// `mov $15, %rax; syscall`: back from a signal handler.
    pub(super) restore: u64,
    /// `syscall; ret`.
    pub(super) call: u64,
}

/// A chain, ready to be written.
pub(super) struct Chain {
    /// Where it is written to, and where the stack begins for whoever follows it.
    pub(super) at: u64,
    pub(super) bytes: Vec<u8>,
}

/// The chain of these steps for a thread with these registers, mask and vector registers. `None` if the vector registers
/// are not in the form that the kernel documents.
pub(super) fn chain(
    steps: &[Step],
    text: &[u8],
    pieces: Pieces,
    last: &Registers,
    mask: u64,
    extended: &[u8],
) -> Option<Chain> {
    let area = area(extended)?;
    let frames = STRIDE * (steps.len() + 1);
    let area_at = frames.next_multiple_of(64);
    // Aligned as any structure wants it.
    let text_at = (area_at + area.len()).next_multiple_of(16);
    let size = (text_at + text.len() + 1).next_multiple_of(64);
    let at = (last.rsp.checked_sub(RED_ZONE + size as u64)?) & !63;
    let mut bytes = vec![0; size];
    for (index, step) in steps.iter().enumerate() {
        let mut registers = *last;
        registers.rbp = 0;
        let value = |argument: Argument| match argument {
            Argument::Number(number) => number,
            Argument::Text => at + text_at as u64,
        };
        match step {
            Step::Kernel(number, arguments) => {
                registers.rip = pieces.call;
                registers.rax = *number as u64;
                let [a, b, c, d, e, f] = arguments.map(value);
                (registers.rdi, registers.rsi, registers.rdx) = (a, b, c);
                (registers.r10, registers.r8, registers.r9) = (d, e, f);
            }
            Step::Function(address, arguments) => {
                registers.rip = *address;
                let [a, b, c, d] = arguments.map(value);
                (registers.rdi, registers.rsi, registers.rdx, registers.rcx) = (a, b, c, d);
                registers.rax = 0;
            }
        }
        // Direction and trap flags, as the psABI wants them at a call.
        registers.eflags &= !0x500;
        let next = STRIDE * (index + 1);
        registers.rsp = at + next as u64 + 8;
        put(&mut bytes, next + 8, &pieces.restore.to_le_bytes())?;
        // No handler of the program's runs on the way.
        frame(&mut bytes, STRIDE * index + 16, &registers, u64::MAX, 0)?;
    }
    frame(&mut bytes, STRIDE * steps.len() + 16, last, mask, at + area_at as u64)?;
    put(&mut bytes, area_at, &area)?;
    put(&mut bytes, text_at, text)?;
    Some(Chain { at, bytes })
}

/// The registers with which a thread begins the chain.
pub(super) fn begin(chain: &Chain, pieces: Pieces, registers: &Registers) -> Registers {
    let mut first = *registers;
    first.rip = pieces.restore;
    first.rsp = chain.at + 16;
    // The kernel must not take up again what was interrupted: the chain's end does.
    first.orig_rax = u64::MAX;
    first.rax = 0;
    first
}

fn frame(bytes: &mut [u8], at: usize, registers: &Registers, mask: u64, extended: u64) -> Option<()> {
    let r = registers;
    let general = [
        r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14, r.r15, r.rdi, r.rsi, r.rbp, r.rbx, r.rdx, r.rax,
        r.rcx, r.rsp, r.rip, r.eflags,
    ];
    put(bytes, at + FLAGS, &FRAME_FLAGS.to_le_bytes())?;
    put(bytes, at + SIGNAL_STACK_FLAGS, &NO_SIGNAL_STACK.to_le_bytes())?;
    for (index, value) in general.iter().enumerate() {
        put(bytes, at + GENERAL + 8 * index, &value.to_le_bytes())?;
    }
    // cs, gs, fs, ss: two bytes each; those in the middle are not read in 64 bits.
    put(bytes, at + SEGMENTS, &(r.cs as u16).to_le_bytes())?;
    put(bytes, at + SEGMENTS + 6, &(r.ss as u16).to_le_bytes())?;
    put(bytes, at + EXTENDED, &extended.to_le_bytes())?;
    put(bytes, at + MASK, &mask.to_le_bytes())
}

/// The vector registers as a signal frame has them.
fn area(extended: &[u8]) -> Option<Vec<u8>> {
    let number = |at: usize| Some(u64::from_le_bytes(extended.get(at..at + 8)?.try_into().ok()?));
    let (mut features, in_use) = (number(SOFTWARE)?, number(HEADER)?);
    let mut size = extended.len();
    if features & TILES != 0 && in_use & TILES == 0 {
        // The kernel refuses more than the thread may have.
        features &= !TILES;
        size = size_of(features);
    }
    let mut area = extended.get(..size)?.to_vec();
    let mut software = [0; 48];
    put(&mut software, 0, &MAGIC1.to_le_bytes())?;
    put(&mut software, 4, &(size as u32 + 4).to_le_bytes())?;
    put(&mut software, 8, &features.to_le_bytes())?;
    put(&mut software, 16, &(size as u32).to_le_bytes())?;
    put(&mut area, SOFTWARE, &software)?;
    // Reserved in the standard format.
    put(&mut area, HEADER + 8, &[0; 56])?;
    area.extend_from_slice(&MAGIC2.to_le_bytes());
    Some(area)
}

/// Bytes of the standard format with these features (Intel SDM 1, 13.4.3).
fn size_of(features: u64) -> usize {
    let parts = (2..63).filter(|feature| features >> feature & 1 == 1);
    let ends = parts.map(|feature| {
        let part = std::arch::x86_64::__cpuid_count(0xd, feature);
        part.eax as usize + part.ebx as usize
    });
    ends.max().unwrap_or(0).max(HEADER + 64)
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) -> Option<()> {
    bytes.get_mut(at..at + value.len())?.copy_from_slice(value);
    Some(())
}
