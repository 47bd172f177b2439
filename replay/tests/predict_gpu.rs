//! Predictions from small runs on an H200, against what larger runs of the same programs had reserved there: tests/golden/predict.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use expect_test::expect;
use gputrace_replay::answers::predict::{Asked, Recorded, Values, predict};
use gputrace_replay::answers::whatif::Machine;
use gputrace_replay::import;
use gputrace_schemas::event::Bytes;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/predict")
}

/// `batch=4,seq=256`, or `batch4.seq256`.
fn values(text: &str, between: char) -> Values {
    let value = |pair: &str| {
        let digits = pair.find(|it: char| it.is_ascii_digit()).expect("a value");
        (pair[..digits].trim_end_matches('=').to_owned(), pair[digits..].parse().expect("a number"))
    };
    text.split(between).map(value).collect()
}

/// The runs that were recorded of each program.
fn recorded() -> BTreeMap<String, Vec<Recorded>> {
    let mut programs: BTreeMap<String, Vec<Recorded>> = BTreeMap::new();
    let mut names: Vec<String> = fs::read_dir(folder())
        .expect("a folder")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
        .filter(|name| name.ends_with(".gtr"))
        .collect();
    names.sort();
    for name in names {
        let (program, at) = name.trim_end_matches(".gtr").split_once('.').expect("values");
        let run = Recorded {
            values: values(at, '.'),
            trace: import::load(&folder().join(&name)).expect("a trace"),
            gpus: vec!["NVIDIA H200".into()],
            path: name.clone(),
        };
        programs.entry(program.into()).or_default().push(run);
    }
    programs
}

fn answered(runs: &[Recorded], asked: &Asked) -> serde_json::Value {
    serde_json::to_value(predict(runs, asked).expect("an answer").answer).expect("JSON")
}

#[test]
fn what_larger_runs_reserved_on_a_gpu_is_in_the_range_and_certain_answers_are_right() {
    let (programs, mut table) = (recorded(), String::new());
    let truth = fs::read_to_string(folder().join("truth.txt")).expect("a file");
    for line in truth.lines().filter(|line| !line.starts_with('#')) {
        let [program, at, reserved] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let asked = Asked { at: vec![values(at, ',')], ..Asked::default() };
        let json = answered(&programs[program], &asked);
        let answer = &json["outcomes"][0];
        let bytes = |value: &serde_json::Value| value.as_f64().expect("bytes");
        let (truth, best) = (reserved.parse::<f64>().expect("bytes"), bytes(&answer["peak_reserved_bytes"]));
        let range = &answer["peak_reserved_range"];
        let [off, low, high] =
            [best, bytes(&range[0]), bytes(&range[1])].map(|it| (it / truth - 1.0) * 100.0);
        let is_certain = answer["certain"].as_bool().expect("yes or no");
        assert!(low <= 0.0 && high >= 0.0, "{line}: {low} {high}");
        assert!(!is_certain || off.abs() <= 1.0, "{line}: {off}");
        let sure = answer["sure"].as_str().expect("a word");
        writeln!(table, "{program:12} {at:18} {off:+6.2} %  {sure:8} {low:+7.2} to {high:+7.2} %")
            .expect("a string");
    }
    // What is predicted, and the ends of its range, against what was reserved.
    expect![[r#"
        gpt          batch=32            +0.00 %  certain    -1.02 to   +1.00 %
        gpt          batch=48            +0.00 %  certain    -1.01 to   +1.00 %
        gpt          batch=100           +0.00 %  certain    -0.99 to   +1.00 %
        lstm         batch=64,seq=256    -2.85 %  range     -19.80 to  +33.33 %
        lstm         batch=32,seq=1024   -2.61 %  range     -17.96 to  +34.21 %
        lstm         batch=100,seq=512   -2.85 %  range     -17.86 to  +33.25 %
        gpt_matrix   batch=8,seq=1024    +0.00 %  certain    -0.99 to   +1.00 %
        gpt_matrix   batch=16,seq=512    +0.00 %  certain    -0.99 to   +1.00 %
        gpt_matrix   batch=4,seq=2048    +0.00 %  certain    -0.99 to   +1.00 %
        resnet       batch=128           +0.24 %  range     -15.97 to  +12.32 %
        resnet       batch=200           -4.27 %  range     -19.33 to   +9.09 %
        resnet       batch=256           +0.39 %  range     -15.33 to  +12.14 %
        gpt_compile  batch=32            +0.00 %  range     -13.90 to  +16.23 %
        gpt_compile  batch=48            +0.05 %  range     -13.90 to  +16.20 %
        gpt_compile  batch=96            +0.02 %  range     -13.88 to  +16.18 %
        evaluate     batch=64            +0.00 %  range      -9.91 to  +11.00 %
        evaluate     batch=128           +0.00 %  range      -9.91 to  +11.00 %
        evaluate     batch=200           +0.00 %  range      -9.91 to  +11.00 %
        moe          batch=128           -0.08 %  range     -34.29 to  +61.01 %
        moe          batch=256           -3.99 %  range     -38.12 to  +93.12 %
        moe          batch=400           -9.81 %  range     -39.23 to  +85.05 %
        gnn          nodes=80000         +0.00 %  certain    -0.99 to   +1.00 %
        gnn          nodes=160000        +0.00 %  certain    -0.99 to   +1.00 %
        gnn          nodes=250000        +0.00 %  certain    -0.99 to   +1.00 %
        unet         batch=32,side=128   +2.15 %  range     -28.25 to  +19.06 %
        unet         batch=16,side=256   -1.96 %  range     -30.29 to  +14.65 %
        unet         batch=48,side=192   -6.37 %  range     -33.98 to   +8.75 %
    "#]]
    .assert_eq(&table);
}

/// A U-Net that restores images was run on an H100 with each batch from 158 to 173 alone, and this limit
/// (`torch.cuda.set_per_process_memory_fraction`): 158 to 162, 166 to 168 and 170 ran, the others ran out of memory.
#[test]
fn what_fits_is_out_of_order_as_on_the_gpu() {
    let machine = Machine { limit: Some(Bytes(1_235_222_528)), other: Some(Bytes(0)), ..Machine::default() };
    let asked =
        Asked { fit: Some("batch".into()), policies: vec!["torch".into()], machine, ..Asked::default() };
    let fit = &answered(&recorded()["clean"], &asked)["fits"][0];
    assert_eq!((&fit["largest"], &fit["out_of_order"]), (&162.into(), &vec![166, 167, 168, 170].into()));
    assert_eq!(fit["certain"], false);
}
