//! Programs that look ill and are not.

use super::Healthy;
use super::job::{KIB, MIB, inside, sizes, torch};

const AT: &str = "main@/job/run.py:40,<module>@/job/run.py:90";

pub(crate) const CASES: &[Healthy] = &[
    Healthy {
        name: "h_training",
        scene: |job| {
            let mut net = job.net("/job/net.py", AT, &sizes(1), 6 * MIB);
            (0..20).for_each(|_| job.step(&mut net, "/job/train.py", 30));
        },
    },
    // Generator and discriminator of one architecture: both have gradients.
    Healthy {
        name: "h_gan_of_equal_nets",
        scene: |job| {
            let mut one = job.net("/job/net.py", "main@/job/run.py:12", &sizes(1), 4 * MIB);
            let mut other = job.net("/job/net.py", "main@/job/run.py:13", &sizes(1), 4 * MIB);
            for _ in 0..20 {
                job.step(&mut one, "/job/train.py", 30);
                job.step(&mut other, "/job/train.py", 40);
            }
        },
    },
    // An average of the weights is what the program wants: it may be said that it costs memory.
    Healthy {
        name: "h_ema",
        scene: |job| {
            let mut net = job.net("/job/net.py", AT, &sizes(1), 6 * MIB);
            let by = torch("deepcopy", "copy.py", "Average.__init__@/job/ema.py:9,main@/job/run.py:42");
            for size in sizes(1) {
                job.put(size, &by.replace("/v/site-packages/torch/copy.py", "/usr/lib/python3.12/copy.py"));
            }
            (0..20).for_each(|_| job.step(&mut net, "/job/train.py", 30));
        },
    },
    // Longer sequences by design.
    Healthy {
        name: "h_curriculum",
        scene: |job| {
            let mut net = job.net("/job/net.py", AT, &sizes(1), MIB);
            for step in 0..40 {
                net.activation = (1 + step / 10) * 2 * MIB;
                job.step(&mut net, "/job/train.py", 30);
            }
        },
    },
    // Each step a little longer than the one before: nothing is left.
    Healthy {
        name: "h_sizes_that_rise",
        scene: |job| {
            let mut net = job.net("/job/net.py", AT, &sizes(1), MIB);
            for step in 0..40 {
                net.activation = MIB + step * 200 * KIB;
                job.step(&mut net, "/job/train.py", 30);
            }
        },
    },
    // Four streams, made once, that take turns: a workspace for each.
    Healthy {
        name: "h_four_streams",
        scene: |job| {
            let net = job.net("/job/net.py", AT, &sizes(1), 4 * MIB);
            for turn in 0..80_u64 {
                job.stream = 16 + turn % 4;
                if turn < 4 {
                    job.put(
                        8_519_680,
                        &format!(
                            "getCUDABlasWorkspace@libtorch_cuda.so,{}",
                            inside("Net.forward@/job/net.py:10", "serve@/job/serve.py:20")
                        ),
                    );
                }
                let out = job.infer(&net, "serve@/job/serve.py:20");
                job.free(out);
            }
        },
    },
    // A buffer with a bound: the oldest goes as the newest comes.
    Healthy {
        name: "h_ring",
        scene: |job| {
            let net = job.net("/job/net.py", AT, &sizes(1), 4 * MIB);
            let mut ring = vec![];
            for _ in 0..80 {
                let out = job.infer(&net, "act@/job/rl.py:20");
                job.free(out);
                ring.push(job.put(2 * MIB, "Replay.push@/job/rl.py:8,act@/job/rl.py:21"));
                if ring.len() > 10 {
                    let oldest = ring.remove(0);
                    job.free(oldest);
                }
            }
        },
    },
    // A memoised mask for each of a few lengths.
    Healthy {
        name: "h_few_masks",
        scene: |job| {
            let net = job.net("/job/net.py", AT, &sizes(1), 4 * MIB);
            for turn in 0..80_u64 {
                if turn < 5 {
                    job.put((turn + 1) * MIB, "causal_mask@/job/net.py:60,serve@/job/serve.py:19");
                }
                let out = job.infer(&net, "serve@/job/serve.py:20");
                job.free(out);
            }
        },
    },
    // Windows of attention are no larger than what goes in.
    Healthy {
        name: "h_windowed_attention",
        scene: |job| {
            let net = job.net("/job/net.py", AT, &sizes(1), 4 * MIB);
            for _ in 0..20 {
                let by = inside("WindowAttention.forward@/job/net.py:22", "serve@/job/serve.py:20");
                let blocks: Vec<_> = (0..4).map(|_| job.put(8 * MIB, &by)).collect();
                let scores = job.put(4 * MIB, &by);
                job.free(scores);
                blocks.into_iter().for_each(|block| job.free(block));
                let out = job.infer(&net, "serve@/job/serve.py:20");
                job.free(out);
            }
        },
    },
    // Gradients are added up over four calls.
    Healthy {
        name: "h_accumulation",
        scene: |job| {
            let mut net = job.net("/job/net.py", AT, &sizes(1), 6 * MIB);
            for _ in 0..10 {
                for _ in 0..4 {
                    let kept = job.forward(&net, "train@/job/train.py:30");
                    job.backward(&mut net, kept, "train@/job/train.py:31");
                }
                job.adam(&mut net, true, "train@/job/train.py:34");
                job.zero_grad(&mut net);
            }
        },
    },
    // A frozen teacher that is larger than the student.
    Healthy {
        name: "h_teacher_of_other_sizes",
        scene: |job| {
            let teacher = job.net(
                "/job/net.py",
                "main@/job/run.py:12",
                &[9 * MIB, 10 * MIB, 11 * MIB, 13 * MIB],
                4 * MIB,
            );
            let mut net = job.net("/job/net.py", "main@/job/run.py:13", &sizes(1), 4 * MIB);
            for _ in 0..20 {
                let out = job.infer(&teacher, "train@/job/train.py:20");
                job.step(&mut net, "/job/train.py", 30);
                job.free(out);
            }
        },
    },
    // Outputs are collected on the CPU.
    Healthy {
        name: "h_validation",
        scene: |job| {
            let mut net = job.net("/job/net.py", AT, &sizes(1), 6 * MIB);
            for _ in 0..4 {
                (0..6).for_each(|_| job.step(&mut net, "/job/train.py", 30));
                for _ in 0..10 {
                    let out = job.infer(&net, "validate@/job/train.py:60");
                    job.free(out);
                }
            }
        },
    },
];
