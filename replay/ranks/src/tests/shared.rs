//! Memory that processes share.

use super::{collect, text};
use crate::calls::Participant;
use crate::report::Ranks;
use crate::shared::Known;
use gputrace_trace::scene::recording;
use gputrace_trace::source::Source;

fn process(pid: u32, scene: &str) -> Participant {
    let mut recording = recording(scene);
    recording.process.pid = pid;
    recording.process.rank = None;
    recording.process.host = "host".into();
    collect(&Source::of(&format!("job/{pid}.gtr"), recording))
}

fn ranks(scenes: &[&str]) -> Ranks {
    let all: Vec<_> = scenes.iter().zip(1..).map(|(scene, pid)| process(pid, scene)).collect();
    Ranks::of(&all, &|_| None)
}

/// Exporter, importers, pieces, MiB, and how it is known.
type Row<'a> = (Option<&'a str>, Vec<&'a str>, u64, Option<u64>, Known);

fn rows(ranks: &Ranks) -> Vec<Row<'_>> {
    ranks
        .shared
        .iter()
        .map(|it| {
            let importers = it.importers.iter().map(String::as_str).collect();
            (it.exporter.as_deref(), importers, it.pieces, it.bytes.map(|bytes| bytes >> 20), it.known)
        })
        .collect()
}

#[test]
fn what_one_process_gives_and_others_open_is_counted_once() {
    let ranks = ranks(&[
        "Alloc addr=0x10000000 bytes=20M
         Alloc addr=0x20000000 bytes=4M
         IpcGet addr=0x10000000 handle=0x11 by=share@/job/a.py:4
         IpcGet addr=0x10000000 handle=0x11 by=share@/job/a.py:4
         IpcGet addr=0x20000100 handle=0x12 by=share@/job/a.py:5",
        "IpcOpen addr=0x70000000 handle=0x11\nIpcOpen addr=0x71000000 handle=0x12",
        "IpcOpen addr=0x70000000 handle=0x11\nIpcOpen addr=0x71000000 handle=0x12\nIpcOpen addr=0x72000000 handle=0x11",
        "IpcOpen addr=0x70000000 handle=0x11",
    ]);
    assert_eq!(
        rows(&ranks),
        [
            (Some("1.gtr"), vec!["2.gtr", "3.gtr", "4.gtr"], 1, Some(20), Known::ByHandle),
            (Some("1.gtr"), vec!["2.gtr", "3.gtr"], 1, Some(4), Known::ByHandle),
        ]
    );
}

#[test]
fn a_handle_that_nobody_made_is_not_known() {
    let ranks = ranks(&["Alloc addr=0x10000000 bytes=20M", "IpcOpen addr=0x70000000 handle=0x99"]);
    assert_eq!(rows(&ranks), [(None, vec!["2.gtr"], 1, None, Known::No)]);
}

const GIVES: &str = "Create handle=0x5 bytes=2M\nExport handle=0x5 extra=1";
const TAKES: &str = "Import handle=0x7 extra=1\nMap addr=0x70000000 bytes=2M handle=0x7";

#[test]
fn what_came_by_descriptor_is_likely_of_the_only_one_who_gave_any() {
    let one = ranks(&[GIVES, TAKES, TAKES]);
    assert_eq!(rows(&one), [(Some("1.gtr"), vec!["2.gtr", "3.gtr"], 2, Some(4), Known::OnlyOne)]);
    let two = ranks(&[GIVES, GIVES, TAKES]);
    assert_eq!(rows(&two), [(None, vec!["3.gtr"], 1, Some(2), Known::No)]);
}

#[test]
fn fabric_handles_have_a_name_at_both_ends() {
    let fabric = ranks(&[
        "Create handle=0x5 bytes=6M\nExport handle=0x5 extra=8 addr=0xabc",
        GIVES,
        "Import handle=0x7 extra=8 addr=0xabc\nMap addr=0x70000000 bytes=2M handle=0x7",
    ]);
    assert_eq!(rows(&fabric), [(Some("1.gtr"), vec!["3.gtr"], 1, Some(6), Known::ByHandle)]);
    let mut said = Vec::new();
    text::render(
        &fabric.report(),
        text::Style { width: None, color: false, letters: text::Letters::Unicode },
        &mut said,
    )
    .unwrap();
    let said = String::from_utf8(said).unwrap();
    assert!(said.contains("Memory that processes share") && said.contains("each byte counts once"), "{said}");
}
