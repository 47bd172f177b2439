"""Every native stack of a small training run on CPU, compared with libgcc's. Exit code 1 on any difference.

Usage: LD_PRELOAD=libstack_harness.so python3 torch_native.py [EVERY [signals | old-glibc]]
One of EVERY calls of malloc is compared; with signals every
millisecond, or as with a C library before 2.35, if asked for. (Libraries that come and go are
in native.rs: PyTorch 2.9.1 with glibc 2.36 corrupts its heap under such a storm even without this library.)
"""
import ctypes, os, signal, sys
harness = ctypes.CDLL(None)
harness.harness_comparison.restype = ctypes.c_uint64
harness.harness_mode.argtypes = [ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64]
import torch, torch.nn as nn
import torch.nn.functional as F

class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.l1, self.l2, self.n = nn.Linear(d, d), nn.Linear(d, d), nn.LayerNorm(d)
    def forward(self, x):
        return x + self.l2(torch.relu(self.l1(self.n(x))))

def train(steps):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                          nn.Linear(8 * 64, 64), *[Block(64) for _ in range(4)])
    attention = nn.MultiheadAttention(64, 4, batch_first=True)
    lstm = nn.LSTM(64, 32, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), *attention.parameters(), *lstm.parameters()], foreach=False)
    for _ in range(steps):
        optimizer.zero_grad()
        y = model(torch.randn(16, 3, 16, 16))
        z, _ = attention(y[None], y[None], y[None])
        w, _ = lstm(z)
        loss = F.cross_entropy(w[0], torch.randint(0, 32, (16,))) + z.pow(2).mean()
        loss.backward()
        optimizer.step()
    for name in ("svd", "qr", "eigh", "inv", "cholesky_ex", "matrix_exp", "det"):
        a = torch.randn(20, 20); a = a @ a.T + torch.eye(20)
        getattr(torch.linalg, name)(a)
    for op in (torch.sort, torch.cumsum, torch.topk, torch.fft.rfft, torch.softmax):
        x = torch.randn(300, 40)
        op(x, 1)
    x = torch.randn(4, 5).to_sparse(); (x + x).coalesce()
    script = torch.jit.script(lambda_like)
    for _ in range(4): script(torch.randn(8, 8), torch.randn(8, 8))

def lambda_like(a, b):
    return torch.tanh(a @ b) + a

if __name__ == "__main__":
    torch.manual_seed(0)
    if "old-glibc" in sys.argv:
        os.environ["STACK_HARNESS_OLD_GLIBC"] = "1"
        train(1)  # what that loads is then known: the harness, unlike the shim, sees no dlsym
        harness.harness_note_loaded()
    if "signals" in sys.argv:
        signal.signal(signal.SIGPROF, lambda *_: None)
        signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
    harness.harness_mode(1 | 16, 1, int(sys.argv[1]) if len(sys.argv) > 1 else 7)
    train(6)
    torch.set_num_threads(4)
    train(2)
    signal.setitimer(signal.ITIMER_PROF, 0)  # before the interpreter takes its handler away
    harness.harness_mode(0, 0, 1)
    sys.exit(1 if harness.harness_comparison() else 0)
