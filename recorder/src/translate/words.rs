//! Payloads of records in the words of the trace: each function makes one from one, and remembers nothing.

use crate::pjrt::asked_for;
use crate::process::gpu_uuid;
use gputrace_ring::record::{
    self, Action as RingAction, Call as RingCall, MarkAction as RingMarkAction, NcclOp as RingNcclOp,
    NcclTimed as RingNcclTimed, PjrtAction as RingPjrtAction, PjrtOrigin as RingPjrtOrigin,
    WaitAction as RingWaitAction, unpack_device,
};
use gputrace_schemas::event::{
    Action, ApiId, BlockAlloc, BlockFree, BlockOom, Bytes, Call, CommConfig, CommId, Communicator, Device,
    HOST, Mark, MarkAction, NO_DEVICE, Nanos, NcclEnter, NcclExit, NcclOp, NcclTimed, NcclTiming, Pjrt,
    PjrtAction, PjrtExecutable, PjrtOrigin, TextId, Wait, WaitAction,
};

pub(super) fn call(
    call: &RingCall,
    api: ApiId,
    action: RingAction,
    result: Option<i32>,
    duration: Nanos,
) -> Call {
    let has = |flag| call.flags & flag != 0;
    Call {
        api,
        action: self::action(action),
        device: if has(RingCall::HOST) { HOST } else { call.device.into() },
        result,
        addr: call.addr,
        bytes: Bytes(call.bytes),
        stream: call.stream,
        handle: call.handle,
        extra: call.extra,
        duration,
        captured: has(RingCall::CAPTURED),
        in_allocate: has(RingCall::IN_ALLOCATE),
        comm: CommId(call.comm),
        nccl_call: call.nccl_call,
        nccl_thread: has(RingCall::NCCL_THREAD),
    }
}

fn known(number: u64) -> Option<u64> {
    (number != record::UNKNOWN).then_some(number)
}

pub(super) fn block_alloc(alloc: &record::BlockAlloc) -> BlockAlloc {
    let (device, bytes) = unpack_device(alloc.device_bytes);
    BlockAlloc {
        device: device.into(),
        addr: alloc.addr,
        bytes: Bytes(bytes),
        requested: known(alloc.requested).map(Bytes),
        stream: known(alloc.stream),
        allocated: Bytes(alloc.allocated),
        reserved: Bytes(alloc.reserved),
    }
}

pub(super) fn block_free(free: &record::BlockFree, flags: u8) -> BlockFree {
    let (device, bytes) = unpack_device(free.device_bytes);
    BlockFree {
        device: device.into(),
        addr: free.addr,
        bytes: Bytes(bytes),
        allocated: Bytes(free.allocated),
        reserved: Bytes(free.reserved),
        collecting: flags & record::BlockFree::COLLECTING != 0,
    }
}

pub(super) fn block_oom(oom: &record::BlockOom) -> BlockOom {
    let (device, bytes) = unpack_device(oom.device_bytes);
    BlockOom {
        device: device.into(),
        bytes: Bytes(bytes),
        requested: known(oom.requested).map(Bytes),
        stream: known(oom.stream),
        allocated: Bytes(oom.allocated),
        reserved: Bytes(oom.reserved),
    }
}

fn mark_action(action: RingMarkAction) -> MarkAction {
    match action {
        RingMarkAction::Push => MarkAction::Push,
        RingMarkAction::Pop => MarkAction::Pop,
        RingMarkAction::Start => MarkAction::Start,
        RingMarkAction::End => MarkAction::End,
        RingMarkAction::Mark => MarkAction::Mark,
        RingMarkAction::NameThread => MarkAction::NameThread,
    }
}

pub(super) fn wait(wait: &record::Wait, action: RingWaitAction) -> Wait {
    let action = match action {
        RingWaitAction::Record => WaitAction::Record,
        RingWaitAction::Query => WaitAction::Query,
        RingWaitAction::Synchronize => WaitAction::Synchronize,
    };
    Wait { event: wait.event, stream: wait.stream, action, result: wait.result }
}

pub(super) fn nccl_enter(enter: &record::NcclEnter, api: ApiId, op: RingNcclOp) -> NcclEnter {
    NcclEnter {
        api,
        op: nccl_op(op),
        call: enter.call,
        comm: CommId(enter.comm),
        sequence: enter.sequence,
        group: enter.group,
        group_depth: enter.group_depth,
        count: enter.count,
        datatype: enter.datatype,
        redop: enter.redop,
        redop_call: enter.redop_call,
        peer: enter.peer,
        send: enter.send,
        receive: enter.receive,
        stream: enter.stream,
        handle: enter.handle,
        extra: enter.extra,
        captured: enter.marks & record::NcclEnter::CAPTURED != 0,
    }
}

pub(super) fn nccl_timing(timing: &record::NcclTiming) -> NcclTiming {
    NcclTiming {
        call: timing.call,
        comm: CommId(timing.comm),
        timeline: timing.timeline,
        stream: timing.stream,
        start: Nanos(timing.start),
        duration: Nanos(timing.duration),
    }
}

pub(super) fn pjrt_executable(of: &record::PjrtExecutable, name: TextId) -> PjrtExecutable {
    let [temporary, arguments, outputs, aliased, code] =
        [of.temporary, of.arguments, of.outputs, of.aliased, of.code].map(|bytes| known(bytes).map(Bytes));
    PjrtExecutable { executable: of.executable, name, temporary, arguments, outputs, aliased, code }
}

pub(super) fn mark(mark: &record::Mark, action: RingMarkAction, (text, domain): (TextId, TextId)) -> Mark {
    Mark { action: mark_action(action), text, domain, range: mark.range, category: mark.category }
}

pub(super) fn nccl_exit(exit: &record::NcclExit, timed: RingNcclTimed, duration: Nanos) -> NcclExit {
    let timed = nccl_timed(timed);
    NcclExit { call: exit.call, result: exit.result, value: exit.value, duration, timed }
}

/// `said` is the record's text, where it is known: an error names the amount that a program asked for.
pub(super) fn pjrt(
    of: &record::Pjrt,
    (action, origin): (RingPjrtAction, RingPjrtOrigin),
    (text, said): (TextId, &str),
) -> Pjrt {
    let (device, bytes) = unpack_device(of.device_bytes);
    let asked = (action == RingPjrtAction::Failed).then(|| asked_for(said)).flatten();
    Pjrt {
        action: pjrt_action(action),
        origin: pjrt_origin(origin),
        device: device.into(),
        buffer: of.buffer,
        executable: of.executable,
        bytes: Bytes(asked.unwrap_or(bytes)),
        code: of.code,
        text,
    }
}

pub(super) fn device(ordinal: u32, name: String, uuid: [u8; 16], total: u64) -> Device {
    let uuid = gpu_uuid(&name, uuid);
    Device { ordinal: i16::try_from(ordinal).unwrap_or(NO_DEVICE), name, uuid, total: Bytes(total) }
}

/// What was not asked for is no word of the trace.
fn nccl_timed(timed: RingNcclTimed) -> Option<NcclTimed> {
    match timed {
        RingNcclTimed::No => None,
        RingNcclTimed::Enqueued => Some(NcclTimed::Enqueued),
        RingNcclTimed::Capture => Some(NcclTimed::Capture),
        RingNcclTimed::NoEvents => Some(NcclTimed::NoEvents),
        RingNcclTimed::InProgress => Some(NcclTimed::InProgress),
        RingNcclTimed::Refused => Some(NcclTimed::Refused),
    }
}

pub(super) fn communicator(of: &record::Communicator, name: String, net_name: String) -> Communicator {
    let has = |mark| of.marks & mark != 0;
    let [
        blocking,
        cga_cluster_size,
        min_ctas,
        max_ctas,
        split_share,
        traffic_class,
        nvls_ctas,
        max_p2p_peers,
    ] = of.config.map(|number| Some(number).filter(|number| *number != i32::MIN));
    Communicator {
        origin: u8::try_from(of.origin).ok().and_then(RingNcclOp::from_raw).map(nccl_op),
        call: of.call,
        handle: of.handle,
        unique_id: of.unique_id,
        comm_hash: has(record::Communicator::HAS_HASH).then_some(of.comm_hash),
        rank: u32::try_from(of.rank).ok(),
        n_ranks: u32::try_from(of.n_ranks).ok(),
        device: of.device,
        parent: CommId(of.parent),
        ordinal: of.ordinal,
        color: has(record::Communicator::HAS_COLOR).then_some(of.color),
        key: has(record::Communicator::HAS_COLOR).then_some(of.key),
        version: of.version,
        config: CommConfig {
            name,
            net_name,
            blocking,
            cga_cluster_size,
            min_ctas,
            max_ctas,
            split_share,
            traffic_class,
            nvls_ctas,
            max_p2p_peers,
        },
    }
}

/// As with [`action`].
macro_rules! same_words {
    ($name:ident: $ring:ident -> $trace:ident { $( $word:ident )* }) => {
        fn $name(of: $ring) -> $trace {
            match of { $( $ring::$word => $trace::$word, )* }
        }
    };
}

same_words! { pjrt_action: RingPjrtAction -> PjrtAction { Made Destroyed Deleted Donated Failed Executed Unloaded ClientGone } }
same_words! { pjrt_origin: RingPjrtOrigin -> PjrtOrigin { Unknown FromHost Uninitialized View Execute Copy Transfer Dependency Compile } }

/// One line an operation, as with [`action`].
macro_rules! nccl_ops {
    ($( $op:ident )*) => {
        fn nccl_op(of: RingNcclOp) -> NcclOp {
            match of { $( RingNcclOp::$op => NcclOp::$op, )* }
        }
    };
}

nccl_ops! {
    AllReduce Broadcast Reduce AllGather ReduceScatter AlltoAll Gather Scatter Send
    Receive PutSignal Signal WaitSignal GroupStart GroupEnd GroupSimulateEnd UniqueId CommInit
    CommInitAll CommSplit CommShrink CommGrow CommFinalize CommDestroy CommAbort CommRevoke
    CommSuspend CommResume AsyncError MemAlloc MemFree Register Deregister WindowRegister
    WindowDeregister RedOpCreate RedOpDestroy DevCommCreate DevCommDestroy
}

/// One line an action: a new one in the ring does not compile until the trace has a word for it.
macro_rules! actions {
    ($( $action:ident )*) => {
        fn action(of: RingAction) -> Action {
            match of { $( RingAction::$action => Action::$action, )* }
        }
    };
}

actions! {
    Alloc Free AllocAsync FreeAsync AllocManaged AllocHost FreeHost HostRegister HostUnregister Reserve Unreserve
    Create Release Retain Map Unmap SetAccess Export Import PoolCreate PoolDestroy PoolTrim PoolGet PoolSet IpcGet
    IpcOpen IpcClose ArrayCreate ArrayDestroy GraphAlloc GraphFree ContextCreate ContextDestroy PrimaryRetain
    PrimaryRelease PrimaryReset MemInfo MulticastCreate CaptureBegin CaptureEnd ImportPointer PoolShare Init
    PoolSelect PoolOf GraphInstantiate GraphLaunch GraphExecDestroy GraphDestroy GraphMemTrim GraphMemGet CodeLoad
    CodeUnload FunctionLoad LimitSet PeerEnable TorchPoolBegin TorchPoolEnd TorchPoolRelease TorchPoolCreate
    TorchPoolUseOnOom TorchPoolNoSplit TorchTrim HeapAlloc HeapFree Checkpoint
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_action_of_the_ring_has_the_same_number_in_the_trace() {
        for ring in RingAction::ALL {
            assert_eq!(*ring as u8, action(*ring) as u8, "{ring:?}");
        }
        assert_eq!(RingAction::ALL.len(), Action::ALL.len());
        for ring in RingNcclOp::ALL {
            assert_eq!(*ring as u8, nccl_op(*ring) as u8, "{ring:?}");
        }
        assert_eq!(RingNcclOp::ALL.len(), NcclOp::ALL.len());
        for ring in RingPjrtAction::ALL {
            assert_eq!(*ring as u8, pjrt_action(*ring) as u8, "{ring:?}");
        }
        for ring in RingPjrtOrigin::ALL {
            assert_eq!(*ring as u8, pjrt_origin(*ring) as u8, "{ring:?}");
        }
        for ring in RingNcclTimed::ALL {
            assert_eq!(*ring as u32, nccl_timed(*ring).map_or(0, |timed| timed as u32), "{ring:?}");
        }
    }
}
