# out_of_memory with expandable_segments: memory enough, in holes that are too small.
import torch
torch.cuda.set_per_process_memory_fraction(420 * 2**20 / torch.cuda.mem_get_info()[1])
def activations(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")  # <- fault
states = []
for layer in range(8):
    activations(40 + 2 * layer)
    states.append(torch.empty(30 << 20, dtype=torch.uint8, device="cuda"))
for step in range(40):
    activations(11 + step % 5)
activations(100)
