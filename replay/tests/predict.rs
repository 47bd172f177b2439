//! `gputrace predict` as users meet it: traces of a small training loop, written at some batches, and what it says of others.

use std::cell::RefCell;
use std::fs;
use std::io::{Cursor, Read};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::rc::Rc;

use expect_test::expect;
use gputrace_schemas::event::*;
use gputrace_schemas::writer::Writer;
use gputrace_sim::addresses::{AddressSpace, Bump, Direction};
use gputrace_sim::device::{Device as Card, Placement};
use gputrace_sim::ops::{AllocId, Allocation, Builder, Op, OpStream, PoolIdx, StackId as Asked, StreamIdx};
use gputrace_sim::policies::torch::{Torch, parse, profile};
use gputrace_sim::simulator::{Observer, Outcome, run};
use serde_json::Value;

const MIB: u64 = 1 << 20;
const RELEASE: (u8, u8) = (2, 13);
/// Where each request of a step comes from: `LINES[stack]`.
const LINES: [(&str, u32); 5] = [("build", 3), ("load", 8), ("attention", 20), ("scores", 21), ("step", 30)];

/// Two steps of training at a batch and a length.
fn program(batch: u64, length: u64) -> OpStream {
    let mut builder = Builder::new(0);
    let ask = |builder: &mut Builder, line: u32, bytes| {
        let (stream, pool) = (StreamIdx(0), PoolIdx::DEFAULT);
        builder.alloc(Allocation { requested: bytes, address: 0, stack: Asked(line), stream, pool })
    };
    for _ in 0..3 {
        ask(&mut builder, 0, 30 * MIB + 4096);
    }
    for _ in 0..2 {
        let mut kept = vec![ask(&mut builder, 1, batch * length * 8)];
        for _ in 0..4 {
            kept.push(ask(&mut builder, 2, batch * length * 2048));
            kept.push(ask(&mut builder, 3, batch * length * length * 16));
        }
        let gradient = ask(&mut builder, 4, 30 * MIB + 4096);
        for id in kept.into_iter().rev().chain([gradient]) {
            builder.op(Op::FreeRequested(id));
            builder.op(Op::FreeCompleted(id));
        }
    }
    builder.finish()
}

/// What PyTorch's allocator does with it: where each request lies, and how many bytes it has there.
#[derive(Default)]
struct Placed(Vec<(AllocId, u64, u64)>);

impl Observer for Placed {
    fn placed(&mut self, _: usize, id: AllocId, at: Placement, _: &Card) -> ControlFlow<()> {
        self.0.push((id, at.address, at.bytes));
        ControlFlow::Continue(())
    }
}

/// The segments that were obtained: the op that needed it, its address and its bytes.
type Segments = Rc<RefCell<Vec<(u32, u64, u64)>>>;

/// Addresses that are noted.
struct Noted(Bump, Segments);

impl AddressSpace for Noted {
    fn map(&mut self, bytes: u64, op: u32) -> Option<u64> {
        let address = self.0.map(bytes, op)?;
        self.1.borrow_mut().push((op, address, bytes));
        Some(address)
    }

    fn unmap(&mut self, address: u64, bytes: u64) {
        self.0.unmap(address, bytes);
    }

    fn reserve(&mut self, bytes: u64) -> u64 {
        self.0.reserve(bytes)
    }
}

fn simulated(stream: &OpStream) -> (Outcome, Placed, Segments) {
    let profile = profile(RELEASE).unwrap();
    let mut policy = Torch::new(parse("", profile).unwrap(), *profile, 1, 1);
    let segments = Segments::default();
    let space = Noted(Bump::new(Direction::Ascending), segments.clone());
    let mut card = Card::new(1 << 40, None, Box::new(space));
    let mut placed = Placed::default();
    let outcome = run(stream, &mut policy, &mut card, &mut placed);
    (outcome, placed, segments)
}

/// The trace of a run, as the recorder writes it.
fn trace(stream: &OpStream) -> Vec<u8> {
    trace_of(stream, None)
}

/// The same of a rank of four, as its launcher says.
fn trace_of(stream: &OpStream, rank: Option<u32>) -> Vec<u8> {
    let mut writer = Writer::new(Cursor::new(Vec::new())).unwrap();
    let torch_version = Some(format!("{}.{}.0", RELEASE.0, RELEASE.1));
    let command = vec!["train".into()];
    let words = [
        ("RANK", rank.unwrap_or(0).to_string()),
        ("WORLD_SIZE", "4".into()),
        ("MASTER_PORT", "29500".into()),
    ];
    let environment = words.into_iter().filter(|_| rank.is_some()).map(|(name, value)| (name.into(), value));
    let (pid, environment) = (42 + rank.unwrap_or(0), environment.collect());
    writer.process(&Process { pid, command, torch_version, rank, environment, ..Process::default() });
    let (name, uuid) = ("NVIDIA H200".into(), "GPU-0".into());
    writer.device(&Device { ordinal: 0, name, uuid, total: Bytes(1 << 37) });
    writer.thread(ThreadId(0), &Thread { tid: 42, name: "train".into() });
    let name = |driver: &str, runtime: &str| Api { name: driver.into(), runtime_name: runtime.into() };
    writer.api(ApiId(0), &name("cuMemAlloc_v2", "cudaMalloc"));
    writer.module(ModuleId(1), &Module { path: "libc10_cuda.so".into(), ..Module::default() });
    let native = Frame::Native {
        address: 0x10,
        module: Some(ModuleId(1)),
        function: String::new(),
        file: String::new(),
        line: 0,
        inlined: false,
    };
    writer.frame(FrameId(99), &native);
    writer.stack(StackId(99), &Stack { frames: vec![FrameId(99)], ..Stack::default() });
    for (id, (function, line)) in (1..).zip(LINES) {
        let file = "/job/model.py".into();
        writer.frame(FrameId(id), &Frame::Python { function: function.into(), file, line });
        writer.stack(StackId(id), &Stack { frames: vec![FrameId(id)], ..Stack::default() });
    }
    let mut time = 0;
    let mut event = |stack: u32, kind: EventKind| {
        time += 1000;
        writer.event(&Event { time: Nanos(time), thread: ThreadId(0), stack: StackId(stack), kind }).unwrap();
    };
    let (_, Placed(placed), segments) = simulated(stream);
    let (mut allocated, mut reserved) = (0, 0);
    for (index, op) in (0..).zip(&stream.ops) {
        for (_, address, bytes) in segments.borrow().iter().filter(|(op, ..)| *op == index) {
            reserved += bytes;
            event(99, EventKind::Call(call(*address, *bytes)));
        }
        match op {
            Op::Alloc(id) => {
                let (_, addr, bytes) = *placed.iter().find(|(placed, ..)| placed == id).unwrap();
                allocated += bytes;
                let asked = stream.allocation(*id);
                event(
                    asked.stack.0.wrapping_add(1),
                    EventKind::BlockAlloc(BlockAlloc {
                        device: 0,
                        addr,
                        bytes: Bytes(bytes),
                        requested: Some(Bytes(asked.requested)),
                        stream: Some(0),
                        allocated: Bytes(allocated),
                        reserved: Bytes(reserved),
                    }),
                );
            }
            Op::FreeRequested(id) => {
                let (_, addr, bytes) = *placed.iter().find(|(placed, ..)| placed == id).unwrap();
                allocated -= bytes;
                event(
                    0,
                    EventKind::BlockFree(BlockFree {
                        device: 0,
                        addr,
                        bytes: Bytes(bytes),
                        allocated: Bytes(allocated),
                        reserved: Bytes(reserved),
                        collecting: false,
                    }),
                );
            }
            _ => {}
        }
    }
    writer.finish().unwrap().into_inner()
}

fn call(addr: u64, bytes: u64) -> Call {
    Call {
        api: ApiId(0),
        action: Action::Alloc,
        device: 0,
        result: Some(0),
        addr,
        bytes: Bytes(bytes),
        stream: 0,
        handle: 0,
        extra: 0,
        duration: Nanos(10),
        captured: false,
        in_allocate: true,
        comm: CommId(0),
        nccl_call: 0,
        nccl_thread: false,
    }
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("predict-{name}"));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        for (batch, length) in [(4, 1024), (8, 1024), (4, 2048)] {
            let trace = trace(&program(batch, length));
            fs::write(folder.join(format!("b{batch}s{length}.gtr")), trace).unwrap();
        }
        Folder(folder)
    }

    /// A folder with a trace of each of these ranks, at a batch; rank 2 holds a quarter more.
    fn job(&self, batch: u64, ranks: &[u32]) {
        let folder = self.0.join(format!("job{batch}"));
        fs::create_dir_all(&folder).unwrap();
        for rank in ranks {
            let length = if *rank == 2 { 1280 } else { 1024 };
            let trace = trace_of(&program(batch, length), Some(*rank));
            fs::write(folder.join(format!("r{rank}.gtr")), trace).unwrap();
        }
    }

    fn run(&self, line: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gputrace"));
        command.current_dir(&self.0).env("COLUMNS", "200").env("LC_ALL", "C.UTF-8");
        command.arg("predict").args(line.split(' '));
        command.output().unwrap()
    }

    fn said(&self, line: &str) -> String {
        let output = self.run(line);
        String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap()
    }

    fn json(&self, line: &str) -> Value {
        let output = self.run(&format!("{line} --json"));
        let stderr = String::from_utf8_lossy(&output.stderr);
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {stderr}"))
    }
}

const BATCHES: &str = "batch=4:b4s1024.gtr batch=8:b8s1024.gtr";
const BOTH: &str = "batch=4,seq=1024:b4s1024.gtr batch=8,seq=1024:b8s1024.gtr batch=4,seq=2048:b4s2048.gtr";

#[test]
fn a_prediction_is_what_the_program_would_have_asked_for() {
    let folder = Folder::new("truth");
    for (batch, length) in [(16, 1024), (64, 1024), (8, 4096), (6, 3000), (2, 512)] {
        let line = format!("{BOTH} --at batch={batch},seq={length}");
        let outcome = &folder.json(&line)["outcomes"][0];
        let (truth, ..) = simulated(&program(batch, length));
        assert_eq!(outcome["peak_reserved_bytes"], truth.books.reserved.peak, "{line}");
        assert_eq!(outcome["peak_allocated_bytes"], truth.books.allocated.peak, "{line}");
        assert_eq!((&outcome["certain"], &outcome["confidence"]), (&true.into(), &"exact".into()), "{line}");
    }
}

#[test]
fn the_answer_says_what_grows_with_what() {
    let folder = Folder::new("grows");
    expect![[r#"
        extrapolated from b8s1024.gtr

        Predicted memory on cuda:0
          at                  reserved   at least    at most  allocated  sure     policy
          batch=16,seq=4096  16.63 GiB  16.63 GiB  16.63 GiB  16.62 GiB  certain  torch
          requests  23  of the run at batch=8,seq=1024; 23 of them are in every run

        How memory scales: live at the peak of batch=16,seq=4096, as requested
          per                 each    together   share  most of it in
          batch × seq²        64 B   16.00 GiB  96.3 %  64 B in scores (model.py:21)
          batch × seq     8.01 KiB  512.50 MiB   3.0 %  8.00 KiB in attention (model.py:20), 8 B in load (model.py:8)
          constant      120.02 MiB  120.02 MiB   0.7 %  90.01 MiB in build (model.py:3), 30.00 MiB in step (model.py:30)
    "#]].assert_eq(&folder.said(&format!("{BOTH} --at batch=16,seq=4096")));
}

/// What a page shows: a script of its own has it, packed.
fn head_of(page: &str) -> Value {
    let data = page.split("id=\"data\">").nth(1).and_then(|rest| rest.split('<').next()).expect("data");
    let six = |letter: u8| match letter {
        b'A'..=b'Z' => letter - b'A',
        b'a'..=b'z' => letter - b'a' + 26,
        b'0'..=b'9' => letter - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let four = |four: &[u8]| {
        let bits = four.iter().fold(0, |bits: u32, letter| bits << 6 | u32::from(six(*letter)));
        let n = four.iter().filter(|letter| **letter != b'=').count() - 1;
        bits.to_be_bytes()[1..1 + n].to_vec()
    };
    let packed: Vec<u8> = data.as_bytes().chunks(4).flat_map(four).collect();
    let mut bytes = vec![];
    flate2::read::GzDecoder::new(&packed[..]).read_to_end(&mut bytes).expect("gzip");
    let length = u32::from_le_bytes(bytes[..4].try_into().expect("four bytes")) as usize;
    serde_json::from_slice(&bytes[4..4 + length]).expect("JSON")
}

#[test]
fn a_page_has_the_same_tables_before_those_of_the_largest_run() {
    let folder = Folder::new("page");
    folder.job(4, &[0]);
    folder.job(8, &[0]);
    let line = format!("{BATCHES} --at batch=32 --html page.html");
    let outcome = folder.json(&line)["outcomes"][0].clone();
    let head = head_of(&fs::read_to_string(folder.0.join("page.html")).expect("a page"));
    let report = &head["chapters"][0]["report"];
    assert_eq!(report["trace"], "b8s1024.gtr");
    let sections = report["sections"].as_array().expect("sections");
    let titles: Vec<&str> = sections.iter().filter_map(|section| section["title"].as_str()).collect();
    assert_eq!(titles[0], "Predicted memory on cuda:0");
    assert!(titles[1].starts_with("How memory scales") && titles.contains(&"Memory"), "{titles:?}");
    let all = sections[0].to_string();
    assert!(all.contains(&outcome["peak_reserved_bytes"].to_string()), "{all}");
    assert!(!all.contains("\"chart\""), "one value is not a curve: {all}");
    assert!(folder.said(&line).contains("page.html exists; -F overwrites it"));
    assert!(folder.run(&format!("{line} -F")).status.success());
    let of_job = folder.said("batch=4:job4 batch=8:job8 --at batch=32 --html other.html");
    assert!(of_job.contains("its page shows one process"), "{of_job}");
}

#[test]
fn a_page_has_the_curve_that_the_terminal_has() {
    let folder = Folder::new("page-curve");
    let line = format!("{BATCHES} --at batch=8..64 --limit 3GiB --html page.html");
    let outcomes = folder.json(&line)["outcomes"].clone();
    let head = head_of(&fs::read_to_string(folder.0.join("page.html")).expect("a page"));
    let items = &head["chapters"][0]["report"]["sections"][0]["items"];
    let chart =
        items.as_array().expect("items").iter().find(|item| item["chart"].is_string()).expect("a chart");
    assert_eq!((&chart["variable"], &chart["ceiling"]), (&"batch".into(), &"--limit 3 GiB".into()));
    let points = outcomes.as_array().expect("outcomes").iter().map(|it| {
        serde_json::json!({
            "at": it["values"]["batch"],
            "low": it["needed_reserved_range"][0],
            "best": it["needed_reserved_bytes"],
            "high": it["needed_reserved_range"][1],
            "is_certain": it["sure"] == "certain",
            "room": it["room_bytes"],
        })
    });
    assert_eq!(chart["points"], points.collect::<Value>());
    let reserved = |batch| simulated(&program(batch, 1024)).0.books.reserved.peak;
    assert_eq!(chart["recorded"], serde_json::json!([[4, reserved(4)], [8, reserved(8)]]));
}

#[test]
fn where_the_largest_is_not_sure_a_run_that_would_make_it_so_is_named() {
    let folder = Folder::new("near");
    let two = "batch=4,seq=1024:b4s1024.gtr batch=8,seq=1024:b8s1024.gtr";
    let said = folder.said(&format!("{two} --fit seq --limit 40GiB --policy torch"));
    assert!(
        said.contains("one more run near the largest value would narrow this")
            && said.contains("seq=7775 fits"),
        "{said}"
    );
    let sure = folder.said(&format!("{BATCHES} --fit batch --limit 4GiB --policy torch"));
    assert!(sure.contains("certain") && !sure.contains("one more run"), "{sure}");
}

#[test]
fn what_never_changed_is_open_and_said_to_be() {
    let folder = Folder::new("open");
    let two = "batch=4,seq=1024:b4s1024.gtr batch=8,seq=1024:b8s1024.gtr";
    expect![[r#"
        extrapolated from b8s1024.gtr

        Predicted memory on cuda:0
          at                 reserved  at least   at most  allocated  sure   policy
          batch=16,seq=2048  1.25 GiB  1.23 GiB  5.08 GiB   1.24 GiB  range  torch
          requests  23  of the run at batch=8,seq=1024; 23 of them are in every run

        How memory scales: live at the peak of batch=16,seq=2048, as requested
          per             each    together   share  most of it in
          batch      72.01 MiB    1.13 GiB  90.6 %  64.00 MiB in scores (model.py:21), 8.00 MiB in attention (model.py:20), 8.00 KiB in load (model.py:8)
          constant  120.02 MiB  120.02 MiB   9.4 %  90.01 MiB in build (model.py:3), 30.00 MiB in step (model.py:30)

        Uncertain in these runs
          warning: 23 requests, 2.40 GiB to 9.59 GiB in total, most at scores (model.py:21): one run at another seq, all else
            equal, would decide
          warning: the range is too wide for planning (× 4.1): one more run in between, for example at batch=11,seq=1448,
            would narrow it
    "#]].assert_eq(&folder.said(&format!("{two} --at batch=16,seq=2048")));
    let outcome = &folder.json(&format!("{two} --at batch=16,seq=2048"))["outcomes"][0];
    let (truth, ..) = simulated(&program(16, 2048));
    let range = outcome["peak_reserved_range"].as_array().unwrap();
    let range: Vec<u64> = range.iter().map(|bytes| bytes.as_u64().unwrap()).collect();
    assert!((range[0]..=range[1]).contains(&truth.books.reserved.peak), "{range:?}");
    assert_eq!(outcome["certain"], false);
}

#[test]
fn the_largest_batch_is_the_one_after_which_the_program_runs_out() {
    let folder = Folder::new("fit");
    expect![[r#"
        extrapolated from b8s1024.gtr

        The largest batch that fits on cuda:0 (limit 2.00 GiB, device memory 128.00 GiB)
          largest  sure     policy
          25       certain  torch
          25       certain  torch:expandable_segments:True
          25       certain  torch:max_split_size_mb:64
          25       certain  torch:max_split_size_mb:128
          25       certain  torch:max_split_size_mb:256
          25       certain  torch:max_split_size_mb:512
          24       certain  torch:roundup_power2_divisions:4
          24       certain  torch:roundup_power2_divisions:8
          25       certain  torch:garbage_collection_threshold:0.8
          24       certain  torch:expandable_segments:True,roundup_power2_divisions:8
    "#]]
    .assert_eq(&folder.said(&format!("{BATCHES} --fit batch --limit 2GiB --other 100MiB")));
    let far = format!("{BATCHES} --fit batch --policy torch");
    assert_eq!(folder.json(&far)["fits"][0]["certain"], false, "more than 16 times the largest run");
    let far = folder.said(&far);
    assert!(far.contains("  likely  ") && far.contains("run batch=64 before you trust it"), "{far}");
    let line = format!("{BATCHES} --fit batch --limit 2GiB --other 100MiB --policy torch");
    let found = &folder.json(&line)["fits"][0];
    let largest = found["largest"].as_u64().unwrap();
    let reserved = |batch| simulated(&program(batch, 1024)).0.books.reserved.peak;
    let limit = (2 << 30) - 100 * MIB;
    assert!(reserved(largest) <= limit && reserved(largest + 1) > limit, "{largest}");
    assert_eq!(found["certain"], true);
}

#[test]
fn a_curve_has_a_row_for_each_point_and_each_allocator() {
    let folder = Folder::new("curve");
    let policies = "--policy torch --policy torch:expandable_segments:True";
    let json = folder.json(&format!("{BATCHES} --at batch=8..64 {policies}"));
    let rows = json["outcomes"].as_array().unwrap();
    let rows: Vec<_> = rows
        .iter()
        .map(|row| (row["values"]["batch"].as_u64().unwrap(), row["options"].as_str().unwrap()))
        .collect();
    let expected = [8, 16, 32, 64].map(|batch| [(batch, ""), (batch, "expandable_segments:True")]);
    assert_eq!(rows, expected.concat());
}

/// What comes between the table and what is said below it.
fn chart(said: &str) -> String {
    let lines = said.lines().skip_while(|line| !line.starts_with("  Peak reserved by"));
    let lines = lines.take_while(|line| !line.starts_with("  requests"));
    lines.map(|line| format!("{}\n", line.strip_prefix("  ").expect("two blanks"))).collect()
}

#[test]
fn a_range_is_drawn_below_its_table_with_its_limit_and_what_was_recorded() {
    let folder = Folder::new("drawn");
    let line = format!("{BATCHES} --at batch=8..64 --limit 3GiB --other 512MiB");
    let drawn = chart(&folder.said(&line));
    expect![[r#"
          Peak reserved by batch; × crosses the limit between 32 and 64
             5 GiB ┤
                   │                                                                            ╭──────────○
          3.75 GiB ┤                                                               ╭────────────╯
                   │                                                  ╭────────────╯
           2.5 GiB ┤╌╌ --limit ╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╭───○──×─────╯╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌
                   │                        ╭────────────╯
          1.25 GiB ┤           ╭─────○──────╯
                   │●     ●────╯
                 0 └──────┴──────────┴───────────────────────┴─────────────────────────────────────────────┴
             batch  4     8          16                      32                                           64
          ○ predicted  ● recorded  ╌╌╌ --limit 3 GiB less --other 512 MiB
          if a value does not fit, the chart shows how much it would reserve
    "#]]
    .assert_eq(&drawn);
    let few = folder.said(&format!("{BATCHES} --at batch=8 --at batch=16"));
    assert_eq!(chart(&few), "", "two values are not a curve");
    let mut ascii = Command::new(env!("CARGO_BIN_EXE_gputrace"));
    ascii.current_dir(&folder.0).env("COLUMNS", "60").env("LC_ALL", "C").arg("predict").args(line.split(' '));
    let drawn = chart(&String::from_utf8(ascii.output().unwrap().stdout).unwrap());
    assert!(drawn.is_ascii() && drawn.contains("o predicted") && !drawn.is_empty(), "{drawn}");
    assert!(
        drawn.lines().all(|line| line.len() <= 100) && drawn.lines().take(12).all(|line| line.len() <= 60)
    );
}

#[test]
fn the_curve_of_the_guide_is_what_is_drawn() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let guide = fs::read_to_string(root.join("docs/PREDICT.md")).expect("a guide");
    let (_, example) = guide.split_once("```text\n$ gputrace ").expect("an example");
    let (example, _) = example.split_once("\n```").expect("its end");
    let (line, shown) = example.split_once('\n').expect("its output");
    let mut command = Command::new(env!("CARGO_BIN_EXE_gputrace"));
    command.current_dir(root.join("tests/golden/predict")).env("COLUMNS", "90").env("LC_ALL", "C.UTF-8");
    let said = String::from_utf8(command.args(line.split(' ')).output().unwrap().stdout).unwrap();
    assert!(said.contains(&format!("{shown}\n")), "{said}");
}

#[test]
fn programs_get_all_that_a_curve_shows_and_no_picture() {
    let folder = Folder::new("shown");
    let json = folder.json(&format!("{BATCHES} --at batch=8..64 --limit 3GiB --other 512MiB"));
    assert!(!json.to_string().contains("Peak reserved by"));
    let recorded: Vec<_> =
        json["runs"].as_array().unwrap().iter().map(|run| run["devices"].clone()).collect();
    let reserved = |batch| simulated(&program(batch, 1024)).0.books.reserved.peak;
    let expected =
        [4, 8].map(|batch| serde_json::json!([{"device": 0, "peak_reserved_bytes": reserved(batch)}]));
    assert_eq!(recorded, expected);
    let outcomes = json["outcomes"].as_array().unwrap();
    for (outcome, batch) in outcomes.iter().zip([8, 16, 32, 64]) {
        assert_eq!(outcome["needed_reserved_bytes"], reserved(batch), "without a limit, at {batch}");
        assert_eq!(outcome["room_bytes"], (3 << 30) - 512 * MIB);
        assert_eq!(outcome["fits"], reserved(batch) <= (3 << 30) - 512 * MIB);
        assert_eq!(outcome["fits"] == true, outcome["peak_reserved_bytes"] == reserved(batch));
    }
    assert_eq!(outcomes.iter().filter(|it| it["fits"] == true).count(), 3);
}

/// So many requests of sizes that have nothing to do with each other, recorded without stacks.
fn stranger(seed: u64) -> OpStream {
    let mut builder = Builder::new(0);
    for index in 1..=40 {
        let (stream, pool, stack) = (StreamIdx(0), PoolIdx::DEFAULT, Asked::NONE);
        let requested = seed * seed * (MIB + index * seed * 7_919_333 % MIB);
        builder.alloc(Allocation { requested, address: 0, stack, stream, pool });
    }
    builder.finish()
}

#[test]
fn runs_of_different_programs_are_a_guess_that_says_so() {
    let folder = Folder::new("strangers");
    for seed in [3, 5] {
        fs::write(folder.0.join(format!("{seed}.gtr")), trace(&stranger(seed))).unwrap();
    }
    let line = "batch=4:3.gtr batch=8:5.gtr --at batch=16";
    let said = folder.said(line);
    assert!(said.contains("the runs look like different programs"), "{said}");
    let json = folder.json(&format!("{line} --fit batch --limit 8GiB"));
    assert_eq!(
        (&json["outcomes"][0]["sure"], &json["outcomes"][0]["certain"]),
        (&"guess".into(), &false.into())
    );
    assert_eq!(json["fits"][0]["certain"], false);
    assert!(!folder.said(&format!("{BATCHES} --at batch=16")).contains("different programs"));
}

#[test]
fn runs_that_predict_nothing_are_refused_with_what_is_missing() {
    let folder = Folder::new("refused");
    fs::write(folder.0.join("other.gtr"), trace(&stranger(5))).unwrap();
    for (line, told) in [
        (
            "batch=4:b4s1024.gtr batch=4:b8s1024.gtr --at batch=8",
            "at least two runs with different values are needed",
        ),
        ("batch=4:b4s1024.gtr seq=8:b8s1024.gtr --at batch=8", "has no value of `seq`"),
        ("batch=4:b4s1024.gtr batch=8:b8s1024.gtr --at width=8", "no run has a value of `width`"),
        ("batch=4:b4s1024.gtr batch=8:b8s1024.gtr --at batch=8,batch=9", "--at has two values of `batch`"),
        (
            "batch=4,batch=5:b4s1024.gtr batch=8:b8s1024.gtr --at batch=9",
            "b4s1024.gtr has two values of `batch`",
        ),
        ("batch=4:b4s1024.gtr batch=8:b8s1024.gtr --at batch=1099511627776", "no device has that much"),
        ("b4s1024.gtr b8s1024.gtr --at batch=8", "does not give the values of the run"),
        ("batch=4:b4s1024.gtr batch=8:none.gtr --at batch=8", "none.gtr: No such file"),
        ("batch=4:b4s1024.gtr batch=8:. --at batch=8", "name one folder per run, or one trace per run"),
        ("batch=4:. batch=8:. --at batch=8", "the ranks of its 4 processes are not known"),
        ("batch=4:b4s1024.gtr batch=8:b8s1024.gtr --at batch=0", "is not a whole number from 1 on"),
        ("batch=4:b4s1024.gtr batch=8:b8s1024.gtr", "--at"),
        ("batch=4:b4s1024.gtr batch=8:b8s1024.gtr --fit width --limit 2GiB", "no run has a value of `width`"),
        (
            "batch=4:b4s1024.gtr batch=8:other.gtr --at batch=9",
            "is in no other run; name runs of one program",
        ),
    ] {
        let output = folder.run(line);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(told), "{line}: {stderr}");
    }
}

#[test]
fn the_rank_that_needs_most_decides_for_a_job_and_ranks_without_a_trace_are_named() {
    let folder = Folder::new("job");
    folder.job(4, &[0, 1, 2, 3]);
    folder.job(8, &[0, 2, 1]);
    let runs = "batch=4:job4 batch=8:job8";
    expect![[r#"
        rank 2, which needs most: extrapolated from job8/r2.gtr

        Predicted memory of each rank, largest first
          rank  at        reserved  at least   at most  sure     policy
             2  batch=32  3.56 GiB  3.56 GiB  3.56 GiB  certain  torch
             0  batch=32  2.38 GiB  2.38 GiB  2.38 GiB  certain  torch
             1  batch=32  2.38 GiB  2.38 GiB  2.38 GiB  certain  torch
          batch=32, torch: rank 2 needs most, 3 of 3 ranks fit
          warning: job8 has no trace of rank 3

        Predicted memory on cuda:0
          at        reserved  at least   at most  allocated  sure     policy
          batch=32  3.56 GiB  3.56 GiB  3.56 GiB   3.56 GiB  certain  torch
          requests  23  of the run at batch=8; 23 of them are in every run

        How memory scales: live at the peak of batch=32, as requested
          per             each    together   share  most of it in
          batch     110.01 MiB    3.44 GiB  96.7 %  100.00 MiB in scores (model.py:21), 10.00 MiB in attention (model.py:20), 10.00 KiB in load (model.py:8)
          constant  120.02 MiB  120.02 MiB   3.3 %  90.01 MiB in build (model.py:3), 30.00 MiB in step (model.py:30)
    "#]].assert_eq(&folder.said(&format!("{runs} --at batch=32")));
    let json = folder.json(&format!("{runs} --at batch=32 --at batch=64"));
    let ranks = json["ranks"].as_array().unwrap();
    assert_eq!(ranks.iter().map(|it| it["rank"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2]);
    for (index, batch) in [(0, 32), (1, 64)] {
        let worst = simulated(&program(batch, 1280)).0.books.reserved.peak;
        let least = simulated(&program(batch, 1024)).0.books.reserved.peak;
        let of_rank = |rank: usize| &ranks[rank]["outcomes"][index]["peak_reserved_bytes"];
        assert_eq!((of_rank(0), of_rank(1), of_rank(2)), (&least.into(), &least.into(), &worst.into()));
        let job = &json["outcomes"][index];
        assert_eq!((&job["peak_reserved_bytes"], &job["rank"]), (&worst.into(), &2.into()), "{job}");
        // What rank 3 needs is not known.
        assert_eq!((&job["certain"], &ranks[2]["outcomes"][index]["certain"]), (&false.into(), &true.into()));
        assert_eq!(job["reasons"], serde_json::json!(["job8 has no trace of rank 3"]));
    }
    assert_eq!(json["missing_ranks"], serde_json::json!([{"run": "job8", "ranks": [3]}]));
}

#[test]
fn the_largest_batch_of_a_job_is_that_of_the_rank_on_which_least_fits() {
    let folder = Folder::new("job-fit");
    folder.job(4, &[0, 1, 2, 3]);
    folder.job(8, &[0, 1, 2, 3]);
    let line = "batch=4:job4 batch=8:job8 --fit batch --limit 2GiB --other 0 --policy torch";
    let json = folder.json(line);
    let found = &json["fits"][0];
    let largest = found["largest"].as_u64().unwrap();
    let reserved = |batch| simulated(&program(batch, 1280)).0.books.reserved.peak;
    assert!(reserved(largest) <= 2 << 30 && reserved(largest + 1) > 2 << 30, "{largest}");
    assert_eq!((&found["rank"], &found["certain"]), (&2.into(), &true.into()));
    let others = json["ranks"].as_array().unwrap().iter().filter(|it| it["rank"] != 2);
    for rank in others {
        assert!(rank["fits"][0]["largest"].as_u64().unwrap() > largest, "{rank}");
    }
    expect![[r#"
        rank 2, which needs most: extrapolated from job8/r2.gtr

        The largest batch that fits on every rank
          largest  at least  at most  decided by rank  with  policy
          17       17        17       2                      torch

        The largest batch that fits on cuda:0 (limit 2.00 GiB, device memory 128.00 GiB)
          largest  sure     policy
          17       certain  torch
    "#]]
    .assert_eq(&folder.said(line));
}
