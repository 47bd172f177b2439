//! Programs of PyTorch and JAX, told as scenes after public threads: the first screen is held against the truth of each, by the name of the
//! cause and the program's line. Healthy ones must not be called ill.

use std::collections::HashMap;
use std::fmt::Write as _;

use gputrace_analyse::categories::Categories;
use gputrace_analyse::growth::Growth;
use gputrace_analyse::story::Story;
use gputrace_answers::postmortem::Postmortem;
use gputrace_answers::verdict::{verdict, verdict_beside};
use gputrace_report::model::{Item, Value};
use gputrace_trace::scene::recording;
use gputrace_trace::source::Source;

#[path = "programs/evidence.rs"]
mod evidence;
#[path = "programs/healthy.rs"]
mod healthy;
#[path = "programs/ill.rs"]
mod ill;
#[path = "programs/job.rs"]
mod job;
#[path = "programs/later.rs"]
mod later;
#[path = "programs/weights.rs"]
mod weights;

use job::Job;

/// A program with a known cause.
pub(crate) struct Ill {
    pub(crate) name: &'static str,
    /// The public thread whose program it repeats.
    pub(crate) thread: &'static str,
    pub(crate) truth: &'static str,
    /// Causes of which the first screen must name one.
    pub(crate) causes: &'static [&'static str],
    /// Where it must point to: one of these.
    pub(crate) lines: &'static [&'static str],
    pub(crate) scene: fn(&mut Job),
}

/// A program that only looks ill.
pub(crate) struct Healthy {
    pub(crate) name: &'static str,
    pub(crate) scene: fn(&mut Job),
}

/// What the first screen says.
struct Screen {
    kind: String,
    cause: String,
    site: String,
    text: String,
}

fn screen(scene: fn(&mut Job)) -> Screen {
    let mut job = Job::default();
    scene(&mut job);
    let source = Source::of("job/train.gtr", recording(&job.scene));
    let mut growth = Growth::default();
    let story = Story::with_lifetimes_and(&source, &Categories::default(), &mut growth);
    let found = Postmortem::of_story(story, &source, &growth);
    let verdict = verdict(&found, &source);
    let (mut site, mut text) = (String::new(), verdict.section.title.clone());
    for item in &verdict.section.items {
        let Item::Fact { name, label, value: Value::Text(value) | Value::Command(value), remark, .. } = item
        else {
            continue;
        };
        _ = write!(text, "\n  {label}  {value}  {remark}");
        if *name == "call_site" {
            site.clone_from(value);
        }
    }
    // Of what grows, the line that calls the model is named with the rate.
    if let Some((_, calls)) = text.split_once("per call of ") {
        site = format!("{site}; {}", calls.split(',').next().unwrap_or_default());
    }
    Screen { kind: verdict.kind.to_owned(), cause: verdict.cause, site, text }
}

#[test]
fn the_first_screen_names_cause_and_line_of_each_ill_program() {
    let mut wrong = vec![];
    for case in ill::CASES.iter().chain(later::ILL).chain(evidence::ILL).chain(weights::ILL) {
        let found = screen(case.scene);
        let is_right = case.causes.contains(&found.cause.as_str())
            && case.lines.iter().any(|line| found.site.contains(line));
        println!(
            "{} | {} | {} | {}",
            case.name,
            case.truth,
            found.text.lines().next().unwrap_or_default(),
            is_right
        );
        if !is_right {
            wrong.push(format!(
                "{} ({}; {:?} at {:?}):\n{}",
                case.name, case.truth, case.causes, case.lines, found.text
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    assert!(
        ill::CASES.len() >= 20
            && ill::CASES
                .iter()
                .chain(later::ILL)
                .chain(evidence::ILL)
                .chain(weights::ILL)
                .all(|case| case.thread.starts_with("https://"))
    );
}

#[test]
fn no_healthy_program_is_called_ill() {
    let mut wrong = vec![];
    for case in healthy::CASES.iter().chain(later::HEALTHY).chain(weights::HEALTHY) {
        let found = screen(case.scene);
        println!("{} | {}", case.name, found.text.lines().next().unwrap_or_default());
        if found.kind != "nothing_wrong" {
            wrong.push(format!("{}:\n{}", case.name, found.text));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    assert!(healthy::CASES.len() >= 10);
}

#[test]
fn what_is_used_is_not_said_to_be_held_for_nothing() {
    for (name, cause) in weights::UNSAID {
        let case = weights::HEALTHY.iter().find(|case| case.name == *name).expect("a case");
        let found = screen(case.scene);
        assert_ne!(found.cause, *cause, "{}", found.text);
    }
}

#[test]
fn what_the_peak_is_without_a_part_is_that_of_the_same_requests_without_its_blocks() {
    let case = ill::CASES.iter().find(|case| case.name == "ema_copy").expect("a case");
    let found = screen(case.scene);
    let mut job = Job::without("deepcopy");
    (case.scene)(&mut job);
    let mib = |bytes: u64| format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20));
    let said = format!("lower, at {}", mib(job.peak));
    assert!(found.text.contains(&said), "{said}\n{}", found.text);
}

#[test]
fn loader_workers_that_hold_a_context_and_nothing_else_are_named() {
    let mut job = Job::default();
    let mut net = job.net("/job/net.py", "main@/job/run.py:12", &job::sizes(1), 4 * job::MIB);
    (0..12).for_each(|_| job.step(&mut net, "/job/train.py", 30));
    let source = Source::of("job/train.gtr", recording(&job.scene));
    let said = |worker: &str| {
        let mut growth = Growth::default();
        let story = Story::with_lifetimes_and(&source, &Categories::default(), &mut growth);
        let found = Postmortem::of_story(story, &source, &growth);
        let workers: Vec<Story> = ["job/train.11.gtr", "job/train.12.gtr"]
            .map(|path| Story::of_source(&Source::of(path, recording(worker))))
            .into();
        let verdict = verdict_beside(&found, &source, &workers);
        (verdict.kind, verdict.cause, format!("{:?}", verdict.section.items))
    };
    let context = "PrimaryRetain device=0 handle=7 by=init_worker@/job/data.py:26
         sample used=518M";
    let (kind, cause, text) = said(context);
    assert_eq!(
        (kind, cause.as_str()),
        ("kept", "CUDA contexts of child processes that never allocate"),
        "{text}"
    );
    assert!(text.contains("1.01 GiB together") && text.contains("data.py:26"), "{text}");
    // One that uses the GPU is none of them.
    let (kind, _, text) = said(&format!("{context}\nAlloc addr=a bytes=100M by=libcudart.so"));
    assert_eq!(kind, "nothing_wrong", "{text}");
}

#[test]
fn every_case_has_a_name_of_its_own() {
    let mut names: HashMap<&str, u32> = HashMap::new();
    let ill =
        ill::CASES.iter().chain(later::ILL).chain(evidence::ILL).chain(weights::ILL).map(|case| case.name);
    let all =
        ill.chain(healthy::CASES.iter().chain(later::HEALTHY).chain(weights::HEALTHY).map(|case| case.name));
    all.for_each(|name| *names.entry(name).or_default() += 1);
    assert!(names.values().all(|n| *n == 1), "{names:?}");
}
