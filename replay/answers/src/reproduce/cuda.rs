//! A request that the driver refused somebody else than PyTorch's allocator, as C++ on the CUDA runtime.
//!
//! ```text
//!  what the driver handed out ──> Program {Get, Give, Refused} ── the sum of what lives ──> repro.cpp
//! ```
//! Nothing decides such a refusal but how much is left: what lives, and what there is for the process. The second is what was free when
//! somebody last looked, with what the process had then; the program allocates the rest of the card first.

use std::collections::HashMap;
use std::fmt::Write;

use gputrace_analyse::story::Story;
use gputrace_report::model::{Mood, Section, Value};
use gputrace_schemas::event::{Action, Bytes, Event, EventKind, HOST};
use gputrace_sim::bytes::iec;
use gputrace_trace::ledger::{Ledger, MemoryKind, Step, Watch};
use gputrace_trace::source::Source;
use gputrace_trace::words;
use serde_json::{Value as Json, json};

use super::python::{line, size};

/// The driver hands memory out in pieces of so many bytes (`cuMemGetAllocationGranularity` on data centre cards).
const PAGE: u64 = 2 << 20;

/// By which function memory is requested.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum How {
    /// `cudaMalloc`.
    Linear,
    /// `cudaMallocAsync`.
    Ordered,
    /// `cudaMallocManaged`.
    Managed,
    /// `cuMemCreate`.
    Physical,
}

impl How {
    const ALL: [How; 4] = [How::Linear, How::Ordered, How::Managed, How::Physical];

    fn of(kind: MemoryKind) -> Option<How> {
        match kind {
            // Arrays take device memory, too; what they are for does not matter.
            MemoryKind::Linear | MemoryKind::Array => Some(How::Linear),
            MemoryKind::Async => Some(How::Ordered),
            MemoryKind::Managed => Some(How::Managed),
            MemoryKind::Virtual => Some(How::Physical),
            MemoryKind::Graph
            | MemoryKind::Pinned
            | MemoryKind::Registered
            | MemoryKind::HostVirtual
            | MemoryKind::Imported => None,
        }
    }

    fn of_action(action: Action) -> Option<How> {
        match action {
            Action::Alloc | Action::ArrayCreate => Some(How::Linear),
            Action::AllocAsync => Some(How::Ordered),
            Action::AllocManaged => Some(How::Managed),
            Action::Create => Some(How::Physical),
            _ => None,
        }
    }

    /// The function of the program that asks so.
    fn name(self) -> &'static str {
        match self {
            How::Linear => "linear",
            How::Ordered => "ordered",
            How::Managed => "managed",
            How::Physical => "physical",
        }
    }
}

/// Memory that is requested.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Memory {
    /// How.
    pub how: How,
    /// How much.
    pub bytes: u64,
}

/// What the program does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Move {
    Get(usize),
    Give(usize),
}

/// A refusal of the driver.
pub struct Reproduction {
    /// On which device it was.
    pub device: i16,
    /// What is asked for, by number; each step names one.
    memory: Vec<Memory>,
    steps: Vec<Move>,
    /// What is refused at the end.
    pub refused: Memory,
    /// It was request so many of the device, counted from 1.
    pub request: u64,
    /// What there was for the process in all, bytes.
    pub room: u64,
    /// Requests before it was shrunk, the refused one included.
    pub n_before: usize,
    /// Parts of the recording that the program cannot repeat.
    pub notes: Vec<String>,
}

/// The last request that the driver refused.
struct Refusal {
    device: i16,
    /// What was requested; none where the program cannot.
    memory: Option<Memory>,
    /// Steps and looks before it.
    n_steps: usize,
    n_looks: usize,
}

/// Follows what the driver hands out until it refuses.
#[derive(Default)]
struct Follower {
    memory: Vec<(i16, Memory)>,
    steps: Vec<(i16, Move)>,
    live: HashMap<u64, usize>,
    /// By device what is live, and what of it takes the device's own memory for sure.
    held: HashMap<i16, u64>,
    /// What was free whenever somebody looked, with what the process had: all that there was for it.
    looks: Vec<(i16, u64)>,
    has_graphs: bool,
    refusal: Option<Refusal>,
}

impl Follower {
    fn looked(&mut self, device: i16, free: u64) {
        let held = self.held.get(&device).copied().unwrap_or(0);
        let look = (device, free.saturating_add(held));
        if self.looks.last() != Some(&look) {
            self.looks.push(look);
        }
    }
}

impl Watch for Follower {
    /// It may begin a second time: see [`Ledger::of`].
    fn begin(&mut self, ledger: &mut Ledger) {
        *self = Follower::default();
        ledger.keep_steps();
    }

    fn event(&mut self, ledger: &mut Ledger, event: &Event) {
        for step in ledger.steps() {
            match step {
                Step::Gained(object) => {
                    self.has_graphs |= object.kind == MemoryKind::Graph;
                    let Some(how) = How::of(object.kind) else { continue };
                    let number = self.memory.len();
                    self.memory.push((object.device, Memory { how, bytes: object.bytes.0 }));
                    self.steps.push((object.device, Move::Get(number)));
                    self.live.insert(object.serial, number);
                    if object.kind.is_physical() {
                        let held = self.held.entry(object.device).or_default();
                        *held = held.saturating_add(object.bytes.0);
                    }
                }
                Step::Lost(object) => {
                    let Some(number) = self.live.remove(&object.serial) else { continue };
                    self.steps.push((object.device, Move::Give(number)));
                    if object.kind.is_physical() {
                        let held = self.held.entry(object.device).or_default();
                        *held = held.saturating_sub(object.bytes.0);
                    }
                }
                _ => {}
            }
        }
        match &event.kind {
            EventKind::Sample(sample) => {
                self.looked(sample.device, sample.total.0.saturating_sub(sample.device_used.0));
            }
            EventKind::Call(call) if call.action == Action::MemInfo && call.result == Some(0) => {
                self.looked(call.device, call.bytes.0);
            }
            EventKind::Call(call) => {
                if let Some(oom) = ledger.ran_out() {
                    let how = How::of_action(call.action).filter(|_| oom.device != HOST);
                    let memory = how.map(|how| Memory { how, bytes: oom.bytes.0 });
                    let (n_steps, n_looks) = (self.steps.len(), self.looks.len());
                    self.refusal = Some(Refusal { device: oom.device, memory, n_steps, n_looks });
                }
            }
            _ => {}
        }
    }
}

/// The last request that the driver refused, and what lived then. `is_whole` keeps what was freed before.
///
/// # Errors
/// Why there is none that can be reproduced.
pub fn reproduce(source: &Source, device: Option<u32>, is_whole: bool) -> Result<Reproduction, String> {
    let mut follower = Follower::default();
    Story::watched(source, &mut follower);
    let refusal =
        follower.refusal.filter(|it| device.is_none_or(|wanted| i64::from(wanted) == i64::from(it.device)));
    let Refusal { device: of, memory: refused, n_steps, n_looks } = refusal.ok_or(
        "outside PyTorch's allocator, the driver refused no request of this device; without --cuda, the command reproduces PyTorch's own",
    )?;
    let refused = match refused {
        Some(it) if it.how != How::Managed => it,
        Some(_) => {
            return Err("managed memory was refused, which may be on the host; the trace does not show how much the host had left".into());
        }
        None if of == HOST => {
            return Err("host memory was refused; the trace does not show how much the host had left".into());
        }
        None => {
            return Err(
                "the refused call was not cudaMalloc, cudaMallocAsync or cuMemCreate; only these can be reproduced".into()
            );
        }
    };
    let steps: Vec<Move> =
        follower.steps[..n_steps].iter().filter(|(on, _)| *on == of).map(|(_, step)| *step).collect();
    let memory: Vec<Memory> = follower.memory.iter().map(|(_, memory)| *memory).collect();
    let n_before = 1 + steps.iter().filter(|step| matches!(step, Move::Get(_))).count();
    let mut notes = vec![];
    let (now, most) = amounts(&memory, &steps);
    let looks: Vec<u64> =
        follower.looks[..n_looks].iter().filter(|(on, _)| *on == of).map(|(_, room)| *room).collect();
    let room = room(&looks, now, most, refused.bytes, &mut notes);
    if follower.has_graphs {
        notes.push("memory owned by CUDA graphs is left out".to_owned());
    }
    let request = n_before as u64;
    let whole = Reproduction { device: of, memory, steps, refused, request, room, n_before, notes };
    Ok(if is_whole { whole.renumbered() } else { whole.shrunk() })
}

/// What lives at the end, and at most, bytes. Managed memory may lie on the host.
fn amounts(memory: &[Memory], steps: &[Move]) -> (u64, u64) {
    let bytes = |it: &usize| if memory[*it].how == How::Managed { 0 } else { memory[*it].bytes };
    let (mut now, mut most) = (0u64, 0u64);
    for step in steps {
        now = match step {
            Move::Get(it) => now.saturating_add(bytes(it)),
            Move::Give(it) => now.saturating_sub(bytes(it)),
        };
        most = most.max(now);
    }
    (now, most)
}

/// What there was for the process: so much that all was served, and the last request was not. The last look that agrees counts: NVML's
/// figures may be older than the requests beside them.
fn room(looks: &[u64], now: u64, most: u64, refused: u64, notes: &mut Vec<String>) -> u64 {
    let enough = now.saturating_add(refused);
    if let Some(room) = looks.iter().rev().find(|room| (most..enough).contains(*room)) {
        // The program meets it but for a page, and the last request must not fit by that.
        return (*room).min(enough.saturating_sub(2 * PAGE)).max(most);
    }
    notes.push(match looks.last() {
        None => "the trace does not show how much was free; the program assumes an amount that gives the same refusal".to_owned(),
        Some(room) => format!(
            "the trace shows {} for the process, which does not explain the refusal; the program assumes an amount that does",
            iec(*room)
        ),
    });
    enough.saturating_sub(refused / 2).max(most)
}

impl Reproduction {
    /// What was given back does not matter, and of each kind the sum of what lives does.
    fn shrunk(self) -> Reproduction {
        let mut sums: HashMap<How, u64> = HashMap::new();
        let mut is_given = vec![false; self.memory.len()];
        for step in &self.steps {
            if let Move::Give(it) = step {
                is_given[*it] = true;
            }
        }
        for step in &self.steps {
            if let Move::Get(it) = step
                && !is_given[*it]
            {
                let Memory { how, bytes } = self.memory[*it];
                let sum = sums.entry(how).or_default();
                *sum = sum.saturating_add(bytes);
            }
        }
        let sums =
            How::ALL.iter().filter_map(|how| sums.get(how).map(|sum| Memory { how: *how, bytes: *sum }));
        let memory: Vec<Memory> = sums.filter(|it| it.bytes > 0).collect();
        let steps = (0..memory.len()).map(Move::Get).collect();
        Reproduction { memory, steps, ..self }
    }

    /// The same with numbers for what it uses alone.
    fn renumbered(self) -> Reproduction {
        let mut numbers: HashMap<usize, usize> = HashMap::new();
        let mut memory = vec![];
        let steps = self.steps.iter().map(|step| match step {
            Move::Get(it) => {
                numbers.insert(*it, memory.len());
                memory.push(self.memory[*it]);
                Move::Get(memory.len() - 1)
            }
            Move::Give(it) => Move::Give(numbers[it]),
        });
        let steps = steps.collect();
        Reproduction { memory, steps, ..self }
    }

    /// Requests of the program, the refused one included.
    #[must_use]
    pub fn n_requests(&self) -> usize {
        1 + self.memory.len()
    }

    /// What the program is linked with beside the runtime, as words of a command.
    #[must_use]
    pub fn libraries(&self) -> &'static str {
        if self.uses(How::Physical) { " -lcuda" } else { "" }
    }

    fn uses(&self, how: How) -> bool {
        self.refused.how == how || self.memory.iter().any(|it| it.how == how)
    }

    /// What is left for the request that is refused, bytes.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.room.saturating_sub(amounts(&self.memory, &self.steps).0)
    }
}

/// The whole file.
#[must_use]
pub fn cuda(of: &Reproduction) -> String {
    let n = of.n_requests();
    let mut text = String::new();
    line(
        &mut text,
        &format!(
            "// A request that the CUDA driver refuses, in {n} {}.",
            if n == 1 { "request" } else { "requests" }
        ),
    );
    line(
        &mut text,
        &format!("// Why: {} are requested, and {} are left.", iec(of.refused.bytes), iec(of.left())),
    );
    line(
        &mut text,
        "// Written by gputrace reproduce --cuda. The sizes and their order are recorded; no code, name or path of the",
    );
    line(&mut text, "// recorded program is in this file.");
    line(&mut text, "// Exit status: 0 reproduced, 1 not reproduced, 2 it cannot be tried here.");
    line(&mut text, &format!("// Build: nvcc -o repro repro.cpp{}", of.libraries()));
    if of.uses(How::Physical) {
        line(&mut text, "#include <cuda.h>");
    }
    text.push_str(START);
    for how in How::ALL.into_iter().filter(|how| of.uses(*how)) {
        text.push_str(match how {
            How::Linear => LINEAR,
            How::Ordered => ORDERED,
            How::Managed => MANAGED,
            How::Physical => PHYSICAL,
        });
    }
    for how in How::ALL {
        if of.steps.iter().any(|step| matches!(step, Move::Give(it) if of.memory[*it].how == how)) {
            text.push_str(&give(how));
        }
    }
    text.push_str("\nint main() {\n");
    line(&mut text, &format!("    const size_t ROOM = {};  // for all that follows, bytes", size(of.room)));
    line(
        &mut text,
        &format!(
            "    const size_t SERVED = {};  // of that, before the last request",
            size(amounts(&of.memory, &of.steps).1)
        ),
    );
    text.push_str(BALLAST);
    text.push_str(&body(of));
    text.push_str(END);
    text
}

fn body(of: &Reproduction) -> String {
    let mut is_given = vec![false; of.memory.len()];
    for step in &of.steps {
        if let Move::Give(it) = step {
            is_given[*it] = true;
        }
    }
    let n_given = is_given.iter().filter(|it| **it).count();
    let mut text = String::new();
    if n_given > 0 {
        line(&mut text, &format!("    static Memory m[{n_given}];"));
    }
    let mut places: HashMap<usize, usize> = HashMap::new();
    let mut lines: Vec<String> = vec![];
    for step in &of.steps {
        let it = match step {
            Move::Get(it) | Move::Give(it) => *it,
        };
        let Memory { how, bytes } = of.memory[it];
        let name = how.name();
        lines.push(match step {
            Move::Get(_) if is_given[it] => {
                let place = places.len();
                places.insert(it, place);
                format!("must({name}(m[{place}], {}));", size(bytes))
            }
            Move::Get(_) => format!("must({name}(kept, {}));", size(bytes)),
            Move::Give(_) => format!("give_{name}(m[{}]);", places[&it]),
        });
    }
    let mut at = 0;
    while at < lines.len() {
        let alike = lines[at..].iter().take_while(|it| **it == lines[at]).count();
        let repeat = if alike > 1 { format!("for (int i = 0; i < {alike}; ++i) ") } else { String::new() };
        line(&mut text, &format!("    {repeat}{}", lines[at]));
        at += alike;
    }
    let (name, bytes) = (of.refused.how.name(), size(of.refused.bytes));
    let _ = writeln!(text, "    bool is_refused = !{name}(kept, {bytes});");
    text
}

fn give(how: How) -> String {
    let (name, call) = match how {
        How::Linear => ("linear", "cudaFree(from.at)"),
        How::Managed => ("managed", "cudaFree(from.at)"),
        How::Ordered => ("ordered", "cudaFreeAsync(from.at, 0), cudaStreamSynchronize(0)"),
        How::Physical => ("physical", "cuMemRelease(from.handle)"),
    };
    format!("\nstatic void give_{name}(Memory& from) {{\n    {call};\n}}\n")
}

const START: &str = "#include <cuda_runtime_api.h>
#include <cstdio>
#include <cstdlib>

static const size_t KIB = 1 << 10, MIB = 1 << 20, GIB = 1 << 30;

struct Memory {
    void* at;
    unsigned long long handle;
};

static Memory kept;  // memory that is never freed

static void cannot(const char* why) {
    std::printf(\"cannot be tried here: %s\\n\", why);
    std::exit(2);
}

static void must(bool is_served) {
    if (!is_served) {
        std::printf(\"not reproduced: a request was refused that was served\\n\");
        std::exit(1);
    }
}

// Whether the request was served. Every other error than the lack of memory ends the program.
static bool served(int error, int lack) {
    if (error != 0 && error != lack) {
        std::printf(\"cannot be tried here: error %d\\n\", error);
        std::exit(2);
    }
    cudaGetLastError();
    return error == 0;
}
";

const LINEAR: &str = "
static bool linear(Memory& to, size_t bytes) {
    return served(cudaMalloc(&to.at, bytes), cudaErrorMemoryAllocation);
}
";

const ORDERED: &str = "
static bool ordered(Memory& to, size_t bytes) {
    return served(cudaMallocAsync(&to.at, bytes, 0), cudaErrorMemoryAllocation) && served(cudaStreamSynchronize(0), 0);
}
";

const MANAGED: &str = "
static bool managed(Memory& to, size_t bytes) {
    return served(cudaMallocManaged(&to.at, bytes, cudaMemAttachGlobal), cudaErrorMemoryAllocation);
}
";

const PHYSICAL: &str = "
static bool physical(Memory& to, size_t bytes) {
    CUmemAllocationProp what = {};
    what.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    what.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    size_t page = 1;
    cuMemGetAllocationGranularity(&page, &what, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    bytes = (bytes + page - 1) / page * page;
    return served(cuMemCreate(&to.handle, bytes, &what, 0), CUDA_ERROR_OUT_OF_MEMORY);
}
";

const BALLAST: &str = "    if (cudaSetDevice(0) != cudaSuccess || cudaFree(0) != cudaSuccess) cannot(\"there is no CUDA device\");
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    // A little less than ROOM will do: the recorded process had a context of another size.
    if (free < SERVED) {
        std::printf(\"cannot be tried here: %zu bytes are needed on the device, and %zu are free\\n\", SERVED, free);
        return 2;
    }
    // The rest of the card is taken first: it stands for a smaller card, and for what others held.
    for (size_t piece = total; piece >= 2 * MIB; cudaMemGetInfo(&free, &total)) {
        void* ballast;
        size_t rest = free > ROOM ? (free - ROOM) / (2 * MIB) * (2 * MIB) : 0;
        if (piece > rest) piece = rest;
        if (piece > 0 && cudaMalloc(&ballast, piece) != cudaSuccess) piece = piece / 2 / (2 * MIB) * (2 * MIB);
    }
    cudaGetLastError();
";

const END: &str = "    cudaMemGetInfo(&free, &total);
    std::printf(\"%sreproduced: %zu bytes are free, and the last request is %s\\n\", is_refused ? \"\" : \"not \", free,
                is_refused ? \"refused\" : \"served\");
    return is_refused ? 0 : 1;
}
";

/// The section about a program with this number of lines.
#[must_use]
pub fn section(of: &Reproduction, n_lines: usize) -> Section {
    let title = format!("A program with the requests to the driver on cuda:{}", of.device);
    let mut section = Section::new("reproduction", title)
        .fact("n_lines", "lines", Value::Count(n_lines as u64))
        .remark(
            "n_requests",
            "requests",
            Value::Count(of.n_requests() as u64),
            format!("of {}", words::count(of.n_before as u64)),
        )
        .fact("limit_bytes", "needs on a device", Value::Bytes(Bytes(of.room)))
        .line(
            Mood::Note,
            format!(
                "fails as request {} did: {} are refused",
                words::count(of.request),
                iec(of.refused.bytes)
            ),
        )
        .line(Mood::Note, format!("why: {}", why(of)));
    for note in &of.notes {
        section = section.line(Mood::Note, note.clone());
    }
    section
}

fn why(of: &Reproduction) -> String {
    format!("{} are left", iec(of.left()))
}

/// The same for programs.
#[must_use]
pub fn json(of: &Reproduction, n_lines: usize) -> Json {
    json!({
        "device": of.device,
        "kind": "refusal",
        "why": why(of),
        "limit_bytes": of.room,
        "n_lines": n_lines,
        "n_requests": of.n_requests(),
        "n_requests_before": of.n_before,
        "refused_bytes": of.refused.bytes,
        "refused_request": of.request,
        "notes": of.notes,
    })
}
