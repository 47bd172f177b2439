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

/// A table, and an optimizer of the program's own whose state keeps two tensors of its size each step.
fn history_of_a_table(job: &mut Job) {
    let mut net = job.net("/job/net.py", MAKE, &[40 * MIB, 2 * MIB], MIB);
    let at = |line: u32| format!("run@/job/study.py:{line},<module>@/job/study.py:70");
    let embedding =
        format!("embedding@{TORCH}/nn/functional.py:2551,{}", inside("Net.forward@/job/net.py:10", &at(30)));
    let step = format!("Decay.step@/job/decay.py:39,wrapper@{TORCH}/optim/optimizer.py:533,{}", at(32));
    for _ in 0..16 {
        let kept = job.forward(&net, &at(30));
        let gradient = job.put(
            40 * MIB,
            &format!("^EmbeddingBackward0^{embedding}^backward@{TORCH}/_tensor.py:600,{}", at(31)),
        );
        job.backward(&mut net, kept, &at(31));
        job.free(gradient);
        (0..2).for_each(|_| _ = job.put(40 * MIB, &step));
    }
    job.out_of_memory(40 * MIB, &step);
}

/// Two episodes of which the graph stays to the episode's end, with updates after each; one block of the first is still there.
fn episodes(job: &mut Job) {
    let mut net = job.net("/job/net.py", MAKE, &sizes(1), 2 * MIB);
    let mut left = vec![];
    for _ in 0..2 {
        let mut graph: Vec<Block> =
            (0..40).flat_map(|_| job.forward(&net, "play@/job/agent.py:44,main@/job/run.py:20")).collect();
        left.push(graph.remove(0));
        job.free_all(&mut graph);
        for _ in 0..6 {
            let kept = job.forward(&net, "learn@/job/agent.py:60,main@/job/run.py:21");
            job.backward(&mut net, kept, "learn@/job/agent.py:64,main@/job/run.py:21");
        }
    }
}

pub(crate) const ILL: &[Ill] = &[
    Ill {
        name: "optimizer_that_is_recorded",
        thread: "https://github.com/google-research/google-research/pull/235",
        truth: "the step of an own optimizer runs with gradients, and its state keeps the graph of all steps",
        causes: &["history kept by an optimizer", "an optimizer's step that autograd records"],
        lines: &["decay.py:39"],
        scene: history_of_a_table,
    },
    Ill {
        name: "episode_with_its_graph",
        thread: "https://github.com/kc-ml2/SimpleDreamer/issues/7",
        truth: "each episode keeps its graph to its end, and no backward pass needs it",
        causes: &["activations of a loop kept by its graph"],
        lines: &["agent.py:44"],
        scene: episodes,
    },
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
