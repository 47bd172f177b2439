//! The library that goes into the process: whose it may be, and that it is whole.
//!
//! The loader of the process maps it as it is. Where a segment has no bytes, because the file is being written or was cut, the process would
//! end by SIGBUS.

use super::image::{half, short, word};
use crate::attach::capabilities;
use crate::opened::{self, Expected, Links, Unexpected};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// More than the library has.
const MOST_LIBRARY: u64 = 256 << 20;
/// Kind of a file, a machine, and a kind of a program header (gABI 4.1).
const ET_DYN: u16 = 3;
const EM_X86_64: u16 = 62;
const PT_LOAD: u32 = 1;
/// Bytes of a program header and of a section header.
const HEADER: usize = 56;
const SECTION: u64 = 64;

/// What the file has, for this process.
pub(super) fn read(library: &Path, pid: u32) -> Result<Vec<u8>, String> {
    let content = opened::read(library, Links::Followed, &trusted(pid));
    let content = content.map_err(|why: Unexpected| why.to_string())?;
    if is_whole(&content) {
        return Ok(content);
    }
    Err(format!("{} is not a whole library for x86-64: it may be being written now", library.display()))
}

/// The library becomes code of the process, so nobody may have chosen it but its user, who calls us, who installed us, and root. A process
/// that may do more than its user is not the user's. And it becomes memory of the process, so its user could read it without us.
fn trusted(pid: u32) -> Expected {
    let users = opened::users_of(pid);
    let is_plain = users.iter().all(|user| *user == users[0]) && capabilities(pid) == 0;
    let mut owners = if is_plain { users.clone() } else { vec![] };
    owners.extend([0, rustix::process::geteuid().as_raw()]);
    owners.extend(fs::metadata("/proc/self/exe").map(|own| own.uid()));
    Expected::regular().with_bytes(1..=MOST_LIBRARY).of(&owners).guarded().readable_by(&users)
}

/// Whether all is there that the headers name. The sections come last in a file, so one that is still being written lacks them.
fn is_whole(library: &[u8]) -> bool {
    let looked = || {
        let is_ours = library.starts_with(b"\x7fELF\x02\x01")
            && short(library, 16)? == ET_DYN
            && short(library, 18)? == EM_X86_64
            && usize::from(short(library, 54)?) == HEADER;
        let sections = word(library, 40)?.checked_add(SECTION * u64::from(short(library, 60)?))?;
        let at = usize::try_from(word(library, 32)?).ok()?;
        let n = HEADER * usize::from(short(library, 56)?);
        let headers = library.get(at..at.checked_add(n)?)?;
        let mut n_loaded = 0;
        for header in headers.chunks_exact(HEADER).filter(|header| half(header, 0) == Some(PT_LOAD)) {
            let end = word(header, 8)?.checked_add(word(header, 32)?)?;
            n_loaded += usize::from(end <= library.len() as u64);
            if end > library.len() as u64 {
                return None;
            }
        }
        Some(is_ours && n_loaded != 0 && sections <= library.len() as u64)
    };
    looked().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_beginning_of_a_library_is_whole() {
        let own = fs::read("/proc/self/exe").expect("this program");
        // A program that can lie anywhere is one to the headers.
        assert!(is_whole(&own));
        let lengths = (0..=4096).chain((1..1000).map(|part| own.len() / 1000 * part)).chain([own.len() - 1]);
        for n in lengths {
            assert!(!is_whole(&own[..n]), "{n} bytes of {}", own.len());
        }
        assert!(!is_whole(b"root:x:0:0:root:/root:/bin/bash\n"));
    }
}
