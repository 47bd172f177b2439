//! The contexts that a process held: each costs hundreds of MiB of its device before anything is allocated in it.

use gputrace_schemas::event::{Action, Call, Event, Nanos, StackId};
use rustc_hash::FxHashMap;

use super::sites::{OwnerId, SiteId};

/// A context of the process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Context {
    /// On which device.
    pub device: i16,
    /// It is the device's primary one, which every CUDA runtime uses.
    pub is_primary: bool,
    /// Since when.
    pub since: Nanos,
    /// Until when; `None` if it was there at the end.
    pub until: Option<Nanos>,
    /// Its creator.
    pub owner: OwnerId,
    /// From where.
    pub site: SiteId,
    /// From where, in full.
    pub stack: StackId,
    handle: u64,
}

/// All contexts, in the order in which they were made.
#[derive(Debug, Default)]
pub(super) struct Contexts {
    list: Vec<Context>,
    retained: FxHashMap<i16, u64>,
}

impl Contexts {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Context> {
        self.list.iter()
    }

    /// A call that succeeded.
    pub(super) fn call(&mut self, event: &Event, call: &Call, owner: OwnerId, site: SiteId) {
        let made = |is_primary| Context {
            device: call.device,
            is_primary,
            since: event.time,
            until: None,
            owner,
            site,
            stack: event.stack,
            handle: call.handle,
        };
        match call.action {
            Action::ContextCreate => self.list.push(made(false)),
            Action::ContextDestroy => {
                self.end(event.time, |context| !context.is_primary && context.handle == call.handle);
            }
            Action::PrimaryRetain => {
                let retained = self.retained.entry(call.device).or_default();
                *retained += 1;
                if *retained == 1 {
                    self.list.push(made(true));
                }
            }
            Action::PrimaryRelease => {
                let retained = self.retained.entry(call.device).or_default();
                *retained = retained.saturating_sub(1);
                if *retained == 0 {
                    self.end_primary(event.time, call.device);
                }
            }
            // It is there again as soon as somebody uses it, without another call that says so.
            Action::PrimaryReset => {}
            _ => {}
        }
    }

    fn end_primary(&mut self, time: Nanos, device: i16) {
        self.end(time, |context| context.is_primary && context.device == device);
    }

    fn end(&mut self, time: Nanos, is_it: impl Fn(&Context) -> bool) {
        let found = self.list.iter_mut().rev().find(|context| context.until.is_none() && is_it(context));
        if let Some(context) = found {
            context.until = Some(time);
        }
    }
}
