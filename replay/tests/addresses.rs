//! The address model against what real drivers handed out.

use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use gputrace_replay::driver::Driver;

const PAGE: u64 = 2 << 20;

/// (is a malloc, bytes, address)
type Call = (bool, u64, u64);

fn shared() -> PathBuf {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared");
    std::env::var_os("GPUTRACE_SHARED").map_or_else(default, PathBuf::from)
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

/// Requests of at least a page that were not where the rule says, and requests. Smaller ones are packed by other rules;
/// the first in a page is learned as the page.
fn surprises(calls: &[Call]) -> (usize, usize) {
    let mut driver = Driver::with_first(calls[0].2 / PAGE * PAGE, calls[0].1);
    let mut small_in_page: HashMap<u64, usize> = HashMap::new();
    let (mut n_surprises, mut n_requests) = (0, 0);
    for (is_malloc, bytes, address) in calls.iter().copied() {
        let page = address / PAGE * PAGE;
        let is_small = bytes < PAGE;
        match (is_malloc, is_small) {
            (true, false) => {
                n_requests += 1;
                n_surprises += usize::from(!driver.learn(address, bytes).is_empty());
            }
            (false, false) => driver.free(address, bytes),
            (true, true) => {
                let count = small_in_page.entry(page).or_default();
                *count += 1;
                if *count == 1 {
                    driver.learn(page, PAGE);
                }
            }
            (false, true) => {
                let count = small_in_page.entry(page).or_default();
                *count -= 1;
                if *count == 0 {
                    driver.free(page, PAGE);
                }
            }
        }
    }
    (n_surprises, n_requests)
}

/// At most so many surprises a file: the regions that CUDA's context already had are seen when they are first used.
const REGIONS_OF_THE_CONTEXT: usize = 3;

#[test]
fn the_rule_explains_every_address_that_a_real_driver_gave() {
    let folder = shared().join("groundtruth/addresses");
    let Ok(entries) = std::fs::read_dir(&folder) else {
        println!("skipped: there is no {}", folder.display());
        return;
    };
    let mut total = (0, 0);
    for path in entries.map(|entry| entry.unwrap().path()) {
        let (n_surprises, n_requests) = surprises(&recorded(&path));
        println!("{}: {n_surprises} surprises in {n_requests} requests", path.display());
        assert!(n_surprises <= REGIONS_OF_THE_CONTEXT, "{}", path.display());
        total = (total.0 + n_surprises, total.1 + n_requests);
    }
    println!("{} surprises in {} requests", total.0, total.1);
}

#[test]
fn regions_are_filled_upwards_and_made_downwards() {
    //  a region is 32 MiB or a multiple; the address space ends at T
    //  T-32  a 20 MiB | b 10 MiB           b goes behind a
    //  T-96  c 50 MiB            | e 14    c needs a region of 64 MiB; e the hole that is left
    //  T-128 d 20 MiB                      d fits no hole: a new region
    const MIB: u64 = 1 << 20;
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
