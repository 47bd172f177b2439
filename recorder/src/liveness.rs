//! Whether the traced process has ended: known, never guessed.
//!
//! Whoever takes a living process for a dead one ends its trace too early and removes the ring that it writes to. So only
//! the kernel's own word counts, about this very process: that `/proc` cannot be read (hidepid, too few descriptors, too
//! little memory) says nothing, and a number of another PID namespace is somebody else's.

use crate::map_file::{MapFile, WriterLock};
use crate::nvml_process::Numbers;
use crate::{Error, pidfd, process};
use gputrace_ring::map::Header;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering;

/// What the ring's header says of its process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    pub(crate) pid: u32,
    /// Field 22 of `/proc/PID/stat`; 0 unknown.
    pub(crate) start_time: u64,
    /// Inode of its PID namespace; 0 unknown.
    pub(crate) namespace: u64,
}

impl Claim {
    pub(crate) fn of(header: &Header) -> Claim {
        Claim {
            pid: header.pid.load(Ordering::Relaxed),
            start_time: header.start_time.load(Ordering::Relaxed),
            namespace: header.pid_namespace.load(Ordering::Relaxed),
        }
    }
}

/// Numbers by which others may know the process, where it is to be seen: from those of the outermost namespace that we can
/// see to its own.
pub(crate) fn numbers(claim: Claim, in_proc: Option<u32>) -> Numbers {
    let ours = own_namespace();
    let visible = in_proc.and_then(process::numbers_of);
    let is_here = place(claim.namespace, ours, true) == Place::Here;
    // Without `/proc`, and where it is that of another namespace, its own number is what there is.
    let visible = visible.filter(|_| process::proc_is_ours()).unwrap_or_else(|| vec![claim.pid]);
    Numbers::new(if is_here || visible.len() > 1 { ours } else { 0 }, visible)
}

/// Who asks, and what they know.
#[derive(Debug, Default)]
pub(crate) struct Asker {
    /// A descriptor of the process (`pidfd_open(2)`), which it gave us.
    pub(crate) process: Option<OwnedFd>,
    /// The process started us.
    pub(crate) is_its_child: bool,
    /// Somebody who must know says that it has ended.
    pub(crate) process_is_gone: bool,
}

/// How the end of the process will be known.
#[derive(Debug)]
pub(crate) enum Liveness {
    /// This descriptor of it becomes readable.
    Descriptor(OwnedFd),
    /// Its number is free, or somebody else's: where the kernel has no such descriptors, or gives us none.
    Number(Claim),
    /// It has ended already.
    Gone,
}

impl Liveness {
    /// Finds out how, before anything in the ring is changed.
    pub(crate) fn find(file: &MapFile, asker: Asker) -> Result<Liveness, Error> {
        let claim = Claim::of(file.header());
        if asker.process_is_gone {
            return Ok(Liveness::Gone);
        }
        if let Some(descriptor) = asker.process {
            return Ok(Liveness::Descriptor(descriptor));
        }
        match place(claim.namespace, own_namespace(), asker.is_its_child) {
            Place::Here => Ok(here(claim, file.writer_lock())),
            Place::Unknown if is_it(claim) => Ok(here(claim, file.writer_lock())),
            Place::Elsewhere | Place::Unknown => match file.writer_lock() {
                WriterLock::Free => Ok(Liveness::Gone),
                WriterLock::Held => {
                    Err(Error::Elsewhere { ring: file.path().to_owned(), pid: claim.pid, is: "is alive" })
                }
                WriterLock::Unknown => {
                    Err(Error::Elsewhere { ring: file.path().to_owned(), pid: claim.pid, is: "may be alive" })
                }
            },
        }
    }

    /// Whether the process has ended, all of its threads included. In doubt it has not, unless nothing can be
    /// learned about it any more: a recorder that never ends would keep the process's standard error open.
    pub(crate) fn is_gone(&self) -> bool {
        match self {
            Liveness::Gone => true,
            Liveness::Descriptor(descriptor) => is_readable(descriptor),
            Liveness::Number(claim) => {
                is_free(*claim) || is_somebody_else(*claim) || is_zombie(*claim) || is_out_of_sight(*claim)
            }
        }
    }

    /// With what the process ended, as `waitpid(2)` would tell its parent; `None` where nobody tells us. `in_proc` is its number
    /// in the `/proc` that we see.
    pub(crate) fn wait_status(&self, in_proc: Option<u32>) -> Option<i32> {
        // Until its parent has asked, it is there to be read, and after that its descriptor knows.
        // There, 0 also says that we may not know.
        let is_told = |stat: &process::Stat| stat.state == 'Z' && stat.exit_code != 0;
        let of_zombie = || in_proc.and_then(process::stat).filter(is_told);
        match self {
            Liveness::Gone => None,
            Liveness::Descriptor(descriptor) => {
                of_zombie().map(|stat| stat.exit_code).or_else(|| pidfd::wait_status(descriptor))
            }
            Liveness::Number(claim) => {
                of_zombie().filter(|stat| stat.start_time == claim.start_time).map(|stat| stat.exit_code)
            }
        }
    }

    /// The process's number in the `/proc` that we see; `None` where it is not to be seen there.
    pub(crate) fn number_in_proc(&self, claim: Claim) -> Option<u32> {
        match self {
            Liveness::Gone => None,
            Liveness::Descriptor(descriptor) => process::number_of_descriptor(descriptor),
            Liveness::Number(_) => process::proc_is_ours().then_some(claim.pid),
        }
    }
}

/// Where a process is, seen from here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    /// Its number means the same here.
    Here,
    /// In another PID namespace.
    Elsewhere,
    Unknown,
}

fn place(theirs: u64, ours: u64, is_its_child: bool) -> Place {
    match (theirs, ours) {
        (0, _) | (_, 0) if is_its_child => Place::Here,
        (0, _) | (_, 0) => Place::Unknown,
        (theirs, ours) if theirs == ours => Place::Here,
        _ => Place::Elsewhere,
    }
}

/// Inode of our PID namespace; 0 unknown.
fn own_namespace() -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |data| data.ino())
}

/// The claim's number is a process here that began at the very moment that the ring's process did.
fn is_it(claim: Claim) -> bool {
    process::proc_is_ours()
        && claim.start_time != 0
        && process::stat(claim.pid).is_some_and(|stat| stat.start_time == claim.start_time)
}

/// The process, or nobody, has this number here.
fn here(claim: Claim, lock: WriterLock) -> Liveness {
    let Some(pid) = pid_of(claim) else { return Liveness::Gone };
    // A filter may end whoever makes a call that it does not know.
    let descriptor =
        if process::is_filtered() { Err(Errno::NOSYS) } else { pidfd_open(pid, PidfdFlags::empty()) };
    match descriptor {
        Err(Errno::SRCH) => Liveness::Gone,
        Err(_) if is_free(claim) => Liveness::Gone,
        // The number may have been given to another process. Where times count differently for us than for the process
        // (time namespaces), it only seems so, and the process still maps the ring.
        _ if is_somebody_else(claim) && lock != WriterLock::Held => Liveness::Gone,
        Ok(descriptor) => Liveness::Descriptor(descriptor),
        // Linux before 5.3, a seccomp filter, no descriptor left.
        Err(_) if is_somebody_else(claim) => Liveness::Number(Claim { start_time: 0, ..claim }),
        Err(_) => Liveness::Number(claim),
    }
}

fn pid_of(claim: Claim) -> Option<Pid> {
    Pid::from_raw(i32::try_from(claim.pid).ok()?)
}

fn is_readable(descriptor: &OwnedFd) -> bool {
    let mut asked = [PollFd::from_borrowed_fd(descriptor.as_fd(), PollFlags::IN)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut asked, Some(&at_once)).is_ok() && asked[0].revents().contains(PollFlags::IN)
}

fn is_free(claim: Claim) -> bool {
    // Whom we may not send a signal is there.
    pid_of(claim).is_none_or(|pid| test_kill_process(pid) == Err(Errno::SRCH))
}

/// The calls that look for processes fail with `ENOSYS`, even for ourselves: the supervisor that answered them
/// (`SECCOMP_RET_USER_NOTIF`) has ended.
fn is_out_of_sight(claim: Claim) -> bool {
    pid_of(claim).is_some_and(|pid| test_kill_process(pid) == Err(Errno::NOSYS))
        && process::stat(std::process::id()).is_none()
}

fn is_somebody_else(claim: Claim) -> bool {
    let begun = || process::proc_is_ours().then(|| process::stat(claim.pid))?.map(|stat| stat.start_time);
    claim.start_time != 0 && begun().is_some_and(|begun| begun != claim.start_time)
}

/// It has ended, and nobody has waited for it yet. A first thread that has ended looks so while the others run.
fn is_zombie(claim: Claim) -> bool {
    let stat = process::proc_is_ours().then(|| process::stat(claim.pid)).flatten();
    stat.is_some_and(|stat| matches!(stat.state, 'Z' | 'X' | 'x') && stat.n_threads <= 1)
}

/// Takes over the descriptor of the process that the program's side left open for us, if that is what it is.
pub(crate) fn inherited(number: i32) -> Option<OwnedFd> {
    let descriptor = crate::map_file::inherited(number)?;
    // Anything else would become readable for reasons of its own.
    let link = std::fs::read_link(Path::new("/proc/self/fd").join(number.to_string()));
    let is_one = link.map_or(true, |link| link.as_os_str().to_string_lossy().contains("pidfd"));
    is_one.then_some(descriptor)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(pid: u32, start_time: u64) -> Claim {
        Claim { pid, start_time, namespace: own_namespace() }
    }

    fn began(pid: u32) -> u64 {
        process::stat(pid).expect("a process that is there").start_time
    }

    #[test]
    fn only_numbers_of_our_own_namespace_mean_what_they_say() {
        use Place::{Elsewhere, Here, Unknown};
        let placed = [(7, 7), (7, 8), (0, 7), (7, 0), (0, 0)]
            .map(|(theirs, ours)| (place(theirs, ours, false), place(theirs, ours, true)));
        assert_eq!(
            placed,
            [(Here, Here), (Elsewhere, Elsewhere), (Unknown, Here), (Unknown, Here), (Unknown, Here)]
        );
    }

    #[test]
    fn a_process_is_gone_when_it_has_ended_and_not_before() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().expect("sleep");
        let pid = child.id();
        let claim = claim(pid, began(pid));
        let ways = [here(claim, WriterLock::Unknown), Liveness::Number(claim)];
        assert!(matches!(ways[0], Liveness::Descriptor(_)), "{ways:?}");
        assert_eq!(ways.each_ref().map(Liveness::is_gone), [false; 2]);
        child.kill().expect("ours");
        // Not waited for: it is a zombie, and has ended.
        while !ways[0].is_gone() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(ways[1].is_gone());
        child.wait().expect("ours");
        assert_eq!(ways.each_ref().map(Liveness::is_gone), [true; 2]);
        assert!(matches!(here(claim, WriterLock::Unknown), Liveness::Gone));
    }

    #[test]
    fn how_a_process_ended_is_known_before_its_parent_asks_and_where_the_kernel_tells_after_it() {
        for (program, status) in [("exit 3", 3 << 8), ("kill -9 $$", 9)] {
            let mut child = std::process::Command::new("sh").args(["-c", program]).spawn().expect("sh");
            let pid = child.id();
            let claim = claim(pid, began(pid));
            let ways = [here(claim, WriterLock::Unknown), Liveness::Number(claim)];
            while !ways[0].is_gone() {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            assert_eq!(ways.each_ref().map(|way| way.wait_status(Some(pid))), [Some(status); 2], "{program}");
            child.wait().expect("ours");
            let [descriptor, number] = ways.each_ref().map(|way| way.wait_status(None));
            assert!(descriptor.is_none_or(|told| told == status) && number.is_none(), "{descriptor:?}");
        }
    }

    #[test]
    fn a_number_that_was_given_to_another_process_is_not_ours() {
        let other = claim(std::process::id(), 1);
        assert!(matches!(here(other, WriterLock::Free), Liveness::Gone));
        assert!(Liveness::Number(other).is_gone());
        // Whoever still maps the ring may count time from another moment.
        assert!(!here(other, WriterLock::Held).is_gone());
        assert!(
            !here(claim(std::process::id(), 0), WriterLock::Unknown).is_gone(),
            "nothing speaks against it"
        );
    }
}
