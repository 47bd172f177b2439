//! The facts that causes are found by, each computed once.

use std::cell::OnceCell;

use gputrace_schemas::event::{Bytes, NO_DEVICE};
use gputrace_sim::ops::{History, OpStream};
use gputrace_sim::stacks::python_package;
use gputrace_sim::whatif::{Laboratory, Question};

use super::Case;
use crate::caught::CaughtOom;
use crate::code::{Keeper, Sources};
use crate::leaks::GrowingSite;
use crate::postmortem::Postmortem;
use crate::remedies::{Remedy, Trial};
use gputrace_analyse::doubts;
use gputrace_analyse::held::{HeldAt, Holder, Sign};
use gputrace_analyse::lifetimes::Lifetimes;
use gputrace_analyse::sets::Sets;
use gputrace_analyse::story::{End, Story};
use gputrace_report::summary::used_devices;
use gputrace_trace::import::{Requests, Trace};
use gputrace_trace::ledger::{Account, MemoryKind, PjrtOom, Refusal, SiteId, TorchOom, Wall};
use gputrace_trace::words::{bytes, count, time};

/// A cause is worth a word from this part of what was held at the moment on: one in so many.
const LEAST: u64 = 20;
/// Different sizes of parameters that copies of them have.
const LEAST_SIZES: usize = 3;
/// A search for what fits is short: what follows requests so many times as often.
const SEARCH: u64 = 3;
/// The collector gave back this part at least of what grew, if cycles are the cause: one in so many.
const LATE: u64 = 4;

/// The request that failed last.
#[derive(Clone, Copy)]
pub enum Failure<'a> {
    /// PyTorch's.
    Torch(i16, &'a TorchOom),
    /// Another's: the driver refused it.
    Refused(&'a Refusal),
    /// JAX's.
    Jax(i16, &'a PjrtOom),
}

impl Failure<'_> {
    /// On which device.
    #[must_use]
    pub fn device(self) -> i16 {
        match self {
            Failure::Torch(device, _) | Failure::Jax(device, _) => device,
            Failure::Refused(refused) => refused.device,
        }
    }

    /// The requested amount, if that is known.
    #[must_use]
    pub fn asked(self) -> Option<Bytes> {
        match self {
            Failure::Torch(_, error) => Some(error.requested.unwrap_or(error.bytes)),
            Failure::Refused(refused) => Some(refused.bytes),
            Failure::Jax(_, error) => error.bytes,
        }
    }
}

/// Requests that failed while the program looked for what fits: it caught each error and found it.
#[derive(Clone, Copy)]
pub struct Recovered<'a> {
    /// How many failed.
    pub n_errors: u64,
    /// The last.
    pub error: &'a TorchOom,
    /// The largest request of the same line after that.
    pub most_after: Bytes,
}

/// The facts known about a process.
pub struct Facts<'a> {
    /// The findings in one pass.
    pub found: &'a Postmortem,
    /// The story.
    pub story: &'a Story,
    /// The results of the lifetimes.
    pub lifetimes: Option<&'a Lifetimes>,
    /// The request that failed last: the moment that matters, where there is one.
    pub failure: Option<Failure<'a>>,
    /// Instead of a failure: the program recovered from all of them.
    pub recovered: Option<Recovered<'a>>,
    /// What PyTorch's blocks held then, else at the peak of the device that held most.
    pub held: Option<&'a HeldAt>,
    /// All that the device held then.
    pub all: Bytes,
    /// Where its requests are had, if it may be replayed.
    pub trace: Option<&'a dyn Requests>,
    /// Processes that were recorded with it: those that it started.
    pub beside: &'a [Story],
    /// The program's source, where this machine has it.
    pub(crate) sources: Sources,
    /// What other settings would have made of the requests up to the error.
    pub(crate) trial: OnceCell<Option<Result<Trial, String>>>,
    /// Without a failure: what the program's own allocator setting wastes.
    pub(crate) own_setting: OnceCell<Option<Case>>,
    /// Without a failure: external fragmentation, and whether the card has room for it.
    pub(crate) fragmentation: OnceCell<Option<(Case, bool)>>,
}

impl<'a> Facts<'a> {
    /// Of a process whose growth was watched.
    #[must_use]
    pub fn of(found: &'a Postmortem, trace: Option<&'a dyn Requests>) -> Facts<'a> {
        let story = &found.story;
        let lifetimes = story.lifetimes.as_ref();
        let failure = failure(found);
        let recovered = failure.and_then(|failure| recovered(found, failure));
        let failure = failure.filter(|_| recovered.is_none());
        let of_device = |all: &'a [HeldAt], device| all.iter().find(|held| held.device == device);
        let held = lifetimes.and_then(|lifetimes| match failure {
            Some(failure) => of_device(&lifetimes.at_failure, failure.device()),
            None => lifetimes.at_peak.iter().max_by_key(|held| held.bytes),
        });
        let peaks = used_devices(story).map(|(_, books)| books.physical.peak().0);
        let all = match failure {
            Some(Failure::Torch(_, error)) => error.tracked.0.max(error.reserved.0),
            Some(Failure::Refused(refused)) => refused.tracked.0,
            Some(Failure::Jax(_, error)) => error.tracked.0,
            None => peaks.max().unwrap_or(0).max(story.ledger.host().peak().0),
        };
        Facts {
            found,
            story,
            lifetimes,
            failure,
            recovered,
            held,
            all: Bytes(all),
            trace,
            beside: &[],
            sources: Sources::of(&story.process),
            trial: OnceCell::new(),
            own_setting: OnceCell::new(),
            fragmentation: OnceCell::new(),
        }
    }

    /// Whether so much is worth a word: it is a good part of what was held, or as much as the request that failed.
    #[must_use]
    pub fn is_much(&self, part: Bytes) -> bool {
        let is_enough = self.failure.and_then(Failure::asked).is_some_and(|asked| part >= asked);
        part.0 > 0 && (is_enough || part.0.saturating_mul(LEAST) >= self.all.0)
    }

    /// Whether a backward pass has begun.
    #[must_use]
    pub fn has_stepped(&self) -> bool {
        self.lifetimes.is_some_and(|it| it.n_passes() > 0)
    }

    /// What keeps the memory of a line, where the program's source shows it.
    pub(crate) fn keeper(&self, holder: &Holder) -> Option<Keeper> {
        self.sources.keeper(&holder.own)
    }

    /// A line of the program.
    #[must_use]
    pub fn site(&self, site: SiteId) -> String {
        self.story.ledger.sites.site_name(site)
    }

    /// The line of PyTorch's request that failed.
    #[must_use]
    pub fn refused_line(&self) -> Option<String> {
        let Failure::Torch(_, error) = self.failure? else { return None };
        self.is_own(error.site).then(|| self.site(error.site))
    }

    /// Whether a place is a line of the program itself: neither a library's, nor one without a file.
    #[must_use]
    pub fn is_own(&self, site: SiteId) -> bool {
        let site = self.story.ledger.sites.site(site);
        site.is_some_and(|it| it.line > 0 && !it.file.is_empty() && python_package(&it.file).is_none())
    }

    /// The program's line for a request of JAX's that failed. PJRT finds out later, in threads of its own: then the line is that which launched
    /// the executable, else one whose results or temporaries are as large, else the line that holds most.
    #[must_use]
    pub fn jax_line(&self, error: &PjrtOom) -> SiteId {
        let executables = self.story.ledger.executables();
        let launched = error.executable.and_then(|at| executables.get(at)?.site);
        // What PJRT says is rounded.
        let is_as_large = |of: Option<Bytes>| {
            error.bytes.zip(of).is_some_and(|(asked, of)| of.0 >= asked.0 - asked.0 / 100)
        };
        let made = executables.iter().filter(|it| is_as_large(it.figures.outputs)).find_map(|it| it.site);
        let worked = executables.iter().filter(|it| is_as_large(it.figures.temporary)).find_map(|it| it.site);
        let largest = executables.iter().max_by_key(|it| it.figures.temporary.max(it.figures.outputs));
        let largest = largest.and_then(|it| it.site);
        let held =
            self.story.ledger.live_buffers().max_by_key(|(_, buffer)| buffer.bytes).map(|(_, it)| it.site);
        let all = [Some(error.site), made, launched, worked, largest, held];
        all.into_iter().flatten().find(|site| self.is_own(*site)).unwrap_or(error.site)
    }

    /// How many handles of its memory the process gave to others (`cudaIpcGetMemHandle`).
    #[must_use]
    pub fn n_shared(&self) -> u64 {
        n_calls(self.story, "IpcGetMemHandle")
    }

    /// A process beside it that opened most of such handles, in words.
    #[must_use]
    pub fn opener(&self) -> Option<String> {
        let opened = self.beside.iter().map(|story| (n_calls(story, "IpcOpenMemHandle"), story));
        let (n, story) = opened.max_by_key(|(n, _)| *n).filter(|(n, _)| *n > 0)?;
        let ledger = &story.ledger;
        let site = ledger.live().find(|object| object.kind == MemoryKind::Imported);
        let site =
            site.map_or_else(String::new, |object| format!(" at {}", ledger.sites.site_name(object.site)));
        Some(format!("process {} opened {n}{site}", story.process.pid))
    }

    /// What other settings would have made of the requests up to the error of PyTorch's; none where they cannot be replayed.
    pub(crate) fn trial(&self) -> Option<&Result<Trial, String>> {
        let tried = self.trial.get_or_init(|| {
            let Some(Failure::Torch(ordinal, _)) = self.failure else { return None };
            Some(self.found.trial(ordinal, self.stream_of(ordinal)?))
        });
        tried.as_ref()
    }

    /// The recorded setting, and the one that would have made it fit or perhaps would have.
    pub(crate) fn remedy(&self) -> Option<(&Remedy, &Remedy)> {
        let (recorded, best) = self.trial()?.as_ref().ok()?.best().ok()?;
        recorded.zip(best)
    }

    /// Whether other settings were tried: without a replay, nothing is known of them.
    pub(super) fn has_tried_settings(&self) -> bool {
        self.trial().and_then(|trial| trial.as_ref().ok()).is_some_and(|trial| trial.best().is_ok())
    }

    /// Whether a setting of the allocator serves what PyTorch asked for, with a tenth of the device to spare.
    pub(crate) fn fits_with_setting(&self) -> bool {
        let Some(Failure::Torch(_, error)) = self.failure else { return false };
        error.device.is_some() && self.remedy().is_some_and(|(_, best)| !self.is_tight(best))
    }

    /// Whether a setting that serves it leaves less than a tenth of the device, as far as its size is known.
    pub(crate) fn is_tight(&self, with: &Remedy) -> bool {
        let Some(Failure::Torch(_, error)) = self.failure else { return false };
        let room = error.device.map(|(free, total)| match total {
            // A snapshot has what was free, and not how large the device is.
            Bytes(0) => free.0.saturating_add(error.reserved.0),
            total => total.0,
        });
        room.is_some_and(|room| with.peak_reserved.0.saturating_mul(10) >= room.saturating_mul(9))
    }

    /// What the request that failed lacked: with so much more free memory, and in one piece, it would have gone well.
    #[must_use]
    pub fn missing(&self) -> Option<Bytes> {
        let failure = self.failure?;
        let free = match failure {
            Failure::Torch(_, error) if error.wall() == Wall::Device => {
                error.device.map_or(0, |(free, _)| free.0)
            }
            Failure::Torch(..) | Failure::Refused(_) | Failure::Jax(..) => 0,
        };
        Some(Bytes(failure.asked()?.0.saturating_sub(free)))
    }

    /// What the program recovered from, in words.
    #[must_use]
    pub fn recovered_in_words(&self) -> Option<String> {
        let Recovered { n_errors, error, most_after } = self.recovered?;
        let when = time(self.story.since_start(error.time));
        let (errors, asked) = match n_errors {
            1 => ("1 out-of-memory error was".to_owned(), when),
            n => (format!("{} out-of-memory errors were", count(n)), format!("the last at {when}")),
        };
        Some(format!(
            "{errors} caught ({asked}, for {} at {}), and the program found what fits: that line requested at most {} afterwards",
            bytes(error.requested.unwrap_or(error.bytes)),
            self.site(error.site),
            bytes(most_after)
        ))
    }

    /// Sets of weights of a device that are held for nothing.
    #[must_use]
    pub fn sets(&self, device: i16) -> Option<&'a Sets> {
        self.lifetimes?.sets.iter().find(|sets| sets.device == device)
    }

    /// Memory held at the moment, line by line.
    pub fn holders(&self) -> impl Iterator<Item = &'a Holder> {
        self.held.into_iter().flat_map(|held| &held.holders)
    }

    /// Holders with a sign, their bytes, and the line that held most of it.
    #[must_use]
    pub fn with(&self, is: impl Fn(&Holder) -> bool) -> Option<(Bytes, &'a Holder)> {
        let most = self.holders().find(|holder| is(holder))?;
        let all = self.holders().filter(|holder| is(holder)).map(|holder| holder.bytes.0).sum();
        Some((Bytes(all), most))
    }

    /// The name of a role.
    #[must_use]
    pub fn role(&self, holder: &Holder) -> &'a str {
        let names = self.lifetimes.map_or(&[][..], |lifetimes| &lifetimes.role_names);
        names.get(usize::from(holder.role)).map_or("", |(name, _)| name)
    }

    /// The requests to the devices, where that can be replayed.
    #[must_use]
    pub fn requests(&self) -> Option<&'a Trace> {
        self.trace?.requests().ok()
    }

    /// The requests to a device.
    #[must_use]
    pub fn stream_of(&self, ordinal: i16) -> Option<&'a OpStream> {
        let devices = &self.requests()?.devices;
        devices.iter().find(|stream| i64::from(stream.device) == i64::from(ordinal))
    }

    /// What PyTorch would have reserved for the requests to a device, had they been changed so; none where the run itself cannot be replayed.
    #[must_use]
    pub(super) fn reserved_if(&self, ordinal: i16, change: impl FnOnce(&mut OpStream)) -> Option<Bytes> {
        let stream = self.stream_of(ordinal).filter(|it| matches!(it.history, History::Complete))?;
        let check = Laboratory::new(stream).ok()?.self_check(None);
        if doubts::doubt(stream, &check).is_some() {
            return None;
        }
        let options = stream.settings.options.clone().unwrap_or_default();
        let mut changed = stream.clone();
        change(&mut changed);
        let question = Question::torch(check.torch_version, &options);
        let outcome = Laboratory::of_prediction(&changed).guess(&question).ok()?;
        Some(Bytes(outcome.books.reserved.peak))
    }

    /// Memory that keeps growing, most first: where a request failed, on its device, and where it is much of what was held.
    #[must_use]
    pub fn growing(&self) -> Vec<&'a GrowingSite> {
        match self.failure {
            Some(failure) => self.found.leaks_of(failure.device()),
            None => self.found.leaks.growing.iter().collect(),
        }
    }

    /// The line that grows most, with what its stacks show.
    #[must_use]
    pub fn grown(&self) -> Option<Grown<'a>> {
        self.all_grown().next()
    }

    /// Each line that grows, most first, with what its stacks show.
    pub(super) fn all_grown(&self) -> impl Iterator<Item = Grown<'a>> {
        let growing = self.growing();
        (0..growing.len()).map(move |at| self.grown_at(&growing, at))
    }

    fn grown_at(&self, growing: &[&'a GrowingSite], at: usize) -> Grown<'a> {
        let site = growing[at];
        let others = growing.iter().filter(|other| !std::ptr::eq(**other, site)).filter_map(|it| it.place);
        let holder = |site: SiteId| {
            // Programs give back at their end.
            let all = self
                .lifetimes
                .into_iter()
                .flat_map(|it| it.at_failure.iter().chain(&it.at_peak).chain(&it.at_end));
            all.flat_map(|held| &held.holders).find(|holder| holder.site == site)
        };
        let is_in_model = |place: &gputrace_analyse::growth::Place| {
            holder(place.site).is_some_and(|it| it.signs.has(Sign::Forward) || it.signs.has(Sign::Backward))
        };
        let n_in_model = others.filter(is_in_model).count();
        let most = site.place.and_then(|place| holder(place.site));
        let is_of_weights = most.is_some_and(|most| self.has_sizes_of_weights(most));
        Grown { site, holder: most, n_in_model, is_of_weights, all: growing.to_vec() }
    }

    /// Whether a line that is not the model's own holds blocks of all the larger sizes of the parameters.
    fn has_sizes_of_weights(&self, of: &Holder) -> bool {
        let is_weight = |holder: &&Holder| {
            holder.site != of.site && matches!(self.role(holder), "parameters" | "weights")
        };
        let sizes = self.holders().filter(is_weight).flat_map(|holder| holder.sizes.keys());
        let mut sizes: Vec<&Bytes> = sizes.filter(|size| size.0 > 0).collect();
        sizes.sort_unstable();
        sizes.dedup();
        // Two sizes may be alike by chance.
        sizes.len() >= LEAST_SIZES && sizes.iter().rev().take(8).all(|size| of.sizes.contains_key(size))
    }

    /// The growth of these lines is what Python's collector was late for.
    pub(super) fn is_of_cycles(&self, grown: &Grown<'_>) -> bool {
        let (Some(lifetimes), Some(place)) = (self.lifetimes, grown.site.place) else { return false };
        let collected = lifetimes.cycles.sites.iter().filter(|it| it.site == place.site);
        let collected: u64 = collected.map(|it| it.bytes.0).sum();
        collected.saturating_mul(LATE) >= grown.site.growth.0 && collected > 0
    }
}

/// The memory that grows most.
pub struct Grown<'a> {
    /// The line.
    pub site: &'a GrowingSite,
    /// Memory that it held, and what its stacks show; none for memory that is not PyTorch's blocks.
    pub holder: Option<&'a Holder>,
    /// Other growing lines inside a model.
    pub n_in_model: usize,
    /// Its memory has the sizes of the parameters, one by one.
    pub is_of_weights: bool,
    /// All of them.
    pub all: Vec<&'a GrowingSite>,
}

impl Grown<'_> {
    /// Whether the stacks of the line show this.
    #[must_use]
    pub fn has(&self, sign: Sign) -> bool {
        self.holder.is_some_and(|holder| holder.signs.has(sign))
    }

    /// Whether the driver or a library handed it out, and neither PyTorch nor JAX.
    #[must_use]
    pub fn is_of_driver(&self) -> bool {
        self.account().is_some_and(|account| !matches!(account, Account::Blocks | Account::Buffers))
    }

    /// In which books it grows.
    #[must_use]
    pub fn account(&self) -> Option<Account> {
        self.site.place.map(|place| place.account)
    }
}

/// Calls of a function that succeeded.
fn n_calls(story: &Story, function: &str) -> u64 {
    let ledger = &story.ledger;
    let of_name = ledger.counts.calls().filter(|(name, _)| ledger.sites.name(*name).contains(function));
    of_name.map(|(_, counts)| counts.calls - counts.failed).max().unwrap_or(0)
}

/// A line of a model, with the program's line that called the model.
pub(super) fn called_at(site: &str, holder: Option<&Holder>) -> String {
    let caller = holder.map_or("", |holder| holder.caller.as_str());
    // It may be the line itself, or be named as the callers' parts are.
    let is_known = caller.is_empty() || site.contains("called from") || site.contains(caller);
    // `train.py:14` of `main (/job/train.py:14)`.
    let short = caller.trim_end_matches(')').rsplit(['/', '(']).next().unwrap_or_default();
    if is_known { site.to_owned() } else { format!("{site}, called at {short}") }
}

/// A probability, rounded down: what is not certain is never shown as 100 %.
pub(super) fn above(confidence: f64) -> String {
    if confidence >= 0.999 {
        "above 99.9 %".into()
    } else {
        format!("{:.1} %", (confidence * 1000.0).floor() / 10.0)
    }
}

/// `cuda:0`.
pub(crate) fn device(ordinal: i16) -> String {
    if ordinal == NO_DEVICE { "a device".into() } else { format!("cuda:{ordinal}") }
}

/// The last request that failed for good: PyTorch's, or another's.
fn failure(found: &Postmortem) -> Option<Failure<'_>> {
    let errors = found.torch_devices().filter_map(|device| Some((device, found.torch_oom(device)?)));
    let torch = errors.max_by_key(|(_, error)| error.time);
    let torch = torch.map(|(device, error)| (error.time, Failure::Torch(device, error)));
    let refused = found.story.ledger.refusals.iter().rev().find(|refusal| refusal.is_final);
    let refused = refused.map(|refused| (refused.time, Failure::Refused(refused)));
    let jax = found.jax_ooms().max_by_key(|(_, error)| error.time);
    let jax = jax.map(|(device, error)| (error.time, Failure::Jax(device, error)));
    // Of several at one time, the first of these.
    let all = [torch, refused, jax].into_iter().flatten();
    all.reduce(|last, next| if next.0 > last.0 { next } else { last }).map(|(_, failure)| failure)
}

/// Whether a program looked for what fits, and found it: each error was caught and left nothing, all came early, the line that failed last got
/// less memory again and again, and the process came to its end.
fn recovered<'a>(found: &'a Postmortem, failure: Failure<'a>) -> Option<Recovered<'a>> {
    let Failure::Torch(device, error) = failure else { return None };
    let story = &found.story;
    if !matches!(story.end()?, End::Exit | End::Status(0)) || found.torch_devices().count() > 1 {
        return None;
    }
    let n_errors = story.ledger.devices().get(&device)?.torch.as_ref()?.n_ooms;
    let caught: Vec<&CaughtOom> = found.caught.iter().filter(|it| it.device == device).collect();
    if caught.len() as u64 != n_errors || caught.iter().any(|it| it.kept_bytes().0 > 0) {
        return None;
    }
    // The others are a library's, which tries one plan after the other.
    let n_errors = caught.iter().filter(|it| it.is_user_code).count() as u64;
    if n_errors == 0 {
        return None;
    }
    let held = story.lifetimes.as_ref()?.at_failure.iter().find(|held| held.device == device)?;
    let is_early = held.n_before.max(1).saturating_mul(SEARCH) <= held.n_after;
    let is_less = held.most_after < error.requested.unwrap_or(error.bytes);
    (is_early && is_less).then_some(Recovered { n_errors, error, most_after: held.most_after })
}

#[cfg(test)]
mod tests {
    use super::above;

    #[test]
    fn probabilities_are_rounded_down() {
        assert_eq!([0.99, 0.9989, 0.99995].map(above), ["99.0 %", "99.8 %", "above 99.9 %"]);
    }
}
