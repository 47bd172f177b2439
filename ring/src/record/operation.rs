//! Which forward operation of PyTorch's a record is about.

/// Names a forward operation of PyTorch's, in one word: the thread in the upper 24 bits, its number in the others.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Operation {
    /// PyTorch's number of the thread that called it, from 1.
    pub thread: u64,
    /// The thread's number of the call; `None` for an operation that undoes none.
    pub sequence: Option<u64>,
}

impl Operation {
    const SEQUENCE_BITS: u32 = 40;
    const NONE: u64 = (1 << Operation::SEQUENCE_BITS) - 1;

    /// As one word, never 0; `None` where thread or number are larger than any process will have.
    #[inline]
    #[must_use]
    pub fn encode(self) -> Option<u64> {
        let sequence = self.sequence.unwrap_or(Operation::NONE);
        let is_sound =
            (1..1 << 24).contains(&self.thread) && (sequence < Operation::NONE || self.sequence.is_none());
        is_sound.then_some(self.thread << Operation::SEQUENCE_BITS | sequence)
    }

    /// From the word; `None` when it is that of no operation.
    #[inline]
    #[must_use]
    pub fn decode(word: u64) -> Option<Operation> {
        let (thread, sequence) = (word >> Operation::SEQUENCE_BITS, word & Operation::NONE);
        let sequence = (sequence != Operation::NONE).then_some(sequence);
        (thread != 0).then_some(Operation { thread, sequence })
    }
}
