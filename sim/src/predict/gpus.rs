//! How many threads a GPU runs at a time, by its name: PyTorch's sums are in as many parts as fill it.

/// Multiprocessors, and threads that each runs at a time: NVIDIA's data sheets, and "Compute Capabilities" in the CUDA C++ Programming
/// Guide. Words of names as the driver has them, where all GPUs with these words have as many.
const KNOWN: &[(&str, u64, u64)] = &[
    ("B200", 148, 2048),
    ("GH200", 132, 2048),
    ("H200", 132, 2048),
    ("H100 PCIe", 114, 2048),
    ("H100 80GB HBM3", 132, 2048),
    ("H100 NVL", 132, 2048),
    ("A100", 108, 2048),
    ("V100", 80, 2048),
    ("L40S", 142, 1536),
    ("L40", 142, 1536),
    ("A40", 84, 1536),
    ("A10G", 80, 1536),
    ("Tesla T4", 40, 1024),
];

/// So many threads at a time: at least, most likely, and at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threads {
    pub(super) least: u64,
    pub(super) likely: u64,
    pub(super) most: u64,
}

impl Default for Threads {
    /// Of a GPU that nothing is known of: of few multiprocessors, of as many as an H100 or H200 has, and of more than any has so far.
    fn default() -> Threads {
        Threads { least: 40 * 2048, likely: 132 * 2048, most: 192 * 2048 }
    }
}

impl Threads {
    /// What follows from them: at least, most likely, and at most.
    pub(super) fn range(self, of: impl Fn(u64) -> u64) -> (u64, u64, u64) {
        let [least, likely, most] = self.each().map(of);
        (least.min(likely).min(most), likely, least.max(likely).max(most))
    }

    /// At least, most likely, and at most.
    pub(super) fn each(self) -> [u64; 3] {
        [self.least, self.likely, self.most]
    }

    /// Of a GPU with this name; a part of one has fewer multiprocessors, and its name says so.
    pub fn of(name: &str) -> Threads {
        let is_part = name.contains("MIG");
        let has_words = |words: &str| {
            let at = name.find(words)?;
            let is_of_a_word = |next: Option<char>| next.is_some_and(char::is_alphanumeric);
            let (before, after) = (name[..at].chars().next_back(), name[at + words.len()..].chars().next());
            Some(!is_of_a_word(before) && !is_of_a_word(after))
        };
        let known = KNOWN.iter().find(|(words, ..)| !is_part && has_words(words) == Some(true));
        known.map_or_else(Threads::default, |(_, multiprocessors, each)| {
            let threads = multiprocessors * each;
            Threads { least: threads, likely: threads, most: threads }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_by_its_name_has_no_range() {
        let likely = |name| (Threads::of(name).least, Threads::of(name).most);
        assert_eq!(likely("NVIDIA H100 80GB HBM3"), (132 * 2048, 132 * 2048));
        assert_eq!(likely("NVIDIA L40S"), (142 * 1536, 142 * 1536));
        for unknown in ["", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A800", "NVIDIA RTX A4000"] {
            assert_eq!(Threads::of(unknown), Threads::default(), "{unknown}");
        }
    }
}
