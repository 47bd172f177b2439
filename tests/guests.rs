//! Other libraries beside ours in one process, and programs that use the driver in ways nobody planned: what they do
//! and get is what they do and get without us, and each physical call is one event.

use gputrace_skip::skip;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use gputrace_schemas::event::{Action, EventKind, Frame, LostCause};
use gputrace_schemas::reader::Trace;
use gputrace_tests::recorded::{self, Folder};
use gputrace_tests::rows;

fn scratch() -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("guests");
    fs::create_dir_all(&path).expect("a scratch directory");
    path
}

/// Compiles `guests/SOURCE.c` to `name`.
fn compile(source: &str, name: &str, options: &[&str]) -> PathBuf {
    let target = scratch().join(name);
    let output = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
        .args(["-std=gnu11", "-O1", "-g", "-Wall", "-Wno-unused-function", "-pthread", "-o"])
        .arg(&target)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("guests/{source}.c")))
        .args(options)
        .arg("-ldl")
        .output()
        .expect("a C compiler");
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    target
}

fn library(source: &str, name: &str, options: &[&str]) -> PathBuf {
    compile(source, name, &[&["-shared", "-fPIC"], options].concat())
}

/// A program on the fake driver.
fn program(source: &str, name: &str) -> PathBuf {
    let driver = fake_cuda::library_dir().join("libcuda.so.1");
    compile(source, name, &[&driver.display().to_string()])
}

fn on_fake(program: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).env("LD_LIBRARY_PATH", fake_cuda::library_dir());
    command
}

/// Where our library stands among the preloaded.
#[derive(Clone, Copy, Debug)]
enum Order {
    First,
    Last,
}

/// Runs under our library and others.
fn watched(mut command: Command, folder: &Folder, others: &[&Path], order: Order) -> Output {
    recorded::preload(&mut command, folder);
    // What we say when memory runs out is meant for people, not for a comparison.
    command.env("GPUTRACE_OOM", "0");
    let ours = recorded::built().join("libgputrace.so");
    let mut list: Vec<&Path> = others.to_vec();
    match order {
        Order::First => list.insert(0, &ours),
        Order::Last => list.push(&ours),
    }
    let list: Vec<_> = list.iter().map(|path| path.display().to_string()).collect();
    command.env("LD_PRELOAD", list.join(":"));
    command.output().expect("the program starts")
}

/// Runs under others only.
fn alone(mut command: Command, others: &[&Path]) -> Output {
    let list: Vec<_> = others.iter().map(|path| path.display().to_string()).collect();
    command.env("LD_PRELOAD", list.join(":")).output().expect("the program starts")
}

/// Both ran alike.
fn assert_same(with: &Output, without: &Output, context: &str) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert_eq!(text(&with.stdout), text(&without.stdout), "{context}: {}", text(&with.stderr));
    assert_eq!(text(&with.stderr), text(&without.stderr), "{context}");
    assert_eq!(with.status, without.status, "{context}");
}

/// How many calls of an action the trace has.
fn count(trace: &Trace, action: Action) -> usize {
    trace.events().filter(|e| matches!(&e.kind, EventKind::Call(call) if call.action == action)).count()
}

fn notes(trace: &Trace) -> Vec<String> {
    let note = |kind| if let EventKind::Note(text) = kind { Some(text) } else { None };
    trace.events().filter_map(|event| note(event.kind)).collect()
}

/// The functions on the way to each request of `late.c`, outermost first.
fn asked_through(trace: &Trace) -> Vec<String> {
    let asks = trace.events().filter(|event| match &event.kind {
        EventKind::Call(call) => call.action == Action::Alloc,
        _ => false,
    });
    let name = |frame: &Frame| match frame {
        Frame::Native { function, .. } => function.clone(),
        Frame::Python { .. } => "Python".to_owned(),
    };
    let stack = |event: gputrace_schemas::event::Event| {
        let names: Vec<String> = trace.stack_frames(event.stack).map(name).collect();
        let names: Vec<_> = names.into_iter().take_while(|name| !name.contains("libc_start")).collect();
        names.into_iter().rev().collect::<Vec<_>>().join(" > ")
    };
    asks.map(stack).collect()
}

/// The C library of a Debian 11 (2.31) or older, unpacked: its packages libc6, libc6-dev, linux-libc-dev, libgcc-s1 and
/// libcrypt1, their absolute links made relative (`symlinks -cr`). What is built and run with it is what an older system
/// has.
#[test]
fn stacks_are_whole_with_this_c_library_and_an_older_one() {
    let old = std::env::var("GPUTRACE_TEST_OLD_GLIBC").ok();
    if old.is_none() {
        skip("an older C library", "GPUTRACE_TEST_OLD_GLIBC names no folder with one");
    }
    for root in [None, old.as_deref()].into_iter().take(if old.is_some() { 2 } else { 1 }) {
        let name = if root.is_some() { "old" } else { "new" };
        // Compilers find crt1.o and libc.so beside themselves first.
        let options = |root: &str| {
            let libraries = format!("{root}/usr/lib/x86_64-linux-gnu");
            [format!("--sysroot={root}"), format!("-B{libraries}"), format!("-L{libraries}")]
        };
        let sysroot: Vec<String> = root.map(options).into_iter().flatten().collect();
        let sysroot: Vec<&str> = sysroot.iter().map(String::as_str).collect();
        let built = |file: &str| format!("late.{name}/{file}");
        let place = mini_driver(&format!("late.{name}"), &sysroot);
        let driver = place.join("libcuda.so.1");
        let late = library("late", &built("liblate.so"), &[&["-DLIBRARY"], &*sysroot].concat());
        let app = compile("late", &built("app"), &[&[driver.to_str().expect("text")], &*sysroot].concat());
        let mut command = match root {
            None => Command::new(&app),
            Some(root) => {
                let mut command = Command::new(format!("{root}/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"));
                let libraries = format!("{root}/lib/x86_64-linux-gnu:{}", place.display());
                command.args(["--library-path", &libraries]).arg(&app);
                command
            }
        };
        command.arg(&late).env("LD_LIBRARY_PATH", &place);
        let folder = Folder::new(&scratch(), &format!("late.{name}"));
        let output = watched(command, &folder, &[], Order::First);
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        let trace = &folder.traces(1)[0];
        assert_eq!(asked_through(trace), ["main > outer > inner", "main > through > inner"], "{name}");
    }
}

#[test]
fn processes_know_who_started_them() {
    let app = program("app", "app.family");
    let folder = Folder::new(&scratch(), "family");
    let script = "\"$0\" elf & \"$0\" dlsym & wait";
    let mut shell = on_fake(Path::new("/bin/sh"), &["-c", script]);
    watched(
        {
            shell.arg(&app);
            shell
        },
        &folder,
        &[],
        Order::First,
    );
    for trace in folder.traces(2) {
        let process = trace.process();
        let commands: Vec<&str> = process.ancestors.iter().map(|it| it.command[0].as_str()).collect();
        assert_eq!(commands, ["/bin/sh"], "who has us not preloaded is none of the job");
        assert_eq!(process.ancestors[0].pid, process.parent);
        assert!(process.began >= process.ancestors[0].began && process.ancestors[0].began > 0);
    }
    let mut summary = Command::new(recorded::built().join("gputrace"));
    let said = summary.arg("summary").arg(folder.path()).output().expect("gputrace runs");
    let said = String::from_utf8(said.stdout).expect("text");
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[0], "Processes and their parents");
    assert!(lines[1].starts_with("  /bin/sh -c "), "{said}");
    let below =
        |end| lines[2..].iter().any(|line| line.starts_with(&format!("    {} {end} (pid ", app.display())));
    assert!(below("elf") && below("dlsym"), "{said}");
}

#[test]
fn limiters_keep_their_effect_and_each_call_is_one_event() {
    let app = program("app", "app");
    let makes: [(&str, &[&str]); 4] = [
        ("handle", &[]),
        ("next", &["-DNEXT"]),
        ("dlsym", &["-DDLSYM"]),
        ("dlsym.hidden", &["-DDLSYM", "-DHIDDEN"]),
    ];
    for (make, options) in makes {
        let limiter = library("limiter", &format!("liblimiter.{make}.so"), options);
        for route in ["elf", "dlsym", "proc"] {
            let without = alone(on_fake(&app, &[route]), &[&limiter]);
            assert!(without.status.success(), "{make} {route}: {without:?}");
            let is_limited = !without.stderr.is_empty();
            for order in [Order::First, Order::Last] {
                let context = format!("{make} limiter, {route}, ours {order:?}");
                let folder = Folder::new(&scratch(), &format!("{make}.{route}.{order:?}"));
                let with = watched(on_fake(&app, &[route]), &folder, &[&limiter], order);
                assert_same(&with, &without, &context);
                let trace = &folder.traces(1)[0];
                // Behind a limiter we do not see what it refused.
                let refused = usize::from(is_limited && matches!(order, Order::Last));
                // What a limiter that does not export its functions hands out cannot be told from any other function.
                let blind = make == "dlsym.hidden" && route == "proc" && matches!(order, Order::First);
                if !blind {
                    assert_eq!(count(trace, Action::Alloc), 12 - refused, "{context}");
                }
                assert_eq!(count(trace, Action::Free), if is_limited { 11 } else { 12 }, "{context}");
            }
        }
    }
}

/// `odd.c WHAT` on a driver in `driver`: alone, and under our library; the traces of the second run.
fn odd(what: &str, more: &[&str], driver: &Path, others: &[&Path], n_traces: usize) -> (Output, Vec<Trace>) {
    static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let name = format!("odd.{what}.{}", NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
    let program = compile("odd", &name, &[]);
    let command = || {
        let mut command = Command::new(&program);
        command.arg(what).args(more).env("LD_LIBRARY_PATH", driver);
        command
    };
    let without = alone(command(), others);
    let folder = Folder::new(&scratch(), &format!("{name}.traces"));
    let with = watched(command(), &folder, others, Order::First);
    // How often a signal came differs from run to run.
    if what == "signals" {
        assert_eq!((with.status, &with.stdout), (without.status, &without.stdout), "{with:?}");
    } else {
        assert_same(&with, &without, what);
    }
    assert!(with.status.success(), "{what}: {with:?}");
    (with, folder.traces(n_traces))
}

fn mini_driver(name: &str, options: &[&str]) -> PathBuf {
    let folder = scratch().join(name);
    fs::create_dir_all(&folder).expect("a scratch directory");
    let options = [&["-Wl,-soname,libcuda.so.1"], options].concat();
    library("mini_driver", &format!("{name}/libcuda.so.1"), &options);
    folder
}

#[test]
fn signal_handlers_may_interrupt_hooks_and_call_them() {
    let driver = mini_driver("mini.signals", &[]);
    let (output, traces) = odd("signals", &[], &driver, &[], 1);
    let said = String::from_utf8_lossy(&output.stderr);
    let number = |of: &str| said.lines().find_map(|line| line.strip_prefix(of)?.trim().parse::<u64>().ok());
    let (made, signals) = (number("driver:").expect("a count"), number("signals:").expect("a count"));
    // A call that interrupts the recording of another event of its thread is counted as lost. One that interrupts the
    // driver itself looks like the driver's own.
    let kept = count(&traces[0], Action::Alloc) as u64;
    let lost = |event| match event {
        EventKind::Lost(lost) if lost.cause != LostCause::Nested => lost.events,
        _ => 0,
    };
    let lost: u64 = traces[0].events().map(|event| lost(event.kind)).sum();
    assert!(
        kept <= made && kept + signals + lost >= made,
        "{made} made, {kept} kept, {signals} signals, {lost} lost"
    );
    assert!(kept >= made / 2, "{made} made, {kept} kept");
}

#[test]
fn memory_is_followed_to_the_end_of_a_thread() {
    let (_, traces) = odd("threads", &[], fake_cuda::library_dir(), &[], 1);
    assert_eq!(count(&traces[0], Action::Alloc), 400);
    assert_eq!(count(&traces[0], Action::Free), 400);
}

#[test]
fn errno_and_dlerror_are_the_programs_own() {
    let (_, traces) = odd("errors", &[], fake_cuda::library_dir(), &[], 1);
    // The 32-bit function of CUDA 2 was looked up, and is none of ours.
    let notes = notes(&traces[0]);
    assert!(notes.iter().any(|note| note.starts_with("driver.unhooked=cuMemAlloc:")), "{notes:?}");
    assert_eq!(notes.iter().filter(|note| note.starts_with("driver.")).count(), 1, "{notes:?}");
}

#[test]
fn a_driver_that_looks_itself_up_and_has_versions_is_met_as_it_is() {
    let script = scratch().join("versions");
    fs::write(&script, "CUDA_1 { global: cu*; local: *; };\n").expect("a scratch directory");
    let option = format!("-Wl,--version-script={}", script.display());
    let driver = mini_driver("mini.versioned", &[&option]);
    let (output, traces) = odd("errors", &[], &driver, &[], 1);
    assert!(String::from_utf8_lossy(&output.stdout).contains("versioned found, absent"), "{output:?}");
    assert_eq!(count(&traces[0], Action::Alloc), 2, "one by dlsym, one by dlvsym");
}

#[test]
fn forked_children_without_cuda_are_left_alone() {
    let (_, traces) = odd("forked", &[], fake_cuda::library_dir(), &[], 1);
    assert_eq!(count(&traces[0], Action::Alloc), 1);
}

#[test]
fn libraries_that_call_the_next_one_still_find_it() {
    let (first, second) =
        (library("chain", "libchain1.so", &["-DME=1"]), library("chain", "libchain2.so", &["-DME=2"]));
    let (output, _) = odd("chains", &[], fake_cuda::library_dir(), &[&first, &second], 0);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.starts_with("foo 21\n") && said.contains("driver none"), "{said}");
}

#[test]
fn other_allocators_may_be_preloaded() {
    for name in ["libjemalloc.so.2", "libtcmalloc_minimal.so.4", "libtcmalloc.so.4", "libmimalloc.so.2"] {
        let folders = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"].map(Path::new);
        let Some(path) = folders.iter().map(|folder| folder.join(name)).find(|path| path.exists()) else {
            skip(name, "not installed");
            continue;
        };
        let app = program("app", &format!("app.{name}"));
        for route in ["elf", "proc"] {
            for order in [Order::First, Order::Last] {
                let folder = Folder::new(&scratch(), &format!("{name}.{route}.{order:?}"));
                let without = alone(on_fake(&app, &[route]), &[&path]);
                let with = watched(on_fake(&app, &[route]), &folder, &[&path], order);
                assert_same(&with, &without, name);
                assert_eq!(count(&folder.traces(1)[0], Action::Alloc), 12, "{name}, {route}, ours {order:?}");
            }
        }
    }
}

#[test]
fn ctypes_is_seen() {
    let script = "import ctypes as c\nl = c.CDLL('libcuda.so.1')\np = c.c_uint64()\nx = c.c_void_p()\n\
        print(l.cuInit(0), l.cuDevicePrimaryCtxRetain(c.byref(x), 0), l.cuCtxSetCurrent(x), \
        l.cuMemAlloc_v2(c.byref(p), c.c_size_t(4321)), l.cuMemFree_v2(p))";
    let python = Path::new("python3");
    let without = match on_fake(python, &["-c", script]).output() {
        Ok(output) => output,
        Err(error) => return skip("python3", error),
    };
    let folder = Folder::new(&scratch(), "ctypes");
    let with = watched(on_fake(python, &["-c", script]), &folder, &[], Order::First);
    assert_same(&with, &without, "ctypes");
    assert_eq!(count(&folder.traces(1)[0], Action::Alloc), 1);
}

#[test]
fn a_library_that_binds_past_us_is_named() {
    let deep = library("deep", "libdeep.so", &["-Wl,-z,now"]);
    let (_, traces) = odd("deepbind", &[&deep.display().to_string()], fake_cuda::library_dir(), &[], 1);
    assert_eq!(count(&traces[0], Action::Alloc), 1, "its own is not seen");
    let notes = notes(&traces[0]);
    assert!(notes.iter().any(|note| note.contains("libdeep.so")), "{notes:?}");
}

/// Arguments that nobody should pass, one set after the other: a C expression for each parameter.
const BAD_ARGUMENTS: [fn(&str, &str) -> &'static str; 5] = [
    // Nothing at all.
    |_, kind| if kind == "IpcMemHandle" { "(struct ipc_handle){{0}}" } else { "0" },
    // Room for answers, and nothing asked.
    |name, kind| match (name, kind) {
        ("symbol", _) => "\"\"",
        (_, "IpcMemHandle") => "(struct ipc_handle){{1}}",
        (_, "u64" | "usize" | "i32" | "u32" | "Handle") => "0",
        _ => "&scratch",
    },
    // Too much, of things that do not exist.
    |name, kind| match (name, kind) {
        ("symbol", _) => "\"cuNoSuchFunction\"",
        (_, "IpcMemHandle") => "(struct ipc_handle){{2}}",
        (_, "usize") => "(size_t)1 << 63",
        // Where neither a program nor the fake driver has anything.
        (_, "u64") => "0x1230000000",
        (_, "i32" | "u32") => "0x7fffffff",
        (_, "Handle") => "ANY",
        _ => "&scratch",
    },
    // All ones.
    |name, kind| match (name, kind) {
        ("symbol", _) => "\"cuMemAlloc\"",
        (_, "IpcMemHandle") => "(struct ipc_handle){{3}}",
        (_, "usize" | "u64" | "i32" | "u32") => "-1",
        (_, "Handle") => "ANY",
        _ => "&scratch",
    },
    // Nowhere to put the answer.
    |name, kind| match (name, kind) {
        ("symbol", _) => "\"cuMemFree\"",
        ("version", _) => "13000",
        (_, "IpcMemHandle") => "(struct ipc_handle){{4}}",
        (_, "usize") => "4096",
        (_, "u64") => "4096",
        (_, "Handle") => "ANY",
        _ => "0",
    },
];

#[test]
fn bad_input_changes_nothing() {
    let row = |row: &rows::Row| {
        let sets: Vec<_> = BAD_ARGUMENTS.iter().map(|set| format!("({})", row.c_list(set))).collect();
        format!("X({}, ({}), {})", row.name, row.c_types(), sets.join(", "))
    };
    let rows: Vec<_> = rows::all().iter().map(row).collect();
    let header = scratch().join("bad_rows.h");
    fs::write(&header, format!("#define ROWS {}\n", rows.join(" \\\n"))).expect("a scratch directory");
    let driver = fake_cuda::library_dir().join("libcuda.so.1");
    let include = format!("-I{}", scratch().display());
    let program = compile("bad", "bad", &[&include, &driver.display().to_string()]);
    let without = alone(on_fake(&program, &[]), &[]);
    assert!(without.status.success(), "{without:?}");
    let lines = String::from_utf8_lossy(&without.stdout).lines().count();
    assert_eq!(lines, rows.len() * BAD_ARGUMENTS.len() * 6, "some calls ended the program");
    let folder = Folder::new(&scratch(), "bad.traces");
    let with = watched(on_fake(&program, &[]), &folder, &[], Order::First);
    assert_same(&with, &without, "bad input");
    folder.traces(2);
}

#[test]
fn a_killed_recorder_is_noticed_and_its_ring_is_recovered() {
    let app = program("recorder_killed", "recorder_killed");
    let folder = Folder::new(&scratch(), "recorder_killed");
    let told = folder.path().join("told").display().to_string();
    let run = std::thread::scope(|scope| {
        let run = scope.spawn(|| watched(on_fake(&app, &[&told]), &folder, &[], Order::First));
        let has_ten = |path: PathBuf| Trace::open(path).is_ok_and(|it| count(&it, Action::Alloc) == 10);
        while !run.is_finished() && !folder.files("gtr").into_iter().any(has_ten) {
            std::thread::sleep(Duration::from_millis(10));
        }
        fs::write(&told, "").expect("a file of ours");
        run.join().expect("it ends")
    });
    let said = String::from_utf8_lossy(&run.stderr).into_owned();
    assert!(run.status.success() && run.stdout == b"recorder found\n", "{run:?}");
    let ring = said.split("later events are in ").nth(1).and_then(|rest| rest.split(": `gputrace").next());
    let ring = ring.unwrap_or_else(|| panic!("names the ring and the remedy: {said}"));
    let written =
        fs::read_dir(folder.path()).expect("the folder").map(|entry| entry.expect("an entry").path());
    let written: Vec<_> = written.filter(|path| path.extension().is_some_and(|end| end == "gtr")).collect();
    let trace = Trace::open(&written[0]).expect("what the recorder had written stays readable");
    assert_eq!((written.len(), count(&trace, Action::Alloc)), (1, 10));
    let rest = folder.path().join("rest.gtr");
    let recovered =
        Command::new(recorded::built().join("gputrace")).args(["recover", ring, "-o"]).arg(&rest).output();
    let recovered = recovered.expect("gputrace runs");
    assert!(recovered.status.success(), "{}", String::from_utf8_lossy(&recovered.stderr));
    let rest = Trace::open(&rest).expect("a trace");
    assert!(count(&rest, Action::Alloc) >= 10, "the ring had the rest");
    assert!(!Path::new(ring).exists(), "the ring is given back");
}

#[test]
fn stacks_are_right_when_other_code_comes_to_the_same_addresses() {
    let driver = fake_cuda::library_dir().join("libcuda.so.1").display().to_string();
    let make = |function: &str, room: &str| {
        let options = [&format!("-DFUNCTION={function}"), &format!("-DROOM={room}"), &driver];
        library("reloaded", &format!("lib{function}.so"), &options.map(String::as_str))
    };
    let libraries =
        [make("small_room", "256"), make("large_room", "3072")].map(|path| path.display().to_string());
    let app = program("reloads", "reloads");
    let folder = Folder::new(&scratch(), "reloads");
    let arguments: Vec<&str> = libraries.iter().map(String::as_str).collect();
    let output = watched(on_fake(&app, &arguments), &folder, &[], Order::First);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "always at the same place\n");

    let trace = &folder.traces(1)[0];
    let mut outer: Vec<Vec<u64>> = vec![];
    for event in trace.events() {
        let EventKind::Call(call) = &event.kind else { continue };
        if !matches!(call.action, Action::Alloc | Action::Free) {
            continue;
        }
        let stack = trace.stack(event.stack).expect("a stack");
        assert!(!stack.truncated, "{:?}", trace.stack_frames(event.stack).collect::<Vec<_>>());
        // All but the function itself, which has other addresses for the two calls.
        let address = |frame: &Frame| match frame {
            Frame::Native { address, .. } => *address,
            Frame::Python { .. } => 0,
        };
        outer.push(trace.stack_frames(event.stack).skip(1).map(address).collect());
    }
    assert_eq!(outer.len(), 200);
    outer.dedup();
    assert!(outer.len() == 1 && outer[0].len() >= 3, "`go`, `main` and what called it: {outer:x?}");
}
