"""Resume character-level GPT training from ckpt.pt (written here first if absent)."""
import atexit
import os
import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

FIXED = "--fixed" in sys.argv
device = "cuda"


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


def make_model(args):
    layer = nn.TransformerEncoderLayer(args["n_embd"], args["n_head"], 4 * args["n_embd"], dropout=0.0,
                                       batch_first=True, norm_first=True)
    return nn.ModuleDict({"wte": nn.Embedding(args["vocab_size"], args["n_embd"]),
                          "h": nn.TransformerEncoder(layer, args["n_layer"], enable_nested_tensor=False),
                          "head": nn.Linear(args["n_embd"], args["vocab_size"])})


def step_loss(model, idx):
    mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1] - 1, device=device)
    logits = model["head"](model["h"](model["wte"](idx[:, :-1]), mask=mask, is_causal=True))
    return F.cross_entropy(logits.flatten(0, 1), idx[:, 1:].flatten())


def train_steps(model, optimizer, n):
    for _ in range(n):
        loss = step_loss(model, torch.randint(0, 96, (8, 129), device=device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return loss.item()


def first_run(path):
    args = dict(n_layer=16, n_head=16, n_embd=1024, vocab_size=96)
    model = make_model(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    train_steps(model, optimizer, 2)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "model_args": args, "iter_num": 2}, path)


torch.manual_seed(1337)
ckpt_path = os.path.join(tempfile.gettempdir(), f"ckpt_gpt_{os.getpid()}.pt")
first_run(ckpt_path)
torch.cuda.empty_cache()
print(f"resuming, allocated {torch.cuda.memory_allocated() >> 20} MiB")

if FIXED:
    checkpoint = torch.load(ckpt_path, map_location="cpu")
else:
    checkpoint = torch.load(ckpt_path, map_location=device)
os.remove(ckpt_path)
model_args = checkpoint["model_args"]
model = make_model(model_args)
state_dict = checkpoint["model"]
model.load_state_dict(state_dict)
iter_num = checkpoint["iter_num"]
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
optimizer.load_state_dict(checkpoint["optimizer"])

for epoch in range(4):
    loss = train_steps(model, optimizer, 5)
    iter_num += 5
    print(f"iter {iter_num} loss {loss:.3f} allocated {torch.cuda.memory_allocated() >> 20} MiB")
