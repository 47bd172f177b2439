//! A context on a GPU that the process does not use.

use std::cmp::Reverse;

use super::facts::device;
use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_schemas::event::Bytes;
use gputrace_trace::words::bytes;

pub(super) const CAUSE: Cause = Cause {
    name: "CUDA context on an unused GPU",
    kind: Kind::Kept,
    needs: "a context on a device with no request, beside a device that is used",
    against: "any allocation there",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let ledger = &facts.story.ledger;
    let is_used = |device: i16| {
        let books = ledger.devices().get(&device);
        books.is_some_and(|books| books.allocs > 0 || books.torch.is_some())
    };
    let idle = ledger.contexts().filter(|context| context.device >= 0 && !is_used(context.device));
    let charged = |device: i16| {
        let largest = ledger.devices().get(&device)?.samples.largest?;
        largest.process_used
    };
    let idle: Vec<_> = idle.map(|context| (context, charged(context.device).unwrap_or_default())).collect();
    let (context, held) = idle.iter().max_by_key(|(context, held)| (*held, Reverse(context.device)))?;
    ledger.devices().keys().any(|device| *device >= 0 && is_used(*device)).then(|| {
        let much = if held.0 > 0 { bytes(*held) } else { "a few hundred MiB".into() };
        Case {
            what: format!(
                "the process holds a context on {} ({much}) and never allocates there",
                device(context.device)
            ),
            site: facts.site(context.site),
            bytes: Bytes(held.0),
            sure: "certain: the trace has the context, and no allocation on that device".into(),
            fix: Fix::words(
                "hide the device from the process (`CUDA_VISIBLE_DEVICES`), or call `torch.cuda.set_device` before any other CUDA call",
                "",
            ),
            verb: "report --all",
        }
    })
}
