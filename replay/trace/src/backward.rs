//! Where in the program an event of PyTorch's backward pass belongs: to the line of the forward pass that it undoes.
//!
//! The backward pass runs in threads of its own, whose stacks name operations but no lines; the trace says for each
//! where its forward operation was called, and where `backward()` was.

use gputrace_schemas::event::{Backward, Frame, FrameId, Stack};
use gputrace_sim::stacks::python_package;

use crate::Definitions;
use crate::owners;

/// The stack that names the program's lines for an event, and what to say beside them.
pub struct Place<'a> {
    /// The event's own stack outside the backward pass.
    pub stack: &'a Stack,
    /// `backward of AddmmBackward0`; empty outside the backward pass.
    pub mark: String,
    /// Where `backward()` was called by another thread, in words; empty where that is not known.
    pub caller: String,
    /// `stack` is not the event's own stack.
    pub is_elsewhere: bool,
}

/// Where an event with this stack belongs.
pub fn place<'a>(definitions: &'a dyn Definitions, stack: &'a Stack) -> Place<'a> {
    let Some(backward) = stack.backward.as_deref() else {
        return Place { stack, mark: String::new(), caller: String::new(), is_elsewhere: false };
    };
    let node = backward.short_node();
    let caller = caller(definitions, backward);
    if let Some(forward) = definitions.stack(backward.forward).filter(|forward| !forward.frames.is_empty()) {
        return Place { stack: forward, mark: format!("backward of {node}"), caller, is_elsewhere: true };
    }
    let mark = if node.is_empty() { "in backward".to_owned() } else { format!("{node} in backward") };
    match definitions.stack(backward.caller).filter(|caller| !caller.frames.is_empty()) {
        Some(stack) => Place { stack, mark, caller, is_elsewhere: true },
        None => Place { stack, mark, caller, is_elsewhere: false },
    }
}

fn caller(definitions: &dyn Definitions, backward: &Backward) -> String {
    let line = definitions.stack(backward.caller).and_then(|stack| python_line(definitions, stack));
    let Some((function, file, line)) = line else { return String::new() };
    let by = if backward.is_caller_inferred { "probably called by" } else { "called by" };
    format!("{by} {function} ({}:{line})", owners::file_name(file))
}

/// The innermost line of the user's Python, else of any Python.
pub fn python_line<'a>(
    definitions: &'a dyn Definitions,
    stack: &'a Stack,
) -> Option<(&'a str, &'a str, u32)> {
    let own = python_lines(definitions, stack).find(|(_, file, _)| python_package(file).is_none());
    own.or_else(|| python_lines(definitions, stack).next())
}

/// Function, file and line of each Python frame, innermost first.
pub fn python_lines<'a>(
    definitions: &'a dyn Definitions,
    stack: &'a Stack,
) -> impl Iterator<Item = (&'a str, &'a str, u32)> {
    let python = |id: &FrameId| match definitions.frame(*id) {
        Some(Frame::Python { function, file, line }) => Some((function.as_str(), file.as_str(), *line)),
        Some(Frame::Native { .. }) | None => None,
    };
    stack.frames.iter().filter_map(python)
}
