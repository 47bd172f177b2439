//! Pages of scenes, read back as a browser would.

use std::io::Read;
use std::path::Path;

use flate2::read::GzDecoder;
use serde_json::Value as Json;

use super::*;
use gputrace_analyse::categories::Categories;
use gputrace_analyse::live::{When, pictures};
use gputrace_report::sections::{Shown, of_report};
use gputrace_trace::scene::recording;

/// A training loop with others beside it, and an error at its end.
const SCENE: &str = "Create handle=n bytes=100 by=libnccl.so.2
     push text=step_1
     Alloc addr=a bytes=20M by=libc10_cuda.so
     block addr=a bytes=512 requested=400 allocated=512 reserved=20M by=inner@/job/a.py:2,outer@/job/a.py:9
     block addr=b bytes=1M requested=1M allocated=1M reserved=20M stream=7 by=other@/job/a.py:3,outer@/job/a.py:9
     free addr=a bytes=512 allocated=1M reserved=20M
     pop
     Alloc addr=c bytes=4M by=work@libcublas.so.12
     block addr=d bytes=2M requested=2M allocated=3M reserved=20M by=inner@/job/a.py:2,outer@/job/a.py:9
     free addr=b bytes=1M allocated=2M reserved=20M
     free addr=d bytes=2M allocated=0 reserved=20M
     Free addr=a
     oom bytes=1G allocated=0 reserved=0";

/// JAX, with temporaries beside its buffers, and a result that never had memory.
const JAX_SCENE: &str = "Alloc addr=n bytes=4M by=work@libcublas.so.12
     Alloc addr=a bytes=64M by=xla_cuda_plugin.so
     compiled handle=f bytes=10M text=jit_step
     buffer addr=p bytes=8M by=init@/job/a.py:2
     buffer addr=d bytes=1M by=load@/job/a.py:3
     launched handle=f by=step@/job/a.py:4
     donated addr=p handle=f
     buffer addr=q bytes=8M handle=f by=step@/job/a.py:4
     destroyed addr=p
     destroyed addr=d
     Free addr=n";

fn page(scene: &str) -> (Vec<u8>, Story, Source) {
    page_of(Source::of("train.gtr", recording(scene)).without_requests())
}

fn page_of(source: Source) -> (Vec<u8>, Story, Source) {
    let story = Story::with_lifetimes(&source, &Categories::default());
    let part = gputrace_report::part(&story, of_report(&story, Shown::OnDemand));
    let chapter = Chapter::of(&story, &part, &source, 1, None);
    let mut page = vec![];
    Page::of(vec![(story, chapter)], &[], vec![]).write(&mut page).unwrap();
    (page, Story::of_source(&source), source)
}

/// The head, and the columns as numbers.
fn read(page: &[u8]) -> (Json, Vec<Vec<i64>>) {
    let page = std::str::from_utf8(page).unwrap();
    let text = page.split("id=\"data\">").nth(1).unwrap().split('<').next().unwrap();
    let mut bytes = vec![];
    GzDecoder::new(&*from_base64(text)).read_to_end(&mut bytes).unwrap();
    let length = u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize;
    let head: Json = serde_json::from_slice(&bytes[4..4 + length]).unwrap();
    let mut rest = bytes[4 + length..].iter();
    let columns = head["columns"].as_array().unwrap().iter().map(|index| {
        let mut before = 0i64;
        let value = |_| {
            let (mut raw, mut shift) = (0u64, 0);
            for byte in rest.by_ref() {
                raw |= u64::from(byte & 127) << shift;
                shift += 7;
                if byte & 128 == 0 {
                    break;
                }
            }
            before += (raw >> 1) as i64 ^ -((raw & 1) as i64);
            before
        };
        (0..index[0].as_u64().unwrap()).map(value).collect()
    });
    let columns = columns.collect();
    assert_eq!(rest.count(), 0, "bytes that belong to no column");
    (head, columns)
}

fn from_base64(text: &str) -> Vec<u8> {
    let six = |letter: u8| match letter {
        b'A'..=b'Z' => letter - b'A',
        b'a'..=b'z' => letter - b'a' + 26,
        b'0'..=b'9' => letter - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => 0,
    };
    let four = |letters: &[u8]| {
        let bits = letters.iter().fold(0u32, |bits, letter| bits << 6 | u32::from(six(*letter)));
        bits.to_be_bytes()[1..].to_vec()
    };
    let mut bytes: Vec<u8> = text.as_bytes().chunks(4).flat_map(four).collect();
    bytes.truncate(bytes.len() - text.bytes().filter(|letter| *letter == b'=').count());
    bytes
}

#[test]
fn the_highest_state_is_the_picture_of_the_peak_holder_by_holder() {
    for scene in [SCENE, JAX_SCENE] {
        check_highest(scene);
    }
}

fn check_highest(scene: &str) {
    let (page, story, source) = page(scene);
    let (head, columns) = read(&page);
    let (_, pictures) = pictures(&source, When::Peak);
    let chapter = &head["chapters"][0];
    let column = |of: &Json| &columns[of.as_u64().unwrap() as usize];
    let device = &chapter["devices"][0];
    let (mut row, mut held, mut highest) = (0, vec![0i64; 100], (0, 0, vec![]));
    for n_rows in column(&device["state_rows"]) {
        for _ in 0..*n_rows {
            held[column(&device["row_holder"])[row] as usize] += column(&device["row_bytes"])[row];
            row += 1;
        }
        let (level, total) = (column(&chapter["holders"]["level"]), held.iter().sum::<i64>());
        let used = total
            - held.iter().zip(level).filter(|(_, level)| [2, 4].contains(*level)).map(|it| it.0).sum::<i64>();
        if (total, used) > (highest.0, highest.1) {
            highest = (total, used, held.iter().copied().filter(|bytes| *bytes > 0).collect());
        }
    }
    let mut wanted: Vec<i64> = pictures[0].held.values().map(|(bytes, _)| bytes.0 as i64).collect();
    wanted.sort_unstable();
    highest.2.sort_unstable();
    assert_eq!((highest.0 as u64, highest.2), (story.ledger.devices()[&0].physical.peak().0, wanted));
    assert_eq!(held.iter().sum::<i64>() as u64, story.ledger.devices()[&0].physical.now().bytes.0);
}

#[test]
fn the_summary_and_the_sections_are_those_of_the_verbs() {
    let (page, story, _) = page(SCENE);
    let (head, _) = read(&page);
    let wanted = serde_json::to_value(Summary::of(std::slice::from_ref(&story))).unwrap();
    assert_eq!(head["summary"], wanted);
    let sections = head["chapters"][0]["report"]["sections"].as_array().unwrap();
    let names: Vec<&str> = sections.iter().map(|it| it["name"].as_str().unwrap()).collect();
    let lifetimes = Story::with_lifetimes(&Source::of("train.gtr", recording(SCENE)), &Categories::default());
    let wanted: Vec<String> =
        of_report(&lifetimes, Shown::OnDemand).into_iter().map(|section| section.name).collect();
    assert_eq!(names, wanted);
}

#[test]
fn marks_are_where_they_were() {
    let (page, ..) = page(SCENE);
    let (head, columns) = read(&page);
    let marks = head["chapters"][0]["marks"].as_array().unwrap();
    let shown: Vec<String> = marks
        .iter()
        .flat_map(|marks| {
            let column = |name: &str| &columns[marks[name].as_u64().unwrap() as usize];
            let mark = |idx: usize| {
                let text = marks["texts"][column("text")[idx] as usize].as_str().unwrap();
                let (kind, from, time) =
                    (marks["kind"].as_str().unwrap(), column("from")[idx], column("time")[idx]);
                format!("{kind}: {text} from {from} for {}, {} bytes", time - 1, column("bytes")[idx])
            };
            (0..column("from").len()).map(mark).collect::<Vec<_>>()
        })
        .collect();
    assert_eq!(
        shown,
        [
            "out of memory: a request for memory failed from 12000 for 0, 1073741824 bytes",
            "nvtx: step 1 from 1000 for 5000, 0 bytes",
            "cache emptied: (no stack recorded) from 11000 for 0, 20971520 bytes",
        ]
    );
}

#[test]
fn what_emptied_the_cache_and_what_was_refused_have_their_stacks() {
    let scene = SCENE
        .replace("\n     Free addr=a", "\n     Free addr=a by=empty_cache@/job/a.py:5,outer@/job/a.py:9")
        .replace("oom bytes=1G", "oom bytes=1G by=inner@/job/a.py:2,outer@/job/a.py:9");
    let (page, ..) = page(&scene);
    let (head, columns) = read(&page);
    let chapter = &head["chapters"][0];
    let column = |id: &Json| &columns[id.as_u64().unwrap() as usize];
    let [lengths, lines] = ["stack_lengths", "stack_lines"].map(|name| column(&chapter[name]));
    let stack = |number: i64| match usize::try_from(number - 1) {
        Err(_) => "none".to_owned(),
        Ok(idx) => {
            let from: i64 = lengths[..idx].iter().sum();
            let of_stack = lines.iter().skip(from as usize).take(lengths[idx] as usize);
            of_stack
                .map(|line| chapter["frames"][*line as usize][0].as_str().unwrap())
                .collect::<Vec<_>>()
                .join(" > ")
        }
    };
    let shown: Vec<String> = chapter["marks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|marks| format!("{}: {}", marks["kind"].as_str().unwrap(), stack(column(&marks["stack"])[0])))
        .collect();
    assert_eq!(shown, ["out of memory: outer > inner", "nvtx: none", "cache emptied: outer > empty_cache"]);
}

#[test]
fn no_name_is_markup_and_nothing_is_loaded() {
    let hostile = "</script><script>alert(1)</script><img/src=x>";
    let scene = format!(
        "Alloc addr=a bytes=2M by=libc10_cuda.so
         push text={hostile}
         block addr=a bytes=512 requested=400 allocated=512 reserved=2M by={hostile}@/job/{hostile}.py:2
         pop"
    );
    let mut recording = recording(&scene);
    recording.process.command = vec![hostile.into()];
    let source = Source::of(hostile, recording).without_requests();
    let story = Story::with_lifetimes(&source, &Categories::default());
    let part = gputrace_report::part(&story, of_report(&story, Shown::OnDemand));
    let chapter = Chapter::of(&story, &part, &source, 1, None);
    let mut page = vec![];
    Page::of(vec![(story, chapter)], &[], vec![]).write(&mut page).unwrap();
    let page = String::from_utf8(page).unwrap();
    let (plain, _, _) = self::page("Alloc addr=a bytes=2M by=libc10_cuda.so");
    let plain = String::from_utf8(plain).unwrap();
    let without_data = |page: &str| {
        let (before, rest) = page.split_once("id=\"data\">").unwrap();
        format!("{before}{}", rest.split_once('<').unwrap().1)
    };
    assert_eq!(without_data(&page), without_data(&plain), "a name is outside of the data");
    let policy =
        page.split("Content-Security-Policy\" content=\"").nth(1).unwrap().split('"').next().unwrap();
    assert!(policy.starts_with("default-src 'none'; script-src 'sha256-"), "{policy}");
    assert!(!["inline", "eval", "http", "*"].iter().any(|it| policy.contains(it)), "{policy}");
}

#[test]
fn a_long_trace_loses_detail_and_not_its_extremes() {
    let mut scene = String::from("Alloc addr=s bytes=1G by=libc10_cuda.so\n");
    for n in 0..3000u64 {
        let (addr, bytes) = (n * 4096, 512 * (n % 7 + 1));
        scene += &format!(
            "block addr={addr} bytes={bytes} requested=1 allocated={bytes} reserved=1G by=f{}@/job/a.py:2\n",
            n % 90
        );
        scene += &format!("free addr={addr} bytes={bytes} allocated=0 reserved=1G\n");
    }
    let source = Source::of("train.gtr", recording(&scene)).without_requests();
    let story = Story::with_lifetimes(&source, &Categories::default());
    let part = gputrace_report::part(&story, of_report(&story, Shown::OnDemand));
    let mut chapter = Chapter::of(&story, &part, &source, 1, None);
    let sizes = |chapter: &Chapter| {
        let mut page = vec![];
        let mut columns = Columns::default();
        page.extend(chapter.write(&mut columns).to_string().into_bytes());
        page.len() + columns.parts().1.len()
    };
    let before = sizes(&chapter);
    for _ in 0..4 {
        chapter.shrink();
    }
    assert!(sizes(&chapter) < before / 3, "{} of {before}", sizes(&chapter));
    let history = &chapter.devices[0].2.history;
    let (mut held, mut fullest) = (FxHashMap::<u32, i64>::default(), 0);
    for idx in 0..history.kept.states.len() {
        for row in history.kept.rows_of(idx) {
            *held.entry(row.holder).or_default() += row.bytes;
        }
        let is_used = |holder: &u32| chapter.holders[*holder as usize].1.level != Level::Cached;
        fullest =
            fullest.max(held.iter().filter(|(holder, _)| is_used(holder)).map(|(_, bytes)| *bytes).sum());
    }
    assert_eq!(fullest, 512 * 7);
    assert!(history.stretch >= 16 && history.n_changes == 6001, "{} {}", history.stretch, history.n_changes);
}

#[test]
fn buffers_of_jax_lie_inside_of_what_its_allocator_took() {
    let (page, ..) = page(JAX_SCENE);
    let (head, columns) = read(&page);
    let chapter = &head["chapters"][0];
    let column = |of: &Json| &columns[of.as_u64().unwrap() as usize];
    let (holders, device) = (&chapter["holders"], &chapter["devices"][0]);
    let mut held = vec![0i64; column(&holders["level"]).len()];
    for (holder, bytes) in column(&device["row_holder"]).iter().zip(column(&device["row_bytes"])) {
        held[*holder as usize] += bytes;
    }
    let mut at_end: Vec<(i64, i64, String)> = (0..held.len())
        .filter(|at| held[*at] != 0)
        .map(|at| {
            let kind = &holders["kinds"][column(&holders["kind"])[at] as usize];
            (column(&holders["level"])[at], held[at] >> 20, kind.as_str().unwrap().to_owned())
        })
        .collect();
    at_end.sort();
    let line = |level, mib, kind: &str| (level, mib, kind.to_owned());
    assert_eq!(
        at_end,
        [line(3, 8, "JAX's results of executions"), line(4, 56, "JAX's allocator, in no buffer")]
    );
}

/// `tests/gpu/pools.py` noted at ten instants of five programs on an H200 what `torch.cuda.memory_snapshot()` had in each pool.
#[test]
fn pools_of_pytorch_have_on_the_page_what_pytorch_says_that_is_in_them() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/pools");
    for name in ["graphs", "compile", "mempool", "serving", "failed"] {
        let said = std::fs::read(folder.join(format!("{name}.json"))).unwrap();
        let said: Vec<(u64, std::collections::BTreeMap<String, [i64; 3]>)> =
            serde_json::from_slice(&said).unwrap();
        let (page, story, _) = page_of(Source::open(&folder.join(format!("{name}.gtr"))).unwrap());
        let (head, columns) = read(&page);
        let chapter = &head["chapters"][0];
        let column = |of: &Json| &columns[of.as_u64().unwrap() as usize];
        let (holders, device) = (&chapter["holders"], &chapter["devices"][0]);
        let mut n_pools = 0;
        for (time, pools) in said {
            let time = (time - story.start().0) as i64;
            let (mut row, mut ours) = (0, std::collections::BTreeMap::<String, [i64; 2]>::new());
            for (at, n_rows) in column(&device["state_time"]).iter().zip(column(&device["state_rows"])) {
                for _ in 0..*n_rows {
                    let holder = column(&device["row_holder"])[row] as usize;
                    let (bytes, pool) =
                        (column(&device["row_bytes"])[row], column(&holders["private"])[holder]);
                    row += 1;
                    if *at > time || pool == 0 {
                        continue;
                    }
                    let id = chapter["pools"][pool as usize - 1]["id"].as_str().unwrap().to_owned();
                    let [reserved, allocated] = ours.entry(id).or_default();
                    *reserved += bytes;
                    *allocated += if column(&holders["level"])[holder] == 1 { bytes } else { 0 };
                }
            }
            ours.retain(|_, bytes| *bytes != [0, 0]);
            let private = pools.into_iter().filter(|(id, bytes)| id != "(0, 0)" && *bytes != [0; 3]);
            let wanted: std::collections::BTreeMap<String, [i64; 2]> =
                private.map(|(id, [reserved, allocated, _])| (id, [reserved, allocated])).collect();
            n_pools = n_pools.max(wanted.len());
            assert_eq!(ours, wanted, "{name} at {time}");
        }
        assert!(n_pools > 0, "{name}");
        assert!(column(&device["grounds"]["what"]).iter().any(|what| what >> 2 > 0), "{name}: the map");
    }
}

#[test]
fn what_is_indexed_answers_as_reading_again_does() {
    for scene in [SCENE, JAX_SCENE, HOST_SCENE] {
        let source = Source::of("train.gtr", recording(scene)).without_requests();
        let story = Story::with_lifetimes(&source, &Categories::default());
        let store = std::sync::Arc::new(tape::tests::Memory::default());
        let chapter = Chapter::indexed(&story, &source, Box::new(store)).unwrap();
        for part in [(0, u64::MAX), (0, 0), (2, 5), (1_000_000, 2_000_000)] {
            let [read, had] = [Chapter::detail(&story, &source, part), chapter.part(part)]
                .map(|data| split(&data.unwrap()));
            assert_eq!(read.0["chapters"], had.0["chapters"], "{part:?} of {scene}");
            assert!(read.1 == had.1, "{part:?} of {scene}: columns");
        }
    }
    let source = Source::of("train.gtr", recording(SCENE)).without_requests();
    let story = Story::with_lifetimes(&source, &Categories::default());
    let part = gputrace_report::part(&story, of_report(&story, Shown::OnDemand));
    let chapter = Chapter::of(&story, &part, &source, 1, None);
    assert!(!chapter.is_indexed().unwrap() && chapter.part((0, 1)).is_err());
}

fn split(data: &[u8]) -> (Json, Vec<u8>) {
    let length = u32::from_le_bytes(data[..4].try_into().unwrap()) as usize;
    (serde_json::from_slice(&data[4..4 + length]).unwrap(), data[4 + length..].to_vec())
}

/// Memory of the host, beside memory of a device; and what lies in it.
const HOST_SCENE: &str = "AllocHost addr=h bytes=64M by=load@/job/a.py:2
     Alloc addr=a bytes=20M by=libc10_cuda.so
     HostRegister addr=r bytes=1M by=libnccl.so.2
     FreeHost addr=h
     AllocHost addr=i bytes=2M by=load@/job/a.py:2";

#[test]
fn pinned_memory_of_the_host_is_the_last_of_the_devices() {
    let snapshot =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/snapshots/pinned-2.15.pickle.gz");
    let sources =
        [Source::of("train.gtr", recording(HOST_SCENE)).without_requests(), Source::open(&snapshot).unwrap()];
    for source in sources {
        let (bytes, story, _) = page_of(source);
        let (head, columns) = read(&bytes);
        let column = |of: &Json| &columns[of.as_u64().unwrap() as usize];
        let devices = head["chapters"][0]["devices"].as_array().unwrap();
        let numbers: Vec<i64> = devices.iter().map(|device| device["device"].as_i64().unwrap()).collect();
        assert_eq!(numbers, [0, -2]);
        let host = &devices[1];
        assert_eq!(host["name"], "host, pinned memory");
        let level = column(&head["chapters"][0]["holders"]["level"]);
        let (holder, bytes) = (column(&host["row_holder"]), column(&host["row_bytes"]));
        let (mut held, mut used, mut highest, mut row) = (0, 0, 0, 0);
        for n in column(&host["state_rows"]) {
            for _ in 0..*n {
                held += bytes[row];
                used += if level[holder[row] as usize] == 2 { 0 } else { bytes[row] };
                row += 1;
            }
            highest = highest.max(held);
        }
        let (books, blocks) = (story.ledger.host(), story.ledger.host_blocks());
        assert_eq!((highest as u64, held as u64), (books.peak().0, books.now().bytes.0));
        if blocks.peak().0 > 0 {
            assert_eq!(used as u64, blocks.now().bytes.0);
        }
        assert!(!column(&host["blocks"]["addr"]).is_empty());
    }
}

#[test]
fn what_is_wrong_with_the_job_is_where_its_trace_shows_it() {
    let chapter = || {
        let source = Source::of("train.gtr", recording(SCENE)).without_requests();
        let story = Story::with_lifetimes(&source, &Categories::default());
        let part = gputrace_report::part(&story, of_report(&story, Shown::OnDemand));
        let chapter = Chapter::of(&story, &part, &source, 2, None);
        (story, chapter)
    };
    let (first, second) = (chapter(), chapter());
    let began = first.0.start().0;
    let placed =
        |trace, since| Placed { trace, time: Nanos(began + since), text: "rank 1 did not call".into() };
    let mut page = vec![];
    Page::of(vec![first, second], &[], vec![placed(1, 7), placed(2, 9)]).write(&mut page).unwrap();
    let (head, _) = read(&page);
    let found = |chapter: usize| head["chapters"][chapter]["findings"].clone();
    assert_eq!((found(0), found(1)), (json!([]), json!([[7, "rank 1 did not call"]])));
}

#[test]
fn blocks_are_of_the_layers_of_their_model() {
    let trace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/predict/gpt.batch4.gtr");
    let (page, ..) = page_of(Source::open(&trace).unwrap());
    let (head, columns) = read(&page);
    let chapter = &head["chapters"][0];
    let names: Vec<&str> =
        chapter["layers"].as_array().unwrap().iter().map(|it| it.as_str().unwrap()).collect();
    let wanted = [0, 1, 2, 3, 4, 5].map(|n| format!("layer {n}, Gpt.forward (predict_programs.py:61)"));
    assert_eq!(names, wanted);
    let mut layers = columns[chapter["holders"]["layer"].as_u64().unwrap() as usize].clone();
    layers.sort_unstable();
    layers.dedup();
    assert_eq!(layers, [0, 1, 2, 3, 4, 5, 6]);
}
