//! The settings that the recorded allocator ran under.

use gputrace_schemas::event::Bytes;
use gputrace_sim::ops::{DriverCall, OpStream, RecordedSettings};
use gputrace_sim::policies::torch::{self, variables};

use crate::Definitions;
use crate::torch_release;

pub(super) fn settings(definitions: &dyn Definitions, ordinal: i16, has_torch: bool) -> RecordedSettings {
    let process = definitions.process();
    let variable = |name: &str| {
        process
            .environment
            .iter()
            .find(|(key, value)| key == name && !value.is_empty())
            .map(|(_, value)| value.clone())
    };
    let torch_version = process.torch_version.as_deref().and_then(torch_release);
    let is_set = variables(torch_version).iter().find_map(|name| Some((*name, variable(name)?)));
    let (variable, options) = is_set.map_or((None, String::new()), |(name, value)| (Some(name), value));
    let device_memory = definitions
        .devices()
        .iter()
        .find(|device| device.ordinal == ordinal)
        .map(|device| device.total)
        .filter(|total| *total > Bytes(0));
    let is_pool_backend = options.contains("cudaMallocAsync");
    RecordedSettings {
        policy: match (has_torch, is_pool_backend) {
            (true, _) => torch::NAME,
            (false, true) => "cuda_async",
            (false, false) => "direct",
        },
        options: has_torch.then_some(options),
        variable: variable.filter(|_| has_torch),
        torch_version: torch_version.filter(|_| has_torch),
        torch_at_least: None,
        device_memory: device_memory.map(|total| total.0),
    }
}

/// Whether the allocator's segments grew although no variable asked for that; the settings then say so.
pub(super) fn grows(stream: &mut OpStream) -> bool {
    let options = stream.settings.options.get_or_insert_default();
    let is_told = options.contains("expandable_segments:True");
    if is_told || !stream.driver.iter().any(|event| event.call == DriverCall::Map) {
        return false;
    }
    let comma = if options.is_empty() { "" } else { "," };
    options.push_str(comma);
    options.push_str("expandable_segments:True");
    true
}
