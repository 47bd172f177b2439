//! Names of a trace, and names of files, that a terminal would obey: every verb shows them, none lets them through.
//!
//! The verbs come from the help and the formats from the library: one that is added fails here until it is tried.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;

use gputrace_replay::exports::EXPORTS;
use gputrace_schemas::event::*;
use gputrace_schemas::printable::is_obeyed;
use gputrace_schemas::reader::Trace;
use gputrace_schemas::writer::Writer;

/// Titles, colours, clearing the screen, the same in C1, overwriting a line, other directions, and a line of its own.
const HOSTILE: &str = "=x\x1b]0;title\x07\x1b[2J\u{9b}31m\r\u{202e}\u{2066}\u{200b}\u{feff}\u{2028}\x08\x7f\0\u{85}\"';,<script>&\n\
                       INJECTED: gputrace: all is well\n\tINJECTED";

/// How each verb is run: TRACE, PICKLE, LOG and the like stand for files with hostile names in them, and hostile names of their own.
const RUNS: &[(&str, &[&str])] = &[
    ("record", &["-- MISSING", "-- PLAIN", "-- PROGRAM", "--stacks MISSING -- x", "-o NEW -- ELF"]),
    (
        "report",
        &[
            "TRACE",
            "OOM",
            "PICKLE",
            "TRACE --native",
            "TRACE OOM",
            "CUT",
            "MISSING",
            "--rules RULES TRACE",
            "--rules MISSING TRACE",
        ],
    ),
    (
        "html",
        &[
            "-F -o NEW TRACE OOM",
            "-F -o NEW PICKLE",
            "-F --redact -o NEW CUT",
            "-o PLAIN TRACE",
            "-F -o NEW MISSING",
        ],
    ),
    ("serve", &["MISSING", "PLAIN", "--port MISSING TRACE"]),
    ("summary", &["TRACE", "OOM", "PICKLE", "TRACE OOM", "TRACE --peak", "CUT"]),
    ("stats", &["TRACE", "OOM", "PICKLE", "CUT"]),
    ("top", &["--once TRACE", "--once TRACE OOM", "--once CUT", "--once PLAIN", "--once MISSING"]),
    ("metrics", &["--once TRACE", "--once TRACE OOM", "--once CUT", "--once --push pprof MISSING TRACE"]),
    (
        "tree",
        &[
            "TRACE --native --min-bytes 1",
            "OOM --min-bytes 1",
            "PICKLE --min-bytes 1",
            "--group-by owner TRACE",
            "--group-by category --min-bytes 1 TRACE",
            "--group-by phase --min-bytes 1 TRACE",
            "--group-by rank --min-bytes 1 TRACE OOM",
            "--at MISSING TRACE",
            "CUT",
        ],
    ),
    (
        "leaks",
        &["TRACE", "OOM", "PICKLE", "--suppressions RULES TRACE", "--suppressions MISSING TRACE", "CUT"],
    ),
    ("oom", &["TRACE", "OOM", "PICKLE", "CUT"]),
    ("diff", &["TRACE OOM", "OOM TRACE --by stack --fail-on-increase 0%", "TRACE PICKLE", "TRACE MISSING"]),
    ("replay", &["OOM", "PICKLE", "LOG", "OOM --policy torch --policy MISSING", "OOM --limit 1GiB", "TRACE"]),
    (
        "reproduce",
        &[
            "-F -o NEW OOM",
            "-F -o NEW PICKLE",
            "-F --whole --exact -o NEW OOM",
            "-F -o NEW LOG",
            "-F -o NEW CUT",
            "-o PLAIN OOM",
            "-F -o NEW MISSING",
        ],
    ),
    (
        "whatif",
        &[
            "--optimizer sgd TRACE",
            "--checkpoint all OOM",
            "--set-to-none no PICKLE",
            "--layout fsdp:2 CUT",
            "--plan --limit 1GiB TRACE",
            "--optimizer MISSING TRACE",
            "--accumulate 2 MISSING",
        ],
    ),
    ("layers", &["TRACE", "OOM", "PICKLE", "CUT", "MISSING"]),
    ("who", &["0x7f0000000000 TRACE", "1000 OOM", "0x10 PICKLE", "MISSING TRACE", "1 CUT"]),
    ("tune", &["OOM", "PICKLE", "LOG", "TRACE", "OOM --limit 1GiB"]),
    (
        "budget",
        &[
            "TRACE",
            "OOM",
            "PICKLE",
            "LOG",
            "OOM --limit 1GiB",
            "TRACE --between MISSING,x",
            "TRACE --rules MISSING",
        ],
    ),
    (
        "predict",
        &[
            "batch=1:OOM batch=2:OOM --at batch=4",
            "batch=1:OOM batch=2:OOM --fit batch --limit 1GiB",
            "batch=1:OOM batch=2:PICKLE --at batch=4",
            "batch=1:OOM batch=2:LOG --at batch=4",
            "batch=1:OOM batch=2:MISSING --at batch=4",
            "OOM TRACE --at MISSING",
        ],
    ),
    ("ranks", &["TRACE", "TRACE OOM", "OOM", "CUT"]),
    ("stacks", &["MISSING", "TRACE", "4194305"]),
    (
        "map",
        &[
            "-o NEW stats -- TRACE OOM",
            "-o NEW leaks -- CUT",
            "-o NEW stats -- MISSING",
            "-o PLAIN stats -- TRACE",
            "-o NEW TRACE -- TRACE",
        ],
    ),
    ("mcp", &["--allow MISSING", "--allow PLAIN", "--time-limit MISSING"]),
    ("upload", &["-o http://127.0.0.1:1/ TRACE", "-o http://127.0.0.1:1/ MISSING", "-o nowhere TRACE"]),
    ("reduce", &["-o NEW TRACE", "-o NEW TRACE OOM", "-o NEW CUT", "-o NEW MISSING", "-o PLAIN TRACE"]),
    // Formats have rules of their own: `formats_keep_their_rules_with_hostile_names`. These are the errors.
    (
        "export",
        &[
            "--format csv MISSING",
            "--format MISSING TRACE",
            "--format svg TRACE OOM",
            "--format csv -o PLAIN TRACE",
        ],
    ),
    ("doctor", &["TRACE", "OOM", "PICKLE", "CUT", "PLAIN", "PROGRAM", "ELF", "MISSING", "--hooks"]),
    ("recover", &["PLAIN", "MISSING", "-o NEW PLAIN"]),
    ("attach", &["MISSING", "-o NEW 4194305", "--stacks MISSING 1"]),
    ("detach", &["MISSING", "4194305"]),
    ("ps", &["", "--json", "MISSING"]),
    ("symbolise", &["-f -o NEW --sysroot MISSING TRACE", "-f -o NEW OOM", "-o NEW PLAIN", "-o TRACE TRACE"]),
    ("recorder", &["--ring MISSING", "--ring PLAIN", "--MISSING"]),
    ("library", &["", "PLAIN"]),
    ("manual", &["PLAIN", "MISSING MISSING"]),
    ("help", &["MISSING"]),
];

#[test]
fn no_verb_lets_a_terminal_obey_a_name() {
    let files = Files::new("verbs");
    let help = text(&gputrace(&["--help".as_ref()], &files).stdout);
    let verbs = help.split("Commands:").nth(1).unwrap().split("\n\n").next().unwrap();
    let verbs = verbs.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    for verb in verbs.filter(|verb| !verb.is_empty()) {
        assert!(RUNS.iter().any(|(name, _)| *name == verb), "say in RUNS how to try `gputrace {verb}`");
    }
    // Each with files of its own: some verbs write.
    let next = Mutex::new(RUNS.iter());
    let work = &|worker: usize| {
        let files = Files::new(&format!("verbs-{worker}"));
        let mut tried = vec![];
        loop {
            let Some((verb, runs)) = next.lock().unwrap().next() else { return tried };
            let (wrong, n_shown) = tried_out(&files, verb, runs);
            tried.push((*verb, wrong, n_shown));
        }
    };
    let n_workers = std::thread::available_parallelism().map_or(1, usize::from);
    let tried: Vec<_> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..n_workers).map(|worker| scope.spawn(move || work(worker))).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    assert_eq!(tried.len(), RUNS.len());
    let wrong: Vec<&String> = tried.iter().flat_map(|(_, wrong, _)| wrong).collect();
    let shown: Vec<String> = wrong.iter().take(40).map(|what| what.to_string()).collect();
    assert!(wrong.is_empty(), "{} of these:\n{}", wrong.len(), shown.join("\n"));
    // Otherwise nothing was tried.
    let mut silent: Vec<_> = tried.iter().filter(|(.., n)| *n == 0).map(|(verb, ..)| *verb).collect();
    // Without stores it refuses each URL before it reads a file.
    silent.retain(|verb| cfg!(feature = "objects") || *verb != "upload");
    assert!(silent.is_empty(), "no name was shown by {silent:?}");
}

/// What a terminal would have obeyed of what a verb said, and how many names it showed.
fn tried_out(files: &Files, verb: &str, runs: &[&str]) -> (Vec<String>, usize) {
    let help = text(&gputrace(&[verb.as_ref(), "--help".as_ref()], files).stdout);
    let shapes: Vec<&str> = ["", "--color always", "--json"]
        .into_iter()
        .filter(|shape| help.contains(shape.split(' ').next().unwrap()))
        .collect();
    let (mut wrong, mut n_shown) = (vec![], 0);
    for (run, shape) in runs.iter().flat_map(|run| shapes.iter().map(move |shape| (run, shape))) {
        // Before the arguments: those of `record` are the program's.
        let line = format!("{verb} {shape} {run}");
        let output = files.run(&line);
        let (stdout, stderr) = (uncoloured(&output.stdout), uncoloured(&output.stderr));
        wrong.extend(obeyed(&stdout).map(|what| format!("{line}: stdout: {what}")));
        wrong.extend(obeyed(&stderr).map(|what| format!("{line}: stderr: {what}")));
        if *shape == "--json" && !stdout.is_empty() {
            let values = serde_json::Deserializer::from_slice(&stdout).into_iter::<serde_json::Value>();
            wrong.extend(values.filter_map(Result::err).map(|error| format!("{line}: no JSON: {error}")));
        }
        n_shown += text(&stdout).matches(r"\u{1b}").count() + text(&stderr).matches(r"\u{1b}").count();
    }
    (wrong, n_shown)
}

/// What a terminal would obey, and lines that are not ours.
fn obeyed(shown: &[u8]) -> impl Iterator<Item = String> {
    let text = match std::str::from_utf8(shown) {
        Ok(text) => text.to_owned(),
        Err(error) => return vec![format!("no text: {error}")].into_iter(),
    };
    let lines = text.lines().filter_map(|line| {
        let raw = line.chars().find(|c| is_obeyed(*c) && *c != '\t');
        let raw = raw.map(|c| format!("{c:?} in {:?}", line.chars().take(200).collect::<String>()));
        raw.or_else(|| {
            line.trim_start().starts_with("INJECTED").then(|| format!("a line of a name: {line:?}"))
        })
    });
    lines.take(3).collect::<Vec<_>>().into_iter()
}

/// Without the colours that gputrace itself sets.
fn uncoloured(shown: &[u8]) -> Vec<u8> {
    let Ok(text) = std::str::from_utf8(shown) else { return shown.to_vec() };
    let colors =
        ["0", "1", "2", "31", "32", "33", "1;31", "1;32", "1;33"].map(|color| format!("\x1b[{color}m"));
    colors.iter().fold(text.to_owned(), |text, color| text.replace(color, "")).into_bytes()
}

#[test]
fn formats_keep_their_rules_with_hostile_names() {
    let files = Files::new("formats");
    for export in EXPORTS {
        let format = export.name;
        let output = files.run(&format!("export --native --format {format} TRACE"));
        let (stdout, stderr) = (output.stdout, text(&output.stderr));
        assert!(output.status.success(), "{format}: {stderr}");
        assert_eq!(obeyed(stderr.as_bytes()).collect::<Vec<_>>(), [""; 0], "{format}");
        match format {
            "speedscope" | "firefox" => {
                let error = serde_json::from_slice::<serde_json::Value>(&stdout).err();
                assert!(error.is_none(), "{format}: {error:?}");
            }
            "jsonl" | "nccl" => {
                for line in text(&stdout).lines() {
                    let error = serde_json::from_str::<serde_json::Value>(line).err();
                    assert!(error.is_none(), "{format}: {error:?} in {line}");
                }
            }
            "folded" => {
                for line in text(&stdout).lines() {
                    let (stack, bytes) = line.rsplit_once(' ').expect("a stack and bytes");
                    assert!(bytes.parse::<u64>().is_ok() && stack.starts_with("cuda:"), "{line}");
                }
            }
            "svg" => {
                let svg = text(&stdout);
                let allowed = |c: char| matches!(c, '\n' | '\r' | '\t') || !c.is_ascii_control();
                assert!(svg.chars().all(allowed), "XML 1.0 has no such characters");
                // Inferno's own script is one; a name must not begin another.
                assert_eq!(svg.matches("<script").count(), 1, "a name is markup");
            }
            // Tested with programs that open them (tests/exports.rs), and below.
            "csv" | "pprof" | "perfetto" | "parquet" | "torch-pickle" => {
                assert!(!stdout.is_empty())
            }
            _ => panic!("say here which rule of {format} keeps names from being more than names"),
        }
    }
}

#[test]
fn a_spreadsheet_takes_no_cell_of_a_csv_for_a_formula() {
    let files = Files::new("cells");
    let csv = files.run("export --native --format csv TRACE").stdout;
    let rows = cells(&text(&csv));
    let header = &rows[0];
    let numbers = ["device", "addr", "time_ns", "bytes", "device_bytes"];
    let mut n_made_safe = 0;
    for row in &rows[1..] {
        assert_eq!(row.len(), header.len(), "{row:?}");
        for (name, cell) in header.iter().zip(row) {
            let first = cell.trim_start().chars().next();
            if numbers.contains(&name.as_str()) {
                assert!(first.is_none_or(|c| c.is_ascii_digit() || c == '-'), "{name}: {cell:?}");
            } else {
                assert!(!first.is_some_and(|c| "=+-@＝＋－＠\t\r".contains(c)), "{name}: {cell:?}");
                n_made_safe += usize::from(cell.starts_with('\''));
            }
        }
    }
    assert!(n_made_safe > 0, "no name began with a sign");
}

/// RFC 4180, read naively.
fn cells(csv: &str) -> Vec<Vec<String>> {
    let (mut rows, mut row, mut cell, mut is_quoted) = (vec![], vec![], String::new(), false);
    let mut chars = csv.chars().peekable();
    while let Some(c) = chars.next() {
        match (is_quoted, c) {
            (true, '"') if chars.peek() == Some(&'"') => cell.push(chars.next().unwrap()),
            (_, '"') => is_quoted = !is_quoted,
            (false, ',') => row.push(std::mem::take(&mut cell)),
            (false, '\n') => {
                row.push(std::mem::take(&mut cell));
                rows.push(std::mem::take(&mut row));
            }
            (_, c) => cell.push(c),
        }
    }
    rows
}

/// Files whose names are as hostile as what is in them.
struct Files {
    folder: PathBuf,
}

impl Files {
    fn new(name: &str) -> Files {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("hostile-{name}"));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        let files = Files { folder };
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
        hostile(&golden.join("version1.gtr"), &files.path("TRACE"));
        hostile(&golden.join("caught-oom.gtr"), &files.path("OOM"));
        let trace = fs::read(files.path("TRACE")).unwrap();
        fs::write(files.path("CUT"), &trace[..trace.len() / 2]).unwrap();
        let pickle = files.run("export --format torch-pickle OOM").stdout;
        assert!(!pickle.is_empty());
        fs::write(files.path("PICKLE"), pickle).unwrap();
        let log = "Thread,Time,Action,Pointer,Size,Stream\n7,15:47:02:841977,\x1b[2Jallocate,0x1,512,0\n";
        fs::write(files.path("LOG"), log).unwrap();
        fs::write(files.path("RULES"), format!("owner=*{HOSTILE}\n\x1b[2J\u{9b}=\n")).unwrap();
        fs::write(files.path("PLAIN"), HOSTILE).unwrap();
        // Found, and then not: the interpreter's name is the script's.
        fs::write(files.path("PROGRAM"), "#!/\x1b[2J\u{9b}31m\x07\n").unwrap();
        fs::copy(env!("CARGO_BIN_EXE_gputrace"), files.path("ELF")).unwrap();
        for program in ["PROGRAM", "ELF"] {
            fs::set_permissions(files.path(program), fs::Permissions::from_mode(0o755)).unwrap();
        }
        files
    }

    /// A file, with an ending that tells verbs what it is.
    fn path(&self, placeholder: &str) -> PathBuf {
        // No NUL and no slash can be in a name of a file; bytes that are no text can.
        let name = HOSTILE.replace(['\0', '/'], "");
        let mut bytes = format!("{placeholder}{name}").into_bytes();
        bytes.extend_from_slice(b"\xff\x9b");
        let ending = if matches!(placeholder, "TRACE" | "OOM" | "CUT" | "NEW") { ".gtr" } else { "" };
        bytes.extend_from_slice(ending.as_bytes());
        self.folder.join(OsStr::from_bytes(&bytes))
    }

    /// Runs gputrace with files in the places of their placeholders.
    fn run(&self, line: &str) -> Output {
        let _ = fs::remove_file(self.path("NEW"));
        let words = line.split_whitespace().map(|word| {
            // `predict` has values before a name.
            let (values, name) = word.split_at(word.find(':').map_or(0, |colon| colon + 1));
            match name.trim_start_matches("--") {
                "TRACE" | "OOM" | "CUT" | "PICKLE" | "LOG" | "RULES" | "PLAIN" | "PROGRAM" | "ELF"
                | "NEW" => {
                    let mut argument = std::ffi::OsString::from(values);
                    argument.push(self.path(name));
                    argument
                }
                "MISSING" => {
                    let mut argument = std::ffi::OsString::from(word.strip_suffix("MISSING").unwrap());
                    argument.push(self.path("MISSING"));
                    argument
                }
                _ => word.into(),
            }
        });
        let words: Vec<_> = words.collect();
        gputrace(&words.iter().map(|word| &**word).collect::<Vec<_>>(), self)
    }
}

fn gputrace(arguments: &[&OsStr], files: &Files) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gputrace"));
    // Nothing of CUDA is there: a program that is run by mistake records nothing.
    command.args(arguments).current_dir(&files.folder).env("COLUMNS", "100");
    command.env("GPUTRACE_LIBRARY", files.path("ELF")).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A trace with other names: the definitions behind it replace its own.
fn hostile(from: &Path, to: &Path) {
    let trace = Trace::open(from).unwrap();
    let mut n_names = 0;
    let mut name = |before: &str| {
        n_names += 1;
        // The owner is told by the file, so paths keep their ends; one name is longer than any line.
        let long = if n_names == 40 { "x".repeat(10_000) } else { String::new() };
        format!("{HOSTILE}{n_names}{long}{before}")
    };
    let whole = fs::read(from).unwrap();
    let mut file = File::create(to).unwrap();
    std::io::Write::write_all(&mut file, &whole[..trace.blocks_end() as usize]).unwrap();
    let mut writer = Writer::append(&trace, file).unwrap();
    let process = trace.process().clone();
    writer.process(&Process {
        host: name(&process.host),
        boot: name(&process.boot),
        executable: name(&process.executable),
        command: process.command.iter().map(|word| name(word)).collect(),
        environment: process.environment.iter().map(|(key, value)| (key.clone(), name(value))).collect(),
        recorder: name(&process.recorder),
        torch_version: process.torch_version.as_ref().map(|version| format!("{version}{HOSTILE}")),
        ancestors: vec![Ancestor { pid: 1, began: 1, command: vec![name("torchrun"), name("x")] }],
        ..process
    });
    for (id, module) in (0..).zip(trace.modules()) {
        let module = Module { path: name(&module.path), build_id: name(&module.build_id), ..module.clone() };
        writer.module(ModuleId(id), &module);
    }
    for (id, frame) in (0..).zip(trace.frames()) {
        let mut frame = frame.clone();
        let (Frame::Native { function, file, .. } | Frame::Python { function, file, .. }) = &mut frame;
        *function = name(function);
        *file = name(file);
        writer.frame(FrameId(id), &frame);
    }
    for (id, thread) in (0..).zip(trace.threads()) {
        writer.thread(ThreadId(id), &Thread { name: name(&thread.name), ..*thread });
    }
    for device in trace.devices() {
        let (own, uuid) = (name(&device.name), name(&device.uuid));
        writer.device(&Device { name: own, uuid, ..*device });
    }
    for (id, api) in (0..).zip(trace.apis()) {
        let api = Api { name: name(&api.name), runtime_name: name(&api.runtime_name) };
        writer.api(ApiId(id), &api);
    }
    for (id, communicator) in (0..).zip(trace.communicators()).skip(1) {
        let config = &communicator.config;
        let config =
            CommConfig { name: name(&config.name), net_name: name(&config.net_name), ..config.clone() };
        writer.communicator(CommId(id), &Communicator { config, ..communicator.clone() });
    }
    for (id, mark) in (0..).zip(trace.texts()).skip(1) {
        writer.text(TextId(id), &name(mark));
    }
    let (_, last) = trace.span().unwrap();
    for key in ["", "loader.bypassed ", "driver.unhooked ", "recorder.", "ended "] {
        let kind = EventKind::Note(format!("{key}{}", name("")));
        writer.event(&Event { time: last, thread: ThreadId(0), stack: StackId(0), kind }).unwrap();
    }
    writer.finish().unwrap();
}
