//! What PyTorch's allocator asks of the driver: segments, and pages of segments that grow. Calls on neighbouring pages are one.

use gputrace_schemas::event::{Call, Event, ThreadId};
use gputrace_sim::ops::DriverCall;

use super::Importer;

/// Calls on neighbouring pages that belong together.
#[derive(Clone, Copy, Default)]
pub(super) enum Run {
    #[default]
    None,
    Mapping {
        device: i16,
        start: u64,
        end: u64,
    },
    Unmapping {
        device: i16,
        start: u64,
        end: u64,
        reservation: u64,
    },
}

/// Memory of PyTorch's allocator.
#[derive(Clone, Copy)]
pub(super) struct TorchMemory {
    pub(super) device: i16,
    pub(super) bytes: u64,
}

/// Address space reserved by PyTorch's allocator.
#[derive(Clone, Copy)]
pub(super) struct Reservation {
    pub(super) end: u64,
    /// The segment of [`gputrace_sim::ops::OpStream::segments`], once something is mapped.
    pub(super) segment: Option<u32>,
}

impl Importer<'_> {
    pub(super) fn segment_alloc(&mut self, event: &Event, call: &Call) {
        let captured_by = self.n_captures;
        let thread = self.thread(event.thread);
        let is_captured = call.captured || thread.is_capturing;
        let Some(device) = self.device(call.device) else { return };
        let end = call.addr.saturating_add(call.bytes.0);
        let index = device.new_segment(call.addr, call.bytes.0);
        device.segments.insert(call.addr, (end, index));
        if is_captured {
            device.captured.push((index, captured_by));
        }
        device.builder.driver(DriverCall::Alloc, call.addr, call.bytes.0, index);
        self.thread(event.thread).obtained.push((call.device, index));
    }

    pub(super) fn segment_free(&mut self, event: &Event, call: &Call) {
        let Some(memory) = self.torch_memory.remove(&call.addr) else { return };
        self.gives_back(event.thread, memory.device, call.in_allocate);
        let Some(device) = self.device(memory.device) else { return };
        if let Some((_, index)) = device.segments.remove(&call.addr) {
            device.builder.driver(DriverCall::Free, call.addr, memory.bytes, index);
        }
    }

    fn reservation(&self, address: u64) -> Option<(u64, Reservation)> {
        let (start, reservation) = self.reservations.range(..=address).next_back()?;
        (address < reservation.end).then_some((*start, *reservation))
    }

    pub(super) fn page_mapped(&mut self, event: &Event, call: &Call) {
        let Some(memory) = self.torch_memory.get(&call.handle).copied() else { return };
        if self.reservation(call.addr).is_none() {
            return;
        }
        self.maps.insert(call.addr, TorchMemory { bytes: call.bytes.0, ..memory });
        let end = call.addr.saturating_add(call.bytes.0);
        let thread = self.thread(event.thread);
        let start = match thread.run {
            Run::Mapping { device, start, end } if device == memory.device && end == call.addr => start,
            Run::Mapping { .. } | Run::Unmapping { .. } | Run::None => call.addr,
        };
        thread.run = Run::Mapping { device: memory.device, start, end };
    }

    /// The first `cuMemSetAccess` after a run of maps is for the segment's own device; those of peers follow.
    pub(super) fn end_mapping(&mut self, event: &Event) {
        let Run::Mapping { device: ordinal, start, end } = self.thread(event.thread).run else { return };
        self.thread(event.thread).run = Run::None;
        let Some((reserved, reservation)) = self.reservation(start) else { return };
        let captured_by = self.n_captures;
        let is_captured = self.thread(event.thread).is_capturing;
        let Some(device) = self.device(ordinal) else { return };
        let index = reservation.segment.unwrap_or_else(|| {
            let index = device.new_segment(reserved, 0);
            device.segments.insert(reserved, (reservation.end, index));
            if is_captured {
                device.captured.push((index, captured_by));
            }
            index
        });
        let segment = &mut device.builder.stream_mut().segments[index as usize];
        segment.bytes = segment.bytes.max(end - reserved);
        device.builder.driver(DriverCall::Map, start, end - start, index);
        if let Some(known) = self.reservations.get_mut(&reserved) {
            known.segment = Some(index);
        }
        self.thread(event.thread).obtained.push((ordinal, index));
    }

    pub(super) fn page_unmapped(&mut self, event: &Event, call: &Call) {
        let Some(page) = self.maps.remove(&call.addr) else { return };
        let Some((reserved, _)) = self.reservation(call.addr) else { return };
        let end = call.addr.saturating_add(page.bytes);
        let (run, begins) = match self.thread(event.thread).run {
            Run::Unmapping { device, start, end: before, reservation }
                if device == page.device && before == call.addr && reservation == reserved =>
            {
                (Run::Unmapping { device, start, end, reservation }, false)
            }
            Run::Mapping { .. } | Run::Unmapping { .. } | Run::None => {
                let (device, start) = (page.device, call.addr);
                (Run::Unmapping { device, start, end, reservation: reserved }, true)
            }
        };
        if begins {
            self.end_run(event.thread);
            self.gives_back(event.thread, page.device, call.in_allocate);
        }
        self.thread(event.thread).run = run;
    }

    /// Books a run of unmapped pages.
    pub(super) fn end_run(&mut self, thread: ThreadId) {
        let Run::Unmapping { device: ordinal, start, end, reservation } = self.thread(thread).run else {
            return;
        };
        self.thread(thread).run = Run::None;
        let segment = self.reservations.get(&reservation).and_then(|reservation| reservation.segment);
        if let (Some(device), Some(segment)) = (self.device(ordinal), segment) {
            device.builder.driver(DriverCall::Unmap, start, end - start, segment);
        }
    }
}
