//! The heartbeat of a recording: a note that the recorder writes while the process lives.

use serde::{Deserialize, Serialize};

use super::{Bytes, Nanos};

/// What every such note begins with.
const KEY: &str = "process.alive=";

/// The process was seen alive at the time of the note that says this.
///
/// It is an [`EventKind::Note`](super::EventKind::Note) in words, so a reader that does not know it skips nothing else:
/// `process.alive=events 12 last 8000000000 cpu 15000000 moved 4096`. Words that a reader does not know are left out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
pub struct Alive {
    /// Events of the process since the heartbeat before this one.
    pub events: u64,
    /// Time of its newest event; 0 before the first.
    pub last: Nanos,
    /// Processor time that the process and those it started took since the heartbeat before; `None` where that is not known.
    pub cpu: Option<Nanos>,
    /// Time that their main threads were ready to run and waited for a processor, since then; `None` where that is not known.
    pub starved: Option<Nanos>,
    /// Bytes that they read and wrote (files, pipes, sockets) since then; `None` where that is not known.
    pub moved: Option<Bytes>,
}

impl Alive {
    /// How often a recorder writes one, nanoseconds.
    pub const EVERY: Nanos = Nanos(10_000_000_000);

    /// Reads a note; `None` if it is about something else.
    #[must_use]
    pub fn parse(note: &str) -> Option<Alive> {
        let mut words = note.strip_prefix(KEY)?.split(' ');
        let mut alive = Alive::default();
        while let (Some(name), Some(number)) = (words.next(), words.next()) {
            let number = number.parse().ok()?;
            match name {
                "events" => alive.events = number,
                "last" => alive.last = Nanos(number),
                "cpu" => alive.cpu = Some(Nanos(number)),
                "starved" => alive.starved = Some(Nanos(number)),
                "moved" => alive.moved = Some(Bytes(number)),
                _ => {}
            }
        }
        Some(alive)
    }
}

impl std::fmt::Display for Alive {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "{KEY}events {} last {}", self.events, self.last.0)?;
        if let Some(cpu) = self.cpu {
            write!(to, " cpu {}", cpu.0)?;
        }
        if let Some(starved) = self.starved {
            write!(to, " starved {}", starved.0)?;
        }
        if let Some(moved) = self.moved {
            write!(to, " moved {}", moved.0)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heartbeat_is_read_as_written_and_later_words_are_left_out() {
        let (cpu, starved) = (Some(Nanos(0)), Some(Nanos(9)));
        let whole = Alive { events: 7, last: Nanos(1 << 60), cpu, starved, moved: Some(Bytes(4096)) };
        for alive in [whole, Alive { cpu: None, moved: None, ..whole }, Alive::default()] {
            assert_eq!(Alive::parse(&alive.to_string()), Some(alive));
            assert_eq!(Alive::parse(&format!("{alive} later 5")), Some(alive));
        }
        for other in ["process.alive_at=5", "process.end=exit", "process.alive=events x", ""] {
            assert_eq!(Alive::parse(other), None, "{other}");
        }
        assert_eq!(Alive::parse("process.alive="), Some(Alive::default()));
    }
}
