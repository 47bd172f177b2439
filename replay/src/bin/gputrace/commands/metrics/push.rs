//! Pushes what is held: profiles to Pyroscope (`POST /ingest?format=pprof`) or Parca (`POST /profiles/writeraw`), metrics to
//! whatever speaks OTLP.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::bail;
use gputrace_replay::exports::live_profile;
use serde_json::json;

use super::http::{self, Url};
use super::{families, otlp};
use crate::commands::parts::live::Scene;
use crate::commands::parts::live::follow::Live;

/// Where the profiles of a process are found.
const NAME: &str = "gputrace";

pub(super) enum Push {
    Pyroscope(Url),
    Parca(Url),
    Otlp(Url),
}

impl Push {
    /// Of `pprof URL` or `otlp URL`.
    pub(super) fn parse(words: &[String]) -> anyhow::Result<Push> {
        let [kind, url] = words else { bail!("--push is written --push pprof URL or --push otlp URL") };
        let url = Url::parse(url)?;
        match kind.as_str() {
            "pprof" if url.path.ends_with("/writeraw") => Ok(Push::Parca(url)),
            "pprof" => Ok(Push::Pyroscope(url)),
            "otlp" => Ok(Push::Otlp(url)),
            other => bail!("--push {other}: it is pprof or otlp"),
        }
    }

    /// Sends what is held now.
    ///
    /// # Errors
    /// It could not be sent, or was refused.
    pub(super) fn send(&self, scene: &mut Scene) -> anyhow::Result<()> {
        match self {
            Push::Otlp(url) => {
                let figures = scene.figures();
                let body = otlp::body(&families::of(&figures), &figures.host, figures.time_ns);
                let path = if url.path == "/" { "/v1/metrics" } else { &url.path };
                http::post(url, path, "application/json", &serde_json::to_vec(&body)?)
            }
            Push::Pyroscope(url) => running(scene).try_for_each(|live| to_pyroscope(url, live)),
            Push::Parca(url) => running(scene).try_for_each(|live| to_parca(url, live)),
        }
    }
}

fn running(scene: &Scene) -> impl Iterator<Item = &Live> {
    scene.lives().filter(|live| live.ledger.n_events > 0)
}

/// Labels of a process: names that all three understand.
fn labels(live: &Live) -> Vec<(&'static str, String)> {
    let process = live.trace().process();
    let plain = |text: &str| -> String {
        text.chars().map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' }).collect()
    };
    let program = process.command.first().map_or("", |first| first.rsplit('/').next().unwrap_or(first));
    let mut labels =
        vec![("host", plain(&process.host)), ("pid", process.pid.to_string()), ("program", plain(program))];
    labels.extend(process.rank.map(|rank| ("rank", rank.to_string())));
    labels
}

fn to_pyroscope(url: &Url, live: &Live) -> anyhow::Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let labels: Vec<String> = labels(live).iter().map(|(key, value)| format!("{key}={value}")).collect();
    let name = http::encoded(&format!("{NAME}{{{}}}", labels.join(",")));
    let base = url.path.trim_end_matches('/');
    let base = base.strip_suffix("/ingest").unwrap_or(base);
    let path =
        format!("{base}/ingest?name={name}&from={}&until={now}&format=pprof&spyName=gputrace", now - 1);
    http::post(url, &path, "application/octet-stream", &live_profile(&live.ledger, live.trace()))
}

fn to_parca(url: &Url, live: &Live) -> anyhow::Result<()> {
    let labels = labels(live).into_iter().chain([("__name__", NAME.to_owned())]);
    let labels: Vec<_> = labels.map(|(name, value)| json!({"name": name, "value": value})).collect();
    let profile = base64(&live_profile(&live.ledger, live.trace()));
    let body = json!({"series": [{"labels": {"labels": labels}, "samples": [{"rawProfile": profile}]}], "normalized": true});
    http::post(url, &url.path, "application/json", &serde_json::to_vec(&body)?)
}

/// RFC 4648, with padding.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for part in bytes.chunks(3) {
        let word =
            part.iter().fold(0_u32, |word, byte| word << 8 | u32::from(*byte)) << (8 * (3 - part.len()));
        for n in 0..4 {
            let digit = DIGITS[(word >> (18 - 6 * n)) as usize & 63];
            text.push(if n <= part.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::base64;

    #[test]
    fn base64_is_that_of_the_rfc() {
        let encoded = ["", "f", "fo", "foo", "foob", "fooba", "foobar"].map(|text| base64(text.as_bytes()));
        assert_eq!(encoded, ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg==", "Zm9vYmE=", "Zm9vYmFy"]);
    }
}
