"""Trains a little, then predicts a validation set. The model is in eval(), and that is not enough."""
import torch

model = torch.nn.Sequential(
    torch.nn.Linear(256, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 10)
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = torch.nn.CrossEntropyLoss()


def train(n_steps):
    model.train()
    for step in range(n_steps):
        images = torch.randn(2048, 256, device="cuda")
        labels = torch.zeros(2048, dtype=torch.long, device="cuda")
        criterion(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluate(n_batches):
    model.eval()
    predictions = []
    for batch in range(n_batches):
        images = torch.randn(2048, 256, device="cuda")
        predictions.append(model(images))  # <- fault
    return torch.cat(predictions).argmax(1)


train(20)
trained = torch.cuda.max_memory_allocated()
evaluate(60)
print(f"peak {trained / 2**20:.0f} MiB in training, {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB in evaluation")
