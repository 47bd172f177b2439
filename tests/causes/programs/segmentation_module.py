"""Land-cover segmentation with a small module/trainer pair."""
import torch
import torch.nn as nn
import torch.nn.functional as F

CLASSES = 9
SIZE = 256
BATCH = 8
STEPS_PER_EPOCH = 90
EPOCHS = 2

torch.cuda.set_per_process_memory_fraction(
    4 * 1024**3 / torch.cuda.get_device_properties(0).total_memory)


class UNetSmall(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.d1 = nn.Sequential(nn.Conv2d(4, width, 3, padding=1), nn.ReLU())
        self.d2 = nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU())
        self.d3 = nn.Sequential(nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1), nn.ReLU())
        self.u2 = nn.Conv2d(6 * width, 2 * width, 3, padding=1)
        self.u1 = nn.Conv2d(3 * width, CLASSES, 3, padding=1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(a)
        c = F.interpolate(self.d3(b), scale_factor=2)
        b = torch.relu(self.u2(torch.cat([b, c], 1)))
        return self.u1(torch.cat([a, F.interpolate(b, scale_factor=2)], 1))


class LandCoverModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = UNetSmall()
        self.history = []

    def step(self, batch):
        image, mask = batch
        logits = self.net(image)
        return F.cross_entropy(logits, mask), logits.detach(), mask

    def training_step(self, batch, batch_idx):
        loss, preds, target = self.step(batch)
        return {"loss": loss, "preds": preds, "target": target}

    def training_epoch_end(self, outputs):
        self.history.append(torch.stack([o["loss"] for o in outputs]).mean().item())


class MiniTrainer:
    def __init__(self, epochs, device):
        self.epochs, self.device = epochs, device

    def batches(self):
        for _ in range(STEPS_PER_EPOCH):
            image = torch.rand(BATCH, 4, SIZE, SIZE, device=self.device)
            mask = (image.mean(1) * CLASSES).long().clamp(0, CLASSES - 1)
            yield image, mask

    def fit(self, module):
        module.to(self.device).train()
        opt = torch.optim.Adam(module.parameters(), lr=1e-3)
        for epoch in range(self.epochs):
            outputs = []
            for i, batch in enumerate(self.batches()):
                result = module.training_step(batch, i)
                opt.zero_grad()
                result["loss"].backward()
                opt.step()
                result["loss"] = result["loss"].detach()
                outputs.append(result)
                if i % 30 == 29:
                    print(f"epoch {epoch} step {i + 1} "
                          f"allocated {torch.cuda.memory_allocated() / 2**20:.0f} MiB")
            module.training_epoch_end(outputs)


module = LandCoverModule()
MiniTrainer(EPOCHS, torch.device("cuda")).fit(module)
print("epoch losses", module.history, f"peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
