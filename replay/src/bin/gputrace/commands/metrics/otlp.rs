//! Metrics for OpenTelemetry: OTLP 1 over HTTP with JSON (opentelemetry-proto, `metrics/v1/metrics.proto`).

use serde_json::{Value, json};

use super::families::{Family, Kind, Number};

/// The body of a request to `/v1/metrics`.
pub(super) fn body(families: &[Family], host: &str, time_ns: u64) -> Value {
    let metrics: Vec<Value> = families.iter().filter_map(|family| metric(family, time_ns)).collect();
    json!({
        "resourceMetrics": [{
            "resource": {"attributes": [attribute("service.name", "gputrace"), attribute("host.name", host)]},
            "scopeMetrics": [{
                "scope": {"name": "gputrace", "version": env!("CARGO_PKG_VERSION")},
                "metrics": metrics,
            }],
        }],
    })
}

fn attribute(key: &str, value: &str) -> Value {
    json!({"key": key, "value": {"stringValue": value}})
}

fn metric(family: &Family, time_ns: u64) -> Option<Value> {
    let name = family.otlp?;
    let points: Vec<Value> = family
        .samples
        .iter()
        .map(|sample| {
            // Labels of Prometheus are attributes with dots: `hw_id` is `hw.id`, and no other label has an underline that is none.
            let named = sample.labels.iter().map(|(key, value)| {
                attribute(
                    &key.strip_prefix("hw_").map_or_else(|| (*key).to_owned(), |rest| format!("hw.{rest}")),
                    value,
                )
            });
            let attributes: Vec<Value> = named.collect();
            let time = time_ns.to_string();
            match sample.value {
                // Numbers of 64 bits are text in the JSON of protocol buffers.
                Number::Whole(value) => {
                    json!({"attributes": attributes, "timeUnixNano": time, "asInt": value.to_string()})
                }
                Number::Real(value) => {
                    json!({"attributes": attributes, "timeUnixNano": time, "asDouble": value})
                }
            }
        })
        .collect();
    let unit = match family.unit {
        "bytes" => "By",
        "seconds" => "s",
        _ => "1",
    };
    let mut metric = json!({"name": name, "description": family.help, "unit": unit});
    match family.kind {
        // 2: cumulative.
        Kind::Counter => {
            metric["sum"] = json!({"aggregationTemporality": 2, "isMonotonic": true, "dataPoints": points});
        }
        Kind::Gauge => metric["gauge"] = json!({"dataPoints": points}),
    }
    Some(metric)
}
