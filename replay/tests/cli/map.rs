//! `gputrace map` on this host; tests/executors has the other engines.

use std::fs;

use crate::support::{Folder, run, text, trace};

fn names(folder: &std::path::Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").file_name());
    let mut names: Vec<String> = entries.map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_verb_is_run_over_traces_and_options_and_what_it_says_is_as_it_says_it_alone() {
    let folder = Folder::new("map");
    let traces = folder.0.join("job");
    fs::create_dir(&traces).unwrap();
    let paths: Vec<String> = (3..5).map(|n| folder.write(&format!("job/rank{n}.gtr"), &trace(n))).collect();
    let (out, job) = (folder.0.join("out"), traces.display().to_string());
    let out_named = out.display().to_string();
    let with = ["--with", "--peak", "--with", "--at '2us'"];
    let ran = run(&[&["map", "-o", &out_named][..], &with, &["tree", "--json", "--", &job]].concat());
    assert_eq!(ran.status.code(), Some(0), "{}", text(&ran.stderr));
    assert!(text(&ran.stdout).contains("4 tasks: 4 with status 0"), "{}", text(&ran.stdout));
    let files =
        ["map.json", "rank3.0.tree.json", "rank3.1.tree.json", "rank4.0.tree.json", "rank4.1.tree.json"];
    assert_eq!(names(&out), files, "and nothing that was only on the way");
    for (path, rank) in paths.iter().zip(["rank3", "rank4"]) {
        let alone = run(&["tree", "--json", "--at", "2us", path]).stdout;
        assert_eq!(fs::read(out.join(format!("{rank}.1.tree.json"))).unwrap(), alone, "{rank}");
    }
    let listed: serde_json::Value = serde_json::from_slice(&fs::read(out.join("map.json")).unwrap()).unwrap();
    let of_tasks: Vec<_> =
        listed["tasks"].as_array().unwrap().iter().map(|task| task["files"][0].as_str()).collect();
    assert_eq!(of_tasks, files[1..].iter().map(|file| Some(*file)).collect::<Vec<_>>());
}

#[test]
fn the_status_is_the_worst_of_all_tasks_and_what_could_not_be_read_is_said() {
    let folder = Folder::new("map-status");
    let good = folder.write("good.gtr", &trace(3));
    let other = folder.write("other.gtr", b"no trace at all");
    let out = folder.0.join("out").display().to_string();
    let ran = run(&["map", "-o", &out, "--jobs", "1", "summary", "--", &good, &other]);
    assert_eq!(ran.status.code(), Some(2));
    assert!(text(&ran.stdout).contains("2 tasks: 1 with status 0, 1 with status 2"), "{}", text(&ran.stdout));
    assert!(text(&ran.stderr).contains("other.summary.txt: "), "{}", text(&ran.stderr));
}

#[test]
fn summaries_lie_under_their_own_names_and_are_joined() {
    let folder = Folder::new("map-reduce");
    let path = folder.write("a.gtr", &trace(5));
    let (out, alone) = (folder.0.join("out"), folder.0.join("alone"));
    assert_eq!(run(&["map", "-o", &out.display().to_string(), "reduce", "--", &path]).status.code(), Some(0));
    assert_eq!(run(&["reduce", "-o", &alone.display().to_string(), &path]).status.code(), Some(0));
    let [summary] = &names(&alone)[..] else { panic!("{:?}", names(&alone)) };
    assert_eq!(names(&out), [summary.clone(), "map.json".into()]);
    assert_eq!(fs::read(out.join(summary)).unwrap(), fs::read(alone.join(summary)).unwrap());
    let joined = |folder: &std::path::Path| run(&["ranks", &folder.display().to_string()]).stdout;
    assert_eq!(joined(&out), joined(&alone));
}

#[test]
fn what_cannot_be_mapped_is_refused_with_the_remedy() {
    let folder = Folder::new("map-refused");
    let (path, out) = (folder.write("a.gtr", &trace(3)), folder.0.join("out").display().to_string());
    for (arguments, said) in [
        (vec!["summary", &path], "no traces"),
        (vec!["sumary", "--", &path], "`sumary` cannot be mapped"),
        (vec!["map", "--", &path], "`map` cannot be mapped"),
        (vec!["summary", "--", "-"], "standard input"),
        (vec!["summary", "--", "elsewhere:/a.gtr"], "--executor ray, dask or slurm"),
    ] {
        let ran = run(&[&["map", "-o", &out][..], &arguments].concat());
        assert_eq!(ran.status.code(), Some(2), "{arguments:?}");
        assert!(text(&ran.stderr).contains(said), "{arguments:?}: {}", text(&ran.stderr));
    }
    let python =
        ["map", "--executor", "ray", "--python", "/nowhere/python", "-o", &out, "summary", "--", &path];
    assert!(text(&run(&python).stderr).contains("cannot run /nowhere/python: --python names another"));
}
