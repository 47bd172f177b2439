//! A file that is sent to a store in parts, while it grows, and over restarts.
//!
//! Beside the file lies what was sent of it (`FILE.upload`): whoever goes on sends the rest. The object is there when all of the file is,
//! and not before.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use object_store::PutPayload;
use object_store::multipart::{MultipartStore, PartId};
use rustix::fs::OFlags;

use super::{Place, wait};
use crate::Error;

mod state;

use state::{MOST_PARTS, MOST_STATE};
pub use state::{PART_BYTES, State, Unusable};

impl State {
    /// Where that of a file lies.
    #[must_use]
    pub fn path(file: &Path) -> PathBuf {
        let mut name = file.as_os_str().to_owned();
        name.push(".upload");
        PathBuf::from(name)
    }

    /// That of a file, where some of it was sent.
    ///
    /// # Errors
    /// There is one that is not used: others wrote it, or it is damaged.
    pub fn of(file: &Path) -> Result<Option<State>, Unusable> {
        let unreadable = |error: io::Error| Unusable::new(format!("it cannot be read: {error}"));
        let opened = match regular(&State::path(file), OFlags::NOFOLLOW) {
            Ok(opened) => opened,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                return Err(Unusable::new(error.to_string()));
            }
            Err(error) => return Err(unreadable(error)),
        };
        // Of what was opened, and not of what the name stood for before.
        let data = opened.metadata().map_err(unreadable)?;
        if data.uid() != rustix::process::geteuid().as_raw() {
            return Err(Unusable::new(format!("it belongs to user {}", data.uid())));
        }
        // In a folder that others can write to, it may be a hard link to any of this user's files.
        if data.nlink() > 1 {
            return Err(Unusable::new(format!("it has {} names (hard links)", data.nlink())));
        }
        let mut bytes = vec![];
        opened.take(MOST_STATE + 1).read_to_end(&mut bytes).map_err(unreadable)?;
        State::parse(&bytes).map(Some)
    }

    /// Writes all of it or nothing.
    fn keep(&self, file: &Path) -> io::Result<()> {
        let path = State::path(file);
        let part = path.with_extension("upload.part");
        // One that was left behind, or that others put there.
        let _ = fs::remove_file(&part);
        let mut made = File::options().write(true).create_new(true).mode(0o600).open(&part)?;
        let kept = made.write_all(&self.bytes()?).and_then(|()| fs::rename(&part, &path));
        if kept.is_err() {
            let _ = fs::remove_file(&part);
        }
        kept
    }
}

/// Whether something is in the way that another user may have put there, or the folder is not ours to write to. To go on later would be
/// better, and to stop now is worse.
fn is_in_the_way(error: &io::Error) -> bool {
    use io::ErrorKind::{
        AlreadyExists, DirectoryNotEmpty, IsADirectory, NotADirectory, NotFound, PermissionDenied,
        ReadOnlyFilesystem,
    };
    let kinds = [
        AlreadyExists,
        DirectoryNotEmpty,
        IsADirectory,
        NotADirectory,
        NotFound,
        PermissionDenied,
        ReadOnlyFilesystem,
    ];
    kinds.contains(&error.kind())
}

/// Links from one to the next that are followed (`MAXSYMLINKS` of the kernel).
const MOST_LINKS: usize = 40;
/// Bytes that are sent in one piece, at most: they are in memory. S3 takes no more (PutObject).
const MOST_AT_ONCE: u64 = 5 << 30;

/// A file on its way.
pub struct Upload {
    path: PathBuf,
    file: File,
    place: Place,
    state: Option<State>,
    keeps: Keeps,
    /// Why what was kept is not used.
    unusable: Option<Unusable>,
    /// It goes on from what was kept.
    is_resumed: bool,
}

/// What is kept beside a file of what was sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Keeps {
    Nothing,
    /// As much as can be written there: what is in the way belongs to others.
    WhatItCan,
    All,
}

impl Upload {
    /// Begins to send a file, or continues where it was begun.
    ///
    /// # Errors
    /// The URL is none, the file cannot be read, or is on its way to another place.
    pub fn begin(path: &Path, url: &Path) -> Result<Upload, Error> {
        let upload = Upload::all_of(path, url)?;
        let (state, unusable) = match State::of(path) {
            Ok(state) => (state, None),
            Err(unusable) => (None, Some(unusable)),
        };
        if let Some(state) = state.as_ref().filter(|state| state.url != upload.place.url) {
            let why = format!(
                "{} is already being sent to {}: send it there, or remove {}",
                path.display(),
                state.url,
                State::path(path).display()
            );
            return Err(Error::Name { url: upload.place.url, why });
        }
        let keeps = if unusable.is_some() { Keeps::WhatItCan } else { Keeps::All };
        let is_resumed = state.is_some();
        Ok(Upload { state, keeps, unusable, is_resumed, ..upload })
    }

    /// Begins to send a file that nobody sends again: nothing is kept beside it, and nothing that is there is read.
    ///
    /// # Errors
    /// The URL is none, or the file cannot be read.
    pub(crate) fn all_of(path: &Path, url: &Path) -> Result<Upload, Error> {
        let place = Place::of(url)?;
        let file = followed(path, &trusted()).map_err(|cause| local(path, cause))?;
        let path = path.to_owned();
        Ok(Upload {
            path,
            file,
            place,
            state: None,
            keeps: Keeps::Nothing,
            unusable: None,
            is_resumed: false,
        })
    }

    /// Why what was kept beside the file is not used, where that is so: all of it is sent again.
    #[must_use]
    pub fn unusable(&self) -> Option<String> {
        let why = self.unusable.as_ref()?;
        Some(format!("{} is not used: {why}", State::path(&self.path).display()))
    }

    /// Sends the parts that are whole among the first `length` bytes, which do not change any more. Nothing where the store takes
    /// objects in one piece only, or where there is less than a part.
    ///
    /// # Errors
    /// As [`Upload::finish`]; what was sent is kept.
    pub fn advance(&mut self, length: u64) -> Result<(), Error> {
        let url = self.place.url.clone();
        wait(&url, self.send(length))
    }

    /// Sends what is missing of all of the file, and makes the object.
    ///
    /// # Errors
    /// The store refuses or is not reached, or the file cannot be read; what was sent is kept.
    pub fn finish(mut self) -> Result<(), Error> {
        let url = self.place.url.clone();
        wait(&url, async move {
            let length = self.file.metadata().map_err(|cause| local(&self.path, cause))?.len();
            match self.complete(length).await {
                // Stores forget what was begun and not ended, after days or when they are told to: then all of it again.
                Err(Error::NotFound { .. }) if self.state.take().is_some() => self.complete(length).await?,
                Err(Error::Store { url, why }) if self.is_resumed => {
                    let kept = State::path(&self.path);
                    let why = format!("{why} (to send all of it again, remove {})", kept.display());
                    return Err(Error::Store { url, why });
                }
                done => done?,
            }
            self.check(length).await
        })
    }

    async fn complete(&mut self, length: u64) -> Result<(), Error> {
        // Parts of what is no longer in the file: a trace may end earlier after `recover`.
        if let Some(state) = &mut self.state {
            state.parts.truncate(usize::try_from(length / PART_BYTES).unwrap_or(usize::MAX));
        }
        self.send(length).await?;
        let (Some(parts), Some(mut state)) = (self.place.parts.clone(), self.state.take()) else {
            if length > MOST_AT_ONCE {
                let why = format!(
                    "the file has {length} bytes, and this store takes files in one piece, of at most {MOST_AT_ONCE} bytes"
                );
                return Err(Error::Store { url: self.place.url.clone(), why });
            }
            return self.place.put(self.part(0, length)?.into()).await;
        };
        let ended = self.end(&*parts, &mut state, length).await;
        self.state = Some(state);
        ended
    }

    async fn end(&self, parts: &dyn MultipartStore, state: &mut State, length: u64) -> Result<(), Error> {
        // What has changed since it was sent: the torn end of a trace whose recorder was killed, from which `recover` went on.
        for idx in 0..state.parts.len() {
            if crc32fast::hash(&self.whole_part(idx)?) != state.parts[idx].1 {
                self.send_part(state, Some(idx)).await?;
            }
        }
        let mut ids: Vec<PartId> = vec![];
        ids.extend(state.parts.iter().map(|(id, _)| PartId { content_id: id.clone() }));
        let (key, from) = (&self.place.key, state.sent());
        let failed = |error| self.place.failed(error);
        if from < length {
            let rest = PutPayload::from(self.part(from, length - from)?);
            ids.push(parts.put_part(key, &state.id, state.parts.len(), rest).await.map_err(failed)?);
        }
        parts.complete_multipart(key, &state.id, ids).await.map(drop).map_err(failed)
    }

    /// The object is as long as the file; then what was kept of the way goes.
    async fn check(&self, length: u64) -> Result<(), Error> {
        if self.place.link.is_none() {
            let found = self.place.size().await?;
            if found != Some(length) {
                let why =
                    format!("{length} bytes were sent, and the store has {}", found.unwrap_or_default());
                return Err(Error::Store { url: self.place.url.clone(), why });
            }
        }
        // That nothing is left to send is known; a file too many does no harm.
        let _ = (self.keeps != Keeps::Nothing).then(|| fs::remove_file(State::path(&self.path)));
        Ok(())
    }

    async fn send(&mut self, length: u64) -> Result<(), Error> {
        let Some(parts) = self.place.parts.clone() else { return Ok(()) };
        loop {
            let sent = self.state.as_ref().map_or(0, State::sent);
            // The last part is what remains at the end: it may be empty, and the others may not.
            if length.saturating_sub(sent) < PART_BYTES {
                return Ok(());
            }
            let mut state = match self.state.take() {
                Some(state) => state,
                None => {
                    let id = parts.create_multipart(&self.place.key).await;
                    State::new(self.place.url.clone(), id.map_err(|error| self.place.failed(error))?)
                }
            };
            let sent = self.send_part(&mut state, None).await;
            // Without it an upload that is stopped begins anew.
            let kept = match (self.keeps, || state.keep(&self.path)) {
                (Keeps::All, keep) => {
                    keep().or_else(|error| if is_in_the_way(&error) { Ok(()) } else { Err(error) })
                }
                (Keeps::WhatItCan, keep) => keep().or(Ok(())),
                (Keeps::Nothing, _) => Ok(()),
            };
            self.state = Some(state);
            sent?;
            kept.map_err(|cause| local(&State::path(&self.path), cause))?;
        }
    }

    /// Sends the next part, or one again.
    async fn send_part(&self, state: &mut State, again: Option<usize>) -> Result<(), Error> {
        let Some(parts) = &self.place.parts else { return Ok(()) };
        let idx = again.unwrap_or(state.parts.len());
        if idx >= MOST_PARTS {
            let why = format!("a file of more than {} parts cannot be sent", MOST_PARTS);
            return Err(Error::Store { url: self.place.url.clone(), why });
        }
        let bytes = self.whole_part(idx)?;
        let sum = crc32fast::hash(&bytes);
        let sent = parts.put_part(&self.place.key, &state.id, idx, bytes.into()).await;
        let id = sent.map_err(|error| self.place.failed(error))?.content_id;
        match state.parts.get_mut(idx) {
            Some(part) => *part = (id, sum),
            None => state.parts.push((id, sum)),
        }
        Ok(())
    }

    fn whole_part(&self, idx: usize) -> Result<Vec<u8>, Error> {
        self.part(idx as u64 * PART_BYTES, PART_BYTES)
    }

    fn part(&self, from: u64, length: u64) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; usize::try_from(length).unwrap_or(usize::MAX)];
        self.file.read_exact_at(&mut bytes, from).map_err(|cause| local(&self.path, cause))?;
        Ok(bytes)
    }
}

/// Opens a regular file for reading. Another user may have put something else there: it is named first, which has no effect on it, and
/// neither a FIFO nor a lease is waited for.
fn regular(path: &Path, links: OFlags) -> io::Result<File> {
    let named = with(OFlags::PATH | links).open(path)?;
    let found = named.metadata()?;
    if found.is_symlink() {
        return refused("it is a symbolic link");
    }
    if !found.is_file() {
        return refused("it is not a regular file");
    }
    let at_once = with(OFlags::NONBLOCK | OFlags::NOCTTY);
    let file = match at_once.open(format!("/proc/self/fd/{}", named.as_raw_fd())) {
        // Without /proc, by its name once more; which file that is, is compared below.
        Err(error) if error.kind() == io::ErrorKind::NotFound => at_once.open(path)?,
        opened => opened?,
    };
    let opened = file.metadata()?;
    if (opened.dev(), opened.ino()) != (found.dev(), found.ino()) {
        return refused("another file has its name now");
    }
    Ok(file)
}

/// As [`regular`]; links that are this user's or root's are followed. What is sent may be read by many: another user's link in a shared
/// folder would have this user send files that only this user may read.
fn followed(path: &Path, trusted: &[u32]) -> io::Result<File> {
    // Descriptors of this process: no names in a folder.
    if path.starts_with("/proc/self/fd") {
        return regular(path, OFlags::empty());
    }
    let mut path = path.to_owned();
    for _ in 0..MOST_LINKS {
        let named = with(OFlags::PATH | OFlags::NOFOLLOW).open(&path)?;
        let found = named.metadata()?;
        if !found.is_symlink() {
            // A link that takes its place now is refused.
            return regular(&path, OFlags::NOFOLLOW);
        }
        if !trusted.contains(&found.uid()) {
            return refused(&format!("it is a symbolic link of user {}, which is not followed", found.uid()));
        }
        let target = rustix::fs::readlinkat(&named, c"", Vec::new())?;
        let target = Path::new(std::ffi::OsStr::from_bytes(target.as_bytes()));
        path = path.parent().unwrap_or(Path::new("/")).join(target);
    }
    refused("it is a symbolic link to too many others")
}

/// Users whose links this one follows.
fn trusted() -> [u32; 2] {
    [0, rustix::process::geteuid().as_raw()]
}

fn refused<T>(what: &str) -> io::Result<T> {
    Err(io::Error::new(io::ErrorKind::InvalidInput, what))
}

fn with(flags: OFlags) -> fs::OpenOptions {
    let mut options = File::options();
    options.read(true).custom_flags(flags.bits().cast_signed());
    options
}

fn local(path: &Path, cause: io::Error) -> Error {
    Error::Local { file: path.display().to_string(), cause }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn what_another_user_put_in_place_of_a_trace_or_its_state_is_neither_waited_for_nor_read() {
        let folder = std::env::temp_dir().join(format!("gputrace-upload-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder");
        let (trace, kept) = (folder.join("a.gtr"), folder.join("a.gtr.upload"));
        let put = |path: &Path, what: &str| {
            let _ = fs::remove_file(path);
            match what {
                "FIFO" => {
                    let made = std::process::Command::new("mkfifo").arg(path).status();
                    assert!(made.expect("mkfifo").success());
                }
                "hard link" => fs::hard_link(&trace, path).expect("ours"),
                target => symlink(target, path).expect("ours"),
            }
        };
        fs::write(&trace, "{}").expect("writable");
        let why = |what: &str| {
            put(&kept, what);
            State::of(&trace).expect_err(what).to_string()
        };
        assert_eq!(why("FIFO"), "it is not a regular file");
        assert_eq!(why("a.gtr"), "it is a symbolic link");
        assert_eq!(why("hard link"), "it has 2 names (hard links)");
        for what in ["FIFO", "/dev/zero"] {
            put(&trace, what);
            let refused = regular(&trace, OFlags::empty()).expect_err(what);
            assert_eq!(refused.to_string(), "it is not a regular file");
        }
        fs::remove_dir_all(folder).expect("ours");
    }

    #[test]
    fn another_user_s_link_is_not_sent_and_what_is_in_the_way_of_the_state_ends_nothing() {
        let folder = std::env::temp_dir().join(format!("gputrace-upload-links-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder");
        let at = |name: &str| folder.join(name);
        fs::write(at("a.gtr"), "{}").expect("writable");
        for (link, target) in [("own", "a.gtr"), ("twice", "own"), ("circle", "circle")] {
            symlink(target, at(link)).expect("ours");
        }
        let sent = |name: &str| followed(&at(name), &trusted()).map(|_| ()).map_err(|why| why.to_string());
        assert_eq!((sent("a.gtr"), sent("own"), sent("twice")), (Ok(()), Ok(()), Ok(())));
        assert!(sent("circle").is_err());
        // Any state, in whose way is a folder.
        let state = State::new("s3://bucket/a.gtr".to_owned(), "id".to_owned());
        for name in ["a.gtr.upload.part", "a.gtr.upload"] {
            fs::create_dir_all(at(name).join("full")).expect("ours");
            let error = state.keep(&at("a.gtr")).expect_err(name);
            assert!(is_in_the_way(&error), "{error:?}");
            fs::remove_dir_all(at(name)).expect("ours");
        }
        assert!(!at("a.gtr.upload.part").exists(), "nothing stays");
        assert!(!is_in_the_way(&io::ErrorKind::StorageFull.into()));
        state.keep(&at("a.gtr")).expect("nothing is in the way");
        // As another user sees the same links.
        let us = rustix::process::geteuid().as_raw();
        let why = followed(&at("twice"), &[us + 1]).expect_err("ours").to_string();
        assert_eq!(why, format!("it is a symbolic link of user {us}, which is not followed"));
        assert!(followed(&at("a.gtr"), &[us + 1]).is_ok(), "whose trace it is does not matter");
        fs::remove_dir_all(folder).expect("ours");
    }
}
