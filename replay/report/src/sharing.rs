//! How a device is shared: as a MIG instance of a card, or among clients of MPS. From the recorder's notes, and from the variables that the
//! process had.

use gputrace_schemas::event::Bytes;

use gputrace_analyse::story::Story;
use gputrace_trace::words::bytes;

/// Limits of a client's memory, `0=1G,1=512M` (MPS guide, environment variables).
const LIMITS: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
/// Variables that only clients of MPS need begin so.
const MPS: &str = "CUDA_MPS_";

/// How a device of a process is shared.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Sharing {
    /// The UUID of the MIG instance that the device is.
    pub instance: Option<String>,
    /// The UUID of the card that it is a part of.
    pub card: Option<String>,
    /// Other compute instances use the same memory, as the name says: `1c.3g.20gb`.
    pub shares_memory: bool,
    /// Why NVML has no figures of the device.
    pub unknown: Option<String>,
    /// Whether the process was a client of MPS there; `None` where it may have been.
    pub is_client: Option<bool>,
    /// The MPS server's number, and what it holds there.
    pub server: Option<(u32, Option<Bytes>)>,
    /// What MPS lets the client have of the device, by its environment.
    pub limit: Option<Bytes>,
}

impl Sharing {
    /// Of the device with this ordinal.
    #[must_use]
    pub fn of(story: &Story, ordinal: i16) -> Sharing {
        let device = story.device(ordinal);
        let uuid = device.map(|device| device.uuid.clone()).filter(|uuid| uuid.starts_with("MIG-"));
        let mut sharing = Sharing { instance: uuid, is_client: Some(false), ..Sharing::default() };
        for (_, note) in &story.ledger.health.notes {
            if let Some(said) = of_device(note, "nvml.device=", ordinal) {
                match said.strip_prefix("unknown: ") {
                    Some(why) => sharing.unknown = Some(why.to_owned()),
                    None => sharing.part(said),
                }
            } else if let Some(said) = of_device(note, "nvml.mps=", ordinal) {
                sharing.mps(said);
            }
        }
        let part = device.and_then(|device| device.name.split_once(" MIG "));
        sharing.shares_memory =
            part.is_some_and(|(_, part)| part.split('.').next().is_some_and(|first| first.ends_with('c')));
        let variables = &story.process.environment;
        if sharing.is_client == Some(false) && variables.iter().any(|(name, _)| name.starts_with(MPS)) {
            sharing.is_client = None;
        }
        let limits = variables.iter().find(|(name, _)| name == LIMITS);
        sharing.limit = limits.and_then(|(_, limits)| limit(limits, ordinal));
        sharing
    }

    fn part(&mut self, said: &str) {
        if let Some((instance, card)) = said.split_once(" of ") {
            self.instance = Some(instance.to_owned());
            self.card = Some(card.to_owned());
        }
    }

    fn mps(&mut self, said: &str) {
        self.is_client = Some(true);
        let mut words = said.strip_prefix("server ").unwrap_or_default().split(' ');
        if let Some(pid) = words.next().and_then(|pid| pid.parse().ok()) {
            self.server = Some((pid, words.next().and_then(|bytes| bytes.parse().ok()).map(Bytes)));
        }
    }

    /// Sentences about a device that is called `name`.
    #[must_use]
    pub fn sentences(&self, name: &str) -> Vec<String> {
        let mut said = vec![];
        if let Some(instance) = &self.instance {
            let card =
                self.card.as_ref().map_or_else(|| "a card".to_owned(), |card| format!("the card {card}"));
            let others = match self.shares_memory {
                true => "; other compute instances use the same memory, which counts as held by others",
                false => "",
            };
            said.push(format!(
                "{name} is the MIG instance {instance} of {card}: its size and the driver's figures are those of the instance{others}"
            ));
        }
        if let Some(why) = &self.unknown {
            said.push(format!("the driver's figures of {name} are not known: {why}"));
        }
        match self.is_client {
            Some(true) => {
                let server = match self.server {
                    Some((pid, Some(held))) => format!(
                        "its server (process {pid}) holds {} for all clients, which counts as held by others; each client's share of it is not known",
                        bytes(held)
                    ),
                    Some((pid, None)) => {
                        format!(
                            "the memory that its server (process {pid}) holds for all clients is not known"
                        )
                    }
                    None => "the memory that its server holds for all clients was not seen".to_owned(),
                };
                said.push(format!(
                    "the process runs under MPS on {name}: NVML charges it only with its own memory; {server}, and a limit set by the daemon is not recorded"
                ));
            }
            None => said.push(format!(
                "{MPS}* is set, and NVML does not report whether the process runs under MPS on {name}: it may"
            )),
            Some(false) => {}
        }
        if let Some(limit) = self.limit.filter(|_| self.is_client != Some(false)) {
            said.push(format!("under MPS the process may use {} of {name} ({LIMITS})", bytes(limit)));
        }
        said
    }
}

/// What a note `PREFIX ORDINAL TEXT` says of a device.
fn of_device<'a>(note: &'a str, prefix: &str, ordinal: i16) -> Option<&'a str> {
    let (number, said) = note.strip_prefix(prefix)?.split_once(' ')?;
    (number.parse() == Ok(ordinal)).then_some(said)
}

/// The limit of a device in a list of them.
fn limit(limits: &str, ordinal: i16) -> Option<Bytes> {
    let of_device = limits.split(',').filter_map(|limit| limit.trim().split_once('='));
    let mut own = of_device.filter(|(device, _)| device.trim().parse() == Ok(ordinal));
    let text = own.next()?.1.trim().to_ascii_uppercase();
    let text = text.strip_suffix('B').unwrap_or(&text);
    let (number, shift) = match text.strip_suffix(['G', 'M', 'K']) {
        Some(number) => (
            number,
            if text.ends_with('G') {
                30
            } else if text.ends_with('M') {
                20
            } else {
                10
            },
        ),
        None => (text, 0),
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift).map(Bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gputrace_schemas::event::{Event, EventKind, Nanos, StackId, ThreadId};
    use gputrace_trace::scene;

    fn told(name: &str, notes: &[&str], variables: &[(&str, &str)]) -> Vec<String> {
        let mut recording = scene::recording("Init");
        recording.devices[0].name = name.to_owned();
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        recording.process.environment = variables.collect();
        recording.events.extend(notes.iter().map(|note| Event {
            time: Nanos(9),
            thread: ThreadId(0),
            stack: StackId(0),
            kind: EventKind::Note((*note).to_owned()),
        }));
        Sharing::of(&Story::of("a.gtr", &recording), 0).sentences("cuda:0")
    }

    #[test]
    fn a_whole_card_of_ones_own_is_not_shared() {
        assert_eq!(
            told("NVIDIA H200", &["nvml.process=by pid 7", "nvml.device=1 unknown: it is another's"], &[]),
            [""; 0]
        );
    }

    #[test]
    fn an_instance_is_told_with_its_card_and_with_who_shares_its_memory() {
        let told = told("NVIDIA A100 MIG 1c.3g.20gb", &["nvml.device=0 MIG-1 of GPU-2"], &[]);
        assert_eq!(
            told,
            [
                "cuda:0 is the MIG instance MIG-1 of the card GPU-2: its size and the driver's figures are those of the instance; other compute instances use the same memory, which counts as held by others"
            ]
        );
    }

    #[test]
    fn a_client_of_mps_is_told_with_its_server_and_its_limit() {
        let limits = [("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "1=512M, 0=1GB")];
        let told_of = told("NVIDIA H200", &["nvml.mps=0 client", "nvml.mps=0 server 12 28311552"], &limits);
        assert!(
            told_of[0].contains("its server (process 12) holds 27.00 MiB for all clients"),
            "{told_of:?}"
        );
        assert_eq!(
            told_of[1],
            "under MPS the process may use 1.00 GiB of cuda:0 (CUDA_MPS_PINNED_DEVICE_MEM_LIMIT)"
        );
        let perhaps = told("NVIDIA H200", &[], &[("CUDA_MPS_PIPE_DIRECTORY", "/tmp/mps")]);
        assert!(perhaps[0].ends_with("runs under MPS on cuda:0: it may"), "{perhaps:?}");
    }

    #[test]
    fn limits_are_read_as_mps_reads_them() {
        assert_eq!(limit("0=1G,1=512MB", 1), Some(Bytes(512 << 20)));
        assert_eq!((limit("0=4606M", 0), limit("0=4606M", 1)), (Some(Bytes(4606 << 20)), None));
        assert_eq!((limit("0=x", 0), limit("0=99999999999999G", 0), limit("", 0)), (None, None, None));
    }
}
