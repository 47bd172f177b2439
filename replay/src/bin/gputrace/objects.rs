//! Traces and answers that lie in object storage or on a web server, by their URLs.
//!
//! What is read is fetched once, into a file without a name; what is written is written to such a file first. Verbs see names, as of any
//! other file.

use std::collections::HashMap;
use std::io::{self, BufWriter, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use anyhow::{Context, anyhow, bail};
use gputrace_replay::reduce::is_summary;
use gputrace_replay::trace::files;

use crate::show;

pub(crate) use gputrace_objects::is_url;

/// Makes URLs names of files, for all that is read from now on.
pub(crate) fn are_read() {
    files::bring_by(|name| is_url(name).then(|| brought(name)));
}

/// What opens the object, which is fetched the first time.
fn brought(name: &Path) -> io::Result<PathBuf> {
    type Once = Arc<OnceLock<Result<PathBuf, String>>>;
    static BROUGHT: Mutex<Option<HashMap<PathBuf, Once>>> = Mutex::new(None);
    let mut all = BROUGHT.lock().unwrap_or_else(PoisonError::into_inner);
    let once = all.get_or_insert_default().entry(name.to_owned()).or_default().clone();
    // Others are fetched meanwhile.
    drop(all);
    let fetched = once.get_or_init(|| {
        let mut file = show::unnamed()
            .map_err(|why| format!("cannot store it in {}: {why}", std::env::temp_dir().display()))?;
        gputrace_objects::fetch(name, &mut file).map_err(|error| without_name(&error.to_string(), name))?;
        more_files();
        Ok(show::kept(file))
    });
    fetched.clone().map_err(io::Error::other)
}

/// Whoever says what cannot be read has named it already.
fn without_name(message: &str, name: &Path) -> String {
    let named = format!("{}: ", name.display());
    message.strip_prefix(&named).unwrap_or(message).to_owned()
}

/// Each object that was fetched stays open: a thousand summaries are more than a process may open unless it asks.
fn more_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // Where it may not, opening one too many says so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}

/// Whether a URL is an object's by its name, and not a folder's.
pub(crate) fn is_object(url: &Path, is_trace: fn(&Path) -> bool) -> bool {
    let text = url.to_string_lossy();
    is_trace(url) || is_summary(url) || (text.starts_with("http") && text.contains('?'))
}

/// The object that was named, or the traces in the folder that was named; summaries where there are none.
pub(crate) fn named(url: &Path, is_trace: fn(&Path) -> bool) -> anyhow::Result<Vec<PathBuf>> {
    let is_called_folder = url.to_string_lossy().ends_with('/');
    if is_object(url, is_trace) && !is_called_folder {
        return Ok(vec![url.to_owned()]);
    }
    let listed = match gputrace_objects::list(url) {
        Ok(listed) => listed,
        // A web server that lists nothing may have a file of any name.
        Err(_) if !is_called_folder && url.starts_with("http:") | url.starts_with("https:") => vec![],
        Err(error) => return Err(error.into()),
    };
    let listed: Vec<PathBuf> = listed.into_iter().map(PathBuf::from).collect();
    let mut found: Vec<PathBuf> = listed.iter().filter(|it| is_trace(it)).cloned().collect();
    if found.is_empty() {
        found.extend(listed.iter().filter(|it| is_summary(it)).cloned());
    }
    match found.is_empty() {
        // An object of another name, unless nothing is there.
        true if listed.is_empty() && !is_called_folder => Ok(vec![url.to_owned()]),
        true => bail!("no traces (*.gtr), snapshots (*.pickle) or summaries in {}", url.display()),
        false => Ok(found),
    }
}

/// Whether a name that is written to is an object's. An error where this build reaches no store: before the work, not after it.
pub(crate) fn is_written(name: &Path) -> anyhow::Result<bool> {
    if is_url(name) {
        gputrace_objects::has_stores(name)?;
    }
    Ok(is_url(name))
}

/// Whether a file or an object is there.
pub(crate) fn exists(path: &Path) -> anyhow::Result<bool> {
    match is_url(path) {
        true => Ok(gputrace_objects::size(path)?.is_some()),
        false => Ok(path.symlink_metadata().is_ok()),
    }
}

/// Writes an object, which is there when it is complete, and not before.
pub(crate) fn write(
    url: &Path,
    force: bool,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> anyhow::Result<()> {
    is_free(url, force)?;
    let file = show::unnamed().context("cannot write to the folder for temporary files")?;
    let mut buffer = BufWriter::new(&file);
    let written = write(&mut buffer).and_then(|()| buffer.flush());
    written.with_context(|| format!("cannot write {}", url.display()))?;
    put(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())), url)
}

/// The same for what writes to a name.
pub(crate) fn write_by<T>(
    url: &Path,
    force: bool,
    write: impl FnOnce(&Path) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    is_free(url, force)?;
    let folder = own_folder().context("cannot write to the folder for temporary files")?;
    let path = folder.join("out.part");
    let written = write(&path).and_then(|told| {
        put(&path, url)?;
        Ok(told)
    });
    // Nothing of it is of use by itself.
    let _ = std::fs::remove_dir_all(&folder);
    written
}

/// A new folder that nobody else can write to: others may know the names of temporary files in advance.
fn own_folder() -> io::Result<PathBuf> {
    use std::os::unix::fs::DirBuilderExt;
    let mut last = io::ErrorKind::AlreadyExists.into();
    for n in 0..100 {
        let folder = std::env::temp_dir().join(format!("gputrace.{}.{n}.out", std::process::id()));
        match std::fs::DirBuilder::new().mode(0o700).create(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

fn is_free(url: &Path, force: bool) -> anyhow::Result<()> {
    if !force && exists(url)? {
        bail!("{} exists; -F overwrites it", url.display());
    }
    Ok(())
}

/// Writes a file as an object.
pub(crate) fn put(file: &Path, url: &Path) -> anyhow::Result<()> {
    let put = gputrace_objects::put(file, url);
    put.map_err(|error| anyhow!("cannot write {}: {}", url.display(), without_name(&error.to_string(), url)))
}
