//! A fault of a GPU that NVML reported while the process ran: a note that the recorder writes.

use serde::{Deserialize, Serialize};

/// What every such note begins with.
const KEY: &str = "gpu.fault=";

/// A fault of a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// The driver logged an XID error; its number.
    Xid,
    /// Memory errors that ECC could not correct since the last look; how many.
    Uncorrected,
    /// Rows of memory that were remapped since the last look (Ampere and later); how many.
    RowsRemapped,
    /// Remapping failed: the card should be replaced. 1.
    RemapFailed,
    /// Rows wait for a reset of the GPU to be remapped. 1.
    RemapPending,
    /// Pages of memory that were retired since the last look (before Ampere); how many.
    PagesRetired,
    /// Packets that NVLink sent again since the last look; how many.
    NvlinkReplay,
    /// NVLink's link was brought up again since the last look; how often.
    NvlinkRecovery,
    /// Packets with a wrong checksum that NVLink received since the last look; how many.
    NvlinkCrc,
    /// NVML does not reach the GPU any more. 1.
    Lost,
}

impl FaultKind {
    const ALL: [(FaultKind, &'static str); 10] = [
        (FaultKind::Xid, "xid"),
        (FaultKind::Uncorrected, "uncorrected"),
        (FaultKind::RowsRemapped, "rows-remapped"),
        (FaultKind::RemapFailed, "remap-failed"),
        (FaultKind::RemapPending, "remap-pending"),
        (FaultKind::PagesRetired, "pages-retired"),
        (FaultKind::NvlinkReplay, "nvlink-replay"),
        (FaultKind::NvlinkRecovery, "nvlink-recovery"),
        (FaultKind::NvlinkCrc, "nvlink-crc"),
        (FaultKind::Lost, "lost"),
    ];
}

/// NVML reported this at the time of the note that says it: `gpu.fault=xid 79 device 3 index 3 uuid GPU-...`. Words that a reader
/// does not know are left out.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Deserialize, Serialize)]
pub struct GpuFault {
    /// The fault.
    pub kind: FaultKind,
    /// See [`FaultKind`].
    pub value: u64,
    /// The process's number of the device.
    pub device: i16,
    /// NVML's number of the card; `None` where it does not say.
    pub index: Option<u32>,
    /// `GPU-...`.
    pub uuid: String,
}

impl GpuFault {
    /// Reads a note; `None` if it is about something else, or a kind that this reader does not know.
    #[must_use]
    pub fn parse(note: &str) -> Option<GpuFault> {
        let mut words = note.strip_prefix(KEY)?.split(' ');
        let kind = words.next()?;
        let (kind, _) = *FaultKind::ALL.iter().find(|(_, name)| *name == kind)?;
        let value = words.next()?.parse().ok()?;
        let mut fault = GpuFault { kind, value, device: 0, index: None, uuid: String::new() };
        while let (Some(name), Some(value)) = (words.next(), words.next()) {
            match name {
                "device" => fault.device = value.parse().ok()?,
                "index" => fault.index = value.parse().ok(),
                "uuid" => value.clone_into(&mut fault.uuid),
                _ => {}
            }
        }
        Some(fault)
    }
}

impl std::fmt::Display for GpuFault {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = FaultKind::ALL.iter().find(|(kind, _)| *kind == self.kind).map_or("", |(_, name)| name);
        write!(to, "{KEY}{kind} {} device {}", self.value, self.device)?;
        if let Some(index) = self.index {
            write!(to, " index {index}")?;
        }
        write!(to, " uuid {}", self.uuid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_read_as_written_and_later_words_are_left_out() {
        for (kind, _) in FaultKind::ALL {
            let fault = GpuFault { kind, value: 79, device: 3, index: Some(5), uuid: "GPU-1".into() };
            for fault in [GpuFault { index: None, ..fault.clone() }, fault] {
                assert_eq!(GpuFault::parse(&fault.to_string()), Some(fault.clone()));
                assert_eq!(GpuFault::parse(&format!("{fault} later 5")), Some(fault));
            }
        }
        for other in ["gpu.fault=flood 1 device 0", "gpu.fault=xid x", "gpu.fault=xid", "process.end=exit"] {
            assert_eq!(GpuFault::parse(other), None, "{other}");
        }
    }
}
