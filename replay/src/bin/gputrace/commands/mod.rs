//! The command line. A verb is one file here and one line in [`VERBS`].

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgMatches, Args, Command, FromArgMatches, Id};
use gputrace_recorder::WaitsUntil;
use gputrace_replay::reduce::{Summary, is_summary};
use gputrace_schemas::printable::{Screen, is_obeyed, printable};
use gputrace_sim::skip;

use crate::objects;
use crate::show::{self, Named, complain};

mod alarm;
mod attach;
mod budget;
mod diff;
mod doctor;
mod export;
mod html;
mod layers;
mod leaks;
mod library;
mod manual;
mod map;
mod mcp;
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
mod reproduce;
mod serve;
mod stacks;
mod stats;
mod summary;
mod symbolise;
mod top;
mod tree;
mod tune;
mod upload;
mod whatif;
mod who;
mod witness;

/// Something that `gputrace` does.
pub(crate) struct Verb {
    /// The word after `gputrace`.
    name: &'static str,
    /// How it is spelt elsewhere.
    also: Option<&'static str>,
    /// It reads what `reduce` writes in place of traces.
    reads_summaries: bool,
    /// It replays traces, or may.
    replays: bool,
    /// Its help has the whole of what its exit status means.
    has_own_status: bool,
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
        let (also, reads_summaries, replays, has_own_status) = (None, false, false, false);
        Verb { name, also, reads_summaries, replays, has_own_status, define: A::augment_args, run }
    }

    /// The same with a second spelling.
    const fn also_spelt(self, other: &'static str) -> Verb {
        Verb { also: Some(other), ..self }
    }

    /// The same, and it reads summaries where it is given them.
    const fn of_summaries(self) -> Verb {
        Verb { reads_summaries: true, ..self }
    }

    /// The same, and it replays traces.
    const fn of_replays(self) -> Verb {
        Verb { replays: true, ..self }
    }

    /// The same with an exit status that is not that of the other verbs.
    const fn with_status_of_its_own(self) -> Verb {
        Verb { has_own_status: true, ..self }
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
    reproduce::VERB,
    tune::VERB,
    budget::VERB,
    predict::VERB,
    whatif::VERB,
    layers::VERB,
    who::VERB,
    ranks::VERB,
    stacks::VERB,
    reduce::VERB,
    map::VERB,
    upload::VERB,
    export::VERB,
    mcp::VERB,
    doctor::VERB,
    library::VERB,
    recover::VERB,
    symbolise::VERB,
    recorder::VERB,
    witness::VERB,
    alarm::VERB,
    manual::VERB,
];

/// Verbs that there were, and what has taken their place.
const GONE: [(&str, &str); 1] =
    [("import", "`gputrace replay TRACE` shows how well a snapshot or a trace is understood")];

/// In the help of every verb but `record`; docs/EXIT-CODES.md has the whole.
const EXIT_STATUS: &str = "Exit status: 0 success, 1 failed check, 2 error or no answer.";

// How much of a replay is simulated: every verb that replays has these.
#[derive(Args)]
struct EffortArgs {
    /// Replay repeated steps too; the answer is the same
    #[arg(long)]
    no_skip: bool,

    /// Report on stderr how much repeated and was skipped
    #[arg(long)]
    verbose: bool,
}

impl EffortArgs {
    /// After the verb.
    fn report(&self) {
        let skip::Share { n_ops, n_skipped } = skip::share();
        if self.verbose && n_ops > 0 {
            let percent = 100.0 * n_skipped as f64 / n_ops as f64;
            complain!(
                "{n_ops} requests and frees replayed, {percent:.1}% of them skipped because they repeat"
            );
        } else if self.verbose {
            complain!("nothing was replayed");
        }
    }
}

/// The arguments of a verb, which clap has already checked.
fn parsed<A: FromArgMatches>(matches: &ArgMatches) -> anyhow::Result<A> {
    A::from_arg_matches(matches).map_err(Into::into)
}

/// The whole command line.
fn command() -> Command {
    command_of(VERBS.iter())
}

/// As much of it as is needed to parse these words: a recorded program waits for `record`, which needs none of forty other verbs.
fn command_for(words: &[OsString]) -> Command {
    let is_asked = |verb: &&Verb| words.get(1).is_some_and(|word| word == verb.name);
    match VERBS.iter().find(is_asked) {
        Some(verb) => command_of(std::iter::once(verb)),
        None => command(),
    }
}

fn command_of(verbs: impl Iterator<Item = &'static Verb>) -> Command {
    let verbs = verbs.map(|verb| {
        let command = (verb.define)(Command::new(verb.name));
        let command = if verb.replays { EffortArgs::augment_args(command) } else { command };
        let command = command.visible_aliases(verb.also);
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        match verb.has_own_status {
            true => command,
            false => command.after_help(format!("{help}\n\n{EXIT_STATUS}")),
        }
    });
    front().subcommands(verbs)
}

/// The same without verbs.
fn front() -> Command {
    Command::new("gputrace")
        .about("Find out where GPU memory went, why it ran out, and what would have made it fit")
        .version(env!("CARGO_PKG_VERSION"))
        .subcommand_required(true)
        .arg_required_else_help(true)
}

/// Parses the command line and does what it says. Usage errors end the process with status 2, those of `record` with 125.
///
/// # Errors
/// What the verb could not do, in one line and its causes.
pub(crate) fn run(out: &mut Screen) -> anyhow::Result<ExitCode> {
    run_words(&std::env::args_os().collect::<Vec<_>>(), out)
}

/// The same for these words.
fn run_words(words: &[OsString], out: &mut Screen) -> anyhow::Result<ExitCode> {
    if let Some(status) = recorder::started_by_library(words) {
        return Ok(status);
    }
    let matches = match command_for(words).try_get_matches_from(words) {
        Ok(matches) => matches,
        Err(error) => match gone(&error) {
            Some((verb, instead)) => bail!("`gputrace {verb}` no longer exists: {instead}"),
            None => return Ok(misused(&helpful(wrong(error, words)), words)),
        },
    };
    let Some((name, arguments)) = matches.subcommand() else { return Ok(ExitCode::from(2)) };
    match VERBS.iter().find(|verb| verb.name == name) {
        Some(verb) => {
            let named = named(arguments);
            wait_for_recorders(&named);
            if !verb.reads_summaries {
                refuse_summaries(name, &named)?;
            }
            objects::are_read();
            if !verb.replays {
                return (verb.run)(arguments, out);
            }
            let effort: EffortArgs = parsed(arguments)?;
            if effort.no_skip {
                skip::never();
            }
            let status = (verb.run)(arguments, out);
            effort.report();
            status
        }
        None => Ok(ExitCode::from(2)),
    }
}

/// Shows help, or what is wrong with the words. `record` has statuses that its program is not likely to have.
fn misused(error: &clap::Error, words: &[OsString]) -> ExitCode {
    let is_of_record = words.get(1).is_some_and(|word| word == record::VERB.name);
    match is_of_record && error.use_stderr() {
        true => {
            // Nobody may be listening any more.
            let _ = error.print();
            ExitCode::from(record::CANNOT_TRACE)
        }
        false => error.exit(),
    }
}

/// The verb that was asked for, where there was one of that name.
fn gone(error: &clap::Error) -> Option<(&'static str, &'static str)> {
    match error.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(asked)) => GONE.into_iter().find(|(verb, _)| verb == asked),
        _ => None,
    }
}

/// The traces that the arguments name, and folders of them.
fn named(arguments: &ArgMatches) -> Vec<PathBuf> {
    let mut named: Vec<PathBuf> = vec![];
    for id in arguments.ids().map(Id::as_str) {
        // Arguments of other types name no trace that is read.
        if let Ok(Some(traces)) = arguments.try_get_many::<Named>(id) {
            named.extend(traces.map(|trace| trace.to_path_buf()));
        }
        if let Ok(Some(runs)) = arguments.try_get_many::<predict::Run>(id) {
            named.extend(runs.filter_map(|(_, trace)| trace.clone()));
        }
    }
    named
}

/// What needs every event says so of a summary, and where its trace is.
fn refuse_summaries(verb: &str, named: &[PathBuf]) -> anyhow::Result<()> {
    let is_there = |path: &&PathBuf| is_summary(path) && (path.is_file() || objects::is_url(path));
    match named.iter().filter(is_there).find_map(|path| Summary::open(path).ok()) {
        Some(summary) => Err(summary.lacks(verb).into()),
        None => Ok(()),
    }
}

/// A program that has just ended does not wait for its trace where other threads of it run. So we do, for every trace that
/// is named, and those in folders that are.
fn wait_for_recorders(named: &[PathBuf]) {
    let traces = named.iter().filter(|path| path.is_file() || path.is_dir());
    let traces = traces.flat_map(|path| show::paths(&[path]).unwrap_or_default());
    let until = WaitsUntil::from_now();
    for trace in traces {
        if gputrace_recorder::wait_for_recorder(&trace, until) {
            complain!(
                "{} is still being written: this answer does not include later events",
                trace.display()
            );
        }
    }
}

/// The same error with arguments that a terminal obeys nothing of: they may be names of files (`gputrace report *`), and the
/// message repeats them.
fn wrong(error: clap::Error, words: &[OsString]) -> clap::Error {
    let arguments: Vec<_> = words.iter().map(|it| it.to_string_lossy().into_owned()).collect();
    if !arguments.iter().any(|it| it.contains(is_obeyed)) {
        return error;
    }
    let shown = arguments.iter().map(|it| printable(it).into_owned());
    let instead = || command().error(error.kind(), "the arguments are wrong, and cannot be shown");
    command().try_get_matches_from(shown).err().unwrap_or_else(instead)
}

/// The same error with the nearest verb first, and without the advice to pass an option that nobody knows as a value.
fn helpful(mut error: clap::Error) -> clap::Error {
    if error.kind() == ErrorKind::UnknownArgument {
        error.remove(ContextKind::Suggested);
    }
    if let Some(ContextValue::Strings(mut verbs)) = error.remove(ContextKind::SuggestedSubcommand) {
        // clap has the nearest last.
        verbs.reverse();
        error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(verbs));
    }
    error
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_nearest_verb_comes_first_and_an_unknown_option_is_not_a_value() {
        let said = |words: &[&str]| {
            let error = super::command().try_get_matches_from(words).expect_err("wrong words");
            super::helpful(error).to_string()
        };
        let misspelt = said(&["gputrace", "reprot"]);
        assert!(misspelt.contains("exist: 'report', 'export'"), "{misspelt}");
        let unknown = said(&["gputrace", "report", "--frobnicate"]);
        assert!(unknown.contains("unexpected argument '--frobnicate' found"), "{unknown}");
        assert!(!unknown.contains("as a value"), "{unknown}");
    }

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
