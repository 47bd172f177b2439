//! The program's own lines of stacks.

use std::collections::BTreeMap;

use gputrace_schemas::event::StackId;
use gputrace_sim::stacks::python_package;
use rustc_hash::FxHashMap;

use gputrace_trace::Definitions;
use gputrace_trace::backward::python_lines;

/// The program's lines outside of the outermost model of a stack, and the line of that model.
pub(super) fn model_line(definitions: &dyn Definitions, id: StackId) -> Option<(String, String)> {
    let mut lines: Vec<(&str, &str, u32)> = python_lines(definitions, definitions.stack(id)?).collect();
    lines.reverse();
    let is_call = |(function, file, _): &(&str, &str, u32)| {
        file.ends_with("/torch/nn/modules/module.py") && function.ends_with("_call_impl")
    };
    let outermost = lines.iter().position(is_call)?;
    let (_, file, line) = lines[outermost..].iter().find(|line| !is_call(line))?;
    let own: Vec<String> = lines[..outermost].iter().copied().filter_map(own_line).collect();
    Some((own.join(", "), format!("{file}:{line}")))
}

/// The program's own lines of a stack, innermost first.
pub(super) fn own_path(definitions: &dyn Definitions, id: StackId) -> String {
    let Some(stack) = definitions.stack(id) else { return String::new() };
    let own: Vec<String> = python_lines(definitions, stack).filter_map(own_line).collect();
    own.join(", called from ")
}

/// The innermost lines of the program that are on the stacks of three quarters of these bytes, so many at most.
pub(super) fn under(definitions: &dyn Definitions, stacks: &FxHashMap<StackId, u64>, most: usize) -> String {
    let all: u64 = stacks.values().sum();
    // With the depth from the outermost line, which is the same for all that it is on.
    let mut lines: BTreeMap<(usize, String), u64> = BTreeMap::new();
    for (stack, bytes) in stacks {
        let Some(stack) = definitions.stack(*stack) else { continue };
        let mut own: Vec<String> = python_lines(definitions, stack).filter_map(own_line).collect();
        if let Some(caller) = stack.backward.as_ref().filter(|_| own.is_empty())
            && let Some(caller) = definitions.stack(caller.caller)
        {
            own = python_lines(definitions, caller).filter_map(own_line).collect();
        }
        for (depth, line) in own.into_iter().rev().enumerate() {
            *lines.entry((depth, line)).or_default() += bytes;
        }
    }
    let is_most = |(_, bytes): &(_, u64)| bytes.saturating_mul(4) >= all.saturating_mul(3);
    let of_most = lines.into_iter().rev().filter(is_most).take(most).map(|((_, line), _)| line);
    of_most.collect::<Vec<_>>().join(", called from ")
}

/// The program's innermost lines of a stack, so many at most.
pub(crate) fn own_lines(definitions: &dyn Definitions, id: StackId, most: usize) -> String {
    let Some(stack) = definitions.stack(id) else { return String::new() };
    let own: Vec<String> = python_lines(definitions, stack).filter_map(own_line).take(most).collect();
    own.join(", called from ")
}

/// The program's line that calls `torch.utils.checkpoint`, if a stack is of a function that runs there.
pub(super) fn checkpointed_at(definitions: &dyn Definitions, id: StackId) -> Option<String> {
    let lines: Vec<(&str, &str, u32)> = python_lines(definitions, definitions.stack(id)?).collect();
    let outermost = lines.iter().rposition(|(_, file, _)| file.ends_with("/torch/utils/checkpoint.py"))?;
    lines[outermost + 1..].iter().copied().find_map(own_line)
}

/// A line in words, if it is of the program and not of a package.
fn own_line((function, file, line): (&str, &str, u32)) -> Option<String> {
    python_package(file).is_none().then(|| format!("{function} ({file}:{line})"))
}
