//! The driver's own figures, sampled on a thread of their own: what NVML charges to the process and to the device.
//!
//! NVML is looked for once a device is known; where it is missing, or tells nothing about processes (it sees process
//! ids of the host, not of a container), the trace has no such figures and everything else.

use crate::ticks;
use crate::translate::{Item, RECORDER};
use crate::write::Outlet;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};
use gputrace_schemas::event::{Bytes, Device, Event, EventKind, Nanos, Sample, StackId};
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
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
/// Bytes of a process's name.
const MOST_NAME: usize = 256;

enum Command {
    Devices(Vec<Device>),
    /// The process has just got memory.
    Now,
    /// Who has memory on the device?
    Holders(i16, Sender<Vec<Holder>>),
    Stop,
}

/// A process that has memory on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    /// As NVML numbers it: a container sees the numbers of the host.
    pub(crate) pid: u32,
    pub(crate) bytes: Option<u64>,
    /// File name of its program, where NVML tells.
    pub(crate) name: Option<String>,
}

/// Asks the sampling thread.
#[derive(Clone)]
pub(crate) struct Inquirer(Sender<Command>);

impl Inquirer {
    /// Who has memory on a device; `None` where NVML is missing or does not answer in time.
    pub(crate) fn holders(&self, device: i16, patience: Duration) -> Option<Vec<Holder>> {
        let (answer, answered) = bounded(1);
        self.0.send(Command::Holders(device, answer)).ok()?;
        answered.recv_timeout(patience).ok()
    }
}

/// Whether a sample is wanted at once, or none any more.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Obeyed {
    Now,
    Later,
    Stop,
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

    pub(crate) fn inquirer(&self) -> Inquirer {
        Inquirer(self.to.clone())
    }

    /// Ends the sampling. A driver that does not answer any more is not waited for.
    pub(crate) fn stop(self) {
        let _ = self.to.send(Command::Stop);
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
                // Whoever asks learns from the closed channel that there is no answer.
                Ok(Command::Now | Command::Holders(..)) => {}
                Ok(Command::Stop) | Err(_) => return,
            }
        }
        let Ok(nvml) = Nvml::init() else { return };
        let mut quiet = 0;
        loop {
            let began = Instant::now();
            quiet = if self.sample(&nvml) { 0 } else { quiet + 1 };
            let not_before = Instant::now() + LEAST.max(began.elapsed() * PART);
            let mut command = from.recv_timeout(if quiet > QUIET { LONG } else { SHORT });
            loop {
                match command {
                    Ok(command) => match self.obey(command, &nvml) {
                        Obeyed::Stop => return,
                        Obeyed::Now => {
                            // Several calls that get memory are one sample, and a storm of them is no storm of ours.
                            std::thread::sleep(not_before.saturating_duration_since(Instant::now()));
                            quiet = 0;
                        }
                        Obeyed::Later => {}
                    },
                    Err(RecvTimeoutError::Timeout) => break,
                    Err(RecvTimeoutError::Disconnected) => return,
                }
                command = from.try_recv().map_err(|_| RecvTimeoutError::Timeout);
            }
        }
    }

    fn obey(&mut self, command: Command, nvml: &Nvml) -> Obeyed {
        match command {
            Command::Stop => return Obeyed::Stop,
            Command::Now => return Obeyed::Now,
            Command::Devices(devices) => self.devices = devices,
            Command::Holders(device, answer) => {
                let device = self.devices.iter().find(|known| known.ordinal == device);
                if let Some(holders) = device.and_then(|device| holders(nvml, device)) {
                    let _ = answer.send(holders);
                }
            }
        }
        Obeyed::Later
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

fn holders(nvml: &Nvml, device: &Device) -> Option<Vec<Holder>> {
    let handle = nvml.device_by_uuid(device.uuid.as_str()).ok()?;
    let mut processes = handle.running_compute_processes().ok()?;
    processes.extend(handle.running_graphics_processes().unwrap_or_default());
    processes.sort_by_key(|process| process.pid);
    processes.dedup_by_key(|process| process.pid);
    let holder = |process: &ProcessInfo| Holder {
        pid: process.pid,
        bytes: match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        },
        name: nvml.sys_process_name(process.pid, MOST_NAME).ok().map(|name| program_of(&name)),
    };
    Some(processes.iter().map(holder).collect())
}

/// NVML tells the path, on some drivers with arguments: none of a trace's business.
fn program_of(name: &str) -> String {
    let path = name.split_whitespace().next().unwrap_or_default();
    path.rsplit('/').next().unwrap_or_default().to_owned()
}
