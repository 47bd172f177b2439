//! Gates never pass on what they could not read: statuses on traces that are whole, cut, lossy, damaged and empty.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name)
}

fn run(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gputrace"));
    command.args(arguments).stdin(Stdio::null()).output().expect("gputrace can be run")
}

/// The status, and the reason on the standard error.
fn status(arguments: &[&str]) -> (Option<i32>, String) {
    let output = run(arguments);
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// A trace without its end, one that lost events, one with a damaged middle, and one with nothing in it.
fn doubtful() -> Vec<(String, &'static str)> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gates");
    fs::create_dir_all(&folder).expect("a folder");
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        fs::write(&path, bytes).expect("a file");
        path.display().to_string()
    };
    let whole = fs::read(golden("empty-cache-loop.gtr")).expect("a golden trace");
    let mut flipped = whole.clone();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 0x10;
    vec![
        (write("cut.gtr", &whole[..whole.len() - 100]), "no end"),
        (write("flipped.gtr", &flipped), "unreadable"),
        (golden("version1.gtr").display().to_string(), "events lost"),
        (write("empty.gtr", b""), "has no trace yet"),
    ]
}

#[test]
fn a_trace_that_does_not_tell_everything_passes_no_gate() {
    let whole = golden("empty-cache-loop.gtr").display().to_string();
    for (trace, why) in doubtful() {
        for gate in [
            &["leaks", "--error-on-leak=not-freed", &trace][..],
            &["leaks", "--error-on-leak=growth", &trace],
            &["leaks", "--error-on-leak", &trace],
            &["diff", "--fail-on-increase", "5%", &whole, &trace],
            &["diff", "--fail-on-increase", "5%", &trace, &whole],
            &["ranks", "--error-on-inconsistent", &trace],
            &["replay", "--error-on-oom", &trace],
        ] {
            let (code, error) = status(gate);
            assert_eq!(code, Some(2), "{gate:?}: {error}");
            assert!(error.contains(why), "{gate:?}: {error}");
        }
        let output = run(&["doctor", &trace]);
        assert_eq!(
            output.status.code(),
            Some(2),
            "doctor {trace}: {}",
            String::from_utf8_lossy(&output.stdout)
        );
    }
}

#[test]
fn a_whole_trace_is_judged() {
    let trace = |name: &str| golden(name).display().to_string();
    let [well, grows] = ["empty-cache-loop.gtr", "kept-losses.gtr"].map(trace);
    assert_eq!(status(&["leaks", "--error-on-leak=growth", &well]).0, Some(0));
    assert_eq!(status(&["leaks", "--error-on-leak=growth", &grows]).0, Some(1));
    assert_eq!(
        status(&["leaks", "--error-on-leak=growth", &grows, "/no/such/file"]).0,
        Some(1),
        "the worst counts"
    );
    assert_eq!(status(&["diff", "--fail-on-increase", "5%", &well, &well]).0, Some(0));
    assert_eq!(status(&["diff", "--fail-on-increase", "5%", &grows, &well]).0, Some(1));
    assert_eq!(status(&["doctor", &well]).0, Some(0));
    let varying = trace("varying-lengths.gtr");
    for (limit, code) in [("80GiB", 0), ("600MiB", 1)] {
        assert_eq!(
            status(&["replay", "--error-on-oom", "--limit", limit, &varying]).0,
            Some(code),
            "{limit}"
        );
    }
    let (code, error) = status(&["replay", "--error-on-oom", "--limit", "80GiB", &trace("caught-oom.gtr")]);
    assert_eq!((code, error.contains("would behave differently")), (Some(2), true), "{error}");
    let (code, error) = status(&["ranks", "--error-on-inconsistent", &well]);
    assert_eq!((code, error.contains("no NCCL calls")), (Some(2), true), "{error}");
}

#[test]
fn a_closed_pipe_changes_no_verdict() {
    let grows = golden("kept-losses.gtr").display().to_string();
    let gputrace = env!("CARGO_BIN_EXE_gputrace");
    let script = format!("set -o pipefail; {gputrace} leaks --error-on-leak=growth {grows} | true");
    let code = Command::new("bash").args(["-c", &script]).status().expect("bash").code();
    assert_eq!(code, Some(1));
}

#[test]
fn slips_are_told_with_what_was_meant() {
    let trace = golden("kept-losses.gtr").display().to_string();
    for (arguments, told) in [
        (&["replay", "--policy", "torhc", &trace][..], "did you mean `torch`?"),
        (&["replay", "--policy", "tcmalloc", &trace][..], "no policy is called `tcmalloc`; policies are"),
        (
            &["replay", "--policy", "torch:expandble_segments:True", &trace],
            "did you mean `expandable_segments`?",
        ),
        (&["tune", "--limit", "10", &trace], "`10` is 10 bytes; write a unit, such as 10GB"),
        (&["budget", golden("").to_str().unwrap_or_default()], "name one of them"),
    ] {
        let (code, error) = status(arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {error}");
        assert!(error.contains(told), "{arguments:?}: {error}");
    }
    assert_eq!(status(&["replay", "--policy", "help"]).0, Some(0), "the list needs no trace");
}

#[test]
fn what_is_neither_trace_nor_snapshot_is_called_so_by_every_verb() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("picture.png");
    fs::write(&path, b"\x89PNG\r\n\x1a\n0000000000").expect("a file");
    let path = path.display().to_string();
    for verb in ["report", "leaks", "oom", "tune", "replay"] {
        let (code, error) = status(&[verb, &path]);
        assert_eq!(code, Some(2), "{verb}");
        assert!(error.contains("is not a gputrace trace: it begins with \"\\x89PNG"), "{verb}: {error}");
        assert_eq!(error.lines().count(), 1, "{verb}: {error}");
    }
}

#[test]
fn the_standard_input_is_a_trace_where_it_is_named() {
    let trace = fs::File::open(golden("kept-losses.gtr")).expect("a golden trace");
    let mut command = Command::new(env!("CARGO_BIN_EXE_gputrace"));
    let output = command.args(["summary", "--json", "-"]).stdin(trace).output().expect("gputrace can be run");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let named = run(&["summary", "--json", &golden("kept-losses.gtr").display().to_string()]);
    let peak = |output: &Output| {
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        json["processes"][0]["devices"].to_string()
    };
    assert_eq!(peak(&output), peak(&named));
    let trace = fs::File::open(golden("kept-losses.gtr")).expect("a golden trace");
    let mut command = Command::new(env!("CARGO_BIN_EXE_gputrace"));
    let output = command.args(["report", "-"]).stdin(trace).output().expect("gputrace can be run");
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(shown.starts_with("- (pid 2403)") && shown.contains("gputrace leaks -\n"), "{shown}");
}

#[test]
fn an_export_has_its_name_when_it_is_complete() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("whole");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("a folder");
    let (trace, out) = (golden("kept-losses.gtr").display().to_string(), folder.join("a.csv"));
    let export =
        |out: &Path| status(&["export", "-f", "csv", "-F", "-o", &out.display().to_string(), &trace]);
    assert_eq!(export(&out).0, Some(0));
    let first = fs::read(&out).expect("written");
    assert_eq!(export(&out).0, Some(0));
    assert_eq!(fs::read(&out).expect("written again"), first);
    let names = fs::read_dir(&folder).expect("a folder").map(|entry| entry.expect("an entry").file_name());
    assert_eq!(names.collect::<Vec<_>>(), ["a.csv"], "nothing else is left");
    assert_eq!(export(Path::new("/dev/null")).0, Some(2), "a device is left as it is");
    assert_eq!(export(&folder.join("no/such/folder.csv")).0, Some(2));
}

#[test]
fn tune_says_what_was_recorded_whatever_limit_is_asked_about() {
    for example in ["caught-oom.gtr", "kept-losses.gtr", "varying-lengths.gtr"] {
        let trace = golden(example).display().to_string();
        let json = |arguments: &[&str]| -> serde_json::Value {
            serde_json::from_slice(&run(&[arguments, &[&trace]].concat()).stdout).expect("JSON")
        };
        let truth =
            &json(&["summary", "--json"])["processes"][0]["devices"][0]["torch"]["peak_reserved_bytes"];
        assert!(truth.is_u64(), "{example}: {truth}");
        for limit in [&["tune", "--json"][..], &["tune", "--json", "--limit", "700MB"]] {
            assert_eq!(&json(limit)["recorded_peak_reserved_bytes"], truth, "{example}: {limit:?}");
        }
    }
}
