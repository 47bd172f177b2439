"""Character model trained with truncated back-propagation: the state goes on, its history does not."""
import atexit

import torch
from torch import nn
from torch.nn import functional as F


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class CharModel(nn.Module):
    def __init__(self, vocab=256, dim=1024):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.LSTM(dim, dim, 2, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens, state):
        out, state = self.rnn(self.embed(tokens), state)
        return self.head(out), state


def main():
    torch.manual_seed(0)
    gen = torch.Generator("cuda").manual_seed(0)
    text = torch.randint(0, 256, (64, 60 * 64 + 1), generator=gen, device="cuda")
    model = CharModel().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    state, average = None, None
    for window in range(60):
        chunk = text[:, window * 64:window * 64 + 65]
        logits, state = model(chunk[:, :-1], state)
        state = tuple(s.detach() for s in state)
        loss = F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average = loss.detach() if average is None else average.lerp(loss.detach(), 0.1)
        if window % 12 == 0:
            print(f"window {window} loss {average.item():.3f} allocated {torch.cuda.memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
