//! The backward pass of the real PyTorch (`GPUTRACE_PYTHON` names a Python that has it, a build for CUDA): each allocation is told with the operation, its line of the forward pass, and the line that called
//! `backward()`, as PyTorch's own anomaly mode says them.

use gputrace_skip::skip;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
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

/// The first and the last release of each layout that `shim/src/backward.rs` knows, and what holds nodes there.
const LAYOUTS: [(&str, &str, &str); 4] = [
    ("2.1.2", "std::enable_shared_from_this<Node>", "std::shared_ptr<Node>"),
    ("2.12.1", "std::enable_shared_from_this<Node>", "std::shared_ptr<Node>"),
    ("2.13.0", "c10::intrusive_ptr_target", "c10::intrusive_ptr<Node>"),
    ("2.15.0", "c10::intrusive_ptr_target", "c10::intrusive_ptr<Node>"),
];

#[test]
fn nodes_are_held_and_laid_out_as_the_headers_of_the_releases_say() {
    for (release, base, pointer) in LAYOUTS {
        let Some(folder) = headers(release) else { return };
        let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap_or_default();
        let text = read("node.h") + &read("function.h");
        let class = text.lines().find(|line| line.starts_with("struct TORCH_API Node :")).unwrap_or_default();
        assert!(class.contains(base), "{release}: {class}");
        assert!(text.contains(&format!("{pointer} get_current_node();")), "{release}");
        assert!(read("engine.h").contains(&format!("{pointer} graph_root,")), "{release}");
        // Its own first members, one line each: two numbers, flags that share a word, and a number.
        let member = |line: &&str| line.starts_with("  ") && !line.starts_with("   ") && line.ends_with(';');
        let members = text.lines().filter(member).skip_while(|line| !line.ends_with(" sequence_nr_;"));
        let members: Vec<&str> = members.take_while(|line| !line.contains(" next_edges_")).collect();
        let (first, rest) = members.split_at(2);
        let first = first.iter().map(|line| line.trim().trim_start_matches("const ")).collect::<Vec<_>>();
        assert_eq!(first, ["uint64_t sequence_nr_;", "uint64_t topological_nr_ = 0;"], "{release}");
        let n_flags = rest.iter().take_while(|line| line.contains("bool ")).count();
        assert!((1..=8).contains(&n_flags), "{release}: {members:#?}");
        assert_eq!(rest[n_flags], "  uint64_t thread_id_ = 0;", "{release}");
    }
}

/// The headers of autograd, from the release's wheel; `None`, said, where PyPI cannot be reached.
fn headers(release: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("autograd-{release}"));
    let inside = "torch/include/torch/csrc/autograd";
    if !root.join(inside).exists() {
        let status = Command::new("python3")
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("wheel.py"))
            .arg(format!("torch=={release}"))
            .arg(&root)
            .args(["node.h", "function.h", "engine.h"].map(|name| format!("{inside}/{name}")))
            .status();
        if !status.as_ref().is_ok_and(std::process::ExitStatus::success) {
            skip(&format!("headers of PyTorch {release}"), format!("{status:?}"));
            return None;
        }
    }
    Some(root.join(inside))
}

fn check(stacks: &str) {
    let Some(python) = std::env::var_os("GPUTRACE_PYTHON") else {
        return skip(
            "the backward pass of real PyTorch",
            "GPUTRACE_PYTHON does not name a Python that has it, for CUDA",
        );
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
    assert_eq!(notes, ["torch.requests=seen", "torch.pools=seen", "torch.backward=seen"]);

    let (mut seen, mut seen_outside) = (HashSet::new(), 0);
    for event in trace.events() {
        let EventKind::BlockAlloc(block) = event.kind else { continue };
        if block.requested.is_some_and(|bytes| outside.contains(&bytes.0)) {
            seen_outside += 1;
            assert!(trace.stack(event.stack).expect("a stack").backward.is_none(), "{:?}", block.requested);
            let has_native =
                trace.stack_frames(event.stack).any(|frame| matches!(frame, Frame::Native { .. }));
            assert_eq!(has_native, stacks == "all", "{:?}", block.requested);
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
