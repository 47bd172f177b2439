//! What ARCHITECTURE.md promises of the sources and of the library, where a program can check it. A failure says the
//! file, the line, and what to do.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

#[path = "tidy/files.rs"]
mod files;

use gputrace_tests::recorded;
use gputrace_tests::rows;
use object::elf::{self, FileHeader64};
use object::read::elf::{Dyn, FileHeader, Sym};
use object::{Endianness, StringTable};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Every `.rs` file below a folder.
fn sources(folder: &str) -> Vec<(String, String)> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    let mut paths = Vec::new();
    walk(&root().join(folder), &mut paths);
    paths.sort();
    let name = |path: &Path| path.strip_prefix(root()).unwrap_or(path).display().to_string();
    paths.iter().map(|path| (name(path), fs::read_to_string(path).expect("a source file"))).collect()
}

/// The offline half's crates, from the ground up: each uses those above it in this list, and none below or beside it.
const FLOORS: [&[&str]; 6] = [
    &["trace"],
    &["analyse"],
    &["report"],
    &["ranks", "answers", "exports"],
    &["page", "reduce"],
    // The name of all of them, and the program.
    &["."],
];

/// Every source of the offline half: of each floor, and of the program.
fn offline() -> Vec<(String, String)> {
    let floors = FLOORS.iter().copied().flatten();
    floors.flat_map(|floor| sources(&format!("replay/{floor}/src").replace("/./", "/"))).collect()
}

/// Names in `[dependencies]` of a package.
fn dependencies(package: &str) -> BTreeSet<String> {
    let manifest = read(&format!("{package}/Cargo.toml"));
    let section = manifest.split("\n[dependencies]\n").nth(1).unwrap_or_default();
    let lines = section.lines().take_while(|line| !line.starts_with('['));
    let names =
        lines.filter(|line| !line.starts_with('#')).filter_map(|line| line.split(['.', '=', ' ']).next());
    names.filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn set<const N: usize>(names: [&str; N]) -> BTreeSet<String> {
    names.map(str::to_owned).into()
}

#[test]
fn the_shim_and_the_ring_depend_on_nothing_else() {
    assert_eq!(dependencies("ring"), set(["libc"]), "ring/Cargo.toml");
    assert_eq!(dependencies("shim"), set(["gputrace-ring", "libc"]), "shim/Cargo.toml");
    for package in ["ring", "shim"] {
        let lib = read(&format!("{package}/src/lib.rs"));
        assert!(lib.contains("#![no_std]"), "{package}/src/lib.rs must say #![no_std]");
        assert!(
            !lib.contains("extern crate alloc"),
            "{package}/src/lib.rs: no heap in somebody else's process"
        );
    }
}

#[test]
fn layers_know_only_what_is_below_them() {
    assert!(!dependencies("schemas").contains("gputrace-ring"), "schemas knows no ring");
    let of_sim = set(["imara-diff", "rustc-hash", "thiserror"]);
    assert_eq!(dependencies("sim"), of_sim, "sim knows no trace, and prints nothing");
    for (file, text) in sources("recorder/src") {
        let both = text.contains("gputrace_ring::record") && text.contains("gputrace_schemas::event");
        assert!(
            !both || file.contains("recorder/src/translate"),
            "{file}: only translate.rs and its folder may know records and events"
        );
    }
    for (file, text) in offline() {
        let allowed = file.contains("/commands/") || !text.contains("gputrace_recorder");
        assert!(allowed, "{file}: only commands may use the recorder");
    }
}

#[test]
fn unsafe_code_stays_where_the_architecture_says() {
    for folder in ["recorder/src", "sim/src", "replay", "schemas/src"] {
        for (file, text) in sources(folder) {
            let recorder = ["map_file", "memory", "pidfd", "arch/x86_64/ptrace"]
                .map(|name| format!("recorder/src/{name}.rs"));
            let places = [&recorder[..], &["schemas/src/tables.rs".to_owned()]].concat();
            let allowed = places.iter().any(|place| file.ends_with(place));
            let place = text.lines().position(|line| {
                let code = line.split("//").next().unwrap_or_default();
                code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe")
            });
            if let Some(line) = place.filter(|_| !allowed) {
                panic!("{file}:{}: unsafe belongs in ring/, shim/ or one of {places:?}", line + 1);
            }
        }
    }
}

/// Where standard output and standard error may be named: what goes through here has been made printable.
const SPEAKERS: &[&str] =
    &["replay/src/bin/gputrace/main.rs", "replay/src/bin/gputrace/show.rs", "recorder/src/messages.rs"];

#[test]
fn names_reach_a_terminal_only_through_what_makes_them_printable() {
    for of in [sources("recorder/src"), sources("sim/src"), offline(), sources("schemas/src")] {
        for (file, text) in of {
            let file = file.replace("tests/../", "");
            // Tests and comments say to whom they like.
            let text = text.split("#[cfg(test)]").next().unwrap_or_default();
            let is_test = file.ends_with("tests.rs") || file.contains("/oracle/");
            for (number, line) in text.lines().enumerate().filter(|_| !is_test) {
                let code = line.split("//").next().unwrap_or_default();
                let prints =
                    ["println!", "eprint!", " print!", "dbg!"].iter().any(|word| code.contains(word));
                let speaks = code.contains("io::stdout") || code.contains("io::stderr");
                let asks_only = code.contains("is_terminal()");
                let may = SPEAKERS.iter().any(|speaker| file.ends_with(speaker));
                assert!(
                    !prints && (!speaks || asks_only || may),
                    "{file}:{}: write to the screen that the verb was given, or say it with `complain!` (recorder: `say`)",
                    number + 1
                );
            }
        }
    }
    for (file, text) in sources("replay/src/bin/gputrace/commands") {
        let is_export = file.ends_with("commands/export.rs");
        let text = text.split("#[cfg(test)]").next().unwrap_or_default();
        assert!(is_export || !text.contains(".behind()"), "{file}: only export formats go behind the screen");
    }
}

/// Folders of sources in which nothing else than the list of `src/arch/` depends on the processor. Tests may: some are of what is on x86-64
/// only.
const ON_ANY_PROCESSOR: &[&str] =
    &["ring/src", "shim", "recorder", "schemas", "sim", "objects", "replay", "tests/fake-cuda"];

#[test]
fn which_processor_a_crate_is_for_is_asked_in_one_place() {
    let lists = ["ring", "shim", "recorder"].map(|package| format!("{package}/src/arch/mod.rs"));
    for folder in ON_ANY_PROCESSOR {
        for (file, text) in sources(folder) {
            let found = text.lines().position(|line| line.contains("target_arch"));
            let is_list = lists.contains(&file);
            assert_eq!(
                found.is_some(),
                is_list,
                "{file}:{}: what differs between processors goes into src/arch/, one file or folder for each, under one name in both",
                found.unwrap_or_default() + 1
            );
        }
    }
}

/// What lies in object storage is brought by `trace/files.rs`: whatever opens a trace by another way reads files of this machine only.
#[test]
fn traces_are_opened_in_one_place() {
    const WAYS: [&str; 5] =
        ["File::open(", "fs::read(", "fs::read_to_string(", "OpenOptions::new(", "File::options("];
    for (file, text) in offline() {
        let is_other =
            file.contains("/bin/") || file.ends_with("trace/src/files.rs") || file.ends_with("tests.rs");
        let text = text.split("#[cfg(test)]").next().unwrap_or_default();
        for (number, line) in text.lines().enumerate().filter(|_| !is_other) {
            let code = line.split("//").next().unwrap_or_default();
            let opens = WAYS.iter().any(|way| code.contains(way));
            assert!(!opens, "{file}:{}: open it with `trace::files::open`", number + 1);
        }
    }
}

#[test]
fn the_library_exports_its_rows_and_needs_nothing_of_cuda() {
    let path = recorded::built().join("libgputrace.so");
    let data = fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let header = FileHeader64::<Endianness>::parse(&*data).expect("an ELF file");
    let endian = header.endian().expect("an ELF file");
    let sections = header.sections(endian, &*data).expect("sections");

    let symbols = sections.symbols(endian, &*data, elf::SHT_DYNSYM).expect("dynamic symbols");
    let exported =
        symbols.iter().filter(|symbol| !symbol.is_undefined(endian) && symbol.st_bind() != elf::STB_LOCAL);
    let name = |symbol: &elf::Sym64<Endianness>| {
        String::from_utf8_lossy(symbol.name(endian, symbols.strings()).expect("a name")).into_owned()
    };
    let exported: BTreeSet<String> = exported.map(name).collect();
    let mut expected: BTreeSet<String> = rows::all().into_iter().map(|row| row.name).collect();
    expected.extend(rows::nccl().into_iter().flat_map(|name| [format!("p{name}"), name]));
    expected.extend(set([
        "dlsym",
        "dlvsym",
        "dlclose",
        "InitializeInjectionNvtx2",
        "nvshmem_malloc",
        "nvshmem_calloc",
        "nvshmem_align",
        "nvshmem_free",
        "pthread_create",
        "gputrace_attach_loaded",
        "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE",
        "_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE",
        "_ZN2at15sequence_number17get_and_incrementEv",
        "_ZN4c10d12ProcessGroup10getBackendEN3c1010DeviceTypeE",
        "_ZN4c10d12ProcessGroup12setGroupDescERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
        "_ZN4c10d12ProcessGroup12setGroupDescERKSs",
        "_ZN4c10d12ProcessGroup12setGroupNameERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
        "_ZN4c10d12ProcessGroup12setGroupNameERKSs",
        "_ZN5torch8autograd6Engine23execute_with_graph_taskERKSt10shared_ptrINS0_9GraphTaskEES2_INS0_4NodeEEONS0_11InputBufferE",
        "_ZN5torch8autograd6Engine23execute_with_graph_taskERKSt10shared_ptrINS0_9GraphTaskEEN3c1013intrusive_ptrINS0_4NodeENS7_6detail34intrusive_target_default_null_typeIS9_EEEEONS0_11InputBufferE",
    ]));
    let differ: Vec<_> = exported.symmetric_difference(&expected).collect();
    assert!(differ.is_empty(), "exported and not a row, or a row and not exported: {differ:?}");

    let (dynamic, link) =
        sections.dynamic(endian, &*data).expect("a dynamic section").expect("a dynamic section");
    let strings = sections.strings(endian, &*data, link).expect("its strings");
    let needed: BTreeSet<String> = needed(endian, dynamic, strings);
    assert_eq!(needed, set(["libc.so.6"]), "NEEDED");

    // Version names are strings of the same table: every one that is asked for appears there.
    let text = String::from_utf8_lossy(&data);
    let newest = text.split("GLIBC_2.").skip(1).filter_map(|rest| {
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<u32>().ok()
    });
    assert!(newest.clone().count() > 0, "no version of glibc is named at all");
    assert!(newest.max() <= Some(17), "a symbol newer than GLIBC_2.17 would shut older systems out");
}

/// What the library asks of others by name, and why each is harmless.
const IMPORTS: &[(&str, &str)] = &[
    ("__cxa_finalize", "of the compiler's start files, when the library is unloaded"),
    ("__gmon_start__", "of the compiler's start files; weak"),
    ("_ITM_deregisterTMCloneTable", "of the compiler's start files; weak"),
    ("_ITM_registerTMCloneTable", "of the compiler's start files; weak"),
    ("__errno_location", "the only way to the thread's errno, which the driver may change where we ask it"),
    ("environ", "a variable, read in a way that cannot fault"),
];

#[test]
fn the_library_calls_nothing_that_another_library_could_stand_in_for() {
    let path = recorded::built().join("libgputrace.so");
    let data = fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let header = FileHeader64::<Endianness>::parse(&*data).expect("an ELF file");
    let endian = header.endian().expect("an ELF file");
    let sections = header.sections(endian, &*data).expect("sections");
    let symbols = sections.symbols(endian, &*data, elf::SHT_DYNSYM).expect("dynamic symbols");
    for symbol in symbols.iter().filter(|symbol| symbol.is_undefined(endian)) {
        let name = String::from_utf8_lossy(symbol.name(endian, symbols.strings()).expect("a name"));
        let is_known = name.is_empty() || IMPORTS.iter().any(|(import, _)| *import == name);
        assert!(
            is_known,
            "{name}: other libraries may stand in for it, before they are ready or with books of their own; \
             call the kernel (shim/src/kernel.rs), or say in IMPORTS why it is harmless"
        );
    }
}

fn needed(
    endian: Endianness,
    dynamic: &[elf::Dyn64<Endianness>],
    strings: StringTable<'_>,
) -> BTreeSet<String> {
    let needed = dynamic.iter().filter(|entry| entry.tag(endian) == elf::DT_NEEDED);
    let name = |entry: &elf::Dyn64<Endianness>| {
        String::from_utf8_lossy(entry.string(endian, strings).expect("a name")).into_owned()
    };
    needed.map(name).collect()
}

/// `a/{b,c}.rs` as `a/b.rs` and `a/c.rs`.
fn alternatives(path: &str) -> Vec<String> {
    match path.split_once('{').and_then(|(before, rest)| Some((before, rest.split_once('}')?))) {
        Some((before, (names, after))) => {
            names.split(',').map(|name| format!("{before}{name}{after}")).collect()
        }
        None => vec![path.to_owned()],
    }
}

#[test]
fn the_architecture_names_files_that_are_there_and_is_soon_read() {
    let text = read("ARCHITECTURE.md");
    assert!(text.lines().count() < 150, "ARCHITECTURE.md: at most 149 lines, so that it is read as a whole");
    // What only says where something would be is no path.
    let is_path = |named: &&str| {
        named.contains('/')
            && !named.contains(['<', ' ', '*'])
            && !named.contains("target/")
            && !named.starts_with(['/', '.'])
    };
    let spans = text.split('`').skip(1).step_by(2);
    let paths: Vec<String> = spans.filter(is_path).flat_map(alternatives).collect();
    let folders = ["", "replay", "replay/src", "shim/src"];
    let is_there = |path: &&String| folders.iter().any(|folder| root().join(folder).join(path).exists());
    let missing: Vec<&String> = paths.iter().filter(|path| !is_there(path)).collect();
    assert!(missing.is_empty(), "ARCHITECTURE.md names what is not there: {missing:?}");
    assert!(paths.len() > 50, "ARCHITECTURE.md: only {} paths were understood", paths.len());
}

/// Folders whose files each need a line in a table of their `mod.rs`.
const REGISTRIES: &[(&str, &str)] = &[
    ("sim/src/policies", "POLICIES"),
    ("replay/report/src/sections", "SECTIONS"),
    ("replay/exports/src", "EXPORTS"),
    ("replay/src/bin/gputrace/commands", "VERBS"),
];

#[test]
fn every_file_of_a_registry_is_registered() {
    for (folder, table) in REGISTRIES {
        let contract = if root().join(folder).join("mod.rs").exists() { "mod.rs" } else { "lib.rs" };
        let registry = read(&format!("{folder}/{contract}"));
        for entry in fs::read_dir(root().join(folder)).expect("a folder") {
            let name = entry.expect("an entry").path();
            // What several of them are made of has a folder of its own.
            if name.ends_with("parts") {
                continue;
            }
            let name = name.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            if ["mod", "lib", "tests"].contains(&&*name) {
                continue;
            }
            let lines = || registry.lines().map(str::trim).filter(|line| !line.starts_with("//"));
            let declared = lines().any(|line| line.ends_with(&format!("mod {name};")));
            // `pool::` is not in `rmm_pool::`.
            let begins = |before: &str| !before.ends_with(|c: char| c.is_alphanumeric() || c == '_');
            let used =
                |line: &str| line.match_indices(&format!("{name}::")).any(|(at, _)| begins(&line[..at]));
            assert!(
                declared && lines().any(used),
                "{folder}/{name}.rs: add `mod {name};` and its line in {table} to {folder}/{contract}"
            );
        }
    }
}

/// The program's crate has no code of its own beside the program: what a library does has a floor.
#[test]
fn no_file_of_the_offline_half_lies_outside_of_its_floor() {
    for entry in fs::read_dir(root().join("replay/src")).expect("a folder") {
        let name = entry.expect("an entry").file_name().to_string_lossy().into_owned();
        assert!(
            ["bin", "lib.rs"].contains(&&*name),
            "replay/src/{name}: put it into the floor (replay/*/src) of what it is about"
        );
    }
}

/// What the packages of the workspace use of each other, as Cargo sees it; packages for tests are left out.
fn uses() -> Vec<(String, BTreeSet<String>)> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let metadata = Command::new(cargo)
        .args(["metadata", "--offline", "--no-deps", "--format-version", "1", "--manifest-path"])
        .arg(root().join("Cargo.toml"))
        .output()
        .expect("cargo runs");
    assert!(metadata.status.success(), "{}", String::from_utf8_lossy(&metadata.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&metadata.stdout).expect("JSON");
    let list = |of: &serde_json::Value, key: &str| of[key].as_array().cloned().unwrap_or_default();
    let name = |of: &serde_json::Value| of["name"].as_str().unwrap_or_default().to_owned();
    let used = |package: &serde_json::Value| {
        let needs = list(package, "dependencies").into_iter().filter(|it| it["kind"].is_null());
        (name(package), needs.map(|it| name(&it)).filter(|it| it.starts_with("gputrace")).collect())
    };
    list(&metadata, "packages").iter().map(used).collect()
}

#[test]
fn a_floor_uses_only_the_floors_above_it_in_the_list() {
    let package = |floor: &&str| match *floor {
        "." => "gputrace".to_owned(),
        floor => format!("gputrace-{floor}"),
    };
    let mut known = set(["gputrace-schemas", "gputrace-sim"]);
    let uses = uses();
    for floors in FLOORS {
        let here: BTreeSet<String> = floors.iter().map(package).collect();
        if here.contains("gputrace") {
            // The program alone records, and brings files from elsewhere.
            known.extend(set(["gputrace-recorder", "gputrace-objects"]));
        }
        for floor in &here {
            let (_, used) = uses.iter().find(|(name, _)| name == floor).expect("a package");
            let wrong: Vec<&String> = used.difference(&known).collect();
            assert!(
                wrong.is_empty(),
                "{floor} may not use {wrong:?}: FLOORS in tests/tidy.rs, ARCHITECTURE.md"
            );
        }
        known.extend(here);
    }
    let folders = fs::read_dir(root().join("replay")).expect("a folder").flatten();
    let crates = folders.filter(|entry| entry.path().join("Cargo.toml").exists());
    for name in crates.map(|entry| entry.file_name().to_string_lossy().into_owned()) {
        assert!(
            FLOORS.iter().any(|floors| floors.contains(&&*name)),
            "replay/{name}: which floor is it? FLOORS"
        );
    }
}

/// What is read as a whole is short enough for that: lines of a file, and of a function.
const LONGEST_FILE: usize = 900;
const LONGEST_FUNCTION: usize = 120;

#[test]
fn files_and_functions_are_short_enough_to_be_read() {
    for (file, text) in all_sources() {
        let n_lines = text.lines().count();
        assert!(
            n_lines <= LONGEST_FILE,
            "{file}: {n_lines} lines, and {LONGEST_FILE} may be: make it a folder, one file per subject"
        );
        for (line, n_lines) in functions(&text) {
            assert!(
                n_lines <= LONGEST_FUNCTION,
                "{file}:{line}: a function of {n_lines} lines, and {LONGEST_FUNCTION} may be: name its steps"
            );
        }
    }
}

/// Every source of the repository, the workspaces beside ours too.
fn all_sources() -> Vec<(String, String)> {
    let is_folder = |path: &Path| path.is_dir() && !path.ends_with("target") && !path.ends_with(".git");
    let folders = fs::read_dir(root()).expect("the repository").flatten().map(|entry| entry.path());
    let names = folders
        .filter(|path| is_folder(path))
        .filter_map(|path| Some(path.file_name()?.to_str()?.to_owned()));
    let found: Vec<_> = names.flat_map(|name| sources(&name)).collect();
    assert!(found.len() > 300, "only {} sources were found", found.len());
    found
}

/// The line where each function begins, and how many it has: rustfmt puts its last brace below its first word.
fn functions(text: &str) -> Vec<(usize, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let is_qualifier = |word: &str| {
        word.starts_with("pub")
            || word.starts_with('"')
            || ["const", "async", "unsafe", "extern"].contains(&word)
    };
    let begins = |line: &&str| {
        let before = line.split_once("fn ").map(|(before, _)| before);
        before.is_some_and(|before| before.split_whitespace().all(is_qualifier))
    };
    let length = |at: usize| {
        // One without a body, or with all of it in a line, ends there.
        let head = lines[at..].iter().find(|line| line.ends_with(['{', '}', ';']))?;
        let indent = lines[at].len() - lines[at].trim_start().len();
        let is_end = |line: &&str| line.trim() == "}" && line.len() == indent + 1;
        if head.ends_with('{') { lines[at..].iter().position(is_end) } else { None }
    };
    let found = lines.iter().enumerate().filter(|(_, line)| begins(line));
    found.map(|(at, _)| (at + 1, length(at).unwrap_or(0) + 1)).collect()
}

/// Crates whose modules import each other in pairs at most.
const CRATES: [&str; 14] = [
    "ring/src",
    "schemas/src",
    "sim/src",
    "replay/trace/src",
    "replay/analyse/src",
    "replay/report/src",
    "replay/ranks/src",
    "replay/answers/src",
    "replay/exports/src",
    "replay/page/src",
    "replay/reduce/src",
    "replay/src",
    "recorder/src",
    "shim/src",
];

#[test]
fn at_most_two_modules_import_each_other() {
    for folder in CRATES {
        let modules = modules::of(folder, &sources(folder));
        for circle in modules::circles(&modules) {
            assert!(
                circle.len() <= 2,
                "{folder}: {} modules import each other, two may: {}",
                circle.len(),
                modules::ties(&modules, &circle).join("; ")
            );
        }
    }
}

#[test]
fn every_variable_is_a_row_of_one_table_and_users_can_read_of_it() {
    let rows = variables(&read("ring/src/variables.rs"), "c\"");
    let security = read("SECURITY.md");
    for row in &rows {
        assert!(security.contains(&format!("`{row}`")), "{row}: say in SECURITY.md who reads it");
    }
    let readers = [sources("shim/src"), sources("recorder/src"), offline()].concat();
    for (name, row) in constants(&read("ring/src/variables.rs")) {
        let reads =
            |text: &str| text.split("variables::").skip(1).any(|rest| words(rest).next() == Some(&*name));
        assert!(readers.iter().any(|(_, text)| reads(text)), "{row}: no code reads variables::{name}");
    }
    // The Python package has some of its own.
    let known = |name: &String| {
        rows.contains(name) || name.starts_with("GPUTRACE_PYTEST_") || name == "GPUTRACE_PROGRAM"
    };
    for of in [sources("shim/src"), sources("recorder/src"), sources("schemas/src"), offline()] {
        for (file, text) in of {
            let text = text.split("#[cfg(test)]").next().unwrap_or_default();
            let is_literal = |name: &String| name != "GPUTRACE" && text.contains(&format!("\"{name}\""));
            let named = variables(text, "\"").into_iter().find(is_literal);
            assert!(
                named.is_none(),
                "{file}: {named:?} is written out: use its row in ring/src/variables.rs"
            );
        }
    }
    for page in ["README.md", "SECURITY.md", "docs/BESIDE.md", "docs/CONTAINERS.md", "docs/EXPORTS.md"] {
        let unknown = variables(&read(page), "").into_iter().find(|name| !known(name));
        assert!(unknown.is_none(), "{page} names {unknown:?}, which nobody reads");
    }
}

/// The rows of the table of variables: the constant, and what it is called in the environment.
fn constants(table: &str) -> Vec<(String, String)> {
    let row = |line: &str| {
        let (name, value) = line.trim().split_once(" = c\"")?;
        Some((name.to_owned(), value.trim_end_matches("\",").to_owned()))
    };
    let rows: Vec<_> = table.lines().filter_map(row).collect();
    assert_eq!(
        rows.len(),
        variables(table, "c\"").len(),
        "ring/src/variables.rs: a row that is not one line"
    );
    rows
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_')
}

/// The names of our variables that stand in a text behind `before`.
fn variables(text: &str, before: &str) -> Vec<String> {
    let is_part = |c: char| c.is_ascii_uppercase() || c == '_';
    let name = |rest: &str| format!("GPUTRACE{}", rest.split(|c| !is_part(c)).next().unwrap_or_default());
    text.split(&format!("{before}GPUTRACE")).skip(1).map(name).collect()
}

/// A release of PyTorch: major, minor.
type Release = (u32, u32);

/// The releases that `FIRST to LAST` behind `before` names, at every place.
fn ranges(text: &str, before: &str) -> Vec<(Release, Release)> {
    let release = |text: &str| {
        let (major, minor) = text.trim_end_matches('.').split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    let range = |rest: &str| {
        let mut words = rest.split([' ', '\n', '"']);
        let (first, to, last) = (words.next()?, words.next()?, words.next()?);
        if to == "to" { Some((release(first)?, release(last)?)) } else { None }
    };
    text.split(before).skip(1).filter_map(range).collect()
}

/// The simulator knows a release by a row; what else knows releases was looked at for the newest of them too.
#[test]
fn the_newest_pytorch_is_known_to_the_simulator_the_recorder_the_library_and_the_readme() {
    let rows = read("sim/src/policies/torch/profile.rs");
    let minors =
        rows.lines().filter_map(|line| line.trim().strip_prefix("row(")?.split(',').next()?.parse().ok());
    let minors: Vec<u32> = minors.collect();
    let (first, last) = ((2, minors[0]), (2, minors[minors.len() - 1]));
    assert_eq!(minors, (first.1..=last.1).collect::<Vec<_>>(), "rows of profile.rs, oldest first");
    let readme = ranges(&read("README.md"), "PyTorch ");
    assert_eq!(readme, [(first, last)], "README.md: the releases that profile.rs has rows for");

    let autograd = read("recorder/src/autograd.rs");
    let known = autograd.lines().find_map(|line| {
        let numbers = line.strip_prefix("pub(crate) const RELEASES: ")?.split_once(" = ")?.1;
        let numbers: Vec<u32> = words(numbers).filter_map(|word| word.parse().ok()).collect();
        Some(((*numbers.first()?, *numbers.get(1)?), (*numbers.get(2)?, *numbers.get(3)?)))
    });
    let known = known.expect("recorder/src/autograd.rs: RELEASES, in one line");
    assert_eq!(
        known.1, last,
        "recorder/src/autograd.rs: is PyTorch's backward pass the same in the newest release (tests/backward.rs, LAYOUTS)? \
         then RELEASES ends there"
    );
    let layouts = read("tests/backward.rs");
    for (major, minor) in [known.0, known.1] {
        let tried = layouts.contains(&format!("(\"{major}.{minor}."));
        assert!(
            tried,
            "tests/backward.rs: LAYOUTS lacks {major}.{minor}, where RELEASES of the recorder begins or ends"
        );
    }
    for (file, text) in sources("shim/src") {
        for (from, to) in ranges(&text, "PyTorch ") {
            assert_eq!(to, known.1, "{file}: PyTorch {}.{} to {}.{}", from.0, from.1, to.0, to.1);
        }
    }
}

#[test]
fn nothing_names_a_machine_of_its_makers() {
    let texts = tracked_texts().unwrap_or_else(|| {
        // A tarball without its history has no list of files.
        let folders = ["ring", "shim", "recorder", "schemas", "sim", "replay", "tests"];
        folders.map(sources).concat()
    });
    assert!(texts.len() > 250, "only {} files were read", texts.len());
    let paths = [concat!("/ho", "me/"), concat!("/ro", "ot/"), concat!("/wo", "rk/")];
    for (file, text) in texts {
        for (number, line) in text.lines().enumerate() {
            let named = paths.iter().find(|path| line.contains(**path));
            assert!(named.is_none(), "{file}:{}: a path of somebody's machine", number + 1);
        }
    }
}

/// Every text that git knows of.
fn tracked_texts() -> Option<Vec<(String, String)>> {
    let tracked = Command::new("git").arg("-C").arg(root()).args(["ls-files", "-z"]).output().ok()?;
    let names = String::from_utf8_lossy(&tracked.stdout).into_owned();
    let read = |name: &str| Some((name.to_owned(), fs::read_to_string(root().join(name)).ok()?));
    tracked.status.success().then(|| names.split_terminator('\0').filter_map(read).collect())
}

#[test]
fn a_test_that_does_not_run_says_so_in_one_way() {
    for folder in ["tests", "replay", "sim/src", "sim/tests", "schemas/tests", "recorder/tests"] {
        for (file, text) in sources(folder) {
            let says = |line: &str| {
                let prints = ["println!(", "say(", "writeln!("].iter().any(|print| line.contains(print));
                prints && line.contains(&format!("\"{}ed", "skipp"))
            };
            let says_so = text.lines().position(says).filter(|_| !file.starts_with("tests/skip/"));
            assert!(
                says_so.is_none(),
                "{file}:{}: tests skip by gputrace_skip::skip",
                says_so.unwrap_or(0) + 1
            );
        }
    }
}

/// Which module imports which. Good enough for a circle: it reads `use` and paths in the code, and no macro.
mod modules {
    use std::collections::{BTreeMap, BTreeSet};

    /// A module by its path in the crate, and those that it names.
    pub(super) type Modules = BTreeMap<Vec<String>, BTreeSet<Vec<String>>>;

    pub(super) fn of(folder: &str, sources: &[(String, String)]) -> Modules {
        let code: BTreeMap<Vec<String>, &str> =
            sources.iter().filter_map(|(file, text)| Some((path(folder, file)?, code(text)))).collect();
        let names = |module: &Vec<String>, text: &str| {
            let named = paths(text, module).into_iter().filter_map(|path| owner(&path, &code));
            // A folder's `mod.rs` is the contract of what lies in it, and lists it: the two are one.
            named.filter(|other| !module.starts_with(other)).collect()
        };
        code.iter().map(|(module, text)| (module.clone(), names(module, text))).collect()
    }

    /// `src/a/b.rs` and `src/a/b/mod.rs` are both `a::b`. A crate's root, and its tests, are in no circle.
    fn path(folder: &str, file: &str) -> Option<Vec<String>> {
        let inside = file.strip_prefix(folder)?.trim_start_matches('/').strip_suffix(".rs")?;
        let inside = inside.strip_suffix("/mod").unwrap_or(inside);
        let is_root =
            ["lib", "main"].contains(&inside) || inside.ends_with("tests") || inside.ends_with("main");
        (!is_root).then(|| inside.split('/').map(str::to_owned).collect())
    }

    /// Without what only tests import.
    fn code(text: &str) -> &str {
        let tests = ["#[cfg(test)]\nmod tests {", "#[cfg(test)]\npub(super) mod tests {"];
        let end = tests.iter().filter_map(|begin| text.find(begin)).min();
        &text[..end.unwrap_or(text.len())]
    }

    /// All paths that begin with `crate` or `super`, braces written out.
    fn paths(text: &str, module: &[String]) -> Vec<Vec<String>> {
        let mut found = vec![];
        for line in text
            .split(['\n'])
            .map(str::trim_start)
            .filter(|line| !line.starts_with("//"))
            .collect::<Vec<_>>()
            .join(" ")
            .split(';')
        {
            let mut rest = line;
            while let Some(at) = ["crate::", "super::"].iter().filter_map(|word| rest.find(word)).min() {
                let word = &rest[at..];
                let end = tree(word, &mut vec![], &mut |path| found.push(absolute(path, module)));
                rest = &rest[at + end.max(1)..];
            }
        }
        found
    }

    /// Reads `a::b`, `a::{b, c::d}`; the length that was read.
    fn tree(text: &str, before: &mut Vec<String>, found: &mut impl FnMut(&[String])) -> usize {
        let (mut at, depth) = (0, before.len());
        loop {
            let rest = &text[at..];
            let name = rest.len() - rest.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_').len();
            before.push(rest[..name].to_owned());
            at += name;
            if !text[at..].starts_with("::") {
                break;
            }
            at += 2;
            if text[at..].starts_with('{') {
                at += 1;
                while !text[at..].is_empty() && !text[at..].starts_with('}') {
                    let is_between = |c: char| c == ',' || c.is_whitespace();
                    at += text[at..].len() - text[at..].trim_start_matches(is_between).len();
                    if !text[at..].starts_with('}') {
                        let read = tree(&text[at..], before, found);
                        // `*`, or something that is not a path.
                        at += if read == 0 {
                            text[at..].chars().next().map_or(0, char::len_utf8)
                        } else {
                            read
                        };
                    }
                }
                before.truncate(depth);
                return (at + 1).min(text.len());
            }
        }
        found(before);
        before.truncate(depth);
        at
    }

    fn absolute(path: &[String], module: &[String]) -> Vec<String> {
        let n_up = path.iter().take_while(|word| *word == "super").count();
        let base = if n_up == 0 { &[] } else { &module[..module.len().saturating_sub(n_up)] };
        let rest = path.iter().skip(n_up.max(1)).filter(|word| *word != "self");
        base.iter().chain(rest).cloned().collect()
    }

    /// The module that a path leads into: the longest beginning of it that is one.
    fn owner(path: &[String], known: &BTreeMap<Vec<String>, &str>) -> Option<Vec<String>> {
        (1..=path.len()).rev().map(|n| path[..n].to_vec()).find(|path| known.contains_key(path))
    }

    /// Modules that reach each other, the largest circle first.
    pub(super) fn circles(modules: &Modules) -> Vec<BTreeSet<Vec<String>>> {
        let reach = |from: &Vec<String>| {
            let (mut seen, mut next) = (BTreeSet::new(), vec![from.clone()]);
            while let Some(module) = next.pop() {
                for other in modules.get(&module).into_iter().flatten() {
                    if seen.insert(other.clone()) {
                        next.push(other.clone());
                    }
                }
            }
            seen
        };
        let reached: BTreeMap<_, BTreeSet<_>> =
            modules.keys().map(|module| (module, reach(module))).collect();
        let mut circles: Vec<BTreeSet<Vec<String>>> = vec![];
        for (module, others) in &reached {
            if others.contains(*module) && !circles.iter().any(|circle| circle.contains(*module)) {
                let back =
                    others.iter().filter(|other| reached.get(other).is_some_and(|it| it.contains(*module)));
                circles.push(back.cloned().collect());
            }
        }
        circles.sort_by_key(|circle| std::cmp::Reverse(circle.len()));
        circles
    }

    /// Who imports whom within a circle.
    pub(super) fn ties(modules: &Modules, circle: &BTreeSet<Vec<String>>) -> Vec<String> {
        let tie = |module: &Vec<String>| {
            let others = modules[module].iter().filter(|other| circle.contains(*other) && *other != module);
            format!(
                "{} -> {}",
                module.join("::"),
                others.map(|it| it.join("::")).collect::<Vec<_>>().join(", ")
            )
        };
        circle.iter().map(tie).collect()
    }

    #[test]
    fn a_circle_is_found_however_it_is_written() {
        let source = |file: &str, text: &str| (format!("x/src/{file}.rs"), text.to_owned());
        let sources = [
            source("a", "use crate::{b::{self, C}, e};"),
            source("b", "fn f() { super::d::deep::g(); }"),
            source("d/mod", "pub use deep::g;"),
            source("d/deep", "use super::Contract;\nuse crate::a::A;"),
            source("e", "// crate::a\n#[cfg(test)]\nmod tests { use crate::a::A; }"),
        ];
        let modules = of("x/src", &sources);
        let circles = circles(&modules);
        assert_eq!(circles.len(), 1, "{circles:?}");
        assert_eq!(ties(&modules, &circles[0]), ["a -> b", "b -> d::deep", "d::deep -> a"]);
    }
}
