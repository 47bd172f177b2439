import numpy as np
import torch
from torch import nn

torch.cuda.set_per_process_memory_fraction(4 * 1024 ** 3 / torch.cuda.get_device_properties(0).total_memory)


class TabularNet(nn.Module):
    def __init__(self, n_in, width, n_out):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(n_in, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                                    nn.Linear(width, n_out))

    def forward(self, x):
        return self.layers(x)


class GpuClassifier:
    def __init__(self, width=8192, epochs=2, lr=1e-4):
        self.width, self.epochs, self.lr = width, epochs, lr

    def get_params(self):
        return dict(width=self.width, epochs=self.epochs, lr=self.lr)

    def fit(self, X, y):
        with torch.device("cuda"):
            self.net_ = TabularNet(X.shape[1], self.width, int(y.max()) + 1)
        self.optimizer_ = torch.optim.Adam(self.net_.parameters(), lr=self.lr)
        for _ in range(self.epochs):
            for i in range(0, len(X), 256):
                xb = torch.as_tensor(X[i:i + 256]).cuda()
                yb = torch.as_tensor(y[i:i + 256]).cuda()
                loss = nn.functional.cross_entropy(self.net_(xb), yb)
                self.optimizer_.zero_grad()
                loss.backward()
                self.optimizer_.step()
        return self

    def score(self, X, y):
        with torch.no_grad():
            pred = self.net_(torch.as_tensor(X).cuda()).argmax(1).cpu().numpy()
        return float((pred == y).mean())


def clone(est):
    return type(est)(**est.get_params())


def mother_cv(estimator, X, y, n_folds=10):
    folds = np.array_split(np.random.default_rng(1).permutation(len(X)), n_folds)
    report = {"scores": [], "estimators": []}
    for k, test in enumerate(folds):
        train = np.concatenate([f for j, f in enumerate(folds) if j != k])
        val_estimator = clone(estimator)
        val_estimator.fit(X[train], y[train])
        report["scores"].append(val_estimator.score(X[test], y[test]))
        report["estimators"].append(val_estimator)
        print(f"fold {k}: {report['scores'][-1]:.3f}")
    return report


rng = np.random.default_rng(0)
X = rng.normal(size=(3000, 200)).astype("float32")
y = rng.integers(0, 5, 3000)
result = mother_cv(GpuClassifier(), X, y)
print("mean accuracy", np.mean(result["scores"]))
