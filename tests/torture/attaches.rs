//! How `attach`, `detach` and `ps` could harm a process, or a process their caller. Each row names a test elsewhere, because these tests
//! need other programs and permissions than a scenario has. The long form of the torture runs them all; `cargo test` runs them anyway.
//! A test of `attach_*.rs` that has no row fails [`every_test_of_attach_has_a_row`], unless it is in [`RECORDINGS`].

use crate::workshop::*;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

/// One row: a harm.
pub(crate) struct Attach {
    /// What somebody does, in words; no two have the same.
    name: &'static str,
    /// The program that does it, as it stands in the repository.
    program: &'static str,
    /// What came of it once; `-` where it was never seen to harm anybody.
    before: &'static str,
    /// What comes of it.
    after: &'static str,
    /// The source file of the test, and its name.
    test: (&'static str, &'static str),
}

const LATE: &str = "tests/attach_late.rs";
const HOSTILE: &str = "tests/attach_hostile.rs";
const WAITS: &str = "tests/attach_waits.rs";
const THREADS: &str = "recorder/src/arch/x86_64/inject/threads.rs";
use Attach as A;

#[rustfmt::skip] // A table.
pub(crate) const ATTACHES: &[Attach] = &[
    // The library that is brought in.
    A { name: "a library that is cut, or being written", program: "attach/words.c", before: "SIGBUS ends the process", after: "refused, nothing done", test: (LATE, "a_library_that_is_not_whole_is_not_brought_in") },
    A { name: "a user's link to a file of root's, or through a private folder", program: "attach/evil.c early", before: "root copies it into the process", after: "refused", test: (HOSTILE, "a_users_link_has_no_file_of_roots_copied_into_a_process_of_theirs") },
    A { name: "a user's library, and a process with more rights", program: "attach/evil.c early", before: "it runs with these rights", after: "refused", test: (HOSTILE, "a_users_library_is_no_code_of_a_process_with_more_rights") },
    // What the process is at that moment.
    A { name: "a thread with a seccomp filter of its own", program: "attach/filtered.c", before: "SIGSYS ends the process", after: "refused, nothing done", test: (LATE, "a_thread_under_a_filter_of_its_own_is_not_borrowed") },
    A { name: "exec during attach, while a child keeps the memory (CLONE_VM)", program: "attach/execs.c", before: "SIGSEGV in the new program", after: "refused, nothing done", test: (LATE, "a_process_that_becomes_another_program_meanwhile_is_given_nothing_for_the_one_that_it_was") },
    A { name: "a child that stands still between vfork and exec", program: "attach/between.c", before: "-", after: "refused, nothing done", test: (LATE, "a_child_that_still_has_its_parents_memory_is_left_alone") },
    A { name: "a thread's number passes to a process of another user", program: "cat", before: "a thread of that process stands still", after: "left alone", test: (THREADS, "a_thread_whose_number_is_another_processs_by_now_is_not_interrupted") },
    A { name: "stopped, filtered, or without the driver", program: "attach/words.c", before: "-", after: "refused with the reason", test: (LATE, "who_cannot_be_given_the_library_is_told_why_and_is_left_alone") },
    A { name: "no addresses to spare (ulimit -v)", program: "attach/words.c", before: "800 calls of the program fail", after: "refused, nothing done", test: (LATE, "of_a_process_without_addresses_to_spare_nothing_is_asked") },
    A { name: "threads that wait in 18 calls", program: "attach/waits.c", before: "recv returns a part, others EINTR", after: "each ends as alone", test: (WAITS, "no_call_that_waits_ends_otherwise_or_later_because_somebody_attached") },
    A { name: "it forks while it is recorded", program: "attach/words.c", before: "-", after: "the child runs as any", test: (LATE, "a_child_of_a_process_that_is_attached_to_runs_as_any_and_its_calls_are_not_the_parents") },
    // Whoever attaches.
    A { name: "the attacher is killed at any moment", program: "attach/words.c", before: "-", after: "as alone, and the next attaches", test: (LATE, "an_attacher_that_is_killed_at_any_moment_hurts_nobody_and_the_next_one_attaches") },
    A { name: "the attacher is killed in the middle of a write", program: "attach/dies.c", before: "1.2 MiB stay forever", after: "the next attach takes them away", test: (LATE, "what_an_attacher_leaves_that_is_killed_while_it_writes_the_next_one_takes_away") },
    A { name: "two attach at once", program: "attach/words.c", before: "-", after: "one is told", test: (LATE, "of_two_that_attach_at_once_one_does_and_the_other_is_told") },
    A { name: "attach and detach again and again", program: "attach/words.c", before: "41 MB of addresses stay each time", after: "as after the first", test: (LATE, "rounds_of_attach_and_detach_leave_no_more_behind_than_the_first") },
    A { name: "another user holds the name or a lock of an attach", program: "python3", before: "attach refused for ever", after: "attached", test: (HOSTILE, "nobody_without_a_debuggers_rights_keeps_others_from_attaching") },
    // Root looks at processes of a hostile user.
    A { name: "the file behind a descriptor is exchanged", program: "attach/evil.c swap ... early", before: "root's file cut to 0 bytes, 14 of 20", after: "unchanged", test: (HOSTILE, "a_process_that_exchanges_what_it_is_asked_to_make_has_nothing_of_the_attachers_written_to") },
    A { name: "the control page is exchanged", program: "attach/evil.c control, trace, borrowed", before: "root's file read and written", after: "unchanged, listed", test: (HOSTILE, "a_process_that_exchanges_its_control_page_is_listed_and_has_nothing_of_the_attachers_read_or_written") },
    A { name: "a control page that another user sent", program: "attach/evil.c sent", before: "taken for the process's own", after: "not taken", test: (HOSTILE, "a_control_page_that_another_user_sent_to_a_process_is_not_taken_for_its_own") },
    A { name: "a snapshot's trace is renamed away, a link has its name", program: "attach/evil.c moved", before: "root's trace is reported", after: "refused", test: (HOSTILE, "a_trace_whose_name_leads_elsewhere_in_the_end_is_not_reported") },
    A { name: "headers in memory that no linker makes", program: "python3", before: "ps aborts and lists nobody", after: "all are listed", test: (HOSTILE, "headers_in_a_hostile_processs_memory_keep_nobody_from_being_listed") },
    A { name: "memory that never answers (FUSE)", program: "attach/silent.c", before: "ps, attach and detach hang", after: "they end", test: (HOSTILE, "a_process_whose_memory_never_answers_keeps_no_command_from_ending") },
    A { name: "descriptors whose close never answers (FUSE)", program: "attach/silent.c closes", before: "-", after: "ps, attach and detach end", test: (HOSTILE, "descriptors_that_nobody_comes_back_from_closing_keep_no_command_from_ending") },
    A { name: "mapped files are exchanged, sparse, or have tables of gigabytes", program: "attach/mapped.c", before: "stacks shows nothing, after 40 s", after: "all is shown", test: (HOSTILE, "files_that_a_hostile_process_has_mapped_neither_hold_up_nor_fill_whoever_reads_them") },
    A { name: "sockets are exchanged, sent around, or waited on for ages", program: "attach/sockets.c", before: "-", after: "as it was", test: (HOSTILE, "sockets_of_a_hostile_process_are_as_they_were_and_all_of_its_threads_wait_on") },
    A { name: "memory that stops answering during a snapshot (FUSE)", program: "attach/silent.c begins", before: "attach --snapshot hangs", after: "it ends", test: (HOSTILE, "a_process_whose_memory_never_answers_keeps_a_snapshot_that_has_begun_from_nothing_but_its_end") },
];

/// Tests of `attach_late.rs` that hold what is recorded, and no harm.
const RECORDINGS: &[&str] = &[
    "words_of_the_programs_data_lead_to_us_from_attach_to_detach_and_every_call_between_is_seen",
    "threads_that_are_linked_to_the_driver_are_recorded_from_attach_on",
    "every_release_of_the_runtime_is_recorded_linked_to_it_or_with_a_copy_in_the_program",
    "blocks_of_pytorchs_allocator_are_recorded_from_attach_on",
    "a_program_that_ends_while_it_is_attached_to_has_a_whole_trace",
    "a_library_of_pythons_is_recorded_from_attach_on",
];

fn root() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Runs those whose names have this word, and shows the table; what failed. The short form runs none: they are tests anyway.
pub(crate) fn try_attaches(only: &str) -> Vec<String> {
    let mut failed = vec![];
    let mut text = String::new();
    for row in ATTACHES.iter().filter(|row| row.name.contains(only)) {
        let verdict = match run(row) {
            None => "not run: the long form does",
            Some(Ok(())) => "passes",
            Some(Err(said)) => {
                failed.push(format!("{}: {said}", row.name));
                "FAILS"
            }
        };
        let A { name, program, before, after, test: (file, test) } = row;
        let _ = writeln!(
            text,
            "{name} | {program} | before: {before} | now: {after} | {verdict} | {file}: {test}"
        );
    }
    if !text.is_empty() {
        say(&format!("attach: what was done | program | before | now | verdict | test\n{text}"));
    }
    failed
}

/// The row's test, by itself; `None` where it is not run here.
fn run(row: &Attach) -> Option<Result<(), String>> {
    if !is_long() || cfg!(not(target_arch = "x86_64")) {
        return None;
    }
    let (file, test) = row.test;
    let file = Path::new(file);
    let target = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.arg("test").current_dir(root());
    match file.starts_with("tests") {
        true => cargo.args(["-p", "gputrace-tests", "--test", &target, test]),
        false => cargo.args(["-p", "gputrace-recorder", "--lib", test]),
    };
    let output = cargo.output().expect("cargo runs");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    let has_passed = output.status.success() && said.contains("1 passed");
    Some(if has_passed { Ok(()) } else { Err(said.into_owned()) })
}

/// Names of the tests in a source file.
fn tests_in(file: &str) -> BTreeSet<String> {
    let text = fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
    let mut lines = text.lines().map(str::trim);
    let mut found = BTreeSet::new();
    while lines.any(|line| line == "#[test]") {
        let name =
            lines.next().and_then(|line| line.strip_prefix("fn ")?.split_once('(')).map(|(name, _)| name);
        found.insert(name.unwrap_or_else(|| panic!("{file}: a test without a name")).to_owned());
    }
    found
}

#[test]
fn every_test_of_attach_has_a_row() {
    for row in ATTACHES {
        let (file, test) = row.test;
        assert!(tests_in(file).contains(test), "{}: {file} has no test {test}", row.name);
        let source = row.program.split([' ', ',']).next().unwrap_or_default();
        let is_there = !source.contains('/') || root().join("tests").join(source).exists();
        assert!(is_there, "{}: there is no tests/{source}", row.name);
    }
    for file in [LATE, HOSTILE, WAITS] {
        let rows = ATTACHES.iter().filter(|row| row.test.0 == file).map(|row| row.test.1);
        let known: BTreeSet<String> = rows.chain(RECORDINGS.iter().copied()).map(str::to_owned).collect();
        let missing: Vec<String> = tests_in(file).difference(&known).cloned().collect();
        assert!(
            missing.is_empty(),
            "{file}: not in a row of ATTACHES (tests/torture/attaches.rs): {missing:?}"
        );
    }
    let recorded = tests_in(LATE);
    assert!(RECORDINGS.iter().all(|name| recorded.contains(*name)), "{RECORDINGS:?} of {LATE}");
    let names: BTreeSet<_> = ATTACHES.iter().map(|row| row.name).collect();
    assert_eq!(names.len(), ATTACHES.len(), "two rows have the same name");
}
