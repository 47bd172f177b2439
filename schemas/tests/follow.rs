//! Who follows a trace while it is written has read, in the end, what is in it: once, and with the names it needs.

use gputrace_schemas::event::*;
use gputrace_schemas::reader::{Follower, Trace};
use gputrace_schemas::writer::Writer;
use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        Scratch(std::env::temp_dir().join(format!("gputrace-follow-{name}-{}.gtr", std::process::id())))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn note(n: u64) -> Event {
    Event { time: Nanos(n), thread: ThreadId(0), stack: StackId(0), kind: EventKind::Note(n.to_string()) }
}

/// Blocks of three events, each with a text of its own, from this one on.
fn write(writer: &mut Writer<File>, from: u64, blocks: u64) {
    for block in from..from + blocks {
        writer.process(&Process { pid: 42, ..Process::default() });
        writer.text(TextId(block as u32 + 1), &format!("text {block}"));
        for n in 0..3 {
            writer.event(&note(block * 3 + n)).unwrap();
        }
        writer.flush().unwrap();
    }
}

fn times(events: &[Event]) -> Vec<u64> {
    events.iter().map(|event| event.time.0).collect()
}

/// Reads everything that is there; the texts known then.
fn read(follower: &mut Follower, most: usize) -> (Vec<u64>, usize) {
    let mut events = vec![];
    while follower.read(most, &mut events).unwrap().is_behind {}
    (times(&events), follower.definitions().texts().len())
}

#[test]
fn each_reading_gives_what_came_since_and_the_end_is_seen() {
    let file = Scratch::new("grows");
    let mut writer = Writer::new(File::create(&file.0).unwrap()).unwrap();
    let mut follower = Follower::open(&file.0).unwrap();
    assert_eq!(read(&mut follower, 2), (vec![], 0));
    write(&mut writer, 0, 3);
    assert_eq!(read(&mut follower, 2), ((0..9).collect(), 4));
    assert_eq!(read(&mut follower, 2), (vec![], 4));
    write(&mut writer, 3, 1);
    assert_eq!(read(&mut follower, 64), ((9..12).collect(), 5));
    assert_eq!((follower.definitions().process().pid, follower.definitions().is_complete()), (42, false));
    writer.try_finish().unwrap();
    assert_eq!(read(&mut follower, 64), (vec![], 5));
    assert!(follower.definitions().is_complete());
    // The recorder had thought that nothing would follow.
    writer.reopen();
    let whole = writer.position();
    writer.sink().set_len(whole).unwrap();
    writer.sink().seek(SeekFrom::Start(whole)).unwrap();
    write(&mut writer, 4, 2);
    assert_eq!(read(&mut follower, 64), ((12..18).collect(), 7));
    assert!(!follower.definitions().is_complete());
    assert_eq!(follower.definitions().damages(), []);
}

#[test]
fn a_block_is_read_when_all_of_it_is_there() {
    let (whole, part) = (Scratch::new("whole"), Scratch::new("part"));
    let mut writer = Writer::new(File::create(&whole.0).unwrap()).unwrap();
    write(&mut writer, 0, 3);
    let bytes = fs::read(&whole.0).unwrap();
    fs::write(&part.0, &bytes[..8]).unwrap();
    let mut follower = Follower::open(&part.0).unwrap();
    let mut file = OpenOptions::new().append(true).open(&part.0).unwrap();
    let (mut events, mut seen) = (vec![], vec![]);
    for byte in &bytes[8..] {
        file.write_all(&[*byte]).unwrap();
        follower.read(64, &mut events).unwrap();
        if seen.last() != Some(&events.len()) {
            seen.push(events.len());
        }
    }
    assert_eq!((seen, times(&events)), (vec![0, 3, 6, 9], (0..9).collect()));
    assert_eq!(follower.definitions().damages(), []);
}

#[test]
fn what_a_full_disk_left_between_blocks_is_passed_over_and_told() {
    let file = Scratch::new("gap");
    let mut writer = Writer::new(File::create(&file.0).unwrap()).unwrap();
    write(&mut writer, 0, 1);
    let mut follower = Follower::open(&file.0).unwrap();
    read(&mut follower, 64);
    let append =
        |bytes: &[u8]| OpenOptions::new().append(true).open(&file.0).unwrap().write_all(bytes).unwrap();
    append(&[7; 100]);
    assert_eq!(read(&mut follower, 64).0, [0_u64; 0]);
    let other = Scratch::new("gap-other");
    let mut writer = Writer::new(File::create(&other.0).unwrap()).unwrap();
    write(&mut writer, 1, 1);
    append(&fs::read(&other.0).unwrap()[8..]);
    assert_eq!(read(&mut follower, 64).0, [3, 4, 5]);
    assert_eq!(follower.definitions().damages().iter().map(|it| it.bytes).collect::<Vec<_>>(), [100]);
}

#[test]
fn a_finished_trace_is_followed_to_the_same_events() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/version1.gtr");
    let trace = Trace::open(&golden).unwrap();
    let mut follower = Follower::open(&golden).unwrap();
    let mut events = vec![];
    while follower.read(1, &mut events).unwrap().is_behind {}
    events.sort_by_key(|event| event.time);
    assert!(events.iter().eq(&trace.events().collect::<Vec<_>>()));
    let followed = follower.definitions();
    assert!(followed.is_complete());
    assert_eq!((followed.process(), followed.stacks()), (trace.process(), trace.stacks()));
    assert_eq!((followed.frames(), followed.threads()), (trace.frames(), trace.threads()));
}

/// A segment of a bounded recording: `held`, then `own`.
fn segment(path: &Path, number: u32, since: u64, held: &[u64], own: &[u64]) -> Writer<File> {
    let mut writer = Writer::new(File::create(path).unwrap()).unwrap();
    writer.process(&Process { pid: 42, segment: number, since: Nanos(since), ..Process::default() });
    writer.flush().unwrap();
    let held: Vec<Event> = held.iter().map(|n| note(*n)).collect();
    writer.held(&held).unwrap();
    own.iter().for_each(|n| writer.event(&note(*n)).unwrap());
    writer.flush().unwrap();
    writer
}

#[test]
fn a_recording_that_goes_on_in_another_file_is_followed_there_and_nothing_is_read_twice() {
    let file = Scratch::new("segments");
    let (next, older) = (file.0.with_extension("next"), gputrace_schemas::reader::segment_name(&file.0, 1));
    let mut first = segment(&file.0, 1, 0, &[], &[1, 2, 3]);
    let mut follower = Follower::open(&file.0).unwrap();
    assert_eq!(read(&mut follower, 64).0, [1, 2, 3]);
    first.event(&note(4)).unwrap();
    first.flush().unwrap();
    segment(&next, 2, 4, &[2, 4], &[5]);
    fs::hard_link(&file.0, &older).unwrap();
    fs::rename(&next, &file.0).unwrap();
    assert_eq!(read(&mut follower, 64).0, [4, 5]);
    // Who begins now sees what is held; who opens both sees everything once.
    assert_eq!(read(&mut Follower::open(&file.0).unwrap(), 64).0, [2, 4, 5]);
    let both = |path: &Path| times(&Trace::open(path).unwrap().events().collect::<Vec<_>>());
    assert_eq!((both(&file.0), both(&older)), (vec![1, 2, 3, 4, 5], vec![1, 2, 3, 4, 5]));
    // Without the older one the trace begins with what was held.
    fs::remove_file(older).unwrap();
    assert_eq!(both(&file.0), [2, 4, 5]);
    assert_eq!(Trace::open(&file.0).unwrap().since(), Some(Nanos(4)));
}
