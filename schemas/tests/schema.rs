//! The payloads are what `trace.fbs` says, in the eyes of FlatBuffers' own compiler. Skipped, and says so, without `flatc`.

use gputrace_schemas::event::*;
use gputrace_schemas::writer::Writer;
use std::path::Path;
use std::process::Command;

/// Kind and payload of every block.
fn payloads(trace: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let mut blocks = Vec::new();
    let mut rest = &trace[8..];
    while rest.starts_with(b"GTB\x01") {
        let number = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().unwrap()) as usize;
        let (raw, stored) = (number(12), number(16));
        blocks.push((rest[4], zstd::bulk::decompress(&rest[64..64 + stored], raw).unwrap()));
        rest = &rest[64 + stored..];
    }
    blocks
}

fn trace() -> Vec<u8> {
    let mut writer = Writer::new(Vec::new()).unwrap();
    writer.process(&Process {
        pid: 42,
        rank: Some(3),
        command: vec!["python".to_owned()],
        ..Process::default()
    });
    writer.device(&Device { ordinal: 1, name: "H200".to_owned(), uuid: "GPU-x".to_owned(), total: Bytes(5) });
    let frame = Frame::Python { function: "f".to_owned(), file: "a.py".to_owned(), line: 9 };
    writer.frame(FrameId(0), &frame);
    writer.stack(StackId(1), &Stack { frames: vec![FrameId(0)], truncated: true, backward: None });
    let config = CommConfig { min_ctas: Some(8), ..CommConfig::default() };
    let communicator =
        Communicator { call: 4, unique_id: 9, rank: Some(3), config, ..Communicator::default() };
    writer.communicator(CommId(1), &communicator);
    let mapped = vec![Mapping { start: 4096, end: 8192 }, Mapping { start: 12288, end: 16384 }];
    writer.mappings(&Mappings { time: Nanos(7), mapped }).unwrap();
    let alloc = BlockAlloc {
        device: 1,
        addr: 1 << 40,
        bytes: Bytes(512),
        requested: Some(Bytes(500)),
        stream: None,
        allocated: Bytes(512),
        reserved: Bytes(2048),
    };
    let free = BlockFree {
        device: 1,
        addr: 1 << 40,
        bytes: Bytes(512),
        allocated: Bytes(0),
        reserved: Bytes(2048),
        collecting: true,
    };
    let send = NcclEnter {
        api: ApiId(0),
        op: NcclOp::Send,
        call: 5,
        comm: CommId(1),
        sequence: 0,
        group: 0,
        group_depth: 0,
        count: 7,
        datatype: 7,
        redop: -1,
        redop_call: 0,
        peer: 2,
        send: 4096,
        receive: 0,
        stream: 0,
        handle: 0,
        extra: 0,
        captured: false,
    };
    for (time, kind) in [
        (10, EventKind::BlockAlloc(alloc)),
        (8, EventKind::BlockFree(free)),
        (9, EventKind::Note("n".to_owned())),
        (10, EventKind::NcclEnter(send)),
        (11, EventKind::NcclExit(NcclExit { call: 5, result: 7, value: 0, duration: Nanos(3), timed: None })),
    ] {
        writer.event(&Event { time: Nanos(time), thread: ThreadId(2), stack: StackId(1), kind }).unwrap();
    }
    writer.finish().unwrap()
}

#[test]
fn flatc_reads_the_payloads_with_the_schema() {
    let Ok(version) = Command::new("flatc").arg("--version").output() else {
        return gputrace_skip::skip(
            "FlatBuffers' own compiler",
            "flatc is not installed (Debian: flatbuffers-compiler)",
        );
    };
    println!("{}", String::from_utf8_lossy(&version.stdout));
    let folder = std::env::temp_dir().join(format!("gputrace-schema-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let schema = Path::new(env!("CARGO_MANIFEST_DIR")).join("trace.fbs");
    let mut shown = String::new();
    for (kind, payload) in payloads(&trace()) {
        let name = ["", "Definitions", "Events", "Mappings", "Index"][kind as usize];
        let file = folder.join(format!("{name}.bin"));
        std::fs::write(&file, payload).unwrap();
        let mut flatc = Command::new("flatc");
        flatc.args([
            "--json",
            "--strict-json",
            "--raw-binary",
            "--root-type",
            &format!("gputrace.{name}"),
            "-o",
        ]);
        let status = flatc.arg(&folder).arg(&schema).arg("--").arg(&file).status().unwrap();
        assert!(status.success(), "{name}");
        let json = std::fs::read_to_string(file.with_extension("json")).unwrap();
        shown.push_str(&format!("{name} {}\n", json.split_whitespace().collect::<Vec<_>>().join("")));
    }
    std::fs::remove_dir_all(folder).unwrap();
    let expected = r#"Definitions {"strings":["","python","f","a.py","H200","GPU-x"],"process":{"pid":42,"command":[1],"rank":4},"modules":{},"frames":{"ids":[0],"flags":[1],"functions":[2],"files":[3],"lines":[9]},"stacks":{"ids":[1],"lengths":[1],"frames":[0],"flags":[1]},"threads":{},"devices":{"ordinals":[1],"names":[4],"uuids":[5],"totals":[5]},"apis":{},"communicators":{"ids":[1],"calls":[4],"unique_ids":[9],"ranks":[4],"config":[-2147483648,-2147483648,8,-2147483648,-2147483648,-2147483648,-2147483648,-2147483648]},"texts":{}}
Mappings {"times":[7],"lengths":[2],"gaps":[4096,4096],"sizes":[4096,4096]}
Events {"kinds":[2,3,8,9,10],"times":[20,3,2,2,2],"threads":[2,2,2,2,2],"stacks":[1,1,1,1,1],"calls":{},"allocs":{"devices":[1],"addresses":[1099511627776],"bytes":[512],"flags":[1],"requested":[24],"allocated":[0],"reserved":[4096]},"frees":{"devices":[1],"addresses":[1099511627776],"flags":[1]},"ooms":{},"waits":{},"samples":{},"losses":{},"notes":["n"],"nccl_enters":{"ops":[9],"calls":[10],"comms":[1],"sequences":[1],"counts":[7],"datatypes":[8],"peers":[3],"sends":[4096]},"nccl_exits":{"calls":[10],"results":[7],"durations":[3]},"marks":{},"nccl_timings":{}}
"#;
    let (blocks, index) = shown.split_at(shown.find("Index").unwrap());
    // All-zero columns are left out.
    assert_eq!(blocks, expected.replace(r#""allocated":[0],"#, ""));
    assert!(index.starts_with(r#"Index {"offsets":[8,"#), "{index}");
}
