//! What recordings left behind in memory, in words: for `ps`, `doctor` and `recover`.

use std::mem::discriminant;
use std::path::Path;
use std::time::Duration;

use gputrace_recorder::left::{Fate, Left, Ring};
use gputrace_replay::trace::words::{bytes, quote};
use gputrace_schemas::event::Bytes;
use serde_json::{Value, json};

use crate::show::shown;

/// More of one kind become one line.
const MOST_LINES: usize = 5;

/// A line for each ring and log, or for all of a kind if they are many, and one for those of others.
pub(crate) fn lines(left: &Left) -> Vec<String> {
    let mut kinds: Vec<Vec<&Ring>> = vec![];
    for ring in &left.rings {
        // Each that is still written to has a command of its own.
        let is_alike = |other: &Ring| {
            ring.process != Fate::Runs && discriminant(&other.process) == discriminant(&ring.process)
        };
        match kinds.iter_mut().find(|kind| is_alike(kind[0])) {
            Some(kind) => kind.push(ring),
            None => kinds.push(vec![ring]),
        }
    }
    let rings = kinds.iter().flat_map(|kind| match kind.len() {
        ..=MOST_LINES => kind.iter().map(|ring| line(ring)).collect(),
        _ => vec![line_of_many(kind)],
    });
    let logs = left.logs.iter().map(|log| {
        let (path, size) = (shown(&log.path), bytes(Bytes(log.bytes)));
        format!(
            "{path} (messages that the recorder of process {} could not print, {size}): `gputrace recover` shows and removes it",
            log.pid
        )
    });
    let logs: Vec<String> = match left.logs.len() {
        ..=MOST_LINES => logs.collect(),
        n => {
            let size = bytes(Bytes(left.logs.iter().map(|log| log.bytes).sum()));
            vec![format!(
                "{n} logs of recorders that could not print their messages ({size}): `gputrace recover` shows and removes them"
            )]
        }
    };
    let others = match left.n_of_others {
        0 => None,
        1 => Some("1 ring belongs to another user and was not opened".to_owned()),
        n => Some(format!("{n} rings belong to other users and were not opened")),
    };
    rings.chain(logs).chain(others).collect()
}

fn line(ring: &Ring) -> String {
    let (age, size) = (age(ring.age), bytes(Bytes(ring.bytes)));
    let path = shown(&ring.path);
    format!("{path} (a ring without a recorder, {size}, {age} old): {}", what_to_do(ring))
}

/// For rings whose processes had the same fate.
fn line_of_many(rings: &[&Ring]) -> String {
    let size = bytes(Bytes(rings.iter().map(|ring| ring.bytes).sum()));
    let oldest = age(rings.iter().map(|ring| ring.age).max().unwrap_or_default());
    let (n, first) = (rings.len(), rings[0]);
    let what = match &first.process {
        Fate::Ended => {
            "their processes have ended; `gputrace recover` makes traces of all of them".to_owned()
        }
        Fate::NothingRecorded => {
            "their processes ended before anything was recorded; `gputrace recover` removes them".to_owned()
        }
        Fate::Runs | Fate::Unknown(_) => {
            format!("`gputrace recover` leaves them; {}: {}", shown(&first.path), what_to_do(first))
        }
    };
    format!("{n} rings without a recorder ({size}, the oldest {oldest} old): {what}")
}

/// What became of the process of a ring, and the command for it.
pub(crate) fn what_to_do(ring: &Ring) -> String {
    let (pid, command) = (ring.pid, command(&ring.path));
    match &ring.process {
        Fate::Ended => format!("process {pid} has ended; `{command}` makes a trace of it"),
        Fate::Runs => {
            let name = ring.program.as_ref().map(|name| format!(" ({name})")).unwrap_or_default();
            format!("process {pid}{name} is still running; `{command}` continues its recording")
        }
        Fate::NothingRecorded => {
            format!("process {pid} ended before anything was recorded; `gputrace recover` removes it")
        }
        Fate::Unknown(why) => why.clone(),
    }
}

fn command(ring: &Path) -> String {
    format!("gputrace recover {}", quote(&ring.to_string_lossy()))
}

/// For `ps --json`.
pub(crate) fn rings_as_json(left: &Left) -> Vec<Value> {
    let rings = left.rings.iter().map(|ring| {
        let process = match ring.process {
            Fate::Ended => "ended",
            Fate::Runs => "runs",
            Fate::NothingRecorded => "nothing recorded",
            Fate::Unknown(_) => "unknown",
        };
        json!({
            "path": ring.path.to_string_lossy(),
            "pid": ring.pid,
            "program": ring.program,
            "age_seconds": ring.age.as_secs(),
            "bytes": ring.bytes,
            "process": process,
            "remedy": what_to_do(ring),
        })
    });
    rings.collect()
}

pub(crate) fn logs_as_json(left: &Left) -> Vec<Value> {
    let log = |log: &gputrace_recorder::left::Log| json!({ "path": log.path.to_string_lossy(), "pid": log.pid, "bytes": log.bytes });
    left.logs.iter().map(log).collect()
}

/// In the largest unit of which there is at least one.
fn age(age: Duration) -> String {
    match age.as_secs() {
        seconds @ ..60 => format!("{seconds} s"),
        seconds @ 60..3600 => format!("{} min", seconds / 60),
        seconds @ 3600..86_400 => format!("{} h", seconds / 3600),
        seconds => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use expect_test::expect;
    use gputrace_recorder::left::Log;

    #[test]
    fn each_is_listed_with_what_to_do_about_it() {
        let ring = |n: u32, process: Fate| Ring {
            path: format!("/dev/shm/gputrace.{n}.7.ring").into(),
            pid: n,
            program: (process == Fate::Runs).then(|| "py\u{1b}thon".to_owned()),
            age: Duration::from_secs(u64::from(n) * 59 * 61),
            bytes: 32 << 20,
            process,
        };
        let log = Log { path: "/dev/shm/gputrace.9.7.log".into(), pid: 9, bytes: 120 };
        let rings = vec![
            ring(0, Fate::Ended),
            ring(1, Fate::Runs),
            ring(2, Fate::NothingRecorded),
            ring(50, Fate::Unknown("it was made by another version of gputrace".to_owned())),
        ];
        let left = Left { rings, logs: vec![log], n_of_others: 2 };
        expect![[r#"
            /dev/shm/gputrace.0.7.ring (a ring without a recorder, 32.00 MiB, 0 s old): process 0 has ended; `gputrace recover /dev/shm/gputrace.0.7.ring` makes a trace of it
            /dev/shm/gputrace.1.7.ring (a ring without a recorder, 32.00 MiB, 59 min old): process 1 (py\u{1b}thon) is still running; `gputrace recover /dev/shm/gputrace.1.7.ring` continues its recording
            /dev/shm/gputrace.2.7.ring (a ring without a recorder, 32.00 MiB, 1 h old): process 2 ended before anything was recorded; `gputrace recover` removes it
            /dev/shm/gputrace.50.7.ring (a ring without a recorder, 32.00 MiB, 2 days old): it was made by another version of gputrace
            /dev/shm/gputrace.9.7.log (messages that the recorder of process 9 could not print, 120 B): `gputrace recover` shows and removes it
            2 rings belong to other users and were not opened"#]]
        .assert_eq(&lines(&left).join("\n").replace('\u{1b}', "\\u{1b}"));
        assert!(lines(&Left::default()).is_empty());
    }

    #[test]
    fn many_of_a_kind_are_one_line() {
        let ring = |n: u32, process: Fate| Ring {
            path: format!("/dev/shm/gputrace.{n}.7.ring").into(),
            pid: n,
            program: None,
            age: Duration::from_secs(u64::from(n) * 3600),
            bytes: 32 << 20,
            process,
        };
        let fate = |n: u32| match n % 3 {
            0 => Fate::Ended,
            1 => Fate::NothingRecorded,
            _ => Fate::Unknown(format!("gputrace.{n}.7.ring was made by another version of gputrace")),
        };
        let log = |pid: u32| Log { path: format!("/dev/shm/gputrace.{pid}.7.log").into(), pid, bytes: 100 };
        let rings: Vec<Ring> = (1..=18).map(|n| ring(n, fate(n))).chain([ring(50, Fate::Runs)]).collect();
        let left = Left { rings: rings.clone(), logs: (0..7).map(log).collect(), n_of_others: 0 };
        expect![[r#"
            6 rings without a recorder (192.00 MiB, the oldest 16 h old): their processes ended before anything was recorded; `gputrace recover` removes them
            6 rings without a recorder (192.00 MiB, the oldest 17 h old): `gputrace recover` leaves them; /dev/shm/gputrace.2.7.ring: gputrace.2.7.ring was made by another version of gputrace
            6 rings without a recorder (192.00 MiB, the oldest 18 h old): their processes have ended; `gputrace recover` makes traces of all of them
            /dev/shm/gputrace.50.7.ring (a ring without a recorder, 32.00 MiB, 2 days old): process 50 is still running; `gputrace recover /dev/shm/gputrace.50.7.ring` continues its recording
            7 logs of recorders that could not print their messages (700 B): `gputrace recover` shows and removes them"#]].assert_eq(&lines(&left).join("\n"));
        // As many as fit on a screen are listed, whatever else is there.
        let few = Left { rings: rings.into_iter().take(15).collect(), ..Left::default() };
        assert_eq!(lines(&few).len(), 15);
    }
}
