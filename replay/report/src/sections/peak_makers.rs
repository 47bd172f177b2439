//! Which call sites made the peak as high as it was, and what was held longer than needed.

use gputrace_schemas::event::Bytes;

use super::{SectionEntry, device_name};
use crate::model::{Mood, Section, Table, Value};
use gputrace_analyse::lifetimes::DeviceLifetimes;
use gputrace_analyse::story::Story;
use gputrace_trace::words::bytes;

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

/// Call sites to show.
const ROWS: usize = 10;
/// A call site is worth a word if the peak falls by this share without it.
const WORTH: u64 = 100;

fn build(story: &Story) -> Option<Section> {
    let lifetimes = story.lifetimes.as_ref().filter(|lifetimes| lifetimes.has_stacks)?;
    let mut section = Section::new("peak_makers", "Call sites that set the peak, and the peak without each");
    let mut any = false;
    for device in lifetimes.devices.iter().filter(|device| device.peak.0 > 0) {
        let makers = makers(story, device);
        let replaced = replaced(story, device);
        any |= !makers.rows.is_empty() || !replaced.rows.is_empty();
        section = section.table(makers.keep(ROWS, 1)).table(replaced.keep(ROWS, 1)).warn(best(story, device));
    }
    any.then(|| {
        let text = "exact for the same requests: PyTorch's blocks only, without its cache and other memory";
        section.line(Mood::Note, text).warn(story.caveats())
    })
}

fn is_worth(device: &DeviceLifetimes, without: u64) -> bool {
    device.peak.0.saturating_sub(without) >= device.peak.0 / WORTH
}

fn makers(story: &Story, device: &DeviceLifetimes) -> Table {
    Table::of(
        "makers",
        device.makers.iter().filter(|maker| is_worth(device, maker.without.0)),
        &[
            ("device", "device", &|_| Value::text(format!("cuda:{}", device.device))),
            ("bytes_at_peak", "at peak", &|it| Value::Bytes(it.at_peak)),
            ("temporary_bytes", "temporary", &|it| Value::Bytes(it.temporary)),
            ("peak_without_bytes", "peak without", &|it| Value::Bytes(it.without)),
            ("lowers_by_bytes", "lower by", &|it| lower_by(device, it.without)),
            ("held_for_ns", "held for", &|it| Value::Time(it.held_for)),
            ("call_site", "call site", &|it| Value::text(story.ledger.sites.site_name(it.site))),
        ],
    )
}

fn replaced(story: &Story, device: &DeviceLifetimes) -> Table {
    Table::of(
        "replaced",
        device.replaced.iter().filter(|row| is_worth(device, row.without.0)),
        &[
            ("device", "device", &|_| Value::text(format!("cuda:{}", device.device))),
            ("bytes", "old value", &|it| Value::Bytes(it.bytes)),
            ("times", "times", &|it| Value::Count(it.times)),
            ("peak_without_bytes", "peak if freed first", &|it| Value::Bytes(it.without)),
            ("lowers_by_bytes", "lower by", &|it| lower_by(device, it.without)),
            ("call_site", "held until its successor exists", &|it| {
                Value::text(story.ledger.sites.site_name(it.site))
            }),
        ],
    )
}

fn lower_by(device: &DeviceLifetimes, without: Bytes) -> Value {
    Value::bytes(Some(device.peak.0.saturating_sub(without.0)))
}

/// The sentences that matter most.
fn best(story: &Story, device: &DeviceLifetimes) -> Vec<String> {
    let name = device_name(story, device.device);
    let change = |without| format!("peak {} -> {}", bytes(device.peak), bytes(without));
    let maker = device.makers.first().filter(|maker| is_worth(device, maker.without.0));
    let maker = maker.map(|it| {
        format!("{name}: without {}, {}", story.ledger.sites.site_name(it.site), change(it.without))
    });
    let old = device.replaced.first().filter(|row| is_worth(device, row.without.0));
    let old = old.map(|it| {
        let what = story.ledger.sites.site_name(it.site);
        format!(
            "{name}: {what} is held until its successor exists; `del` it before, and {}",
            change(it.without)
        )
    });
    maker.into_iter().chain(old).collect()
}
