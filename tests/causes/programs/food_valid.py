"""Food image classifier: one training epoch, then validation."""
import atexit
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


def conv_block(a, b, stride):
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())


class FoodNet(nn.Module):
    def __init__(self, classes=101):
        super().__init__()
        widths = [3, 32, 64, 64, 128, 128, 256]
        strides = [2, 1, 2, 1, 2, 2]
        self.features = nn.Sequential(*(conv_block(a, b, s) for a, b, s in zip(widths, widths[1:], strides)))
        self.classifier = nn.Linear(256, classes)

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


def batches(count, size, seed):
    gen = torch.Generator("cuda").manual_seed(seed)
    for _ in range(count):
        yield (torch.rand(size, 3, 224, 224, generator=gen, device="cuda"),
               torch.randint(0, 101, (size,), generator=gen, device="cuda"))


def train(model, criterion, optimizer):
    model.train()
    running = 0.0
    for images, labels in batches(8, 16, 1):
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.item()
    return running / 8


def validate_batch(model, criterion, images, labels):
    logits = model(images)
    return criterion(logits, labels), (logits.argmax(1) == labels).sum()


def validate(model, criterion):
    model.eval()
    loss_sum, hits = 0, 0
    for step, (images, labels) in enumerate(batches(20, 16, 2)):
        if FIXED:
            with torch.no_grad():
                loss, correct = validate_batch(model, criterion, images, labels)
        else:
            loss, correct = validate_batch(model, criterion, images, labels)
        loss_sum += loss
        hits += correct
        if step % 5 == 0:
            print(f"val {step} allocated {torch.cuda.memory_allocated() >> 20} MiB")
    return float(loss_sum) / 20, int(hits) / (20 * 16)


def main():
    torch.manual_seed(0)
    model = FoodNet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(2):
        print("train", train(model, criterion, optimizer))
        print("valid", validate(model, criterion))


if __name__ == "__main__":
    main()
