//! Faults of the GPUs that the process uses, as NVML reports them: XID errors by its event set, errors of memory and NVLink by its
//! counters. Asked on the sampling thread, outside of the process.
//!
//! An event concerns the whole card: any process on it may have caused it. Without events (vGPU, some containers) the counters remain.

use crate::card;
use gputrace_schemas::event::{Device, FaultKind, GpuFault};
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::event::EventSet;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id;
use std::time::{Duration, Instant};

/// Between two looks at the counters: one call for each card.
const COUNTERS_EVERY: Duration = Duration::from_secs(10);
/// Events that are taken in one look.
const MOST_EVENTS: usize = 64;
/// Faults of one card that are told: a link that is bad would fill the trace.
const MOST_FAULTS: u32 = 256;
/// What NVML says of an XID whose number it does not know (nvml.h, `nvmlEventData_t`).
const UNKNOWN_XID: u64 = 999;

/// Counters, and the fault that a rise of each is (nvml.h, `NVML_FI_DEV_*`).
const COUNTERS: [(u32, FaultKind); 10] = [
    (field_id::NVML_FI_DEV_ECC_DBE_VOL_TOTAL, FaultKind::Uncorrected),
    (field_id::NVML_FI_DEV_RETIRED_DBE, FaultKind::PagesRetired),
    (field_id::NVML_FI_DEV_REMAPPED_COR, FaultKind::RowsRemapped),
    (field_id::NVML_FI_DEV_REMAPPED_UNC, FaultKind::RowsRemapped),
    (field_id::NVML_FI_DEV_REMAPPED_PENDING, FaultKind::RemapPending),
    (field_id::NVML_FI_DEV_REMAPPED_FAILURE, FaultKind::RemapFailed),
    (field_id::NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, FaultKind::NvlinkReplay),
    (field_id::NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL, FaultKind::NvlinkRecovery),
    (field_id::NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, FaultKind::NvlinkCrc),
    (field_id::NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL, FaultKind::NvlinkCrc),
];

/// Watches cards.
pub(crate) struct Health<'n> {
    nvml: &'n Nvml,
    events: Option<EventSet<'n>>,
    cards: Vec<Card>,
    due: Instant,
}

struct Card {
    /// The process's number of it.
    device: i16,
    index: Option<u32>,
    uuid: String,
    /// `None` before the first look, and where NVML does not count.
    counters: [Option<u64>; COUNTERS.len()],
    is_lost: bool,
    n_told: u32,
}

impl<'n> Health<'n> {
    pub(crate) fn new(nvml: &'n Nvml) -> Health<'n> {
        Health { nvml, events: nvml.create_event_set().ok(), cards: vec![], due: Instant::now() }
    }

    /// Watches the cards of these devices, too.
    pub(crate) fn watch(&mut self, devices: &[Device]) {
        for device in devices {
            let Ok(handle) = card::find(self.nvml, &device.uuid) else { continue };
            // Events are of whole cards.
            let uuid =
                card::card_of(&handle).or_else(|| handle.uuid().ok()).unwrap_or_else(|| device.uuid.clone());
            if self.cards.iter().any(|card| card.uuid == uuid) {
                continue;
            }
            let Ok(handle) = card::find(self.nvml, &uuid) else { continue };
            self.cards.push(Card {
                device: device.ordinal,
                index: handle.index().ok(),
                uuid,
                counters: [None; COUNTERS.len()],
                is_lost: false,
                n_told: 0,
            });
            let wanted = EventTypes::CRITICAL_XID_ERROR;
            self.events = self.events.take().and_then(|events| match handle.supported_event_types() {
                Ok(supported) if supported.contains(wanted) => handle.register_events(wanted, events).ok(),
                _ => Some(events),
            });
            self.due = Instant::now();
        }
    }

    /// What has been reported since the last look.
    pub(crate) fn look(&mut self) -> Vec<GpuFault> {
        let mut faults = self.xids();
        let now = Instant::now();
        if now >= self.due {
            self.due = now + COUNTERS_EVERY;
            for card in &mut self.cards {
                card.look(self.nvml, &mut faults);
            }
        }
        faults
    }

    /// The same, at the end: counters are looked at whatever the time.
    pub(crate) fn last_look(&mut self) -> Vec<GpuFault> {
        self.due = Instant::now();
        self.look()
    }

    fn xids(&mut self) -> Vec<GpuFault> {
        let Some(events) = &self.events else { return vec![] };
        let mut faults = vec![];
        while faults.len() < MOST_EVENTS {
            // Timeout where there is none.
            let Ok(event) = events.wait(0) else { break };
            let Some(xid) = event.event_data else { continue };
            let uuid = event.device.uuid().ok();
            let index = event.device.index().ok();
            // A card that has fallen off the bus says nothing of itself; where there is one only, it is that.
            let is_it = |card: &&mut Card| match (&uuid, index) {
                (Some(uuid), _) => card.uuid == *uuid,
                (None, Some(index)) => card.index == Some(index),
                (None, None) => true,
            };
            let value = match xid {
                XidError::Value(value) => value,
                XidError::Unknown => UNKNOWN_XID,
            };
            faults
                .extend(self.cards.iter_mut().find(is_it).and_then(|card| card.fault(FaultKind::Xid, value)));
        }
        faults
    }
}

impl Card {
    fn look(&mut self, nvml: &Nvml, faults: &mut Vec<GpuFault>) {
        let fields = COUNTERS.map(|(field, _)| FieldId(field));
        let read = card::find(nvml, &self.uuid).and_then(|handle| handle.field_values_for(&fields));
        let read = match read {
            Ok(read) => read,
            Err(NvmlError::GpuLost) if !self.is_lost => {
                self.is_lost = true;
                faults.extend(self.fault(FaultKind::Lost, 1));
                return;
            }
            Err(_) => return,
        };
        for (at, ((_, kind), sample)) in COUNTERS.iter().zip(read).enumerate() {
            let Some(now) = sample.ok().and_then(|sample| sample.value.ok()).and_then(number) else {
                continue;
            };
            let Some(counter) = self.counters.get_mut(at) else { continue };
            let before = counter.replace(now);
            if let Some(more) = before.and_then(|before| now.checked_sub(before)).filter(|more| *more > 0) {
                faults.extend(self.fault(*kind, more));
            }
        }
    }

    fn fault(&mut self, kind: FaultKind, value: u64) -> Option<GpuFault> {
        self.n_told += 1;
        let (device, index, uuid) = (self.device, self.index, self.uuid.clone());
        (self.n_told <= MOST_FAULTS).then_some(GpuFault { kind, value, device, index, uuid })
    }
}

fn number(value: SampleValue) -> Option<u64> {
    match value {
        SampleValue::U32(value) => Some(value.into()),
        SampleValue::U64(value) => Some(value),
        SampleValue::I64(value) => u64::try_from(value).ok(),
        SampleValue::F64(_) => None,
    }
}
