"""Tries a batch, and half of it where memory runs out; but from within the `except`."""
import torch

LIMIT = 400 << 20
torch.cuda.set_per_process_memory_fraction(LIMIT / torch.cuda.get_device_properties(0).total_memory)
model = torch.nn.ModuleList(torch.nn.Linear(1024, 1024) for _ in range(4)).cuda()


def forward(n_samples):
    x = torch.randn(n_samples, 1024, device="cuda")
    for layer in model:
        x = layer(x).relu()
    return x.square().mean()


def train_step(n_samples):
    try:
        forward(n_samples).backward()
    except torch.cuda.OutOfMemoryError:
        forward(n_samples // 2).backward()  # <- fault


forward(8192).backward()
print("8192 samples fit")
try:
    train_step(16384)
except torch.cuda.OutOfMemoryError as error:
    print("8192 samples do not fit:", str(error)[:70])
