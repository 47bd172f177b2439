//! What each layer of a training step holds.

use std::ops::Range;

use super::program::{NEVER, Phase, Program, Purpose, Span, Step, Tensor, peak_of};
use super::{layers, optimizer};

/// What a layer, or everything beside the layers, takes. Bytes as requested.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Layer {
    /// The code that calls it; empty for what is in no layer.
    pub called_by: String,
    /// Its number in the forward pass, from 0: the one that `--checkpoint layers:A..B` takes.
    pub number: usize,
    /// Parameters; `None` where it is not known which gradient belongs to which.
    pub parameters: Option<u64>,
    /// Gradients that are held until the optimizer has run.
    pub gradients: u64,
    /// State of the optimizer; `None` where it is not known which parameter a state belongs to.
    pub state: Option<u64>,
    /// Held by the forward pass until the backward pass.
    pub kept: u64,
    /// The most that the forward pass holds at once beside that.
    pub forward: u64,
    /// The most that the backward pass makes and holds at once, without gradients.
    pub backward: u64,
    /// Its part of the time of the forward pass: what computing it again would cost.
    pub share: Option<f64>,
}

/// The layers of one training step.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Layers {
    /// In the order of the forward pass.
    pub layers: Vec<Layer>,
    /// What belongs to none of them.
    pub rest: Layer,
    /// The step that is shown, from 0.
    pub step: usize,
    /// Steps of the recording.
    pub n_steps: usize,
}

impl Program<'_> {
    /// What each layer holds in a step, the second where there is one: the first also makes workspaces and state.
    #[must_use]
    pub fn layers(&self) -> Layers {
        let has_gradients = |number: &usize| !self.steps[*number].gradients.is_empty();
        let mut numbers = (1..self.steps.len()).chain([0]);
        let Some(number) = numbers.find(has_gradients).or(self.steps.len().checked_sub(1)) else {
            return Layers::default();
        };
        let step = &self.steps[number].micro_batches(self)[0];
        let stretches = layers::of(self, step);
        let spans: Vec<Span> = stretches
            .iter()
            .flat_map(|stretch| layers::backward_of(self, step, stretch))
            .map(|backward| Span { forward: (0, 0), backward })
            .collect();
        let of_gradients = layers::of_gradients(self, step, &spans);
        let owned = Owned::of(self, step);
        let (mut all, mut in_layers, mut known) = (vec![], vec![], Layer::default());
        let forward = self.born_within(step.begin, step.passes[0].0);
        let time = self.time_of(forward.clone());
        for stretch in &stretches {
            for members in &stretch.layers {
                let own = members.first().zip(members.last()).map_or(0..0, |(first, last)| *first..last + 1);
                let number = all.len();
                let span = spans[number];
                let tensors: Vec<Tensor> = members.iter().map(|index| self.tensors[*index]).collect();
                let gradients = (0..).zip(&of_gradients).filter(|(_, layer)| **layer == Some(number));
                let gradients: Vec<usize> = gradients.map(|(member, _)| member).collect();
                let layer = Layer {
                    called_by: stretch.name.clone(),
                    number,
                    share: (time > 0).then(|| (self.time_of(own) as f64 / time as f64).min(1.0)),
                    ..self.layer(step, &owned, &tensors, &gradients, &|born| span.is_backward(born))
                };
                in_layers.extend_from_slice(members);
                known.add(&layer);
                all.push(layer);
            }
        }
        in_layers.sort_unstable();
        let is_rest =
            |index: &usize| in_layers.binary_search(index).is_err() && self.tensors[*index].freed != NEVER;
        let tensors: Vec<Tensor> = forward.filter(is_rest).map(|index| self.tensors[index]).collect();
        let gradients = (0..).zip(&of_gradients).filter(|(_, layer)| layer.is_none());
        let gradients: Vec<usize> = gradients.map(|(member, _)| member).collect();
        let is_backward = |born: u64| !spans.iter().any(|span| span.is_backward(born));
        let rest = Layer {
            parameters: self.parameters_left(step, &owned, &known),
            state: self.state_left(step, &owned, &known),
            ..self.layer(step, &owned, &tensors, &gradients, &is_backward)
        };
        Layers { layers: all, rest, step: number, n_steps: self.steps.len() }
    }

    /// The layer of each allocation of the stream, by the numbers of [`Program::layers`]: what it asks for in each forward and backward
    /// pass, its gradients, and its parameters and optimizer state where it is known which these are. Steps with another number of
    /// layers are left out.
    #[must_use]
    pub fn layers_of_allocations(&self) -> Vec<Option<usize>> {
        let mut of = vec![None; self.tensors.len()];
        let n_layers = self.layers().layers.len();
        if n_layers == 0 {
            return of;
        }
        for step in self.steps.iter().flat_map(|step| step.micro_batches(self)) {
            let stretches = layers::of(self, &step);
            if stretches.iter().map(|stretch| stretch.layers.len()).sum::<usize>() != n_layers {
                continue;
            }
            for (number, members) in stretches.iter().flat_map(|stretch| &stretch.layers).enumerate() {
                members.iter().for_each(|index| of[*index] = Some(number));
            }
            let spans = stretches.iter().flat_map(|stretch| layers::backward_of(self, &step, stretch));
            let spans: Vec<Span> = spans.map(|backward| Span { forward: (0, 0), backward }).collect();
            for index in self.born_within(step.passes[0].0, step.update) {
                let it = &self.tensors[index];
                if it.phase == Phase::Backward && it.purpose != Purpose::Gradient {
                    of[index] = of[index].or_else(|| spans.iter().position(|span| span.is_backward(it.born)));
                }
            }
            let sizes: Vec<u64> = step.gradients.iter().map(|index| self.tensors[*index].bytes).collect();
            let (parameters, states) = match self.knows_order {
                true => (self.parameters_of(&sizes), optimizer::state_tensors(self, &step)),
                false => (vec![], None),
            };
            let states = states.unwrap_or_default();
            for (member, layer) in layers::of_gradients(self, &step, &spans).into_iter().enumerate() {
                let parameter = parameters.get(member).copied().flatten();
                let own = states.get(member).into_iter().flatten().copied();
                for index in own.chain(parameter).chain([step.gradients[member]]) {
                    of[index] = layer.or(of[index]);
                }
            }
        }
        of
    }

    /// Parameters that belong to no layer.
    fn parameters_left(&self, step: &Step, owned: &Owned, of_layers: &Layer) -> Option<u64> {
        owned.parameters.as_ref()?;
        let is_held = |it: &&Tensor| it.purpose == Purpose::Parameter && it.is_held_at(step.begin);
        let all: u64 = self.tensors.iter().filter(is_held).map(|it| it.bytes).sum();
        Some(all.saturating_sub(of_layers.parameters.unwrap_or(0)))
    }

    /// The same of the optimizer's state.
    fn state_left(&self, step: &Step, owned: &Owned, of_layers: &Layer) -> Option<u64> {
        owned.state.as_ref()?;
        let all: u64 = optimizer::recorded_states(self, step)?.iter().flatten().sum();
        Some(all.saturating_sub(of_layers.state.unwrap_or(0)))
    }

    /// Nanoseconds from the first of these tensors to the one after the last.
    fn time_of(&self, tensors: Range<usize>) -> u64 {
        let at = |index: usize| self.tensors.get(index).map_or(0, |it| it.time);
        at(tensors.end).saturating_sub(at(tensors.start))
    }

    /// Of tensors of the forward pass, gradients by their positions, and the moments of its backward pass.
    fn layer(
        &self,
        step: &Step,
        owned: &Owned,
        forward: &[Tensor],
        gradients: &[usize],
        is_backward: &dyn Fn(u64) -> bool,
    ) -> Layer {
        let start = step.passes[0].0;
        let (kept, passing): (Vec<Tensor>, Vec<Tensor>) = forward.iter().partition(|it| it.freed > start);
        let of_backward = self.tensors[self.born_within(start, step.update)].iter();
        let backward: Vec<Tensor> = of_backward
            .filter(|it| it.phase == Phase::Backward && it.purpose != Purpose::Gradient)
            .filter(|it| is_backward(it.born) && it.freed != NEVER)
            .copied()
            .collect();
        let sum = |of: &Option<Vec<u64>>| {
            of.as_ref().map(|of| gradients.iter().filter_map(|member| of.get(*member)).sum())
        };
        Layer {
            parameters: sum(&owned.parameters),
            gradients: gradients.iter().map(|member| self.tensors[step.gradients[*member]].bytes).sum(),
            state: sum(&owned.state),
            kept: kept.iter().map(|it| it.bytes).sum(),
            forward: peak_of(&passing).0,
            backward: peak_of(&backward).0,
            ..Layer::default()
        }
    }
}

impl Layer {
    fn add(&mut self, other: &Layer) {
        let sum = |one: Option<u64>, other: Option<u64>| Some(one.unwrap_or(0) + other?);
        self.parameters = sum(self.parameters, other.parameters);
        self.state = sum(self.state, other.state);
    }
}

/// Bytes that belong to each gradient of a step, in their order.
struct Owned {
    parameters: Option<Vec<u64>>,
    state: Option<Vec<u64>>,
}

impl Owned {
    fn of(program: &Program<'_>, step: &Step) -> Owned {
        if !program.knows_order {
            return Owned { parameters: None, state: None };
        }
        let sizes: Vec<u64> = step.gradients.iter().map(|index| program.tensors[*index].bytes).collect();
        let parameters = program.parameters_of(&sizes).into_iter();
        let parameters = parameters.map(|index| index.map_or(0, |index| program.tensors[index].bytes));
        let state = optimizer::recorded_states(program, step);
        let state = state.map(|state| state.iter().map(|own| own.iter().sum()).collect());
        Owned { parameters: Some(parameters.collect()), state }
    }
}
