//! Rings and logs that recordings left behind: `ps` and `doctor` list them, `recover` makes traces of them all, and a recorder that
//! finds `/dev/shm` short of room because of them reports that. Files of another user there, or in a folder of traces, are not opened,
//! listed as the reader's, removed or waited for. A process of another user does not count as a recorder.
//!
//! In a mount namespace, where `/dev/shm` and `/tmp` have nothing of anybody else's. Where that is forbidden the tests are skipped.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use gputrace_skip::skip;
use gputrace_tests::patience::is_hang;
use gputrace_tests::recorded::{self, Folder};
use serde_json::Value;

/// Runs a shell in a namespace of its own, with `$GPUTRACE`, `$HELD` (a program that holds memory, its recorder nowhere to be found) and
/// the folder as its own; what it wrote to standard output. `None` where no such namespace can be made.
fn alone(folder: &Folder, shm: &str, script: &str) -> Option<String> {
    let is_root = std::fs::metadata("/proc/self").is_ok_and(|data| data.uid() == 0);
    let mut words = vec!["unshare", "--mount"];
    if !is_root {
        words.extend(["--user", "--map-root-user"]);
    }
    let can =
        Command::new(words[0]).args(&words[1..]).args(["mount", "-t", "tmpfs", "none", "/mnt"]).output();
    if !can.as_ref().is_ok_and(|output| output.status.success()) {
        skip("rings in a mount namespace", format!("{can:?}"));
        return None;
    }
    // Beside a copy of the library there is no recorder.
    let library = folder.path().join("libgputrace.so");
    std::fs::copy(recorded::built().join("libgputrace.so"), &library).expect("a copy of the library");
    let python = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output();
    let python = String::from_utf8(python.expect("python3 runs").stdout).expect("text");
    let held = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/held.py");
    let held = format!(
        "env LD_PRELOAD={} PATH=/nowhere GPUTRACE_RING_BYTES=2097152 {} {}",
        library.display(),
        python.trim(),
        held.display()
    );
    let script =
        format!("set -e\nmount -t tmpfs -o size={shm} none /dev/shm\nmount -t tmpfs none /tmp\n{script}");
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).args(["sh", "-c", &script]).current_dir(folder.path());
    command.env("LD_LIBRARY_PATH", fake_cuda::library_dir()).env("HELD", held);
    command
        .env("GOLDEN", Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/kept-losses.gtr"))
        .env("GPUTRACE", recorded::built().join("gputrace"))
        .env("LIBRARY", recorded::built().join("libgputrace.so"));
    let output = command.output().expect("unshare runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{shown}{said}");
    Some(shown)
}

fn folder(name: &str) -> Folder {
    Folder::new(Path::new(env!("CARGO_TARGET_TMPDIR")), &format!("left-{name}"))
}

fn read(folder: &Folder, name: &str) -> String {
    std::fs::read_to_string(folder.path().join(name)).expect(name)
}

/// Two processes that have ended, one that runs, one that ended while it made its ring, one of another user, something that is not a
/// ring, and what a recorder could say nowhere else.
const LEFT: &str = r#"
printf 'alloc 5000000\nquit\n' | $HELD >/dev/null 2>&1
printf 'alloc 300\nalloc 400\nquit\n' | $HELD >/dev/null 2>&1
mkfifo words
$HELD <words >answers 2>/dev/null &
exec 7>words
echo 'alloc 5' >&7
while [ "$(grep -c done answers)" -lt 2 ]; do sleep 0.01; done
: >/dev/shm/gputrace.4194001.1.ring
touch -d '1 hour ago' /dev/shm/gputrace.4194001.1.ring
printf 'gputrace: the disk is full\n\033[31mred\n' >/dev/shm/gputrace.4194002.1.log
: >/dev/shm/gputrace.4194003.1.ring
chown 65534 /dev/shm/gputrace.4194003.1.ring || rm /dev/shm/gputrace.4194003.1.ring
"#;

#[test]
fn what_recordings_left_behind_is_listed_and_becomes_traces() {
    let folder = folder("all");
    let script = format!(
        r#"{LEFT}
$GPUTRACE ps >ps.txt
$GPUTRACE ps --json >ps.json
$GPUTRACE doctor >doctor.txt 2>&1 || true
set +e
$GPUTRACE recover -o 'traces/%p.gtr' >recover.txt 2>errors.txt
echo "status $?"
ls /dev/shm
exec 7>&-
wait
truncate -s 1M /dev/shm/gputrace.4194004.1.ring
$GPUTRACE recover -o 'traces/last-%p.gtr' >again.txt 2>again-errors.txt
echo "status $?"
rm /dev/shm/gputrace.4194004.1.ring
$GPUTRACE recover
echo "status $?"
"#
    );
    std::fs::create_dir(folder.path().join("traces")).expect("a folder");
    let Some(shown) = alone(&folder, "1g", &script) else { return };
    let listed = read(&folder, "ps.txt");
    let has = |text: &str, n: usize| assert_eq!(listed.matches(text).count(), n, "{text}: {listed}");
    has("has ended; `gputrace recover /dev/shm/gputrace.", 2);
    has("is still running; `gputrace recover /dev/shm/gputrace.", 1);
    has("(python", 1);
    has("ended before anything was recorded", 1);
    has("/dev/shm/gputrace.4194002.1.log", 1);
    let has_others = listed.contains("1 ring belongs to another user");
    let doctor = read(&folder, "doctor.txt");
    assert_eq!(doctor.matches("a ring without a recorder").count(), 4, "{doctor}");

    let json: Value = serde_json::from_str(&read(&folder, "ps.json")).expect("JSON");
    let rings = json["rings"].as_array().expect("a list");
    let count = |process: &str| rings.iter().filter(|ring| ring["process"] == process).count();
    assert_eq!((count("ended"), count("runs"), count("nothing recorded")), (2, 1, 1), "{json:#}");
    assert!(
        rings.iter().filter(|ring| ring["process"] == "ended").all(|ring| ring["bytes"].as_u64() > Some(0))
    );
    assert_eq!(json["logs"][0]["pid"], 4_194_002);
    assert_eq!(json["rings_of_others"], u64::from(has_others));

    // Those of processes that have ended, once; nothing is wrong with any.
    let recovered = read(&folder, "recover.txt");
    assert_eq!(recovered.matches("events of process").count(), 2, "{recovered}");
    assert!(
        recovered.contains("of process 4194002:\n  gputrace: the disk is full\n  \\u{1b}[31mred\n"),
        "{recovered}"
    );
    assert!(recovered.contains("nothing was recorded in it; removed"), "{recovered}");
    assert_eq!(read(&folder, "errors.txt"), "");
    // The one that ran is left, then it has ended, and what is not a ring is an error that keeps it from nothing.
    assert_eq!(read(&folder, "again.txt").matches("events of process").count(), 1);
    assert!(read(&folder, "again-errors.txt").contains("gputrace.4194004.1.ring"));
    let mut lines = shown.lines().filter(|line| !line.contains("4194003"));
    assert_eq!(lines.next(), Some("status 0"));
    let left = lines.next().expect("the ring of the process that runs");
    assert!(left.starts_with("gputrace.") && left.ends_with(".ring"), "{shown}");
    let none =
        if has_others { "rings of other users: 1, left unchanged" } else { "no ring of yours is left" };
    assert_eq!(lines.next(), Some("status 2"), "{shown}");
    assert!(lines.next().is_some_and(|line| line.starts_with(none)), "{shown}");
    assert_eq!((lines.next(), lines.next()), (Some("status 0"), None), "{shown}");
    let traces: Vec<PathBuf> = std::fs::read_dir(folder.path().join("traces"))
        .expect("a folder")
        .flatten()
        .map(|it| it.path())
        .collect();
    assert_eq!(traces.len(), 3, "{traces:?}");
}

#[test]
fn a_recorder_says_that_rings_of_those_who_have_ended_take_the_room() {
    let folder = folder("short");
    // Less than 64 MiB are free. In a file system that is smaller as a whole there would be no rings.
    let script = r#"
fallocate -l 964M /dev/shm/others
for i in 1 2 3; do printf 'alloc 5000000\nquit\n' | $HELD >/dev/null 2>&1; done
printf 'alloc 5000000\nquit\n' | $GPUTRACE record -q -o a.gtr -- python3 "${HELD##* }" >/dev/null 2>said
$GPUTRACE recover -o '%p.gtr' >/dev/null
printf 'alloc 5000000\nquit\n' | $GPUTRACE record -q -o b.gtr -- python3 "${HELD##* }" >/dev/null 2>said-then
"#;
    if alone(&folder, "1g", script).is_none() {
        return;
    }
    let said = read(&folder, "said");
    assert_eq!(
        said.matches("rings of 3 processes that have ended use 5 MiB of it: `gputrace recover`").count(),
        1,
        "{said}"
    );
    let said = read(&folder, "said-then");
    assert!(!said.contains("recover"), "{said}");
}

/// Files of another user in `/dev/shm` and in a folder, under names that we use, and two processes that look like recorders.
const THEIRS: &str = r#"
as() { setpriv --reuid 65534 --regid 65534 --clear-groups "$@"; }
as true || { echo cannot; exit 0; }
mkdir /tmp/own /tmp/theirs && cd /tmp/own
echo "root's own" >secret && chmod 600 secret
chmod 1777 /dev/shm && chmod 755 /tmp && chown 65534 /tmp/theirs
for how in seen hidden; do cp "$GOLDEN" /tmp/theirs/$how.gtr; chown 65534 /tmp/theirs/$how.gtr; done
as sh -c 'set -e; cd /dev/shm; ring=gputrace.4194011.1; echo evil >$ring.log; truncate -s 33533952 $ring.ring
ln -s "$0" gputrace.4194012.1.log; ln -s "$0" gputrace.4194012.1.ring
mkfifo gputrace.4194013.1.log gputrace.4194013.1.ring; ln -s /dev/zero gputrace.4194014.1.ring
cd /tmp/theirs; mkfifo fifo.gtr; ln -s "$0" secret.gtr; ln -s /dev/zero zero.gtr' "$PWD/secret"
cat >/tmp/theirs/recorder <<'PROGRAM'
import ctypes, fcntl, os, sys
trace = open(f'{sys.argv[2]}.gtr', 'r+b'); fcntl.flock(trace, fcntl.LOCK_EX)
if sys.argv[2] == 'hidden': ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: its folder in /proc is root's.
open(f'ready.{sys.argv[2]}', 'w').close(); sys.stdin.read()
PROGRAM
mkfifo /tmp/end && exec 7<>/tmp/end
for how in seen hidden; do (cd /tmp/theirs; exec 7>&-; as /usr/bin/python3 recorder --ring=x $how) </tmp/end & done
while ! [ -e /tmp/theirs/ready.seen ] || ! [ -e /tmp/theirs/ready.hidden ]; do sleep 0.05; done
ls /dev/shm >before
"#;

#[test]
fn what_another_user_put_there_is_neither_opened_nor_removed_nor_waited_for() {
    let folder = folder("theirs");
    let script = format!(
        r#"{THEIRS}
set +e
for words in ps "recover -o x" top metrics "top --once /tmp/theirs" "report /tmp/theirs/fifo.gtr" "report /tmp/theirs/secret.gtr" \
    "report /tmp/theirs/zero.gtr" "ranks /tmp/theirs" "recover /dev/shm/gputrace.4194011.1.ring" \
    "recover /dev/shm/gputrace.4194012.1.ring" "recover /dev/shm/gputrace.4194013.1.ring" "recover /dev/shm/gputrace.4194014.1.ring"; do
    case $words in top|metrics) words="$words --once" ;; esac
    echo "== $words"; $GPUTRACE $words 2>&1
done
ls /dev/shm | cmp - before && echo "nothing was removed"
echo "the file: $(cat secret)"
exec 7>&-
"#
    );
    let Some(shown) = alone(&folder, "1g", &script) else { return };
    if shown.starts_with("cannot") {
        return skip("files of another user", "setpriv cannot become one here");
    }
    let said = |words: &str| {
        let (_, rest) =
            shown.split_once(&format!("== {words}\n")).unwrap_or_else(|| panic!("{words}: {shown}"));
        rest.split("\n== ").next().unwrap_or_default().to_owned()
    };
    let ps = said("ps");
    assert!(ps.contains("1 ring belongs to another user and was not opened") && !ps.contains(".log"), "{ps}");
    let recover = said("recover -o x");
    assert!(
        recover.contains("rings of other users: 1, left unchanged") && !recover.contains("evil"),
        "{recover}"
    );
    for words in ["top --once", "metrics --once"] {
        assert!(!said(words).contains(".gtr") && !said(words).contains("pid="), "{}", said(words));
    }
    for (words, why) in [
        ("report /tmp/theirs/fifo.gtr", "not a regular file"),
        ("report /tmp/theirs/zero.gtr", "not a regular file"),
        ("report /tmp/theirs/secret.gtr", "is not a gputrace trace"),
        ("ranks /tmp/theirs", "/tmp/theirs/seen.gtr"),
        ("recover /dev/shm/gputrace.4194011.1.ring", "belongs to user 65534"),
        ("recover /dev/shm/gputrace.4194012.1.ring", "is a link, not a regular file"),
        ("recover /dev/shm/gputrace.4194013.1.ring", "is a FIFO, not a regular file"),
        ("recover /dev/shm/gputrace.4194014.1.ring", "is a link, not a regular file"),
    ] {
        assert!(said(words).contains(why), "{words}: {}", said(words));
    }
    assert!(shown.ends_with("nothing was removed\nthe file: root's own\n"), "{shown}");
}

/// Another user holds every kind of lock on twenty traces of their own, a lease on one of them, and on a trace of ours what a reader can hold.
const LOCKED: &str = r#"
as() { setpriv --reuid 65534 --regid 65534 --clear-groups "$@"; }
as true || { echo cannot; exit 0; }
chmod 755 /tmp && mkdir -m 1777 /tmp/shared && cd /tmp/shared
cp "$GOLDEN" ours.gtr && chmod 644 ours.gtr
cat >/tmp/holder <<'PROGRAM'
import fcntl, os, struct, sys
def lock(path, how, command, kind):
    file = open(path, how)
    try: fcntl.fcntl(file, command, struct.pack('hhqqi4x', kind, 0, 0, 0, 0)) if command else fcntl.flock(file, kind)
    except OSError: pass
    return file
golden, own = open(sys.argv[1], 'rb').read(), 37  # F_OFD_SETLK
held = []
for n in range(20):
    open(f'{n}.gtr', 'xb').write(golden)
    held.append(lock(f'{n}.gtr', 'r+b', own, fcntl.F_WRLCK))
    held.append(lock(f'{n}.gtr', 'r+b', None, fcntl.LOCK_EX))
open('posix.gtr', 'xb').write(golden)
held.append(lock('posix.gtr', 'r+b', fcntl.F_SETLK, fcntl.F_WRLCK))
open('lease.gtr', 'xb').write(golden)
leased = open('lease.gtr', 'rb')
fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_RDLCK)
for command, kind in [(None, fcntl.LOCK_EX), (own, fcntl.F_RDLCK), (own, fcntl.F_WRLCK), (fcntl.F_SETLK, fcntl.F_RDLCK), (fcntl.F_SETLK, fcntl.F_WRLCK)]:
    held.append(lock('ours.gtr', 'rb', command, kind))
try: fcntl.fcntl(held[-1], fcntl.F_SETLEASE, fcntl.F_RDLCK)
except OSError: pass
open('ready', 'w').close(); sys.stdin.read()
PROGRAM
mkfifo /tmp/end && exec 7<>/tmp/end
(exec 7>&-; as /usr/bin/python3 /tmp/holder "$GOLDEN") </tmp/end &
while ! [ -e ready ]; do sleep 0.05; done
"#;

#[test]
fn locks_of_another_user_hold_up_no_verb_for_longer_than_one_bound_and_no_trace_that_they_can_only_read() {
    let folder = folder("locked");
    // Of a process that ran here and has ended: only the recorder of such a one is waited for.
    let script = format!(
        r#"printf 'alloc 5000000\nquit\n' | $GPUTRACE record -q -o /tmp/golden.gtr -- python3 "${{HELD##* }}" >/dev/null
chmod 644 /tmp/golden.gtr; GOLDEN=/tmp/golden.gtr
{LOCKED}
set +e
for words in "report ours.gtr" "top --once ours.gtr" "report 0.gtr" "ranks ." "top --once ." ps; do
    began=$(date +%s); echo "== $words"; $GPUTRACE $words 2>&1; echo "status $?"; echo "took $(($(date +%s) - began))"
done
exec 7>&-; wait
echo "== end"; $GPUTRACE ranks . 2>&1; echo "status $?"
"#
    );
    let Some(shown) = alone(&folder, "1g", &script) else { return };
    if shown.starts_with("cannot") {
        return skip("locks of another user", "setpriv cannot become one here");
    }
    let said = |words: &str| {
        let (_, rest) =
            shown.split_once(&format!("== {words}\n")).unwrap_or_else(|| panic!("{words}: {shown}"));
        rest.split("\n== ").next().unwrap_or_default().to_owned()
    };
    let waits = "is still being written";
    for words in ["report ours.gtr", "report 0.gtr", "ranks .", "top --once .", "ps"] {
        let seconds = said(words).rsplit_once("took ").and_then(|(_, n)| n.trim().parse().ok());
        let took = Duration::from_secs(seconds.unwrap_or_else(|| panic!("{words}: {shown}")));
        // One bound of 10 s for all; twenty of them are 200 s.
        let began = Instant::now().checked_sub(took).expect("the machine runs for longer");
        assert!(!is_hang(began, Duration::from_secs(100)), "{words} took {took:?}: {shown}");
        assert!(!said(words).contains("ours.gtr is still"), "{words}: {}", said(words));
    }
    assert!(!said("report ours.gtr").contains(waits) && !said("ps").contains(waits), "{shown}");
    assert_eq!(said("report 0.gtr").matches(waits).count(), 1, "{shown}");
    assert_eq!(said("ranks .").matches(waits).count(), 21, "{shown}");
    assert!(!said("end").contains(waits), "{shown}");
}
