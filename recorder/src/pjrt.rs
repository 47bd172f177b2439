//! Records of PJRT's buffers and executables to what a trace says.

use gputrace_ring::record::{self, PjrtAction as RingAction, PjrtOrigin as RingOrigin, unpack_device};
use gputrace_schemas::event::{Bytes, Pjrt, PjrtAction, PjrtExecutable, PjrtOrigin, TextId};

pub(crate) fn buffer(of: &record::Pjrt, action: RingAction, origin: RingOrigin, said: &str) -> Pjrt {
    let (device, mut bytes) = unpack_device(of.device_bytes);
    if action == RingAction::Failed {
        bytes = asked_for(said).unwrap_or(0);
    }
    Pjrt {
        action: self::action(action),
        origin: self::origin(origin),
        device: device.into(),
        buffer: of.buffer,
        executable: of.executable,
        bytes: Bytes(bytes),
        code: of.code,
        text: TextId(0),
    }
}

/// What an error of XLA's allocators says that was asked for: `Out of memory while trying to allocate 1024 bytes`, `Failed to
/// allocate request for 1.0GiB (1073741824B)`, or `... to allocate 1.00GiB` (xla/tsl/framework/bfc_allocator.cc,
/// xla/stream_executor).
fn asked_for(said: &str) -> Option<u64> {
    let words =
        || said.split(|c: char| c.is_whitespace() || "(),:;".contains(c)).filter(|word| !word.is_empty());
    let exact = words().zip(words().skip(1)).find_map(|(number, unit)| {
        (unit.trim_end_matches('.') == "bytes").then(|| number.parse().ok()).flatten()
    });
    let exact = exact.or_else(|| words().find_map(|word| word.strip_suffix('B')?.parse().ok()));
    let rounded = |word: &str| {
        let word = word.trim_end_matches('.');
        let units = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)];
        let (number, shift) =
            units.iter().find_map(|(unit, shift)| Some((word.strip_suffix(unit)?, shift)))?;
        let number: f64 = number.parse().ok()?;
        Some((number * (1u64 << shift) as f64) as u64)
    };
    exact.or_else(|| words().find_map(rounded))
}

pub(crate) fn executable(of: &record::PjrtExecutable, name: TextId) -> PjrtExecutable {
    let known = |bytes| (bytes != record::UNKNOWN).then_some(Bytes(bytes));
    PjrtExecutable {
        executable: of.executable,
        name,
        temporary: known(of.temporary),
        arguments: known(of.arguments),
        outputs: known(of.outputs),
        aliased: known(of.aliased),
        code: known(of.code),
    }
}

fn action(of: RingAction) -> PjrtAction {
    match of {
        RingAction::Made => PjrtAction::Made,
        RingAction::Destroyed => PjrtAction::Destroyed,
        RingAction::Deleted => PjrtAction::Deleted,
        RingAction::Donated => PjrtAction::Donated,
        RingAction::Failed => PjrtAction::Failed,
        RingAction::Executed => PjrtAction::Executed,
        RingAction::Unloaded => PjrtAction::Unloaded,
        RingAction::ClientGone => PjrtAction::ClientGone,
    }
}

fn origin(of: RingOrigin) -> PjrtOrigin {
    match of {
        RingOrigin::Unknown => PjrtOrigin::Unknown,
        RingOrigin::FromHost => PjrtOrigin::FromHost,
        RingOrigin::Uninitialized => PjrtOrigin::Uninitialized,
        RingOrigin::View => PjrtOrigin::View,
        RingOrigin::Execute => PjrtOrigin::Execute,
        RingOrigin::Copy => PjrtOrigin::Copy,
        RingOrigin::Transfer => PjrtOrigin::Transfer,
        RingOrigin::Dependency => PjrtOrigin::Dependency,
        RingOrigin::Compile => PjrtOrigin::Compile,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_was_asked_for() {
        let said = [
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes.",
            "Failed to allocate request for 64.0GiB (68719476736B) on device ordinal 0",
            "Out of memory while trying to allocate 64.00GiB.",
            "Out of memory",
        ];
        let asked = said.map(asked_for);
        assert_eq!(asked, [Some(64 << 30), Some(64 << 30), Some(64 << 30), None]);
    }

    #[test]
    fn the_ring_and_the_trace_number_them_alike() {
        for ring in RingAction::ALL {
            assert_eq!(*ring as u8, action(*ring) as u8, "{ring:?}");
        }
        for ring in RingOrigin::ALL {
            assert_eq!(*ring as u8, origin(*ring) as u8, "{ring:?}");
        }
        assert_eq!(RingAction::ALL.len(), PjrtAction::ALL.len());
        assert_eq!(RingOrigin::ALL.len(), PjrtOrigin::ALL.len());
    }
}
