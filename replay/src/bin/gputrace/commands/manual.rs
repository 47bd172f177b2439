//! `gputrace manual`: manual pages and completions for shells, from the table of verbs. For who packs gputrace up.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{ArgMatches, Args, Command};
use clap_complete::Shell;
use gputrace_schemas::printable::Screen;

use super::Verb;

pub(super) const VERB: Verb = Verb::new::<ManualArgs>("manual", run);

/// Writes manual pages and completions into a folder
#[derive(Args)]
#[command(hide = true)]
pub(super) struct ManualArgs {
    /// Gets `man1` and `completions`
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

fn run(matches: &ArgMatches, _out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: ManualArgs = super::parsed(matches)?;
    let mut command = super::command();
    command.build();
    pages(&command, &args.folder.join("man1"))?;
    let folder = args.folder.join("completions");
    make(&folder)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        // With the verbs as clap adds them, not built twice.
        let written = clap_complete::generate_to(shell, &mut super::command(), "gputrace", &folder);
        written.with_context(|| format!("cannot write to {}", folder.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// One for the program, one for each verb that people call.
fn pages(command: &Command, folder: &Path) -> anyhow::Result<()> {
    make(folder)?;
    let verbs = command.get_subcommands().filter(|verb| !verb.is_hide_set() && verb.get_name() != "help");
    for (name, command) in std::iter::once(("gputrace".to_owned(), command))
        .chain(verbs.map(|verb| (format!("gputrace-{}", verb.get_name()), verb)))
    {
        let file = folder.join(format!("{name}.1"));
        let mut page = Vec::new();
        let command = command.clone().display_name(&name).name(name);
        clap_mangen::Man::new(command).render(&mut page)?;
        std::fs::write(&file, page).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

fn make(folder: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))
}
