//! The figures of an instant, in a fixed shape: `gputrace top --json`, and what frames, metrics and alerts are made from.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use gputrace_recorder::{Gpu, Holder};
use gputrace_replay::analyse::fragmentation::Fragmentation;
use gputrace_replay::ledger::{DeviceBooks, Ledger, TorchBooks};
use gputrace_replay::trace::faults;
use gputrace_replay::trace::owners::{JAX, TORCH};
use gputrace_schemas::event::{Bytes, HOST, Nanos};
use serde::Serialize;

use super::find::Place;
use super::follow::Live;
use super::hangs::HangFigures;
use super::place::{self, Surroundings};

/// Most call sites and calls into NCCL that are listed.
const MOST_LINES: usize = 20;
/// Faults of its GPUs that are shown of a process.
const MOST_FAULTS: usize = 4;

/// `gputrace.top/1`.
#[derive(Clone, Serialize, Debug)]
pub(crate) struct Figures {
    pub(crate) schema: &'static str,
    pub(crate) host: String,
    /// Nanoseconds since 1970.
    pub(crate) time_ns: u64,
    /// Why the driver was not asked; `None` where it was.
    pub(crate) driver_missing: Option<String>,
    pub(crate) cards: Vec<Card>,
    pub(crate) processes: Vec<ProcessFigures>,
    /// Jobs that hang or wait for a rank; left out where none does.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) hangs: Vec<HangFigures>,
    pub(crate) notes: Vec<String>,
}

/// A GPU.
#[derive(Clone, Serialize, Debug, Default)]
pub(crate) struct Card {
    /// The order of the bus; `None` where only traces know it.
    pub(crate) index: Option<u32>,
    /// Which MIG instance of that card it is; `None` for a whole card, and where only traces know it.
    pub(crate) instance: Option<u32>,
    pub(crate) uuid: String,
    pub(crate) name: String,
    pub(crate) total_bytes: Option<u64>,
    /// The driver's figures, now; or those of the newest sample in a trace.
    pub(crate) used_bytes: Option<u64>,
    pub(crate) free_bytes: Option<u64>,
    pub(crate) reserved_bytes: Option<u64>,
    /// Processes with memory here that are not recorded; `None` where the driver does not say.
    pub(crate) unrecorded: Option<Vec<Unrecorded>>,
    /// Clients of MPS with memory here, recorded or not; `None` where the driver does not say.
    pub(crate) mps_clients: Option<Vec<u32>>,
}

/// A process that is not recorded.
#[derive(Clone, Serialize, Debug)]
pub(crate) struct Unrecorded {
    pub(crate) pid: u32,
    pub(crate) name: Option<String>,
    pub(crate) used_bytes: Option<u64>,
}

/// A process that is recorded.
#[derive(Clone, Serialize, Debug)]
pub(crate) struct ProcessFigures {
    /// Device and inode of its trace, which may get another name meanwhile.
    #[serde(skip)]
    pub(crate) key: (u64, u64),
    pub(crate) trace: String,
    pub(crate) pid: u32,
    /// Its number here, where that is another.
    pub(crate) pid_here: Option<u32>,
    pub(crate) rank: Option<u32>,
    pub(crate) host: String,
    pub(crate) command: Vec<String>,
    /// `running`, `suspended`, `ended`, `not written` (its recorder is not seen).
    pub(crate) state: &'static str,
    /// By what it is suspended, and since when.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) suspended: Option<String>,
    /// Faults of its GPUs, the newest of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) gpu_faults: Vec<String>,
    /// How long ago the newest booked event was; `None` where its clock is another.
    pub(crate) age_ns: Option<u64>,
    /// There is more in the trace than has been read.
    pub(crate) behind: bool,
    pub(crate) events: u64,
    pub(crate) lost_events: u64,
    /// What could not be read.
    pub(crate) damage: Vec<String>,
    pub(crate) surroundings: Surroundings,
    /// Requests of the driver and of PyTorch's allocator, in the last two seconds.
    pub(crate) requests_per_s: f64,
    pub(crate) requested_bytes_per_s: f64,
    /// Pinned and registered host memory.
    pub(crate) host_bytes: u64,
    pub(crate) nccl: NcclFigures,
    pub(crate) devices: Vec<DeviceFigures>,
}

/// What a process does with NCCL.
#[derive(Clone, Serialize, Debug, Default)]
pub(crate) struct NcclFigures {
    pub(crate) communicators: usize,
    pub(crate) device_bytes: u64,
    /// Calls that have not returned.
    pub(crate) in_flight: usize,
    /// The oldest of them.
    pub(crate) calls: Vec<NcclCall>,
}

#[derive(Clone, Serialize, Debug)]
pub(crate) struct NcclCall {
    pub(crate) operation: String,
    pub(crate) for_ns: Option<u64>,
    pub(crate) at: String,
}

/// A device of a process.
#[derive(Clone, Serialize, Debug)]
pub(crate) struct DeviceFigures {
    pub(crate) device: i16,
    pub(crate) uuid: Option<String>,
    pub(crate) name: Option<String>,
    pub(crate) total_bytes: Option<u64>,
    /// What the driver has handed out.
    pub(crate) driver_bytes: u64,
    pub(crate) driver_peak_bytes: u64,
    pub(crate) managed_bytes: u64,
    pub(crate) graphs_kept_bytes: u64,
    /// Objects that the driver handed out, ever; and requests that it refused.
    pub(crate) allocations: u64,
    pub(crate) refused: u64,
    /// What the driver says of the whole device.
    pub(crate) device_used_bytes: Option<u64>,
    /// What the driver charges to the process, and what nothing explains of that.
    pub(crate) process_used_bytes: Option<u64>,
    pub(crate) context_bytes: Option<u64>,
    pub(crate) unaccounted_bytes: Option<i64>,
    /// How old the driver's figure is.
    pub(crate) sample_age_ns: Option<u64>,
    pub(crate) owners: Vec<OwnerFigures>,
    pub(crate) torch: Option<TorchFigures>,
    /// Buffers of JAX and others that use PJRT.
    pub(crate) jax_buffer_bytes: Option<u64>,
    /// Who holds most, by call site.
    pub(crate) lines: Vec<LineFigures>,
}

#[derive(Clone, Serialize, Debug)]
pub(crate) struct OwnerFigures {
    pub(crate) owner: String,
    pub(crate) bytes: u64,
}

/// PyTorch's allocator.
#[derive(Clone, Serialize, Debug)]
pub(crate) struct TorchFigures {
    pub(crate) allocated_bytes: u64,
    pub(crate) reserved_bytes: u64,
    pub(crate) requested_bytes: u64,
    pub(crate) peak_allocated_bytes: u64,
    pub(crate) peak_reserved_bytes: u64,
    pub(crate) allocations: u64,
    pub(crate) ooms: u64,
    /// Reserved and not allocated, as a share of what is reserved.
    pub(crate) unused_share: f64,
    /// Free in segments that have live blocks.
    pub(crate) stranded_bytes: u64,
    pub(crate) largest_free_bytes: u64,
    pub(crate) segments: u64,
    /// Private pools that hold memory.
    pub(crate) pools: Vec<PoolFigures>,
}

#[derive(Clone, Serialize, Debug)]
pub(crate) struct PoolFigures {
    pub(crate) pool: String,
    pub(crate) reserved_bytes: u64,
    pub(crate) allocated_bytes: u64,
    pub(crate) active_bytes: u64,
    /// Nobody is left who could use it.
    pub(crate) abandoned: bool,
}

#[derive(Clone, Serialize, Debug)]
pub(crate) struct LineFigures {
    pub(crate) site: String,
    pub(crate) owner: String,
    pub(crate) bytes: u64,
}

impl Figures {
    /// Of processes, and of what NVML says of GPUs.
    pub(crate) fn new(processes: Vec<ProcessFigures>, gpus: Result<Vec<Gpu>, String>) -> Figures {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let driver_missing = gpus.as_ref().err().cloned();
        let mut figures = Figures {
            schema: "gputrace.top/1",
            host: host.trim().to_owned(),
            time_ns: u64::try_from(now.as_nanos()).unwrap_or(u64::MAX),
            driver_missing,
            cards: vec![],
            processes,
            hangs: vec![],
            notes: vec![],
        };
        figures.cards = match gpus {
            Ok(gpus) => gpus.into_iter().map(|gpu| figures.card(gpu)).collect(),
            Err(_) => vec![],
        };
        figures.cards_of_traces();
        figures
    }

    fn card(&self, gpu: Gpu) -> Card {
        let is_ours = |holder: &Holder| self.processes.iter().any(|process| process.is_numbered(holder.pid));
        let clients = gpu.holders.as_ref().and_then(|holders| {
            let client = |holder: &Holder| Some((holder.pid, holder.is_client?));
            holders.iter().map(client).collect::<Option<Vec<(u32, bool)>>>()
        });
        let unrecorded = gpu.holders.map(|holders| {
            let others = holders.into_iter().filter(|holder| !is_ours(holder));
            others.map(|it| Unrecorded { pid: it.pid, name: it.name, used_bytes: it.bytes }).collect()
        });
        Card {
            index: Some(gpu.index),
            instance: gpu.instance,
            uuid: gpu.uuid,
            name: gpu.name,
            total_bytes: Some(gpu.total),
            used_bytes: Some(gpu.used),
            free_bytes: Some(gpu.free),
            reserved_bytes: Some(gpu.reserved),
            unrecorded,
            mps_clients: clients
                .map(|clients| clients.into_iter().filter(|(_, is)| *is).map(|(pid, _)| pid).collect()),
        }
    }

    /// GPUs that only traces know: of other hosts, or where there is no NVML.
    fn cards_of_traces(&mut self) {
        let devices: Vec<&DeviceFigures> = self.processes.iter().flat_map(|it| &it.devices).collect();
        let mut others: BTreeMap<String, Card> = BTreeMap::new();
        for device in devices {
            let Some(uuid) = &device.uuid else { continue };
            if self.cards.iter().any(|card| card.is(uuid)) {
                continue;
            }
            let card = others.entry(uuid.clone()).or_default();
            card.uuid.clone_from(uuid);
            card.name = device.name.clone().unwrap_or_default();
            card.total_bytes = device.total_bytes;
        }
        self.cards.extend(others.into_values());
    }
}

impl Card {
    /// Whether it is the device of this UUID. A trace may not know whether its device is a card or a part of one: the bytes are the same.
    pub(crate) fn is(&self, uuid: &str) -> bool {
        let bytes = |uuid: &str| uuid.trim_start_matches("GPU-").trim_start_matches("MIG-").to_owned();
        bytes(&self.uuid) == bytes(uuid)
    }

    /// As NVML numbers it: `GPU 1`, or `GPU 1 MIG 0` for a part of it.
    pub(crate) fn number(&self) -> Option<String> {
        let part = self.instance.map_or_else(String::new, |instance| format!(" MIG {instance}"));
        self.index.map(|index| format!("GPU {index}{part}"))
    }
}

impl ProcessFigures {
    /// It is over.
    pub(crate) fn has_ended(&self) -> bool {
        !matches!(self.state, "running" | "suspended")
    }

    /// Whether NVML may call it so. In a container, its numbers are the host's: what the recorder found out is in `pid_here`.
    fn is_numbered(&self, pid: u32) -> bool {
        self.pid_here == Some(pid) || (self.pid_here.is_none() && self.pid == pid)
    }

    /// File name of its program, and its arguments.
    pub(crate) fn program(&self) -> String {
        let mut words = self.command.iter();
        let first = words.next().map_or("", |first| first.rsplit('/').next().unwrap_or(first));
        std::iter::once(first).chain(words.map(String::as_str)).collect::<Vec<_>>().join(" ")
    }
}

/// Of one process, by its books.
pub(super) fn of(place: &Place, live: &Live, now: Nanos) -> ProcessFigures {
    let (trace, ledger) = (live.trace(), &live.ledger);
    let process = trace.process();
    // As NVML numbers it, where the recorder found that out: `nvml.process=WAY NUMBER`.
    let by_nvml =
        ledger.health.notes.iter().rev().find_map(|(_, note)| {
            note.strip_prefix("nvml.process=")?.rsplit(' ').next()?.parse::<u32>().ok()
        });
    let state = match (live.has_ended(), place.is_written) {
        (true, _) => "ended",
        (false, true) if ledger.health.suspended().is_some() => "suspended",
        (false, true) => "running",
        (false, false) => "not written",
    };
    let (requests_per_s, requested_bytes_per_s) = if live.has_ended() {
        (0.0, 0.0)
    } else {
        // Where nothing comes any more, time passes all the same.
        live.requests.rates(live.until.max(Nanos(now.0.saturating_sub(2_000_000_000))))
    };
    let mut damage: Vec<String> = trace.damages().iter().map(ToString::to_string).collect();
    damage.extend(live.failed.clone());
    ProcessFigures {
        key: place.key,
        trace: place.shown.display().to_string(),
        pid: process.pid,
        pid_here: by_nvml.or(place.process).filter(|pid| *pid != process.pid),
        rank: process.rank,
        host: process.host.clone(),
        command: process.command.clone(),
        state,
        suspended: ledger.health.suspended().filter(|_| state == "suspended").map(|suspension| {
            let since = faults::clock(process, suspension.since);
            format!("suspended {}, since {since}", suspension.by.text())
        }),
        gpu_faults: {
            let faults = ledger.health.faults.iter().rev().take(MOST_FAULTS);
            faults.map(|(time, fault)| faults::text(process, *time, fault)).collect()
        },
        age_ns: live.age(now).map(|age| age.0).filter(|_| matches!(state, "running" | "suspended")),
        behind: live.is_behind,
        events: ledger.run.n_events,
        lost_events: ledger.health.n_lost(),
        damage,
        surroundings: place::of(place.process, &process.environment),
        requests_per_s,
        requested_bytes_per_s,
        host_bytes: ledger.host().now().bytes.0,
        nccl: nccl(live, now),
        devices: devices(live, now),
    }
}

fn nccl(live: &Live, now: Nanos) -> NcclFigures {
    let ledger = &live.ledger;
    let waiting = live.nccl.oldest();
    let call = |waiting: &super::follow::Waiting| {
        let comm = live.trace().communicator(waiting.comm).map(|comm| comm.config.name.clone());
        let comm = comm.filter(|name| !name.is_empty()).map(|name| format!(" on {name}")).unwrap_or_default();
        NcclCall {
            operation: format!("{}{comm}", waiting.op),
            for_ns: now.0.checked_sub(waiting.since.0),
            at: ledger.sites.site_name(ledger.sites.site_of(waiting.stack)),
        }
    };
    NcclFigures {
        communicators: ledger.communicators().count(),
        device_bytes: ledger.communicators().fold(0, |sum, (_, books)| sum + books.device.now.0),
        in_flight: waiting.len(),
        calls: waiting.iter().take(MOST_LINES).map(call).collect(),
    }
}

fn devices(live: &Live, now: Nanos) -> Vec<DeviceFigures> {
    let ledger = &live.ledger;
    let mut ordinals: Vec<i16> = ledger.devices().keys().copied().filter(|device| *device != HOST).collect();
    ordinals.extend(live.trace().devices().iter().map(|device| device.ordinal));
    ordinals.sort_unstable();
    ordinals.dedup();
    let empty = DeviceBooks::default();
    let of = |device: i16| (device, ledger.devices().get(&device).unwrap_or(&empty));
    let is_used = |books: &DeviceBooks, device: i16| {
        books.allocs > 0 || books.samples.newest().is_some() || ledger.torch(device).is_some()
    };
    let used = ordinals.into_iter().map(of).filter(|(device, books)| is_used(books, *device));
    used.map(|(device, books)| device_figures(live, device, books, now)).collect()
}

fn device_figures(live: &Live, device: i16, books: &DeviceBooks, now: Nanos) -> DeviceFigures {
    let ledger = &live.ledger;
    let facts = live.trace().device(device);
    let sampled = books.samples.newest();
    let charged = sampled.filter(|sampled| sampled.process_used.is_some());
    let context = charged.map(|sampled| sampled.of(gputrace_replay::ledger::Cause::Context).0);
    let torch = ledger.torch(device);
    DeviceFigures {
        device,
        uuid: facts.map(|facts| facts.uuid.clone()),
        name: facts.map(|facts| facts.name.clone()),
        total_bytes: facts.map(|facts| facts.total.0),
        driver_bytes: books.physical.now().bytes.0,
        driver_peak_bytes: books.physical.peak().0,
        managed_bytes: books.managed.now().bytes.0,
        graphs_kept_bytes: books.graphs_kept.now.0,
        allocations: books.allocs,
        refused: books.failed,
        device_used_bytes: sampled.map(|sampled| sampled.device_used.0),
        process_used_bytes: charged.and_then(|sampled| sampled.process_used).map(|bytes| bytes.0),
        context_bytes: context,
        unaccounted_bytes: charged.and_then(|sampled| sampled.unaccounted()),
        sample_age_ns: sampled.and_then(|sampled| now.0.checked_sub(sampled.time.0)),
        owners: owners(ledger, books),
        torch: torch.map(|torch| torch_figures(ledger, device, torch)),
        jax_buffer_bytes: books.pjrt.as_ref().map(|pjrt| pjrt.buffers.now().bytes.0),
        lines: lines(ledger, books, torch),
    }
}

fn owners(ledger: &Ledger, books: &DeviceBooks) -> Vec<OwnerFigures> {
    let held = books.physical.owners().filter(|part| part.now.0 > 0);
    let mut owners: Vec<OwnerFigures> = held
        .map(|part| OwnerFigures { owner: ledger.sites.owner(part.id).to_owned(), bytes: part.now.0 })
        .collect();
    owners.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.owner.cmp(&b.owner)));
    owners
}

fn torch_figures(ledger: &Ledger, device: i16, torch: &TorchBooks) -> TorchFigures {
    let pieces = Fragmentation::of(ledger, device);
    let (allocated, reserved) = (torch.allocated.now.0, torch.reserved.now.0);
    let pools = ledger.torch_pools.pools.range((device, (0, 0))..=(device, (u64::MAX, u64::MAX)));
    let pools =
        pools.filter(|(_, pool)| pool.reserved.now.0 > 0).map(|((_, (graph, user)), pool)| PoolFigures {
            pool: format!("({graph}, {user})"),
            reserved_bytes: pool.reserved.now.0,
            allocated_bytes: pool.allocated.now.0,
            active_bytes: pool.active.now.0,
            abandoned: pool.is_abandoned(),
        });
    let unused = reserved.saturating_sub(allocated) as f64;
    TorchFigures {
        allocated_bytes: allocated,
        reserved_bytes: reserved,
        requested_bytes: torch.requested.now.0,
        peak_allocated_bytes: torch.allocated.peak.0,
        peak_reserved_bytes: torch.reserved.peak.0,
        allocations: torch.allocations,
        ooms: torch.n_ooms,
        unused_share: if reserved > 0 { unused / reserved as f64 } else { 0.0 },
        stranded_bytes: pieces.small.stranded().0 + pieces.large.stranded().0,
        largest_free_bytes: pieces.small.largest_free.max(pieces.large.largest_free).0,
        segments: pieces.small.n_segments + pieces.large.n_segments,
        pools: pools.collect(),
    }
}

/// Blocks of PyTorch and buffers of JAX by the line that asked for them, and what others have from the driver.
fn lines(ledger: &Ledger, books: &DeviceBooks, torch: Option<&TorchBooks>) -> Vec<LineFigures> {
    let blocks = torch.into_iter().flat_map(|torch| torch.blocks.sites());
    let buffers = books.pjrt.iter().flat_map(|pjrt| pjrt.buffers.sites());
    let inside = blocks.chain(buffers);
    let is_inside = |owner: &str| torch.is_some() && owner == TORCH || books.pjrt.is_some() && owner == JAX;
    let owner = |site| ledger.sites.site(site).map_or("", |site| ledger.sites.owner(site.owner));
    let driver = books.physical.sites().filter(|part| !is_inside(owner(part.id)));
    let mut parts: Vec<_> = inside.chain(driver).filter(|part| part.now.0 > 0).collect();
    parts.sort_by_key(|part| std::cmp::Reverse((part.now, part.id)));
    parts.truncate(MOST_LINES);
    let line = |(site, bytes): (_, Bytes)| LineFigures {
        site: ledger.sites.site_name(site),
        owner: owner(site).to_owned(),
        bytes: bytes.0,
    };
    parts.into_iter().map(|part| line((part.id, part.now))).collect()
}
