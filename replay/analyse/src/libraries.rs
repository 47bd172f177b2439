//! What libraries themselves offer against memory that their code requests: one row each.
//!
//! A remedy in the library's own terms says more than one in PyTorch's. Files and names were read in transformers 4.46, peft 0.13, accelerate
//! 1.1, diffusers 0.31, torchmetrics 1.6, timm 1.0 and PyTorch Geometric 2.6.

use gputrace_schemas::event::StackId;
use gputrace_trace::Definitions;
use gputrace_trace::backward::python_lines;

/// When a library's remedy applies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum When {
    /// Memory is left again and again.
    Grows,
    /// It is a part of the peak, or of what was held when a request failed.
    AtPeak,
    /// The same where a backward pass needs it.
    ForBackward,
}

/// What a library offers.
#[derive(PartialEq, Eq, Debug)]
pub struct Offer {
    /// Part of the path of its file.
    file: &'static str,
    /// Names of functions there, one of which is on the stack; all if empty.
    functions: &'static [&'static str],
    /// When it applies.
    pub when: When,
    /// What to do.
    pub fix: &'static str,
}

const OFFERS: &[Offer] = &[
    Offer {
        file: "/transformers/trainer_pt_utils.py",
        functions: &["torch_pad_and_concatenate", "nested_concat"],
        when: When::Grows,
        fix: "the Trainer gathers all predictions on the GPU: set `eval_accumulation_steps`, or return less in `preprocess_logits_for_metrics`",
    },
    Offer {
        file: "/transformers/cache_utils.py",
        functions: &[],
        when: When::Grows,
        fix: "the key/value cache keeps all earlier tokens: drop `past_key_values` with its conversation, or bound it (`crop`, a sliding window)",
    },
    Offer {
        file: "/peft/tuners/",
        functions: &["update_layer", "add_adapter", "inject_adapter"],
        when: When::Grows,
        fix: "each adapter stays in the model: `model.delete_adapter(name)` when it is no longer used",
    },
    Offer {
        file: "/peft/utils/other.py",
        functions: &["prepare_model_for_kbit_training"],
        when: When::Grows,
        fix: "it copies each parameter that is not quantized to float32: load the model with `load_in_4bit`, or do not call it for a 16-bit model",
    },
    Offer {
        file: "/torchmetrics/",
        functions: &[],
        when: When::Grows,
        fix: "the metric keeps what `update` got until `metric.reset()`: call it after each epoch, or pass `compute_on_cpu=True`",
    },
    Offer {
        file: "/accelerate/utils/operations.py",
        functions: &["gather", "_gpu_gather", "_gpu_gather_one", "pad_across_processes"],
        when: When::Grows,
        fix: "move what `gather_for_metrics` returns to the CPU before you store it (`.cpu()`)",
    },
    // An optimizer's state that is made again and again is that of one optimizer after the other.
    Offer {
        file: "/accelerate/optimizer.py",
        functions: &["step"],
        when: When::Grows,
        fix: "the `Accelerator` keeps all that `prepare` got: call `accelerator.free_memory()` after each model, and `del` it",
    },
    Offer {
        file: "/diffusers/models/autoencoders/",
        functions: &["decode", "_decode", "encode"],
        when: When::AtPeak,
        fix: "call `vae.enable_slicing()` (one image at a time) or `vae.enable_tiling()`, under `torch.no_grad()`",
    },
    Offer {
        file: "/torch_geometric/nn/",
        functions: &["propagate"],
        when: When::AtPeak,
        fix: "train on sampled neighbourhoods (`NeighborLoader`), or pass a `SparseTensor`: then no message per edge is allocated",
    },
    Offer {
        file: "/timm/models/",
        functions: &[],
        when: When::ForBackward,
        fix: "call `model.set_grad_checkpointing()`, or use a smaller batch",
    },
    Offer {
        file: "/transformers/models/",
        functions: &[],
        when: When::ForBackward,
        fix: "call `model.gradient_checkpointing_enable()`, or use a smaller batch",
    },
];

/// What libraries on a stack offer, the innermost first.
pub fn offers(definitions: &dyn Definitions, id: StackId) -> Vec<&'static Offer> {
    let Some(stack) = definitions.stack(id) else { return vec![] };
    let mut found: Vec<&'static Offer> = vec![];
    for (function, file, _) in python_lines(definitions, stack) {
        let last = function.rsplit('.').next().unwrap_or(function);
        let of_line = OFFERS.iter().filter(|offer| {
            file.contains(offer.file) && (offer.functions.is_empty() || offer.functions.contains(&last))
        });
        for offer in of_line {
            if !found.contains(&offer) {
                found.push(offer);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::OFFERS;

    #[test]
    fn a_row_is_of_a_library_and_says_what_to_call() {
        for offer in OFFERS {
            assert!(offer.file.starts_with('/') && offer.fix.contains('`'), "{}", offer.file);
        }
    }
}
