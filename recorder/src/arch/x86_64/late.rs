//! Bringing the library in (`inject`), and having a recording end that was begun so.

use super::inject::{Late, STILL, Said};
use crate::attach::{Answered, Page, Refusal, Stands, is_over};
use crate::room;
use gputrace_ring::late;
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long the library waits in the process for a wish at least, before it gives the program its words back.
const SERVES: Duration = Duration::from_secs(10);
/// How long a call of the program's is waited for that hears a wish, before a thread is brought in that does.
const HEARD: Duration = Duration::from_millis(100);

/// How long the process is bothered, at most, for a ring that is still mapped.
const TIDYING: Duration = Duration::from_secs(2);
/// Between two tries to have a recording end, where the process refused for a moment: at first, and at most.
const AGAIN: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// Has the session end, as [`Page::sleep`]; where the library came late, also if the program makes no call.
///
/// # Errors
/// As there.
pub fn sleep(page: &Page, pid: u32, library: &Path, patience: Duration) -> Result<Answered, Refusal> {
    if !page.is_late() {
        return page.sleep(patience);
    }
    let answered = page.sleep(patience.min(HEARD))?;
    if answered == Answered::Gone || (answered == Answered::Yes && !page.has_left()) {
        return Ok(answered);
    }
    // The recording is over; what is left is to unmap its ring.
    let has_ended = answered == Answered::Yes;
    let _alone = match alone(pid) {
        Err(_) if has_ended => return Ok(Answered::Yes),
        alone => alone?,
    };
    let patience = if has_ended { patience.min(TIDYING) } else { patience };
    let (until, mut again) = (Instant::now() + patience, AGAIN.0);
    let begun = loop {
        let left = until.saturating_duration_since(Instant::now());
        // Where the program's own call is faster, it finds nothing to end, and must not wait for somebody who attaches.
        match Late::prepare(pid, left).and_then(|late| late.begin(library, Duration::ZERO)) {
            Ok(begun) => break begun,
            Err(Refusal::Gone(_)) => return Ok(Answered::Gone),
            // The wish stands, and the program's next call follows it. What it left mapped waits for the next attacher.
            Err(_) if page.stands() == Stands::Asleep => return Ok(Answered::Yes),
            // The process is as it was, and may be where this can be done a moment later; or it makes a call meanwhile.
            Err(_) if Instant::now() + again < until => std::thread::sleep(again),
            Err(_) => return Ok(Answered::NotYet),
        }
        again = (again * 2).min(AGAIN.1);
    };
    while page.stands() != Stands::Asleep {
        if is_over(pid) {
            return Ok(Answered::Gone);
        }
        if Instant::now() >= until {
            begun.cancel();
            return Ok(Answered::NotYet);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // It takes itself away.
    while begun.said() == Said::NotYet && Instant::now() < until && !is_over(pid) {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(Answered::Yes)
}

/// How often a thread of another process stood still because of this one, so the library could be brought in, and for how many
/// microseconds at most.
#[must_use]
pub fn stood_still() -> (u32, u32) {
    STILL.told()
}

/// Whether the library could be brought in; nothing is changed.
///
/// # Errors
/// It could not: why.
pub fn possible(pid: u32) -> Result<(), Refusal> {
    Late::prepare(pid, Duration::ZERO)?;
    room::for_library(pid).map_err(|why| Refusal::NotLate { pid, why })
}

/// Brings the library in.
///
/// # Errors
/// It cannot be: why.
pub(crate) fn bring(pid: u32, library: &Path, patience: Duration) -> Result<Page, Refusal> {
    let no = |why: &str| Refusal::NotLate { pid, why: why.to_owned() };
    let _alone = alone(pid)?;
    let late = Late::prepare(pid, patience)?;
    room::for_library(pid).map_err(|why| no(&why))?;
    finds_recorder(pid)?;
    let begun = late.begin(library, SERVES.max(patience))?;
    let until = Instant::now() + patience;
    loop {
        match begun.said() {
            Said::Answer(answer) => return Err(no(&in_words(answer))),
            Said::Failed(why) => {
                return Err(no(&format!("its loader rejected the library: {why}{}", remedy(&why))));
            }
            Said::NotYet => {}
        }
        if let Ok(page) = Page::find(pid)
            && !page.is_unheard()
            && page.is_late()
        {
            return Ok(page);
        }
        if is_over(pid) {
            return Err(Refusal::Gone(pid));
        }
        if Instant::now() >= until {
            begun.cancel();
            return Err(no("its loader was busy for too long (is it loading a library?): try again"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The process starts the recorder, which is this program, by its path: in a container of its own it may not find it.
fn finds_recorder(pid: u32) -> Result<(), Refusal> {
    let own = std::env::current_exe().unwrap_or_default();
    let there = Path::new(&format!("/proc/{pid}/root")).join(own.strip_prefix("/").unwrap_or(&own));
    let file = |path: &Path| path.metadata().map(|it| (it.dev(), it.ino())).ok();
    if file(&there).is_some() && file(&there) == file(&own) {
        return Ok(());
    }
    let own = own.display();
    let why = format!(
        "its container has no {own}, which must write the trace: attach from inside it, with gputrace installed there"
    );
    Err(Refusal::NotLate { pid, why })
}

/// One attacher at a time: a lock of the process's memory file (`/proc/PID/mem`), which the kernel gives back however its holder ends.
/// Who may open that file has a debugger's rights over the process, so nobody else can keep us away.
fn alone(pid: u32) -> Result<File, Refusal> {
    let Ok(memory) = File::open(format!("/proc/{pid}/mem")) else {
        // `possible` knows the reason.
        possible(pid)?;
        return Err(Refusal::Gone(pid));
    };
    match flock(&memory, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(memory),
        Err(_) => Err(Refusal::Busy(pid)),
    }
}

fn in_words(answer: u64) -> String {
    match answer {
        late::PRELOADED => "the library is already loaded, and not dormant".to_owned(),
        late::NO_DRIVER => "it has unloaded the CUDA driver".to_owned(),
        late::REFUSED => "the library disabled itself in it: GPUTRACE=off is set there, it has more rights than its user, or there is no memory".to_owned(),
        late::NO_WORDS => "no pointer in the data of its libraries leads to the driver: it has not called it yet, or keeps the addresses elsewhere (heap, generated code)".to_owned(),
        late::UNUSED => "the request timed out".to_owned(),
        late::DONE | late::AWAKE => "another process started a recording".to_owned(),
        other => format!("the library answered {other}"),
    }
}

/// What to change so that the loader takes it.
fn remedy(why: &str) -> &'static str {
    if why.contains("static TLS") {
        "; start it with GLIBC_TUNABLES=glibc.rtld.optional_static_tls=4096, or with LD_PRELOAD"
    } else {
        ""
    }
}
