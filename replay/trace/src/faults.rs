//! Faults of GPUs in words.

use gputrace_schemas::event::{FaultKind, GpuFault, Nanos, Process};

use crate::words::count;

/// XID errors and what they mean, in short. Source: NVIDIA's catalog of XIDs (docs.nvidia.com/deploy/xid-errors).
const XIDS: [(u64, &str); 39] = [
    (8, "the GPU stopped processing"),
    (11, "invalid or corrupted push buffer stream"),
    (13, "graphics engine exception: often an illegal address or instruction of a kernel"),
    (31, "GPU memory page fault: a kernel used an address without permission"),
    (32, "invalid or corrupted push buffer stream"),
    (38, "driver firmware error"),
    (43, "GPU stopped processing: an application fault ended its channel"),
    (44, "graphics engine fault during a context switch"),
    (45, "preemptive cleanup: the channels of a process were removed, mostly after another error or a kill"),
    (46, "the GPU stopped processing"),
    (48, "double-bit ECC error"),
    (54, "auxiliary power is not connected"),
    (61, "internal microcontroller breakpoint or warning"),
    (62, "internal microcontroller halt"),
    (63, "a page was retired or a row remapping was recorded"),
    (64, "recording a page retirement or a row remapping failed"),
    (66, "illegal access by the driver"),
    (68, "video processor exception"),
    (69, "graphics engine class error"),
    (74, "NVLink error"),
    (78, "vGPU start error"),
    (79, "GPU has fallen off the bus"),
    (92, "high rate of single-bit ECC errors"),
    (94, "contained memory error: only the process that used the memory is affected"),
    (95, "uncontained memory error: the GPU needs a reset"),
    (109, "context switch timeout"),
    (110, "security fault"),
    (119, "GSP firmware timeout: its processor did not answer the driver"),
    (120, "GSP firmware error"),
    (121, "error of the chip-to-chip link (C2C)"),
    (122, "SPI PMU RPC read failure"),
    (123, "SPI PMU RPC write failure"),
    (136, "link training failed"),
    (137, "a kernel accessed memory of another GPU over NVLink without permission"),
    (140, "unrecovered ECC error"),
    (143, "GPU initialisation failure"),
    (145, "NVLink RLW error"),
    (149, "NVLink NETIR error"),
    (154, "the recovery action that the GPU needs has changed"),
];

/// XIDs that follow from others, or from the end of any process on the card: cleanups, and records of what was repaired.
const FOLLOW_UPS: [u64; 3] = [45, 63, 154];
/// XIDs that mostly come of what the program does.
const BY_PROGRAM: [u64; 6] = [13, 31, 43, 68, 69, 137];

/// Whether it may end a process or make its results wrong.
#[must_use]
pub fn is_critical(fault: &GpuFault) -> bool {
    match fault.kind {
        FaultKind::Xid => !FOLLOW_UPS.contains(&fault.value),
        FaultKind::Lost | FaultKind::Uncorrected | FaultKind::RemapFailed => true,
        FaultKind::RowsRemapped | FaultKind::RemapPending | FaultKind::PagesRetired => false,
        FaultKind::NvlinkReplay | FaultKind::NvlinkRecovery | FaultKind::NvlinkCrc => false,
    }
}

/// What to do about it.
#[must_use]
pub fn remedy(fault: &GpuFault) -> &'static str {
    match fault.kind {
        FaultKind::Xid if BY_PROGRAM.contains(&fault.value) => {
            "look for an illegal access in a kernel: `compute-sanitizer`, or CUDA_LAUNCH_BLOCKING=1; if any program causes it, test the card"
        }
        _ => {
            "take the GPU out of service and test it: `dmesg | grep -i xid`, `nvidia-smi -q`, `dcgmi diag -r 3`"
        }
    }
}

/// What an XID means, in short; `None` of one that is not known here.
#[must_use]
pub fn xid(number: u64) -> Option<&'static str> {
    XIDS.iter().find(|(known, _)| *known == number).map(|(_, meaning)| *meaning)
}

/// The fault: `XID 79 (GPU has fallen off the bus)`.
#[must_use]
pub fn what(fault: &GpuFault) -> String {
    let n = |one: &str, many: &str| match fault.value {
        1 => format!("1 {one}"),
        n => format!("{} {many}", count(n)),
    };
    match fault.kind {
        FaultKind::Xid => match xid(fault.value) {
            Some(meaning) => format!("XID {} ({meaning})", fault.value),
            None => format!("XID {}", fault.value),
        },
        FaultKind::Uncorrected => n("uncorrectable ECC error", "uncorrectable ECC errors"),
        FaultKind::RowsRemapped => n("row of memory remapped", "rows of memory remapped"),
        FaultKind::RemapFailed => "a row of memory could not be remapped".to_owned(),
        FaultKind::RemapPending => "a row of memory will be remapped at the next reset of the GPU".to_owned(),
        FaultKind::PagesRetired => n("page of memory retired", "pages of memory retired"),
        FaultKind::NvlinkReplay => n("NVLink packet sent again", "NVLink packets sent again"),
        FaultKind::NvlinkRecovery => n("NVLink recovery", "NVLink recoveries"),
        FaultKind::NvlinkCrc => n("NVLink checksum error", "NVLink checksum errors"),
        FaultKind::Lost => "NVML no longer reaches the GPU".to_owned(),
    }
}

/// On which GPU: `on GPU 3 (GPU-...)`, with NVML's number, which is that of `nvidia-smi`.
#[must_use]
pub fn place(fault: &GpuFault) -> String {
    match fault.index {
        Some(index) => format!("on GPU {index} ({})", fault.uuid),
        None => format!("on {}", fault.uuid),
    }
}

/// The time of day of an event: `12:01:07 UTC`.
#[must_use]
pub fn clock(process: &Process, time: Nanos) -> String {
    let since = i128::from(time.0) - i128::from(process.start.0);
    let seconds = ((i128::from(process.start_realtime) + since) / 1_000_000_000).rem_euclid(86_400);
    format!("{:02}:{:02}:{:02} UTC", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

/// A fault in a sentence's words: `XID 79 (GPU has fallen off the bus) at 12:01:07 UTC on GPU 3 (GPU-...)`.
#[must_use]
pub fn text(process: &Process, time: Nanos, fault: &GpuFault) -> String {
    format!("{} at {} {}", what(fault), clock(process, time), place(fault))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_names_its_meaning_and_its_gpu() {
        let fault = |kind, value, index| GpuFault { kind, value, device: 0, index, uuid: "GPU-7".into() };
        let noon = 12 * 3600 * 1_000_000_000;
        let process = Process { start: Nanos(5), start_realtime: noon, ..Process::default() };
        let text =
            |fault: GpuFault| text(&process, Nanos(67_000_000_005), &fault).replace(" at 12:01:07 UTC", "");
        assert_eq!(clock(&process, Nanos(67_000_000_005)), "12:01:07 UTC");
        assert_eq!(
            text(fault(FaultKind::Xid, 79, Some(3))),
            "XID 79 (GPU has fallen off the bus) on GPU 3 (GPU-7)"
        );
        assert_eq!(text(fault(FaultKind::Xid, 7, None)), "XID 7 on GPU-7");
        assert_eq!(text(fault(FaultKind::Uncorrected, 2, None)), "2 uncorrectable ECC errors on GPU-7");
        assert!(XIDS.is_sorted_by_key(|(number, _)| *number));
    }
}
