import random

import torch
from transformers import BertConfig, BertForSequenceClassification

torch.cuda.set_per_process_memory_fraction(1.5 * 2**30 / torch.cuda.get_device_properties(0).total_memory)


def model_init():
    config = BertConfig(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, vocab_size=30522, num_labels=3)
    return BertForSequenceClassification(config)


class Trainer:
    def __init__(self, model_init, device="cuda"):
        self.model_init = model_init
        self.device = device
        self.model = None
        self.optimizer = None

    def batches(self, n, batch_size):
        for _ in range(n):
            ids = torch.randint(0, 30522, (batch_size, 64), device=self.device)
            labels = torch.randint(0, 3, (batch_size,), device=self.device)
            yield {"input_ids": ids, "labels": labels}

    def train(self, trial):
        torch.manual_seed(trial["seed"])
        self.model = self.model_init().to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=trial["learning_rate"], momentum=0.9)
        self.model.train()
        for batch in self.batches(5, trial["batch_size"]):
            loss = self.model(**batch).loss
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        losses = [self.model(**batch).loss.item() for batch in self.batches(3, 4)]
        return sum(losses) / len(losses)


def hyperparameter_search(trainer, n_trials):
    best = None
    for number in range(n_trials):
        trial = {
            "learning_rate": 10 ** random.uniform(-4, -2),
            "batch_size": random.choice([2, 4]),
            "seed": random.randint(0, 1000),
        }
        trainer.train(trial)
        objective = trainer.evaluate()
        print("trial", number, trial, "objective", round(objective, 4))
        if best is None or objective < best[0]:
            best = (objective, trial)
    return best


if __name__ == "__main__":
    random.seed(7)
    print(hyperparameter_search(Trainer(model_init), n_trials=5))
