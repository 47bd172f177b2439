use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use gputrace_schemas::event::Nanos;

use super::*;
use gputrace_analyse::live::{When, pictures};
use gputrace_answers::diff::{By, peaks, section};
use gputrace_answers::leaks::{Leaks, Suppressions, Wanted};
use gputrace_exports::parts::parquet::read::{Groups, Table};
use gputrace_ranks::calls::Lane;
use gputrace_ranks::collect::collect;
use gputrace_ranks::memory;
use gputrace_trace::scene::recording;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

fn summary(source: &Source) -> Summary {
    let reduced = reduce(source).unwrap();
    Summary::of(Path::new("x.summary.parquet"), reduced.bytes).unwrap()
}

/// The process is to `ranks` what it is by its trace.
fn is_the_same(source: &Source, participant: &Participant) -> Summary {
    let summary = summary(source);
    let again = summary.participant().unwrap();
    let json = |it: &Participant| serde_json::to_string(it).unwrap();
    assert_eq!(json(&again), json(participant));
    summary
}

/// Every state that the summary has is what the trace shows there; how many there are.
fn states_are_the_same(source: &Source) -> usize {
    let participant = collect(source);
    let summary = is_the_same(source, &participant);
    let mut n = 0;
    for (idx, membership) in participant.memberships.iter().enumerate() {
        let enters = membership.lane(Lane::Collective).map_or(&[][..], |calls| &calls.enters[..]);
        for used in &participant.memory {
            for n_before in 0..=enters.len() {
                let from = n_before.checked_sub(1).map_or(Nanos(0), |before| enters[before]);
                let until = enters.get(n_before).copied().unwrap_or(Nanos(u64::MAX));
                let kept = summary.most_between(used.ordinal, idx, n_before as u64).unwrap();
                let Some((time, held)) = kept else { continue };
                let (then, mut shown) = memory::most_between(source, used.ordinal, from, until);
                shown.retain(|_, bytes| bytes.0 > 0);
                assert_eq!((time, held), (then, shown), "{idx} {n_before} cuda:{}", used.ordinal);
                n += 1;
            }
        }
    }
    n
}

#[test]
fn what_was_held_between_two_collectives_is_what_the_trace_shows() {
    let source = Source::open(&golden().join("dataparallel.gtr")).unwrap();
    let n = states_are_the_same(&source);
    assert!(n > 10, "{n} states");
}

#[test]
fn peaks_ends_and_leaks_of_real_programs_are_those_of_their_traces() {
    let traces = std::fs::read_dir(golden()).unwrap().map(|entry| entry.unwrap().path());
    let traces: BTreeSet<PathBuf> =
        traces.filter(|path| path.extension().is_some_and(|it| it == "gtr")).collect();
    assert!(traces.len() > 5);
    for path in traces {
        let source = Source::open(&path).unwrap();
        let summary = summary(&source);
        for (when, kept) in [(When::Peak, summary.at_peak()), (When::End, summary.at_end())] {
            let (story, pictures) = pictures(&source, when);
            let (kept, shown) = (kept.unwrap(), Side::of(source.definitions(), &story, &pictures));
            assert!(peaks(&kept, &shown).iter().all(|change| change.bytes.0 == change.bytes.1));
            for by in [By::Stack, By::Site, By::Owner, By::Size] {
                let section = section(&kept, &shown, by, 5);
                let text = format!("{:?}", section.items);
                assert!(text.contains("no difference"), "{} {when:?} {by:?}: {text}", path.display());
            }
        }
        let mut growth = Growth::default();
        let story = Story::watched(&source, &mut growth);
        let wanted = Wanted { n_rows: 100, ..Wanted::default() };
        let sections = |found: Found| {
            format!("{:?}", Leaks::of(found, &wanted, &mut Suppressions::default()).sections())
        };
        let found = Found::of(&story, source.definitions(), &growth);
        assert_eq!(sections(summary.leaks().unwrap()), sections(found), "{}", path.display());
    }
}

/// Of all roles together, at the peak and over time, what PyTorch's blocks held.
#[test]
fn what_memory_was_for_adds_up_to_the_peak_of_the_blocks() {
    for name in ["kept-losses.gtr", "dataparallel.gtr", "varying-lengths.gtr"] {
        let reduced = reduce(&Source::open(&golden().join(name)).unwrap()).unwrap();
        let columns = ["kind", "name", "role", "device", "number", "bytes", "least_bytes", "most_bytes"];
        let table = Table::read(&reduced.bytes, &columns, Groups::All).unwrap();
        let (mut peaks, mut sums) = (BTreeMap::new(), BTreeMap::new());
        let (mut ever, mut over_time) = (BTreeMap::new(), BTreeMap::new());
        for row in 0..table.n_rows {
            let number = |column| table.number(row, column).unwrap_or(-1);
            let (kind, name) =
                (table.text(row, "kind").unwrap(), table.text(row, "name").unwrap_or_default());
            let (device, role) = (number("device"), table.text(row, "role").unwrap_or_default());
            match (kind, name) {
                ("peak", "allocated") => drop(peaks.insert(device, number("bytes"))),
                ("role", _) => {
                    *sums.entry(device).or_insert(0) += number("bytes");
                    ever.insert((device, role), number("most_bytes"));
                }
                ("series", "role") => {
                    let (least, most) = (number("least_bytes"), number("most_bytes"));
                    assert!(least <= number("bytes") && number("bytes") <= most, "{name} {role}");
                    let highest = over_time.entry((device, role)).or_insert(0);
                    *highest = most.max(*highest);
                }
                _ => {}
            }
        }
        assert!(!sums.is_empty(), "{name}");
        assert_eq!(sums, peaks, "{name}");
        assert_eq!(over_time, ever, "{name}");
    }
}

#[test]
fn the_budget_of_a_server_is_that_of_its_trace() {
    let path = golden().join("pools/serving.gtr");
    let source = Source::open(&path).unwrap();
    let found = budgets(&source, &Categories::default(), None).unwrap();
    let trace = source.requests().map_err(ToString::to_string);
    let of_trace = budget::reply(&found, &trace, Machine::default(), &[]);
    let of_summary = summary(&source).budget().unwrap();
    assert_eq!(of_summary.answer, serde_json::to_value(of_trace.answer).unwrap());
    assert_eq!(format!("{:?}", of_summary.part.sections), format!("{:?}", of_trace.part.sections));
    assert!(of_trace.part.sections.len() > 1, "{:?}", of_trace.part.sections);
    let trains = summary(&Source::open(&golden().join("varying-lengths.gtr")).unwrap());
    let why = trains.budget().err().expect("a program that trains has no budget in its summary").to_string();
    assert!(why.contains("does not serve requests needs the trace"), "{why}");
}

#[test]
fn segments_before_the_first_block_and_several_streams_are_followed() {
    let source = Source::of(
        "train.gtr",
        recording(
            "Alloc addr=s bytes=20M by=libc10_cuda.so
             Alloc addr=b bytes=3M by=main@/job/train
             block addr=s bytes=2M requested=2M stream=5 by=f@/job/a.py:3
             Free addr=b
             block addr=t bytes=1M requested=1M by=g@/job/a.py:4
             free addr=t bytes=1M
             Alloc addr=c bytes=30M by=main@/job/train",
        ),
    );
    let summary = summary(&source);
    let (story, pictures) = pictures(&source, When::Peak);
    let shown = Side::of(source.definitions(), &story, &pictures);
    let section = section(&summary.at_peak().unwrap(), &shown, By::Stack, 5);
    assert!(format!("{section:?}").contains("no difference"), "{section:?}");
}

#[test]
fn the_same_trace_gives_the_same_bytes_and_another_gives_another_name() {
    let of = |scene: &str| reduce(&Source::of("train.gtr", recording(scene))).unwrap();
    let (one, again) = (of("Alloc addr=a bytes=4M by=x@/a"), of("Alloc addr=a bytes=4M by=x@/a"));
    assert_eq!((&one.name, &one.bytes), (&again.name, &again.bytes));
    assert!(one.name.ends_with(ENDING));
    assert_ne!(of("Alloc addr=a bytes=5M by=x@/a").name, one.name);
}

#[test]
fn what_is_cut_or_of_another_version_or_no_summary_is_said_clearly() {
    let bytes =
        reduce(&Source::of("job/rank3.gtr", recording("Alloc addr=a bytes=4M by=x@/a"))).unwrap().bytes;
    let said = |bytes: &[u8]| Summary::of(Path::new("s.parquet"), bytes.to_vec()).unwrap_err().to_string();
    assert_eq!(
        said(&bytes[..bytes.len() / 2]),
        "s.parquet is not a readable summary: it ends early: it was not fully written or copied"
    );
    assert_eq!(said(b"gtr"), "s.parquet is not a readable summary: it is not a Parquet file");
    let mut other = bytes.clone();
    let at = other.windows(18).position(|it| it == b"gputrace.summary/1").unwrap();
    other[at + 17] = b'9';
    let error = said(&other);
    let known = error.contains("format gputrace.summary/9") && error.contains("reads gputrace.summary/1");
    assert!(known && error.contains("job/rank3.gtr again"), "{error}");
    let summary = Summary::of(Path::new("s.parquet"), bytes).unwrap();
    let error = summary.lacks("replay").to_string();
    assert!(
        error.starts_with("s.parquet is a summary: replay needs the trace, ")
            && error.ends_with(":job/rank3.gtr"),
        "{error}"
    );
}

#[test]
fn numbers_that_refer_to_nothing_are_refused() {
    let source = Source::open(&golden().join("dataparallel.gtr")).unwrap();
    let mut participant = collect(&source);
    assert_eq!(participant.check(), Ok(()));
    participant.memberships[0].parent = Some(7);
    assert!(participant.check().is_err());
    participant.memberships[0].parent = None;
    participant.memberships[0].kinds.clear();
    assert!(participant.check().is_err());
}

#[test]
fn a_summary_of_only_its_states_says_the_same() {
    let source = Source::open(&golden().join("dataparallel.gtr")).unwrap();
    let whole = summary(&source);
    let again = Summary::of_states(Path::new("x.summary.parquet"), &whole.states()).unwrap();
    let participant = |it: &Summary| serde_json::to_string(&it.participant().unwrap()).unwrap();
    assert_eq!(participant(&again), participant(&whole));
    let damaged = whole.states().replace("\"memberships\":[", "\"memberships\":[7,");
    let damaged = Summary::of_states(Path::new("x.summary.parquet"), &damaged).unwrap();
    let error = damaged.participant().unwrap_err().to_string();
    assert!(error.contains("its `participant`: invalid type"), "{error}");
}

/// Jobs that `ranks` is tried with, one per line, its ranks apart by `|`.
const JOBS: &str = include_str!("jobs.txt");

#[test]
fn what_a_job_says_its_summaries_say() {
    for job in JOBS.lines() {
        let ranks: Vec<&str> = job.split('|').map(str::trim).collect();
        for (rank, text) in (0..).zip(&ranks).filter(|(_, text)| !text.is_empty()) {
            let source = gputrace_ranks::scene::rank(rank, ranks.len() as u32, text);
            is_the_same(&source, &collect(&source));
        }
    }
}
