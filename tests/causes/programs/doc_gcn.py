"""Graph convolution over a word-document graph."""
import atexit
import sys

import torch
from torch import nn
from torch.nn import functional as F

FIXED = "--fixed" in sys.argv
CARD = torch.cuda.mem_get_info()[1]


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class GraphConv(nn.Module):
    def __init__(self, n_nodes, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_nodes, dim) * 0.01)

    def message(self, x_j, norm):
        return norm.view(-1, 1) * x_j

    def propagate(self, x, edge_index, norm):
        source, target = edge_index
        messages = self.message(x[source], norm)
        return torch.zeros_like(x).index_add(0, target, messages)

    def forward(self, edge_index, norm):
        if FIXED:
            adjacency = torch.sparse_coo_tensor(edge_index.flip(0), norm, (len(self.weight),) * 2, check_invariants=False)
            return torch.sparse.mm(adjacency, self.weight)
        return self.propagate(self.weight, edge_index, norm)


def word_document_graph(n_nodes, n_edges, gen):
    edge_index = torch.randint(0, n_nodes, (2, n_edges), generator=gen, device="cuda")
    degree = torch.bincount(edge_index[1], minlength=n_nodes).clamp_min(1).float()
    norm = (degree[edge_index[0]] * degree[edge_index[1]]).rsqrt()
    return edge_index, norm


def train(model, edge_index, norm, labels, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        out = model(edge_index, norm)
        loss = F.cross_entropy(out[:len(labels)], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f} peak {torch.cuda.max_memory_allocated() >> 20} MiB")


def main():
    torch.manual_seed(0)
    gen = torch.Generator("cuda").manual_seed(0)
    n_nodes, dim = 14049, 200
    n_edges = int(0.7 * CARD / (dim * 4))
    edge_index, norm = word_document_graph(n_nodes, n_edges, gen)
    labels = torch.randint(0, 8, (2000,), generator=gen, device="cuda")
    print(f"{n_edges} edges, allocated {torch.cuda.memory_allocated() >> 20} MiB")
    train(GraphConv(n_nodes, dim).cuda(), edge_index, norm, labels, 3)


if __name__ == "__main__":
    main()
