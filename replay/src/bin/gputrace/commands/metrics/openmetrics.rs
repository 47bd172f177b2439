//! Metrics as text: OpenMetrics 1.0 (prometheus.io/docs/specs/om/open_metrics_spec). Facts are a gauge of 1, not an `info`: what reads only the older
//! text format of Prometheus then reads it too.

use std::fmt::Write;

use super::families::{Family, Kind, Number};

/// What a scrape is answered with.
pub(super) const TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The exposition.
pub(super) fn text(families: &[Family]) -> String {
    let mut text = String::new();
    for family in families {
        let (name, kind) = (family.name, family.kind);
        let word = match kind {
            Kind::Gauge => "gauge",
            Kind::Counter => "counter",
        };
        // Writing to memory does not fail.
        let _ = writeln!(text, "# TYPE {name} {word}");
        if !family.unit.is_empty() {
            let _ = writeln!(text, "# UNIT {name} {}", family.unit);
        }
        let _ = writeln!(text, "# HELP {name} {}", escaped(family.help));
        let ending = match kind {
            Kind::Gauge => "",
            Kind::Counter => "_total",
        };
        for sample in &family.samples {
            let labels = sample.labels.iter().map(|(key, value)| format!("{key}=\"{}\"", escaped(value)));
            let labels = labels.collect::<Vec<_>>().join(",");
            let labels = if labels.is_empty() { labels } else { format!("{{{labels}}}") };
            let _ = match sample.value {
                Number::Whole(value) => writeln!(text, "{name}{ending}{labels} {value}"),
                Number::Real(value) => writeln!(text, "{name}{ending}{labels} {value}"),
            };
        }
    }
    text + "# EOF\n"
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
