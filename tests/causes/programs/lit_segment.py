"""A small training framework (loop, module, hooks) and a segmentation module that uses it."""
import atexit
import sys

import torch
from torch import nn
from torch.nn import functional as F

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class Loop:
    """Runs epochs; what validation_step returns is handed to validation_epoch_end."""

    def __init__(self, module, epochs):
        self.module, self.epochs = module, epochs
        self.optimizer = module.configure_optimizers()

    def run_validation(self, loader):
        self.module.eval()
        outputs = []
        with torch.no_grad():
            for i, batch in enumerate(loader):
                output = self.module.validation_step(batch, i)
                if output is not None:
                    outputs.append(output)
        self.module.validation_epoch_end(outputs)
        self.module.train()

    def fit(self, train_loader, val_loader):
        for epoch in range(self.epochs):
            for batch in train_loader():
                loss = self.module.training_step(batch)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            self.run_validation(val_loader())
            print(f"epoch {epoch} {self.module.logged} peak {torch.cuda.max_memory_allocated() >> 20} MiB")


class Segmenter(nn.Module):
    def __init__(self, classes=21):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, classes, 1))
        self.logged = {}

    def training_step(self, batch):
        images, masks = batch
        return F.cross_entropy(self.net(images), masks)

    def validation_step(self, batch, index):
        images, masks = batch
        logits = self.net(images)
        loss = F.cross_entropy(logits, masks)
        if FIXED:
            return {"loss": loss.cpu()}
        return {"loss": loss, "logits": logits, "masks": masks}

    def validation_epoch_end(self, outputs):
        self.logged["val_loss"] = round(torch.stack([o["loss"] for o in outputs]).mean().item(), 4)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def loader(n, size, seed):
    def batches():
        gen = torch.Generator("cuda").manual_seed(seed)
        for _ in range(n):
            yield (torch.rand(8, 3, size, size, generator=gen, device="cuda"),
                   torch.randint(0, 21, (8, size, size), generator=gen, device="cuda"))
    return batches


if __name__ == "__main__":
    torch.manual_seed(0)
    Loop(Segmenter().cuda(), epochs=2).fit(loader(8, 256, 0), loader(30, 512, 1))
