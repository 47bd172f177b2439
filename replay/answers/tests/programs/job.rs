//! A program's requests for memory, as PyTorch makes them: what modules, the backward pass and optimizers ask for, from where.

use std::collections::HashMap;
use std::fmt::Write as _;

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;

const TORCH: &str = "/v/site-packages/torch";

/// A block that is held.
#[derive(Clone, Copy)]
pub(crate) struct Block(usize);

#[derive(Default)]
pub(crate) struct Job {
    pub(crate) scene: String,
    /// Blocks from where this stands in the stack are left out.
    pub(crate) skips: Option<&'static str>,
    pub(crate) peak: u64,
    held: HashMap<usize, u64>,
    now: u64,
    n: usize,
    /// What PyTorch reserves in all, where that matters.
    pub(crate) reserved: u64,
    /// The stream of the next requests.
    pub(crate) stream: u64,
}

/// A model: sizes of its weights, and of the activations of its layers.
pub(crate) struct Net {
    pub(crate) file: &'static str,
    pub(crate) sizes: Vec<u64>,
    pub(crate) gradients: Vec<Block>,
    pub(crate) state: Vec<Block>,
    /// Bytes of what each layer keeps for the backward pass.
    pub(crate) activation: u64,
}

impl Job {
    /// Of a program whose requests from where this stands in the stack are left out.
    pub(crate) fn without(word: &'static str) -> Job {
        Job { skips: Some(word), ..Job::default() }
    }

    pub(crate) fn put(&mut self, bytes: u64, by: &str) -> Block {
        self.n += 1;
        if self.skips.is_some_and(|word| by.contains(word)) {
            return Block(self.n);
        }
        let (n, stream) = (self.n, self.stream);
        _ = writeln!(
            self.scene,
            "block addr=b{n} bytes={bytes} requested={bytes} stream={stream}{} by={by}",
            self.totals(bytes)
        );
        self.held.insert(n, bytes);
        self.now += bytes;
        self.peak = self.peak.max(self.now);
        Block(n)
    }

    /// What the backward pass requests in a snapshot, which has no stacks of it.
    pub(crate) fn put_bare(&mut self, bytes: u64) {
        self.n += 1;
        _ = writeln!(self.scene, "block addr=b{} bytes={bytes} requested={bytes}", self.n);
        self.held.insert(self.n, bytes);
        self.now += bytes;
        self.peak = self.peak.max(self.now);
    }

    pub(crate) fn free(&mut self, block: Block) {
        let Some(bytes) = self.held.remove(&block.0) else { return };
        self.now -= bytes;
        let totals = self.totals(0);
        _ = writeln!(self.scene, "free addr=b{} bytes={bytes}{totals}", block.0);
    }

    pub(crate) fn free_all(&mut self, blocks: &mut Vec<Block>) {
        for block in std::mem::take(blocks) {
            self.free(block);
        }
    }

    /// PyTorch's totals after a change, where they are told.
    fn totals(&self, more: u64) -> String {
        match self.reserved {
            0 => String::new(),
            reserved => format!(" allocated={} reserved={reserved}", self.now + more),
        }
    }

    /// Any other event.
    pub(crate) fn line(&mut self, text: &str) {
        _ = writeln!(self.scene, "{text}");
    }

    /// PyTorch is refused a segment, and raises.
    pub(crate) fn out_of_memory(&mut self, bytes: u64, by: &str) {
        let now = self.now;
        _ = writeln!(
            self.scene,
            "Alloc addr=segments bytes={now} by=libcudart.so,libc10_cuda.so in_allocate=1
             Alloc bytes={bytes} result=2 by=libcudart.so,libc10_cuda.so in_allocate=1
             MemInfo bytes=10M extra={}
             oom bytes={bytes} requested={bytes} allocated={now} reserved={now} by={by}",
            now + 20 * MIB
        );
    }

    /// A model, made on the CPU and moved at a line of the program.
    pub(crate) fn net(&mut self, file: &'static str, at: &str, sizes: &[u64], activation: u64) -> Net {
        let by = format!(
            "Module.to.<locals>.convert@{TORCH}/nn/modules/module.py:1370,Module._apply@{TORCH}/nn/modules/module.py:965,Module.to@{TORCH}/nn/modules/module.py:1384,{at}"
        );
        for size in sizes {
            self.put(*size, &by);
        }
        Net { file, sizes: sizes.to_vec(), gradients: vec![], state: vec![], activation }
    }

    /// A call of the model: what its layers keep, one block each.
    pub(crate) fn forward(&mut self, net: &Net, at: &str) -> Vec<Block> {
        (0..net.sizes.len()).map(|layer| self.layer(net, layer, net.activation, at)).collect()
    }

    /// The output of one layer.
    pub(crate) fn layer(&mut self, net: &Net, layer: usize, bytes: u64, at: &str) -> Block {
        self.put(bytes, &Job::line_of(net, layer, at))
    }

    /// Where a layer asks for its output.
    pub(crate) fn line_of(net: &Net, layer: usize, at: &str) -> String {
        format!("{},{}", linear(), inside(&format!("Net.forward@{}:{}", net.file, 10 + layer), at))
    }

    /// A call without gradients: one layer's output goes when the next is there. The last one stays.
    pub(crate) fn infer(&mut self, net: &Net, at: &str) -> Block {
        let mut last: Option<Block> = None;
        for layer in 0..net.sizes.len() {
            let next = self.layer(net, layer, net.activation, at);
            if let Some(last) = last.replace(next) {
                self.free(last);
            }
        }
        last.expect("a layer")
    }

    /// The backward pass gives the activations back, and makes the gradients that are not there.
    pub(crate) fn backward(&mut self, net: &mut Net, mut kept: Vec<Block>, at: &str) {
        let by = format!(
            "^AddmmBackward0^{},{}^backward@{TORCH}/_tensor.py:600,{at}",
            linear(),
            inside(&format!("Net.forward@{}:10", net.file), at)
        );
        let is_new = net.gradients.is_empty();
        for size in net.sizes.clone().into_iter().rev() {
            let scratch = self.put(net.activation, &by);
            if is_new {
                let gradient = self.put(size, &by);
                net.gradients.push(gradient);
            }
            if let Some(kept) = kept.pop() {
                self.free(kept);
            }
            self.free(scratch);
        }
        self.free_all(&mut kept);
    }

    /// Adam's step: its state at the first, and the temporaries of `foreach`.
    pub(crate) fn adam(&mut self, net: &mut Net, is_foreach: bool, at: &str) {
        if net.state.is_empty() {
            let by = format!(
                "Adam._init_group@{TORCH}/optim/adam.py:180,Adam.step@{TORCH}/optim/adam.py:220,{at}"
            );
            for size in net.sizes.clone() {
                let state = [self.put(size, &by), self.put(size, &by)];
                net.state.extend(state);
            }
        }
        let by = format!(
            "_multi_tensor_adam@{TORCH}/optim/adam.py:700,adam@{TORCH}/optim/adam.py:940,Adam.step@{TORCH}/optim/adam.py:250,{at}"
        );
        let single = format!(
            "_single_tensor_adam@{TORCH}/optim/adam.py:400,adam@{TORCH}/optim/adam.py:940,Adam.step@{TORCH}/optim/adam.py:250,{at}"
        );
        let mut temporaries: Vec<Block> = vec![];
        for size in net.sizes.clone() {
            if is_foreach {
                temporaries.push(self.put(size, &by));
            } else {
                let temporary = self.put(size, &single);
                self.free(temporary);
            }
        }
        self.free_all(&mut temporaries);
    }

    /// `zero_grad`: gradients go.
    pub(crate) fn zero_grad(&mut self, net: &mut Net) {
        let mut gradients = std::mem::take(&mut net.gradients);
        self.free_all(&mut gradients);
    }

    /// A step of training at `file:line` and the lines after it.
    pub(crate) fn step(&mut self, net: &mut Net, file: &str, line: u32) {
        let at = |offset: u32| format!("train@{file}:{},<module>@{file}:99", line + offset);
        self.zero_grad(net);
        let kept = self.forward(net, &at(0));
        self.backward(net, kept, &at(1));
        self.adam(net, false, &at(2));
    }
}

fn linear() -> String {
    format!("Linear.forward@{TORCH}/nn/modules/linear.py:134,{}", call())
}

pub(crate) fn call() -> String {
    format!(
        "Module._call_impl@{TORCH}/nn/modules/module.py:1790,Module._wrapped_call_impl@{TORCH}/nn/modules/module.py:1779"
    )
}

/// A function of a model's, called by `Module.__call__` from a line.
pub(crate) fn inside(function: &str, at: &str) -> String {
    format!("{function},{},{at}", call())
}

/// A function of PyTorch's, called from a line.
pub(crate) fn torch(function: &str, file: &str, at: &str) -> String {
    format!("{function}@{TORCH}/{file}:100,{at}")
}

/// Layers as a transformer has them: sizes that differ.
pub(crate) fn sizes(scale: u64) -> Vec<u64> {
    [12, 3, 4, 5, 12, 3, 4, 5, 7].into_iter().map(|mib| mib * scale * MIB).collect()
}
