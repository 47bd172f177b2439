"""On-policy distillation: generate with the student, score with the teacher, update."""
import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB = 8000
STUDENT_DIM, STUDENT_LAYERS = 2048, 16
TEACHER_DIM, TEACHER_LAYERS = 4096, 19
BATCH, LENGTH = 8, 128
TOPK = 32
STEPS = 5

torch.cuda.set_per_process_memory_fraction(
    2.5 * 1024**3 / torch.cuda.get_device_properties(0).total_memory)
device = torch.device("cuda")
torch.manual_seed(0)


class TokenModel(nn.Module):
    def __init__(self, dim, layers):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList([nn.Linear(dim, dim) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + F.gelu(layer(self.norm(x)))
        return self.head(self.norm(x))


class Teacher:
    def __init__(self):
        self.model = TokenModel(TEACHER_DIM, TEACHER_LAYERS).eval()

    @torch.no_grad()
    def topk_logits(self, ids):
        self.model.to(device)
        values, indices = self.model(ids).topk(TOPK, dim=-1)
        self.model.to("cpu")
        torch.cuda.empty_cache()
        return values, indices


class Student:
    def __init__(self):
        self.model = TokenModel(STUDENT_DIM, STUDENT_LAYERS).to(device)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-5, foreach=False)

    @torch.no_grad()
    def generate(self, n_new=8):
        ids = torch.randint(0, VOCAB, (BATCH, LENGTH - n_new), device=device)
        for _ in range(n_new):
            nxt = torch.softmax(self.model(ids[:, -16:])[:, -1], -1).multinomial(1)
            ids = torch.cat([ids, nxt], dim=1)
        return ids

    def train(self, ids, values, indices):
        logits = self.model(ids).gather(-1, indices)
        loss = F.kl_div(logits.log_softmax(-1), values.log_softmax(-1),
                        log_target=True, reduction="batchmean")
        loss.backward()
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)
        return loss.item()


student, teacher = Student(), Teacher()
for step in range(STEPS):
    rollout = student.generate()
    values, indices = teacher.topk_logits(rollout)
    loss = student.train(rollout, values, indices)
    print(f"step {step} loss {loss:.4f} "
          f"allocated {torch.cuda.memory_allocated() / 2**20:.0f} MiB "
          f"peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
