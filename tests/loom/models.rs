//! The ring and the hand-over of thread lines, in every order of memory accesses that a processor may choose, with a
//! bounded number of preemptions. Each model is a few threads and a few records in a ring of one or two chunks; what
//! runs is the code that ships, with loom's atomics.
//!
//! The threads of a model are all spawned, and the one that writes is joined first: loom tries a load at every place among
//! the stores that ran before it, but remembers of each word only the last access, so that a thread which looks at a word
//! before it exchanges it would hide an earlier load of another.
#![cfg(loom)]

use gputrace_ring::clock::{Clock, Ticks};
use gputrace_ring::map::{MAX_THREADS, Map, Writer};
use gputrace_ring::model::Memory;
use gputrace_ring::owners::{Claim, Owners};
use gputrace_ring::record::{Header, Kind};
use gputrace_ring::ring::{ChunkView, Producer, Pushed, Reader};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Orders with more forced switches between threads than this are not tried; `LOOM_MAX_PREEMPTIONS` says otherwise. Races
/// that need more than two are not known to exist outside of constructions (Musuvathi and Qadeer, PLDI 2007).
const PREEMPTIONS: usize = 3;

fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(preemptions));
    builder.max_branches = 100_000;
    let n_orders = std::sync::Arc::new(AtomicU64::new(0));
    let counter = std::sync::Arc::clone(&n_orders);
    builder.check(move || {
        counter.fetch_add(1, Relaxed);
        model();
    });
    let n_orders = n_orders.load(Relaxed);
    println!("{}: {n_orders} orders", std::thread::current().name().unwrap_or_default());
    // A model that tries one order shows nothing.
    assert!(n_orders > 20, "{n_orders} orders");
}

/// A ring, and who holds its memory.
fn ring(n_chunks: u32) -> (Box<Memory>, Map) {
    let memory = Memory::new(n_chunks);
    let writer = Writer { pid: 1, start_time: 0, pid_namespace: 0 };
    // SAFETY: a new memory of so many chunks, dropped when all threads of the model have ended.
    let map = unsafe { Map::create(memory.base(), n_chunks, writer, Clock::Monotonic) };
    (memory, map)
}

/// A record that can be told from any other, and whose parts belong together.
fn push(producer: &mut Producer, number: u64) -> Pushed {
    producer.push_raw(Ticks(0), Kind::Note, &[&number.to_ne_bytes()])
}

/// The numbers of the records of a chunk.
fn records(reader: &Reader, view: &ChunkView) -> Vec<u64> {
    let mut numbers = Vec::new();
    let mut at = 0;
    while at < view.committed {
        let header = Header::decode(reader.word(view.chunk, at));
        assert_eq!((header.words, header.kind), (2, Kind::Note as u8), "a record that is not whole");
        numbers.push(reader.word(view.chunk, at + 8));
        at += 16;
    }
    numbers
}

/// A recorder: what it read of each use of a chunk, and in what order it freed them.
#[derive(Default)]
struct Recorder {
    /// Line, sequence, numbers.
    read: Vec<(u32, u64, Vec<u64>)>,
}

impl Recorder {
    /// As the real one does: everything that is committed, then the complete chunks back to the process.
    fn pass(&mut self, reader: &Reader) {
        let mut views: Vec<ChunkView> =
            (0..reader.map().n_chunks()).filter_map(|chunk| reader.look(chunk)).collect();
        views.sort_by_key(|view| (view.thread, view.sequence));
        let mut stopped = None;
        for view in views {
            if stopped == Some(view.thread) {
                continue;
            }
            let found = records(reader, &view);
            let known = self.read.iter_mut().find(|read| (read.0, read.1) == (view.thread, view.sequence));
            match known {
                Some(known) => {
                    assert_eq!(known.2.as_slice(), &found[..known.2.len()], "what was read is read again");
                    known.2 = found;
                }
                None => self.read.push((view.thread, view.sequence, found)),
            }
            if view.complete {
                reader.free(view.chunk);
            } else {
                stopped = Some(view.thread);
            }
        }
    }

    /// All that a line wrote, in the order of its chunks.
    fn of(mut self, line: u32) -> Vec<u64> {
        self.read.sort();
        self.read.into_iter().filter(|read| read.0 == line).flat_map(|read| read.2).collect()
    }
}

#[test]
fn a_record_is_seen_whole_or_not_at_all() {
    check(PREEMPTIONS, || {
        let (memory, map) = ring(1);
        let writer = thread::spawn(move || {
            let mut producer = Producer::new(map, 0, 7);
            assert_eq!(push(&mut producer, 1), Pushed::Yes);
            assert_eq!(push(&mut producer, 2), Pushed::Yes);
        });
        let reader = Reader::new(map);
        let looker = thread::spawn(move || {
            let mut seen = 0;
            for _ in 0..2 {
                if let Some(view) = reader.look(0) {
                    assert_eq!((view.thread, view.tid), (0, 7), "a chunk header that is not whole");
                    let numbers = records(&reader, &view);
                    assert_eq!(numbers, &[1, 2][..numbers.len()]);
                    assert!(numbers.len() >= seen, "what was visible goes away");
                    seen = numbers.len();
                }
            }
        });
        writer.join().unwrap();
        looker.join().unwrap();
        assert_eq!(records(&reader, &reader.look(0).unwrap()), [1, 2]);
        drop(memory);
    });
}

#[test]
fn a_chunk_that_is_used_again_while_the_recorder_reads_gives_each_record_once_and_in_order() {
    check(2, || {
        let (memory, map) = ring(1);
        let writer = thread::spawn(move || {
            let mut producer = Producer::new(map, 0, 7);
            // Two records fill a chunk, so the third needs it back.
            let pushed = [1, 2, 3].map(|number| (number, push(&mut producer, number)));
            producer.complete();
            pushed
        });
        let reader = Reader::new(map);
        let looker = thread::spawn(move || {
            let mut recorder = Recorder::default();
            recorder.pass(&reader);
            recorder.pass(&reader);
            recorder
        });
        let pushed = writer.join().unwrap();
        let mut recorder = looker.join().unwrap();
        recorder.pass(&reader);
        let expected: Vec<u64> =
            pushed.iter().filter(|(_, pushed)| *pushed == Pushed::Yes).map(|(number, _)| *number).collect();
        assert_eq!(recorder.of(0), expected);
        let n_lost = map.header().lost_full.events.load(Ordering::Relaxed);
        assert_eq!(n_lost, 3 - expected.len() as u64, "a loss that is not counted");
        assert_eq!(map.header().free_chunks.value.load(Ordering::Relaxed), 1, "a chunk that nobody can have");
        drop(memory);
    });
}

#[test]
fn a_full_ring_counts_each_loss_of_each_thread() {
    check(2, || {
        let (memory, map) = ring(1);
        let write = move |line: u32| {
            let mut producer = Producer::new(map, line, line + 7);
            let pushed = push(&mut producer, u64::from(line) + 1);
            producer.complete();
            u64::from(pushed == Pushed::Full)
        };
        let writers = [0, 1].map(|line| thread::spawn(move || write(line)));
        let n_lost: u64 = writers.map(|writer| writer.join().unwrap()).iter().sum();
        assert_eq!(n_lost, 1, "one chunk, which nobody frees");
        assert_eq!(map.header().lost_full.events.load(Ordering::Relaxed), n_lost);
        let reader = Reader::new(map);
        let mut recorder = Recorder::default();
        recorder.pass(&reader);
        assert_eq!(recorder.read.len(), 1);
        drop(memory);
    });
}

#[test]
fn two_threads_that_claim_chunks_get_one_each_and_the_recorder_both() {
    check(2, || {
        let (memory, map) = ring(2);
        let write = move |line: u32| {
            let mut producer = Producer::new(map, line, line + 7);
            (0..2).map(|n| push(&mut producer, u64::from(line) * 10 + n) == Pushed::Yes).collect::<Vec<_>>()
        };
        let writers = [0, 1].map(|line| thread::spawn(move || write(line)));
        let pushed = writers.map(|writer| writer.join().unwrap());
        let reader = Reader::new(map);
        let mut recorder = Recorder::default();
        recorder.pass(&reader);
        recorder.pass(&reader);
        let seen: usize = recorder.read.iter().map(|read| read.2.len()).sum();
        let n_pushed = pushed.iter().flatten().filter(|pushed| **pushed).count();
        assert_eq!(seen, n_pushed);
        // The search for a free chunk may miss one that the other thread passes at that moment, never take one twice.
        assert_eq!(map.header().lost_full.events.load(Ordering::Relaxed), 4 - n_pushed as u64);
        let held = map.header().held_chunks.value.load(Ordering::Relaxed);
        let free = map.header().free_chunks.value.load(Ordering::Relaxed);
        assert_eq!(held + free, 2);
        drop(memory);
    });
}

// Hand-over of a line: the state of each line is memory of the process that only its owner may touch. loom's cells fail
// the model when two threads could.

/// Of the process whose threads hand lines over.
const SESSION: u32 = 1;

struct Lanes {
    owners: Owners,
    states: [UnsafeCell<Option<Producer>>; MAX_THREADS],
    /// By kernel thread id: how many threads have it. The kernel's own knowledge, and never out of date.
    alive: [AtomicU32; 4],
    n_finished: AtomicU32,
}

// SAFETY: loom checks who touches the cells.
unsafe impl Sync for Lanes {}
// SAFETY: as above.
unsafe impl Send for Lanes {}

impl Lanes {
    fn new() -> Lanes {
        Lanes {
            owners: Owners::new(),
            states: core::array::from_fn(|_| UnsafeCell::new(None)),
            alive: core::array::from_fn(|_| AtomicU32::new(0)),
            n_finished: AtomicU32::new(0),
        }
    }

    /// Completes what the last owner of a line left that is the caller's now.
    fn finish(&self, claim: Claim) {
        self.states[claim.line as usize].with_mut(|state| {
            // SAFETY: the line is ours until it is given back, which loom checks.
            let left = unsafe { (*state).take() };
            if let Some(mut left) = left {
                left.complete();
            }
        });
    }

    /// A thread begins: it finishes what others left, takes a line and writes a record.
    fn attach(&self, map: Map, tid: u32, number: u64) -> Option<Claim> {
        self.alive[tid as usize].fetch_add(1, Ordering::AcqRel);
        let is_gone = |claim: Claim| map.tenure(claim.line).is_gone(claim.word);
        self.owners.reclaim(SESSION, None, MAX_THREADS as u32, is_gone, |claim| {
            self.n_finished.fetch_add(1, Ordering::Relaxed);
            self.finish(claim);
        });
        let claim = self.owners.take(SESSION, |_| true)?;
        map.tenure(claim.line).publish(claim.word, tid);
        self.states[claim.line as usize].with_mut(|state| {
            let mut producer = Producer::new(map, claim.line, tid);
            let _ = push(&mut producer, number);
            // SAFETY: the line is ours, which loom checks.
            unsafe { *state = Some(producer) };
        });
        Some(claim)
    }

    /// A thread ends, without a word to anybody.
    fn die(&self, tid: u32) {
        self.alive[tid as usize].fetch_sub(1, Ordering::AcqRel);
    }

    /// A thread ends, and gives its line back.
    fn leave(&self, map: Map, claim: Claim, tid: u32) {
        self.finish(claim);
        map.tenure(claim.line).end(claim.word);
        self.owners.give_back(SESSION, claim);
        self.die(tid);
    }

    /// The recorder's look for holders of lines that are gone.
    fn look(&self, map: Map) {
        for line in 0..MAX_THREADS as u32 {
            let Some((word, tid)) = map.tenure(line).claim() else { continue };
            // A load could be of an older value: the kernel's answer is not.
            if self.alive[tid as usize].fetch_add(0, Ordering::AcqRel) == 0 {
                map.tenure(line).note_gone(word);
            }
        }
    }
}

#[test]
fn what_a_thread_left_is_finished_by_one_of_those_that_come_and_its_line_has_one_owner() {
    check(2, || {
        let (memory, map) = ring(2);
        let lanes = Arc::new(Lanes::new());
        assert_eq!(lanes.attach(map, 1, 10).map(|claim| claim.line), Some(0));
        lanes.die(1);
        lanes.look(map);
        let heirs = [2, 3].map(|tid| {
            let lanes = Arc::clone(&lanes);
            thread::spawn(move || lanes.attach(map, tid, u64::from(tid) * 10))
        });
        let [mine, theirs] = heirs.map(|heir| heir.join().unwrap().map(|claim| claim.line));
        assert!(mine.is_some() && theirs.is_some() && mine != theirs, "two owners of line {mine:?}");
        assert_eq!(lanes.n_finished.load(Ordering::Relaxed), 1, "finished once");
        let reader = Reader::new(map);
        let mut recorder = Recorder::default();
        recorder.pass(&reader);
        let first: Vec<_> = recorder.read.iter().filter(|read| read.2 == [10]).collect();
        assert_eq!(first.len(), 1, "what the dead thread wrote");
        drop(memory);
    });
}

#[test]
fn a_line_is_taken_over_once_its_owner_is_known_to_be_gone_or_not_at_all() {
    check(2, || {
        let (memory, map) = ring(2);
        let lanes = Arc::new(Lanes::new());
        let theirs = Arc::clone(&lanes);
        let other = thread::spawn(move || {
            let claim = theirs.attach(map, 1, 10);
            theirs.die(1);
            claim
        });
        let looks = Arc::clone(&lanes);
        let recorder = thread::spawn(move || looks.look(map));
        let heirs = Arc::clone(&lanes);
        let heir = thread::spawn(move || heirs.attach(map, 2, 20));
        let theirs = other.join().unwrap();
        recorder.join().unwrap();
        let mine = heir.join().unwrap();
        let (mine, theirs) = (mine.unwrap(), theirs.unwrap());
        let n_finished = lanes.n_finished.load(Ordering::Relaxed);
        assert!(n_finished <= 1 && (mine.line != theirs.line || n_finished == 1), "{mine:?} {theirs:?}");
        drop(memory);
    });
}

#[test]
fn what_the_recorder_saw_of_an_earlier_claim_never_frees_the_line_of_the_living() {
    check(2, || {
        let (memory, map) = ring(2);
        let lanes = Arc::new(Lanes::new());
        let first = lanes.attach(map, 1, 10).unwrap();
        // It gives its line back while the recorder looks for it, and a thread of the same number comes.
        let theirs = Arc::clone(&lanes);
        let other = thread::spawn(move || {
            theirs.leave(map, first, 1);
            theirs.attach(map, 1, 11)
        });
        let looks = Arc::clone(&lanes);
        let recorder = thread::spawn(move || looks.look(map));
        let heirs = Arc::clone(&lanes);
        let heir = thread::spawn(move || heirs.attach(map, 2, 20));
        let theirs = other.join().unwrap().unwrap();
        recorder.join().unwrap();
        let mine = heir.join().unwrap().unwrap();
        assert!(mine.line != theirs.line, "{mine:?} {theirs:?}");
        assert!(lanes.owners.is_held(SESSION, theirs) && lanes.owners.is_held(SESSION, mine));
        drop(memory);
    });
}
