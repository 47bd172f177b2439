//! PJRT, by which JAX uses a GPU: every buffer, execution and failure is recorded once, whatever version of the table a plugin
//! has; a table that is not known is handed on as it is; and the places of functions are those of the header.
#![cfg(target_arch = "x86_64")]

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gputrace_schemas::event::{EventKind, Pjrt, PjrtAction, PjrtOrigin};
use gputrace_schemas::reader::Trace;
use gputrace_tests::recorded::{self, Folder};

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("pjrt")
}

fn scratch() -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("pjrt");
    fs::create_dir_all(&path).expect("a scratch directory");
    path
}

fn compiled(source: &str, name: &str, options: &[&str]) -> PathBuf {
    let target = scratch().join(name);
    let output = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
        .args(["-std=gnu11", "-O1", "-g", "-Wall", "-Werror", "-pthread", "-o"])
        .arg(&target)
        .args(options)
        .arg(sources().join(source))
        .arg(fake_cuda::library_dir().join("libcuda.so.1"))
        .arg("-ldl")
        .output()
        .expect("a C compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    target
}

fn plugin(name: &str, options: &[&str]) -> PathBuf {
    compiled("plugin.c", &format!("libpjrt_c_api_{name}.so"), &[&["-shared", "-fPIC"], options].concat())
}

fn run(program: &Path, plugins: &[&Path], folder: Option<&Folder>) -> Output {
    let mut command = Command::new(program);
    command.args(plugins).env("LD_LIBRARY_PATH", fake_cuda::library_dir());
    if let Some(folder) = folder {
        recorded::preload(&mut command, folder);
    }
    command.output().expect("a program")
}

/// Runs the program without and with the library, which must make no difference to it; what was recorded.
fn recorded_with(name: &str, plugins: &[&Path]) -> Trace {
    let program = compiled("program.c", &format!("program_{name}"), &[]);
    let alone = run(&program, plugins, None);
    assert!(alone.status.success(), "{name} alone: {alone:?}");
    let folder = Folder::new(&scratch(), name);
    let with = run(&program, plugins, Some(&folder));
    assert_eq!((with.status, &with.stdout), (alone.status, &alone.stdout), "{name}: {with:?}");
    folder.traces(1).remove(0)
}

fn events(trace: &Trace) -> Vec<(Pjrt, u32)> {
    let pjrt = |kind: EventKind| match kind {
        EventKind::Pjrt(pjrt) => Some(pjrt),
        _ => None,
    };
    trace.events().filter_map(|event| Some((pjrt(event.kind)?, event.stack.0))).collect()
}

fn notes(trace: &Trace) -> String {
    let notes = trace.events().filter_map(|event| match event.kind {
        EventKind::Note(text) if text.starts_with("pjrt.") => Some(text),
        _ => None,
    });
    notes.collect::<Vec<_>>().join("\n")
}

/// What `program.c` does with one plugin, as it must stand in the trace.
fn check_whole(name: &str, trace: &Trace) {
    let all = events(trace);
    let mut counts: BTreeMap<(PjrtAction, PjrtOrigin), (usize, u64)> = BTreeMap::new();
    let mut live: HashMap<u64, u64> = HashMap::new();
    let mut most = 0;
    for (pjrt, stack) in &all {
        let (n, bytes) = counts.entry((pjrt.action, pjrt.origin)).or_default();
        (*n, *bytes) = (*n + 1, *bytes + pjrt.bytes.0);
        match pjrt.action {
            PjrtAction::Made => {
                assert_eq!((pjrt.device, *stack != 0), (0, true), "{name}: {pjrt:?}");
                assert_eq!(
                    live.insert(pjrt.buffer, pjrt.bytes.0),
                    None,
                    "{name}: two of one address: {pjrt:?}"
                );
                // The threads' buffers are of 1 KiB.
                most = most.max(live.values().filter(|bytes| **bytes > 4096).sum());
            }
            PjrtAction::Destroyed | PjrtAction::Deleted | PjrtAction::Donated => {
                live.remove(&pjrt.buffer);
            }
            PjrtAction::ClientGone => {
                assert_eq!(live.values().sum::<u64>(), 6 << 20, "{name}: state, kept and the copy are left");
                live.clear();
            }
            PjrtAction::Failed => assert_eq!((pjrt.bytes.0, pjrt.code), (1 << 30, 8), "{name}"),
            PjrtAction::Executed | PjrtAction::Unloaded => {}
        }
    }
    use PjrtAction::*;
    use PjrtOrigin as By;
    let mib = 1 << 20;
    let expected = [
        ((Made, By::FromHost), (802, 4 * mib + 800 * 1024)),
        ((Made, By::Execute), (7, 8 * mib)),
        ((Made, By::Copy), (1, 2 * mib)),
        // Once for each that was made, but for the three that the client took along.
        ((Destroyed, By::Unknown), (807, 0)),
        ((Deleted, By::Unknown), (1, 0)),
        ((Donated, By::Unknown), (3, 0)),
        ((Failed, By::FromHost), (1, 1 << 30)),
        ((Failed, By::Execute), (1, 1 << 30)),
        ((Executed, By::Execute), (4, 0)),
        ((ClientGone, By::Unknown), (1, 0)),
    ];
    assert_eq!(counts, BTreeMap::from(expected), "{name}");
    // Donated memory is never counted twice: the state, what is kept, the result and its copy.
    assert_eq!(most, 8 << 20, "{name}");
    let made = |kind: EventKind| match kind {
        EventKind::PjrtExecutable(made) => {
            let bytes = [made.temporary, made.arguments, made.outputs, made.aliased, made.code];
            let name = trace.text(made.name).unwrap_or_default().to_owned();
            Some((name, bytes.map(|bytes| bytes.map(|bytes| bytes.0))))
        }
        _ => None,
    };
    let executables: Vec<_> = trace.events().filter_map(|event| made(event.kind)).collect();
    let figures = |temporary, outputs, aliased| [temporary, 2000, outputs, aliased, 1000].map(Some);
    let expected = [
        ("jit_step".to_owned(), figures(5 * mib, 2 * mib, mib)),
        ("jit_forward".to_owned(), figures(7 * mib, 2 * mib, 0)),
        ("jit_large".to_owned(), figures(0, 1 << 30, 0)),
    ];
    if trace.events().any(|event| matches!(event.kind, EventKind::PjrtExecutable(it) if it.code.is_some())) {
        assert_eq!(executables, expected, "{name}");
    } else {
        assert_eq!(executables.len(), 3, "{name}");
    }
}

#[test]
fn every_buffer_is_recorded_once_in_any_version() {
    for (name, options) in [
        ("0.116", &[][..]),
        // Newer and longer than any that is known.
        ("0.150", &["-DWORDS=200", "-DMINOR=150"]),
        // Its size ends before its functions do.
        ("0.54", &["-DWORDS=101", "-DMINOR=54"]),
        // Functions that are not there.
        ("nulls", &["-DNULLS"]),
    ] {
        let trace = recorded_with(name, &[&plugin(name, options)]);
        assert!(notes(&trace).starts_with("pjrt.buffers=seen: PJRT 0."), "{name}: {}", notes(&trace));
        check_whole(name, &trace);
    }
}

#[test]
fn a_plugin_that_comes_again_and_others_beside_it_are_seen() {
    let (first, second) = (plugin("first", &[]), plugin("second", &["-DMINOR=90"]));
    let trace = recorded_with("several", &[&first, &second, &first, &first, &first, &second]);
    let all = events(&trace);
    let count = |action| all.iter().filter(|(pjrt, _)| pjrt.action == action).count();
    assert_eq!((count(PjrtAction::Made), count(PjrtAction::ClientGone)), (6 * 810, 6));
}

#[test]
fn a_table_that_is_not_known_is_handed_on_as_it_is() {
    for (name, options, why) in [
        ("small", &["-DWORDS=60"][..], "smaller"),
        ("large", &["-DWORDS=600"], "larger"),
        ("0.33", &["-DMINOR=33"], "version"),
        ("0.56", &["-DMINOR=56"], "version"),
        ("cpu", &["-DPLATFORM=\"cpu\""], "seen: PJRT 0.116"),
    ] {
        let trace = recorded_with(name, &[&plugin(name, options)]);
        assert_eq!(events(&trace), [], "{name}");
        assert!(notes(&trace).contains(why), "{name}: {}", notes(&trace));
    }
}

#[test]
fn functions_stand_where_the_header_has_them() {
    let table = fs::read_to_string(sources().join("table.txt")).expect("the table");
    let short =
        |name: &str| name.replace("AsyncHostToDevice", "").trim_start_matches("PJRT").replace('_', "");
    let lines = table.lines().filter(|line| !line.starts_with('#'));
    let header: HashMap<String, String> = lines
        .filter_map(|line| line.split_once(' '))
        .map(|(place, name)| (short(name), place.to_owned()))
        .collect();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shim/src/pjrt.rs");
    let source = fs::read_to_string(source).expect("the shim's table");
    let (_, places) = source.split_once("enum Place {").expect("places");
    let places =
        places.lines().take_while(|line| *line != "}").filter_map(|line| line.trim().split_once(" = "));
    let mut n_places = 0;
    for (name, place) in places {
        n_places += 1;
        assert_eq!(header.get(name).map(String::as_str), Some(place.trim_end_matches(',')), "{name}");
    }
    assert_eq!(n_places, 30);
}
