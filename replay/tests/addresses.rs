//! The address model against what real drivers handed out.

use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use gputrace_sim::driver::{Driver, Fact, Knowledge, Known};
use gputrace_sim::ops::{Builder, DriverCall, Op};

const PAGE: u64 = 2 << 20;

/// (is a malloc, bytes, address)
type Call = (bool, u64, u64);

/// What a real driver handed out (`tests/groundtruth/README.md`).
fn recordings() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/groundtruth/addresses")
}

fn recorded(path: &Path) -> Vec<Call> {
    let mut text = String::new();
    flate2::read::GzDecoder::new(std::fs::File::open(path).unwrap()).read_to_string(&mut text).unwrap();
    let call = |line: &str| {
        let fields: Vec<&str> = line.split(',').collect();
        let address = u64::from_str_radix(fields[3].trim_start_matches("0x"), 16).unwrap();
        (fields[0] == "malloc", fields[2].parse().unwrap(), address)
    };
    text.lines().skip(1).map(call).collect()
}

/// Replays the calls of a process of which nothing is known but where its first allocation was.
fn wrong_predictions(calls: &[Call]) -> Vec<String> {
    let (_, bytes, first) = calls[0];
    let mut driver = Driver::with_first(first, bytes);
    // A model that was wrong once must free what it handed out itself.
    let mut predictions: HashMap<u64, u64> = HashMap::new();
    let mut wrong = Vec::new();
    for (index, (is_malloc, bytes, address)) in calls.iter().copied().enumerate() {
        if !is_malloc {
            driver.free(predictions.remove(&address).unwrap(), bytes);
            continue;
        }
        let predicted = driver.alloc(bytes).unwrap();
        if predicted != address {
            wrong.push(format!("call {index}: {bytes} bytes at {address:#x}, predicted {predicted:#x}"));
        }
        predictions.insert(address, predicted);
    }
    wrong
}

/// `cudaMalloc`s in the recordings: of at least 2 MiB, and all.
const RECORDED: (usize, usize) = (15_385, 16_795);

#[test]
fn the_first_address_of_a_process_tells_every_other() {
    let entries = std::fs::read_dir(recordings()).unwrap();
    let mut n_requests = (0, 0);
    for path in entries.map(|entry| entry.unwrap().path()) {
        let calls = recorded(&path);
        assert_eq!(wrong_predictions(&calls), [""; 0], "{}", path.display());
        let mallocs = || calls.iter().filter(|(is_malloc, _, _)| *is_malloc);
        n_requests.0 += mallocs().filter(|(_, bytes, _)| *bytes >= PAGE).count();
        n_requests.1 += mallocs().count();
    }
    assert_eq!(n_requests, RECORDED);
}

#[test]
fn a_first_address_that_no_context_explains_tells_where_free_addresses_end() {
    // 2 MiB go to the context's own region, 30 MiB behind its start, wherever it is known.
    const TOP: u64 = 0x7f00_0000_0000;
    let mut driver = Driver::with_first(TOP - (32 << 20), PAGE);
    assert_eq!(driver.alloc(PAGE), Some(TOP - (32 << 20)));
    let mut driver = Driver::with_first(TOP + (414 << 20), PAGE);
    assert_eq!(driver.alloc(PAGE), Some(TOP + (414 << 20)));
    assert_eq!(driver.alloc(32 << 20), Some(TOP - (32 << 20)));
}

#[test]
fn regions_are_filled_upwards_and_made_downwards() {
    //  a region is 32 MiB or a multiple; the address space ends at T
    //  T-32  a 20 MiB | b 10 MiB           b goes behind a
    //  T-96  c 50 MiB            | e 14    c needs a region of 64 MiB; e the hole that is left
    //  T-128 d 20 MiB                      d fits no hole: a new region
    const T: u64 = 0x7f00_0000_0000;
    let mut driver = Driver::new(T);
    let alloc = |driver: &mut Driver, mib: u64| (T - driver.alloc(mib * MIB).unwrap()) / MIB;
    assert_eq!(alloc(&mut driver, 20), 32);
    assert_eq!(alloc(&mut driver, 10), 12);
    assert_eq!(alloc(&mut driver, 50), 96);
    assert_eq!(alloc(&mut driver, 20), 128);
    assert_eq!(alloc(&mut driver, 14), 46);
    // The hole of the newest region is preferred, although the one behind b fits better.
    assert_eq!(alloc(&mut driver, 2), 108);
    // A region whose last allocation is freed goes back, and its addresses are the highest gap again.
    driver.free(T - 32 * MIB, 20 * MIB);
    driver.free(T - 12 * MIB, 10 * MIB);
    driver.free(T - 96 * MIB, 50 * MIB);
    driver.free(T - 46 * MIB, 14 * MIB);
    assert_eq!(alloc(&mut driver, 60), 64);
}

const MIB: u64 = 1 << 20;
/// Where the context's regions begin in the processes below.
const CONTEXT: u64 = 0x7f00_0000_0000;

/// What the recorded addresses of a process's segments give away. Sizes in MiB, addresses in MiB from [`CONTEXT`].
fn facts(segments: &[(u64, i64)]) -> Vec<Known> {
    let mut builder = Builder::new(0);
    for (index, (mib, at)) in segments.iter().enumerate() {
        let address = CONTEXT.checked_add_signed(at * MIB as i64).unwrap();
        builder.driver(DriverCall::Alloc, address, mib * MIB, index as u32);
        builder.op(Op::Trim);
    }
    Knowledge::of(&builder.finish()).facts().to_vec()
}

#[test]
fn what_the_context_gives_back_is_seen_whole() {
    // The context holds 414 MiB of its region of 416.
    let gave = Known { call: 1, op: 1, fact: Fact::ContextGave(CONTEXT) };
    assert_eq!(facts(&[(2, 414), (24, 0), (48, 24), (96, 72)]), [gave]);
}

#[test]
fn what_lies_between_the_context_and_free_addresses_is_found_from_what_it_explains() {
    // 352 MiB are taken there. Only so the second and third are where the rule puts them.
    assert_eq!(facts(&[(94, -448), (20, 488), (4, 508)]), []);
}

#[test]
fn somebodys_pages_are_dated_to_when_the_rule_preferred_their_place() {
    //  -32  0: 28 | hole 4               too small for 3, which goes to the context's hole of 24: somebody has a page here
    //  -96  1: 50        | 2: 14         and asked for it before 1: after it, the rule would have put it behind 1
    let taken = Fact::HoleTaken { start: CONTEXT - 4 * MIB, bytes: 2 * MIB };
    let facts = facts(&[(28, -32), (50, -96), (14, -46), (4, 488)]);
    assert_eq!(facts, [Known { call: 1, op: 1, fact: taken }]);
}
