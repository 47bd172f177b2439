//! The text that the program would have been shown.

use super::stats::Name;
use super::{OomText, Refusal, Torch};
use crate::device::Device;
use crate::policies::OutOfMemory;

impl Torch {
    /// Measured: 2.1 to 2.4 do not name the limit.
    pub(super) fn names_limit(&self) -> bool {
        !((2, 1)..(2, 5)).contains(&self.profile.version)
    }

    pub(super) fn out_of_memory(&self, device: &Device, requested: u64, refusal: &Refusal) -> OutOfMemory {
        let segment_bytes = self.segment_bytes(self.rounded(requested));
        if let Refusal::Rejected = refusal {
            let message = format!(
                "CUDA out of memory. Allocation was preemptively rejected because it would exceed \
                 per_process_memory_fraction limit. Requested size: {}",
                iec(requested)
            );
            return OutOfMemory { segment_bytes, message };
        }
        let total = device.total();
        let (wanted, capacity, free) = (iec(segment_bytes), iec(total), iec(device.free()));
        let reserved = self.stats.all(Name::ReservedBytes).current.max(0) as u64;
        let allocated = self.stats.all(Name::AllocatedBytes).current.max(0) as u64;
        let limit = self.limit.filter(|_| self.names_limit());
        let allowed = limit.map_or(String::new(), |limit| format!("{} allowed; ", iec(limit)));
        let message = match self.profile.oom_text {
            OomText::Parenthesis => format!(
                "CUDA out of memory. Tried to allocate {wanted} (GPU 0; {capacity} total capacity; {} already \
                 allocated; {free} free; {allowed}{} reserved in total by PyTorch)",
                iec(allocated),
                iec(reserved)
            ),
            text => {
                let private = if text == OomText::PrivatePools { self.private_free() } else { 0 };
                let in_private = if private > 0 {
                    format!(", with {} allocated in private pools (e.g., CUDA Graphs)", iec(private))
                } else {
                    String::new()
                };
                format!(
                    "CUDA out of memory. Tried to allocate {wanted}. GPU {} has a total {} of {capacity} of \
                     which {free} is free. {allowed}Of the allocated memory {} is allocated by PyTorch{in_private}, \
                     and {} is reserved by PyTorch but unallocated.",
                    if text == OomText::RawOrdinal { "\0" } else { "0" },
                    if text == OomText::Capacty { "capacty" } else { "capacity" },
                    iec(allocated + private),
                    iec(reserved.saturating_sub(allocated + private)),
                )
            }
        };
        OutOfMemory { segment_bytes, message }
    }
}

/// c10's `format_size`: two decimals from KiB on.
pub(super) fn iec(bytes: u64) -> String {
    let scaled = |power: i32| bytes as f64 / 1024f64.powi(power);
    match bytes {
        0..=1024 => format!("{bytes} bytes"),
        1025..=1_048_576 => format!("{:.2} KiB", scaled(1)),
        1_048_577..=1_073_741_824 => format!("{:.2} MiB", scaled(2)),
        _ => format!("{:.2} GiB", scaled(3)),
    }
}
