//! What lies where in another process (`/proc/PID/maps`).

use crate::opened;

/// One line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Map {
    pub(super) start: u64,
    pub(super) end: u64,
    rights: String,
    offset: u64,
    pub(super) path: String,
}

/// All of them, by address.
#[derive(Clone, Debug)]
pub(super) struct Maps(pub(super) Vec<Map>);

impl Map {
    pub(super) fn is_code(&self) -> bool {
        self.rights.contains('x')
    }

    pub(super) fn is_writable(&self) -> bool {
        self.rights.contains('w')
    }

    pub(super) fn contains(&self, address: u64) -> bool {
        (self.start..self.end).contains(&address)
    }
}

impl Maps {
    /// Of this process; `None` if they cannot be read.
    pub(super) fn of(pid: u32) -> Option<Maps> {
        let text = opened::text_of_proc(format!("/proc/{pid}/maps")).ok()?;
        Some(Maps(text.lines().filter_map(line).collect()))
    }

    pub(super) fn at(&self, address: u64) -> Option<&Map> {
        let index = self.0.partition_point(|map| map.end <= address);
        self.0.get(index).filter(|map| map.contains(address))
    }

    /// Where the file begins whose name begins so.
    pub(super) fn base(&self, name: &str) -> Option<u64> {
        let is_it = |map: &&Map| map.path.rsplit('/').next().is_some_and(|it| it.starts_with(name));
        self.0.iter().filter(is_it).find(|map| map.offset == 0).map(|map| map.start)
    }

    /// An address in the middle of the largest hole, far from everything.
    pub(super) fn hole(&self) -> Option<u64> {
        let holes = self.0.windows(2).filter_map(|pair| match pair {
            // Not up to the kernel's own pages.
            [below, above] if above.start < 1 << 47 => {
                Some((above.start.saturating_sub(below.end), below.end))
            }
            _ => None,
        });
        let (bytes, start) = holes.max()?;
        (bytes > 1 << 30).then_some((start + bytes / 2) & !0xfff)
    }
}

fn line(text: &str) -> Option<Map> {
    let mut words = text.split_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let (rights, offset) = (words.next()?.to_owned(), number(words.next()?)?);
    let path = words.skip(2).collect::<Vec<_>>().join(" ");
    Some(Map { start: number(start)?, end: number(end)?, rights, offset, path })
}
