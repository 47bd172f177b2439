//! What a scenario is, and the table of them.

/// What a trace must say of the calls that were made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Truth {
    /// Each call that came back is an event, and nothing is lost.
    Whole,
    /// What is not an event is shown as lost.
    Shown,
    /// The same, in a program that also makes calls that it does not count, which may be among the lost.
    Part,
    /// Nobody can know how much is missing (the recorder was killed, the disk was full): no more than was made, none torn.
    Bounded,
    /// There is no trace at all.
    Nothing,
}
pub(crate) use Truth::{Bounded, Nothing, Part, Shown, Whole};

/// One row of the torture.
#[derive(Clone, Copy)]
pub(crate) struct Scenario {
    /// What it is, in words; no two have the same.
    pub(crate) name: &'static str,
    /// A file beside this one: C, C++ or Python (which runs on each of `GPUTRACE_TEST_PYTHONS`, or `python3`).
    pub(crate) program: &'static str,
    /// Its arguments. `#` is the scenario's size; `@NAME` is the library made of `torture/NAME.c`.
    pub(crate) arguments: &'static str,
    /// The size: in the short form and in the long one.
    pub(crate) size: [u32; 2],
    /// How often it is recorded.
    pub(crate) rounds: [u32; 2],
    /// Words of `torture/launch.c` for its surroundings, with `@NAME` as above; `~N` is a random number below N, and
    /// `FOLDER` is where the traces go.
    pub(crate) around: &'static str,
    /// Options of the compiler.
    pub(crate) options: &'static str,
    /// Variables, also for the run alone.
    pub(crate) env: &'static [(&'static str, &'static str)],
    /// Somebody calls `gputrace recover` on its ring again and again.
    pub(crate) is_recovered_meanwhile: bool,
    /// What the traces must say.
    pub(crate) truth: Truth,
    /// How many calls they must have at least, in the short form.
    pub(crate) least: u64,
    /// Alone it sometimes ends otherwise: what differs counts only if it cannot be seen alone in so many tries.
    pub(crate) tries: u32,
}

pub(crate) const PLAIN: Scenario = Scenario {
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

/// Room for a chunk of each thread of the short form, so that nothing hangs on how soon the recorder gets to a processor. The long
/// form needs a recorder that keeps up with threads that do nothing else.
pub(crate) const A_CHUNK_EACH: &[(&str, &str)] = &[("GPUTRACE_RING_BYTES", "134217728")];
/// A ring that somebody must read afterwards.
pub(crate) const SMALL: (&str, &str) = ("GPUTRACE_RING_BYTES", "4194304");
/// The ring stays for somebody to read.
pub(crate) const NO_RECORDER: &[(&str, &str)] = &[("GPUTRACE_RECORDER", "/nowhere/gputrace"), SMALL];
/// What is said to people when memory runs out is no part of a comparison.
pub(crate) const QUIET: &[(&str, &str)] = &[("GPUTRACE_OOM", "0")];
/// System calls that containers and sandboxes refuse.
macro_rules! rare {
    () => {
        "memfd_create,close_range,process_vm_readv,ptrace,pidfd_open,membarrier"
    };
}
use Scenario as S;

#[rustfmt::skip] // A table.
pub(crate) const SCENARIOS: &[Scenario] = &[
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
    S { name: "no program beside the library", arguments: "4 1000", env: NO_RECORDER, ..PLAIN },
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
    S { name: "the folder is unmounted", program: "unmount.c", arguments: "/mnt", around: "tmpfs=/mnt:1m", ..PLAIN },
    S { name: "the folder is unmounted, by a subreaper", program: "unmount.c", arguments: "/mnt", around: "subreaper tmpfs=/mnt:1m", ..PLAIN },
    // Limits.
    S { name: "RLIMIT_FSIZE of 1 MB", arguments: "4 2000", around: "limit=fsize:1024000", truth: Bounded, ..PLAIN },
    S { name: "RLIMIT_FSIZE of 4 MB", arguments: "4 2000", around: "limit=fsize:4194304", ..PLAIN },
    S { name: "RLIMIT_FSIZE of 16 kB", arguments: "4 2000", around: "limit=fsize:16384", truth: Bounded, ..PLAIN },
    S { name: "RLIMIT_FSIZE of nothing", arguments: "4 2000", around: "limit=fsize:0", truth: Bounded, ..PLAIN },
    S { name: "RLIMIT_STACK of 64 KiB", arguments: "4 2000", around: "limit=stack:65536", ..PLAIN },
    S { name: "a ring of 1 TiB is asked for", arguments: "4 2000", env: &[("GPUTRACE_RING_BYTES", "1099511627776")], ..PLAIN },
    S { name: "RLIMIT_AS of 90 MB", arguments: "4 2000", around: "limit=as:94371840", truth: Bounded, ..PLAIN },
    S { name: "RLIMIT_AS of 100 MB", arguments: "4 2000", around: "limit=as:104857600", truth: Bounded, ..PLAIN },
    S { name: "RLIMIT_AS of 200 MB", arguments: "4 2000", around: "limit=as:209715200", truth: Bounded, ..PLAIN },
    S { name: "an address space that is full for a while", program: "scarce.c", arguments: "40", truth: Shown, least: 3_000, ..PLAIN },
    S { name: "RLIMIT_NOFILE of 8", arguments: "4 2000", around: "limit=nofile:8", truth: Shown, ..PLAIN },
    S { name: "RLIMIT_NOFILE of 12, while threads come and go", program: "churn.c", arguments: "# 2 1", size: [4_000, 50_000], env: A_CHUNK_EACH, around: "limit=nofile:12", ..PLAIN },
    S { name: "RLIMIT_NPROC leaves no room for a recorder", arguments: "1 2000", around: "nobody limit=nproc:0", env: &[SMALL], ..PLAIN },
    S { name: "RLIMIT_NPROC of a program that uses it up", program: "quota.c", arguments: "8", env: &[SMALL], ..PLAIN },
    S { name: "all memory locked", program: "locked.c", arguments: "#", size: [200, 5_000], ..PLAIN },
    S { name: "all memory locked, as little as a user may", program: "locked.c", arguments: "10", around: "nobody limit=memlock:67108864", truth: Shown, ..PLAIN },
    S { name: "SCHED_FIFO on one processor", arguments: "2 500 100", around: "fifo pin=0", ..PLAIN },
    S { name: "a thread that is pinned and real-time begins", program: "sched.c", ..PLAIN },
    // Filters of system calls.
    S { name: "seccomp refuses what is rare", arguments: "4 2000", around: concat!("errno=", rare!()), ..PLAIN },
    S { name: "seccomp kills for what is rare", arguments: "4 2000", around: concat!("kill=", rare!()), ..PLAIN },
    S { name: "seccomp kills for what a session needs only where memory is locked", arguments: "4 2000", around: "kill=munlock", ..PLAIN },
    S { name: "seccomp refuses what is rare, and no /dev/shm", arguments: "4 2000", around: concat!("no-shm errno=", rare!()), ..PLAIN },
    S { name: "seccomp refuses the scheduler and sessions", arguments: "4 2000", around: "errno=sched_setscheduler,sched_setaffinity,setsid,prlimit64,getdents64", ..PLAIN },
    S { name: "seccomp refuses fallocate and flock", arguments: "4 2000", around: "errno=fallocate,flock", truth: Bounded, ..PLAIN },
    S { name: "seccomp leaves calls to a handler", program: "broker.c", arguments: "200", env: NO_RECORDER, ..PLAIN },
    // Processes.
    S { name: "a sandbox that comes later", program: "sandbox.c", arguments: "200", rounds: [4, 100], ..PLAIN },
    S { name: "a sandbox that comes later, and threads", program: "sandbox.c", arguments: "200 4", rounds: [2, 50], truth: Shown, ..PLAIN },
    // Descriptor 2 is the program's own, and there is something to say: memory runs out, and no recorder can be started.
    S { name: "words, and a file", program: "words.c", arguments: "file", ..PLAIN },
    S { name: "words, and a pipe that nobody reads", program: "words.c", arguments: "gone", ..PLAIN },
    S { name: "words, and a full pipe", program: "words.c", arguments: "full", ..PLAIN },
    S { name: "words, and a socket", program: "words.c", arguments: "socket", ..PLAIN },
    S { name: "words, and nothing", program: "words.c", arguments: "closed", ..PLAIN },
    S { name: "words of the library, and a file", program: "words.c", arguments: "file", env: NO_RECORDER, ..PLAIN },
    S { name: "words of the library, and a pipe that nobody reads", program: "words.c", arguments: "gone", env: NO_RECORDER, ..PLAIN },
    S { name: "words of the library, and a full pipe", program: "words.c", arguments: "full", env: NO_RECORDER, ..PLAIN },
    S { name: "words of the library, and a socket", program: "words.c", arguments: "socket", env: NO_RECORDER, ..PLAIN },
    S { name: "processes that share memory and are no threads", program: "shares.c", arguments: "#", size: [10, 300], truth: Shown, ..PLAIN },
    S { name: "a storm of forks", program: "storm.c", arguments: "fork #", size: [20, 500], truth: Shown, ..PLAIN },
    S { name: "a library's heap is used across forks, and the library goes and comes back", program: "heaps.c", arguments: "@symmetric #", size: [12, 300], truth: Part, ..PLAIN },
    S { name: "streams are captured while the process forks", program: "captures.c", arguments: "#", size: [12, 300], truth: Part, ..PLAIN },
    S { name: "a plugin of PJRT is used across forks", program: "buffers.c", arguments: "@accelerator #", size: [12, 300], truth: Part, ..PLAIN },
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
    S { name: "more threads than there are lanes", program: "crowd.c", arguments: "1100 #", size: [4, 20], truth: Shown, least: 16_000, env: A_CHUNK_EACH, ..PLAIN },
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

/// Names of libraries in the words of a scenario.
pub(crate) fn libraries(scenario: &Scenario) -> Vec<String> {
    let words = scenario.around.split_whitespace().chain(scenario.arguments.split_whitespace());
    words.filter_map(|word| Some(word.split_once('@')?.1.to_owned())).collect()
}
