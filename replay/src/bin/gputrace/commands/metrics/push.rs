//! Pushes what is held: profiles to Pyroscope (`POST /ingest?format=pprof`) or Parca (`POST /profiles/writeraw`), metrics to
//! whatever speaks OTLP.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::bail;
use gputrace_replay::exports::live_profile;
use serde_json::json;

use super::client::{self, Url};
use super::{families, otlp};
use crate::commands::parts::live::Scene;
use crate::commands::parts::live::follow::Live;
use crate::show::complain;

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
        let [kind, url] = words else { bail!("write --push pprof URL or --push otlp URL") };
        let url = Url::parse(url)?;
        match kind.as_str() {
            "pprof" if url.path.ends_with("/writeraw") => Ok(Push::Parca(url)),
            "pprof" => Ok(Push::Pyroscope(url)),
            "otlp" => Ok(Push::Otlp(url)),
            other => bail!("--push {other}: write pprof or otlp"),
        }
    }

    fn url(&self) -> &Url {
        match self {
            Push::Pyroscope(url) | Push::Parca(url) | Push::Otlp(url) => url,
        }
    }

    /// What is held now, ready to be sent.
    ///
    /// # Errors
    /// The figures cannot be written as JSON.
    fn parcels(&self, scene: &mut Scene) -> anyhow::Result<Vec<Parcel>> {
        match self {
            Push::Otlp(url) => {
                let figures = scene.figures();
                let body = otlp::body(&families::of(&figures), &figures.host, figures.time_ns);
                let path = if url.path == "/" { "/v1/metrics" } else { &url.path };
                let body = serde_json::to_vec(&body)?;
                Ok(vec![Parcel { url: url.clone(), path: path.to_owned(), kind: "application/json", body }])
            }
            Push::Pyroscope(url) => Ok(running(scene).map(|live| for_pyroscope(url, live)).collect()),
            Push::Parca(url) => running(scene).map(|live| for_parca(url, live)).collect(),
        }
    }

    /// Sends what is held now, and waits until it has arrived.
    ///
    /// # Errors
    /// It could not be sent, or was refused.
    pub(super) fn send(&self, scene: &mut Scene) -> anyhow::Result<()> {
        send(&self.parcels(scene)?)
    }
}

/// A body, and where it goes.
struct Parcel {
    url: Url,
    path: String,
    kind: &'static str,
    body: Vec<u8>,
}

fn send(parcels: &[Parcel]) -> anyhow::Result<()> {
    parcels.iter().try_for_each(|it| client::post(&it.url, &it.path, it.kind, &it.body))
}

/// Sends from a thread of its own: a collector that is slow or gone delays neither scrapes nor other pushes.
pub(super) struct Pusher {
    push: Push,
    to: SyncSender<Vec<Parcel>>,
    /// The last one was left out, which is reported once.
    is_behind: bool,
}

impl Pusher {
    /// # Errors
    /// No thread can be started.
    pub(super) fn start(push: Push) -> anyhow::Result<Pusher> {
        // One is on its way, and one waits.
        let (to, from) = sync_channel(1);
        std::thread::Builder::new().name("push".into()).spawn(move || deliver(&from))?;
        Ok(Pusher { push, to, is_behind: false })
    }

    /// Hands over what is held now. Where the one before last has not arrived yet, this one is left out.
    pub(super) fn push(&mut self, scene: &mut Scene) {
        let parcels = match self.push.parcels(scene) {
            Ok(parcels) => parcels,
            Err(error) => return complain!("{error:#}"),
        };
        match self.to.try_send(parcels) {
            Ok(()) => self.is_behind = false,
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                if !self.is_behind {
                    let host = self.push.url().host();
                    complain!("{host} takes longer than --every: some pushes to it are skipped");
                }
                self.is_behind = true;
            }
        }
    }
}

fn deliver(from: &Receiver<Vec<Parcel>>) {
    let mut failed = None;
    while let Ok(parcels) = from.recv() {
        let error = send(&parcels).err().map(|error| format!("{error:#}"));
        // Once for each way in which it fails; the next one may not.
        if let Some(error) = error.as_ref().filter(|_| error != failed) {
            complain!("{error}");
        }
        failed = error;
    }
}

fn running(scene: &Scene) -> impl Iterator<Item = &Live> {
    scene.lives().filter(|live| live.ledger.run.n_events > 0)
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

fn for_pyroscope(url: &Url, live: &Live) -> Parcel {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let labels: Vec<String> = labels(live).iter().map(|(key, value)| format!("{key}={value}")).collect();
    let name = client::encoded(&format!("{NAME}{{{}}}", labels.join(",")));
    let base = url.path.trim_end_matches('/');
    let base = base.strip_suffix("/ingest").unwrap_or(base);
    let path =
        format!("{base}/ingest?name={name}&from={}&until={now}&format=pprof&spyName=gputrace", now - 1);
    let body = live_profile(&live.ledger, live.trace());
    Parcel { url: url.clone(), path, kind: "application/octet-stream", body }
}

fn for_parca(url: &Url, live: &Live) -> anyhow::Result<Parcel> {
    let labels = labels(live).into_iter().chain([("__name__", NAME.to_owned())]);
    let labels: Vec<_> = labels.map(|(name, value)| json!({"name": name, "value": value})).collect();
    let profile = base64(&live_profile(&live.ledger, live.trace()));
    let body = json!({"series": [{"labels": {"labels": labels}, "samples": [{"rawProfile": profile}]}], "normalized": true});
    let body = serde_json::to_vec(&body)?;
    Ok(Parcel { url: url.clone(), path: url.path.clone(), kind: "application/json", body })
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
