//! `gputrace layers`: what each layer of a training step holds; for the page, the layer of each block.

use gputrace_report::model::{Mood, Part, Section, Shown, Table, Value};
use gputrace_schemas::event::Bytes;
use gputrace_sim::edits::{Layer, Layers, Program};
use gputrace_sim::ops::OpStream;
use gputrace_trace::import::Trace;
use gputrace_trace::source::Source;

use super::edits::{of_devices, understood, understood_from};
use super::reproduce::Lived;

/// The layers of each device of a training run.
///
/// # Errors
/// Why they are not known.
pub fn layers(path: &str, source: &Source, trace: &Trace) -> Result<Part, String> {
    let (found, _) = of_devices(trace, |stream| of(source, stream))?;
    let sections = found.iter().map(|(device, layers)| section(*device, layers)).collect();
    Ok(Part { title: path.to_owned(), sections, ..Part::default() })
}

fn of(source: &Source, stream: &OpStream) -> Result<Layers, String> {
    let understood = understood(source, stream)?;
    let program = Program::of(stream, &understood).map_err(|why| why.0)?;
    Ok(program.layers())
}

/// The layers of a trace's blocks.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct OfBlocks {
    /// Each layer in words.
    pub names: Vec<String>,
    /// The layer of each block, from 1, in the order of all blocks' births; 0 where none is known.
    pub of: Vec<u16>,
}

/// The layer of each block of a training run; none where no layers are known.
#[must_use]
pub fn of_blocks(source: &Source, trace: &Trace) -> OfBlocks {
    let mut found = OfBlocks::default();
    let is_several = trace.devices.len() > 1;
    for stream in trace.devices.iter().filter(|stream| stream.settings.is_torch()) {
        let Some(lived) = Lived::of(source, stream) else { continue };
        let understood = understood_from(&lived, source, stream);
        let Ok(program) = Program::of(stream, &understood) else { continue };
        let (first, layers) = (found.names.len() + 1, program.layers().layers);
        let on = if is_several { format!(" on cuda:{}", stream.device) } else { String::new() };
        found.names.extend(layers.iter().map(|it| format!("layer {}{on}, {}", it.number, it.called_by)));
        found.of.resize(lived.n_blocks(), 0);
        let of = program.layers_of_allocations();
        for (id, block) in lived.births() {
            if let Some(layer) = of.get(id.0 as usize).copied().flatten() {
                found.of[block] = u16::try_from(first + layer).unwrap_or(0);
            }
        }
    }
    found
}

fn section(device: u32, found: &Layers) -> Section {
    let bytes = |bytes: u64| Value::Bytes(Bytes(bytes));
    let known = |bytes: Option<u64>| Value::bytes(bytes);
    let rows = found.layers.iter().chain([&found.rest]);
    let name = |layer: &Layer| match &*layer.called_by {
        "" => Value::text("the rest"),
        called_by => Value::text(format!("{called_by}, layer {}", layer.number)),
    };
    let columns: &[Shown<'_, Layer>] = &[
        ("layer", "layer", &name),
        ("parameter_bytes", "parameters", &|it| known(it.parameters)),
        ("gradient_bytes", "gradients", &|it| bytes(it.gradients)),
        ("state_bytes", "optimizer state", &|it| known(it.state)),
        ("kept_bytes", "kept activations", &|it| bytes(it.kept)),
        ("forward_bytes", "in its forward", &|it| bytes(it.forward)),
        ("backward_bytes", "in its backward", &|it| bytes(it.backward)),
        ("forward_share", "share of forward", &|it| it.share.map_or(Value::Missing, Value::Share)),
    ];
    let title = format!("Layers of cuda:{device}, step {} of {}", found.step + 1, found.n_steps);
    let mut section = Section::new("layers", title).table(Table::of("layers", rows, columns));
    section = match found.layers.is_empty() {
        true => section.line(Mood::Note, "no layers repeat in the forward pass: one row shows all that the step holds"),
        false => section.line(
            Mood::Note,
            "checkpointing a layer frees at most its kept activations, and costs its share of the forward pass",
        ),
    };
    if found.rest.parameters.is_none() {
        section = section.line(
            Mood::Note,
            "the layer of each parameter and state is not known: the program does not clear its gradients one after the other",
        );
    } else if found.rest.state.is_none() {
        section = section.line(
            Mood::Note,
            "the layer of each state is not known: the optimizer does not keep the same number of tensors for each parameter",
        );
    }
    section
}
