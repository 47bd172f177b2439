//! Hostile files are refused with the reason, without a panic and without much memory. What else may come is fuzzed: `make fuzz`.

use std::io::Write;
use std::path::{Path, PathBuf};

use gputrace_replay::import::load;
use gputrace_sim::policies::{Build, by_name};

/// More than this in use at once, and a file has made the reader wasteful, MiB.
const MOST_RESIDENT: u64 = 1400;

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or("");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) >> 10
}

fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn what_is_known_to_be_hostile_is_refused_with_the_reason() {
    let repeated = |part: &[u8], n: usize| [b"\x80\x04", part.repeat(n).as_slice(), b"."].concat();
    let length = |opcode: u8| [&[0x80, 4, opcode][..], &(1u64 << 63).to_le_bytes(), b"."].concat();
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("global", b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.".to_vec(), "would run code"),
        ("stack_global", b"\x80\x04\x8c\x02os\x8c\x06system\x93.".to_vec(), "would run code"),
        ("inst", b"\x80\x02(ios\nsystem\n.".to_vec(), "would run code"),
        ("reduce", b"\x80\x02NNR.".to_vec(), "would run code"),
        ("text of 2^63 bytes", length(0x8d), "9223372036854775808 bytes"),
        ("bytes of 2^63", length(0x8e), "9223372036854775808 bytes"),
        ("a list in itself", b"\x80\x02]q\x00h\x00a.".to_vec(), "memory snapshot"),
        (
            "a million lists in one another",
            [repeated(b"]", 1_000_000), b"a".repeat(999_999), b".".to_vec()].concat(),
            "",
        ),
        ("twenty million marks", gzip(&repeated(b"(", 20_000_000)), "too many for a file of its size"),
        ("ten million lists", gzip(&repeated(b"]0", 10_000_000)), "too many for a file of its size"),
        (
            "one list of ten million",
            gzip(&[b"\x80\x04]", b"Na".repeat(10_000_000).as_slice(), b"."].concat()),
            "too many",
        ),
        ("a memo that jumps", memo_that_jumps(), "too many for a file of its size"),
        ("nothing", Vec::new(), "truncated"),
    ];
    for (name, bytes, reason) in cases {
        let path = file("hostile.pickle", &bytes);
        let error = load(&path).map(|_| ()).expect_err(name).to_string();
        assert!(error.contains("hostile.pickle") && error.contains(reason), "{name}: {error}");
    }
    assert!(resident_mib() < MOST_RESIDENT, "{} MiB", resident_mib());
}

fn memo_that_jumps() -> Vec<u8> {
    let mut bytes = b"\x80\x04N".to_vec();
    for jump in 1..4000u32 {
        bytes.push(b'r');
        bytes.extend((jump * 60_000).to_le_bytes());
    }
    bytes
}

#[test]
fn every_policy_says_what_it_does_not_understand() {
    for entry in gputrace_sim::policies::POLICIES {
        let build =
            Build { options: "no_such=1", torch_version: (2, 11), n_streams: 1, n_pools: 1, profile: None };
        let error = (by_name(entry.name).unwrap().build)(build).err().expect(entry.name);
        assert!(error.to_string().contains("no_such"), "{}: {error}", entry.name);
    }
}
