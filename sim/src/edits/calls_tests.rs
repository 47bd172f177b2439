//! Forward passes as lists of requests, each with the calls that lead to it.

use std::sync::Arc;

use super::calls;
use crate::stacks::{Frame, StackId, Stacks};

/// Each request is a line such as `Net:3 Block:10 conv`: modules and the lines of their code, from the outermost, and an operation. A wrapper
/// stands around the code of `@Block`. Returns
/// classes and layers, those of a loop together, each by its first request and the one after its last.
fn layers(requests: &str) -> Vec<String> {
    let (mut frames, mut lists): (Vec<Frame>, Vec<Box<[u32]>>) = (vec![], vec![]);
    let mut of = vec![];
    for request in requests.lines().map(str::trim).filter(|it| !it.is_empty()) {
        let mut list = vec![];
        for word in request.split(' ') {
            let own = match word.split_once(':') {
                Some((class, line)) if class.starts_with('@') => vec![
                    frame("Module._call_impl", "/v/torch/nn/modules/module.py", 1),
                    frame("forward_with_checkpointing", "/v/transformers/modeling_layers.py", 124),
                    frame(
                        &format!("{}.forward", &class[1..]),
                        "/job/model.py",
                        line.parse().expect("a line"),
                    ),
                ],
                Some((class, line)) => {
                    let file = match class {
                        "Sequential" => "/v/torch/nn/modules/container.py",
                        _ => "/job/model.py",
                    };
                    vec![
                        frame("Module._call_impl", "/v/torch/nn/modules/module.py", 1),
                        frame(&format!("{class}.forward"), file, line.parse().expect("a line")),
                    ]
                }
                None => vec![
                    frame("Module._call_impl", "/v/torch/nn/modules/module.py", 1),
                    frame(word, "/v/torch/nn/modules/linear.py", 1),
                ],
            };
            for it in own {
                let known = frames.iter().position(|other| *other == it);
                let number = known.unwrap_or(frames.len());
                if known.is_none() {
                    frames.push(it);
                }
                list.insert(0, number as u32);
            }
        }
        let list = list.into_boxed_slice();
        let known = lists.iter().position(|other| *other == list).unwrap_or(lists.len());
        if known == lists.len() {
            lists.push(list);
        }
        of.push(StackId(known as u32));
    }
    let stacks = Stacks { frames, lists, ..Stacks::default() };
    let found = calls::of(&stacks, &of, &vec![1; of.len()]);
    let range = |it: &std::ops::Range<usize>| format!(" {}..{}", it.start, it.end);
    found.iter().map(|it| it.class.clone() + &it.layers.iter().map(range).collect::<String>()).collect()
}

fn frame(name: &str, file: &str, line: u32) -> Frame {
    Frame { name: Arc::from(name), file: Arc::from(file), line }
}

#[test]
fn layers_are_the_blocks_of_stages_also_where_a_stage_has_one() {
    let found = layers(
        "Net:1 conv
         Net:2 Stage:5 Block:10 conv
         Net:2 Stage:5 Block:11 short
         Net:2 Stage:5 Block:12 conv
         Net:3 Stage:5 Block:10 conv
         Net:3 Stage:5 Block:11 short
         Net:3 Stage:5 Block:12 conv
         Net:3 Stage:5 Block:10 conv
         Net:3 Stage:5 Block:12 conv
         Net:4 head",
    );
    assert_eq!(found, ["Block 1..4", "Block 4..7 7..9"]);
}

#[test]
fn what_the_loop_does_between_layers_is_in_no_layer() {
    let found = layers(
        "Net:1 enter
         Net:3 resize
         Net:4 Block:10 conv
         Net:4 Block:11 conv
         Net:3 resize
         Net:4 Block:10 conv
         Net:4 Block:11 conv
         Net:5 leave",
    );
    assert_eq!(found, ["Block 2..4 5..7"]);
}

#[test]
fn a_layer_may_be_written_in_one_line() {
    let found = layers(
        "Net:1 enter
         Net:4 Block:10 conv
         Net:4 Block:10 relu
         Net:4 Block:10 conv
         Net:4 Block:10 relu
         Net:4 Block:10 conv
         Net:4 Block:10 relu
         Net:4 Block:11 pool
         Net:5 leave",
    );
    assert_eq!(found, ["Block 1..3 3..5 5..8"]);
    // The block has a loop of its own: it is one call.
    let found = layers(
        "Net:1 enter
         Net:4 Block:10 Sequential:5 conv
         Net:4 Block:10 Sequential:5 relu
         Net:4 Block:10 Sequential:5 conv
         Net:4 Block:10 Sequential:5 relu
         Net:5 leave",
    );
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn containers_and_norms_are_no_layers() {
    let found = layers(
        "Net:1 Sequential:5 Sequential:5 conv
         Net:1 Sequential:5 Sequential:5 relu
         Net:1 Sequential:5 pool
         Net:1 Sequential:5 Sequential:5 conv
         Net:1 Sequential:5 Sequential:5 relu
         Net:2 Norm:20
         Net:2 Norm:21
         Net:2 Norm:20
         Net:2 Norm:21",
    );
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn a_loop_that_each_call_runs_through_as_often_is_within_the_call() {
    let judge = "Net:4 Judge:10 conv
         Net:4 Judge:10 relu
         Net:4 Judge:10 conv
         Net:4 Judge:10 relu
         Net:4 Judge:12 leave
         ";
    assert_eq!(layers(&format!("Net:1 enter\n{}", judge.repeat(3))), ["Judge 1..6 6..11 11..16"]);
}

#[test]
fn wrappers_of_a_module_are_not_its_code() {
    let found = layers(
        "Net:4 @One:10 conv
         Net:4 @One:10 relu
         Net:4 @One:10 conv
         Net:4 @One:10 relu
         Net:5 @Other:20 conv
         Net:5 @Other:21 conv
         Net:5 @Other:20 conv
         Net:5 @Other:21 conv",
    );
    assert_eq!(found, ["One 0..2 2..4", "Other 4..6 6..8"]);
}
