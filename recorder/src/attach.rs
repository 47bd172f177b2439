//! Attaching to a process whose library sleeps: finding its control page, asking, and reading its answer. Also what can be said
//! of the processes of this machine that use a GPU.
//!
//! The page is found among the descriptors of the process, which its own user may look at where the process is dumpable
//! (`PTRACE_MODE_READ`; yama's `ptrace_scope` does not matter for that). Everything on it was written by the process, and is
//! checked as any foreign text is; that it is a page at all, by [`opened`].

use crate::card::Holder;
use crate::gpus::Gpus;
use crate::opened::{self, Access, Descriptors, Expected, Identity, users_of};
use crate::patient::{self, Answered as Asked};
use crate::{late, process, room};
use gputrace_ring::control::{self, Control};
use gputrace_ring::variables;
use gputrace_schemas::reader::looks_like_a_trace;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::mem::offset_of;
use std::os::unix::fs::{DirEntryExt, FileExt, MetadataExt};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How often the answer is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Why nobody can attach.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// There is no such process.
    #[error("process {0} does not exist")]
    Gone(u32),
    /// The kernel does not let us look.
    #[error("cannot read the descriptors of process {pid}: {why}")]
    Hidden {
        /// The process.
        pid: u32,
        /// What to change.
        why: String,
    },
    /// The library is not there, or does not sleep.
    #[error("{0}")]
    NotAsleep(String),
    /// The library is not there, and cannot be brought there.
    #[error("process {pid} was started without libgputrace.so, which cannot be loaded now: {why}")]
    NotLate {
        /// The process.
        pid: u32,
        /// Why, and what to change.
        why: String,
    },
    /// The library is not there, and was not asked to come.
    #[error(
        "process {0} has not loaded libgputrace.so: to attach later, start it with LD_PRELOAD=$(gputrace library) and GPUTRACE=dormant"
    )]
    NotLoaded(u32),
    /// Another attacher holds the page.
    #[error("another gputrace is attaching to or detaching from process {0}: try again when it is done")]
    Busy(u32),
    /// It is awake, or asleep, already.
    #[error("{0}")]
    Already(String),
    /// It answered that it cannot.
    #[error("process {pid} could not start a recording: {why}")]
    Refused {
        /// The process.
        pid: u32,
        /// Its own words.
        why: String,
    },
    /// It has too little memory for a recording.
    #[error("process {pid} cannot be recorded now: {why}")]
    NoRoom {
        /// The process.
        pid: u32,
        /// Why, and what to change.
        why: String,
    },
    /// The variables are too long for the page.
    #[error("the pattern and the options are too long: {0} bytes of at most {max}", max = control::OPTIONS - 2)]
    TooLong(usize),
    /// The page could not be read or written.
    #[error("the control page of process {pid}: {source}")]
    Page {
        /// The process.
        pid: u32,
        /// What the system said.
        source: io::Error,
    },
}

/// A control page that was found.
#[derive(Debug)]
pub struct Page {
    pid: u32,
    file: File,
}

/// The fate of a request.
#[derive(Debug, PartialEq, Eq)]
pub enum Answered {
    /// It was done.
    Yes,
    /// The process has made no call since: the wish stands, and is followed with its next.
    NotYet,
    /// The process ended first.
    Gone,
}

/// How a library that can be attached to stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stands {
    /// Nobody records.
    Asleep,
    /// A recorder is at work, or soon will be.
    Awake,
    /// On the way from one to the other.
    Changing,
}

impl Page {
    /// Of this process.
    ///
    /// # Errors
    /// There is none, or it cannot be had: why, and what to do.
    pub fn find(pid: u32) -> Result<Page, Refusal> {
        // A dead one that nobody has waited for has a folder still, and nothing in it.
        if is_over(pid) {
            return Err(Refusal::Gone(pid));
        }
        let descriptors = Descriptors::of(pid);
        let named = format!("/memfd:{}", control::NAME.to_string_lossy());
        let numbers = match descriptors.named(&named) {
            Ok(numbers) => numbers,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Refusal::Gone(pid)),
            Err(_) => return Err(Refusal::Hidden { pid, why: why_hidden(pid) }),
        };
        let users = users_of(pid);
        for number in numbers {
            // A link's text is whatever the process wants. What counts is the file: memory, of the page's size, and such as the
            // process could write to without us.
            let Ok(taken) = descriptors.take(number) else { continue };
            // A process that has changed its user since has its page still, and has it mapped: another's, that it was sent, it has not.
            let expected = Expected::memory().with_bytes(control::BYTES as u64..=control::BYTES as u64);
            let is_mapped = || taken.identity().is_ok_and(|it| is_mapped(pid, it.inode()));
            let is_own = taken.is_writable() && is_mapped();
            let expected = if is_own { expected } else { expected.of(&users) };
            // Opened anew: a lock by the process's own descriptor would outlive us.
            let Ok(file) = taken.open(Access::ReadWrite, &expected) else { continue };
            let page = Page { pid, file };
            if page.is_of_process() {
                return Ok(page);
            }
        }
        Err(why_not(pid))
    }

    /// Of the right kind, and not one that the process has inherited.
    fn is_of_process(&self) -> bool {
        let mut magic = [0; 8];
        let is_read = self.file.read_exact_at(&mut magic, offset_of!(Control, magic) as u64).is_ok();
        let own = own_number(self.pid).unwrap_or(self.pid);
        is_read
            && u64::from_ne_bytes(magic) == control::MAGIC
            && self.word(offset_of!(Control, version)).is_ok_and(|it| it == control::VERSION)
            && self.word(offset_of!(Control, pid)).is_ok_and(|it| it == own)
    }

    fn word(&self, at: usize) -> Result<u32, Refusal> {
        let mut bytes = [0; 4];
        let read = self.file.read_exact_at(&mut bytes, at as u64);
        read.map_err(|source| Refusal::Page { pid: self.pid, source })?;
        Ok(u32::from_ne_bytes(bytes))
    }

    fn wide(&self, at: usize) -> u64 {
        let mut bytes = [0; 8];
        let is_read = self.file.read_exact_at(&mut bytes, at as u64).is_ok();
        if is_read { u64::from_ne_bytes(bytes) } else { 0 }
    }

    fn write(&self, at: usize, bytes: &[u8]) -> Result<(), Refusal> {
        let written = self.file.write_all_at(bytes, at as u64);
        written.map_err(|source| Refusal::Page { pid: self.pid, source })
    }

    /// Whether the library came into the process late.
    #[must_use]
    pub fn is_late(&self) -> bool {
        self.word(offset_of!(Control, is_late)).is_ok_and(|it| it == 1)
    }

    /// Whether the library came into the process late, and no call of the program's leads to it: then nobody hears a request.
    #[must_use]
    pub fn is_unheard(&self) -> bool {
        self.is_late() && self.word(offset_of!(Control, words)).is_ok_and(|it| it == 0)
    }

    /// How the library stands.
    #[must_use]
    pub fn stands(&self) -> Stands {
        match self.word(offset_of!(Control, state)) {
            Ok(control::AWAKE) => Stands::Awake,
            Ok(control::CHANGING | control::ENDING) | Err(_) => Stands::Changing,
            Ok(_) => Stands::Asleep,
        }
    }

    /// Allocations that it knows to live, and those that it had no room for, as of its last answer.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        (self.wide(offset_of!(Control, known)), self.wide(offset_of!(Control, unknown)))
    }

    /// The recorder of the session, as the process numbers it.
    #[must_use]
    pub fn recorder(&self) -> Option<u32> {
        self.word(offset_of!(Control, recorder)).ok().filter(|recorder| *recorder != 0)
    }

    /// The trace that the recorder writes, where it can be seen among its descriptors.
    #[must_use]
    pub fn trace(&self) -> Option<PathBuf> {
        self.trace_and_file().map(|(trace, _)| trace)
    }

    /// The same, and which file that is. The name is one in the recorder's own file system, and the process may give it to another file.
    #[must_use]
    pub fn trace_and_file(&self) -> Option<(PathBuf, Identity)> {
        let recorder = self.recorder()?;
        // The process may name any: one of other users is not its recorder.
        let users = users_of(recorder);
        if users.is_empty() || users_of(self.pid) != users {
            return None;
        }
        let descriptors = Descriptors::of(recorder);
        for number in descriptors.named("/").ok()? {
            let Ok(target) = fs::read_link(format!("/proc/{recorder}/fd/{number}")) else { continue };
            let is_named_so = target.extension().is_some_and(|ending| ending == "gtr");
            // A process can name any file by a descriptor, also one that it may not read. A recorder can write to its trace.
            let Ok(taken) = descriptors.take(number) else { continue };
            let expected = Expected::regular();
            let expected = if taken.is_writable() { expected } else { expected.of(&users) };
            if let Ok(file) = taken.open(Access::Read, &expected)
                && is_trace(&file, is_named_so)
            {
                return Some((target, Identity::of(&file).ok()?));
            }
        }
        None
    }

    /// The ring of the session that is on; `None` where there is none.
    #[must_use]
    pub fn ring(&self) -> Option<PathBuf> {
        (self.stands() == Stands::Awake).then(|| PathBuf::from(self.answer()))
    }

    /// The text of the last answer.
    fn answer(&self) -> String {
        let mut bytes = [0; control::ANSWER];
        let n = self.file.read_at(&mut bytes, offset_of!(Control, answer) as u64).unwrap_or(0);
        let text = bytes[..n].split(|byte| *byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(text).into_owned()
    }

    /// Has a session begin, with these variables before the process's own.
    ///
    /// # Errors
    /// It cannot: why.
    pub fn wake(&self, variables: &[(String, String)], patience: Duration) -> Result<Answered, Refusal> {
        self.lock()?;
        if self.stands() == Stands::Awake {
            let pid = self.pid;
            let text = format!("process {pid} is already being recorded: `gputrace detach {pid}` ends that");
            return Err(Refusal::Already(text));
        }
        let ring = room::for_session(self.pid).map_err(|why| Refusal::NoRoom { pid: self.pid, why })?;
        let ring =
            ring.map(|bytes| (variables::RING_BYTES.to_string_lossy().into_owned(), bytes.to_string()));
        let mut options = Vec::new();
        for (name, value) in variables.iter().chain(&ring) {
            options.extend_from_slice(format!("{name}={value}").as_bytes());
            options.push(0);
        }
        if options.len() > control::OPTIONS - 2 {
            return Err(Refusal::TooLong(options.len()));
        }
        options.resize(control::OPTIONS, 0);
        self.write(offset_of!(Control, options), &options)?;
        let answered = self.ask(control::WAKE, patience)?;
        if answered == Answered::Yes && self.word(offset_of!(Control, state))? == control::REFUSED {
            return Err(Refusal::Refused { pid: self.pid, why: self.answer() });
        }
        Ok(answered)
    }

    /// Whether the ring of a session that is over is mapped still: a thread was in the middle of an event.
    #[must_use]
    pub fn has_left(&self) -> bool {
        self.wide(offset_of!(Control, left)) != 0
    }

    /// Once a session has ended: has the process try again to unmap its ring, as long as a thread of it was in the middle of an
    /// event, and calls of the program hear us.
    pub fn tidy(&self, patience: Duration) {
        let until = Instant::now() + patience;
        while self.has_left()
            && !self.is_unheard()
            && self.stands() == Stands::Asleep
            && Instant::now() < until
        {
            let left = until.saturating_duration_since(Instant::now());
            if !matches!(self.ask(control::SLEEP, left), Ok(Answered::Yes)) {
                break;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        // Nobody waits for it any more.
        let _ = self.write(offset_of!(Control, asked), &control::NOTHING.to_ne_bytes());
    }

    /// Has the session end.
    ///
    /// # Errors
    /// There is none, or the page cannot be written.
    pub fn sleep(&self, patience: Duration) -> Result<Answered, Refusal> {
        self.lock()?;
        if self.stands() == Stands::Asleep {
            // A wish to wake that nobody has followed yet is taken back.
            self.write(offset_of!(Control, asked), &control::NOTHING.to_ne_bytes())?;
            return Err(Refusal::Already(format!("process {} is not being recorded", self.pid)));
        }
        self.ask(control::SLEEP, patience)
    }

    /// Ends by itself with the attacher, however that ends.
    fn lock(&self) -> Result<(), Refusal> {
        match flock(&self.file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(()),
            Err(Errno::WOULDBLOCK) => Err(Refusal::Busy(self.pid)),
            Err(source) => Err(Refusal::Page { pid: self.pid, source: source.into() }),
        }
    }

    fn ask(&self, wish: u32, patience: Duration) -> Result<Answered, Refusal> {
        let answers = offset_of!(Control, answers);
        let before = self.word(answers)?;
        self.write(offset_of!(Control, asked), &wish.to_ne_bytes())?;
        let until = Instant::now() + patience;
        loop {
            // An answer may be one to an attacher that was killed.
            let state = self.word(offset_of!(Control, state))?;
            if self.word(answers)? != before && is_answer(wish, state) {
                return Ok(Answered::Yes);
            }
            if is_over(self.pid) {
                return Ok(Answered::Gone);
            }
            if Instant::now() >= until {
                return Ok(Answered::NotYet);
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// Whether a process that stands so has done what was asked, or has said that it cannot.
fn is_answer(wish: u32, state: u32) -> bool {
    let wanted = if wish == control::WAKE { control::AWAKE } else { control::ASLEEP };
    state == wanted || state == control::REFUSED || state == control::ENDING
}

/// Whether this is a trace, which may have any name; one that has just been begun is known by its name alone.
fn is_trace(file: &File, is_named_so: bool) -> bool {
    let mut first = [0; 8];
    is_named_so || (file.read_exact_at(&mut first, 0).is_ok() && looks_like_a_trace(&first))
}

/// Gone, or dead and not waited for.
pub(crate) fn is_over(pid: u32) -> bool {
    process::stat(pid).is_none_or(|stat| matches!(stat.state, 'Z' | 'X'))
}

/// The number by which the process knows itself: the last of those that namespaces give it.
fn own_number(pid: u32) -> Option<u32> {
    process::numbers_of(pid)?.last().copied()
}

fn field(pid: u32, name: &str) -> Option<String> {
    let status = opened::text_of_proc(format!("/proc/{pid}/status")).ok()?;
    Some(status.lines().find_map(|line| line.strip_prefix(name))?.trim().to_owned())
}

fn is_in_other_namespace(pid: u32) -> bool {
    let namespace = |who: &str| fs::read_link(format!("/proc/{who}/ns/user")).ok();
    // One that may not be asked about is another's.
    namespace(&pid.to_string()) != namespace("self")
}

/// What the process is permitted, a bit each (capabilities(7)).
pub(crate) fn capabilities(pid: u32) -> u64 {
    field(pid, "CapPrm:").and_then(|hexadecimal| u64::from_str_radix(&hexadecimal, 16).ok()).unwrap_or(0)
}

pub(crate) fn why_hidden(pid: u32) -> String {
    let uid = fs::metadata(format!("/proc/{pid}")).map(|data| data.uid()).ok();
    let ours = rustix::process::geteuid().as_raw();
    let real = field(pid, "Uid:").and_then(|line| line.split_whitespace().next()?.parse::<u32>().ok());
    match (uid, real) {
        (Some(0), Some(real)) if real == ours && ours != 0 => {
            "it is not dumpable (it changed its user, has extra privileges, or called prctl(PR_SET_DUMPABLE)): root can attach".to_owned()
        }
        (_, Some(real)) if real != ours => format!("it belongs to user {real}: attach as that user, or as root"),
        _ if is_in_other_namespace(pid) => {
            "it is in another user namespace (a rootless container): attach from inside it".to_owned()
        }
        _ if capabilities(pid) & !capabilities(std::process::id()) != 0 => {
            "it has capabilities that this shell lacks: attach as root, or from inside its container".to_owned()
        }
        _ => "attach as its user, in its user namespace, or as root".to_owned(),
    }
}

/// Whether a process has a page with this number in its memory.
fn is_mapped(pid: u32, inode: u64) -> bool {
    let maps = opened::text_of_proc(format!("/proc/{pid}/maps")).unwrap_or_default();
    let is_it = |line: &str| {
        let mut words = line.split_whitespace().skip(4);
        let number = words.next().and_then(|it| it.parse().ok());
        let name = words.next().and_then(|it| it.strip_prefix("/memfd:"));
        number == Some(inode) && name.is_some_and(|it| it == control::NAME.to_string_lossy())
    };
    maps.lines().any(is_it)
}

/// Why a process has no page.
fn why_not(pid: u32) -> Refusal {
    let maps = opened::text_of_proc(format!("/proc/{pid}/maps")).unwrap_or_default();
    if !maps.contains("libgputrace.so") {
        return Refusal::NotLoaded(pid);
    }
    let Reason { why, remedy } = reason(pid, &maps);
    Refusal::NotAsleep(format!("process {pid} cannot be attached to: {why}: {remedy}"))
}

/// Why a process cannot be attached to, and what to change.
struct Reason {
    why: String,
    remedy: String,
}

/// Of a process whose descriptors lead to no page of ours.
fn reason(pid: u32, maps: &str) -> Reason {
    let environment = opened::text_of_proc(format!("/proc/{pid}/environ")).unwrap_or_default();
    let variable =
        |name: &[u8]| environment.as_bytes().split(|byte| *byte == 0).find_map(|it| it.strip_prefix(name));
    let because = |why: &str, remedy: &str| Reason { why: why.to_owned(), remedy: remedy.to_owned() };
    if !maps.contains("libgputrace.so") {
        // What loads libraries at a start, and what calls it by its name.
        if !maps.contains("/ld-") && !maps.contains("/libc.so") && !maps.contains("/libc-") {
            return because(
                "it is statically linked, and loads no library at its start",
                "link it to the shared C library",
            );
        }
        if maps.contains("/ld-musl") {
            return because("its C library is musl", "use an image with glibc");
        }
        let preload = variable(b"LD_PRELOAD=").unwrap_or_default();
        if String::from_utf8_lossy(preload).contains("libgputrace") {
            return because(
                "LD_PRELOAD names libgputrace.so, but it was not loaded",
                "the path must exist where the process runs (in its container), for its processor, and the program must not have more rights than its user (setuid, file capabilities)",
            );
        }
        return because(
            "it has not loaded libgputrace.so",
            "to attach later, start it with LD_PRELOAD=$(gputrace library) and GPUTRACE=dormant",
        );
    }
    if variable(b"GPUTRACE=") != Some(b"dormant") {
        let is_recorded = maps.lines().any(is_ring);
        let how =
            if is_recorded { "it has been recorded since its start" } else { "its library is not dormant" };
        return because(how, "only a process started with GPUTRACE=dormant can be attached to");
    }
    if maps.contains(&*control::NAME.to_string_lossy()) {
        return because(
            "it closed the descriptor of its control page (it closes all descriptors that it does not know)",
            "it can no longer be reached: keep it from closing descriptors from 900 on",
        );
    }
    if field(pid, "Seccomp:").is_some_and(|mode| mode != "0") {
        return because(
            "it is under a seccomp filter, where the library disables itself",
            "start it without the filter, or record it from its start",
        );
    }
    because("it has no GPU memory yet", "attach once it has")
}

/// A line of `/proc/PID/maps` for a ring: of a file that had its name when it was mapped, of memory, or of a file that was named later. The
/// last is shown without its name for good.
fn is_ring(line: &str) -> bool {
    let is_named = line.contains("/gputrace.") && line.contains(".ring");
    is_named || line.ends_with(" /memfd:gputrace (deleted)") || is_ring_named_later(line)
}

fn is_ring_named_later(line: &str) -> bool {
    let mut words = line.split_whitespace();
    let (Some(inode), Some(path)) = (words.nth(4).and_then(|it| it.parse::<u64>().ok()), words.next()) else {
        return false;
    };
    let folder = ["/dev/shm", "/tmp"]
        .into_iter()
        .find(|folder| path.strip_prefix(folder).is_some_and(|name| name.starts_with("/#")));
    let entries = folder.and_then(|folder| fs::read_dir(folder).ok());
    entries.into_iter().flatten().flatten().any(|entry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        name.starts_with("gputrace.") && name.ends_with(".ring") && entry.ino() == inode
    })
}

/// A process that uses a GPU, or carries the library.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Seen {
    /// Its number here.
    pub pid: u32,
    /// By which it knows itself, where that is another: it runs in a container.
    pub own_pid: Option<u32>,
    /// Its name; empty where it may not be looked at.
    pub name: String,
    /// The user it belongs to.
    pub user: Option<u32>,
    /// How it stands, in a word.
    pub state: &'static str,
    /// Whether `attach` can begin a recording now.
    pub can_attach: bool,
    /// Why, in a sentence; `None` where there is nothing to explain.
    pub why: Option<String>,
    /// What to do, or to change.
    pub remedy: String,
    /// Where its recording goes, as far as that can be seen.
    pub trace: Option<PathBuf>,
    /// Bytes that it has on all GPUs, by NVML; `None` where NVML does not say.
    pub used: Option<u64>,
}

/// What [`processes`] found.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Listing {
    /// In the order of their numbers.
    pub processes: Vec<Seen>,
    /// Processes that may not be looked at, and of which NVML does not say that they have memory.
    pub n_unseen: usize,
    /// Processes that were not looked at, because others took all the time.
    pub not_reached: Vec<u32>,
}

/// The processes of this machine that have the driver, or the library, in their memory, or memory on a GPU, as far as we may see.
#[must_use]
pub fn processes() -> Listing {
    let own = std::process::id();
    let holders = holders();
    let numbers = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let mut numbers: Vec<u32> = numbers.filter(|pid| *pid != own).collect();
    // Of other PID namespaces than ours: NVML knows them by the host's numbers.
    numbers.extend(holders.keys());
    numbers.sort_unstable();
    numbers.dedup();
    let mut listing = Listing::default();
    let looks = patient::ask(numbers.clone(), ALL_LOOKED_AT, looked_at);
    for (pid, look) in numbers.into_iter().zip(looks) {
        let used = holders.get(&pid).copied().flatten();
        let look = match look {
            Asked::Here(look) => look,
            Asked::Late => Look::Unanswered,
            Asked::NotAsked => {
                listing.not_reached.push(pid);
                continue;
            }
        };
        match look {
            Look::At(mut seen) => {
                seen.used = used;
                listing.processes.push(seen);
            }
            Look::NotAllowed if holders.contains_key(&pid) => {
                let mut seen = Seen::of(pid);
                (seen.state, seen.used) = ("hidden", used);
                seen.why = Some("its memory and descriptors cannot be read".to_owned());
                seen.remedy = why_hidden(pid);
                listing.processes.push(seen);
            }
            Look::NotAllowed => listing.n_unseen += 1,
            Look::Unanswered => {
                let mut seen = Seen::bare(pid);
                (seen.state, seen.used) = ("unanswered", used);
                seen.why = Some("reading its memory and descriptors takes too long".to_owned());
                "try again; if it stays so, the process or its file system hangs"
                    .clone_into(&mut seen.remedy);
                listing.processes.push(seen);
            }
            Look::Gone if holders.contains_key(&pid) => {
                let mut seen = Seen::of(pid);
                (seen.state, seen.used) = ("elsewhere", used);
                seen.why = Some("it has GPU memory, and is in another PID namespace".to_owned());
                "run this on the host, or in its container".clone_into(&mut seen.remedy);
                listing.processes.push(seen);
            }
            Look::Gone | Look::NoGpu => {}
        }
    }
    listing
}

/// Who has memory on a GPU, and how much where NVML says so. NVML's numbers are those of the host: elsewhere they are anybody's.
fn holders() -> HashMap<u32, Option<u64>> {
    /// `PROC_PID_INIT_INO` (linux/proc_ns.h).
    const HOST: u64 = 0xEFFF_FFFC;
    if !fs::metadata("/proc/self/ns/pid").is_ok_and(|namespace| namespace.ino() == HOST) {
        return HashMap::new();
    }
    let mut found = HashMap::new();
    for holder in
        Gpus::open().map(|gpus| gpus.read()).unwrap_or_default().into_iter().flat_map(|gpu| gpu.holders)
    {
        for Holder { pid, bytes, .. } in holder {
            let used: &mut Option<u64> = found.entry(pid).or_insert(Some(0));
            *used = used.zip(bytes).map(|(used, bytes)| used.saturating_add(bytes));
        }
    }
    found
}

/// How long all processes are looked at together.
const ALL_LOOKED_AT: Duration = Duration::from_secs(5);

enum Look {
    At(Seen),
    /// It takes too long.
    Unanswered,
    NotAllowed,
    NoGpu,
    Gone,
}

impl Seen {
    fn of(pid: u32) -> Seen {
        let user = field(pid, "Uid:").and_then(|line| line.split_whitespace().next()?.parse().ok());
        let name = opened::text_of_proc(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned();
        Seen { pid, own_pid: own_number(pid).filter(|own| *own != pid), name, user, ..Seen::bare(pid) }
    }

    /// By its number alone.
    fn bare(pid: u32) -> Seen {
        Seen {
            pid,
            own_pid: None,
            name: String::new(),
            user: None,
            state: "",
            can_attach: false,
            why: None,
            remedy: String::new(),
            trace: None,
            used: None,
        }
    }
}

fn looked_at(pid: u32) -> Look {
    let maps = match opened::text_of_proc(format!("/proc/{pid}/maps")) {
        Ok(maps) => maps,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Look::NotAllowed,
        Err(_) => return Look::Gone,
    };
    let has_library = maps.contains("libgputrace.so");
    if !has_library && !maps.contains("libcuda.so") && !maps.contains("/dev/nvidia") {
        return Look::NoGpu;
    }
    let mut seen = Seen::of(pid);
    match Page::find(pid) {
        Ok(page) => match page.stands() {
            Stands::Asleep => {
                (seen.state, seen.can_attach) = ("dormant", true);
                seen.remedy = format!("gputrace attach {pid}");
            }
            Stands::Awake => {
                (seen.state, seen.trace) = ("attached", page.trace());
                seen.remedy = format!("gputrace detach {pid}");
            }
            Stands::Changing => {
                seen.state = "changing";
                seen.why = Some("a recording of it is starting or ending".to_owned());
                "try again".clone_into(&mut seen.remedy);
            }
        },
        Err(Refusal::NotAsleep(_)) if maps.lines().any(is_ring) => {
            seen.state = "recorded";
            seen.why = Some("it has been recorded since its start".to_owned());
            "gputrace top shows it".clone_into(&mut seen.remedy);
        }
        Err(Refusal::NotLoaded(_)) => match late::possible(pid) {
            Ok(()) => {
                (seen.state, seen.can_attach) = ("late", true);
                seen.remedy = format!("gputrace attach {pid} loads the library");
            }
            Err(cannot) => {
                let Reason { why, remedy } = reason(pid, &maps);
                let cannot = if let Refusal::NotLate { why, .. } = cannot { why } else { cannot.to_string() };
                seen.state = "not loaded";
                (seen.why, seen.remedy) =
                    (Some(format!("{why}, and the library cannot be loaded now: {cannot}")), remedy);
            }
        },
        Err(Refusal::NotAsleep(_)) => {
            let Reason { why, remedy } = reason(pid, &maps);
            seen.state = "loaded";
            (seen.why, seen.remedy) = (Some(why), remedy);
        }
        Err(Refusal::Gone(_)) => return Look::Gone,
        Err(_) => {
            seen.state = "hidden";
            seen.why = Some("its descriptors cannot be read".to_owned());
            seen.remedy = why_hidden(pid);
        }
    }
    Look::At(seen)
}
