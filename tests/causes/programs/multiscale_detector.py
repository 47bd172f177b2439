"""Detector inference at several input scales with recorded launches for each scale."""
import torch
import torch.nn as nn

BATCH = 4
WIDTH = 48
SCALES = [384, 416, 448, 480, 512, 544, 576, 608, 640]
FRAMES = 40

torch.cuda.set_per_process_memory_fraction(
    4 * 1024**3 / torch.cuda.get_device_properties(0).total_memory)
device = torch.device("cuda")


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, stride=2, padding=1)
        self.body = nn.ModuleList([nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(4)])
        self.down = nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=8, padding=1)
        self.boxes = nn.Conv2d(2 * WIDTH, 4 + 20, 1)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for layer in self.body:
            x = x + torch.relu(layer(x))
        return self.boxes(torch.relu(self.down(x)))


class Recorded:
    """One captured forward pass with its fixed input and output."""

    def __init__(self, model, size):
        self.image = torch.zeros(BATCH, 3, size, size, device=device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(self.image)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = model(self.image)

    def __call__(self, image):
        self.image.copy_(image)
        self.graph.replay()
        return self.output.clone()


class Runner:
    def __init__(self, model):
        self.model = model
        self.recorded = {}

    def __call__(self, image):
        size = image.shape[-1]
        if size not in self.recorded:
            self.recorded[size] = Recorded(self.model, size)
            print(f"scale {size}: reserved {torch.cuda.memory_reserved() / 2**20:.0f} MiB, "
                  f"allocated {torch.cuda.memory_allocated() / 2**20:.0f} MiB")
        return self.recorded[size](image)


with torch.no_grad():
    runner = Runner(Detector().to(device).eval())
    total = 0.0
    for frame in range(FRAMES):
        size = SCALES[frame % len(SCALES)]
        found = runner(torch.rand(BATCH, 3, size, size, device=device))
        total += found[:, :4].abs().mean().item()
    print(f"{FRAMES} frames at {len(SCALES)} scales, mean box {total / FRAMES:.4f}")
