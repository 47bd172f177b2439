//! Which code may open and write files, and why each place may.

use super::sources;

/// Where files are opened without asking what they are, how often at most, and why that is right there. Everything else goes through
/// `recorder/src/opened.rs`: a path below `/tmp` or `/dev/shm`, or of `/proc/PID`, may lead to another file than the one that was looked at.
const OPENS: [(&str, usize, &str); 36] = [
    ("recorder/src/fuzzing.rs", 4, "the fuzzer's own file"),
    (
        "recorder/src/inject/mod.rs",
        4,
        "/proc/PID/mem, which belongs to the kernel; /proc/sys and /dev/urandom",
    ),
    ("recorder/src/inject/threads.rs", 3, "short texts of the kernel's in /proc/PID/task"),
    ("recorder/src/job.rs", 1, "makes a new file (create_new)"),
    ("recorder/src/late.rs", 1, "/proc/PID/mem, to lock it"),
    ("recorder/src/witness.rs", 4, "texts of the kernel's in /proc/PID, by a folder that is open"),
    ("recorder/src/output_file.rs", 2, "the place where files are written: it looks after it has opened"),
    ("recorder/src/messages.rs", 1, "makes a new file (create_new)"),
    ("recorder/src/left.rs", 1, "opens rings by `MapFile`, which asks"),
    ("recorder/src/limits.rs", 1, "/proc/self"),
    ("recorder/src/opened.rs", 1, "texts of the kernel's in /proc/PID, of bounded length"),
    (
        "recorder/src/output.rs",
        3,
        "makes a new file (create_new); its lock is asked for by the name that the user gave",
    ),
    ("recorder/src/process.rs", 7, "texts of the kernel's in /proc and /proc/self"),
    ("recorder/src/record.rs", 1, "/proc/self"),
    ("objects/src/upload.rs", 3, "the file that the user named, and its state beside it"),
    (
        "schemas/src/reader/open.rs",
        1,
        "does not wait (O_NONBLOCK), and refuses what is not a regular file; nothing is written",
    ),
    ("replay/src/bin/gputrace/commands/serve/door.rs", 1, "/dev/urandom"),
    ("replay/src/bin/gputrace/commands/alarm.rs", 1, "/dev/null"),
    ("replay/src/bin/gputrace/commands/metrics.rs", 1, "/proc/sys"),
    ("replay/src/bin/gputrace/commands/attach.rs", 1, "/proc/PID/stat"),
    ("replay/src/bin/gputrace/commands/budget.rs", 1, "the file that the user named"),
    ("replay/src/bin/gputrace/commands/doctor.rs", 2, "files of the system's"),
    ("replay/src/bin/gputrace/commands/export.rs", 1, "the file that the user named"),
    ("replay/src/bin/gputrace/commands/leaks.rs", 1, "the file that the user named"),
    ("replay/src/bin/gputrace/commands/map/local.rs", 1, "/proc/sys"),
    ("replay/src/bin/gputrace/commands/map/plan.rs", 1, "/proc/sys"),
    ("replay/src/bin/gputrace/commands/map/slurm.rs", 3, "the folder that the user named"),
    ("replay/src/bin/gputrace/commands/parts/live/figures.rs", 1, "/proc/sys"),
    ("replay/src/bin/gputrace/commands/parts/live/find.rs", 3, "texts of the kernel's in /proc/PID"),
    ("replay/src/bin/gputrace/commands/parts/live/place.rs", 2, "texts of the kernel's in /proc/PID"),
    ("replay/src/bin/gputrace/commands/predict/runs.rs", 2, "a log in the folder that it has made"),
    ("replay/src/bin/gputrace/commands/record.rs", 1, "the program that the user named"),
    ("replay/src/bin/gputrace/commands/record/launch.rs", 2, "/dev/null and /proc/self"),
    ("replay/src/bin/gputrace/commands/report.rs", 1, "the file that the user named"),
    ("replay/src/bin/gputrace/commands/serve.rs", 1, "makes a new file (create_new)"),
    (
        "replay/src/bin/gputrace/",
        4,
        "make a new file (create_new); /dev/urandom; the library and the program that are to be used",
    ),
];

#[test]
fn paths_that_another_user_may_change_are_checked_after_they_are_opened() {
    const WAYS: [&str; 6] = [
        "File::open(",
        "File::create(",
        "fs::read(",
        "fs::read_to_string(",
        "OpenOptions::new(",
        "File::options(",
    ];
    let known = |file: &str| {
        let listed = OPENS.iter().filter(|(name, ..)| file == *name);
        let folder = OPENS.iter().filter(|(name, ..)| {
            name.ends_with('/') && file.strip_prefix(name).is_some_and(|rest| !rest.contains('/'))
        });
        listed.chain(folder).map(|(_, most, _)| *most).next().unwrap_or(0)
    };
    for folder in ["recorder/src", "schemas/src", "objects/src", "replay/src/bin"] {
        for (file, text) in sources(folder) {
            let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
            let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
            let opens: Vec<&str> = code.filter(|line| WAYS.iter().any(|way| line.contains(way))).collect();
            let most = if file.ends_with("tests.rs") { usize::MAX } else { known(&file) };
            assert!(
                opens.len() <= most,
                "{file}: opens files in {} places, {most} are known: use `recorder/src/opened.rs`, or say in OPENS (tests/tidy.rs) and in SECURITY.md why nobody else may change these paths: {opens:#?}",
                opens.len()
            );
        }
    }
}

/// Files that write or rename without `recorder/src/output_file.rs`, which looks at what has the name first, and why each may.
const WRITERS: [(&str, &str); 12] = [
    ("schemas/src/reader/open.rs", "opens a trace to read it"),
    ("recorder/src/output_file.rs", "it is the one place"),
    ("recorder/src/messages.rs", "a log in /dev/shm under a new name: O_EXCL, O_NOFOLLOW"),
    (
        "recorder/src/job.rs",
        "the job's file in /dev/shm: made with O_EXCL, opened with O_NOFOLLOW and looked at",
    ),
    ("recorder/src/limits.rs", "/proc/self/oom_score_adj"),
    ("recorder/src/inject/mod.rs", "memory of the process that is attached to"),
    ("replay/src/bin/gputrace/show.rs", "a temporary file that loses its name at once: O_EXCL"),
    ("replay/src/bin/gputrace/commands/serve.rs", "a temporary file that loses its name at once: O_EXCL"),
    ("replay/src/bin/gputrace/commands/record/launch.rs", "/dev/null, opened as it is"),
    ("replay/src/bin/gputrace/commands/alarm.rs", "/dev/null, opened as it is"),
    ("replay/src/bin/gputrace/commands/map/", "parts in a work folder that nobody else has"),
    ("objects/src/upload.rs", "the state of an upload beside its file"),
];

#[test]
fn every_writer_looks_at_what_has_the_name_first() {
    const WAYS: [&str; 8] = [
        "File::create",
        "File::options(",
        "OpenOptions::new(",
        ".create_new(",
        "fs::write(",
        "fs::rename(",
        "fs::copy(",
        "O_CREAT",
    ];
    let mut used = vec![];
    for folder in ["recorder/src", "replay", "objects/src", "schemas/src", "sim/src"] {
        let of_product = |(file, _): &(String, String)| file.contains("/src/");
        for (file, text) in sources(folder).into_iter().filter(of_product) {
            let file = file.replace("tests/../", "");
            let text = text.split("#[cfg(test)]").next().unwrap_or_default();
            let reason = WRITERS.iter().position(|(place, _)| file.contains(place));
            for (number, line) in text.lines().enumerate().filter(|_| !file.ends_with("tests.rs")) {
                let code = line.split("//").next().unwrap_or_default();
                if WAYS.iter().any(|way| code.contains(way)) {
                    let number = number + 1;
                    let reason = reason.unwrap_or_else(|| {
                        panic!("{file}:{number}: write by `output_file`, or say in WRITERS why it need not")
                    });
                    used.push(reason);
                }
            }
        }
    }
    for (idx, (place, _)) in WRITERS.iter().enumerate() {
        assert!(used.contains(&idx), "{place} writes nothing: it need not be in WRITERS");
    }
}
