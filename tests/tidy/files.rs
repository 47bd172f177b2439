//! Which code may open and write files, and why each place may.

use super::sources;

/// Where files are opened without asking what they are, how often at most, whether the place also writes or renames, and why that is right
/// there. Everything else opens by `recorder/src/opened.rs` or `schemas/src/reader/open.rs`, because a path below `/tmp` or `/dev/shm`,
/// of `/proc/PID` or in another user's folder may lead to another file than the one that was looked at; and writes by
/// `recorder/src/output_file.rs`, which looks at what has the name first.
const FILES: [(&str, usize, Writes, &str); 37] = [
    ("recorder/src/fuzzing.rs", 4, Writes::No, "the fuzzer's own file"),
    (
        "recorder/src/arch/x86_64/inject/mod.rs",
        5,
        Writes::Yes,
        "/proc/PID/mem, which belongs to the kernel; /proc/sys and /dev/urandom",
    ),
    (
        "recorder/src/arch/x86_64/inject/threads.rs",
        4,
        Writes::No,
        "short texts of the kernel's in /proc/PID/task",
    ),
    (
        "recorder/src/arch/x86_64/inject/waits.rs",
        2,
        Writes::No,
        "short texts of the kernel's in /proc/PID/task; a socket is asked by opened.rs",
    ),
    (
        "recorder/src/job.rs",
        1,
        Writes::Yes,
        "makes a new file in /dev/shm (O_EXCL); what is there is opened by opened.rs",
    ),
    ("recorder/src/arch/x86_64/late.rs", 1, Writes::No, "/proc/PID/mem, to lock it"),
    ("recorder/src/arch/x86_64/foreign.rs", 1, Writes::No, "/proc/PID/mem, which belongs to the kernel"),
    ("recorder/src/left.rs", 1, Writes::No, "opens rings by `MapFile`, which asks"),
    ("recorder/src/limits.rs", 1, Writes::Yes, "/proc/self"),
    ("recorder/src/messages.rs", 1, Writes::Yes, "makes a new log in /dev/shm (O_EXCL, O_NOFOLLOW)"),
    ("recorder/src/opened.rs", 1, Writes::No, "texts of the kernel's in /proc/PID, of bounded length"),
    (
        "recorder/src/output_file.rs",
        1,
        Writes::Yes,
        "the one place where files are written: it looks after it has opened",
    ),
    ("recorder/src/process.rs", 7, Writes::No, "texts of the kernel's in /proc and /proc/self"),
    ("recorder/src/record.rs", 1, Writes::No, "/proc/self"),
    (
        "recorder/src/segments.rs",
        0,
        Writes::Yes,
        "gives the recorder's own files, which output_file.rs made, other names beside the first",
    ),
    (
        "recorder/src/witness.rs",
        5,
        Writes::No,
        "texts of the kernel's in /proc/PID, by a folder that is open",
    ),
    (
        "schemas/src/reader/open.rs",
        1,
        Writes::No,
        "names a file (O_PATH), looks at it, and opens that same file without waiting",
    ),
    (
        "objects/src/upload.rs",
        2,
        Writes::Yes,
        "as schemas/src/reader/open.rs; makes the state of an upload (O_EXCL) beside its file",
    ),
    ("replay/src/bin/gputrace/elf.rs", 2, Writes::No, "the library and the program that are to be used"),
    (
        "replay/src/bin/gputrace/show.rs",
        1,
        Writes::Yes,
        "a temporary file that loses its name at once (O_EXCL)",
    ),
    ("replay/src/bin/gputrace/commands/alarm.rs", 1, Writes::Yes, "/dev/null, opened as it is"),
    ("replay/src/bin/gputrace/commands/attach.rs", 1, Writes::No, "/proc/PID/stat"),
    ("replay/src/bin/gputrace/commands/budget.rs", 1, Writes::No, "the file that the user named"),
    ("replay/src/bin/gputrace/commands/doctor.rs", 2, Writes::No, "files of the system's"),
    ("replay/src/bin/gputrace/commands/leaks.rs", 1, Writes::No, "the file that the user named"),
    ("replay/src/bin/gputrace/commands/map/local.rs", 1, Writes::No, "/proc/sys"),
    (
        "replay/src/bin/gputrace/commands/map/plan.rs",
        1,
        Writes::Yes,
        "/proc/sys; parts in a work folder that nobody else has",
    ),
    ("replay/src/bin/gputrace/commands/map/slurm.rs", 3, Writes::Yes, "the work folder that the user named"),
    ("replay/src/bin/gputrace/commands/metrics.rs", 1, Writes::No, "/proc/sys"),
    ("replay/src/bin/gputrace/commands/parts/beside.rs", 1, Writes::Yes, "/dev/null, opened as it is"),
    ("replay/src/bin/gputrace/commands/parts/live/figures.rs", 1, Writes::No, "/proc/sys"),
    (
        "replay/src/bin/gputrace/commands/predict/runs.rs",
        1,
        Writes::No,
        "a log in the folder that it has made",
    ),
    ("replay/src/bin/gputrace/commands/record.rs", 1, Writes::No, "the program that the user named"),
    (
        "replay/src/bin/gputrace/commands/record/launch.rs",
        2,
        Writes::Yes,
        "/dev/null, opened as it is, and /proc/self",
    ),
    ("replay/src/bin/gputrace/commands/report.rs", 1, Writes::No, "the file that the user named"),
    (
        "replay/src/bin/gputrace/commands/serve.rs",
        1,
        Writes::Yes,
        "a temporary file that loses its name at once (O_EXCL)",
    ),
    ("replay/src/bin/gputrace/commands/serve/door.rs", 1, Writes::No, "/dev/urandom"),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Writes {
    Yes,
    No,
}

#[test]
fn what_is_opened_is_checked_after_it_is_opened_and_every_writer_looks_at_what_has_the_name_first() {
    const OPENS: [&str; 6] = [
        "File::open(",
        "File::create(",
        "fs::read(",
        "fs::read_to_string(",
        "OpenOptions::new(",
        "File::options(",
    ];
    const WRITES: [&str; 9] = [
        "File::create",
        ".write(true)",
        ".append(true)",
        ".create_new(",
        ".create(true)",
        "fs::write(",
        "fs::rename(",
        "fs::copy(",
        "O_CREAT",
    ];
    let of_product = |file: &str| {
        let is_test = file.ends_with("tests.rs") || file.contains("/tests/") || file.contains("/oracle/");
        file.contains("/src/") && !is_test
    };
    let folders = ["recorder/src", "replay", "objects/src", "schemas/src", "sim/src"];
    let files: Vec<_> = folders.into_iter().flat_map(sources).collect();
    let mut used = vec![];
    for (file, text) in files.iter().filter(|(file, _)| of_product(file)) {
        let file = file.replace("tests/../", "");
        let text = text.split("#[cfg(test)]").next().unwrap_or_default();
        let code: Vec<&str> = text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
        let lines = |ways: &[&str]| {
            let has_one = |line: &&&str| ways.iter().any(|way| line.contains(way));
            code.iter().filter(has_one).map(|line| line.trim()).collect::<Vec<_>>()
        };
        let (opens, writes) = (lines(&OPENS), lines(&WRITES));
        let row = FILES.iter().position(|(name, ..)| file == *name);
        let (most, may_write) = row.map_or((0, Writes::No), |row| (FILES[row].1, FILES[row].2));
        assert!(
            opens.len() <= most,
            "{file}: opens files in {} places, {most} are known: use `recorder/src/opened.rs` or `schemas/src/reader/open.rs`, or say in FILES (tests/tidy/files.rs) and in SECURITY.md why nobody else may change these paths: {opens:#?}",
            opens.len()
        );
        assert!(
            writes.is_empty() || may_write == Writes::Yes,
            "{file}: write by `output_file`, or say in FILES (tests/tidy/files.rs) why it need not: {writes:#?}"
        );
        used.extend(row.map(|row| (row, !opens.is_empty(), !writes.is_empty())));
    }
    for (idx, (name, _, writes, _)) in FILES.iter().enumerate() {
        let row = used.iter().find(|(row, ..)| *row == idx);
        let is_needed =
            row.is_some_and(|(_, opens, wrote)| (*opens || *wrote) && *wrote == (*writes == Writes::Yes));
        assert!(is_needed, "{name} opens or writes nothing, or not what FILES says: change its row");
    }
}
