//! The functions of a build without the stores' clients: each returns [`Error::NoStores`].

use std::fs::File;
use std::path::Path;

use crate::{Error, no_stores};

/// As in a build that sends parts.
pub const PART_BYTES: u64 = 8 << 20;

/// The parts of a file that were sent: nothing.
pub enum State {}

impl State {
    /// That of a file: none.
    ///
    /// # Errors
    /// None.
    pub fn of(_: &Path) -> Result<Option<State>, Unusable> {
        Ok(None)
    }

    /// Is never called: nothing is sent.
    #[must_use]
    pub fn sent(&self) -> u64 {
        match *self {}
    }
}

/// Why a kept state is not used: this build has none.
pub enum Unusable {}

/// A file on its way: this build has none.
pub enum Upload {}

impl Upload {
    /// Sends nothing.
    ///
    /// # Errors
    /// [`Error::NoStores`], always.
    pub fn begin(_: &Path, url: &Path) -> Result<Upload, Error> {
        Err(no_stores(url))
    }

    /// Is never called: no upload begins.
    #[must_use]
    pub fn unusable(&self) -> Option<String> {
        match *self {}
    }

    /// Is never called: no upload begins.
    ///
    /// # Errors
    /// None.
    pub fn advance(&mut self, _: u64) -> Result<(), Error> {
        match *self {}
    }

    /// Is never called: no upload begins.
    ///
    /// # Errors
    /// None.
    pub fn finish(self) -> Result<(), Error> {
        match self {}
    }
}

/// Fetches nothing.
///
/// # Errors
/// [`Error::NoStores`], always.
pub fn fetch(name: &Path, _: &mut File) -> Result<(), Error> {
    Err(no_stores(name))
}

/// Lists nothing.
///
/// # Errors
/// [`Error::NoStores`], always.
pub fn list(folder: &Path) -> Result<Vec<String>, Error> {
    Err(no_stores(folder))
}

/// Finds nothing.
///
/// # Errors
/// [`Error::NoStores`], always.
pub fn size(name: &Path) -> Result<Option<u64>, Error> {
    Err(no_stores(name))
}

/// Writes nothing.
///
/// # Errors
/// [`Error::NoStores`], always.
pub fn put(_: &Path, name: &Path) -> Result<(), Error> {
    Err(no_stores(name))
}
