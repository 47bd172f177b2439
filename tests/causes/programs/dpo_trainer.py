import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

torch.cuda.set_per_process_memory_fraction(4.5 * 2**30 / torch.cuda.get_device_properties(0).total_memory)

VOCAB = 128256
IGNORE_INDEX = -100


def build(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
                         num_key_value_heads=4, vocab_size=VOCAB, tie_word_embeddings=True)
    return LlamaForCausalLM(config).cuda()


def get_batch_logps(logits, labels):
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :]
    mask = labels != IGNORE_INDEX
    labels[~mask] = 0
    all_logps = logits.log_softmax(-1)
    per_token = torch.gather(all_logps, dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (per_token * mask).sum(-1)


class DPOTrainer:
    def __init__(self, policy, reference, beta=0.1):
        self.policy = policy
        self.reference = reference.eval().requires_grad_(False)
        self.beta = beta
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-6)

    def logps(self, model, batch):
        logits = model(input_ids=batch["input_ids"]).logits.float()
        chosen, rejected = get_batch_logps(logits, batch["labels"]).chunk(2)
        return chosen, rejected

    def step(self, batch):
        with torch.no_grad():
            ref_chosen, ref_rejected = self.logps(self.reference, batch)
        chosen, rejected = self.logps(self.policy, batch)
        margin = (chosen - rejected) - (ref_chosen - ref_rejected)
        loss = -F.logsigmoid(self.beta * margin).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def preference_batch(pairs=2, length=768, prompt=128):
    ids = torch.randint(0, VOCAB, (2 * pairs, length), device="cuda")
    labels = ids.clone()
    labels[:, :prompt] = IGNORE_INDEX
    return {"input_ids": ids, "labels": labels}


if __name__ == "__main__":
    trainer = DPOTrainer(build(0), build(0))
    for step in range(6):
        print("step", step, "loss", trainer.step(preference_batch()))
