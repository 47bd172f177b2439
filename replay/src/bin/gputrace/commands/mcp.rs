//! `gputrace mcp`: answers agents by the Model Context Protocol, on standard input and output.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{ArgMatches, Args, ValueHint};
use gputrace_schemas::printable::Screen;

use super::Verb;

#[cfg(feature = "mcp")]
mod allowed;
#[cfg(feature = "mcp")]
mod child;
#[cfg(feature = "mcp")]
mod server;
#[cfg(feature = "mcp")]
mod shorten;
#[cfg(feature = "mcp")]
mod tools;

pub(super) const VERB: Verb = Verb::new::<McpArgs>("mcp", run);

/// Answer agents over the Model Context Protocol (MCP), on stdin and stdout
///
/// The server reads only traces in the given folders. It writes no file and uses no network.
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace mcp
  gputrace mcp --allow /data/traces --allow ~/job

Add the server to the settings of your agent, with type stdio (docs/MCP.md). skills/gputrace/SKILL.md is a skill for the agent.")]
pub(super) struct McpArgs {
    /// Folder whose traces may be read, with its subfolders (repeatable) [default: the current folder]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    allow: Vec<PathBuf>,

    /// Stop each call after this long
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = seconds)]
    time_limit: Duration,

    // What the server starts to answer one call: a verb and its arguments, with what it may read and use narrowed first.
    #[arg(last = true, hide = true)]
    ask: Vec<OsString>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let number = text.parse().ok().filter(|number| (1..=86_400).contains(number));
    number
        .map(Duration::from_secs)
        .ok_or_else(|| format!("`{text}` is not a number of seconds from 1 to 86400"))
}

#[cfg(feature = "mcp")]
fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let McpArgs { allow, time_limit, ask } = super::parsed(matches)?;
    let allowed = allowed::Allowed::new(&allow)?;
    match &ask[..] {
        [] => server::serve(child::Asking::new(allowed, time_limit), out),
        words => child::answer(allowed, words, out),
    }
}

#[cfg(not(feature = "mcp"))]
fn run(matches: &ArgMatches, _: &mut Screen) -> anyhow::Result<ExitCode> {
    let McpArgs { .. } = super::parsed(matches)?;
    anyhow::bail!(
        "this build cannot serve the Model Context Protocol; the wheel and the tarball of a release can, and so can a build \
         from source with `make build FEATURES=mcp`"
    )
}
