//! `gputrace recorder`: what libgputrace.so starts for each traced process.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{ArgMatches, Args};
use gputrace_recorder::{FollowUp, Oom};
use gputrace_replay::answers::postmortem::{Postmortem, remedies_sections};
use gputrace_replay::answers::whatif::Machine;
use gputrace_replay::import;
use gputrace_replay::report;
use gputrace_replay::report::model::{Part, Report};
use gputrace_replay::report::render::text;
use gputrace_replay::report::words::bytes;
use gputrace_replay::trace::source::Source;
use gputrace_schemas::printable::{Screen, printable};

use super::Verb;
use crate::show::complain;
use crate::show::{say_shown, stderr_style};

/// The program is the recorder too, and then a guest whose words must not be taken for the host's.
#[global_allocator]
static MEMORY: gputrace_recorder::Memory = gputrace_recorder::Memory;

pub(super) const VERB: Verb = Verb::new::<RecorderArgs>("recorder", run);

/// Drains a ring into a trace; started by libgputrace.so
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

fn run(matches: &ArgMatches, _out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: RecorderArgs = super::parsed(matches)?;
    let given = [("--ring", Some(args.ring)), ("--ring-fd", args.ring_fd), ("--process-fd", args.process_fd)];
    let given = given.into_iter().filter_map(|(name, value)| Some([name.into(), value?]));
    Ok(gputrace_recorder::daemon_main(given.flatten(), answer))
}

/// Says on the program's standard error why it ran out of memory, whatever the program makes of that.
fn answer(oom: &Oom) -> Option<FollowUp> {
    if !oom.full {
        complain!("{}", one_line(oom));
        return None;
    }
    let source = match Source::open_prefix(&oom.trace, oom.length) {
        Ok(source) => source,
        Err(error) => {
            complain!("cannot say why memory ran out: {:#}", anyhow::Error::from(error));
            return None;
        }
    };
    let postmortem = Postmortem::of(&source);
    say_sections(oom, report::part(&postmortem.story, postmortem.sections()));
    // Further failures of a process mostly have the same remedy, and replaying costs seconds.
    (oom.nth == 1 && postmortem.torch_devices().next().is_some()).then(|| follow_up(oom.clone(), postmortem))
}

/// Replays the same requests with other settings: that takes longer than the first answer may.
fn follow_up(oom: Oom, postmortem: Postmortem) -> FollowUp {
    Box::new(move || {
        // The program goes on meanwhile, and needs the processor more. On Linux this is about the calling thread.
        let _ = rustix::process::nice(19);
        let load = || import::load_prefix(&oom.trace, oom.length);
        let sections = remedies_sections(&postmortem, Machine::default(), load);
        say_sections(&oom, Part { sections, ..Part::default() });
    })
}

fn one_line(oom: &Oom) -> String {
    format!(
        "out of memory for the {} time: {} on cuda:{}; `gputrace oom {}` says more",
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
    let _ = text::render(&report, stderr_style(), &mut words);
    let words = String::from_utf8_lossy(&words);
    let marked: String = words.lines().map(|line| format!("gputrace| {line}\n")).collect();
    let trace = oom.trace.display().to_string();
    let end = format!("gputrace| more: gputrace oom {}\n", printable(&trace));
    say_shown((marked + &end).as_bytes());
}
