//! What PyTorch calls its process groups, so that the communicators it makes for them have a name.
//!
//! NCCL is given a name only by releases of PyTorch from August 2026 on. Here is what others say: a group is told its name
//! and its description when it is made ([`named`], [`described`]), often before the process has a session; before each of its
//! collectives the group is asked for its backend, on the thread that then makes the communicator if there is none yet
//! ([`asked`]). [`name_for`] joins the two.
//!
//! Groups are known by their address. The table has no lock: an entry that is written while it is read has no name.

use super::Config;
use crate::callsite;
use crate::lanes;
use crate::session::Start;
use crate::sys::Text;
use crate::tls::{self, Tls};
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};

/// Groups of a process that are remembered; then the oldest makes room. A rank of a large job is in a few dozen.
const MOST_GROUPS: usize = 128;
/// Bytes of a name or a description that are kept.
const MOST_BYTES: usize = 120;
const WORDS: usize = MOST_BYTES / size_of::<u64>();
/// What PyTorch calls a group that was given no description (torch/distributed/distributed_c10d.py 2.3 to 2.15).
const NO_DESCRIPTION: &[u8] = b"undefined";
/// The library that makes PyTorch's communicators.
const MAKER: &core::ffi::CStr = c"libtorch_cuda.so";

/// A name as PyTorch itself writes it: description, colon, name.
pub(crate) type Name = Text<{ 2 * MOST_BYTES + 2 }>;

struct Words {
    bytes: AtomicUsize,
    words: [AtomicU64; WORDS],
}

impl Words {
    const fn none() -> Words {
        Words { bytes: AtomicUsize::new(0), words: [const { AtomicU64::new(0) }; WORDS] }
    }

    fn set(&self, text: &[u8]) {
        let text = text.get(..MOST_BYTES).unwrap_or(text);
        for (word, bytes) in self.words.iter().zip(text.chunks(size_of::<u64>())) {
            let mut whole = [0; size_of::<u64>()];
            whole.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            word.store(u64::from_ne_bytes(whole), Ordering::Relaxed);
        }
        self.bytes.store(text.len(), Ordering::Relaxed);
    }

    fn append_to(&self, text: &mut Name) {
        let mut left = self.bytes.load(Ordering::Relaxed).min(MOST_BYTES);
        for word in &self.words {
            let bytes = word.load(Ordering::Relaxed).to_ne_bytes();
            let n = left.min(bytes.len());
            text.append(bytes.get(..n).unwrap_or_default());
            left -= n;
        }
    }
}

struct Group {
    address: AtomicUsize,
    /// Odd while it is written.
    version: AtomicU32,
    name: Words,
    description: Words,
}

static GROUPS: [Group; MOST_GROUPS] = [const {
    Group {
        address: AtomicUsize::new(0),
        version: AtomicU32::new(0),
        name: Words::none(),
        description: Words::none(),
    }
}; MOST_GROUPS];
static NEXT: AtomicUsize = AtomicUsize::new(0);

impl Group {
    fn of(address: usize) -> Option<&'static Group> {
        GROUPS.iter().find(|group| group.address.load(Ordering::Relaxed) == address)
    }

    fn of_or_new(address: usize) -> Option<&'static Group> {
        let next = || GROUPS.get(NEXT.fetch_add(1, Ordering::Relaxed) % MOST_GROUPS);
        Group::of(address).or_else(next)
    }

    /// Nobody else writes meanwhile; if somebody does, this is left out.
    fn write(&self, address: usize, write: impl FnOnce(&Group)) {
        let version = self.version.load(Ordering::Relaxed);
        let odd = version | 1;
        if version == odd
            || self.version.compare_exchange(version, odd, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            return;
        }
        // SYNC: a group's texts.
        fence(Ordering::Release);
        if self.address.swap(address, Ordering::Relaxed) != address {
            self.name.set(&[]);
            self.description.set(&[]);
        }
        write(self);
        self.version.store(odd.wrapping_add(1), Ordering::Release);
    }

    fn read(&self, address: usize) -> Option<Name> {
        let before = self.version.load(Ordering::Acquire);
        let mut text = Name::new();
        if self.description.bytes.load(Ordering::Relaxed) == 0 {
            text.append(NO_DESCRIPTION);
        }
        self.description.append_to(&mut text);
        text.append(b":");
        self.name.append_to(&mut text);
        let is_named = self.name.bytes.load(Ordering::Relaxed) != 0;
        let is_it = self.address.load(Ordering::Relaxed) == address;
        // SYNC: a group's texts.
        fence(Ordering::Acquire);
        let is_whole = before & 1 == 0 && self.version.load(Ordering::Relaxed) == before;
        (is_named && is_it && is_whole).then_some(text)
    }
}

/// The group at this address has this name. It is new: what was there had been described otherwise.
#[cold]
pub(crate) fn named(group: usize, name: &[u8]) {
    if let Some(entry) = Group::of_or_new(group) {
        entry.write(group, |entry| {
            entry.name.set(name);
            entry.description.set(&[]);
        });
    }
}

/// The group at this address is described so.
#[cold]
pub(crate) fn described(group: usize, description: &[u8]) {
    if let Some(entry) = Group::of_or_new(group) {
        entry.write(group, |entry| entry.description.set(description));
    }
}

/// The calling thread asked this group for what works on GPUs.
#[inline]
pub(crate) fn asked(group: usize) {
    tls::here().process_group.set(group);
}

/// The name of the communicator that the calling thread is about to make, if PyTorch makes it. A group that was asked for its
/// backend makes one communicator at most before it is asked again.
pub(crate) fn name_for(tls: &Tls, config: &Config<'_>) -> Option<Name> {
    let group = tls.process_group.replace(0);
    if group == 0 || !config.name.is_empty() {
        return None;
    }
    let name = Group::of(group)?.read(group)?;
    let mut lane = lanes::lane(Start::IfNeeded)?;
    callsite::is_called_by(&mut lane, MAKER).then_some(name)
}
