//! A device as NVML knows it: a card, or a part of one (MIG), and who has memory there.

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use nvml_wrapper::{Device, Nvml};

/// Bytes of a process's name.
const MOST_NAME: usize = 256;
/// What the identities of cards and of MIG instances begin with, since driver R470.
const CARD: &str = "GPU-";
const INSTANCE: &str = "MIG-";

/// A process that has memory on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// As NVML numbers it: a container sees the numbers of the host.
    pub pid: u32,
    /// What it is charged, where NVML tells.
    pub bytes: Option<u64>,
    /// File name of its program, where NVML tells.
    pub name: Option<String>,
    /// It is a client of MPS; `None` where NVML does not tell.
    pub is_client: Option<bool>,
}

/// The device of this UUID. CUDA has only its bytes: the MIG instance's where a process runs on one (`cuDeviceGetUuid_v2`), and NVML
/// wants to know which of the two it is.
///
/// # Errors
/// NVML knows neither: drivers before R470 name instances by their places, and an instance that was destroyed has none.
pub(crate) fn find<'n>(nvml: &'n Nvml, uuid: &str) -> Result<Device<'n>, NvmlError> {
    nvml.device_by_uuid(uuid).or_else(|error| match other(uuid) {
        Some(other) => nvml.device_by_uuid(other).map_err(|_| error),
        None => Err(error),
    })
}

fn other(uuid: &str) -> Option<String> {
    match uuid.strip_prefix(CARD) {
        Some(bytes) => Some(format!("{INSTANCE}{bytes}")),
        None => uuid.strip_prefix(INSTANCE).map(|bytes| format!("{CARD}{bytes}")),
    }
}

/// The UUID of the card that a MIG instance is a part of; `None` for a card.
pub(crate) fn card_of(device: &Device<'_>) -> Option<String> {
    device.mig_parent_device().and_then(|card| card.uuid()).ok()
}

/// The MIG instances of a card, with their numbers.
pub(crate) fn instances<'n>(card: &Device<'n>) -> Vec<(u32, Device<'n>)> {
    let most = card.mig_device_count().unwrap_or_default();
    (0..most).filter_map(|number| Some((number, card.mig_device_by_index(number).ok()?))).collect()
}

/// Numbers of the processes that are clients of MPS; `None` where NVML does not tell.
pub(crate) fn clients(device: &Device<'_>) -> Option<Vec<u32>> {
    let processes = device.mps_running_compute_processes().ok()?;
    Some(processes.iter().map(|process| process.pid).collect())
}

/// What NVML charges to a process.
pub(crate) fn bytes_of(process: &ProcessInfo) -> Option<u64> {
    match process.used_gpu_memory {
        UsedGpuMemory::Used(bytes) => Some(bytes),
        UsedGpuMemory::Unavailable => None,
    }
}

/// Who has memory on a device; `None` where NVML does not tell.
pub(crate) fn holders(nvml: &Nvml, device: &Device<'_>) -> Option<Vec<Holder>> {
    let mut processes = device.running_compute_processes().ok()?;
    processes.extend(device.running_graphics_processes().unwrap_or_default());
    processes.sort_by_key(|process| process.pid);
    processes.dedup_by_key(|process| process.pid);
    let clients = clients(device);
    let holder = |process: &ProcessInfo| Holder {
        pid: process.pid,
        bytes: bytes_of(process),
        name: name(nvml, process.pid),
        is_client: clients.as_ref().map(|clients| clients.contains(&process.pid)),
    };
    Some(processes.iter().map(holder).collect())
}

/// File name of a process's program, where NVML tells.
pub(crate) fn name(nvml: &Nvml, pid: u32) -> Option<String> {
    nvml.sys_process_name(pid, MOST_NAME).ok().map(|name| program_of(&name))
}

/// NVML tells the path, on some drivers with arguments: none of a trace's business.
fn program_of(name: &str) -> String {
    let path = name.split_whitespace().next().unwrap_or_default();
    path.rsplit('/').next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_a_cards_or_an_instances() {
        assert_eq!(other("GPU-0102").as_deref(), Some("MIG-0102"));
        assert_eq!(other("MIG-0102").as_deref(), Some("GPU-0102"));
        assert_eq!(other(""), None);
    }
}
