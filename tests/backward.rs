//! The backward pass of the real PyTorch: each allocation is told with the operation, its line of the forward pass, and the line that called
//! `backward()`, as PyTorch's own anomaly mode says them.

use std::collections::{HashMap, HashSet};
use std::io::{self, Write};
use std::path::Path;
use std::process::Command;

use gputrace_schemas::event::{Backward, Event, EventKind, Frame, StackId};
use gputrace_schemas::reader::Trace;
use gputrace_tests::recorded::{self, Folder};

const PROGRAM: &str = "torch_backward.py";

/// What PyTorch says of an operation, by the bytes that only its gradient takes.
struct Operation {
    node: String,
    line: u32,
    caller: Option<u32>,
}

#[test]
fn backward_allocations_name_the_forward_line_and_the_caller_with_all_stacks() {
    check("all");
}

#[test]
fn backward_allocations_name_the_forward_line_and_the_caller_with_python_stacks() {
    check("python");
}

fn check(stacks: &str) {
    let Some(python) = std::env::var_os("GPUTRACE_PYTHON") else {
        let text = "skipped: GPUTRACE_PYTHON does not name a Python that has PyTorch for CUDA";
        let _ = writeln!(io::stderr(), "{text}");
        return;
    };
    let folder = Folder::new(Path::new(env!("CARGO_TARGET_TMPDIR")), &format!("backward-{stacks}"));
    let mut command = Command::new(python);
    command
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("programs").join(PROGRAM))
        .env("LD_LIBRARY_PATH", fake_cuda::library_dir())
        .env("GPUTRACE_STACKS", stacks);
    recorded::preload(&mut command, &folder);
    let output = command.output().expect("GPUTRACE_PYTHON can be run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let operations = operations(&said);
    let outside: HashSet<u64> =
        said["outside"].as_array().expect("a list").iter().filter_map(serde_json::Value::as_u64).collect();
    assert_eq!(outside.len(), 30, "{said}");
    let trace = &folder.traces(1)[0];
    let notes: Vec<_> = trace.events().filter_map(note).filter(|note| note.starts_with("torch.")).collect();
    assert_eq!(notes, ["torch.requests=seen", "torch.backward=seen"]);

    let (mut seen, mut seen_outside) = (HashSet::new(), 0);
    for event in trace.events() {
        let EventKind::BlockAlloc(block) = event.kind else { continue };
        if block.requested.is_some_and(|bytes| outside.contains(&bytes.0)) {
            seen_outside += 1;
            assert!(trace.stack(event.stack).expect("a stack").backward.is_none(), "{:?}", block.requested);
        }
        let bytes = block.requested.map_or(0, |bytes| bytes.0);
        let Some(operation) = operations.get(&bytes) else { continue };
        let stack = trace.stack(event.stack).expect("a stack");
        // What the forward pass allocates has the same size.
        let Some(backward) = stack.backward.as_deref().filter(|it| it.short_node() != "AccumulateGrad")
        else {
            continue;
        };
        seen.insert(bytes);
        let told = (node(backward), line(trace, backward.forward), line(trace, backward.caller));
        let is_python = ["TwiceBackward", "OnCallerBackward"].contains(&operation.node.as_str());
        let expected = if is_python { "PyNode" } else { &operation.node };
        assert_eq!(told, (expected, Some(operation.line), operation.caller), "{:?}", block.requested);
        assert!(!backward.is_caller_inferred, "only one thread was inside of backward()");
    }
    assert_eq!(seen_outside, outside.len());
    // Of each at least the gradient.
    let mut missing = operations.iter().filter(|(bytes, _)| !seen.contains(bytes));
    assert!(missing.next().is_none(), "nothing was allocated in one of {} operations", operations.len());
}

fn note(event: Event) -> Option<String> {
    if let EventKind::Note(text) = event.kind { Some(text) } else { None }
}

fn operations(said: &serde_json::Value) -> HashMap<u64, Operation> {
    let number = |value: &serde_json::Value| value.as_u64().expect("a number");
    let operation = |value: &serde_json::Value| {
        let node = value["node"].as_str().expect("a name").to_owned();
        let line = number(&value["line"]) as u32;
        let caller = value["caller"].as_u64().map(|line| line as u32);
        (number(&value["bytes"]), Operation { node, line, caller })
    };
    let operations: HashMap<_, _> =
        said["operations"].as_array().expect("a list").iter().map(operation).collect();
    assert_eq!(operations.len(), 42, "{said}");
    operations
}

fn node(backward: &Backward) -> &str {
    backward.short_node()
}

/// The innermost line of the program, leaving out the function that asks PyTorch.
fn line(trace: &Trace, stack: StackId) -> Option<u32> {
    trace.stack_frames(stack).find_map(|frame| match frame {
        Frame::Python { function, file, line } if file.ends_with(PROGRAM) && !function.ends_with("told") => {
            Some(*line)
        }
        Frame::Python { .. } | Frame::Native { .. } => None,
    })
}
