//! Other libraries beside ours in one process, and programs that use the driver in ways nobody planned: what they do
//! and get is what they do and get without us, and each physical call is one event.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gputrace_schemas::event::{Action, EventKind};
use gputrace_schemas::reader::Trace;
use gputrace_tests::recorded::{self, Folder};

fn scratch() -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("guests");
    fs::create_dir_all(&path).expect("a scratch directory");
    path
}

fn say(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
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
