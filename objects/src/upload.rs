//! A file that is sent to a store in parts, while it grows, and over restarts.
//!
//! Beside the file lies what was sent of it (`FILE.upload`): whoever goes on sends the rest. The object is there when all of the file is,
//! and not before.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use object_store::PutPayload;
use object_store::multipart::PartId;
use serde::{Deserialize, Serialize};

use super::{PART_BYTES, Place, wait};
use crate::Error;

/// Parts that S3 takes of an object.
const MOST_PARTS: usize = 10_000;

/// What was sent of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// What this is: `gputrace.upload/1`.
    schema: String,
    /// Where the file goes.
    pub url: String,
    /// What the store calls the upload.
    id: String,
    /// Bytes of each part.
    part_bytes: u64,
    /// What the store calls each part, and the CRC-32 of its bytes.
    parts: Vec<(String, u32)>,
}

const SCHEMA: &str = "gputrace.upload/1";

impl State {
    /// Where that of a file lies.
    #[must_use]
    pub fn path(file: &Path) -> PathBuf {
        let mut name = file.as_os_str().to_owned();
        name.push(".upload");
        PathBuf::from(name)
    }

    /// That of a file, where some of it was sent.
    #[must_use]
    pub fn of(file: &Path) -> Option<State> {
        let text = std::fs::read(State::path(file)).ok()?;
        let state: State = serde_json::from_slice(&text).ok()?;
        (state.schema == SCHEMA && state.part_bytes > 0).then_some(state)
    }

    /// Bytes that were sent.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.part_bytes.saturating_mul(self.parts.len() as u64)
    }

    /// Writes all of it or nothing.
    fn keep(&self, file: &Path) -> io::Result<()> {
        let path = State::path(file);
        let part = path.with_extension("upload.part");
        std::fs::write(&part, serde_json::to_vec(self)?)?;
        std::fs::rename(&part, &path)
    }
}

/// A file on its way.
pub struct Upload {
    path: PathBuf,
    file: File,
    place: Place,
    state: Option<State>,
    is_kept: bool,
}

impl Upload {
    /// Begins to send a file, or goes on where it was begun.
    ///
    /// # Errors
    /// The URL is none, the file cannot be read, or is on its way to another place.
    pub fn begin(path: &Path, url: &Path) -> Result<Upload, Error> {
        let place = Place::of(url)?;
        let file = File::open(path).map_err(|cause| local(path, cause))?;
        let state = State::of(path);
        if let Some(state) = state.as_ref().filter(|state| state.url != place.url) {
            let why = format!(
                "{} is on its way to {}: send it there, or remove {}",
                path.display(),
                state.url,
                State::path(path).display()
            );
            return Err(Error::Name { url: place.url, why });
        }
        Ok(Upload { path: path.to_owned(), file, place, state, is_kept: true })
    }

    /// For a file that nobody sends again: nothing is kept beside it.
    #[must_use]
    pub fn without_state(self) -> Upload {
        Upload { is_kept: false, ..self }
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
                done => done?,
            }
            self.check(length).await
        })
    }

    async fn complete(&mut self, length: u64) -> Result<(), Error> {
        self.send(length).await?;
        let (Some(parts), Some(state)) = (self.place.parts.clone(), &self.state) else {
            return self.place.put(self.part(0, length)?.into()).await;
        };
        // What has changed since it was sent: the torn end of a trace whose recorder was killed, from which `recover` went on.
        for idx in 0..state.parts.len() {
            let bytes = self.part(idx as u64 * state.part_bytes, state.part_bytes)?;
            if crc32fast::hash(&bytes) != state.parts[idx].1 {
                return Box::pin(self.again(idx, length)).await;
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

    /// Sends a part again, and then the rest.
    async fn again(&mut self, idx: usize, length: u64) -> Result<(), Error> {
        if let Some(mut state) = self.state.take() {
            let sent = self.send_part(&mut state, Some(idx)).await;
            self.state = Some(state);
            sent?;
        }
        self.complete(length).await
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
        let _ = self.is_kept.then(|| std::fs::remove_file(State::path(&self.path)));
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
                    State {
                        schema: SCHEMA.to_owned(),
                        url: self.place.url.clone(),
                        id: id.map_err(|error| self.place.failed(error))?,
                        part_bytes: PART_BYTES,
                        parts: vec![],
                    }
                }
            };
            let sent = self.send_part(&mut state, None).await;
            let kept = if self.is_kept { state.keep(&self.path) } else { Ok(()) };
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
        let bytes = self.part(idx as u64 * state.part_bytes, state.part_bytes)?;
        let sum = crc32fast::hash(&bytes);
        let sent = parts.put_part(&self.place.key, &state.id, idx, bytes.into()).await;
        let id = sent.map_err(|error| self.place.failed(error))?.content_id;
        match state.parts.get_mut(idx) {
            Some(part) => *part = (id, sum),
            None => state.parts.push((id, sum)),
        }
        Ok(())
    }

    fn part(&self, from: u64, length: u64) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; usize::try_from(length).unwrap_or(usize::MAX)];
        self.file.read_exact_at(&mut bytes, from).map_err(|cause| local(&self.path, cause))?;
        Ok(bytes)
    }
}

fn local(path: &Path, cause: io::Error) -> Error {
    Error::Local { file: path.display().to_string(), cause }
}
