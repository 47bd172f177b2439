//! The verdict with which `gputrace report` begins: what happened, what causes it, the line that did it, how sure that is, what to do,
//! and what to type next.
//!
//! [`crate::causes`] finds what is wrong with the memory; the verdict lists the causes by the bytes that each explains. It names other
//! verbs (`ranks`, `tune`) for what only they can answer. It never reports "nothing is wrong" of an incomplete trace, and begins with the
//! missing history of a snapshot that has none.

use std::cmp::Reverse;

use gputrace_schemas::event::{Bytes, NO_DEVICE};
use gputrace_sim::effort;

use crate::causes::emptied_cache::CHEAP;
use crate::causes::external_fragmentation;
use crate::causes::facts::device;
use crate::causes::{
    Case, Cause, Facts, Failure, Fix, Found, another_pool, growth, mostly, ranked, streams_made_anew,
};
use crate::leaks::RoseSite;
use crate::postmortem::Postmortem;
use crate::remedies::Trial;
use crate::still::Still;
use gputrace_analyse::growth::Course;
use gputrace_analyse::story::{End, Story};
use gputrace_report::history;
use gputrace_report::model::{Section, Value};
use gputrace_report::sections::device_name;
use gputrace_report::summary::used_devices;
use gputrace_trace::faults;
use gputrace_trace::import::Requests;
use gputrace_trace::ledger::{PjrtOom, Refusal, TorchOom, Wall};
use gputrace_trace::words::{bytes, count, quote, time};

/// What grew comes first from this part of what was held on: one in so many. Less is the verdict where nothing else is.
const LEAST_GROWTH: u64 = 1000;
/// Others hold much of a device from this part of it on: one in so many.
const MUCH_ELSEWHERE: u64 = 4;
/// Causes that are shown behind the first.
const MORE_CAUSES: usize = 2;
/// Their names in JSON.
const MORE_NAMES: [&str; MORE_CAUSES] = ["second_cause", "third_cause"];

/// Fewer CUDA IPC handles are a program's own few.
const LEAST_SHARED: u64 = 4;

/// Of a run that shows neither growth nor its absence.
const TOO_SHORT: &str = "the run is too short to show whether memory grows";

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// A request for memory failed.
    OutOfMemory,
    /// Something is wrong with the memory.
    Of(crate::causes::Kind),
    /// The process ended itself with a status that is not 0, past its exit handlers.
    Left,
    /// A signal ended the process, or nobody saw how it ended.
    Killed,
    /// A GPU failed, as NVML reported.
    GpuFault,
    /// Nothing is wrong.
    Nothing,
    /// The process still runs, and nothing is wrong so far.
    Running,
    /// The trace does not show it.
    CannotTell,
}

impl Kind {
    /// For programs, and for people.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Kind::OutOfMemory => ("out_of_memory", "out of memory"),
            Kind::Of(kind) => kind.names(),
            Kind::Left => ("left", "the process exited early"),
            Kind::Killed => ("killed", "the process was killed"),
            Kind::GpuFault => ("gpu_fault", "a GPU reported a fault"),
            Kind::Nothing => ("nothing_wrong", "nothing is wrong"),
            Kind::Running => ("running", "nothing is wrong so far"),
            Kind::CannotTell => ("cannot_tell", "cannot tell"),
        }
    }
}

/// One thing that is wrong, or that nothing is.
struct Finding {
    kind: Kind,
    /// The name of its cause; empty where none is known.
    cause: &'static str,
    /// In a sentence.
    what: String,
    /// The line of the program; empty where none is known.
    site: String,
    /// How it is known.
    sure: String,
    fix: Option<Fix>,
    next: String,
}

/// The verdict on a process whose growth was watched.
pub fn verdict(found: &Postmortem, trace: &dyn Requests) -> gputrace_report::model::Verdict {
    verdict_beside(found, trace, &[])
}

/// The same, with the processes that it started.
pub fn verdict_beside(
    found: &Postmortem,
    trace: &dyn Requests,
    beside: &[Story],
) -> gputrace_report::model::Verdict {
    let story = &found.story;
    // Longer traces are not replayed for a verdict.
    let trace = Some(trace).filter(|_| effort::VERDICT.covers(story.ledger.run.n_events as usize));
    let facts = Facts { beside, ..Facts::of(found, trace) };
    let mut all = Evidence { facts: &facts, found, story, path: quote(story.named()) }.findings();
    let mut worst = all.remove(0);
    if story.has_holes() {
        worst.sure = weakened(worst.sure);
    }
    if let Some(doubts) = story.caveats() {
        worst.sure = if worst.sure.is_empty() { doubts } else { format!("{}; but {doubts}", worst.sure) };
    }
    let kind = worst.kind.names().0;
    let mut titles: Vec<&str> = vec![];
    for finding in std::iter::once(&worst).chain(&all) {
        let title = finding.kind.names().1;
        let is_spare = finding.kind == Kind::Of(crate::causes::Kind::Spare) && !titles.is_empty();
        if !titles.contains(&title) && !is_spare {
            titles.push(title);
        }
    }
    let first = match worst.cause {
        "" => titles[0].to_owned(),
        // It costs time, and no memory.
        cause if cause == CHEAP.name => format!("nothing is wrong: {cause}"),
        cause => format!("{}: {cause}", titles[0]),
    };
    let others = titles[1..].iter().map(|title| format!("; also {title}"));
    let section = Section::new("verdict", format!("Verdict: {first}{}", others.collect::<String>()));
    let section = match history::in_words(story).filter(|_| worst.kind != Kind::CannotTell) {
        Some(history) => section.fact("recording", "first", Value::text(history)),
        None => section,
    };
    let section = section.fact("what", "what", Value::text(worst.what));
    let named = |section: Section, name, label, text: &str| match text {
        "" | "(no stack recorded)" => section,
        text => section.fact(name, label, Value::text(text)),
    };
    let section = named(section, "call_site", "where", &worst.site);
    let section = named(section, "confidence", "sure", &worst.sure);
    let mut section = match worst.fix {
        Some(fix) => section.remark("fix", "fix", fix.what, fix.worth),
        None => section,
    };
    for (name, more) in MORE_NAMES.into_iter().zip(&all) {
        section = section.remark(name, "also", Value::text(more.in_short()), "");
    }
    let section = section.fact("next", "next", Value::Command(worst.next));
    let mut also: Vec<&'static str> = vec![];
    for name in all.iter().map(|finding| finding.kind.names().0).filter(|name| *name != kind) {
        if !also.contains(&name) {
            also.push(name);
        }
    }
    gputrace_report::model::Verdict { kind, cause: worst.cause.to_owned(), also, section }
}

impl Finding {
    /// In one line, behind another finding.
    fn in_short(&self) -> String {
        let site = match self.site.as_str() {
            "" | "(no stack recorded)" => String::new(),
            site => format!(", at {site}"),
        };
        let fix = match &self.fix {
            Some(Fix { what: Value::Text(text) | Value::Command(text), .. }) => format!(": {text}"),
            Some(_) | None => String::new(),
        };
        format!("{}{site}{fix}", self.what)
    }
}

/// What the verdict rests on.
struct Evidence<'a> {
    facts: &'a Facts<'a>,
    found: &'a Postmortem,
    story: &'a Story,
    /// The trace, for a shell.
    path: String,
}

impl Evidence<'_> {
    /// What is wrong, the worst first; never empty.
    fn findings(&self) -> Vec<Finding> {
        let (spare, causes): (Vec<Found>, Vec<Found>) =
            ranked(self.facts).into_iter().partition(|(_, kind, _)| *kind == crate::causes::Kind::Spare);
        if let Some(failure) = self.facts.failure {
            return self.out_of_memory(failure, causes);
        }
        // Mappings of what others own have a number, and no bytes.
        let is_much = |(_, kind, case): &Found| {
            let is_growth = *kind == crate::causes::Kind::Grew;
            !is_growth || case.bytes.0 == 0 || case.bytes.0.saturating_mul(LEAST_GROWTH) >= self.facts.all.0
        };
        let (mut much, little): (Vec<_>, Vec<_>) = causes.into_iter().partition(is_much);
        if much.is_empty() {
            much = little;
        }
        let mut all: Vec<Finding> =
            much.into_iter().map(|(cause, kind, case)| self.of_cause(cause, kind, case)).collect();
        let killed = self.killed();
        if let Some(fault) = self.fault() {
            // What ended the process comes first; a fault that it survived comes after what is wrong with its memory.
            match killed {
                Some(killed) => {
                    all.insert(0, Finding { what: format!("{}; {}", fault.what, killed.what), ..fault })
                }
                None => all.push(fault),
            }
            all.truncate(1 + MORE_CAUSES);
            return all;
        }
        match (all.first_mut(), killed) {
            (Some(worst), Some(killed)) => worst.what = format!("{}; {}", worst.what, killed.what),
            (None, Some(killed)) => all.push(killed),
            (Some(_), None) => {}
            (None, None) => all.push(self.nothing()),
        }
        self.lower(&mut all, spare);
        all.truncate(1 + MORE_CAUSES);
        all
    }

    /// Adds what would lower the peak. Where nothing is wrong, that is the answer.
    fn lower(&self, all: &mut Vec<Finding>, spare: Vec<Found>) {
        let mut spare = spare.into_iter().map(|(cause, kind, case)| self.of_cause(cause, kind, case));
        let is_well = all.first().is_some_and(|first| first.kind == Kind::Nothing);
        if is_well {
            if let Some(first) = spare.next() {
                all.remove(0);
                let growth = match self.found.leaks.can_tell() {
                    true => String::new(),
                    false => format!("; {TOO_SHORT}"),
                };
                let recovered = self.facts.recovered_in_words();
                let recovered = recovered.map_or_else(String::new, |text| format!("; {text}"));
                all.insert(0, Finding { what: format!("{}{growth}{recovered}", first.what), ..first });
            } else if let (Some((text, less)), Some(well)) =
                (mostly::needed(self.facts), all.first_mut().filter(|well| well.site.is_empty()))
            {
                well.what = format!("{}; {text}", well.what);
                well.fix = Fix::words(format!("to lower the peak: {less}"), "");
            } else if let (Some((text, less)), Some(well)) =
                (another_pool::in_words(self.facts), all.first_mut())
            {
                well.what = format!("{}; {text}", well.what);
                well.fix = Fix::words(less, "");
            }
        }
        // What is wrong at a line says more than that the peak could be lower without it.
        let is_known = |it: &Finding| {
            all.iter().any(|one| {
                !one.site.is_empty() && (it.site.starts_with(&one.site) || one.site.starts_with(&it.site))
            })
        };
        let others: Vec<Finding> = spare.filter(|it| !is_known(it)).collect();
        all.extend(others);
    }

    fn of_cause(&self, cause: &'static Cause, kind: crate::causes::Kind, case: Case) -> Finding {
        Finding {
            kind: Kind::Of(kind),
            cause: cause.name,
            what: case.what,
            site: case.site,
            sure: case.sure,
            fix: case.fix,
            next: self.command(case.verb),
        }
    }

    fn command(&self, verb: &str) -> String {
        format!("gputrace {verb} {}", self.path)
    }

    /// A request that failed, and what explains most of what was held then.
    fn out_of_memory(&self, failure: Failure<'_>, causes: Vec<Found>) -> Vec<Finding> {
        let what = match failure {
            Failure::Torch(ordinal, error) => self.torch_ran_out(ordinal, error),
            Failure::Refused(refused) => self.refused(refused),
            Failure::Jax(ordinal, error) => self.jax_ran_out(ordinal, error),
        };
        let mut causes = causes.into_iter().map(|(cause, kind, case)| self.of_cause(cause, kind, case));
        let mut all = match causes.next() {
            Some(first) => {
                vec![Finding { kind: Kind::OutOfMemory, what: format!("{what}: {}", first.what), ..first }]
            }
            None => vec![self.without_cause(failure, what)],
        };
        all.extend(self.fault());
        all.extend(causes.take(MORE_CAUSES));
        all.truncate(1 + MORE_CAUSES);
        all
    }

    fn refused(&self, refused: &Refusal) -> String {
        let sites = &self.story.ledger.sites;
        let torch = self.facts.held.filter(|held| held.bytes.0 > 0).map_or_else(String::new, |held| {
            let most = held.holders.first();
            let most = most.map(|most| {
                format!(", most of them at {} ({})", self.facts.site(most.site), bytes(most.bytes))
            });
            format!(", of which {} in PyTorch's blocks{}", bytes(held.bytes), most.unwrap_or_default())
        });
        format!(
            "{} could not get {} on {} ({}) at {}; the process held {}{torch}",
            sites.owner(refused.owner),
            bytes(refused.bytes),
            device(refused.device),
            sites.name(refused.name),
            time(self.story.since_start(refused.time)),
            bytes(refused.tracked),
        )
    }

    fn jax_ran_out(&self, ordinal: i16, error: &PjrtOom) -> String {
        let executable = error.executable.and_then(|at| self.story.ledger.executables().get(at));
        format!(
            "JAX could not get {}{} on {} at {}; its buffers held {}",
            error.bytes.map_or_else(|| "memory".to_owned(), bytes),
            executable.map_or_else(String::new, |it| format!(" for {}", it.name)),
            device(ordinal),
            time(self.story.since_start(error.time)),
            bytes(error.buffers),
        )
    }

    fn torch_ran_out(&self, ordinal: i16, error: &TorchOom) -> String {
        let asked = error.requested.unwrap_or(error.bytes);
        let what = format!(
            "PyTorch could not get {} on {} at {}",
            bytes(asked),
            device(ordinal),
            time(self.story.since_start(error.time))
        );
        match self.found.went_on_after(ordinal, <[TorchOom]>::last) {
            0 => what,
            _ => what + ", and the program continued",
        }
    }

    /// A request that failed without a cause that is known: what is, and what would have helped.
    fn without_cause(&self, failure: Failure<'_>, what: String) -> Finding {
        let (what, site, sure, fix) = match failure {
            Failure::Torch(_, error) => {
                let (fix, sure) = match self.facts.requests() {
                    None => (
                        None,
                        "certain that it ran out; `gputrace oom` shows what would have helped".to_owned(),
                    ),
                    Some(_) => self.setting_that_fits(),
                };
                (format!("{what}: {}", why(error)), error.site, sure, fix)
            }
            Failure::Refused(refused) => {
                (what, refused.site, "certain: the driver refused it".to_owned(), None)
            }
            Failure::Jax(_, error) => (
                what,
                self.facts.jax_line(error),
                "certain: PJRT answered RESOURCE_EXHAUSTED".to_owned(),
                None,
            ),
        };
        let next = self.command("oom");
        Finding { kind: Kind::OutOfMemory, cause: "", what, site: self.facts.site(site), sure, fix, next }
    }

    /// The setting that would have made it fit, and how sure that is.
    fn setting_that_fits(&self) -> (Option<Fix>, String) {
        let Some(trial) = self.facts.trial() else {
            return (None, "certain that it ran out; its requests cannot be replayed".into());
        };
        match trial.as_ref().map_err(String::as_str).and_then(Trial::best) {
            // Every verdict repeats the doubts of its story.
            Err(_) if self.story.doubts().is_some() => {
                (None, "certain that it ran out, but not what would have helped".into())
            }
            Err(why) => (None, format!("certain that it ran out; cannot tell what would have helped: {why}")),
            Ok((_, None)) => (
                Fix::words(self.less_memory(), ""),
                "certain: the usual allocator settings were replayed, and none fits".into(),
            ),
            // The next request of the same step may need what is left.
            Ok((_, Some(best))) if self.facts.is_tight(best) => (
                Fix::words(self.less_memory(), ""),
                format!(
                    "likely: with `{}`, {} would be reserved for this request, and the step was not over",
                    best.options,
                    bytes(best.peak_reserved)
                ),
            ),
            Ok((recorded, Some(best))) => {
                let (fix, sure) = external_fragmentation::setting(self.facts, recorded, best);
                (Some(fix), sure)
            }
        }
    }

    /// Where no setting helps: what there is most of, and how people need less of that.
    fn less_memory(&self) -> String {
        let is_served = self.facts.remedy().is_some();
        let no = if is_served { "" } else { "; no allocator setting makes it fit" };
        match mostly::needed(self.facts) {
            Some((text, less)) => format!("{less}: {text}{no}"),
            None => format!("use less memory, or a larger card{no}"),
        }
    }

    /// The worst fault of a GPU that NVML reported.
    fn fault(&self) -> Option<Finding> {
        let (at, fault) = self.story.ledger.health.worst()?;
        let others = self.story.ledger.health.n_faults - 1;
        let more = if others > 0 { format!("; {} more faults", count(others)) } else { String::new() };
        faults::is_critical(fault).then(|| Finding {
            kind: Kind::GpuFault,
            cause: "",
            what: format!("{}{more}", faults::text(&self.story.process, *at, fault)),
            site: String::new(),
            sure: "certain that NVML reported it; any process on the card may have caused an XID".into(),
            fix: Fix::words(faults::remedy(fault), ""),
            next: self.command("report --all"),
        })
    }

    /// How the process ended, where that was no end of its own.
    fn killed(&self) -> Option<Finding> {
        let ledger = &self.story.ledger;
        let end =
            self.story.end().filter(|end| !matches!(end, End::Exit | End::Status(0) | End::Detached))?;
        let inside = ledger.counts.open_calls.first();
        let inside_of =
            inside.map_or_else(String::new, |call| format!(", inside {}", ledger.sites.name(call.name)));
        let ranks = self.story.process.rank.is_some() || ledger.communicators().next().is_some();
        let next = match ranks {
            true => format!("gputrace ranks {}", quote(&folder(&self.story.path))),
            false => self.command("report --all"),
        };
        let last = time(self.story.since_start(ledger.run.last));
        Some(Finding {
            kind: if matches!(end, End::Status(_)) { Kind::Left } else { Kind::Killed },
            cause: "",
            what: format!("the process {}{inside_of}, {last} after its start", end.text()),
            site: inside.map_or_else(String::new, |call| self.facts.site(call.site)),
            sure: match end {
                End::Signal(_) | End::Status(_) => {
                    "certain how it ended; its GPU memory shows no cause: no request failed, and nothing grew"
                }
                End::Exit | End::Unseen | End::Detached => {
                    "its GPU memory shows no cause: no request failed, and nothing grew"
                }
            }
            .into(),
            fix: None,
            next,
        })
    }

    /// What rose most to the end of a program that gave next to nothing back.
    fn only_taken(&self) -> Option<&RoseSite> {
        let rose = self.found.leaks.rose.iter().filter(|rose| rose.course == Course::OnlyTakes);
        rose.max_by_key(|rose| rose.growth)
    }

    /// Whether something rose to the end of a start.
    fn is_only_started(&self) -> bool {
        self.found.leaks.rose.iter().any(|rose| rose.course == Course::Preparing)
    }

    /// What rises while next to nothing is given back is a leak, or a program that gets ready.
    fn leaks_or_loads(&self, rose: &RoseSite, peak: Option<&str>) -> Finding {
        let peak = peak.map_or_else(String::new, |peak| format!("; {peak}"));
        let n_shared = self.facts.n_shared();
        let (shared, fix) = match n_shared >= LEAST_SHARED {
            true => (
                format!(
                    ", or memory kept for another process: {} CUDA IPC handles were exported, and `del` here does not free what another process has open{}",
                    count(n_shared),
                    self.facts.opener().map_or_else(String::new, |opener| format!(" ({opener})"))
                ),
                Fix::words(growth::KEPT_BY_ANOTHER, ""),
            ),
            false => (String::new(), None),
        };
        Finding {
            kind: Kind::CannotTell,
            cause: "",
            what: format!(
                "no request failed, but memory held by this line rose to the end, by {}, and almost nothing was freed: a leak, or a program that loads data{shared}{peak}",
                bytes(rose.growth)
            ),
            site: rose.named.site.clone(),
            sure: String::new(),
            fix,
            next: self.command("leaks"),
        }
    }

    /// A snapshot without a history.
    fn one_moment(&self) -> Finding {
        let held = self.facts.held.filter(|held| held.bytes.0 > 0);
        let known = held.and_then(|held| held.holders.iter().find(|holder| !self.is_nameless(holder.site)));
        let most = match (held, known) {
            (Some(held), Some(most)) => {
                let nameless = held.sum(|holder| self.is_nameless(holder.site));
                let without = match nameless.0 {
                    0 => String::new(),
                    _ => format!("{} of that without a line, ", bytes(nameless)),
                };
                let (held, of) = (bytes(held.bytes), bytes(most.bytes));
                format!("; {held} are in use, {without}{of} requested by the line below")
            }
            (Some(held), None) => {
                format!(
                    "; {} are in use, and the snapshot does not show the lines that requested them",
                    bytes(held.bytes)
                )
            }
            (None, _) => String::new(),
        };
        let still = self.facts.requests().and_then(|trace| Still::of(&trace.devices));
        let facts: String = still.iter().flat_map(Still::facts).map(|fact| format!("; {fact}")).collect();
        let site = known.map_or_else(String::new, |most| self.facts.site(most.site));
        let next = self.command("report --all");
        if let Some(aside) = still.as_ref().and_then(Still::aside) {
            return Finding {
                kind: Kind::Of(crate::causes::Kind::Wasted),
                cause: streams_made_anew::IDLE.name,
                what: format!("{aside}{most}{facts}"),
                site,
                sure: "certain of this moment; whether the stream requests memory again is not recorded"
                    .into(),
                fix: Fix::words(
                    "call `torch.cuda.empty_cache()` once after the work of that stream, or do it on the main stream",
                    "",
                ),
                next,
            };
        }
        Finding {
            kind: Kind::CannotTell,
            cause: "",
            what: format!("{}{most}{facts}", history::in_words(self.story).unwrap_or_default()),
            site,
            sure: String::new(),
            fix: Some(Fix {
                what: Value::text(format!("record one: {}", history::RECORD)),
                worth: format!("then {}", history::DUMP),
            }),
            next,
        }
    }

    fn is_nameless(&self, site: gputrace_trace::ledger::SiteId) -> bool {
        self.story.ledger.sites.site(site).is_none_or(|site| site.function.is_empty())
    }

    /// What rose most and was made once, in words, and its line.
    fn made_once(&self) -> Option<(String, String)> {
        let rose = self.found.leaks.rose.iter().filter(|rose| matches!(rose.course, Course::Once(_)));
        let most = rose.max_by_key(|rose| rose.growth)?;
        let held = self.facts.lifetimes.into_iter().flat_map(|it| it.at_end.iter().chain(&it.at_peak));
        let mut holders = held.flat_map(|held| &held.holders);
        let role = holders.find(|holder| self.facts.site(holder.site) == most.named.site);
        let role = role.map(|holder| self.facts.role(holder)).filter(|role| !role.starts_with("unknown"));
        let role = role.map_or_else(String::new, |role| format!(", {role}"));
        let text = format!(
            "nothing accumulates: memory rose once, most of it at the line below ({}{role})",
            bytes(most.growth)
        );
        Some((text, most.named.site.clone()))
    }

    /// Nothing was found: because all is well, or because the trace cannot show it.
    fn nothing(&self) -> Finding {
        if self.story.is_one_moment() {
            return self.one_moment();
        }
        let made_once = self.made_once();
        let ledger = &self.story.ledger;
        let devices = used_devices(self.story).filter(|(ordinal, _)| *ordinal != NO_DEVICE);
        let fullest = devices.max_by_key(|(ordinal, books)| (books.physical.peak(), Reverse(*ordinal)));
        let peak = fullest.map(|(ordinal, books)| {
            let total = self.story.device(ordinal).map(|device| device.total.0).filter(|total| *total > 0);
            let of = total.map_or_else(String::new, |total| format!(" of {}", bytes(Bytes(total))));
            format!("peak {}{of} on {}", bytes(books.physical.peak()), device_name(self.story, ordinal))
        });
        let has_asked = used_devices(self.story).next().is_some() || ledger.host().peak().0 > 0;
        let (kind, what, sure) = match (has_asked, self.story.doubts().is_some()) {
            (false, _) => {
                let what = match ledger.run.n_events {
                    _ if self.story.is_unreadable() => "none of its events can be read",
                    0 => "the trace has no events",
                    _ => "the process requested no GPU memory during the recording",
                };
                (Kind::CannotTell, what.to_owned(), String::new())
            }
            (true, true) if self.story.is_running => {
                (Kind::Running, "no request failed so far".into(), String::new())
            }
            (true, true) => {
                let what = "the trace shows no problem, but it is incomplete";
                (Kind::CannotTell, what.into(), String::new())
            }
            (true, false) => {
                if let Some(rose) = self.only_taken() {
                    return self.leaks_or_loads(rose, peak.as_deref());
                }
                let growth = match self.found.leaks.can_tell() {
                    true if made_once.is_some() => made_once.as_ref().map_or("", |(text, _)| text),
                    true if self.is_only_started() => {
                        "memory rose only during start-up, and no work was seen afterwards"
                    }
                    true => "nothing keeps growing",
                    false => TOO_SHORT,
                };
                let settled = crate::causes::external_fragmentation::settled_in_words(self.facts);
                let settled = settled.map_or_else(String::new, |text| format!("; {text}"));
                let fared = self.facts.recovered_in_words().map_or_else(
                    || format!("no request failed, {growth}"),
                    |recovered| format!("{recovered}; {growth}"),
                );
                (Kind::Nothing, format!("{fared}{settled}"), String::new())
            }
        };
        let what = match peak {
            Some(peak) => format!("{what}; {peak}"),
            None => what,
        };
        let site = made_once.map_or_else(String::new, |(_, site)| site);
        let next = match self.story.doubts().is_some() || !has_asked {
            true => self.command("doctor"),
            false => self.command("report --all"),
        };
        Finding { kind, cause: "", what, site, sure, fix: None, next }
    }
}

/// How sure something is where events are missing: a cause or a release may be among them.
fn weakened(sure: String) -> String {
    if let Some((_, rest)) = sure.split_once(" % that it grows") {
        return format!("likely that it grows{rest}");
    }
    match ["exact: ", "certain: "].into_iter().find_map(|strong| sure.strip_prefix(strong)) {
        Some(rest) => format!("likely: {rest}"),
        None => sure,
    }
}

/// What stood in the way of a request.
fn why(error: &TorchOom) -> String {
    let unused = error.reserved.0.saturating_sub(error.allocated.0);
    let held = format!("{} in use, {} more reserved", bytes(error.allocated), bytes(Bytes(unused)));
    match (error.wall(), error.device) {
        (Wall::Limit, _) => format!("{held}, under set_per_process_memory_fraction"),
        (Wall::Device, Some((free, total))) => {
            let elsewhere = total.0.saturating_sub(free.0).saturating_sub(error.tracked.0);
            match elsewhere.saturating_mul(MUCH_ELSEWHERE) >= total.0 && total.0 > 0 {
                true => format!(
                    "{held}, and other processes held {} of the device's {}",
                    bytes(Bytes(elsewhere)),
                    bytes(total)
                ),
                false if total.0 == 0 => held,
                false => format!("{held}, on a device of {}", bytes(total)),
            }
        }
        (Wall::Device | Wall::Unknown, _) => held,
    }
}

fn folder(path: &str) -> String {
    match path.rsplit_once('/') {
        Some(("", _)) => "/".into(),
        Some((folder, _)) => folder.into(),
        None => ".".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gputrace_analyse::categories::Categories;
    use gputrace_analyse::growth::Growth;
    use gputrace_report::model::Item;
    use gputrace_schemas::event::{Event, EventKind, Lost, LostCause, Nanos, StackId, ThreadId};
    use gputrace_trace::scene::recording;
    use gputrace_trace::source::Source;

    /// The verdict on a scene, a line for each of its parts.
    fn told(scene: &str) -> Vec<String> {
        told_with(scene, None)
    }

    /// The same of a scene with another event at its end.
    fn told_with(scene: &str, last: Option<EventKind>) -> Vec<String> {
        let mut recording = recording(scene);
        let time = recording.events.last().map_or(Nanos(0), |event| event.time);
        let event = |kind| Event { time, thread: ThreadId(1), stack: StackId(0), kind };
        recording.events.extend(last.map(event));
        let source = Source::of("job/train.gtr", recording);
        let mut growth = Growth::default();
        let story = Story::with_lifetimes_and(&source, &Categories::default(), &mut growth);
        let found = Postmortem::of_story(story, &source, &growth);
        let verdict = verdict(&found, &source);
        let parts = verdict.section.items.iter().map(|item| match item {
            Item::Fact { name, value: Value::Text(text) | Value::Command(text), remark, .. } => {
                format!("{name}: {text}{}{remark}", if remark.is_empty() { "" } else { "; " })
            }
            other => panic!("{other:?}"),
        });
        std::iter::once(verdict.section.title.clone()).chain(parts).collect()
    }

    const HELD: &str = "Alloc addr=0x10000000 bytes=20M by=libcudart.so,libc10_cuda.so in_allocate=1
        block addr=0x10000000 bytes=8M requested=8M allocated=8M reserved=20M by=load@/job/a.py:3\n";

    /// A loop of a hundred steps with an activation, and what `also` adds to each.
    fn steps(also: impl Fn(usize) -> String) -> String {
        let taken = "bytes=4M requested=4M by=fwd@/job/a.py:2";
        let step = |step| format!("block addr=a{step} {taken}\n{}free addr=a{step} bytes=4M\n", also(step));
        (0..100).map(step).collect()
    }

    #[test]
    fn a_full_device_is_told_with_who_asked_and_who_else_was_there() {
        let told = told(&format!(
            "{HELD}Alloc bytes=30M result=2 by=libcudart.so,libc10_cuda.so in_allocate=1
             MemInfo bytes=10M extra=80M
             oom bytes=30M requested=30M allocated=8M reserved=20M by=forward@/job/a.py:12"
        ));
        assert_eq!(
            told,
            [
                "Verdict: out of memory: other processes on the card",
                "what: PyTorch could not get 30.00 MiB on cuda:0 at 4.0 µs: 8.00 MiB in use, 12.00 MiB more reserved, and other processes held 50.00 MiB of the device's 80.00 MiB",
                "call_site: forward (/job/a.py:12)",
                "confidence: the driver's own figure at that moment, without the memory of this process; its own context is included",
                "fix: end or move the other processes (`gputrace oom` lists those that NVML names), or wait for them; \
                 60.00 MiB would have been free",
                "next: gputrace oom job/train.gtr",
            ]
        );
    }

    #[test]
    fn who_else_than_pytorch_was_refused_is_named() {
        let told = told(&format!("{HELD}Create bytes=4G result=2 by=/x/libnccl.so.2,init@/job/a.py:1"));
        assert_eq!(
            told[1],
            "what: NCCL could not get 4.00 GiB on cuda:0 (cuMemCreate) at 2.0 µs; the process held 20.00 MiB, of which 8.00 MiB in PyTorch's blocks, most of them at load (/job/a.py:3) (8.00 MiB)"
        );
    }

    #[test]
    fn what_grows_is_told_with_its_line_and_also_where_it_was_killed() {
        let kept = |step: usize| format!("block addr=k{step} bytes=1M requested=1M by=keep@/job/a.py:9\n");
        let scene = steps(kept);
        let told_of = told(&scene);
        assert_eq!(told_of[0], "Verdict: memory grows: results kept");
        assert!(told_of[1].starts_with("what: this line's memory grew by 100.00 MiB"), "{}", told_of[1]);
        assert_eq!(told_of[2..3], ["call_site: keep (/job/a.py:9)"]);
        assert_eq!(told_of.last().map(String::as_str), Some("next: gputrace leaks job/train.gtr"));
        let killed = told_with(&scene, Some(EventKind::Note("process.end=signal 9".into())));
        assert_eq!(killed[0], "Verdict: memory grows: results kept");
        assert!(
            killed[1].ends_with("; the process was killed by signal 9 (SIGKILL), 299.0 µs after its start")
        );
    }

    #[test]
    fn a_process_that_was_killed_while_all_was_well_is_said_to_have_been_killed() {
        let told = told_with(HELD, Some(EventKind::Note("process.end=signal 9".into())));
        assert_eq!(told[0], "Verdict: the process was killed");
        assert_eq!(told.last().map(String::as_str), Some("next: gputrace ranks job"));
        let told = told_with(HELD, Some(EventKind::Note("process.end=_exit 1".into())));
        assert_eq!(told[0], "Verdict: the process exited early");
        let told = told_with(HELD, Some(EventKind::Note("process.end=exit".into())));
        assert_eq!(told[0], "Verdict: nothing is wrong");
    }

    #[test]
    fn a_healthy_run_is_said_to_be_well_and_a_short_one_not_to_show_growth() {
        let told_of = told(&(HELD.to_owned() + &steps(|_| String::new())));
        assert_eq!(told_of[0], "Verdict: nothing is wrong");
        assert!(
            told_of[1].starts_with("what: no request failed, nothing keeps growing; peak 20.00 MiB"),
            "{told_of:?}"
        );
        let told_of = told(HELD);
        assert!(told_of[1].contains("too short to show whether memory grows"), "{told_of:?}");
    }

    #[test]
    fn a_server_that_has_only_loaded_is_not_said_to_grow() {
        let shard = |n| {
            let by = |line| format!("bytes=4M requested=4M by=get@/job/a.py:{line},load_shards@/job/a.py:2");
            format!("block addr=s{n} {}\nblock addr=w{n} {}\nfree addr=s{n} bytes=4M\n", by(3), by(4))
        };
        let told_of = told(&(HELD.to_owned() + &(0..100).map(shard).collect::<String>()));
        assert_eq!(told_of[0], "Verdict: nothing is wrong");
        assert!(told_of[1].contains("rose only during start-up"), "{told_of:?}");
    }

    #[test]
    fn where_evidence_is_missing_nothing_is_said_to_be_well() {
        let lost = EventKind::Lost(Lost { cause: LostCause::RingFull, events: 3 });
        let told_of = told_with(HELD, Some(lost));
        assert_eq!(told_of[0], "Verdict: cannot tell");
        assert!(told_of[2].contains("3 events lost"), "{told_of:?}");
        assert_eq!(told("Init")[0], "Verdict: cannot tell");
    }

    #[test]
    fn a_pool_that_a_failed_capture_left_is_told_with_the_line_that_captured() {
        let scene = "TorchPoolBegin handle=1
            CaptureBegin stream=5 by=warm_up@/job/serve.py:40
            Alloc addr=0x50000000 bytes=20M by=libcudart.so,libc10_cuda.so in_allocate=1
            block addr=0x50000000 bytes=20M requested=20M stream=5 allocated=20M reserved=20M by=f@/job/a.py:2
            CaptureEnd stream=5 result=901
            TorchPoolEnd handle=1";
        let told = told(scene);
        assert_eq!(told[0], "Verdict: a pool was left behind: no graph can use it");
        let what = "what: cuda:0: PyTorch's pool (1, 0) keeps 20.00 MiB that nothing can use: the capture into it failed";
        assert_eq!(told[1..3], [what, "call_site: warm_up (/job/serve.py:40)"]);
        assert_eq!(told.last().map(String::as_str), Some("next: gputrace leaks job/train.gtr"));
    }
}
