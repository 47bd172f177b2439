//! What the library must not do to a program by its sessions, its thread lines and its recorder: the program ends as it
//! does alone, says the same, and its trace has what it did. One program of `host/` for each harm.

use gputrace_skip::skip;
use std::fs;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use gputrace_schemas::event::{Action, Event, EventKind, LostCause};
use gputrace_schemas::reader::Trace;
use gputrace_tests::patience::{LONG, is_hang};
use gputrace_tests::recorded::{self, Folder};

fn scratch() -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("host");
    fs::create_dir_all(&path).expect("a scratch directory");
    path
}

fn compile(source: &str, name: &str, options: &[&str]) -> PathBuf {
    let target = scratch().join(name);
    // Built aside: tests of one process may ask for the same at once.
    let building = scratch().join(format!("{name}.{:?}", std::thread::current().id()));
    let output = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
        .args(["-std=gnu11", "-O1", "-g", "-Wall", "-pthread", "-o"])
        .arg(&building)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("{source}.c")))
        .args(options)
        .arg("-ldl")
        .output()
        .expect("a C compiler");
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    fs::rename(building, &target).expect("a built file");
    target
}

/// The folder of a driver that does next to nothing, and takes no lock.
fn driver() -> PathBuf {
    let folder = scratch().join("driver");
    fs::create_dir_all(&folder).expect("a scratch directory");
    let options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"];
    compile("guests/mini_driver", "driver/libcuda.so.1", &options);
    folder
}

fn program(source: &str) -> PathBuf {
    let driver = driver().join("libcuda.so.1").display().to_string();
    compile(&format!("host/{source}"), source, &[&driver])
}

fn command(program: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).env("LD_LIBRARY_PATH", driver());
    command
}

fn recorded_command(program: &Path, arguments: &[&str], folder: &Folder) -> Command {
    let mut command = command(program, arguments);
    recorded::preload(&mut command, folder);
    command
}

/// Runs to its end, or fails when that does not come.
fn run(mut command: Command) -> Output {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    finish(child, &format!("{command:?}"))
}

fn finish(mut child: Child, what: &str) -> Output {
    let started = Instant::now();
    while child.try_wait().expect("a child").is_none() {
        if is_hang(started, LONG) {
            child.kill().expect("a child");
            panic!("{what} hangs");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().expect("its output")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The program ends and says the same, alone and recorded. What it says to people when it is recorded.
fn is_same(program: &Path, arguments: &[&str], folder: &Folder) -> String {
    is_same_with(program, arguments, folder, |_| ())
}

fn is_same_with(
    program: &Path,
    arguments: &[&str],
    folder: &Folder,
    change: impl Fn(&mut Command),
) -> String {
    let alone = run(command(program, arguments));
    let mut with = recorded_command(program, arguments, folder);
    change(&mut with);
    let with = run(with);
    let context = format!("{} {arguments:?}: {}", program.display(), text(&with.stderr));
    assert_eq!(text(&with.stdout), text(&alone.stdout), "{context}");
    assert_eq!(with.status, alone.status, "{context}");
    text(&with.stderr)
}

/// Allocations of so many bytes in the trace.
fn allocations(trace: &Trace, bytes: u64) -> usize {
    let is_one = |kind: &EventKind| match kind {
        EventKind::Call(call) => call.action == Action::Alloc && call.bytes.0 == bytes,
        _ => false,
    };
    trace.events().filter(|event| is_one(&event.kind)).count()
}

fn lost(trace: &Trace) -> Vec<(LostCause, u64)> {
    let lost = |kind| if let EventKind::Lost(lost) = kind { Some((lost.cause, lost.events)) } else { None };
    trace.events().filter_map(|event| lost(event.kind)).collect()
}

fn folder(name: &str) -> Folder {
    Folder::new(&scratch(), &format!("traces.{name}"))
}

fn the_trace(folder: &Folder) -> Trace {
    folder.traces(1).pop().expect("a trace")
}

const MEGABYTE: u64 = 1 << 20;

#[test]
fn a_handler_that_jumps_out_of_allocations_leaves_the_thread_seen() {
    let folder = folder("torn");
    is_same(&program("torn"), &[], &folder);
    let trace = the_trace(&folder);
    assert_eq!(allocations(&trace, 3 * MEGABYTE), 1_000);
    assert!(trace.damages().is_empty(), "{:?}", trace.damages());
    assert!(lost(&trace).iter().all(|(cause, _)| *cause == LostCause::Nested), "{:?}", lost(&trace));
}

#[test]
fn every_way_of_waiting_finds_the_programs_own_children() {
    for how in ["", "reaper"] {
        let folder = folder(&format!("orphans.{how}"));
        is_same(&program("orphans"), &[how], &folder);
        assert_eq!(allocations(&the_trace(&folder), MEGABYTE), 1);
    }
}

#[test]
fn a_thread_that_is_over_is_no_reason_not_to_wait_for_the_trace() {
    let folder = folder("ended_leader");
    let said = is_same_with(&program("ended_leader"), &[], &folder, |command| {
        command.env("GPUTRACE_EXIT_WAIT", "300000");
    });
    assert!(!said.contains("gputrace"), "{said}");
    let traces = folder.files("gtr");
    let trace = Trace::open(&traces[0]).expect("a trace");
    assert!(trace.is_complete(), "the process did not wait");
    assert_eq!(allocations(&trace, MEGABYTE), 1);
}

#[test]
fn pid_1_of_a_namespace_can_wait_for_all_its_children() {
    let inside = |mut program: Command| {
        let mut command = Command::new("unshare");
        command
            .args(["--user", "--map-root-user", "--pid", "--fork", "--mount-proc"])
            .arg(program.get_program());
        command.args(program.get_args());
        for (name, value) in program.get_envs() {
            // Not for `unshare` itself, which must not be preloaded.
            if let Some(value) = value {
                command.env(name, value);
            }
        }
        program.env_clear();
        command
    };
    let mut probe = Command::new("true");
    probe.env_clear();
    if !inside(probe).status().is_ok_and(|status| status.success()) {
        return skip("a PID namespace", "this system lets nobody make one");
    }
    let folder = folder("orphans.init");
    let program = program("orphans");
    let alone = run(inside(command(&program, &[])));
    let with = run(inside(recorded_command(&program, &[], &folder)));
    assert_eq!(text(&with.stdout), text(&alone.stdout), "{}", text(&with.stderr));
    assert_eq!(with.status, alone.status);
    assert_eq!(allocations(&the_trace(&folder), MEGABYTE), 1);
}

#[test]
fn a_limit_of_file_sizes_makes_the_ring_smaller_or_is_named() {
    for (limit, is_recorded) in [("0", false), ("1024000", false), ("4000000", true)] {
        for handler in [&[limit][..], &[limit, "handler"]] {
            let folder = folder(&format!("small_files.{}", handler.join(".")));
            let said = is_same(&program("small_files"), handler, &folder);
            if is_recorded {
                assert_eq!(allocations(&the_trace(&folder), MEGABYTE), 10);
            } else {
                assert!(said.contains("ulimit -f"), "{said}");
            }
        }
    }
}

#[test]
fn a_sandbox_that_comes_after_cuda_kills_nobody() {
    let program = program("sandboxed");
    if run(command(&program, &[])).status.code() == Some(9) {
        return skip("a seccomp filter", "this system lets nobody add one");
    }
    // Allocations, and those of them that are on stacks of their own, with all of their frames.
    let ways = [
        ("plain", 20, 0),
        ("places", 70, 0),
        ("threads", 120, 0),
        ("signal", 70, 0),
        ("stacks", 122, 102),
        ("inside", 121, 101),
        ("handler", 420, 400),
        ("all", 420, 400),
        ("fork", 23, 3),
    ];
    for (how, expected, n_deep) in ways {
        let mut n_whole_rounds = 0;
        for round in 0..5 {
            let folder = folder(&format!("sandboxed.{how}.{round}"));
            // Not before the session has begun, which takes calls.
            let microseconds = (4000 + 1700 * round).to_string();
            is_same(&program, &[how, &microseconds], &folder);
            let trace = the_trace(&folder);
            assert_eq!(allocations(&trace, MEGABYTE), expected, "{how}");
            assert_eq!(lost(&trace), [], "{how}");
            let is_deep = |event: &Event| trace.stack_frames(event.stack).count() > 150;
            let is_cut = |event: &Event| trace.stack(event.stack).is_none_or(|stack| stack.truncated);
            let n_whole = trace.events().filter(is_deep).count();
            let of_memory = trace.events().filter(|event| matches!(event.kind, EventKind::Call(_)));
            let n_cut = of_memory.filter(|event| !is_deep(event) && is_cut(event)).count();
            if cfg!(target_arch = "x86_64") {
                // A recorder that gets no processor for a second does not say in time what can be read. The stack says that it was cut, or there is none.
                assert!(
                    n_whole + n_cut >= n_deep,
                    "{how}: {n_whole} of {n_deep} whole, {n_cut} said to be cut"
                );
            }
            n_whole_rounds += usize::from(n_cut == 0);
        }
        assert!(n_whole_rounds > 0, "{how}: stacks were cut in all rounds");
    }
}

#[test]
fn a_process_that_shares_memory_and_is_no_thread_keeps_its_line() {
    let folder = folder("shared_memory");
    // Room for a chunk of each thread from the start: how soon the recorder gets to a processor decides nothing.
    is_same_with(&program("shared_memory"), &[], &folder, |command| {
        command.env("GPUTRACE_RING_BYTES", "134217728");
    });
    let trace = the_trace(&folder);
    assert_eq!(allocations(&trace, MEGABYTE), 3_001);
}

/// What a program says whose recorder was not started, up to where its events are; that file is removed.
fn why_unrecorded(program: &Path, arguments: &[&str], change: impl Fn(&mut Command)) -> String {
    let folder = folder(&format!("no_children.{}", arguments.join(".")));
    let said = is_same_with(program, arguments, &folder, |command| {
        command.env("GPUTRACE_EXIT_WAIT", "1");
        change(command);
    });
    let (why, rest) = said.split_once("; the events stay in ").unwrap_or_else(|| panic!("{said}"));
    let (ring, _) = rest.split_once(": `gputrace recover` makes a trace of them").expect("where they are");
    fs::remove_file(ring).expect("a ring");
    why.trim_start_matches("driver: 1\n").to_owned()
}

#[test]
fn why_there_is_no_recorder_is_said_as_it_is() {
    let program = program("no_children");
    let (again, forbidden, unknown) = ("11", "1", "38");
    let full = "gputrace: the recorder could not be started: the limit of processes is reached (`ulimit -u`, or the container's)";
    let refused = "gputrace: the recorder could not be started: clone failed (error 1)";
    // Refused for the child between us and the recorder, and for the recorder.
    for (arguments, why) in [
        ([again, "0"], full),
        (["0", again], full),
        ([forbidden, "0"], refused),
        (["0", forbidden], refused),
        (["0", unknown], "gputrace: the recorder could not be started: clone failed (error 38)"),
    ] {
        let said = why_unrecorded(&program, &arguments, |_| ());
        assert_eq!(said, why, "{arguments:?}");
    }
    // A library alone in its folder.
    let alone = scratch().join("alone");
    fs::create_dir_all(alone.join("bin")).expect("a scratch directory");
    fs::copy(recorded::built().join("libgputrace.so"), alone.join("libgputrace.so")).expect("a copy");
    let found = "gputrace: the program `gputrace` was found, but";
    let cases: [(&str, Option<u32>, &str); 3] = [
        (
            "absent",
            None,
            "gputrace: the program `gputrace` was found neither beside libgputrace.so nor on PATH (set GPUTRACE_RECORDER to its path)",
        ),
        ("may_not", Some(0o644), &format!("{found} is not executable")),
        ("is_none", Some(0o755), &format!("{found} could not be executed (error 8)")),
    ];
    for (name, mode, why) in cases {
        let recorder = alone.join("bin").join(name);
        if let Some(mode) = mode {
            fs::write(&recorder, "neither a script nor a program").expect("a file");
            fs::set_permissions(&recorder, fs::Permissions::from_mode(mode)).expect("ours");
        }
        let said = why_unrecorded(&program, &["0", "0"], |command| {
            command.env("LD_PRELOAD", alone.join("libgputrace.so")).env("PATH", "/nowhere");
            command.env("GPUTRACE_RECORDER", &recorder);
        });
        assert_eq!(said, why, "{name}");
    }
}

#[test]
fn threads_that_come_one_after_another_lose_nothing_and_cost_little() {
    for (n, how) in [("5000", &["faults"][..]), ("200", &["locked"])] {
        let folder = folder(&format!("threads.{}", how.join("")));
        // Room for a chunk of each, so that nothing hangs on how soon the recorder gets to a processor.
        let arguments = [&[n], how].concat();
        is_same_with(&program("threads_come_and_go"), &arguments, &folder, |command| {
            command.env("GPUTRACE_RING_BYTES", "134217728");
        });
        let trace = the_trace(&folder);
        let wanted = n.parse::<usize>().expect("a number") + 1;
        assert_eq!((allocations(&trace, MEGABYTE), lost(&trace)), (wanted, Vec::new()));
    }
}

#[test]
fn memory_that_is_short_for_a_while_costs_the_events_of_that_while() {
    let folder = folder("threads.room");
    // All of the ring from the start, so that nothing depends on when the recorder gets to a processor.
    is_same_with(&program("threads_come_and_go"), &["2000", "room"], &folder, |command| {
        command.env("GPUTRACE_RING_BYTES", "33554432");
    });
    let trace = the_trace(&folder);
    let n_lost: u64 = lost(&trace).iter().map(|(_, events)| events).sum();
    // Two calls for each allocation; the second step of the thread, and all threads after it, are recorded.
    assert!(n_lost <= 2 * 1200, "{:?}", lost(&trace));
    assert_eq!(
        allocations(&trace, MEGABYTE) as u64 + n_lost / 2,
        1 + 1200 + 1200 + 2000,
        "{:?}",
        lost(&trace)
    );
}

/// The ring of a program whose recorder does nothing.
fn undrained(program: &Path, arguments: &[&str], folder: &Folder, ring_bytes: Option<&str>) -> PathBuf {
    let mut command = recorded_command(program, arguments, folder);
    let idle = folder.path().join("idle");
    fs::write(&idle, "#!/bin/sh\nexec sleep 3\n").expect("a script");
    fs::set_permissions(&idle, PermissionsExt::from_mode(0o755)).expect("ours");
    command.env("GPUTRACE_RECORDER", &idle).env("GPUTRACE_EXIT_WAIT", "1");
    if let Some(bytes) = ring_bytes {
        command.env("GPUTRACE_RING_BYTES", bytes);
    }
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    let prefix = format!("gputrace.{}.", child.id());
    finish(child, &program.display().to_string());
    let files = fs::read_dir("/dev/shm").expect("shared memory").flatten();
    let mut rings = files.filter(|file| file.file_name().to_string_lossy().starts_with(&prefix));
    rings.next().expect("its ring").path()
}

#[test]
fn a_ring_takes_memory_for_its_first_events_and_the_rest_when_a_recorder_gives_it() {
    let folder = folder("first_memory");
    for (asked, most) in [(None, 18 << 20), (Some("12582912"), 12 << 20)] {
        let ring = undrained(&program("threads_come_and_go"), &["1"], &folder, asked);
        let facts = fs::metadata(&ring).expect("a ring");
        fs::remove_file(&ring).expect("ours");
        let (long, taken) = (facts.len(), facts.blocks() * 512);
        assert!(taken <= most && taken * 2 > most, "{asked:?}: {taken} bytes of {long}");
        assert_eq!(long > taken + (8 << 20), asked.is_none(), "{asked:?}: {taken} bytes of {long}");
    }
}

#[test]
fn threads_that_come_at_once_have_room_before_a_recorder_gives_more() {
    let folder = folder("many_at_once");
    let ring = undrained(&program("many_at_once"), &[], &folder, None);
    let recovered = Command::new(recorded::built().join("gputrace"))
        .arg("recover")
        .arg(&ring)
        .arg("-o")
        .arg(folder.path().join("recovered.gtr"))
        .output()
        .expect("gputrace runs");
    assert!(recovered.status.success(), "{}", text(&recovered.stderr));
    let trace = the_trace(&folder);
    assert_eq!(lost(&trace), []);
    assert_eq!(allocations(&trace, MEGABYTE), 901);
}

#[test]
fn threads_that_record_little_do_not_fill_a_small_ring() {
    let folder = folder("slow_threads");
    is_same_with(&program("slow_threads"), &[], &folder, |command| {
        command.env("GPUTRACE_RING_BYTES", "1048576");
    });
    let trace = the_trace(&folder);
    assert_eq!((allocations(&trace, MEGABYTE), lost(&trace)), (300, Vec::new()));
}

#[test]
fn a_thread_that_is_cancelled_makes_its_session_to_the_end() {
    for how in [&[][..], &["asynchronous"]] {
        let folder = folder(&format!("cancelled.{}", how.join("")));
        is_same(&program("cancelled"), how, &folder);
        assert_eq!(allocations(&the_trace(&folder), 3 * MEGABYTE), 50);
    }
}

#[test]
fn libraries_that_stand_in_for_the_c_librarys_functions_see_no_call_of_ours() {
    let folder = folder("table_of_handlers");
    let guest = compile("host/table_of_handlers", "libtable.so", &["-shared", "-fPIC", "-DLIBRARY"]);
    let program = program("table_of_handlers");
    let mut alone = command(&program, &[]);
    let mut with = recorded_command(&program, &[], &folder);
    alone.env("LD_PRELOAD", &guest);
    let ours = recorded::built().join("libgputrace.so");
    with.env("LD_PRELOAD", format!("{}:{}", guest.display(), ours.display()));
    let (with, alone) = (run(with), run(alone));
    assert_eq!(text(&with.stdout), text(&alone.stdout), "{}", text(&with.stderr));
    assert_eq!(with.status, alone.status);
    assert_eq!(allocations(&the_trace(&folder), MEGABYTE), 1);
}

#[test]
fn the_recorder_keeps_none_of_the_programs_files() {
    for how in ["", "refuses", "kills", "closes"] {
        let folder = folder(&format!("open_files.{how}"));
        is_same(&program("open_files"), &[how], &folder);
        assert_eq!(allocations(&the_trace(&folder), MEGABYTE), 101, "{how}");
    }
}

#[test]
fn an_environment_that_changes_all_the_time_is_read() {
    let folder = folder("busy_environment");
    is_same(&program("busy_environment"), &[], &folder);
    for trace in folder.traces(10) {
        assert_eq!(allocations(&trace, MEGABYTE), 1);
    }
}

#[test]
fn a_thread_that_chose_a_processor_and_a_priority_chose_them_for_itself() {
    let folder = folder("pinned");
    let mut command = recorded_command(&program("pinned"), &[], &folder);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the program starts");
    let mut said = [0; 8];
    child.stdout.as_mut().expect("a pipe").read_exact(&mut said).expect("a word");
    let recorder = recorder_of(child.id());
    let status = fs::read_to_string(format!("/proc/{recorder}/status")).expect("a recorder that lives");
    let stat = fs::read_to_string(format!("/proc/{recorder}/stat")).expect("a recorder that lives");
    drop(child.stdin.take());
    finish(child, "pinned");
    let allowed = |text: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed_list:").map(|list| list.trim().to_owned()))
    };
    let own = fs::read_to_string("/proc/self/status").expect("our own state");
    assert_eq!(allowed(&status), allowed(&own));
    // proc(5): field 41 is the policy; the name in parentheses is the second.
    let policy = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(41 - 3));
    assert_eq!(policy, Some("0"), "not SCHED_OTHER");
}

/// The process that records this one.
fn recorder_of(pid: u32) -> u32 {
    let started = Instant::now();
    let ring = format!("gputrace.{pid}.");
    loop {
        for entry in fs::read_dir("/proc").expect("/proc").flatten() {
            let words = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let words = text(&words);
            if words.contains("\0recorder\0") && words.contains(&ring) {
                return entry.file_name().to_string_lossy().parse().expect("a number");
            }
        }
        assert!(!is_hang(started, LONG), "nothing records process {pid}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// What is at descriptor 2, whether the library may write there, and where it is from: `start` is what the process began with.
const DESCRIPTORS: &[(&str, &str, bool)] = &[
    ("start", "pipe", true),
    ("start", "half", true),
    ("start", "full", false),
    ("start", "gone", false),
    ("start", "socket", true),
    ("start", "packets", true),
    ("start", "fullsocket", false),
    ("start", "gonesocket", false),
    ("start", "terminal", true),
    ("start", "stopped", false),
    ("start", "file", true),
    ("start", "event", false),
    ("start", "closed", false),
    ("start", "/dev/null", false),
    ("start", "/dev/full", false),
    ("later", "pipe", false),
    ("later", "full", false),
    ("later", "gone", false),
    ("later", "socket", false),
    ("later", "terminal", false),
    ("later", "file", false),
    ("later", "event", false),
    ("later", "closed", false),
    ("later", "/dev/full", false),
];

/// The program says the same as alone; the ring of its process, whose recorder could not be started.
fn ring_without_recorder(arguments: &[&str], change: impl Fn(&mut Command)) -> PathBuf {
    let folder = folder(&format!("words.{}", arguments.join(".").replace('/', "_")));
    let start = |mut command: Command| {
        command.current_dir(folder.path()).stdout(Stdio::piped()).stderr(Stdio::null());
        let child = command.spawn().expect("the program starts");
        (child.id(), finish(child, &format!("{command:?}")))
    };
    let program = program("words");
    let (_, alone) = start(command(&program, arguments));
    let mut with = recorded_command(&program, arguments, &folder);
    with.env("GPUTRACE_RECORDER", "/nowhere/gputrace")
        .env("PATH", "/nowhere")
        .env("GPUTRACE_RING_BYTES", "1048576");
    with.env("LD_PRELOAD", library_alone());
    change(&mut with);
    let (pid, with) = start(with);
    let context = format!("{arguments:?}: {} {}", text(&with.stdout), text(&with.stderr));
    assert_eq!((with.status, alone.status.success()), (alone.status, true), "{context}");
    let is_heard = DESCRIPTORS.contains(&(arguments[0], arguments[1], true));
    let expected =
        if is_heard { text(&alone.stdout).replace("2: no", "2: yes") } else { text(&alone.stdout) };
    assert_eq!(text(&with.stdout), expected, "{context}");
    let rings = fs::read_dir("/dev/shm").expect("a folder").flatten().map(|entry| entry.path());
    let is_its = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&format!("gputrace.{pid}.")))
    };
    rings.into_iter().find(is_its).unwrap_or_else(|| panic!("{context}: no ring"))
}

/// A library that finds no recorder beside it.
fn library_alone() -> PathBuf {
    let folder = scratch().join("words_alone");
    fs::create_dir_all(&folder).expect("a scratch directory");
    let library = folder.join("libgputrace.so");
    let copy = folder.join(format!("copy.{:?}", std::thread::current().id()));
    fs::copy(recorded::built().join("libgputrace.so"), &copy).expect("a copy");
    fs::rename(copy, &library).expect("a copy");
    library
}

/// Makes a trace of a ring that was left, and gives what the library said in it.
fn said_in(ring: &Path, folder: &Folder) -> String {
    let trace = folder.path().join("recovered.gtr");
    let mut recover = Command::new(recorded::built().join("gputrace"));
    let made = recover.args(["recover", "-F", "-o"]).arg(&trace).arg(ring).output().expect("gputrace");
    assert!(made.status.success(), "{}", text(&made.stderr));
    let trace = Trace::open(&trace).expect("a trace");
    let notes = trace.events().filter_map(|event| match event.kind {
        EventKind::Note(note) => note.strip_prefix("gputrace.said=").map(str::to_owned),
        _ => None,
    });
    notes.collect::<Vec<_>>().join("\n")
}

#[test]
fn words_go_to_the_standard_error_of_the_start_if_it_takes_them_and_else_into_the_trace() {
    let folder = folder("words");
    for (when, kind, is_heard) in DESCRIPTORS {
        let ring = ring_without_recorder(&[when, kind], |_| ());
        let said = said_in(&ring, &folder);
        assert_eq!(said.contains("; the events stay in "), !is_heard, "{when} {kind}: {said}");
    }
}

#[test]
fn words_at_the_limit_of_file_sizes_raise_no_signal() {
    // The file is as long as it may be.
    let ring = ring_without_recorder(&["later", "file", "limit"], |_| ());
    fs::remove_file(ring).expect("ours");
}

#[test]
fn the_recorder_has_a_stack_of_its_own_and_ends_before_the_program_where_memory_runs_out() {
    let folder = folder("neighbour");
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -S -s 64; exec \"$0\""]).arg(program("pinned"));
    command.env("LD_LIBRARY_PATH", driver());
    recorded::preload(&mut command, &folder);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the program starts");
    let mut said = [0; 8];
    child.stdout.as_mut().expect("a pipe").read_exact(&mut said).expect("a word");
    let recorder = recorder_of(child.id());
    let read = |pid: u32, name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).expect("it lives");
    let started = Instant::now();
    while read(recorder, "oom_score_adj").trim() != "1000" {
        assert!(!is_hang(started, LONG), "oom_score_adj: {}", read(recorder, "oom_score_adj"));
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(read(child.id(), "oom_score_adj"), read(std::process::id(), "oom_score_adj"));
    let limits = read(recorder, "limits");
    let stack = limits.lines().find_map(|line| line.strip_prefix("Max stack size")).expect("a limit");
    let soft = stack.split_whitespace().next().expect("a number");
    assert!(soft == "unlimited" || soft.parse::<u64>().expect("a number") >= 8 << 20, "{stack}");
    drop(child.stdin.take());
    finish(child, "pinned");
    assert!(the_trace(&folder).is_complete());
}

#[test]
fn valgrind_ends_with_the_programs_own_status() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        return skip("valgrind", "it is not installed");
    }
    let folder = folder("valgrind");
    let program = program("words");
    let run = |mut command: Command| {
        command.args(["-q", "--error-exitcode=77"]).arg(&program).args(["go", "closed"]);
        run(command)
    };
    let valgrind = || {
        let mut command = Command::new("valgrind");
        command.env("LD_LIBRARY_PATH", driver());
        command
    };
    let alone = run(valgrind());
    let mut with = valgrind();
    recorded::preload(&mut with, &folder);
    let with = run(with);
    let said = text(&with.stderr);
    assert_eq!((with.status, text(&with.stdout)), (alone.status, text(&alone.stdout)), "{said}");
    assert!(!said.contains("gputrace") && !said.contains("unhandled"), "{said}");
}
