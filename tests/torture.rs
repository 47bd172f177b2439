//! The torture: programs that do to a library what production does, each alone and recorded. A recorded program ends as it does
//! alone, says what it says alone, and the losses that its traces show are the losses they had.
//!
//! A scenario is a row of [`SCENARIOS`] and a program in `torture/`; nothing else has to be told of it. The programs count their own
//! calls on a page of shared memory (`torture/torture.h`), and each size and address carries who asked for it and when, so that a
//! record that is torn, missing or there twice is seen.
//!
//! `GPUTRACE_TORTURE=long` makes of the half minute a quarter of an hour, `GPUTRACE_TORTURE_ONLY=WORD` runs the scenarios with that word
//! in their names, `GPUTRACE_TORTURE_SEED=N` repeats the random instants of a run.

use gputrace_skip::skip;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use gputrace_schemas::event::{Action, EventKind, LostCause};
use gputrace_schemas::reader::{Error, Trace};
use gputrace_tests::recorded;

/// What a trace must say of the calls that were made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Truth {
    /// Each call that came back is an event, and nothing is lost.
    Whole,
    /// What is not an event is shown as lost.
    Shown,
    /// Nobody can know how much is missing (the recorder was killed, the disk was full): no more than was made, none torn.
    Bounded,
    /// There is no trace at all.
    Nothing,
}
use Truth::{Bounded, Nothing, Shown, Whole};

/// One row of the torture.
#[derive(Clone, Copy)]
struct Scenario {
    /// What it is, in words; no two have the same.
    name: &'static str,
    /// A file in `torture/`: C, C++ or Python (which runs on each of `GPUTRACE_TEST_PYTHONS`, or `python3`).
    program: &'static str,
    /// Its arguments. `#` is the scenario's size; `@NAME` is the library made of `torture/NAME.c`.
    arguments: &'static str,
    /// The size: in the short form and in the long one.
    size: [u32; 2],
    /// How often it is recorded.
    rounds: [u32; 2],
    /// Words of `torture/launch.c` for its surroundings, with `@NAME` as above; `~N` is a random number below N, and
    /// `FOLDER` is where the traces go.
    around: &'static str,
    /// Options of the compiler.
    options: &'static str,
    /// Variables, also for the run alone.
    env: &'static [(&'static str, &'static str)],
    /// Somebody calls `gputrace recover` on its ring again and again.
    is_recovered_meanwhile: bool,
    /// What the traces must say.
    truth: Truth,
    /// How many calls they must have at least, in the short form.
    least: u64,
    /// Alone it sometimes ends otherwise: what differs counts only if it cannot be seen alone in so many tries.
    tries: u32,
}

const PLAIN: Scenario = Scenario {
    name: "",
    program: "work.c",
    arguments: "",
    size: [0, 0],
    rounds: [1, 1],
    around: "",
    options: "",
    env: &[],
    is_recovered_meanwhile: false,
    truth: Whole,
    least: 0,
    tries: 0,
};

/// A recorded program may take this many times the processor time that it takes alone, and [`SLACK`] beside it: far more than
/// a call costs, so that it is no question of how busy the machine is, and far less than what an unlucky search costs.
const FACTOR: f64 = 10.0;
/// Seconds of a processor.
const SLACK: f64 = 3.0;
/// Seconds of a processor for a session, of which a process has one: its ring, and its recorder, which reads the symbols of all
/// libraries (40 ms of a processor here).
const SESSION: f64 = 0.1;
/// No scenario takes a tenth of this, on a machine that does nothing else.
const HANG: Duration = Duration::from_secs(120);

/// [`HANG`] on a machine that does something else: as much longer as there is more to do than there are processors.
fn is_hang(began: Instant) -> bool {
    let elapsed = began.elapsed();
    elapsed > HANG && {
        let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        // The mean of a quarter of an hour remembers what slowed the run down; that of a minute sees what does.
        let loads = text.split(' ').take(3).filter_map(|word| word.parse::<f64>().ok());
        let processors = std::thread::available_parallelism().map_or(1, usize::from) as f64;
        elapsed > HANG.mul_f64(loads.fold(1.0, |most, load| most.max(load / processors)))
    }
}

/// Room for a chunk of each thread of the short form, so that nothing hangs on how soon the recorder gets to a processor. The long
/// form needs a recorder that keeps up with threads that do nothing else.
const A_CHUNK_EACH: &[(&str, &str)] = &[("GPUTRACE_RING_BYTES", "134217728")];
/// A ring that somebody must read afterwards.
const SMALL: (&str, &str) = ("GPUTRACE_RING_BYTES", "4194304");
/// What is said to people when memory runs out is no part of a comparison.
const QUIET: &[(&str, &str)] = &[("GPUTRACE_OOM", "0")];
/// System calls that containers and sandboxes refuse.
macro_rules! rare {
    () => {
        "memfd_create,close_range,process_vm_readv,ptrace,pidfd_open,membarrier"
    };
}
use Scenario as S;

#[rustfmt::skip] // A table.
const SCENARIOS: &[Scenario] = &[
    // What others do to the process.
    // As much as the ring holds: how often the recorder gets to a processor decides nothing.
    S { name: "threads at work", arguments: "8 #", size: [2_000, 50_000], ..PLAIN },
    S { name: "256 threads", program: "crowd.c", arguments: "256 #", size: [20, 500], ..PLAIN },
    S { name: "SIGKILL at random instants", arguments: "12 0 50", rounds: [24, 1_200], around: "sigkill=~80000", ..PLAIN },
    S { name: "SIGKILL while the recorder is started", arguments: "4 0 50", rounds: [2, 20], around: "sigkill-at-clone=100000", ..PLAIN },
    S { name: "SIGKILL while the recorder is started, by a subreaper", arguments: "4 0 50", rounds: [2, 20], around: "subreaper sigkill-at-clone=100000", ..PLAIN },
    S { name: "SIGKILL while it begins", arguments: "4 0 50", rounds: [12, 400], around: "sigkill=~20000", ..PLAIN },
    S { name: "SIGKILL at full speed", arguments: "4 0", rounds: [8, 200], around: "sigkill=~60000", truth: Shown, ..PLAIN },
    S { name: "switched off", arguments: "4 1000", env: &[("GPUTRACE", "off")], truth: Nothing, ..PLAIN },
    // The recorder.
    S { name: "a recorder that is killed", arguments: "4 # 500", size: [2_000, 20_000], around: "kill-recorder=100000", truth: Bounded, ..PLAIN },
    S { name: "a recorder that is killed at once", arguments: "4 # 500", size: [1_000, 1_000], rounds: [3, 50], around: "kill-recorder=0", truth: Bounded, ..PLAIN },
    S { name: "a recorder that is stopped", arguments: "4 # 500", size: [2_000, 20_000], around: "stop-recorder=50000", truth: Shown, ..PLAIN },
    S {
        name: "a stopped recorder, and a ring that overflows",
        arguments: "4 #",
        size: [40_000, 400_000],
        around: "stop-recorder=1000",
        env: &[("GPUTRACE_RING_BYTES", "1048576"), ("GPUTRACE_EXIT_WAIT", "200")],
        truth: Shown,
        ..PLAIN
    },
    S { name: "no program beside the library", arguments: "4 1000", env: &[("GPUTRACE_RECORDER", "/nowhere/gputrace"), SMALL], ..PLAIN },
    S { name: "a recorder that cannot be executed", arguments: "4 1000", env: &[("GPUTRACE_RECORDER", "/etc/passwd"), SMALL], ..PLAIN },
    S { name: "a recorder that fails", arguments: "4 1000", env: &[("GPUTRACE_RECORDER", "/bin/false"), SMALL], ..PLAIN },
    S { name: "idle threads, and a small ring", program: "crowd.c", arguments: "100 # 20000 1", size: [20, 500], env: &[("GPUTRACE_RING_BYTES", "1048576")], truth: Shown, ..PLAIN },
    // Where the ring and the trace go.
    S { name: "/dev/shm is small", arguments: "4 2000", around: "tmpfs=/dev/shm:3m", truth: Shown, ..PLAIN },
    S { name: "/dev/shm is full", arguments: "4 2000", around: "tmpfs=/dev/shm:16k", ..PLAIN },
    S { name: "/dev/shm cannot be written", arguments: "4 2000", around: "readonly=/dev/shm", ..PLAIN },
    S { name: "no /dev/shm", arguments: "4 2000", around: "no-shm", ..PLAIN },
    S { name: "the disk of the trace is full", arguments: "4 20000", around: "tmpfs=FOLDER:16k", truth: Bounded, ..PLAIN },
    S { name: "the trace's folder cannot be written", arguments: "4 2000", around: "readonly=FOLDER", truth: Bounded, ..PLAIN },
    S { name: "no /proc", arguments: "4 2000", around: "no-proc", ..PLAIN },
    // Namespaces, parents and users.
    S { name: "PID 1", arguments: "4 2000", around: "pid proc", ..PLAIN },
    S { name: "PID 1 without a /proc of its own", arguments: "4 2000", around: "pid", ..PLAIN },
    S {
        name: "recover from another PID namespace, while threads come and go",
        program: "churn.c",
        arguments: "# 2 1",
        size: [4_000, 50_000],
        env: A_CHUNK_EACH,
        around: "pid proc",
        is_recovered_meanwhile: true,
        ..PLAIN
    },
    S { name: "recover while it is recorded", program: "churn.c", arguments: "# 2 1", size: [3_000, 30_000], is_recovered_meanwhile: true, truth: Bounded, ..PLAIN },
    S { name: "hidepid, and a process that nobody may look at", program: "churn.c", arguments: "# 2 1", size: [4_000, 50_000], env: A_CHUNK_EACH, around: "pid hidepid nobody undumpable", ..PLAIN },
    S { name: "another user", arguments: "4 2000", around: "nobody", ..PLAIN },
    S { name: "wait, as usual", program: "waits.c", arguments: "family", ..PLAIN },
    S { name: "wait, by a subreaper", program: "waits.c", around: "subreaper", ..PLAIN },
    S { name: "wait, by PID 1", program: "waits.c", around: "pid proc", ..PLAIN },
    S { name: "a subreaper that is killed", arguments: "4 0 50", rounds: [3, 50], around: "subreaper sigkill=~80000", ..PLAIN },
    S { name: "the streams are closed", arguments: "4 2000", around: "closed", ..PLAIN },
    S { name: "the working folder is gone", arguments: "4 2000", around: "folder-gone", ..PLAIN },
    // Limits.
    S { name: "RLIMIT_FSIZE of 1 MB", arguments: "4 2000", around: "limit=fsize:1024000", truth: Bounded, ..PLAIN },
    S { name: "RLIMIT_FSIZE of 4 MB", arguments: "4 2000", around: "limit=fsize:4194304", ..PLAIN },
    S { name: "RLIMIT_FSIZE of 16 kB", arguments: "4 2000", around: "limit=fsize:16384", truth: Bounded, ..PLAIN },
    S { name: "RLIMIT_FSIZE of nothing", arguments: "4 2000", around: "limit=fsize:0", truth: Bounded, ..PLAIN },
    S { name: "RLIMIT_AS of 90 MB", arguments: "4 2000", around: "limit=as:94371840", truth: Bounded, ..PLAIN },
    S { name: "RLIMIT_AS of 100 MB", arguments: "4 2000", around: "limit=as:104857600", truth: Bounded, ..PLAIN },
    S { name: "RLIMIT_AS of 200 MB", arguments: "4 2000", around: "limit=as:209715200", truth: Bounded, ..PLAIN },
    S { name: "an address space that is full for a while", program: "scarce.c", arguments: "40", truth: Shown, least: 3_000, ..PLAIN },
    S { name: "RLIMIT_NOFILE of 8", arguments: "4 2000", around: "limit=nofile:8", truth: Shown, ..PLAIN },
    S { name: "RLIMIT_NOFILE of 12, while threads come and go", program: "churn.c", arguments: "# 2 1", size: [4_000, 50_000], env: A_CHUNK_EACH, around: "limit=nofile:12", ..PLAIN },
    S { name: "RLIMIT_NPROC leaves no room for a recorder", arguments: "1 2000", around: "nobody limit=nproc:0", env: &[SMALL], ..PLAIN },
    S { name: "all memory locked", program: "locked.c", arguments: "#", size: [200, 5_000], ..PLAIN },
    S { name: "all memory locked, as little as a user may", program: "locked.c", arguments: "10", around: "nobody limit=memlock:67108864", truth: Shown, ..PLAIN },
    S { name: "SCHED_FIFO on one processor", arguments: "2 500 100", around: "fifo pin=0", ..PLAIN },
    S { name: "a thread that is pinned and real-time begins", program: "sched.c", ..PLAIN },
    // Filters of system calls.
    S { name: "seccomp refuses what is rare", arguments: "4 2000", around: concat!("errno=", rare!()), ..PLAIN },
    S { name: "seccomp kills for what is rare", arguments: "4 2000", around: concat!("kill=", rare!()), ..PLAIN },
    S { name: "seccomp refuses what is rare, and no /dev/shm", arguments: "4 2000", around: concat!("no-shm errno=", rare!()), ..PLAIN },
    S { name: "seccomp refuses the scheduler and sessions", arguments: "4 2000", around: "errno=sched_setscheduler,sched_setaffinity,setsid,prlimit64,getdents64", ..PLAIN },
    S { name: "seccomp refuses fallocate and flock", arguments: "4 2000", around: "errno=fallocate,flock", truth: Bounded, ..PLAIN },
    // Processes.
    S { name: "a storm of forks", program: "storm.c", arguments: "fork #", size: [20, 500], truth: Shown, ..PLAIN },
    S { name: "a storm of forks and execs", program: "storm.c", arguments: "exec #", size: [20, 500], truth: Shown, ..PLAIN },
    S { name: "a storm of vforks", program: "storm.c", arguments: "vfork #", size: [20, 500], truth: Shown, ..PLAIN },
    S { name: "a storm of posix_spawn", program: "storm.c", arguments: "spawn #", size: [20, 500], truth: Shown, ..PLAIN },
    S { name: "a storm of clones", program: "storm.c", arguments: "clone #", size: [20, 500], truth: Shown, ..PLAIN },
    S { name: "a storm of system", program: "storm.c", arguments: "system #", size: [10, 200], truth: Shown, ..PLAIN },
    S { name: "closefrom before the first call", program: "closes.c", arguments: "early", truth: Shown, ..PLAIN },
    S { name: "closefrom after the first call", program: "closes.c", arguments: "late", truth: Shown, ..PLAIN },
    S { name: "closefrom again and again", program: "closes.c", arguments: "often", truth: Shown, ..PLAIN },
    S { name: "closefrom, and a ring in memory", program: "closes.c", arguments: "late", around: "readonly=/dev/shm", truth: Shown, ..PLAIN },
    S { name: "others set variables while sessions begin", program: "environ.c", arguments: "#", size: [20, 500], truth: Shown, ..PLAIN },
    // Threads and stacks.
    S { name: "threads that come and go", program: "churn.c", arguments: "# 2 1", size: [5_000, 100_000], env: A_CHUNK_EACH, ..PLAIN },
    S { name: "more threads than there are lanes", program: "crowd.c", arguments: "1100 #", size: [4, 20], truth: Shown, least: 16_000, ..PLAIN },
    S { name: "many threads that come and go", program: "churn.c", arguments: "# 500 4", size: [3_000, 50_000], env: A_CHUNK_EACH, truth: Shown, ..PLAIN },
    S { name: "4000 fibers", program: "fibers.c", arguments: "4000 #", size: [4, 50], ..PLAIN },
    S { name: "coroutines of C++", program: "coroutines.cc", arguments: "#", size: [200, 4_000], ..PLAIN },
    S { name: "cancelled threads", program: "cancel.c", arguments: "deferred #", size: [30, 500], truth: Shown, ..PLAIN },
    S { name: "threads that are cancelled anywhere", program: "cancel.c", arguments: "async #", size: [30, 500], truth: Shown, ..PLAIN },
    S { name: "a cancelled thread makes the first call", program: "cancel.c", arguments: "first", ..PLAIN },
    S { name: "jumps out of calls", program: "jumps.c", arguments: "#", size: [300, 5_000], truth: Shown, ..PLAIN },
    S { name: "signals at 10 kHz", program: "signals.c", arguments: "own #", size: [3_000, 100_000], truth: Shown, ..PLAIN },
    S { name: "signals at 10 kHz on small stacks", program: "signals.c", arguments: "alternate #", size: [3_000, 100_000], truth: Shown, ..PLAIN },
    // Libraries that come and go.
    S { name: "the driver is loaded again and again", program: "loads.c", arguments: "#", size: [20, 300], options: "-DBY_DLOPEN", ..PLAIN },
    S { name: "plugins that come and go", program: "plugins.c", arguments: "@plugin #", size: [100, 3_000], ..PLAIN },
    S { name: "Python that comes and goes", program: "embeds.c", arguments: "#", size: [4, 50], truth: Shown, ..PLAIN },
    S { name: "Python that goes after the first call", program: "embeds.c", arguments: "# first", size: [2, 20], truth: Shown, ..PLAIN },
    S { name: "static thread-local storage is scarce", program: "statictls.c", arguments: "@tls", ..PLAIN },
    S { name: "static thread-local storage is scarce, and others preload too", program: "statictls.c", arguments: "@tls", around: "first=@tls", ..PLAIN },
    // The end.
    S { name: "ends by return", program: "exits.c", arguments: "return", rounds: [2, 30], truth: Shown, ..PLAIN },
    S { name: "ends by exit", program: "exits.c", arguments: "exit", rounds: [2, 30], truth: Shown, ..PLAIN },
    S { name: "ends by _exit", program: "exits.c", arguments: "_exit", rounds: [2, 30], truth: Shown, ..PLAIN },
    S { name: "ends by quick_exit", program: "exits.c", arguments: "quick_exit", rounds: [2, 30], truth: Shown, ..PLAIN },
    S { name: "ends by abort", program: "exits.c", arguments: "abort", rounds: [2, 30], truth: Shown, ..PLAIN },
    S { name: "ends by SIGSEGV", program: "exits.c", arguments: "segv", rounds: [2, 30], truth: Shown, ..PLAIN },
    S { name: "ends by SIGTERM", program: "exits.c", arguments: "term", rounds: [2, 30], truth: Shown, ..PLAIN },
    S { name: "ends by SIGKILL", program: "exits.c", arguments: "kill", rounds: [2, 30], truth: Shown, ..PLAIN },
    S { name: "ends by exit of a thread", program: "exits.c", arguments: "thread", rounds: [2, 30], truth: Shown, ..PLAIN },
    S { name: "ends after main has", program: "exits.c", arguments: "main-ends", rounds: [2, 30], truth: Shown, ..PLAIN },
    S { name: "ends with calls in atexit", program: "exits.c", arguments: "atexit", rounds: [2, 30], truth: Shown, ..PLAIN },
    S { name: "ends within its end", program: "exits.c", arguments: "atexit-exits", rounds: [2, 30], truth: Shown, ..PLAIN },
    S { name: "ends by exec", program: "exits.c", arguments: "exec", rounds: [2, 30], truth: Shown, ..PLAIN },
    // Others in the process.
    S { name: "jemalloc", arguments: "4 1000", around: "last=libjemalloc.so.2", ..PLAIN },
    S { name: "jemalloc first", arguments: "4 1000", around: "first=libjemalloc.so.2", ..PLAIN },
    S { name: "tcmalloc", arguments: "4 1000", around: "last=libtcmalloc.so.4", ..PLAIN },
    S { name: "tcmalloc first, while threads come and go", program: "churn.c", arguments: "500 2 1", around: "first=libtcmalloc_minimal.so.4", ..PLAIN },
    S { name: "mimalloc", arguments: "4 1000", around: "last=libmimalloc.so.2", ..PLAIN },
    S { name: "mimalloc first", program: "storm.c", arguments: "fork 10", around: "first=libmimalloc.so.2", ..PLAIN },
    S { name: "a library that counts calls of the C library", arguments: "1 500", around: "last=@counts", ..PLAIN },
    S { name: "a library that counts calls of the C library, first", arguments: "1 500", around: "first=@counts", ..PLAIN },
    S { name: "a limiter behind us", arguments: "4 1000", around: "last=@limiter", env: QUIET, ..PLAIN },
    S { name: "a limiter before us", arguments: "4 1000", around: "first=@limiter", env: QUIET, truth: Bounded, ..PLAIN },
    S { name: "a clock that steps", arguments: "4 500 20", around: "last=@steps", ..PLAIN },
    S { name: "a clock that steps, first", arguments: "4 500 20", around: "first=@steps", ..PLAIN },
    S { name: "ThreadSanitizer", arguments: "4 1000", options: "-fsanitize=thread", ..PLAIN },
    S { name: "ThreadSanitizer, switched off", arguments: "4 1000", options: "-fsanitize=thread", env: &[("GPUTRACE", "off")], truth: Nothing, ..PLAIN },
    S { name: "ThreadSanitizer, while threads come and go", program: "churn.c", arguments: "500 2 1", options: "-fsanitize=thread", ..PLAIN },
    S { name: "AddressSanitizer in the program", arguments: "4 1000", options: "-fsanitize=address -static-libasan", ..PLAIN },
    S { name: "AddressSanitizer's library", arguments: "4 1000", options: "-fsanitize=address", env: &[("ASAN_OPTIONS", "verify_asan_link_order=0")], ..PLAIN },
    S { name: "AddressSanitizer, and fibers", program: "fibers.c", arguments: "100 4", options: "-fsanitize=address -static-libasan", ..PLAIN },
    S { name: "UndefinedBehaviorSanitizer", arguments: "4 1000", options: "-fsanitize=undefined", ..PLAIN },
    S { name: "LeakSanitizer", arguments: "4 1000", options: "-fsanitize=leak", ..PLAIN },
    // Python.
    S { name: "Python ends while threads allocate", program: "finalisation.py", arguments: "@calls", rounds: [3, 60], truth: Shown, tries: 12, ..PLAIN },
    S { name: "Python forks", program: "processes.py", arguments: "@calls", truth: Shown, ..PLAIN },
    S { name: "Python's signal handlers", program: "handlers.py", arguments: "@calls", truth: Shown, ..PLAIN },
    S { name: "greenlets", program: "greenlets.py", arguments: "@calls", ..PLAIN },
];

/// Everything built once, and where runs have their files.
struct Workshop {
    folder: PathBuf,
    seed: AtomicU64,
    runs: AtomicU32,
    pythons: Vec<PathBuf>,
}

/// One line of the summary.
#[derive(Default)]
struct Row {
    name: String,
    rounds: u32,
    calls: u64,
    recorded: u64,
    lost: u64,
    torn: u64,
    recovered: u32,
    alone: f64,
    with: f64,
    failures: Vec<String>,
    skipped: Option<String>,
}

/// How a run ended.
struct Run {
    status: ExitStatus,
    stdout: String,
    /// Without what we say.
    stderr: String,
    said: String,
    cpu: f64,
    /// By line: calls asked for, calls that came back, requests.
    lines: Vec<Line>,
    traces: PathBuf,
    hung: Option<String>,
    began: SystemTime,
}

#[derive(Clone, Copy, Default)]
struct Line {
    requests: u64,
    asked: u64,
    completed: u64,
    process: u64,
}

/// What the traces of a run hold.
#[derive(Default)]
struct Found {
    traces: usize,
    /// Line, request, and whether it is its end.
    events: HashSet<(u64, u64, bool)>,
    by_line: BTreeMap<u64, u64>,
    unfinished: u64,
    lost: BTreeMap<&'static str, u64>,
    torn: Vec<String>,
    recovered: u32,
}

impl Found {
    fn recorded(&self) -> u64 {
        self.events.len() as u64 + self.unfinished
    }
    fn lost(&self) -> u64 {
        self.lost.values().sum()
    }
}

fn is_long() -> bool {
    std::env::var("GPUTRACE_TORTURE").is_ok_and(|form| form == "long")
}

fn say(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("torture")
}

impl Workshop {
    fn new() -> Workshop {
        let folder = std::env::temp_dir().join(format!("gputrace-torture.{}", std::process::id()));
        fs::create_dir_all(folder.join("driver")).expect("a folder");
        // Another user must be able to come here, and the working copy may be closed to it.
        let open = |path: &Path| fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("ours");
        open(&folder);
        for file in ["libgputrace.so", "gputrace"] {
            fs::copy(recorded::built().join(file), folder.join(file)).expect("a copy");
            open(&folder.join(file));
        }
        let seed = std::env::var("GPUTRACE_TORTURE_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed: u64 = seed.unwrap_or_else(|| u64::from(std::process::id()) << 32 | 0x9e37_79b9);
        say(&format!("torture: seed {seed}"));
        let list = std::env::var("GPUTRACE_TEST_PYTHONS").unwrap_or_else(|_| "python3".to_owned());
        let workshop = Workshop {
            folder,
            seed: AtomicU64::new(seed),
            runs: AtomicU32::new(0),
            pythons: list.split(':').filter_map(real_python).collect(),
        };
        workshop
            .build("driver.c", "-shared -fPIC -Wl,-soname,libcuda.so.1", "driver/libcuda.so.1")
            .expect("a driver");
        workshop.build("launch.c", "", "launch").expect("a launcher");
        workshop
    }

    fn random(&self, below: u64) -> u64 {
        // xorshift64: any order of the threads that ask gives one of its numbers.
        let step = |mut x: u64| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x
        };
        let before = self.seed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |x| Some(step(x)));
        step(before.unwrap_or_default()) % below.max(1)
    }

    /// Compiles a file of `torture/`.
    fn build(&self, source: &str, options: &str, name: &str) -> Result<PathBuf, String> {
        let target = self.folder.join(name);
        let is_cpp = source.ends_with(".cc");
        let (variable, compiler) = if is_cpp { ("CXX", "c++") } else { ("CC", "cc") };
        let mut command = Command::new(std::env::var_os(variable).unwrap_or_else(|| compiler.into()));
        command.arg(if is_cpp { "-std=gnu++20" } else { "-std=gnu11" });
        command
            .args(["-O1", "-g", "-Wall", "-Wextra", "-pthread", "-o"])
            .arg(&target)
            .arg(sources().join(source));
        let is_library = options.contains("-shared");
        if !is_library && !options.contains("-DBY_DLOPEN") && name != "launch" {
            command.arg(self.folder.join("driver/libcuda.so.1"));
        }
        let output = command.args(options.split_whitespace()).arg("-ldl").output();
        let output = output.map_err(|error| format!("no compiler: {error}"))?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() { Ok(target) } else { Err(format!("{source} {options}: {said}")) }
    }

    /// What scenarios name: their programs by source and options, and the libraries of their words.
    fn build_all(&self, scenarios: &[&Scenario]) -> BTreeMap<(String, String), Result<PathBuf, String>> {
        let mut wanted = BTreeSet::new();
        for scenario in scenarios {
            if !scenario.program.ends_with(".py") {
                wanted.insert((scenario.program.to_owned(), scenario.options.to_owned()));
            }
            for library in libraries(scenario) {
                wanted.insert((format!("{library}.c"), "-shared -fPIC".to_owned()));
            }
        }
        let wanted: Vec<_> = wanted.into_iter().collect();
        let built = Mutex::new(BTreeMap::new());
        in_parallel(wanted.len(), |at| {
            let (source, options) = &wanted[at];
            let stem = source.split('.').next().unwrap_or_default();
            let name =
                if options.starts_with("-shared") { format!("lib{stem}.so") } else { format!("{stem}.{at}") };
            let result = self.build(source, options, &name);
            built.lock().expect("no panic").insert(wanted[at].clone(), result);
        });
        built.into_inner().expect("no panic")
    }

    /// One run of a scenario, alone or recorded.
    fn run(&self, scenario: &Scenario, program: &[PathBuf], is_recorded: bool) -> Result<Run, String> {
        let number = self.runs.fetch_add(1, Ordering::Relaxed);
        let folder = self.folder.join(format!("run.{number}"));
        let traces = folder.join("traces");
        fs::create_dir_all(&traces).expect("a folder");
        fs::set_permissions(&traces, fs::Permissions::from_mode(0o777)).expect("ours");
        let page = folder.join("page");
        let file = fs::File::create(&page).expect("a file");
        file.set_len(PAGE_BYTES).expect("a sparse file");
        fs::set_permissions(&page, fs::Permissions::from_mode(0o666)).expect("ours");
        let usage = folder.join("usage");
        let (out, err) = (folder.join("stdout"), folder.join("stderr"));

        let size = scenario.size[usize::from(is_long())].to_string();
        let word = |word: &str| {
            let word = word.replace('#', &size).replace("FOLDER", &traces.display().to_string());
            let word = match word.split_once('~') {
                Some((before, below)) => format!("{before}{}", self.random(below.parse().unwrap_or(1))),
                None => word,
            };
            match word.split_once('@') {
                Some((before, name)) => {
                    format!("{before}{}", self.folder.join(format!("lib{name}.so")).display())
                }
                None => word,
            }
        };
        let mut command = Command::new(self.folder.join("launch"));
        command.args(scenario.around.split_whitespace().map(word)).arg("--").args(program);
        command.args(scenario.arguments.split_whitespace().map(word));
        command
            .env("LD_LIBRARY_PATH", self.folder.join("driver"))
            .env("TORTURE_PAGE", &page)
            .env("TORTURE_USAGE", &usage)
            .env("TORTURE_FOLDER", &folder)
            .env("GPUTRACE_RECORDER", self.folder.join("gputrace"))
            .env("GPUTRACE_OUTPUT", traces.join("%p.%t.gtr"))
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .stdin(Stdio::null())
            .stdout(fs::File::create(&out).expect("a file"))
            .stderr(fs::File::create(&err).expect("a file"))
            .process_group(0)
            .envs(scenario.env.iter().copied());
        if is_recorded {
            command.env("TORTURE_PRELOAD", self.folder.join("libgputrace.so"));
        }
        let mut child = command.spawn().map_err(|error| error.to_string())?;
        let (began, at) = (Instant::now(), SystemTime::now());
        let mut hung = None;
        let status = loop {
            if let Some(status) = child.try_wait().expect("our child") {
                break status;
            }
            if is_hang(began) {
                hung = Some(format!("hangs: {}", where_it_stands(&usage)));
                kill_group(child.id());
                break child.wait().expect("our child");
            }
            if is_recorded && scenario.is_recovered_meanwhile {
                self.recover_meanwhile(&usage, &folder);
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        if let Some(left) = wait_for_the_end(&usage) {
            hung = hung.or(Some(format!("never ends: {left}")));
        }
        let text = |path: &Path| String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned();
        let all = text(&err);
        let is_ours = |line: &&str| line.starts_with("gputrace: ");
        if let Some(reason) = all.lines().find_map(|line| line.strip_prefix("launch: skip: ")) {
            return Err(reason.to_owned());
        }
        Ok(Run {
            status,
            stdout: text(&out),
            stderr: all.lines().filter(|line| !is_ours(line)).map(without_pid).collect::<Vec<_>>().join("\n"),
            said: all.lines().filter(is_ours).collect::<Vec<_>>().join("\n"),
            cpu: text(&usage).trim().parse::<f64>().unwrap_or(0.0) / 1e6,
            lines: read_page(&page),
            traces,
            hung,
            began: at,
        })
    }

    /// Does to a living process's ring what must be refused.
    fn recover_meanwhile(&self, usage: &Path, folder: &Path) {
        for (pid, command) in processes(usage) {
            let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
            let ring = maps.lines().find_map(|line| Some(&line[line.find("/dev/shm/gputrace.")?..]));
            let Some(ring) = ring.filter(|_| !command.contains(" recorder ")) else { continue };
            let mut recover = Command::new(self.folder.join("gputrace"));
            recover.arg("recover").arg(ring).arg("-o").arg(folder.join("stolen.gtr"));
            let _ = recover.stdout(Stdio::null()).stderr(Stdio::null()).spawn().map(|child| {
                std::thread::sleep(Duration::from_millis(300));
                kill(&child.id().to_string());
            });
        }
    }

    /// Reads the traces of a run, and those of its rings that nobody has read.
    fn find(&self, scenario: &Scenario, run: &Run) -> Found {
        let mut found = Found::default();
        for ring in rings(run) {
            let made = run.traces.join(format!("recovered{}.gtr", found.recovered));
            // Only its owner may read a ring.
            let owner = scenario.around.split(' ').filter(|word| *word == "nobody");
            let mut command = Command::new(self.folder.join("launch"));
            command
                .args(owner)
                .arg("--")
                .arg(self.folder.join("gputrace"))
                .arg("recover")
                .arg(&ring)
                .arg("-o")
                .arg(&made);
            let output = command.env("TORTURE_USAGE", "/dev/null").output().expect("gputrace runs");
            if output.status.success() {
                found.recovered += 1;
            } else {
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                found.torn.push(format!("{}: recover: {said}", ring.display()));
            }
            let _ = fs::remove_file(&ring);
        }
        let entries = fs::read_dir(&run.traces).into_iter().flatten().flatten();
        for path in
            entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|end| end == "gtr"))
        {
            match Trace::open(&path) {
                Ok(trace) => found.read(&trace, &run.lines),
                // Its recorder was killed before the first word; what it would have held is in the ring.
                Err(Error::NotBegun { .. }) => {}
                Err(error) => found.torn.push(error.to_string()),
            }
        }
        found
    }
}

impl Found {
    fn read(&mut self, trace: &Trace, lines: &[Line]) {
        let mut last: BTreeMap<u64, u64> = BTreeMap::new();
        let mut here = HashSet::new();
        self.traces += 1;
        for event in trace.events() {
            match event.kind {
                EventKind::Lost(lost) => {
                    *self.lost.entry(lost.cause.name()).or_default() += lost.events;
                    if lost.cause == LostCause::Damaged {
                        self.torn.push(format!("{} damaged", lost.events));
                    }
                }
                EventKind::Call(call) if matches!(call.action, Action::Alloc | Action::Free) => {
                    let is_free = call.action == Action::Free;
                    if call.result.is_none() {
                        self.unfinished += 1;
                        continue;
                    }
                    // What a limiter refused has no address.
                    let is_refused = call.result == Some(2) && !is_free;
                    let place = if is_refused { MARK | call.bytes.0 } else { call.addr };
                    let (number, n) = ((place & !MARK) >> 32, place & 0xffff_ffff);
                    let made = usize::try_from(number).ok().and_then(|at| lines.get(at.checked_sub(1)?));
                    let is_known = made.is_some_and(|line| (1..=line.requests).contains(&n));
                    let is_whole = place & MARK != 0 && (is_free || call.bytes.0 == place & !MARK);
                    if !is_known || !is_whole || (call.result != Some(0) && !is_refused) {
                        self.torn.push(format!("{call:?}"));
                        continue;
                    }
                    let before = if is_free { 0 } else { last.insert(number, n).unwrap_or(0) };
                    if before >= n || !here.insert((number, n, is_free)) {
                        self.torn.push(format!("line {number}: {n} again, or after {before}: {call:?}"));
                    }
                }
                _ => {}
            }
        }
        for event in here {
            // A recorder that was killed may have written what `recover` found again.
            if self.events.insert(event) {
                *self.by_line.entry(event.0).or_default() += 1;
            } else if self.recovered == 0 {
                self.torn.push(format!("in two traces: {event:?}"));
            }
        }
        let damages = trace.damages().into_iter().map(|damage| damage.to_string());
        self.torn.extend(damages.filter(|damage| !damage.contains("killed")));
    }
}

/// A bit that every address of `torture/driver.c` has.
const MARK: u64 = 1 << 62;
/// What torture.h sets for the lines of signal handlers.
const ASIDE: u64 = 1 << 63;
/// `struct page` of `torture/torture.h`.
const PAGE_BYTES: u64 = 64 + 32 * (1 << 18);

fn read_page(path: &Path) -> Vec<Line> {
    let bytes = fs::read(path).unwrap_or_default();
    let number =
        |at: usize| bytes.get(at..at + 8).map_or(0, |it| u64::from_le_bytes(it.try_into().expect("eight")));
    let count = usize::try_from(number(0)).unwrap_or(0);
    let line = |at: usize| {
        let at = 64 + 32 * at;
        Line {
            requests: number(at),
            asked: number(at + 8),
            completed: number(at + 16),
            process: number(at + 24),
        }
    };
    (0..count).map(line).collect()
}

/// Rings that a run left: those it named, and those of its processes.
fn rings(run: &Run) -> Vec<PathBuf> {
    let mut rings: BTreeSet<PathBuf> = BTreeSet::new();
    for folder in ["/dev/shm", "/tmp"] {
        let names = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
        for path in names {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            // Numbers of processes come again.
            let is_older =
                fs::metadata(&path).and_then(|data| data.modified()).is_ok_and(|time| time < run.began);
            if is_older {
                continue;
            }
            let of = |line: &Line| name.starts_with(&format!("gputrace.{}.", line.process & !ASIDE));
            let is_named = run.said.contains(&name);
            if name.ends_with(".ring")
                && (is_named || run.lines.iter().any(|line| line.process & !ASIDE > 99 && of(line)))
            {
                rings.insert(path);
            }
        }
    }
    rings.into_iter().collect()
}

/// Removes the rings that nobody can give back, because whoever ended took its recorder along (PID 1), or came no further
/// than making the file. Each of them is memory.
fn remove_rings_of_nobody(since: SystemTime) {
    let maps: String = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|process| fs::read_to_string(process.path().join("maps")).ok())
        .collect();
    for entry in fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = name.strip_prefix("gputrace.").and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
        let Ok(data) = entry.metadata() else { continue };
        let is_nobodys = pid.is_some_and(|pid| pid < 100) || data.len() == 0;
        let is_ours = data.modified().is_ok_and(|time| time >= since) && name.ends_with(".ring");
        if is_ours && pid.is_some() && is_nobodys && !maps.contains(&name) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Processes of a run: all have the name of its file in their environment. One that is becoming another program at this moment
/// has no environment and no words, and might be of the run; on a busy machine that moment is long.
fn processes(usage: &Path) -> Vec<(u32, String)> {
    let wanted = format!("TORTURE_USAGE={}\0", usage.display()).into_bytes();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        let words = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let is_between = || environment.is_empty() && words.is_empty() && entry.path().join("exe").exists();
        if environment.windows(wanted.len()).any(|part| part == wanted) || is_between() {
            found.push((pid, String::from_utf8_lossy(&words).replace('\0', " ")));
        }
    }
    found
}

/// Waits until the last process of a run has ended, recorders among them; says who does not.
fn wait_for_the_end(usage: &Path) -> Option<String> {
    let began = Instant::now();
    let mut was_empty = false;
    loop {
        let left = processes(usage);
        // One that was forked between two looks at a folder of processes may have been seen in neither.
        if left.is_empty() && was_empty {
            return None;
        }
        was_empty = left.is_empty();
        if is_hang(began) {
            for (pid, _) in &left {
                kill(&pid.to_string());
            }
            return Some(format!("{left:?}"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What the threads of a run's processes wait for.
fn where_it_stands(usage: &Path) -> String {
    let mut text = String::new();
    for (pid, command) in processes(usage) {
        let calls = fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap_or_default();
        let _ = write!(text, "{pid} {command}: {}; ", calls.trim());
    }
    text
}

fn kill(whom: &str) {
    let _ = Command::new("kill").args(["-KILL", "--", whom]).stderr(Stdio::null()).status();
}

fn kill_group(leader: u32) {
    kill(&format!("-{leader}"));
}

/// Sanitizers begin their lines with `==PID==`.
fn without_pid(line: &str) -> &str {
    line.strip_prefix("==").and_then(|rest| Some(rest.split_once("==")?.1)).unwrap_or(line)
}

/// A Python's own file: what version managers put on PATH are scripts.
fn real_python(name: &str) -> Option<PathBuf> {
    let output = Command::new(name).args(["-c", "import sys; print(sys.executable)"]).output().ok()?;
    let path = String::from_utf8(output.stdout).ok()?;
    Some(PathBuf::from(path.trim())).filter(|path| path.exists())
}

/// Names of libraries in the words of a scenario.
fn libraries(scenario: &Scenario) -> Vec<String> {
    let words = scenario.around.split_whitespace().chain(scenario.arguments.split_whitespace());
    words.filter_map(|word| Some(word.split_once('@')?.1.to_owned())).collect()
}

/// Calls `work` with each number below `n`, on as many threads as there are processors.
fn in_parallel(n: usize, work: impl Fn(usize) + Sync) {
    let next = AtomicUsize::new(0);
    let workers = std::thread::available_parallelism().map_or(2, |count| count.get().clamp(1, 8));
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    if at >= n {
                        return;
                    }
                    work(at);
                }
            });
        }
    });
}

/// How the recorded run differs from the one alone.
fn differences(with: &Run, alone: &Run) -> Vec<String> {
    let mut found = Vec::new();
    let mut hold = |is_so: bool, what: String| {
        if !is_so {
            found.push(what);
        }
    };
    hold(with.hung.is_none(), with.hung.clone().unwrap_or_default());
    let ending = |run: &Run| {
        run.status
            .code()
            .map_or_else(|| format!("signal {:?}", run.status.signal()), |code| format!("exit {code}"))
    };
    hold(with.status == alone.status, format!("ends with {}, alone with {}", ending(with), ending(alone)));
    hold(with.stdout == alone.stdout, format!("prints {:?}, alone {:?}", with.stdout, alone.stdout));
    hold(with.stderr == alone.stderr, format!("complains {:?}, alone {:?}", with.stderr, alone.stderr));
    let sessions: BTreeSet<u64> = with.lines.iter().map(|line| line.process).collect();
    let most = FACTOR * alone.cpu + SLACK + SESSION * sessions.len() as f64;
    hold(with.cpu <= most, format!("takes {:.1} s of a processor, alone {:.1} s", with.cpu, alone.cpu));
    found
}

/// How what the traces say differs from what happened.
fn untruths(scenario: &Scenario, run: &Run, found: &Found) -> Vec<String> {
    let asked: u64 = run.lines.iter().map(|line| line.asked).sum();
    let needed = |line: &&Line| line.process & ASIDE == 0;
    let completed: u64 = run.lines.iter().filter(needed).map(|line| line.completed).sum();
    let (recorded, lost) = (found.recorded(), found.lost());
    let numbers = format!("asked {asked}, came back {completed}, recorded {recorded}, lost {:?}", found.lost);
    let mut wrong = Vec::new();
    if !found.torn.is_empty() {
        let some: Vec<_> = found.torn.iter().take(3).collect();
        wrong.push(format!("{} torn: {some:?}", found.torn.len()));
    }
    let is_too_much =
        recorded > asked || (matches!(scenario.truth, Whole | Shown) && recorded + lost > asked);
    if is_too_much {
        wrong.push(format!("more than there was: {numbers}"));
    }
    // A jump out of the library may cost what was being recorded then.
    let broken_off = if scenario.truth == Shown { asked.saturating_sub(completed) } else { 0 };
    if matches!(scenario.truth, Whole | Shown) && recorded + lost + broken_off < completed {
        wrong.push(format!("{} calls are neither recorded nor lost: {numbers}", completed - recorded - lost));
    }
    if scenario.truth == Whole {
        if lost > 0 {
            wrong.push(format!("lost: {numbers}"));
        }
        let missing = |(at, line): (usize, &Line)| {
            let kept = found.by_line.get(&(at as u64 + 1)).copied().unwrap_or(0);
            line.completed.saturating_sub(kept)
        };
        let missing: u64 = run.lines.iter().enumerate().map(missing).sum();
        if missing > found.unfinished && recorded + lost >= completed {
            wrong.push(format!("{missing} calls that came back are not in the trace: {numbers}"));
        }
    }
    if recorded < scenario.least {
        wrong.push(format!("fewer than {}: {numbers}", scenario.least));
    }
    if scenario.truth == Nothing && found.traces > 0 {
        wrong.push(format!("{} traces", found.traces));
    }
    wrong
}

fn try_scenario(workshop: &Workshop, scenario: &Scenario, program: &[PathBuf], name: String) -> Row {
    let rounds = scenario.rounds[usize::from(is_long())];
    let mut row = Row { name, rounds, ..Row::default() };
    let alone = match workshop.run(scenario, program, false) {
        Ok(alone) => alone,
        Err(reason) => return Row { skipped: Some(reason), ..row },
    };
    if let Some(hung) = &alone.hung {
        row.failures.push(format!("alone: {hung}"));
    }
    row.alone = alone.cpu;
    for round in 1..=rounds {
        let with = match workshop.run(scenario, program, true) {
            Ok(with) => with,
            Err(reason) => return Row { skipped: Some(reason), ..row },
        };
        let found = workshop.find(scenario, &with);
        let mut wrong = differences(&with, &alone);
        for _ in 0..if wrong.is_empty() { 0 } else { scenario.tries } {
            // CPython 3.10 crashes at its end, now and then, on its own.
            let again = workshop.run(scenario, program, false);
            if again.is_ok_and(|again| again.status == with.status) {
                wrong.clear();
                break;
            }
        }
        wrong.extend(untruths(scenario, &with, &found));
        row.calls += with.lines.iter().map(|line| line.asked).sum::<u64>();
        row.recorded += found.recorded();
        row.lost += found.lost();
        row.torn += found.torn.len() as u64;
        row.recovered += found.recovered;
        row.with += with.cpu / f64::from(rounds);
        if wrong.is_empty() {
            let _ = fs::remove_dir_all(with.traces.parent().unwrap_or(&with.traces));
        } else {
            let said =
                if with.said.is_empty() { String::new() } else { format!("\n    it said: {}", with.said) };
            row.failures.extend(wrong.into_iter().map(|what| format!("round {round}: {what}{said}")));
            if row.failures.len() > 8 {
                break;
            }
        }
    }
    let _ = fs::remove_dir_all(alone.traces.parent().unwrap_or(&alone.traces));
    row
}

fn summary(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.name.len()).max().unwrap_or(0).max(8);
    let mut text = format!(
        "{:width$} {:>6} {:>9} {:>9} {:>8} {:>5} {:>5} {:>8} {:>8}  verdict\n",
        "scenario", "rounds", "calls", "recorded", "lost", "torn", "rings", "alone s", "with s"
    );
    for row in rows {
        let verdict = match (&row.skipped, row.failures.is_empty()) {
            (Some(reason), _) => format!("skipped: {reason}"),
            (None, true) => "as alone".to_owned(),
            (None, false) => "DIFFERS".to_owned(),
        };
        let Row { name, rounds, calls, recorded, lost, torn, recovered, alone, with, .. } = row;
        let _ = writeln!(
            text,
            "{name:width$} {rounds:>6} {calls:>9} {recorded:>9} {lost:>8} {torn:>5} {recovered:>5} {alone:>8.2} {with:>8.2}  {verdict}"
        );
    }
    for row in rows {
        for failure in &row.failures {
            let _ = writeln!(text, "{}: {failure}", row.name);
        }
    }
    text
}

#[test]
fn every_scenario_ends_as_it_does_alone_and_shows_the_losses_it_had() {
    let only = std::env::var("GPUTRACE_TORTURE_ONLY").unwrap_or_default();
    let scenarios: Vec<&Scenario> =
        SCENARIOS.iter().filter(|scenario| scenario.name.contains(&only)).collect();
    let began = SystemTime::now();
    let workshop = Workshop::new();
    let built = workshop.build_all(&scenarios);
    let rows = Mutex::new(BTreeMap::new());
    in_parallel(scenarios.len(), |at| {
        let scenario = scenarios[at];
        let mut mine = Vec::new();
        if scenario.program.ends_with(".py") {
            // `tests/setup.sh` makes one that has greenlets.
            let prepared = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/python/bin/python");
            let prepared = Some(prepared).filter(|it| scenario.program == "greenlets.py" && it.exists());
            for python in workshop.pythons.iter().chain(&prepared) {
                let version = python.display().to_string();
                let name = format!("{} ({})", scenario.name, short_version(&version));
                let program = [python.clone(), sources().join(scenario.program)];
                mine.push(try_scenario(&workshop, scenario, &program, name));
            }
        } else {
            let library = |name: String| &built[&(format!("{name}.c"), "-shared -fPIC".to_owned())];
            let program = &built[&(scenario.program.to_owned(), scenario.options.to_owned())];
            let problem = libraries(scenario)
                .into_iter()
                .map(library)
                .chain([program])
                .find_map(|it| it.as_ref().err());
            mine.push(match (problem, program) {
                (None, Ok(program)) => {
                    try_scenario(&workshop, scenario, std::slice::from_ref(program), scenario.name.to_owned())
                }
                // Not every compiler has every sanitizer.
                (Some(problem), _) if scenario.options.contains("-fsanitize") => Row {
                    name: scenario.name.to_owned(),
                    skipped: Some(problem.lines().next().unwrap_or_default().to_owned()),
                    ..Row::default()
                },
                (problem, _) => Row {
                    name: scenario.name.to_owned(),
                    failures: vec![problem.cloned().unwrap_or_default()],
                    ..Row::default()
                },
            });
        }
        for row in mine.iter().filter(|row| !row.failures.is_empty()) {
            say(&format!("torture: {} DIFFERS: {}", row.name, row.failures[0]));
        }
        rows.lock().expect("no panic").insert(at, mine);
    });
    remove_rings_of_nobody(began);
    let rows: Vec<Row> = rows.into_inner().expect("no panic").into_values().flatten().collect();
    let failed = rows.iter().filter(|row| !row.failures.is_empty()).count();
    let skipped = rows.iter().filter(|row| row.skipped.is_some()).count();
    say(&summary(&rows));
    for row in &rows {
        if let Some(why) = &row.skipped {
            // Without the version of Python.
            let name = row.name.split(" (3.").next().unwrap_or_default();
            skip(&format!("torture: {name}"), why);
        }
    }
    say(&format!("torture: {} scenarios, {failed} differ, {skipped} skipped", rows.len()));
    if failed == 0 {
        let _ = fs::remove_dir_all(&workshop.folder);
    } else {
        say(&format!("torture: the runs that differ are kept in {}", workshop.folder.display()));
    }
    assert_eq!(failed, 0, "see above");
}

fn short_version(python: &str) -> String {
    let output =
        Command::new(python).args(["-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).output();
    output.map_or_else(
        |_| python.to_owned(),
        |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
    )
}

#[test]
fn every_program_of_the_torture_is_in_a_scenario() {
    let mut known: BTreeSet<String> =
        ["torture.h", "driver.c", "launch.c", "torture.py"].map(str::to_owned).into();
    for scenario in SCENARIOS {
        known.insert(scenario.program.to_owned());
        known.extend(libraries(scenario).into_iter().map(|name| format!("{name}.c")));
    }
    for entry in fs::read_dir(sources()).expect("a folder").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        assert!(known.contains(&name), "tests/torture/{name} is in no row of SCENARIOS (tests/torture.rs)");
    }
    let names: BTreeSet<_> = SCENARIOS.iter().map(|scenario| scenario.name).collect();
    assert_eq!(names.len(), SCENARIOS.len(), "two scenarios have the same name");
}
