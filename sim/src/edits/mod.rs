//! Edits of a recorded training program: its requests under another optimizer, with other gradients, activations, precision or layout.
//!
//! ```text
//!  OpStream + what it is for ── Program::of ──> Program ── Edits::apply ──> Program ── stream() ──> OpStream ──> Laboratory
//!               (Understood)          tensors and steps        one file per family
//! ```
//! An edit follows what PyTorch does, not what one model looks like: it moves, removes and adds tensors, and says how sure it is. What only
//! another kernel decides has a range: every edit is applied three times, with the least, the likeliest and the most.

mod calls;
#[cfg(test)]
mod calls_tests;
mod checkpoint;
mod gradients;
mod holds;
#[cfg(test)]
mod holds_tests;
mod kernels;
mod layers;
mod layout;
mod nodes;
mod offload;
mod operations;
mod optimizer;
mod order;
mod precision;
mod program;
pub mod spelling;
mod sums;
mod table;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod twice_tests;

use rustc_hash::FxHashMap;

use crate::bytes::iec;

pub use self::layout::Layout;
pub use self::optimizer::{Optimizer, Way};
pub use self::precision::Precision;
pub use self::program::{Known, Phase, Program, Purpose, Understood};
pub use self::table::{Layer, Layers};

/// Why an edit cannot be answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unfit(pub String);

/// How sure an edit is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Sure {
    /// PyTorch's code decides every size and moment.
    Certain,
    /// Some sizes or moments are known within limits.
    Range,
    /// Something was assumed that the trace does not show.
    Guess,
}

impl Sure {
    /// For people and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Sure::Certain => "certain",
            Sure::Range => "range",
            Sure::Guess => "guess",
        }
    }
}

/// Which end of what is not known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The least.
    Least,
    /// The likeliest.
    Best,
    /// The most.
    Most,
}

impl End {
    /// A number between two.
    fn of(self, least: f64, best: f64, most: f64) -> f64 {
        match self {
            End::Least => least,
            End::Best => best,
            End::Most => most,
        }
    }
}

/// Which layers are checkpointed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Chosen {
    /// All that repeat.
    All,
    /// Every n-th, from the first.
    Every(usize),
    /// From one to another, counted from 0, both included.
    Layers(usize, usize),
}

/// What is kept elsewhere than on the GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Offload {
    /// What the forward pass keeps (`torch.autograd.graph.save_on_cpu`).
    Activations,
    /// The state of the optimizer, and its update.
    Optimizer,
}

/// Edits that are made together.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Edits {
    /// Another optimizer.
    pub optimizer: Option<Optimizer>,
    /// Another way to update.
    pub way: Option<Way>,
    /// Whether gradients are freed with each step.
    pub set_to_none: Option<bool>,
    /// Micro-batches for each step of the optimizer.
    pub accumulate: Option<u64>,
    /// The first share of the parameters is not trained: from 0 to 1.
    pub freeze: Option<f64>,
    /// Rank of adapters that are trained in place of the matrices.
    pub lora: Option<u64>,
    /// Layers that are recomputed in the backward pass.
    pub checkpoint: Option<Chosen>,
    /// What is kept in host memory.
    pub offload: Option<Offload>,
    /// Another number format.
    pub precision: Option<Precision>,
    /// Over several processes.
    pub layout: Option<Layout>,
}

/// What edits have made of a program.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Changes {
    /// How sure, and why.
    pub notes: Vec<(Sure, String)>,
    /// Bytes held at the peak of requested bytes before and after, by purpose.
    pub at_peak: Vec<(&'static str, u64, u64)>,
    /// In which part of a step the peak is, before and after.
    pub peak_in: (&'static str, &'static str),
    /// The part of the forward pass's time that is spent again, by the clock of the program's thread.
    pub recomputed_share: Option<f64>,
    /// Bytes that go to the host and back in each step.
    pub moved_bytes: Option<u64>,
    /// By how many bytes the peaks may be lower than any replay, beyond the margins.
    pub less: u64,
    /// What the edit frees may stay: at most, the peaks are as recorded.
    pub may_free_nothing: bool,
    margins: Margins,
}

/// By which part the peaks of a replay may be off, on both sides.
#[derive(Clone, Copy, PartialEq, PartialOrd, Debug, Default)]
pub struct Margins {
    /// Of what is allocated.
    pub allocated: f64,
    /// Of what is reserved: a few tensors of another size cut the free memory in another way.
    pub reserved: f64,
}

impl Margins {
    const fn new(allocated: f64, reserved: f64) -> Margins {
        Margins { allocated, reserved }
    }

    fn widen(&mut self, other: Margins) {
        self.allocated = self.allocated.max(other.allocated);
        self.reserved = self.reserved.max(other.reserved);
    }
}

/// Chosen after edits of 42 programs that ran on GPUs: two models of tests/golden/whatif, and those of `tests/gpu/edits.py`.
const CERTAIN: Margins = Margins::new(0.01, 0.01);
/// The optimizer, and how processes share the work.
const OF_STATE: Margins = Margins::new(0.03, 0.06);
/// The optimizer, where shapes are inferred from sizes.
const OF_SHAPES: Margins = Margins::new(0.05, 0.08);
/// When the forward and backward passes hold what they hold.
const OF_PASSES: Margins = Margins::new(0.06, 0.15);
/// What they hold: formats, and what needs a gradient.
const OF_TENSORS: Margins = Margins::new(0.1, 0.2);
/// The same of a model with convolutions: cuDNN chooses kernels, and workspaces, by formats and by what needs a gradient.
const OF_CONVOLUTIONS: Margins = Margins::new(0.1, 0.35);
/// What steps hold that request different sizes: which blocks of the cache fit the next step depends on all sizes before it.
const OF_UNEQUAL_TENSORS: Margins = Margins::new(0.1, 0.4);
/// Layers of different sizes are recomputed: which of them are decides more, and what one leaves free may not fit the next.
const OF_SIZES: Margins = Margins::new(0.1, 0.35);
/// Something is assumed.
const ASSUMED: Margins = Margins::new(0.15, 0.35);

impl Changes {
    fn note(&mut self, sure: Sure, text: impl Into<String>) {
        self.notes.push((sure, text.into()));
    }

    /// By which part the peaks may be off, where the answer is no surer than `sure`.
    #[must_use]
    pub fn margins(&self, sure: Sure) -> Margins {
        let mut margins = self.margins;
        if sure == Sure::Guess {
            margins.widen(ASSUMED);
        }
        margins
    }

    /// As sure as the least sure of them.
    #[must_use]
    pub fn sure(&self) -> Sure {
        self.notes.iter().map(|(sure, _)| *sure).max().unwrap_or(Sure::Certain)
    }
}

impl Edits {
    /// Makes all of them, those of the model first and those of the optimizer last.
    ///
    /// # Errors
    /// Why one of them cannot be answered for this program.
    pub fn apply<'a>(&self, recorded: &Program<'a>, end: End) -> Result<(Program<'a>, Changes), Unfit> {
        let mut program = recorded.clone();
        let mut changes = Changes::default();
        if recorded.has_failed() {
            changes.note(Sure::Guess, "the recorded run ran out of memory: its later requests are not known");
        }
        self.refuse_unfinished(recorded)?;
        if recorded.has_private_pools() {
            changes.note(Sure::Guess, "the program has its own memory pools, as CUDA graphs do: edits inside them are assumed to be possible");
        }
        let moves_tensors = self.checkpoint.is_some() || self.offload.is_some() || self.precision.is_some();
        if recorded.is_generated() && (moves_tensors || self.lora.is_some() || self.freeze.is_some()) {
            changes.note(
                Sure::Guess,
                "compiled code requests memory: for another program, other code is generated",
            );
        }
        let is_of_whole_step = self.precision.is_some()
            || self.lora.is_some()
            || self.freeze.is_some()
            || matches!(self.layout, Some(Layout::Fsdp(_)));
        if is_of_whole_step && recorded.accumulates() {
            return Err(Unfit(
                "the recorded run accumulates gradients: record one that does not, and add --accumulate"
                    .into(),
            ));
        }
        let updates_again = self.updates_again();
        if updates_again && !optimizer::is_in_order(recorded) {
            changes.note(
                Sure::Range,
                "the recorded optimizer orders its parameters differently from the model, as with groups: the order of its requests is assumed",
            );
        }
        if matches!(self.layout, Some(Layout::Fsdp(_))) {
            layers::keep_spans(&mut program);
        }
        self.note_not_reproduced(recorded, &mut changes);
        if updates_again && recorded.scales_gradients() {
            changes.note(
                Sure::Range,
                "the program scales its gradients: the data determines which steps are skipped, and when the state is created",
            );
        }
        self.note_unequal_steps(recorded, &mut changes);
        self.note_untrained(recorded, &mut changes);
        let optimizer = self.optimizer_after(recorded)?;
        if let Some(precision) = self.precision {
            precision::cast(&mut program, precision, end, &mut changes)?;
        }
        if let Some(rank) = self.lora {
            precision::adapt(&mut program, rank, end, &mut changes)?;
        }
        if let Some(share) = self.freeze {
            let is_frozen = |number, n| (number as f64) < (share * n as f64).floor();
            let n = gradients::freeze(&mut program, &is_frozen, end)?;
            changes.note(
                Sure::Range,
                format!("{n} parameters are frozen: no gradient, no state, and the backward pass ends at the first trained one"),
            );
        }
        if let Some(chosen) = self.checkpoint {
            checkpoint::checkpoint(&mut program, recorded, chosen, &mut changes)?;
        }
        if self.offload == Some(Offload::Activations) {
            offload::activations(&mut program, end, &mut changes)?;
        }
        match self.set_to_none {
            Some(true) => {
                gradients::clear_gradients(&mut program, end)?;
                changes.note(
                    Sure::Range,
                    "requests of the recorded backward pass are taken for gradients, to be added to earlier ones",
                );
                changes.note(
                    Sure::Range,
                    "a trace does not show where `zero_grad` runs: before the forward pass is assumed, and at most just before the backward pass",
                );
            }
            Some(false) => {
                if !gradients::are_all_known(recorded) {
                    changes.note(
                        Sure::Guess,
                        "the gradients do not match the optimizer's state in size, as beside a second copy of the weights: others may be held too",
                    );
                }
                gradients::keep_gradients(&mut program);
            }
            None => {}
        }
        if let Some(n) = self.accumulate {
            gradients::accumulate(&mut program, n)?;
            if !recorded.steps_are_equal() {
                changes.note(Sure::Range, "the recorded steps request different sizes: the micro-batches of a step are copies of one of them");
            }
        }
        if let Some(layout) = self.layout {
            layout::spread(&mut program, layout, optimizer, updates_again, end, &mut changes)?;
        } else if updates_again {
            let (optimizer, way) = optimizer.ok_or_else(unknown_optimizer)?;
            optimizer::install(&mut program, optimizer, way, &|sizes| sizes);
            note_optimizer(optimizer, &mut changes);
        }
        if self.offload == Some(Offload::Optimizer) {
            offload::optimizer(&mut program, &mut changes);
        }
        let spread = self.spread(recorded, &mut changes);
        changes.margins.widen(self.margins(recorded, changes.sure()));
        changes.margins.widen(Margins::new(spread, spread));
        // Shown of the likeliest alone.
        if end == End::Best {
            let peaks = (recorded.peak().1, program.peak().1);
            changes.at_peak = compared((recorded, peaks.0), (&program, peaks.1));
            changes.peak_in = (recorded.part_at(peaks.0), program.part_at(peaks.1));
        }
        Ok((program, changes))
    }

    /// What a step kept that ran out of memory before its backward pass was over is in no trace. Nor is what refers to the graph of a backward
    /// pass.
    fn refuse_unfinished(&self, recorded: &Program<'_>) -> Result<(), Unfit> {
        let is_of_graph = self.precision.is_some()
            || self.lora.is_some()
            || self.freeze.is_some()
            || self.checkpoint.is_some()
            || self.offload == Some(Offload::Activations);
        if is_of_graph && recorded.differentiates_twice() {
            return Err(Unfit(
                "the recorded run differentiates twice (`create_graph=True`): its backward passes keep a graph of their own, which this edit would change as well"
                    .into(),
            ));
        }
        let is_of_activations = self.precision.is_some()
            || self.lora.is_some()
            || self.freeze.is_some()
            || self.checkpoint.is_some()
            || self.accumulate.is_some()
            || self.offload == Some(Offload::Activations);
        if is_of_activations && recorded.peaks_in_unfinished_step() {
            return Err(Unfit(
                "the peak is in a step that ran out of memory before its backward pass was over: record a run that fits, with a smaller \
                 batch, and ask again"
                    .into(),
            ));
        }
        Ok(())
    }

    /// Where steps request different sizes, each finds the free memory that others left: what is reserved depends on the place of every
    /// tensor of the new optimizer among them, and not on sizes alone.
    /// By which part other batches may need more or less than those recorded, where they come together in other numbers; says why.
    fn spread(&self, recorded: &Program<'_>, changes: &mut Changes) -> f64 {
        if self.accumulate.is_none() || recorded.steps_are_equal() {
            return 0.0;
        }
        let spread = recorded.spread_of_steps();
        let percent = (100.0 * spread).ceil();
        changes.note(
            Sure::Range,
            format!("the recorded steps differ by up to {percent} % at their peaks, and accumulation combines other batches"),
        );
        spread
    }

    /// Says where the recorded optimizer is not one that the rules make again.
    fn note_not_reproduced(&self, recorded: &Program<'_>, changes: &mut Changes) {
        if self.updates_again()
            && let Some((was, is)) = optimizer::not_reproduced(recorded)
        {
            // Taken for gradients may be what is none: the state of that is not held.
            changes.less = changes.less.max(is.saturating_sub(was));
            changes.note(
                Sure::Range,
                format!(
                    "the recorded optimizer held up to {}, and torch.optim with default arguments holds {}: it has other arguments, or is another optimizer",
                    iec(was),
                    iec(is)
                ),
            );
        }
    }

    fn note_unequal_steps(&self, recorded: &Program<'_>, changes: &mut Changes) {
        if self.updates_again() && !recorded.steps_are_equal() {
            changes.note(
                Sure::Range,
                "the recorded steps request different sizes: where the new optimizer's tensors lie among them decides what is reserved",
            );
        }
    }

    /// Says where it is not known which parameters are trained.
    fn note_untrained(&self, recorded: &Program<'_>, changes: &mut Changes) {
        let chooses_parameters = self.lora.is_some() || self.freeze.is_some();
        if chooses_parameters && gradients::has_untrained(recorded) {
            changes.note(
                Sure::Guess,
                "much of the model has no gradients, as a frozen part or a copy: the edit is assumed to leave that out",
            );
        }
    }

    fn margins(&self, recorded: &Program<'_>, sure: Sure) -> Margins {
        let mut margins = match sure {
            Sure::Certain => return CERTAIN,
            Sure::Range => OF_STATE,
            Sure::Guess => ASSUMED,
        };
        let is_of_tensors = self.precision.is_some() || self.freeze.is_some() || self.lora.is_some();
        let is_of_passes = self.checkpoint.is_some()
            || self.set_to_none == Some(true)
            || self.offload == Some(Offload::Activations);
        if self.optimizer == Some(Optimizer::Adafactor) {
            margins.widen(OF_SHAPES);
        }
        if is_of_passes {
            margins.widen(OF_PASSES);
        }
        if is_of_tensors {
            margins.widen(OF_TENSORS);
        }
        if is_of_tensors && nodes::Nodes::of(recorded).has_convolutions {
            margins.widen(OF_CONVOLUTIONS);
        }
        // Accumulation takes more batches than were recorded, of sizes that nobody has seen.
        if (is_of_tensors || self.accumulate.is_some()) && !recorded.steps_are_equal() {
            margins.widen(OF_UNEQUAL_TENSORS);
        }
        margins
    }

    /// Whether all ends of what is not known come to the same program: then one of them is enough.
    #[must_use]
    pub fn has_one_end(&self) -> bool {
        self.precision.is_none()
            && self.lora.is_none()
            && self.freeze.is_none()
            && !matches!(self.layout, Some(Layout::Fsdp(_)))
            && self.offload != Some(Offload::Activations)
            && self.set_to_none != Some(true)
    }

    /// Whether the optimizer's requests follow from the gradients, and not from the recording.
    fn updates_again(&self) -> bool {
        self.optimizer.is_some()
            || self.way.is_some()
            || self.freeze.is_some()
            || self.lora.is_some()
            || matches!(self.precision, Some(Precision::Bf16))
    }

    fn optimizer_after(&self, recorded: &Program<'_>) -> Result<Option<(Optimizer, Way)>, Unfit> {
        let optimizer = self.optimizer.or(recorded.optimizer.optimizer);
        let is_of_adam = matches!(optimizer, Some(Optimizer::Adam | Optimizer::AdamW));
        if self.way.is_some() && !is_of_adam {
            return Err(Unfit(
                "--adam is for Adam and AdamW, and the optimizer is neither: name one with --optimizer"
                    .into(),
            ));
        }
        let way = self
            .way
            .or(recorded.optimizer.way.filter(|_| recorded.optimizer.optimizer == optimizer || is_of_adam));
        Ok(optimizer.map(|optimizer| (optimizer, way.unwrap_or(Way::Foreach))))
    }
}

fn unknown_optimizer() -> Unfit {
    Unfit("the recorded optimizer is not a known one of torch.optim: name one with --optimizer".into())
}

fn note_optimizer(optimizer: Optimizer, changes: &mut Changes) {
    changes.note(
        Sure::Certain,
        "the optimizer has the defaults of torch.optim: weight decay of SGD and Adam, amsgrad, and closures need more",
    );
    match optimizer {
        Optimizer::Adafactor => changes.note(
            Sure::Range,
            "Adafactor keeps a row and a column of each matrix; their lengths are inferred from the sizes of the vectors",
        ),
        Optimizer::Adam8bit => changes.note(
            Sure::Range,
            "8-bit states with scales for blocks of 256, as in bitsandbytes; its tables and staging buffers are not included",
        ),
        Optimizer::Sgd | Optimizer::Momentum | Optimizer::Adam | Optimizer::AdamW => {}
    }
}

/// Bytes at the two peaks, by purpose, for all purposes that either has.
fn compared(before: (&Program<'_>, u64), after: (&Program<'_>, u64)) -> Vec<(&'static str, u64, u64)> {
    let (before, after) = (before.0.held_at(before.1), after.0.held_at(after.1));
    let mut names: Vec<&'static str> = before.keys().chain(after.keys()).copied().collect();
    names.sort_unstable();
    names.dedup();
    let of = |held: &FxHashMap<&'static str, u64>, name| held.get(name).copied().unwrap_or(0);
    let mut rows: Vec<_> =
        names.into_iter().map(|name| (name, of(&before, name), of(&after, name))).collect();
    rows.sort_by_key(|(name, before, after)| (std::cmp::Reverse((*before).max(*after)), *name));
    rows
}
