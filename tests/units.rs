//! The systemd unit and the Kubernetes manifest in `packaging/` that keep `gputrace metrics` running on a node: checked by systemd
//! itself and by Kubernetes' schema, and their command lines by running them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use gputrace_tests::recorded::{self, Folder};

const FOLDER: &str = "/var/lib/gputrace";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).expect("a file of packaging/")
}

/// Runs a unit's command once, over the test's own folder, in place of for ever.
fn runs_once(words: &[&str], folder: &Folder) {
    assert!(words[0].ends_with("/gputrace") && words.contains(&FOLDER), "{words:?}");
    let words =
        words[1..].iter().map(|word| if *word == FOLDER { folder.path().to_str().unwrap() } else { word });
    let output = Command::new(recorded::built().join("gputrace")).args(words).arg("--once").output();
    let output = output.expect("gputrace runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.ends_with("# EOF\n"), "{text}{output:?}");
}

#[test]
fn systemd_accepts_the_unit() {
    let folder = Folder::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "unit");
    let unit = read("packaging/systemd/gputrace-metrics.service");
    let command = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).expect("a command");
    runs_once(&command.split(' ').collect::<Vec<_>>(), &folder);
    // The program need not be installed here.
    let program = recorded::built().join("gputrace").canonicalize().expect("built");
    let here = unit.replace("/usr/local/bin/gputrace", &program.display().to_string());
    let file = folder.path().join("gputrace-metrics.service");
    fs::write(&file, here).expect("a copy");
    match Command::new("systemd-analyze").arg("verify").arg(&file).output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            gputrace_skip::skip("systemd's check of its unit", "systemd-analyze is not installed");
        }
        output => {
            let output = output.expect("it runs");
            let said = String::from_utf8_lossy(&output.stderr);
            let ours: Vec<&str> = said.lines().filter(|line| line.contains("gputrace")).collect();
            assert!(output.status.success() && ours.is_empty(), "{said}");
        }
    }
}

const VALIDATE: &str = "
import json, kubernetes_validate, sys, yaml
for manifest in yaml.safe_load_all(open(sys.argv[1])):
    kubernetes_validate.validate(manifest, '1.30', strict=True)
    pod = manifest['spec']['template']['spec']
    print(json.dumps([container['command'] for container in pod['containers']]))
";

#[test]
fn kubernetes_schema_accepts_the_manifest() {
    let folder = Folder::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "manifest");
    let python = root().join("target/python/bin/python");
    let has = Command::new(&python).args(["-c", "import kubernetes_validate, yaml"]).output();
    if !has.is_ok_and(|it| it.status.success()) {
        let why = "no kubernetes-validate in target/python (tests/setup.sh installs it)";
        return gputrace_skip::skip("Kubernetes' schema of its manifest", why);
    }
    let manifest = root().join("packaging/kubernetes/gputrace-metrics.yaml");
    let output = Command::new(python).args(["-c", VALIDATE]).arg(manifest).output().expect("python runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let commands: Vec<Vec<String>> = serde_json::from_slice(&output.stdout).expect("JSON");
    for command in commands {
        runs_once(&command.iter().map(String::as_str).collect::<Vec<_>>(), &folder);
    }
}
