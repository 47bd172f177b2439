//! The folders that the server may read, and what lies in them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

/// Folders by their real names: no link is on the way.
#[derive(Clone, Debug)]
pub(super) struct Allowed(Vec<PathBuf>);

impl Allowed {
    /// The folders of these names; of none, the current one.
    ///
    /// # Errors
    /// One is not a folder.
    pub(super) fn new(named: &[PathBuf]) -> anyhow::Result<Allowed> {
        let here = [PathBuf::from(".")];
        let named = if named.is_empty() { &here } else { named };
        let real = |path: &PathBuf| {
            let folder = fs::canonicalize(path).with_context(|| format!("cannot read {}", path.display()))?;
            if !folder.is_dir() {
                bail!(
                    "{} is not a folder: --allow takes the folder that contains the traces",
                    path.display()
                );
            }
            Ok(folder)
        };
        named.iter().map(real).collect::<anyhow::Result<_>>().map(Allowed)
    }

    /// The folders.
    pub(super) fn folders(&self) -> &[PathBuf] {
        &self.0
    }

    /// As a message names them.
    pub(super) fn shown(&self) -> String {
        self.0.iter().map(|folder| folder.to_string_lossy()).collect::<Vec<_>>().join(", ")
    }

    /// The real name of what a client named: a regular file or a folder below an allowed folder. A relative name is looked for
    /// in each of them.
    ///
    /// What is not there and what lies elsewhere get the same answer, so that a client learns nothing of other folders. What
    /// is opened is looked at again when it is open (`confine_to`): links may have changed by then.
    ///
    /// # Errors
    /// Why it is not read.
    pub(super) fn find(&self, name: &str) -> Result<PathBuf, String> {
        let real = |path: &Path| fs::canonicalize(path).ok();
        let is_below = |path: &PathBuf| self.0.iter().any(|folder| path.starts_with(folder));
        // An absolute name replaces the folder.
        let found = self.0.iter().filter_map(|folder| real(&folder.join(name))).find(is_below);
        let Some(path) = found.filter(|_| !name.is_empty()) else {
            return Err(format!("`{name}` is not in the folders that this server reads: {}", self.shown()));
        };
        match fs::metadata(&path) {
            Ok(found) if found.is_file() || found.is_dir() => Ok(path),
            _ => Err(format!("`{name}` is neither a regular file nor a folder")),
        }
    }
}
