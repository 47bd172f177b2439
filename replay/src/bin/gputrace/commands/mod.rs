//! The command line. A verb is one file here and one line in [`VERBS`].

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{ArgMatches, Args, Command, FromArgMatches};
use gputrace_replay::reduce::{Summary, is_summary};
use gputrace_schemas::printable::{Screen, is_obeyed, printable};

use crate::objects;
use crate::show::{self, complain};

mod alarm;
mod attach;
mod budget;
mod diff;
mod doctor;
mod export;
mod html;
mod import;
mod leaks;
mod manual;
mod map;
mod metrics;
mod oom;
mod parts;
mod predict;
mod ranks;
mod record;
mod recorder;
mod recover;
mod reduce;
mod replay;
mod report;
mod serve;
mod stats;
mod summary;
mod symbolise;
mod top;
mod tree;
mod tune;
mod upload;
mod witness;

/// Something that `gputrace` does.
pub(crate) struct Verb {
    /// The word after `gputrace`.
    name: &'static str,
    /// Adds the verb's arguments and help.
    define: fn(Command) -> Command,
    /// Does it. What is said goes to the screen, so that a terminal obeys no name of a trace, and that a closed pipe is an
    /// error, not a panic.
    run: fn(&ArgMatches, &mut Screen) -> anyhow::Result<ExitCode>,
}

impl Verb {
    /// The verb whose arguments are `A`.
    const fn new<A: Args>(
        name: &'static str,
        run: fn(&ArgMatches, &mut Screen) -> anyhow::Result<ExitCode>,
    ) -> Verb {
        Verb { name, define: A::augment_args, run }
    }
}

/// Every verb, in the order of the help.
const VERBS: &[Verb] = &[
    record::VERB,
    attach::VERB,
    attach::DETACH,
    attach::PS,
    report::VERB,
    html::VERB,
    serve::VERB,
    summary::VERB,
    top::VERB,
    metrics::VERB,
    stats::VERB,
    tree::VERB,
    leaks::VERB,
    oom::VERB,
    diff::VERB,
    replay::VERB,
    tune::VERB,
    budget::VERB,
    predict::VERB,
    ranks::VERB,
    reduce::VERB,
    map::VERB,
    upload::VERB,
    export::VERB,
    doctor::VERB,
    import::VERB,
    recover::VERB,
    symbolise::VERB,
    recorder::VERB,
    witness::VERB,
    alarm::VERB,
    manual::VERB,
];

/// Verbs that are spelt in another way elsewhere.
const SPELLINGS: [(&str, &str); 1] = [("symbolise", "symbolize")];

/// In the help of every verb but `record`; docs/EXIT-CODES.md has the whole.
const EXIT_STATUS: &str = "\
Exit status: 0 yes; 1 no, where a gate was asked for (--error-on-leak, --fail-on-increase, --error-on-inconsistent, --error-on-oom; doctor); \
2 it cannot be known: unreadable, damaged, nothing to judge, wrong usage.";

/// The arguments of a verb, which clap has already checked.
fn parsed<A: FromArgMatches>(matches: &ArgMatches) -> anyhow::Result<A> {
    A::from_arg_matches(matches).map_err(Into::into)
}

/// The whole command line.
fn command() -> Command {
    let verbs = VERBS.iter().map(|verb| {
        let command = (verb.define)(Command::new(verb.name));
        let command = match SPELLINGS.iter().find(|(name, _)| *name == verb.name) {
            Some((_, other)) => command.visible_alias(*other),
            None => command,
        };
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        // `record` has the program's own.
        if verb.name == record::VERB.name {
            command
        } else {
            command.after_help(format!("{help}\n\n{EXIT_STATUS}"))
        }
    });
    front().subcommands(verbs)
}

/// The same without verbs.
fn front() -> Command {
    Command::new("gputrace")
        .about("Says where GPU memory went, why it ran out, and what would have made it fit")
        .version(env!("CARGO_PKG_VERSION"))
        .subcommand_required(true)
        .arg_required_else_help(true)
}

/// Parses the command line and does what it says. Usage errors end the process with status 2.
///
/// # Errors
/// What the verb could not do, in one line and its causes.
pub(crate) fn run(out: &mut Screen) -> anyhow::Result<ExitCode> {
    let matches = match command().try_get_matches() {
        Ok(matches) => matches,
        Err(error) => wrong(error).exit(),
    };
    let Some((name, arguments)) = matches.subcommand() else { return Ok(ExitCode::from(2)) };
    match VERBS.iter().find(|verb| verb.name == name) {
        Some(verb) => {
            if !WRITERS.contains(&name) {
                wait_for_recorders();
            }
            if !TAKE_SUMMARIES.contains(&name) {
                refuse_summaries(name)?;
            }
            objects::are_read();
            (verb.run)(arguments, out)
        }
        None => Ok(ExitCode::from(2)),
    }
}

/// Verbs that read no trace, or one that is being written.
const WRITERS: [&str; 12] = [
    "alarm", "attach", "detach", "ps", "manual", "metrics", "record", "recorder", "recover", "top", "upload",
    "witness",
];

/// Verbs that read what `reduce` writes in place of traces.
const TAKE_SUMMARIES: [&str; 7] = ["budget", "diff", "leaks", "ranks", "report", "stats", "summary"];

/// What needs every event says so of a summary, and where its trace is.
fn refuse_summaries(verb: &str) -> anyhow::Result<()> {
    match named()
        .filter(|path| is_summary(path) && (path.is_file() || objects::is_url(path)))
        .find_map(|path| Summary::open(&path).ok())
    {
        Some(summary) => Err(summary.lacks(verb).into()),
        None => Ok(()),
    }
}

/// What the command line may name: each of its words, without the values that `predict` has before its traces.
fn named() -> impl Iterator<Item = PathBuf> {
    std::env::args_os().skip(2).map(|argument| match predict::after_values(&argument) {
        Some((_, path)) => path,
        None => PathBuf::from(argument),
    })
}

/// A program that has just ended does not wait for its trace where other threads of it run. So we do, for every trace that
/// is named, and those in folders that are.
fn wait_for_recorders() {
    let traces = named().filter(|path| path.is_file() || path.is_dir());
    let traces = traces.flat_map(|path| show::paths(std::slice::from_ref(&path)).unwrap_or_default());
    for trace in traces {
        if gputrace_recorder::wait_for_recorder(&trace) {
            complain!("{} is still being written: what comes later is not in this answer", trace.display());
        }
    }
}

/// The same error with arguments that a terminal obeys nothing of: they may be names of files (`gputrace report *`), and the
/// message repeats them.
fn wrong(error: clap::Error) -> clap::Error {
    let arguments: Vec<_> = std::env::args_os().map(|it| it.to_string_lossy().into_owned()).collect();
    if !arguments.iter().any(|it| it.contains(is_obeyed)) {
        return error;
    }
    let shown = arguments.iter().map(|it| printable(it).into_owned());
    let instead = || command().error(error.kind(), "the arguments are wrong, and cannot be shown");
    command().try_get_matches_from(shown).err().unwrap_or_else(instead)
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_verb_has_help_and_consistent_arguments() {
        let command = super::command();
        command.clone().debug_assert();
        for verb in command.get_subcommands() {
            let name = verb.get_name();
            assert!(verb.get_about().is_some(), "{name} has no help");
            let help = verb.get_after_help().map(ToString::to_string).unwrap_or_default();
            let has_example = help.contains("Example") && help.contains(&format!("  gputrace {name}"));
            assert!(has_example || verb.is_hide_set(), "the help of {name} has no example");
        }
    }
}
