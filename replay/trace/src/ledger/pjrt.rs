//! What JAX, and others that use PJRT, hold inside the arena that its allocator took from the driver.
//!
//! Buffers are a level of their own inside the arena, as PyTorch's blocks are inside its segments: what the driver handed
//! out is buffers, and what no buffer holds, which is temporaries of executions and free memory.

use std::collections::BTreeMap;

use gputrace_schemas::event::{
    Bytes, Event, NO_DEVICE, Nanos, OutOfMemory, Pjrt, PjrtAction, PjrtExecutable, PjrtOrigin, StackId,
};
use rustc_hash::FxHashMap;

use super::Devices;
use super::Effect;
use super::amounts::{Books, Held};
use super::sites::{OwnerId, SiteId};
use crate::Definitions;

/// Executions that may be under way when one of them is known to have failed.
const RECENT: u64 = 64;
/// Most out-of-memory errors kept whole; all are counted.
const MAX_OOMS: usize = 64;

/// The books of one device's buffers.
#[derive(Clone, Debug, Default)]
pub struct PjrtBooks {
    /// Buffers by call site.
    pub buffers: Books,
    /// What was made, by how.
    pub made: BTreeMap<PjrtOrigin, Held>,
    /// What executions took over from their arguments.
    pub donated: Held,
    /// Results of executions that failed after they were launched: in the peak of `buffers` until then.
    pub unserved: Held,
    /// Buffers that view memory of others: not in `buffers`.
    pub n_views: u64,
    /// Executions launched.
    pub executions: u64,
    /// Buffers and temporaries of an execution together, when that was most.
    pub most: Option<Need>,
    /// How often memory could not be had.
    pub n_ooms: u64,
    /// The newest of them, oldest first.
    pub ooms: Vec<PjrtOom>,
}

/// What an execution needed beside what was there.
#[derive(Clone, Debug)]
pub struct Need {
    /// When.
    pub time: Nanos,
    /// All buffers, its results included.
    pub buffers: Bytes,
    /// Its temporaries, as its compiler says.
    pub temporary: Bytes,
    /// Which: index in [`super::Ledger::executables`].
    pub executable: usize,
}

impl Need {
    /// Together.
    #[must_use]
    pub fn total(&self) -> Bytes {
        Bytes(self.buffers.0.saturating_add(self.temporary.0))
    }
}

/// PJRT answered `RESOURCE_EXHAUSTED`.
#[derive(Clone, Debug)]
pub struct PjrtOom {
    /// When.
    pub time: Nanos,
    /// The requested amount, where that is known.
    pub bytes: Option<Bytes>,
    /// The origin of the failure.
    pub origin: PjrtOrigin,
    /// Which executable: index in [`super::Ledger::executables`].
    pub executable: Option<usize>,
    /// Memory that buffers held.
    pub buffers: Bytes,
    /// Memory that the driver had allocated to the process on this device.
    pub tracked: Bytes,
    /// PJRT's message.
    pub said: String,
    /// From where.
    pub site: SiteId,
    /// From where, in full.
    pub stack: StackId,
    /// Buffers made before it: whether the program continued.
    pub made_before: u64,
}

/// A buffer that is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Buffer {
    /// On which device.
    pub device: i16,
    /// How large on it.
    pub bytes: Bytes,
    /// How it was made.
    pub origin: PjrtOrigin,
    /// Made from where.
    pub site: SiteId,
    /// From where, in full.
    pub stack: StackId,
    /// Since when.
    pub since: Nanos,
    /// Executions launched before it.
    launch: u64,
    /// `PJRT_LoadedExecutable *`; 0 none.
    executable: u64,
}

/// An executable, or several of one name and one size.
#[derive(Clone, Debug)]
pub struct Executable {
    /// `jit_step`.
    pub name: String,
    /// Launched first from where; `None` if it never was. It is compiled in threads of JAX's own.
    pub site: Option<SiteId>,
    /// How often it was compiled or loaded.
    pub n_compiled: u64,
    /// How often it was launched, on all devices.
    pub executions: u64,
    /// The compiler's figures.
    pub figures: PjrtExecutable,
}

fn books_of(devices: &mut Devices, device: i16) -> &mut PjrtBooks {
    devices.entry(device).or_default().pjrt.get_or_insert_default()
}

#[derive(Default)]
pub(super) struct Buffers {
    pub(super) live: FxHashMap<u64, Buffer>,
    pub(super) executables: Vec<Executable>,
    by_address: FxHashMap<u64, usize>,
    n_launches: u64,
    /// Launches before the last error: whoever waits for the same execution is answered the same again.
    failed_after: Option<u64>,
    by_figures: FxHashMap<(String, [Option<Bytes>; 5]), usize>,
}

impl Buffers {
    pub(super) fn compiled(&mut self, made: &PjrtExecutable, name: &str) {
        let next = self.executables.len();
        let figures = [made.temporary, made.arguments, made.outputs, made.aliased, made.code];
        let number = *self.by_figures.entry((name.to_owned(), figures)).or_insert(next);
        if number == next {
            let (name, figures) = (name.to_owned(), *made);
            self.executables.push(Executable { name, site: None, n_compiled: 0, executions: 0, figures });
        }
        if let Some(known) = self.executables.get_mut(number) {
            known.n_compiled += 1;
        }
        self.by_address.insert(made.executable, number);
    }

    fn executable_at(&self, address: u64) -> Option<usize> {
        self.by_address.get(&address).copied()
    }

    /// Books an event of buffers in the books of `devices`.
    pub(super) fn event(&mut self, event: &Event, pjrt: &Pjrt, site: SiteId, devices: &mut Devices) {
        match pjrt.action {
            PjrtAction::Made => self.made(event, pjrt, site, books_of(devices, pjrt.device)),
            PjrtAction::Destroyed | PjrtAction::Deleted | PjrtAction::Donated => {
                let Some(gone) = self.live.remove(&pjrt.buffer) else { return };
                let books = books_of(devices, gone.device);
                books.buffers.lose(OwnerId(0), gone.site, gone.bytes);
                if pjrt.action == PjrtAction::Donated {
                    books.donated.add(gone.bytes);
                }
            }
            PjrtAction::Executed => {
                self.n_launches += 1;
                let executable = self.executable_at(pjrt.executable);
                if let Some(known) = executable.and_then(|at| self.executables.get_mut(at)) {
                    known.executions += 1;
                    known.site.get_or_insert(site);
                }
                let books = books_of(devices, pjrt.device);
                books.executions += 1;
                self.needs(event.time, executable, books);
            }
            PjrtAction::Unloaded => {
                self.by_address.remove(&pjrt.executable);
            }
            PjrtAction::ClientGone => {
                for (_, gone) in self.live.drain() {
                    books_of(devices, gone.device).buffers.drop_from(OwnerId(0), gone.site, gone.bytes);
                }
            }
            // It says what was wrong: see [`Buffers::failed`].
            PjrtAction::Failed => {}
        }
    }

    /// Books that memory could not be had.
    pub(super) fn failed(
        &mut self,
        definitions: &dyn Definitions,
        event: &Event,
        (pjrt, site): (&Pjrt, SiteId),
        devices: &mut Devices,
        effect: &mut Effect,
    ) {
        let device = self.device_of(pjrt);
        effect.ran_out = event.out_of_memory().map(|oom| OutOfMemory { device, ..oom });
        let failed = self.unserved(pjrt, devices).unwrap_or(pjrt.executable);
        let books = devices.entry(device).or_default();
        books.physical.remember();
        let tracked = books.physical.now().bytes;
        let books = books.pjrt.get_or_insert_default();
        books.ran_out(PjrtOom {
            time: event.time,
            bytes: Some(pjrt.bytes).filter(|bytes| bytes.0 > 0),
            origin: pjrt.origin,
            executable: self.executable_at(failed),
            buffers: books.buffers.now().bytes,
            tracked,
            said: definitions.text(pjrt.text).unwrap_or_default().to_owned(),
            site,
            stack: event.stack,
            made_before: books.n_made(),
        });
    }

    fn made(&mut self, event: &Event, pjrt: &Pjrt, site: SiteId, books: &mut PjrtBooks) {
        if pjrt.origin == PjrtOrigin::View {
            books.n_views += 1;
            return;
        }
        let (device, bytes, origin) = (pjrt.device, pjrt.bytes, pjrt.origin);
        let (launch, executable) = (self.n_launches, pjrt.executable);
        let new =
            Buffer { device, bytes, origin, site, stack: event.stack, since: event.time, launch, executable };
        if let Some(before) = self.live.insert(pjrt.buffer, new) {
            // Its end was lost.
            books.buffers.lose(OwnerId(0), before.site, before.bytes);
        }
        books.buffers.gain(event.time, OwnerId(0), site, bytes);
        books.made.entry(origin).or_default().add(bytes);
        if origin == PjrtOrigin::Execute {
            self.needs(event.time, self.executable_at(pjrt.executable), books);
        }
    }

    fn needs(&self, time: Nanos, executable: Option<usize>, books: &mut PjrtBooks) {
        let Some(executable) = executable else { return };
        let Some(temporary) = self.executables.get(executable).and_then(|it| it.figures.temporary) else {
            return;
        };
        let need = Need { time, buffers: books.buffers.now().bytes, temporary, executable };
        if books.most.as_ref().is_none_or(|most| need.total() > most.total()) {
            books.most = Some(need);
        }
    }

    /// An execution failed after it was launched: its results are there and never had memory. They are those of the newest of the
    /// last launches that has a result as large as what could not be had. Says which executable it was.
    fn unserved(&mut self, pjrt: &Pjrt, devices: &mut Devices) -> Option<u64> {
        let is_told_again = self.failed_after.replace(self.n_launches) == Some(self.n_launches);
        if pjrt.origin != PjrtOrigin::Unknown || is_told_again || pjrt.bytes.0 == 0 {
            return None;
        }
        let is_recent = |buffer: &&Buffer| {
            // What is asked for may be said in GiB with two digits.
            let is_as_large = buffer.bytes.0.abs_diff(pjrt.bytes.0) <= pjrt.bytes.0 / 100;
            buffer.origin == PjrtOrigin::Execute && is_as_large && self.n_launches - buffer.launch < RECENT
        };
        let newest = self.live.values().filter(is_recent).max_by_key(|buffer| buffer.launch);
        let (launch, executable) = newest.map(|buffer| (buffer.launch, buffer.executable))?;
        self.live.retain(|_, buffer| {
            let is_its = (buffer.launch, buffer.executable) == (launch, executable);
            if is_its {
                let books = books_of(devices, buffer.device);
                books.buffers.lose(OwnerId(0), buffer.site, buffer.bytes);
                books.unserved.add(buffer.bytes);
            }
            !is_its
        });
        Some(executable)
    }

    /// The device that an error without one is about: the only one that has buffers.
    fn device_of(&self, pjrt: &Pjrt) -> i16 {
        let mut devices = self.live.values().map(|buffer| buffer.device);
        match (pjrt.device, devices.next()) {
            (NO_DEVICE, Some(first)) if devices.all(|device| device == first) => first,
            (device, _) => device,
        }
    }
}

impl PjrtBooks {
    fn ran_out(&mut self, oom: PjrtOom) {
        self.n_ooms += 1;
        self.buffers.remember();
        if self.ooms.len() == MAX_OOMS {
            self.ooms.remove(0);
        }
        self.ooms.push(oom);
    }

    /// Buffers ever made.
    #[must_use]
    pub fn n_made(&self) -> u64 {
        self.made.values().fold(0, |sum, held| sum.saturating_add(held.objects))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Ledger;
    use crate::scene::ledger;

    const STEPS: &str = "Alloc addr=a bytes=64M by=libfoo.so,xla_cuda_plugin.so
         compiled handle=f bytes=10M text=jit_step
         buffer addr=p bytes=8M by=init@/job/a.py:2
         buffer addr=d bytes=1M by=load@/job/a.py:3
         launched handle=f by=step@/job/a.py:4
         donated addr=p handle=f
         buffer addr=q bytes=8M handle=f by=step@/job/a.py:4
         destroyed addr=p
         destroyed addr=d";

    fn books(ledger: &Ledger) -> &PjrtBooks {
        ledger.devices().get(&0).and_then(|books| books.pjrt.as_ref()).expect("JAX on the first device")
    }

    #[test]
    fn donated_memory_is_counted_once() {
        let ledger = ledger(STEPS);
        let books = books(&ledger);
        assert_eq!((books.buffers.peak(), books.buffers.now().bytes), (Bytes(9 << 20), Bytes(8 << 20)));
        assert_eq!((books.donated.bytes, books.donated.objects), (Bytes(8 << 20), 1));
        let lines: Vec<_> = books.buffers.sites().filter(|part| part.now.0 > 0).collect();
        assert_eq!(lines.len(), 1);
        assert_eq!(ledger.sites.site_name(lines[0].id), "step (/job/a.py:4)");
    }

    #[test]
    fn temporaries_stand_beside_the_buffers_that_were_there() {
        let ledger = ledger(STEPS);
        let most = books(&ledger).most.clone().expect("an execution");
        assert_eq!((most.buffers, most.temporary), (Bytes(9 << 20), Bytes(10 << 20)));
        let executable = &ledger.executables()[most.executable];
        assert_eq!((&*executable.name, executable.executions), ("jit step", 1));
    }

    #[test]
    fn an_error_without_a_device_is_of_the_only_one_that_has_buffers() {
        let scene = format!("{STEPS}\n jax_oom dev=-1 bytes=1G handle=f text=no_memory by=step@/job/a.py:4");
        let ledger = ledger(&scene);
        let oom = books(&ledger).ooms.last().expect("an error");
        assert_eq!((oom.bytes, oom.buffers, &*oom.said), (Some(Bytes(1 << 30)), Bytes(8 << 20), "no memory"));
    }

    #[test]
    fn results_of_an_execution_that_failed_later_never_had_memory() {
        let scene = format!(
            "{STEPS}
             compiled handle=g bytes=0 text=jit_ones
             launched handle=g by=ones@/job/a.py:7
             buffer addr=r bytes=1G handle=g by=ones@/job/a.py:7
             jax_oom dev=-1 bytes=1G by=wait@/job/a.py:8
             jax_oom dev=-1 bytes=1G by=wait@/job/a.py:8"
        );
        let ledger = ledger(&scene);
        let books = books(&ledger);
        assert_eq!((books.buffers.now().bytes, books.unserved.bytes), (Bytes(8 << 20), Bytes(1 << 30)));
        let oom = &books.ooms[0];
        assert_eq!((oom.buffers, oom.executable), (Bytes(8 << 20), Some(1)));
    }

    #[test]
    fn what_jax_asks_the_driver_again_is_not_out_of_memory() {
        let refused = "Alloc addr=0 bytes=1G result=2 by=xla_cuda_plugin.so";
        assert!(ledger(refused).refusals[0].is_final);
        assert!(!ledger(&format!("{STEPS}\n{refused}")).refusals[0].is_final);
    }

    #[test]
    fn a_client_takes_its_buffers_along() {
        let mut buffers = Buffers::default();
        let mut devices = Devices::new();
        let pjrt = |action, buffer, bytes| Pjrt {
            action,
            origin: PjrtOrigin::FromHost,
            device: 1,
            buffer,
            executable: 0,
            bytes: Bytes(bytes),
            code: 0,
            text: gputrace_schemas::event::TextId(0),
        };
        for event in [
            pjrt(PjrtAction::Made, 7, 100),
            pjrt(PjrtAction::Destroyed, 8, 0),
            pjrt(PjrtAction::ClientGone, 9, 0),
        ] {
            let of = Event {
                time: Nanos(1),
                thread: gputrace_schemas::event::ThreadId(0),
                stack: StackId(0),
                kind: gputrace_schemas::event::EventKind::Pjrt(event),
            };
            buffers.event(&of, &event, SiteId(0), &mut devices);
        }
        let books = devices[&1].pjrt.as_ref().expect("books");
        assert_eq!((books.buffers.now().bytes, books.buffers.live().bytes), (Bytes(0), Bytes(100)));
    }
}
