//! Commands of `gputrace record --alert`, whatever they do: one that fails, that does not exist, that does not end, that says very much;
//! of a program that starts others; as often as it is said in docs/LIVE.md.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use gputrace_tests::patience::{LONG, is_hang};
use gputrace_tests::recorded::{self, Folder};

/// Holds memory as its arguments say: `take MIB`, `give`, `until FILE N` (the file has as many lines), `child` (another takes 300 MiB, and
/// waits for one line more of the file), and `anew FILE N`: gives and takes until the file has as many lines.
const PROGRAM: &str = r#"
import ctypes, os, sys, time
driver, held = ctypes.CDLL("libcuda.so.1"), []
context = ctypes.c_void_p()
assert driver.cuInit(0) == 0 and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 and driver.cuCtxSetCurrent(context) == 0
lines = lambda name: open(name).read().count("\n") if os.path.exists(name) else 0
words = iter(sys.argv[1:])
for word in words:
    if word == "take":
        held.append(ctypes.c_uint64())
        assert driver.cuMemAlloc_v2(ctypes.byref(held[-1]), ctypes.c_size_t(int(next(words)) << 20)) == 0
    elif word == "give":
        assert driver.cuMemFree_v2(held.pop()) == 0
    elif word == "until":
        name, n = next(words), int(next(words))
        while lines(name) < n: time.sleep(0.02)
    elif word == "child":
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "program.py", "take", "300", "until", "alerts", "2"])
        os.wait()
    elif word == "anew":
        name, n = next(words), int(next(words))
        while lines(name) < n:
            assert driver.cuMemFree_v2(held.pop()) == 0
            time.sleep(1)
            held.append(ctypes.c_uint64())
            assert driver.cuMemAlloc_v2(ctypes.byref(held[-1]), ctypes.c_size_t(200 << 20)) == 0
            time.sleep(1)
"#;

struct Ran {
    folder: Folder,
    said: String,
}

impl Ran {
    fn lines(&self) -> Vec<String> {
        let written = std::fs::read_to_string(self.folder.path().join("alerts")).unwrap_or_default();
        written.lines().map(str::to_owned).collect()
    }
}

/// Records the program with these alerts, on a device of 1 GiB. Where it waits for a file `said`, that is there when something was said.
fn record(name: &str, alerts: &[&str], command: &str, words: &str) -> Ran {
    let folder = Folder::new(&std::env::temp_dir(), &format!("gputrace-alerts-{name}"));
    std::fs::write(folder.path().join("program.py"), PROGRAM).expect("a program");
    let mut record = Command::new(recorded::built().join("gputrace"));
    record.args(["record", "-q", "-o", "%p.gtr"]).current_dir(folder.path());
    record.args(alerts.iter().flat_map(|alert| ["--alert", alert]));
    if !command.is_empty() {
        record.args(["--on-alert", command]);
    }
    record.args(["--", "python3", "program.py"]).args(words.split_whitespace());
    record.env("LD_LIBRARY_PATH", fake_cuda::library_dir()).env("FAKE_CUDA_MEMORY", "1GiB");
    record.env("FAKE_CUDA_STATE", folder.path().join("state"));
    let mut running = record.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("gputrace runs");
    let mut said = String::new();
    for line in BufReader::new(running.stderr.take().expect("a pipe")).lines() {
        said += &format!("{}\n", line.expect("UTF-8"));
        std::fs::write(folder.path().join("said"), "\n").expect("a file");
    }
    assert!(running.wait().expect("it ends").success(), "{said}");
    Ran { folder, said }
}

fn is_there(pid: &str) -> bool {
    let status = std::fs::read_to_string(Path::new("/proc").join(pid).join("stat")).unwrap_or_default();
    !status.is_empty() && !status.contains(") Z ")
}

const WRITE: &str = r#"echo "$ALERT $ALERT_VALUE $ALERT_DEVICE" >> alerts"#;

#[test]
fn bytes_and_shares_are_of_the_process_and_of_the_device() {
    let alerts = ["held>200MiB", "held>45%", "used>90%"];
    let ran = record("shares", &alerts, WRITE, "take 100 take 200 until alerts 1 take 200 until alerts 2");
    assert_eq!(ran.lines(), ["held>200MiB 300.00 MiB 0", "held>45% 48.8 % 0"], "{}", ran.said);
}

#[test]
fn once_for_each_time_that_it_comes_true() {
    let ran = record("again", &["held>100MiB"], WRITE, "take 200 until alerts 1 anew alerts 2");
    let lines = ran.lines();
    assert!(
        lines.len() >= 2 && lines.iter().all(|line| line == "held>100MiB 200.00 MiB 0"),
        "{lines:?} {}",
        ran.said
    );
}

#[test]
fn a_program_that_another_starts_is_watched_too() {
    let command = r#"echo "$ALERT_VALUE $ALERT_PID $ALERT_TRACE" >> alerts"#;
    let ran = record("child", &["held>100MiB"], command, "take 200 until alerts 1 child");
    let lines = ran.lines();
    let words: Vec<Vec<&str>> = lines.iter().map(|line| line.split(' ').collect()).collect();
    assert_eq!(words.len(), 2, "{lines:?} {}", ran.said);
    assert_eq!((words[0][0], words[1][0]), ("200.00", "300.00"));
    for words in words {
        assert!(words[3].ends_with(&format!("/{}.gtr", words[2])), "{words:?}");
    }
}

#[test]
fn a_command_that_fails_is_said_with_its_own_words() {
    let fails = |name, command: &str| {
        let ran = record(name, &["held>100MiB"], command, "take 200 until said 1");
        ran.said.lines().find(|line| line.contains("held>100MiB")).map(str::to_owned).unwrap_or(ran.said)
    };
    let said = fails("fails", "echo >> alerts; exit 3");
    assert_eq!(said, "gputrace: alert held>100MiB: its command failed (exit status: 3)");
    let said = fails("missing", "echo >> alerts; gputrace-has-no-such-command \"$ALERT\"");
    assert!(said.contains("failed (exit status: 127)") && said.contains("no-such-command"), "{said}");
    let said = fails("killed", "echo >> alerts; kill -9 $$");
    assert!(said.contains("failed (signal: 9"), "{said}");
    // Not a byte of it comes to the terminal as it is, and not all of it.
    let said =
        fails("flood", r"echo >> alerts; printf '\033[31m' >&2; yes 'very much' | head -c 3000000 >&2");
    assert!(said.contains("its command printed: ") && said.contains("very much; very much"), "{said}");
    assert!(said.len() < 2000 && !said.contains('\u{1b}'), "{}", said.len());
}

#[test]
fn a_command_that_does_not_end_keeps_nobody_waiting() {
    // Who reads what the job writes reads its end, and the command runs on.
    let ran =
        record("hangs", &["held>100MiB"], "echo $$ >> alerts; exec sleep 1000", "take 200 until alerts 1");
    let lines = ran.lines();
    assert_eq!(lines.len(), 1, "{}", ran.said);
    assert!(is_there(&lines[0]), "its command was ended: {}", ran.said);
    assert!(Command::new("kill").arg(&lines[0]).status().is_ok_and(|status| status.success()));
    let since = Instant::now();
    while is_there(&lines[0]) {
        assert!(!is_hang(since, LONG), "who waits for commands is gone: it stays as a zombie");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn commands_that_do_not_end_are_not_started_for_ever() {
    let alerts: Vec<String> = (100..120).map(|mib| format!("held>{mib}MiB")).collect();
    let alerts: Vec<&str> = alerts.iter().map(String::as_str).collect();
    let ran = record("many", &alerts, "echo $$ >> alerts; exec sleep 1000", "take 200 until alerts 16");
    let lines = ran.lines();
    for pid in &lines {
        assert!(Command::new("kill").arg(pid).status().is_ok_and(|status| status.success()));
    }
    assert_eq!(lines.len(), 16, "{}", ran.said);
    let said: Vec<&str> = ran.said.lines().filter(|line| line.contains("still running")).collect();
    assert_eq!(said.len(), 1, "{}", ran.said);
    assert!(said[0].contains("held>116MiB: 200.00 MiB on cuda:0"), "{said:?}");
}

#[test]
fn without_a_command_or_without_a_figure_it_is_said() {
    let ran = record("said", &["held>100MiB", "allocated>1GiB"], "", "take 200 until said 1");
    assert!(ran.said.contains("gputrace: alert held>100MiB: 200.00 MiB on cuda:0, process "), "{}", ran.said);
    assert!(ran.said.contains("allocated>1GiB: could not be evaluated"), "{}", ran.said);
}
