//! `gputrace whatif`: the same program with another optimizer, other gradients, activations, precision or layout.

use gputrace_analyse::roles::{Places, Role, places};
use gputrace_schemas::event::StackId;
use gputrace_sim::edits::{Known, Phase, Purpose, Understood};
use gputrace_sim::ops::{AllocId, OpStream};
use gputrace_trace::source::Source;
use rustc_hash::FxHashMap;

use super::reproduce::Lived;

/// What the trace knows about each request of a stream: roles, and the parts of a training step.
///
/// # Errors
/// Why that is not known.
pub fn understood(source: &Source, stream: &OpStream) -> Result<Understood, String> {
    let lived = Lived::of(source, stream)
        .ok_or("its requests are not blocks of PyTorch's allocator: only training runs of PyTorch can be edited")?;
    let unknown = Known { purpose: Purpose::Other, phase: Phase::Outside };
    let mut of = vec![unknown; stream.allocations.len()];
    let mut seen: FxHashMap<StackId, Places> = FxHashMap::default();
    let mut births: FxHashMap<u32, AllocId> = FxHashMap::default();
    for (id, life, role) in lived.requests() {
        let places = *seen.entry(life.stack).or_insert_with(|| places(source.definitions(), life.stack));
        of[id.0 as usize] = Known { purpose: purpose(role), phase: phase(places) };
        births.insert(life.born, id);
    }
    let device = i16::try_from(stream.device).unwrap_or(i16::MAX);
    let passes = lived.roles.passes.get(&device).into_iter().flatten();
    let passes = passes.filter_map(|(first, last)| Some((*births.get(first)?, *births.get(last)?)));
    Ok(Understood { of, passes: passes.collect() })
}

fn purpose(role: Role) -> Purpose {
    match role {
        Role::Parameters | Role::Weights => Purpose::Parameter,
        Role::Gradients => Purpose::Gradient,
        Role::Optimizer => Purpose::State,
        Role::Activations | Role::Serving => Purpose::Activation,
        Role::Temporaries => Purpose::Temporary,
        Role::KvCache => Purpose::Cache,
        Role::Workspaces => Purpose::Workspace,
        Role::Kept | Role::Before | Role::Unknown => Purpose::Other,
    }
}

/// The backward pass shows the stacks of the forward pass, too.
fn phase(places: Places) -> Phase {
    match places {
        Places { optimizer: true, .. } => Phase::Update,
        Places { backward: true, .. } => Phase::Backward,
        Places { forward: true, .. } => Phase::Forward,
        Places { model: true, .. } => Phase::Model,
        Places { .. } => Phase::Outside,
    }
}
