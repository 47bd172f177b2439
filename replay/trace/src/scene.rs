//! Traces as text, for tests: one event a line, `VERB [name=value ...]`; the line's number is its time in microseconds.
//!
//! ```text
//! Alloc addr=a bytes=20M by=libc10_cuda.so     a driver call, by the name of its `Action`
//! block addr=a bytes=512 requested=400 allocated=512 reserved=20M
//! free addr=a bytes=512 allocated=0 reserved=20M
//! record event=1 | query event=1 result=600 | sync event=1
//! push text=step_1 | pop | start text=epoch range=1 | end range=1     NVTX, with domain=d where it has one
//! compiled handle=f bytes=1M text=jit_step | launched handle=f     PJRT: an executable with its temporaries, an execution
//! buffer addr=b bytes=4K by=f@/job/a.py:2 | donated addr=b | destroyed addr=b | jax_oom bytes=1G handle=f text=what_it_said
//! wait ms=100                                  no event: all that follows is later by this
//! ```
//! Values are numbers (decimal, `0x`, with K, M or G behind) or words, which are turned into numbers of their own.

use std::collections::HashMap;

use gputrace_schemas::event::*;

use crate::Recording;
use crate::import::{self, Trace};
use crate::ledger::Ledger;

/// Reads a scene.
pub fn recording(text: &str) -> Recording {
    let mut scene = Scene::default();
    scene.recording.process = Process {
        pid: 42,
        executable: "/job/train".into(),
        command: vec!["./train".into(), "--big".into()],
        rank: Some(3),
        ..Process::default()
    };
    scene.recording.devices = (0..2)
        .map(|ordinal| Device {
            ordinal,
            name: "NVIDIA H200".into(),
            uuid: format!("GPU-{ordinal}"),
            total: Bytes(140 << 30),
        })
        .collect();
    for (line, time) in text.lines().map(str::trim).filter(|line| !line.is_empty()).zip(1..) {
        scene.line(line, Nanos(time * 1000));
    }
    scene.recording
}

/// The books of a scene.
pub fn ledger(text: &str) -> Ledger {
    let recording = recording(text);
    Ledger::of(|ledger| {
        for event in &recording.events {
            ledger.event(&recording, event);
        }
        Ok::<(), std::convert::Infallible>(())
    })
    .unwrap_or_else(|never| match never {})
}

/// The requests to the devices of a scene.
#[must_use]
pub fn requests(text: &str) -> Trace {
    import::of_recording(&recording(text)).expect("a scene has few streams")
}

#[derive(Default)]
struct Scene {
    recording: Recording,
    words: HashMap<String, u64>,
    stacks: HashMap<String, StackId>,
    texts: HashMap<String, TextId>,
    /// Nanoseconds waited.
    late: u64,
}

impl Scene {
    fn text(&mut self, text: &str) -> TextId {
        let next = TextId(self.texts.len() as u32 + 1);
        let id = *self.texts.entry(text.to_owned()).or_insert(next);
        self.recording.texts.insert(id, text.replace('_', " "));
        id
    }

    fn line(&mut self, line: &str, time: Nanos) {
        let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
        let fields: HashMap<&str, &str> =
            rest.split_whitespace().filter_map(|field| field.split_once('=')).collect();
        if verb == "wait" {
            self.late += 1_000_000 * fields["ms"].parse::<u64>().unwrap();
            return;
        }
        let time = Nanos(time.0 + self.late);
        let has = |name: &str| fields.contains_key(name);
        let [text, domain] =
            ["text", "domain"].map(|name| fields.get(name).map_or(TextId(0), |text| self.text(text)));
        let mut number = |name: &str| fields.get(name).map_or(0, |text| self.number(text));
        let bytes = Bytes(number("bytes"));
        let device = fields.get("dev").map_or(0, |dev| dev.parse().unwrap());
        let addr = number("addr");
        let (allocated, reserved) = (Bytes(number("allocated")), Bytes(number("reserved")));
        let requested = has("requested").then(|| Bytes(number("requested")));
        let (event, stream, result) = (number("event"), number("stream"), number("result") as i32);
        let range = number("range");
        let mark = |action| EventKind::Mark(Mark { action, text, domain, range, category: 0 });
        let wait = |action| EventKind::Wait(Wait { event, stream, action, result });
        let handle = if PJRT.contains(&verb) { number("handle") } else { 0 };
        let kind = match verb {
            verb if PJRT.contains(&verb) => pjrt(verb, device, addr, handle, bytes, text),
            "block" => {
                let stream = Some(stream);
                EventKind::BlockAlloc(BlockAlloc {
                    device,
                    addr,
                    bytes,
                    requested,
                    stream,
                    allocated,
                    reserved,
                })
            }
            "free" => EventKind::BlockFree(BlockFree {
                device,
                addr,
                bytes,
                allocated,
                reserved,
                collecting: has("collecting"),
            }),
            "oom" => {
                let stream = Some(stream);
                EventKind::BlockOom(BlockOom { device, bytes, requested, stream, allocated, reserved })
            }
            "record" => wait(WaitAction::Record),
            "query" => wait(WaitAction::Query),
            "sync" => wait(WaitAction::Synchronize),
            "sample" => EventKind::Sample(Sample {
                device,
                process_used: has("used").then(|| Bytes(number("used"))),
                device_used: Bytes(number("used")),
                total: Bytes(140 << 30),
            }),
            "push" => mark(MarkAction::Push),
            "pop" => mark(MarkAction::Pop),
            "start" => mark(MarkAction::Start),
            "end" => mark(MarkAction::End),
            "lost" => EventKind::Lost(Lost { cause: LostCause::RingFull, events: number("events") }),
            "note" => EventKind::Note(rest.to_owned()),
            action => {
                let action = *Action::ALL.iter().find(|a| format!("{a:?}") == action).expect("an action");
                let (handle, extra, duration) =
                    (number("handle"), number("extra"), Nanos(number("duration")));
                let (driver, runtime) = names(action);
                let api = ApiId(action as u32);
                let named = Api { name: driver.into(), runtime_name: runtime.into() };
                self.recording.apis.insert(api, named);
                EventKind::Call(Call {
                    api,
                    action,
                    device,
                    result: (fields.get("result") != Some(&"none")).then_some(result),
                    addr,
                    bytes,
                    stream,
                    handle,
                    extra,
                    duration,
                    captured: has("captured"),
                    in_allocate: has("in_allocate"),
                    comm: CommId(0),
                    nccl_call: 0,
                    nccl_thread: false,
                })
            }
        };
        let thread = ThreadId(fields.get("thread").map_or(0, |thread| thread.parse().unwrap()));
        let name = fields.get("thread_name").copied().unwrap_or("main").replace('_', " ");
        self.recording.threads.entry(thread).or_insert(Thread { tid: 100 + thread.0, name });
        let stack = fields.get("by").map_or(StackId(0), |by| self.stack(by));
        self.recording.events.push(Event { time, thread, stack, kind });
    }

    fn number(&mut self, text: &str) -> u64 {
        if let Some(hex) = text.strip_prefix("0x") {
            return u64::from_str_radix(hex, 16).unwrap();
        }
        let (digits, unit) = match text.char_indices().last() {
            Some((at, 'K')) => (&text[..at], 10),
            Some((at, 'M')) => (&text[..at], 20),
            Some((at, 'G')) => (&text[..at], 30),
            _ => (text, 0),
        };
        digits.parse::<u64>().map(|n| n << unit).unwrap_or_else(|_| {
            let n = self.words.len() as u64 + 1;
            *self.words.entry(text.to_owned()).or_insert(n << 40)
        })
    }

    /// `by=FRAME,FRAME,...`, innermost first: a file with `!` behind it for one with a CUDA runtime, `FUNCTION@FILE`
    /// for a known function of it, or `FUNCTION@FILE.py:LINE` for Python. Behind `^`, what it was of the backward pass:
    /// `NODE^FORWARD_STACK^STACK_OF_THE_CALLER`.
    fn stack(&mut self, by: &str) -> StackId {
        if let Some(id) = self.stacks.get(by) {
            return *id;
        }
        let mut frames = vec![];
        let (by_own, backward) = match by.split_once('^') {
            Some((own, forward)) => (own, Some(forward)),
            None => (by, None),
        };
        for word in by_own.split(',').filter(|word| !word.is_empty()) {
            let idx = self.recording.frames.len() as u32 + 1;
            let (function, file) = word.split_once('@').unwrap_or(("", word));
            let frame = match file.rsplit_once(':') {
                Some((file, line)) => Frame::Python {
                    function: function.into(),
                    file: file.into(),
                    line: line.parse().unwrap(),
                },
                None => {
                    let path = file.trim_end_matches('!').to_owned();
                    let module = Module { path, has_runtime: file.ends_with('!'), ..Module::default() };
                    self.recording.modules.insert(ModuleId(idx), module);
                    Frame::Native {
                        address: 0x10,
                        module: Some(ModuleId(idx)),
                        function: function.into(),
                        file: String::new(),
                        line: 0,
                        inlined: false,
                    }
                }
            };
            self.recording.frames.insert(FrameId(idx), frame);
            frames.push(FrameId(idx));
        }
        let backward = backward.map(|told| self.backward(told));
        let id = StackId(self.stacks.len() as u32 + 1);
        self.recording.stacks.insert(id, Stack { frames, backward, ..Stack::default() });
        self.stacks.insert(by.to_owned(), id);
        id
    }
}

impl Scene {
    fn backward(&mut self, told: &str) -> Box<Backward> {
        let mut parts = told.split('^');
        let node = parts.next().unwrap_or_default().to_owned();
        let mut stack = || parts.next().filter(|by| !by.is_empty()).map_or(StackId(0), |by| self.stack(by));
        let (forward, caller) = (stack(), stack());
        Box::new(Backward { node, forward, caller, is_caller_inferred: false })
    }
}

const PJRT: [&str; 6] = ["compiled", "launched", "buffer", "donated", "destroyed", "jax_oom"];

/// An event of PJRT.
fn pjrt(verb: &str, device: i16, buffer: u64, executable: u64, bytes: Bytes, text: TextId) -> EventKind {
    let action = match verb {
        "launched" => PjrtAction::Executed,
        "buffer" => PjrtAction::Made,
        "donated" => PjrtAction::Donated,
        "destroyed" => PjrtAction::Destroyed,
        "jax_oom" => PjrtAction::Failed,
        _ => {
            let (temporary, none) = (Some(bytes), None);
            return EventKind::PjrtExecutable(PjrtExecutable {
                executable,
                name: text,
                temporary,
                arguments: none,
                outputs: none,
                aliased: none,
                code: none,
            });
        }
    };
    let (origin, code) = if action == PjrtAction::Failed && executable == 0 {
        (PjrtOrigin::Unknown, 8)
    } else if executable == 0 {
        (PjrtOrigin::FromHost, 0)
    } else {
        (PjrtOrigin::Execute, 0)
    };
    EventKind::Pjrt(Pjrt { action, origin, device, buffer, executable, bytes, code, text })
}

fn names(action: Action) -> (&'static str, &'static str) {
    match action {
        Action::Alloc => ("cuMemAlloc_v2", "cudaMalloc"),
        Action::Free => ("cuMemFree_v2", "cudaFree"),
        Action::AllocAsync => ("cuMemAllocAsync", "cudaMallocAsync"),
        Action::FreeAsync => ("cuMemFreeAsync", "cudaFreeAsync"),
        Action::AllocHost => ("cuMemHostAlloc", "cudaHostAlloc"),
        Action::Create => ("cuMemCreate", ""),
        Action::Release => ("cuMemRelease", ""),
        Action::Unmap => ("cuMemUnmap", ""),
        other => (other.name(), ""),
    }
}
