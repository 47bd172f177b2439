//! Whole recordings, with producers in processes of their own: what they were told is in the ring is in the trace.
//!
//! This test is its own producer: run with [`PRODUCER`] in its environment it writes into the ring named there.

mod content;
mod endings;
mod rings;
mod support;

use gputrace_recorder::{Moment, Options, record};
use gputrace_ring::map::{COMPLETE, EXITING, FAILED, Map, OFF};
use gputrace_ring::record::{self as ring, pack_device};
use gputrace_ring::ring::Producer;
use gputrace_schemas::event::EventKind;
use gputrace_schemas::reader::Trace;
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use support::*;

/// Not a test of its own: what the other process runs.
#[test]
fn producer() {
    let Ok(orders) = std::env::var(PRODUCER) else { return };
    let words: Vec<&str> = orders.split(' ').collect();
    let [ring, n_threads, n_records, n_chunks] = words.as_slice() else { panic!("{orders}") };
    let counters = Mapped::open(Path::new(&format!("{ring}.counters")));
    let n_chunks = n_chunks.parse().unwrap();
    let memory = Mapped::create(Path::new(ring), Map::bytes_for(n_chunks));
    let map = memory.make_ring(n_chunks, std::process::id());
    produce_numbers(map, counters.counters(), n_threads.parse().unwrap(), n_records.parse().unwrap());
    let header = map.header();
    header.process.value.store(EXITING, Ordering::Release);
    let patience = Instant::now() + Duration::from_secs(300);
    while header.recorder.value.load(Ordering::Acquire) != COMPLETE && Instant::now() < patience {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The ring that a recorder of its own process is to record.
const RECORDER: &str = "GPUTRACE_TEST_RECORDER";

/// Not a test of its own: a recorder as libgputrace.so starts it.
#[test]
fn recorder() {
    let Ok(ring) = std::env::var(RECORDER) else { return };
    let _ = gputrace_recorder::daemon_main(["--ring".into(), ring.into()], |_| None);
}

/// Starts that recorder in a shell with limits.
fn start_recorder(limits: &str, ring: &Path, trace: &Path) -> Child {
    let script = format!("{limits}; exec \"$0\" --exact recorder --test-threads=1 --nocapture");
    let mut command = Command::new("sh");
    command.args(["-c", &script]).arg(std::env::current_exe().unwrap());
    command.env(RECORDER, ring).env("GPUTRACE_OUTPUT", trace);
    command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped()).spawn().unwrap()
}

#[test]
fn everything_that_several_threads_write_is_in_the_trace() {
    let folder = Folder::new("all");
    let ring = folder.join("ring");
    let (mut child, counters) = start_producer(&ring, 4, 300_000, 256);
    let summary = record(&ring, options(&folder, "a.gtr")).unwrap();
    assert!(child.0.wait().unwrap().success());
    let trace = Trace::open(&summary.trace).unwrap();
    let found = check_numbers(&trace);
    let written: Vec<u64> =
        (0..4).map(|thread| counters.counters()[thread].load(Ordering::Acquire)).collect();
    assert_eq!(written, [300_000; 4]);
    assert_eq!((0..4).map(|thread| found[&thread]).collect::<Vec<_>>(), written);
    assert!(!ring.exists(), "the ring is removed");
    assert_eq!(trace.process().pid, child.0.id());
    assert!(trace.process().command.iter().any(|word| word == "producer"));
    assert!(trace.modules().iter().any(|module| module.path == trace.process().executable));
    assert!(trace.mappings().next().is_some_and(|mappings| mappings.mapped.len() > 5));
    assert!(trace.threads().iter().all(|thread| !thread.name.is_empty()), "{:?}", trace.threads());
}

/// What [`answered`] was told: which failure, and how many events and out-of-memory errors the trace had by then.
static ANSWERS: std::sync::Mutex<Vec<(u64, bool, usize, usize)>> = std::sync::Mutex::new(Vec::new());

fn answered(oom: &gputrace_recorder::Oom) -> Option<gputrace_recorder::FollowUp> {
    let trace = Trace::open_prefix(&oom.trace, oom.length);
    let kinds: Vec<EventKind> = trace.iter().flat_map(|it| it.events().map(|event| event.kind)).collect();
    let n_ooms = kinds.iter().filter(|kind| matches!(kind, EventKind::BlockOom(_))).count();
    ANSWERS.lock().unwrap().push((oom.nth, oom.full, kinds.len(), n_ooms));
    None
}

#[test]
fn who_answers_for_memory_that_ran_out_sees_the_trace_up_to_there() {
    let folder = Folder::new("oom");
    let ring = folder.join("ring");
    let memory = Mapped::create(&ring, Map::bytes_for(16));
    let map = memory.make_ring(16, std::process::id());
    let options = Options { on_oom: Some(answered), ..options(&folder, "a.gtr") };
    let recording = std::thread::spawn(move || record(&ring, options).unwrap());
    let mut producer = Producer::new(map, tid(), tid());
    let n_answers = || ANSWERS.lock().unwrap().len();
    for n in 1..=5 {
        producer.push_brief(producer.now(), 0, &numbered(0, n));
        let oom = ring::BlockOom { device_bytes: pack_device(0, 1 << 40), ..ring::BlockOom::default() };
        let began = Instant::now();
        producer.push(producer.now(), 0, &oom);
        while n_answers() < n as usize && n < 5 {
            assert!(began.elapsed() < Duration::from_secs(300), "no answer to failure {n}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    producer.complete();
    map.header().process.value.store(OFF, Ordering::Release);
    recording.join().unwrap();
    let answers = ANSWERS.lock().unwrap().clone();
    // Each failure comes with a note that there is no NVML to ask.
    assert_eq!(answers[..4], [(1, true, 3, 1), (2, true, 6, 2), (3, true, 9, 3), (4, false, 0, 0)]);
    // The fifth came too soon after the fourth, unless this machine took a second to hear of it.
    assert!(matches!(&answers[4..], [] | [(5, false, 0, 0)]), "{answers:?}");
}

#[test]
fn a_trace_that_exists_is_not_overwritten_and_the_program_is_told() {
    let folder = Folder::new("exists");
    let ring = folder.join("ring");
    let memory = Mapped::create(&ring, Map::bytes_for(4));
    let map = memory.make_ring(4, std::process::id());
    fs::write(folder.join("a.gtr"), "precious").unwrap();
    // Whatever was written before the job began is not a sibling's.
    let realtime = std::time::SystemTime::now() + Duration::from_secs(60);
    let job_began = Some(Moment { realtime, monotonic: 0 });
    let options = Options { job_began, ..options(&folder, "a.gtr") };
    let error = record(&ring, options).unwrap_err().to_string();
    assert!(error.ends_with("a.gtr exists; choose another name with -o, or overwrite it with -F"), "{error}");
    assert_eq!(fs::read_to_string(folder.join("a.gtr")).unwrap(), "precious");
    assert_eq!(map.header().recorder.value.load(Ordering::Acquire), FAILED);
}

/// What a recorder under limits makes of a living process that writes 200,000 records and ends.
fn recorded_under(limits: &str, name: &str) -> (std::process::Output, Option<Trace>) {
    let folder = Folder::new(name);
    let (ring, trace) = (folder.join("ring"), folder.join("a.gtr"));
    let (mut producer, _counters) = start_producer(&ring, 2, 200_000, 256);
    let recorder = start_recorder(limits, &ring, &trace);
    assert!(producer.0.wait().unwrap().success());
    let output = recorder.wait_with_output().unwrap();
    (output, Trace::open(&trace).ok())
}

#[test]
fn a_limit_on_the_length_of_files_ends_the_trace_and_not_the_recorder() {
    use std::os::unix::process::ExitStatusExt;
    // Blocks of 512 bytes.
    let (output, trace) = recorded_under("ulimit -f 100", "fsize");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.signal(), None, "{said}");
    assert!(said.contains("File too large") && said.contains("the written part stays readable"), "{said}");
    let trace = trace.expect("it is readable up to there");
    let n_read = trace.events().filter(|event| matches!(event.kind, EventKind::BlockFree(_))).count();
    assert!(n_read < 400_000, "{n_read}");
    assert_eq!(trace.damages(), []);
}

#[test]
fn a_recorder_with_hardly_any_descriptors_records_everything() {
    // Three streams, the ring, the process, the trace: nothing is left for `/proc`.
    let (output, trace) = recorded_under("ulimit -n 6", "nofile");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let trace = trace.unwrap_or_else(|| panic!("{said}"));
    assert_eq!(check_numbers(&trace), HashMap::from([(0, 200_000), (1, 200_000)]), "{said}");
}
