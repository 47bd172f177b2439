//! `gputrace upload`: traces to object storage, what was sent before not again.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::bail;
use clap::{ArgMatches, Args};
use gputrace_objects::{State, Upload, encoded};
use gputrace_recorder::WaitsUntil;
use gputrace_replay::trace::words;
use gputrace_schemas::event::Bytes;
use gputrace_schemas::printable::Screen;

use super::Verb;
use crate::objects;
use crate::show::{self, complain};
use crate::working::Working;

pub(super) mod sending;

pub(super) const VERB: Verb = Verb::new::<UploadArgs>("upload", run);

/// Send traces to object storage, and continue after an interruption
///
/// The file TRACE.upload keeps the progress, so the same command again sends the rest. Objects appear only when complete.
/// `gputrace record --upload URL` sends while the program runs.
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace upload -o s3://bucket/job/ train.gtr
  gputrace upload -o gs://bucket/job/ /local/traces/
  gputrace ranks s3://bucket/job/

Credentials come from the variables that each store's own tools read (docs/OBJECT-STORAGE.md).")]
pub(super) struct UploadArgs {
    /// Traces, summaries, snapshots, or folders of them
    #[arg(required = true, value_name = "TRACE|DIR")]
    traces: Vec<PathBuf>,

    /// Destination: s3://, gs://, az:// or http(s)://; a folder if it ends in /
    #[arg(short, long, value_name = "URL", value_parser = url)]
    output: PathBuf,

    /// Overwrite existing objects
    #[arg(short = 'F', long)]
    force: bool,
}

/// A URL of a store.
pub(super) fn url(text: &str) -> Result<PathBuf, String> {
    let url = PathBuf::from(text);
    match objects::is_written(&url) {
        Ok(true) => Ok(url),
        Err(error) => Err(error.to_string()),
        Ok(false) => Err(format!("`{text}` is not the URL of a store; write s3://bucket/folder/")),
    }
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: UploadArgs = super::parsed(matches)?;
    let paths = show::paths(&args.traces)?;
    let mut all_sent = true;
    let until = WaitsUntil::from_now();
    for path in &paths {
        let _working = Working::on(path);
        match sent(path, &destination(&args.output, path, paths.len()), args.force, until) {
            Ok(line) => writeln!(out, "{line}")?,
            Err(error) => {
                all_sent = false;
                complain!("{error:#}");
            }
        }
    }
    Ok(show::exit_code(all_sent))
}

/// Where a file goes.
fn destination(output: &Path, path: &Path, n_files: usize) -> PathBuf {
    let is_object = n_files == 1 && !show::is_folder(output) && !output.to_string_lossy().ends_with('/');
    if is_object {
        return output.to_owned();
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    PathBuf::from(format!("{}/{}", output.to_string_lossy().trim_end_matches('/'), encoded(&name)))
}

/// A file on its way, and a word where what is kept of an earlier one is not used.
fn begun(path: &Path, url: &Path) -> anyhow::Result<Upload> {
    let upload = Upload::begin(path, url)?;
    if let Some(why) = upload.unusable() {
        complain!("{why}: all of {} is sent", show::shown(path));
    }
    Ok(upload)
}

fn sent(path: &Path, url: &Path, force: bool, until: WaitsUntil) -> anyhow::Result<String> {
    let (from, to) = (show::shown(path), show::shown(url));
    let is_growing = gputrace_recorder::wait_for_recorder(path, until);
    let is_begun = matches!(State::of(path), Ok(Some(_)));
    if !is_begun && !force && objects::exists(url)? {
        bail!("{to} exists; -F overwrites it");
    }
    let mut upload = begun(path, url)?;
    let bytes = std::fs::metadata(path)?.len();
    if is_growing {
        upload.advance(bytes)?;
        let sent = State::of(path).ok().flatten().map_or(0, |state| state.sent());
        bail!(
            "{from} is still being written: {} of it were sent; run the same command when it has ended",
            words::bytes(Bytes(sent))
        );
    }
    upload.finish()?;
    Ok(format!("{from} -> {to}, {}", words::bytes(Bytes(bytes))))
}
