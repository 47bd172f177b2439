"""Policy optimisation with an inference engine on the same card; restart from a saved step."""
import os
import tempfile
import torch
import torch.nn as nn

DIM = 2048
LAYERS = 24
POOL_MB = 1700

torch.cuda.set_per_process_memory_fraction(
    3 * 1024**3 / torch.cuda.get_device_properties(0).total_memory)
device = torch.device("cuda")


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(LAYERS)])
        self.head = nn.Linear(DIM, 256)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class RolloutEngine:
    """Block pool used for generation, handed back before every update."""

    def __init__(self):
        self.blocks = None

    def wake_up(self):
        self.blocks = torch.empty(POOL_MB, 1024, 1024, dtype=torch.uint8, device=device)

    def sleep(self):
        self.blocks = None
        torch.cuda.empty_cache()

    @torch.no_grad()
    def generate(self, policy, n):
        return policy(torch.randn(n, DIM, device=device)).argmax(-1)


class CheckpointManager:
    def __init__(self, folder):
        self.path = os.path.join(folder, "shard_rank_0.pt")

    def save(self, policy, opt, step):
        torch.save({"model": policy.state_dict(), "optim": opt.state_dict(), "step": step}, self.path)

    def load(self, policy, opt):
        state = torch.load(self.path)
        policy.load_state_dict(state["model"])
        opt.load_state_dict(state["optim"])
        return state["step"]


def update(policy, opt, actions):
    obs = torch.randn(len(actions), DIM, device=device)
    loss = nn.functional.cross_entropy(policy(obs), actions)
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
    return loss.item()


def build():
    policy = Policy().to(device)
    return policy, torch.optim.Adam(policy.parameters(), lr=1e-5, foreach=False)


def first_run(manager):
    policy, opt = build()
    print("first run", update(policy, opt, torch.randint(0, 256, (64,), device=device)))
    manager.save(policy, opt, 1)


def second_run(manager):
    policy, opt = build()
    engine = RolloutEngine()
    engine.wake_up()
    step = manager.load(policy, opt)
    print("resumed at step", step)
    for _ in range(3):
        actions = engine.generate(policy, 64)
        engine.sleep()
        print("update", update(policy, opt, actions))


with tempfile.TemporaryDirectory() as folder:
    manager = CheckpointManager(folder)
    first_run(manager)
    torch.cuda.empty_cache()
    second_run(manager)
