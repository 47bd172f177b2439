"""Evaluate a sequence model: collect predictions over the test set, then compute accuracy."""
import atexit
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv
VOCAB = 50264


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class Translator(nn.Module):
    def __init__(self, dim=512):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, tokens):
        return self.head(self.mix(self.embed(tokens))[0])


def test_batches(n, batch, length):
    gen = torch.Generator("cuda").manual_seed(0)
    for _ in range(n):
        yield torch.randint(0, VOCAB, (batch, length), generator=gen, device="cuda")


class Evaluator:
    def __init__(self, model):
        self.model = model

    def prediction_step(self, tokens):
        with torch.no_grad():
            logits = self.model(tokens)
        if FIXED:
            logits = logits.argmax(-1)
        return logits, tokens

    def prediction_loop(self, batches):
        preds, labels = None, None
        for step, tokens in enumerate(batches):
            logits, target = self.prediction_step(tokens)
            preds = logits if preds is None else torch.cat((preds, logits), dim=0)
            labels = target if labels is None else torch.cat((labels, target), dim=0)
            if step % 5 == 0:
                print(f"step {step} collected {len(preds)} allocated {torch.cuda.memory_allocated() >> 20} MiB")
        return preds, labels

    def evaluate(self, batches):
        preds, labels = self.prediction_loop(batches)
        hits = preds == labels if FIXED else preds.argmax(-1) == labels
        return hits.float().mean().item()


def main():
    torch.manual_seed(0)
    batch = int(32 * torch.cuda.mem_get_info()[1] / 85e9)
    model = Translator().cuda().eval()
    print("accuracy", Evaluator(model).evaluate(test_batches(60, batch, 128)))


if __name__ == "__main__":
    main()
