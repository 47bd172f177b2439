//! One model in several processes on one card: each process pays for weights of its own.

use std::collections::BTreeMap;

use crate::code::Sources;
use gputrace_analyse::held::{Holder, Sign};
use gputrace_analyse::story::Story;
use gputrace_schemas::event::{Bytes, Nanos};
use gputrace_trace::words::{bytes, count};

/// Smaller blocks say nothing about models.
const LEAST_WEIGHT: u64 = 1 << 16;
/// Copies are worth a word from this part of the card on: one in so many.
const LEAST_PART: u64 = 20;
/// Or where weights are most of what a process holds, and the copies more than the contexts that their processes need anyway.
const LEAST_SPARE: u64 = 512 << 20;

/// The weights that a process held at the peak of a device.
#[derive(Clone, Debug)]
pub struct Model {
    /// The device's own identity and that of the running kernel.
    card: (String, String),
    total: Bytes,
    pid: u32,
    /// The line that made most of them.
    site: String,
    sizes: BTreeMap<u64, u64>,
    bytes: Bytes,
    /// All that PyTorch held then.
    held: Bytes,
    time: (Nanos, Nanos),
    /// By the program's source, `torch.load` without `map_location` made them.
    is_loaded: bool,
}

impl Model {
    /// Those of a process, one for each device.
    #[must_use]
    pub fn all_of(story: &Story) -> Vec<Model> {
        let Some(lifetimes) = &story.lifetimes else { return vec![] };
        let role = |holder: &Holder| {
            lifetimes.role_names.get(usize::from(holder.role)).map_or("", |(name, _)| name.as_str())
        };
        let mut models = vec![];
        for held in &lifetimes.at_peak {
            let Some(device) = story.device(held.device).filter(|it| !it.uuid.is_empty()) else { continue };
            // Of a model that never ran, only its making is known.
            let is_made = |it: &Holder| it.signs.has(Sign::Model) && !it.signs.has(Sign::Backward);
            let is_weight = |it: &&Holder| matches!(role(it), "parameters" | "weights") || is_made(it);
            let weights = || held.holders.iter().filter(is_weight);
            let mut sizes: BTreeMap<u64, u64> = BTreeMap::new();
            let all = weights().flat_map(|holder| &holder.sizes).filter(|(size, _)| size.0 >= LEAST_WEIGHT);
            all.for_each(|(size, n)| *sizes.entry(size.0).or_default() += n);
            let Some(most) = weights().max_by_key(|holder| holder.bytes) else { continue };
            models.push(Model {
                card: (story.process.boot.clone(), device.uuid.clone()),
                total: device.total,
                pid: story.process.pid,
                site: story.ledger.sites.site_name(most.site),
                bytes: Bytes(sizes.iter().map(|(size, n)| size * n).sum()),
                sizes,
                held: held.bytes,
                time: (story.process.start, story.ledger.run.last),
                is_loaded: is_loaded(story, most),
            });
        }
        models
    }

    /// The same weights, on the same card, at the same time.
    fn is_copy_of(&self, other: &Model) -> bool {
        let is_at_once = self.time.0 < other.time.1 && other.time.0 < self.time.1;
        self.card == other.card
            && self.pid != other.pid
            && self.site == other.site
            && self.sizes == other.sizes
            && is_at_once
    }
}

/// Whether the line loads tensors to where they were saved from.
fn is_loaded(story: &Story, holder: &Holder) -> bool {
    let Some(site) = story.ledger.sites.site(holder.site) else { return false };
    let text = Sources::of(&story.process).text(&site.file, site.line).unwrap_or_default();
    text.contains("torch.load(") && !text.contains("map_location")
}

/// What several processes hold of one model on one card, in words; none where that is little.
#[must_use]
pub fn in_words(models: &[Model]) -> Option<String> {
    let copies = |of: &Model| models.iter().filter(|it| it.is_copy_of(of)).count() as u64;
    let spare = |of: &Model| of.bytes.0.saturating_mul(copies(of));
    let most = models.iter().max_by_key(|it| (spare(it), it.bytes))?;
    let (n, spare) = (copies(most), spare(most));
    let is_of_card = most.total.0 > 0 && spare.saturating_mul(LEAST_PART) >= most.total.0;
    let is_most = most.bytes.0.saturating_mul(2) >= most.held.0 && spare >= LEAST_SPARE;
    (n > 0 && (is_of_card || is_most)).then(|| {
        if most.is_loaded {
            return format!(
                "{} processes each load the same checkpoint onto one card, and have a CUDA context there: {} of its tensors each, at {}. `torch.load` puts tensors on the device that they were saved from: pass `map_location=\"cpu\"` there, and move to the card what it computes with",
                count(n + 1),
                bytes(most.bytes),
                most.site
            );
        }
        format!(
            "{} processes each hold a model of the same sizes on one card, and a CUDA context: {} of weights each, made at {}. All but one hold {} of weights together: let one process own the model and serve the others through a queue, or start fewer processes",
            count(n + 1),
            bytes(most.bytes),
            most.site,
            bytes(Bytes(spare))
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(pid: u32, card: &str, time: (u64, u64)) -> Model {
        Model {
            card: ("boot".into(), card.into()),
            total: Bytes(8 << 30),
            pid,
            site: "worker (serve.py:8)".into(),
            sizes: BTreeMap::from([(64 << 20, 16)]),
            bytes: Bytes(1 << 30),
            held: Bytes(3 << 30),
            time: (Nanos(time.0), Nanos(time.1)),
            is_loaded: false,
        }
    }

    #[test]
    fn copies_count_on_one_card_at_one_time() {
        let at_once = [1, 2, 3].map(|pid| model(pid, "GPU-a", (0, 10)));
        let text = in_words(&at_once).expect("copies");
        assert!(
            text.starts_with("3 processes each hold") && text.contains("hold 2.00 GiB of weights together"),
            "{text}"
        );
        let on_large_card =
            [1, 2].map(|pid| Model { total: Bytes(80 << 30), ..model(pid, "GPU-a", (0, 10)) });
        assert_eq!(in_words(&on_large_card), None);
        let only_models = on_large_card.map(|it| Model { held: Bytes(3 << 29), ..it });
        assert!(in_words(&only_models).is_some());
        let on_own_cards = [model(1, "GPU-a", (0, 10)), model(2, "GPU-b", (0, 10))];
        assert_eq!(in_words(&on_own_cards), None);
        let in_turn = [model(1, "GPU-a", (0, 10)), model(2, "GPU-a", (10, 20))];
        assert_eq!(in_words(&in_turn), None);
    }
}
