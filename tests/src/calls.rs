//! The call log of the fake driver, and what became of every allocation according to it.
//!
//! This is the yardstick for everything that gputrace records, so it is naive on purpose: it knows which argument names the
//! thing that a call made or took back, and nothing else.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

/// One line: `pid thread name key=value... = result`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The process that called.
    pub pid: u32,
    /// Its thread, as the kernel numbers it.
    pub thread: u32,
    /// The exported name, `cuMemAlloc_v2`.
    pub function: String,
    /// The arguments by name, as printed.
    pub arguments: HashMap<String, String>,
    /// The `CUresult`; 0 is success.
    pub result: i32,
}

impl Call {
    /// Reads one line of a log; `None` if it is not one.
    pub fn parse(line: &str) -> Option<Call> {
        let (call, result) = line.rsplit_once(" = ")?;
        let mut words = call.split_whitespace();
        Some(Call {
            pid: words.next()?.parse().ok()?,
            thread: words.next()?.parse().ok()?,
            function: words.next()?.to_owned(),
            arguments: words
                .filter_map(|word| word.split_once('='))
                .map(|(k, v)| (k.into(), v.into()))
                .collect(),
            result: result.trim().parse().ok()?,
        })
    }

    /// How many bytes it asked for; 0 if it does not say.
    pub fn bytes(&self) -> u64 {
        self.arguments.get("bytes").and_then(|bytes| bytes.parse().ok()).unwrap_or(0)
    }
}

/// Reads a whole log.
///
/// # Errors
/// The first line that is not a call, with its number.
pub fn parse_log(text: &str) -> Result<Vec<Call>, String> {
    let parse =
        |(number, line)| Call::parse(line).ok_or_else(|| format!("call log, line {}: `{line}`", number + 1));
    text.lines().enumerate().map(parse).collect()
}

/// The calls that make something, and which argument names it.
const MAKERS: &[(&str, &str)] = &[
    ("cuMemAlloc", "ptr"),
    ("cuMemAlloc_v2", "ptr"),
    ("cuMemAllocPitch_v2", "ptr"),
    ("cuMemAllocManaged", "ptr"),
    ("cuMemHostAlloc", "ptr"),
    ("cuMemAllocHost", "ptr"),
    ("cuMemAllocHost_v2", "ptr"),
    ("cuMemHostRegister", "ptr"),
    ("cuMemHostRegister_v2", "ptr"),
    ("cuMemAllocAsync", "ptr"),
    ("cuMemAllocAsync_ptsz", "ptr"),
    ("cuMemAllocFromPoolAsync", "ptr"),
    ("cuMemAllocFromPoolAsync_ptsz", "ptr"),
    ("cuGraphAddMemAllocNode", "ptr"),
    ("cuGraphAddNode", "ptr"),
    ("cuGraphAddNode_v2", "ptr"),
    ("cuGraphAddNode_v3", "ptr"),
    ("cuArrayCreate_v2", "array"),
    ("cuArray3DCreate_v2", "array"),
    ("cuMipmappedArrayCreate", "array"),
    ("cuMemCreate", "handle"),
];

/// The calls that take something back, and which argument names it: `freed` is the `ptr` of what was made.
const TAKERS: &[(&str, &str)] = &[
    ("cuMemFree", "ptr"),
    ("cuMemFree_v2", "ptr"),
    ("cuMemFreeHost", "ptr"),
    ("cuMemHostUnregister", "ptr"),
    ("cuMemFreeAsync", "ptr"),
    ("cuMemFreeAsync_ptsz", "ptr"),
    ("cuGraphAddMemFreeNode", "ptr"),
    ("cuGraphAddNode", "freed"),
    ("cuGraphAddNode_v2", "freed"),
    ("cuGraphAddNode_v3", "freed"),
    ("cuArrayDestroy", "array"),
    ("cuMipmappedArrayDestroy", "array"),
    ("cuMemRelease", "handle"),
];

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fate {
    /// Given back.
    Freed,
    /// Never given back.
    Leaked,
    /// Refused, with this `CUresult`.
    Failed(i32),
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fate::Freed => f.write_str("freed"),
            Fate::Leaked => f.write_str("leaked"),
            Fate::Failed(code) => write!(f, "failed:{code}"),
        }
    }
}

/// How many requests there were of each function, size and fate.
pub type Census = BTreeMap<(String, u64, Fate), usize>;

/// Counts the requests of a log.
pub fn census(calls: &[Call]) -> Census {
    let mut live: HashMap<(u32, String), (String, u64)> = HashMap::new();
    let mut census = Census::new();
    let mut count = |(function, bytes), fate| *census.entry((function, bytes, fate)).or_default() += 1;
    for call in calls {
        let named = |table: &[(&str, &str)]| {
            let (_, key) = table.iter().find(|(function, _)| *function == call.function)?;
            let space = if *key == "freed" { "ptr" } else { key };
            Some((call.pid, format!("{space} {}", call.arguments.get(*key)?)))
        };
        if let Some(name) = named(TAKERS).filter(|_| call.result == 0) {
            if let Some(made) = live.remove(&name) {
                count(made, Fate::Freed);
            }
        } else if named(MAKERS).is_some() {
            let made = (call.function.clone(), call.bytes());
            if call.result != 0 {
                count(made, Fate::Failed(call.result));
            } else if let Some(forgotten) = named(MAKERS).and_then(|name| live.insert(name, made)) {
                // The process became another by exec and got the same address again.
                count(forgotten, Fate::Leaked);
            }
        }
    }
    live.into_values().for_each(|made| count(made, Fate::Leaked));
    census
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(log: &str, expected: &[(&str, u64, Fate, usize)]) {
        let census = census(&parse_log(log).expect("a good log"));
        let expected =
            expected.iter().map(|(f, b, fate, n)| ((f.to_string(), *b, *fate), *n)).collect::<Census>();
        assert_eq!(census, expected);
    }

    #[test]
    fn an_allocation_is_freed_by_its_own_process_only() {
        check(
            "1 1 cuMemAlloc_v2 bytes=10 ptr=0x200 = 0\n2 2 cuMemFree_v2 ptr=0x200 = 0",
            &[("cuMemAlloc_v2", 10, Fate::Leaked, 1)],
        );
    }

    #[test]
    fn a_failed_free_frees_nothing_and_a_failed_request_keeps_its_code() {
        check(
            "1 1 cuMemAlloc_v2 bytes=10 ptr=0x200 = 0\n1 1 cuMemFree_v2 ptr=0x200 = 1\n\
             1 1 cuMemAlloc_v2 bytes=20 ptr=0x0 = 2",
            &[("cuMemAlloc_v2", 10, Fate::Leaked, 1), ("cuMemAlloc_v2", 20, Fate::Failed(2), 1)],
        );
    }

    #[test]
    fn a_line_that_is_no_call_is_named() {
        assert_eq!(parse_log("1 1 cuInit = 0\nnonsense").unwrap_err(), "call log, line 2: `nonsense`");
    }
}
