//! What ARCHITECTURE.md promises of the sources and of the library, where a program can check it. A failure says the
//! file, the line, and what to do.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

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
    assert!(!dependencies("replay").contains("gputrace-ring"), "replay knows no ring");
    for (file, text) in sources("recorder/src") {
        let both = text.contains("gputrace_ring::record") && text.contains("gputrace_schemas::event");
        assert!(
            !both || file.ends_with("translate.rs"),
            "{file}: only translate.rs may know records and events"
        );
    }
    for (file, text) in sources("replay/src") {
        let allowed = file.contains("/commands/") || !text.contains("gputrace_recorder");
        assert!(allowed, "{file}: only commands may use the recorder");
    }
}

#[test]
fn unsafe_code_stays_where_the_architecture_says() {
    for folder in ["recorder/src", "replay/src", "schemas/src"] {
        for (file, text) in sources(folder) {
            let places = ["recorder/src/map_file.rs", "recorder/src/memory.rs", "schemas/src/tables.rs"];
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
const SPEAKERS: &[&str] = &["replay/src/main.rs", "replay/src/show.rs", "recorder/src/lib.rs"];

#[test]
fn names_reach_a_terminal_only_through_what_makes_them_printable() {
    for folder in ["recorder/src", "replay/src", "schemas/src"] {
        for (file, text) in sources(folder) {
            let file = file.replace("tests/../", "");
            // Tests and comments say to whom they like.
            let text = text.split("#[cfg(test)]").next().unwrap_or_default();
            let is_test = file.ends_with("tests.rs") || file.ends_with("oracle.rs");
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
    for (file, text) in sources("replay/src/commands") {
        let is_export = file.ends_with("commands/export.rs");
        let text = text.split("#[cfg(test)]").next().unwrap_or_default();
        assert!(is_export || !text.contains(".behind()"), "{file}: only export formats go behind the screen");
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
        "pthread_create",
        "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE",
        "_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE",
        "_ZN2at15sequence_number17get_and_incrementEv",
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
    if !cfg!(target_arch = "x86_64") {
        return; // Copies and comparisons are the C library's elsewhere.
    }
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

/// Folders whose files each need a line in a table of their `mod.rs`.
const REGISTRIES: &[(&str, &str)] = &[
    ("replay/src/policies", "POLICIES"),
    ("replay/src/report/sections", "SECTIONS"),
    ("replay/src/exports", "EXPORTS"),
    ("replay/src/commands", "a verb"),
];

#[test]
fn every_file_of_a_registry_is_registered() {
    for (folder, table) in REGISTRIES {
        let registry = read(&format!("{folder}/mod.rs"));
        for entry in fs::read_dir(root().join(folder)).expect("a folder") {
            let name = entry.expect("an entry").path();
            let name = name.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            if name == "mod" || name == "tests" {
                continue;
            }
            let uses = registry.matches(&format!("{name}::")).count();
            let declared = registry.contains(&format!("mod {name};"));
            assert!(
                declared && uses > 0,
                "{folder}/{name}.rs: add `mod {name};` and its line in {table} to {folder}/mod.rs"
            );
        }
    }
}

#[test]
fn nothing_names_a_machine_of_its_makers() {
    for folder in ["ring", "shim", "recorder", "schemas", "replay", "tests"] {
        for (file, text) in sources(folder) {
            for (number, line) in text.lines().enumerate() {
                let home = concat!("/ho", "me/");
                let root = concat!("/ro", "ot/");
                assert!(
                    !line.contains(home) && !line.contains(root),
                    "{file}:{}: a path of somebody's machine",
                    number + 1
                );
            }
        }
    }
}

#[test]
fn a_test_that_does_not_run_says_so_in_one_way() {
    for folder in ["tests", "replay/tests", "replay/src", "schemas/tests", "recorder/tests"] {
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
