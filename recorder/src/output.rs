//! The trace's file: its name, and that it is whole up to the last block whatever happens.

use crate::Error;
use crate::map_file::{is_marked_as_written, mark_as_written};
use crate::output_file::{self, Place, Unfit, refusal};
use crate::process;
use crate::segments;
use crate::ticks::Moment;
use gputrace_schemas::event::Process;
use gputrace_schemas::reader::{Trace, open_regular};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// Name where nobody says otherwise and the process has a rank.
const WITH_RANK: &str = "gputrace-%e.%h.r%r.%p.gtr";
/// Name where nobody says otherwise.
const WITHOUT_RANK: &str = "gputrace-%e.%h.%p.gtr";
/// How much earlier than its process a file can seem to be: files are stamped with the time of the last timer tick, and
/// processes to 10 ms.
const CLOCKS_DIFFER: Duration = Duration::from_millis(50);
/// Bytes of a trace in which it says whose it is.
const FIRST_BLOCK: u64 = 1 << 20;
/// With less space than this for a trace there is no use in beginning it, and with less than that it is said.
const LEAST_SPACE: u64 = 1 << 20;
const LITTLE_SPACE: u64 = 64 << 20;
/// Most names that `%n` tries.
const MOST_TRIES: u32 = 10_000;

/// The pattern for this process: what was asked for, in which a folder is one to put traces into, or the default.
pub(crate) fn pattern(asked: Option<&str>, process: &Process) -> String {
    let default = if process.rank.is_some() { WITH_RANK } else { WITHOUT_RANK };
    match asked {
        None => default.to_owned(),
        Some(folder) if folder.ends_with('/') => format!("{folder}{default}"),
        Some(folder) if Path::new(folder).is_dir() => format!("{folder}/{default}"),
        Some(pattern) => pattern.to_owned(),
    }
}

/// Refuses what can be known, before a program starts, to leave it without a trace: a pattern that is none, a folder that
/// cannot be written or is full, a file that is there and not to be overwritten. Returns what may turn out to be wrong.
///
/// # Errors
/// What is wrong, and what to do.
pub fn check(asked: Option<&str>, overwrite: Overwrite) -> Result<Vec<String>, Error> {
    let environment: Vec<(String, String)> = std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
        .collect();
    let rank = process::rank(&environment);
    // Two processes of the job. Where their traces have one name, it is known now.
    let one = Process { host: process::host(), rank, environment, ..Process::default() };
    let other = Process {
        pid: 1,
        executable: "other".to_owned(),
        start_realtime: 1_000_000_000,
        rank: one.rank.or(Some(2)),
        ..one.clone()
    };
    let pattern = pattern(asked, &one);
    let unset = std::cell::RefCell::new(vec![]);
    let variable = |name: &str| {
        let value = std::env::var(name).ok();
        if value.is_none() {
            unset.borrow_mut().push(name.to_owned());
        }
        value.or_else(|| Some("unset".to_owned()))
    };
    let path = expand(&pattern, &one, 0, variable)?;
    let mut warnings: Vec<_> = unset
        .take()
        .into_iter()
        .map(|name| format!("%q{{{name}}}: {name} is not set here; processes without it are not recorded"))
        .collect();
    let is_known = warnings.is_empty() && path == expand(&pattern, &other, 1, variable)?;
    if is_known {
        place(&path)?;
        if overwrite != Overwrite::Replace && path.symlink_metadata().is_ok() {
            return Err(Error::Exists { file: path });
        }
    }
    let absolute = std::path::absolute(&path).unwrap_or_else(|_| path.clone());
    let folder = absolute.parent().unwrap_or(&absolute);
    let failed = |source| Error::Output { file: path.clone(), source };
    // What is missing of it is made with the first trace.
    let folder =
        folder.ancestors().find(|folder| folder.symlink_metadata().is_ok()).unwrap_or(Path::new("/"));
    if !folder.is_dir() {
        return Err(failed(io::Error::other(format!("{} is not a folder", folder.display()))));
    }
    rustix::fs::access(folder, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK).map_err(
        |error| Error::Folder { folder: folder.to_owned(), why: refusal(&error.into(), "folder") },
    )?;
    if let Ok(system) = rustix::fs::statvfs(folder) {
        let free = system.f_bavail.saturating_mul(system.f_frsize);
        if free < LEAST_SPACE {
            return Err(Error::Full { folder: folder.to_owned(), free });
        }
        if free < LITTLE_SPACE {
            let folder = folder.display();
            warnings.push(format!("{folder} has only {} MiB free: the trace may end early", free >> 20));
        }
    }
    Ok(warnings)
}

/// Refuses a pattern that names no file of any process. Its folder and variables are that process's.
///
/// # Errors
/// What is wrong with it.
pub fn check_pattern(pattern: &str) -> Result<(), Error> {
    expand(pattern, &Process::default(), 0, |_| Some(String::new())).map(drop)
}

/// Leaves the folder in which the program made its first call, if the trace is in another file system: the program may unmount it. The trace's
/// name from anywhere.
pub(crate) fn leave_folder(trace: PathBuf) -> PathBuf {
    let whole = if trace.is_absolute() { Some(trace.clone()) } else { elsewhere(&trace) };
    match whole {
        // If that fails, the folder stays ours.
        Some(whole) if std::env::set_current_dir("/").is_ok() => whole,
        _ => trace,
    }
}

/// The whole name of a file that is not in the file system of the current folder.
fn elsewhere(file: &Path) -> Option<PathBuf> {
    let name = file.file_name()?;
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty())?.canonicalize().ok()?;
    let device = |path: &Path| path.metadata().map(|facts| facts.dev()).ok();
    (device(&folder)? != device(Path::new("."))?).then(|| folder.join(name))
}

/// A pattern as a name.
///
/// | | |
/// |---|---|
/// | `%e` | file name of the executable |
/// | `%h` | host |
/// | `%p` | process id |
/// | `%r` | rank, or the process id if there is none |
/// | `%l` | rank on the host, or the process id if there is none |
/// | `%n` | `counter` |
/// | `%t` | when the trace began, seconds since 1970 |
/// | `%q{NAME}` | the variable of the recorder's environment, which is the process's |
/// | `%%` | `%` |
fn expand(
    pattern: &str,
    process: &Process,
    counter: u32,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<PathBuf, Error> {
    let wrong = |what: String| Error::Pattern { pattern: pattern.to_owned(), what };
    let mut name = String::new();
    let mut rest = pattern;
    while let Some((before, after)) = rest.split_once('%') {
        name.push_str(before);
        let letter = after.chars().next().ok_or_else(|| wrong("it ends in a single %".to_owned()))?;
        rest = &after[letter.len_utf8()..];
        match letter {
            'e' => match process.executable.rsplit('/').next() {
                Some(file) if !file.is_empty() => name.push_str(&plain(file)),
                // It was gone before it could be asked.
                _ => name.push_str("process"),
            },
            'h' => name.push_str(&plain(&process.host)),
            'p' => name.push_str(&process.pid.to_string()),
            'r' => name.push_str(&process.rank.unwrap_or(process.pid).to_string()),
            'l' => {
                name.push_str(&process::local_rank(&process.environment).unwrap_or(process.pid).to_string())
            }
            'n' => name.push_str(&counter.to_string()),
            't' => name.push_str(&(process.start_realtime / 1_000_000_000).to_string()),
            '%' => name.push('%'),
            'q' => {
                let end = rest.strip_prefix('{').and_then(|rest| rest.split_once('}'));
                let (wanted, after) = end.ok_or_else(|| wrong("write %q as %q{NAME}".to_owned()))?;
                let value =
                    variable(wanted).ok_or_else(|| wrong(format!("the variable {wanted} is not set")))?;
                name.push_str(&plain(&value));
                rest = after;
            }
            other => {
                return Err(wrong(format!(
                    "%{other} is not known; placeholders are %e %h %p %r %l %n %t %q{{NAME}} %%"
                )));
            }
        }
    }
    name.push_str(rest);
    Ok(PathBuf::from(name))
}

/// Foreign text as part of one file name.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c == '/' || c.is_control() || c.is_whitespace() { '_' } else { c }).collect()
}

/// What to do if the file is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Overwrite {
    /// Leave it and fail.
    #[default]
    Refuse,
    /// Replace it.
    Replace,
    /// Leave it and take a name with a number, where somebody says so at the end.
    Number,
}

/// A trace that was begun.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    /// The file that was there under the name that this one was to have.
    pub(crate) instead_of: Option<PathBuf>,
}

/// Makes the file, and the folders it is in.
///
/// A name without `%p` is one for all processes of a job, and a process that becomes another program by `exec` keeps
/// its number. So a file that was written since the job began is a sibling's: it is neither an error nor ours to
/// replace, and the name gets the process's number before its ending, then a second one.
pub(crate) fn create(
    pattern: &str,
    process: &Process,
    overwrite: Overwrite,
    job_began: Moment,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Made, Error> {
    let job_began = job_began.before(CLOCKS_DIFFER).unwrap_or(job_began);
    // A run that has just ended may have written its last byte a moment before this one began; what it says itself counts.
    let is_siblings = |path: &Path| {
        is_written(path)
            || is_of_the_job(path, process, job_began.monotonic)
                .unwrap_or_else(|| is_newer(path, job_began.realtime))
    };
    let counted = |counter| expand(pattern, process, counter, &variable);
    let has_counter = counted(0)? != counted(1)?;
    let mut counter = 0;
    let mut siblings = 0;
    let mut instead_of = None;
    loop {
        let path = beside_siblings(&counted(counter)?, process.pid, siblings);
        let counts = has_counter && counter < MOST_TRIES;
        if (counts || siblings < MOST_TRIES) && is_siblings(&path) {
            *(if counts { &mut counter } else { &mut siblings }) += 1;
            continue;
        }
        match place(&path) {
            // A FIFO or a device is left alone as a file would be, and the trace gets a name with a number.
            Err(Error::Unfit(Unfit::NotAFile { .. }) | Error::Device { .. })
                if overwrite == Overwrite::Number => {}
            fits => fits?,
        }
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            fs::create_dir_all(folder).map_err(|source| Error::Output { file: path.clone(), source })?;
        }
        match open(&path, overwrite) {
            Ok(file) => {
                if overwrite == Overwrite::Replace {
                    segments::remove_left(&path);
                }
                // For who wants to know whether the trace is being written: see `wait_for_recorder`.
                mark_as_written(&file);
                return Ok(Made { path, file, instead_of });
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                // A sibling was faster than our look. Where another user has taken all names, there is none to be had.
                if siblings < MOST_TRIES && is_siblings(&path) {
                    continue;
                }
                if counts {
                    counter += 1;
                    continue;
                }
                if overwrite != Overwrite::Number || siblings >= MOST_TRIES {
                    return Err(Error::Exists { file: path });
                }
                siblings += 1;
                instead_of.get_or_insert(path);
            }
            Err(source) => return Err(Error::Output { file: path, source }),
        }
    }
}

/// `train.gtr`, `train.42.gtr`, `train.42.2.gtr`, ...
fn beside_siblings(path: &Path, pid: u32, siblings: u32) -> PathBuf {
    let number = match siblings {
        0 => return path.to_owned(),
        1 => pid.to_string(),
        n => format!("{pid}.{n}"),
    };
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push(".");
    name.push(number);
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

/// Whether the file was written since then.
fn is_newer(path: &Path, since: SystemTime) -> bool {
    fs::metadata(path).and_then(|data| data.modified()).is_ok_and(|modified| modified >= since)
}

/// Whether the file is a trace that began since then, by its own word: the clock by which files are stamped may have been
/// set since. `None` of what is no trace of this host since it was started.
fn is_of_the_job(path: &Path, process: &Process, since: u64) -> Option<bool> {
    let file = open_regular(path).ok()?;
    let length = file.metadata().ok()?.len();
    // What was just opened: the name may lead elsewhere by now.
    let opened = format!("/proc/self/fd/{}", file.as_raw_fd());
    let trace = Trace::open_prefix(opened, length.min(FIRST_BLOCK)).ok()?;
    let theirs = trace.process();
    let is_comparable =
        !theirs.boot.is_empty() && (&theirs.boot, &theirs.host) == (&process.boot, &process.host);
    is_comparable.then_some(theirs.start.0 >= since)
}

/// Whether a recorder has the trace. Who can only read a trace cannot have it look so.
#[must_use]
pub fn is_written(trace: &Path) -> bool {
    open_regular(trace).is_ok_and(|file| is_marked_as_written(&file))
}

/// Makes the file.
pub(crate) fn open(path: &Path, overwrite: Overwrite) -> io::Result<File> {
    if overwrite == Overwrite::Replace {
        // Never a link's target: the new trace takes the place of the link.
        place(path).map_err(io::Error::other)?;
        // Whoever reads the old file keeps what they read.
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    // What a program allocates and where is nobody else's business.
    output_file::create_new(path, 0o600)
}

/// Whether a trace may have this name: see [`output_file::look`]. A link of one's own that leads nowhere is as good as a file: it is not followed.
pub(crate) fn place(path: &Path) -> Result<(), Error> {
    match output_file::look(path) {
        Ok(Place::Free | Place::File(_)) | Err(Unfit::Dangling { .. }) => Ok(()),
        Err(Unfit::NotAFile { file, .. }) if is_device(path) => Err(Error::Device { file }),
        Err(unfit) => Err(unfit.into()),
    }
}

fn is_device(path: &Path) -> bool {
    let kind = path.metadata().map(|facts| facts.file_type());
    kind.is_ok_and(|kind| kind.is_char_device() || kind.is_block_device())
}

/// How long recorders are waited for that are just finishing their traces: for all traces of a verb together, because who owns one of
/// them can hold its lock for ever.
#[derive(Clone, Copy, Debug)]
pub struct WaitsUntil(Instant);

impl WaitsUntil {
    /// Ten seconds from now.
    #[must_use]
    pub fn from_now() -> WaitsUntil {
        WaitsUntil(Instant::now() + Duration::from_secs(10))
    }
}

/// Waits for the recorder that is just finishing this trace, because its process has ended. True if it waited in vain. A trace of a
/// process that runs is read as it is.
#[must_use]
pub fn wait_for_recorder(trace: &Path, until: WaitsUntil) -> bool {
    const STEP: Duration = Duration::from_millis(20);
    let Ok(file) = open_regular(trace) else { return false };
    let mut has_ended = false;
    loop {
        if !is_marked_as_written(&file) {
            return false;
        }
        if !has_ended {
            // What has just been begun does not say yet whose it is.
            has_ended = match process_of(trace) {
                None => return false,
                Some(process) if process.pid == 0 => false,
                Some(process) if process::is_running(&process) => return false,
                Some(_) => true,
            };
        }
        if Instant::now() >= until.0 {
            return true;
        }
        std::thread::sleep(STEP);
    }
}

/// Whether the process of a trace runs, which has this number. What has just been begun does not say yet whose it is.
pub(crate) fn is_running(trace: &Path, pid: u32) -> bool {
    process_of(trace).is_some_and(|process| process.pid == pid && process::is_running(&process))
}

/// Whose trace it is, if it is one.
fn process_of(trace: &Path) -> Option<Process> {
    Some(Trace::open(trace).ok()?.process().clone())
}

/// Removes something from the disk; whether there was anything to remove.
pub(crate) type Room = Box<dyn FnMut() -> bool + Send>;

/// A file that can be cut back to its last whole block, and be given another end.
pub(crate) struct TraceFile {
    file: File,
    /// What is kept back, to be written at once.
    kept: Option<Vec<u8>>,
    /// What may be removed where the disk is full.
    room: Option<Room>,
    /// Space on the disk behind the end of the file.
    spare: Option<Spare>,
}

/// Space that the file system holds for a file behind its end. Cutting the file gives it back.
#[derive(Clone, Copy)]
struct Spare {
    /// At least so much behind what is written.
    bytes: u64,
    /// It is held up to here.
    until: u64,
}

impl TraceFile {
    pub(crate) fn new(file: File) -> TraceFile {
        TraceFile { file, kept: None, room: None, spare: None }
    }

    /// From here on, a full disk gets room by what `room` removes.
    pub(crate) fn make_room_by(&mut self, room: Room) {
        self.room = Some(room);
    }

    /// From here on keeps what is written, which will stand from `position` on. What is behind that in the file stays until then.
    pub(crate) fn keep(&mut self, position: u64) -> io::Result<()> {
        use std::io::{Seek, SeekFrom};
        self.file.seek(SeekFrom::Start(position))?;
        self.kept = Some(Vec::new());
        Ok(())
    }

    /// Writes what was kept by one call of the kernel: whoever ends us finds the file as it was before, or as it is now. (Linux lets
    /// SIGKILL end a write between two pages: the file has no end then, and says so.)
    pub(crate) fn release(&mut self) -> io::Result<()> {
        self.kept.take().map_or(Ok(()), |kept| self.file.write_all(&kept))
    }

    /// From here on, a write fails where less than `bytes` would be left behind it: the disk is full while there is still room for a
    /// file that goes on in the place of this one. [`TraceFile::cut`] makes that room.
    pub(crate) fn keep_spare(&mut self, bytes: u64) {
        let until = self.spare.map_or(0, |spare| spare.until);
        self.spare = Some(Spare { bytes, until });
    }

    /// Gives the space back: what is written from now on may take it.
    pub(crate) fn give_spare(&mut self) -> io::Result<()> {
        match self.spare.take() {
            Some(_) => self.file.set_len(self.file.metadata()?.len()),
            None => Ok(()),
        }
    }

    /// Takes space behind a write of `length` bytes, where the file system can.
    fn take_spare(&mut self, length: usize) -> io::Result<()> {
        use std::io::Seek;
        let Some(spare) = self.spare else { return Ok(()) };
        let end = self.file.stream_position()? + length as u64;
        let until = end + spare.bytes;
        let from = spare.until.max(end - length as u64);
        if from >= until {
            return Ok(());
        }
        match rustix::fs::fallocate(&self.file, rustix::fs::FallocateFlags::KEEP_SIZE, from, until - from) {
            Ok(()) => self.spare = Some(Spare { until, ..spare }),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => match io::Error::from(error) {
                full if full.kind() == io::ErrorKind::StorageFull => return Err(full),
                // Not every file system can.
                _ => self.spare = None,
            },
        }
        Ok(())
    }

    fn has_made_room(&mut self) -> bool {
        self.room.as_mut().is_some_and(|room| room())
    }

    /// Waits until what was written is on the disk, where the file system has one.
    pub(crate) fn synchronise(&self) -> io::Result<()> {
        match self.file.sync_data() {
            Err(error)
                if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) =>
            {
                Ok(())
            }
            done => done,
        }
    }

    /// Removes what is behind `length`, and goes on there.
    pub(crate) fn cut(&mut self, length: u64) -> io::Result<()> {
        use std::io::{Seek, SeekFrom};
        self.kept = None;
        if let Some(spare) = &mut self.spare {
            spare.until = 0;
        }
        self.file.set_len(length)?;
        self.file.seek(SeekFrom::Start(length)).map(|_| ())
    }
}

impl Write for TraceFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.kept {
            Some(kept) => kept.write(bytes),
            None => loop {
                match self.take_spare(bytes.len()).and_then(|()| self.file.write(bytes)) {
                    Err(error) if error.kind() == io::ErrorKind::StorageFull && self.has_made_room() => {}
                    done => return done,
                }
            },
        }
    }
    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gputrace_schemas::event::Nanos;
    use gputrace_schemas::writer::Writer;

    fn at(realtime: SystemTime) -> Moment {
        Moment { realtime, monotonic: 0 }
    }

    fn process() -> Process {
        Process {
            pid: 42,
            host: "node7".to_owned(),
            executable: "/usr/bin/my python".to_owned(),
            start_realtime: 1_700_000_000_999_999_999,
            ..Process::default()
        }
    }

    fn name(pattern: &str, process: &Process) -> Result<String, String> {
        let variable = |name: &str| (name == "JOB").then(|| "a/b".to_owned());
        expand(pattern, process, 7, variable)
            .map(|path| path.display().to_string())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn patterns_name_the_process() {
        let check = |pattern: &str, expected: &str| {
            assert_eq!(name(pattern, &process()).as_deref(), Ok(expected));
        };
        check(&pattern(None, &process()), "gputrace-my_python.node7.42.gtr");
        check("out/%h/%n.%t.%r.%l.%q{JOB}.100%%", "out/node7/7.1700000000.42.42.a_b.100%");
        let ranked = Process {
            rank: Some(3),
            environment: vec![("LOCAL_RANK".to_owned(), "1".to_owned())],
            ..process()
        };
        assert_eq!(
            name(&pattern(None, &ranked), &ranked).as_deref(),
            Ok("gputrace-my_python.node7.r3.42.gtr")
        );
        assert_eq!(name("%r.%l", &ranked).as_deref(), Ok("3.1"));
    }

    #[test]
    fn wrong_patterns_are_explained() {
        let check = |pattern, expected: &str| {
            assert_eq!(
                name(pattern, &process()),
                Err(format!("the output pattern {pattern:?} cannot be used: {expected}"))
            );
        };
        check("a%", "it ends in a single %");
        check("a%x", "%x is not known; placeholders are %e %h %p %r %l %n %t %q{NAME} %%");
        check("%qJOB", "write %q as %q{NAME}");
        check("%q{NOPE}", "the variable NOPE is not set");
        // Another process may have it.
        assert!(check_pattern("%q{NOPE}.%n").is_ok() && check_pattern("a%x").is_err());
    }

    #[test]
    fn what_would_leave_a_run_without_a_trace_is_refused_before_it_starts() {
        let folder = std::env::temp_dir().join(format!("gputrace-check-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(folder.join("there.gtr"), b"old").expect("a file");
        let at = |name: &str| folder.join(name).display().to_string();
        let said = |name: &str, overwrite| match check(Some(&at(name)), overwrite) {
            Ok(warnings) => warnings.join("; "),
            Err(error) => {
                let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
                format!("refused: {error}{}", cause.unwrap_or_default()).replace(&at(""), "")
            }
        };
        let exists = "refused: there.gtr exists; choose another name with -o, or overwrite it with -F";
        assert_eq!(said("there.gtr", Overwrite::Refuse), exists);
        assert_eq!(said("there.gtr", Overwrite::Replace), "");
        assert_eq!(said("%p.gtr", Overwrite::Refuse), "");
        assert_eq!(said("new/folder/a.gtr", Overwrite::Refuse), "");
        assert_eq!(said("", Overwrite::Refuse), "", "a folder");
        let is_a_file = "refused: cannot write there.gtr/a.gtr: there.gtr is not a folder";
        assert_eq!(said("there.gtr/a.gtr", Overwrite::Refuse), is_a_file);
        assert!(said("%q{GPUTRACE_TEST_UNSET}", Overwrite::Refuse).starts_with("%q{GPUTRACE_TEST_UNSET}: "));
        assert!(said("%x", Overwrite::Refuse).contains("%x is not known"));
        assert!(matches!(
            check(Some("/proc/no/a.gtr"), Overwrite::Refuse),
            Err(Error::Folder { .. } | Error::Full { .. })
        ));
        fs::remove_dir_all(folder).expect("ours");
    }

    #[test]
    fn processes_of_one_job_do_not_take_each_others_names() {
        let folder = std::env::temp_dir().join(format!("gputrace-siblings-{}", std::process::id()));
        let pattern = folder.join("train.gtr").display().to_string();
        let names: Vec<_> = [Overwrite::Refuse, Overwrite::Replace, Overwrite::Refuse]
            .map(|overwrite| create(&pattern, &process(), overwrite, at(SystemTime::UNIX_EPOCH), |_| None))
            .into_iter()
            .map(|made| made.expect("a name is free").path.file_name().unwrap_or_default().to_owned())
            .collect();
        assert_eq!(names, ["train.gtr", "train.42.gtr", "train.42.2.gtr"]);
        let counted = folder.join("%n.gtr").display().to_string();
        let made = || create(&counted, &process(), Overwrite::Number, at(SystemTime::UNIX_EPOCH), |_| None);
        let names = [made(), made(), made()].map(|made| made.expect("a name is free").path);
        assert_eq!(names, ["0.gtr", "1.gtr", "2.gtr"].map(|name| folder.join(name)), "with a counter");
        let _ = fs::remove_dir_all(folder);
    }

    #[test]
    fn a_file_that_is_there_is_kept_unless_asked() {
        let folder = std::env::temp_dir().join(format!("gputrace-output-{}", std::process::id()));
        let pattern = folder.join("new/%e.gtr").display().to_string();
        let make = |pattern: &str, overwrite| {
            create(pattern, &process(), overwrite, at(SystemTime::now() + Duration::from_secs(3600)), |_| {
                None
            })
        };
        let path = make(&pattern, Overwrite::Refuse).expect("the first").path;
        assert_eq!(
            make(&pattern, Overwrite::Refuse).unwrap_err().to_string(),
            format!("{} exists; choose another name with -o, or overwrite it with -F", path.display())
        );
        let mut made = make(&pattern, Overwrite::Replace).expect("asked");
        made.file.write_all(b"x").expect("writable");
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
        drop(made);
        let numbered = || make(&pattern, Overwrite::Number).expect("a name with a number");
        let (second, third) = (numbered(), numbered());
        assert_eq!((second.instead_of.as_ref(), third.instead_of.as_ref()), (Some(&path), Some(&path)));
        assert!(second.path.ends_with("my_python.42.gtr") && third.path.ends_with("my_python.42.2.gtr"));
        let counted = folder.join("new/%n.gtr").display().to_string();
        assert!(make(&counted, Overwrite::Refuse).expect("0").path.ends_with("0.gtr"));
        assert!(make(&counted, Overwrite::Refuse).expect("1").path.ends_with("1.gtr"));
        fs::remove_dir_all(folder).expect("ours");
    }

    #[test]
    fn who_can_only_read_a_trace_keeps_nobody_waiting() {
        let folder = std::env::temp_dir().join(format!("gputrace-waits-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let traces: Vec<PathBuf> = (0..3).map(|n| folder.join(format!("{n}.gtr"))).collect();
        let written = |path: &PathBuf| {
            let mut writer = Writer::new(fs::File::create(path).expect("a file")).expect("a trace");
            // It has ended: there is no such process.
            let boot = process::read_line("/proc/sys/kernel/random/boot_id");
            writer.process(&Process { pid: u32::MAX >> 1, boot, ..process() });
            writer.flush().expect("room");
        };
        traces.iter().for_each(written);
        // All locks that a descriptor for reading gives.
        let readers: Vec<File> = traces.iter().map(|path| File::open(path).expect("there")).collect();
        readers.iter().for_each(|reader| reader.try_lock().expect("ours"));
        readers.iter().for_each(mark_as_written);
        let long = WaitsUntil(Instant::now() + Duration::from_secs(3600));
        assert!(traces.iter().all(|trace| !is_written(trace) && !wait_for_recorder(trace, long)));
        drop(readers);
        // Who may write to them is waited for, and for all of them once.
        let open = |path| File::options().write(true).open(path).expect("ours");
        let writers: Vec<File> = traces.iter().map(open).collect();
        writers.iter().for_each(mark_as_written);
        assert!(traces.iter().all(|trace| is_written(trace)));
        let short = WaitsUntil(Instant::now() + Duration::from_millis(50));
        let (tells, told) = std::sync::mpsc::channel();
        let theirs = traces.clone();
        std::thread::spawn(move || {
            tells.send(theirs.iter().filter(|it| wait_for_recorder(it, short)).count())
        });
        assert_eq!(told.recv_timeout(Duration::from_secs(120)), Ok(3));
        drop(writers);
        assert!(traces.iter().all(|trace| !wait_for_recorder(trace, long)), "its recorder is gone");
        fs::remove_dir_all(folder).expect("ours");
    }

    #[test]
    fn a_run_that_has_just_ended_is_another_job() {
        let folder = std::env::temp_dir().join(format!("gputrace-again-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let path = folder.join("train.gtr");
        let before = Process { boot: "a boot".to_owned(), start: Nanos(5_000), ..process() };
        let mut writer = Writer::new(fs::File::create(&path).expect("a file")).expect("a trace");
        writer.process(&before);
        writer.flush().expect("room");
        let job_began = Moment { realtime: SystemTime::now(), monotonic: 100_000_000 };
        let ours = Process { start: Nanos(100_000_001), ..before };
        let make = || create(&path.display().to_string(), &ours, Overwrite::Replace, job_began, |_| None);
        let made = make().expect("a new one");
        assert_eq!(made.path, path);
        // What is being written is not replaced, by whomever.
        assert_eq!(make().expect("another name").path, folder.join("train.42.gtr"));
        fs::remove_dir_all(folder).expect("ours");
    }

    #[test]
    fn a_sibling_is_known_after_the_clock_was_set_back() {
        let folder = std::env::temp_dir().join(format!("gputrace-clock-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let path = folder.join("train.gtr");
        let theirs = Process { boot: "a boot".to_owned(), start: Nanos(5_000), ..process() };
        let mut writer = Writer::new(fs::File::create(&path).expect("a file")).expect("a trace");
        writer.process(&theirs);
        writer.flush().expect("room");
        // By the time that files are stamped with, the job begins an hour after the trace of its other process.
        let hour = Duration::from_secs(3600);
        let name = |monotonic, boot: &str| {
            let job_began = Moment { realtime: SystemTime::now() + hour, monotonic };
            let ours = Process { boot: boot.to_owned(), ..process() };
            let pattern = path.display().to_string();
            let made = create(&pattern, &ours, Overwrite::Refuse, job_began, |_| None).ok()?.path;
            fs::remove_file(&made).expect("ours");
            Some(made.file_name()?.to_string_lossy().into_owned())
        };
        assert_eq!(name(100_000_000, "a boot"), None, "older than the job");
        assert_eq!(name(4_000, "another boot"), None);
        assert_eq!(name(4_000, "a boot").as_deref(), Some("train.42.gtr"));
        fs::remove_dir_all(folder).expect("ours");
    }

    #[test]
    fn another_user_who_has_taken_every_name_keeps_no_recorder_at_work() {
        let folder = std::env::temp_dir().join(format!("gputrace-taken-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        // Files of the future look as those of siblings do.
        for siblings in 0..=MOST_TRIES {
            let path = beside_siblings(&folder.join("train.gtr"), 42, siblings);
            let file = File::create(path).expect("a file");
            file.set_modified(SystemTime::now() + Duration::from_secs(3600)).expect("ours");
        }
        let pattern = folder.join("train.gtr").display().to_string();
        let (tells, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for overwrite in [Overwrite::Refuse, Overwrite::Number] {
                let made = create(&pattern, &process(), overwrite, at(SystemTime::now()), |_| None);
                let _ = tells.send(made.err().map(|error| error.to_string()));
            }
        });
        for _ in 0..2 {
            let refused = told.recv_timeout(Duration::from_secs(120)).expect("it gives up");
            assert!(refused.is_some_and(|why| why.contains("train.42.10000.gtr exists")));
        }
        fs::remove_dir_all(folder).expect("ours");
    }
}
