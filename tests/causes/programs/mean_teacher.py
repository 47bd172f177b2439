"""Mean-teacher consistency training: the averaged model is part of every loss."""
import atexit
import copy

import torch
from torch import nn
from torch.nn import functional as F


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 2048), nn.GELU(),
                         *(m for _ in range(6) for m in (nn.Linear(2048, 2048), nn.GELU())), nn.Linear(2048, 10)).cuda()


class Teacher:
    def __init__(self, student, decay=0.99):
        self.model = copy.deepcopy(student).requires_grad_(False).eval()
        self.decay = decay

    @torch.no_grad()
    def follow(self, student):
        for t, s in zip(self.model.parameters(), student.parameters()):
            t.lerp_(s, 1 - self.decay)

    @torch.no_grad()
    def predict(self, x):
        return self.model(x).softmax(-1)


def step(student, teacher, optimizer, seed):
    gen = torch.Generator("cuda").manual_seed(seed)
    clean = torch.rand(512, 3, 32, 32, generator=gen, device="cuda")
    noisy = clean + 0.1 * torch.randn(512, 3, 32, 32, generator=gen, device="cuda")
    labels = torch.randint(0, 10, (512,), generator=gen, device="cuda")
    logits = student(noisy)
    loss = F.cross_entropy(logits, labels) + F.mse_loss(logits.softmax(-1), teacher.predict(clean))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    teacher.follow(student)
    return loss.item()


def main():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    student = network()
    teacher = Teacher(student)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.01, momentum=0.9)
    for i in range(40):
        loss = step(student, teacher, optimizer, i)
        if i % 8 == 0:
            print(f"step {i} loss {loss:.4f} allocated {torch.cuda.memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
