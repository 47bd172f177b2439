//! What one process gives to others and takes of them, as its trace shows it; [`super::shared`] brings both ends together.

use gputrace_schemas::event::{Action, Bytes, Call};
use gputrace_trace::ledger::Ledger;
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use super::places::PlaceId;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: u64 = 1;

/// What a process shares with others.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Shares {
    pub(super) given: Vec<Given>,
    pub(super) taken: Vec<Taken>,
    /// What was imported, by handle: index in `taken`.
    #[serde(skip)]
    handles: FxHashMap<u64, usize>,
}

/// What makes a piece known to both ends.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Deserialize, Serialize)]
pub(super) enum Token {
    /// Hash of the handle.
    Hash(u64),
    /// Nothing does.
    Descriptor,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Given {
    pub(super) token: Token,
    /// Which of the process's objects.
    pub(super) serial: u64,
    pub(super) device: i16,
    pub(super) bytes: Bytes,
    pub(super) place: PlaceId,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Taken {
    pub(super) token: Token,
    /// Mapped so far.
    pub(super) mapped: Bytes,
}

impl Shares {
    /// Books a call that succeeded, made from this place; the ledger has booked it.
    pub(super) fn call(&mut self, ledger: &Ledger, call: &Call, place: impl FnOnce() -> PlaceId) {
        match call.action {
            Action::IpcGet | Action::Export => {
                let object = match call.action {
                    Action::IpcGet => ledger.object_at(call.addr),
                    _ => ledger.object_of(call.handle),
                };
                let (Some(object), token) = (object, token_of(call)) else { return };
                // The same is given to each that asks.
                if !self.given.iter().any(|given| (given.token, given.serial) == (token, object.serial)) {
                    let (serial, device, bytes) = (object.serial, object.device, object.bytes);
                    self.given.push(Given { token, serial, device, bytes, place: place() });
                }
            }
            Action::IpcOpen => self.taken.push(Taken { token: token_of(call), mapped: Bytes(0) }),
            Action::Import => {
                self.handles.insert(call.handle, self.taken.len());
                self.taken.push(Taken { token: token_of(call), mapped: Bytes(0) });
            }
            Action::Map => {
                if let Some(taken) = self.handles.get(&call.handle).and_then(|at| self.taken.get_mut(*at)) {
                    taken.mapped = taken.mapped.max(call.bytes);
                }
            }
            Action::Release => _ = self.handles.remove(&call.handle),
            _ => {}
        }
    }
}

fn token_of(call: &Call) -> Token {
    match call.action {
        Action::IpcGet | Action::IpcOpen => Token::Hash(call.handle),
        // The hash of a fabric handle; older traces have none.
        _ if call.extra != DESCRIPTOR && call.addr != 0 => Token::Hash(call.addr),
        _ => Token::Descriptor,
    }
}
