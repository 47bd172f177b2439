"""Relax batches of atomic structures with limited-memory BFGS and a learned conservative force field."""
import atexit
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class ForceField(nn.Module):
    """Energy from a pointwise network; forces are its gradient with respect to the positions."""

    def __init__(self, width=256):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, positions):
        energy = self.net(positions).sum() + 0.5 * positions.pow(2).sum()
        forces = -torch.autograd.grad(energy, positions, create_graph=True)[0]
        return energy, forces


class State:
    def __init__(self, positions, history):
        n = positions.shape[0]
        self.positions = positions
        self.s_history = torch.zeros(n, 0, 3, device="cuda")
        self.y_history = torch.zeros(n, 0, 3, device="cuda")
        self.history = history
        self.previous = None


def lbfgs_step(model, state, rate=0.05):
    energy, forces = model(state.positions)
    if state.previous is not None:
        old_positions, old_forces = state.previous
        s_new = state.positions - old_positions
        y_new = old_forces - forces
        if FIXED:
            s_new, y_new = s_new.detach(), y_new.detach()
        state.s_history = torch.cat([state.s_history, s_new.unsqueeze(1)], dim=1)[:, -state.history:]
        state.y_history = torch.cat([state.y_history, y_new.unsqueeze(1)], dim=1)[:, -state.history:]
    direction = forces.detach()
    if state.s_history.shape[1]:
        s, y = state.s_history.detach(), state.y_history.detach()
        curvature = (s * y).sum((1, 2)) / (y * y).sum((1, 2)).clamp_min(1e-9)
        direction = direction * curvature.clamp(0.05, 2.0)[:, None]
    state.previous = (state.positions, forces) if not FIXED else (state.positions.detach(), forces.detach())
    state.positions = (state.positions.detach() + rate * direction).requires_grad_(True)
    return energy.item()


def main():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = ForceField().cuda()
    state = State(torch.randn(16000, 3, device="cuda").requires_grad_(True), history=8)
    for step in range(40):
        energy = lbfgs_step(model, state)
        if step % 5 == 0:
            print(f"step {step} energy {energy:.2f} allocated {torch.cuda.memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
