//! Figures as metrics: one list, from which OpenMetrics and OTLP are made.
//!
//! DCGM's names, labels and units (MiB) are those of dcgm-exporter 4's default counters; OpenTelemetry's are of its semantic
//! conventions for GPUs (1.38, `hw.gpu.*`), spelled in text as its Prometheus exporters do.

use gputrace_schemas::printable::printable;

use crate::commands::parts::live::figures::{Card, DeviceFigures, Figures, ProcessFigures};

/// Metrics of one name.
pub(super) struct Family {
    /// As Prometheus spells it; a counter without `_total`.
    pub(super) name: &'static str,
    /// As OpenTelemetry spells it; `None` where only Prometheus gets it.
    pub(super) otlp: Option<&'static str>,
    pub(super) kind: Kind,
    /// The ending of its name: `bytes`, `seconds`, `ratio`.
    pub(super) unit: &'static str,
    pub(super) help: &'static str,
    pub(super) samples: Vec<Sample>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Gauge,
    Counter,
}

pub(super) struct Sample {
    pub(super) labels: Vec<(&'static str, String)>,
    pub(super) value: Number,
}

/// Bytes are whole numbers, however many.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Number {
    Whole(i64),
    Real(f64),
}

impl From<u64> for Number {
    fn from(value: u64) -> Number {
        Number::Whole(i64::try_from(value).unwrap_or(i64::MAX))
    }
}

type Labels = Vec<(&'static str, String)>;

const MIB: u64 = 1 << 20;

/// All metrics of a picture; those without a sample are left out.
pub(super) fn of(figures: &Figures) -> Vec<Family> {
    let mut families = vec![];
    families.extend(dcgm(figures));
    families.extend(hardware(figures));
    families.extend(of_processes(figures));
    families.extend(of_devices(figures));
    families.extend(of_torch(figures));
    families.retain(|family: &Family| !family.samples.is_empty());
    families
}

struct Name(&'static str, Option<&'static str>, Kind, &'static str, &'static str);

/// A gauge of this unit, as Prometheus and OpenTelemetry spell it.
fn gauge(name: &'static str, otlp: &'static str, unit: &'static str, help: &'static str) -> Name {
    Name(name, Some(otlp), Kind::Gauge, unit, help)
}

fn bytes(name: &'static str, otlp: &'static str, help: &'static str) -> Name {
    gauge(name, otlp, "bytes", help)
}

fn counter(name: &'static str, otlp: &'static str, help: &'static str) -> Name {
    Name(name, Some(otlp), Kind::Counter, "", help)
}

impl Name {
    fn of(self, samples: Vec<Sample>) -> Family {
        let Name(name, otlp, kind, unit, help) = self;
        Family { name, otlp, kind, unit, help, samples }
    }
}

fn clean(text: &str) -> String {
    printable(text).into_owned()
}

fn dcgm(figures: &Figures) -> Vec<Family> {
    let labels = |card: &Card| -> Option<Labels> {
        let index = card.index?;
        Some(vec![
            ("gpu", index.to_string()),
            ("UUID", clean(&card.uuid)),
            ("device", format!("nvidia{index}")),
            ("modelName", clean(&card.name)),
            ("Hostname", clean(&figures.host)),
        ])
    };
    let of = |get: fn(&Card) -> Option<u64>| -> Vec<Sample> {
        let samples = figures
            .cards
            .iter()
            .filter_map(|card| Some(Sample { labels: labels(card)?, value: (get(card)? / MIB).into() }));
        samples.collect()
    };
    let name = |name, help| Name(name, None, Kind::Gauge, "", help);
    vec![
        name("DCGM_FI_DEV_FB_USED", "Framebuffer memory used (in MiB).").of(of(|card| card.used_bytes)),
        name("DCGM_FI_DEV_FB_FREE", "Framebuffer memory free (in MiB).").of(of(|card| card.free_bytes)),
        name("DCGM_FI_DEV_FB_RESERVED", "Framebuffer memory reserved (in MiB).")
            .of(of(|card| card.reserved_bytes)),
        name("DCGM_FI_DEV_FB_TOTAL", "Framebuffer memory of the GPU (in MiB).")
            .of(of(|card| card.total_bytes)),
    ]
}

fn hardware(figures: &Figures) -> Vec<Family> {
    let labels = |card: &Card| -> Labels {
        let name = card.number().unwrap_or_else(|| clean(&card.name));
        vec![
            ("hw_id", clean(&card.uuid)),
            ("hw_name", name),
            ("hw_model", clean(&card.name)),
            ("hw_vendor", "NVIDIA".to_owned()),
            ("hw_type", "gpu".to_owned()),
        ]
    };
    let of = |get: &dyn Fn(&Card) -> Option<Number>| -> Vec<Sample> {
        let cards = figures.cards.iter();
        cards.filter_map(|card| Some(Sample { labels: labels(card), value: get(card)? })).collect()
    };
    let share = |card: &Card| {
        let total = card.total_bytes.filter(|total| *total > 0)?;
        Some(Number::Real(card.used_bytes? as f64 / total as f64))
    };
    vec![
        bytes("hw_gpu_memory_usage_bytes", "hw.gpu.memory.usage", "GPU memory used.")
            .of(of(&|card| card.used_bytes.map(Number::from))),
        bytes("hw_gpu_memory_limit_bytes", "hw.gpu.memory.limit", "Size of the GPU memory.")
            .of(of(&|card| card.total_bytes.map(Number::from))),
        gauge(
            "hw_gpu_memory_utilization_ratio",
            "hw.gpu.memory.utilization",
            "ratio",
            "Fraction of GPU memory used.",
        )
        .of(of(&share)),
    ]
}

fn of_process(process: &ProcessFigures) -> Labels {
    let mut labels = vec![("pid", process.pid.to_string()), ("host", clean(&process.host))];
    labels.extend(process.rank.map(|rank| ("rank", rank.to_string())));
    labels
}

/// Ended ones have no figures any more.
fn running(figures: &Figures) -> impl Iterator<Item = &ProcessFigures> {
    figures.processes.iter()
}

fn of_processes(figures: &Figures) -> Vec<Family> {
    let of = |get: fn(&ProcessFigures) -> Option<Number>| -> Vec<Sample> {
        let samples = running(figures)
            .filter_map(|process| Some(Sample { labels: of_process(process), value: get(process)? }));
        samples.collect()
    };
    let info = running(figures).map(|process| {
        let place = &process.surroundings;
        let mut labels = of_process(process);
        labels.push(("program", clean(&process.program())));
        labels.push(("state", process.state.to_owned()));
        let named = [
            ("container", &place.container),
            ("pod", &place.pod),
            ("namespace", &place.namespace),
            ("slurm_job", &place.slurm_job),
        ];
        labels.extend(named.into_iter().filter_map(|(name, value)| Some((name, clean(value.as_ref()?)))));
        Sample { labels, value: Number::Whole(1) }
    });
    let others = figures.cards.iter().flat_map(|card| {
        card.unrecorded.iter().flatten().filter_map(|other| {
            let name = other.name.as_deref().map(clean).unwrap_or_default();
            let labels = vec![("pid", other.pid.to_string()), ("name", name), ("UUID", clean(&card.uuid))];
            Some(Sample { labels, value: other.used_bytes?.into() })
        })
    });
    vec![
        Name("gputrace_process_info", None, Kind::Gauge, "", "A recorded process, and its location.")
            .of(info.collect()),
        bytes(
            "gputrace_unrecorded_bytes",
            "gputrace.unrecorded",
            "Memory that the driver charges to a process that is not recorded.",
        )
        .of(others.collect()),
        bytes("gputrace_pinned_host_bytes", "gputrace.pinned_host", "Pinned and registered host memory.")
            .of(of(|process| Some(process.host_bytes.into()))),
        counter("gputrace_lost_events", "gputrace.lost_events", "Events missing from the trace.")
            .of(of(|process| Some(process.lost_events.into()))),
        counter("gputrace_events", "gputrace.events", "Events read from the trace.")
            .of(of(|process| Some(process.events.into()))),
        gauge(
            "gputrace_last_event_age_seconds",
            "gputrace.last_event_age",
            "seconds",
            "Time since the newest event of the process.",
        )
        .of(of(|process| process.age_ns.map(|age| Number::Real(age as f64 / 1e9)))),
        gauge(
            "gputrace_nccl_calls_in_flight",
            "gputrace.nccl.calls_in_flight",
            "",
            "Calls into NCCL that have not returned.",
        )
        .of(of(|process| Some((process.nccl.in_flight as u64).into()))),
        bytes("gputrace_nccl_bytes", "gputrace.nccl.memory", "Memory held by NCCL's communicators.")
            .of(of(|process| Some(process.nccl.device_bytes.into()))),
    ]
}

fn of_device(process: &ProcessFigures, device: &DeviceFigures) -> Labels {
    let mut labels = of_process(process);
    labels.push(("device", device.device.to_string()));
    labels.extend(device.uuid.as_deref().map(|uuid| ("UUID", clean(uuid))));
    labels
}

fn of_devices(figures: &Figures) -> Vec<Family> {
    let devices =
        || running(figures).flat_map(|process| process.devices.iter().map(move |device| (process, device)));
    let of = |get: fn(&DeviceFigures) -> Option<Number>| -> Vec<Sample> {
        let samples = devices().filter_map(|(process, device)| {
            Some(Sample { labels: of_device(process, device), value: get(device)? })
        });
        samples.collect()
    };
    let owners = devices().flat_map(|(process, device)| {
        device.owners.iter().map(move |owner| {
            let mut labels = of_device(process, device);
            labels.push(("owner", clean(&owner.owner)));
            Sample { labels, value: owner.bytes.into() }
        })
    });
    vec![
        bytes("gputrace_held_bytes", "gputrace.held", "Memory allocated from the driver by the process.")
            .of(of(|device| Some(device.driver_bytes.into()))),
        bytes(
            "gputrace_held_peak_bytes",
            "gputrace.held.peak",
            "Peak of memory allocated from the driver by the process.",
        )
        .of(of(|device| Some(device.driver_peak_bytes.into()))),
        bytes(
            "gputrace_owner_bytes",
            "gputrace.owner",
            "Memory allocated from the driver, by owner: adds up to gputrace_held_bytes.",
        )
        .of(owners.collect()),
        bytes("gputrace_managed_bytes", "gputrace.managed", "Managed memory.")
            .of(of(|device| Some(device.managed_bytes.into()))),
        bytes(
            "gputrace_process_used_bytes",
            "gputrace.process_used",
            "Memory that the driver charges to the process.",
        )
        .of(of(|device| device.process_used_bytes.map(Number::from))),
        bytes("gputrace_unaccounted_bytes", "gputrace.unaccounted", "Charged memory that nothing explains.")
            .of(of(|device| device.unaccounted_bytes.map(Number::Whole))),
        counter(
            "gputrace_driver_allocations",
            "gputrace.driver.allocations",
            "Objects allocated from the driver.",
        )
        .of(of(|device| Some(device.allocations.into()))),
        counter("gputrace_driver_refused", "gputrace.driver.refused", "Requests that the driver refused.")
            .of(of(|device| Some(device.refused.into()))),
        bytes("gputrace_jax_buffer_bytes", "gputrace.jax.buffers", "Buffers of JAX.")
            .of(of(|device| device.jax_buffer_bytes.map(Number::from))),
    ]
}

fn of_torch(figures: &Figures) -> Vec<Family> {
    let torch = || {
        let of_one =
            |process| move |device: &'_ DeviceFigures| (of_device(process, device), device.torch.clone());
        running(figures).flat_map(move |process| process.devices.iter().map(of_one(process)))
    };
    use crate::commands::parts::live::figures::{PoolFigures, TorchFigures};
    let of = |get: fn(&TorchFigures) -> u64| -> Vec<Sample> {
        torch().filter_map(|(labels, torch)| Some(Sample { labels, value: get(&torch?).into() })).collect()
    };
    let pools = |get: fn(&PoolFigures) -> u64| -> Vec<Sample> {
        let of_one = |(labels, torch): (Labels, Option<TorchFigures>)| {
            torch.into_iter().flat_map(|torch| torch.pools).map(move |pool| {
                let value = get(&pool).into();
                let named = labels.iter().cloned().chain([("pool", pool.pool)]);
                Sample { labels: named.collect(), value }
            })
        };
        torch().flat_map(of_one).collect()
    };
    vec![
        bytes("gputrace_torch_allocated_bytes", "gputrace.torch.allocated", "PyTorch: allocated.")
            .of(of(|it| it.allocated_bytes)),
        bytes("gputrace_torch_reserved_bytes", "gputrace.torch.reserved", "PyTorch: reserved.")
            .of(of(|it| it.reserved_bytes)),
        bytes(
            "gputrace_torch_requested_bytes",
            "gputrace.torch.requested",
            "PyTorch: requested by the program.",
        )
        .of(of(|it| it.requested_bytes)),
        bytes(
            "gputrace_torch_stranded_bytes",
            "gputrace.torch.stranded",
            "PyTorch: free in segments with live blocks.",
        )
        .of(of(|it| it.stranded_bytes)),
        bytes(
            "gputrace_torch_largest_free_bytes",
            "gputrace.torch.largest_free",
            "PyTorch: the largest free block.",
        )
        .of(of(|it| it.largest_free_bytes)),
        counter("gputrace_torch_allocations", "gputrace.torch.allocations", "PyTorch: allocated blocks.")
            .of(of(|it| it.allocations)),
        counter("gputrace_torch_ooms", "gputrace.torch.ooms", "PyTorch: out-of-memory errors.")
            .of(of(|it| it.ooms)),
        bytes(
            "gputrace_pool_reserved_bytes",
            "gputrace.pool.reserved",
            "A private pool of PyTorch: reserved.",
        )
        .of(pools(|it| it.reserved_bytes)),
        bytes(
            "gputrace_pool_allocated_bytes",
            "gputrace.pool.allocated",
            "A private pool of PyTorch: allocated.",
        )
        .of(pools(|it| it.allocated_bytes)),
        bytes(
            "gputrace_pool_active_bytes",
            "gputrace.pool.active",
            "A private pool of PyTorch: allocated, or still used by a stream.",
        )
        .of(pools(|it| it.active_bytes)),
    ]
}
