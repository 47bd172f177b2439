//! What a program must still come to, however small it has become.
//!
//! A refusal is the same refusal while the same request fails for the same reasons. Reasons are questions that the simulator
//! answers: would it have been served if memory were in one piece, if there were one stream, one pool, nothing pending, or if
//! segments could grow? A peak is the same while reserved and allocated bytes are.

use gputrace_sim::addresses::Direction;

use super::program::{Figures, PoolKind, Program, Step};

/// The failure or peak to reproduce.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Goal {
    /// The last step is refused.
    Refusal(Reasons),
    /// The most that is reserved and allocated, bytes.
    Peak {
        /// Reserved.
        reserved: u64,
        /// Allocated.
        allocated: u64,
    },
}

/// Why a request fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reasons {
    /// What is reserved and not in use would have been enough, in one piece.
    pub is_fragmented: bool,
    /// It fails a second time, when nothing is pending and all that could be freed has been.
    pub fails_again: bool,
    /// It fails where there is one stream.
    pub fails_on_one_stream: bool,
    /// It fails where there is one pool.
    pub fails_in_one_pool: bool,
    /// It fails where no stream delays the reuse of memory.
    pub fails_at_once: bool,
    /// It fails with segments that grow; none where they do, or where the release has none.
    pub fails_expandable: Option<bool>,
}

impl Reasons {
    /// No other allocator, and no other use of this one, would have served it.
    pub fn is_no_fault(&self) -> bool {
        let fails =
            self.fails_again && self.fails_on_one_stream && self.fails_in_one_pool && self.fails_at_once;
        fails && !self.is_fragmented && self.fails_expandable != Some(false)
    }

    /// In words, for the head of the program; the first that holds is the one to look at.
    pub fn words(&self) -> &'static str {
        match self {
            Reasons { fails_again: false, .. } => {
                "the same request succeeds when repeated: a suitable block became free while it failed"
            }
            Reasons { fails_at_once: false, .. } => {
                "the request would succeed if no other stream delayed the reuse of freed memory"
            }
            Reasons { fails_on_one_stream: false, .. } => {
                "the request would succeed if all tensors were on one stream"
            }
            Reasons { fails_in_one_pool: false, .. } => "the request would succeed without private pools",
            Reasons { is_fragmented: true, fails_expandable: Some(false), .. } => {
                "enough is reserved and free, but not contiguous: expandable_segments:True serves it"
            }
            Reasons { is_fragmented: true, .. } => "enough is reserved and free, but not contiguous",
            Reasons { fails_expandable: Some(false), .. } => {
                "less than the request is reserved and free, but expandable_segments:True serves it"
            }
            Reasons { .. } => "less than the request is reserved and free",
        }
    }
}

/// Judges programs by running them in the simulator.
pub(super) struct Judge {
    /// The ways in which addresses may go: both, unless the recorded program itself depends on them.
    pub(super) directions: Vec<Direction>,
    /// Steps that were simulated.
    pub(super) n_steps: u64,
}

impl Judge {
    /// One that tries both directions.
    pub(super) fn new() -> Judge {
        Judge { directions: vec![Direction::Ascending, Direction::Descending], n_steps: 0 }
    }

    /// What a program comes to; none where that depends on which way addresses go.
    pub(super) fn figures(&mut self, program: &Program) -> Option<Figures> {
        let mut found: Option<Figures> = None;
        for direction in self.directions.clone() {
            self.n_steps += program.steps.len() as u64;
            let figures = program.simulated(direction);
            if found.is_some_and(|other| Figures { n_ties: 0, ..other } != Figures { n_ties: 0, ..figures }) {
                return None;
            }
            found = Some(figures);
            if figures.n_ties == 0 {
                break;
            }
        }
        found.filter(|figures| !figures.is_undefined)
    }

    /// What a program comes to that is served and refused step by step as it says; none where it is not.
    pub(super) fn as_written(&mut self, program: &Program) -> Option<Figures> {
        let n_refused = program.steps.iter().filter(|step| matches!(step, Step::Refused(_))).count() as u64;
        self.figures(program).filter(|it| !it.is_cut_short && it.n_refused == n_refused)
    }

    /// Whether a program comes to what is wanted, and its figures if it does.
    pub(super) fn meets(&mut self, program: &Program, goal: &Goal) -> Option<Figures> {
        let figures = self.as_written(program)?;
        match goal {
            Goal::Peak { reserved, allocated } => {
                let is_same = (figures.peak_reserved, figures.peak_allocated) == (*reserved, *allocated);
                is_same.then_some(figures)
            }
            Goal::Refusal(reasons) => {
                // The cheapest question first.
                let is_fragmented = is_fragmented(program, &figures)?;
                let is_same = is_fragmented == reasons.is_fragmented && self.reasons(program)? == *reasons;
                is_same.then_some(figures)
            }
        }
    }

    /// Why the last step fails; none where it is none that does.
    pub(super) fn reasons(&mut self, program: &Program) -> Option<Reasons> {
        let Some(Step::Refused(last)) = program.steps.last().copied() else { return None };
        let figures = self.as_written(program)?;
        let mut fails = |variant: &Program| {
            let found = variant.simulated(Direction::Ascending);
            self.n_steps += variant.steps.len() as u64;
            // Where an earlier request fails, too, nothing has become better.
            found.is_cut_short || found.n_refused == n_refusals(variant)
        };
        let is_on_streams = program.tensors.iter().any(|tensor| tensor.stream != 0);
        let is_in_pools = program.tensors.iter().any(|tensor| tensor.pool != 0);
        let is_delayed = program.steps.iter().any(|step| matches!(step, Step::Drop(_)));
        let again = {
            let mut again = program.clone();
            again.steps.push(Step::Refused(last));
            fails(&again)
        };
        let on_one_stream = !is_on_streams || fails(&on_one_stream(program));
        let in_one_pool = !is_in_pools || fails(&in_one_pool(program));
        let at_once = !is_delayed || fails(&at_once(program));
        let can_expand = program.profile.version >= (2, 1) && !program.options.expandable_segments;
        let fails_expandable = can_expand.then(|| {
            let mut expandable = program.clone();
            expandable.options.expandable_segments = true;
            fails(&expandable)
        });
        Some(Reasons {
            is_fragmented: is_fragmented(program, &figures)?,
            fails_again: again,
            fails_on_one_stream: on_one_stream,
            fails_in_one_pool: in_one_pool,
            fails_at_once: at_once,
            fails_expandable,
        })
    }
}

fn n_refusals(program: &Program) -> u64 {
    program.steps.iter().filter(|step| matches!(step, Step::Refused(_))).count() as u64
}

/// What is reserved and not in use would have been enough for the last request.
fn is_fragmented(program: &Program, figures: &Figures) -> Option<bool> {
    let last = program.steps.last()?.tensor()?;
    let (reserved, allocated) = figures.at_refusal?;
    Some(reserved - allocated.min(reserved) >= program.tensors[last as usize].bytes)
}

/// The same with every tensor on the default stream.
pub(super) fn on_one_stream(program: &Program) -> Program {
    let mut other = program.clone();
    other.tensors.iter_mut().for_each(|tensor| tensor.stream = 0);
    other
}

/// The same with every tensor in the default pool.
pub(super) fn in_one_pool(program: &Program) -> Program {
    let mut other = program.clone();
    other.tensors.iter_mut().for_each(|tensor| tensor.pool = 0);
    other.steps.retain(|step| !matches!(step, Step::Release(_)));
    other.pools.truncate(1);
    other.pools.resize(1, PoolKind::Graph);
    other
}

/// The same where no stream delays the reuse of memory.
pub(super) fn at_once(program: &Program) -> Program {
    let mut other = program.clone();
    other.steps.retain(|step| !matches!(step, Step::Done(_)));
    other.steps.iter_mut().for_each(|step| {
        if let Step::Drop(tensor) = *step {
            *step = Step::Free(tensor);
        }
    });
    other
}
