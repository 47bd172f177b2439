//! The ring's file in our memory. The only file of this crate with `unsafe`.
#![allow(unsafe_code)]

use crate::Error;
use gputrace_ring::map::{Header, Map, NotARing};
use memmap2::{MmapOptions, MmapRaw};
use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

/// A mapped ring. [`Map`]s taken from it must not outlive it.
pub(crate) struct MapFile {
    map: Map,
    path: PathBuf,
    /// Device and inode, by which the process's own mapping of the file is known.
    inode: u64,
    /// Whoever drains the ring holds this file's lock, which the kernel gives back however the holder ends.
    file: File,
    _memory: MmapRaw,
}

impl MapFile {
    /// Maps a ring's file; also `/proc/PID/fd/N`.
    pub(crate) fn open(path: &Path) -> Result<MapFile, Error> {
        use std::os::unix::fs::MetadataExt;
        let io = |source| Error::Ring { ring: path.to_owned(), source };
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        let bytes = usize::try_from(metadata.len()).unwrap_or(usize::MAX);
        // `Map::open` looks at one page before it knows the length.
        if bytes < Map::bytes_for(1) {
            return Err(not_a_ring(path, NotARing::TooShort { expected: Map::bytes_for(1) }));
        }
        // A raw mapping makes no reference to memory that the process writes to.
        let memory = MmapOptions::new().len(bytes).map_raw(&file).map_err(io)?;
        // SAFETY: the mapping is page aligned, `bytes` long, writable, and kept beside the map for as long as it.
        let map = unsafe { Map::open(memory.as_mut_ptr(), bytes) }.map_err(|why| not_a_ring(path, why))?;
        Ok(MapFile { map, path: path.to_owned(), inode: metadata.ino(), file, _memory: memory })
    }

    /// Makes this the ring's only recorder, until dropped.
    pub(crate) fn lock(&self) -> Result<(), Error> {
        match self.file.try_lock() {
            Ok(()) => Ok(()),
            Err(TryLockError::WouldBlock) => {
                let pid = self.header().pid.load(Ordering::Relaxed);
                Err(Error::Busy { ring: self.path.clone(), pid })
            }
            Err(TryLockError::Error(source)) => Err(Error::Ring { ring: self.path.clone(), source }),
        }
    }

    pub(crate) fn map(&self) -> Map {
        self.map
    }

    pub(crate) fn header(&self) -> &Header {
        self.map.header()
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn inode(&self) -> u64 {
        self.inode
    }
}

fn not_a_ring(path: &Path, why: NotARing) -> Error {
    let what = match why {
        NotARing::TooShort { expected } => {
            format!(
                "it is shorter than the {expected} bytes it should have; its process died while making it, and nothing is lost"
            )
        }
        NotARing::NoMagic => {
            "it does not begin as a ring does; if its process died while making it, nothing is lost"
                .to_owned()
        }
        NotARing::OtherAbi { found } => format!(
            "it was made by another version of gputrace (layout {found}, this is {}); use the gputrace that belongs to the libgputrace.so that made it",
            gputrace_ring::record::ABI
        ),
    };
    Error::NotARing { ring: path.to_owned(), what }
}
