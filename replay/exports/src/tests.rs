use gputrace_schemas::event::Nanos;
use serde_json::Value;

use super::parts::events::origins;
use super::*;
use gputrace_analyse::live::{Native, When};
use gputrace_analyse::story::Story;
use gputrace_report::summary::{ProcessSummary, Summary};
use gputrace_trace::import::recording_of;
use gputrace_trace::scene::recording;
use gputrace_trace::source::Source;

/// NCCL and PyTorch, blocks that come and go, one that a stream holds, one that fails.
const SCENE: &str = "
    Create handle=n bytes=2M by=libnccl.so.2
    Alloc addr=0x7f0000000000 bytes=2M by=libc10_cuda.so
    block addr=0x7f0000000000 bytes=512 requested=400 allocated=512 reserved=2M stream=7 by=f@/job/a.py:2,main@/job/a.py:9
    Alloc addr=0x7f0000200000 bytes=20M by=libc10_cuda.so
    block addr=0x7f0000200000 bytes=8M requested=8M allocated=8389120 reserved=22M by=g@/job/a.py:3,main@/job/a.py:9
    block addr=0x7f0000a00000 bytes=2M requested=2M allocated=10486272 reserved=22M by=f@/job/a.py:2,main@/job/a.py:9
    record event=1
    free addr=0x7f0000200000 bytes=8M allocated=2097664 reserved=22M
    query event=1
    MemInfo bytes=3M extra=24M
    oom bytes=1G requested=1G allocated=2097664 reserved=22M by=h@/job/a.py:5
    free addr=0x7f0000a00000 bytes=2M allocated=512 reserved=22M
    Alloc addr=0x7e0000000000 bytes=1M by=main@/job/train";

fn source() -> Source {
    Source::of("train.gtr", recording(SCENE))
}

fn export(name: &str, source: &Source, when: When) -> Vec<u8> {
    let format = EXPORTS.iter().find(|format| format.name == name).expect("a format");
    let mut out = vec![];
    let sources = std::slice::from_ref(source);
    (format.export)(&Request { when, ..Request::of(sources) }, &mut out).expect("memory is endless");
    out
}

/// With every option that shows more.
fn export_all(name: &str, sources: &[Source]) -> Vec<u8> {
    let format = EXPORTS.iter().find(|format| format.name == name).expect("a format");
    let mut out = vec![];
    let takes = format.takes;
    let request = Request {
        native: Native::Shown,
        non_torch: takes.non_torch,
        before: sources.last().filter(|_| takes.before),
        ..Request::of(if takes.several { sources } else { &sources[..1] })
    };
    (format.export)(&request, &mut out).expect("memory is endless");
    out
}

fn text(name: &str) -> String {
    String::from_utf8(export(name, &source(), When::Peak)).expect("text")
}

fn summary(source: &Source) -> ProcessSummary {
    Summary::of(&[Story::of_source(source)]).processes.remove(0)
}

fn peak() -> u64 {
    summary(&source()).devices[0].driver.peak_bytes
}

#[test]
fn names_are_unique_and_everything_is_written_by_each() {
    let mut names: Vec<_> = EXPORTS.iter().map(|format| format.name).collect();
    for name in &names {
        assert!(!export(name, &source(), When::Peak).is_empty(), "{name}");
        export(name, &Source::of("empty.gtr", recording("")), When::End);
    }
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), EXPORTS.len());
}

#[test]
fn folded_stacks_add_up_to_the_peak() {
    let folded = text("folded");
    let sum: u64 = folded.lines().map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum();
    assert_eq!(sum, peak());
    let line = "cuda:0;PyTorch;main (a.py:9);f (a.py:2) ";
    assert!(folded.contains(line), "{folded}");
}

#[test]
fn speedscope_adds_up_to_the_peak_and_names_every_frame() {
    let file: Value = serde_json::from_str(&text("speedscope")).unwrap();
    let profile = &file["profiles"][0];
    let weights = profile["weights"].as_array().unwrap().iter().map(|weight| weight.as_u64().unwrap());
    assert_eq!((weights.sum::<u64>(), profile["endValue"].as_u64().unwrap()), (peak(), peak()));
    let n_frames = file["shared"]["frames"].as_array().unwrap().len() as u64;
    let samples = profile["samples"].as_array().unwrap().iter().flat_map(|sample| sample.as_array().unwrap());
    assert!(samples.map(|frame| frame.as_u64().unwrap()).all(|frame| frame < n_frames));
}

#[test]
fn a_request_that_pytorch_repeats_is_an_error_only_where_that_did_not_help() {
    // Refused, given back, served; then refused twice and given up.
    let scene = "
        Alloc addr=0x7f0000000000 bytes=20M by=libc10_cuda.so in_allocate=1
        Alloc bytes=1G result=2 by=libc10_cuda.so in_allocate=1
        Free addr=0x7f0000000000 by=libc10_cuda.so in_allocate=1
        Alloc addr=0x7e0000000000 bytes=1G by=libc10_cuda.so in_allocate=1
        block addr=0x7e0000000000 bytes=1G requested=1G allocated=1G reserved=1G
        Alloc bytes=2G result=2 by=libc10_cuda.so in_allocate=1
        Alloc bytes=2G result=2 by=libc10_cuda.so in_allocate=1
        oom bytes=2G requested=2G allocated=1G reserved=1G
        Alloc bytes=3G result=2 by=libnccl.so.2";
    let source = Source::of("train.gtr", recording(scene));
    let n_errors = |format: &str, name: &str| {
        let file = export(format, &source, When::Peak);
        file.windows(name.len()).filter(|at| *at == name.as_bytes()).count()
    };
    assert_eq!(n_errors("perfetto", "out of memory on cuda:0"), 2);
    assert_eq!(n_errors("firefox", r#""type":"oom""#), 2);
}

#[test]
fn rows_lead_to_the_same_totals() {
    let rows: Vec<Value> = text("jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let summary = summary(&source());
    let most = |field: &str| rows.iter().filter_map(|row| row[field].as_u64()).max();
    let torch = summary.devices[0].torch.as_ref().unwrap();
    assert_eq!(most("device_bytes"), Some(peak()));
    assert_eq!(most("torch_allocated_bytes"), torch.peak_allocated_bytes);
    assert_eq!(most("torch_reserved_bytes"), torch.peak_reserved_bytes);
    let csv = text("csv");
    assert_eq!(csv.lines().count(), rows.len() + 1);
    assert!(csv.lines().nth(4).unwrap().starts_with("3000,"), "{csv}");
}

#[test]
fn a_free_that_waits_for_a_stream_is_complete_when_the_allocator_saw_it_done() {
    let rows: Vec<Value> = text("jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of_block = rows.iter().filter(|row| row["kind"] == "block" && row["addr"] == "0x7f0000200000");
    let times: Vec<_> =
        of_block.map(|row| (row["action"].as_str().unwrap(), row["time_ns"].as_u64())).collect();
    assert_eq!(times, [("alloc", Some(4000)), ("free", Some(7000)), ("free_completed", Some(8000))]);
}

#[test]
fn pprof_has_the_peak_in_it() {
    use std::io::Read;
    let packed = export("pprof", &source(), When::Peak);
    let mut profile = vec![];
    flate2::read::GzDecoder::new(&packed[..]).read_to_end(&mut profile).unwrap();
    let mut sum = 0;
    let mut texts = vec![];
    for (field, bytes) in fields(&profile) {
        match field {
            2 => {
                let values = fields(&bytes).into_iter().find(|(field, _)| *field == 2).unwrap().1;
                let mut at = &values[..];
                let _objects = varint(&mut at);
                sum += varint(&mut at);
            }
            6 => texts.push(String::from_utf8(bytes).unwrap()),
            _ => {}
        }
    }
    assert_eq!(sum, peak());
    assert_eq!(texts[0], "");
    assert!(texts.contains(&"inuse_space".to_owned()) && texts.contains(&"/job/a.py".to_owned()));
}

#[test]
fn perfetto_has_a_track_for_every_owner_and_ends_where_the_books_do() {
    let trace = export("perfetto", &source(), When::Peak);
    let mut names = vec![];
    let mut n_ooms = 0;
    for (_, packet) in fields(&trace) {
        for (field, inside) in fields(&packet) {
            match field {
                60 => names.extend(
                    fields(&inside).into_iter().filter(|(field, _)| *field == 2).map(|(_, name)| name),
                ),
                11 => n_ooms += fields(&inside).iter().filter(|(field, _)| *field == 23).count(),
                _ => {}
            }
        }
    }
    // The last value of every counter together is what was live at the end.
    let mut last = std::collections::BTreeMap::new();
    for (_, packet) in fields(&trace) {
        for (_, event) in fields(&packet).into_iter().filter(|(field, _)| *field == 11) {
            let numbers = numbers(&event);
            if let (Some(track), Some(bytes)) = (numbers.get(&11), numbers.get(&30)) {
                last.insert(*track, *bytes);
            }
        }
    }
    assert_eq!(last.values().sum::<u64>(), summary(&source()).devices[0].driver.live_bytes);
    let names: Vec<_> = names.into_iter().map(|name| String::from_utf8(name).unwrap()).collect();
    assert_eq!(
        names,
        [
            "cuda:0 NCCL",
            "cuda:0 PyTorch",
            "cuda:0 PyTorch allocated",
            "cuda:0 PyTorch cached",
            "cuda:0 application"
        ]
    );
    assert_eq!(n_ooms, 1);
}

fn varint(at: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..).step_by(7) {
        let (byte, rest) = at.split_first().unwrap();
        *at = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            break;
        }
    }
    value
}

/// Fields that are numbers.
fn numbers(mut at: &[u8]) -> std::collections::BTreeMap<u64, u64> {
    let mut numbers = std::collections::BTreeMap::new();
    while !at.is_empty() {
        let key = varint(&mut at);
        if key & 7 == 2 {
            let length = varint(&mut at) as usize;
            at = &at[length..];
        } else {
            numbers.insert(key >> 3, varint(&mut at));
        }
    }
    numbers
}

/// Fields that have bytes.
fn fields(mut at: &[u8]) -> Vec<(u64, Vec<u8>)> {
    let mut fields = vec![];
    while !at.is_empty() {
        let key = varint(&mut at);
        if key & 7 == 2 {
            let length = varint(&mut at) as usize;
            fields.push((key >> 3, at[..length].to_vec()));
            at = &at[length..];
        } else {
            varint(&mut at);
        }
    }
    fields
}

#[test]
fn a_snapshot_comes_back_as_it_went() {
    let source = source();
    let sources = [source];
    let (pickle, [source]) = (export_all("torch-pickle", &sources), &sources);
    let back = Source::of("back.pickle", recording_of(&pickle).unwrap());
    let (there, back) = (summary(source), summary(&back));
    let (there, back) = (&there.devices[0], &back.devices[0]);
    assert_eq!(there.driver.peak_bytes, back.driver.peak_bytes);
    let ooms = |device: &gputrace_report::summary::DeviceSummary| device.torch.as_ref().unwrap().ooms;
    assert_eq!((ooms(there), ooms(back)), (1, 1));
}

#[test]
fn a_snapshot_of_pytorch_alone_has_the_same_figures_after_two_journeys() {
    let scene = SCENE.lines().filter(|line| !line.contains("libnccl") && !line.contains("/job/train"));
    let source = Source::of("train.gtr", recording(&scene.collect::<Vec<_>>().join("\n")));
    let once = Source::of("1", recording_of(&export("torch-pickle", &source, When::Peak)).unwrap());
    let twice = Source::of("2", recording_of(&export("torch-pickle", &once, When::Peak)).unwrap());
    let figures = |source: &Source| {
        let device = summary(source).devices.remove(0);
        let torch = device.torch.unwrap();
        let peaks = (torch.peak_allocated_bytes, torch.peak_reserved_bytes, torch.peak_requested_bytes);
        (peaks, torch.allocations, torch.frees, torch.device_allocs, device.driver.live_bytes)
    };
    assert_eq!(figures(&source), figures(&once));
    assert_eq!(figures(&once), figures(&twice));
    let folded = |source: &Source| String::from_utf8(export("folded", source, When::End)).unwrap();
    let stacks = folded(&once);
    assert!(stacks.contains("main (a.py:9);f (a.py:2) 512"), "{stacks}");
    assert_eq!(stacks, folded(&twice));
}

#[test]
fn nothing_private_is_in_a_redacted_export_of_any_format() {
    const PRIVATE: &str = "
        Alloc addr=0x7f0000000000 bytes=20M by=/u/site-packages/torch/lib/libc10_cuda.so
        block addr=0x7f0000000000 bytes=8M requested=8M allocated=8M reserved=20M by=f@/private0/secret1.py:2,g@/v/site-packages/secret2/secret3.py:3
        Alloc addr=0x7f0002000000 bytes=2M by=main@/private4/secret5
        Create handle=n bytes=2M by=/private6/secret7.so,g@/private0/secret1.py:3
        oom bytes=1G requested=1G allocated=8M reserved=20M by=h@/private0/secret8.py:5
        note secret9";
    let private = || {
        let mut recording = recording(PRIVATE);
        let process = &mut recording.process;
        process.host = "secretA".into();
        process.boot = "secretB".into();
        process.executable = "/private4/secret5".into();
        process.command = vec!["/private4/secret5".into(), "--secretC".into()];
        process.environment = vec![("NCCL_SOCKET_IFNAME".into(), "secretD".into())];
        recording.threads.values_mut().for_each(|thread| thread.name = "secretE".into());
        recording.devices.iter_mut().for_each(|device| device.uuid = "GPU-secretF".into());
        Source::of("/private9/secretG.gtr", recording)
    };
    let sees = |sources: &[Source], name: &str| {
        let out = unpacked(&export_all(name, sources));
        let text = String::from_utf8_lossy(&out);
        ["secret", "private"].iter().any(|word| text.contains(word))
    };
    for format in EXPORTS {
        let name = format.name;
        assert!(sees(&[private(), private()], name), "{name}: what is private is there to be found");
        assert!(!sees(&[private().redacted(), private().redacted()], name), "{name}");
    }
}

/// What is compressed inside of a file, behind it.
fn unpacked(bytes: &[u8]) -> Vec<u8> {
    use std::io::Read;
    let mut out = bytes.to_vec();
    if bytes.starts_with(&[0x1f, 0x8b]) {
        flate2::read::GzDecoder::new(bytes).read_to_end(&mut out).unwrap();
    }
    for (at, _) in bytes.windows(4).enumerate().filter(|(_, magic)| *magic == [0x28, 0xb5, 0x2f, 0xfd]) {
        zstd::stream::Decoder::new(&bytes[at..]).unwrap().single_frame().read_to_end(&mut out).unwrap();
    }
    out
}

#[test]
fn ranks_of_one_machine_have_one_clock_and_others_the_time_of_day() {
    let at = |boot: &str, start, start_realtime| {
        let mut recording = recording("");
        (recording.process.boot, recording.process.start) = (boot.into(), Nanos(start));
        recording.process.start_realtime = start_realtime;
        Source::of("rank.gtr", recording)
    };
    assert_eq!(origins(&[at("a", 50, 1000), at("a", 20, 990)]), [Nanos(30), Nanos(0)]);
    assert_eq!(origins(&[at("a", 50, 1000), at("b", 20, 990)]), [Nanos(10), Nanos(0)]);
    assert_eq!(origins(&[at("", 0, 0), at("b", 20, 990)]), [Nanos(0), Nanos(0)]);
}

#[test]
fn a_difference_is_drawn_in_two_colours_and_nothing_is_no_error() {
    let smaller = SCENE.lines().filter(|line| !line.contains("libnccl")).collect::<Vec<_>>().join("\n");
    let sources = [source(), Source::of("before.gtr", recording(&smaller))];
    let drawn = String::from_utf8(export_all("svg", &sources)).unwrap();
    assert!(drawn.contains("NCCL") && drawn.contains("red: more than in before.gtr"), "{drawn}");
    let empty = Source::of("empty.gtr", recording(""));
    assert!(String::from_utf8(export("svg", &empty, When::Peak)).unwrap().contains("No GPU memory"));
}
