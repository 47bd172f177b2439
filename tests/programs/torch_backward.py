"""Forward operations on lines, in threads and inside of others, and what PyTorch says of where each was called.

Prints JSON: the sizes of allocations outside of the backward pass; and for each operation whose gradient is the only
allocation of its size, that size, the name of its node, the line of the forward pass (from anomaly mode's tracebacks), and
the line that called backward(), if that was another thread.
"""
import gc, inspect, json, re, threading, weakref

import torch
from torch.utils.checkpoint import checkpoint

# Of garbage, which the fake device computes, some is no number.
torch.autograd.set_detect_anomaly(True, check_nan=False)
sizes = iter(range(100_000, 10**9, 1_111))
truth, outside, lock, nodes = [], [], threading.Lock(), []


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return first + max(at for at, line in enumerate(lines) if text in line and "line_of" not in line)


def leaf():
    # Takes no memory of that size itself.
    with lock:
        n = next(sizes)
    return torch.zeros(1, device="cuda").expand(n).requires_grad_()


def told(y, caller):
    node = y.grad_fn
    # Tracebacks are outermost first; the last line of this file is the operation's.
    lines = re.findall(r'File "[^"]*torch_backward\.py", line (\d+)', "".join(node.metadata["traceback_"]))
    with lock:
        truth.append({"bytes": y.numel() * 4, "node": node.name(), "line": int(lines[-1]), "caller": caller})
    return y


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class OnCaller(torch.autograd.Function):
    """Of a tensor on the CPU: the thread that calls backward() runs it itself."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        torch.empty(grad.numel() * 4, dtype=torch.uint8, device="cuda")
        return grad * 2


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("as it should")


def cpu_leaf():
    with lock:
        n = next(sizes)
    return torch.zeros(1).expand(n).requires_grad_()


def allocate_outside():
    with lock:
        n = next(sizes)
        outside.append(n)
    torch.empty(n, dtype=torch.uint8, device="cuda")


def calling_thread():
    # The stack of what it allocates says itself who called backward().
    allocate_outside()
    told(OnCaller.apply(cpu_leaf()), None).sum().backward()
    allocate_outside()


def failing():
    for x in cpu_leaf(), leaf():
        try:
            Fails.apply(x).sum().backward()
        except RuntimeError:
            allocate_outside()
        else:
            raise SystemExit("no error")
    # What the error left behind must not hide the next one.
    calling_thread()


def main_thread():
    caller = line_of(main_thread, "loss.backward()")
    a = told(torch.exp(leaf()), caller)
    b = told(torch.sin(leaf()), caller)
    c = told(torch.exp(leaf()),
             caller)
    d = told(torch.sigmoid(leaf()), caller)
    e = [told(torch.tanh(leaf()), caller) for _ in range(3)]
    f = told(Twice.apply(leaf()), caller)
    nodes.append(weakref.ref(f.grad_fn))
    loss = sum(y.sum() for y in [a, b, c, d, *e, f])
    loss.backward()


def other_thread():
    # Its numbers begin anew: the same ones, other lines.
    caller = line_of(other_thread, "loss.backward()")
    x = torch.zeros(3, device="cuda", requires_grad=True)
    g = told(torch.cos(leaf()), caller)
    h = told(torch.exp(leaf()), caller)
    loss = x.sum() + g.sum() + h.sum()
    loss.backward()


def recomputed():
    def part(x):
        return told(torch.atan(x), caller).sum()
    caller = line_of(recomputed, "use_reentrant")
    checkpoint(part, leaf(), use_reentrant=False).backward()


for step in range(3):
    main_thread()
    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    recomputed()
    calling_thread()
    failing()
    thread = threading.Thread(target=failing)
    thread.start()
    thread.join()
torch.cuda.synchronize()
gc.collect()
assert all(node() is None for node in nodes), "somebody else holds nodes of the backward pass"
print(json.dumps({"version": torch.__version__, "operations": truth, "outside": outside}))
