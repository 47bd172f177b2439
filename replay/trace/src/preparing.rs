//! Whether a call stack shows a program that gets ready: loads weights, makes caches, runs once to warm up.
//!
//! Only names tell: loading weights through a buffer, and a leak in a loop, ask for memory in the same way.

use gputrace_schemas::event::{Frame, Stack};

use super::Definitions;

/// First words of names of Python functions, without what encloses them and without `_` in front.
const FIRST: [&str; 8] = ["load", "init", "initialize", "initialise", "setup", "build", "warmup", "warm"];
/// Names that say it in other words: vLLM's (0.6 to 0.33), SGLang's and transformers'.
const NAMES: [&str; 9] = [
    "from_pretrained",
    "profile_run",
    "dummy_run",
    "capture_model",
    "compile_or_warm_up_model",
    "determine_available_memory",
    "determine_num_available_blocks",
    "allocate_kv_cache",
    "allocate_kv_cache_tensors",
];
/// Words of a name that begins so and does more than to get ready: `setup_and_train`, `load_batch`.
const MORE: [&str; 12] =
    ["and", "then", "run", "loop", "train", "fit", "step", "eval", "serve", "batch", "data", "test"];
/// In names of native functions.
const NATIVE: [&str; 6] =
    ["load_model", "model_load", "load_tensors", "load_weights", "loadWeights", "deserializeCudaEngine"];
/// Constructors of PyTorch's modules, and `Module.to`, are in files of this folder.
const MODULES: &str = "/torch/nn/modules/";

/// Whether any function of a stack is one that gets a program ready.
pub fn prepares(definitions: &dyn Definitions, stack: &Stack) -> bool {
    stack.backward.is_none()
        && stack.frames.iter().filter_map(|id| definitions.frame(*id)).any(|frame| match frame {
            Frame::Python { function, file, .. } => python(function, file),
            Frame::Native { function, .. } => NATIVE.iter().any(|name| function.contains(name)),
        })
}

fn python(function: &str, file: &str) -> bool {
    let name = function.rsplit('.').next().unwrap_or(function);
    if matches!(name, "__init__" | "_apply") {
        return file.contains(MODULES);
    }
    let name = name.trim_start_matches('_');
    let mut words = name.split('_');
    let gets_ready = words.next().is_some_and(|first| FIRST.contains(&first));
    NAMES.contains(&name) || gets_ready && !words.any(|word| word.is_empty() || MORE.contains(&word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_functions_say_what_gets_a_program_ready() {
        let is = |function| python(function, "/job/serve.py");
        for function in [
            "load",
            "Worker.load_model",
            "main.<locals>.load_shards",
            "_initialize_kv_caches",
            "warm_up",
            "build_cache",
        ] {
            assert!(is(function), "{function}");
        }
        for function in [
            "__init__",
            "setup_and_train",
            "load_batch",
            "forward",
            "reload",
            "serve",
            "initiate_chat",
            "__init_subclass__",
        ] {
            assert!(!is(function), "{function}");
        }
        assert!(python("Linear.__init__", "/x/torch/nn/modules/linear.py"));
    }
}
