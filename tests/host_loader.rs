//! What the library must not do to a program that loads, unloads and builds things in other ways than most: the program
//! ends as it does alone, and says the same. One program of `host/` for each harm.

use gputrace_skip::skip;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use gputrace_schemas::event::{Action, EventKind, Frame};
use gputrace_schemas::reader::Trace;
use gputrace_tests::patience::{LONG, is_hang};
use gputrace_tests::recorded::{self, Folder};

fn scratch() -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("host_loader");
    fs::create_dir_all(&path).expect("a scratch directory");
    path
}

fn compile(source: &str, name: &str, options: &[&str]) -> Result<PathBuf, String> {
    let target = scratch().join(name);
    let output = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
        .args(["-std=gnu11", "-O1", "-g", "-Wall", "-pthread", "-rdynamic", "-o"])
        .arg(&target)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("{source}.c")))
        .args(options)
        .arg("-ldl")
        .output()
        .expect("a C compiler");
    if output.status.success() { Ok(target) } else { Err(String::from_utf8_lossy(&output.stderr).into()) }
}

/// The folder of a driver that does next to nothing.
fn driver() -> PathBuf {
    let folder = scratch().join("driver");
    fs::create_dir_all(&folder).expect("a scratch directory");
    let name = format!("driver/building.{:?}", std::thread::current().id());
    let options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"];
    let built = compile("guests/mini_driver", &name, &options).expect("a driver");
    fs::rename(built, folder.join("libcuda.so.1")).expect("a driver");
    folder
}

/// A program that is linked to it.
fn program(source: &str, name: &str, options: &[&str]) -> Result<PathBuf, String> {
    let driver = driver().join("libcuda.so.1").display().to_string();
    compile(&format!("host/{source}"), name, &[options, &[&driver]].concat())
}

fn command(program: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).env("LD_LIBRARY_PATH", driver());
    command
}

/// Its output, if it ends.
fn run(mut command: Command) -> Output {
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    let started = Instant::now();
    while child.try_wait().expect("a child").is_none() {
        if is_hang(started, LONG) {
            let _ = child.kill();
            panic!("{command:?} hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().expect("its output")
}

/// Runs alone and recorded, and holds the second against the first; its trace.
fn alike(name: &str, make: impl Fn() -> Command) -> Trace {
    let alone = run(make());
    assert!(alone.status.success(), "{name} alone: {alone:?}");
    let mut off = make();
    off.env("LD_PRELOAD", recorded::built().join("libgputrace.so")).env("GPUTRACE", "off");
    assert_same(&format!("{name}, switched off"), &run(off), &alone);
    let folder = Folder::new(&scratch(), name);
    let mut with = make();
    recorded::preload(&mut with, &folder);
    assert_same(name, &run(with), &alone);
    folder.traces(1).remove(0)
}

fn assert_same(name: &str, with: &Output, alone: &Output) {
    let said = String::from_utf8_lossy(&with.stderr);
    assert_eq!(with.status, alone.status, "{name}: {said}");
    assert_eq!(
        String::from_utf8_lossy(&with.stdout),
        String::from_utf8_lossy(&alone.stdout),
        "{name}: {said}"
    );
}

fn count(trace: &Trace, action: Action) -> usize {
    trace.events().filter(|e| matches!(&e.kind, EventKind::Call(call) if call.action == action)).count()
}

fn notes(trace: &Trace) -> Vec<String> {
    let note = |kind| if let EventKind::Note(text) = kind { Some(text) } else { None };
    trace.events().filter_map(|event| note(event.kind)).collect()
}

#[test]
fn programs_built_with_sanitizers_run_as_without_us() {
    for sanitizer in ["thread", "undefined", "leak"] {
        let option = format!("-fsanitize={sanitizer}");
        let program = match program("sanitized", &format!("sanitized.{sanitizer}"), &[&option]) {
            Ok(program) => program,
            Err(why) => {
                skip(&format!("-fsanitize={sanitizer}"), why);
                continue;
            }
        };
        let trace = alike(&format!("sanitized.{sanitizer}"), || command(&program, &[]));
        assert_eq!(count(&trace, Action::Alloc), 100, "{sanitizer}");
        assert_eq!(count(&trace, Action::Free), 100, "{sanitizer}");
    }
}

/// Its runtime wants to be the first library of all, and asks to be told that it need not.
#[test]
fn programs_built_with_address_sanitizer_run_where_it_is_told_that_we_come_first() {
    let program = match program("sanitized", "sanitized.address", &["-fsanitize=address"]) {
        Ok(program) => program,
        Err(why) => return skip("-fsanitize=address", why),
    };
    let trace = alike("sanitized.address", || {
        let mut command = command(&program, &[]);
        command.env("ASAN_OPTIONS", "verify_asan_link_order=0");
        command
    });
    assert_eq!(count(&trace, Action::Alloc), 100);
}

#[test]
fn a_driver_that_is_unloaded_and_comes_back_elsewhere_is_recorded() {
    let program = compile("host/driver_comes_back", "driver_comes_back", &[]).expect("compiles");
    // The small driver holds itself.
    let command = |arguments: &[&str]| {
        let mut command = command(&program, arguments);
        command.env("LD_LIBRARY_PATH", fake_cuda::library_dir());
        command
    };
    let said = run(command(&[])).stdout;
    assert_eq!(String::from_utf8_lossy(&said), "gone\nused twice\n");
    let trace = alike("driver.asked", || command(&[]));
    assert_eq!(count(&trace, Action::Alloc) / 10, 1);
    let trace = alike("driver.used", || command(&["twice"]));
    assert_eq!(count(&trace, Action::Alloc) / 10, 2);
    let notes = notes(&trace);
    assert_eq!(notes.iter().filter(|note| note.starts_with("driver.unloaded=")).count(), 1, "{notes:?}");
}

/// Libraries of the Pythons that are to be had.
fn interpreters() -> Vec<PathBuf> {
    let named = std::env::var("GPUTRACE_TEST_PYTHONS").unwrap_or_else(|_| "python3".into());
    let ask = "import sysconfig as s, os; print(os.path.join(s.get_config_var('LIBDIR'), s.get_config_var('INSTSONAME') or ''))";
    let library = |python: &str| {
        let output = Command::new(python).args(["-c", ask]).output().ok()?;
        let path = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
        (path.exists() && path.display().to_string().contains(".so")).then_some(path)
    };
    named.split(':').filter_map(library).collect()
}

#[test]
fn an_interpreter_that_is_unloaded_is_not_read_any_more() {
    let program = program("interpreter_goes", "interpreter_goes", &[]).expect("compiles");
    let libraries = interpreters();
    if libraries.is_empty() {
        skip("an interpreter that is unloaded", "no Python here is a library");
    }
    for library in libraries {
        let name = library.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let path = library.display().to_string();
        let home = library.parent().and_then(Path::parent).map(Path::to_path_buf).unwrap_or_default();
        let make = || {
            let mut command = command(&program, &[&path]);
            command.env("PYTHONHOME", &home).env("GPUTRACE_STACKS", "all");
            command
        };
        if !run(make()).status.success() {
            skip(&format!("{name}, unloaded"), "it does not bear to be unloaded and loaded again");
            continue;
        }
        let trace = alike(&name, make);
        // The function that asked, in both lives of the interpreter.
        for bytes in [1 << 20, 2 << 20] {
            let is_asked = |event: &gputrace_schemas::event::Event| match &event.kind {
                EventKind::Call(call) => call.action == Action::Alloc && call.bytes.0 == bytes,
                _ => false,
            };
            let event = trace.events().find(is_asked).expect("the script's allocation");
            let has_python = trace
                .stack_frames(event.stack)
                .any(|frame| matches!(frame, Frame::Python { function, .. } if function.contains("asks")));
            assert!(has_python, "{name}: {bytes} bytes");
        }
    }
}

#[test]
fn a_frame_pointer_into_memory_that_is_gone_is_not_followed() {
    let program = program("borrowed_neighbour", "borrowed_neighbour", &[]).expect("compiles");
    let trace = alike("borrowed_neighbour", || command(&program, &[]));
    assert_eq!(count(&trace, Action::Alloc), 2);
}

#[test]
fn coroutines_have_whole_stacks_however_many_there_are() {
    let program = program("many_stacks", "many_stacks", &[]).expect("compiles");
    for more in [&[][..], &["large"]] {
        let arguments = [&["500", "2000"], more].concat();
        let trace = alike(&format!("many_stacks.{}", more.len()), || {
            let mut command = command(&program, &arguments);
            command.env("GPUTRACE_STACKS", "all");
            command
        });
        assert_eq!(count(&trace, Action::Alloc), 2000);
        for event in trace.events().filter(|event| matches!(event.kind, EventKind::Call(_))) {
            // What is further out, `makecontext` has put there.
            let frames: Vec<_> = trace.stack_frames(event.stack).collect();
            assert!(matches!(&frames[0], Frame::Native { function, .. } if function == "work"), "{frames:?}");
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn an_unloading_that_was_left_in_the_middle_cuts_no_stacks() {
    let options = ["-DLIBRARY", "-shared", "-fPIC"];
    let library = compile("host/left_closing", "left_closing.so", &options).expect("compiles");
    let library = library.display().to_string();
    let program = program("left_closing", "left_closing", &["-fno-omit-frame-pointer"]).expect("compiles");
    for (how, processes) in [("jump", 1), ("ends", 1), ("fork", 2), ("forks", 2)] {
        let alone = run(command(&program, &[&library, how]));
        assert!(alone.status.success(), "{how} alone: {alone:?}");
        let folder = Folder::new(&scratch(), &format!("left_closing.{how}"));
        let mut with = command(&program, &[&library, how]);
        recorded::preload(&mut with, &folder);
        assert_same(how, &run(with), &alone);
        for trace in folder.traces(processes) {
            let is_last = |event: &gputrace_schemas::event::Event| match &event.kind {
                EventKind::Call(call) => call.action == Action::Alloc && call.bytes.0 == 3 << 20,
                _ => false,
            };
            let event = trace.events().find(is_last).expect("an allocation");
            let frames: Vec<_> = trace.stack_frames(event.stack).collect();
            // `inner`, `without_tables`, `outer`, `main` and who called that. Where the C library finds no objects for us, a
            // stack is cut at code without tables. (A process that has just ended has no names.)
            let is_whole = frames.len() >= 5;
            assert!(is_whole || !finds_objects(), "{how}: {frames:?}");
        }
    }
}

/// Whether the C library has `_dl_find_object` (glibc 2.35).
#[cfg(target_arch = "x86_64")]
fn finds_objects() -> bool {
    let output = Command::new("ldd").arg("--version").output().expect("ldd");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text
        .lines()
        .next()
        .and_then(|line| line.rsplit('.').next())
        .and_then(|it| it.trim().parse::<u32>().ok());
    version.is_some_and(|minor| minor >= 35)
}
