//! Functions and lines of programs without Python: from files that are stripped, gone or elsewhere, and never from a file
//! of another build.

use gputrace_skip::skip;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use gputrace_schemas::event::{Action, Event, EventKind, Frame};
use gputrace_schemas::reader::Trace;
use gputrace_tests::recorded::{self, Folder};
use object::{Object, ObjectSymbol};

/// Says what it does, for a failure, and what it said.
fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
    output
}

fn folder(name: &str) -> Folder {
    Folder::new(Path::new(env!("CARGO_TARGET_TMPDIR")), &format!("symbols-{name}"))
}

/// Compiles `guests/inlined.c`; programs that ask for other sizes are other builds.
fn program(folder: &Folder, weights: u32) -> PathBuf {
    compile(folder, "inlined.c", "program", &[&format!("-DWEIGHTS={weights}")])
}

fn compile(folder: &Folder, source: &str, name: &str, arguments: &[&str]) -> PathBuf {
    let path = folder.path().join(name);
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    run(Command::new(compiler)
        .args(["-std=gnu11", "-O1", "-g", "-Wl,--build-id", "-o"])
        .arg(&path)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("guests").join(source))
        .args(arguments)
        .arg(fake_cuda::library_dir().join("libcuda.so.1")));
    path
}

fn build_id(program: &Path) -> String {
    let data = fs::read(program).expect("the program");
    let elf = object::File::parse(&*data).expect("ELF");
    let id = elf.build_id().expect("whole").expect("a build id");
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Takes what names a program's functions out of it and puts it where distributions do, below `root`.
fn split(program: &Path, root: &Path) {
    let id = build_id(program);
    let (first, rest) = id.split_at(2);
    let debug = root.join(format!("usr/lib/debug/.build-id/{first}/{rest}.debug"));
    fs::create_dir_all(debug.parent().expect("a folder")).expect("writable");
    run(Command::new("objcopy").arg("--only-keep-debug").args([program, &*debug]));
    run(Command::new("strip").arg(program));
    let data = fs::read(program).expect("the program");
    let elf = object::File::parse(&*data).expect("ELF");
    assert!(elf.symbols().all(|symbol| symbol.name() != Ok("load_weights")), "it is stripped");
}

fn record(program: &Path, folder: &Folder, arguments: &[&str]) -> PathBuf {
    let mut command = Command::new(program);
    command.args(arguments).env("LD_LIBRARY_PATH", fake_cuda::library_dir());
    recorded::preload(&mut command, folder);
    ended(&mut command, folder, program, arguments);
    folder.traces(1);
    folder.files("gtr").remove(0)
}

/// What the command wrote. With `kill` among its arguments it waits, and is killed when its trace has its request, and knows of the
/// module.
fn ended(command: &mut Command, folder: &Folder, module: &Path, arguments: &[&str]) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program runs");
    let is_written = |path: PathBuf| {
        let Ok(trace) = Trace::open(path) else { return false };
        let is_it = |path: &str| path.starts_with(&*module.to_string_lossy());
        trace.events().any(|event| asks(&event)) && trace.modules().iter().any(|it| is_it(&it.path))
    };
    // One that ends by itself is not permitted what it tries.
    while arguments.contains(&"kill") && child.try_wait().expect("a child").is_none() {
        if folder.files("gtr").into_iter().any(is_written) {
            child.kill().expect("a child");
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().expect("its output")
}

/// The program's own request.
fn asks(event: &Event) -> bool {
    matches!(&event.kind, EventKind::Call(call) if call.action == Action::Alloc)
}

/// The frames of the program's own request, innermost first, without what the C library calls `main` from.
fn frames(trace: &Path) -> Vec<String> {
    let trace = Trace::open(trace).expect("a trace");
    let event = trace.events().find(asks).expect("one request");
    let frame = |frame: &Frame| match frame {
        Frame::Native { module, function, file, line, inlined, .. } => {
            let path = module.and_then(|id| trace.module(id)).map_or("", |module| &module.path);
            let place = if file.is_empty() { path } else { file };
            let line = if *line > 0 { format!(":{line}") } else { String::new() };
            let inlined = if *inlined { " inlined" } else { "" };
            let place = place.rsplit('/').next().unwrap_or_default();
            (!path.contains("libc.so")).then(|| format!("{function} {place}{line}{inlined}"))
        }
        Frame::Python { .. } => None,
    };
    trace.stack_frames(event.stack).filter_map(frame).take_while(|name| !name.contains("_start")).collect()
}

/// Lines of `guests/inlined.c`.
const NAMED: [&str; 3] = ["ask inlined.c:11 inlined", "load_weights inlined.c:17", "main inlined.c:44"];

/// The same and `_start` without names.
const UNNAMED: [&str; 3] = [" program"; 3];

fn gputrace(arguments: &[&str]) -> String {
    let output = run(Command::new(recorded::built().join("gputrace")).args(arguments));
    String::from_utf8(output.stdout).expect("text")
}

fn symbolise(trace: &Path, root: &Path, folder: &Folder) -> (PathBuf, String) {
    let named = folder.path().join("named.trace");
    let said = gputrace(&[
        "symbolise",
        "--sysroot",
        &root.display().to_string(),
        "-fo",
        &named.display().to_string(),
        &trace.display().to_string(),
    ]);
    (named, said)
}

#[test]
fn a_native_program_is_shown_with_lines_and_inlined_functions() {
    let folder = folder("native");
    let trace = record(&program(&folder, 1 << 20), &folder, &["alloc"]);
    assert_eq!(frames(&trace), NAMED);
    let trace = trace.display().to_string();
    for verb in [&["tree", &*trace][..], &["report", "--native", &trace]] {
        let said = gputrace(verb);
        for frame in ["main (inlined.c:44)", "load_weights (inlined.c:17)", "ask (inlined.c:11)"] {
            assert!(said.lines().any(|line| line.trim_end().ends_with(frame)), "{verb:?}: {frame}: {said}");
        }
    }
}

#[test]
fn a_stripped_program_is_named_from_its_debug_file() {
    let folder = folder("stripped");
    let program = program(&folder, 1 << 20);
    let root = folder.path().join("root");
    split(&program, &root);
    let trace = record(&program, &folder, &["alloc"]);
    assert_eq!(frames(&trace), UNNAMED);
    let (named, said) = symbolise(&trace, &root, &folder);
    assert_eq!(frames(&named), NAMED, "{said}");
    let (before, after) = (Trace::open(&trace).expect("whole"), Trace::open(&named).expect("whole"));
    assert!(before.events().eq(after.events()), "the events are the same");
    assert!(after.is_complete() && after.damages().is_empty());
    let report = gputrace(&["report", &named.display().to_string()]);
    assert!(report.contains("inlined.c:11)") && report.contains("  ask ("), "{report}");
}

#[test]
fn a_file_of_another_build_names_nothing() {
    let folder = folder("other-build");
    let program = program(&folder, 1 << 20);
    let root = folder.path().join("root");
    split(&program, &root);
    let trace = record(&program, &folder, &["alloc"]);
    let recorded_id = build_id(&program);
    // What is at the recorded path on the other machine was compiled again since.
    fs::remove_dir_all(&root).expect("ours");
    let there = root.join(program.strip_prefix("/").expect("absolute"));
    fs::create_dir_all(there.parent().expect("a folder")).expect("writable");
    let other = self::program(&folder, 2 << 20);
    fs::copy(&other, &there).expect("writable");
    let (named, said) = symbolise(&trace, &root, &folder);
    assert_eq!(frames(&named), UNNAMED, "{said}");
    let missing = format!("\n{}: no file with build id {recorded_id} (", program.display());
    let other = format!("\n  {} is another build: its build id is {}\n", there.display(), build_id(&other));
    assert!(said.contains(&missing) && said.contains(&other), "{said}\nlacks\n{missing}{other}");
}

#[test]
fn a_program_that_deletes_its_file_is_named_from_what_is_still_open() {
    // Before it is recorded, and while it is; and ended so that nothing of it is left to look at.
    for deeds in [["delete", "alloc"], ["alloc", "delete"]] {
        let folder = folder(&format!("deleted-{}", deeds[0]));
        let trace = record(&program(&folder, 1 << 20), &folder, &deeds);
        assert_eq!(frames(&trace), NAMED, "{deeds:?}");
    }
    let folder = folder("deleted-killed");
    let trace = record(&program(&folder, 1 << 20), &folder, &["replace", "alloc", "kill"]);
    assert_eq!(frames(&trace), NAMED);
}

/// A command that runs its arguments in a mount namespace of their own; `None`, said, where that is not permitted.
fn unshare() -> Option<Command> {
    let mut why = String::new();
    for how in ["-m", "-rm"] {
        let mut command = Command::new("unshare");
        match command.args([how, "true"]).output() {
            Ok(output) if output.status.success() => {
                let mut command = Command::new("unshare");
                command.arg(how);
                return Some(command);
            }
            Ok(output) => why = String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Err(error) => why = error.to_string(),
        }
    }
    skip("a mount namespace", why);
    None
}

/// The build id that the trace has of the module at this path.
fn recorded_build_id(trace: &Path, path: &Path) -> String {
    let trace = Trace::open(trace).expect("a trace");
    let module = trace.modules().iter().find(|module| Path::new(&module.path) == path);
    module.unwrap_or_else(|| panic!("no module is {}", path.display())).build_id.clone()
}

#[test]
fn a_program_that_only_its_container_has_is_named_from_there() {
    for (at, deeds) in [&["alloc"][..], &["alloc", "kill"]].into_iter().enumerate() {
        let Some(mut command) = unshare() else { return };
        let folder = folder(&format!("container-{at}"));
        let program = program(&folder, 1 << 20);
        let inside = folder.path().join("inside");
        fs::create_dir(&inside).expect("writable");
        command
            .args(["sh", "-ec"])
            .arg(r#"mount -t tmpfs none "$1"; cp "$2" "$1/program"; shift 2; exec "$0" "$@""#)
            .args([&inside.join("program"), &inside, &program])
            .args(deeds)
            .env("LD_LIBRARY_PATH", fake_cuda::library_dir());
        recorded::preload(&mut command, &folder);
        // What is at that path outside is another build.
        let other = compile(&folder, "inlined.c", "other", &["-DWEIGHTS=4096"]);
        fs::copy(&other, inside.join("program")).expect("writable");
        let output = ended(&mut command, &folder, &inside.join("program"), deeds);
        folder.traces(1);
        let trace = folder.files("gtr").remove(0);
        assert_eq!(frames(&trace), NAMED, "{deeds:?}: {}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(recorded_build_id(&trace, &inside.join("program")), build_id(&program));
        assert_ne!(build_id(&other), build_id(&program));
    }
}

#[test]
fn a_library_that_only_the_namespace_of_its_process_has_is_named_from_there() {
    for deeds in [&[][..], &["kill"]] {
        let folder = folder(&format!("namespace-{}", deeds.len()));
        let program = compile(&folder, "moves.c", "program", &[]);
        let library = |name, weights| {
            compile(&folder, "moves.c", name, &["-shared", "-fPIC", &format!("-DWEIGHTS={weights}")])
        };
        let source = library("source.so", 1 << 20);
        let inside = folder.path().join("inside");
        fs::create_dir(&inside).expect("writable");
        // What is at that path outside, where the recorder is, is another build.
        fs::copy(library("other.so", 2 << 20), inside.join("libinside.so")).expect("writable");
        let mut command = Command::new(&program);
        command.args([&inside, &source]).args(deeds).env("LD_LIBRARY_PATH", fake_cuda::library_dir());
        recorded::preload(&mut command, &folder);
        let output = ended(&mut command, &folder, &inside.join("libinside.so"), deeds);
        if output.status.code() == Some(77) {
            return skip("a mount namespace", "this user may not make one");
        }
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), deeds.is_empty(), "{said}");
        folder.traces(1);
        let trace = folder.files("gtr").remove(0);
        assert_eq!(frames(&trace), ["load_inside moves.c:11", "main moves.c:64"], "{said}");
        assert_eq!(recorded_build_id(&trace, &inside.join("libinside.so")), build_id(&source));
    }
}
