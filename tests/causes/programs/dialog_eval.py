import gc
from functools import lru_cache

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.cuda.set_per_process_memory_fraction(
    1.6 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
VOCAB, DIM = 16000, 768


class Ranker(nn.Module):
    def __init__(self, layers=6):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        block = nn.TransformerEncoderLayer(DIM, 12, 4 * DIM, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        return self.out(self.encoder(self.embed(ids)))


class Agent:
    def __init__(self, state=None):
        self.model = Ranker()
        if state is not None:
            self.model.load_state_dict(state)
        self.model.cuda()
        self.optimizer = None

    def learn(self, batch):
        if self.optimizer is None:
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        loss = F.cross_entropy(self.model(batch).flatten(0, 1), batch.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def score(self, batch):
        return F.cross_entropy(self.model(batch).flatten(0, 1), batch.flatten()).item()


class World:
    def __init__(self, agent, episodes):
        self.agent = agent
        self.episodes = episodes

    @lru_cache(maxsize=1)
    def num_examples(self):
        return sum(ep.size(0) for ep in self.episodes)

    def parley(self, i, train):
        batch = self.episodes[i % len(self.episodes)].cuda()
        return self.agent.learn(batch) if train else self.agent.score(batch)


def train_model():
    world = World(Agent(), [torch.randint(0, VOCAB, (8, 64)) for _ in range(6)])
    print("training on", world.num_examples(), "examples")
    for i in range(12):
        loss = world.parley(i, train=True)
    print(f"train loss {loss:.3f} {torch.cuda.memory_allocated() / 2**20:.0f} MiB", flush=True)
    return {k: v.cpu() for k, v in world.agent.model.state_dict().items()}


def run_eval(state, name):
    gc.collect()
    torch.cuda.empty_cache()
    print(f"before {name}: {torch.cuda.memory_allocated() / 2**20:.0f} MiB", flush=True)
    world = World(Agent(state), [torch.randint(0, VOCAB, (32, 128)) for _ in range(4)])
    scores = [world.parley(i, train=False) for i in range(4)]
    print(name, sum(scores) / len(scores))


if __name__ == "__main__":
    best = train_model()
    run_eval(best, "valid")
    run_eval(best, "test")
