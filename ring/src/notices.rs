//! Messages of the library that standard error did not take.
//!
//! They lie in the ring's header, and not in its records: a process that can make no call of the kernel any more, or that has no thread
//! line to write on, still leaves them for the recorder, or for whoever finds the ring.

#[cfg(not(loom))]
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Bytes of the longest message; the rest is cut.
pub const LONGEST: usize = 512;
/// Words of all messages together: two of the longest, or about eight ordinary ones.
#[cfg(not(loom))]
const WORDS: usize = ROWS * ROW;
#[cfg(loom)]
const WORDS: usize = 4;
#[cfg(not(loom))]
const ROWS: usize = 5;
#[cfg(not(loom))]
const ROW: usize = 32;
/// Bytes of a word.
const WORD: usize = size_of::<u64>();

/// Messages, one behind the other: a word with the length in bytes, then as many words as the text needs. A length is written after its
/// text, so that 0 means that no message starts here yet.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(128))]
pub struct Notices {
    /// Words that are taken, or more if a message found no room.
    taken: AtomicU32,
    /// Messages that found no room.
    dropped: AtomicU32,
    #[cfg(not(loom))]
    words: [[AtomicU64; ROW]; ROWS],
    #[cfg(loom)]
    words: [AtomicU64; WORDS],
}

impl Notices {
    /// Adds a message; any thread may, at any time. False if there is no room.
    pub fn push(&self, text: &[u8]) -> bool {
        let text = text.get(..LONGEST).unwrap_or(text);
        if text.is_empty() {
            return true;
        }
        let n_words = 1 + text.len().div_ceil(WORD);
        let at = self.taken.fetch_add(n_words as u32, Ordering::Relaxed) as usize;
        let Some(length) = self.word(at).filter(|_| at + n_words <= WORDS) else {
            // A length of 0 stands here for ever: what fits is read up to here.
            self.taken.store(WORDS as u32, Ordering::Relaxed);
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return false;
        };
        for (idx, part) in text.chunks(WORD).enumerate() {
            let mut bytes = [0; WORD];
            for (to, from) in bytes.iter_mut().zip(part) {
                *to = *from;
            }
            if let Some(word) = self.word(at + 1 + idx) {
                word.store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
            }
        }
        // SYNC: the text is there for whoever sees its length.
        length.store(text.len() as u64, Ordering::Release);
        true
    }

    /// The message at the word `at`, which starts as 0 and is moved behind it; bytes of it. `None` where none is complete yet. The
    /// process may have written anything: no length is believed.
    pub fn next(&self, at: &mut usize, into: &mut [u8; LONGEST]) -> Option<usize> {
        // SYNC: the text is there for whoever sees its length.
        let length = self.word(*at)?.load(Ordering::Acquire);
        let length = usize::try_from(length).ok().filter(|length| (1..=LONGEST).contains(length))?;
        let n_words = length.div_ceil(WORD);
        self.word(*at + n_words)?;
        for (idx, part) in into.chunks_mut(WORD).take(n_words).enumerate() {
            let word = self.word(*at + 1 + idx)?.load(Ordering::Relaxed).to_ne_bytes();
            for (to, from) in part.iter_mut().zip(word) {
                *to = from;
            }
        }
        *at += 1 + n_words;
        Some(length)
    }

    /// Messages that found no room.
    #[must_use]
    pub fn dropped(&self) -> u32 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// The word `at`, whatever stands there.
    fn word(&self, at: usize) -> Option<&AtomicU64> {
        #[cfg(not(loom))]
        return self.words.get(at / ROW)?.get(at % ROW);
        #[cfg(loom)]
        return self.words.get(at);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    extern crate std;
    use super::*;
    use std::string::String;
    use std::vec::Vec;

    fn empty() -> Notices {
        Notices {
            taken: AtomicU32::new(0),
            dropped: AtomicU32::new(0),
            words: [const { [const { AtomicU64::new(0) }; ROW] }; ROWS],
        }
    }

    fn all(notices: &Notices) -> Vec<String> {
        let (mut at, mut text) = (0, [0; LONGEST]);
        let mut read =
            || notices.next(&mut at, &mut text).map(|n| String::from_utf8_lossy(&text[..n]).into_owned());
        std::iter::from_fn(&mut read).collect()
    }

    #[test]
    fn messages_are_read_as_they_were_written() {
        let notices = empty();
        assert!(notices.push(b"one") && notices.push(b"exactly8") && notices.push(b""));
        assert_eq!(all(&notices), ["one", "exactly8"]);
    }

    #[test]
    fn what_has_no_room_is_counted_and_what_has_stays() {
        let notices = empty();
        let long = [b'x'; 2 * LONGEST];
        assert!(notices.push(&long) && notices.push(&long));
        assert!(!notices.push(&long) && !notices.push(b"later"));
        assert_eq!(all(&notices).iter().map(String::len).collect::<Vec<_>>(), [LONGEST, LONGEST]);
        assert_eq!(notices.dropped(), 2);
    }

    #[test]
    fn no_length_is_believed() {
        for length in [0, LONGEST as u64 + 1, u64::MAX] {
            let notices = empty();
            notices.words[0][0].store(length, Ordering::Relaxed);
            assert_eq!(all(&notices), [""; 0]);
        }
        let notices = empty();
        let (mut at, mut text) = (WORDS - 1, [0; LONGEST]);
        notices.words[ROWS - 1][ROW - 1].store(9, Ordering::Relaxed);
        assert_eq!(notices.next(&mut at, &mut text), None, "its text would end behind the area");
    }
}
