//! What `gputrace record` says when its program has ended: where the traces are, and what to ask next; or why there is none.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gputrace_recorder::messages::write_stderr;
use gputrace_recorder::{Job, State, Told, is_left, is_off, variable, variables};
use gputrace_replay::trace::words::{bytes, count, quote};
use gputrace_schemas::event::Bytes;
use gputrace_schemas::printable::printable;

use crate::show::shown;

/// How long recorders may take that have yet to say what they recorded.
const PATIENCE: Duration = Duration::from_secs(12);
/// How long it may take to open its ring, and to say its last word when it has let go of it.
const STARTING: Duration = Duration::from_secs(2);
/// Between two looks: a recorder mostly needs a millisecond after its program's end.
const FIRST_STEP: Duration = Duration::from_millis(1);
const LONGEST_STEP: Duration = Duration::from_millis(10);
/// So many traces are named one by one.
const MOST_NAMED: usize = 3;

/// A trace of the job.
struct Made {
    pid: u32,
    path: PathBuf,
    ring: PathBuf,
    instead_of: Option<PathBuf>,
    end: End,
}

enum End {
    /// Not known yet.
    Open,
    /// Its recorder said so.
    Said { n_events: u64, n_lost: u64, bytes: u64, error: Option<String> },
    /// Its process runs on.
    Runs,
    /// Its recorder said nothing, and is gone.
    Silent,
}

/// What came of the job whose first process had this number.
struct Outcome {
    made: Vec<Made>,
    failures: Vec<String>,
    /// Rings that no recorder has taken.
    left: Vec<PathBuf>,
}

/// Waits for the recorders, and says it where the program has a name. The job's file is removed. Gives the traces that have ended.
pub(crate) fn wait_and_say(job: &Job, pid: u32, program: Option<&String>) -> Vec<PathBuf> {
    let outcome = wait(job, pid);
    job.end();
    for line in program.into_iter().flat_map(|program| lines(&outcome, program)) {
        // Nobody may be listening any more.
        let _ = write_stderr(format!("gputrace: {}\n", printable(&line)).as_bytes());
    }
    let ended = outcome.made.into_iter().filter(|made| !matches!(made.end, End::Runs));
    ended.map(|made| made.path).collect()
}

fn wait(job: &Job, pid: u32) -> Outcome {
    let began = Instant::now();
    let mut step = FIRST_STEP;
    loop {
        let mut outcome = heard(&job.told());
        let is_taken = |ring: &PathBuf, outcome: &Outcome| outcome.made.iter().any(|made| made.ring == *ring);
        let untaken: Vec<_> =
            job.rings_of(pid).into_iter().filter(|ring| !is_taken(ring, &outcome)).collect();
        let is_late = began.elapsed() > PATIENCE;
        for made in &mut outcome.made {
            if let End::Open = made.end {
                made.end = match State::of(made.pid, &made.path, &made.ring) {
                    Some(State::Runs) => End::Runs,
                    Some(State::Done) if !is_said(job, &made.path) => End::Silent,
                    _ if is_late => End::Silent,
                    _ => End::Open,
                };
            }
        }
        let is_open = outcome.made.iter().any(|made| matches!(made.end, End::Open));
        // A recorder that has just been started has not opened its ring yet.
        let is_starting = untaken.iter().any(|ring| !is_left(ring)) || began.elapsed() < STARTING;
        if is_late || !(is_open || (is_starting && !untaken.is_empty())) {
            outcome.left = untaken;
            outcome
                .left
                .extend(outcome.made.iter().filter(|made| is_left(&made.ring)).map(|made| made.ring.clone()));
            return outcome;
        }
        std::thread::sleep(step);
        step = (step * 5 / 4).min(LONGEST_STEP);
    }
}

/// Whether its recorder says something, which it does last.
fn is_said(job: &Job, path: &Path) -> bool {
    let began = Instant::now();
    let mut is_late = false;
    loop {
        let is_said =
            job.told().iter().any(|told| matches!(told, Told::Ended { trace, .. } if trace == path));
        if is_said || is_late {
            return is_said;
        }
        std::thread::sleep(FIRST_STEP);
        is_late = began.elapsed() > STARTING;
    }
}

fn heard(told: &[Told]) -> Outcome {
    let mut outcome = Outcome { made: vec![], failures: vec![], left: vec![] };
    for told in told {
        match told.clone() {
            Told::Began { pid, trace: path, ring, instead_of } => {
                outcome.made.push(Made { pid, path, ring, instead_of, end: End::Open });
            }
            Told::Ended { trace, n_events, n_lost, bytes, error, .. } => {
                let made = outcome.made.iter_mut().find(|made| made.path == trace);
                if let Some(made) = made {
                    made.end = End::Said { n_events, n_lost, bytes, error };
                }
            }
            Told::Failed { why } => {
                if !outcome.failures.contains(&why) {
                    outcome.failures.push(why);
                }
            }
        }
    }
    outcome
}

fn lines(outcome: &Outcome, program: &str) -> Vec<String> {
    let mut lines = vec![];
    for made in &outcome.made {
        let path = relative(&made.path);
        if let Some(old) = &made.instead_of {
            let old = relative(old);
            lines.push(format!(
                "{} existed before this run and is unchanged; this run is in {}",
                shown(&old),
                shown(&path)
            ));
        }
        if let End::Said { error: Some(error), .. } = &made.end {
            lines.push(format!("{} is incomplete: {error}", shown(&path)));
        }
    }
    for ring in &outcome.left {
        let ring = shown(ring);
        lines.push(format!(
            "a recorder ended early, or never started; its events are in {ring}: gputrace recover {ring}"
        ));
    }
    let failed = outcome.failures.iter().map(|why| match outcome.made.len() {
        0 => format!("nothing was recorded: {why}"),
        _ => format!("a process was not recorded: {why}"),
    });
    lines.extend(failed);
    if !outcome.made.is_empty() {
        lines.push(traces(&outcome.made));
    } else if lines.is_empty() {
        lines.push(format!("nothing was recorded: {}", why_nothing(program)));
    }
    lines
}

/// `train.gtr: 1.20 MiB, 10,411 events, none lost; next: gputrace report train.gtr`
fn traces(made: &[Made]) -> String {
    let paths: Vec<PathBuf> = made.iter().map(|made| relative(&made.path)).collect();
    // A bounded recording has more than one file.
    let size = |made: &Made| match &made.end {
        End::Said { bytes, .. } => Some(*bytes),
        End::Open | End::Runs | End::Silent => Some(std::fs::metadata(&made.path).ok()?.len()),
    };
    let size = made.iter().filter_map(size).sum();
    let (mut n_events, mut n_lost, mut n_running, mut n_silent) = (0_u64, 0_u64, 0_usize, 0_usize);
    for made in made {
        match &made.end {
            End::Said { n_events: events, n_lost: lost, .. } => {
                n_events = n_events.saturating_add(*events);
                n_lost = n_lost.saturating_add(*lost);
            }
            End::Runs => n_running += 1,
            End::Silent | End::Open => n_silent += 1,
        }
    }
    let mut facts = vec![bytes(Bytes(size))];
    if n_events > 0 {
        facts.push(format!("{} events", count(n_events)));
        facts.push(match n_lost {
            0 => "none lost".to_owned(),
            n => format!("{} lost (`gputrace doctor` explains why)", count(n)),
        });
    }
    if n_running > 0 {
        facts.push(format!("{n_running} of {} processes are still running", made.len()));
    }
    if n_silent > 0 {
        facts.push(format!("{n_silent} without an end, because the recorder was ended"));
    }
    let folder = paths.first().and_then(|path| path.parent()).unwrap_or(Path::new(""));
    let is_one_folder = paths.iter().all(|path| path.parent() == Some(folder));
    let (what, named) = if paths.len() > MOST_NAMED && is_one_folder {
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        (format!("{} traces in {}", paths.len(), shown(folder)), quote(&shown(folder)))
    } else {
        let all =
            |word: fn(&Path) -> String| paths.iter().map(|path| word(path)).collect::<Vec<_>>().join(" ");
        (all(shown), all(|path| quote(&shown(path))))
    };
    let verb = if paths.len() > 1 { "ranks" } else { "report" };
    format!("{what}: {}; next: gputrace {verb} {named}", facts.join(", "))
}

fn why_nothing(program: &str) -> String {
    let off = std::env::var(variable(variables::SWITCH)).unwrap_or_default();
    if is_off(&off) {
        return format!("GPUTRACE={off} disables the library");
    }
    if off == "dormant" {
        return "GPUTRACE=dormant is set, so the library waits for `gputrace attach`: unset it to record from the start".to_owned();
    }
    let mut why = format!("neither {program} nor any program that it started created a CUDA context");
    if crate::commands::doctor::libcuda().is_none() {
        why = format!("this machine has no CUDA driver (libcuda.so.1), and {why}");
    }
    format!("{why}; `gputrace doctor {program}` checks what may keep it from being seen")
}

/// As seen from here, where it is below.
fn relative(path: &Path) -> PathBuf {
    let here = std::env::current_dir().unwrap_or_default();
    path.strip_prefix(&here).map_or_else(|_| path.to_owned(), Path::to_owned)
}
