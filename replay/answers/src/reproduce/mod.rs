//! `gputrace reproduce`: the smallest program that fails in the same way, on PyTorch alone.
//!
//! ```text
//!  requests of a trace ── recorded.rs ──> Program ── shrink.rs ──> Program ── python.rs ──> repro.py
//!                                            └── goal.rs: the simulator says whether it is still the same
//! ```

mod answer;
pub mod cuda;
mod goal;
mod program;
mod purposes;
mod python;
mod recorded;
mod shrink;

use goal::Judge;
use gputrace_sim::ops::OpStream;
use gputrace_sim::whatif::Laboratory;

pub use answer::{json, section};
pub use goal::{Goal, Reasons};
pub use program::{Figures, PoolKind, Program, Step, Tensor};
pub(crate) use purposes::Lived;
pub use purposes::purposes;
pub use python::python;
pub use recorded::Recorded;
pub use shrink::{Progress, Watcher};

/// A program that comes to what was recorded.
pub struct Reproduction {
    /// The program.
    pub program: Program,
    /// Its figures.
    pub figures: Figures,
    /// The kept part.
    pub goal: Goal,
    /// The recorded facts.
    pub recorded: Recorded,
    /// What all recorded requests come to in the simulator.
    pub whole: Figures,
    /// Requests of the recording, up to the moment that matters.
    pub n_before: usize,
    /// Programs that were tried.
    pub n_tried: u64,
    /// Time was up before the program was as small as it gets.
    pub is_cut_short: bool,
    /// The program comes to the same whichever way device addresses go.
    pub is_sure: bool,
    /// Parts of the recording that the program cannot repeat.
    pub notes: Vec<String>,
}

impl Reproduction {
    /// What all recorded requests come to in the simulator is what was recorded, to the byte.
    #[must_use]
    pub fn is_as_recorded(&self) -> bool {
        let reserved = match self.goal {
            Goal::Refusal(_) => self.whole.at_refusal.map_or(0, |(reserved, _)| reserved),
            Goal::Peak { .. } => self.whole.peak_reserved,
        };
        reserved == self.recorded.reserved
    }
}

/// Writes the program of a device's requests.
///
/// # Errors
/// Why the requests cannot be replayed, or do not come to what was recorded.
pub fn reproduce(
    stream: &OpStream,
    torch_version: Option<(u8, u8)>,
    roles: &[Option<&'static str>],
    watcher: Option<&mut Watcher<'_>>,
) -> Result<Reproduction, String> {
    if !stream.settings.is_torch() {
        return Err("its requests are not PyTorch's".into());
    }
    let version = match torch_version.or(stream.settings.torch_version) {
        Some(version) => version,
        None => Laboratory::new(stream)?.self_check(None).torch_version,
    };
    let mut whole = recorded::whole(stream, version, roles)?;
    let n_before = whole.program.n_requests();
    let (program, figures) = (whole.program, whole.figures);
    let (program, figures, n_tried, is_cut_short) = match watcher {
        Some(watcher) => {
            let found = shrink::shrunk(program, figures, &whole.goal, &mut whole.judge, watcher);
            (found.program, found.figures, found.n_tried, found.is_cut_short)
        }
        None => (shrink::renumbered(program), figures, 0, false),
    };
    let is_sure = Judge::new().meets(&program, &whole.goal).is_some();
    Ok(Reproduction {
        program,
        figures,
        goal: whole.goal,
        recorded: whole.recorded,
        whole: whole.figures,
        n_before,
        n_tried,
        is_cut_short,
        is_sure,
        notes: whole.notes,
    })
}
