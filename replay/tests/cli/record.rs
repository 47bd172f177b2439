//! `record` and `doctor`: what they hand on to the program, and what they say of one that cannot be recorded.

use std::fs;

use expect_test::expect;

use crate::support::{Folder, gputrace, libc, text, trace};

#[test]
fn record_becomes_the_program() {
    let library = libc();
    let status = |script: &str| {
        let mut command = gputrace();
        command.env("GPUTRACE_LIBRARY", &library).args(["record", "--", "sh", "-c", script]);
        command.output().unwrap()
    };
    assert_eq!(status("exit 7").status.code(), Some(7));
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(status("kill -9 $$").status.signal(), Some(9));
    let output = status("echo $0; echo $LD_PRELOAD; echo ${GPUTRACE_OUTPUT-unset}");
    assert_eq!(text(&output.stdout), format!("sh\n{}\nunset\n", library.display()));
}

#[test]
fn an_amount_of_memory_is_read_alike_everywhere() {
    let ring = |text: &str| {
        let mut command = gputrace();
        command.env("GPUTRACE_LIBRARY", libc()).args(["record", "--ring-size", text, "--"]);
        let output = command.args(["sh", "-c", "echo $GPUTRACE_RING_BYTES"]).output().unwrap();
        self::text(&output.stdout).trim().to_owned()
    };
    let read = ["4096", "64m", "1.5G", "1GiB", "2GB"].map(ring);
    assert_eq!(read, ["4096", "67108864", "1610612736", "1073741824", "2147483648"]);
}

#[test]
fn record_hands_its_options_on() {
    let mut command = gputrace();
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("GPUTRACE_")) {
        command.env_remove(name); // what this test run itself was told
    }
    command.env("GPUTRACE_LIBRARY", libc()).env("LD_PRELOAD", libc());
    command.args(["record", "-o", "out/%p.gtr", "-f", "--stacks", "python", "--ring-size", "64M"]);
    command.args([
        "sh",
        "-c",
        "env | grep ^GPUTRACE_ | grep -v -e LIBRARY -e JOB_BEGAN | sort; echo $LD_PRELOAD",
    ]);
    let shown = text(&command.output().unwrap().stdout);
    let shown = shown
        .replace(env!("CARGO_BIN_EXE_gputrace"), "GPUTRACE")
        .replace(&*libc().to_string_lossy(), "LIBRARY");
    expect![[r#"
        GPUTRACE_FORCE=1
        GPUTRACE_OUTPUT=out/%p.gtr
        GPUTRACE_RECORDER=GPUTRACE
        GPUTRACE_RING_BYTES=67108864
        GPUTRACE_STACKS=python
        LIBRARY
    "#]]
    .assert_eq(&shown);
}

#[test]
fn record_says_what_cannot_be_run() {
    let folder = Folder::new("cannot_run");
    let plain = folder.write("plain", b"data");
    let mut static_elf = fs::read("/proc/self/exe").unwrap();
    // Without its PT_INTERP segment a program is static.
    let entry = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let (table, n) = (entry(&static_elf, 32), usize::from(static_elf[56]));
    for header in (0..n)
        .map(|idx| table + idx * 56)
        .filter(|at| static_elf[*at..].starts_with(&[3, 0, 0, 0]))
        .collect::<Vec<_>>()
    {
        static_elf[header] = 0;
    }
    let static_elf = folder.executable("static", &static_elf);
    let mut foreign = fs::read("/proc/self/exe").unwrap();
    foreign[18] = 0x15; // EM_PPC64
    let foreign = folder.executable("foreign", &foreign);
    let script = folder.executable("script", format!("#!{static_elf}\n").as_bytes());
    let mut all = String::new();
    for command in ["/no/such/program", "no-such-program-at-all", &plain, &static_elf, &foreign, &script] {
        let output =
            gputrace().env("GPUTRACE_LIBRARY", libc()).args(["record", "--", command]).output().unwrap();
        all += &format!("{}: {}", output.status.code().unwrap(), text(&output.stderr));
    }
    let output =
        gputrace().env("GPUTRACE_LIBRARY", "/no/library.so").args(["record", "--", "true"]).output().unwrap();
    all += &format!("{}: {}", output.status.code().unwrap(), text(&output.stderr));
    let all =
        all.replace(&*folder.0.to_string_lossy(), "FOLDER").replace(&*libc().to_string_lossy(), "LIBRARY");
    expect![[r#"
        127: gputrace: /no/such/program: no such command
        127: gputrace: no-such-program-at-all: no such command
        126: gputrace: FOLDER/plain is not executable: chmod +x it, or name its interpreter
        125: gputrace: FOLDER/static is statically linked, so nothing can be preloaded into it: link it dynamically
        125: gputrace: FOLDER/foreign is for a different processor than LIBRARY: use the matching build of gputrace
        125: gputrace: FOLDER/static is statically linked, so nothing can be preloaded into it: link it dynamically
        125: gputrace: GPUTRACE_LIBRARY names /no/library.so, which is not a file
    "#]].assert_eq(&all);
}

#[test]
fn doctor_looks_at_programs_and_traces() {
    let folder = Folder::new("doctor");
    let path = folder.write("a.gtr", &trace(3));
    let output = gputrace().args(["doctor", "--json", &path]).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["schema"], "gputrace.doctor/1");
    assert_eq!(json["processes"][0]["sections"][0]["name"], "trace");
    let output =
        gputrace().env("GPUTRACE_LIBRARY", libc()).args(["doctor", "sh", "/no/such"]).output().unwrap();
    let shown = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{shown}");
    assert!(shown.contains("ok: libgputrace.so will be loaded into it"), "{shown}");
    assert!(shown.contains("no such trace or program"), "{shown}");
    assert!(shown.contains("hooks no CUDA function"), "{shown}");
}
