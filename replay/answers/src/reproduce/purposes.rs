//! What each tensor was for, from a list of our own words.

use gputrace_analyse::categories::Categories;
use gputrace_analyse::lives::Lives;
use gputrace_analyse::roles::{Role, roles};
use gputrace_analyse::story::Story;
use gputrace_sim::ops::{Op, OpStream};
use gputrace_trace::source::Source;

/// The role of each allocation of a stream, by its number; empty where blocks and requests are not the same.
#[must_use]
pub fn purposes(source: &Source, stream: &OpStream) -> Vec<Option<&'static str>> {
    let mut lives = Lives::default();
    let story = Story::watched(source, &mut lives);
    let found = roles(&lives, source.definitions(), &story.ledger.sites, &Categories::default());
    let device = |it: i16| i64::from(it) == i64::from(stream.device);
    let own = lives.list.iter().zip(&found.of_lives);
    let own: Vec<u16> =
        own.filter(|(life, _)| device(life.device) && !life.is_from_before).map(|(_, role)| *role).collect();
    let asked =
        stream.ops.iter().filter_map(|op| if let Op::Alloc(id) = op { Some(id.0 as usize) } else { None });
    let asked: Vec<usize> = asked.collect();
    if asked.len() != own.len() {
        return vec![];
    }
    let mut all = vec![None; stream.allocations.len()];
    for (id, role) in asked.into_iter().zip(own) {
        let role = Role::ALL.get(usize::from(role)).copied();
        all[id] =
            role.filter(|role| !matches!(role, Role::Unknown | Role::Before | Role::Kept)).map(Role::name);
    }
    all
}
