//! Inputs of a step of JAX's that are not donated: old and new state are held together.

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_trace::words::{bytes, count};

pub(super) const CAUSE: Cause = Cause {
    name: "JAX buffers not donated",
    kind: Kind::Peak,
    needs: "a function that runs repeatedly, and whose outputs are at least nine tenths of its arguments in size but reuse none of their memory",
    against: "donated arguments, and outputs that are small compared with what the process holds",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let peak = facts
        .story
        .ledger
        .devices()
        .values()
        .filter_map(|books| Some(books.pjrt.as_ref()?.buffers.peak().0))
        .max()?;
    let steps = facts.story.ledger.executables().iter().filter(|it| it.executions >= 3).filter_map(|it| {
        let (arguments, outputs) = (it.figures.arguments?, it.figures.outputs?);
        let aliased = it.figures.aliased.unwrap_or_default();
        let is_state = outputs.0.saturating_mul(10) >= arguments.0.saturating_mul(9)
            && arguments.0.saturating_mul(10) >= outputs.0.saturating_mul(9);
        let is_much = outputs.0.saturating_mul(4) >= peak && outputs.0 > 0;
        (is_state && is_much && aliased.0.saturating_mul(10) < outputs.0).then_some((it, arguments, outputs))
    });
    let (step, arguments, outputs) = steps.max_by_key(|(.., outputs)| *outputs)?;
    Some(Case {
        what: format!(
            "`{}` takes {} and returns {} in new buffers, {} times, and donates none: old and new are held together",
            step.name,
            bytes(arguments),
            bytes(outputs),
            count(step.executions)
        ),
        site: step.site.map(|site| facts.site(site)).unwrap_or_default(),
        bytes: Bytes(outputs.0.min(arguments.0)),
        sure: "certain: the compiler's own figures for the function".into(),
        fix: Fix::words(
            "donate what the step replaces: `jax.jit(step, donate_argnums=(0, 1))` (parameters and state)",
            format!("saves up to {}", bytes(outputs)),
        ),
        verb: "report --all",
    })
}
