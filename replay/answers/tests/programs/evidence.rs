//! What sizes, repetition, streams and devices show of a cause, where its line alone would show a generic one.

use super::Ill;
use super::job::{Block, Job, KIB, MIB, Net, inside, sizes, torch};

const MAKE: &str = "main@/job/run.py:12,<module>@/job/run.py:90";
const TORCH: &str = "/v/site-packages/torch";

/// Where the loss of a model is made that goes backward with a graph of its own.
fn second_order(job: &mut Job, net: &mut Net, at: &str) -> Vec<Block> {
    let mut kept = job.forward(net, &format!("inner@/job/maml.py:14,{at}"));
    let by = format!(
        "^TanhBackward0^{}^backward@{TORCH}/_tensor.py:600,inner@/job/maml.py:15,{at}",
        inside(&format!("Net.forward@{}:10", net.file), &format!("inner@/job/maml.py:14,{at}"))
    );
    kept.push(job.put(net.activation + MIB, &by));
    for size in net.sizes.clone() {
        kept.push(job.put(size, &by));
    }
    kept
}

pub(crate) const ILL: &[Ill] = &[
    Ill {
        name: "tiles_blended_on_the_gpu",
        thread: "https://github.com/Project-MONAI/MONAI/issues/854",
        truth: "the blended picture and the sum of its windows' weights are on the GPU at full size",
        causes: &["full-size buffers that a loop fills part by part"],
        lines: &["tiles.py:31"],
        scene: |job| {
            let net = job.net("/job/net.py", MAKE, &sizes(1), 2 * MIB);
            job.put(300 * MIB, "blend@/job/tiles.py:20,main@/job/run.py:20");
            job.put(300 * MIB, "blend@/job/tiles.py:21,main@/job/run.py:20");
            for _ in 0..12 {
                let out = job.infer(&net, "blend@/job/tiles.py:26,main@/job/run.py:20");
                job.free(out);
            }
            job.out_of_memory(300 * MIB, "blend@/job/tiles.py:31,main@/job/run.py:20");
        },
    },
    Ill {
        name: "tables_of_numpy",
        thread: "https://github.com/cupy/cupy/issues/1912",
        truth: "the model was made float64 to match the type of NumPy's arrays",
        causes: &["a model in float64"],
        lines: &["fit.py:9"],
        scene: |job| {
            let by = format!(
                "Module.double.<locals>.<lambda>@{TORCH}/nn/modules/module.py:1150,Module._apply@{TORCH}/nn/modules/module.py:965,Module.double@{TORCH}/nn/modules/module.py:1150,fit@/job/fit.py:9,main@/job/run.py:20"
            );
            let sizes = sizes(2);
            sizes.iter().for_each(|size| _ = job.put(*size, &by));
            let net =
                Net { file: "/job/net.py", sizes, gradients: vec![], state: vec![], activation: 80 * MIB };
            job.forward(&net, "fit@/job/fit.py:14,main@/job/run.py:20");
            job.out_of_memory(80 * MIB, &Job::line_of(&net, 8, "fit@/job/fit.py:14,main@/job/run.py:20"));
        },
    },
    Ill {
        name: "inner_loop_with_its_graph",
        thread: "https://github.com/pytorch/pytorch/issues/4661",
        truth: "backward(create_graph=True) makes cycles of parameters and gradients, which hold each task's model",
        causes: &["gradients kept, or their graph (`create_graph=True`)"],
        lines: &["maml.py:14", "maml.py:15", "net.py:1"],
        scene: |job| {
            for _ in 0..14 {
                let mut net = job.net(
                    "/job/net.py",
                    "inner@/job/maml.py:10,outer@/job/maml.py:30",
                    &[9 * MIB, 5 * MIB, 3 * MIB],
                    2 * MIB,
                );
                second_order(job, &mut net, "outer@/job/maml.py:30");
            }
        },
    },
    Ill {
        name: "folds_with_their_optimizers",
        thread: "https://github.com/huggingface/transformers/issues/13019",
        truth: "each fold's model stays with its gradients and the optimizer's state",
        causes: &["models loaded repeatedly, with the old ones kept"],
        lines: &["folds.py:10"],
        scene: |job| {
            for _ in 0..12 {
                let mut net =
                    job.net("/job/net.py", "fold@/job/folds.py:10,main@/job/run.py:20", &sizes(1), MIB);
                for _ in 0..4 {
                    let kept = job.forward(&net, "fold@/job/folds.py:14,main@/job/run.py:20");
                    job.backward(&mut net, kept, "fold@/job/folds.py:15,main@/job/run.py:20");
                    job.adam(&mut net, false, "fold@/job/folds.py:16,main@/job/run.py:20");
                }
            }
        },
    },
    Ill {
        name: "inputs_of_kept_losses",
        thread: "https://github.com/microsoft/SpareNet/issues/12",
        truth: "losses are kept with their graph, which holds each step's input as well",
        causes: &["outputs or losses kept with their graph"],
        lines: &["net.py:1"],
        scene: |job| {
            let net = job.net("/job/net.py", MAKE, &sizes(1), 2 * MIB);
            for _ in 0..30 {
                job.put(5 * MIB, "batch@/job/data.py:8,train@/job/train.py:29,main@/job/run.py:20");
                job.forward(&net, "train@/job/train.py:30,main@/job/run.py:20");
            }
        },
    },
    Ill {
        name: "handles_with_large_workspaces",
        thread: "https://github.com/pytorch/pytorch/issues/95668",
        truth: "each request has a stream of its own, and CUBLAS_WORKSPACE_CONFIG makes workspaces large",
        causes: &["one cuBLAS workspace per stream"],
        lines: &["rank.py:21"],
        scene: |job| {
            let mut seen = vec![];
            for turn in 0..320_u64 {
                job.stream = 64 + turn % 32;
                let at = "score@/job/rank.py:21,main@/job/run.py:20";
                if !seen.contains(&job.stream) {
                    seen.push(job.stream);
                    job.put(24 * MIB, at);
                }
                let out = job.put(512 * KIB, at);
                job.free(out);
            }
        },
    },
    Ill {
        name: "step_with_lists_of_tensors",
        thread: "https://github.com/pytorch/pytorch/issues/97712",
        truth: "the optimizer's `foreach` temporaries do not fit; its state would",
        causes: &["`foreach` temporaries"],
        lines: &["train.py:32"],
        scene: |job| {
            let mut net = job.net("/job/net.py", MAKE, &sizes(4), MIB);
            let kept = job.forward(&net, "train@/job/train.py:30,main@/job/run.py:20");
            job.backward(&mut net, kept, "train@/job/train.py:31,main@/job/run.py:20");
            job.adam(&mut net, false, "train@/job/train.py:32,main@/job/run.py:20");
            let by =
                torch("_multi_tensor_adam", "optim/adam.py", "train@/job/train.py:32,main@/job/run.py:20");
            for size in &net.sizes[..5] {
                job.put(*size, &by);
            }
            job.out_of_memory(12 * MIB, &by);
        },
    },
    Ill {
        name: "logits_widened",
        thread: "https://github.com/QwenLM/Qwen3/issues/570",
        truth: "the logits of all positions are copied to float32 for the loss",
        causes: &["a large result upcast to float32 (logits)"],
        lines: &["lm.py:41"],
        scene: |job| {
            let net = job.net("/job/net.py", MAKE, &sizes(1), 8 * MIB);
            job.forward(&net, "train@/job/train.py:30,main@/job/run.py:20");
            let head = |line: u32| {
                inside(&format!("Lm.forward@/job/lm.py:{line}"), "train@/job/train.py:30,main@/job/run.py:20")
            };
            job.put(160 * MIB, &head(40));
            job.out_of_memory(320 * MIB, &head(41));
        },
    },
];
