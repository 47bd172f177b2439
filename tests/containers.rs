//! What containers do to a program and its recorder, one setting at a time: docs/CONTAINERS.md has the table. Each program
//! ends as it does without us, and its trace has what it did.
//!
//! `unshare` makes the containers. Where that is forbidden, or takes more rights than we have, a test says so and is skipped.

use gputrace_skip::skip;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use gputrace_schemas::event::{Action, EventKind, LostCause};
use gputrace_schemas::reader::Trace;
use gputrace_tests::patience::{LONG, is_hang};
use gputrace_tests::recorded;

/// A place that every user can reach, with all that a program and its recorder need.
struct Place(PathBuf);

impl Place {
    fn new() -> Place {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("gputrace-containers-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let place = Place(std::env::temp_dir().join(name));
        for folder in ["bin", "out", "empty"] {
            fs::create_dir_all(place.0.join(folder)).expect("a folder");
            open_to_all(&place.0.join(folder), 0o777);
        }
        let built = recorded::built();
        for file in ["libgputrace.so", "gputrace"] {
            fs::copy(built.join(file), place.0.join("bin").join(file)).expect("a copy of what was built");
        }
        for entry in fs::read_dir(fake_cuda::library_dir()).expect("the fake driver").flatten() {
            let is_library = entry.file_name().to_string_lossy().contains(".so");
            if is_library {
                fs::copy(entry.path(), place.0.join("bin").join(entry.file_name())).expect("a copy");
            }
        }
        let compiled = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
            .args(["-std=gnu11", "-O1", "-Wall", "-pthread", "-o"])
            .arg(place.0.join("bin/program"))
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("containers/program.c"))
            .arg(place.0.join("bin/libcuda.so.1"))
            // A program with rights of its own is told no folders by its user.
            .arg(format!("-Wl,-rpath,{}", place.text("bin")))
            .output()
            .expect("a C compiler");
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        open_to_all(&place.0, 0o755);
        place
    }

    fn text(&self, path: &str) -> String {
        self.0.join(path).display().to_string()
    }

    /// A shell that has our library preloaded for what `$RUN` begins.
    fn shell(&self, container: &[&str], script: &str) -> Command {
        let mut words = container.to_vec();
        words.extend(["sh", "-c", script]);
        let mut command = Command::new(words[0]);
        command
            .args(&words[1..])
            .env("P", &self.0)
            .env("LD_LIBRARY_PATH", self.0.join("bin"))
            .env("RUN", format!("env LD_PRELOAD={}", self.text("bin/libgputrace.so")))
            .env("GPUTRACE_OUTPUT", self.0.join("out/%p.%t.gtr"))
            // Process 1 takes its recorder along: on a machine that is busy, a second may be too short for it.
            .env("GPUTRACE_EXIT_WAIT", "60000")
            .stdin(Stdio::null());
        command
    }

    fn traces(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.0.join("out")).into_iter().flatten().flatten();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "gtr"));
        paths.sort();
        paths
    }

    /// The one trace, once it is complete.
    fn trace(&self) -> Trace {
        let began = Instant::now();
        loop {
            let paths = self.traces();
            if let [path] = paths.as_slice()
                && let Ok(trace) = Trace::open(path)
                && trace.is_complete()
            {
                return trace;
            }
            assert!(!is_hang(began, LONG), "no complete trace: {paths:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn open_to_all(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("ours");
}

/// Whether such a container can be made here; says so if not.
fn can(container: &[&str], what: &str) -> bool {
    let mut command = Command::new(container[0]);
    let output = command.args(&container[1..]).args(["sh", "-c", what]).output();
    let refused = match output {
        Ok(output) if output.status.success() => return true,
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        Err(error) => error.to_string(),
    };
    skip(&format!("{} sh -c '{what}'", container.join(" ")), refused);
    false
}

/// Runs to the end; a hang is a failure.
fn run(mut command: Command) -> Output {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    end(child)
}

fn end(mut child: Child) -> Output {
    let began = Instant::now();
    while child.try_wait().expect("a child of ours").is_none() {
        if is_hang(began, LONG) {
            let _ = child.kill();
            panic!("it hangs: {:?}", child.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().expect("its output")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn count(trace: &Trace, action: Action) -> usize {
    trace.events().filter(|it| matches!(&it.kind, EventKind::Call(call) if call.action == action)).count()
}

fn notes(trace: &Trace) -> Vec<String> {
    let note = |kind| if let EventKind::Note(text) = kind { Some(text) } else { None };
    trace.events().filter_map(|event| note(event.kind)).collect()
}

fn losses(trace: &Trace) -> Vec<(LostCause, u64)> {
    let lost = |kind| if let EventKind::Lost(lost) = kind { Some((lost.cause, lost.events)) } else { None };
    trace.events().filter_map(|event| lost(event.kind)).collect()
}

/// The program does 50 steps in this container, and the trace has them.
fn is_whole(container: &[&str], before: &str, words: &str) {
    if !can(container, if before.is_empty() { "true" } else { "command -v mount setpriv" }) {
        return;
    }
    let place = Place::new();
    let script = format!("{before}\nexec $RUN $P/bin/program 50 1 {words}");
    let output = run(place.shell(container, &script));
    let said = text(&output.stderr);
    assert_eq!(
        (text(&output.stdout).as_str(), output.status.code()),
        ("done 50, 0 failed\n", Some(0)),
        "{said}"
    );
    let trace = place.trace();
    assert_eq!((count(&trace, Action::Alloc), count(&trace, Action::Free)), (50, 50), "{said}");
    assert_eq!(losses(&trace), []);
}

const OWN_PROCESSES: &[&str] = &["unshare", "--pid", "--fork", "--mount-proc"];
const OWN_MOUNTS: &[&str] = &["unshare", "--mount"];

#[test]
fn the_first_process_of_a_container_is_recorded_to_its_end() {
    is_whole(OWN_PROCESSES, "", "");
}

#[test]
fn a_container_of_an_unprivileged_user_is_recorded() {
    is_whole(&["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"], "", "");
}

#[test]
fn a_container_with_the_proc_of_its_host_is_recorded() {
    is_whole(&["unshare", "--pid", "--fork"], "", "");
}

#[test]
fn a_container_without_proc_is_recorded() {
    is_whole(OWN_MOUNTS, "mount -t tmpfs none /proc", "");
    is_whole(&["unshare", "--pid", "--fork", "--mount"], "mount -t tmpfs none /proc", "threads");
}

#[test]
fn a_shm_of_64_mb_and_one_of_8_mb_are_enough() {
    for size in ["64m", "8m"] {
        is_whole(OWN_MOUNTS, &format!("mount -t tmpfs -o size={size} none /dev/shm"), "");
    }
}

#[test]
fn without_room_in_shm_the_ring_is_in_memory() {
    is_whole(OWN_MOUNTS, "mount -t tmpfs -o size=4k none /dev/shm", "");
    is_whole(OWN_MOUNTS, "mount -t tmpfs -o ro none /dev/shm", "");
}

#[test]
fn a_root_that_is_read_only_is_recorded() {
    let read_only =
        "mount --bind $P/out $P/out; mount -o remount,bind,ro /; mount -t tmpfs -o ro none /dev/shm";
    is_whole(OWN_MOUNTS, read_only, "");
}

#[test]
fn processes_that_are_hidden_from_their_recorder_are_recorded() {
    let container = &["unshare", "--pid", "--fork", "--mount"];
    if !can(container, "mount -t proc -o hidepid=2 proc /proc && setpriv --reuid=65534 --clear-groups true") {
        return;
    }
    let place = Place::new();
    let script = "mount -t proc -o hidepid=2 proc /proc
        setpriv --reuid=65534 --clear-groups $RUN $P/bin/program 1500 2 hidden threads; echo ended $?";
    let output = run(place.shell(container, script));
    let said = text(&output.stderr);
    assert_eq!(text(&output.stdout), "done 1500, 0 failed\nended 0\n", "{said}");
    let trace = place.trace();
    assert_eq!(losses(&trace), [], "{said}");
    assert_eq!((count(&trace, Action::Alloc), count(&trace, Action::Free)), (1500, 1500), "{said}");
}

/// Recorders that end with their namespace leave nothing in a `/dev/shm` that may be the host's (`--ipc=host`), where it would take
/// memory until the machine starts again.
#[test]
fn recorders_that_end_with_their_namespace_leave_no_ring() {
    if !can(
        &["unshare", "--mount", "--pid", "--fork"],
        "mount -t tmpfs none /dev/shm && unshare --pid --fork true",
    ) {
        return;
    }
    let place = Place::new();
    let script = "mount -t tmpfs -o mode=1777 none /dev/shm
        for i in 1 2 3 4 5 6 7 8; do GPUTRACE_OUTPUT=$P/out/$i.gtr unshare --pid --fork sh -c '$RUN $P/bin/program 3 1 threads; true'; done; ls /dev/shm";
    let output = run(place.shell(&["unshare", "--mount", "--pid", "--fork"], script));
    assert_eq!(text(&output.stdout), "done 3, 0 failed\n".repeat(8), "{}", text(&output.stderr));
    let traces = place.traces();
    assert_eq!(traces.len(), 8);
    for path in traces {
        let trace = Trace::open(&path).expect("a trace");
        assert!(trace.is_complete(), "{}", path.display());
    }
}

/// `/etc/ld.so.preload` preloads into programs that have rights their user does not have too.
#[test]
fn a_program_with_rights_that_its_user_does_not_have_is_left_alone() {
    let preloaded = "mkdir $P/out/etc && cp /etc/passwd /etc/group $P/out/etc && mount --bind $P/out/etc /etc
        mount -t tmpfs -o mode=1777 none /dev/shm";
    let ours = "setpriv --reuid=65534 --regid=65534 --clear-groups true";
    if !can(OWN_MOUNTS, &format!("mount -t tmpfs none /dev/shm && {ours}")) {
        return;
    }
    let place = Place::new();
    // In place of the recorder: says that it was started.
    let recorder = "#!/bin/sh\necho started >> \"$P/out/started\"\n";
    fs::write(place.0.join("out/recorder"), recorder).expect("a file");
    open_to_all(&place.0.join("out/recorder"), 0o755);
    fs::copy(place.0.join("bin/program"), place.0.join("out/raised")).expect("a copy");
    // The loader takes variables out of the environment of such a program, if it has some of those.
    let script = format!(
        "{preloaded}
        chmod 4755 $P/out/raised && echo $P/bin/libgputrace.so > /etc/ld.so.preload
        export GPUTRACE_RECORDER=$P/out/recorder GPUTRACE_EXIT_WAIT=0
        for program in \"LD_LIBRARY_PATH=/nowhere $P/out/raised\" \"-u LD_LIBRARY_PATH $P/out/raised\" $P/bin/program; do
            setpriv --reuid=65534 --regid=65534 --clear-groups env $program 50 1 rights; echo ended $?
            ls /dev/shm | wc -l; test ! -e $P/out/started || cat $P/out/started
        done"
    );
    let output = run(place.shell(OWN_MOUNTS, &script));
    let said = text(&output.stderr);
    let told = text(&output.stdout);
    if told.starts_with("rights of its own: 0\n") {
        return skip("a set-user-ID program", "programs get no rights of their own here (nosuid)");
    }
    let raised = "rights of its own: 1\ndone 50, 0 failed\nended 0\n0\n".repeat(2);
    // So it is not for another reason that nothing came of them.
    let plain = "rights of its own: 0\ndone 50, 0 failed\nended 0\n1\nstarted\n";
    assert_eq!(told, raised + plain, "{said}");
    assert_eq!(said.matches("gputrace: ").count(), 1, "{said}");
}

/// The ring of a program whose recorder cannot be started, as the program says it.
fn ring_of(said: &str) -> Option<String> {
    Some(said.split_once("stay in ")?.1.split_once(": `gputrace recover`")?.0.to_owned())
}

fn recover(place: &Place, container: &[&str], ring: &str, more: &str) -> Output {
    run(place
        .shell(container, &format!("$P/bin/gputrace recover --keep {more} -o $P/out/recovered.gtr {ring}")))
}

#[test]
fn a_ring_is_not_taken_from_a_program_of_another_container_that_lives() {
    if !can(OWN_PROCESSES, "true") {
        return;
    }
    let place = Place::new();
    // The program lives in a container of its own, and shares /dev/shm with all.
    fs::remove_file(place.0.join("bin/gputrace")).expect("ours");
    let script = "exec $RUN PATH=/nowhere $P/bin/program 20 1 hold $P/out/go 2> $P/out/said";
    let child = place.shell(OWN_PROCESSES, script).stdout(Stdio::piped()).spawn().expect("it starts");
    let began = Instant::now();
    let ring = loop {
        let said = fs::read_to_string(place.0.join("out/said")).unwrap_or_default();
        if let Some(ring) = ring_of(&said) {
            break ring;
        }
        assert!(!is_hang(began, LONG), "it says nothing: {said}");
        std::thread::sleep(Duration::from_millis(10));
    };
    fs::copy(recorded::built().join("gputrace"), place.0.join("bin/gputrace")).expect("a copy");
    // From the host, and from a container beside it, in both of which its number is somebody else's or nobody's.
    for container in [&["env"][..], OWN_PROCESSES] {
        let refused = recover(&place, container, &ring, "");
        let said = text(&refused.stderr);
        assert!(!refused.status.success(), "{container:?}: {said}");
        assert!(said.contains("in another PID namespace") && said.contains("--process-is-gone"), "{said}");
        assert_eq!(place.traces(), [] as [PathBuf; 0]);
    }
    fs::write(place.0.join("out/go"), "").expect("a file");
    let output = end(child);
    assert_eq!(text(&output.stdout), "done 20, 0 failed\n");
    // Now nobody maps it any more.
    let made = recover(&place, OWN_PROCESSES, &ring, "");
    assert!(made.status.success(), "{}", text(&made.stderr));
    assert_eq!(count(&place.trace(), Action::Alloc), 20);
    place.traces().iter().for_each(|trace| fs::remove_file(trace).expect("ours"));
    let again = recover(&place, &["env"], &ring, "");
    assert!(again.status.success(), "{}", text(&again.stderr));
    assert_eq!(count(&place.trace(), Action::Alloc), 20);
    fs::remove_file(ring).expect("it was kept");
}

#[test]
fn the_drivers_figure_is_found_by_another_number_or_not_at_all() {
    if !can(OWN_PROCESSES, "true") {
        return;
    }
    // Alone on the device; beside one that does something else; known by the number that it has itself.
    let others = "$P/bin/program 60 70 keep & ";
    let cases = [
        ("FAKE_NVML_PIDS=offset:70000", "", "only process"),
        ("FAKE_NVML_PIDS=offset:70000", others, "by its changes"),
        ("FAKE_NVML_PIDS=offset:0", "", "by pid"),
    ];
    for (numbers, before, way) in cases {
        let place = Place::new();
        let script = format!(
            "export FAKE_CUDA_STATE=$P/out/state FAKE_CUDA_MEMORY=64GiB {numbers}
            {before} $RUN $P/bin/program 9 400 keep; wait"
        );
        let output = run(place.shell(OWN_PROCESSES, &script));
        assert!(output.status.success(), "{}", text(&output.stderr));
        let trace = place.trace();
        let found: Vec<String> = notes(&trace)
            .into_iter()
            .filter_map(|note| Some(note.strip_prefix("nvml.process=")?.to_owned()))
            .collect();
        let number = u64::from(trace.process().pid) + if numbers.ends_with("70000") { 70_000 } else { 0 };
        assert_eq!(found.last(), Some(&format!("{way} {number}")), "{found:?}");
        let charged = trace.events().filter_map(|event| match event.kind {
            EventKind::Sample(sample) => sample.process_used,
            _ => None,
        });
        // 1 to 7 times 8 MiB, then 8 and 16 again.
        assert_eq!(charged.last().map(|bytes| bytes.0), Some((28 + 3) * (8 << 20)), "{way}");
        let report =
            run(place
                .shell(&["env"], &format!("$P/bin/gputrace report --all {}", place.traces()[0].display())));
        let told = text(&report.stdout);
        let expected = match way {
            "only process" => "the only one on a device where this process had memory",
            "by its changes" => "the one whose memory changed as allocations of this process did",
            _ => "The driver's own figures",
        };
        assert!(told.contains(expected), "{way}: {told}");
    }
}
