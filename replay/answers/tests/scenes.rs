//! Programs as scenes: what recurs is growth, what is made once is none, and each cause is told from its neighbours.

mod told;

use told::{LINEAR, MODULE, block, free, told};

const ENGINE: &str = "torch::autograd::Engine::evaluate_function@libtorch_cpu.so";

/// A call of a model of `n_layers` layers in a loop, which keeps what each layer saves; called at `train.py:line`.
fn forward(call: usize, n_layers: usize, line: u32) -> String {
    let by =
        |at: u32| format!("{LINEAR},{MODULE},Net.forward@/job/net.py:{at},{MODULE},run@/job/train.py:{line}");
    let mut scene = block(&format!("e{call}"), 1, &by(10));
    for layer in 0..n_layers {
        scene += &block(
            &format!("t{call}_{layer}"),
            1,
            &format!("softmax@/v/site-packages/torch/nn/functional.py:9,{}", by(12)),
        );
        scene += &block(&format!("l{call}_{layer}"), 2, &by(12));
        scene += &free(&format!("t{call}_{layer}"), 1);
    }
    scene + &block(&format!("h{call}"), 1, &by(14))
}

fn give_back(call: usize, n_layers: usize) -> String {
    let layers: String = (0..n_layers).map(|layer| free(&format!("l{call}_{layer}"), 2)).collect();
    layers + &free(&format!("e{call}"), 1) + &free(&format!("h{call}"), 1)
}

#[test]
fn the_layers_of_one_forward_pass_are_no_growth() {
    let told = told(&forward(0, 48, 20));
    assert!(told.starts_with("Verdict: nothing is wrong"), "{told}");
    assert!(!told.contains('%'), "{told}");
}

#[test]
fn three_calls_of_a_model_that_each_leave_their_layers_are_growth_with_their_own_count() {
    let told = told(&(0..8).map(|call| forward(call, 12, 40)).collect::<String>());
    assert!(told.starts_with("Verdict: memory grows: outputs or losses kept with their graph"), "{told}");
    assert!(told.contains("24.00 MiB per call of train.py:40, 8 calls"), "{told}");
    // Two could be the old one and the new one.
    let told = self::told(&(0..2).map(|call| forward(call, 12, 40)).collect::<String>());
    assert!(!told.contains("memory grows"), "{told}");
}

#[test]
fn what_a_step_gives_back_is_no_growth_however_few_the_steps() {
    for n in 1..6 {
        let steps = (0..n).map(|call| forward(call, 12, 20) + &give_back(call, 12));
        let told = told(&steps.collect::<String>());
        assert!(told.starts_with("Verdict: nothing is wrong"), "{n}: {told}");
    }
}

#[test]
fn gradients_and_the_state_of_an_optimizer_are_made_once() {
    let mut scene = forward(0, 12, 20);
    for n in 0..60 {
        scene += &block(&format!("s{n}"), 1, ENGINE);
        scene += &block(&format!("g{n}"), 2, ENGINE);
        scene += &free(&format!("s{n}"), 1);
    }
    for n in 0..60 {
        let by = "step@/job/my_adam.py:76,wrapper@/v/site-packages/torch/optim/optimizer.py:533,run@/job/train.py:22";
        scene += &block(&format!("x{n}"), 1, by);
        scene += &block(&format!("m{n}"), 2, by);
        scene += &free(&format!("x{n}"), 1);
    }
    let told = told(&scene);
    assert!(told.starts_with("Verdict: nothing is wrong"), "{told}");
    assert!(told.contains("memory rose once"), "{told}");
}

/// Adapters that are loaded, used and left; the loader's function is called as `name` says.
fn adapters(name: &str) -> String {
    let round = |n: usize| {
        let by = format!("{name}@/job/serve.py:10,serve@/job/serve.py:30");
        block(&format!("k{n}"), 4, &by) + &forward(n, 6, 31) + &give_back(n, 6)
    };
    (0..20).map(round).collect()
}

#[test]
fn a_function_s_name_decides_nothing() {
    for name in ["load_adapter", "init_cache", "fetch"] {
        let told = told(&adapters(name));
        assert!(told.starts_with("Verdict: memory grows"), "{name}: {told}");
        assert!(told.contains("serve.py:10"), "{name}: {told}");
    }
}

#[test]
fn what_had_grown_until_a_failure_is_named_though_the_program_cleans_up_after_it() {
    let swap = |n: usize| {
        let by = "<lambda>@/v/site-packages/torch/nn/modules/module.py:1050,Module._apply@/v/site-packages/torch/nn/modules/module.py:900,\
                  swap@/job/serve.py:12,serve@/job/serve.py:20";
        let made: String = (0..4).map(|at| block(&format!("w{n}_{at}"), 40, by)).collect();
        made + &forward(n, 4, 21) + &give_back(n, 4)
    };
    let failed = "MemInfo bytes=10M extra=60M\noom bytes=40M requested=40M allocated=480M reserved=500M by=swap@/job/serve.py:12\n";
    let cleans_up: String =
        (0..3).flat_map(|n| (0..4).map(move |at| free(&format!("w{n}_{at}"), 40))).collect();
    let told = told(&((0..3).map(swap).collect::<String>() + failed + &cleans_up));
    assert!(
        told.starts_with("Verdict: out of memory: models loaded repeatedly, with the old ones kept"),
        "{told}"
    );
    assert!(told.contains("480.00 MiB had accumulated by then: 160.00 MiB each time, 3 times"), "{told}");
    assert!(told.contains("serve.py:12"), "{told}");
}

#[test]
fn a_gradient_that_keeps_its_graph_is_told_from_one_that_is_made_once() {
    let step = |n: usize| {
        let by =
            "mul@libtorch.so^torch::autograd::generated::MulBackward0^f@/job/train.py:5^main@/job/train.py:9";
        forward(n, 4, 20) + &block(&format!("k{n}"), 6, by) + &give_back(n, 4)
    };
    let told = told(&(0..30).map(step).collect::<String>());
    assert!(told.contains("`create_graph=True`"), "{told}");
}

#[test]
fn side_streams_that_are_made_anew_strand_what_they_free() {
    let mut scene = String::new();
    let mut reserved = 0;
    for n in 0..12_u64 {
        reserved += 64;
        scene += &format!(
            "Alloc addr={0:#x} bytes=64M by=libcudart.so,libc10_cuda.so in_allocate=1
             block addr={0:#x} bytes=64M requested=64M stream={1} allocated=64M reserved={reserved}M by=push@/job/train.py:13
             free addr={0:#x} bytes=64M allocated=0 reserved={reserved}M\n",
            0x1_0000_0000 + n * (64 << 20),
            n + 1
        );
        scene += &forward(n as usize, 3, 20);
        scene += &give_back(n as usize, 3);
    }
    let told = told(&scene);
    assert!(told.contains("a new side stream each time") && told.contains("train.py:13"), "{told}");
    assert!(told.contains("once"), "{told}");
}

#[test]
fn temporaries_of_a_foreach_optimizer_that_fail_have_their_remedy() {
    let by = "_multi_tensor_adam@/v/site-packages/torch/optim/adam.py:500,adam@/v/site-packages/torch/optim/adam.py:800,run@/job/train.py:22";
    let scene: String = (0..8).map(|n| block(&format!("f{n}"), 50, by)).collect();
    let failed = format!(
        "MemInfo bytes=10M extra=600M\noom bytes=50M requested=50M allocated=400M reserved=420M by={by}\n"
    );
    let told = told(&(scene + &failed));
    assert!(told.contains("fused=True"), "{told}");
    assert!(!told.contains("larger card"), "{told}");
}

#[test]
fn a_library_that_pytorch_s_cache_starves_is_told_where_the_program_calls_it() {
    let told = told(
        "Alloc addr=a bytes=200M by=libc10_cuda.so
         block addr=a bytes=200M requested=200M allocated=200M reserved=200M by=f@/job/a.py:2
         free addr=a bytes=200M allocated=0 reserved=200M
         Create bytes=16M result=2 by=libnccl.so.2,all_reduce@/job/a.py:40",
    );
    assert!(told.starts_with("Verdict: out of memory: PyTorch's cache starves a library"), "{told}");
    assert!(told.contains("empty_cache()") && told.contains("a.py:40"), "{told}");
}

#[test]
fn a_model_that_was_loaded_onto_the_gpu_and_is_used_is_no_second_copy() {
    let load = "_to@/v/site-packages/torch/_utils.py:90,load@/v/site-packages/torch/serialization.py:1300,main@/job/train.py:4";
    let apply = "<lambda>@/v/site-packages/torch/nn/modules/module.py:1050,Module._apply@/v/site-packages/torch/nn/modules/module.py:900,main@/job/train.py:6";
    let loaded: String = (0..8).map(|n| block(&format!("c{n}"), 30, load)).collect();
    let gradients: String = (0..8).map(|n| block(&format!("g{n}"), 30, ENGINE)).collect();
    let steps = |n: usize| forward(n, 4, 20) + &give_back(n, 4);
    let used = told(&(loaded.clone() + &steps(0) + &gradients + &steps(1)));
    assert!(!used.contains("torch.load"), "{used}");
    let copied: String = (0..8).map(|n| block(&format!("p{n}"), 30, apply)).collect();
    let twice = told(&(loaded + &copied + &steps(0) + &gradients + &steps(1)));
    assert!(
        twice.contains("240.00 MiB of the peak")
            && twice.contains("torch.load")
            && twice.contains("train.py:4"),
        "{twice}"
    );
}

/// A loop that keeps a block each time, at a stack.
fn kept_each_time(by: &str) -> String {
    let round = |n: usize| block(&format!("k{n}"), 8, by) + &forward(n, 6, 31) + &give_back(n, 6);
    (0..20).map(round).collect()
}

#[test]
fn what_a_library_keeps_has_the_library_s_own_remedy() {
    let of_metric = "update@/v/site-packages/torchmetrics/metric.py:480,validate@/job/train.py:30";
    let of_adapters =
        "LoraLayer.update_layer@/v/site-packages/peft/tuners/lora/layer.py:90,serve@/job/serve.py:12";
    for (by, remedy) in [(of_metric, "metric.reset()"), (of_adapters, "delete_adapter")] {
        let told = told(&kept_each_time(by));
        assert!(told.starts_with("Verdict: memory grows") && told.contains(remedy), "{told}");
    }
    // The same names in a file of the program's own say nothing.
    let told = told(&kept_each_time("update_layer@/job/peft.py:90,serve@/job/serve.py:12"));
    assert!(told.starts_with("Verdict: memory grows") && !told.contains("delete_adapter"), "{told}");
}

#[test]
fn nothing_has_a_graph_in_a_function_that_no_grad_decorates() {
    let decorated = "decorate_context@/v/site-packages/torch/utils/_contextlib.py:116,main@/job/eval.py:9";
    let of_model = format!("{LINEAR},{MODULE},Net.forward@/job/net.py:12,{MODULE},run@/job/eval.py:5");
    let by = format!("softmax@/v/site-packages/torch/nn/functional.py:9,{of_model}");
    let each = |n: usize| block(&format!("k{n}"), 8, &by) + &block("x", 8, "run@/job/eval.py:4");
    let with_graph = told(&(0..20).map(|n| each(n) + &free("x", 8)).collect::<String>());
    assert!(with_graph.contains("with their graph"), "{with_graph}");
    let without = told(&kept_each_time(&format!(
        "softmax@/v/site-packages/torch/nn/functional.py:9,{of_model},{decorated}"
    )));
    assert!(without.starts_with("Verdict: memory grows"), "{without}");
    assert!(!without.contains("graph"), "{without}");
}

#[test]
fn an_optimizer_s_state_is_none_of_its_temporaries_though_its_first_step_failed() {
    let by = "Adam._init_group@/v/site-packages/torch/optim/adam.py:180,Adam.step@/v/site-packages/torch/optim/adam.py:220,run@/job/train.py:22";
    let weights = "<lambda>@/v/site-packages/torch/nn/modules/module.py:1050,Module._apply@/v/site-packages/torch/nn/modules/module.py:900,run@/job/train.py:4";
    let weights: String = (0..4).map(|n| block(&format!("w{n}"), 50, weights)).collect();
    let state: String = (0..5).map(|n| block(&format!("s{n}"), 50, by)).collect();
    let failed = format!(
        "MemInfo bytes=10M extra=500M\noom bytes=50M requested=50M allocated=450M reserved=460M by={by}\n"
    );
    let told = told(&(weights + &state + &failed));
    assert!(told.contains("optimizer state, which is created at the first step"), "{told}");
    assert!(!told.contains("fused=True"), "{told}");
}

#[test]
fn a_list_of_numbers_is_no_fault() {
    let by = "cross_entropy@/v/site-packages/torch/nn/functional.py:3000,main@/job/train.py:10";
    let round = |n: usize| {
        format!("block addr=n{n} bytes=512 requested=4 by={by}\n") + &forward(n, 6, 31) + &give_back(n, 6)
    };
    let weights =
        "Alloc addr=w bytes=400M by=libc10_cuda.so\n".to_owned() + &block("w", 200, "main@/job/train.py:2");
    let told = told(&(weights + &(0..40).map(round).collect::<String>()));
    assert!(told.starts_with("Verdict: nothing is wrong"), "{told}");
    assert!(told.contains("`.item()`"), "{told}");
}

/// A queue of `capacity` batches: of each step one is put in, and the oldest goes once it is full.
fn queue(n_steps: usize, capacity: usize) -> String {
    let step = |n: usize| {
        let oldest = n.checked_sub(capacity).map(|oldest| free(&format!("q{oldest}"), 4));
        block(&format!("q{n}"), 4, "remember@/job/agent.py:14,main@/job/agent.py:40")
            + &oldest.unwrap_or_default()
            + &forward(n, 4, 20)
            + &give_back(n, 4)
    };
    (0..n_steps).map(step).collect()
}

#[test]
fn a_queue_that_is_full_does_not_grow() {
    for (n_steps, capacity) in [(76, 60), (100, 75), (40, 32)] {
        let told = told(&queue(n_steps, capacity));
        assert!(told.starts_with("Verdict: nothing is wrong"), "{n_steps}, {capacity}: {told}");
        assert!(!told.contains("to the end") && !told.contains("99.9 %"), "{told}");
        assert!(!told.contains("a loop collects"), "{told}");
    }
    // While it fills, it cannot be told from a leak.
    let told = told(&queue(40, 100));
    assert!(told.starts_with("Verdict: memory grows: results kept"), "{told}");
}

#[test]
fn what_the_set_up_made_does_not_grow_while_the_program_works_on() {
    let set_up = |n: usize| {
        block(&format!("s{n}"), 40, "main@/job/serve.py:11") + &forward(n, 4, 15) + &give_back(n, 4)
    };
    let request = |n: usize| {
        let name = format!("a{n}");
        block(&name, 1, "main@/job/serve.py:30") + &free(&name, 1)
    };
    let made: String = (0..12).map(set_up).collect();
    let serves: String = (0..300).map(request).collect();
    let served = told(&(made.clone() + &serves));
    assert!(served.starts_with("Verdict: nothing is wrong"), "{served}");
    // To the end, as far as this trace goes.
    let grows = told(&made);
    assert!(grows.starts_with("Verdict: memory grows"), "{grows}");
}

#[test]
fn results_of_a_workspace_s_size_are_results_if_one_stream_has_many() {
    let keep = |n: usize| {
        let by = format!("{MODULE},Bank.forward@/job/bank.py:17,{MODULE},collect@/job/bank.py:30");
        block(&format!("k{n}"), 32, &by) + &forward(n, 4, 31) + &give_back(n, 4)
    };
    let told = told(&(0..40).map(keep).collect::<String>());
    assert!(told.starts_with("Verdict: memory grows") && told.contains("bank.py:17"), "{told}");
}

#[test]
fn a_checkpoint_that_is_loaded_onto_a_full_gpu_comes_before_what_else_is_held() {
    let load = "_to@/v/site-packages/torch/_utils.py:90,load@/v/site-packages/torch/serialization.py:1300,resume@/job/train.py:32,main@/job/train.py:45";
    let apply = "<lambda>@/v/site-packages/torch/nn/modules/module.py:1050,Module._apply@/v/site-packages/torch/nn/modules/module.py:900,main@/job/train.py:6";
    let model: String = (0..8).map(|n| block(&format!("p{n}"), 400, apply)).collect();
    let gradients: String = (0..8).map(|n| block(&format!("g{n}"), 400, ENGINE)).collect();
    let step = |n: usize| forward(n, 4, 20) + &give_back(n, 4);
    let trained = model + &step(0) + &gradients + &step(1);
    let pool = block("pool", 40_000, "Engine.__init__@/job/train.py:23,main@/job/train.py:41");
    let loaded: String = (0..8).map(|n| block(&format!("c{n}"), 400, load)).collect();
    let failed = format!(
        "Alloc addr=segments bytes=49610M by=libcudart.so,libc10_cuda.so in_allocate=1
         Alloc bytes=400M result=2 by=libcudart.so,libc10_cuda.so in_allocate=1
         MemInfo bytes=10M extra=49640M
         oom bytes=400M requested=400M allocated=49600M reserved=49610M by={load}\n"
    );
    let told = told(&(pool + &trained + &loaded + &failed));
    let first = told.lines().next().unwrap_or_default();
    assert!(first.contains("checkpoint loaded onto the GPU"), "{told}");
    assert!(told.contains("train.py:23"), "{told}");
}

#[test]
fn what_was_collected_before_a_failure_did_not_wait_then() {
    let cycles: String = (0..8).map(|n| block(&format!("c{n}"), 50, "build@/job/train.py:13")).collect();
    let collect = |n: usize| format!("free addr=c{n} bytes=50M collecting=1\n");
    let collected: String = (0..8).map(collect).collect();
    let pool = block("pool", 3000, "Engine.__init__@/job/train.py:23");
    let failed = "MemInfo bytes=10M extra=3100M\noom bytes=60M requested=60M allocated=3000M reserved=3000M by=run@/job/train.py:50\n";
    let before = told(&(cycles.clone() + &collected + &pool + failed));
    assert!(!before.contains("collector"), "{before}");
    let after = told(&(cycles + &pool + failed + &collected));
    assert!(
        after.contains("400.00 MiB of a peak of 3.32 GiB waited for Python's garbage collector"),
        "{after}"
    );
}

#[test]
fn a_rate_times_its_number_is_what_was_left() {
    // Every other call leaves three times as much.
    let call = |n: usize| forward(n, if n.is_multiple_of(2) { 12 } else { 4 }, 40);
    let told = told(&(0..12).map(call).collect::<String>());
    assert!(told.contains("16.00 MiB per call of train.py:40, 12 calls"), "{told}");
}

#[test]
fn growth_by_a_metric_is_named_where_the_program_calls_it() {
    let round = |n: usize| {
        let of_metric = "update@/v/site-packages/torchmetrics/metric.py:480,validate@/job/train.py:30";
        block(&format!("y{n}"), 8, "batches@/job/train.py:19")
            + &block(&format!("m{n}"), 4, of_metric)
            + &forward(n, 6, 31)
            + &give_back(n, 6)
    };
    let told = told(&(0..20).map(round).collect::<String>());
    assert!(told.contains("metric.reset()") && told.contains("where: validate (/job/train.py:30)"), "{told}");
}

#[test]
fn models_that_an_accelerator_keeps_have_its_remedy() {
    let apply = "<lambda>@/v/site-packages/torch/nn/modules/module.py:1050,Module._apply@/v/site-packages/torch/nn/modules/module.py:900,fold@/job/train.py:12";
    let state = "Adam._init_group@/v/site-packages/torch/optim/adam.py:180,Adam.step@/v/site-packages/torch/optim/adam.py:220,\
                 AcceleratedOptimizer.step@/v/site-packages/accelerate/optimizer.py:170,fold@/job/train.py:24";
    let round = |n: usize| {
        let model: String = (0..4).map(|at| block(&format!("w{n}_{at}"), 20, apply)).collect();
        let state: String = (0..8).map(|at| block(&format!("s{n}_{at}"), 20, state)).collect();
        model
            + &forward(2 * n, 4, 20)
            + &give_back(2 * n, 4)
            + &state
            + &forward(2 * n + 1, 4, 20)
            + &give_back(2 * n + 1, 4)
    };
    let told = told(&(0..10).map(round).collect::<String>());
    assert!(told.starts_with("Verdict: memory grows: models loaded repeatedly"), "{told}");
    assert!(told.contains("accelerator.free_memory()"), "{told}");
}

#[test]
fn what_captures_leave_in_their_pools_is_no_side_stream_s() {
    let mut scene = String::new();
    let mut reserved = 0;
    for n in 0..12_u64 {
        reserved += 64;
        scene += &format!(
            "TorchPoolBegin handle={1}
             CaptureBegin stream={1} by=capture@/job/serve.py:20
             Alloc addr={0:#x} bytes=64M by=libcudart.so,libc10_cuda.so in_allocate=1
             block addr={0:#x} bytes=64M requested=64M stream={1} allocated=64M reserved={reserved}M by=push@/job/train.py:13
             free addr={0:#x} bytes=64M allocated=0 reserved={reserved}M
             TorchPoolEnd handle={1}
             CaptureEnd stream={1} handle=g{1}\n",
            0x1_0000_0000 + n * (64 << 20),
            n + 1
        );
        scene += &forward(n as usize, 3, 20);
        scene += &give_back(n as usize, 3);
    }
    let told = told(&scene);
    assert!(told.contains("CUDA graphs that share no pool"), "{told}");
    assert!(!told.contains("side stream"), "{told}");
}

#[test]
fn keys_and_values_of_an_idle_cache_are_counted_together() {
    let cache = |line: u32| {
        format!(
            "Cache.__init__@/v/site-packages/transformers/cache_utils.py:{line},cache_for@/job/chat.py:13,draft@/job/chat.py:20,main@/job/chat.py:40"
        )
    };
    let layers: String = (0..4)
        .map(|n| block(&format!("k{n}"), 300, &cache(100)) + &block(&format!("v{n}"), 300, &cache(101)))
        .collect();
    let call = |n: usize, by: &str| {
        let name = format!("t{n}");
        let by = format!("{LINEAR},{MODULE},Net.forward@/job/net.py:12,{MODULE},{by},main@/job/chat.py:40");
        block(&name, 2, &by) + &free(&name, 2)
    };
    let drafts: String = (0..24).map(|n| call(n, "draft@/job/chat.py:25")).collect();
    let trains: String = (24..64).map(|n| call(n, "train@/job/chat.py:60")).collect();
    let told = told(&(layers + &drafts + &trains));
    assert!(told.starts_with("Verdict: memory was kept: left idle after its work"), "{told}");
    assert!(told.contains("2.34 GiB lie idle") && told.contains("chat.py:13"), "{told}");
}

#[test]
fn results_that_a_decorated_function_collects_are_named_though_the_loop_has_ended() {
    let of = |line: u32| {
        format!(
            "Bank.forward@/job/bank.py:{line},{MODULE},collect@/job/bank.py:30,\
             decorate_context@/v/site-packages/torch/utils/_contextlib.py:116,main@/job/bank.py:56"
        )
    };
    let collect = |n: usize| {
        block(&format!("x{n}"), 1, "main@/job/bank.py:56")
            + &block(&format!("f{n}"), 2, &of(14))
            + &block(&format!("k{n}"), 32, &of(17))
            + &free(&format!("f{n}"), 2)
            + &free(&format!("x{n}"), 1)
    };
    let validate = |n: usize| {
        let by =
            format!("Bank.forward@/job/bank.py:14,{MODULE},validate@/job/bank.py:42,main@/job/bank.py:58");
        block(&format!("v{n}"), 2, &by) + &free(&format!("v{n}"), 2)
    };
    let apply = "<lambda>@/v/site-packages/torch/nn/modules/module.py:1050,Module._apply@/v/site-packages/torch/nn/modules/module.py:900,main@/job/bank.py:50";
    let weights = (0..4).map(|n| block(&format!("w{n}"), 2, apply));
    let scene = weights.chain((0..40).map(collect)).chain((0..60).map(validate)).collect::<String>();
    let told = told(&scene);
    assert!(told.contains("outputs of a model kept on the GPU after their loop"), "{told}");
    assert!(told.contains("bank.py:17") && !told.contains("memory grows"), "{told}");
}

#[test]
fn the_first_pass_through_a_model_s_layers_is_no_growth() {
    let moved = "Module.to.<locals>.convert@/v/site-packages/torch/nn/modules/module.py:1370,Module._apply@/v/site-packages/torch/nn/modules/module.py:965,main@/job/run.py:4";
    let weights: String = (0..24).map(|n| block(&format!("w{n}"), 4, moved)).collect();
    let failed = |by: &str| {
        format!(
            "Alloc addr=s bytes=900M by=libcudart.so,libc10_cuda.so in_allocate=1
             MemInfo bytes=10M extra=900M
             oom bytes=30M requested=30M allocated=830M reserved=900M by={by}\n"
        )
    };
    let at = |line: u32, called: u32| {
        format!("{LINEAR},{MODULE},Net.forward@/job/net.py:{line},{MODULE},main@/job/run.py:{called}")
    };
    let first: String = (0..23).map(|n| block(&format!("a{n}"), 30, &at(12, 9))).collect();
    let told_first = told(&(weights.clone() + &first + &failed(&at(12, 9))));
    assert!(
        told_first.starts_with("Verdict: out of memory: one step's activations are larger than the card"),
        "{told_first}"
    );
    // As many calls without a graph, of which one result each is kept.
    let calls = |n: usize| {
        let freed: String = (0..24).map(|layer| block(&format!("t{n}_{layer}"), 1, &at(11, 9))).collect();
        let free: String = (0..24).map(|layer| free(&format!("t{n}_{layer}"), 1)).collect();
        freed + &block(&format!("o{n}"), 30, &at(14, 9)) + &free
    };
    let kept = told(&(weights + &(0..23).map(calls).collect::<String>() + &failed(&at(14, 9))));
    assert!(kept.contains("23 calls") && kept.contains("kept"), "{kept}");
}

#[test]
fn the_state_that_an_optimizer_s_first_step_makes_is_no_growth() {
    let moved = "Module.to.<locals>.convert@/v/site-packages/torch/nn/modules/module.py:1370,Module._apply@/v/site-packages/torch/nn/modules/module.py:965,main@/job/run.py:4";
    let weights: String = (0..12).map(|n| block(&format!("w{n}"), 10, moved)).collect();
    let gradients: String = (0..12).map(|n| block(&format!("g{n}"), 10, ENGINE)).collect();
    let by = "Adam._init_group@/v/site-packages/torch/optim/adam.py:180,Adam.step@/v/site-packages/torch/optim/adam.py:240,main@/job/run.py:12";
    let state: String = (0..22).map(|n| block(&format!("m{n}"), 10, by)).collect();
    let failed = format!(
        "Alloc addr=s bytes=640M by=libcudart.so,libc10_cuda.so in_allocate=1
         MemInfo bytes=1M extra=640M
         oom bytes=10M requested=10M allocated=580M reserved=640M by={by}\n"
    );
    let scene = weights + &forward(0, 12, 10) + &gradients + &give_back(0, 12) + &state + &failed;
    let told = told(&scene);
    assert!(told.starts_with("Verdict: out of memory"), "{told}");
    assert!(!told.contains("accumulated") && !told.contains("history"), "{told}");
}

#[test]
fn outputs_of_calls_that_free_all_else_have_no_graph() {
    let at = |line: u32| {
        format!("Head.forward@/job/net.py:{line},{MODULE},track@/job/run.py:9,main@/job/run.py:20")
    };
    let call = |n: usize| {
        let layers = (0..12).map(|layer| block(&format!("t{n}_{layer}"), 1, &at(10 + layer)));
        let freed = (0..12).map(|layer| free(&format!("t{n}_{layer}"), 1));
        let outputs = block(&format!("b{n}"), 4, &at(30)) + &block(&format!("s{n}"), 2, &at(31));
        layers.collect::<String>() + &outputs + &freed.collect::<String>()
    };
    let told = told(&(0..20).map(call).collect::<String>());
    assert!(told.starts_with("Verdict: memory grows: results kept"), "{told}");
    assert!(told.contains("net.py:30") && told.contains("net.py:31"), "{told}");
}
