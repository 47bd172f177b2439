//! Root attaches to hostile processes of another user, and lists them: nothing of root's is opened, read or changed, and the others are
//! listed all the same. What each of these processes does, `evil.c`, `silent.c`, `mapped.c` and `sockets.c` of `attach/` say. Who is not
//! root skips them.
#![cfg(target_arch = "x86_64")]

use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use gputrace_schemas::reader::Trace;
use gputrace_skip::skip;
use gputrace_tests::patience::{SECONDS, is_hang};
use gputrace_tests::recorded::{self, Folder};

/// One that every user may run.
const PYTHON: &str = "/usr/bin/python3";
/// Root's file, which the attacker must not be able to read or change.
const SECRET: &str = "root's own\n";

/// What a program ends with where the machine forbids what it needs.
const CANNOT: i32 = 77;

/// A process of user 65534, which ends with this.
struct Hostile(Child);

const PLAIN: &[&str] = &["--reuid", "65534", "--regid", "65534", "--clear-groups"];

impl Hostile {
    fn start(program: &Path, folder: &Path, arguments: &[&str]) -> Hostile {
        Hostile::start_as(PLAIN, program, folder, arguments)
    }

    fn start_as(rights: &[&str], program: &Path, folder: &Path, arguments: &[&str]) -> Hostile {
        Hostile::begin(rights, program, folder, arguments).expect("it can").0
    }

    /// `None` where it cannot be what it is told to be; with what it says after its first line.
    fn begin(
        rights: &[&str],
        program: &Path,
        folder: &Path,
        arguments: &[&str],
    ) -> Option<(Hostile, BufReader<ChildStdout>)> {
        let mut command = Command::new("setpriv");
        command.args(rights).arg(program).args(arguments);
        command.env("LD_LIBRARY_PATH", folder).current_dir(folder);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("setpriv");
        let mut line = String::new();
        let mut said = BufReader::new(child.stdout.take().expect("its output"));
        said.read_line(&mut line).expect("a line");
        if line.is_empty() && child.wait().expect("its end").code() == Some(CANNOT) {
            return None;
        }
        assert_eq!(line, "ready\n");
        Some((Hostile(child), said))
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A folder in which user 65534 may run the program and make files, and root's file beside it.
struct Ground {
    folder: Folder,
    outer: Folder,
}

impl Ground {
    /// `None` where there cannot be one.
    fn new(name: &str) -> Option<Ground> {
        if fs::metadata("/proc/self").map_or(1, |own| own.uid()) != 0 {
            skip("attacks of another user", "only root can be attacked so");
            return None;
        }
        let outer = Folder::new(&std::env::temp_dir(), &format!("gputrace-hostile-secret-{name}"));
        let folder = Folder::new(&std::env::temp_dir(), &format!("gputrace-hostile-{name}"));
        let driver = fake_cuda::library_dir().join("libcuda.so.1");
        fs::copy(&driver, folder.path().join("libcuda.so.1")).expect("a copy");
        fs::set_permissions(folder.path().join("libcuda.so.1"), Permissions::from_mode(0o755)).expect("ours");
        fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).expect("ours");
        fs::set_permissions(outer.path(), Permissions::from_mode(0o755)).expect("ours");
        let ground = Ground { folder, outer };
        fs::write(ground.victim(), SECRET).expect("writable");
        fs::set_permissions(ground.victim(), Permissions::from_mode(0o600)).expect("ours");
        ground.compile("evil");
        Some(ground)
    }

    /// A program of `attach/`, linked to the driver.
    fn compile(&self, name: &str) -> PathBuf {
        let folder = self.folder.path();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("attach").join(format!("{name}.c"));
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-D_GNU_SOURCE", "-pthread", "-o"]).arg(folder.join(name));
        // A program with more rights than its user is told no folders by its user.
        compiler.arg(format!("-Wl,-rpath,{}", folder.display()));
        compiler.arg(source).arg(folder.join("libcuda.so.1"));
        assert!(compiler.status().expect("a compiler").success());
        folder.join(name)
    }

    fn victim(&self) -> PathBuf {
        self.outer.path().join("victim.gtr")
    }

    fn start(&self, mode: &str) -> Hostile {
        self.start_as(PLAIN, mode)
    }

    fn start_as(&self, rights: &[&str], mode: &str) -> Hostile {
        let victim = self.victim();
        Hostile::start_as(
            rights,
            &self.folder.path().join("evil"),
            self.folder.path(),
            &[mode, victim.to_str().expect("text")],
        )
    }

    fn gputrace(&self, arguments: &[&str]) -> (Option<i32>, String) {
        self.gputrace_with(None, arguments)
    }

    fn gputrace_with(&self, library: Option<&Path>, arguments: &[&str]) -> (Option<i32>, String) {
        // Of the memory that it asks for itself, which no answer needs as much of.
        let mut command = Command::new("prlimit");
        command.arg(format!("--data={}", 1 << 30)).arg(recorded::built().join("gputrace"));
        command.envs(library.map(|library| ("GPUTRACE_LIBRARY", library)));
        let output = command.args(arguments).current_dir(self.outer.path()).output().expect("it runs");
        let said = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&said).into_owned())
    }

    fn check(&self, mode: &str, said: &str) {
        let found = fs::read_to_string(self.victim()).expect("it is there");
        assert_eq!(found, SECRET, "{mode}: {said}");
    }
}

#[test]
fn a_process_that_exchanges_what_it_is_asked_to_make_has_nothing_of_the_attachers_written_to() {
    for mode in ["swap", "fifo", "device", "sealed", "early"] {
        let Some(ground) = Ground::new(mode) else { return };
        for _ in 0..3 {
            let hostile = ground.start(mode);
            let (code, said) = ground.gputrace(&["attach", "--timeout", "2", &hostile.pid()]);
            // Whatever comes of it: it ends by itself, and says why.
            assert!(
                code == Some(0) || (code == Some(2) && said.contains("gputrace: ")),
                "{mode}: {code:?} {said}"
            );
            ground.check(mode, &said);
        }
    }
}

#[test]
fn a_process_that_exchanges_its_control_page_is_listed_and_has_nothing_of_the_attachers_read_or_written() {
    for mode in ["control", "trace", "borrowed"] {
        let Some(ground) = Ground::new(mode) else { return };
        let hostile = ground.start(mode);
        for _ in 0..5 {
            let (code, said) = ground.gputrace(&["ps"]);
            assert_eq!(code, Some(0), "{said}");
            let row = said.lines().find(|line| line.split_whitespace().next() == Some(&hostile.pid()));
            assert!(row.is_some(), "{said}");
            // The recorder that it names is root's, or has a file open that is: neither is a trace of this process's.
            assert!(!row.is_some_and(|row| row.contains(" to /")), "{said}");
            ground.gputrace(&["attach", "--timeout", "1", &hostile.pid()]);
            ground.check(mode, &said);
        }
    }
}

#[test]
fn headers_in_a_hostile_processs_memory_keep_nobody_from_being_listed() {
    let Some(ground) = Ground::new("headers") else { return };
    let other = ground.start("early");
    // Files that are called as the driver and the C library are, with headers that no linker makes.
    let program = "import ctypes, mmap, os, sys, time\n\
        headers = bytearray(b'\\x7fELF\\2\\1\\1' + bytes(4089)); headers[16] = 3; headers[18] = 62; headers[32] = 64\n\
        headers[54], headers[56] = int(sys.argv[1]), int(sys.argv[2])\n\
        headers[64] = 2; headers[80:88] = b'\\xff' * 8; headers[104:112] = b'\\xfe' * 8\n\
        maps = []\n\
        for name in ('libcuda.so.1', 'libc.so.6'):\n\
        \x20   folder = os.path.abspath(f'maps.{os.getpid()}'); os.makedirs(folder, exist_ok=True)\n\
        \x20   open(f'{folder}/{name}', 'wb').write(headers)\n\
        \x20   maps.append(mmap.mmap(os.open(f'{folder}/{name}', os.O_RDONLY), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC))\n\
        print('ready', flush=True); sys.stdin.read()\n";
    let script = ground.folder.path().join("maps.py");
    fs::write(&script, program).expect("writable");
    fs::set_permissions(&script, Permissions::from_mode(0o644)).expect("ours");
    let script = script.to_str().expect("text");
    let hostile: Vec<Hostile> = [("0", "9"), ("56", "1"), ("255", "255"), ("1", "255")]
        .iter()
        .map(|(size, n)| Hostile::start(Path::new(PYTHON), ground.folder.path(), &[script, size, n]))
        .collect();
    let (code, said) = ground.gputrace(&["ps"]);
    assert_eq!(code, Some(0), "{said}");
    for pid in hostile.iter().chain([&other]).map(Hostile::pid) {
        let is_listed = said.lines().any(|line| line.split_whitespace().next() == Some(&pid));
        assert!(is_listed, "{pid}: {said}");
    }
}

#[test]
fn nobody_without_a_debuggers_rights_keeps_others_from_attaching() {
    let Some(ground) = Ground::new("busy") else { return };
    let program = ground.start("early");
    let pid = program.pid();
    // A name that anybody may take, and a lock that anybody may hold.
    let script = "import fcntl, socket, sys\n\
        pid = sys.argv[1]\n\
        name = socket.socket(socket.AF_UNIX); name.bind('\\0gputrace-attach-' + pid)\n\
        held = []\n\
        for path in ('mem', 'maps', 'status', 'stat'):\n\
        \x20   try: held.append(open(f'/proc/{pid}/{path}')); fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)\n\
        \x20   except OSError: pass\n\
        print('ready', flush=True); sys.stdin.read()\n";
    let mut other = Command::new("setpriv");
    other.args(["--reuid", "65533", "--regid", "65533", "--clear-groups", PYTHON, "-c", script, &pid]);
    let mut other = other.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("setpriv");
    let mut line = String::new();
    BufReader::new(other.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
    assert_eq!(line, "ready\n");
    let (code, said) = ground.gputrace(&["attach", "--timeout", SECONDS, "-o", "late.gtr", &pid]);
    let _ = other.kill().and_then(|()| other.wait());
    // The recorder is the process's own, and cannot write to root's folder: that it was asked is what counts.
    assert!(!said.contains("another gputrace is attaching"), "{code:?} {said}");
    drop(File::open(ground.victim()));
}

/// A process whose memory never answers, and a folder that is to be removed after it; `None` where there cannot be one.
fn silent(ground: &Ground, modes: &[&str]) -> Option<(Hostile, String)> {
    let program = ground.compile("silent");
    let mut silent = Command::new(&program);
    silent.args(modes).current_dir(ground.folder.path());
    let mut silent = silent.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
    let mut folder = String::new();
    BufReader::new(silent.stdout.take().expect("its output")).read_line(&mut folder).expect("a line");
    if folder.is_empty() {
        let status = silent.wait().expect("it ends");
        assert_eq!(status.code(), Some(CANNOT));
        skip("a process whose memory never answers", "no FUSE mount can be made here");
        return None;
    }
    Some((Hostile(silent), folder))
}

/// What these commands answer, as far as they end.
fn answers(ground: Ground, commands: &[&[&str]]) -> Vec<(Option<i32>, String)> {
    let (tells, told) = std::sync::mpsc::channel();
    let own = |words: &&[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let asked: Vec<Vec<String>> = commands.iter().map(own).collect();
    std::thread::spawn(move || {
        for words in asked {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            // Its output too must have an end: whoever reads it waits for that.
            let _ = tells.send(ground.gputrace(&words));
        }
    });
    let next = |_: &&[&str]| {
        let began = Instant::now();
        loop {
            match told.recv_timeout(Duration::from_millis(100)) {
                Err(RecvTimeoutError::Timeout) if !is_hang(began, Duration::from_secs(150)) => {}
                answer => return answer.ok(),
            }
        }
    };
    commands.iter().map_while(next).collect()
}

#[test]
fn a_process_whose_memory_never_answers_keeps_no_command_from_ending() {
    let Some(ground) = Ground::new("silent") else { return };
    let Some((silent, folder)) = silent(&ground, &[]) else { return };
    let pid = silent.pid();
    let asked: [&[&str]; 3] =
        [&["ps"], &["attach", "--timeout", "0", &pid], &["detach", "--timeout", "0", &pid]];
    let answers = answers(ground, &asked);
    let _ = fs::remove_dir(folder.trim());
    drop(silent);
    assert_eq!(answers.len(), 3, "one waits for ever: {answers:?}");
    let (code, said) = &answers[0];
    let row = said.lines().find(|line| line.split_whitespace().next() == Some(&pid));
    assert!(*code == Some(0) && row.is_some_and(|row| row.contains("unanswered")), "{said}");
    let (code, said) = &answers[1];
    assert!(*code == Some(2) && said.contains("do not respond"), "{said}");
}

#[test]
fn a_process_whose_memory_never_answers_keeps_a_snapshot_that_has_begun_from_nothing_but_its_end() {
    let Some(ground) = Ground::new("begun") else { return };
    let Some((silent, folder)) = silent(&ground, &["begins"]) else { return };
    let answers = answers(ground, &[&["attach", "--snapshot", "--timeout", "2", &silent.pid()]]);
    let _ = fs::remove_dir(folder.trim());
    drop(silent);
    let Some((code, said)) = answers.first() else { panic!("it waits for ever") };
    // On a busy machine it may not answer within 2 s, and then nothing has begun.
    let is_so = ["do not respond", "has made no visible call"].iter().any(|why| said.contains(why));
    assert!(*code == Some(2) && is_so, "{said}");
}

#[test]
fn a_users_link_has_no_file_of_roots_copied_into_a_process_of_theirs() {
    let Some(ground) = Ground::new("link") else { return };
    let library = fs::read(recorded::built().join("libgputrace.so")).expect("it was built");
    let private = ground.outer.path().join("closed");
    fs::create_dir(&private).expect("ours");
    let files = [
        (ground.outer.path().join("own"), 0o600, &library[..], "the process's user may not read it"),
        (private.join("open"), 0o644, &library[..], "the process's user may not enter"),
        (ground.outer.path().join("text"), 0o644, SECRET.as_bytes(), "is not a whole library"),
    ];
    let hostile = ground.start("early");
    for (file, mode, content, expected) in files {
        fs::write(&file, content).expect("ours");
        fs::set_permissions(&file, Permissions::from_mode(mode)).expect("ours");
        fs::set_permissions(&private, Permissions::from_mode(0o700)).expect("ours");
        let link = ground.folder.path().join("libgputrace.so");
        let made = Command::new("setpriv").args(PLAIN).args(["ln", "-sf"]).arg(&file).arg(&link).status();
        assert!(made.expect("ln").success());
        let (code, said) =
            ground.gputrace_with(Some(&link), &["attach", "--timeout", SECONDS, &hostile.pid()]);
        assert!(code == Some(2) && said.contains(expected), "{code:?} {said}");
    }
}

#[test]
fn a_users_library_is_no_code_of_a_process_with_more_rights() {
    let Some(ground) = Ground::new("rights") else { return };
    let library = ground.folder.path().join("libgputrace.so");
    fs::copy(recorded::built().join("libgputrace.so"), &library).expect("a copy");
    std::os::unix::fs::chown(&library, Some(65534), Some(65534)).expect("root's right");
    // As it is after it has executed a set-user-ID program, or one with file capabilities.
    let more: [&[&str]; 2] = [
        &["--ruid", "65534", "--euid", "0", "--regid", "65534", "--clear-groups"],
        &["--inh-caps", "+net_bind_service", "--ambient-caps", "+net_bind_service"],
    ];
    for rights in [more[0].to_vec(), [PLAIN, more[1]].concat(), PLAIN.to_vec()] {
        let hostile = ground.start_as(&rights, "early");
        let attach = ["attach", "--timeout", SECONDS, "-o", "late.gtr", &hostile.pid()];
        let (code, said) = ground.gputrace_with(Some(&library), &attach);
        let is_refused = said.contains("it belongs to user 65534, not to");
        assert_eq!(is_refused, rights != PLAIN, "{rights:?}: {code:?} {said}");
    }
}

#[test]
fn a_control_page_that_another_user_sent_to_a_process_is_not_taken_for_its_own() {
    let Some(ground) = Ground::new("sent") else { return };
    let receiver = ground.start("sent");
    let pid = receiver.pid();
    let script = "import os, socket, struct, sys\n\
        pid = int(sys.argv[1]); page = os.memfd_create('gputrace-control', 0)\n\
        os.fchmod(page, 0o600); os.ftruncate(page, 4096)\n\
        os.pwrite(page, struct.pack('<8s6I', b'gputctrl', 2, pid, 0, 1, 0, 0), 0)\n\
        to = socket.socket(socket.AF_UNIX); to.connect(f'\\0gputrace-sent-{pid}')\n\
        socket.send_fds(to, [b'x'], [page]); assert to.recv(1) == b'x'\n";
    let mut sender = Command::new("setpriv");
    sender.args(["--reuid", "65533", "--regid", "65533", "--clear-groups", PYTHON, "-c", script, &pid]);
    assert!(sender.status().expect("setpriv").success());
    let (_, said) = ground.gputrace(&["ps"]);
    let row = said.lines().find(|line| line.split_whitespace().next() == Some(&pid));
    assert!(row.is_some_and(|row| row.contains(" late ")), "{said}");
}

#[test]
fn a_trace_whose_name_leads_elsewhere_in_the_end_is_not_reported() {
    let Some(ground) = Ground::new("moved") else { return };
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/kept-losses.gtr");
    fs::write(ground.victim(), fs::read(golden).expect("it is there")).expect("ours");
    let hostile = ground.start("moved");
    let (code, said) = ground.gputrace(&["attach", "--snapshot", "--timeout", SECONDS, &hostile.pid()]);
    assert!(code == Some(2) && said.contains("own.gtr, which is another file here"), "{code:?} {said}");
}

#[test]
fn descriptors_that_nobody_comes_back_from_closing_keep_no_command_from_ending() {
    let Some(ground) = Ground::new("closes") else { return };
    let Some((silent, folder)) = silent(&ground, &["closes"]) else { return };
    let pid = silent.pid();
    let attach: &[&str] = &["attach", "--timeout", "0", &pid];
    let answers = answers(ground, &[&["ps"], attach, &["ps"], attach, &["detach", "--timeout", "0", &pid]]);
    let _ = fs::remove_dir(folder.trim());
    drop(silent);
    assert_eq!(answers.len(), 5, "one waits for ever: {answers:?}");
    for (code, said) in [&answers[0], &answers[2]] {
        let is_listed = said.lines().any(|line| line.split_whitespace().next() == Some(&pid));
        assert!(*code == Some(0) && is_listed, "{said}");
    }
    assert!([1, 3, 4].iter().all(|at| answers[*at].0 == Some(2)), "{answers:?}");
}

#[test]
fn files_that_a_hostile_process_has_mapped_neither_hold_up_nor_fill_whoever_reads_them() {
    let Some(ground) = Ground::new("mapped") else { return };
    let (program, folder) = (ground.compile("mapped"), ground.folder.path());
    let victim = ground.victim().display().to_string();
    for mode in ["fifo", "folder", "device", "secret", "turns", "sparse", "symbols", "frames", "version"] {
        let Some((hostile, _)) = Hostile::begin(PLAIN, &program, folder, &[mode, &victim]) else {
            skip("mounts of a hostile process", "no user may have a namespace of mounts here");
            continue;
        };
        let pid = hostile.pid();
        let (code, said) = ground.gputrace(&["stacks", "--all", &pid]);
        let library = if mode == "version" { "(libc10.so)" } else { "(libmapped.so)" };
        // All that it has is shown, and of the library what its tables can be believed.
        let is_shown = code == Some(0) && ["__libc_start_main", library].iter().all(|it| said.contains(it));
        assert!(is_shown && !said.contains(SECRET.trim()), "{mode}: {code:?} {said}");
        let (code, said) = ground.gputrace(&["ps"]);
        let is_listed = said.lines().any(|line| line.split_whitespace().next() == Some(&pid));
        assert!(code == Some(0) && is_listed, "{mode}: {said}");
        let trace = folder.join(format!("{mode}.gtr")).display().to_string();
        let (code, said) = ground.gputrace(&["attach", "--timeout", SECONDS, "-o", &trace, &pid]);
        assert_eq!(code, Some(0), "{mode}: {said}");
        let (code, said) = ground.gputrace(&["detach", "--timeout", SECONDS, &pid]);
        assert_eq!(code, Some(0), "{mode}: {said}");
        let trace = Trace::open(&trace).expect("a trace");
        assert!(trace.is_complete() && !format!("{:?}", trace.process()).contains(SECRET.trim()), "{mode}");
        ground.check(mode, &said);
    }
}

#[test]
fn sockets_of_a_hostile_process_are_as_they_were_and_all_of_its_threads_wait_on() {
    let Some(ground) = Ground::new("sockets") else { return };
    let (program, folder) = (ground.compile("sockets"), ground.folder.path());
    for mode in ["waits", "turns", "storm"] {
        let (hostile, mut said) = Hostile::begin(PLAIN, &program, folder, &[mode]).expect("it can");
        let pid = hostile.pid();
        for round in 0..2 {
            let trace = folder.join(format!("{mode}.{round}.gtr")).display().to_string();
            let (code, said) = ground.gputrace(&["attach", "--timeout", "2", "-o", &trace, &pid]);
            // None of its waiting threads may be stopped. Those that run may, where there are any.
            let is_told = code == Some(2) && said.contains("gputrace: ");
            assert!(is_told || (code == Some(0) && mode != "waits"), "{mode}: {code:?} {said}");
            ground.gputrace(&["detach", "--timeout", "2", &pid]);
        }
        assert!(Command::new("kill").args(["-USR1", &pid]).status().expect("kill").success());
        let mut end = String::new();
        said.read_to_string(&mut end).expect("text");
        assert_eq!(end, "as it was\n", "{mode}");
    }
}
