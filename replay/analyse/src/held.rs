//! What PyTorch's blocks held at one moment, by line, and what their stacks show: facts that causes are made of.

use std::cmp::{Ordering, Reverse};
use std::collections::BTreeMap;

use gputrace_schemas::event::{Bytes, Frame, Nanos, StackId};
use gputrace_sim::stacks::python_package;
use rustc_hash::FxHashMap;

use crate::holdings::{self, Holding, Partition, failed_at};
use crate::libraries::{Offer, When, offers};
use crate::lives::{Life, Lives, NEVER};
use crate::piles::{self, Pile};
use crate::roles::{self, Roles};
use gputrace_trace::Definitions;
use gputrace_trace::backward::{place, python_lines};
use gputrace_trace::by_stack::ByStack;
use gputrace_trace::ledger::{Ledger, SiteId};

/// Most sizes that are kept of one line.
const MOST_SIZES: usize = 4096;
/// Most requests that are kept of the line whose request failed.
const MOST_REQUESTS: usize = 1 << 16;

/// Memory held at a moment.
#[derive(Clone, Debug, Default)]
pub struct HeldAt {
    /// On which device.
    pub device: i16,
    /// When.
    pub time: Nanos,
    /// All of PyTorch's blocks.
    pub bytes: Bytes,
    /// By line, role and stack's facts, most first.
    pub holders: Vec<Holder>,
    /// The same taken apart by purpose, most first: of failures and peaks.
    pub holdings: Vec<Holding>,
    /// Memory requested by one stack again and again and held together, most first.
    pub piles: Vec<Pile>,
    /// What models had made as they ran and freed before a backward pass began, if none waited for more: of failures and peaks.
    pub evaluated: Bytes,
    /// What the line of the request that failed then had requested before: when, and how much. The latest.
    pub requested_before: Vec<(Nanos, Bytes)>,
    /// What all lines had requested by the request that failed then. The latest.
    pub asked_before: Vec<Asked>,
    /// All of the program's own lines of the request that failed then, innermost first: function, file and line.
    pub failed_own: Vec<(String, String, u32)>,
    /// How often the line of the request that failed then requested memory before and after it.
    pub n_before: u64,
    /// After it.
    pub n_after: u64,
    /// The largest of those after it.
    pub most_after: Bytes,
}

/// A request that went well before another failed.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// When.
    pub since: Nanos,
    /// Its line.
    pub site: SiteId,
    /// How much.
    pub requested: Bytes,
    /// Whether it was still held when the other failed.
    pub is_held: bool,
}

/// Memory that one line held for one purpose.
#[derive(Clone, Debug)]
pub struct Holder {
    /// Which line.
    pub site: SiteId,
    /// Its purpose: an index of [`crate::lifetimes::Lifetimes::role_names`].
    pub role: u16,
    /// Signs of its stacks.
    pub signs: Signs,
    /// How much.
    pub bytes: Bytes,
    /// In how many blocks.
    pub blocks: u64,
    /// On which streams.
    pub streams: Vec<Option<u64>>,
    /// The requested sizes, each with its number.
    pub sizes: BTreeMap<Bytes, u64>,
    /// When the first of it was requested.
    pub since: Nanos,
    /// A stack of it.
    pub stack: StackId,
    /// The largest block of the line that had been freed by then.
    pub before: Bytes,
    /// Different sizes that the line ever requested, if each new one was larger than those before; else 0.
    pub rising_sizes: u64,
    /// The program's line that called the model, if the stack is in one.
    pub caller: String,
    /// The program's innermost lines of the stack, `a, called from b`.
    pub lines: String,
    /// All of the program's own lines of it, innermost first: function, file and line.
    pub own: Vec<(String, String, u32)>,
    /// Blocks that models requested between the first of it and that moment.
    pub worked_since: u64,
    /// Those of them that were still held then.
    pub kept_since: u64,
    /// What the libraries on that stack offer against it, the innermost first.
    pub offers: Vec<&'static Offer>,
}

macro_rules! signs {
    ($( $(#[$doc:meta])* $sign:ident, )*) => {
        /// What a stack shows, as far as causes ask for it.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum Sign { $( $(#[$doc])* $sign, )* }
    };
}

signs! {
    /// In `torch.load`, or in a loader of safetensors.
    Load,
    /// In the `foreach` implementation of an optimizer: it works on lists of tensors.
    Foreach,
    /// In a hook of a module, in the user's code.
    Hook,
    /// In the backward pass.
    Backward,
    /// In an optimizer.
    Optimizer,
    /// Where modules make or move their parameters.
    Model,
    /// A workspace of cuBLAS.
    Workspace,
    /// In the code of a model.
    Forward,
    /// In a function of `torch.nn.functional`: a loss, an activation.
    Functional,
    /// Moved to the GPU by the user's own line (`.cuda()`, `.to()`), or made there.
    Own,
    /// Made by `DistributedDataParallel` itself: its buckets.
    Buckets,
    /// The gradient of an embedding.
    Embedding,
    /// In `copy.deepcopy`, or in `clone` of what a `state_dict` has.
    Copy,
    /// In a function that is computed again in the backward pass.
    Checkpointed,
    /// In `forward` of a `torch.autograd.Function`.
    Function,
    /// In a function, a class or a file of attention, or beside a softmax.
    Attention,
    /// In a backward pass that `torch.autograd.grad` began.
    Grad,
    /// In `Module.double`.
    Double,
    /// In a function that `torch.no_grad` or `torch.inference_mode` decorates: nothing there has a graph.
    NoGrad,
    /// Where an optimizer makes its state.
    State,
}

/// Several of these.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Signs(u32);

impl Signs {
    /// Whether a stack shows it.
    #[must_use]
    pub fn has(self, sign: Sign) -> bool {
        self.0 & (1 << sign as u16) != 0
    }

    fn with(self, sign: Sign, is_there: bool) -> Signs {
        if is_there { Signs(self.0 | 1 << sign as u16) } else { self }
    }

    /// Of a stack.
    #[must_use]
    pub fn of(definitions: &dyn Definitions, id: StackId, requested: Bytes) -> Signs {
        let Some(stack) = definitions.stack(id) else { return Signs::default() };
        let lines: Vec<(&str, &str, u32)> = python_lines(definitions, stack).collect();
        let any = |is: &dyn Fn(&str, &str) -> bool| {
            lines.iter().any(|(function, file, _)| is(last(function), file))
        };
        let is_load = any(&|function, file| {
            file.contains("/torch/serialization.py")
                || file.contains("/safetensors/") && function.starts_with("load")
        });
        let is_foreach =
            any(&|function, file| file.contains("/torch/optim/") && function.starts_with("_multi_tensor"));
        let is_hook = lines.windows(2).any(|pair| {
            let ((function, file, _), (caller, module, _)) = (pair[0], pair[1]);
            let is_called = module.contains("/torch/nn/modules/module.py")
                && matches!(last(caller), "_call_impl" | "inner");
            is_called && last(function) != "forward" && python_package(file).is_none()
        });
        let innermost = lines.first().map(|(function, file, _)| (last(function), *file));
        let is_buckets = innermost.is_some_and(|(function, file)| {
            file.ends_with("/torch/nn/parallel/distributed.py")
                && matches!(function, "_ddp_init_helper" | "_pre_forward" | "_post_forward" | "__init__")
        });
        let is_embedding =
            stack.backward.as_ref().is_some_and(|backward| backward.node.contains("Embedding"));
        let is_copy = any(&|function, file| {
            file.ends_with("/copy.py") && function == "deepcopy" || function == "__deepcopy__"
        });
        let is_checkpointed = any(&|_, file| file.ends_with("/torch/utils/checkpoint.py"));
        let is_function =
            any(&|function, file| file.ends_with("/torch/autograd/function.py") && function == "apply");
        let is_attention = lines.iter().any(|(function, file, _)| {
            let name = function.to_ascii_lowercase();
            let file = file.rsplit('/').next().unwrap_or_default();
            ["attention", "attn"].iter().any(|word| name.contains(word) || file.contains(word))
        });
        let is_double = lines.iter().any(|(function, file, _)| {
            file.ends_with("/torch/nn/modules/module.py") && function.contains("Module.double")
        });
        let is_native_engine = stack.frames.iter().filter_map(|frame| definitions.frame(*frame)).any(
            |frame| matches!(frame, Frame::Native { function, .. } if function.contains("torch::autograd::Engine::")),
        );
        let caller = stack.backward.as_ref().and_then(|backward| definitions.stack(backward.caller));
        let is_grad = caller.is_some_and(|caller| {
            python_lines(definitions, caller).any(|(function, file, _)| {
                last(function) == "grad" && file.ends_with("/torch/autograd/__init__.py")
            })
        });
        // Both are `decorate_context`; a closure of LBFGS runs with gradients inside one.
        let is_no_grad = any(&|function, file| {
            function == "decorate_context" && file.ends_with("/torch/utils/_contextlib.py")
        }) && !any(&|_, file| file.contains("/torch/optim/"));
        let is_state = any(&|function, file| file.contains("/torch/optim/") && function == "_init_group");
        let facts = roles::places(definitions, id);
        Signs::default()
            .with(Sign::Grad, is_grad)
            .with(Sign::Double, is_double)
            .with(Sign::NoGrad, is_no_grad)
            .with(Sign::State, is_state)
            .with(Sign::Load, is_load)
            .with(Sign::Foreach, is_foreach)
            .with(Sign::Hook, is_hook)
            .with(Sign::Backward, stack.backward.is_some() || is_native_engine || facts.backward)
            .with(Sign::Optimizer, facts.optimizer)
            .with(Sign::Model, facts.model)
            .with(Sign::Workspace, roles::is_workspace(definitions, id, requested))
            .with(Sign::Forward, facts.forward || any(&|function, _| function == "forward"))
            .with(Sign::Functional, any(&|_, file| file.contains("/torch/nn/functional.py")))
            .with(Sign::Buckets, is_buckets)
            .with(Sign::Embedding, is_embedding)
            .with(Sign::Copy, is_copy)
            .with(Sign::Checkpointed, is_checkpointed)
            .with(Sign::Function, is_function)
            .with(Sign::Attention, is_attention)
            .with(Sign::Own, lines.first().is_some_and(|(_, file, _)| python_package(file).is_none()))
    }
}

fn last(function: &str) -> &str {
    function.rsplit('.').next().unwrap_or(function)
}

/// What the stacks of all lives show, each stack looked at once.
pub(crate) fn signs_of(lives: &Lives, definitions: &dyn Definitions) -> Vec<Signs> {
    // Of requests of the size of a workspace in the second.
    let mut known: [ByStack<Signs>; 2] = Default::default();
    let others = roles::not_workspaces(lives);
    let mut all = Vec::with_capacity(lives.list.len());
    all.extend(lives.list.iter().map(|life| {
        let is_result = others.contains(&(life.stack, life.requested));
        let is_of_size = roles::is_workspace_size(life.requested) && !is_result;
        // Any other size shows that it is no workspace.
        let requested = if is_of_size { life.requested } else { Bytes(0) };
        known[usize::from(is_of_size)].get_or(life.stack, || Signs::of(definitions, life.stack, requested))
    }));
    all
}

/// All lives, and what is known of them.
#[derive(Clone, Copy)]
pub(crate) struct Known<'a> {
    pub lives: &'a Lives,
    pub roles: &'a Roles,
    /// Of each life.
    pub signs: &'a [Signs],
    pub ledger: &'a Ledger,
    pub definitions: &'a dyn Definitions,
}

impl Holder {
    /// What a library offers against it.
    #[must_use]
    pub fn offer(&self, when: When) -> Option<&'static str> {
        self.offers.iter().find(|offer| offer.when == when).map(|offer| offer.fix)
    }
}

impl HeldAt {
    /// The lives of a device that `is_held` names.
    pub(crate) fn of(
        Known { lives, roles, signs, definitions, .. }: Known<'_>,
        (device, time): (i16, Nanos),
        is_held: impl Fn(&Life) -> bool,
    ) -> HeldAt {
        let mut by_line: FxHashMap<(SiteId, u16, Signs), Holder> = FxHashMap::default();
        let mut bytes = 0_u64;
        let known = lives.list.iter().zip(&roles.of_lives).zip(signs);
        let own = known.filter(|((life, _), _)| life.device == device && life.since <= time);
        let (mut n_worked, mut n_kept) = (0, 0);
        for ((life, role), signs) in own {
            n_worked += u64::from(signs.has(Sign::Forward));
            if !is_held(life) {
                continue;
            }
            n_kept += u64::from(signs.has(Sign::Forward));
            bytes = bytes.saturating_add(life.bytes.0);
            let holder = by_line.entry((life.site, *role, *signs)).or_insert_with(|| Holder {
                site: life.site,
                role: *role,
                signs: *signs,
                bytes: Bytes(0),
                blocks: 0,
                streams: vec![],
                sizes: BTreeMap::new(),
                since: life.since,
                stack: life.stack,
                before: Bytes(0),
                rising_sizes: 0,
                caller: String::new(),
                lines: String::new(),
                own: vec![],
                worked_since: n_worked,
                kept_since: n_kept,
                offers: vec![],
            });
            holder.bytes.0 += life.bytes.0;
            holder.blocks += 1;
            let stream = lives.stream(life);
            if !holder.streams.contains(&stream) && holder.streams.len() < MOST_SIZES {
                holder.streams.push(stream);
            }
            if holder.sizes.len() < MOST_SIZES || holder.sizes.contains_key(&life.requested) {
                *holder.sizes.entry(life.requested).or_default() += 1;
            }
        }
        let mut holders: Vec<Holder> = by_line.into_values().collect();
        let courses = courses(lives, device, time);
        for holder in &mut holders {
            if let Some(course) = courses.get(&holder.site) {
                holder.before = course.gone;
                holder.rising_sizes = if course.falls { 0 } else { course.n_sizes };
            }
            holder.caller = caller_of_model(definitions, holder.stack).unwrap_or_default();
            holder.lines = holdings::own_lines(definitions, holder.stack, holdings::MOST_LINES);
            holder.own = own_of(definitions, holder.stack);
            holder.worked_since = n_worked - holder.worked_since;
            holder.kept_since = n_kept - holder.kept_since;
            holder.offers = offers(definitions, holder.stack);
        }
        holders.sort_by_key(|holder| (Reverse(holder.bytes), holder.site, holder.role, holder.signs));
        let piles = piles::of(lives, roles, definitions, device, Bytes(bytes), &is_held);
        HeldAt { device, time, bytes: Bytes(bytes), holders, piles, ..HeldAt::default() }
    }

    /// The same, taken apart.
    pub(crate) fn taken_apart(mut self, known: Known<'_>, is_held: impl Fn(&Life) -> bool) -> HeldAt {
        let partition = Partition::of(known, &self, &is_held);
        self.holdings = partition.holdings(known, &self, &is_held);
        self.evaluated = partition.evaluated(known, &is_held);
        if let Some(error) = failed_at(known.ledger, self.device, self.time) {
            self.failed_own = own_of(known.definitions, error.stack);
            let of_line = known.lives.list.iter().rev().filter(|life| {
                life.device == self.device && life.site == error.site && life.since <= self.time
            });
            self.requested_before =
                of_line.take(MOST_REQUESTS).map(|life| (life.since, life.requested)).collect();
            let of_device =
                known.lives.list.iter().rev().filter(|life| {
                    life.device == self.device && life.since <= self.time && !life.is_from_before
                });
            let asked = of_device.take(MOST_REQUESTS).map(|life| Asked {
                since: life.since,
                site: life.site,
                requested: life.requested,
                is_held: is_held(life),
            });
            self.asked_before = asked.collect();
            for life in known.lives.list.iter().filter(|it| it.device == self.device && it.site == error.site)
            {
                if life.since <= self.time {
                    self.n_before += 1;
                } else {
                    (self.n_after, self.most_after) = (self.n_after + 1, self.most_after.max(life.requested));
                }
            }
        }
        self
    }

    /// Weights of one size in the models that were moved to the device, the most of any size: one pass runs a line so many times at most.
    #[must_use]
    pub fn n_layers(&self) -> u64 {
        let models = self.holders.iter().filter(|holder| holder.signs.has(Sign::Model));
        let weights =
            models.flat_map(|holder| &holder.sizes).filter(|(size, _)| size.0 >= holdings::LEAST_WEIGHT);
        weights.map(|(_, n)| *n).max().unwrap_or(0)
    }

    /// Whether `n` results of a line may be those of the layers in one forward pass, which keeps most of what it makes. Without a graph each
    /// call of a model frees most of it.
    #[must_use]
    pub fn is_one_pass(&self, holder: &Holder, n: u64) -> bool {
        n > 1 && n <= self.n_layers() && holder.kept_since.saturating_mul(2) >= holder.worked_since
    }

    /// All that holders with a property held.
    pub fn sum(&self, is: impl Fn(&Holder) -> bool) -> Bytes {
        Bytes(self.holders.iter().filter(|holder| is(holder)).map(|holder| holder.bytes.0).sum())
    }
}

/// Of a line that handles several tensors, the smaller ones are less than this part of the largest: one in so many.
pub const OTHER_TENSOR: u64 = 8;

/// What a line asked for over time.
#[derive(Default)]
struct Course {
    /// The largest block that was given back before the moment.
    gone: Bytes,
    n_sizes: u64,
    largest: Bytes,
    /// Some size was smaller than one before, and no other tensor's: those are several times as large.
    falls: bool,
}

fn courses(lives: &Lives, device: i16, time: Nanos) -> FxHashMap<SiteId, Course> {
    let mut courses: FxHashMap<SiteId, Course> = FxHashMap::default();
    for life in lives.list.iter().filter(|life| life.device == device && life.since <= time) {
        let course = courses.entry(life.site).or_default();
        if life.died != NEVER && life.until < time {
            course.gone = course.gone.max(life.requested);
        }
        match life.requested.cmp(&course.largest) {
            Ordering::Less => {
                course.falls |= life.requested.0.saturating_mul(OTHER_TENSOR) >= course.largest.0;
            }
            Ordering::Equal => {}
            Ordering::Greater => (course.largest, course.n_sizes) = (life.requested, course.n_sizes + 1),
        }
    }
    courses
}

/// The program's own lines of a stack, innermost first; of the backward pass, those of the forward operation that it undoes.
fn own_of(definitions: &dyn Definitions, id: StackId) -> Vec<(String, String, u32)> {
    let Some(stack) = definitions.stack(id) else { return vec![] };
    let lines = python_lines(definitions, place(definitions, stack).stack);
    let own = lines.filter(|(_, file, _)| python_package(file).is_none());
    own.map(|(function, file, line)| (function.to_owned(), file.to_owned(), line)).collect()
}

/// The program's innermost line outside of all models, if the stack is in one.
pub(crate) fn caller_of_model(definitions: &dyn Definitions, id: StackId) -> Option<String> {
    let lines: Vec<(&str, &str, u32)> = python_lines(definitions, definitions.stack(id)?).collect();
    let is_call = |(function, file, _): &(&str, &str, u32)| {
        file.ends_with("/torch/nn/modules/module.py")
            && matches!(last(function), "_wrapped_call_impl" | "_call_impl")
    };
    let outermost = lines.iter().rposition(is_call)?;
    let (function, file, line) =
        lines[outermost + 1..].iter().find(|(_, file, _)| python_package(file).is_none())?;
    Some(format!("{function} ({file}:{line})"))
}

/// Whether a block was held at a time: from its request to the moment at which it was given back.
pub(crate) fn is_held_at(life: &Life, time: Nanos) -> bool {
    life.since <= time && (life.died == NEVER || life.until > time)
}
