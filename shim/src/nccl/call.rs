//! One call into NCCL: a record before it, a record after it.

use super::comms::{self, Slot};
use super::timing::{self, Timing};
use super::{Comm, threads};
use crate::callsite;
use crate::hooks::events;
use crate::mark;
use crate::probe::Word;
use crate::session::{self, Start};
use crate::tls::{self, Tls};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use gputrace_ring::clock::Ticks;
use gputrace_ring::record::{NcclEnter, NcclExit, NcclOp, UNKNOWN};

/// Rows of NCCL have these numbers among the functions of a trace.
pub(crate) const FIRST_API: u16 = 1024;
/// `Tls::group_comm` of a group with calls for several communicators.
const SEVERAL: u32 = u32::MAX;
/// `ncclSuccess` and `ncclInProgress`, nccl.h.
const SUCCESS: i32 = 0;
pub(super) const IN_PROGRESS: i32 = 7;
/// Calls of one group whose numbers can be given back when it is only simulated.
pub(crate) const MOST_GROUPED: usize = 1024;

static CALLS: AtomicU64 = AtomicU64::new(0);
static GROUPS: AtomicU32 = AtomicU32::new(0);

/// Which row is called, and in which bank.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) row: u16,
    pub(crate) bank: usize,
}

/// A call in the making. Each method fills one field.
pub(crate) struct Draft {
    pub(crate) enter: NcclEnter,
    counter: Option<&'static AtomicU64>,
    charged: u32,
}

/// Calls a function of NCCL and records it. `value` is what it gave out, asked for after success.
#[inline]
pub(crate) fn around(
    start: Start,
    row: u16,
    op: NcclOp,
    run: impl FnOnce() -> i32,
    fill: impl FnOnce(&mut Draft),
    value: impl FnOnce() -> u64,
) -> i32 {
    let (tls, mark) = (tls::here(), Mark::new());
    if inside(tls, mark.top()) != 0 || session::is_off() {
        return run();
    }
    if start == Start::OnlyIfLive && !session::is_live() {
        return run();
    }
    let mut draft = Draft::new(row, op, tls);
    fill(&mut draft);
    draft.number();
    let running = draft.begin(start, tls, &mark);
    let result = run();
    running.end(tls, result, || if is_done(result) { value() } else { 0 });
    result
}

/// No hook's frame has so many bytes beside its mark, nor one of `pthread_create` or of the driver down to its record.
const ROOM: usize = 3072;

/// The thread is inside of NCCL.
pub(crate) type Mark = mark::Mark<ROOM>;

/// The call into NCCL that whoever stands at `top` is inside of, see [`mark::Mark::top`]; 0 none. One that was left past its
/// hook is over.
#[inline]
pub(crate) fn inside(tls: &Tls, top: usize) -> u64 {
    let call = tls.nccl_call.get();
    if call == 0 || Mark::is_around(tls, tls.nccl_mark.get(), top) {
        return call;
    }
    tls.nccl_call.set(0);
    threads::close(call);
    0
}

/// A call that has begun.
pub(crate) struct Running<'a> {
    mark: &'a Mark,
    call: u64,
    began: Ticks,
    counter: Option<&'static AtomicU64>,
    op: NcclOp,
    open: Option<threads::Open>,
    timing: Timing,
}

impl Running<'_> {
    /// After the real call.
    pub(crate) fn end(self, tls: &Tls, result: i32, value: impl FnOnce() -> u64) {
        let end = session::now();
        let timed = timing::end(self.timing, result);
        // NCCL's getters, if any are asked, are still inside the call.
        let value = value();
        drop(self.open);
        tls.nccl_call.set(0);
        self.mark.take_away();
        after(tls, self.op, result, self.counter);
        if let Some(mut lane) = session::lane(Start::OnlyIfLive) {
            let duration = end.0.saturating_sub(self.began.0);
            let exit = NcclExit { call: self.call, value, duration, result, timed: timed as u32 };
            lane.producer().push(end, 0, &exit);
        }
    }
}

/// Neither failed nor unknown.
pub(crate) fn is_done(result: i32) -> bool {
    matches!(result, SUCCESS | IN_PROGRESS)
}

/// Keeps the thread's groups and the communicators' numbers true.
fn after(tls: &Tls, op: NcclOp, result: i32, counter: Option<&'static AtomicU64>) {
    let depth = tls.group_depth.get();
    match op {
        NcclOp::GroupStart if result == SUCCESS => tls.group_depth.set(depth + 1),
        NcclOp::GroupEnd | NcclOp::GroupSimulateEnd => {
            tls.group_depth.set(depth.saturating_sub(1));
            if depth <= 1 {
                close_group(tls, op, result);
            }
        }
        _ => {}
    }
    let Some(counter) = counter else { return };
    if !is_done(result) {
        counter.fetch_sub(1, Ordering::Relaxed);
    } else if tls.group.get() != 0
        && let Some(mut lane) = session::lane(Start::OnlyIfLive)
    {
        lane.state().grouped.push(counter);
    }
}

fn close_group(tls: &Tls, op: NcclOp, result: i32) {
    tls.group.set(0);
    tls.group_comm.set(0);
    comms::resolve_grouped(result);
    if let Some(mut lane) = session::lane(Start::OnlyIfLive) {
        let simulated = op == NcclOp::GroupSimulateEnd && result == SUCCESS;
        lane.state().grouped.close(simulated);
    }
}

/// Numbers that the calls of an open group took.
pub(crate) struct Grouped {
    n: usize,
    counters: [Option<&'static AtomicU64>; MOST_GROUPED],
}

impl Grouped {
    fn push(&mut self, counter: &'static AtomicU64) {
        if let Some(slot) = self.counters.get_mut(self.n) {
            *slot = Some(counter);
            self.n += 1;
        }
    }

    fn close(&mut self, simulated: bool) {
        if simulated {
            for counter in self.counters.iter().take(self.n).flatten() {
                counter.fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.n = 0;
    }
}

impl Draft {
    pub(crate) fn new(row: u16, op: NcclOp, tls: &Tls) -> Draft {
        let depth = tls.group_depth.get();
        if op == NcclOp::GroupStart && depth == 0 {
            tls.group.set(GROUPS.fetch_add(1, Ordering::Relaxed) + 1);
        }
        let group_comm = tls.group_comm.get();
        let ends_group = matches!(op, NcclOp::GroupEnd | NcclOp::GroupSimulateEnd);
        let enter = NcclEnter {
            api: FIRST_API + row,
            op: op as u8,
            group_depth: depth,
            call: CALLS.fetch_add(1, Ordering::Relaxed) + 1,
            group: tls.group.get(),
            sequence: UNKNOWN,
            datatype: -1,
            redop: -1,
            peer: -1,
            ..NcclEnter::default()
        };
        let charged = if ends_group && group_comm != SEVERAL { group_comm } else { 0 };
        Draft { enter, counter: None, charged }
    }

    /// The communicator that the call is for.
    pub(crate) fn comm(&mut self, handle: Comm) {
        self.slot(comms::of(handle));
    }

    pub(crate) fn slot(&mut self, slot: Option<&'static Slot>) {
        let Some(slot) = slot else { return };
        self.enter.comm = slot.id();
        self.charge(slot.id());
        let op = NcclOp::from_raw(self.enter.op);
        self.counter = op.and_then(|op| slot.counter(op, self.enter.peer));
    }

    /// The communicator that memory is allocated for meanwhile.
    pub(crate) fn charge(&mut self, comm: u32) {
        self.charged = comm;
        let tls = tls::here();
        if tls.group.get() != 0 {
            let joined = match tls.group_comm.get() {
                0 => comm,
                known if known == comm => known,
                _ => SEVERAL,
            };
            tls.group_comm.set(joined);
        }
    }

    /// Address that is read.
    pub(crate) fn send(&mut self, value: impl Word) {
        self.enter.send = value.word();
    }

    /// Address that is written.
    pub(crate) fn receive(&mut self, value: impl Word) {
        self.enter.receive = value.word();
    }

    /// Elements, bytes or a number.
    pub(crate) fn count(&mut self, value: impl Word) {
        self.enter.count = value.word();
    }

    /// `ncclDataType_t`.
    pub(crate) fn datatype(&mut self, value: i32) {
        self.enter.datatype = value;
    }

    /// `ncclRedOp_t`; after the communicator.
    pub(crate) fn redop(&mut self, value: i32) {
        self.enter.redop = value;
        self.enter.redop_call = comms::redop_call(self.enter.comm, value);
    }

    /// Root, peer or rank; before the communicator.
    pub(crate) fn peer(&mut self, value: i32) {
        self.enter.peer = value;
    }

    /// Stream as given.
    pub(crate) fn stream(&mut self, value: impl Word) {
        self.enter.stream = value.word();
    }

    /// Window or registration.
    pub(crate) fn handle(&mut self, value: impl Word) {
        self.enter.handle = value.word();
    }

    /// A second number.
    pub(crate) fn extra(&mut self, value: impl Word) {
        self.enter.extra = value.word();
    }

    /// Takes the call's number on its communicator.
    pub(crate) fn number(&mut self) {
        if let Some(counter) = self.counter {
            self.enter.sequence = counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts the call among those of another communicator, its parent.
    pub(crate) fn count_on(&mut self, counter: Option<&'static AtomicU64>) {
        self.counter = counter;
        self.number();
    }

    /// Sends the record. From here on the thread is inside of NCCL.
    pub(crate) fn begin<'a>(mut self, start: Start, tls: &Tls, mark: &'a Mark) -> Running<'a> {
        if events::is_captured(self.enter.stream) {
            self.enter.marks |= NcclEnter::CAPTURED;
        }
        let at = session::now();
        if let Some(mut lane) = session::lane(start) {
            self.enter.stack = callsite::capture(&mut lane, callsite::Of::Nccl);
            lane.producer().push(at, 0, &self.enter);
        }
        let timing = timing::begin(&self.enter);
        let began = session::now();
        let (call, comm) = (self.enter.call, self.charged);
        tls.nccl_mark.set(mark.put(tls));
        tls.nccl_call.set(call);
        tls.nccl_comm.set(comm);
        let op = NcclOp::from_raw(self.enter.op).unwrap_or(NcclOp::GroupStart);
        Running { mark, call, began, counter: self.counter, op, open: threads::Open::new(comm, call), timing }
    }
}
