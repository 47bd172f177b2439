//! `gputrace manual`: manual pages and completions for shells, from the table of verbs. For who packs gputrace up.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{ArgMatches, Args};
use clap_complete::Shell;
use gputrace_schemas::printable::Screen;

use super::Verb;

pub(super) const VERB: Verb = Verb::new::<ManualArgs>("manual", run);

/// Write manual pages and completions into a folder
#[derive(Args)]
#[command(hide = true)]
pub(super) struct ManualArgs {
    /// Folder for `man1` and `completions`
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

fn run(matches: &ArgMatches, _out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: ManualArgs = super::parsed(matches)?;
    let pages = args.folder.join("man1");
    make(&pages)?;
    let written = clap_mangen::generate_to(super::command(), &pages);
    written.with_context(|| format!("cannot write to {}", pages.display()))?;
    let folder = args.folder.join("completions");
    make(&folder)?;
    // The hidden verbs would be offered, too.
    let all = super::command();
    let verbs = all.get_subcommands().filter(|verb| !verb.is_hide_set()).cloned();
    let command = super::front().subcommands(verbs);
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let written = clap_complete::generate_to(shell, &mut command.clone(), "gputrace", &folder);
        written.with_context(|| format!("cannot write to {}", folder.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn make(folder: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))
}
