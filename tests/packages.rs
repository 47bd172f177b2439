//! The packages for users: the same bytes for the same files, whoever makes them and where, and what a container's volume gets of them.

use std::path::{Path, PathBuf};
use std::process::Command;

use gputrace_tests::recorded::{self, Folder};

/// `packaging/pack.py WHAT` by somebody: with another clock, mask, language and folder.
fn packed(what: &str, folder: &Path, zone: &str, mask: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let built = recorded::built();
    let out = folder.join("out");
    let script = format!(
        "umask {mask}; cp {built}/gputrace {built}/libgputrace.so {folder}/ && exec python3 {root}/packaging/pack.py {what} --any-glibc \
         --program {folder}/gputrace --library {folder}/libgputrace.so --out {out}",
        built = built.display(),
        folder = folder.display(),
        root = root.display(),
        out = out.display(),
    );
    std::fs::create_dir_all(folder).expect("a folder can be made");
    let made = Command::new("sh").args(["-c", &script]).env("TZ", zone).env("LC_ALL", "C").output();
    let made = made.expect("a shell can be run");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let files = std::fs::read_dir(&out).expect("it is there").flatten().map(|entry| entry.path());
    let mut packages = files.filter(|path| path.is_file());
    packages.next().expect("one package was made")
}

#[test]
fn a_package_made_twice_has_the_same_bytes() {
    let folder = Folder::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "packages-twice");
    for what in ["wheel", "tarball"] {
        let one = packed(what, &folder.path().join(format!("{what}-one")), "UTC", "022");
        let other = packed(what, &folder.path().join(format!("{what}-other")), "Asia/Tokyo", "077");
        assert_eq!(one.file_name(), other.file_name());
        let (one, other) = [one, other].map(|path| std::fs::read(path).expect("it can be read")).into();
        assert!(one == other, "{what}: {} and {} bytes, not the same ones", one.len(), other.len());
    }
}

/// What `packaging/Containerfile` puts into an image, and its command copies to a volume: a program of another image is recorded
/// with nothing but that volume and one variable.
#[test]
fn a_volume_that_the_sidecar_filled_is_all_that_a_container_needs() {
    let folder = Folder::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "packages-sidecar");
    let tarball = packed("tarball", &folder.path().join("made"), "UTC", "022");
    let (image, volume) = (folder.path().join("opt/gputrace"), folder.path().join("volume"));
    for path in [&image, &volume] {
        std::fs::create_dir_all(path).expect("a folder can be made");
    }
    let steps =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/Containerfile"));
    let steps = steps.expect("the recipe is there");
    assert!(steps.contains("--strip-components=1") && steps.contains("cp -R /opt/gputrace/. /gputrace/"));
    let run = |program: &str, arguments: &[&Path]| {
        let status = Command::new(program).args(arguments).status().expect("it can be run");
        assert!(status.success(), "{program}");
    };
    run("tar", &[Path::new("-xzf"), &tarball, Path::new("--strip-components=1"), Path::new("-C"), &image]);
    run("cp", &[Path::new("-R"), &image.join("."), &volume]);
    let trace = folder.path().join("demo.gtr");
    let demo = Command::new(recorded::built().join("fake-cuda"))
        .arg("demo")
        .env("LD_PRELOAD", volume.join("lib/libgputrace.so"))
        .env("GPUTRACE_OUTPUT", &trace)
        .env("LD_LIBRARY_PATH", fake_cuda::library_dir())
        .env_remove("GPUTRACE_RECORDER")
        .output()
        .expect("the demo can be run");
    assert!(demo.status.success(), "{}", String::from_utf8_lossy(&demo.stderr));
    let report = Command::new(volume.join("bin/gputrace")).arg("report").arg(&trace).output();
    let report = report.expect("gputrace can be run");
    assert!(String::from_utf8_lossy(&report.stdout).contains("Memory by owner"), "{report:?}");
}

/// What `make release` does before it builds.
fn release(arguments: &[&str]) -> (bool, String) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let ended =
        Command::new("python3").arg("packaging/release.py").args(arguments).current_dir(root).output();
    let ended = ended.expect("Python can be run");
    (ended.status.success(), String::from_utf8_lossy(&ended.stderr).into_owned())
}

#[test]
fn a_release_with_an_old_or_odd_version_is_refused_before_anything_is_built() {
    for (version, why) in [
        ("0.1.0", "0.1.0 is not greater than 0.1.0, which Cargo.toml has"),
        ("0.0.9", "0.0.9 is not greater than"),
        ("1.0", "a version is three numbers"),
        ("v1.0.0", "a version is three numbers"),
        ("", "a version is three numbers"),
    ] {
        let (succeeded, said) = release(&[version]);
        assert!(!succeeded && said.contains(why), "{version:?}: {said}");
    }
}

/// In a clone: each place has the new version, the locks fit, and nothing else changes.
#[test]
fn a_release_sets_its_version_everywhere() {
    let folder = Folder::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "packages-release");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let clone = folder.path().join("clone");
    let script =
        "import sys, release; release.set_version(sys.argv[1], release.current(), '9.8.7', '2031-02-03')";
    let steps: [(&str, &[&str]); 2] = [
        ("git", &["clone", "--quiet", "--shared", root.to_str().unwrap(), clone.to_str().unwrap()]),
        ("python3", &["-B", "-c", script, clone.to_str().unwrap()]),
    ];
    for (program, arguments) in steps {
        let ended = Command::new(program).args(arguments).env("PYTHONPATH", root.join("packaging")).output();
        let ended = ended.expect("it can be run");
        assert!(ended.status.success(), "{program}: {}", String::from_utf8_lossy(&ended.stderr));
    }
    let changed =
        Command::new("git").args(["diff", "--numstat"]).current_dir(&clone).output().expect("git can be run");
    let changed = String::from_utf8_lossy(&changed.stdout).into_owned();
    let mut files: Vec<&str> = changed.lines().filter_map(|line| line.split('\t').nth(2)).collect();
    files.sort_unstable();
    let places = [
        "CHANGELOG.md",
        "Cargo.lock",
        "Cargo.toml",
        "docs/INSTALL.md",
        "fuzz/Cargo.lock",
        "python/src/gputrace/__init__.py",
    ];
    assert_eq!(files, places, "{changed}");
    let read = |file: &str| std::fs::read_to_string(clone.join(file)).expect("it can be read");
    assert!(read("Cargo.toml").contains("\nversion = \"9.8.7\"\n"));
    assert!(read("CHANGELOG.md").contains("## Unreleased\n\n## 9.8.7 - 2031-02-03\n"));
    // 2031-02-03T00:00:00Z
    let mut epoch = Command::new("python3");
    epoch.args(["packaging/pack.py", "epoch"]).current_dir(&clone).env_remove("SOURCE_DATE_EPOCH");
    let epoch = epoch.output().expect("Python can be run").stdout;
    assert_eq!(String::from_utf8_lossy(&epoch), "1927843200\n");
}
