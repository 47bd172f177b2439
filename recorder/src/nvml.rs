//! The driver's own figures, sampled on a thread of their own: what NVML charges to the process and to the device.
//!
//! NVML is looked for once a device is known; where it is missing, or tells nothing about processes, the trace has no such
//! figures and everything else. Where it is not clear at once which of its processes is ours (`nvml_process.rs`), samples
//! wait a little for that.

use crate::card::{self, Holder, bytes_of};
use crate::gpu_health::Health;
use crate::guarded;
use crate::item::own_event;
use crate::nvml_process::{Finder, HandedOut, Listed, Numbers};
use crate::ticks;
use crate::write::Outlet;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};
use gputrace_schemas::event::{Bytes, Device, EventKind, Nanos, Sample, SuspendedBy};
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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
/// How long samples wait for it to become clear which process is ours.
const UNDECIDED: Duration = Duration::from_secs(3);
/// So many samples in a row must not list a process that was listed before: one alone may have come while a context was made.
const UNLISTED: u32 = 2;
/// The program whose context the clients of MPS share (MPS guide, utilities and daemons).
const MPS_SERVER: &str = "nvidia-cuda-mps-server";

enum Command {
    Devices(Vec<Device>),
    /// The process has just got memory.
    Now,
    /// What was handed out to it, all of it until this time.
    HandedOut(u64, Vec<HandedOut>),
    /// Who has memory on the device?
    Holders(i16, Sender<Vec<Holder>>),
    Stop,
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
    wants_more: Arc<AtomicBool>,
}

impl Sampler {
    /// Samples for the process that has these numbers; without any, it is gone and there is nothing to sample.
    pub(crate) fn start(numbers: Option<Numbers>, outlet: Outlet) -> Sampler {
        let (to, from) = unbounded();
        let Some(numbers) = numbers else {
            return Sampler { to, thread: None, wants_more: Arc::default() };
        };
        let wants_more = Arc::new(AtomicBool::new(!numbers.are_sure()));
        let sampling = Sampling {
            finder: Finder::new(numbers),
            wants_more: Arc::clone(&wants_more),
            outlet,
            devices: Vec::new(),
            last: HashMap::new(),
            undecided: VecDeque::new(),
            told: Told::Nothing,
            began: Instant::now(),
            n_listed: 0,
            named: HashSet::new(),
            has_asked_mps: false,
            listing: Listing::default(),
        };
        let run = move || sampling.run(&from);
        let thread = guarded::spawn("gputrace-nvml", run).ok();
        Sampler { to, thread, wants_more }
    }

    /// Whether there is a thread that samples.
    pub(crate) fn is_running(&self) -> bool {
        self.thread.is_some()
    }

    pub(crate) fn devices(&self, devices: &[Device]) {
        let _ = self.to.send(Command::Devices(devices.to_vec()));
    }

    pub(crate) fn now(&self) {
        let _ = self.to.send(Command::Now);
    }

    /// Whether [`Sampler::handed_out`] is of use.
    pub(crate) fn wants_handed_out(&self) -> bool {
        self.wants_more.load(Ordering::Relaxed)
    }

    /// What was handed out to the process until a time.
    pub(crate) fn handed_out(&self, until: u64, changes: Vec<HandedOut>) {
        let _ = self.to.send(Command::HandedOut(until, changes));
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
    finder: Finder,
    wants_more: Arc<AtomicBool>,
    outlet: Outlet,
    devices: Vec<Device>,
    last: HashMap<i16, Sample>,
    /// Samples of which it is not known yet which process's figure is ours.
    undecided: VecDeque<Taken>,
    told: Told,
    began: Instant,
    /// How many processes NVML listed last on a device.
    n_listed: usize,
    /// Devices of which the trace says what they are for NVML.
    named: HashSet<i16>,
    /// It was asked whether the process is a client of MPS.
    has_asked_mps: bool,
    listing: Listing,
}

/// Whether NVML lists the process with memory, on any of its devices.
#[derive(Default)]
struct Listing {
    was_listed: bool,
    /// Samples in a row without it.
    n_without: u32,
    /// The trace says that it is suspended.
    has_told: bool,
}

impl Listing {
    /// What is to be told after a sample that lists the process, or does not.
    fn sampled(&mut self, is_listed: bool) -> Option<String> {
        self.n_without = if is_listed { 0 } else { self.n_without.saturating_add(1) };
        self.was_listed |= is_listed;
        let is_without = self.was_listed && self.n_without >= UNLISTED;
        if is_without == self.has_told || (self.has_told && !is_listed) {
            return None;
        }
        self.has_told = is_without;
        let by = SuspendedBy::Checkpoint;
        Some(if is_without { by.begins() } else { by.ends() })
    }
}

/// A sample with everybody's figures.
struct Taken {
    at: Instant,
    /// Without the process's own figure.
    sample: Sample,
    listed: Listed,
    /// NVML gave a list of processes, if only an empty one.
    is_list_known: bool,
}

/// What the trace says about how the process was found.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Told {
    Nothing,
    Unknown,
    Found,
}

impl Sampling {
    fn run(mut self, from: &Receiver<Command>) {
        // Without a device there is nothing to ask, and no reason to load a library.
        while self.devices.is_empty() {
            match from.recv() {
                Ok(Command::Devices(devices)) => self.devices = devices,
                Ok(Command::HandedOut(until, changes)) => self.finder.handed_out(until, changes),
                // Whoever asks learns from the closed channel that there is no answer.
                Ok(Command::Now | Command::Holders(..)) => {}
                Ok(Command::Stop) | Err(_) => return,
            }
        }
        let Ok(nvml) = Nvml::init() else {
            self.wants_more.store(false, Ordering::Relaxed);
            return;
        };
        let mut health = Health::new(&nvml);
        health.watch(&self.devices);
        let mut quiet = 0;
        loop {
            let began = Instant::now();
            quiet = if self.sample(&nvml) { 0 } else { quiet + 1 };
            health.look().into_iter().for_each(|fault| self.note(fault.to_string()));
            // Several calls that get memory are one sample, and a storm of them is no storm of ours.
            let not_before = Instant::now() + LEAST.max(began.elapsed() * PART);
            let mut due = not_before.max(Instant::now() + if quiet > QUIET { LONG } else { SHORT });
            loop {
                match from.recv_deadline(due) {
                    Ok(command) => match self.obey(command, &nvml) {
                        Obeyed::Stop => {
                            // The fault that ended the process came with its end.
                            health.last_look().into_iter().for_each(|fault| self.note(fault.to_string()));
                            self.decide();
                            self.tell_unknown();
                            self.release(true);
                            return;
                        }
                        Obeyed::Now => {
                            health.watch(&self.devices);
                            due = not_before;
                            quiet = 0;
                        }
                        Obeyed::Later => {}
                    },
                    Err(RecvTimeoutError::Timeout) => break,
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        }
    }

    fn obey(&mut self, command: Command, nvml: &Nvml) -> Obeyed {
        match command {
            Command::Stop => return Obeyed::Stop,
            Command::Now => return Obeyed::Now,
            Command::Devices(devices) => {
                self.devices = devices;
                return Obeyed::Now;
            }
            Command::HandedOut(until, changes) => {
                self.finder.handed_out(until, changes);
                self.decide();
            }
            Command::Holders(device, answer) => {
                let device = self.devices.iter().find(|known| known.ordinal == device);
                let device = device.and_then(|device| card::find(nvml, &device.uuid).ok());
                if let Some(holders) = device.and_then(|device| card::holders(nvml, &device)) {
                    let _ = answer.send(holders);
                }
            }
        }
        Obeyed::Later
    }

    /// Takes a sample of each device; whether any figure has changed.
    fn sample(&mut self, nvml: &Nvml) -> bool {
        let taken: Vec<(Device, Result<Taken, NvmlError>)> =
            self.devices.iter().map(|device| (device.clone(), take(nvml, device))).collect();
        for (device, taken) in &taken {
            self.name(nvml, device, taken.as_ref().err());
        }
        let taken: Vec<Taken> = taken.into_iter().filter_map(|(_, taken)| taken.ok()).collect();
        for taken in &taken {
            self.finder.listed(&taken.listed);
        }
        // Where NVML does not list, it does not say that nobody is there.
        if let Some((ours, _)) = self.finder.found()
            && taken.len() == self.devices.len()
            && taken.iter().all(|taken| taken.is_list_known)
        {
            let has_ours = |taken: &Taken| taken.listed.processes.iter().any(|(pid, _)| *pid == ours);
            if let Some(note) = self.listing.sampled(taken.iter().any(has_ours)) {
                self.note(note);
            }
        }
        self.n_listed = taken.iter().map(|taken| taken.listed.processes.len()).max().unwrap_or(0);
        self.undecided.extend(taken);
        self.decide();
        self.look_for_mps(nvml);
        if self.began.elapsed() >= UNDECIDED {
            self.tell_unknown();
        }
        self.release(false)
    }

    /// Says how the process was found, once it is.
    fn decide(&mut self) {
        self.wants_more.store(self.finder.wants_more(), Ordering::Relaxed);
        if self.told != Told::Found
            && let Some((number, way)) = self.finder.found()
        {
            self.told = Told::Found;
            self.note(format!("nvml.process={} {number}", way.name()));
        }
    }

    /// Writes what has been decided, or has waited for long enough; whether any figure has changed.
    fn release(&mut self, everything: bool) -> bool {
        let found = self.finder.found();
        let mut changed = false;
        let mut items = Vec::new();
        while let Some(Taken { at, sample, listed, .. }) = self.undecided.front() {
            let is_decided = found.is_some() || !self.finder.wants_more() || listed.processes.is_empty();
            if !is_decided && !everything && at.elapsed() < UNDECIDED {
                break;
            }
            let ours =
                listed.processes.iter().find(|(number, _)| found.is_some_and(|(ours, _)| ours == *number));
            let is_listed = ours.is_some();
            let sample = Sample { process_used: ours.and_then(|(_, bytes)| *bytes).map(Bytes), ..*sample };
            let Some(Taken { listed, .. }) = self.undecided.pop_front() else { break };
            // Where NVML knows whose memory it is, devices that the process has no context on are none of its story.
            if found.is_some() && !is_listed && !self.last.contains_key(&sample.device) {
                continue;
            }
            if self.last.insert(sample.device, sample) != Some(sample) {
                changed = true;
                items.push(own_event(Nanos(listed.time), EventKind::Sample(sample)));
            }
        }
        if changed {
            self.outlet.send(items);
        }
        changed
    }

    fn tell_unknown(&mut self) {
        if self.told == Told::Nothing {
            self.told = Told::Unknown;
            let n = self.n_listed;
            self.note(match (n, self.finder.wants_more()) {
                (0, _) => "nvml.process=unknown: NVML lists no processes".to_owned(),
                (_, false) => {
                    format!("nvml.process=unknown: this process is none of the {n} that NVML lists")
                }
                (_, true) => {
                    format!(
                        "nvml.process=unknown: none of the {n} that NVML lists could be matched to this process"
                    )
                }
            });
        }
    }

    /// Says of a device that it is a MIG instance, and of which card, or why it has no figures: `nvml.device=ORDINAL MIG-... of GPU-...`,
    /// `nvml.device=ORDINAL unknown: WHY`.
    fn name(&mut self, nvml: &Nvml, device: &Device, error: Option<&NvmlError>) {
        let Device { ordinal, uuid, .. } = device;
        if !self.named.insert(*ordinal) {
            return;
        }
        let said = match error {
            Some(error) => Some(format!("unknown: NVML does not know {uuid}: {error}")),
            None => card::find(nvml, uuid).ok().and_then(|handle| {
                let card = card::card_of(&handle)?;
                Some(format!("{} of {card}", handle.uuid().unwrap_or_else(|_| uuid.clone())))
            }),
        };
        if let Some(said) = said {
            self.note(format!("nvml.device={ordinal} {said}"));
        }
    }

    /// Says, once the process is known, that it is a client of MPS, and what the server has on the device: `nvml.mps=ORDINAL client`,
    /// `nvml.mps=ORDINAL server PID BYTES`.
    fn look_for_mps(&mut self, nvml: &Nvml) {
        let Some((ours, _)) = self.finder.found().filter(|_| !self.has_asked_mps) else { return };
        self.has_asked_mps = true;
        for device in &self.devices {
            let Ok(handle) = card::find(nvml, &device.uuid) else { continue };
            if !card::clients(&handle).is_some_and(|clients| clients.contains(&ours)) {
                continue;
            }
            self.note(format!("nvml.mps={} client", device.ordinal));
            for process in handle.running_compute_processes().unwrap_or_default() {
                if card::name(nvml, process.pid).as_deref() == Some(MPS_SERVER) {
                    let bytes = bytes_of(&process).map_or_else(|| "?".to_owned(), |bytes| bytes.to_string());
                    self.note(format!("nvml.mps={} server {} {bytes}", device.ordinal, process.pid));
                }
            }
        }
    }

    fn note(&self, text: String) {
        self.outlet.send(vec![own_event(Nanos(ticks::monotonic()), EventKind::Note(text))]);
    }
}

/// The figures of a device; of the instance where the process runs on a part of a card (MIG).
fn take(nvml: &Nvml, device: &Device) -> Result<Taken, NvmlError> {
    let handle = card::find(nvml, &device.uuid)?;
    let memory = handle.memory_info()?;
    let processes = handle.running_compute_processes();
    let is_list_known = processes.is_ok();
    let processes = processes.unwrap_or_default();
    let time = ticks::monotonic();
    let processes = processes.iter().map(|process| (process.pid, bytes_of(process))).collect();
    let (device_used, total) = (Bytes(memory.used), Bytes(memory.total));
    Ok(Taken {
        at: Instant::now(),
        sample: Sample { device: device.ordinal, process_used: None, device_used, total },
        listed: Listed { time, device: device.ordinal, processes },
        is_list_known,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_nvml_lists_no_more_is_suspended_until_it_does_again() {
        let told = |samples: &str| {
            let mut listing = Listing::default();
            let told = samples.chars().filter_map(|sample| listing.sampled(sample == 'x'));
            told.map(|note| note.replace("process.", "").replace("=checkpoint", ""))
                .collect::<Vec<_>>()
                .join(" ")
        };
        // One that was never listed has no memory yet, and one sample alone says nothing.
        assert_eq!(told("....x.x.xx"), "");
        assert_eq!(told(".x..."), "suspended");
        assert_eq!(told("x...xx..x"), "suspended resumed suspended resumed");
    }
}
