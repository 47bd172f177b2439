//! The figures of every device: the summary for people.

use super::{SectionEntry, device_name};
use crate::model::{Mood, Section, Value};
use crate::summary::{torch_summary, used_devices};
use gputrace_analyse::story::Story;

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

fn build(story: &Story) -> Option<Section> {
    let ledger = &story.ledger;
    let mut section = Section::new("figures", "Figures")
        .fact("events", "events", Value::Count(ledger.run.n_events))
        .fact("lost_events", "lost events", Value::Count(ledger.health.n_lost()));
    for (ordinal, books) in used_devices(story) {
        section = section
            .line(Mood::Note, device_name(story, ordinal))
            .fact("allocs", "  driver allocs", Value::Count(books.allocs))
            .fact("frees", "  driver frees", Value::Count(books.frees))
            .fact("failed", "  refused by the driver", Value::Count(books.failed))
            .fact("peak_bytes", "  peak", Value::Bytes(books.physical.peak()))
            .fact("live_bytes", "  live at end", Value::Bytes(books.physical.live().bytes));
        let Some(torch) = &books.torch else { continue };
        let torch = torch_summary(story, torch);
        section = section
            .fact("torch_allocations", "  PyTorch allocations", Value::Count(torch.allocations))
            .fact("torch_frees", "  PyTorch frees", Value::Count(torch.frees))
            .fact("torch_requested", "  PyTorch peak requested", Value::bytes(torch.peak_requested_bytes))
            .fact("torch_allocated", "  PyTorch peak allocated", Value::bytes(torch.peak_allocated_bytes))
            .fact("torch_reserved", "  PyTorch peak reserved", Value::bytes(torch.peak_reserved_bytes))
            .fact("torch_device_allocs", "  PyTorch device allocs", Value::Count(torch.device_allocs))
            .fact("torch_device_frees", "  PyTorch device frees", Value::Count(torch.device_frees))
            .fact("torch_ooms", "  PyTorch out-of-memory errors", Value::Count(torch.ooms));
        section = section.lines(torch.notes.into_iter().map(|note| (Mood::Note, note)));
    }
    Some(section.warn(story.caveats()))
}
