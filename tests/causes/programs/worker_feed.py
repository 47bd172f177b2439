"""DataLoader workers prepare batches on the CPU; only the main process touches the GPU."""
import atexit

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class Scenes(Dataset):
    def __len__(self):
        return 384

    def __getitem__(self, index):
        gen = torch.Generator().manual_seed(index)
        image = torch.rand(3, 128, 128, generator=gen)
        return image, int(image.mean() * 1000) % 10


def train_epoch(model, optimizer, loader):
    total = 0.0
    for images, labels in loader:
        images = images.to("cuda", non_blocking=True)
        labels = labels.to("cuda", non_blocking=True)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def main():
    torch.manual_seed(0)
    loader = DataLoader(Scenes(), batch_size=32, num_workers=3, pin_memory=True, persistent_workers=True)
    model = nn.Sequential(nn.Conv2d(3, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, 2, 1), nn.ReLU(),
                          nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(4):
        print(f"epoch {epoch} loss {train_epoch(model, optimizer, loader):.4f} "
              f"allocated {torch.cuda.memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    atexit.register(memory_summary)
    main()
