//! `gputrace record --nccl-timing`: when the GPU runs what NCCL launches. The fake driver's streams are busy for as long as the
//! test says, and its log has every call that the library makes of itself.
//!
//! The time of streams stands still until a program says that it goes on, and what the library has read is seen in the log: so no
//! verdict hangs on how busy the machine is.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use gputrace_schemas::event::{EventKind, NcclOp, NcclTimed};
use gputrace_schemas::reader::Trace;
use gputrace_tests::recorded::{self, Folder};
use serde_json::Value;

/// What `float` milliseconds may cut off.
const ROUNDING: u64 = 1_000;

/// A finished job of Python ranks on the stand-in for NCCL.
struct Job {
    folder: Folder,
    log: String,
    said: String,
}

const PRELUDE: &str = "
import ctypes, os, resource, signal, sys, threading, time
import fake_nccl as nccl
cuda = ctypes.CDLL('libcuda.so.1')
cuda.fakeCudaBusyUntil.argtypes = [ctypes.c_void_p, ctypes.c_ulonglong]
cuda.fakeCudaTime.argtypes = [ctypes.c_ulonglong]
cuda.fakeCudaNow.restype = ctypes.c_ulonglong
def busy(stream, ms):
    cuda.fakeCudaBusyUntil(stream, cuda.fakeCudaNow() + int(ms * 1e6))
def stop_the_time():
    cuda.fakeCudaTime(10**15)
def pass_time(ms):
    cuda.fakeCudaTime(cuda.fakeCudaNow() + int(ms * 1e6))
def new_stream():
    stream = ctypes.c_void_p()
    assert cuda.cuStreamCreate(ctypes.byref(stream), 1) == 0
    return stream.value
def has_read(n, contexts):
    # One question for the first span of a context, two for each other; the thread leaves the context when all that is done is recorded.
    asked, is_over = 0, False
    with open(os.environ['FAKE_CUDA_LOG']) as log:
        for line in log.read().splitlines():
            pid, thread, function, *_ = line.split(' ')
            if int(pid) == os.getpid() != int(thread):
                asked += function.startswith('cuEventElapsedTime')
                is_over = asked >= 2 * n - contexts and function == 'cuCtxPopCurrent_v2' or is_over
    return is_over
def read(n, contexts=1):
    # Until the library has recorded so many spans, in so many contexts.
    while not has_read(n, contexts):
        time.sleep(0.01)
world = nccl.init()
";

fn run(name: &str, ranks: u32, variables: &[(&str, &str)], script: &str) -> (Job, Output) {
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nccl-timing");
    fs::create_dir_all(&scratch).expect("a scratch directory");
    let folder = Folder::new(&scratch, name);
    let (program, log) = (folder.path().join("job.py"), folder.path().join("calls.log"));
    fs::write(&program, format!("{PRELUDE}{script}")).expect("a script");
    let output = recorded::nccl_job(ranks, &folder)
        .arg(&program)
        .envs([("GPUTRACE_NCCL_TIMING", "1"), ("FAKE_CUDA_LOG_ALL", "1"), ("FAKE_NCCL_KERNEL", "2000")])
        .env("FAKE_CUDA_LOG", &log)
        .envs(variables.iter().copied())
        .output()
        .expect("python3");
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    let log = fs::read_to_string(&log).unwrap_or_default();
    (Job { folder, log, said }, output)
}

fn job(name: &str, ranks: u32, variables: &[(&str, &str)], script: &str) -> Job {
    let (job, output) = run(name, ranks, variables, script);
    assert!(output.status.success(), "{}", job.said);
    job
}

/// What the trace says of launches: what was launched with how many elements, whether it is timed, and its spans.
#[derive(Debug, Default, Clone)]
struct Launch {
    op: Option<NcclOp>,
    count: u64,
    timed: Option<NcclTimed>,
    /// Start and duration.
    spans: Vec<(u64, u64)>,
}

fn launches(trace: &Trace) -> Vec<Launch> {
    let mut calls: BTreeMap<u64, Launch> = BTreeMap::new();
    for event in trace.events() {
        match event.kind {
            EventKind::NcclEnter(enter) => {
                let launch = calls.entry(enter.call).or_default();
                (launch.op, launch.count) = (Some(enter.op), enter.count);
            }
            EventKind::NcclExit(exit) => calls.entry(exit.call).or_default().timed = exit.timed,
            EventKind::NcclTiming(timing) => {
                let launch = calls.get_mut(&timing.call).expect("a timing comes after its call");
                launch.spans.push((timing.start.0, timing.duration.0));
            }
            _ => {}
        }
    }
    calls.into_values().filter(|launch| launch.timed.is_some()).collect()
}

/// Calls of a function in the log, by threads other than the program's first.
fn of_others(log: &str, function: &str) -> usize {
    let main = |line: &str| {
        let mut words = line.split(' ');
        words.next() == words.next()
    };
    log.lines().filter(|line| line.split(' ').nth(2) == Some(function) && !main(line)).count()
}

fn n_calls(log: &str, function: &str) -> usize {
    log.lines().filter(|line| line.split(' ').nth(2) == Some(function)).count()
}

fn gputrace(arguments: &[&str], trace: &Path) -> Value {
    let output = Command::new(recorded::built().join("gputrace"))
        .args(arguments)
        .arg(trace)
        .output()
        .expect("gputrace");
    assert!(output.status.code().is_some_and(|code| code < 2), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn nothing_is_timed_and_no_event_is_made_unless_somebody_asks() {
    let script = "world.all_reduce(1)\nwith nccl.group():\n    world.all_reduce(2)\ntime.sleep(0.1)\n";
    let off = job("off", 1, &[("GPUTRACE_NCCL_TIMING", "")], script);
    assert!(launches(&off.folder.traces(1)[0]).is_empty());
    let ours = ["cuEventCreate", "cuEventRecord", "cuEventQuery", "cuEventElapsedTime_v2", "cuStreamGetCtx"]
        .into_iter()
        .chain(["cuCtxPushCurrent_v2", "cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode"]);
    for function in ours {
        assert_eq!(n_calls(&off.log, function), 0, "{function}");
    }
    assert!(n_calls(&off.log, "cuMemCreate") > 0, "the log has the calls of the job: {}", off.log);
}

#[test]
fn each_launch_has_its_time_on_the_gpu_and_each_group_one_a_stream() {
    let script = "
a, b = new_stream(), new_stream()
stop_the_time()
busy(a, 2000)
world.all_reduce(1, stream=a)
world.all_reduce(2, stream=a)
world.all_reduce(3, stream=0)
world.all_reduce(4, stream=1)
world.all_reduce(5, stream=2)
with nccl.group():
    world.all_reduce(6, stream=b)
    world.all_reduce(7, stream=b)
    with nccl.group():
        world.all_reduce(8, stream=a)
with nccl.group():
    pass
with nccl.simulated_group():
    world.all_reduce(9, stream=a)
try:
    world.all_reduce(10, stream=a, recv=0)
except nccl.NcclError:
    pass
world.all_reduce(11, stream=a)
pass_time(3000)
read(8)
";
    let timed = job("launches", 1, &[], script);
    let launches = launches(&timed.folder.traces(1)[0]);
    let shown: Vec<_> =
        launches.iter().map(|launch| (launch.count, launch.timed, launch.spans.len())).collect();
    let enqueued = Some(NcclTimed::Enqueued);
    // The group's end counts for its three operations: one span a stream.
    let expected = [1, 2, 3, 4, 5, 0, 11].map(|count| (count, enqueued, if count == 0 { 2 } else { 1 }));
    assert_eq!(shown, expected);
    let is_at_least = |span: u64, wanted: u64| span + ROUNDING >= wanted;
    for launch in &launches {
        assert!(launch.spans.iter().all(|(_, duration)| is_at_least(*duration, 2_000_000)), "{launch:?}");
    }
    // Two of the group's operations are on one stream.
    let longest = launches[5].spans.iter().map(|(_, duration)| *duration).max();
    assert!(longest.is_some_and(|longest| is_at_least(longest, 4_000_000)), "{launches:?}");
    let start = |at: usize| launches[at].spans[0].0;
    assert!(is_at_least(start(1) - start(0), 2_000_000), "{launches:?}");
    // Another stream does not wait for the one that is busy.
    assert!(start(2) < start(0), "{launches:?}");
    assert!(timed.log.contains("cuEventRecord "), "the driver's own entry point");
}

#[test]
fn what_is_captured_is_not_timed_and_nothing_is_asked_meanwhile() {
    let script = "
captured, other, graph = new_stream(), new_stream(), ctypes.c_void_p()
stop_the_time()
world.all_reduce(1, stream=other)
pass_time(10)
read(1)
busy(other, 60)
world.all_reduce(2, stream=other)
assert cuda.cuStreamBeginCapture_v2(ctypes.c_void_p(captured), 0) == 0
world.all_reduce(3, stream=captured)
with nccl.group():
    world.all_reduce(4, stream=other)
    world.all_reduce(5, stream=captured)
pass_time(100)
time.sleep(0.2)
assert cuda.cuStreamEndCapture(ctypes.c_void_p(captured), ctypes.byref(graph)) == 0
world.all_reduce(6, stream=captured)
pass_time(10)
read(3)
";
    let job = job("capture", 1, &[], script);
    let launches = launches(&job.folder.traces(1)[0]);
    let shown: Vec<_> =
        launches.iter().map(|launch| (launch.count, launch.timed.unwrap(), launch.spans.len())).collect();
    use NcclTimed::{Capture, Enqueued};
    assert_eq!(
        shown,
        [(1, Enqueued, 1), (2, Enqueued, 1), (3, Capture, 0), (0, Capture, 0), (6, Enqueued, 1)]
    );
    let (before, after) = job.log.split_once("cuStreamBeginCapture_v2 ").expect("a capture");
    let (during, _) = after.split_once("cuStreamEndCapture ").expect("its end");
    assert!(of_others(before, "cuEventQuery") > 0, "{before}");
    // One look may have begun before the capture.
    assert!(of_others(during, "cuEventQuery") <= 1, "{during}");
    assert_eq!(n_calls(during, "cuEventCreate"), 0);
}

#[test]
fn more_launches_than_there_are_events_for_are_counted() {
    let script = "
stream = new_stream()
stop_the_time()
busy(stream, 5000)
for count in range(1, 1101):
    world.all_reduce(count, stream=stream)
pass_time(6000)
read(1024)
world.all_reduce(2000, stream=stream)
pass_time(10)
read(1025)
";
    let job = job("pool", 1, &[("FAKE_NCCL_KERNEL", "1")], script);
    let trace = job.folder.files("gtr").remove(0);
    let launches = launches(&job.folder.traces(1)[0]);
    let of = |timed| launches.iter().filter(|launch| launch.timed == Some(timed)).count();
    assert_eq!((of(NcclTimed::Enqueued), of(NcclTimed::NoEvents)), (1025, 76));
    let last = launches.last().expect("launches");
    assert_eq!((last.count, last.timed, last.spans.len()), (2000, Some(NcclTimed::Enqueued), 1));
    let summary = gputrace(&["summary", "--json"], &trace);
    let timing = &summary["processes"][0]["nccl_timing"];
    assert_eq!(
        (&timing["finished"], &timing["no_events"]),
        (&Value::from(1025), &Value::from(76)),
        "{timing}"
    );
}

#[test]
fn a_launch_that_never_ends_does_not_keep_the_process_and_is_named() {
    let script = "
stream = new_stream()
stop_the_time()
world.all_reduce(1, stream=stream)
pass_time(10)
read(1)
world.all_reduce(2, stream=stream)
world.all_reduce(3, stream=stream)
";
    // The time stands still: were it waited for what is on the stream, the job would never end.
    let job = job("hung", 1, &[], script);
    let trace = job.folder.files("gtr").remove(0);
    let spans: Vec<_> = launches(&job.folder.traces(1)[0]).iter().map(|launch| launch.spans.len()).collect();
    assert_eq!(spans, [1, 0, 0]);
    let ranks = gputrace(&["ranks", "--json"], &trace);
    let rank = &ranks["jobs"][0]["gpu"]["ranks"][0];
    assert_eq!((&rank["finished"], &rank["unfinished"]), (&Value::from(1), &Value::from(2)), "{rank}");
    let first = &rank["first_unfinished"];
    assert_eq!(
        (&first["sequence"], &first["operation"]),
        (&Value::from(1), &Value::from("all_reduce")),
        "{first}"
    );
}

#[test]
fn what_ends_within_a_moment_after_the_program_is_read() {
    let script = "
stream = new_stream()
busy(stream, 30)
world.all_reduce(1, stream=stream)
";
    let job = job("exit", 1, &[], script);
    let launches = launches(&job.folder.traces(1)[0]);
    assert_eq!(launches.iter().map(|launch| launch.spans.len()).collect::<Vec<_>>(), [1], "{}", job.log);
}

#[test]
fn what_was_read_before_a_kill_is_in_the_trace() {
    let script = "
stream = new_stream()
stop_the_time()
world.all_reduce(1, stream=stream)
pass_time(10)
read(1)
world.all_reduce(2, stream=stream)
nccl.enough()
signal.pause()
";
    let job = job("killed", 1, &[], script);
    let launches = launches(&job.folder.traces(1)[0]);
    let shown: Vec<_> =
        launches.iter().map(|launch| (launch.count, launch.timed, launch.spans.len())).collect();
    let enqueued = Some(NcclTimed::Enqueued);
    assert_eq!(shown, [(1, enqueued, 1), (2, enqueued, 0)]);
}

#[test]
fn forked_children_and_contexts_that_go_take_their_events_with_them() {
    let script = "
stream = new_stream()
stop_the_time()
world.all_reduce(1, stream=stream)
pass_time(10)
read(1)
child = os.fork()
if child == 0:
    # It has no thread that it would have to wait for, by going to sleep again and again.
    slept = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    before = slept()
    cuda.cuDevicePrimaryCtxRelease_v2(1)
    sys.exit(0 if slept() - before < 1000 else 1)
assert os.waitpid(child, 0)[1] == 0
world.all_reduce(2, stream=stream)
assert cuda.cuDevicePrimaryCtxReset_v2(0) == 0
time.sleep(0.4)
nccl._context(0)
again = new_stream()
world.all_reduce(3, stream=again)
pass_time(10)
read(2, contexts=2)
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0) == 0
assert cuda.cuDevicePrimaryCtxRelease_v2(0) == 0
world.all_reduce(4, stream=again)
pass_time(10)
read(3, contexts=2)
";
    let job = job("contexts", 1, &[], script);
    let launches = launches(&job.folder.traces(1)[0]);
    let shown: Vec<_> =
        launches.iter().map(|launch| (launch.count, launch.timed.unwrap(), launch.spans.len())).collect();
    use NcclTimed::Enqueued;
    assert_eq!(
        shown,
        [(1, Enqueued, 1), (2, Enqueued, 0), (3, Enqueued, 1), (4, Enqueued, 1)],
        "{}",
        job.said
    );
    let failed: Vec<_> =
        job.log.lines().filter(|line| line.contains(" cuEvent") && !line.ends_with("= 0")).collect();
    assert!(failed.iter().all(|line| line.ends_with("= 600")), "{failed:?}");
}

#[test]
fn a_driver_that_refuses_changes_nothing_and_is_asked_once() {
    let script = "
stream = new_stream()
for count in range(1, 6):
    world.all_reduce(count, stream=stream)
time.sleep(0.4)
";
    let job = job("refused", 1, &[("FAKE_CUDA_FAIL", "cuEventRecord:3+:700")], script);
    let trace = &job.folder.traces(1)[0];
    let timed: Vec<_> = launches(trace).iter().map(|launch| launch.timed.unwrap()).collect();
    use NcclTimed::{Enqueued, Refused};
    assert_eq!(timed, [Enqueued, Refused, Refused, Refused, Refused]);
    assert_eq!(n_calls(&job.log, "cuEventRecord"), 3);
    let said = trace.events().any(|event| {
        matches!(event.kind, EventKind::Note(ref text) if text.starts_with("nccl.timing=stopped: cuEventRecord answered 700"))
    });
    assert!(said);
}

#[test]
fn the_rank_that_comes_last_on_the_gpu_is_named_though_its_host_is_not_late() {
    // The streams are busy until moments that all ranks know, and the hosts are done before the first comes.
    let script = "
stream = new_stream()
stop_the_time()
first = cuda.fakeCudaNow() + 7_000_000_000
for step in range(30):
    late = nccl.RANK == 1 and step % 10 == 9
    cuda.fakeCudaBusyUntil(stream, first + step * 50_000_000 + (30_000_000 if late else 0))
    world.all_reduce(step + 1, stream=stream)
pass_time(9000)
read(30)
";
    let job = job("straggler", 3, &[("FAKE_NCCL_BLOCKING", "1"), ("FAKE_NCCL_KERNEL", "500")], script);
    drop(job.folder.traces(3));
    let report = gputrace(&["ranks", "--json"], job.folder.path());
    let found = &report["jobs"][0];
    assert_eq!(found["verdict"], "consistent", "{found}");
    let stragglers: Vec<_> = found["findings"]
        .as_array()
        .expect("findings")
        .iter()
        .filter(|one| one["kind"] == "straggler")
        .collect();
    assert_eq!(stragglers.len(), 1, "{stragglers:?}");
    assert_eq!(stragglers[0]["ranks"], serde_json::json!([1]));
    let text = stragglers[0]["text"].as_str().expect("a text");
    assert!(
        text.starts_with("rank 1 comes last on the GPU to 3 of 30 collectives on world, and all others wait 90.0 ms for it alone, at \
                          most 30.0 ms at once"),
        "{text}"
    );
    let waits = found["gpu"]["waits"].as_array().expect("waits");
    let mut waits: Vec<_> =
        waits.iter().map(|wait| (wait["sequence"].as_u64(), wait["last_rank"].as_u64())).collect();
    waits.sort_unstable();
    assert_eq!(waits, [9, 19, 29].map(|sequence| (Some(sequence), Some(1))));
    let timed: HashMap<_, _> = found["gpu"]["ranks"]
        .as_array()
        .expect("ranks")
        .iter()
        .map(|rank| (rank["rank"].as_u64(), rank["finished"].as_u64()))
        .collect();
    assert_eq!(timed, HashMap::from([0, 1, 2].map(|rank| (Some(rank), Some(30)))));
}
