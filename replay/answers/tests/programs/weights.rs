//! Weights, gradients and errors that are held for nothing, and programs that only look so.

use super::job::{Block, Job, KIB, MIB, Net, call, sizes, torch};
use super::{Healthy, Ill};

const RUN: &str = "<module>@/job/run.py:90";

/// A step of training whose forward and backward pass are called at one line.
fn step(job: &mut Job, net: &mut Net, at: &str) {
    job.zero_grad(net);
    let kept = job.forward(net, at);
    job.backward(net, kept, at);
}

fn steps_with_adam(job: &mut Job, net: &mut Net, n: u32) {
    for _ in 0..n {
        step(job, net, "Agent.act@/job/agent.py:20,<module>@/job/run.py:90");
        job.adam(net, false, "Agent.act@/job/agent.py:22,<module>@/job/run.py:90");
    }
}

/// A model that works with another one inside of it.
fn nested(job: &mut Job, outer: &Net, inner: &Net, at: &str) -> Vec<Block> {
    let outside = format!("Outer.forward@{}:5,{},{at}", outer.file, call());
    (0..inner.sizes.len()).map(|layer| job.layer(inner, layer, inner.activation, &outside)).collect()
}

pub(crate) const ILL: &[Ill] = &[
    Ill {
        name: "agent_kept_by_a_cached_method",
        thread: "https://github.com/facebookresearch/ParlAI/pull/2487",
        truth: "a cache on a method refers to its object, and so to the trained model, while the next is made and trained",
        causes: &["an earlier model still held beside a new one"],
        lines: &["agent.py:10"],
        scene: |job| {
            for (line, n) in [(35, 6), (51, 2)] {
                let at = format!("Agent.__init__@/job/agent.py:10,play@/job/run.py:{line},{RUN}");
                let mut net = job.net("/job/net.py", &at, &sizes(4), 2 * MIB);
                steps_with_adam(job, &mut net, n);
            }
            job.out_of_memory(48 * MIB, "Agent.act@/job/agent.py:20,<module>@/job/run.py:90");
        },
    },
    Ill {
        name: "agent_kept_until_the_next_one_trains",
        thread: "https://github.com/facebookresearch/ParlAI/pull/2487",
        truth: "the first agent is still referred to, with its gradients, in the first backward pass of the next one",
        causes: &["an earlier model still held beside a new one"],
        lines: &["agent.py:10"],
        scene: |job| {
            let at = |line: u32| format!("Agent.__init__@/job/agent.py:10,play@/job/run.py:{line},{RUN}");
            let mut net = job.net("/job/net.py", &at(35), &sizes(4), 2 * MIB);
            let act = "Agent.act@/job/agent.py:20,<module>@/job/run.py:90";
            step(job, &mut net, act);
            for _ in 0..6 {
                let kept = job.forward(&net, act);
                job.backward(&mut net, kept, act);
            }
            let net = job.net("/job/net.py", &at(51), &sizes(4), 2 * MIB);
            let kept = job.forward(&net, act);
            let mut last_layers = Net { sizes: net.sizes[4..].to_vec(), ..net };
            job.backward(&mut last_layers, kept, act);
            job.out_of_memory(16 * MIB, act);
            // The error unwinds the stack, and the program ends.
            job.free_all(&mut last_layers.gradients);
        },
    },
    Ill {
        name: "next_fold_beside_the_last",
        thread: "https://github.com/huggingface/transformers/issues/13019",
        truth: "the model of the last fold is still referred to while that of the next is moved to the GPU",
        causes: &["an earlier model still held beside a new one"],
        lines: &["agent.py:10"],
        scene: |job| {
            let at = format!("fold@/job/agent.py:10,{RUN}");
            let mut net = job.net("/job/net.py", &at, &sizes(4), 2 * MIB);
            steps_with_adam(job, &mut net, 6);
            job.zero_grad(&mut net);
            let next = job.net("/job/net.py", &at, &sizes(4)[..6], 2 * MIB);
            let by = format!(
                "Module.to.<locals>.convert@/v/site-packages/torch/nn/modules/module.py:1370,Module.to@/v/site-packages/torch/nn/modules/module.py:1384,{at}"
            );
            job.out_of_memory(next.sizes[0], &by);
        },
    },
    Ill {
        name: "encoder_idle_while_training",
        thread: "https://github.com/TheLastBen/diffusers/pull/1",
        truth: "the embeddings were computed before the training, and the encoder stays on the GPU",
        causes: &["weights that the training does not use"],
        lines: &["run.py:15"],
        scene: |job| {
            let encoder = job.net(
                "/job/clip.py",
                "<module>@/job/run.py:15",
                &[13 * MIB, 40 * MIB, 19 * MIB, 40 * MIB],
                MIB,
            );
            let mut unet = job.net("/job/unet.py", "<module>@/job/run.py:19", &sizes(1), 2 * MIB);
            for _ in 0..6 {
                let out = job.infer(&encoder, "<module>@/job/run.py:33");
                job.free(out);
            }
            for _ in 0..10 {
                step(job, &mut unet, "<module>@/job/run.py:42");
            }
        },
    },
    Ill {
        name: "backbone_in_eval_mode_only",
        thread: "https://github.com/alexrich021/3dvnet/issues/11",
        truth: "the backbone is not in the optimizer, but autograd keeps its activations and makes its gradients",
        causes: &["gradients that no optimizer uses or frees"],
        lines: &["resnet.py:10"],
        scene: |job| {
            let odd: Vec<u64> = (1..=10).map(|n| n * MIB + 64 * KIB).collect();
            let mut backbone = job.net("/job/resnet.py", "<module>@/job/run.py:15", &odd, 24 * MIB);
            let mut head = job.net("/job/head.py", "<module>@/job/run.py:15", &[2 * MIB, 3 * MIB], MIB);
            let at = "<module>@/job/run.py:25";
            for _ in 0..10 {
                job.zero_grad(&mut head);
                let features = job.forward(&backbone, at);
                let out = job.forward(&head, at);
                job.backward(&mut head, out, at);
                job.backward(&mut backbone, features, at);
                job.adam(&mut head, false, "<module>@/job/run.py:27");
            }
        },
    },
    Ill {
        name: "adapters_beside_a_base_that_is_not_frozen",
        thread: "https://github.com/huggingface/diffusers/pull/2245",
        truth: "the optimizer has the adapters alone, all small; the base still requires gradients, which nothing frees",
        causes: &["gradients that no optimizer uses or frees"],
        lines: &["unet.py:10"],
        scene: |job| {
            let mut base = job.net("/job/unet.py", "<module>@/job/run.py:15", &sizes(1), 2 * MIB);
            let mut adapters = job.net("/job/lora.py", "<module>@/job/run.py:19", &[20 * KIB, 12 * KIB], MIB);
            let at = "<module>@/job/run.py:25";
            for _ in 0..10 {
                job.zero_grad(&mut adapters);
                let inner = job.forward(&base, at);
                let outer = job.forward(&adapters, at);
                job.backward(&mut adapters, outer, at);
                job.backward(&mut base, inner, at);
                job.adam(&mut adapters, false, "<module>@/job/run.py:27");
            }
        },
    },
    Ill {
        name: "copies_with_a_graph_in_a_snapshot",
        thread: "https://github.com/pytorch/pytorch/issues/4661",
        truth: "backward(create_graph=True) makes a cycle of each copy's parameters and gradients; a snapshot has no stacks of the backward pass",
        causes: &["copies of the weights kept, with their gradients"],
        lines: &["few.py:14"],
        scene: |job| {
            let base = job.net("/job/net.py", "<module>@/job/few.py:7", &sizes(1), MIB);
            for _ in 0..24 {
                let by =
                    "deepcopy@/usr/lib/python3.12/copy.py:150,score@/job/few.py:14,<module>@/job/few.py:30";
                base.sizes.iter().for_each(|size| _ = job.put(*size, by));
                let mut kept = job.forward(&base, "score@/job/few.py:15,<module>@/job/few.py:30");
                base.sizes.iter().for_each(|size| job.put_bare(*size));
                job.free_all(&mut kept);
            }
        },
    },
    Ill {
        name: "hidden_state_of_a_cell",
        thread: "https://github.com/pytorch/pytorch/issues/2198",
        truth: "the hidden state is not detached: each step's graph keeps the gates of the step before, and its input",
        causes: &["outputs or losses kept with their graph"],
        lines: &["run.py:21"],
        scene: |job| {
            let net = job.net("/job/net.py", "<module>@/job/run.py:16", &sizes(1), MIB);
            for _ in 0..40 {
                job.put(MIB, "<module>@/job/run.py:20");
                for bytes in [4 * MIB, 12 * MIB, 4 * MIB] {
                    job.layer(&net, 2, bytes, "<module>@/job/run.py:21");
                }
                let out = job.layer(&net, 3, MIB, "<module>@/job/run.py:21");
                job.free(out);
            }
        },
    },
    Ill {
        name: "predictions_kept_beside_their_targets",
        thread: "https://github.com/Lightning-AI/pytorch-lightning/issues/8453",
        truth: "a list keeps each validation batch's output and its target; no gradients are recorded",
        causes: &["outputs of one layer kept"],
        lines: &["run.py:21", "net.py:12"],
        scene: |job| {
            let net = job.net("/job/net.py", "<module>@/job/run.py:16", &sizes(1), MIB);
            for _ in 0..40 {
                job.put(MIB, "<module>@/job/run.py:20");
                let inner = job.layer(&net, 1, 4 * MIB, "<module>@/job/run.py:21");
                job.layer(&net, 2, 9 * MIB, "<module>@/job/run.py:21");
                job.free(inner);
            }
        },
    },
    Ill {
        name: "errors_collected_in_a_list",
        thread: "https://github.com/pytorch/pytorch/issues/27600",
        truth: "a list keeps the errors of all attempts, and with them the frames and their tensors",
        causes: &["tensors kept by a caught exception"],
        lines: &["fit.py:38"],
        scene: |job| {
            let net = job.net("/job/net.py", "main@/job/fit.py:31", &sizes(1), 32 * MIB);
            for activation in [32 * MIB, 24 * MIB, 16 * MIB] {
                let at = "step@/job/fit.py:23,main@/job/fit.py:38";
                job.put(activation / 4, "step@/job/fit.py:21,main@/job/fit.py:38");
                let net = Net {
                    file: net.file,
                    sizes: net.sizes.clone(),
                    gradients: vec![],
                    state: vec![],
                    activation,
                };
                job.forward(&net, at);
                job.out_of_memory(activation, &Job::line_of(&net, 8, at));
            }
        },
    },
];

pub(crate) const HEALTHY: &[Healthy] = &[
    Healthy {
        name: "search_for_the_largest_batch",
        scene: |job| {
            let net = job.net("/job/net.py", "<module>@/job/fit.py:31", &sizes(1), 64 * MIB);
            for (activation, n) in [(64 * MIB, 3), (32 * MIB, 5)] {
                let at = "step@/job/fit.py:8,search@/job/fit.py:19,<module>@/job/fit.py:40";
                let x = job.put(4 * MIB, "step@/job/fit.py:7,search@/job/fit.py:19,<module>@/job/fit.py:40");
                let mut kept: Vec<Block> =
                    (0..n).map(|layer| job.layer(&net, layer, activation, at)).collect();
                job.out_of_memory(activation, &Job::line_of(&net, n, at));
                job.free_all(&mut kept);
                job.free(x);
            }
            let mut net = Net { activation: 8 * MIB, ..net };
            let at = "step@/job/fit.py:8,<module>@/job/fit.py:42";
            for _ in 0..10 {
                let x = job.put(MIB, "step@/job/fit.py:7,<module>@/job/fit.py:42");
                step(job, &mut net, at);
                job.free(x);
            }
            job.line("note process.end=exit");
        },
    },
    Healthy {
        name: "evaluation_model_of_the_same_factory",
        scene: |job| {
            let at = format!("make@/job/agent.py:10,{RUN}");
            let mut net = job.net("/job/net.py", &at, &sizes(4), 2 * MIB);
            steps_with_adam(job, &mut net, 6);
            job.net("/job/net.py", &at, &sizes(4), 2 * MIB);
            steps_with_adam(job, &mut net, 6);
        },
    },
    Healthy {
        name: "penalty_whose_graph_outlives_its_pass",
        scene: |job| {
            let mut net = job.net("/job/net.py", "<module>@/job/run.py:19", &sizes(1), 2 * MIB);
            let graph: Vec<u64> = (1..=12).map(|n| n * 5 * MIB + 64 * KIB).collect();
            for _ in 0..10 {
                job.zero_grad(&mut net);
                let kept = job.forward(&net, "<module>@/job/run.py:42");
                let mut penalty: Vec<Block> = vec![];
                for size in &graph {
                    let by = torch(
                        "grad",
                        "autograd/__init__.py",
                        "penalty@/job/run.py:23,<module>@/job/run.py:43",
                    );
                    let by = format!(
                        "^ConvolutionBackward0^{}^{by}",
                        Job::line_of(&net, 0, "<module>@/job/run.py:42")
                    );
                    penalty.push(job.put(*size, &by));
                }
                let lengths = "penalty@/job/run.py:24,<module>@/job/run.py:43";
                let mut lengths: Vec<Block> = (0..4).map(|_| job.put(MIB, lengths)).collect();
                job.backward(&mut net, kept, "<module>@/job/run.py:44");
                job.free_all(&mut lengths);
                job.free_all(&mut penalty);
                job.adam(&mut net, false, "<module>@/job/run.py:46");
            }
        },
    },
    Healthy {
        name: "adapters_around_a_base_that_ran_before",
        scene: |job| {
            let base =
                job.net("/job/llm.py", "<module>@/job/run.py:15", &[13 * MIB, 40 * MIB, 19 * MIB], MIB);
            let mut adapters = job.net("/job/lora.py", "<module>@/job/run.py:19", &sizes(1), MIB);
            let out = job.infer(&base, "<module>@/job/run.py:33");
            job.free(out);
            for _ in 0..10 {
                job.zero_grad(&mut adapters);
                let mut kept = nested(job, &adapters, &base, "<module>@/job/run.py:42");
                let own = job.forward(&adapters, "<module>@/job/run.py:42");
                kept.extend(own);
                job.backward(&mut adapters, kept, "<module>@/job/run.py:42");
            }
        },
    },
    // A factored optimizer: the state of a matrix is a row and a column, as small as biases are.
    Healthy {
        name: "factored_state",
        scene: |job| {
            let all: Vec<u64> = (0..10)
                .flat_map(|n| [4 * MIB + n * 64 * KIB, if n < 4 { 8 * KIB } else { 4 * KIB }])
                .collect();
            let mut net = job.net("/job/net.py", "<module>@/job/run.py:15", &all, MIB);
            for turn in 0..10 {
                step(job, &mut net, "<module>@/job/run.py:42");
                let by = torch("Adafactor._init_group", "optim/_adafactor.py", "<module>@/job/run.py:44");
                for n in 0..if turn == 0 { 30 } else { 0 } {
                    job.put(if n % 3 == 0 { 8 * KIB } else { 4 * KIB }, &by);
                }
            }
        },
    },
];

/// What must not be said of a healthy program, though the peak could be lower.
pub(crate) const UNSAID: &[(&str, &str)] = &[
    ("evaluation_model_of_the_same_factory", "an earlier model still held beside a new one"),
    ("penalty_whose_graph_outlives_its_pass", "gradients that no optimizer uses"),
    ("factored_state", "gradients that no optimizer uses"),
    ("adapters_around_a_base_that_ran_before", "weights that the training does not use"),
];
