//! The recording itself: one loop that drains, merges, translates and looks after the process.

use crate::drain::{Drain, Found, Lane, Stamped};
use crate::handed_out::HandedOutBooks;
use crate::heartbeat::Heartbeat;
use crate::item::BATCH;
use crate::job::{self, Told};
use crate::limits;
use crate::liveness::{self, Asker, Claim, Liveness};
use crate::map_file::{MapFile, WriterLock};
use crate::nvml::Sampler;
use crate::oom::{Answer, Answers};
use crate::output::{self, Overwrite, TraceFile};
use crate::process::{self, AddressSpace, Fate, Reach, Target};
use crate::segments::Bounds;
use crate::standstill::Standstill;
use crate::suspended::Suspension;
use crate::symbol_files::{Astray, SymbolFiles, Unmarked};
use crate::symbols::{CLibrary, Patience, Symbols};
use crate::ticks::{self, Moment, Timeline};
use crate::translate::Translator;
use crate::witness::{Witness, tell_state, wake_process};
use crate::write::{End, WriterThread};
use crate::{Error, growth, messages, say};
use gputrace_ring::map::{
    ALONE, COMPLETE, EXITING, FAILED, Header, LostLine, NO_RECORDER, OFF, RECORDING, SANDBOXED, STRANGER,
    UNDECIDED,
};
use gputrace_ring::notices::LONGEST;
use gputrace_schemas::event::{LostCause, Mapping, Module, Nanos, Process};
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Events younger than this wait for those of other threads that were stamped earlier and are not in the ring yet.
const HOLD: u64 = 50_000_000;
/// Shortest and longest pause between two looks at the ring.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));
/// The longest pause while the recording is younger than this: a program that soon ends waits at its end until we look.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const YOUNG: Duration = Duration::from_millis(100);
/// How often the process and its threads are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How often threads are asked for their names and the ring for its mapping.
const NAMES_EVERY: Duration = Duration::from_secs(1);
/// The mappings have settled when nothing was mapped for this long.
const MAPPINGS_AFTER: Duration = Duration::from_millis(10);
/// Reading the mappings takes at most this part of the recorder's time.
const MAPPINGS_PART: u32 = 20;
/// How long names may be looked for while the process waits for us.
const SYMBOLS_WAITING: Duration = Duration::from_millis(1500);
/// How much of a processor the search for names may take when the process waits no more, and how long it may be about it: where the
/// process has ended, and where it runs on.
const SYMBOLS_AFTER: Duration = Duration::from_secs(10);
const SYMBOLS_AFTER_END: Duration = Duration::from_secs(30);
const SYMBOLS_DETACHED: Duration = Duration::from_secs(120);
/// How long out-of-memory errors may take to be answered while the process waits for us.
const ANSWER_WAITING: Duration = Duration::from_millis(2000);
/// The same for what follows the answer.
const FOLLOW_UP_WAITING: Duration = Duration::from_millis(1000);
/// The same when nobody waits.
const ANSWER_AFTER: Duration = Duration::from_secs(10);
/// How long a process is expected to take from the end of `main` to its own.
const ENDING: Duration = Duration::from_secs(2);
/// How often NVML's thread is told what was handed out, while it looks for the process.
const HANDED_OUT_EVERY: Duration = Duration::from_millis(50);
/// Most files that are held open for their names.
const MOST_ASTRAY: usize = 256;

/// How to record.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Pattern of the trace's name: `%e` executable, `%h` host, `%p` process id, `%r` rank, `%l` rank on the host, `%n`
    /// a counter that makes the name new, `%t` seconds since 1970, `%q{NAME}` a variable, `%%`. `None` is
    /// `gputrace-%e.%h.r%r.%p.gtr`, without `.r%r` for a process without a rank.
    pub output: Option<String>,
    /// What to do if the trace exists.
    pub overwrite: Overwrite,
    /// When the job began whose processes share `output`; `None` is when the process itself began.
    pub job_began: Option<Moment>,
    /// The process started us: our environment is its own.
    pub is_its_child: bool,
    /// What it left open for us.
    pub inherited: Inherited,
    /// The process has ended, says somebody who must know: it is not looked for, and the ring is read as it is.
    pub process_is_gone: bool,
    /// Leave the ring's file where it is at the end.
    pub keep_ring: bool,
    /// The handler of requests that fail for lack of memory.
    pub on_oom: Option<Answer>,
    /// How much of the recording is kept.
    pub bounds: Bounds,
    /// After how long a silence the stacks of a rank of a job are read; `None` is never.
    pub hang_after: Option<Duration>,
}

/// Numbers of descriptors that the process left open for us.
#[derive(Clone, Copy, Debug, Default)]
pub struct Inherited {
    /// The ring.
    pub ring: Option<i32>,
    /// The process itself (`pidfd_open(2)`).
    pub process: Option<i32>,
}

/// The recording.
#[derive(Debug)]
pub struct Summary {
    /// The trace.
    pub trace: PathBuf,
    /// The process.
    pub pid: u32,
    /// Events in the trace, those included that the recorder made itself.
    pub n_events: u64,
    /// Events that the process dropped because the ring was full, it had too many threads, ...
    pub n_lost: u64,
    /// Records of the ring that could not be read.
    pub n_damaged: u64,
    /// Events that could not be written.
    pub n_dropped: u64,
    /// Bytes of the trace.
    pub bytes: u64,
    /// The first error of writing, if there was one: the trace is readable up to there.
    pub error: Option<std::io::Error>,
}

impl Summary {
    /// As the job hears of it.
    fn told(&self) -> Told {
        Told::Ended {
            pid: self.pid,
            trace: job::absolute(&self.trace),
            n_events: self.n_events,
            n_lost: self.n_lost.saturating_add(self.n_damaged).saturating_add(self.n_dropped),
            bytes: self.bytes,
            error: self.error.as_ref().map(ToString::to_string),
        }
    }
}

/// Records a ring until its process is gone (or was gone before), and finishes the trace. Where an earlier recorder
/// was killed, this one continues: the trace has what that one had not taken from the ring yet.
///
/// # Errors
/// Another recorder has the ring, it cannot be read, whether its process lives cannot be known, or the trace cannot be
/// made. A trace that cannot be written to its end is no error.
pub fn record(ring: &Path, options: Options) -> Result<Summary, Error> {
    limits::prepare();
    let file = match options.inherited.ring {
        Some(number) => MapFile::inherit(ring, number)?,
        None => MapFile::open(ring)?,
    };
    file.lock()?;
    let asker = Asker {
        process: options.inherited.process.and_then(liveness::inherited),
        is_its_child: options.is_its_child,
        process_is_gone: options.process_is_gone,
    };
    // Nothing in the ring is changed before this is known.
    let liveness = Liveness::find(&file, asker)?;
    let map = file.map();
    let header = map.header();
    let witness = Witness::new(map, liveness.number_in_proc(Claim::of(header)), options.is_its_child);
    let before = header.recorder.value.swap(RECORDING, Ordering::AcqRel);
    // A session that begins waits a moment for this.
    wake_process(header);
    let recorded: Result<Summary, Error> = std::thread::scope(|scope| {
        // Before anything that takes long: a process that is at its end already waits for an answer.
        let _watch = witness.watch(scope, &file);
        let mut recorder = Recorder::start(&file, liveness, &witness, &options)?;
        if before == RECORDING {
            // A recorder was here before us, and took definitions with it.
            header.definitions.value.fetch_add(1, Ordering::Release);
            recorder.continues = true;
        }
        recorder.run();
        Ok(recorder.finish())
    });
    match recorded {
        Ok(summary) => {
            if header.process.value.load(Ordering::Acquire) == OFF {
                file.free_memory();
            }
            // Who finds neither ring nor word of it may be sure that none will come.
            job::tell(options.job_began, &summary.told());
            if !options.keep_ring {
                remove(file.path());
            }
            Ok(summary)
        }
        Err(error) => {
            // As at the end: before the ring goes.
            job::tell(options.job_began, &Told::Failed { why: error.with_cause() });
            tell_state(header, FAILED);
            // Nobody will read it: without this the memory would stay taken.
            if !options.keep_ring && before == NO_RECORDER {
                remove(file.path());
            }
            Err(error)
        }
    }
}

/// A name under `/proc` goes away by itself.
fn remove(ring: &Path) {
    if !ring.starts_with("/proc") {
        let _ = std::fs::remove_file(ring);
    }
}

/// Why the loop ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ending {
    /// The process is gone, whatever ended it, or is another program now.
    Gone,
    /// The shim stepped aside.
    Off,
    /// Somebody cut the ring's file.
    Cut,
}

struct Recorder<'a> {
    file: &'a MapFile,
    /// Answers what the process asks at its end.
    witness: &'a Witness,
    /// The ring's file is to stay.
    keeps_ring: bool,
    liveness: Liveness,
    target: Target,
    /// A recorder before us had the events before the first that we find.
    continues: bool,
    /// It was seen to live.
    was_alive: bool,
    /// When it is gone, it ended just now: it was seen to live, or has just started us.
    ends_now: bool,
    /// The trace says how it ended.
    has_told_end: bool,
    /// The trace says that a sandbox came.
    has_told_sandbox: bool,
    /// We are a process of our own, and no thread of somebody else's.
    has_own_process: bool,
    /// When the process was last seen alive.
    alive_at: Nanos,
    heartbeat: Heartbeat,
    standstill: Standstill,
    suspension: Suspension,
    drain: Drain,
    timeline: Timeline,
    translator: Translator,
    handed_out: HandedOutBooks,
    /// When the sampling thread was told of them last.
    handed_out_at: Instant,
    /// Events that wait for [`HOLD`].
    waiting: Vec<Stamped>,
    /// Threads of which nothing more will come than is waiting, and the ticks when that was known.
    ended: Vec<(u64, Lane)>,
    writer: WriterThread,
    /// Until the process says that it ends: what it holds then is no longer news.
    sampler: Option<Sampler>,
    answers: Option<Answers>,
    trace: PathBuf,
    facts: Process,
    losses: [u64; 4],
    n_lost: u64,
    n_damaged: u64,
    damaged_told: u64,
    /// How far [`gputrace_ring::notices`] was read, and how many found no room.
    notices_read: usize,
    notices_dropped: u32,
    mappings: MappingsWatch,
    n_devices: usize,
    /// By the start of the module: its names are looked for when the process may be gone.
    astray: HashMap<u64, Astray>,
}

/// When the address space is worth reading again.
struct MappingsWatch {
    seen: u32,
    due: Option<Instant>,
    not_before: Instant,
    last: Vec<Mapping>,
    /// The ring was seen in it: if it is not there any more, that means something. Some file systems show other inodes there.
    had_ring: bool,
    /// The same of the lock that the mapping holds.
    had_lock: bool,
}

impl<'a> Recorder<'a> {
    fn start(
        file: &'a MapFile,
        liveness: Liveness,
        witness: &'a Witness,
        options: &Options,
    ) -> Result<Recorder<'a>, Error> {
        let map = file.map();
        let header = map.header();
        let claim = Claim::of(header);
        let target = Target::new(claim.pid, liveness.number_in_proc(claim), claim.start_time);
        // First of all: a process that ends at once has no mappings any more when all else is ready.
        let space = target.address_space(file.inode());
        let calibration = map.calibration();
        let environ = options.is_its_child.then(process::own_environment);
        let facts = target.facts(Nanos(calibration.monotonic), calibration.realtime, environ);
        let pattern = output::pattern(options.output.as_deref(), &facts);
        let job_began = options.job_began.or_else(|| target.began()).unwrap_or_else(Moment::now);
        let variable = |name: &str| std::env::var(name).ok();
        let made = output::create(&pattern, &facts, options.overwrite, job_began, variable)?;
        let (trace, instead_of) = (made.path, made.instead_of);
        let trace = if options.is_its_child { output::leave_folder(trace) } else { trace };
        let failed = |source| Error::Output { file: trace.clone(), source };
        let writer =
            WriterThread::start(TraceFile::new(made.file), trace.clone(), options.bounds).map_err(failed)?;
        let ring = file.path().to_owned();
        job::tell(
            options.job_began,
            &Told::Began { pid: facts.pid, trace: job::absolute(&trace), ring, instead_of },
        );
        let is_gone = liveness.is_gone();
        let numbers = (!is_gone).then(|| liveness::numbers(claim, target.in_proc()));
        let sampler = Sampler::start(numbers, writer.outlet());
        let lacks_threads = !is_gone && !sampler.is_running();
        let answers = options
            .on_oom
            .and_then(|answer| Answers::start(answer, trace.clone(), writer.outlet(), sampler.inquirer()));
        let standstill = Standstill::new(options.hang_after, facts.rank.is_some());
        let mut recorder = Recorder {
            file,
            drain: Drain::new(map),
            // Our parent has just made the ring.
            timeline: Timeline::new(map.clock(), calibration, options.is_its_child),
            translator: Translator::new(),
            handed_out: HandedOutBooks::default(),
            handed_out_at: Instant::now(),
            waiting: Vec::new(),
            ended: Vec::new(),
            writer,
            sampler: Some(sampler),
            answers,
            trace,
            facts,
            losses: [0; 4],
            n_lost: 0,
            n_damaged: 0,
            damaged_told: 0,
            notices_read: 0,
            notices_dropped: 0,
            mappings: MappingsWatch {
                seen: header.mappings.value.load(Ordering::Acquire),
                due: None,
                not_before: Instant::now(),
                last: Vec::new(),
                had_ring: false,
                had_lock: file.writer_lock() == WriterLock::Held,
            },
            n_devices: 0,
            astray: HashMap::new(),
            continues: false,
            was_alive: !is_gone,
            ends_now: !is_gone || options.is_its_child,
            has_told_end: false,
            has_told_sandbox: false,
            has_own_process: options.is_its_child,
            alive_at: Nanos(0),
            heartbeat: Heartbeat::new(),
            standstill,
            suspension: Suspension::default(),
            liveness,
            target,
            witness,
            keeps_ring: options.keep_ring,
        };
        recorder.translator.take_numbers_from(recorder.writer.free_threads());
        recorder.translator.process(recorder.facts.clone());
        if lacks_threads {
            let text =
                "recorder.threads=refused: no threads could be started (RLIMIT_NPROC?); NVML is not queried"
                    .to_owned();
            recorder.translator.note(recorder.now(), text);
        }
        // Our environment is the process's, which nobody may have told.
        let misspelt = options.is_its_child.then(crate::steering::ignored);
        for text in misspelt.into_iter().flatten() {
            recorder.translator.note(recorder.now(), format!("gputrace.said={text}"));
        }
        if let Some(text) = growth::shortfall(map).filter(|_| options.is_its_child) {
            recorder.translator.note(recorder.now(), text);
        }
        if let Some(space) = space {
            recorder.take_mappings(space);
        }
        recorder.read_mappings();
        Ok(recorder)
    }

    fn header(&self) -> &'a Header {
        self.file.header()
    }

    fn run(&mut self) {
        let mut pause = PAUSES.0;
        let mut look_at = Instant::now();
        let mut names_at = Instant::now() + NAMES_EVERY;
        let mut settled_at = None;
        let mut busy_at = Instant::now();
        let began = Instant::now();
        // A ring whose process is gone already is only read.
        if !self.was_alive {
            return self.end(Ending::Gone);
        }
        loop {
            // Where the witness has no thread of its own.
            self.witness.grow(self.file);
            let n_records = self.pass();
            if self.file.is_cut() {
                return self.end(Ending::Cut);
            }
            if n_records > 0 {
                busy_at = Instant::now();
                self.standstill.busy();
                self.tell_suspension(Suspension::runs);
            }
            let longest = if began.elapsed() < YOUNG { FIRST_PAUSE } else { PAUSES.1 };
            pause = if n_records > 0 { PAUSES.0 } else { (pause * 2).min(longest) };
            self.watch_mappings();
            self.watch_devices();
            self.tell_losses();
            self.tell_sandbox();
            self.emit(false);
            let now = Instant::now();
            // Where the witness has no thread of its own.
            self.witness.look();
            let state = self.header().process.value.load(Ordering::Acquire);
            let verdict = self.header().exit.verdict.load(Ordering::Acquire);
            if state == EXITING && ![UNDECIDED, STRANGER].contains(&verdict) && settled_at.is_none() {
                self.settle();
                settled_at = Some(Instant::now());
            }
            // While the process ends, every look counts: the next command may want the trace.
            let ending = settled_at.is_some_and(|at| at.elapsed() < ENDING);
            if now >= look_at || ending {
                look_at = now + LOOK_EVERY;
                if let Some(ending) = self.look(state) {
                    self.end(ending);
                    return;
                }
            }
            if now >= names_at {
                names_at = now + NAMES_EVERY;
                self.look_at_threads();
                if now - busy_at > NAMES_EVERY {
                    self.tell_suspension(|it, target| it.look(target));
                }
                // A process that has become another program by `exec` lives on, without us.
                if now - busy_at > NAMES_EVERY && self.is_another_program() {
                    // Or one whose session has just ended: it unmaps its ring then.
                    self.end(if self.is_off() { Ending::Off } else { Ending::Gone });
                    return;
                }
            }
            // The witness wakes us when the process comes to its end.
            std::thread::park_timeout(if ending { PAUSES.0 } else { pause });
        }
    }

    /// One look at the ring; how many records it had.
    fn pass(&mut self) -> u64 {
        // Before the ring is looked at: all that was stamped until now, less what is on its way, is in it.
        self.timeline.update();
        let mut found = Found::default();
        self.drain.pass(&mut found);
        self.take(found)
    }

    fn take(&mut self, found: Found) -> u64 {
        for (lane, tid) in found.lanes {
            let name = self.target.thread_name(tid).unwrap_or_default();
            self.translator.lane(lane, tid, name);
        }
        for definition in found.definitions {
            self.translator.define(definition);
        }
        if found.events.iter().any(Stamped::takes_hidden_memory)
            && let Some(sampler) = &self.sampler
        {
            sampler.now();
        }
        self.waiting.extend(found.events);
        let now = self.timeline.now();
        self.ended.extend(found.ended.into_iter().map(|lane| (now, lane)));
        self.n_damaged += found.damaged;
        found.n_records
    }

    /// Translates what has waited long enough, or everything.
    fn emit(&mut self, everything: bool) {
        // The youngest time that no other thread can come before any more.
        let until = if everything {
            u64::MAX
        } else {
            let hold = self.timeline.ticks_in(HOLD);
            self.timeline.now().saturating_sub(hold).min(self.timeline.settled())
        };
        // Stable: one thread's events of one tick keep their order. Mostly sorted already, which this sort is quick at.
        self.waiting.sort_by_key(|stamped| stamped.ticks);
        let ready = self.waiting.partition_point(|stamped| stamped.ticks <= until);
        let oldest_left = self.waiting.get(ready).map_or(u64::MAX, |stamped| stamped.ticks);
        if self.continues && ready > 0 {
            self.continues = false;
            let first = self.waiting.first().map_or(0, |stamped| self.timeline.nanos(stamped.ticks));
            (self.facts.since, self.facts.after_gap) = (Nanos(first.saturating_sub(1)), true);
            self.translator.process(self.facts.clone());
        }
        let mut failures = Vec::new();
        let wants_handed_out = self.sampler.as_ref().is_some_and(Sampler::wants_handed_out);
        for stamped in self.waiting.drain(..ready) {
            self.heartbeat.event(&stamped);
            self.standstill.event(&stamped);
            if wants_handed_out {
                self.handed_out.event(&stamped, self.timeline.nanos(stamped.ticks));
            }
            failures.extend(self.translator.event(stamped, &self.timeline));
            if self.translator.n_items() >= BATCH {
                self.writer.send(self.translator.take());
            }
        }
        self.writer.send(self.translator.take());
        if wants_handed_out && (everything || self.handed_out_at.elapsed() >= HANDED_OUT_EVERY) {
            self.handed_out_at = Instant::now();
            // Nothing more comes after everything.
            let until = if everything { u64::MAX } else { self.timeline.nanos(until) };
            if let Some(sampler) = &self.sampler {
                sampler.handed_out(until, self.handed_out.take());
            }
        }
        let translator = &mut self.translator;
        self.ended.retain(|(ticks, lane)| {
            let has_left = *ticks < oldest_left;
            if has_left {
                translator.end_lane(*lane);
            }
            !has_left
        });
        // What fails is in the writer's hands before anybody is told to look there.
        if let Some(answers) = &mut self.answers {
            failures.into_iter().for_each(|failure| answers.tell(failure));
        }
    }

    fn now(&self) -> Nanos {
        Nanos(ticks::monotonic())
    }

    /// Messages that standard error did not take: the library's, and our own.
    fn tell_unsaid(&mut self) {
        let notices = &self.header().notices;
        let mut text = [0; LONGEST];
        while let Some(length) = notices.next(&mut self.notices_read, &mut text) {
            let text = String::from_utf8_lossy(text.get(..length).unwrap_or_default());
            self.translator.note(self.now(), format!("gputrace.said={text}"));
        }
        let dropped = notices.dropped();
        if dropped > self.notices_dropped {
            let text = format!(
                "gputrace.said={} more messages that did not fit into the ring",
                dropped - self.notices_dropped
            );
            self.translator.note(self.now(), text);
            self.notices_dropped = dropped;
        }
        for text in messages::take_unsaid() {
            self.translator.note(self.now(), format!("gputrace.said={text}"));
        }
    }

    fn tell_losses(&mut self) {
        self.tell_unsaid();
        let header = self.header();
        let lines: [(&LostLine, LostCause); 4] = [
            (&header.lost_full, LostCause::RingFull),
            (&header.lost_threads, LostCause::TooManyThreads),
            (&header.lost_nested, LostCause::Nested),
            (&header.lost_starting, LostCause::Starting),
        ];
        let now = self.now();
        for ((line, cause), told) in lines.into_iter().zip(&mut self.losses) {
            let lost = line.events.load(Ordering::Relaxed);
            if lost > *told {
                self.translator.lost(now, cause, lost - *told);
                // The counters are the process's, and may be anything.
                self.n_lost = self.n_lost.saturating_add(lost - *told);
                *told = lost;
            }
        }
        if self.n_damaged > self.damaged_told {
            self.translator.lost(now, LostCause::Damaged, self.n_damaged - self.damaged_told);
            self.damaged_told = self.n_damaged;
        }
    }

    fn tell_sandbox(&mut self) {
        if !self.has_told_sandbox && self.header().sandbox.state.load(Ordering::Acquire) == SANDBOXED {
            self.has_told_sandbox = true;
            let text = "sandbox=added: the program added a filter of system calls after the recording began. From here on, the library makes no call that the program does not make, and the process does not wait for the trace at its end";
            self.translator.note(self.now(), text.to_owned());
        }
    }

    fn tell_suspension(&mut self, look: impl Fn(&mut Suspension, &Target) -> Vec<String>) {
        for note in look(&mut self.suspension, &self.target) {
            self.translator.note(self.now(), note);
        }
    }

    fn watch_devices(&mut self) {
        let devices = self.translator.devices();
        if devices.len() != self.n_devices {
            self.n_devices = devices.len();
            if let Some(sampler) = &self.sampler {
                sampler.devices(devices);
            }
        }
    }

    fn watch_mappings(&mut self) {
        let now = Instant::now();
        let seen = self.header().mappings.value.load(Ordering::Acquire);
        if seen != self.mappings.seen {
            self.mappings.seen = seen;
            self.mappings.due = Some((now + MAPPINGS_AFTER).max(self.mappings.not_before));
            if let Some(sampler) = &self.sampler {
                sampler.now();
            }
        }
        if self.mappings.due.is_some_and(|due| now >= due) {
            self.mappings.due = None;
            self.read_mappings();
            self.mappings.not_before = now + now.elapsed() * MAPPINGS_PART;
        }
    }

    /// Whether nobody maps the ring any more, though the process lives.
    fn is_another_program(&mut self) -> bool {
        let lock = self.file.writer_lock();
        self.mappings.had_lock |= lock == WriterLock::Held;
        !self.read_mappings() || (self.mappings.had_lock && lock == WriterLock::Free)
    }

    /// Reads the address space; `false` if the ring is no longer in it.
    fn read_mappings(&mut self) -> bool {
        self.target.address_space(self.file.inode()).is_none_or(|space| self.take_mappings(space))
    }

    /// The library records no more, and has unmapped the ring.
    fn is_off(&self) -> bool {
        self.header().process.value.load(Ordering::Acquire) == OFF
    }

    /// The same of an address space that was read.
    fn take_mappings(&mut self, space: AddressSpace) -> bool {
        let n_known = space.modules.len() - self.translator.unknown_modules(&space.modules).len();
        if !space.has_ring && self.mappings.had_ring && !(self.is_off() && n_known > 0) {
            // Another program's address space is none of this trace.
            return false;
        }
        self.mappings.had_ring |= space.has_ring;
        if space.mappings.mapped != self.mappings.last {
            self.mappings.last.clone_from(&space.mappings.mapped);
            self.translator.mappings(space.mappings);
        }
        let fresh = self.translator.unknown_modules(&space.modules);
        if !fresh.is_empty() {
            self.add_modules(fresh, &space.deleted);
        }
        self.hold_deleted(&space.modules, &space.deleted);
        true
    }

    /// Files that were deleted since they were opened by their paths: only the process still leads to them.
    fn hold_deleted(&mut self, modules: &[Module], deleted: &HashSet<u64>) {
        let is_lost = |start: u64| deleted.contains(&start) && !self.astray.contains_key(&start);
        let lost: Vec<&Module> = modules.iter().filter(|module| is_lost(module.start)).collect();
        for module in lost {
            if self.astray.len() >= MOST_ASTRAY {
                return;
            }
            let held = self.target.open(module, Fate::Deleted).map(|(file, _)| Astray::Held(file));
            self.astray.insert(module.start, held.unwrap_or(Astray::Gone));
        }
    }

    fn add_modules(&mut self, mut modules: Vec<Module>, deleted: &HashSet<u64>) {
        for module in &mut modules {
            let fate = if deleted.contains(&module.start) { Fate::Deleted } else { Fate::There };
            self.astray.remove(&module.start);
            match self.target.open(module, fate) {
                Some((file, reach)) => {
                    process::read_module(module, &file);
                    if reach == Reach::Astray && self.astray.len() < MOST_ASTRAY {
                        self.astray.insert(module.start, Astray::Held(file));
                    }
                }
                None if fate == Fate::Deleted => {
                    self.astray.insert(module.start, Astray::Gone);
                }
                None => {}
            }
        }
        if self.facts.torch_version.is_none()
            && let Some(version) = self.target.torch_version(&modules)
        {
            self.translator.torch_version(self.now(), &version);
            self.facts.torch_version = Some(version);
            self.translator.process(self.facts.clone());
        }
        self.translator.modules(modules);
    }

    /// Whether this is the end.
    fn look(&mut self, state: u32) -> Option<Ending> {
        let before = self.now();
        if self.liveness.is_gone() {
            return Some(Ending::Gone);
        }
        self.alive_at = before;
        if state != EXITING
            && let Some(alive) = self.heartbeat.beat(&self.target, &self.timeline)
        {
            self.translator.note(before, alive.to_string());
        }
        self.look_at_stacks(state);
        (state == OFF).then_some(Ending::Off)
    }

    /// Stacks of a process that stands still.
    fn look_at_stacks(&mut self, state: u32) {
        if state == EXITING {
            return;
        }
        let Some(read) = self.standstill.look(&self.target) else { return };
        let now = self.now();
        self.standstill.write(&mut self.translator, now, read);
    }

    fn look_at_threads(&mut self) {
        self.drain.look_at_lines();
        let target = &self.target;
        self.translator.rename_threads(|tid| target.thread_name(tid));
    }

    /// The process waits: everything it has written goes to the file, with names as far as time allows.
    fn settle(&mut self) {
        self.read_mappings();
        while self.pass() > 0 {}
        // What has just been read is younger than the newest pair of clocks.
        self.timeline.close();
        self.tell_losses();
        self.note_end("exit");
        self.emit(true);
        // An error that ends the program is answered before the shell shows its prompt.
        if let Some(answers) = &self.answers {
            answers.wait(ANSWER_WAITING, FOLLOW_UP_WAITING);
        }
        // A sample that came after the end was written would only open it again.
        if let Some(sampler) = self.sampler.take() {
            sampler.stop();
        }
        self.symbolise(Patience::of(SYMBOLS_WAITING));
        self.writer.settle(End::Closed);
        if self.header().exit.verdict.load(Ordering::Acquire) == ALONE && !self.keeps_ring {
            // Where the process is the first of a PID namespace, we may not live to do it, and `/dev/shm` may be the host's.
            remove(self.file.path());
        }
        tell_state(self.header(), COMPLETE);
    }

    fn end(&mut self, ending: Ending) {
        // The last pass was before the process was found gone.
        self.timeline.close();
        let mut found = Found::default();
        match ending {
            Ending::Gone | Ending::Cut => self.drain.last_pass(&mut found),
            Ending::Off => {
                if self.has_own_process {
                    limits::stand_back();
                }
                self.drain.pass(&mut found);
                // A chunk may have hidden a later one of its thread.
                self.drain.pass(&mut found);
                self.drain.close(&mut found);
                self.note_end("detached");
            }
        }
        self.take(found);
        if ending == Ending::Cut {
            say(&format!(
                "something truncated the ring {}: its contents are lost, and the trace ends there",
                self.file.path().display()
            ));
            self.translator.note(
                self.now(),
                "ring.cut: something truncated the ring's file; the trace ends there".to_owned(),
            );
        }
        self.tell_losses();
        if self.mappings.last.is_empty() && ending == Ending::Gone {
            let text =
                "mappings=unread: the process ended or became invisible before its mappings could be read";
            self.translator.note(self.now(), text.to_owned());
        }
        self.tell_end();
        if self.translator.n_collisions() > 0 {
            let text = format!("stacks.collisions={}", self.translator.n_collisions());
            self.translator.note(self.now(), text);
        }
        if self.translator.texts_are_full() {
            let text = "marks.texts=full: later marks with new names have none".to_owned();
            self.translator.note(self.now(), text);
        }
        self.emit(true);
        if let Some(answers) = &self.answers {
            answers.wait(ANSWER_AFTER, ANSWER_AFTER);
        }
        let most = if ending == Ending::Off { SYMBOLS_DETACHED } else { SYMBOLS_AFTER_END };
        let n_late = self.symbolise(Patience::of_work(SYMBOLS_AFTER, most));
        if n_late > 0 {
            let text = format!("symbols.late={n_late}: names that there was no time to look up");
            self.translator.note(self.now(), text);
            self.writer.send(self.translator.take());
        }
    }

    /// How the process ended, if nobody has said so. One that came to its exit where other threads run does not wait for us, and
    /// may be gone when we look next. One that became another program has not ended.
    fn tell_end(&mut self) {
        if !self.ends_now || self.has_told_end {
            return;
        }
        if self.header().process.value.load(Ordering::Acquire) == EXITING {
            self.note_end("exit");
        } else if self.liveness.is_gone() {
            let status = self.liveness.wait_status(self.target.in_proc());
            // A busy machine lets us look late: what ended before what else is known only from when each was still seen alive.
            if self.alive_at != Nanos(0) {
                self.translator.note(self.now(), format!("process.alive_at={}", self.alive_at.0));
            }
            self.note_end(&match status {
                None => "killed".to_owned(),
                Some(status) if status & 0x7f != 0 => format!("signal {}", status & 0x7f),
                Some(status) => format!("_exit {}", status >> 8 & 0xff),
            });
        }
    }

    fn note_end(&mut self, how: &str) {
        self.has_told_end = true;
        self.translator.note(self.now(), format!("process.end={how}"));
    }

    /// How many addresses there was no time for.
    fn symbolise(&mut self, patience: Patience) -> usize {
        // Debug files can be larger than what memory we may have (RLIMIT_AS): if names are our end, no event is lost.
        self.writer.settle(End::Open);
        if self.liveness.is_gone() {
            self.target.is_gone();
        }
        let roots = self.target.root().into_iter().chain(["/".into()]).collect();
        let files = SymbolFiles { roots, astray: &self.astray, unmarked: Unmarked::ByPath };
        let mut symbols = Symbols::new(patience, CLibrary::Functions, files);
        let n_late = self.translator.symbolise(&mut symbols);
        for line in self.translator.too_large(&symbols) {
            self.translator.note(self.now(), format!("symbols.left_out={line}"));
        }
        self.writer.send(self.translator.take());
        n_late
    }

    fn finish(self) -> Summary {
        let pid = self.target.pid();
        let header = self.header();
        if let Some(sampler) = self.sampler {
            sampler.stop();
        }
        let written = self.writer.finish();
        tell_state(header, COMPLETE);
        if written.n_dropped > 0 {
            say(&format!("{} events could not be written to {}", written.n_dropped, self.trace.display()));
        }
        Summary {
            trace: self.trace,
            pid,
            n_events: written.n_events,
            n_lost: self.n_lost,
            n_damaged: self.n_damaged,
            n_dropped: written.n_dropped,
            bytes: written.bytes,
            error: written.error,
        }
    }
}
