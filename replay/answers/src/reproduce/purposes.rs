//! What each tensor was for, from a list of our own words.

use gputrace_analyse::categories::Categories;
use gputrace_analyse::lives::{Life, Lives};
use gputrace_analyse::roles::{Role, Roles, roles};
use gputrace_analyse::story::Story;
use gputrace_sim::ops::{AllocId, Op, OpStream};
use gputrace_trace::source::Source;

/// The role of each allocation of a stream, by its number; empty where blocks and requests are not the same.
#[must_use]
pub fn purposes(source: &Source, stream: &OpStream) -> Vec<Option<&'static str>> {
    let mut all = vec![None; stream.allocations.len()];
    let Some(lived) = Lived::of(source, stream) else { return vec![] };
    for (id, _, role) in lived.requests() {
        let known = Some(role).filter(|role| !matches!(role, Role::Unknown | Role::Before | Role::Kept));
        all[id.0 as usize] = known.map(Role::name);
    }
    all
}

/// The blocks of a device as requests of its stream.
pub(crate) struct Lived {
    lives: Lives,
    /// What all of them are for.
    pub(crate) roles: Roles,
    /// Each request with the index of its life.
    requests: Vec<(AllocId, usize)>,
}

impl Lived {
    /// None where blocks and requests are not the same.
    pub(crate) fn of(source: &Source, stream: &OpStream) -> Option<Lived> {
        let mut lives = Lives::default();
        let story = Story::watched(source, &mut lives);
        let roles = roles(&lives, source.definitions(), &story.ledger.sites, &Categories::default());
        let is_own = |life: &Life| i64::from(life.device) == i64::from(stream.device) && !life.is_from_before;
        let own: Vec<usize> = (0..lives.list.len()).filter(|index| is_own(&lives.list[*index])).collect();
        let asked = stream.ops.iter().filter_map(|op| if let Op::Alloc(id) = op { Some(*id) } else { None });
        let asked: Vec<AllocId> = asked.collect();
        let requests =
            (asked.len() == own.len()).then(|| asked.into_iter().zip(own.iter().copied()).collect())?;
        Some(Lived { lives, roles, requests })
    }

    /// Each request, its block's life and role.
    pub(crate) fn requests(&self) -> impl Iterator<Item = (AllocId, &Life, Role)> {
        self.requests.iter().map(|(id, index)| {
            let role = Role::ALL.get(usize::from(self.roles.of_lives[*index])).copied();
            (*id, &self.lives.list[*index], role.unwrap_or(Role::Unknown))
        })
    }

    /// Each request with the number of its block, in the order of all blocks' births.
    pub(crate) fn births(&self) -> impl Iterator<Item = (AllocId, usize)> {
        self.requests.iter().copied()
    }

    /// Blocks of all devices.
    pub(crate) fn n_blocks(&self) -> usize {
        self.lives.list.len()
    }
}
