extern crate std;
use super::*;
use crate::ring::as_bytes;
use std::vec::Vec;

#[test]
fn a_payload_is_read_from_its_words_and_nothing_from_too_few() {
    let wait = Wait { event: 7, stream: 9, action: 2, result: -600 };
    let words: Vec<u64> = as_bytes(&wait)
        .chunks_exact(8)
        .map(|word| u64::from_ne_bytes(word.try_into().expect("eight bytes")))
        .collect();
    let behind: Vec<u64> = words.iter().copied().chain([3]).collect();
    assert_eq!(Wait::from_words(&behind), Some((wait, &[3][..])));
    assert_eq!(Wait::from_words(&words[..2]), None);
}

#[test]
fn a_changed_layout_has_another_version() {
    // FNV-1a, 64 bits.
    let all = LAYOUTS.bytes().chain(pjrt::LAYOUTS.bytes());
    let hash = all.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    assert_eq!(
        (ABI, hash),
        (15, 127_760_236_112_291_240),
        "records changed: ABI becomes one more, and this hash what it is now"
    );
}

#[test]
fn kinds_have_the_numbers_that_they_are_read_by() {
    for kind in Kind::ALL {
        assert_eq!(Kind::from_raw(*kind as u8), Some(*kind));
    }
    assert_eq!(Kind::from_raw(0), None);
}
