//! Addresses in libraries that a program may unload.

use crate::elf;
use core::sync::atomic::{AtomicUsize, Ordering};

/// Nothing was found, and nothing is looked for again.
pub(crate) const NONE_FOUND: usize = 1;

/// To be called after objects were unloaded: if one of the addresses lies in none any more, all of them are forgotten.
#[cold]
pub(crate) fn forget_if_gone<'a>(addresses: impl Iterator<Item = &'a AtomicUsize> + Clone) -> bool {
    let is_gone = |slot: &AtomicUsize| {
        let address = slot.load(Ordering::Relaxed);
        address > NONE_FOUND && elf::by_address(address).is_none()
    };
    let are_gone = addresses.clone().any(is_gone);
    if are_gone {
        addresses.for_each(|slot| slot.store(0, Ordering::Relaxed));
    }
    are_gone
}
