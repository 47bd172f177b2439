//! Which rings are read, which are refused, and what is left of one that is damaged or cut.

use crate::support::*;
use gputrace_recorder::{Inherited, Options, record};
use gputrace_ring::map::{LOCKED, Map, NO_RECORDER, Writer};
use gputrace_ring::ring::{Pushed, Reader};
use gputrace_schemas::event::EventKind;
use gputrace_schemas::reader::Trace;
use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Duration;

#[test]
fn a_ring_without_a_recorder_becomes_a_trace_afterwards() {
    let folder = Folder::new("recover");
    let ring = folder.join("ring");
    let (mut child, counters) = start_producer(&ring, 2, 0, 64);
    child.0.kill().unwrap();
    child.0.wait().unwrap();
    let summary = record(&ring, options(&folder, "a.gtr")).unwrap();
    let found = check_numbers(&Trace::open(&summary.trace).unwrap());
    for thread in 0..2 {
        let known = counters.counters()[thread as usize].load(Ordering::Acquire);
        let found = found.get(&thread).copied().unwrap_or_default();
        assert!(found == known || found == known + 1, "{found} of {known}");
    }
}

#[test]
fn a_recorder_waits_for_another_one_that_is_just_going() {
    let folder = Folder::new("going");
    let writer = Writer { pid: NOBODY, pid_namespace: own_namespace(), start_time: 0 };
    let (ring, _memory, _) = left_behind(&folder, writer);
    let other = fs::File::open(&ring).unwrap();
    other.lock().unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| record(&ring, options(&folder, "a.gtr")));
        // Long enough for a first try; where it comes later, nobody waits.
        std::thread::sleep(Duration::from_millis(100));
        drop(other);
        let summary = waiting.join().unwrap().unwrap();
        assert_eq!(check_numbers(&Trace::open(&summary.trace).unwrap()), HashMap::from([(0, 1)]));
    });
}

#[test]
fn a_file_that_is_no_ring_is_refused() {
    let folder = Folder::new("no-ring");
    let refuse = |bytes: usize| {
        let ring = folder.join("ring");
        fs::write(&ring, vec![7; bytes]).unwrap();
        let error = record(&ring, options(&folder, "a.gtr")).unwrap_err().to_string();
        error.split_once("not a readable ring: ").unwrap().1.to_owned()
    };
    let short = format!(
        "it is shorter than the expected {} bytes; its process died while creating it, and nothing is lost",
        Map::bytes_for(1)
    );
    assert_eq!(refuse(100), short);
    assert_eq!(
        refuse(Map::bytes_for(1)),
        "it does not begin like a ring; if its process died while creating it, nothing is lost"
    );
}

#[test]
fn random_bytes_in_the_ring_give_a_trace_and_never_a_panic() {
    for seed in 1..40_u64 {
        let folder = Folder::new(&format!("random{seed}"));
        let ring = folder.join("ring");
        let n_chunks = 6;
        let memory = Mapped::create(&ring, Map::bytes_for(n_chunks));
        // A pid that no process has.
        let map = memory.make_ring(n_chunks, 0x7fff_fff0);
        let mut random = seed;
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        let mut bytes = fs::read(&ring).unwrap();
        let from = if seed % 2 == 0 {
            bytes.len() - n_chunks as usize * gputrace_ring::map::CHUNK_BYTES
        } else {
            64
        };
        for word in bytes[from..].chunks_mut(8) {
            let value = match next() % 4 {
                // A plausible record header or chunk state.
                0 => (next() % 12) | ((next() % 28) << 16) | ((next() % 1000) << 32),
                1 => (next() % 4) | ((next() % 4) << 32),
                2 => 0,
                _ => next(),
            };
            word.copy_from_slice(&value.to_le_bytes()[..word.len()]);
        }
        fs::write(&ring, &bytes).unwrap();
        for chunk in 0..n_chunks {
            map.state(chunk).store(2 + chunk % 2, Ordering::Relaxed);
        }
        let summary = record(&ring, options(&folder, "a.gtr")).unwrap();
        let trace = Trace::open(&summary.trace).unwrap();
        assert!(trace.is_complete());
        assert_eq!(trace.events().count() as u64, summary.n_events, "seed {seed}");
    }
}

#[test]
fn a_ring_that_is_kept_gives_the_same_again() {
    let folder = Folder::new("twice");
    let writer = Writer { pid: NOBODY, pid_namespace: own_namespace(), start_time: 0 };
    let (ring, _memory, map) = left_behind(&folder, writer);
    let mut other = on_line(map, 8);
    // Complete chunks are left as they are, too.
    for n in 0..600 {
        assert_eq!(other.push_brief(other.now(), 0, &numbered(1, n)), Pushed::Yes);
    }
    let states = || -> Vec<u32> { (0..4).map(|chunk| map.state(chunk).load(Ordering::Acquire)).collect() };
    let before = states();
    assert!(before.contains(&gputrace_ring::ring::COMPLETE), "{before:?}");
    for turn in ["a.gtr", "b.gtr"] {
        let summary = record_again(&ring, &Options { keep_ring: true, ..options(&folder, turn) }).unwrap();
        let found = check_numbers(&Trace::open(&summary.trace).unwrap());
        assert_eq!(found, HashMap::from([(0, 1), (1, 600)]), "{turn}");
        assert_eq!(states(), before, "{turn}");
        let owners = [7, 8].map(|line| map.thread(line).tid.load(Ordering::Acquire));
        assert_eq!(owners, [7, 8], "{turn}");
    }
    record_again(&ring, &options(&folder, "c.gtr")).unwrap();
    assert!(!ring.exists());
}

#[test]
fn a_ring_of_another_namespace_is_read_only_when_its_process_is_known_to_be_gone() {
    let folder = Folder::new("elsewhere");
    let writer = Writer { pid: 1, pid_namespace: own_namespace() + 1, start_time: 0 };
    let (ring, _memory, map) = left_behind(&folder, writer);
    let refused = |is: &str| {
        let error = record(&ring, options(&folder, "a.gtr")).unwrap_err().to_string();
        assert!(error.contains(is) && error.contains("--process-is-gone"), "{error}");
        assert_eq!(map.header().recorder.value.load(Ordering::Acquire), NO_RECORDER, "nothing is changed");
        assert!(ring.exists() && !folder.join("a.gtr").exists());
    };
    refused("may be alive");
    // What the process's mapping holds: another open file description than the recorder's.
    let file = OpenOptions::new().read(true).open(&ring).unwrap();
    map.header().lock.store(LOCKED, Ordering::Relaxed);
    read_lock(&file);
    refused("is alive");
    drop(file);
    let summary = record_again(&ring, &Options { keep_ring: true, ..options(&folder, "a.gtr") }).unwrap();
    assert_eq!(check_numbers(&Trace::open(&summary.trace).unwrap()), HashMap::from([(0, 1)]));
    map.header().lock.store(0, Ordering::Relaxed);
    let told = Options { process_is_gone: true, ..options(&folder, "b.gtr") };
    let summary = record_again(&ring, &told).unwrap();
    assert_eq!(check_numbers(&Trace::open(&summary.trace).unwrap()), HashMap::from([(0, 1)]));
}

/// As libgputrace.so takes it.
fn read_lock(file: &fs::File) {
    // SAFETY: all zeros are a value of this structure: the whole file.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_RDLCK as libc::c_short;
    // SAFETY: the descriptor is ours, and the kernel reads the structure.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) }, 0);
}

#[test]
fn a_ring_is_recorded_by_its_descriptor_whatever_its_name_leads_to() {
    let folder = Folder::new("descriptor");
    let writer = Writer { pid: NOBODY, pid_namespace: own_namespace(), start_time: 0 };
    let (ring, _memory, _map) = left_behind(&folder, writer);
    let shared = OpenOptions::new().read(true).write(true).open(&ring).unwrap().into_raw_fd();
    // The name is gone, and another file has it.
    fs::rename(&ring, folder.join("moved")).unwrap();
    fs::write(&ring, "precious").unwrap();
    let inherited = Inherited { ring: Some(shared), process: None };
    let orders = Options { inherited, is_its_child: true, keep_ring: true, ..options(&folder, "a.gtr") };
    let summary = record(&ring, orders).unwrap();
    assert_eq!(check_numbers(&Trace::open(&summary.trace).unwrap()), HashMap::from([(0, 1)]));
    assert_eq!(fs::read_to_string(&ring).unwrap(), "precious");
}

#[test]
fn a_ring_that_is_cut_ends_the_trace_and_nothing_else() {
    let folder = Folder::new("cut");
    let ring = folder.join("ring");
    let memory = Mapped::create(&ring, Map::bytes_for(64));
    let map = memory.make_ring(64, std::process::id());
    let orders = options(&folder, "a.gtr");
    let recorder = std::thread::spawn({
        let ring = ring.clone();
        move || record(&ring, orders).unwrap()
    });
    let mut producer = on_line(map, 7);
    for n in 0..1000 {
        assert_eq!(producer.push_brief(producer.now(), 0, &numbered(0, n)), Pushed::Yes);
    }
    // Until it has been read.
    while map.state(0).load(Ordering::Acquire) != gputrace_ring::ring::FREE {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(100));
    OpenOptions::new().write(true).open(&ring).unwrap().set_len(0).unwrap();
    let summary = recorder.join().unwrap();
    let trace = Trace::open(&summary.trace).unwrap();
    assert!(trace.is_complete());
    let notes = trace.events().filter_map(|event| match event.kind {
        EventKind::Note(text) => Some(text),
        _ => None,
    });
    assert_eq!(notes.filter(|note| note.starts_with("ring.cut")).count(), 1);
    let n_read = trace.events().filter(|event| matches!(event.kind, EventKind::BlockFree(_))).count();
    assert!((500..=1000).contains(&n_read), "{n_read}");
}

#[test]
fn what_is_no_ring_of_ours_is_not_even_opened() {
    let folder = Folder::new("not-ours");
    let refuse = |ring: &Path, what: &str| {
        let error = record(ring, options(&folder, "a.gtr")).unwrap_err();
        let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
        assert!(format!("{error}{cause}").contains(what), "{error}{cause}");
    };
    let fifo = folder.join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    // Nobody writes to it: opening it would wait for ever.
    refuse(&fifo, "not a regular file");
    refuse(Path::new("/dev/null"), "not a regular file");
    refuse(&folder.0, "not a regular file");
    let writer = Writer { pid: NOBODY, pid_namespace: own_namespace(), start_time: 0 };
    let (ring, _memory, _map) = left_behind(&folder, writer);
    let link = folder.join("link");
    std::os::unix::fs::symlink(&ring, &link).unwrap();
    refuse(&link, "it is a link, not a regular file");
    if std::os::unix::fs::chown(&ring, Some(12345), None).is_err() {
        return gputrace_skip::skip("a ring of another user", "only root can give a file to somebody else");
    }
    let us = fs::metadata(&folder.0).unwrap().uid();
    refuse(&ring, &format!("belongs to user 12345, and this is user {us}"));
}

/// A ring of this process in which only the first chunks have memory.
fn ring_in_part(ring: &Path, n_chunks: u32, n_usable: u32) -> (Mapped, Map) {
    let memory = Mapped::create(ring, Map::bytes_for(n_chunks));
    let pid_namespace = fs::metadata("/proc/self/ns/pid").unwrap().ino();
    let writer = Writer { pid: std::process::id(), pid_namespace, ..Writer::default() };
    let (base, clock) = (memory.memory.as_mut_ptr(), gputrace_ring::clock::Clock::of_this_machine());
    // SAFETY: new, zeroed by `set_len`, long enough, and mapped as long as `memory` lives.
    let map = unsafe { Map::create_in_part(base, n_chunks, n_usable, writer, clock) };
    (memory, map)
}

#[test]
fn threads_write_where_the_ring_has_memory_and_nowhere_else() {
    let folder = Folder::new("in-part");
    let (_memory, map) = ring_in_part(&folder.join("ring"), 8, 3);
    let mut producer = on_line(map, 7);
    let mut n = 0;
    let mut fill = || {
        while producer.push_brief(producer.now(), 0, &numbered(0, n)) == Pushed::Yes {
            n += 1;
        }
        (0..8).map(|chunk| map.state(chunk).load(Ordering::Relaxed)).collect::<Vec<_>>()
    };
    let (free, complete) = (gputrace_ring::ring::FREE, gputrace_ring::ring::COMPLETE);
    assert_eq!(fill(), [complete, complete, complete, free, free, free, free, free]);
    Reader::new(map).grow(2);
    assert_eq!(map.n_usable(), 3, "it never shrinks");
    Reader::new(map).grow(5);
    assert_eq!(fill(), [complete, complete, complete, complete, complete, free, free, free]);
    Reader::new(map).grow(u32::MAX);
    assert_eq!(fill(), [complete; 8]);
}

#[test]
fn a_recorder_gives_the_ring_the_rest_of_its_memory() {
    let folder = Folder::new("growth");
    let ring = folder.join("ring");
    let (n_chunks, n_usable) = (1024, 16);
    let (memory, map) = ring_in_part(&ring, n_chunks, n_usable);
    let taken = || fs::metadata(&ring).map_or(0, |data| data.blocks() * 512);
    assert!(taken() < Map::bytes_before(n_chunks, n_usable) as u64);
    let options = options(&folder, "a.gtr");
    let path = ring.clone();
    let recorder = std::thread::spawn(move || record(&path, options).unwrap());
    while map.n_usable() < n_chunks {
        std::thread::sleep(Duration::from_millis(1));
    }
    // Before threads may use it.
    assert!(taken() >= (Map::bytes_for(n_chunks) - Map::bytes_before(n_chunks, n_usable)) as u64);
    assert_eq!(map.header().free_chunks.value.load(Ordering::Relaxed), n_chunks);
    map.header().process.value.store(gputrace_ring::map::OFF, Ordering::Release);
    assert_eq!(recorder.join().unwrap().n_lost, 0);
    drop(memory);
}
