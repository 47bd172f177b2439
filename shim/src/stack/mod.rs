//! Call stacks. (Placeholder until the unwinder lands.)
use crate::session::Lane;
/// Memory.
pub(crate) struct State;
impl State {
    pub(crate) fn forget(&mut self) {}
}
/// How deep.
pub(crate) enum Depth {
    Owner,
    Full,
    Wanted,
}
pub(crate) fn begin() {}
pub(crate) fn capture(_: &mut Lane, _: Depth) -> u64 {
    0
}
