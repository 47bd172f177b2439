//! Places of the program by number.

/// Index of a place in [`Participant::places`](super::calls::Participant::places); 0 where it is not known.
pub type PlaceId = u32;
