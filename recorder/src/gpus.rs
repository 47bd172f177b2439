//! What NVML says of the machine's GPUs, for who shows it: no trace, no process of ours is needed.

use crate::card::{self, Holder};
use nvml_wrapper::{Device, Nvml};

/// NVML, open.
pub struct Gpus(Nvml);

/// A GPU as the driver sees it, or a MIG instance of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// NVML's number: the order of the bus.
    pub index: u32,
    /// Which MIG instance of that card it is; `None` for a whole card.
    pub instance: Option<u32>,
    /// `GPU-...` or `MIG-...`, whose bytes CUDA knows it by.
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
    /// Processes with memory there; `None` where NVML does not say.
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

    /// All GPUs that answer, as they are now. A card that is divided into MIG instances is these instances: no process can use another part
    /// of it.
    #[must_use]
    pub fn read(&self) -> Vec<Gpu> {
        let count = self.0.device_count().unwrap_or_default();
        (0..count).flat_map(|index| self.parts(index)).collect()
    }

    fn parts(&self, index: u32) -> Vec<Gpu> {
        let Ok(card) = self.0.device_by_index(index) else { return vec![] };
        let instances = card::instances(&card);
        if instances.is_empty() {
            return self.one(index, None, &card).into_iter().collect();
        }
        let one = |(number, instance)| self.one(index, Some(number), &instance);
        instances.into_iter().filter_map(one).collect()
    }

    fn one(&self, index: u32, instance: Option<u32>, handle: &Device<'_>) -> Option<Gpu> {
        let memory = handle.memory_info().ok()?;
        Some(Gpu {
            index,
            instance,
            uuid: handle.uuid().ok()?,
            name: handle.name().unwrap_or_default(),
            total: memory.total,
            used: memory.used,
            free: memory.free,
            reserved: memory.reserved,
            holders: card::holders(&self.0, handle),
        })
    }
}
