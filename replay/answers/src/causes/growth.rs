//! Memory that is left again and again, and what keeps it.
//!
//! A trace has the line that made it, the lines around that one, lifetimes and sizes, and not the reference that keeps it. Each keeper has
//! one row here, with the facts that point to it. Where several could be meant, the row names them and says what decides.

use gputrace_schemas::event::Bytes;

use super::facts::{Grown, above, called_at};
use super::{Case, Cause, Facts, Fix, Found, Kind};
use crate::code::{self, How};
use crate::leaks::{self, GrowingSite};
use gputrace_analyse::held::{Holder, Sign};
use gputrace_analyse::libraries::When;
use gputrace_analyse::repetition::By;
use gputrace_trace::ledger::{Account, MemoryKind};
use gputrace_trace::words::{bytes, count};

/// Sizes of a line of which each is larger than those before are a tensor that is joined anew.
const RISING: u64 = 8;
/// So many blocks of a line at least show whether their sizes differ.
const LEAST_BLOCKS: u64 = 4;
/// So many blocks without two of one size are no chance.
const REPEATED_SIZES: u64 = 16;
/// PyTorch's smallest block (`kMinBlockSize`, c10/cuda/CUDACachingAllocator.cpp).
const SMALLEST: Bytes = Bytes(512);
/// Numbers are little memory up to this part of it: one in so many.
const LITTLE: u64 = 1000;
/// The name of what is no fault.
const NUMBERS: &str = "numbers kept as tensors";
/// Smaller gradients than this say nothing about whose they are.
const LEAST_GRADIENT: u64 = 1 << 16;

/// Between a line and the one that called it.
const CALLED_FROM: &str = ", called from ";
/// A graph keeps this part of the blocks that its model made, or more: one in so many.
const LEAST_OF_GRAPH: u64 = 4;
/// So many other lines inside a model that grow are of a graph, whatever else the model makes.
const LINES_OF_GRAPH: usize = 3;
/// The name where nothing is known of what keeps it.
const RESULTS: &str = "results kept";

/// What keeps memory.
struct Keeper {
    cause: Cause,
    claims: fn(&Facts<'_>, &Grown<'_>) -> bool,
    /// The facts that point to it, in a few words.
    why: &'static str,
    fix: &'static str,
}

const fn cause(name: &'static str, needs: &'static str, against: &'static str) -> Cause {
    Cause { name, kind: Kind::Grew, needs, against, find: |_| None }
}

/// What is shared goes when all have let go of it.
pub(crate) const KEPT_BY_ANOTHER: &str = "copy the tensor in the other process and `del` the received one, then call `torch.cuda.ipc_collect()` here";
/// Why an inner function that calls itself keeps what it uses.
pub(super) const CLOSURE: &str = "by the source, the inner function and its own name refer to each other";
/// What ends that.
pub(super) const OF_CLOSURE: &str = "set the inner function's name to `None` once it has run";
/// Each is made of the one before.
const JOINED: &str = "each block is larger than all before, which are freed";
/// What is known of the memory says how.
const NEVER_FREED: &str = "free what this line allocates";

/// A gradient that has a graph refers to its parameter, which refers to it.
const CREATE_GRAPH: &str = "after `backward(create_graph=True)`, set `p.grad = None`, or use `torch.autograd.grad`; if a list keeps gradients: `.detach().cpu()`";

/// Whatever keeps a graph.
const WITH_GRAPH: &str = "keep `x.item()` or `x.detach().cpu()` (a list, total, hook or `retain_graph` keeps the graph), or evaluate under `inference_mode()`";
/// The same where the source shows that a backward pass follows.
const WITH_BACKWARD: &str = "keep `x.item()` or `x.detach().cpu()`: a list, total, hook or `retain_graph` keeps the graph after its backward pass";

/// The name of what a step needs until its backward pass.
const FOR_BACKWARD: &str = "activations of a loop, kept for one backward pass";
/// What a step needs less of.
const RECOMPUTE: &str = "run the loop's body under `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, which computes it again in the backward pass, or work on fewer items in a step";

/// Whatever a hook keeps.
const REMOVE_HOOK: &str =
    "a hook keeps GPU tensors: copy them (`.detach().cpu()`), or remove the hook (`handle.remove()`)";

const KEEPERS: &[Keeper] = &[
    Keeper {
        cause: cause(
            FOR_BACKWARD,
            "before the first backward pass, memory that each turn of a loop leaves, and by the program's source a list of the function collects its results, which a caller uses in a backward pass",
            "growth over several steps",
        ),
        claims: is_for_backward,
        why: "by the source, the backward pass of this step needs it, and frees it",
        fix: RECOMPUTE,
    },
    Keeper {
        cause: cause(
            "work areas of FFT plans kept in the plan cache",
            "memory that cuFFT requested, or that a line outside any model requested to call an FFT, remains each time",
            "arrays that the program keeps",
        ),
        claims: |_, grown| {
            let named = &grown.site.named;
            let is_fft =
                ["_exec_fft", "get_fft_plan", "_fft_c2c", "in fft", "in rfft", "in irfft", "in stft"];
            let calls = is_fft.iter().any(|name| named.site.contains(name));
            !grown.has(Sign::Backward) && (named.owner == "cuFFT" || named.owner != "PyTorch block" && calls)
        },
        why: "cuFFT requested it",
        fix: "bound the plan cache: `cupy.fft.config.get_plan_cache().set_size(0)`, `torch.backends.cuda.cufft_plan_cache.max_size = 1`, or pad",
    },
    Keeper {
        cause: cause(
            "tensors that another process keeps open (CUDA IPC)",
            "blocks of one line remain each time, and the process exported at least half as many CUDA IPC handles",
            "fewer handles than blocks",
        ),
        claims: |facts, grown| {
            let left = grown.site.repeated.as_ref().map_or(u64::MAX, |repeated| repeated.left);
            grown.account() == Some(Account::Blocks) && facts.n_shared().saturating_mul(2) >= left
        },
        why: "the process exported CUDA IPC handles",
        fix: KEPT_BY_ANOTHER,
    },
    Keeper {
        cause: cause(
            "memory never freed",
            "memory that a line got from the driver, a library's heap or another process remains each time",
            "PyTorch's or JAX's own memory, which is cached",
        ),
        claims: |_, grown| {
            grown.account().is_some_and(|account| !matches!(account, Account::Blocks | Account::Buffers))
        },
        why: "",
        fix: NEVER_FREED,
    },
    Keeper {
        cause: cause(
            "outputs of JAX kept by the caller",
            "JAX buffers that one line creates remain each time",
            "buffers that are donated or deleted",
        ),
        claims: |_, grown| grown.account() == Some(Account::Buffers),
        why: "",
        fix: "drop what a list, dictionary or cache keeps: store `float(x)` or `jax.device_get(x)`, or donate the old array (`donate_argnums`)",
    },
    Keeper {
        cause: cause(
            NUMBERS,
            "one of PyTorch's smallest blocks remains of each line that grows each time, together less than a thousandth of the memory",
            "larger blocks, as a graph has",
        ),
        claims: |facts, grown| {
            let is_small = |holder: &Holder| holder.sizes.keys().all(|size| *size <= SMALLEST);
            let is_number =
                |site: &&GrowingSite| site.repeated.as_ref().is_some_and(|it| it.each <= SMALLEST);
            let left = grown.all.iter().fold(0_u64, |sum, site| sum.saturating_add(site.left().0));
            grown.account() == Some(Account::Blocks)
                && grown.holder.is_some_and(is_small)
                && grown.all.iter().all(is_number)
                && left.saturating_mul(LITTLE) < facts.all.0
        },
        why: "each is one of PyTorch's smallest blocks",
        fix: "store numbers instead of tensors: `.item()`, or `torch.stack` of them now and then",
    },
    Keeper {
        cause: cause(
            "an optimizer's step that autograd records",
            "memory that `step` of the program's own optimizer allocates remains in several steps, in a function without `torch.no_grad`",
            "optimizers of PyTorch and of libraries, and steps under `torch.no_grad`",
        ),
        claims: |facts, grown| {
            let own = grown.site.place.is_some_and(|place| facts.is_own(place.site));
            let is_of_step = grown.site.named.site.split(" (").next().is_some_and(|it| it.ends_with("step"));
            let without = |holder: &Holder| facts.sources.is_without_graph(&holder.own);
            // A stack does not show `with torch.no_grad()`.
            let is_read = grown.holder.is_some_and(|holder| facts.sources.have(&holder.own));
            let is_plain = is_read && !grown.holder.is_some_and(without);
            grown.has(Sign::Optimizer) && own && is_of_step && is_plain
        },
        why: "by the source, nothing turns gradients off in this `step`",
        fix: "decorate this `step` with `@torch.no_grad()`: a state that is computed from parameters with gradients keeps the graph of all steps before",
    },
    Keeper {
        cause: cause(
            "history kept by an optimizer",
            "memory that an optimizer's code allocates remains in several steps",
            "state that is created once, and state of new models that are kept",
        ),
        claims: |_, grown| grown.has(Sign::Optimizer),
        why: "the optimizer's own code allocated it",
        fix: "set a smaller `LBFGS(history_size=...)`; with other optimizers, do not add parameters or create new optimizers repeatedly",
    },
    Keeper {
        cause: cause(
            "copies of the weights kept, with their gradients",
            "as copies of the weights kept, and at least half as much of the backward pass",
            "copies that are not trained",
        ),
        claims: |facts, grown| {
            let backward = facts.all_grown().filter(|it| is_of_backward(facts, it));
            let backward = backward.fold(0_u64, |sum, it| sum.saturating_add(it.site.left().0));
            grown.has(Sign::Copy) && backward.saturating_mul(2) >= grown.site.left().0
        },
        why: "the copies and what the backward pass made for them grow together",
        fix: "`del` each copy after its use; after `backward(create_graph=True)`, first set `p.grad = None`: such a gradient refers to its parameter",
    },
    Keeper {
        cause: cause(
            "copies of the weights kept",
            "results of `copy.deepcopy`, or blocks of the sizes of the parameters, remain each time",
            "parameters themselves, gradients, and the optimizer's state",
        ),
        claims: |_, grown| {
            let is_made = [Sign::Backward, Sign::Forward, Sign::Load].into_iter().any(|sign| grown.has(sign));
            !is_made && (grown.has(Sign::Copy) || grown.is_of_weights)
        },
        why: "the blocks have the sizes of the weights",
        fix: "keep only the best copy of the weights, on the CPU (`v.cpu()` of each) or on disk: `torch.save(model.state_dict(), path)`",
    },
    Keeper {
        cause: cause(
            "the graph of `autograd.grad` kept",
            "memory that `torch.autograd.grad` allocates in the backward pass remains in several steps, with activations of the forward pass",
            "gradients that are created once, and passes that `backward` begins",
        ),
        claims: |facts, grown| {
            grown.account() == Some(Account::Blocks)
                && (grown.has(Sign::Backward) || is_computed(grown))
                && facts.all_grown().any(|it| it.has(Sign::Grad))
        },
        why: "`autograd.grad` allocated it, and its graph keeps the forward pass",
        fix: "call `.detach()` on what you store or pass to the next step: with `create_graph=True`, each result keeps its graph",
    },
    Keeper {
        cause: cause(
            "gradients kept, or their graph (`create_graph=True`)",
            "memory of a model remains with its graph after each call, and by the program's source a function around calls `backward(create_graph=True)`",
            "a statement that keeps the values",
        ),
        claims: |facts, grown| {
            let own =
                |holder: &Holder| facts.sources.mentions(&holder.own, &["backward(", "create_graph=True"]);
            is_with_graph(facts, grown)
                && grown.holder.is_some_and(own)
                && kept(facts, grown).is_none_or(|it| matches!(it.how, How::Attribute | How::Carried))
        },
        why: "the source calls `backward(create_graph=True)`",
        fix: CREATE_GRAPH,
    },
    Keeper {
        cause: cause(
            "gradients kept, or their graph (`create_graph=True`)",
            "memory that the backward pass allocates remains in several steps",
            "gradients that are created once, or replaced in each step",
        ),
        claims: |_, grown| grown.account() == Some(Account::Blocks) && grown.has(Sign::Backward),
        why: "the backward pass allocated it",
        fix: CREATE_GRAPH,
    },
    Keeper {
        cause: cause(
            "models loaded repeatedly, with the old ones kept",
            "parameters that are moved to the GPU in several rounds, with work in between, and stay",
            "parameters that are created in one go",
        ),
        claims: |_, grown| grown.has(Sign::Model) || grown.has(Sign::Load),
        why: "parameters, created several times",
        fix: "`del` or `.cpu()` each model before the next, and drop other references (`functools.lru_cache`, callback, optimizer, closure)",
    },
    Keeper {
        cause: cause(
            "tensors kept by a hook of a module",
            "memory that a function of the program allocates, called by `Module.__call__` beside `forward`, remains each time",
            "memory that the module's own `forward` allocates",
        ),
        claims: |_, grown| grown.has(Sign::Hook),
        why: "a function beside `forward` allocated it",
        fix: REMOVE_HOOK,
    },
    Keeper {
        cause: cause(
            "tensors kept by a hook of a module",
            "memory of a model's forward pass remains each time, and by the program's source a hook stores what it is given, and nothing else does",
            "a statement on the way of the result that keeps it",
        ),
        claims: |facts, grown| {
            let is_it = |it: code::Keeper| it.how == How::Hook || it.is_hook && is_computed(grown);
            kept(facts, grown).is_some_and(is_it)
        },
        why: "by the source, a hook refers to it",
        fix: REMOVE_HOOK,
    },
    Keeper {
        cause: cause(
            "a tensor that grows by `torch.cat`",
            "a line holds blocks of one or two sizes, each larger than all that it had before",
            "blocks of all sizes that accumulate, and sizes that fall",
        ),
        claims: |_, grown| grown.holder.is_some_and(|it| it.rising_sizes >= RISING && it.sizes.len() <= 2),
        why: JOINED,
        fix: "concatenate once (`torch.cat(parts)`, with the parts on the CPU), or write into one preallocated tensor; if you do not need all of it, drop the oldest part",
    },
    Keeper {
        cause: cause(
            "tensors kept by a function that refers to itself (reference cycle)",
            "memory remains each time, and by the program's source an inner function uses it that calls itself",
            "functions outside others, and methods",
        ),
        claims: |facts, grown| kept(facts, grown).is_some_and(|it| it.how == How::Closure),
        why: CLOSURE,
        fix: OF_CLOSURE,
    },
    Keeper {
        cause: cause(
            "results of a function kept by its cache (`functools.lru_cache`)",
            "memory that a function with such a decorator requests and returns remains each time; the program's source shows it",
            "functions without one",
        ),
        claims: |facts, grown| kept(facts, grown).is_some_and(|it| it.how == How::Memoized),
        why: "the source has the decorator",
        fix: "bound the cache (`maxsize=`), or let the function return tensors on the CPU",
    },
    Keeper {
        cause: cause(
            "a cache keyed by shape",
            "remaining blocks of one line each have a different size; of a model's line, calls with a known size leave none",
            "equal sizes, and a model of which each call leaves a block",
        ),
        claims: |_, grown| {
            let is_by_shape =
                |it: &Holder| it.blocks >= LEAST_BLOCKS && it.sizes.len() as u64 * 5 >= it.blocks * 4;
            let is_of_model = is_computed(grown) || grown.n_in_model > 0;
            grown.account() == Some(Account::Blocks)
                && grown.holder.is_some_and(is_by_shape)
                && (!is_of_model || finds_known_sizes(grown))
        },
        why: "each block has a different size",
        fix: "a dictionary or `functools.lru_cache` keeps one per shape: bound it, slice one for the largest shape, or pad to a few shapes",
    },
    Keeper {
        cause: cause(
            "a result stored on `ctx` of its own `autograd.Function`",
            "memory of a model's forward pass remains with its graph after each call, and by the program's source a function of autograd there stores what it returns on `ctx`",
            "`ctx.save_for_backward`",
        ),
        claims: |facts, grown| kept(facts, grown).is_some_and(|it| it.how == How::Context),
        why: "by the source, the result refers to itself through its graph, until Python's garbage collector runs",
        fix: "use `ctx.save_for_backward(...)`",
    },
    Keeper {
        cause: cause(
            "outputs of one layer kept",
            "one line of a model leaves blocks, and the memory of its other lines is freed",
            "several lines of a model that leave blocks, as autograd's graph does; several blocks of each call beside another line, as its inputs",
        ),
        claims: |facts, grown| {
            grown.has(Sign::Forward)
                && !grown.has(Sign::Functional)
                && is_computed(grown)
                && grown.n_in_model == 0
                && (grown.all.len() == 1 || is_one_each(grown))
                && is_alone(facts, grown)
        },
        why: "no other line inside the model does",
        fix: "a list, attribute, buffer or hook keeps it, or a slice of it: keep `x.detach().cpu()`, or clone the part (`gc.get_referrers` shows which)",
    },
    Keeper {
        cause: cause(
            "a running total kept with its graph",
            "as outputs or losses kept with their graph, and the program's source adds them up",
            "totals of numbers (`.item()`)",
        ),
        claims: |facts, grown| {
            is_with_graph(facts, grown) && kept(facts, grown).is_some_and(|it| it.how == How::Total)
        },
        why: "lines of the model leave it after each call, and the source adds it up",
        fix: "add up numbers: `total += loss.item()`",
    },
    Keeper {
        cause: cause(
            "outputs or losses kept with their graph",
            "memory that a model allocates, or a library's function beside it, remains after each call, a good part of what the model makes in it",
            "a hook, a line of the program's own that allocates it, and functions that `torch.no_grad` decorates",
        ),
        claims: is_with_graph,
        why: "lines of the model leave it after each call",
        fix: WITH_GRAPH,
    },
    Keeper {
        cause: cause(
            RESULTS,
            "memory that a line allocates remains in at least three repetitions, up to the last",
            "memory that is allocated once, levels off, or is replaced",
        ),
        claims: |_, _| true,
        why: "",
        fix: "a list, dict or `functools.cache` keeps it or a slice: `.detach().cpu()`, `.item()` or `del` (`gc.get_referrers` shows which)",
    },
];

/// What keeps it, as the program's source says.
fn kept(facts: &Facts<'_>, grown: &Grown<'_>) -> Option<code::Keeper> {
    facts.keeper(grown.holder?)
}

/// Whether a loop of one step leaves it, for a backward pass that has not begun.
fn is_for_backward(facts: &Facts<'_>, grown: &Grown<'_>) -> bool {
    // It may have begun, and failed.
    let is_backward = || facts.refused_line().is_some_and(|line| line.contains("(backward of"));
    let is_first = facts.failure.is_some()
        && match facts.lifetimes.map_or(0, |it| it.n_passes()) {
            0 => true,
            1 => is_backward(),
            _ => false,
        };
    is_first && !grown.has(Sign::NoGrad) && kept(facts, grown).is_some_and(|it| it.backward.is_some())
}

fn is_with_graph(facts: &Facts<'_>, grown: &Grown<'_>) -> bool {
    grown.account() == Some(Account::Blocks)
        && (is_computed(grown) || grown.n_in_model > 0)
        && !grown.has(Sign::Workspace)
        && !grown.has(Sign::NoGrad)
        && !grown.holder.is_some_and(|holder| facts.sources.is_without_graph(&holder.own))
        && keeps_graph(facts, grown)
}

/// Whether the backward pass made it. Its threads run no Python: in a snapshot only the roles show it.
fn is_of_backward(facts: &Facts<'_>, grown: &Grown<'_>) -> bool {
    grown.has(Sign::Backward) || grown.holder.is_some_and(|holder| facts.role(holder) == "gradients")
}

fn is_computed(grown: &Grown<'_>) -> bool {
    let is_made =
        [Sign::Backward, Sign::Hook, Sign::Model, Sign::Load].into_iter().any(|sign| grown.has(sign));
    !is_made && (grown.has(Sign::Forward) || grown.has(Sign::Functional))
}

/// Whether a graph may be left, judged by how much of the model's work remains. Without a graph, a call frees all but its outputs. Checkpoints
/// and a backward pass free most of a graph that is left, so their programs are not judged.
fn keeps_graph(facts: &Facts<'_>, grown: &Grown<'_>) -> bool {
    let Some(holder) = grown.holder.filter(|_| !facts.has_stepped()) else { return true };
    let is_good_part = holder.kept_since.saturating_mul(LEAST_OF_GRAPH) >= holder.worked_since;
    is_good_part || holder.signs.has(Sign::Checkpointed) || grown.n_in_model >= LINES_OF_GRAPH
}

/// Whether the line is the only one that grows, no two of its blocks have one size, and some calls left none: those of a size that it had. Of
/// as many outputs of the model, some would have the same size.
fn finds_known_sizes(grown: &Grown<'_>) -> bool {
    let repeated = grown.site.repeated.as_ref();
    let has_found = repeated.is_some_and(|it| it.turns.is_some_and(|turns| turns > it.left));
    let is_each_once = |it: &Holder| it.blocks >= REPEATED_SIZES && it.sizes.len() as u64 == it.blocks;
    grown.all.len() == 1 && has_found && grown.holder.is_some_and(is_each_once)
}

/// Whether the line is the only one of a model that holds much of what was left.
fn is_alone(facts: &Facts<'_>, grown: &Grown<'_>) -> bool {
    let Some(own) = grown.holder else { return false };
    let held = facts.lifetimes.into_iter().flat_map(|it| match facts.failure {
        Some(_) => it.at_failure.iter(),
        None => it.at_end.iter(),
    });
    let is_other = |holder: &&Holder| {
        let is_in_model = holder.signs.has(Sign::Forward) || holder.signs.has(Sign::Functional);
        is_in_model
            && holder.site != own.site
            && !holder.signs.has(Sign::Workspace)
            && !holder.signs.has(Sign::Backward)
    };
    let turns = grown.site.repeated.as_ref().map_or(own.blocks, |repeated| repeated.left);
    // Of the last turn, what the other lines made may still be there.
    let is_left_too = |holder: &Holder| holder.blocks.saturating_mul(2) >= turns;
    let mut others = held.flat_map(|held| &held.holders).filter(is_other);
    own.blocks >= LEAST_BLOCKS && !others.any(is_left_too)
}

/// Whether each turn left one block, as a layer's output is. What an operation keeps for the backward pass are more.
fn is_one_each(grown: &Grown<'_>) -> bool {
    let turns = grown.site.repeated.as_ref().map(|repeated| repeated.left);
    grown.holder.zip(turns).is_some_and(|(own, turns)| own.blocks < turns.saturating_mul(2))
}

/// What grows most, if anything does, and whether the program's source shows what keeps it.
pub(super) fn case(facts: &Facts<'_>) -> Option<(Found, bool)> {
    // A workspace for each stream has a cause of its own, and levels off. So have cycles; what else grows beside them is held by them.
    let grown = root(facts.all_grown().filter(|grown| !grown.has(Sign::Workspace)).collect())?;
    if facts.is_of_cycles(&grown) {
        return None;
    }
    let keeper = KEEPERS.iter().find(|keeper| (keeper.claims)(facts, &grown))?;
    // Of what nothing else is known, the line whose library keeps it says more than the one that made it.
    let of_library =
        || facts.all_grown().find(|it| it.holder.is_some_and(|it| it.offer(When::Grows).is_some()));
    let is_any = keeper.cause.name == RESULTS;
    let grown = if is_any { of_library().unwrap_or(grown) } else { grown };
    let given_back = if keeper.fix == NEVER_FREED { given_back(facts, &grown) } else { None };
    // What grows with it is kept by the same.
    let offered = || {
        let all = facts.all_grown().filter_map(|it| it.holder);
        grown.holder.into_iter().chain(all).find_map(|holder| holder.offer(When::Grows))
    };
    // An attribute has one value at a time: it keeps the earlier ones only through a graph.
    let has_chain = is_with_graph(facts, &grown);
    let is_one = |how: How| matches!(how, How::Attribute | How::Carried);
    let source = kept(facts, &grown).filter(|it| !is_one(it.how) || has_chain);
    // What is joined anew each time replaces what was before: a container that has it does not add it up.
    let source = source.filter(|it| keeper.why != JOINED || it.how == How::Joined);
    // A cache of objects that are made of it keeps what they are made of.
    let is_of_objects = |it: &code::Keeper| it.is_cache && it.is_several && it.how == How::Entry;
    let of_cache = || facts.all_grown().filter_map(|it| facts.keeper(it.holder?)).find(is_of_objects);
    let source = source.or_else(|| if is_any { of_cache() } else { None });
    // A model that is kept is no tensor to copy, and what a backward pass needs is none, either.
    let is_needed = keeper.cause.name == FOR_BACKWARD;
    let is_written = |it: &&code::Keeper| !is_needed && (!grown.has(Sign::Model) || it.is_cache);
    let written = || source.as_ref().filter(is_written).map(|source| source.instead(has_chain));
    let fix = given_back.or_else(written);
    let is_several = source.as_ref().is_some_and(|it| it.is_several);
    let fix = fix.map(|fix| match evaluated(facts, &grown).filter(|_| has_chain) {
        Some(evaluated) if is_several => format!("{evaluated}; or {fix}"),
        Some(evaluated) => format!("{fix}; or {evaluated}"),
        None => fix,
    });
    // The function that called the model begins one, or needs none.
    let of_caller = |it: &Holder| {
        let is_caller = |at: &&code::Line| it.caller.ends_with(&format!("({}:{})", at.1, at.2));
        it.own.iter().find(is_caller).or(it.own.first()).cloned()
    };
    let caller = grown.holder.and_then(of_caller);
    let calls =
        |word| caller.as_ref().is_some_and(|it| facts.sources.mentions(std::slice::from_ref(it), &[word]));
    let words = match keeper.fix {
        WITH_GRAPH if calls("backward(") || calls("autograd.grad(") => WITH_BACKWARD,
        words => words,
    };
    let fix = fix.unwrap_or_else(|| offered().unwrap_or(words).to_owned());
    let kind = match keeper.cause.name {
        NUMBERS => Kind::Spare,
        FOR_BACKWARD => Kind::Beyond,
        _ => Kind::Grew,
    };
    let mut case = of(facts, &grown, keeper.why, fix);
    if is_needed {
        case.sure = format!("certain of the sizes; {}", keeper.why);
        (case.fix, case.verb) = (Fix::words(RECOMPUTE, ""), "oom");
    }
    let is_shown = source.is_some();
    if let Some(source) = source {
        case.site = format!("{}{}", case.site, source.behind());
    }
    Some(((&keeper.cause, kind, case), is_shown))
}

/// What makes no graph, where the function around begins no backward pass.
fn evaluated(facts: &Facts<'_>, grown: &Grown<'_>) -> Option<String> {
    let (function, place) = facts.sources.evaluated_by(&grown.holder?.own)?;
    Some(format!("decorate `{function}` ({place}) with `@torch.no_grad()`: it begins no backward pass"))
}

/// Of lines that grow together, most first, the one that the others follow from. A graph holds its inputs and its parameters; without a graph,
/// parameters have their gradients and their state of the optimizer.
fn root<'a>(all: Vec<Grown<'a>>) -> Option<Grown<'a>> {
    let most = all.first()?;
    let is_model = |it: &Grown<'_>| it.has(Sign::Model) && !it.has(Sign::Optimizer);
    let is_backward = |it: &Grown<'_>| it.has(Sign::Backward);
    let is_of_model = |it: &Grown<'_>| is_model(it) || is_backward(it) || it.has(Sign::Optimizer);
    let sum = |is: &dyn Fn(&Grown<'_>) -> bool| -> u64 {
        all.iter().filter(|it| is(it)).map(|it| it.site.left().0).sum()
    };
    let is_graph = sum(&is_computed).saturating_mul(2) > sum(&|_| true);
    let root: &dyn Fn(&Grown<'_>) -> bool = if has_graph_of_gradients(&all, is_model) {
        &is_backward
    } else if is_of_model(most) && !all.iter().any(is_computed) && all.iter().any(is_model) {
        &is_model
    } else if is_graph && most.account() == Some(Account::Blocks) {
        &is_computed
    } else {
        &|_| true
    };
    let at = all.iter().position(root).unwrap_or(0);
    all.into_iter().nth(at)
}

/// Whether models are left, and with them what the backward pass made of other sizes than their parameters: gradients that have a graph.
fn has_graph_of_gradients(all: &[Grown<'_>], is_model: impl Fn(&Grown<'_>) -> bool) -> bool {
    let sizes = |it: &Grown<'_>| it.holder.map(|holder| holder.sizes.keys().copied().collect::<Vec<_>>());
    let of_models: Vec<Bytes> = all.iter().filter(|it| is_model(it)).filter_map(sizes).flatten().collect();
    let is_other = |size: &Bytes| size.0 >= LEAST_GRADIENT && !of_models.contains(size);
    let mut backward = all.iter().filter(|it| it.has(Sign::Backward)).filter_map(sizes).flatten();
    !of_models.is_empty() && all.iter().any(is_computed) && backward.any(|size| is_other(&size))
}

/// What gives back memory that the driver or a library handed out.
fn given_back(facts: &Facts<'_>, grown: &Grown<'_>) -> Option<String> {
    if grown.site.named.owner.starts_with("PyTorch") {
        return Some("something keeps a reference to this pinned memory (`pin_memory`): `del` it, or pin one buffer and copy into it".into());
    }
    let place = grown.site.place?;
    let object = facts
        .story
        .ledger
        .live()
        .find(|object| object.site == place.site && object.device == place.device)?;
    let call = match object.kind {
        MemoryKind::Linear | MemoryKind::Managed => "`cudaFree`",
        MemoryKind::Async => "`cudaFreeAsync`",
        MemoryKind::Virtual | MemoryKind::HostVirtual => "`cuMemUnmap` and `cuMemRelease`",
        MemoryKind::Array => "`cudaFreeArray`",
        MemoryKind::Graph => "a free node, or `cudaGraphExecDestroy`",
        MemoryKind::Pinned => "`cudaFreeHost`",
        MemoryKind::Registered => "`cudaHostUnregister`",
        MemoryKind::Imported => {
            "`cudaIpcCloseMemHandle`; a tensor from a queue stays mapped, and its owner cannot reuse it, until you `del` it here"
        }
    };
    Some(format!("free what this line allocates: {call}"))
}

fn of(facts: &Facts<'_>, grown: &Grown<'_>, why: &str, fix: String) -> Case {
    let Grown { site, all, .. } = grown;
    let each = site.repeated.as_ref().map(leaks::rate);
    let each = each.or_else(|| site.per_step.map(|each| format!("{} per step", bytes(each))));
    let each = each.map_or_else(String::new, |each| format!(": {each}"));
    let sum = Bytes(all.iter().fold(0, |sum: u64, site| sum.saturating_add(site.left().0)));
    let (others, together) = match all.len() {
        0 | 1 => (String::new(), String::new()),
        2 => (format!("; another line also grows{}", other(facts, site)), format!(", {} in all", bytes(sum))),
        n => (
            format!("; {} other lines also grow{}", count(n as u64 - 1), other(facts, site)),
            format!(", {} in all", bytes(sum)),
        ),
    };
    let here = if all.len() > 1 { format!(", {} of it here", bytes(site.left())) } else { String::new() };
    let (what, worth) = match facts.failure {
        Some(_) => (
            format!("{} had accumulated by then{here}{each}{others}", bytes(sum)),
            match facts.remedy() {
                None if facts.has_tried_settings() => "no allocator setting fixes it",
                None => "",
                Some(_) => "an allocator setting only postpones it",
            },
        ),
        None => {
            let own = bytes(site.left());
            (format!("this line's memory grew by {own} to the end{each}{others}{together}"), "")
        }
    };
    let sure = match why {
        "" => sure(site),
        why => format!("{}; {why}", sure(site)),
    };
    Case {
        what,
        site: match site.repeated.as_ref().map(|repeated| &repeated.by) {
            // The line that calls the model is named with the rate.
            Some(By::Call(_)) => site.named.site.clone(),
            Some(By::Round | By::Own) | None => called_at(&site.named.site, grown.holder),
        },
        bytes: sum,
        sure,
        fix: Fix::words(fix, worth),
        verb: "leaks",
    }
}

/// The line of the program that grows most beside this one: what keeps both may be nearer to it.
fn other(facts: &Facts<'_>, site: &GrowingSite) -> String {
    let is_other = |it: &Grown<'_>| {
        !std::ptr::eq(it.site, site)
            && it.site.named.site != site.named.site
            && it.site.place.is_some_and(|place| facts.is_own(place.site))
    };
    let other = facts.all_grown().find(is_other);
    let lines = |it: Grown<'_>| match it.holder.filter(|holder| !holder.lines.is_empty()) {
        Some(holder) => by_file_names(&holder.lines),
        None => by_file_names(&it.site.named.site),
    };
    other.map_or_else(String::new, |other| format!(" ({})", lines(other)))
}

/// `cache.py:17, called from serve.py:33` of lines with their functions and folders; a text without such a line as it is.
fn by_file_names(lines: &str) -> String {
    let short = |line: &str| {
        let (_, rest) = line.split_once(" (")?;
        let (place, _) = rest.split_once(')')?;
        place.contains(':').then(|| place.rsplit('/').next().unwrap_or_default().to_owned())
    };
    let all: Option<Vec<String>> = lines.split(CALLED_FROM).map(short).collect();
    all.map_or_else(|| lines.to_owned(), |all| all.join(CALLED_FROM))
}

/// How sure it is that a line grows: of the statement that is made.
fn sure(site: &GrowingSite) -> String {
    let confidence = format!("{} that it grows", above(site.confidence));
    match &site.repeated {
        Some(repeated) if repeated.left < 7 => {
            format!("{confidence} ({} repetitions; a longer run would confirm it)", count(repeated.left))
        }
        Some(_) | None => confidence,
    }
}
