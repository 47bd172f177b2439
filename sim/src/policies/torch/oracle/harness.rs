//! The compiled side: which releases were built, with which options they are tried, and a running harness.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use object::{Object, ObjectSymbol};

/// One compiled allocator.
pub(super) struct Oracle {
    /// As in its file's name.
    pub(super) text: String,
    pub(super) version: (u8, u8),
    pub(super) program: PathBuf,
}

/// The releases that have been built.
pub(super) fn oracles() -> Vec<Oracle> {
    let folder = std::env::var_os("GPUTRACE_ORACLE")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/oracle"), PathBuf::from);
    let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let text = name.strip_prefix("oracle-")?.to_string();
            let mut parts = text.split('.').map(str::parse);
            let version = (parts.next()?.ok()?, parts.next()?.ok()?);
            Some(Oracle { text, version, program: entry.path() })
        })
        .collect();
    found.sort_by_key(|oracle| oracle.version);
    found
}

pub(super) fn option_strings(version: (u8, u8)) -> Vec<&'static str> {
    let all: &[((u8, u8), &str)] = &[
        ((2, 0), ""),
        ((2, 0), "max_split_size_mb:21"),
        ((2, 0), "max_split_size_mb:32"),
        ((2, 0), "max_split_size_mb:128"),
        ((2, 0), "roundup_power2_divisions:4"),
        ((2, 0), "roundup_power2_divisions:[1:2,8:8,64:4,>:1]"),
        ((2, 0), "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],max_split_size_mb:256"),
        ((2, 0), "garbage_collection_threshold:0.6"),
        ((2, 0), "garbage_collection_threshold:0.8"),
        ((2, 0), "garbage_collection_threshold:0.5,max_split_size_mb:64"),
        ((2, 0), "garbage_collection_threshold:0.3,roundup_power2_divisions:16"),
        ((2, 0), "max_split_size_mb:64,roundup_power2_divisions:8,garbage_collection_threshold:0.9"),
        ((2, 1), "expandable_segments:True"),
        ((2, 5), "expandable_segments:True,max_split_size_mb:64"),
        ((2, 1), "expandable_segments:True,roundup_power2_divisions:8,garbage_collection_threshold:0.6"),
        ((2, 6), "max_split_size_mb:32,max_non_split_rounding_mb:40"),
        ((2, 11), "large_segment_size_mb:32"),
        ((2, 11), "large_segment_size_mb:64,expandable_segments:True"),
        ((2, 12), "throw_on_cudamalloc_oom:True"),
        ((2, 10), "per_process_memory_fraction:0.7"),
        ((2, 15), "expandable_segments:True,expandable_segments_reserve:0.1"),
        (
            (2, 15),
            "expandable_segments:True,expandable_segments_reserve:0.2G,garbage_collection_threshold:0.6",
        ),
    ];
    all.iter().filter(|(since, _)| *since <= version).map(|(_, options)| *options).collect()
}

/// A running harness: programs go in, what happened comes out.
pub(super) struct Harness {
    pub(super) child: Child,
    pub(super) commands: ChildStdin,
    pub(super) said: BufReader<ChildStdout>,
}

impl Harness {
    pub(super) fn start(program: &Path, options: &str) -> Harness {
        let mut command = Command::new(program);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        command.env_remove("PYTORCH_CUDA_ALLOC_CONF").env_remove("PYTORCH_ALLOC_CONF");
        if !options.is_empty() {
            command.env("PYTORCH_CUDA_ALLOC_CONF", options);
        }
        let mut child = command.spawn().unwrap();
        let commands = child.stdin.take().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        Harness { child, commands, said }
    }

    /// Runs one program. The lines end with how its process ended.
    pub(super) fn run(&mut self, commands: &str) -> Vec<String> {
        self.commands.write_all(commands.as_bytes()).unwrap();
        self.commands.flush().unwrap();
        let mut lines = Vec::new();
        let mut line = Vec::new();
        while self.said.read_until(b'\n', &mut line).unwrap() > 0 {
            let text = String::from_utf8_lossy(&line).trim_end().to_string();
            line.clear();
            let ends = text.starts_with("ended ");
            if text.is_empty() {
                continue;
            }
            lines.push(text);
            if ends {
                break;
            }
        }
        lines
    }

    pub(super) fn stop(mut self) {
        drop(self.commands);
        let _ = self.child.wait();
    }
}

/// The mangled name of the function at a place such as `libc10_cuda.so+3816e`.
pub(super) fn function(oracle: &Oracle, place: &str) -> String {
    let (library, offset) = place.split_once('+').unwrap();
    let offset = u64::from_str_radix(offset, 16).unwrap();
    let folder = oracle.program.with_file_name(format!("lib-{}", oracle.text));
    let bytes = std::fs::read(folder.join(library)).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let mut functions = file.symbols();
    let found = functions.find(|it| it.address() <= offset && offset < it.address() + it.size());
    found.map_or_else(String::new, |it| it.name().unwrap().into())
}
