//! Whether the process is suspended from outside: by a signal, or by the freezer of its control group. Looked at once a second while
//! nothing comes of it. That a checkpoint took its memory on the GPU, NVML says (`nvml.rs`).

use crate::opened::text_of_proc;
use crate::process::Target;
use gputrace_schemas::event::SuspendedBy;

/// Where control groups are mounted (systemd, and what else follows it).
const GROUPS: &str = "/sys/fs/cgroup";

/// What was told last.
#[derive(Default)]
pub(crate) struct Suspension(Option<SuspendedBy>);

impl Suspension {
    /// Notes for the trace, if anything has changed.
    pub(crate) fn look(&mut self, target: &Target) -> Vec<String> {
        let now = target.in_proc().and_then(suspended);
        self.changed(now)
    }

    /// Something came of the process.
    pub(crate) fn runs(&mut self, _: &Target) -> Vec<String> {
        self.changed(None)
    }

    fn changed(&mut self, now: Option<SuspendedBy>) -> Vec<String> {
        let before = std::mem::replace(&mut self.0, now);
        if before == now {
            return vec![];
        }
        before.map(SuspendedBy::ends).into_iter().chain(now.map(SuspendedBy::begins)).collect()
    }
}

fn suspended(pid: u32) -> Option<SuspendedBy> {
    let stat = text_of_proc(format!("/proc/{pid}/stat")).ok()?;
    let state = stat.rsplit_once(") ")?.1.chars().next()?;
    match state {
        'T' => Some(SuspendedBy::Signal),
        'R' => None,
        _ => is_frozen(&text_of_proc(format!("/proc/{pid}/cgroup")).ok()?, GROUPS)
            .then_some(SuspendedBy::Freezer),
    }
}

/// `/proc/PID/cgroup` has a line for each hierarchy: `NUMBER:CONTROLLERS:PATH`, of version 2 `0::PATH` (cgroups(7)).
fn is_frozen(lines: &str, groups: &str) -> bool {
    lines.lines().any(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { return false };
        // Says so also where a group above it is frozen.
        let file = match controllers {
            "" => format!("{groups}{path}/cgroup.events"),
            "freezer" => format!("{groups}/freezer{path}/freezer.state"),
            _ => return false,
        };
        let text = text_of_proc(&file).unwrap_or_default();
        text.lines().any(|line| matches!(line.trim(), "frozen 1" | "FROZEN"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::process::Command;

    #[test]
    fn a_change_is_told_once() {
        let mut suspension = Suspension::default();
        let (signal, freezer) = (Some(SuspendedBy::Signal), Some(SuspendedBy::Freezer));
        let told: Vec<String> =
            [None, signal, signal, freezer, None].map(|it| suspension.changed(it)).concat();
        let expected = ["suspended=signal", "resumed=signal", "suspended=freezer", "resumed=freezer"];
        assert_eq!(told, expected.map(|it| format!("process.{it}")));
    }

    #[test]
    fn a_stopped_process_is_suspended_until_it_goes_on() {
        let mut child = Command::new("sleep").arg("1000").spawn().expect("sleep runs");
        let signal = |name: &str| {
            assert!(
                Command::new("kill").args([name, &child.id().to_string()]).status().expect("kill").success()
            );
        };
        signal("-STOP");
        while suspended(child.id()) != Some(SuspendedBy::Signal) {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        signal("-CONT");
        while suspended(child.id()).is_some() {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        child.kill().and_then(|()| child.wait()).expect("it ends");
    }

    #[test]
    fn frozen_groups_are_known_in_both_versions() {
        let groups = std::env::temp_dir().join(format!("gputrace-groups-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = groups.join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        };
        write("pod/cgroup.events", "populated 1\nfrozen 1\n");
        write("job/cgroup.events", "populated 1\nfrozen 0\n");
        write("freezer/old/freezer.state", "FROZEN\n");
        let is_frozen = |lines: &str| is_frozen(lines, groups.to_str().expect("text"));
        assert!(is_frozen("0::/pod\n") && !is_frozen("0::/job\n"));
        assert!(is_frozen("7:freezer:/old\n3:cpu,cpuacct:/old\n0::/job\n"));
        assert!(!is_frozen("0::/gone\n") && !is_frozen("") && !is_frozen("7:freezer\n"));
        fs::remove_dir_all(groups).expect("ours");
    }
}
