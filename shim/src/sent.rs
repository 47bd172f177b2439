//! What a thread has told the recorder already, where there is little of it.

/// Numbers of definitions that were sent, one a slot: forgetting one only costs sending it again. Zeroed memory is an
/// empty one.
pub(crate) struct Sent<const N: usize>([u64; N]);

impl<const N: usize> Sent<N> {
    /// Whether the definition with this number, a hash and not 0, was sent.
    pub(crate) fn has(&self, id: u64) -> bool {
        self.0.get(Self::slot(id)) == Some(&id)
    }

    /// It was sent.
    pub(crate) fn add(&mut self, id: u64) {
        if let Some(slot) = self.0.get_mut(Self::slot(id)) {
            *slot = id;
        }
    }

    fn slot(id: u64) -> usize {
        (id ^ id >> 32) as usize % N
    }
}
