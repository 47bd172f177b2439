//! The figures of a trace in a fixed shape: `gputrace summary --json`.

use std::borrow::Cow;

use gputrace_schemas::event::{Bytes, HOST};
use serde::{Deserialize, Serialize};

use crate::processes::{self, Node, Traced};
use gputrace_analyse::story::Story;
use gputrace_analyse::unaccounted::trend;
use gputrace_trace::ledger::{Cause, DeviceBooks, GpuTimed, Ledger, Sampled, TorchBooks};

/// The figures of each process: `gputrace.summary/1`.
#[derive(Serialize, Debug)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Summary {
    /// Which shape this is.
    pub schema: &'static str,
    /// One entry per trace, in the order given.
    pub processes: Vec<ProcessSummary>,
    /// Who started whom: these processes and those that they descend from.
    pub tree: Vec<Node>,
}

/// A process.
#[derive(Deserialize, Serialize, Debug)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct ProcessSummary {
    /// The file.
    pub trace: String,
    /// Process id.
    pub pid: u32,
    /// Rank in the job, if it has one.
    pub rank: Option<u32>,
    /// The command line, argument by argument.
    pub command: Vec<String>,
    /// `CLOCK_MONOTONIC` when the trace began: times count from here.
    pub start_ns: u64,
    /// Events in the trace.
    pub events: u64,
    /// Events that were dropped before they came into the trace.
    pub lost_events: u64,
    /// The trace has its end.
    pub complete: bool,
    /// Parts that could not be read, one line each.
    pub damage: Vec<String>,
    /// Launches of NCCL whose time on the GPU was to be measured; left out where that was not requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nccl_timing: Option<GpuTimed>,
    /// Pinned and registered host memory.
    pub host: HostSummary,
    /// The devices that the process used.
    pub devices: Vec<DeviceSummary>,
}

/// Host memory that the driver knows.
#[derive(Deserialize, Serialize, Debug)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct HostSummary {
    /// Most bytes.
    pub peak_bytes: u64,
    /// Bytes at the end.
    pub live_bytes: u64,
    /// Most bytes of it in blocks that PyTorch allocated, where a snapshot of PyTorch says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks_peak_bytes: Option<u64>,
    /// The same at the end: the rest PyTorch keeps for the next request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks_live_bytes: Option<u64>,
}

/// A device of a process.
#[derive(Deserialize, Serialize, Debug)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct DeviceSummary {
    /// Ordinal in the process; -1 where it is not known.
    pub device: i16,
    /// Marketing name.
    pub name: Option<String>,
    /// `GPU-...`.
    pub uuid: Option<String>,
    /// Memory of the device.
    pub total_bytes: Option<u64>,
    /// Memory that the driver allocated.
    pub driver: DriverSummary,
    /// What PyTorch's allocator did with it.
    pub torch: Option<TorchSummary>,
    /// Whose it was, most at the peak first. `bytes_at_peak` adds up to `driver.peak_bytes`.
    pub owners: Vec<OwnerSummary>,
    /// Managed memory: may be on the device or on the host, and is not in `driver`.
    pub managed_peak_bytes: u64,
    /// Estimate: what the driver charged to the process in the first sample beyond what it had allocated.
    pub cuda_context_bytes: Option<u64>,
    /// Memory that nothing explained when the driver charged most.
    pub unaccounted_bytes: Option<i64>,
    /// How that changed.
    pub unaccounted: Option<UnaccountedSummary>,
    /// Estimate: code of kernels by who loaded it.
    pub code: Vec<CodeSummary>,
    /// Samples of the driver's own figures. In each, the parts add up to `process_used_bytes`.
    pub samples: Vec<SampleSummary>,
}

/// Unaccounted bytes over time.
#[derive(Deserialize, Serialize, Debug)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct UnaccountedSummary {
    /// After the first step, where steps are known.
    pub first_step_bytes: Option<i64>,
    /// When most was charged.
    pub peak_bytes: i64,
    /// At the end.
    pub end_bytes: i64,
    /// After the warm-up.
    pub bytes_per_hour: i64,
    /// It keeps growing.
    pub growing: bool,
    /// Less was charged than was allocated at some time.
    pub negative: bool,
}

/// Code of an owner.
#[derive(Deserialize, Serialize, Debug)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct CodeSummary {
    /// The owner that loaded it.
    pub owner: String,
    /// By how much the charge grew then.
    pub bytes: u64,
}

/// One sample, and what explains it.
#[derive(Deserialize, Serialize, Debug)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct SampleSummary {
    /// Since the start of the trace.
    pub time_ns: u64,
    /// Charged to the process.
    pub process_used_bytes: Option<u64>,
    /// Used by everybody.
    pub device_used_bytes: u64,
    /// Memory that the driver had allocated.
    pub tracked_bytes: u64,
    /// Memory that its pages held beyond that.
    pub rounding_bytes: u64,
    /// Estimate: contexts.
    pub context_bytes: u64,
    /// Estimate: code of kernels.
    pub code_bytes: u64,
    /// Estimate: executable graphs.
    pub graph_bytes: u64,
    /// Estimate: what stream-ordered pools kept.
    pub pool_bytes: u64,
    /// Estimate: page tables of peers' memory.
    pub peer_bytes: u64,
    /// The rest.
    pub unaccounted_bytes: Option<i64>,
}

/// Memory that the driver allocated on a device.
#[derive(Deserialize, Serialize, Debug)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct DriverSummary {
    /// Objects allocated.
    pub allocs: u64,
    /// Objects freed by the program.
    pub frees: u64,
    /// Most physical bytes.
    pub peak_bytes: u64,
    /// Physical bytes at the end.
    pub live_bytes: u64,
    /// Calls that the driver refused.
    pub failed: u64,
}

/// PyTorch's figures; as `torch.cuda.memory_stats()` names them in parentheses.
#[derive(Deserialize, Serialize, Debug)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct TorchSummary {
    /// `native`, `cudaMallocAsync` or `uncached`.
    pub backend: Cow<'static, str>,
    /// `allocation.all.allocated`.
    pub allocations: u64,
    /// `allocation.all.freed`.
    pub frees: u64,
    /// `allocated_bytes.all.peak`.
    pub peak_allocated_bytes: Option<u64>,
    /// `reserved_bytes.all.peak`.
    pub peak_reserved_bytes: Option<u64>,
    /// `requested_bytes.all.peak`.
    pub peak_requested_bytes: Option<u64>,
    /// `num_device_alloc`.
    pub device_allocs: u64,
    /// `num_device_free`.
    pub device_frees: u64,
    /// `num_ooms`.
    pub ooms: u64,
    /// Why a figure is missing or not exact.
    pub notes: Vec<String>,
}

/// An owner of memory.
#[derive(Deserialize, Serialize, Debug)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct OwnerSummary {
    /// Name.
    pub owner: String,
    /// Most bytes it ever held.
    pub peak_bytes: u64,
    /// Memory that it held when the device held most.
    pub bytes_at_peak: u64,
    /// Memory that it held at the end.
    pub live_bytes: u64,
}

impl Summary {
    /// Of these traces.
    #[must_use]
    pub fn of(stories: &[Story]) -> Summary {
        Summary::new(
            stories.iter().map(ProcessSummary::of).collect(),
            &stories.iter().map(Traced::of).collect::<Vec<_>>(),
        )
    }

    /// Of processes, each of which is described by one of `traced`.
    #[must_use]
    pub fn new(processes: Vec<ProcessSummary>, traced: &[Traced<'_>]) -> Summary {
        Summary { schema: "gputrace.summary/1", processes, tree: processes::tree(traced) }
    }
}

impl ProcessSummary {
    /// Of this trace.
    #[must_use]
    pub fn of(story: &Story) -> ProcessSummary {
        let ledger = &story.ledger;
        ProcessSummary {
            trace: story.path.clone(),
            pid: story.process.pid,
            rank: story.process.rank,
            command: story.process.command.clone(),
            start_ns: story.process.start.0,
            events: ledger.run.n_events,
            lost_events: ledger.health.n_lost(),
            complete: story.complete,
            damage: story.damages.iter().map(ToString::to_string).collect(),
            nccl_timing: Some(*ledger.gpu_timed()).filter(|timed| *timed != GpuTimed::default()),
            host: host(ledger),
            devices: known_devices(story).map(|(ordinal, books)| device(story, ordinal, books)).collect(),
        }
    }
}

fn host(ledger: &Ledger) -> HostSummary {
    let blocks = Some(ledger.host_blocks()).filter(|blocks| blocks.peak().0 > 0);
    HostSummary {
        peak_bytes: ledger.host().peak().0,
        live_bytes: ledger.host().live().bytes.0,
        blocks_peak_bytes: blocks.map(|blocks| blocks.peak().0),
        blocks_live_bytes: blocks.map(|blocks| blocks.live().bytes.0),
    }
}

/// Also the devices that the process held nothing on but a context.
fn known_devices(story: &Story) -> impl Iterator<Item = (i16, &DeviceBooks)> {
    devices(story, |books| is_used(books) || books.samples.first.is_some())
}

/// The devices that the process used, in order, and last what no device is known for; host memory is not a device.
pub fn used_devices(story: &Story) -> impl Iterator<Item = (i16, &DeviceBooks)> {
    devices(story, is_used)
}

fn is_used(books: &DeviceBooks) -> bool {
    books.allocs > 0 || books.failed > 0 || books.torch.is_some() || books.managed.peak().0 > 0
}

fn devices(
    story: &Story,
    wanted: impl Fn(&DeviceBooks) -> bool,
) -> impl Iterator<Item = (i16, &DeviceBooks)> {
    let devices = story.ledger.devices().iter().filter(|(ordinal, books)| **ordinal != HOST && wanted(books));
    let mut devices: Vec<_> = devices.map(|(ordinal, books)| (*ordinal, books)).collect();
    devices.sort_by_key(|(ordinal, _)| (*ordinal < 0, *ordinal));
    devices.into_iter()
}

fn device(story: &Story, ordinal: i16, books: &DeviceBooks) -> DeviceSummary {
    let known = story.device(ordinal);
    DeviceSummary {
        device: ordinal,
        name: known.map(|device| device.name.clone()),
        uuid: known.map(|device| device.uuid.clone()),
        total_bytes: known.map(|device| device.total.0),
        driver: DriverSummary {
            allocs: books.allocs,
            frees: books.frees,
            peak_bytes: books.physical.peak().0,
            live_bytes: books.physical.live().bytes.0,
            failed: books.failed,
        },
        torch: books.torch.as_ref().map(|torch| torch_summary(story, torch)),
        owners: owners(story, books),
        managed_peak_bytes: books.managed.peak().0,
        cuda_context_bytes: books.samples.context().map(|bytes| bytes.0),
        unaccounted_bytes: books.samples.unaccounted(),
        unaccounted: trend(story, &books.samples).map(|trend| UnaccountedSummary {
            first_step_bytes: trend.first_step,
            peak_bytes: trend.peak,
            end_bytes: trend.end,
            bytes_per_hour: trend.bytes_per_hour,
            growing: trend.is_growing,
            negative: trend.is_negative,
        }),
        code: code(story, books),
        samples: books.samples.kept.iter().map(|sampled| sample(story, sampled)).collect(),
    }
}

fn code(story: &Story, books: &DeviceBooks) -> Vec<CodeSummary> {
    let owner = |(owner, bytes): (_, Bytes)| CodeSummary {
        owner: story.ledger.sites.owner(owner).to_owned(),
        bytes: bytes.0,
    };
    books.samples.code_by_owner().into_iter().map(owner).collect()
}

fn sample(story: &Story, sampled: &Sampled) -> SampleSummary {
    SampleSummary {
        time_ns: story.since_start(sampled.time).0,
        process_used_bytes: sampled.process_used.map(|bytes| bytes.0),
        device_used_bytes: sampled.device_used.0,
        tracked_bytes: sampled.tracked.0,
        rounding_bytes: sampled.rounding.0,
        context_bytes: sampled.of(Cause::Context).0,
        code_bytes: sampled.of(Cause::Code).0,
        graph_bytes: sampled.of(Cause::Graph).0,
        pool_bytes: sampled.of(Cause::Pool).0,
        peer_bytes: sampled.of(Cause::Peer).0,
        unaccounted_bytes: sampled.unaccounted(),
    }
}

/// Owners of physical memory, most at the peak first.
#[must_use]
pub fn owners(story: &Story, books: &DeviceBooks) -> Vec<OwnerSummary> {
    let owner = |part: gputrace_trace::ledger::Part<_>| OwnerSummary {
        owner: story.ledger.sites.owner(part.id).to_owned(),
        peak_bytes: part.peak.0,
        bytes_at_peak: part.at_peak.bytes.0,
        live_bytes: part.live.bytes.0,
    };
    let mut owners: Vec<_> = books.physical.owners().map(owner).collect();
    owners.sort_by(|a, b| {
        (b.bytes_at_peak, b.peak_bytes, &a.owner).cmp(&(a.bytes_at_peak, a.peak_bytes, &b.owner))
    });
    owners
}

/// PyTorch's figures, as far as its backend has them.
#[must_use]
pub fn torch_summary(story: &Story, torch: &TorchBooks) -> TorchSummary {
    let bytes = |bytes: Bytes| Some(bytes.0);
    let mut summary = TorchSummary {
        backend: "native".into(),
        allocations: torch.allocations,
        frees: torch.frees,
        peak_allocated_bytes: bytes(torch.allocated.peak),
        peak_reserved_bytes: bytes(torch.reserved.peak),
        peak_requested_bytes: bytes(torch.requested.peak),
        device_allocs: torch.device_allocs,
        device_frees: torch.device_frees,
        ooms: torch.n_ooms,
        notes: vec![],
    };
    if torch.is_pool_backend() {
        summary.backend = "cudaMallocAsync".into();
        summary.peak_allocated_bytes = bytes(torch.pool_used.peak);
        summary.peak_reserved_bytes = torch.pool_reserved_high.map(|high| high.0);
        summary.peak_requested_bytes = None;
        summary.notes.push("requested bytes are not counted by PyTorch's cudaMallocAsync backend".into());
        if torch.pool_reserved_high.is_none() {
            let note = "reserved bytes are unknown: the program never queried its pool";
            summary.notes.push(note.into());
        }
    } else if torch.allocations == 0 && torch.n_ooms == 0 {
        without_blocks(story, &mut summary);
    }
    if torch.n_unknown_requests > 0 {
        summary.notes.push(format!(
            "requested counts {} blocks at their full size: their requests were not seen",
            torch.n_unknown_requests
        ));
    }
    if torch.n_frees_in_capture > 0 {
        summary.notes.push(format!(
            "requested may be too small: {} blocks were freed during the capture of a CUDA graph, and those in use on other streams count as requested until it ends",
            torch.n_frees_in_capture
        ));
    }
    summary
}

/// PyTorch took memory from the driver and handed out no block that was seen.
fn without_blocks(story: &Story, summary: &mut TorchSummary) {
    if is_uncached(story) {
        // As `torch.cuda.memory_stats()` says then.
        summary.backend = "uncached".into();
        (summary.device_allocs, summary.device_frees) = (0, 0);
        let note = "PYTORCH_NO_CUDA_MEMORY_CACHING is set: every tensor is a driver allocation, and PyTorch counts nothing";
        summary.notes.push(note.into());
    } else if summary.device_allocs > 0 {
        (summary.peak_allocated_bytes, summary.peak_reserved_bytes) = (None, None);
        summary.peak_requested_bytes = None;
        summary.notes.push("PyTorch's blocks were not seen, only its segments: see `gputrace doctor`".into());
    }
}

fn is_uncached(story: &Story) -> bool {
    story.process.environment.iter().any(|(name, _)| name == "PYTORCH_NO_CUDA_MEMORY_CACHING")
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::Summary;
    use gputrace_analyse::story::Story;
    use gputrace_trace::scene::recording;

    fn check(scene: &str, environment: &[&str], expected: Expect) {
        let mut recording = recording(scene);
        let set = environment.iter().map(|name| ((*name).to_owned(), "1".to_owned()));
        recording.process.environment.extend(set);
        let summary = Summary::of(&[Story::of("train.gtr", &recording)]);
        expected.assert_eq(&serde_json::to_string_pretty(&summary).unwrap());
    }

    #[test]
    fn a_process_with_pytorch() {
        check(
            "Create handle=n bytes=100 by=libnccl.so.2
             Alloc addr=a bytes=2M by=libc10_cuda.so
             block addr=a bytes=512 requested=400 allocated=512 reserved=2M
             free addr=a bytes=512 allocated=0 reserved=2M
             lost events=7
             oom bytes=1G allocated=0 reserved=2M
             AllocHost addr=h bytes=64
             Free addr=a",
            &[],
            expect![[r#"
                {
                  "schema": "gputrace.summary/1",
                  "processes": [
                    {
                      "trace": "train.gtr",
                      "pid": 42,
                      "rank": 3,
                      "command": [
                        "./train",
                        "--big"
                      ],
                      "start_ns": 0,
                      "events": 8,
                      "lost_events": 7,
                      "complete": true,
                      "damage": [],
                      "host": {
                        "peak_bytes": 64,
                        "live_bytes": 64
                      },
                      "devices": [
                        {
                          "device": 0,
                          "name": "NVIDIA H200",
                          "uuid": "GPU-0",
                          "total_bytes": 150323855360,
                          "driver": {
                            "allocs": 2,
                            "frees": 1,
                            "peak_bytes": 2097252,
                            "live_bytes": 100,
                            "failed": 0
                          },
                          "torch": {
                            "backend": "native",
                            "allocations": 1,
                            "frees": 1,
                            "peak_allocated_bytes": 512,
                            "peak_reserved_bytes": 2097152,
                            "peak_requested_bytes": 400,
                            "device_allocs": 1,
                            "device_frees": 1,
                            "ooms": 1,
                            "notes": []
                          },
                          "owners": [
                            {
                              "owner": "PyTorch",
                              "peak_bytes": 2097152,
                              "bytes_at_peak": 2097152,
                              "live_bytes": 0
                            },
                            {
                              "owner": "NCCL",
                              "peak_bytes": 100,
                              "bytes_at_peak": 100,
                              "live_bytes": 100
                            }
                          ],
                          "managed_peak_bytes": 0,
                          "cuda_context_bytes": null,
                          "unaccounted_bytes": null,
                          "unaccounted": null,
                          "code": [],
                          "samples": []
                        }
                      ]
                    }
                  ],
                  "tree": [
                    {
                      "host": "",
                      "pid": 42,
                      "rank": 3,
                      "command": [
                        "./train",
                        "--big"
                      ],
                      "traces": [
                        "train.gtr"
                      ],
                      "threads": {
                        "main": 1
                      },
                      "children": []
                    }
                  ]
                }"#]],
        );
    }

    #[test]
    fn the_pool_backend_knows_what_the_program_asked_the_driver() {
        check(
            "AllocAsync addr=a bytes=100 by=libc10_cuda.so
             AllocAsync addr=b bytes=50 by=libc10_cuda.so
             FreeAsync addr=a
             PoolGet extra=6 bytes=32M dev=0
             PoolGet extra=8 bytes=150 dev=0",
            &[],
            expect![[r#"
                {
                  "schema": "gputrace.summary/1",
                  "processes": [
                    {
                      "trace": "train.gtr",
                      "pid": 42,
                      "rank": 3,
                      "command": [
                        "./train",
                        "--big"
                      ],
                      "start_ns": 0,
                      "events": 5,
                      "lost_events": 0,
                      "complete": true,
                      "damage": [],
                      "host": {
                        "peak_bytes": 0,
                        "live_bytes": 0
                      },
                      "devices": [
                        {
                          "device": 0,
                          "name": "NVIDIA H200",
                          "uuid": "GPU-0",
                          "total_bytes": 150323855360,
                          "driver": {
                            "allocs": 2,
                            "frees": 1,
                            "peak_bytes": 150,
                            "live_bytes": 50,
                            "failed": 0
                          },
                          "torch": {
                            "backend": "cudaMallocAsync",
                            "allocations": 0,
                            "frees": 0,
                            "peak_allocated_bytes": 150,
                            "peak_reserved_bytes": 33554432,
                            "peak_requested_bytes": null,
                            "device_allocs": 0,
                            "device_frees": 0,
                            "ooms": 0,
                            "notes": [
                              "requested bytes are not counted by PyTorch's cudaMallocAsync backend"
                            ]
                          },
                          "owners": [
                            {
                              "owner": "PyTorch",
                              "peak_bytes": 150,
                              "bytes_at_peak": 150,
                              "live_bytes": 50
                            }
                          ],
                          "managed_peak_bytes": 0,
                          "cuda_context_bytes": null,
                          "unaccounted_bytes": null,
                          "unaccounted": null,
                          "code": [],
                          "samples": []
                        }
                      ]
                    }
                  ],
                  "tree": [
                    {
                      "host": "",
                      "pid": 42,
                      "rank": 3,
                      "command": [
                        "./train",
                        "--big"
                      ],
                      "traces": [
                        "train.gtr"
                      ],
                      "threads": {
                        "main": 1
                      },
                      "children": []
                    }
                  ]
                }"#]],
        );
    }

    #[test]
    fn without_its_cache_pytorch_counts_nothing() {
        check(
            "Alloc addr=a bytes=100 by=libc10_cuda.so
             Free addr=a",
            &["PYTORCH_NO_CUDA_MEMORY_CACHING"],
            expect![[r#"
                {
                  "schema": "gputrace.summary/1",
                  "processes": [
                    {
                      "trace": "train.gtr",
                      "pid": 42,
                      "rank": 3,
                      "command": [
                        "./train",
                        "--big"
                      ],
                      "start_ns": 0,
                      "events": 2,
                      "lost_events": 0,
                      "complete": true,
                      "damage": [],
                      "host": {
                        "peak_bytes": 0,
                        "live_bytes": 0
                      },
                      "devices": [
                        {
                          "device": 0,
                          "name": "NVIDIA H200",
                          "uuid": "GPU-0",
                          "total_bytes": 150323855360,
                          "driver": {
                            "allocs": 1,
                            "frees": 1,
                            "peak_bytes": 100,
                            "live_bytes": 0,
                            "failed": 0
                          },
                          "torch": {
                            "backend": "uncached",
                            "allocations": 0,
                            "frees": 0,
                            "peak_allocated_bytes": 0,
                            "peak_reserved_bytes": 0,
                            "peak_requested_bytes": 0,
                            "device_allocs": 0,
                            "device_frees": 0,
                            "ooms": 0,
                            "notes": [
                              "PYTORCH_NO_CUDA_MEMORY_CACHING is set: every tensor is a driver allocation, and PyTorch counts nothing"
                            ]
                          },
                          "owners": [
                            {
                              "owner": "PyTorch",
                              "peak_bytes": 100,
                              "bytes_at_peak": 100,
                              "live_bytes": 0
                            }
                          ],
                          "managed_peak_bytes": 0,
                          "cuda_context_bytes": null,
                          "unaccounted_bytes": null,
                          "unaccounted": null,
                          "code": [],
                          "samples": []
                        }
                      ]
                    }
                  ],
                  "tree": [
                    {
                      "host": "",
                      "pid": 42,
                      "rank": 3,
                      "command": [
                        "./train",
                        "--big"
                      ],
                      "traces": [
                        "train.gtr"
                      ],
                      "threads": {
                        "main": 1
                      },
                      "children": []
                    }
                  ]
                }"#]],
        );
    }
}
