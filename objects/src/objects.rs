//! Files of object storage and of web servers, by their URLs: read, listed and written.
//!
//! ```text
//!   s3://BUCKET/KEY    Amazon S3, and what speaks its protocol (MinIO, Ceph, Garage, R2): AWS_* variables
//!   gs://BUCKET/KEY    Google Cloud Storage: GOOGLE_* variables
//!   az://CONTAINER/KEY Azure Blob Storage: AZURE_* variables
//!   http(s)://…        any web server; with WebDAV, folders of it too
//! ```
//!
//! Everything here blocks: a caller needs no runtime, and has none.
//!
//! The clients of the stores are 144 of the program's 269 crates, and a fifth of the processor time of its first build. They come with
//! the feature `stores`. Without it names are recognised as before, and each function returns [`Error::NoStores`].
#![forbid(unsafe_code)]

use std::path::Path;

#[cfg(feature = "stores")]
#[path = "lib.rs"]
mod store;
#[cfg(not(feature = "stores"))]
#[path = "without.rs"]
mod store;

pub use store::{PART_BYTES, State, Unusable, Upload, fetch, list, put, size};

/// Why an object cannot be read, listed or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The program was built without the stores' clients.
    #[error(
        "{url}: this build has no object storage. Use the wheel or tarball of a release, or build with `cargo build --release -p gputrace --features objects`"
    )]
    NoStores {
        /// As it was given.
        url: String,
    },
    /// The URL is none, or of a kind that is not known.
    #[error("{url}: {why}")]
    Name {
        /// As it was given.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// There is no such object, or no place for one.
    #[error("{url}: {why}")]
    NotFound {
        /// As it was given.
        url: String,
        /// What is not there.
        why: String,
    },
    /// The store refused, or could not be reached.
    #[error("{url}: {why}")]
    Store {
        /// As it was given.
        url: String,
        /// What the store said, and what to do about it.
        why: String,
    },
    /// The file of this machine cannot be read or written.
    #[error("{file}: {cause}")]
    Local {
        /// Which file.
        file: String,
        /// What the system said.
        cause: std::io::Error,
    },
}

/// Checks that this build can reach stores. For callers that would work for hours before they write.
///
/// # Errors
/// [`Error::NoStores`], where it cannot.
pub fn has_stores(url: &Path) -> Result<(), Error> {
    if cfg!(feature = "stores") { Ok(()) } else { Err(no_stores(url)) }
}

fn no_stores(url: &Path) -> Error {
    Error::NoStores { url: url.display().to_string() }
}

/// Whether a name is an object's, and not a file's: by what stands before `://`.
#[must_use]
pub fn is_url(name: &Path) -> bool {
    const SCHEMES: [&str; 6] = ["s3", "gs", "az", "http", "https", "s3a"];
    let scheme = name.to_str().and_then(|name| name.split_once("://")).map(|(scheme, _)| scheme);
    scheme.is_some_and(|scheme| SCHEMES.contains(&scheme))
}

/// A name of a key as a part of a URL.
#[must_use]
pub fn encoded(name: &str) -> String {
    let is_plain =
        |byte: u8| byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:@".contains(&byte) || byte >= 0x80;
    let mut text = vec![];
    for byte in name.bytes() {
        if is_plain(byte) {
            text.push(byte);
        } else {
            text.extend(format!("%{byte:02X}").bytes());
        }
    }
    String::from_utf8(text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_told_from_files() {
        for url in ["s3://b/k.gtr", "gs://b/k", "az://c/k", "http://h/k", "https://h/k?X=1"] {
            assert!(is_url(Path::new(url)), "{url}");
        }
        for file in
            ["train.gtr", "s3:/b/k", "/s3://b", "ftp://h/k", "node17:/local/traces", "batch=4:s3://b/k"]
        {
            assert!(!is_url(Path::new(file)), "{file}");
        }
    }
}
