//! The driver's own figures, sampled on a thread of their own: what NVML charges to the process and to the device.
//!
//! NVML is looked for once a device is known; where it is missing, or tells nothing about processes (it sees process
//! ids of the host, not of a container), the trace has no such figures and everything else.

use crate::ticks;
use crate::translate::{Item, RECORDER};
use crate::write::Outlet;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use gputrace_schemas::event::{Bytes, Device, Event, EventKind, Nanos, Sample, StackId};
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use std::collections::HashMap;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between two samples while figures change.
const SHORT: Duration = Duration::from_millis(200);
/// Between two samples while they do not: each costs NVML some hundred microseconds of the driver's time.
const LONG: Duration = Duration::from_secs(1);
/// Shortest time between two samples.
const LEAST: Duration = Duration::from_millis(5);
/// Sampling takes at most this part of the time.
const PART: u32 = 20;
/// How long the end of a recording waits for NVML.
const PATIENCE: Duration = Duration::from_secs(2);
/// After this many samples without a change.
const QUIET: u32 = 10;

enum Command {
    Devices(Vec<Device>),
    /// The process has just got memory.
    Now,
}

/// The sampling thread.
pub(crate) struct Sampler {
    to: Sender<Command>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    pub(crate) fn start(pid: u32, outlet: Outlet) -> Sampler {
        let (to, from) = unbounded();
        let run = move || Sampling { pid, outlet, devices: Vec::new(), last: HashMap::new() }.run(&from);
        let thread = std::thread::Builder::new().name("gputrace-nvml".to_owned()).spawn(run).ok();
        Sampler { to, thread }
    }

    pub(crate) fn devices(&self, devices: &[Device]) {
        let _ = self.to.send(Command::Devices(devices.to_vec()));
    }

    pub(crate) fn now(&self) {
        let _ = self.to.send(Command::Now);
    }

    /// Ends the sampling. A driver that does not answer any more is not waited for.
    pub(crate) fn stop(self) {
        drop(self.to);
        let patience = Instant::now() + PATIENCE;
        while self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) && Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

struct Sampling {
    pid: u32,
    outlet: Outlet,
    devices: Vec<Device>,
    last: HashMap<i16, Sample>,
}

impl Sampling {
    fn run(mut self, from: &Receiver<Command>) {
        // Without a device there is nothing to ask, and no reason to load a library.
        while self.devices.is_empty() {
            match from.recv() {
                Ok(Command::Devices(devices)) => self.devices = devices,
                Ok(Command::Now) => {}
                Err(_) => return,
            }
        }
        let Ok(nvml) = Nvml::init() else { return };
        let mut quiet = 0;
        loop {
            let began = Instant::now();
            quiet = if self.sample(&nvml) { 0 } else { quiet + 1 };
            let not_before = Instant::now() + LEAST.max(began.elapsed() * PART);
            match from.recv_timeout(if quiet > QUIET { LONG } else { SHORT }) {
                Ok(Command::Devices(devices)) => self.devices = devices,
                Ok(Command::Now) => {
                    // Several calls that get memory are one sample, and a storm of them is no storm of ours.
                    std::thread::sleep(not_before.saturating_duration_since(Instant::now()));
                    quiet = 0;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            while from.try_recv().is_ok_and(|command| match command {
                Command::Devices(devices) => {
                    self.devices = devices;
                    true
                }
                Command::Now => true,
            }) {}
        }
    }

    /// Takes a sample of each device; whether any figure has changed.
    fn sample(&mut self, nvml: &Nvml) -> bool {
        let samples: Vec<Sample> =
            self.devices.iter().filter_map(|device| sample(nvml, device, self.pid)).collect();
        let mut changed = false;
        let mut items = Vec::new();
        // Where NVML knows whose memory it is, devices that the process has no context on are none of its story.
        let tells = samples.iter().any(|sample| sample.process_used.is_some());
        for sample in samples {
            let is_ours = sample.process_used.is_some() || self.last.contains_key(&sample.device);
            if tells && !is_ours {
                continue;
            }
            if self.last.insert(sample.device, sample) != Some(sample) {
                changed = true;
                let time = Nanos(ticks::monotonic());
                let kind = EventKind::Sample(sample);
                items.push(Item::Event(Event { time, thread: RECORDER, stack: StackId(0), kind }));
            }
        }
        if changed {
            self.outlet.send(items);
        }
        changed
    }
}

fn sample(nvml: &Nvml, device: &Device, pid: u32) -> Option<Sample> {
    let handle = nvml.device_by_uuid(device.uuid.as_str()).ok()?;
    let memory = handle.memory_info().ok()?;
    let processes = handle.running_compute_processes().unwrap_or_default();
    let ours = processes.iter().find(|process| process.pid == pid);
    let process_used = ours.and_then(|process| match process.used_gpu_memory {
        UsedGpuMemory::Used(bytes) => Some(Bytes(bytes)),
        UsedGpuMemory::Unavailable => None,
    });
    Some(Sample {
        device: device.ordinal,
        process_used,
        device_used: Bytes(memory.used),
        total: Bytes(memory.total),
    })
}
