//! Phases, copies and other processes: what a peak was made of that is no growth, and what only looks like it.

use super::job::{Block, Job, KIB, MIB, Net, inside, sizes};
use super::{Healthy, Ill};

const MAKE: &str = "main@/job/run.py:12,<module>@/job/run.py:90";
const TRAIN: &str = "train@/job/train.py:30,main@/job/run.py:20";
const GRAPH: &[&str] =
    &["activations of a loop kept by its graph", "outputs or losses kept with their graph"];

fn train(job: &mut Job, net: &mut Net, n: usize) {
    (0..n).for_each(|_| job.step(net, "/job/train.py", 30));
}

/// One call of a model that runs all its layers at one line, with gradients on.
fn one_line(job: &mut Job, at: &str, kept: &mut Vec<Block>) {
    let line = |function: &str, module: &str| {
        inside(
            &format!("{function}@/v/site-packages/torch/nn/modules/{module}.py:50"),
            &inside("Net.forward@/job/net.py:29", at),
        )
    };
    for layer in 1..=6_u64 {
        kept.push(job.put((2 * layer + 1) * MIB, &line("Conv2d._conv_forward", "conv")));
        kept.push(job.put((2 * layer + 1) * MIB, &line("ReLU.forward", "activation")));
    }
}

/// Cupy asks the driver.
fn cupy(job: &mut Job, n: usize, at: &str) {
    job.line(&format!("Alloc addr=c{n} bytes=400M by=libcudart.so,/v/site-packages/cupy/cuda/memory.cpython-312-x86_64-linux-gnu.so,{at}"));
}

pub(crate) const ILL: &[Ill] = &[
    Ill {
        name: "validation_adds_up_losses",
        thread: "https://github.com/mravanelli/pytorch-kaldi/pull/41",
        truth: "validation without no_grad adds up its losses; the model runs its layers at one line",
        causes: GRAPH,
        lines: &["net.py:29"],
        scene: |job| {
            let mut net = job.net("/job/net.py", MAKE, &sizes(1), 2 * MIB);
            for _ in 0..2 {
                train(job, &mut net, 6);
                let mut kept = vec![];
                for _ in 0..12 {
                    let batch =
                        job.put(MIB, "batches@/job/data.py:8,validate@/job/train.py:60,main@/job/run.py:21");
                    one_line(
                        job,
                        "step@/job/train.py:52,validate@/job/train.py:61,main@/job/run.py:21",
                        &mut kept,
                    );
                    job.free(batch);
                }
                job.free_all(&mut kept);
            }
        },
    },
    Ill {
        name: "predictions_before_the_loss",
        thread: "https://github.com/skorch-dev/skorch/issues/218",
        truth: "the validation step of a wrapper runs with gradients, and keeps what it returns until the epoch ends",
        causes: GRAPH,
        lines: &["net.py:1"],
        scene: |job| {
            let mut net = job.net("/job/net.py", MAKE, &sizes(1), 3 * MIB);
            for _ in 0..3 {
                train(job, &mut net, 5);
                let mut kept = vec![];
                for _ in 0..10 {
                    let batch = job.put(MIB, "Wrapper.fit@/job/wrapper.py:40,main@/job/run.py:21");
                    kept.extend(job.forward(&net, "Wrapper.validation_step@/job/wrapper.py:25,Wrapper.fit@/job/wrapper.py:41,main@/job/run.py:21"));
                    job.free(batch);
                }
                job.free_all(&mut kept);
            }
        },
    },
    Ill {
        name: "features_with_their_graph",
        thread: "https://github.com/huggingface/transformers/issues/24315",
        truth: "a list keeps the outputs of a frozen encoder with their graph, and only a head is trained on them",
        causes: GRAPH,
        lines: &["encoder.py:1"],
        scene: |job| {
            let encoder = job.net("/job/encoder.py", MAKE, &sizes(1), 3 * MIB);
            let mut kept = vec![];
            for _ in 0..10 {
                let batch = job.put(MIB, "extract@/job/run.py:33,main@/job/run.py:55");
                kept.extend(job.forward(&encoder, "extract@/job/run.py:34,main@/job/run.py:55"));
                job.free(batch);
            }
            let features = job.put(30 * MIB, "extract@/job/run.py:38,main@/job/run.py:55");
            let mut head =
                job.net("/job/head.py", "fit@/job/run.py:42,main@/job/run.py:57", &[MIB, MIB], MIB);
            train(job, &mut head, 12);
            job.free(features);
            job.free_all(&mut kept);
        },
    },
    Ill {
        name: "embeddings_cached_before_the_training",
        thread: "https://github.com/bghira/SimpleTuner/pull/243",
        truth: "the embeddings of all captions are kept on the GPU, and each step of the training uses a few",
        causes: &["outputs of a model kept on the GPU after their loop"],
        lines: &["encoder.py:18"],
        scene: |job| {
            let encoder = job.net("/job/encoder.py", MAKE, &sizes(1), 3 * MIB);
            let fill = "Cache.fill@/job/cache.py:33,main@/job/run.py:62";
            for _ in 0..100 {
                let tokens = job.put(64 * KIB, &format!("Cache.tokens@/job/cache.py:25,{fill}"));
                job.infer(&encoder, fill);
                job.free(tokens);
            }
            let mut net = job.net("/job/net.py", MAKE, &[4 * MIB, 6 * MIB], MIB);
            train(job, &mut net, 20);
        },
    },
    Ill {
        name: "all_pairs_by_a_broadcast",
        thread: "https://github.com/pytorch/pytorch/issues/2225",
        truth: "a target of shape (N,) minus a prediction of shape (N, 1) has N x N elements",
        causes: &["a broadcast or pairwise result, quadratic in its input"],
        lines: &["train.py:21"],
        scene: |job| {
            let net = job.net("/job/net.py", MAKE, &sizes(1), MIB);
            let at = "fit@/job/train.py:39,main@/job/run.py:20";
            let pairs = "loss@/job/train.py:21,fit@/job/train.py:40,main@/job/run.py:20";
            let forward = |job: &mut Job, n: u64| {
                (0..4).map(|layer| job.layer(&net, layer, n * 512, at)).collect::<Vec<Block>>()
            };
            for _ in 0..12 {
                let mut kept = forward(job, 1000);
                kept.push(job.put(4 * 1000 * 1000, pairs));
                job.free_all(&mut kept);
            }
            forward(job, 8000);
            job.out_of_memory(4 * 8000 * 8000, pairs);
        },
    },
    Ill {
        name: "one_long_utterance_among_short_ones",
        thread: "https://github.com/k2-fsa/icefall/pull/843",
        truth: "a batch is padded to its longest utterance; the line that fails requests little of what the batch does",
        causes: &["an unusually large batch"],
        lines: &["net.py:28"],
        scene: |job| {
            let mut net = job.net("/job/net.py", MAKE, &[KIB; 20], 2 * MIB);
            train(job, &mut net, 10);
            let at = "train@/job/train.py:30,<module>@/job/train.py:99";
            (0..18).for_each(|layer| _ = job.layer(&net, layer, 30 * MIB, at));
            job.out_of_memory(30 * MIB, &Job::line_of(&net, 18, at));
        },
    },
    Ill {
        name: "a_request_with_gradients",
        thread: "https://github.com/serend1p1ty/SeqNet/pull/14",
        truth: "each request runs the model with gradients on, and nothing goes backward",
        causes: &["activations kept for a backward pass that never comes"],
        lines: &["net.py:29"],
        scene: |job| {
            job.net("/job/net.py", MAKE, &sizes(1), 2 * MIB);
            for _ in 0..30 {
                let mut kept = vec![];
                one_line(job, "answer@/job/serve.py:12,main@/job/run.py:20", &mut kept);
                job.free_all(&mut kept);
            }
        },
    },
    Ill {
        name: "state_with_its_history",
        thread: "https://github.com/pytorch/pytorch/issues/2198",
        truth: "the recurrent state is handed on with its graph, and each window goes backward with retain_graph",
        causes: &["graphs kept after their backward passes"],
        lines: &["net.py:1"],
        scene: |job| {
            let mut net = job.net("/job/net.py", MAKE, &sizes(1), 3 * MIB);
            for _ in 0..2 {
                let mut kept = vec![];
                for _ in 0..12 {
                    let batch =
                        job.put(MIB, "windows@/job/data.py:9,fit@/job/train.py:37,main@/job/run.py:20");
                    kept.extend(job.forward(&net, "fit@/job/train.py:38,main@/job/run.py:20"));
                    job.backward(&mut net, vec![], "fit@/job/train.py:40,main@/job/run.py:20");
                    job.free(batch);
                }
                job.free_all(&mut kept);
                job.adam(&mut net, false, "fit@/job/train.py:48,main@/job/run.py:20");
                job.zero_grad(&mut net);
            }
        },
    },
    Ill {
        name: "losses_of_one_batch_retained",
        thread: "https://github.com/pytorch/pytorch/issues/40005",
        truth: "each layer's loss goes backward with retain_graph, and a list keeps all losses",
        causes: &["graphs kept after their backward passes", "outputs or losses kept with their graph"],
        lines: &["net.py:1"],
        scene: |job| {
            let mut net = job.net("/job/net.py", MAKE, &sizes(1), 4 * MIB);
            for _ in 0..3 {
                let mut kept = vec![];
                for _ in 0..8 {
                    let teacher = job.put(2 * MIB, "distil@/job/train.py:24,main@/job/run.py:20");
                    kept.extend(job.forward(&net, "distil@/job/train.py:25,main@/job/run.py:20"));
                    job.backward(&mut net, vec![], "distil@/job/train.py:27,main@/job/run.py:20");
                    job.free(teacher);
                }
                job.free_all(&mut kept);
                job.zero_grad(&mut net);
            }
        },
    },
    Ill {
        name: "batch_size_found_without_a_step",
        thread: "https://github.com/roboflow/rf-detr/pull/1342",
        truth: "the batch size was tried without the optimizer, whose state leaves no room for the second step",
        causes: &["the optimizer's state, created at its first step"],
        lines: &["train.py:32"],
        scene: |job| {
            let mut net = job.net("/job/net.py", MAKE, &sizes(1), 40 * MIB);
            for activation in [10, 20, 40] {
                net.activation = activation * MIB;
                let kept = job.forward(&net, "probe@/job/train.py:10,main@/job/run.py:20");
                job.backward(&mut net, kept, "probe@/job/train.py:11,main@/job/run.py:20");
                job.zero_grad(&mut net);
            }
            let kept = job.forward(&net, TRAIN);
            job.backward(&mut net, kept, "train@/job/train.py:31,main@/job/run.py:20");
            job.adam(&mut net, false, "train@/job/train.py:32,main@/job/run.py:20");
            job.zero_grad(&mut net);
            for layer in 0..8_usize {
                job.layer(&net, layer, 40 * MIB, TRAIN);
            }
            job.out_of_memory(40 * MIB, &Job::line_of(&net, 8, TRAIN));
        },
    },
    Ill {
        name: "gradients_through_validation",
        thread: "https://github.com/speechbrain/speechbrain/pull/1739",
        truth: "gradients that are set to zero stay on the card while long inputs are validated",
        causes: &["gradients held while nothing is trained"],
        lines: &["net.py:10"],
        scene: |job| {
            let mut net = job.net("/job/net.py", MAKE, &sizes(2), MIB);
            for _ in 0..3 {
                for _ in 0..6 {
                    let kept = job.forward(&net, TRAIN);
                    job.backward(&mut net, kept, "train@/job/train.py:31,main@/job/run.py:20");
                }
                for _ in 0..4 {
                    net.activation = 60 * MIB;
                    let out = job.infer(&net, "validate@/job/train.py:60,main@/job/run.py:21");
                    job.free(out);
                }
                net.activation = MIB;
            }
        },
    },
    Ill {
        name: "average_and_backup",
        thread: "https://github.com/microsoft/Semi-supervised-learning/issues/13",
        truth: "an averaged model and a backup of the weights lie on the card beside the model",
        causes: &["a second copy of the weights"],
        lines: &["ema.py:9", "ema.py:21"],
        scene: |job| {
            let mut net = job.net("/job/net.py", MAKE, &sizes(2), 3 * MIB);
            let copy = "_deepcopy_dict@/usr/lib/python3.12/copy.py:221,deepcopy@/usr/lib/python3.12/copy.py:137,Average.__init__@/job/ema.py:9,main@/job/run.py:14";
            for size in sizes(2) {
                job.put(size, copy);
            }
            let mut backup = vec![];
            for _ in 0..4 {
                train(job, &mut net, 4);
                // The new backup is there before the old one goes.
                let new: Vec<_> = sizes(2)
                    .into_iter()
                    .map(|size| job.put(size, "Average.apply@/job/ema.py:21,main@/job/run.py:22"))
                    .collect();
                job.free_all(&mut backup);
                backup = new;
            }
        },
    },
    Ill {
        name: "one_row_for_each_edge",
        thread: "https://github.com/pyg-team/pytorch_geometric/issues/459",
        truth: "features are gathered for each edge, and scaled",
        causes: &["a large intermediate result, needed twice"],
        lines: &["conv.py:24"],
        scene: |job| {
            let net = job.net("/job/net.py", MAKE, &sizes(1), MIB);
            job.layer(&net, 0, MIB, TRAIN);
            let at = inside("GraphConv.forward@/job/conv.py:33", TRAIN);
            job.put(800 * MIB, &format!("GraphConv.propagate@/job/conv.py:28,{at}"));
            job.out_of_memory(
                800 * MIB,
                &format!("GraphConv.message@/job/conv.py:24,GraphConv.propagate@/job/conv.py:28,{at}"),
            );
        },
    },
    Ill {
        name: "one_hot_twice",
        thread: "https://github.com/pytorch/pytorch/issues/82707",
        truth: "a one-hot tensor of integers is made, and then another in float",
        causes: &["a large intermediate result, needed twice", "one request larger than the card"],
        lines: &["labels.py:14"],
        scene: |job| {
            let net = job.net("/job/net.py", MAKE, &sizes(1), MIB);
            let out = job.infer(&net, TRAIN);
            job.put(900 * MIB, "encode@/job/labels.py:13,main@/job/run.py:30");
            job.out_of_memory(450 * MIB, "encode@/job/labels.py:14,main@/job/run.py:30");
            job.free(out);
        },
    },
    Ill {
        name: "set_up_on_a_stream_of_its_own",
        thread: "https://github.com/NVIDIA/Megatron-LM/pull/6885",
        truth: "the setup ran on a side stream, in the first moments; the steps that follow wait for the GPU at the end",
        causes: &["a side stream's idle cache"],
        lines: &["wrap.py:32"],
        scene: |job| {
            job.line("Alloc addr=s0 bytes=900M by=libcudart.so,libc10_cuda.so in_allocate=1");
            job.reserved = 900 * MIB;
            job.stream = 16;
            let flat = job.put(300 * MIB, "Flat.__init__@/job/wrap.py:32,main@/job/run.py:11");
            let wide = job.put(300 * MIB, "Flat.__init__@/job/wrap.py:33,main@/job/run.py:11");
            job.free(flat);
            job.free(wide);
            job.stream = 0;
            let mut net = job.net("/job/net.py", MAKE, &sizes(1), 4 * MIB);
            train(job, &mut net, 6);
        },
    },
    Ill {
        name: "folds_by_a_cached_function",
        thread: "https://github.com/meta-pytorch/torchtune/issues/904",
        truth: "a memoised function keeps the model of each fold",
        causes: &["models loaded repeatedly, with the old ones kept"],
        lines: &["net.py:50"],
        scene: |job| {
            for _ in 0..10 {
                let mut net = job.net(
                    "/job/net.py",
                    "build@/job/net.py:50,fold@/job/run.py:12,main@/job/run.py:30",
                    &sizes(1),
                    3 * MIB,
                );
                train(job, &mut net, 3);
                job.zero_grad(&mut net);
                let mut state = std::mem::take(&mut net.state);
                job.free_all(&mut state);
            }
        },
    },
    Ill {
        name: "history_with_its_graph",
        thread: "https://github.com/TorchSim/torch-sim/pull/559",
        truth: "forces come from autograd.grad with create_graph, and a history keeps them",
        causes: &["the graph of `autograd.grad` kept"],
        lines: &["net.py:10", "relax.py"],
        scene: |job| {
            let net = job.net("/job/net.py", MAKE, &sizes(1), 2 * MIB);
            for _ in 0..40 {
                job.forward(&net, "energy@/job/relax.py:20,main@/job/run.py:20");
                let by = format!(
                    "^SiluBackward0^{},^grad@/v/site-packages/torch/autograd/__init__.py:500,forces@/job/relax.py:22,main@/job/run.py:20",
                    inside("Net.forward@/job/net.py:10", "energy@/job/relax.py:20,main@/job/run.py:20")
                );
                let scratch = job.put(3 * MIB, &by);
                job.put(2 * MIB, &by);
                job.free(scratch);
            }
        },
    },
    Ill {
        name: "answers_kept_in_the_last_phase",
        thread: "https://github.com/yalesong/pvse/issues/30",
        truth: "after a long training, each batch of the final evaluation leaves its outputs",
        causes: &[
            "outputs of one layer kept",
            "outputs or losses kept with their graph",
            "outputs collected on the GPU until the loop ends",
        ],
        lines: &["net.py:18", "eval.py:34"],
        scene: |job| {
            let mut net = job.net("/job/net.py", MAKE, &sizes(1), 2 * MIB);
            train(job, &mut net, 60);
            for _ in 0..16 {
                let batch =
                    job.put(MIB, "batches@/job/eval.py:20,evaluate@/job/eval.py:33,main@/job/run.py:40");
                net.activation = 8 * MIB;
                job.infer(&net, "evaluate@/job/eval.py:34,main@/job/run.py:40");
                job.free(batch);
            }
        },
    },
    Ill {
        name: "chunks_that_a_consumer_has_open",
        thread: "https://github.com/vllm-project/vllm/issues/51258",
        truth: "each chunk is handed to another process by CUDA IPC, which keeps it open",
        causes: &["", "tensors that another process keeps open (CUDA IPC)"],
        lines: &["sync.py:40"],
        scene: |job| {
            for n in 0..30 {
                job.put(32 * MIB, "chunk@/job/sync.py:40,push@/job/sync.py:46,main@/job/run.py:20");
                job.line(&format!("IpcGet addr=b{} handle={} by=push@/job/sync.py:47", n + 1, n + 17));
            }
        },
    },
];

pub(crate) const HEALTHY: &[Healthy] = &[
    // Back-propagation through eight steps, then detached.
    Healthy {
        name: "h_eight_steps_back",
        scene: |job| {
            let mut net = job.net("/job/net.py", MAKE, &sizes(1), 2 * MIB);
            for _ in 0..8 {
                let mut kept = vec![];
                for _ in 0..8 {
                    let batch =
                        job.put(MIB, "windows@/job/data.py:9,fit@/job/train.py:37,main@/job/run.py:20");
                    kept.extend(job.forward(&net, "fit@/job/train.py:38,main@/job/run.py:20"));
                    job.free(batch);
                }
                job.backward(&mut net, kept, "fit@/job/train.py:40,main@/job/run.py:20");
                job.adam(&mut net, false, "fit@/job/train.py:41,main@/job/run.py:20");
                job.zero_grad(&mut net);
            }
        },
    },
    // A pipeline has the activations of a few micro-batches in flight.
    Healthy {
        name: "h_pipeline",
        scene: |job| {
            let mut net = job.net("/job/net.py", MAKE, &sizes(1), 3 * MIB);
            for _ in 0..6 {
                let mut flying: Vec<Vec<Block>> = vec![];
                for micro in 0..12 {
                    flying.push(job.forward(&net, "schedule@/job/pipe.py:20,main@/job/run.py:20"));
                    if micro >= 3 {
                        let kept = flying.remove(0);
                        job.backward(&mut net, kept, "schedule@/job/pipe.py:24,main@/job/run.py:20");
                    }
                }
                for kept in flying {
                    job.backward(&mut net, kept, "schedule@/job/pipe.py:28,main@/job/run.py:20");
                }
                job.adam(&mut net, false, "schedule@/job/pipe.py:30,main@/job/run.py:20");
                job.zero_grad(&mut net);
            }
        },
    },
    // Two views of each picture, one loss.
    Healthy {
        name: "h_two_views",
        scene: |job| {
            let mut net = job.net("/job/net.py", MAKE, &sizes(1), 4 * MIB);
            for _ in 0..16 {
                let mut kept = job.forward(&net, "step@/job/train.py:20,main@/job/run.py:20");
                kept.extend(job.forward(&net, "step@/job/train.py:21,main@/job/run.py:20"));
                job.backward(&mut net, kept, "step@/job/train.py:23,main@/job/run.py:20");
                job.adam(&mut net, false, "step@/job/train.py:24,main@/job/run.py:20");
                job.zero_grad(&mut net);
            }
        },
    },
    // Evaluation is smaller than training, and gradients are added up over it.
    Healthy {
        name: "h_small_validation",
        scene: |job| {
            let mut net = job.net("/job/net.py", MAKE, &sizes(1), 8 * MIB);
            for _ in 0..4 {
                for _ in 0..5 {
                    let kept = job.forward(&net, TRAIN);
                    job.backward(&mut net, kept, "train@/job/train.py:31,main@/job/run.py:20");
                    job.adam(&mut net, false, "train@/job/train.py:32,main@/job/run.py:20");
                }
                for _ in 0..5 {
                    net.activation = 2 * MIB;
                    let out = job.infer(&net, "validate@/job/train.py:60,main@/job/run.py:21");
                    job.free(out);
                }
                net.activation = 8 * MIB;
            }
        },
    },
    // Features of a frozen backbone are cached, up to a bound.
    // A bank of features is collected in a loop, joined, and thinned out before it is used.
    Healthy {
        name: "h_memory_bank",
        scene: |job| {
            let net = job.net("/job/net.py", MAKE, &sizes(1), 3 * MIB);
            let mut kept = vec![];
            for _ in 0..40 {
                let tokens = job.put(64 * KIB, "fit@/job/bank.py:24,main@/job/run.py:20");
                kept.push(job.infer(&net, "fit@/job/bank.py:25,main@/job/run.py:20"));
                job.free(tokens);
            }
            let all = job.put(120 * MIB, "fit@/job/bank.py:28,main@/job/run.py:20");
            job.free_all(&mut kept);
            job.put(12 * MIB, "fit@/job/bank.py:29,main@/job/run.py:20");
            job.free(all);
            for _ in 0..40 {
                let out = job.infer(&net, "test@/job/bank.py:40,main@/job/run.py:21");
                job.free(out);
            }
        },
    },
    // One graph, and several passes through it.
    Healthy {
        name: "h_one_graph_for_many_passes",
        scene: |job| {
            let mut net = job.net("/job/net.py", MAKE, &sizes(1), 2 * MIB);
            let at = "train@/job/train.py:30,main@/job/run.py:20";
            let mut kept = vec![];
            for _ in 0..4 {
                kept.extend(job.forward(&net, at));
            }
            for _ in 0..6 {
                job.backward(&mut net, vec![], at);
                job.adam(&mut net, false, "train@/job/train.py:32,main@/job/run.py:20");
            }
            job.free_all(&mut kept);
        },
    },
    Healthy {
        name: "h_bounded_features",
        scene: |job| {
            let mut head = job.net("/job/head.py", MAKE, &sizes(1), 2 * MIB);
            let backbone = job.net("/job/net.py", "main@/job/run.py:13", &[9 * MIB, 10 * MIB], 6 * MIB);
            let mut cache = vec![];
            for _ in 0..60 {
                let out = job.infer(
                    &backbone,
                    "Features.get@/job/cache.py:20,train@/job/train.py:29,main@/job/run.py:20",
                );
                cache.push(out);
                if cache.len() > 12 {
                    let oldest = cache.remove(0);
                    job.free(oldest);
                }
                train(job, &mut head, 1);
            }
        },
    },
    // A side stream loads the next batch in turn with the main one, to the end.
    Healthy {
        name: "h_prefetch",
        scene: |job| {
            job.reserved = 400 * MIB;
            let mut net = job.net("/job/net.py", MAKE, &sizes(1), 4 * MIB);
            let mut next = None;
            for _ in 0..30 {
                job.stream = 16;
                let batch = job.put(
                    12 * MIB,
                    "Prefetcher.next@/job/data.py:18,train@/job/train.py:29,main@/job/run.py:20",
                );
                job.stream = 0;
                train(job, &mut net, 1);
                if let Some(last) = next.replace(batch) {
                    job.free(last);
                }
            }
        },
    },
    // CuPy's pool is as large as the first round needs, and is used again.
    Healthy {
        name: "h_pool_that_is_used",
        scene: |job| {
            (0..4).for_each(|n| cupy(job, n, "frame@/job/frames.py:9,main@/job/run.py:10"));
            for n in 0..40 {
                job.line(&format!("AllocHost addr=h{n} bytes=1M by=libcudart.so,read@/job/frames.py:20"));
                job.line(&format!("FreeHost addr=h{n} by=libcudart.so,read@/job/frames.py:21"));
            }
        },
    },
    // The weights are shared with one other process for good: one handle.
    Healthy {
        name: "h_weights_for_another",
        scene: |job| {
            let net = job.net("/job/net.py", MAKE, &sizes(1), 4 * MIB);
            job.line("IpcGet addr=b1 handle=17 by=share@/job/run.py:14");
            for _ in 0..30 {
                let out = job.infer(&net, "serve@/job/serve.py:20,main@/job/run.py:20");
                job.free(out);
            }
        },
    },
    // Without gradients, the encoder's outputs wait for the decoder: one of three that its layers make.
    Healthy {
        name: "h_skip_connections",
        scene: |job| {
            let net = job.net("/job/net.py", MAKE, &sizes(1), 6 * MIB);
            for _ in 0..20 {
                let mut skips = vec![];
                for layer in 0..9_usize {
                    let blocks = [0, 1, 2].map(|_| job.layer(&net, layer, 6 * MIB, "segment@/job/run.py:30"));
                    job.free(blocks[0]);
                    job.free(blocks[1]);
                    skips.push(blocks[2]);
                }
                job.free_all(&mut skips);
            }
        },
    },
    // A detector's outputs of a picture are moved to the CPU before the next.
    Healthy {
        name: "h_one_picture_at_a_time",
        scene: |job| {
            let net = job.net("/job/net.py", MAKE, &sizes(1), 5 * MIB);
            for _ in 0..40 {
                let batch = job.put(3 * MIB, "pictures@/job/detect.py:9,main@/job/run.py:20");
                let out = job.infer(&net, "detect@/job/detect.py:20,main@/job/run.py:20");
                job.free(batch);
                job.free(out);
            }
            let out = job.infer(&net, "detect@/job/detect.py:30,main@/job/run.py:20");
            job.free(out);
        },
    },
];
