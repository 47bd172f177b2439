//! The stack of a thread that the recorder read from outside: a note that stands on that stack.

use super::Nanos;

const KEY: &str = "stack.read=";

/// The thread of the note was where the note's stack says, as its recorder read while the process ran.
///
/// It is an [`EventKind::Note`](super::EventKind::Note) with thread and stack: `stack.read=silent 60000000000 state R torn 0 stopped 210000`. Words
/// that a reader does not know are left out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StackRead {
    /// For how long nothing had come of the process.
    pub silent: Nanos,
    /// The state of the thread, as `/proc` says: `S` sleeps, `R` runs, `D` waits in the kernel.
    pub state: char,
    /// It changed while it was read: lines may be of different moments.
    pub is_torn: bool,
    /// For how long at most the thread was stopped for it, nanoseconds; `None` if it was not.
    pub stopped: Option<Nanos>,
}

impl StackRead {
    /// Reads a note; `None` if it is about something else.
    #[must_use]
    pub fn parse(note: &str) -> Option<StackRead> {
        let mut words = note.strip_prefix(KEY)?.split(' ');
        let mut read = StackRead { silent: Nanos(0), state: '?', is_torn: false, stopped: None };
        while let (Some(name), Some(value)) = (words.next(), words.next()) {
            match name {
                "silent" => read.silent = Nanos(value.parse().ok()?),
                "state" => read.state = value.chars().next()?,
                "torn" => read.is_torn = value != "0",
                "stopped" => read.stopped = Some(Nanos(value.parse().ok()?)),
                _ => {}
            }
        }
        Some(read)
    }
}

impl std::fmt::Display for StackRead {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let torn = u8::from(self.is_torn);
        write!(to, "{KEY}silent {} state {} torn {torn}", self.silent.0, self.state)?;
        if let Some(stopped) = self.stopped {
            write!(to, " stopped {}", stopped.0)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stack_that_was_read_is_read_as_written() {
        let waits = StackRead { silent: Nanos(60_000_000_000), state: 'D', is_torn: true, stopped: None };
        for read in [waits, StackRead { stopped: Some(Nanos(210_000)), ..waits }] {
            assert_eq!(StackRead::parse(&read.to_string()), Some(read));
            assert_eq!(StackRead::parse(&format!("{read} later 5")), Some(read));
        }
        assert_eq!(StackRead::parse("stack.read=silent x"), None);
        assert_eq!(StackRead::parse("stacks.read=refused: no"), None);
    }
}
