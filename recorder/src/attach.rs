//! Attaching to a process whose library sleeps: finding its control page, asking, and reading its answer. Also what can be said
//! of the processes of this machine that use a GPU.
//!
//! The page is found among the descriptors of the process, which its own user may look at where the process is dumpable
//! (`PTRACE_MODE_READ`; yama's `ptrace_scope` does not matter for that). Everything on it was written by the process, and is
//! checked as any foreign text is.

use crate::{late, process};
use gputrace_ring::control::{self, Control};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::mem::offset_of;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How often the answer is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Why nobody can attach.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// There is no such process.
    #[error("process {0} does not exist (any more)")]
    Gone(u32),
    /// The kernel does not let us look.
    #[error("the descriptors of process {pid} may not be read: {why}")]
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
    #[error("process {pid} was started without libgputrace.so, and cannot be given it now: {why}")]
    NotLate {
        /// The process.
        pid: u32,
        /// Why, and what to change.
        why: String,
    },
    /// The library is not there, and was not asked to come.
    #[error(
        "process {0} has not loaded libgputrace.so: start it with LD_PRELOAD=libgputrace.so and GPUTRACE=dormant to be able to attach later"
    )]
    NotLoaded(u32),
    /// Another attacher holds the page.
    #[error(
        "another gputrace is attaching to process {0}, or detaching, just now: try again when it is done"
    )]
    Busy(u32),
    /// It is awake, or asleep, already.
    #[error("{0}")]
    Already(String),
    /// It answered that it cannot.
    #[error("process {pid} could not begin a recording: {why}")]
    Refused {
        /// The process.
        pid: u32,
        /// Its own words.
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

/// What became of a wish.
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
        let numbers = match fs::read_dir(format!("/proc/{pid}/fd")) {
            Ok(numbers) => numbers,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Refusal::Gone(pid)),
            Err(_) => return Err(Refusal::Hidden { pid, why: why_hidden(pid) }),
        };
        let named = format!("/memfd:{}", control::NAME.to_string_lossy());
        for number in numbers.flatten() {
            let leads_there =
                fs::read_link(number.path()).is_ok_and(|to| to.to_string_lossy().starts_with(&named));
            if !leads_there {
                continue;
            }
            let Ok(file) = OpenOptions::new().read(true).write(true).open(number.path()) else { continue };
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

    /// Whether the library came into the process late, and no call of the program's leads to it: then nobody hears a wish.
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
        let recorder = self.recorder()?;
        let open = fs::read_dir(format!("/proc/{recorder}/fd")).ok()?;
        let targets = open.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
        targets
            .into_iter()
            .find(|target| target.extension().is_some_and(|it| it == "gtr") || is_trace(target))
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
            let text = format!("process {pid} is being recorded already: `gputrace detach {pid}` ends that");
            return Err(Refusal::Already(text));
        }
        let mut options = Vec::new();
        for (name, value) in variables {
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
            if self.word(answers)? != before {
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

/// Any name that a pattern may give.
fn is_trace(path: &std::path::Path) -> bool {
    let mut first = [0; 8];
    let is_file = path.metadata().is_ok_and(|data| data.is_file());
    is_file
        && File::open(path).and_then(|file| file.read_exact_at(&mut first, 0)).is_ok()
        && first.starts_with(b"gputrace")
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
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    Some(status.lines().find_map(|line| line.strip_prefix(name))?.trim().to_owned())
}

pub(crate) fn why_hidden(pid: u32) -> String {
    let uid = fs::metadata(format!("/proc/{pid}")).map(|data| data.uid()).ok();
    let ours = rustix::process::geteuid().as_raw();
    let real = field(pid, "Uid:").and_then(|line| line.split_whitespace().next()?.parse::<u32>().ok());
    match (uid, real) {
        (Some(0), Some(real)) if real == ours => {
            "it is not dumpable (it changed its user, has rights of its own, or called prctl(PR_SET_DUMPABLE)): root may".to_owned()
        }
        (_, Some(real)) if real != ours => format!("it belongs to user {real}: attach as that user, or as root"),
        _ => "attach as its user, in its user namespace, or as root".to_owned(),
    }
}

/// Why a process has no page.
fn why_not(pid: u32) -> Refusal {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let switch = environment.split(|byte| *byte == 0).find_map(|it| it.strip_prefix(b"GPUTRACE="));
    if !maps.contains("libgputrace.so") {
        return Refusal::NotLoaded(pid);
    }
    if switch != Some(b"dormant") {
        let is_recorded = maps.lines().any(is_ring);
        let how =
            if is_recorded { "it is being recorded since its start" } else { "its library does not sleep" };
        return Refusal::NotAsleep(format!(
            "{how}: only a process with GPUTRACE=dormant can be attached to (process {pid})"
        ));
    }
    if maps.contains(&*control::NAME.to_string_lossy()) {
        return Refusal::NotAsleep(format!(
            "process {pid} has closed the descriptor of its control page (it closes all that it does not know): it cannot be reached"
        ));
    }
    Refusal::NotAsleep(format!("process {pid} has no memory of a GPU yet: it can be attached to once it has"))
}

/// A line of `/proc/PID/maps` for a ring.
fn is_ring(line: &str) -> bool {
    line.contains("/gputrace.") && line.contains(".ring")
}

/// A process that uses a GPU, or carries the library.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Seen {
    /// Its number here.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// How it stands, in a word.
    pub state: &'static str,
    /// Why, or what to do, in a sentence.
    pub what: String,
}

/// The processes of this machine that have the driver, or the library, in their memory, as far as we may see.
#[must_use]
pub fn processes() -> Vec<Seen> {
    let own = std::process::id();
    let numbers = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let mut numbers: Vec<u32> = numbers.filter(|pid| *pid != own).collect();
    numbers.sort_unstable();
    numbers.into_iter().filter_map(seen).collect()
}

fn seen(pid: u32) -> Option<Seen> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    let has_library = maps.contains("libgputrace.so");
    let has_driver = maps.contains("libcuda.so") || maps.contains("/dev/nvidia");
    if !has_library && !has_driver {
        return None;
    }
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned();
    let (state, what) = match Page::find(pid) {
        Ok(page) => match page.stands() {
            Stands::Asleep => ("dormant", format!("gputrace attach {pid}")),
            Stands::Awake => {
                let trace = page.trace().map(|it| format!("to {}; ", it.display())).unwrap_or_default();
                ("attached", format!("{trace}gputrace detach {pid}"))
            }
            Stands::Changing => ("changing", "a thread of it begins or ends a recording".to_owned()),
        },
        Err(Refusal::NotAsleep(_)) if maps.lines().any(is_ring) => {
            ("recorded", "from its start; `gputrace top` shows it".to_owned())
        }
        Err(Refusal::NotLoaded(_)) => match late::possible(pid) {
            Ok(()) => ("late", format!("attachable: late; gputrace attach {pid} brings the library in")),
            Err(why) => ("not loaded", why.to_string()),
        },
        Err(Refusal::NotAsleep(why)) => ("loaded", why),
        Err(why) => ("hidden", why.to_string()),
    };
    Some(Seen { pid, name, state, what })
}
