//! Memory that has an owner elsewhere, in traces of `tests/gpu/owners.py` on an H200: what each program said of itself.

use std::path::{Path, PathBuf};

use gputrace_replay::ranks::collect::collect;
use gputrace_replay::ranks::report::Ranks;
use gputrace_replay::ranks::shared::Known;
use gputrace_replay::story::Story;
use gputrace_replay::trace::source::Source;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/owners").join(format!("{name}.gtr"))
}

fn source(name: &str) -> Source {
    Source::open(&golden(name)).expect("a golden trace")
}

const MIB: u64 = 1 << 20;

#[test]
fn memory_of_the_host_is_the_hosts_whether_it_is_mapped_or_of_a_pool() {
    let ledger = Story::of_source(&source("host")).ledger;
    assert_eq!((ledger.devices()[&0].physical.peak().0, ledger.host().peak().0), (24 * MIB, 96 * MIB));
}

#[test]
fn a_tensor_that_pytorch_shares_is_known_at_both_ends_and_counted_once() {
    let all = [collect(&source("exporter")), collect(&source("importer"))];
    let ranks = Ranks::of(&all, &|_| None);
    let [shared] = &ranks.shared[..] else { panic!("{:?}", ranks.shared) };
    // `torch.cuda.memory_snapshot()` of the program that made it: two segments.
    assert_eq!((shared.bytes, shared.pieces, shared.known), (Some(84 * MIB), 2, Known::ByHandle));
    assert_eq!(shared.exporter.as_deref(), Some("exporter.gtr"));
    assert_eq!(shared.importers, ["importer.gtr"]);
}

#[test]
fn the_symmetric_heap_shows_the_line_that_took_of_it() {
    let story = Story::of_source(&source("nvshmem"));
    let heap = &story.ledger.devices()[&0].heap;
    assert_eq!((heap.blocks.peak().0, heap.n_refused), (11 * MIB, 0));
    let lines: Vec<_> = heap.blocks.sites().map(|part| story.ledger.sites.site_name(part.id)).collect();
    assert_eq!(lines, ["<module> (/tmp/r/owners/nvshmem/run_nvshmem.py:10) in empty"]);
}

#[test]
fn cupys_pool_grows_by_line_and_is_as_large_as_cupy_says() {
    let story = Story::of_source(&source("cupy"));
    let books = &story.ledger.devices()[&0].physical;
    let mut lines: Vec<_> =
        books.sites().map(|part| (part.peak.0 / MIB, story.ledger.sites.site_name(part.id))).collect();
    lines.sort();
    assert_eq!(
        lines,
        [
            (32, "load (/tmp/r/owners/cupy/run_cupy.py:3) in ones".to_owned()),
            (48, "step (/tmp/r/owners/cupy/run_cupy.py:4) in ones".to_owned()),
        ]
    );
}

#[test]
fn the_report_of_both_ends_says_that_memory_is_shared() {
    let report = |traces: &[PathBuf]| {
        let output =
            std::process::Command::new(env!("CARGO_BIN_EXE_gputrace")).arg("report").args(traces).output();
        String::from_utf8_lossy(&output.expect("gputrace").stdout).into_owned()
    };
    let both = report(&[golden("exporter"), golden("importer")]);
    assert!(both.contains("memory of other processes is mapped by 1 of these processes"), "{both}");
    assert!(both.contains("\n  gputrace ranks "), "{both}");
    assert!(!report(&[golden("exporter"), golden("cupy")]).contains("others made"));
}
