//! The page of `gputrace html`: what is committed of it is what its sources give, its own tests pass, and a browser shows the numbers
//! that programs get. Without npm or a browser that is skipped, and said.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gputrace_skip::skip;
use gputrace_tests::recorded;

/// What a script exits with that has nothing to try it with.
const SKIPPED: i32 = 77;
/// A leak, two devices, an error, the oldest trace, and a job of two: `make browser` takes all of them.
const SHOWN: [&str; 4] = ["kept-losses.gtr", "dataparallel.gtr", "version1.gtr", "caught-oom.gtr"];
/// PyTorch's own snapshots: one with private pools, and one that reserved much and used little.
const SNAPSHOTS: [&str; 2] = ["graph_train.default.pickle.gz", "gpt_grow.default.pickle.gz"];

#[test]
fn the_page_is_what_its_sources_give_and_shows_in_a_browser_what_programs_get() {
    let page = root().join("page");
    if let Err(why) = installed(&page) {
        return skip("the page's sources", why);
    }
    for script in [&["run", "check"][..], &["test"], &["run", "build", "--", "--check"]] {
        let told = Command::new("npm").args(script).current_dir(&page).output().expect("npm is there");
        assert!(told.status.success(), "npm {script:?}: {}", words(&told));
    }
    let golden = root().join("tests/golden");
    let traces = SHOWN.map(|name| golden.join(name).into_os_string().into_string().expect("UTF-8"));
    let mut snapshots = SNAPSHOTS.map(|name| root().join("tests/groundtruth").join(name)).to_vec();
    // With pinned memory of the host.
    snapshots.push(golden.join("snapshots/pinned-2.15.pickle.gz"));
    let job = format!("{},{}", traces[0], traces[3]);
    let gputrace = recorded::built().join("gputrace");
    let mut browser = Command::new("node");
    browser
        .arg(page.join("test/browser.mjs"))
        .arg("--gputrace")
        .arg(gputrace)
        .args(traces)
        .args(snapshots)
        .arg(job);
    holds("the page in a browser", &mut browser);
    let mut pictures = Command::new("node");
    pictures.arg(page.join("test/pictures.mjs")).arg("--gputrace").arg(recorded::built().join("gputrace"));
    holds("pictures of the page", &mut pictures);
}

fn holds(what: &str, script: &mut Command) {
    let told = script.output().expect("node is there");
    match told.status.code() {
        Some(0) => {}
        Some(SKIPPED) => skip(what, words(&told)),
        _ => panic!("{}", words(&told)),
    }
}

/// Fetches what the lock file names, once.
fn installed(page: &Path) -> Result<(), String> {
    let lock = |path: &str| page.join(path).metadata().and_then(|it| it.modified()).ok();
    if lock("node_modules/.package-lock.json") >= lock("package-lock.json") {
        return Ok(());
    }
    let quiet = ["ci", "--no-fund", "--no-audit", "--ignore-scripts"];
    let told = Command::new("npm").args(quiet).current_dir(page).output();
    let told = told.map_err(|error| format!("npm cannot be started: {error}"))?;
    if told.status.success() {
        Ok(())
    } else {
        Err(format!("npm cannot fetch what it needs: {}", words(&told)))
    }
}

fn words(told: &Output) -> String {
    [&told.stdout, &told.stderr].map(|text| String::from_utf8_lossy(text).trim().to_owned()).join("\n")
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}
