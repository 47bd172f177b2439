//! `gputrace recorder`: what libgputrace.so starts for each traced process.

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Mutex;

use clap::{ArgMatches, Args};
use gputrace_recorder::messages::{say, say_report};
use gputrace_recorder::{FollowUp, Oom};
use gputrace_replay::answers::postmortem::{Postmortem, remedies_sections};
use gputrace_replay::answers::whatif::Machine;
use gputrace_replay::report;
use gputrace_replay::report::model::{Part, Report};
use gputrace_replay::report::render::text;
use gputrace_replay::story::Story;
use gputrace_replay::trace::source::Source;
use gputrace_replay::trace::words::bytes;
use gputrace_schemas::event::Bytes;
use gputrace_schemas::printable::{Screen, printable};

use super::Verb;
use crate::show::stderr_style;

/// The program is the recorder too, and then a guest whose words must not be taken for the host's.
#[global_allocator]
static MEMORY: gputrace_recorder::Memory = gputrace_recorder::Memory;

pub(super) const VERB: Verb = Verb::new::<RecorderArgs>("recorder", run);

/// Drain a ring into a trace; started by libgputrace.so
#[derive(Args)]
#[command(hide = true)]
pub(super) struct RecorderArgs {
    /// The ring
    #[arg(long, value_name = "PATH")]
    ring: OsString,
    /// Descriptor of the ring, if it was left open
    #[arg(long, value_name = "N")]
    ring_fd: Option<OsString>,
    /// Descriptor of the process, if it was left open
    #[arg(long, value_name = "N")]
    process_fd: Option<OsString>,
}

/// The same for the words of the library, which every recorded process starts: a command line that is built to be parsed took a short
/// program's recorder a twentieth of its time. `None` for words of people's, who are told what is wrong with them.
pub(super) fn started_by_library(words: &[OsString]) -> Option<ExitCode> {
    let [_, verb, ring, path, rest @ ..] = words else { return None };
    let is_known =
        |pair: &[OsString]| matches!(pair, [name, _] if name == "--ring-fd" || name == "--process-fd");
    let is_its_own = verb == VERB.name && ring == "--ring" && rest.chunks(2).all(is_known);
    is_its_own.then(|| gputrace_recorder::daemon_main([ring, path].into_iter().chain(rest).cloned(), answer))
}

fn run(matches: &ArgMatches, _out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: RecorderArgs = super::parsed(matches)?;
    let given = [("--ring", Some(args.ring)), ("--ring-fd", args.ring_fd), ("--process-fd", args.process_fd)];
    let given = given.into_iter().filter_map(|(name, value)| Some([name.into(), value?]));
    Ok(gputrace_recorder::daemon_main(given.flatten(), answer))
}

/// Says on the program's standard error why it ran out of memory, as far as that takes it without waiting.
fn answer(oom: &Oom) -> Option<FollowUp> {
    if !oom.full {
        say(&one_line(oom));
        return None;
    }
    let source = match Source::open_prefix(&oom.trace, oom.length) {
        Ok(source) => source,
        Err(error) => {
            say(&format!("cannot explain why memory ran out: {:#}", anyhow::Error::from(error)));
            return None;
        }
    };
    let postmortem = Postmortem::of(&source);
    if !is_news(oom, &postmortem.story) {
        say(&one_line(oom));
        return None;
    }
    say_sections(oom, report::part(&postmortem.story, postmortem.sections()));
    // Further failures of a process mostly have the same remedy, and replaying costs seconds.
    (oom.nth == 1 && postmortem.torch_devices().next().is_some())
        .then(|| follow_up(oom.clone(), postmortem, source))
}

/// Before each line that is said beside the program's own.
const MARK: &str = "gputrace| ";

/// What an answer in full is about: device, bytes asked for, what the driver and PyTorch had handed out, and the line that asked.
type Failed = (i16, Bytes, Bytes, Bytes, String);

/// Whether no such failure was answered yet: a program that tries again with nothing changed learns nothing from the same lines.
fn is_news(oom: &Oom, story: &Story) -> bool {
    static ANSWERED: Mutex<Vec<Failed>> = Mutex::new(Vec::new());
    let ledger = &story.ledger;
    let books = ledger.devices().get(&oom.device);
    let torch = books.and_then(|books| books.torch.as_ref());
    let by_torch = torch.and_then(|torch| torch.ooms.last()).map(|it| (it.time, it.site));
    let refused = ledger.refusals.iter().rev().find(|it| it.is_final && it.device == oom.device);
    let site =
        by_torch.max(refused.map(|it| (it.time, it.site))).map(|(_, site)| ledger.sites.site_name(site));
    let held = books.map_or(Bytes(0), |books| books.physical.now().bytes);
    let blocks = torch.map_or(Bytes(0), |torch| torch.allocated.now);
    let failed = (oom.device, oom.bytes, held, blocks, site.unwrap_or_default().to_string());
    let Ok(mut answered) = ANSWERED.lock() else { return true };
    let is_news = !answered.contains(&failed);
    if is_news {
        answered.push(failed);
    }
    is_news
}

/// Replays the same requests with other settings: that takes longer than the first answer may.
fn follow_up(oom: Oom, postmortem: Postmortem, source: Source) -> FollowUp {
    Box::new(move || {
        // The program goes on meanwhile, and needs the processor more. On Linux this is about the calling thread.
        let _ = rustix::process::nice(19);
        let sections = remedies_sections(&postmortem, Machine::default(), &source);
        say_sections(&oom, Part { sections, ..Part::default() });
    })
}

fn one_line(oom: &Oom) -> String {
    format!(
        "out of memory for the {} time: {} on cuda:{}; `gputrace oom {}` has details",
        ordinal(oom.nth),
        bytes(oom.bytes),
        oom.device,
        oom.trace.display()
    )
}

fn ordinal(n: u64) -> String {
    let ending = match (n % 10, n % 100) {
        (1, tens) if tens != 11 => "st",
        (2, tens) if tens != 12 => "nd",
        (3, tens) if tens != 13 => "rd",
        _ => "th",
    };
    format!("{n}{ending}")
}

fn say_sections(oom: &Oom, part: Part) {
    let report = Report { verb: "oom", parts: vec![part] };
    let mut words = vec![];
    // Writing to memory does not fail.
    let style = stderr_style();
    let width = style.width.map(|width| width.saturating_sub(MARK.len()));
    let _ = text::render(&report, text::Style { width, ..style }, &mut words);
    let words = String::from_utf8_lossy(&words);
    let marked: String = words.lines().map(|line| format!("{MARK}{line}\n")).collect();
    let trace = oom.trace.display().to_string();
    let end = format!("{MARK}more: gputrace oom {}\n", printable(&trace));
    let instead = format!(
        "could not write the out-of-memory report to standard error: `gputrace oom {trace}` shows it"
    );
    say_report((marked + &end).as_bytes(), &instead);
}
