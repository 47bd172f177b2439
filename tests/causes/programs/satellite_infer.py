import numpy as np
import torch
import torch.nn as nn

torch.cuda.set_per_process_memory_fraction(2.0 * 2**30 / torch.cuda.get_device_properties(0).total_memory)


def double_conv(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.ReLU(), nn.Conv2d(cout, cout, 3, padding=1), nn.ReLU())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.d1, self.d2, self.d3 = double_conv(3, 32), double_conv(32, 64), double_conv(64, 128)
        self.pool = nn.MaxPool2d(2)
        self.up2 = nn.ConvTranspose2d(128, 64, 2, 2)
        self.up1 = nn.ConvTranspose2d(64, 32, 2, 2)
        self.u2, self.u1 = double_conv(128, 64), double_conv(64, 32)
        self.out = nn.Conv2d(32, 1, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(self.pool(a))
        c = self.d3(self.pool(b))
        y = self.u2(torch.cat([self.up2(c), b], dim=1))
        y = self.u1(torch.cat([self.up1(y), a], dim=1))
        return self.out(y)


class InferenceTiler:
    def __init__(self, size=512, step=256):
        self.size, self.step = size, step

    def __call__(self, image):
        h, w, _ = image.shape
        windows, origins = [], []
        for top in range(0, h - self.size + 1, self.step):
            for left in range(0, w - self.size + 1, self.step):
                windows.append(image[top:top + self.size, left:left + self.size].transpose(2, 0, 1))
                origins.append((top, left))
        return np.stack(windows), origins, (h, w)


class Inferer:
    def __init__(self):
        self.model = UNet().cuda().eval()
        self.tiler = InferenceTiler()

    def __call__(self, images):
        for name, image in images:
            windows, origins, shape = self.tiler(image)
            with torch.no_grad():
                batch = torch.from_numpy(windows).cuda()
                masks = self.model(batch).sigmoid().cpu().numpy()
            self.stitch(name, masks, origins, shape)

    def stitch(self, name, masks, origins, shape):
        total, count = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        for mask, (top, left) in zip(masks, origins):
            total[top:top + 512, left:left + 512] += mask[0]
            count[top:top + 512, left:left + 512] += 1
        print(name, shape, len(origins), "windows, mean", float((total / np.maximum(count, 1)).mean()))


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    scenes = [(f"scene_{s}", rng.random((s, s, 3), dtype=np.float32)) for s in (768, 1024, 2048)]
    Inferer()(scenes)
