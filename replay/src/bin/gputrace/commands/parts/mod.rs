//! What several verbs are made of.

pub(crate) mod live;
