//! Which tensors a convolution works on, from the requests of its forward and its backward pass, and what of its workspaces follows from them.
//!
//! cuDNN's kernels for tensors that are not channels last work on copies of the input, the output and the weights; beside them are parts of
//! sums that do not grow. Small convolutions are given to other kernels, but at sizes that fill the GPU these copies are what is asked for:
//! of 31 convolutions on an H100 whose forward pass took them at the largest recorded size all did so at 8 to 16 times that, and of 36 answers
//! about convolutions that took nothing in the forward pass and copies in the backward pass, 32 were that copies are taken there, too.
//!
//! ```text
//!   forward   output           workspace: copies of input, output, weights
//!   backward  gradient of input    workspace: the same
//!             gradient of weights  workspace: the same, and parts
//! ```
//!
//! The backward pass goes through the convolutions of the forward pass from the last to the first: the engine takes the node that was made
//! last of those that are ready (`ReadyQueue` in torch/csrc/autograd/engine.cpp).

use rustc_hash::FxHashMap;

use super::copies::MOST_BESIDE;
use super::law::{Law, Standing};
use super::scratch::{Scratch, is_of_convolution};
use super::{Alike, Model, Open, Which, Why};
use crate::ops::{AllocId, Allocation, Op, OpStream, StackId};

/// Copies may be longer by so many bytes: what is padded, and pointers beside them. Chosen: the largest seen is 900.
const PADDED: u64 = 2048;

/// So many convolutions of one line are looked at to find the one that a backward pass is of: of those that are only evaluated nothing else is
/// heard. Chosen: more than any network has on one line.
const MOST_WAITING: usize = 1000;

/// Which gradient, or none, a workspace is for: PyTorch remembers algorithms by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Pass {
    /// Not known.
    Any,
    Forward,
    OfInput,
    OfWeights,
}

/// A workspace that no run asked for, and that is likely at another size.
#[derive(Clone, Debug)]
pub(super) struct Missing {
    /// The request after which it is made.
    pub(super) after: AllocId,
    pub(super) law: Law,
    pub(super) pass: Pass,
}

/// The autograd node of all convolutions, with and without `transposed` (`convolution_backward` in torch/csrc/autograd).
const NODE: &str = "ConvolutionBackward";

enum Kind {
    Forward,
    Backward,
}

/// A request that is not a workspace, and the workspaces that were asked for next.
struct Tensor {
    id: AllocId,
    grows: bool,
    /// What grows and was asked for before it in a row.
    before: Option<AllocId>,
    workspaces: Vec<AllocId>,
}

/// Whether a workspace is copies alone.
fn is_as_large(workspace: u64, copies: u64) -> bool {
    workspace.checked_sub(copies).is_some_and(|beside| beside <= PADDED)
}

/// What comes of convolutions that were made in a row. Before it there may be copies of another type.
fn outputs(row: Vec<Tensor>) -> impl Iterator<Item = Tensor> {
    let n = row.len();
    let is_output = move |(index, tensor): &(usize, Tensor)| {
        tensor.grows && (*index + 1 == n || !tensor.workspaces.is_empty())
    };
    row.into_iter().enumerate().filter(is_output).map(|(_, tensor)| tensor)
}

/// A convolution of the base.
struct Convolution {
    forward: Tensor,
    of_input: Tensor,
    of_weights: Tensor,
}

impl Convolution {
    fn passes(&self) -> [(&Tensor, Pass); 3] {
        let Convolution { forward, of_input, of_weights } = self;
        [(forward, Pass::Forward), (of_input, Pass::OfInput), (of_weights, Pass::OfWeights)]
    }
}

/// Convolutions of the base.
#[derive(Default)]
struct Found {
    both: Vec<Convolution>,
    /// Of data, for which there is no gradient: the forward pass, and the gradient of weights.
    of_data: Vec<(Tensor, Tensor)>,
}

impl Model<'_> {
    /// Follows the copies in workspaces of convolutions of which both passes are known.
    pub(super) fn find_convolutions(&mut self, all: &[Alike]) {
        let Found { both, of_data } = self.convolutions(all);
        let stream = self.base().stream;
        let copies: Vec<Option<(Law, bool)>> = both.iter().map(|it| self.copies_of(it)).collect();
        // Sizes of two tensors alone may be by chance what no copies are.
        let has_copies = copies.iter().flatten().any(|(_, is_of_weights)| *is_of_weights);
        // With `cudnn.benchmark` all algorithms are tried, and the fastest taken: often one without a workspace.
        let has_tried = both.iter().flat_map(Convolution::passes).any(|(it, _)| it.workspaces.len() > 1);
        let of_transposed =
            stream.stacks.having(|frame| frame.name.to_ascii_lowercase().contains("transpose"));
        let mut laws: FxHashMap<u32, Law> = FxHashMap::default();
        let (mut missing, mut passes) = (vec![], FxHashMap::default());
        for ((tensor, pass), copies) in
            both.iter().zip(&copies).flat_map(|(it, copies)| it.passes().map(|pass| (pass, copies)))
        {
            passes.extend(tensor.workspaces.iter().map(|id| (*id, pass)));
            let Some((law, is_of_weights)) = copies.as_ref().filter(|_| has_copies) else { continue };
            match tensor.workspaces[..] {
                [] => {
                    let stack = stream.allocation(tensor.id).stack.0 as usize;
                    // What is the gradient of the input of others is the forward pass of these, in another direction.
                    let is_other = pass == Pass::OfInput && of_transposed.get(stack) == Some(&true);
                    if *is_of_weights && !has_tried && !is_other {
                        missing.push(Missing { after: tensor.id, law: law.clone(), pass });
                    }
                }
                [only] => {
                    let (size, copies) =
                        (stream.allocation(only).requested, self.basis.at(law, &self.base().at));
                    let beside = size.saturating_sub(copies);
                    // For the gradient of an input with less than copies of all there are kernels that are taken at all sizes.
                    let is_other = pass == Pass::OfInput && size < copies;
                    if beside <= MOST_BESIDE && !is_other {
                        let fit = self.fit_of[only.0 as usize];
                        laws.entry(fit).or_insert_with(|| self.basis.together(&[law], beside));
                    }
                }
                // The largest workspace of all and that of the fastest.
                _ => {}
            }
        }
        if has_copies || both.is_empty() {
            let of_data =
                of_data.iter().filter_map(|(forward, of_weights)| self.copies_of_data(forward, of_weights));
            laws.extend(of_data.collect::<Vec<_>>());
        }
        for (fit, law) in laws {
            let fit = &mut self.fits[fit as usize];
            if fit.standing != Standing::Checked {
                fit.laws.insert(0, law);
            }
        }
        self.missing = missing;
        self.passes = passes;
    }

    /// What copies its workspaces are, and whether weights are among them; none where no workspace shows it.
    fn copies_of(&self, Convolution { forward, of_input, of_weights }: &Convolution) -> Option<(Law, bool)> {
        let law = |tensor: &Tensor| &self.fits[self.fit_of[tensor.id.0 as usize] as usize].laws[0];
        let both = self.basis.together(&[law(forward), law(of_input)], 0);
        let with_weights = self.basis.together(&[&both, law(of_weights)], 0);
        let is = |law: &Law| {
            let copies = self.basis.at(law, &self.base().at);
            let mut workspaces = forward.workspaces.iter().chain(&of_input.workspaces);
            workspaces.any(|id| is_as_large(self.base().stream.allocation(*id).requested, copies))
        };
        match (is(&with_weights), is(&both)) {
            (true, _) => Some((with_weights, true)),
            (false, true) => Some((both, false)),
            (false, false) => None,
        }
    }

    /// A workspace for the gradient of weights that grows faster than tensors do, of data that were converted for the convolution: another
    /// algorithm was taken in another run, and what grows are the copies.
    fn copies_of_data(&self, forward: &Tensor, of_weights: &Tensor) -> Option<(u32, Law)> {
        let [only] = of_weights.workspaces[..] else { return None };
        let fit_of = |id: AllocId| self.fit_of[id.0 as usize];
        let law = |id: AllocId| &self.fits[fit_of(id) as usize].laws[0];
        let copies = self.basis.together(&[law(forward.before?), law(forward.id), law(of_weights.id)], 0);
        let size = self.base().stream.allocation(only).requested;
        let beside = size.checked_sub(self.basis.at(&copies, &self.base().at))?;
        let is_open = self.fits[fit_of(only) as usize].standing == Standing::Lawless;
        (is_open && beside <= MOST_BESIDE).then(|| (fit_of(only), self.basis.together(&[&copies], beside)))
    }

    /// Requests without which the program goes on, where there is no room for them: the base's, and those that no run made.
    pub(super) fn optional_at(&self) -> FxHashMap<AllocId, Pass> {
        let of_base = self.optional.iter().map(|id| (*id, self.passes.get(id).copied().unwrap_or(Pass::Any)));
        of_base.chain(self.ids_of_missing().map(|(id, missing)| (id, missing.pass))).collect()
    }

    /// In every predicted stream the same: the first after the base's.
    fn ids_of_missing(&self) -> impl Iterator<Item = (AllocId, &Missing)> {
        (self.base().stream.allocations.len() as u32..).map(AllocId).zip(&self.missing)
    }

    /// Adds what no run asked for to a stream that has the base's allocations alone; after which request each is made, where it is.
    pub(super) fn add_missing(
        &self,
        stream: &mut OpStream,
        which: Which,
        at: &[u64],
    ) -> FxHashMap<AllocId, AllocId> {
        let is_far = self.is_far(at);
        let mut after = FxHashMap::default();
        for (number, (id, missing)) in self.ids_of_missing().enumerate() {
            let is_made = is_far && which.has_missing(number);
            let requested = if is_made { self.basis.at(&missing.law, at) } else { 0 };
            let like = *stream.allocation(missing.after);
            stream.allocations.push(Allocation { requested, ..like });
            if requested > 0 {
                after.insert(missing.after, id);
            }
        }
        after
    }

    /// What no run asked for, where it may be asked for.
    pub(super) fn open_missing(&self, at: &[u64]) -> Option<Open> {
        let bytes = |missing: &Missing| self.basis.at(&missing.law, at);
        let largest = self.missing.iter().max_by_key(|missing| bytes(missing)).filter(|_| self.is_far(at))?;
        let all = self.missing.iter().fold(0, |sum: u64, missing| sum.saturating_add(bytes(missing)));
        let stream = self.base().stream;
        let site = stream.stacks.site(stream.allocation(largest.after).stack).cloned();
        Some(Open { why: Why::Missing, n_requests: self.missing.len(), bytes: (0, all), site })
    }

    /// Convolutions of which the base made both passes.
    fn convolutions(&self, all: &[Alike]) -> Found {
        let stream = self.base().stream;
        let of_conv = stream.stacks.having(is_of_convolution);
        let kind = |stack: StackId| match stream.stacks.nodes.get(&stack) {
            Some(node) => node.starts_with(NODE).then_some(Kind::Backward),
            None => (of_conv.get(stack.0 as usize) == Some(&true)).then_some(Kind::Forward),
        };
        let mut waiting: FxHashMap<u32, Vec<Tensor>> = FxHashMap::default();
        let mut found = Found::default();
        let (mut last, mut row): (Option<StackId>, Vec<Tensor>) = (None, vec![]);
        let mut finish = |stack: StackId, row: Vec<Tensor>| {
            let Some(place) = row.first().map(|first| self.places[self.base][first.id.0 as usize]) else {
                return;
            };
            let waiting = waiting.entry(place).or_default();
            match kind(stack) {
                Some(Kind::Forward) => waiting.extend(outputs(row)),
                Some(Kind::Backward) => self.pair(row, waiting, &mut found),
                None => {}
            }
        };
        for op in &stream.ops {
            let Op::Alloc(id) = *op else { continue };
            let stack = stream.allocation(id).stack;
            if last != Some(stack) {
                if let Some(last) = last {
                    finish(last, std::mem::take(&mut row));
                }
                last = kind(stack).map(|_| stack);
            }
            if last.is_none() {
                continue;
            }
            let fit = self.fit_of[id.0 as usize] as usize;
            match all[fit].scratch {
                Scratch::Workspace => row.last_mut().into_iter().for_each(|last| last.workspaces.push(id)),
                Scratch::Sum { .. } => {}
                Scratch::No => {
                    let grows = self.fits[fit].laws[0].iter().any(|term| term.product > 0);
                    let before = row
                        .last()
                        .filter(|last| last.workspaces.is_empty())
                        .and_then(|last| if last.grows { Some(last.id) } else { last.before });
                    row.push(Tensor { id, grows, before, workspaces: vec![] });
                }
            }
        }
        if let Some(last) = last {
            finish(last, row);
        }
        found
    }

    /// The backward pass of convolutions that were made in a row: the gradients of input, weights and bias of each.
    fn pair(&self, row: Vec<Tensor>, waiting: &mut Vec<Tensor>, found: &mut Found) {
        let (mut of_input, mut is_done) = (None, false);
        for tensor in row {
            if tensor.grows {
                (of_input, is_done) = (Some(tensor), false);
            } else if !std::mem::replace(&mut is_done, true) {
                let Some(forward) = self.forward_of(of_input.as_ref(), &tensor, waiting) else { continue };
                // Before the gradient of weights there may be a copy of that of the output instead, in another order.
                let size = |id: AllocId| self.base().stream.allocation(id).requested;
                let is_of_input = |it: &Tensor| forward.before.is_none_or(|input| size(it.id) == size(input));
                match of_input.take().filter(is_of_input) {
                    Some(of_input) => found.both.push(Convolution { forward, of_input, of_weights: tensor }),
                    None => found.of_data.push((forward, tensor)),
                }
            }
        }
    }

    /// The forward pass that waits for this backward pass: the last one, or the last with which a workspace is copies of all.
    fn forward_of(
        &self,
        of_input: Option<&Tensor>,
        of_weights: &Tensor,
        waiting: &mut Vec<Tensor>,
    ) -> Option<Tensor> {
        let size = |id: AllocId| self.base().stream.allocation(id).requested;
        let is_copies = |forward: &Tensor| {
            let Some(of_input) = of_input else { return false };
            let both = size(forward.id).saturating_add(size(of_input.id));
            let all = both.saturating_add(size(of_weights.id));
            let mut workspaces = of_input.workspaces.iter().chain(&forward.workspaces);
            workspaces.any(|id| is_as_large(size(*id), all) || is_as_large(size(*id), both))
        };
        let from = waiting.len().saturating_sub(MOST_WAITING);
        let index = waiting[from..].iter().rposition(is_copies).map(|index| from + index);
        let index = index.or_else(|| waiting.len().checked_sub(1))?;
        Some(waiting.remove(index))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::ops::{Builder, Frame, PoolIdx, Stacks, StreamIdx};
    use crate::predict::Run;

    const STACKS: [&str; 4] = ["", "f", "b", "c"];

    /// `f:a:8,16` is asked for by a forward pass of convolutions, so many bytes in each run, `b:` by a backward pass, `c:` by what
    /// converts there, `:` by anything else; `a-` gives it back.
    fn runs(text: &str) -> [OpStream; 2] {
        [0, 1].map(|index| {
            let frames = vec![Frame { name: "conv2d".into(), file: "net.py".into(), line: 1 }];
            let lists = vec![Box::default(), Box::from([0]), Box::from([0]), Box::from([0])];
            let nodes = [(2, "ConvolutionBackward0"), (3, "ToCopyBackward0")];
            let nodes = nodes.map(|(stack, node)| (StackId(stack), Arc::from(node))).into_iter().collect();
            let (mut builder, mut ids) = (Builder::new(0), std::collections::HashMap::new());
            builder.stream_mut().stacks = Arc::new(Stacks { frames, lists, nodes });
            for word in text.split_whitespace() {
                let Some((stack, name, sizes)) = word
                    .split_once(':')
                    .and_then(|(stack, rest)| Some((stack, rest.split_once(':')?)))
                    .map(|(stack, rest)| (stack, rest.0, rest.1))
                else {
                    let id = ids[word.trim_end_matches('-')];
                    builder.op(Op::FreeRequested(id));
                    builder.op(Op::FreeCompleted(id));
                    continue;
                };
                let requested: u64 = sizes.split(',').nth(index).unwrap().parse().unwrap();
                if requested > 0 {
                    let stack = StackId(STACKS.iter().position(|known| *known == stack).unwrap() as u32);
                    let (stream, pool) = (StreamIdx(0), PoolIdx::DEFAULT);
                    ids.insert(
                        name,
                        builder.alloc(Allocation { requested, address: 0, stack, stream, pool }),
                    );
                }
            }
            builder.finish()
        })
    }

    /// What would be asked for with so many samples, from runs with 8 and 16.
    fn at(samples: u64, text: &str) -> Vec<u64> {
        let [small, large] = &runs(text);
        let runs = vec![Run { at: vec![8], stream: small }, Run { at: vec![16], stream: large }];
        let best = Model::of(runs).unwrap().predict(&[samples]).unwrap().best;
        let asked = best.ops.iter().filter_map(|op| match op {
            Op::Alloc(id) => Some(best.allocation(*id).requested),
            _ => None,
        });
        asked.collect()
    }

    /// Two convolutions, of 100 and 50 bytes a sample in, and 50 and 25 out, with 7000 and 9000 bytes of weights.
    const FORWARD: &str = "f:one:400,800 f:u:1,8000 u- :relu:400,800 f:two:200,400 ";

    #[test]
    fn workspaces_are_copies_of_what_both_passes_show_and_are_made_where_they_were_not() {
        let backward = "b:g:400,800 b:v:9600,10200 v- b:w:9000,9000 b:x:9700,10300 x- c:copied:800,1600 \
                        b:h:800,1600 b:y:100,9400 y- b:z:7000,7000";
        let text = format!("{FORWARD} {backward}");
        // The first is 50 + 100 a sample and 7000, as the backward pass shows; the second 25 + 50 and 9000, which asked for no workspace.
        let copies = [150 * 160 + 7000, 75 * 160 + 9000];
        let far = at(160, &text);
        let forward = [8000, copies[0], 8000, 4000, copies[1]];
        let backward = [8000, copies[1], 9000, copies[1] + 100, 16000, 16000, copies[0], 7000, copies[0]];
        assert_eq!(far, [&forward[..], &backward].concat());
        // Near the runs nothing is made that they did not make.
        assert_eq!(at(20, &text).len(), far.len() - 2);
    }

    #[test]
    fn where_no_workspace_holds_weights_as_well_none_is_made_that_no_run_made() {
        let backward = "b:g:400,800 b:v:5,1200 v- b:w:9000,9000 b:h:800,1600 b:z:7000,7000";
        assert_eq!(at(160, &format!("{FORWARD} {backward}")).len(), 9);
        let with_weights = backward.replace("1200", "10200");
        assert_eq!(at(160, &format!("{FORWARD} {with_weights}")).len(), 11);
    }

    #[test]
    fn of_data_that_were_converted_the_gradient_of_weights_shows_what_grows() {
        // 100 bytes a sample in, converted, and 50 out; the workspace grew fourfold where the batch doubled, and more.
        let forward = "f:cast:800,1600 f:weights:7000,7000 f:one:400,800 :loss:4,8";
        let of = |backward: &str| *at(160, &format!("{forward} {backward}")).last().unwrap();
        assert_eq!(of("b:w:7000,7000 b:x:9000,40000 x-"), 150 * 160 + 40_000 - 150 * 16);
        // A copy of the gradient of the output is made first.
        assert_eq!(of("b:copy:400,800 b:w:7000,7000 b:x:9000,40000 x-"), 150 * 160 + 40_000 - 150 * 16);
        // Two samples more, and not twice as much: a line says how it grows.
        assert_ne!(of("b:w:7000,7000 b:x:30000,40000 x-"), 150 * 160 + 40_000 - 150 * 16);
    }

    #[test]
    fn what_is_far_larger_than_copies_is_of_another_algorithm() {
        let large = 2 * MOST_BESIDE;
        let text = format!(
            "{FORWARD} b:g:400,800 b:v:9600,10200 v- b:w:9000,9000 b:x:{},{large} x-",
            large / 2 + 50
        );
        assert!(!at(160, &text).contains(&(large + 75 * 144)));
    }
}
