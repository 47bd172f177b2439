//! Bringing the library into a process that runs already and was started without it.
//!
//! ```text
//! a thread of it, at a call into the kernel ─ chain ─> memfd_create ─> ... its call, as if nothing had been
//! we                                         ─ /proc/PID/fd ─> library, first code, numbers
//! a thread, as above                         ─ chain ─> mmap, mmap
//! a thread, as above                         ─ chain ─> pthread_create ─┐
//! a new thread of it ───────────────── dlopen("/proc/self/fd/N"), gputrace_attach_loaded(), close, munmap
//! ```
//!
//! No thread stands still for longer than it takes to read its registers and to write its new ones, which is all that is
//! done to it ([`chain`]). What may take long, and may have to wait for the program's other threads (the loader's lock), is
//! done by the new thread. Nothing needs a path in the process's own file system. If a step fails, what the steps before it
//! have made is taken away again.

mod chain;
mod image;
mod left;
mod library;
mod maps;
mod threads;
mod waits;

use super::ptrace::{apart, first_code, given};
use crate::attach::Refusal;
use crate::opened::{self, Descriptors, Expected, users_of};
use chain::{Argument, Pieces, Step};
use gputrace_ring::late;
use image::Image;
use left::Owned;
use maps::Maps;
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use threads::{Chosen, Found, Ground, Sorted};

const LOOK_EVERY: Duration = Duration::from_millis(1);
const PAGE: u64 = 4096;
/// Bytes of a `pthread_attr_t` and more (bits/pthreadtypes-arch.h: 56).
const ATTRIBUTES: usize = 128;
/// Bytes of the new thread's stack. The C library keeps it for the next thread, so it is small; the loader and PyTorch's allocator,
/// which lists its blocks on it, take some 30 KiB, and thread-local storage lies on it too.
const STACK: u64 = 512 << 10;
/// `MFD_EXEC` (linux/memfd.h, Linux 6.3).
const MFD_EXEC: u64 = 0x10;

/// How often threads of other processes stood still because of this one, and for how many microseconds at most.
pub(crate) struct Still {
    times: AtomicU32,
    longest: AtomicU32,
}

/// Of all that was brought in.
pub(crate) static STILL: Still = Still { times: AtomicU32::new(0), longest: AtomicU32::new(0) };

impl Still {
    fn note(&self, since: Instant) {
        let micros = u32::try_from(since.elapsed().as_micros()).unwrap_or(u32::MAX);
        self.times.fetch_add(1, Ordering::Relaxed);
        self.longest.fetch_max(micros, Ordering::Relaxed);
    }

    /// Both.
    pub(crate) fn told(&self) -> (u32, u32) {
        (self.times.load(Ordering::Relaxed), self.longest.load(Ordering::Relaxed))
    }
}

/// A process into which the library is brought.
pub(crate) struct Late {
    pid: u32,
    /// Tells it from a process that gets its number later.
    began: u64,
    memory: File,
    c_library: Image,
    pieces: Pieces,
    numbers: Vec<(usize, u64)>,
    /// Functions of the C library that set what a new thread is to have: all as usual, and the size of its stack.
    attributes: [u64; 2],
    /// How long a thread is looked for that can be borrowed, and how long it may take for its calls.
    patience: Duration,
    /// Threads that were seen to write, and are not stopped while they run.
    writers: Mutex<BTreeSet<u32>>,
    /// A thread has been told to make one that uses the file: it may still do so.
    is_committed: bool,
}

/// What the new thread has begun: where it says how far it is.
pub(crate) struct Begun {
    file: File,
    at: u64,
    /// Until here the file is ours: from then on the thread needs it, and closes it.
    _owned: Owned,
}

/// What it says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Said {
    /// It is at work.
    NotYet,
    /// One of [`late`]'s numbers.
    Answer(u64),
    /// The loader's words.
    Failed(String),
}

impl Late {
    /// Looks whether it can be done, and changes nothing.
    ///
    /// # Errors
    /// It cannot: why, and what to do.
    pub(crate) fn prepare(pid: u32, patience: Duration) -> Result<Late, Refusal> {
        let began = began(pid)?;
        refuse_by_status(pid)?;
        let no = |why: &str| Refusal::NotLate { pid, why: why.to_owned() };
        let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem"));
        let memory = memory.map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => no(&why_untraceable(pid)),
            io::ErrorKind::NotFound => Refusal::Gone(pid),
            _ => no(&format!("its memory cannot be opened: {error}")),
        })?;
        let maps = Maps::of(pid).ok_or_else(|| no(&why_untraceable(pid)))?;
        if maps.base("libcuda.so").is_none() {
            return Err(no("it has not loaded the CUDA driver (libcuda.so.1): attach once it has"));
        }
        let base = maps.base("libc.so.6").or_else(|| maps.base("libc-2."));
        let c_library = base.and_then(|base| Image::read(&memory, base));
        let c_library = c_library.ok_or_else(|| {
            no("its C library is not glibc for x86-64, or is statically linked: start it with LD_PRELOAD")
        })?;
        let older =
            ["libpthread", "libdl"].map(|name| maps.base(name).and_then(|base| Image::read(&memory, base)));
        let function = |name: &str| {
            let libraries = std::iter::once(&c_library).chain(older.iter().flatten());
            libraries.into_iter().find_map(|library| library.function(name)).map(|code| code.start)
        };
        let needed = [
            (given::DLOPEN, "dlopen"),
            (given::DLSYM, "dlsym"),
            (given::DLERROR, "dlerror"),
            (given::MUNMAP, "munmap"),
            (given::SELF, "pthread_self"),
            (given::DETACH, "pthread_detach"),
            (given::THREAD, "pthread_create"),
        ];
        let mut numbers = Vec::new();
        for (place, name) in needed {
            let address = function(name);
            numbers.push((place, address.ok_or_else(|| no(&format!("its C library has no {name}")))?));
        }
        let attributes = ["pthread_attr_init", "pthread_attr_setstacksize"].map(function);
        let [Some(usual), Some(stack)] = attributes else {
            return Err(no("its C library has no pthread_attr_setstacksize"));
        };
        let piece = |code: &[u8]| {
            c_library.find(&memory, code).ok_or_else(|| no("its C library has an unexpected layout"))
        };
        let restore = piece(&[0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05])?;
        let call = piece(&[0x0f, 0x05, 0xc3])?;
        Ok(Late {
            pid,
            began,
            memory,
            c_library,
            pieces: Pieces { restore, call },
            numbers,
            attributes: [usual, stack],
            patience,
            writers: Mutex::default(),
            is_committed: false,
        })
    }

    /// Brings the library in, or has the one that is there begin anew. What then happens, [`Begun`] says.
    ///
    /// # Errors
    /// It was not possible, and the process is as it was.
    pub(crate) fn begin(mut self, library: &Path, serves: Duration) -> Result<Begun, Refusal> {
        let maps = self.maps()?;
        let there = maps.base("memfd:gputrace-library").and_then(|base| Image::read(&self.memory, base));
        let entry = there.and_then(|it| Some(it.function(&late::ENTRY.to_string_lossy())?.start));
        let content = match entry {
            Some(_) => Vec::new(),
            None if library.as_os_str().is_empty() => {
                return Err(self.no("libgputrace.so is not beside gputrace, nor in ../lib: install it there, or set GPUTRACE_LIBRARY to its path"));
            }
            None => library::read(library, self.pid).map_err(|why| self.no(&why))?,
        };
        self.take_away_left();
        let (number, file, owned) = self.make_file()?;
        let placed = self.fill(&file, &content, number, entry, serves);
        let begun = placed.and_then(|(at, base)| self.map_and_start(&file, number, at, base).map(|()| at));
        match begun {
            Ok(at) => Ok(Begun { file, at, _owned: owned }),
            Err(why) => {
                // A thread that is made after all needs it, finds that nobody waits, and takes all away itself.
                if !self.is_committed {
                    // Without its content it takes no memory, even where it cannot be closed.
                    let _ = file.set_len(0);
                    let close = Step::Kernel(libc::SYS_close, numbers([number, 0, 0, 0, 0, 0]));
                    let _ = self.run(&[close], b"");
                }
                Err(why)
            }
        }
    }

    /// A memory file of the process's, and the descriptor that it has there.
    ///
    /// The process may be hostile, and can have any file behind that number at any moment. So nothing is opened by the number: the very
    /// open file is taken from the process, and then asked whether it is new memory of the process's own. To write to that, or to cut
    /// it, changes nothing that the process could not change itself, and the number is not looked at again.
    fn make_file(&self) -> Result<(u64, File, Owned), Refusal> {
        let exec = match fs::read_to_string("/proc/sys/vm/memfd_noexec").map(|it| it.trim().to_owned()) {
            Ok(level) if level == "2" => {
                return Err(self.no("memory files cannot be executed on this machine (vm.memfd_noexec=2): start it with LD_PRELOAD"));
            }
            Ok(_) => MFD_EXEC,
            Err(_) => 0,
        };
        let flags = Argument::Number(u64::from(libc::MFD_CLOEXEC) | exec);
        let zero = Argument::Number(0);
        let make = Step::Kernel(libc::SYS_memfd_create, [Argument::Text, flags, zero, zero, zero, zero]);
        let name = unique().map_err(|source| self.no(&format!("no name for its memory file: {source}")))?;
        self.run(&[make], format!("{name}\0").as_bytes())?;
        let descriptors = Descriptors::of(self.pid);
        let until = Instant::now() + self.patience;
        loop {
            let found = descriptors.named(&format!("/memfd:{name} ")).unwrap_or_default();
            if let Some(number) = found.first() {
                let no = |why: io::Error| self.no(&format!("its memory file: {why}"));
                let expected = Expected::memory().of(&users_of(self.pid)).with_bytes(0..=0);
                let taken = descriptors.take(*number).map_err(|why| no(why.into()))?;
                let owned = Owned::of(&taken, &expected).map_err(no)?.ok_or(Refusal::Busy(self.pid))?;
                // Another attacher may have taken it for one that was left, before it was ours.
                if !descriptors.path(*number).is_some_and(|path| path.contains(&name)) {
                    return Err(Refusal::Busy(self.pid));
                }
                let file = taken.shared(&expected).map_err(|why| no(why.into()))?;
                return Ok((u64::from(*number), file, owned));
            }
            self.wait(
                until,
                "it could not create a memory file (memfd_create), or its thread went elsewhere",
            )?;
        }
    }

    /// Writes the file: the library, then a page of code, then a page of numbers. Where the code lies in it, and in the process.
    fn fill(
        &mut self,
        file: &File,
        library: &[u8],
        number: u64,
        entry: Option<u64>,
        serves: Duration,
    ) -> Result<(u64, u64), Refusal> {
        let at = (library.len() as u64).next_multiple_of(PAGE);
        let base = self.maps()?.hole().ok_or_else(|| self.no("its address space has no room"))?;
        let mut page = vec![0_u8; PAGE as usize];
        let create = self.numbers.pop();
        self.numbers.extend([
            (given::ENTRY, entry.unwrap_or(0)),
            (given::PATIENCE, serves.as_millis() as u64),
            (given::FILE, number),
            (given::BASE, base),
            (given::BYTES, 2 * PAGE),
        ]);
        for (place, value) in &self.numbers {
            page[*place..*place + 8].copy_from_slice(&value.to_le_bytes());
        }
        self.numbers.extend(create);
        let path = format!("/proc/self/fd/{number}\0");
        page[given::PATH..given::PATH + path.len()].copy_from_slice(path.as_bytes());
        let name = late::ENTRY.to_bytes_with_nul();
        page[given::NAME..given::NAME + name.len()].copy_from_slice(name);
        let written = file
            .write_all_at(library, 0)
            .and_then(|()| file.write_all_at(first_code(), at))
            .and_then(|()| file.write_all_at(&page, at + PAGE));
        written.map_err(|source| self.no(&format!("its memory file: {source}")))?;
        Ok((at + PAGE, base))
    }

    fn map_and_start(&mut self, file: &File, number: u64, numbers_at: u64, base: u64) -> Result<(), Refusal> {
        let fixed = libc::MAP_FIXED_NOREPLACE;
        let map = |at: u64, rights: i32, kind: i32, offset: u64| {
            let arguments = [at, PAGE, rights as u64, (kind | fixed) as u64, number, offset];
            Step::Kernel(libc::SYS_mmap, numbers(arguments))
        };
        let code = map(base, libc::PROT_READ | libc::PROT_EXEC, libc::MAP_PRIVATE, numbers_at - PAGE);
        let data = map(base + PAGE, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, numbers_at);
        self.run(&[code, data], b"")?;
        let started = self.start(file, numbers_at, base);
        if started.is_err() {
            let _ = file.write_all_at(&1_u32.to_le_bytes(), numbers_at + given::CANCEL as u64);
            if !self.is_committed {
                let unmap = Step::Kernel(libc::SYS_munmap, numbers([base, 2 * PAGE, 0, 0, 0, 0]));
                let _ = self.run(&[unmap], b"");
            }
        }
        started
    }

    fn start(&mut self, file: &File, numbers_at: u64, base: u64) -> Result<(), Refusal> {
        let until = Instant::now() + self.patience;
        let is_there =
            |at: u64, maps: &Maps| maps.at(at).is_some_and(|map| map.path.contains("memfd:gputrace-library"));
        loop {
            let maps = self.maps()?;
            if is_there(base, &maps) && is_there(base + PAGE, &maps) {
                break;
            }
            self.wait(
                until,
                "it could not map two pages (a limit on its memory?), or its thread went elsewhere",
            )?;
        }
        let create = self.numbers.iter().find(|(place, _)| *place == given::THREAD).map_or(0, |it| it.1);
        let thread = base + PAGE + given::THREAD as u64;
        let before = threads::listed(self.pid);
        let ([usual, stack], none) = (self.attributes, Argument::Number(0));
        // They lie on the borrowed thread's stack: `pthread_create` looks at them once more when the new thread may be over, and has
        // unmapped its page.
        let usual = Step::Function(usual, [Argument::Text, none, none, none]);
        let stack = Step::Function(stack, [Argument::Text, Argument::Number(STACK), none, none]);
        let make = Step::Function(
            create,
            [Argument::Number(thread), Argument::Text, Argument::Number(base), Argument::Number(base + PAGE)],
        );
        // Says that the call before is over.
        let clock = [libc::CLOCK_MONOTONIC as u64, base + PAGE + given::TIME as u64, 0, 0, 0, 0];
        let clock = Step::Kernel(libc::SYS_clock_gettime, numbers(clock));
        self.run(&[usual, stack, make, clock], &[0; ATTRIBUTES])?;
        self.is_committed = true;
        let until = Instant::now() + self.patience;
        while state(file, numbers_at) == 0 {
            let is_over = number(file, numbers_at + given::TIME as u64) != 0;
            let is_new = |thread: &u32| !before.contains(thread);
            let no = "it could not start a thread (a limit on its threads or memory?)";
            if is_over && state(file, numbers_at) == 0 && !threads::listed(self.pid).iter().any(is_new) {
                self.is_committed = state(file, numbers_at) != 0;
                return Err(self.no(no));
            }
            self.wait(until, no)?;
        }
        Ok(())
    }

    /// Has a thread of the process make these calls. They are made when this returns, or soon.
    fn run(&self, steps: &[Step], text: &[u8]) -> Result<(), Refusal> {
        let until = Instant::now() + self.patience;
        let mut patience = Duration::from_millis(20);
        loop {
            refuse_filtered(self.pid)?;
            let maps = self.maps()?;
            let ground = self.ground();
            let lend_by = |thread, chosen| {
                // A thread that must not be interrupted again is let go by the end of the one that holds it.
                apart(|| match ground.borrow(thread, chosen, &maps, patience) {
                    Found::Yes(borrowed) => {
                        let (is_lent, since) = (self.lend(thread, &borrowed, steps, text), borrowed.since);
                        drop(borrowed);
                        STILL.note(since);
                        is_lent
                    }
                    Found::NotNow => Ok(false),
                    // So the kernel says of a thread that has just ended, too (ptrace_attach: `task->exit_state`).
                    Found::Refused(Errno::PERM) if crate::process::is_going(thread) => Ok(false),
                    Found::Refused(Errno::PERM) => Err(self.no(&why_untraceable(self.pid))),
                    Found::Refused(error) => Err(self.no(&format!("ptrace: {error}"))),
                })
                .unwrap_or_else(|error| Err(self.no(&format!("gputrace cannot start a thread: {error}"))))
            };
            let Sorted { waiting, running, anew } = Sorted::of(self.pid);
            let running = std::iter::once(running).flat_map(|them| {
                let mut writers = self.writers.lock().unwrap_or_else(PoisonError::into_inner);
                threads::without_writers(self.pid, them, &mut writers)
            });
            let running = running.map(|thread| (thread, Chosen { effect: None, until: None }));
            for (thread, chosen) in waiting.into_iter().chain(running) {
                if lend_by(thread, chosen)? {
                    return Ok(());
                }
                if Instant::now() >= until {
                    break;
                }
            }
            let watched = patience.min(until.saturating_duration_since(Instant::now()));
            if !anew.is_empty()
                && let Some((thread, chosen)) = threads::just_begun(self.pid, &anew, watched, LOOK_EVERY)
            {
                if lend_by(thread, chosen)? {
                    return Ok(());
                }
                // Its call was made again, which must not pass for another one that has just begun.
                std::thread::sleep(2 * threads::JUST);
            }
            patience = Duration::from_millis(500);
            self.wait(until, "no thread reached a point where gputrace could use it for a moment (threads were in the loader, an allocator, a signal handler or other libraries, or waited in calls that must not be interrupted): try again later")?;
        }
    }

    /// Gives the thread its calls; whether that was possible. If not, nothing was done.
    fn lend(
        &self,
        thread: u32,
        borrowed: &threads::Borrowed,
        steps: &[Step],
        text: &[u8],
    ) -> Result<bool, Refusal> {
        let (held, registers) = (&borrowed.held, &borrowed.registers);
        let chain = || {
            let (mask, extended) = (held.signal_mask().ok()?, held.extended_state().ok()?);
            let chain = chain::chain(steps, text, self.pieces, registers, mask, &extended)?;
            // The thread stands still, so its process lives: whether it is the one whose memory this is, can be known now.
            (began(self.pid).ok()? == self.began).then_some(chain)
        };
        let Some(chain) = chain() else { return Ok(false) };
        // Below what the thread uses, and nobody else's.
        let path = format!("/proc/{}/task/{thread}/mem", self.pid);
        let own = OpenOptions::new().read(true).write(true).open(path);
        if own.and_then(|own| own.write_all_at(&chain.bytes, chain.at)).is_err() {
            return Ok(false);
        }
        // What is known of the process was read from the memory that it had at first. If it has executed another program since, maybe one
        // with other rights, that memory may live on in a process that shared it; the calls would lead to anywhere in the new one.
        if image::bytes(&self.memory, chain.at, chain.bytes.len()).as_ref() != Some(&chain.bytes) {
            return Err(self.no("it has executed another program meanwhile: try again"));
        }
        Ok(held.set_registers(&chain::begin(&chain, self.pieces, registers)).is_ok())
    }

    fn ground(&self) -> Ground<'_> {
        Ground { pid: self.pid, memory: &self.memory, c_library: &self.c_library, pieces: self.pieces }
    }

    fn maps(&self) -> Result<Maps, Refusal> {
        Maps::of(self.pid).ok_or(Refusal::Gone(self.pid))
    }

    fn wait(&self, until: Instant, why: &str) -> Result<(), Refusal> {
        if !Path::new(&format!("/proc/{}/maps", self.pid)).exists() {
            return Err(Refusal::Gone(self.pid));
        }
        if Instant::now() >= until {
            return Err(self.no(why));
        }
        std::thread::sleep(LOOK_EVERY);
        Ok(())
    }

    fn no(&self, why: &str) -> Refusal {
        Refusal::NotLate { pid: self.pid, why: why.to_owned() }
    }
}

impl Begun {
    /// How far it is.
    pub(crate) fn said(&self) -> Said {
        let mut page = vec![0; PAGE as usize];
        if self.file.read_exact_at(&mut page, self.at).is_err() {
            return Said::NotYet;
        }
        match state(&self.file, self.at) {
            2 => Said::Answer(image::word(&page, given::RESULT).unwrap_or(0)),
            3 => {
                let text = &page[given::TEXT..given::TEXT + given::TEXT_BYTES];
                let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
                Said::Failed(String::from_utf8_lossy(text).into_owned())
            }
            _ => Said::NotYet,
        }
    }

    /// Nobody waits for it any more: what has not begun shall not.
    pub(crate) fn cancel(&self) {
        let _ = self.file.write_all_at(&1_u32.to_le_bytes(), self.at + given::CANCEL as u64);
    }
}

fn state(file: &File, at: u64) -> u32 {
    number(file, at + given::STATE as u64) as u32
}

fn number(file: &File, at: u64) -> u64 {
    let mut bytes = [0; 8];
    let is_read = file.read_exact_at(&mut bytes, at).is_ok();
    if is_read { u64::from_le_bytes(bytes) } else { 0 }
}

fn numbers(arguments: [u64; 6]) -> [Argument; 6] {
    arguments.map(Argument::Number)
}

/// A name that no other memory file has: a process may hold many that are called as ours are.
fn unique() -> io::Result<String> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(format!("{}.{:016x}", late::NAME.to_string_lossy(), u64::from_le_bytes(bytes)))
}

/// When the process began.
fn began(pid: u32) -> Result<u64, Refusal> {
    crate::process::stat(pid).map(|stat| stat.start_time).ok_or(Refusal::Gone(pid))
}

/// What can be seen without touching it.
fn refuse_by_status(pid: u32) -> Result<(), Refusal> {
    let status = opened::text_of_proc(format!("/proc/{pid}/status")).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Refusal::Gone(pid),
        _ => Refusal::NotLate { pid, why: error.to_string() },
    })?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map_or("", str::trim);
    let no = |why: String| Err(Refusal::NotLate { pid, why });
    if pid == std::process::id() {
        return no("that is this gputrace process".to_owned());
    }
    match field("State:").chars().next() {
        Some('Z' | 'X') => return Err(Refusal::Gone(pid)),
        Some('T' | 't') => return no("it is stopped: `kill -CONT` resumes it".to_owned()),
        _ => {}
    }
    if !matches!(field("TracerPid:"), "" | "0") {
        return no(format!(
            "process {} already traces it (a debugger, strace): end that first",
            field("TracerPid:")
        ));
    }
    refuse_filtered(pid)?;
    if field("x86_Thread_features:").contains("shstk") {
        return no("it has a shadow stack (glibc.cpu.x86_shstk): start it with LD_PRELOAD".to_owned());
    }
    if shares_memory_with_parent(pid, field("PPid:")) {
        return no("it is between vfork and exec: try again".to_owned());
    }
    Ok(())
}

/// A filter may end the process for what a borrowed thread is given to do. Threads may have filters of their own.
fn refuse_filtered(pid: u32) -> Result<(), Refusal> {
    if !threads::listed(pid).into_iter().any(|thread| threads::is_filtered(pid, thread)) {
        return Ok(());
    }
    let why = "it is under a seccomp filter (as in most containers), where the library disables itself: start the container with --security-opt seccomp=unconfined";
    Err(Refusal::NotLate { pid, why: why.to_owned() })
}

/// As a child does between `vfork` and `exec`: what is done to its memory would be done to its parent's.
fn shares_memory_with_parent(pid: u32, parent: &str) -> bool {
    parent.parse().is_ok_and(|parent: u32| parent != 0 && super::ptrace::share_memory(pid, parent))
}

/// Why the kernel does not let us.
fn why_untraceable(pid: u32) -> String {
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    match scope.trim() {
        "1" => "only its parent and root may do this (kernel.yama.ptrace_scope=1): run this as root, or with CAP_SYS_PTRACE".to_owned(),
        "2" => "only root may do this (kernel.yama.ptrace_scope=2)".to_owned(),
        "3" => "not allowed on this machine (kernel.yama.ptrace_scope=3): start it with LD_PRELOAD and GPUTRACE=dormant".to_owned(),
        _ => crate::attach::why_hidden(pid),
    }
}

/// All that is done with a library in foreign memory, without a process: how many functions it has.
#[cfg(any(test, fuzzing))]
pub(crate) fn look_at_image(memory: &File) -> usize {
    let Some(image) = Image::read(memory, 0) else { return 0 };
    let _ = image.find(memory, &[0x0f, 0x05, 0xc3]);
    image.n_functions()
}
