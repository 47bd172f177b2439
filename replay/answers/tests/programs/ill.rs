//! Programs with a known cause, each after a public thread.

use super::Ill;
use super::job::{Job, KIB, MIB, inside, sizes, torch};

const MAKE: &str = "main@/job/run.py:12,<module>@/job/run.py:90";
const SERVE: &str = "serve@/job/serve.py:20,<module>@/job/serve.py:50";

fn deepcopy(at: &str) -> String {
    format!("_deepcopy_dict@/usr/lib/python3.12/copy.py:221,deepcopy@/usr/lib/python3.12/copy.py:137,{at}")
}

/// Requests to a model, and what `also` does after each.
fn serve(job: &mut Job, n: u64, mut also: impl FnMut(&mut Job, u64)) {
    let net = job.net("/job/net.py", MAKE, &sizes(1), 4 * MIB);
    for turn in 0..n {
        let out = job.infer(&net, SERVE);
        also(job, turn);
        job.free(out);
    }
}

const COPY: &[&str] = &["a second copy of the weights"];
const ATTENTION: &[&str] = &["attention scores fully materialized"];
const DATA: &[&str] = &["data kept on the GPU"];

pub(crate) const CASES: &[Ill] = &[
    Ill {
        name: "ema_copy",
        thread: "https://github.com/bghira/SimpleTuner/pull/517",
        truth: "the average of the weights is a deepcopy on the GPU",
        causes: COPY,
        lines: &["ema.py:9"],
        scene: |job| {
            let mut net = job.net("/job/net.py", MAKE, &sizes(2), 3 * MIB);
            for size in sizes(2) {
                job.put(size, &deepcopy("Average.__init__@/job/ema.py:9,main@/job/run.py:14"));
            }
            (0..12).for_each(|_| job.step(&mut net, "/job/train.py", 30));
        },
    },
    Ill {
        name: "best_model_moved_again",
        thread: "https://github.com/facebookresearch/pytext/pull/1367",
        truth: "the best state is moved to the GPU beside the model that it is loaded into",
        causes: COPY,
        lines: &["load_best.py:7"],
        scene: |job| {
            let mut net = job.net("/job/net.py", MAKE, &sizes(2), 3 * MIB);
            (0..6).for_each(|_| job.step(&mut net, "/job/train.py", 30));
            for size in sizes(2) {
                job.put(size, "move_state@/job/load_best.py:7,main@/job/run.py:20");
            }
            (0..6).for_each(|_| job.step(&mut net, "/job/train.py", 30));
        },
    },
    Ill {
        name: "reference_model",
        thread: "https://github.com/databricks/flashoptim/issues/1",
        truth: "models that are measured one after the other are all made first",
        causes: COPY,
        lines: &["run.py:13", "run.py:14"],
        scene: |job| {
            let one = job.net("/job/net.py", "build@/job/net.py:50,main@/job/run.py:12", &sizes(2), 3 * MIB);
            job.net("/job/net.py", "build@/job/net.py:50,main@/job/run.py:13", &sizes(2), 3 * MIB);
            job.net("/job/net.py", "build@/job/net.py:50,main@/job/run.py:14", &sizes(2), 3 * MIB);
            for _ in 0..12 {
                let out = job.infer(&one, SERVE);
                job.free(out);
            }
        },
    },
    Ill {
        name: "foreach_peak",
        thread: "https://github.com/pytorch/pytorch/issues/97712",
        truth: "foreach needs temporaries as large as the parameters, and sets the peak",
        causes: &["`foreach` temporaries"],
        lines: &["train.py:32"],
        scene: |job| {
            let mut net = job.net("/job/net.py", MAKE, &sizes(4), MIB);
            for _ in 0..8 {
                job.zero_grad(&mut net);
                let kept = job.forward(&net, "train@/job/train.py:30");
                job.backward(&mut net, kept, "train@/job/train.py:31");
                job.adam(&mut net, true, "train@/job/train.py:32");
            }
        },
    },
    Ill {
        name: "own_attention",
        thread: "https://github.com/RenqiChen/Genomic-Selection/issues/2",
        truth: "scores and probabilities of all pairs are made whole",
        causes: ATTENTION,
        lines: &["net.py:2"],
        scene: |job| {
            let net = job.net("/job/net.py", MAKE, &sizes(1), 4 * MIB);
            for _ in 0..12 {
                let line = |line: u32| {
                    inside(
                        &format!("SelfAttention.forward@/job/net.py:{line}"),
                        &inside("Block.forward@/job/net.py:44", SERVE),
                    )
                };
                let mut inputs: Vec<_> = (0..3).map(|_| job.put(6 * MIB, &line(20))).collect();
                let scores = job.put(192 * MIB, &line(22));
                let weights = job.put(192 * MIB, &line(23));
                job.free(scores);
                let out = job.put(6 * MIB, &line(24));
                job.free(weights);
                job.free_all(&mut inputs);
                job.free(out);
                let out = job.infer(&net, SERVE);
                job.free(out);
            }
        },
    },
    Ill {
        name: "weights_of_attention_returned",
        thread: "https://github.com/CyberZHG/keras-multi-head/issues/1",
        truth: "MultiheadAttention returns its weights, which are of quadratic size, for training",
        causes: ATTENTION,
        lines: &["net.py:30"],
        scene: |job| {
            let mut net = job.net("/job/net.py", MAKE, &sizes(1), 4 * MIB);
            for _ in 0..8 {
                job.zero_grad(&mut net);
                let by = |function: &str| {
                    format!(
                        "{},{}",
                        torch(
                            function,
                            "nn/functional.py",
                            "MultiheadAttention.forward@/v/site-packages/torch/nn/modules/activation.py:1380"
                        ),
                        inside("Encoder.forward@/job/net.py:30", "train@/job/train.py:30")
                    )
                };
                let mut kept: Vec<_> =
                    (0..4).map(|_| job.put(5 * MIB, &by("_in_projection_packed"))).collect();
                kept.push(job.put(160 * MIB, &by("multi_head_attention_forward")));
                kept.push(job.put(160 * MIB, &by("softmax")));
                kept.extend(job.forward(&net, "train@/job/train.py:30"));
                job.backward(&mut net, kept, "train@/job/train.py:31");
                job.adam(&mut net, false, "train@/job/train.py:32");
            }
        },
    },
    Ill {
        name: "whole_volume",
        thread: "https://github.com/Project-MONAI/MONAI/issues/854",
        truth: "the whole volume is on the GPU though the model sees windows of it",
        causes: DATA,
        lines: &["infer.py:8"],
        scene: |job| {
            let net = job.net("/job/net.py", MAKE, &sizes(1), 4 * MIB);
            job.put(400 * MIB, "load@/job/infer.py:8,main@/job/infer.py:40");
            for _ in 0..40 {
                let window = job.put(2 * MIB, "windows@/job/infer.py:20,main@/job/infer.py:42");
                let out = job.infer(&net, "main@/job/infer.py:43");
                job.free(out);
                job.free(window);
            }
        },
    },
    Ill {
        name: "dataset_on_gpu",
        thread: "https://github.com/MPI-Dortmund/tomotwin-cryoet/pull/105",
        truth: "all of the training set is moved to the GPU before the loop",
        causes: DATA,
        lines: &["data.py:5"],
        scene: |job| {
            job.put(500 * MIB, "load@/job/data.py:5,main@/job/run.py:10");
            let mut net = job.net("/job/net.py", MAKE, &sizes(1), 4 * MIB);
            for _ in 0..12 {
                let batch = job.put(3 * MIB, "train@/job/train.py:29");
                job.step(&mut net, "/job/train.py", 30);
                job.free(batch);
            }
        },
    },
    Ill {
        name: "memoised_features",
        thread: "https://github.com/MoonshotAI/Kimi-Audio/issues/117",
        truth: "an unbounded lru_cache keeps the features of each item",
        causes: &["results kept"],
        lines: &["data.py:14"],
        scene: |job| {
            serve(job, 60, |job, _| {
                job.put(3 * MIB, "features@/job/data.py:14,serve@/job/serve.py:18");
            })
        },
    },
    Ill {
        name: "gaussian_by_shape",
        thread: "https://github.com/MIC-DKFZ/nnUNet/pull/2980",
        truth: "a heatmap for each patch size stays on the GPU by lru_cache",
        causes: &["a cache keyed by shape"],
        lines: &["window.py:9"],
        scene: |job| {
            serve(job, 60, |job, turn| {
                job.put(
                    MIB + (turn * 37 % 60) * 16 * KIB,
                    "gaussian@/job/window.py:9,predict@/job/window.py:30,serve@/job/serve.py:18",
                );
            })
        },
    },
    Ill {
        name: "hook_list",
        thread: "https://github.com/jacobgil/pytorch-grad-cam/issues/71",
        truth: "a forward hook appends the output of one layer to a list",
        causes: &["outputs of one layer kept", "tensors kept by a hook of a module"],
        lines: &["net.py:13", "serve.py:20"],
        scene: |job| {
            let net = job.net("/job/net.py", MAKE, &sizes(1), 4 * MIB);
            for _ in 0..60 {
                let mut last = None;
                for layer in 0..6 {
                    let next = job.layer(&net, layer, 4 * MIB, SERVE);
                    // The hook keeps the output of the fourth layer.
                    if let Some(last) = last.replace(next).filter(|_| layer != 4) {
                        job.free(last);
                    }
                }
                job.free(last.expect("a layer"));
            }
        },
    },
    Ill {
        name: "cls_token_view",
        thread: "https://github.com/ViCCo-Group/thingsvision/pull/150",
        truth: "the first token is kept as a view, and with it the output of the whole sequence",
        causes: &["outputs of one layer kept"],
        lines: &["net.py:18", "serve.py:20"],
        scene: |job| {
            let net = job.net("/job/net.py", MAKE, &sizes(1), 4 * MIB);
            for _ in 0..60 {
                job.infer(&net, SERVE);
            }
        },
    },
    Ill {
        name: "lbfgs_history",
        thread: "https://github.com/ProGamerGov/neural-style-pt/issues/7",
        truth: "LBFGS keeps directions of up to history_size steps, 100 by default",
        causes: &["history kept by an optimizer"],
        lines: &["train.py:33"],
        scene: |job| {
            let mut net = job.net("/job/net.py", MAKE, &sizes(1), 2 * MIB);
            let by = torch("LBFGS.step", "optim/lbfgs.py", "train@/job/train.py:33");
            for _ in 0..40 {
                job.zero_grad(&mut net);
                let kept = job.forward(&net, "train@/job/train.py:30");
                job.backward(&mut net, kept, "train@/job/train.py:31");
                let flat = job.put(55 * MIB, &by);
                job.put(55 * MIB, &by);
                job.put(55 * MIB, &by);
                job.free(flat);
            }
        },
    },
    Ill {
        name: "features_joined",
        thread: "https://github.com/pytorch/pytorch/issues/2302",
        truth: "torch.cat joins the features of all pictures anew for each one",
        causes: &["a tensor that grows by `torch.cat`"],
        lines: &["extract.py:22"],
        scene: |job| {
            let net = job.net("/job/net.py", MAKE, &sizes(1), 4 * MIB);
            let mut all = None;
            for turn in 0..80 {
                let out = job.infer(&net, "main@/job/extract.py:21");
                let next = job.put((turn + 2) * 3 * MIB, "main@/job/extract.py:22");
                if let Some(old) = all.replace(next) {
                    job.free(old);
                }
                job.free(out);
            }
        },
    },
    Ill {
        name: "tensors_of_a_queue",
        thread: "https://github.com/pytorch/pytorch/issues/27975",
        truth: "the consumer keeps tensors that came through a queue, each mapped by an IPC handle",
        causes: &["memory never freed"],
        lines: &["consumer.py:11"],
        scene: |job| {
            serve(job, 60, |job, turn| {
                job.line(&format!("IpcOpen addr=i{turn} bytes=2M by=rebuild_cuda_tensor@/v/site-packages/torch/multiprocessing/reductions.py:170,run@/job/consumer.py:11"));
            })
        },
    },
    Ill {
        name: "lists_of_losses",
        thread: "https://github.com/ltatzel/PyTorchHessianFree/pull/1",
        truth: "losses and outputs of all batches are kept in lists until one backward pass",
        causes: &["one graph for a whole loop"],
        lines: &["hf.py:21"],
        scene: |job| {
            let mut net = job.net("/job/net.py", MAKE, &sizes(1), 6 * MIB);
            for _ in 0..2 {
                let mut kept = vec![];
                for _ in 0..12 {
                    kept.extend(job.forward(&net, "losses@/job/hf.py:21,main@/job/run.py:30"));
                }
                job.backward(&mut net, kept, "main@/job/run.py:31");
                job.adam(&mut net, false, "main@/job/run.py:32");
            }
        },
    },
    Ill {
        name: "activations_of_a_rollout",
        thread: "https://github.com/pytorch/pytorch/issues/13613",
        truth: "inference with gradients: what the layers save is held until the loop's results go",
        causes: &["activations of a loop kept by its graph", "outputs or losses kept with their graph"],
        lines: &["rollout.py:21"],
        scene: |job| {
            let net = job.net("/job/net.py", MAKE, &sizes(1), 6 * MIB);
            let mut kept = vec![];
            for _ in 0..16 {
                kept.extend(job.forward(&net, "rollout@/job/rollout.py:21,main@/job/run.py:30"));
            }
            job.free_all(&mut kept);
            for _ in 0..16 {
                let out = job.infer(&net, "test@/job/rollout.py:40");
                job.free(out);
            }
        },
    },
    Ill {
        name: "pairwise_differences",
        thread: "https://github.com/lotus-data/lotus/pull/16",
        truth: "one function makes differences of all pairs, then their squares, which fails",
        causes: &["a large intermediate result, needed twice"],
        lines: &["distances.py:7", "distances.py:6"],
        scene: |job| {
            let net = job.net("/job/net.py", MAKE, &sizes(1), 4 * MIB);
            let out = job.infer(&net, SERVE);
            job.put(900 * MIB, "pairs@/job/distances.py:6,main@/job/run.py:30");
            job.out_of_memory(900 * MIB, "pairs@/job/distances.py:7,main@/job/run.py:30");
            job.free(out);
        },
    },
    Ill {
        name: "jax_in_a_thread_of_its_own",
        thread: "https://github.com/google-deepmind/mujoco/issues/1431",
        truth: "JAX reports the failure from a thread of PJRT's; the program's line launched the step",
        causes: &["", "one request larger than the card"],
        lines: &["train.py:31"],
        scene: |job| {
            job.line("Alloc addr=arena bytes=96G by=libfoo.so,xla_cuda_plugin.so");
            job.line("compiled handle=f bytes=90G text=jit_step");
            job.line("buffer addr=p bytes=8G by=init@/job/train.py:12");
            job.line(
                "launched handle=f by=cache_miss@/v/site-packages/jax/_src/pjit.py:200,fit@/job/train.py:31",
            );
            job.line("jax_oom bytes=90G handle=f text=out_of_memory by=ExecuteThunks@xla_cuda_plugin.so");
        },
    },
    Ill {
        name: "gradients_in_a_list",
        thread: "https://github.com/utkuozbulak/pytorch-cnn-visualizations/issues/53",
        truth: "a backward hook keeps the gradients of each picture",
        causes: &["gradients kept, or their graph (`create_graph=True`)"],
        lines: &["net.py:10", "train.py:31"],
        scene: |job| {
            let mut net = job.net("/job/net.py", MAKE, &sizes(1), 2 * MIB);
            for _ in 0..40 {
                let kept = job.forward(&net, "train@/job/train.py:30");
                job.backward(&mut net, kept, "train@/job/train.py:31");
                // Nothing gives them back.
                net.gradients.clear();
            }
        },
    },
    Ill {
        name: "cupy_pool_lies_idle",
        thread: "https://github.com/cupy/cupy/issues/6616",
        truth: "CuPy's pool keeps what the preparation used, while PyTorch works",
        causes: &["another library's idle pool"],
        lines: &["prepare.py:9"],
        scene: |job| {
            for n in 0..6 {
                job.line(&format!("Alloc addr=c{n} bytes=100M by=libcudart.so,/v/site-packages/cupy/cuda/memory.cpython-312-x86_64-linux-gnu.so,prepare@/job/prepare.py:9,main@/job/run.py:10"));
            }
            let mut net = job.net("/job/net.py", MAKE, &sizes(1), 4 * MIB);
            (0..20).for_each(|_| job.step(&mut net, "/job/train.py", 30));
        },
    },
    Ill {
        name: "accumulated_on_the_gpu",
        thread: "https://github.com/JohnGiorgi/DeCLUTR/pull/151",
        truth: "embeddings of all batches are collected on the GPU",
        causes: &["outputs collected on the GPU until the loop ends", "outputs of one layer kept"],
        lines: &["encoder.py:21", "net.py:18"],
        scene: |job| {
            let net = job.net("/job/net.py", MAKE, &sizes(1), 8 * MIB);
            let mut all = vec![];
            for _ in 0..40 {
                all.push(job.infer(&net, "Encoder.call@/job/encoder.py:21,main@/job/run.py:30"));
            }
            let joined = job.put(320 * MIB, "Encoder.call@/job/encoder.py:24,main@/job/run.py:30");
            job.free_all(&mut all);
            job.free(joined);
        },
    },
    Ill {
        name: "preprocessing_on_a_stream",
        thread: "https://github.com/pytorch/pytorch/issues/1529",
        truth: "preparation ran on a side stream, whose cache stays while the main stream works",
        causes: &["a side stream's idle cache"],
        lines: &["prepare.py:6"],
        scene: |job| {
            job.line("Alloc addr=s0 bytes=600M by=libcudart.so,libc10_cuda.so in_allocate=1");
            job.stream = 16;
            for _ in 0..4 {
                let block = job.put(300 * MIB, "prepare@/job/prepare.py:6,main@/job/run.py:9");
                job.free(block);
            }
            job.stream = 0;
            job.reserved = 900 * MIB;
            let mut net = job.net("/job/net.py", MAKE, &sizes(1), 4 * MIB);
            (0..20).for_each(|_| job.step(&mut net, "/job/train.py", 30));
        },
    },
    Ill {
        name: "evaluation_with_gradients_fails",
        thread: "https://github.com/Tushar-N/pytorch-resnet3d/issues/14",
        truth: "features are extracted clip by clip without no_grad, until memory runs out",
        causes: &["activations of a loop kept by its graph", "outputs or losses kept with their graph"],
        lines: &["extract.py:21"],
        scene: |job| {
            let net = job.net("/job/net.py", MAKE, &sizes(1), 6 * MIB);
            for _ in 0..16 {
                job.forward(&net, "clips@/job/extract.py:21,main@/job/run.py:30");
            }
            let by = inside("Net.forward@/job/net.py:10", "clips@/job/extract.py:21,main@/job/run.py:30");
            job.out_of_memory(60 * MIB, &by);
        },
    },
    Ill {
        name: "attention_fails",
        thread: "https://github.com/CyberZHG/keras-multi-head/issues/1",
        truth: "scores of a long sequence do not fit",
        causes: ATTENTION,
        lines: &["net.py:22", "net.py:23"],
        scene: |job| {
            let net = job.net("/job/net.py", MAKE, &sizes(1), 4 * MIB);
            let line = |line: u32| inside(&format!("SelfAttention.forward@/job/net.py:{line}"), SERVE);
            job.infer(&net, SERVE);
            for _ in 0..3 {
                job.put(6 * MIB, &line(20));
            }
            job.put(600 * MIB, &line(22));
            job.put(600 * MIB, &line(23));
            job.out_of_memory(600 * MIB, &line(24));
        },
    },
];
