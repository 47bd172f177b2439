//! Which processes had memory on a device when it ran out, as NVML listed them for the recorder.

use gputrace_schemas::event::Nanos;

use super::{SectionEntry, device_name};
use crate::model::{Mood, Section, Table, Value};
use crate::sharing::Sharing;
use gputrace_analyse::story::Story;

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

/// The newest list of a device: `gpu.processes=DEVICE N`, then N times `gpu.process=DEVICE PID BYTES NAME`.
struct Holders<'a> {
    device: i16,
    /// Why there is no list, or the list.
    listed: Result<Vec<Holder<'a>>, &'a str>,
}

struct Holder<'a> {
    pid: u64,
    bytes: Option<u64>,
    name: &'a str,
}

fn build(story: &Story) -> Option<Section> {
    let mut table = Table::new(
        "processes",
        &[("device", "device"), ("bytes", "bytes"), ("pid", "pid"), ("name", "program"), ("is_traced", "")],
    );
    let mut section = Section::new("processes", "Processes on the device then");
    let own = own_number(story);
    let lists = lists(&story.ledger.health.notes);
    let devices: Vec<i16> = lists.iter().map(|list| list.device).collect();
    if lists.is_empty() {
        return None;
    }
    for Holders { device, listed } in lists {
        let holders = match listed {
            Ok(holders) => holders,
            Err(why) => {
                section = section.line(Mood::Note, format!("{}: {why}", device_name(story, device)));
                continue;
            }
        };
        let is_listed = holders.iter().any(|holder| holder.pid == own);
        if holders.is_empty() {
            let text = "NVML lists none, not even this one: it does not list processes here (some containers and drivers)";
            section = section.line(Mood::Note, format!("{}: {text}", device_name(story, device)));
        } else if !is_listed {
            let text = "NVML does not list this process by its own number. In a container, NVML uses the host's numbers, or none, so it is not known which line is this process";
            section = section.line(Mood::Warning, format!("{}: {text}", device_name(story, device)));
        }
        for Holder { pid, bytes, name } in holders {
            table.rows.push(vec![
                Value::text(format!("cuda:{device}")),
                Value::bytes(bytes),
                Value::Count(pid),
                Value::text(name),
                Value::text(if pid == own { "this process" } else { "" }),
            ]);
        }
    }
    let limits = devices
        .into_iter()
        .flat_map(|device| Sharing::of(story, device).sentences(&device_name(story, device)));
    Some(section.table(table).lines(limits.map(|text| (Mood::Note, text))))
}

/// As NVML numbers it: in a container the recorder may have found out which number that is.
fn own_number(story: &Story) -> u64 {
    let notes = story.ledger.health.notes.iter().rev();
    let found =
        notes.filter_map(|(_, note)| note.strip_prefix("nvml.process=")?.rsplit_once(' ')?.1.parse().ok());
    found.into_iter().next().unwrap_or(u64::from(story.process.pid))
}

fn lists(notes: &[(Nanos, String)]) -> Vec<Holders<'_>> {
    let mut lists: Vec<Holders<'_>> = vec![];
    for (_, note) in notes {
        if let Some((device, rest)) = note.strip_prefix("gpu.processes=").and_then(numbered) {
            lists.retain(|known| known.device != device);
            let listed = rest.strip_prefix("unseen: ").map_or_else(|| Ok(vec![]), Err);
            lists.push(Holders { device, listed });
        } else if let Some((device, rest)) = note.strip_prefix("gpu.process=").and_then(numbered)
            && let Some(Holders { listed: Ok(holders), .. }) = lists.iter_mut().find(|it| it.device == device)
        {
            holders.extend(holder(rest));
        }
    }
    lists
}

fn numbered(text: &str) -> Option<(i16, &str)> {
    let (number, rest) = text.split_once(' ')?;
    Some((number.parse().ok()?, rest))
}

fn holder(text: &str) -> Option<Holder<'_>> {
    let mut words = text.splitn(3, ' ');
    let pid = words.next()?.parse().ok()?;
    Some(Holder { pid, bytes: words.next()?.parse().ok(), name: words.next()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_list_of_a_device_counts() {
        let notes = [
            "gpu.processes=0 1",
            "gpu.process=0 1 5 old",
            "gpu.processes=0 2",
            "gpu.process=0 7 9 python3",
            "gpu.process=0 8 ? ?",
            "gpu.processes=1 unseen: NVML is missing or did not answer",
        ];
        let notes: Vec<_> = notes.into_iter().map(|note| (Nanos(0), note.to_owned())).collect();
        let lists = lists(&notes);
        let Ok(holders) = &lists[0].listed else { panic!("it is listed") };
        let shown: Vec<_> = holders.iter().map(|it| (it.pid, it.bytes, it.name)).collect();
        assert_eq!(shown, [(7, Some(9), "python3"), (8, None, "?")]);
        assert_eq!(lists[1].listed.as_ref().err(), Some(&"NVML is missing or did not answer"));
    }
}
