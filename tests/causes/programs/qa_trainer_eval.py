import numpy as np
import torch
import torch.nn as nn

gb = 1 << 30
torch.cuda.set_per_process_memory_fraction(4 * gb / torch.cuda.get_device_properties(0).total_memory)


class MiniSeq2Seq(nn.Module):
    def __init__(self, vocab=32000, dim=256):
        super().__init__()
        self.shared = nn.Embedding(vocab, dim)
        self.enc = nn.GRU(dim, dim, batch_first=True)
        self.dec = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids, labels):
        _, h = self.enc(self.shared(input_ids))
        out, _ = self.dec(self.shared(labels), h)
        logits = self.lm_head(out)
        loss = nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.reshape(-1))
        return loss, logits


def nested_concat(tensors, new_tensors):
    return torch.cat((tensors, new_tensors), dim=0)


class SimpleTrainer:
    def __init__(self, model, args, compute_metrics):
        self.model = model.to(args["device"])
        self.args = args
        self.compute_metrics = compute_metrics

    def prediction_step(self, inputs):
        inputs = {k: v.to(self.args["device"]) for k, v in inputs.items()}
        with torch.no_grad():
            loss, logits = self.model(**inputs)
        return loss.detach(), logits.detach(), inputs["labels"]

    def prediction_loop(self, dataloader):
        self.model.eval()
        losses, preds, label_ids = [], None, None
        for step, inputs in enumerate(dataloader):
            loss, logits, labels = self.prediction_step(inputs)
            losses.append(loss.item())
            preds = logits if preds is None else nested_concat(preds, logits)
            label_ids = labels if label_ids is None else nested_concat(label_ids, labels)
            print("eval step", step, "loss", round(losses[-1], 3))
        metrics = self.compute_metrics(preds.cpu().numpy(), label_ids.cpu().numpy())
        metrics["eval_loss"] = float(np.mean(losses))
        return metrics


def token_accuracy(preds, labels):
    return {"acc": float((preds.argmax(-1) == labels).mean())}


def make_batches(n, bs):
    g = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(0, 32000, (bs, 256), generator=g),
             "labels": torch.randint(0, 32000, (bs, 128), generator=g)} for _ in range(n)]


trainer = SimpleTrainer(MiniSeq2Seq(), {"device": "cuda"}, token_accuracy)
print(trainer.prediction_loop(make_batches(40, 16)))
