import torch
from transformers import BertConfig, BertForSequenceClassification

torch.cuda.set_per_process_memory_fraction(2.0 * 2**30 / torch.cuda.get_device_properties(0).total_memory)


def nested_concat(tensors, new):
    if isinstance(tensors, (list, tuple)):
        return type(tensors)(nested_concat(t, n) for t, n in zip(tensors, new))
    return torch.cat((tensors, new), dim=0)


def nested_numpify(tensors):
    if isinstance(tensors, (list, tuple)):
        return type(tensors)(nested_numpify(t) for t in tensors)
    return tensors.cpu().numpy()


class Trainer:
    def __init__(self, model):
        self.model = model.cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)

    def train(self, dataset):
        self.model.train()
        for batch in dataset:
            loss = self.model(**{k: v.cuda() for k, v in batch.items()}).loss
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def prediction_step(self, batch):
        with torch.no_grad():
            outputs = self.model(**{k: v.cuda() for k, v in batch.items()}, return_dict=False)
        loss, logits = outputs[0], outputs[1:]
        return loss.detach(), logits

    def evaluate(self, dataset):
        self.model.eval()
        losses, all_preds = [], None
        for step, batch in enumerate(dataset):
            loss, logits = self.prediction_step(batch)
            losses.append(loss.item())
            all_preds = logits if all_preds is None else nested_concat(all_preds, logits)
            if step % 4 == 3:
                print("  eval step", step + 1)
        preds = nested_numpify(all_preds)
        return {"eval_loss": sum(losses) / len(losses), "n": len(preds[0])}


def reviews(n_batches, batch_size, length=256):
    return [
        {"input_ids": torch.randint(0, 16424, (batch_size, length)), "labels": torch.randint(0, 2, (batch_size,))}
        for _ in range(n_batches)
    ]


def main():
    config = BertConfig(hidden_size=512, num_hidden_layers=8, num_attention_heads=8, intermediate_size=2048,
                        vocab_size=16424, output_hidden_states=True)
    trainer = Trainer(BertForSequenceClassification(config))
    trainer.train(reviews(5, 8))
    print(trainer.evaluate(reviews(40, 16)))


if __name__ == "__main__":
    main()
