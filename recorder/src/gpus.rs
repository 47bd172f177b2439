//! What NVML says of the machine's GPUs, for who shows it: no trace, no process of ours is needed.

use crate::nvml::{Holder, holders};
use nvml_wrapper::Nvml;

/// NVML, open.
pub struct Gpus(Nvml);

/// A GPU as the driver sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// NVML's number: the order of the bus.
    pub index: u32,
    /// `GPU-...`, by which CUDA knows it too.
    pub uuid: String,
    /// Marketing name.
    pub name: String,
    /// Bytes: all of it.
    pub total: u64,
    /// Bytes that processes and the driver use, without [`Gpu::reserved`].
    pub used: u64,
    /// Bytes that are free.
    pub free: u64,
    /// Bytes that firmware and driver keep for themselves.
    pub reserved: u64,
    /// Who has memory there; `None` where NVML does not say.
    pub holders: Option<Vec<Holder>>,
}

impl Gpus {
    /// Opens NVML.
    ///
    /// # Errors
    /// What NVML says: mostly that there is no driver.
    pub fn open() -> Result<Gpus, String> {
        Nvml::init().map(Gpus).map_err(|error| error.to_string())
    }

    /// The driver's version.
    #[must_use]
    pub fn driver(&self) -> Option<String> {
        self.0.sys_driver_version().ok()
    }

    /// All GPUs that answer, as they are now.
    #[must_use]
    pub fn read(&self) -> Vec<Gpu> {
        let count = self.0.device_count().unwrap_or_default();
        (0..count).filter_map(|index| self.one(index)).collect()
    }

    fn one(&self, index: u32) -> Option<Gpu> {
        let handle = self.0.device_by_index(index).ok()?;
        let memory = handle.memory_info().ok()?;
        Some(Gpu {
            index,
            uuid: handle.uuid().ok()?,
            name: handle.name().unwrap_or_default(),
            total: memory.total,
            used: memory.used,
            free: memory.free,
            reserved: memory.reserved,
            holders: holders(&self.0, &handle),
        })
    }
}
