//! What gputrace says of PyTorch's pools, held against PyTorch: five programs of `tests/gpu/pools.py` on an H200 noted at ten
//! instants what `torch.cuda.memory_snapshot()` had in each pool, beside their traces.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use gputrace_replay::analyse::categories::Categories;
use gputrace_replay::analyse::growth::Growth;
use gputrace_replay::answers::leaks::{Leaks, Suppressions, Wanted};
use gputrace_replay::answers::postmortem::Postmortem;
use gputrace_replay::answers::verdict::verdict;
use gputrace_replay::import;
use gputrace_replay::ledger::Unwatched;
use gputrace_replay::ledger::pools::GraphState;
use gputrace_replay::story::Story;
use gputrace_replay::trace::source::Source;
use gputrace_schemas::event::Nanos;
use gputrace_sim::tune;
use gputrace_sim::whatif::{Answer, Confidence, Laboratory, Question};

const PROGRAMS: [&str; 5] = ["graphs", "compile", "mempool", "serving", "failed"];

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/pools").join(name)
}

fn source(name: &str) -> Source {
    Source::open(&golden(&format!("{name}.gtr"))).expect("a golden trace")
}

/// When, and reserved, allocated and active bytes of each pool by `segment_pool_id`, as PyTorch said.
type Instant = (u64, BTreeMap<String, [u64; 3]>);

#[test]
fn pools_hold_at_each_instant_what_pytorch_says_that_they_hold() {
    for name in PROGRAMS {
        let noted = std::fs::read(golden(&format!("{name}.json"))).expect("what PyTorch said");
        let instants: Vec<Instant> = serde_json::from_slice(&noted).expect("instants");
        assert_eq!(instants.len(), 10);
        let source = source(name);
        let mut n_pools = 0;
        for (time, said) in instants {
            let story = Story::within(&source, (Nanos(0), Nanos(time)), &mut Unwatched);
            let pools = &story.ledger.torch_pools.pools;
            let ours = pools.iter().map(|((_, id), pool)| {
                (format!("{id:?}"), [pool.reserved.now.0, pool.allocated.now.0, pool.active.now.0])
            });
            let is_some = |(_, bytes): &(String, [u64; 3])| *bytes != [0; 3];
            let ours: BTreeMap<_, _> = ours.filter(is_some).collect();
            let private: BTreeMap<_, _> =
                said.into_iter().filter(|(id, _)| id != "(0, 0)").filter(is_some).collect();
            n_pools = n_pools.max(private.len());
            assert_eq!(ours, private, "{name} at {time}");
        }
        assert!(n_pools > 0, "{name}");
    }
}

#[test]
fn every_request_has_its_address_in_the_replay() {
    for name in PROGRAMS {
        let trace = import::load(&golden(&format!("{name}.gtr"))).expect("a golden trace");
        assert_eq!(trace.notes, [""; 0], "{name}");
        let stream = &trace.devices[0];
        assert!(stream.knows_pools && stream.n_requests() > 10, "{name}");
        let check = Laboratory::new(stream).expect("a complete history").self_check(None);
        assert!(check.is_perfect(), "{name}: {check:?}");
    }
}

#[test]
fn a_pool_whose_capture_failed_is_abandoned_and_others_are_not() {
    for name in PROGRAMS {
        let story = Story::of_source(&source(name));
        let abandoned = story.ledger.torch_pools.pools.values().filter(|pool| pool.is_abandoned());
        let states: Vec<GraphState> =
            abandoned.flat_map(|pool| &pool.graphs).map(|graph| graph.state).collect();
        let expected: &[GraphState] = if name == "failed" { &[GraphState::Failed] } else { &[] };
        assert_eq!(states, expected, "{name}");
    }
}

#[test]
fn leaks_and_the_verdict_name_the_line_of_the_capture_that_failed() {
    for name in PROGRAMS {
        let source = source(name);
        let mut growth = Growth::default();
        let story = Story::with_lifetimes_and(&source, &Categories::default(), &mut growth);
        let leaks = Leaks::find(
            &story,
            source.definitions(),
            &growth,
            &Wanted::default(),
            &mut Suppressions::default(),
        );
        let found = Postmortem::of_story(story, &source, &growth);
        let verdict = verdict(&found, &source);
        let sites: Vec<&str> = leaks.abandoned.iter().map(|pool| &*pool.named.site).collect();
        let expected: &[&str] = if name == "failed" {
            &["<module> (/tmp/pools-work/failed.py:23) in CUDAGraph.capture_begin"]
        } else {
            &[]
        };
        assert_eq!(sites, expected, "{name}");
        let is_told = std::iter::once(verdict.kind).chain(verdict.also).any(|kind| kind == "abandoned");
        assert_eq!(is_told, name == "failed", "{name}: {}", verdict.kind);
    }
}

#[test]
fn the_setting_that_reserves_least_is_the_one_of_all_answers() {
    let folder = golden("..");
    let traces = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let (mut n_asked, mut n_open) = (0, 0);
    for path in traces.filter(|path| path.extension().is_some_and(|ending| ending == "gtr")) {
        for stream in import::load(&path).unwrap().devices.iter().filter(|stream| stream.settings.is_torch())
        {
            let Ok(laboratory) = Laboratory::new(stream) else { continue };
            let settings = tune::advised((2, 11), "").unwrap();
            let questions: Vec<Question> =
                settings.iter().map(|options| Question::torch((2, 11), options)).collect();
            let answers: Vec<Answer> =
                questions.iter().map(|question| laboratory.answer(question).unwrap()).collect();
            let ends: Vec<u64> = answers.iter().map(|answer| answer.peak_reserved_range.1).collect();
            let least = (0..ends.len()).min_by_key(|index| ends[*index]).unwrap();
            let found = laboratory
                .least_reserving(&questions, u64::MAX)
                .map(|(index, answer)| (index, answer.peak_reserved_range, answer.confidence));
            let expected = (least, answers[least].peak_reserved_range, answers[least].confidence);
            assert_eq!(found, Some(expected), "{}", path.display());
            assert!(laboratory.least_reserving(&questions, ends[least]).is_some());
            assert!(laboratory.least_reserving(&questions, ends[least].saturating_sub(1)).is_none());
            n_asked += 1;
            n_open += answers.iter().filter(|answer| answer.confidence == Confidence::Interval).count();
        }
    }
    assert!(n_asked > 5 && n_open > 0, "{n_asked} {n_open}");
}
