import torch
import torch.nn.functional as F
import torchvision

torch.cuda.set_per_process_memory_fraction(5 * 2 ** 30 / torch.cuda.get_device_properties(0).total_memory)


def distance_matrix(x, y=None, p=2):
    y = x if y is None else y
    n, m, d = x.size(0), y.size(0), x.size(1)
    x = x.unsqueeze(1).expand(n, m, d)
    y = y.unsqueeze(0).expand(n, m, d)
    return torch.pow(x - y, p).sum(2)


class NearestNeighbours:
    def __init__(self, bank, k):
        self.bank, self.k = bank, k

    def predict(self, x):
        dist = distance_matrix(x, self.bank) ** 0.5
        return dist.topk(self.k, largest=False)[0]


class PatchAnomaly:
    def __init__(self, coreset_ratio=0.04):
        net = torchvision.models.resnet18(weights=None).eval().cuda()
        self.stem = torch.nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1)
        self.layer2, self.layer3 = net.layer2, net.layer3
        self.ratio = coreset_ratio

    @torch.no_grad()
    def embed(self, images):
        f2 = self.layer2(self.stem(images.cuda()))
        f3 = self.layer3(f2)
        f3 = F.interpolate(f3, size=f2.shape[-2:], mode="bilinear", align_corners=False)
        e = torch.cat([F.avg_pool2d(f2, 3, 1, 1), F.avg_pool2d(f3, 3, 1, 1)], 1)
        return e.permute(0, 2, 3, 1).reshape(-1, e.shape[1])

    def fit(self, n_images):
        rows = [self.embed(torch.rand(8, 3, 224, 224)).cpu() for _ in range(n_images // 8)]
        rows = torch.cat(rows)
        keep = torch.randperm(len(rows))[:int(len(rows) * self.ratio)]
        self.knn = NearestNeighbours(rows[keep].cuda(), k=9)
        print("memory bank", tuple(self.knn.bank.shape))

    def test_image(self, image):
        score = self.knn.predict(self.embed(image[None]))
        return score.max().item()


detector = PatchAnomaly()
detector.fit(200)
for i in range(10):
    print("image", i, "score", detector.test_image(torch.rand(3, 224, 224)))
