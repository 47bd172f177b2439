//! Hashes that NCCL gives its communicators, computed as it does, so that its log, its RAS and its profilers' output can
//! be matched with a trace. Depends on nothing but the unique id and the version.

use super::UniqueId;
use crate::arch;

/// First version that hashes with [`Hash`] (src/include/bitops.h, v2.26.2); before it was DJB2a.
const NEW_HASH: u32 = 2_26_02;
/// First version that hashes the number of a split with it (src/init.cc, v2.24.3).
const SPLIT_COUNT: u32 = 2_24_00;

/// Both hashes of a unique id: the new one, and the one before 2.26.
pub(crate) fn of_unique_id(id: &UniqueId) -> [u64; 2] {
    let mut hash = Hash::new();
    hash.eat(&id.0);
    [hash.digest(), djb2a(&id.0)]
}

/// `commHash` of a communicator from its unique id's two hashes.
pub(crate) fn of_root(hashes: [u64; 2], version: u32) -> u64 {
    let [new, old] = hashes;
    if version >= NEW_HASH { new } else { old }
}

/// `commHash` of what is split off: `count` is the number of the split, 0 for a shrink.
pub(crate) fn of_child(parent: u64, count: u32, color: i32, version: u32) -> u64 {
    if version >= NEW_HASH {
        let mut hash = Hash::new();
        hash.eat(&parent.to_le_bytes());
        hash.eat(&count.to_le_bytes());
        hash.eat(&color.to_le_bytes());
        return hash.digest();
    }
    // "%016lx-%d-%d", or "%016lx-%d" before 2.24, in a zeroed unique id.
    let mut text = Line { bytes: [0; 128], used: 0 };
    for digit in 0..16 {
        let nibble = (parent >> (60 - 4 * digit)) as u8 & 15;
        text.put(if nibble < 10 { b'0' + nibble } else { b'a' + nibble - 10 });
    }
    if version >= SPLIT_COUNT {
        text.put(b'-');
        text.number(i64::from(count));
    }
    text.put(b'-');
    text.number(i64::from(color));
    djb2a(&text.bytes)
}

/// `getHash` up to 2.25 (src/misc/utils.cc): the bytes are `char`, which has a sign or none by the processor.
fn djb2a(bytes: &[u8; 128]) -> u64 {
    bytes.iter().fold(5381_u64, |hash, byte| hash.wrapping_mul(33) ^ arch::char(*byte) as u64)
}

/// `eatHash` and `digestHash` (src/include/bitops.h, v2.26.2).
struct Hash([u64; 2]);

impl Hash {
    fn new() -> Hash {
        Hash([1, 1])
    }

    fn eat(&mut self, bytes: &[u8]) {
        let [mut first, mut second] = self.0;
        first ^= bytes.len() as u64;
        for chunk in bytes.chunks(8) {
            first = first.wrapping_add(second);
            second ^= first;
            first ^= first >> 31;
            first = first.wrapping_mul(0x9de6_2bbc_8cef_3ce3);
            second ^= second >> 32;
            second = second.wrapping_mul(0x485c_d631_1b59_9e79);
            let word = chunk.iter().rev().fold(0_u64, |word, byte| word << 8 | u64::from(*byte));
            first = first.wrapping_add(word);
        }
        self.0 = [first, second];
    }

    fn digest(&self) -> u64 {
        let [first, second] = self.0;
        let mut hash = first;
        hash ^= hash >> 31;
        hash = hash.wrapping_mul(0xbac3_bd56_2846_de6b);
        hash = hash.wrapping_add(second);
        hash ^= hash >> 32;
        hash.wrapping_mul(0x995a_187a_14e7_b445)
    }
}

/// A text in a zeroed unique id.
struct Line {
    bytes: [u8; 128],
    used: usize,
}

impl Line {
    fn put(&mut self, byte: u8) {
        if let Some(slot) = self.bytes.get_mut(self.used) {
            *slot = byte;
            self.used += 1;
        }
    }

    fn number(&mut self, number: i64) {
        if number < 0 {
            self.put(b'-');
        }
        let mut scale = 1_u64;
        let magnitude = number.unsigned_abs();
        while magnitude / scale >= 10 {
            scale *= 10;
        }
        while scale > 0 {
            self.put(b'0' + (magnitude / scale % 10) as u8);
            scale /= 10;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> UniqueId {
        UniqueId(core::array::from_fn(|index| index as u8))
    }

    #[test]
    fn root_hashes_are_those_of_nccl() {
        // 2.26's value from NCCL's own getHash compiled from its source; 2.25's by hand.
        let hashes = of_unique_id(&id());
        assert_eq!(of_root(hashes, 2_28_09), 0x6afe_1cc1_7717_e1f4);
        assert_eq!(of_root(hashes, 2_25_01), 0xbf47_c767_cbdf_3105);
    }

    #[test]
    fn what_is_split_off_hashes_its_parent_number_and_color() {
        let parent = 0x6afe_1cc1_7717_e1f4;
        assert_ne!(of_child(parent, 1, 0, 2_28_09), of_child(parent, 2, 0, 2_28_09));
        assert_ne!(of_child(parent, 1, 0, 2_24_03), of_child(parent, 2, 0, 2_24_03));
        // Before 2.24 the number did not count.
        assert_eq!(of_child(parent, 1, 0, 2_21_05), of_child(parent, 2, 0, 2_21_05));
        assert_ne!(of_child(parent, 1, 0, 2_21_05), of_child(parent, 1, 1, 2_21_05));
    }

    #[test]
    fn texts_are_as_printf_writes_them() {
        let mut line = Line { bytes: [0; 128], used: 0 };
        line.number(-120);
        line.number(0);
        line.number(7);
        assert_eq!(line.bytes.get(..6), Some(b"-12007".as_slice()));
    }
}
