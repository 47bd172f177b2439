//! What PyTorch's allocator asks of the driver: segments, and pages of segments that grow. Calls on neighbouring pages are one.

use gputrace_schemas::event::{Call, Event};
use gputrace_sim::ops::DriverCall;

use super::Importer;
use crate::ledger::{Mapped, Object};

impl Importer<'_> {
    pub(super) fn segment_alloc(&mut self, event: &Event, call: &Call) {
        let capture = self.thread(event.thread).capture;
        // Another thread's capture.
        let capture = capture.or_else(|| call.captured.then_some(self.n_captures));
        let Some(device) = self.device(call.device) else { return };
        let end = call.addr.saturating_add(call.bytes.0);
        let index = device.new_segment(call.addr, call.bytes.0);
        device.segments.insert(call.addr, (end, index));
        device.captured.extend(capture.map(|capture| (index, capture)));
        device.builder.driver(DriverCall::Alloc, call.addr, call.bytes.0, index);
        self.thread(event.thread).obtained.push((call.device, index));
    }

    pub(super) fn segment_freed(&mut self, event: &Event, call: &Call, segment: &Object) {
        self.gives_back(event.thread, segment.device, call.in_allocate);
        let Some(device) = self.device(segment.device) else { return };
        if let Some((_, index)) = device.segments.remove(&segment.addr) {
            device.builder.driver(DriverCall::Free, segment.addr, segment.bytes.0, index);
        }
    }

    /// What grows at this address later is another segment.
    pub(super) fn unreserved(&mut self, start: u64) {
        for ordinal in &self.survey.torch {
            if let Some(device) = self.devices.get_mut(ordinal) {
                device.segments.remove(&start);
            }
        }
    }

    pub(super) fn grown(&mut self, event: &Event, pages: &Mapped) {
        let Some((reserved, reservation)) = pages.reservation else { return };
        let capture = self.thread(event.thread).capture;
        let Some(device) = self.device(pages.device) else { return };
        let index = device.segments.get(&reserved).map(|(_, index)| *index).unwrap_or_else(|| {
            let index = device.new_segment(reserved, 0);
            device.segments.insert(reserved, (reserved.saturating_add(reservation.0), index));
            device.captured.extend(capture.map(|capture| (index, capture)));
            index
        });
        let end = pages.addr.saturating_add(pages.bytes.0);
        let segment = &mut device.builder.stream_mut().segments[index as usize];
        segment.bytes = segment.bytes.max(end - reserved);
        device.builder.driver(DriverCall::Map, pages.addr, pages.bytes.0, index);
        self.thread(event.thread).obtained.push((pages.device, index));
    }

    pub(super) fn shrunk(&mut self, event: &Event, call: &Call, (page, continues): (&Mapped, bool)) {
        if !continues {
            self.gives_back(event.thread, page.device, call.in_allocate);
        }
        let Some((reserved, _)) = page.reservation else { return };
        let Some(device) = self.device(page.device) else { return };
        let Some((_, index)) = device.segments.get(&reserved).copied() else { return };
        let last = device.builder.stream_mut().driver.last_mut();
        match last.filter(|last| continues && last.call == DriverCall::Unmap && last.segment == index) {
            Some(last) => last.bytes = last.bytes.saturating_add(page.bytes.0),
            None => device.builder.driver(DriverCall::Unmap, page.addr, page.bytes.0, index),
        }
    }
}
