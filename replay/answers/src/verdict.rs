//! The verdict with which `gputrace report` begins: what happened, the line that did it, how sure that is, what to do, and what
//! to type next.
//!
//! It finds nothing by itself: it puts in order what `oom`, `leaks` and the sections of the report know, the worst first. What
//! only others can tell (`ranks`, `tune`) it names. Of a trace that is not whole, "nothing wrong" is never said.

use std::cmp::Reverse;

use gputrace_schemas::event::{Bytes, NO_DEVICE};
use gputrace_sim::effort;
use gputrace_sim::ops::OpStream;
use gputrace_sim::tune;
use gputrace_sim::whatif::{Confidence, Laboratory, Question};

use crate::leaks::{self, AbandonedPool, GrowingSite, RoseSite};
use crate::postmortem::Postmortem;
use gputrace_analyse::doubts;
use gputrace_analyse::growth::Course;
use gputrace_analyse::story::{End, Story};
use gputrace_report::model::{Section, Value, Verdict};
use gputrace_report::sections::{balance, cache, device_name};
use gputrace_report::summary::used_devices;
use gputrace_trace::import::{Requests, Trace};
use gputrace_trace::ledger::{PjrtOom, Refusal, SiteId, TorchOom, Wall};
use gputrace_trace::words::{bytes, count, quote, time};

/// What grew comes first from this part of the device's peak on: one in so many. Less is the verdict where nothing else is.
const LEAST_GROWTH: u64 = 1000;
/// What waited for Python's collector is worth a verdict from this part of the peak of PyTorch's blocks on: one in so many.
const LEAST_KEPT: u64 = 20;
/// What pools without a graph keep is worth a verdict from this part of the device's peak on: one in so many.
const LEAST_ABANDONED: u64 = 50;
/// Others hold much of a device from this part of it on: one in so many.
const MUCH_ELSEWHERE: u64 = 4;
/// Another setting is worth its name from this part of what was reserved on: one in so many.
const WORTHWHILE: u64 = 20;

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A request for memory failed.
    OutOfMemory,
    /// Memory grew to the end.
    Grew,
    /// The process ended itself with a status that is not 0, past its exit handlers.
    Left,
    /// A signal ended the process, or nobody saw how it ended.
    Killed,
    /// Reference cycles kept memory from being given back.
    Kept,
    /// A pool of PyTorch's keeps memory that no graph can use.
    Abandoned,
    /// PyTorch reserved much more than was in use.
    Wasted,
    /// Memory was given back only to be bought again.
    Churned,
    /// One device held more than another.
    Uneven,
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
            Kind::Grew => ("grew", "memory grows"),
            Kind::Left => ("left", "the process ended itself"),
            Kind::Killed => ("killed", "the process was killed"),
            Kind::Kept => ("kept", "memory was kept"),
            Kind::Abandoned => ("abandoned", "a pool was left behind"),
            Kind::Wasted => ("wasted", "memory was reserved and not used"),
            Kind::Churned => ("churned", "memory was given back and bought again"),
            Kind::Uneven => ("uneven", "uneven devices"),
            Kind::Nothing => ("nothing_wrong", "nothing is wrong"),
            Kind::Running => ("running", "nothing is wrong so far"),
            Kind::CannotTell => ("cannot_tell", "cannot tell"),
        }
    }
}

/// One thing that is wrong, or that nothing is.
struct Finding {
    kind: Kind,
    /// In a sentence.
    what: String,
    /// The line of the program; empty where none is known.
    site: String,
    /// How it is known.
    sure: String,
    fix: Option<Fix>,
    next: String,
}

/// What to do.
struct Fix {
    /// A command, or words.
    what: Value,
    /// What it saves, and how that is known.
    worth: String,
}

impl Fix {
    fn words(what: impl Into<String>, worth: impl Into<String>) -> Option<Fix> {
        Some(Fix { what: Value::text(what), worth: worth.into() })
    }
}

/// The verdict on a process whose growth was watched.
pub fn verdict(found: &Postmortem, trace: &dyn Requests) -> Verdict {
    let story = &found.story;
    // Longer traces are not replayed for a verdict.
    let trace = Some(trace).filter(|_| effort::VERDICT.covers(story.ledger.n_events as usize));
    let mut all = Evidence { found, story, trace, path: quote(story.named()) }.findings();
    let mut worst = all.remove(0);
    if let Some(doubts) = story.caveats() {
        worst.sure = if worst.sure.is_empty() { doubts } else { format!("{}; but {doubts}", worst.sure) };
    }
    let kind = worst.kind.names().0;
    let titles: Vec<&str> =
        std::iter::once(&worst).chain(&all).map(|finding| finding.kind.names().1).collect();
    let section = Section::new("verdict", format!("Verdict: {}", titles.join("; also "))).fact(
        "what",
        "what",
        Value::text(worst.what),
    );
    let section = match worst.site.as_str() {
        "" | "(no stack recorded)" => section,
        site => section.fact("call_site", "where", Value::text(site)),
    };
    let section = match worst.sure.as_str() {
        "" => section,
        sure => section.fact("confidence", "sure", Value::text(sure)),
    };
    let section = match worst.fix {
        Some(fix) => section.remark("fix", "fix", fix.what, fix.worth),
        None => section,
    };
    let section = section.fact("next", "next", Value::Command(worst.next));
    Verdict { kind, also: all.iter().map(|finding| finding.kind.names().0).collect(), section }
}

/// What the verdict rests on.
struct Evidence<'a> {
    found: &'a Postmortem,
    story: &'a Story,
    /// Where its requests are had, if it may be replayed.
    trace: Option<&'a dyn Requests>,
    /// The trace, for a shell.
    path: String,
}

impl Evidence<'_> {
    /// What is wrong, the worst first; never empty.
    fn findings(&self) -> Vec<Finding> {
        if let Some(finding) = self.out_of_memory() {
            return vec![finding];
        }
        let (much, little): (Vec<_>, Vec<_>) = self.grew().into_iter().partition(|(_, is_much)| *is_much);
        let mut all: Vec<Finding> = much.into_iter().map(|(finding, _)| finding).collect();
        all.extend(self.kept());
        all.extend(self.abandoned());
        all.extend(self.wasted());
        all.extend(self.churned());
        all.extend(self.uneven());
        if all.is_empty() {
            all.extend(little.into_iter().map(|(finding, _)| finding));
        }
        let killed = self.killed();
        match (all.first_mut(), killed) {
            (Some(worst), Some(killed)) => worst.what = format!("{}; {}", worst.what, killed.what),
            (None, Some(killed)) => all.push(killed),
            (Some(_), None) => {}
            (None, None) => all.push(self.nothing()),
        }
        all
    }

    /// What the devices were asked, where that can be replayed.
    fn requests(&self) -> Option<&Trace> {
        self.trace?.requests().ok()
    }

    fn command(&self, verb: &str) -> String {
        format!("gputrace {verb} {}", self.path)
    }

    fn site(&self, site: SiteId) -> String {
        self.story.ledger.sites.site_name(site)
    }

    /// The last request that failed for good: PyTorch's, or another's.
    fn out_of_memory(&self) -> Option<Finding> {
        let errors = self.found.torch_devices();
        let errors = errors.filter_map(|device| Some((device, self.found.torch_oom(device)?)));
        let error = errors.max_by_key(|(_, error)| error.time);
        let refused = self.story.ledger.refusals.iter().rev().find(|refusal| refusal.is_final);
        let jax = self.found.jax_ooms().max_by_key(|(_, error)| error.time);
        if let Some((device, last)) = jax
            && error.is_none_or(|(_, error)| error.time < last.time)
            && refused.is_none_or(|refused| refused.time < last.time)
        {
            return Some(self.jax_ran_out(device, last));
        }
        match (error, refused) {
            (Some((_, error)), Some(refused)) if refused.time > error.time => Some(self.refused(refused)),
            (Some((device, error)), _) => Some(self.torch_ran_out(device, error)),
            (None, Some(refused)) => Some(self.refused(refused)),
            (None, None) => None,
        }
    }

    fn refused(&self, refused: &Refusal) -> Finding {
        let sites = &self.story.ledger.sites;
        let grown = self.found.leaks_of(refused.device);
        let what = format!(
            "{} could not get {} on {} ({}) at {}; the process held {}",
            sites.owner(refused.owner),
            bytes(refused.bytes),
            device(refused.device),
            sites.name(refused.name),
            time(self.story.since_start(refused.time)),
            bytes(refused.tracked),
        );
        match grown.first() {
            Some(largest) => self.leak_at_the_end(what, &grown, largest),
            None => Finding {
                kind: Kind::OutOfMemory,
                what,
                site: self.site(refused.site),
                sure: "certain: the driver refused it".into(),
                fix: None,
                next: self.command("oom"),
            },
        }
    }

    fn jax_ran_out(&self, ordinal: i16, error: &PjrtOom) -> Finding {
        let executable = error.executable.and_then(|at| self.story.ledger.executables().get(at));
        let what = format!(
            "JAX could not get {}{} on {} at {}; its buffers held {}",
            error.bytes.map_or_else(|| "memory".to_owned(), bytes),
            executable.map_or_else(String::new, |it| format!(" for {}", it.name)),
            device(ordinal),
            time(self.story.since_start(error.time)),
            bytes(error.buffers),
        );
        let grown = self.found.leaks_of(ordinal);
        match grown.first() {
            Some(largest) => self.leak_at_the_end(what, &grown, largest),
            None => Finding {
                kind: Kind::OutOfMemory,
                what,
                site: self.site(error.site),
                sure: "certain: PJRT answered RESOURCE_EXHAUSTED".into(),
                fix: None,
                next: self.command("oom"),
            },
        }
    }

    fn torch_ran_out(&self, ordinal: i16, error: &TorchOom) -> Finding {
        let asked = error.requested.unwrap_or(error.bytes);
        let mut what = format!(
            "PyTorch could not get {} on {} at {}",
            bytes(asked),
            device(ordinal),
            time(self.story.since_start(error.time))
        );
        if self.found.went_on_after(ordinal, <[TorchOom]>::last) > 0 {
            what += ", and the program went on";
        }
        let grown = self.found.leaks_of(ordinal);
        if let Some(largest) = grown.first() {
            return self.leak_at_the_end(what, &grown, largest);
        }
        let held = |kept: &&super::caught::CaughtOom| kept.device == ordinal && kept.kept_bytes().0 > 0;
        if let Some(caught) = self.found.caught.iter().rev().find(held) {
            let kept = bytes(caught.kept_bytes());
            return Finding {
                kind: Kind::OutOfMemory,
                what: format!(
                    "{what}: an attempt that had failed at {}, and was caught, still held {kept}",
                    time(self.story.since_start(caught.time))
                ),
                site: caught.went_on.clone(),
                sure: "certain: what the attempt had allocated was still there".into(),
                fix: Fix::words(
                    "leave the `except` block before trying again",
                    format!("gives back {kept}, as recorded"),
                ),
                next: self.command("oom"),
            };
        }
        let (fix, sure) = match self.requests() {
            None => (None, "certain that it ran out; what would have helped: gputrace oom".to_owned()),
            Some(trace) => self.setting_that_fits(ordinal, trace),
        };
        Finding {
            kind: Kind::OutOfMemory,
            what: format!("{what}: {}", why(error)),
            site: self.site(error.site),
            sure,
            fix,
            next: self.command("oom"),
        }
    }

    /// The setting that would have made it fit, and how sure that is.
    fn setting_that_fits(&self, ordinal: i16, trace: &Trace) -> (Option<Fix>, String) {
        let Some(stream) = stream_of(trace, ordinal) else {
            return (None, "certain that it ran out; its requests cannot be replayed".into());
        };
        match self.found.remedy(ordinal, stream) {
            // What the story doubts is said of every verdict.
            Err(_) if self.story.doubts().is_some() => {
                (None, "certain that it ran out, not what would have helped".into())
            }
            Err(why) => (None, format!("certain that it ran out; cannot tell what would have helped: {why}")),
            Ok((_, None)) => (
                Fix::words("less memory, or a larger card: no allocator setting makes it fit", ""),
                "certain: replayed with the settings that people are advised to try".into(),
            ),
            Ok((recorded, Some(best))) => {
                let before = recorded.map_or_else(String::new, |recorded| {
                    format!(", where the recorded setting needs {}", bytes(recorded.peak_reserved))
                });
                let worth = format!("{}: needs {}{before}", best.verdict.name(), bytes(best.peak_reserved));
                let what = Value::Command(format!("export PYTORCH_CUDA_ALLOC_CONF={}", best.options));
                let sure = format!(
                    "{}: the run's {} requests were replayed with it",
                    in_words(best.confidence),
                    count(stream.n_requests() as u64)
                );
                (Some(Fix { what, worth }), sure)
            }
        }
    }

    /// An error that is the end of a leak.
    fn leak_at_the_end(&self, what: String, grown: &[&GrowingSite], largest: &GrowingSite) -> Finding {
        let all = grown.iter().fold(0u64, |sum, site| sum.saturating_add(site.growth.0));
        Finding {
            what: format!("{what}: {} had grown until then", bytes(Bytes(all))),
            kind: Kind::OutOfMemory,
            ..self.grows(largest, "no setting of the allocator mends it")
        }
    }

    /// What keeps growing, most first, and whether it is much.
    fn grew(&self) -> Option<(Finding, bool)> {
        let largest = self.found.leaks.growing.first()?;
        let peaks = used_devices(self.story).map(|(_, books)| books.physical.peak().0);
        let held = peaks.max().unwrap_or(0).max(self.story.ledger.host.peak().0);
        let finding = self.grows(largest, "");
        // Mappings of what others own have a number, and no bytes.
        Some((finding, largest.growth.0.saturating_mul(LEAST_GROWTH) >= held || largest.growth.0 == 0))
    }

    fn grows(&self, largest: &GrowingSite, remark: &str) -> Finding {
        let each = largest.repeated.as_ref().map(leaks::rate);
        let each = each.or_else(|| largest.per_step.map(|each| format!("{} each step", bytes(each))));
        let others = match self.found.leaks.growing.len() {
            0 | 1 => String::new(),
            2 => ", and another line grows".into(),
            n => format!(", and {} other lines grow", count(n as u64 - 1)),
        };
        let is_torch = largest.named.owner == "PyTorch block";
        let fix = match is_torch {
            true => {
                "what is made there is never let go: keep `x.item()` or `x.detach().cpu()`, or evaluate under \
                 `torch.inference_mode()`"
            }
            false => "give back what is asked for there",
        };
        Finding {
            kind: Kind::Grew,
            what: format!(
                "what this line holds grew to the end, by {}{}{others}",
                bytes(largest.growth),
                each.map_or_else(String::new, |each| format!(", {each}")),
            ),
            site: largest.named.site.clone(),
            sure: format!("{}: it rises steadily after the warm-up", above(largest.confidence)),
            fix: Fix::words(fix, remark),
            next: self.command("leaks"),
        }
    }

    /// Reference cycles.
    fn kept(&self) -> Option<Finding> {
        let lifetimes = self.story.lifetimes.as_ref()?;
        let (cycles, peak) = (&lifetimes.cycles, lifetimes.devices.iter().map(|device| device.peak.0).max()?);
        let site = cycles.sites.first()?;
        (cycles.peak.0.saturating_mul(LEAST_KEPT) >= peak).then(|| Finding {
            kind: Kind::Kept,
            what: format!(
                "up to {} of a peak of {} waited for Python's garbage collector: reference cycles held them",
                bytes(cycles.peak),
                bytes(Bytes(peak))
            ),
            site: self.site(site.site),
            sure: format!("certain: the collector gave back {} of its blocks", count(site.blocks)),
            fix: Fix::words(
                "break the cycle of what is made there: `weakref.proxy`, or `del` of one of its references",
                "",
            ),
            next: self.command("report --all"),
        })
    }

    /// Pools that keep memory for nobody: captures that failed, graphs that are gone.
    fn abandoned(&self) -> Option<Finding> {
        let pools: Vec<AbandonedPool> = leaks::abandoned(self.story).collect();
        let most = pools.iter().max_by_key(|pool| pool.bytes)?;
        let all = pools.iter().fold(0_u64, |sum, pool| sum.saturating_add(pool.bytes.0));
        let peak = used_devices(self.story).map(|(_, books)| books.physical.peak().0).max().unwrap_or(0);
        let others = match pools.len() {
            1 => String::new(),
            n => format!("; with {} more such pools {}", count(n as u64 - 1), bytes(Bytes(all))),
        };
        (all.saturating_mul(LEAST_ABANDONED) >= peak).then(|| Finding {
            kind: Kind::Abandoned,
            what: format!(
                "{}: PyTorch's pool {} keeps {} that nobody can use: {}{others}",
                most.named.device,
                most.pool,
                bytes(most.bytes),
                most.why
            ),
            site: most.named.site.clone(),
            sure: "certain: the pool's calls and the graphs' ends are in the trace".into(),
            fix: Fix::words(
                format!("mend the capture, or run without a graph: gives back {}", bytes(Bytes(all))),
                "",
            ),
            next: self.command("leaks"),
        })
    }

    /// Fragmentation.
    fn wasted(&self) -> Option<Finding> {
        let devices = cache::torches(self.story).filter_map(|(ordinal, torch)| {
            let (site, _) = cache::misfit_sites(torch).first().copied()?;
            Some((ordinal, torch, site))
        });
        let (ordinal, torch, site) = devices
            .max_by_key(|(_, torch, _)| torch.reserved.peak.0.saturating_sub(torch.allocated.peak.0))?;
        let trace = self.requests();
        let stream = trace.as_ref().and_then(|trace| stream_of(trace, ordinal));
        let (fix, sure) = match stream.and_then(|stream| setting_that_saves(stream, torch.reserved.peak)) {
            Some((fix, sure)) => (Some(fix), sure),
            None => (None, "certain: PyTorch's own totals".to_owned()),
        };
        Some(Finding {
            kind: Kind::Wasted,
            what: format!(
                "{}: PyTorch reserved up to {} for at most {} in use",
                device(ordinal),
                bytes(torch.reserved.peak),
                bytes(torch.allocated.peak)
            ),
            site: self.site(site),
            sure,
            fix,
            next: self.command("tune"),
        })
    }

    /// `empty_cache` by habit.
    fn churned(&self) -> Option<Finding> {
        let devices = cache::torches(self.story).filter_map(|(ordinal, torch)| {
            let (site, trims) = cache::habits(&torch.cache).first().copied()?;
            Some((ordinal, torch, site, trims))
        });
        let (ordinal, torch, site, trims) = devices.max_by_key(|(.., trims)| trims.given.bytes)?;
        let again = torch.cache.bought_again;
        Some(Finding {
            kind: Kind::Churned,
            what: format!(
                "{}: memory was given back {} times, and PyTorch bought {} of it again",
                device(ordinal),
                count(trims.times),
                bytes(again.bytes)
            ),
            site: self.site(site),
            sure: "certain: each call is in the trace".into(),
            fix: Fix::words(
                "remove the call: it lowers no peak",
                format!(
                    "saves {} in the driver, as measured",
                    time(gputrace_schemas::event::Nanos(trims.given.time.0.saturating_add(again.time.0)))
                ),
            ),
            next: self.command("report --all"),
        })
    }

    fn uneven(&self) -> Option<Finding> {
        let (loaded, other) = balance::uneven(self.story)?;
        let (site, more, _) = loaded.beyond(&other).into_iter().next()?;
        Some(Finding {
            kind: Kind::Uneven,
            what: format!(
                "{} held up to {}, {} up to {}",
                device(loaded.ordinal),
                bytes(loaded.total),
                device(other.ordinal),
                bytes(other.total)
            ),
            site: self.site(site),
            sure: format!("certain: this line held {} there and less here", bytes(more)),
            fix: Fix::words(
                "spread what this line makes: one process for each GPU (DistributedDataParallel), or the loss in `forward`",
                "",
            ),
            next: self.command("report --all"),
        })
    }

    /// How the process ended, where that was no end of its own.
    fn killed(&self) -> Option<Finding> {
        let ledger = &self.story.ledger;
        let end =
            self.story.end().filter(|end| !matches!(end, End::Exit | End::Status(0) | End::Detached))?;
        let inside = ledger.open_calls.first();
        let inside_of =
            inside.map_or_else(String::new, |call| format!(", inside {}", ledger.sites.name(call.name)));
        let ranks = self.story.process.rank.is_some() || ledger.communicators().next().is_some();
        let next = match ranks {
            true => format!("gputrace ranks {}", quote(&folder(&self.story.path))),
            false => self.command("report --all"),
        };
        let last = time(self.story.since_start(ledger.last));
        Some(Finding {
            kind: if matches!(end, End::Status(_)) { Kind::Left } else { Kind::Killed },
            what: format!("the process {}{inside_of}, {last} after its start", end.text()),
            site: inside.map_or_else(String::new, |call| self.site(call.site)),
            sure: match end {
                End::Signal(_) | End::Status(_) => {
                    "certain how it ended; its GPU memory shows no cause: no request failed, nothing grew"
                }
                End::Exit | End::Unseen | End::Detached => {
                    "its GPU memory shows no cause: no request failed, nothing grew"
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
        Finding {
            kind: Kind::CannotTell,
            what: format!(
                "no request failed, but what this line holds rose to the end, by {}, and next to nothing was given back: \
                 a leak, or a program that loads{peak}",
                bytes(rose.growth)
            ),
            site: rose.named.site.clone(),
            sure: String::new(),
            fix: None,
            next: self.command("leaks"),
        }
    }

    /// Nothing was found: because all is well, or because the trace cannot show it.
    fn nothing(&self) -> Finding {
        let ledger = &self.story.ledger;
        let devices = used_devices(self.story).filter(|(ordinal, _)| *ordinal != NO_DEVICE);
        let fullest = devices.max_by_key(|(ordinal, books)| (books.physical.peak(), Reverse(*ordinal)));
        let peak = fullest.map(|(ordinal, books)| {
            let total = self.story.device(ordinal).map(|device| device.total.0).filter(|total| *total > 0);
            let of = total.map_or_else(String::new, |total| format!(" of {}", bytes(Bytes(total))));
            format!("{}{of} at most on {}", bytes(books.physical.peak()), device_name(self.story, ordinal))
        });
        let has_asked = used_devices(self.story).next().is_some() || ledger.host.peak().0 > 0;
        let (kind, what, sure) = match (has_asked, self.story.doubts().is_some()) {
            (false, _) => {
                let what = match ledger.n_events {
                    0 => "the trace holds no events",
                    _ => "the process asked for no GPU memory while it was recorded",
                };
                (Kind::CannotTell, what.to_owned(), String::new())
            }
            (true, true) if self.story.is_running => {
                (Kind::Running, "no request failed so far".into(), String::new())
            }
            (true, true) => {
                let what = "nothing wrong is seen in what the trace holds, and it does not hold everything";
                (Kind::CannotTell, what.into(), String::new())
            }
            (true, false) => {
                if let Some(rose) = self.only_taken() {
                    return self.leaks_or_loads(rose, peak.as_deref());
                }
                let growth = match self.found.leaks.can_tell() {
                    true if self.is_only_started() => {
                        "what rose did so while the program got ready, and no work is seen after it"
                    }
                    true => "nothing keeps growing",
                    false => "the run is too short to tell whether something grows",
                };
                (Kind::Nothing, format!("no request failed, {growth}"), String::new())
            }
        };
        let what = match peak {
            Some(peak) => format!("{what}; {peak}"),
            None => what,
        };
        let next = match self.story.doubts().is_some() || !has_asked {
            true => self.command("doctor"),
            false => self.command("report --all"),
        };
        Finding { kind, what, site: String::new(), sure, fix: None, next }
    }
}

fn stream_of(trace: &Trace, ordinal: i16) -> Option<&OpStream> {
    trace.devices.iter().find(|stream| i64::from(stream.device) == i64::from(ordinal))
}

/// The setting that reserves least of those that people are advised to try, and how sure that is; none where it saves little, or
/// where the replay of the recorded one is not what was recorded. `gputrace tune` tries more.
fn setting_that_saves(stream: &OpStream, recorded_peak: Bytes) -> Option<(Fix, String)> {
    let laboratory = Laboratory::new(stream).ok()?;
    let check = laboratory.self_check(None);
    if doubts::doubt(stream, &check).is_some() {
        return None;
    }
    let recorded = stream.settings.options.clone().unwrap_or_default();
    let settings = tune::advised(check.torch_version, &recorded).ok()?;
    let others = settings.into_iter().filter(|options| *options != recorded);
    let questions: Vec<Question> =
        others.map(|options| Question::torch(check.torch_version, &options)).collect();
    let most = recorded_peak.0.checked_sub(recorded_peak.0.div_ceil(WORTHWHILE).max(1))?;
    let (chosen, best) = laboratory.least_reserving(&questions, most)?;
    let options = &questions[chosen].options;
    let (before, after) = (bytes(recorded_peak), bytes(Bytes(best.peak_reserved_range.1)));
    let fix = Fix {
        what: Value::Command(format!("export PYTORCH_CUDA_ALLOC_CONF={options}")),
        worth: format!("reserves {after} instead of {before}"),
    };
    let requests = count(stream.n_requests() as u64);
    Some((fix, format!("{}: the run's {requests} requests were replayed with it", in_words(best.confidence))))
}

fn in_words(confidence: Confidence) -> &'static str {
    match confidence {
        Confidence::Exact => "exact",
        Confidence::Interval => "likely (it depends on addresses that a trace does not hold)",
        Confidence::Bound => "at best",
        Confidence::Guess => "a guess",
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
                    "{held}, and others held {} of the device's {}",
                    bytes(Bytes(elsewhere)),
                    bytes(total)
                ),
                false => format!("{held}, of a device of {}", bytes(total)),
            }
        }
        (Wall::Device | Wall::Unknown, _) => held,
    }
}

fn device(ordinal: i16) -> String {
    if ordinal == NO_DEVICE { "a device".into() } else { format!("cuda:{ordinal}") }
}

/// A probability, rounded down: what is not certain is never shown as 100 %.
fn above(confidence: f64) -> String {
    if confidence >= 0.999 {
        "above 99.9 %".into()
    } else {
        format!("{:.1} %", (confidence * 1000.0).floor() / 10.0)
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
                "Verdict: out of memory",
                "what: PyTorch could not get 30.00 MiB on cuda:0 at 4.0 µs: 8.00 MiB in use, 12.00 MiB more reserved, and \
                 others held 50.00 MiB of the device's 80.00 MiB",
                "call_site: forward (/job/a.py:12)",
                "confidence: certain: replayed with the settings that people are advised to try",
                "fix: less memory, or a larger card: no allocator setting makes it fit",
                "next: gputrace oom job/train.gtr",
            ]
        );
    }

    #[test]
    fn who_else_than_pytorch_was_refused_is_named() {
        let told = told(&format!("{HELD}Create bytes=4G result=2 by=/x/libnccl.so.2,init@/job/a.py:1"));
        assert_eq!(
            told[1],
            "what: NCCL could not get 4.00 GiB on cuda:0 (cuMemCreate) at 2.0 µs; the process held 20.00 MiB"
        );
    }

    #[test]
    fn what_grows_is_told_with_its_line_and_also_where_it_was_killed() {
        let kept = |step: usize| format!("block addr=k{step} bytes=1M requested=1M by=keep@/job/a.py:9\n");
        let scene = steps(kept);
        let told_of = told(&scene);
        assert_eq!(told_of[0], "Verdict: memory grows");
        assert!(told_of[1].starts_with("what: what this line holds grew to the end, by 7"), "{}", told_of[1]);
        assert_eq!(told_of[2], "call_site: keep (/job/a.py:9)");
        assert_eq!(told_of.last().map(String::as_str), Some("next: gputrace leaks job/train.gtr"));
        let killed = told_with(&scene, Some(EventKind::Note("process.end=signal 9".into())));
        assert_eq!(killed[0], "Verdict: memory grows");
        assert!(
            killed[1].ends_with("; the process was ended by signal 9 (SIGKILL), 299.0 µs after its start")
        );
    }

    #[test]
    fn a_process_that_was_killed_while_all_was_well_is_said_to_have_been_killed() {
        let told = told_with(HELD, Some(EventKind::Note("process.end=signal 9".into())));
        assert_eq!(told[0], "Verdict: the process was killed");
        assert_eq!(told.last().map(String::as_str), Some("next: gputrace ranks job"));
        let told = told_with(HELD, Some(EventKind::Note("process.end=_exit 1".into())));
        assert_eq!(told[0], "Verdict: the process ended itself");
        let told = told_with(HELD, Some(EventKind::Note("process.end=exit".into())));
        assert_eq!(told[0], "Verdict: nothing is wrong");
    }

    #[test]
    fn a_healthy_run_is_said_to_be_well_and_a_short_one_not_to_show_growth() {
        let told_of = told(&(HELD.to_owned() + &steps(|_| String::new())));
        assert_eq!(told_of[0], "Verdict: nothing is wrong");
        assert!(
            told_of[1].starts_with("what: no request failed, nothing keeps growing; 20.00 MiB"),
            "{told_of:?}"
        );
        let told_of = told(HELD);
        assert!(told_of[1].contains("too short to tell whether something grows"), "{told_of:?}");
    }

    #[test]
    fn a_server_that_has_only_loaded_is_not_said_to_grow() {
        let shard = |n| {
            let by = |line| format!("bytes=4M requested=4M by=get@/job/a.py:{line},load_shards@/job/a.py:2");
            format!("block addr=s{n} {}\nblock addr=w{n} {}\nfree addr=s{n} bytes=4M\n", by(3), by(4))
        };
        let told_of = told(&(HELD.to_owned() + &(0..100).map(shard).collect::<String>()));
        assert_eq!(told_of[0], "Verdict: nothing is wrong");
        assert!(told_of[1].contains("rose did so while the program got ready"), "{told_of:?}");
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
        assert_eq!(told[0], "Verdict: a pool was left behind");
        let what = "what: cuda:0: PyTorch's pool (1, 0) keeps 20.00 MiB that nobody can use: the capture into it failed";
        assert_eq!(told[1..3], [what, "call_site: warm_up (/job/serve.py:40)"]);
        assert_eq!(told.last().map(String::as_str), Some("next: gputrace leaks job/train.gtr"));
    }

    #[test]
    fn probabilities_are_rounded_down() {
        assert_eq!([0.99, 0.9989, 0.99995].map(above), ["99.0 %", "99.8 %", "above 99.9 %"]);
    }
}
