//! What `reduce` writes, in place of traces.

use std::fs;
use std::path::Path;

use crate::support::{Folder, golden, run, text};

/// Verbs whose answer a summary has, and as which JSON.
const ANSWERED: [&[&str]; 10] = [
    &["report"],
    &["report", "--all"],
    &["report", "--json"],
    &["summary"],
    &["summary", "--json"],
    &["stats"],
    &["stats", "--json"],
    &["leaks"],
    &["leaks", "--json"],
    &["ranks", "--json"],
];

fn files_of(folder: &Path) -> Vec<String> {
    let mut files: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path().display().to_string()).collect();
    files.sort();
    files
}

fn words(files: &[String]) -> Vec<&str> {
    files.iter().map(String::as_str).collect()
}

#[test]
fn verbs_say_of_summaries_what_they_say_of_the_traces() {
    let folder = Folder::new("summaries");
    let traces = ["caught-oom", "dataparallel", "kept-losses"].map(|name| golden(&format!("{name}.gtr")));
    let mut summaries = vec![];
    for (number, path) in traces.iter().enumerate() {
        let out = folder.0.join(number.to_string());
        let ran = run(&["reduce", "-o", &format!("{}/", out.display()), path]);
        assert_eq!(ran.status.code(), Some(0), "{}", text(&ran.stderr));
        summaries.extend(files_of(&out));
    }
    assert_eq!(summaries.len(), traces.len());
    for verb in ANSWERED {
        for some in [0..1, 1..2, 0..3] {
            let of_traces = run(&[verb, &words(&traces[some.clone()])].concat());
            let of_summaries = run(&[verb, &words(&summaries[some.clone()])].concat());
            assert!(!of_traces.stdout.is_empty(), "{verb:?}: {}", text(&of_traces.stderr));
            // Commands to go on with name the files that were asked about.
            let names = summaries.iter().zip(&traces);
            let said =
                names.fold(text(&of_summaries.stdout), |said, (summary, it)| said.replace(summary, it));
            let wanted = text(&of_traces.stdout);
            let differs = said.lines().zip(wanted.lines()).find(|(a, b)| a != b);
            assert!(said == wanted, "{verb:?} of {some:?}: {differs:?}");
            assert_eq!(of_summaries.status.code(), of_traces.status.code(), "{verb:?} of {some:?}");
        }
    }
}

#[test]
fn what_needs_the_trace_says_so_and_names_it() {
    let folder = Folder::new("summaries-refused");
    let trace = golden("kept-losses.gtr");
    let out = folder.0.join("out");
    run(&["reduce", "-o", &format!("{}/", out.display()), &trace]);
    let [summary] = &files_of(&out)[..] else { panic!("{:?}", files_of(&out)) };
    let (two, four) = (format!("batch=2:{summary}"), format!("batch=4:{summary}"));
    for arguments in [
        vec!["replay", summary],
        vec!["tune", summary],
        vec!["oom", summary],
        vec!["html", summary],
        vec!["doctor", summary],
        vec!["summary", "--peak", summary],
        vec!["report", "--at", "1s", summary],
        vec!["predict", &two, &four, "--at", "batch=8"],
    ] {
        let ran = run(&arguments);
        let said = text(&ran.stderr);
        assert_eq!(ran.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains("is a summary: ") && said.contains("kept-losses.gtr"), "{arguments:?}: {said}");
    }
}

/// A summary that is written, sent, mapped over or a program's own argument is not read in place of a trace.
#[test]
fn a_summary_is_refused_only_where_it_is_read() {
    let folder = Folder::new("summaries-named");
    let trace = golden("caught-oom.gtr");
    let summary = folder.0.join("a.summary.parquet").display().to_string();
    let out = folder.0.join("out").display().to_string();
    let reduce = ["reduce", "-o", &summary, &trace];
    let allowed: [&[&str]; 4] = [
        &reduce,
        &reduce,
        &["map", "-o", &out, "report", "--", &summary],
        &["export", "-f", "csv", "-F", "-o", &summary, &trace],
    ];
    for arguments in allowed {
        let ran = run(arguments);
        assert_eq!(ran.status.code(), Some(0), "{arguments:?}: {}", text(&ran.stderr));
    }
    assert_eq!(run(&reduce).status.code(), Some(0));
    // No store is at this port.
    let sent = run(&["upload", "-o", "http://127.0.0.1:9/", &summary]);
    assert!(!text(&sent.stderr).contains("needs the trace"), "{}", text(&sent.stderr));
    for arguments in [["oom", &summary], ["tree", &summary], ["html", &summary], ["tune", &summary]] {
        let ran = run(&arguments);
        assert_eq!(ran.status.code(), Some(2), "{arguments:?}");
        let said = text(&ran.stderr);
        assert!(said.contains(&format!("is a summary: {} needs the trace", arguments[0])), "{said}");
    }
}
