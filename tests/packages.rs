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
