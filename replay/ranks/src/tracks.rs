//! What one rank called on one communicator, in the form in which ranks are compared.

use gputrace_schemas::event::Nanos;

use super::align::{LOST, Token, Track};
use super::calls::{CallKind, LOST_CALL, Membership, Sequence};
use super::jobs::Member;

/// The calls of one rank on one communicator.
pub(super) struct Calls<'a> {
    pub(super) member: Member,
    pub(super) membership: &'a Membership,
    pub(super) sequence: Option<&'a Sequence>,
    pub(super) tokens: Vec<Token>,
}

impl Calls<'_> {
    pub(super) fn time(&self, position: usize) -> Nanos {
        self.sequence.and_then(|sequence| sequence.enters.get(position)).copied().unwrap_or_default()
    }

    pub(super) fn on_gpu(&self, position: usize) -> Option<u64> {
        self.sequence?.gpu.get(&(position as u64)).map(|duration| duration.0)
    }

    pub(super) fn kind_id(&self, position: usize) -> u32 {
        self.sequence.and_then(|sequence| sequence.kinds.get(position)).copied().unwrap_or(LOST_CALL)
    }

    pub(super) fn kind(&self, position: usize) -> Option<&CallKind> {
        self.membership.kinds.get(self.kind_id(position) as usize)
    }
}

impl Track for Calls<'_> {
    fn n_calls(&self) -> usize {
        self.sequence.map_or(0, Sequence::len)
    }

    fn token(&self, position: usize) -> Token {
        self.tokens.get(self.kind_id(position) as usize).copied().unwrap_or(Token { call: LOST, place: 0 })
    }

    fn knows(&self, token: Token) -> bool {
        self.tokens.contains(&token)
    }
}
