"""Streaming recogniser for phone lines: chunks of many lines are decoded together."""
import torch
import torch.nn as nn

LINES = 256
HIDDEN = 1024
LAYERS = 4
CHUNK = 12
ROUNDS = 220
FEATURES = 80

torch.cuda.set_per_process_memory_fraction(
    3 * 1024**3 / torch.cuda.get_device_properties(0).total_memory)
device = torch.device("cuda")
torch.manual_seed(0)


class Predictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, HIDDEN, LAYERS, batch_first=True)
        self.joint = nn.Linear(HIDDEN, 128)

    def forward(self, chunk, state):
        out, state = self.lstm(chunk, state)
        return self.joint(out).argmax(-1), state


def merge_states(states):
    h = torch.cat([s[0] for s in states], dim=1)
    c = torch.cat([s[1] for s in states], dim=1)
    return h.contiguous(), c.contiguous()


def split_states(state):
    h, c = state
    return [(h[:, i:i + 1], c[:, i:i + 1]) for i in range(h.shape[1])]


def fresh_state():
    z = torch.zeros(LAYERS, 1, HIDDEN, device=device)
    return z, z


class Exchange:
    """Keeps the active lines and parks a line's state when the caller is put on hold."""

    def __init__(self, model):
        self.model = model
        self.states = [fresh_state() for _ in range(LINES)]
        self.names = [f"call-{i}" for i in range(LINES)]
        self.next_call = LINES
        self.on_hold = {}
        self.words = 0

    @torch.no_grad()
    def round(self, chunk):
        tokens, state = self.model(chunk, merge_states(self.states))
        self.states = split_states(state)
        self.words += int((tokens[:, 1:] != tokens[:, :-1]).sum())

    def hold(self, line):
        self.on_hold[self.names[line]] = self.states[line]
        self.names[line] = f"call-{self.next_call}"
        self.next_call += 1
        self.states[line] = fresh_state()


exchange = Exchange(Predictor().to(device).eval())
for r in range(ROUNDS):
    exchange.round(torch.randn(LINES, CHUNK, FEATURES, device=device))
    exchange.hold(r % LINES)
    if r % 40 == 39:
        print(f"round {r + 1} words {exchange.words} on hold {len(exchange.on_hold)} "
              f"allocated {torch.cuda.memory_allocated() / 2**20:.0f} MiB")
h, c = exchange.on_hold["call-0"]
print("first held state", tuple(h.shape), h.abs().mean().item())
