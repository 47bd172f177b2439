//! How much memory another process has left, seen from outside: what a recording takes of it must not make a request of its own fail.
//!
//! Looked at before anything is asked of the process: its limits of addresses (`ulimit -v`) and of data (`ulimit -d`), and the memory
//! that its control groups have left.

use crate::opened::text_of_proc;
use std::path::{Path, PathBuf};

const MIB: u64 = 1 << 20;
/// A ring has so many bytes where there is room (`RING_BYTES` of the library's `ring_file.rs`), and at least so many.
const RING: u64 = 32 * MIB;
const LEAST_RING: u64 = MIB;
/// The ring takes this part of what is left, at most.
const PART: u64 = 8;
/// What a recording takes beside its ring, and as much again for the program meanwhile.
const FOR_SESSION: u64 = 64 * MIB;
/// What bringing the library in takes of addresses: the library and its tables (8 MiB), a thread, and what the C library reserves for
/// a thread that allocates: two heaps of 64 MiB, of which it gives one back (malloc/arena.c, `HEAP_MAX_SIZE`).
const FOR_LIBRARY: u64 = 192 * MIB;

/// Why nothing can be asked of it, with what to change; else the bytes of the ring, where they are to be other than usual.
pub(crate) fn for_session(pid: u32) -> Result<Option<u64>, String> {
    let least = rooms(pid).into_iter().min_by_key(|room| room.left);
    match least {
        Some(room) if room.left < FOR_SESSION => Err(room.refusal(pid, FOR_SESSION)),
        Some(room) if room.left / PART < RING => Ok(Some((room.left / PART).max(LEAST_RING))),
        Some(_) | None => Ok(None),
    }
}

/// The same of a process into which the library is to be brought first.
pub(crate) fn for_library(pid: u32) -> Result<(), String> {
    let needed = |room: &Room| match room.kind {
        Kind::Addresses => FOR_LIBRARY + FOR_SESSION,
        Kind::Data | Kind::Group => FOR_SESSION,
    };
    match rooms(pid).into_iter().find(|room| room.left < needed(room)) {
        Some(room) => Err(room.refusal(pid, needed(&room))),
        None => Ok(()),
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Addresses,
    Data,
    Group,
}

/// A limit, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Room {
    kind: Kind,
    limit: u64,
    left: u64,
}

impl Room {
    fn refusal(self, pid: u32, needed: u64) -> String {
        let (what, remedy) = match self.kind {
            Kind::Addresses => ("addresses (ulimit -v)", format!("prlimit --pid {pid} --as=unlimited")),
            Kind::Data => ("data (ulimit -d)", format!("prlimit --pid {pid} --data=unlimited")),
            Kind::Group => {
                ("memory of its control group", "a higher memory.max (docker update --memory)".to_owned())
            }
        };
        format!(
            "it has {} MiB of {} MiB of {what} left, and needs {} MiB so none of its own requests fail meanwhile: {remedy} gives it more",
            self.left / MIB,
            self.limit / MIB,
            needed / MIB,
        )
    }
}

/// The limits that the process has.
fn rooms(pid: u32) -> Vec<Room> {
    let text = |name: &str| text_of_proc(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let (limits, status) = (text("limits"), text("status"));
    let room = |kind, limit: &str, used: &str| {
        let (limit, used) = (soft_limit(&limits, limit)?, kilobytes(&status, used)?);
        Some(Room { kind, limit, left: limit.saturating_sub(used) })
    };
    let own =
        [room(Kind::Addresses, "Max address space", "VmSize:"), room(Kind::Data, "Max data size", "VmData:")];
    own.into_iter().flatten().chain(group(&text("cgroup"), Path::new("/sys/fs/cgroup"))).collect()
}

/// In bytes, of `/proc/PID/limits` (proc(5)); `None` if there is none.
fn soft_limit(limits: &str, name: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

/// In bytes, of `/proc/PID/status`.
fn kilobytes(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_ascii_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// What the control groups of a process have left, that one which has least (cgroups(7)): `cgroup` is its file in `/proc`.
fn group(cgroup: &str, mounted: &Path) -> Option<Room> {
    let unified = cgroup.lines().find_map(|line| line.strip_prefix("0::"));
    let older = cgroup.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        controllers.split(',').any(|it| it == "memory").then_some(path)
    });
    let (root, path, names) = match older {
        Some(path) => (
            mounted.join("memory"),
            path,
            ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "],
        ),
        None => (mounted.to_owned(), unified?, ["memory.max", "memory.current", "inactive_file "]),
    };
    let folder: PathBuf = root.join(path.trim_start_matches('/'));
    let folders = folder.ancestors().take_while(|folder| folder.starts_with(&root));
    folders.filter_map(|folder| room_of_group(folder, names)).min_by_key(|room| room.left)
}

fn room_of_group(folder: &Path, [limit, used, cached]: [&str; 3]) -> Option<Room> {
    let text = |name: &str| text_of_proc(folder.join(name).to_str()?).ok();
    let number = |name: &str| text(name)?.trim().parse::<u64>().ok();
    let (limit, used) = (number(limit)?, number(used)?);
    // The kernel gives back what files leave in memory before it refuses anything.
    let statistics = text("memory.stat").unwrap_or_default();
    let cached = statistics.lines().find_map(|line| line.strip_prefix(cached)?.trim().parse::<u64>().ok());
    let left = limit.saturating_sub(used.saturating_sub(cached.unwrap_or(0)));
    Some(Room { kind: Kind::Group, limit, left })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_as_the_kernel_writes_them() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max data size             unlimited            unlimited            bytes     \n\
                      Max address space         1073741824           unlimited            bytes     \n";
        assert_eq!(soft_limit(limits, "Max address space"), Some(1 << 30));
        assert_eq!(soft_limit(limits, "Max data size"), None);
        assert_eq!(kilobytes("VmPeak:\t 9 kB\nVmSize:\t  1234 kB\n", "VmSize:"), Some(1234 << 10));
    }

    #[test]
    fn the_group_that_has_least_left_counts_and_what_files_leave_in_memory_is_free() {
        let root = std::env::temp_dir().join(format!("gputrace-room-{}", std::process::id()));
        let write = |group: &str, name: &str, text: &str| {
            let folder = root.join(group);
            std::fs::create_dir_all(&folder).expect("writable");
            std::fs::write(folder.join(name), text).expect("writable");
        };
        write("a", "memory.max", "1000\n");
        write("a", "memory.current", "900\n");
        write("a", "memory.stat", "anon 1\ninactive_file 300\n");
        write("a/b", "memory.max", "max\n");
        write("a/b", "memory.current", "900\n");
        let found = group("0::/a/b\n", &root);
        assert_eq!(found, Some(Room { kind: Kind::Group, limit: 1000, left: 400 }));
        write("memory/c", "memory.limit_in_bytes", "500\n");
        write("memory/c", "memory.usage_in_bytes", "100\n");
        let found = group("12:pids:/x\n4:cpu,memory:/c\n0::/a/b\n", &root);
        assert_eq!(found, Some(Room { kind: Kind::Group, limit: 500, left: 400 }));
        assert_eq!(group("0::/none\n", &root), None);
        std::fs::remove_dir_all(root).expect("ours");
    }
}
