use std::fmt::Write;

use expect_test::{Expect, expect};

use super::*;
use gputrace_trace::scene::recording;

const BY: &str = "by=libcudart.so,libc10_cuda.so in_allocate=1";
const MODEL: &str = "__init__@/x/torch/nn/modules/linear.py:5,load@/job/serve.py:3";

/// A server: weights, a cache of 40 MiB, a capture, requests, and a library beside it.
fn server() -> String {
    format!(
        "note process.torch_version=2.11
         Alloc addr=0x10000000 bytes=20M {BY}
         block addr=0x10000000 bytes=8M requested=8M reserved=20M by={MODEL}
         block addr=0x10800000 bytes=8M requested=8M reserved=20M by={MODEL}
         Alloc addr=0x20000000 bytes=40M {BY}
         block addr=0x20000000 bytes=40M requested=40M reserved=60M by=make_kv_cache@/job/serve.py:9
         Alloc addr=0x30000000 bytes=4M by=libcublas.so.13!
         Create handle=n bytes=6M by=libnccl.so.2
         TorchPoolBegin handle=1
         CaptureBegin stream=5 by=capture@/job/serve.py:20
         Alloc addr=0x50000000 bytes=20M {BY}
         block addr=0x50000000 bytes=2M requested=2M stream=5 by=capture@/job/serve.py:21
         block addr=0x50200000 bytes=6M requested=6M stream=5 by=capture@/job/serve.py:22
         free addr=0x50200000 bytes=6M
         CaptureEnd stream=5 handle=g
         GraphInstantiate handle=e extra=g
         GraphLaunch handle=e
         {}
         push text=sleep
         pop
         free addr=0x20000000 bytes=40M
         Free addr=0x20000000 {BY}
         push text=wake
         pop",
        "block addr=0x11000000 bytes=1M requested=1M by=work@/job/serve.py:30\n free addr=0x11000000 bytes=1M\n".repeat(12)
    )
}

fn of(scene: &str, between: Option<[Instant; 2]>) -> Budgets {
    let source = Source::of("server.gtr", recording(scene));
    budgets(&source, &Categories::default(), between.as_ref()).expect("marks are there")
}

fn shown<'a>(columns: impl Iterator<Item = &'a Column>) -> String {
    let mut text = String::new();
    for Column { name, bill, .. } in columns {
        let _ = writeln!(text, "{name} {:?} {}K", bill.figure, bill.total >> 10);
        for (row, bytes) in &bill.rows {
            let _ = writeln!(text, "  {} {}K", row.key(), bytes >> 10);
        }
    }
    text
}

fn check(scene: &str, expected: Expect) {
    expected.assert_eq(&shown(of(scene, None).devices.iter().flat_map(|budget| &budget.columns)));
}

/// vLLM's order: the model is run once to learn how large the cache may be, inside of what makes caches, and the cache is the last
/// that is asked for.
#[test]
fn the_cache_of_a_server_that_has_just_started_is_a_cache() {
    let profiling =
        format!("run@/x/model.py:7{},_initialize_kv_caches@/x/core.py:3", ",layer@/x/model.py:9".repeat(8));
    let scene = format!(
        "note process.torch_version=2.11
         Alloc addr=0x10000000 bytes=40M {BY}
         block addr=0x10000000 bytes=8M requested=8M reserved=40M by={MODEL}
         block addr=0x10800000 bytes=8M requested=8M reserved=40M by={MODEL}
         {}
         block addr=0x11000000 bytes=2M requested=2M by={profiling}
         Alloc addr=0x20000000 bytes=60M {BY}
         block addr=0x20000000 bytes=60M requested=60M reserved=100M by=allocate_kv_cache@/x/utils.py:5
         block addr=0x11400000 bytes=1M requested=1M by=start@/x/core.py:9
         free addr=0x20000000 bytes=60M
         free addr=0x10000000 bytes=8M",
        format!(
            "block addr=0x11800000 bytes=4M requested=4M by={profiling}\n free addr=0x11800000 bytes=4M\n"
        )
        .repeat(40)
    );
    let budgets = of(&scene, None);
    let cache = |column: &Column| column.bill.of(Row::KvCache);
    let columns: Vec<(&str, i64)> =
        budgets.devices[0].columns.iter().map(|it| (it.name.as_str(), cache(it))).collect();
    assert_eq!(columns, [("ready", 60 << 20), ("peak", 60 << 20), ("end", 60 << 20)]);
    assert_eq!(budgets.devices[0].cache.len(), 1);
}

#[test]
fn every_byte_that_was_handed_out_is_in_one_row() {
    check(
        &server(),
        expect![[r#"
            ready HandedOut 92160K
              weights 16384K
              kv_cache 40960K
              graphs 20480K
              nccl 6144K
              libraries 4096K
              stranded 4096K
            peak HandedOut 92160K
              weights 16384K
              kv_cache 40960K
              graphs 20480K
              nccl 6144K
              libraries 4096K
              stranded 4096K
            end HandedOut 92160K
              weights 16384K
              kv_cache 40960K
              activations 1024K
              graphs 20480K
              nccl 6144K
              libraries 4096K
              stranded 3072K
        "#]],
    );
}

#[test]
fn what_the_driver_charges_beyond_is_context_code_or_unaccounted() {
    let scene = format!(
        "PrimaryRetain dev=0 by=libcudart.so
         Alloc addr=0x10000000 bytes=20M {BY}
         block addr=0x10000000 bytes=8M requested=8M reserved=20M by={MODEL}
         wait ms=100
         sample used=520M
         CodeLoad bytes=1M by=libcublas.so.13
         wait ms=100
         sample used=528M
         wait ms=100
         sample used=531M
         wait ms=100
         Alloc addr=0x20000000 bytes=40M by=solver"
    );
    check(
        &scene,
        expect![[r#"
        ready Process 532480K
          weights 8192K
          context 512000K
          stranded 12288K
          unaccounted 0K
        peak Process 584704K
          weights 8192K
          libraries 40960K
          context 512000K
          code 8192K
          stranded 12288K
          unaccounted 3072K
        end Process 584704K
          weights 8192K
          libraries 40960K
          context 512000K
          code 8192K
          stranded 12288K
          unaccounted 3072K
    "#]],
    );
}

#[test]
fn where_nvml_does_not_know_the_process_the_card_is_what_the_rows_add_up_to() {
    let mut trace = recording("Alloc addr=0x10000000 bytes=20M by=job\nwait ms=100\nsample used=600M");
    for event in &mut trace.events {
        if let EventKind::Sample(sample) = &mut event.kind {
            sample.process_used = None;
        }
    }
    let found = budgets(&Source::of("server.gtr", trace), &Categories::default(), None).expect("no marks");
    expect![[r#"
        peak Card 614400K
          libraries 20480K
          unaccounted 593920K
    "#]]
    .assert_eq(&shown(found.devices[0].columns.iter().take(1)));
}

/// A naive sum, from what the driver was asked for.
fn handed_out(scene: &[&str]) -> i64 {
    let books = gputrace_trace::scene::ledger(&scene.join("\n"));
    books.devices().get(&0).map_or(0, |books| {
        let pages = books.pages.rounding().0 + books.graphs_kept.now.0;
        signed(books.physical.now().bytes.0 + pages)
    })
}

#[test]
fn rows_add_up_after_every_event() {
    let (server, sampled) =
        (server(), server().replace("push text=sleep", "sample used=200M\npush text=sleep"));
    for scene in [&server, &sampled] {
        let lines: Vec<&str> = scene.lines().collect();
        for n in 2..=lines.len() {
            let found = of(&lines[..n].join("\n"), None);
            for column in found.devices.iter().flat_map(|budget| &budget.columns) {
                let rows: i64 = column.bill.rows.values().sum();
                assert_eq!(rows, column.bill.total, "{} after {}", column.name, lines[n - 1]);
                if column.name == "end"
                    && column.why == "the last event"
                    && column.bill.figure == Figure::HandedOut
                {
                    assert_eq!(rows, handed_out(&lines[..n]), "after {}", lines[n - 1]);
                }
            }
        }
    }
}

#[test]
fn a_server_is_ready_when_its_graphs_are_captured_too() {
    let found = of(&server(), None);
    let ready = &found.devices[0].columns[0];
    assert_eq!(ready.name, "ready");
    assert_eq!(ready.why, "weights and caches exist, and 1 graph had been captured before the first launch");
}

#[test]
fn between_two_marks_it_is_seen_what_was_kept() {
    let marks = ["sleep", "wake"].map(|name| Instant::Mark(name.into()));
    let found = of(&server(), Some(marks));
    let (before, after) = found.devices[0].between.as_ref().expect("it was asked for");
    expect![[r#"
        sleep HandedOut 92160K
          weights 16384K
          kv_cache 40960K
          graphs 20480K
          nccl 6144K
          libraries 4096K
          stranded 4096K
        wake HandedOut 51200K
          weights 16384K
          graphs 20480K
          nccl 6144K
          libraries 4096K
          stranded 4096K
    "#]]
    .assert_eq(&shown([before, after].into_iter()));
    let kept = before.items.keys().filter(|thing| after.items.contains_key(thing)).count();
    assert_eq!((before.items.len(), kept), (6, 5), "all but the cache");
}

#[test]
fn a_mark_that_is_not_there_is_an_error_that_names_those_that_are() {
    let source = Source::of("server.gtr", recording(&server()));
    let marks = ["wake", "sleep"].map(|name| Instant::Mark(name.into()));
    let error = budgets(&source, &Categories::default(), Some(&marks)).err();
    assert_eq!(error.as_deref(), Some("no NVTX mark `sleep` (from there on); the marks are sleep, wake"));
}

#[test]
fn what_a_program_gives_back_as_it_ends_is_there_at_the_end() {
    let freed = format!(
        "{}\n free addr=0x10000000 bytes=8M\n free addr=0x10800000 bytes=8M\n note process.end=exit",
        server()
    );
    let found = of(&freed, None);
    let end = found.devices[0].columns.last().expect("an end");
    assert_eq!(end.bill.of(Row::Weights), 16 << 20, "{}", end.why);
}

#[test]
fn a_cache_that_is_made_again_is_the_same_cache() {
    let again = format!(
        "{}\n Alloc addr=0x70000000 bytes=40M {BY}
         block addr=0x70000000 bytes=40M requested=40M by=make_kv_cache@/job/serve.py:9,wake@/job/serve.py:40
         {}
         free addr=0x70000000 bytes=40M",
        server(),
        "block addr=0x11000000 bytes=1M requested=1M by=work@/job/serve.py:30\n free addr=0x11000000 bytes=1M\n".repeat(9)
    );
    assert_eq!(of(&again, None).devices[0].cache.len(), 2, "the second is made from another line");
}

#[test]
fn a_sample_from_before_the_last_change_is_out_of_date() {
    let found = of(
        "Alloc addr=0x10000000 bytes=20M by=job
         wait ms=100
         sample used=520M
         wait ms=100
         Alloc addr=0x20000000 bytes=20M by=job
         wait ms=100
         push text=a
         push text=b
         wait ms=900
         Alloc addr=0x30000000 bytes=20M by=job
         wait ms=100
         sample used=590M",
        Some(["a", "b"].map(|name| Instant::Mark(name.into()))),
    );
    let (before, _) = found.devices[0].between.as_ref().expect("it was asked for");
    assert_eq!(
        before.bill.total,
        570 << 20,
        "what the next sample charged without the 20 MiB that came after"
    );
}
