//! One thread of another process, stopped for a moment (ptrace(2)): its registers, and where it goes on. It is seized without a signal,
//! and goes on by itself when we end, however we do. Also the code that a new thread of that process begins with.
#![allow(unsafe_code)]

use rustix::io::Errno;
use std::time::{Duration, Instant};

/// `PTRACE_GETSIGMASK` (linux/ptrace.h, Linux 3.11).
const GET_SIGNAL_MASK: libc::c_uint = 0x420a;
/// `NT_X86_XSTATE` (linux/elf.h): all that `xsave` saves.
const XSTATE: usize = 0x202;
/// More than any processor's registers take (with AMX: 11,008 bytes).
const MOST_XSTATE: usize = 64 << 10;
/// How long to wait between two looks at a thread that has been asked to stop.
const LOOK_EVERY: Duration = Duration::from_micros(20);

/// While it lives, the calling thread runs before all that is not urgent (`SCHED_FIFO`), if the kernel lets it (`CAP_SYS_NICE`): a thread
/// that it has stopped must not wait until it gets a processor again. For a few hundred microseconds, which sleep for the most part.
#[derive(Debug)]
pub(crate) struct Urgent {
    is_granted: bool,
}

impl Urgent {
    pub(crate) fn begin() -> Urgent {
        Urgent { is_granted: schedule(libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, 1) }
    }
}

impl Drop for Urgent {
    fn drop(&mut self) {
        if self.is_granted {
            schedule(libc::SCHED_OTHER, 0);
        }
    }
}

fn schedule(policy: libc::c_int, priority: libc::c_int) -> bool {
    let parameter = libc::sched_param { sched_priority: priority };
    // SAFETY: 0 is the calling thread, and the parameter lives as long as the call.
    unsafe { libc::sched_setscheduler(0, policy, &raw const parameter) == 0 }
}

/// A thread that we hold. It goes on when this is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    thread: i32,
    is_stopped: bool,
    /// The end of the calling thread lets it go.
    is_left: bool,
    /// To be delivered when it goes on.
    signal: i32,
    /// When it was last seen not to have stopped yet.
    ran_at: Instant,
}

/// Where it stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stop {
    /// Because we asked for that.
    Asked,
    /// At the begin or the end of a call into the kernel.
    Call,
    /// On its way to take a signal.
    Signal,
    /// With all threads of its process (SIGSTOP), which stay so.
    Group,
    /// It is gone.
    Over,
}

/// Its registers; those of x86-64.
pub(crate) type Registers = libc::user_regs_struct;

impl Held {
    /// Holds a thread, which runs on.
    pub(crate) fn seize(thread: u32) -> Result<Held, Errno> {
        let thread = thread as i32;
        request(libc::PTRACE_SEIZE, thread, 0, libc::PTRACE_O_TRACESYSGOOD as usize)?;
        Ok(Held { thread, is_stopped: false, is_left: false, signal: 0, ran_at: Instant::now() })
    }

    /// Lets it go without interrupting it: if it has not stopped, by the end of the calling thread ([`apart`]).
    pub(crate) fn leave(mut self) {
        self.is_left = !self.is_stopped && self.wait(Instant::now()).is_none();
    }

    /// A time since which it has stood at most: when it was last seen to run.
    pub(crate) fn ran_at(&self) -> Instant {
        self.ran_at
    }

    /// Has it stop, wherever it is.
    pub(crate) fn interrupt(&self) -> Result<(), Errno> {
        request(libc::PTRACE_INTERRUPT, self.thread, 0, 0).map(drop)
    }

    /// Waits for it to stop; `None` if it has not by then.
    pub(crate) fn wait(&mut self, until: Instant) -> Option<Stop> {
        loop {
            let mut status = 0;
            let asked = Instant::now();
            // SAFETY: the kernel writes one number.
            let found = unsafe { libc::waitpid(self.thread, &raw mut status, libc::__WALL | libc::WNOHANG) };
            if found == self.thread {
                return Some(self.stopped(status));
            }
            if found < 0 {
                return Some(Stop::Over);
            }
            self.ran_at = asked;
            if asked >= until {
                return None;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn stopped(&mut self, status: i32) -> Stop {
        if !libc::WIFSTOPPED(status) {
            return Stop::Over;
        }
        self.is_stopped = true;
        let signal = libc::WSTOPSIG(status);
        match status >> 16 {
            libc::PTRACE_EVENT_STOP if signal == libc::SIGTRAP => Stop::Asked,
            libc::PTRACE_EVENT_STOP => Stop::Group,
            _ if signal == libc::SIGTRAP | 0x80 => Stop::Call,
            _ => {
                self.signal = signal;
                Stop::Signal
            }
        }
    }

    /// Has it go on until it next calls the kernel, or comes back.
    pub(crate) fn go_on_to_call(&mut self) -> Result<(), Errno> {
        let signal = std::mem::take(&mut self.signal) as usize;
        request(libc::PTRACE_SYSCALL, self.thread, 0, signal)?;
        self.is_stopped = false;
        Ok(())
    }

    pub(crate) fn registers(&self) -> Result<Registers, Errno> {
        // SAFETY: of a structure of numbers all zeros are a value.
        let mut registers: Registers = unsafe { std::mem::zeroed() };
        request(libc::PTRACE_GETREGS, self.thread, 0, (&raw mut registers) as usize)?;
        Ok(registers)
    }

    pub(crate) fn set_registers(&self, registers: &Registers) -> Result<(), Errno> {
        request(libc::PTRACE_SETREGS, self.thread, 0, std::ptr::from_ref(registers) as usize).map(drop)
    }

    /// The signals that it has blocked.
    pub(crate) fn signal_mask(&self) -> Result<u64, Errno> {
        let mut mask = 0_u64;
        request(GET_SIGNAL_MASK, self.thread, size_of::<u64>(), (&raw mut mask) as usize)?;
        Ok(mask)
    }

    /// What `xsave` saves, in its standard format.
    pub(crate) fn extended_state(&self) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0_u8; MOST_XSTATE];
        let mut room = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        request(libc::PTRACE_GETREGSET, self.thread, XSTATE, (&raw mut room) as usize)?;
        bytes.truncate(room.iov_len);
        Ok(bytes)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.is_left {
            return;
        }
        if !self.is_stopped {
            let soon = Instant::now() + Duration::from_millis(200);
            if self.interrupt().is_err() || self.wait(soon).is_none_or(|stop| stop == Stop::Over) {
                return;
            }
        }
        let _ = request(libc::PTRACE_DETACH, self.thread, 0, self.signal as usize);
    }
}

/// Does `work` on a thread of its own, and returns when the kernel has ended that thread as a tracer: a thread that it still held goes on,
/// and was not interrupted for that (ptrace(2)).
///
/// # Errors
/// There can be no such thread.
pub(crate) fn apart<T: Send>(work: impl FnOnce() -> T + Send) -> std::io::Result<T> {
    std::thread::scope(|scope| {
        let worker =
            std::thread::Builder::new().spawn_scoped(scope, || (work(), rustix::thread::gettid()))?;
        let (done, tracer) = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        // It is joined a moment before.
        let task = format!("/proc/self/task/{}", tracer.as_raw_nonzero());
        let until = Instant::now() + Duration::from_secs(1);
        while std::path::Path::new(&task).exists() && Instant::now() < until {
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(done)
    })
}

fn request(what: libc::c_uint, thread: i32, address: usize, data: usize) -> Result<libc::c_long, Errno> {
    // SAFETY: the callers pass what the request reads or writes: nothing, numbers, or a structure that lives as long as the call.
    let answer = unsafe { libc::ptrace(what, thread, address, data) };
    if answer < 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL));
    }
    Ok(answer)
}

/// Whether two processes share their memory. Where the kernel does not say (`CONFIG_KCMP`), they do not.
pub(crate) fn share_memory(one: u32, other: u32) -> bool {
    /// `KCMP_VM` (linux/kcmp.h).
    const MEMORY: libc::c_long = 1;
    let (one, other) = (libc::c_long::from(one), libc::c_long::from(other));
    // SAFETY: takes numbers.
    unsafe { libc::syscall(libc::SYS_kcmp, one, other, MEMORY, 0, 0) == 0 }
}

/// What a new thread of the other process is given: numbers at fixed places, which [`first_code`] reads and writes.
pub(crate) mod given {
    /// What has become of it: 0 nothing yet, 1 it runs, 2 [`RESULT`] is the function's answer, 3 [`TEXT`] says why it did not work.
    pub(crate) const STATE: usize = 0;
    /// Not 0 where nobody waits for it any more.
    pub(crate) const CANCEL: usize = 4;
    pub(crate) const RESULT: usize = 8;
    /// Addresses of functions of the C library.
    pub(crate) const DLOPEN: usize = 16;
    pub(crate) const DLSYM: usize = 24;
    pub(crate) const DLERROR: usize = 32;
    pub(crate) const MUNMAP: usize = 40;
    pub(crate) const SELF: usize = 48;
    pub(crate) const DETACH: usize = 56;
    /// The library's function, where it is there already.
    pub(crate) const ENTRY: usize = 64;
    /// What that is given.
    pub(crate) const PATIENCE: usize = 72;
    /// The descriptor to close.
    pub(crate) const FILE: usize = 80;
    /// Where the code lies, and the bytes of it and of these numbers.
    pub(crate) const BASE: usize = 88;
    pub(crate) const BYTES: usize = 96;
    /// Where `pthread_create` writes to.
    pub(crate) const THREAD: usize = 104;
    /// Two words: not 0 once `pthread_create` has returned.
    pub(crate) const TIME: usize = 112;
    /// Texts, each ended by a zero.
    pub(crate) const PATH: usize = 128;
    pub(crate) const NAME: usize = 256;
    pub(crate) const TEXT: usize = 512;
    /// Room for the last.
    pub(crate) const TEXT_BYTES: usize = 1024;
}

/// The code of a new thread: loads the library, calls its function, and takes itself away again. It is copied to the other process, and
/// runs nowhere else.
pub(crate) fn first_code() -> &'static [u8] {
    unsafe extern "C" {
        static gputrace_first_code: u8;
        static gputrace_first_code_end: u8;
    }
    let (start, end) = (&raw const gputrace_first_code, &raw const gputrace_first_code_end);
    // SAFETY: both are in this program's code, the second behind the first.
    unsafe { std::slice::from_raw_parts(start, end as usize - start as usize) }
}

std::arch::global_asm!(
    ".pushsection .rodata.gputrace_first_code,\"a\",@progbits",
    ".p2align 4",
    ".globl gputrace_first_code",
    ".hidden gputrace_first_code",
    ".globl gputrace_first_code_end",
    ".hidden gputrace_first_code_end",
    "gputrace_first_code:",
    "push rbx",
    "mov rbx, rdi",
    // Nobody waits for its end.
    "call [rbx + {own}]",
    "mov rdi, rax",
    "call [rbx + {detach}]",
    "mov dword ptr [rbx + {state}], 1",
    "mov rax, [rbx + {entry}]",
    "test rax, rax",
    "jnz 2f",
    "lea rdi, [rbx + {path}]",
    "mov esi, {how}",
    "call [rbx + {dlopen}]",
    "test rax, rax",
    "jz 3f",
    "mov rdi, rax",
    "lea rsi, [rbx + {name}]",
    "call [rbx + {dlsym}]",
    "test rax, rax",
    "jz 3f",
    "2:",
    // Nobody waits any more: nothing is begun.
    "cmp dword ptr [rbx + {cancel}], 0",
    "jne 5f",
    "mov rdi, [rbx + {patience}]",
    "call rax",
    "mov [rbx + {result}], rax",
    "mov dword ptr [rbx + {state}], 2",
    "jmp 5f",
    "3: call [rbx + {dlerror}]",
    "test rax, rax",
    "jz 6f",
    "xor ecx, ecx",
    "4: mov dl, [rax + rcx]",
    "mov [rbx + rcx + {text}], dl",
    "test dl, dl",
    "jz 6f",
    "inc ecx",
    "cmp ecx, {most}",
    "jb 4b",
    "6: mov dword ptr [rbx + {state}], 3",
    // Closes the file of which all this was mapped, and unmaps it: the last call returns to the C library.
    "5: mov rdi, [rbx + {file}]",
    "mov eax, {close}",
    "syscall",
    "mov rdi, [rbx + {base}]",
    "mov rsi, [rbx + {bytes}]",
    "mov rax, [rbx + {munmap}]",
    "pop rbx",
    "jmp rax",
    "gputrace_first_code_end:",
    ".popsection",
    own = const given::SELF,
    detach = const given::DETACH,
    state = const given::STATE,
    entry = const given::ENTRY,
    path = const given::PATH,
    // The library is never unloaded: words of the program lead to it.
    how = const libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NODELETE,
    dlopen = const given::DLOPEN,
    name = const given::NAME,
    dlsym = const given::DLSYM,
    cancel = const given::CANCEL,
    patience = const given::PATIENCE,
    result = const given::RESULT,
    dlerror = const given::DLERROR,
    text = const given::TEXT,
    most = const given::TEXT_BYTES - 1,
    file = const given::FILE,
    close = const libc::SYS_close,
    base = const given::BASE,
    bytes = const given::BYTES,
    munmap = const given::MUNMAP,
);
