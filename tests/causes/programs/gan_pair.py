"""Generator and discriminator with an optimizer each; samples are kept on the CPU for a contact sheet."""
import atexit

import torch
from torch import nn
from torch.nn import functional as F


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


def generator(width=128):
    return nn.Sequential(nn.Unflatten(1, (128, 1, 1)), nn.ConvTranspose2d(128, 4 * width, 4), nn.ReLU(),
                         nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1), nn.ReLU(),
                         nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.ReLU(),
                         nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh()).cuda()


def discriminator(width=128):
    return nn.Sequential(nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(width, 2 * width, 4, 2, 1),
                         nn.LeakyReLU(0.2), nn.Conv2d(2 * width, 4 * width, 4, 2, 1), nn.LeakyReLU(0.2),
                         nn.Flatten(), nn.Linear(4 * width * 16, 1)).cuda()


class Adversaries:
    def __init__(self):
        self.g, self.d = generator(), discriminator()
        self.g_opt = torch.optim.Adam(self.g.parameters(), lr=2e-4, betas=(0.5, 0.999))
        self.d_opt = torch.optim.Adam(self.d.parameters(), lr=2e-4, betas=(0.5, 0.999))
        self.contact_sheet = []

    def step(self, real):
        noise = torch.randn(len(real), 128, device="cuda")
        fake = self.g(noise)
        d_loss = F.softplus(-self.d(real)).mean() + F.softplus(self.d(fake.detach())).mean()
        self.d_opt.zero_grad()
        d_loss.backward()
        self.d_opt.step()
        g_loss = F.softplus(-self.d(fake)).mean()
        self.g_opt.zero_grad()
        g_loss.backward()
        self.g_opt.step()
        return d_loss.item(), g_loss.item()

    @torch.no_grad()
    def snapshot(self):
        self.contact_sheet.append(self.g(torch.randn(16, 128, device="cuda")).cpu())


def main():
    torch.manual_seed(0)
    pair = Adversaries()
    for step in range(40):
        losses = pair.step(torch.rand(256, 3, 32, 32, device="cuda") * 2 - 1)
        pair.snapshot()
        if step % 8 == 0:
            print(f"step {step} {losses[0]:.3f} {losses[1]:.3f} allocated {torch.cuda.memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
