//! Every row of the hook table by every route to it: ELF binding, `dlsym`, `dlvsym`, `cuGetProcAddress` and the CUDA
//! runtime's `cudaGetDriverEntryPoint`. On each route the program gets the same functions as without the library, ours
//! where there is a row, and each call is one event.

use gputrace_skip::skip;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use gputrace_schemas::event::EventKind;
use gputrace_tests::calls;
use gputrace_tests::recorded::{self, Folder};
use gputrace_tests::rows::{self, Row};
use gputrace_tests::wheels::{self, Major};

/// As in routes.c.
const MARK: u64 = 1 << 20;
const OURS: &str = "libgputrace.so";
const DRIVER: &str = "libcuda.so.1";

/// A C expression that does no harm, for a parameter of the row.
fn argument(name: &str, kind: &str) -> &'static str {
    match (name, kind) {
        ("symbol", _) => "\"cuMemAlloc\"",
        ("version", _) => "12000",
        ("flags", _) => "0",
        // A node that gives memory out: CU_GRAPH_NODE_TYPE_MEM_ALLOC.
        ("node_params", _) => "(scratch.bytes[0] = 10, &scratch)",
        // Where neither a program nor the fake driver has anything: it takes its memory from below the stack, and another place at each run.
        (_, "u64") => "0x1230000000",
        (_, "usize") => "4096",
        (_, "i32" | "u32") => "0",
        (_, "IpcMemHandle") => "(struct ipc_handle){{0}}",
        // Of the same one it is told once that its code came.
        ("function" | "kernel", "Handle") => "calloc(1, 128)",
        (_, "Handle") => "ANY",
        _ => "&scratch",
    }
}

/// `rows.h` of routes.c.
fn header(rows: &[Row]) -> String {
    let row = |row: &Row| {
        let types = row.c_types();
        let arguments = row.c_list(argument);
        format!("X({}, ({types}), ({arguments}))", row.name)
    };
    let bases: BTreeSet<_> = rows.iter().map(|row| format!("\"{}\"", row.base_name())).collect();
    format!(
        "#define ROWS {}\n#define BASES {}\n",
        rows.iter().map(row).collect::<Vec<_>>().join(" \\\n"),
        bases.into_iter().collect::<Vec<_>>().join(", ")
    )
}

/// One way to build and run routes.c.
struct Variant {
    name: String,
    /// For the compiler, after the source.
    link: Vec<String>,
    /// For the program.
    arguments: Vec<String>,
}

fn variants() -> Vec<Variant> {
    let mut variants = vec![Variant {
        name: "driver".into(),
        link: vec![fake_cuda::library_dir().join(DRIVER).display().to_string()],
        arguments: Vec::new(),
    }];
    for (name, major) in
        [("cudart11", Major::Cuda11), ("cudart12", Major::Cuda12), ("cudart13", Major::Cuda13)]
    {
        match wheels::shared(major) {
            Ok(path) => variants[0].arguments.extend([name.to_owned(), path.display().to_string()]),
            Err(reason) => skip(name, reason),
        }
        match wheels::fixed(major) {
            Ok(path) => variants.push(Variant {
                name: format!("static{}", &name[6..]),
                link: vec![
                    "-DSTATIC_RUNTIME".into(),
                    path.display().to_string(),
                    "-lrt".into(),
                    "-lm".into(),
                ],
                arguments: vec![format!("static{}", &name[6..])],
            }),
            Err(reason) => skip(&format!("static {name}"), reason),
        }
    }
    variants
}

fn build(variant: &Variant, directory: &Path) -> PathBuf {
    let executable = directory.join(&variant.name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("routes/routes.c");
    let output = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
        .args(["-std=gnu11", "-O1", "-g", "-Wall", "-pthread", "-I"])
        .arg(directory)
        .arg("-o")
        .arg(&executable)
        .arg(source)
        .args(&variant.link)
        .arg("-ldl")
        .output()
        .expect("a C compiler");
    assert!(output.status.success(), "{}: {}", variant.name, String::from_utf8_lossy(&output.stderr));
    executable
}

/// What a run printed, and which driver calls stand between each pair of markers.
struct Run {
    lines: Vec<Vec<String>>,
    driver_calls: Vec<Vec<String>>,
}

fn run(variant: &Variant, executable: &Path, folder: Option<&Folder>) -> Run {
    let log = executable.with_extension(if folder.is_some() { "with" } else { "without" });
    let _ = fs::remove_file(&log);
    let mut command = Command::new(executable);
    command
        .args(&variant.arguments)
        .env("LD_LIBRARY_PATH", fake_cuda::library_dir())
        .env("FAKE_CUDA_MEMORY", "64GiB")
        .env("FAKE_CUDA_LOG_ALL", "1")
        .env("FAKE_CUDA_LOG", &log);
    if let Some(folder) = folder {
        recorded::preload(&mut command, folder);
    }
    let output = command.output().expect("the program starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{}: {:?} {said}", variant.name, output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    let lines = text.lines().map(|line| line.split('\t').map(str::to_owned).collect()).collect();
    let calls = calls::parse_log(&fs::read_to_string(&log).expect("a call log")).expect("a good log");
    let calls = calls.iter().map(|call| (call.function.clone(), call.bytes()));
    Run { lines, driver_calls: between_markers(calls) }
}

/// Names of the calls between markers `2 * i` and `2 * i + 1`, for each `i`.
fn between_markers(calls: impl Iterator<Item = (String, u64)>) -> Vec<Vec<String>> {
    let mut all: Vec<Vec<String>> = Vec::new();
    let mut inside = false;
    for (name, bytes) in calls {
        let marker = bytes.checked_sub(MARK).filter(|_| name == "cuMemAlloc_v2");
        match marker {
            Some(number) if number == 2 * all.len() as u64 => {
                all.push(Vec::new());
                inside = true;
            }
            Some(number) if inside && number + 1 == 2 * all.len() as u64 => inside = false,
            _ if inside => all.last_mut().expect("pushed before").push(name),
            _ => {}
        }
    }
    assert!(!inside, "a marker is missing");
    all
}

#[test]
fn every_route_leads_to_every_row_once() {
    let rows = rows::all();
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("routes");
    fs::create_dir_all(&directory).expect("a scratch directory");
    fs::write(directory.join("rows.h"), header(&rows)).expect("a scratch directory");
    let mut table: BTreeMap<(String, String), &str> = BTreeMap::new();
    let mut routes: Vec<String> = Vec::new();
    for variant in variants() {
        let executable = build(&variant, &directory);
        let alone = run(&variant, &executable, None);
        let folder = Folder::new(&directory, &format!("traces.{}", variant.name));
        let watched = run(&variant, &executable, Some(&folder));
        let traces = folder.traces(1);
        let events = between_markers(traces[0].events().filter_map(|event| match event.kind {
            EventKind::Call(call) => {
                let name = traces[0].api(call.api).map_or("?", |api| &api.name);
                Some((name.to_owned(), call.bytes.0))
            }
            _ => None,
        }));
        assert_eq!(alone.lines.len(), watched.lines.len(), "{}: as many answers", variant.name);
        for (without, with) in alone.lines.iter().zip(&watched.lines) {
            let field = |index: usize| with.get(index).map_or("", String::as_str);
            match field(0) {
                "call" => {
                    let (index, route, symbol) = (field(1), field(2), field(4));
                    let mut expected = without.clone();
                    expected[3] = OURS.into();
                    if expected[6] != "-" {
                        expected[6] = OURS.into();
                    }
                    assert_eq!(*with, expected, "{}", variant.name);
                    assert_eq!(without[3], DRIVER, "{without:?}");
                    let index: usize = index.parse().expect("a number");
                    let row = rows.iter().find(|row| row.name == symbol).expect("a row");
                    let wanted: &[&str] = if row.is_event { &[symbol] } else { &[] };
                    assert_eq!(events[index], wanted, "events of {symbol} by {route}");
                    let reached = |run: &Run| run.driver_calls[index].iter().filter(|n| *n == symbol).count();
                    assert_eq!(reached(&watched), reached(&alone), "real calls of {symbol} by {route}");
                    assert!(reached(&watched) <= 1, "{symbol} by {route} reached the driver more than once");
                    let mark = if row.is_event { "1" } else { "o" };
                    table.insert((symbol.to_owned(), route.to_owned()), mark);
                    if !routes.iter().any(|known| known == route) {
                        routes.push(route.to_owned());
                    }
                }
                _ => assert_eq!(with, without, "{}: what is no row is untouched", variant.name),
            }
        }
        let _ = fs::remove_file(&executable);
    }
    show(&rows, &routes, &table, &directory);
    // The fake driver has no symbol versions, nor has any real one that we know.
    assert!(!routes.iter().any(|route| route == "dlvsym"), "dlvsym finds a version in the driver");
    for row in &rows {
        for route in ["elf", "dlsym", "default", "next"] {
            assert!(
                table.contains_key(&(row.name.clone(), route.into())),
                "{} not reached by {route}",
                row.name
            );
        }
        let asked =
            |prefix: &str| table.keys().any(|(name, route)| *name == row.name && route.starts_with(prefix));
        for route in ["gpa1", "gpa2"] {
            assert!(asked(route), "{} not reached by {route}", row.name);
        }
        for route in routes.iter().filter_map(|route| route.strip_suffix(".v/2")) {
            assert!(asked(&format!("{route}.v")), "{} not reached by {route}'s entry points", row.name);
        }
    }
}

fn show(rows: &[Row], routes: &[String], table: &BTreeMap<(String, String), &str>, directory: &Path) {
    let mut text = String::from(
        "1: one event  o: reached, no event by nature  .: the driver answers with another function, or with none\n\
         gpaV/F: cuGetProcAddress V with flags F; cudartN/F, staticN/F: cudaGetDriverEntryPoint of CUDA N's runtime, \
         .v: its ByVersion; dlvsym finds nothing, with the library and without\n",
    );
    for (number, route) in routes.iter().enumerate() {
        text += &format!("{:34}{}{route}\n", "", "| ".repeat(number));
    }
    for row in rows {
        let marks: Vec<_> = routes
            .iter()
            .map(|route| *table.get(&(row.name.clone(), route.clone())).unwrap_or(&"."))
            .collect();
        text += &format!("{:34}{}\n", row.name, marks.join(" "));
    }
    eprintln!("{text}");
    fs::write(directory.join("table.txt"), text).expect("a scratch directory");
}
