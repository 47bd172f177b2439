//! What one rank called on one communicator, in the form in which ranks are compared.

use gputrace_schemas::event::Nanos;

use super::align::{LOST, Token, Track};
use super::calls::{CallKind, LOST_CALL, Lane, Membership, Sequence};
use super::jobs::Member;
use rustc_hash::FxHashSet;

/// The calls of one rank on one communicator.
pub(super) struct Calls<'a> {
    pub(super) member: Member,
    pub(super) membership: &'a Membership,
    pub(super) sequence: Option<&'a Sequence>,
    pub(super) tokens: Vec<Token>,
    /// The first call that all ranks know: earlier ones are not compared.
    pub(super) from: usize,
    /// Tokens of its calls from there on; `None` is all of `tokens`. What one trace has of an earlier time is no evidence about others.
    known: Option<FxHashSet<Token>>,
}

impl<'a> Calls<'a> {
    /// Those of a lane, of which the ones before `from` are not compared. `tokens` are those of the membership's kinds of calls.
    pub(super) fn new(
        member: Member,
        membership: &'a Membership,
        (lane, from): (Lane, usize),
        tokens: Vec<Token>,
    ) -> Calls<'a> {
        let sequence = membership.lane(lane);
        let known = (from > 0).then(|| {
            let compared = sequence.into_iter().flat_map(Sequence::calls).filter(|(n, ..)| *n >= from);
            compared.filter_map(|(_, kind, _)| tokens.get(kind as usize).copied()).collect()
        });
        Calls { member, membership, sequence, tokens, from, known }
    }

    pub(super) fn time(&self, position: usize) -> Nanos {
        self.sequence.and_then(|sequence| sequence.enter(position)).unwrap_or_default()
    }

    pub(super) fn on_gpu(&self, position: usize) -> Option<u64> {
        self.sequence?.gpu.get(&(position as u64)).map(|duration| duration.0)
    }

    pub(super) fn kind_id(&self, position: usize) -> u32 {
        self.sequence.and_then(|sequence| sequence.kind(position)).unwrap_or(LOST_CALL)
    }

    pub(super) fn kind(&self, position: usize) -> Option<&CallKind> {
        self.membership.kinds.get(self.kind_id(position) as usize)
    }
}

impl Track for Calls<'_> {
    fn n_calls(&self) -> usize {
        self.sequence.map_or(0, Sequence::len)
    }

    fn start(&self) -> usize {
        self.sequence.map_or(0, Sequence::start)
    }

    fn token(&self, position: usize) -> Token {
        self.tokens.get(self.kind_id(position) as usize).copied().unwrap_or(Token { call: LOST, place: 0 })
    }

    fn knows(&self, token: Token) -> bool {
        self.known.as_ref().map_or_else(|| self.tokens.contains(&token), |known| known.contains(&token))
    }
}
