//! A program as Python on PyTorch alone.
//!
//! Nothing that is written comes from the recorded program but numbers: sizes, an order, settings of the allocator that the simulator has read
//! and writes anew, and roles from a list of our own.

use std::collections::BTreeMap;
use std::fmt::Write;

use gputrace_report::fold::{Line, folded};
use gputrace_sim::addresses::Direction;
use gputrace_sim::policies::torch::{Options, variables};

use super::Reproduction;
use super::goal::Goal;
use super::program::{PoolKind, Program, Step};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Streams that hold up the reuse of memory.
const MOST_DELAYS: usize = 8;
/// `torch.cuda.Stream()` hands the same streams out again after so many (`kStreamsPerPool`, c10/cuda/CUDAStream.cpp).
const MOST_STREAMS: usize = 32;

/// The whole file.
pub fn python(of: &Reproduction, wants_roles: bool, is_exact: bool) -> String {
    let program = &of.program;
    let (major, minor) = program.profile.version;
    let mut text = String::from("#!/usr/bin/env python3\n");
    let what = match of.goal {
        Goal::Refusal(_) => "A request that PyTorch's CUDA allocator refuses",
        Goal::Peak { .. } => "A run of PyTorch's CUDA allocator, up to where most is reserved",
    };
    let n = program.n_requests();
    line(&mut text, &format!("# {what}, in {n} {}.", if n == 1 { "request" } else { "requests" }));
    if let Goal::Refusal(reasons) = of.goal {
        line(&mut text, &format!("# Why: {}.", reasons.words()));
    }
    line(
        &mut text,
        &format!(
            "# For PyTorch {major}.{minor}; written by gputrace reproduce. The sizes, their order and the settings are"
        ),
    );
    line(&mut text, "# recorded; no code, name or path of the recorded program is in this file.");
    if !of.is_as_recorded() {
        line(&mut text, "# The figures are simulated; the recorded run came to others.");
    }
    line(&mut text, "# Exit status: 0 reproduced, 1 not reproduced, 2 it cannot be tried here.");
    if program.pools.len() > 1 {
        line(&mut text, "import contextlib");
    }
    let body = Body::of(program, wants_roles);
    if body.has_many_streams() {
        line(&mut text, "import ctypes");
    }
    line(&mut text, "import os\nimport sys\n");
    let variable = variables(Some(program.profile.version))[0];
    let settings = settings(&program.options, program.profile.version);
    for other in variables(None) {
        if *other != variable || settings.is_empty() {
            line(&mut text, &format!("os.environ.pop(\"{other}\", None)"));
        }
    }
    if !settings.is_empty() {
        line(&mut text, &format!("os.environ[\"{variable}\"] = \"{settings}\""));
    }
    text.push_str(IMPORT);
    constants(&mut text, of, &body);
    text.push_str(&helpers(program, &body, is_exact));
    text.push_str(&body.text);
    text.push_str(&end(of, is_exact, &body));
    text
}

pub(super) fn line(text: &mut String, line: &str) {
    text.push_str(line);
    text.push('\n');
}

fn constants(text: &mut String, of: &Reproduction, body: &Body) {
    for (name, bytes) in [("KIB", KIB), ("MIB", MIB), ("GIB", GIB)] {
        if body.text.contains(name) || of.program.limit.is_some_and(|limit| size(limit).contains(name)) {
            line(text, &format!("{name} = 1 << {}", bytes.ilog2()));
        }
    }
    let (major, minor) = of.program.profile.version;
    line(text, &format!("RELEASE = \"{major}.{minor}\""));
    match of.program.limit {
        Some(limit) => line(text, &format!("LIMIT = {}  # all that the allocator may reserve", size(limit))),
        None => line(text, "LIMIT = None"),
    }
    match of.goal {
        Goal::Refusal(_) => {
            let (reserved, allocated) = of.figures.at_refusal.unwrap_or_default();
            line(
                text,
                &format!(
                    "EXPECTED = {{\"refused\": True, \"reserved\": {reserved}, \"allocated\": {allocated}}}"
                ),
            );
        }
        Goal::Peak { reserved, allocated } => {
            line(
                text,
                &format!(
                    "EXPECTED = {{\"refused\": False, \"reserved\": {reserved}, \"allocated\": {allocated}}}"
                ),
            );
        }
    }
}

/// The settings that change what is allocated where, as the environment has them. Nothing of the recorded text is copied.
fn settings(options: &Options, version: (u8, u8)) -> String {
    let known = Options::default();
    let mut all: Vec<String> = vec![];
    let megabytes = |bytes: u64| bytes / MIB;
    if options.expandable_segments {
        all.push("expandable_segments:True".into());
    }
    if options.large_segment != known.large_segment {
        all.push(format!("large_segment_size_mb:{}", megabytes(options.large_segment)));
    }
    if options.max_split != known.max_split {
        all.push(format!("max_split_size_mb:{}", megabytes(options.max_split)));
    }
    if options.max_non_split_rounding != known.max_non_split_rounding {
        all.push(format!("max_non_split_rounding_mb:{}", megabytes(options.max_non_split_rounding)));
    }
    if options.gc_threshold > 0.0 {
        all.push(format!("garbage_collection_threshold:{}", options.gc_threshold));
    }
    let divisions = &options.roundup_divisions;
    if divisions.iter().all(|it| *it == divisions[0]) {
        if divisions[0] > 0 {
            all.push(format!("roundup_power2_divisions:{}", divisions[0]));
        }
    } else {
        // Up to 2.3 a division of 0 is refused, and 1 means something else; from 2.4 on both mean none.
        let list =
            divisions.iter().enumerate().map(|(index, division)| format!("{}:{division}", 1u64 << index));
        all.push(format!("roundup_power2_divisions:[{}]", list.collect::<Vec<_>>().join(",")));
    }
    if options.throw_on_cudamalloc_oom && version >= (2, 12) {
        all.push("throw_on_cudamalloc_oom:True".into());
    }
    all.join(",")
}

/// Bytes as Python or C++, with a unit where that is exact.
pub(super) fn size(bytes: u64) -> String {
    for (unit, name) in [(GIB, "GIB"), (MIB, "MIB"), (KIB, "KIB")] {
        if bytes >= unit && bytes.is_multiple_of(unit) {
            return match bytes / unit {
                1 => name.to_owned(),
                many => format!("{many} * {name}"),
            };
        }
    }
    bytes.to_string()
}

/// The steps.
struct Body {
    text: String,
    /// Names of the tensors that live at the end, with their numbers.
    live: Vec<(String, u32)>,
    /// Streams beside the default one, and those that delay the reuse of memory.
    n_streams: [usize; 2],
    has_refusals: bool,
}

impl Body {
    fn of(program: &Program, wants_roles: bool) -> Body {
        let mut is_given_back = vec![false; program.tensors.len()];
        for step in &program.steps {
            if let Step::Free(tensor) | Step::Drop(tensor) = step {
                is_given_back[*tensor as usize] = true;
            }
        }
        let mut names = Names::default();
        let mut lines: Vec<Line> = vec![];
        let mut delays: BTreeMap<u32, usize> = BTreeMap::new();
        let mut kept: Vec<u32> = vec![];
        let (mut is_delayed, mut has_refusals, mut is_passing) = (false, false, false);
        let last = program.steps.len().saturating_sub(1);
        for (at, step) in program.steps.iter().enumerate() {
            match *step {
                Step::Alloc(tensor) => {
                    let (size, stream, place) = arguments(program, tensor);
                    let role = program.tensors[tensor as usize].role.filter(|_| wants_roles);
                    let text = match is_given_back[tensor as usize] {
                        // What is dropped at once needs no name.
                        true if program.steps.get(at + 1) == Some(&Step::Free(tensor)) => {
                            is_passing = true;
                            format!("empty({{}}{place})")
                        }
                        true => format!("{} = empty({{}}{place})", names.give(tensor)),
                        false => {
                            kept.push(tensor);
                            format!("keep.append(empty({{}}{place}))")
                        }
                    };
                    lines.push(Line { text, size: Some(size), stream, role });
                }
                Step::Free(_) if std::mem::take(&mut is_passing) => {}
                Step::Free(tensor) => {
                    let name = names.take(tensor);
                    match lines.last_mut() {
                        Some(line) if line.text.starts_with("del ") && line.text.len() < 90 => {
                            let _ = write!(line.text, ", {name}");
                        }
                        _ => lines.push(Line::of(format!("del {name}"))),
                    }
                }
                Step::Drop(tensor) => {
                    is_delayed = true;
                    let name = names.take(tensor);
                    let free = (0..MOST_DELAYS).find(|it| !delays.values().any(|used| used == it));
                    let delay = free.unwrap_or(MOST_DELAYS - 1);
                    delays.insert(tensor, delay);
                    lines.push(Line::of(format!("still_used(delays[{delay}], {name}); del {name}")));
                }
                Step::Done(tensor) => {
                    if let Some(delay) = delays.remove(&tensor) {
                        lines.push(Line::of(format!("delays[{delay}].synchronize()")));
                    }
                }
                Step::Trim => lines.push(Line::of("torch.cuda.empty_cache()".into())),
                Step::Release(pool) => lines.push(Line::of(format!("pool{pool}.release()"))),
                Step::Refused(tensor) => {
                    let (size, stream, place) = arguments(program, tensor);
                    has_refusals = true;
                    let text = match at == last {
                        true => format!("is_refused = refuses({size}{place})"),
                        false => format!("must(refuses({size}{place}))"),
                    };
                    lines.push(Line { stream, ..Line::of(text) });
                }
            }
        }
        let live = kept.iter().enumerate().map(|(index, tensor)| (format!("keep[{index}]"), *tensor));
        let text = folded(&lines);
        let n_streams = usize::from(program.n_streams.saturating_sub(1));
        let n_delays = if is_delayed { MOST_DELAYS } else { 0 };
        Body { text, live: live.collect(), n_streams: [n_streams, n_delays], has_refusals }
    }

    /// More than `torch.cuda.Stream()` tells apart.
    fn has_many_streams(&self) -> bool {
        self.n_streams.iter().sum::<usize>() > MOST_STREAMS
    }
}

/// What `empty` is called with: the size, the number of the stream, and all arguments after the size.
fn arguments(program: &Program, tensor: u32) -> (String, Option<usize>, String) {
    let tensor = program.tensors[tensor as usize];
    let stream = usize::from(tensor.stream).checked_sub(1);
    let mut place = if stream.is_some() { ", stream={stream}".to_owned() } else { String::new() };
    if tensor.pool != 0 {
        let _ = write!(place, ", pool=pool{}", tensor.pool);
    }
    (size(tensor.bytes), stream, place)
}

/// Names of tensors: the first that is free, so that steps that repeat read alike.
#[derive(Default)]
struct Names {
    used: Vec<Option<u32>>,
}

impl Names {
    fn give(&mut self, tensor: u32) -> String {
        let free = self.used.iter().position(Option::is_none).unwrap_or_else(|| {
            self.used.push(None);
            self.used.len() - 1
        });
        self.used[free] = Some(tensor);
        format!("t{free}")
    }

    fn take(&mut self, tensor: u32) -> String {
        let place = self.used.iter().position(|it| *it == Some(tensor));
        if let Some(place) = place {
            self.used[place] = None;
        }
        format!("t{}", place.unwrap_or(0))
    }
}

const IMPORT: &str = "
try:
    import torch
except ImportError as error:
    print(f\"cannot be tried here: {error}\")
    sys.exit(2)
";

const NOT_HERE: &str = "

def cannot(why):
    print(f\"cannot be tried here: {why}\")
    sys.exit(2)


if not torch.cuda.is_available():
    cannot(\"PyTorch finds no CUDA device\")
if torch.__version__.split(\".\")[:2] != RELEASE.split(\".\"):
    print(f\"note: written for PyTorch {RELEASE}, this is {torch.__version__}; releases differ\", file=sys.stderr)
torch.cuda.init()
free, total = torch.cuda.mem_get_info()
if LIMIT is not None:
    if LIMIT > free:
        cannot(f\"{LIMIT:,} bytes are needed on the device, and {free:,} are free\")
    torch.cuda.set_per_process_memory_fraction((LIMIT + 0.5) / total)
elif EXPECTED[\"reserved\"] > free:
    cannot(f\"{EXPECTED['reserved']:,} bytes are needed on the device, and {free:,} are free\")
keep = []  # memory that is never freed
";

fn helpers(program: &Program, body: &Body, is_exact: bool) -> String {
    let mut text = NOT_HERE.to_owned();
    let [n_streams, n_delays] = body.n_streams;
    let stream = match body.has_many_streams() {
        true => "new_stream()",
        false => "torch.cuda.Stream()",
    };
    if body.has_many_streams() {
        text.push_str(NEW_STREAM);
    }
    for (name, n) in [("streams", n_streams), ("delays", n_delays)] {
        if n > 0 {
            line(&mut text, &format!("{name} = [{stream} for _ in range({n})]"));
        }
    }
    let has_graph_pools = program.pools.iter().skip(1).any(|kind| *kind == PoolKind::Graph);
    if has_graph_pools {
        text.push_str(GRAPH_POOL);
    }
    if program.pools.iter().skip(1).any(|kind| *kind != PoolKind::Graph) {
        text.push_str(MEM_POOL);
    }
    let has_pools = program.pools.len() > 1;
    text.push_str(match (n_streams > 0, has_pools) {
        (false, false) => EMPTY,
        (true, false) => EMPTY_ON_STREAM,
        (_, true) => EMPTY_IN_POOL,
    });
    if body.has_refusals {
        text.push_str(REFUSES);
    }
    if body.text.contains("must(") {
        text.push_str(MUST);
    }
    if n_delays > 0 {
        text.push_str(STILL_USED);
    }
    if is_exact {
        text.push_str(OFFSETS);
    }
    text.push('\n');
    text.push('\n');
    for (number, kind) in program.pools.iter().enumerate().skip(1) {
        let made = match kind {
            PoolKind::Graph => "GraphPool()".to_owned(),
            PoolKind::MemPool { serves_others, is_whole } => {
                let flags = [(*serves_others, "use_on_oom=True"), (*is_whole, "no_split=True")];
                let flags: Vec<&str> =
                    flags.iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| *flag).collect();
                format!("MemPool({})", flags.join(", "))
            }
        };
        line(&mut text, &format!("pool{number} = {made}"));
    }
    text.push_str("is_refused = False\n");
    text
}

const EMPTY: &str = "

def empty(n):
    return torch.empty(n, dtype=torch.uint8, device=\"cuda\")
";

const EMPTY_ON_STREAM: &str = "

def empty(n, stream=None):
    with torch.cuda.stream(stream):
        return torch.empty(n, dtype=torch.uint8, device=\"cuda\")
";

const EMPTY_IN_POOL: &str = "

def empty(n, stream=None, pool=contextlib.nullcontext()):
    with torch.cuda.stream(stream), pool:
        return torch.empty(n, dtype=torch.uint8, device=\"cuda\")
";

const NEW_STREAM: &str = "

def new_stream():
    \"\"\"A stream of its own: torch.cuda.Stream() hands out the same 32 again and again.\"\"\"
    handle = ctypes.c_size_t()
    torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle))
    return torch.cuda.ExternalStream(handle.value)


";

const GRAPH_POOL: &str = "

class GraphPool:
    \"\"\"A private pool as CUDA graphs have it, entered and left as a capture does.\"\"\"

    def __init__(self):
        self.id, self.uses = torch.cuda.graph_pool_handle(), 0

    def __enter__(self):
        begin = getattr(torch._C, \"_cuda_beginAllocateCurrentThreadToPool\", None)
        (begin or torch._C._cuda_beginAllocateToPool)(0, self.id)
        self.uses += 1

    def __exit__(self, *_):
        end = getattr(torch._C, \"_cuda_endAllocateToPool\", None)
        (end or torch._C._cuda_endAllocateCurrentStreamToPool)(0, self.id)

    def release(self):
        for _ in range(self.uses):
            torch._C._cuda_releasePool(0, self.id)
";

const MEM_POOL: &str = "

class MemPool:
    def __init__(self, **options):
        self.pool = torch.cuda.MemPool(**options)

    def __enter__(self):
        self.context = torch.cuda.use_mem_pool(self.pool)
        self.context.__enter__()

    def __exit__(self, *_):
        self.context.__exit__(None, None, None)

    def release(self):
        self.context = self.pool = None
";

const REFUSES: &str = "

def refuses(*request, **place):
    try:
        empty(*request, **place)
    except torch.cuda.OutOfMemoryError:
        return True
    return False
";

const MUST: &str = "

def must(holds):
    if not holds:
        print(\"not reproduced: a request was served that was refused\")
        sys.exit(1)
";

const STILL_USED: &str = "

def still_used(stream, tensor):
    \"\"\"Another stream works with the tensor for about a second: until it is waited for, the memory is not reused.\"\"\"
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)
    tensor.record_stream(stream)
";

const OFFSETS: &str = "

def offset(tensor):
    \"\"\"How far from the start of its segment a tensor lies, bytes.\"\"\"
    for segment in torch.cuda.memory_snapshot():
        distance = tensor.data_ptr() - segment[\"address\"]
        if 0 <= distance < segment[\"total_size\"]:
            return distance
";

fn end(of: &Reproduction, is_exact: bool, body: &Body) -> String {
    let mut text = String::from("\n");
    let (reserved, allocated) = match of.goal {
        Goal::Refusal(_) => ("memory_reserved", "memory_allocated"),
        Goal::Peak { .. } => ("max_memory_reserved", "max_memory_allocated"),
    };
    line(&mut text, "found = {");
    line(&mut text, "    \"refused\": is_refused,");
    line(&mut text, &format!("    \"reserved\": torch.cuda.{reserved}(),"));
    line(&mut text, &format!("    \"allocated\": torch.cuda.{allocated}(),"));
    line(&mut text, "}");
    if is_exact {
        let [up, down] = [Direction::Ascending, Direction::Descending].map(|way| of.program.offsets(way));
        // Where addresses decide, another run may have it elsewhere.
        let expected = body.live.iter().map(|(_, tensor)| match up[*tensor as usize] {
            Some(offset) if down[*tensor as usize] == Some(offset) => offset.to_string(),
            Some(_) | None => "None".into(),
        });
        let expected: Vec<String> = expected.collect();
        line(&mut text, &format!("EXPECTED[\"offsets\"] = [{}]", expected.join(", ")));
        line(
            &mut text,
            "found[\"offsets\"] = [None if at is None else offset(it) for at, it in zip(EXPECTED[\"offsets\"], keep)]",
        );
    }
    line(&mut text, "if found != EXPECTED:");
    line(&mut text, "    print(f\"not reproduced: expected {EXPECTED}, found {found}\")");
    line(&mut text, "    sys.exit(1)");
    line(&mut text, "print(f\"reproduced: {found}\")");
    text
}
