//! A process that is suspended from outside: notes that the recorder writes when it begins and ends.

use serde::{Deserialize, Serialize};

/// The cause of a suspension.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SuspendedBy {
    /// The driver lists no memory of it on any GPU: it holds none there, whatever was handed out to it (`cuda-checkpoint`, or
    /// `cuCheckpointProcessCheckpoint`).
    Checkpoint,
    /// The freezer of its control group (CRIU, `docker pause`, `systemctl freeze`).
    Freezer,
    /// A signal (`SIGSTOP`, Ctrl-Z).
    Signal,
}

impl SuspendedBy {
    const ALL: [(SuspendedBy, &'static str); 3] = [
        (SuspendedBy::Checkpoint, "checkpoint"),
        (SuspendedBy::Freezer, "freezer"),
        (SuspendedBy::Signal, "signal"),
    ];
    const BEGIN: &'static str = "process.suspended=";
    const END: &'static str = "process.resumed=";

    /// Reads a note: what suspends the process, and whether that begins (`true`) or ends; `None` if it is about something else.
    #[must_use]
    pub fn parse(note: &str) -> Option<(SuspendedBy, bool)> {
        let begins = note.strip_prefix(Self::BEGIN).map(|by| (by, true));
        let (by, begins) = begins.or_else(|| note.strip_prefix(Self::END).map(|by| (by, false)))?;
        let by = by.split(' ').next()?;
        Some((Self::ALL.iter().find(|(_, name)| *name == by)?.0, begins))
    }

    /// The note that says that it begins.
    #[must_use]
    pub fn begins(self) -> String {
        format!("{}{}", Self::BEGIN, self.name())
    }

    /// The note that says that it ends.
    #[must_use]
    pub fn ends(self) -> String {
        format!("{}{}", Self::END, self.name())
    }

    /// For programs.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(by, _)| *by == self).map_or("", |(_, name)| name)
    }

    /// For people.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            SuspendedBy::Checkpoint => "by a CUDA checkpoint: it holds no GPU memory",
            SuspendedBy::Freezer => "by the freezer of its control group",
            SuspendedBy::Signal => "by a signal (SIGSTOP)",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suspension_is_read_as_written() {
        for (by, _) in SuspendedBy::ALL {
            assert_eq!(SuspendedBy::parse(&by.begins()), Some((by, true)));
            assert_eq!(SuspendedBy::parse(&format!("{} later", by.ends())), Some((by, false)));
        }
        assert_eq!(SuspendedBy::parse("process.suspended=by magic"), None);
        assert_eq!(SuspendedBy::parse("process.end=exit"), None);
    }
}
