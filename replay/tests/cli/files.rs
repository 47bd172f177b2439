//! What goes in and comes out: several traces, snapshots, exports, a terminal or a pipe.

use std::fs;

use crate::support::{Folder, gputrace, run, text, trace};

#[test]
fn several_traces_are_shown_in_order() {
    let folder = Folder::new("several");
    let paths: Vec<_> = (0..5).map(|n| folder.write(&format!("{n}.gtr"), &trace(n))).collect();
    let mut arguments = vec!["summary", "--json"];
    arguments.extend(paths.iter().map(String::as_str));
    let json: serde_json::Value = serde_json::from_slice(&run(&arguments).stdout).expect("JSON");
    let events: Vec<_> = json["processes"].as_array().unwrap().iter().map(|p| p["events"].as_u64()).collect();
    assert_eq!(events, (0..5).map(Some).collect::<Vec<_>>());
}

#[test]
fn colours_are_for_those_who_want_them() {
    let folder = Folder::new("colours");
    let path = folder.write("a.gtr", &trace(3));
    let has_color = |arguments: &[&str], variables: &[(&str, &str)]| {
        let mut command = gputrace();
        command.args(["report", &path]).args(arguments).envs(variables.iter().copied());
        command.output().unwrap().stdout.contains(&0x1b)
    };
    assert!(!has_color(&[], &[]), "a pipe");
    assert!(has_color(&["--color", "always"], &[("NO_COLOR", "1")]), "said so");
    assert!(has_color(&[], &[("CLICOLOR_FORCE", "1")]));
    assert!(!has_color(&[], &[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")]));
}

#[test]
fn exports_go_to_files_that_do_not_exist() {
    let folder = Folder::new("exports");
    let path = folder.write("a.gtr", &trace(30));
    let output = folder.0.join("a.folded").display().to_string();
    let export =
        |arguments: &[&str]| run(&[&["export", "-f", "folded", "-o", &output, &path], arguments].concat());
    assert_eq!(export(&[]).status.code(), Some(0));
    let again = export(&[]);
    assert_eq!(again.status.code(), Some(2));
    assert!(text(&again.stderr).contains("exists; -F overwrites it"), "{}", text(&again.stderr));
    assert_eq!(export(&["-F"]).status.code(), Some(0));
    let written = fs::read_to_string(&output).unwrap();
    assert_eq!(written, "cuda:0;unknown;(no stack recorded) 11534336\n");
    let shown = run(&["export", "-f", "folded", &path, "--at", "1us"]);
    assert_eq!(text(&shown.stdout), "cuda:0;unknown;(no stack recorded) 2097152\n");
}

#[test]
fn snapshots_are_read_wherever_traces_are() {
    let folder = Folder::new("snapshots");
    let path = folder.write("a.gtr", &trace(30));
    let pickle = folder.write("a.pickle", &run(&["export", "-f", "torch-pickle", &path]).stdout);
    for verb in ["report", "summary", "stats", "leaks", "oom", "tree"] {
        let output = run(&[verb, "--json", &pickle]);
        assert_eq!(output.status.code(), Some(0), "{verb}: {}", text(&output.stderr));
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(json["schema"], format!("gputrace.{verb}/1"));
    }
    let cut = fs::read(&pickle).unwrap();
    for length in [1, 3, 20, cut.len() / 2, cut.len() - 1] {
        let cut = folder.write("cut.pickle", &cut[..length]);
        let output = run(&["summary", &cut]);
        assert_eq!(output.status.code(), Some(2));
        assert!(!text(&output.stderr).contains("panicked"), "{}", text(&output.stderr));
    }
}

/// Named early: before the program runs, and before hours of work.
#[cfg(not(feature = "objects"))]
#[test]
fn a_build_without_object_storage_says_so_of_each_url() {
    let folder = Folder::new("no-stores");
    let trace = folder.write("a.gtr", &trace(9));
    let says = "this build has no object storage. Use the wheel or tarball of a release, or build with \
                `cargo build --release -p gputrace --features objects`";
    let url = "s3://bucket/job/";
    let ran = folder.0.join("ran");
    let touch = ["touch", ran.to_str().unwrap()];
    let cases: [(i32, &[&str]); 11] = [
        (2, &["report", "s3://bucket/a.gtr"]),
        (2, &["report", url]),
        (2, &["ranks", "gs://bucket/job/"]),
        (2, &["stats", "https://host/a.gtr"]),
        (2, &["upload", "-o", url, &trace]),
        (2, &["html", "-o", "az://container/a.html", &trace]),
        (2, &["export", "-f", "csv", "-F", "-o", "s3://bucket/a.csv", &trace]),
        (2, &["reduce", "-o", url, &trace]),
        (2, &["symbolise", "-F", "-o", "s3://bucket/b.gtr", &trace]),
        (2, &["map", "-o", url, "reduce", "--", &trace]),
        (125, &["record", "--upload", url, "--", touch[0], touch[1]]),
    ];
    for (status, arguments) in cases {
        let output = run(arguments);
        let error = text(&output.stderr);
        assert!(error.contains(says), "{arguments:?}: {error}");
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {error}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
    assert!(!ran.exists(), "record ran the program before it named the missing stores");
}

#[test]
fn a_format_or_a_verb_that_is_gone_names_what_took_its_place() {
    let folder = Folder::new("gone");
    let trace = folder.write("a.gtr", &trace(9));
    let cases: [(&[&str], &str); 3] = [
        (&["export", "-f", "sqlite", &trace], "format sqlite no longer exists: `--format parquet` has"),
        (&["export", "-f", "chrome", &trace], "format chrome no longer exists: `--format perfetto` has"),
        (&["import", "--json", &trace], "`gputrace import` no longer exists: `gputrace replay TRACE` shows"),
    ];
    for (arguments, says) in cases {
        let output = run(arguments);
        let error = text(&output.stderr);
        assert!(error.contains(says), "{arguments:?}: {error}");
        assert_eq!(error.lines().count(), 1, "{arguments:?}: {error}");
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    }
}
