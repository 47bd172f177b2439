//! `gputrace whatif` from one recorded run, against what the edited programs took on an H100: tests/golden/whatif.
//!
//! `EDITS` names another folder with `truth.txt` and the traces that it names.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use expect_test::expect;
use serde_json::Value as Json;

fn folder() -> PathBuf {
    let other = std::env::var_os("EDITS").filter(|it| !it.is_empty());
    other.map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/whatif"), PathBuf::from)
}

fn whatif(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gputrace"));
    command.arg("whatif").args(arguments).current_dir(folder).output().expect("gputrace can be run")
}

fn json(folder: &Path, arguments: &[&str]) -> Json {
    let output = whatif(folder, &[&["--json"], arguments].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {said}"))
}

/// A figure against what was measured, percent: the likeliest, the least, the most.
fn errors(outcome: &Json, name: &str, truth: f64) -> [f64; 3] {
    let range = &outcome[format!("peak_{name}_range")];
    let all = [&outcome[format!("peak_{name}_bytes")], &range[0], &range[1]];
    all.map(|it| (it.as_f64().expect("bytes") / truth - 1.0) * 100.0)
}

#[test]
fn edited_programs_take_what_was_said_on_a_gpu() {
    let folder = folder();
    let truth = std::fs::read_to_string(folder.join("truth.txt")).expect("a file");
    let mut table = format!(
        "{:5} {:46} {:8} {:>9} {:>9} {:>17}\n",
        "model", "edits", "sure", "allocated", "reserved", "range"
    );
    let mut faults = vec![];
    for line in truth.lines().filter(|line| !line.starts_with('#')) {
        let words: Vec<&str> = line.split(' ').collect();
        let (model, edits) = (words[0], &words[1..words.len() - 3]);
        let [reserved, allocated] = [3, 2].map(|at| words[words.len() - at].parse::<f64>().expect("bytes"));
        let trace = format!("{model}.gtr");
        let answer = json(&folder, &[edits, &[&trace]].concat());
        let outcome = &answer["outcomes"][0];
        let sure = outcome["confidence"].as_str().expect("a word");
        let [in_use, ..] = errors(outcome, "allocated", allocated);
        let [kept, low, high] = errors(outcome, "reserved", reserved);
        let name = edits.join(" ");
        writeln!(
            table,
            "{model:5} {name:46} {sure:8} {in_use:+7.2} % {kept:+7.2} % {low:+7.2} to {high:+6.2}"
        )
        .expect("a string");
        let depends_on_kernels =
            ["--precision", "--lora", "--offload"].iter().any(|edit| edits.contains(edit));
        let most = match () {
            () if depends_on_kernels => (5.0, 5.0),
            () if edits.iter().any(|edit| ["--checkpoint", "--layout"].contains(edit)) => (2.0, 3.0),
            () => (1.0, 3.0),
        };
        let is_near = in_use.abs() <= most.0 && kept.abs() <= most.1;
        // The ends of the range are rounded outwards.
        let is_inside = low <= 0.0 && high >= 0.0;
        if !(is_near || depends_on_kernels && is_inside)
            || sure == "certain" && kept.abs().max(in_use.abs()) > 1.0
        {
            faults.push(line.to_owned());
        }
    }
    let _ = io::stderr().write_all(table.as_bytes());
    assert_eq!(faults, Vec::<String>::new(), "{table}");
}

/// Sizes by the models' published shapes: BERT-base with a head for masked words, and GPT-2.
#[test]
fn layers_have_the_parameters_of_the_model() {
    let width = 768;
    let of_layer = 12 * width * width + 13 * width;
    let bert = (30_522 + 512 + 2 + 2) * width + width * width + 3 * width + 30_522;
    let gpt = (50_257 + 1024 + 2) * width;
    for (trace, of_rest) in [("bert.gtr", bert), ("gpt2.gtr", gpt)] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gputrace"));
        let output = command
            .args(["layers", "--json", trace])
            .current_dir(folder())
            .output()
            .expect("gputrace can be run");
        let answer: Json = serde_json::from_slice(&output.stdout).expect("JSON");
        let rows = answer["processes"][0]["sections"][0]["layers"].as_array().expect("a list");
        let column =
            |name: &str| rows.iter().map(|row| row[name].as_u64().expect("bytes")).collect::<Vec<_>>();
        let mut expected = vec![4 * of_layer; 12];
        expected.push(4 * of_rest);
        assert_eq!(column("gradient_bytes"), expected, "{trace}");
        // Buffers come to the GPU with the parameters: positions and types of tokens.
        let mut parameters = column("parameter_bytes");
        let of_rest = parameters.pop().expect("a row");
        assert_eq!(parameters, expected[..12], "{trace}");
        assert!((expected[12]..expected[12] + (16 << 10)).contains(&of_rest), "{trace}: {of_rest}");
        let state: u64 = column("state_bytes").iter().sum();
        let parameters: u64 = expected.iter().sum();
        assert!(state >= 2 * parameters && state < 2 * parameters + (1 << 20), "{trace}: {state}");
    }
}

#[test]
fn edits_that_cannot_be_known_are_refused_in_words() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
    let refusal = |arguments: &[&str]| {
        let output = whatif(&folder, arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        String::from_utf8(output.stderr).expect("text").lines().next().unwrap_or_default().to_owned()
    };
    let all = [
        &["whatif/gpt2.gtr"][..],
        &["--precision", "fp32", "whatif/gpt2.gtr"],
        &["--checkpoint", "selective", "whatif/gpt2.gtr"],
        &["--checkpoint", "layers:0..12", "whatif/gpt2.gtr"],
        &["--adam", "fused", "--optimizer", "sgd", "whatif/gpt2.gtr"],
        &["--layout", "tp:2", "whatif/gpt2.gtr"],
        &["--optimizer", "lion", "whatif/gpt2.gtr"],
        &["--plan", "whatif/gpt2.gtr"],
        &["--checkpoint", "all", "kept-losses.gtr"],
        &["--accumulate", "2", "version1.gtr"],
    ];
    let said: String = all.map(|arguments| refusal(arguments) + "\n").concat();
    expect![[r#"
        gputrace: name an edit, such as --optimizer sgd or --checkpoint all; `gputrace whatif --help` lists them
        gputrace: whatif/gpt2.gtr: cuda:0: a trace does not show which tensors are in 16 bits, so their 32-bit sizes are not known
        error: invalid value 'selective' for '--checkpoint <LAYERS>': a trace does not show which operations `selective` would save; write all, every:2 or layers:0..5
        gputrace: whatif/gpt2.gtr: cuda:0: there are 12 layers, numbered from 0 to 11
        gputrace: whatif/gpt2.gtr: cuda:0: --adam is for Adam and AdamW, and the optimizer is neither: name one with --optimizer
        error: invalid value 'tp:2' for '--layout <LAYOUT:N>': `tp:2` is not a layout; write ddp:2, zero1:2 or fsdp:2, with the number of processes
        error: invalid value 'lion' for '--optimizer <NAME>': `lion` is not known; write one of sgd, momentum, adam, adamw, adafactor, adam8bit
        error: the following required arguments were not provided:
        gputrace: kept-losses.gtr: cuda:0: no layers that repeat were found in the forward pass: it is not known what to checkpoint
        gputrace: version1.gtr: cuda:0: 2 events were lost; record again with a larger --ring-size
    "#]].assert_eq(&said);
}

#[test]
fn edits_are_made_together_and_compare_with_each_other() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/whatif");
    let allocated = |arguments: &[&str]| {
        let answer = json(&folder, &[arguments, &["gpt2.gtr"]].concat());
        answer["outcomes"][0]["peak_allocated_bytes"].as_u64().expect("bytes")
    };
    let both = allocated(&["--optimizer", "sgd", "--checkpoint", "all"]);
    let (sgd, all) = (allocated(&["--optimizer", "sgd"]), allocated(&["--checkpoint", "all"]));
    assert!(both < sgd && both < all, "{both} {sgd} {all}");
    let half = allocated(&["--checkpoint", "every:2"]);
    let range = allocated(&["--checkpoint", "layers:0..11"]);
    assert!(all < half && range == all, "{all} {half} {range}");
    let [two, eight] = ["fsdp:2", "fsdp:8"].map(|layout| allocated(&["--layout", layout]));
    assert!(eight < two, "{eight} {two}");
}

#[test]
fn the_cheapest_plan_that_fits_is_named() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/whatif");
    let answer = json(&folder, &["--plan", "--limit", "4GiB", "gpt2.gtr"]);
    let plan = answer["plan"].as_u64().expect("an index") as usize;
    let outcomes = answer["outcomes"].as_array().expect("a list");
    assert_eq!(outcomes[plan]["costs"], "recomputation");
    assert!(outcomes[..plan].iter().all(|it| it["fits_at_worst"] == false), "{answer}");
    assert!(outcomes[plan]["recomputed_share"].as_f64().expect("a share") > 0.3);
    let wide = json(&folder, &["--plan", "--limit", "16GiB", "gpt2.gtr"]);
    assert_eq!(wide["plan"], 0);
}
