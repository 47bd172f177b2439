//! What a call that the majority made otherwise is: another call, one too many, one left out, or the same with other arguments.

use super::align::{Difference, Spot, Token, Track};
use super::calls::{CallKind, Reduction, Signature};
use super::findings::Kind;
use super::tracks::Calls;

/// One call where the majority made another: is it the same with other arguments, or was one left out or put in?
///
/// Nobody knows what would have come next on ranks that wait. But a call that others make from the same line, elsewhere
/// in their order, shows that the rank skipped one; and a rank that knows the majority's call from before, but now came
/// with one that no other rank ever made, has one too many.
pub(super) fn changed(
    tracks: &[Calls<'_>],
    difference: &Difference,
    own: &CallKind,
    model: &CallKind,
) -> Kind {
    let (Some(own_spot), Some(model_spot)) = (difference.own, difference.majority) else {
        return Kind::OpMismatch;
    };
    let own_token = tracks[own_spot.track].token(own_spot.position);
    let model_token = tracks[model_spot.track].token(model_spot.position);
    let same_place = own_token.place == model_token.place || own_token.place == 0 || model_token.place == 0;
    let (a, b) = (own.signature.normal(), model.signature.normal());
    if a.op == b.op && same_place {
        return arguments(&own.signature, &model.signature);
    }
    let knows = |track: &Calls<'_>, token: Token| track.knows(token);
    if !same_place {
        let mut others = tracks.iter().enumerate().filter(|(track, _)| *track != own_spot.track);
        if others.any(|(_, track)| knows(track, own_token)) {
            return Kind::MissingCall;
        }
        if knows(&tracks[own_spot.track], model_token) {
            return Kind::ExtraCall;
        }
    }
    if a.op == b.op { arguments(&own.signature, &model.signature) } else { Kind::OpMismatch }
}

/// A call where the majority made another and nothing after it fits: what kind that is, and about how many calls. A rank that came to
/// another line with fewer calls than the others, or after an error that it caught, left some out.
pub(super) fn unpaired(
    tracks: &[Calls<'_>],
    difference: &Difference,
    kind: Kind,
    had_error: bool,
) -> (Kind, u64) {
    let (Some(own), Some(model)) = (difference.own, difference.majority) else { return (kind, 1) };
    if !matches!(kind, Kind::ExtraCall | Kind::MissingCall) {
        return (kind, 1);
    }
    let left = |spot: Spot| tracks[spot.track].n_calls() - spot.position;
    let fewer = left(model).saturating_sub(left(own) - 1);
    match (left(own), left(model)) {
        (1, _) if fewer > 1 || had_error || kind == Kind::MissingCall => {
            (Kind::MissingCall, fewer.max(1) as u64)
        }
        (more, 1) if kind == Kind::ExtraCall => (kind, more as u64),
        _ => (kind, 1),
    }
}

/// Which argument differs; the one that matters most where several do.
fn arguments(own: &Signature, model: &Signature) -> Kind {
    let reduction = |signature: &Signature| match signature.reduction {
        Reduction::Unseen => None,
        known => Some(known),
    };
    if own.datatype != model.datatype {
        Kind::DtypeMismatch
    } else if own.count != model.count {
        Kind::SizeMismatch
    } else if reduction(own) != reduction(model) {
        Kind::RedopMismatch
    } else if own.root != model.root {
        Kind::RootMismatch
    } else if own.captured != model.captured {
        Kind::CaptureMismatch
    } else {
        Kind::RedopMismatch
    }
}
