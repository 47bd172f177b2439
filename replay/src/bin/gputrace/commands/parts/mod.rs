//! What several verbs are made of.

pub(crate) mod beside;
pub(crate) mod left;
pub(crate) mod live;
