//! Processes that are killed, that hurry, or that cannot be seen.

use crate::support::*;
use gputrace_recorder::{Inherited, Options, record};
use gputrace_ring::map::{COMPLETE, EXITING, Map, RECORDING};
use gputrace_ring::ring::{Producer, Pushed, WRITING};
use gputrace_schemas::event::EventKind;
use gputrace_schemas::reader::Trace;
use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::os::fd::IntoRawFd;
use std::process::{Child, Command};
use std::sync::atomic::Ordering;
use std::time::Duration;

#[test]
fn a_killed_process_loses_nothing_that_it_had_written() {
    let folder = Folder::new("kill");
    let mut random: u64 = 88_172_645_463_325_252;
    let (mut n_events, mut n_lost) = (0, 0);
    for turn in 0..60 {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let ring = folder.join(&format!("ring{turn}"));
        // Few chunks make full rings and often reused chunks.
        let (mut child, counters) =
            start_producer(&ring, 1 + turn % 4, 0, if turn % 3 == 0 { 8 } else { 128 });
        let options = options(&folder, &format!("{turn}.gtr"));
        let recording = std::thread::spawn({
            let ring = ring.clone();
            move || record(&ring, options).unwrap()
        });
        std::thread::sleep(Duration::from_micros(random % 60_000));
        child.0.kill().unwrap();
        let status = child.0.wait().unwrap();
        assert!(!status.success());
        let summary = recording.join().unwrap();
        let found = check_numbers(&Trace::open(&summary.trace).unwrap());
        for thread in 0..1 + turn % 4 {
            let known = counters.counters()[thread as usize].load(Ordering::Acquire);
            let found = found.get(&thread).copied().unwrap_or_default();
            // The record is in before the thread counts it.
            assert!(found == known || found == known + 1, "turn {turn} thread {thread}: {found} of {known}");
            n_events += found;
        }
        n_lost += summary.n_lost;
        assert_eq!(summary.n_damaged, 0);
        fs::remove_file(summary.trace).unwrap();
    }
    println!("60 kills, {n_events} events recovered, {n_lost} refused by full rings, 0 torn");
}

#[test]
fn a_process_that_is_gone_right_after_it_came_to_its_exit_has_exited() {
    for turn in 0..20 {
        let folder = Folder::new("hurries");
        let ring = folder.join("ring");
        let mut child = Running(Command::new("sleep").arg("1000").spawn().unwrap());
        let memory = Mapped::create(&ring, Map::bytes_for(16));
        let map = memory.make_ring(16, child.0.id());
        // Its child knows that it lived, even where it is gone before the first look.
        let options = Options { is_its_child: true, ..options(&folder, "a.gtr") };
        let recording = std::thread::spawn(move || record(&ring, options).unwrap());
        while map.header().recorder.value.load(Ordering::Acquire) != RECORDING {
            std::thread::sleep(Duration::from_millis(1));
        }
        // At various moments of the recorder's turn.
        std::thread::sleep(Duration::from_micros(317 * turn));
        map.header().process.value.store(EXITING, Ordering::Release);
        child.0.kill().unwrap();
        child.0.wait().unwrap();
        let trace = Trace::open(&recording.join().unwrap().trace).unwrap();
        // Whether its mappings could still be read is the machine's business.
        let is_of_mappings =
            |kind: &EventKind| matches!(kind, EventKind::Note(note) if note.starts_with("mappings="));
        let events = trace.events().map(|event| event.kind);
        let notes: Vec<_> = events.filter(|kind| !is_of_mappings(kind)).collect();
        assert_eq!(notes, [EventKind::Note("process.end=exit".to_owned())]);
    }
}

#[test]
fn what_other_threads_write_after_the_end_was_announced_follows() {
    let folder = Folder::new("late");
    let trace = recording(&folder, 16, |map| {
        let mut producer = Producer::new(map, tid(), tid());
        producer.push_brief(producer.now(), 0, &numbered(0, 0));
        map.header().process.value.store(EXITING, Ordering::Release);
        while map.header().recorder.value.load(Ordering::Acquire) != COMPLETE {
            std::thread::sleep(Duration::from_millis(1));
        }
        let early = Trace::open(folder.join("a.gtr")).unwrap();
        assert!(early.is_complete(), "the program may end now, and its trace is whole");
        assert_eq!(check_numbers(&early)[&0], 1);
        producer.push_brief(producer.now(), 0, &numbered(0, 1));
        producer.complete();
    });
    assert_eq!(check_numbers(&trace)[&0], 2);
}

/// What the process may still use, however it looks from outside.
#[test]
fn a_process_that_cannot_be_seen_is_alive_and_keeps_its_lines_and_chunks() {
    let folder = Folder::new("unseen");
    let ring = folder.join("ring");
    let memory = Mapped::create(&ring, Map::bytes_for(8));
    // Nothing in `/proc` has this number: as with hidepid, or where the recorder has no descriptors left.
    let map = memory.make_ring(8, NOBODY);
    let process = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let mut process = Running(process);
    let descriptor = descriptor_of(&process.0);
    let shared = OpenOptions::new().read(true).write(true).open(&ring).unwrap().into_raw_fd();
    let inherited = Inherited { ring: Some(shared), process: Some(descriptor) };
    let orders = Options { inherited, is_its_child: true, ..options(&folder, "a.gtr") };
    let recorder = std::thread::spawn({
        let ring = ring.clone();
        move || record(&ring, orders).unwrap()
    });
    let mut producer = on_line(map, 7);
    for n in 0..10 {
        assert_eq!(producer.push_brief(producer.now(), 0, &numbered(0, n)), Pushed::Yes);
        std::thread::sleep(Duration::from_millis(150));
        assert_eq!(map.thread(7).tid.load(Ordering::Acquire), 7);
        assert_eq!(map.state(0).load(Ordering::Acquire), WRITING);
        assert!(!recorder.is_finished());
    }
    process.0.kill().unwrap();
    let summary = recorder.join().unwrap();
    assert_eq!(check_numbers(&Trace::open(&summary.trace).unwrap()), HashMap::from([(0, 10)]));
    assert!(!ring.exists());
}

fn descriptor_of(child: &Child) -> i32 {
    // SAFETY: takes two numbers, and gives a new descriptor.
    let descriptor = unsafe { libc::syscall(libc::SYS_pidfd_open, child.id(), 0) };
    assert!(descriptor >= 0, "{}", std::io::Error::last_os_error());
    descriptor as i32
}
