//! NCCL: every call is recorded once with its number on its communicator, whichever way it is reached; what its
//! threads allocate is charged to a communicator; and every function that a release exports is a row or has a reason.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gputrace_schemas::event::{Action, CommId, EventKind, Frame, ModuleId, NcclOp, UNKNOWN};
use gputrace_schemas::reader::Trace;
use gputrace_tests::recorded::{self, Folder};
use gputrace_tests::rows;

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("nccl")
}

fn scratch() -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nccl");
    fs::create_dir_all(&path).expect("a scratch directory");
    path
}

fn built(source: &str, name: &str, flags: &[&str]) -> PathBuf {
    let target = scratch().join(name);
    let fake = fake_cuda::library_dir();
    let output = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
        .args(["-std=gnu11", "-O1", "-g", "-Wall", "-pthread", "-o"])
        .arg(&target)
        .args(flags)
        .arg(sources().join(source))
        .args(["libnccl.so.2", "libcuda.so.1"].map(|file| fake.join(file)))
        .arg("-ldl")
        .output()
        .expect("a C compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    target
}

fn recorded(program: &Path, folder: &Folder) -> Trace {
    let mut command = Command::new(program);
    recorded::preload(&mut command, folder);
    let output = command.env("LD_LIBRARY_PATH", fake_cuda::library_dir()).output().expect("a program");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    folder.traces(1).remove(0)
}

/// A job of Python ranks on the stand-in for NCCL.
fn job(name: &str, ranks: u32, variables: &[(&str, &str)], script: &str) -> Vec<Trace> {
    let folder = Folder::new(&scratch(), name);
    let program = folder.path().join("job.py");
    fs::write(&program, script).expect("a script");
    let output = recorded::nccl_job(ranks, &folder)
        .arg(&program)
        .envs(variables.iter().copied())
        .output()
        .expect("python3");
    assert!(output.status.success(), "{}", text(&output));
    folder.traces(ranks as usize)
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// The calls, one line each: function, communicator, number, group and depth, count, peer, and what it answered.
fn calls(trace: &Trace) -> Vec<String> {
    let mut results = HashMap::new();
    for event in trace.events() {
        if let EventKind::NcclExit(exit) = event.kind {
            assert_eq!(results.insert(exit.call, exit.result), None, "call {} ended twice", exit.call);
        }
    }
    let number = |number: u64| if number == UNKNOWN { "-".to_owned() } else { number.to_string() };
    let lines = trace.events().filter_map(|event| {
        let EventKind::NcclEnter(enter) = event.kind else { return None };
        let api = trace.api(enter.api).map_or("?", |api| api.name.as_str());
        assert!(event.stack.0 != 0, "{api} has no stack");
        let result = results.get(&enter.call).map_or("open".to_owned(), ToString::to_string);
        Some(format!(
            "{api} comm={} number={} group={}/{} count={} peer={} -> {result}",
            enter.comm.0,
            number(enter.sequence),
            enter.group,
            enter.group_depth,
            enter.count,
            enter.peer,
        ))
    });
    lines.collect()
}

#[test]
fn every_call_is_recorded_once_by_each_way() {
    let mut seen: Vec<Vec<String>> = Vec::new();
    for (name, flags) in
        [("linked", [].as_slice()), ("by_handle", &["-DBY_HANDLE"]), ("profiled", &["-DPROFILED"])]
    {
        let folder = Folder::new(&scratch(), &format!("calls-{name}"));
        let trace = recorded(&built("calls.c", name, flags), &folder);
        // The first call, for a unique id, comes before there is anything to record.
        seen.push(calls(&trace));
        communicators_are_what_the_program_made(&trace);
    }
    assert_eq!(seen[0], seen[1], "linked and by dlsym");
    assert_eq!(seen[0], seen[2], "ncclX and pncclX");
    let functions: BTreeSet<String> =
        seen[0].iter().filter_map(|line| Some(line.split(' ').next()?.to_owned())).collect();
    let missing: Vec<_> = rows::nccl().into_iter().filter(|row| !functions.contains(row)).collect();
    // A context exists already, so the session does too, and the unique id of ncclCommGetUniqueId is seen.
    assert_eq!(missing, Vec::<String>::new(), "rows that calls.c does not reach, or that are not recorded");
    let expected = fs::read_to_string(sources().join("calls.txt")).unwrap_or_default();
    let now = seen[0].join("\n") + "\n";
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        fs::write(sources().join("calls.txt"), &now).expect("calls.txt");
    } else {
        assert_eq!(now, expected, "UPDATE_EXPECT=1 writes calls.txt again");
    }
}

fn communicators_are_what_the_program_made(trace: &Trace) {
    let of = |id: u32| trace.communicator(CommId(id)).unwrap_or_else(|| panic!("no communicator {id}"));
    let (first, configured, old) = (of(1), of(2), of(3));
    assert_eq!((first.rank, first.n_ranks, first.device, first.version), (Some(1), Some(4), 0, 22809));
    assert_ne!(first.handle, 0);
    assert_eq!(configured.config.name, "tensor parallel");
    assert_eq!((configured.config.min_ctas, configured.config.max_ctas), (Some(4), Some(8)));
    assert_eq!((configured.config.cga_cluster_size, configured.config.traffic_class), (None, Some(3)));
    assert_eq!((configured.unique_id, configured.ordinal), (first.unique_id, 0), "rank 0 uses the id once");
    assert_eq!(old.ordinal, 1, "rank 1 uses the id a second time");
    assert_eq!((old.config.blocking, old.config.min_ctas), (Some(1), None), "only 24 bytes are declared");
    let all = of(4);
    assert_eq!((all.origin, all.rank, all.n_ranks), (Some(NcclOp::CommInitAll), Some(0), Some(1)));
    assert_ne!(all.unique_id, 0, "the id that ncclCommInitAll made for itself");
    let (child, none, shrunk) = (of(5), of(6), of(7));
    assert_eq!((child.parent, child.ordinal, child.color, child.key), (CommId(1), 1, Some(3), Some(9)));
    assert_eq!((child.rank, child.n_ranks), (Some(1), Some(4)), "asked of NCCL");
    assert_eq!((none.parent, none.ordinal, none.color, none.handle), (CommId(1), 2, Some(-1), 0));
    assert_eq!((shrunk.ordinal, shrunk.rank, shrunk.n_ranks), (3, Some(0), Some(3)));
    assert!(first.comm_hash.is_some() && child.comm_hash.is_some() && child.comm_hash != shrunk.comm_hash);
    let redop = trace.events().find_map(|event| match event.kind {
        EventKind::NcclEnter(enter) if enter.op == NcclOp::AllReduce && enter.redop >= 5 => {
            Some(enter.redop_call)
        }
        _ => None,
    });
    let created = trace.events().find_map(|event| match event.kind {
        EventKind::NcclEnter(enter) if enter.op == NcclOp::RedOpCreate => Some(enter.call),
        _ => None,
    });
    assert!(redop.is_some() && redop == created, "{redop:?} {created:?}");
}

#[test]
fn calls_that_nobody_comes_back_from_are_over() {
    // In a folder of its own: the stand-in that all others take has the same name.
    let folder = scratch().join("jumped");
    fs::create_dir_all(&folder).expect("a folder");
    let library = folder.join("libnccl.so.2");
    let compile = |options: &[&str], target: &Path| {
        let output = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
            .args(["-std=gnu11", "-O1", "-g", "-Wall", "-pthread", "-o"])
            .arg(target)
            .arg(sources().join("jumped.c"))
            .args(options)
            .output()
            .expect("a C compiler");
        assert!(output.status.success(), "{}", text(&output));
    };
    compile(&["-DLIBRARY", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2"], &library);
    let driver = fake_cuda::library_dir().join("libcuda.so.1");
    compile(&[&library.display().to_string(), &driver.display().to_string()], &folder.join("jumped"));
    let traces = Folder::new(&scratch(), "jumped.traces");
    let mut command = Command::new(folder.join("jumped"));
    let libraries = format!("{}:{}", folder.display(), fake_cuda::library_dir().display());
    recorded::preload(command.env("LD_LIBRARY_PATH", libraries), &traces);
    let output = command.output().expect("a program");
    assert_eq!(text(&output), "0 failures\n");
    let trace = traces.traces(1).remove(0);
    let open = "ncclAllReduce comm=1 number=N group=0/0 count=16 peer=-1 -> open";
    let made: Vec<String> = calls(&trace)
        .into_iter()
        .map(|line| {
            let number = line.split_once("number=").and_then(|(_, rest)| rest.split(' ').next());
            line.replace(&format!("number={}", number.unwrap_or_default()), "number=N")
        })
        .collect();
    let done = open.replace("open", "0");
    assert_eq!(made.iter().filter(|line| *line == open).count(), 102, "{made:#?}");
    assert_eq!(made.iter().filter(|line| **line == done).count(), 10, "{made:#?}");
    let own = trace.events().find_map(|event| match event.kind {
        EventKind::Call(call) if call.bytes.0 == 3 << 20 => Some((call.comm, call.nccl_call)),
        _ => None,
    });
    assert_eq!(own, Some((CommId(0), 0)), "the program's own memory");
}

#[test]
fn look_ups_answer_as_without_the_library() {
    let output = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
        .args(["-std=gnu11", "-O1", "-Wall", "-o"])
        .arg(scratch().join("look_ups"))
        .arg(sources().join("look_ups.c"))
        .arg("-ldl")
        .output()
        .expect("a C compiler");
    assert!(output.status.success(), "{}", text(&output));
    let library = fake_cuda::library_dir().join("libnccl.so.2");
    let other = scratch().join("libnccl-other.so.2");
    fs::copy(&library, &other).expect("a copy");
    for arguments in [vec![], vec![&library, &other]] {
        let folder = Folder::new(&scratch(), &format!("look-ups-{}", arguments.len()));
        let mut command = Command::new(scratch().join("look_ups"));
        command.args(arguments).env("LD_LIBRARY_PATH", fake_cuda::library_dir());
        let alone = text(&command.output().expect("a program"));
        recorded::preload(&mut command, &folder);
        let together = text(&command.output().expect("a program"));
        assert_eq!(together, alone);
        assert!(alone.contains("default ncclAllReduce: absent"), "{alone}");
    }
}

#[test]
fn memory_is_charged_to_communicators_and_calls_on_any_thread() {
    let script = fs::read_to_string(sources().join("healthy.py")).expect("a script");
    for trace in job("memory", 2, &[("FAKE_NCCL_INIT", "8MiB"), ("FAKE_NCCL_FIRST", "4MiB")], &script) {
        let mut openers = HashMap::new();
        let mut bytes: BTreeMap<(u32, &str, bool), u64> = BTreeMap::new();
        for event in trace.events() {
            match event.kind {
                EventKind::NcclEnter(enter) => drop(openers.insert(enter.call, enter.op.name())),
                EventKind::Call(call) if call.action == Action::Create => {
                    let cause = openers.get(&call.nccl_call).copied().unwrap_or("no call");
                    *bytes.entry((call.comm.0, cause, call.nccl_thread)).or_default() += call.bytes.0 >> 20;
                }
                _ => {}
            }
        }
        let expected = BTreeMap::from([
            ((1, "comm_init", false), 4),
            ((1, "comm_init", true), 4),
            ((1, "all_reduce", true), 4),
            ((2, "comm_split", false), 4),
            ((2, "comm_split", true), 4),
            ((2, "all_reduce", true), 4),
        ]);
        assert_eq!(bytes, expected);
        assert_eq!(frames_of_ours(&trace), 0, "what stands between the program and NCCL is not shown");
    }
}

fn frames_of_ours(trace: &Trace) -> usize {
    let frames =
        trace.stacks().iter().flat_map(|stack| &stack.frames).map(|id| &trace.frames()[id.0 as usize]);
    let module = |frame: &Frame| if let Frame::Native { module, .. } = frame { *module } else { None };
    let path = |id: ModuleId| &trace.modules()[id.0 as usize].path;
    frames.filter_map(module).filter(|id| path(*id).ends_with("libgputrace.so")).count()
}

#[test]
fn a_process_killed_inside_a_collective_leaves_it_open() {
    let script = "
import signal, time
import fake_nccl as nccl
world = nccl.init()
world.all_reduce(1)
if nccl.RANK == 1:
    while nccl.made(0) < 2:
        time.sleep(0.01)
    nccl.enough()
    signal.pause()
world.all_reduce(2)
";
    let traces = job("killed", 2, &[("FAKE_NCCL_BLOCKING", "1")], script);
    let last = |trace: &Trace| calls(trace).pop().expect("calls");
    assert_eq!(last(&traces[0]), "ncclAllReduce comm=1 number=1 group=0/0 count=2 peer=-1 -> open");
    assert_eq!(last(&traces[1]), "ncclAllReduce comm=1 number=0 group=0/0 count=1 peer=-1 -> 0");
}

#[test]
fn communicators_that_do_not_block_get_their_address_when_it_is_met() {
    let script = "
import time
import fake_nccl as nccl

def settle(comm):
    while comm.async_error() == nccl.IN_PROGRESS:
        time.sleep(0.01)

world = nccl.init(blocking=0)
settle(world)
half = world.split(color=nccl.RANK, name='half')
while not half.handle:
    time.sleep(0.01)
settle(half)
half.all_reduce(1)
with nccl.group():
    grouped = nccl.init('grouped')
    late = nccl.init('late')
grouped.all_reduce(2)
";
    for trace in job("nonblocking", 2, &[], script) {
        let lines = calls(&trace);
        let news = lines.iter().filter(|line| line.starts_with("ncclCommGetAsyncError")).count();
        assert_eq!(news, 2, "their calls said in progress; that they are done, once each: {lines:?}");
        assert!(
            lines.contains(&"ncclAllReduce comm=2 number=0 group=0/0 count=1 peer=-1 -> 0".to_owned()),
            "{lines:?}"
        );
        assert!(
            lines.contains(&"ncclAllReduce comm=3 number=0 group=0/0 count=2 peer=-1 -> 0".to_owned()),
            "{lines:?}"
        );
        let half = trace.communicator(CommId(2)).expect("half");
        assert_eq!((half.parent, half.config.name.as_str()), (CommId(1), "half"));
        assert!(trace.communicators().iter().skip(1).all(|communicator| communicator.handle != 0));
        assert_eq!(trace.communicators().len(), 5, "none was met as a stranger");
    }
}

#[test]
fn calls_are_captured_where_their_stream_is() {
    let script = "
import ctypes, threading
import fake_nccl as nccl
cuda = ctypes.CDLL('libcuda.so.1')
world = nccl.init()
captured, other, graph = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
for stream in (captured, other):
    assert cuda.cuStreamCreate(ctypes.byref(stream), 1) == 0
assert cuda.cuStreamBeginCapture_v2(captured, 2) == 0
def enqueue():
    nccl._context(0)
    world.all_reduce(1, stream=captured.value)
thread = threading.Thread(target=enqueue)
thread.start()
thread.join()
world.all_reduce(2, stream=other.value)
assert cuda.cuStreamEndCapture(captured, ctypes.byref(graph)) == 0
world.all_reduce(3, stream=captured.value)
";
    let traces = job("captured", 1, &[], script);
    let flags = traces[0].events().filter_map(|event| match event.kind {
        EventKind::NcclEnter(enter) if enter.op == NcclOp::AllReduce => Some((enter.count, enter.captured)),
        _ => None,
    });
    let flags: Vec<_> = flags.collect();
    assert_eq!(flags, [(1, true), (2, false), (3, false)]);
}

#[test]
fn the_comparison_with_nccls_own_log_finds_no_difference() {
    let fake = fake_cuda::library_dir();
    let launcher = format!("{} --ranks 2 --fake {}", sources().join("launch.py").display(), fake.display());
    let output = Command::new("python3")
        .arg(sources().join("../gpu/nccl.py"))
        .arg(recorded::built())
        .arg(sources().join("healthy.py"))
        .env("GPUTRACE_TEST_LAUNCHER", launcher)
        .env("LD_LIBRARY_PATH", fake)
        .env("PYTHONPATH", sources())
        .output()
        .expect("python3");
    let said = text(&output);
    // What a call costs is no matter for a busy machine.
    let failed: Vec<_> =
        said.lines().filter(|line| line.starts_with("FAIL") && !line.contains("a call costs")).collect();
    assert!(failed.is_empty() && said.matches("PASS").count() >= 13, "{said}");
}

/// `(prefix or name, reason)` of the functions without a row: the table at the end of the rows' file.
fn reasons() -> Vec<(String, String)> {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(rows::NCCL_TABLE));
    let text = text.expect("the rows");
    let lines = text.lines().filter_map(|line| line.strip_prefix("//! | `"));
    lines.filter_map(|line| line.split_once("` | ")).map(|(n, why)| (n.to_owned(), why.to_owned())).collect()
}

#[test]
fn every_function_of_every_release_is_a_row_or_has_a_reason() {
    let (rows, reasons) = (rows::nccl(), reasons());
    let mut files: Vec<_> = fs::read_dir(sources().join("symbols"))
        .expect("lists of symbols: tests/nccl/fetch-symbols.sh makes them")
        .flatten()
        .map(|entry| entry.path())
        .collect();
    files.sort();
    assert!(files.len() >= 6, "{files:?}");
    let mut used = BTreeSet::new();
    for file in files {
        let text = fs::read_to_string(&file).expect("a list");
        assert!(text.lines().count() > 50, "{}: too short", file.display());
        for symbol in text.lines() {
            let name = symbol.strip_prefix('p').unwrap_or(symbol);
            let matches = |pattern: &str| match pattern.strip_suffix('*') {
                Some(prefix) => name.starts_with(prefix),
                None => name == pattern,
            };
            let reason = reasons.iter().find(|(pattern, _)| matches(pattern));
            let is_row = rows.iter().any(|row| row == name);
            assert!(is_row || reason.is_some(), "{}: {symbol} is neither a row nor excused", file.display());
            assert!(!(is_row && reason.is_some()), "{symbol} is a row and excused");
            used.extend(reason.map(|(pattern, _)| pattern.clone()));
        }
    }
    for (pattern, why) in &reasons {
        assert!(
            used.contains(pattern) && why.len() > 10,
            "no release has {pattern}, or the reason is missing"
        );
    }
}
