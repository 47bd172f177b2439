//! Exit statuses, and what is said of a file that is damaged or is not a trace.

use expect_test::expect;

use crate::support::{Folder, run, text, trace};

#[test]
fn exit_statuses() {
    let folder = Folder::new("exit_statuses");
    let good = folder.write("good.gtr", &trace(10));
    let bad = folder.write("bad.gtr", b"not a trace at all");
    let code = |arguments: &[&str]| run(arguments).status.code();
    assert_eq!(code(&["report", &good]), Some(0));
    assert_eq!(code(&["report", &bad]), Some(2));
    assert_eq!(code(&["report", "/no/such/file.gtr"]), Some(2));
    assert_eq!(code(&["report", &good, &bad]), Some(2), "what can be read is shown, and the failure told");
    assert_eq!(code(&["report"]), Some(2));
    assert_eq!(code(&["no-such-verb"]), Some(2));
    assert_eq!(code(&["report", "--no-such-option", &good]), Some(2));
}

#[test]
fn what_is_no_trace_is_named_with_a_remedy() {
    let folder = Folder::new("no_trace");
    let bad = folder.write("bad.gtr", b"hello world");
    let output = run(&["summary", &bad]);
    let error = text(&output.stderr).replace(&bad, "bad.gtr");
    expect![[r#"
        gputrace: bad.gtr is not a gputrace trace: it begins with "hello wo"; `gputrace record` makes traces
    "#]]
    .assert_eq(&error);
    assert!(output.stdout.is_empty());
}

#[test]
fn every_verb_reads_every_prefix_and_every_flipped_byte() {
    let folder = Folder::new("prefixes");
    let whole = trace(100);
    let step = whole.len() / 12;
    let prefixes = (0..=12).map(|n| whole[..(n * step).min(whole.len())].to_vec());
    let flipped = (0..12).map(|n| {
        let mut bytes = whole.clone();
        bytes[9 + n * (whole.len() - 10) / 12] ^= 0x55;
        bytes
    });
    for (idx, bytes) in prefixes.chain(flipped).enumerate() {
        let path = folder.write("damaged.gtr", &bytes);
        for verb in ["report", "summary", "stats", "doctor", "leaks", "oom", "tree"] {
            let output = run(&[verb, &path, "--json"]);
            let code = output.status.code();
            assert!(matches!(code, Some(0 | 2)), "{verb} of case {idx}: {code:?}: {}", text(&output.stderr));
            assert!(!text(&output.stderr).contains("panicked"), "{verb} of case {idx}");
            if code == Some(0) {
                serde_json::from_slice::<serde_json::Value>(&output.stdout).expect("JSON");
            }
        }
    }
}

#[test]
fn a_trace_that_was_cut_says_so_beside_its_numbers() {
    let folder = Folder::new("cut");
    let whole = trace(100);
    let path = folder.write("cut.gtr", &whole[..whole.len() - 30]);
    let shown = text(&run(&["report", &path]).stdout);
    let memory = shown.split("\n\n").find(|part| part.starts_with("Memory\n")).expect("a section");
    assert!(memory.contains("the trace has no end"), "{memory}");
    let json: serde_json::Value =
        serde_json::from_slice(&run(&["summary", "--json", &path]).stdout).expect("JSON");
    assert_eq!(json["processes"][0]["complete"], false);
}
