//! How much memory a ring may take where its file system does not say: a quarter of what the machine and the control groups
//! of the process have left.

use crate::sys::{self, Text};

/// A quarter of the memory that is left, in bytes; all ones where nothing says how much that is.
pub(crate) fn quarter_of_memory() -> u64 {
    available().unwrap_or(u64::MAX).min(left_of_groups()) / 4
}

/// `MemAvailable` of `/proc/meminfo` (proc(5), Linux 3.14).
fn available() -> Option<u64> {
    let mut buffer = [0_u8; 256];
    let n = sys::read_file(c"/proc/meminfo", &mut buffer);
    let mut lines = buffer.get(..n)?.split(|byte| *byte == b'\n');
    let line = lines.find_map(|line| line.strip_prefix(b"MemAvailable:"))?;
    number(line)?.checked_mul(1024)
}

/// What the memory limits of this process's control groups leave; all ones where there are none.
fn left_of_groups() -> u64 {
    let mut buffer = [0_u8; 1024];
    let n = sys::read_file(c"/proc/self/cgroup", &mut buffer);
    let mut least = u64::MAX;
    for line in buffer.get(..n).unwrap_or_default().split(|byte| *byte == b'\n') {
        // `hierarchy:controllers:path` (cgroups(7)).
        let mut fields = line.splitn(3, |byte| *byte == b':');
        let (Some(hierarchy), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let files: [&[u8]; 3] = if hierarchy == b"0" && controllers.is_empty() {
            [b"/sys/fs/cgroup", b"/memory.max", b"/memory.current"]
        } else if controllers.split(|byte| *byte == b',').any(|it| it == b"memory") {
            [b"/sys/fs/cgroup/memory", b"/memory.limit_in_bytes", b"/memory.usage_in_bytes"]
        } else {
            continue;
        };
        least = least.min(left_along(path, files));
    }
    least
}

/// The least that a group or one above it leaves. What the path names may be outside of what is mounted here.
fn left_along(mut path: &[u8], [root, limit, used]: [&[u8]; 3]) -> u64 {
    let mut least = u64::MAX;
    loop {
        path = path.strip_suffix(b"/").unwrap_or(path);
        let read = |name| {
            let mut buffer = [0_u8; 32];
            let file = Text::<512>::new().add(root).add(path).add(name);
            if file.is_full() {
                return None;
            }
            let n = sys::read_file(file.as_c_str(), &mut buffer);
            // `max` is no limit.
            number(buffer.get(..n)?)
        };
        if let (Some(limit), Some(used)) = (read(limit), read(used)) {
            least = least.min(limit.saturating_sub(used));
        }
        match path.iter().rposition(|byte| *byte == b'/') {
            Some(slash) => path = path.get(..slash).unwrap_or_default(),
            None => return least,
        }
    }
}

/// The number that a text begins with, after blanks.
fn number(text: &[u8]) -> Option<u64> {
    let text = text.trim_ascii_start();
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit());
    let value = |sum: Option<u64>, digit: &u8| sum?.checked_mul(10)?.checked_add(u64::from(digit - b'0'));
    if text.first().is_some_and(u8::is_ascii_digit) { digits.fold(Some(0), value) } else { None }
}
